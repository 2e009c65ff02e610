"""torch.compile without a graph break, and without a build for every batch size."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from tritonloss.losses import PNPLoss

pytestmark = pytest.mark.filterwarnings("ignore")  # torch.compile warns about itself


def step(criterion, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(n)
    rows = torch.randn(n, 6, dtype=torch.float64, generator=generator, requires_grad=True)
    labels = torch.randint(0, max(1, n // 3), (n,), generator=generator)
    loss = criterion(rows, labels)
    return loss.detach(), torch.autograd.grad(loss, rows)[0]


def test_compiled_equals_eager_for_many_sizes_in_two_builds() -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    criterion = PNPLoss(variant="Ds")
    compiled = torch.compile(criterion, fullgraph=True, backend=counter)
    for n in (24, 23, 40, 17, 31, 64):
        # The same operators in the same order: only fused elementwise steps could differ.
        torch.testing.assert_close(step(compiled, n), step(criterion, n), rtol=1e-12, atol=1e-12)
    assert counter.frame_count <= 2
