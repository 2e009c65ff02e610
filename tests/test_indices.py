"""Index tuples: what is accepted, and the weights they give to rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from pytorch_metric_learning.utils.loss_and_miner_utils import convert_to_weights
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from tritonloss.indices import as_indices, miner_weights
from tritonloss.types import PairIndices, TripletIndices

EXAMPLE = ((0, 0, 1), (4, 8, 5), (1, 2, 3))
EXAMPLE_WEIGHTS = [1, 1, 0.5, 0.5, 0.5, 0.5, 0, 0, 0.5, 0, 0, 0]


def tensors(*entries: Any, dtype: torch.dtype = torch.int64) -> tuple[Tensor, ...]:
    return tuple(torch.tensor(entry, dtype=dtype) for entry in entries)


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("container", [tuple, list])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_three_tensors_are_triplets(container: type, dtype: torch.dtype) -> None:
    given = container(tensors(*EXAMPLE, dtype=dtype))
    indices = as_indices(given)
    assert isinstance(indices, TripletIndices)
    assert indices.anchors is given[0]
    assert indices.positives is given[1]
    assert indices.negatives is given[2]


@pytest.mark.parametrize("container", [tuple, list])
def test_four_tensors_are_pairs_of_two_lengths(container: type) -> None:
    given = container(tensors((0, 1), (1, 0), (0, 1, 2), (3, 3, 3)))
    indices = as_indices(given)
    assert isinstance(indices, PairIndices)
    assert indices.pos_anchors is given[0]
    assert indices.positives is given[1]
    assert indices.neg_anchors is given[2]
    assert indices.negatives is given[3]


def test_none_and_named_tuples_pass_unchanged() -> None:
    triplets = TripletIndices(*tensors(*EXAMPLE))
    pairs = PairIndices(*tensors((0,), (1,), (), ()))
    assert as_indices(None) is None
    assert as_indices(triplets) == triplets
    assert as_indices(pairs) == pairs


def test_entries_may_differ_in_integer_dtype() -> None:
    anchors, positives = tensors((0, 1), (1, 0))
    indices = as_indices((anchors, positives.int(), positives))
    assert indices is not None
    assert indices.positives.dtype == torch.int32


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        (torch.zeros(3, 2, dtype=torch.int64), TypeError, "None or a tuple of 3 tensors .* got Tensor"),
        ("abc", TypeError, "None or a tuple of 3 tensors .* got str"),
        ((), ValueError, "3 tensors .* or 4 tensors .* got 0"),
        (tensors((0,), (1,)), ValueError, "got 2"),
        (tensors((0,), (1,), (2,), (3,), (4,)), ValueError, "got 5"),
        ((*tensors((0,), (1,)), [2]), TypeError, "negatives must be a tensor, got list"),
        ((*tensors((0,), (1,)), None), TypeError, "negatives must be a tensor, got NoneType"),
        (
            tensors((0,), (1,), (2,), dtype=torch.int16),
            TypeError,
            "anchors .* torch.int64 or torch.int32, got torch.int16",
        ),
        (tensors((), (), (), dtype=torch.float32), TypeError, "anchors .* got torch.float32"),
        (tensors((0,), (1,), (0,), (True,), dtype=torch.bool), TypeError, "pos_anchors .* got torch.bool"),
        (tensors((0,), ((1,),), (2,)), ValueError, r"positives must be one-dimensional, got shape \[1, 1\]"),
        (tensors(0, 1, 2), ValueError, r"anchors must be one-dimensional, got shape \[\]"),
        (
            tensors((0, 1), (1, 0), (2,)),
            ValueError,
            r"anchors, positives, negatives must have the same length, got \[2, 2, 1\]",
        ),
        (tensors((0, 1), (1,), (0,), (2,)), ValueError, r"pos_anchors, positives must .* got \[2, 1\]"),
        (tensors((0,), (1,), (0,), (2, 3)), ValueError, r"neg_anchors, negatives must .* got \[1, 2\]"),
    ],
)
def test_errors_name_the_entry_and_what_came(given: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        as_indices(given)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("index_dtype", [torch.int64, torch.int32])
def test_weights_of_the_example(dtype: torch.dtype, index_dtype: torch.dtype) -> None:
    weights = miner_weights(
        TripletIndices(*tensors(*EXAMPLE, dtype=index_dtype)), 12, dtype=dtype, device=torch.device("cpu")
    )
    assert weights.dtype == dtype
    # Exact: 0, 1/2 and 1 are representable in every dtype.
    assert weights.tolist() == EXAMPLE_WEIGHTS


def test_weights_follow_the_definition_and_pml() -> None:
    generator = torch.Generator().manual_seed(0)
    anchors, positives = torch.randint(0, 40, (2, 300), generator=generator)
    neg_anchors, negatives = torch.randint(0, 50, (2, 100), generator=generator)
    indices = PairIndices(anchors, positives, neg_anchors.int(), negatives)
    weights = miner_weights(indices, 64, dtype=torch.float64, device="cpu")
    counts = [sum(int((entry == row).sum()) for entry in indices) for row in range(64)]
    # Exact: both divide the same two integers in float64.
    assert weights.tolist() == [count / max(counts) for count in counts]
    peer = convert_to_weights(
        (anchors, positives, neg_anchors, negatives), torch.zeros(64, dtype=torch.float64), torch.float64
    )
    # One float32 rounding, 6e-8: PML divides its integer counts in the default dtype.
    torch.testing.assert_close(weights, peer, atol=1e-7, rtol=0)


@pytest.mark.parametrize(
    "indices",
    [None, TripletIndices(*tensors((), (), ())), PairIndices(*tensors((), (), (), (), dtype=torch.int32))],
)
@pytest.mark.parametrize("size", [0, 5])
def test_without_indices_every_weight_is_one(indices: PairIndices | TripletIndices | None, size: int) -> None:
    weights = miner_weights(indices, size, dtype=torch.float32, device="cpu")
    assert weights.dtype == torch.float32
    assert weights.tolist() == [1.0] * size


def test_one_empty_side_still_counts_the_other() -> None:
    indices = PairIndices(*tensors((0, 0), (1, 2), (), ()))
    assert miner_weights(indices, 4, dtype=torch.float64, device="cpu").tolist() == [1, 0.5, 0.5, 0]


def test_counts_beyond_the_range_of_half_precision() -> None:
    rows = torch.zeros(70_000, dtype=torch.int64)  # float16 ends at 65504
    rows[:35_000] = 1
    indices = TripletIndices(rows, rows, rows)
    assert miner_weights(indices, 3, dtype=torch.float16, device="cpu").tolist() == [1, 1, 0]


@pytest.mark.usefixtures("deterministic")
def test_deterministic_mode_gives_the_same_bits() -> None:
    indices = TripletIndices(*(torch.arange(999) % size for size in (7, 11, 13)))
    first, second = (miner_weights(indices, 20, dtype=torch.float32, device="cpu") for _ in range(2))
    assert first.sum() > 0
    assert torch.equal(first, second)


def test_no_value_is_read_back() -> None:
    """Fake tensors have no values: reading one raises."""
    with FakeTensorMode():
        indices = as_indices(tuple(torch.zeros(5, dtype=torch.int64) for _ in range(3)))
        weights = miner_weights(indices, 8, dtype=torch.float32, device="cpu")
        with pytest.raises(DataDependentOutputException):
            weights.sum().item()
    assert weights.shape == (8,)
    assert not weights.requires_grad
