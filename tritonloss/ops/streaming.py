"""Panels of rows of a similarity matrix that is never held as a whole."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tritonloss.layout import Positives
from tritonloss.ops.panels import ROW_STRIDE_UNIT, plan_panels

ENVIRONMENT_VARIABLE = "TRITONLOSS_MEMORY_BUDGET"
MEBIBYTE = 1 << 20
# On a CPU a block is small, because eager holds the derivatives for every positive beside it; but with fewer rows than
# MIN_ROWS the GEMM reads its keys too often: then a block may be twice as large, and a quarter of these rows are taken
# at any length of a row. On CUDA a block is as tall as memory allows: see `plan_panels`.
BLOCK_BYTES = 2 * MEBIBYTE
MIN_ROWS = 64


def budget_bytes(device: torch.device, requested: int | None = None) -> int:
    """Bytes that one loss call may hold for similarities: the argument, TRITONLOSS_MEMORY_BUDGET, or the default.

    The default is 256 MiB on CPU and a sixteenth of the device's memory on CUDA. Raises ValueError below 1.
    """
    source = "memory_budget"
    if requested is None and (text := os.environ.get(ENVIRONMENT_VARIABLE)):
        source = ENVIRONMENT_VARIABLE
        if not text.isdecimal():
            raise ValueError(f"{source} is {text!r}: expected a number of bytes")
        requested = int(text)
    if requested is None:
        if device.type == "cuda":
            return torch.cuda.get_device_properties(device).total_memory // 16
        return 256 * MEBIBYTE
    if requested < 1:
        raise ValueError(f"{source} is {requested}: expected at least 1 byte")
    return requested


def rows_per_block(rows: int, columns: int, itemsize: int, device: torch.device, budget: int) -> int:
    """Rows of one block, never more than the budget allows: cache-sized on a CPU, tall on CUDA."""
    if device.type == "cuda":
        multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        return plan_panels(rows, columns, itemsize, budget, multiprocessors).rows
    row_bytes = max(1, columns * itemsize)
    least = max(MIN_ROWS // 4, min(MIN_ROWS, 2 * BLOCK_BYTES // row_bytes))
    return max(1, min(max(BLOCK_BYTES // row_bytes, least), budget // row_bytes, rows))


def padded_scores(rows: int, columns: int, like: Tensor) -> Tensor:
    """An uninitialised [rows, stride] that is contiguous; stride is `columns` rounded up to ROW_STRIDE_UNIT.

    What operators return: whether the [rows, columns] within is contiguous depends on the batch size, and
    torch.compile would compile for either case.
    """
    return like.new_empty(rows, -(-columns // ROW_STRIDE_UNIT) * ROW_STRIDE_UNIT)


def empty_scores(rows: int, columns: int, like: Tensor) -> Tensor:
    """An uninitialised [rows, columns] whose row stride is a multiple of ROW_STRIDE_UNIT."""
    return padded_scores(rows, columns, like)[:, :columns]


def given_or_zero(grad: Tensor | None, like: Tensor) -> Tensor:
    """The gradient of an output, contiguous; zeros where the output was not used."""
    return torch.zeros_like(like) if grad is None else grad.contiguous()


class Panel(NamedTuple):
    """A slice of the queries and their positives."""

    rows: slice
    positives: Positives


# Ranks, scores and slopes, against the negatives and against the positives, their gradients, and what a function of
# them needs: numbers that are held for each pair of a panel.
NUMBERS_PER_PAIR = 32
# The algorithms of large classes hold a few numbers more for each score. On a CPU a block is far below the budget.
LARGE_CLASS, NUMBERS_PER_SCORE = 64, 8


@dataclass(frozen=True)
class Panels:
    """The panels of `height` queries that a pass walks over, made once for a call.

    start, count: [Q] int64, the positives of each query. n_keys: the number of columns. widths: the largest count of
    each panel, or a bound of it; are_full: whether all rows of the panel are known to have as many positives. total:
    the sum of the counts, or a bound of it, where it was asked for.
    """

    start: Tensor
    count: Tensor
    n_keys: int
    height: int
    widths: list[int]
    are_full: list[bool]
    total: int = -1

    def __post_init__(self) -> None:
        if len(self.widths) != -(-self.count.shape[0] // self.height):
            raise ValueError(f"height is {self.height}: expected {len(self.widths)} panels of it")

    @classmethod
    def of(
        cls,
        start: Tensor,
        count: Tensor,
        n_keys: int,
        itemsize: int,
        budget: int,
        bound: int | None = None,
        with_total: bool = False,
    ) -> "Panels":
        """bound: of the class sizes, asserted on the device. Without it they are read from the device, in one host
        sync; in a second one where a panel has so many pairs that it must be lower.
        """
        # Kernels read both with a stride of one element.
        start, count = start.contiguous(), count.contiguous()
        n_rows = count.shape[0]
        height = rows_per_block(n_rows, n_keys, itemsize, count.device, budget)
        numbers = NUMBERS_PER_SCORE * n_keys if count.device.type == "cuda" else 0
        if bound is not None:
            torch._assert_async((count <= bound).all(), "a class is larger than max_class_size")
            height = _height_for_pairs(height, bound, numbers, itemsize, budget)
            n_panels = -(-n_rows // height)
            return cls(start, count, n_keys, height, [bound] * n_panels, [False] * n_panels, n_rows * bound)
        least, largest, sums = _extremes(count, height, with_total)
        lower = _height_for_pairs(height, max(largest, default=0), numbers, itemsize, budget)
        if lower < height:
            height = lower
            least, largest, sums = _extremes(count, height, with_total)
        are_full = [a == b for a, b in zip(least, largest, strict=True)]
        return cls(start, count, n_keys, height, largest, are_full, sum(sums))

    @property
    def largest(self) -> int:
        """A bound of all counts."""
        return max(self.widths, default=0)

    def __iter__(self) -> Iterator[Panel]:
        n_rows, start, count = self.count.shape[0], self.start, self.count
        for index, (width, is_full) in enumerate(zip(self.widths, self.are_full, strict=True)):
            rows = slice(index * self.height, min((index + 1) * self.height, n_rows))
            if len(self.widths) > 1:
                start, count = self.start[rows], self.count[rows]
            yield Panel(rows, Positives(start, count, self.n_keys, width, is_full))


def _height_for_pairs(height: int, width: int, large: int, itemsize: int, budget: int) -> int:
    """At most `height`, so that what is held for the pairs of a panel fits the budget.

    large: how many numbers more the algorithms of large classes hold for each row.
    """
    numbers = NUMBERS_PER_PAIR * width + (large if width >= LARGE_CLASS else 0)
    return max(1, min(height, budget // max(1, itemsize * numbers)))


def _extremes(count: Tensor, height: int, with_total: bool) -> list[list[int]]:
    """The smallest and the largest count of each panel of `height` queries, and their sum, in one host sync."""
    n_rows = count.shape[0]
    if n_rows == 0:
        return [[], [], []]
    # The last panel is filled up with copies of its last row.
    padding = -n_rows % height
    panels = (torch.cat([count, count[-1:].expand(padding)]) if padding and height < n_rows else count).view(
        -1, min(height, n_rows)
    )
    facts = list(torch.aminmax(panels, dim=1))
    if with_total:
        facts.append(count.sum().expand(len(panels)))
    read = torch.stack(facts).tolist()
    return [*read[:2], read[2][:1] if with_total else []]
