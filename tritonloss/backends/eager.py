"""The block functions in plain torch: any device, any floating dtype.

Each takes a block of scores [rows, N] and writes into tensors its caller allocated. The loop runs over the positives
of a row, one at a time: a block times one positive is the largest temporary.
"""

import torch
from torch import Tensor

from tritonloss.layout import Positives


def _surrogate(difference: Tensor, surrogate: str, with_slope: bool = True) -> tuple[Tensor, Tensor | None]:
    """g and g' of the difference, whose memory is overwritten. -inf gives (0, 0)."""
    if surrogate == "sigmoid":
        value = difference.sigmoid_()
        return value, torch.addcmul(value, value, value, value=-1) if with_slope else None
    rise = (difference + 1).clamp_(0, 1)
    value = rise.square().add_(difference.clamp_(min=0), alpha=2)
    return value, rise.mul_(2) if with_slope else None


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
) -> None:
    """Write rank, slope (if `slopes` is given) and score of every pair of the block into the flat tensors [M]."""
    rectangle = _Rectangle(positives, scores.shape[1])
    positive = scores.gather(1, rectangle.columns)
    negative = scores.scatter(1, rectangle.columns, -torch.inf)
    rank, slope = torch.empty_like(positive), torch.empty_like(positive)
    difference = torch.empty_like(negative)
    for p in range(rectangle.width):
        torch.sub(negative, positive[:, p : p + 1], out=difference)
        value, derivative = _surrogate(difference, surrogate, slopes is not None)
        torch.sum(value, 1, out=rank[:, p])
        if derivative is not None:
            torch.sum(derivative, 1, out=slope[:, p])
    rectangle.write(ranks, rank)
    rectangle.write(positive_scores, positive)
    if slopes is not None:
        rectangle.write(slopes, slope)


def soft_rank_backward(
    scores: Tensor,
    positives: Positives,
    surrogate: str,
    slopes: Tensor,
    positive_scores: Tensor,
    grad_ranks: Tensor,
    grad_positive_scores: Tensor,
    grad_scores: Tensor,
) -> None:
    """Write the gradient of the block's scores into `grad_scores` [rows, N]."""
    rectangle = _Rectangle(positives, scores.shape[1])
    positive = rectangle.read(positive_scores)
    weight = rectangle.read(grad_ranks)
    difference = torch.empty_like(scores)
    grad_scores.zero_()
    for p in range(rectangle.width):
        torch.sub(scores, positive[:, p : p + 1], out=difference)
        _, derivative = _surrogate(difference, surrogate)
        assert derivative is not None
        grad_scores.addcmul_(derivative, weight[:, p : p + 1])
    own = rectangle.read(grad_positive_scores) - weight * rectangle.read(slopes)
    grad_scores[rectangle.valid.nonzero()[:, 0], rectangle.columns[rectangle.valid]] = own[rectangle.valid]
