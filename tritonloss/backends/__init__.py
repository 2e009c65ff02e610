"""The choice of the code that reduces a block of scores.

"eager" is plain torch on any device; "triton" launches the kernels; "reference" is the dense oracle of
`tritonloss.reference`, which losses call in place of the streamed ops; "auto" takes Triton where it is usable and eager
elsewhere.
"""

from __future__ import annotations

import importlib
import os
import threading
import warnings
import weakref
from contextvars import ContextVar
from types import ModuleType, TracebackType
from typing import cast

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

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
# Asked for when a loss that needs them is called.
LOGSUMEXP_FUNCTIONS = ("pair_logsumexp_forward", "pair_logsumexp_backward")
OLDEST_CAPABILITY = (8, 0)

_registered: dict[str, ModuleType] = {}


def register_backend(name: str, module: ModuleType) -> None:
    """Add a backend: after `use_backend(name)` the losses call the block functions of `module`.

    name: not one of ours; a name that was registered before is given the new module. "auto" never takes it.
    module: has the six functions of `BLOCK_FUNCTIONS`, with the arguments of `tritonloss.backends.eager`. What a
    forward function returns, if not None, is given to the backward function of the same block as `kept`. They must
    serve every device and dtype that they are called with, or raise. For the algorithms of large classes it needs
    `largest_class`, `one_class`, `score_grid`, `grid_spread` and `grid_read` as well, all or none; without them
    classes of any size go to `soft_rank_forward` and `soft_rank_backward`. The log-sum-exp losses need the two
    functions of `LOGSUMEXP_FUNCTIONS`, with the arguments of `tritonloss.backends.eager_logsumexp`, and raise
    without them.

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


# --- the choice ---

_selected = os.environ.get(ENVIRONMENT_VARIABLE) or "auto"  # empty is unset; of the process
_context: ContextVar[tuple[str, ...]] = ContextVar(
    "tritonloss_backend", default=()
)  # the blocks around, outermost first


class _Thread(threading.local):
    """The blocks that this thread entered: the same as `_context`, which torch.compile cannot trace."""

    def __init__(self) -> None:
        # An attribute of the instance: without one, torch.compile would not guard it.
        self.names: tuple[str, ...] = ()


_thread = _Thread()


def _blocks() -> tuple[str, ...]:
    return _thread.names if torch.compiler.is_dynamo_compiling() else _context.get()


def _set_blocks(names: tuple[str, ...]) -> None:
    _thread.names = names
    if not torch.compiler.is_dynamo_compiling():
        _context.set(names)


def selected_backend() -> str:
    """The name of the innermost `use_backend` block, else of the last `use_backend` call, else of TRITONLOSS_BACKEND,
    else "auto".

    torch.compile traces it, and compiles anew for another name. A call that reads the name once and hands it on, to its
    backward pass too, is served by one backend throughout.
    """
    if blocks := _blocks():
        return blocks[-1]
    _check_name(_selected, f"{ENVIRONMENT_VARIABLE}=")
    return _selected


class use_backend:
    """Choose the backend of every loss: by a call, of the process from here on; in a `with` statement, of the block.

    name: "auto", "eager", "triton", "reference", or a name given to `register_backend`. A backend that cannot serve a
    call raises RuntimeError at that call; it is never replaced silently.

    The call switches all threads at once. To enter the object takes that back, if it was not done before, and chooses
    for the code in the block only, in this thread or asyncio task: other threads and tasks go on with their own blocks,
    or the choice of the process. To leave restores what was chosen before. An object can be entered many times, also by
    several threads at a time; while it is made and not yet entered, its call stands. Inside a function that
    torch.compile traces only the block counts; a call alone does nothing there.

    Raises ValueError for another name, and nothing is switched.
    """

    def __init__(self, name: str) -> None:
        _check_name(name, "backend name is ")
        self._name = name
        if not torch.compiler.is_dynamo_compiling():
            _calls.add(self, name)

    def __enter__(self) -> None:
        if not torch.compiler.is_dynamo_compiling():
            _calls.withdraw(self)
        _set_blocks((*_blocks(), self._name))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _set_blocks(_without_last(_blocks(), self._name))


def _without_last(names: tuple[str, ...], name: str) -> tuple[str, ...]:
    """`names` without the last `name`: blocks of generators need not end in the order in which they began."""
    for i in range(len(names) - 1, -1, -1):
        if names[i] == name:
            return names[:i] + names[i + 1 :]
    return names


class _Calls:
    """The calls of `use_backend` that were not entered. The last one stands: its name is `_selected`.

    What was called and not kept can't be entered any more: it stands until another call, and those before it are
    forgotten.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: list[tuple[weakref.ref[use_backend], str]] = []
        self._first = _selected  # what stands without any

    def add(self, block: use_backend, name: str) -> None:
        global _selected
        with self._lock:
            for i in range(len(self._made) - 1, -1, -1):
                if self._made[i][0]() is None:
                    del self._made[:i]
                    break
            self._made.append((weakref.ref(block), name))
            _selected = name

    def withdraw(self, block: use_backend) -> None:
        global _selected
        with self._lock:
            kept = [made for made in self._made if made[0]() is not block]
            if len(kept) < len(self._made):
                self._made = kept
                _selected = kept[-1][1] if kept else self._first


