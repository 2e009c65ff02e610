"""PNPLoss: the definition, pytorch-metric-learning as peer, bad input, dtypes, and life as a module."""

import copy
import io
import math
import pickle

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pytorch_metric_learning import distances as pml_distances
from pytorch_metric_learning import losses as pml_losses
from pytorch_metric_learning import regularizers as pml_regularizers
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tritonloss import distances, use_backend
from tritonloss.functional import pnp_loss
from tritonloss.losses import PNPLoss

BACKENDS = ["eager", "triton", "reference"]
E1 = [[1, 0], [0.8, 0.6], [0, 1], [0.6, 0.8]]
E2 = [[1, 0], [0.6, 0.8], [0.6, 0.8], [0, 1]]
E3 = [[math.cos(math.radians(a)), math.sin(math.radians(a))] for a in (0, 20, 70, 50, 90, 110)]
E4 = [[1, 0], [0, 1], [-1, 0], [0, -1]]
EQ = [[1, 0]] * 4
PAIRS = [0, 0, 1, 1]
VARIANTS = [("O", {}), ("Iu", {}), ("Ib", {"b": 2}), ("Ds", {}), ("Dq", {"alpha": 1}), ("Dq", {"alpha": 8})]
# Sums of at most a few hundred float64 terms of order 1, divided by tau = 0.01: 100 * 1e-15 with a margin of ten.
FLOAT64 = {"rtol": 1e-12, "atol": 1e-12}


@pytest.fixture(autouse=True, params=BACKENDS)
def backend(request: pytest.FixtureRequest):
    if request.param == "triton" and not torch.cuda.is_available():
        pytest.importorskip("triton")
    with use_backend(request.param):
        yield request.param


def double(rows: list, device: torch.device) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64, device=device, requires_grad=True)


def value_and_grad(criterion, embeddings: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    leaf = embeddings.detach().clone().requires_grad_()
    loss = criterion(leaf, labels)
    return loss.detach(), torch.autograd.grad(loss, leaf)[0]


@pytest.mark.parametrize(
    ("rows", "labels", "expected"),
    [
        (E1, PAIRS, 0.254496525),
        (E2, PAIRS, 0.625),
        (E3, [0, 0, 0, 1, 1, 1], 0.861676681),
        (E4, PAIRS, 0.25),
        (EQ, PAIRS, 1.0),
        (E1, [0, 0, 1, 2], 0.254496525),
        (E1, [5, 5, -1, -1], 0.254496525),
    ],
)
def test_golden_values(rows, labels, expected, device) -> None:
    loss = PNPLoss()(double(rows, device), torch.tensor(labels, device=device))
    assert loss.item() == pytest.approx(expected, abs=6e-10)  # the golden values are printed to nine digits


def test_duplicates_do_no_harm(device) -> None:
    rows = double([[1, 0], [1, 0], [0, 1], [0, 1]], device)
    loss = PNPLoss()(rows, torch.tensor(PAIRS, device=device))
    loss.backward()
    assert 0 <= loss.item() < 1e-20
    assert rows.grad.isfinite().all()


def test_exact_tie_is_the_steepest_point(device) -> None:
    rows = double(E2, device)
    PNPLoss()(rows, torch.tensor(PAIRS, device=device)).backward()
    expected = torch.tensor(
        [[0, 0], [-3.5, 2.625], [3.5, -2.625], [0, 0]], dtype=torch.float64, device=device
    )
    torch.testing.assert_close(
        rows.grad, expected, rtol=0, atol=1e-5
    )  # the rest terms of rows 0 and 3 are e^-20 / tau


@pytest.mark.parametrize(
    ("variant", "options", "value_a", "norm_a", "value_b", "norm_b"),
    [
        ("O", {}, 1.3384954017, 0.0284682599, 4.1025572466, 1.2352167222),
        ("Iu", {}, 2.2401841617, 0.0289666974, 10.1977786560, 3.8535534411),
        ("Ib", {"b": 2}, 0.4033121665, 0.0005049998, 1.6786501165, 0.5647082415),
        ("Ds", {}, 0.7244409789, 0.0279699395, 1.1375443254, 0.5876799939),
        ("Dq", {"alpha": 1}, 0.4402628310, 0.0274764014, 0.4822392568, 0.4321789712),
        ("Dq", {"alpha": 8}, 0.7045237214, 0.1941869161, 0.6503870815, 0.4437168023),
    ],
)
def test_golden_variants(variant, options, value_a, norm_a, value_b, norm_b, device) -> None:
    i = torch.arange(12, dtype=torch.float64, device=device)[:, None]
    d = torch.arange(5, dtype=torch.float64, device=device)
    rows = torch.sin(1 + 3 * i + 7 * d)
    criterion = PNPLoss(variant=variant, **options)
    label_sets = (torch.arange(12) % 4, torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2, 3, 4, 5]))
    for labels, value, norm in zip(label_sets, (value_a, value_b), (norm_a, norm_b), strict=True):
        loss, grad = value_and_grad(criterion, rows, labels.to(device))
        assert loss.item() == pytest.approx(value, abs=6e-11)  # printed to ten digits
        assert grad.norm().item() == pytest.approx(norm, abs=6e-11)


