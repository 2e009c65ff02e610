"""`soft_histogram` of scores that no matrix product gives: of any distance object, or of a list of pairs."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tritonloss.backends import backend_module, selected_backend
from tritonloss.distances import Distance, call_with_parameters, parameters_of
from tritonloss.ops.library import refuse_second_derivative
from tritonloss.ops.shares import own_share
from tritonloss.ops.soft_histogram import SoftHistograms, Tables, key_ranges, slope_tables
from tritonloss.ops.streaming import budget_bytes, empty_scores, rows_per_block


@dataclass(frozen=True)
class ScoreBlock:
    """Scores that are computed when they are needed, and again for the backward pass.

    scores: embeddings [N, D], parameters of the distance -> [rows, columns]. ranges [rows, 4] as of `key_ranges`;
    column 0 is key `first`. tables: those of the rows, where each has its own.
    """

    scores: Callable[[Tensor, Sequence[Tensor]], Tensor]
    ranges: Tensor
    first: int
    tables: slice | None = None


Blocks = Callable[[], Iterable[ScoreBlock]]


def distance_histogram(
    embeddings: Tensor,
    distance: Callable[[Tensor, Tensor], Tensor],
    start: Tensor,
    count: Tensor,
    bins: int,
    *,
    per_query: bool = False,
    descending: bool = False,
    memory_budget: int | None = None,
) -> SoftHistograms:
    """`soft_histogram` of the values of `distance(block of embeddings, embeddings)` in place of the dot product.

    The distance is called on one block of rows after the other, and again in the backward pass: nothing of size N x N
    is kept. Its parameters, if it is a module, get their gradient. torch.compile leaves its graph here.

    Args:
        embeddings: [N, D] float32 or float64.
        distance: takes [rows, D] and [columns, D], returns [rows, columns] with values in [-1, 1].
        start, count, bins, per_query, descending, memory_budget, result: as for `soft_histogram`.

    Time and memory are those of `soft_histogram`, plus what the distance needs for a block.
    """
    n = embeddings.shape[0]
    budget = budget_bytes(embeddings.device, memory_budget)
    size = rows_per_block(n, n, embeddings.itemsize, embeddings.device, budget)
    ranges = key_ranges(start, count, None, n, per_query)
    share = own_share(n, triangular=not per_query)
    own = slice(0, n) if share is None else share.rows

    def blocks() -> Iterator[ScoreBlock]:
        for first in range(own.start, own.stop, size):
            rows = slice(first, min(first + size, own.stop))
            first_key = 0 if per_query else first
            table = slice(first - own.start, rows.stop - own.start)
            yield ScoreBlock(partial(_matrix, distance, rows, first_key), ranges[rows], first_key, table)

    n_tables = own.stop - own.start if per_query else None
    histograms = _histograms(blocks, n_tables, bins, descending, embeddings, distance)
    if share is None:
        return histograms
    return SoftHistograms(*(share.gather(sums) if per_query else share.total(sums) for sums in histograms))


def pair_histogram(
    embeddings: Tensor,
    left: Tensor,
    right: Tensor,
    n_positives: int,
    bins: int,
    *,
    distance: Distance | None = None,
    memory_budget: int | None = None,
) -> SoftHistograms:
    """The histograms of listed pairs over the nodes of `soft_histogram`: of the first `n_positives`, and of the rest.

    Args:
        embeddings: [N, D] float32 or float64.
        left, right: [M] int64, the rows of each pair; ascending in `left` within each of the two parts.
        distance: None for the dot product.
        bins, memory_budget, result: as for `soft_histogram`.

    Time O(M D), with a distance O(N^2 D). Memory O(budget + N D + M). Deterministic.
    """
    budget = budget_bytes(embeddings.device, memory_budget)
    ranges = torch.tensor([[0, n_positives, 0, 0]], device=embeddings.device)
    if distance is None:
        blocks = partial(_dot_blocks, embeddings, left, right, ranges, budget)
    else:
        blocks = partial(_listed_blocks, embeddings, distance, left, right, n_positives, ranges, budget)
    return _histograms(blocks, None, bins, False, embeddings, distance)


def _dot_blocks(
    embeddings: Tensor, left: Tensor, right: Tensor, ranges: Tensor, budget: int
) -> Iterator[ScoreBlock]:
    n_pairs, width = left.shape[0], embeddings.shape[1]
    size = rows_per_block(n_pairs, width, embeddings.itemsize, embeddings.device, budget)
    for first in range(0, n_pairs, size):
        part = slice(first, first + size)
        yield ScoreBlock(partial(_dot_products, left[part], right[part]), ranges, first)


def _dot_products(left: Tensor, right: Tensor, embeddings: Tensor, _: Sequence[Tensor]) -> Tensor:
    # The gradient of F.embedding is summed in a fixed order, that of an index is not.
    return (F.embedding(left, embeddings) * F.embedding(right, embeddings)).sum(1)[None]


def _listed_blocks(
    embeddings: Tensor,
    distance: Distance,
    left: Tensor,
    right: Tensor,
    n_positives: int,
    ranges: Tensor,
    budget: int,
) -> Iterator[ScoreBlock]:
    n = embeddings.shape[0]
    size = rows_per_block(n, n, embeddings.itemsize, embeddings.device, budget)
    edges = torch.arange(0, n + size, size, device=left.device)
    for offset, part in ((0, left[:n_positives]), (n_positives, left[n_positives:])):
        # A distance gives whole matrices only: those of the rows that have pairs.
        bounds = (torch.searchsorted(part.contiguous(), edges) + offset).tolist()
        for index, (begin, end) in enumerate(pairwise(bounds)):
            if begin < end:
                rows = slice(index * size, min((index + 1) * size, n))
                listed = left[begin:end] - rows.start, right[begin:end]
                yield ScoreBlock(partial(_listed, partial(_matrix, distance, rows, 0), listed), ranges, begin)


def _listed(
    matrix: Callable[[Tensor, Sequence[Tensor]], Tensor],
    entries: tuple[Tensor, Tensor],
    embeddings: Tensor,
    parameters: Sequence[Tensor],
) -> Tensor:
    return matrix(embeddings, parameters)[entries][None]


def _matrix(
    distance: Callable[[Tensor, Tensor], Tensor],
    rows: slice,
    first: int,
    embeddings: Tensor,
    parameters: Sequence[Tensor],
) -> Tensor:
    """distance(embeddings[rows], embeddings[first:])."""
    matrix = call_with_parameters(distance, parameters, embeddings[rows], embeddings[first:])
    expected = rows.stop - rows.start, embeddings.shape[0] - first
    if matrix.shape != expected:
        raise ValueError(f"distance must return shape {list(expected)}, got {list(matrix.shape)}")
    return matrix.to(embeddings.dtype)


def _histograms(
    blocks: Blocks, n_tables: int | None, bins: int, descending: bool, embeddings: Tensor, distance: Any
) -> SoftHistograms:
    """n_tables: None for one histogram over all blocks, else the number of rows that have their own."""
    histograms = _BlockHistogram.apply(  # type: ignore[no-untyped-call]
        blocks, n_tables, bins, descending, selected_backend(), embeddings, *parameters_of(distance)
    )
    return SoftHistograms(*histograms.unbind(0 if n_tables is None else 1))


def _in_kernel_layout(scores: Tensor) -> Tensor:
    return empty_scores(scores.shape[0], scores.shape[1], scores).copy_(scores)


class _BlockHistogram(torch.autograd.Function):
    """[2, bins + 1], or [n_tables, 2, bins + 1] of single rows."""

    @staticmethod
    def forward(
        ctx: Any,
        blocks: Blocks,
        n_tables: int | None,
        bins: int,
        descending: bool,
        backend: str,
        embeddings: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        module = backend_module(backend, embeddings.device)
        total = Tables(1 if n_tables is None else n_tables, bins, embeddings.device)
        for block in blocks():
            scores = _in_kernel_layout(block.scores(embeddings, parameters))
            # A slice of rows: the backends add to the tables in place.
            counts, fractions = (
                t if n_tables is None else t[block.tables] for t in (total.counts, total.fractions)
            )
            module.soft_histogram_forward(scores, block.ranges, block.first, descending, counts, fractions)
        ctx.save_for_backward(embeddings, *parameters)
        ctx.options = blocks, n_tables, descending, backend
        histograms = total.histograms()
        return histograms[0] if n_tables is None else histograms

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[5:]
        return *[None] * 5, *_BlockHistogramBackward.apply(grad, needed, ctx.options, *ctx.saved_tensors)  # type: ignore[no-untyped-call]


class _BlockHistogramBackward(torch.autograd.Function):
    """The gradients of the embeddings and of the distance's parameters; None where `needed` is False."""

    @staticmethod
    def forward(
        ctx: Any,
        grad: Tensor,
        needed: tuple[bool, ...],
        options: Any,
        embeddings: Tensor,
        *parameters: Tensor,
    ) -> tuple[Tensor | None, ...]:
        blocks, n_tables, descending, backend = options
        module = backend_module(backend, embeddings.device)
        slopes = slope_tables(grad[None] if n_tables is None else grad, descending, embeddings.dtype)
        leaf = embeddings.detach().requires_grad_(needed[0])
        wanted = [tensor for tensor, need in zip((leaf, *parameters), needed, strict=True) if need]
        totals = [torch.zeros_like(tensor) for tensor in wanted]
        for block in blocks():
            with torch.enable_grad():
                scores = block.scores(leaf, parameters)
            grad_scores = empty_scores(scores.shape[0], scores.shape[1], embeddings)
            module.soft_histogram_backward(
                _in_kernel_layout(scores.detach()),
                block.ranges,
                block.first,
                descending,
                slopes if n_tables is None else slopes[block.tables],
                grad_scores,
            )
            # The backward pass may run inside a user's autocast.
            with torch.autocast(embeddings.device.type, enabled=False):
                grads = torch.autograd.grad(scores, wanted, grad_scores, allow_unused=True)
            for total, block_grad in zip(totals, grads, strict=True):
                if block_grad is not None:
                    total += block_grad
        given = iter(totals)
        return tuple(next(given) if need else None for need in needed)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        refuse_second_derivative(ctx, *grads)
