"""What holds for every loss of the registry, on every backend: dtypes, labels, strides, small batches, memory, ..."""

from __future__ import annotations

import copy
import io
import pickle
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from checks import ROOT, assert_as_exact_as, assert_close, assert_same, peaks_are_known, python, record_syncs
from inputs import E1, E3, EQ, GOLDEN_B, Batch, random_batch
from registry import LOSSES, LossCase
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from tritonloss import distances, functional, losses, regularizers, use_backend

# What does not depend on a kernel is tried with the backend of the device alone.
BATCH = random_batch(12, 5, 3, n_lone=2)
N_CLASSES = 8  # more than BATCH has
# The rounding error of a float64 similarity of 5 terms, 5e-16, over tau^2 = 1e-4 in a gradient, over 11 negatives.
FLOAT64 = {"rtol": 1e-9, "atol": 1e-9}


@pytest.fixture(params=LOSSES)
def loss(request: pytest.FixtureRequest) -> LossCase:
    return LOSSES[request.param]


class Result(NamedTuple):
    value: Tensor
    grad: Tensor
    parameters: list[Tensor]  # their gradients


def evaluate(
    loss: LossCase,
    rows: Tensor,
    labels: Tensor,
    *,
    module: nn.Module | None = None,
    call: Callable[[nn.Module, Tensor, Tensor], Tensor] | None = None,
    upstream: float = 1.0,
    **options: Any,
) -> Result:
    """Value and gradients, all detached; `call` stands between the module and its arguments."""
    criterion = loss.module(N_CLASSES, rows, **options) if module is None else module
    criterion.zero_grad(set_to_none=True)
    leaf = rows.detach().requires_grad_()  # the strides of `rows`
    value = criterion(leaf, labels) if call is None else call(criterion, leaf, labels)
    value.backward(torch.full_like(value, upstream))
    assert leaf.grad is not None
    grads = [p.grad.clone() for p in criterion.parameters() if p.grad is not None]
    return Result(value.detach(), leaf.grad, grads)


def by_reference(loss: LossCase, rows: Tensor, labels: Tensor, module: nn.Module | None = None) -> Result:
    with use_backend("reference"):
        return evaluate(loss, rows, labels, module=module)


