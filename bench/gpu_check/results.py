"""The file of a GPU check: written whole after every result, so that a run that is killed has lost nothing."""

import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from bench import report

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results"


def source_hash() -> str:
    """Of the package and its kernels: a figure belongs to the code that gave it."""
    digest = hashlib.sha256()
    for folder in ("tritonloss", "kernels"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def identity(device: str, plan: str) -> dict[str, str | None]:
    """What must be the same for a run to continue another."""
    return {
        "machine": report.machine() if device == "cuda" else f"{report.machine()}, on the CPU",
        "plan": plan,
        "source": source_hash(),
        "torch": torch.__version__,
        "triton": version("triton"),
        "cuda": torch.version.cuda or torch.version.hip,
        "python": platform.python_version(),
    }


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit() -> str | None:
    """The commit of the checkout, with a mark if it has changes; None without git."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=10"]
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def file_for(device: str, plan: str, folder: Path) -> Path:
    return folder / f"gpu-{report.slug(identity(device, plan)['machine'] or '')}.json"


def start(file: Path, device: str, plan: str, fresh: bool) -> dict[str, Any]:
    """The results to continue: those of `file`, else the committed ones, if they are of this code and machine.

    What failed is left out, to be tried again.
    """
    wanted = identity(device, plan)
    for candidate in [] if fresh else [file, RESULTS / file.name]:
        if not candidate.exists():
            continue
        found: dict[str, Any] = json.loads(candidate.read_text())
        if found["identity"] == wanted:
            found["cells"] = {key: cell for key, cell in found["cells"].items() if "failed" not in cell}
            found["checks"] = {loss: check for loss, check in found["checks"].items() if check["passed"]}
            return {**found, "running": None}
    return {
        "identity": wanted,
        "commit": commit(),
        "tests": {},
        "checks": {},
        "cells": {},
        "tuned": [],
        "running": None,
    }


def load(file: Path) -> dict[str, Any]:
    results: dict[str, Any] = json.loads(file.read_text())
    return results


def save(file: Path, results: dict[str, Any]) -> None:
    """In one step: a reader finds the old file or the new one."""
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_suffix(".new")
    new.write_text(json.dumps(results, indent=1) + "\n")
    os.replace(new, file)
