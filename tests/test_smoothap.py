"""SmoothAPLoss: published values, the definition, pytorch-metric-learning where it is right, and life as a module."""

from __future__ import annotations

import copy
import pickle
import time
from collections.abc import Callable

import pytest
import torch
from checks import assert_as_exact_as, assert_close, assert_same, value_and_grad
from hypothesis import given
from hypothesis import strategies as st
from inputs import DUP, E1, E2, E3, E4, EQ, GOLDEN_A, GOLDEN_B, Batch, random_batch
from pytorch_metric_learning import losses as pml_losses
from torch import Tensor

from tritonloss import reference, regularizers, use_backend
from tritonloss.distances import DotProductSimilarity
from tritonloss.functional import smooth_ap_loss
from tritonloss.losses import SmoothAPLoss
from tritonloss.losses.base import fraction
from tritonloss.ops import soft_rank
from tritonloss.reducers import MeanReducer, MultipleReducers

TRIPLETS = tuple(torch.tensor(rows) for rows in ([0, 0, 1], [4, 8, 5], [1, 2, 3]))


@pytest.fixture(params=["eager", "triton", "reference"])
def any_backend(request: pytest.FixtureRequest, clean_state: None) -> str:
    use_backend(request.param)
    return request.param


def rounding(size: int, dim: int, temperature: float) -> float:
    """A bound of the float64 rounding error of the loss and of its gradient.

    A similarity is off by D roundings, a sigmoid by that over its temperature, and an average precision, a ratio in
    [0, 1], by no more than the N sigmoids it is made of; the gradient divides by the temperature once more. 8 for the
    rest.
    """
    return 8 * size * dim * 2.0**-52 / temperature**2


def by_lists(rows: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """The definition in loops over queries and positives, from the words of the paper: rank in P over rank in all."""
    rows = rows / rows.norm(dim=1, keepdim=True)
    losses = []
    for q in range(len(rows)):
        members = [j for j in range(len(rows)) if labels[j] == labels[q]]
        if len(members) == 1:
            continue
        precision = []
        for i in members:
            steps = torch.sigmoid((rows @ rows[q] - rows[i] @ rows[q]) / temperature)
            among = 1 + sum(steps[j] for j in members if j != i)
            precision.append(among / (among + sum(steps[j] for j in range(len(rows)) if j not in members)))
        losses.append(1 - torch.stack(precision).mean())
    return torch.stack(losses).mean() if losses else rows.sum() * 0


@pytest.mark.parametrize(
    ("data", "value", "norm"),
    [(GOLDEN_A, 0.2969197344, 0.0383013529), (GOLDEN_B, 0.3893583081, 0.3059877673)],
)
def test_golden_values(
    data: Batch, value: float, norm: float, any_backend: str, device: torch.device
) -> None:
    loss, grad = value_and_grad(SmoothAPLoss(), *data.on(device))
    assert_close(loss.item(), value, atol=6e-11)  # printed to ten digits
    assert_close(grad.norm().item(), norm, atol=6e-11)


def test_golden_value_with_mined_triplets(any_backend: str, device: torch.device) -> None:
    mined = tuple(index.to(device) for index in TRIPLETS)
    criterion = SmoothAPLoss()
    loss, grad = value_and_grad(lambda e, y: criterion(e, y, mined), *GOLDEN_A.on(device))
    assert_close(loss.item(), 0.1093396074, atol=6e-11)
    assert_close(grad.norm().item(), 0.0219993542, atol=6e-11)


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4, 5], [0, 3, 1, 4, 2, 5]])
def test_the_order_of_the_rows_does_not_matter(
    order: list[int], any_backend: str, device: torch.device
) -> None:
    rows, labels = E3.on(device)
    assert_close(SmoothAPLoss()(rows[order], labels[order]).item(), 0.183892073, atol=6e-10)


@pytest.mark.parametrize(
    ("data", "expected", "slack"),
    [
        (E4, 0.1, 1e-12),
        (DUP, 0.0, 1e-12),
        # Each positive ties with one positive and two negatives: 1 - 1.5 / 2.5.
        (EQ, 0.4, 1e-12),
        # Rows 2 and 3 are alone; they still are negatives.
        (E1.labelled(0, 0, 1, 2), None, 1e-12),
    ],
)
def test_simple_lists(
    data: Batch, expected: float | None, slack: float, any_backend: str, device: torch.device
) -> None:
    loss, grad = value_and_grad(SmoothAPLoss(), *data.on(device))
    if expected is None:
        expected = by_lists(data.rows, data.labels, 0.01).item()
    assert_close(loss.item(), expected, atol=slack)
    assert grad.isfinite().all()


@pytest.mark.parametrize("labels", [[0, 1, 2, 3], [0, 0, 0, 0]])
def test_nothing_to_rank_is_a_zero_with_a_graph(
    labels: list[int], any_backend: str, device: torch.device
) -> None:
    loss, grad = value_and_grad(SmoothAPLoss(), *E1.labelled(*labels).on(device))
    assert loss.item() == 0
    assert_close(grad, torch.zeros_like(grad))


