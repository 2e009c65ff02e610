"""The block functions as launches of the kernels in `tritonloss.kernels`."""

import contextlib
import math
import threading
from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

from tritonloss.backends import tuning
from tritonloss.backends.large_classes import Grid, fixed_point_unit, grid_of_limit
from tritonloss.backends.surrogates import PLAIN, parse
from tritonloss.kernels import (
    pair_logsumexp,
    pair_terms,
    panel_passes,
    proxy_logsumexp,
    rank_counts,
    soft_histogram,
    soft_rank,
    soft_rank_grid,
)
from tritonloss.kernels import self_check as check
from tritonloss.layout import Positives

KERNELS = {
    "soft_rank_forward": soft_rank.soft_rank_forward,
    "soft_rank_backward": soft_rank.soft_rank_backward,
    "pair_terms_forward": pair_terms.pair_terms_forward,
    "pair_terms_backward": pair_terms.pair_terms_backward,
    "proxy_logsumexp_forward": proxy_logsumexp.proxy_logsumexp_forward,
    "proxy_logsumexp_backward": proxy_logsumexp.proxy_logsumexp_backward,
    "soft_histogram_forward": soft_histogram.soft_histogram_forward,
    "soft_histogram_backward": soft_histogram.soft_histogram_backward,
    "pair_logsumexp_forward": pair_logsumexp.pair_logsumexp_forward,
    "pair_logsumexp_backward": pair_logsumexp.pair_logsumexp_backward,
    "soft_rank_spread": soft_rank_grid.soft_rank_spread,
    "soft_rank_read": soft_rank_grid.soft_rank_read,
    "rank_counts": rank_counts.rank_counts,
    "weigh": panel_passes.weigh,
    "split_in_two": panel_passes.split_in_two,
}
# The constants in which a kernel takes the numbers of a surrogate.
NUMBERS = ("first", "second", "third", "fourth")
# CUDA's limit for all axes of a grid but the first, as a power of two.
MAX_GRID_AXIS = 1 << 15
# TRITON_INTERPRET is read when a kernel is decorated; then kernels run on CPU tensors.
INTERPRETED = not isinstance(soft_rank.soft_rank_forward, triton.runtime.JITFunction)


_tuning = threading.Lock()


def _on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _launch(name: str, grid: Any, arguments: dict[str, Any], device: torch.device) -> None:
    with _on(device):
        _launch_with(_configuration(name, grid, arguments, device), name, grid, arguments)


def _launch_with(config: dict[str, int], name: str, grid: Any, arguments: dict[str, Any]) -> None:
    _tried_twice(lambda: KERNELS[name][grid](**arguments, **config))


def _tried_twice(launch: Callable[[], Any]) -> None:
    """Launch; once more after an error of Triton's cache: another process may have been writing the same file.

    Such an error comes from building a kernel: nothing has run. Raises RuntimeError if it comes again.
    """
    try:
        launch()
    except OSError:
        try:
            launch()
        except OSError as error:
            raise RuntimeError(
                f"Triton could not build a kernel ({type(error).__name__}: {error}): set TRITON_CACHE_DIR to a folder "
                "that this process can write, on a local disk, or TRITONLOSS_BACKEND=eager to do without Triton"
            ) from error


def _configuration(name: str, grid: Any, arguments: dict[str, Any], device: torch.device) -> dict[str, int]:
    """How to launch a kernel: by the table of the device, by timing where that is allowed, or by the static model."""
    block_p, itemsize = arguments.get("BLOCK_P", 1), arguments["scores"].element_size()
    choices = tuning.configurations(name, block_p, itemsize)
    if len(choices) == 1 or INTERPRETED:
        return choices[0]
    gpu = tuning.gpu(device)
    key = tuning.key(name, arguments, itemsize)
    found = tuning.known(gpu.name, key, choices)
    if found is None and tuning.may_time(gpu.name) and not _is_capturing(device):
        with _tuning:
            found = tuning.known(gpu.name, key, choices) or _fastest(name, grid, arguments, choices)
            tuning.keep(gpu.name, key, found)
    if found is not None:
        return found
    programs = math.prod(grid) if isinstance(grid, tuple) else None
    return tuning.static_choice(name, choices, arguments["n_bucket"], block_p, programs, gpu.multiprocessors)


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _fastest(
    name: str, grid: Any, arguments: dict[str, Any], choices: list[dict[str, int]]
) -> dict[str, int]:
    """The configuration with the smallest median time of its launch with these arguments."""

    def milliseconds(config: dict[str, int]) -> float:
        try:
            _launch_with(config, name, grid, arguments)
            return float(
                triton.testing.do_bench(
                    lambda: KERNELS[name][grid](**arguments, **config), return_mode="median"
                )
            )
        except (triton.runtime.errors.OutOfResources, torch.OutOfMemoryError):
            return math.inf  # it does not fit this device

    best = min(choices, key=milliseconds)
    for accumulated in tuning.ACCUMULATED & arguments.keys():
        arguments[accumulated].zero_()
    return best


