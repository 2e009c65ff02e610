"""`python -m tritonloss`: versions, devices, the backend each would use and why, and the tuned configurations found.

`python -m tritonloss tune` finds them ahead of training. `python -m tritonloss estimate` says what a step takes.
"""

import importlib.metadata
import platform
import sys
import warnings
from collections.abc import Iterator, Sequence

import torch

import tritonloss
from tritonloss import estimates, tune
from tritonloss.backends import resolve_backend, selected_backend, tables, triton_unusable
from tritonloss.backends.tuning import tuning_enabled
from tritonloss.ops.products import resolve_mode, split_unusable


def main(arguments: Sequence[str]) -> None:
    """Print the report, tune, or estimate. Raises SystemExit for anything else."""
    if arguments and arguments[0] not in ("tune", "estimate"):
        raise SystemExit(f"python -m tritonloss: got {arguments[0]!r}, expected nothing, tune or estimate")
    if arguments and arguments[0] == "estimate":
        estimates.main(arguments[1:])
    else:
        print("\n".join(tune.main(arguments[1:]) if arguments else report()))


def report() -> Iterator[str]:
    """The lines of the report."""
    yield f"tritonloss {tritonloss.__version__}, torch {torch.__version__}, triton {_version('triton')}"
    yield f"Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    yield f"chosen backend: {selected_backend()}"
    for device in devices():
        yield f"{device} ({_device_name(device)}): {_backend_line(device)}"
        yield f"  products: {_products_line(device)}"
    yield f"autotuning: {'on' if tuning_enabled() else 'off (TRITONLOSS_AUTOTUNE=0)'}"
    tuned = list(tuned_configurations())
    yield f"tuned configurations found: {len(tuned) or 'none'}"
    yield from tuned


def devices() -> list[torch.device]:
    """The CPU and every CUDA or ROCm device."""
    return [torch.device("cpu"), *(torch.device("cuda", i) for i in range(torch.cuda.device_count()))]


def tuned_configurations() -> Iterator[str]:
    """A line for each entry of each table of configurations, shipped or of this user."""
    for folder in filter(None, (tables.SHIPPED, tables.directory())):
        for file in sorted(folder.glob("*.json")):
            try:
                device, table = tables.read(file)
            except (OSError, ValueError, RecursionError) as error:  # half written, or of another version
                yield f"  {file} cannot be read ({type(error).__name__}: {error})"
                continue
            source = "table" if table.complete else "timed at first use"
            for key, config in table.entries.items():
                yield f"  {device}, {source}: {key}: {config}"


def _backend_line(device: torch.device) -> str:
    selected, reason = selected_backend(), triton_unusable(device)
    if selected == "auto":
        if device.type == "cuda" and reason is None:
            return "triton"
        return f"eager, because {reason or 'the interpreter is for tests only'}"
    try:
        return f"{resolve_backend(selected, device)}, because it was chosen"
    except RuntimeError as error:
        return f"none: {error}"


def _products_line(device: torch.device) -> str:
    """How half precision and float32 rows are multiplied, and why."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the reason is in the line
            half, single = (resolve_mode(None, dtype, device) for dtype in (torch.bfloat16, torch.float32))
    except ValueError as error:
        return str(error)
    modes = half if half == single else f"{half} of half precision, {single} of float32"
    reason = split_unusable(device)
    return modes if reason is None else f"{modes}; {reason}"


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{platform.processor() or platform.machine()}, {threads} thread{'s' if threads > 1 else ''}"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    main(sys.argv[1:])
