"""The queries of a SOPRC call, whose pairs with their positives are held or computed block by block, and their loss."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from tritonloss import reference
from tritonloss.backends import selected_backend
from tritonloss.layout import ClassLayout, runs, segment_sum
from tritonloss.losses.base import check_choice, fraction, mean_of_queries, unit_rows
from tritonloss.losses.soprc_pieces import (
    Interpolation,
    Options,
    Prior,
    interpolate_segments,
    sort_segments,
)
from tritonloss.ops import (
    QueryBlocks,
    SoftRanks,
    class_labels,
    memory_rank,
    query_blocks,
    rank_per_query,
    score_per_query,
    soft_rank,
    soft_rank_scores,
)
from tritonloss.ops.shares import own_share
from tritonloss.types import upcast

# What is held for a pair in the backward pass of a block, in numbers of float32: ranks, slopes and scores, the fraction
# and its gradients, and its query and place as int64.
NUMBERS_PER_PAIR = 32


@dataclass(frozen=True)
class Queries:
    """The queries of a call, and what the loss and the memory take from their pairs.

    n_positives, n_negatives, classes: [Q] int64. dtype: of the scores. in_class_order: classes ascend. largest_class: a
    bound of the class sizes that the host knows.
    """

    n_positives: Tensor
    n_negatives: Tensor
    classes: Tensor
    dtype: torch.dtype
    in_class_order: bool
    largest_class: int | None

    @property
    def is_query(self) -> Tensor:
        """[Q] bool: whether the query has a positive, a negative and a class."""
        return (self.n_positives > 0) & (self.n_negatives > 0) & (self.classes >= 0)

    def interpolated(self, phi: Interpolation) -> Tensor:
        """phi of the scores of each query's positives [Q, V], constant; without meaning where there are none."""
        raise NotImplementedError

    def pooled(self, phi: Interpolation, chosen: Tensor, run: Tensor) -> Tensor:
        """phi of the scores of the chosen queries [Q] of each run [Q] of a class, as one list; [Q, V], a run a row."""
        raise NotImplementedError

    def totals(self, memory: Tensor, prior: Tensor, options: Options) -> Tensor:
        """The sum of the losses of each query's pairs [Q]. memory: [Q, V]. prior: [Q]. Both constant."""
        raise NotImplementedError


@dataclass(frozen=True)
class Pairs(Queries):
    """Pairs (query, positive) that are held, those of query 0 first.

    scores, query, used: [M], the score h, the index of the query, and whether it is a pair (a query with itself, and
    the padding of a bounded layout, are none). ranks: [M], the sum of l_1 over the negatives of the query; None under
    the reference, which reads `matrix`: the scores, the positives and the negatives [Q, N] themselves. count: [Q], what
    is not used included.
    """

    scores: Tensor
    ranks: Tensor | None
    query: Tensor
    used: Tensor
    count: Tensor
    matrix: tuple[Tensor, Tensor, Tensor] | None

    def interpolated(self, phi: Interpolation) -> Tensor:
        first = torch.cumsum(self.count, 0) - self.count
        return interpolate_segments(sort_segments(self._sortable(), self.query), first, self.n_positives, phi)

    def pooled(self, phi: Interpolation, chosen: Tensor, run: Tensor) -> Tensor:
        scores = torch.where(chosen[self.query], self._sortable(), torch.inf)
        count = torch.zeros_like(self.count).index_add_(0, run, self.count)
        n = torch.zeros_like(count).index_add_(0, run, torch.where(chosen, self.n_positives, 0))
        first = torch.cumsum(count, 0) - count
        return interpolate_segments(sort_segments(scores, run[self.query]), first, n, phi)

    def _sortable(self) -> Tensor:
        """The scores, with what is not used behind all others."""
        return torch.where(self.used, self.scores.detach(), torch.inf)

    def totals(self, memory: Tensor, prior: Tensor, options: Options) -> Tensor:
        if self.ranks is not None:
            losses = self._losses(self.ranks, memory, prior, options)
            return segment_sum(torch.where(self.used, losses, 0), self.count)
        assert self.matrix is not None
        return reference.soprc(
            *self.matrix,
            memory,
            prior,
            tau1=options.tau1,
            tau2=options.tau2,
            tpr_offset=options.tpr_offset,
            tpr_grad=options.tpr_grad,
        ).sum(1)

    def _losses(self, ranks: Tensor, memory: Tensor, prior: Tensor, options: Options) -> Tensor:
        """sigma((1 - pi) / pi * FPR / TPR) of each pair [M], as one fraction that no pi and no TPR can overflow."""
        fpr = ranks / self.n_negatives.clamp(min=1).to(ranks.dtype)[self.query]
        anchors = self.scores if options.tpr_grad else self.scores.detach()
        above = memory_rank(anchors, memory, self.query, temperature=options.tau2)
        tpr = (options.tpr_offset + above) / (options.tpr_offset + memory.shape[1])
        pi = prior[self.query]
        return fraction((1 - pi) * fpr, pi * tpr)


