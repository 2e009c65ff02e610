"""Which code serves a call, why, on which device it is launched, and what is tuned."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from checks import assert_close, assert_same, python, value_and_grad
from inputs import E1
from registry import LOSSES
from torch import Tensor

import tritonloss
from tritonloss import backends, reference
from tritonloss.backends import (
    backend_module,
    register_backend,
    resolve_backend,
    selected_backend,
    triton_metrics,
    triton_unusable,
    tuning,
    use_backend,
)
from tritonloss.backends import triton as triton_backend
from tritonloss.layout import Positives
from tritonloss.losses import PNPLoss

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 1)
interpreted = pytest.mark.skipif(not triton_backend.INTERPRETED, reason="on a GPU the kernels are compiled")

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
    assert resolve_backend("auto", CUDA) == expected


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
    for function in backends.BLOCK_FUNCTIONS:
        setattr(module, function, getattr(importlib.import_module("tritonloss.backends.eager"), function))
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

    for function in backends.BLOCK_FUNCTIONS:
        monkeypatch.setattr(module, function, spy(function))
    register_backend("stand-in", module)
    rows, labels = E1.on(CPU)
    for case in LOSSES.values():
        results = []
        for name in ("stand-in", "eager"):
            with use_backend(name):
                results.append(value_and_grad(case.module(2, rows), rows, labels))
        assert_close(*results)
    assert set(calls) == set(backends.BLOCK_FUNCTIONS)
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
    """Stands for a kernel: remembers the guards of every launch, and its arguments."""

    def __init__(self) -> None:
        self.guards: list[list[torch.device]] = []
        self.arguments: list[dict[str, Any]] = []

    def __getitem__(self, grid: Any) -> Recorder:
        return self

    def __call__(self, **arguments: Any) -> None:
        self.guards.append(list(Guard.active))
        self.arguments.append(arguments)


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


def stand_in(monkeypatch: pytest.MonkeyPatch) -> tuple[Recorder, Recorder]:
    """In place of the autotuned and of the plain kernels, as on a GPU."""
    tuned, plain = Recorder(), Recorder()
    monkeypatch.setattr(triton_backend, "INTERPRETED", False)
    monkeypatch.setattr(triton_backend, "_autotuner", lambda name: tuned)
    for name in ("soft_rank_forward", "soft_rank_backward"):
        monkeypatch.setitem(triton_backend.KERNELS, name, plain)
    return tuned, plain


@pytest.mark.parametrize("variable", ["1", "0"])
def test_kernels_are_launched_on_the_device_of_the_scores(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 58: the current device may be another one."""
    monkeypatch.setattr(torch.cuda, "device", Guard)
    monkeypatch.setenv("TRITONLOSS_AUTOTUNE", variable)
    tuned, plain = stand_in(monkeypatch)
    b = block_arguments()
    launch_both(b, b.scores.as_subclass(OnCuda))
    assert tuned.guards + plain.guards == [[CUDA], [CUDA]]
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


# --- tuning ---


