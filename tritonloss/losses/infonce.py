"""InfoNCE: two towers, each query against its key and all others."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from tritonloss import reference
from tritonloss.backends import selected_backend
from tritonloss.losses.base import (
    check_arguments,
    check_bounds,
    check_choice,
    check_numbers,
    check_products,
    full_precision,
    output_dtype,
    refuse,
    unit_rows,
)
from tritonloss.losses.logsumexp_math import info_nce_terms
from tritonloss.losses.pairwise import (
    Arguments,
    LossValues,
    PairLoss,
    PairOptions,
    PairRule,
    Streamed,
    Temperature,
    by_labels,
    check_reference,
    check_temperature,
    softmax_exponents,
    streamed,
    streamed_mean,
    streamed_values,
    temperature_text,
)
from tritonloss.ops.pair_logsumexp import register_logsumexp_function
from tritonloss.ops.shares import own_share
from tritonloss.types import LossDict, LossTerm, PairIndices, ProductMode, Reduction, TripletIndices, upcast

if TYPE_CHECKING:
    from typing_extensions import Unpack

SeveralPositives: TypeAlias = Literal["mean", "sum"]
Directions: TypeAlias = Literal["one", "both"]


def info_nce_loss(
    embeddings: Tensor,
    ref_emb: Tensor | None = None,
    labels: Tensor | None = None,
    ref_labels: Tensor | None = None,
    *,
    temperature: Temperature = 0.05,
    positives: SeveralPositives = "mean",
    directions: Directions = "one",
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
    max_class_size: int | None = None,
    memory_budget: int | None = None,
    products: ProductMode | None = None,
) -> Tensor:
    """The loss of `InfoNCELoss`, which has the equation, the cost and the source, without its module.

    Args:
        embeddings: [Q, D], the queries, any floating dtype; normalised here.
        ref_emb: [N, D], the keys; None for the embeddings themselves, each row without itself.
        labels, ref_labels: [Q] and [N], any integer dtype or bool. Without both, key i belongs to query i.
        reduction: "mean" over the queries with a positive, or "none" for the loss of each query, [Q], 0 without one;
            of the first direction only.
        temperature, positives, directions, label_smoothing, max_class_size, memory_budget, products: as for
            `InfoNCELoss`.

    Returns:
        Scalar, or [Q], in the dtype of the embeddings (float32 inside autocast). Computed in float32 or float64.

    Raises:
        TypeError: embeddings that are not floating, labels that are not integers, an option that is no number or int.
        ValueError: as `InfoNCELoss`; an unknown reduction, "none" with both directions.
    """
    check_arguments(embeddings, labels, None, ref_emb, ref_labels)
    _check_options(temperature, positives, directions, label_smoothing)
    check_choice("reduction", reduction, Reduction)
    check_products(products)
    max_class_size, memory_budget = check_bounds(max_class_size=max_class_size, memory_budget=memory_budget)
    if reduction == "none" and directions == "both":
        raise ValueError("reduction is 'none' with directions='both': expected 'mean', or one direction")
    options = _Options(
        temperature, positives, directions, label_smoothing, max_class_size, memory_budget, products
    )
    arguments = Arguments(embeddings, labels, None, ref_emb, ref_labels)
    _check_pairing(arguments)
    with full_precision(embeddings):
        loss = _mean(options, arguments) if reduction == "mean" else _values(options, arguments).values
    return loss.to(output_dtype(embeddings))


class InfoNCELoss(PairLoss):
    """Cross entropy of each query's key among all keys, of two towers or of one.

    s is the cosine similarity of a row q of `embeddings` [Q, D] and a row j of `ref_emb` [N, D], and
    p_qj = e^(s_qj / temperature) / sum over all keys k of e^(s_qk / temperature). With the positives P(q), the keys
    that have the label of q, the loss of a query is

    | positives | loss |
    |---|---|
    | "mean" | mean over i in P(q) of -ln p_qi |
    | "sum" | -ln(sum over i in P(q) of p_qi) |

    and the loss is the mean over the queries that have a positive; 0 if there is none. With directions="both" it is the
    mean of this and of the same with queries and keys exchanged.

    `InfoNCELoss()(queries, ref_emb=keys)` takes key i for the positive of query i. Keys beyond the last query are hard
    negatives: they have no query, and no loss in the other direction. With labels [Q] and ref_labels [N] of any integer
    dtype, every key with a query's label is a positive of it, so that duplicates are no negatives of each other.
    Without `ref_emb` the keys are the other rows of the batch, and labels are required. Its term, "loss", has one loss
    for each query with a positive; with both directions it is halved, and "reverse_loss" has the other half.

    Over `DistributedLoss` extra keys need labels, because each process has some.

    Args:
        temperature: > 0, in units of the cosine; 0.05. A parameter or another floating tensor [] is learned; it must
            stay above 0, and is not read from its device.
        positives: what several positives of a query mean, see the table.
        directions: "one" for queries against keys, "both" for keys against queries as well. With `ref_emb` None both
            are the same.
        label_smoothing: in 0 <= e < 1, as in `torch.nn.functional.cross_entropy`: the loss is 1 - e times that of the
            table, and e times the mean of -ln p_qj over all keys j. Only with positives="mean". Costs O((Q + N) D).
        **options: `max_class_size`, `memory_budget`, `products`, `distance`, `reducer`, `embedding_regularizer`,
            `embedding_reg_weight`, as for `PairLoss`, which also states the cost. The bound holds for both
            directions. No call waits for the device without labels, or with positives="sum".

    Raises:
        TypeError, ValueError: as `PairLoss`; a temperature that is no number, or not positive, an unknown option. When
            called, ValueError for neither `ref_emb` nor labels, labels without `ref_labels` beside `ref_emb` and the
            reverse, fewer keys than queries without labels, an `indices_tuple`.

    Source: van den Oord et al., Representation Learning with Contrastive Predictive Coding, arXiv 1807.03748, Eq. 4;
    both directions as in Radford et al., Learning Transferable Visual Models From Natural Language Supervision, 2021.
    """

    def __init__(
        self,
        temperature: Temperature = 0.05,
        *,
        positives: SeveralPositives = "mean",
        directions: Directions = "one",
        label_smoothing: float = 0.0,
        **options: Unpack[PairOptions],
    ) -> None:
        _check_options(temperature, positives, directions, label_smoothing)
        super().__init__(**options)
        self.temperature, self.positives, self.directions = temperature, positives, directions
        self.label_smoothing = label_smoothing

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
        options = self._options()
        forward = _values(options, arguments)
        if not _is_two_way(options, arguments):
            return {"loss": _term(forward, 1)}
        reverse = _values(options, _reverse(arguments))
        return {"loss": _term(forward, 0.5), "reverse_loss": _term(reverse, 0.5)}

    def mean(self, arguments: Arguments) -> Tensor:
        """The loss in its default reduction."""
        return _mean(self._options(), arguments)

    def check(self, arguments: Arguments) -> None:
        _check_pairing(arguments)

    def _options(self) -> _Options:
        return _Options(
            self.temperature,
            self.positives,
            self.directions,
            self.label_smoothing,
            self.max_class_size,
            self.memory_budget,
            self.products,
        )

    def extra_repr(self) -> str:
        text = f"{temperature_text(self.temperature)}, positives={self.positives!r}, directions={self.directions!r}"
        return f"{text}, label_smoothing={self.label_smoothing}" if self.label_smoothing else text


class _Options(NamedTuple):
    """Those of a call, checked."""

    temperature: Temperature
    positives: SeveralPositives
    directions: Directions
    label_smoothing: float
    max_class_size: int | None
    memory_budget: int | None
    products: ProductMode | None


def _check_options(temperature: Any, positives: Any, directions: Any, label_smoothing: Any) -> None:
    check_temperature(temperature)
    check_choice("positives", positives, SeveralPositives)
    check_choice("directions", directions, Directions)
    check_numbers(label_smoothing=label_smoothing)
    if not 0 <= label_smoothing < 1:
        raise ValueError(
            f"label_smoothing is {label_smoothing}: expected a number from 0 up to, not including, 1"
        )
    if label_smoothing and positives != "mean":
        raise ValueError(f"label_smoothing is {label_smoothing} with positives={positives!r}: expected 0")


def _rule(options: _Options) -> PairRule:
    exponents, learnable = softmax_exponents(
        options.temperature,
        f"info_nce {options.positives}",
        needs_scores=options.positives == "mean",
        others=(float(options.label_smoothing),),
    )
    return PairRule(
        exponents,
        counted=_has_positive,
        temperature=learnable,
        max_class_size=options.max_class_size,
        memory_budget=options.memory_budget,
        products=options.products,
    )


def _has_positive(values: Tensor, n_positives: Tensor) -> Tensor:
    return n_positives > 0


def _is_two_way(options: _Options, arguments: Arguments) -> bool:
    return options.directions == "both" and arguments.ref_emb is not None


def _mean(options: _Options, arguments: Arguments) -> Tensor:
    """The loss; the arguments are checked."""
    forward = _one_way(options, arguments)
    if not _is_two_way(options, arguments):
        return forward
    return (forward + _one_way(options, _reverse(arguments))) / 2


def _one_way(options: _Options, arguments: Arguments) -> Tensor:
    if selected_backend() == "reference":
        return _values(options, arguments).mean()
    rule = _rule(options)
    batch = _paired(rule, arguments)
    mean = streamed_mean(rule, batch)
    if not options.label_smoothing:
        return mean
    is_query = batch.unsort(batch.n_positives) > 0
    uniform = _uniform_part(options, arguments).masked_fill(~is_query, 0).sum()
    return mean - uniform / is_query.sum().clamp(min=1).to(uniform.dtype)


def _uniform_part(options: _Options, arguments: Arguments) -> Tensor:
    """The mean exponent of all keys of each query [Q] times the smoothing. It is linear, so the keys' sum will do."""
    queries = unit_rows(arguments.embeddings)
    if arguments.ref_emb is None:
        total = queries.sum(0) - queries
        number = total.shape[0] - 1
    else:
        total = unit_rows(arguments.ref_emb).sum(0).expand_as(queries)
        number = arguments.ref_emb.shape[0]
    return (queries * total).sum(1) / options.temperature * (options.label_smoothing / max(number, 1))


