"""The block functions as launches of the kernels in `tritonloss.kernels`."""

import contextlib
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from tritonloss.backends import tuning
from tritonloss.kernels import soft_rank
from tritonloss.layout import Positives

KERNELS = {
    "soft_rank_forward": soft_rank.soft_rank_forward,
    "soft_rank_backward": soft_rank.soft_rank_backward,
}
# TRITON_INTERPRET is read when a kernel is decorated; then kernels run on CPU tensors.
INTERPRETED = not isinstance(soft_rank.soft_rank_forward, triton.runtime.JITFunction)


@cache
def _autotuner(name: str) -> Any:
    return tuning.autotuner(triton, KERNELS[name], name)


def _launch(name: str, grid: Any, block_p: int, arguments: dict[str, Any], device: torch.device) -> None:
    on_device = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    with on_device:
        if tuning.tuning_enabled() and not INTERPRETED:
            _autotuner(name)[grid](**arguments, BLOCK_P=block_p)
        else:
            config = tuning.configurations(name, block_p)[0]
            KERNELS[name][grid](**arguments, BLOCK_P=block_p, **config)


def _common(scores: Tensor, positives: Positives, surrogate: str) -> dict[str, Any]:
    n_keys = scores.shape[1]
    unit = soft_rank.ROW_STRIDE_UNIT.value
    if scores.stride(0) % unit or scores.stride(1) != 1:
        raise ValueError(f"scores must have strides [a multiple of {unit}, 1], got {scores.stride()}")
    return {
        "scores": scores,
        "start": positives.start,
        "count": positives.count,
        "offset": positives.offset,
        "stride_units": scores.stride(0) // unit,
        "n_keys": n_keys,
        "n_bucket": tuning.bucket(n_keys),
        "p_bucket": tuning.bucket(positives.width),
        "SURROGATE": surrogate,
        # The approximate reciprocal is PTX, and float32 only.
        "FAST_MATH": scores.dtype == torch.float32 and torch.version.hip is None and not INTERPRETED,
    }


def soft_rank_forward(
    scores: Tensor,
    positives: Positives,
    surrogate: str,
    ranks: Tensor,
    slopes: Tensor | None,
    positive_scores: Tensor,
) -> None:
    """Write rank, slope (if `slopes` is given) and score of every pair of the block into the flat tensors [M]."""
    block_p = tuning.positives_per_tile(positives.width)
    arguments = {
        **_common(scores, positives, surrogate),
        "ranks": ranks,
        "slopes": ranks if slopes is None else slopes,
        "positives": positive_scores,
        "WITH_SLOPES": slopes is not None,
    }
    grid = (len(scores), triton.cdiv(positives.width, block_p))
    _launch("soft_rank_forward", grid, block_p, arguments, scores.device)


def soft_rank_backward(
    scores: Tensor,
    positives: Positives,
    surrogate: str,
    slopes: Tensor,
    positive_scores: Tensor,
    grad_ranks: Tensor,
    grad_positive_scores: Tensor,
    grad_scores: Tensor,
) -> None:
    """Write the gradient of the block's scores into `grad_scores` [rows, N]."""
    block_p = tuning.positives_per_tile(positives.width)
    arguments = {
        **_common(scores, positives, surrogate),
        "slopes": slopes,
        "positives": positive_scores,
        "grad_ranks": grad_ranks,
        "grad_positives": grad_positive_scores,
        "grad_scores": grad_scores,
    }

    def grid(meta: dict[str, Any]) -> tuple[int, int]:
        return len(scores), triton.cdiv(scores.shape[1], meta["BLOCK_N"])

    _launch("soft_rank_backward", grid, block_p, arguments, scores.device)
