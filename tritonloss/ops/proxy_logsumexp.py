"""`proxy_logsumexp`: for every proxy, the soft maximum of the exponents of its own class and of the other classes."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritonloss.backends import backend_module, selected_backend
from tritonloss.distances import Distance, call_with_parameters, parameters_of
from tritonloss.ops.class_labels import class_labels
from tritonloss.ops.library import operator, refuse_second_derivative
from tritonloss.ops.shares import own_share, sharing
from tritonloss.ops.streaming import (
    budget_bytes,
    empty_scores,
    keeps_similarity,
    padded_scores,
    rows_per_block,
)

# Below it a norm is replaced by it, as torch.nn.functional.normalize does.
LEAST_NORM = 1e-12


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
) -> ProxyLogSumExp:
    """Two log-sum-exps for every proxy p, s_xp = embeddings[x] . proxies[p] its similarity to embedding x:

        positive[p] = ln(1 + sum over x of class p of     w_x e^(-alpha (s_xp - margin)))
        negative[p] = ln(1 + sum over x of other classes of w_x e^(alpha (s_xp + margin)))

    Exact for any alpha, margin and s, however large the exponents. The similarities are walked in blocks of proxies.

    Args:
        embeddings: [N, D] float32 or float64, contiguous or not; everything is computed in this dtype.
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
            sixteenth of the device on CUDA. If all of them fit they are kept for the backward pass, else, and always
            with a `distance`, recomputed.

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
    classes = class_labels(labels, proxies.shape[0], check=check_label_range).to(torch.int32)
    if (share := own_share(proxies.shape[0])) is not None:
        with sharing(None):
            part = proxy_logsumexp(
                embeddings,
                proxies[share.rows],
                classes - share.rows.start,
                weights=weights,
                alpha=alpha,
                margin=margin,
                normalize_proxies=normalize_proxies,
                distance=distance,
                check_label_range=False,
                memory_budget=memory_budget,
            )
        return ProxyLogSumExp(*map(share.gather, part))
    budget = budget_bytes(embeddings.device, memory_budget)
    offsets = _offsets(
        embeddings, weights, -alpha * margin if _is_smaller_closer(distance) else alpha * margin
    )
    common = embeddings, proxies, classes, offsets, float(alpha)
    if distance is not None:
        sums = _DistanceLogSumExp.apply(  # type: ignore[no-untyped-call]
            *common, distance, budget, selected_backend(), *parameters_of(distance)
        )
        return ProxyLogSumExp(*sums)
    save = torch.is_grad_enabled() and (embeddings.requires_grad or proxies.requires_grad)
    positive, negative, _ = _proxy_logsumexp(*common, normalize_proxies, budget, save, selected_backend())
    return ProxyLogSumExp(positive, negative)


def _offsets(embeddings: Tensor, weights: Tensor | None, constant: float) -> Tensor:
    """constant + ln w: what is added to the exponents of each embedding, [N]; -inf for a weight of 0."""
    if weights is None:
        return embeddings.new_full((embeddings.shape[0],), constant)
    return weights.detach().to(embeddings.dtype).log() + constant


def _is_smaller_closer(distance: Distance | None) -> bool:
    return distance is not None and not distance.is_inverted


# Sizes are read from .shape: len() would turn a symbolic size into a constant and recompile for every batch size.
def _block_rows(embeddings: Tensor, proxies: Tensor, budget: int) -> int:
    return rows_per_block(
        proxies.shape[0], embeddings.shape[0], embeddings.itemsize, embeddings.device, budget
    )


def _keeps_similarity(embeddings: Tensor, proxies: Tensor, save: bool, budget: int) -> bool:
    return save and keeps_similarity(proxies.shape[0], embeddings.shape[0], embeddings.itemsize, budget)


def _blocks(embeddings: Tensor, proxies: Tensor, budget: int) -> list[slice]:
    """The row blocks of proxies; none if there is no embedding."""
    size = _block_rows(embeddings, proxies, budget)
    stop = proxies.shape[0] if embeddings.shape[0] else 0
    return [slice(first, min(first + size, stop)) for first in range(0, stop, size)]


