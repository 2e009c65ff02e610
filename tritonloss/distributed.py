"""The losses over torch.distributed: the loss of the whole batch, of which each process holds some rows."""

import functools
import hashlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tritonloss.backends import selected_backend
from tritonloss.indices import as_indices
from tritonloss.ops.shares import backends, gather, sharing
from tritonloss.types import accumulation_dtype


class DistributedLoss(nn.Module):
    """The loss of the rows of all processes, computed together: each process computes a share of it.

    `DistributedLoss(criterion)(embeddings, labels)`, called by every process of the group with its own rows, is what
    `criterion` is of the rows of all of them, those of rank 0 first: the same number on every rank. Ranks may have
    different numbers of rows, and none at all. After DistributedDataParallel has averaged the gradients over the
    ranks, those of the model are the gradients of that number, as if one process had the whole batch.

    Wrap the model in DistributedDataParallel; do not wrap the loss. A loss with parameters (proxies) or a state
    (SOPRC's memory) is given those of rank 0 when this module is made, and gets the same gradient and the same step on
    every rank: give `parameters()` to the optimizer. Wrapping this module, or a module that has it, in
    DistributedDataParallel is not wrong, but averages equal gradients once more.

    Rows and labels are gathered once, in their own dtype, and every rank has all of them: memory O(N D), N the rows of
    all ranks. The similarities, sums and gradients of N x N, or of the N x C of proxies, are split: a rank computes
    1 / W of them, W the number of ranks. What is O(N) is computed by every rank.

    Args:
        criterion: a loss of this package, or any module or function of tensors whose first dimension is that of the
            batch. One that does not build on our primitives is computed whole by every rank.
        group: a process group; None for the default one. Where torch.distributed is not initialised, or the group has
            one process, `criterion` is called as it is.

    Calls:
        Every tensor argument, by position or by name, is taken as this rank's rows, and gathered along its first
        dimension. An `indices_tuple` counts this rank's rows from 0. Other arguments must be equal on all ranks.

    Returns:
        What `criterion` returns; per-query losses are those of the rows of all ranks.

    Raises:
        TypeError: the criterion cannot be called, or is wrapped in DistributedDataParallel.
        ValueError: on every rank, if ranks differ in the trailing shape, dtype or kind of device of an argument, in
            which arguments are given or need a gradient, in the backend of `use_backend`, or in the loss, its options,
            the shapes of its parameters or its training mode; on one rank, tensors of different numbers of rows.
        RuntimeError: on the other ranks, if the arguments of one are at fault.

    No rank waits longer than the timeout of the process group. No second derivative.
    """

    def __init__(self, criterion: Callable[..., Any], group: Any = None) -> None:
        super().__init__()
        is_wrapped = isinstance(criterion, nn.parallel.DistributedDataParallel)
        if is_wrapped or not callable(criterion):
            raise TypeError(
                f"criterion must be a loss, not wrapped in DistributedDataParallel, got {type(criterion).__name__}"
            )
        self.criterion = criterion
        self.group = group
        if (processes := _active(group)) is not None and isinstance(criterion, nn.Module):
            first = dist.get_global_rank(processes, 0)
            for tensor in [*criterion.parameters(), *criterion.buffers()]:
                dist.broadcast(tensor.detach(), first, group=processes)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As `criterion`."""
        group = _active(self.group)
        if group is None:
            return self.criterion(*args, **kwargs)
        names = _names(self.criterion, args)
        given = {**dict(zip(names, args, strict=True)), **kwargs}
        whole = _whole_batch(self.criterion, given, group)
        with sharing(group):
            return _call(
                self.criterion, group, [whole[name] for name in names], {name: whole[name] for name in kwargs}
            )

    # A collective waits for the other processes: torch.compile leaves its graph here.
    forward._torchdynamo_disable = True  # type: ignore[attr-defined]

    def __getstate__(self) -> dict[str, Any]:
        # A process group cannot be pickled; the copy takes the default one.
        return {**self.__dict__, "group": None}


def _active(group: Any) -> Any:
    """The process group, if it has more than one process."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    group = dist.group.WORLD if group is None else group
    return group if dist.get_world_size(group) > 1 else None


def _names(criterion: Callable[..., Any], args: tuple[Any, ...]) -> list[str]:
    function = criterion.forward if isinstance(criterion, nn.Module) else criterion
    names = list(inspect.signature(function).parameters)
    return [names[place] if place < len(names) else f"argument {place}" for place in range(len(args))]


def _whole_batch(criterion: Callable[..., Any], given: dict[str, Any], group: Any) -> dict[str, Any]:
    """The arguments with the rows of all ranks; or an error on every rank."""
    try:
        rows = _Rows(given)
        facts = dict(_facts(criterion, rows))
    except Exception as error:
        _agree({"error": f"{type(error).__name__}: {error}"}, [0] * _Rows.N_SIZES, group)
        raise
    return rows.gathered(_agree(facts, rows.sizes, group), group)


