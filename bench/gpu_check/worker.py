"""`python -m bench.gpu_check.worker FILE DEVICE PLAN SECONDS`: measure what FILE lacks, within the time.

A process of its own: a kernel that crashes takes the CUDA context with it. Exit status 3 asks for a new process.
"""

import gc
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench import precision
from bench.gpu_check import checks, results
from bench.gpu_check.plan import FLOOR, LOSSES, MODES, OURS, PLANS, PRECISION, Cell, Plan, Step, cells, step
from tritonloss.__main__ import tuned_configurations
from tritonloss.ops.products import ENVIRONMENT_VARIABLE as PRODUCTS_VARIABLE

NEW_PROCESS = 3
WARM_UP, LEAST_ROUNDS, MOST_ROUNDS, SECONDS = 2, 3, 30, 0.5
# Written before each round: more than the L2 cache of any GPU.
FLUSH_BYTES = 2**28
ROOM = 0.9  # of the free memory, that an estimate may take


class Timer:
    """Seconds of the forward pass and of the whole step; on a GPU from idle, with a cold L2 cache."""

    def __init__(self, device: str) -> None:
        self.is_cuda = device == "cuda"
        self.flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device) if self.is_cuda else None

    def __call__(self, step: Step) -> tuple[float, float]:
        clear(step)
        if self.flush is None:
            moments = [time.perf_counter()]
            loss = step.forward()
            moments.append(time.perf_counter())
            step.backward(loss)
            moments.append(time.perf_counter())
            return moments[1] - moments[0], moments[2] - moments[0]
        events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        self.flush.zero_()
        torch.cuda.synchronize()
        events[0].record()
        loss = step.forward()
        events[1].record()
        step.backward(loss)
        events[2].record()
        torch.cuda.synchronize()
        return events[0].elapsed_time(events[1]) / 1e3, events[0].elapsed_time(events[2]) / 1e3


def clear(step: Step) -> None:
    """So that the next round starts with its inputs only."""
    for leaf in step.leaves:
        leaf.grad = None


def measure(cell: Cell, plan: Plan, device: str) -> dict[str, Any]:
    """Median seconds, peak bytes above the inputs (on a GPU), and what the values are compared by."""
    if cell.name == PRECISION:
        n = cell.size[0]
        return precision.measure(n, n, max(plan.batches), plan.dimension, precision.DEPTH, device)
    precision_of_torch, os.environ[PRODUCTS_VARIABLE], _ = MODES[cell.matmul]
    torch.set_float32_matmul_precision(precision_of_torch)
    if cell.name == "compiled":
        torch.compiler.reset()  # it gives up on a function that was compiled for many sizes
    run = step(cell, plan.dimension, device)
    value, norm = first_run(run)
    timer = Timer(device)
    for _ in range(WARM_UP):
        _, seconds = timer(run)
    n_rounds = min(max(LEAST_ROUNDS, int(SECONDS / max(seconds, 1e-6))), MOST_ROUNDS)
    forward, total = (
        statistics.median(part) for part in zip(*(timer(run) for _ in range(n_rounds)), strict=True)
    )
    return {
        "forward_seconds": forward,
        "seconds": total,
        "peak_bytes": peak_bytes(run) if device == "cuda" else None,
        "rounds": n_rounds,
        "value": value if cell.name != FLOOR else None,
        "gradient_norm": norm,
    }


def first_run(run: Step) -> tuple[float, float | None]:
    """Compiles and tunes. The value and the norm of the gradient of the embeddings."""
    clear(run)
    loss = run.forward()
    run.backward(loss)
    norm = float(run.leaves[0].grad.norm()) if run.leaves and run.leaves[0].grad is not None else None
    return float(loss.detach().flatten()[0]), norm


def peak_bytes(run: Step) -> int:
    clear(run)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss: Tensor | None = run.forward()
    assert loss is not None
    run.backward(loss)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def does_not_fit(cell: Cell, device: str) -> str | None:
    """Why a rival is not tried: by its estimate it would take more than there is."""
    if device != "cuda" or cell.loss not in LOSSES or cell.name == OURS:
        return None
    needed, free = LOSSES[cell.loss].rivals[cell.name].bytes_needed(cell.size), torch.cuda.mem_get_info()[0]
    return f"about {needed / 2**30:.0f} GiB: does not fit" if needed > ROOM * free else None


def free_memory(device: str) -> None:
    if device == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def is_broken(device: str) -> bool:
    """Whether an error has taken the CUDA context with it."""
    try:
        if device == "cuda":
            torch.cuda.synchronize()
    except Exception:
        return True
    return False


def main() -> None:
    name, device, plan_name, seconds = sys.argv[1:]
    deadline = time.monotonic() + float(seconds)
    file, plan = Path(name), PLANS[plan_name]
    found = results.load(file)

    def begin(what: str) -> None:
        found["running"] = what
        results.save(file, found)
        print(what, flush=True)

    def fail(place: dict[str, Any], key: str, entry: dict[str, Any]) -> None:
        place[key] = entry
        found["running"] = None
        results.save(file, found)
        print(f"  {entry}", flush=True)
        if is_broken(device):
            sys.exit(NEW_PROCESS)

    for cell in cells(plan):
        if time.monotonic() > deadline:
            break
        if cell.loss in LOSSES and cell.loss not in found["checks"]:
            begin(f"check {cell.loss}")
            torch.set_float32_matmul_precision("highest")
            try:
                text = checks.check(cell.loss, plan, device)
                found["checks"][cell.loss] = {"passed": True, "detail": text}
            except Exception as error:
                fail(found["checks"], cell.loss, {"passed": False, "detail": message(error)})
            free_memory(device)
        if cell.key in found["cells"] or not found["checks"].get(cell.loss, {"passed": True})["passed"]:
            continue
        begin(f"measure {cell.key}")
        try:
            reason = does_not_fit(cell, device)
            found["cells"][cell.key] = {"skipped": reason} if reason else measure(cell, plan, device)
            if cell.name == OURS:
                found["tuned"] = tuned()
        except Exception as error:
            fail(found["cells"], cell.key, {"failed": message(error)})
        free_memory(device)
    found["running"] = None
    results.save(file, found)


def tuned() -> list[str]:
    """The tuned configurations, a line each; a result that cannot be read says so and costs no figure."""
    return sorted(set(tuned_configurations()))


def message(error: Exception) -> str:
    """The first line, short enough for a table."""
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}"[:200]


if __name__ == "__main__":
    main()
