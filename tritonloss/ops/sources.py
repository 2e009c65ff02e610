"""Where the scores of a pass come from: products of rows, or a matrix that the caller has."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tritonloss.backends import backend_module, eager
from tritonloss.distances import call_with_parameters
from tritonloss.ops.products import (
    ALL,
    Operand,
    add_key_gradient,
    add_query_gradient,
    gradient_terms,
    prepare,
    resolve_mode,
    row_gradient,
    scores,
    symmetric_gradient,
)
from tritonloss.ops.streaming import empty_scores
from tritonloss.types import accumulation_dtype, upcast


class Rows:
    """Rows [N, D] as an operand of products: sorted, normalised where asked; and the way back.

    order: [N] int64, the original row of each row here; None for their own order. dtype: float32 or float64, that they
    are computed in where the other operand has another dtype.
    """

    def __init__(self, rows: Tensor, order: Tensor | None = None, normalize: bool = False) -> None:
        self.rows = rows if order is None else rows.index_select(0, order)
        self.order, self.normalize, self.dtype = order, normalize, accumulation_dtype(rows.dtype)

    def prepare(self, dtype: torch.dtype, mode: str, passes: Any) -> None:
        """Make the operand, of rows of this dtype."""
        self.operand = prepare(self.rows.to(dtype), normalize=self.normalize, mode=mode, passes=passes)

    def panel(self, rows: slice) -> tuple[Operand, slice]:
        """An operand that holds these rows, and where."""
        return self.operand, rows

    def add(self, total: Tensor, rows: slice, terms: tuple[Tensor, ...], *rest: Any) -> None:
        """Add the gradient of the last panel; terms and the rest: as for `add_query_gradient`."""
        keys, scale, columns = rest
        add_query_gradient(terms, keys, total[rows], scale, columns)

    def gradient(self, total: Tensor) -> Tensor:
        """From the sum of gradient products, whose memory is overwritten, to the gradient of the rows as given."""
        grad = row_gradient(total, self.operand, total.dtype)
        return grad if self.order is None else torch.empty_like(grad).index_copy_(0, self.order, grad)


class PanelRows:
    """The same for rows of which only one panel is prepared at a time, so that no copy of all exists."""

    def __init__(self, rows: Tensor, dtype: torch.dtype, normalize: bool) -> None:
        self.rows, self.dtype, self.normalize = rows, dtype, normalize

    def prepare(self, dtype: torch.dtype, mode: str, passes: Any) -> None:
        self.options = dtype, mode, passes

    def panel(self, rows: slice) -> tuple[Operand, slice]:
        dtype, mode, passes = self.options
        self.last = prepare(self.rows[rows].to(dtype), normalize=self.normalize, mode=mode, passes=passes)
        return self.last, ALL

    def add(self, total: Tensor, rows: slice, terms: tuple[Tensor, ...], *rest: Any) -> None:
        keys, scale, columns = rest
        out = total[rows]
        add_query_gradient(terms, keys, out, scale, columns)
        row_gradient(out, self.last, out.dtype)

    def gradient(self, total: Tensor) -> Tensor:
        return total


class Products:
    """scale * queries @ keys.T, a panel of queries at a time, and the gradients of both operands.

    keys: None where the queries meet themselves; then both gradients are
    one. own: the queries that panels count from. needs: whether `add` is to be called for queries and for keys.
    products, backend: options of the call; see `resolve_mode` and `backend_module`.
    """

    def __init__(
        self,
        queries: Rows | PanelRows,
        keys: Rows | None,
        scale: float,
        height: int,
        own: slice,
        needs: Sequence[bool],
        products: str = "",
        backend: str = "auto",
    ) -> None:
        self.queries, self.keys, self.scale, self.own = queries, keys, scale, own
        self.need_queries, self.need_keys = needs[0], keys is not None and needs[1]
        source = queries if keys is None else keys
        assert isinstance(source, Rows)
        self.source, given = source, source.rows
        dtype = given.dtype if queries.rows.dtype == given.dtype else queries.dtype
        mode = resolve_mode(products or None, dtype, given.device)
        passes = passes_of(backend, given.device) if mode == "split" else None
        for rows in (queries,) if keys is None else (queries, keys):
            rows.prepare(dtype, mode, passes)
        n_rows, n_keys = queries.rows.shape[0], given.shape[0]
        # Half of the product with a gradient is saved where its panel is the only one.
        self.is_whole = keys is None and own.start == 0 and own.stop == n_rows and height >= n_rows
        self.columns = given.new_empty(0, dtype=accumulation_dtype(dtype))
        self.scratch = empty_scores(height, n_keys, self.columns)
        self.scratch_grad = empty_scores(height if any(needs) else 0, n_keys, self.columns)
        self.total: Tensor | None = None
        self.total_keys = self.columns.new_zeros(given.shape) if self.need_keys else None

    def _panel(self, rows: slice) -> slice:
        return slice(self.own.start + rows.start, self.own.start + rows.stop)

    def scores(self, rows: slice, first_key: int = 0) -> Tensor:
        """[rows, N - first_key], in memory that the next panel takes."""
        self.left = self.queries.panel(self._panel(rows))
        out = self.scratch[: rows.stop - rows.start, first_key:]
        scores(*self.left, self.source.operand, self.scale, out, slice(first_key, None))
        return out

    def gradient(self, rows: slice, first_key: int = 0) -> Tensor:
        """Memory for the gradient of the scores of a panel."""
        return self.scratch_grad[: rows.stop - rows.start, first_key:]

    def add(self, rows: slice, grad: Tensor, first_key: int = 0) -> None:
        """Add what the gradient of the scores of the last panel gives to the gradients of the operands.

        The scores of the panel and `grad` may be overwritten.
        """
        right, columns = self.source.operand, slice(first_key, None)
        scratch = self.scratch[: grad.shape[0], : grad.shape[1]]
        if self.is_whole and not first_key:
            self.total = symmetric_gradient(grad, right, self.scale, scratch)
            return
        terms = gradient_terms(grad, *self.left, right, columns, scratch=scratch)
        if self.need_queries:
            if self.total is None:
                self.total = self._zeros()
            self.queries.add(self.total, self._panel(rows), terms, right, self.scale, columns)
        total = self.total if self.keys is None else self.total_keys
        if total is not None:
            add_key_gradient(terms, *self.left, total[first_key:], self.scale)

    def add_to_rows(self, grad: Tensor) -> None:
        """Add to the gradient of rows that meet themselves that of their values as scores see them, [N, D]."""
        if self.total is None:
            self.total = self._zeros()
        factor = self.source.operand.gradient_factor
        self.total += grad if factor is None else grad * factor[:, None]

    def _zeros(self) -> Tensor:
        return self.columns.new_zeros(self.queries.rows.shape)

    def gradients(self) -> tuple[Tensor, Tensor]:
        """Those of queries and keys as they were given; empty where not needed."""
        grad_queries, grad_keys = self.columns.new_empty(0), self.columns.new_empty(0)
        if self.need_queries:
            grad_queries = self.queries.gradient(self._zeros() if self.total is None else self.total)
        if self.keys is not None and self.total_keys is not None:
            grad_keys = self.keys.gradient(self.total_keys)
        return grad_queries, grad_keys


def passes_of(backend: str, device: torch.device) -> Any:
    """The module whose `weigh` and `split_in_two` a backend takes: plain torch where it has none of its own."""
    module = backend_module(backend, device)
    return module if hasattr(module, "split_in_two") else eager


class SortedMatrix:
    """The rows of a score matrix with permuted columns: the positives of a row first, in their order, then the rest.

    What is neither positive nor negative becomes -inf, of which every surrogate and its derivative are exactly 0. The
    scores are divided by `unit`. own: the rows that panels count from.
    """

    def __init__(
        self, scores: Tensor, masks: Sequence[Tensor], unit: float, height: int, own: slice, need: bool
    ) -> None:
        self.matrix, self.positives, self.negatives = (tensor[own] for tensor in (scores, *masks))
        self.unit, self.own = unit, own
        self.scratch = empty_scores(height, scores.shape[1], _upcast_like(scores))
        self.scratch_grad = empty_scores(height if need else 0, scores.shape[1], self.scratch)
        self.total = (
            torch.zeros(scores.shape, dtype=self.scratch.dtype, device=scores.device) if need else None
        )

    def _place(self, rows: slice) -> Tensor:
        """The new column of each column of the panel: a permutation of every row."""
        positive = self.positives[rows]
        rank = torch.cumsum(positive, 1)
        column = torch.arange(1, rank.shape[1] + 1, device=rank.device)
        return torch.where(positive, rank, column - rank + rank[:, -1:]).sub_(1)

    def scores(self, rows: slice) -> Tensor:
        """[rows, N], in memory that the next panel takes."""
        self.place = self._place(rows)
        unused = ~(self.positives[rows] | self.negatives[rows])
        values = (upcast(self.matrix[rows]) / self.unit).masked_fill_(unused, -torch.inf)
        return self.scratch[: values.shape[0]].scatter_(1, self.place, values)

    def gradient(self, rows: slice) -> Tensor:
        """Memory for the gradient of the scores of a panel."""
        return self.scratch_grad[: rows.stop - rows.start]

    def add(self, rows: slice, grad: Tensor) -> None:
        """Write the gradient of the last panel's part of the matrix."""
        assert self.total is not None
        torch.gather(grad, 1, self.place, out=self.total[self.own][rows])

    def gradients(self) -> tuple[Tensor, Tensor]:
        """That of the matrix, and nothing."""
        total = self.scratch.new_empty(0) if self.total is None else self.total.div_(self.unit)
        return total, self.scratch.new_empty(0)


