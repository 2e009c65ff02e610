"""TripletMargin, RecallAtK and SupAP beside what else there is."""

import pytest
import torch

from bench.memory import peak_bytes
from bench.timing import measure
from bench.triplets import SIZES, step

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASES = [(name, *sizes, True) for name in SIZES for sizes in SIZES[name]]


@pytest.mark.parametrize(("name", "n", "loss", "backward"), CASES)
def test_triplets(benchmark, name: str, n: int, loss: str, backward: bool) -> None:
    run = step(name, n, loss, backward, DEVICE)
    # No figure for a wrong value: the float32 error of a similarity, 1e-7, over a temperature of 0.01.
    torch.testing.assert_close(run(), step("tritonloss", n, loss, backward, DEVICE)(), rtol=1e-5, atol=1e-5)
    benchmark.group = f"N = {n}, {loss}"
    benchmark.extra_info.update(name=name, N=n, loss=loss, backward=backward, device=DEVICE)
    benchmark.extra_info["peak_bytes"] = peak_bytes("triplets", name, n, loss, device=DEVICE)
    measure(benchmark, run)