def _values(options: _Options, arguments: Arguments) -> LossValues:
    """The loss of each query [Q], 0 without a positive, and whether it has one."""
    if selected_backend() != "reference":
        rule = _rule(options)
        found = streamed_values(rule, _paired(rule, arguments))
        if not options.label_smoothing:
            return found
        uniform = _uniform_part(options, arguments).masked_fill(~found.counted, 0)
        return found._replace(values=found.values - uniform)
    embeddings, labels, _, ref_emb, ref_labels = arguments
    values, is_query = reference.info_nce(
        upcast(embeddings),
        labels,
        temperature=options.temperature,
        positives=options.positives,
        label_smoothing=options.label_smoothing,
        ref_emb=None if ref_emb is None else upcast(ref_emb),
        ref_labels=ref_labels,
    )
    return LossValues(values, is_query, torch.arange(values.shape[0], device=values.device))


def _term(values: LossValues, factor: float) -> LossTerm:
    (kept,) = values.counted.nonzero(as_tuple=True)
    return {"losses": values.values[kept] * factor, "indices": kept}


def _reverse(arguments: Arguments) -> Arguments:
    """Keys against queries."""
    embeddings, labels, _, ref_emb, ref_labels = arguments
    assert ref_emb is not None
    return Arguments(ref_emb, ref_labels, None, embeddings, labels)


