"""SmoothAP beside pytorch-metric-learning 2.9.0 and beside gathered positives in plain torch."""

import pytest
import torch

from bench.memory import peak_bytes
from bench.smoothap import SIZES, step
from bench.timing import measure

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASES = [(name, n, backward) for name, sizes in SIZES.items() for n in sizes for backward in (False, True)]


@pytest.mark.parametrize(("name", "n", "backward"), CASES)
def test_smoothap(benchmark, name: str, n: int, backward: bool) -> None:
    run = step(name, n, backward, DEVICE)
    value = run()
    if not name.startswith("pml"):
        # No figure for a wrong value: 1e-5 is the float32 error of a similarity, 1e-7, over the temperature. The peer
        # is wrong where the class size is not the number of classes.
        torch.testing.assert_close(value, step("tritonloss", n, backward, DEVICE)(), rtol=1e-5, atol=0)
    benchmark.group = f"N = {n}, {'forward + backward' if backward else 'forward'}"
    benchmark.extra_info.update(name=name, N=n, backward=backward, device=DEVICE)
    if backward:
        benchmark.extra_info["peak_bytes"] = peak_bytes("smoothap", name, n, device=DEVICE)
    measure(benchmark, run)
