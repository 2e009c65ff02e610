"""The block functions in plain torch: any device, any floating dtype.

Each takes a block of scores [rows, N] and writes into tensors its caller allocated.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from tritonloss.backends import eager_terms
from tritonloss.backends.large_classes import Grid, grid_of_range
from tritonloss.backends.surrogates import parse
from tritonloss.layout import Positives, counts_of_sorted, segment_max, segment_sum
from tritonloss.types import is_complete

# The derivatives of every (positive, key) are kept from the forward pass of a block to its backward pass up to this
# size: to read them from the last-level cache takes less time than to compute them again; from memory, more. Below
# 32 MiB glibc takes the next block from what the last one freed, and no page is new.
KEPT_BYTES = 16 << 20
# Positives that are compared with all keys at once; a cube of this size stays in the caches of a core.
CUBE_BYTES = 4 << 20

# Subtracted from the threshold of a positive, so that the surrogate of a difference is a function of this one number.
SHIFT = {"sigmoid": 0, "one_side_huber": 1}
# g' is what the functions below call a slope, times this.
SCALE = {"sigmoid": 1, "one_side_huber": 2}


def _shift(surrogate: str) -> float:
    """SHIFT of the surrogate; that of the hinge is its margin."""
    return SHIFT[surrogate] if surrogate in SHIFT else parse(surrogate).numbers[0]


def _sum_values(lifted: Tensor, surrogate: str, ranks: Tensor, slopes: Tensor | None, out: Tensor) -> None:
    """Write the sums of g and, if `slopes` is given, of g' / SCALE over the last dimension, and g' / SCALE into `out`.

    lifted: the difference plus its shift, which is overwritten; `out` may be its memory for the sigmoid and the hinge.
    A difference of -inf counts 0.
    """
    if surrogate == "sigmoid":
        torch.sum(torch.sigmoid(lifted, out=out), -1, out=ranks)
        if slopes is not None:
            torch.sum(out.addcmul_(out, out, value=-1), -1, out=slopes)
        return
    if surrogate.startswith("hinge"):
        torch.sum(lifted.clamp_(min=0), -1, out=ranks)
        if slopes is not None:
            torch.sum(torch.sign(lifted, out=out), -1, out=slopes)
        return
    torch.clamp(lifted.clamp_(min=0), max=1, out=out)
    if slopes is not None:
        torch.sum(out, -1, out=slopes)
    # out (2 lifted - out): the parabola while both are equal, the line 2 lifted - 1 above 1.
    torch.sum(torch.lerp(out, lifted, 2, out=lifted).mul_(out), -1, out=ranks)


def _slope(lifted: Tensor, surrogate: str) -> Tensor:
    """g' / SCALE of the difference plus its shift, in its memory."""
    if surrogate == "sigmoid":
        value = lifted.sigmoid_()
        return value.addcmul_(value, value, value=-1)
    return lifted.clamp_(min=0).sign_() if surrogate.startswith("hinge") else lifted.clamp_(0, 1)


def _cubes(
    columns: Tensor, positive: Tensor, surrogate: str, skip: bool, cube: Tensor
) -> Iterator[tuple[slice, Tensor]]:
    """Differences plus their shift [rows, some positives, columns], in the memory of `cube`, for as many as it has.

    If it has all, those of each part lie where the part is. skip: -inf where column p meets positive p.
    """
    width, step = positive.shape[1], max(1, cube.shape[1])
    shift = _shift(surrogate)
    threshold = positive - shift if shift else positive
    for first in range(0, width, step):
        part = slice(first, min(first + step, width))
        lifted = torch.sub(columns[:, None], threshold[:, part, None], out=cube[:, : part.stop - first])
        if skip:
            lifted.diagonal(first, 1, 2).fill_(-torch.inf)
        yield part, lifted


