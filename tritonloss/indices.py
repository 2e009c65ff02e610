"""Mined index tuples: validation, and the weight that a tuple gives to each row."""

import torch
from torch import Tensor

from tritonloss.types import IndicesTuple, PairIndices, TripletIndices, accumulation_dtype


def as_indices(indices_tuple: IndicesTuple | None) -> PairIndices | TripletIndices | None:
    """Checks an `indices_tuple` and gives its entries their names.

    The values are not compared with the size of the batch: see `check_index_range`, which reads them back from the
    device.

    Args:
        indices_tuple: None, or a tuple or list of 3 tensors (anchors, positives, negatives) or of 4 tensors
            (pos_anchors, positives, neg_anchors, negatives), each one-dimensional, int64 or int32.

    Returns:
        The same tensors as `TripletIndices` or `PairIndices`; None for None.

    Raises:
        TypeError: `indices_tuple` is no tuple or list, an entry is no tensor, or its dtype is another.
        ValueError: the number of entries is another, an entry is not one-dimensional, or the lengths of
            anchors and their partners differ.
    """
    if indices_tuple is None:
        return None
    if not isinstance(indices_tuple, (tuple, list)):
        raise TypeError(
            "indices_tuple must be None or a tuple of 3 tensors (triplets) or 4 tensors (pairs), "
            f"got {type(indices_tuple).__name__}"
        )
    if len(indices_tuple) not in (3, 4):
        raise ValueError(
            f"indices_tuple must have 3 tensors ({', '.join(TripletIndices._fields)}) "
            f"or 4 tensors ({', '.join(PairIndices._fields)}), got {len(indices_tuple)}"
        )
    kind = TripletIndices if len(indices_tuple) == 3 else PairIndices
    for name, entry in zip(kind._fields, indices_tuple, strict=True):
        _check_entry(name, entry)
    indices = kind(*indices_tuple)
    if isinstance(indices, TripletIndices):
        _check_equal_lengths(
            anchors=indices.anchors, positives=indices.positives, negatives=indices.negatives
        )
    else:
        _check_equal_lengths(pos_anchors=indices.pos_anchors, positives=indices.positives)
        _check_equal_lengths(neg_anchors=indices.neg_anchors, negatives=indices.negatives)
    return indices


def check_index_range(indices: PairIndices | TripletIndices, size: int) -> None:
    """Each index is in [0, size). One host sync.

    Raises:
        ValueError: one is not; the message names its entry.
    """
    names = [name for name in indices._fields if getattr(indices, name).numel()]
    if not names:
        return
    ends = torch.stack([torch.stack(torch.aminmax(getattr(indices, name).to(torch.int64))) for name in names])
    for name, (least, greatest) in zip(names, ends.tolist(), strict=True):
        if least < 0 or greatest >= size:
            got = least if least < 0 else greatest
            raise ValueError(f"indices_tuple: {name} must be rows 0 .. {size - 1} of the batch, got {got}")


def miner_weights(
    indices: PairIndices | TripletIndices | None, size: int, *, dtype: torch.dtype, device: torch.device | str
) -> Tensor:
    """How often each row occurs in `indices`, relative to the row that occurs most.

    Every entry counts: anchors, positives and negatives. A row that never occurs has weight 0. Without indices,
    or where all entries are empty, every weight is 1. The weights are constants: they carry no gradient.

    With triplets `anchors = (0, 0, 1)`, `positives = (4, 8, 5)`, `negatives = (1, 2, 3)` and `size = 12` the
    weights are `1, 1, .5, .5, .5, .5, 0, 0, .5, 0, 0, 0`.

    The result is the same in every run, and nothing is read back from the device. Time and memory are linear in
    the number of indices plus `size`.

    Args:
        indices: the mined tuple, as `as_indices` returns it. Each index must be in `[0, size)`.
        size: number of rows N.
        dtype: floating dtype of the weights.
        device: device of the weights; indices elsewhere are copied there.

    Returns:
        Weights [N] in `[0, 1]`.
    """
    if indices is None or all(entry.numel() == 0 for entry in indices):
        return torch.ones(size, dtype=dtype, device=device)
    rows = torch.cat([entry.to(device=device, dtype=torch.int64) for entry in indices])
    counts = torch.zeros(size, dtype=torch.int64, device=device).index_add_(0, rows, torch.ones_like(rows))
    # Half precision cannot hold the counts, only the weights.
    counts = counts.to(accumulation_dtype(dtype))
    return (counts / counts.max()).to(dtype)


def weights_of_rows(indices: PairIndices | TripletIndices, embeddings: Tensor) -> Tensor:
    """`miner_weights` of the rows of embeddings [N, D], in the dtype that they are computed in."""
    dtype = accumulation_dtype(embeddings.dtype)
    return miner_weights(indices, embeddings.shape[0], dtype=dtype, device=embeddings.device)


def _check_entry(name: str, entry: Tensor) -> None:
    if not isinstance(entry, Tensor):
        raise TypeError(f"indices_tuple: {name} must be a tensor, got {type(entry).__name__}")
    if entry.dtype not in (torch.int64, torch.int32):
        raise TypeError(
            f"indices_tuple: {name} must have dtype torch.int64 or torch.int32, got {entry.dtype}"
        )
    if entry.ndim != 1:
        raise ValueError(f"indices_tuple: {name} must be one-dimensional, got shape {list(entry.shape)}")


def _check_equal_lengths(**entries: Tensor) -> None:
    lengths = [len(entry) for entry in entries.values()]
    if len(set(lengths)) > 1:
        raise ValueError(f"indices_tuple: {', '.join(entries)} must have the same length, got {lengths}")
