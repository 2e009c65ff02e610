"""The pairs that an `indices_tuple` names, gathered: time and memory O(pairs x D), differentiated by autograd."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tritonloss.layout import counts_of_sorted, segment_max, segment_sum
from tritonloss.losses.base import unit_rows
from tritonloss.types import PairIndices, TripletIndices


class MinedSide(NamedTuple):
    """Pairs of one kind, by query.

    query, key: [M] int64. scores: [M], their cosines. sizes: [Q] int64, the number of pairs of each query.
    """

    query: Tensor
    key: Tensor
    scores: Tensor
    sizes: Tensor

    def logsumexp(self, exponents: Tensor) -> Tensor:
        """ln of the sum of e^x over the pairs of each query, [Q]; -inf without any. exponents: x, [M]."""
        if not self.query.shape[0]:
            return exponents.sum() + exponents.new_full(self.sizes.shape, -torch.inf)
        is_empty = self.sizes == 0
        peak = segment_max(exponents.detach(), self.query, self.sizes, -torch.inf).masked_fill(is_empty, 0)
        total = segment_sum(torch.exp(exponents - peak[self.query]), self.query, self.sizes)
        return (total.masked_fill(is_empty, 1).log() + peak).masked_fill(is_empty, -torch.inf)

    def mean(self, values: Tensor) -> Tensor:
        """The mean of values [M] over the pairs of each query, [Q]; 0 without any."""
        total = segment_sum(values, self.query, self.sizes)
        return total / self.sizes.clamp(min=1).to(values.dtype)


class MinedPairs(NamedTuple):
    positives: MinedSide
    negatives: MinedSide


def mined_pairs(
    embeddings: Tensor, ref_emb: Tensor | None, indices: PairIndices | TripletIndices, unique: bool
) -> MinedPairs:
    """The pairs of a tuple. unique: whether a pair that occurs twice counts once."""
    queries = unit_rows(embeddings)
    keys = queries if ref_emb is None else unit_rows(ref_emb)
    if isinstance(indices, TripletIndices):
        indices = PairIndices(indices.anchors, indices.positives, indices.anchors, indices.negatives)
    first, positives, second, negatives = (entry.to(queries.device, torch.int64) for entry in indices)
    return MinedPairs(
        _side(queries, keys, first, positives, unique), _side(queries, keys, second, negatives, unique)
    )


def _side(queries: Tensor, keys: Tensor, query: Tensor, key: Tensor, unique: bool) -> MinedSide:
    n_keys = max(keys.shape[0], 1)
    if unique:
        code = torch.unique(query * n_keys + key)
        query, key = code // n_keys, code % n_keys
    else:
        place = torch.argsort(query * n_keys + key)
        query, key = query[place], key[place]
    # The gradient of F.embedding is summed in a fixed order, that of an index is not.
    scores = (F.embedding(query, queries) * F.embedding(key, keys)).sum(1)
    return MinedSide(query, key, scores, counts_of_sorted(query, queries.shape[0]))


def softplus(x: Tensor) -> Tensor:
    """ln(1 + e^x), 0 with derivative 0 for -inf."""
    return -F.logsigmoid(-x)