@dataclass(frozen=True)
class BlockPairs(Queries):
    """The pairs of sorted rows with themselves, computed block by block for every use: see `rank_per_query`.

    rows: [N, D]. start, count: [N], as for `soft_rank`. place: [N], the place of each row in its class.
    """

    rows: Tensor
    start: Tensor
    count: Tensor
    place: Tensor
    tau1: float
    blocks: QueryBlocks

    def interpolated(self, phi: Interpolation) -> Tensor:
        def reduce(scores: Tensor, _: Tensor, place: Tensor, n: Tensor) -> Tensor:
            lists = scores.scatter_(1, place[:, None], torch.inf).sort(1).values
            first = torch.arange(len(n), device=n.device) * lists.shape[1]
            return interpolate_segments(lists.flatten(), first, n, phi)

        return score_per_query(
            self.rows.detach(),
            self.start,
            self.count,
            reduce,
            phi.size,
            per_query=(self.place, self.n_positives),
            blocks=self.blocks,
            temperature=self.tau1,
        )

    def pooled(self, phi: Interpolation, chosen: Tensor, run: Tensor) -> Tensor:
        # One list of all pairs of a class: its quantiles need it whole, so a class is the least that is held.
        length = runs(self.start)[1]
        n = torch.zeros_like(length).index_add_(0, run, torch.where(chosen, self.n_positives, 0))
        result = self.rows.new_zeros(len(run), phi.size)
        for own, of_runs in _groups([rows for rows in length.tolist() if rows]):
            rows = self.rows[own].detach()
            is_pair = (run[own, None] == run[own]) & chosen[own, None]
            scores = torch.mm(rows, rows.T).masked_fill_(
                is_pair.fill_diagonal_(False).logical_not_(), torch.inf
            )
            if of_runs.stop - of_runs.start == 1:
                lists = scores.flatten().sort().values
            else:
                lists = sort_segments(scores.flatten(), run[own].repeat_interleave(len(rows)))
            size = length[of_runs] * len(rows)
            result[of_runs] = interpolate_segments(lists, torch.cumsum(size, 0) - size, n[of_runs], phi)
        return result

    def totals(self, memory: Tensor, prior: Tensor, options: Options) -> Tensor:
        def reduce(sums: SoftRanks, count: Tensor, *of_queries: Tensor) -> Tensor:
            place, n_negatives, classes, memory, prior = of_queries
            return _pairs_of_rows(sums, count, place, n_negatives, classes).totals(memory, prior, options)

        return rank_per_query(
            self.rows,
            self.start,
            self.count,
            reduce,
            per_query=(self.place, self.n_negatives, self.classes, memory, prior),
            blocks=self.blocks,
            surrogate="one_side_huber",
            temperature=self.tau1,
        )


# Small classes are sorted together, as the square of the rows of all.
ROWS_OF_GROUP = 256