def twin(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    return copy.deepcopy(module).to(dtype)


# --- values and gradients ---


@pytest.mark.parametrize("batch", [BATCH, GOLDEN_B, E1, E3, EQ], ids=["random", "golden", "E1", "E3", "EQ"])
def test_equals_the_reference(loss: LossCase, batch: Batch, backend: str, device: torch.device) -> None:
    rows, labels = batch.on(device)
    assert_close(evaluate(loss, rows, labels), by_reference(loss, rows, labels), **FLOAT64)


def test_float32_is_as_exact_as_the_reference(loss: LossCase, backend: str, device: torch.device) -> None:
    n = 22 if device.type == "cpu" else 600
    rows, labels = random_batch(n, 8, 5, n_lone=3, seed=1).on(device, torch.float32)
    module = loss.module(N_CLASSES, rows)
    exact = by_reference(loss, rows.double(), labels, twin(module, torch.float64))
    rival = by_reference(loss, rows, labels, twin(module, torch.float32))
    actual = evaluate(loss, rows, labels, module=module)
    for a, r, e in zip((a for a in flat(actual)), flat(rival), flat(exact), strict=True):
        assert_as_exact_as(a, r, e)


def flat(result: Result) -> list[Tensor]:
    return [result.value, result.grad, *result.parameters]


@pytest.mark.parametrize(
    ("dtype", "backend"), [(torch.float16, "eager"), (torch.bfloat16, "triton")], indirect=["backend"]
)
def test_half_precision_is_rounded_once(
    loss: LossCase, dtype: torch.dtype, backend: str, device: torch.device
) -> None:
    """Against float64 from the same rounded rows and parameters: half a unit of the dtype, and what float32 adds."""
    rows, labels = BATCH.on(device, dtype)
    module = loss.module(N_CLASSES, rows)
    exact = by_reference(loss, rows.double(), labels, twin(module, torch.float64))
    actual = evaluate(loss, rows, labels, module=module)
    for a, e in zip(flat(actual), flat(exact), strict=True):
        assert a.dtype == dtype
        # float32: similarities off by 5e-7, over tau = 0.01, once more for a gradient; of the largest entry.
        slack = 1e-3 * float(e.abs().max())
        assert_close(a.double(), e, rtol=torch.finfo(dtype).eps, atol=slack + torch.finfo(dtype).tiny)


@pytest.mark.parametrize(
    ("dtype", "backend"), [(torch.float32, "eager"), (torch.bfloat16, "triton")], indirect=["backend"]
)
def test_autocast_changes_nothing(
    loss: LossCase, dtype: torch.dtype, backend: str, device: torch.device
) -> None:
    """The bits of a float32 call on the same numbers; parameters stay as they are."""
    rows, labels = BATCH.on(device, dtype)
    module = loss.module(N_CLASSES, rows.float())
    before = [(p, p.dtype) for p in module.parameters()]
    expected = evaluate(loss, rows.float(), labels, module=twin(module, torch.float32))

    def call(criterion: nn.Module, leaf: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            return criterion(leaf, labels)

    actual = evaluate(loss, rows, labels, module=module, call=call)
    assert actual.value.dtype == torch.float32
    assert_same(actual.value, expected.value)
    assert_same(actual.grad, expected.grad.to(dtype))
    assert_same(actual.parameters, expected.parameters)
    assert [(p, p.dtype) for p in module.parameters()] == before


TRIPLETS = ((0, 0, 5, 6), (1, 3, 7, 2), (4, 5, 6, 9))


@pytest.mark.parametrize(
    ("build", "mined"),
    [
        *(
            pytest.param(partial(case.module, N_CLASSES, BATCH.rows), False, id=name)
            for name, case in LOSSES.items()
        ),
        pytest.param(
            partial(losses.FastAPLoss, distance=distances.LpDistance(power=1)), False, id="FastAP-distance"
        ),
        pytest.param(
            partial(losses.HistogramLoss, distance=distances.CosineSimilarity(power=2)),
            False,
            id="Histogram-distance",
        ),
        pytest.param(
            partial(losses.HistogramLoss, distance=distances.CosineSimilarity(power=2)),
            True,
            id="Histogram-listed",
        ),
        pytest.param(losses.HistogramLoss, True, id="Histogram-mined"),
        pytest.param(
            partial(losses.ProxyAnchorLoss, N_CLASSES, 5, distance=distances.LpDistance()),
            False,
            id="proxies-distance",
        ),
        pytest.param(partial(losses.PNPLoss, memory_budget=5 * 12 * 4), False, id="PNP-blocks"),
    ],
)
def test_a_backward_pass_inside_autocast_changes_nothing(
    build: Callable[[], nn.Module], mined: bool, device: torch.device
) -> None:
    """The bits of a backward pass outside of it, also where autograd differentiates a distance."""
    rows, labels = BATCH.on(device, torch.float32)
    module = build().to(device, torch.float32).eval()
    triplets = tuple(torch.tensor(entry, device=device) for entry in TRIPLETS) if mined else None

    def gradients(inside: bool) -> tuple[Tensor | None, ...]:
        value = module(rows, labels, triplets)
        with torch.autocast(device.type, torch.bfloat16, enabled=inside):
            return torch.autograd.grad(value, [rows, *module.parameters()])

    assert_same(gradients(inside=True), gradients(inside=False))


def test_order_of_the_rows_does_not_matter(loss: LossCase, device: torch.device) -> None:
    rows, labels = BATCH.on(device)
    order = torch.randperm(len(rows)).to(device)
    expected, actual = evaluate(loss, rows, labels), evaluate(loss, rows[order], labels[order])
    assert_close(actual._replace(grad=expected.grad), expected, **FLOAT64)
    assert_close(actual.grad, expected.grad[order], **FLOAT64)


def test_length_of_the_rows_does_not_matter(loss: LossCase, backend: str, device: torch.device) -> None:
    rows, labels = BATCH.on(device)
    length = torch.rand(len(rows), 1, dtype=torch.float64, device=device) + 0.5
    expected, actual = evaluate(loss, rows, labels), evaluate(loss, rows * length, labels)
    assert_close(actual._replace(grad=actual.grad * length), expected, **FLOAT64)
    # A radial step changes nothing, so the gradient has no radial part.
    assert_close((actual.grad * rows).sum(1), torch.zeros(len(rows)), atol=1e-9)


# --- labels ---


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool], ids=str)
def test_label_dtypes(loss: LossCase, dtype: torch.dtype, device: torch.device) -> None:
    rows, labels = E1.on(device)
    assert_same(evaluate(loss, rows, labels.to(dtype)), evaluate(loss, rows, labels))


