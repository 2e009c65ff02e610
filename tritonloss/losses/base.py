"""What every loss shares: validation, options, named terms, and the dtype rules."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from numbers import Real
from typing import TYPE_CHECKING, Any, TypedDict, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tritonloss.distances import CosineSimilarity, Distance, check_distance, is_cosine
from tritonloss.indices import as_indices
from tritonloss.reducers import MeanReducer, reduce_terms
from tritonloss.regularizers import apply_regularizer
from tritonloss.types import (
    IndicesTuple,
    LossDict,
    PairIndices,
    ProductMode,
    TripletIndices,
    accumulation_dtype,
    upcast,
)
from tritonloss.types import check_count as check_count  # for the losses

_AS_IT_IS = nullcontext()
# torch has no promotion from the floating dtypes of 8 bits and below.
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class LossOptions(TypedDict, total=False):
    """The options of `BaseMetricLossFunction`."""

    distance: Distance | None
    reducer: Callable[..., Tensor] | None
    embedding_regularizer: Callable[[Tensor], Tensor] | None
    embedding_reg_weight: float


class BaseMetricLossFunction(nn.Module):
    """Base of the losses: `criterion(embeddings, labels)` is a scalar.

    A subclass defines `compute_loss`, and `default_distance` or `default_reducer` where it needs others. Everything is
    computed in float32 (float64 for float64 embeddings) with autocast off. The result has the dtype of the embeddings,
    or float32 inside autocast.

    Args:
        distance: an object of `tritonloss.distances` or of pytorch-metric-learning; None for `default_distance()`.
        reducer: an object of `tritonloss.reducers` or of pytorch-metric-learning; None for `default_reducer()`.
        embedding_regularizer: called on the embeddings [N, D] as they were given, returns a scalar.
        embedding_reg_weight: factor of that scalar, which is added after the reduction.

    Raises:
        TypeError: the distance is not one, or the regularizer or the reducer cannot be called.
    """

    def __init__(
        self,
        *,
        distance: Distance | None = None,
        reducer: Callable[..., Tensor] | None = None,
        embedding_regularizer: Callable[[Tensor], Tensor] | None = None,
        embedding_reg_weight: float = 1.0,
    ) -> None:
        super().__init__()
        for name, option in (("reducer", reducer), ("embedding_regularizer", embedding_regularizer)):
            if option is not None and not callable(option):
                raise TypeError(f"{name} must be callable or None, got {type(option).__name__}")
        self.distance = self.default_distance() if distance is None else check_distance(distance)
        self.reducer = self.default_reducer() if reducer is None else reducer
        self.embedding_regularizer = embedding_regularizer
        self.embedding_reg_weight = embedding_reg_weight

    def default_distance(self) -> Distance:
        return CosineSimilarity()

    def default_reducer(self) -> Callable[..., Tensor]:
        return MeanReducer()

    def compute_loss(
        self,
        embeddings: Tensor,
        labels: Tensor | None,
        indices_tuple: PairIndices | TripletIndices | None,
        ref_emb: Tensor | None,
        ref_labels: Tensor | None,
    ) -> LossDict:
        """The named terms of the objective; `{}` where there is nothing to compute. Defined by the subclass."""
        raise NotImplementedError(f"{type(self).__name__} must define compute_loss")

    def regularization_terms(self, embeddings: Tensor) -> LossDict:
        """The named scalars that are added to the reduced objective."""
        if self.embedding_regularizer is None:
            return {}
        penalty = apply_regularizer(self.embedding_regularizer, embeddings) * self.embedding_reg_weight
        return {"embedding_reg_loss": {"losses": penalty, "indices": None}}

    def objective_terms(
        self,
        embeddings: Tensor,
        labels: Tensor | None = None,
        indices_tuple: IndicesTuple | None = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
    ) -> LossDict:
        """The named terms of the objective, before reduction. Arguments and errors as for `forward`."""
        indices = check_arguments(embeddings, labels, indices_tuple, ref_emb, ref_labels)
        with full_precision(embeddings):
            return self.compute_loss(embeddings, labels, indices, ref_emb, ref_labels)

    def reduced_objective(
        self,
        embeddings: Tensor,
        labels: Tensor | None = None,
        indices_tuple: IndicesTuple | None = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
    ) -> Tensor:
        """The scalar that `reducer` makes of the objective terms, in float32 or float64."""
        terms = self.objective_terms(embeddings, labels, indices_tuple, ref_emb, ref_labels)
        with full_precision(embeddings):
            return reduce_terms(self.reducer, terms, embeddings, labels)

    def loss_terms(
        self,
        embeddings: Tensor,
        labels: Tensor | None = None,
        indices_tuple: IndicesTuple | None = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
    ) -> LossDict:
        """All named terms, objective and regularization, before reduction. Arguments and errors as for `forward`."""
        terms = self.objective_terms(embeddings, labels, indices_tuple, ref_emb, ref_labels)
        return {**terms, **self.regularization_terms(embeddings)}

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor | None = None,
        indices_tuple: IndicesTuple | None = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
    ) -> Tensor:
        """The loss.

        Args:
            embeddings: [N, D], dense, of dtype float16, bfloat16, float32 or float64.
            labels: [N], any integer dtype or bool, on the same device. Values are opaque: only equality counts.
            indices_tuple: mined triplets or pairs, for the losses that use them.
            ref_emb, ref_labels: a separate reference set, for the losses that use one.

        Returns:
            Scalar; zero, attached to the graph of the embeddings, where there is nothing to compute.

        Raises:
            TypeError: embeddings of another dtype or sparse, labels that are not integers, indices of another dtype.
            ValueError: wrong rank, lengths or devices that differ, an argument the loss does not support.
        """
        loss = self.reduced_objective(embeddings, labels, indices_tuple, ref_emb, ref_labels)
        for term in self.regularization_terms(embeddings).values():
            loss = loss + term["losses"]
        return loss.to(output_dtype(embeddings))

    if TYPE_CHECKING:

        def __call__(
            self,
            embeddings: Tensor,
            labels: Tensor | None = None,
            indices_tuple: IndicesTuple | None = None,
            ref_emb: Tensor | None = None,
            ref_labels: Tensor | None = None,
        ) -> Tensor: ...


class PerQueryLoss(BaseMetricLossFunction):
    """Base of the losses with one term, which has one value per query.

    A subclass defines `per_query` and the name of the term. Rows that are no queries have no value in the term; which
    they are is known on the device only, so `loss_terms`, and `forward` with another reducer than `MeanReducer`, wait
    for it. `forward` with `MeanReducer`, the default, does not: it divides the sum over all rows by the number of
    queries.
    """

    term_name = "loss"

    def per_query(
        self, embeddings: Tensor, labels: Tensor, indices_tuple: PairIndices | TripletIndices | None
    ) -> tuple[Tensor, Tensor]:
        """The value of each row [N], 0 where it is no query, and whether it is one [N] bool."""
        raise NotImplementedError(f"{type(self).__name__} must define per_query")

    def mean(
        self, embeddings: Tensor, labels: Tensor, indices_tuple: PairIndices | TripletIndices | None
    ) -> Tensor:
        """The mean over the queries, 0 without any; a subclass may know a shorter way to it."""
        return mean_of_queries(*self.per_query(embeddings, labels, indices_tuple))

    def mean_loss(
        self,
        embeddings: Tensor,
        labels: Tensor | None,
        indices_tuple: PairIndices | TripletIndices | None,
        ref_emb: Tensor | None,
        ref_labels: Tensor | None,
    ) -> Tensor:
        """`mean` of the arguments of a call."""
        name = type(self).__name__
        refuse(name, ref_emb=ref_emb, ref_labels=ref_labels)
        return self.mean(embeddings, require_labels(name, labels), indices_tuple)

    def compute_loss(
        self,
        embeddings: Tensor,
        labels: Tensor | None,
        indices_tuple: PairIndices | TripletIndices | None,
        ref_emb: Tensor | None,
        ref_labels: Tensor | None,
    ) -> LossDict:
        refuse(type(self).__name__, ref_emb=ref_emb, ref_labels=ref_labels)
        values, is_query = self.per_query(
            embeddings, require_labels(type(self).__name__, labels), indices_tuple
        )
        (kept,) = is_query.nonzero(as_tuple=True)
        return {self.term_name: {"losses": values[kept], "indices": kept}}

    def reduced_objective(
        self,
        embeddings: Tensor,
        labels: Tensor | None = None,
        indices_tuple: IndicesTuple | None = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
    ) -> Tensor:
        if type(self.reducer) is not MeanReducer:
            return super().reduced_objective(embeddings, labels, indices_tuple, ref_emb, ref_labels)
        indices = check_arguments(embeddings, labels, indices_tuple, ref_emb, ref_labels)
        with full_precision(embeddings):
            return self.mean_loss(embeddings, labels, indices, ref_emb, ref_labels)


def check_arguments(
    embeddings: Any, labels: Any, indices_tuple: Any, ref_emb: Any, ref_labels: Any
) -> PairIndices | TripletIndices | None:
    """The indices with their names, or the error that names the argument at fault."""
    check_embeddings(embeddings, "embeddings")
    if labels is not None:
        check_labels(labels, embeddings, "labels")
    if ref_emb is not None:
        check_embeddings(ref_emb, "ref_emb")
    if ref_labels is not None:
        if ref_emb is None:
            raise ValueError("ref_labels were given without ref_emb")
        check_labels(ref_labels, ref_emb, "ref_labels")
    return as_indices(indices_tuple)


def check_embeddings(embeddings: Any, name: str) -> None:
    """[N, D] floating and dense, or an error that names the argument."""
    if not isinstance(embeddings, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(embeddings).__name__}")
    if embeddings.dtype not in DTYPES:
        raise TypeError(
            f"{name} must be of a floating dtype: float16, bfloat16, float32 or float64, got {embeddings.dtype}"
        )
    if embeddings.layout != torch.strided:
        raise TypeError(f"{name} must be a dense tensor, got layout {embeddings.layout}")
    if embeddings.device.type == "meta":
        raise ValueError(f"{name} must have numbers, got a tensor on the meta device")
    if embeddings.ndim != 2:
        raise ValueError(f"{name} must have shape [N, D], got {list(embeddings.shape)}")


def check_labels(labels: Any, embeddings: Tensor, name: str) -> None:
    """[N] integers on the device of the embeddings, or an error that names the argument."""
    if not isinstance(labels, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(labels).__name__}")
    if labels.is_floating_point() or labels.is_complex():
        raise TypeError(f"{name} must be of an integer dtype or bool, got {labels.dtype}")
    if labels.ndim != 1 or labels.shape[0] != embeddings.shape[0]:
        raise ValueError(
            f"{name} must have shape [{embeddings.shape[0]}], one label per row of embeddings, got {list(labels.shape)}"
        )
    if labels.device != embeddings.device:
        raise ValueError(f"{name} must be on {embeddings.device} like the embeddings, got {labels.device}")


def require_labels(loss: str, labels: Tensor | None) -> Tensor:
    if labels is None:
        raise ValueError(f"{loss}: labels are required, got None")
    return labels


def refuse(loss: str, **arguments: Any) -> None:
    """Raise for arguments that a loss does not support and that are not None."""
    for name, value in arguments.items():
        if value is not None:
            raise ValueError(f"{loss} does not support {name}: expected None, got {type(value).__name__}")


def require_cosine(loss: str, distance: Distance) -> None:
    if not is_cosine(distance):
        raise TypeError(
            f"{loss}: distance must be plain CosineSimilarity (p = 2, power = 1), got {type(distance).__name__}"
        )


def check_numbers(**options: Any) -> None:
    """Raise TypeError for an option that is no real number, ValueError for NaN; both name the option."""
    for name, value in options.items():
        if isinstance(value, bool) or not isinstance(value, Real):
            raise TypeError(f"{name} must be a number, got {type(value).__name__}")
        if value != value:
            raise ValueError(f"{name} is {value}: expected a number")


def check_positive(**options: Any) -> None:
    """Each option is a number above 0, or an error that names it."""
    check_numbers(**options)
    for name, value in options.items():
        if not value > 0:
            raise ValueError(f"{name} is {value}: expected a number above 0")


def check_bounds(**bounds: Any) -> list[int | None]:
    """Each is None or as for `check_count`; in their order."""
    return [None if value is None else check_count(name, value) for name, value in bounds.items()]


def check_products(products: Any) -> None:
    """None, or how rows are multiplied."""
    if products is not None:
        check_choice("products", products, ProductMode)


def check_choice(name: str, value: Any, choices: Any) -> None:
    """One of the values of a Literal, or an error that lists them."""
    if value not in get_args(choices):
        raise ValueError(f"{name} is {value!r}: expected one of {', '.join(map(str, get_args(choices)))}")


def full_precision(embeddings: Tensor) -> AbstractContextManager[Any]:
    """Autocast off on the device of the embeddings."""
    kind = embeddings.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else _AS_IT_IS


def output_dtype(embeddings: Tensor) -> torch.dtype:
    """The dtype of a loss: that of the embeddings; inside autocast never below float32."""
    if torch.is_autocast_enabled(embeddings.device.type):
        return accumulation_dtype(embeddings.dtype)
    return embeddings.dtype


def unit_rows(embeddings: Tensor) -> Tensor:
    """Rows divided by their Euclidean norm (by 1e-12 if that is larger), in float32 or float64."""
    return F.normalize(upcast(embeddings), dim=1)


def mean_of_queries(per_query: Tensor, is_query: Tensor) -> Tensor:
    """Sum of the losses [N], 0 where a row is no query, over the number of queries; 0 without any."""
    return per_query.sum() / is_query.sum().clamp(min=1).to(per_query.dtype)


def fraction(part: Tensor, rest: Tensor) -> Tensor:
    """part / (part + rest) for part, rest >= 0; 0 where both are 0.

    Each element takes the form whose derivative does not cancel: that of part / (part + rest) loses all digits where
    part is far larger than rest.
    """
    whole = part + rest
    whole = torch.where(whole == 0, 1, whole)
    return torch.where(part <= rest, part / whole, 1 - rest / whole)
