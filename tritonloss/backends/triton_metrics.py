"""The count behind the retrieval metrics as launches of the kernel in `tritonloss.kernels.rank_counts`."""

import contextlib
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from tritonloss.backends import tuning
from tritonloss.backends.eager_metrics import by_sorting
from tritonloss.kernels import rank_counts as rank_counts_kernel
from tritonloss.kernels.soft_rank import ROW_STRIDE_UNIT

KERNELS = {"rank_counts": rank_counts_kernel.rank_counts}
# CUDA's limit for all axes of a grid but the first, as a power of two.
MAX_GRID_AXIS = 1 << 15
# TRITON_INTERPRET is read when a kernel is decorated; then kernels run on CPU tensors.
INTERPRETED = not isinstance(rank_counts_kernel.rank_counts, triton.runtime.JITFunction)
# With more relevant keys a row than this, sorting the row takes less time than comparing. Not measured: a comparison
# is taken for 0.17 ps, five instructions at the full rate of an H200, and a key of a sorted row for 0.3 ns.
SORT_WIDTH = 2048


@cache
def _autotuner(name: str) -> Any:
    return tuning.autotuner(triton, KERNELS[name], name)


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
    grid = (n_rows, min(tiles, MAX_GRID_AXIS), triton.cdiv(tiles, MAX_GRID_AXIS))
    _launch("rank_counts", grid, arguments, scores)


def _launch(name: str, grid: tuple[int, ...], arguments: dict[str, Any], scores: Tensor) -> None:
    on_device = torch.cuda.device(scores.device) if scores.is_cuda else contextlib.nullcontext()
    with on_device:
        choices = tuning.configurations(name, arguments["BLOCK_P"], scores.element_size())
        if len(choices) > 1 and tuning.tuning_enabled() and not INTERPRETED:
            _autotuner(name)[grid](**arguments)
        else:
            KERNELS[name][grid](**arguments, **choices[0])
