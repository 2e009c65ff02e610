"""`python -m bench.memory BENCHMARK NAME SIZE ... DEVICE`: peak memory of forward and backward above the inputs.

In bytes. A process of its own, because the allocator of a process that ran anything larger keeps memory.
"""

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from bench.cases import BENCHMARKS


def peak_bytes(benchmark: str, name: str, *sizes: int | str, device: str) -> int:
    """The figure, from a fresh process, whose allocator hands freed blocks back at once: how many it would hold depends
    on what was freed before.
    """
    command = [sys.executable, "-m", "bench.memory", benchmark, name, *map(str, sizes), device]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(64 << 10)}
    found = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return int(found.stdout.split()[-1])


def _status(field: str) -> int:
    (line,) = [x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(field)]
    return int(line.split()[1]) * 1024


def peak_above(run: Callable[[], object], device: str) -> int:
    """The bytes that a later `run` takes at most, above what this process holds before it."""
    run()  # compiles, tunes, starts threads
    if device == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        return torch.cuda.max_memory_allocated() - before
    # A page of a library that the system dropped and a run reads again counts as that run's: the smaller of two.
    return min(_peak_of_the_process(run) for _ in range(2))


def _peak_of_the_process(run: Callable[[], object]) -> int:
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before = _status("VmRSS")
    run()
    return _status("VmHWM") - before


def main() -> None:
    benchmark, name, *sizes, device = sys.argv[1:]
    numbers = (int(size) if size.isdecimal() else size for size in sizes)
    step = BENCHMARKS[benchmark].step(name, *numbers, backward=True, device=device)
    print(peak_above(step, device))


if __name__ == "__main__":
    main()
