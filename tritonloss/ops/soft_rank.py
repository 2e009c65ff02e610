"""`soft_rank`: how many negatives stand above each positive of each query, softly counted."""

import math

# The Sequence of collections.abc is none that torch 2.6 makes a schema of.
from typing import Any, NamedTuple, Sequence  # noqa: UP035

import torch
from torch import Tensor

from tritonloss.backends import backend_module, large_classes, selected_backend
from tritonloss.ops.library import operator, refuse_second_derivative
from tritonloss.ops.shares import own_share, sharing
from tritonloss.ops.streaming import (
    BlockPlan,
    PairSizes,
    budget_bytes,
    empty_scores,
    given_or_zero,
    keeps_similarity,
    padded_scores,
    pair_sizes,
    rows_per_block,
)

SURROGATES = ("sigmoid", "one_side_huber")


class SoftRanks(NamedTuple):
    """ranks, scores, positive_ranks: [M], one entry for each (query, positive), the pairs of query 0 first.

    positive_ranks: None where it was not asked for.
    """

    ranks: Tensor
    scores: Tensor
    positive_ranks: Tensor | None = None


def soft_rank(
    queries: Tensor,
    keys: Tensor,
    start: Tensor,
    count: Tensor,
    *,
    surrogate: str = "sigmoid",
    temperature: float = 0.01,
    positive_ranks: bool = False,
    max_class_size: int | None = None,
    score_limit: float = math.inf,
    sizes: PairSizes | None = None,
    memory_budget: int | None = None,
) -> SoftRanks:
    """R[q, i] = sum over the negatives j of q of g((s_qj - s_qi) / temperature), for every positive i of q.

    s = queries @ keys.T. The positives of query q are the keys start[q] .. start[q] + count[q] - 1; every other key is
    a negative.

    Args:
        queries: [Q, D] float32 or float64, contiguous or not.
        keys: [N, D], same dtype and device; may be `queries` itself.
        start, count: [Q] int64. A count of 0 gives the query no pair.
        surrogate: "sigmoid", g(x) = 1 / (1 + e^-x); or "one_side_huber", g(x) = 1 + 2x above 0, (1 + x)^2 from -1 to 0,
            0 below (SOPRC, arXiv 2209.13262, Eq. 7).
        temperature: width of the surrogate, > 0.
        positive_ranks: take the same sum over the other positives j != i of q as well, in the same pass.
        max_class_size: a bound of count. It replaces the one host sync of the call; ranks and scores then have
            Q * max_class_size entries, zero past the pairs, and the device asserts the bound.
        score_limit: a bound of |s|, 1 for unit rows. The sigmoid of large classes needs it on CUDA, where the scores
            are not looked at from the host: without it they take the direct loop there. Scores beyond it give NaN.
        sizes: of `pair_sizes`, if the caller has them already: then this call has no host sync.
        memory_budget: what the similarities may take; default TRITONLOSS_MEMORY_BUDGET, else 256 MiB on CPU, a
            sixteenth of the device on CUDA. If all of them fit they are kept for the backward pass, else recomputed.
            Eager keeps the derivatives instead, of a batch that is one block and where these fit, at most 16 MiB.

    Returns:
        SoftRanks(ranks [M], scores [M], positive_ranks [M] or None), M = sum(count); differentiable once, in queries
        and keys.

    Time O(sum_q count[q] (N - count[q]) + Q N D), with positive_ranks O(sum_q count[q] N + Q N D), for small classes.
    For large ones, where it is less by the cost model of `tritonloss.backends.large_classes`, O(Q N (D + log N)), and
    for the sigmoid, whose range of scores is divided into G cells of temperature / 4, G of the order of
    8 / temperature, O(Q (N D + G^2)), with a relative error of 3e-6 in float32 (cells of temperature / 8 and 2e-10 in
    float64). Memory O(budget + (Q + N) D + M).

    Raises:
        ValueError: unknown surrogate, a budget below 1, a temperature that is not positive.
        RuntimeError: the chosen backend cannot serve the device; a second derivative is asked for.
    """
    if surrogate not in SURROGATES:
        raise ValueError(f"surrogate is {surrogate!r}: expected one of {', '.join(SURROGATES)}")
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}: expected a number above 0")
    if (share := own_share(queries.shape[0])) is not None:
        # The numbers of pairs are read for the exchange anyway, so that a bound has nothing to replace.
        with sharing(None):
            part = soft_rank(
                queries[share.rows],
                keys,
                start[share.rows],
                count[share.rows],
                surrogate=surrogate,
                temperature=temperature,
                positive_ranks=positive_ranks,
                score_limit=score_limit,
                memory_budget=memory_budget,
            )
        ranks, scores, among = part
        return SoftRanks(
            share.gather_segments(ranks, count),
            share.gather_segments(scores, count),
            None if among is None else share.gather_segments(among, count),
        )
    budget = budget_bytes(queries.device, memory_budget)
    if sizes is None and max_class_size is None and not torch.compiler.is_compiling():
        sizes = pair_sizes(count, rows_of_block(queries, keys, budget))
    save = torch.is_grad_enabled() and (queries.requires_grad or keys.requires_grad)
    backend = selected_backend()
    ranks, scores, among, *_ = _soft_rank(
        queries,
        keys,
        start,
        count,
        surrogate,
        float(temperature),
        positive_ranks,
        -1 if max_class_size is None else max_class_size,
        float(score_limit),
        [] if sizes is None else sizes.largest,
        -1 if sizes is None else sum(sizes.total),
        budget,
        save,
        _derivatives_to_keep(queries, keys, sizes, surrogate, budget, backend) if save else 0,
        queries is keys,
        backend,
    )
    return SoftRanks(ranks, scores * temperature, among if positive_ranks else None)


