"""The losses in a training step as users write it: mixed precision, checkpointing, CUDA graphs, no host syncs."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from checks import assert_close, assert_same
from inputs import random_batch
from registry import LOSSES, LossCase
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tritonloss import use_backend
from tritonloss.losses import SOPRCLoss

N, WIDTH, DIM, N_CLASSES = 24, 12, 8, 5
only_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="only CUDA can show it")


@pytest.fixture(params=LOSSES)
def loss(request: pytest.FixtureRequest) -> LossCase:
    return LOSSES[request.param]


def batch(device: torch.device, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(N, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return inputs.to(device, dtype), (torch.arange(N) % N_CLASSES).to(device)


def network(device: torch.device, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(WIDTH, 16), nn.LayerNorm(16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, DIM)
    return nn.Sequential(*layers).to(device, dtype)


def criterion_of(
    loss: LossCase, device: torch.device, dtype: torch.dtype = torch.float32, **options
) -> nn.Module:
    return loss.module(N_CLASSES, torch.empty(0, DIM, device=device, dtype=dtype), **options)


# --- mixed precision ---


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_training_under_autocast(loss: LossCase, dtype: torch.dtype, device: torch.device) -> None:
    """The scaler starts far too high: it skips steps until gradients fit, then the loss falls and all stays finite."""
    inputs, labels = batch(device)
    model, criterion = network(device).eval(), criterion_of(loss, device)
    parameters = [*model.parameters(), *criterion.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=0.01)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**40, backoff_factor=2.0**-8)
    values, skipped = [], 0
    for _ in range(30):
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype):
            embeddings = model(inputs)
            value = criterion(embeddings, labels)
        assert (embeddings.dtype, value.dtype) == (dtype, torch.float32)
        scaler.scale(value).backward()
        scaler.step(optimizer)
        before = scaler.get_scale()
        scaler.update()
        skipped += scaler.get_scale() < before
        values.append(value.item())
    assert all(parameter.isfinite().all() and parameter.dtype == torch.float32 for parameter in parameters)
    assert values[-1] < 0.9 * values[0]
    # bfloat16 has the range of float32, where 2^40 fits.
    assert (1 <= skipped <= 5) if dtype == torch.float16 else skipped == 0


def test_a_scale_saves_gradients_that_float16_loses(loss: LossCase, device: torch.device) -> None:
    """Gradients of 1e-9 are 0 in float16; behind a scale of 2^20 they have its 11 digits."""
    rows, labels = random_batch(N, DIM, N_CLASSES).on(device, torch.float16)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**20)

    def gradient(rows: Tensor, scale: bool) -> Tensor:
        leaf, criterion = rows.detach().requires_grad_(), criterion_of(loss, device)
        with torch.autocast(device.type, torch.float16):
            value = criterion(leaf, labels)
        size = gradient_of(loss, rows, labels).abs().max().item()
        value = value * (1e-9 / size)
        (scaler.scale(value) if scale else value).backward()
        return leaf.grad.double() / (2.0**20 if scale else 1)

    expected = gradient_of(loss, rows, labels)
    expected = expected * (1e-9 / expected.abs().max())
    assert not gradient(rows, scale=False).any()
    # Half a unit of float16, of the smallest normal number beneath its range, and 1e-3 of the largest for float32.
    assert_close(gradient(rows, scale=True), expected, rtol=2**-11, atol=1e-12 + 2.0**-25 / 2**20)


def gradient_of(loss: LossCase, rows: Tensor, labels: Tensor) -> Tensor:
    """In float32, from the same rounded rows."""
    leaf = rows.detach().float().requires_grad_()
    criterion_of(loss, rows.device)(leaf, labels).backward()
    assert leaf.grad is not None
    return leaf.grad.double()


# --- checkpointing ---


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "saved-tensors"])
def test_a_checkpointed_network(loss: LossCase, reentrant: bool, device: torch.device) -> None:
    """The loss outside of the checkpoint: it runs once in training mode, and a memory moves once."""
    inputs, labels = batch(device)
    inputs.requires_grad_()  # reentrant checkpointing needs an input with a gradient
    results = []
    for use in (False, True):
        model, criterion = network(device), criterion_of(loss, device)
        torch.manual_seed(1)
        embeddings = checkpoint(model, inputs, use_reentrant=reentrant) if use else model(inputs)
        value = criterion(embeddings, labels)
        value.backward()
        gradients = [p.grad for p in (*model.parameters(), *criterion.parameters())]
        results.append((value.detach(), gradients, criterion.state_dict()))
    assert_same(results[1], results[0])


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "saved-tensors"])
def test_a_checkpointed_network_and_loss(loss: LossCase, reentrant: bool, device: torch.device) -> None:
    """Without `update`, SOPRCLoss may run twice in training mode."""
    inputs, labels = batch(device)
    inputs.requires_grad_()
    results = []
    for use in (False, True):
        model, criterion = network(device), criterion_of(loss, device)
        options = {"update": False} if isinstance(criterion, SOPRCLoss) else {}

        def step(inputs: Tensor, model=model, criterion=criterion, options=options) -> Tensor:
            return criterion(model(inputs), labels, **options)

        torch.manual_seed(1)
        value = checkpoint(step, inputs, use_reentrant=reentrant) if use else step(inputs)
        value.backward()
        gradients = [p.grad for p in (*model.parameters(), *criterion.parameters())]
        results.append((value.detach(), gradients, criterion.state_dict()))
    assert_same(results[1], results[0])


# --- deterministic algorithms ---


def test_deterministic_training(
    loss: LossCase, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing in a step raises under the flag, and two runs end with the same bits."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # which torch asks for on CUDA
    inputs, labels = batch(device)
    torch.use_deterministic_algorithms(True)
    results = []
    for _ in range(2):
        model, criterion = network(device), criterion_of(loss, device)
        optimizer = torch.optim.Adam([*model.parameters(), *criterion.parameters()], lr=0.01)
        for _ in range(3):
            optimizer.zero_grad()
            criterion(model(inputs), labels).backward()
            optimizer.step()
        results.append((model.state_dict(), criterion.state_dict()))
    assert_same(results[1], results[0])


# --- the device is not waited for ---


@pytest.fixture
def strict_sync() -> Iterator[None]:
    """Operations that wait for the GPU raise, once the test sets the mode; it is set back."""
    yield
    torch.cuda.set_sync_debug_mode("default")


@only_cuda
def test_no_wait_with_bounds(loss: LossCase, device: torch.device, strict_sync: None) -> None:
    assert loss.bounded is not None
    inputs, labels = batch(device)
    model, criterion = network(device), criterion_of(loss, device, **loss.bounded)
    criterion(model(inputs), labels).backward()  # compiles and tunes the kernels
    torch.cuda.set_sync_debug_mode("error")
    criterion(model(inputs), labels).backward()


@only_cuda
def test_what_waits_by_default(loss: LossCase, device: torch.device, strict_sync: None) -> None:
    inputs, labels = batch(device)
    model, criterion = network(device), criterion_of(loss, device)
    criterion(model(inputs), labels).backward()
    torch.cuda.set_sync_debug_mode("error")
    if loss.host_syncs:
        with pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
            criterion(model(inputs), labels)
    else:
        criterion(model(inputs), labels).backward()


@only_cuda
def test_a_training_step_in_a_cuda_graph(loss: LossCase, device: torch.device) -> None:
    """Network, loss, backward pass and optimizer captured once and replayed on new data: as without a graph."""
    assert loss.bounded is not None
    use_backend("triton")
    # Classes of at most 5 rows, within the bounds.
    batches = [(torch.randn(N, WIDTH, device=device), batch(device)[1].roll(shift)) for shift in range(4)]
    model, criterion = network(device).eval(), criterion_of(loss, device, **loss.bounded)
    twin = copy.deepcopy((model, criterion))

    def optimizer_of(*modules: nn.Module) -> torch.optim.Optimizer:
        parameters = [p for module in modules for p in module.parameters()]
        return torch.optim.Adam(parameters, lr=0.01, capturable=True)

    expected, optimizer = [], optimizer_of(*twin)
    for rows, classes in (batches[0], *batches):
        optimizer.zero_grad()
        value = twin[1](twin[0](rows), classes)
        value.backward()
        optimizer.step()
        expected.append(value.detach())

    inputs, labels = (tensor.clone() for tensor in batches[0])
    optimizer = optimizer_of(model, criterion)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # the first step: compiles, tunes and makes the optimizer's state
        criterion(model(inputs), labels).backward()
        optimizer.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        value = criterion(model(inputs), labels)
        value.backward()
        optimizer.step()
    for (rows, classes), wanted in zip(batches, expected[1:], strict=True):
        inputs.copy_(rows)
        labels.copy_(classes)
        graph.replay()
        assert_close(value.detach(), wanted, rtol=1e-4, atol=1e-5)
