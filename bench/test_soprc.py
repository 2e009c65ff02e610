"""SOPRC beside gathered positives in plain torch, and its binary form."""

import pytest
import torch

from bench.memory import peak_bytes
from bench.soprc import SIZES, step
from bench.timing import measure

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASES = [
    (name, *size, backward) for name, sizes in SIZES.items() for size in sizes for backward in (False, True)
]


@pytest.mark.parametrize(("name", "n", "dimension", "backward"), CASES)
def test_soprc(benchmark, name: str, n: int, dimension: int, backward: bool) -> None:
    run = step(name, n, dimension, backward, DEVICE)
    # No figure for a wrong value: a similarity is off by 1e-7, over tau2 = 1e-3 in one entry of 100 of the TPR.
    torch.testing.assert_close(run(), step("tritonloss", n, dimension, backward, DEVICE)(), rtol=1e-5, atol=0)
    benchmark.group = f"N = {n}, D = {dimension}, {'forward + backward' if backward else 'forward'}"
    benchmark.extra_info.update(name=name, N=n, D=dimension, backward=backward, device=DEVICE)
    if backward:
        benchmark.extra_info["peak_bytes"] = peak_bytes("soprc", name, n, dimension, device=DEVICE)
    measure(benchmark, run)
