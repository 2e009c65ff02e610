"""Value and gradient from one walk: against the deferred path, the reference, and what autograd may do with them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from checks import assert_close, assert_same, value_and_grad
from inputs import random_batch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

from tritonloss import functional, losses, use_backend
from tritonloss.backends import backend_module
from tritonloss.layout import ClassLayout
from tritonloss.losses.ranking import RankingLoss
from tritonloss.ops import (
    PairGradients,
    Pairs,
    Panels,
    Ranking,
    rank_total,
    rank_values,
    register_query_function,
    soft_rank,
)

BATCH = random_batch(22, 5, 5, n_lone=2)
N_CLASSES = 7
# Sixteen numbers for each of up to six pairs of a query: of about eight queries.
RANK_BUDGET = 8 * 16 * 6 * 8


@dataclass(frozen=True)
class Case:
    """build: the loss. deferred: from the loss, rows and labels to the same number by values that are differentiated
    later; None where the loss has no such path. budget: of about three panels."""

    build: Callable[..., nn.Module]
    deferred: Callable[[Any, Tensor, Tensor], Tensor] | None = None
    budget: int = RANK_BUDGET


def mean_of_terms(criterion: Any, rows: Tensor, labels: Tensor) -> Tensor:
    (term,) = criterion.loss_terms(rows, labels).values()
    return term["losses"].mean()


def mean_of_pnp(criterion: Any, rows: Tensor, labels: Tensor) -> Tensor:
    values = functional.pnp_loss(
        rows, labels, variant=criterion.variant, b=criterion.b, alpha=criterion.alpha, anneal=criterion.anneal,
        memory_budget=criterion.memory_budget, reduction="none",
    )  # fmt: skip
    return values.sum() / (ClassLayout.from_labels(labels).query_count > 0).sum()


def sum_of_proxy_terms(criterion: Any, rows: Tensor, labels: Tensor) -> Tensor:
    terms = criterion.loss_terms(rows, labels).values()
    return torch.stack([term["losses"].sum() / term["divisor"] for term in terms]).sum()


def proxy_anchor(**options: Any) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return losses.ProxyAnchorLoss(N_CLASSES, BATCH.rows.shape[1], **options).double()


CASES = {
    **{
        f"PNP {variant}": Case(partial(losses.PNPLoss, variant=variant, anneal=0.1), mean_of_pnp)
        for variant in ("O", "Iu", "Ib", "Ds", "Dq")
    },
    "SmoothAP": Case(partial(losses.SmoothAPLoss, temperature=0.1), mean_of_terms),
    "SOPRC": Case(partial(losses.SOPRCLoss, N_CLASSES, memory_size=2, tau2=0.1)),
    "SOPRC through T": Case(partial(losses.SOPRCLoss, N_CLASSES, memory_size=2, tau2=0.1, tpr_grad=True)),
    "FastAP": Case(losses.FastAPLoss, mean_of_terms, 8 * 22 * 8),
    "Histogram": Case(losses.HistogramLoss, None, 8 * 22 * 8),
    "ProxyAnchor": Case(proxy_anchor, sum_of_proxy_terms, 3 * 22 * 8),
}
ONE_OF_EACH_PASS = ("PNP Ds", "SmoothAP", "SOPRC", "FastAP", "Histogram", "ProxyAnchor")
a_loss_of_each_pass = pytest.mark.parametrize(
    "case", [CASES[name] for name in ONE_OF_EACH_PASS], ids=ONE_OF_EACH_PASS
)


# The interpreter takes long for a panel of one row.
in_panels = pytest.mark.parametrize(
    ("backend", "panels"),
    [("eager", "of a row"), ("eager", "some"), ("eager", "one"), ("triton", "some")],
    indirect=["backend"],
)


def budget_for(panels: str, some: int = RANK_BUDGET) -> int | None:
    return {"of a row": 1, "some": some, "one": None}[panels]


def modules(case: Case, device: torch.device, **options: Any) -> Iterator[Any]:
    """New modules with the same parameters and memories."""
    while True:
        yield case.build(**options).to(device)


# --- the same numbers by every way ---


@pytest.mark.parametrize(
    ("name", "backend", "panels"),
    [
        *((name, "eager", panels) for name in CASES for panels in ("of a row", "some", "one")),
        *((name, "triton", "some") for name in ONE_OF_EACH_PASS),
    ],
    indirect=["backend"],
)
def test_equals_the_deferred_path_and_the_reference(
    name: str, panels: str, backend: str, device: torch.device
) -> None:
    case = CASES[name]
    rows, labels = BATCH.on(device)
    made = modules(case, device, memory_budget=budget_for(panels, case.budget))
    value, grad = value_and_grad(next(made), rows, labels)
    with use_backend("reference"):
        expected = value_and_grad(next(made), rows, labels)
    # Sums of at most 22 x 9 terms of about 1; a gradient divides by a temperature of 0.1 at most twice.
    assert_close((value, grad), expected, rtol=1e-12, atol=1e-12)
    if case.deferred is not None:
        later = value_and_grad(partial(case.deferred, next(made)), rows, labels)
        assert_close((value, grad), later, rtol=1e-12, atol=1e-12)


# --- what autograd may do with the result ---


@a_loss_of_each_pass
def test_two_backward_passes(case: Case, device: torch.device) -> None:
    rows, labels = BATCH.on(device)
    made = modules(case, device)
    _, once = value_and_grad(next(made), rows, labels)
    loss = next(made)(rows, labels)
    loss.backward(retain_graph=True)
    assert rows.grad is not None
    assert_same(rows.grad, once)
    loss.backward()
    assert_same(rows.grad, 2 * once)


@a_loss_of_each_pass
@pytest.mark.parametrize(
    ("by", "backend"),
    [("rows", "eager"), ("upstream", "eager"), ("upstream", "triton")],
    indirect=["backend"],
)
def test_a_second_derivative_is_an_error(case: Case, by: str, backend: str, device: torch.device) -> None:
    rows, labels = BATCH.on(device)
    factor = torch.ones((), dtype=torch.float64, device=device, requires_grad=by == "upstream")
    loss = factor * next(modules(case, device))(rows, labels)
    (grad,) = torch.autograd.grad(loss, rows, create_graph=True)
    assert_close(grad.detach(), value_and_grad(next(modules(case, device)), rows, labels)[1], rtol=1e-15)
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(grad.square().sum(), rows if by == "rows" else factor)


@a_loss_of_each_pass
@pytest.mark.parametrize(
    ("scale", "backend"),
    [(1.0, "eager"), (65536.0, "eager"), (65536.0, "triton")],
    indirect=["backend"],
)
def test_the_gradient_of_half_rows_is_scaled_in_float32(
    case: Case, scale: float, backend: str, device: torch.device
) -> None:
    """As GradScaler needs it: what underflows in float16 is there once it is scaled."""
    rows, labels = BATCH.on(device, torch.float16)
    rows = (rows.detach() * 1000).requires_grad_()  # the longer a row, the smaller its gradient
    # Without the penalty of SOPRC: autograd adds its gradient to that of the loss in float16.
    made = modules(case, device, **({"w_var": 0} if case is CASES["SOPRC"] else {}))
    full = value_and_grad(next(made).float(), rows.float(), labels)[1]
    with torch.autocast(device.type, torch.bfloat16):
        loss = next(made).float()(rows, labels)
    assert loss.dtype == torch.float32
    (loss * scale).backward()
    assert rows.grad is not None
    assert rows.grad.dtype == torch.float16
    assert_same(rows.grad, (full * scale).half())
    if scale > 1:
        assert not torch.equal(rows.grad, full.half() * scale)


@a_loss_of_each_pass
def test_embeddings_may_change_after_the_forward_pass(case: Case, device: torch.device) -> None:
    rows, labels = BATCH.on(device)
    made = modules(case, device)
    _, expected = value_and_grad(next(made), rows, labels)
    embeddings = rows * 1.0
    loss = next(made)(embeddings, labels)
    with torch.no_grad():
        embeddings.mul_(3)
    loss.backward()
    assert_same(rows.grad, expected)


@pytest.mark.parametrize(
    ("how", "backend"),
    [("no_grad", "eager"), ("frozen", "eager"), ("frozen", "triton")],
    indirect=["backend"],
)
@a_loss_of_each_pass
def test_inference_does_no_gradient_work(
    case: Case, how: str, backend: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, labels = BATCH.on(device)
    made = modules(case, device)
    expected, _ = value_and_grad(next(made), rows, labels)
    module = backend_module(backend, device)
    backward = [name for name in vars(module) if name.endswith("_backward")]
    called: list[str] = []
    for name in backward:
        monkeypatch.setattr(module, name, spy(getattr(module, name), called))
    for name in ("addmm_", "baddbmm_"):
        monkeypatch.setattr(Tensor, name, spy(getattr(Tensor, name), called))
    criterion = next(made)
    if how == "frozen":
        value = criterion.requires_grad_(False)(rows.detach(), labels)
    else:
        with torch.no_grad():
            value = criterion(rows, labels)
    assert not value.requires_grad
    assert not called
    assert_close(value, expected, rtol=1e-15)
    value_and_grad(next(made), rows, labels)
    assert any(name in backward for name in called)  # the spies see what they are to see


def spy(function: Callable[..., Any], called: list[str]) -> Callable[..., Any]:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        called.append(function.__name__)
        return function(*args, **kwargs)

    return wrapper


# --- functions of pairs ---


class PlainPNP(RankingLoss):
    """PNP "Ds", and nothing but its equation."""

    def of_pairs(self, pairs: Pairs) -> Tensor:
        return pairs.mean(torch.log1p(pairs.ranks))


class PlainSmoothAP(RankingLoss):
    positive_ranks = True

    def of_pairs(self, pairs: Pairs) -> Tensor:
        assert pairs.positive_ranks is not None
        own = 1 + pairs.positive_ranks
        return pairs.mean(pairs.ranks / (own + pairs.ranks))


@in_panels
@pytest.mark.parametrize(
    ("plain", "closed"),
    [(PlainPNP(0.1), partial(losses.PNPLoss, variant="Ds", anneal=0.1)),
     (PlainSmoothAP(0.1), partial(losses.SmoothAPLoss, temperature=0.1))], ids=["PNP", "SmoothAP"],
)  # fmt: skip
def test_plain_torch_equals_a_closed_form(
    plain: RankingLoss, closed: Callable[..., Any], panels: str, backend: str, device: torch.device
) -> None:
    rows, labels = BATCH.on(device)
    plain.memory_budget = budget = budget_for(panels)
    expected = value_and_grad(closed(memory_budget=budget), rows, labels)
    assert_close(value_and_grad(plain, rows, labels), expected, rtol=1e-12, atol=1e-12)
    assert_close(
        value_and_grad(partial(mean_of_terms, plain), rows, labels), expected, rtol=1e-12, atol=1e-12
    )


def of_all_three(ranks: Tensor, scores: Tensor, among: Tensor, constant: Tensor) -> Tensor:
    return torch.log1p(ranks) * scores + constant * among.square()


def per_pair(pairs: Pairs) -> Tensor:
    assert pairs.positive_ranks is not None
    return of_all_three(pairs.ranks, pairs.scores, pairs.positive_ranks, pairs.constants[0][:, None])


def per_query(pairs: Pairs) -> Tensor:
    return pairs.sum(per_pair(pairs))


def closed_form(pairs: Pairs) -> Any:
    among, constant = pairs.positive_ranks, pairs.constants[0][:, None]
    assert among is not None

    def gradients() -> PairGradients:
        return PairGradients(pairs.scores / (1 + pairs.ranks), torch.log1p(pairs.ranks), 2 * constant * among)

    return per_pair(pairs), gradients


FUNCTIONS = (per_pair, per_query, closed_form, "one pass test")


@pytest.mark.parametrize(
    ("function", "backend", "panels", "scalar_weight"),
    [
        *(
            (function, "eager", panels, scalar_weight)
            for function in FUNCTIONS
            for panels in ("of a row", "some", "one")
            for scalar_weight in (False, True)
        ),
        (per_pair, "triton", "some", True),
        (closed_form, "triton", "some", False),
    ],
    indirect=["backend"],
)
def test_functions_per_pair_and_per_query(
    function: Any, panels: str, scalar_weight: bool, backend: str, device: torch.device
) -> None:
    """Against `soft_rank`, of which autograd differentiates the same function of all pairs at once."""
    register_query_function("one pass test", closed_form)
    unit = torch.nn.functional.normalize(BATCH.rows).to(device)
    layout = ClassLayout.from_labels(BATCH.labels.to(device))
    start, count = layout.start, layout.query_count
    constant, weights = torch.randn(2, 22, dtype=torch.float64, device=device)
    if scalar_weight:
        weights = weights[0]
    ranking = Ranking("sigmoid", 0.1, positive_ranks=True, memory_budget=budget_for(panels))

    def one_pass(rows: Tensor, _: Tensor) -> Tensor:
        return rank_total(rows, start, count, weights, function, ranking, constants=(constant,))

    def deferred(rows: Tensor, _: Tensor) -> Tensor:
        return (rank_values(rows, start, count, function, ranking, constants=(constant,)) * weights).sum()

    def dense(rows: Tensor, _: Tensor) -> Tensor:
        ranks, scores, among = soft_rank(rows, rows, start, count, temperature=0.1, positive_ranks=True)
        assert among is not None
        of_pair = torch.repeat_interleave(torch.arange(22, device=device), count)
        weight = weights if scalar_weight else weights[of_pair]
        return (of_all_three(ranks, scores, among, constant[of_pair]) * weight).sum()

    expected = value_and_grad(dense, unit, BATCH.labels)
    # Squares of up to 9: a few hundred terms of up to 100.
    for way in (one_pass, deferred):
        assert_close(value_and_grad(way, unit, BATCH.labels), expected, rtol=1e-12, atol=1e-11)


# --- panels that were made by the caller ---


@pytest.mark.parametrize("height", [1, 4, 11, 21, 23])
def test_panels_of_another_height_are_refused(height: int, backend: str, device: torch.device) -> None:
    """Their widths belong to other rows: some rows would be left out, or some of their positives."""
    labels = BATCH.labels.to(device)
    layout = ClassLayout.from_labels(labels)
    panels = Panels.of(layout.start, layout.count, 22, 8, 2 * RANK_BUDGET)
    assert panels.height not in (22, height)
    with pytest.raises(ValueError, match="height"):
        dataclasses.replace(panels, height=height)


def test_panels_of_other_queries_are_refused(backend: str, device: torch.device) -> None:
    rows, labels = BATCH.on(device)
    layout = ClassLayout.from_labels(labels)
    panels = Panels.of(layout.start[:10], layout.count[:10], 22, 8, 1 << 20)
    arguments = rows, layout.start, layout.count
    with pytest.raises(ValueError, match="panels"):
        rank_total(*arguments, rows.new_ones(()), per_rank, Ranking(), panels=panels)
    with pytest.raises(ValueError, match="panels"):
        rank_values(*arguments, per_rank, Ranking(), panels=panels)


def per_rank(pairs: Pairs) -> Tensor:
    return pairs.ranks


def test_panels_of_the_caller(backend: str, device: torch.device) -> None:
    rows, labels = BATCH.on(device)
    layout = ClassLayout.from_labels(labels)
    arguments = layout.start, layout.count, torch.rand(22, dtype=torch.float64, device=device)
    expected = value_and_grad(lambda x, _: rank_total(x, *arguments, per_rank, Ranking()), rows, labels)
    for budget in (RANK_BUDGET, 1 << 20):
        panels = Panels.of(*arguments[:2], 22, 8, budget)
        total = partial(rank_total, panels=panels)
        actual = value_and_grad(lambda x, _, f=total: f(x, *arguments, per_rank, Ranking()), rows, labels)
        assert_close(actual, expected, rtol=1e-12, atol=1e-10)


# --- torch.compile ---

N, DIM = 64, 3


@pytest.mark.filterwarnings("ignore")  # torch.compile warns about itself
@pytest.mark.parametrize("name", ["PNP", "SmoothAP", "SOPRC", "FastAP", "Histogram", "ProxyAnchor"])
def test_nothing_large_crosses_the_border_of_an_operator(
    name: str, device: torch.device, compiler: None
) -> None:
    """One graph, in which no operator of ours takes or returns more numbers than the rows have: no pairs, no scores."""
    criterion = {
        "PNP": losses.PNPLoss,
        "SmoothAP": losses.SmoothAPLoss,
        "SOPRC": partial(losses.SOPRCLoss, 8, memory_size=2),
        "FastAP": losses.FastAPLoss,
        "Histogram": partial(losses.HistogramLoss, 20),
        "ProxyAnchor": partial(losses.ProxyAnchorLoss, 8, DIM),
    }[name]().to(device)  # fmt: skip
    rows = torch.randn(N, DIM, device=device, requires_grad=True)
    labels = torch.arange(N, device=device) % 8
    sizes: dict[str, list[Any]] = {}

    def record(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        for node in graph.graph.nodes:
            if "tritonloss" in str(node.target):
                held = torch.utils._pytree.tree_leaves(
                    [node.meta["val"], [a.meta["val"] for a in node.all_input_nodes]]
                )
                sizes.setdefault(str(node.target), []).extend(
                    t.numel() for t in held if isinstance(t, Tensor)
                )
        return graph

    compiled = torch.compile(criterion, fullgraph=True, backend=aot_autograd(fw_compiler=record))
    compiled(rows, labels).backward()
    assert sizes
    for operator, numbers in sizes.items():
        assert max(int(n) for n in numbers) <= N * DIM, operator
