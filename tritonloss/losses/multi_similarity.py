"""MultiSimilarity: soft maxima of a query's positives that are far away and of its negatives that are close."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tritonloss import reference
from tritonloss.losses.base import LossOptions, check_numbers, check_positive
from tritonloss.losses.logsumexp_math import multi_similarity_maps, multi_similarity_terms
from tritonloss.losses.mined import MinedPairs, softplus
from tritonloss.losses.pairwise import PairLoss, PairRule, exponents_of, pair_loss
from tritonloss.ops.pair_logsumexp import register_logsumexp_function
from tritonloss.types import ProductMode, Reduction

if TYPE_CHECKING:
    from typing_extensions import Unpack


def multi_similarity_loss(
    embeddings: Tensor,
    labels: Tensor,
    *,
    alpha: float = 2,
    beta: float = 50,
    base: float = 0.5,
    ref_emb: Tensor | None = None,
    ref_labels: Tensor | None = None,
    reduction: Reduction = "mean",
    memory_budget: int | None = None,
    products: ProductMode | None = None,
) -> Tensor:
    """The loss of `MultiSimilarityLoss`, which has the equation, the cost and the source, without its module.

    Args:
        embeddings: [Q, D], any floating dtype; normalised here.
        labels: [Q], any integer dtype or bool, in any order. Only equality counts.
        ref_emb, ref_labels: [N, D] and [N], rows to compare with; None for the embeddings themselves.
        reduction: "mean" over all rows, or "none" for the loss of each query, [Q].
        alpha, beta, base, memory_budget, products: as for `MultiSimilarityLoss`.

    Returns:
        Scalar, or [Q], in the dtype of the embeddings (float32 inside autocast). Computed in float32 or float64.

    Raises:
        TypeError: embeddings that are not floating, labels that are not integers, an option that is no number or int.
        ValueError: alpha or beta not above 0, an unknown reduction, wrong shapes, devices that differ.
    """
    _check_options(alpha, beta, base)
    rule = _rule(alpha, beta, base, memory_budget, products)
    return pair_loss("multi_similarity_loss", rule, embeddings, labels, ref_emb, ref_labels, reduction)


class MultiSimilarityLoss(PairLoss):
    """Multi-similarity loss without its miner. Signature of pytorch-metric-learning.

    s is the cosine similarity. The loss of a query q with positives P and negatives N is

        1/alpha ln(1 + sum over i in P of e^(-alpha (s_qi - base)))
        + 1/beta ln(1 + sum over j in N of e^(beta (s_qj - base)))

    and the loss is the mean over all rows, those without a positive or a negative too; 0 without rows.

    `MultiSimilarityLoss()(embeddings, labels)` takes embeddings [Q, D] of any floating dtype and labels [Q] of any
    integer dtype. Its one term, "loss", has one loss for each row. An `indices_tuple` names the pairs in place of the
    labels; a pair that occurs twice counts once.

    Args:
        alpha: scale of the positives, > 0.
        beta: scale of the negatives, > 0.
        base: the similarity around which both are centred.
        **options: `memory_budget`, `products`, `distance`, `reducer`, `embedding_regularizer`,
            `embedding_reg_weight`, as for `PairLoss`, which also states the cost. No call waits for the device.

    Raises:
        TypeError, ValueError: as `PairLoss`; an option that is no number, alpha or beta not above 0, a NaN.

    Source: Wang et al., Multi-Similarity Loss with General Pair Weighting for Deep Metric Learning, CVPR 2019, Eq. 15.
    """

    def __init__(
        self,
        alpha: float = 2,
        beta: float = 50,
        base: float = 0.5,
        *,
        memory_budget: int | None = None,
        products: ProductMode | None = None,
        **options: Unpack[LossOptions],
    ) -> None:
        _check_options(alpha, beta, base)
        super().__init__(memory_budget=memory_budget, products=products, **options)
        self.alpha, self.beta, self.base = alpha, beta, base

    def rule(self) -> PairRule:
        return _rule(self.alpha, self.beta, self.base, self.memory_budget, self.products)

    def extra_repr(self) -> str:
        return f"alpha={self.alpha}, beta={self.beta}, base={self.base}"


def _check_options(alpha: Any, beta: Any, base: Any) -> None:
    check_positive(alpha=alpha, beta=beta)
    check_numbers(base=base)


def _rule(
    alpha: float, beta: float, base: float, memory_budget: int | None, products: ProductMode | None
) -> PairRule:
    maps = multi_similarity_maps(alpha, beta, base)
    return PairRule(
        exponents_of(maps, "multi_similarity", (float(alpha), float(beta))),
        counted=lambda values, n_positives: torch.ones_like(values),
        mined=partial(_mined, alpha=alpha, beta=beta, base=base),
        dense=partial(reference.multi_similarity, alpha=alpha, beta=beta, base=base),
        memory_budget=memory_budget,
        products=products,
    )


def _mined(pairs: MinedPairs, alpha: float, beta: float, base: float) -> Tensor:
    positives, negatives = pairs
    attraction = softplus(positives.logsumexp(-alpha * (positives.scores - base)))
    repulsion = softplus(negatives.logsumexp(beta * (negatives.scores - base)))
    return attraction / alpha + repulsion / beta


register_logsumexp_function(
    "multi_similarity",
    lambda *given: multi_similarity_terms(*given[:4], alpha=given[4], beta=given[5]),
)
