"""`soft_rank` of large classes: the grid, the sorted rows, the choice between them and the loop, and memory."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from checks import assert_close, assert_same, peaks_are_known, python, record_syncs, value_and_grad
from inputs import EQ, random_batch
from test_soft_rank import PROBLEMS, STEPS, Problem, by_class, dense, evaluate, forms, rounding, streamed
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tritonloss import use_backend
from tritonloss.backends import backend_module, large_classes
from tritonloss.backends.large_classes import OnGrid, Sorted, Stencil, interpolation_error
from tritonloss.layout import Positives
from tritonloss.losses import PNPLoss, SmoothAPLoss, SOPRCLoss
from tritonloss.ops import (
    PairGradients,
    Pairs,
    Ranking,
    rank_total,
    rank_values,
    soft_rank,
    soft_rank_scores,
    streaming,
)

surrogates = pytest.mark.parametrize("surrogate", STEPS)


def choose_always(monkeypatch: pytest.MonkeyPatch, pays: bool) -> None:
    for name in ("grid_pays", "sorting_pays"):
        monkeypatch.setattr(large_classes, name, lambda n_keys, width, *_: pays and width > 0)


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block takes the algorithm for large classes, small as it is."""
    choose_always(monkeypatch, True)


# --- values and gradients in float64 ---


def tolerance(problem: Problem, surrogate: str, temperature: float) -> float:
    """What rounding does, and the grid: it errs in each of at most M N terms of a gradient, with weights of about 1."""
    n_terms = max(1, int(problem.count.sum())) * len(problem.keys)
    grid = interpolation_error(large_classes.STENCILS[torch.float64]) if surrogate == "sigmoid" else 0
    return rounding(problem, temperature) + 4 * n_terms * grid / temperature


@forms
@pytest.mark.parametrize("make", PROBLEMS.values(), ids=PROBLEMS.keys())
def test_equals_brute_force(
    make: Callable[..., Problem],
    surrogate: str,
    among: bool,
    forced: None,
    backend: str,
    device: torch.device,
) -> None:
    problem = make(device)
    for actual, expected in zip(
        evaluate(problem, streamed(surrogate, positive_ranks=among, score_limit=1)),
        evaluate(problem, dense(surrogate, positive_ranks=among)),
        strict=True,
    ):
        assert actual.dtype == torch.float64
        assert_close(actual, expected, atol=tolerance(problem, surrogate, 0.1))


@surrogates
def test_bounded_classes(surrogate: str, forced: None, backend: str, device: torch.device) -> None:
    """Padding stays zero, in blocks of one row, of which some have no pair."""
    problem = by_class([3, 1, 4, 2, 1, 5], 4, device)
    options = {"score_limit": 1, "positive_ranks": True, "memory_budget": 1}
    n_pairs = int(problem.count.sum())
    bounded = streamed(surrogate, max_class_size=6, **options)(problem)
    for actual, expected in zip(bounded, streamed(surrogate, **options)(problem), strict=True):
        assert_close(actual[:n_pairs], expected, atol=tolerance(problem, surrogate, 0.1))
        assert not actual[n_pairs:].any()


LOSSES: list[Callable[[], Any]] = [PNPLoss, SmoothAPLoss, lambda: SOPRCLoss(20, memory_size=8)]
SIZES = [[18, 18], [24, 4, 4, 2, 1, 1], [16]]


@pytest.mark.parametrize(
    ("backend", "make", "sizes"),
    [
        *(("eager", make, sizes) for make in LOSSES for sizes in SIZES),
        *(("triton", make, sizes) for make, sizes in zip(LOSSES, SIZES, strict=True)),
    ],
    indirect=["backend"],
)
def test_losses_equal_the_reference(
    make: Callable[[], Any], sizes: list[int], forced: None, backend: str, device: torch.device
) -> None:
    labels = torch.repeat_interleave(torch.tensor(sizes))[torch.randperm(sum(sizes))].to(device)
    rows = torch.randn(len(labels), 8, dtype=torch.float64, device=device)
    actual = value_and_grad(make(), rows, labels)
    with use_backend("reference"):
        expected = value_and_grad(make(), rows, labels)
    # The grid is off by 2e-11 of sums of up to 36 terms, and a gradient divides by the temperature of 0.01.
    for a, e in zip(actual, expected, strict=True):
        assert_close(a, e, rtol=1e-8, atol=1e-8)


