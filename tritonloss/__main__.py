"""`python -m tritonloss`: versions, devices, the backend each would use and why, and the tuned configurations found."""

import importlib.metadata
import json
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import tritonloss
from tritonloss.backends import resolve_backend, selected_backend, triton_unusable
from tritonloss.backends.tuning import CONFIGS, tuning_enabled


def main() -> None:
    """Print the report."""
    print("\n".join(report()))


def report() -> Iterator[str]:
    """The lines of the report."""
    yield f"tritonloss {tritonloss.__version__}, torch {torch.__version__}, triton {_version('triton')}"
    yield f"Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    yield f"chosen backend: {selected_backend()}"
    for device in devices():
        yield f"{device} ({_device_name(device)}): {_backend_line(device)}"
    yield f"autotuning: {'on' if tuning_enabled() else 'off (TRITONLOSS_AUTOTUNE=0)'}"
    tuned = list(tuned_configurations())
    yield f"tuned configurations found: {len(tuned) or 'none'}"
    yield from tuned


def devices() -> list[torch.device]:
    """The CPU and every CUDA or ROCm device."""
    return [torch.device("cpu"), *(torch.device("cuda", i) for i in range(torch.cuda.device_count()))]


def tuned_configurations() -> Iterator[str]:
    """A line for each result of Triton's autotuner on disk that belongs to a kernel of this package."""
    home = Path(os.environ.get("TRITON_HOME") or Path.home())
    directory = Path(os.environ.get("TRITON_CACHE_DIR") or home / ".triton" / "cache")
    for file in sorted(directory.glob("*/*.autotune.json")):
        kernel = file.name.removesuffix(".autotune.json")
        if kernel in CONFIGS:
            try:
                yield _tuned_line(kernel, json.loads(file.read_text()))
            except (
                OSError,
                ValueError,
                LookupError,
                TypeError,
            ) as error:  # half written, or of another Triton
                yield f"  {kernel}: {file} cannot be read ({type(error).__name__}: {error})"


def _tuned_line(kernel: str, content: Any) -> str:
    best = min(content["configs_timings"], key=lambda timing: timing[1])[0]
    return f"  {kernel} {content['key']}: {best['kwargs']}, {best['num_warps']} warps"


def _backend_line(device: torch.device) -> str:
    selected = selected_backend()
    try:
        backend = resolve_backend(selected, device)
    except RuntimeError as error:
        return f"none: {error}"
    if selected != "auto":
        return f"{backend}, because it was chosen"
    if backend == "triton":
        return "triton"
    return f"eager, because {triton_unusable(device) or 'the interpreter is for tests only'}"


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    main()
