"""torch.compile without a graph break, and without a build for every batch size."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from tritonloss import use_backend
from tritonloss.losses import PNPLoss, SmoothAPLoss, SOPRCLoss

pytestmark = pytest.mark.filterwarnings("ignore")  # torch.compile warns about itself


def step(criterion, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(n)
    rows = torch.randn(n, 6, dtype=torch.float64, generator=generator, requires_grad=True)
    labels = torch.randint(0, max(1, n // 3), (n,), generator=generator)
    loss = criterion(rows, labels)
    return loss.detach(), torch.autograd.grad(loss, rows)[0]


@pytest.mark.parametrize(
    "make",
    [
        lambda: PNPLoss(variant="Ds"),
        SmoothAPLoss,
        lambda: SOPRCLoss(21),
        lambda: SOPRCLoss(21, update="pool", tpr_grad=True, tau2=0.1),
    ],
)
def test_compiled_equals_eager_for_many_sizes_in_two_builds(make) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    criterion, compiled = make(), torch.compile(make(), fullgraph=True, backend=counter)
    for n in (24, 23, 40, 17, 31, 64):
        # The same operators in the same order: only fused elementwise steps could differ.
        torch.testing.assert_close(step(compiled, n), step(criterion, n), rtol=1e-12, atol=1e-12)
    assert counter.frame_count <= 2


@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_lone_rows_in_the_default_compiler(backend: str, device: torch.device, compiler: None) -> None:
    """Rows that are no query are written all the same: another result here would come without an error."""
    rows = torch.tensor([[1, 0], [0.8, 0.6], [0, 1], [0.6, 0.8]], dtype=torch.float64, device=device)
    labels = torch.tensor([0, 0, 1, 2], device=device)
    results = []
    with use_backend(backend):
        for criterion in (PNPLoss(), torch.compile(PNPLoss(), fullgraph=True)):
            leaf = rows.clone().requires_grad_()
            loss = criterion(leaf, labels)
            results.append((loss.detach(), torch.autograd.grad(loss, leaf)[0]))
    assert results[1][0].item() == pytest.approx(0.254496525, abs=6e-10)  # printed to nine digits
    torch.testing.assert_close(
        results[1], results[0], rtol=1e-12, atol=1e-12
    )  # fused steps may round once less
