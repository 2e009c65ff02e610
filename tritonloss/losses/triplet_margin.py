"""The triplet margin loss of all triplets of a batch, or of the hard or semi-hard ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tritonloss import reference
from tritonloss.backends import selected_backend
from tritonloss.backends.surrogates import hinge, selecting, softplus
from tritonloss.distances import Distance, LpDistance, is_cosine, is_dot_product, is_euclidean
from tritonloss.layout import ClassLayout, class_ranges
from tritonloss.losses.base import (
    BaseMetricLossFunction,
    LossOptions,
    check_arguments,
    check_bounds,
    check_choice,
    check_numbers,
    check_products,
    full_precision,
    output_dtype,
)
from tritonloss.losses.pairwise import Arguments, check_reference
from tritonloss.ops import PairGradients, Pairs, Ranking, counted_total, rank_values, register_query_function
from tritonloss.reducers import AvgNonZeroReducer
from tritonloss.types import IndicesTuple, LossDict, PairIndices, ProductMode, TripletIndices, upcast

if TYPE_CHECKING:
    from typing_extensions import Unpack

Triplets = Literal["all", "hard", "semihard"]
TripletReduction = Literal["mean_nonzero", "mean", "sum", "none"]
# What a reducer of this name, ours or pytorch-metric-learning's, makes of the losses of all triplets.
REDUCTIONS = {"AvgNonZeroReducer": "mean_nonzero", "MeanReducer": "mean", "SumReducer": "sum"}


def triplet_margin_loss(
    embeddings: Tensor,
    labels: Tensor,
    *,
    margin: float = 0.05,
    smooth_loss: bool = False,
    triplets: Triplets = "all",
    distance: Distance | None = None,
    ref_emb: Tensor | None = None,
    ref_labels: Tensor | None = None,
    reduction: TripletReduction = "mean_nonzero",
    max_class_size: int | None = None,
    memory_budget: int | None = None,
    products: ProductMode | None = None,
) -> Tensor:
    """The loss of `TripletMarginLoss`, which has the equation, the cost and the source, without its module.

    Args:
        embeddings: [Q, D], any floating dtype.
        labels: [Q], any integer dtype or bool, in any order. Only equality counts.
        ref_emb, ref_labels: [N, D] and [N], the rows to compare with; None for the embeddings themselves.
        reduction: "mean_nonzero" over the triplets whose loss is above 0, as the module; "mean" over all triplets;
            "sum"; or "none" for the sum over the triplets of each query, [Q].
        margin, smooth_loss, triplets, distance, max_class_size, memory_budget, products: as for `TripletMarginLoss`.

    Returns:
        Scalar, or [Q], in the dtype of the embeddings (float32 inside autocast). Computed in float32 or float64.

    Raises:
        TypeError: embeddings that are not floating, labels that are not integers, another distance, an option of
            another type.
        ValueError: an unknown reduction or choice of triplets, a bound below 1, wrong shapes, devices that differ.
    """
    check_arguments(embeddings, labels, None, ref_emb, ref_labels)
    arguments = Arguments(embeddings, labels, None, ref_emb, ref_labels)
    check_reference("triplet_margin_loss", arguments)
    check_choice("reduction", reduction, TripletReduction)
    check_products(products)
    max_class_size, memory_budget = check_bounds(max_class_size=max_class_size, memory_budget=memory_budget)
    _check_options(margin, smooth_loss, triplets)
    scores = scores_of("triplet_margin_loss", LpDistance() if distance is None else distance)
    rule = Rule(scores, margin, smooth_loss, triplets, max_class_size, memory_budget, products)
    with full_precision(embeddings):
        loss = per_query(rule, arguments) if reduction == "none" else reduced(rule, arguments, reduction)
    return loss.to(output_dtype(embeddings))


class TripletMarginLoss(BaseMetricLossFunction):
    """The hinge of every triplet of a query, a positive and a negative. Signature of pytorch-metric-learning.

    d is the distance, by default the Euclidean one of normalised rows. The loss of a query q with a positive i, another
    row of its class, and a negative j, a row of another class, is

        max(d_qi - d_qj + margin, 0),  or with smooth_loss  ln(1 + e^(d_qi - d_qj + margin))

    and the loss is its mean over the triplets of all queries where it is above 0; 0 if there is none. A similarity
    stands with the opposite sign. Which triplets there are:

    - "all": every one;
    - "hard": for each query its farthest positive and its nearest negative;
    - "semihard": for each query and positive the nearest negative that is farther than the positive, or else the
      farthest negative.

    `TripletMarginLoss()(embeddings, labels)` takes embeddings [Q, D] of any floating dtype and labels [Q] of any
    integer dtype, in any order, with classes of any size. With `ref_emb` [N, D] and `ref_labels` [N] positives and
    negatives are rows of that set, of which none is left out. An `indices_tuple` names the triplets in place of the
    labels; one of pairs stands for all triplets of a positive and a negative pair with the same anchor.

    `loss_terms`, and with it reducers other than the mean over losses above 0 (the default), the mean and the sum, get
    one loss per query, the mean over its triplets above 0; with an `indices_tuple` one per triplet.

    Args:
        margin: by how much a negative should be farther than a positive; in units of the distance.
        swap: must be False: the distance of positive and negative has no place in a sum over the keys of a query.
        smooth_loss: the softplus in place of the hinge.
        triplets_per_anchor: must be "all": nothing is gained by leaving some out.
        triplets: "all", "hard" or "semihard".
        max_class_size: a bound of the class sizes. It replaces the call's one host sync on CUDA.
        memory_budget: bytes that distances may take; default TRITONLOSS_MEMORY_BUDGET, else 256 MiB on CPU and a
            sixteenth of the device's memory on CUDA.
        products: how rows are multiplied, "auto", "ieee" or "split"; default TRITONLOSS_PRODUCTS, else "auto": see
            `tritonloss.ops.products`. Results of both have the precision of float32.
        **options: `distance` (`LpDistance` of normalised rows with p = 2 and power 1 or 2, `CosineSimilarity` or
            `DotProductSimilarity`, ours or pytorch-metric-learning's), `reducer`, `embedding_regularizer`,
            `embedding_reg_weight`, as for `BaseMetricLossFunction`.

    Time O(Q N D + sum over the queries of |P| |N|), for large classes O(Q N (D + log N)) with the hinge; one walk over
    panels of the distances gives value and gradient. "hard" O(Q N D), "semihard" O(Q N (D + log N)). Memory
    O(panel + (Q + N) D). In float32 the square of a Euclidean distance errs by a few 1e-7: nearly equal rows may seem
    5e-4 apart.

    Raises:
        TypeError: another distance, an option of another type.
        ValueError: swap, another number of triplets per anchor, an unknown choice of triplets, a margin that is not
            finite; when called, labels that are missing without an `indices_tuple`, an `indices_tuple` with "hard" or
            "semihard", a `ref_emb` of another width, dtype or device, `ref_emb` without `ref_labels`.

    Source: Schroff et al., FaceNet, CVPR 2015 (semi-hard); Hermans et al., In Defense of the Triplet Loss, 2017 (all,
    hard, softplus); the mean over those above 0 as in pytorch-metric-learning.
    """

    def __init__(
        self,
        margin: float = 0.05,
        swap: bool = False,
        smooth_loss: bool = False,
        triplets_per_anchor: str = "all",
        *,
        triplets: Triplets = "all",
        max_class_size: int | None = None,
        memory_budget: int | None = None,
        products: ProductMode | None = None,
        **options: Unpack[LossOptions],
    ) -> None:
        if swap:
            raise ValueError(
                "swap is True: expected False, since a query has no distance between a positive and a negative"
            )
        if triplets_per_anchor != "all":
            raise ValueError(
                f"triplets_per_anchor is {triplets_per_anchor!r}: expected 'all', which costs no more than some of them"
            )
        _check_options(margin, smooth_loss, triplets)
        check_products(products)
        max_class_size, memory_budget = check_bounds(
            max_class_size=max_class_size, memory_budget=memory_budget
        )
        super().__init__(**options)
        scores_of("TripletMarginLoss", self.distance)
        self.margin, self.smooth_loss, self.triplets = margin, smooth_loss, triplets
        self.max_class_size, self.memory_budget, self.products = max_class_size, memory_budget, products

    def default_distance(self) -> Distance:
        return LpDistance()

    def default_reducer(self) -> Callable[..., Tensor]:
        return AvgNonZeroReducer()

    def rule(self) -> Rule:
        """What this loss makes of its triplets."""
        scores = scores_of("TripletMarginLoss", self.distance)
        return Rule(
            scores,
            self.margin,
            self.smooth_loss,
            self.triplets,
            self.max_class_size,
            self.memory_budget,
            self.products,
        )

    def checked(self, arguments: Arguments) -> Arguments:
        check_reference("TripletMarginLoss", arguments)
        if arguments.indices is not None and self.triplets != "all":
            raise ValueError(
                f"indices_tuple names triplets: expected None with triplets={self.triplets!r}, which chooses them"
            )
        return arguments

    def compute_loss(self, *arguments: Any) -> LossDict:
        given, rule = self.checked(Arguments(*arguments)), self.rule()
        if given.indices is not None:
            losses, indices = listed(rule, given)
            return {"loss": {"losses": losses, "indices": indices}}
        losses = per_query(rule, given) / n_above(rule, given).clamp(min=1)
        rows = torch.arange(losses.shape[0], device=losses.device)
        return {"loss": {"losses": losses, "indices": rows}}

    def reduced_objective(
        self,
        embeddings: Tensor,
        labels: Tensor | None = None,
        indices_tuple: IndicesTuple | None = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
    ) -> Tensor:
        kind = type(self.reducer)
        known = kind.__module__.partition(".")[0] in ("tritonloss", "pytorch_metric_learning")
        if not known or kind.__name__ not in REDUCTIONS:
            return super().reduced_objective(embeddings, labels, indices_tuple, ref_emb, ref_labels)
        indices = check_arguments(embeddings, labels, indices_tuple, ref_emb, ref_labels)
        arguments = self.checked(Arguments(embeddings, labels, indices, ref_emb, ref_labels))
        with full_precision(embeddings):
            return reduced(self.rule(), arguments, REDUCTIONS[kind.__name__])

    def extra_repr(self) -> str:
        return f"margin={self.margin}, smooth_loss={self.smooth_loss}, triplets={self.triplets!r}"


class Scores(NamedTuple):
    """How rows are compared: larger is closer.

    kind: "dot" or "euclidean". normalize: rows are divided by their norm first. unit: what the scores are divided by.
    """

    kind: str
    normalize: bool
    unit: float = 1

    def of(self, products: Tensor) -> Tensor:
        """From products of the rows to scores; the derivative at a distance of 0 is 0."""
        if self.kind == "dot":
            return products / self.unit
        square = (2 - 2 * products).clamp(min=0)
        is_zero = square == 0
        return -square.masked_fill(is_zero, 1).sqrt().masked_fill(is_zero, 0) / self.unit

    def rows(self, embeddings: Tensor) -> Tensor:
        return F.normalize(upcast(embeddings), dim=1) if self.normalize else upcast(embeddings)


@dataclass(frozen=True)
class Rule:
    """What a loss makes of its triplets, in this call."""

    scores: Scores
    margin: float
    smooth_loss: bool
    triplets: Triplets
    max_class_size: int | None
    memory_budget: int | None
    products: ProductMode | None

    @property
    def ranking(self) -> Ranking:
        surrogate = softplus(self.margin) if self.smooth_loss else hinge(self.margin)
        return Ranking(
            selecting(self.triplets, surrogate),
            self.scores.unit,
            max_class_size=self.max_class_size,
            memory_budget=self.memory_budget,
            products=self.products,
            normalize=self.scores.normalize,
            distance=self.scores.kind,
        )


def scores_of(loss: str, distance: Any) -> Scores:
    """How to compute the scores of a distance in panels, or an error."""
    if is_cosine(distance) or is_dot_product(distance, normalized=True):
        return Scores("dot", True)
    if is_dot_product(distance):
        return Scores("dot", False)
    if is_euclidean(distance) and distance.power == 1:
        return Scores("euclidean", True)
    if is_euclidean(distance) and distance.power == 2:
        return Scores("dot", True, 0.5)  # 2 - 2 s, less what all have
    raise TypeError(
        f"{loss}: distance must be LpDistance of normalised rows with p = 2 and power 1 or 2, CosineSimilarity or "
        f"DotProductSimilarity, got {type(distance).__name__}"
    )


def _check_options(margin: Any, smooth_loss: Any, triplets: Any) -> None:
    check_numbers(margin=margin)
    if not abs(margin) < float("inf"):
        raise ValueError(f"margin is {margin}: expected a finite number")
    if not isinstance(smooth_loss, bool):
        raise TypeError(f"smooth_loss must be a bool, got {type(smooth_loss).__name__}")
    check_choice("triplets", triplets, Triplets)


# --- triplets by labels ---


class Batch(NamedTuple):
    """Queries and keys as a pass takes them. n_positives: [Q]. layout: of the queries where they are the keys."""

    queries: Tensor
    keys: Tensor | None
    start: Tensor
    counts: Tensor
    order: Tensor | None
    n_positives: Tensor
    n_negatives: Tensor
    layout: ClassLayout | None

    @property
    def arguments(self) -> dict[str, Any]:
        return {"keys": self.keys, "order": self.order}

    def unsort(self, values: Tensor) -> Tensor:
        return values if self.layout is None else self.layout.unsort(values)

    def n_triplets(self, triplets: Triplets) -> Tensor:
        """Of each query, [Q] int64."""
        if triplets == "all":
            return self.n_positives * self.n_negatives
        each = self.n_positives if triplets == "semihard" else (self.n_positives > 0).to(torch.int64)
        return each * (self.n_negatives > 0)


def by_labels(arguments: Arguments) -> Batch:
    embeddings, labels, _, ref_emb, ref_labels = arguments
    assert labels is not None
    if ref_emb is None:
        layout = ClassLayout.from_labels(labels)
        count, n_negatives = layout.query_count, labels.shape[0] - layout.count
        return Batch(
            embeddings, None, layout.start, count, layout.order, layout.count - 1, n_negatives, layout
        )
    assert ref_labels is not None
    sorted_labels, order = torch.sort(ref_labels.to(torch.int64), stable=True)
    start, count = class_ranges(labels.to(torch.int64).contiguous(), sorted_labels)
    keys = ClassLayout(order, order, order).sort(ref_emb)
    return Batch(embeddings, keys, start, count, None, count, ref_labels.shape[0] - count, None)


def reduced(rule: Rule, arguments: Arguments, reduction: str) -> Tensor:
    """The sum or a mean over the losses of all triplets."""
    if selected_backend() == "reference" or arguments.indices is not None:
        if arguments.indices is None:
            losses, is_triplet = dense(rule, arguments)
        else:
            losses = listed(rule, arguments)[0]
            is_triplet = torch.ones_like(losses, dtype=torch.bool)
        total = losses.sum()
        number = (losses.detach() > 0 if reduction == "mean_nonzero" else is_triplet).sum()
    else:
        batch = by_labels(arguments)
        total, number = counted_total(
            batch.queries, batch.start, batch.counts, "triplets", rule.ranking, **batch.arguments
        )
        # Every softplus is above 0.
        if reduction == "mean" or rule.smooth_loss:
            number = batch.n_triplets(rule.triplets).sum()
    return total if reduction == "sum" else total / number.clamp(min=1).to(total.dtype)


def per_query(rule: Rule, arguments: Arguments) -> Tensor:
    """The sum over the triplets of each query, [Q]."""
    if selected_backend() == "reference":
        return dense(rule, arguments)[0].sum((1, 2))
    return _values(by_labels(arguments), "triplets", rule)


def n_above(rule: Rule, arguments: Arguments) -> Tensor:
    """How many triplets of each query have a loss above 0, [Q]; constant."""
    if selected_backend() == "reference":
        return (dense(rule, arguments)[0].detach() > 0).sum((1, 2))
    batch = by_labels(arguments)
    if rule.smooth_loss:
        return batch.unsort(batch.n_triplets(rule.triplets))
    with torch.no_grad():
        return _values(batch, "triplets above 0", rule)


def _values(batch: Batch, function: str, rule: Rule) -> Tensor:
    values = rank_values(batch.queries, batch.start, batch.counts, function, rule.ranking, **batch.arguments)
    return batch.unsort(values)


def dense(rule: Rule, arguments: Arguments) -> tuple[Tensor, Tensor]:
    """The loss of each triplet and whether it is one, [Q, N, N] each, from the equation."""
    embeddings, labels, _, ref_emb, ref_labels = arguments
    queries = rule.scores.rows(embeddings)
    keys = queries if ref_emb is None else rule.scores.rows(ref_emb)
    _, positive, negative = reference.pairs(embeddings, labels, ref_emb, ref_labels, None)
    return reference.triplet_margin(
        rule.scores.of(queries @ keys.T),
        positive.bool(),
        negative.bool(),
        margin=rule.margin,
        smooth_loss=rule.smooth_loss,
        triplets=rule.triplets,
    )


# --- triplets by name ---


def listed(rule: Rule, arguments: Arguments) -> tuple[Tensor, TripletIndices]:
    """The loss of each triplet that the `indices_tuple` names [T], and the triplets. Time and memory O(T D)."""
    embeddings, _, indices, ref_emb, _ = arguments
    assert indices is not None
    triplets = all_triplets(indices)
    queries = rule.scores.rows(embeddings)
    keys = queries if ref_emb is None else rule.scores.rows(ref_emb)
    # The gradient of F.embedding is summed in a fixed order, that of an index is not.
    anchors, positives, negatives = (
        F.embedding(index.to(rows.device, torch.int64), rows)
        for index, rows in zip(triplets, (queries, keys, keys), strict=True)
    )
    nearer, farther = (rule.scores.of((anchors * rows).sum(1)) for rows in (positives, negatives))
    violation = farther - nearer + rule.margin
    return (-F.logsigmoid(-violation) if rule.smooth_loss else torch.relu(violation)), triplets


def all_triplets(indices: PairIndices | TripletIndices) -> TripletIndices:
    """Of pairs: every triplet of a positive and a negative pair with the same anchor."""
    if isinstance(indices, TripletIndices):
        return indices
    same = indices.pos_anchors[:, None] == indices.neg_anchors
    first, second = same.nonzero(as_tuple=True)
    return TripletIndices(indices.pos_anchors[first], indices.positives[first], indices.negatives[second])


# --- the functions of pairs ---


def _others(pairs: Pairs, values: Tensor) -> Tensor:
    """0 for the pair of a row with itself."""
    return values if pairs.is_self is None else values.masked_fill(pairs.is_self, 0)


def _triplets(pairs: Pairs) -> Any:
    def gradients() -> PairGradients:
        return PairGradients(ranks=_others(pairs, torch.ones_like(pairs.ranks)))

    return _others(pairs, pairs.ranks), gradients


def _above_zero(pairs: Pairs) -> Tensor:
    assert pairs.slopes is not None
    return _others(pairs, pairs.slopes)


def _count_above_zero(pairs: Pairs) -> Tensor:
    """The slope of a hinge is 1 above 0."""
    return pairs.sum(_above_zero(pairs).to(torch.int64))


register_query_function("triplets", _triplets, count=_count_above_zero)
register_query_function("triplets above 0", _above_zero, count=_count_above_zero)
