"""How a kernel is launched: by a table, by timing, or by the static model; and what lies on disk."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checks import assert_same

from tritonloss import __main__, tune, use_backend
from tritonloss.backends import tables, tuning
from tritonloss.backends import triton as triton_backend
from tritonloss.layout import Positives
from tritonloss.losses import HistogramLoss, PNPLoss

interpreted = pytest.mark.skipif(not triton_backend.INTERPRETED, reason="on a GPU the kernels are compiled")
GPU = tuning.Gpu("Stand-in GPU", 132)
# What the stand-in finds fastest, and what is in the tables of the tests; the static model takes neither for 40 keys.
TIMED, GIVEN = {"BLOCK_N": 1024, "num_warps": 4}, {"BLOCK_N": 512, "num_warps": 1}
STATIC = {"BLOCK_N": 256, "num_warps": 1}

# --- configurations ---


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
        assert bool(configurations) == (itemsize == 4 or kernel not in tuning.FLOAT32_ONLY)
        for config in configurations:
            assert tuning.fits_registers(config, block_p)
            assert config["BLOCK_N"] == tuning.bucket(config["BLOCK_N"])
            assert config["num_warps"] * 64 <= 1024  # case 85: a warp of AMD has 64 lanes


def test_every_kernel_has_configurations() -> None:
    assert set(triton_backend.KERNELS) == set(tuning.CONFIGS)


# --- the static model ---


@pytest.mark.parametrize(
    ("n_keys", "block_p", "rows", "multiprocessors", "expected"),
    [
        # An H200: enough rows for one warp each; fewer rows of more keys, until the widest programs win.
        (1024, 4, 1024, 132, (512, 1)),
        (2048, 4, 2048, 132, (256, 1)),
        (32768, 4, 4096, 132, (1024, 4)),
        (32768, 4, 200, 132, (2048, 8)),
        (131072, 4, 64, 132, (2048, 8)),
        (131072, 8, 64, 132, (2048, 8)),
        (32768, 8, 200, 132, (1024, 4)),
        # A small GPU is full earlier.
        (131072, 4, 64, 16, (1024, 4)),
    ],
)
def test_static_configuration(
    n_keys: int, block_p: int, rows: int, multiprocessors: int, expected: tuple[int, int]
) -> None:
    chosen = tuning.static_configuration(n_keys, block_p, rows, multiprocessors)
    assert (chosen["BLOCK_N"], chosen["num_warps"]) == expected
    assert chosen in tuning.configurations("soft_rank_forward", block_p)


@pytest.mark.parametrize(
    ("config", "n_keys", "block_p", "rows", "microseconds"),
    [
        ((512, 1), 32768, 4, 200, 30.4),
        ((1024, 4), 32768, 4, 200, 13.6),
        ((2048, 8), 32768, 4, 200, 9.0),
        ((512, 1), 131072, 4, 64, 121.6),
        ((256, 1), 131072, 8, 64, 225.0),
        ((512, 1), 8192, 4, 800, 8.3),
    ],
)
def test_static_cycles_are_those_of_the_counted_instructions(
    config: tuple[int, int], n_keys: int, block_p: int, rows: int, microseconds: float
) -> None:
    """At 1.75 GHz, within a tenth of a model of one scheduler that takes the SASS of each build as it is."""
    given = dict(zip(("BLOCK_N", "num_warps"), config, strict=True))
    cycles = tuning.static_cycles(given, n_keys, block_p, rows, 132)
    assert cycles / 1750 == pytest.approx(microseconds, rel=0.1)


# --- launches ---


class Kernels:
    """Stands for kernels on a GPU: remembers the configuration of each launch, the trials of the timing apart."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launched: list[dict[str, int]] = []
        self.timed: list[dict[str, int]] = []
        self.errors: list[Exception] = []
        monkeypatch.setattr(triton_backend, "INTERPRETED", False)
        monkeypatch.setattr(tuning, "gpu", lambda device: GPU)
        monkeypatch.setattr(triton_backend.triton.testing, "do_bench", self.do_bench)
        for name in triton_backend.KERNELS:
            monkeypatch.setitem(triton_backend.KERNELS, name, self)
        self.forget(monkeypatch)

    def forget(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """As in a new process."""
        monkeypatch.setattr(tuning, "_tables", {})

    def __getitem__(self, grid: Any) -> Kernels:
        return self

    def __call__(self, **arguments: Any) -> None:
        if self.errors:
            raise self.errors.pop()
        if "words" in arguments:
            arguments["words"].add_(1)
        self.launched.append({name: arguments[name] for name in ("BLOCK_N", "num_warps")})

    def do_bench(self, launch: Callable[[], Any], **_: Any) -> float:
        """Tiles of 1024 keys are the fastest."""
        launch()
        self.timed.append(self.launched[-1])
        return float(abs(self.launched[-1]["BLOCK_N"] - TIMED["BLOCK_N"]))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("TRITONLOSS_AUTOTUNE", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv("TRITONLOSS_TUNING_DIR", str(tmp_path / "tables"))
    return tmp_path / "tables"


@pytest.fixture
def kernels(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Kernels:
    return Kernels(monkeypatch)


def forward(
    n_keys: int = 40, width: int = 3, surrogate: str = "sigmoid", slopes: bool = True, among: bool = False
) -> None:
    """One launch for a block of two rows in float32."""
    scores = torch.zeros(2, -(-n_keys // 16) * 16, dtype=torch.float32)[:, :n_keys]
    positives = Positives(*torch.tensor([[0, 5], [3, 3], [0, 3]]), width)
    flat = torch.zeros(6)
    triton_backend.soft_rank_forward(
        scores, positives, surrogate, flat, flat if slopes else None, flat, flat if among else None
    )


def key_of_forward(kernels: Kernels) -> str:
    """The key of the launch above, by what timing keeps of it."""
    forward()
    (key,) = tuning.table_of(GPU.name).entries
    return key


def test_first_use_is_timed_once_and_kept(
    kernels: Kernels, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choices = tuning.configurations("soft_rank_forward", 4)
    forward()
    assert kernels.timed == choices
    assert kernels.launched[-1] == TIMED
    forward()
    kernels.forget(monkeypatch)
    forward()
    assert kernels.timed == choices
    assert kernels.launched[-2:] == [TIMED, TIMED]
    (file,) = folder.iterdir()
    assert file.name == "stand-in-gpu.json"
    assert tables.read(file) == (GPU.name, tuning.table_of(GPU.name))


def test_sizes_of_one_bucket_are_timed_once(kernels: Kernels) -> None:
    """40 sizes from 900 to 1290 lie in two buckets, 1024 and 2048."""
    for n in range(900, 1300, 10):
        forward(n)
    assert len(tuning.table_of(GPU.name).entries) == 2


def test_what_separates_results(kernels: Kernels) -> None:
    """All that makes another kernel or another amount of work of it, whatever came first."""
    forward()
    forward(width=4)
    assert len(tuning.table_of(GPU.name).entries) == 1
    for n, options in enumerate(
        [{"width": 5}, {"surrogate": "one_side_huber"}, {"slopes": False}, {"among": True}, {"n_keys": 100}]
    ):
        forward(**options)
        assert len(tuning.table_of(GPU.name).entries) == n + 2


@interpreted
def test_timing_leaves_the_results_as_they_are(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kernel of a step runs in each of its configurations; a table of words is then zero again."""
    torch.manual_seed(0)
    rows, labels = torch.randn(8, 5, dtype=torch.float64), torch.arange(8) // 4

    def steps() -> list[torch.Tensor]:
        results = []
        for criterion in (PNPLoss(), HistogramLoss(5)):
            leaf = rows.clone().requires_grad_()
            value = criterion(leaf, labels)
            results += [value.detach(), torch.autograd.grad(value, leaf)[0]]
        return results

    with use_backend("triton"):
        expected = steps()
        monkeypatch.setattr("tritonloss.backends.triton_unusable", lambda device: None)
        monkeypatch.setattr(triton_backend, "INTERPRETED", False)
        monkeypatch.setattr(tuning, "gpu", lambda device: GPU)
        monkeypatch.setattr(tuning, "_tables", {})
        choices = [{"BLOCK_N": 16, "num_warps": 4}, {"BLOCK_N": 8, "num_warps": 4}]
        monkeypatch.setattr(tuning, "configurations", lambda *_: choices)
        times = iter([2.0, 1.0] * 100)
        monkeypatch.setattr(
            triton_backend.triton.testing, "do_bench", lambda launch, **_: (launch(), next(times))[1]
        )
        torch.testing.assert_close(steps(), expected, rtol=1e-12, atol=1e-14)
    found = tuning.table_of(GPU.name).entries
    assert {key.split()[0] for key in found} >= {"soft_rank_forward", "soft_histogram_forward"}
    assert all(config == choices[1] for config in found.values())


def test_what_was_accumulated_in_the_trials_is_zero_again(kernels: Kernels) -> None:
    counts, fractions = torch.zeros(1, 2, 12, dtype=torch.int64), torch.zeros(1, 2, 12, dtype=torch.float64)
    ranges = torch.zeros(2, 4, dtype=torch.int64)
    triton_backend.soft_histogram_forward(torch.zeros(2, 48)[:, :40], ranges, 0, False, counts, fractions)
    assert len(kernels.timed) == len(tuning.CONFIGS["soft_histogram_forward"])
    # The stand-in adds 1 to each of the words of one program and digit, once.
    assert_same(fractions, torch.full_like(fractions, 2.0**-24))


def test_a_configuration_that_does_not_fit_is_not_chosen(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    def do_bench(launch: Callable[[], Any], **options: Any) -> float:
        time = kernels.do_bench(launch, **options)
        if kernels.launched[-1] == TIMED:
            raise triton_backend.triton.runtime.errors.OutOfResources(2, 1, "shared memory")
        return time

    monkeypatch.setattr(triton_backend.triton.testing, "do_bench", do_bench)
    forward()
    assert kernels.launched[-1]["BLOCK_N"] == 512


# --- where nothing is timed ---


def in_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)


UNTIMED: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "switched off": lambda monkeypatch: monkeypatch.setenv("TRITONLOSS_AUTOTUNE", "0"),
    "in a group": in_a_group,
    "by a launcher": lambda monkeypatch: monkeypatch.setenv("WORLD_SIZE", "2"),
    "deterministic": lambda monkeypatch: torch.use_deterministic_algorithms(True),
}


@pytest.mark.parametrize("why", UNTIMED)
def test_without_timing_the_static_model_chooses(
    why: str, kernels: Kernels, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where something was timed before: another rank, or another run, would not have it."""
    forward()
    assert kernels.launched[-1] == TIMED
    kernels.timed.clear()
    UNTIMED[why](monkeypatch)
    forward()
    kernels.forget(monkeypatch)
    forward()
    assert kernels.timed == []
    assert kernels.launched[-2:] == [STATIC, STATIC]


@pytest.mark.parametrize("why", [None, *UNTIMED])
def test_a_table_decides_everywhere(
    why: str | None, kernels: Kernels, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = key_of_forward(kernels)
    tables.write(folder / "stand-in-gpu.json", GPU.name, tables.Table({key: GIVEN}, complete=True))
    kernels.forget(monkeypatch)
    kernels.timed.clear()
    if why:
        UNTIMED[why](monkeypatch)
    forward()
    assert kernels.launched[-1] == GIVEN
    forward(n_keys=5000)  # the nearest bucket
    assert kernels.launched[-1] == GIVEN
    forward(surrogate="one_side_huber")  # nothing is near
    assert kernels.launched[-1] == STATIC
    assert kernels.timed == []


def test_nothing_is_timed_during_graph_capture(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_backend, "_is_capturing", lambda device: True)
    forward()
    assert (kernels.timed, kernels.launched) == ([], [STATIC])


def test_a_table_ships(kernels: Kernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes before what was timed, and behind the table of the user."""
    key = key_of_forward(kernels)
    monkeypatch.setattr(tables, "SHIPPED", tmp_path)
    shipped = tables.Table({key: GIVEN}, complete=True)
    tables.write(tmp_path / "stand-in-gpu.json", GPU.name, shipped)
    assert tables.load(GPU.name) == shipped
    own = tables.Table({key: TIMED}, complete=True)
    folder = tables.directory()
    assert folder is not None
    tables.write(folder / "stand-in-gpu.json", GPU.name, own)
    assert tables.load(GPU.name) == own


def test_a_configuration_of_another_version_is_not_used(
    kernels: Kernels, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = key_of_forward(kernels)
    strange = tables.Table({key: {"BLOCK_N": 4096, "num_warps": 1}}, complete=True)
    tables.write(folder / "stand-in-gpu.json", GPU.name, strange)
    kernels.forget(monkeypatch)
    forward()
    assert kernels.launched[-1] == STATIC


# --- the disk ---

BROKEN = {
    "empty": "",
    "half written": '{"format": 1, "device": "Stand-in GPU", "comp',
    "a list": "[1]",
    "deep": "[" * 100000,
    "no text": "\x80",
    "another format": '{"format": 2, "device": "Stand-in GPU", "complete": true, "configurations": {}}',
    "another device": '{"format": 1, "device": "Other", "complete": true, "configurations": {}}',
    "no entries": '{"format": 1, "device": "Stand-in GPU", "complete": true}',
    "a wrong entry": '{"format": 1, "device": "Stand-in GPU", "complete": true, "configurations": {"a": {}}}',
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_a_table_that_cannot_be_read_is_absent(content: str, kernels: Kernels, folder: Path) -> None:
    folder.mkdir()
    file = folder / "stand-in-gpu.json"
    file.write_bytes(content.encode("latin-1"))
    forward()
    assert kernels.timed
    device, table = tables.read(file)  # it was replaced
    assert (device, table.complete, len(table.entries)) == (GPU.name, False, 1)
    assert [entry.name for entry in folder.iterdir()] == [file.name]


@pytest.mark.parametrize("content", [BROKEN["empty"], BROKEN["a list"], BROKEN["a wrong entry"]])
def test_the_report_names_a_table_that_cannot_be_read(content: str, folder: Path) -> None:
    folder.mkdir()
    (folder / "stand-in-gpu.json").write_text(content)
    (line,) = __main__.tuned_configurations()
    assert "stand-in-gpu.json cannot be read" in line


def no_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.write_text("a file")


def no_home(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("TRITONLOSS_TUNING_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", home)


def no_replacing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def replace(*_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "replace", replace)


@pytest.mark.parametrize("harm", [no_folder, no_home, no_replacing])
def test_a_result_that_cannot_be_written_is_lost(
    harm: Callable[..., None], kernels: Kernels, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harm(folder, monkeypatch)
    forward()
    timed = len(kernels.timed)
    forward()
    assert len(kernels.timed) == timed > 0  # this process remembers
    assert not folder.is_dir() or list(folder.iterdir()) == []


def test_results_of_other_processes_stay(
    kernels: Kernels, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward()
    kernels.forget(monkeypatch)
    tuning.table_of(GPU.name).entries.clear()  # of a process that started before that result
    forward(n_keys=100)
    assert len(tables.load(GPU.name).entries) == 2


def test_a_reader_never_meets_half_a_file(folder: Path) -> None:
    file = folder / "gpu.json"
    table = tables.Table({str(n): GIVEN for n in range(200)}, complete=False)
    tables.write(file, "gpu", table)
    done = threading.Event()

    def write() -> None:
        for _ in range(30):
            tables.write(file, "gpu", table)
        done.set()

    thread = threading.Thread(target=write)
    thread.start()
    while not done.is_set():
        assert tables.read(file) == ("gpu", table)
    thread.join()


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"TRITONLOSS_TUNING_DIR": "/here", "XDG_CACHE_HOME": "/cache"}, "/here"),
        ({"TRITONLOSS_TUNING_DIR": "", "XDG_CACHE_HOME": "/cache"}, "/cache/tritonloss"),
        ({"TRITONLOSS_TUNING_DIR": "", "XDG_CACHE_HOME": "", "HOME": "/me"}, "/me/.cache/tritonloss"),
    ],
)
def test_where_results_are_kept(
    variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert tables.directory() == Path(expected)


# --- errors of Triton's cache ---


@pytest.mark.parametrize(
    "error", [FileNotFoundError(2, "gone"), OSError(16, "busy"), PermissionError(13, "denied")]
)
def test_a_launch_that_fails_for_its_cache_is_tried_once_more(error: OSError, kernels: Kernels) -> None:
    forward()
    launches = len(kernels.launched)
    kernels.errors = [error]
    forward()
    assert len(kernels.launched) == launches + 1
    kernels.errors = [error] * 2
    with pytest.raises(RuntimeError, match=r"TRITON_CACHE_DIR .* TRITONLOSS_BACKEND=eager") as raised:
        forward()
    assert raised.value.__cause__ is error
    assert kernels.errors == []


def test_another_error_is_not_tried_again(kernels: Kernels) -> None:
    kernels.errors = [ValueError("second"), ValueError("first")]
    with pytest.raises(ValueError, match="first"):
        forward()


# --- python -m tritonloss tune ---


def test_the_command_writes_a_complete_table(
    kernels: Kernels, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where timing is off, and whatever a table had; a training process then takes it."""
    monkeypatch.setenv("TRITONLOSS_AUTOTUNE", "0")
    monkeypatch.setattr(tune, "triton_unusable", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("tritonloss.backends.triton_unusable", lambda device: None)
    tables.write(folder / "stand-in-gpu.json", GPU.name, tables.Table({"old": GIVEN}, complete=True))
    # The stand-in writes nothing: losses whose host code looks at results would not do.
    arguments = ["--device", "cpu", "--loss", "PNPLoss", "--rows", "32", "64", "--per-class", "4"]
    (line,) = tune.main(arguments)
    device, table = tables.read(folder / "stand-in-gpu.json")
    assert (device, table.complete) == (GPU.name, True)
    assert line == f"{GPU.name}: {len(table.entries)} configurations in {folder / 'stand-in-gpu.json'}"
    assert {key.split()[0] for key in table.entries} == {"soft_rank_forward", "soft_rank_backward"}
    buckets = {key.split("n_bucket=")[1].split()[0] for key in table.entries}
    assert buckets == {"32", "64"}
    assert any("WITH_SLOPES=False" in key for key in table.entries)
    assert any("WITH_SLOPES=True" in key for key in table.entries)
    assert tuning.table_of(GPU.name) == table


@pytest.mark.parametrize("name", tune.LOSSES)
def test_a_step_of_every_loss(name: str) -> None:
    """Once with a gradient and once without: the kernels of both are tuned."""
    criterion, with_gradient = tune._criterion(name, 3, 5), []
    criterion.register_forward_hook(lambda *_: with_gradient.append(torch.is_grad_enabled()))
    tune._step(criterion, torch.device("cpu"), 12, 4, 5)
    assert with_gradient == [True, False]


def test_the_command_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="nothing can be tuned: there is no CUDA or ROCm device"):
        list(tune.main([]))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(tune, "triton_unusable", lambda device: "it is broken")
    with pytest.raises(SystemExit, match="nothing can be tuned: it is broken"):
        list(tune.main([]))


def test_a_table_that_cannot_be_written_is_an_error_of_the_command(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.write_text("a file")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(tune, "triton_unusable", lambda device: None)
    monkeypatch.setattr(tuning, "gpu", lambda device: GPU)
    monkeypatch.setattr(tune, "tune", lambda *_: {})
    with pytest.raises(SystemExit, match=r"the table cannot be written .*TRITONLOSS_TUNING_DIR"):
        list(tune.main([]))
