"""The metrics as a `torchmetrics.Metric`, for loops that have those. Importing this module needs torchmetrics."""

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tritonloss.metrics import Progress, Similarity, Ties, measures, retrieval_metrics

try:
    torchmetrics: Any = importlib.import_module("torchmetrics")
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        "tritonloss.metrics.RetrievalMetrics needs torchmetrics: install tritonloss[metrics]",
        name=missing.name,
    ) from missing

# The rows of the queries and of the gallery, and their labels.
STATES = ("queries", "query_labels", "gallery", "gallery_labels")


class RetrievalMetrics(torchmetrics.Metric):  # type: ignore[misc]
    """`retrieval_metrics` of all rows that `update` was given, as a `torchmetrics.Metric`.

    `update` keeps rows and labels, `compute` ranks. Rows are kept in their dtype, on the metric's device: O((Q + N) D),
    on every process after a sync. `compute` returns the metrics by name, [] float64 each, and leaves the number of
    queries without a relevant key in `n_left_out`. Where torchmetrics gathers the rows of several processes for
    `compute`, each of them ranks its share of all queries.

    Args:
        metrics, similarity, ties, memory_budget, progress: as of `retrieval_metrics`.
        kwargs: those of `torchmetrics.Metric`, such as process_group and sync_on_compute.

    Raises:
        TypeError, ValueError: names that are no metrics, at once; otherwise as `retrieval_metrics`, when computed.
        ModuleNotFoundError: torchmetrics is not installed, when the class is first asked for.
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = False

    queries: list[Tensor]
    query_labels: list[Tensor]
    gallery: list[Tensor]
    gallery_labels: list[Tensor]

    def __init__(
        self,
        metrics: Sequence[str] = ("mean_average_precision", "map_at_r", "r_precision", "recall_at_1"),
        similarity: Similarity = "cosine",
        ties: Ties = "optimistic",
        memory_budget: int | None = None,
        progress: Progress = None,
        **kwargs: Any,
    ) -> None:
        measures.parse(metrics)
        super().__init__(**kwargs)
        self.metrics, self.similarity, self.ties = list(metrics), similarity, ties
        self.memory_budget, self.progress = memory_budget, progress
        self.n_left_out = 0
        for state in STATES:
            self.add_state(state, default=[], dist_reduce_fx="cat")

    def update(
        self,
        queries: Tensor | None = None,
        query_labels: Tensor | None = None,
        gallery: Tensor | None = None,
        gallery_labels: Tensor | None = None,
    ) -> None:
        """Keep queries [Q, D] and their labels [Q], keys [N, D] and theirs [N], or both.

        Without any key the queries are ranked against themselves. Raises ValueError for rows without labels and for
        another number of labels than rows.
        """
        given = (queries, query_labels, gallery, gallery_labels)
        for name, rows, labels in (("query", queries, query_labels), ("gallery", gallery, gallery_labels)):
            if (rows is None) != (labels is None) or (
                rows is not None and labels is not None and rows.shape[:1] != labels.shape
            ):
                raise ValueError(f"{name} rows and labels must be given together, one label per row")
        for state, tensor in zip(STATES, given, strict=True):
            if tensor is not None:
                getattr(self, state).append(tensor.detach())

    def compute(self) -> dict[str, Tensor]:
        """The metrics of everything that was kept, by name."""
        rows, labels, gallery, gallery_labels = (_joined(getattr(self, state)) for state in STATES)
        if rows is None or labels is None:
            raise ValueError("no queries: update must be called with queries before compute")
        result = retrieval_metrics(
            rows,
            labels,
            gallery,
            gallery_labels,
            metrics=self.metrics,
            similarity=self.similarity,
            ties=self.ties,
            memory_budget=self.memory_budget,
            progress=self.progress,
            group=self._group_in_step(),
        )
        self.n_left_out = result.n_left_out
        return result.values

    def _group_in_step(self) -> Any:
        """The group whose processes are all within `compute` now, with equal rows; None without one."""
        if self._is_synced and self._to_sync and torch.distributed.is_initialized():
            return self.process_group or torch.distributed.group.WORLD
        return None


def _joined(parts: "list[Tensor] | Tensor") -> Tensor | None:
    """The rows of all updates; after a sync they are one tensor, and empty where no process had any."""
    tensors = [parts] if isinstance(parts, Tensor) else parts
    kept = [tensor for tensor in tensors if len(tensor)]
    return torch.cat(kept) if kept else None
