"""The kernels of `soft_rank` launched directly: tiles smaller than the data, edges, padding, numbers at the limits."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
import triton
import triton.language as tl
from checks import assert_close, assert_same, python
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tritonloss.kernels import surrogates as surrogates_module
from tritonloss.kernels.soft_rank import soft_rank_backward, soft_rank_forward

GUARD = -777.0  # in memory that a kernel must leave alone
# What the Triton backend takes for float32.
FAST_MATH = torch.cuda.is_available() and torch.version.hip is None


@triton.jit
def reciprocal_in_float32(x, FAST_MATH: tl.constexpr):
    """What the instruction behind FAST_MATH gives, for the interpreter, which has no PTX: subnormal results are 0."""
    result = 1.0 / x
    return tl.where(result < 1.1754944e-38, 0.0, result)


@triton.jit
def power_of_two_in_float32(x, FAST_MATH: tl.constexpr):
    """The same for the exponential; above 2^127 an infinity."""
    result = tl.exp2(tl.minimum(x, 127.0, propagate_nan=tl.PropagateNan.ALL))
    return tl.where(x > 127, float("inf"), tl.where(result < 1.1754944e-38, 0.0, result))


@pytest.fixture(params=["IEEE", "fast"])
def arithmetic(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """Both forms of the surrogates in float32; without a GPU the fast one with stand-ins for its instructions."""
    if request.param == "fast" and torch.version.hip is not None:
        pytest.skip("the fast form is for NVIDIA")
    monkeypatch.setattr(sys.modules[__name__], "FAST_MATH", request.param == "fast")
    if device.type == "cpu":
        monkeypatch.setattr(surrogates_module, "reciprocal", reciprocal_in_float32)
        monkeypatch.setattr(surrogates_module, "power_of_two", power_of_two_in_float32)


def one_side_huber(x: Tensor) -> Tensor:
    """g of a difference negative - positive: 1 + 2 x above 0, (1 + x)^2 from -1 to 0, 0 below."""
    return torch.where(x <= -1, 0, torch.where(x > 0, 1 + 2 * x, (1 + x) ** 2))


STEPS = {"sigmoid": torch.sigmoid, "one_side_huber": one_side_huber}
surrogates = pytest.mark.parametrize("surrogate", STEPS)
among_positives = pytest.mark.parametrize("among", [False, True], ids=["negatives", "and-positives"])


class Block(NamedTuple):
    """scores [rows, n] in memory with a longer row; the range of each row; the number of pairs."""

    scores: Tensor
    start: Tensor
    count: Tensor
    offset: Tensor
    n_pairs: int

    @property
    def stride_units(self) -> int:
        return self.scores.stride(0) // 16

    def pairs(self, row: int) -> slice:
        return slice(int(self.offset[row]), int(self.offset[row] + self.count[row]))


def padded_rows(rows: int, n: int, like: Tensor, fill: float, units: int | None = None) -> Tensor:
    """[rows, n] in rows of at least 16 elements more than n, a multiple of 16; what is outside holds `fill`."""
    units = n // 16 + 2 if units is None else units
    return torch.full((rows, 16 * units), fill, dtype=like.dtype, device=like.device)[:, :n]


def block(
    n: int, of_rows: Sequence[tuple[int, int]], device: torch.device, dtype: torch.dtype, width: float = 3.0
) -> Block:
    values = width * torch.randn(len(of_rows), n, dtype=torch.float64)
    scores = padded_rows(len(of_rows), n, torch.empty(0, dtype=dtype, device=device), torch.nan)
    scores.copy_(values)
    start, count = torch.tensor(of_rows, dtype=torch.int64, device=device).reshape(-1, 2).T.contiguous()
    return Block(scores, start, count, count.cumsum(0) - count, int(count.sum()))


def fast_math(scores: Tensor) -> bool:
    return scores.dtype == torch.float32 and FAST_MATH


def flat(n_pairs: int, like: Tensor) -> Tensor:
    """[n_pairs] of NaN inside a longer tensor of guards."""
    whole = torch.full((n_pairs + 16,), GUARD, dtype=like.dtype, device=like.device)
    whole[8 : n_pairs + 8] = torch.nan
    return whole[8 : n_pairs + 8]


def untouched_around(tensor: Tensor) -> bool:
    """Whether the guards of `flat` are as they were."""
    whole = torch.as_strided(tensor, (len(tensor) + 16,), (1,), tensor.storage_offset() - 8)
    return bool((whole[:8] == GUARD).all() and (whole[-8:] == GUARD).all())


def forward(
    b: Block,
    surrogate: str,
    block_p: int,
    block_n: int,
    *,
    with_slopes: bool = True,
    among: bool = False,
    n_bucket: int = 1,
) -> dict[str, Tensor]:
    outputs = {
        name: flat(b.n_pairs, b.scores)
        for name in ("ranks", "positives", "slopes", "positive_ranks", "positive_slopes")
    }
    width = int(b.count.max()) if len(b.count) else 0
    grid = (len(b.scores), -(-max(width, 1) // block_p))
    soft_rank_forward[grid](
        scores=b.scores,
        start=b.start,
        count=b.count,
        offset=b.offset,
        stride_units=b.stride_units,
        n_keys=b.scores.shape[1],
        n_bucket=n_bucket,
        p_bucket=1,
        SURROGATE=surrogate,
        WITH_SLOPES=with_slopes,
        WITH_POSITIVES=among,
        FAST_MATH=fast_math(b.scores),
        BLOCK_P=block_p,
        BLOCK_N=block_n,
        **outputs,
    )
    assert all(map(untouched_around, outputs.values()))
    written = {"ranks", "positives"}
    written |= {"slopes"} if with_slopes else set()
    written |= {"positive_ranks"} if among else set()
    written |= {"positive_slopes"} if among and with_slopes else set()
    for name, output in outputs.items():
        assert name in written or bool(output.isnan().all())
    return {name: output for name, output in outputs.items() if name in written}


def backward(
    b: Block,
    saved: dict[str, Tensor],
    grads: dict[str, Tensor],
    surrogate: str,
    p: int,
    n: int,
    *,
    one_tile: bool | None = None,
) -> Tensor:
    """grad_scores, after a look at what surrounds it. one_tile: None is what the backend takes."""
    among = "positive_ranks" in grads
    one_tile = int(b.count.max()) <= p if one_tile is None else one_tile
    rows, n_keys = b.scores.shape
    grad_scores = padded_rows(rows, n_keys, b.scores, GUARD, b.stride_units)
    grad_scores.fill_(torch.nan)
    soft_rank_backward[(rows, -(-n_keys // n))](
        scores=b.scores,
        start=b.start,
        count=b.count,
        offset=b.offset,
        slopes=saved["slopes"],
        positives=saved["positives"],
        grad_ranks=grads["ranks"],
        grad_positives=grads["positives"],
        positive_slopes=saved["positive_slopes"] if among else saved["slopes"],
        grad_positive_ranks=grads["positive_ranks"] if among else grads["ranks"],
        grad_scores=grad_scores,
        stride_units=b.stride_units,
        n_keys=n_keys,
        n_bucket=1,
        p_bucket=1,
        SURROGATE=surrogate,
        WITH_POSITIVES=among,
        ONE_TILE=one_tile,
        FAST_MATH=fast_math(b.scores),
        BLOCK_P=p,
        BLOCK_N=n,
    )
    whole = torch.as_strided(grad_scores, (rows, grad_scores.stride(0)), grad_scores.stride())
    assert (whole[:, n_keys:] == GUARD).all()
    return grad_scores


def exact_forward(b: Block, surrogate: str) -> dict[str, Tensor]:
    """Every output in float64, with slopes by autograd."""
    outputs: dict[str, list[Tensor]] = {
        "ranks": [], "slopes": [], "positives": [], "positive_ranks": [], "positive_slopes": []
    }  # fmt: skip
    for row, first, n in zip(b.scores.double().cpu(), b.start.tolist(), b.count.tolist(), strict=True):
        own, negatives = row[first : first + n], torch.cat([row[:first], row[first + n :]])
        for i in range(n):
            others = torch.cat([own[:i], own[i + 1 :]])
            for columns, rank, slope in (
                (negatives, "ranks", "slopes"),
                (others, "positive_ranks", "positive_slopes"),
            ):
                difference = (columns - own[i]).requires_grad_()
                value = STEPS[surrogate](difference).sum()
                outputs[rank].append(value.detach())
                outputs[slope].append(torch.autograd.grad(value, difference)[0].sum())
            outputs["positives"].append(own[i])
    empty = torch.zeros(0, dtype=torch.float64)
    return {name: torch.stack(values) if values else empty for name, values in outputs.items()}


def exact_backward(b: Block, grads: dict[str, Tensor], surrogate: str) -> Tensor:
    """The gradient of sum(grads * outputs), in float64 by autograd."""
    leaf = b.scores.detach().double().cpu().requires_grad_()
    total = leaf.sum() * 0
    for r, (first, n) in enumerate(zip(b.start.tolist(), b.count.tolist(), strict=True)):
        own, negatives = leaf[r, first : first + n], torch.cat([leaf[r, :first], leaf[r, first + n :]])
        weights = {name: grad[b.pairs(r)].double().cpu() for name, grad in grads.items()}
        total = total + (weights["positives"] * own).sum()
        for i in range(n):
            total = total + weights["ranks"][i] * STEPS[surrogate](negatives - own[i]).sum()
            if "positive_ranks" in grads:
                others = torch.cat([own[:i], own[i + 1 :]])
                total = total + weights["positive_ranks"][i] * STEPS[surrogate](others - own[i]).sum()
    return torch.autograd.grad(total, leaf)[0]


def rounding(b: Block, terms: int | None = None) -> float:
    """A bound of the error of a sum of `terms` values or derivatives, each weighted by at most 4.

    A score s is rounded once when it is multiplied by log2(e), the difference of two once more: with |s| <= S the
    difference is off by 4 S roundings. Values and derivatives have a slope of at most 2 (Huber) and a size of at most
    2 S + 1, and exp2, the reciprocal and the sums add a few roundings of that size. Weights are normal numbers.
    """
    size = float(b.scores.abs().nan_to_num(0).max()) if b.scores.numel() else 0.0
    terms = b.scores.shape[1] + int(b.count.max()) if terms is None else terms
    return 4 * 2 * (4 * size + 8) * terms * torch.finfo(b.scores.dtype).eps


def check(b: Block, surrogate: str, block_p: int, block_n: int, among: bool) -> None:
    """Forward and backward against float64."""
    outputs = forward(b, surrogate, block_p, block_n, among=among)
    exact = exact_forward(b, surrogate)
    for name, output in outputs.items():
        assert_close(output, exact[name], atol=rounding(b), message=f"{name} differ")
    assert_same(outputs["positives"].double().cpu(), exact["positives"])
    names = ["ranks", "positives", "positive_ranks"] if among else ["ranks", "positives"]
    grads = {name: flat(b.n_pairs, b.scores).copy_(torch.randn(b.n_pairs)) for name in names}
    grad = backward(b, outputs, grads, surrogate, block_p, block_n)
    assert_close(grad, exact_backward(b, grads, surrogate), atol=rounding(b))


# --- every edge, with tiles of 16 keys ---

SHAPES: dict[str, tuple[int, list[tuple[int, int]]]] = {
    "smaller than a tile": (5, [(0, 2), (3, 2), (1, 1), (0, 0)]),
    "exactly a tile": (16, [(0, 3), (13, 3), (7, 4)]),
    "one more than a tile": (17, [(0, 1), (16, 1), (14, 3)]),
    "one less than two tiles": (31, [(15, 2), (28, 3), (30, 1)]),
    "three tiles and a tail": (53, [(0, 4), (49, 4), (14, 5), (31, 2)]),
    "a class of many tiles": (37, [(3, 20), (0, 9), (20, 17)]),
    "no negative": (20, [(0, 20), (0, 20)]),
    "no positive": (20, [(0, 0), (20, 0), (7, 0)]),
    "one key": (1, [(0, 1), (0, 0), (1, 0)]),
}
shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())


@pytest.mark.parametrize(
    ("block_p", "surrogate", "among"),
    [(1, "sigmoid", True), (1, "one_side_huber", False), (8, "sigmoid", False), (8, "one_side_huber", True)],
)
@shapes
def test_edges(
    shape: tuple[int, list[tuple[int, int]]],
    block_p: int,
    surrogate: str,
    among: bool,
    device: torch.device,
) -> None:
    check(block(*shape, device, torch.float64), surrogate, block_p, 16, among)


@among_positives
@surrogates
def test_float32(surrogate: str, among: bool, arithmetic: None, device: torch.device) -> None:
    n, rows = (700, 3) if device.type == "cpu" else (9001, 300)
    ranges = [((37 * r) % (n - 150), (r * 31) % 150) for r in range(rows)]
    check(block(n, ranges, device, torch.float32), surrogate, 8, 256, among)


@given(
    st.integers(1, 40).flatmap(
        lambda n: st.tuples(
            st.just(n),
            st.lists(st.integers(0, n).flatmap(lambda f: st.tuples(st.just(f), st.integers(0, n - f))), min_size=1,
                     max_size=2),
        )
    ),
    st.sampled_from([1, 2, 8]),
    st.sampled_from([16, 32]),
    st.sampled_from(sorted(STEPS)),
    st.booleans(),
)  # fmt: skip
def test_any_ranges(
    device: torch.device,
    shape: tuple[int, list[tuple[int, int]]],
    block_p: int,
    block_n: int,
    surrogate: str,
    among: bool,
) -> None:
    check(block(*shape, device, torch.float64), surrogate, block_p, block_n, among)


@among_positives
@surrogates
def test_tiles_do_not_change_the_result(surrogate: str, among: bool, device: torch.device) -> None:
    b = block(*SHAPES["a class of many tiles"], device, torch.float64)
    expected = forward(b, surrogate, 4, 16, among=among)
    for block_p, block_n in ((8, 16), (2, 64), (64, 128)):
        for name, output in forward(b, surrogate, block_p, block_n, among=among).items():
            assert_close(output, expected[name], atol=rounding(b))


@among_positives
@surrogates
def test_without_slopes_the_same_ranks(surrogate: str, among: bool, device: torch.device) -> None:
    b = block(*SHAPES["three tiles and a tail"], device, torch.float64)
    full = forward(b, surrogate, 4, 16, among=among)
    for name, output in forward(b, surrogate, 4, 16, with_slopes=False, among=among).items():
        assert_same(output, full[name])


@surrogates
def test_two_runs_give_the_same_bits(surrogate: str, device: torch.device) -> None:
    b = block(*SHAPES["a class of many tiles"], device, torch.float32)
    first, second = (forward(b, surrogate, 8, 16, among=True) for _ in range(2))
    assert_same(first, second)
    grads = {name: torch.randn_like(first[name]) for name in ("ranks", "positives", "positive_ranks")}
    assert_same(*(backward(b, first, grads, surrogate, 8, 16) for _ in range(2)))


@among_positives
@surrogates
def test_one_tile_of_positives_is_many(surrogate: str, among: bool, device: torch.device) -> None:
    """What is prepared once for all keys is what each tile would prepare. 150 keys: more tiles than a program has."""
    b = block(150, [(3, 4), (146, 4), (70, 2), (5, 0)], device, torch.float32)
    outputs = forward(b, surrogate, 4, 16, among=among)
    names = ["ranks", "positives", "positive_ranks"] if among else ["ranks", "positives"]
    grads = {name: torch.randn_like(outputs["ranks"]) for name in names}
    once, each = (backward(b, outputs, grads, surrogate, 4, 16, one_tile=one) for one in (True, False))
    assert_same(once, each)
    assert_close(once, exact_backward(b, grads, surrogate), atol=rounding(b))


def test_a_program_beyond_the_class_writes_nothing(device: torch.device) -> None:
    """The grid covers the largest class; a row with a smaller one, or none, leaves the pairs of the others alone."""
    b = block(40, [(0, 17), (3, 1), (5, 0), (39, 1)], device, torch.float64)
    exact = exact_forward(b, "sigmoid")
    for block_p in (1, 2, 8):
        outputs = forward(b, "sigmoid", block_p, 16, among=True)
        for name, output in outputs.items():
            assert_close(output, exact[name], atol=rounding(b))


# --- numbers at the limits ---


def pair_block(differences: Sequence[float], dtype: torch.dtype, device: torch.device) -> Block:
    """A row for each difference: the positive 0, and one negative."""
    scores = padded_rows(len(differences), 2, torch.empty(0, dtype=dtype, device=device), torch.nan)
    scores.copy_(torch.tensor([[0.0, d] for d in differences], dtype=torch.float64))
    n = torch.arange(len(differences), device=device)
    return Block(scores, torch.zeros_like(n), torch.ones_like(n), n, len(n))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_both_tails_of_the_sigmoid_keep_their_relative_accuracy(
    dtype: torch.dtype, arithmetic: None, device: torch.device
) -> None:
    differences = [-80.0, -40.0, -20.0, -5.0, -1.0, -1e-3, -1e-30, 0.0, 1e-3, 1.0, 5.0, 20.0, 40.0, 80.0]
    outputs = forward(pair_block(differences, dtype, device), "sigmoid", 1, 16)
    x = torch.tensor(differences, dtype=torch.float64)
    # The exponent d log2(e) is rounded: a relative error of |d| roundings, at most 80, and a few more.
    rtol = 100 * torch.finfo(dtype).eps
    assert_close(outputs["ranks"], torch.sigmoid(x), rtol=rtol)
    assert_close(outputs["slopes"], torch.sigmoid(x) * torch.sigmoid(-x), rtol=rtol)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_sigmoid_of_any_size(dtype: torch.dtype, arithmetic: None, device: torch.device) -> None:
    """Exactly 0 or 1 where the exponential is below every number, no overflow on the way."""
    differences = [-torch.inf, -1e30, -1e4, 1e4, 1e30, torch.inf]
    outputs = forward(pair_block(differences, dtype, device), "sigmoid", 1, 16)
    assert_close(outputs["ranks"].tolist(), [0.0, 0.0, 0.0, 1.0, 1.0, 1.0])
    assert_close(outputs["slopes"].tolist(), [0.0] * 6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_huber_at_its_kinks(dtype: torch.dtype, arithmetic: None, device: torch.device) -> None:
    """Exact: every operation on these numbers is."""
    step = 2.0**-20
    points = {
        -torch.inf: (0.0, 0.0),
        -1 - step: (0.0, 0.0),
        -1.0: (0.0, 0.0),
        -1 + step: (step**2, 2 * step),
        -0.5: (0.25, 1.0),
        0.0: (1.0, 2.0),
        step: (1 + 2 * step, 2.0),
        3.0: (7.0, 2.0),
        torch.inf: (torch.inf, 2.0),
    }
    outputs = forward(pair_block(list(points), dtype, device), "one_side_huber", 1, 16)
    assert outputs["ranks"].tolist() == [value for value, _ in points.values()]
    assert outputs["slopes"].tolist() == [slope for _, slope in points.values()]


@surrogates
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_nan_goes_where_it_belongs(
    surrogate: str, dtype: torch.dtype, arithmetic: None, device: torch.device
) -> None:
    """A NaN negative spoils every pair of its row, a NaN positive its own pair; no other row, no other positive."""
    b = block(40, [(2, 3), (2, 3), (2, 3), (2, 3)], device, dtype)
    b.scores[0, 39] = torch.nan
    b.scores[1, 3] = torch.nan
    b.scores[2, 0] = torch.nan
    outputs = forward(b, surrogate, 2, 16)
    expected = torch.tensor([[1, 1, 1], [0, 1, 0], [1, 1, 1], [0, 0, 0]], device=device).bool().flatten()
    assert_same(outputs["ranks"].isnan(), expected)
    assert_same(outputs["slopes"].isnan(), expected)
    assert_same(outputs["positives"].isnan(), b.scores[:, 2:5].flatten().isnan())


@surrogates
def test_exact_ties(surrogate: str, device: torch.device) -> None:
    """Every score equal: 36 negatives at half a count each, or at a whole one, and the steepest slope."""
    b = block(40, [(2, 4)], device, torch.float64)
    b.scores.fill_(0.75)
    outputs = forward(b, surrogate, 2, 16, among=True)
    value, slope = (0.5, 0.25) if surrogate == "sigmoid" else (1.0, 2.0)
    assert outputs["ranks"].tolist() == [36 * value] * 4
    assert outputs["slopes"].tolist() == [36 * slope] * 4
    assert outputs["positive_ranks"].tolist() == [3 * value] * 4
    assert outputs["positive_slopes"].tolist() == [3 * slope] * 4


# --- rows more than 2^31 elements apart ---

FAR_ROWS = """
import mmap, sys
import torch
from test_kernels_soft_rank import Block, exact_backward, exact_forward, fast_math
from tritonloss.kernels.soft_rank import soft_rank_backward, soft_rank_forward
from checks import assert_close

