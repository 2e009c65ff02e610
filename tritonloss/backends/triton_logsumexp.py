"""`pair_logsumexp` of one block of scores as launches of the kernels in `tritonloss.kernels`."""

from typing import Any

import torch
import triton
from torch import Tensor

from tritonloss.backends import triton as launcher
from tritonloss.backends import tuning


def _arguments(
    scores: Tensor, ranges: Tensor, maps: Tensor, exponent_map: str, positive: Tensor, negative: Tensor
) -> dict[str, Any]:
    n_columns = scores.shape[1]
    return {
        "scores": scores,
        "ranges": ranges,
        "maps": maps,
        "positive": positive,
        "negative": negative,
        "stride_units": launcher._stride_units(scores),
        "n_columns": n_columns,
        "n_bucket": tuning.bucket(n_columns),
        "MAP": exponent_map,
        # PTX, and float32 only.
        "FAST_MATH": scores.dtype == torch.float32 and torch.version.hip is None and not launcher.INTERPRETED,
    }


def pair_logsumexp_forward(
    scores: Tensor, ranges: Tensor, maps: Tensor, exponent_map: str, positive: Tensor, negative: Tensor
) -> None:
    """Write ln of the sum of e^x over the positives and over the negatives of each row into two tensors [rows].

    scores: [rows, N]. ranges: [rows, 4] int64, contiguous. maps: [2, 3] of the scores' dtype, contiguous. See
    `tritonloss.backends.eager_logsumexp`.
    """
    arguments = _arguments(scores, ranges, maps, exponent_map, positive, negative)
    launcher._launch("pair_logsumexp_forward", (len(scores),), arguments, scores.device)


def pair_logsumexp_backward(
    scores: Tensor,
    ranges: Tensor,
    maps: Tensor,
    exponent_map: str,
    positive: Tensor,
    negative: Tensor,
    grad_positive: Tensor,
    grad_negative: Tensor,
    grad_positive_scores: Tensor | None,
    grad_scores: Tensor,
) -> None:
    """Write the gradient of the block's scores into `grad_scores` [rows, N], other memory than that of the scores.

    grad_positive_scores: [rows, width], contiguous, or None.
    """
    arguments = {
        **_arguments(scores, ranges, maps, exponent_map, positive, negative),
        "grad_positive": grad_positive,
        "grad_negative": grad_negative,
        "grad_positive_scores": scores if grad_positive_scores is None else grad_positive_scores,
        "stride_pairs": 0 if grad_positive_scores is None else grad_positive_scores.shape[1],
        "WITH_SCORES": grad_positive_scores is not None,
        "grad_scores": grad_scores,
        "grad_stride_units": launcher._stride_units(grad_scores),
    }

    def grid(meta: dict[str, Any]) -> tuple[int, int]:
        return len(scores), triton.cdiv(scores.shape[1], meta["BLOCK_N"])

    launcher._launch("pair_logsumexp_backward", grid, arguments, scores.device)