# Sizes are read from .shape: len() would turn a symbolic size into a constant and recompile for every batch size.
def rows_of_block(queries: Tensor, keys: Tensor, budget: int) -> int:
    """The queries of a row block of `soft_rank`."""
    return rows_per_block(queries.shape[0], keys.shape[0], keys.itemsize, keys.device, budget)


def _derivatives_to_keep(
    queries: Tensor, keys: Tensor, sizes: PairSizes | None, surrogate: str, budget: int, backend: str
) -> int:
    """The largest class if the derivatives of every (positive, key) are kept for the backward pass, else 0.

    They are where the backend has a limit for them, DERIVATIVE_BYTES, and a batch of one block stays below it.
    """
    if sizes is None or len(sizes.largest) != 1:
        return 0
    (width,) = sizes.largest
    limit = min(getattr(backend_module(backend, queries.device), "DERIVATIVE_BYTES", 0), budget)
    fits = keeps_similarity(queries.shape[0] * width, keys.shape[0], keys.itemsize, limit)
    if not fits or large_classes.may_pay(keys.shape[0], width, surrogate, keys.dtype, keys.device):
        return 0
    return width


def _kept_rows(queries: Tensor, keys: Tensor, save: bool, n_derivatives: int, budget: int) -> int:
    """The rows [N] that the backward pass is given: all derivatives, the similarity, or none."""
    if n_derivatives:
        return queries.shape[0] * n_derivatives
    keep = save and keeps_similarity(queries.shape[0], keys.shape[0], keys.itemsize, budget)
    return queries.shape[0] if keep else 0


def _kept_scores(kept: Tensor, n_keys: int, n_derivatives: int) -> tuple[Tensor, dict[str, Tensor]]:
    """The similarity [Q, N] and the option of the block functions for derivatives [n_derivatives, Q, N], if any.

    With derivatives, the similarity is their last block, which overwrites it.
    """
    if not n_derivatives:
        return kept[:, :n_keys], {}
    derivatives = kept.view(n_derivatives, -1, kept.shape[1])[..., :n_keys]
    return derivatives[-1], {"derivatives": derivatives}


