"""The comparison of two runs of a benchmark: ratios, the margin, and what it says of cells that are missing."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import compare, report
from bench.cases import BENCHMARKS
from bench.report import MEBIBYTE

CELLS: dict[tuple[str, int], tuple[float, int]] = {  # seconds, MiB
    ("tritonloss", 512): (0.010, 40),
    ("tritonloss", 1024): (0.040, 80),
    ("gathered", 512): (0.020, 28),
    ("gathered", 1024): (0.120, 320),
}


def results(cells: dict[tuple[str, int], tuple[float, int]]) -> dict[str, Any]:
    """As pytest-benchmark writes them, as far as they are read; a forward pass has no peak."""
    entries = []
    for (name, n), (seconds, mebibytes) in cells.items():
        info = {"name": name, "N": n}
        entries += [
            {"extra_info": {**info, "backward": False}, "stats": {"min": seconds / 3}},
            {
                "extra_info": {**info, "backward": True, "peak_bytes": mebibytes * MEBIBYTE},
                "stats": {"min": seconds},
            },
        ]
    return {"benchmarks": entries}


def changed(**cells: tuple[float, int]) -> dict[tuple[str, int], tuple[float, int]]:
    """CELLS with some replaced: `tritonloss_512=(seconds, MiB)`."""
    return {**CELLS, **{(name.split("_")[0], int(name.split("_")[1])): cell for name, cell in cells.items()}}


@pytest.fixture
def status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The exit status of comparing a new run with the baseline of a machine."""
    baselines, new = tmp_path / "baselines", tmp_path / "new"
    baselines.mkdir()
    new.mkdir()
    monkeypatch.setattr(report, "machine", lambda: "One CPU, 3 cores")
    monkeypatch.setattr(compare, "RESULTS", baselines)

    def run(
        cells: dict[tuple[str, int], tuple[float, int]] | None, *options: str, baseline: bool = True
    ) -> int:
        if baseline:
            (baselines / "pnp-one-cpu-3-cores.json").write_text(json.dumps(results(CELLS)))
        if cells is not None:
            (new / "pnp-one-cpu-3-cores.json").write_text(json.dumps(results(cells)))
        monkeypatch.setattr(sys, "argv", ["compare", "pnp", "--new", str(new), *options])
        with pytest.raises(SystemExit) as stopped:
            compare.main()
        assert isinstance(stopped.value.code, int)
        return stopped.value.code

    return run


def test_ratios() -> None:
    found = compare.ratios(("N",), report.rows(BENCHMARKS["pnp"], results(CELLS), "min"))
    assert found == pytest.approx(
        {
            "N = 512: growth to N = 1024": 1 / 4,
            "N = 512: speed against gathered": 2,  # its memory is below LEAST_PEAK
            "N = 1024: speed against gathered": 3,
            "N = 1024: memory against gathered": 4,
        }
    )


def test_cells_of_a_few_milliseconds_are_left_out() -> None:
    table = report.rows(BENCHMARKS["pnp"], results(CELLS), "min")
    assert list(compare.ratios(("N",), table, 0.02)) == [
        "N = 1024: speed against gathered",
        "N = 1024: memory against gathered",
    ]


def test_absolute_times_are_not_compared(status, capsys: pytest.CaptureFixture[str]) -> None:
    assert status({key: (10 * seconds, size) for key, (seconds, size) in CELLS.items()}) == 0
    assert capsys.readouterr().out == "pnp: 4 ratios compared, 0 regressed\n"


