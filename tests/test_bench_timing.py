"""How often a benchmark runs a step."""

from types import SimpleNamespace
from typing import Any

import pytest

from bench import timing


@pytest.mark.parametrize(
    ("seconds", "rounds", "warmup"), [(1e-3, 100, 10), (0.1, 20, 2), (1.5, 3, 0), (3.9, 3, 0), (4.1, 1, 0)]
)
def test_rounds_of_about_two_seconds(
    seconds: float, rounds: int, warmup: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([0.0, seconds])
    monkeypatch.setattr(timing, "perf_counter", lambda: next(clock))
    seen: list[dict[str, Any]] = []
    timing.measure(SimpleNamespace(pedantic=lambda _, **options: seen.append(options)), lambda: None)
    assert seen == [{"rounds": rounds, "warmup_rounds": warmup}]
