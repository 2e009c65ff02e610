"""Inputs that several tests share, in float64 on the CPU."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Batch(NamedTuple):
    rows: Tensor
    labels: Tensor

    def on(self, device: torch.device, dtype: torch.dtype = torch.float64) -> Batch:
        """A copy; its rows are a leaf that requires grad."""
        return Batch(self.rows.to(device, dtype, copy=True).requires_grad_(), self.labels.to(device))

    def labelled(self, *labels: int) -> Batch:
        return Batch(self.rows, torch.tensor(labels))


def batch(rows: list[tuple[float, float]], labels: list[int]) -> Batch:
    return Batch(torch.tensor(rows, dtype=torch.float64), torch.tensor(labels))


def directions(*degrees: float) -> list[tuple[float, float]]:
    angle = torch.deg2rad(torch.tensor(degrees, dtype=torch.float64))
    return list(zip(angle.cos().tolist(), angle.sin().tolist(), strict=True))


E1 = batch([(1, 0), (0.8, 0.6), (0, 1), (0.6, 0.8)], [0, 0, 1, 1])
E2 = batch([(1, 0), (0.6, 0.8), (0.6, 0.8), (0, 1)], [0, 0, 1, 1])  # an exact tie across classes
E3 = batch(directions(0, 20, 70, 50, 90, 110), [0, 0, 0, 1, 1, 1])
E4 = batch([(1, 0), (0, 1), (-1, 0), (0, -1)], [0, 0, 1, 1])  # every positive similarity is 0
EQ = batch([(1, 0)] * 4, [0, 0, 1, 1])  # every similarity is 1
DUP = batch([(1, 0), (1, 0), (0, 1), (0, 1)], [0, 0, 1, 1])  # duplicates within each class

# The inputs of the golden values: x[i, d] = sin(1 + 3 i + 7 d), i mod 4 as labels, and labels with three lone rows.
_i, _d = torch.arange(12, dtype=torch.float64)[:, None], torch.arange(5, dtype=torch.float64)
GOLDEN_ROWS = torch.sin(1 + 3 * _i + 7 * _d)
GOLDEN_A = Batch(GOLDEN_ROWS, torch.arange(12) % 4)
GOLDEN_B = Batch(GOLDEN_ROWS, torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2, 3, 4, 5]))


def random_batch(n: int, dim: int, n_classes: int, *, n_lone: int = 0, seed: int = 0) -> Batch:
    """Normal rows; labels below `n_classes` at random, then `n_lone` labels that occur once, shuffled."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(n, dim, generator=generator, dtype=torch.float64)
    labels = torch.randint(n_classes, (n - n_lone,), generator=generator)
    labels = torch.cat([labels, n_classes + torch.arange(n_lone)])
    return Batch(rows, labels[torch.randperm(n, generator=generator)])
