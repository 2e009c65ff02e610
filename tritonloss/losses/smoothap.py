"""SmoothAP: average precision with every step of a rank replaced by a sigmoid."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from tritonloss import reference
from tritonloss.losses.base import check_positive, fraction
from tritonloss.losses.ranking import RankedLoss, RankingLoss, cosine_ranking, loss_of_ranks
from tritonloss.ops import PairGradients, Pairs, register_query_function
from tritonloss.types import ProductMode, Reduction


def smooth_ap_loss(
    embeddings: Tensor,
    labels: Tensor,
    *,
    temperature: float = 0.01,
    reduction: Reduction = "mean",
    max_class_size: int | None = None,
    memory_budget: int | None = None,
    products: ProductMode | None = None,
) -> Tensor:
    """The loss of `SmoothAPLoss`, which has the equation, the cost and the source, without its module.

    Args:
        embeddings: [N, D], any floating dtype; normalised here.
        labels: [N], any integer dtype or bool, in any order. Only equality counts.
        reduction: "mean", or "none" for the loss of each query, [N], 0 for a query without another positive.
        temperature, max_class_size, memory_budget, products: as for `SmoothAPLoss`.

    Returns:
        Scalar, or [N], in the dtype of the embeddings (float32 inside autocast). Computed in float32 or float64.

    Raises:
        TypeError: embeddings that are not floating, labels that are not integers, a temperature that is no number, a
            bound that is no int.
        ValueError: an unknown reduction, a temperature that is not positive, a bound below 1, wrong shapes, devices
            that differ.
    """
    check_positive(temperature=temperature)
    ranked = _ranked(temperature, max_class_size, memory_budget, products)
    return loss_of_ranks(embeddings, labels, ranked, reduction)


class SmoothAPLoss(RankingLoss):
    """1 - average precision, each rank a sum of sigmoids. Signature of pytorch-metric-learning 3.

    s is the cosine similarity and G(x) = sigmoid(x / temperature). With P the rows of q's class, q included, and N
    those of the others, the loss of a query q is

        1 - mean over i in P of (1 + P_i) / (1 + P_i + N_i),
        P_i = sum over j in P, j != i, of G(s_qj - s_qi),  N_i = sum over j in N of G(s_qj - s_qi)

    and the loss is the mean over the queries whose class has another row; 0 if there is none.

    `SmoothAPLoss()(embeddings, labels)` takes embeddings [N, D] of any floating dtype and labels [N] of any integer
    dtype, in any order, with classes of any size. Its one term, "ap_loss", has one loss for each row that has another
    of its class; the default reducer is their mean.

    Args:
        temperature: of the sigmoid, > 0, in units of the cosine; 0.01 in the paper.
        **options: `max_class_size`, `memory_budget`, `products`, `distance`, `reducer`, `embedding_regularizer` and
            `embedding_reg_weight`, as for `RankingLoss`, which also states the cost, what an `indices_tuple` does, and
            the errors.

    Source: Brown et al., Smooth-AP: Smoothing the Path Towards Large-Scale Image Retrieval, ECCV 2020, Eq. 7; which
    rows are queries as in pytorch-metric-learning 3.
    """

    term_name = "ap_loss"

    def ranked(self) -> RankedLoss:
        return _ranked(self.temperature, self.max_class_size, self.memory_budget, self.products)


def _ranked(
    temperature: float, max_class_size: int | None, memory_budget: int | None, products: ProductMode | None
) -> RankedLoss:
    ranking = cosine_ranking(
        temperature, max_class_size, memory_budget, positive_ranks=True, products=products
    )
    dense = partial(reference.smooth_ap, temperature=temperature)
    return RankedLoss("smooth_ap", (), dense, ranking, per_pair=True)


def _of_pairs(pairs: Pairs) -> Any:
    """1 - (1 + P) / (1 + P + N) = N / (1 + P + N), without the rounding of a difference from 1."""
    assert pairs.positive_ranks is not None
    above, own = pairs.ranks, 1 + pairs.positive_ranks

    def gradients() -> PairGradients:
        scale = (above + own).square().reciprocal()
        return PairGradients(ranks=own * scale, positive_ranks=-above * scale)

    return fraction(above, own), gradients


register_query_function("smooth_ap", _of_pairs)
