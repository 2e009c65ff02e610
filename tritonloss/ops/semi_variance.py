"""`semi_variance`: the spread of positive pairs below, and of negative pairs above, a level each."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from tritonloss.layout import runs, segment_sum
from tritonloss.ops.library import Inputs, Pass, attach
from tritonloss.ops.shares import own_share
from tritonloss.ops.sources import Products, Rows
from tritonloss.ops.streaming import Panel, Panels, budget_bytes
from tritonloss.types import ProductMode, accumulation_dtype


class SemiVariance(NamedTuple):
    """squares: [2], sums of squared deviations. selected: [2], how many pairs deviate. pairs: [2], how many pairs there
    are. Positives first, float32 or float64.
    """

    squares: Tensor
    selected: Tensor
    pairs: Tensor


@dataclass(frozen=True)
class Deviation:
    """How rows are compared; the options of `semi_variance`.

    normalize: divide each row by its Euclidean norm (by 1e-12 if that is larger) within the pass.
    order: [N] int64, the original row of each row that the ranges speak of; None for the order that is given.
    detach_mean: take the means, which are the levels where none are given, as constants.
    products: how rows are multiplied, see `tritonloss.ops.products`; None for TRITONLOSS_PRODUCTS, else "auto".
    """

    max_class_size: int | None = None
    memory_budget: int | None = None
    normalize: bool = False
    order: Tensor | None = None
    detach_mean: bool = False
    products: ProductMode | None = None

    def options(
        self, rows: Tensor, start: Tensor, count: Tensor, own: slice, panels: Panels | None
    ) -> tuple[object, ...]:
        """The options of the pass for the queries `own`; panels: those of these queries, if they are made."""
        options = (
            self.order,
            start,
            count,
            self.normalize,
            self.detach_mean,
            -1 if self.max_class_size is None else self.max_class_size,
            own.start,
            own.stop,
            budget_bytes(rows.device, self.memory_budget),
            self.products or "",
        )
        return options if panels is None else (*options, panels)


def semi_variance(
    rows: Tensor,
    start: Tensor,
    count: Tensor,
    levels: Tensor | None = None,
    *,
    deviation: Deviation | None = None,
) -> SemiVariance:
    """Squared deviations of the pairs (q, j), j != q, for every row q whose count is above 0.

    s = rows @ rows.T. Of the positives j of q, those with s_qj < levels[0] deviate by levels[0] - s_qj; of the
    negatives, those with s_qj > levels[1] by s_qj - levels[1].

    Args:
        rows: [N, D], any floating dtype.
        start, count: [N] int64, the class range of each row, itself included. A count of 0: the row is no query.
        levels: [2], float32 or float64 as everything is computed; None for the means of the scores of the positive and
            of the negative pairs.
        deviation: further options.

    Returns:
        SemiVariance(squares [2], selected [2], pairs [2]); the squares are differentiable once, in rows and levels.

    Time O(N^2 D), plain torch on every device: three passes over each panel beside its matrix product, the walk again
    in the backward pass. Memory O(panel + N D).
    """
    share, own = _own(rows)
    options = (deviation or Deviation()).options(rows, start, count, own, None)
    squares, selected, pairs = semi_variance_pass((rows, levels), *options)
    if share is not None:
        squares, selected = share.total(squares), share.total(selected)
    return SemiVariance(squares, selected, pairs)


def semi_variance_total(
    rows: Tensor,
    start: Tensor,
    count: Tensor,
    factors: Callable[[SemiVariance], Tensor],
    deviation: Deviation,
    *,
    panels: Panels | None = None,
    known: bool,
) -> Tensor:
    """The sum of squares x factors(sums) [2], about the means; differentiable once, the factors constant.

    known: whether the factors depend on the numbers of pairs only; then one walk gives value and gradient, else two.
    """
    share, own = _own(rows)
    if torch.compiler.is_compiling():
        sums = semi_variance(rows, start, count, deviation=deviation)
        return torch.dot(sums.squares, factors(sums).detach())

    def given(results: Sequence[Tensor]) -> list[Tensor]:
        squares, selected, pairs = results
        if share is not None and not known:
            selected = share.total(selected)
        return [factors(SemiVariance(squares, selected, pairs))]

    inputs = (rows, None)
    options = deviation.options(rows, start, count, own, panels)
    results, gradients = semi_variance_pass.once(inputs, _Factors(given, known), *options)
    total = attach(torch.dot(results[0], given(results)[0]), inputs, gradients)
    return total if share is None else cast(Tensor, share.total(total))


class _Factors(NamedTuple):
    """function: from the results of the walk to the gradients of the results. before: it needs the numbers of pairs
    only, which are known before the walk.
    """

    function: Callable[[Sequence[Tensor]], list[Tensor]]
    before: bool


def _own(rows: Tensor) -> tuple[Any, slice]:
    share = own_share(rows.shape[0])
    return share, slice(0, rows.shape[0]) if share is None else share.rows


class _Means:
    """The mean scores of the positive and of the negative pairs, from sums over classes, and their derivative."""

    def __init__(self, rows: Tensor, start: Tensor, count: Tensor) -> None:
        self.rows, self.is_query = rows, (count > 0).to(rows.dtype)[:, None]
        run, lengths = runs(start)
        self.queries = rows * self.is_query
        sums = segment_sum(self.queries, run, lengths)
        self.class_sums, self.all_queries, self.all_rows = sums[run], self.queries.sum(0), rows.sum(0)
        own = sums.square().sum()
        totals = torch.stack(
            [own - self.queries.square().sum(), (self.all_queries * self.all_rows).sum() - own]
        )
        others = torch.where(count > 0, rows.shape[0] - count, 0)
        self.pairs = torch.stack([(count - 1).clamp(min=0).sum(), others.sum()]).to(rows.dtype)
        self.n = self.pairs.clamp(min=1)
        self.levels = totals / self.n

    def gradient(self, grad: Tensor) -> Tensor:
        """Of the rows [N, D], from that of the levels [2]."""
        positive, negative = grad / self.n
        own = 2 * self.class_sums * self.is_query
        by_negatives = self.is_query * self.all_rows + self.all_queries - own
        result: Tensor = positive * (own - 2 * self.queries) + negative * by_negatives
        return result


def _run(
    inputs: Inputs,
    given: Any,
    needs: Sequence[bool],
    order: Tensor | None,
    start: Tensor,
    count: Tensor,
    normalize: bool,
    detach_mean: bool,
    max_class_size: int,
    first: int,
    last: int,
    budget: int,
    products: str,
    panels: Panels | None = None,
) -> tuple[Tensor, ...]:
    """Squares [2], selected [2] and pairs [2] of the queries first .. last - 1; start, count: of all rows."""
    given_rows, levels = inputs
    assert given_rows is not None
    rows, own = Rows(given_rows, order, normalize), slice(first, last)
    n_rows, like = given_rows.shape[0], given_rows.new_empty(0, dtype=accumulation_dtype(given_rows.dtype))
    if panels is None:
        bound = max_class_size if max_class_size >= 0 else None
        panels = Panels.of(start[own], count[own], n_rows, like.itemsize, budget, bound)
    need = any(needs)
    source = Products(rows, None, 1.0, panels.height, own, (need, False), products)
    means = _Means(rows.operand.values(), start, count)
    walk = _Walk(source, panels, means.levels if levels is None else levels, own)
    if isinstance(given, _Factors):
        known = given.function([means.pairs] * 3) if given.before else None
        squares, selected = walk.sums(known)
        if known is None:
            known = given.function([squares, selected, means.pairs])
            walk.sums(known)
        given = known
    else:
        squares, selected = walk.sums(given or None)
    grad_rows, grad_levels = like.new_empty(0), like.new_empty(0)
    if need:
        by_levels = 2 * given[0] * walk.slopes
        if levels is None and not detach_mean:
            source.add_to_rows(means.gradient(by_levels))
        grad_rows = source.gradients()[0]
        grad_levels = by_levels if levels is not None else grad_levels
    return squares, selected, means.pairs, grad_rows, grad_levels


class _Walk:
    """One walk over the panels: the sums and, with the gradient of the squares, that of the rows in the source."""

    def __init__(self, source: Products, panels: Panels, levels: Tensor, own: slice) -> None:
        self.source, self.panels, self.levels, self.own = source, panels, levels, own

    def sums(self, given: Sequence[Tensor] | None) -> tuple[Tensor, Tensor]:
        """Squares [2] and selected [2]; `slopes` [2] are then the derivatives of half the squares by the levels."""
        zero = self.levels.new_zeros(())
        totals = [[zero, zero], [zero.long(), zero.long()], [zero, zero]]
        for panel in self.panels:
            if panel.positives.width:
                for side, deviation in enumerate(self._deviations(panel, given)):
                    totals[1][side] = totals[1][side] + deviation.count_nonzero()
                    totals[2][side] = totals[2][side] + deviation.sum()
                    totals[0][side] = totals[0][side] + deviation.square_().sum()
                if given is not None:
                    # At last: the memory of the scores, which holds deviations, is taken.
                    self.source.add(panel.rows, self.source.gradient(panel.rows))
        squares, selected, total = (torch.stack(part).to(zero.dtype) for part in totals)
        self.slopes = torch.stack([total[0], -total[1]])
        return squares, selected

    def _deviations(self, panel: Panel, given: Sequence[Tensor] | None) -> tuple[Tensor, Tensor]:
        """Of the positives [rows, width] and of the negatives [rows, N], 0 for what does not deviate.

        The gradient of the scores of the panel is then where the source has memory for it.
        """
        rows, positives = panel
        scores = self.source.scores(rows)
        query = torch.arange(self.own.start + rows.start, self.own.start + rows.stop, device=scores.device)
        is_other = positives.columns != query[:, None]
        below = (self.levels[0] - scores.gather(1, positives.columns)).clamp_(min=0) * is_other
        below = positives.only_pairs(below)
        above = scores.sub_(self.levels[1]).clamp_(min=0).scatter_(1, positives.columns, 0)
        if not positives.is_full:
            above *= (positives.count > 0)[:, None]
        if given is not None:
            grad = torch.mul(above, 2 * given[0][1], out=self.source.gradient(rows))
            positives.scatter(below * (-2 * given[0][0]), grad)
        return below, above


def _fake(inputs: Inputs, given: Sequence[Tensor], *_: Any) -> Any:
    assert inputs[0] is not None
    like = inputs[0].new_empty(0, dtype=accumulation_dtype(inputs[0].dtype))
    return like.new_empty(2), like.new_empty(2), like.new_empty(2)


semi_variance_pass = Pass(
    "semi_variance",
    "Tensor? order, Tensor start, Tensor count, bool normalize, bool detach_mean, int max_class_size, SymInt first, "
    "SymInt last, int budget, str products",
    _run,
    _fake,
    n_results=3,
)
