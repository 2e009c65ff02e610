"""Regularizers against pytorch-metric-learning 2.9 and closed forms, and 2.9's objects through the adapter."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from pytorch_metric_learning import regularizers as pml
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tritonloss import regularizers
from tritonloss.regularizers import (
    BaseRegularizer,
    CenterInvariantRegularizer,
    LpRegularizer,
    RegularFaceRegularizer,
    ZeroMeanRegularizer,
    apply_regularizer,
)

OURS_AND_PML = [
    pytest.param(LpRegularizer(), pml.LpRegularizer(), id="l2"),
    pytest.param(LpRegularizer(power=2), pml.LpRegularizer(power=2), id="l2-squared"),
    pytest.param(LpRegularizer(p=1), pml.LpRegularizer(p=1), id="l1"),
    pytest.param(LpRegularizer(3, 0.5), pml.LpRegularizer(3, 0.5), id="l3-root"),
    pytest.param(ZeroMeanRegularizer(), pml.ZeroMeanRegularizer(), id="zero-mean"),
    pytest.param(CenterInvariantRegularizer(), pml.CenterInvariantRegularizer(), id="center-invariant"),
    pytest.param(RegularFaceRegularizer(), pml.RegularFaceRegularizer(), id="regular-face"),
]
ALL = [LpRegularizer(), ZeroMeanRegularizer(), CenterInvariantRegularizer(), RegularFaceRegularizer()]


def rows(n: int, d: int = 5, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(n, d, dtype=torch.float64, generator=torch.Generator().manual_seed(n)).to(dtype)


def value_and_gradient(regularizer: Any, tensor: Tensor) -> tuple[Tensor, Tensor]:
    leaf = tensor.clone().requires_grad_()
    value = apply_regularizer(regularizer, leaf)
    return value.detach(), torch.autograd.grad(value, leaf)[0]


def describe(regularizer: object) -> str:
    return type(regularizer).__name__


@pytest.mark.parametrize("n", [2, 9, 40])
@pytest.mark.parametrize(("ours", "peer"), OURS_AND_PML)
def test_value_and_gradient_equal_pml(ours: BaseRegularizer, peer: nn.Module, n: int) -> None:
    # Rounding of sums of up to 200 terms of order 1 to 100 in float64.
    torch.testing.assert_close(
        value_and_gradient(ours, rows(n)), value_and_gradient(peer, rows(n)), atol=1e-12, rtol=1e-12
    )


def test_closed_forms() -> None:
    tensor = torch.tensor([[3.0, 4.0], [0.0, -1.0]])
    # Exact: every intermediate value is a small binary fraction.
    assert LpRegularizer()(tensor).item() == 3
    assert LpRegularizer(power=2)(tensor).item() == 13
    assert LpRegularizer(p=1)(tensor).item() == 4
    assert ZeroMeanRegularizer()(tensor).item() == 4
    assert CenterInvariantRegularizer()(tensor).item() == 36
    assert RegularFaceRegularizer()(tensor).item() == pytest.approx(-0.8, abs=1e-7)  # one float32 rounding


@pytest.mark.parametrize("block_elements", [1, 100, 399])
def test_regular_face_does_not_depend_on_the_blocks(
    block_elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    value, gradient = value_and_gradient(RegularFaceRegularizer(), rows(20))
    monkeypatch.setattr(regularizers, "_BLOCK_ELEMENTS", block_elements)
    blocked_value, blocked_gradient = value_and_gradient(RegularFaceRegularizer(), rows(20))
    # Bit-equal: the blocks only choose the neighbours.
    assert torch.equal(blocked_value, value)
    assert torch.equal(blocked_gradient, gradient)


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest tensor that any operation returns."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.largest = max(self.largest, result.numel())
        return result


def test_regular_face_never_holds_the_similarity_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    n, d = 600, 4
    monkeypatch.setattr(regularizers, "_BLOCK_ELEMENTS", 10 * n)
    tensor = rows(n, d).requires_grad_()
    with LargestTensor() as recorded:
        RegularFaceRegularizer()(tensor).backward()
    assert n * d <= recorded.largest <= 10 * n


def test_regular_face_with_equal_rows() -> None:
    """The nearest other row may be a duplicate, never the row itself."""
    value, gradient = value_and_gradient(RegularFaceRegularizer(), torch.ones(3, 4, dtype=torch.float64))
    # Rounding of a unit vector's norm in float64; the cosine is at its maximum, where the gradient is 0.
    torch.testing.assert_close(value, torch.tensor(1.0, dtype=torch.float64), atol=1e-15, rtol=0)
    torch.testing.assert_close(gradient, torch.zeros_like(gradient), atol=1e-15, rtol=0)


@pytest.mark.parametrize("regularizer", ALL, ids=describe)
@pytest.mark.parametrize("shape", [(0, 5), (1, 5), (3, 5)])
def test_zero_rows_and_no_rows_are_finite(regularizer: BaseRegularizer, shape: tuple[int, int]) -> None:
    value, gradient = value_and_gradient(regularizer, torch.zeros(shape))
    assert value.item() == 0
    assert gradient.shape == shape
    assert torch.count_nonzero(gradient) == 0


def test_regular_face_of_a_single_row_is_zero() -> None:
    """It has no other row; PML compares it with itself."""
    value, gradient = value_and_gradient(RegularFaceRegularizer(), torch.tensor([[3.0, torch.inf]]))
    assert value.item() == 0
    assert torch.count_nonzero(gradient) == 0


@pytest.mark.parametrize("regularizer", ALL, ids=describe)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(regularizer: BaseRegularizer, dtype: torch.dtype) -> None:
    tensor = rows(9, dtype=dtype)
    value, gradient = value_and_gradient(regularizer, tensor)
    assert value.dtype == torch.float32
    assert torch.equal(value, regularizer(tensor.float()))
    assert gradient.dtype == dtype
    assert gradient.isfinite().all()


@pytest.mark.parametrize("regularizer", ALL, ids=describe)
def test_autocast_changes_nothing(regularizer: BaseRegularizer) -> None:
    tensor = rows(9, dtype=torch.float32)
    expected = regularizer(tensor)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(regularizer(tensor), expected)


@pytest.mark.parametrize("regularizer", [LpRegularizer(power=2), *ALL], ids=describe)
def test_finite_differences(regularizer: BaseRegularizer) -> None:
    tensor = rows(4, 3).requires_grad_()
    assert torch.autograd.gradcheck(regularizer, tensor)
    assert torch.autograd.gradgradcheck(regularizer, tensor)


@pytest.mark.parametrize("regularizer", ALL, ids=describe)
def test_compile_without_a_graph_break(regularizer: BaseRegularizer) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(regularizer, fullgraph=True, backend="aot_eager")
    # Decompositions may sum in another order: rounding in float64.
    torch.testing.assert_close(
        value_and_gradient(compiled, rows(9)),
        value_and_gradient(regularizer, rows(9)),
        atol=1e-12,
        rtol=1e-12,
    )


@pytest.mark.parametrize("regularizer", [LpRegularizer(3, 0.5), *ALL], ids=describe)
def test_pickle_and_state(regularizer: BaseRegularizer) -> None:
    other = pickle.loads(pickle.dumps(regularizer))
    assert torch.equal(other(rows(9)), regularizer(rows(9)))
    assert regularizer.state_dict() == {}


@pytest.mark.parametrize("regularizer", ALL, ids=describe)
@pytest.mark.parametrize(
    ("tensor", "error", "text"),
    [
        (torch.ones(3), ValueError, r"tensor must have two dimensions, rows and features, got shape \[3\]"),
        (torch.ones(3, 2, dtype=torch.int64), TypeError, "tensor must be a floating tensor, got torch.int64"),
    ],
)
def test_errors_name_the_argument(
    regularizer: BaseRegularizer, tensor: Tensor, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        regularizer(tensor)


def test_a_subclass_defines_only_the_penalty_of_a_row() -> None:
    class Largest(BaseRegularizer):
        def penalties(self, tensor: Tensor) -> Tensor:
            return tensor.amax(1)

    assert Largest()(torch.tensor([[1.0, 3.0], [5.0, 2.0]])).item() == 4
    with pytest.raises(NotImplementedError, match="BaseRegularizer must define penalties"):
        BaseRegularizer()(rows(2))


def test_adapter_takes_any_callable_that_returns_a_scalar() -> None:
    tensor = rows(4)

    class Module(nn.Module):
        def forward(self, embeddings: Tensor) -> Tensor:
            assert embeddings is tensor
            return embeddings.square().mean()

    assert apply_regularizer(Module(), tensor) == tensor.square().mean()
    assert apply_regularizer(torch.sum, tensor) == tensor.sum()


def test_adapter_takes_pml_regularizers_with_a_divisor() -> None:
    """The one regularizer of PML's that we have no counterpart of: two classes of two centers each."""
    centers = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0], [1.0, 0.0]])
    value = apply_regularizer(pml.SparseCentersRegularizer(2, 2), centers)
    # (sqrt(2 - 2 * 0.6) + sqrt(2 - 2 * 0)) / (2 * 2 pairs); float32 rounding of the roots.
    assert value.item() == pytest.approx((0.8**0.5 + 2**0.5) / 4, abs=1e-6)


def test_adapter_returns_float32_for_half_precision() -> None:
    tensor = rows(4, dtype=torch.bfloat16)
    value = apply_regularizer(pml.LpRegularizer(), tensor)
    assert value.dtype == torch.float32
    # PML rounds the mean norm, of order 1, to the 8 bits of bfloat16.
    torch.testing.assert_close(value, LpRegularizer()(tensor), rtol=2**-7, atol=0)


@pytest.mark.parametrize(
    ("regularizer", "text"),
    [
        ("l2", "regularizer must be callable, got str"),
        (LpRegularizer, "got the class LpRegularizer: pass an instance"),
        (lambda tensor: tensor.sum(1), r"must return a scalar tensor, got shape \[3\]"),
        (lambda tensor: tensor.sum().item(), "must return a scalar tensor, got float"),
    ],
)
def test_adapter_refuses_what_is_no_regularizer(regularizer: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        apply_regularizer(regularizer, rows(3))
