"""The choice of the code that reduces a block of scores.

"eager" is plain torch on any device; "triton" launches the kernels; "reference" is the dense oracle of
`tritonloss.reference`, which losses call in place of the streamed ops; "auto" takes Triton where it is usable and eager
elsewhere.
"""

from __future__ import annotations

import importlib
import os
from types import ModuleType, TracebackType

import torch

ENVIRONMENT_VARIABLE = "TRITONLOSS_BACKEND"
BACKENDS = ("auto", "eager", "triton", "reference")
BLOCK_FUNCTIONS = (
    "soft_rank_forward",
    "soft_rank_backward",
    "soft_histogram_forward",
    "soft_histogram_backward",
    "proxy_logsumexp_forward",
    "proxy_logsumexp_backward",
)
OLDEST_CAPABILITY = (8, 0)

_registered: dict[str, ModuleType] = {}
_selected = os.environ.get(ENVIRONMENT_VARIABLE) or "auto"  # empty is unset


def register_backend(name: str, module: ModuleType) -> None:
    """Add a backend: after `use_backend(name)` the losses call the block functions of `module`.

    name: not one of ours; a name that was registered before is given the new module. "auto" never takes it.
    module: has the six functions of `BLOCK_FUNCTIONS`, with the arguments of `tritonloss.backends.eager`; `derivatives`
    is given only to a module with a `DERIVATIVE_BYTES`. They must serve every device and dtype that they are called
    with, or raise. For the algorithms of large classes it needs
    `largest_class`, `one_class`, `score_grid`, `grid_spread` and `grid_read` as well, all or none; without them classes
    of any size go to `soft_rank_forward` and `soft_rank_backward`.

    Raises ValueError for a name of ours, TypeError if the module lacks functions.
    """
    if name in BACKENDS:
        raise ValueError(f"backend name is {name!r}: expected another than {', '.join(BACKENDS)}")
    if missing := [function for function in BLOCK_FUNCTIONS if not callable(getattr(module, function, None))]:
        raise TypeError(f"module must have the block functions, got none named {', '.join(missing)}")
    _registered[name] = module


def _check_name(name: str, source: str) -> None:
    if name not in BACKENDS and name not in _registered:
        raise ValueError(f"{source}{name!r}: expected one of {', '.join([*BACKENDS, *_registered])}")


def selected_backend() -> str:
    """The name set by `use_backend`, else by TRITONLOSS_BACKEND, else "auto"."""
    _check_name(_selected, f"{ENVIRONMENT_VARIABLE}=")
    return _selected


class use_backend:
    """Choose the backend of every loss of this process, at once, or within a `with` block.

    name: "auto", "eager", "triton", "reference", or a name given to `register_backend`. A backend that cannot serve a
    call raises RuntimeError at that call; it is never replaced silently. The choice is global to the process, not per
    thread.

    Raises ValueError for another name.
    """

    def __init__(self, name: str) -> None:
        global _selected
        _check_name(name, "backend name is ")
        self._previous = _selected
        _selected = name

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _selected
        _selected = self._previous


def triton_unusable(device: torch.device) -> str | None:
    """Why Triton cannot serve tensors on `device`; None if it can."""
    try:
        module = importlib.import_module("tritonloss.backends.triton")
    except Exception as error:  # a broken installation of Triton raises anything
        return f"Triton cannot be imported ({type(error).__name__}: {error})"
    if module.INTERPRETED:
        return None
    if device.type != "cuda":
        return f"Triton serves CUDA and ROCm tensors, not {device.type} (TRITON_INTERPRET=1 is for tests)"
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < OLDEST_CAPABILITY:
        return f"Triton needs compute capability {OLDEST_CAPABILITY}, {device} is older"
    return None


def resolve_backend(name: str, device: torch.device) -> str:
    """Replace "auto" by the backend for `device`. Raises RuntimeError if a named backend cannot serve it."""
    if name == "auto":
        return "triton" if device.type == "cuda" and triton_unusable(device) is None else "eager"
    if name == "triton" and (reason := triton_unusable(device)) is not None:
        raise RuntimeError(f"backend 'triton' was asked for, but {reason}")
    return name


def backend_module(name: str, device: torch.device) -> ModuleType:
    """The module with the block functions (soft_rank_forward, ...) that serves `device`.

    Raises RuntimeError for "reference", which has none.
    """
    if name in _registered:
        return _registered[name]
    if name == "reference":
        raise RuntimeError(
            "backend 'reference' was asked for, but it has no block functions: a loss that has a dense form calls that "
            "in place of the streamed operators"
        )
    return importlib.import_module(f"tritonloss.backends.{resolve_backend(name, device)}")