def test_label_values_do_not_matter(loss: LossCase, device: torch.device) -> None:
    if not loss.opaque_labels:
        pytest.skip("its labels are indices")
    rows, labels = BATCH.on(device)
    names = torch.tensor([-1, 2**40, 7, -100, 2**63 - 1, 0, -(2**63), 2**32 + 7], device=device)
    assert_close(evaluate(loss, rows, names[labels]), evaluate(loss, rows, labels), **FLOAT64)


def test_strided_labels(loss: LossCase, device: torch.device) -> None:
    rows, labels = BATCH.on(device)
    strided = torch.stack([labels, 1 - labels], 1)[:, 0]
    assert_same(evaluate(loss, rows, strided), evaluate(loss, rows, labels))


BAD_CALLS = [
    ({"labels": torch.zeros(4)}, TypeError, "labels"),
    ({"labels": torch.tensor([0, 0, 1])}, ValueError, "labels"),
    ({"labels": torch.zeros(4, 1, dtype=torch.int64)}, ValueError, "labels"),
    ({"labels": torch.zeros(4, dtype=torch.int64, device="meta")}, ValueError, "labels"),
    ({"rows": torch.ones(4, 2, dtype=torch.int64)}, TypeError, "int64"),
    ({"rows": torch.ones(4, 2, 1)}, ValueError, r"\[4, 2, 1\]"),
    ({"rows": torch.ones(4, 2).to(torch.float8_e5m2)}, TypeError, "float8_e5m2"),
    ({"rows": torch.ones(4, 2).to_sparse()}, TypeError, "sparse"),
]


@pytest.mark.parametrize(("change", "kind", "text"), BAD_CALLS)
def test_a_refused_call_changes_nothing(
    loss: LossCase, change: dict[str, Any], kind: type[Exception], text: str, device: torch.device
) -> None:
    rows, labels = E1.on(device)
    expected = evaluate(loss, rows, labels)
    module = loss.module(N_CLASSES, rows)
    before = copy.deepcopy(module.state_dict())
    bad = {k: v if v.device.type == "meta" else v.to(device) for k, v in change.items()}
    with pytest.raises(kind, match=text):
        module(bad.get("rows", rows), bad.get("labels", labels))
    assert_same(module.state_dict(), before)
    assert_same(evaluate(loss, rows, labels, module=module), expected)


# --- strides and upstream gradients ---


def wide(rows: Tensor) -> Tensor:
    buffer = torch.full((len(rows), 3 * rows.shape[1]), torch.nan, dtype=rows.dtype, device=rows.device)
    return buffer[:, 2 : 2 + rows.shape[1]].copy_(rows)


def every_second_column(rows: Tensor) -> Tensor:
    buffer = torch.full((len(rows), 2 * rows.shape[1]), torch.nan, dtype=rows.dtype, device=rows.device)
    return buffer[:, 1::2].copy_(rows)


@pytest.mark.parametrize(
    "view",
    [wide, every_second_column, lambda rows: rows.T.contiguous().T],
    ids=["wide", "second", "transposed"],
)
def test_strided_embeddings(loss: LossCase, view: Callable[[Tensor], Tensor], device: torch.device) -> None:
    rows, labels = BATCH.on(device)
    strided = view(rows.detach())
    assert not strided.is_contiguous()
    # Norms and products may sum in another order.
    assert_close(evaluate(loss, strided, labels), evaluate(loss, rows, labels), **FLOAT64)


def test_rows_that_share_memory(loss: LossCase, device: torch.device) -> None:
    """Six views of one row, with stride 0: the gradient of the row is the sum of the gradients of the copies."""
    row, labels = E3.rows[1:2].to(device), E3.labels.to(device)
    copies = evaluate(loss, row.repeat(6, 1), labels)
    one = evaluate(
        loss, row, labels, call=lambda criterion, leaf, labels: criterion(leaf.expand(6, -1), labels)
    )
    assert_close(one.value, copies.value, **FLOAT64)
    assert_close(one.grad, copies.grad.sum(0, keepdim=True), **FLOAT64)