@pytest.mark.parametrize(
    ("cells", "named"),
    [
        ({"gathered_1024": (0.080, 320)}, "| N = 1024: speed against gathered | 50% |"),
        ({"tritonloss_1024": (0.040, 160)}, "| N = 1024: memory against gathered | 100% |"),
        ({"tritonloss_1024": (0.072, 80)}, "| N = 512: growth to N = 1024 | 80% |"),
    ],
)
def test_regression_is_found_and_named(
    cells: dict[str, tuple[float, int]], named: str, status, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status(changed(**cells)) == 1
    assert named in capsys.readouterr().out.splitlines()


def test_improvement_is_no_regression(status, capsys: pytest.CaptureFixture[str]) -> None:
    assert status(changed(tritonloss_512=(0.006, 40), tritonloss_1024=(0.02, 36))) == 0
    assert "4 ratios compared, 0 regressed" in capsys.readouterr().out


@pytest.mark.parametrize(("seconds", "expected"), [(0.01334, 0), (0.01333, 1)])
def test_margin(seconds: float, expected: int, status, capsys: pytest.CaptureFixture[str]) -> None:
    """The rival takes 20 ms in the baseline: 13.3 ms are the edge of a margin of 50%."""
    cells = changed(gathered_512=(seconds, 28))
    assert status(cells, "--margin", "0.5") == expected
    assert status(cells, "--margin", "0.6") == 0
    assert status(CELLS, "--margin", "0") == 0


def test_missing_cells_are_named(status, capsys: pytest.CaptureFixture[str]) -> None:
    cells = {key: cell for key, cell in CELLS.items() if key != ("gathered", 1024)}
    assert status(cells) == 0
    assert capsys.readouterr().out.splitlines() == [
        "pnp: 2 ratios compared, 0 regressed",
        "  not in the new run: N = 1024: speed against gathered",
        "  not in the new run: N = 1024: memory against gathered",
    ]


def test_new_cells_are_accepted(status) -> None:
    assert status(changed(tritonloss_2048=(0.16, 160))) == 0


def test_no_baseline(status, capsys: pytest.CaptureFixture[str]) -> None:
    assert status(CELLS, baseline=False) == 2
    out = capsys.readouterr().out
    assert "no baseline for this machine, One CPU, 3 cores: bench/results/pnp-one-cpu-3-cores.json" in out


def test_no_new_run(status, capsys: pytest.CaptureFixture[str]) -> None:
    assert status(None) == 2
    assert "has no pnp-one-cpu-3-cores.json" in capsys.readouterr().out


def test_a_regression_is_measured_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "machine", lambda: "One CPU, 3 cores")
    monkeypatch.setattr(compare, "RESULTS", tmp_path)
    (tmp_path / "pnp-one-cpu-3-cores.json").write_text(json.dumps(results(CELLS)))
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    busy, worse = changed(gathered_1024=(0.03, 320)), changed(tritonloss_1024=(0.04, 320))
    for runs, expected in [([CELLS], 0), ([busy, CELLS], 0), ([worse, worse], 1), ([worse, busy], 0)]:
        left = list(runs)

        def run(name: str, options: list[str], folder: Path, left: list[Any] = left) -> None:
            (folder / compare.file_name(name)).write_text(json.dumps(results(left.pop(0))))

        monkeypatch.setattr(compare, "run", run)
        assert compare.compare_all(["pnp"], None, scratch, margin=0.3) == expected
        assert not left


def test_ratios_of_a_gpu_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    def write(folder: Path, floor: float) -> None:
        folder.mkdir(exist_ok=True)
        cells = {
            "PNP|tritonloss|1024|highest": {"seconds": 0.001, "peak_bytes": 2**25},
            "PNP|eager|1024|highest": {"seconds": 0.003, "peak_bytes": 2**26},
            "PNP|dense|1024|highest": {"skipped": "does not fit"},
            "GEMMs alone|GEMMs alone|1024|highest": {"seconds": floor, "peak_bytes": 0},
        }
        content = {"identity": {"machine": "Some GPU", "plan": "full"}, "cells": cells}
        (folder / "gpu-some-gpu.json").write_text(json.dumps(content))

    monkeypatch.setattr(report, "machine", lambda: "Some GPU")
    monkeypatch.setattr(compare, "RESULTS", tmp_path)
    write(tmp_path, 0.0008)
    assert compare.load("gpu", tmp_path / "gpu-some-gpu.json") == pytest.approx(
        {
            "PNP, N = 1024, matmul = IEEE: speed against eager": 3,
            "PNP, N = 1024, matmul = IEEE: memory against eager": 2,
            "PNP, N = 1024, matmul = IEEE: speed against GEMMs alone": 0.8,
        }
    )
    write(tmp_path / "new", 0.0004)
    assert compare.compare_all(["gpu"], tmp_path / "new", tmp_path, margin=0.3) == 1
    assert "| PNP, N = 1024, matmul = IEEE: speed against GEMMs alone | 100% |" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["compare", "gpu"])
    with pytest.raises(SystemExit, match="OUT=FOLDER make gpu-check"):
        compare.main()


def test_committed_baselines_are_compared_with_themselves() -> None:
    measured = [
        (name, file)
        for name in compare.BENCHMARKS
        for file in compare.RESULTS.glob(f"{name.replace('_', '-')}-*2-cores.json")
    ]
    assert len(measured) >= 7
    for name, file in measured:
        ratios = compare.load(name, file)
        assert any("speed against" in ratio for ratio in ratios)
        assert {finding.change for finding in compare.compare(ratios, ratios)} == {1.0}