def test_one_class_of_300_among_many_of_4(
    surrogate_of_blocks: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blocks choose by themselves; against the direct loop, which has tests of its own."""
    problem = by_class([4] * 20 + [300] + [4] * 20, 8, torch.device("cpu")).leaves()
    weights = torch.randn(2, int(problem.count.sum()), dtype=torch.float64)
    results = []

    def gradients(surrogate: str) -> tuple[Tensor, ...]:
        ranks, scores, _ = soft_rank(*problem, surrogate=surrogate, temperature=0.1, memory_budget=1 << 19)
        total = (weights[0] * ranks + weights[1] * scores).sum()
        return ranks.detach(), *torch.autograd.grad(total, (problem.queries, problem.keys))

    for surrogate in STEPS:
        for pays in (None, False):
            with monkeypatch.context() as patch:
                if pays is not None:
                    choose_always(patch, pays)
                results.append(gradients(surrogate))
        assert set(surrogate_of_blocks) == {"OnGrid" if surrogate == "sigmoid" else "Sorted", "None"}
        surrogate_of_blocks.clear()
        # Random weights of size 1, 460 keys; the grid is off by 2e-11 of each of up to 300 terms, over 0.1.
        for a, e in zip(*results[-2:], strict=True):
            assert_close(a, e, rtol=1e-9, atol=1e-7)


@pytest.fixture
def surrogate_of_blocks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the algorithms that were chosen, a block a name."""
    chosen: list[str] = []

    def spy(*arguments: Any) -> Any:
        algorithm = choose(*arguments)
        chosen.append(type(algorithm).__name__.removesuffix("Type"))
        return algorithm

    choose = large_classes.choose
    monkeypatch.setattr(large_classes, "choose", spy)
    return chosen


# --- float32: the error of the grid ---

# Scores in units of the temperature: of random rows, half trained, trained (all negatives far below), and collapsed.
SPREADS = {
    "random": (6.0, 0.0),
    "half trained": (20.0, 30.0),
    "trained": (4.0, 60.0),
    "collapsed": (0.01, 0.0),
}


def block(spread: str, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Positives, int]:
    """Rows of several classes, one without a pair, one with all keys but one."""
    scale, shift = SPREADS[spread]
    n = 300
    start = torch.tensor([0, 0, 100, n - 1, 3, 1], device=device)
    count = torch.tensor([90, 90, 60, 1, 0, n - 1], device=device)
    scores = scale * torch.randn(len(start), n, dtype=torch.float64)
    for row, (first, width) in enumerate(zip(start.tolist(), count.tolist(), strict=True)):
        scores[row, first : first + width] += shift
    scores = scores.to(device, dtype)
    return scores, Positives(start, count, n, n - 1), int(count.sum())


def run(
    algorithm: Any, scores: Tensor, positives: Positives, n_pairs: int, surrogate: str
) -> tuple[dict[str, Tensor], Tensor]:
    """The outputs of a block [M], and the gradient of its scores for fixed random weights."""
    names = ("ranks", "slopes", "positives", "positive_ranks", "positive_slopes")
    out = {name: scores.new_full(positives.shape, torch.nan) for name in names}
    is_pair = (
        torch.ones(positives.shape, dtype=torch.bool) if positives.is_pair is None else positives.is_pair
    )
    weights = scores.new_full((3, *positives.shape), torch.nan)  # what is no pair may hold anything
    weights[:, is_pair] = torch.randn(3, n_pairs, generator=torch.Generator().manual_seed(0)).to(scores)
    grad = torch.empty_like(scores)
    scores = scores.clone()  # the loop of eager overwrites it
    kept = algorithm.soft_rank_forward(scores, positives, surrogate, *out.values())
    algorithm.soft_rank_backward(
        scores, positives, surrogate, out["slopes"], out["positives"], weights[0], weights[1], grad,
        out["positive_slopes"], weights[2], **({} if kept is None else {"kept": kept}),
    )  # fmt: skip
    return {name: rectangle[is_pair] for name, rectangle in out.items()}, grad


def exact_sums(scores: Tensor, positives: Positives, surrogate: str) -> dict[str, Tensor]:
    """The sums [M] in float64, without the cancellation of g - g^2 in the upper tail of the sigmoid's slope."""
    sums: dict[str, list[Tensor]] = {
        name: [] for name in ("ranks", "slopes", "positive_ranks", "positive_slopes")
    }
    for row, start, count in zip(
        scores.double(), positives.start.tolist(), positives.count.tolist(), strict=True
    ):
        own = row[start : start + count]
        for prefix, others in (("", torch.cat([row[:start], row[start + count :]])), ("positive_", own)):
            x = others - own[:, None]
            value = torch.sigmoid(x) if surrogate == "sigmoid" else STEPS[surrogate](-x)
            slope = value * torch.sigmoid(-x) if surrogate == "sigmoid" else 2 * (1 + x).clamp(0, 1)
            if prefix:
                value, slope = (t - t.diag().diag() for t in (value, slope))
            sums[f"{prefix}ranks"].append(value.sum(1))
            sums[f"{prefix}slopes"].append(slope.sum(1))
    return {name: torch.cat(rows) for name, rows in sums.items()}


def algorithm_for(surrogate: str, backend: str, scores: Tensor, width: int) -> OnGrid | Sorted:
    module = backend_module(backend, scores.device)
    if surrogate == "one_side_huber":
        return Sorted(module, width)
    limit = float(scores[scores.isfinite()].abs().max())
    grid = module.score_grid(scores, limit)
    if grid is None:
        pytest.skip("the eager backend has no grid on this device")
    return OnGrid(module, grid, width)


# A float32 sum on the grid: what interpolation leaves, and 64 roundings of its steps, of which the GEMM has most.
FLOAT32_ERROR = interpolation_error(large_classes.STENCILS[torch.float32]) + 64 * 2.0**-24


def test_the_bound_meets_the_requirement() -> None:
    assert FLOAT32_ERROR < 2e-5
    assert interpolation_error(large_classes.STENCILS[torch.float64]) < 2e-11


@pytest.mark.parametrize("spread", SPREADS)
@surrogates
def test_float32_errors_are_relative(surrogate: str, spread: str, backend: str, device: torch.device) -> None:
    """R and its slope relative to themselves, however small; among the positives, with the own term.

    The sorted sums are exact: there only the result is rounded, and what the direct loop itself loses.
    """
    scores, positives, n_pairs = block(spread, torch.float32, device)
    direct = backend_module("eager", device)
    in_float64, exact_grad = run(direct, scores.double(), positives, n_pairs, surrogate)
    exact = exact_sums(scores, positives, surrogate)
    actual, grad = run(
        algorithm_for(surrogate, backend, scores, positives.width), scores, positives, n_pairs, surrogate
    )
    assert_same(actual["positives"].double(), in_float64["positives"])
    own = {"positive_ranks": 0.5, "positive_slopes": 0.25} if surrogate == "sigmoid" else {}
    bound = FLOAT32_ERROR if surrogate == "sigmoid" else 1e-6
    normal = torch.finfo(torch.float32).tiny / bound
    for name in ("ranks", "slopes", "positive_ranks", "positive_slopes"):
        error = (actual[name].double() - exact[name]).abs()
        assert (error <= bound * (exact[name] + own.get(name, normal))).all(), name
    # A gradient sums up to 300 g', at most 2 each, with weights of up to 4; that of a positive takes slopes off.
    assert_close(grad, exact_grad, atol=bound * float(exact["slopes"].max()) * 4 + 4e-6 * 300)


def test_the_bound_of_the_error_holds_and_is_not_vacuous(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stencil of float32 in float64, where nothing is rounded: one negative, both anywhere in their cells."""
    stencil = large_classes.STENCILS[torch.float32]
    monkeypatch.setitem(large_classes.STENCILS, torch.float64, stencil)
    generator = torch.Generator().manual_seed(0)
    positive = torch.rand(4000, generator=generator, dtype=torch.float64) / 4
    difference = 60 * torch.rand(4000, generator=generator, dtype=torch.float64) - 30
    scores = torch.stack([positive, positive + difference], 1)
    n = torch.arange(4000)
    positives = Positives(torch.zeros_like(n), torch.ones_like(n), 2, 1)
    module = backend_module("eager", torch.device("cpu"))
    grid = module.score_grid(scores, math.inf)
    out, _ = run(OnGrid(module, grid, 1), scores, positives, 4000, "sigmoid")
    value, slope = torch.sigmoid(difference), torch.sigmoid(difference) * torch.sigmoid(-difference)
    bound = interpolation_error(stencil)
    for name, exact in (("ranks", value), ("slopes", slope)):
        error = ((out[name] - exact) / exact).abs().max()
        assert bound / 100 < error <= bound, name


def test_interpolation_error_of_a_coarser_grid() -> None:
    """Four points: half the spacing divides it by 2^4, and by what e^(p h / 2) gives."""
    coarse, fine = (interpolation_error(Stencil(4, per_unit)) for per_unit in (8, 16))
    assert coarse / fine == pytest.approx(16 * math.exp(4 / 32), rel=1e-3)
    assert coarse == pytest.approx(
        2 * 9 / 16 / 24 / 8**4 * math.exp(0.25), rel=2e-3
    )  # |g''''| <= g: the tail


@surrogates
def test_ties(surrogate: str, forced: None, backend: str, device: torch.device) -> None:
    """Every score equal: half a count each, or a whole one."""
    rows, labels = EQ.on(device)
    layout = torch.tensor([0, 0, 2, 2], device=device)
    ranks = soft_rank(
        rows,
        rows,
        layout,
        torch.full_like(labels, 2),
        surrogate=surrogate,
        positive_ranks=True,
        score_limit=1,
    )
    value = 0.5 if surrogate == "sigmoid" else 1.0
    assert_close(ranks.ranks, torch.full((8,), 2 * value), rtol=1e-10)
    assert_close(ranks.positive_ranks, torch.full((8,), value), rtol=1e-10)


@pytest.mark.parametrize(
    ("difference", "value", "slope"),
    [(-2.0, 0.0, 0.0), (-1.0, 0.0, 0.0), (-0.75, 0.0625, 0.5), (0.0, 1.0, 2.0), (0.5, 2.0, 2.0)],
)
def test_huber_at_its_kinks(
    difference: float, value: float, slope: float, forced: None, backend: str, device: torch.device
) -> None:
    keys = torch.tensor([[0.0], [difference]], dtype=torch.float64, device=device, requires_grad=True)
    first, one = torch.tensor([0], device=device), torch.tensor([1], device=device)
    ranks = soft_rank(keys.new_ones(1, 1), keys, first, one, surrogate="one_side_huber", temperature=1).ranks
    ranks.backward(torch.ones_like(ranks))
    assert keys.grad is not None
    assert_close(ranks.item(), value, atol=1e-15)
    assert_close(keys.grad.flatten().tolist(), [-slope, slope], atol=1e-15)


# --- numbers that are none ---


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("make", LOSSES)
def test_losses_of_bad_rows_are_nan(
    make: Callable[[], Any], bad: float, forced: None, backend: str, device: torch.device
) -> None:
    rows, labels = random_batch(22, 5, 5).on(device, torch.float32)
    rows = rows.detach().clone()
    rows[3, 1] = bad
    value, _ = value_and_grad(make(), rows, labels)
    assert value.isnan()


@surrogates
def test_nan_negative_reaches_its_row(surrogate: str, backend: str, device: torch.device) -> None:
    scores, positives, n_pairs = block("random", torch.float32, device)
    scores[2, 10] = torch.nan  # a negative
    scores[0, 7] = torch.nan  # a positive
    algorithm = algorithm_for(surrogate, backend, scores, positives.width)
    out, grad = run(algorithm, scores, positives, n_pairs, surrogate)
    expected = torch.zeros(n_pairs, dtype=torch.bool, device=device)
    expected[[7]] = True
    expected[180:240] = True
    assert_same(out["ranks"].isnan(), expected)
    assert grad[[0, 2]].isnan().any(1).all()
    assert grad[[1, 3, 5]].isfinite().all()


@surrogates
def test_columns_that_are_left_out(
    surrogate: str, backend: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative infinity in a block stands for a column that is no negative. On Triton the sigmoid has no limit here."""
    kind = torch.randint(0, 3, (5, 40), device=device)
    scores = torch.randn(5, 40, dtype=torch.float64, device=device)
    results = []
    for pays in (True, False):
        choose_always(monkeypatch, pays)
        leaf = scores.clone().requires_grad_()
        ranks = soft_rank_scores(leaf, kind == 0, kind == 1, surrogate=surrogate, temperature=0.3).ranks
        ranks.square().sum().backward()
        results.append((ranks.detach(), leaf.grad))
    for a, e in zip(*results, strict=True):
        assert_close(a, e, rtol=1e-9, atol=1e-9)


def test_scores_beyond_the_limit_are_nan(forced: None, device: torch.device) -> None:
    rows = torch.randn(12, 4, dtype=torch.float64, device=device) * 10
    start, count = torch.arange(12, device=device) // 6 * 6, torch.full((12,), 6, device=device)
    with use_backend("triton"):
        ranks = soft_rank(rows, rows, start, count, temperature=1.0, score_limit=1).ranks
    assert ranks.isnan().all()


# --- the choice ---


@pytest.mark.parametrize(
    ("n_keys", "width", "nodes", "kind", "grid", "sort"),
    [
        (8192, 4, 600, "cpu", False, False),
        (8192, 16, 600, "cpu", False, False),
        (8192, 32, 600, "cpu", True, False),
        (2048, 32, 600, "cpu", False, False),
        (2048, 64, 600, "cpu", True, False),
        (512, 64, 600, "cpu", False, False),
        (512, 256, 600, "cpu", True, True),
        (2048, 256, 600, "cpu", True, True),
        (8192, 4096, 600, "cpu", True, True),
        (8192, 4096, 4096, "cpu", True, True),
        (8192, 4096, 4097, "cpu", False, True),  # the matrix of the nodes would be too large
        (25, 20, 100, "cpu", False, False),
        (8192, 64, 816, "cuda", False, False),
        (8192, 512, 816, "cuda", True, False),
        (8192, 4096, 816, "cuda", True, True),
        (1024, 512, 816, "cuda", True, False),
    ],
)
def test_cost_model(n_keys: int, width: int, nodes: int, kind: str, grid: bool, sort: bool) -> None:
    assert large_classes.grid_pays(n_keys, width, nodes, kind) == grid
    assert large_classes.sorting_pays(n_keys, width, kind) == sort


def test_the_choice_without_force(surrogate_of_blocks: list[str]) -> None:
    rows = torch.nn.functional.normalize(torch.randn(1024, 8))
    for n_classes, expected in ((256, "None"), (2, "OnGrid")):
        labels = torch.arange(1024) * n_classes // 1024
        PNPLoss()(rows, labels)
        assert set(surrogate_of_blocks) == {expected}
        surrogate_of_blocks.clear()


def test_no_grid_without_a_limit_where_scores_are_not_looked_at(
    forced: None, surrogate_of_blocks: list[str], device: torch.device
) -> None:
    problem = by_class([5, 5], 4, device)
    with use_backend("triton"):
        streamed("sigmoid")(problem)
        assert set(surrogate_of_blocks) == {"None"}
        streamed("sigmoid", score_limit=1)(problem)
    assert surrogate_of_blocks[-1] == "OnGrid"


@surrogates
def test_two_runs_give_the_same_bits(
    surrogate: str, forced: None, backend: str, device: torch.device
) -> None:
    problem = by_class([12, 1, 9], 4, device)
    low = problem.with_rows(problem.queries.float(), problem.keys.float())
    forward = streamed(surrogate, 0.01, positive_ranks=True, score_limit=1)
    first = evaluate(low, forward)
    torch.use_deterministic_algorithms(True)
    assert_same(evaluate(low, forward), first)


@pytest.mark.parametrize("bound", [None, 8])
@pytest.mark.parametrize(
    ("budget", "syncs_per_walk"), [(None, 1), (1, 1), (4096, 2)], ids=["whole", "rows", "lower panels"]
)
@pytest.mark.parametrize(
    ("deferred", "surrogate"), [(False, "sigmoid"), (True, "one_side_huber")], ids=["total", "values"]
)
def test_host_syncs(
    deferred: bool,
    surrogate: str,
    budget: int | None,
    syncs_per_walk: int,
    bound: int | None,
    forced: None,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One of a walk to learn the sizes, none with a bound; panels of queries add none.

    But a second one where the pairs of a panel would not fit: 16 rows of 16 scores do, their 8 pairs each do not.
    """
    rows = torch.nn.functional.normalize(torch.randn(16, 4, device=device)).requires_grad_()
    start, count = torch.arange(16, device=device) // 8 * 8, torch.full((16,), 8, device=device)
    ranking = Ranking(surrogate, score_limit=1, max_class_size=bound, memory_budget=budget)

    def step() -> None:
        if deferred:
            rank_values(rows, start, count, sum_of_ranks, ranking).sum().backward()
        else:
            rank_total(rows, start, count, rows.new_ones(()), sum_of_ranks, ranking).backward()

    with use_backend("triton"):
        step()
        syncs = record_syncs(monkeypatch)
        step()
    assert len(syncs) == ((1 + deferred) * syncs_per_walk if bound is None else 0)


def sum_of_ranks(pairs: Pairs) -> Any:
    return pairs.ranks, lambda: PairGradients(ranks=1)


# --- ranks that are not held whole ---


@pytest.mark.parametrize("bounded", [False, True], ids=["read", "bounded"])
@pytest.mark.parametrize("make", [PNPLoss, SmoothAPLoss])
def test_blocks_of_queries_change_nothing(
    make: Callable[..., Any], bounded: bool, backend: str, device: torch.device
) -> None:
    rows, labels = random_batch(40, 5, 3, n_lone=3).on(device)
    expected = value_and_grad(make(), rows, labels)
    options = {"max_class_size": 30} if bounded else {}
    for budget in (1, 40 * 8 * 8 * 8, 1 << 15) if backend == "eager" else (40 * 8 * 8 * 8,):
        actual = value_and_grad(make(memory_budget=budget, **options), rows, labels)
        # Sums in another order; 2^-52 over tau^2 = 1e-4, 40 terms of 5.
        assert_close(actual, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("row_blocks", ["of 4 rows", "of all rows"])
def test_the_pairs_of_a_block_fit_the_budget(
    row_blocks: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if row_blocks == "of 4 rows":
        monkeypatch.setattr(streaming, "rows_per_block", lambda n_rows, *_: min(4, n_rows))
    rows, labels = random_batch(64, 5, 2).on(device)
    order = torch.argsort(labels)
    rows, labels = rows[order].detach().requires_grad_(), labels[order]
    n_first = int((labels == 0).sum())
    start, count = torch.where(labels == 0, 0, n_first), torch.where(labels == 0, n_first, 64 - n_first)
    held: list[int] = []

    def function(pairs: Pairs) -> Any:
        held.append(pairs.ranks.numel())
        return sum_of_ranks(pairs)

    numbers = streaming.NUMBERS_PER_PAIR
    budget = 20 * 40 * 8 * numbers  # of about twenty queries, in float64
    ranking = Ranking(memory_budget=budget)
    rank_values(rows, start, count, function, ranking).sum().backward()
    assert len(held) >= 2 * 3  # forward and backward
    assert 2 * int(count.sum()) <= sum(held) <= 2 * 64 * int(count.max())
    assert max(held) * 8 * numbers <= budget


def test_blocks_of_queries_and_autograd(device: torch.device) -> None:
    """Checkpointing, no gradient, a backend that was chosen for the forward pass only, a second derivative."""
    rows, labels = random_batch(40, 5, 3).on(device, torch.float32)
    criterion = PNPLoss(memory_budget=1)
    value, grad = value_and_grad(criterion, rows, labels)
    for reentrant in (False, True):
        again = functools.partial(checkpoint, criterion, use_reentrant=reentrant)
        assert_same(value_and_grad(again, rows, labels), (value, grad))
    with torch.no_grad():
        assert_same(criterion(rows, labels), value)
    leaf = rows.detach().requires_grad_()
    with use_backend("eager"):
        loss = criterion(leaf, labels)
    use_backend("triton")
    loss.backward()
    use_backend("eager")
    assert_same(leaf.grad, value_and_grad(criterion, rows, labels)[1])
    (first,) = torch.autograd.grad(criterion(leaf, labels), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="reference"):
        first.sum().backward()


# Two classes: 8.4 million pairs, 32 MiB for one number of each.
PEAK = """
import sys
import torch
from bench.memory import peak_above
from tritonloss import losses

torch.set_num_threads(1)
criterion = getattr(losses, sys.argv[1])(memory_budget=8 << 20)
rows, labels = torch.randn(4096, 8, requires_grad=True), torch.arange(4096) * 2 // 4096
print(peak_above(lambda: criterion(rows, labels).backward(), "cpu"))
"""


@peaks_are_known
@pytest.mark.parametrize("name", ["PNPLoss", "SmoothAPLoss"])
def test_peak_memory(name: str) -> None:
    """8 MiB for pairs, as much for scores, and the temporaries of a block; one number for every pair is 32 MiB."""
    assert 1 << 20 < int(python(PEAK, name)) < 64 << 20


# --- the two kernels ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("n", [1, 511, 513])  # around a tile
def test_kernels_spread_and_read(n: int, dtype: torch.dtype, device: torch.device) -> None:
    """Moments and polynomials of each cell, from their definitions; weights of very different sizes."""
    module = backend_module("triton", device)
    limit = 3.0
    grid = module.score_grid(torch.empty(0, dtype=dtype, device=device), limit)
    points, per_unit = grid.stencil.points, grid.stencil.per_unit
    values = (limit * (2 * torch.rand(3, n, dtype=torch.float64) - 1)).to(device, dtype)
    weights = torch.randn(3, n, device=device, dtype=dtype) * torch.tensor([[1.0], [1e-20], [1e20]]).to(
        values
    )
    place = values.double() * per_unit - grid.first
    cell = place.floor()
    power = (place - cell - 0.5)[:, None] ** torch.arange(points, device=device)[:, None]  # [rows, points, n]
    is_in = cell[:, :, None] == torch.arange(grid.cells, device=device)
    moments = (weights.double()[:, None] * power) @ is_in.double()
    size = weights.double().abs().sum(1)[:, None, None]
    actual = module.grid_spread(values, weights, grid)
    # A power is rounded up to `points` times, and so is the result.
    tolerance = 2 * points * torch.finfo(dtype).eps
    assert_close(actual.transpose(0, 1) / size, moments / size, atol=tolerance)
    coefficients = torch.randn(points, 3, grid.cells, device=device, dtype=dtype)
    read = module.grid_read(coefficients, values, grid)
    own = torch.einsum("prc,rnc->rpn", coefficients.double(), is_in.double())
    assert_close(read, (own * power).sum(1), atol=tolerance * float(coefficients.abs().max()))


def test_kernel_does_not_lose_a_weight_that_is_no_number(device: torch.device) -> None:
    module = backend_module("triton", device)
    values = torch.zeros(3, 2, device=device)
    weights = torch.tensor([[1.0, 2.0], [1.0, torch.nan], [torch.inf, 1.0]], device=device)
    grid = module.score_grid(values, 1.0)
    moments = module.grid_spread(values, weights, grid)
    assert moments[0, :, -grid.first].tolist()[0] == 3
    assert moments.isnan().all((0, 2)).tolist() == [False, True, True]
