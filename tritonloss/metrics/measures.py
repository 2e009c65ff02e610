"""Every metric as a function of the places of the relevant keys, and the names by which metrics are asked for."""

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritonloss.metrics.ranking import Relevant
from tritonloss.types import widest

# A metric of the places and of k, for each query: [rows] float64.
Formula = Callable[[Relevant, int], Tensor]


class Measure(NamedTuple):
    """A metric by name, with its k where it has one."""

    name: str
    formula: Formula
    k: int | None


def real(values: Tensor) -> Tensor:
    """In float64, or in float32 on a device that may have none."""
    return values.to(widest(torch.float32, values.device))


def within(relevant: Relevant, k: int | Tensor) -> Tensor:
    """The probability that each relevant key is among the first k: [rows, width], 0 in unused slots."""
    places = 1 if relevant.places is None else relevant.places
    taken = torch.clamp(k - relevant.before, min=0).minimum(
        torch.as_tensor(places, device=relevant.before.device)
    )
    return torch.where(relevant.used, real(taken) / places, 0)


def precisions(relevant: Relevant) -> Tensor:
    """The precision at the rank of each relevant key: [rows, width]. Unused slots hold anything."""
    ordinal = torch.arange(1, relevant.before.shape[1] + 1, device=relevant.before.device)
    return real(ordinal) / real(relevant.before + 1)


def average_precision(relevant: Relevant, k: int) -> Tensor:
    return torch.where(relevant.used, precisions(relevant), 0).sum(1) / relevant.count


def average_precision_at_r(relevant: Relevant, k: int) -> Tensor:
    return (within(relevant, relevant.count[:, None]) * precisions(relevant)).sum(1) / relevant.count


def r_precision(relevant: Relevant, k: int) -> Tensor:
    return within(relevant, relevant.count[:, None]).sum(1) / relevant.count


def recall(relevant: Relevant, k: int) -> Tensor:
    return within(relevant, k)[:, 0]


def relevant_recall(relevant: Relevant, k: int) -> Tensor:
    return within(relevant, k).sum(1) / relevant.count


def precision(relevant: Relevant, k: int) -> Tensor:
    return within(relevant, k).sum(1) / k


def ndcg(relevant: Relevant, k: int) -> Tensor:
    discounts = 1 / torch.log2(real(torch.arange(2, k + 2, device=relevant.count.device)))
    # gain[n] is that of all of the first n places.
    gain = torch.nn.functional.pad(discounts.cumsum(0), (1, 0))
    before = relevant.before.clamp(max=k)
    if relevant.places is None:
        found = torch.where(relevant.before < k, discounts[before.clamp(max=k - 1)], 0)
    else:
        found = (gain[(before + relevant.places).clamp(max=k)] - gain[before]) / relevant.places
    return torch.where(relevant.used, found, 0).sum(1) / gain[relevant.count.clamp(max=k)]


# With ties="mean" a metric must be a sum over the relevant keys of a function of the place of each: then its mean over
# all orders of equal keys follows from the places of each key alone. The others are not.
PLAIN: dict[str, Formula] = {
    "mean_average_precision": average_precision,
    "map_at_r": average_precision_at_r,
    "r_precision": r_precision,
    "ndcg": ndcg,
}
AT_K: dict[str, Formula] = {
    "recall": recall,
    "relevant_recall": relevant_recall,
    "precision": precision,
    "ndcg": ndcg,
}
NOT_LINEAR = (average_precision, average_precision_at_r, recall)


def parse(names: Any) -> list[Measure]:
    """The metrics of their names: those of PLAIN, and those of AT_K with "_at_" and a number, as "recall_at_10"."""
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise TypeError(f"metrics must be a sequence of names, got {type(names).__name__}")
    if not names:
        raise ValueError("metrics is empty: expected at least one name")
    return [_parse(name) for name in names]


def _parse(name: Any) -> Measure:
    if not isinstance(name, str):
        raise TypeError(f"metrics must hold names, got {type(name).__name__}")
    if name in PLAIN:
        return Measure(name, PLAIN[name], None)
    if (found := re.fullmatch(r"(\w+)_at_(\d+)", name, re.ASCII)) and found[1] in AT_K:
        return Measure(name, AT_K[found[1]], int(found[2]))
    known = [*PLAIN, *(f"{kind}_at_<k>" for kind in AT_K)]
    raise ValueError(f"metrics has {name!r}: expected {', '.join(known)}")


def check(measures: Sequence[Measure], n_keys: int, ties: str) -> None:
    """Every k is possible, and every metric has a value for `ties`."""
    for measure in measures:
        if measure.k is not None and not 1 <= measure.k <= n_keys:
            raise ValueError(
                f"k of {measure.name} is {measure.k}: expected 1 to {n_keys}, the number of keys that a query is "
                "compared with"
            )
        if ties == "mean" and measure.formula in NOT_LINEAR:
            raise ValueError(
                f"ties is 'mean': expected 'optimistic' or 'pessimistic' for {measure.name}, which is not linear in "
                "what stands at each rank"
            )
