"""The block functions as launches of the kernels in `tritonloss.kernels`."""

import contextlib
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from tritonloss.backends import tuning
from tritonloss.kernels import proxy_logsumexp, soft_rank
from tritonloss.layout import Positives

KERNELS = {
    "soft_rank_forward": soft_rank.soft_rank_forward,
    "soft_rank_backward": soft_rank.soft_rank_backward,
    "proxy_logsumexp_forward": proxy_logsumexp.proxy_logsumexp_forward,
    "proxy_logsumexp_backward": proxy_logsumexp.proxy_logsumexp_backward,
}
# TRITON_INTERPRET is read when a kernel is decorated; then kernels run on CPU tensors.
INTERPRETED = not isinstance(soft_rank.soft_rank_forward, triton.runtime.JITFunction)


@cache
def _autotuner(name: str) -> Any:
    return tuning.autotuner(triton, KERNELS[name], name)


def _launch(name: str, grid: Any, arguments: dict[str, Any], device: torch.device) -> None:
    on_device = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    with on_device:
        if tuning.tuning_enabled() and not INTERPRETED:
            _autotuner(name)[grid](**arguments)
        else:
            config = tuning.configurations(name, arguments.get("BLOCK_P", 1))[0]
            KERNELS[name][grid](**arguments, **config)


def _stride_units(matrix: Tensor) -> int:
    unit = int(soft_rank.ROW_STRIDE_UNIT.value)
    if matrix.stride(0) % unit or matrix.stride(1) != 1:
        raise ValueError(f"scores must have strides [a multiple of {unit}, 1], got {matrix.stride()}")
    return matrix.stride(0) // unit


def _common(scores: Tensor, positives: Positives, surrogate: str) -> dict[str, Any]:
    n_keys = scores.shape[1]
    return {
        "scores": scores,
        "start": positives.start,
        "count": positives.count,
        "offset": positives.offset,
        "stride_units": _stride_units(scores),
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
    positive_ranks: Tensor | None = None,
    positive_slopes: Tensor | None = None,
) -> None:
    """Write rank, slope (if `slopes` is given) and score of every pair of the block into the flat tensors [M].

    With `positive_ranks` also the rank among the other positives, and its slope (if `positive_slopes` is given).
    """
    block_p = tuning.positives_per_tile(positives.width)
    arguments = {
        **_common(scores, positives, surrogate),
        "BLOCK_P": block_p,
        "ranks": ranks,
        "slopes": ranks if slopes is None else slopes,
        "positives": positive_scores,
        "positive_ranks": ranks if positive_ranks is None else positive_ranks,
        "positive_slopes": ranks if positive_slopes is None else positive_slopes,
        "WITH_SLOPES": slopes is not None,
        "WITH_POSITIVES": positive_ranks is not None,
    }
    grid = (len(scores), triton.cdiv(positives.width, block_p))
    _launch("soft_rank_forward", grid, arguments, scores.device)


def soft_rank_backward(
    scores: Tensor,
    positives: Positives,
    surrogate: str,
    slopes: Tensor,
    positive_scores: Tensor,
    grad_ranks: Tensor,
    grad_positive_scores: Tensor,
    grad_scores: Tensor,
    positive_slopes: Tensor | None = None,
    grad_positive_ranks: Tensor | None = None,
) -> None:
    """Write the gradient of the block's scores into `grad_scores` [rows, N].

    positive_slopes and grad_positive_ranks: of the ranks among the positives, both or neither.
    """
    block_p = tuning.positives_per_tile(positives.width)
    arguments = {
        **_common(scores, positives, surrogate),
        "BLOCK_P": block_p,
        "slopes": slopes,
        "positives": positive_scores,
        "grad_ranks": grad_ranks,
        "grad_positives": grad_positive_scores,
        "positive_slopes": slopes if positive_slopes is None else positive_slopes,
        "grad_positive_ranks": grad_ranks if grad_positive_ranks is None else grad_positive_ranks,
        "WITH_POSITIVES": grad_positive_ranks is not None,
        "grad_scores": grad_scores,
    }

    def grid(meta: dict[str, Any]) -> tuple[int, int]:
        return len(scores), triton.cdiv(scores.shape[1], meta["BLOCK_N"])

    _launch("soft_rank_backward", grid, arguments, scores.device)


def _proxy_logsumexp_arguments(
    scores: Tensor, first_class: int, labels: Tensor, offsets: Tensor, positive: Tensor, negative: Tensor
) -> dict[str, Any]:
    n_columns = scores.shape[1]
    return {
        "scores": scores,
        "labels": labels,
        "offsets": offsets,
        "positive": positive,
        "negative": negative,
        "first_class": first_class,
        "stride_units": _stride_units(scores),
        "n_columns": n_columns,
        "n_bucket": tuning.bucket(n_columns),
    }


def proxy_logsumexp_forward(
    scores: Tensor, first_class: int, labels: Tensor, offsets: Tensor, positive: Tensor, negative: Tensor
) -> None:
    """Write ln(1 + sum) of the own columns and of the other columns of every row into `positive`, `negative` [rows]."""
    arguments = _proxy_logsumexp_arguments(scores, first_class, labels, offsets, positive, negative)
    _launch("proxy_logsumexp_forward", (len(scores),), arguments, scores.device)


def proxy_logsumexp_backward(
    scores: Tensor,
    first_class: int,
    labels: Tensor,
    offsets: Tensor,
    positive: Tensor,
    negative: Tensor,
    grad_positive: Tensor,
    grad_negative: Tensor,
    grad_scores: Tensor,
) -> None:
    """Write the gradient of the block's scores into `grad_scores` [rows, N]."""
    arguments = {
        **_proxy_logsumexp_arguments(scores, first_class, labels, offsets, positive, negative),
        "grad_positive": grad_positive,
        "grad_negative": grad_negative,
        "grad_scores": grad_scores,
        "grad_stride_units": _stride_units(grad_scores),
    }

    def grid(meta: dict[str, Any]) -> tuple[int, int]:
        return len(scores), triton.cdiv(scores.shape[1], meta["BLOCK_N"])

    _launch("proxy_logsumexp_backward", grid, arguments, scores.device)
