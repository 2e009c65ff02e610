"""How often a step is timed."""

from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch

# glibc hands freed memory back to the system, page by page, until it has seen a freed block of this size.
ALLOCATOR_BYTES = 31 << 20
SECONDS = 2
MOST_ROUNDS = 100


def measure(benchmark: Any, run: Callable[[], Any]) -> None:
    """Time `run`, which has been called before, for about SECONDS.

    A step of a few milliseconds needs many rounds: the clock of the machine settles within the first. The allocator is
    brought to the state that it has in a process that trains: without, the page faults of a step depend on what the
    process happened to run before, for every implementation.
    """
    torch.empty(ALLOCATOR_BYTES, dtype=torch.uint8)  # freed at once
    start = perf_counter()
    run()
    seconds = perf_counter() - start
    least = 3 if seconds < 2 * SECONDS else 1
    rounds = min(max(int(SECONDS / seconds), least), MOST_ROUNDS)
    benchmark.pedantic(run, rounds=rounds, warmup_rounds=rounds // 10)
