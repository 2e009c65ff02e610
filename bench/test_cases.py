"""Every benchmark: each implementation at each size, forward alone and with the backward pass."""

import pytest
import torch

from bench.cases import BENCHMARKS, OURS, PEER
from bench.memory import peak_bytes
from bench.timing import measure
from tritonloss.backends import large_classes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASES = [
    pytest.param(benchmark, name, sizes, backward, id=f"{benchmark}-{name}-{sizes}-{backward}")
    for benchmark, case in BENCHMARKS.items()
    for name, listed in case.sizes.items()
    for sizes in listed
    for backward in (False, True)
]


@pytest.mark.parametrize(("case", "name", "sizes", "backward"), CASES)
def test_step(
    benchmark, monkeypatch, case: str, name: str, sizes: tuple[object, ...], backward: bool
) -> None:
    chosen = BENCHMARKS[case]
    run = chosen.step(name, *sizes, backward=backward, device=DEVICE)
    value = run()
    if name == OURS and case == "large_classes" and sizes[0] <= 2048:
        with monkeypatch.context() as patch:
            patch.setattr(large_classes, "choose", lambda *_: None)
            torch.testing.assert_close(value, run(), rtol=2e-5, atol=0)
    # The value of pytorch-metric-learning's SmoothAP is another one off square batches; its cost is what is compared.
    elif name != OURS and (case, name) != ("smoothap", PEER):
        ours = chosen.step(OURS, *sizes, backward=backward, device=DEVICE)()
        torch.testing.assert_close(value, ours, rtol=chosen.tolerance, atol=chosen.absolute)
    named = dict(zip(chosen.axes, sizes, strict=True))
    where = ", ".join(f"{axis} = {size}" for axis, size in named.items())
    benchmark.group = f"{where}, {'forward + backward' if backward else 'forward'}"
    benchmark.extra_info.update(name=name, **named, backward=backward, device=DEVICE)
    if backward:
        benchmark.extra_info["peak_bytes"] = peak_bytes(case, name, *sizes, device=DEVICE)
    measure(benchmark, run)
