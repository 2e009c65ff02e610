"""`python -m tritonloss`."""

import json

import pytest
import torch

from tritonloss import __main__, use_backend


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


def test_report_finds_tuned_configurations(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    def config(block_n: int) -> dict[str, object]:
        return {"kwargs": {"BLOCK_N": block_n}, "num_warps": 4, "num_stages": 3}

    content = {"key": [1024, 4, "sigmoid"], "configs_timings": [[config(256), [0.2]], [config(512), [0.1]]]}
    (tmp_path / "hash").mkdir()
    (tmp_path / "hash" / "soft_rank_forward.autotune.json").write_text(json.dumps(content))
    (tmp_path / "hash" / "somebody_else.autotune.json").write_text(json.dumps(content))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    (line,) = __main__.tuned_configurations()
    assert line.split() == [
        "soft_rank_forward",
        "[1024,",
        "4,",
        "'sigmoid']:",
        "{'BLOCK_N':",
        "512},",
        "4",
        "warps",
    ]


@pytest.mark.parametrize("content", ["", "{}", '{"key": [1], "configs_timings": []}', "[1]"])
def test_a_result_that_cannot_be_read_is_named(
    content: str, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the place that TRITON_HOME names."""
    folder = tmp_path / ".triton" / "cache" / "hash"
    folder.mkdir(parents=True)
    (folder / "soft_rank_forward.autotune.json").write_text(content)
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setenv("TRITON_HOME", str(tmp_path))
    (line,) = __main__.tuned_configurations()
    assert "soft_rank_forward" in line
    assert "cannot be read" in line