def _new_cube(columns: Tensor, width: int) -> Tensor:
    """Memory for the differences of as many positives as CUBE_BYTES hold, one at least."""
    rows, n = columns.shape
    some = max(1, CUBE_BYTES // max(1, rows * n * columns.element_size()))
    return columns.new_empty(rows, min(some, width), n)


def _sums(
    columns: Tensor,
    positive: Tensor,
    surrogate: str,
    ranks: Tensor,
    slopes: Tensor | None,
    keep: bool = False,
    skip: bool = False,
) -> Tensor | None:
    """Write the sums of g and of g' over the columns of each row, [rows, width] each.

    keep: return g' / SCALE [rows, width, columns]. skip: without column p for positive p.
    """
    rows, width = positive.shape
    kept = columns.new_empty(rows, width, columns.shape[1]) if keep else None
    in_place = surrogate.startswith(("sigmoid", "hinge"))
    cube = kept if kept is not None and in_place else _new_cube(columns, width)
    spare = cube if in_place or kept is not None else torch.empty_like(cube)
    for part, lifted in _cubes(columns, positive, surrogate, skip, cube):
        out = kept[:, part] if kept is not None else spare[:, : lifted.shape[1]]
        _sum_values(lifted, surrogate, ranks[:, part], None if slopes is None else slopes[:, part], out)
    if slopes is not None and SCALE.get(surrogate, 1) != 1:
        slopes.mul_(SCALE[surrogate])
    return kept


def soft_rank_forward(
    scores: Tensor,
    positives: Positives,
    surrogate: str,
    ranks: Tensor,
    slopes: Tensor | None,
    positive_scores: Tensor,
    positive_ranks: Tensor | None = None,
    positive_slopes: Tensor | None = None,
) -> Tensor | None:
    """Write rank, slope (if `slopes` is given) and score of every pair of the block, rectangles [rows, width].

    With `positive_ranks` also the rank among the other positives, and its slope (if `positive_slopes` is given). The
    scores of the positives are overwritten. Returns what `soft_rank_backward` of the same block takes as `kept`.
    """
    if surrogate.startswith(eager_terms.NAMES):
        eager_terms.forward(scores, positives, surrogate, ranks, slopes, positive_scores)
        return None
    # A slot without a pair is compared with 0, so that nothing it holds becomes NaN.
    positive = positives.only_pairs(torch.gather(scores, 1, positives.columns, out=positive_scores))
    # A copy without the positives would cost more than to take them out.
    scores.scatter_(1, positives.columns, -torch.inf)
    keep = slopes is not None and positive.numel() * scores.shape[1] * scores.element_size() <= KEPT_BYTES
    kept = _sums(scores, positive, surrogate, ranks, slopes, keep)
    if positive_ranks is not None:
        others = positives.only_pairs(positive, -torch.inf)
        _sums(others, positive, surrogate, positive_ranks, positive_slopes, skip=True)
    return kept


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
    kept: Tensor | None = None,
) -> None:
    """Write the gradient of the block's scores into `grad_scores` [rows, N].

    slopes, positive_scores, positive_slopes and `kept` are what `soft_rank_forward` wrote and returned for this block.
    grad_positive_scores: None for 0. positive_slopes and grad_positive_ranks: both or neither.
    """
    if surrogate.startswith(eager_terms.NAMES):
        return eager_terms.backward(
            scores,
            positives,
            surrogate,
            slopes,
            positive_scores,
            grad_ranks,
            grad_positive_scores,
            grad_scores,
        )
    weight = positives.only_pairs(grad_ranks)
    own = positives.only_pairs(slopes).mul(weight).neg_()
    if grad_positive_scores is not None:
        own += positives.only_pairs(grad_positive_scores)
    if kept is not None:
        torch.bmm(_scaled(weight, surrogate)[:, None], kept, out=grad_scores[:, None])
    else:
        _add_slopes(scores, positives.only_pairs(positive_scores), weight, surrogate, grad_scores.zero_())
    if positive_slopes is not None and grad_positive_ranks is not None:
        weight = positives.only_pairs(grad_positive_ranks)
        others = positives.only_pairs(positive_scores, -torch.inf)
        own -= weight * positives.only_pairs(positive_slopes)
        _add_slopes(others, positive_scores, weight, surrogate, own, skip=True)
    positives.scatter(own, grad_scores)


def _scaled(weight: Tensor, surrogate: str) -> Tensor:
    return weight * SCALE[surrogate] if SCALE.get(surrogate, 1) != 1 else weight


def _add_slopes(
    columns: Tensor, positive: Tensor, weight: Tensor, surrogate: str, total: Tensor, skip: bool = False
) -> None:
    """Add the sum over p of weight[:, p] g'(columns - positive[:, p]) to `total`; `skip`: not to column p for p."""
    weight = _scaled(weight, surrogate)
    for part, lifted in _cubes(columns, positive, surrogate, skip, _new_cube(columns, positive.shape[1])):
        total[:, None].baddbmm_(weight[:, None, part], _slope(lifted, surrogate))


def largest_class(positives: Positives) -> int:
    """A bound of the positives of a row of the block: the host asks the device for nothing."""
    return positives.width


def one_class(positives: Positives) -> tuple[int, int] | None:
    """Start and stop of the class that all rows of the block have; None if they have several, or none."""
    table = torch.stack([positives.start, positives.count])
    if not bool((table == table[:, :1]).all()):
        return None
    start, count = table[:, 0].tolist()
    return (start, start + count) if count else None


def score_grid(scores: Tensor, limit: float) -> Grid | None:
    """The grid over the finite scores of the block; None if there are none, or no deterministic sums on the device."""
    if scores.device.type != "cpu":
        return None
    low, high = torch.stack(torch.aminmax(scores)).tolist()
    all_inside = math.isfinite(low) and math.isfinite(high)
    if not all_inside:
        finite = scores[scores.isfinite()]
        if not finite.numel():
            return None
        low, high = torch.stack(torch.aminmax(finite)).tolist()
    return grid_of_range(low, high, scores.dtype, all_inside=all_inside)


