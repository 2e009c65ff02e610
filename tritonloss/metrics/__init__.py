"""Exact retrieval metrics, streamed over panels of the similarity matrix.

Queries are ranked against themselves, each without itself, or against a gallery. The whole ranking counts: nothing is
cut off at a number of neighbours, classes and k are of any size. What is held is a panel of similarities, never Q x N.

`retrieval_metrics` computes any number of metrics in one walk; the other functions compute one each.
`RetrievalMetrics`, a `torchmetrics.Metric`, is made when it is first asked for, and needs torchmetrics.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, TypedDict

import torch
from torch import Tensor

from tritonloss.metrics import measures
from tritonloss.metrics.processes import Share
from tritonloss.metrics.progress import Report, check_progress, reporting
from tritonloss.metrics.ranking import Ranking
from tritonloss.types import check_count

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from tritonloss.metrics.module import RetrievalMetrics as RetrievalMetrics

__all__ = [
    "Retrieval",
    "map_at_r",
    "mean_average_precision",
    "ndcg",
    "precision_at_k",
    "r_precision",
    "recall_at_k",
    "relevant_recall_at_k",
    "retrieval_metrics",
]

Similarity: TypeAlias = Literal["cosine", "dot"]
Ties: TypeAlias = Literal["optimistic", "pessimistic", "mean"]
Progress: TypeAlias = "Callable[[int, int], Any] | bool | None"


class Options(TypedDict, total=False):
    """The keyword arguments that all metrics share; see `retrieval_metrics`."""

    similarity: Similarity
    ties: Ties
    per_query: bool
    memory_budget: int | None
    progress: Progress
    group: Any


class Retrieval(NamedTuple):
    """What `retrieval_metrics` returns.

    values: each metric by its name: the mean over the ranked queries, [] float64, or with `per_query` [Q] float64, NaN
    for a query without a relevant key. n_queries: the number of ranked queries. n_left_out: the number of queries
    without a relevant key, which are in no mean.
    """

    values: dict[str, Tensor]
    n_queries: int
    n_left_out: int


@torch.no_grad()
def retrieval_metrics(
    queries: Tensor,
    query_labels: Tensor,
    gallery: Tensor | None = None,
    gallery_labels: Tensor | None = None,
    *,
    metrics: Sequence[str] = ("mean_average_precision", "map_at_r", "r_precision", "recall_at_1"),
    similarity: Similarity = "cosine",
    ties: Ties = "optimistic",
    per_query: bool = False,
    memory_budget: int | None = None,
    progress: Progress = None,
    group: Any = None,
) -> Retrieval:
    """Several metrics in one walk over the similarities.

    A key is relevant to a query if it has the query's label. Ranks are integer counts, so that the result is exact
    given the similarities, which are matrix products in float32, or in float64 for float64 rows. It does not depend on
    the memory budget but for their rounding. No gradient.

    Args:
        queries: [Q, D] float16, bfloat16, float32 or float64, finite.
        query_labels: [Q], any integer dtype or bool, on the same device. Values are opaque: only equality counts.
        gallery: [N, D] keys to rank, on the same device; half precision may meet float32. None: every query is ranked
            against the other rows of `queries`, N = Q - 1. With a gallery nothing is left out: a query that is in it
            finds itself.
        gallery_labels: [N], with `gallery` only.
        metrics: names: "mean_average_precision", "map_at_r", "r_precision", "ndcg", and with a k from 1 to N
            "recall_at_<k>", "relevant_recall_at_<k>", "precision_at_<k>", "ndcg_at_<k>", such as "recall_at_10". The
            functions of the same names say what they are.
        similarity: "cosine", or "dot" for the dot product of the rows as they are. A row of zeros has the cosine 0 with
            every other.
        ties: where relevant keys stand among irrelevant ones of equal similarity: "optimistic" before them,
            "pessimistic" behind them. "mean" is the mean over all orders of equal keys; it is there for the metrics
            that are linear in what stands at each rank: r_precision, relevant_recall, precision and ndcg.
        per_query: return the value of each query in place of the mean.
        memory_budget: bytes of a panel of similarities, at least 1; a panel has at least one row. Default:
            TRITONLOSS_MEMORY_BUDGET, else 256 MiB on a CPU and a sixteenth of the device's memory on CUDA.
        progress: called as progress(done, total), in queries, after every panel; True for a bar of tqdm.
        group: a torch.distributed process group. All of its processes call with the same arguments; each ranks its
            share of the queries, and all return the whole result. `progress` counts the share.

    Returns:
        `Retrieval`: the values, and how many queries are in the means and how many have no relevant key.

    Raises:
        TypeError: rows that are not floating, labels that are not integers, names that are no strings, dtypes that do
            not match.
        ValueError: wrong shapes or devices; an empty set of queries or keys; rows with NaN or infinity, which are
            named; gallery or gallery_labels alone; an unknown metric, similarity or `ties`; a k above N; a metric that
            has no "mean"; no query with a relevant key, unless `per_query`; in a group, arguments that differ.
        ModuleNotFoundError: progress=True without tqdm.
        RuntimeError: the chosen backend cannot serve the device; in a group, another process failed.

    Time O(Q N D) for the similarities and O(Q N P) for the counts, P the number of relevant keys of a query; with many
    of them rows are sorted, O(Q N log N). Memory above the inputs: O((Q + N) D) for the normalised rows, one panel, and
    where rows are sorted three quarters of a panel.
    """
    share = Share(group)

    def prepare() -> tuple[Ranking, list[measures.Measure]]:
        check_progress(progress)
        asked = measures.parse(metrics)
        ranking = Ranking(queries, query_labels, gallery, gallery_labels, similarity, ties, memory_budget)
        measures.check(asked, ranking.n_keys, ties)
        if not per_query and not len(ranking.ranked):
            raise ValueError("query_labels must have a label of a key: no query has a relevant key")
        return ranking, asked

    def facts(prepared: tuple[Ranking, list[measures.Measure]]) -> dict[str, Any]:
        ranking, asked = prepared
        return {
            "queries": ranking.n_queries,
            "keys": list(ranking.keys.shape),
            "dtype": ranking.keys.dtype,
            "queries with a relevant key": len(ranking.ranked),
            "metrics": [measure.name for measure in asked],
            "similarity": similarity,
            "ties": ties,
            "per_query": per_query,
        }

    ranking, asked = share.agree(prepare, facts)
    own = share.of(ranking.ranked)
    with reporting(progress, len(own), shows_bar=share.rank == 0) as report:
        part = _measured(ranking, own, asked, report)
    n_ranked = len(ranking.ranked)
    values = share.gather(part, n_ranked)
    if per_query:
        every = values.new_full((ranking.n_queries, len(asked)), torch.nan)
        every[ranking.ranked] = values
        results = every.unbind(1)
    else:
        # Contiguous, so that a metric does not depend on which others are asked for.
        results = tuple(column.contiguous().mean() for column in values.unbind(1))
    by_name = {measure.name: result for measure, result in zip(asked, results, strict=True)}
    return Retrieval(by_name, n_ranked, ranking.n_queries - n_ranked)


def _measured(ranking: Ranking, queries: Tensor, asked: Sequence[measures.Measure], report: Report) -> Tensor:
    """Every metric of `queries`: [queries, metrics] float64."""
    parts = [measures.real(torch.zeros(0, len(asked), device=queries.device))]
    done = 0
    for relevant in ranking.panels(queries):
        columns = [m.formula(relevant, ranking.n_keys if m.k is None else m.k) for m in asked]
        parts.append(torch.stack(columns, 1))
        done += len(relevant.queries)
        report(done, len(queries))
    return torch.cat(parts)


def mean_average_precision(
    queries: Tensor,
    query_labels: Tensor,
    gallery: Tensor | None = None,
    gallery_labels: Tensor | None = None,
    **options: Unpack[Options],
) -> Tensor:
    """mAP over the whole ranking: the mean over queries of AP = 1/P sum over m = 1 .. P of m / rank_m.

    P is the number of relevant keys of the query, rank_m the rank of the m-th of them among all keys, from 1 on.
    Arguments, errors and cost are those of `retrieval_metrics`, without `metrics`; no ties="mean".

    Returns [] float64 in (0, 1], or [Q] with per_query, NaN for a query without a relevant key.
    """
    return _one("mean_average_precision", queries, query_labels, gallery, gallery_labels, options)


def map_at_r(
    queries: Tensor,
    query_labels: Tensor,
    gallery: Tensor | None = None,
    gallery_labels: Tensor | None = None,
    **options: Unpack[Options],
) -> Tensor:
    """MAP@R: AP of the first P places, the mean over queries of 1/P sum over m with rank_m <= P of m / rank_m.

    Musgrave, Belongie, Lim: A Metric Learning Reality Check, ECCV 2020, section 3.2, where P is called R. P and rank_m
    are those of `mean_average_precision`; arguments, errors and cost those of `retrieval_metrics`, without `metrics`;
    no ties="mean".

    Returns [] float64 in [0, 1], or [Q] with per_query, NaN for a query without a relevant key.
    """
    return _one("map_at_r", queries, query_labels, gallery, gallery_labels, options)


def r_precision(
    queries: Tensor,
    query_labels: Tensor,
    gallery: Tensor | None = None,
    gallery_labels: Tensor | None = None,
    **options: Unpack[Options],
) -> Tensor:
    """R-precision: the share of relevant keys among the first P, where P is the number of relevant keys of the query.

    Arguments, errors and cost are those of `retrieval_metrics`, without `metrics`.

    Returns [] float64 in [0, 1], or [Q] with per_query, NaN for a query without a relevant key.
    """
    return _one("r_precision", queries, query_labels, gallery, gallery_labels, options)


def recall_at_k(
    queries: Tensor,
    query_labels: Tensor,
    gallery: Tensor | None = None,
    gallery_labels: Tensor | None = None,
    *,
    ks: int | Sequence[int] = 1,
    **options: Unpack[Options],
) -> Tensor:
    """Recall@k of metric learning: the share of queries with at least one relevant key among the first k.

    Elsewhere this is the hit rate; for the share of relevant keys that are found see `relevant_recall_at_k`.
    Arguments, errors and cost are those of `retrieval_metrics`, without `metrics`; no ties="mean".

    ks: one k, or several, each from 1 to the number of keys that a query is compared with.

    Returns float64 in [0, 1]: [] for one k and [K] for several; with per_query [Q] or [Q, K], NaN for a query without a
    relevant key.
    """
    return _at("recall", ks, queries, query_labels, gallery, gallery_labels, options)


def relevant_recall_at_k(
    queries: Tensor,
    query_labels: Tensor,
    gallery: Tensor | None = None,
    gallery_labels: Tensor | None = None,
    *,
    ks: int | Sequence[int] = 1,
    **options: Unpack[Options],
) -> Tensor:
    """Recall@k of information retrieval: the share of the relevant keys of a query that are among the first k.

    Arguments, errors and cost are those of `retrieval_metrics`, without `metrics`; `ks` and the result are those of
    `recall_at_k`.
    """
    return _at("relevant_recall", ks, queries, query_labels, gallery, gallery_labels, options)


def precision_at_k(
    queries: Tensor,
    query_labels: Tensor,
    gallery: Tensor | None = None,
    gallery_labels: Tensor | None = None,
    *,
    ks: int | Sequence[int] = 1,
    **options: Unpack[Options],
) -> Tensor:
    """Precision@k: the share of relevant keys among the first k.

    Arguments, errors and cost are those of `retrieval_metrics`, without `metrics`; `ks` and the result are those of
    `recall_at_k`.
    """
    return _at("precision", ks, queries, query_labels, gallery, gallery_labels, options)


def ndcg(
    queries: Tensor,
    query_labels: Tensor,
    gallery: Tensor | None = None,
    gallery_labels: Tensor | None = None,
    *,
    k: int | None = None,
    **options: Unpack[Options],
) -> Tensor:
    """Normalised discounted cumulative gain of the first k places, for keys that are relevant or not.

    The sum over the relevant keys with rank <= k of 1 / log2(1 + rank), divided by that of the best order. Järvelin,
    Kekäläinen: Cumulated gain-based evaluation of IR techniques, 2002, with the discount that is usual today.
    Arguments, errors and cost are those of `retrieval_metrics`, without `metrics`. k: None for all places.

    Returns [] float64 in [0, 1], or [Q] with per_query, NaN for a query without a relevant key.
    """
    if k is None:
        return _one("ndcg", queries, query_labels, gallery, gallery_labels, options)
    return _one(f"ndcg_at_{check_count('k', k)}", queries, query_labels, gallery, gallery_labels, options)


def _one(
    name: str,
    queries: Tensor,
    query_labels: Tensor,
    gallery: Tensor | None,
    gallery_labels: Tensor | None,
    options: Options,
) -> Tensor:
    result = retrieval_metrics(queries, query_labels, gallery, gallery_labels, metrics=[name], **options)
    return result.values[name]


def _at(
    kind: str,
    ks: int | Sequence[int],
    queries: Tensor,
    query_labels: Tensor,
    gallery: Tensor | None,
    gallery_labels: Tensor | None,
    options: Options,
) -> Tensor:
    """One value for an int, one more dimension for a sequence."""
    if not isinstance(ks, Sequence):
        name = f"{kind}_at_{check_count('ks', ks)}"
        return _one(name, queries, query_labels, gallery, gallery_labels, options)
    names = [f"{kind}_at_{check_count('ks', k)}" for k in ks]
    result = retrieval_metrics(queries, query_labels, gallery, gallery_labels, metrics=names, **options)
    return torch.stack([result.values[name] for name in names], -1)


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        # Only who asks for it needs torchmetrics, and waits for its import.
        if name == "RetrievalMetrics":
            return importlib.import_module("tritonloss.metrics.module").RetrievalMetrics
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