# Scores of the self-check, and what its sums may err by, relative: a reciprocal and an exponential of 2^-22 each, and
# 64 roundings at most of a sum.
CHECKED_SCORES = 64
CHECKED_ERROR = 1e-5


def self_check(device: torch.device) -> str | None:
    """Why kernels cannot be used on `device`; None if a small one runs there and its numbers are right.

    It waits for the device. Whatever is raised is the answer, not an error.
    """
    scores = torch.linspace(-20, 20, CHECKED_SCORES)
    exact = torch.sigmoid(scores.double() - scores.double()[:, None]).sum(1)
    fast_math = torch.version.hip is None and not INTERPRETED
    try:
        with _on(device):
            on_device = scores.to(device)
            sums = torch.full_like(on_device, torch.nan)
            kernel = check.sums_of_sigmoids[(CHECKED_SCORES,)]
            _tried_twice(lambda: kernel(on_device, sums, SIZE=CHECKED_SCORES, FAST_MATH=fast_math))
            error = float((sums.cpu() / exact - 1).abs().max())
    except Exception as raised:
        return f"the first kernel failed on {device} ({type(raised).__name__}: {raised})"
    if error <= CHECKED_ERROR:
        return None
    return f"the first kernel computed wrong numbers on {device} (relative error {error:.1e})"


def _stride_units(matrix: Tensor) -> int:
    unit = int(soft_rank.ROW_STRIDE_UNIT.value)
    if matrix.stride(0) % unit or matrix.stride(1) != 1:
        raise ValueError(f"scores must have strides [a multiple of {unit}, 1], got {matrix.stride()}")
    return matrix.stride(0) // unit


