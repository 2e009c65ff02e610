"""Histogram loss: the probability that a random negative pair is more similar than a random positive pair."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from tritonloss import reference
from tritonloss.backends import selected_backend
from tritonloss.distances import CosineSimilarity, Distance, check_distance, is_cosine
from tritonloss.indices import as_indices, check_index_range
from tritonloss.layout import ClassLayout
from tritonloss.losses.base import (
    BaseMetricLossFunction,
    check_bounds,
    check_count,
    check_embeddings,
    check_labels,
    check_products,
    full_precision,
    output_dtype,
    refuse,
)
from tritonloss.ops import Counting, histogram_total, of_histograms, pair_histogram, running_sum
from tritonloss.types import IndicesTuple, LossDict, PairIndices, ProductMode, TripletIndices, upcast


def histogram_loss(
    embeddings: Tensor,
    labels: Tensor | None = None,
    *,
    num_bins: int = 100,
    indices_tuple: IndicesTuple | None = None,
    distance: Distance | None = None,
    memory_budget: int | None = None,
    products: ProductMode | None = None,
) -> Tensor:
    """The overlap of the similarities of negative and of positive pairs (`HistogramLoss` without its module).

    With the nodes t_r = -1 + 2r / num_bins, r = 0 .. num_bins, every pair splits its unit mass linearly between the two
    nodes around its similarity, which is clamped to [-1, 1]. p+ and p- are the histograms of the positive and of the
    negative pairs, each divided by its number of pairs:

        loss = sum over r of p-_r (p+_0 + ... + p+_r)

    An unordered pair counts once. From labels: all pairs of one class are positive; of two classes negative, if at
    least one of both rows has another row of its class. That is the set of all triplets, which pytorch-metric-learning
    takes; the paper takes negative pairs of two lone rows as well. No pair of a kind: the loss is 0.

    Args:
        embeddings: [N, D], any floating dtype.
        labels: [N], any integer dtype or bool. Only equality counts. Not used with an `indices_tuple`.
        num_bins: at least 1. Results hardly depend on it between 50 and 400 with thousands of pairs.
        indices_tuple: 3 tensors, the triplets (anchors, positives, negatives); or 4, the pairs (pos_anchors, positives,
            neg_anchors, negatives), of which those count whose anchor has pairs of both kinds. The pairs (anchor,
            positive) and (anchor, negative) take the place of those from labels.
        distance: an object of `tritonloss.distances` or of pytorch-metric-learning with values in [-1, 1], taken as
            similarities; None for `CosineSimilarity()`, the cosine.
        memory_budget: bytes that similarities may take; default TRITONLOSS_MEMORY_BUDGET, else 256 MiB on CPU and a
            sixteenth of the device's memory on CUDA.
        products: how rows are multiplied, "auto", "ieee" or "split"; default TRITONLOSS_PRODUCTS, else "auto": see
            `tritonloss.ops.products`. Results of both have the precision of float32.

    Returns:
        Scalar in the dtype of the embeddings (float32 inside autocast). Similarities are float32 or float64.

    Time O(N^2 D), with an `indices_tuple` of M pairs O(M (D + log M)). Memory O(memory_budget + N D + M + num_bins).
    From labels with the cosine no host sync; with an `indices_tuple` its distinct pairs are counted on the host.
    torch.compile leaves its graph for an `indices_tuple` and for a distance other than the cosine.

    Raises:
        TypeError: embeddings that are not floating, labels or indices that are not integers, num_bins or a budget that
            is no int, a distance that is none.
        ValueError: num_bins or a budget below 1, neither labels nor indices, an index that is no row, wrong shapes,
            devices that differ.

    Source: Ustinova and Lempitsky, Learning Deep Embeddings with Histogram Loss, NeurIPS 2016, Eqs. 1 to 4; which pairs
    count as in pytorch-metric-learning 3.
    """
    check_embeddings(embeddings, "embeddings")
    if labels is not None:
        check_labels(labels, embeddings, "labels")
    check_products(products)
    num_bins = check_count("num_bins", num_bins)
    (memory_budget,) = check_bounds(memory_budget=memory_budget)
    distance = CosineSimilarity() if distance is None else check_distance(distance)
    indices = as_indices(indices_tuple)
    with full_precision(embeddings):
        options = num_bins, indices, distance, memory_budget, products
        loss = overlap("histogram_loss", embeddings, labels, *options)
    return loss.to(output_dtype(embeddings))


class HistogramLoss(BaseMetricLossFunction):
    """The loss of `histogram_loss` as a module, with pytorch-metric-learning 3's signature.

    `HistogramLoss()(embeddings, labels)` takes embeddings [N, D] of any floating dtype and labels [N] of any integer
    dtype, or in place of the labels an `indices_tuple`. Its one term, "loss", is a scalar. It takes no `reducer`.

    Args:
        num_bins, memory_budget, products: as for `histogram_loss`, which has the equation, the cost and the source.
        distance: any with values in [-1, 1], ours or pytorch-metric-learning's; default `CosineSimilarity()`.
        embedding_regularizer, embedding_reg_weight: as for `BaseMetricLossFunction`.

    Raises:
        TypeError: num_bins or a budget that is no int, a distance that is none.
        ValueError: num_bins or a budget below 1; when called, neither labels nor an `indices_tuple`, or a `ref_emb` or
            `ref_labels` that is not None.
    """

    def __init__(
        self,
        num_bins: int = 100,
        *,
        distance: Distance | None = None,
        embedding_regularizer: Callable[[Tensor], Tensor] | None = None,
        embedding_reg_weight: float = 1.0,
        memory_budget: int | None = None,
        products: ProductMode | None = None,
    ) -> None:
        check_products(products)
        num_bins = check_count("num_bins", num_bins)
        (memory_budget,) = check_bounds(memory_budget=memory_budget)
        super().__init__(
            distance=distance,
            embedding_regularizer=embedding_regularizer,
            embedding_reg_weight=embedding_reg_weight,
        )
        self.num_bins, self.memory_budget, self.products = num_bins, memory_budget, products

    def compute_loss(
        self,
        embeddings: Tensor,
        labels: Tensor | None,
        indices_tuple: PairIndices | TripletIndices | None,
        ref_emb: Tensor | None,
        ref_labels: Tensor | None,
    ) -> LossDict:
        refuse("HistogramLoss", ref_emb=ref_emb, ref_labels=ref_labels)
        loss = overlap(
            "HistogramLoss",
            embeddings,
            labels,
            self.num_bins,
            indices_tuple,
            self.distance,
            self.memory_budget,
            self.products,
        )
        return {"loss": {"losses": loss, "indices": None}}

    def extra_repr(self) -> str:
        return f"num_bins={self.num_bins}"


def overlap(
    loss: str,
    embeddings: Tensor,
    labels: Tensor | None,
    num_bins: int,
    indices: PairIndices | TripletIndices | None,
    distance: Distance,
    memory_budget: int | None,
    products: ProductMode | None,
) -> Tensor:
    """The loss, in float32 or float64; `loss` is its name for errors."""
    if indices is None and labels is None:
        raise ValueError(f"{loss}: labels or an indices_tuple is required, got None for both")
    pairs = None if indices is None else distinct_pairs(indices, embeddings.shape[0])
    if selected_backend() == "reference":
        rows = upcast(embeddings)
        return reference.histogram(rows, labels, num_bins=num_bins, pairs=pairs, distance=distance)
    cosine = is_cosine(distance)
    if pairs is not None:
        left, right = torch.cat(pairs, 1)
        histograms = pair_histogram(
            embeddings,
            left,
            right,
            pairs[0].shape[1],
            num_bins,
            distance=None if cosine else distance,
            normalize=cosine,
            memory_budget=memory_budget,
        )
        n_pairs = torch.tensor([part.shape[1] for part in pairs], device=embeddings.device)
        return of_histograms(torch.stack(histograms), partial(overlap_of, n_pairs), embeddings)
    assert labels is not None
    # A lone row comes last and is no query, so that the pairs of a query with the rows behind it are those that count.
    layout = ClassLayout.from_labels(labels).lone_rows_last()
    count = layout.query_count
    n, n_queries = count.shape[0], (count > 0).sum()
    n_positives = (count.sum() - n_queries) // 2
    n_pairs = torch.stack([n_positives, n_queries * (2 * n - 1 - n_queries) // 2 - n_positives])
    counting = Counting(
        num_bins,
        memory_budget=memory_budget,
        products=products,
        normalize=cosine,
        order=layout.order,
        distance=None if cosine else distance,
    )
    return histogram_total(embeddings, layout.start, count, partial(overlap_of, n_pairs), counting)


def overlap_of(n_pairs: Tensor, histograms: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
    """sum over r of p-_r (p+_0 + ... + p+_r), and its derivative by the histograms [2, bins + 1], positives first.

    n_pairs: [2], the numbers of positive and of negative pairs, by which the histograms are divided.
    """
    scale = 1 / n_pairs.clamp(min=1).to(histograms.dtype)[:, None]
    positives, negatives = histograms * scale
    below = running_sum(positives)

    def derivative() -> Tensor:
        above = running_sum(negatives.flip(0)).flip(0)
        return torch.stack([above, below]) * scale

    return torch.dot(negatives, below), derivative


def distinct_pairs(indices: PairIndices | TripletIndices, n: int) -> tuple[Tensor, Tensor]:
    """The positive and the negative unordered pairs of rows, each [2, M] int64, ascending, without repetition.

    Of listed pairs, those whose anchor occurs with positives and with negatives: they are the pairs of all triplets
    that can be formed from the list.
    """
    # A pair is found by one number made of both rows: an index beyond the batch would be another pair.
    check_index_range(indices, n)
    indices = type(indices)(*(entry.to(torch.int64) for entry in indices))
    if isinstance(indices, TripletIndices):
        anchors, positives, negatives = indices
        return _unordered(anchors, positives, n), _unordered(anchors, negatives, n)
    with_positives = anchors_of(indices.pos_anchors, n)[indices.neg_anchors]
    with_negatives = anchors_of(indices.neg_anchors, n)[indices.pos_anchors]
    return (
        _unordered(indices.pos_anchors[with_negatives], indices.positives[with_negatives], n),
        _unordered(indices.neg_anchors[with_positives], indices.negatives[with_positives], n),
    )


def anchors_of(anchors: Tensor, n: int) -> Tensor:
    """Whether each of n rows is an anchor, [n] bool."""
    return torch.zeros(n, dtype=torch.bool, device=anchors.device).index_fill_(0, anchors, True)


def _unordered(first: Tensor, second: Tensor, n: int) -> Tensor:
    code = torch.unique(torch.minimum(first, second) * n + torch.maximum(first, second))
    return torch.stack([code // max(n, 1), code % max(n, 1)])
