"""Losses on split products: against float64 and beside IEEE, with bad rows, and where the option comes from."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from checks import assert_close, assert_same
from torch import Tensor, nn

from tritonloss import functional, losses, use_backend
from tritonloss.backends import eager, triton_unusable
from tritonloss.ops import products, proxy_logsumexp, soft_rank
from tritonloss.ops.sources import PanelRows, Products, Rows
from tritonloss.ops.streaming import _height_for_pairs, empty_scores

HALF = [torch.bfloat16, torch.float16]
# Two terms of the gradient of the scores err by 2^-17 of each, the float32 rows beside them by a few 2^-24; a sum over
# 40 rows and the part along a row that is taken out leave less than twice that of the norm.
GRADIENT_ERROR = 2 * 2.0**-17
LOSSES: dict[str, Callable[..., nn.Module]] = {
    "PNP": lambda **o: losses.PNPLoss(variant="Ds", anneal=0.1, **o),
    "SmoothAP": lambda **o: losses.SmoothAPLoss(temperature=0.1, **o),
    "RecallAtK": lambda **o: losses.RecallAtKLoss(temperature=0.1, **o),
    "SupAP": lambda **o: losses.SupAPLoss(temperature=0.1, **o),
    "Histogram": lambda **o: losses.HistogramLoss(num_bins=5, **o),
    "FastAP": lambda **o: losses.FastAPLoss(num_bins=5, **o),
    "ProxyAnchor": lambda **o: losses.ProxyAnchorLoss(10, 16, alpha=4, **o),
    "SOPRC": lambda **o: losses.SOPRCLoss(10, memory_size=8, **o),
}
LABELS = torch.arange(40) // 4
BUDGET = {"one panel": None, "panels": 2 * 40 * 16 * 4}


def embeddings(dtype: torch.dtype, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return (3 * torch.randn(40, 16, generator=generator)).to(device, dtype)


def step(criterion: nn.Module, rows: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Value and gradient of the rows, of a copy: SOPRC remembers."""
    criterion, leaf = copy.deepcopy(criterion), rows.detach().clone().requires_grad_()
    value = criterion(leaf, labels)
    value.backward()
    assert leaf.grad is not None
    return value.detach().double(), leaf.grad.double()


@pytest.mark.parametrize("budget", BUDGET)
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize("name", LOSSES)
def test_losses_are_as_exact_as_by_ieee(
    name: str, dtype: torch.dtype, budget: str, device: torch.device
) -> None:
    rows, labels = embeddings(dtype, device), LABELS.to(device)
    criteria = [LOSSES[name](products=mode, memory_budget=BUDGET[budget]) for mode in ("ieee", "split")]
    if name == "ProxyAnchor":
        for criterion in criteria:
            criterion.load_state_dict(criteria[0].state_dict())
            criterion.to(device, dtype)
    exact_value, exact = step(criteria[0].double(), rows.double(), labels)
    if name != "ProxyAnchor":
        criteria[0].float()
    else:
        criteria[0].to(dtype)
    size = float(exact.norm())
    for criterion in criteria:
        value, grad = step(criterion.to(device), rows, labels)
        eps = torch.finfo(dtype).eps
        assert abs(float(value - exact_value)) <= (eps + 1e-5) * abs(float(exact_value))
        tolerance = GRADIENT_ERROR + (eps if dtype != torch.float32 else 0)
        assert float((grad - exact).norm()) <= tolerance * size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_kernels_take_the_same_way(dtype: torch.dtype, device: torch.device) -> None:
    if triton_unusable(device) is not None:
        pytest.skip("no Triton")
    rows, labels = embeddings(dtype, device)[:20], LABELS[:20].to(device)
    criterion = losses.PNPLoss(anneal=0.1, products="split", memory_budget=2 * 20 * 12 * 4)
    found = []
    for backend in ("eager", "triton"):
        with use_backend(backend):
            found.append(step(criterion, rows, labels))
    eps = torch.finfo(dtype).eps + GRADIENT_ERROR
    assert_close(found[1][0], found[0][0], atol=eps * float(found[0][0]))
    assert float((found[1][1] - found[0][1]).norm()) <= eps * float(found[0][1].norm())


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("columns", [5, 16, 1024, 1030])
def test_passes_of_both_backends(rows: int, columns: int, device: torch.device) -> None:
    if triton_unusable(device) is not None:
        pytest.skip("no Triton")
    from tritonloss.backends import triton

    like = torch.empty(0, device=device)
    values = 10 ** (6 * torch.rand(rows, columns, device=device) - 3) * torch.randn(rows, columns).to(device)
    values[0, :4] = torch.tensor([torch.nan, -0.0, 1e-42, 1e38])
    of_rows, of_columns = (0.5 + torch.rand(n, device=device) for n in (rows, columns))
    product = values * of_rows[:, None] * of_columns
    for module in (eager, triton):
        scores = empty_scores(rows, columns, like).copy_(values)
        module.weigh(scores, of_rows, of_columns)
        assert_same(
            scores.nan_to_num(7.0).contiguous(), product.nan_to_num(7.0)
        )  # a NaN has no payload that counts
        for factors, exact in (((of_rows, of_columns), product), ((None, None), values)):
            high, low = products._halves_of(empty_scores(rows, columns, like)).unbind()
            module.split_in_two(empty_scores(rows, columns, like).copy_(values), *factors, high, low)
            total = high.double() + low.double()
            assert_same(total.isnan(), exact.isnan())
            # Rounded to nearest 2^-17 of an entry; the interpreter rounds towards zero, twice 2^-8.
            off = (total - exact.double()).abs() - 2.0 ** (-17 if module is eager else -14) * exact.abs()
            assert float(off.nan_to_num(0.0).max()) <= 1e-37  # subnormal bfloat16


