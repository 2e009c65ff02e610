"""The operator `proxy_logsumexp`: sums and gradients against float64, blocks, precision, and its registration."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from checks import assert_as_exact_as, assert_close, assert_same
from pytorch_metric_learning import distances as pml_distances
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tritonloss import reference, use_backend
from tritonloss.distances import BaseDistance, DotProductSimilarity, LpDistance
from tritonloss.ops import ProxyLogSumExp, Repulsion, class_labels, proxy_logsumexp, proxy_total, streaming

# alpha (|s| + margin) < 200 here: exponents err by 200 * 1e-16, their exponentials relatively by as much; margin of 50.
FLOAT64 = {"rtol": 1e-12, "atol": 1e-12}
N, C, D = 24, 11, 5


class Problem(NamedTuple):
    embeddings: Tensor
    proxies: Tensor
    labels: Tensor

    def to(self, dtype: torch.dtype) -> Problem:
        """Leaves in `dtype`."""
        return Problem(*(t.detach().to(dtype).requires_grad_() for t in self[:2]), self.labels)


def problem(device: torch.device, n: int = N, c: int = C, d: int = D, seed: int = 0) -> Problem:
    """Exactly representable in bfloat16, so that every dtype computes from the same numbers. Class 0 is absent."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(n + c, d, generator=generator).bfloat16().double().to(device)
    labels = torch.randint(1, max(c, 2), (n,), generator=generator).to(device)
    return Problem(rows[:n].clone().requires_grad_(), rows[n:].clone().requires_grad_(), labels)


def weights_of(p: Problem) -> Tensor:
    """A constant for each row, some of them 0."""
    return torch.arange(len(p.labels), dtype=torch.float64, device=p.labels.device).remainder(4) / 3


def upstream(p: Problem) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(2, len(p.proxies), dtype=torch.float64, generator=generator).to(p.proxies.device)


Sums = Callable[..., Any]


def evaluate(p: Problem, sums: Sums, **options: Any) -> tuple[Tensor, ...]:
    """positive, negative, and the gradients of embeddings and proxies."""
    values = sums(*p, **options)
    grads = torch.autograd.grad(list(values), p[:2], [u.to(values[0].dtype) for u in upstream(p)])
    return (*(v.detach() for v in values), *grads)


def dense(
    embeddings: Tensor, proxies: Tensor, labels: Tensor, *, normalize_proxies: bool = False, **options: Any
) -> tuple[Tensor, Tensor]:
    options = {"distance": DotProductSimilarity(), "alpha": 32.0, "margin": 0.1, **options}
    proxies = proxies.to(embeddings.dtype)
    return reference.proxy_anchor(
        embeddings, F.normalize(proxies) if normalize_proxies else proxies, labels, **options
    )


# --- the definition ---


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("alpha", "margin"), [(32.0, 0.1), (1.0, -0.5), (0.0, 0.1), (-3.0, 0.2)])
def test_float64(
    alpha: float, margin: float, weighted: bool, normalize: bool, backend: str, device: torch.device
) -> None:
    p = problem(device)
    options = {
        "alpha": alpha,
        "margin": margin,
        "weights": weights_of(p) if weighted else None,
        "normalize_proxies": normalize,
    }
    for actual, expected in zip(
        evaluate(p, proxy_logsumexp, **options), evaluate(p, dense, **options), strict=True
    ):
        assert_close(actual, expected, **FLOAT64)


@pytest.mark.parametrize(("n", "c", "d"), [(1, 1, 1), (1, 5, 3), (40, 2, 3), (3, 30, 2), (33, 17, 1)])
def test_shapes(n: int, c: int, d: int, backend: str, device: torch.device) -> None:
    p = problem(device, n, c, d)
    p.labels.clamp_(max=c - 1)
    for actual, expected in zip(evaluate(p, proxy_logsumexp), evaluate(p, dense), strict=True):
        assert_close(actual, expected, **FLOAT64)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("alpha", [1.0, 32.0])
