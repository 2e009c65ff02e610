"""The log-sum-exp losses of a query from its sums: value and derivatives in closed form.

`pair_logsumexp` gives the logarithms of the sums over the positives and over the negatives of each query, `positive`
and `negative` [Q], -inf for a sum of nothing. `scores` [Q, P] are those of its positives; `is_pair` [Q, P] bool tells
which slots hold one, and what the others hold is never used. A loss is a function of these. Its `*_maps` tell which
exponents are summed. All exponents and logarithms are natural.

The mean over a batch is the sum of `QueryTerms.values` over the sum of `QueryTerms.counted`, 0 where that is 0. What is
counted: positive pairs (NTXent), queries above 0 (SupCon, Circle), queries with a positive (InfoNCE), all queries
(MultiSimilarity).

Time and memory O(Q P). Nothing here is differentiated by autograd.
"""

from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

Number: TypeAlias = float | Tensor
SideMap: TypeAlias = tuple[Number, Number, Number]


class QueryTerms(NamedTuple):
    """Values [Q], counted [Q] int64, and the derivatives of the values by `positive`, `negative` [Q], `scores` [Q, P].

    Of an NTXent query the value is the sum over its pairs. A derivative by `scores` that is None is 0; where `is_pair`
    is False it is 0.
    """

    values: Tensor
    counted: Tensor
    grad_positive: Tensor
    grad_negative: Tensor
    grad_scores: Tensor | None


