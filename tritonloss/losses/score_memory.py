"""The scores of positives that SOPRC remembers for each class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tritonloss.layout import runs, segment_sum
from tritonloss.losses.base import check_choice, check_count, check_numbers
from tritonloss.losses.soprc_pieces import (
    Grid,
    Interpolation,
    MemoryInit,
    MemoryUpdate,
    ScoreRange,
    check_interpolation,
    interpolate_segments,
)
from tritonloss.ops import Operator, Panels, positive_scores
from tritonloss.types import accumulation_dtype, upcast


class ScoreMemory(nn.Module):
    """v: for each class the quantiles phi of the positive scores of its queries, as a moving average.

    Buffers: v [C, V] float32, visits [C] int64, how often each class was met. A state of another size is refused as a
    whole, and no conversion of the module rounds v.

    Args:
        num_classes: C.
        memory_size: V, at least 1.
        beta: step of the average, in (0, 1] (Eq. 10).
        score_range: the smallest and largest score (b, B of Algorithm 2), None for no limit, or "auto", which the
            caller replaces.
        grid: of Algorithm 2, see `interpolate_scores`.
        v_init: v_1; "first", the first phi of a class, or "uniform", j / V.
        update: of a class with several queries; "mean" of their phi, or "last", that of the last of them.

    Source: Wen et al., NeurIPS 2022 (arXiv 2209.13262), Algorithm 2 and Eq. 10.
    """

    v: Tensor
    visits: Tensor

    def __init__(
        self,
        num_classes: int,
        memory_size: int,
        beta: float,
        score_range: ScoreRange | Literal["auto"],
        grid: Grid,
        v_init: MemoryInit,
        update: MemoryUpdate,
    ) -> None:
        super().__init__()
        self.num_classes = check_count("num_classes", num_classes)
        is_auto = isinstance(score_range, str) and score_range == "auto"
        phi = check_interpolation(memory_size, grid, None if is_auto else score_range)
        check_choice("v_init", v_init, MemoryInit)
        check_choice("update", update, MemoryUpdate)
        check_numbers(beta=beta)
        if not 0 < beta <= 1:
            raise ValueError(f"beta is {beta}: expected a number above 0 and at most 1")
        self.memory_size, self.beta, self.grid, self.v_init, self.update = (
            phi.size,
            beta,
            grid,
            v_init,
            update,
        )
        self.score_range: ScoreRange | Literal["auto"] = "auto" if is_auto else phi.score_range
        self.register_buffer("v", torch.empty(self.num_classes, self.memory_size, dtype=torch.float32))
        self.register_buffer("visits", torch.empty(self.num_classes, dtype=torch.int64))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Forget everything; what `to_empty` needs after a construction on the meta device."""
        self.visits.zero_()
        if self.v_init == "uniform":
            self.v.copy_(torch.arange(self.memory_size, device=self.v.device) / self.memory_size)
        else:
            self.v.zero_()

    @torch.no_grad()
    def current(self, classes: Tensor, phi: Tensor) -> Tensor:
        """v of each query's class [Q, V] as it is, in the dtype of phi; phi [Q, V] where the class was never met.

        classes: [Q] int64, -1 for none.
        """
        rows = classes.clamp(min=0)
        is_known = self._is_known(rows)
        return torch.where(is_known[:, None], self.v[rows].to(phi.dtype), phi)

    @torch.no_grad()
    def moved(
        self, classes: Tensor, phi: Tensor, is_query: Tensor, *, in_class_order: bool
    ) -> tuple[Tensor, Tensor]:
        """v of each query's class after the step of this batch [Q, V], and whether the class moves [Q] bool.

        classes: [Q] int64; in_class_order: they ascend. phi: [Q, V]. is_query: [Q] bool. A query whose phi is not
        finite moves nothing. Nothing is changed: see `commit`.
        """
        rows = classes.clamp(min=0)
        is_fresh = is_query & phi.isfinite().all(1)
        order = None if in_class_order else torch.argsort(classes, stable=True)
        target, moves = self._targets(
            *(tensor if order is None else tensor[order] for tensor in (classes, phi, is_fresh))
        )
        if order is not None:
            place = torch.argsort(order)
            target, moves = target[place], moves[place]
        is_known, old = self._is_known(rows)[:, None], self.v[rows].to(phi.dtype)
        step = torch.ones_like(phi[:, :1]).masked_fill(is_known, self.beta)
        stays = torch.where(is_known, old, phi)
        return torch.where(moves[:, None], old + step * (target - old), stays), moves

    @torch.no_grad()
    def commit(self, classes: Tensor, memory: Tensor, moves: Tensor) -> None:
        """Write what `moved` gave. Last: nothing that raises may leave a memory that has moved."""
        if not classes.shape[0]:
            return
        # Queries of one class write the same row, so the order of the writes does not matter; one that does not move
        # writes what the first that does writes, or the first row as it is.
        rows, first = classes.clamp(min=0), moves.to(torch.int8).argmax(0, keepdim=True)
        any_moves = moves[first]
        own = torch.where(any_moves, memory[first].to(self.v.dtype), self.v[rows[first]])
        entries = torch.where(moves[:, None], memory.to(self.v.dtype), own)
        rows = torch.where(moves, rows, rows[first])
        visits = self.visits[rows] + any_moves
        self.v[rows] = entries
        self.visits[rows] = visits

    def interpolation(self, natural_range: ScoreRange) -> Interpolation:
        """phi, with the range that "auto" stands for."""
        score_range = natural_range if isinstance(self.score_range, str) else self.score_range
        return Interpolation(self.memory_size, self.grid, score_range)

    def _is_known(self, rows: Tensor) -> Tensor:
        return (self.visits[rows] > 0) | (self.v_init == "uniform")

    def _targets(self, classes: Tensor, phi: Tensor, is_fresh: Tensor) -> tuple[Tensor, Tensor]:
        """What v of each query's class moves to [Q, V], and whether there is such a target [Q]; classes ascend."""
        run, length = runs(classes)
        if self.update == "last":
            seen = torch.cumsum(is_fresh, 0)
            is_fresh = is_fresh & (seen == seen[torch.cumsum(length, 0)[run] - 1])
        n_fresh = segment_sum(is_fresh.to(phi.dtype), run, length)
        total = segment_sum(torch.where(is_fresh[:, None], phi, 0), run, length)
        return (total / n_fresh.clamp(min=1)[:, None])[run], (n_fresh > 0)[run]

    def _apply(self, fn: Any, recurse: bool = True) -> ScoreMemory:
        # model.half() must not round remembered scores: tau2 is below the spacing of half precision.
        kept = {
            name: buffer for name, buffer in self.named_buffers(recurse=False) if buffer.is_floating_point()
        }
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, before in kept.items():
            after = getattr(self, name)
            if after.dtype != upcast(after).dtype:
                setattr(self, name, before.to(after.device))
        return self

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        # torch would copy the buffers that fit and leave a state that is half another's.
        for name, buffer in self.named_buffers(recurse=False):
            given = state_dict.get(prefix + name)
            if given is not None and given.shape != buffer.shape:
                error_msgs.append(
                    f"{prefix}{name}: the state of a {type(self).__name__} of another size, {list(given.shape)} for "
                    f"{list(buffer.shape)} (num_classes={self.num_classes}, memory_size={self.memory_size}); "
                    "nothing of it was loaded"
                )
        if error_msgs:
            return
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        # With assign=True torch takes the tensors of the checkpoint, whatever their dtype.
        for name, buffer in self.named_buffers(recurse=False):
            if buffer.is_floating_point():
                setattr(self, name, upcast(buffer))