def test_float32(alpha: float, normalize: bool, backend: str, device: torch.device) -> None:
    """At most twice the error of the dense formula in float32."""
    p = problem(device, 200, 30, 16)
    options = {"alpha": alpha, "normalize_proxies": normalize}
    exact = evaluate(p, dense, **options)
    rival = evaluate(p.to(torch.float32), dense, **options)
    actual = evaluate(p.to(torch.float32), proxy_logsumexp, **options)
    for ours, theirs, truth in zip(actual, rival, exact, strict=True):
        assert ours.dtype == torch.float32
        assert_as_exact_as(ours, theirs, truth)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_huge_exponents(dtype: torch.dtype, backend: str, device: torch.device) -> None:
    """Dot products of a hundred times alpha = 1000 overflow e^x by far; the sum is its largest exponent."""
    p = problem(device)
    p = Problem(p.embeddings.detach() * 4, p.proxies.detach() * 4, p.labels).to(dtype)
    exact = evaluate(p.to(torch.float64), dense, alpha=1000.0)
    actual = evaluate(p, proxy_logsumexp, alpha=1000.0)
    # Exponents of up to 1e5 err by 1e5 eps in the gradient, which is alpha = 1000 times vectors of order 10.
    size = 1e5 * torch.finfo(dtype).eps
    for ours, truth in zip(actual[:2], exact[:2], strict=True):
        assert_close(ours, truth, rtol=8 * torch.finfo(dtype).eps, atol=8 * torch.finfo(dtype).eps)
    for ours, truth in zip(actual[2:], exact[2:], strict=True):
        assert ours.isfinite().all()
        assert (ours - truth).norm() <= 8 * size * 1000 * 10


