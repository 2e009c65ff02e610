"""Proxy anchor: every class has a learnable proxy, which draws its class and repels the others."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tritonloss import reference
from tritonloss.backends import selected_backend
from tritonloss.distances import (
    CosineSimilarity,
    Distance,
    DotProductSimilarity,
    check_distance,
    is_cosine,
    is_dot_product,
)
from tritonloss.indices import weights_of_rows
from tritonloss.losses.base import (
    check_arguments,
    check_bounds,
    check_count,
    check_embeddings,
    check_labels,
    check_numbers,
    check_products,
    full_precision,
    output_dtype,
    refuse,
    require_labels,
)
from tritonloss.losses.base_proxy import BaseProxyLoss, match_proxies
from tritonloss.ops import Repulsion, class_labels, proxy_sums, proxy_total
from tritonloss.reducers import DivisorReducer
from tritonloss.types import (
    IndicesTuple,
    LossDict,
    PairIndices,
    ProductMode,
    TripletIndices,
    accumulation_dtype,
    upcast,
)


def proxy_anchor_loss(
    embeddings: Tensor,
    labels: Tensor,
    proxies: Tensor,
    *,
    margin: float = 0.1,
    alpha: float = 32,
    weights: Tensor | None = None,
    distance: Distance | None = None,
    check_label_range: bool = True,
    memory_budget: int | None = None,
    products: ProductMode | None = None,
) -> Tensor:
    """Draw every proxy to the embeddings of its class and away from all others (`ProxyAnchorLoss` without its module).

    With P all C proxies, P+ those whose class occurs in the labels and s the cosine similarity,

        L = 1/|P+| sum over p in P+ of ln(1 + sum over x of class p     of w_x e^(-alpha (s(x, p) - margin)))
          + 1/C    sum over p in P  of ln(1 + sum over x of other classes of w_x e^(alpha (s(x, p) + margin)))

    Args:
        embeddings: [N, D], any floating dtype.
        labels: [N], any integer dtype or bool, in 0 .. C - 1: label c is the class of proxy c.
        proxies: [C, D], on the device and in the dtype of the embeddings; inside autocast any floating dtype.
        margin: d, in units of the similarity; 0.1 in the paper.
        alpha: scale of the exponents; 32 in the paper. Any number: nothing overflows.
        weights: [N] floating, >= 0, constants: w in the equation; None for 1. A weight of 0 leaves the embedding out of
            the sums, its class still counts in P+.
        distance: None for the cosine. For a distance, smaller is closer, and (s - d), (s + d) become (d - distance),
            (-d - distance). Cosine and dot product are computed in blocks by matrix products; any other is called on
            blocks of proxies, and torch.compile does not capture it.
        check_label_range: compare the labels with C, one host sync on CUDA. Without it, a label out of range is of no
            class, and no call waits for the device.
        memory_budget: bytes that similarities may take; default TRITONLOSS_MEMORY_BUDGET, else 256 MiB on CPU and a
            sixteenth of the device's memory on CUDA.
        products: how rows are multiplied, "auto", "ieee" or "split"; default TRITONLOSS_PRODUCTS, else "auto": see
            `tritonloss.ops.products`. Results of both have the precision of float32.

    Returns:
        Scalar, in the dtype of the embeddings (float32 inside autocast). Computed in float32 or float64. 0 without
        embeddings.

    Time O(N C D). Memory O(memory_budget + C + N D) beside the gradients: neither the logits [N, C] nor a normalised
    copy of the proxies is held. Proxies or embeddings that need no gradient get none, at no cost.

    Raises:
        TypeError: embeddings that are not floating, labels that are not integers, a distance that is none, a margin or
            an alpha that is no number, a budget that is no int.
        ValueError: a NaN for either, a budget below 1, a label out of range, wrong shapes, devices that differ, dtypes
            that differ outside autocast.

    Source: Kim et al., Proxy Anchor Loss for Deep Metric Learning, CVPR 2020, Eq. 4; weights as in
    pytorch-metric-learning 3.
    """
    check_embeddings(embeddings, "embeddings")
    check_embeddings(proxies, "proxies")
    check_labels(labels, embeddings, "labels")
    if weights is not None:
        check_weights(weights, embeddings)
    check_numbers(margin=margin, alpha=alpha)
    check_products(products)
    (memory_budget,) = check_bounds(memory_budget=memory_budget)
    distance = CosineSimilarity() if distance is None else check_distance(distance)
    rows = match_proxies(embeddings, proxies)
    repulsion = repulsion_of(margin, alpha, distance, memory_budget, products)
    with full_precision(embeddings):
        loss = mean_over_proxies(rows, labels, proxies, weights, repulsion, check_label_range)
    return loss.to(output_dtype(embeddings))


class ProxyAnchorLoss(BaseProxyLoss):
    """The loss of `proxy_anchor_loss` as a module that owns the proxies, with pytorch-metric-learning 3's signature.

    `ProxyAnchorLoss(num_classes, embedding_size)(embeddings, labels)` takes embeddings [N, D] in the dtype of its
    parameter `weight` [C, D] (any floating dtype inside autocast) and labels [N] in 0 .. C - 1 of any integer dtype.
    Give `loss.parameters()` to an optimizer, usually with a larger learning rate than the network's.

    Its terms are "pos_loss" and "neg_loss", [C] each, with the divisors |P+| and C; the reducer must be a
    `DivisorReducer`, or `MultipleReducers` of such. With an `indices_tuple` an embedding weighs w = how often it was
    mined over the largest such count, inside the exponential sums; P+ counts the classes of the batch, mined or not.

    Under `torch.nn.DataParallel` each replica computes the loss of its shard of the batch, with |P+| of the shard.

    Args:
        num_classes: C.
        embedding_size: D.
        margin, alpha, check_label_range, memory_budget, products: as for `proxy_anchor_loss`, which has the equations,
            the cost and the source.
        weight_regularizer, weight_reg_weight, weight_init_func, **options: as for `BaseProxyLoss`. Default distance:
            `CosineSimilarity`; reducer: `DivisorReducer`; initialisation: `kaiming_normal_(mode="fan_out")`.

    Raises:
        TypeError, ValueError: as `BaseProxyLoss`; for margin, alpha and the budget as `proxy_anchor_loss`. When called:
            as `proxy_anchor_loss`, and ValueError for labels that are missing, for `ref_emb` or `ref_labels`, and for a
            reducer that cannot use a divisor.
    """

    def __init__(
        self,
        num_classes: int,
        embedding_size: int,
        margin: float = 0.1,
        alpha: float = 32,
        *,
        weight_regularizer: Callable[[Tensor], Tensor] | None = None,
        weight_reg_weight: float = 1.0,
        weight_init_func: Callable[[Tensor], object] | None = None,
        check_label_range: bool = True,
        memory_budget: int | None = None,
        products: ProductMode | None = None,
        **options: Any,
    ) -> None:
        num_classes = check_count("num_classes", num_classes)
        check_numbers(margin=margin, alpha=alpha)
        check_products(products)
        (memory_budget,) = check_bounds(memory_budget=memory_budget)
        super().__init__(
            num_classes,
            embedding_size,
            weight_regularizer=weight_regularizer,
            weight_reg_weight=weight_reg_weight,
            weight_init_func=weight_init_func,
            **options,
        )
        self.num_classes, self.margin, self.alpha = num_classes, margin, alpha
        self.check_label_range, self.memory_budget, self.products = check_label_range, memory_budget, products

    def default_weight_init(self, weight: Tensor) -> None:
        nn.init.kaiming_normal_(weight, mode="fan_out")

    def default_reducer(self) -> Callable[..., Tensor]:
        return DivisorReducer()

    def compute_loss(
        self,
        embeddings: Tensor,
        labels: Tensor | None,
        indices_tuple: PairIndices | TripletIndices | None,
        ref_emb: Tensor | None,
        ref_labels: Tensor | None,
    ) -> LossDict:
        positive, negative, n_present = proxy_anchor_sums(
            embeddings, *self._arguments(embeddings, labels, indices_tuple, ref_emb, ref_labels)
        )
        proxy = torch.arange(self.num_classes, device=embeddings.device)
        return {
            "pos_loss": {"losses": positive, "indices": proxy, "divisor": n_present},
            "neg_loss": {"losses": negative, "indices": proxy, "divisor": self.num_classes},
        }

    def reduced_objective(
        self,
        embeddings: Tensor,
        labels: Tensor | None = None,
        indices_tuple: IndicesTuple | None = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
    ) -> Tensor:
        if type(self.reducer) is not DivisorReducer:
            return super().reduced_objective(embeddings, labels, indices_tuple, ref_emb, ref_labels)
        check_embeddings(embeddings, "embeddings")
        embeddings = match_proxies(embeddings, self.weight)
        indices = check_arguments(embeddings, labels, indices_tuple, ref_emb, ref_labels)
        with full_precision(embeddings):
            arguments = self._arguments(embeddings, labels, indices, ref_emb, ref_labels)
            return mean_over_proxies(embeddings, *arguments)

    def _arguments(
        self,
        embeddings: Tensor,
        labels: Tensor | None,
        indices: PairIndices | TripletIndices | None,
        ref_emb: Tensor | None,
        ref_labels: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor | None, Repulsion, bool]:
        """What `proxy_anchor_sums` takes after the embeddings."""
        labels = require_labels("ProxyAnchorLoss", labels)
        refuse("ProxyAnchorLoss", ref_emb=ref_emb, ref_labels=ref_labels)
        weights = None if indices is None else weights_of_rows(indices, embeddings)
        repulsion = repulsion_of(self.margin, self.alpha, self.distance, self.memory_budget, self.products)
        return labels, self.weight, weights, repulsion, self.check_label_range

    def extra_repr(self) -> str:
        num_classes, embedding_size = self.weight.shape
        return f"{num_classes}, {embedding_size}, margin={self.margin}, alpha={self.alpha}"


class ProxyAnchorSums(NamedTuple):
    """positive, negative: the two logarithms of each proxy, [C]. n_present: scalar int64, |P+|."""

    positive: Tensor
    negative: Tensor
    n_present: Tensor


def repulsion_of(
    margin: float,
    alpha: float,
    distance: Distance,
    memory_budget: int | None,
    products: ProductMode | None = None,
) -> Repulsion:
    """The options of the primitive: cosine and dot product are products of rows."""
    cosine = is_cosine(distance)
    called = None if cosine or is_dot_product(distance) else distance
    return Repulsion(alpha, margin, cosine, cosine, called, memory_budget, products)


def proxy_anchor_sums(
    embeddings: Tensor,
    labels: Tensor,
    proxies: Tensor,
    weights: Tensor | None,
    repulsion: Repulsion,
    check_label_range: bool,
) -> ProxyAnchorSums:
    classes = class_labels(labels, proxies.shape[0], check=check_label_range)
    n_present = count_present(classes, proxies.shape[0])
    if selected_backend() == "reference":
        distance = CosineSimilarity() if repulsion.normalize_proxies else repulsion.distance
        positive, negative = reference.proxy_anchor(
            upcast(embeddings),
            upcast(proxies),
            classes,
            margin=repulsion.margin,
            alpha=repulsion.alpha,
            weights=weights,
            distance=DotProductSimilarity() if distance is None else distance,
        )
    else:
        positive, negative = proxy_sums(embeddings, proxies, classes, weights, repulsion)
    return ProxyAnchorSums(positive, negative, n_present)


def mean_over_proxies(
    embeddings: Tensor,
    labels: Tensor,
    proxies: Tensor,
    weights: Tensor | None,
    repulsion: Repulsion,
    check_label_range: bool,
) -> Tensor:
    """The loss, in one pass; 0 without embeddings."""
    n_proxies = proxies.shape[0]
    if selected_backend() == "reference":
        positive, negative, n_present = proxy_anchor_sums(
            embeddings, labels, proxies, weights, repulsion, check_label_range
        )
        return positive.sum() / n_present.clamp(min=1) + negative.mean()
    classes = class_labels(labels, n_proxies, check=check_label_range)
    dtype = accumulation_dtype(embeddings.dtype)
    per_present = count_present(classes, n_proxies).clamp(min=1).to(dtype).reciprocal()
    factors = per_present.expand(n_proxies).contiguous(), per_present.new_full((n_proxies,), 1 / n_proxies)
    return proxy_total(embeddings, proxies, classes, weights, repulsion, factors)


def count_present(classes: Tensor, n_classes: int) -> Tensor:
    """How many of 0 .. n_classes - 1 occur in classes [N] int64, where -1 is no class: scalar int64, no host sync."""
    # -1 marks the last entry, which is dropped.
    is_present = torch.zeros(n_classes + 1, dtype=torch.bool, device=classes.device)
    return is_present.index_fill_(0, classes.remainder(n_classes + 1), True)[:n_classes].sum()


def check_weights(weights: Any, embeddings: Tensor) -> None:
    """[N] floating on the device of the embeddings, or an error."""
    if not isinstance(weights, Tensor) or not weights.is_floating_point():
        got = weights.dtype if isinstance(weights, Tensor) else type(weights).__name__
        raise TypeError(f"weights must be a floating tensor, got {got}")
    if weights.shape != embeddings.shape[:1]:
        raise ValueError(f"weights must have shape {list(embeddings.shape[:1])}, got {list(weights.shape)}")
    if weights.device != embeddings.device:
        raise ValueError(f"weights must be on {embeddings.device} like the embeddings, got {weights.device}")