def _quantiles(
    queries: Tensor,
    masks: Sequence[Tensor],
    order: Tensor | None,
    start: Tensor,
    count: Tensor,
    n_positives: Tensor,
    normalize: bool,
    first: int,
    last: int,
    max_class_size: int,
    size: int,
    grid: str,
    score_range: Sequence[float],
    budget: int,
    products: str,
    panels: Panels | None = None,
) -> Tensor:
    """phi of the positive scores of queries first .. last - 1, [q, size]; 0 where there are none."""
    like = queries.new_empty(0, dtype=accumulation_dtype(queries.dtype))
    if panels is None:
        n_keys = queries.shape[1] if masks else queries.shape[0]
        bound = max_class_size if max_class_size >= 0 else None
        panels = Panels.of(start, count, n_keys, like.itemsize * (5 if masks else 1), budget, bound)
    phi = Interpolation(size, grid, (score_range[0], score_range[1]) if score_range else None)  # type: ignore[arg-type]
    result = like.new_zeros(last - first, size)
    for rows, scores in positive_scores(queries, masks, order, panels, normalize, first, last, products):
        if scores.shape[1]:
            lists = scores.sort(1).values
            begin = torch.arange(0, lists.numel(), lists.shape[1], device=lists.device)
            n = n_positives[rows]
            result[rows] = torch.where(
                n[:, None] > 0, interpolate_segments(lists.flatten(), begin, n, phi), 0
            )
    return result


score_quantiles = Operator(
    "score_quantiles",
    "(Tensor queries, Tensor[] masks, Tensor? order, Tensor start, Tensor count, Tensor n_positives, bool normalize, "
    "SymInt first, SymInt last, int max_class_size, int size, str grid, float[] score_range, int budget, "
    "str products) -> Tensor",
    _quantiles,
    lambda queries, masks, order, start, count, n_positives, normalize, first, last, bound, size, *_: (
        queries.new_empty(last - first, size, dtype=accumulation_dtype(queries.dtype))
    ),
)
