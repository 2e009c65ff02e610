"""Reducers: from the named terms of a loss to one scalar."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tritonloss.absent import attributes_of
from tritonloss.types import LossDict, LossTerm, accumulation_dtype, upcast


def differentiable_zero(embeddings: Tensor) -> Tensor:
    """A scalar 0 in the graph of `embeddings`, whose gradient is 0.

    No value of `embeddings` is read, so NaN and Inf among them do not matter. Time and memory are constant; the
    backward writes one gradient of the size of `embeddings`.

    Args:
        embeddings: floating tensor [N, ...]; N may be 0.

    Returns:
        Scalar, float64 for float64 embeddings and float32 for any other.
    """
    return embeddings[:0].sum(dtype=accumulation_dtype(embeddings.dtype))


class BaseReducer(nn.Module):
    """Base of the reducers: reduces each term to a scalar and adds the scalars.

    A subclass defines `reduce_losses`. Terms whose `indices` are None are scalars already and are added as they
    are. No terms at all give a zero in the graph of the embeddings.
    """

    if TYPE_CHECKING:

        def __call__(self, terms: LossDict, embeddings: Tensor, labels: Tensor | None = None) -> Tensor: ...

    def forward(self, terms: LossDict, embeddings: Tensor, labels: Tensor | None = None) -> Tensor:
        """The sum of the reduced terms.

        Args:
            terms: named terms. Losses in half precision are reduced in float32.
            embeddings: floating tensor [N, D] that the terms were computed from.
            labels: labels [N] of the embeddings. None of the reducers here uses them, a reducer of the user's may.

        Returns:
            Scalar, float64 for float64 terms and float32 for any other.

        Raises:
            ValueError: a term carries a divisor and its reducer cannot use one, or the reverse; or a term has
                no indices and is not a scalar.
        """
        if not terms:
            return differentiable_zero(embeddings)
        return _add([self.reduce_term(name, term, embeddings, labels) for name, term in terms.items()])

    def reduce_term(self, name: str, term: LossTerm, embeddings: Tensor, labels: Tensor | None) -> Tensor:
        """One term to a scalar, in float32 or float64."""
        losses = upcast(term["losses"])
        if term["indices"] is None:
            if losses.ndim != 0:
                raise ValueError(
                    f"term {name!r} has no indices, so it must be a scalar, got shape {list(losses.shape)}"
                )
            return losses
        _check_divisor(self, name, term)
        return self.reduce_losses(losses, term, embeddings, labels)

    def reduce_losses(
        self, losses: Tensor, term: LossTerm, embeddings: Tensor, labels: Tensor | None
    ) -> Tensor:
        """`losses`, the losses [M] of `term` in float32 or float64, to a scalar. Defined by the subclass."""
        raise NotImplementedError(f"{type(self).__name__} must define reduce_losses")


class MeanReducer(BaseReducer):
    """The arithmetic mean of each term's losses; 0 where a term has none. Refuses terms that carry a divisor."""

    def reduce_losses(
        self, losses: Tensor, term: LossTerm, embeddings: Tensor, labels: Tensor | None
    ) -> Tensor:
        return losses.mean() if losses.numel() else differentiable_zero(embeddings)


class AvgNonZeroReducer(BaseReducer):
    """The mean of those of each term's losses that are above 0; 0 where none is. Refuses terms that carry a divisor.

    A NaN among the losses makes the result NaN.
    """

    def reduce_losses(
        self, losses: Tensor, term: LossTerm, embeddings: Tensor, labels: Tensor | None
    ) -> Tensor:
        if not losses.numel():
            return differentiable_zero(embeddings)
        counted = losses.detach() > 0
        # What is below 0 is left out, what is NaN is not.
        total = losses.masked_fill(losses.detach() <= 0, 0).sum()
        return total / counted.sum().clamp(min=1).to(losses.dtype)


class DivisorReducer(BaseReducer):
    """The sum of each term's losses over the term's divisor; 0 where the divisor is 0.

    Refuses terms without a divisor, other than scalars. A divisor that is a tensor is not read back from the device.
    """

    def reduce_losses(
        self, losses: Tensor, term: LossTerm, embeddings: Tensor, labels: Tensor | None
    ) -> Tensor:
        divisor = term["divisor"]
        if isinstance(divisor, Tensor):
            divisor = divisor.to(losses)
            is_zero = divisor == 0
            # Dividing by 0 in the branch that is not taken would still make its gradient NaN.
            mean = losses.sum() / divisor.masked_fill(is_zero, 1)
            return torch.where(is_zero, differentiable_zero(embeddings), mean)
        return losses.sum() / divisor if divisor != 0 else differentiable_zero(embeddings)


