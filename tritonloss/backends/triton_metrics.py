"""The count behind the retrieval metrics as launches of the kernel in `tritonloss.kernels.rank_counts`."""

import triton
from torch import Tensor

from tritonloss.backends import triton as launcher
from tritonloss.backends import tuning
from tritonloss.backends.eager_metrics import by_sorting
from tritonloss.kernels.soft_rank import ROW_STRIDE_UNIT

# With more relevant keys per row than this, sorting the row takes less time than comparing. Not measured: a comparison
# is taken for 0.17 ps, five instructions at the full rate of an H200, and a key of a sorted row for 0.3 ns.
SORT_WIDTH = 2048


def rank_counts(scores: Tensor, relevant: Tensor, counts: Tensor, *, strict: bool) -> None:
    """Write into `counts` how many keys of the row are above each relevant key.

    scores: [rows, N] without NaN, its row stride a multiple of 16 elements. relevant: [rows, width] of the same dtype,
    contiguous. counts: [rows, width] int32, contiguous. strict: count scores > relevant; otherwise also those that are
    equal.
    """
    if relevant.shape[1] > SORT_WIDTH:
        by_sorting(scores, relevant, counts, strict=strict)
    else:
        by_comparing(scores, relevant, counts, strict=strict)


def by_comparing(scores: Tensor, relevant: Tensor, counts: Tensor, *, strict: bool) -> None:
    """`rank_counts` by the kernel: every relevant key is compared with every key, nothing is held beside."""
    n_rows, n_keys = scores.shape
    width = relevant.shape[1]
    unit = int(ROW_STRIDE_UNIT.value)
    if scores.stride(0) % unit or scores.stride(1) != 1:
        raise ValueError(f"scores must have strides [a multiple of {unit}, 1], got {scores.stride()}")
    block_p = tuning.positives_per_tile(width)
    arguments = {
        "scores": scores,
        "relevant": relevant,
        "counts": counts,
        "stride_units": scores.stride(0) // unit,
        "n_keys": n_keys,
        "width": width,
        "n_bucket": tuning.bucket(n_keys),
        "p_bucket": tuning.bucket(width),
        "STRICT": strict,
        "BLOCK_P": block_p,
    }
    tiles = triton.cdiv(width, block_p)
    grid = (n_rows, min(tiles, launcher.MAX_GRID_AXIS), triton.cdiv(tiles, launcher.MAX_GRID_AXIS))
    launcher._launch("rank_counts", grid, arguments, scores.device)
