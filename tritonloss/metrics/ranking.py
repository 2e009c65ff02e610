"""The walk over panels of the similarity matrix: where in its ranking each query finds its relevant keys."""

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from tritonloss.backends import resolve_backend, selected_backend
from tritonloss.layout import class_ranges
from tritonloss.ops.streaming import budget_bytes, empty_scores, rows_per_block
from tritonloss.types import upcast

SIMILARITIES = ("cosine", "dot")
TIES = ("optimistic", "pessimistic", "mean")
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Fewer rows starve the matrix product: 60,502 keys take 2.0 ns a pair with 64 rows on two cores, and 3.3 with 17.
MIN_ROWS = 64
# About what the places of a relevant key and the metrics hold at a time: a dozen numbers of 8 bytes.
PAIR_BYTES = 96
# Rows that an error message names.
MOST_NAMED = 8


@dataclass(frozen=True)
class Relevant:
    """The relevant keys of some queries, in the order of the ranking, and what is known of their places in it.

    queries: [rows] int64, which queries these are. count: [rows] int64, how many relevant keys each has, at least 1.
    before: [rows, width] int64, the number of keys that certainly stand before the key; slots past `count` hold
    anything. places: [rows, width] int64, the number of places that ties leave to the key, from before + 1 on, all
    equally likely; None where it is 1.
    """

    queries: Tensor
    count: Tensor
    before: Tensor
    places: Tensor | None

    @property
    def used(self) -> Tensor:
        """[rows, width] bool: the slots that hold a key."""
        return torch.arange(self.before.shape[1], device=self.count.device) < self.count[:, None]


