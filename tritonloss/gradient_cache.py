"""Large batches without their activations: the network sees the batch in chunks, the loss sees it as a whole.

A loss of all pairs needs the embeddings of the batch, which are small; what fills the memory are the activations of the
network. So the chunks are embedded one after the other, no graph is kept, the loss is differentiated down to the
embeddings, and each chunk is embedded again, followed at once by its part of the backward pass.

Source: Gao et al., Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup, RepL4NLP 2021.
"""

import copy
import dataclasses
import hashlib
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from tritonloss.distributed import DistributedLoss
from tritonloss.ops.shares import backends
from tritonloss.types import check_count


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

    DistributedDataParallel: give the wrapped model, compiled inside if at all, or a module that holds wrapped ones.
    Gradients are reduced once, with the last chunk; not at all inside the model's `no_sync()`. The processes may have
    different numbers of chunks. Every chunk must use the same parameters. The criterion sees the rows of its process,
    unless it gathers the others.

    Inside the forward pass of a DistributedDataParallel, where Lightning calls `training_step`, that one reduces
    nothing. There the gradients of all its parameters are averaged here, after the last chunk. The same is done for
    parameters that no wrapper averages, if the criterion calls a `DistributedLoss`; they must be equal on the ranks.
    It takes one collective per parameter.

    FSDP, DTensor, SyncBatchNorm: the forward pass waits for the other processes, so that all need the same number of
    chunks. They compare it first.

    Hooks of `Tensor.register_post_accumulate_grad_hook`, which may hold the step of an optimizer, run once per call,
    after the last chunk. Those of `Tensor.register_hook` see the gradient of each chunk.

    Args:
        model: run twice on each chunk, with its hooks, in the mode it is in.
        criterion: `criterion(embeddings, labels)` is a scalar. Any callable, such as a function that mines first.
        inputs: the batch: a tensor [N, ...], or tensors in a tuple, list, mapping or dataclass, nested or not. Every
            tensor is split along its first dimension. The chunks have the containers of the whole, with their types
            and attributes. Whatever else is in them, such as None, a number or a text, goes to each chunk as it is.
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
        TypeError: a chunk_size that is no int, inputs that are no tensors or hold an array, embeddings that are no
            tensor.
        ValueError: a chunk_size below 1, inputs without tensors or of different lengths, embeddings that are not one
            row for each row of the chunk, a DistributedDataParallel with static_graph=True. On all ranks: different
            numbers of chunks where they must be equal, parameters that differ between ranks and that no wrapper
            averages. With several chunks: an optimizer of torch's `_apply_optimizer_in_backward`.
        RuntimeError: neither the embeddings nor the criterion's parameters require a gradient.
    """
    chunk_size = check_count("chunk_size", chunk_size)
    tensors = list(_tensors(inputs, "inputs"))
    n_rows = _common_length(tensors)
    chunks = [slice(start, start + chunk_size) for start in range(0, max(n_rows, 1), chunk_size)]
    processes = _Processes(model)
    processes.check_number_of_chunks(len(chunks))
    _check_optimizers(model, len(chunks))

    def run(chunk: slice) -> Tensor:
        part = _rows(inputs, chunk)
        embeddings = _call(model, part) if embed is None else embed(model, part)
        _check_embeddings(embeddings, len(range(n_rows)[chunk]))
        return embeddings

    if len(chunks) == 1:
        with processes.last_pass():
            embeddings = run(chunks[0])
        loss = processes.call(criterion, embeddings, labels)
        with _hooks_afterwards(processes.parameters):
            _backward(loss, scaler)
            processes.average_gradients()
        return loss.detach()

    generators = _Generators(model, [tensor for _, tensor in tensors])
    buffers = _Buffers(model, processes.wrappers)
    starts = []

    def first_pass(chunk: slice) -> Tensor:
        starts.append(generators.states())
        part = run(chunk)
        # A copy, because a view keeps alive whatever it is a view of. The graph goes when `part` does.
        return part.detach().clone().requires_grad_(part.requires_grad)

    def second_pass(chunk: slice, states: list[Tensor], grad: Tensor) -> None:
        generators.set(states)
        part = run(chunk)
        if part.requires_grad:
            with _outside_autocast(part.device):
                torch.autograd.backward(part, grad[chunk])

    def second_passes(grad: Tensor) -> None:
        end = generators.states()
        buffers.put_back()
        try:
            with processes.no_sync():
                for chunk, states in zip(chunks[:-1], starts[:-1], strict=True):
                    second_pass(chunk, states, grad)
            with processes.last_pass():
                second_pass(chunks[-1], starts[-1], grad)
        finally:
            generators.set(end)

    # Not under no_grad: there kernels, compiled graphs and autocast's cache of weights may be others.
    with processes.no_sync(), buffers.as_broadcast():
        parts = [first_pass(chunk) for chunk in chunks]
    needs_grad = any(part.requires_grad for part in parts)
    embeddings = torch.cat(parts).detach().requires_grad_(needs_grad)
    with buffers.keeping():
        loss = processes.call(criterion, embeddings, labels)
    with _hooks_afterwards([*model.parameters(), *processes.parameters]):
        _backward(loss, scaler)
        if embeddings.grad is not None:
            second_passes(embeddings.grad)
        processes.average_gradients()
    return loss.detach()


class _Processes:
    """Who averages the gradients of a model over the processes, and what must be equal among them.

    wrappers: the DistributedDataParallel modules in the model, which average in the last backward pass.
    parameters, group: what `average_gradients` averages, over which process group; None for nothing.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.wrappers = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
        if any(wrapper.static_graph for wrapper in self.wrappers):
            raise ValueError(
                "model is a DistributedDataParallel with static_graph=True, which allows one backward pass per step"
            )
        self.parameters: list[nn.Parameter] = []
        self.group: Any = None
        self.inside = _calling_wrapper(model)
        if self.inside is not None:
            self.parameters = [p for p in self.inside.parameters() if p.requires_grad]
            self.group = self.inside.process_group

    def no_sync(self) -> AbstractContextManager[Any]:
        """Without the reduction of gradients across processes, for models that have one."""
        stack = ExitStack()
        for module in [self.model] if hasattr(self.model, "no_sync") else self.wrappers:
            stack.enter_context(module.no_sync())  # type: ignore[operator]
        return stack

    def last_pass(self) -> AbstractContextManager[Any]:
        """With the reduction, unless gradients are averaged here."""
        return nullcontext() if self.inside is None else self.no_sync()

    def call(self, criterion: Callable[[Tensor, Any], Tensor], embeddings: Tensor, labels: Any) -> Tensor:
        """The criterion. If it calls a DistributedLoss, parameters that no wrapper averages are averaged here."""
        if self.inside is not None or not _has_processes():
            return criterion(embeddings, labels)
        loose = _not_averaged(self.model, self.wrappers)
        groups: list[Any] = []
        thread = threading.get_ident()

        def notice(module: nn.Module, arguments: Any) -> None:
            if isinstance(module, DistributedLoss) and threading.get_ident() == thread:
                groups.append(dist.group.WORLD if module.group is None else module.group)

        handle = register_module_forward_pre_hook(notice)
        try:
            loss = criterion(embeddings, labels)
        finally:
            handle.remove()
        if loose and groups and dist.get_world_size(groups[0]) > 1:
            _check_equal(loose, groups[0])
            self.parameters, self.group = loose, groups[0]
        return loss

    @torch.no_grad()
    def average_gradients(self) -> None:
        """Over the ranks; a parameter without a gradient on every rank has none after it."""
        if self.group is None:
            return
        used = torch.tensor([p.grad is not None for p in self.parameters], dtype=torch.int32)
        used = used.to(_message_device(self.group))
        dist.all_reduce(used, group=self.group)
        for parameter, count in zip(self.parameters, used.tolist(), strict=True):
            if count:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad, group=self.group)
                parameter.grad /= dist.get_world_size(self.group)

    def check_number_of_chunks(self, n_chunks: int) -> None:
        """Raises on every rank if it differs where the forward pass waits for other ranks."""
        if not _has_processes():
            return
        groups = list(_forward_groups(self.model))
        if not groups:
            return
        # The largest number, and the smallest by its negative: one group after the other spans a mesh.
        bounds = torch.tensor([n_chunks, -n_chunks], device=_message_device(groups[0]))
        for group in groups:
            dist.all_reduce(bounds, dist.ReduceOp.MAX, group=group)
        most, least = bounds.tolist()
        if most != -least:
            raise ValueError(
                f"the processes have between {-least} and {most} chunks, this one {n_chunks}: with FSDP, DTensor or "
                "SyncBatchNorm each chunk waits for the other processes. Give a chunk_size that makes as many on "
                "every rank"
            )


