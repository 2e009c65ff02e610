"""Ranks reduced to one value a query, for blocks of queries where those of all pairs would not fit the budget."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from tritonloss.backends import selected_backend, use_backend
from tritonloss.ops.library import refuse_second_derivative
from tritonloss.ops.shares import own_share, sharing
from tritonloss.ops.soft_rank import rows_of_block, soft_rank
from tritonloss.ops.streaming import BlockPlan, PairSizes, budget_bytes, own_columns, pair_sizes

# Ranks, scores and slopes, against the negatives and against the positives, their gradients, and what the reduction
# itself needs: numbers that are held for a pair at a time.
NUMBERS_PER_PAIR = 8

Reduce = Callable[..., Tensor]


class _Block(NamedTuple):
    """A slice of the rows as queries, None for all, and the sizes of their row blocks, None where not known."""

    rows: slice | None
    sizes: PairSizes | None


@dataclass(frozen=True)
class QueryBlocks:
    """The queries of this process, in blocks whose pairs fit the budget; made by `query_blocks`.

    memory_budget: what the similarities of a block may take. max_class_size: as it was given.
    """

    blocks: list[_Block]
    memory_budget: int
    max_class_size: int | None

    @property
    def sizes(self) -> PairSizes | None:
        """Of the row blocks, if the queries are one block and the sizes are known."""
        return self.blocks[0].sizes if len(self.blocks) == 1 else None

    @property
    def largest_class(self) -> int | None:
        """A bound of the class sizes that the host knows; None where it knows none."""
        if self.max_class_size is not None:
            return self.max_class_size
        sizes = [block.sizes for block in self.blocks]
        known = [size.largest for size in sizes if size is not None]
        return max((largest for part in known for largest in part), default=0) if known else None


def query_blocks(
    rows: Tensor,
    count: Tensor,
    *,
    numbers_per_pair: int = NUMBERS_PER_PAIR,
    max_class_size: int | None = None,
    memory_budget: int | None = None,
) -> QueryBlocks:
    """How many queries `rank_per_query` takes at a time: all, if the pairs of all fit the budget.

    numbers_per_pair: numbers of the dtype of the rows that are held for a pair at a time. The other arguments are
    those of `rank_per_query`. torch.compile, which cannot ask for the number of pairs, takes all queries at once. One
    host sync, none with a bound; a second one where a row block has too many pairs for the budget.
    """
    budget = budget_bytes(rows.device, memory_budget)
    share = own_share(rows.shape[0])
    if torch.compiler.is_compiling():
        return QueryBlocks([_Block(None if share is None else share.rows, None)], budget, max_class_size)
    queries = slice(0, rows.shape[0]) if share is None else share.rows
    most = budget // (numbers_per_pair * rows.itemsize)
    row_blocks = _row_blocks(rows, count, queries, max_class_size, budget)
    if sum(row_blocks.pairs) <= most:
        only = _Block(None if share is None else queries, row_blocks.sizes)
        return QueryBlocks([only], budget, max_class_size)
    # The similarities of a row block whose columns are all positives leave room for what is held for its pairs.
    less = max(1, budget // numbers_per_pair)
    if rows_of_block(rows[queries], rows, less) < rows_of_block(rows[queries], rows, budget):
        budget = less
        row_blocks = _row_blocks(rows, count, queries, max_class_size, budget)
    return QueryBlocks(list(_blocks(row_blocks, most)), budget, max_class_size)


class _RowBlocks(NamedTuple):
    """Where the row blocks of `soft_rank` begin and end, how many pairs each has at most, and their sizes if known."""

    edges: list[int]
    pairs: list[int]
    sizes: PairSizes | None


def _row_blocks(
    rows: Tensor, count: Tensor, queries: slice, max_class_size: int | None, budget: int
) -> _RowBlocks:
    height = rows_of_block(rows[queries], rows, budget)
    edges = [*range(queries.start, queries.stop, height), queries.stop]
    if max_class_size is not None:
        return _RowBlocks(edges, [max_class_size * (b - a) for a, b in pairwise(edges)], None)
    sizes = pair_sizes(count[queries], height)
    return _RowBlocks(edges, sizes.total, sizes)


def _blocks(row_blocks: _RowBlocks, most: int) -> Iterator[_Block]:
    """Blocks of at most `most` pairs, each of at least one row block."""
    edges, total, sizes = row_blocks
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


def rank_per_query(
    rows: Tensor,
    start: Tensor,
    count: Tensor,
    reduce: Reduce,
    *,
    per_query: Sequence[Tensor] = (),
    blocks: QueryBlocks | None = None,
    max_class_size: int | None = None,
    memory_budget: int | None = None,
    **options: Any,
) -> Tensor:
    """reduce(soft_rank(rows, rows, start, count, ...), count, *per_query) [N], without the ranks of all pairs at once.

    If what is held for the pairs of all queries would exceed the budget, blocks of queries are reduced one after the
    other and computed once more in the backward pass: N^2 / C pairs of C equal classes outgrow the embeddings.
    torch.compile, which cannot ask for the number of pairs, always takes all queries at once.

    Args:
        rows: [N, D] float32 or float64.
        start, count: [N] int64, as for `soft_rank`.
        reduce: from the SoftRanks of some queries, their count and their rows of `per_query`, to one value for each of
            them; differentiable, and dependent on no other tensor that needs a gradient.
        per_query: tensors [N, ...], constant.
        blocks: of `query_blocks`, if the caller has them already: then this call has no host sync, and a bound and a
            budget are not read.
        max_class_size, memory_budget, options: as for `soft_rank`.

    Returns:
        [N], differentiable once, in the rows.

    Time as for `soft_rank`, its forward pass twice where there are blocks. Memory O(budget + N D).
    """
    if blocks is None:
        blocks = query_blocks(rows, count, max_class_size=max_class_size, memory_budget=memory_budget)
    options |= {"max_class_size": blocks.max_class_size, "memory_budget": blocks.memory_budget}
    constants = start, count, *per_query
    if (share := own_share(rows.shape[0])) is not None:
        with sharing(None):
            return share.gather(_of_blocks(rows, constants, reduce, blocks.blocks, options))
    return _of_blocks(rows, constants, reduce, blocks.blocks, options)


def _of_blocks(
    rows: Tensor, constants: Sequence[Tensor], reduce: Reduce, blocks: list[_Block], options: dict[str, Any]
) -> Tensor:
    if len(blocks) == 1:
        return _values(rows, constants, reduce, blocks[0], options)
    return cast(Tensor, _Blockwise.apply(rows, reduce, blocks, options, *constants))  # type: ignore[no-untyped-call]


@torch.no_grad()
def score_per_query(
    rows: Tensor,
    start: Tensor,
    count: Tensor,
    reduce: Reduce,
    size: int,
    *,
    blocks: QueryBlocks,
    temperature: float,
    per_query: Sequence[Tensor] = (),
) -> Tensor:
    """reduce(scores of the positives, count, *per_query) [N, size], constant, a row block of `soft_rank` at a time.

    Args:
        rows, start, count, per_query: as for `rank_per_query`.
        reduce: from the scores of some queries [q, width], infinite past their count, their count and their rows of
            `per_query` to [q, size]. Not called for a row block without pairs, whose rows are zero.
        blocks: of `query_blocks`.
        temperature: as for `rank_per_query`, whose scores these are to the last bit: it is part of their rounding.

    Time O(N^2 D), no ranks. Memory O(budget + N size).
    """
    constants = start, count, *per_query
    parts = []
    for block in blocks.blocks:
        queries = rows if block.rows is None else rows[block.rows]
        start, count, *others = _of_block(constants, block)
        result = rows.new_zeros(queries.shape[0], size)
        plan = BlockPlan(
            start,
            count,
            rows_of_block(queries, rows, blocks.memory_budget),
            width=blocks.max_class_size,
            sizes=None if block.sizes is None else (block.sizes.largest, sum(block.sizes.total)),
        )
        for part, positives in plan:
            scores = torch.mm(queries[part] / temperature, rows.T)
            columns, used = own_columns(positives, rows.shape[0])
            own = scores.gather(1, columns).mul_(temperature).masked_fill_(~used, torch.inf)
            result[part] = reduce(own, positives.count, *(tensor[part] for tensor in others))
        parts.append(result)
    whole = parts[0] if len(parts) == 1 else torch.cat(parts)
    share = own_share(rows.shape[0])
    return whole if share is None else share.gather(whole)


def _of_block(tensors: Sequence[Tensor], block: _Block) -> Sequence[Tensor]:
    return tensors if block.rows is None else [tensor[block.rows] for tensor in tensors]


def _size(block: _Block) -> int:
    assert block.rows is not None
    return int(block.rows.stop - block.rows.start)


class _Blockwise(torch.autograd.Function):
    """The values block by block, and block by block once more for the gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        reduce: Reduce,
        blocks: list[_Block],
        options: dict[str, Any],
        *constants: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(rows, *constants)
        ctx.options = reduce, blocks, options, selected_backend()
        return torch.cat([_values(rows, constants, reduce, block, options) for block in blocks])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, *constants = ctx.saved_tensors
        grad_rows = _BlockwiseBackward.apply(grad, rows, *ctx.options, *constants)  # type: ignore[no-untyped-call]
        return grad_rows, *[None] * (3 + len(constants))


