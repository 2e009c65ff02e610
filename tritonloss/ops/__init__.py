"""The streamed primitives: each is one custom op with an autograd formula."""

from tritonloss.ops.block_histogram import distance_histogram, pair_histogram
from tritonloss.ops.class_labels import class_labels
from tritonloss.ops.memory_rank import memory_rank
from tritonloss.ops.per_query import QueryBlocks, query_blocks, rank_per_query, score_per_query
from tritonloss.ops.proxy_logsumexp import ProxyLogSumExp, proxy_logsumexp
from tritonloss.ops.semi_variance import SemiVariance, semi_variance
from tritonloss.ops.soft_histogram import SoftHistograms, running_sum, soft_histogram
from tritonloss.ops.soft_rank import SoftRanks, soft_rank
from tritonloss.ops.soft_rank_scores import soft_rank_scores

__all__ = [
    "ProxyLogSumExp",
    "QueryBlocks",
    "SemiVariance",
    "SoftHistograms",
    "SoftRanks",
    "class_labels",
    "distance_histogram",
    "memory_rank",
    "pair_histogram",
    "proxy_logsumexp",
    "query_blocks",
    "rank_per_query",
    "running_sum",
    "score_per_query",
    "semi_variance",
    "soft_histogram",
    "soft_rank",
    "soft_rank_scores",
]
