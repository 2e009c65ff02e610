"""`proxy_logsumexp`: for every proxy, the soft maximum of the exponents of its own class and of the other classes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritonloss.backends import backend_module, selected_backend
from tritonloss.distances import Distance, call_with_parameters, parameters_of
from tritonloss.ops.class_labels import class_labels
from tritonloss.ops.library import Inputs, OutsideGraph, Pass, attach, kept_for
from tritonloss.ops.shares import own_share
from tritonloss.ops.sources import Called, PanelRows, Products, Rows, checked
from tritonloss.ops.streaming import budget_bytes, rows_per_block
from tritonloss.types import ProductMode, accumulation_dtype


class ProxyLogSumExp(NamedTuple):
    """positive, negative: [C], at least 0; 0 where a proxy has no embedding on that side."""

    positive: Tensor
    negative: Tensor


def proxy_logsumexp(
    embeddings: Tensor,
    proxies: Tensor,
    labels: Tensor,
    *,
    weights: Tensor | None = None,
    alpha: float = 32.0,
    margin: float = 0.1,
    normalize_proxies: bool = False,
    distance: Distance | None = None,
    check_label_range: bool = True,
    memory_budget: int | None = None,
    products: ProductMode | None = None,
) -> ProxyLogSumExp:
    """Two log-sum-exps for every proxy p, s_xp = embeddings[x] . proxies[p] its similarity to embedding x:

        positive[p] = ln(1 + sum over x of class p of     w_x e^(-alpha (s_xp - margin)))
        negative[p] = ln(1 + sum over x of other classes of w_x e^(alpha (s_xp + margin)))

    Exact for any alpha, margin and s, however large the exponents. The similarities are walked in blocks of proxies.

    Args:
        embeddings: [N, D], any floating dtype, contiguous or not; everything is computed in float32, or in float64 for
            float64.
        proxies: [C, D] of any floating dtype on the same device; proxy p is that of class p.
        labels: [N], any integer dtype or bool.
        weights: [N] floating, >= 0, constants; None for 1. A weight of 0 leaves the embedding out of all sums.
        alpha, margin: as in the equations.
        normalize_proxies: divide each proxy by its Euclidean norm (by 1e-12 if that is larger), block by block: no
            normalised copy of [C, D] exists.
        distance: called as `distance(embeddings, block of proxies)` for s in place of the dot product, and again in
            the backward pass. Where smaller is closer (`is_inverted` False), s is the negative distance and the margin
            changes its sign. Not with `normalize_proxies`. torch.compile leaves its graph here.
        check_label_range: compare the labels with C, which costs one host sync. Without it, a label outside
            0 .. C - 1 is of no proxy's class.
        memory_budget: what the similarities may take; default TRITONLOSS_MEMORY_BUDGET, else 256 MiB on CPU, a
            sixteenth of the device on CUDA.
        products: how rows are multiplied, "auto", "ieee" or "split", see `tritonloss.ops.products`; default
            TRITONLOSS_PRODUCTS, else "auto".

    Returns:
        ProxyLogSumExp(positive [C], negative [C]) in the dtype of the embeddings; differentiable once, in embeddings
        and proxies. A side that needs no gradient costs none.

    Time O(N C D). Memory O(budget + C + N D) beside the gradients; with a `distance`, what it allocates for a block.

    Raises:
        ValueError: a label outside 0 .. C - 1, a budget below 1, both `distance` and `normalize_proxies`.
        RuntimeError: the chosen backend cannot serve the device; a second derivative is asked for.
    """
    if distance is not None and normalize_proxies:
        raise ValueError("normalize_proxies is for the dot product: expected False with a distance, got True")
    classes = class_labels(labels, proxies.shape[0], check=check_label_range)
    repulsion = Repulsion(alpha, margin, False, normalize_proxies, distance, memory_budget, products)
    return proxy_sums(embeddings, proxies, classes, weights, repulsion)


@dataclass(frozen=True)
class Repulsion:
    """How embeddings are compared with proxies; the options of `proxy_logsumexp`.

    normalize_embeddings: divide each embedding by its Euclidean norm (by 1e-12 if that is larger) within the pass.
    """

    alpha: float
    margin: float
    normalize_embeddings: bool = False
    normalize_proxies: bool = False
    distance: Distance | None = None
    memory_budget: int | None = None
    products: ProductMode | None = None

    def options(
        self, embeddings: Tensor, own: slice, classes: Tensor, weights: Tensor | None
    ) -> tuple[object, ...]:
        """The options of the pass for the proxies `own`."""
        is_inverted = self.distance is None or self.distance.is_inverted
        constant = self.alpha * self.margin * (1 if is_inverted else -1)
        dtype = accumulation_dtype(embeddings.dtype)
        # What is added to the exponents of each embedding: -inf for a weight of 0.
        if weights is None:
            offsets = embeddings.new_full((embeddings.shape[0],), constant, dtype=dtype)
        else:
            offsets = weights.detach().to(dtype).log() + constant
        options = (
            classes.to(torch.int32),
            offsets,
            float(self.alpha),
            self.normalize_embeddings,
            self.normalize_proxies,
            own.start,
            own.stop,
            budget_bytes(embeddings.device, self.memory_budget),
            selected_backend(),
            self.products or "",
        )
        return options if self.distance is None else (*options, self.distance)


def proxy_sums(
    embeddings: Tensor, proxies: Tensor, classes: Tensor, weights: Tensor | None, repulsion: Repulsion
) -> ProxyLogSumExp:
    """`proxy_logsumexp` with all options; classes: [N] int64, -1 for none."""
    share, own = _own(proxies)
    inputs, streamed = _inputs(embeddings, proxies, repulsion)
    sums = streamed(inputs, *repulsion.options(embeddings, own, classes, weights))
    return ProxyLogSumExp(*(sums if share is None else map(share.gather, sums)))


def proxy_total(
    embeddings: Tensor,
    proxies: Tensor,
    classes: Tensor,
    weights: Tensor | None,
    repulsion: Repulsion,
    factors: tuple[Tensor, Tensor],
) -> Tensor:
    """The sum of positive x factors[0] and negative x factors[1] over the proxies, whose gradient one walk gives.

    factors: [C] each, constant, in the dtype of the sums. The other arguments are those of `proxy_sums`.
    """
    share, own = _own(proxies)
    inputs, streamed = _inputs(embeddings, proxies, repulsion)
    given = tuple(factor[own] for factor in factors)
    sums, gradients = streamed.once(inputs, given, *repulsion.options(embeddings, own, classes, weights))
    total = attach(torch.dot(sums[0], given[0]) + torch.dot(sums[1], given[1]), inputs, gradients)
    return total if share is None else share.total(total)


def _own(proxies: Tensor) -> tuple[Any, slice]:
    """What this process computes, and its proxies."""
    share = own_share(proxies.shape[0])
    return share, slice(0, proxies.shape[0]) if share is None else share.rows


def _inputs(embeddings: Tensor, proxies: Tensor, repulsion: Repulsion) -> tuple[Inputs, Pass]:
    if repulsion.distance is None:
        return (proxies, embeddings), _logsumexp
    return (proxies, embeddings, *parameters_of(repulsion.distance)), _called


def _run(
    inputs: Inputs,
    given: Sequence[Tensor],
    needs: Sequence[bool],
    classes: Tensor,
    offsets: Tensor,
    alpha: float,
    normalize_embeddings: bool,
    normalize_proxies: bool,
    first: int,
    last: int,
    budget: int,
    backend: str,
    products: str,
    distance: Distance | None = None,
) -> tuple[Tensor, ...]:
    """positive and negative of the proxies first .. last - 1.

    inputs: proxies, embeddings, and the parameters of the distance.
    """
    proxies, embeddings = inputs[:2]
    assert proxies is not None
    assert embeddings is not None
    n_proxies, n_columns, device = last - first, embeddings.shape[0], embeddings.device
    size = rows_per_block(n_proxies, n_columns, offsets.itemsize, device, budget)
    own = slice(first, last)
    source: Products | Called
    if distance is None:
        rows = PanelRows(proxies, offsets.dtype, normalize_proxies)
        keys = Rows(embeddings, None, normalize_embeddings)
        source = Products(rows, keys, alpha, size, own, needs, products, backend)
    else:
        factor = alpha if distance.is_inverted else -alpha
        source = Called(inputs, _distances(distance, own, offsets.dtype, factor), needs)
    positive, negative = offsets.new_zeros(2, n_proxies).unbind()
    module = backend_module(backend, device)
    for begin in range(0, n_proxies if n_columns else 0, size):
        panel = slice(begin, min(begin + size, n_proxies))
        scores = source.scores(panel)
        sums = first + begin, classes, offsets, positive[panel], negative[panel]
        kept = module.proxy_logsumexp_forward(scores, *sums)
        if given:
            grad = source.gradient(panel)
            upstream = given[0][panel], given[1][panel]
            module.proxy_logsumexp_backward(scores, *sums, *upstream, grad, **kept_for(kept))
            source.add(panel, grad)
    # An operator returns no views.
    return positive.clone(), negative.clone(), *source.gradients()


def _distances(distance: Distance, own: slice, dtype: torch.dtype, factor: float) -> Callable[..., Tensor]:
    def function(inputs: Sequence[Tensor], panel: slice, first_key: int) -> Tensor:
        proxies, embeddings, *parameters = inputs
        rows = proxies[own.start + panel.start : own.start + panel.stop].to(dtype)
        matrix = call_with_parameters(distance, parameters, embeddings.to(dtype), rows)
        return checked(matrix, embeddings.shape[0], rows.shape[0]).T * factor

    return function


def _fake(inputs: Inputs, given: Sequence[Tensor], classes: Tensor, offsets: Tensor, *rest: Any) -> Any:
    first, last = rest[3:5]
    return offsets.new_empty(last - first), offsets.new_empty(last - first)


_logsumexp = Pass(
    "proxy_logsumexp",
    "Tensor classes, Tensor offsets, float alpha, bool normalize_embeddings, bool normalize_proxies, SymInt first, "
    "SymInt last, int budget, str backend, str products",
    _run,
    _fake,
    n_results=2,
)
_called = OutsideGraph(_run, 2)
