"""How users call the losses: mypy checks it in `make test`; nothing runs it."""

from __future__ import annotations

from typing import assert_type

from torch import Tensor

from tritonloss import distances, losses, reducers, regularizers


def calls(rows: Tensor, labels: Tensor) -> None:
    assert_type(losses.PNPLoss(variant="Ds")(rows, labels), Tensor)
    assert_type(losses.SmoothAPLoss()(rows, labels), Tensor)
    assert_type(losses.HistogramLoss()(rows, labels), Tensor)
    assert_type(losses.FastAPLoss()(rows, labels), Tensor)
    assert_type(losses.ProxyAnchorLoss(4, 8)(rows, labels), Tensor)
    assert_type(losses.SOPRCLoss(4)(rows, positives=labels, negatives=labels), Tensor)
    assert_type(losses.SemiVarianceRegularizer()(rows, labels), Tensor)
    assert_type(distances.CosineSimilarity()(rows), Tensor)
    assert_type(reducers.MeanReducer()({}, rows), Tensor)
    assert_type(regularizers.LpRegularizer()(rows), Tensor)
    losses.PNPLoss()(rows, label=labels)  # type: ignore[call-arg]
    losses.PNPLoss(reducr=None)  # type: ignore[call-arg]
