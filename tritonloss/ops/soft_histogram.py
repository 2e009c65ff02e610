"""`soft_histogram`: where the similarities of positive and of negative pairs lie, linearly interpolated."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritonloss.backends import backend_module, selected_backend
from tritonloss.ops.library import operator, refuse_second_derivative
from tritonloss.ops.shares import Share, own_share, sharing
from tritonloss.ops.streaming import (
    MIN_ROWS,
    ROW_STRIDE_UNIT,
    budget_bytes,
    empty_scores,
    keeps_similarity,
    padded_scores,
    rows_per_block,
)


class SoftHistograms(NamedTuple):
    """positives, negatives: [bins + 1], or [Q, bins + 1] per query: the number of pairs at each node, float64."""

    positives: Tensor
    negatives: Tensor


def soft_histogram(
    queries: Tensor,
    keys: Tensor,
    start: Tensor,
    count: Tensor,
    bins: int = 100,
    *,
    per_query: bool = False,
    descending: bool = False,
    position: Tensor | None = None,
    memory_budget: int | None = None,
) -> SoftHistograms:
    """Histograms of s = queries @ keys.T over the nodes t_r = -1 + 2r / bins, r = 0 .. bins, for s in [-1, 1].

    A pair with t_r <= s <= t_(r+1) adds (t_(r+1) - s) bins / 2 to node r and (s - t_r) bins / 2 to node r + 1. A
    similarity outside [-1, 1] counts as the nearer end, and has no gradient. At a node the gradient is that of the bin
    above it, at the last node that of the last bin.

    Query q is the key position[q], and its positives are the keys start[q] .. start[q] + count[q] - 1; every other key
    is a negative. Over the batch a pair counts once: (q, k) is taken where k > position[q]. Per query, all keys count
    but position[q].

    Args:
        queries: [Q, D] float32 or float64, contiguous or not.
        keys: [N, D], same dtype and device; may be `queries` itself.
        start, count: [Q] int64. A count of 0 leaves the query out: no key counts for it.
        bins: at least 1; the sums cost the same for any number.
        per_query: a histogram for each query instead of one over the batch.
        descending: count the nodes down from 1, t_r = 1 - 2r / bins: the first bin holds the closest pairs.
        position: [Q] int64; -1 for a query that is none of the keys. None: query q is key q. Over the batch this form
            costs half, because whole blocks of pairs that were counted before are skipped.
        memory_budget: what the similarities may take; default TRITONLOSS_MEMORY_BUDGET, else 256 MiB on CPU, a
            sixteenth of the device on CUDA. If all of them fit they are kept for the backward pass, else recomputed.

    Returns:
        SoftHistograms(positives, negatives), [bins + 1] or [Q, bins + 1] float64, whose sums are the numbers of pairs.
        Pairs are counted as integers and their fractions added in fixed point, 24 bits or more: exact beyond 2^24
        pairs, off by at most 2^-24 of the pairs of a bin, the same in every run. A histogram with a NaN among its
        similarities is NaN. Differentiable once, in queries and keys.

    Time O(Q N D). Memory O(budget + (Q + N) D + bins), per query O(budget + (Q + N) D + Q bins).

    Raises:
        ValueError: bins or a budget below 1; more queries than keys without `position`.
        RuntimeError: the chosen backend cannot serve the device; a second derivative is asked for.
    """
    if bins < 1:
        raise ValueError(f"bins is {bins}: expected at least 1")
    if position is None and queries.shape[0] > keys.shape[0]:
        raise ValueError(
            f"position is None for {queries.shape[0]} queries and {keys.shape[0]} keys: expected as many keys"
        )
    halves = position is None and not per_query
    if (share := own_share(queries.shape[0], triangular=halves)) is not None:
        options = {"per_query": per_query, "descending": descending, "memory_budget": memory_budget}
        with sharing(None):
            part = _histograms_of_share(share, queries, keys, start, count, bins, position, halves, options)
        return SoftHistograms(*(share.gather(sums) if per_query else share.total(sums) for sums in part))
    histograms, _ = _soft_histogram(
        queries,
        keys,
        start,
        count,
        position,
        bins,
        per_query,
        descending,
        budget_bytes(queries.device, memory_budget),
        torch.is_grad_enabled() and (queries.requires_grad or keys.requires_grad),
        selected_backend(),
    )
    return SoftHistograms(*histograms.unbind(1 if per_query else 0))


def _histograms_of_share(
    share: Share,
    queries: Tensor,
    keys: Tensor,
    start: Tensor,
    count: Tensor,
    bins: int,
    position: Tensor | None,
    halves: bool,
    options: dict[str, Any],
) -> SoftHistograms:
    own, first = share.rows, share.rows.start
    if halves:
        # The first query of the share becomes the first key: no query is paired with a key before itself.
        stop = start[own] + count[own] - first
        start = (start[own] - first).clamp(min=0)
        count = torch.where(count[own] > 0, stop - start, 0)
        return soft_histogram(queries[own], keys[first:], start, count, bins, **options)
    if position is None:
        position = torch.arange(queries.shape[0], device=queries.device)
    return soft_histogram(queries[own], keys, start[own], count[own], bins, position=position[own], **options)


def running_sum(values: Tensor) -> Tensor:
    """The inclusive running sums along the last dimension, by matrix products with blocks of ones.

    torch.cumsum refuses to run on CUDA under torch.use_deterministic_algorithms.
    """
    n, width = values.shape[-1], 128
    ones = torch.ones(min(n, width), min(n, width), dtype=values.dtype, device=values.device).triu()
    if n <= width:
        return values @ ones
    padded = torch.nn.functional.pad(values, (0, -n % width))
    within = padded.view(*values.shape[:-1], -1, width) @ ones
    before = running_sum(within[..., -1]) - within[..., -1]
    return (within + before[..., None]).flatten(-2)[..., :n]


def key_ranges(start: Tensor, count: Tensor, position: Tensor | None, n_keys: int, per_query: bool) -> Tensor:
    """[Q, 4] int64: the first positive of each query and the key behind the last, the same of the hidden keys."""
    if position is None:
        position = torch.arange(start.shape[0], device=start.device)
    is_query = count > 0
    hidden_start = torch.where(is_query, position, 0) if per_query else torch.zeros_like(position)
    hidden_stop = torch.where(is_query, position + 1, n_keys)
    return torch.stack([start, start + count, hidden_start, hidden_stop], 1)


class Tables:
    """Numbers of pairs and sums of fractions by bin, and what becomes of them: a value at each node.

    counts [G, 2, bins + 2] int64 and fractions, the same in float64, are what the backends add to; the last entry is
    the number of NaN.
    """

    def __init__(self, n_tables: int, bins: int, device: torch.device) -> None:
        self.counts = torch.zeros(n_tables, 2, bins + 2, dtype=torch.int64, device=device)
        self.fractions = torch.zeros(n_tables, 2, bins + 2, dtype=torch.float64, device=device)

    def histograms(self) -> Tensor:
        """[G, 2, bins + 1] float64: node r has what the fractions leave of bin r, and the fractions of bin r - 1."""
        fractions = self.fractions[..., :-1]
        histograms = self.counts[..., :-1] - fractions
        histograms[..., 1:] += fractions[..., :-1]
        return histograms.masked_fill_(self.counts[..., -1:] > 0, torch.nan)


def slope_tables(grad: Tensor, descending: bool, dtype: torch.dtype) -> Tensor:
    """The derivative of every bin by the similarity, [G, 2, bins]; grad: of the histograms, [G, 2, bins + 1]."""
    bins = grad.shape[-1] - 1
    return (grad.diff(dim=-1) * (-bins / 2 if descending else bins / 2)).to(dtype).contiguous()


# Sizes are read from .shape: len() would turn a symbolic size into a constant and recompile for every batch size.
def _block_rows(queries: Tensor, keys: Tensor, budget: int) -> int:
    return rows_per_block(queries.shape[0], keys.shape[0], keys.itemsize, keys.device, budget)


def _keeps_similarity(queries: Tensor, keys: Tensor, save: bool, budget: int) -> bool:
    return save and keeps_similarity(queries.shape[0], keys.shape[0], keys.itemsize, budget)


def _blocks(queries: Tensor, keys: Tensor, budget: int, skips: bool) -> Iterator[tuple[slice, int]]:
    """The row blocks and the first key of each; `skips`: a query is paired with the keys behind itself only."""
    size, n_rows = _block_rows(queries, keys, budget), queries.shape[0]
    if skips and queries.device.type == "cpu":
        # What a block skips is decided by its first row. Launches, which a GPU would have more of, cost little here.
        size = min(size, max(MIN_ROWS["cpu"], n_rows // 8))
    for first in range(0, n_rows, size):
        # Kernels rely on the alignment of the first score of a row.
        first_key = first // ROW_STRIDE_UNIT * ROW_STRIDE_UNIT if skips else 0
        yield slice(first, min(first + size, n_rows)), first_key


@operator("soft_histogram")
def _soft_histogram(
    queries: Tensor,
    keys: Tensor,
    start: Tensor,
    count: Tensor,
    position: Tensor | None,
    bins: int,
    per_query: bool,
    descending: bool,
    budget: int,
    save: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Histograms [2, bins + 1] or [Q, 2, bins + 1]; if `save` and it is kept, the similarity [Q, padded N]."""
    n_queries, n_keys = queries.shape[0], keys.shape[0]
    keep = _keeps_similarity(queries, keys, save, budget)
    similarity = padded_scores(n_queries if keep else 0, n_keys, queries)
    scratch = empty_scores(0 if keep else _block_rows(queries, keys, budget), n_keys, queries)
    ranges = key_ranges(start, count, position, n_keys, per_query)
    histograms = queries.new_empty(n_queries if per_query else 0, 2, bins + 1, dtype=torch.float64)
    tables = Tables(1, bins, queries.device)
    module = backend_module(backend, queries.device)
    for rows, first in _blocks(queries, keys, budget, position is None and not per_query):
        n_rows = rows.stop - rows.start
        scores = (similarity[rows, :n_keys] if keep else scratch[:n_rows])[:, first:]
        torch.mm(queries[rows], keys[first:].T, out=scores)
        if per_query:
            tables = Tables(n_rows, bins, queries.device)
        module.soft_histogram_forward(
            scores, ranges[rows], first, descending, tables.counts, tables.fractions
        )
        if per_query:
            histograms[rows] = tables.histograms()
    return histograms if per_query else tables.histograms()[0], similarity