@pytest.mark.parametrize(
    ("size", "expected"),
    [(0, 1), (1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (1000, 1024), (1024, 1024), (1025, 2048)],
)
def test_bucket(size: int, expected: int) -> None:
    assert tuning.bucket(size) == expected


@pytest.mark.parametrize("width", range(1, 40))
def test_positives_per_tile(width: int) -> None:
    """A power of two, no more than the class needs and no more than 8."""
    assert tuning.positives_per_tile(width) == min(8, tuning.bucket(width))


@pytest.mark.parametrize("itemsize", [4, 8])
@pytest.mark.parametrize("kernel", tuning.CONFIGS)
def test_every_tile_has_a_configuration(kernel: str, itemsize: int) -> None:
    for block_p in [1, 2, 4, 8] if kernel.startswith(("soft_rank", "rank_counts")) else [1]:
        configurations = tuning.configurations(kernel, block_p, itemsize)
        assert configurations
        for config in configurations:
            assert tuning.fits_registers(config, block_p)
            assert config["BLOCK_N"] == tuning.bucket(config["BLOCK_N"])
            assert config["num_warps"] * 64 <= 1024  # case 85: a warp of AMD has 64 lanes


def test_every_kernel_has_configurations() -> None:
    assert {*triton_backend.KERNELS, *triton_metrics.KERNELS} == set(tuning.CONFIGS)


@pytest.mark.parametrize(("variable", "enabled"), [(None, True), ("1", True), ("0", False)])
def test_tuning_is_switched_by_the_environment(
    variable: str | None, enabled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITONLOSS_AUTOTUNE", raising=False)
    if variable is not None:
        monkeypatch.setenv("TRITONLOSS_AUTOTUNE", variable)
    assert tuning.tuning_enabled() == enabled
    tuned, plain = stand_in(monkeypatch)
    b = block_arguments(dtype=torch.float32)
    launch_both(b, b.scores)
    used, unused = (tuned, plain) if enabled else (plain, tuned)
    assert (len(used.arguments), len(unused.arguments)) == (2, 0)
    for kernel, arguments in zip(("soft_rank_forward", "soft_rank_backward"), used.arguments, strict=True):
        first = tuning.configurations(kernel, arguments["BLOCK_P"])[0]
        # The autotuner adds a configuration itself; without it the first one is fixed.
        assert arguments.items() & first.items() == (set() if enabled else first.items())


def tuners(monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, Any], list[str]]:
    """The autotuners of the two kernels, in place, with a benchmark that runs nothing; and its calls."""
    benchmarked: list[str] = []

    def tuner(name: str) -> Any:
        def do_bench(kernel_call: Any, quantiles: Any) -> list[float]:
            benchmarked.append(name)
            return [float(len(benchmarked))] * 3

        # triton.autotune of 3.2 drops the argument, and asks the driver of a GPU instead.
        driver = SimpleNamespace(active=SimpleNamespace(get_benchmarker=lambda: do_bench))
        monkeypatch.setattr(sys.modules["triton.runtime.autotuner"], "driver", driver)
        return tuning.autotuner(triton_backend.triton, triton_backend.KERNELS[name], name, do_bench)

    made = {name: tuner(name) for name in ("soft_rank_forward", "soft_rank_backward")}
    monkeypatch.setattr(triton_backend, "INTERPRETED", False)
    monkeypatch.setattr(triton_backend, "_autotuner", made.__getitem__)
    return made, benchmarked


@interpreted
def test_tuning_entries_of_a_sweep_of_batch_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 79: 40 sizes from 900 to 1290 lie in two buckets, 1024 and 2048: two entries a kernel, not 40.

    The real kernels under Triton's own autotuner, in float64, for which no assembly is needed.
    """
    made, benchmarked = tuners(monkeypatch)
    monkeypatch.setattr(
        tuning, "configurations", lambda kernel, block_p=1, itemsize=4: tuning.CONFIGS[kernel][:2]
    )
    for n in range(900, 1300, 10):
        b = block_arguments(n)
        launch_both(b, b.scores)
    assert {name: len(tuner.cache) for name, tuner in made.items()} == dict.fromkeys(made, 2)
    assert benchmarked == [
        name for _ in range(2) for name in made for _ in range(2)
    ]  # two configurations each
    # The result is that of the last launch, by the configuration that was found: the first one was the fastest.
    ranks, slopes, positives, _ = b.flat
    expected = [t.clone() for t in (ranks, slopes, positives)]
    monkeypatch.setattr(triton_backend, "INTERPRETED", True)
    launch_both(b, b.scores)
    assert_close([ranks, slopes, positives], expected, rtol=1e-12)
    assert {c.kwargs["BLOCK_N"] for tuner in made.values() for c in tuner.cache.values()} == {512}


@interpreted
def test_what_separates_tuning_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    """The surrogate and the bucket of the class size do, as they change the work of a tile."""
    made, _ = tuners(monkeypatch)
    monkeypatch.setattr(
        tuning, "configurations", lambda kernel, block_p=1, itemsize=4: tuning.CONFIGS[kernel][:2]
    )
    forward = made["soft_rank_forward"]
    b = block_arguments()

    def launch(surrogate: str = "sigmoid", width: int = 3) -> int:
        positives = Positives(b.positives.start, b.positives.count, b.positives.offset, width)
        ranks, slopes, scores, _ = b.flat
        triton_backend.soft_rank_forward(b.scores, positives, surrogate, ranks, slopes, scores)
        return len(forward.cache)

    assert launch() == 1
    assert launch(width=4) == 1
    assert launch(width=5) == 2
    assert launch(surrogate="one_side_huber") == 3
    assert launch() == 3
