"""SOPRCLoss: published values, the definition, what the paper proves, the memory, and life as a module."""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from checks import assert_as_exact_as, assert_close, assert_same, peaks_are_known, python, value_and_grad
from hypothesis import given
from hypothesis import strategies as st
from inputs import Batch, batch, directions, random_batch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import tritonloss.losses.soprc as implementation
from tritonloss import reference, use_backend
from tritonloss.functional import (
    exact_prior,
    interpolate_scores,
    scaled_prior,
    soprc_loss,
    soprc_scores_loss,
)
from tritonloss.losses import SemiVarianceRegularizer, SOPRCLoss
from tritonloss.losses.score_memory import ScoreMemory
from tritonloss.losses.soprc_pieces import Interpolation

POSITIVE, NEGATIVE = [0.2, 0.5, 0.9], [-0.3, 0.15, 0.45, 0.55]
SCORES = torch.tensor(POSITIVE + NEGATIVE, dtype=torch.float64)
TARGETS = torch.tensor([1, 1, 1, 0, 0, 0, 0])
TWO_CLASSES = batch(directions(0, 20, 35, 50, 75, 110), [0, 0, 0, 1, 1, 1])
GRIDS = ["midpoint", "left", "authors", "linear"]


@pytest.fixture(params=["eager", "triton", "reference"])
def any_backend(request: pytest.FixtureRequest, clean_state: None) -> str:
    use_backend(request.param)
    return request.param