def test_gradient_scales_with_the_upstream(loss: LossCase, backend: str, device: torch.device) -> None:
    """As under a GradScaler: a factor of 2^16 passes through without a rounding."""
    rows, labels = BATCH.on(device, torch.float32)
    plain, scaled = evaluate(loss, rows, labels), evaluate(loss, rows, labels, upstream=2.0**16)
    assert_same(scaled.grad, plain.grad * 2.0**16)
    assert_same(scaled.parameters, [grad * 2.0**16 for grad in plain.parameters])


def test_upstream_of_an_expanded_loss(loss: LossCase, device: torch.device) -> None:
    rows, labels = BATCH.on(device)
    three = evaluate(loss, rows, labels, call=lambda c, leaf, labels: c(leaf, labels).expand(3).sum())
    assert_close(
        three.grad, 3 * evaluate(loss, rows, labels).grad, rtol=1e-12, atol=1e-14
    )  # summed in another order


# --- batches without pairs, and numbers that are none ---


@pytest.mark.parametrize(
    "labels", [[], [0], [0, 1, 2, 3], [3, 3, 3, 3], [5, 5]], ids=["empty", "one", "lone", "class", "pair"]
)
def test_small_batches(loss: LossCase, labels: list[int], backend: str, device: torch.device) -> None:
    """Always a scalar of the graph with a finite gradient; exactly 0 where there is no pair."""
    rows = torch.randn(len(labels), 8, dtype=torch.float64, device=device)
    y = torch.tensor(labels, dtype=torch.int64, device=device)
    result = evaluate(loss, rows, y)
    assert result.value.shape == ()
    assert result.grad.shape == rows.shape
    assert all(t.isfinite().all() for t in flat(result))
    if loss.needs_pair and len(set(labels)) == len(labels):
        assert result.value == 0
        assert not result.grad.any()
    assert_close(result, by_reference(loss, rows, y), **FLOAT64)


def test_nan_is_not_hidden(loss: LossCase, backend: str, device: torch.device) -> None:
    rows, labels = BATCH.on(device, torch.float32)
    rows = rows.detach().clone()
    rows[3, 1] = torch.nan
    assert evaluate(loss, rows, labels).value.isnan()


# --- the same call again ---


def test_two_calls_give_the_same_bits(loss: LossCase, device: torch.device) -> None:
    n = 22 if device.type == "cpu" else 3000
    rows, labels = random_batch(n, 5, 5, n_lone=3).on(device, torch.float32)
    assert_same(evaluate(loss, rows, labels), evaluate(loss, rows, labels))


def test_deterministic_algorithms(loss: LossCase, device: torch.device) -> None:
    """The default path is deterministic: the flag changes no bit and raises nothing."""
    rows, labels = BATCH.on(device, torch.float32)
    expected = evaluate(loss, rows, labels)
    torch.use_deterministic_algorithms(True)
    assert_same(evaluate(loss, rows, labels), expected)


def test_backward_twice_and_input_untouched(loss: LossCase, backend: str, device: torch.device) -> None:
    rows, labels = BATCH.on(device, torch.float32)
    before = rows.detach().clone()
    value = loss.module(N_CLASSES, rows)(rows, labels)
    (first,) = torch.autograd.grad(value, rows, retain_graph=True)
    (second,) = torch.autograd.grad(value, rows)
    assert_same(second, first)
    assert_same(rows.detach(), before)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "saved-tensors"])
def test_checkpointing(loss: LossCase, reentrant: bool, device: torch.device) -> None:
    rows, labels = BATCH.on(device, torch.float32)
    # A loss with a memory would move it in the second forward; in eval mode nothing moves.
    expected = evaluate(loss, rows, labels, module=loss.module(N_CLASSES, rows).eval())
    actual = evaluate(
        loss,
        rows,
        labels,
        module=loss.module(N_CLASSES, rows).eval(),
        call=lambda criterion, leaf, labels: checkpoint(criterion, leaf, labels, use_reentrant=reentrant),
    )
    assert_same(actual, expected)


