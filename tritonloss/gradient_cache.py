"""Large batches without their activations: the network sees the batch in chunks, the loss sees it as a whole.

A loss of all pairs needs the embeddings of the batch, which are small; what fills the memory are the activations of the
network. So the chunks are embedded one after the other, no graph is kept, the loss is differentiated down to the
embeddings, and each chunk is embedded again, followed at once by its part of the backward pass.

Source: Gao et al., Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup, RepL4NLP 2021.

No library serves any module with any criterion. GradCache 0.0.1, the code of the paper: the release of 2022 imports a
module that it does not install; autocast is CUDA's and float16 only; a second pass updates buffers again. The cached
losses of sentence-transformers 6.2 are maintained and careful with DDP, but each is one loss, tied to a
SentenceTransformer and its columns of text, and updates buffers twice. Those of pylate are tied to its ColBERT models.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def cached_step(
    model: nn.Module,
    criterion: Callable[[Tensor, Any], Tensor],
    inputs: Any,
    labels: Any,
    *,
    chunk_size: int,
    embed: Callable[[nn.Module, Any], Tensor] | None = None,
    scaler: torch.amp.GradScaler | None = None,
) -> Tensor:
    """Forward and backward pass of `criterion(model(inputs), labels)` with the activations of one chunk at a time.

        optimizer.zero_grad()
        loss = cached_step(model, criterion, images, labels, chunk_size=256)
        optimizer.step()

    Gradients are added to the `.grad` of the model's and of the criterion's parameters. They equal those of the plain
    step but for the order of the sums; a batch of one chunk is the plain step, bit for bit. The criterion is called
    once, with all embeddings: its parameters get their gradient once, and a memory that it keeps moves once.

    Autocast: call it inside `torch.autocast`, as the plain forward pass; the backward passes leave it. With float16
    give the `scaler` too, and continue with `scaler.step(optimizer)` and `scaler.update()`.

    Random numbers: the second pass of a chunk starts from the states of torch's default generators, on the CPU and on
    the devices of model and inputs, that the first one found. So dropout repeats itself. Other generators, Python's and
    NumPy's among them, are not replayed: with a model that draws from those the gradients are wrong.

    Buffers: the second pass starts from the buffers that the first one found, so that running statistics move once a
    chunk. In training mode BatchNorm normalises each chunk by itself: the gradients are exactly those of that
    computation, which is another one than on the whole batch.

    DistributedDataParallel: give the wrapped model, compiled inside if at all. Gradients are reduced once, with the
    last chunk; not at all inside the model's `no_sync()`. The processes may have different numbers of chunks. Every
    chunk must use the same parameters. The criterion sees the rows of its process, unless it gathers the others.

    Args:
        model: run twice on each chunk, with its hooks, in the mode it is in.
        criterion: `criterion(embeddings, labels)` is a scalar. Any callable, such as a function that mines first.
        inputs: the batch: a tensor [N, ...], or a tuple, list or mapping of such, nested or not. Every tensor is split
            along its first dimension.
        labels: handed to the criterion as they are.
        chunk_size: rows of a chunk, at least 1. The last chunk has the rest.
        embed: `embed(model, chunk)` makes embeddings [rows, ...] of the inputs of a chunk. None for `model(chunk)`,
            which is `model(*chunk)` for a tuple or list and `model(**chunk)` for a mapping.
        scaler: scales the loss before its backward pass.

    Returns:
        The loss: scalar, detached, not scaled.

    Time: one more forward pass than the plain step. Memory: the activations of one chunk, the embeddings and their
    gradient, a copy of the model's buffers, 5 KiB a chunk, and what the criterion needs.

    Raises:
        TypeError: a chunk_size that is no int, inputs or embeddings that are no tensors.
        ValueError: a chunk_size below 1, inputs without tensors or of different lengths, embeddings that are not one
            row for each row of the chunk, a DistributedDataParallel with static_graph=True.
        RuntimeError: neither the embeddings nor the criterion's parameters require a gradient.
    """
    _check_chunk_size(chunk_size)
    if isinstance(model, DistributedDataParallel) and model.static_graph:
        raise ValueError(
            "model is a DistributedDataParallel with static_graph=True, which allows one backward pass a step"
        )
    tensors = list(_tensors(inputs, "inputs"))
    n_rows = _common_length(tensors)
    chunks = [slice(start, start + chunk_size) for start in range(0, max(n_rows, 1), chunk_size)]

    def run(chunk: slice) -> Tensor:
        part = _rows(inputs, chunk)
        embeddings = _call(model, part) if embed is None else embed(model, part)
        _check_embeddings(embeddings, len(range(n_rows)[chunk]))
        return embeddings

    if len(chunks) == 1:
        loss = criterion(run(chunks[0]), labels)
        _backward(loss, scaler)
        return loss.detach()

    generators = _Generators(model, [tensor for _, tensor in tensors])
    buffers = _Buffers(model)
    starts = []

    def first_pass(chunk: slice) -> Tensor:
        starts.append(generators.states())
        part = run(chunk)
        # A copy, because a view keeps alive whatever it is a view of. The graph goes when `part` does.
        return part.detach().clone().requires_grad_(part.requires_grad)

    # Not under no_grad: there kernels, compiled graphs and autocast's cache of weights may be others.
    with _no_sync(model), buffers.as_broadcast():
        parts = [first_pass(chunk) for chunk in chunks]
    needs_grad = any(part.requires_grad for part in parts)
    embeddings = torch.cat(parts).detach().requires_grad_(needs_grad)
    loss = criterion(embeddings, labels)
    _backward(loss, scaler)
    if embeddings.grad is None:
        return loss.detach()
    grad = embeddings.grad

    def second_pass(chunk: slice, states: list[Tensor]) -> None:
        generators.set(states)
        part = run(chunk)
        if part.requires_grad:
            with _outside_autocast(part.device):
                torch.autograd.backward(part, grad[chunk])

    end = generators.states()
    buffers.put_back()
    try:
        with _no_sync(model):
            for chunk, states in zip(chunks[:-1], starts[:-1], strict=True):
                second_pass(chunk, states)
        second_pass(chunks[-1], starts[-1])
    finally:
        generators.set(end)
    return loss.detach()


class _Generators:
    """torch's default generators of the CPU and of the devices of a model and its inputs."""

    def __init__(self, model: nn.Module, inputs: list[Tensor]) -> None:
        devices = {tensor.device for tensor in (*model.parameters(), *model.buffers(), *inputs)}
        self.modules = [
            # A process has one MPS device, whose functions take none.
            (torch.get_device_module(device), () if device.type == "mps" else (device,))
            for device in devices
            if device.type not in ("cpu", "meta")
        ]

    def states(self) -> list[Tensor]:
        return [torch.get_rng_state(), *(module.get_rng_state(*device) for module, device in self.modules)]

    def set(self, states: list[Tensor]) -> None:
        torch.set_rng_state(states[0])
        for (module, device), state in zip(self.modules, states[1:], strict=True):
            module.set_rng_state(state, *device)