class _BlockwiseBackward(torch.autograd.Function):
    """The gradient of the rows, as a function of its own: it has no derivative, and says so."""

    @staticmethod
    def forward(
        ctx: Any,
        grad: Tensor,
        rows: Tensor,
        reduce: Reduce,
        blocks: list[_Block],
        options: dict[str, Any],
        backend: str,
        *constants: Tensor,
    ) -> Tensor:
        total = torch.zeros_like(rows)
        leaf = rows.detach().requires_grad_()
        with torch.autocast(rows.device.type, enabled=False), use_backend(backend), sharing(None):
            for block, part in zip(
                blocks, torch.split(grad, [_size(block) for block in blocks]), strict=True
            ):
                with torch.enable_grad():
                    # A scalar: given gradients make torch import sympy, 30 MiB and half a second.
                    value = torch.dot(_values(leaf, constants, reduce, block, options), part)
                total += torch.autograd.grad(value, leaf)[0]
        return total

    backward = staticmethod(refuse_second_derivative)


def _values(
    rows: Tensor, constants: Sequence[Tensor], reduce: Reduce, block: _Block, options: dict[str, Any]
) -> Tensor:
    # Where all rows are queries they are the keys, and not only equal to them: `soft_rank` makes use of that.
    queries = rows if block.rows is None else rows[block.rows]
    start, count, *others = _of_block(constants, block)
    return reduce(soft_rank(queries, rows, start, count, sizes=block.sizes, **options), count, *others)
