"""ProxyAnchorLoss and SmoothAPLoss on the golden batch: values and gradient norms in float64."""

import pytest
import torch

from tritonloss import use_backend
from tritonloss.losses import ProxyAnchorLoss, SmoothAPLoss

TRIPLETS = tuple(torch.tensor(t) for t in ((0, 0, 1), (4, 8, 5), (1, 2, 3)))
EQUAL = torch.arange(12) % 4
LONE = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2, 3, 4, 5])


def proxy_anchor() -> torch.nn.Module:
    criterion = ProxyAnchorLoss(6, 5).double()
    proxy = torch.arange(6, dtype=torch.float64)[:, None]
    with torch.no_grad():
        criterion.weight.copy_(torch.cos(2 + 5 * proxy + 3 * torch.arange(5, dtype=torch.float64)))
    return criterion


@pytest.mark.parametrize("backend", ["eager", "triton", "reference"])
@pytest.mark.parametrize(
    ("make", "labels", "indices", "value", "norm"),
    [
        (proxy_anchor, EQUAL, None, 16.9413654842, 12.2480825037),
        (proxy_anchor, LONE, None, 16.7095137581, 10.4511100948),
        (proxy_anchor, EQUAL, TRIPLETS, 14.1749527574, 13.8217015338),
        (SmoothAPLoss, EQUAL, None, 0.2969197344, 0.0383013529),
        (SmoothAPLoss, LONE, None, 0.3893583081, 0.3059877673),
        (SmoothAPLoss, EQUAL, TRIPLETS, 0.1093396074, 0.0219993542),
    ],
)
def test_golden_batch(make, labels, indices, value, norm, backend, device) -> None:
    item = torch.arange(12, dtype=torch.float64)[:, None]
    rows = torch.sin(1 + 3 * item + 7 * torch.arange(5, dtype=torch.float64)).to(device).requires_grad_()
    if indices is not None:
        indices = tuple(t.to(device) for t in indices)
    with use_backend(backend):
        loss = make().to(device)(rows, labels.to(device), indices)
        loss.backward()
    assert loss.item() == pytest.approx(value, abs=6e-11)  # printed to ten digits
    assert rows.grad.norm().item() == pytest.approx(norm, abs=6e-11)