def _has_processes() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _message_device(group: Any) -> str:
    types = list(backends(group))
    return "cpu" if "cpu" in types else types[0]


def _calling_wrapper(model: nn.Module) -> DistributedDataParallel | None:
    """The DistributedDataParallel whose forward pass is running, if it has a parameter of the model."""
    wrapper: DistributedDataParallel | None = getattr(DistributedDataParallel, "_active_ddp_module", None)
    if wrapper is None or set(wrapper.parameters()).isdisjoint(model.parameters()):
        return None
    return wrapper


def _sharding() -> tuple[tuple[type, ...], type | None]:
    """The classes of sharded modules and of distributed tensors, where they are in use."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    tensors = sys.modules.get("torch.distributed.tensor")
    names = ("FSDPModule", "FullyShardedDataParallel")
    return tuple(getattr(fsdp, name) for name in names if hasattr(fsdp, name)), getattr(
        tensors, "DTensor", None
    )


def _not_averaged(model: nn.Module, wrappers: list[DistributedDataParallel]) -> list[nn.Parameter]:
    """The parameters with a gradient that no wrapper in the model averages."""
    if hasattr(model, "no_sync"):
        return []
    sharded, dtensor = _sharding()
    holders = [*wrappers, *(module for module in model.modules() if isinstance(module, sharded))]
    averaged = {parameter for holder in holders for parameter in holder.parameters()}
    return [
        p
        for p in model.parameters()
        if p.requires_grad and p not in averaged and not (dtensor is not None and isinstance(p, dtensor))
    ]


def _forward_groups(model: nn.Module) -> Iterator[Any]:
    """The process groups for which the forward pass of a model waits."""
    sharded, dtensor = _sharding()
    for module in model.modules():
        if isinstance(module, nn.SyncBatchNorm) and module.training:
            yield dist.group.WORLD if module.process_group is None else module.process_group
        elif isinstance(module, sharded):
            if hasattr(module, "process_group"):
                yield module.process_group
            else:
                module.reshard()  # type: ignore[operator]  # those of a root may be whole after a forward pass
    parameters: list[Any] = (
        [] if dtensor is None else [p for p in model.parameters() if isinstance(p, dtensor)]
    )
    for mesh in dict.fromkeys(parameter.device_mesh for parameter in parameters):
        yield from mesh.get_all_groups()


def _check_equal(parameters: list[nn.Parameter], group: Any) -> None:
    """Raises on every rank if values differ, by the sums of their bits as integers."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    sums = [
        p.detach()
        .contiguous()
        .flatten()
        .view(integers.get(p.element_size(), torch.int64))
        .sum(dtype=torch.int64)
        for p in parameters
    ]
    facts = [(tuple(p.shape), int(total)) for p, total in zip(parameters, sums, strict=True)]
    digest = int.from_bytes(hashlib.sha256(repr(facts).encode()).digest()[:7], "big")
    bounds = torch.tensor([digest, -digest], device=_message_device(group))
    dist.all_reduce(bounds, dist.ReduceOp.MAX, group=group)
    most, least = bounds.tolist()
    if most != -least:
        raise ValueError(
            "the criterion calls a DistributedLoss, and parameters of the model that are in no DistributedDataParallel "
            "have other values on other ranks: wrap the model, and give the wrapped one"
        )


