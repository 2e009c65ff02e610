"""Which code serves a call, why, on which device it is launched, and what is tuned."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import sys
import threading
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from checks import assert_close, assert_same, python, value_and_grad
from inputs import E1
from registry import LOSSES
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import tritonloss
from tritonloss import backends, reference
from tritonloss.backends import (
    backend_module,
    register_backend,
    resolve_backend,
    selected_backend,
    triton_unusable,
    use_backend,
)
from tritonloss.backends import triton as triton_backend
from tritonloss.layout import Positives
from tritonloss.losses import NTXentLoss, PNPLoss

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 1)

# --- the choice ---


def test_auto_is_eager_on_the_cpu() -> None:
    """Under the interpreter as well: that is for tests."""
    assert selected_backend() == "auto"
    assert resolve_backend("auto", CPU) == "eager"


@pytest.mark.parametrize(("reason", "expected"), [(None, "triton"), ("it is broken", "eager")])
def test_auto_takes_triton_on_cuda_where_it_works(
    reason: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "triton_unusable", lambda device: reason)
    monkeypatch.setattr(backends, "_warned", False)
    with pytest.warns(RuntimeWarning, match=reason) if reason else contextlib.nullcontext():
        assert resolve_backend("auto", CUDA) == expected
    assert resolve_backend("auto", CUDA) == expected  # it is said once


@pytest.mark.parametrize("name", ["eager", "reference"])
def test_a_named_backend_is_taken_everywhere(name: str) -> None:
    assert resolve_backend(name, CPU) == resolve_backend(name, CUDA) == name


def test_named_triton_raises_where_it_cannot_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_backend, "INTERPRETED", False)
    with pytest.raises(
        RuntimeError, match="'triton' was asked for, but Triton serves CUDA and ROCm tensors, not cpu"
    ):
        resolve_backend("triton", CPU)


@pytest.mark.parametrize(
    ("capability", "hip", "usable"),
    [((9, 0), None, True), ((8, 0), None, True), ((7, 5), None, False), ((7, 0), "6.0", True)],
)
def test_capability(
    capability: tuple[int, int], hip: str | None, usable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def get_device_capability(device: torch.device) -> tuple[int, int]:
        asked.append(device)
        return capability

    monkeypatch.setattr(triton_backend, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", get_device_capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # nothing is launched
    reason = triton_unusable(CUDA)
    assert (reason is None) == usable
    assert usable or "capability (8, 0)" in str(reason)
    assert asked == ([] if hip else [CUDA])


def test_use_backend_as_a_call_and_as_a_context() -> None:
    use_backend("eager")
    assert selected_backend() == "eager"
    with use_backend("reference"):
        assert selected_backend() == "reference"
        with use_backend("auto"):
            assert selected_backend() == "auto"
        assert selected_backend() == "reference"
    assert selected_backend() == "eager"
    assert tritonloss.use_backend is use_backend


def test_a_call_stands_until_the_object_is_entered() -> None:
    """A call alone switches; a block takes that back, in whatever order prepared objects are entered."""
    use_backend("eager")
    for order in ([0, 1], [1, 0]):
        prepared = [use_backend("reference"), use_backend("triton")]
        assert selected_backend() == "triton"
        for i in order:
            with prepared[i]:
                assert selected_backend() == ("reference", "triton")[i]
        assert selected_backend() == "eager"


def test_calls_leave_nothing_behind() -> None:
    for _ in range(100):
        use_backend("eager")
    assert len(backends._calls._made) <= 2


def test_one_object_entered_again_and_within_itself() -> None:
    block = use_backend("reference")
    for _ in range(2):
        with block, use_backend("eager"), block:
            assert selected_backend() == "reference"
        assert selected_backend() == "auto"


def test_blocks_of_two_threads_overlap() -> None:
    """First in, first out; and the same object in both."""
    shared, inside, left = use_backend("reference"), threading.Event(), threading.Event()
    seen = []

    def other() -> None:
        seen.append(selected_backend())
        with use_backend("eager"), shared:
            inside.set()
            assert left.wait(10)
            seen.append(selected_backend())
        seen.append(selected_backend())

    thread = threading.Thread(target=other)
    with shared:
        thread.start()
        assert inside.wait(10)
        assert selected_backend() == "reference"
    left.set()
    thread.join()
    assert seen == ["auto", "reference", "auto"]
    assert selected_backend() == "auto"


def test_a_call_reaches_other_threads() -> None:
    seen: list[str] = []
    use_backend("eager")
    with use_backend("reference"):
        thread = threading.Thread(target=lambda: seen.append(selected_backend()))
        thread.start()
        thread.join()
    assert seen == ["eager"]


def test_blocks_of_two_tasks_overlap() -> None:
    async def task(name: str, steps: int) -> list[str]:
        seen = []
        with use_backend(name):
            for _ in range(steps):
                await asyncio.sleep(0)
                seen.append(selected_backend())
        return [*seen, selected_backend()]

    async def both() -> list[list[str]]:
        return await asyncio.gather(task("reference", 2), task("eager", 4))

    assert asyncio.run(both()) == [["reference"] * 2 + ["auto"], ["eager"] * 4 + ["auto"]]


def test_blocks_of_two_generators_overlap() -> None:
    def block(name: str) -> Iterator[None]:
        with use_backend(name):
            yield

    first, second = block("reference"), block("eager")
    assert (next(first), next(second), next(first, 0)) == (None, None, 0)
    assert selected_backend() == "eager"
    assert next(second, 0) == 0
    assert selected_backend() == "auto"


@pytest.mark.filterwarnings("ignore")  # torch.compile warns about itself
def test_a_compiled_function_follows_the_choice(compiler: None) -> None:
    """One graph, and another one for another name: of a call, a block, another thread, and within the function."""
    counter = CompileCounterWithBackend("eager")

    def number(x: Tensor) -> Tensor:
        return x + ["auto", "eager", "triton", "reference"].index(selected_backend())

    def both(x: Tensor) -> Tensor:
        with use_backend("reference"):
            inner = number(x)
        return 10 * inner + number(x)

    compiled = torch.compile(number, fullgraph=True, backend=counter)
    zero, seen = torch.zeros(()), []
    assert compiled(zero) == 0
    with use_backend("eager"):
        assert compiled(zero) == 1
        with use_backend("reference"):
            assert compiled(zero) == 3
            thread = threading.Thread(target=lambda: seen.append(compiled(zero).item()))
            thread.start()
            thread.join()
        assert compiled(zero) == 1
    assert seen == [0]
    use_backend("triton")
    assert compiled(zero) == 2
    built = counter.frame_count
    use_backend("auto")
    assert compiled(zero) == 0
    assert counter.frame_count == built
    with use_backend("eager"):
        assert torch.compile(both, fullgraph=True, backend=counter)(zero) == 31
    assert selected_backend() == "auto"


def test_use_backend_is_undone_by_an_exception() -> None:
    with pytest.raises(KeyError), use_backend("reference"):
        raise KeyError
    assert selected_backend() == "auto"


@pytest.mark.parametrize("name", ["", "Triton", "cuda", None, 3])
def test_unknown_name(name: Any) -> None:
    with pytest.raises(ValueError, match="expected one of auto, eager, triton, reference"):
        use_backend(name)
    assert selected_backend() == "auto"


def test_the_choice_is_the_code_that_runs(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    ran: list[str] = []

    def spy(name: str, module: Any, function: str) -> None:
        real = getattr(module, function)

        def called(*args: Any, **kwargs: Any) -> Any:
            ran.append(name)
            return real(*args, **kwargs)

        monkeypatch.setattr(module, function, called)

    spy("eager", importlib.import_module("tritonloss.backends.eager"), "soft_rank_forward")
    spy("triton", triton_backend, "soft_rank_forward")
    spy("reference", reference, "pnp")
    rows, labels = E1.on(device)
    for name in ("eager", "triton", "reference"):
        with use_backend(name):
            value = PNPLoss()(rows, labels)
        assert_close(value.item(), 0.254496525, atol=6e-10)  # printed to nine digits
    assert ran == ["eager", "triton", "reference"]


# --- a backend from outside ---


def stand_in_backend() -> ModuleType:
    """The eager functions under another name."""
    module = ModuleType("stand_in")
    for names, source in (
        (backends.BLOCK_FUNCTIONS, "eager"),
        (backends.LOGSUMEXP_FUNCTIONS, "eager_logsumexp"),
    ):
        for function in names:
            setattr(
                module, function, getattr(importlib.import_module(f"tritonloss.backends.{source}"), function)
            )
    return module


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is forgotten."""
    monkeypatch.setattr(backends, "_registered", {})