@operator("soft_rank")
def _soft_rank(
    queries: Tensor,
    keys: Tensor,
    start: Tensor,
    count: Tensor,
    surrogate: str,
    temperature: float,
    with_positives: bool,
    max_class_size: int,
    score_limit: float,
    widths: Sequence[int],
    n_pairs: int,
    budget: int,
    save: bool,
    n_derivatives: int,
    shared: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Ranks [M], scores / temperature [M], ranks among the positives [M], and what the backward pass needs.

    That is, if `save`, both slopes [M], and the similarity [Q, N] if it is kept, or the derivatives
    [n_derivatives * Q, N] instead; then [0, P], which has no elements: its shape tells the backward pass the largest
    class size P without another host sync. What is about the positives alone is empty unless `with_positives`. A
    max_class_size of -1 means none was given; widths and n_pairs are those of `BlockPlan`, none and -1 where they are
    read here. `shared`: queries and keys are one tensor, so that the backward pass has one gradient.
    """
    bounded = max_class_size >= 0
    if bounded:
        torch._assert_async((count <= max_class_size).all(), "a class is larger than max_class_size")
    plan = BlockPlan(
        start,
        count,
        rows_of_block(queries, keys, budget),
        width=max_class_size if bounded else None,
        sizes=(widths, n_pairs) if n_pairs >= 0 else None,
    )
    new = queries.new_zeros if bounded else queries.new_empty
    ranks, positive_scores = new(plan.n_pairs), new(plan.n_pairs)
    slopes = new(plan.n_pairs if save else 0)
    among = new(plan.n_pairs if with_positives else 0)
    among_slopes = new(plan.n_pairs if with_positives and save else 0)
    kept = padded_scores(_kept_rows(queries, keys, save, n_derivatives, budget), keys.shape[0], queries)
    keep = kept.shape[0] > 0
    similarity, options = _kept_scores(kept, keys.shape[0], n_derivatives)
    scratch = empty_scores(0 if keep else plan.block_rows, keys.shape[0], queries)
    module = backend_module(backend, queries.device)
    mirrored = 0
    for rows, positives in plan:
        scores = similarity[rows] if keep else scratch[: len(positives.count)]
        if keep and shared:
            # S is symmetric: half of it is copied from the rows before, which are complete up to `mirrored`.
            scores[:, :mirrored] = similarity[:mirrored, rows].T
        torch.mm(queries[rows] / temperature, keys[mirrored:].T, out=scores[:, mirrored:])
        if keep and shared and rows.start == mirrored:
            mirrored = rows.stop
        limit = score_limit / temperature
        algorithm = None if options else large_classes.choose(module, scores, positives, surrogate, limit)
        (algorithm or module).soft_rank_forward(
            scores,
            positives,
            surrogate,
            ranks,
            slopes if save else None,
            positive_scores,
            among if with_positives else None,
            among_slopes if with_positives and save else None,
            **options,
        )
    extent = queries.new_empty(0, plan.largest)
    return ranks, positive_scores, among, slopes, among_slopes, kept, extent


@_soft_rank.register_fake
def _(
    queries: Tensor,
    keys: Tensor,
    start: Tensor,
    count: Tensor,
    surrogate: str,
    temperature: float,
    with_positives: bool,
    max_class_size: int,
    score_limit: float,
    widths: Sequence[int],
    n_pairs: int,
    budget: int,
    save: bool,
    n_derivatives: int,
    shared: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    pairs: Any = queries.shape[0] * max_class_size if max_class_size >= 0 else n_pairs
    largest: Any = max_class_size if max_class_size >= 0 else max(widths, default=0)
    if max_class_size < 0 and n_pairs < 0:
        context = torch.library.get_ctx()
        pairs, largest = context.new_dynamic_size(), context.new_dynamic_size()
    return (
        queries.new_empty(pairs),
        queries.new_empty(pairs),
        queries.new_empty(pairs if with_positives else 0),
        queries.new_empty(pairs if save else 0),
        queries.new_empty(pairs if with_positives and save else 0),
        padded_scores(_kept_rows(queries, keys, save, n_derivatives, budget), keys.shape[0], queries),
        queries.new_empty(0, largest),
    )


@operator("soft_rank_backward")
def _soft_rank_backward(
    grad_ranks: Tensor,
    grad_scores: Tensor,
    grad_among: Tensor,
    queries: Tensor,
    keys: Tensor,
    start: Tensor,
    count: Tensor,
    positive_scores: Tensor,
    slopes: Tensor,
    among_slopes: Tensor,
    kept: Tensor,
    extent: Tensor,
    surrogate: str,
    temperature: float,
    with_positives: bool,
    score_limit: float,
    widths: Sequence[int],
    budget: int,
    n_derivatives: int,
    shared: bool,
    backend: str,
    need_queries: bool,
    need_keys: bool,
) -> tuple[Tensor, Tensor]:
    """The gradients of queries [Q, D] and keys [N, D]; an unneeded one is empty. `shared`: the first is their sum."""
    need_keys = need_keys and not shared
    grad_queries = torch.zeros_like(queries) if need_queries else queries.new_empty(0)
    grad_keys = torch.zeros_like(keys) if need_keys else keys.new_empty(0)
    similarity, options = _kept_scores(kept, keys.shape[0], n_derivatives)
    is_kept = kept.shape[0] > 0
    known = (widths, positive_scores.shape[0]) if widths else None
    plan = BlockPlan(start, count, rows_of_block(queries, keys, budget), width=extent.shape[1], sizes=known)
    scratch = empty_scores(0 if is_kept else plan.block_rows, keys.shape[0], queries)
    scratch_grad = empty_scores(plan.block_rows, keys.shape[0], queries)
    module = backend_module(backend, queries.device)
    for rows, positives in plan:
        grad = scratch_grad[: len(positives.count)]
        scores = similarity[rows] if is_kept else scratch[: len(positives.count)]
        if not is_kept:
            torch.mm(queries[rows] / temperature, keys.T, out=scores)
        limit = score_limit / temperature
        algorithm = None if options else large_classes.choose(module, scores, positives, surrogate, limit)
        (algorithm or module).soft_rank_backward(
            scores,
            positives,
            surrogate,
            slopes,
            positive_scores,
            grad_ranks,
            grad_scores,
            grad,
            among_slopes if with_positives else None,
            grad_among if with_positives else None,
            **options,
        )
        if shared:
            _add_gradient(grad_queries, grad, queries, rows)
        elif need_queries:
            torch.mm(grad, keys, out=grad_queries[rows])
        if need_keys:
            grad_keys.addmm_(grad.T, queries[rows] / temperature)
    return grad_queries.div_(temperature), grad_keys


def _add_gradient(total: Tensor, grad: Tensor, queries: Tensor, rows: slice) -> None:
    """Add what the gradient of the scores [rows, Q] of queries with themselves gives to the gradient of the queries."""
    if grad.shape[0] == queries.shape[0]:
        # torch copies a transpose by tiles, but adds one by strides.
        total.addmm_(grad.T.contiguous().add_(grad), queries)
    else:
        total[rows].addmm_(grad, queries)
        total.addmm_(grad.T, queries[rows])


@_soft_rank_backward.register_fake
def _(
    grad_ranks: Tensor,
    grad_scores: Tensor,
    grad_among: Tensor,
    queries: Tensor,
    keys: Tensor,
    start: Tensor,
    count: Tensor,
    positive_scores: Tensor,
    slopes: Tensor,
    among_slopes: Tensor,
    kept: Tensor,
    extent: Tensor,
    surrogate: str,
    temperature: float,
    with_positives: bool,
    score_limit: float,
    widths: Sequence[int],
    budget: int,
    n_derivatives: int,
    shared: bool,
    backend: str,
    need_queries: bool,
    need_keys: bool,
) -> tuple[Tensor, Tensor]:
    grad_queries = torch.empty_like(queries) if need_queries else queries.new_empty(0)
    return grad_queries, torch.empty_like(keys) if need_keys and not shared else keys.new_empty(0)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    queries, keys, start, count, *options = inputs
    surrogate, temperature, with_positives, _, score_limit, widths, _, budget, _, *rest = options
    _, positive_scores, _, *saved = output
    ctx.save_for_backward(queries, keys, start, count, positive_scores, *saved)
    ctx.options = surrogate, temperature, with_positives, score_limit, widths, budget, *rest
    ctx.mark_non_differentiable(*saved)
    # Else autograd makes a gradient of zeros for every output without one, for the kept similarity as well.
    ctx.set_materialize_grads(False)


def _backward(
    ctx: Any, grad_ranks: Tensor | None, grad_scores: Tensor | None, grad_among: Tensor | None, *_: Any
) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # once: checkpointing unpacks it anew at every access
    flat, among_slopes = saved[4], saved[6]
    need_queries, need_keys = ctx.needs_input_grad[:2]
    grad_queries, grad_keys = _soft_rank_backward(
        given_or_zero(grad_ranks, flat),
        given_or_zero(grad_scores, flat),
        given_or_zero(grad_among, among_slopes),
        *saved,
        *ctx.options,
        need_queries,
        need_keys,
    )
    need_keys = need_keys and not ctx.options[7]
    return grad_queries if need_queries else None, grad_keys if need_keys else None, *[None] * 14


_soft_rank.register_autograd(_backward, setup_context=_save_for_backward)
_soft_rank_backward.register_autograd(refuse_second_derivative)