class _Rows:
    """The arguments of a call, told apart: rows of this rank, rows of references, mined indices, and the rest."""

    N_SIZES = 6

    def __init__(self, given: dict[str, Any]) -> None:
        self.given = given
        self.tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
        self.indices = as_indices(given.get("indices_tuple"))
        self.n_rows = self._length("ref_", False)
        self.n_references = self._length("ref_", True)
        listed = [] if self.indices is None else [entry.shape[0] for entry in self.indices]
        self.sizes = [self.n_rows, self.n_references, *listed, *[0] * (4 - len(listed))]

    def _length(self, prefix: str, wanted: bool) -> int:
        chosen = {name: value for name, value in self.tensors.items() if name.startswith(prefix) == wanted}
        for name, value in chosen.items():
            if value.ndim == 0:
                raise ValueError(
                    f"{name} must have the rows of the batch as its first dimension, got shape []"
                )
        lengths = {name: value.shape[0] for name, value in chosen.items()}
        if len(set(lengths.values())) > 1:
            listing = ", ".join(f"{name} {length}" for name, length in lengths.items())
            raise ValueError(f"expected tensors with one number of rows, got {listing}")
        return next(iter(lengths.values()), 0)

    def gathered(self, sizes: list[list[int]], group: Any) -> dict[str, Any]:
        """sizes: those of all ranks."""
        n_rows, n_references, *listed = map(list, zip(*sizes, strict=True))
        whole = dict(self.given)
        for name, value in self.tensors.items():
            whole[name] = gather(value, n_references if name.startswith("ref_") else n_rows, group)
        if self.indices is not None:
            rank = dist.get_rank(group)
            first_row = sum(n_rows[:rank])
            first_reference = sum(n_references[:rank]) if "ref_emb" in self.tensors else first_row
            whole["indices_tuple"] = type(self.indices)(
                *(
                    gather(entry + (first_row if "anchors" in name else first_reference), lengths, group)
                    for name, entry, lengths in zip(
                        self.indices._fields, self.indices, listed[: len(self.indices)], strict=True
                    )
                )
            )
        return whole


def _facts(criterion: Callable[..., Any], rows: _Rows) -> Iterator[tuple[str, str]]:
    """What must be equal on all ranks, by its name."""
    for name, value in rows.given.items():
        if isinstance(value, Tensor):
            kind = (
                f"{value.dtype} [*{''.join(f', {size}' for size in value.shape[1:])}] on {value.device.type}"
            )
            needs_grad = torch.is_grad_enabled() and value.requires_grad
            yield name, kind + (", which needs a gradient" if needs_grad else "")
        elif name != "indices_tuple":
            yield name, _plain(value)
    if rows.indices is not None:
        yield "indices_tuple", f"{len(rows.indices)} of {[entry.dtype for entry in rows.indices]}"
    yield "backend", selected_backend()
    yield "criterion", _options(criterion)


def _options(criterion: Callable[..., Any]) -> str:
    if isinstance(criterion, nn.Module):
        parts = [f"{name}: {_object(module)}" for name, module in criterion.named_modules()]
        state = [*criterion.named_parameters(), *criterion.named_buffers()]
        parts += [f"{name} {value.dtype} {list(value.shape)} {value.requires_grad}" for name, value in state]
        return "; ".join(parts)
    if isinstance(criterion, functools.partial):
        return f"{_options(criterion.func)} {_plain(criterion.args)} {_plain(criterion.keywords)}"
    return getattr(criterion, "__qualname__", type(criterion).__qualname__)


def _object(value: Any) -> str:
    options = {
        name: _plain(option) for name, option in sorted(vars(value).items()) if not name.startswith("_")
    }
    return f"{type(value).__qualname__} {options}"


def _plain(value: Any) -> str:
    """The value where it is a number, a text or made of such; else its type."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_plain, value))})"
    if isinstance(value, dict):
        return str({key: _plain(entry) for key, entry in sorted(value.items())})
    return _object(value) if hasattr(value, "__dataclass_fields__") else type(value).__qualname__


def _agree(facts: dict[str, str], sizes: list[int], group: Any) -> list[list[int]]:
    """The sizes of all ranks; an error on every rank where facts differ, or where a rank has an error."""
    digest = hashlib.sha256(repr(sorted(facts.items())).encode()).digest()
    # A device that every rank takes, also one whose arguments are at fault.
    types = list(backends(group))
    mine = torch.tensor(
        [int.from_bytes(digest[:7], "big"), *sizes], device="cpu" if "cpu" in types else types[0]
    )
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, mine, group=group)
    digests, *columns = zip(*torch.stack(everyone).tolist(), strict=True)
    if len(set(digests)) > 1:
        _raise_difference(facts, group)
    return [list(row) for row in zip(*columns, strict=True)]


def _raise_difference(facts: dict[str, str], group: Any) -> None:
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, facts, group=group)
    if "error" in facts:
        return
    for rank, other in enumerate(everyone):
        if "error" in other:
            raise RuntimeError(f"DistributedLoss: rank {rank} cannot take part: {other['error']}")
    for name in facts:
        for rank, other in enumerate(everyone):
            if other.get(name) != everyone[0].get(name):
                raise ValueError(
                    f"DistributedLoss: ranks differ in {name}: rank 0 has {everyone[0].get(name, 'none')}, "
                    f"rank {rank} has {other.get(name, 'none')}"
                )
    raise ValueError(
        f"DistributedLoss: ranks differ in their arguments: {[list(other) for other in everyone]}"
    )


def _call(criterion: Callable[..., Any], group: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """The criterion; the gradients of its parameters are averaged over the ranks, and so equal."""
    if not (torch.is_grad_enabled() and isinstance(criterion, nn.Module)):
        return criterion(*args, **kwargs)
    averaged = {
        name: _AveragedGradient.apply(parameter, group)  # type: ignore[no-untyped-call]
        for name, parameter in criterion.named_parameters()
        if parameter.requires_grad
    }
    return torch.func.functional_call(criterion, averaged, tuple(args), kwargs)


class _AveragedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return parameter.view_as(parameter)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        mean = grad.to(accumulation_dtype(grad.dtype), memory_format=torch.contiguous_format, copy=True)
        dist.all_reduce(mean, group=ctx.group)
        return mean.div_(dist.get_world_size(ctx.group)).to(grad.dtype), None