@pytest.mark.parametrize("how", ["frozen", "no_grad", "inference_mode"])
def test_value_without_gradient(loss: LossCase, how: str, backend: str, device: torch.device) -> None:
    rows, labels = BATCH.on(device, torch.float32)
    expected = evaluate(loss, rows, labels).value
    module = loss.module(N_CLASSES, rows).requires_grad_(how != "frozen")
    if how == "frozen":
        value = module(rows.detach(), labels)
    else:
        with getattr(torch, how)():
            value = module(rows, labels)
    assert not value.requires_grad
    assert_same(value, expected)


def test_second_derivative(loss: LossCase, backend: str, device: torch.device) -> None:
    """Refused by the streamed backends with the name of the one that has it."""
    rows, labels = E1.on(device)

    def second() -> Tensor:
        value = loss.module(N_CLASSES, rows)(rows, labels)
        (grad,) = torch.autograd.grad(value, rows, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), rows)[0]

    with pytest.raises(RuntimeError, match="reference"):
        second()
    if loss.twice:
        use_backend("reference")
        assert second().isfinite().all()


# torch's own decompositions for forward mode.
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("frozen", [True, False])
def test_forward_mode(loss: LossCase, frozen: bool, device: torch.device) -> None:
    """Refused by the streamed backends, never a tangent of 0; the reference has the directional derivative."""
    rows, labels = BATCH.on(device)
    module = loss.module(N_CLASSES, rows).eval().requires_grad_(not frozen)
    rows, direction = rows.detach(), rows.detach().roll(1, 0)

    def by_dual_numbers() -> Tensor:
        with forward_ad.dual_level():
            value = module(forward_ad.make_dual(rows, direction), labels)
            return forward_ad.unpack_dual(value).tangent

    def by_func() -> Tensor:
        return torch.func.jvp(lambda x: module(x, labels), (rows,), (direction,))[1]

    for derivative in (by_dual_numbers, by_func):
        with pytest.raises(RuntimeError, match=r"forward mode|functorch transforms"):
            derivative()
        with use_backend("reference"):
            grad = evaluate(loss, rows, labels, module=module).grad
            assert_close(derivative(), (grad * direction).sum(), rtol=1e-9)


