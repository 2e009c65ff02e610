"""Circle: positives and negatives of a query weighed by how far each is from where it should be."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tritonloss import reference
from tritonloss.losses.base import LossOptions, check_numbers, check_positive
from tritonloss.losses.logsumexp_math import circle_maps, circle_terms
from tritonloss.losses.mined import MinedPairs, softplus
from tritonloss.losses.pairwise import PairLoss, PairRule, above_zero, exponents_of, pair_loss
from tritonloss.ops.pair_logsumexp import register_logsumexp_function
from tritonloss.reducers import AvgNonZeroReducer
from tritonloss.types import ProductMode, Reduction

if TYPE_CHECKING:
    from typing_extensions import Unpack


def circle_loss(
    embeddings: Tensor,
    labels: Tensor,
    *,
    m: float = 0.4,
    gamma: float = 80,
    ref_emb: Tensor | None = None,
    ref_labels: Tensor | None = None,
    reduction: Reduction = "mean",
    memory_budget: int | None = None,
    products: ProductMode | None = None,
) -> Tensor:
    """The loss of `CircleLoss`, which has the equation, the cost and the source, without its module.

    Args:
        embeddings: [Q, D], any floating dtype; normalised here.
        labels: [Q], any integer dtype or bool, in any order. Only equality counts.
        ref_emb, ref_labels: [N, D] and [N], rows to compare with; None for the embeddings themselves.
        reduction: "mean" over the losses above 0, or "none" for the loss of each query, [Q].
        m, gamma, memory_budget, products: as for `CircleLoss`.

    Returns:
        Scalar, or [Q], in the dtype of the embeddings (float32 inside autocast). Computed in float32 or float64.

    Raises:
        TypeError: embeddings that are not floating, labels that are not integers, an option that is no number or int.
        ValueError: gamma not above 0, an unknown reduction, wrong shapes, devices that differ.
    """
    _check_options(m, gamma)
    rule = _rule(m, gamma, memory_budget, products)
    return pair_loss("circle_loss", rule, embeddings, labels, ref_emb, ref_labels, reduction)


class CircleLoss(PairLoss):
    """Circle loss of pairs. Signature of pytorch-metric-learning.

    s is the cosine similarity. The loss of a query q with positives P and negatives N is

        ln(1 + sum over i in P of e^(-gamma a_i (s_qi - (1 - m))) x sum over j in N of e^(gamma b_j (s_qj - m)))

    where a_i = relu(1 + m - s_qi) and b_j = relu(s_qj + m) are constants for the gradient. It is 0 for a query without
    a positive or without a negative. The loss is the mean over the queries whose loss is above 0; 0 if there is none.

    `CircleLoss()(embeddings, labels)` takes embeddings [Q, D] of any floating dtype and labels [Q] of any integer
    dtype. Its one term, "loss", has one loss for each row; the default reducer is `AvgNonZeroReducer`. An
    `indices_tuple` names the pairs in place of the labels; a pair that occurs twice counts once.

    Args:
        m: the margin; 0.25 in the paper for faces, 0.4 for retrieval.
        gamma: scale of the exponents, > 0; 256 in the paper for faces, 80 for retrieval.
        **options: `memory_budget`, `products`, `distance`, `reducer`, `embedding_regularizer`,
            `embedding_reg_weight`, as for `PairLoss`, which also states the cost. No call waits for the device.

    Raises:
        TypeError, ValueError: as `PairLoss`; an option that is no number, gamma not above 0, a NaN.

    Source: Sun et al., Circle Loss: A Unified Perspective of Pair Similarity Optimization, CVPR 2020, Eq. 6; the mean
    as in pytorch-metric-learning.
    """

    def __init__(
        self,
        m: float = 0.4,
        gamma: float = 80,
        *,
        memory_budget: int | None = None,
        products: ProductMode | None = None,
        **options: Unpack[LossOptions],
    ) -> None:
        _check_options(m, gamma)
        super().__init__(memory_budget=memory_budget, products=products, **options)
        self.m, self.gamma = m, gamma

    def default_reducer(self) -> Callable[..., Tensor]:
        return AvgNonZeroReducer()

    def rule(self) -> PairRule:
        return _rule(self.m, self.gamma, self.memory_budget, self.products)

    def extra_repr(self) -> str:
        return f"m={self.m}, gamma={self.gamma}"


def _check_options(m: Any, gamma: Any) -> None:
    check_numbers(m=m)
    check_positive(gamma=gamma)


def _rule(m: float, gamma: float, memory_budget: int | None, products: ProductMode | None) -> PairRule:
    return PairRule(
        exponents_of(circle_maps(m, gamma), "circle"),
        counted=above_zero,
        mined=partial(_mined, m=m, gamma=gamma),
        dense=partial(reference.circle, m=m, gamma=gamma),
        memory_budget=memory_budget,
        products=products,
    )


def _mined(pairs: MinedPairs, m: float, gamma: float) -> Tensor:
    positive, negative = pairs.positives.scores, pairs.negatives.scores
    attraction = -gamma * torch.relu(1 + m - positive.detach()) * (positive - (1 - m))
    repulsion = gamma * torch.relu(negative.detach() + m) * (negative - m)
    return softplus(pairs.positives.logsumexp(attraction) + pairs.negatives.logsumexp(repulsion))


register_logsumexp_function("circle", circle_terms)
