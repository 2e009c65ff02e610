"""`soft_rank` of large classes: about N + P operations per query with P positives, where the direct loop takes N P.

Two algorithms with the block functions of the backends, `soft_rank_forward` and `soft_rank_backward`: `OnGrid` for the
sigmoid, `Sorted` for the one-side Huber and the hinge. `choose` says which of them pays for a block, if either.

TRITONLOSS_LARGE_CLASSES=0 leaves both out: the direct loop then serves every class.

Shapes: a block of scores is [rows, N] in units of the temperature, as for the direct loops.
"""

import math
import os
from dataclasses import dataclass
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from tritonloss.backends.surrogates import parse
from tritonloss.layout import Positives
from tritonloss.types import is_complete

ENVIRONMENT_VARIABLE = "TRITONLOSS_LARGE_CLASSES"

# --- the grid ---


@dataclass(frozen=True)
class Stencil:
    """Interpolation through `points` neighbouring nodes, `per_unit` nodes per unit of the temperature.

    per_unit is a power of two, so that the place of a float among the nodes is exact.
    """

    points: int
    per_unit: int


# The error, relative to the exact value, of g and of g' between the nodes: see `interpolation_error`.
STENCILS = {torch.float32: Stencil(8, 4), torch.float64: Stencil(12, 8)}


