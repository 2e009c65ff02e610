"""`python -m bench.distributed`: how the work of one process falls with the number of processes.

Each process of a gloo group on this machine has one thread and its part of the batch. CPU seconds of a process are
measured, so that more processes than cores do no harm; what a process waits for others is not in them.
"""

import os
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, nn

from bench.__main__ import RESULTS, file_name
from bench.registry import LOSSES, title
from bench.report import machine
from tritonloss.distributed import DistributedLoss

N, DIMENSION, STEPS = 4096, 128, 5
PROCESSES = (1, 2, 4)
PROXIES = 10_000


def label(name: str) -> str:
    return f"{title(name)}, {PROXIES} classes" if LOSSES[name].per_proxy else title(name)


def build(name: str) -> nn.Module:
    return LOSSES[name].timed(PROXIES if LOSSES[name].per_proxy else N // 4, DIMENSION)


def main() -> None:
    """Print the table and write it to the results."""
    seconds = {processes: measure(processes) for processes in PROCESSES}
    lines = [
        f"CPU seconds of one process for forward + backward of a batch of {N}, D = {DIMENSION}, four per class, split "
        f"among processes of one thread; in parentheses the share of one process alone. {machine()}, torch "
        f"{torch.__version__}.",
        "",
        "| loss | " + " | ".join(f"{p} process{'es' * (p > 1)}" for p in PROCESSES) + " |",
        "|---" * (len(PROCESSES) + 1) + "|",
    ]
    for name in LOSSES:
        alone = seconds[1][name]
        cells = [f"{seconds[p][name]:.3f} ({seconds[p][name] / alone:.2f})" for p in PROCESSES]
        lines.append("| " + " | ".join([label(name), *cells]) + " |")
    text = "\n".join(lines) + "\n"
    (RESULTS / file_name("distributed")).with_suffix(".md").write_text(text)
    print(text)


def measure(processes: int) -> dict[str, float]:
    """The median step of the slowest process, for each loss."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_process, (processes, folder), nprocs=processes)
        results = [torch.load(Path(folder) / f"{rank}.pt") for rank in range(processes)]
    return {name: max(result[name] for result in results) for name in LOSSES}


def _process(rank: int, processes: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=processes)
    rows = torch.randn(N, DIMENSION, generator=torch.Generator().manual_seed(0)).tensor_split(processes)[rank]
    labels = (torch.arange(N) // 4).tensor_split(processes)[rank]
    results = {name: _step_seconds(DistributedLoss(build(name)), rows, labels) for name in LOSSES}
    torch.save(results, os.path.join(folder, f"{rank}.pt"))
    dist.destroy_process_group()


def _step_seconds(criterion: nn.Module, rows: Tensor, labels: Tensor) -> float:
    seconds = []
    for _ in range(STEPS + 1):
        leaf = rows.clone().requires_grad_()
        start = time.process_time()
        criterion(leaf, labels).backward()
        seconds.append(time.process_time() - start)
    return statistics.median(seconds[1:])


if __name__ == "__main__":
    main()