def _common(scores: Tensor, positives: Positives, surrogate: str) -> dict[str, Any]:
    n_keys = scores.shape[1]
    numbers: dict[str, float] = {}
    if surrogate not in PLAIN:
        _, surrogate, own = parse(surrogate)
        numbers = dict(zip(NUMBERS, (*own, 0.0, 0.0, 0.0), strict=False))
    return {
        **numbers,
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
    """Write rank, slope (if `slopes` is given) and score of every pair of the block, rectangles [rows, width].

    With `positive_ranks` also the rank among the other positives, and its slope (if `positive_slopes` is given).
    """
    block_p = tuning.positives_per_tile(positives.width)
    arguments = {
        **_common(scores, positives, surrogate),
        "BLOCK_P": block_p,
        "ranks": ranks,
        "slopes": ranks if slopes is None else slopes,
        "positives": positive_scores,
        "WITH_SLOPES": slopes is not None,
    }
    tiles = -(-positives.width // block_p)
    grid = (scores.shape[0], min(tiles, MAX_GRID_AXIS), -(-tiles // MAX_GRID_AXIS))
    if surrogate not in PLAIN:
        _launch("pair_terms_forward", grid, arguments, scores.device)
        return
    arguments |= {
        "positive_ranks": ranks if positive_ranks is None else positive_ranks,
        "positive_slopes": ranks if positive_slopes is None else positive_slopes,
        "WITH_POSITIVES": positive_ranks is not None,
    }
    _launch("soft_rank_forward", grid, arguments, scores.device)


def soft_rank_backward(
    scores: Tensor,
    positives: Positives,
    surrogate: str,
    slopes: Tensor,
    positive_scores: Tensor,
    grad_ranks: Tensor,
    grad_positive_scores: Tensor | None,
    grad_scores: Tensor,
    positive_slopes: Tensor | None = None,
    grad_positive_ranks: Tensor | None = None,
) -> None:
    """Write the gradient of the block's scores into `grad_scores` [rows, N].

    grad_positive_scores: None for 0. positive_slopes and grad_positive_ranks: both or neither.
    """
    if grad_positive_scores is None:
        grad_positive_scores = torch.zeros_like(grad_ranks)
    block_p = tuning.positives_per_tile(positives.width)
    arguments = {
        **_common(scores, positives, surrogate),
        "BLOCK_P": block_p,
        "slopes": slopes,
        "positives": positive_scores,
        "grad_ranks": grad_ranks,
        "grad_positives": grad_positive_scores,
        "grad_scores": grad_scores,
    }
    if surrogate not in PLAIN:
        _launch("pair_terms_backward", _tiles_of_rows(scores), arguments, scores.device)
        return
    arguments |= {
        "positive_slopes": slopes if positive_slopes is None else positive_slopes,
        "grad_positive_ranks": grad_ranks if grad_positive_ranks is None else grad_positive_ranks,
        "WITH_POSITIVES": grad_positive_ranks is not None,
        "ONE_TILE": positives.width <= block_p,
    }

    def grid(meta: dict[str, Any]) -> tuple[int, int]:
        return len(scores), triton.cdiv(scores.shape[1], soft_rank.TILES_PER_PROGRAM.value * meta["BLOCK_N"])

    _launch("soft_rank_backward", grid, arguments, scores.device)


def largest_class(positives: Positives) -> int:
    """A bound of the positives of a row of the block: the host asks the device for nothing."""
    return positives.width


def one_class(positives: Positives) -> None:
    """Whether all rows of the block have the same class is known on the device only."""


def score_grid(scores: Tensor, limit: float) -> Grid | None:
    """The grid for scores of up to `limit`; None without one."""
    return grid_of_limit(limit, scores.dtype)


def _grid_arguments(values: Tensor, grid: Grid) -> dict[str, Any]:
    n_rows, n_columns = values.shape
    return {
        "scores": values,
        "stride_scores": values.stride(0),
        "n_rows": n_rows,
        "n_columns": n_columns,
        "first_cell": grid.first,
        "n_cells": grid.cells,
        "n_bucket": tuning.bucket(n_columns),
        "PER_UNIT": grid.stencil.per_unit,
        "POINTS": grid.stencil.points,
    }


def _tiles_of_rows(values: Tensor) -> Any:
    return lambda meta: (values.shape[0], triton.cdiv(values.shape[1], meta["BLOCK_N"]))


def grid_spread(values: Tensor, weights: Tensor, grid: Grid) -> Tensor:
    """The sums of weight x place^k of each cell, [points, rows, cells]; values and weights [rows, n], in its cells.

    In fixed point, to 2^-62 n times the largest weight of the row. A row with a weight that is not finite is NaN.
    """
    values, finite = values.contiguous(), weights.isfinite()
    unit = fixed_point_unit(weights)
    words = torch.zeros(
        grid.stencil.points, values.shape[0], grid.cells, dtype=torch.int64, device=values.device
    )
    arguments = {
        **_grid_arguments(values, grid),
        "weights": (torch.where(finite, weights, 0) / unit).to(values.dtype),
        "words": words,
        "stride_weights": values.shape[1],
    }
    _launch("soft_rank_spread", _tiles_of_rows(values), arguments, values.device)
    return (words * torch.where(finite.all(1, keepdim=True), unit, torch.nan)).to(values.dtype)


def grid_read(coefficients: Tensor, values: Tensor, grid: Grid) -> Tensor:
    """The polynomial of each value's cell at its place, [rows, n]; coefficients [points, rows, cells], of place^k."""
    values = values.contiguous()
    result = torch.empty_like(values)
    arguments = {
        **_grid_arguments(values, grid),
        "coefficients": coefficients.contiguous(),
        "values": result,
        "stride_values": result.stride(0),
    }
    _launch("soft_rank_read", _tiles_of_rows(values), arguments, values.device)
    return result


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


# A word of the table holds the sums of this many pairs.
MAX_PAIRS_PER_PROGRAM = 1 << 18
# Enough for the table of a program to be small beside the scores it reads.
PAIRS_PER_PROGRAM = 1 << 14


def soft_histogram_forward(
    scores: Tensor, ranges: Tensor, first_column: int, descending: bool, counts: Tensor, fractions: Tensor
) -> None:
    """Add the pairs of the block to `counts` and `fractions`, [1, 2, bins + 2] or, each row to its own, [rows, ...].

    Positives come before negatives, the last entry counts the NaN. counts are int64, fractions float64: multiples of
    2^-24 for float32 scores, of 2^-48 for float64.
    """
    n_rows, n_columns = scores.shape
    n_bins = counts.shape[-1] - 2
    columns = min(n_columns, MAX_PAIRS_PER_PROGRAM)
    pairs = min(max(PAIRS_PER_PROGRAM, 16 * n_bins), MAX_PAIRS_PER_PROGRAM)
    rows = 1 if counts.shape[0] > 1 else max(1, pairs // columns)
    grid = triton.cdiv(n_rows, rows), triton.cdiv(n_columns, columns)
    n_digits = 2 if scores.dtype == torch.float64 else 1
    words = torch.zeros(*grid, n_digits, 2, n_bins + 2, dtype=torch.int64, device=scores.device)
    arguments = {
        "scores": scores,
        "ranges": ranges,
        "words": words,
        "stride_units": _stride_units(scores),
        "n_rows": n_rows,
        "n_columns": n_columns,
        "first_column": first_column,
        "n_bins": n_bins,
        "rows_per_program": rows,
        "columns_per_program": columns,
        "n_bucket": tuning.bucket(n_columns),
        "DESCENDING": descending,
    }
    _launch("soft_histogram_forward", grid, arguments, scores.device)
    programs = (1,) if counts.shape[0] > 1 else (0, 1)
    unit = soft_histogram.COUNT_UNIT.value
    counts.add_((words[:, :, 0] // unit).sum(programs))
    digits = (words % unit).sum(programs)
    for digit in range(n_digits):
        fractions.add_(digits[..., digit, :, :], alpha=soft_histogram.FRACTION_UNITS.value ** -(digit + 1))


def soft_histogram_backward(
    scores: Tensor, ranges: Tensor, first_column: int, descending: bool, slopes: Tensor, grad_scores: Tensor
) -> None:
    """Write into `grad_scores` the slope of the bin of each pair; slopes: [1, 2, bins], or [rows, 2, bins]."""
    n_rows, n_columns = scores.shape
    n_bins = slopes.shape[-1]
    arguments = {
        "scores": scores,
        "ranges": ranges,
        "slopes": slopes,
        "grad_scores": grad_scores,
        "stride_units": _stride_units(scores),
        "grad_stride_units": _stride_units(grad_scores),
        "n_columns": n_columns,
        "first_column": first_column,
        "n_bins": n_bins,
        "slopes_per_row": 2 * n_bins if slopes.shape[0] > 1 else 0,
        "n_bucket": tuning.bucket(n_columns),
        "DESCENDING": descending,
    }

    def grid(meta: dict[str, Any]) -> tuple[int, int]:
        return n_rows, triton.cdiv(n_columns, meta["BLOCK_N"])

    _launch("soft_histogram_backward", grid, arguments, scores.device)


def _pass_arguments(scores: Tensor, of_rows: Tensor | None, of_columns: Tensor | None) -> dict[str, Any]:
    return {
        "scores": scores,
        "of_rows": scores if of_rows is None else of_rows,
        "of_columns": scores if of_columns is None else of_columns,
        "stride_units": _stride_units(scores),
        "n_columns": scores.shape[1],
        "n_bucket": tuning.bucket(scores.shape[1]),
    }


def weigh(scores: Tensor, of_rows: Tensor, of_columns: Tensor) -> None:
    """Multiply float32 scores [rows, N] by a factor for each row [rows] and each column [N], in place."""
    _launch("weigh", _tiles_of_rows(scores), _pass_arguments(scores, of_rows, of_columns), scores.device)


def split_in_two(
    scores: Tensor, of_rows: Tensor | None, of_columns: Tensor | None, high: Tensor, low: Tensor
) -> None:
    """Write the same product as a sum of two bfloat16 terms [rows, N], high + low; None for factors of 1."""
    arguments = {
        **_pass_arguments(scores, of_rows, of_columns),
        "high": high,
        "low": low,
        "half_stride_units": _stride_units(high),
        "WEIGHED": of_rows is not None,
    }
    _launch("split_in_two", _tiles_of_rows(scores), arguments, scores.device)
