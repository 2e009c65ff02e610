"""FastAPLoss: golden values, the peer, terms, weights, distances, and what it refuses."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from checks import assert_close, assert_same, value_and_grad
from hypothesis import given, settings
from hypothesis import strategies as st
from inputs import DUP, E1, E3, EQ, GOLDEN_A, GOLDEN_B, Batch, random_batch
from pytorch_metric_learning import distances as pml_distances
from pytorch_metric_learning import losses as pml_losses
from pytorch_metric_learning import reducers as pml_reducers
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from tritonloss import use_backend
from tritonloss.distances import CosineSimilarity, LpDistance
from tritonloss.functional import fastap_loss
from tritonloss.indices import as_indices, miner_weights
from tritonloss.losses import FastAPLoss
from tritonloss.reducers import DivisorReducer, MeanReducer

TRIPLETS = tuple(torch.tensor(t) for t in ((0, 0, 1), (4, 8, 5), (1, 2, 3)))


@pytest.fixture(params=["eager", "triton", "reference"])
def any_backend(request: pytest.FixtureRequest, clean_state: None) -> str:
    use_backend(request.param)
    return request.param


def near(actual: Tensor, expected: float, atol: float) -> bool:
    return actual.item() == pytest.approx(expected, rel=0, abs=atol)


def by_definition(rows: Tensor, labels: Tensor, bins: int) -> list[float]:
    """The loss of each query that has a positive, in Python numbers."""
    unit = torch.nn.functional.normalize(rows.double(), dim=1)
    distance, label = (2 - 2 * unit @ unit.T).clamp(0, 4).tolist(), labels.tolist()
    losses = []
    for q in range(len(label)):
        others = [j for j in range(len(label)) if j != q]
        positives = [j for j in others if label[j] == label[q]]
        if not positives:
            continue
        total = found = retrieved = 0.0
        for node in range(bins + 1):
            weight = [max(0.0, 1 - abs(distance[q][j] / (4 / bins) - node)) for j in range(len(label))]
            here = sum(weight[j] for j in positives)
            found += here
            retrieved += sum(weight[j] for j in others)
            total += here * found / retrieved if retrieved > 0 else 0
        losses.append(1 - total / len(positives))
    return losses


# --- values ---


@pytest.mark.parametrize(
    ("given_batch", "expected"),
    [
        (E1, 0.25),
        (E3, 0.433747184),
        (DUP, 0),
        (E1.labelled(5, 5, -1, -1), 0.25),
        (E1.labelled(0, 0, 1, 2), 0.25),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_golden_values(
    given_batch: Batch, expected: float, dtype: torch.dtype, any_backend: str, device: torch.device
) -> None:
    """Printed to nine digits. In float32 the place among the nodes is off by up to 3 bins 2^-24."""
    value, grad = value_and_grad(FastAPLoss(), *given_batch.on(device, dtype))
    assert value.dtype == dtype
    assert near(value, expected, atol=1e-9 if dtype == torch.float64 else 40 * 2.0**-23)
    assert grad.isfinite().all()


@pytest.mark.parametrize(
    ("given_batch", "expected", "norm"),
    [(GOLDEN_A, 0.5750732945, 0.1415951391), (GOLDEN_B, 0.7353152999, 0.1673505223)],
)
def test_golden_batches(
    given_batch: Batch, expected: float, norm: float, any_backend: str, device: torch.device
) -> None:
    value, grad = value_and_grad(FastAPLoss(), *given_batch.on(device))
    assert near(value, expected, atol=6e-11)
    assert near(grad.norm(), norm, atol=6e-11)


def test_rows_that_are_all_equal(any_backend: str, device: torch.device) -> None:
    """One bin holds everything: 1 positive of 3 rows."""
    value, grad = value_and_grad(FastAPLoss(), *EQ.on(device))
    assert near(value, 1 - 1 / 3, atol=1e-12)
    assert grad.isfinite().all()


@pytest.mark.parametrize("bins", [1, 10, 57])
@pytest.mark.parametrize("weighted", [False, True])
def test_agrees_with_pytorch_metric_learning(
    weighted: bool, bins: int, any_backend: str, device: torch.device
) -> None:
    rows, labels = random_batch(40, 8, 9, n_lone=6)
    mined = TRIPLETS if weighted else None
    ours = value_and_grad(
        lambda x, y: FastAPLoss(bins)(x, y, mined and tuple(t.to(device) for t in mined)),
        rows.to(device),
        labels.to(device),
    )
    peer = value_and_grad(lambda x, y: pml_losses.FastAPLoss(bins)(x, y, mined), rows, labels)
    for a, b in zip(ours, peer, strict=True):
        assert_close(a, b, atol=1e-12)


@settings(max_examples=20)
@given(
    labels=st.lists(st.integers(-2, 3), max_size=9),
    bins=st.integers(1, 12),
    backend=st.sampled_from(["eager", "triton", "reference"]),
)
def test_any_labels_agree_with_the_definition(labels: list[int], bins: int, backend: str) -> None:
    rows = torch.randn(len(labels), 3, generator=torch.Generator().manual_seed(bins), dtype=torch.float64)
    target = torch.tensor(labels, dtype=torch.int64)
    losses = by_definition(rows, target, bins)
    with use_backend(backend):
        assert near(FastAPLoss(bins)(rows, target), sum(losses) / max(1, len(losses)), atol=1e-12)


def test_gradcheck(backend: str, device: torch.device) -> None:
    """Random distances are farther from the nodes than the step of 1e-6."""
    rows, labels = random_batch(7, 3, 2, n_lone=1).on(device)
    assert torch.autograd.gradcheck(lambda x: FastAPLoss(5)(x, labels), rows, fast_mode=backend == "triton")


@pytest.mark.parametrize("n", [1300, 2100])
def test_large_batches_against_a_chunked_reference(n: int, device: torch.device) -> None:
    """The chunks are float64. A float32 similarity is off by D roundings, and its place by bins times that."""
    rows, labels = random_batch(n, 16, n // 4, n_lone=5, seed=n)
    value, grad = value_and_grad(FastAPLoss(), rows.float().to(device), labels.to(device))
    unit = torch.nn.functional.normalize(rows.float().double(), dim=1)
    losses = []
    for first in range(0, n, 256):
        mine = torch.arange(first, min(first + 256, n))
        place = (2 - 2 * unit[mine] @ unit.T).clamp(0, 4) * 2.5
        other = mine[:, None] != torch.arange(n)
        positive = (labels[mine, None] == labels) & other
        masses = [(1 - (place - node).abs()).clamp(min=0) for node in range(11)]
        hits, everything = (torch.stack([(m * kind).sum(1) for m in masses], 1) for kind in (positive, other))
        ratio = hits * hits.cumsum(1) / everything.cumsum(1).clamp(min=1e-30)
        queries = positive.any(1)
        losses.append((1 - ratio.sum(1) / positive.sum(1).clamp(min=1))[queries])
    assert_close(value, torch.cat(losses).mean(), rtol=1e-5)
    assert grad.isfinite().all()
    assert grad.abs().max() > 0


# --- which rows count ---


@pytest.mark.parametrize("n", [0, 1])
def test_empty_and_single(n: int, any_backend: str, device: torch.device) -> None:
    rows, labels = torch.ones(n, 8, device=device), torch.zeros(n, dtype=torch.int64, device=device)
    value, grad = value_and_grad(FastAPLoss(), rows, labels)
    assert value == 0
    assert_same(grad, torch.zeros(n, 8, device=device))


def test_no_positive_gives_a_zero_in_the_graph(any_backend: str, device: torch.device) -> None:
    value, grad = value_and_grad(FastAPLoss(), *E1.labelled(0, 1, 2, 3).on(device))
    assert value == 0
    assert_same(grad, torch.zeros_like(grad))


def test_one_class_is_ranked_perfectly(any_backend: str, device: torch.device) -> None:
    value, grad = value_and_grad(FastAPLoss(), *E1.labelled(7, 7, 7, 7).on(device))
    assert near(value, 0, atol=1e-12)
    assert near(grad.norm(), 0, atol=1e-12)


def test_order_scale_and_names_do_not_matter(any_backend: str, device: torch.device) -> None:
    rows, labels = random_batch(24, 5, 5, n_lone=4)
    expected = FastAPLoss()(rows.to(device), labels.to(device))
    place = torch.randperm(24)
    changed = FastAPLoss()((3 * rows)[place].to(device), (-9 * labels + 4)[place].to(device))
    assert_close(changed, expected, atol=1e-12)


# --- terms, reducers, weights ---


def test_terms_and_reducers(any_backend: str, device: torch.device) -> None:
    rows, labels = (t.to(device) for t in GOLDEN_B)
    loss = FastAPLoss()
    terms = loss.loss_terms(rows, labels)
    assert set(terms) == {"loss"}
    assert terms["loss"]["indices"].tolist() == list(range(9))  # the last three rows are alone
    expected = torch.tensor(by_definition(*GOLDEN_B, 10), dtype=torch.float64)
    assert_close(terms["loss"]["losses"], expected, atol=1e-12)
    per_query = fastap_loss(rows, labels, reduction="none")
    assert_same(per_query[:9], terms["loss"]["losses"])
    assert per_query[9:].tolist() == [0, 0, 0]
    assert_close(FastAPLoss(reducer=pml_reducers.MeanReducer())(rows, labels), loss(rows, labels), atol=1e-12)
    above = FastAPLoss(reducer=pml_reducers.AvgNonZeroReducer())(rows, labels)
    assert near(above, float(expected[expected > 0].mean()), atol=1e-12)
    with pytest.raises(ValueError, match="divisor"):
        FastAPLoss(reducer=DivisorReducer())(rows, labels)


def test_miner_weights(any_backend: str, device: torch.device) -> None:
    rows, labels = (t.to(device) for t in GOLDEN_A)
    mined = tuple(t.to(device) for t in TRIPLETS)
    weights = miner_weights(as_indices(mined), 12, dtype=torch.float64, device=device)
    expected = (fastap_loss(rows, labels, reduction="none") * weights).mean()
    assert_close(FastAPLoss()(rows, labels, mined), expected, atol=1e-14)
    empty = tuple(t[:0] for t in mined)
    assert_same(FastAPLoss()(rows, labels, empty), FastAPLoss()(rows, labels))


def test_upstream_gradients(any_backend: str, device: torch.device) -> None:
    rows, labels = E1.on(device)
    whole = value_and_grad(lambda x, y: fastap_loss(x, y, reduction="none").sum(), rows, labels)[1]
    ones = value_and_grad(
        lambda x, y: fastap_loss(x, y, reduction="none"), rows, labels, torch.ones(4, device=device).double()
    )[1]
    assert_same(whole, ones)
    first = torch.tensor([1.0, 0, 0, 0], dtype=torch.float64, device=device)
    one = value_and_grad(lambda x, y: fastap_loss(x, y, reduction="none"), rows, labels, first)[1]
    step = 1e-6
    for i in range(8):
        moved = torch.zeros(8, dtype=torch.float64, device=device)
        moved[i] = step
        # E1 has distances on nodes: the gradient is that of the bin behind the node, so compare where it is smooth.
        change = [
            fastap_loss(rows.detach() + s * moved.view(4, 2), labels, reduction="none")[0] for s in (1, -1)
        ]
        slopes = [(c - fastap_loss(rows.detach(), labels, reduction="none")[0]) / step for c in change]
        if abs(slopes[0] + slopes[1]) < 1e-4:
            assert near(one.flatten()[i], float(change[0] - change[1]) / (2 * step), atol=1e-4)


# --- distances ---


@pytest.mark.parametrize("budget", [1 << 20, 400], ids=["one block", "blocks"])
@pytest.mark.parametrize("power", [1, 3])
@pytest.mark.parametrize("module", [None, pml_distances], ids=["ours", "peer's"])
def test_other_powers(module: Any, power: int, budget: int, backend: str, device: torch.device) -> None:
    rows, labels = random_batch(14, 4, 3, n_lone=2).on(device)
    distance = (LpDistance if module is None else module.LpDistance)(power=power)
    ours = value_and_grad(FastAPLoss(distance=distance, memory_budget=budget), rows, labels)
    peer_loss = pml_losses.FastAPLoss(distance=pml_distances.LpDistance(power=power))
    peer = value_and_grad(peer_loss, rows.cpu(), labels.cpu())
    use_backend("reference")
    reference = value_and_grad(FastAPLoss(distance=distance), rows, labels)
    # The peer's distance is computed with a product of rows for this size, and squared back.
    for a, b, c in zip(ours, reference, peer, strict=True):
        assert_close(a, b, atol=1e-12)
        assert_close(a, c, atol=1e-10)


def test_the_peers_squared_distance_is_streamed(backend: str, device: torch.device, monkeypatch: Any) -> None:
    rows, labels = E3.on(device)
    expected = FastAPLoss()(rows, labels)
    distance = pml_distances.LpDistance(power=2)
    monkeypatch.setattr(type(distance), "compute_mat", None)
    assert_same(FastAPLoss(distance=distance)(rows, labels), expected)


def test_second_derivative(backend: str, device: torch.device) -> None:
    rows, labels = random_batch(8, 3, 2).on(device)
    (grad,) = torch.autograd.grad(FastAPLoss()(rows, labels), rows, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivative"):
        grad.square().sum().backward()
    use_backend("reference")
    (grad,) = torch.autograd.grad(FastAPLoss()(rows, labels), rows, create_graph=True)
    grad.square().sum().backward()
    assert rows.grad is not None
    assert rows.grad.isfinite().all()


# --- dtypes, memory, runs ---


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_lower_precision(dtype: torch.dtype, any_backend: str, device: torch.device) -> None:
    """The value is that of the rounded rows, itself rounded once; so is the gradient of each row."""
    rows, labels = random_batch(20, 6, 4, n_lone=2).on(device, dtype)
    value, grad = value_and_grad(FastAPLoss(), rows, labels)
    exact, exact_grad = value_and_grad(FastAPLoss(), rows.double(), labels)
    assert value.dtype == grad.dtype == dtype
    eps = torch.finfo(dtype).eps
    assert_close(value, exact, atol=eps)
    assert_close(grad, exact_grad, atol=2 * eps * float(exact_grad.abs().max()))


def test_autocast_stays_in_float32(any_backend: str, device: torch.device) -> None:
    rows, labels = E3.on(device, torch.float32)
    leaf = rows.detach().clone().requires_grad_()
    with torch.autocast(device.type, dtype=torch.bfloat16):
        inside = FastAPLoss()(leaf, labels)
    inside.backward()
    for a, b in zip((inside.detach(), leaf.grad), value_and_grad(FastAPLoss(), rows, labels), strict=True):
        assert_same(a, b)


def test_nan_gives_nan(any_backend: str, device: torch.device) -> None:
    rows = E1.rows.clone()
    rows[2, 1] = torch.nan
    value, _ = value_and_grad(FastAPLoss(), rows.to(device), E1.labels.to(device))
    assert value.isnan()


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool])
def test_label_dtypes(dtype: torch.dtype, any_backend: str, device: torch.device) -> None:
    assert near(FastAPLoss()(E1.rows.to(device), E1.labels.to(device, dtype)), 0.25, atol=1e-12)


def test_same_bits_in_every_run(backend: str, device: torch.device) -> None:
    torch.use_deterministic_algorithms(True)
    rows, labels = random_batch(12, 4, 3, n_lone=1).on(device, torch.float32)
    first = value_and_grad(FastAPLoss(), rows, labels)
    for _ in range(19 if device.type == "cuda" else 2):
        for a, b in zip(value_and_grad(FastAPLoss(), rows, labels), first, strict=True):
            assert_same(a, b)


def test_blocks_do_not_matter(backend: str, device: torch.device) -> None:
    rows, labels = random_batch(33, 4, 5, n_lone=3).on(device)
    whole, blocks = (value_and_grad(FastAPLoss(memory_budget=b), rows, labels) for b in (1 << 20, 5 * 33 * 8))
    for a, b in zip(whole, blocks, strict=True):
        assert_close(a, b, atol=1e-13)


def test_strides_and_backward_twice(any_backend: str, device: torch.device) -> None:
    rows, labels = random_batch(6, 2, 2).on(device)
    value, grad = value_and_grad(FastAPLoss(), rows, labels)
    for other in (
        rows.detach().new_empty(6, 8)[:, 2:4].copy_(rows.detach()),
        rows.detach().t().contiguous().t(),
    ):
        leaf = other.requires_grad_()
        before = leaf.detach().clone()
        loss = FastAPLoss()(leaf, labels)
        grads = [torch.autograd.grad(loss, leaf, retain_graph=True)[0] for _ in range(2)]
        assert_close(loss, value, atol=1e-14)
        assert_close(grads[0], grad, atol=1e-13)
        assert_same(*grads)
        assert_same(leaf.detach(), before)


def test_without_grad(any_backend: str, device: torch.device) -> None:
    rows, labels = E1.rows.to(device), E1.labels.to(device)
    assert near(FastAPLoss()(rows, labels), 0.25, atol=1e-12)
    with torch.no_grad():
        assert near(FastAPLoss()(rows.requires_grad_(), labels), 0.25, atol=1e-12)


@pytest.mark.filterwarnings("ignore")  # torch.compile warns about itself
def test_compiled_equals_eager_for_many_sizes_in_two_builds(compiler: None) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(FastAPLoss(), fullgraph=True, backend=counter)
    for n in (24, 23, 40, 17, 31, 64):
        rows, labels = random_batch(n, 6, max(1, n // 3), n_lone=2, seed=n)
        for a, b in zip(
            value_and_grad(compiled, rows, labels), value_and_grad(FastAPLoss(), rows, labels), strict=True
        ):
            assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert counter.frame_count <= 2


# --- the module ---


@pytest.mark.parametrize("copied", ["deepcopy", "pickle", "save"])
def test_copies(copied: str, device: torch.device) -> None:
    loss = FastAPLoss(12)
    expected = loss(E3.rows.to(device), E3.labels.to(device))
    buffer = io.BytesIO()
    torch.save(loss, buffer)
    buffer.seek(0)
    other = {
        "deepcopy": lambda: copy.deepcopy(loss),
        "pickle": lambda: pickle.loads(pickle.dumps(loss)),
        "save": lambda: torch.load(buffer, weights_only=False),
    }[copied]()
    assert_same(other(E3.rows.to(device), E3.labels.to(device)), expected)
    assert loss.state_dict() == {}
    assert "num_bins=12" in repr(other)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"num_bins": True}, TypeError, "num_bins must be an int, got bool"),
        ({"num_bins": 2.5}, TypeError, "num_bins must be an int, got float"),
        ({"num_bins": 0}, ValueError, "num_bins is 0"),
        ({"distance": CosineSimilarity()}, TypeError, "LpDistance with p = 2"),
        ({"distance": LpDistance(p=1)}, TypeError, "LpDistance with p = 2"),
        ({"distance": LpDistance(normalize_embeddings=False)}, TypeError, "LpDistance with p = 2"),
        ({"reducer": MeanReducer}, TypeError, "instance"),
    ],
)
def test_bad_options(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        FastAPLoss(**options)(*E1)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"labels": None}, ValueError, "labels are required"),
        ({"labels": E1.labels[:3]}, ValueError, r"labels must have shape \[4\]"),
        ({"labels": E1.labels.double()}, TypeError, "integer"),
        ({"embeddings": E1.rows.long()}, TypeError, "floating"),
        ({"ref_emb": E1.rows}, ValueError, "does not support ref_emb"),
        ({"indices_tuple": (E1.labels, E1.labels)}, ValueError, "3 tensors"),
    ],
)
def test_bad_calls(change: dict[str, Any], error: type[Exception], text: str, any_backend: str) -> None:
    with pytest.raises(error, match=text):
        FastAPLoss()(**{"embeddings": E1.rows, "labels": E1.labels, **change})


def test_bad_reduction() -> None:
    with pytest.raises(ValueError, match="reduction is 'sum'"):
        fastap_loss(*E1, reduction="sum")  # type: ignore[arg-type]
