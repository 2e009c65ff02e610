"""The kernels of `soft_histogram` launched directly: tiles, edges, programs, padding, numbers at the limits."""

from __future__ import annotations

import pytest
import torch
from checks import assert_close, assert_same
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tritonloss.kernels.soft_histogram import (
    COUNT_UNIT,
    FRACTION_UNITS,
    soft_histogram_backward,
    soft_histogram_forward,
)

GUARD = -777  # in memory that a kernel must leave alone
UNIT, UNITS = COUNT_UNIT.value, FRACTION_UNITS.value
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
directions = pytest.mark.parametrize("descending", [False, True], ids=["up", "down"])


def scores_in_long_rows(values: Tensor, device: torch.device) -> Tensor:
    """`values` in rows of at least 16 elements more, a multiple of 16; what is outside holds NaN."""
    rows, n = values.shape
    whole = torch.full((rows, n // 16 * 16 + 32), torch.nan, dtype=values.dtype, device=device)
    whole[:, :n] = values
    return whole[:, :n]


def guarded(
    shape: tuple[int, ...], fill: float, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """A tensor of this shape inside a longer one of guards, and that one."""
    size = int(torch.Size(shape).numel())
    whole = torch.full((size + 128,), GUARD, dtype=dtype, device=device)
    whole[64 : 64 + size] = fill
    return whole[64 : 64 + size].view(shape), whole


def forward(
    scores: Tensor,
    ranges: Tensor,
    bins: int,
    *,
    first_column: int = 0,
    descending: bool = False,
    rows_per_program: int = 1,
    columns_per_program: int = 1 << 18,
    block_n: int = 16,
) -> Tensor:
    """words [programs, column programs, digits, 2, bins + 2]; whatever is written elsewhere is an error."""
    rows, columns = scores.shape
    grid = -(-rows // rows_per_program), -(-columns // columns_per_program)
    digits = 2 if scores.dtype == torch.float64 else 1
    words, whole = guarded((*grid, digits, 2, bins + 2), 0, torch.int64, scores.device)
    soft_histogram_forward[grid](
        scores,
        ranges,
        words,
        scores.stride(0) // 16,
        rows,
        columns,
        first_column,
        bins,
        rows_per_program,
        columns_per_program,
        1,
        DESCENDING=descending,
        BLOCK_N=block_n,
    )
    assert (whole[:64] == GUARD).all()
    assert (whole[-64:] == GUARD).all()
    return words


def backward(
    scores: Tensor, ranges: Tensor, slopes: Tensor, *, first_column: int = 0, descending: bool = False
) -> Tensor:
    rows, columns = scores.shape
    grad = scores_in_long_rows(torch.full_like(scores, torch.nan), scores.device)
    whole = torch.as_strided(grad, (rows, grad.stride(0)), (grad.stride(0), 1))
    whole[:, columns:] = GUARD
    soft_histogram_backward[rows, -(-columns // 16)](
        scores,
        ranges,
        slopes,
        grad,
        scores.stride(0) // 16,
        grad.stride(0) // 16,
        columns,
        first_column,
        slopes.shape[-1],
        slopes[0].numel() if slopes.shape[0] > 1 else 0,
        1,
        DESCENDING=descending,
        BLOCK_N=16,
    )
    assert (whole[:, columns:] == GUARD).all()
    return grad


def places(scores: Tensor, bins: int, descending: bool) -> tuple[Tensor, Tensor]:
    """Bin and fraction in float64; the last node has its own bin. Exact for the few digits of `random_scores`."""
    place = (scores.double() * (-1 if descending else 1) + 1) * bins / 2
    place = place.clamp(0, bins)
    return place.floor().to(torch.int64), place - place.floor()


def expected_words(
    scores: Tensor, ranges: Tensor, bins: int, first: int, descending: bool
) -> tuple[Tensor, Tensor]:
    """Numbers of pairs [2, bins + 2] and sums of fractions, one pair after the other."""
    counts = torch.zeros(2, bins + 2, dtype=torch.int64)
    fractions = torch.zeros(2, bins + 2, dtype=torch.float64)
    nodes, rests = places(scores.cpu(), bins, descending)
    for row, (start, stop, hidden_start, hidden_stop) in enumerate(ranges.tolist()):
        for column in range(scores.shape[1]):
            key = first + column
            if hidden_start <= key < hidden_stop:
                continue
            kind = int(not start <= key < stop)
            is_nan = bool(scores[row, column].isnan())
            counts[kind, bins + 1 if is_nan else nodes[row, column]] += 1
            if not is_nan:
                fractions[kind, nodes[row, column]] += rests[row, column]
    return counts, fractions


def random_scores(rows: int, columns: int, dtype: torch.dtype, width: int = 70) -> Tensor:
    """Multiples of 1 / 64 somewhat beyond [-1, 1]: their places are exact in float32, many lie on nodes."""
    return torch.randint(-width, width + 1, (rows, columns)).to(dtype) / 64


def decoded(words: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers of pairs and sums of fractions over all programs."""
    assert words.min() >= 0
    per_digit = (words // UNIT).sum((0, 1)).cpu()
    assert_same(per_digit[:1].expand_as(per_digit), per_digit)
    digits = (words % UNIT).sum((0, 1)).double().cpu()
    return per_digit[0], sum(digit * UNITS ** -(i + 1) for i, digit in enumerate(digits))


RANGES = [(0, 3, 0, 2), (5, 30, 7, 8), (2, 2, 0, 0), (10, 12, 0, 12), (0, 0, 0, 40), (33, 37, 20, 21)]


@dtypes
@directions
@pytest.mark.parametrize("first", [0, 3])
@pytest.mark.parametrize(("rows_per_program", "columns_per_program"), [(1, 64), (4, 64), (100, 64), (2, 16)])
def test_forward_counts_every_pair_once(
    rows_per_program: int,
    columns_per_program: int,
    first: int,
    descending: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    scores = scores_in_long_rows(random_scores(len(RANGES), 37, dtype), device)
    ranges = torch.tensor(RANGES, device=device)
    words = forward(
        scores,
        ranges,
        10,
        first_column=first,
        descending=descending,
        rows_per_program=rows_per_program,
        columns_per_program=columns_per_program,
    )
    counts, fractions = decoded(words)
    expected_counts, expected_fractions = expected_words(scores, ranges, 10, first, descending)
    assert_same(counts, expected_counts)
    assert_close(fractions, expected_fractions, atol=37 * len(RANGES) * 2.0**-24)


@dtypes
@pytest.mark.parametrize("bins", [1, 2, 3, 100, 255, 256, 4096, 5000])
def test_any_number_of_bins(bins: int, dtype: torch.dtype, device: torch.device) -> None:
    scores = scores_in_long_rows(random_scores(3, 50, dtype), device)
    ranges = torch.tensor([(0, 10, 0, 0)] * 3, device=device)
    counts, fractions = decoded(forward(scores, ranges, bins, block_n=32))
    expected_counts, expected_fractions = expected_words(scores, ranges, bins, 0, False)
    assert_same(counts, expected_counts)
    assert_close(fractions, expected_fractions, atol=150 * 2.0**-24)
    slopes = torch.randn(1, 2, bins, dtype=dtype, device=device)
    grad = backward(scores, ranges, slopes)
    nodes = places(scores, bins, False)[0].clamp(max=bins - 1)
    kind = (torch.arange(50, device=device) >= 10).long()
    assert_same(grad, torch.where(scores.abs() > 1, 0, slopes[0, kind, nodes]))


@dtypes
def test_ends_infinities_and_nan(dtype: torch.dtype, device: torch.device) -> None:
    tiny, inf = torch.finfo(dtype).eps, torch.inf
    values = [-inf, -1e30, -1 - tiny, -1, -1 + tiny, 0, 1 - tiny, 1, 1 + tiny, 1e30, inf, torch.nan]
    scores = scores_in_long_rows(torch.tensor([values], dtype=dtype), device)
    ranges = torch.tensor([[0, 0, 0, 0]], device=device)
    counts, fractions = decoded(forward(scores, ranges, 4))
    assert counts.tolist() == [[0] * 6, [5, 0, 1, 1, 4, 1]]
    assert_close(fractions[1], torch.tensor([0, 0, 0, 1, 0, 0]), atol=2.0**-22)
    slopes = torch.tensor([[[0, 0, 0, 0], [3, 4, 5, 6]]], dtype=dtype, device=device)
    assert backward(scores, ranges, slopes)[0, :-1].tolist() == [0, 0, 0, 3, 3, 5, 6, 6, 0, 0, 0]


def test_hidden_and_padded_scores_are_not_read(device: torch.device) -> None:
    """They hold NaN here; a row that is hidden as a whole writes nothing."""
    scores = scores_in_long_rows(torch.zeros(3, 40), device)
    ranges = torch.tensor([(0, 0, 0, 25), (30, 40, 10, 20), (0, 40, 0, 40)], device=device)
    scores[0, :25] = scores[1, 10:20] = scores[2] = torch.nan
    counts, _ = decoded(forward(scores, ranges, 2))
    assert counts.tolist() == [[0, 10, 0, 0], [0, 15 + 20, 0, 0]]
    slopes = torch.ones(1, 2, 2, device=device)
    assert_same(backward(scores, ranges, slopes), (~scores.isnan()).float())


@directions
def test_backward_takes_the_slopes_of_the_row(descending: bool, device: torch.device) -> None:
    scores = scores_in_long_rows(random_scores(len(RANGES), 37, torch.float32, width=64), device)
    ranges = torch.tensor(RANGES, device=device)
    slopes = torch.randn(len(RANGES), 2, 10, device=device)
    grad = backward(scores, ranges, slopes, first_column=3, descending=descending)
    key = 3 + torch.arange(37, device=device)
    start, stop, hidden_start, hidden_stop = ranges[:, :, None].unbind(1)
    kind = (~((key >= start) & (key < stop))).long()
    nodes = places(scores, 10, descending)[0].clamp(max=9)
    expected = slopes[torch.arange(len(RANGES), device=device)[:, None], kind, nodes]
    assert_same(grad, torch.where((key >= hidden_start) & (key < hidden_stop), 0, expected))


def test_a_word_holds_the_most_pairs_a_program_may_see(device: torch.device) -> None:
    """2^18 pairs of fraction 1 - 2^-24 in one bin, the count and the fractions read back apart."""
    before = (2**18 - 16) * (UNIT + UNITS - 1)
    scores = scores_in_long_rows(torch.full((1, 16), 2.0**-24 - 1, dtype=torch.float64), device)
    ranges = torch.tensor([[0, 0, 0, 0]], device=device)
    one = forward(scores, ranges, 2, descending=True)[0, 0, 0, 1, 1].item()
    assert one == 16 * (UNIT + UNITS - 1)
    assert divmod(before + one, UNIT) == (2**18, 2**18 * (UNITS - 1))
    assert before + one < 2**63


@settings(max_examples=15)
@given(
    values=st.lists(st.floats(width=32, allow_nan=True, allow_infinity=True), min_size=1, max_size=20),
    bins=st.integers(1, 40),
)
def test_any_score_is_counted_somewhere(values: list[float], bins: int) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    scores = scores_in_long_rows(torch.tensor([values]), device)
    counts, fractions = decoded(forward(scores, torch.tensor([[0, 0, 0, 0]], device=device), bins))
    assert counts.sum() == len(values)
    assert counts[1, -1] == scores.isnan().sum()
    assert (fractions >= 0).all()
    assert (fractions <= counts).all()
    assert fractions[1, -2:].abs().sum() == 0
