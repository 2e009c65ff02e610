"""Groups of processes for the tests: each runs one function, and what it returns comes back."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from filelock import FileLock
from interpreter import prepare_interpreter

# Processes are forks of one that has imported these: each alone would take seconds for it.
multiprocessing.set_forkserver_preload(
    ["torch.distributed", "torch._dynamo", "triton", "hypothesis", "pytest"]
)
# Collectives that never meet raise after this long instead of hanging the tests.
TIMEOUT = datetime.timedelta(seconds=60)


def run_processes_once(
    world: int, function: Callable[[], Any], factory: pytest.TempPathFactory, name: str
) -> list[Any]:
    """`run_processes`, once for all workers of pytest-xdist: the others wait, and read the results of the first."""
    root = factory.getbasetemp()
    folder = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / f"{name}-{world}"
    with FileLock(f"{folder}.lock"):
        if (folder / "done").exists():
            return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world)]
        folder.mkdir()
        results = run_processes(world, function, folder)
        (folder / "done").touch()
        return results


def run_processes(world: int, function: Callable[[], Any], folder: Path, seconds: float = 240) -> list[Any]:
    """What `function` returns in each process of a gloo group of `world`; it must be importable.

    Raises AssertionError with the traceback of a process that fails, and if one takes longer than `seconds`.
    """
    context = torch.multiprocessing.start_processes(
        _process, (world, function, str(folder)), nprocs=world, join=False, start_method="forkserver"
    )
    end = time.monotonic() + seconds
    try:
        while not context.join(max(0.1, end - time.monotonic())):
            assert time.monotonic() < end, f"{function.__name__} took longer than {seconds} s"
    finally:
        for process in context.processes:
            process.kill()
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world)]


def _process(rank: int, world: int, function: Callable[[], Any], folder: str) -> None:
    torch.set_num_threads(1)
    prepare_interpreter()
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=TIMEOUT
    )
    try:
        torch.save(function(), Path(folder) / f"{rank}.pt")
        dist.barrier()
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        dist.destroy_process_group()
