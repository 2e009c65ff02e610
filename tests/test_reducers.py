"""Reducers against pytorch-metric-learning 2.9 and the definitions, and 2.9's objects through the adapter."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pytorch_metric_learning import reducers as pml
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from tritonloss.reducers import (
    BaseReducer,
    DivisorReducer,
    MeanReducer,
    MultipleReducers,
    differentiable_zero,
    reduce_terms,
)
from tritonloss.types import LossDict, LossTerm

N = 6
LABELS = torch.tensor([0, 0, 1, 1, 2, 2])
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def embeddings(dtype: torch.dtype = torch.float64) -> Tensor:
    values = torch.randn(N, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return values.to(dtype).requires_grad_()


def element(losses: Tensor, divisor: Tensor | float | None = None) -> LossTerm:
    term: LossTerm = {"losses": losses, "indices": torch.arange(len(losses))}
    if divisor is not None:
        term["divisor"] = divisor
    return term


def scalar(losses: Tensor) -> LossTerm:
    return {"losses": losses, "indices": None}


def proxy_terms(x: Tensor) -> LossDict:
    """Two terms with divisors and a scalar, in the manner of a proxy loss with a regularizer."""
    return {
        "pos_loss": element(x.square().sum(1), 4),
        "neg_loss": element(x.exp().sum(1), torch.tensor(3)),
        "reg_loss": scalar(x.square().sum()),
    }


def mixed_terms(x: Tensor) -> LossDict:
    """A term of each kind of indices, without divisors."""
    rows = torch.arange(N)
    losses = x.square().sum(1)
    return {
        "loss": element(losses),
        "pos_pairs": {"losses": losses[:4], "indices": (rows[:4], rows[1:5])},
        "neg_pairs": {"losses": losses[2:], "indices": (rows[2:], rows[:4])},
        "triplets": {"losses": losses.exp()[:3], "indices": (rows[:3], rows[1:4], rows[3:])},
        "scalar": scalar(losses.sum()),
    }


def with_gradient(function: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    x = embeddings()
    value = function(x)
    return value.detach(), torch.autograd.grad(value, x)[0]


def assert_same(ours: Callable[[Tensor], Tensor], peer: Callable[[Tensor], Tensor]) -> None:
    # Rounding of sums of a few dozen terms of order 1 to 100 in float64.
    torch.testing.assert_close(with_gradient(ours), with_gradient(peer), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fill", [1.0, 6e4, torch.inf, torch.nan])
@pytest.mark.parametrize("shape", [(3, 2), (0, 8)])
def test_differentiable_zero_ignores_the_values(
    shape: tuple[int, int], fill: float, dtype: torch.dtype
) -> None:
    x = torch.full(shape, fill, dtype=dtype, requires_grad=True)
    zero = differentiable_zero(x)
    zero.backward()
    assert zero.shape == ()
    assert zero.dtype == torch.promote_types(dtype, torch.float32)
    assert zero.item() == 0
    assert x.grad is not None
    assert x.grad.shape == shape
    assert torch.count_nonzero(x.grad) == 0


def test_mean_reducer_is_the_sum_of_the_means() -> None:
    def expected(x: Tensor) -> Tensor:
        losses = x.square().sum(1)
        return losses.mean() + losses[:4].mean() + losses[2:].mean() + losses.exp()[:3].mean() + losses.sum()

    assert_same(lambda x: MeanReducer()(mixed_terms(x), x), expected)


def test_divisor_reducer_divides_each_sum() -> None:
    def expected(x: Tensor) -> Tensor:
        return x.square().sum() / 4 + x.exp().sum() / 3 + x.square().sum()

    assert_same(lambda x: DivisorReducer()(proxy_terms(x), x), expected)


@pytest.mark.parametrize(
    ("ours", "peer", "terms"),
    [
        pytest.param(MeanReducer(), pml.MeanReducer(), mixed_terms, id="mean"),
        pytest.param(DivisorReducer(), pml.DivisorReducer(), proxy_terms, id="divisor"),
        pytest.param(
            MultipleReducers({"pos_loss": DivisorReducer(), "neg_loss": DivisorReducer()}),
            pml.MultipleReducers({"pos_loss": pml.DivisorReducer(), "neg_loss": pml.DivisorReducer()}),
            proxy_terms,
            id="multiple",
        ),
        pytest.param(
            MultipleReducers({}, DivisorReducer()),
            pml.MultipleReducers({}, pml.DivisorReducer()),
            proxy_terms,
            id="multiple-default",
        ),
        pytest.param(
            MultipleReducers({"loss": MeanReducer()}),
            pml.MultipleReducers({"loss": pml.MeanReducer()}),
            mixed_terms,
            id="multiple-mean",
        ),
    ],
)
def test_ours_equal_pml_through_the_adapter(
    ours: BaseReducer, peer: nn.Module, terms: Callable[[Tensor], LossDict]
) -> None:
    assert_same(
        lambda x: reduce_terms(ours, terms(x), x, LABELS), lambda x: reduce_terms(peer, terms(x), x, LABELS)
    )
    assert_same(
        lambda x: ours(terms(x), x), lambda x: reduce_terms(peer, terms(x), x, LABELS)
    )  # labels are optional for ours


def test_reducers_of_both_kinds_nest() -> None:
    def expected(x: Tensor) -> Tensor:
        return x.square().sum() / 4 + x.exp().sum() / 3 + x.square().sum()

    of_pml = MultipleReducers({"pos_loss": pml.DivisorReducer()}, DivisorReducer())
    of_ours = pml.MultipleReducers({"pos_loss": DivisorReducer()}, pml.DivisorReducer())
    assert_same(lambda x: reduce_terms(of_pml, proxy_terms(x), x, LABELS), expected)
    assert_same(lambda x: reduce_terms(of_ours, proxy_terms(x), x, LABELS), expected)


def test_pml_reducers_get_the_labels_and_the_indices() -> None:
    weights = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
    reducer = pml.ClassWeightedReducer(weights=weights)
    rows = torch.tensor([1, 2, 5])
    per_row = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)

    def terms(x: Tensor) -> LossDict:
        losses = x.square().sum(1)[rows]
        return {
            "loss": {"losses": losses, "indices": rows},
            "pairs": {"losses": losses, "indices": (rows, rows - 1)},
            "triplets": {"losses": losses, "indices": (rows, rows - 1, rows)},
        }

    assert_same(
        lambda x: reduce_terms(reducer, terms(x), x, LABELS),
        lambda x: 3 * (per_row * x.square().sum(1)[rows]).mean(),
    )


@pytest.mark.parametrize("reducer", [pml.AvgNonZeroReducer(), pml.ThresholdReducer(low=0.5)])
def test_pml_threshold_reducers(reducer: nn.Module) -> None:
    threshold = 0.0 if isinstance(reducer, pml.AvgNonZeroReducer) else 0.5

    def expected(x: Tensor) -> Tensor:
        losses = x.sum(1)
        return losses[losses > threshold].mean()

    assert_same(lambda x: reduce_terms(reducer, {"loss": element(x.sum(1))}, x, LABELS), expected)


def test_pml_per_anchor_reducer_takes_pairs() -> None:
    """Mean over the pairs of each anchor, then over all rows."""
    rows = torch.arange(N)

    def terms(x: Tensor) -> LossDict:
        return {"loss": {"losses": x.square().sum(1)[:4], "indices": (rows[:4] // 2, rows[:4])}}

    assert_same(
        lambda x: reduce_terms(pml.PerAnchorReducer(), terms(x), x, LABELS),
        lambda x: x.square().sum(1)[:4].sum() / 2 / N,
    )


@pytest.mark.parametrize(
    ("name", "indices", "expected"),
    [
        ("loss", None, "already_reduced"),
        ("loss", torch.arange(2), "element"),
        ("loss", (torch.arange(2),) * 2, "pos_pair"),
        ("pos_loss", (torch.arange(2),) * 2, "pos_pair"),
        ("neg_loss", (torch.arange(2),) * 2, "neg_pair"),
        ("loss", (torch.arange(2),) * 3, "triplet"),
    ],
)
def test_other_callables_see_version_2_terms(name: str, indices: Any, expected: str) -> None:
    seen = {}

    def reducer(terms: dict[str, Any], embeddings: Tensor, labels: Tensor) -> Tensor:
        seen.update(terms)
        assert labels is LABELS
        return terms[name]["losses"].sum()

    losses = torch.ones(() if indices is None else 2)
    value = reduce_terms(reducer, {name: {"losses": losses, "indices": indices}}, embeddings(), LABELS)
    assert seen[name] == {"losses": losses, "indices": indices, "reduction_type": expected}
    assert value == losses.sum()


@pytest.mark.parametrize(
    "reducer",
    [MeanReducer(), DivisorReducer(), MultipleReducers({}), pml.MeanReducer(), pml.DivisorReducer()],
)
def test_no_terms_give_a_zero_in_the_graph(reducer: Any) -> None:
    x = torch.full((2, 3), torch.inf, requires_grad=True)
    value = reduce_terms(reducer, {}, x, None)
    value.backward()
    assert value.item() == 0
    assert x.grad is not None
    assert torch.count_nonzero(x.grad) == 0


@pytest.mark.parametrize("reducer", [MeanReducer(), MultipleReducers({}), pml.MeanReducer()])
def test_a_term_without_losses_is_zero(reducer: Any) -> None:
    x = embeddings()
    value = reduce_terms(reducer, {"loss": element(x.sum(1)[:0]), "other": element(x.sum(1))}, x, LABELS)
    empty = reduce_terms(reducer, {"loss": element(x.sum(1)[:0])}, x, LABELS)
    assert value == x.sum(1).mean()
    assert empty.item() == 0
    assert empty.requires_grad


@pytest.mark.parametrize("divisor", [0, 0.0, torch.tensor(0), torch.tensor(0.0)])
def test_divisor_zero_is_a_differentiable_zero(divisor: Tensor | float) -> None:
    x = embeddings()
    value = DivisorReducer()({"loss": element(x.square().sum(1), divisor)}, x)
    (gradient,) = torch.autograd.grad(value, x)
    assert value.item() == 0
    assert torch.count_nonzero(gradient) == 0


@pytest.mark.parametrize("divisor", [0, torch.tensor(0)])
def test_divisor_zero_beside_losses_that_are_constants(divisor: Tensor | float) -> None:
    x = embeddings()
    value = DivisorReducer()({"loss": element(torch.full((3,), torch.inf), divisor)}, x)
    (gradient,) = torch.autograd.grad(value, x)
    assert value.item() == 0
    assert torch.count_nonzero(gradient) == 0


def test_a_tensor_divisor_is_not_read_back() -> None:
    """Fake tensors have no values: reading one raises."""
    with FakeTensorMode():
        x = torch.zeros(4, 2, requires_grad=True)
        value = DivisorReducer()({"loss": element(x.sum(1), torch.tensor(3, device="cpu"))}, x)
        value.backward()
        with pytest.raises(DataDependentOutputException):
            value.item()
    assert value.shape == ()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "reducer", [DivisorReducer(), pml.DivisorReducer(), MultipleReducers({}, DivisorReducer())]
)
def test_half_precision_is_reduced_in_float32(reducer: Any, dtype: torch.dtype) -> None:
    x = embeddings(dtype)
    losses = torch.full((200,), 1000.0, dtype=dtype) + 0 * x.sum()  # the sum, 2e5, overflows float16
    value = reduce_terms(reducer, {"loss": element(losses, 100), "reg": scalar(losses[0])}, x, None)
    (gradient,) = torch.autograd.grad(value, x)
    assert value.dtype == torch.float32
    assert value.item() == 3000  # exact: an integer below 2^24
    assert gradient.isfinite().all()


@pytest.mark.parametrize("reducer", [MeanReducer(), pml.MeanReducer()])
def test_float64_terms_stay_float64(reducer: Any) -> None:
    x = embeddings()
    assert reduce_terms(reducer, {"loss": element(x.sum(1))}, x, LABELS).dtype == torch.float64


@pytest.mark.parametrize(
    "reducer",
    [
        MeanReducer(),
        MultipleReducers({"pos_loss": DivisorReducer()}),
        MultipleReducers({"pos_loss": DivisorReducer()}, pml.MeanReducer()),
        MultipleReducers({"neg_loss": MultipleReducers({})}, DivisorReducer()),
        pml.MeanReducer(),
        pml.AvgNonZeroReducer(),
        pml.PerAnchorReducer(),
        pml.MultipleReducers({"pos_loss": pml.DivisorReducer()}),
        pml.MultipleReducers({"pos_loss": pml.DivisorReducer()}, MeanReducer()),
        lambda terms, embeddings, labels: embeddings.sum(),
    ],
    ids=lambda reducer: f"{type(reducer).__module__.split('.')[0]}-{type(reducer).__name__}",
)
def test_a_divisor_is_never_dropped(reducer: Any) -> None:
    x = embeddings()
    with pytest.raises(ValueError, match=r"cannot use the divisor of term '(pos|neg)_loss'"):
        reduce_terms(reducer, proxy_terms(x), x, LABELS)


@pytest.mark.parametrize(
    "reducer",
    [DivisorReducer(), pml.DivisorReducer(), MultipleReducers({"loss": DivisorReducer()})],
)
def test_a_divisor_is_never_made_up(reducer: Any) -> None:
    x = embeddings()
    with pytest.raises(ValueError, match="DivisorReducer needs a divisor, and term 'loss' has none"):
        reduce_terms(reducer, mixed_terms(x), x, LABELS)


def test_scalars_must_be_scalars() -> None:
    x = embeddings()
    with pytest.raises(
        ValueError, match=r"term 'loss' has no indices, so it must be a scalar, got shape \[6\]"
    ):
        MeanReducer()({"loss": scalar(x.sum(1))}, x)


@pytest.mark.parametrize(
    ("reducer", "text"),
    [
        ("mean", "reducer must be callable, got str"),
        (MeanReducer, "got the class MeanReducer: pass an instance"),
        (pml.DoNothingReducer(), "DoNothingReducer must return a scalar tensor, got dict"),
        (
            lambda terms, embeddings, labels: embeddings.sum(1),
            r"must return a scalar tensor, got shape \[6\]",
        ),
        (lambda terms, embeddings, labels: 0.0, "must return a scalar tensor, got float"),
    ],
)
def test_what_is_no_reducer_is_refused(reducer: Any, text: str) -> None:
    x = embeddings()
    with pytest.raises(TypeError, match=text):
        reduce_terms(reducer, {"loss": element(x.sum(1))}, x, LABELS)


def test_multiple_reducers_takes_modules_only() -> None:
    with pytest.raises(TypeError, match="not a Module"):
        MultipleReducers({"loss": torch.mean})  # type: ignore[dict-item]


def test_a_subclass_defines_only_the_reduction() -> None:
    class Largest(BaseReducer):
        def reduce_losses(
            self, losses: Tensor, term: LossTerm, embeddings: Tensor, labels: Tensor | None
        ) -> Tensor:
            return losses.max()

    x = embeddings()
    assert reduce_terms(Largest(), {"loss": element(x.sum(1))}, x, LABELS) == x.sum(1).max()
    with pytest.raises(ValueError, match="Largest cannot use the divisor"):
        Largest()(proxy_terms(x), x)
    with pytest.raises(NotImplementedError, match="BaseReducer must define reduce_losses"):
        BaseReducer()({"loss": element(x.sum(1))}, x)


@pytest.mark.parametrize(
    "reducer", [DivisorReducer(), MultipleReducers({"pos_loss": DivisorReducer()}, DivisorReducer())]
)
def test_pickle_and_state(reducer: BaseReducer) -> None:
    x = embeddings()
    assert pickle.loads(pickle.dumps(reducer))(proxy_terms(x), x) == reducer(proxy_terms(x), x)
    assert reducer.state_dict() == {}


@pytest.mark.parametrize("reducer", [DivisorReducer(), MultipleReducers({}, DivisorReducer())])
def test_compile_without_a_graph_break(reducer: BaseReducer) -> None:
    torch._dynamo.reset()

    def loss(x: Tensor, divisor: Tensor) -> Tensor:
        return reducer({"loss": element(x.square().sum(1), divisor)}, x)

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for divisor in (torch.tensor(3), torch.tensor(0)):
        assert_same(lambda x, d=divisor: compiled(x, d), lambda x, d=divisor: loss(x, d))  # type: ignore[misc]