# --- rows that are no rows of a network ---

BAD: dict[str, Callable[[Tensor], Any]] = {
    "zeros": lambda rows: rows[3].zero_(),
    "infinity": lambda rows: rows[3, 2].fill_(torch.inf),
    "NaN": lambda rows: rows[3, 2].fill_(torch.nan),
    "long": lambda rows: rows[3].mul_(2e4),
    "short": lambda rows: rows[3].mul_(1e-6),
    "1e-20": lambda rows: rows[3].mul_(1e-20),
    "1e20": lambda rows: rows[3].mul_(1e20),
}


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize("bad", BAD)
def test_bad_rows_as_by_ieee(bad: str, dtype: torch.dtype, device: torch.device) -> None:
    rows = embeddings(dtype, device)
    BAD[bad](rows)
    found = [
        step(losses.PNPLoss(anneal=0.1, products=mode), rows, LABELS.to(device)) for mode in ("ieee", "split")
    ]
    for by_ieee, by_split in zip(*found, strict=True):
        assert_same(by_split.isnan(), by_ieee.isnan())
        assert_same(by_split.isinf(), by_ieee.isinf())
    if bool(found[0][0].isfinite()):
        # A row of 1e-20 has a gradient of 1e20 by its own: each row is measured by itself.
        grads = [grad.nan_to_num(0.0, 0.0, 0.0) for _, grad in found]
        size = grads[0].norm(dim=1)
        tolerance = 4 * GRADIENT_ERROR + 2 * torch.finfo(dtype).eps
        least = torch.finfo(dtype).smallest_normal * 16
        assert bool(((grads[1] - grads[0]).norm(dim=1) <= tolerance * size + least).all())


# --- operands of two kinds ---


@pytest.mark.parametrize("kinds", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float16)], ids=str)
@pytest.mark.parametrize("mode", ["ieee", "split"])
def test_dtypes_that_differ(mode: Any, kinds: tuple[torch.dtype, ...], device: torch.device) -> None:
    """Proxies stay in float32 under autocast."""
    proxies, rows = (torch.randn(n, 8).to(device, kind) for n, kind in zip((6, 20), kinds, strict=True))
    labels = torch.arange(20, device=device) % 6
    found = []
    for leaves in ([proxies, rows], [proxies.double(), rows.double()]):
        inputs = [leaf.clone().requires_grad_() for leaf in leaves]
        options = {"alpha": 2.0, "normalize_proxies": True, "products": mode, "memory_budget": 400}
        sums = proxy_logsumexp(inputs[1], inputs[0], labels, **options)
        (sums.positive.sum() + sums.negative.sum()).backward()
        found.append([sums.negative.detach().double(), *(leaf.grad.double() for leaf in inputs)])
    for ours, exact, kind in zip(*found, (torch.float32, *kinds), strict=True):
        tolerance = GRADIENT_ERROR + torch.finfo(kind).eps
        assert float((ours - exact).norm()) <= tolerance * float(exact.norm())


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize("panel", [False, True])
def test_one_operand_is_normalised(panel: bool, dtype: torch.dtype, device: torch.device) -> None:
    """Factors of one side: queries that are no unit rows against unit keys, all at once or panel by panel."""
    queries, keys = (embeddings(dtype, device)[part] for part in (slice(0, 9), slice(9, 40)))
    q, k = (rows.double().requires_grad_() for rows in (queries, keys))
    weights = torch.randn(9, 31, device=device)
    exact = 2 * q @ nn.functional.normalize(k, dim=1).T
    exact.backward(weights.double())
    rows = PanelRows(queries, torch.float32, False) if panel else Rows(queries)
    source = Products(rows, Rows(keys, None, True), 2.0, 4, slice(0, 9), (True, True), "split", "eager")
    for begin in range(0, 9, 4):
        part = slice(begin, min(begin + 4, 9))
        assert_close(
            source.scores(part).double(), exact[part].detach(), atol=1e-6 * float(exact.detach().abs().max())
        )
        source.add(part, source.gradient(part).copy_(weights[part]))
    for found, leaf in zip(source.gradients(), (q, k), strict=True):
        assert leaf.grad is not None
        assert float((found.double() - leaf.grad).norm()) <= GRADIENT_ERROR * float(leaf.grad.norm())


