"""`soft_histogram`: where the similarities of positive and of negative pairs lie, linearly interpolated."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tritonloss.backends import backend_module, selected_backend
from tritonloss.distances import Distance, call_with_parameters, parameters_of
from tritonloss.ops.library import Inputs, OutsideGraph, Pass, attach, kept_for
from tritonloss.ops.panels import ROW_STRIDE_UNIT
from tritonloss.ops.shares import Share, own_share
from tritonloss.ops.sources import Called, Products, Rows, checked, distance_of_rows
from tritonloss.ops.streaming import MIN_ROWS, budget_bytes, rows_per_block
from tritonloss.types import ProductMode, accumulation_dtype, upcast, widest


class SoftHistograms(NamedTuple):
    """positives, negatives: [bins + 1], or [Q, bins + 1] per query: the number of pairs at each node, in `widest`."""

    positives: Tensor
    negatives: Tensor


@dataclass(frozen=True)
class Counting:
    """Which histograms are taken of which similarities; the options of `soft_histogram`.

    distance: called as distance(rows, keys) for the similarities of a panel, in place of the dot product, and again in
    the backward pass; its parameters, if it is a module, get their gradient. torch.compile leaves its graph there.
    normalize: divide each row by its Euclidean norm (by 1e-12 if that is larger) within the pass.
    order: [N] int64, the original row of each row that the ranges speak of; None for the order that is given.
    products: how rows are multiplied, see `tritonloss.ops.products`; None for TRITONLOSS_PRODUCTS, else "auto".
    """

    bins: int
    per_query: bool = False
    descending: bool = False
    memory_budget: int | None = None
    normalize: bool = False
    order: Tensor | None = None
    distance: Callable[[Tensor, Tensor], Tensor] | None = None
    products: ProductMode | None = None


def soft_histogram(
    queries: Tensor,
    keys: Tensor,
    start: Tensor,
    count: Tensor,
    bins: int = 100,
    *,
    per_query: bool = False,
    descending: bool = False,
    position: Tensor | None = None,
    memory_budget: int | None = None,
    products: ProductMode | None = None,
) -> SoftHistograms:
    """Histograms of s = queries @ keys.T over the nodes t_r = -1 + 2r / bins, r = 0 .. bins, for s in [-1, 1].

    A pair with t_r <= s <= t_(r+1) adds (t_(r+1) - s) bins / 2 to node r and (s - t_r) bins / 2 to node r + 1. A
    similarity outside [-1, 1] counts as the nearer end, and has no gradient. At a node the gradient is that of the bin
    above it, at the last node that of the last bin.

    Query q is the key position[q], and its positives are the keys start[q] .. start[q] + count[q] - 1; every other key
    is a negative. Over the batch a pair counts once: (q, k) is taken where k > position[q]. Per query, all keys count
    but position[q].

    Args:
        queries: [Q, D], any floating dtype, contiguous or not.
        keys: [N, D], same dtype and device; may be `queries` itself.
        start, count: [Q] int64. A count of 0 leaves the query out: no key counts for it.
        bins: at least 1; the sums cost the same for any number.
        per_query: a histogram for each query instead of one over the batch.
        descending: count the nodes down from 1, t_r = 1 - 2r / bins: the first bin holds the closest pairs.
        position: [Q] int64; -1 for a query that is none of the keys. None: query q is key q. Over the batch this form
            costs half, because whole blocks of pairs that were counted before are skipped.
        memory_budget: what the similarities may take; default TRITONLOSS_MEMORY_BUDGET, else 256 MiB on CPU, a
            sixteenth of the device on CUDA.
        products: how rows are multiplied, "auto", "ieee" or "split", see `tritonloss.ops.products`; default
            TRITONLOSS_PRODUCTS, else "auto".

    Returns:
        SoftHistograms(positives, negatives), [bins + 1] or [Q, bins + 1] float64 (float32 on a device that may not have
        it: MPS, XPU), whose sums are the numbers of pairs.
        Pairs are counted as integers and their fractions added in fixed point, 24 bits or more: exact beyond 2^24
        pairs, off by at most 2^-24 of the pairs of a bin, the same in every run. A histogram with a NaN among its
        similarities is NaN. Differentiable once, in queries and keys.

    Time O(Q N D). Memory O(budget + (Q + N) D + bins), per query O(budget + (Q + N) D + Q bins).

    Raises:
        ValueError: bins or a budget below 1; more queries than keys without `position`.
        RuntimeError: the chosen backend cannot serve the device; a second derivative is asked for.
    """
    if bins < 1:
        raise ValueError(f"bins is {bins}: expected at least 1")
    if position is None and queries.shape[0] > keys.shape[0]:
        raise ValueError(
            f"position is None for {queries.shape[0]} queries and {keys.shape[0]} keys: expected as many keys"
        )
    counting = Counting(bins, per_query, descending, memory_budget, products=products)
    return histograms_of(queries, None if queries is keys else keys, start, count, counting, position)


def histograms_of(
    queries: Tensor,
    keys: Tensor | None,
    start: Tensor,
    count: Tensor,
    counting: Counting,
    position: Tensor | None = None,
) -> SoftHistograms:
    """`soft_histogram` with all options; keys: None where queries meet themselves."""
    share, own = _own(queries, counting, position)
    if counting.distance is not None:
        inputs = (queries, keys, *parameters_of(counting.distance))
        (histograms,) = _called(inputs, *_options(queries, start, count, counting, own, position))
    else:
        (histograms,) = histogram_pass(
            (queries, keys), *_options(queries, start, count, counting, own, position)
        )
    if share is not None:
        histograms = share.gather(histograms) if counting.per_query else share.total(histograms)
    return SoftHistograms(*histograms.unbind(1 if counting.per_query else 0))


def distance_histogram(
    embeddings: Tensor,
    distance: Callable[[Tensor, Tensor], Tensor],
    start: Tensor,
    count: Tensor,
    bins: int,
    *,
    per_query: bool = False,
    descending: bool = False,
    memory_budget: int | None = None,
) -> SoftHistograms:
    """`soft_histogram` of the values of `distance(panel of embeddings, embeddings)` in place of the dot product.

    The distance is called on one panel of rows after the other, and again for the gradient: nothing of size N x N is
    kept. Its parameters, if it is a module, get their gradient. torch.compile leaves its graph here.

    Args:
        embeddings: [N, D] float32 or float64.
        distance: takes [rows, D] and [columns, D], returns [rows, columns] with values in [-1, 1].
        start, count, bins, per_query, descending, memory_budget, result: as for `soft_histogram`.

    Time and memory are those of `soft_histogram`, plus what the distance needs for a panel.
    """
    counting = Counting(bins, per_query, descending, memory_budget, distance=distance)
    return histograms_of(embeddings, None, start, count, counting)


def histogram_total(
    queries: Tensor,
    start: Tensor,
    count: Tensor,
    function: Callable[[Tensor], tuple[Tensor, Callable[[], Tensor]]],
    counting: Counting,
) -> Tensor:
    """function(histograms of queries with themselves), a scalar.

    function: from the histograms [2, bins + 1] float64, positives first, to the scalar and a function that gives its
    derivative, of the same shape. The other arguments are those of `histograms_of`.

    Differentiable once; value and gradient in one call, which walks twice over the panels. Time O(N^2 D), memory
    O(panel + N D + bins).
    """
    share, own = _own(queries, counting, None)
    if share is None and counting.distance is None and not torch.compiler.is_compiling():
        found = []

        def given(results: Sequence[Tensor]) -> list[Tensor]:
            found.append(function(results[0]))
            return [found[0][1]()]

        inputs = (queries, None)
        (histograms,), gradients = histogram_pass.once(
            inputs, given, *_options(queries, start, count, counting, own, None)
        )
        value = found[0][0] if found else function(histograms)[0]
        return attach(value.to(accumulation_dtype(queries.dtype)), inputs, gradients)
    return of_histograms(torch.stack(histograms_of(queries, None, start, count, counting)), function, queries)


def of_histograms(
    histograms: Tensor, function: Callable[[Tensor], tuple[Tensor, Callable[[], Tensor]]], like: Tensor
) -> Tensor:
    """function(histograms [2, bins + 1]) in the dtype that `like` is computed in."""
    value, derivative = function(histograms.detach())
    needed = histograms.requires_grad and torch.is_grad_enabled()
    total = attach(value, (histograms,), (derivative() if needed else None,))
    return total.to(accumulation_dtype(like.dtype))


def histogram_values(
    queries: Tensor,
    start: Tensor,
    count: Tensor,
    function: str,
    counting: Counting,
    weights: Tensor | None = None,
) -> Tensor:
    """A named function of the histograms of each query of `queries` with themselves: [Q] float32 or float64.

    weights: [Q] or [], constant; with them, the sum of weights x values, whose gradient is found in the same walk.
    The other arguments are those of `histograms_of`, for histograms per query. Differentiable once.
    """
    share, own = _own(queries, counting, None)
    options = _options(queries, start, count, counting, own, None, function)
    inputs: Inputs = (queries, None)
    streamed = histogram_pass
    if counting.distance is not None:
        inputs, streamed = (queries, None, *parameters_of(counting.distance)), _called
    if weights is None:
        (values,) = streamed(inputs, *options)
        return values if share is None else share.gather(values)
    weights = weights[own] if weights.ndim else weights
    (values,), gradients = streamed.once(inputs, (weights,), *options)
    total = torch.dot(values, weights) if weights.ndim else values.sum() * weights
    total = attach(total, inputs, gradients)
    return total if share is None else share.total(total)


HistogramFunction = Callable[[Tensor, Tensor], tuple[Tensor, Callable[[], Tensor]]]
_functions: dict[str, HistogramFunction] = {}


def register_histogram_function(name: str, function: HistogramFunction) -> None:
    """Let losses name a function of per-query histograms, for `histogram_values`.

    function: from the histograms [q, 2, bins + 1] float64, positives first, and the counts [q] of some queries to
    their values [q] and a function that gives the derivative of each by its histograms, [q, 2, bins + 1].
    """
    _functions[name] = function


def _own(queries: Tensor, counting: Counting, position: Tensor | None) -> tuple[Share | None, slice]:
    """What this process computes, and its queries."""
    share = own_share(queries.shape[0], triangular=position is None and not counting.per_query)
    return share, slice(0, queries.shape[0]) if share is None else share.rows


def _options(
    queries: Tensor,
    start: Tensor,
    count: Tensor,
    counting: Counting,
    own: slice,
    position: Tensor | None,
    function: str = "",
) -> tuple[object, ...]:
    options = (
        counting.order,
        start[own],
        count[own],
        None if position is None else position[own],
        counting.bins,
        counting.per_query,
        counting.descending,
        counting.normalize,
        function,
        own.start,
        own.stop,
        budget_bytes(queries.device, counting.memory_budget),
        selected_backend(),
        counting.products or "",
    )
    return options if counting.distance is None else (*options, counting.distance)


def running_sum(values: Tensor) -> Tensor:
    """The inclusive running sums along the last dimension, by matrix products with blocks of ones.

    torch.cumsum refuses to run on CUDA under torch.use_deterministic_algorithms.
    """
    n, width = values.shape[-1], 128
    ones = torch.ones(min(n, width), min(n, width), dtype=values.dtype, device=values.device).triu()
    if n <= width:
        return values @ ones
    padded = torch.nn.functional.pad(values, (0, -n % width))
    within = padded.view(*values.shape[:-1], -1, width) @ ones
    before = running_sum(within[..., -1]) - within[..., -1]
    return (within + before[..., None]).flatten(-2)[..., :n]


def key_ranges(start: Tensor, count: Tensor, position: Tensor, n_keys: int, per_query: bool) -> Tensor:
    """[Q, 4] int64: the first positive of each query and the key behind the last, the same of the hidden keys."""
    is_query, zero = count > 0, torch.zeros_like(start)
    hidden_start = torch.where(is_query, position, 0) if per_query else zero
    hidden_stop = torch.where(is_query, position + 1, n_keys)
    return torch.stack([start, start + count, hidden_start, hidden_stop], 1)


class Tables:
    """Numbers of pairs and sums of fractions by bin, and what becomes of them: a value at each node.

    counts [G, 2, bins + 2] int64 and fractions, the same in `widest`, are what the backends add to; the last entry is
    the number of NaN.
    """

    def __init__(self, n_tables: int, bins: int, dtype: torch.dtype, device: torch.device) -> None:
        self.counts = torch.zeros(n_tables, 2, bins + 2, dtype=torch.int64, device=device)
        self.fractions = torch.zeros(n_tables, 2, bins + 2, dtype=widest(dtype, device), device=device)

    def histograms(self) -> Tensor:
        """[G, 2, bins + 1]: node r has what the fractions leave of bin r, and the fractions of bin r - 1."""
        fractions = self.fractions[..., :-1]
        histograms = self.counts[..., :-1] - fractions
        histograms[..., 1:] += fractions[..., :-1]
        return histograms.masked_fill_(self.counts[..., -1:] > 0, torch.nan)


def slope_tables(grad: Tensor, descending: bool, dtype: torch.dtype) -> Tensor:
    """The derivative of every bin by the similarity, [G, 2, bins]; grad: of the histograms, [G, 2, bins + 1]."""
    bins = grad.shape[-1] - 1
    return (grad.diff(dim=-1) * (-bins / 2 if descending else bins / 2)).to(dtype).contiguous()


# Of fewer pairs on a CPU, what skips half of them costs more than it saves.
PAIRS_PER_TILE = 1 << 16


class Tile(NamedTuple):
    """Queries `rows` of this process with the keys from `first_key` on; ranges: their rows in the table of ranges."""

    rows: slice
    first_key: int
    ranges: slice


def _tiles(
    n_rows: int, first: int, n_keys: int, itemsize: int, device: torch.device, budget: int, skips: bool
) -> list[Tile]:
    """skips: a query is paired with the keys behind itself only; query 0 is key `first`."""
    size = rows_per_block(n_rows, n_keys, itemsize, device, budget)
    if skips and device.type == "cpu":
        # What a panel skips is decided by its first row. Launches, which a GPU would have more of, cost little here.
        size = min(size, max(MIN_ROWS, n_rows // 8, PAIRS_PER_TILE // max(1, n_keys)))
    tiles = []
    for begin in range(0, n_rows, size):
        # Kernels rely on the alignment of the first score of a row.
        first_key = (first + begin) // ROW_STRIDE_UNIT * ROW_STRIDE_UNIT if skips else 0
        rows = slice(begin, min(begin + size, n_rows))
        tiles.append(Tile(rows, first_key, rows))
    return tiles


def _run(
    inputs: Inputs,
    given: Any,
    needs: Sequence[bool],
    order: Tensor | None,
    start: Tensor,
    count: Tensor,
    position: Tensor | None,
    bins: int,
    per_query: bool,
    descending: bool,
    normalize: bool,
    function: str,
    first: int,
    last: int,
    budget: int,
    backend: str,
    products: str,
    distance: Callable[..., Tensor] | None = None,
) -> tuple[Tensor, ...]:
    """Histograms [2, bins + 1] or [Q, 2, bins + 1] of the queries first .. last - 1, or the values of `function` [Q].

    inputs: queries, keys or None, and the parameters of the distance. start, count, position: of those queries.
    """
    queries, keys = inputs[:2]
    assert queries is not None
    n_keys, dtype = (queries if keys is None else keys).shape[0], accumulation_dtype(queries.dtype)
    skips = position is None and not per_query
    tiles = _tiles(last - first, first, n_keys, dtype.itemsize, queries.device, budget, skips)
    own = slice(first, last)
    if position is None:
        position = torch.arange(first, last, device=start.device)
    ranges = key_ranges(start, count, position, n_keys, per_query)
    source: Products | Called
    if distance is None:
        rows, others = Rows(queries, order, normalize), None if keys is None else Rows(keys, None, normalize)
        height = max((tile.rows.stop - tile.rows.start for tile in tiles), default=0)
        source = Products(rows, others, 1.0, height, own, needs, products, backend)
    else:
        in_order = queries if order is None else queries.index_select(0, order)
        source = Called((in_order, *inputs[1:]), distance_of_rows(distance, own), needs)
    counter = _Counter(source, ranges, bins, descending, dtype, queries.device, backend)
    result = counter.per_query(tiles, count, given, function) if per_query else counter.of_all(tiles, given)
    gradients = list(source.gradients())
    if distance is not None and order is not None and needs[0]:
        gradients[0] = torch.empty_like(gradients[0]).index_copy_(0, order, gradients[0])
    return result, *gradients


class _Counter:
    """Counts the similarities of a source tile by tile, and takes the gradients of histograms back to it."""

    def __init__(
        self,
        source: Products | Called,
        ranges: Tensor,
        bins: int,
        descending: bool,
        dtype: torch.dtype,
        device: torch.device,
        backend: str,
    ) -> None:
        self.source, self.ranges, self.bins, self.descending = source, ranges, bins, descending
        self.dtype, self.device = dtype, device
        self.module = backend_module(backend, device)

    def of_all(self, tiles: Sequence[Tile], given: Any) -> Tensor:
        """One histogram, [2, bins + 1]."""
        tables = Tables(1, self.bins, self.dtype, self.device)
        scores = None
        if callable(given) or not given:
            for tile in tiles:
                scores = self._count(tile, tables)
        histograms = tables.histograms()[0]
        if callable(given):
            given = given([histograms])
        if given:
            slopes = slope_tables(given[0][None], self.descending, self.dtype)
            for tile in tiles:
                # The scores of a tile that is the only one are still there.
                if scores is None or len(tiles) > 1:
                    scores, self.kept = self.source.scores(tile.rows, tile.first_key), None
                self._add(tile, scores, slopes)
        return histograms

    def per_query(
        self, tiles: Sequence[Tile], count: Tensor, given: Sequence[Tensor], function: str
    ) -> Tensor:
        """A histogram for each query [Q, 2, bins + 1], or the values of the function [Q]."""
        results = []
        for tile in tiles:
            if given and not function:
                scores, self.kept = self.source.scores(tile.rows, tile.first_key), None
                grad = given[0][tile.rows]
            else:
                tables = Tables(tile.rows.stop - tile.rows.start, self.bins, self.dtype, self.device)
                scores = self._count(tile, tables)
                result = tables.histograms()
                if function:
                    result, derivative = _functions[function](result, count[tile.rows])
                    result = result.to(self.dtype)
                    if given:
                        weights = given[0][tile.rows, None, None] if given[0].ndim else given[0]
                        grad = derivative() * weights
                results.append(result)
            if given:
                self._add(tile, scores, slope_tables(grad, self.descending, self.dtype))
        if len(results) == 1:
            return results[0]
        shape = (0,) if function or given else (0, 2, self.bins + 1)
        dtype = self.dtype if function else widest(self.dtype, self.device)
        return torch.cat(results) if results else torch.empty(shape, dtype=dtype, device=self.device)

    def _count(self, tile: Tile, tables: "Tables") -> Tensor:
        scores = self.source.scores(tile.rows, tile.first_key)
        self.kept = self.module.soft_histogram_forward(
            scores, self.ranges[tile.ranges], tile.first_key, self.descending, tables.counts, tables.fractions
        )
        return scores

    def _add(self, tile: Tile, scores: Tensor, slopes: Tensor) -> None:
        grad = self.source.gradient(tile.rows, tile.first_key)
        self.module.soft_histogram_backward(
            scores,
            self.ranges[tile.ranges],
            tile.first_key,
            self.descending,
            slopes,
            grad,
            **kept_for(self.kept),
        )
        self.source.add(tile.rows, grad, tile.first_key)


def _fake(
    inputs: Inputs,
    given: Sequence[Tensor],
    order: Tensor | None,
    start: Tensor,
    count: Tensor,
    position: Tensor | None,
    bins: int,
    per_query: bool,
    descending: bool,
    normalize: bool,
    function: str,
    *_: Any,
) -> tuple[Tensor]:
    assert inputs[0] is not None
    if function:
        return (inputs[0].new_empty(count.shape[0], dtype=accumulation_dtype(inputs[0].dtype)),)
    shape: tuple[int, ...] = (2, bins + 1)
    if per_query:
        shape = (0,) if given else (count.shape[0], *shape)
    return (inputs[0].new_empty(shape, dtype=widest(inputs[0].dtype, inputs[0].device)),)


histogram_pass = Pass(
    "histogram",
    "Tensor? order, Tensor start, Tensor count, Tensor? position, int bins, bool per_query, bool descending, "
    "bool normalize, str function, SymInt first, SymInt last, int budget, str backend, str products",
    _run,
    _fake,
    n_results=1,
)


def pair_histogram(
    embeddings: Tensor,
    left: Tensor,
    right: Tensor,
    n_positives: int,
    bins: int,
    *,
    distance: Distance | None = None,
    normalize: bool = False,
    memory_budget: int | None = None,
) -> SoftHistograms:
    """The histograms of listed pairs over the nodes of `soft_histogram`: of the first `n_positives`, and of the rest.

    Args:
        embeddings: [N, D], any floating dtype.
        left, right: [M] int64, the rows of each pair; ascending in `left` within each of the two parts.
        distance: None for the dot product.
        normalize: divide each row by its Euclidean norm first, for the dot product.
        bins, memory_budget, result: as for `soft_histogram`.

    Time O(M D), with a distance O(N^2 D). Memory O(budget + N D + M). Deterministic.
    """
    budget = budget_bytes(embeddings.device, memory_budget)
    rows = upcast(embeddings)
    if normalize:
        rows = F.normalize(rows, dim=1)
    inputs = (rows, *parameters_of(distance))
    (histograms,) = _listed(inputs, left, right, n_positives, bins, distance, budget, selected_backend())
    return SoftHistograms(*histograms)


def _run_listed(
    inputs: Inputs,
    given: Sequence[Tensor],
    needs: Sequence[bool],
    left: Tensor,
    right: Tensor,
    n_positives: int,
    bins: int,
    distance: Distance | None,
    budget: int,
    backend: str,
) -> tuple[Tensor, ...]:
    """[2, bins + 1], and the gradients of embeddings and parameters."""
    embeddings = inputs[0]
    assert embeddings is not None
    ranges = torch.tensor([[0, n_positives, 0, 0]], device=embeddings.device)
    if distance is None:
        n_pairs, width = left.shape[0], embeddings.shape[1]
        size = rows_per_block(n_pairs, width, embeddings.itemsize, embeddings.device, budget)
        tiles = [Tile(slice(k, min(k + size, n_pairs)), k, slice(0, 1)) for k in range(0, n_pairs, size)]
        function = partial(_dot_products, left, right)
    else:
        blocks = list(_row_blocks(embeddings, left, n_positives, budget))
        tiles = [Tile(pairs, pairs.start, slice(0, 1)) for pairs, _ in blocks]
        function = partial(
            _listed_distances, distance, left, right, {pairs.start: rows for pairs, rows in blocks}
        )
    source = Called(inputs, function, needs)
    counter = _Counter(source, ranges, bins, False, embeddings.dtype, embeddings.device, backend)
    return counter.of_all(tiles, given), *source.gradients()


def _dot_products(
    left: Tensor, right: Tensor, inputs: Sequence[Tensor], pairs: slice, first_pair: int
) -> Tensor:
    # The gradient of F.embedding is summed in a fixed order, that of an index is not.
    return (F.embedding(left[pairs], inputs[0]) * F.embedding(right[pairs], inputs[0])).sum(1)[None]


def _row_blocks(
    embeddings: Tensor, left: Tensor, n_positives: int, budget: int
) -> Iterator[tuple[slice, slice]]:
    """Pairs and the rows of their left sides: a distance gives whole matrices only, those of rows with pairs."""
    n = embeddings.shape[0]
    size = rows_per_block(n, n, embeddings.itemsize, embeddings.device, budget)
    edges = torch.arange(0, n + size, size, device=left.device)
    for offset, part in ((0, left[:n_positives]), (n_positives, left[n_positives:])):
        bounds = (torch.searchsorted(part.contiguous(), edges) + offset).tolist()
        for index, (begin, end) in enumerate(pairwise(bounds)):
            if begin < end:
                yield slice(begin, end), slice(index * size, min((index + 1) * size, n))


def _listed_distances(
    distance: Distance,
    left: Tensor,
    right: Tensor,
    rows_of: dict[int, slice],
    inputs: Sequence[Tensor],
    pairs: slice,
    first_pair: int,
) -> Tensor:
    embeddings, *parameters = inputs
    rows = rows_of[first_pair]
    matrix = call_with_parameters(distance, parameters, embeddings[rows], embeddings)
    matrix = checked(matrix, rows.stop - rows.start, embeddings.shape[0])
    return matrix[left[pairs] - rows.start, right[pairs]][None]


_called = OutsideGraph(_run, 1)
_listed = OutsideGraph(_run_listed, 1)
