"""How often a step is timed."""

from collections.abc import Callable
from time import perf_counter
from typing import Any

SECONDS = 2
MOST_ROUNDS = 100


def measure(benchmark: Any, run: Callable[[], Any]) -> None:
    """Time `run`, which has been called before, for about SECONDS.

    A step of a few milliseconds needs many rounds: the allocator and the clock of the machine settle within the first.
    """
    start = perf_counter()
    run()
    seconds = perf_counter() - start
    least = 3 if seconds < 2 * SECONDS else 1
    rounds = min(max(int(SECONDS / seconds), least), MOST_ROUNDS)
    benchmark.pedantic(run, rounds=rounds, warmup_rounds=rounds // 10)
