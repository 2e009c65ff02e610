"""`soft_rank` and what is made of it: one value per query, and their weighted sum in one pass."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritonloss.backends import selected_backend
from tritonloss.ops.library import attach
from tritonloss.ops.rank import QueryFunction, check_surrogate, rank_pass
from tritonloss.ops.shares import Share, own_share
from tritonloss.ops.streaming import Panels, budget_bytes
from tritonloss.types import ProductMode, accumulation_dtype


class SoftRanks(NamedTuple):
    """ranks, scores, positive_ranks: [M], one entry for each (query, positive), the pairs of query 0 first.

    positive_ranks: None where it was not asked for.
    """

    ranks: Tensor
    scores: Tensor
    positive_ranks: Tensor | None = None


@dataclass(frozen=True)
class Ranking:
    """How queries are compared with keys; the options of `soft_rank`.

    normalize: divide each row by its Euclidean norm (by 1e-12 if that is larger) within the pass. distance: "dot" for
    scores that are products of rows; "euclidean" for minus the distance of rows, which must be normalised.
    products: how rows are multiplied, see `tritonloss.ops.products`; None for TRITONLOSS_PRODUCTS, else "auto".
    """

    surrogate: str = "sigmoid"
    temperature: float = 0.01
    positive_ranks: bool = False
    max_class_size: int | None = None
    score_limit: float = math.inf
    memory_budget: int | None = None
    normalize: bool = False
    distance: str = "dot"
    products: ProductMode | None = None

    def options(
        self,
        queries: Tensor,
        own: slice,
        start: Tensor,
        count: Tensor,
        *,
        order: Tensor | None = None,
        function: str | QueryFunction = "",
        masks: Sequence[Tensor] = (),
        numbers: Sequence[float] = (),
        constants: Sequence[Tensor] = (),
        panels: Panels | None = None,
    ) -> tuple[object, ...]:
        """The options of `rank_pass` for the queries `own`; start, count and constants are those of all queries."""
        # As numbers: torch.compile takes a slice in a comprehension for a constant.
        first, last = own.start, own.stop
        options = (
            list(masks),
            order,
            start[own],
            count[own],
            [tensor.narrow(0, first, last - first) for tensor in constants] if constants else [],
            function,
            list(numbers),
            self.surrogate,
            float(self.temperature),
            self.positive_ranks,
            self.normalize,
            self.distance,
            -1 if self.max_class_size is None else self.max_class_size,
            float(self.score_limit),
            first,
            last,
            budget_bytes(queries.device, self.memory_budget),
            selected_backend(),
            self.products or "",
        )
        return options if panels is None else (*options, panels)


def soft_rank(
    queries: Tensor,
    keys: Tensor,
    start: Tensor,
    count: Tensor,
    *,
    surrogate: str = "sigmoid",
    temperature: float = 0.01,
    positive_ranks: bool = False,
    max_class_size: int | None = None,
    score_limit: float = math.inf,
    memory_budget: int | None = None,
    products: ProductMode | None = None,
) -> SoftRanks:
    """R[q, i] = sum over the negatives j of q of g((s_qj - s_qi) / temperature), for every positive i of q.

    s = queries @ keys.T. The positives of query q are the keys start[q] .. start[q] + count[q] - 1; every other key is
    a negative.

    Args:
        queries: [Q, D], any floating dtype, contiguous or not.
        keys: [N, D], same dtype and device; may be `queries` itself.
        start, count: [Q] int64. A count of 0 gives the query no pair.
        surrogate: "sigmoid", g(x) = 1 / (1 + e^-x); or "one_side_huber", g(x) = 1 + 2x above 0, (1 + x)^2 from -1 to 0,
            0 below (SOPRC, arXiv 2209.13262, Eq. 7).
        temperature: width of the surrogate, > 0.
        positive_ranks: take the same sum over the other positives j != i of q as well, in the same pass.
        max_class_size: a bound of count. It replaces the one host sync of the call; ranks and scores then have
            Q * max_class_size entries, zero past the pairs, and the device asserts the bound.
        score_limit: a bound of |s|, 1 for unit rows. The sigmoid of large classes needs it on CUDA, where the scores
            are not looked at from the host: without it they take the direct loop there. Scores beyond it give NaN.
        memory_budget: what the similarities may take; default TRITONLOSS_MEMORY_BUDGET, else 256 MiB on CPU, a
            sixteenth of the device on CUDA.
        products: how rows are multiplied, "auto", "ieee" or "split", see `tritonloss.ops.products`; default
            TRITONLOSS_PRODUCTS, else "auto".

    Returns:
        SoftRanks(ranks [M], scores [M], positive_ranks [M] or None), M = sum(count); differentiable once, in queries
        and keys.

    Time O(sum_q count[q] (N - count[q]) + Q N D), with positive_ranks O(sum_q count[q] N + Q N D), for small classes.
    For large ones, where it is less by the cost model of `tritonloss.backends.large_classes`, O(Q N (D + log N)), and
    for the sigmoid, whose range of scores is divided into G cells of temperature / 4, G of the order of
    8 / temperature, O(Q (N D + G^2)), with a relative error of 3e-6 in float32 (cells of temperature / 8 and 2e-10 in
    float64). Memory O(budget + (Q + N) D + M).

    Raises:
        ValueError: unknown surrogate, a budget below 1, a temperature that is not positive.
        RuntimeError: the chosen backend cannot serve the device; a second derivative is asked for.
    """
    check_surrogate(surrogate, temperature, positive_ranks)
    ranking = Ranking(
        surrogate,
        temperature,
        positive_ranks,
        max_class_size,
        score_limit,
        memory_budget,
        products=products,
    )
    return _flat_ranks(queries, None if queries is keys else keys, start, count, ranking)


def soft_rank_scores(
    scores: Tensor,
    positives: Tensor,
    negatives: Tensor,
    *,
    surrogate: str = "sigmoid",
    temperature: float = 0.01,
    positive_ranks: bool = False,
    max_class_size: int | None = None,
    memory_budget: int | None = None,
) -> SoftRanks:
    """R[q, i] = sum over the negatives j of row q of g((s_qj - s_qi) / temperature), for every positive i of row q.

    Args:
        scores: [Q, N], any floating dtype, contiguous or not: s.
        positives, negatives: [Q, N] bool. A column that is neither is left out, one that is both counts as positive.
        surrogate, temperature, positive_ranks, memory_budget: as for `soft_rank`.
        max_class_size: a bound of the positives of a row, in place of the one host sync of the call.

    Returns:
        SoftRanks(ranks [M], scores [M], positive_ranks [M] or None), M the number of positives, those of row 0 first
        and ascending by column; differentiable once, in the scores.

    Time O(Q N + sum over q of positives x negatives), the rank's part of it again in the backward pass. Memory
    O(panel + M) beside the inputs and their gradient: a few numbers for each column of a few rows.

    Raises:
        ValueError: unknown surrogate, a budget below 1, a temperature that is not positive.
        RuntimeError: the chosen backend cannot serve the device; a second derivative is asked for.
    """
    check_surrogate(surrogate, temperature, positive_ranks)
    ranking = Ranking(surrogate, temperature, positive_ranks, max_class_size, memory_budget=memory_budget)
    count = positives.sum(1)
    return _flat_ranks(scores, None, torch.zeros_like(count), count, ranking, (positives, negatives))


def _flat_ranks(
    queries: Tensor,
    keys: Tensor | None,
    start: Tensor,
    count: Tensor,
    ranking: Ranking,
    masks: Sequence[Tensor] = (),
) -> SoftRanks:
    share, own = _own(queries)
    sums = rank_pass((queries, keys), *ranking.options(queries, own, start, count, masks=masks))
    ranks, scores, *among = sums if ranking.positive_ranks else sums[:2]
    if share is not None:
        ranks, scores, *among = (share.gather_segments(part, count) for part in (ranks, scores, *among))
    return SoftRanks(ranks, scores, *among)


def rank_values(
    queries: Tensor,
    start: Tensor,
    count: Tensor,
    function: str | QueryFunction,
    ranking: Ranking,
    *,
    keys: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """function(pairs, *numbers) of every query, [Q], without the ranks of all pairs at once.

    Args:
        queries: [Q, D], any floating dtype; with `masks`, scores [Q, N].
        start, count: [Q] int64, as for `soft_rank`.
        function: from the `Pairs` of some queries to one value for each of them; by its name in the registry, or any
            callable, at which torch.compile leaves its graph.
        ranking: the options.
        keys: [N, D]; None where queries meet themselves.
        order: [N] int64, the original row of each row that the ranges speak of; None for the order that is given.
        masks: positives and negatives [Q, N] bool of a score matrix, in place of keys.
        numbers: further arguments of the function.
        constants: tensors [Q, ...], of which the function gets the rows of its queries.
        panels: the panels of this process, if the caller has made them: then this call reads nothing from the device.

    Returns:
        [Q] float32 or float64, in the order of the ranges; differentiable once, in queries and keys.

    Time as for `soft_rank`: the walk again in the backward pass. Memory O(panel + (Q + N) D).
    """
    if not isinstance(function, str) and torch.compiler.is_compiling():
        return _values_outside_graph(queries, start, count, function, ranking, keys=keys, **options)
    share, own = _own(queries)
    values = rank_pass(
        (queries, keys), *ranking.options(queries, own, start, count, function=function, **options)
    )[0]
    return values if share is None else share.gather(values)


def rank_total(
    queries: Tensor,
    start: Tensor,
    count: Tensor,
    weights: Tensor,
    function: str | QueryFunction,
    ranking: Ranking,
    *,
    keys: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """The sum of weights x `rank_values`, a scalar, whose gradient is found in the same walk.

    weights: [Q] float32 or float64, or [] for one that all queries have; constant. The other arguments are those of
    `rank_values`.

    Differentiable once. Time as for `soft_rank`, one walk for value and gradient: 2 Q N D operations of products
    without a gradient, 6 Q N D with it. Memory O(panel + (Q + N) D).
    """
    if not isinstance(function, str) and torch.compiler.is_compiling():
        return _total_outside_graph(queries, start, count, weights, function, ranking, keys=keys, **options)
    total, _ = _total_and_number(queries, start, count, weights, function, ranking, keys, options)
    share = _own(queries)[0]
    return total if share is None else share.total(total)


def counted_total(
    queries: Tensor,
    start: Tensor,
    count: Tensor,
    function: str,
    ranking: Ranking,
    *,
    keys: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """The sum of `rank_values`, differentiable as `rank_total`, and of what the function counts, int64, both [].

    function: registered with a count. The other arguments and the cost are those of `rank_total`.
    """
    weight = queries.new_ones((), dtype=accumulation_dtype(queries.dtype))
    total, number = _total_and_number(queries, start, count, weight, function, ranking, keys, options)
    share = _own(queries)[0]
    if share is None:
        return total, number[0]
    return share.total(total), share.total(number[0])


def _total_and_number(
    queries: Tensor,
    start: Tensor,
    count: Tensor,
    weights: Tensor,
    function: str | QueryFunction,
    ranking: Ranking,
    keys: Tensor | None,
    options: Any,
) -> tuple[Tensor, Tensor]:
    """Of the queries of this process."""
    own = _own(queries)[1]
    weights = weights[own] if weights.ndim else weights
    inputs = queries, keys
    (values, number, _), gradients = rank_pass.once(
        inputs, (weights,), *ranking.options(queries, own, start, count, function=function, **options)
    )
    total = torch.dot(values, weights) if weights.ndim else values.sum() * weights
    return attach(total, inputs, gradients), number


def _values_outside_graph(*args: Any, **kwargs: Any) -> Tensor:
    return rank_values(*args, **kwargs)


def _total_outside_graph(*args: Any, **kwargs: Any) -> Tensor:
    return rank_total(*args, **kwargs)


# An operator names its function: torch.compile leaves its graph for one that has no name.
_values_outside_graph._torchdynamo_disable = True  # type: ignore[attr-defined]
_total_outside_graph._torchdynamo_disable = True  # type: ignore[attr-defined]


def _own(queries: Tensor) -> tuple[Share | None, slice]:
    """What this process computes, and its queries."""
    share = own_share(queries.shape[0])
    return share, slice(0, queries.shape[0]) if share is None else share.rows