@pytest.mark.parametrize("options", [{}, {"normalize_proxies": True}, {"distance": LpDistance()}])
def test_gradcheck(options: dict[str, Any], backend: str, device: torch.device) -> None:
    p = problem(device, 4, 3, 2)
    assert torch.autograd.gradcheck(
        lambda x, w: proxy_logsumexp(x, w, p.labels, alpha=2.0, weights=weights_of(p), **options),
        p[:2],
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_proxies(dtype: torch.dtype, backend: str, device: torch.device) -> None:
    """Computed in the dtype of the embeddings, one rounding of the gradient at the end."""
    p = problem(device)
    low = Problem(p.embeddings.detach().float().requires_grad_(), *p.to(dtype)[1:])
    actual = evaluate(low, proxy_logsumexp, alpha=4.0, normalize_proxies=True)
    full = evaluate(p.to(torch.float32), proxy_logsumexp, alpha=4.0, normalize_proxies=True)
    assert_same(actual[:3], full[:3])
    assert actual[3].dtype == dtype
    assert_same(actual[3], full[3].to(dtype))


def test_gradient_of_low_precision_proxies_over_a_large_batch(device: torch.device) -> None:
    """Sums over 8192 rows in float32, whatever the dtype of the proxies: ml-cross-entropy#14."""
    use_backend("eager")  # the sums are the operator's, on every backend
    p = problem(device, 8192, 32, 128)
    exact = evaluate(p, dense, alpha=0.5)[3]
    low = Problem(p.embeddings.detach().float().requires_grad_(), *p.to(torch.bfloat16)[1:])
    grad = evaluate(low, proxy_logsumexp, alpha=0.5)[3]
    assert grad.dtype == torch.bfloat16
    # One rounding of each entry to bfloat16, half a unit of 2^-8 at most.
    assert (grad.double() - exact).norm() <= 2**-9 * exact.norm()


def test_normalised_like_torch(backend: str, device: torch.device) -> None:
    """Rows of zeros and rows below the least norm, in value and gradient."""
    p = problem(device)
    with torch.no_grad():
        p.proxies[0] = 0
        p.proxies[1] *= 1e-13
        p.proxies[2] *= 1e-8
    options = {"normalize_proxies": True, "alpha": 3.0}
    *sums, grad_embeddings, grad_proxies = evaluate(p, proxy_logsumexp, **options)
    *dense_sums, dense_grad_embeddings, dense_grad_proxies = evaluate(p, dense, **options)
    assert_close((*sums, grad_embeddings), (*dense_sums, dense_grad_embeddings), **FLOAT64)
    # Divided by a norm that is tiny: relative to the row.
    assert_close(
        grad_proxies / dense_grad_proxies.norm(dim=1, keepdim=True),
        F.normalize(dense_grad_proxies),
        atol=1e-12,
    )


@pytest.mark.parametrize("n", [0, 3])
def test_nothing_to_sum(n: int, backend: str, device: torch.device) -> None:
    p = problem(device, n)
    *sums, grad_embeddings, grad_proxies = evaluate(
        p, proxy_logsumexp, weights=torch.zeros(n, dtype=torch.float64, device=device)
    )
    assert not any(t.any() for t in (*sums, grad_embeddings, grad_proxies))
    assert [len(t) for t in (*sums, grad_embeddings, grad_proxies)] == [C, C, n, C]


def test_weight_of_zero_is_absence(backend: str, device: torch.device) -> None:
    p = problem(device)
    weights = torch.ones(N, dtype=torch.float64, device=device)
    weights[::3] = 0
    kept = weights > 0
    fewer = Problem(p.embeddings.detach()[kept].requires_grad_(), p.proxies, p.labels[kept])
    actual, expected = evaluate(p, proxy_logsumexp, weights=weights), evaluate(fewer, proxy_logsumexp)
    assert not actual[2][~kept].any()
    assert_close((*actual[:2], actual[2][kept], actual[3]), expected, **FLOAT64)


@pytest.mark.parametrize("distance", [None, LpDistance()], ids=["dot", "lp"])
def test_weights_are_constants(distance: Any, backend: str, device: torch.device) -> None:
    p = problem(device)
    weights = torch.ones(N, dtype=torch.float64, device=device, requires_grad=True)
    frozen = Problem(*(t.detach() for t in p))
    assert not proxy_logsumexp(*frozen, weights=weights, distance=distance).negative.requires_grad


def test_twice_the_weight_is_twice_the_row(backend: str, device: torch.device) -> None:
    p = problem(device)
    twice = [torch.cat([t.detach(), t.detach()[:5]]) for t in (p.embeddings, p.labels)]
    weights = torch.ones(N, dtype=torch.float64, device=device)
    weights[:5] = 2
    weighted = proxy_logsumexp(*p, weights=weights)
    assert_close(weighted, proxy_logsumexp(twice[0], p.proxies, twice[1]), **FLOAT64)


@pytest.mark.parametrize("view", ["columns", "transposed", "expanded"])
def test_strides(view: str, backend: str, device: torch.device) -> None:
    def strided(t: Tensor) -> Tensor:
        if view == "columns":
            return torch.full((len(t), 3 * D), torch.nan, dtype=t.dtype, device=device)[:, D : 2 * D].copy_(t)
        return t.t().contiguous().t() if view == "transposed" else t[:1].expand(len(t), D)

    p = problem(device)
    base = [t.detach()[:1].expand_as(t) if view == "expanded" else t.detach() for t in p[:2]]
    plain = Problem(*(t.contiguous().requires_grad_() for t in base), p.labels)
    other = Problem(*(strided(t).detach().requires_grad_() for t in base), p.labels)
    for ours, truth in zip(evaluate(other, proxy_logsumexp), evaluate(plain, proxy_logsumexp), strict=True):
        assert_close(ours, truth, **FLOAT64)
    # Upstream gradients: one element expanded, and every other element.
    values = proxy_logsumexp(*plain)
    ones = torch.ones(C, dtype=torch.float64, device=device)
    grads = [
        torch.autograd.grad(values.negative, plain.proxies, g, retain_graph=True)[0]
        for g in (ones, ones[:1].expand(C), ones.repeat(2)[::2])
    ]
    assert_same(grads[1:], [grads[0]] * 2)


def test_only_one_sum_is_used(backend: str, device: torch.device) -> None:
    p = problem(device)
    for name in ("positive", "negative"):
        ours, truth = getattr(proxy_logsumexp(*p), name), dense(*p)[name == "negative"]
        for actual, expected in zip(
            torch.autograd.grad(ours.sum(), p[:2]), torch.autograd.grad(truth.sum(), p[:2]), strict=True
        ):
            assert_close(actual, expected, **FLOAT64)


def test_inputs_stay_and_runs_repeat(backend: str, device: torch.device) -> None:
    p = problem(device, 40, 13, 8).to(torch.float32)
    before = [t.detach().clone() for t in p]
    torch.use_deterministic_algorithms(True)
    first = evaluate(p, proxy_logsumexp)
    values = proxy_logsumexp(*p)
    grads = [
        torch.autograd.grad(list(values), p[:2], [v.detach() for v in values], retain_graph=True)
        for _ in "ab"
    ]
    assert_same(*grads)
    assert_same(evaluate(p, proxy_logsumexp), first)
    assert_same([t.detach() for t in p], before)


# --- blocks and what is kept ---


@pytest.fixture
def block_rows(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets the rows of a block that the cache would hold."""

    def set_rows(rows: int) -> None:
        monkeypatch.setattr(streaming, "BLOCK_BYTES", 1)
        monkeypatch.setattr(streaming, "MIN_ROWS", 4 * rows)
        monkeypatch.setattr(
            streaming, "plan_panels", lambda n, *_: SimpleNamespace(rows=max(1, min(rows, n)))
        )

    return set_rows


@pytest.fixture
def gemms(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The matrix products of the operator, in order."""
    called: list[str] = []

    def count(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Tensor:
            called.append(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)

    count(torch, "mm")
    count(torch, "addmm")
    count(torch.Tensor, "addmm_")
    return called


@pytest.mark.parametrize("rows", [1, 4, C])
@pytest.mark.parametrize("distance", [None, LpDistance()], ids=["dot", "lp"])
def test_blocks(
    distance: Any, rows: int, block_rows: Callable[[int], None], backend: str, device: torch.device
) -> None:
    p = problem(device)
    options = {"distance": distance, "alpha": 4.0, "weights": weights_of(p)}
    whole = evaluate(p, proxy_logsumexp, **options)
    block_rows(rows)
    for ours, truth in zip(evaluate(p, proxy_logsumexp, **options), whole, strict=True):
        assert_close(ours, truth, **FLOAT64)


@pytest.mark.parametrize("rows", [1, 4, 100])
@pytest.mark.parametrize("normalize", [False, True])
def test_nothing_is_kept_between_the_passes(
    normalize: bool,
    rows: int,
    block_rows: Callable[[int], None],
    gemms: list[str],
    backend: str,
    device: torch.device,
) -> None:
    """A product a block for the sums; for the gradients the scores again, and a product for either side."""
    p = problem(device, 20).to(torch.float32)
    block_rows(rows)
    n_blocks = -(-C // rows)
    sums = proxy_logsumexp(*p, normalize_proxies=normalize)
    assert gemms == ["addmm"] * n_blocks
    gemms.clear()
    torch.autograd.grad(list(sums), p[:2], list(upstream(p).float()))
    assert len(gemms) == 3 * n_blocks
    gemms.clear()
    factors = tuple(upstream(p).float())
    classes = class_labels(p.labels, C)
    repulsion = Repulsion(32.0, 0.1, normalize_proxies=normalize)
    total = proxy_total(p.embeddings, p.proxies, classes, None, repulsion, factors)
    total.backward()
    assert len(gemms) == 3 * n_blocks  # both in one walk


@pytest.mark.parametrize("options", [{}, {"normalize_proxies": True}, {"distance": LpDistance()}])
@pytest.mark.parametrize("rows", [4, 100])
def test_total_equals_the_sums(
    rows: int,
    options: dict[str, Any],
    block_rows: Callable[[int], None],
    backend: str,
    device: torch.device,
) -> None:
    p, factors = problem(device), upstream(problem(device))
    block_rows(rows)
    expected = evaluate(p, proxy_logsumexp, alpha=4.0, weights=weights_of(p), **options)
    repulsion = Repulsion(4.0, 0.1, **options)
    total = proxy_total(
        p.embeddings, p.proxies, class_labels(p.labels, C), weights_of(p), repulsion, tuple(factors)
    )
    assert_close(total, torch.dot(expected[0], factors[0]) + torch.dot(expected[1], factors[1]), **FLOAT64)
    for ours, truth in zip(torch.autograd.grad(3 * total, p[:2]), expected[2:], strict=True):
        assert_close(ours, 3 * truth, **FLOAT64)


class Watch(TorchDispatchMode):
    """The shapes and the bytes of all tensors that operations give."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self.shapes.append(tuple(tensor.shape))
                self.largest = max(self.largest, tensor.numel() * tensor.itemsize)
        return result


@pytest.mark.parametrize("rows_of_budget", [1, 3, 11])
@pytest.mark.parametrize("distance", [None, LpDistance()], ids=["dot", "lp"])
def test_no_block_exceeds_the_budget(
    distance: Any, rows_of_budget: int, backend: str, device: torch.device
) -> None:
    p = problem(device, 512)  # 4 KiB a row of similarities; embeddings take 20 KiB
    block = rows_of_budget * 512 * 8
    with Watch() as watch:
        sums = proxy_logsumexp(*p, memory_budget=block, distance=distance)
        torch.autograd.grad(list(sums), p[:2], list(upstream(p)))
    assert block <= watch.largest <= max(block, 512 * D * 8)


@pytest.mark.parametrize("side", ["embeddings", "proxies"])
@pytest.mark.parametrize("normalize", [False, True])
def test_frozen_side(
    normalize: bool, side: str, gemms: list[str], backend: str, device: torch.device
) -> None:
    """No gradient, no product for it, no memory for it."""
    p = problem(device)
    full = evaluate(p, proxy_logsumexp, normalize_proxies=normalize)
    frozen = p._replace(**{side: getattr(p, side).detach()})
    learned = "proxies" if side == "embeddings" else "embeddings"
    sums = proxy_logsumexp(*frozen, normalize_proxies=normalize)
    gemms.clear()
    (grad,) = torch.autograd.grad(list(sums), [getattr(frozen, learned)], list(upstream(p)))
    assert_same(grad, full[3 if learned == "proxies" else 2])
    assert len(gemms) == 2  # the scores again, and the gradient


@pytest.mark.parametrize("how", ["frozen", "no_grad"])
def test_inference_costs_one_walk(how: str, gemms: list[str], backend: str, device: torch.device) -> None:
    p = problem(device)
    expected = evaluate(p, proxy_logsumexp)[:2]
    gemms.clear()
    arguments = [t.detach() for t in p] if how == "frozen" else p
    with torch.set_grad_enabled(how == "frozen"):
        sums = proxy_logsumexp(*arguments)
    assert gemms == ["addmm"]
    assert not sums.negative.requires_grad
    assert_same(tuple(sums), expected)


# --- any distance ---


class Bilinear(nn.Module):
    """A learnable similarity, written as a user would."""

    is_inverted = True

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.linspace(-1, 1, dim * dim, dtype=torch.float64).view(dim, dim))
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, query: Tensor, ref: Tensor | None = None) -> Tensor:
        return query @ self.matrix @ (query if ref is None else ref).T


class Manhattan(BaseDistance):
    def compute_mat(self, query: Tensor, ref: Tensor) -> Tensor:
        return (query[:, None] - ref).abs().sum(2)


@pytest.mark.parametrize(
    "distance",
    [
        LpDistance(),
        LpDistance(normalize_embeddings=False, power=2),
        LpDistance(p=1),
        DotProductSimilarity(True),
        Manhattan(),
        pml_distances.LpDistance(),
        pml_distances.DotProductSimilarity(),
        pml_distances.SNRDistance(),
    ],
    ids=lambda d: f"{type(d).__module__.split('.')[0]}-{type(d).__name__}",
)
def test_any_distance(distance: Any, backend: str, device: torch.device) -> None:
    p = problem(device)
    options = {"distance": distance, "alpha": 5.0, "weights": weights_of(p)}
    for ours, truth in zip(
        evaluate(p, proxy_logsumexp, **options), evaluate(p, dense, **options), strict=True
    ):
        assert_close(ours, truth, **FLOAT64)


def test_parameters_of_a_distance_learn(
    backend: str, device: torch.device, block_rows: Callable[[int], None]
) -> None:
    block_rows(3)
    p, distance = problem(device), Bilinear(D).to(device)
    grads = []
    for sums in (proxy_logsumexp, dense):
        values = sums(*p, distance=distance, alpha=0.5)
        values = torch.cat(list(values))
        grads.append(torch.autograd.grad(values.square().sum(), [*p[:2], distance.matrix]))
    for ours, truth in zip(*grads, strict=True):
        assert_close(ours, truth, **FLOAT64)


@pytest.mark.parametrize("side", ["embeddings", "proxies"])
def test_frozen_side_of_a_distance(side: str, backend: str, device: torch.device) -> None:
    p = problem(device)
    options = {"distance": LpDistance(), "alpha": 4.0}
    full = evaluate(p, proxy_logsumexp, **options)
    frozen = p._replace(**{side: getattr(p, side).detach()})
    learned = "proxies" if side == "embeddings" else "embeddings"
    sums = proxy_logsumexp(*frozen, **options)
    (grad,) = torch.autograd.grad(list(sums), [getattr(frozen, learned)], list(upstream(p)))
    assert_same(grad, full[3 if learned == "proxies" else 2])


def test_distance_of_a_wrong_shape(backend: str, device: torch.device) -> None:
    class Transposed(Bilinear):
        def forward(self, query: Tensor, ref: Tensor | None = None) -> Tensor:
            return super().forward(query, ref).T

    with pytest.raises(ValueError, match=r"distance must return shape \[24, 11\], got \[11, 24\]"):
        proxy_logsumexp(*problem(device), distance=Transposed(D).to(device))


# --- labels ---


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8])
def test_label_dtypes(dtype: torch.dtype, backend: str, device: torch.device) -> None:
    p = problem(device)
    assert_same(tuple(proxy_logsumexp(*p[:2], p.labels.to(dtype))), tuple(proxy_logsumexp(*p)))


@pytest.mark.parametrize(("label", "position"), [(C, 0), (-1, 5), (2**40, N - 1), (-(2**40), 3)])
@pytest.mark.parametrize("distance", [None, LpDistance()], ids=["dot", "lp"])
def test_label_out_of_range(
    label: int, position: int, distance: Any, backend: str, device: torch.device
) -> None:
    p = problem(device)
    wrong = p.labels.clone()
    wrong[position] = label
    with pytest.raises(ValueError, match=rf"labels must be in 0 \.\. 10, .* got {label}$"):
        proxy_logsumexp(*p[:2], wrong, distance=distance)
    # Unchecked, the row is of no proxy's class: it repels from all of them.
    unchecked = evaluate(
        p._replace(labels=wrong), proxy_logsumexp, distance=distance, check_label_range=False
    )
    expected = evaluate(
        p._replace(labels=torch.where(wrong == label, -1, wrong)),
        dense,
        distance=distance or DotProductSimilarity(),
    )
    for ours, truth in zip(unchecked, expected, strict=True):
        assert_close(ours, truth, **FLOAT64)


def test_check_reads_two_numbers_once(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    for name in ("tolist", "item", "__bool__", "__int__"):
        original = getattr(Tensor, name)

        def counted(self: Tensor, *args: Any, original: Any = original) -> Any:
            reads.append(self.numel())
            return original(self, *args)

        monkeypatch.setattr(Tensor, name, counted)
    labels = torch.arange(4, device=device)
    class_labels(labels, 4)
    assert reads == [2]
    class_labels(labels, 2, check=False)
    assert reads == [2]


# --- autocast, compile, registration ---


@pytest.mark.parametrize(
    "distance", [None, LpDistance(), pml_distances.LpDistance()], ids=["dot", "lp", "pml-lp"]
)
def test_backward_inside_autocast(distance: Any, backend: str, device: torch.device) -> None:
    """The products of the backward pass stay in float32 too."""
    p = problem(device).to(torch.float32)
    options = {"distance": distance, "normalize_proxies": distance is None}
    expected = evaluate(p, proxy_logsumexp, **options)
    with torch.autocast(device.type, torch.bfloat16):
        assert_same(evaluate(p, proxy_logsumexp, **options), expected)


def op_options(p: Problem, normalize: bool, budget: int, backend: str) -> tuple[Any, ...]:
    return (p.labels.int(), weights_of(p).log(), 4.0, normalize, normalize, 0, C, budget, backend, "")


@pytest.mark.parametrize("learns", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("budget", [1 << 20, 640], ids=["one block", "blocks"])
def test_opcheck(budget: int, learns: bool, backend: str, device: torch.device, compiler: None) -> None:
    p = problem(device, 32)
    if not learns:
        p = Problem(*(t.detach() for t in p))
    arguments = (p.proxies, p.embeddings, [], False, False, *op_options(p, learns, budget, backend))
    torch.library.opcheck(torch.ops.tritonloss.proxy_logsumexp.default, arguments)
    positive, negative, *gradients = torch.ops.tritonloss.proxy_logsumexp(*arguments)
    assert (positive.shape, negative.shape) == ((C,), (C,))
    assert [gradient.numel() for gradient in gradients] == [0, 0]


@pytest.mark.parametrize(
    ("budget", "needs"),
    [(1 << 20, (True, True)), (1 << 20, (True, False)), (1 << 20, (False, True)), (640, (True, True))],
)
def test_opcheck_of_gradients(
    budget: int, needs: tuple[bool, bool], backend: str, device: torch.device, compiler: None
) -> None:
    p = Problem(*(t.detach() for t in problem(device)))
    given = list(upstream(p))
    arguments = (p.proxies, p.embeddings, given, *needs, *op_options(p, True, budget, backend))
    torch.library.opcheck(torch.ops.tritonloss.proxy_logsumexp.default, arguments)
    results = torch.ops.tritonloss.proxy_logsumexp(*arguments)
    shapes = [(n, D) if need else (0,) for n, need in zip((C, N), needs, strict=True)]
    assert [t.shape for t in results[2:]] == shapes


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8])
def test_opcheck_of_labels(dtype: torch.dtype, check: bool, device: torch.device, compiler: None) -> None:
    labels = torch.tensor([0, 3, 1], dtype=dtype, device=device)
    torch.library.opcheck(torch.ops.tritonloss.class_labels.default, (labels, 4, check))


def test_no_pass_holds_the_similarity(backend: str, device: torch.device) -> None:
    p = problem(device, 64, 300, 4)
    with Watch() as watch:
        sums = proxy_logsumexp(*p, memory_budget=50 * 64 * 8)
        sums.negative.sum().backward()
    assert (300, 4) in watch.shapes
    assert not {(300, 64), (64, 300)} & set(watch.shapes)
    assert max(rows * columns for rows, columns in (s for s in watch.shapes if len(s) == 2)) <= 50 * 64


@pytest.mark.parametrize("distance", [None, LpDistance()], ids=["dot", "lp"])
def test_second_derivative_is_refused(distance: Any, backend: str, device: torch.device) -> None:
    p = problem(device)
    sums = proxy_logsumexp(*p, distance=distance)
    (grad,) = torch.autograd.grad(sums.negative.sum(), p.proxies, create_graph=True)
    with pytest.raises(RuntimeError, match=r"use_backend\('reference'\)"):
        grad.square().sum().backward()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory_budget": 0}, "memory_budget is 0"),
        ({"distance": LpDistance(), "normalize_proxies": True}, "normalize_proxies"),
    ],
)
def test_bad_option(options: dict[str, Any], message: str, device: torch.device) -> None:
    with pytest.raises(ValueError, match=message):
        proxy_logsumexp(*problem(device), **options)


def test_result_has_names(device: torch.device) -> None:
    sums = proxy_logsumexp(*problem(device))
    assert isinstance(sums, ProxyLogSumExp)
    assert all(a is b for a, b in itertools.zip_longest(sums, (sums.positive, sums.negative)))
