"""SupCon: the mean cross entropy of a query's positives among all other rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tritonloss import reference
from tritonloss.losses.logsumexp_math import sup_con_terms
from tritonloss.losses.mined import MinedPairs, softplus
from tritonloss.losses.pairwise import (
    PairLoss,
    PairOptions,
    PairRule,
    Temperature,
    above_zero,
    check_temperature,
    pair_loss,
    softmax_exponents,
    temperature_text,
)
from tritonloss.ops.pair_logsumexp import register_logsumexp_function
from tritonloss.reducers import AvgNonZeroReducer
from tritonloss.types import ProductMode, Reduction

if TYPE_CHECKING:
    from typing_extensions import Unpack


def sup_con_loss(
    embeddings: Tensor,
    labels: Tensor,
    *,
    temperature: Temperature = 0.1,
    ref_emb: Tensor | None = None,
    ref_labels: Tensor | None = None,
    reduction: Reduction = "mean",
    max_class_size: int | None = None,
    memory_budget: int | None = None,
    products: ProductMode | None = None,
) -> Tensor:
    """The loss of `SupConLoss`, which has the equation, the cost and the source, without its module.

    Args:
        embeddings: [Q, D], any floating dtype; normalised here.
        labels: [Q], any integer dtype or bool, in any order. Only equality counts.
        ref_emb, ref_labels: [N, D] and [N], rows to compare with; None for the embeddings themselves.
        reduction: "mean" over the losses above 0, or "none" for the loss of each query, [Q], 0 without a positive.
        temperature, max_class_size, memory_budget, products: as for `SupConLoss`.

    Returns:
        Scalar, or [Q], in the dtype of the embeddings (float32 inside autocast). Computed in float32 or float64.

    Raises:
        TypeError: embeddings that are not floating, labels that are not integers, an option that is no number or int.
        ValueError: a temperature that is not positive, an unknown reduction, wrong shapes, devices that differ.
    """
    check_temperature(temperature)
    rule = _rule(temperature, max_class_size, memory_budget, products)
    return pair_loss("sup_con_loss", rule, embeddings, labels, ref_emb, ref_labels, reduction)


class SupConLoss(PairLoss):
    """Supervised contrastive loss. Signature of pytorch-metric-learning.

    s is the cosine similarity. The loss of a query q with positives P is

        ln(sum over all keys j of q of e^(s_qj / temperature)) - mean over i in P of s_qi / temperature

    where the keys are its positives and negatives, and the loss is the mean over the queries whose loss is above 0; 0
    if there is none, and where the batch has no negative pair at all.

    `SupConLoss()(embeddings, labels)` takes embeddings [Q, D] of any floating dtype and labels [Q] of any integer
    dtype. Its one term, "loss", has one loss for each row, 0 for a row without a positive; the default reducer is
    `AvgNonZeroReducer`. An `indices_tuple` names the pairs in place of the labels; a pair that occurs twice counts
    once.

    Args:
        temperature: > 0, in units of the cosine; 0.1. A parameter or another floating tensor [] is learned; it must
            stay above 0, and is not read from its device.
        **options: `max_class_size`, `memory_budget`, `products`, `distance`, `reducer`, `embedding_regularizer`,
            `embedding_reg_weight`, as for `PairLoss`, which also states the cost.

    Raises:
        TypeError, ValueError: as `PairLoss`; a temperature that is no number, or not positive.

    Source: Khosla et al., Supervised Contrastive Learning, NeurIPS 2020, Eq. 2; the mean as in pytorch-metric-learning.
    """

    def __init__(self, temperature: Temperature = 0.1, **options: Unpack[PairOptions]) -> None:
        check_temperature(temperature)
        super().__init__(**options)
        self.temperature = temperature

    def default_reducer(self) -> Callable[..., Tensor]:
        return AvgNonZeroReducer()

    def rule(self) -> PairRule:
        return _rule(self.temperature, self.max_class_size, self.memory_budget, self.products)

    def extra_repr(self) -> str:
        return temperature_text(self.temperature)


def _rule(
    temperature: Temperature,
    max_class_size: int | None,
    memory_budget: int | None,
    products: ProductMode | None,
) -> PairRule:
    exponents, learnable = softmax_exponents(temperature, "sup_con")
    return PairRule(
        exponents,
        counted=above_zero,
        mined=partial(_mined, temperature=temperature),
        dense=partial(reference.sup_con, temperature=temperature),
        temperature=learnable,
        needs_negatives=True,
        max_class_size=max_class_size,
        memory_budget=memory_budget,
        products=products,
    )


def _mined(pairs: MinedPairs, temperature: Temperature) -> Tensor:
    positives, negatives = pairs
    exponents = positives.scores / temperature
    is_query = positives.sizes > 0
    positive = torch.where(is_query, positives.logsumexp(exponents), 0)
    margin = negatives.logsumexp(negatives.scores / temperature) - positive
    return torch.where(is_query, softplus(margin) + positive - positives.mean(exponents), 0)


register_logsumexp_function("sup_con", lambda *given: sup_con_terms(*given[:4], scale=given[4]))
