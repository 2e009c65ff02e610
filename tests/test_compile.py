"""torch.compile without a graph break, and without a build for every batch size."""

import copy
from collections.abc import Sequence

import pytest
import torch
from checks import assert_close
from registry import LOSSES
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from tritonloss.losses import PNPLoss, SOPRCLoss

pytestmark = pytest.mark.filterwarnings("ignore")  # torch.compile warns about itself


def step(criterion, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(n)
    rows = torch.randn(n, 6, dtype=torch.float64, generator=generator, requires_grad=True)
    labels = torch.randint(0, max(1, n // 3), (n,), generator=generator)
    loss = criterion(rows, labels)
    return loss.detach(), torch.autograd.grad(loss, rows)[0]


def test_options_that_change_the_graph(compiler: None) -> None:
    """As compiled as the defaults, which the tests of a model and its loss cover."""

    def make() -> SOPRCLoss:
        return SOPRCLoss(21, update="last", tpr_grad=True, tau2=0.1)

    counter = CompileCounterWithBackend("aot_eager")
    criterion, compiled = make(), torch.compile(make(), fullgraph=True, backend=counter)
    for n in (24, 23, 40, 17, 31, 64):
        # The same operators in the same order: only fused elementwise steps could differ.
        torch.testing.assert_close(step(compiled, n), step(criterion, n), rtol=1e-12, atol=1e-12)
    assert counter.frame_count <= 2


def test_lone_rows_in_the_default_compiler(device: torch.device, compiler: None) -> None:
    """Rows that are no query are written all the same: another result here would come without an error."""
    rows = torch.tensor([[1, 0], [0.8, 0.6], [0, 1], [0.6, 0.8]], dtype=torch.float64, device=device)
    labels = torch.tensor([0, 0, 1, 2], device=device)
    results = []
    for criterion in (PNPLoss(), torch.compile(PNPLoss(), fullgraph=True)):
        leaf = rows.clone().requires_grad_()
        loss = criterion(leaf, labels)
        results.append((loss.detach(), torch.autograd.grad(loss, leaf)[0]))
    assert results[1][0].item() == pytest.approx(0.254496525, abs=6e-10)  # printed to nine digits
    torch.testing.assert_close(
        results[1], results[0], rtol=1e-12, atol=1e-12
    )  # fused steps may round once less


# --- a model and its loss in one graph ---

N_CLASSES, WIDTH, DIM = 9, 7, 6
# Fused steps may round in another way: by 1e-16, over temperature^2 = 1e-4 in a gradient, over 64 rows.
FLOAT64 = {"rtol": 1e-9, "atol": 1e-9}


class Objective(nn.Module):
    """A network and the sum of some losses of its embeddings."""

    def __init__(self, names: Sequence[str], device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = nn.Linear(WIDTH, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, DIM)
        self.network = nn.Sequential(*layers).to(device, dtype)
        like = torch.empty(0, DIM, dtype=dtype, device=device)
        self.criteria = nn.ModuleList(LOSSES[name].module(N_CLASSES, like) for name in names)

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        embeddings = self.network(inputs)
        return torch.stack([criterion(embeddings, labels) for criterion in self.criteria]).sum()


def training_step(
    objective: nn.Module, n: int, device: torch.device
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """The loss, the gradients, and the buffers afterwards: running statistics and memories."""
    generator = torch.Generator().manual_seed(n)
    dtype = next(objective.parameters()).dtype
    inputs = torch.randn(n, WIDTH, generator=generator, dtype=torch.float64).to(device, dtype)
    labels = torch.randint(N_CLASSES, (n,), generator=generator).to(device)
    objective.zero_grad()
    loss = objective(inputs, labels)
    with torch.autocast(device.type, enabled=False):
        loss.backward()
    return loss.detach(), [p.grad for p in objective.parameters()], [b.clone() for b in objective.buffers()]


@pytest.mark.parametrize("name", LOSSES)
def test_model_and_loss_in_one_graph(name: str, device: torch.device, compiler: None) -> None:
    """No graph break, and two builds at most for five batch sizes: of the first, and of all others."""
    eager = Objective([name], device, torch.float64)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(copy.deepcopy(eager), fullgraph=True, backend=counter)
    for n in (24, 23, 40, 17, 64):
        expected = training_step(eager, n, device)
        assert_close(training_step(compiled, n, device), expected, **FLOAT64)
        assert all(float(grad.abs().max()) > 1e-4 for grad in expected[1])
    assert counter.frame_count <= 2


def test_every_loss_under_autocast_in_one_graph(device: torch.device, compiler: None) -> None:
    """The network in bfloat16, the losses in float32, by the same operators in the same order."""
    eager = Objective(list(LOSSES), device, torch.float32)
    compiled = torch.compile(copy.deepcopy(eager), fullgraph=True, backend="aot_eager")
    with torch.autocast(device.type, torch.bfloat16):
        results = [training_step(objective, 24, device) for objective in (compiled, eager)]
    assert_close(*results, rtol=1e-5, atol=1e-5)  # on a GPU the order within a product may be another


def test_every_loss_in_the_default_compiler(device: torch.device, compiler: None) -> None:
    # The code that torch 2.6 generates for SOPRC reads a size before it is set.
    names = [name for name in LOSSES if name != "SOPRCLoss" or torch.__version__ >= "2.7"]
    eager = Objective(names, device, torch.float64)
    compiled = torch.compile(copy.deepcopy(eager), fullgraph=True)
    assert_close(training_step(compiled, 24, device), training_step(eager, 24, device), **FLOAT64)
