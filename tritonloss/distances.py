"""Distances and similarities between the rows of two matrices."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from tritonloss.absent import attributes_of
from tritonloss.types import accumulation_dtype, upcast


class Distance(Protocol):
    """What a loss needs of the object passed as `distance=`."""

    is_inverted: bool

    def __call__(self, query: Tensor, ref: Tensor | None = None, /) -> Tensor: ...


class BaseDistance(nn.Module):
    """Base of the distances: `distance(query, ref)` is the matrix of all pairs.

    A subclass defines `compute_mat`. Rows are normalised, if at all, and half precision is converted to float32
    before it; the result is raised to `power` after it. Autocast has no effect inside.

    Args:
        normalize_embeddings: divide each row by its p-norm first.
        p: order of the norm, > 0.
        power: exponent applied to the matrix.
        is_inverted: True where larger means closer (a similarity).
    """

    def __init__(
        self, normalize_embeddings: bool = True, p: float = 2, power: float = 1, is_inverted: bool = False
    ) -> None:
        super().__init__()
        self.normalize_embeddings = normalize_embeddings
        self.p = p
        self.power = power
        self.is_inverted = is_inverted

    if TYPE_CHECKING:

        def __call__(self, query: Tensor, ref: Tensor | None = None) -> Tensor: ...

    def forward(self, query: Tensor, ref: Tensor | None = None) -> Tensor:
        """Distance of every row of `query` to every row of `ref`.

        Time is O(Q N D), memory O(Q N + (Q + N) D).

        Args:
            query: floating tensor [Q, D].
            ref: floating tensor [N, D]; None stands for `query`. Beside half or bfloat16, float32 is accepted in
                the other tensor.

        Returns:
            Matrix [Q, N], float64 for float64 input and float32 for any other.

        Raises:
            TypeError: a tensor is not floating.
            ValueError: a tensor is not two-dimensional, or the tensors differ in width, in the dtype they are
                computed in or in device.
        """
        _check_rows("query", query)
        if ref is not None:
            _check_rows("ref", ref)
            _check_match(query, ref)
        with torch.autocast(query.device.type, enabled=False):
            prepare = self.normalize if self.normalize_embeddings else upcast
            rows = prepare(query)
            columns = rows if ref is None else prepare(ref)
            matrix = self.compute_mat(rows, columns)
            return matrix if self.power == 1 else matrix.pow(self.power)

    def compute_mat(self, query: Tensor, ref: Tensor) -> Tensor:
        """The matrix [Q, N] of prepared rows [Q, D] and [N, D], before `power`. Defined by the subclass."""
        raise NotImplementedError(f"{type(self).__name__} must define compute_mat")

    def normalize(self, embeddings: Tensor) -> Tensor:
        """Rows [N, D] divided by their p-norm, or by 1e-12 where the norm is smaller; float32 or float64."""
        return F.normalize(upcast(embeddings), p=self.p, dim=1)

    def margin(self, x: Tensor, y: Tensor) -> Tensor:
        """By how much `x` is farther than `y`: `x - y` for a distance, `y - x` for a similarity."""
        return y - x if self.is_inverted else x - y


class DotProductSimilarity(BaseDistance):
    """Dot product of the rows; larger is closer. The rows are not normalised by default.

    Args:
        normalize_embeddings: divide each row by its p-norm first.
        p: order of that norm, > 0.
        power: exponent applied to the matrix.
    """

    def __init__(self, normalize_embeddings: bool = False, *, p: float = 2, power: float = 1) -> None:
        super().__init__(normalize_embeddings, p, power, is_inverted=True)

    def compute_mat(self, query: Tensor, ref: Tensor) -> Tensor:
        return query @ ref.T


class CosineSimilarity(DotProductSimilarity):
    """Dot product of the normalised rows, in [-1, 1] up to rounding; larger is closer.

    Args:
        p: order of the norm that the rows are divided by, > 0. Only 2 gives the cosine.
        power: exponent applied to the matrix.
    """

    def __init__(self, *, p: float = 2, power: float = 1) -> None:
        super().__init__(normalize_embeddings=True, p=p, power=power)


class LpDistance(BaseDistance):
    """`||query_i - ref_j||_p ** power`; smaller is closer.

    The differences are taken before they are squared, so that duplicates have distance 0, not the root of a
    rounding error. The gradient of the norm at 0 is 0.

    For p = 2 the backward is two matrix products. For any other p it is that of `torch.cdist`: no second
    derivative, and on CUDA O(Q N D) memory.

    Args:
        p: order of the norm, > 0; also of the norm that the rows are divided by.
        power: exponent applied to the distance.
        normalize_embeddings: divide each row by its p-norm first.
    """

    def __init__(self, p: float = 2, power: float = 1, *, normalize_embeddings: bool = True) -> None:
        super().__init__(normalize_embeddings, p, power, is_inverted=False)

    def compute_mat(self, query: Tensor, ref: Tensor) -> Tensor:
        if self.p == 2:
            return cast(Tensor, _EuclideanDistance.apply(query, ref))  # type: ignore[no-untyped-call]
        return torch.cdist(query, ref, p=self.p)


class _EuclideanDistance(torch.autograd.Function):
    """`torch.cdist` with exact differences, whose backward needs no [Q, N, D] buffer on CUDA."""

    @staticmethod
    def forward(query: Tensor, ref: Tensor) -> Tensor:
        return torch.cdist(query, ref, compute_mode="donot_use_mm_for_euclid_dist")

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs, output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        query, ref, distance = ctx.saved_tensors
        ratio = (grad / distance).masked_fill(distance == 0, 0)
        query_needs_grad, ref_needs_grad = ctx.needs_input_grad
        grad_query = ratio.sum(1, keepdim=True) * query - ratio @ ref if query_needs_grad else None
        grad_ref = ratio.sum(0).unsqueeze(1) * ref - ratio.T @ query if ref_needs_grad else None
        return grad_query, grad_ref


def parameters_of(distance: object) -> tuple[Tensor, ...]:
    """The parameters of a distance; none if it is no module."""
    return tuple(distance.parameters()) if isinstance(distance, nn.Module) else ()


def call_with_parameters(
    distance: Callable[..., Tensor], parameters: Sequence[Tensor], query: Tensor, ref: Tensor
) -> Tensor:
    """distance(query, ref) with `parameters` in place of `parameters_of(distance)`, outside autocast.

    A backward pass that calls the distance again gives the gradient to the tensors that the forward pass had.
    """
    with torch.autocast(query.device.type, enabled=False):
        if not parameters:
            return distance(query, ref)
        assert isinstance(distance, nn.Module)
        names = [name for name, _ in distance.named_parameters()]
        matrix: Tensor = functional_call(distance, dict(zip(names, parameters, strict=True)), (query, ref))
        return matrix


def is_cosine(distance: object) -> bool:
    """Whether `distance` is plain cosine similarity, so that a loss may compute it in blocks by itself.

    It is if a class named `CosineSimilarity` is among its classes (ours, or pytorch-metric-learning's), nothing
    more derived replaces the formula, and `p`, `power`, `is_inverted` and `normalize_embeddings` are the cosine's.
    """
    expected = {"p": 2, "power": 1, "is_inverted": True, "normalize_embeddings": True}
    return _has_formula(distance, "CosineSimilarity", expected)


def is_dot_product(distance: object, *, normalized: bool = False) -> bool:
    """Whether `distance` is the plain dot product, of rows that are not normalised, or are; decided as by `is_cosine`.

    pytorch-metric-learning's normalises rows unless it is told not to.
    """
    expected = {"power": 1, "is_inverted": True, "normalize_embeddings": normalized}
    if normalized:
        expected["p"] = 2
    return _has_formula(distance, "DotProductSimilarity", expected)


def is_euclidean(distance: object) -> bool:
    """Whether `distance` is a power of the Euclidean distance of normalised rows; decided as by `is_cosine`."""
    expected = {"p": 2, "is_inverted": False, "normalize_embeddings": True}
    return _has_formula(distance, "LpDistance", expected)


def check_distance(distance: object) -> Distance:
    """Returns `distance` if a loss can use it: it is callable and `is_inverted` is True or False.

    Raises:
        TypeError: it is not, or it is a class instead of an instance.
    """
    accepted = (
        "distance must be a callable object with a bool attribute is_inverted, such as CosineSimilarity()"
    )
    if isinstance(distance, type):
        raise TypeError(f"{accepted}, got the class {distance.__name__}: pass an instance of it")
    if not callable(distance) or not isinstance(getattr(distance, "is_inverted", None), bool):
        raise TypeError(f"{accepted}, got {type(distance).__name__}")
    return cast(Distance, distance)


def _has_formula(distance: object, name: str, expected: Mapping[str, object]) -> bool:
    """Whether `distance` is a `name` whose formula nothing replaces, with these attributes."""
    classes = type(distance).__mro__
    names = [cls.__name__ for cls in classes]
    if name not in names:
        return False
    formula = ("__call__", "forward", "compute_mat", "maybe_normalize", "normalize")
    original = classes[names.index(name)]
    if any(getattr(type(distance), part, None) is not getattr(original, part, None) for part in formula):
        return False
    if any(part in distance.__dict__ for part in formula):
        return False
    return all(getattr(distance, attribute, None) == value for attribute, value in expected.items())


def _check_rows(name: str, tensor: Tensor) -> None:
    if not tensor.is_floating_point():
        raise TypeError(f"{name} must be a floating tensor, got {tensor.dtype}")
    if tensor.ndim != 2:
        raise ValueError(
            f"{name} must have two dimensions, rows and features, got shape {list(tensor.shape)}"
        )


def _check_match(query: Tensor, ref: Tensor) -> None:
    if query.shape[1] != ref.shape[1]:
        raise ValueError(
            "query and ref must have the same number of columns, "
            f"got shapes {list(query.shape)} and {list(ref.shape)}"
        )
    if accumulation_dtype(query.dtype) != accumulation_dtype(ref.dtype):
        raise ValueError(
            f"query and ref must both be float64 or both be lower, got {query.dtype} and {ref.dtype}"
        )
    if query.device != ref.device:
        raise ValueError(f"query and ref must be on the same device, got {query.device} and {ref.device}")


if not TYPE_CHECKING:
    __getattr__ = attributes_of(
        __name__, ["Distance", "BaseDistance", "DotProductSimilarity", "CosineSimilarity", "LpDistance"]
    )