@pytest.mark.parametrize(("variant", "options"), VARIANTS)
def test_agrees_with_pytorch_metric_learning(variant, options, device) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(30, 6, dtype=torch.float64, generator=generator).to(device)
    labels = torch.randint(0, 14, (30,), generator=generator).to(
        device
    )  # some of the 14 classes have one row
    expected = value_and_grad(pml_losses.PNPLoss(variant=variant, **options), rows, labels)
    actual = value_and_grad(PNPLoss(variant=variant, **options), rows, labels)
    torch.testing.assert_close(actual, expected, **FLOAT64)


@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # the backend is the same for all examples
)
@given(labels=st.lists(st.integers(-3, 4), max_size=9), seed=st.integers(0, 9))
def test_any_labels_agree_with_the_reference(backend, device, labels, seed) -> None:
    rows = torch.randn(len(labels), 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(
        device
    )
    labels = torch.tensor(labels, dtype=torch.int64, device=device)
    actual = value_and_grad(PNPLoss(variant="Ds", anneal=0.1), rows, labels)
    with use_backend("reference"):
        expected = value_and_grad(PNPLoss(variant="Ds", anneal=0.1), rows, labels)
    torch.testing.assert_close(actual, expected, **FLOAT64)


@pytest.mark.parametrize("labels", [[0, 1, 2, 3], [7, 7, 7, 7]])
@pytest.mark.parametrize("variant", ["O", "Dq"])
def test_nothing_to_rank_gives_a_zero_in_the_graph(labels, variant, device) -> None:
    loss, grad = value_and_grad(
        PNPLoss(variant=variant), double(E1, device), torch.tensor(labels, device=device)
    )
    assert loss == 0
    assert (grad == 0).all()


@pytest.mark.parametrize("n", [0, 1])
def test_empty_and_single(n, device) -> None:
    rows = torch.ones(n, 8, device=device, requires_grad=True)
    loss = PNPLoss()(rows, torch.zeros(n, dtype=torch.int64, device=device))
    loss.backward()
    assert loss == 0
    assert rows.grad.shape == (n, 8)
    assert (rows.grad == 0).all()


def test_per_query_losses(device) -> None:
    rows, labels = double(E1, device), torch.tensor([0, 0, 1, 2], device=device)
    per_query = pnp_loss(rows, labels, reduction="none")
    assert per_query.shape == (4,)
    assert (per_query[2:] == 0).all()
    torch.testing.assert_close(per_query[:2].mean(), pnp_loss(rows, labels), **FLOAT64)


def test_upstream_gradients_of_any_stride(device) -> None:
    rows, labels = double(E3, device), torch.tensor([0, 0, 0, 1, 1, 1], device=device)
    per_query = pnp_loss(rows, labels, reduction="none")

    def grad(upstream: Tensor) -> Tensor:
        return torch.autograd.grad(per_query, rows, upstream, retain_graph=True)[0]

    ones = torch.ones(6, dtype=torch.float64, device=device)
    dense = grad(ones)
    torch.testing.assert_close(grad(ones[:1].expand(6)), dense, rtol=0, atol=0)
    torch.testing.assert_close(
        grad(torch.ones(12, dtype=torch.float64, device=device)[::2]), dense, rtol=0, atol=0
    )
    torch.testing.assert_close(sum(grad(row) for row in torch.diag(ones)), dense, **FLOAT64)


def test_strided_embeddings(device) -> None:
    labels = torch.tensor(PAIRS, device=device)
    dense = double(E1, device)
    expected = value_and_grad(PNPLoss(), dense, labels)
    for view in (
        torch.zeros(4, 8, dtype=torch.float64, device=device)[:, :2],
        dense.detach().t().contiguous().t(),
    ):
        view = view.copy_(dense.detach()).requires_grad_()
        loss = PNPLoss()(view, labels)
        torch.testing.assert_close((loss.detach(), torch.autograd.grad(loss, view)[0]), expected, **FLOAT64)


def test_backward_twice_leaves_input_alone(device) -> None:
    rows, labels = double(E3, device), torch.tensor([0, 0, 0, 1, 1, 1], device=device)
    before = rows.detach().clone()
    loss = PNPLoss()(rows, labels)
    first = torch.autograd.grad(loss, rows, retain_graph=True)[0]
    second = torch.autograd.grad(loss, rows)[0]
    assert torch.equal(first, second)
    assert torch.equal(rows.detach(), before)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant, device) -> None:
    rows, labels = double(E1, device), torch.tensor(PAIRS, device=device)
    expected = value_and_grad(PNPLoss(), rows, labels)[1]
    loss = checkpoint(PNPLoss(), rows, labels, use_reentrant=reentrant)
    assert torch.equal(
        torch.autograd.grad(loss, rows)[0] if not reentrant else _backward(loss, rows), expected
    )