class _Rows:
    """A block of proxies in the dtype of the embeddings, normalised where asked, and the way back to their gradient."""

    def __init__(self, proxies: Tensor, dtype: torch.dtype, normalize: bool) -> None:
        self.values = proxies.to(dtype)
        self.norm: Tensor | None = None
        if normalize:
            norm = torch.linalg.vector_norm(self.values, dim=1, keepdim=True)
            self.is_short = norm < LEAST_NORM
            self.norm = norm.clamp_(min=LEAST_NORM)
            self.values = self.values / self.norm

    def gradient(self, grad: Tensor) -> Tensor:
        """From the gradient of `values`, whose memory is overwritten, to that of the proxies."""
        if self.norm is None:
            return grad
        # Along the row itself the normalised row does not change, unless its norm was replaced by a constant.
        # A product and a sum: torch.linalg.vecdot follows autocast.
        along = (grad * self.values).sum(1, keepdim=True).masked_fill_(self.is_short, 0)
        return grad.addcmul_(self.values, along, value=-1).div_(self.norm)


@operator("proxy_logsumexp")
def _proxy_logsumexp(
    embeddings: Tensor,
    proxies: Tensor,
    classes: Tensor,
    offsets: Tensor,
    alpha: float,
    normalize: bool,
    budget: int,
    save: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """positive [C], negative [C] and, if it is kept, alpha times the similarity [C, N], its rows padded."""
    n_proxies, n_columns = proxies.shape[0], embeddings.shape[0]
    positive, negative = embeddings.new_zeros(n_proxies), embeddings.new_zeros(n_proxies)
    keep = _keeps_similarity(embeddings, proxies, save, budget)
    kept = padded_scores(n_proxies if keep else 0, n_columns, embeddings)
    similarity = kept[:, :n_columns]
    scratch = empty_scores(0 if keep else _block_rows(embeddings, proxies, budget), n_columns, embeddings)
    module = backend_module(backend, embeddings.device)
    scaled = embeddings * alpha
    for block in _blocks(embeddings, proxies, budget):
        rows = _Rows(proxies[block], embeddings.dtype, normalize)
        scores = similarity[block] if keep else scratch[: block.stop - block.start]
        torch.mm(rows.values, scaled.T, out=scores)
        module.proxy_logsumexp_forward(
            scores, block.start, classes, offsets, positive[block], negative[block]
        )
    return positive, negative, kept


@_proxy_logsumexp.register_fake
def _(
    embeddings: Tensor,
    proxies: Tensor,
    classes: Tensor,
    offsets: Tensor,
    alpha: float,
    normalize: bool,
    budget: int,
    save: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    n_proxies = proxies.shape[0]
    keep = _keeps_similarity(embeddings, proxies, save, budget)
    kept = padded_scores(n_proxies if keep else 0, embeddings.shape[0], embeddings)
    return embeddings.new_empty(n_proxies), embeddings.new_empty(n_proxies), kept


@operator("proxy_logsumexp_backward")
def _proxy_logsumexp_backward(
    grad_positive: Tensor,
    grad_negative: Tensor,
    embeddings: Tensor,
    proxies: Tensor,
    classes: Tensor,
    offsets: Tensor,
    positive: Tensor,
    negative: Tensor,
    kept: Tensor,
    alpha: float,
    normalize: bool,
    budget: int,
    backend: str,
    need_embeddings: bool,
    need_proxies: bool,
) -> tuple[Tensor, Tensor]:
    """The gradients of embeddings [N, D] and proxies [C, D]; an unneeded one is empty."""
    grad_embeddings = torch.zeros_like(embeddings) if need_embeddings else embeddings.new_empty(0)
    grad_proxies = torch.zeros_like(proxies) if need_proxies else proxies.new_empty(0)
    block_rows, n_columns = _block_rows(embeddings, proxies, budget), embeddings.shape[0]
    is_kept = kept.shape[0] > 0
    similarity = kept[:, :n_columns]
    scratch = empty_scores(0 if is_kept else block_rows, n_columns, embeddings)
    scratch_grad = empty_scores(block_rows, n_columns, embeddings)
    scratch_rows = embeddings.new_empty(block_rows if need_proxies else 0, embeddings.shape[1])
    module = backend_module(backend, embeddings.device)
    scaled = embeddings * alpha
    for block in _blocks(embeddings, proxies, budget):
        rows = _Rows(proxies[block], embeddings.dtype, normalize)
        grad = scratch_grad[: block.stop - block.start]
        scores = similarity[block] if is_kept else scratch[: block.stop - block.start]
        if not is_kept:
            torch.mm(rows.values, scaled.T, out=scores)
        module.proxy_logsumexp_backward(
            scores,
            block.start,
            classes,
            offsets,
            positive[block],
            negative[block],
            grad_positive[block],
            grad_negative[block],
            grad,
        )
        if need_embeddings:
            grad_embeddings.addmm_(grad.T, rows.values)
        if need_proxies:
            # With out=, which autocast leaves alone: this may run inside a user's autocast.
            grad_rows = torch.mm(grad, scaled, out=scratch_rows[: len(grad)])
            grad_proxies[block] = rows.gradient(grad_rows)
    return grad_embeddings.mul_(alpha), grad_proxies


@_proxy_logsumexp_backward.register_fake
def _(
    grad_positive: Tensor,
    grad_negative: Tensor,
    embeddings: Tensor,
    proxies: Tensor,
    classes: Tensor,
    offsets: Tensor,
    positive: Tensor,
    negative: Tensor,
    kept: Tensor,
    alpha: float,
    normalize: bool,
    budget: int,
    backend: str,
    need_embeddings: bool,
    need_proxies: bool,
) -> tuple[Tensor, Tensor]:
    grad_embeddings = torch.empty_like(embeddings) if need_embeddings else embeddings.new_empty(0)
    return grad_embeddings, torch.empty_like(proxies) if need_proxies else proxies.new_empty(0)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    embeddings, proxies, classes, offsets, alpha, normalize, budget, _, backend = inputs
    ctx.save_for_backward(embeddings, proxies, classes, offsets, *output)
    ctx.options = alpha, normalize, budget, backend
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)  # a gradient of zeros for the similarity would be as large as it


def _backward(
    ctx: Any, grad_positive: Tensor | None, grad_negative: Tensor | None, _: Any
) -> tuple[Tensor | None, ...]:
    need_embeddings, need_proxies = ctx.needs_input_grad[:2]
    saved = ctx.saved_tensors  # checkpointing allows it to be read once
    positive, negative = saved[4:6]
    grad_embeddings, grad_proxies = _proxy_logsumexp_backward(
        torch.zeros_like(positive) if grad_positive is None else grad_positive.contiguous(),
        torch.zeros_like(negative) if grad_negative is None else grad_negative.contiguous(),
        *saved,
        *ctx.options,
        need_embeddings,
        need_proxies,
    )
    return (grad_embeddings if need_embeddings else None, grad_proxies if need_proxies else None, *[None] * 7)


_proxy_logsumexp.register_autograd(_backward, setup_context=_save_for_backward)
_proxy_logsumexp_backward.register_autograd(refuse_second_derivative)


class _DistanceLogSumExp(torch.autograd.Function):
    """The same sums for any distance object, called on one block of proxies after the other."""

    @staticmethod
    def forward(
        ctx: Any,
        embeddings: Tensor,
        proxies: Tensor,
        classes: Tensor,
        offsets: Tensor,
        alpha: float,
        distance: Distance,
        budget: int,
        backend: str,
        *parameters: Tensor,
    ) -> tuple[Tensor, Tensor]:
        positive, negative = (embeddings.new_zeros(proxies.shape[0]) for _ in range(2))
        scratch = empty_scores(_block_rows(embeddings, proxies, budget), embeddings.shape[0], embeddings)
        module = backend_module(backend, embeddings.device)
        factor = -alpha if _is_smaller_closer(distance) else alpha
        for block in _blocks(embeddings, proxies, budget):
            matrix = _matrix(distance, parameters, embeddings, proxies[block].to(embeddings.dtype))
            scores = scratch[: block.stop - block.start]
            torch.mul(matrix.T, factor, out=scores)
            module.proxy_logsumexp_forward(
                scores, block.start, classes, offsets, positive[block], negative[block]
            )
        ctx.save_for_backward(embeddings, proxies, classes, offsets, positive, negative, *parameters)
        ctx.options = alpha, distance, budget, backend
        return positive, negative

    @staticmethod
    def backward(ctx: Any, grad_positive: Tensor, grad_negative: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[:2] + ctx.needs_input_grad[8:]
        grads = _DistanceLogSumExpBackward.apply(  # type: ignore[no-untyped-call]
            grad_positive.contiguous(), grad_negative.contiguous(), needed, ctx.options, *ctx.saved_tensors
        )
        return (*grads[:2], *[None] * 6, *grads[2:])


class _DistanceLogSumExpBackward(torch.autograd.Function):
    """The gradients of embeddings, proxies and the distance's parameters; None where `needed` is False."""

    @staticmethod
    def forward(
        ctx: Any,
        grad_positive: Tensor,
        grad_negative: Tensor,
        needed: tuple[bool, ...],
        options: tuple[float, Distance, int, str],
        embeddings: Tensor,
        proxies: Tensor,
        classes: Tensor,
        offsets: Tensor,
        positive: Tensor,
        negative: Tensor,
        *parameters: Tensor,
    ) -> tuple[Tensor | None, ...]:
        alpha, distance, budget, backend = options
        inputs = [embeddings, proxies, *parameters]
        grads = {i: torch.zeros_like(inputs[i]) for i, need in enumerate(needed) if need}
        scratch, scratch_grad = (
            empty_scores(_block_rows(embeddings, proxies, budget), embeddings.shape[0], embeddings)
            for _ in range(2)
        )
        module = backend_module(backend, embeddings.device)
        factor = -alpha if _is_smaller_closer(distance) else alpha
        for block in _blocks(embeddings, proxies, budget):
            rows = proxies[block].to(embeddings.dtype, copy=True)
            leaves = [
                embeddings.detach().requires_grad_(needed[0]),
                rows.requires_grad_(needed[1]),
                *inputs[2:],
            ]
            with torch.enable_grad():
                matrix = _matrix(distance, parameters, leaves[0], leaves[1])
            scores, grad = scratch[: len(rows)], scratch_grad[: len(rows)]
            torch.mul(matrix.detach().T, factor, out=scores)
            module.proxy_logsumexp_backward(
                scores,
                block.start,
                classes,
                offsets,
                positive[block],
                negative[block],
                grad_positive[block],
                grad_negative[block],
                grad,
            )
            wanted = [leaves[i] for i in grads]
            with torch.autocast(embeddings.device.type, enabled=False):
                block_grads = torch.autograd.grad(matrix, wanted, grad.mul_(factor).T, allow_unused=True)
            for (i, total), block_grad in zip(grads.items(), block_grads, strict=True):
                if block_grad is not None:
                    (total[block] if leaves[i] is rows else total).add_(block_grad)
        return tuple(grads.get(i) for i in range(len(inputs)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        refuse_second_derivative(ctx, *grads)


def _matrix(distance: Distance, parameters: Sequence[Tensor], embeddings: Tensor, rows: Tensor) -> Tensor:
    """distance(embeddings [N, D], a block of proxies [rows, D]): [N, rows]."""
    matrix = call_with_parameters(distance, parameters, embeddings, rows)
    if matrix.shape != (embeddings.shape[0], rows.shape[0]):
        raise ValueError(
            f"distance must return shape {[embeddings.shape[0], rows.shape[0]]}, got {list(matrix.shape)}"
        )
    return matrix
