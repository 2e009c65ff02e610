"""ProxyAnchorLoss and BaseProxyLoss: the definition, pytorch-metric-learning as peer, proxies, labels and precision.

What holds for every loss stands in test_common.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from checks import assert_close, assert_same
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from inputs import E1, Batch, random_batch
from pytorch_metric_learning import distances as pml_distances
from pytorch_metric_learning import losses as pml_losses
from pytorch_metric_learning import reducers as pml_reducers
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F

from tritonloss import distances, reducers, regularizers, use_backend
from tritonloss.functional import proxy_anchor_loss
from tritonloss.losses import BaseProxyLoss, ProxyAnchorLoss
from tritonloss.losses.proxy_anchor import count_present

# alpha (|s| + margin) <= 36: exponents err by 4e-15, their exponentials relatively by as much; a margin of a hundred.
FLOAT64 = {"rtol": 1e-12, "atol": 1e-12}
N_CLASSES = 9
BATCH = random_batch(22, 5, 5, n_lone=3)  # labels below 8: class 8 is absent


@pytest.fixture(params=["eager", "triton", "reference"])
def any_backend(request: pytest.FixtureRequest, clean_state: None) -> str:
    use_backend(request.param)
    return request.param


def loss_of(batch: Batch, n_classes: int = N_CLASSES, **options: Any) -> ProxyAnchorLoss:
    """The loss with proxies that are always the same, in the dtype and on the device of the rows."""
    generator = torch.Generator().manual_seed(3)
    criterion = ProxyAnchorLoss(n_classes, batch.rows.shape[1], **options)
    with torch.no_grad():
        criterion.weight.copy_(torch.randn(criterion.weight.shape, generator=generator))
    return criterion.to(batch.rows)


def identity_loss(device: torch.device, **options: Any) -> ProxyAnchorLoss:
    def identity(weight: Tensor) -> None:
        nn.init.eye_(weight)

    return ProxyAnchorLoss(2, 2, weight_init_func=identity, **options).to(device, torch.float64)


def evaluate(
    criterion: nn.Module, batch: Batch, indices: Any = None, parameter: str = "weight"
) -> tuple[Tensor, Tensor, Tensor]:
    """Value, gradient of the rows, gradient of the proxies."""
    leaf = batch.rows.detach().clone().requires_grad_()
    value = criterion(leaf, batch.labels, indices)
    grads = torch.autograd.grad(value, [leaf, getattr(criterion, parameter)])
    return value.detach(), *grads


# --- the definition ---


def test_golden_values(any_backend: str, device: torch.device) -> None:
    criterion = identity_loss(device)
    # Printed to nine digits after the point.
    assert criterion(*E1.on(device)).item() == pytest.approx(22.400000005, abs=6e-10)
    rows = torch.tensor([[1.0, 0.0]], dtype=torch.float64, device=device)
    loss = criterion(rows, torch.tensor([0], device=device))
    expected = math.log1p(math.exp(-28.8)) + 0.5 * math.log1p(math.exp(3.2))
    assert loss.item() == pytest.approx(expected, rel=1e-14)
    assert loss.item() == pytest.approx(1.619976667, abs=6e-10)


def test_by_hand_with_weights(any_backend: str, device: torch.device) -> None:
    """E1 with triplets: the row that is mined twice weighs 1, those mined once 1/2, row 3 nothing."""
    rows, labels = E1.on(device)
    indices = tuple(torch.tensor(t, device=device) for t in ([0, 0], [1, 1], [2, 0]))
    w = [1.0, 2 / 3, 1 / 3, 0.0]  # counts 3, 2, 1, 0
    s = E1.rows.tolist()  # the proxies are the axes
    y = E1.labels.tolist()

    def side(p: int, own: bool) -> float:
        sign = -1 if own else 1
        terms = [w[x] * math.exp(32 * (sign * s[x][p] + 0.1)) for x in range(4) if (y[x] == p) == own]
        return math.log1p(sum(terms))

    expected = sum(side(p, own) for p in (0, 1) for own in (True, False)) / 2
    assert identity_loss(device)(rows, labels, indices).item() == pytest.approx(expected, rel=1e-13)


def test_classes_that_were_not_mined_are_counted(any_backend: str, device: torch.device) -> None:
    """|P+| counts the classes of the batch: a mined class is divided by their number, not by that of the mined ones."""
    rows, labels = E1.on(device)
    indices = tuple(torch.tensor([i], device=device) for i in (0, 1, 1))
    terms = identity_loss(device).loss_terms(rows, labels, indices)
    assert terms["pos_loss"]["divisor"] == 2
    assert terms["pos_loss"]["losses"][1] == 0


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("options", [{}, {"margin": -0.3, "alpha": 5}, {"alpha": 80.0}], ids=str)
def test_agrees_with_pytorch_metric_learning(
    options: dict[str, float], seed: int, any_backend: str, device: torch.device
) -> None:
    batch = random_batch(30, 6, 7, n_lone=2, seed=seed).on(device)
    ours = loss_of(batch, 12, **options)
    theirs = pml_losses.ProxyAnchorLoss(12, 6, **options).to(device)
    theirs.proxies.data = ours.weight.detach().clone()
    assert_close(evaluate(ours, batch), evaluate(theirs, batch, parameter="proxies"), **FLOAT64)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (distances.LpDistance(), pml_distances.LpDistance()),
        (distances.LpDistance(normalize_embeddings=False, power=2),
         pml_distances.LpDistance(normalize_embeddings=False, power=2)),
        (distances.DotProductSimilarity(), pml_distances.DotProductSimilarity(normalize_embeddings=False)),
        (pml_distances.SNRDistance(), pml_distances.SNRDistance()),
        (pml_distances.CosineSimilarity(), pml_distances.CosineSimilarity()),
    ],
    ids=["lp", "squared", "dot", "pml-snr", "pml-cosine"],
)  # fmt: skip
def test_distances_agree_with_pytorch_metric_learning(
    ours: Any, theirs: Any, any_backend: str, device: torch.device
) -> None:
    batch = BATCH.on(device)
    criterion = loss_of(batch, distance=ours, alpha=4)
    peer = pml_losses.ProxyAnchorLoss(N_CLASSES, 5, alpha=4, distance=theirs).to(device)
    peer.proxies.data = criterion.weight.detach().clone()
    assert_close(evaluate(criterion, batch), evaluate(peer, batch, parameter="proxies"), **FLOAT64)
    assert_close(criterion.get_logits(batch.rows), peer.get_logits(batch.rows), **FLOAT64)


@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # the backend is the same for all examples
)
@given(labels=st.lists(st.integers(0, 4), max_size=12), seed=st.integers(0, 9), data=st.data())
def test_any_labels_and_tuples_agree_with_the_reference(
    labels: list[int], seed: int, data: st.DataObject, backend: str, device: torch.device
) -> None:
    use_backend(backend)
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(len(labels), 3, dtype=torch.float64, generator=generator).to(device)
    batch = Batch(rows, torch.tensor(labels, dtype=torch.int64, device=device))
    indices = None
    if labels and data.draw(st.booleans()):
        row = st.integers(0, len(labels) - 1)
        triplets = data.draw(st.lists(st.tuples(row, row, row), max_size=5))
        indices = tuple(
            torch.tensor([t[k] for t in triplets], dtype=torch.int64, device=device) for k in range(3)
        )
    criterion = loss_of(batch, 5)
    actual = evaluate(criterion, batch, indices)
    use_backend("reference")
    assert_close(actual, evaluate(criterion, batch, indices), **FLOAT64)


@pytest.mark.parametrize("weighted", [False, True])
def test_function_equals_module(weighted: bool, any_backend: str, device: torch.device) -> None:
    batch = BATCH.on(device)
    criterion = loss_of(batch)
    pairs = tuple(torch.tensor(t, device=device) for t in ([0, 1, 1], [2, 3, 4], [5], [1]))
    # Row 1 is mined three times, the rows 0, 2, 3, 4, 5 once, the others never.
    weights = torch.zeros(22, dtype=torch.float64, device=device)
    weights[[0, 2, 3, 4, 5]] = 1 / 3
    weights[1] = 1
    function = proxy_anchor_loss(*batch, criterion.weight, weights=weights if weighted else None)
    assert_close(function, criterion(*batch, pairs if weighted else None), **FLOAT64)


def test_count_of_present_classes(device: torch.device) -> None:
    for classes, expected in (([0, 0, 3, -1], 2), ([-1, -1], 0), ([], 0), ([3, 2, 1, 0], 4)):
        assert count_present(torch.tensor(classes, dtype=torch.int64, device=device), 4) == expected


# --- terms, reducers, regularizers ---


def test_terms(any_backend: str, device: torch.device) -> None:
    batch = BATCH.on(device)
    criterion = loss_of(
        batch,
        weight_regularizer=regularizers.LpRegularizer(),
        weight_reg_weight=2.0,
        embedding_regularizer=regularizers.LpRegularizer(power=2),
    )
    terms = criterion.loss_terms(*batch)
    assert list(terms) == ["pos_loss", "neg_loss", "embedding_reg_loss", "weight_reg_loss"]
    n_present = len(batch.labels.unique())
    for name, divisor in (("pos_loss", n_present), ("neg_loss", N_CLASSES)):
        assert terms[name]["losses"].shape == (N_CLASSES,)
        assert_same(terms[name]["indices"], torch.arange(N_CLASSES, device=device))
        assert terms[name]["divisor"] == divisor
    assert terms["pos_loss"]["losses"][8] == 0  # no row of class 8
    penalty = 2 * criterion.weight.norm(dim=1).mean() + batch.rows.square().sum(1).mean()
    plain = terms["pos_loss"]["losses"].sum() / n_present + terms["neg_loss"]["losses"].mean()
    assert_close(criterion(*batch), plain + penalty, **FLOAT64)


def test_penalties_remain_without_rows(any_backend: str, device: torch.device) -> None:
    batch = BATCH.on(device)
    criterion = loss_of(batch, weight_regularizer=regularizers.LpRegularizer())
    loss = criterion(batch.rows[:0], batch.labels[:0])
    assert_close(loss, criterion.weight.norm(dim=1).mean(), **FLOAT64)


@pytest.mark.parametrize(
    "reducer",
    [
        reducers.DivisorReducer(),
        pml_reducers.DivisorReducer(),
        reducers.MultipleReducers(
            {"pos_loss": reducers.DivisorReducer(), "neg_loss": reducers.DivisorReducer()}
        ),
        reducers.MultipleReducers({}, default_reducer=reducers.DivisorReducer()),
    ],
)
def test_reducers_that_divide(reducer: Any, device: torch.device) -> None:
    batch = BATCH.on(device)
    assert_close(evaluate(loss_of(batch, reducer=reducer), batch), evaluate(loss_of(batch), batch), **FLOAT64)


@pytest.mark.parametrize(
    "reducer",
    [
        reducers.MeanReducer(),
        pml_reducers.MeanReducer(),
        reducers.MultipleReducers({"pos_loss": reducers.DivisorReducer()}),
    ],
)
def test_reducers_that_cannot_divide(reducer: Any, device: torch.device) -> None:
    batch = BATCH.on(device)
    with pytest.raises(ValueError, match="divisor"):
        loss_of(batch, reducer=reducer)(*batch)


# --- the proxies ---


def test_initialisation() -> None:
    weight = ProxyAnchorLoss(400, 50).weight
    assert isinstance(weight, nn.Parameter)
    assert weight.shape == (400, 50)
    assert weight.dtype == torch.get_default_dtype()
    # kaiming_normal_ with fan_out: variance 2 / num_classes; 20000 samples, so 1 / sqrt(40000) = 0.005 relative error.
    assert weight.std().item() == pytest.approx(math.sqrt(2 / 400), rel=0.025)
    assert BaseProxyLoss(400, 50).weight.std().item() == pytest.approx(1, rel=0.025)
    torch.manual_seed(5)
    ours = ProxyAnchorLoss(7, 3).weight
    torch.manual_seed(5)
    assert_same(ours.detach(), pml_losses.ProxyAnchorLoss(7, 3).proxies.detach())


def test_initialisation_by_a_function() -> None:
    filled: list[Tensor] = []

    def fill(weight: Tensor) -> None:
        filled.append(weight)
        nn.init.constant_(weight, 2)

    criterion = ProxyAnchorLoss(3, 4, weight_init_func=fill)
    assert filled[0] is criterion.weight
    assert (criterion.weight == 2).all()


@pytest.mark.parametrize("distance", [None, distances.LpDistance(), distances.DotProductSimilarity()])
def test_logits(distance: Any, device: torch.device) -> None:
    batch = BATCH.on(device)
    criterion = loss_of(batch, distance=distance)
    expected = (distance or distances.CosineSimilarity())(batch.rows, criterion.weight)
    assert_close(criterion.get_logits(batch.rows), expected, **FLOAT64)
    low = loss_of(batch, distance=distance).to(torch.bfloat16)
    logits = low.get_logits(batch.rows.bfloat16())
    assert logits.dtype == torch.bfloat16
    with torch.autocast(device.type, torch.bfloat16):
        logits = loss_of(batch, distance=distance).float().get_logits(batch.rows.bfloat16())
    assert logits.dtype == torch.float32


@pytest.mark.parametrize("frozen", ["proxies", "embeddings"])
def test_frozen_side(frozen: str, backend: str, device: torch.device) -> None:
    batch = BATCH.on(device)
    criterion = loss_of(batch)
    _, grad_rows, grad_weight = evaluate(criterion, batch)
    rows = batch.rows.detach().requires_grad_(frozen == "proxies")
    criterion.weight.requires_grad_(frozen == "embeddings")
    criterion(rows, batch.labels).backward()
    if frozen == "proxies":
        assert criterion.weight.grad is None
        assert_same(rows.grad, grad_rows)
    else:
        assert rows.grad is None
        assert_same(criterion.weight.grad, grad_weight)


def test_checkpoint_of_pytorch_metric_learning_2(device: torch.device) -> None:
    peer = pml_losses.ProxyAnchorLoss(4, 3)
    criterion = ProxyAnchorLoss(4, 3)
    assert list(criterion.state_dict()) == ["weight"]
    with pytest.raises(RuntimeError, match="proxies"):
        criterion.load_state_dict(peer.state_dict())
    saved = peer.state_dict()
    criterion.load_state_dict(ProxyAnchorLoss.convert_pml_state_dict(saved))
    assert_same(criterion.weight.detach(), peer.proxies.detach())
    assert list(saved) == ["proxies"]
    # Within a larger module.
    model = nn.ModuleDict({"trunk": nn.Linear(2, 3), "criterion": peer})
    converted = BaseProxyLoss.convert_pml_state_dict(model.state_dict(), prefix="criterion.")
    nn.ModuleDict({"trunk": nn.Linear(2, 3), "criterion": criterion}).load_state_dict(converted)
    with pytest.raises(KeyError, match=r"no 'proxies' in the state dict: its keys are weight"):
        ProxyAnchorLoss.convert_pml_state_dict(criterion.state_dict())


def test_replica_of_data_parallel(backend: str, device: torch.device) -> None:
    """What torch.nn.parallel.replicate makes: its weight is a tensor with a history, not a parameter."""
    batch = BATCH.on(device)
    criterion = loss_of(batch, weight_regularizer=regularizers.LpRegularizer())
    expected = evaluate(criterion, batch)
    replica = criterion._replicate_for_data_parallel()
    replica.weight = criterion.weight * 1  # type: ignore[assignment]
    loss = replica(*batch)
    (grad,) = torch.autograd.grad(loss, criterion.weight)
    assert_same((loss.detach(), grad), (expected[0], expected[2]))


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"num_classes": 0}, ValueError, "num_classes is 0"),
        ({"num_classes": 3.0}, TypeError, "num_classes must be an int, got float"),
        ({"embedding_size": 0}, ValueError, "embedding_size is 0"),
        ({"embedding_size": None}, TypeError, "embedding_size must be an int, got NoneType"),
        ({"margin": "wide"}, TypeError, "margin must be a number, got str"),
        ({"alpha": None}, TypeError, "alpha must be a number, got NoneType"),
        ({"alpha": float("nan")}, ValueError, "alpha is nan"),
        ({"weight_init_func": 3}, TypeError, "weight_init_func"),
        ({"weight_regularizer": 3}, TypeError, "weight_regularizer"),
        ({"distance": "cosine"}, TypeError, "distance"),
        ({"reducer": 3}, TypeError, "reducer"),
        ({"no_such": 3}, TypeError, "no_such"),
    ],
)
def test_bad_options(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        ProxyAnchorLoss(**{"num_classes": 3, "embedding_size": 2, **options})


# --- labels and other arguments ---


@pytest.mark.parametrize("distance", [None, distances.LpDistance()], ids=["cosine", "lp"])
@pytest.mark.parametrize("label", [2, -1, 2**40])
def test_label_out_of_range(label: int, distance: Any, any_backend: str, device: torch.device) -> None:
    rows, labels = E1.on(device)
    criterion = identity_loss(device, distance=distance)
    expected = criterion(rows, labels)
    wrong = labels.clone()
    wrong[3] = label
    with pytest.raises(ValueError, match=rf"labels must be in 0 \.\. 1, one per class, got {label}$"):
        criterion(rows, wrong)
    with pytest.raises(ValueError, match=f"got {label}$"):
        proxy_anchor_loss(rows, wrong, criterion.weight, distance=distance)
    assert_same(criterion(rows, labels), expected)
    # Unchecked, the row is of no class.
    unchecked = identity_loss(device, distance=distance, check_label_range=False)
    terms = unchecked.loss_terms(rows, wrong)
    assert terms["pos_loss"]["divisor"] == 2
    wrong[3] = 0
    as_class_0 = identity_loss(device, distance=distance).loss_terms(rows, wrong)
    # It repels proxy 1 as a row of class 0 does.
    assert_close(terms["neg_loss"]["losses"][1], as_class_0["neg_loss"]["losses"][1], **FLOAT64)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"labels": None}, ValueError, "ProxyAnchorLoss: labels are required"),
        ({"labels": torch.tensor([0, 0, 1])}, ValueError, "labels"),
        ({"labels": torch.zeros(4)}, TypeError, "labels"),
        ({"embeddings": torch.ones(4, 3, dtype=torch.float64)}, ValueError, r"must have shape \[N, 2\]"),
        ({"embeddings": torch.ones(4)}, ValueError, "embeddings"),
        ({"embeddings": torch.ones(4, 2, dtype=torch.int64)}, TypeError, "embeddings"),
        ({"embeddings": E1.rows.float()}, ValueError, "dtype torch.float64, the embeddings torch.float32"),
        (
            {"embeddings": E1.rows.to("meta")},
            ValueError,
            "embeddings must have numbers, got .* on the meta device",
        ),
        ({"indices_tuple": (torch.tensor([0.0]),) * 3}, TypeError, "indices_tuple"),
        ({"ref_emb": torch.ones(4, 2)}, ValueError, "ref_emb"),
        ({"ref_labels": torch.zeros(4, dtype=torch.int64)}, ValueError, "ref_emb"),
    ],
)
def test_bad_calls(change: dict[str, Any], error: type[Exception], text: str) -> None:
    criterion = identity_loss(torch.device("cpu"))
    arguments = {"embeddings": E1.rows, "labels": E1.labels, **change}
    with pytest.raises(error, match=text):
        criterion(**arguments)
    assert criterion(E1.rows, E1.labels).item() == pytest.approx(22.4, abs=1e-8)


def test_proxies_elsewhere() -> None:
    with pytest.raises(ValueError, match="the proxies are on meta, the embeddings on cpu"):
        ProxyAnchorLoss(2, 2).double().to("meta")(E1.rows, E1.labels)
    with pytest.raises(ValueError, match="the proxies are on meta"):
        ProxyAnchorLoss(2, 2).double().to("meta").get_logits(E1.rows)


@pytest.mark.parametrize(
    ("weights", "error", "text"),
    [
        ([1.0] * 4, TypeError, "weights must be a floating tensor, got list"),
        (torch.ones(4, dtype=torch.int64), TypeError, "weights must be a floating tensor, got torch.int64"),
        (torch.ones(3), ValueError, r"weights must have shape \[4\], got \[3\]"),
        (torch.ones(4, device="meta"), ValueError, "weights must be on cpu"),
    ],
)
def test_bad_weights(weights: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        proxy_anchor_loss(E1.rows, E1.labels, torch.eye(2, dtype=torch.float64), weights=weights)


# --- precision ---


@pytest.mark.parametrize(
    "distance", [None, distances.LpDistance(), pml_distances.LpDistance()], ids=["cosine", "lp", "pml"]
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_autocast_casts_up_and_leaves_the_proxies_alone(
    dtype: torch.dtype, distance: Any, any_backend: str, device: torch.device
) -> None:
    """The bits of a float32 call on the rounded rows: PML#293."""
    batch = Batch(BATCH.rows.to(device, dtype), BATCH.labels.to(device))
    full = Batch(batch.rows.float(), batch.labels)
    criterion = loss_of(full, distance=distance, alpha=8)
    weight, before = criterion.weight, criterion.weight.detach().clone()
    expected = evaluate(criterion, full)
    leaf = batch.rows.detach().clone().requires_grad_()
    with torch.autocast(device.type, torch.bfloat16):
        loss = criterion(leaf, batch.labels)
    grads = torch.autograd.grad(loss, [leaf, weight])
    assert criterion.weight is weight
    assert_same(weight.detach(), before)
    assert_same((loss.detach(), *grads), (expected[0], expected[1].to(dtype), expected[2]))
    with pytest.raises(ValueError, match="outside autocast"):
        criterion(batch.rows, batch.labels)


