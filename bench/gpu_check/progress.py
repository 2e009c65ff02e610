"""A pytest plugin, `-p bench.gpu_check.progress`: notes each outcome at once and leaves out what has passed before."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

OUTCOMES = (
    "GPU_CHECK_OUTCOMES"  # the file that outcomes are appended to, a JSON list [test, outcome] on each line
)
DONE = "GPU_CHECK_DONE"  # a copy of it from before this run: every process of pytest-xdist must leave out the same


def read(file: Path) -> dict[str, str]:
    """The last outcome of each test; a line that a kill cut short is left out."""
    outcomes = {}
    for line in file.read_text().splitlines() if file.exists() else []:
        try:
            test, outcome = json.loads(line)
        except ValueError:
            continue
        outcomes[test] = outcome
    return outcomes


def note(test: str, outcome: str) -> None:
    with Path(os.environ[OUTCOMES]).open("a") as file:
        file.write(json.dumps([test, outcome]) + "\n")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    done = read(Path(os.environ[DONE]))
    passed = [item for item in items if done.get(item.nodeid) == "passed"]
    config.hook.pytest_deselected(items=passed)
    items[:] = [item for item in items if done.get(item.nodeid) != "passed"]


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        note(report.nodeid, "failed")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ and (report.when == "call" or report.outcome != "passed"):
        note(report.nodeid, report.outcome)