@_soft_histogram.register_fake
def _(
    queries: Tensor,
    keys: Tensor,
    start: Tensor,
    count: Tensor,
    position: Tensor | None,
    bins: int,
    per_query: bool,
    descending: bool,
    budget: int,
    save: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    shape = (queries.shape[0], 2, bins + 1) if per_query else (2, bins + 1)
    keep = _keeps_similarity(queries, keys, save, budget)
    similarity = padded_scores(queries.shape[0] if keep else 0, keys.shape[0], queries)
    return queries.new_empty(shape, dtype=torch.float64), similarity


@operator("soft_histogram_backward")
def _soft_histogram_backward(
    grad_histograms: Tensor,
    queries: Tensor,
    keys: Tensor,
    start: Tensor,
    count: Tensor,
    position: Tensor | None,
    similarity: Tensor,
    per_query: bool,
    descending: bool,
    budget: int,
    backend: str,
    need_queries: bool,
    need_keys: bool,
) -> tuple[Tensor, Tensor]:
    """The gradients of queries [Q, D] and keys [N, D]; an unneeded one is empty."""
    grad_queries = torch.zeros_like(queries) if need_queries else queries.new_empty(0)
    grad_keys = torch.zeros_like(keys) if need_keys else keys.new_empty(0)
    n_keys, block_rows = keys.shape[0], _block_rows(queries, keys, budget)
    kept = similarity.shape[0] > 0
    scratch = empty_scores(0 if kept else block_rows, n_keys, queries)
    scratch_grad = empty_scores(block_rows, n_keys, queries)
    ranges = key_ranges(start, count, position, n_keys, per_query)
    slopes = slope_tables(grad_histograms if per_query else grad_histograms[None], descending, queries.dtype)
    module = backend_module(backend, queries.device)
    for rows, first in _blocks(queries, keys, budget, position is None and not per_query):
        n_rows = rows.stop - rows.start
        grad = scratch_grad[:n_rows, first:]
        scores = (similarity[rows, :n_keys] if kept else scratch[:n_rows])[:, first:]
        if not kept:
            torch.mm(queries[rows], keys[first:].T, out=scores)
        module.soft_histogram_backward(
            scores, ranges[rows], first, descending, slopes[rows] if per_query else slopes, grad
        )
        if need_queries:
            torch.mm(grad, keys[first:], out=grad_queries[rows])
        if need_keys:
            grad_keys[first:].addmm_(grad.T, queries[rows])
    return grad_queries, grad_keys


@_soft_histogram_backward.register_fake
def _(
    grad_histograms: Tensor,
    queries: Tensor,
    keys: Tensor,
    start: Tensor,
    count: Tensor,
    position: Tensor | None,
    similarity: Tensor,
    per_query: bool,
    descending: bool,
    budget: int,
    backend: str,
    need_queries: bool,
    need_keys: bool,
) -> tuple[Tensor, Tensor]:
    grad_queries = torch.empty_like(queries) if need_queries else queries.new_empty(0)
    return grad_queries, torch.empty_like(keys) if need_keys else keys.new_empty(0)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    queries, keys, start, count, position, _, per_query, descending, budget, _, backend = inputs
    _, similarity = output
    ctx.save_for_backward(queries, keys, start, count, position, similarity)
    ctx.options = per_query, descending, budget, backend
    ctx.mark_non_differentiable(similarity)


def _backward(ctx: Any, grad_histograms: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    need_queries, need_keys = ctx.needs_input_grad[:2]
    grad_queries, grad_keys = _soft_histogram_backward(
        grad_histograms.contiguous(), *ctx.saved_tensors, *ctx.options, need_queries, need_keys
    )
    return grad_queries if need_queries else None, grad_keys if need_keys else None, *[None] * 9


_soft_histogram.register_autograd(_backward, setup_context=_save_for_backward)
_soft_histogram_backward.register_autograd(refuse_second_derivative)