@pytest.mark.parametrize("rows", [0, 1])
def test_empty_and_single_row(rows: int, any_backend: str, device: torch.device) -> None:
    loss, grad = value_and_grad(
        SmoothAPLoss(),
        torch.ones(rows, 8, device=device),
        torch.zeros(rows, dtype=torch.int64, device=device),
    )
    assert loss.item() == 0
    assert grad.shape == (rows, 8)
    assert not grad.any()


@given(labels=st.lists(st.integers(-2, 3), max_size=8), seed=st.integers(0, 9))
def test_any_labels_equal_the_definition(labels: list[int], seed: int) -> None:
    rows = torch.randn(len(labels), 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    expected = value_and_grad(lambda e, y: by_lists(e, y, 0.1), rows, torch.tensor(labels, dtype=torch.int64))
    for name in ("eager", "triton", "reference"):
        with use_backend(name):
            actual = value_and_grad(SmoothAPLoss(0.1), rows, torch.tensor(labels, dtype=torch.int64))
        assert_close(actual, expected, atol=rounding(max(1, len(labels)), 3, 0.1))


def test_equals_pytorch_metric_learning_on_square_sorted_batches(
    any_backend: str, device: torch.device
) -> None:
    """Its 2.9.0 takes the class size for the number of classes: only as many classes as rows of each are comparable."""
    rows = random_batch(16, 6, 4).rows.to(device)
    labels = torch.arange(4, device=device).repeat_interleave(4)
    torch.set_default_dtype(torch.float64)  # its buffer of average precisions has the default dtype
    expected = value_and_grad(pml_losses.SmoothAPLoss(), rows, labels)
    assert_close(value_and_grad(SmoothAPLoss(), rows, labels), expected, atol=rounding(16, 6, 0.01))


def test_float32_is_as_exact_as_the_dense_definition(backend: str, device: torch.device) -> None:
    data = random_batch(24, 16, 5, n_lone=3).on(device)
    low = data.rows.detach().float()
    exact = value_and_grad(lambda e, y: reference.smooth_ap(e, y)[0].mean(), low.double(), data.labels)
    rival = value_and_grad(lambda e, y: reference.smooth_ap(e, y)[0].mean(), low, data.labels)
    actual = value_and_grad(lambda e, y: smooth_ap_loss(e, y, reduction="none").mean(), low, data.labels)
    for a, r, e in zip(actual, rival, exact, strict=True):
        assert_as_exact_as(a, r, e)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype, any_backend: str, device: torch.device) -> None:
    rows = GOLDEN_B.rows.to(device, dtype)
    loss, grad = value_and_grad(SmoothAPLoss(), rows, GOLDEN_B.labels.to(device))
    exact = SmoothAPLoss()(rows.double(), GOLDEN_B.labels.to(device))
    assert loss.dtype == grad.dtype == dtype
    # Computed in float32 from the same numbers, then rounded once.
    assert_close(loss.double(), exact, rtol=torch.finfo(dtype).eps)
    assert grad.isfinite().all()


def test_autocast_keeps_float32(device: torch.device) -> None:
    rows, labels = GOLDEN_B.on(device, torch.float32)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        inside = SmoothAPLoss()(rows, labels)
    assert inside.dtype == torch.float32
    assert_same(inside, SmoothAPLoss()(rows, labels))


def test_gradcheck(backend: str, device: torch.device) -> None:
    rows, labels = random_batch(9, 3, 3, n_lone=1).on(device)
    assert torch.autograd.gradcheck(
        lambda e: SmoothAPLoss(0.3)(e, labels), rows, fast_mode=backend == "triton"
    )