def interpolation_error(stencil: Stencil) -> float:
    """A bound of |g~ - g| / g and of |g~' - g'| / g', where g~ is the sigmoid between nodes in both of its arguments.

    Interpolation through p nodes of spacing h errs by at most h^p c_p max|f^(p)|, c_p = prod_k (k + 1/2)^2 / p! over
    k < p / 2: the value in the middle of the stencil. The p-th derivatives are polynomials of the sigmoid y:
    d/dx y = y - y^2. r bounds |f^(p)| / f over all x, for f = g and f = g'. Within the stencil, p h wide, f changes by
    a factor of at most e^(p h / 2) from the middle. Twice: once for the score of the negative, once for that of the
    positive; the second acts on the first, which adds a term of the square.

    Every term of a sum is positive, so that the bound holds for the sums relative to themselves.
    """
    p, h = stencil.points, 1 / stencil.per_unit
    c = math.prod((k + 0.5) ** 2 for k in range(p // 2)) / math.factorial(p)
    once = c * h**p * _largest_ratio(p) * math.exp(p * h / 2)
    return 2 * once + once**2


def _largest_ratio(order: int) -> float:
    """max over x of |g^(order) / g| and of |g^(order + 1) / g'|, g the sigmoid."""
    polynomial = [0, 1]  # of y, ascending
    largest = []
    for derivative in range(1, order + 2):
        slope = [k * a for k, a in enumerate(polynomial)][1:]
        polynomial = [0, *slope, 0]
        for k, a in enumerate(slope):
            polynomial[k + 2] -= a
        if derivative >= order:
            y = torch.linspace(0, 1, 20001, dtype=torch.float64, device="cpu")[1:-1]
            value = sum((a * y**k for k, a in enumerate(polynomial)), torch.zeros_like(y))
            scale = y if derivative == order else y * (1 - y)
            largest.append(float((value / scale).abs().max()))
    # Between samples 5e-5 apart the ratio moves by less than a thousandth.
    return 1.001 * max(largest)


@cache
def _polynomials(points: int, dtype: torch.dtype, pinned: bool) -> Tensor:
    """[power, node]: the coefficients of the polynomial that is 1 at one node of the stencil and 0 at the others.

    The argument is the place between the two middle nodes, -1/2 .. 1/2. The tensor is on the host: what is kept on a
    device could lie in the memory of a CUDA graph, whose replay overwrites it. From pinned memory a graph can copy it.
    """
    with torch.inference_mode(False):
        node = torch.arange(points, dtype=torch.float64, device="cpu") - (points - 1) / 2
        inverse: Tensor = torch.linalg.inv(torch.vander(node, increasing=True)).to(dtype)
        return inverse.pin_memory() if pinned else inverse


@dataclass(frozen=True)
class Grid:
    """Cells first .. first + cells - 1 of width 1 / per_unit; cell c begins at c / per_unit.

    all_inside: every score is known to lie in one of the cells.
    """

    stencil: Stencil
    first: int
    cells: int
    all_inside: bool

    @property
    def nodes(self) -> int:
        """The ends of the cells, and what the stencils of the outermost need beyond."""
        return self.cells + self.stencil.points - 1

    def contains(self, values: Tensor) -> Tensor:
        low, high = self.first / self.stencil.per_unit, (self.first + self.cells) / self.stencil.per_unit
        return (values >= low) & (values < high)

    def polynomials(self, like: Tensor) -> Tensor:
        matrix = _polynomials(self.stencil.points, like.dtype, like.device.type == "cuda")
        return matrix.to(like.device, non_blocking=True)

    def surrogate(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """g and g' of node a, counted from the last, less node b: [nodes, nodes] each.

        In that order they are functions of a + b: windows of one vector, where those of a - b would be gathered.
        """
        distance = torch.arange(self.nodes - 1, -self.nodes, -1, dtype=like.dtype, device=like.device)
        value = torch.sigmoid(distance / self.stencil.per_unit)
        # g' is even and g(-x) is 1 - g(x) without its cancellation.
        slope = value * value.flip(0)
        return value.unfold(0, self.nodes, 1).contiguous(), slope.unfold(0, self.nodes, 1).contiguous()


def grid_of_limit(limit: float, dtype: torch.dtype) -> Grid | None:
    """The grid for scores of -limit .. limit and what rounding adds; None where there is no limit."""
    if not math.isfinite(limit) or dtype not in STENCILS:
        return None
    return grid_of_range(-1.001 * limit, 1.001 * limit, dtype, all_inside=False)


def grid_of_range(low: float, high: float, dtype: torch.dtype, *, all_inside: bool) -> Grid:
    """The grid whose cells hold low .. high."""
    stencil = STENCILS[dtype]
    first, last = math.floor(low * stencil.per_unit), math.floor(high * stencil.per_unit)
    return Grid(stencil, first, last - first + 1, all_inside)


# --- which algorithm ---

# The surrogate of all pairs of nodes is a matrix of this squared: 64 MiB in float32.
MAX_NODES = 4096


@dataclass(frozen=True)
class Costs:
    """Seconds of forward and backward together, for one query.

    pair: of a score and a positive in the direct loop. spread: of a score, or of a positive, on the grid. node_pair:
    of a node and a node. ordered, looked_up: of a score and of a positive, sorted.
    """

    pair: float
    spread: float
    node_pair: float
    ordered: float
    looked_up: float


COSTS = {
    # Measured on one core of an EPYC in float32, at 512 and 2048 scores and temperatures of 0.01, 0.05 and 0.1.
    "cpu": Costs(pair=1.05e-9, spread=16e-9, node_pair=0.18e-9, ordered=115e-9, looked_up=300e-9),
    # Not measured: two sigmoids at half the rate of the units that compute them on an H200; sixteen additions to L2
    # at 1e11 per second; six operations at half the float32 rate; a radix sort at 1e10 keys per second, and what
    # surrounds it.
    "cuda": Costs(pair=1e-12, spread=2e-10, node_pair=2e-13, ordered=1e-9, looked_up=1e-9),
}


def grid_pays(n_keys: int, width: int, nodes: int, kind: str) -> bool:
    """Whether a row of n_keys scores with `width` positives costs less on a grid than directly; kind: "cpu", "cuda"."""
    cost = COSTS[kind]
    grid = cost.spread * (n_keys + width) + cost.node_pair * nodes**2
    return nodes <= MAX_NODES and grid < cost.pair * n_keys * width


def sorting_pays(n_keys: int, width: int, kind: str) -> bool:
    """Whether a row of n_keys scores with `width` positives costs less sorted than directly; kind: "cpu", "cuda"."""
    cost = COSTS[kind]
    return cost.ordered * n_keys + cost.looked_up * width < cost.pair * n_keys * width


def enabled() -> bool:
    """Whether the algorithms may serve at all: not with TRITONLOSS_LARGE_CLASSES=0."""
    return os.environ.get(ENVIRONMENT_VARIABLE, "1") != "0"


def may_pay(n_keys: int, width: int, surrogate: str, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether either algorithm may serve and could cost less than the direct loop, for some range of the scores."""
    if not (enabled() and is_complete(device)):
        return False
    kind = "cuda" if device.type == "cuda" else "cpu"
    if surrogate == "one_side_huber" or surrogate.startswith("hinge "):
        return sorting_pays(n_keys, width, kind)
    return surrogate == "sigmoid" and dtype in STENCILS and grid_pays(n_keys, width, 0, kind)


def choose(
    module: ModuleType, scores: Tensor, positives: Positives, surrogate: str, limit: float
) -> "OnGrid | Sorted | None":
    """The algorithm for large classes if it is the cheaper one for the block, else None: the loop of the backend.

    limit: a bound of |scores|, or infinity. A registered backend need not have the functions that the algorithms call;
    a surrogate other than the sigmoid, the one-side Huber and the hinge has no algorithm.
    """
    if not hasattr(module, "largest_class"):
        return None
    n_keys, width = scores.shape[1], module.largest_class(positives)
    if not may_pay(n_keys, width, surrogate, scores.dtype, scores.device):
        return None
    if surrogate != "sigmoid":
        return Sorted(module, width)
    grid = module.score_grid(scores, limit)
    kind = "cuda" if scores.device.type == "cuda" else "cpu"
    return OnGrid(module, grid, width) if grid and grid_pays(n_keys, width, grid.nodes, kind) else None


# --- the pairs of a block ---


class _OneClass:
    """The columns of a block whose rows all have the columns start .. stop - 1 for positives: all is slices."""

    used = None  # every slot of the rectangle [rows, width] holds a pair

    def __init__(self, start: int, stop: int) -> None:
        self.start, self.stop = start, stop

    def positives_of(self, matrix: Tensor) -> Tensor:
        """[rows, width], of a matrix [rows, N]."""
        return matrix[:, self.start : self.stop]

    def negatives_of(self, matrix: Tensor) -> list[tuple[Tensor, Tensor | None]]:
        """Views [rows, n] of the matrix that hold all negatives, each with a mask of them; None: all of it."""
        if self.stop - self.start == matrix.shape[1]:
            return [(matrix, torch.zeros_like(matrix, dtype=torch.bool))]
        parts = matrix[:, : self.start], matrix[:, self.stop :]
        return [(part, None) for part in parts if part.shape[1]]

    def read(self, rectangle: Tensor) -> Tensor:
        """The rectangle [rows, width], 0 in a slot without a pair."""
        return rectangle[:, : self.stop - self.start]

    def write(self, rectangle: Tensor, values: Tensor) -> None:
        """Into the rectangle [rows, width] of a block function."""
        rectangle[:, : self.stop - self.start] = values

    def write_own(self, matrix: Tensor, rectangle: Tensor) -> None:
        """Into the columns of the positives of a matrix [rows, N]."""
        matrix[:, self.start : self.stop] = rectangle


class _AnyClasses:
    """The columns of any block, with the methods of `_OneClass`, and without a host sync."""

    def __init__(self, positives: Positives) -> None:
        self.positives, self.used = positives, positives.is_pair
        self.place = torch.arange(positives.n_keys, device=positives.start.device) - positives.start[:, None]
        self.is_own = (self.place >= 0) & (self.place < positives.count[:, None])

    def positives_of(self, matrix: Tensor) -> Tensor:
        return matrix.gather(1, self.positives.columns)

    def negatives_of(self, matrix: Tensor) -> list[tuple[Tensor, Tensor | None]]:
        return [(matrix, ~self.is_own)]

    def read(self, rectangle: Tensor) -> Tensor:
        return self.positives.only_pairs(rectangle)

    def write(self, rectangle: Tensor, values: Tensor) -> None:
        rectangle.copy_(values)

    def write_own(self, matrix: Tensor, rectangle: Tensor) -> None:
        own = rectangle.gather(1, self.place.clamp(0, rectangle.shape[1] - 1))
        matrix.copy_(torch.where(self.is_own, own, matrix))


def _pairs_of(module: ModuleType, positives: Positives) -> _OneClass | _AnyClasses:
    one = module.one_class(positives)
    return _OneClass(*one) if one else _AnyClasses(positives)


def _nan_where(spoiled: Tensor, like: Tensor) -> Tensor:
    """[rows, 1]: 0, or NaN where [rows, n] has a True."""
    return torch.where(spoiled.any(1, keepdim=True), torch.nan, like.new_zeros(()))


# --- the sigmoid ---


@dataclass(frozen=True)
class OnGrid:
    """The sigmoid by a grid that is laid over the scores, with the error of `interpolation_error`.

    A score is spread over the nodes around it with the weights of polynomial interpolation; the surrogate of all pairs
    of nodes turns the sums at the nodes into ranks at the nodes, in one GEMM; those are interpolated at the positives.
    Each of the three is linear, and backward is the same with the roles exchanged: the gradients of the ranks are
    spread, and read at the negatives. Both passes use one g~', which is even: the gradients of a row sum to 0, as those
    of the direct loop do.

    The ranks among the positives hold the own term of each, which is subtracted: their error is relative to R + 1/2.
    A row with a negative that is NaN or positive infinity is NaN throughout.
    """

    module: ModuleType
    grid: Grid
    width: int

    def soft_rank_forward(
        self,
        scores: Tensor,
        positives: Positives,
        surrogate: str,
        ranks: Tensor,
        slopes: Tensor | None,
        positive_scores: Tensor,
        positive_ranks: Tensor | None = None,
        positive_slopes: Tensor | None = None,
    ) -> None:
        """As the block function of this name."""
        pairs = _pairs_of(self.module, positives)
        positive = pairs.positives_of(scores)
        pairs.write(positive_scores, positive)
        kernels = self.grid.surrogate(scores)[: 1 if slopes is None else 2]
        sums = torch.stack([self._spread(part, used) for part, used in pairs.negatives_of(scores)]).sum(0)
        for kernel, flat in zip(kernels, (ranks, slopes), strict=False):
            assert flat is not None
            pairs.write(flat, self._read(sums @ kernel, positive))
        if positive_ranks is not None:
            sums = self._spread(positive, pairs.used)
            own_terms = ((positive_ranks, 0.5), (positive_slopes, 0.25))
            for kernel, (flat, own) in zip(kernels, own_terms, strict=False):
                assert flat is not None
                pairs.write(flat, self._read(sums @ kernel, positive).sub_(own).clamp_(min=0))

    def soft_rank_backward(
        self,
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
        """As the block function of this name."""
        pairs = _pairs_of(self.module, positives)
        positive, weight = pairs.read(positive_scores), pairs.read(grad_ranks)
        kernel = self.grid.surrogate(scores)[1]
        nodes = self._spread(positive, pairs.used, weight) @ kernel
        parts = zip(pairs.negatives_of(scores), pairs.negatives_of(grad_scores), strict=True)
        for (negative, _), (grad, _) in parts:
            grad.copy_(self._read(nodes, negative))
            if not self.grid.all_inside:
                grad.masked_fill_(negative == -torch.inf, 0)
        own = -weight * pairs.read(slopes)
        if grad_positive_scores is not None:
            own += pairs.read(grad_positive_scores)
        if positive_slopes is not None and grad_positive_ranks is not None:
            weight = pairs.read(grad_positive_ranks)
            nodes = self._spread(positive, pairs.used, weight) @ kernel
            own += self._read(nodes, positive) - weight * (0.25 + pairs.read(positive_slopes))
        pairs.write_own(grad_scores, own)

    def _spread(self, values: Tensor, used: Tensor | None, weights: Tensor | None = None) -> Tensor:
        """The sums at the nodes, the last one first, [rows, nodes], of the values [rows, n] that are used.

        used: [rows, n] bool; None for all. weights: [rows, n]; 1 without them.
        """
        spoiled = None
        if not self.grid.all_inside:
            inside = self.grid.contains(values)
            wrong = ~inside & (values != -torch.inf)
            spoiled = wrong if used is None else wrong & used
            used = inside if used is None else inside & used
            values = torch.where(inside, values, self.grid.first / self.grid.stencil.per_unit)
        masses = torch.ones_like(values) if weights is None else weights
        if used is not None:
            masses = torch.where(used, masses, 0)
        moments = self.module.grid_spread(values, masses, self.grid)
        contributions = torch.mm(self.grid.polynomials(values).T, moments.flatten(1)).view_as(moments)
        sums = values.new_zeros(values.shape[0], self.grid.nodes)
        for node, contribution in enumerate(contributions):
            sums[:, node : node + self.grid.cells] += contribution
        sums = sums.flip(1)
        return sums if spoiled is None else sums + _nan_where(spoiled, values)

    def _read(self, nodes: Tensor, values: Tensor) -> Tensor:
        """The function whose values at the nodes are given [rows, nodes], at the values [rows, n]."""
        points, cells = self.grid.stencil.points, self.grid.cells
        stencils = torch.stack([nodes[:, node : node + cells] for node in range(points)])
        coefficients = torch.mm(self.grid.polynomials(values), stencils.flatten(1)).view_as(stencils)
        if self.grid.all_inside:
            return self.module.grid_read(coefficients, values, self.grid)  # type: ignore[no-any-return]
        inside = self.grid.contains(values)
        within = torch.where(inside, values, self.grid.first / self.grid.stencil.per_unit)
        return torch.where(inside, self.module.grid_read(coefficients, within, self.grid), torch.nan)


# --- the one-side Huber ---

# Bits of a sum of integers, without its sign.
SUM_BITS = 62


def fixed_point_unit(values: Tensor) -> Tensor:
    """For each row of values [rows, n] the finest power of two in which no sum of it overflows, [rows, 1] float64."""
    exponent = torch.zeros(values.shape[0], 1, dtype=torch.int32, device=values.device)
    if values.shape[1]:
        largest = torch.where(values.isfinite(), values.abs(), 0).amax(1, keepdim=True)
        exponent = torch.frexp(largest.double()).exponent + values.shape[1].bit_length() - SUM_BITS
    # The reciprocal of the unit is a float64 as well.
    return torch.ldexp(torch.ones_like(exponent, dtype=torch.float64), exponent.clamp(min=-1000))


@dataclass(frozen=True)
class _FixedPoint:
    """Numbers of each row as integers, whose sums are exact and do not depend on their order. unit: [rows, 1]."""

    unit: Tensor

    def running_sums(self, values: Tensor) -> Tensor:
        """[rows, n + 1] int64, from 0 to the sum of the row."""
        return torch.nn.functional.pad(torch.cumsum((values / self.unit).round_().long(), 1), (1, 0))

    def between(self, sums: Tensor, begin: Tensor, end: Tensor) -> Tensor:
        """The sum of the values begin .. end - 1, float64."""
        return (sums.gather(1, end) - sums.gather(1, begin)) * self.unit


@dataclass(frozen=True)
class Sorted:
    """The one-side Huber, 1 + 2x above 0 and (1 + x)^2 from -1 to 0, and the hinge, from sorted rows and prefix sums.

    With u = 1 - p, the sum of g(n - p) over the sorted negatives n is that of 1 + 2 (n - p) over n > p, and of
    (u + n)^2 = u^2 + 2 u n + n^2 over p - 1 < n <= p: numbers, sums and sums of squares of two ranges. Scores are taken
    from the middle of the row. The sums are of integers, and so exact: what is lost is the rounding to their unit, less
    than 2^-60 N X^2 for each term, X half the range of the row's scores. The rounding of the scores themselves to
    float32, 2^-24 X, is 2^-48 X^2 in a square.

    The hinge is max(n - p, 0), p less the margin: number and sum of the negatives above p.

    A row with a NaN or positive infinity among the negatives is NaN throughout.
    """

    module: ModuleType
    width: int

    def soft_rank_forward(
        self,
        scores: Tensor,
        positives: Positives,
        surrogate: str,
        ranks: Tensor,
        slopes: Tensor | None,
        positive_scores: Tensor,
        positive_ranks: Tensor | None = None,
        positive_slopes: Tensor | None = None,
    ) -> None:
        """As the block function of this name."""
        pairs = _pairs_of(self.module, positives)
        positive = pairs.positives_of(scores).contiguous()
        pairs.write(positive_scores, positive)
        parts = [_only(part, used) for part, used in pairs.negatives_of(scores)]
        if surrogate != "one_side_huber":
            rank, slope = _hinge_sums(torch.cat(parts, 1), positive - parse(surrogate).numbers[0])
        else:
            rank, slope = _huber_sums(torch.cat(parts, 1), positive)
        pairs.write(ranks, rank)
        if slopes is not None:
            pairs.write(slopes, slope)
        if positive_ranks is not None:
            # g(0) = 1 and g'(0) = 2 are the own term.
            rank, slope = _huber_sums(_only(positive, pairs.used), positive)
            pairs.write(positive_ranks, rank - 1)
            if positive_slopes is not None:
                pairs.write(positive_slopes, slope - 2)

    def soft_rank_backward(
        self,
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
        """As the block function of this name."""
        pairs = _pairs_of(self.module, positives)
        positive, weight = pairs.read(positive_scores), pairs.read(grad_ranks)
        # A slot without a positive has no weight: anywhere will do.
        if surrogate != "one_side_huber":
            grad_scores.copy_(_hinge_slopes(scores, positive - parse(surrogate).numbers[0], weight))
        else:
            grad_scores.copy_(_huber_slopes(scores, positive, weight))
        own = -weight * pairs.read(slopes)
        if grad_positive_scores is not None:
            own += pairs.read(grad_positive_scores)
        if positive_slopes is not None and grad_positive_ranks is not None:
            weight = pairs.read(grad_positive_ranks)
            own = own - weight * (2 + pairs.read(positive_slopes))
            own += _huber_slopes(positive, positive, weight)
        pairs.write_own(grad_scores, own.to(scores.dtype))


def _only(values: Tensor, used: Tensor | None) -> Tensor:
    """Negative infinity, which is no negative of any positive, in place of what is not used."""
    return values if used is None else values.masked_fill(~used, -torch.inf)


def _centred(values: Tensor, others: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Both [rows, n] in float64 less the middle of the first, 0 where not finite; and 0 or NaN, [rows, 1].

    NaN where the first has a NaN or positive infinity. Its negative infinities do not count.
    """
    spoiled = _nan_where(~(values < torch.inf), values)
    finite = values.isfinite()
    low = torch.where(finite, values, torch.inf).amin(1, keepdim=True)
    high = torch.where(finite, values, -torch.inf).amax(1, keepdim=True)
    middle = torch.where(low <= high, (low + high) / 2, 0).double()
    return torch.where(finite, values - middle, 0), others - middle, spoiled


def _huber_sums(negatives: Tensor, positive: Tensor) -> tuple[Tensor, Tensor]:
    """The sums of g(n - p) and of g'(n - p) over the negatives [rows, n], for each p [rows, width], float64."""
    ordered = negatives.sort(1).values
    values, threshold, spoiled = _centred(ordered, positive)
    near = torch.searchsorted(ordered, positive - 1, right=True)
    above = torch.searchsorted(ordered, positive, right=True)
    end = torch.full_like(above, ordered.shape[1])
    first, second = _FixedPoint(fixed_point_unit(values)), _FixedPoint(fixed_point_unit(values.square()))
    sums, squares = first.running_sums(values), second.running_sums(values.square())
    n_above, total_above = (end - above).double(), first.between(sums, above, end)
    n_near, total_near = (above - near).double(), first.between(sums, near, above)
    lift = 1 - threshold
    rank = n_above + 2 * (total_above - n_above * threshold)
    parabola = lift * (lift * n_near + 2 * total_near) + second.between(squares, near, above)
    slope = 2 * (n_above + lift * n_near + total_near)
    # A positive that is not finite has no rank.
    spoiled = spoiled + 0 * positive
    return rank + parabola.clamp_(min=0) + spoiled, slope.clamp_(min=0) + spoiled


def _hinge_sums(negatives: Tensor, bound: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of n - p over the negatives [rows, n] above p, and their number, for each p of bound [rows, width]."""
    ordered = negatives.sort(1).values
    values, threshold, spoiled = _centred(ordered, bound)
    above = torch.searchsorted(ordered, bound, right=True)
    end = torch.full_like(above, ordered.shape[1])
    fixed = _FixedPoint(fixed_point_unit(values))
    number = (end - above).double()
    rank = fixed.between(fixed.running_sums(values), above, end) - number * threshold
    spoiled = spoiled + 0 * bound
    return rank.clamp_(min=0) + spoiled, number + spoiled


def _hinge_slopes(negatives: Tensor, bound: Tensor, weight: Tensor) -> Tensor:
    """The sum of weight[p] over the p of bound [rows, width] below each negative n [rows, n], float64."""
    ordered, place = bound.sort(1)
    weight = weight.gather(1, place).double()
    below = torch.searchsorted(ordered, negatives.contiguous())
    fixed = _FixedPoint(fixed_point_unit(weight))
    total = fixed.between(fixed.running_sums(weight), torch.zeros_like(below), below)
    spoiled = (0 * (weight + ordered)).sum(1, keepdim=True) + torch.where(negatives.isnan(), torch.nan, 0)
    return total + spoiled


def _huber_slopes(negatives: Tensor, positive: Tensor, weight: Tensor) -> Tensor:
    """The sum of weight[p] g'(n - p) over p [rows, width], for each negative n [rows, n], float64."""
    ordered, place = positive.sort(1)
    weight = weight.gather(1, place).double()
    values, threshold, spoiled = _centred(ordered, negatives)
    negatives = negatives.contiguous()
    below = torch.searchsorted(ordered, negatives)
    near = torch.searchsorted(ordered, negatives + 1)
    moments = weight * values
    first, second = _FixedPoint(fixed_point_unit(weight)), _FixedPoint(fixed_point_unit(moments))
    sums, products = first.running_sums(weight), second.running_sums(moments)
    start = torch.zeros_like(below)
    rise = (1 + threshold) * first.between(sums, below, near) - second.between(products, below, near)
    # Below every score there is no rise; negative infinity marks what is no negative.
    rise = torch.where(negatives == -torch.inf, 0, rise)
    # A NaN has no integer: it must not get lost.
    spoiled = spoiled + (0 * weight).sum(1, keepdim=True) + torch.where(negatives.isnan(), torch.nan, 0)
    return 2 * (first.between(sums, start, below) + rise) + spoiled
