"""The pieces of SOPRC: phi, priors and options."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from tritonloss.losses.base import check_choice, check_count, check_numbers
from tritonloss.types import upcast, widest

Grid: TypeAlias = Literal["midpoint", "left", "authors", "linear"]
MemoryUpdate: TypeAlias = Literal["mean", "last"]
MemoryInit: TypeAlias = Literal["first", "uniform"]
Average: TypeAlias = Literal["macro", "micro"]
ScoreRange: TypeAlias = tuple[float, float] | None
Prior: TypeAlias = float | Sequence[float] | Tensor | Literal["batch"]


class Interpolation(NamedTuple):
    """phi of a list: how many entries, at which places, within which range; see `interpolate_scores`."""

    size: int
    grid: Grid
    score_range: ScoreRange


def interpolate_scores(
    scores: Tensor, size: int, *, grid: Grid = "midpoint", score_range: ScoreRange = None
) -> Tensor:
    """phi: spread a list of scores over `size` quantiles, so that lists of any length can be averaged.

    With s_1 <= ... <= s_n the sorted scores, s_0 = 2 s_1 - s_2 and s_(n+1) = 2 s_n - s_(n-1), both kept within
    `score_range`, and u the polygon through (k, s_k), entry j = 0 .. size - 1 is

    | grid | entry |
    |---|---|
    | "midpoint" | (u(t) + u(t + 1)) / 2 at t = (j + 1/2) n / size |
    | "left" | the same at t = j n / size |
    | "authors" | the same at t = j / ceil(size / n): the authors' code; the top is left out unless n divides size |
    | "linear" | u(t) at t = (j + 1/2) (n + 1) / size: plain linear interpolation, as Proposition 3 assumes |

    The first three are a moving average of two neighbours: they smooth the list, and shrink its tails where n is small.

    Args:
        scores: [..., n] floating, n >= 1, in any order. No gradient passes.
        size: number of entries, >= 1.
        grid: see the table.
        score_range: the smallest and the largest score there can be; None for no limit.

    Returns:
        [..., size], ascending up to the rounding of its dtype.

    Source: Wen et al., NeurIPS 2022 (arXiv 2209.13262), Algorithm 2, read so that it agrees with the authors' code.
    """
    phi = check_interpolation(size, grid, score_range)
    if not scores.shape[-1:] or scores.shape[-1] < 1:
        raise ValueError(f"scores must have shape [..., n] with n of at least 1, got {list(scores.shape)}")
    lists = upcast(scores.detach()).flatten(0, -2) if scores.ndim > 1 else upcast(scores.detach())[None]
    n = torch.full((lists.shape[0],), lists.shape[1], dtype=torch.int64, device=scores.device)
    entries = interpolate_segments(
        lists.sort(1).values.flatten(),
        torch.cumsum(n, 0) - n,
        n,
        phi,
    )
    return entries.reshape(*scores.shape[:-1], phi.size)


def _wide(class_counts: Sequence[int] | Tensor) -> Tensor:
    counts = class_counts if isinstance(class_counts, Tensor) else torch.tensor(class_counts, device="cpu")
    return counts.to(widest(torch.float32, counts.device))


def exact_prior(class_counts: Sequence[int] | Tensor, *, retrieval: bool = True) -> Tensor:
    """The share of positives among the candidates of a query of each class [C], float32.

    class_counts: [C], how many examples of each class the data set has, >= 1. retrieval: the query is an example
    itself, (n_c - 1) / (N - 1), at least 1 / (N - 1); without it n_c / N. Eq. 1's pi.
    """
    counts = _wide(class_counts)
    if retrieval:
        return ((counts - 1).clamp(min=1) / (counts.sum() - 1)).float()
    return (counts / counts.sum()).float()


def scaled_prior(class_counts: Sequence[int] | Tensor, *, prior_max: float = 0.1) -> Tensor:
    """prior_max n_c / max n [C], float32: the authors' prior, whose scale acts as a temperature and must be tuned.

    class_counts: [C], how many examples of each class the data set has. The authors' prior_max is 0.1 for iNaturalist
    and VehicleID and 0.01 for SOP.
    """
    counts = _wide(class_counts)
    return (prior_max * counts / counts.max()).float()


@dataclass(frozen=True)
class Options:
    """What turns sums into the loss; see `SOPRCLoss`."""

    tau1: float
    tau2: float
    tpr_offset: float
    tpr_grad: bool
    average: Average

    def __post_init__(self) -> None:
        check_numbers(tau1=self.tau1, tau2=self.tau2, tpr_offset=self.tpr_offset)
        for name, value in (("tau1", self.tau1), ("tau2", self.tau2)):
            if not value > 0:
                raise ValueError(f"{name} is {value}: expected a number above 0")
        if not self.tpr_offset >= 0:
            raise ValueError(f"tpr_offset is {self.tpr_offset}: expected at least 0")
        check_choice("average", self.average, Average)


def _places(place: Tensor, n: Tensor, size: int, grid: Grid) -> tuple[Tensor, int | Tensor]:
    """The places t of the grid as fractions of integers."""
    if grid == "midpoint":
        return (2 * place + 1) * n, 2 * size
    if grid == "left":
        return place * n, size
    if grid == "authors":
        return place, (size + n - 1) // n
    return (2 * place + 1) * (n + 1), 2 * size


def interpolate_segments(values: Tensor, first: Tensor, n: Tensor, phi: Interpolation) -> Tensor:
    """phi of S lists [S, size]: list k is values[first[k]] .. values[first[k] + n[k] - 1], ascending.

    An empty list gives numbers without meaning.
    """
    size, grid, score_range = phi
    # Two more: what lies behind the last list is read, and then not used.
    values = torch.cat([values, values.new_zeros(2)])
    n, first = n.clamp(min=1)[:, None], first[:, None]
    place = torch.arange(size, device=values.device)
    # Exact integers: where an interval of the polygon begins must not depend on rounding.
    numerator, denominator = _places(place, n, size, grid)
    knot = torch.div(numerator, denominator, rounding_mode="trunc")
    weight = (numerator - knot * denominator).to(values.dtype) / denominator
    last, step = first + n - 1, (n > 1).long()
    low = 2 * values[first] - values[first + step]
    high = 2 * values[last] - values[last - step]
    if score_range is not None:
        # Never past the list itself: a score may lie outside the range by its rounding.
        low = low.clamp(min=score_range[0]).minimum(values[first])
        high = high.clamp(max=score_range[1]).maximum(values[last])
    # The places lie in [0, n), those of "linear" in [0, n + 1): at most one neighbour is past an end.
    index = first + knot
    before = torch.where(knot < 1, low, values[index - 1])
    if grid == "linear":
        return torch.lerp(before, torch.where(knot >= n, high, values[index]), weight)
    after = torch.where(knot >= n - 1, high, values[index + 1])
    return ((1 - weight) * before + values[index] + weight * after) / 2


def class_prior(prior: Any, num_classes: int) -> Tensor | None:
    """pi as [C] float32; None for "batch"."""
    if isinstance(prior, str):
        check_choice("prior", prior, Literal["batch"])
        return None
    # With the device: a default one, or the meta device, has no numbers to look at.
    device = prior.device if isinstance(prior, Tensor) else "cpu"
    values = torch.as_tensor(prior, device=device).detach().to(torch.float32)
    if values.shape not in ((), (num_classes,)):
        raise ValueError(f"prior must be one number or have shape [{num_classes}], got {list(values.shape)}")
    if not bool(((values > 0) & (values < 1)).all()):
        outside = values[~((values > 0) & (values < 1))].flatten()
        raise ValueError(f"prior must be above 0 and below 1, got {outside[0].item()}")
    return values.expand(num_classes).clone()


def check_interpolation(size: Any, grid: Any, score_range: Any) -> Interpolation:
    """phi with its options as plain numbers; a range may be a tuple, a list, an array or a tensor."""
    size = check_count("memory_size", size)
    check_choice("grid", grid, Grid)
    if score_range is None:
        return Interpolation(size, grid, None)
    try:
        low, high = (float(value) for value in score_range)
    except (TypeError, ValueError) as error:  # not two, or no numbers
        raise ValueError(f"score_range must be None or (smallest, largest), got {score_range!r}") from error
    if not low < high:
        raise ValueError(f"score_range is {(low, high)}: expected the smallest score first")
    return Interpolation(size, grid, (low, high))
