"""One call split among processes that hold equal inputs: each computes a share, and every one gets the whole result.

W processes compute the same loss L. The derivative of a collective is that of a sum over the processes,
L_1 + ... + L_W, where L_w is what process w makes of the result. Because every L_w is L, the gradients of all processes
add up to that of W L. DistributedDataParallel divides them by W: what remains is the gradient of L.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from tritonloss.types import accumulation_dtype

# A plain global, of which torch.compile makes a guard.
_group: Any = None


class sharing:
    """Within it the primitives split their work among the processes of `group`, all of which make the same calls.

    group: a torch.distributed process group. None: no split. For all threads of the process.
    """

    def __init__(self, group: Any) -> None:
        self.group = group

    def __enter__(self) -> None:
        global _group
        self._previous = _group
        _group = self.group

    def __exit__(self, *error: object) -> None:
        global _group
        _group = self._previous


class Share(NamedTuple):
    """What this process computes: `rows` of `n`; sizes: how many rows each process of the group has."""

    group: Any
    rows: slice
    sizes: list[int]

    def gather(self, part: Tensor) -> Tensor:
        """The rows of all processes, of the rows [size, ...] of this one."""
        return gather(part, self.sizes, self.group)

    def gather_segments(self, part: Tensor, count: Tensor) -> Tensor:
        """The same of rows that are segments of values: part [M], count [n] of all rows. One host sync."""
        sums = torch.stack([values.sum() for values in torch.split(count, self.sizes)])
        return gather(part, sums.tolist(), self.group)

    def total(self, part: Tensor) -> Tensor:
        """The sum over the processes."""
        return cast(Tensor, _Total.apply(part, self.group))  # type: ignore[no-untyped-call]


def own_share(n: int, *, triangular: bool = False) -> Share | None:
    """The share of this process of n rows, contiguous; None where nothing is split.

    triangular: row i costs n - i, and shares are equal in cost; otherwise they are equal in rows.
    """
    group = _group
    if group is None:
        return None
    parts = dist.get_world_size(group)
    edges = [_edge(n, part / parts, triangular) for part in range(parts + 1)]
    rank = dist.get_rank(group)
    return Share(
        group, slice(edges[rank], edges[rank + 1]), [stop - start for start, stop in pairwise(edges)]
    )


def _edge(n: int, part: float, triangular: bool) -> int:
    # The rows from x n on cost (1 - x)^2 of the whole.
    return round(n * (1 - math.sqrt(1 - part)) if triangular else n * part)


def backends(group: Any) -> dict[str, str]:
    """The backend of the group for each type of device that it serves, such as {"cpu": "gloo", "cuda": "nccl"}."""
    return dict(entry.split(":") for entry in dist.get_backend_config(group).split(","))


def gather(part: Tensor, sizes: Sequence[int], group: Any) -> Tensor:
    """The rows of all processes in the order of their ranks.

    part: [sizes[rank], ...], any dtype, equal trailing sizes on all ranks. sizes: the number of rows of every rank.
    Returns [sum(sizes), ...]; differentiable once. Gradients of half precision are added up in float32.
    """
    return cast(Tensor, _Gather.apply(part, list(sizes), group))  # type: ignore[no-untyped-call]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, sizes: list[int], group: Any) -> Tensor:
        ctx.sizes, ctx.group = sizes, group
        longest = max(sizes)
        if longest * math.prod(part.shape[1:]) == 0:
            return part.new_zeros(sum(sizes), *part.shape[1:])
        padded = part.new_zeros(longest, *part.shape[1:])
        padded[: part.shape[0]] = part
        # As bytes: not every backend transports every dtype.
        raw = padded.flatten().view(torch.uint8)
        parts = [torch.empty_like(raw) for _ in sizes]
        dist.all_gather(parts, raw, group=group)
        rows = (
            other.view(part.dtype).view_as(padded)[:size] for other, size in zip(parts, sizes, strict=True)
        )
        return torch.cat(list(rows))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        rank = dist.get_rank(ctx.group)
        total = grad.to(accumulation_dtype(grad.dtype), memory_format=torch.contiguous_format, copy=True)
        if backends(ctx.group).get(total.device.type) == "nccl" and total.numel():
            own = _reduce_scatter(total, ctx.sizes, ctx.group)[: ctx.sizes[rank]]
        else:
            dist.all_reduce(total, group=ctx.group)
            own = torch.split(total, ctx.sizes)[rank]
        return own.to(grad.dtype), None, None


def _reduce_scatter(total: Tensor, sizes: list[int], group: Any) -> Tensor:
    padded = total.new_zeros(len(sizes), max(sizes), *total.shape[1:])
    for rows, part in zip(padded, torch.split(total, sizes), strict=True):
        rows[: part.shape[0]] = part
    own = torch.empty_like(padded[0])
    dist.reduce_scatter_tensor(own, padded, group=group)
    return own


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any) -> Tensor:
        ctx.group = group
        total = part.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None
