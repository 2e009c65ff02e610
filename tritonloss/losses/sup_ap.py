"""SupAP: average precision with a bound from above for the rank of every negative."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tritonloss import reference
from tritonloss.backends.surrogates import upper_step
from tritonloss.losses.base import check_numbers, check_positive, fraction
from tritonloss.losses.ranking import RankedLoss, RankingLoss, RankingOptions, cosine_ranking, loss_of_ranks
from tritonloss.ops import PairGradients, Pairs, register_query_function
from tritonloss.types import ProductMode, Reduction

if TYPE_CHECKING:
    from typing_extensions import Unpack


def sup_ap_loss(
    embeddings: Tensor,
    labels: Tensor,
    *,
    temperature: float = 0.01,
    rho: float = 100,
    delta: float = 0.05,
    start: float = 0.5,
    offset: float | None = None,
    reduction: Reduction = "mean",
    max_class_size: int | None = None,
    memory_budget: int | None = None,
    products: ProductMode | None = None,
) -> Tensor:
    """The loss of `SupAPLoss`, which has the equation, the cost and the source, without its module.

    Args:
        embeddings: [N, D], any floating dtype; normalised here.
        labels: [N], any integer dtype or bool, in any order. Only equality counts.
        reduction: "mean", or "none" for the loss of each query, [N], 0 for a query without another positive.
        temperature, rho, delta, start, offset, max_class_size, memory_budget, products: as for `SupAPLoss`.

    Returns:
        Scalar, or [N], in the dtype of the embeddings (float32 inside autocast). Computed in float32 or float64.

    Raises:
        TypeError: embeddings that are not floating, labels that are not integers, an option that is no number or int.
        ValueError: an option out of range, an unknown reduction, wrong shapes, devices that differ.
    """
    check_positive(temperature=temperature)
    _check_options(rho, delta, start, offset)
    ranked = _ranked(temperature, rho, delta, start, offset, max_class_size, memory_budget, products)
    return loss_of_ranks(embeddings, labels, ranked, reduction)


class SupAPLoss(RankingLoss):
    """1 - average precision, with ranks that are counted among the positives and bounded among the negatives.

    s is the cosine similarity, P the rows of q's class, q included, and N those of the others. The loss of a query q is

        mean over i in P of N_i / (P_i + N_i),
        P_i = 1 + number of j in P with s_qj > s_qi, a constant for the gradient,
        N_i = sum over j in N of g(s_qj - s_qi)

    where g(t) is sigmoid(t / temperature) up to 0, start + sigmoid(t / temperature) up to delta, and then
    offset + rho (t - delta): at least 1 for a negative that stands above, and with a slope however far above it stands.
    The loss is the mean over the queries whose class has another row; 0 if there is none.

    `SupAPLoss()(embeddings, labels)` takes embeddings [N, D] of any floating dtype and labels [N] of any integer dtype,
    in any order, with classes of any size. Its one term, "ap_loss", has one loss for each row that has another of its
    class; the default reducer is their mean. The authors add a calibration term, a contrastive loss with its own
    margins: any contrastive loss beside this one serves.

    Args:
        temperature: of the sigmoid, > 0, in units of the cosine.
        rho: slope of the line, >= 0, per unit of the cosine.
        delta: where the line begins, >= 0, in units of the cosine.
        start: what is added to the sigmoid above 0, >= 0. 0.5 lets g begin at 1.
        offset: g at delta, >= 0. None for start + sigmoid(delta / temperature), which makes g continuous there.
        **options: `max_class_size`, `memory_budget`, `products`, `distance`, `reducer`, `embedding_regularizer` and
            `embedding_reg_weight`, as for `RankingLoss`, which also states the cost, what an `indices_tuple` does, and
            the errors. Classes of any size take the direct loop.

    Source: Ramzi et al., Robust and Decomposable Average Precision for Image Retrieval, NeurIPS 2021, Eq. 4; start and
    offset as in the authors' code, whose experiments use offset 1.44, or start 0 and offset 1.
    """

    term_name = "ap_loss"

    def __init__(
        self,
        temperature: float = 0.01,
        rho: float = 100,
        delta: float = 0.05,
        start: float = 0.5,
        offset: float | None = None,
        **options: Unpack[RankingOptions],
    ) -> None:
        _check_options(rho, delta, start, offset)
        super().__init__(temperature, **options)
        self.rho, self.delta, self.start, self.offset = rho, delta, start, offset

    def ranked(self) -> RankedLoss:
        return _ranked(
            self.temperature,
            self.rho,
            self.delta,
            self.start,
            self.offset,
            self.max_class_size,
            self.memory_budget,
            self.products,
        )

    def extra_repr(self) -> str:
        return (
            f"temperature={self.temperature}, rho={self.rho}, delta={self.delta}, start={self.start}, "
            f"offset={self.offset}"
        )


def _check_options(rho: Any, delta: Any, start: Any, offset: Any) -> None:
    given = {"rho": rho, "delta": delta, "start": start} | ({} if offset is None else {"offset": offset})
    check_numbers(**given)
    for name, value in given.items():
        if not 0 <= value < float("inf"):
            raise ValueError(f"{name} is {value}: expected a finite number of at least 0")


def _ranked(
    temperature: float,
    rho: float,
    delta: float,
    start: float,
    offset: float | None,
    max_class_size: int | None,
    memory_budget: int | None,
    products: ProductMode | None,
) -> RankedLoss:
    surrogate = upper_step(delta / temperature, rho * temperature, start, offset)
    dense = partial(
        reference.sup_ap, temperature=temperature, rho=rho, delta=delta, start=start, offset=offset
    )
    ranking = cosine_ranking(temperature, max_class_size, memory_budget, surrogate, products=products)
    return RankedLoss("sup_ap", (), dense, ranking, per_pair=True)


def _of_pairs(pairs: Pairs) -> Any:
    """1 - P / (P + N) = N / (P + N), without the rounding of a difference from 1."""
    scores = pairs.positives.only_pairs(pairs.scores, -torch.inf).contiguous()
    ascending = scores.sort(1).values
    above = pairs.ranks
    own = 1 + scores.shape[1] - torch.searchsorted(ascending, scores, right=True).to(above.dtype)

    def gradients() -> PairGradients:
        return PairGradients(ranks=own / (above + own).square())

    return fraction(above, own), gradients


register_query_function("sup_ap", _of_pairs)