def test_reference_has_a_second_derivative_and_the_streams_refuse(device: torch.device) -> None:
    rows, labels = random_batch(6, 3, 2).on(device)
    with use_backend("reference"):
        assert torch.autograd.gradgradcheck(lambda e: SmoothAPLoss(0.3)(e, labels), rows)
    (grad,) = torch.autograd.grad(SmoothAPLoss(0.3)(rows, labels), rows, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivative"):
        grad.square().sum().backward()


def test_terms_hold_the_queries_only(any_backend: str, device: torch.device) -> None:
    rows, labels = GOLDEN_B.on(device)
    terms = SmoothAPLoss().loss_terms(rows, labels)
    assert list(terms) == ["ap_loss"]
    assert terms["ap_loss"]["indices"].tolist() == list(range(9))
    each = smooth_ap_loss(rows, labels, reduction="none")
    assert_same(terms["ap_loss"]["losses"], each[:9])
    assert not each[9:].any()


def test_every_way_to_the_mean_is_the_same(any_backend: str, device: torch.device) -> None:
    rows, labels = GOLDEN_B.on(device)
    expected = value_and_grad(SmoothAPLoss(), rows, labels)
    for reducer in (MultipleReducers({}), MultipleReducers({"ap_loss": MeanReducer()})):
        # The same nine numbers, added in another order.
        actual = value_and_grad(SmoothAPLoss(reducer=reducer), rows, labels)
        assert_close(actual, expected, atol=rounding(12, 5, 0.01))
    assert_close(smooth_ap_loss(rows, labels), expected[0])


def test_positives_among_themselves(backend: str, device: torch.device) -> None:
    """One large class: each pair (i, j), (j, i) adds G(x) + G(-x) = 1 to the ranks among it."""
    n = 130  # more than one tile of positives
    rows = torch.nn.functional.normalize(random_batch(n, 4, 1).rows, dim=1).to(device)
    start = torch.zeros(1, dtype=torch.int64, device=device)
    sums = soft_rank(rows[:1], rows, start, start + n, positive_ranks=True)
    assert sums.positive_ranks is not None
    # A sum of n^2 / 2 numbers of about 1, each off by a few roundings.
    assert_close(sums.positive_ranks.sum().item(), n * (n - 1) / 2, rtol=1e-13)
    assert not sums.ranks.any()  # there is no negative


def test_regularizer_is_added_after_the_reduction(device: torch.device) -> None:
    rows, labels = GOLDEN_B.on(device)
    criterion = SmoothAPLoss(embedding_regularizer=regularizers.LpRegularizer(), embedding_reg_weight=0.5)
    expected = SmoothAPLoss()(rows, labels) + 0.5 * regularizers.LpRegularizer()(rows)
    assert_close(criterion(rows, labels), expected, rtol=1e-15)


@pytest.mark.parametrize(
    ("error", "match", "call"),
    [
        (ValueError, "labels are required", lambda e, y: SmoothAPLoss()(e)),
        (ValueError, "ref_emb", lambda e, y: SmoothAPLoss()(e, y, ref_emb=e)),
        (ValueError, "ref_emb", lambda e, y: SmoothAPLoss().loss_terms(e, y, ref_emb=e)),
        (TypeError, "CosineSimilarity", lambda e, y: SmoothAPLoss(distance=DotProductSimilarity())),
        (ValueError, "temperature is 0", lambda e, y: SmoothAPLoss(0)),
        (ValueError, "temperature is nan", lambda e, y: SmoothAPLoss(float("nan"))),
        (TypeError, "temperature must be a number", lambda e, y: SmoothAPLoss("0.01")),
        (ValueError, "reduction", lambda e, y: smooth_ap_loss(e, y, reduction="sum")),
        (ValueError, "shape", lambda e, y: SmoothAPLoss()(e, y[:-1])),
        (TypeError, "integer", lambda e, y: SmoothAPLoss()(e, y.float())),
        (TypeError, "int64", lambda e, y: SmoothAPLoss()(e, y, tuple(i.short() for i in TRIPLETS))),
    ],
)
def test_what_is_refused(
    error: type[Exception], match: str, call: Callable[[Tensor, Tensor], object], device: torch.device
) -> None:
    with pytest.raises(error, match=match):
        call(*GOLDEN_A.on(device))


def test_copies_give_the_same(device: torch.device) -> None:
    rows, labels = E2.on(device)
    criterion = SmoothAPLoss(0.02)
    for copied in (copy.deepcopy(criterion), pickle.loads(pickle.dumps(criterion))):
        assert_same(copied(rows, labels), criterion(rows, labels))
    assert criterion.state_dict() == {}
    assert "temperature=0.02" in repr(criterion)


def test_bounded_class_size_gives_the_same(backend: str, device: torch.device) -> None:
    rows, labels = GOLDEN_B.on(device)
    expected = value_and_grad(SmoothAPLoss(), rows, labels)
    assert_same(value_and_grad(SmoothAPLoss(max_class_size=6), rows, labels), expected)


@given(part=st.floats(0, 2.0**40, width=32), rest=st.floats(0, 2.0**40, width=32))
def test_fraction_keeps_its_digits(part: float, rest: float) -> None:
    """Value and both derivatives to a few roundings, wherever they are normal numbers."""
    low = [torch.tensor(x, dtype=torch.float32, requires_grad=True) for x in (part, rest)]
    value = fraction(*low)
    grads = torch.autograd.grad(value, low)
    a, b = (x.detach().double() for x in low)
    whole = a + b if a + b > 0 else torch.ones(())
    tiny = torch.finfo(torch.float32).tiny
    # The value where part > rest is 1 minus a number of at most 1/2: one more rounding of a number below 1.
    assert_close(value, a / whole, rtol=1e-6, atol=tiny)
    if a + b > 0:
        assert_close(grads[0], b / whole**2, rtol=1e-6, atol=tiny)
        assert_close(grads[1], -a / whole**2, rtol=1e-6, atol=tiny)


def test_faster_than_the_peer(device: torch.device) -> None:
    """A guard against a return of the cube, far below what the benchmark measures."""
    labels = torch.arange(16, device=device).repeat_interleave(16)
    rows = random_batch(256, 16, 4).rows.to(device, torch.float32)

    def seconds(criterion: Callable[[Tensor, Tensor], Tensor]) -> float:
        start = time.process_time()
        value_and_grad(criterion, rows, labels)
        return time.process_time() - start

    value_and_grad(SmoothAPLoss(), rows, labels)
    assert min(seconds(SmoothAPLoss()) for _ in range(3)) < seconds(pml_losses.SmoothAPLoss()) / 3