def _groups(lengths: list[int]) -> Iterator[tuple[slice, slice]]:
    """The rows and the runs of some consecutive runs of the given lengths: of a large one alone, or of small ones."""
    row = run = begin = first = 0
    for length in lengths:
        if run > first and row + length - begin > ROWS_OF_GROUP:
            yield slice(begin, row), slice(first, run)
            begin, first = row, run
        row, run = row + length, run + 1
    if row > begin:
        yield slice(begin, row), slice(first, run)


def query_of_pairs(count: Tensor, n_pairs: int) -> Tensor:
    pair = torch.arange(n_pairs, device=count.device)
    return torch.searchsorted(torch.cumsum(count, 0), pair, right=True).clamp(max=count.shape[0] - 1)


def queries_of_embeddings(
    embeddings: Tensor,
    classes: Tensor,
    tau1: float,
    max_class_size: int | None,
    memory_budget: int | None,
) -> Queries:
    if selected_backend() == "reference":
        return dense_pairs(*reference.similarity(upcast(embeddings), classes), classes)
    layout = ClassLayout.from_labels(classes)
    rows = layout.sort(unit_rows(embeddings))
    return queries_of_sorted_rows(rows, classes[layout.order], layout, tau1, max_class_size, memory_budget)


def queries_of_sorted_rows(
    rows: Tensor,
    classes: Tensor,
    layout: ClassLayout,
    tau1: float,
    max_class_size: int | None,
    memory_budget: int | None,
) -> Queries:
    """Held pairs where all fit the budget, else block by block; so too where processes share the queries.

    The processes may have other budgets, and what they exchange must not depend on them: then it is values of queries
    in either case. torch.compile, which cannot ask for the number of pairs, holds all of them.
    """
    count = layout.query_count
    place = torch.arange(rows.shape[0], device=rows.device) - layout.start
    n_negatives = rows.shape[0] - layout.count
    blocks = query_blocks(
        rows,
        count,
        numbers_per_pair=NUMBERS_PER_PAIR,
        max_class_size=max_class_size,
        memory_budget=memory_budget,
    )
    is_shared = own_share(rows.shape[0]) is not None
    if not torch.compiler.is_compiling() and (is_shared or len(blocks.blocks) > 1):
        return BlockPairs(
            n_positives=(count - 1).clamp(min=0),
            n_negatives=n_negatives,
            classes=classes,
            dtype=rows.dtype,
            in_class_order=True,
            largest_class=blocks.largest_class,
            rows=rows,
            start=layout.start,
            count=count,
            place=place,
            tau1=tau1,
            blocks=blocks,
        )
    sums = soft_rank(
        rows,
        rows,
        layout.start,
        count,
        surrogate="one_side_huber",
        temperature=tau1,
        max_class_size=max_class_size,
        sizes=blocks.sizes,
        memory_budget=memory_budget,
    )
    return _pairs_of_rows(sums, count, place, n_negatives, classes, blocks.largest_class)


def _pairs_of_rows(
    sums: SoftRanks,
    count: Tensor,
    place: Tensor,
    n_negatives: Tensor,
    classes: Tensor,
    largest_class: int | None = None,
) -> Pairs:
    """The pairs of some of the sorted rows; the arguments are theirs."""
    query = query_of_pairs(count, sums.scores.shape[0])
    slot = torch.arange(sums.scores.shape[0], device=query.device) - (torch.cumsum(count, 0) - count)[query]
    return Pairs(
        n_positives=(count - 1).clamp(min=0),
        n_negatives=n_negatives,
        classes=classes,
        dtype=sums.scores.dtype,
        in_class_order=True,
        largest_class=largest_class,
        scores=sums.scores,
        ranks=sums.ranks,
        query=query,
        # soft_rank counts a query among its positives: that pair is dropped here.
        used=(slot < count[query]) & (slot != place[query]),
        count=count,
        matrix=None,
    )


