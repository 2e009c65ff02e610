"""NTXent, SupCon, MultiSimilarity and Circle beside pytorch-metric-learning 2.9.0."""

import pytest
import torch

from bench.memory import peak_bytes
from bench.pairs import SIZES, step
from bench.timing import measure

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASES = [(name, *sizes, backward) for name in SIZES for sizes in SIZES[name] for backward in (False, True)]


@pytest.mark.parametrize(("name", "n", "loss", "backward"), CASES)
def test_pairs(benchmark, name: str, n: int, loss: str, backward: bool) -> None:
    run = step(name, n, loss, backward, DEVICE)
    # No figure for a wrong value: 1e-5 is the float32 error of a similarity, 1e-7, over the temperature.
    torch.testing.assert_close(run(), step("tritonloss", n, loss, backward, DEVICE)(), rtol=1e-5, atol=0)
    benchmark.group = f"N = {n}, {loss}, {'forward + backward' if backward else 'forward'}"
    benchmark.extra_info.update(name=name, N=n, loss=loss, backward=backward, device=DEVICE)
    if backward:
        benchmark.extra_info["peak_bytes"] = peak_bytes("pairs", name, n, loss, device=DEVICE)
    measure(benchmark, run)
