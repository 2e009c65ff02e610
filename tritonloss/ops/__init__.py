"""The streamed primitives, and the passes that losses are made of."""

from tritonloss.ops.class_labels import class_labels, negative_targets
from tritonloss.ops.library import Operator
from tritonloss.ops.memory_rank import memory_rank
from tritonloss.ops.pair_logsumexp import (
    Exponents,
    Keys,
    PairLogSumExp,
    logsumexp_total,
    logsumexp_values,
    pair_logsumexp,
    pair_ranges,
    register_logsumexp_function,
)
from tritonloss.ops.proxy_logsumexp import (
    ProxyLogSumExp,
    Repulsion,
    proxy_logsumexp,
    proxy_sums,
    proxy_total,
)
from tritonloss.ops.rank import (
    PairGradients,
    Pairs,
    QueryFunction,
    positive_scores,
    register_query_function,
)
from tritonloss.ops.semi_variance import Deviation, SemiVariance, semi_variance, semi_variance_total
from tritonloss.ops.soft_histogram import (
    Counting,
    SoftHistograms,
    distance_histogram,
    histogram_total,
    histogram_values,
    of_histograms,
    pair_histogram,
    register_histogram_function,
    running_sum,
    soft_histogram,
)
from tritonloss.ops.soft_rank import (
    Ranking,
    SoftRanks,
    counted_total,
    rank_total,
    rank_values,
    soft_rank,
    soft_rank_scores,
)
from tritonloss.ops.streaming import Panels

__all__ = [
    "Counting",
    "Deviation",
    "Exponents",
    "Keys",
    "Operator",
    "PairGradients",
    "PairLogSumExp",
    "Pairs",
    "Panels",
    "ProxyLogSumExp",
    "QueryFunction",
    "Ranking",
    "Repulsion",
    "SemiVariance",
    "SoftHistograms",
    "SoftRanks",
    "class_labels",
    "counted_total",
    "distance_histogram",
    "histogram_total",
    "histogram_values",
    "logsumexp_total",
    "logsumexp_values",
    "memory_rank",
    "negative_targets",
    "of_histograms",
    "pair_histogram",
    "pair_logsumexp",
    "pair_ranges",
    "positive_scores",
    "proxy_logsumexp",
    "proxy_sums",
    "proxy_total",
    "rank_total",
    "rank_values",
    "register_histogram_function",
    "register_logsumexp_function",
    "register_query_function",
    "running_sum",
    "semi_variance",
    "semi_variance_total",
    "soft_histogram",
    "soft_rank",
    "soft_rank_scores",
]
