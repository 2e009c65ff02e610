"""How many rows a block of similarities has."""

from types import SimpleNamespace

import pytest
import torch

from tritonloss.ops.panels import plan_panels
from tritonloss.ops.streaming import rows_per_block

MEBIBYTE = 2**20
ROW = 4 * 4096  # bytes of a row of 4096 float32


def rows(kind: str, *, n: int = 10**6, columns: int = 4096, budget: int = 2**40) -> int:
    return rows_per_block(n, columns, 4, torch.device(kind), budget)


def test_block_on_a_gpu_is_that_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def properties(device: torch.device) -> SimpleNamespace:
        asked.append(device)
        return SimpleNamespace(multi_processor_count=132)

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    plan = plan_panels(10**6, 4096, 4, 2**40, 132)
    assert rows("cuda:1") == plan.rows == 4096
    assert asked == [torch.device("cuda", 1)]
    assert rows("cuda", budget=7 * 2 * ROW + 1) == 7  # of both buffers
    assert rows("cuda", n=0) == 1


def test_block_on_a_cpu() -> None:
    assert rows("cpu") == 2 * MEBIBYTE // ROW
    # Up to twice as large, for 64 rows; a quarter of them at any length.
    assert rows("cpu", columns=2**14) == 64
    assert rows("cpu", columns=2**15) == 32
    assert rows("cpu", columns=2**24) == 16


def test_block_is_bounded_by_the_budget_and_the_rows() -> None:
    assert rows("cpu", budget=5 * ROW + 1) == 5
    assert rows("cpu", budget=1) == 1
    assert rows("cpu", n=7) == 7
    assert rows("cpu", n=0) == 1
    assert rows("cpu", n=3, columns=0) == 3