def test_a_registered_backend_serves_every_loss(registry: None, monkeypatch: pytest.MonkeyPatch) -> None:
    module, calls = stand_in_backend(), []

    def spy(function: str) -> Any:
        real = getattr(module, function)

        def called(*args: Any) -> None:
            calls.append(function)
            real(*args)

        return called

    functions = {*backends.BLOCK_FUNCTIONS, *backends.LOGSUMEXP_FUNCTIONS}
    for function in functions:
        monkeypatch.setattr(module, function, spy(function))
    register_backend("stand-in", module)
    rows, labels = E1.on(CPU)
    for case in LOSSES.values():
        results = []
        for name in ("stand-in", "eager"):
            with use_backend(name):
                results.append(value_and_grad(case.module(2, rows), rows, labels))
        assert_close(*results)
    assert set(calls) == functions
    assert resolve_backend("auto", CPU) == "eager"


def test_a_registered_name_is_known(registry: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_selected", "later")  # TRITONLOSS_BACKEND, before the module is imported
    with pytest.raises(ValueError, match="TRITONLOSS_BACKEND='later': expected one of auto, eager"):
        selected_backend()
    module = stand_in_backend()
    register_backend("later", module)
    assert selected_backend() == "later"
    assert backend_module("later", CPU) is module
    with pytest.raises(ValueError, match="expected one of auto, eager, triton, reference, later"):
        use_backend("sooner")


@pytest.mark.parametrize("name", backends.BACKENDS)
def test_our_names_are_not_replaced(name: str, registry: None) -> None:
    with pytest.raises(ValueError, match=f"backend name is '{name}': expected another than auto"):
        register_backend(name, stand_in_backend())


def test_a_backend_needs_all_functions(registry: None) -> None:
    module = stand_in_backend()
    del module.soft_histogram_backward
    with pytest.raises(TypeError, match=r"got none named soft_histogram_backward$"):
        register_backend("half", module)
    with pytest.raises(ValueError, match="backend name is 'half'"):
        use_backend("half")


def test_log_sum_exp_losses_name_what_a_backend_lacks(registry: None) -> None:
    module = stand_in_backend()
    del module.pair_logsumexp_backward
    register_backend("without", module)
    rows, labels = E1.on(CPU)
    with use_backend("without"):
        PNPLoss()(rows, labels)
        with pytest.raises(RuntimeError, match="no block functions pair_logsumexp_backward"):
            NTXentLoss()(rows, labels)


def test_the_reference_has_no_blocks() -> None:
    with pytest.raises(
        RuntimeError, match="backend 'reference' was asked for, but it has no block functions"
    ):
        backend_module("reference", CPU)


# --- the environment ---


def fresh_copy(monkeypatch: pytest.MonkeyPatch, variable: str | None) -> ModuleType:
    """The module as a new process would import it."""
    if variable is not None:
        monkeypatch.setenv("TRITONLOSS_BACKEND", variable)
    spec = importlib.util.spec_from_file_location("fresh_backends", backends.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "fresh_backends", module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", [None, "", "auto", "eager", "triton", "reference"])
def test_environment_chooses(name: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    module = fresh_copy(monkeypatch, name)
    assert module.selected_backend() == (name or "auto")
    with module.use_backend("eager"):  # what the program says goes first
        assert module.selected_backend() == "eager"
    assert module.selected_backend() == (name or "auto")


def test_unknown_name_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing must not fail; using must."""
    module = fresh_copy(monkeypatch, "cuda")
    with pytest.raises(ValueError, match="TRITONLOSS_BACKEND='cuda': expected one of auto"):
        module.selected_backend()
    module.use_backend("eager")
    assert module.selected_backend() == "eager"


FORCED = """
import torch
import tritonloss
rows = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [0.6, 0.8]], requires_grad=True)
print(tritonloss.losses.PNPLoss()(rows, torch.tensor([0, 0, 1, 1])).item())
"""


def test_forced_triton_never_falls_back_silently() -> None:
    """CPU tensors, no interpreter: on every machine."""
    text = python(FORCED, expect_failure=True, TRITONLOSS_BACKEND="triton")
    assert "RuntimeError: backend 'triton' was asked for, but" in text


def test_forced_eager_in_a_new_process() -> None:
    assert_close(float(python(FORCED, TRITONLOSS_BACKEND="eager")), 0.2544965, atol=1e-6)  # float32


# --- launches ---


class OnCuda(torch.Tensor):
    """A CPU tensor that says it is on the second GPU."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return CUDA


class Guard:
    """Stands for torch.cuda.device: remembers the devices whose guard is entered and not yet left."""

    active: ClassVar[list[torch.device]] = []

    def __init__(self, device: torch.device) -> None:
        self.wanted = device

    def __enter__(self) -> None:
        self.active.append(self.wanted)

    def __exit__(self, *_: object) -> None:
        self.active.remove(self.wanted)


class Recorder:
    """Stands for a kernel: remembers the guards of every launch."""

    def __init__(self) -> None:
        self.guards: list[list[torch.device]] = []

    def __getitem__(self, grid: Any) -> Recorder:
        return self

    def __call__(self, **arguments: Any) -> None:
        self.guards.append(list(Guard.active))


def block_arguments(n_keys: int = 40, dtype: torch.dtype = torch.float64) -> SimpleNamespace:
    """A block of two rows with three positives each, and the flat tensors."""
    scores, grad_scores = torch.randn(2, 2, -(-n_keys // 16) * 16, dtype=dtype)[..., :n_keys]
    start, count, offset = torch.tensor([[0, 5], [3, 3], [0, 3]])
    flat = [torch.randn(6, dtype=dtype) for _ in range(4)]
    return SimpleNamespace(
        scores=scores, grad_scores=grad_scores, positives=Positives(start, count, offset, 3), flat=flat
    )


def launch_both(b: SimpleNamespace, scores: Tensor) -> None:
    ranks, slopes, positives, weights = b.flat
    triton_backend.soft_rank_forward(scores, b.positives, "sigmoid", ranks, slopes, positives)
    triton_backend.soft_rank_backward(
        scores, b.positives, "sigmoid", slopes, positives, weights, weights, b.grad_scores
    )


def test_kernels_are_launched_on_the_device_of_the_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """The current device may be another one."""
    monkeypatch.setattr(torch.cuda, "device", Guard)
    monkeypatch.setattr(triton_backend, "INTERPRETED", False)
    recorder = Recorder()
    for name in ("soft_rank_forward", "soft_rank_backward"):
        monkeypatch.setitem(triton_backend.KERNELS, name, recorder)
    b = block_arguments()
    launch_both(b, b.scores.as_subclass(OnCuda))
    assert recorder.guards == [[CUDA], [CUDA]]
    assert Guard.active == []


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second GPU")
def test_a_call_on_the_second_gpu() -> None:
    rows, labels = E1.on(CUDA)
    with torch.cuda.device(0):
        assert_close(PNPLoss()(rows, labels).item(), 0.254496525, atol=6e-10)


def test_scores_with_another_row_stride_are_refused() -> None:
    """Kernels count rows in units of 16 elements: any other stride would read the wrong rows."""
    b = block_arguments()
    with pytest.raises(ValueError, match="strides"):
        launch_both(b, torch.randn(2, 40, dtype=torch.float64))
    with pytest.raises(ValueError, match="strides"):
        launch_both(b, torch.randn(40, 48, dtype=torch.float64).T)


def test_more_tiles_of_positives_than_an_axis_of_the_grid_has_programs(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """A class of 50 rows is 7 tiles, of which an axis takes 3 here: the third layer has one tile and two of nothing."""
    scores = torch.randn(2, 64, dtype=torch.float64, device=device)
    positives = Positives(*torch.tensor([[0, 5], [50, 17], [0, 50]], device=device), 50)

    def forward() -> list[Tensor]:
        ranks, slopes, own = scores.new_full((3, 67), torch.nan)
        triton_backend.soft_rank_forward(scores, positives, "sigmoid", ranks, slopes, own)
        return [ranks, slopes, own]

    expected = forward()
    monkeypatch.setattr(triton_backend, "MAX_GRID_AXIS", 3)
    assert_same(forward(), expected)
    assert all(values.isfinite().all() for values in expected)
