"""The height of panels on some GPUs, and what a walk over them costs."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tritonloss.ops import panels
from tritonloss.ops.panels import Panels, plan_panels

GPUS = {  # memory, multiprocessors
    "A100": (80 * 10**9, 108),
    "H100": (80 * 10**9, 132),
    "H200": (141 * 10**9, 132),
    "MI300X": (192 * 10**9, 304),
    "RTX of 8 GB": (8 << 30, 24),
}


@pytest.mark.parametrize(
    ("gpu", "n", "rows", "key_split"),
    [
        ("A100", 256, 256, 1),  # a split of 256 keys has nothing to give
        ("A100", 4096, 4096, 1),
        ("A100", 32768, 4096, 1),
        ("A100", 131072, 2048, 1),
        ("H100", 32768, 4096, 1),
        ("H100", 131072, 2048, 1),
        ("H100", 2**20, 512, 2),  # 8 MiB a row of both buffers
        ("H200", 4096, 4096, 1),
        ("H200", 32768, 4096, 1),
        ("H200", 131072, 2048, 1),
        ("H200", 2**20, 1024, 1),
        ("MI300X", 32768, 4096, 1),
        ("MI300X", 131072, 2816, 1),
        ("MI300X", 2**20, 1408, 1),
        ("RTX of 8 GB", 4096, 4096, 1),
        ("RTX of 8 GB", 32768, 2048, 1),
        ("RTX of 8 GB", 131072, 512, 1),
    ],
)
def test_heights(gpu: str, n: int, rows: int, key_split: int) -> None:
    memory, multiprocessors = GPUS[gpu]
    plan = plan_panels(n, n, 4, memory // 16, multiprocessors)
    assert plan == Panels(rows, -(-n // rows), key_split, rows * key_split, rows * n * 8)
    assert n == 256 or plan.programs >= 4 * multiprocessors


@pytest.mark.parametrize("gpu", GPUS)
def test_the_default_budget_has_panels_of_1024_rows_for_100k_embeddings(gpu: str) -> None:
    if gpu == "RTX of 8 GB":
        pytest.skip("512 MiB hold 671 rows of both buffers")
    memory, multiprocessors = GPUS[gpu]
    assert plan_panels(100_000, 100_000, 4, memory // 16, multiprocessors).rows >= 1024


def test_panels_are_even() -> None:
    assert plan_panels(5000, 5000, 4, 1 << 40, 132).rows == 2560  # not 4096 and 904
    assert plan_panels(5000, 5000, 4, 1 << 40, 132).n_panels == 2


def test_a_given_height() -> None:
    assert plan_panels(5000, 5000, 4, 1, 132, rows=300).rows == 300
    assert plan_panels(100, 5000, 4, 1, 132, rows=300).rows == 100


@given(
    st.integers(0, 10**6),
    st.integers(0, 10**6),
    st.sampled_from([4, 8]),
    st.integers(1, 10**11),
    st.integers(1, 304),
)
def test_any_sizes(n_queries: int, n_keys: int, itemsize: int, budget: int, multiprocessors: int) -> None:
    plan = plan_panels(n_queries, n_keys, itemsize, budget, multiprocessors)
    assert 1 <= plan.rows <= max(1, n_queries, panels.TALLEST)
    assert plan.rows == 1 or plan.bytes <= budget
    assert plan.bytes >= 2 * plan.rows * n_keys * itemsize
    assert plan.n_panels == math.ceil(n_queries / plan.rows)
    assert plan.programs == plan.rows * plan.key_split
    enough = plan.programs >= 4 * multiprocessors
    assert enough or plan.key_split == max(1, n_keys // panels.LEAST_KEYS)
    assert plan.key_split == 1 or n_keys // plan.key_split >= panels.LEAST_KEYS


# --- work, counted by hand: 6 queries, 10 keys, 7 columns, two panels ---

PLAN = plan_panels(6, 10, 4, 1 << 30, 1, rows=3)


@pytest.mark.parametrize(
    ("mode", "dtype", "flop", "traffic"),
    [
        ("ieee", torch.float32, 2 * 60 * 7, 60 * 4 + (6 + 2 * 10) * 7 * 4),
        ("tf32", torch.bfloat16, 2 * 60 * 7, 60 * 4 + (6 + 2 * 10) * 7 * 4),
        ("split", torch.bfloat16, 2 * 60 * 7, 60 * 4 + (6 + 2 * 10) * 7 * 2),
        ("split", torch.float32, 3 * 2 * 60 * 7, 60 * 4 + (6 + 2 * 10) * 7 * 6),
        ("split", torch.float64, 2 * 60 * 7, 60 * 8 + (6 + 2 * 10) * 7 * 8),
    ],
)
def test_work_of_scores(mode: str, dtype: torch.dtype, flop: int, traffic: int) -> None:
    of = panels.products_of(mode, dtype)
    assert panels.score_work(PLAN, 6, 10, 7, of, 0) == (flop, traffic)
    keys_once = traffic - 10 * 7 * of.score_bytes
    assert panels.score_work(PLAN, 6, 10, 7, of, 10 * 7 * of.score_bytes) == (flop, keys_once)


def test_long_rows_read_and_write_scores_again() -> None:
    half, whole = panels.products_of("split", torch.bfloat16), panels.products_of("ieee", torch.float32)
    assert panels.score_work(PLAN, 6, 10, 513, half, 0).bytes == 60 * 4 * 3 + 26 * 513 * 2
    assert panels.score_work(PLAN, 6, 10, 513, whole, 0).bytes == 60 * 4 + 26 * 513 * 4


@pytest.mark.parametrize(
    ("mode", "dtype", "n_products", "of_gradient", "of_rows", "of_sums"),
    [
        ("ieee", torch.float32, 1, 4, 4, 8),
        ("split", torch.bfloat16, 2, 2 + 2, 2 + 2, 16),
        ("split", torch.float16, 4, 4 * 2, 4 * 2, 4 * 8),
        ("split", torch.float32, 5, 5 * 2, 5 * 2, 5 * 8),
        ("ieee", torch.float64, 1, 8, 8, 16),
    ],
)
def test_work_of_gradients(
    mode: str, dtype: torch.dtype, n_products: int, of_gradient: int, of_rows: int, of_sums: int
) -> None:
    of = panels.products_of(mode, dtype)
    traffic = 2 * 60 * of_gradient + (6 + 2 * 10) * 7 * (of_rows + of_sums)
    assert panels.gradient_work(PLAN, 6, 10, 7, of, 0, meet_themselves=False) == (
        n_products * 4 * 60 * 7,
        traffic,
    )
    once = traffic - 10 * 7 * (of_rows + of_sums)
    assert panels.gradient_work(PLAN, 6, 10, 7, of, 1 << 20, meet_themselves=False).bytes == once


def test_unknown_products() -> None:
    with pytest.raises(
        ValueError, match=r"^products is 'auto' and dtype torch.float32: expected ieee, split or tf32"
    ):
        panels.products_of("auto", torch.float32)
    with pytest.raises(ValueError, match=r"and a floating dtype$"):
        panels.products_of("split", torch.int64)
