"""The block functions in plain torch: any device, any floating dtype.

Each takes a block of scores [rows, N] and writes into tensors its caller allocated. The loop runs over the positives
of a row, one at a time: a block times one positive is the largest temporary.
"""

import math

import torch
from torch import Tensor

from tritonloss.backends.large_classes import Grid, grid_of_range
from tritonloss.layout import Positives

# To read a derivative back from the last-level cache takes less time than to compute it again; from memory, more.
DERIVATIVE_BYTES = 16 << 20


def _add_up(
    difference: Tensor, surrogate: str, derivative: Tensor, rank: Tensor, slope: Tensor | None
) -> None:
    """Write the row sums of g into `rank`, of g' / SCALE into `slope`, [rows] each; of the difference plus SHIFT.

    With `slope`, g' / SCALE is left in `derivative`, which may be the difference where that is a sigmoid's; the
    difference is overwritten. A difference of -inf counts 0 for both.
    """
    if surrogate == "sigmoid":
        value = torch.sigmoid(difference, out=derivative)
        torch.sum(value, 1, out=rank)
        if slope is not None:
            torch.sum(value.addcmul_(value, value, value=-1), 1, out=slope)
        return
    lifted = difference.clamp_(min=0)
    rise = torch.clamp(lifted, max=1, out=derivative)
    if slope is not None:
        torch.sum(rise, 1, out=slope)
    # rise (2 lifted - rise): the parabola while both are equal, the line 2 lifted - 1 above 1.
    torch.sum(torch.lerp(rise, lifted, 2, out=lifted).mul_(rise), 1, out=rank)


def _surrogate_slope(difference: Tensor, surrogate: str) -> Tensor:
    """g' / SCALE of the difference plus SHIFT, in its memory."""
    if surrogate == "sigmoid":
        value = difference.sigmoid_()
        return value.addcmul_(value, value, value=-1)
    return difference.clamp_(0, 1)


# Applied to a row of positives instead of a block of differences.
SHIFT = {"sigmoid": 0, "one_side_huber": 1}
SCALE = {"sigmoid": 1, "one_side_huber": 2}


class _Rectangle:
    """The pairs of a block as [rows, width], and their places among the columns and in the flat tensors."""

    def __init__(self, positives: Positives, n_keys: int) -> None:
        count = positives.count
        self.width, n_pairs, first = torch.stack([count.max(), count.sum(), positives.offset[0]]).tolist()
        self.flat = slice(first, first + n_pairs)
        slot = torch.arange(self.width, device=count.device)
        self.columns = positives.start[:, None] + slot
        # None where all rows have as many pairs: then flat tensors and rectangles are views of each other.
        self.valid = None
        if n_pairs < len(count) * self.width:
            self.valid = slot < count[:, None]
            # An unused slot repeats the row's first positive, so that gathers stay in range and scatters harmless.
            first_column = positives.start.clamp(max=n_keys - 1)[:, None]
            self.columns = torch.where(self.valid, self.columns, first_column)

    def write(self, flat: Tensor, rectangle: Tensor) -> None:
        flat[self.flat] = rectangle.reshape(-1) if self.valid is None else rectangle[self.valid]

    def read(self, flat: Tensor) -> Tensor:
        if self.valid is None:
            return flat[self.flat].view(self.columns.shape)
        return flat.new_zeros(self.columns.shape).masked_scatter_(self.valid, flat[self.flat])

    def scatter(self, rectangle: Tensor, block: Tensor) -> None:
        """Write the values of the pairs to their columns of the block [rows, N]; a row without pairs is set to 0."""
        if self.valid is not None:
            rectangle = torch.where(self.valid, rectangle, rectangle[:, :1])
        block.scatter_(1, self.columns, rectangle)


