"""FastAP: average precision with the ranks of a histogram of distances."""

from collections.abc import Callable

from torch import Tensor

from tritonloss import reference
from tritonloss.backends import selected_backend
from tritonloss.distances import Distance, LpDistance, is_euclidean
from tritonloss.indices import miner_weights
from tritonloss.layout import ClassLayout
from tritonloss.losses.base import (
    PerQueryLoss,
    check_bounds,
    check_choice,
    check_embeddings,
    check_labels,
    full_precision,
    mean_of_queries,
    output_dtype,
    unit_rows,
)
from tritonloss.losses.histogram import check_num_bins
from tritonloss.ops import SoftHistograms, distance_histogram, running_sum, soft_histogram
from tritonloss.types import PairIndices, Reduction, TripletIndices, upcast


def fastap_loss(
    embeddings: Tensor,
    labels: Tensor,
    *,
    num_bins: int = 10,
    reduction: Reduction = "mean",
    memory_budget: int | None = None,
) -> Tensor:
    """1 - average precision, the ranks read from histograms of distances (`FastAPLoss` without its module).

    d is the squared Euclidean distance of normalised rows, in [0, 4], and the nodes z are 0, D, 2D, ..., 4 with
    D = 4 / num_bins. h(z) counts the other rows j with the weight max(0, 1 - |d_qj - z| / D), h+(z) those of q's class;
    H and H+ are their running sums. The loss of a query q whose class has n other rows is

        1 - 1 / n sum over z of h+(z) H+(z) / H(z)

    where a term with H(z) = 0 is 0, and the loss is the mean over the queries with n > 0; 0 if there is none.

    Args:
        embeddings: [N, D], any floating dtype; normalised here.
        labels: [N], any integer dtype or bool. Only equality counts.
        num_bins: at least 1; 10 in the paper. There are num_bins + 1 nodes.
        reduction: "mean", or "none" for the loss of each query, [N], 0 for a query without another positive.
        memory_budget: bytes that similarities may take; default TRITONLOSS_MEMORY_BUDGET, else 256 MiB on CPU and a
            sixteenth of the device's memory on CUDA.

    Returns:
        Scalar, or [N], in the dtype of the embeddings (float32 inside autocast). Computed in float32 or float64. At a
        node the gradient is that of the bin behind it, at d = 4 that of the last bin.

    Time O(N^2 D). Memory O(memory_budget + N D + N num_bins). No host sync.

    Raises:
        TypeError: embeddings that are not floating, labels that are not integers, num_bins or a budget that is no int.
        ValueError: num_bins or a budget below 1, an unknown reduction, wrong shapes, devices that differ.

    Source: Cakir et al., Deep Metric Learning to Rank, CVPR 2019, Eqs. 5 to 9; the nodes and which rows are queries as
    in pytorch-metric-learning.
    """
    check_embeddings(embeddings, "embeddings")
    check_labels(labels, embeddings, "labels")
    check_num_bins(num_bins)
    check_choice("reduction", reduction, Reduction)
    check_bounds(memory_budget=memory_budget)
    with full_precision(embeddings):
        per_query, is_query = per_query_fastap(
            embeddings, labels, num_bins, LpDistance(power=2), memory_budget
        )
        loss = per_query if reduction == "none" else mean_of_queries(per_query, is_query)
    return loss.to(output_dtype(embeddings))


