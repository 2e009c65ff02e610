"""FastAP beside pytorch-metric-learning 2.9.0 and beside the dense similarity matrix in plain torch."""

import pytest
import torch

from bench.fastap import SIZES, step
from bench.memory import peak_bytes
from bench.timing import measure

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASES = [(name, n, backward) for name, sizes in SIZES.items() for n in sizes for backward in (False, True)]


@pytest.mark.parametrize(("name", "n", "backward"), CASES)
def test_fastap(benchmark, name: str, n: int, backward: bool) -> None:
    run = step(name, n, backward, DEVICE)
    # No figure for a wrong value. The rivals add the masses of all pairs in float32.
    torch.testing.assert_close(run(), step("tritonloss", n, backward, DEVICE)(), rtol=1e-4, atol=0)
    benchmark.group = f"N = {n}, {'forward + backward' if backward else 'forward'}"
    benchmark.extra_info.update(name=name, N=n, backward=backward, device=DEVICE)
    if backward:
        benchmark.extra_info["peak_bytes"] = peak_bytes("fastap", name, n, device=DEVICE)
    measure(benchmark, run)