def soft_rank_forward(
    scores: Tensor,
    positives: Positives,
    surrogate: str,
    ranks: Tensor,
    slopes: Tensor | None,
    positive_scores: Tensor,
    positive_ranks: Tensor | None = None,
    positive_slopes: Tensor | None = None,
    derivatives: Tensor | None = None,
) -> None:
    """Write rank, slope (if `slopes` is given) and score of every pair of the block into the flat tensors [M].

    With `positive_ranks` also the rank among the other positives, and its slope (if `positive_slopes` is given). With
    `derivatives` [width, rows, N] also g' / SCALE of every (positive, key), 0 where the key is a positive; the scores
    are then overwritten, and may be the last of its blocks.
    """
    rectangle = _Rectangle(positives, scores.shape[1])
    positive = scores.gather(1, rectangle.columns)
    # A copy without the positives would cost more than to take them out and put them back.
    scores.scatter_(1, rectangle.columns, -torch.inf)
    rank, slope = _sums_over_columns(scores, positive, surrogate, slopes is not None, derivatives)
    if derivatives is None:
        scores.scatter_(1, rectangle.columns, positive)
    rectangle.write(ranks, rank)
    rectangle.write(positive_scores, positive)
    if slopes is not None:
        rectangle.write(slopes, slope)
    if positive_ranks is not None:
        others = positive
        if rectangle.valid is not None:
            others = positive.masked_fill(~rectangle.valid, -torch.inf)
        with_slope = positive_slopes is not None
        rank, slope = _sums_over_columns(others, positive, surrogate, with_slope, skip=True)
        rectangle.write(positive_ranks, rank)
        if positive_slopes is not None:
            rectangle.write(positive_slopes, slope)


def _empty_strided_like(columns: Tensor) -> Tensor:
    # Vector loops of torch end where rows do, and round the rest in another way: with the strides of `columns`, kept
    # derivatives and recomputed ones are the same bits.
    return torch.empty_strided(columns.shape, columns.stride(), dtype=columns.dtype, device=columns.device)


def _sums_over_columns(
    columns: Tensor,
    positive: Tensor,
    surrogate: str,
    with_slope: bool,
    derivatives: Tensor | None = None,
    skip: bool = False,
) -> tuple[Tensor, Tensor]:
    """The sums of g and of g' over the columns of each row, [rows, width] each; `skip`: without column p for p."""
    rank, slope = torch.empty_like(positive), torch.empty_like(positive)
    threshold = positive - SHIFT[surrogate]
    if derivatives is None:
        derivatives = _empty_strided_like(columns).expand(positive.shape[1], -1, -1)
    # A sigmoid is replaced by its derivative in one memory; a one-side Huber needs both.
    difference = None if surrogate == "sigmoid" else _empty_strided_like(columns)
    for p in range(positive.shape[1]):
        derivative = derivatives[p]
        above = torch.sub(
            columns, threshold[:, p : p + 1], out=derivative if difference is None else difference
        )
        if skip:
            above[:, p] = -torch.inf
        _add_up(above, surrogate, derivative, rank[:, p], slope[:, p] if with_slope else None)
    return rank, slope.mul_(SCALE[surrogate]) if with_slope else slope


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
    derivatives: Tensor | None = None,
) -> None:
    """Write the gradient of the block's scores into `grad_scores` [rows, N].

    positive_slopes and grad_positive_ranks: of the ranks among the positives, both or neither. With the `derivatives`
    of the forward pass, the scores are not read.
    """
    rectangle = _Rectangle(positives, grad_scores.shape[1])
    positive = rectangle.read(positive_scores)
    weight = rectangle.read(grad_ranks)
    grad_scores.zero_()
    _add_weighted_slopes(scores, positive, weight, surrogate, grad_scores, derivatives)
    own = rectangle.read(grad_positive_scores) - weight * rectangle.read(slopes)
    if positive_slopes is not None and grad_positive_ranks is not None:
        weight = rectangle.read(grad_positive_ranks)
        own -= weight * rectangle.read(positive_slopes)
        _add_weighted_slopes(positive, positive, weight, surrogate, own, skip=True)
    rectangle.scatter(own, grad_scores)


