"""FastAP: average precision with the ranks of a histogram of distances."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tritonloss import reference
from tritonloss.backends import selected_backend
from tritonloss.distances import Distance, LpDistance, is_euclidean
from tritonloss.indices import weights_of_rows
from tritonloss.layout import ClassLayout
from tritonloss.losses.base import (
    LossOptions,
    PerQueryLoss,
    check_bounds,
    check_choice,
    check_count,
    check_embeddings,
    check_labels,
    check_products,
    full_precision,
    mean_of_queries,
    output_dtype,
)
from tritonloss.ops import Counting, histogram_values, register_histogram_function, running_sum
from tritonloss.types import PairIndices, ProductMode, Reduction, TripletIndices, accumulation_dtype, upcast

if TYPE_CHECKING:
    from typing_extensions import Unpack


def fastap_loss(
    embeddings: Tensor,
    labels: Tensor,
    *,
    num_bins: int = 10,
    reduction: Reduction = "mean",
    memory_budget: int | None = None,
    products: ProductMode | None = None,
) -> Tensor:
    """The loss of `FastAPLoss`, which has the equation, the cost and the source, without its module.

    Args:
        embeddings: [N, D], any floating dtype; normalised here.
        labels: [N], any integer dtype or bool. Only equality counts.
        reduction: "mean", or "none" for the loss of each query, [N], 0 for a query without another positive.
        num_bins, memory_budget, products: as for `FastAPLoss`.

    Returns:
        Scalar, or [N], in the dtype of the embeddings (float32 inside autocast). Computed in float32 or float64.

    Raises:
        TypeError: embeddings that are not floating, labels that are not integers, num_bins or a budget that is no int.
        ValueError: num_bins or a budget below 1, an unknown reduction, wrong shapes, devices that differ.
    """
    check_embeddings(embeddings, "embeddings")
    check_labels(labels, embeddings, "labels")
    num_bins = check_count("num_bins", num_bins)
    check_choice("reduction", reduction, Reduction)
    check_products(products)
    (memory_budget,) = check_bounds(memory_budget=memory_budget)
    with full_precision(embeddings):
        options = num_bins, LpDistance(power=2), memory_budget, products
        mean = reduction == "mean"
        loss = (
            mean_fastap(embeddings, labels, *options)
            if mean
            else fastap_values(embeddings, labels, *options)[0]
        )
    return loss.to(output_dtype(embeddings))


class FastAPLoss(PerQueryLoss):
    """1 - average precision, the ranks read from histograms of distances. Signature of pytorch-metric-learning 3.

    d is the squared Euclidean distance of normalised rows, in [0, 4], and the nodes z are 0, D, 2D, ..., 4 with
    D = 4 / num_bins. h(z) counts the other rows j with the weight max(0, 1 - |d_qj - z| / D), h+(z) those of q's class;
    H and H+ are their running sums. The loss of a query q whose class has n other rows is

        1 - 1 / n sum over z of h+(z) H+(z) / H(z)

    where a term with H(z) = 0 is 0, and the loss is the mean over the queries with n > 0; 0 if there is none. At a node
    the gradient is that of the bin behind it, at d = 4 that of the last bin.

    `FastAPLoss()(embeddings, labels)` takes embeddings [N, D] of any floating dtype and labels [N] of any integer
    dtype. Its one term, "loss", has one loss for each row that has another of its class; the default reducer is their
    mean. With an `indices_tuple` the loss of a query is multiplied by the weight that
    `tritonloss.indices.miner_weights` gives to the row; the tuple does not choose positives or negatives.

    Args:
        num_bins: at least 1; 10 in the paper. There are num_bins + 1 nodes.
        memory_budget: bytes that similarities may take; default TRITONLOSS_MEMORY_BUDGET, else 256 MiB on CPU and a
            sixteenth of the device's memory on CUDA.
        products: how rows are multiplied, "auto", "ieee" or "split"; default TRITONLOSS_PRODUCTS, else "auto": see
            `tritonloss.ops.products`. Results of both have the precision of float32.
        **options: `distance`, a Euclidean distance of normalised rows, ours or pytorch-metric-learning's; default
            `LpDistance(power=2)`. With another power the nodes reach from 0 to 2^power, and torch.compile leaves its
            graph. `reducer`, `embedding_regularizer`, `embedding_reg_weight`: as for `BaseMetricLossFunction`. A
            reducer other than `MeanReducer`, and `loss_terms`, walk once more in the backward pass, cost a host sync on
            CUDA and break the graph of torch.compile.

    Time O(N^2 D): one walk over panels of the similarity matrix gives value and gradient. Memory O(panel + N D). No
    host sync.

    Raises:
        TypeError: another distance, num_bins or a budget that is no int.
        ValueError: num_bins or a budget below 1; when called, labels that are missing, or a `ref_emb` or `ref_labels`
            that is not None.

    Source: Cakir et al., Deep Metric Learning to Rank, CVPR 2019, Eqs. 5 to 9; the nodes and which rows are queries as
    in pytorch-metric-learning.
    """

    def __init__(
        self,
        num_bins: int = 10,
        *,
        memory_budget: int | None = None,
        products: ProductMode | None = None,
        **options: Unpack[LossOptions],
    ) -> None:
        check_products(products)
        num_bins = check_count("num_bins", num_bins)
        (memory_budget,) = check_bounds(memory_budget=memory_budget)
        super().__init__(**options)
        if not is_euclidean(self.distance):
            raise TypeError(
                "FastAPLoss: distance must be LpDistance with p = 2 and normalize_embeddings = True, "
                f"got {type(self.distance).__name__}"
            )
        self.num_bins, self.memory_budget, self.products = num_bins, memory_budget, products

    def default_distance(self) -> Distance:
        return LpDistance(power=2)

    def per_query(
        self, embeddings: Tensor, labels: Tensor, indices_tuple: PairIndices | TripletIndices | None
    ) -> tuple[Tensor, Tensor]:
        return fastap_values(embeddings, labels, *self._options(), indices_tuple)

    def mean(
        self, embeddings: Tensor, labels: Tensor, indices_tuple: PairIndices | TripletIndices | None
    ) -> Tensor:
        return mean_fastap(embeddings, labels, *self._options(), indices_tuple)

    def _options(self) -> tuple[int, Distance, int | None, ProductMode | None]:
        return self.num_bins, self.distance, self.memory_budget, self.products

    def extra_repr(self) -> str:
        return f"num_bins={self.num_bins}"


def fastap_values(
    embeddings: Tensor,
    labels: Tensor,
    num_bins: int,
    distance: Distance,
    memory_budget: int | None,
    products: ProductMode | None,
    indices: PairIndices | TripletIndices | None = None,
) -> tuple[Tensor, Tensor]:
    """The loss of each row as a query [N], and whether it is one [N] bool."""
    if selected_backend() == "reference":
        other = None if _power(distance) == 2 else distance
        values, is_query = reference.fastap(upcast(embeddings), labels, num_bins=num_bins, distance=other)
    else:
        layout = ClassLayout.from_labels(labels)
        count = layout.query_count
        counting = _counting(layout, num_bins, distance, memory_budget, products)
        values = layout.unsort(histogram_values(embeddings, layout.start, count, "fastap", counting))
        is_query = layout.unsort(count > 0)
    return values if indices is None else values * weights_of_rows(indices, embeddings), is_query


def mean_fastap(
    embeddings: Tensor,
    labels: Tensor,
    num_bins: int,
    distance: Distance,
    memory_budget: int | None,
    products: ProductMode | None,
    indices: PairIndices | TripletIndices | None = None,
) -> Tensor:
    """The mean over the queries, in one pass."""
    if selected_backend() == "reference":
        options = num_bins, distance, memory_budget, products
        return mean_of_queries(*fastap_values(embeddings, labels, *options, indices))
    layout = ClassLayout.from_labels(labels)
    count, weights = layout.query_count, layout.weight(accumulation_dtype(embeddings.dtype))
    if indices is not None:
        weights = weights * weights_of_rows(indices, embeddings)[layout.order]
    counting = _counting(layout, num_bins, distance, memory_budget, products)
    return histogram_values(embeddings, layout.start, count, "fastap", counting, weights)


def _power(distance: Distance) -> float:
    return distance.power  # type: ignore[attr-defined, no-any-return]


def _counting(
    layout: ClassLayout,
    num_bins: int,
    distance: Distance,
    memory_budget: int | None,
    products: ProductMode | None,
) -> Counting:
    """Nodes from distance 0 to the farthest: those of a similarity from 1 down to -1."""
    farthest = 2 ** _power(distance)
    # The square needs no distances: d = 2 - 2 s.
    is_square = farthest == 4
    return Counting(
        num_bins,
        per_query=True,
        descending=True,
        memory_budget=memory_budget,
        products=products,
        normalize=is_square,
        order=layout.order,
        distance=None if is_square else lambda query, ref: 1 - 2 / farthest * distance(query, ref),
    )


def _of_histograms(histograms: Tensor, count: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
    """The loss of each query [q] and its derivative by the histograms [q, 2, bins + 1]; 0 without another positive."""
    positives = histograms[:, 0]
    found, retrieved = running_sum(torch.stack([positives, histograms.sum(1)]))
    retrieved = torch.where(retrieved == 0, 1, retrieved)
    n = (count - 1).clamp(min=1).to(histograms.dtype)[:, None]
    share = positives / retrieved
    values = torch.where(count > 0, 1 - (share * found).sum(1) / n[:, 0], 0)

    def derivative() -> Tensor:
        precision = found / retrieved
        # What is retrieved at z counts in the H of every node from z on, a positive in their H+ as well.
        later = running_sum(torch.stack([share * precision, share]).flip(-1)).flip(-1)
        by_negatives = later[0]
        by_positives = by_negatives - later[1] - precision
        return torch.stack([by_positives, by_negatives], 1) * ((count > 0)[:, None] / n)[:, None]

    return values, derivative


register_histogram_function("fastap", _of_histograms)
