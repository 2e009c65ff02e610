"""PNP: penalise the negatives that stand before each positive."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tritonloss import reference
from tritonloss.losses.base import check_choice, check_numbers, check_positive, refuse
from tritonloss.losses.ranking import RankedLoss, RankingLoss, RankingOptions, cosine_ranking, loss_of_ranks
from tritonloss.ops import PairGradients, Pairs, register_query_function
from tritonloss.types import LossDict, PairIndices, PNPVariant, ProductMode, Reduction, TripletIndices

if TYPE_CHECKING:
    from typing_extensions import Unpack


def pnp_loss(
    embeddings: Tensor,
    labels: Tensor,
    *,
    b: float = 2,
    alpha: float = 1,
    anneal: float = 0.01,
    variant: PNPVariant = "O",
    reduction: Reduction = "mean",
    max_class_size: int | None = None,
    memory_budget: int | None = None,
    products: ProductMode | None = None,
) -> Tensor:
    """The loss of `PNPLoss`, which has the equation, the cost and the source, without its module.

    Args:
        embeddings: [N, D], any floating dtype; normalised here.
        labels: [N], any integer dtype or bool, in any order. Only equality counts.
        reduction: "mean", or "none" for the loss of each query, [N], 0 for a query without another positive.
        b, alpha, anneal, variant, max_class_size, memory_budget, products: as for `PNPLoss`.

    Returns:
        Scalar, or [N], in the dtype of the embeddings (float32 inside autocast). Computed in float32 or float64.

    Raises:
        TypeError: embeddings that are not floating, labels that are not integers, an option that is no number or int.
        ValueError: an option out of range, as for `PNPLoss`; an unknown reduction, wrong shapes, devices that differ.
    """
    _check_options(b, alpha, anneal, variant)
    ranked = _ranked(b, alpha, anneal, variant, max_class_size, memory_budget, products)
    return loss_of_ranks(embeddings, labels, ranked, reduction)


class PNPLoss(RankingLoss):
    """Penalise the negatives that stand before each positive of each query. Signature of pytorch-metric-learning 3.

    s is the cosine similarity, R[q, i] = sum over the rows j of other classes of sigmoid((s_qj - s_qi) / anneal), for
    every row i of q's class, q included. A query's loss is the mean over i of

    | variant | f(R) |
    |---|---|
    | "O" | R |
    | "Iu" | (1 + R) ln(1 + R) |
    | "Ib" | (b R - ln(1 + b R)) / b^2 |
    | "Ds" | ln(1 + R) |
    | "Dq" | 1 - (1 + R)^-alpha |

    and the loss is the mean over the queries whose class has another row; 0 if there is none.

    `PNPLoss()(embeddings, labels)` takes embeddings [N, D] of any floating dtype and labels [N] of any integer dtype.
    Its one term, "loss", is a scalar. It takes no `reducer`.

    Args:
        b: scale of "Ib", not 0 there.
        alpha: decay of "Dq", at least 1; the paper advises 8. The gradient of "Dq" fades as R^-(alpha + 1): with a
            large batch and untrained embeddings R is in the hundreds and it vanishes. Start with "Ds", or with
            a smaller alpha, a smaller batch or a larger anneal.
        anneal: temperature of the sigmoid, > 0, in units of the cosine; 0.01 in the paper.
        variant: see the table.
        **options: `distance`, `embedding_regularizer`, `embedding_reg_weight`, `max_class_size`, `memory_budget`,
            `products`, as for `RankingLoss`, which also states the cost.

    Raises:
        TypeError: another distance, an option that is no number or int.
        ValueError: an unknown variant, an anneal that is not positive, b = 0 with "Ib", a NaN, a bound below 1; when
            called, labels that are missing, or an `indices_tuple`, `ref_emb` or `ref_labels` that is not None.

    Source: Li et al., Rethinking the Optimization of Average Precision: Only Penalizing Negative Instances before
    Positive Ones is Enough, AAAI 2022, sections "Definition of PNP" and "Variants of PNP".
    """

    def __init__(
        self,
        b: float = 2,
        alpha: float = 1,
        anneal: float = 0.01,
        variant: PNPVariant = "O",
        **options: Unpack[RankingOptions],
    ) -> None:
        _check_options(b, alpha, anneal, variant)
        if "reducer" in options:
            raise TypeError("PNPLoss takes no reducer: its one term is a scalar")
        super().__init__(anneal, **options)
        self.b, self.alpha, self.variant = b, alpha, variant

    @property
    def anneal(self) -> float:
        return self.temperature

    @anneal.setter
    def anneal(self, value: float) -> None:
        self.temperature = value

    def ranked(self) -> RankedLoss:
        bounds = self.max_class_size, self.memory_budget
        return _ranked(self.b, self.alpha, self.anneal, self.variant, *bounds, self.products)

    def mean(
        self, embeddings: Tensor, labels: Tensor, indices_tuple: PairIndices | TripletIndices | None
    ) -> Tensor:
        refuse("PNPLoss", indices_tuple=indices_tuple)
        return super().mean(embeddings, labels, None)

    def compute_loss(self, *arguments: Any) -> LossDict:
        return {"loss": {"losses": self.mean_loss(*arguments), "indices": None}}

    def extra_repr(self) -> str:
        return f"b={self.b}, alpha={self.alpha}, anneal={self.anneal}, variant={self.variant!r}"


def _ranked(
    b: float,
    alpha: float,
    anneal: float,
    variant: PNPVariant,
    max_class_size: int | None,
    memory_budget: int | None,
    products: ProductMode | None,
) -> RankedLoss:
    dense = partial(reference.pnp, b=b, alpha=alpha, anneal=anneal, variant=variant)
    return RankedLoss(
        f"pnp {variant}",
        (b, alpha),
        dense,
        cosine_ranking(anneal, max_class_size, memory_budget, products=products),
        per_pair=True,
    )


def _check_options(b: Any, alpha: Any, anneal: Any, variant: Any) -> None:
    if isinstance(b, str):
        raise TypeError(f"b must be a number, got {b!r}: did you mean variant={b!r}?")
    check_numbers(b=b, alpha=alpha)
    check_positive(anneal=anneal)
    check_choice("variant", variant, PNPVariant)
    if variant == "Ib" and b == 0:
        raise ValueError("b is 0: variant 'Ib' divides by b^2")


_Elementwise = Callable[[Tensor, float, float], Any]
# f(R) and f'(R), elementwise.
PENALTIES: dict[str, tuple[_Elementwise, _Elementwise]] = {
    "O": (lambda r, b, alpha: r, lambda r, b, alpha: 1),
    "Iu": (lambda r, b, alpha: (1 + r) * torch.log1p(r), lambda r, b, alpha: 1 + torch.log1p(r)),
    "Ib": (lambda r, b, alpha: (b * r - torch.log1p(b * r)) / b**2, lambda r, b, alpha: r / (1 + b * r)),
    "Ds": (lambda r, b, alpha: torch.log1p(r), lambda r, b, alpha: 1 / (1 + r)),
    "Dq": (
        lambda r, b, alpha: -torch.expm1(-alpha * torch.log1p(r)),
        lambda r, b, alpha: alpha * torch.exp(-(alpha + 1) * torch.log1p(r)),
    ),
}


def _of_pairs(pairs: Pairs, b: float, alpha: float, *, variant: str) -> Any:
    penalty, slope = PENALTIES[variant]
    return penalty(pairs.ranks, b, alpha), lambda: PairGradients(ranks=slope(pairs.ranks, b, alpha))


for _variant in PENALTIES:
    register_query_function(f"pnp {_variant}", partial(_of_pairs, variant=_variant))
