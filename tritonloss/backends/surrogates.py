"""The surrogates of the step function that have numbers of their own.

A surrogate is a name for the operators and kernels. One with numbers is written as the name and its numbers, separated
by spaces, as the functions here return it.
"""

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

PLAIN = ("sigmoid", "one_side_huber")
# How many numbers each of the others has.
WITH_NUMBERS = {"hinge": 1, "softplus": 1, "upper_step": 4}
# Which negatives a positive is compared with: each, or one.
SELECTIONS = ("all", "hard", "semihard")


def hinge(margin: float = 0.0) -> str:
    """g(x) = max(x + margin, 0); its slopes count the negatives with x > -margin."""
    return _written("hinge", margin)


def softplus(margin: float = 0.0) -> str:
    """g(x) = ln(1 + e^(x + margin))."""
    return _written("softplus", margin)


def upper_step(bend: float, rise: float, jump: float = 0.5, height: float | None = None) -> str:
    """g(x) = sigmoid(x) up to 0, jump + sigmoid(x) up to `bend`, then height + rise (x - bend).

    height: None for jump + sigmoid(bend), which makes it continuous at `bend` (ROADMAP, NeurIPS 2021, Eq. 4).
    """
    if height is None:
        height = jump + 1 / (1 + math.exp(-bend))
    return _written("upper_step", bend, rise, jump, height)


def selecting(selection: str, surrogate: str) -> str:
    """The surrogate of one negative per positive: "hard", "semihard"; or of "all".

    hard: of the positive with the lowest score and the negative with the highest one, and of no other pair. semihard:
    for each positive, of the negative with the highest score below its own, or else of that with the lowest score.
    """
    return surrogate if selection == "all" else f"{selection}:{surrogate}"


class Surrogate(NamedTuple):
    """A surrogate in its parts."""

    selection: str
    name: str
    numbers: tuple[float, ...]

    def evaluate(self, difference: Tensor) -> tuple[Tensor, Tensor]:
        """g and g' of each element; exactly 0 and 0 at negative infinity, NaN at a NaN. The memory is overwritten."""
        if self.name == "upper_step":
            return _upper_step(difference, *self.numbers)
        x = difference.add_(self.numbers[0])
        if self.name == "hinge":
            value = x.clamp_(min=0)
            return value, torch.sign(value)
        # Above 80 the softplus is its argument, by e^-80.
        return F.softplus(x, threshold=80), x.sigmoid_()


def _upper_step(x: Tensor, bend: float, rise: float, jump: float, height: float) -> tuple[Tensor, Tensor]:
    sigmoid = torch.sigmoid(x)
    slope = torch.addcmul(sigmoid, sigmoid, sigmoid, value=-1)
    is_line = x > bend
    sigmoid.add_(x > 0, alpha=jump)
    line = x.sub_(bend).mul_(rise).add_(height)
    return torch.where(is_line, line, sigmoid, out=sigmoid), slope.masked_fill_(is_line, rise)


@lru_cache(maxsize=256)
def parse(surrogate: str) -> Surrogate:
    """The parts of a surrogate.

    Raises ValueError for a name that there is not.
    """
    selection, _, text = surrogate.rpartition(":")
    name, *numbers = text.split(" ") if text else [""]
    is_plain = name in PLAIN and not numbers and not selection
    if not is_plain and (WITH_NUMBERS.get(name) != len(numbers) or selection not in ("", *SELECTIONS[1:])):
        known = ", ".join([*PLAIN, *(f"{other}(...)" for other in WITH_NUMBERS)])
        raise ValueError(f"surrogate is {surrogate!r}: expected one of {known}")
    return Surrogate(selection or "all", name, tuple(map(float, numbers)))


def _written(name: str, *numbers: float) -> str:
    return " ".join([name, *(repr(float(number)) for number in numbers)])
