"""Types of the public interface, and the rule for the dtype that everything is computed in."""

from numbers import Integral
from typing import Any, Literal, NamedTuple, TypeAlias, TypedDict

import torch
from torch import Tensor

PNPVariant: TypeAlias = Literal["Ds", "Dq", "Iu", "Ib", "O"]
Reduction: TypeAlias = Literal["mean", "none"]
ProductMode: TypeAlias = Literal["auto", "ieee", "split"]
"""How rows are multiplied; see `tritonloss.ops.products`."""


class PairIndices(NamedTuple):
    """Mined pairs. Anchors index the queries [Q], positives and negatives the references [N].

    Each entry is one-dimensional, int64 or int32. The first two entries have one length, the last two another.
    """

    pos_anchors: Tensor
    positives: Tensor
    neg_anchors: Tensor
    negatives: Tensor


class TripletIndices(NamedTuple):
    """Mined triplets. Anchors index the queries [Q], positives and negatives the references [N].

    Each entry is one-dimensional, int64 or int32, and all three have one length.
    """

    anchors: Tensor
    positives: Tensor
    negatives: Tensor


IndicesTuple: TypeAlias = (
    PairIndices
    | TripletIndices
    | tuple[Tensor, Tensor, Tensor]
    | tuple[Tensor, Tensor, Tensor, Tensor]
    | list[Tensor]
)
"""What the losses accept as `indices_tuple`: 3 tensors are triplets, 4 are pairs."""


class _RequiredLossTerm(TypedDict):
    losses: Tensor
    indices: Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor] | None


class LossTerm(_RequiredLossTerm, total=False):
    """One named part of a loss, before reduction.

    losses: the values: a scalar [] where `indices` is None, else [M].
    indices: what each value belongs to: None (the term is already a scalar), an element [M], a pair (two of [M])
        or a triplet (three of [M]).
    divisor: what the sum of the values is divided by, where that is not M: a number or a tensor []. Only
        `DivisorReducer` uses it; the other reducers refuse such a term.
    """

    divisor: Tensor | float


LossDict: TypeAlias = dict[str, LossTerm]


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that values of `dtype` are computed in: float64 for float64, float32 for the rest."""
    return torch.promote_types(dtype, torch.float32)


def check_count(name: str, value: Any) -> int:
    """An int of at least 1, NumPy's and a tensor [] of an integer included, or an error that names the option."""
    if (
        isinstance(value, Tensor)
        and value.ndim == 0
        and not (value.is_floating_point() or value.is_complex())
    ):
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    if value < 1:
        raise ValueError(f"{name} is {value}: expected at least 1")
    return int(value)


# Types of devices on which torch lacks nothing that a loss uses.
COMPLETE = ("cpu", "cuda", "meta")


def is_complete(device: torch.device) -> bool:
    """Whether torch has the operators and dtypes there that are not everywhere: float64, `segment_reduce`, and sums of
    int64 at given places. Apple's MPS lacks all three, Intel's XPU some of them, depending on device and version.
    """
    return device.type in COMPLETE


def widest(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype of long sums over values that are computed in `dtype`: float64 where the device is sure to have it."""
    return torch.float64 if is_complete(device) else accumulation_dtype(dtype)


def upcast(tensor: Tensor) -> Tensor:
    """`tensor` in the dtype it is computed in; the same tensor where it has that dtype."""
    return tensor.to(accumulation_dtype(tensor.dtype))