class FastAPLoss(PerQueryLoss):
    """The loss of `fastap_loss` as a module, with pytorch-metric-learning 3's signature.

    `FastAPLoss()(embeddings, labels)` takes embeddings [N, D] of any floating dtype and labels [N] of any integer
    dtype. Its one term, "loss", has one loss for each row that has another of its class; the default reducer is their
    mean. With an `indices_tuple` the loss of a query is multiplied by the weight that
    `tritonloss.indices.miner_weights` gives to the row; the tuple does not choose positives or negatives.

    Args:
        num_bins, memory_budget: as for `fastap_loss`, which has the equation, the cost and the source.
        distance: a Euclidean distance of normalised rows, ours or pytorch-metric-learning's; default
            `LpDistance(power=2)`. With another power the nodes reach from 0 to 2^power, and the distance is computed
            in blocks, twice; torch.compile then leaves its graph.
        reducer, embedding_regularizer, embedding_reg_weight: as for `BaseMetricLossFunction`. A reducer other than
            `MeanReducer`, and `loss_terms`, cost a host sync on CUDA and break the graph of torch.compile.

    Raises:
        TypeError: another distance, num_bins or a budget that is no int.
        ValueError: num_bins or a budget below 1; when called, labels that are missing, or a `ref_emb` or `ref_labels`
            that is not None.
    """

    def __init__(
        self,
        num_bins: int = 10,
        *,
        distance: Distance | None = None,
        reducer: Callable[..., Tensor] | None = None,
        embedding_regularizer: Callable[[Tensor], Tensor] | None = None,
        embedding_reg_weight: float = 1.0,
        memory_budget: int | None = None,
    ) -> None:
        check_num_bins(num_bins)
        check_bounds(memory_budget=memory_budget)
        super().__init__(
            distance=distance,
            reducer=reducer,
            embedding_regularizer=embedding_regularizer,
            embedding_reg_weight=embedding_reg_weight,
        )
        if not is_euclidean(self.distance):
            raise TypeError(
                "FastAPLoss: distance must be LpDistance with p = 2 and normalize_embeddings = True, "
                f"got {type(self.distance).__name__}"
            )
        self.num_bins, self.memory_budget = num_bins, memory_budget

    def default_distance(self) -> Distance:
        return LpDistance(power=2)

    def per_query(
        self, embeddings: Tensor, labels: Tensor, indices_tuple: PairIndices | TripletIndices | None
    ) -> tuple[Tensor, Tensor]:
        values, is_query = per_query_fastap(
            embeddings, labels, self.num_bins, self.distance, self.memory_budget
        )
        if indices_tuple is not None:
            values = values * miner_weights(
                indices_tuple, embeddings.shape[0], dtype=values.dtype, device=values.device
            )
        return values, is_query

    def extra_repr(self) -> str:
        return f"num_bins={self.num_bins}"


def per_query_fastap(
    embeddings: Tensor, labels: Tensor, num_bins: int, distance: Distance, memory_budget: int | None
) -> tuple[Tensor, Tensor]:
    """The loss of each row as a query [N], and whether it is one [N] bool."""
    rows = upcast(embeddings)
    # None stands for the square, which needs no distances: d = 2 - 2s.
    other = None if distance.power == 2 else distance  # type: ignore[attr-defined]
    if selected_backend() == "reference":
        return reference.fastap(rows, labels, num_bins=num_bins, distance=other)
    layout = ClassLayout.from_labels(labels)
    count = layout.query_count
    histograms = _distance_histograms(layout, rows, num_bins, other, memory_budget)
    found = histograms.positives * running_sum(histograms.positives)
    retrieved = running_sum(histograms.positives + histograms.negatives)
    precision = found / retrieved.masked_fill(retrieved == 0, 1)
    per_query = 1 - precision.sum(1) / (count - 1).clamp(min=1)
    per_query = per_query.masked_fill(count == 0, 0).to(rows.dtype)
    return layout.unsort(per_query), layout.unsort(count > 0)


def _distance_histograms(
    layout: ClassLayout, rows: Tensor, num_bins: int, distance: Distance | None, memory_budget: int | None
) -> SoftHistograms:
    """Over the nodes from distance 0 to the farthest: those of a similarity from 1 down to -1."""
    start, count = layout.start, layout.query_count
    if distance is None:
        rows = layout.sort(unit_rows(rows))
        return soft_histogram(
            rows, rows, start, count, num_bins, per_query=True, descending=True, memory_budget=memory_budget
        )

    farthest: float = 2**distance.power  # type: ignore[attr-defined]

    def similarity(query: Tensor, ref: Tensor) -> Tensor:
        return 1 - 2 / farthest * distance(query, ref)

    return distance_histogram(
        layout.sort(rows),
        similarity,
        start,
        count,
        num_bins,
        per_query=True,
        descending=True,
        memory_budget=memory_budget,
    )