def _add_weighted_slopes(
    columns: Tensor,
    positive: Tensor,
    weight: Tensor,
    surrogate: str,
    total: Tensor,
    derivatives: Tensor | None = None,
    skip: bool = False,
) -> None:
    """Add the sum over p of weight[:, p] g'(columns - positive[:, p]) to `total`; `skip`: not to column p for p.

    derivatives: g' / SCALE [width, rows, N], if they were kept; then neither columns nor positive are read.
    """
    weight = weight * SCALE[surrogate]
    if derivatives is not None:
        for p in range(weight.shape[1]):
            total.addcmul_(derivatives[p], weight[:, p : p + 1])
        return
    difference, threshold = _empty_strided_like(columns), positive - SHIFT[surrogate]
    for p in range(weight.shape[1]):
        torch.sub(columns, threshold[:, p : p + 1], out=difference)
        if skip:
            difference[:, p] = -torch.inf
        total.addcmul_(_surrogate_slope(difference, surrogate), weight[:, p : p + 1])


def largest_class(positives: Positives) -> int:
    """The most positives of a row of the block."""
    return int(positives.count.max())


def one_class(positives: Positives) -> tuple[int, int, int] | None:
    """Start, stop and first pair of the class that all rows of the block have; None if they have several, or none."""
    table = torch.stack([positives.start, positives.count])
    if not bool((table == table[:, :1]).all()):
        return None
    start, count, first_pair = torch.cat([table[:, 0], positives.offset[:1]]).tolist()
    return (start, start + count, first_pair) if count else None


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


def _own_columns(labels: Tensor, first_class: int, rows: int) -> tuple[Tensor, Tensor]:
    """Row and column [m] of the block's positives, ascending by row: each column has at most one own row."""
    columns = ((labels >= first_class) & (labels < first_class + rows)).nonzero().squeeze(1)
    own_rows, order = torch.sort(labels[columns].long() - first_class, stable=True)
    return own_rows, columns[order]


def _log_one_plus_sum(peak: Tensor, total: Tensor) -> Tensor:
    """ln(1 + total e^peak), peak >= 0, without losing a small total or overflowing with a large peak."""
    return torch.where(peak > 0, peak + torch.log(total + torch.exp(-peak)), torch.log1p(total))


def proxy_logsumexp_forward(
    scores: Tensor, first_class: int, labels: Tensor, offsets: Tensor, positive: Tensor, negative: Tensor
) -> None:
    """Write ln(1 + sum) of the own columns and of the other columns of every row into `positive`, `negative` [rows]."""
    own = _own_columns(labels, first_class, len(scores))
    exponent = offsets[own[1]] - scores[own]
    count = torch.bincount(own[0], minlength=len(scores))
    peak = torch.segment_reduce(exponent, "max", lengths=count, initial=0, unsafe=True)
    term = torch.exp(exponent - peak[own[0]])
    total = torch.segment_reduce(term, "sum", lengths=count, initial=0, unsafe=True)
    positive.copy_(_log_one_plus_sum(peak, total))
    exponent = scores + offsets
    exponent[own] = -torch.inf
    peak = exponent.amax(1).clamp_(min=0)
    total = exponent.sub_(peak[:, None]).exp_().sum(1)
    negative.copy_(_log_one_plus_sum(peak, total))


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
    own = _own_columns(labels, first_class, len(scores))
    own_grad = -grad_positive[own[0]] * torch.exp(offsets[own[1]] - scores[own] - positive[own[0]])
    # In the order of the forward pass, so that a large exponent is rounded to the same number.
    torch.add(scores, offsets, out=grad_scores)
    grad_scores.sub_(negative[:, None]).exp_().mul_(grad_negative[:, None])
    grad_scores[own] = own_grad


