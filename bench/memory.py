"""`python -m bench.memory NAME N DEVICE`: peak memory of forward and backward above the inputs, in bytes.

A process of its own, because the allocator of a process that ran anything larger keeps memory.
"""

import ctypes
import subprocess
import sys
from pathlib import Path

import torch

from bench.pnp import step


def peak_bytes(name: str, n: int, device: str) -> int:
    """The figure, from a fresh process."""
    command = [sys.executable, "-m", "bench.memory", name, str(n), device]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def _status(field: str) -> int:
    (line,) = [x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(field)]
    return int(line.split()[1]) * 1024


def _measure(name: str, n: int, device: str) -> int:
    run = step(name, n, True, device)
    run()  # compiles, tunes, starts threads
    if device == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        return torch.cuda.max_memory_allocated() - before
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before = _status("VmRSS")
    run()
    return _status("VmHWM") - before


if __name__ == "__main__":
    print(_measure(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
