"""Rows sorted by label: ranges, round trips and means over segments, against loops."""

from __future__ import annotations

import itertools

import pytest
import torch
from checks import assert_close, assert_same
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tritonloss import types
from tritonloss.layout import ClassLayout, class_ranges, runs, segment_max, segment_sum

INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.bool]
INTEGERS += [torch.uint8, torch.uint16, torch.uint32, torch.uint64]
LABELS = {
    "sorted": [0, 0, 1, 1, 1, 2],
    "unsorted": [2, 0, 2, 1, 0, 2],
    "gaps": [100, 3, 100, 7, 7, 50],
    "negative": [-1, 5, -1, -100, 5, 5],
    "beyond 32 bits": [2**32, 0, 2**32, 2**40 + 1, 0, 1],
    "extremes": [2**63 - 1, -(2**63), 2**63 - 1, 0, -(2**63), 0],
    "one class": [4, 4, 4],
    "all lone": [3, 1, 2],
    "one row": [7],
    "empty": [],
}


def check_layout(layout: ClassLayout, labels: Tensor) -> None:
    """Against a loop over the labels as Python integers."""
    values = labels.tolist()
    order = layout.order.tolist()
    # Stable: rows of one class keep their order.
    assert order == sorted(range(len(values)), key=lambda i: values[i])
    for position, row in enumerate(order):
        start, count = int(layout.start[position]), int(layout.count[position])
        own = {i for i, value in enumerate(values) if value == values[row]}
        assert set(order[start : start + count]) == own
        assert count == len(own)
        assert int(layout.query_count[position]) == (len(own) if len(own) > 1 else 0)
    assert {t.dtype for t in (layout.order, layout.start, layout.count)} == {torch.int64}


@pytest.mark.parametrize("values", LABELS.values(), ids=LABELS.keys())
def test_ranges(values: list[int], device: torch.device) -> None:
    labels = torch.tensor(values, dtype=torch.int64, device=device)
    check_layout(ClassLayout.from_labels(labels), labels)


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_every_integer_dtype(dtype: torch.dtype, device: torch.device) -> None:
    # 200 and 255 pass through int8 as negative numbers: different labels all the same.
    labels = torch.tensor([255, 0, 1, 200, 255, 1, 0], device=device).to(dtype)
    check_layout(ClassLayout.from_labels(labels), labels)


@given(st.lists(st.one_of(st.integers(-3, 3), st.integers(-(2**63), 2**63 - 1)), max_size=40))
def test_ranges_of_any_labels(values: list[int]) -> None:
    labels = torch.tensor(values, dtype=torch.int64)
    check_layout(ClassLayout.from_labels(labels), labels)


@given(
    st.lists(st.integers(-2, 6), max_size=12).map(sorted),
    st.lists(st.integers(-3, 7), max_size=12),
)
def test_ranges_of_other_queries(keys: list[int], queries: list[int]) -> None:
    start, count = class_ranges(
        torch.tensor(queries, dtype=torch.int64), torch.tensor(keys, dtype=torch.int64)
    )
    for label, first, n in zip(queries, start.tolist(), count.tolist(), strict=True):
        assert n == keys.count(label)
        assert keys[first : first + n] == [label] * n


def test_strided_labels(device: torch.device) -> None:
    labels = torch.tensor([[3, 9], [1, 9], [3, 9]], device=device)[:, 0]
    check_layout(ClassLayout.from_labels(labels), labels)


@pytest.mark.parametrize("shape", [(6,), (6, 3), (6, 2, 2)])
def test_sort_and_unsort(shape: tuple[int, ...], device: torch.device) -> None:
    layout = ClassLayout.from_labels(torch.tensor(LABELS["unsorted"], device=device))
    rows = torch.randn(shape, dtype=torch.float64, device=device, requires_grad=True)
    sorted_rows = layout.sort(rows)
    assert_same(sorted_rows.detach(), torch.stack([rows.detach()[i] for i in (1, 4, 3, 0, 2, 5)]))
    assert_same(layout.unsort(sorted_rows), rows)
    assert_same(layout.sort(layout.unsort(rows)), rows)


def test_gradients_of_sort_and_unsort(device: torch.device) -> None:
    layout = ClassLayout.from_labels(torch.tensor(LABELS["unsorted"], device=device))
    rows = torch.randn(6, 2, dtype=torch.float64, device=device, requires_grad=True)
    assert torch.autograd.gradcheck(layout.sort, rows)
    assert torch.autograd.gradcheck(layout.unsort, rows)
    weight = torch.randn(6, 2, dtype=torch.float64, device=device)
    (grad,) = torch.autograd.grad((layout.sort(rows) * weight).sum(), rows)
    assert_same(grad, torch.stack([weight[i] for i in (3, 0, 4, 2, 1, 5)]))


def test_gradient_of_sort_from_a_stride_0_upstream(device: torch.device) -> None:
    layout = ClassLayout.from_labels(torch.tensor(LABELS["unsorted"], device=device))
    rows = torch.randn(6, 2, dtype=torch.float64, device=device, requires_grad=True)
    layout.sort(rows).sum().backward()
    assert_same(rows.grad, torch.ones_like(rows))


def test_sort_without_rows(device: torch.device) -> None:
    layout = ClassLayout.from_labels(torch.empty(0, dtype=torch.int64, device=device))
    rows = torch.zeros(0, 4, device=device, requires_grad=True)
    layout.unsort(layout.sort(rows)).sum().backward()
    assert rows.grad is not None
    assert rows.grad.shape == (0, 4)


@pytest.mark.parametrize("complete", [True, False])
@given(st.lists(st.integers(0, 5), max_size=12))
def test_segments(complete: bool, counts: list[int]) -> None:
    values = torch.randn(sum(counts), 2, dtype=torch.float64)
    count = torch.tensor(counts, dtype=torch.int64)
    segment = torch.repeat_interleave(count)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(types, "COMPLETE", ("cpu",) if complete else ())
        sums, largest = segment_sum(values, segment, count), segment_max(values[:, 0], segment, count)
    parts = values.split(counts) if counts else []
    # At most 5 terms of size about 3: a few roundings of 2^-52.
    assert_close(sums, torch.stack([p.sum(0) for p in parts]) if counts else values, atol=1e-14)
    assert_same(largest, torch.tensor([max([0.0, *p[:, 0].tolist()]) for p in parts], dtype=torch.float64))


@given(st.lists(st.integers(0, 3), max_size=12))
def test_runs(values: list[int]) -> None:
    run, length = runs(torch.tensor(sorted(values), dtype=torch.int64))
    groups = [len(list(group)) for _, group in itertools.groupby(sorted(values))]
    assert length.tolist() == groups + [0] * (len(values) - len(groups))
    assert run.tolist() == [i for i, n in enumerate(groups) for _ in range(n)]