def _check_pairing(arguments: Arguments) -> None:
    """Both labels or, with `ref_emb`, none."""
    embeddings, labels, indices, ref_emb, ref_labels = arguments
    refuse("InfoNCELoss", indices_tuple=indices)
    if ref_emb is None and labels is None:
        raise ValueError("InfoNCELoss: ref_emb or labels are required, got None for both")
    if ref_emb is not None and labels is None:
        if ref_labels is not None:
            raise ValueError("InfoNCELoss: labels are required with ref_labels, got None")
        if ref_emb.shape[0] < embeddings.shape[0]:
            raise ValueError(
                f"ref_emb must have at least {embeddings.shape[0]} rows, one for each query, without labels; "
                f"got {ref_emb.shape[0]}"
            )
        if ref_emb.shape[0] > embeddings.shape[0] and own_share(1) is not None:
            raise ValueError(
                "InfoNCELoss: labels and ref_labels are required with more keys than queries over several processes"
            )
        # The rest of the checks needs no labels.
        labels = ref_labels = embeddings
    check_reference("InfoNCELoss", Arguments(embeddings, labels, None, ref_emb, ref_labels))


def _paired(rule: PairRule, arguments: Arguments) -> Streamed:
    embeddings, labels, _, ref_emb, _ = arguments
    if labels is not None or ref_emb is None:
        return by_labels(rule, arguments)
    place = torch.arange(embeddings.shape[0], device=embeddings.device)
    count = (place < ref_emb.shape[0]).to(torch.int64)
    return streamed(embeddings, place, count, None, ref_emb, None, replace(rule, max_class_size=1))


for _positives in ("mean", "sum"):
    register_logsumexp_function(
        f"info_nce {_positives}",
        lambda *given, kind=_positives: info_nce_terms(
            *given[:4], scale=given[4], positives=kind, smoothing=given[5]
        ),
    )
