"""`semi_variance`: the spread of positive pairs below, and of negative pairs above, a level each."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritonloss.ops.library import operator, refuse_second_derivative
from tritonloss.ops.shares import own_share
from tritonloss.ops.streaming import BlockPlan, budget_bytes, empty_scores, own_columns, rows_per_block


class SemiVariance(NamedTuple):
    """squares: [2], sums of squared deviations. selected: [2], how many pairs deviate. Positives first."""

    squares: Tensor
    selected: Tensor


def semi_variance(
    rows: Tensor,
    start: Tensor,
    count: Tensor,
    levels: Tensor,
    *,
    max_class_size: int | None = None,
    memory_budget: int | None = None,
) -> SemiVariance:
    """Squared deviations of the pairs (q, j), j != q, for every row q whose count is above 0.

    s = rows @ rows.T. Of the positives j of q, those with s_qj < levels[0] deviate by levels[0] - s_qj; of the
    negatives, those with s_qj > levels[1] by s_qj - levels[1].

    Args:
        rows: [N, D] float32 or float64, sorted by class.
        start, count: [N] int64, the class range of each row, itself included. A count of 0: the row is no query.
        levels: [2], same dtype.
        max_class_size, memory_budget: as for `soft_rank`.

    Returns:
        SemiVariance(squares [2], selected [2]), same dtype, added up in float64; the squares are differentiable once,
        in rows and levels.

    Time O(N^2 D), plain torch on every device: three passes over each block beside its matrix product. The similarity
    is not kept for the backward pass. Memory O(budget + N D).
    """
    share = own_share(rows.shape[0])
    own = slice(0, rows.shape[0]) if share is None else share.rows
    squares, selected, *_ = _semi_variance(
        rows,
        start[own],
        count[own],
        levels,
        own.start,
        -1 if max_class_size is None else max_class_size,
        budget_bytes(rows.device, memory_budget),
    )
    if share is not None:
        squares, selected = share.total(squares), share.total(selected)
    return SemiVariance(squares, selected)


def _deviations(
    rows: Tensor, levels: Tensor, plan: BlockPlan, first: int
) -> Iterator[tuple[slice, Tensor, Tensor, Tensor, Tensor]]:
    """Rows of a block; deviations of negatives [rows, N], 0 at positives; of positives [rows, width]; columns, use.

    The plan is of the rows from `first` on. An unused slot repeats the first column of its row and that column's
    deviation.
    """
    n_keys = rows.shape[0]
    scratch = empty_scores(plan.block_rows, n_keys, rows)
    for part, positives in plan:
        block = slice(first + part.start, first + part.stop)
        scores = scratch[: len(positives.count)]
        torch.mm(rows[block], rows.T, out=scores)
        columns, used = own_columns(positives, n_keys)
        is_query = (positives.count > 0)[:, None]
        is_other = columns != torch.arange(n_keys, device=rows.device)[block, None]
        below = (levels[0] - scores.gather(1, columns)).clamp_(min=0) * (is_other & is_query)
        above = scores.sub_(levels[1]).clamp_(min=0).scatter_(1, columns, 0)
        above *= is_query
        yield block, above, below, columns, used


def _plan(rows: Tensor, start: Tensor, count: Tensor, budget: int, width: int | None) -> BlockPlan:
    block = rows_per_block(rows.shape[0], rows.shape[0], rows.itemsize, rows.device, budget)
    return BlockPlan(start, count, block, width=width)


@operator("semi_variance")
def _semi_variance(
    rows: Tensor, start: Tensor, count: Tensor, levels: Tensor, first: int, max_class_size: int, budget: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Squares [2], selected [2], sums of the deviations [2], and [0, P] as for soft_rank.

    start, count: of the rows from `first` on.
    """
    plan = _plan(rows, start, count, budget, max_class_size if max_class_size >= 0 else None)
    sums = torch.zeros(3, 2, dtype=torch.float64, device=rows.device)
    for _, above, below, _, used in _deviations(rows, levels, plan, first):
        for side, deviation in enumerate((below * used, above)):
            sums[1, side] += deviation.count_nonzero()
            sums[2, side] += deviation.sum()
            sums[0, side] += deviation.square_().sum()
    squares, selected, total = (part.clone() for part in sums.to(rows.dtype))
    return squares, selected, total, rows.new_empty(0, plan.largest)


@_semi_variance.register_fake
def _(
    rows: Tensor, start: Tensor, count: Tensor, levels: Tensor, first: int, max_class_size: int, budget: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    largest: Any = max_class_size
    if max_class_size < 0:
        largest = torch.library.get_ctx().new_dynamic_size()
    return rows.new_empty(2), rows.new_empty(2), rows.new_empty(2), rows.new_empty(0, largest)


@operator("semi_variance_backward")
def _semi_variance_backward(
    grad_squares: Tensor,
    rows: Tensor,
    start: Tensor,
    count: Tensor,
    levels: Tensor,
    total: Tensor,
    extent: Tensor,
    first: int,
    budget: int,
) -> tuple[Tensor, Tensor]:
    """The gradients of the rows [N, D] and of the levels [2]."""
    grad_rows = torch.zeros_like(rows)
    plan = _plan(rows, start, count, budget, extent.shape[1])
    for block, above, below, columns, _ in _deviations(rows, levels, plan, first):
        grad = above.mul_(grad_squares[1]).scatter_(1, columns, below.mul_(-grad_squares[0]))
        grad_rows[block].addmm_(grad, rows)
        grad_rows.addmm_(grad.T, rows[block])
    return grad_rows.mul_(2), 2 * grad_squares * torch.stack([total[0], -total[1]])


@_semi_variance_backward.register_fake
def _(
    grad_squares: Tensor,
    rows: Tensor,
    start: Tensor,
    count: Tensor,
    levels: Tensor,
    total: Tensor,
    extent: Tensor,
    first: int,
    budget: int,
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(rows), torch.empty_like(levels)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    rows, start, count, levels, first, _, budget = inputs
    _, selected, total, extent = output
    ctx.save_for_backward(rows, start, count, levels, total, extent)
    ctx.options = first, budget
    ctx.mark_non_differentiable(selected, total, extent)


def _backward(ctx: Any, grad_squares: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    grad_rows, grad_levels = _semi_variance_backward(
        grad_squares.contiguous(), *ctx.saved_tensors, *ctx.options
    )
    return grad_rows, None, None, grad_levels, None, None, None


_semi_variance.register_autograd(_backward, setup_context=_save_for_backward)
_semi_variance_backward.register_autograd(refuse_second_derivative)