def _cells(values: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """The cell of each value, int64, and the place in it from its middle, in cells."""
    place = values * grid.stencil.per_unit
    cell = place.floor()
    return cell.to(torch.int64).sub_(grid.first), place.sub_(cell).sub_(0.5)


def grid_spread(values: Tensor, weights: Tensor, grid: Grid) -> Tensor:
    """The sums of weight x place^k of each cell, [points, rows, cells]; values and weights [rows, n], in its cells."""
    cell, place = _cells(values, grid)
    # A cell may hold the whole row, one score after the other: too many for sums in float32.
    place, power = place.double(), weights.double()
    moments = power.new_zeros(grid.stencil.points, values.shape[0], grid.cells)
    for k in range(grid.stencil.points):
        moments[k].scatter_add_(1, cell, power)
        power = power.mul_(place) if k else power * place
    return moments.to(values.dtype)


def grid_read(coefficients: Tensor, values: Tensor, grid: Grid) -> Tensor:
    """The polynomial of each value's cell at its place, [rows, n]; coefficients [points, rows, cells], of place^k."""
    cell, place = _cells(values, grid)
    result = coefficients[-1].gather(1, cell)
    for k in reversed(range(grid.stencil.points - 1)):
        result.mul_(place).add_(coefficients[k].gather(1, cell))
    return result


Own = tuple[Tensor, Tensor]


def _own_columns(labels: Tensor, first_class: int, rows: int) -> Own:
    """Row and column [m] of the block's positives, ascending by row: each column has at most one own row."""
    columns = ((labels >= first_class) & (labels < first_class + rows)).nonzero().squeeze(1)
    own_rows, order = torch.sort(labels[columns].long() - first_class, stable=True)
    return own_rows, columns[order]


def _log_one_plus_sum(peak: Tensor, total: Tensor) -> Tensor:
    """ln(1 + total e^peak), peak >= 0, without losing a small total or overflowing with a large peak."""
    return torch.where(peak > 0, peak + torch.log(total + torch.exp(-peak)), torch.log1p(total))


def proxy_logsumexp_forward(
    scores: Tensor, first_class: int, labels: Tensor, offsets: Tensor, positive: Tensor, negative: Tensor
) -> Own:
    """Write ln(1 + sum) of the own columns and of the other columns of every row into `positive`, `negative` [rows].

    Returns what `proxy_logsumexp_backward` of the same block takes as `kept`.
    """
    own = _own_columns(labels, first_class, len(scores))
    exponent = offsets[own[1]] - scores[own]
    count = counts_of_sorted(own[0], len(scores))
    peak = segment_max(exponent, own[0], count)
    total = segment_sum(torch.exp(exponent - peak[own[0]]), own[0], count)
    positive.copy_(_log_one_plus_sum(peak, total))
    exponent = scores + offsets
    exponent[own] = -torch.inf
    peak = exponent.amax(1).clamp_(min=0)
    total = exponent.sub_(peak[:, None]).exp_().sum(1)
    negative.copy_(_log_one_plus_sum(peak, total))
    return own


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
    kept: Own | None = None,
) -> None:
    """Write the gradient of the block's scores into `grad_scores` [rows, N]."""
    own = _own_columns(labels, first_class, len(scores)) if kept is None else kept
    own_grad = -grad_positive[own[0]] * torch.exp(offsets[own[1]] - scores[own] - positive[own[0]])
    # In the order of the forward pass, so that a large exponent is rounded to the same number.
    torch.add(scores, offsets, out=grad_scores)
    grad_scores.sub_(negative[:, None]).exp_().mul_(grad_negative[:, None])
    grad_scores[own] = own_grad


# Sums of fractions are integers below 2^62. A float64 has no more bits than these, and 24 are always taken.
MAX_FRACTION_BITS, FRACTION_BITS = 52, 24


