"""The block functions of `soft_rank` for the softplus and the upper step, and for chosen pairs, in plain torch."""

from collections.abc import Iterator

import torch
from torch import Tensor

from tritonloss.backends.surrogates import Surrogate, parse
from tritonloss.layout import Positives

NAMES = ("softplus", "upper_step")
# Differences that are held at once, beside half a dozen temporaries of their size: all stay in the caches of a core.
CUBE_BYTES = 1 << 20


def forward(
    scores: Tensor,
    positives: Positives,
    surrogate: str,
    ranks: Tensor,
    slopes: Tensor | None,
    positive_scores: Tensor,
) -> None:
    """Write rank, slope (if `slopes` is given) and score of every pair of the block, rectangles [rows, width].

    The scores of the positives are overwritten.
    """
    g = parse(surrogate)
    torch.gather(scores, 1, positives.columns, out=positive_scores)
    positive = positives.only_pairs(positive_scores)
    hide_positives(scores, positives)
    for part in _parts(scores, positives.width):
        value, slope = g.evaluate(scores[:, None] - positive[:, part, None])
        torch.sum(value, 2, out=ranks[:, part])
        if slopes is not None:
            torch.sum(slope, 2, out=slopes[:, part])


def backward(
    scores: Tensor,
    positives: Positives,
    surrogate: str,
    slopes: Tensor,
    positive_scores: Tensor,
    grad_ranks: Tensor,
    grad_positive_scores: Tensor | None,
    grad_scores: Tensor,
) -> None:
    """Write the gradient of the block's scores into `grad_scores` [rows, N]."""
    g = parse(surrogate)
    weight, positive = positives.only_pairs(grad_ranks), positives.only_pairs(positive_scores)
    grad_scores.zero_()
    for part in _parts(scores, positives.width):
        _, slope = g.evaluate(scores[:, None] - positive[:, part, None])
        grad_scores[:, None].baddbmm_(weight[:, None, part], slope)
    positives.scatter(own_gradient(positives, weight, slopes, grad_positive_scores), grad_scores)


def own_gradient(
    positives: Positives, weight: Tensor, slopes: Tensor, grad_positive_scores: Tensor | None
) -> Tensor:
    """The gradient of the scores of the positives, [rows, width]; weight: that of the ranks, 0 without a pair."""
    own = -weight * positives.only_pairs(slopes)
    return own if grad_positive_scores is None else own + positives.only_pairs(grad_positive_scores)


def hide_positives(scores: Tensor, positives: Positives) -> None:
    """Negative infinity, of which every surrogate is 0, in place of the positives."""
    positives.scatter(torch.full_like(positives.columns, -torch.inf, dtype=scores.dtype), scores)


def _parts(scores: Tensor, width: int) -> Iterator[slice]:
    step = max(1, CUBE_BYTES // max(1, scores.numel() * scores.element_size()))
    for first in range(0, width, step):
        yield slice(first, min(first + step, width))


class Selected:
    """One negative per positive, or one pair per query, in place of all: see `surrogates.selecting`.

    own_column: [rows, 1], the column of each query itself, which is no positive; None where queries are no keys.
    """

    def __init__(self, own_column: Tensor | None) -> None:
        self.own_column = own_column

    def soft_rank_forward(
        self,
        scores: Tensor,
        positives: Positives,
        surrogate: str,
        ranks: Tensor,
        slopes: Tensor | None,
        positive_scores: Tensor,
        positive_ranks: Tensor | None = None,
        positive_slopes: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """As the block function of this name; what it returns is the chosen negative, and g', of each pair."""
        g = parse(surrogate)
        torch.gather(scores, 1, positives.columns, out=positive_scores)
        hide_positives(scores, positives)
        column, is_chosen = self._chosen(g, scores, positives, positive_scores)
        # Without a negative, negative infinity: of no pair.
        difference = (scores.gather(1, column) - positive_scores).masked_fill_(~is_chosen, -torch.inf)
        value, slope = g.evaluate(difference)
        ranks.copy_(value)
        if slopes is not None:
            slopes.copy_(slope)
        return column, slope

    def soft_rank_backward(
        self,
        scores: Tensor,
        positives: Positives,
        surrogate: str,
        slopes: Tensor,
        positive_scores: Tensor,
        grad_ranks: Tensor,
        grad_positive_scores: Tensor | None,
        grad_scores: Tensor,
        positive_slopes: Tensor | None = None,
        grad_positive_ranks: Tensor | None = None,
        kept: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """As the block function of this name."""
        assert kept is not None
        column, slope = kept
        weight = positives.only_pairs(grad_ranks)
        grad_scores.zero_().scatter_(1, column, _of_equal_columns(column, weight * slope))
        positives.scatter(own_gradient(positives, weight, slope, grad_positive_scores), grad_scores)

    def _chosen(
        self, g: Surrogate, scores: Tensor, positives: Positives, positive: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The column of the negative of each pair [rows, width], and whether there is such a pair."""
        is_pair = torch.ones_like(positive, dtype=torch.bool)
        is_pair = positives.only_pairs(is_pair, False)
        if self.own_column is not None:
            is_pair = is_pair & (positives.columns != self.own_column)
        if g.selection == "hard":
            highest, column = scores.max(1, keepdim=True)
            slot = torch.where(is_pair, positive, torch.inf).argmin(1, keepdim=True)
            is_pair = is_pair & (torch.arange(positives.width, device=slot.device) == slot)
            return column.expand_as(positive), is_pair & (highest != -torch.inf)
        ordered, place = scores.sort(1)
        n_hidden = positives.count[:, None]
        below = torch.searchsorted(ordered, positive.contiguous())
        index = torch.where(below > n_hidden, below - 1, n_hidden).clamp(max=scores.shape[1] - 1)
        return place.gather(1, index), is_pair & (n_hidden < scores.shape[1])


def _of_equal_columns(column: Tensor, values: Tensor) -> Tensor:
    """For each slot [rows, width] the sum of the values in the slots of its row with the same column, in one order."""
    total = torch.empty_like(values)
    for part in _parts(column, column.shape[1]):
        same = column[:, part, None] == column[:, None, :]
        torch.sum(torch.where(same, values[:, None], 0), 2, out=total[:, part])
    return total