def test_low_precision_weight_under_autocast(backend: str, device: torch.device) -> None:
    """A float32 batch, a bfloat16 weight and a backward pass within autocast, too: nothing is cast down."""
    batch = BATCH.on(device, torch.float32)
    low, full = loss_of(batch).to(torch.bfloat16), loss_of(batch)
    full.load_state_dict(low.state_dict())
    with torch.autocast(device.type, torch.bfloat16):
        value, grad_rows, grad_weight = evaluate(low, batch)
    expected = evaluate(full, batch)
    assert_same((value, grad_rows, grad_weight), (*expected[:2], expected[2].bfloat16()))


def test_weight_gradient_in_bfloat16(device: torch.device) -> None:
    """8192 rows, 32 classes: relative error below 1e-2 where plain bfloat16 sums are far off, ml-cross-entropy#14."""
    batch = random_batch(8192, 128, 32).on(device, torch.bfloat16)
    criterion = loss_of(batch, 32)
    grad = evaluate(criterion, batch)[2]
    exact = evaluate(criterion.double(), Batch(batch.rows.double(), batch.labels))[2]
    assert grad.dtype == torch.bfloat16
    error = (grad.double() - exact).norm() / exact.norm()
    # One rounding to bfloat16, 2^-9 at most, and the float32 rounding of exponents of 10, 1e-5.
    assert error <= 2**-9 + 1e-5


