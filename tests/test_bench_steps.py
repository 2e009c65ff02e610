"""What a small batch costs: device operations and Python calls of a step, pinned, and host time against a peer."""

from __future__ import annotations

import json

import pytest
import torch
from checks import python
from registry import LOSSES

from bench import steps

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="counts the Triton backend on CPU tensors")

# Of N = 256, four per class. A count that grows must have its reason; one that falls is lowered here.
MOST_OPERATIONS = {
    "PNPLoss": 35,
    "SmoothAPLoss": 51,
    "HistogramLoss": 87,
    "FastAPLoss": 89,
    "ProxyAnchorLoss": 48,
    "SOPRCLoss": 350,
    "NTXentLoss": 77,
    "SupConLoss": 101,
    "MultiSimilarityLoss": 71,
    "CircleLoss": 67,
    "TripletMarginLoss": 65,
    "RecallAtKLoss": 148,
    "SupAPLoss": 51,
    "InfoNCELoss": 99,
}
MOST_CALLS = {
    "PNPLoss": 124,
    "SmoothAPLoss": 124,
    "HistogramLoss": 144,
    "FastAPLoss": 124,
    "ProxyAnchorLoss": 134,
    "SOPRCLoss": 230,
    "NTXentLoss": 134,
    "SupConLoss": 134,
    "MultiSimilarityLoss": 134,
    "CircleLoss": 134,
    "TripletMarginLoss": 174,
    "RecallAtKLoss": 134,
    "SupAPLoss": 134,
    "InfoNCELoss": 134,
}


COUNT = """
import json
from bench import steps
found = {name: [dict(steps.device_operations(name)), steps.python_calls(name)] for name in steps.LOSSES}
print(json.dumps(found))
"""


def test_operations_and_calls_of_a_step() -> None:
    """In a process of its own: a fixture of the tests fills new memory, which is an operation."""
    found = json.loads(python(COUNT, TRITON_INTERPRET="1").splitlines()[-1])
    totals = {name: sum(operations.values()) for name, (operations, _) in found.items()}
    assert {name: total for name, total in totals.items() if total > MOST_OPERATIONS[name]} == {}
    assert {name: calls for name, (_, calls) in found.items() if not 0 < calls <= MOST_CALLS[name]} == {}
    for operations, _ in found.values():
        assert any(kernel.startswith("kernel ") for kernel in operations)  # the launches are among them


def test_views_are_not_counted_and_operations_are() -> None:
    counting = steps.Counting()
    one = torch.ones(3)
    with counting:
        (one[1:] + 1).view(1, 2).mul_(2)
    assert counting.operations == {"add": 1, "mul_": 1}


def test_what_is_timed_is_a_loss_each() -> None:
    assert set(steps.LOSSES) <= set(LOSSES)
    assert steps.microseconds(steps.plain) > 0
