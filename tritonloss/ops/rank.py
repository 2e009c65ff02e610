"""Soft ranks: how many negatives stand above each positive of each query, softly counted, and functions of them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from tritonloss.backends import backend_module, eager, eager_terms, large_classes, surrogates
from tritonloss.layout import Positives
from tritonloss.ops.euclidean import EuclideanScores
from tritonloss.ops.library import Inputs, Pass, kept_for
from tritonloss.ops.products import resolve_mode
from tritonloss.ops.products import scores as scores_of
from tritonloss.ops.sources import Products, Rows, SortedMatrix
from tritonloss.ops.streaming import Panels, empty_scores
from tritonloss.types import accumulation_dtype


def check_surrogate(surrogate: str, temperature: float, positive_ranks: bool = False) -> None:
    if surrogates.parse(surrogate).selection != "all":
        raise ValueError(f"surrogate is {surrogate!r}: expected one that compares with all negatives")
    if positive_ranks and surrogate not in surrogates.PLAIN:
        raise ValueError(
            f"positive_ranks is True: expected False with surrogate {surrogate!r}, which ranks negatives only"
        )
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}: expected a number above 0")


@dataclass(frozen=True)
class Pairs:
    """The pairs of some queries with their positives, as a rectangle: slot k of query q is its k-th positive.

    ranks: [q, P], R of each pair: the sum of the surrogate over the negatives of the query.
    positive_ranks: [q, P], the same sum over the other positives, j != i; None where it was not asked for.
    slopes: [q, P], the sum of the surrogate's derivative over the negatives; None in inference.
    count: [q] int64, how many slots are pairs, the first ones. What the others hold means nothing: `mean` and `sum`
    leave them out.
    constants: the rows of the per-query tensors that the loss gave, [q, ...] each.
    """

    ranks: Tensor
    positive_ranks: Tensor | None
    slopes: Tensor | None
    constants: tuple[Tensor, ...]
    positives: Positives
    scaled_scores: Tensor
    temperature: float
    first_query: int | None

    @property
    def count(self) -> Tensor:
        return self.positives.count

    @cached_property
    def scores(self) -> Tensor:
        """[q, P], the score of each pair."""
        return self.scaled_scores * self.temperature

    @cached_property
    def is_self(self) -> Tensor | None:
        """[q, P] bool, whether the pair is a query with itself; None where queries are none of the keys."""
        own = _own_column(self.first_query, self.positives)
        return None if own is None else self.positives.columns == own

    @cached_property
    def share(self) -> Tensor:
        """[q, 1], 1 / count, or 1 without a pair: the derivative of `mean` by each of its pairs."""
        return 1 / self.count.clamp(min=1).to(self.ranks.dtype)[:, None]

    def sum(self, values: Tensor) -> Tensor:
        """The sum of values [q, P] over the pairs of each query, [q]."""
        return self.positives.only_pairs(values).sum(1)

    def mean(self, values: Tensor) -> Tensor:
        """The mean over the pairs of each query, [q]; 0 for a query without any."""
        return self.sum(values) * self.share[:, 0]


def _own_column(first_query: int | None, positives: Positives) -> Tensor | None:
    """The column of each query of a panel itself, [q, 1]; first_query: of the panel, None where queries are no keys."""
    if first_query is None:
        return None
    n_rows = positives.count.shape[0]
    return torch.arange(first_query, first_query + n_rows, device=positives.count.device)[:, None]


class PairGradients(NamedTuple):
    """The derivatives of the value of each query by its pairs, [q, P]; None for 0. ranks: the number 1 for 1."""

    ranks: Any = None
    scores: Tensor | None = None
    positive_ranks: Tensor | None = None


QueryFunction: TypeAlias = Callable[..., Any]
"""From Pairs and numbers to a value for each query [q], or for each pair [q, P], which are summed; or to these and a
function without arguments that gives the `PairGradients`."""

_functions: dict[str, QueryFunction] = {}
# Functions whose values are counted: see `register_query_function`.
_counts: dict[str, Callable[[Pairs], Tensor]] = {}


def register_query_function(
    name: str, function: QueryFunction, count: Callable[[Pairs], Tensor] | None = None
) -> None:
    """Let losses name a function of `Pairs`, so that torch.compile can keep it within one operator.

    function: called as function(pairs, *numbers) with no gradient recorded. It returns a value for each query [q], or
    for each pair [q, P], which are then summed, and a function without arguments that returns the `PairGradients`:
    under torch.compile nothing else can differentiate them. A name that was registered before is given the new one.
    count: from the pairs, which then have slopes in inference too, to a number for each query [q] int64, such as how
    many terms its value has: `counted_total` returns their sum.
    """
    _functions[name] = function
    _counts.pop(name, None)
    if count is not None:
        _counts[name] = count


def _with_gradients(
    function: QueryFunction, pairs: Pairs, numbers: Sequence[float], weights: Tensor
) -> tuple[Tensor, PairGradients]:
    """The values [q], and the derivatives of the sum of weights x values; weights [q] or []."""
    result = function(pairs, *numbers)
    if isinstance(result, tuple):
        values, gradients = result
        factor = weights[:, None] if weights.ndim else weights
        found = (
            None if grad is None else factor if isinstance(grad, int) else grad * factor
            for grad in gradients()
        )
        return _per_query(values, pairs), PairGradients(*found)
    leaves = _leaves(pairs)
    wanted = [leaves.ranks, leaves.scores, leaves.positive_ranks]
    with torch.enable_grad():
        total = (_per_query(function(leaves, *numbers), pairs) * weights).sum()
    # A scalar: given gradients make torch import sympy, 30 MiB and half a second.
    leaf_gradients = iter(
        torch.autograd.grad(total, [leaf for leaf in wanted if leaf is not None], allow_unused=True)
    )
    gradients = PairGradients(*(None if leaf is None else next(leaf_gradients) for leaf in wanted))
    return _per_query(result, pairs), gradients


def _per_query(values: Tensor, pairs: Pairs) -> Tensor:
    return pairs.sum(values) if values.ndim == 2 else values


def _leaves(pairs: Pairs) -> Pairs:
    leaves = replace(
        pairs,
        ranks=pairs.ranks.detach().requires_grad_(),
        positive_ranks=None
        if pairs.positive_ranks is None
        else pairs.positive_ranks.detach().requires_grad_(),
    )
    leaves.__dict__["scores"] = pairs.scores.detach().requires_grad_()
    return leaves


class _Values:
    """Takes the pairs of each panel to one value per query."""

    def __init__(
        self, function: str | QueryFunction, numbers: Sequence[float], given: Sequence[Tensor], like: Tensor
    ) -> None:
        self.function = _functions[function] if isinstance(function, str) else function
        self.count = _counts.get(function) if isinstance(function, str) else None
        self.numbers, self.weights, self.like = numbers, given[0] if given else None, like
        self.parts: list[Tensor] = []
        self.counts: list[Tensor] = []

    def skip(self, rows: slice) -> None:
        self.parts.append(self.like.new_zeros(rows.stop - rows.start))

    def take(self, rows: slice, pairs: Pairs) -> PairGradients | None:
        if self.count is not None:
            self.counts.append(self.count(pairs).sum())
        if self.weights is None:
            result = self.function(pairs, *self.numbers)
            values, gradients = _per_query(result[0] if isinstance(result, tuple) else result, pairs), None
        else:
            weights = self.weights[rows] if self.weights.ndim else self.weights
            values, gradients = _with_gradients(self.function, pairs, self.numbers, weights)
        self.parts.append(values)
        return gradients

    def results(self) -> tuple[Tensor, Tensor, Tensor]:
        # An operator returns no tensor twice.
        number, other = self.like.new_empty(0), self.like.new_empty(0)
        if self.count is not None:
            number = self.like.new_zeros(1, dtype=torch.int64)
            for part in self.counts:
                number += part
        if not self.parts:
            return self.like.new_zeros(0), number, other
        return (self.parts[0] if len(self.parts) == 1 else torch.cat(self.parts)), number, other


class _FlatPairs:
    """Takes the pairs of each panel to flat tensors [M], those of query 0 first; or hands out their gradients."""

    def __init__(
        self, panels: Panels, given: Sequence[Tensor], like: Tensor, with_positives: bool, bounded: bool
    ):
        count = panels.count
        self.offset = torch.cumsum(count, 0) - count
        self.n_pairs = given[0].shape[0] if given else panels.total
        self.given, self.with_positives = given, with_positives
        # One more, for the slots that are no pairs.
        new = like.new_zeros if bounded else like.new_empty
        self.flat = [new(self.n_pairs + 1) for _ in range(3 if with_positives else 2)] if not given else []
        self.like = like

    def skip(self, rows: slice) -> None:
        pass

    def _places(self, rows: slice, positives: Positives) -> Tensor:
        place = self.offset[rows, None] + torch.arange(positives.width, device=self.offset.device)
        return positives.only_pairs(place, self.n_pairs)

    def take(self, rows: slice, pairs: Pairs) -> PairGradients | None:
        place = self._places(rows, pairs.positives)
        if self.given:
            # What is read for a slot without a pair is not used.
            place = place.clamp(max=max(0, self.n_pairs - 1))
            ranks, scores, among = self.given
            return PairGradients(ranks[place], scores[place], among[place] if self.with_positives else None)
        for flat, values in zip(self.flat, (pairs.ranks, pairs.scores, pairs.positive_ranks), strict=False):
            assert values is not None
            flat.scatter_(0, place.flatten(), values.flatten())
        return None

    def results(self) -> tuple[Tensor, Tensor, Tensor]:
        # Copies: an operator returns no views, and no tensor twice.
        found = [flat[: self.n_pairs].clone() for flat in self.flat]
        ranks, scores, among = found + [self.like.new_empty(0) for _ in range(3 - len(found))]
        return ranks, scores, among


def _run(
    inputs: Inputs,
    given: Sequence[Tensor],
    needs: Sequence[bool],
    masks: Sequence[Tensor],
    order: Tensor | None,
    start: Tensor,
    count: Tensor,
    constants: Sequence[Tensor],
    function: str | QueryFunction,
    numbers: Sequence[float],
    surrogate: str,
    temperature: float,
    positive_ranks: bool,
    normalize: bool,
    distance: str,
    max_class_size: int,
    score_limit: float,
    first: int,
    last: int,
    budget: int,
    backend: str,
    products: str,
    panels: Panels | None = None,
) -> tuple[Tensor, ...]:
    """The values of queries first .. last - 1 as `function` gives them; without one, ranks, scores and positive ranks
    of their pairs.

    inputs: queries and keys, None for the keys where queries meet themselves.
    masks: positives and negatives of a score matrix in place of the queries, or nothing: then queries are rows.
    start, count, constants: of the queries first .. last - 1. max_class_size: -1 without a bound.
    distance: "dot" for scores that are products of rows, "euclidean" for minus the distance of unit rows.
    """
    queries, keys = inputs
    assert queries is not None
    n_keys = queries.shape[1] if masks else (queries if keys is None else keys).shape[0]
    itemsize = accumulation_dtype(queries.dtype).itemsize
    bound = max_class_size if max_class_size >= 0 else None
    if panels is None:
        # Beside a panel of sorted columns, their permutation and its temporaries take about four times as much.
        panels = Panels.of(
            start,
            count,
            n_keys,
            itemsize * (5 if masks else 1),
            budget,
            bound,
            with_total=not (function or given),
        )
    elif panels.count.shape[0] != last - first:
        raise ValueError(f"panels are of {panels.count.shape[0]} queries: expected {last - first}")
    own, need = slice(first, last), any(needs)
    source: Products | SortedMatrix | EuclideanScores
    if masks:
        source = SortedMatrix(queries, masks, temperature, panels.height, own, need)
    else:
        rows = Rows(queries, order, normalize)
        others = None if keys is None else Rows(keys, None, normalize)
        scale = 1.0 if distance == "euclidean" else 1 / temperature
        source = Products(rows, others, scale, panels.height, own, needs, products, backend)
        if distance == "euclidean":
            source = EuclideanScores(source, temperature, panels.height, need)
    like = source.scratch
    sink: _Values | _FlatPairs
    if function:
        sink = _Values(function, numbers, given, like)
    else:
        sink = _FlatPairs(panels, given, like, positive_ranks, bound is not None)
    module = backend_module(backend, queries.device)
    selection = surrogates.parse(surrogate).selection
    with_slopes = need or (isinstance(function, str) and function in _counts)
    for panel, positives in panels:
        if not positives.width:
            sink.skip(panel)
            continue
        scores = source.scores(panel)
        first_query = first + panel.start if keys is None and not masks else None
        algorithm: Any
        if selection != "all":
            algorithm = eager_terms.Selected(_own_column(first_query, positives))
        else:
            algorithm = (
                large_classes.choose(module, scores, positives, surrogate, score_limit / temperature)
                or module
            )
        ranks, slopes, scaled, among, among_slopes = like.new_empty(5, *positives.shape).unbind()
        kept = algorithm.soft_rank_forward(
            scores,
            positives,
            surrogate,
            ranks,
            slopes if with_slopes else None,
            scaled,
            among if positive_ranks else None,
            among_slopes if positive_ranks and need else None,
        )
        pairs = Pairs(
            ranks,
            among if positive_ranks else None,
            slopes if with_slopes else None,
            tuple(tensor[panel] for tensor in constants),
            positives,
            scaled,
            temperature,
            first_query,
        )
        gradients = sink.take(panel, pairs)
        if gradients is None or not need:
            continue
        by_ranks, by_scores, by_among = gradients
        by_ranks = torch.zeros_like(ranks) if by_ranks is None else by_ranks.expand(ranks.shape).contiguous()
        by_scores = None if by_scores is None else by_scores * temperature
        grad = source.gradient(panel)
        algorithm.soft_rank_backward(
            scores,
            positives,
            surrogate,
            slopes,
            scaled,
            by_ranks,
            by_scores,
            grad,
            among_slopes if by_among is not None else None,
            None if by_among is None else by_among.expand_as(ranks).contiguous(),
            **kept_for(kept),
        )
        kept = None  # before the next panel has its own
        source.add(panel, grad)
    # No tensor twice; of an absent input what the fake has.
    nothing = (
        torch.empty(0, device="cpu") if tensor is None else like.new_empty(0) for tensor in (queries, keys)
    )
    found = zip(source.gradients(), nothing, needs, strict=True)
    return *sink.results(), *(grad if need else other for grad, other, need in found)


def _fake(
    inputs: Inputs,
    given: Sequence[Tensor],
    masks: Sequence[Tensor],
    order: Tensor | None,
    start: Tensor,
    count: Tensor,
    constants: Sequence[Tensor],
    function: str,
    numbers: Sequence[float],
    surrogate: str,
    temperature: float,
    positive_ranks: bool,
    normalize: bool,
    distance: str,
    max_class_size: int,
    *_: Any,
) -> tuple[Tensor, ...]:
    assert inputs[0] is not None
    like = inputs[0].new_empty(0, dtype=accumulation_dtype(inputs[0].dtype))
    sizes: tuple[Any, Any, Any] = (0, 0, 0)
    if function:
        number = like.new_empty(1, dtype=torch.int64) if function in _counts else like.new_empty(0)
        return like.new_empty(count.shape[0]), number, like.new_empty(0)
    if not given:
        bounded = max_class_size >= 0
        n_pairs = count.shape[0] * max_class_size if bounded else torch.library.get_ctx().new_dynamic_size()
        sizes = (n_pairs, n_pairs, n_pairs if positive_ranks else 0)
    return tuple(like.new_empty(size) for size in sizes)


rank_pass = Pass(
    "rank",
    "Tensor[] masks, Tensor? order, Tensor start, Tensor count, Tensor[] constants, str function, float[] numbers, "
    "str surrogate, float temperature, bool positive_ranks, bool normalize, str distance, int max_class_size, "
    "float score_limit, SymInt first, SymInt last, int budget, str backend, str products",
    _run,
    _fake,
    n_results=3,
)


def positive_scores(
    queries: Tensor,
    masks: Sequence[Tensor],
    order: Tensor | None,
    panels: Panels,
    normalize: bool,
    first: int,
    last: int,
    products: str,
) -> Iterator[tuple[slice, Tensor]]:
    """The scores of the positives of queries first .. last - 1, a panel at a time: [q, P], +inf where there is none.

    queries: [N, D] that meet themselves, a query being no positive of its own; or with `masks` scores [Q, N].
    panels: of these queries. Constant. Time O(sum over panels of their rows x the keys of their classes x D).
    """
    if masks:
        matrix = SortedMatrix(queries, masks, 1.0, panels.height, slice(first, last), False)
        for rows, positives in panels:
            scores = matrix.scores(rows)[:, : positives.width]
            yield rows, positives.only_pairs(scores, torch.inf)
        return
    rows_of = Rows(queries, order, normalize)
    # A pass of factors over so few scores needs no kernel.
    rows_of.prepare(queries.dtype, resolve_mode(products or None, queries.dtype, queries.device), eager)
    like, n_keys = queries.new_empty(0, dtype=accumulation_dtype(queries.dtype)), queries.shape[0]
    for rows, positives in panels:
        begin, end = first + rows.start, first + rows.stop
        # Rows are sorted by class: no positive is farther away than the largest class is wide.
        low, high = max(0, begin - positives.width + 1), min(n_keys, end + positives.width - 1)
        scores = empty_scores(end - begin, high - low, like)
        scores_of(*rows_of.panel(slice(begin, end)), rows_of.operand, 1.0, scores, slice(low, high))
        query = torch.arange(begin, end, device=scores.device)[:, None]
        own_scores = scores.gather(1, (positives.columns - low).clamp_(min=0, max=high - low - 1))
        own_scores = own_scores.masked_fill(positives.columns == query, torch.inf)
        yield rows, positives.only_pairs(own_scores, torch.inf)
