"""One registry: what has no entry is not exported, and what has one is tested, measured and in the guide."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from bench import distributed, steps
from bench.cases import BENCHMARKS, DIMENSION, OURS
from bench.gpu_check import plan
from bench.registry import LOSSES, title
from tritonloss import losses, tune

ROOT = Path(__file__).resolve().parent.parent
# Bases of losses, and a penalty that is added to one.
NO_LOSSES = {
    "BaseMetricLossFunction",
    "BaseProxyLoss",
    "PairLoss",
    "PerQueryLoss",
    "RankingLoss",
    "SemiVarianceRegularizer",
}


def test_every_exported_loss_has_an_entry() -> None:
    exported = {name for name in losses.__all__ if issubclass(getattr(losses, name), nn.Module)}
    assert exported - NO_LOSSES == set(LOSSES)
    assert exported >= NO_LOSSES


@pytest.mark.parametrize("name", LOSSES)
def test_an_entry_builds_its_loss(name: str) -> None:
    rows, labels = torch.randn(8, 4), torch.arange(8) // 4
    for module in (LOSSES[name].module(2, rows), LOSSES[name].timed(2, 4)):
        assert type(module).__name__ == name
        assert module(rows, labels).shape == ()


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_measured_everywhere(name: str) -> None:
    assert name in {loss for case in BENCHMARKS.values() for loss in case.losses}
    assert title(name) in plan.LOSSES
    assert any(cell.loss == title(name) for cell in plan.cells(plan.PLANS["full"]))
    assert steps.LOSSES is distributed.LOSSES is LOSSES
    assert isinstance(distributed.build(name), getattr(losses, name))


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_in_the_guide(name: str) -> None:
    page = (ROOT / "docs" / "choosing.md").read_text(encoding="utf-8")
    assert f"| `{name}(" in page, "a row of the table of signatures and sources"
    assert len(re.findall(rf"^\| `(?:\w+`, `)*{name}`", page, re.M)) >= 2, (
        "a row of what it does and of what it costs"
    )
    assert name in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


@pytest.mark.parametrize("benchmark_name", BENCHMARKS)
@pytest.mark.parametrize("backward", [False, True])
def test_a_step_of_a_benchmark(benchmark_name: str, backward: bool) -> None:
    case = BENCHMARKS[benchmark_name]
    sizes = {"N": 16, "classes": 4, "C": 4, "D": DIMENSION, "loss": title(case.losses[-1])}
    first = tuple(sizes[axis] for axis in case.axes)
    value = case.step(OURS, *first, backward=backward, device="cpu")()
    assert value.isfinite()
    assert not value.requires_grad


def test_every_row_of_a_benchmark_has_its_sizes() -> None:
    for case in BENCHMARKS.values():
        assert {OURS, *case.rivals} == set(case.sizes)
        assert all(len(sizes) == len(case.axes) for listed in case.sizes.values() for sizes in listed)


def test_tuning_knows_every_loss() -> None:
    assert set(tune.LOSSES) == set(LOSSES)