def _backward(loss: Tensor, rows: Tensor) -> Tensor:
    loss.backward()
    return rows.grad


def test_second_derivative(backend, device) -> None:
    rows = double(E2, device)
    loss = PNPLoss()(rows, torch.tensor(PAIRS, device=device))
    (grad,) = torch.autograd.grad(loss, rows, create_graph=True)
    if backend == "reference":
        second = torch.autograd.grad(grad.square().sum(), rows)[0]
        assert second.abs().max().item() == pytest.approx(106.0937, abs=6e-5)  # printed to four digits
    else:
        with pytest.raises(RuntimeError, match="reference"):
            grad.square().sum().backward()


def test_without_grad(device) -> None:
    rows, labels = double(E1, device), torch.tensor(PAIRS, device=device)
    expected = PNPLoss()(rows, labels).item()
    assert PNPLoss()(rows.detach(), labels).item() == expected
    with torch.no_grad():
        assert PNPLoss()(rows, labels).item() == expected


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_lower_precision(dtype, device) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(40, 16, generator=generator).to(device, dtype)
    labels = (torch.arange(40) // 4).to(device)
    loss, grad = value_and_grad(PNPLoss(variant="Ds"), rows, labels)
    expected_loss, expected_grad = value_and_grad(PNPLoss(variant="Ds"), rows.double(), labels)
    assert loss.dtype == grad.dtype == dtype
    # float32 similarities err by 1e-7, times 1 / tau = 100; then one rounding to the dtype.
    rounding = torch.finfo(dtype).eps + 1e-4
    torch.testing.assert_close(loss.double(), expected_loss, rtol=rounding, atol=0)
    assert (grad.double() - expected_grad).norm() <= rounding * expected_grad.norm()


def test_half_is_finite_where_the_peer_is_not(device) -> None:
    rows = torch.tensor(E1, device=device).half()
    loss, grad = value_and_grad(PNPLoss(), rows, torch.tensor(PAIRS, device=device))
    assert loss.item() == pytest.approx(0.2544, abs=1e-3)
    assert grad.isfinite().all()


def test_autocast_stays_in_float32(device) -> None:
    rows = torch.randn(24, 8, generator=torch.Generator().manual_seed(0)).to(device)
    labels = (torch.arange(24) // 3).to(device)
    expected = value_and_grad(PNPLoss(), rows, labels)
    leaf = rows.clone().requires_grad_()
    with torch.autocast(torch.device(device).type, torch.bfloat16):
        loss = PNPLoss()(leaf, labels)
        low = PNPLoss()(rows.bfloat16(), labels)
    assert low.dtype == torch.float32
    actual = loss.detach(), torch.autograd.grad(loss, leaf)[0]
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_nan_gives_nan(device) -> None:
    rows = double(E1, device).detach().clone()
    rows[0, 0] = torch.nan
    assert PNPLoss()(rows, torch.tensor(PAIRS, device=device)).isnan()


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool])
def test_label_dtypes(dtype, device) -> None:
    labels = torch.tensor(PAIRS, device=device).to(dtype)
    assert PNPLoss()(double(E1, device), labels).item() == pytest.approx(0.254496525, abs=6e-10)


