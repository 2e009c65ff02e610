"""The figures of the benchmarks: which lines they have, and that they are small PNG files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from bench import plots
from bench.__main__ import RESULTS
from bench.cases import BENCHMARKS
from bench.gpu_check import plan
from bench.report import MEBIBYTE, Row


def test_lines_of_a_table() -> None:
    table = {
        ("tritonloss", 1024, 10, True): Row(0.1, MEBIBYTE),
        ("tritonloss", 4096, 10, True): Row(0.2, MEBIBYTE),
        ("tritonloss", 4096, 10, False): Row(0.3, None),
        ("tritonloss", 1024, 20, True): Row(0.4, MEBIBYTE),  # a single point
        ("tritonloss", 0, 10, True): Row(0.5, MEBIBYTE),  # N = 0 stands for something else
        ("dense, compiled", 1024, 10, True): Row(0.6, MEBIBYTE),
        ("dense, compiled", 4096, 10, True): Row(0.7, MEBIBYTE),
    }
    lines = plots.by_n(("N", "C"), table)
    assert {key: {n: row.seconds for n, row in line.items()} for key, line in lines.items()} == {
        ("tritonloss", "C = 10"): {1024: 0.1, 4096: 0.2},
        ("dense, compiled", "C = 10"): {1024: 0.6, 4096: 0.7},
    }


MEASURED = [name for name in BENCHMARKS if list(RESULTS.glob(f"{name.replace('_', '-')}-*2-cores.json"))]


@pytest.mark.parametrize("benchmark_name", MEASURED)
def test_figure_of_each_benchmark(
    benchmark_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = benchmark_name.replace("_", "-")
    (file,) = RESULTS.glob(f"{name}-*2-cores.json")
    shutil.copy(file, tmp_path)
    monkeypatch.setattr(plots, "RESULTS", tmp_path)
    plots.main()
    (figure,) = tmp_path.glob("*.png")
    assert str(figure) in capsys.readouterr().out
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert 10_000 < figure.stat().st_size < 120_000


def test_a_gpu_check_has_a_figure_for_each_loss(tmp_path: Path) -> None:
    cells = {
        cell.key: {"seconds": cell.size[0] * 1e-6, "peak_bytes": cell.size[0] * MEBIBYTE}
        for cell in plan.cells(plan.PLANS["full"])
        if cell.name != "compiled"
    }
    file = tmp_path / "gpu-some-gpu.json"
    identity = {"machine": "Some GPU", "plan": "full"}
    file.write_text(json.dumps({"identity": identity, "cells": cells}))
    figures = plots.figures(file)
    assert [target.name for target, _, _ in figures] == [
        f"gpu-some-gpu-{loss.lower()}.png" for loss in plan.LOSSES
    ]
    _, title, lines = figures[0]
    assert "Some GPU" in title
    assert [name for name, _ in lines] == ["tritonloss", "GEMMs alone", "eager", "dense"]
    plots.draw(figures[-1][2], title, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size < 120_000
