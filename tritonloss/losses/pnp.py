"""PNP: penalise the negatives that stand before each positive."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tritonloss import reference
from tritonloss.backends import selected_backend
from tritonloss.distances import Distance
from tritonloss.layout import ClassLayout, segment_mean
from tritonloss.losses.base import (
    BaseMetricLossFunction,
    check_bounds,
    check_choice,
    check_embeddings,
    check_labels,
    check_numbers,
    full_precision,
    mean_of_queries,
    output_dtype,
    refuse,
    require_cosine,
    require_labels,
    unit_rows,
)
from tritonloss.ops import rank_per_query
from tritonloss.types import LossDict, PairIndices, PNPVariant, Reduction, TripletIndices, upcast


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
) -> Tensor:
    """Penalise the negatives that stand before each positive of each query (`PNPLoss` without its module).

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

    Args:
        embeddings: [N, D], any floating dtype; normalised here.
        labels: [N], any integer dtype or bool. Only equality counts.
        b: curvature of "Ib", not 0; the paper advises 2.
        alpha: decay of "Dq", at least 1; the paper advises 8. The gradient of "Dq" fades as R^-(alpha + 1): with a
            large batch and untrained embeddings R is in the hundreds and it vanishes. Start with "Ds", or with
            a smaller alpha, a smaller batch or a larger anneal.
        anneal: temperature of the sigmoid, > 0, in units of the cosine; 0.01 in the paper.
        variant: see the table.
        reduction: "mean", or "none" for the loss of each query, [N], 0 for a query without another positive.
        max_class_size: a bound of the class sizes. It replaces the call's one host sync on CUDA, so that the call can
            be captured in a CUDA graph; the device asserts it. Under torch.compile memory then grows with
            N max_class_size.
        memory_budget: bytes that similarities may take; default TRITONLOSS_MEMORY_BUDGET, else 256 MiB on CPU and a
            sixteenth of the device's memory on CUDA.

    Returns:
        Scalar, or [N], in the dtype of the embeddings (float32 inside autocast). Computed in float32 or float64.

    Time O(N^2 D + sum over classes of n^2 (N - n)), n the size of a class; for classes of about a hundred rows and more
    O(N^2 D + N G^2), G about 8 / anneal, with a relative error of a few 1e-6 in float32: see `soft_rank`. Memory
    O(memory_budget + N D), and the sum of n^2 under torch.compile.

    Raises:
        TypeError: embeddings that are not floating, labels that are not integers, an option that is no number or int.
        ValueError: an unknown variant or reduction, an anneal that is not positive, b = 0 with "Ib", a NaN, a bound
            below 1, wrong shapes, devices that differ.

    Source: Li et al., Rethinking the Optimization of Average Precision: Only Penalizing Negative Instances before
    Positive Ones is Enough, AAAI 2022, sections "Definition of PNP" and "Variants of PNP".
    """
    check_embeddings(embeddings, "embeddings")
    check_labels(labels, embeddings, "labels")
    check_options(b, alpha, anneal, variant)
    check_choice("reduction", reduction, Reduction)
    check_bounds(max_class_size=max_class_size, memory_budget=memory_budget)
    with full_precision(embeddings):
        per_query, is_query = per_query_pnp(
            embeddings,
            labels,
            b,
            alpha,
            anneal,
            variant,
            max_class_size,
            memory_budget,
            in_order=reduction == "none",
        )
        loss = per_query if reduction == "none" else mean_of_queries(per_query, is_query)
    return loss.to(output_dtype(embeddings))


class PNPLoss(BaseMetricLossFunction):
    """The loss of `pnp_loss` as a module, with pytorch-metric-learning 3's signature.

    `PNPLoss()(embeddings, labels)` takes embeddings [N, D] of any floating dtype and labels [N] of any integer dtype.
    Its one term, "loss", is a scalar. It takes no `reducer`.

    Args:
        b, alpha, anneal, variant, max_class_size, memory_budget: as for `pnp_loss`, which has the equations, the cost
            and the source. "Dq" has no gradient to speak of from a random start in a large batch: see `alpha` there.
        distance: only plain cosine similarity, ours or pytorch-metric-learning's.
        embedding_regularizer, embedding_reg_weight: as for `BaseMetricLossFunction`.

    Raises:
        TypeError: another distance, an option that is no number or int.
        ValueError: an option out of range, as for `pnp_loss`; when called, labels that are missing, or an
            `indices_tuple`, `ref_emb` or `ref_labels` that is not None.
    """

    def __init__(
        self,
        b: float = 2,
        alpha: float = 1,
        anneal: float = 0.01,
        variant: PNPVariant = "O",
        *,
        distance: Distance | None = None,
        embedding_regularizer: Callable[[Tensor], Tensor] | None = None,
        embedding_reg_weight: float = 1.0,
        max_class_size: int | None = None,
        memory_budget: int | None = None,
    ) -> None:
        check_options(b, alpha, anneal, variant)
        check_bounds(max_class_size=max_class_size, memory_budget=memory_budget)
        super().__init__(
            distance=distance,
            embedding_regularizer=embedding_regularizer,
            embedding_reg_weight=embedding_reg_weight,
        )
        require_cosine("PNPLoss", self.distance)
        self.b, self.alpha, self.anneal, self.variant = b, alpha, anneal, variant
        self.max_class_size, self.memory_budget = max_class_size, memory_budget

    def compute_loss(
        self,
        embeddings: Tensor,
        labels: Tensor | None,
        indices_tuple: PairIndices | TripletIndices | None,
        ref_emb: Tensor | None,
        ref_labels: Tensor | None,
    ) -> LossDict:
        labels = require_labels("PNPLoss", labels)
        refuse("PNPLoss", indices_tuple=indices_tuple, ref_emb=ref_emb, ref_labels=ref_labels)
        per_query, is_query = per_query_pnp(
            embeddings,
            labels,
            self.b,
            self.alpha,
            self.anneal,
            self.variant,
            self.max_class_size,
            self.memory_budget,
            in_order=False,
        )
        return {"loss": {"losses": mean_of_queries(per_query, is_query), "indices": None}}

    def extra_repr(self) -> str:
        return f"b={self.b}, alpha={self.alpha}, anneal={self.anneal}, variant={self.variant!r}"


def check_options(b: Any, alpha: Any, anneal: Any, variant: Any) -> None:
    check_numbers(b=b, alpha=alpha, anneal=anneal)
    check_choice("variant", variant, PNPVariant)
    if not anneal > 0:
        raise ValueError(f"anneal is {anneal}: expected a number above 0")
    if variant == "Ib" and b == 0:
        raise ValueError("b is 0: variant 'Ib' divides by b^2")


def per_query_pnp(
    embeddings: Tensor,
    labels: Tensor,
    b: float,
    alpha: float,
    anneal: float,
    variant: PNPVariant,
    max_class_size: int | None,
    memory_budget: int | None,
    *,
    in_order: bool = True,
) -> tuple[Tensor, Tensor]:
    """The loss of each row as a query [N], and whether it is one [N] bool; sorted by class unless `in_order`."""
    if selected_backend() == "reference":
        return reference.pnp(upcast(embeddings), labels, b=b, alpha=alpha, anneal=anneal, variant=variant)
    layout = ClassLayout.from_labels(labels)
    rows = layout.sort(unit_rows(embeddings))
    count = layout.query_count
    per_query = rank_per_query(
        rows,
        layout.start,
        count,
        lambda sums, count: segment_mean(penalty(sums.ranks, variant, b, alpha), count),
        temperature=anneal,
        max_class_size=max_class_size,
        score_limit=1,
        memory_budget=memory_budget,
    )
    is_query = count > 0
    return (layout.unsort(per_query), layout.unsort(is_query)) if in_order else (per_query, is_query)


def penalty(ranks: Tensor, variant: PNPVariant, b: float, alpha: float) -> Tensor:
    """f(R) of the variant, elementwise."""
    if variant == "O":
        return ranks
    if variant == "Ib":
        return (b * ranks - torch.log1p(b * ranks)) / b**2
    log = torch.log1p(ranks)
    if variant == "Iu":
        return (1 + ranks) * log
    if variant == "Ds":
        return log
    return -torch.expm1(-alpha * log)
