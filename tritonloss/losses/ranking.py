"""What the losses of soft ranks share: one value per query, from the ranks of its positives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from tritonloss.backends import selected_backend
from tritonloss.indices import weights_of_rows
from tritonloss.layout import ClassLayout
from tritonloss.losses.base import (
    LossOptions,
    PerQueryLoss,
    check_bounds,
    check_choice,
    check_embeddings,
    check_labels,
    check_positive,
    check_products,
    full_precision,
    mean_of_queries,
    output_dtype,
    require_cosine,
)
from tritonloss.ops import Pairs, QueryFunction, Ranking, rank_total, rank_values
from tritonloss.types import PairIndices, ProductMode, Reduction, TripletIndices, accumulation_dtype, upcast

if TYPE_CHECKING:
    from typing_extensions import Unpack


class RankingOptions(LossOptions, total=False):
    """The options of `RankingLoss`."""

    max_class_size: int | None
    memory_budget: int | None
    products: ProductMode | None


class RankedLoss(NamedTuple):
    """What a loss makes of the ranks, in this call.

    function, numbers: from the `Pairs` of some queries to one value for each, see `tritonloss.ops.rank_values`.
    dense: from embeddings [N, D] and labels [N] to the value of each row [N] and whether it is a query [N] bool.
    ranking: how rows are compared. per_pair: whether the function gives a value for each pair instead, [q, P], of which
    the loss of a query is the mean.
    """

    function: str | QueryFunction
    numbers: Sequence[float]
    dense: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    ranking: Ranking
    per_pair: bool = False


class RankingLoss(PerQueryLoss):
    """Base of the losses that are a function of soft ranks: the mean over the queries of `of_pairs`.

    s is the cosine similarity and g the surrogate. For a query q and a positive i, a row of q's class (q included),
    R = sum over the rows j of other classes of g((s_qj - s_qi) / temperature). A row whose class has another row is a
    query. With an `indices_tuple` the loss of a query is multiplied by the weight that
    `tritonloss.indices.miner_weights` gives to the row; the tuple does not choose positives or negatives.

    A subclass defines `of_pairs` and `dense`, and may set `surrogate`, `positive_ranks` and `term_name`.

    Args:
        temperature: of the surrogate, > 0, in units of the cosine.
        max_class_size: a bound of the class sizes. It replaces the call's one host sync on CUDA, so that the call can
            be captured in a CUDA graph; the device asserts it.
        memory_budget: bytes that similarities may take; default TRITONLOSS_MEMORY_BUDGET, else 256 MiB on CPU and a
            sixteenth of the device's memory on CUDA.
        products: how rows are multiplied, "auto", "ieee" or "split"; default TRITONLOSS_PRODUCTS, else "auto": see
            `tritonloss.ops.products`. Results of both have the precision of float32.
        **options: `distance` (only plain cosine similarity, ours or pytorch-metric-learning's), `reducer`,
            `embedding_regularizer`, `embedding_reg_weight`, as for `BaseMetricLossFunction`. A reducer other than
            `MeanReducer`, and `loss_terms`, compute the ranks once more in the backward pass, cost one more host sync
            on CUDA and break the graph of torch.compile.

    Time O(N^2 D + sum over classes of n^2 (N - n)), n the size of a class: one walk over panels of the similarity
    matrix gives value and gradient. For classes of about a hundred rows and more O(N^2 D + N G^2), G about
    8 / temperature, with a relative error of a few 1e-6 in float32: see `tritonloss.ops.soft_rank`. Memory
    O(panel + N D).

    Raises:
        TypeError: another distance, a temperature that is no number, a bound that is no int.
        ValueError: a temperature that is not positive, a bound below 1; when called, labels that are missing, or a
            `ref_emb` or `ref_labels` that is not None.
    """

    surrogate = "sigmoid"
    positive_ranks = False

    def __init__(
        self,
        temperature: float = 0.01,
        *,
        max_class_size: int | None = None,
        memory_budget: int | None = None,
        products: ProductMode | None = None,
        **options: Unpack[LossOptions],
    ) -> None:
        check_positive(temperature=temperature)
        check_products(products)
        bounds = check_bounds(max_class_size=max_class_size, memory_budget=memory_budget)
        super().__init__(**options)
        require_cosine(type(self).__name__, self.distance)
        self.temperature = temperature
        self.max_class_size, self.memory_budget = bounds
        self.products = products

    def of_pairs(self, pairs: Pairs) -> Any:
        """The loss of each query [q], of the `tritonloss.ops.Pairs` of q queries; 0 for a query without a pair.

        In plain, differentiable torch; or, without that cost, with a function that returns the `PairGradients`.
        """
        raise NotImplementedError(f"{type(self).__name__} must define of_pairs")

    def dense(self, embeddings: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The loss of each row [N] and whether it is a query [N] bool, from the equation, for the reference backend."""
        raise NotImplementedError(
            f"{type(self).__name__} must define dense to run under use_backend('reference')"
        )

    def ranked(self) -> RankedLoss:
        """What this loss makes of the ranks."""
        ranking = cosine_ranking(
            self.temperature,
            self.max_class_size,
            self.memory_budget,
            self.surrogate,
            self.positive_ranks,
            self.products,
        )
        return RankedLoss(self.of_pairs, (), self.dense, ranking)

    def per_query(
        self, embeddings: Tensor, labels: Tensor, indices_tuple: PairIndices | TripletIndices | None
    ) -> tuple[Tensor, Tensor]:
        return ranked_values(embeddings, labels, self.ranked(), indices_tuple)

    def mean(
        self, embeddings: Tensor, labels: Tensor, indices_tuple: PairIndices | TripletIndices | None
    ) -> Tensor:
        return ranked_mean(embeddings, labels, self.ranked(), indices_tuple)

    def extra_repr(self) -> str:
        return f"temperature={self.temperature}"


def cosine_ranking(
    temperature: float,
    max_class_size: int | None,
    memory_budget: int | None,
    surrogate: str = "sigmoid",
    positive_ranks: bool = False,
    products: ProductMode | None = None,
) -> Ranking:
    """The options of the primitive for cosines."""
    return Ranking(
        surrogate,
        temperature,
        positive_ranks,
        max_class_size,
        1,
        memory_budget,
        normalize=True,
        products=products,
    )


def loss_of_ranks(
    embeddings: Tensor,
    labels: Tensor,
    ranked: RankedLoss,
    reduction: Reduction,
) -> Tensor:
    """The functional form of a ranking loss: its mean, or the loss of each query [N]."""
    check_embeddings(embeddings, "embeddings")
    check_labels(labels, embeddings, "labels")
    check_choice("reduction", reduction, Reduction)
    check_products(ranked.ranking.products)
    size, budget = ranked.ranking.max_class_size, ranked.ranking.memory_budget
    size, budget = check_bounds(max_class_size=size, memory_budget=budget)
    ranking = replace(ranked.ranking, max_class_size=size, memory_budget=budget)
    ranked = ranked._replace(ranking=ranking)
    with full_precision(embeddings):
        if reduction == "none":
            loss, _ = ranked_values(embeddings, labels, ranked)
        else:
            loss = ranked_mean(embeddings, labels, ranked)
    return loss.to(output_dtype(embeddings))


def ranked_values(
    embeddings: Tensor,
    labels: Tensor,
    ranked: RankedLoss,
    indices: PairIndices | TripletIndices | None = None,
) -> tuple[Tensor, Tensor]:
    """The loss of each row as a query [N], and whether it is one [N] bool."""
    if selected_backend() == "reference":
        values, is_query = ranked.dense(upcast(embeddings), labels)
    else:
        layout = ClassLayout.from_labels(labels)
        count = layout.query_count
        values = rank_values(
            embeddings,
            layout.start,
            count,
            ranked.function,
            ranked.ranking,
            order=layout.order,
            numbers=ranked.numbers,
        )
        if ranked.per_pair:
            values = values / count.clamp(min=1).to(values.dtype)
        values = layout.unsort(values)
        is_query = layout.unsort(count > 0)
    if indices is not None:
        values = values * weights_of_rows(indices, embeddings)
    return values, is_query


def ranked_mean(
    embeddings: Tensor,
    labels: Tensor,
    ranked: RankedLoss,
    indices: PairIndices | TripletIndices | None = None,
) -> Tensor:
    """The mean over the queries, in one pass."""
    if selected_backend() == "reference":
        return mean_of_queries(*ranked_values(embeddings, labels, ranked, indices))
    layout = ClassLayout.from_labels(labels)
    dtype = accumulation_dtype(embeddings.dtype)
    if ranked.per_pair:
        # The pair of a lone row with itself has no weight.
        count, weights = layout.count, layout.weights(dtype)
    else:
        count, weights = layout.query_count, layout.weight(dtype)
    if indices is not None:
        weights = weights * weights_of_rows(indices, embeddings)[layout.order]
    return rank_total(
        embeddings,
        layout.start,
        count,
        weights,
        ranked.function,
        ranked.ranking,
        order=layout.order,
        numbers=ranked.numbers,
    )
