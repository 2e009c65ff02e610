"""Distances against pytorch-metric-learning 2.9, closed forms and finite differences."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from pytorch_metric_learning import distances as pml
from torch import Tensor, nn

from tritonloss.distances import (
    BaseDistance,
    CosineSimilarity,
    DotProductSimilarity,
    LpDistance,
    check_distance,
    is_cosine,
    is_dot_product,
)

OURS_AND_PML = [
    pytest.param(CosineSimilarity(), pml.CosineSimilarity(), id="cosine"),
    pytest.param(CosineSimilarity(p=1, power=2), pml.CosineSimilarity(p=1, power=2), id="cosine-p1-power2"),
    pytest.param(DotProductSimilarity(), pml.DotProductSimilarity(normalize_embeddings=False), id="dot"),
    pytest.param(DotProductSimilarity(True, p=3), pml.DotProductSimilarity(p=3), id="dot-normalised"),
    pytest.param(LpDistance(), pml.LpDistance(), id="l2"),
    pytest.param(LpDistance(power=2), pml.LpDistance(power=2), id="l2-squared"),
    pytest.param(LpDistance(p=1), pml.LpDistance(p=1), id="l1"),
    pytest.param(LpDistance(p=3, power=0.5), pml.LpDistance(p=3, power=0.5), id="l3-root"),
    pytest.param(
        LpDistance(normalize_embeddings=False), pml.LpDistance(normalize_embeddings=False), id="l2-raw"
    ),
]
DISTANCES = [CosineSimilarity(), DotProductSimilarity(), LpDistance(), LpDistance(power=2), LpDistance(p=1)]
SIZES = [(7, 5), (40, 30)]  # torch.cdist takes another path beyond 25 rows


def rows(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def value_and_gradients(distance: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    matrix = distance(*leaves)
    upstream = rows(*matrix.shape, seed=9).to(matrix.dtype)
    return matrix.detach(), *torch.autograd.grad(matrix, leaves, upstream)


def describe(distance: BaseDistance) -> str:
    return f"{type(distance).__name__}-p{distance.p}-power{distance.power}"


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("ours", "peer"), OURS_AND_PML)
def test_two_sets_equal_pml(ours: BaseDistance, peer: nn.Module, sizes: tuple[int, int]) -> None:
    query, ref = rows(sizes[0], 6), rows(sizes[1], 6, seed=1)
    # Rounding of sums of a few dozen terms of order 1 in float64.
    torch.testing.assert_close(
        value_and_gradients(ours, query, ref), value_and_gradients(peer, query, ref), atol=1e-12, rtol=1e-12
    )


@pytest.mark.parametrize(("ours", "peer"), OURS_AND_PML[:5])
def test_one_set_equals_pml(ours: BaseDistance, peer: nn.Module) -> None:
    query = rows(7, 6)
    # As above.
    torch.testing.assert_close(
        value_and_gradients(ours, query), value_and_gradients(peer, query), atol=1e-12, rtol=1e-12
    )


def test_dot_product_is_not_normalised_by_default() -> None:
    assert DotProductSimilarity()(torch.tensor([[3.0, 4.0]])).tolist() == [[25.0]]
    assert pml.DotProductSimilarity()(torch.tensor([[3.0, 4.0]])).item() == pytest.approx(1)  # up to rounding


@pytest.mark.parametrize("distance", DISTANCES, ids=describe)
def test_margin_and_direction_equal_pml(distance: BaseDistance) -> None:
    peer = getattr(pml, type(distance).__name__)()
    near, far = torch.tensor(0.25), torch.tensor(1.0)
    assert distance.is_inverted is peer.is_inverted
    assert distance.margin(near, far) == peer.margin(near, far) != 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("distance", DISTANCES, ids=describe)
def test_half_precision_is_computed_in_float32(distance: BaseDistance, dtype: torch.dtype) -> None:
    query, ref = rows(7, 6, dtype=dtype), rows(5, 6, dtype=dtype, seed=1)
    # Bit-equal: the same float32 operations on the same values.
    assert torch.equal(distance(query, ref), distance(query.float(), ref.float()))
    assert torch.equal(distance(query, ref.float()), distance(query.float(), ref.float()))
    assert distance(query, ref).dtype == torch.float32
    _, grad_query, grad_ref = value_and_gradients(distance, query, ref)
    assert grad_query.dtype == grad_ref.dtype == dtype
    assert grad_query.isfinite().all()
    assert grad_ref.isfinite().all()


@pytest.mark.parametrize("distance", DISTANCES, ids=describe)
def test_autocast_changes_nothing(distance: BaseDistance) -> None:
    query = rows(7, 6, dtype=torch.float32)
    expected = distance(query)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(distance(query), expected)


@pytest.mark.parametrize("n", [2, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("p", [1, 2, 3])
def test_duplicates_have_distance_and_gradient_zero(p: float, dtype: torch.dtype, n: int) -> None:
    row = rows(1, 16, dtype=dtype)
    query = row.repeat(n, 1).requires_grad_()
    matrix = LpDistance(p=p)(query)
    matrix.sum().backward()
    assert query.grad is not None
    assert torch.count_nonzero(matrix) == 0
    assert torch.count_nonzero(query.grad) == 0


@pytest.mark.parametrize("n", [2, 40])
def test_duplicates_among_others_add_nothing_to_the_gradient(n: int) -> None:
    """Each row occurs twice: what remains is the gradient of the distances to the other rows."""
    half = rows(n, 4)
    query = half.repeat(2, 1).requires_grad_()
    LpDistance(normalize_embeddings=False)(query).sum().backward()
    difference = half.unsqueeze(1) - half
    direction = difference / difference.norm(dim=2, keepdim=True).clamp_min(1e-300)
    expected = 4 * direction.sum(1)  # ordered pairs count twice, and so do the copies
    # Rounding of 2n terms of order 1 in float64.
    torch.testing.assert_close(query.grad, expected.repeat(2, 1), atol=1e-12, rtol=1e-12)


def test_squared_distance_has_the_gradient_of_the_square_at_zero() -> None:
    query = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]], requires_grad=True)
    LpDistance(power=2, normalize_embeddings=False)(query).sum().backward()
    # sum over i, j of ||x_i - x_j||^2 = 2 N sum ||x_i||^2 - 2 ||sum x_i||^2; its gradient 4 (N x_i - sum x) is
    # made of small integers, so that only the root and its square round: one unit in the last place of 4.
    expected = torch.tensor([[4.0, -4.0], [4.0, -4.0], [-8.0, 8.0]])
    torch.testing.assert_close(query.grad, expected, atol=2e-6, rtol=0)


def test_close_rows_keep_their_distance_in_float32() -> None:
    """Not the root of a rounding error, which in float32 is 3e-4 for unit rows."""
    query = torch.zeros(40, 8)
    query[:, 0] = 1
    query[0, 1] = 2.0**-14
    matrix = LpDistance(normalize_embeddings=False)(query)
    assert matrix[0, 1:].tolist() == [2.0**-14] * 39
    assert torch.count_nonzero(matrix[1:, 1:]) == 0


def test_nan_rows_propagate() -> None:
    query = rows(3, 4).requires_grad_()
    with torch.no_grad():
        query[0, 0] = torch.nan
    for distance in DISTANCES:
        matrix = distance(query)
        (gradient,) = torch.autograd.grad(matrix.sum(), query)
        assert matrix[0].isnan().all()
        assert matrix[1:, 1:].isfinite().all()
        assert gradient[0].isnan().any()


@pytest.mark.parametrize("distance", DISTANCES, ids=describe)
def test_zero_rows_and_empty_sets(distance: BaseDistance) -> None:
    zeros = torch.zeros(2, 3, requires_grad=True)
    distance(zeros, torch.ones(1, 3)).sum().backward()
    assert zeros.grad is not None
    assert zeros.grad.isfinite().all()
    empty = torch.zeros(0, 3, requires_grad=True)
    matrix = distance(empty, torch.ones(2, 3))
    matrix.sum().backward()
    assert matrix.shape == (0, 2)
    assert empty.grad is not None
    assert empty.grad.shape == (0, 3)
    assert distance(empty).shape == (0, 0)


@pytest.mark.parametrize("distance", [CosineSimilarity(), LpDistance(), LpDistance(power=2)], ids=describe)
def test_finite_differences(distance: BaseDistance) -> None:
    query, ref = rows(3, 4).requires_grad_(), rows(2, 4, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(distance, (query, ref))
    assert torch.autograd.gradgradcheck(distance, (query, ref))


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_frozen_side_costs_no_gradient(frozen: int) -> None:
    inputs = [rows(4, 3), rows(5, 3, seed=1)]
    both = value_and_gradients(LpDistance(), *inputs)
    inputs[1 - frozen].requires_grad_()
    matrix = LpDistance()(*inputs)
    matrix.backward(rows(*matrix.shape, seed=9))
    assert inputs[frozen].grad is None
    assert torch.equal(inputs[1 - frozen].grad, both[2 - frozen])  # type: ignore[arg-type]


@pytest.mark.parametrize("distance", DISTANCES, ids=describe)
def test_strides_do_not_matter(distance: BaseDistance) -> None:
    query, ref = rows(6, 4, dtype=torch.float32), rows(5, 4, dtype=torch.float32, seed=1)
    wide = torch.empty(6, 9)[:, 2:6].copy_(query)
    transposed = ref.t().contiguous().t()
    expected = value_and_gradients(distance, query, ref)
    for got, want in zip(value_and_gradients(distance, wide, transposed), expected, strict=True):
        # A transposed operand may change the order of a float32 sum of 4 to 6 terms of order 1.
        torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-6)


# Dynamo itself instantiates the class it warns about when it traces an autograd function.
@pytest.mark.filterwarnings("ignore:.*torch.autograd.function.Function.* should not be instantiated")
@pytest.mark.parametrize("distance", DISTANCES, ids=describe)
def test_compile_without_a_graph_break(distance: BaseDistance) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(distance, fullgraph=True, backend="aot_eager")
    query, ref = rows(6, 4), rows(5, 4, seed=1)
    # Decompositions may sum in another order: rounding in float64.
    torch.testing.assert_close(
        value_and_gradients(compiled, query, ref),
        value_and_gradients(distance, query, ref),
        atol=1e-12,
        rtol=1e-12,
    )


@pytest.mark.parametrize("distance", DISTANCES, ids=describe)
def test_pickle_and_copy_keep_the_options(distance: BaseDistance) -> None:
    query = rows(4, 3)
    for other in (pickle.loads(pickle.dumps(distance)), copy.deepcopy(distance)):
        assert type(other) is type(distance)
        assert torch.equal(other(query), distance(query))
    assert distance.state_dict() == {}


@pytest.mark.parametrize(
    ("inputs", "error", "text"),
    [
        ((torch.ones(3),), ValueError, r"query must have two dimensions.* got shape \[3\]"),
        ((torch.ones(2, 3), torch.ones(3)), ValueError, r"ref must have two dimensions.* got shape \[3\]"),
        (
            (torch.ones(2, 3, dtype=torch.int64),),
            TypeError,
            "query must be a floating tensor, got torch.int64",
        ),
        (
            (torch.ones(2, 3), torch.ones(2, 4)),
            ValueError,
            r"same number of columns, got shapes \[2, 3\] and",
        ),
        ((torch.ones(2, 3), torch.ones(2, 3).double()), ValueError, "got torch.float32 and torch.float64"),
        ((torch.ones(2, 3), torch.ones(2, 3, device="meta")), ValueError, "same device, got cpu and meta"),
    ],
)
def test_errors_name_the_argument(inputs: tuple[Tensor, ...], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        CosineSimilarity()(*inputs)


def test_a_subclass_defines_only_the_matrix() -> None:
    class Manhattan(BaseDistance):
        def compute_mat(self, query: Tensor, ref: Tensor) -> Tensor:
            return (query.unsqueeze(1) - ref).abs().sum(2)

    query = rows(4, 3)
    # Rounding of a sum of 3 terms in float64.
    torch.testing.assert_close(Manhattan(p=1)(query), LpDistance(p=1)(query), atol=1e-14, rtol=0)
    with pytest.raises(NotImplementedError, match="BaseDistance must define compute_mat"):
        BaseDistance()(query)


def derived(base: type, name: str) -> Any:
    return type("Derived", (base,), {name: lambda self, *args, **kwargs: None})()


def with_attribute(distance: Any, name: str, value: Any) -> Any:
    setattr(distance, name, value)
    return distance


@pytest.mark.parametrize("base", [CosineSimilarity, pml.CosineSimilarity])
def test_is_cosine_accepts_ours_and_pml(base: type) -> None:
    assert is_cosine(base())
    assert is_cosine(derived(base, "margin"))  # the formula is untouched


@pytest.mark.parametrize("base", [CosineSimilarity, pml.CosineSimilarity])
@pytest.mark.parametrize("name", ["forward", "__call__", "compute_mat", "normalize", "maybe_normalize"])
def test_is_cosine_refuses_a_changed_formula(base: type, name: str) -> None:
    assert not is_cosine(derived(base, name))
    mixin = type("Mixin", (), {name: lambda self, *args, **kwargs: None})
    assert not is_cosine(type("Mixed", (mixin, base), {})())
    assert not is_cosine(with_attribute(base(), name, lambda *args: None))


@pytest.mark.parametrize(
    "distance",
    [
        CosineSimilarity(power=2),
        CosineSimilarity(p=1),
        pml.CosineSimilarity(power=2),
        with_attribute(pml.CosineSimilarity(), "normalize_embeddings", False),
        with_attribute(pml.CosineSimilarity(), "is_inverted", False),
        DotProductSimilarity(normalize_embeddings=True),
        LpDistance(),
        pml.LpDistance(),
        nn.CosineSimilarity(),  # the name alone is not enough: this one compares row by row
        CosineSimilarity,
        None,
        object(),
    ],
)
def test_is_cosine_refuses_the_rest(distance: object) -> None:
    assert not is_cosine(distance)


@pytest.mark.parametrize("distance", [CosineSimilarity(), LpDistance(), pml.LpDistance(), pml.SNRDistance()])
def test_check_distance_returns_what_can_be_used(distance: Any) -> None:
    assert check_distance(distance) is distance


@pytest.mark.parametrize(
    ("distance", "text"),
    [
        (CosineSimilarity, r"such as CosineSimilarity\(\), got the class CosineSimilarity: pass an instance"),
        (nn.CosineSimilarity(), "callable object with a bool attribute is_inverted.* got CosineSimilarity"),
        (torch.cdist, "got builtin_function_or_method|got function"),
        ("cosine", "got str"),
        (None, "got NoneType"),
        (with_attribute(CosineSimilarity(), "is_inverted", 1), "bool attribute is_inverted"),
        (type("Inert", (), {"is_inverted": True})(), "callable .* got Inert"),
    ],
)
def test_check_distance_refuses_the_rest(distance: object, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        check_distance(distance)


@pytest.mark.parametrize(
    ("distance", "expected"),
    [
        (DotProductSimilarity(), True),
        (pml.DotProductSimilarity(normalize_embeddings=False), True),
        (DotProductSimilarity(power=2), False),
        (DotProductSimilarity(True), False),
        (CosineSimilarity(), False),
        (LpDistance(normalize_embeddings=False), False),
        (object(), False),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, bool) else str(value),
)
def test_plain_dot_product_is_recognised(distance: object, expected: bool) -> None:
    assert is_dot_product(distance) is expected


def test_dot_product_with_another_formula_is_not_plain() -> None:
    class Shifted(DotProductSimilarity):
        def compute_mat(self, query: Tensor, ref: Tensor) -> Tensor:
            return super().compute_mat(query, ref) - 1

    class Renamed(DotProductSimilarity):
        pass

    assert not is_dot_product(Shifted())
    assert is_dot_product(Renamed())