# --- where the option comes from ---


@pytest.fixture
def modes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The mode of each operand that is prepared."""
    found: list[str] = []
    original = products.prepare

    def spy(rows: Tensor, *, mode: str, **options: Any) -> products.Operand:
        found.append(mode)
        return original(rows, mode=mode, **options)

    monkeypatch.setattr("tritonloss.ops.sources.prepare", spy)
    return found


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_takes_the_option(name: str, modes: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    rows = embeddings(torch.float32, torch.device("cpu"))
    monkeypatch.setenv("TRITONLOSS_PRODUCTS", "split")
    for options, expected in (({"products": "ieee"}, "ieee"), ({}, "split")):
        modes.clear()
        step(LOSSES[name](**options), rows, LABELS)
        assert set(modes) == {expected}
    monkeypatch.delenv("TRITONLOSS_PRODUCTS")
    modes.clear()
    step(LOSSES[name](), rows, LABELS)
    assert set(modes) == {"ieee"}
    with pytest.raises(ValueError, match=r"^products is 'tf32': expected one of auto, ieee, split$"):
        LOSSES[name](products="tf32")


def test_functions_take_the_option(modes: list[str]) -> None:
    rows, proxies = embeddings(torch.float32, torch.device("cpu")), torch.randn(10, 16)
    calls: list[Callable[..., Any]] = [
        lambda **o: functional.pnp_loss(rows, LABELS, **o),
        lambda **o: functional.smooth_ap_loss(rows, LABELS, **o),
        lambda **o: functional.fastap_loss(rows, LABELS, reduction="none", **o),
        lambda **o: functional.histogram_loss(rows, LABELS, **o),
        lambda **o: functional.proxy_anchor_loss(rows, LABELS, proxies, **o),
        lambda **o: functional.soprc_loss(rows, LABELS, torch.zeros(10, 4), prior=0.1, **o),
        lambda **o: soft_rank(rows, rows, LABELS // 4, torch.full((40,), 4), **o),
    ]
    for call in calls:
        modes.clear()
        call(products="split")
        assert set(modes) == {"split"}
        with pytest.raises(ValueError, match=r"^products is 'fast'"):
            call(products="fast")


def test_a_wrong_setting_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITONLOSS_PRODUCTS", "fast")
    with pytest.raises(
        ValueError, match=r"^TRITONLOSS_PRODUCTS is 'fast': expected one of auto, ieee, split$"
    ):
        losses.PNPLoss()(embeddings(torch.float32, torch.device("cpu")), LABELS)


def test_a_compiled_loss_multiplies_the_same(compiler: None, modes: list[str]) -> None:
    rows, criterion = embeddings(torch.bfloat16, torch.device("cpu")), losses.PNPLoss(products="split")
    compiled = torch.compile(criterion, backend="eager", fullgraph=True)
    assert_same(step(criterion, rows, LABELS), step(compiled, rows, LABELS))
    assert set(modes) == {"split"}


def test_two_runs_have_the_same_bits_and_leave_the_rows(device: torch.device) -> None:
    rows = embeddings(torch.bfloat16, device)
    before, criterion = rows.clone(), losses.SmoothAPLoss(products="split", memory_budget=2000)
    assert_same(step(criterion, rows, LABELS.to(device)), step(criterion, rows, LABELS.to(device)))
    assert_same(rows, before)


def test_panels_of_large_classes_leave_room() -> None:
    budget = 1 << 20
    assert _height_for_pairs(10**6, 4, 8 * 1024, 4, budget) == budget // (4 * 32 * 4)
    assert _height_for_pairs(10**6, 64, 8 * 1024, 4, budget) == budget // (4 * (32 * 64 + 8 * 1024))
