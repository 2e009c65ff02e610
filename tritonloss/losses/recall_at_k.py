"""RecallAtK: recall at several k, with every step of it replaced by a sigmoid."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tritonloss import reference
from tritonloss.losses.base import check_count, check_positive
from tritonloss.losses.ranking import RankedLoss, RankingLoss, RankingOptions, cosine_ranking, loss_of_ranks
from tritonloss.ops import PairGradients, Pairs, register_query_function
from tritonloss.types import ProductMode, Reduction

if TYPE_CHECKING:
    from typing_extensions import Unpack


def recall_at_k_loss(
    embeddings: Tensor,
    labels: Tensor,
    *,
    ks: Sequence[int] = (1, 2, 4, 8),
    rank_temperature: float | Sequence[float] = 1.0,
    temperature: float = 0.01,
    reduction: Reduction = "mean",
    max_class_size: int | None = None,
    memory_budget: int | None = None,
    products: ProductMode | None = None,
) -> Tensor:
    """The loss of `RecallAtKLoss`, which has the equation, the cost and the source, without its module.

    Args:
        embeddings: [N, D], any floating dtype; normalised here.
        labels: [N], any integer dtype or bool, in any order. Only equality counts.
        reduction: "mean", or "none" for the loss of each query, [N], 0 for a query without another positive.
        ks, rank_temperature, temperature, max_class_size, memory_budget, products: as for `RecallAtKLoss`.

    Returns:
        Scalar, or [N], in the dtype of the embeddings (float32 inside autocast). Computed in float32 or float64.

    Raises:
        TypeError: embeddings that are not floating, labels that are not integers, options of another type.
        ValueError: no k or a k below 1, a temperature that is not positive, another number of rank temperatures than of
            ks, an unknown reduction, a bound below 1, wrong shapes, devices that differ.
    """
    check_positive(temperature=temperature)
    widths = _checked(ks, rank_temperature)
    ranked = _ranked(tuple(ks), widths, temperature, max_class_size, memory_budget, products)
    return loss_of_ranks(embeddings, labels, ranked, reduction)


class RecallAtKLoss(RankingLoss):
    """1 - recall at k, averaged over several k, each rank and each hit a sigmoid.

    s is the cosine similarity and G(x) = sigmoid(x / temperature). For a query q and another row i of its class, one of
    its positives P, the rank among all rows other than q is

        rank_i = 1 + sum over j, other than q and i, of G(s_qj - s_qi)

    and with t_k the rank temperature of k the loss of q is

        1 - mean over k of min(k, sum over i in P of sigmoid((k - rank_i) / t_k)) / min(k, |P|)

    The loss is the mean over the queries, the rows whose class has another row; 0 if there is none.

    `RecallAtKLoss()(embeddings, labels)` takes embeddings [N, D] of any floating dtype and labels [N] of any integer
    dtype, in any order, with classes of any size. Its one term, "recall_loss", has one loss for each query; the default
    reducer is their mean.

    Args:
        ks: the numbers of neighbours, each at least 1.
        rank_temperature: t_k, in units of ranks, > 0: one for all k, or one for each.
        temperature: of G, > 0, in units of the cosine.
        **options: `max_class_size`, `memory_budget`, `products`, `distance`, `reducer`, `embedding_regularizer` and
            `embedding_reg_weight`, as for `RankingLoss`, which also states the cost, what an `indices_tuple` does, and
            the errors.

    Source: Patel, Tolias, Matas, Recall@k Surrogate Loss with Large Batches and Similarity Mixup, CVPR 2022, Eq. 5 to
    8. The authors' code counts q itself among the rows that may stand above i, which adds about 1 to every rank.
    """

    term_name = "recall_loss"

    def __init__(
        self,
        ks: Sequence[int] = (1, 2, 4, 8),
        rank_temperature: float | Sequence[float] = 1.0,
        temperature: float = 0.01,
        **options: Unpack[RankingOptions],
    ) -> None:
        widths = _checked(ks, rank_temperature)
        super().__init__(temperature, **options)
        self.ks, self.rank_temperature = tuple(int(k) for k in ks), widths

    def ranked(self) -> RankedLoss:
        bounds = self.max_class_size, self.memory_budget
        return _ranked(self.ks, self.rank_temperature, self.temperature, *bounds, self.products)

    def extra_repr(self) -> str:
        return f"ks={self.ks}, rank_temperature={self.rank_temperature}, temperature={self.temperature}"


def _checked(ks: Any, rank_temperature: Any) -> tuple[float, ...]:
    """The rank temperature of each k, or an error that names the option at fault."""
    if isinstance(ks, str) or not isinstance(ks, Sequence):
        raise TypeError(f"ks must be a sequence of ints, got {type(ks).__name__}")
    if not ks:
        raise ValueError("ks is empty: expected at least one k")
    for k in ks:
        check_count("ks", k)
    each = rank_temperature if isinstance(rank_temperature, Sequence) else [rank_temperature] * len(ks)
    if len(each) != len(ks):
        raise ValueError(f"rank_temperature has {len(each)} numbers: expected one, or {len(ks)} as ks has")
    for width in each:
        check_positive(rank_temperature=width)
    return tuple(float(width) for width in each)


def _ranked(
    ks: tuple[int, ...],
    widths: tuple[float, ...],
    temperature: float,
    max_class_size: int | None,
    memory_budget: int | None,
    products: ProductMode | None,
) -> RankedLoss:
    ranking = cosine_ranking(
        temperature, max_class_size, memory_budget, positive_ranks=True, products=products
    )
    dense = partial(reference.recall_at_k, ks=ks, rank_temperature=widths, temperature=temperature)
    return RankedLoss("recall_at_k", (*map(float, ks), *widths), dense, ranking)


def _of_pairs(pairs: Pairs, *numbers: float) -> Any:
    """numbers: the ks, then the rank temperature of each."""
    half = len(numbers) // 2
    is_self = pairs.is_self
    assert pairs.positive_ranks is not None
    assert is_self is not None
    scores, temperature = pairs.scores, pairs.temperature
    own_score = pairs.sum(torch.where(is_self, scores, 0))[:, None]
    # The ranks among the positives count the query itself.
    above_self = torch.sigmoid((own_score - scores) / temperature)
    rank = 1 + pairs.ranks + pairs.positive_ranks - above_self
    n_positives = (pairs.count - 1).clamp(min=1)
    value, slope = torch.zeros_like(own_score[:, 0]), torch.zeros_like(rank)
    for k, width in zip(numbers[:half], numbers[half:], strict=True):
        hit = torch.sigmoid((k - rank) / width).masked_fill(is_self, 0)
        hits = pairs.sum(hit)
        share = 1 / (half * n_positives.clamp(max=int(k)).to(rank.dtype))
        value = value + (1 / half - hits.clamp(max=k) * share)
        slope = slope + hit * (1 - hit) * (torch.where(hits < k, share, 0) / width)[:, None]

    def gradients() -> PairGradients:
        # Slots without a pair may hold anything.
        by_rank = pairs.positives.only_pairs(slope)
        by_score = by_rank * pairs.positives.only_pairs(above_self * (1 - above_self)) / temperature
        by_score = by_score - torch.where(is_self, by_score.sum(1, keepdim=True), 0)
        return PairGradients(by_rank, by_score, by_rank)

    return torch.where(pairs.count > 0, value, 0), gradients


register_query_function("recall_at_k", _of_pairs)
