"""Rows sorted by label, so that the positives of a query are one contiguous range of columns."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor

from tritonloss.types import is_complete


@dataclass(frozen=True)
class Positives:
    """The positives of a block of queries: query q owns the columns start[q] .. start[q] + count[q] - 1.

    start, count: [rows] int64, contiguous. n_keys: the number of columns. width: a bound of count that the host knows;
    the pairs of the block are a rectangle [rows, width], whose slot k of row q stands for column start[q] + k. Slots
    from count[q] on are no pairs, and what they hold means nothing. is_full: every row is known to have `width` pairs.
    """

    start: Tensor
    count: Tensor
    n_keys: int
    width: int
    is_full: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """Of the rectangle."""
        return self.start.shape[0], self.width

    @cached_property
    def is_pair(self) -> Tensor | None:
        """[rows, width] bool; None where every slot is one."""
        if self.is_full:
            return None
        return torch.arange(self.width, device=self.start.device) < self.count[:, None]

    @cached_property
    def columns(self) -> Tensor:
        """The column of each slot [rows, width] int64; a slot without a pair repeats the first of its row."""
        columns = self.start[:, None] + torch.arange(self.width, device=self.start.device)
        if self.is_pair is None:
            return columns
        return torch.where(self.is_pair, columns, self.start[:, None].clamp(max=self.n_keys - 1))

    @cached_property
    def offset(self) -> Tensor:
        """Where the slots of each row begin in the rectangle, [rows] int64."""
        n_rows = self.start.shape[0]
        return torch.arange(0, n_rows * self.width, self.width, device=self.start.device)

    def only_pairs(self, rectangle: Tensor, other: float = 0) -> Tensor:
        """The rectangle with `other` in the slots that are no pairs."""
        return rectangle if self.is_pair is None else torch.where(self.is_pair, rectangle, other)

    def scatter(self, rectangle: Tensor, block: Tensor) -> None:
        """Write the values of the pairs to their columns of the block [rows, n_keys].

        A row without pairs gets the value of its slot 0 in its first column, or in the last one of the block.
        """
        if self.is_pair is not None:
            rectangle = torch.where(self.is_pair, rectangle, rectangle[:, :1])
        block.scatter_(1, self.columns, rectangle)


def class_ranges(query_labels: Tensor, sorted_labels: Tensor) -> tuple[Tensor, Tensor]:
    """First column and number of columns of each query's class among keys sorted by label.

    query_labels: [Q] integer. sorted_labels: [N] integer, ascending. Returns start [Q] and count [Q], int64; a label
    that no key has gives count 0. Time O(Q log N), no host sync.
    """
    start = torch.searchsorted(sorted_labels, query_labels)
    return start, torch.searchsorted(sorted_labels, query_labels, right=True) - start


@dataclass(frozen=True)
class ClassLayout:
    """A batch whose rows are sorted by label; queries and keys are the same rows.

    order: [N] int64, the original row of each sorted row (stable).
    start, count: [N] int64, the class range of each sorted row, itself included.
    """

    order: Tensor
    start: Tensor
    count: Tensor

    @classmethod
    def from_labels(cls, labels: Tensor) -> "ClassLayout":
        """labels: [N] of any integer dtype or bool, any values. Time O(N log N), no host sync."""
        sorted_labels, order = torch.sort(labels.to(torch.int64), stable=True)
        return cls(order, *class_ranges(sorted_labels, sorted_labels))

    def lone_rows_last(self) -> "ClassLayout":
        """The same layout with the rows that are alone in their class behind the others. No host sync."""
        place = torch.argsort(self.count == 1, stable=True)
        return ClassLayout(self.order[place], torch.argsort(place)[self.start[place]], self.count[place])

    @property
    def query_count(self) -> Tensor:
        """[N] int64: the class size, 0 for a lone row, which is no query."""
        return torch.where(self.count > 1, self.count, 0)

    def weight(self, dtype: torch.dtype) -> Tensor:
        """1 / the number of queries, [] of this dtype; 1 without any.

        It is the weight of every row in a mean over queries, if the value of a row that is none is 0.
        """
        return (self.count > 1).sum(dtype=dtype).clamp_(min=1).reciprocal_()

    def weights(self, dtype: torch.dtype) -> Tensor:
        """1 / (number of queries x class size) for each row [N], the weight of its pairs in a mean; 0 for no query."""
        is_query = self.count > 1
        return is_query / (self.count * is_query.sum(dtype=dtype).clamp_(min=1))

    def sort(self, rows: Tensor) -> Tensor:
        """rows [N, ...] in sorted order; differentiable, deterministic."""
        return cast(Tensor, _Permute.apply(rows, self.order))  # type: ignore[no-untyped-call]

    def unsort(self, rows: Tensor) -> Tensor:
        """The inverse of `sort`; differentiable, deterministic."""
        return cast(Tensor, _Permute.apply(rows, torch.argsort(self.order)))  # type: ignore[no-untyped-call]


class _Permute(torch.autograd.Function):
    """rows[order] for a permutation: its gradient is a scatter without collisions, where indexing would accumulate."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (order,) = ctx.saved_tensors
        return torch.empty_like(grad).index_copy_(0, order, grad), None


def runs(sorted_values: Tensor) -> tuple[Tensor, Tensor]:
    """The runs of equal values.

    sorted_values: [N] integer. Returns the run of each value, 0, 0, 1, ... [N] int64, and the length of each run,
    padded with 0 to [N], int64. No host sync.
    """
    is_first = torch.ones_like(sorted_values, dtype=torch.int64)
    is_first[1:] = sorted_values[1:] != sorted_values[:-1]
    run = torch.cumsum(is_first, 0) - 1
    return run, counts_of_sorted(run, run.shape[0])


def counts_of_sorted(values: Tensor, n: int) -> Tensor:
    """How often each of 0 .. n - 1 occurs, [n] int64; values: [M] int64, ascending."""
    if is_complete(values.device):
        count = torch.zeros(n, dtype=torch.int64, device=values.device)
        return count.index_add_(0, values, torch.ones_like(values))
    return class_ranges(torch.arange(n, device=values.device), values)[1]


def segment_sum(values: Tensor, segment: Tensor, count: Tensor) -> Tensor:
    """The sums of consecutive rows: of the first count[0], then of the next count[1], ...

    values: [M, ...] float, M the sum of the counts. segment: [M] int64, to which sum each row belongs. count: [S]
    int64. Returns [S, ...]. Deterministic on CPU and CUDA.
    """
    if is_complete(values.device):
        return torch.segment_reduce(values, "sum", lengths=count, initial=0, unsafe=True)
    return values.new_zeros(count.shape[0], *values.shape[1:]).index_add_(0, segment, values)


def segment_max(values: Tensor, segment: Tensor, count: Tensor, least: float = 0) -> Tensor:
    """The maxima of consecutive values, at least `least` each; the arguments of `segment_sum`."""
    if is_complete(values.device):
        return torch.segment_reduce(values, "max", lengths=count, initial=least, unsafe=True)
    return values.new_full(count.shape, least).scatter_reduce_(0, segment, values, "amax")
