"""The tests of the repository that use the GPU, as far as the installed packages allow."""

import ast
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from bench.gpu_check import progress
from bench.gpu_check.results import ROOT

TESTS = ROOT / "tests"
# Kernels first: if these are wrong, nothing else matters.
PATTERNS = (
    "test_kernels_*.py",
    "test_golden_losses.py",
    "test_soft_rank.py",
    "test_soft_histogram.py",
    "test_proxy_logsumexp.py",
    "test_backends.py",
    "test_soft_rank_scores.py",
    "test_common.py",
    "test_smoothap.py",
    "test_soprc.py",
    "test_semi_variance.py",
    "test_pnp.py",
    "test_histogram.py",
    "test_fastap.py",
    "test_proxy_anchor.py",
    "test_compile.py",
)
PLUGINS = ("bench.gpu_check.progress", "no:cacheprovider")
MOST_WORKERS = 8
WORKER_BYTES = 2**33  # of the GPU's memory, for the context of a process and for the largest test
GRACE_SECONDS = 5


def files() -> list[Path]:
    """Every test file that uses the GPU, once."""
    return list(dict.fromkeys(file for pattern in PATTERNS for file in sorted(TESTS.glob(pattern))))


def missing_packages(file: Path) -> list[str]:
    """Top-level modules that the file imports at its outermost level and that are not there."""
    roots = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            roots |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            roots.add(node.module.split(".")[0])
    return sorted(root for root in roots - {progress.PEER} if not is_there(root))


def is_there(module: str) -> bool:
    return (TESTS / f"{module}.py").exists() or importlib.util.find_spec(module) is not None


def runnable(candidates: Iterable[Path]) -> tuple[list[Path], list[str]]:
    """The files that can run, and a line for each that cannot; none can without what conftest.py needs."""
    needed = sorted({*missing_packages(TESTS / "conftest.py"), *(() if is_there("pytest") else ("pytest",))})
    if needed:
        return [], [f"no test was run: {', '.join(needed)} not installed"]
    found, lines = [], []
    if not is_there(progress.PEER):
        lines.append(f"tests against {progress.PEER} are skipped: not installed")
    for file in candidates:
        if missing := missing_packages(file):
            lines.append(f"{file.name} was not run: {', '.join(missing)} not installed")
        else:
            found.append(file)
    return found, lines


def n_workers(device: str) -> int:
    """Processes of pytest-xdist: the compiler of the kernels is what takes the time."""
    most = min(MOST_WORKERS, (os.cpu_count() or 1) // 2)
    if device == "cuda":
        most = min(most, torch.cuda.mem_get_info()[1] // WORKER_BYTES)
    return most


def run(chosen: list[Path], device: str, outcomes: Path, seconds: float) -> dict[str, Any]:
    """Run what has not passed yet, for at most `seconds`. Counts, and the tests that failed.

    outcomes: the file of the outcomes, which is continued.
    """
    paths, lines = runnable(chosen)
    found: dict[str, Any] = {"not_run": lines, "finished": not paths, "counts": {}, "failed": []}
    if not paths:
        return found
    done = outcomes.with_suffix(".done")
    outcomes.touch()
    shutil.copy(outcomes, done)
    command = [sys.executable, "-m", "pytest", *map(str, paths), "-q"]
    command += [argument for plugin in PLUGINS for argument in ("-p", plugin)]
    command += ["-W", "default", "--continue-on-collection-errors"]
    if is_there("xdist"):
        command += ["-n", str(workers)] if (workers := n_workers(device)) > 1 else ["-p", "no:xdist"]
    # A pytest around this one would be taken for its controller; the interpreter is for machines without a GPU.
    dropped = ("PYTEST_", "TRITON_INTERPRET") if device == "cuda" else ("PYTEST_",)
    environment = {key: value for key, value in os.environ.items() if not key.startswith(dropped)}
    environment |= {progress.OUTCOMES: str(outcomes), progress.DONE: str(done)}
    begin = time.monotonic()
    process = subprocess.Popen(command, cwd=ROOT, env=environment)
    try:
        process.wait(seconds)
        # 5: everything had passed before.
        found["finished"] = process.returncode in (0, 1, 5)
        if process.returncode not in (0, 1, 5):
            found["not_run"].append(f"pytest ended with status {process.returncode}")
    except subprocess.TimeoutExpired:
        found["not_run"].append(f"stopped after {seconds:.0f} s; the next run goes on with the rest")
    finally:
        stop(process)
        done.unlink()
    found["seconds"] = time.monotonic() - begin
    last = progress.read(outcomes)
    found["counts"] = dict(Counter(last.values()))
    found["failed"] = sorted(test for test, outcome in last.items() if outcome == "failed")
    return found


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a process that this one started, gently first: pytest then ends those of pytest-xdist."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
