"""`soft_rank` on a score matrix that the caller has, with any set of positives and of negatives in each row."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tritonloss.backends import backend_module, large_classes, selected_backend
from tritonloss.layout import Positives
from tritonloss.ops.library import operator, refuse_second_derivative
from tritonloss.ops.shares import own_share, sharing
from tritonloss.ops.soft_rank import SURROGATES, SoftRanks
from tritonloss.ops.streaming import BlockPlan, budget_bytes, empty_scores, rows_per_block


def soft_rank_scores(
    scores: Tensor,
    positives: Tensor,
    negatives: Tensor,
    *,
    surrogate: str = "sigmoid",
    temperature: float = 0.01,
    max_positives: int | None = None,
    memory_budget: int | None = None,
) -> SoftRanks:
    """R[q, i] = sum over the negatives j of row q of g((s_qj - s_qi) / temperature), for every positive i of row q.

    Args:
        scores: [Q, N] float32 or float64, contiguous or not: s.
        positives, negatives: [Q, N] bool. A column that is neither is left out, one that is both counts as positive.
        surrogate, temperature: as for `soft_rank`.
        max_positives: a bound of the positives of a row, in place of the one host sync of the call, as
            `max_class_size` for `soft_rank`.
        memory_budget: what a sorted block of rows may take; default as for `soft_rank`.

    Returns:
        SoftRanks(ranks [M], scores [M]), M the number of positives, those of row 0 first and ascending by column;
        differentiable once, in the scores.

    Time O(Q N + sum over q of positives x negatives). Memory O(block + M) beside the inputs and their gradient: a few
    numbers a column for one block of rows, which is one row at least.

    Raises:
        ValueError: unknown surrogate, a budget below 1, a temperature that is not positive.
        RuntimeError: the chosen backend cannot serve the device; a second derivative is asked for.
    """
    if surrogate not in SURROGATES:
        raise ValueError(f"surrogate is {surrogate!r}: expected one of {', '.join(SURROGATES)}")
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}: expected a number above 0")
    if (share := own_share(scores.shape[0])) is not None:
        with sharing(None):
            part = soft_rank_scores(
                scores[share.rows],
                positives[share.rows],
                negatives[share.rows],
                surrogate=surrogate,
                temperature=temperature,
                memory_budget=memory_budget,
            )
        count = positives.sum(1)
        return SoftRanks(*(share.gather_segments(sums, count) for sums in (part.ranks, part.scores)))
    ranks, positive_scores, *_ = _soft_rank_scores(
        scores,
        positives,
        negatives,
        surrogate,
        float(temperature),
        -1 if max_positives is None else max_positives,
        budget_bytes(scores.device, memory_budget),
        torch.is_grad_enabled() and scores.requires_grad,
        selected_backend(),
    )
    return SoftRanks(ranks, positive_scores * temperature)


class _SortedBlocks:
    """The rows of a score matrix in blocks whose columns are permuted: positives first, in their order, then the rest.

    What is neither positive nor negative becomes -inf, of which every surrogate and its derivative are exactly 0.
    """

    def __init__(self, scores: Tensor, positives: Tensor, negatives: Tensor, scale: float) -> None:
        self.scores, self.positives, self.negatives, self.scale = scores, positives, negatives, scale

    def place(self, rows: slice) -> Tensor:
        """The new column of each column of the block: a permutation of every row."""
        positive = self.positives[rows]
        rank = torch.cumsum(positive, 1)
        column = torch.arange(1, rank.shape[1] + 1, device=rank.device)
        return torch.where(positive, rank, column - rank + rank[:, -1:]).sub_(1)

    def write(self, rows: slice, place: Tensor, block: Tensor) -> None:
        unused = ~(self.positives[rows] | self.negatives[rows])
        block.scatter_(1, place, (self.scores[rows] / self.scale).masked_fill_(unused, -torch.inf))


def _plan(scores: Tensor, positives: Tensor, budget: int, width: int | None) -> BlockPlan:
    # Beside the sorted block, its permutation and the temporaries of both take about four times as much.
    rows = rows_per_block(scores.shape[0], scores.shape[1], 4 * scores.itemsize, scores.device, budget)
    count = positives.sum(1)
    return BlockPlan(torch.zeros_like(count), count, rows, width=width)


def _blocks(plan: BlockPlan, scores: Tensor) -> Iterator[tuple[slice, Positives, Tensor]]:
    """Rows, their positives, and the memory of the sorted block, which every block reuses."""
    scratch = empty_scores(plan.block_rows, scores.shape[1], scores)
    for rows, positives in plan:
        yield rows, positives, scratch[: len(positives.count)]


@operator("soft_rank_scores")
def _soft_rank_scores(
    scores: Tensor,
    positives: Tensor,
    negatives: Tensor,
    surrogate: str,
    temperature: float,
    max_positives: int,
    budget: int,
    save: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ranks [M], scores / temperature [M], slopes [M] if `save`, and [0, P], P the most positives of a row."""
    bounded = max_positives >= 0
    if bounded:
        torch._assert_async((positives.sum(1) <= max_positives).all(), "more positives than max_positives")
    plan = _plan(scores, positives, budget, max_positives if bounded else None)
    new = scores.new_zeros if bounded else scores.new_empty
    ranks, positive_scores = new(plan.n_pairs), new(plan.n_pairs)
    slopes = new(plan.n_pairs if save else 0)
    module = backend_module(backend, scores.device)
    order = _SortedBlocks(scores, positives, negatives, temperature)
    for rows, own, block in _blocks(plan, scores):
        order.write(rows, order.place(rows), block)
        algorithm = large_classes.choose(module, block, own, surrogate, math.inf)
        (algorithm or module).soft_rank_forward(
            block, own, surrogate, ranks, slopes if save else None, positive_scores
        )
    return ranks, positive_scores, slopes, scores.new_empty(0, plan.largest)


