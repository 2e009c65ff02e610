"""Ranks reduced to one value a query, for blocks of queries where those of all pairs would not fit the budget."""

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from tritonloss.backends import selected_backend, use_backend
from tritonloss.ops.library import refuse_second_derivative
from tritonloss.ops.shares import own_share, sharing
from tritonloss.ops.soft_rank import SoftRanks, rows_of_block, soft_rank
from tritonloss.ops.streaming import PairSizes, budget_bytes, pair_sizes

# Ranks, scores and slopes, against the negatives and against the positives, their gradients, and what the reduction
# itself needs: numbers that are held for a pair at a time.
NUMBERS_PER_PAIR = 8

Reduce = Callable[[SoftRanks, Tensor], Tensor]


class _Block(NamedTuple):
    """A slice of the rows as queries, None for all, and the sizes of their row blocks, None where not known."""

    rows: slice | None
    sizes: PairSizes | None


def rank_per_query(
    rows: Tensor,
    start: Tensor,
    count: Tensor,
    reduce: Reduce,
    *,
    max_class_size: int | None = None,
    memory_budget: int | None = None,
    **options: Any,
) -> Tensor:
    """reduce(soft_rank(rows, rows, start, count, ...), count) [N], without the ranks of all pairs at a time.

    If what is held for the pairs of all queries would exceed the budget, blocks of queries are reduced one after the
    other and computed once more in the backward pass: N^2 / C pairs of C equal classes outgrow the embeddings.
    torch.compile, which cannot ask for the number of pairs, always takes all queries at once.

    Args:
        rows: [N, D] float32 or float64.
        start, count: [N] int64, as for `soft_rank`.
        reduce: from the SoftRanks of some queries, and their count, to one value for each of them; differentiable, and
            dependent on no other tensor that needs a gradient.
        max_class_size, memory_budget, options: as for `soft_rank`.

    Returns:
        [N], differentiable once, in the rows.

    Time as for `soft_rank`, its forward pass twice where there are blocks. Memory O(budget + N D).
    """
    budget = budget_bytes(rows.device, memory_budget)
    options |= {"max_class_size": max_class_size, "memory_budget": budget}
    if (share := own_share(rows.shape[0])) is not None:
        with sharing(None):
            return share.gather(_of_queries(rows, start, count, reduce, share.rows, options))
    return _of_queries(rows, start, count, reduce, None, options)


def _of_queries(
    rows: Tensor, start: Tensor, count: Tensor, reduce: Reduce, queries: slice | None, options: dict[str, Any]
) -> Tensor:
    """The values of a slice of the rows as queries; None for all of them."""
    if torch.compiler.is_compiling():
        return _values(rows, start, count, reduce, _Block(queries, None), options)
    bound, budget = options["max_class_size"], options["memory_budget"]
    blocks = list(_blocks(rows, count, queries or slice(0, rows.shape[0]), bound, budget))
    if len(blocks) == 1:
        return _values(rows, start, count, reduce, _Block(queries, blocks[0].sizes), options)
    return cast(Tensor, _Blockwise.apply(rows, start, count, reduce, blocks, options))  # type: ignore[no-untyped-call]


def _blocks(
    rows: Tensor, count: Tensor, queries: slice, max_class_size: int | None, budget: int
) -> Iterator[_Block]:
    """The blocks of queries whose pairs fit the budget, each of at least one row block of `soft_rank`."""
    height = rows_of_block(rows[queries], rows, budget)
    edges = [*range(queries.start, queries.stop, height), queries.stop]
    sizes = pair_sizes(count[queries], height) if max_class_size is None else None
    total = sizes.total if sizes else [(max_class_size or 0) * (b - a) for a, b in pairwise(edges)]
    most = budget // (NUMBERS_PER_PAIR * rows.itemsize)
    begin = pairs = 0
    for end, more in enumerate(total):
        if end > begin and pairs + more > most:
            yield _block(edges, begin, end, sizes)
            begin, pairs = end, 0
        pairs += more
    yield _block(edges, begin, len(total), sizes)


def _block(edges: list[int], begin: int, end: int, sizes: PairSizes | None) -> _Block:
    part = None if sizes is None else PairSizes(sizes.largest[begin:end], sizes.total[begin:end])
    return _Block(slice(edges[begin], edges[end]), part)


def _size(block: _Block) -> int:
    assert block.rows is not None
    return int(block.rows.stop - block.rows.start)


class _Blockwise(torch.autograd.Function):
    """The values block by block, and block by block once more for the gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        start: Tensor,
        count: Tensor,
        reduce: Reduce,
        blocks: list[_Block],
        options: dict[str, Any],
    ) -> Tensor:
        ctx.save_for_backward(rows, start, count)
        ctx.reduce, ctx.blocks, ctx.options, ctx.backend = reduce, blocks, options, selected_backend()
        return torch.cat([_values(rows, start, count, reduce, block, options) for block in blocks])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, start, count = ctx.saved_tensors
        return _BlockwiseBackward.apply(  # type: ignore[no-untyped-call]
            grad, rows, start, count, ctx.reduce, ctx.blocks, ctx.options, ctx.backend
        ), *[None] * 5


class _BlockwiseBackward(torch.autograd.Function):
    """The gradient of the rows, as a function of its own: it has no derivative, and says so."""

    @staticmethod
    def forward(
        ctx: Any,
        grad: Tensor,
        rows: Tensor,
        start: Tensor,
        count: Tensor,
        reduce: Reduce,
        blocks: list[_Block],
        options: dict[str, Any],
        backend: str,
    ) -> Tensor:
        total = torch.zeros_like(rows)
        leaf = rows.detach().requires_grad_()
        with torch.autocast(rows.device.type, enabled=False), use_backend(backend), sharing(None):
            for block, part in zip(
                blocks, torch.split(grad, [_size(block) for block in blocks]), strict=True
            ):
                with torch.enable_grad():
                    values = _values(leaf, start, count, reduce, block, options)
                total += torch.autograd.grad(values, leaf, part)[0]
        return total

    backward = staticmethod(refuse_second_derivative)


def _values(
    rows: Tensor, start: Tensor, count: Tensor, reduce: Reduce, block: _Block, options: dict[str, Any]
) -> Tensor:
    if block.rows is None:
        # The queries are the keys, and not only equal to them: `soft_rank` makes use of that.
        return reduce(soft_rank(rows, rows, start, count, sizes=block.sizes, **options), count)
    own = block.rows
    return reduce(
        soft_rank(rows[own], rows, start[own], count[own], sizes=block.sizes, **options), count[own]
    )