# Sums of fractions are integers below 2^62. A float64 has no more bits than these.
MAX_FRACTION_BITS = 52


def soft_histogram_forward(
    scores: Tensor, ranges: Tensor, first_column: int, descending: bool, counts: Tensor, fractions: Tensor
) -> None:
    """Add the pairs of the block to `counts` and `fractions`, [1, 2, bins + 2] or, each row to its own, [rows, ...].

    Positives come before negatives, the last entry counts the NaN. counts are int64, fractions float64. Both are sums
    of integers, so that their order does not matter, on any device.
    """
    n_tables, _, size = counts.shape
    position = _node_position(scores, size - 2, descending).nan_to_num_(nan=size - 1)
    slot = position.to(torch.int64)
    bits = min(MAX_FRACTION_BITS, 62 - slot.numel().bit_length())
    fraction = position.frac_().mul_(2**bits).to(torch.int64)
    _add_kind(slot, ranges, first_column, size)
    if n_tables > 1:
        slot += 3 * size * torch.arange(n_tables, device=slot.device)[:, None]
    sums = slot.new_zeros(2, n_tables * 3 * size)
    sums[0].index_add_(0, slot.view(-1), slot.new_ones(()).expand(slot.numel()))
    sums[1].index_add_(0, slot.view(-1), fraction.view(-1))
    pair_count, fraction_sum = sums.view(2, n_tables, 3, size)[:, :, :2]
    counts += pair_count
    # In float64 before they are scaled: torch.compile of torch 2.11 scales integers in float32.
    fractions.add_(fraction_sum.to(torch.float64), alpha=2.0**-bits)


def soft_histogram_backward(
    scores: Tensor, ranges: Tensor, first_column: int, descending: bool, slopes: Tensor, grad_scores: Tensor
) -> None:
    """Write into `grad_scores` the slope of the bin of each pair; slopes: [1, 2, bins], or [rows, 2, bins]."""
    n_tables, _, n_bins = slopes.shape
    slot = _node_position(scores, n_bins, descending).nan_to_num_(nan=0).to(torch.int64)
    slot.clamp_(max=n_bins - 1)
    _add_kind(slot, ranges, first_column, n_bins)
    if n_tables > 1:
        slot += 3 * n_bins * torch.arange(n_tables, device=slot.device)[:, None]
    table = torch.cat([slopes, torch.zeros_like(slopes[:, :1])], 1).flatten()
    torch.mul(table.index_select(0, slot.view(-1)).view_as(slot), scores.abs().le_(1), out=grad_scores)


def _node_position(scores: Tensor, n_bins: int, descending: bool) -> Tensor:
    """The place of each score among the nodes, 0 .. n_bins; contiguous. A NaN stays one."""
    half = n_bins / 2
    position = torch.empty(scores.shape, dtype=scores.dtype, device=scores.device)
    # Two roundings, as the reference has, and not those of a fused addition: they decide what lies on a node.
    torch.mul(scores, -half if descending else half, out=position)
    return position.add_(half).clamp_(0, n_bins)


def _add_kind(slot: Tensor, ranges: Tensor, first_column: int, size: int) -> None:
    """Add 0 for a positive, `size` for a negative, 2 `size` for a hidden pair."""
    start, stop, hidden_start, hidden_stop = (ranges - first_column)[:, :, None].unbind(1)
    # Most columns are negatives of every row: only those that may be something else are compared.
    reach = torch.stack([torch.minimum(start, hidden_start).min(), torch.maximum(stop, hidden_stop).max()])
    left, right = reach.clamp(0, slot.shape[1]).tolist()
    slot += size
    column = torch.arange(left, right, device=slot.device)
    is_positive = (column >= start) & (column < stop)
    is_hidden = (column >= hidden_start) & (column < hidden_stop)
    slot[:, left:right] += size * (is_hidden.to(torch.int64) - (is_positive & ~is_hidden).to(torch.int64))