class MultipleReducers(BaseReducer):
    """Reduces each term with the reducer of its name and adds the results.

    Args:
        reducers: name of a term -> its reducer, one of these or of pytorch-metric-learning's.
        default_reducer: the reducer of the other terms; None stands for `MeanReducer()`.
    """

    def __init__(self, reducers: Mapping[str, nn.Module], default_reducer: nn.Module | None = None) -> None:
        super().__init__()
        self.reducers = nn.ModuleDict(reducers)
        self.default_reducer = MeanReducer() if default_reducer is None else default_reducer

    def reduce_term(self, name: str, term: LossTerm, embeddings: Tensor, labels: Tensor | None) -> Tensor:
        return reduce_terms(_reducer_of(self, name), {name: term}, embeddings, labels)


def reduce_terms(
    reducer: Callable[..., Tensor], terms: LossDict, embeddings: Tensor, labels: Tensor | None
) -> Tensor:
    """Reduces `terms` with one of the reducers above or with one of pytorch-metric-learning 2.9's.

    A reducer that is not ours is called as `reducer(terms, embeddings, labels)`. Its terms have the extra key
    "reduction_type" of version 2.9, and it sees one term at a time unless it is a `MultipleReducers`. Terms
    without losses are not handed to it. A `DivisorReducer` of version 2.9 reads a divisor back from the device.

    Args:
        reducer: a `BaseReducer`, or any callable that takes the above and returns a scalar tensor.
        terms: named terms. Losses in half precision are reduced in float32.
        embeddings: floating tensor [N, D] that the terms were computed from.
        labels: labels [N] of the embeddings, or None.

    Returns:
        Scalar, float64 for float64 terms and float32 for any other.

    Raises:
        TypeError: the reducer is not callable, is a class instead of an instance, or does not return a scalar tensor.
        ValueError: a term carries a divisor and its reducer is no `DivisorReducer`, or the reverse.
    """
    if isinstance(reducer, BaseReducer):
        return upcast(reducer(terms, embeddings, labels))
    if isinstance(reducer, type):
        raise TypeError(f"reducer must be callable, got the class {reducer.__name__}: pass an instance of it")
    if not callable(reducer):
        raise TypeError(f"reducer must be callable, got {type(reducer).__name__}")
    for name, term in terms.items():
        _check_divisor(reducer, name, term)
    legacy_terms = {name: _legacy_term(name, term) for name, term in terms.items() if term["losses"].numel()}
    if not legacy_terms:
        return differentiable_zero(embeddings)
    embeddings = upcast(embeddings)
    if "MultipleReducers" in _class_names(reducer):
        return _scalar(reducer, reducer(legacy_terms, embeddings, labels))
    return _add(
        [_scalar(reducer, reducer({name: term}, embeddings, labels)) for name, term in legacy_terms.items()]
    )


def _legacy_term(name: str, term: LossTerm) -> dict[str, Any]:
    """The term in version 2.9's form, which says in words what v3 reads from the indices."""
    indices = term["indices"]
    if indices is None:
        reduction_type = "already_reduced"
    elif isinstance(indices, Tensor):
        reduction_type = "element"
    elif len(indices) == 3:
        reduction_type = "triplet"
    else:
        reduction_type = "neg_pair" if name.startswith("neg") else "pos_pair"
    return {**term, "losses": upcast(term["losses"]), "reduction_type": reduction_type}


def _check_divisor(reducer: object, name: str, term: LossTerm) -> None:
    """A divisor is used, never dropped; scalars need none."""
    if term["indices"] is None or ("divisor" in term) == _uses_divisor(reducer, name):
        return
    kind = type(reducer).__name__
    if "divisor" in term:
        raise ValueError(
            f"reducer {kind} cannot use the divisor of term {name!r}; "
            "pass a DivisorReducer, or MultipleReducers with one for this term"
        )
    raise ValueError(f"reducer {kind} needs a divisor, and term {name!r} has none; pass a MeanReducer")


def _uses_divisor(reducer: Any, name: str) -> bool:
    names = _class_names(reducer)
    if "MultipleReducers" in names:
        return _uses_divisor(_reducer_of(reducer, name), name)
    return "DivisorReducer" in names


def _reducer_of(reducers: Any, name: str) -> Any:
    """The reducer that a `MultipleReducers`, ours or pytorch-metric-learning's, uses for the term `name`."""
    by_name = reducers.reducers
    if name not in by_name:
        return reducers.default_reducer
    return by_name[name]


def _class_names(reducer: object) -> list[str]:
    # No set: torch.compile of torch 2.6 cannot build one of names.
    return [cls.__name__ for cls in type(reducer).__mro__]


def _scalar(reducer: object, result: Any) -> Tensor:
    if not isinstance(result, Tensor) or result.ndim != 0:
        got = f"shape {list(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
        raise TypeError(f"reducer {type(reducer).__name__} must return a scalar tensor, got {got}")
    return upcast(result)


def _add(values: list[Tensor]) -> Tensor:
    return torch.stack(values).sum()


if not TYPE_CHECKING:
    __getattr__ = attributes_of(
        __name__, ["BaseReducer", "MeanReducer", "DivisorReducer", "MultipleReducers"]
    )