class Called:
    """Scores that a function computes a tile at a time, any number of times; torch's autograd differentiates it.

    inputs: tensors, such as embeddings and the parameters of a distance; some may be None.
    function: called as function(inputs, rows, first_key) for the scores [rows, keys] of a tile.
    """

    def __init__(
        self, inputs: Sequence[Tensor | None], function: Callable[..., Tensor], needs: Sequence[bool]
    ) -> None:
        self.function, self.needs = function, needs
        self.leaves: list[Tensor | None] = []
        self.totals: list[Tensor | None] = []
        for tensor, need in zip(inputs, needs, strict=True):
            self.leaves.append(None if tensor is None else tensor.detach().requires_grad_(need))
            self.totals.append(torch.zeros_like(tensor) if need and tensor is not None else None)

    def scores(self, rows: slice, first_key: int = 0) -> Tensor:
        """[rows, keys], in memory of their own."""
        with torch.set_grad_enabled(any(self.needs)):
            self.matrix = self.function(self.leaves, rows, first_key)
        values = upcast(self.matrix.detach())
        return empty_scores(values.shape[0], values.shape[1], values).copy_(values)

    def gradient(self, rows: slice, first_key: int = 0) -> Tensor:
        """Memory for the gradient of the scores of the last tile."""
        n_rows, n_columns = self.matrix.shape
        return empty_scores(n_rows, n_columns, upcast(self.matrix.detach()))

    def add(self, rows: slice, grad: Tensor, first_key: int = 0) -> None:
        """Add what the gradient of the scores of the last tile gives to the gradients of the inputs."""
        wanted = [leaf for leaf in self.leaves if leaf is not None and leaf.requires_grad]
        # The backward pass may run inside a user's autocast.
        with torch.autocast(grad.device.type, enabled=False):
            found = torch.autograd.grad(self.matrix, wanted, grad.to(self.matrix.dtype), allow_unused=True)
        for total, part in zip([total for total in self.totals if total is not None], found, strict=True):
            if part is not None:
                total += part

    def gradients(self) -> tuple[Tensor, ...]:
        """Those of all inputs; empty where not needed."""
        return tuple(torch.empty(0, device="cpu") if total is None else total for total in self.totals)


def distance_of_rows(distance: Callable[..., Tensor], own: slice) -> Callable[..., Tensor]:
    """For `Called`: the distances of the queries `own` to keys; inputs: embeddings, None or keys, parameters."""

    def function(inputs: Sequence[Any], rows: slice, first_key: int) -> Tensor:
        queries, keys, *parameters = inputs
        left = queries[own.start + rows.start : own.start + rows.stop]
        right = (queries if keys is None else keys)[first_key:]
        return checked(call_with_parameters(distance, parameters, left, right), left.shape[0], right.shape[0])

    return function


def checked(matrix: Tensor, n_rows: int, n_columns: int) -> Tensor:
    """What a distance returned, if it has the shape it must have."""
    if matrix.shape != (n_rows, n_columns):
        raise ValueError(f"distance must return shape {[n_rows, n_columns]}, got {list(matrix.shape)}")
    return matrix


def _upcast_like(tensor: Tensor) -> Tensor:
    return tensor.new_empty(0, dtype=accumulation_dtype(tensor.dtype))