device = torch.device(sys.argv[1])
stride = 2**31 + 16

def far_rows():
    # Address space, not memory: only the touched pages exist on the CPU.
    if device.type == "cpu":
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        whole = torch.frombuffer(mmap.mmap(-1, 4 * (stride + 64), flags=flags), dtype=torch.float32)
    else:
        whole = torch.empty(stride + 64, device=device)
    return torch.as_strided(whole, (2, 40), (stride, 1))

n_keys, n_pairs = 40, 5
scores, grad = far_rows(), far_rows()
scores.copy_(torch.randn(2, n_keys))
grad.zero_()
start, count, offset = (torch.tensor(v, device=device) for v in ([3, 30], [2, 3], [0, 2]))
b = Block(scores, start, count, offset, n_pairs)
ranks, slopes, positives = (torch.zeros(n_pairs, device=device) for _ in range(3))
common = dict(
    start=start, count=count, offset=offset, stride_units=stride // 16, n_keys=n_keys, n_bucket=1, p_bucket=1,
    SURROGATE="sigmoid", WITH_POSITIVES=False, BLOCK_P=2, BLOCK_N=16,
)
def launch(kernel, grid, **tensors):
    if device.type == "cpu":
        from triton.runtime.interpreter import GridExecutor
        # The interpreter copies every argument; a copy of these would need 8 GiB.
        GridExecutor._init_args_hst = lambda self, args, kwargs: (args, kwargs)
        GridExecutor._restore_args_dev = lambda self, *_: None
    kernel[grid](**tensors, **common, FAST_MATH=fast_math(scores))
launch(
    soft_rank_forward, (2, 2), scores=scores, ranks=ranks, slopes=slopes, positives=positives,
    positive_ranks=ranks, positive_slopes=slopes, WITH_SLOPES=True,
)
near = b._replace(scores=scores.clone())
exact = exact_forward(near, "sigmoid")
assert_close(ranks, exact["ranks"], atol=1e-4)
weights = {"ranks": torch.randn(n_pairs, device=device), "positives": torch.randn(n_pairs, device=device)}
launch(
    soft_rank_backward, (2, 3), scores=scores, slopes=slopes, positives=positives, grad_ranks=weights["ranks"],
    grad_positives=weights["positives"], positive_slopes=slopes, grad_positive_ranks=ranks, grad_scores=grad,
    ONE_TILE=False,
)
assert_close(grad, exact_backward(near, weights, "sigmoid"), atol=1e-4)
print("equal")
"""


def test_rows_beyond_32_bit_offsets(device: torch.device) -> None:
    """In a process of its own: a wrong offset may end it. Sums of 40 float32 terms: far closer than 1e-4."""
    env = {"TRITON_INTERPRET": "1"} if device.type == "cpu" else {}
    assert python(FAR_ROWS, device.type, **env).strip() == "equal"
