"""`python -m tritonloss`."""

from pathlib import Path

import pytest
import torch

from tritonloss import __main__, use_backend
from tritonloss.backends import tables


def test_report_names_versions_devices_and_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    lines = list(__main__.report())
    assert torch.__version__ in lines[0]
    (cpu,) = [line for line in lines if line.startswith("cpu")]
    assert "eager, because" in cpu


def test_report_names_a_forced_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with use_backend("reference"):
        lines = list(__main__.report())
    assert "chosen backend: reference" in lines
    assert any("reference, because it was chosen" in line for line in lines)


def test_report_finds_tuned_configurations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITONLOSS_TUNING_DIR", str(tmp_path))
    config = {"BLOCK_N": 512, "num_warps": 4}
    for device, complete in (("GPU A", True), ("GPU B", False)):
        table = tables.Table({"soft_rank_forward n_bucket=1024": config}, complete)
        tables.write(tmp_path / tables.file_name(device), device, table)
    assert list(__main__.tuned_configurations()) == [
        f"  GPU A, table: soft_rank_forward n_bucket=1024: {config}",
        f"  GPU B, timed at first use: soft_rank_forward n_bucket=1024: {config}",
    ]
    assert "tuned configurations found: 2" in list(__main__.report())


def test_without_a_home_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "directory", lambda: None)
    assert "tuned configurations found: none" in list(__main__.report())


def test_threads_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    for threads, expected in ((1, "1 thread)"), (2, "2 threads)")):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert any(expected in line for line in __main__.report())


def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    __main__.main([])
    assert capsys.readouterr().out.startswith("tritonloss ")
    with pytest.raises(SystemExit, match="got 'tuen', expected nothing, tune or estimate"):
        __main__.main(["tuen"])
    with pytest.raises(SystemExit) as stopped:
        __main__.main(["tune", "--help"])
    assert stopped.value.code == 0
    assert "--per-class" in capsys.readouterr().out
    __main__.main(["estimate", "PNPLoss", "4096", "128"])
    assert capsys.readouterr().out.startswith("PNPLoss, N = 4096, D = 128, bfloat16")


def test_report_says_how_rows_are_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    assert (
        __main__._products_line(cpu) == "ieee; torch multiplies no half precision with float32 results on cpu"
    )
    monkeypatch.setenv("TRITONLOSS_PRODUCTS", "split")
    assert __main__._products_line(cpu).startswith("split; ")
    monkeypatch.setenv("TRITONLOSS_PRODUCTS", "fast")
    assert __main__._products_line(cpu).startswith("TRITONLOSS_PRODUCTS is 'fast': expected one of")
    assert any(line.startswith("  products: TRITONLOSS_PRODUCTS is") for line in __main__.report())
