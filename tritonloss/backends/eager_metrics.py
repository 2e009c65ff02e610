"""The count behind the retrieval metrics in plain torch: any device, float32 and float64 scores.

`rank_counts` chooses between two algorithms with the same result: comparisons of every relevant key with every key, and
a sorted copy of the row, in which a relevant key is found by bisection.
"""

import torch
from torch import Tensor

# With more relevant keys per row than this, sorting the row takes less time than comparing. Measured on a CPU: 0.3 ns
# per comparison, 55 ns for a key of a sorted row. On CUDA both are bound by memory traffic; not measured.
SORT_WIDTH = {"cpu": 192, "cuda": 64}
# Pairs that are compared at a time. Both buffers stay in the cache of a core on a CPU; on CUDA launches would take
# longer than the work of a smaller tile. A count of float32 ones is exact up to 2^24.
TILE = {"cpu": 1 << 18, "cuda": 1 << 24}


def of_device(sizes: dict[str, int], device: torch.device) -> int:
    """The entry for a CPU, or that for CUDA, which stands for all other devices."""
    return sizes["cpu" if device.type == "cpu" else "cuda"]


def rank_counts(scores: Tensor, relevant: Tensor, counts: Tensor, *, strict: bool) -> None:
    """Write into `counts` how many keys of the row are above each relevant key.

    scores: [rows, N] without NaN. relevant: [rows, width] of the same dtype, contiguous. counts: [rows, width] int32.
    strict: count scores > relevant; otherwise also those that are equal.
    """
    if relevant.shape[1] > of_device(SORT_WIDTH, scores.device):
        by_sorting(scores, relevant, counts, strict=strict)
    else:
        by_comparing(scores, relevant, counts, strict=strict)


def by_comparing(scores: Tensor, relevant: Tensor, counts: Tensor, *, strict: bool) -> None:
    """`rank_counts` in time O(rows N width), with a buffer of one tile."""
    compare = torch.gt if strict else torch.ge
    columns = max(1, of_device(TILE, scores.device) // max(1, len(scores)))
    buffer = torch.empty(len(scores), min(columns, scores.shape[1]), dtype=scores.dtype, device=scores.device)
    counts.zero_()
    for tile in torch.split(scores, columns, 1):
        # As a number of the dtype of the scores: torch adds those up several times faster than booleans.
        is_above = buffer[:, : tile.shape[1]]
        for slot in range(relevant.shape[1]):
            compare(tile, relevant[:, slot : slot + 1], out=is_above)
            counts[:, slot] += is_above.sum(1).to(counts.dtype)


def by_sorting(scores: Tensor, relevant: Tensor, counts: Tensor, *, strict: bool) -> None:
    """`rank_counts` in time O(rows (N + width) log N), with sorted copies of a quarter of the rows, 3/4 of a block."""
    n_keys = scores.shape[1]
    rows = max(1, len(scores) // 4)
    for part, bounds, out in zip(*(torch.split(t, rows) for t in (scores, relevant, counts)), strict=True):
        ascending = torch.sort(part, dim=1).values
        out.copy_(n_keys - torch.searchsorted(ascending, bounds, right=strict))
