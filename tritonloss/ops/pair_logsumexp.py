"""`pair_logsumexp`: soft maxima over the positives and over the negatives of each query, and functions of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from tritonloss.backends import logsumexp_module, selected_backend
from tritonloss.layout import Positives
from tritonloss.ops.library import Inputs, Pass, attach
from tritonloss.ops.shares import Share, own_share
from tritonloss.ops.sources import PanelRows, Products, Rows
from tritonloss.ops.streaming import Panels, budget_bytes, rows_per_block
from tritonloss.types import ProductMode, accumulation_dtype

EXPONENT_MAPS = ("linear", "circle")


class PairLogSumExp(NamedTuple):
    """positive, negative: [Q], -inf for a sum of nothing. scores: [M], the positives of query 0 first."""

    positive: Tensor
    negative: Tensor
    scores: Tensor


class _Terms(Protocol):
    """What a function of the sums returns: see `tritonloss.losses.logsumexp_math.QueryTerms`."""

    values: Tensor
    grad_positive: Tensor
    grad_negative: Tensor
    grad_scores: Tensor | None


LogSumExpFunction: TypeAlias = Callable[..., Any]
_functions: dict[str, LogSumExpFunction] = {}


def register_logsumexp_function(name: str, function: LogSumExpFunction) -> None:
    """Let losses name a function of the sums of a query, for `logsumexp_values` and `logsumexp_total`.

    function: called as function(positive, negative, scores, is_pair, *numbers); returns the values [q] and their
    derivatives, as `tritonloss.losses.logsumexp_math` has them.
    """
    _functions[name] = function


@dataclass(frozen=True)
class Keys:
    """Which keys are the positives of each query, and which of them count not at all.

    ranges: [Q, 4] int64, see `pair_logsumexp`: start and stop of the positives, then of the hidden keys, which lie
    among the positives. They count keys in the order below.
    order: [N] int64, the original row of each key, and where queries meet themselves of each query, that the ranges
    speak of; None for the order that is given.
    normalize_queries, normalize_keys: divide each row by its Euclidean norm (by 1e-12 if that is larger) in the pass.
    max_class_size: a bound of the positives of a query, which replaces a host sync where their scores are needed.
    products: how rows are multiplied, see `tritonloss.ops.products`; None for TRITONLOSS_PRODUCTS, else "auto".
    """

    ranges: Tensor
    order: Tensor | None = None
    normalize_queries: bool = False
    normalize_keys: bool = False
    max_class_size: int | None = None
    memory_budget: int | None = None
    products: ProductMode | None = None


@dataclass(frozen=True)
class Exponents:
    """From scores to exponents: scale, offset and width of the positives, then of the negatives; see `pair_logsumexp`.

    function, numbers: what is made of the sums of each query, by its name in the registry; "" for the sums themselves.
    needs_scores: whether the function reads the scores of the positives.
    """

    maps: tuple[float, ...]
    kind: str = "linear"
    function: str = ""
    numbers: tuple[float, ...] = field(default=())
    needs_scores: bool = True


def pair_logsumexp(
    queries: Tensor,
    keys: Tensor,
    start: Tensor,
    count: Tensor,
    *,
    positive_map: tuple[float, float, float] = (1.0, 0.0, 0.0),
    negative_map: tuple[float, float, float] = (1.0, 0.0, 0.0),
    exponent_map: str = "linear",
    position: Tensor | None = None,
    memory_budget: int | None = None,
) -> PairLogSumExp:
    """The logarithms of two sums of exponentials for each query, and the scores of its positives.

        positive[q] = ln(sum over the positives i of q of e^x(s_qi)),  s = queries @ keys.T
        negative[q] = ln(sum over the negatives j of q of e^x(s_qj))

    The positives of query q are the keys start[q] .. start[q] + count[q] - 1 without position[q]; every other key but
    position[q] is a negative. With scale, offset and width of a side, and y = scale s + offset, the exponent is y for
    "linear" and a y for "circle", where a = relu(y / |scale| + width) is a constant for the gradient.

    Args:
        queries: [Q, D], any floating dtype, contiguous or not.
        keys: [N, D] on the same device; may be `queries` itself.
        start, count: [Q] int64. A count of 0 gives the query no positive.
        positive_map, negative_map: scale, offset and width of each side.
        exponent_map: "linear" or "circle".
        position: [Q] int64, the key that is the query itself and counts on neither side, -1 for none; a position that
            is no positive of the query is ignored. None: no key is left out.
        memory_budget: what the scores may take; default TRITONLOSS_MEMORY_BUDGET, else 256 MiB on CPU, a sixteenth of
            the device on CUDA.

    Returns:
        PairLogSumExp(positive [Q], negative [Q], scores [M]) in float32, or float64 for float64; -inf for a sum of
        nothing. Exact for exponents of any size. Differentiable once, in queries and keys; the scores are walked over
        again in the backward pass.

    Time O(Q N D), two host syncs. Memory O(panel + (Q + N) D + M).

    Raises:
        ValueError: an unknown exponent map, a budget below 1.
        RuntimeError: the chosen backend cannot serve the device; a second derivative is asked for.
    """
    if exponent_map not in EXPONENT_MAPS:
        raise ValueError(f"exponent_map is {exponent_map!r}: expected one of {', '.join(EXPONENT_MAPS)}")
    ranges = pair_ranges(start, count, position)
    exponents = Exponents((*positive_map, *negative_map), exponent_map)
    others = None if queries is keys else keys
    return sums_of(queries, others, Keys(ranges, memory_budget=memory_budget), exponents)


def pair_ranges(start: Tensor, count: Tensor, position: Tensor | None) -> Tensor:
    """[Q, 4] int64, contiguous: the positives of each query, and the key that is hidden from it."""
    stop = start + count
    if position is None:
        return torch.stack([start, stop, torch.zeros_like(start), torch.zeros_like(start)], 1)
    is_hidden = (position >= start) & (position < stop)
    hidden = torch.where(is_hidden, position, start)
    return torch.stack([start, stop, hidden, hidden + is_hidden], 1)


def sums_of(queries: Tensor, keys: Tensor | None, layout: Keys, exponents: Exponents) -> PairLogSumExp:
    """`pair_logsumexp` with all options; keys: None where queries meet themselves."""
    share, own = _own(queries)
    sums = logsumexp_pass((queries, keys), *_options(queries, layout, exponents, own))
    if share is not None:
        count = positive_count(layout.ranges)
        sums = *(share.gather(part) for part in sums[:2]), share.gather_segments(sums[2], count)
    return PairLogSumExp(*sums)


def logsumexp_values(queries: Tensor, keys: Tensor | None, layout: Keys, exponents: Exponents) -> Tensor:
    """The value that the function of the exponents gives to each query, [Q] float32 or float64.

    Differentiable once, in queries and keys: the walk again in the backward pass.
    """
    share, own = _own(queries)
    values = logsumexp_pass((queries, keys), *_options(queries, layout, exponents, own))[0]
    return values if share is None else share.gather(values)


def logsumexp_total(
    queries: Tensor,
    keys: Tensor | None,
    layout: Keys,
    exponents: Exponents,
    counted: Callable[[Tensor, Tensor], Tensor],
) -> tuple[Tensor, Tensor]:
    """The sum of `logsumexp_values`, whose gradient is found in the same walk, and the sum of `counted`; scalars.

    counted: from the values [q] of some queries and the number of their positives [q] to how many values each of them
    stands for, [q]. The second sum is constant.

    Differentiable once. Time: 2 Q N D operations of products without a gradient, 6 Q N D with it. Memory
    O(panel + (Q + N) D).
    """
    share, own = _own(queries)
    inputs = queries, keys
    one = torch.ones((), dtype=accumulation_dtype(queries.dtype), device=queries.device)
    (values, *_), gradients = logsumexp_pass.once(inputs, (one,), *_options(queries, layout, exponents, own))
    number = counted(values, positive_count(layout.ranges[own])).sum().to(values.dtype)
    total = attach(values.sum(), inputs, gradients)
    if share is None:
        return total, number
    return share.total(total), share.total(number)


def positive_count(ranges: Tensor) -> Tensor:
    """The number of positives of each query, [Q] int64."""
    return ranges[:, 1] - ranges[:, 0] - (ranges[:, 3] - ranges[:, 2])


def _own(queries: Tensor) -> tuple[Share | None, slice]:
    """What this process computes, and its queries."""
    share = own_share(queries.shape[0])
    return share, slice(0, queries.shape[0]) if share is None else share.rows


def _options(queries: Tensor, layout: Keys, exponents: Exponents, own: slice) -> tuple[object, ...]:
    return (
        layout.order,
        layout.ranges[own],
        exponents.kind,
        list(exponents.maps),
        exponents.function,
        list(exponents.numbers),
        exponents.needs_scores,
        layout.normalize_queries,
        layout.normalize_keys,
        -1 if layout.max_class_size is None else layout.max_class_size,
        own.start,
        own.stop,
        budget_bytes(queries.device, layout.memory_budget),
        selected_backend(),
        layout.products or "",
    )


class _Gradients(NamedTuple):
    """Of the two sums of each query of a panel [q], and of the scores of its positives [q, P], None for 0."""

    positive: Tensor
    negative: Tensor
    scores: Tensor | None


class _Panel(NamedTuple):
    """The sums of some queries [q], and the scores [q, P] of the slots that may be positives, of which some are."""

    rows: slice
    positive: Tensor
    negative: Tensor
    scores: Tensor
    is_pair: Tensor


class _Values:
    """Takes the sums of each panel to one value per query."""

    def __init__(
        self, function: str, numbers: Sequence[float], given: Sequence[Tensor], n_queries: int, like: Tensor
    ) -> None:
        self.function, self.numbers = _functions[function], numbers
        self.weights = given[0] if given else None
        self.values, self.empty = like.new_empty(n_queries), like.new_empty(0)

    def take(self, panel: _Panel) -> _Gradients | None:
        terms: _Terms = self.function(*panel[1:], *self.numbers)
        self.values[panel.rows] = terms.values
        if self.weights is None:
            return None
        weights = self.weights[panel.rows] if self.weights.ndim else self.weights
        by_scores = terms.grad_scores
        if by_scores is not None:
            by_scores = (by_scores * (weights[:, None] if weights.ndim else weights)).contiguous()
        return _Gradients(
            (terms.grad_positive * weights).contiguous(),
            (terms.grad_negative * weights).contiguous(),
            by_scores,
        )

    def results(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.values, self.empty, self.empty.clone()


class _Sums:
    """Takes the sums of each panel to flat tensors, or hands out their gradients."""

    def __init__(self, ranges: Tensor, given: Sequence[Tensor], like: Tensor) -> None:
        count = positive_count(ranges)
        self.offset, self.given = torch.cumsum(count, 0) - count, given
        self.n_pairs = given[2].shape[0] if given else int(count.sum().item())
        n_queries = count.shape[0]
        self.positive, self.negative = like.new_empty(n_queries), like.new_empty(n_queries)
        # One more, for the slots that are no pairs.
        self.scores = like.new_empty(self.n_pairs + 1)

    def take(self, panel: _Panel) -> _Gradients | None:
        rank = torch.cumsum(panel.is_pair, 1) - 1
        place = torch.where(panel.is_pair, self.offset[panel.rows, None] + rank, self.n_pairs)
        self.positive[panel.rows], self.negative[panel.rows] = panel.positive, panel.negative
        if not self.given:
            self.scores.scatter_(0, place.flatten(), panel.scores.flatten())
            return None
        positive, negative, scores = self.given
        if self.n_pairs:
            # What is read for a slot without a pair is not used.
            found = scores[place.clamp(max=self.n_pairs - 1)].contiguous()
        else:
            found = panel.scores.new_zeros(panel.scores.shape)
        return _Gradients(positive[panel.rows], negative[panel.rows], found)

    def results(self) -> tuple[Tensor, Tensor, Tensor]:
        # A copy: an operator returns no views.
        return self.positive, self.negative, self.scores[: self.n_pairs].clone()


def _run(
    inputs: Inputs,
    given: Sequence[Tensor],
    needs: Sequence[bool],
    order: Tensor | None,
    ranges: Tensor,
    exponent_map: str,
    maps: Sequence[float],
    function: str,
    numbers: Sequence[float],
    needs_scores: bool,
    normalize_queries: bool,
    normalize_keys: bool,
    max_class_size: int,
    first: int,
    last: int,
    budget: int,
    backend: str,
    products: str,
) -> tuple[Tensor, ...]:
    """The values of queries first .. last - 1 as `function` gives them; without one, both sums and positive scores.

    inputs: queries, and keys, None where queries meet themselves. ranges: of the queries first .. last - 1.
    max_class_size: -1 without a bound.
    """
    queries, keys = inputs
    assert queries is not None
    dtype, device, own = accumulation_dtype(queries.dtype), queries.device, slice(first, last)
    n_queries, n_keys = last - first, (queries if keys is None else keys).shape[0]
    ranges = ranges.contiguous()
    panels = _panels(ranges, n_keys, dtype, budget, needs_scores, max_class_size)
    left: Rows | PanelRows
    if keys is None:
        left, right = Rows(queries, order, normalize_queries), None
    else:
        left, right = PanelRows(queries, dtype, normalize_queries), Rows(keys, order, normalize_keys)
    source = Products(left, right, 1.0, panels.height, own, needs, products, backend)
    like = source.columns
    sink = _Values(function, numbers, given, n_queries, like) if function else _Sums(ranges, given, like)
    positive, negative = like.new_full((2, n_queries), -torch.inf).unbind()
    table, module = _table(maps, like), logsumexp_module(backend, device)
    for rows, positives in panels:
        scores = source.scores(rows)
        block = scores, ranges[rows], table, exponent_map, positive[rows], negative[rows]
        if n_keys:
            module.pair_logsumexp_forward(*block)
        sums = positive[rows], negative[rows]
        gradients = sink.take(_Panel(rows, *sums, *_positive_scores(scores, positives, ranges[rows])))
        if gradients is not None and n_keys:
            grad = source.gradient(rows)
            by_scores = gradients.scores if positives.width else None
            module.pair_logsumexp_backward(*block, gradients.positive, gradients.negative, by_scores, grad)
            source.add(rows, grad)
    return *sink.results(), *source.gradients()


def _panels(
    ranges: Tensor, n_keys: int, dtype: torch.dtype, budget: int, needs_scores: bool, bound: int
) -> Panels:
    start, count = ranges[:, 0], ranges[:, 1] - ranges[:, 0]
    if needs_scores:
        return Panels.of(start, count, n_keys, dtype.itemsize, budget, None if bound < 0 else bound)
    n_queries = count.shape[0]
    height = rows_per_block(n_queries, n_keys, dtype.itemsize, ranges.device, budget)
    n_panels = -(-n_queries // height)
    return Panels(start, count, n_keys, height, [0] * n_panels, [False] * n_panels)


def _positive_scores(scores: Tensor, positives: Positives, ranges: Tensor) -> tuple[Tensor, Tensor]:
    """The scores of the slots of the positives [q, P], and which slots hold a pair [q, P] bool."""
    if not (positives.width and scores.shape[1]):
        empty = scores.new_empty(scores.shape[0], 0)
        return empty, empty.bool()
    column = positives.columns
    is_pair = (column < ranges[:, 2:3]) | (column >= ranges[:, 3:])
    if positives.is_pair is not None:
        is_pair &= positives.is_pair
    return scores.gather(1, column), is_pair


def _table(maps: Sequence[float], like: Tensor) -> Tensor:
    """[2, 3], filled on the device: a copy from the host cannot be captured in a CUDA graph."""
    table = like.new_zeros(2, 3)
    for entry, number in zip(table.view(-1), maps, strict=True):
        if number:
            entry.fill_(number)
    return table


def _fake(
    inputs: Inputs,
    given: Sequence[Tensor],
    order: Tensor | None,
    ranges: Tensor,
    exponent_map: str,
    maps: Sequence[float],
    function: str,
    *_: Any,
) -> tuple[Tensor, ...]:
    assert inputs[0] is not None
    like = inputs[0].new_empty(0, dtype=accumulation_dtype(inputs[0].dtype))
    n_queries = ranges.shape[0]
    if function:
        return like.new_empty(n_queries), like.new_empty(0), like.new_empty(0)
    n_pairs = given[2].shape[0] if given else torch.library.get_ctx().new_dynamic_size()
    return like.new_empty(n_queries), like.new_empty(n_queries), like.new_empty(n_pairs)


logsumexp_pass = Pass(
    "pair_logsumexp",
    "Tensor? order, Tensor ranges, str exponent_map, float[] maps, str function, float[] numbers, bool needs_scores, "
    "bool normalize_queries, bool normalize_keys, int max_class_size, SymInt first, SymInt last, int budget, "
    "str backend, str products",
    _run,
    _fake,
    n_results=3,
)