_calls = _Calls()

# --- what a device can be served by ---

_lock = threading.Lock()
_triton: ModuleType | str | None = None  # the module, or why it cannot be imported
_checked: dict[int, str | None] = {}  # CUDA device: why its first kernel failed, None if it did not
_warned = False


def _import_triton() -> ModuleType | str:
    """The module that launches kernels, or why it cannot be imported: tried once per process."""
    global _triton
    if _triton is None:
        try:
            _triton = importlib.import_module("tritonloss.backends.triton")
        except Exception as error:  # a broken installation of Triton raises anything
            _triton = f"Triton cannot be imported ({type(error).__name__}: {error})"
    return _triton


def triton_unusable(device: torch.device) -> str | None:
    """Why Triton cannot serve tensors on `device`; None if it can.

    The first call for a CUDA or ROCm device launches one small kernel there and checks its numbers, which takes about
    a second with a cold cache and waits for the device. During graph capture and under torch.compile's tracing nothing
    is launched: what is known by then decides, and what is not known is taken to work.
    """
    module = _import_triton()
    if isinstance(module, str):
        return module
    if module.INTERPRETED:
        return None
    if device.type != "cuda":
        return f"Triton serves CUDA and ROCm tensors, not {device.type} (TRITON_INTERPRET=1 is for tests)"
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < OLDEST_CAPABILITY:
        return f"Triton needs compute capability {OLDEST_CAPABILITY}, {device} is older"
    return _first_kernel_failed(module, device)


def _first_kernel_failed(module: ModuleType, device: torch.device) -> str | None:
    index = cast("int | None", device.index)
    if torch.compiler.is_compiling() or not torch.cuda.is_available():
        return _checked.get(index or 0)
    if index is None:
        index = torch.cuda.current_device()
    if index not in _checked and _may_launch():
        with _lock:
            if index not in _checked:
                _checked[index] = module.self_check(torch.device("cuda", index))
    return _checked.get(index)


def _may_launch() -> bool:
    """Not during graph capture, and not under a mode in which tensors are fake."""
    return _get_current_dispatch_mode() is None and not torch.cuda.is_current_stream_capturing()


def _warn_once(reason: str) -> None:
    global _warned
    if not (_warned or torch.compiler.is_compiling()):
        _warned = True
        warnings.warn(
            f"tritonloss computes in plain PyTorch on this GPU, which is slower: {reason}. Triton needs a C compiler "
            "(CC), a driver and a writable TRITON_CACHE_DIR; `python -m tritonloss` shows whether it works, "
            f"{ENVIRONMENT_VARIABLE}=eager chooses plain PyTorch without this warning",
            RuntimeWarning,
            stacklevel=3,
        )


def resolve_backend(name: str, device: torch.device) -> str:
    """Replace "auto" by the backend for `device`.

    Where "auto" finds no usable Triton on a CUDA device it warns, once per process. Raises RuntimeError if a named
    backend cannot serve the device.
    """
    if name == "auto":
        if device.type != "cuda":
            return "eager"
        if (reason := triton_unusable(device)) is None:
            return "triton"
        _warn_once(reason)
        return "eager"
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


def logsumexp_module(name: str, device: torch.device) -> ModuleType:
    """The module with `pair_logsumexp_forward` and `pair_logsumexp_backward` that serves `device`.

    Raises RuntimeError for a backend that has none.
    """
    if name not in _registered and name != "reference":
        return importlib.import_module(f"tritonloss.backends.{resolve_backend(name, device)}_logsumexp")
    module = backend_module(name, device)
    missing = [function for function in LOGSUMEXP_FUNCTIONS if not callable(getattr(module, function, None))]
    if missing:
        raise RuntimeError(
            f"backend {name!r} was asked for, but its module has no block functions {', '.join(missing)}"
        )
    return module