def trajectory(device: torch.device, autocast: bool) -> list[float]:
    torch.manual_seed(0)
    batch = random_batch(64, 16, 8, seed=5).on(device, torch.float32)
    rows = batch.rows.detach() + 2 * F.one_hot(batch.labels, 16)
    network, criterion = nn.Linear(16, 8).to(device), ProxyAnchorLoss(8, 8).to(device)
    optimizer = torch.optim.SGD([*network.parameters(), *criterion.parameters()], lr=0.005)
    values = []
    for _ in range(40):
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            loss = criterion(network(rows), batch.labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        values.append(loss.item())
    return values


def test_training_under_autocast_follows_float32(device: torch.device) -> None:
    full, mixed = trajectory(device, False), trajectory(device, True)
    assert full[-1] < 0.5 * full[0]
    # bfloat16 rounds the embeddings by up to 2^-9, so the similarities by 2^-8, so each of the two terms, were all
    # errors aligned, by alpha = 32 times that: 0.125. The step is small enough for the paths not to part.
    assert max(abs(a - b) for a, b in zip(full, mixed, strict=True)) < 0.25


# --- compiled ---


def compiled_step(
    criterion: Callable[..., Tensor], weight: Tensor, n: int, indices: bool
) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(n)
    rows = torch.randn(n, 5, dtype=torch.float64, generator=generator).to(weight.device).requires_grad_()
    labels = torch.randint(0, N_CLASSES, (n,), generator=generator).to(weight.device)
    triplets = tuple(torch.arange(6, device=weight.device) + k for k in range(3))
    loss = criterion(rows, labels, triplets if indices else None)
    return loss.detach(), *torch.autograd.grad(loss, [rows, weight])


@pytest.mark.filterwarnings("ignore")  # torch.compile warns about itself
@pytest.mark.parametrize("indices", [False, True], ids=["plain", "mined"])
@pytest.mark.parametrize("distance", [None, distances.DotProductSimilarity()], ids=["cosine", "dot"])
def test_compiled_in_two_builds(distance: Any, indices: bool, device: torch.device, compiler: None) -> None:
    criterion = loss_of(BATCH.on(device), distance=distance, alpha=4)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(criterion, fullgraph=True, backend=counter)
    for n in (24, 23, 40, 17, 31, 64):
        assert_close(
            compiled_step(compiled, criterion.weight, n, indices),
            compiled_step(criterion, criterion.weight, n, indices),
            **FLOAT64,
        )
    assert counter.frame_count <= 2


@pytest.mark.filterwarnings("ignore")
def test_compiled_labels_are_checked(device: torch.device, compiler: None) -> None:
    criterion = identity_loss(device)
    compiled = torch.compile(criterion, fullgraph=True, backend="aot_eager")
    rows, labels = E1.on(device)
    expected = criterion(rows, labels)
    wrong = labels.clone()
    wrong[3] = 2
    with pytest.raises(ValueError, match=r"got 2(\n|$)"):  # torch 2.6 adds where the graph was made
        compiled(rows, wrong)
    assert_close(compiled(rows, labels), expected, **FLOAT64)


@pytest.mark.filterwarnings("ignore")
def test_other_distances_compile_around_a_graph_break(device: torch.device, compiler: None) -> None:
    criterion = loss_of(BATCH.on(device), distance=distances.LpDistance(), alpha=4)
    compiled = torch.compile(criterion, backend="aot_eager")
    for n in (24, 23):
        assert_close(
            compiled_step(compiled, criterion.weight, n, False),
            compiled_step(criterion, criterion.weight, n, False),
            **FLOAT64,
        )


# --- a new proxy loss ---


class NormalizedSoftmaxLoss(BaseProxyLoss):
    """Cross entropy of the cosines over a temperature: Zhai and Wu, 2019."""

    def compute_loss(self, embeddings: Tensor, labels: Any, *_: Any) -> Any:
        losses = F.cross_entropy(self.get_logits(embeddings) / 0.05, labels, reduction="none")
        return {"loss": {"losses": losses, "indices": torch.arange(len(losses), device=losses.device)}}


def test_new_loss_in_a_few_lines(device: torch.device) -> None:
    batch = BATCH.on(device)
    criterion = NormalizedSoftmaxLoss(N_CLASSES, 5, weight_regularizer=regularizers.LpRegularizer()).to(
        batch.rows
    )
    peer = pml_losses.NormalizedSoftmaxLoss(N_CLASSES, 5, temperature=0.05).to(device)
    peer.W.data = criterion.weight.detach().T.clone()
    penalty = criterion.weight.detach().norm(dim=1).mean()
    assert_close(criterion(*batch).detach() - penalty, peer(*batch).detach(), **FLOAT64)
    criterion(*batch).backward()
    assert criterion.weight.grad is not None


def test_base_is_abstract() -> None:
    with pytest.raises(NotImplementedError, match="BaseProxyLoss must define compute_loss"):
        BaseProxyLoss(2, 2).double()(E1.rows, E1.labels)


def test_repr() -> None:
    assert "ProxyAnchorLoss(\n  5, 3, margin=0.1, alpha=32" in repr(ProxyAnchorLoss(5, 3))


def test_a_proxy_loss_of_ones_own_under_autocast(device: torch.device) -> None:
    """Its embeddings fit the proxies, so that it may call get_logits; outside autocast dtypes that differ are named."""

    class Softmax(BaseProxyLoss):
        def compute_loss(self, embeddings: Tensor, labels: Any, *rest: Any) -> Any:
            losses = F.cross_entropy(self.get_logits(embeddings), labels, reduction="none")
            return {"loss": {"losses": losses, "indices": torch.arange(len(losses))}}

    criterion = Softmax(N_CLASSES, BATCH.rows.shape[1]).to(device)
    batch = BATCH.on(device)
    rows = batch.rows.bfloat16()
    with torch.autocast(device.type, torch.bfloat16):
        loss = criterion(rows, batch.labels)
    cosines = F.normalize(rows.double()) @ F.normalize(criterion.weight.double()).T
    # float32: roundings of 6e-8 in cosines below 1.
    assert_close(loss, F.cross_entropy(cosines, batch.labels), rtol=1e-6)
    with pytest.raises(
        ValueError, match=r"the proxies have dtype torch\.float32, the embeddings torch\.bfloat16"
    ):
        criterion(rows, batch.labels)
