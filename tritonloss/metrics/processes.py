"""The queries of one call split among the processes of a group, all of which hold the same rows."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

Result = TypeVar("Result")


class Share:
    """Every W-th query for each of W processes: queries are ordered by cost, so shares cost the same.

    group: a torch.distributed process group; None for a single process, which takes all.
    """

    def __init__(self, group: Any) -> None:
        self.group = group
        self.rank = dist.get_rank(group) if group is not None else 0
        self.world = dist.get_world_size(group) if group is not None else 1
        if self.rank < 0:
            raise ValueError("group must be a process group that this process belongs to")

    def agree(self, prepare: Callable[[], Result], facts: Callable[[Result], Any]) -> Result:
        """What `prepare` returns. If it raises on any process, or `facts` of it differ, every process raises."""
        if self.group is None:
            return prepare()
        result, error, own = None, None, None
        try:
            result = prepare()
            own = facts(result)
        except Exception as raised:
            error = raised
        all_facts: list[Any] = [None] * self.world
        text = None if error is None else f"{type(error).__name__}: {error}"
        dist.all_gather_object(all_facts, (own, text), group=self.group)
        if error is not None:
            raise error
        for rank, (other, failure) in enumerate(all_facts):
            if failure is not None:
                raise RuntimeError(f"process {rank} of the group failed: {failure}")
            if other != own:
                raise ValueError(
                    f"all processes of the group must pass the same arguments: process {rank} has {other}, process "
                    f"{self.rank} has {own}"
                )
        assert result is not None
        return result

    def of(self, values: Tensor) -> Tensor:
        """The part of this process."""
        return values[self.rank :: self.world]

    def gather(self, part: Tensor, total: int) -> Tensor:
        """All of `total` rows, of the part [n, ...] of each process."""
        if self.group is None:
            return part
        size = -(-total // self.world)
        padded = torch.zeros(size, *part.shape[1:], dtype=part.dtype, device=part.device)
        padded[: len(part)] = part
        parts = [torch.empty_like(padded) for _ in range(self.world)]
        dist.all_gather(parts, padded, group=self.group)
        return torch.stack(parts, 1).flatten(0, 1)[:total]