def _check_optimizers(model: nn.Module, n_chunks: int) -> None:
    if n_chunks > 1 and any(
        hasattr(parameter, "_in_backward_optimizers") for parameter in model.parameters()
    ):
        raise ValueError(
            "the model has an optimizer of _apply_optimizer_in_backward, which would step once per chunk: step after "
            "cached_step, or in a hook of Tensor.register_post_accumulate_grad_hook"
        )


@contextmanager
def _hooks_afterwards(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Hooks of accumulated gradients run at the end, once, for the parameters that have got one; not after an error."""
    held: dict[Tensor, dict[Any, Any]] = {}
    for parameter in parameters:
        hooks = getattr(parameter, "_post_accumulate_grad_hooks", None)
        if hooks:
            held[parameter] = dict(hooks)
    reached: dict[Tensor, None] = {}
    for parameter in held:
        _replace_hooks(parameter, {0: lambda tensor: reached.setdefault(tensor)})
    try:
        yield
    finally:
        for parameter, hooks in held.items():
            _replace_hooks(parameter, hooks)
    with torch.no_grad():
        for parameter in reached:
            for hook in held[parameter].values():
                hook(parameter)


def _replace_hooks(parameter: Any, hooks: dict[Any, Any]) -> None:
    # In place: the autograd engine has this very mapping.
    parameter._post_accumulate_grad_hooks.clear()
    parameter._post_accumulate_grad_hooks.update(hooks)


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

    def __init__(self, model: nn.Module, wrappers: list[DistributedDataParallel]) -> None:
        self.wrappers = wrappers
        self.saved: dict[tuple[nn.Module, str], tuple[Tensor | None, Tensor | None]] = {}
        self.save(model)

    def save(self, part: nn.Module) -> None:
        for module in part.modules():
            for name, buffer in module._buffers.items():
                self.saved[module, name] = buffer, None if buffer is None else buffer.detach().clone()

    def versions(self) -> dict[tuple[nn.Module, str], tuple[Tensor | None, int]]:
        """Which tensors the buffers are, and how often torch has written to them."""
        now = {place: place[0]._buffers.get(place[1]) for place in self.saved}
        return {
            place: (buffer, 0 if buffer is None or buffer.is_inference() else buffer._version)
            for place, buffer in now.items()
        }

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """What moves within stays as it is: the memory of a criterion that is part of the model."""
        before = self.versions()
        yield
        for place, (buffer, version) in self.versions().items():
            if buffer is not before[place][0] or version != before[place][1]:
                del self.saved[place]

    @torch.no_grad()
    def put_back(self) -> None:
        for (module, name), (buffer, value) in self.saved.items():
            if buffer is not None and value is not None:
                buffer.copy_(value)
            module._buffers[name] = buffer

    @contextmanager
    def as_broadcast(self) -> Iterator[None]:
        """Save them again when DistributedDataParallel has replaced them by those of rank 0, in the first forward."""
        hooks = [self.save_at_first_call(wrapper.module) for wrapper in self.wrappers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def save_at_first_call(self, module: nn.Module) -> RemovableHandle:
        def save_once(*arguments: Any) -> None:
            hook.remove()
            self.save(module)

        hook = module.register_forward_pre_hook(save_once)
        return hook


@contextmanager
def _outside_autocast(device: torch.device) -> Iterator[None]:
    with torch.autocast("cpu", enabled=False), torch.autocast(device.type, enabled=False):
        yield


def _backward(loss: Tensor, scaler: torch.amp.GradScaler | None) -> None:
    with _outside_autocast(loss.device):
        torch.autograd.backward(loss if scaler is None else scaler.scale(loss))


class _Container(NamedTuple):
    """The members of a container, their names for an error message, and what makes such a container of others."""

    names: list[str]
    members: list[Any]
    of: Callable[[list[Any]], Any]


def _container(inputs: Any) -> _Container | None:
    """None for a leaf."""
    if isinstance(inputs, (Tensor, type)):
        return None
    if isinstance(inputs, Mapping):
        names = [f"[{key!r}]" for key in inputs]
        return _Container(names, list(inputs.values()), lambda members: _mapping_of(inputs, members))
    if isinstance(inputs, tuple) and hasattr(inputs, "_fields"):
        return _Container([f".{name}" for name in inputs._fields], list(inputs), inputs._make)  # type: ignore[attr-defined]
    if isinstance(inputs, tuple | list):
        names = [f"[{index}]" for index in range(len(inputs))]
        return _Container(names, list(inputs), lambda members: _sequence_of(inputs, members))
    if dataclasses.is_dataclass(inputs):
        fields = [field.name for field in dataclasses.fields(inputs)]
        members = [getattr(inputs, name) for name in fields]
        return _Container(
            [f".{name}" for name in fields], members, lambda new: _dataclass_of(inputs, fields, new)
        )
    # Containers that others have registered with torch.
    members, structure = pytree.tree_flatten(inputs)
    if len(members) == 1 and members[0] is inputs:
        return None
    names = [f"[{index}]" for index in range(len(members))]
    return _Container(names, members, lambda new: pytree.tree_unflatten(new, structure))


def _mapping_of(mapping: Mapping[Any, Any], members: list[Any]) -> Any:
    if not isinstance(mapping, MutableMapping):
        return type(mapping)(dict(zip(mapping, members, strict=True)))  # type: ignore[call-arg]
    new = copy.copy(mapping)
    attributes = getattr(new, "__dict__", {})
    for key, member in zip(mapping, members, strict=True):
        new[key] = member
        if key in attributes:  # which shows an entry under its name
            attributes[key] = member
    return new


def _sequence_of(sequence: tuple[Any, ...] | list[Any], members: list[Any]) -> Any:
    if isinstance(sequence, tuple):
        return type(sequence)(members)
    new = copy.copy(sequence)
    new[:] = members
    return new


def _dataclass_of(instance: Any, fields: list[str], members: list[Any]) -> Any:
    new = copy.copy(instance)
    for name, member in zip(fields, members, strict=True):
        object.__setattr__(new, name, member)  # frozen or not
    return new


def _tensors(inputs: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors in nested containers, with their names for an error message."""
    container = _container(inputs)
    if container is not None:
        for member_name, member in zip(container.names, container.members, strict=True):
            yield from _tensors(member, name + member_name)
    elif isinstance(inputs, Tensor):
        yield name, inputs
    elif name == "inputs":
        raise TypeError(
            f"inputs must be a tensor, or tensors in a tuple, list, mapping or dataclass, got {type(inputs).__name__}"
        )
    elif getattr(inputs, "shape", ()):
        raise TypeError(f"{name} must be a tensor, which can be split, got {type(inputs).__name__}")


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
    container = _container(inputs)
    if container is not None:
        return container.of([_rows(member, chunk) for member in container.members])
    return inputs[chunk] if isinstance(inputs, Tensor) else inputs


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
