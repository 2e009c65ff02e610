"""`pair_logsumexp` of one block of scores in plain torch: any device, float32 or float64.

`ranges` [rows, 4] int64: the columns start .. stop - 1 are a row's positives, hidden_start .. hidden_stop - 1 do not
count for it, all others are its negatives; a hidden column is no positive. What lies outside the row is cut off.

`maps` [2, 3], positives first, in the dtype of the scores: scale, offset and width of the exponent map of each side.
With y = scale s + offset, "linear" is x = y; "circle" is x = y a with a = relu(y / |scale| + width), and this factor is
a constant for the gradient.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class _Columns(NamedTuple):
    """Columns of each row, [rows, width] int64; the slots that are not used repeat the first column of the row."""

    column: Tensor
    is_used: Tensor

    def put(self, values: Tensor | float, block: Tensor) -> None:
        """Write values [rows, width], or one number, to these columns of the block [rows, N]."""
        rest = block.gather(1, self.column[:, :1])
        if isinstance(values, Tensor):
            rest = torch.where(self.is_used[:, :1], values[:, :1], rest)
            block.scatter_(1, self.column, torch.where(self.is_used, values, rest))
        else:
            rest.masked_fill_(self.is_used[:, :1], values)
            block.scatter_(1, self.column, rest.expand_as(self.column))


def _columns(ranges: Tensor, n_columns: int) -> tuple[_Columns | None, _Columns | None]:
    """The positives and the hidden columns of a block; None where no row has one."""
    ranges = ranges.clamp(0, n_columns)
    count = ranges[:, 1::2] - ranges[:, ::2]
    widths = count.amax(0).tolist() if len(ranges) else [0, 0]
    parts: list[_Columns | None] = []
    for side, width in enumerate(widths):
        if width < 1:
            parts.append(None)
            continue
        slot = torch.arange(width, device=ranges.device)
        is_used = slot < count[:, side : side + 1]
        start = ranges[:, 2 * side : 2 * side + 1].clamp(max=n_columns - 1)
        parts.append(_Columns(torch.where(is_used, start + slot, start), is_used))
    return parts[0], parts[1]


def _is_counted(positives: _Columns, ranges: Tensor) -> Tensor:
    """Which slots hold a positive that is not hidden."""
    is_hidden = (positives.column >= ranges[:, 2:3]) & (positives.column < ranges[:, 3:])
    return positives.is_used & ~is_hidden


def _exponents(
    scores: Tensor, numbers: list[float], exponent_map: str, out: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """x, in `out`, and the factor by which its slope is not the scale, None for 1."""
    scale, offset, width = numbers
    y = torch.add(scores.new_full((), offset), scores, alpha=scale, out=out)
    if exponent_map == "linear":
        return y, None
    factor = torch.mul(y, 1 / abs(scale)).add_(width).relu_()
    return y.mul_(factor), factor


def _log_sum_exp(x: Tensor) -> Tensor:
    """ln of the sum of e^x over each row [rows]; x is overwritten."""
    if not x.shape[1]:
        return x.new_full(x.shape[:1], -torch.inf)
    # Finite, so that an infinite exponent makes its own power infinite, and no other one NaN; the bound of the kernels.
    largest = 2.0**1022 if x.dtype == torch.float64 else 2.0**126
    peak = x.amax(1).clamp_(-largest, largest)
    return x.sub_(peak[:, None]).exp_().sum(1).log_().add_(peak)


def pair_logsumexp_forward(
    scores: Tensor, ranges: Tensor, maps: Tensor, exponent_map: str, positive: Tensor, negative: Tensor
) -> None:
    """Write ln of the sum of e^x over the positives and over the negatives of each row into two tensors [rows].

    A sum of nothing is -inf. Beside the scores [rows, N] one block of memory for "linear", two for "circle".
    """
    own, other = maps.tolist()
    positives, hidden = _columns(ranges, scores.shape[1])
    x, _ = _exponents(scores, other, exponent_map)
    for columns in (positives, hidden):
        if columns is not None:
            columns.put(-torch.inf, x)
    negative.copy_(_log_sum_exp(x))
    if positives is None:
        positive.fill_(-torch.inf)
        return
    x, _ = _exponents(scores.gather(1, positives.column), own, exponent_map)
    positive.copy_(_log_sum_exp(x.masked_fill_(~_is_counted(positives, ranges), -torch.inf)))


def _weighted_slopes(
    scores: Tensor, numbers: list[float], exponent_map: str, total: Tensor, grad: Tensor, out: Tensor | None
) -> Tensor:
    """The derivative of the scores for the gradient `grad` [rows] of the logarithms `total` [rows] of the sums."""
    x, factor = _exponents(scores, numbers, exponent_map, out)
    # The logarithm of an empty sum is not subtracted: 0 serves every exponent of -inf.
    x.sub_(total.masked_fill(total == -torch.inf, 0)[:, None]).exp_()
    if factor is not None:
        x.mul_(factor)
    return x.mul_((grad * numbers[0])[:, None])


def pair_logsumexp_backward(
    scores: Tensor,
    ranges: Tensor,
    maps: Tensor,
    exponent_map: str,
    positive: Tensor,
    negative: Tensor,
    grad_positive: Tensor,
    grad_negative: Tensor,
    grad_positive_scores: Tensor | None,
    grad_scores: Tensor,
) -> None:
    """Write the gradient of the block's scores into `grad_scores` [rows, N], 0 for hidden columns.

    positive, negative: as the forward pass wrote them, [rows]; grad_positive, grad_negative: their gradients.
    grad_positive_scores: [rows, width], slot k of a row is the gradient of its column start + k, ignored where that is
    hidden or no positive; None for 0.
    """
    own, other = maps.tolist()
    positives, hidden = _columns(ranges, scores.shape[1])
    own_grads = None
    if positives is not None:
        score = scores.gather(1, positives.column)
        own_grads = _weighted_slopes(score, own, exponent_map, positive, grad_positive, None)
        if grad_positive_scores is not None:
            own_grads += grad_positive_scores[:, : own_grads.shape[1]]
    _weighted_slopes(scores, other, exponent_map, negative, grad_negative, grad_scores)
    if positives is not None and own_grads is not None:
        positives.put(own_grads, grad_scores)
    if hidden is not None:
        hidden.put(0.0, grad_scores)
