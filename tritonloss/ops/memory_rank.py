"""`memory_rank`: how many entries of a row of remembered scores stand above each score, softly counted."""

from typing import Any, cast

import torch
from torch import Tensor

from tritonloss.ops.library import operator, refuse_second_derivative
from tritonloss.ops.streaming import budget_bytes, rows_per_block


def memory_rank(
    scores: Tensor,
    memory: Tensor,
    row: Tensor,
    *,
    temperature: float = 0.001,
    memory_budget: int | None = None,
) -> Tensor:
    """sum over the entries v of memory[row[m]] of l(scores[m] - v): a lower bound of the number of entries above.

    l(x) = (1 - e^(x / temperature)) / (1 + e^(x / temperature)) for x < 0, and 0 elsewhere: SOPRC's one-side sigmoid
    (arXiv 2209.13262, Eq. 7), tanh(-x / (2 temperature)). Its derivative at 0 is taken as 0.

    Args:
        scores: [M] float32 or float64.
        memory: [R, V], same dtype; constant, never given a gradient.
        row: [M] int64, in 0 .. R - 1.
        temperature: width of l, > 0. No value of it overflows.
        memory_budget: what the differences may take at a time; default as for `soft_rank`.

    Returns:
        [M], differentiable once, in the scores.

    Time O(M V), plain torch on every device: few elements beside those of `soft_rank`. Memory O(budget + M).
    """
    sums, _ = _memory_rank(
        scores,
        memory,
        row,
        float(temperature),
        budget_bytes(scores.device, memory_budget),
        torch.is_grad_enabled() and scores.requires_grad,
    )
    return cast(Tensor, sums)


@operator("memory_rank")
def _memory_rank(
    scores: Tensor, memory: Tensor, row: Tensor, temperature: float, budget: int, save: bool
) -> tuple[Tensor, Tensor]:
    """The sums of l [M] and, if `save`, of its derivative [M]."""
    sums = torch.empty_like(scores)
    slopes = torch.empty_like(scores if save else scores[:0])
    n_scores, n_entries = scores.shape[0], memory.shape[1]
    # Of an entry four numbers are held at a time.
    block = rows_per_block(n_scores, 4 * n_entries, memory.itemsize, memory.device, budget)
    for first in range(0, n_scores, block):
        part = slice(first, first + block)
        above = memory[row[part]].sub_(scores[part, None]).clamp_(min=0).div_(temperature)
        if save:
            # sech^2 from one exponential of a negative number: exact far out, where 1 - tanh^2 is rounding error.
            decay = torch.exp(-above).masked_fill_(above == 0, 0)
            slopes[part] = decay.div_((1 + decay).square_()).sum(1).mul_(-2 / temperature)
        sums[part] = above.div_(2).tanh_().sum(1)
    return sums, slopes


@_memory_rank.register_fake
def _(
    scores: Tensor, memory: Tensor, row: Tensor, temperature: float, budget: int, save: bool
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(scores), scores.new_empty(scores.shape[0] if save else 0)


@operator("memory_rank_backward")
def _memory_rank_backward(grad: Tensor, slopes: Tensor) -> Tensor:
    return grad * slopes


@_memory_rank_backward.register_fake
def _(grad: Tensor, slopes: Tensor) -> Tensor:
    return torch.empty_like(slopes)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    return _memory_rank_backward(grad.contiguous(), *ctx.saved_tensors), *[None] * 5


_memory_rank.register_autograd(_backward, setup_context=_save_for_backward)
_memory_rank_backward.register_autograd(refuse_second_derivative)