class _Buffers:
    """The buffers of a model as they are at construction, to be put back, both the tensors and their values."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.save()

    def save(self) -> None:
        self.saved = [
            (module._buffers, name, buffer, None if buffer is None else buffer.detach().clone())
            for module in self.model.modules()
            for name, buffer in module._buffers.items()
        ]

    @torch.no_grad()
    def put_back(self) -> None:
        for owner, name, buffer, value in self.saved:
            if buffer is not None and value is not None:
                buffer.copy_(value)
            owner[name] = buffer

    @contextmanager
    def as_broadcast(self) -> Iterator[None]:
        """Save them again when DistributedDataParallel has replaced them by those of rank 0, in the first forward."""
        if not isinstance(self.model, DistributedDataParallel):
            yield
            return

        def save_once(*arguments: Any) -> None:
            hook.remove()
            self.save()

        hook = self.model.module.register_forward_pre_hook(save_once)
        try:
            yield
        finally:
            hook.remove()


def _no_sync(model: nn.Module) -> AbstractContextManager[None]:
    """Without the reduction of gradients across processes, for a model that has one."""
    no_sync: Any = getattr(model, "no_sync", nullcontext)
    return cast("AbstractContextManager[None]", no_sync())


@contextmanager
def _outside_autocast(device: torch.device) -> Iterator[None]:
    with torch.autocast("cpu", enabled=False), torch.autocast(device.type, enabled=False):
        yield


def _backward(loss: Tensor, scaler: torch.amp.GradScaler | None) -> None:
    with _outside_autocast(loss.device):
        torch.autograd.backward(loss if scaler is None else scaler.scale(loss))


def _check_chunk_size(chunk_size: Any) -> None:
    if not isinstance(chunk_size, int) or isinstance(chunk_size, bool):
        raise TypeError(f"chunk_size must be an int, got {type(chunk_size).__name__}")
    if chunk_size < 1:
        raise ValueError(f"chunk_size is {chunk_size}: expected at least 1")


def _tensors(inputs: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors of nested tuples, lists and mappings, with their names for an error message."""
    if isinstance(inputs, Tensor):
        yield name, inputs
    elif isinstance(inputs, Mapping):
        for key, value in inputs.items():
            yield from _tensors(value, f"{name}[{key!r}]")
    elif isinstance(inputs, tuple | list):
        for index, value in enumerate(inputs):
            yield from _tensors(value, f"{name}[{index}]")
    else:
        raise TypeError(
            f"{name} must be a tensor or tensors in a tuple, list or mapping, got {type(inputs).__name__}"
        )


def _common_length(tensors: list[tuple[str, Tensor]]) -> int:
    if not tensors:
        raise ValueError("inputs must hold a tensor, got none")
    for name, tensor in tensors:
        if tensor.ndim == 0:
            raise ValueError(f"{name} must have a dimension to split, got a scalar")
    lengths = {name: len(tensor) for name, tensor in tensors}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"the tensors of inputs must have one length, got {lengths}")
    return len(tensors[0][1])


def _rows(inputs: Any, chunk: slice) -> Any:
    """The inputs of a chunk, in the containers of the whole."""
    if isinstance(inputs, Mapping):
        return {key: _rows(value, chunk) for key, value in inputs.items()}
    if isinstance(inputs, tuple | list):
        return [_rows(value, chunk) for value in inputs]
    return inputs[chunk]


def _call(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple | list) else model(inputs)


def _check_embeddings(embeddings: Any, n_rows: int) -> None:
    if not isinstance(embeddings, Tensor):
        raise TypeError(
            f"the embeddings of a chunk must be a tensor, got {type(embeddings).__name__}: "
            "give embed=, which makes them of the model's output"
        )
    if embeddings.ndim == 0 or len(embeddings) != n_rows:
        raise ValueError(
            f"a chunk of {n_rows} rows must have as many embeddings, got shape {list(embeddings.shape)}"
        )
