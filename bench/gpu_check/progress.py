"""A pytest plugin, `-p bench.gpu_check.progress`: notes each outcome at once and leaves out what has passed before.

It also stands in for pytorch-metric-learning where that is not installed: most tests of a file that imports it never
use it, and the others are skipped.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

OUTCOMES = (
    "GPU_CHECK_OUTCOMES"  # the file that outcomes are appended to, a JSON list [test, outcome] on each line
)
DONE = "GPU_CHECK_DONE"  # a copy of it from before this run: every process of pytest-xdist must leave out the same
PEER = "pytorch_metric_learning"


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


def pytest_configure(config: pytest.Config) -> None:
    if importlib.util.find_spec(PEER) is None:
        sys.meta_path.append(AbsentModules())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    done = read(Path(os.environ[DONE]))
    passed = [item for item in items if done.get(item.nodeid) == "passed"]
    config.hook.pytest_deselected(items=passed)
    items[:] = [item for item in items if done.get(item.nodeid) != "passed"]


def pytest_runtest_setup(item: pytest.Item) -> None:
    parameters = getattr(item, "callspec", None)
    if parameters is not None and any(isinstance(value, Absent) for value in parameters.params.values()):
        skip()


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        note(report.nodeid, "failed")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ and (report.when == "call" or report.outcome != "passed"):
        note(report.nodeid, report.outcome)


def skip() -> None:
    import pytest

    pytest.skip(f"needs {PEER}")


class Absent:
    """Anything of a package that is not installed: made at will while tests are collected, not within a test."""

    def __getattr__(self, name: str) -> Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent()

    def __call__(self, *arguments: Any, **options: Any) -> Absent:
        if "PYTEST_CURRENT_TEST" in os.environ:
            skip()
        return Absent()


class AbsentModules(importlib.machinery.PathFinder):
    """Finds every module of the package, and Absent under every name in it."""

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] != PEER:
            return None
        return importlib.machinery.ModuleSpec(fullname, AbsentLoader(), is_package=True)


class AbsentLoader:
    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__getattr__"] = Absent().__getattr__