def pairs_of_scores(
    scores: Tensor,
    positives: Tensor,
    negatives: Tensor,
    classes: Tensor,
    tau1: float,
    memory_budget: int | None,
) -> Pairs:
    if selected_backend() == "reference":
        return dense_pairs(scores, positives, negatives, classes)
    ranks, positive_scores, _ = soft_rank_scores(
        scores,
        positives,
        negatives,
        surrogate="one_side_huber",
        temperature=tau1,
        memory_budget=memory_budget,
    )
    query = query_of_pairs(positives.sum(1), positive_scores.shape[0])
    return _pairs_of_matrix(positive_scores, ranks, query, positives, negatives, classes)


def dense_pairs(scores: Tensor, positives: Tensor, negatives: Tensor, classes: Tensor) -> Pairs:
    matrix = (scores, positives, negatives)
    query = positives.nonzero()[:, 0]
    return _pairs_of_matrix(scores[positives], None, query, positives, negatives, classes, matrix)


def _pairs_of_matrix(
    scores: Tensor,
    ranks: Tensor | None,
    query: Tensor,
    positives: Tensor,
    negatives: Tensor,
    classes: Tensor,
    matrix: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Pairs:
    """scores, ranks, query: of the pairs, all of which are used."""
    count = positives.sum(1)
    return Pairs(
        n_positives=count,
        n_negatives=negatives.sum(1),
        classes=classes,
        dtype=scores.dtype,
        in_class_order=False,
        largest_class=None,
        scores=scores,
        ranks=ranks,
        query=query,
        used=torch.ones_like(query, dtype=torch.bool),
        count=count,
        matrix=matrix,
    )


def loss_of_queries(queries: Queries, memory: Tensor, prior: Tensor, options: Options) -> Tensor:
    """The scalar loss. memory: [Q, V]. prior: [Q]. Both constant."""
    is_query = queries.is_query
    totals = torch.where(is_query, queries.totals(memory, prior, options), 0)
    if options.average == "micro":
        return totals.sum() / torch.where(is_query, queries.n_positives, 0).sum().clamp(min=1).to(
            totals.dtype
        )
    return mean_of_queries(totals / queries.n_positives.clamp(min=1).to(totals.dtype), is_query)


def memory_of_queries(memory: Tensor, queries: Queries) -> Tensor:
    """The memory of each query's class [Q, V], constant."""
    if memory.ndim != 2 or memory.shape[1] < 1:
        raise ValueError(f"memory must have shape [C, V] with V of at least 1, got {list(memory.shape)}")
    return memory.detach().to(queries.dtype)[queries.classes.clamp(min=0)]


def prior_of_queries(prior: Prior, queries: Queries) -> Tensor:
    """pi of each query [Q], constant."""
    dtype = queries.dtype
    if isinstance(prior, str):
        check_choice("prior", prior, Literal["batch"])
        total = (queries.n_positives + queries.n_negatives).clamp(min=1)
        return queries.n_positives.to(dtype) / total.to(dtype)
    values = torch.as_tensor(prior, dtype=dtype, device=queries.classes.device).detach()
    return values.expand(queries.classes.shape) if values.ndim == 0 else values[queries.classes.clamp(min=0)]


def classes_of_queries(classes: Any, scores: Tensor, num_classes: int) -> Tensor:
    """The class of each query [Q]; -1 never, as a class out of range raises."""
    n_queries = scores.shape[0]
    if classes is not None:
        if not isinstance(classes, Tensor) or classes.is_floating_point():
            raise TypeError(
                f"classes must be an integer tensor, got {getattr(classes, 'dtype', type(classes))}"
            )
        if classes.shape != (n_queries,) or classes.device != scores.device:
            raise ValueError(
                f"classes must have shape [{n_queries}] on {scores.device}, one a row of scores, "
                f"got {list(classes.shape)} on {classes.device}"
            )
        return class_labels(classes, num_classes)
    if num_classes == 1:
        return torch.zeros(n_queries, dtype=torch.int64, device=scores.device)
    if n_queries != num_classes:
        raise ValueError(f"classes are required: there are {n_queries} queries and {num_classes} classes")
    return torch.arange(n_queries, device=scores.device)