# --- life as a module ---


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "save"])
def test_copies_after_use(loss: LossCase, how: str, device: torch.device) -> None:
    rows, labels = BATCH.on(device, torch.float32)
    module = loss.module(N_CLASSES, rows)
    module(rows, labels).backward()
    if how == "deepcopy":
        twin = copy.deepcopy(module)
    elif how == "pickle":
        twin = pickle.loads(pickle.dumps(module))
    else:
        file = io.BytesIO()
        torch.save(module, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    assert_same(twin.state_dict(), module.state_dict())
    assert_same(evaluate(loss, rows, labels, module=twin), evaluate(loss, rows, labels, module=module))


def test_state_dict_round_trip(loss: LossCase, device: torch.device) -> None:
    rows, labels = BATCH.on(device, torch.float32)
    module = loss.module(N_CLASSES, rows)
    module(rows, labels)
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    restored = loss.module(N_CLASSES, rows)
    restored.load_state_dict(torch.load(file, weights_only=True))
    assert_same(evaluate(loss, rows, labels, module=restored), evaluate(loss, rows, labels, module=module))


def test_regularizer_is_added(loss: LossCase, device: torch.device) -> None:
    if not loss.regularized:
        pytest.skip("it takes no embedding_regularizer")
    rows, labels = BATCH.on(device)
    plain = evaluate(loss, rows, labels)
    options = {"embedding_regularizer": regularizers.LpRegularizer(), "embedding_reg_weight": 3.0}
    both = evaluate(loss, rows, labels, **options)
    norm = rows.detach().norm(dim=1, keepdim=True)
    assert_close(both.value, plain.value + 3 * norm.mean(), rtol=1e-14)
    assert_close(both.grad, plain.grad + 3 * rows.detach() / norm / len(rows), rtol=1e-12, atol=1e-14)


def test_memory_budget_changes_nothing(loss: LossCase, backend: str, device: torch.device) -> None:
    rows, labels = BATCH.on(device)
    for budget in (1, 5 * 12 * 8):
        assert_close(
            evaluate(loss, rows, labels, memory_budget=budget), evaluate(loss, rows, labels), **FLOAT64
        )


BOUNDS = {
    "PNPLoss": functional.pnp_loss,
    "SmoothAPLoss": functional.smooth_ap_loss,
    "FastAPLoss": functional.fastap_loss,
    "HistogramLoss": functional.histogram_loss,
    "ProxyAnchorLoss": lambda *batch, **options: functional.proxy_anchor_loss(
        *batch, torch.eye(2, dtype=torch.float64), **options
    ),
    "SOPRCLoss": None,
    "RecallAtKLoss": functional.recall_at_k_loss,
    "SupAPLoss": functional.sup_ap_loss,
    "TripletMarginLoss": functional.triplet_margin_loss,
    "NTXentLoss": functional.nt_xent_loss,
    "SupConLoss": functional.sup_con_loss,
    "MultiSimilarityLoss": functional.multi_similarity_loss,
    "CircleLoss": functional.circle_loss,
    "InfoNCELoss": lambda rows, labels, **options: functional.info_nce_loss(rows, labels=labels, **options),
}


@pytest.mark.parametrize("bound", ["memory_budget", "max_class_size"])
@pytest.mark.parametrize(
    ("value", "kind", "got"),
    [
        (0, ValueError, "is 0: expected at least 1"),
        (-5, ValueError, "is -5: expected at least 1"),
        (2.5, TypeError, "must be an int, got float"),
        (True, TypeError, "must be an int, got bool"),
        ("1GB", TypeError, "must be an int, got str"),
    ],
)
@pytest.mark.parametrize("name", LOSSES)
def test_bad_bounds_are_refused_at_once(
    name: str, bound: str, value: Any, kind: type[Exception], got: str
) -> None:
    """When the module is made, and by the function before it computes anything; the message names the option."""
    if bound == "max_class_size" and bound not in (LOSSES[name].bounded or {}):
        pytest.skip("it takes no such bound")
    with pytest.raises(kind, match=f"{bound} {got}"):
        LOSSES[name].build(2, 2, **{bound: value})
    if (function := BOUNDS[name]) is not None:
        with pytest.raises(kind, match=f"{bound} {got}"):
            function(*E1, **{bound: value})


def test_numbers_of_numpy_are_numbers() -> None:
    """As options: np.int64 is what `labels.max() + 1` of an array gives, np.float32 what a configuration may hold."""
    bounds = {"max_class_size": np.int64(2), "memory_budget": np.int64(1 << 20)}
    expected = losses.SmoothAPLoss(0.25)(*E1)
    assert_same(losses.SmoothAPLoss(np.float32(0.25), **bounds)(*E1), expected)
    assert_same(losses.PNPLoss(anneal=np.float32(0.25), **bounds)(*E1), losses.PNPLoss(anneal=0.25)(*E1))
    assert losses.ProxyAnchorLoss(np.int64(2), np.int64(3)).weight.shape == (2, 3)
    assert losses.SOPRCLoss(np.int64(2), memory_size=np.int64(3)).v.shape == (2, 3)


# --- the host does not wait for the device ---


def test_host_syncs(loss: LossCase, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stated by the registry: usually one, to size the output; none with bounds; none in the backward pass."""
    use_backend("triton")
    syncs = record_syncs(monkeypatch)
    rows, labels = BATCH.on(device, torch.float32)
    module = loss.module(N_CLASSES, rows)
    syncs.clear()
    value = module(rows, labels)
    assert len(syncs) == loss.host_syncs
    syncs.clear()
    value.backward()
    assert syncs == []
    if loss.bounded is not None:
        module = loss.module(N_CLASSES, rows, **loss.bounded)
        syncs.clear()
        module(rows, labels).backward()
        assert syncs == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="only CUDA has graphs")
def test_capture_in_a_cuda_graph(loss: LossCase, device: torch.device) -> None:
    if loss.bounded is None:
        pytest.skip("it has no options that replace the host sync")
    rows, labels = BATCH.on(device, torch.float32)
    module = loss.module(N_CLASSES, rows, **loss.bounded).eval()
    expected = evaluate(loss, rows, labels, module=module)
    module.zero_grad(set_to_none=True)
    rows.grad = torch.zeros_like(rows)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        module(rows, labels).backward()  # compiles the kernels
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        value = module(rows, labels)
        value.backward()
    rows.grad.zero_()
    graph.replay()
    assert_same(value.detach(), expected.value)
    assert_same(rows.grad, expected.grad)


# --- in other processes ---

FIRST_CALL = """
import sys
import torch
from inputs import random_batch
from interpreter import prepare_interpreter
from registry import LOSSES
from tritonloss import use_backend

prepare_interpreter()
device = torch.device(sys.argv[1])
for backend in ("eager", "triton"):
    use_backend(backend)
    for name, loss in LOSSES.items():
        results = []
        for _ in range(2):
            rows, labels = random_batch(12, 5, 3, n_lone=2).on(device, torch.float32)
            value = loss.module(8, rows)(rows, labels)
            value.backward()
            results.append((value.item(), rows.grad))
        assert results[0][0] == results[1][0], (backend, name)
        assert torch.equal(results[0][1], results[1][1]), (backend, name)
        print(backend, name, results[0][0] == results[0][0])
"""


def test_first_call_equals_the_second(device: torch.device) -> None:
    """Where the first call compiles, and tunes: in a new process, without what other tests have compiled."""
    env = {"TRITON_INTERPRET": "1"} if device.type == "cpu" else {}
    lines = python(FIRST_CALL, device.type, **env).split("\n")
    assert lines == [f"{backend} {name} True" for backend in ("eager", "triton") for name in LOSSES] + [""]


# Peak memory of one call above what the process holds, in bytes, with a budget of 1 MiB and with the default.
PEAKS = """
import sys
import torch
from bench.memory import peak_above
from registry import LOSSES

torch.set_num_threads(1)

def peak(n, **options):
    criterion = LOSSES[sys.argv[1]].build(n // 4, 16, **options)
    rows, labels = torch.randn(n, 16, requires_grad=True), torch.arange(n) // 4
    return peak_above(lambda: criterion(rows, labels).backward(), "cpu")

print(*(peak(n, memory_budget=1 << 20) for n in (2048, 4096)), *(peak(n) for n in (2048, 4096)))
"""


@peaks_are_known
@pytest.mark.parametrize("name", LOSSES)
def test_peak_memory(name: str) -> None:
    """4096^2 float32 are 64 MiB. A user asked for less than 64 N^2 bytes, 1 GiB.

    With 1 MiB for similarities, N = 4096 takes less than a quarter of that matrix: a few blocks, N D numbers and the
    pairs, which at most double with N. By default the matrix and a gradient of its size may be kept, beside a dozen
    blocks of 4 MiB, and all grows with the square. 4 MiB are the allocator's, which is kept from holding freed blocks:
    how many it holds depends on what was freed before.
    """
    found = python(PEAKS, name, MALLOC_MMAP_THRESHOLD_=str(64 << 10))
    small, small_twice, default, default_twice = map(int, found.split())
    assert 1 << 20 < small_twice < 16 << 20
    assert small_twice <= 2 * small + (4 << 20)
    assert default_twice < 2 * 4 * 4096**2 + 12 * (4 << 20)
    assert default_twice <= 4 * default + (4 << 20)


# --- the package and this suite ---


def sources() -> Iterator[tuple[str, str]]:
    for folder in ("tritonloss", "kernels"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")


def test_nothing_is_moved_to_a_device_by_name() -> None:
    files = dict(sources())
    assert len(files) > 15
    hard_coded = re.compile(r"""\.cuda\(|\.to\(\s*["']cuda|device=["']cuda""")
    assert [name for name, text in files.items() if hard_coded.search(text)] == []


def test_uninitialised_memory_is_nan() -> None:
    """The guard of conftest.py, without which a kernel that writes nothing could pass."""
    like = torch.zeros(2, 3)
    tensors = [torch.empty(2), torch.empty_like(like), like.new_empty(2), torch.empty_strided((2, 2), (4, 1))]
    assert all(t.isnan().all() for t in tensors)
    assert torch.empty(2, dtype=torch.int64).dtype == torch.int64
