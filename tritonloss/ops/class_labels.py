"""Labels and targets checked on the device: class indices against their number, targets for NaN."""

from typing import cast

import torch
from torch import Tensor

from tritonloss.ops.library import Operator


def class_labels(labels: Tensor, num_classes: int, *, check: bool = True) -> Tensor:
    """labels [N] of any integer dtype or bool as class indices [N] int64; a label outside 0 .. num_classes - 1 as -1.

    With `check` such a label is an error instead. The check reads two numbers back from the device, one host sync; it
    is an operator of its own, so that torch.compile keeps the call in one graph.

    Raises ValueError, naming the label.
    """
    return cast(Tensor, _class_labels(labels, num_classes, check))


def _run(labels: Tensor, num_classes: int, check: bool) -> Tensor:
    # An operator must not return its input: int64 labels are copied.
    classes = labels.to(torch.int64, copy=True)
    if check and labels.shape[0]:
        least, greatest = torch.stack(torch.aminmax(classes)).tolist()
        for label in (least, greatest):
            if not 0 <= label < num_classes:
                raise ValueError(f"labels must be in 0 .. {num_classes - 1}, one per class, got {label}")
        return classes
    return classes.masked_fill_((classes < 0) | (classes >= num_classes), -1)


_class_labels = Operator(
    "class_labels",
    "(Tensor labels, SymInt num_classes, bool check) -> Tensor",
    _run,
    lambda labels, num_classes, check: torch.empty_like(labels, dtype=torch.int64),
)


def negative_targets(targets: Tensor, *, check: bool = True) -> Tensor:
    """Where floating targets of any shape are at most 0, bool.

    With `check` a NaN raises ValueError, at the cost of one host sync; without it a NaN is no negative.
    """
    return cast(Tensor, _negative_targets(targets, check))


def _run_targets(targets: Tensor, check: bool) -> Tensor:
    if check and bool(targets.isnan().any()):
        raise ValueError(
            "targets must be numbers, got NaN: leave out what is unknown with positives=(targets > 0).T and "
            "negatives=(targets <= 0).T for scores.T, one row for each class"
        )
    return targets <= 0


_negative_targets = Operator(
    "negative_targets",
    "(Tensor targets, bool check) -> Tensor",
    _run_targets,
    lambda targets, check: torch.empty_like(targets, dtype=torch.bool),
)