def double(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def criterion(num_classes: int = 1, *, v: Tensor | None = None, **options: Any) -> SOPRCLoss:
    """In float64, its prior exactly the number given; `v` and a count of visits where given."""
    prior = options.pop("prior", 0.1)
    loss = SOPRCLoss(num_classes, prior=prior, **{"w_var": 0, **options}).double()
    if loss.prior is not None:
        loss.prior.copy_(torch.as_tensor(prior, dtype=torch.float64))
    if v is not None:
        loss.v.copy_(v)
        loss.visits.fill_(1)
    return loss


def evaluate(loss: Callable[..., Tensor], inputs: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    return value_and_grad(lambda x, _: loss(x, *args, **kwargs), inputs, inputs)


# --- the definition, in loops ---


def huber(x: Tensor, tau: float) -> Tensor:
    return torch.where(x < 0, 1 - 2 * x / tau, torch.where(x < tau, (1 - x / tau) ** 2, 0))


def sigmoid(x: Tensor, tau: float) -> Tensor:
    return torch.where(x < 0, torch.tanh(-x / (2 * tau)), 0)


def one_query(
    positive: Tensor,
    negative: Tensor,
    v: Tensor,
    pi: float,
    tau1: float = 0.1,
    tau2: float = 0.001,
    tpr_offset: float = 1,
    tpr_grad: bool = False,
) -> Tensor:
    """The losses of the positives of one list, one after the other (section 7, steps 2 and 3)."""
    losses = []
    for h in positive:
        fpr = huber(h - negative, tau1).mean()
        anchor = h if tpr_grad else h.detach()
        tpr = (tpr_offset + sigmoid(anchor - v, tau2).sum()) / (tpr_offset + len(v))
        denominator = (1 - pi) * fpr + pi * tpr
        losses.append((1 - pi) * fpr / denominator if denominator != 0 else denominator)
    return torch.stack(losses)


def of_embeddings(
    rows: Tensor, labels: Tensor, memory: Tensor, prior: Tensor | str, average: str = "macro", **options: Any
) -> Tensor:
    rows = rows / rows.norm(dim=1, keepdim=True).clamp(min=1e-12)
    queries = []
    for q in range(len(rows)):
        scores = torch.stack([rows[q] @ row for row in rows])
        same, other = labels == labels[q], labels != labels[q]
        same[q] = False
        if same.any() and other.any():
            pi = same.double().mean() / (1 - 1 / len(rows)) if isinstance(prior, str) else prior[labels[q]]
            queries.append(one_query(scores[same], scores[other], memory[labels[q]], pi, **options))
    if not queries:
        return rows.sum() * 0
    return (
        torch.stack([losses.mean() for losses in queries]).mean()
        if average == "macro"
        else torch.cat(queries).mean()
    )


# --- golden values ---


@pytest.mark.parametrize(
    ("grid", "expected"),
    [
        ("left", [0.05, 0.2, 0.35, 0.525, 0.7, 0.825]),
        ("authors", [0.05, 0.2, 0.35, 0.525, 0.7, 0.825]),
        ("midpoint", [0.125, 0.275, 0.4375, 0.6125, 0.7625, 0.8875]),
        ("linear", [0, 0.2, 0.4, 0.63333, 0.9, 0.96667]),
    ],
)
def test_golden_interpolation(grid: str, expected: list[float]) -> None:
    scores = torch.tensor([POSITIVE, POSITIVE[::-1]], dtype=torch.float64)
    actual = interpolate_scores(scores, 6, grid=grid, score_range=(-1, 1))
    assert_close(actual, torch.tensor([expected] * 2), atol=6e-6)  # printed to five digits


@pytest.mark.parametrize(
    ("tau2", "tpr_grad", "loss", "of_positives"),
    [
        (1e-3, False, 0.6267504783, [-0.02493277, -0.39271437, 0]),
        (1e-3, True, 0.6267504783, [-0.02493277, 0.68039014, 0]),
        (0.1, False, 0.6370888565, [-0.02241267, -0.28622903, 0]),
        (0.1, True, 0.6370888565, [-0.01617734, -0.21873615, 0]),
    ],
)
def test_golden_binary(
    tau2: float,
    tpr_grad: bool,
    loss: float,
    of_positives: list[float],
    any_backend: str,
    device: torch.device,
) -> None:
    """Section 7e; the gradient with and without the path through T is that of section 6a."""
    module = criterion(
        memory_size=6, v_init="uniform", grid="left", score_range=(-1, 1), tau2=tau2, tpr_grad=tpr_grad,
        v=torch.arange(6, dtype=torch.float64) / 6,
    ).to(device)  # fmt: skip
    value, grad = evaluate(module, SCORES.to(device), TARGETS.to(device))
    assert_close(value.item(), loss, atol=6e-11)
    assert_close(grad[:3], double(of_positives), atol=6e-9)
    if tau2 == 1e-3:
        assert_close(grad[3:], double([0, 0.00498655, 0.1408779, 0.27178269]), atol=6e-8)
    assert_close(module.v[0], double([0.005, 0.17, 0.335, 0.5025, 0.67, 0.8325]), atol=1e-9)


@pytest.mark.parametrize("preset", ["authors", None])
def test_golden_retrieval(preset: str | None, any_backend: str, device: torch.device) -> None:
    uniform = torch.arange(6, dtype=torch.float64) / 6
    options: dict[str, Any] = {"authors": {"grid": "authors", "update": "last"}, None: {}}[preset]
    options["score_range"] = (-1, 1)
    rows, labels = TWO_CLASSES.on(device)
    module = criterion(2, prior=[0.1, 0.05], memory_size=6, v=uniform, **options).to(device)
    same = labels[:, None] == labels
    eye = torch.eye(6, dtype=torch.bool, device=device)
    leaf = rows.detach().clone().requires_grad_()  # the printed gradient does not pass the normalisation
    value = module(leaf @ leaf.T, positives=same & ~eye, negatives=~same, classes=labels)
    value.backward()
    assert_close(value.item(), 0.4451684460 if preset else 0.4451684294, atol=6e-11)
    assert_close(leaf.grad.norm().item(), 2.76507848, atol=6e-7)  # both rules print the same eight digits
    v = [0.082672, 0.235933, 0.389195, 0.541976, 0.694277, 0.846578]
    if preset:
        assert_close(module.v[0, 0].item(), 0.074577, atol=6e-7)
    else:
        assert_close(module.v[0], double(v), atol=6e-7)
    # The embedding form is the same, up to the order of sums.
    other = criterion(2, prior=[0.1, 0.05], memory_size=6, v=uniform, **options).to(device)
    assert_close(other(rows, labels), value, atol=1e-13)
    assert_close(other.v, module.v, atol=1e-13)


# --- against the definition ---

OPTIONS: list[dict[str, Any]] = [
    {},
    {"tpr_grad": True, "tau2": 0.05},
    {"tpr_offset": 0, "average": "micro"},
    {"tau1": 0.5, "tau2": 0.2, "tpr_offset": 0.5},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@given(labels=st.lists(st.integers(0, 3), max_size=7), seed=st.integers(0, 5))
def test_any_labels_equal_the_definition(options: dict[str, Any], labels: list[int], seed: int) -> None:
    """Lone rows, absent classes, a single class and no rows included."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(len(labels), 3, dtype=torch.float64, generator=generator)
    memory = torch.rand(4, 7, dtype=torch.float64, generator=generator).sort(1).values
    prior = torch.tensor([0.1, 0.01, 0.5, 0.9], dtype=torch.float64)
    targets = torch.tensor(labels, dtype=torch.int64)
    tau2 = options.get("tau2", 0.001)
    # Where the prior comes from is no matter of the kernel.
    for pi, names in ((prior, ("eager", "triton", "reference")), ("batch", ("eager", "reference"))):
        expected = value_and_grad(lambda e, y, p=pi: of_embeddings(e, y, memory, p, **options), rows, targets)
        for name in names:
            with use_backend(name):
                actual = value_and_grad(
                    lambda e, y, p=pi: soprc_loss(e, y, memory, p, **options), rows, targets
                )
            # l1 and l2 multiply a rounding of h by at most 20 and 1 / tau2, their derivatives once more; a fraction is
            # at most 1 / pi = 100 times as steep in T as T is large; rows of norm 0.1 are normalised.
            assert_close(actual, expected, atol=1e-13 * 100 / tau2)


@given(
    kinds=st.lists(st.lists(st.integers(0, 2), min_size=7, max_size=7), min_size=1, max_size=4),
    ties=st.booleans(),
    seed=st.integers(0, 5),
)
def test_any_lists_equal_the_definition(kinds: list[list[int]], ties: bool, seed: int) -> None:
    """Ties between positives, negatives and the memory; one positive; no positive; no negative."""
    kind = torch.tensor(kinds)
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(kind.shape, dtype=torch.float64, generator=generator)
    memory = torch.randn(len(kind), 5, dtype=torch.float64, generator=generator)
    if ties:
        scores, memory = scores.mul(2).round() / 2, memory.mul(2).round() / 2
    positives, negatives = kind == 1, kind == 0

    def definition(s: Tensor) -> Tensor:
        lists = [
            one_query(s[q, positives[q]], s[q, negatives[q]], memory[q], 0.2).mean()
            for q in range(len(kind))
            if positives[q].any() and negatives[q].any()
        ]
        return torch.stack(lists).mean() if lists else s.sum() * 0

    expected = evaluate(definition, scores)
    for name in ("eager", "triton", "reference"):
        with use_backend(name):
            actual = evaluate(soprc_scores_loss, scores, positives, negatives, memory, 0.2)
        assert_close(actual, expected, atol=1e-11)


def test_a_tied_negative_costs_a_whole_false_positive(any_backend: str, device: torch.device) -> None:
    """l1(0) = 1, and a tied remembered score counts 0: pessimistic on both sides (section 2)."""
    scores = torch.zeros(1, 2, dtype=torch.float64, device=device)
    mask = torch.tensor([[True, False]], device=device)
    memory = torch.zeros(1, 4, dtype=torch.float64, device=device)
    loss, grad = evaluate(soprc_scores_loss, scores, mask, ~mask, memory, 0.5)
    assert_close(loss.item(), 1 / (1 + 1 / 5), atol=1e-15)
    assert grad[0, 0] < 0 < grad[0, 1]


def test_multi_label_is_one_query_a_column(any_backend: str, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(9, 3, dtype=torch.float64, generator=generator).to(device)
    targets = torch.randint(2, (9, 3), generator=generator).to(device)
    module = criterion(3, prior=[0.1, 0.2, 0.3], memory_size=5).to(device)
    alone = [criterion(1, prior=p, memory_size=5).to(device) for p in (0.1, 0.2, 0.3)]
    losses = [m(s, t) for m, s, t in zip(alone, scores.T, targets.T, strict=True)]
    assert_close(module(scores, targets), torch.stack(losses).mean(), atol=1e-14)
    assert_close(module.v, torch.cat([m.v for m in alone]), atol=1e-15)
    assert_same(module(scores, 2 * targets - 1, update=False), module(scores, targets.bool(), update=False))


def test_float32_is_as_exact_as_dense(backend: str, device: torch.device) -> None:
    data = random_batch(40, 16, 9, n_lone=2).on(device)
    low = data.rows.detach().float()
    memory = torch.rand(11, 20, generator=torch.Generator().manual_seed(0)).to(device)
    # tau2 = 0.1: at 0.001 both are as wrong as a step at a rounded place is.
    options: dict[str, Any] = {"tau2": 0.1, "tpr_grad": True}
    exact = value_and_grad(
        lambda e, y: of_embeddings(e, y, memory.double(), torch.full((11,), 0.1, device=device).double(), **options),
        low.double(), data.labels,
    )  # fmt: skip
    actual = value_and_grad(lambda e, y: soprc_loss(e, y, memory, 0.1, **options), low, data.labels)
    use_backend("reference")
    rival = value_and_grad(lambda e, y: soprc_loss(e, y, memory, 0.1, **options), low, data.labels)
    for a, r, e in zip(actual, rival, exact, strict=True):
        assert_as_exact_as(a, r, e)


def test_gradcheck(backend: str, device: torch.device) -> None:
    rows, labels = random_batch(8, 3, 2, n_lone=1).on(device)
    memory = torch.rand(3, 4, dtype=torch.float64, device=device)
    for tpr_grad in (False, True):
        # With T constant the numerical derivative must hold T: tau2 so large that T hardly moves is no test, so the
        # memory lies above all scores, where tau2 = 1e-3 saturates.
        v = memory if tpr_grad else memory + 3
        assert torch.autograd.gradcheck(
            lambda e, v=v, t=tpr_grad: soprc_loss(
                e, labels, v, 0.2, tau1=0.7, tau2=0.5 if t else 1e-3, tpr_grad=t
            ),
            rows,
            fast_mode=backend == "triton",
        )


def test_second_derivative(device: torch.device) -> None:
    rows, labels = random_batch(6, 3, 2).on(device)
    memory = torch.rand(2, 4, dtype=torch.float64, device=device)
    with use_backend("reference"):
        function = lambda e: soprc_loss(e, labels, memory, 0.2, tau1=0.7, tau2=0.5, tpr_grad=True)  # noqa: E731
        assert torch.autograd.gradgradcheck(function, rows)
    (grad,) = torch.autograd.grad(soprc_loss(rows, labels, memory, 0.2), rows, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivative"):
        grad.square().sum().backward()


# --- invariants ---


@given(data=st.data())
def test_invariants_of_one_list(data: st.DataObject) -> None:
    """Signs of the gradient, shift invariance, and the upper bound of 1 - AUPRC (sections 7 and 7a)."""
    n, m = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 8))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    scores = torch.randn(n + m, dtype=torch.float64, generator=generator)
    if data.draw(st.booleans()):
        scores = scores.round()
    targets = torch.arange(n + m) < n
    pi = data.draw(st.sampled_from([0.01, 0.3, 0.9]))
    # v holds the other positives' scores and the positive itself: offset 0 counts it twice, offset 1 as section 7 says.
    v = scores[:n].sort().values[None]
    module = criterion(prior=pi, memory_size=n, v=v).eval()
    value, grad = evaluate(module, scores, targets)
    assert (grad[:n] <= 0).all()
    assert (grad[n:] >= 0).all()
    assert abs(grad.sum()) <= 1e-13 * (1 + grad.abs().sum())
    auprc_losses = []
    for h in scores[:n]:
        tpr = (scores[:n] >= h).double().mean()
        fpr = (scores[n:] >= h).double().mean()
        auprc_losses.append((1 - pi) * fpr / ((1 - pi) * fpr + pi * tpr))
    # T counts the positive itself through the offset, l2 is at most the step, and (1 + k) / (1 + n) <= (1 + k) / n.
    assert value >= torch.stack(auprc_losses).mean() - 1e-12


@pytest.mark.parametrize("update", ["mean", "last"])
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("v_init", ["first", "uniform"])
def test_v_stays_sorted(update: str, grid: str, v_init: str, device: torch.device) -> None:
    module = criterion(5, update=update, grid=grid, v_init=v_init, memory_size=17).to(device)
    for step in range(10):
        rows = random_batch(30, 4, 5, seed=step).rows.to(device)
        module(rows, torch.arange(30, device=device) % 5)
        assert (module.v.diff(dim=1) >= -1e-15).all()
    assert (module.v.abs() <= 1 + 1e-12).all()
    assert_same(module.visits, torch.full_like(module.visits, 10))


@given(
    scores=st.lists(st.floats(-1, 1), min_size=1, max_size=9),
    size=st.integers(1, 14),
    grid=st.sampled_from(GRIDS),
    score_range=st.sampled_from([None, (-1.0, 1.0)]),
)
def test_interpolation_equals_the_definition(
    scores: list[float], size: int, grid: str, score_range: tuple[float, float] | None
) -> None:
    actual = interpolate_scores(
        torch.tensor(scores, dtype=torch.float64), size, grid=grid, score_range=score_range
    )
    expected = reference.soprc_interpolation(scores, size, grid=grid, score_range=score_range)
    # The polygon is continuous: a place that is off by a rounding of up to 10 moves it by as many times its slope.
    assert_close(actual, torch.tensor(expected, dtype=torch.float64), atol=1e-13)
    assert (actual.diff() >= -1e-15 * 4).all()
    if len(scores) == 1:
        assert_close(actual, double([scores[0]] * size), atol=1e-15)


@pytest.mark.parametrize("scores", [[1.25, 1.5, 1.75], [-1.75, -1.5, -1.25], [-1.5, 0, 1.5], [2.0]])
@pytest.mark.parametrize("grid", GRIDS)
def test_scores_outside_the_range_stay_in_order(scores: list[float], grid: str) -> None:
    """A similarity may round to a little above 1: an end that is outside is not extended, nor folded back."""
    phi = interpolate_scores(torch.tensor(scores, dtype=torch.float64), 12, grid=grid, score_range=(-1, 1))
    rounding = 4 * torch.finfo(torch.float64).eps  # of sums of three terms below 2
    assert (phi.diff() >= -rounding).all()
    if scores[0] < -1:
        assert scores[0] - rounding <= phi[0]
    if scores[-1] > 1:
        assert phi[-1] <= scores[-1] + rounding


@pytest.mark.parametrize("n", [3, 10, 50])
def test_interpolation_keeps_the_mean(n: int) -> None:
    """Section 3: mean(phi) = mean(s) + ((s_0 - s_1) + (s_(n+1) - s_n)) / (4 n), for places uniform on [0, n)."""
    s = torch.rand(n, dtype=torch.float64).sort().values
    phi = interpolate_scores(s, 1000 * n)
    expected = s.mean() + ((s[0] - s[1]) + (s[-1] - s[-2])) / (4 * n)
    # The midpoint rule on pieces of a quadratic function: an error of 1 / (24 * 1000^2) of the second difference.
    assert_close(phi.mean(), expected, atol=1e-6)


# --- what the paper proves ---


def test_proposition_1_mean_and_variance_of_the_memory() -> None:
    """E[v_T] = E[phi] + (1 - beta)^T (v_1 - E[phi]) and Var[v] <= Var[phi] beta / (2 - beta), for a fixed model.

    Over 4000 independent memories and 6 entries. By the normal law each of the 18 comparisons below fails by chance
    with a probability under 1e-5, at 4.5 standard errors. Seeded, so it does not.
    """
    beta, runs, n, size, steps = 0.2, 4000, 5, 6, 12
    generator = torch.Generator().manual_seed(3)
    module = criterion(runs, beta=beta, memory_size=size, v_init="uniform", prior=0.1)
    start = torch.full((size,), 2.0, dtype=torch.float64)
    module.v.copy_(start)
    draws = torch.randn(steps, n, runs, dtype=torch.float64, generator=generator)
    for draw in draws:  # one more row: the negative that makes each column a query
        scores = torch.cat([draw, torch.full((1, runs), -9.0, dtype=torch.float64)])
        module(scores, (torch.arange(n + 1) < n).int()[:, None].expand(-1, runs))
    phi = interpolate_scores(draws.movedim(1, 2), size).flatten(0, 1)  # of all steps and runs
    decay = (1 - beta) ** steps
    expected = phi.mean(0) + decay * (start - phi.mean(0))
    variance = phi.var(0) * beta / (2 - beta) * (1 - (1 - beta) ** (2 * steps))
    error = (variance / runs).sqrt()
    assert ((module.v.mean(0) - expected).abs() <= 4.5 * error).all()
    # The variance of a sample of normal numbers is off by sqrt(2 / runs) of itself.
    ratio = module.v.var(0) / variance
    assert ((ratio - 1).abs() <= 4.5 * math.sqrt(2 / runs)).all()
    assert (module.v.var(0) <= phi.var(0) * beta / (2 - beta) * (1 + 4.5 * math.sqrt(2 / runs))).all()


@pytest.mark.parametrize("n", [10, 40])
def test_proposition_3_error_of_linear_interpolation(n: int) -> None:
    """||p - p^|| <= ||p''|| / (8 n^2) through exact quantiles; of p(q) = q^2, whose error it is exactly.

    The knots are at i / (n + 1), so n + 1 takes the place of n. No chance is involved.
    """
    quantiles = (torch.arange(1, n + 1, dtype=torch.float64) / (n + 1)) ** 2
    size = 64 * (n + 1)  # even: the places j + 1/2 come within 1/128 of the middle of every interval
    q = (torch.arange(size, dtype=torch.float64) + 0.5) / size
    inner = (q > 1 / (n + 1)) & (q < n / (n + 1))  # outside, phi extrapolates
    worst = (interpolate_scores(quantiles, size, grid="linear") - q**2)[inner].abs().max()
    bound = 2 / (8 * (n + 1) ** 2)
    assert bound * (1 - 1 / 32) ** 2 <= worst <= bound * (1 + 1e-9)


def test_the_estimate_is_unbiased_where_average_precision_is_not() -> None:
    """Proposition 2 in small: a fifth of each batch is positive, the prior is 0.02, scores are of two uniform laws.

    Positives U(0.5, 1.5), negatives U(0, 1): E l_1(h - h^-) is an integral, and T is 1.5 - h where l_2 is a step. The
    mean of 100 batches of 500 agrees with Eq. 4 for the prior 0.02, and that of the loss without prior with Eq. 4 for
    0.2, within 4.5 standard errors plus 0.02, the bias of order 1 / n (there are 100 positives, and sigma is curved).
    """
    generator = torch.Generator().manual_seed(1)
    n_positive, n_negative, runs = 100, 400, 100
    grid = (torch.arange(2000, dtype=torch.float64) + 0.5) / 2000
    h = grid + 0.5
    tpr, fpr = 1.5 - h, huber(h[:, None] - grid, 0.1).mean(1)

    def limit(prior: float) -> float:
        return float(((1 - prior) * fpr / ((1 - prior) * fpr + prior * tpr)).mean())

    targets = (torch.arange(n_positive + n_negative) < n_positive).int()
    ours, biased = criterion(prior=0.02), criterion(prior="batch", use_memory=False)
    losses = []
    for _ in range(runs):
        scores = torch.rand(n_positive + n_negative, dtype=torch.float64, generator=generator)
        scores[:n_positive] += 0.5
        losses.append([ours(scores, targets).item(), biased(scores, targets).item()])
    mean, error = torch.tensor(losses).mean(0), torch.tensor(losses).std(0) / math.sqrt(runs)
    for k, truth in enumerate((limit(0.02), limit(0.2))):
        assert abs(mean[k] - truth) <= 4.5 * error[k] + 0.02
    assert mean[0] - mean[1] > 0.1  # the average precision of a batch is too good


# --- numerics ---


@pytest.mark.parametrize(
    ("any_backend", "dtype", "tau2"),
    [
        *(
            (backend, dtype, tau2)
            for backend in ("eager", "reference")
            for dtype in (torch.float32, torch.float16, torch.bfloat16)
            for tau2 in (1e-3, 1e-6, 1e-30)
        ),
        ("triton", torch.float32, 1e-3),
        ("triton", torch.float16, 1e-30),
        ("triton", torch.bfloat16, 1e-6),
    ],
    indirect=["any_backend"],
)
def test_a_narrow_sigmoid_overflows_nowhere(
    tau2: float, dtype: torch.dtype, any_backend: str, device: torch.device
) -> None:
    rows = random_batch(24, 8, 5).rows.to(device, dtype)
    labels = random_batch(24, 8, 5).labels.to(device)
    for tpr_grad in (False, True):
        module = SOPRCLoss(5, tau2=tau2, tpr_grad=tpr_grad, prior=1e-6, memory_size=10).to(device)
        for _ in range(2):
            loss, grad = value_and_grad(module, rows, labels)
            assert loss.dtype == grad.dtype == dtype
            assert loss.isfinite()
            if dtype == torch.float32 or not tpr_grad:
                assert grad.isfinite().all()  # a slope of 1 / (2 tau2) is more than a half can hold
    exact = SOPRCLoss(5, prior=1e-6, memory_size=10).to(device)(rows.double(), labels)
    fresh = SOPRCLoss(5, prior=1e-6, memory_size=10).to(device)(rows, labels)
    # At tau2 = 1e-3 a rounding of float32 moves an entry of T by 1e-7 / 2e-3.
    assert_close(fresh.double(), exact, rtol=max(1e-3, torch.finfo(dtype).eps))


def test_tiny_prior_and_large_scores_keep_their_gradient(device: torch.device) -> None:
    """pi (1 - pi) T / (...)^2 to float32 accuracy where (1 - pi) F is 1e8 times pi T: no difference of equals."""
    scores = torch.tensor([[0.0, 30.0]], device=device)
    mask = torch.tensor([[True, False]], device=device)
    memory = torch.full((1, 4), 1.0, device=device)
    pi = 1e-5
    loss, grad = evaluate(soprc_scores_loss, scores, mask, ~mask, memory, pi)
    fpr, tpr = 1 + 2 * 30 / 0.1, 1.0
    expected = pi * (1 - pi) * tpr / ((1 - pi) * fpr + pi * tpr) ** 2 * 20
    assert_close(grad[0], torch.tensor([-expected, expected]), rtol=1e-5)
    assert loss <= 1


def test_paper_preset_gives_zero_over_zero_as_zero(any_backend: str, device: torch.device) -> None:
    module = SOPRCLoss.from_preset("paper", memory_size=2, w_var=0).to(device)
    loss, grad = evaluate(
        module, torch.tensor([5.0, 0.0], device=device), torch.tensor([1, 0], device=device)
    )
    assert loss.item() == 0
    assert not grad.any()


def test_nan_is_reported_and_not_remembered(device: torch.device) -> None:
    rows, labels = random_batch(12, 4, 3).on(device, torch.float32)
    module = SOPRCLoss(3).to(device)
    module(rows, labels)
    before = copy.deepcopy(module.state_dict())
    assert module(rows * torch.nan, labels).isnan()
    for name, buffer in module.state_dict().items():
        assert_same(buffer, before[name])


# --- the memory ---


def test_first_visit_then_moving_average(any_backend: str, device: torch.device) -> None:
    module = criterion(3, beta=0.25, memory_size=5).to(device)
    first = TWO_CLASSES.on(device)
    second = Batch(TWO_CLASSES.rows.flip(1) + 0.1, TWO_CLASSES.labels).on(device)
    targets = []
    for rows, labels in (first, second):
        module(rows, labels)
        unit = F.normalize(rows.detach(), dim=1)
        scores = (unit @ unit.T)[:3, :3][~torch.eye(3, dtype=torch.bool)].view(3, 2)
        targets.append(interpolate_scores(scores, 5, score_range=(-1, 1)).mean(0))
    assert_close(module.v[0], 0.75 * targets[0] + 0.25 * targets[1], atol=1e-14)
    assert module.visits.tolist() == [2, 2, 0]
    assert not module.v[2].any()


def test_updates_of_several_queries(any_backend: str, device: torch.device) -> None:
    rows, labels = random_batch(11, 4, 2, n_lone=1, seed=4).on(device)
    unit = F.normalize(rows.detach(), dim=1)
    expected: dict[str, list[Tensor]] = {"mean": [], "last": []}
    for c in range(2):
        (members,) = (labels == c).nonzero(as_tuple=True)
        n = len(members)
        scores = (unit[members] @ unit[members].T)[~torch.eye(n, dtype=torch.bool)].view(n, n - 1)
        each = interpolate_scores(scores, 8, score_range=(-1, 1))
        expected["mean"].append(each.mean(0))
        expected["last"].append(each[-1])
    for update, target in expected.items():
        module = criterion(3, update=update, memory_size=8).to(device)
        module(rows, labels)
        assert_close(module.v[:2], torch.stack(target), atol=1e-14)
        assert module.visits.tolist() == [1, 1, 0]


def test_unchanged_in_eval_mode_with_update_false_and_after_an_error(device: torch.device) -> None:
    rows, labels = random_batch(12, 4, 3).on(device)
    module = criterion(3).to(device)
    module(rows, labels)
    before = copy.deepcopy(module.state_dict())
    used = [module(rows, labels, update=False), module.eval()(rows, labels)]
    assert_same(used[0], used[1])
    module.train()
    for call in (
        lambda: module(rows, labels + 1),
        lambda: module(rows, labels[:-1]),
        lambda: module(rows, labels, ref_emb=rows),
        lambda: module(rows[0], labels[:4]),
    ):
        with pytest.raises(ValueError, match=r"\d|ref_emb"):
            call()
    for name, buffer in module.state_dict().items():
        assert_same(buffer, before[name])
    module(rows * 2 + 1, labels)
    assert not torch.equal(module.v, before["v"])


def test_an_error_of_the_last_step_leaves_the_memory(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    rows, labels = random_batch(12, 4, 3).on(device)
    module = criterion(3).to(device)
    with monkeypatch.context() as context:
        context.setattr(implementation, "rank_total", divide_by_zero)
        with pytest.raises(ZeroDivisionError):
            module(rows, labels)
        assert not module.visits.any()
    module.w_var = 1
    monkeypatch.setattr(module.semi_variance, "of_layout", divide_by_zero)
    with pytest.raises(ZeroDivisionError):
        module(rows, labels)
    assert not module.visits.any()
    assert not module.v.any()


def test_a_class_never_met_uses_its_own_scores(any_backend: str, device: torch.device) -> None:
    rows, labels = TWO_CLASSES.on(device)
    assert_same(
        criterion(2).to(device).eval()(rows, labels), criterion(2, use_memory=False).to(device)(rows, labels)
    )


def test_ablations_of_table_2(any_backend: str, device: torch.device) -> None:
    rows, labels = TWO_CLASSES.on(device)
    stateless = criterion(2, use_memory=False, memory_size=7).to(device)
    value = stateless(rows, labels)
    assert not stateless.visits.any()
    unit = F.normalize(rows.detach(), dim=1)
    total = []
    for q in range(6):
        same = (labels == labels[q]) & (torch.arange(6, device=device) != q)
        phi = interpolate_scores((unit @ unit[q])[same], 7, score_range=(-1, 1))
        total.append(
            one_query((unit @ unit[q])[same], (unit @ unit[q])[labels != labels[q]], phi, 0.1).mean()
        )
    assert_close(value, torch.stack(total).mean(), atol=1e-12)
    batch_prior = criterion(2, use_memory=False, memory_size=7, prior="batch").to(device)
    assert batch_prior.prior is None
    assert_same(
        batch_prior(rows, labels), criterion(2, use_memory=False, memory_size=7, prior=2 / 5).to(device)(rows, labels)
    )  # fmt: skip
    with_variance = criterion(2, use_memory=False, memory_size=7, w_var=0.5).to(device)
    assert_close(
        with_variance(rows, labels), value + 0.5 * SemiVarianceRegularizer()(rows, labels), atol=1e-14
    )
    assert list(with_variance.loss_terms(rows, labels)) == ["loss", "semi_variance_loss"]


def test_presets() -> None:
    authors = SOPRCLoss.from_preset("authors", 4, prior=scaled_prior([2, 4, 4, 8]))
    assert (authors.v_init, authors.grid, authors.update) == ("uniform", "authors", "last")
    assert (authors.options.tpr_offset, authors.options.tpr_grad) == (1, False)
    assert authors.semi_variance.normalize == "selected"
    assert_close(authors.v, (torch.arange(100) / 100).expand(4, 100))
    assert_close(authors.prior, torch.tensor([0.025, 0.05, 0.05, 0.1]), rtol=1e-6)
    paper = SOPRCLoss.from_preset("paper", 2, memory_size=7, beta=0.01)
    assert (paper.options.tpr_offset, paper.options.tpr_grad, paper.beta) == (0, True, 0.01)
    assert paper.v.shape == (2, 7)
    with pytest.raises(TypeError, match="memory_size"):
        SOPRCLoss.from_preset("paper")
    with pytest.raises(ValueError, match="preset"):
        SOPRCLoss.from_preset("code")


def test_priors() -> None:
    assert_close(exact_prior([1, 3, 5]), torch.tensor([1 / 8, 2 / 8, 4 / 8]), rtol=1e-7)
    assert_close(exact_prior(torch.tensor([10, 90]), retrieval=False), torch.tensor([0.1, 0.9]), rtol=1e-7)
    assert_close(scaled_prior([5, 10], prior_max=0.01), torch.tensor([0.005, 0.01]), rtol=1e-7)


# --- what is refused ---


@pytest.mark.parametrize(
    ("error", "match", "options"),
    [
        (ValueError, "prior must be above 0 and below 1, got 0", {"prior": 0.0}),
        (ValueError, "prior must be above 0 and below 1, got 1", {"prior": [0.5, 1.0]}),
        (ValueError, "prior must be above 0 and below 1, got nan", {"prior": float("nan")}),
        (ValueError, r"shape \[2\], got \[3\]", {"prior": torch.full((3,), 0.1)}),
        (ValueError, "prior is 'exact'", {"prior": "exact"}),
        (ValueError, "tau1 is 0", {"tau1": 0}),
        (ValueError, "tau2 is -1", {"tau2": -1}),
        (TypeError, "tau2 must be a number", {"tau2": "1"}),
        (ValueError, "beta is 0", {"beta": 0}),
        (ValueError, r"beta is 1\.5", {"beta": 1.5}),
        (ValueError, "memory_size is 0", {"memory_size": 0}),
        (TypeError, "memory_size must be an int", {"memory_size": 10.0}),
        (ValueError, "grid is", {"grid": "right"}),
        (ValueError, "v_init is", {"v_init": "zero"}),
        (ValueError, "update is", {"update": "first"}),
        (ValueError, "update is 'pool': expected one of", {"update": "pool"}),
        (ValueError, "average is", {"average": "none"}),
        (ValueError, "tpr_offset is", {"tpr_offset": -0.5}),
        (ValueError, "w_var is", {"w_var": -1}),
        (ValueError, "score_range", {"score_range": (1, -1)}),
        (ValueError, "score_range", {"score_range": (1, 2, 3)}),
        (ValueError, "normalize is", {"var_normalize": "none"}),
        (TypeError, "unexpected keyword", {"margin": 1}),
    ],
)
def test_options_that_are_refused(error: type[Exception], match: str, options: dict[str, Any]) -> None:
    with pytest.raises(error, match=match):
        SOPRCLoss(2, **options)


@pytest.mark.parametrize(
    ("error", "match", "call"),
    [
        (ValueError, "got 2", lambda m, e, y: m(e, y + 1)),
        (ValueError, "got -1", lambda m, e, y: m(e, y - 1)),
        (TypeError, "integer", lambda m, e, y: m(e, y.float())),
        (ValueError, "indices_tuple", lambda m, e, y: m(e, y, (y, y, y))),
        (ValueError, "masks", lambda m, e, y: m(e)),
        (ValueError, "positives", lambda m, e, y: m(e, y, positives=e > 0)),
        (ValueError, "num_classes is 2", lambda m, e, y: m(e[:, 0], y)),
        (ValueError, "num_classes is 2", lambda m, e, y: m(e.repeat(1, 2), e.repeat(1, 2) > 0)),
        (ValueError, "classes are required", lambda m, e, y: m(e, positives=e > 0, negatives=e < 0)),
        (ValueError, "classes must have shape", lambda m, e, y: m(e, positives=e > 0, negatives=e < 0, classes=y[1:])),
        (TypeError, "classes must be", lambda m, e, y: m(e, positives=e > 0, negatives=e < 0, classes=y.float())),
        (ValueError, "got 2", lambda m, e, y: m(e, positives=e > 0, negatives=e < 0, classes=y + 1)),
    ],
)  # fmt: skip
def test_calls_that_are_refused(error: type[Exception], match: str, call: Any, device: torch.device) -> None:
    rows, labels = TWO_CLASSES.on(device)
    with pytest.raises(error, match=match):
        call(SOPRCLoss(2).to(device), rows, labels)


def test_label_out_of_range_without_the_check(device: torch.device) -> None:
    """Such a row is no query and a negative of all others; nothing is written for it."""
    rows, labels = TWO_CLASSES.on(device)
    module = criterion(1, check_label_range=False).to(device)
    mask = labels[:3, None] == labels
    mask[:, :3] &= ~torch.eye(3, dtype=torch.bool, device=device)
    unit = F.normalize(rows, dim=1)
    expected = criterion(1, score_range=(-1, 1)).to(device)(
        (unit @ unit.T)[:3], positives=mask, negatives=labels[:3, None] != labels
    )
    assert_close(module(rows, labels), expected, atol=1e-13)
    assert module.visits.tolist() == [1]


# --- panels of queries ---

# A class of nearly half the rows, one of two, lone rows. The pairs of a query of the largest class take 16 numbers of 8
# bytes each, 3456 bytes, and a row of scores 480: 25 000 bytes are 7 queries, or 52 where none has a pair.
_LABELS = torch.tensor([0] * 27 + [1] * 19 + [2] * 5 + [3] * 2 + [4, 5, 7, 8] + [6] * 3)
UNEVEN = Batch(
    random_batch(60, 6, 1, seed=7).rows,
    _LABELS[torch.randperm(60, generator=torch.Generator().manual_seed(1))],
)
BLOCKED: dict[str, dict[str, Any]] = {
    "default": {},
    "without Eq. 9": {"w_var": 0},
    "Eq. 9 of the selected": {"var_normalize": "selected", "var_detach_mean": True},
    "last": {"update": "last", "grid": "authors", "v_init": "uniform"},
    "uniform, linear": {"v_init": "uniform", "grid": "linear", "beta": 1},
    "micro": {"average": "micro", "tpr_offset": 0},
    "gradient of T": {"tpr_grad": True, "tau2": 0.05, "v_init": "uniform"},
    "prior of the batch": {"prior": "batch", "tau1": 0.5},
    "no memory": {"use_memory": False},
    "bound": {"max_class_size": 30},
    "bound, last": {"max_class_size": 30, "update": "last"},
    "labels out of range": {"num_classes": 3, "check_label_range": False},
    "no label in range": {"num_classes": 1, "check_label_range": False, "shift": 1},
}


@pytest.fixture
def panels_used(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many panels of queries each call takes."""
    used: list[int] = []
    real = implementation.rank_total

    def rank_total(*args: Any, **options: Any) -> Tensor:
        used.append(len(list(options["panels"])))
        return real(*args, **options)

    monkeypatch.setattr(implementation, "rank_total", rank_total)
    return used


def history(budget: int | None, device: torch.device, **options: Any) -> list[Tensor]:
    """Values, gradients and buffers of two calls that move the memory and of one that does not."""
    shift, num_classes = options.pop("shift", 0), options.pop("num_classes", 11)
    module = criterion(num_classes, memory_size=8, memory_budget=budget, **{"w_var": 1, **options}).to(device)
    rows, labels = UNEVEN.on(device)
    found: list[Tensor] = []
    for step in range(3):
        module.train(step < 2)
        found += evaluate(module, rows * 2 - step, labels + shift)
        found += [buffer.clone() for buffer in module.buffers()]
    return found


@pytest.mark.parametrize(
    ("name", "budget"),
    [("default", 1), ("last", 3_000), *((name, 25_000) for name in BLOCKED)],
)
def test_panels_of_queries_change_nothing(
    name: str, budget: int, device: torch.device, panels_used: list[int]
) -> None:
    expected = history(None, device, **BLOCKED[name])
    assert panels_used == [1] * 3
    panels_used.clear()
    actual = history(budget, device, **BLOCKED[name])
    assert len(panels_used) == 3
    assert min(panels_used) > 1
    # h is off by a few roundings, 1e-15. l2 is at most 1 / (2 tau2) = 500 times as steep and T at least 1 / 9: T is off
    # by 5e-12 of itself, and a gradient, of slopes l1' of at most 20, by 1e-10. The memory is off as h is.
    assert_close(actual, expected, atol=1e-10)
    names = ["value", "gradient", *dict(SOPRCLoss().named_buffers())]
    for k in range(0, len(actual), len(expected) // 3):
        assert_close(actual[k + names.index("v")], expected[k + names.index("v")], atol=1e-14)


@pytest.mark.parametrize(
    ("average", "backend"),
    [("macro", "eager"), ("micro", "eager"), ("macro", "triton")],
    indirect=["backend"],
)
def test_panels_of_queries_equal_the_definition(
    average: str, backend: str, device: torch.device, panels_used: list[int]
) -> None:
    rows, labels = UNEVEN.on(device)
    memory = torch.rand(9, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).to(device)
    prior = torch.linspace(0.05, 0.9, 9, dtype=torch.float64, device=device)
    options: dict[str, Any] = {"average": average, "tpr_grad": True, "tau2": 0.05}
    expected = evaluate(of_embeddings, rows, labels, memory, prior, **options)
    actual = evaluate(soprc_loss, rows, labels, memory, prior, memory_budget=60_000, **options)
    assert panels_used[0] > 1
    # As above, with 1 / (2 tau2) = 10 and T at least 1 / 6, and once more 10 for the slope of l2.
    assert_close(actual, expected, atol=1e-11)


def test_panels_of_queries_and_autograd(device: torch.device, panels_used: list[int]) -> None:
    """No gradient, half precision, autocast, a second derivative, two runs."""
    rows, labels = UNEVEN.on(device, torch.float32)
    module = SOPRCLoss(9, memory_budget=25_000).to(device)
    value, grad = evaluate(module, rows, labels)
    with torch.no_grad():
        assert_same(module(rows, labels, update=False), module.eval()(rows, labels))
    again = SOPRCLoss(9, memory_budget=25_000).to(device)
    with torch.autocast(device.type, torch.bfloat16):
        assert_same(evaluate(again, rows, labels), (value, grad))
        low = again(rows.bfloat16(), labels)
    assert low.dtype == torch.float32
    (grad,) = torch.autograd.grad(again(rows, labels), rows, create_graph=True)
    with pytest.raises(RuntimeError, match="derivative"):
        grad.sum().backward()
    assert min(panels_used) > 1


@pytest.mark.parametrize("update", ["mean", "last"])
def test_panels_that_fail_or_hold_nan_leave_the_memory(
    update: str, device: torch.device, monkeypatch: pytest.MonkeyPatch, panels_used: list[int]
) -> None:
    rows, labels = UNEVEN.on(device)
    module = criterion(9, update=update, memory_budget=25_000).to(device)
    module(rows, labels)
    before = copy.deepcopy(module.state_dict())
    assert module(rows * torch.nan, labels).isnan()
    real = implementation.memory_rank
    calls = iter([real, real, divide_by_zero])  # the third panel fails
    monkeypatch.setattr(implementation, "memory_rank", lambda *args, **options: next(calls)(*args, **options))
    with pytest.raises(ZeroDivisionError):
        module(rows, labels)
    for name, buffer in module.state_dict().items():
        assert_same(buffer, before[name])
    assert min(panels_used) > 1


def divide_by_zero(*_: Any, **__: Any) -> Tensor:
    return torch.tensor(1 // 0)


def test_a_class_with_one_nan_row(device: torch.device, panels_used: list[int]) -> None:
    """Queries whose phi does not reach the NaN move the memory, the NaN itself does not; as with one panel."""
    rows, labels = UNEVEN.on(device)
    rows = rows.detach().clone()
    rows[labels == 0] = torch.where(
        torch.arange(27, device=device)[:, None] == 3, torch.nan, rows[labels == 0]
    )
    for update in ("mean", "last"):
        states = []
        for budget in (None, 25_000):
            module = criterion(9, update=update, grid="authors", memory_size=8, memory_budget=budget).to(
                device
            )
            module(rows, labels)
            states.append([module.v.clone(), module.visits.clone()])
        assert_close(states[1], states[0], atol=1e-14)
        assert states[0][1][0] == 1
    assert min(panels_used[1::2]) > 1  # of the small budget


# Peak memory of one call above what the process holds, in bytes, with two classes.
PEAK = """
import torch
from bench.memory import peak_above
from tritonloss.losses import SOPRCLoss

torch.set_num_threads(1)
criterion = SOPRCLoss(2, memory_size=20, memory_budget=8 << 20)
rows, labels = torch.randn(2048, 16, requires_grad=True), torch.arange(2048) % 2
print(peak_above(lambda: criterion(rows, labels).backward(), "cpu"))
"""


@peaks_are_known
def test_peak_memory_of_two_classes() -> None:
    """N = 2048: 2.1 million pairs, of which one number takes 8 MiB, the budget; held for all of them are about 20.

    Pairs may take the budget. Eq. 9 takes six blocks of 4 MiB: scores, gradient, and the columns of half of the keys as
    int64, with their deviations and use. Twice the budget for N (D + V) numbers and the allocator.
    """
    assert 1 << 20 < int(python(PEAK)) <= (3 * 8 + 6 * 4) << 20


@pytest.mark.parametrize(
    ("name", "backend"),
    [*((name, "eager") for name in BLOCKED), ("gradient of T", "triton"), ("no memory", "triton")],
    indirect=["backend"],
)
def test_one_pass_equals_the_reference(name: str, backend: str, device: torch.device) -> None:
    """Values, gradients and the memory, two moves and one use of it."""
    actual = history(None, device, **BLOCKED[name])
    use_backend("reference")
    expected = history(None, device, **BLOCKED[name])
    # Two orders of summation, as in the panels above.
    assert_close(actual, expected, atol=1e-10)


@pytest.mark.parametrize("w_var", [0, 1])
def test_value_and_gradient_take_one_walk_each(
    w_var: float, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One product a walk for the scores; of a whole panel the gradient is one more; the quantiles take one."""
    rows, labels = UNEVEN.on(device)
    products: list[str] = []
    for owner, name in ((torch, "addmm"), (Tensor, "addmm_")):
        real = getattr(owner, name)
        monkeypatch.setattr(
            owner, name, lambda *a, real=real, name=name, **k: products.append(name) or real(*a, **k)
        )
    value_and_grad(criterion(9, w_var=w_var).to(device), rows, labels)
    assert products == ["addmm"] * (5 if w_var else 3)


# --- the quantiles of any classes ---

CLASS_SIZES: dict[str, list[int]] = {
    "one class": [23],
    "lone rows": [1] * 7,
    "a big class and lone rows": [1, 1, 30, 1],
    "many sizes": [2, 1, 17, 3, 1, 9, 2, 2],
    "pairs": [2] * 9,
}


@pytest.mark.parametrize("sizes", CLASS_SIZES.values(), ids=CLASS_SIZES)
@pytest.mark.parametrize("budget", [None, 6_000, 1])
@pytest.mark.parametrize("bound", [None, 30])
def test_quantiles_of_classes_of_any_size(
    sizes: list[int], budget: int | None, bound: int | None, device: torch.device
) -> None:
    n = sum(sizes)
    generator = torch.Generator().manual_seed(5)
    labels = torch.repeat_interleave(torch.tensor(sizes))[torch.randperm(n, generator=generator)].to(device)
    rows = torch.randn(n, 4, dtype=torch.float64, generator=generator).to(device)
    phi = Interpolation(6, "midpoint", (-1.0, 1.0))
    queries = implementation.Queries.of_embeddings(rows, labels, bound, budget, None)
    assert queries.layout is not None
    actual = queries.quantiles(phi)
    unit = F.normalize(rows)
    for place, row in enumerate(queries.layout.order.tolist()):
        same = labels == labels[row]
        same[row] = False
        expected = torch.zeros(6, dtype=torch.float64)
        if same.any():
            expected = interpolate_scores(unit[same] @ unit[row], 6, score_range=(-1, 1))
        assert_close(
            actual[place], expected, atol=1e-14
        )  # sums of 4 products of numbers below 1, in two orders
    mask = labels[:, None] == labels
    mask.fill_diagonal_(False)
    matrix = (unit @ unit.T, mask, ~mask)
    assert_close(
        implementation.Queries.of_scores(matrix, labels, budget).quantiles(phi)[queries.layout.order],
        actual,
        atol=1e-14,
    )


# --- the memory alone ---


def score_memory(**options: Any) -> ScoreMemory:
    defaults = {"memory_size": 2, "beta": 0.25, "score_range": None, "grid": "midpoint", "v_init": "first"}
    return ScoreMemory(4, **{**defaults, "update": "mean", **options}).double()


PHI = torch.tensor([[1.0, 2], [3, 6], [5, 7], [9, 9], [torch.nan, 1]], dtype=torch.float64)
CLASSES = torch.tensor([2, 0, 2, -1, 2])
IS_QUERY = torch.tensor([True, True, True, False, True])


@pytest.mark.parametrize("in_class_order", [False, True])
@pytest.mark.parametrize(("update", "target"), [("mean", [3, 4.5]), ("last", [5, 7])])
def test_score_memory(update: str, target: list[float], in_class_order: bool, device: torch.device) -> None:
    """What is not finite moves nothing, what is no query neither; only `commit` writes."""
    order = torch.argsort(CLASSES, stable=True) if in_class_order else torch.arange(5)
    classes, phi, is_query = (tensor[order].to(device) for tensor in (CLASSES, PHI, IS_QUERY))
    memory = score_memory(update=update).to(device)
    assert_same(memory.current(classes, phi).nan_to_num(), phi.nan_to_num())  # nothing was met
    used, moves = memory.moved(classes, phi, is_query, in_class_order=in_class_order)
    assert not memory.v.any()
    assert not memory.visits.any()
    assert_same(moves, classes >= 0)
    assert_close(used[classes == 2], double(target).expand(3, 2))
    assert_close(used[classes == 0], double([[3, 6]]))
    assert_close(used[classes == -1], double([[9, 9]]))
    memory.commit(classes, used, moves)
    assert_close(memory.v, double([[3, 6], [0, 0], target, [0, 0]]))
    assert memory.visits.tolist() == [1, 0, 1, 0]
    assert_close(memory.current(classes, phi)[classes == 2], double(target).expand(3, 2))
    used, moves = memory.moved(classes, phi + 4, is_query, in_class_order=in_class_order)
    assert_close(used[classes == 2], (double(target) + 0.25 * 4).expand(3, 2))
    memory.commit(classes, used, moves)
    assert_close(memory.v[2], double(target) + 1)
    assert memory.visits.tolist() == [2, 0, 2, 0]
    memory.reset_parameters()
    assert not memory.v.any()
    assert not memory.visits.any()


def test_score_memory_of_a_class_without_finite_scores(device: torch.device) -> None:
    memory = score_memory().to(device)
    classes, phi = torch.tensor([1, 1], device=device), torch.full((2, 2), torch.nan, device=device)
    used, moves = memory.moved(classes, phi.double(), classes > 0, in_class_order=True)
    assert not moves.any()
    assert used.isnan().all()
    memory.commit(classes, used, moves)
    assert not memory.v.any()
    assert not memory.visits.any()


META = """
import torch
from checks import assert_same
from inputs import random_batch
from tritonloss.losses import SOPRCLoss

rows, labels = random_batch(12, 4, 3).on(torch.device("cpu"), torch.float32)
for v_init in ("first", "uniform"):
    for prior in (0.1, [0.1, 0.2, 0.3], "batch"):
        expected = SOPRCLoss(3, v_init=v_init, prior=prior)
        with torch.device("meta"):
            module, loaded = (SOPRCLoss(3, v_init=v_init, prior=prior) for _ in range(2))
        assert {buffer.device.type for buffer in module.buffers()} == {"meta"}
        module.to_empty(device="cpu")
        module.reset_parameters()
        for name, buffer in expected.state_dict().items():
            assert_same(module.state_dict()[name], buffer)
        expected(rows, labels)
        loaded.load_state_dict(expected.state_dict(), assign=True)
        assert_same(loaded(rows, labels, update=False), expected(rows, labels, update=False))
print("as built on the CPU")
"""


def test_construction_on_the_meta_device() -> None:
    """In a process of its own: torch remembers which functions make tensors, and a fixture here replaces them."""
    assert python(META).split("\n")[-2] == "as built on the CPU"


def test_half_checkpoints_are_held_in_float32() -> None:
    trained = SOPRCLoss(3)
    trained(*random_batch(12, 4, 3).on(torch.device("cpu"), torch.float32))
    half = {name: t.half() if t.is_floating_point() else t for name, t in trained.state_dict().items()}
    for assign in (False, True):
        resumed = SOPRCLoss(3)
        resumed.load_state_dict(half, assign=assign)
        for name, buffer in resumed.state_dict().items():
            assert_same(buffer, half[name].to(trained.state_dict()[name].dtype))


# --- state ---


def test_checkpoint_round_trip(device: torch.device) -> None:
    rows, labels = random_batch(12, 4, 3).on(device)
    trained = criterion(3, prior=[0.1, 0.2, 0.3]).to(device)
    trained(rows, labels)
    assert set(trained.state_dict()) == {"v", "visits", "prior"}
    stream = io.BytesIO()
    torch.save(trained.state_dict(), stream)
    stream.seek(0)
    resumed = criterion(3).to(device)
    resumed.load_state_dict(torch.load(stream, weights_only=True))
    assert_same(resumed(rows * 2 - 1, labels), trained(rows * 2 - 1, labels))
    assert_same(resumed.v, trained.v)


@pytest.mark.parametrize(("num_classes", "memory_size"), [(3, 50), (4, 100), (1, 100)])
def test_state_of_another_size_is_refused_as_a_whole(num_classes: int, memory_size: int) -> None:
    trained = nn.ModuleDict({"loss": SOPRCLoss(3)})
    trained["loss"](*random_batch(12, 4, 3).on(torch.device("cpu")))
    other = nn.ModuleDict({"loss": SOPRCLoss(num_classes, memory_size=memory_size)})
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(RuntimeError, match="another size"):
        other.load_state_dict(trained.state_dict())
    for name, buffer in other.state_dict().items():
        assert_same(buffer, before[name])


def test_copies_give_the_same(device: torch.device) -> None:
    rows, labels = random_batch(12, 4, 3).on(device)
    module = criterion(3).to(device)
    module(rows, labels)
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert_same(copied(rows, labels, update=False), module(rows, labels, update=False))
        copied(rows * 2 + 1, labels)
        assert not torch.equal(copied.v, module.v)
    assert "memory_size=100" in repr(module)


def test_half_keeps_the_memory_in_float32() -> None:
    module = SOPRCLoss(3)
    module(*random_batch(12, 4, 3).on(torch.device("cpu"), torch.float32))
    before = module.v.clone()
    module.half()
    assert_same(module.v, before)
    assert module.prior is not None
    assert module.prior.dtype == torch.float32
    assert module.double().v.dtype == torch.float64


@pytest.mark.parametrize("v_init", ["first", "uniform"])
def test_the_state_is_float32_whatever_the_default(v_init: Any) -> None:
    torch.set_default_dtype(torch.float64)
    state = SOPRCLoss(3, v_init=v_init).state_dict()
    assert {name: tensor.dtype for name, tensor in state.items()} == {
        "v": torch.float32,
        "visits": torch.int64,
        "prior": torch.float32,
    }


def test_two_runs_give_the_same_bits(backend: str, device: torch.device) -> None:
    torch.use_deterministic_algorithms(True)
    data = random_batch(40, 8, 6, n_lone=2).on(device, torch.float32)
    runs = []
    for _ in range(2):
        module = SOPRCLoss(8).to(device)
        runs.append([*value_and_grad(module, *data), *value_and_grad(module, *data), module.v.clone()])
    for first, second in zip(*runs, strict=True):
        assert_same(first, second)


def test_binary_memory_is_linear(device: torch.device) -> None:
    """One list of 200 positives and 100000 negatives: no tensor grows with the product, which is 80 MB."""
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, (tuple, list)) else (result,):
                if isinstance(tensor, Tensor):
                    largest = max(largest, tensor.numel() * tensor.element_size())
            return result

    scores = torch.randn(100_200, device=device, requires_grad=True)
    targets = torch.arange(100_200, device=device) < 200
    with Watch():
        SOPRCLoss().to(device)(scores, targets).backward()
    # Some positives at a time against all scores, which eager bounds by 16 MiB.
    assert 0 < largest <= 16 << 20