class Ranking:
    """Queries and keys that are ready for the walk; iterating takes the queries of one share of it.

    Arguments as those of `tritonloss.metrics.retrieval_metrics`, which are checked here.
    """

    def __init__(
        self,
        queries: Any,
        query_labels: Any,
        gallery: Any,
        gallery_labels: Any,
        similarity: str,
        ties: str,
        memory_budget: int | None,
    ) -> None:
        check_choice("similarity", similarity, SIMILARITIES)
        check_choice("ties", ties, TIES)
        check_rows(queries, "queries")
        check_labels(query_labels, queries, "query_labels", "queries")
        check_gallery(gallery, gallery_labels, queries)
        self.similarity, self.ties = similarity, ties
        self.budget = budget_bytes(queries.device, memory_budget)
        self.counter = _counter(queries.device)
        check_finite(queries, "queries")
        if gallery is not None:
            check_finite(gallery, "gallery")
        self.is_self = gallery is None
        labels = query_labels.to(torch.int64)
        sorted_labels, order = torch.sort(
            labels if self.is_self else gallery_labels.to(torch.int64), stable=True
        )
        self.keys = self._prepared(queries if self.is_self else gallery, order)
        self.start, self.size = class_ranges(labels, sorted_labels)
        if self.is_self:
            self.queries = self.keys
            # Where the row of each query is among the keys.
            self.row = torch.argsort(order)
        else:
            self.queries = self._prepared(queries, None)
            self.row = torch.arange(len(queries), device=queries.device)
        self.count = self.size - int(self.is_self)
        self.n_queries = len(queries)
        self.n_keys = len(self.keys) - int(self.is_self)
        # By the number of relevant keys, so that the rectangles of a panel have little to spare.
        by_count = torch.argsort(self.count, stable=True)
        self.ranked = by_count[int((self.count == 0).sum()) :]

    def panels(self, queries: Tensor) -> Iterator[Relevant]:
        """The relevant keys of `queries` [n], in the order of `ranked`, a panel of them at a time."""
        like = self.keys
        row_bytes = len(like) * like.element_size()
        height = rows_per_block(len(queries), len(like), like.element_size(), like.device, self.budget)
        height = max(height, min(MIN_ROWS, self.budget // row_bytes, len(queries)))
        scores = empty_scores(height, len(like), like)
        counts = self.count[queries].tolist()
        begin = 0
        while begin < len(queries):
            # No panel has a larger class than its last query.
            largest = counts[min(begin + height, len(queries)) - 1]
            end = begin + max(1, height * row_bytes // (row_bytes + PAIR_BYTES * largest))
            panel = queries[begin:end]
            yield self._relevant(panel, counts[begin + len(panel) - 1], scores[: len(panel)])
            begin += len(panel)

    def _relevant(self, panel: Tensor, width: int, scores: Tensor) -> Relevant:
        rows = self.row[panel]
        torch.mm(self._query_rows(rows), self.keys.T, out=scores)
        relevant = self._take_relevant(panel, rows, width, scores)
        slot = torch.arange(width, device=scores.device)
        strictly = self._counts(scores, relevant, strict=self.ties != "pessimistic")
        count = self.count[panel]
        if self.ties != "mean":
            return Relevant(panel, count, strictly + slot, None)
        ascending = (-relevant).masked_fill_(slot >= count[:, None], torch.inf)
        better = torch.searchsorted(ascending, ascending)
        no_worse = torch.searchsorted(ascending, ascending, right=True)
        equal = self._counts(scores, relevant, strict=False) - strictly
        return Relevant(panel, count, strictly + better, no_worse - better + equal)

    def _take_relevant(self, panel: Tensor, rows: Tensor, width: int, scores: Tensor) -> Tensor:
        """The scores of the relevant keys [rows, width], best first, +inf past their number; in `scores` they are -inf.

        So is that of the query itself: what is left above a score is irrelevant.
        """
        slot = torch.arange(width + int(self.is_self), device=scores.device)
        first = self.start[panel, None]
        # Slots past the class repeat its first column.
        columns = torch.where(slot < self.size[panel, None], first + slot, first)
        values = scores.gather(1, columns)
        absent = slot >= self.size[panel, None]
        if self.is_self:
            absent |= columns == rows[:, None]
        values = values.masked_fill_(absent, -torch.inf).sort(1, descending=True).values[:, :width]
        scores.scatter_(1, columns, -torch.inf)
        return values.masked_fill(slot[:width] >= self.count[panel, None], torch.inf).contiguous()

    def _counts(self, scores: Tensor, relevant: Tensor, *, strict: bool) -> Tensor:
        counts = torch.empty(relevant.shape, dtype=torch.int32, device=relevant.device)
        self.counter.rank_counts(scores, relevant, counts, strict=strict)
        return counts.to(torch.int64)

    def _prepared(self, rows: Tensor, order: Tensor | None) -> Tensor:
        """The rows [N, D] as factors of the product, in `order`."""
        rows = upcast(rows if order is None else rows[order])
        if self.similarity == "cosine":
            return F.normalize(scaled(rows, 1), dim=1)
        return scaled(rows, (0, 1))

    def _query_rows(self, rows: Tensor) -> Tensor:
        """The factors of a panel. A power of two for each query changes no ranking and keeps dot products normal."""
        taken = self.queries[rows]
        return taken if self.similarity == "cosine" else scaled(taken, 1)


def scaled(rows: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """The rows, or all of them together, times a power of two that brings the largest entry to between 1/2 and 1.

    Exact. Norms and products of huge entries so stay finite, those of tiny ones normal numbers.
    """
    if not rows.numel():
        return rows
    exponent = torch.frexp(rows.abs().amax(dim, keepdim=True)).exponent
    limit = 120 if rows.dtype == torch.float32 else 1000  # both the power and its inverse are normal numbers
    return torch.ldexp(rows, -exponent.clamp(-limit, limit))


def _counter(device: torch.device) -> Any:
    """The module with `rank_counts`: that of Triton where it is chosen or found, else the eager one."""
    name = selected_backend()
    resolved = resolve_backend(name, device) if name in ("auto", "triton") else "eager"
    return importlib.import_module(f"tritonloss.backends.{resolved}_metrics")


# --- arguments ---


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} is {value!r}: expected one of {', '.join(choices)}")


def check_rows(rows: Any, name: str) -> None:
    """[N, D] floating and dense, N and D at least 1."""
    if not isinstance(rows, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(rows).__name__}")
    if rows.dtype not in DTYPES:
        raise TypeError(f"{name} must be float16, bfloat16, float32 or float64, got {rows.dtype}")
    if rows.layout != torch.strided:
        raise TypeError(f"{name} must be a dense tensor, got layout {rows.layout}")
    if rows.device.type == "meta":
        raise ValueError(f"{name} must have numbers, got a tensor on the meta device")
    if rows.ndim != 2 or 0 in rows.shape:
        raise ValueError(f"{name} must have shape [N, D], at least [1, 1], got {list(rows.shape)}")


def check_labels(labels: Any, rows: Tensor, name: str, rows_name: str) -> None:
    """[N] integers on the device of the rows."""
    if not isinstance(labels, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(labels).__name__}")
    if labels.is_floating_point() or labels.is_complex():
        raise TypeError(f"{name} must be of an integer dtype or bool, got {labels.dtype}")
    if labels.shape != (len(rows),):
        raise ValueError(
            f"{name} must have shape [{len(rows)}], one label per row of {rows_name}, got {list(labels.shape)}"
        )
    if labels.device != rows.device:
        raise ValueError(f"{name} must be on {rows.device} like {rows_name}, got {labels.device}")


def check_gallery(gallery: Any, labels: Any, queries: Tensor) -> None:
    """Both or neither, and rows that can be compared with the queries."""
    if gallery is None and labels is None:
        if len(queries) < 2:
            raise ValueError("queries must have at least 2 rows where no gallery is given, got 1")
        return
    if gallery is None or labels is None:
        given, missing = ("gallery_labels", "gallery") if gallery is None else ("gallery", "gallery_labels")
        raise ValueError(f"{given} was given without {missing}: expected both or neither")
    check_rows(gallery, "gallery")
    check_labels(labels, gallery, "gallery_labels", "gallery")
    if gallery.shape[1] != queries.shape[1]:
        raise ValueError(
            f"gallery must have rows of {queries.shape[1]} numbers like queries, got {gallery.shape[1]}"
        )
    if gallery.device != queries.device:
        raise ValueError(f"gallery must be on {queries.device} like queries, got {gallery.device}")
    if upcast(gallery[:0]).dtype != upcast(queries[:0]).dtype:
        raise TypeError(
            f"gallery must be computed in the dtype of queries, {queries.dtype}, got {gallery.dtype}"
        )


def check_finite(rows: Tensor, name: str) -> None:
    """One host sync."""
    faulty = (~rows.isfinite().all(1)).nonzero().flatten()
    if n_faulty := len(faulty):
        named = ", ".join(map(str, cast("list[int]", faulty[:MOST_NAMED].tolist())))
        more = ", ..." if n_faulty > MOST_NAMED else ""
        raise ValueError(
            f"{name} must be finite: {n_faulty} of {len(rows)} rows hold NaN or infinity, those at {named}{more}"
        )