@_soft_rank_scores.register_fake
def _(
    scores: Tensor,
    positives: Tensor,
    negatives: Tensor,
    surrogate: str,
    temperature: float,
    max_positives: int,
    budget: int,
    save: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    n_pairs: Any = scores.shape[0] * max_positives
    largest: Any = max_positives
    if max_positives < 0:
        context = torch.library.get_ctx()
        n_pairs, largest = context.new_dynamic_size(), context.new_dynamic_size()
    return (
        scores.new_empty(n_pairs),
        scores.new_empty(n_pairs),
        scores.new_empty(n_pairs if save else 0),
        scores.new_empty(0, largest),
    )


@operator("soft_rank_scores_backward")
def _soft_rank_scores_backward(
    grad_ranks: Tensor,
    grad_positive_scores: Tensor,
    scores: Tensor,
    positives: Tensor,
    negatives: Tensor,
    positive_scores: Tensor,
    slopes: Tensor,
    extent: Tensor,
    surrogate: str,
    temperature: float,
    budget: int,
    backend: str,
) -> Tensor:
    """The gradient of the scores [Q, N]."""
    grad_scores = scores.new_zeros(scores.shape)
    plan = _plan(scores, positives, budget, extent.shape[1])
    scratch_grad = empty_scores(plan.block_rows, scores.shape[1], scores)
    module = backend_module(backend, scores.device)
    order = _SortedBlocks(scores, positives, negatives, temperature)
    for rows, own, block in _blocks(plan, scores):
        place = order.place(rows)
        order.write(rows, place, block)
        grad = scratch_grad[: len(own.count)]
        algorithm = large_classes.choose(module, block, own, surrogate, math.inf)
        (algorithm or module).soft_rank_backward(
            block, own, surrogate, slopes, positive_scores, grad_ranks, grad_positive_scores, grad
        )
        torch.gather(grad, 1, place, out=grad_scores[rows])
    return grad_scores.div_(temperature)


@_soft_rank_scores_backward.register_fake
def _(
    grad_ranks: Tensor,
    grad_positive_scores: Tensor,
    scores: Tensor,
    positives: Tensor,
    negatives: Tensor,
    positive_scores: Tensor,
    slopes: Tensor,
    extent: Tensor,
    surrogate: str,
    temperature: float,
    budget: int,
    backend: str,
) -> Tensor:
    return scores.new_empty(scores.shape)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    scores, positives, negatives, surrogate, temperature, _, budget, _, backend = inputs
    _, *saved = output
    ctx.save_for_backward(scores, positives, negatives, *saved)
    ctx.options = surrogate, temperature, budget, backend
    ctx.mark_non_differentiable(*saved[1:])


def _backward(ctx: Any, grad_ranks: Tensor, grad_scores: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    grad = _soft_rank_scores_backward(
        grad_ranks.contiguous(), grad_scores.contiguous(), *ctx.saved_tensors, *ctx.options
    )
    return grad, *[None] * 8


_soft_rank_scores.register_autograd(_backward, setup_context=_save_for_backward)
_soft_rank_scores_backward.register_autograd(refuse_second_derivative)
