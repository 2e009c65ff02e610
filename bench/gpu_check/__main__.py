"""`python -m bench.gpu_check`: the GPU tests, then the benchmark, in under 5 minutes; a second run goes on from there.

Needs torch and triton; what else is missing is named and left out. Writes gpu-<machine>.json and .md into $OUT, else
into bench/results. Exit status: 0; 1 if a test or a check failed; 2 if there is no such device.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch

from bench.gpu_check import pytests, results, summary
from bench.gpu_check.plan import PLANS
from bench.gpu_check.worker import NEW_PROCESS

WORKER = (sys.executable, "-m", "bench.gpu_check.worker")
REPORT_SECONDS = 8  # kept for ending processes and for the report
LEAST_SECONDS = 15  # that a new process for the benchmark is worth
CELL_SECONDS = 75  # one result takes no longer, compiling included


def main() -> None:
    options = arguments().parse_args()
    deadline = time.monotonic() + options.seconds - REPORT_SECONDS
    if options.device == "cuda" and not torch.cuda.is_available():
        print("torch finds no CUDA device; `--device cpu --plan tiny` tries the check itself")
        sys.exit(2)
    signal.signal(signal.SIGTERM, terminated)
    file = results.file_for(options.device, options.plan, options.out)
    results.save(file, results.start(file, options.device, options.plan, options.fresh))
    try:
        test(file, options, deadline)
        benchmark(file, options, deadline)
    finally:
        found = results.load(file)
        file.with_suffix(".md").write_text(summary.text(found))
        print(summary.text(found))
        print(f"in {file} and {file.with_suffix('.md').name}")
    failed = found["tests"].get("failed") or not all(check["passed"] for check in found["checks"].values())
    sys.exit(1 if failed else 0)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_check", description=__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--plan", choices=PLANS, default="full")
    parser.add_argument("--seconds", type=float, default=285, help="for everything")
    parser.add_argument("--test-seconds", type=float, default=100, help="of these, for the tests")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or results.RESULTS))
    parser.add_argument("--fresh", action="store_true", help="measure again what is there")
    parser.add_argument("--tests", type=Path, nargs="*", help="test files in place of those of the GPU")
    return parser


def terminated(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)  # through `finally`: processes are ended, the report is written


def test(file: Path, options: argparse.Namespace, deadline: float) -> None:
    """Run the tests that have not passed, in the time for tests."""
    found = results.load(file)
    if found["tests"].get("finished") and not found["tests"]["failed"]:
        return
    outcomes = file.with_name(f"{file.stem}-{found['identity']['source']}.tests")
    if options.fresh:
        outcomes.unlink(missing_ok=True)
    chosen = pytests.files() if options.tests is None else options.tests
    seconds = min(options.test_seconds, deadline - time.monotonic())
    found["tests"] = pytests.run(chosen, options.device, outcomes, seconds)
    results.save(file, found)


def benchmark(file: Path, options: argparse.Namespace, deadline: float) -> None:
    """Let processes measure until all is done or the time is out: a crash costs the result that it happened in."""
    while deadline - time.monotonic() > LEAST_SECONDS:
        command = [*WORKER, str(file), options.device, options.plan, str(deadline - time.monotonic())]
        process = subprocess.Popen(command, cwd=results.ROOT, env=environment(options.device))
        try:
            why = watch(process, file, deadline)
        finally:
            pytests.stop(process)
        if why is None:
            return
        if why:
            note_failure(file, why)


def environment(device: str) -> dict[str, str]:
    """The interpreter is for machines without a GPU."""
    dropped = ("TRITON_INTERPRET",) if device == "cuda" else ()
    return {key: value for key, value in os.environ.items() if key not in dropped}


def watch(process: subprocess.Popen[bytes], file: Path, deadline: float) -> str | None:
    """Wait for its end: None if that is all, else what went wrong; empty if it asked for a new process."""
    while process.poll() is None:
        if time.monotonic() > deadline:
            return None
        if time.time() - file.stat().st_mtime > CELL_SECONDS:
            return f"stopped after {CELL_SECONDS} s"
        time.sleep(0.2)
    if process.returncode == 0:
        return None
    return "" if process.returncode == NEW_PROCESS else f"its process ended with status {process.returncode}"


def note_failure(file: Path, why: str) -> None:
    """Of the check or of the cell that was under way."""
    found: dict[str, Any] = results.load(file)
    kind, _, what = (found["running"] or "").partition(" ")
    if kind == "check":
        found["checks"][what] = {"passed": False, "detail": why}
    elif kind == "measure":
        found["cells"][what] = {"failed": why}
    else:
        raise RuntimeError(f"the benchmark could not start: {why}")
    results.save(file, {**found, "running": None})


if __name__ == "__main__":
    main()
