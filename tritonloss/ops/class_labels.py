"""`class_labels`: labels that are the indices of proxies, checked against their number."""

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
