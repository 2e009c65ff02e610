"""The block functions in plain torch: any device, any floating dtype.

Each takes a block of scores [rows, N] and writes into tensors its caller allocated. The loop runs over the positives
of a row, one at a time: a block times one positive is the largest temporary.
"""

import torch
from torch import Tensor

from tritonloss.layout import Positives


def _surrogate(difference: Tensor, surrogate: str, slope: Tensor | None = None) -> Tensor:
    """g of the difference, in its memory; g' in the memory of `slope`, if given. -inf gives 0 for both."""
    if surrogate == "sigmoid":
        value = difference.sigmoid_()
        if slope is not None:
            torch.addcmul(value, value, value, value=-1, out=slope)
        return value
    lifted = difference.add_(1).clamp_(min=0)
    rise = torch.clamp(lifted, max=1, out=slope)
    # rise (2 lifted - rise): the parabola while both are equal, the line 2 lifted - 1 above 1.
    value = torch.lerp(rise, lifted, 2, out=lifted).mul_(rise)
    rise.mul_(2)
    return value


def _surrogate_slope(difference: Tensor, surrogate: str) -> Tensor:
    """g' of the difference, in its memory."""
    if surrogate == "sigmoid":
        value = difference.sigmoid_()
        return value.addcmul_(value, value, value=-1)
    return difference.add_(1).clamp_(0, 1).mul_(2)


class _Rectangle:
    """The pairs of a block as [rows, width], and their places among the columns and in the flat tensors."""

    def __init__(self, positives: Positives, n_keys: int) -> None:
        self.width = int(positives.count.max())
        slot = torch.arange(self.width, device=positives.start.device)
        self.valid = slot < positives.count[:, None]
        columns = (positives.start[:, None] + slot).clamp_(max=n_keys - 1)
        # An unused slot repeats the row's first positive, so that gathers stay in range and scatters stay harmless.
        self.columns = torch.where(self.valid, columns, columns[:, :1])
        self.flat = (positives.offset[:, None] + slot)[self.valid]

    def write(self, flat: Tensor, rectangle: Tensor) -> None:
        flat[self.flat] = rectangle[self.valid]

    def read(self, flat: Tensor) -> Tensor:
        rectangle = flat.new_zeros(self.valid.shape)
        rectangle[self.valid] = flat[self.flat]
        return rectangle


def soft_rank_forward(
    scores: Tensor,
    positives: Positives,
    surrogate: str,
    ranks: Tensor,
    slopes: Tensor | None,
    positive_scores: Tensor,
    positive_ranks: Tensor | None = None,
    positive_slopes: Tensor | None = None,
) -> None:
    """Write rank, slope (if `slopes` is given) and score of every pair of the block into the flat tensors [M].

    With `positive_ranks` also the rank among the other positives, and its slope (if `positive_slopes` is given).
    """
    rectangle = _Rectangle(positives, scores.shape[1])
    positive = scores.gather(1, rectangle.columns)
    negative = scores.scatter(1, rectangle.columns, -torch.inf)
    rank, slope = _sums_over_columns(negative, positive, surrogate, slopes is not None)
    rectangle.write(ranks, rank)
    rectangle.write(positive_scores, positive)
    if slopes is not None:
        rectangle.write(slopes, slope)
    if positive_ranks is not None:
        others = positive.masked_fill(~rectangle.valid, -torch.inf)
        rank, slope = _sums_over_columns(others, positive, surrogate, positive_slopes is not None, skip=True)
        rectangle.write(positive_ranks, rank)
        if positive_slopes is not None:
            rectangle.write(positive_slopes, slope)


def _sums_over_columns(
    columns: Tensor, positive: Tensor, surrogate: str, with_slope: bool, skip: bool = False
) -> tuple[Tensor, Tensor]:
    """The sums of g and of g' over the columns of each row, [rows, width] each; `skip`: without column p for p."""
    rank, slope = torch.empty_like(positive), torch.empty_like(positive)
    difference = torch.empty_like(columns)
    derivative = torch.empty_like(columns) if with_slope else None
    for p in range(positive.shape[1]):
        torch.sub(columns, positive[:, p : p + 1], out=difference)
        if skip:
            difference[:, p] = -torch.inf
        torch.sum(_surrogate(difference, surrogate, derivative), 1, out=rank[:, p])
        if derivative is not None:
            torch.sum(derivative, 1, out=slope[:, p])
    return rank, slope


