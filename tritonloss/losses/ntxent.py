"""NTXent: every positive pair against all negatives of its query."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from tritonloss import reference
from tritonloss.losses.logsumexp_math import nt_xent_terms
from tritonloss.losses.mined import MinedPairs, softplus
from tritonloss.losses.pairwise import (
    PairLoss,
    PairOptions,
    PairRule,
    Temperature,
    check_temperature,
    pair_loss,
    softmax_exponents,
    temperature_text,
)
from tritonloss.ops.pair_logsumexp import register_logsumexp_function
from tritonloss.types import ProductMode, Reduction

if TYPE_CHECKING:
    from typing_extensions import Unpack


def nt_xent_loss(
    embeddings: Tensor,
    labels: Tensor,
    *,
    temperature: Temperature = 0.07,
    ref_emb: Tensor | None = None,
    ref_labels: Tensor | None = None,
    reduction: Reduction = "mean",
    max_class_size: int | None = None,
    memory_budget: int | None = None,
    products: ProductMode | None = None,
) -> Tensor:
    """The loss of `NTXentLoss`, which has the equation, the cost and the source, without its module.

    Args:
        embeddings: [Q, D], any floating dtype; normalised here.
        labels: [Q], any integer dtype or bool, in any order. Only equality counts.
        ref_emb, ref_labels: [N, D] and [N], rows to compare with; None for the embeddings themselves.
        reduction: "mean", or "none" for the loss of each positive pair, [M], by query, then by key.
        temperature, max_class_size, memory_budget, products: as for `NTXentLoss`.

    Returns:
        Scalar, or [M], in the dtype of the embeddings (float32 inside autocast). Computed in float32 or float64.

    Raises:
        TypeError: embeddings that are not floating, labels that are not integers, an option that is no number or int.
        ValueError: a temperature that is not positive, an unknown reduction, wrong shapes, devices that differ.
    """
    check_temperature(temperature)
    rule = _rule(temperature, max_class_size, memory_budget, products)
    return pair_loss("nt_xent_loss", rule, embeddings, labels, ref_emb, ref_labels, reduction)


class NTXentLoss(PairLoss):
    """Normalised, temperature-scaled cross entropy. Signature of pytorch-metric-learning.

    s is the cosine similarity. The loss of a query q and a positive i is

        ln(1 + sum over the negatives j of q of e^((s_qj - s_qi) / temperature))

    and the loss is the mean over all positive pairs; 0 if there is none. A pair of a query without negatives has a loss
    of 0, and counts.

    `NTXentLoss()(embeddings, labels)` takes embeddings [Q, D] of any floating dtype and labels [Q] of any integer
    dtype. Its one term, "loss", has one loss for each positive pair, by query. An `indices_tuple` names the pairs in
    place of the labels, each as often as it occurs.

    Args:
        temperature: > 0, in units of the cosine; 0.07. A parameter or another floating tensor [] is learned; it must
            stay above 0, and is not read from its device.
        **options: `max_class_size`, `memory_budget`, `products`, `distance`, `reducer`, `embedding_regularizer`,
            `embedding_reg_weight`, as for `PairLoss`, which also states the cost.

    Raises:
        TypeError, ValueError: as `PairLoss`; a temperature that is no number, or not positive.

    Source: Chen et al., A Simple Framework for Contrastive Learning of Visual Representations, ICML 2020, Eq. 1; with
    several positives as in pytorch-metric-learning.
    """

    def __init__(self, temperature: Temperature = 0.07, **options: Unpack[PairOptions]) -> None:
        check_temperature(temperature)
        super().__init__(**options)
        self.temperature = temperature

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
    exponents, learnable = softmax_exponents(temperature, "nt_xent")

    def mined(pairs: MinedPairs) -> Tensor:
        negative = pairs.negatives.logsumexp(pairs.negatives.scores / temperature)
        return _of_pairs(
            negative.index_select(0, pairs.positives.query), pairs.positives.scores / temperature
        )

    return PairRule(
        exponents,
        counted=lambda values, n_positives: n_positives,
        mined=mined,
        dense=partial(reference.nt_xent, temperature=temperature),
        temperature=learnable,
        of_pairs=_of_pairs,
        max_class_size=max_class_size,
        memory_budget=memory_budget,
        products=products,
    )


def _of_pairs(negative: Tensor, exponents: Tensor) -> Tensor:
    return softplus(negative - exponents)


register_logsumexp_function("nt_xent", lambda *given: nt_xent_terms(*given[:4], scale=given[4]))