class ExponentMaps(NamedTuple):
    """The kind of exponent map, "linear" or "circle", and scale, offset and width of each side for `pair_logsumexp`."""

    kind: str
    positive: SideMap
    negative: SideMap

    def table(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The numbers as `pair_logsumexp` takes them, [2, 3], positives first; without gradient, no host sync."""
        numbers = [*self.positive, *self.negative]
        if not any(isinstance(number, Tensor) for number in numbers):
            return torch.tensor(numbers, dtype=dtype, device=device).view(2, 3)
        parts = [torch.as_tensor(number, dtype=dtype, device=device).detach() for number in numbers]
        return torch.stack(parts).view(2, 3)


def softmax_maps(scale: Number) -> ExponentMaps:
    """Of NTXent, SupCon and InfoNCE: both exponents are scale * s, the inverse of the temperature times the score."""
    side = (scale, 0.0, 0.0)
    return ExponentMaps("linear", side, side)


def multi_similarity_maps(alpha: float, beta: float, base: float) -> ExponentMaps:
    """-alpha (s - base) of positives, beta (s - base) of negatives."""
    return ExponentMaps("linear", (-alpha, alpha * base, 0.0), (beta, -beta * base, 0.0))


def circle_maps(m: float, gamma: float) -> ExponentMaps:
    """-gamma relu(1 + m - s) (s - (1 - m)) of positives, gamma relu(s + m) (s - m) of negatives.

    With y the exponent without its factor, the factor is relu(y / gamma + 2 m) on both sides.
    """
    return ExponentMaps("circle", (-gamma, gamma * (1 - m), 2 * m), (gamma, -gamma * m, 2 * m))


def _softplus(x: Tensor) -> Tensor:
    # ln(1 + e^x) to full relative accuracy; that of torch is x from 20 on.
    return -F.logsigmoid(-x)


def nt_xent_terms(
    positive: Tensor, negative: Tensor, scores: Tensor, is_pair: Tensor, *, scale: Number
) -> QueryTerms:
    """softplus(negative - scale s) of each positive, summed; counted: the number of positives. Equation 1 of SimCLR.

    A query without a negative has a loss of 0.
    """
    margin = (negative[:, None] - scale * scores).masked_fill_(~is_pair, -torch.inf)
    weight = margin.sigmoid()
    return QueryTerms(
        _softplus(margin).sum(1), is_pair.sum(1), torch.zeros_like(positive), weight.sum(1), weight * -scale
    )


def sup_con_terms(
    positive: Tensor, negative: Tensor, scores: Tensor, is_pair: Tensor, *, scale: Number
) -> QueryTerms:
    """ln(e^positive + e^negative) - mean of scale s, 0 without a positive; counted: 1 if above 0. Equation 2 of SupCon.

    Of a batch without any negative pair the loss is 0 by definition, not by this function.
    """
    terms = _mean_terms(negative, scores, is_pair, scale)
    return terms._replace(counted=(terms.values > 0).to(torch.int64))


def info_nce_terms(
    positive: Tensor,
    negative: Tensor,
    scores: Tensor,
    is_pair: Tensor,
    *,
    scale: Number,
    positives: str = "mean",
    smoothing: float = 0.0,
) -> QueryTerms:
    """-ln of the softmax of the positives; counted: 1 for a query with a positive.

    positives: "mean" is the mean of -ln softmax over the positives, "sum" is -ln of the sum of their softmax.
    smoothing: how much of the mean exponent of the positives is taken back. The mean exponent of all keys in its place
    is no function of these sums.
    """
    if positives == "mean":
        terms = _mean_terms(negative, scores, is_pair, scale)._replace(counted=is_pair.any(1).to(torch.int64))
        return _smoothed(terms, scores, is_pair, smoothing * scale) if smoothing else terms
    is_query = positive != -torch.inf
    margin = (negative - positive).masked_fill(~is_query, -torch.inf)
    weight = margin.sigmoid()
    return QueryTerms(_softplus(margin), is_query.to(torch.int64), -weight, weight, None)


def _mean_terms(negative: Tensor, scores: Tensor, is_pair: Tensor, scale: Number) -> QueryTerms:
    """ln(e^positive + e^negative) - mean of the positives' exponents, as two terms that are not negative.

    With e the logarithm of the sum over the positives, they are e - mean and softplus(negative - e). e is taken of the
    scores here, not of the sums of the block: they are rounded otherwise, and the loss of a single positive, for which
    e - mean is 0, may be far smaller than that difference.
    """
    exponents = scale * scores
    count = is_pair.sum(1, keepdim=True).clamp(min=1)
    share = is_pair / count.to(scores.dtype)
    mean = exponents.masked_fill(~is_pair, 0).sum(1, keepdim=True) / count
    above_mean = (exponents - mean).masked_fill(~is_pair, -torch.inf)
    is_query = is_pair.any(1)
    excess = torch.logsumexp(above_mean, 1).masked_fill(~is_query, 0)
    margin = (negative - (mean.squeeze(1) + excess)).masked_fill(~is_query, -torch.inf)
    weight = margin.sigmoid()
    softmax = torch.exp(above_mean - excess[:, None])
    # For a single positive softmax is its share: what is left then is exact.
    grad_scores = (softmax - share) - weight[:, None] * softmax
    return QueryTerms(
        _softplus(margin) + excess, count.squeeze(1), torch.zeros_like(weight), weight, grad_scores * scale
    )


def _smoothed(terms: QueryTerms, scores: Tensor, is_pair: Tensor, factor: Number) -> QueryTerms:
    """With factor times the mean score of the positives added."""
    assert terms.grad_scores is not None
    share = is_pair / is_pair.sum(1, keepdim=True).clamp(min=1).to(scores.dtype)
    values = terms.values + factor * (scores.masked_fill(~is_pair, 0) * share).sum(1)
    return terms._replace(values=values, grad_scores=terms.grad_scores + factor * share)


def multi_similarity_terms(
    positive: Tensor, negative: Tensor, scores: Tensor, is_pair: Tensor, *, alpha: float, beta: float
) -> QueryTerms:
    """ln(1 + e^positive) / alpha + ln(1 + e^negative) / beta; counted: 1. Equation 15 of Wang et al., CVPR 2019."""
    values = _softplus(positive) / alpha + _softplus(negative) / beta
    count = torch.ones_like(positive, dtype=torch.int64)
    return QueryTerms(values, count, positive.sigmoid() / alpha, negative.sigmoid() / beta, None)


def circle_terms(positive: Tensor, negative: Tensor, scores: Tensor, is_pair: Tensor) -> QueryTerms:
    """ln(1 + e^(positive + negative)); counted: 1 if above 0. Equation 6 of Sun et al., CVPR 2020.

    0 for a query without a positive or without a negative.
    """
    total = positive + negative
    values, weight = _softplus(total), total.sigmoid()
    return QueryTerms(values, (values > 0).to(torch.int64), weight, weight, None)
