"""`python -m bench.gpu_check`, on the CPU with a plan of a few small cells: what it must never lose or print."""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checks import assert_close, python
from torch.utils.flop_counter import FlopCounterMode

from bench import rivals
from bench.gpu_check import checks, plan, progress, pytests, results, summary, worker
from tritonloss import reference
from tritonloss.backends import tables
from tritonloss.ops import sources

MAIN: Any = importlib.import_module("bench.gpu_check.__main__")
TINY = plan.PLANS["tiny"]
SMALLEST = TINY._replace(
    dimension=8, batches=(12,), proxies=((8, 3),), check_batches=(5,), precision_batch=8, panel_rows=(5,)
)


@pytest.fixture
def smallest(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process: a plan of one size, measured in three rounds."""
    monkeypatch.setitem(plan.PLANS, "tiny", SMALLEST)
    monkeypatch.setattr(worker, "MOST_ROUNDS", 3)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty file of results."""
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    path = results.file_for("cpu", "tiny", tmp_path)
    results.save(path, results.start(path, "cpu", "tiny", fresh=False))
    return path


def work(file: Path, monkeypatch: pytest.MonkeyPatch, seconds: float = 60) -> dict[str, Any]:
    """The results after the benchmark ran in this process."""
    monkeypatch.setattr(sys, "argv", ["worker", str(file), "cpu", "tiny", str(seconds)])
    precision = torch.get_float32_matmul_precision()
    worker.main()
    torch.set_float32_matmul_precision(precision)
    return results.load(file)


def run_main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int | str | None:
    """The exit status of `python -m bench.gpu_check`."""
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--device", "cpu", "--plan", "tiny", *arguments])
    with pytest.raises(SystemExit) as stopped:
        MAIN.main()
    return stopped.value.code


# --- the whole ---


def test_whole_run_then_a_second_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    # Quicker: without the interpreter, which other tests have, and without threads that wait for each other.
    plain = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    monkeypatch.setattr(MAIN, "environment", lambda device: {**plain, "OMP_NUM_THREADS": "1"})
    monkeypatch.setattr(results, "RESULTS", tmp_path / "nothing")
    tests = tmp_path / "test_it.py"
    tests.write_text("def test_right(): pass\ndef test_wrong(): raise ValueError\n")
    arguments = ["--out", str(tmp_path / "out"), "--tests", str(tests)]
    assert run_main(monkeypatch, *arguments) == 1  # a test failed

    (file,) = (tmp_path / "out").glob("*.json")
    first = results.load(file)
    assert set(first["cells"]) == {cell.key for cell in plan.cells(TINY)}
    (errors,) = [cell for cell in first["cells"].values() if "errors" in cell]
    assert all(
        cell["seconds"] >= cell["forward_seconds"] > 0 for cell in first["cells"].values() if cell != errors
    )
    assert {check["passed"] for check in first["checks"].values()} == {True}
    assert first["tests"]["counts"] == {"passed": 1, "failed": 1}
    text = file.with_suffix(".md").read_text()
    assert text in capfd.readouterr().out
    assert "test_wrong" in text
    for loss in plan.LOSSES:
        assert f"## {loss}\n" in text
    assert "## Precision of the GEMMs" in text

    tests.write_text("def test_right(): raise ValueError\ndef test_wrong(): pass\n")
    key = plan.cells(TINY)[3].key
    old = first["cells"].pop(key)
    results.save(file, first)
    assert run_main(monkeypatch, *arguments) == 0  # what had passed is not run again
    second = results.load(file)
    assert second["tests"]["counts"] == {"passed": 2}
    new = second["cells"].pop(key)
    assert new["seconds"] != old["seconds"]
    assert second["cells"] == first["cells"]  # to the last digit: nothing else was measured again


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run_main(monkeypatch, "--device", "cuda") == 2
    assert "--device cpu" in capsys.readouterr().out


# --- results ---


def test_results_of_other_code_are_not_continued(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = results.load(file)
    found["cells"] = {"good": {"seconds": 1.0}, "bad": {"failed": "out of memory"}}
    found["checks"] = {"PNP": {"passed": True}, "FastAP": {"passed": False}}
    results.save(file, found)
    again = results.start(file, "cpu", "tiny", fresh=False)
    assert again["cells"] == {"good": {"seconds": 1.0}}
    assert again["checks"] == {"PNP": {"passed": True}}
    assert results.start(file, "cpu", "tiny", fresh=True)["cells"] == {}
    elsewhere = file.parent / "elsewhere" / file.name
    assert (
        results.start(elsewhere, "cpu", "tiny", fresh=False)["cells"] == again["cells"]
    )  # the committed ones
    monkeypatch.setattr(results, "source_hash", lambda: "other")
    assert results.start(file, "cpu", "tiny", fresh=False)["cells"] == {}


def test_every_result_is_on_disk_before_the_next_is_begun(
    file: Path, smallest: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def measure(cell: plan.Cell, *_: Any) -> dict[str, Any]:
        seen.append(
            (len(results.load(file)["cells"]), results.load(file)["running"] == f"measure {cell.key}")
        )
        return {"seconds": 1.0}

    monkeypatch.setattr(worker, "measure", measure)
    monkeypatch.setattr(checks, "check", lambda *_: "")
    work(file, monkeypatch)
    assert seen == [(index, True) for index in range(len(plan.cells(SMALLEST)))]


def test_unreadable_cache_costs_no_figure(
    file: Path, smallest: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tuning = tmp_path / "tables" / tables.file_name("GPU")
    tuning.parent.mkdir()
    tuning.write_text("{}")
    monkeypatch.setenv("TRITONLOSS_TUNING_DIR", str(tuning.parent))
    monkeypatch.setattr(worker, "measure", lambda *_: {"seconds": 1.0})
    monkeypatch.setattr(checks, "check", lambda *_: "")
    found = work(file, monkeypatch)
    assert {cell["seconds"] for cell in found["cells"].values()} == {1.0}
    assert all("cannot be read" in line for line in found["tuned"])
    tables.write(tuning, "GPU", tables.Table({"key": {"BLOCK_N": 256, "num_warps": 4}}, complete=False))
    assert len(worker.tuned()) == 1


def test_no_cell_is_begun_after_the_time(file: Path, smallest: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert work(file, monkeypatch, seconds=-1)["cells"] == {}


# --- no figure for a wrong loss ---


def test_no_figure_while_the_check_fails(file: Path, smallest: None, monkeypatch: pytest.MonkeyPatch) -> None:
    check = checks.check

    def fail(loss: str, *arguments: Any) -> str:
        if loss == "PNP":
            raise AssertionError("it is wrong")
        return check(loss, *arguments)

    monkeypatch.setattr(checks, "check", fail)
    found = work(file, monkeypatch)
    assert not any(key.startswith("PNP") for key in found["cells"])
    assert any(key.startswith("FastAP") for key in found["cells"])
    text = summary.text(found)
    assert "PNP against the float64 reference: WRONG" in text
    assert "AssertionError: it is wrong" in text
    assert "## PNP" not in text
    assert "## FastAP" in text
    assert not list(summary.verdicts(found))


@pytest.mark.parametrize("loss", plan.LOSSES)
def test_check_accepts_every_loss(loss: str, device: torch.device) -> None:
    assert "eager and triton" in checks.check(loss, SMALLEST, device.type)


@pytest.mark.parametrize("part", ["value", "gradient"])
def test_check_finds_a_wrong(part: str, monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    class Wrong(torch.nn.Module):
        def __init__(self, size: plan.Size, dimension: int, **options: Any) -> None:
            super().__init__()
            self.right = plan.LOSSES["PNP"].build(size, dimension, **options)

        def forward(self, rows: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            loss = self.right(rows, labels)
            if checks.triton_unusable(rows.device) or rows.dtype == torch.float64:
                return loss
            wrong = 1.01 * loss
            return wrong if part == "value" else wrong - 0.01 * loss.detach()

    monkeypatch.setitem(plan.LOSSES, "FastAP", plan.Loss(Wrong, {}))
    monkeypatch.setattr(checks, "HISTOGRAM_GRADIENT", {})
    with pytest.raises(AssertionError, match=rf"eager, torch\.float32, N = 5.*a?{part} is off by 0\.01"):
        checks.check("FastAP", SMALLEST, device.type)


def test_no_ratio_to_another_value() -> None:
    def cell(value: float, seconds: float) -> dict[str, Any]:
        return {
            "value": value,
            "gradient_norm": 1.0,
            "seconds": seconds,
            "forward_seconds": seconds / 4,
            "peak_bytes": 3 * 2**20,
        }

    def of(name: str) -> str:
        return summary._text(cells, "PNP", name, (32,), "highest")

    cells = {
        plan.Cell("PNP", name, (32,)).key: cell(value, seconds)
        for name, value, seconds in [("tritonloss", 2, 0.004), ("eager", 2.0001, 0.012), ("dense", 2.001, 1)]
    }
    assert of("tritonloss") == "1 / 4, 3 MiB"
    assert of("eager") == "3 / 12 (3x), 3 MiB"
    assert of("dense") == "another value: 2.001, not 2"
    assert of("compiled") == ""


@pytest.mark.parametrize(
    ("dense", "exact"), [(rivals.pnp_dense, reference.pnp), (rivals.smooth_ap_dense, reference.smooth_ap)]
)
def test_dense_rivals(dense: Any, exact: Any) -> None:
    rows = torch.randn(10, 4, dtype=torch.float64)
    labels = torch.tensor([0, 1, 2] * 3 + [0])
    assert_close(dense(rows, labels), exact(rows, labels)[0].mean(), rtol=1e-12)


# --- what is measured ---


def test_plan_has_every_size_once() -> None:
    full = plan.PLANS["full"]
    cells = plan.cells(full)
    assert cells[0] == plan.Cell("PNP", "tritonloss", (1024,))
    assert len({cell.key for cell in cells}) == len(cells)
    for loss, case in plan.LOSSES.items():
        for size in plan.sizes(loss, full):
            for name in ("tritonloss", *case.rivals):
                assert plan.Cell(loss, name, size) in cells
            for matmul in plan.MODES:
                assert plan.Cell(loss, "tritonloss", size, matmul) in cells
            for matmul in ("highest", "high"):
                assert plan.Cell(plan.FLOOR, plan.FLOOR, size, matmul) in cells
    heights = [cell.name for cell in cells if cell.loss == plan.PANELS]
    assert heights == [f"{rows} rows" for rows in (64, 128, 256, 512, 1024, 2048, 4096, 8192)]


@pytest.mark.parametrize("matmul", plan.MODES)
@pytest.mark.parametrize("loss", ["PNP", "ProxyAnchor"])
def test_modes(loss: str, matmul: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each multiplies as it says, and all have the same value, but for the rounding of the rows."""
    prepared: list[tuple[str, torch.dtype]] = []
    original = sources.prepare

    def spy(rows: torch.Tensor, *, mode: str, **options: Any) -> Any:
        prepared.append((mode, rows.dtype))
        return original(rows, mode=mode, **options)

    monkeypatch.setattr(sources, "prepare", spy)
    monkeypatch.setattr(worker, "MOST_ROUNDS", 3)
    monkeypatch.setenv("TRITONLOSS_PRODUCTS", "auto")  # to be restored
    size = (32, 12) if loss == "ProxyAnchor" else (32,)
    found = []
    for mode in ("highest", matmul):
        prepared.clear()
        found.append(worker.measure(plan.Cell(loss, "tritonloss", size, mode), TINY, "cpu"))
    assert abs(found[1]["value"] / found[0]["value"] - 1) <= (5e-2 if "16" in matmul else 1e-4)
    is_split = plan.MODES[matmul][1] == "split"
    assert set(prepared) == {("split" if is_split else "ieee", plan.MODES[matmul][2])}


def test_panels_of_a_height(monkeypatch: pytest.MonkeyPatch) -> None:
    heights: list[int] = []
    original = sources.Products.scores

    def spy(self: Any, rows: slice, first_key: int = 0) -> torch.Tensor:
        heights.append(rows.stop - rows.start)
        return original(self, rows, first_key)

    monkeypatch.setattr(sources.Products, "scores", spy)
    worker.first_run(plan.step(plan.Cell(plan.PANELS, "12 rows", (32,), "bfloat16"), 16, "cpu"))
    assert heights == [12, 12, 8]


def test_measurement(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "MOST_ROUNDS", 3)
    found = {
        name: worker.measure(plan.Cell("PNP", name, (64,)), TINY, device.type)
        for name in ("tritonloss", "eager")
    }
    for cell in found.values():
        assert cell["rounds"] == 3
        assert cell["seconds"] >= cell["forward_seconds"] > 0
        assert (cell["peak_bytes"] is None) == (device.type == "cpu")
    assert summary.agrees(found["eager"], found["tritonloss"])


def test_rounds_start_from_the_inputs_alone() -> None:
    step = plan.step(plan.Cell("ProxyAnchor", "tritonloss", (32, 12)), 16, "cpu")
    _, norm = worker.first_run(step)
    assert len(step.leaves) == 2
    worker.Timer("cpu")(step)
    assert float(step.leaves[0].grad.norm()) == norm  # not twice as much


@pytest.mark.parametrize("columns", [40, 7])
def test_floor_is_the_three_products(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "GEMM_BLOCK_BYTES", 4 * columns * 7)  # blocks of 7 rows, the last smaller
    step = plan.gemms((40, columns), 16, "cpu")
    with FlopCounterMode(display=False) as counter:
        step.backward(step.forward())
    assert counter.get_total_flops() == 3 * 2 * 40 * columns * 16


def test_rivals_that_do_not_fit_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (130 * 2**30, 140 * 2**30))
    fits = {
        (loss, name, n): worker.does_not_fit(plan.Cell(loss, name, (n,)), "cuda") is None
        for loss, name, n in [
            ("PNP", "dense", 1024),
            ("PNP", "dense", 4096),
            ("PNP", "eager", 32768),
            ("FastAP", "eager", 32768),
            ("PNP", "tritonloss", 32768),
        ]
    }
    assert list(fits.values()) == [True, False, True, False, True]
    assert worker.does_not_fit(plan.Cell("PNP", "dense", (4096,)), "cpu") is None


# --- processes that crash or hang ---


@pytest.mark.parametrize(
    ("end", "why"),
    [
        ("os.kill(os.getpid(), 11)", "its process ended with status -11"),
        ("time.sleep(60)", "stopped after 2 s"),
        ("found['cells']['a'] = {'failed': 'CUDA error'}; save(file, found); sys.exit(3)", "CUDA error"),
    ],
)
def test_crash_costs_one_result(
    end: str, why: str, file: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    code = f"""
import json, os, sys, time
def save(file, found):
    open(file, "w").write(json.dumps(found))
file = sys.argv[1]
found = json.load(open(file))
if "a" not in found["cells"]:
    found["running"] = "measure a"
    save(file, found)
    {end}
found["cells"]["b"] = {{"seconds": 1.0}}
save(file, found)
"""
    monkeypatch.setattr(MAIN, "WORKER", (sys.executable, "-c", code))
    monkeypatch.setattr(MAIN, "CELL_SECONDS", 2)
    MAIN.benchmark(file, SimpleNamespace(device="cpu", plan="tiny"), time.monotonic() + 60)
    assert results.load(file)["cells"] == {"a": {"failed": why}, "b": {"seconds": 1.0}}


def test_process_is_stopped_at_the_end_of_the_time(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MAIN, "WORKER", (sys.executable, "-c", "import time; time.sleep(60)"))
    monkeypatch.setattr(MAIN, "LEAST_SECONDS", 0)
    begin = time.monotonic()
    MAIN.benchmark(file, SimpleNamespace(device="cpu", plan="tiny"), begin + 1)
    assert time.monotonic() - begin < 20


def test_worker_asks_for_a_new_process_when_the_context_is_lost(
    file: Path, smallest: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*_: Any) -> dict[str, Any]:
        raise RuntimeError("CUDA error: an illegal memory access\nsecond line")

    monkeypatch.setattr(worker, "measure", lost)
    monkeypatch.setattr(worker, "is_broken", lambda device: True)
    monkeypatch.setattr(checks, "check", lambda *_: "")
    with pytest.raises(SystemExit) as stopped:
        work(file, monkeypatch)
    assert stopped.value.code == worker.NEW_PROCESS
    failed = {"failed": "RuntimeError: CUDA error: an illegal memory access"}
    assert results.load(file)["cells"] == {plan.cells(SMALLEST)[0].key: failed}


# --- the tests that it runs ---


def test_files_of_the_gpu_exist_and_kernels_come_first() -> None:
    for pattern in pytests.PATTERNS:
        assert list(pytests.TESTS.glob(pattern)), pattern
    names = [file.name for file in pytests.files()]
    kernels = [name for name in names if name.startswith("test_kernels_")]
    assert names[: len(kernels)] == kernels
    assert len(set(names)) == len(names)


def test_what_cannot_run_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs, free = tmp_path / "test_needs.py", tmp_path / "test_free.py"
    needs.write_text("import os\nimport not_there.part\nfrom checks import ROOT\n")
    free.write_text("import os\ndef test():\n    import not_there\n")
    assert pytests.runnable([needs, free]) == ([free], ["test_needs.py was not run: not_there not installed"])
    is_there = pytests.is_there
    monkeypatch.setattr(pytests, "is_there", lambda module: module != "hypothesis" and is_there(module))
    assert pytests.runnable([free]) == ([], ["no test was run: hypothesis not installed"])
    found = pytests.run([free], "cpu", tmp_path / "outcomes", 60)
    assert found["not_run"] == ["no test was run: hypothesis not installed"]
    assert found["counts"] == {}


def test_outcomes_outlive_a_kill(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "test_it.py"
    file.write_text(
        "import os\ndef test_a(): pass\ndef test_b(): os.kill(os.getpid(), 9)\ndef test_c(): pass\n"
    )
    found = pytests.run([file], "cpu", tmp_path / "outcomes", 60)
    assert found["counts"] == {"passed": 1}
    assert found["not_run"] == ["pytest ended with status -9"]
    assert not found["finished"]
    found = pytests.run([file], "cpu", tmp_path / "outcomes", 0.1)
    assert found["counts"] == {"passed": 1}
    assert found["not_run"] == ["stopped after 0 s; the next run goes on with the rest"]
    assert not found["finished"]
    file.write_text("def test_a(): raise ValueError\ndef test_b(): pass\ndef test_c(): pass\n")
    found = pytests.run([file], "cpu", tmp_path / "outcomes", 60)
    assert found["counts"] == {"passed": 3}
    assert found["finished"]


def test_absent_peer_costs_its_tests_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "PEER", "not_there")
    file, plugin = tmp_path / "test_it.py", tmp_path / "plugin.py"
    plugin.write_text("from bench.gpu_check import progress\nprogress.PEER = 'not_there'\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    file.write_text(
        """
import pytest
from not_there import losses as peer
from not_there.utils.some import function

@pytest.mark.parametrize("distance", [None, peer.Distance(power=2)], ids=["none", "peer"])
def test_parameter(distance): assert distance is None
def test_call(): assert peer.Loss()
def test_function(): assert function(1)
def test_free(): pass
"""
    )
    assert pytests.runnable([file]) == ([file], ["tests against not_there are skipped: not installed"])
    monkeypatch.setattr(pytests, "PLUGINS", ("plugin", *pytests.PLUGINS))
    found = pytests.run([file], "cpu", tmp_path / "outcomes", 60)
    assert found["counts"] == {"passed": 2, "skipped": 3}


def test_outcomes_of_a_line_cut_short(tmp_path: Path) -> None:
    file = tmp_path / "outcomes"
    assert progress.read(file) == {}
    lines = [json.dumps(pair) for pair in (["a", "failed"], ["b", "passed"], ["a", "passed"])]
    file.write_text("\n".join(lines) + '\n["c", "pas')
    assert progress.read(file) == {"a": "passed", "b": "passed"}


def test_runs_without_optional_packages() -> None:
    """Nothing but torch and triton is imported on the way to the benchmark."""
    code = """
import importlib.abc, sys
class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("pytest", "pytorch_metric_learning", "hypothesis", "matplotlib", "xdist"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Refuse())
import bench.gpu_check.__main__, bench.gpu_check.worker
print(bench.gpu_check.worker.NEW_PROCESS)
"""
    assert python(code) == f"{worker.NEW_PROCESS}\n"
