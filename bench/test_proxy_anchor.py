"""ProxyAnchor beside pytorch-metric-learning 2.9.0 and beside the compiled dense formula: float32, D = 128."""

import pytest
import torch

from bench.memory import peak_bytes
from bench.proxy_anchor import SIZES, step
from bench.timing import measure

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASES = [
    (name, *size, backward) for name, sizes in SIZES.items() for size in sizes for backward in (False, True)
]


@pytest.mark.parametrize(("name", "n", "n_classes", "backward"), CASES)
def test_proxy_anchor(benchmark, name: str, n: int, n_classes: int, backward: bool) -> None:
    run = step(name, n, n_classes, backward, DEVICE)
    # No figure for a wrong value: exponents of up to 35 err by 35 * 6e-8 in float32, and their logarithms no more.
    torch.testing.assert_close(run(), step("tritonloss", n, n_classes, backward, DEVICE)(), rtol=1e-5, atol=0)
    benchmark.group = f"N = {n}, C = {n_classes}, {'forward + backward' if backward else 'forward'}"
    benchmark.extra_info.update(name=name, N=n, C=n_classes, backward=backward, device=DEVICE)
    if backward:
        benchmark.extra_info["peak_bytes"] = peak_bytes("proxy_anchor", name, n, n_classes, device=DEVICE)
    measure(benchmark, run)
