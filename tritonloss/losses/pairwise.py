"""What the log-sum-exp losses share: one value per query, from soft maxima over its positives and its negatives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from tritonloss import reference
from tritonloss.backends import selected_backend
from tritonloss.layout import ClassLayout, class_ranges
from tritonloss.losses.base import (
    BaseMetricLossFunction,
    LossOptions,
    check_arguments,
    check_bounds,
    check_choice,
    check_positive,
    check_products,
    full_precision,
    output_dtype,
    require_cosine,
    unit_rows,
)
from tritonloss.losses.logsumexp_math import ExponentMaps, softmax_maps
from tritonloss.losses.mined import MinedPairs, mined_pairs
from tritonloss.ops.pair_logsumexp import (
    Exponents,
    Keys,
    logsumexp_total,
    logsumexp_values,
    pair_ranges,
    sums_of,
)
from tritonloss.types import (
    IndicesTuple,
    LossDict,
    PairIndices,
    ProductMode,
    Reduction,
    TripletIndices,
    accumulation_dtype,
    upcast,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

Temperature: TypeAlias = float | Tensor


class PairOptions(LossOptions, total=False):
    """The options of `PairLoss`."""

    max_class_size: int | None
    memory_budget: int | None
    products: ProductMode | None


class LossValues(NamedTuple):
    """values: [Q], or [M] one per positive pair. counted: whether, or for how many values, each counts in the mean.

    indices: the query of each value [Q], or the query and the key of each pair [M].
    """

    values: Tensor
    counted: Tensor
    indices: Tensor | tuple[Tensor, Tensor]

    def mean(self) -> Tensor:
        number = self.counted.sum().clamp(min=1)
        return self.values.sum() / number.to(self.values.dtype)


@dataclass(frozen=True)
class PairRule:
    """What a loss makes of the pairs of a query, in this call.

    exponents: what is summed, and the function of the sums.
    counted: from the values [q] and the number of positives [q] of some queries to what counts in the mean, [q].
    mined: from named pairs to the values [Q], or [M] for those of pairs; None if an `indices_tuple` is refused.
    dense: from embeddings, labels, reference set and indices, as `tritonloss.reference` takes them, to the values;
        None if the loss calls its dense form itself.
    temperature: that of all exponents if it is a tensor; then the scores that the exponents speak of are divided by it.
    of_pairs: where each positive pair has a value, of which that of the query is the sum: from the logarithm of the sum
    over the query's negatives and the exponent of each pair to its value, [M] each.
    needs_negatives: whether all values are 0 in a batch without a negative pair.
    """

    exponents: Exponents
    counted: Callable[[Tensor, Tensor], Tensor]
    mined: Callable[[MinedPairs], Tensor] | None = None
    dense: Callable[..., Tensor] | None = None
    temperature: Tensor | None = None
    of_pairs: Callable[[Tensor, Tensor], Tensor] | None = None
    needs_negatives: bool = False
    max_class_size: int | None = None
    memory_budget: int | None = None
    products: ProductMode | None = None


class Arguments(NamedTuple):
    """The checked arguments of a call."""

    embeddings: Tensor
    labels: Tensor | None
    indices: PairIndices | TripletIndices | None
    ref_emb: Tensor | None
    ref_labels: Tensor | None


class PairLoss(BaseMetricLossFunction):
    """Base of the losses of log-sum-exps. s is the cosine similarity.

    The positives of a query are the other rows of its class, its negatives the rows of other classes. With `ref_emb`
    [N, D] and `ref_labels` [N] they are rows of that set, of which none is left out. With an `indices_tuple` the pairs
    are those that it names, which are gathered: O(pairs x D).

    A subclass defines `rule`.

    Args:
        max_class_size: a bound of the number of positives, itself included, of a query. It replaces the call's one host
            sync on CUDA, so that the call can be captured in a CUDA graph; the device asserts it.
        memory_budget: bytes that similarities may take; default TRITONLOSS_MEMORY_BUDGET, else 256 MiB on CPU and a
            sixteenth of the device's memory on CUDA.
        products: how rows are multiplied, "auto", "ieee" or "split"; default TRITONLOSS_PRODUCTS, else "auto": see
            `tritonloss.ops.products`. Results of both have the precision of float32.
        **options: `distance` (only plain cosine similarity, ours or pytorch-metric-learning's), `reducer`,
            `embedding_regularizer`, `embedding_reg_weight`, as for `BaseMetricLossFunction`. A reducer other than the
            default one, and `loss_terms`, walk over the similarities once more in the backward pass.

    Time O(Q N D): one walk over panels of the similarity matrix gives value and gradient. Memory O(panel + (Q + N) D).

    Raises:
        TypeError: another distance, an option that is no number, a bound that is no int.
        ValueError: an option out of range; when called, labels that are missing without an `indices_tuple`, a `ref_emb`
            of another width, dtype or device, `ref_emb` without `ref_labels`.
    """

    def __init__(
        self,
        *,
        max_class_size: int | None = None,
        memory_budget: int | None = None,
        products: ProductMode | None = None,
        **options: Unpack[LossOptions],
    ) -> None:
        check_products(products)
        bounds = check_bounds(max_class_size=max_class_size, memory_budget=memory_budget)
        super().__init__(**options)
        require_cosine(type(self).__name__, self.distance)
        self.max_class_size, self.memory_budget = bounds
        self.products = products

    def rule(self) -> PairRule:
        """What this loss makes of its pairs."""
        raise NotImplementedError(f"{type(self).__name__} must define rule")

    def check(self, arguments: Arguments) -> None:
        """Raise for arguments that this loss cannot use."""
        check_reference(type(self).__name__, arguments)

    def compute_loss(
        self,
        embeddings: Tensor,
        labels: Tensor | None,
        indices_tuple: PairIndices | TripletIndices | None,
        ref_emb: Tensor | None,
        ref_labels: Tensor | None,
    ) -> LossDict:
        arguments = Arguments(embeddings, labels, indices_tuple, ref_emb, ref_labels)
        self.check(arguments)
        found = values_of(self.rule(), arguments)
        return {"loss": {"losses": found.values, "indices": found.indices}}

    def reduced_objective(
        self,
        embeddings: Tensor,
        labels: Tensor | None = None,
        indices_tuple: IndicesTuple | None = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
    ) -> Tensor:
        if type(self.reducer) is not type(self.default_reducer()):
            return super().reduced_objective(embeddings, labels, indices_tuple, ref_emb, ref_labels)
        indices = check_arguments(embeddings, labels, indices_tuple, ref_emb, ref_labels)
        arguments = Arguments(embeddings, labels, indices, ref_emb, ref_labels)
        self.check(arguments)
        with full_precision(embeddings):
            return self.mean(arguments)

    def mean(self, arguments: Arguments) -> Tensor:
        """The loss in its default reduction."""
        return mean_of(self.rule(), arguments)


def pair_loss(
    name: str,
    rule: PairRule,
    embeddings: Tensor,
    labels: Tensor | None,
    ref_emb: Tensor | None,
    ref_labels: Tensor | None,
    reduction: Reduction,
) -> Tensor:
    """The functional form of a loss of pairs: its mean, or all values."""
    check_arguments(embeddings, labels, None, ref_emb, ref_labels)
    arguments = Arguments(embeddings, labels, None, ref_emb, ref_labels)
    check_reference(name, arguments)
    check_choice("reduction", reduction, Reduction)
    check_products(rule.products)
    size, budget = check_bounds(max_class_size=rule.max_class_size, memory_budget=rule.memory_budget)
    rule = replace(rule, max_class_size=size, memory_budget=budget)
    with full_precision(embeddings):
        loss = mean_of(rule, arguments) if reduction == "mean" else values_of(rule, arguments).values
    return loss.to(output_dtype(embeddings))


def check_reference(loss: str, arguments: Arguments) -> None:
    """Labels where they are needed, and a reference set that can be compared with the embeddings."""
    embeddings, labels, indices, ref_emb, ref_labels = arguments
    if indices is None and labels is None:
        raise ValueError(f"{loss}: labels are required without an indices_tuple, got None")
    if ref_emb is None:
        return
    if indices is None and ref_labels is None:
        raise ValueError(f"{loss}: ref_labels are required with ref_emb, got None")
    if ref_emb.shape[1] != embeddings.shape[1]:
        raise ValueError(
            f"ref_emb must have shape [N, {embeddings.shape[1]}] like the embeddings, got {list(ref_emb.shape)}"
        )
    if ref_emb.device != embeddings.device:
        raise ValueError(f"ref_emb must be on {embeddings.device} like the embeddings, got {ref_emb.device}")
    if accumulation_dtype(ref_emb.dtype) != accumulation_dtype(embeddings.dtype):
        raise ValueError(f"ref_emb must be of {embeddings.dtype} like the embeddings, got {ref_emb.dtype}")


def check_temperature(temperature: Any) -> None:
    """A number above 0, or a floating tensor of one number, whose value is not read."""
    if not isinstance(temperature, Tensor):
        check_positive(temperature=temperature)
        return
    if not temperature.is_floating_point():
        raise TypeError(f"temperature must be a number or a floating tensor, got {temperature.dtype}")
    if temperature.ndim:
        raise ValueError(f"temperature must be of shape [], got {list(temperature.shape)}")


def temperature_text(temperature: Temperature) -> str:
    """For `extra_repr`; does not read a tensor."""
    return f"temperature={'learned' if isinstance(temperature, Tensor) else temperature}"


def above_zero(values: Tensor, n_positives: Tensor) -> Tensor:
    """What counts in a mean over the losses above 0."""
    return values > 0


def softmax_exponents(
    temperature: Temperature, function: str, needs_scores: bool = True, others: tuple[float, ...] = ()
) -> tuple[Exponents, Tensor | None]:
    """Of s / temperature on both sides, and the temperature if it is a tensor. others: numbers for the function."""
    learnable = temperature if isinstance(temperature, Tensor) else None
    scale = 1.0 if isinstance(temperature, Tensor) else 1 / float(temperature)
    return exponents_of(softmax_maps(scale), function, (scale, *others), needs_scores), learnable


def exponents_of(
    maps: ExponentMaps, function: str, numbers: tuple[float, ...] = (), needs_scores: bool = False
) -> Exponents:
    table = tuple(float(number) for number in (*maps.positive, *maps.negative))
    return Exponents(table, maps.kind, function, numbers, needs_scores)


class Streamed(NamedTuple):
    """What a pass takes, and how its results are put into the order of the embeddings.

    n_positives: [Q] int64, in the order of the pass. unsort: None where that is the order of the embeddings.
    is_contrasted: whether there is a negative pair, [] bool.
    """

    queries: Tensor
    keys: Tensor | None
    layout: Keys
    n_positives: Tensor
    is_contrasted: Tensor
    sorted_batch: ClassLayout | None

    def unsort(self, values: Tensor) -> Tensor:
        return values if self.sorted_batch is None else self.sorted_batch.unsort(values)


def streamed(
    embeddings: Tensor,
    start: Tensor,
    count: Tensor,
    position: Tensor | None,
    keys: Tensor | None,
    order: Tensor | None,
    rule: PairRule,
    sorted_batch: ClassLayout | None = None,
) -> Streamed:
    """start, count, position: as `pair_logsumexp` takes them for keys in this order."""
    n_keys = (embeddings if keys is None else keys).shape[0]
    ranges = pair_ranges(start, count, position)
    is_scaled = rule.temperature is not None
    queries = embeddings
    if rule.temperature is not None:
        # The gradient of the temperature is that of this quotient.
        queries = unit_rows(embeddings)
        queries = queries / rule.temperature.to(queries.dtype)
    layout = Keys(ranges, order, not is_scaled, True, rule.max_class_size, rule.memory_budget, rule.products)
    n_positives = count if position is None else count - 1
    return Streamed(queries, keys, layout, n_positives, (count < n_keys).any(), sorted_batch)


def by_labels(rule: PairRule, arguments: Arguments) -> Streamed:
    embeddings, labels, _, ref_emb, ref_labels = arguments
    assert labels is not None
    if ref_emb is not None:
        assert ref_labels is not None
        sorted_labels, order = torch.sort(ref_labels.to(torch.int64), stable=True)
        ranges = class_ranges(labels.to(torch.int64).contiguous(), sorted_labels)
        return streamed(embeddings, *ranges, None, ref_emb, order, rule)
    layout = ClassLayout.from_labels(labels)
    if rule.temperature is None:
        place = torch.arange(labels.shape[0], device=labels.device)
        return streamed(embeddings, layout.start, layout.count, place, None, layout.order, rule, layout)
    place = torch.argsort(layout.order)
    return streamed(
        embeddings, layout.start[place], layout.count[place], place, embeddings, layout.order, rule
    )


def mean_of(rule: PairRule, arguments: Arguments) -> Tensor:
    """The mean, from one walk where pairs are those of labels."""
    if arguments.indices is not None or selected_backend() == "reference":
        return values_of(rule, arguments).mean()
    return streamed_mean(rule, by_labels(rule, arguments))


def streamed_mean(rule: PairRule, batch: Streamed) -> Tensor:
    total, number = logsumexp_total(batch.queries, batch.keys, batch.layout, rule.exponents, rule.counted)
    mean = total * number.clamp(min=1).reciprocal()
    return mean * batch.is_contrasted if rule.needs_negatives else mean


def values_of(rule: PairRule, arguments: Arguments) -> LossValues:
    """All values, differentiable."""
    if selected_backend() == "reference":
        return _dense_values(rule, arguments)
    if arguments.indices is not None:
        return _mined_values(rule, arguments)
    batch = by_labels(rule, arguments)
    return streamed_values(rule, batch)


def streamed_values(rule: PairRule, batch: Streamed) -> LossValues:
    if rule.of_pairs is not None:
        return _pair_values(rule, rule.of_pairs, batch)
    values = logsumexp_values(batch.queries, batch.keys, batch.layout, rule.exponents)
    counted = rule.counted(values.detach(), batch.n_positives)
    if rule.needs_negatives:
        values = values * batch.is_contrasted
    return _by_query(batch.unsort(values), batch.unsort(counted))


def _by_query(values: Tensor, counted: Tensor) -> LossValues:
    return LossValues(values, counted, torch.arange(values.shape[0], device=values.device))


def _pair_values(rule: PairRule, of_pairs: Callable[[Tensor, Tensor], Tensor], batch: Streamed) -> LossValues:
    """One value per positive pair, by query, then by key."""
    sums = sums_of(batch.queries, batch.keys, batch.layout, replace(rule.exponents, function=""))
    n_pairs, n_queries = sums.scores.shape[0], batch.n_positives.shape[0]
    rows = torch.arange(n_queries, device=sums.scores.device)
    query = rows.repeat_interleave(batch.n_positives, output_size=n_pairs)
    values = of_pairs(sums.negative.index_select(0, query), rule.exponents.maps[0] * sums.scores)
    first = torch.cumsum(batch.n_positives, 0) - batch.n_positives
    start, _, hidden_start, hidden_stop = batch.layout.ranges[query].unbind(1)
    key = start + torch.arange(n_pairs, device=query.device) - first[query]
    key = key + ((key >= hidden_start) & (hidden_stop > hidden_start))
    if batch.layout.order is not None:
        key = batch.layout.order[key]
    if batch.sorted_batch is not None:
        query = batch.sorted_batch.order[query]
        place = torch.argsort(query, stable=True)
        values, query, key = values[place], query[place], key[place]
    return LossValues(values, torch.ones_like(query), (query, key))


def _mined_values(rule: PairRule, arguments: Arguments) -> LossValues:
    indices, of_pairs = arguments.indices, rule.of_pairs
    assert indices is not None
    pairs = mined_pairs(arguments.embeddings, arguments.ref_emb, indices, unique=of_pairs is None)
    assert rule.mined is not None
    values = rule.mined(pairs)
    if of_pairs is not None:
        found = pairs.positives.query, pairs.positives.key
        return LossValues(values, torch.ones_like(found[0]), found)
    if rule.needs_negatives and not pairs.negatives.query.shape[0]:
        values = values * 0
    return _by_query(values, rule.counted(values.detach(), pairs.positives.sizes))


def _dense_values(rule: PairRule, arguments: Arguments) -> LossValues:
    embeddings, labels, indices, ref_emb, ref_labels = arguments
    embeddings, ref_emb = upcast(embeddings), None if ref_emb is None else upcast(ref_emb)
    assert rule.dense is not None
    values = rule.dense(embeddings, labels, ref_emb=ref_emb, ref_labels=ref_labels, indices_tuple=indices)
    positive = reference.pairs(embeddings, labels, ref_emb, ref_labels, indices)[1]
    if rule.of_pairs is None:
        return _by_query(values, rule.counted(values.detach(), positive.bool().sum(1)))
    query, key = positive.nonzero(as_tuple=True)
    times = positive[query, key]
    found = query.repeat_interleave(times), key.repeat_interleave(times)
    return LossValues(values, torch.ones_like(found[0]), found)
