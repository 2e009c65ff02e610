"""Where the scores of a pass come from: products of rows, or a matrix that the caller has."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tritonloss.distances import call_with_parameters
from tritonloss.ops.streaming import empty_scores
from tritonloss.types import accumulation_dtype, upcast

# Below it a norm is replaced by it, as torch.nn.functional.normalize does.
LEAST_NORM = 1e-12
# Rows of a transpose that is added as it is: what its strides touch is still in the first caches.
MAX_STRIDED = 128


class Rows:
    """Rows [N, D] as an operand of products: sorted, in float32 or float64, normalised where asked; and the way back.

    order: [N] int64, the original row of each row here; None for their own order.
    """

    def __init__(self, rows: Tensor, order: Tensor | None = None, normalize: bool = False) -> None:
        self.order, self.norm = order, None
        values = upcast(rows if order is None else rows.index_select(0, order))
        if normalize:
            norm = torch.linalg.vector_norm(values, dim=1, keepdim=True)
            self.is_short = norm < LEAST_NORM
            self.norm = norm.clamp_(min=LEAST_NORM)
            values = values / self.norm
        self.values = values

    @property
    def n_rows(self) -> int:
        return self.values.shape[0]

    def panel(self, rows: slice) -> Tensor:
        return self.values[rows]

    def zeros(self) -> Tensor:
        return torch.zeros_like(self.values)

    def add(self, total: Tensor, rows: slice, grad: Tensor, right: Tensor, scale: float) -> None:
        """total[rows] += scale * grad @ right."""
        total[rows].addmm_(grad, right, alpha=scale)

    def gradient(self, grad: Tensor) -> Tensor:
        """From the gradient of `values`, whose memory is overwritten, to that of the rows as they were given."""
        if self.norm is not None:
            # Along the row itself the normalised row does not change, unless its norm was replaced by a constant.
            along = torch.bmm(grad[:, None], self.values[:, :, None])[:, 0].masked_fill_(self.is_short, 0)
            grad.addcmul_(self.values, along, value=-1).div_(self.norm)
        if self.order is None:
            return grad
        return torch.empty_like(grad).index_copy_(0, self.order, grad)


class PanelRows:
    """The same for rows of which only one panel is prepared at a time, so that no copy of all exists."""

    def __init__(self, rows: Tensor, dtype: torch.dtype, normalize: bool) -> None:
        self.rows, self.dtype, self.normalize = rows, dtype, normalize

    @property
    def n_rows(self) -> int:
        return self.rows.shape[0]

    def panel(self, rows: slice) -> Tensor:
        self.last = Rows(self.rows[rows].to(self.dtype), None, self.normalize)
        return self.last.values

    def zeros(self) -> Tensor:
        return torch.zeros_like(self.rows, dtype=self.dtype, memory_format=torch.contiguous_format)

    def add(self, total: Tensor, rows: slice, grad: Tensor, right: Tensor, scale: float) -> None:
        """Write the gradient of the last panel."""
        out = total[rows]
        torch.addmm(out, grad, right, beta=0, alpha=scale, out=out)
        self.last.gradient(out)

    def gradient(self, total: Tensor) -> Tensor:
        return total


class Products:
    """scale * queries @ keys.T, a panel of queries at a time, and the gradients of both operands.

    keys: None where the queries meet themselves; then both gradients are
    one. own: the queries that panels count from. needs: whether `add` is to be called for queries and for keys.
    """

    def __init__(
        self,
        queries: "Rows | PanelRows",
        keys: Rows | None,
        scale: float,
        height: int,
        own: slice,
        needs: Sequence[bool],
    ) -> None:
        self.queries, self.keys, self.scale, self.own = queries, keys, scale, own
        self.need_queries, self.need_keys = needs[0], keys is not None and needs[1]
        source = queries if keys is None else keys
        assert isinstance(source, Rows)
        self.columns = source.values
        n_rows, n_keys = queries.n_rows, self.columns.shape[0]
        # Half of the product with a gradient is saved where its panel is the only one.
        self.is_whole = keys is None and own.start == 0 and own.stop == n_rows and height >= n_rows
        self.scratch = empty_scores(height, n_keys, self.columns)
        self.scratch_grad = empty_scores(height if any(needs) else 0, n_keys, self.columns)
        self.total: Tensor | None = None
        self.total_keys = torch.zeros_like(self.columns) if self.need_keys else None

    def _panel(self, rows: slice) -> slice:
        return slice(self.own.start + rows.start, self.own.start + rows.stop)

    def scores(self, rows: slice, first_key: int = 0) -> Tensor:
        """[rows, N - first_key], in memory that the next panel takes."""
        self.left = self.queries.panel(self._panel(rows))
        out = self.scratch[: self.left.shape[0], first_key:]
        # beta = 0: what is in the memory is not read.
        return torch.addmm(out, self.left, self.columns[first_key:].T, beta=0, alpha=self.scale, out=out)

    def gradient(self, rows: slice, first_key: int = 0) -> Tensor:
        """Memory for the gradient of the scores of a panel."""
        return self.scratch_grad[: rows.stop - rows.start, first_key:]

    def add(self, rows: slice, grad: Tensor, first_key: int = 0) -> None:
        """Add what the gradient of the scores of the last panel gives to the gradients of the operands."""
        left, right = self.left, self.columns[first_key:]
        if self.is_whole and not first_key:
            self.total = torch.addmm(left, _plus_transpose(grad), left, beta=0, alpha=self.scale)
            return
        if self.need_queries:
            if self.total is None:
                self.total = self.queries.zeros()
            self.queries.add(self.total, self._panel(rows), grad, right, self.scale)
        total = self.total if self.keys is None else self.total_keys
        if total is not None:
            total[first_key:].addmm_(grad.T, left, alpha=self.scale)

    def gradients(self) -> tuple[Tensor, Tensor]:
        """Those of queries and keys as they were given; empty where not needed."""
        grad_queries, grad_keys = self.columns.new_empty(0), self.columns.new_empty(0)
        if self.need_queries:
            grad_queries = self.queries.gradient(self.queries.zeros() if self.total is None else self.total)
        if self.keys is not None and self.total_keys is not None:
            grad_keys = self.keys.gradient(self.total_keys)
        return grad_queries, grad_keys


def _plus_transpose(matrix: Tensor) -> Tensor:
    """matrix + matrix.T, in memory of its own."""
    if matrix.device.type == "cpu" and matrix.shape[0] > MAX_STRIDED:
        # On a CPU torch copies a transpose by tiles, but adds one by strides.
        return matrix.T.clone(memory_format=torch.contiguous_format).add_(matrix)
    return matrix + matrix.T


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
        return tuple(torch.empty(0) if total is None else total for total in self.totals)


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