def soft_rank_backward(
    scores: Tensor,
    positives: Positives,
    surrogate: str,
    slopes: Tensor,
    positive_scores: Tensor,
    grad_ranks: Tensor,
    grad_positive_scores: Tensor,
    grad_scores: Tensor,
    positive_slopes: Tensor | None = None,
    grad_positive_ranks: Tensor | None = None,
) -> None:
    """Write the gradient of the block's scores into `grad_scores` [rows, N].

    positive_slopes and grad_positive_ranks: of the ranks among the positives, both or neither.
    """
    rectangle = _Rectangle(positives, scores.shape[1])
    positive = rectangle.read(positive_scores)
    weight = rectangle.read(grad_ranks)
    grad_scores.zero_()
    _add_weighted_slopes(scores, positive, weight, surrogate, grad_scores)
    own = rectangle.read(grad_positive_scores) - weight * rectangle.read(slopes)
    if positive_slopes is not None and grad_positive_ranks is not None:
        weight = rectangle.read(grad_positive_ranks)
        own -= weight * rectangle.read(positive_slopes)
        _add_weighted_slopes(positive, positive, weight, surrogate, own, skip=True)
    grad_scores[rectangle.valid.nonzero()[:, 0], rectangle.columns[rectangle.valid]] = own[rectangle.valid]


def _add_weighted_slopes(
    columns: Tensor, positive: Tensor, weight: Tensor, surrogate: str, total: Tensor, skip: bool = False
) -> None:
    """Add the sum over p of weight[:, p] g'(columns - positive[:, p]) to `total`; `skip`: not to column p for p."""
    difference = torch.empty_like(columns)
    for p in range(positive.shape[1]):
        torch.sub(columns, positive[:, p : p + 1], out=difference)
        if skip:
            difference[:, p] = -torch.inf
        total.addcmul_(_surrogate_slope(difference, surrogate), weight[:, p : p + 1])


def _own_columns(labels: Tensor, first_class: int, rows: int) -> tuple[Tensor, Tensor]:
    """Row and column [m] of the block's positives, ascending by row: each column has at most one own row."""
    columns = ((labels >= first_class) & (labels < first_class + rows)).nonzero().squeeze(1)
    own_rows, order = torch.sort(labels[columns].long() - first_class, stable=True)
    return own_rows, columns[order]


def _log_one_plus_sum(peak: Tensor, total: Tensor) -> Tensor:
    """ln(1 + total e^peak), peak >= 0, without losing a small total or overflowing with a large peak."""
    return torch.where(peak > 0, peak + torch.log(total + torch.exp(-peak)), torch.log1p(total))


def proxy_logsumexp_forward(
    scores: Tensor, first_class: int, labels: Tensor, offsets: Tensor, positive: Tensor, negative: Tensor
) -> None:
    """Write ln(1 + sum) of the own columns and of the other columns of every row into `positive`, `negative` [rows]."""
    own = _own_columns(labels, first_class, len(scores))
    exponent = offsets[own[1]] - scores[own]
    count = torch.bincount(own[0], minlength=len(scores))
    peak = torch.segment_reduce(exponent, "max", lengths=count, initial=0, unsafe=True)
    term = torch.exp(exponent - peak[own[0]])
    total = torch.segment_reduce(term, "sum", lengths=count, initial=0, unsafe=True)
    positive.copy_(_log_one_plus_sum(peak, total))
    exponent = scores + offsets
    exponent[own] = -torch.inf
    peak = exponent.amax(1).clamp_(min=0)
    total = exponent.sub_(peak[:, None]).exp_().sum(1)
    negative.copy_(_log_one_plus_sum(peak, total))


def proxy_logsumexp_backward(
    scores: Tensor,
    first_class: int,
    labels: Tensor,
    offsets: Tensor,
    positive: Tensor,
    negative: Tensor,
    grad_positive: Tensor,
    grad_negative: Tensor,
    grad_scores: Tensor,
) -> None:
    """Write the gradient of the block's scores into `grad_scores` [rows, N]."""
    own = _own_columns(labels, first_class, len(scores))
    own_grad = -grad_positive[own[0]] * torch.exp(offsets[own[1]] - scores[own] - positive[own[0]])
    torch.sub(scores, negative[:, None], out=grad_scores)
    grad_scores.add_(offsets).exp_().mul_(grad_negative[:, None])
    grad_scores[own] = own_grad
