"""The losses inside transformers, Lightning, accelerate and sentence-transformers, in one process and in two."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import frameworks
import pytest
import torch
from checks import ROOT
from filelock import FileLock

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="the packages are imported once, for forks"),
    pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="two processes need gloo"),
]
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
}


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What came of each check, from one start for all tests, and for all workers of pytest-xdist."""
    root = tmp_path_factory.getbasetemp()
    folder = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / "frameworks"
    with FileLock(f"{folder}.lock"):
        if not (folder / "results.json").exists():
            start(folder)
        return json.loads((folder / "results.json").read_text())


def start(folder: Path) -> None:
    folder.mkdir()
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("TRITON", "PYTEST"))}
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), inherited.pop("PYTHONPATH", "")])
    process = subprocess.run(
        [sys.executable, ROOT / "tests" / "frameworks.py", folder],
        env={**inherited, **OFFLINE, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert process.returncode == 0, process.stdout + process.stderr


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", [name for name, _, _ in frameworks.jobs()])
def test_in_a_framework(name: str, world: int, results: dict[str, str]) -> None:
    """A check of tests/frameworks.py, or the examples of a page."""
    result = results[f"{name}-{world}"]
    if result.startswith("needs "):
        pytest.skip(result)
    assert result == "", result


def test_every_example_of_a_framework_is_run() -> None:
    with_examples = {page.name for page in (ROOT / "docs").glob("*.md") if frameworks.examples(page.name)}
    assert with_examples == set(frameworks.PAGES)