def soft_histogram_forward(
    scores: Tensor, ranges: Tensor, first_column: int, descending: bool, counts: Tensor, fractions: Tensor
) -> Tensor:
    """Add the pairs of the block to `counts` and `fractions`, [1, 2, bins + 2] or, each row to its own, [rows, ...].

    Positives come before negatives, the last entry counts the NaN. counts are int64, fractions float64, or float32 on a
    device that may have none. Both are sums of integers, so that their order does not matter, on any device. Returns
    what `soft_histogram_backward` of the same block takes as `kept`.
    """
    n_tables, _, size = counts.shape
    position = _node_position(scores, size - 2, descending).nan_to_num_(nan=size - 1)
    slot = position.to(torch.int64)
    _add_table(slot, ranges, first_column, size, n_tables)
    dtype = torch.int64 if is_complete(scores.device) else torch.int32
    bits = min(MAX_FRACTION_BITS, torch.iinfo(dtype).bits - 2 - slot.numel().bit_length())
    place, shape = slot.view(-1), (n_tables, 3, size)
    # Sums of ones, and then of the digits of the fractions, of `bits` bits each: in int64 one digit is enough.
    sums = torch.zeros(n_tables * 3 * size, dtype=dtype, device=scores.device)
    counts += sums.index_add(0, place, sums.new_ones(()).expand(place.shape)).view(shape)[:, :2]
    n_digits = -(-min(FRACTION_BITS, MAX_FRACTION_BITS) // bits)
    fraction = position.frac_().view(-1)
    for digit in range(1, n_digits + 1):
        if digit > 1:
            fraction.frac_()
        total = sums.index_add(0, place, fraction.mul_(2**bits).to(dtype)).view(shape)[:, :2]
        # As floating numbers before they are scaled: torch.compile of torch 2.11 scales integers in float32.
        fractions.add_(total.to(fractions.dtype), alpha=2.0 ** (-bits * digit))
    return slot


def soft_histogram_backward(
    scores: Tensor,
    ranges: Tensor,
    first_column: int,
    descending: bool,
    slopes: Tensor,
    grad_scores: Tensor,
    kept: Tensor | None = None,
) -> None:
    """Write into `grad_scores` the slope of the bin of each pair; slopes: [1, 2, bins], or [rows, 2, bins]."""
    n_tables, _, n_bins = slopes.shape
    size = n_bins + 2
    if kept is None:
        kept = _node_position(scores, n_bins, descending).nan_to_num_(nan=size - 1).to(torch.int64)
        _add_table(kept, ranges, first_column, size, n_tables)
    # The last node has the slope of the last bin, a NaN and a hidden pair have none.
    table = slopes.new_zeros(n_tables, 3, size)
    table[:, :2, :n_bins] = slopes
    table[:, :2, n_bins] = slopes[:, :, -1]
    values = table.flatten().index_select(0, kept.view(-1)).view_as(kept)
    torch.mul(values, scores.abs().le_(1), out=grad_scores)


def _node_position(scores: Tensor, n_bins: int, descending: bool) -> Tensor:
    """The place of each score among the nodes, 0 .. n_bins; contiguous. A NaN stays one."""
    half = n_bins / 2
    position = torch.empty(scores.shape, dtype=scores.dtype, device=scores.device)
    # Two roundings, as the reference has, and not those of a fused addition: they decide what lies on a node.
    torch.mul(scores, -half if descending else half, out=position)
    return position.add_(half).clamp_(0, n_bins)


# Columns up to which all are compared with the ranges, in place of finding those that may be something else first.
MAX_COMPARED = 512


def _add_table(slot: Tensor, ranges: Tensor, first_column: int, size: int, n_tables: int) -> None:
    """Add where the table of each pair begins: 0 for a positive, `size` for a negative, 2 `size` for a hidden pair.

    With several tables, three of them for each row.
    """
    start, stop, hidden_start, hidden_stop = ranges[:, :, None].unbind(1)
    left, right = 0, slot.shape[1]
    if right > MAX_COMPARED:
        reach = torch.stack(
            [torch.minimum(start, hidden_start).min(), torch.maximum(stop, hidden_stop).max()]
        )
        left, right = (reach - first_column).clamp(0, right).tolist()
    column = torch.arange(first_column + left, first_column + right, device=slot.device)
    is_hidden = (column >= hidden_start) & (column < hidden_stop)
    is_positive = ((column >= start) & (column < stop)).masked_fill_(is_hidden, False)
    if n_tables > 1:
        slot += torch.arange(size, 3 * size * n_tables, 3 * size, device=slot.device)[:, None]
    else:
        slot += size
    slot[:, left:right].add_(is_hidden, alpha=size).add_(is_positive, alpha=-size)


# --- passes over a panel between its products, where these multiply in half precision ---


def weigh(scores: Tensor, of_rows: Tensor, of_columns: Tensor) -> None:
    """Multiply scores [rows, N] by a factor for each row [rows] and each column [N], in place."""
    scores.mul_(of_rows[:, None]).mul_(of_columns)


def split_in_two(
    scores: Tensor, of_rows: Tensor | None, of_columns: Tensor | None, high: Tensor, low: Tensor
) -> None:
    """Write the same product as a sum of two bfloat16 terms [rows, N], high + low; None for factors of 1.

    scores: may be overwritten.
    """
    if of_rows is not None and of_columns is not None:
        weigh(scores, of_rows, of_columns)
    high.copy_(scores)
    torch.sub(scores, high, out=low)
