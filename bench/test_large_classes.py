"""PNP of few large classes beside many small ones: float32, classes of equal size."""

import pytest
import torch

from bench.large_classes import SIZES, step
from bench.memory import peak_bytes
from bench.timing import measure
from tritonloss.backends import large_classes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASES = [(n, n_classes, backward) for n, n_classes in SIZES["tritonloss"] for backward in (False, True)]


@pytest.mark.parametrize(("n", "n_classes", "backward"), CASES)
def test_large_classes(
    benchmark, n: int, n_classes: int, backward: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = step("tritonloss", n, n_classes, backward, DEVICE)
    value = run()
    if n <= 2048:
        # No figure for a wrong value: against the direct loop, in a tenth of the time that it needs at N = 8192.
        with monkeypatch.context() as patch:
            patch.setattr(large_classes, "choose", lambda *_: None)
            torch.testing.assert_close(value, run(), rtol=2e-5, atol=0)
    benchmark.group = f"N = {n}, {'forward + backward' if backward else 'forward'}"
    benchmark.extra_info.update(name="tritonloss", N=n, classes=n_classes, backward=backward, device=DEVICE)
    if backward:
        benchmark.extra_info["peak_bytes"] = peak_bytes(
            "large_classes", "tritonloss", n, n_classes, device=DEVICE
        )
    measure(benchmark, run)