def test_permutation_scale_and_names_of_classes_do_not_matter(device) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(20, 5, dtype=torch.float64, generator=generator).to(device)
    labels = torch.randint(0, 6, (20,), generator=generator).to(device)
    order = torch.randperm(20, generator=generator).to(device)
    loss, grad = value_and_grad(PNPLoss(), rows, labels)
    permuted, permuted_grad = value_and_grad(PNPLoss(), rows[order], -(labels[order] * 2**40))
    torch.testing.assert_close(permuted, loss, **FLOAT64)
    torch.testing.assert_close(permuted_grad, grad[order], **FLOAT64)
    scaled, scaled_grad = value_and_grad(PNPLoss(), rows * 8, labels)
    torch.testing.assert_close(scaled, loss, **FLOAT64)
    torch.testing.assert_close(scaled_grad * 8, grad, **FLOAT64)


@pytest.mark.parametrize("budget", [1, 600, 10**6])
@pytest.mark.parametrize("bound", [None, 9])
def test_memory_budget_and_class_bound_change_nothing(budget, bound, device) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(30, 5, dtype=torch.float64, generator=generator).to(device)
    labels = torch.randint(0, 8, (30,), generator=generator).to(device)
    assert labels.bincount().max() <= 9
    expected = value_and_grad(PNPLoss(), rows, labels)
    actual = value_and_grad(PNPLoss(memory_budget=budget, max_class_size=bound), rows, labels)
    torch.testing.assert_close(actual, expected, **FLOAT64)


def test_loss_terms_and_regularizer(device) -> None:
    rows, labels = double(E1, device), torch.tensor(PAIRS, device=device)
    criterion = PNPLoss(
        distance=pml_distances.CosineSimilarity(),
        embedding_regularizer=pml_regularizers.LpRegularizer(),
        embedding_reg_weight=3.0,
    )
    terms = criterion.loss_terms(rows, labels)
    assert set(terms) == {"loss", "embedding_reg_loss"}
    assert terms["loss"]["indices"] is None
    assert terms["loss"]["losses"].item() == pytest.approx(0.254496525, abs=6e-10)
    # Every row of E1 has norm 1.
    assert criterion(rows, labels).item() == pytest.approx(0.254496525 + 3.0, abs=6e-10)


@pytest.mark.parametrize("copied", ["deepcopy", "pickle", "save"])
def test_copies_after_use(copied, device) -> None:
    rows, labels = double(E1, device), torch.tensor(PAIRS, device=device)
    criterion = PNPLoss(variant="Ds", anneal=0.02)
    expected = criterion(rows, labels)
    if copied == "deepcopy":
        twin = copy.deepcopy(criterion)
    elif copied == "pickle":
        twin = pickle.loads(pickle.dumps(criterion))
    else:
        buffer = io.BytesIO()
        torch.save(criterion, buffer)
        buffer.seek(0)
        twin = torch.load(buffer, weights_only=False)
    assert torch.equal(twin(rows, labels), expected)
    assert criterion.state_dict() == {}
    assert "variant='Ds'" in repr(criterion)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"variant": "X"}, ValueError, "variant"),
        ({"anneal": 0}, ValueError, "anneal"),
        ({"anneal": "small"}, TypeError, "anneal"),
        ({"anneal": -0.01}, ValueError, "anneal is -0.01: expected a number above 0"),
        ({"anneal": float("nan")}, ValueError, "anneal is nan"),
        ({"alpha": float("nan"), "variant": "Dq"}, ValueError, "alpha is nan"),
        ({"b": True}, TypeError, "b must be a number, got bool"),
        ({"variant": "Ib", "b": 0}, ValueError, "b is 0"),
        ({"distance": distances.LpDistance()}, TypeError, "CosineSimilarity"),
        (
            {"distance": distances.DotProductSimilarity(normalize_embeddings=True)},
            TypeError,
            "CosineSimilarity",
        ),
        ({"distance": "cosine"}, TypeError, "distance"),
        ({"reducer": None}, TypeError, "reducer"),
        ({"embedding_regularizer": 3}, TypeError, "embedding_regularizer"),
    ],
)
def test_bad_options(options, error, text) -> None:
    with pytest.raises(error, match=text):
        PNPLoss(**options)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"labels": None}, ValueError, "labels are required"),
        ({"labels": torch.tensor([0, 0, 1])}, ValueError, "labels"),
        ({"labels": torch.zeros(4, 1, dtype=torch.int64)}, ValueError, "labels"),
        ({"labels": torch.zeros(4)}, TypeError, "labels"),
        ({"labels": [0, 0, 1, 1]}, TypeError, "labels"),
        ({"labels": torch.zeros(4, dtype=torch.int64, device="meta")}, ValueError, "labels must be on"),
        ({"embeddings": torch.ones(4, 2, dtype=torch.int64)}, TypeError, "embeddings"),
        ({"embeddings": torch.ones(4)}, ValueError, "embeddings"),
        ({"embeddings": torch.ones(4, 2, 1)}, ValueError, "embeddings"),
        ({"embeddings": [[1.0, 0.0]] * 4}, TypeError, "embeddings"),
        ({"indices_tuple": (torch.tensor([0]),) * 3}, ValueError, "indices_tuple"),
        ({"ref_emb": torch.ones(4, 2)}, ValueError, "ref_emb"),
        ({"ref_labels": torch.tensor(PAIRS)}, ValueError, "ref_emb"),
    ],
)
def test_bad_calls(change, error, text) -> None:
    criterion = PNPLoss()
    arguments = {"embeddings": torch.tensor(E1), "labels": torch.tensor(PAIRS), **change}
    with pytest.raises(error, match=text):
        criterion(**arguments)
    assert criterion(torch.tensor(E1), torch.tensor(PAIRS)).item() == pytest.approx(0.2544965, abs=1e-6)


