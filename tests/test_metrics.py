"""The retrieval metrics against brute force over sorted lists, and against torchmetrics where that has the metric."""

from __future__ import annotations

import functools
import importlib
import math
import pickle
from collections.abc import Callable
from itertools import pairwise, permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from checks import assert_close, assert_same, peaks_are_known, python
from processes import run_processes
from torch import Tensor
from torch.nn import functional as F

from tritonloss import metrics, use_backend
from tritonloss.backends import eager_metrics
from tritonloss.metrics import retrieval_metrics

NAMES = [
    "mean_average_precision",
    "map_at_r",
    "r_precision",
    "ndcg",
    *(f"{kind}_at_{k}" for kind in ("recall", "relevant_recall", "precision", "ndcg") for k in (1, 3, 7)),
]
LINEAR = [name for name in NAMES if name.startswith(("r_", "ndcg", "relevant", "precision"))]
# Sums of at most 100 terms of size 1 in float64, on both sides.
FLOAT64 = {"atol": 2e-14}


def batch(n: int = 60, classes: int = 12, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Embeddings without ties, and labels of any size; the first row is alone in its class."""
    generator = torch.Generator().manual_seed(n)
    labels = torch.randint(classes, (n,), generator=generator) * 10**12 - 3
    labels[0] = 5
    return torch.randn(n, 6, dtype=torch.float64, generator=generator).to(dtype), labels


def of_ranking(name: str, hits: list[bool]) -> float:
    """A metric of a ranking, best first, from its definition."""
    total = sum(hits)
    kind, _, k = name.partition("_at_")
    if name == "mean_average_precision":
        return sum(sum(hits[: i + 1]) / (i + 1) for i, hit in enumerate(hits) if hit) / total
    if name == "map_at_r":
        return sum(sum(hits[: i + 1]) / (i + 1) for i, hit in enumerate(hits[:total]) if hit) / total
    if name == "r_precision":
        return sum(hits[:total]) / total
    cut = int(k) if k else len(hits)
    if kind == "ndcg":
        best = sum(1 / math.log2(i + 2) for i in range(min(cut, total)))
        return sum(1 / math.log2(i + 2) for i, hit in enumerate(hits[:cut]) if hit) / best
    if kind == "recall":
        return float(any(hits[:cut]))
    return sum(hits[:cut]) / (total if kind == "relevant_recall" else cut)


def brute_force(
    scores: Tensor, relevant: Tensor, present: Tensor, name: str, ties: str = "optimistic"
) -> list[float]:
    """The metric of each query that has a relevant key: scores, relevant, present [Q, N]."""
    values = []
    for row, is_relevant, is_key in zip(scores.tolist(), relevant.tolist(), present.tolist(), strict=True):
        keys = [(s, r) for s, r, p in zip(row, is_relevant, is_key, strict=True) if p]
        if any(r for _, r in keys):
            best_first = sorted(keys, key=lambda key: (-key[0], key[1] != (ties == "optimistic")))
            values.append(of_ranking(name, [r for _, r in best_first]))
    return values


def against_themselves(scores: Tensor, labels: Tensor, name: str, ties: str = "optimistic") -> list[float]:
    present = ~torch.eye(len(labels), dtype=torch.bool)
    return brute_force(scores, labels[:, None] == labels, present, name, ties)


@functools.cache
def expected_of_a_batch(classes: int) -> dict[str, list[float]]:
    """Every metric of `batch(classes=classes)` against itself."""
    rows, labels = batch(classes=classes)
    return {name: against_themselves(cosine(rows, rows), labels, name) for name in NAMES}


def mean_of(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).mean()


def cosine(queries: Tensor, keys: Tensor) -> Tensor:
    return F.normalize(queries.double()) @ F.normalize(keys.double()).T


# --- values ---


@pytest.mark.parametrize(
    ("classes", "backend", "budget"),
    [
        *((classes, "eager", budget) for classes in (1, 3, 12, 40) for budget in (None, 1, 5 * 60 * 8)),
        (1, "triton", None),
        (3, "triton", 5 * 60 * 8),
        (12, "triton", 5 * 60 * 8),
        (40, "triton", None),
    ],
    indirect=["backend"],
)
def test_against_themselves(classes: int, budget: int | None, backend: str, device: torch.device) -> None:
    rows, labels = batch(classes=classes)
    result = retrieval_metrics(
        rows.to(device), labels.to(device), metrics=NAMES, per_query=True, memory_budget=budget
    )
    mean = retrieval_metrics(rows.to(device), labels.to(device), metrics=NAMES, memory_budget=budget)
    for name in NAMES:
        expected = expected_of_a_batch(classes)[name]
        values = result.values[name].cpu()
        lone = torch.tensor([(labels == label).sum() == 1 for label in labels])
        assert_same(values.isnan(), lone)
        assert_close(values[~lone], torch.tensor(expected, dtype=torch.float64), **FLOAT64)
        assert_close(mean.values[name], mean_of(expected), **FLOAT64)
        assert (result.n_queries, result.n_left_out) == (len(expected), len(labels) - len(expected))
        assert mean[1:] == result[1:]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("similarity", ["cosine", "dot"])
def test_gallery(similarity: str, overlap: bool, backend: str, device: torch.device) -> None:
    """A query that is in the gallery is a key like the others."""
    rows, labels = batch(80)
    rows *= torch.rand(80, 1, dtype=torch.float64) + 0.1  # cosine and dot differ
    queries, gallery = slice(0, 30), slice(20 if overlap else 30, 80)
    arguments = [t[part].to(device) for part in (queries, gallery) for t in (rows, labels)]
    result = retrieval_metrics(*arguments, metrics=NAMES, similarity=similarity)
    scores = (cosine if similarity == "cosine" else lambda q, k: q @ k.T)(rows[queries], rows[gallery])
    relevant = labels[queries, None] == labels[gallery]
    for name in NAMES:
        expected = brute_force(scores, relevant, torch.ones_like(relevant), name)
        assert_close(result.values[name], mean_of(expected), **FLOAT64)
    assert result.n_left_out == 30 - len(expected) > 0


def tied_batch() -> tuple[Tensor, Tensor]:
    """Small integers: dot products are exact, most are tied, and there are duplicate rows of either class."""
    generator = torch.Generator().manual_seed(3)
    return torch.randint(-1, 2, (40, 3), generator=generator).float(), torch.randint(
        5, (40,), generator=generator
    )


@pytest.mark.parametrize("ties", ["optimistic", "pessimistic"])
def test_ties(ties: str, backend: str, device: torch.device) -> None:
    rows, labels = tied_batch()
    result = retrieval_metrics(rows.to(device), labels.to(device), metrics=NAMES, ties=ties, similarity="dot")
    for name in NAMES:
        expected = against_themselves(rows @ rows.T, labels, name, ties)
        assert_close(result.values[name], mean_of(expected), **FLOAT64)


TIED = [3.0, 2, 2, 2, 1, 1, 0]
# All orders of all keys, of those that are sorted.
ORDERS = [order for order in permutations(range(7)) if all(TIED[a] >= TIED[b] for a, b in pairwise(order))]


@pytest.mark.parametrize("name", LINEAR)
def test_mean_over_ties_is_that_of_all_orders(name: str, backend: str, device: torch.device) -> None:
    """Seven keys, of which one to six are tied: every order of them."""
    for relevant in ([0, 0, 1, 0, 1, 0, 0], [1, 1, 0, 1, 0, 1, 1], [0, 1, 1, 1, 0, 0, 0]):
        values = [of_ranking(name, [bool(relevant[i]) for i in order]) for order in ORDERS]
        actual = retrieval_metrics(
            torch.ones(1, 1, device=device),
            torch.ones(1, dtype=torch.int64, device=device),
            torch.tensor(TIED, device=device)[:, None],
            torch.tensor(relevant, device=device),
            metrics=[name],
            similarity="dot",
            ties="mean",
        )
        assert_close(actual.values[name], mean_of(values), **FLOAT64)


def test_half_precision_is_computed_in_float32(backend: str, device: torch.device) -> None:
    rows, labels = batch(dtype=torch.float64)
    for dtype in (torch.float16, torch.bfloat16):
        half = rows.to(device, dtype)
        expected = retrieval_metrics(half.float(), labels.to(device), metrics=NAMES)
        assert_same(retrieval_metrics(half, labels.to(device), metrics=NAMES), expected)
        mixed = retrieval_metrics(half, labels.to(device), half.float(), labels.to(device), metrics=NAMES)
        assert_same(mixed.values, retrieval_metrics(*[half, labels.to(device)] * 2, metrics=NAMES).values)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.uint8, torch.int32])
def test_labels_of_any_integer_dtype(dtype: torch.dtype) -> None:
    rows, labels = batch(20, 2)
    labels = (labels > 0).to(dtype)
    expected = metrics.mean_average_precision(rows, labels.long())
    assert_same(metrics.mean_average_precision(rows, labels), expected)


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
@pytest.mark.parametrize("scale", [1e-38, 1e-30, 1e30, 1e38])
def test_rows_of_extreme_size(scale: float, similarity: str) -> None:
    """A power of two, so that rows are the same but for their size; products of them leave float32."""
    rows, labels = batch(dtype=torch.float32)
    expected = retrieval_metrics(rows, labels, metrics=NAMES, similarity=similarity)
    scaled = rows * 2.0 ** round(math.log2(scale) - 2 * math.copysign(1, math.log2(scale)))
    # Subnormal rows are not exactly the same: those of 1e-38 keep 16 bits or more, enough for 60 rows.
    assert_close(
        retrieval_metrics(scaled, labels, metrics=NAMES, similarity=similarity).values,
        expected.values,
        atol=0 if scale > 1e-35 else 2e-3,
    )


def test_large_classes_by_sorting(
    backend: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, labels = (t.to(device) for t in batch(120, 2, torch.float32))
    expected = retrieval_metrics(rows, labels, metrics=NAMES)
    monkeypatch.setattr(eager_metrics, "SORT_WIDTH", {"cpu": 1, "cuda": 1})
    monkeypatch.setattr("tritonloss.backends.triton_metrics.SORT_WIDTH", 1)
    assert_same(retrieval_metrics(rows, labels, metrics=NAMES), expected)


def test_backends_agree_to_the_last_bit(device: torch.device) -> None:
    rows, labels = (t.to(device) for t in batch(100, 15, torch.float32))
    results = []
    for name in ("eager", "triton", "reference"):
        with use_backend(name):
            results.append(retrieval_metrics(rows, labels, metrics=NAMES, per_query=True, memory_budget=8000))
    ranked = [{name: v[~v.isnan()] for name, v in result.values.items()} for result in results]
    assert min(len(v) for v in ranked[0].values()) > 90
    assert_same(ranked[0], ranked[1])
    assert_same(ranked[0], ranked[2])


def test_each_function_is_its_metric() -> None:
    rows, labels = batch()
    values = retrieval_metrics(rows, labels, metrics=NAMES).values
    for name in ("mean_average_precision", "map_at_r", "r_precision", "ndcg"):
        assert_same(getattr(metrics, name)(rows, labels), values[name])
    for kind in ("recall", "relevant_recall", "precision"):
        function = getattr(metrics, f"{kind}_at_k")
        several = torch.stack([values[f"{kind}_at_{k}"] for k in (7, 1)])
        assert_same(function(rows, labels, ks=(7, 1)), several)
        assert_same(function(rows, labels, ks=3), values[f"{kind}_at_3"])
        assert_same(function(rows, labels), values[f"{kind}_at_1"])
        assert function(rows, labels, ks=[1, 3], per_query=True).shape == (60, 2)
    assert_same(metrics.ndcg(rows, labels, k=3), values["ndcg_at_3"])
    assert metrics.recall_at_k(rows, labels, ks=59) == 1  # no cap on k


# --- torchmetrics ---


def test_torchmetrics_agrees() -> None:
    """All of its metrics, on the similarities; with ndcg its treatment of ties."""
    functional = pytest.importorskip("torchmetrics.functional.retrieval")
    theirs: dict[str, Callable[..., Tensor]] = {
        "mean_average_precision": functional.retrieval_average_precision,
        "r_precision": functional.retrieval_r_precision,
        "ndcg": functional.retrieval_normalized_dcg,
        "recall": functional.retrieval_hit_rate,
        "relevant_recall": functional.retrieval_recall,
        "precision": functional.retrieval_precision,
    }
    rows, labels = batch(dtype=torch.float32)
    ours = retrieval_metrics(rows, labels, metrics=NAMES, per_query=True).values
    scores = F.normalize(rows) @ F.normalize(rows).T + 2  # positives that are not above 0 do not count there
    for name in NAMES:
        kind, _, k = name.partition("_at_")
        if name == "map_at_r":
            continue
        for query in range(1, 60, 7):
            others = torch.arange(60) != query
            options = {"top_k": int(k)} if k else {}
            expected = theirs[kind](scores[query, others], (labels == labels[query])[others], **options)
            # Its sums of up to 59 terms of size 1 are in float32: 59 roundings of 6e-8.
            assert_close(ours[name][query], expected, atol=4e-6)


def test_torchmetrics_agrees_on_the_mean_over_ties() -> None:
    functional = pytest.importorskip("torchmetrics.functional.retrieval")
    rows, labels = tied_batch()
    ours = metrics.ndcg(rows, labels, similarity="dot", ties="mean", per_query=True)
    for query in range(40):
        others = torch.arange(40) != query
        expected = functional.retrieval_normalized_dcg(
            (rows @ rows[query])[others], (labels == labels[query])[others]
        )
        assert_close(ours[query], expected, atol=4e-6)


def test_torchmetrics_agrees_on_a_part_of_a_larger_set() -> None:
    functional = pytest.importorskip("torchmetrics.functional.retrieval")
    rows, labels = batch(3000, 500, torch.float32)
    ours = metrics.mean_average_precision(rows, labels, per_query=True)
    unit = F.normalize(rows.double())
    for query in range(1, 3000, 300):
        others = torch.arange(3000) != query
        expected = functional.retrieval_average_precision(
            (unit @ unit[query])[others] + 2, (labels == labels[query])[others]
        )
        # A pair of similarities within a rounding of float32 may change places, by 1 of at least rank 1 of 6 keys.
        assert_close(ours[query], expected, atol=1e-3)


UPDATES = ((0, 17), (17, 60))


def updated(metric: Any, gallery: bool = False) -> Any:
    rows, labels = batch()
    for start, stop in UPDATES:
        metric.update(rows[start:stop], labels[start:stop])
        if gallery:
            metric.update(gallery=rows[start:stop] + 1, gallery_labels=labels[start:stop])
    return metric


def test_module() -> None:
    torchmetrics = pytest.importorskip("torchmetrics")
    metric = metrics.RetrievalMetrics(NAMES)
    assert isinstance(metric, torchmetrics.Metric)
    assert metrics.RetrievalMetrics is type(metric)
    rows, labels = batch()
    expected = retrieval_metrics(rows, labels, metrics=NAMES)
    for _ in range(2):
        updated(metric)
        assert_same(metric.compute(), expected.values)
        assert metric.n_left_out == expected.n_left_out
        assert_same(pickle.loads(pickle.dumps(metric)).compute(), expected.values)
        metric.reset()
    with (
        pytest.raises(ValueError, match="no queries"),
        pytest.warns(UserWarning, match="before the ``update``"),
    ):
        metric.compute()
    against = retrieval_metrics(rows, labels, rows + 1, labels, metrics=NAMES)
    assert_same(updated(metric, gallery=True).compute(), against.values)
    batch_value = metrics.RetrievalMetrics(["ndcg"])(rows, labels)  # forward
    assert_same(batch_value["ndcg"], metrics.ndcg(rows, labels))


def test_module_checks_its_input() -> None:
    pytest.importorskip("torchmetrics")
    rows, labels = batch()
    with pytest.raises(ValueError, match="metrics has 'mAP'"):
        metrics.RetrievalMetrics(["mAP"])
    metric = metrics.RetrievalMetrics()
    with pytest.raises(ValueError, match="query rows and labels"):
        metric.update(rows)
    with pytest.raises(ValueError, match="gallery rows and labels"):
        metric.update(rows, labels, rows, labels[1:])
    assert metric.queries == []


WITHOUT = """
import sys
for name in ("torchmetrics", "tqdm"):
    sys.modules[name] = None
import torch
from tritonloss import metrics
print(metrics.mean_average_precision(torch.eye(4), torch.tensor([0, 0, 1, 1])).item() > 0)
try:
    metrics.RetrievalMetrics
except ModuleNotFoundError as error:
    print(error)
try:
    metrics.mean_average_precision(torch.eye(4), torch.tensor([0, 0, 1, 1]), progress=True)
except ModuleNotFoundError as error:
    print(error)
"""


def test_without_torchmetrics_and_tqdm() -> None:
    works, module, bar = python(WITHOUT).splitlines()
    assert works == "True"
    assert "install tritonloss[metrics]" in module
    assert "install tritonloss[metrics]" in bar


def test_an_import_brings_neither_torchmetrics_nor_tqdm() -> None:
    code = "import sys, torch; old = set(sys.modules); import tritonloss; print(set(sys.modules) - old)"
    assert not {"torchmetrics", "tqdm"} & set(python(code).replace("'", "").strip("{}\n").split(", "))


# --- processes ---


def in_a_group() -> dict[str, Any]:
    """In each of two processes: a split call, the module, and the errors."""
    import torch.distributed as dist

    rank = dist.get_rank()
    rows, labels = batch(61)
    done: list[tuple[int, int]] = []
    results: dict[str, Any] = {
        "split": retrieval_metrics(
            rows,
            labels,
            metrics=NAMES,
            per_query=True,
            group=dist.group.WORLD,
            progress=lambda *p: done.append(p),
        ),
        "mean": retrieval_metrics(rows, labels, metrics=NAMES, group=dist.group.WORLD),
        "one query": metrics.ndcg(rows[1:2], labels[1:2], rows, labels, group=dist.group.WORLD),
        "done": done,
    }
    for name, k in (("fails", 1000 if rank else 1), ("differs", 1 + rank)):
        with pytest.raises((ValueError, RuntimeError)) as raised:
            metrics.recall_at_k(rows, labels, ks=k, group=dist.group.WORLD)
        results[name] = f"{raised.type.__name__}: {raised.value}"
    if importlib.util.find_spec("torchmetrics"):
        metric = metrics.RetrievalMetrics(NAMES)
        half = slice(0, 20) if rank == 0 else slice(20, 61)
        metric.update(rows[half], labels[half])
        results["module"] = metric.compute()
    return results


def test_two_processes(tmp_path: Path) -> None:
    rows, labels = batch(61)
    expected = retrieval_metrics(rows, labels, metrics=NAMES, per_query=True)
    # Similarities of another panel are rounded otherwise; no two of them are so close that it matters.
    first, second = run_processes(2, in_a_group, tmp_path)
    for results in (first, second):
        assert_same(results["split"][1:], expected[1:])
        for name, value in expected.values.items():
            assert_close(results["split"].values[name].nan_to_num(9), value.nan_to_num(9), **FLOAT64)
        assert_close(results["mean"].values, retrieval_metrics(rows, labels, metrics=NAMES).values, **FLOAT64)
        assert_close(results["one query"], metrics.ndcg(rows[1:2], labels[1:2], rows, labels), **FLOAT64)
        if "module" in results:
            assert_close(results["module"], results["mean"].values, **FLOAT64)
        assert "process 1 has" in results["differs"] or "process 0 has" in results["differs"]
    assert first["done"][-1][0] + second["done"][-1][0] == expected.n_queries
    assert first["fails"].startswith(
        "RuntimeError: process 1 of the group failed: ValueError: k of recall_at_1000"
    )
    assert second["fails"].startswith("ValueError: k of recall_at_1000")


# --- progress ---


def test_progress_is_told_after_every_panel() -> None:
    rows, labels = batch()
    told: list[tuple[int, int]] = []
    # At most ten rows of 60 float64 each.
    metrics.ndcg(rows, labels, progress=lambda *p: told.append(p), memory_budget=60 * 8 * 10)
    n_queries = retrieval_metrics(rows, labels).n_queries
    assert 50 < n_queries < 60
    done = [0, *(d for d, _ in told)]
    assert all(0 < later - earlier <= 10 for earlier, later in pairwise(done))
    assert told[-1] == (n_queries, n_queries)
    assert {total for _, total in told} == {n_queries}


def test_progress_bar(capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tqdm")
    rows, labels = batch()
    metrics.ndcg(rows, labels, progress=True)
    n_queries = retrieval_metrics(rows, labels).n_queries
    assert f"{n_queries}/{n_queries}" in capfd.readouterr().err
    metrics.ndcg(rows, labels, progress=False)
    assert capfd.readouterr() == ("", "")


# --- what a call leaves behind, and takes ---


def test_inputs_are_untouched_and_have_no_graph() -> None:
    rows, labels = batch()
    rows.requires_grad_()
    before = rows.detach().clone(), labels.clone()
    assert not metrics.ndcg(rows, labels).requires_grad
    assert_same((rows.detach(), labels), before)


MEASURE = """
import torch
from bench.memory import peak_above
from tritonloss.metrics import retrieval_metrics

torch.set_num_threads(1)
rows = torch.randn(3000, 8)
labels = torch.arange(3000) // int(CLASS)
print(peak_above(lambda: retrieval_metrics(rows, labels, memory_budget=1 << 21), "cpu"))
"""


@peaks_are_known
@pytest.mark.parametrize("size", [4, 500])
def test_memory_is_that_of_a_panel(size: int) -> None:
    """3000 x 3000 similarities are 34 MiB; a panel is 2 MiB, sorted copies and buffers 3, rows and indices 1."""
    peak = int(python(MEASURE.replace("CLASS", str(size))))
    assert peak < 12 << 20


# --- errors ---

ROWS, LABELS = batch(12, 3, torch.float32)
NAN = ROWS.clone()
NAN[[3, 7], 1] = torch.tensor([torch.nan, -torch.inf])


@pytest.mark.parametrize(
    ("arguments", "options", "kind", "message"),
    [
        ((NAN, LABELS), {}, ValueError, r"queries must be finite: 2 of 12 rows .* at 3, 7$"),
        ((ROWS, LABELS, NAN, LABELS), {}, ValueError, r"gallery must be finite: 2 of 12"),
        ((ROWS * torch.nan, LABELS), {}, ValueError, r"12 of 12 .* 0, 1, 2, 3, 4, 5, 6, 7, \.\.\.$"),
        ((ROWS, LABELS, ROWS[:0], LABELS[:0]), {}, ValueError, r"gallery must have shape .* got \[0, 6\]"),
        ((ROWS[:0], LABELS[:0]), {}, ValueError, r"queries must have shape"),
        ((ROWS[:1], LABELS[:1]), {}, ValueError, r"at least 2 rows where no gallery"),
        ((ROWS, LABELS, ROWS), {}, ValueError, r"gallery was given without gallery_labels"),
        ((ROWS, LABELS, None, LABELS), {}, ValueError, r"gallery_labels was given without gallery"),
        ((ROWS, None), {}, TypeError, r"query_labels must be a tensor, got NoneType"),
        ((ROWS, LABELS[1:]), {}, ValueError, r"query_labels must have shape \[12\].* got \[11\]"),
        ((ROWS, LABELS.float()), {}, TypeError, r"query_labels must be of an integer dtype"),
        ((ROWS, LABELS.to("meta")), {}, ValueError, r"query_labels must be on cpu"),
        ((ROWS.long(), LABELS), {}, TypeError, r"queries must be float16"),
        ((ROWS[0], LABELS), {}, ValueError, r"queries must have shape \[N, D\]"),
        (
            (ROWS, LABELS, ROWS[:, 1:], LABELS),
            {},
            ValueError,
            r"gallery must have rows of 6 numbers .* got 5",
        ),
        ((ROWS, LABELS, ROWS.double(), LABELS), {}, TypeError, r"gallery must be computed in the dtype"),
        ((ROWS, torch.arange(12)), {}, ValueError, r"no query has a relevant key"),
        ((ROWS, LABELS), {"metrics": ["recall_at_12"]}, ValueError, r"recall_at_12 is 12: expected 1 to 11"),
        ((ROWS, LABELS), {"metrics": ["ndcg_at_0"]}, ValueError, r"ndcg_at_0 is 0: expected 1 to 11"),
        ((ROWS, LABELS), {"metrics": ["recall"]}, ValueError, r"metrics has 'recall': expected mean_average"),
        ((ROWS, LABELS), {"metrics": []}, ValueError, r"metrics is empty"),
        ((ROWS, LABELS), {"metrics": "ndcg"}, TypeError, r"metrics must be a sequence of names"),
        ((ROWS, LABELS), {"metrics": [1]}, TypeError, r"metrics must hold names"),
        ((ROWS, LABELS), {"ties": "mean"}, ValueError, r"ties is 'mean'.* mean_average_precision"),
        ((ROWS, LABELS), {"ties": "half"}, ValueError, r"ties is 'half': expected one of optimistic"),
        (
            (ROWS, LABELS),
            {"similarity": "l2"},
            ValueError,
            r"similarity is 'l2': expected one of cosine, dot",
        ),
        ((ROWS, LABELS), {"memory_budget": 0}, ValueError, r"memory_budget is 0"),
        ((ROWS, LABELS), {"progress": 3}, TypeError, r"progress must be a function"),
    ],
)
def test_bad_arguments_are_named(
    arguments: tuple[Any, ...], options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        retrieval_metrics(*arguments, **options)


def test_bad_k_is_named() -> None:
    for ks, kind in ((0, ValueError), (True, TypeError), (1.0, TypeError), ((1, -2), ValueError)):
        with pytest.raises(kind, match="ks"):
            metrics.recall_at_k(ROWS, LABELS, ks=ks)
    with pytest.raises(TypeError, match="k must be an int, got str"):
        metrics.ndcg(ROWS, LABELS, k="1")
    with pytest.raises(TypeError, match="unexpected keyword"):
        metrics.ndcg(ROWS, LABELS, top_k=1)


def test_every_query_alone_has_no_mean_but_values() -> None:
    result = retrieval_metrics(ROWS, torch.arange(12), per_query=True)
    assert (result.n_queries, result.n_left_out) == (0, 12)
    assert all(value.isnan().all() for value in result.values.values())