def test_bad_reduction() -> None:
    with pytest.raises(ValueError, match="reduction"):
        pnp_loss(torch.tensor(E1), torch.tensor(PAIRS), reduction="sum")


def test_golden_gradient(device) -> None:
    rows = double(E1, device)
    PNPLoss()(rows, torch.tensor(PAIRS, device=device)).backward()
    expected = [0, -8.3e-7, -0.0741847, 0.0989129, -8.3e-7, 0, 0.0989129, -0.0741847]
    # Printed to seven digits, of a float32 run: its similarities are off by 6e-8, times 0.07 / tau.
    assert rows.grad.flatten().tolist() == pytest.approx(expected, abs=5e-7)


def test_golden_value_of_a_variant(device) -> None:
    labels = torch.tensor([0, 0, 0, 1, 1, 1], device=device)
    loss = PNPLoss(variant="Ds")(double(E3, device), labels)
    assert loss.item() == pytest.approx(0.469207958, abs=6e-10)  # printed to nine digits


def test_gradient_of_one_query_alone(device) -> None:
    """Every loss has its own upstream gradient: against central differences of the first."""
    rows, labels = double(E1, device), torch.tensor(PAIRS, device=device)
    options = {"reduction": "none", "anneal": 0.1}
    upstream = torch.tensor([1.0, 0, 0, 0], dtype=torch.float64, device=device)
    pnp_loss(rows, labels, **options).backward(upstream)
    step = 1e-6
    expected = torch.zeros_like(rows)
    for i in range(rows.numel()):
        values = []
        for sign in (1, -1):
            moved = rows.detach().clone()
            moved.view(-1)[i] += sign * step
            values.append(pnp_loss(moved, labels, **options)[0])
        expected.view(-1)[i] = (values[0] - values[1]) / (2 * step)
    # step^2 times the third derivative, 1e-12 / 0.1^3, and the rounding 1e-16 / step.
    torch.testing.assert_close(rows.grad, expected.detach(), rtol=0, atol=5e-9)
    assert rows.grad[3].abs().max() > 0.1  # the negatives of query 0 are in it


def test_labels_without_a_second_row_do_not_reach_the_mean(device) -> None:
    """Lone rows are negatives of the others, no queries: the mean is over 2 of 4 rows."""
    rows = double(E1, device)
    per_query = pnp_loss(rows, torch.tensor([0, 0, 1, 2], device=device), reduction="none")
    per_query.sum().backward()
    assert (per_query[2:] == 0).all()
    assert rows.grad[2:].abs().sum() > 0.1
