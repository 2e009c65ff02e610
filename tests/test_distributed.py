"""DistributedLoss on gloo processes: what every rank gets is what one process makes of the whole batch."""

from __future__ import annotations

import copy
import functools
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checks import assert_close, assert_same
from processes import run_processes_once
from registry import LOSSES
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tritonloss import distances, functional, losses, reducers, regularizers, use_backend
from tritonloss.backends import LOGSUMEXP_FUNCTIONS, backend_module, logsumexp_module
from tritonloss.distributed import DistributedLoss
from tritonloss.ops import streaming
from tritonloss.ops.shares import own_share

N_CLASSES, DIM = 6, 5
# Rows of each rank: unequal, and none.
SIZES = {2: [11, 18], 3: [0, 17, 12], 4: [9, 1, 0, 19]}
# Of a value near 1 made of 29^2 terms and of a gradient near 10: the order of summation differs. 2^12 roundings.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6}


def batch(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """29 rows of 6 classes, one of which has one row."""
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(29, DIM, generator=generator, dtype=torch.float64).to(dtype)
    labels = torch.randint(0, N_CLASSES - 1, (29,), generator=generator)
    labels[20] = N_CLASSES - 1
    return rows, labels


def own_rows() -> slice:
    sizes = SIZES[dist.get_world_size()]
    first = sum(sizes[: dist.get_rank()])
    return slice(first, first + sizes[dist.get_rank()])


def mined(labels: Tensor, first: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Some pairs of the rows that are labelled, counted from `first`."""
    same = labels[:, None] == labels
    positives = (same & ~torch.eye(len(labels), dtype=torch.bool)).nonzero()[::2].T + first
    negatives = (~same).nonzero()[::3].T + first
    return positives[0], positives[1], negatives[0], negatives[1]


def masks(labels: Tensor) -> tuple[Tensor, Tensor]:
    positives = labels[:, None] % DIM == torch.arange(DIM)
    return positives, ~positives & (torch.arange(DIM) != 2)


Call = Callable[[Any, Tensor, Tensor], Tensor]


def PLAIN(loss, rows, labels):
    return loss(rows, labels)


"""The loss, and how it is called with rows and labels."""
CASES: dict[str, tuple[Callable[[Tensor], Any], Call]] = {
    **{name: (lambda rows, case=case: case.module(N_CLASSES, rows), PLAIN) for name, case in LOSSES.items()},
    "bounded": (lambda rows: losses.PNPLoss(max_class_size=9), PLAIN),
    "small blocks": (lambda rows: losses.SmoothAPLoss(0.1, memory_budget=400), PLAIN),
    "regularized": (
        lambda rows: losses.HistogramLoss(10, embedding_regularizer=regularizers.LpRegularizer()),
        PLAIN,
    ),
    "reducer": (
        lambda rows: losses.FastAPLoss(reducer=reducers.MultipleReducers({"loss": reducers.MeanReducer()})),
        PLAIN,
    ),
    "square root": (lambda rows: losses.FastAPLoss(distance=distances.LpDistance(power=1)), PLAIN),
    "function distance": (lambda rows: losses.HistogramLoss(10, distance=Tilted().to(rows.dtype)), PLAIN),
    "proxies at a distance": (
        lambda rows: seeded(
            lambda: losses.ProxyAnchorLoss(
                N_CLASSES,
                DIM,
                distance=distances.LpDistance(),
                weight_regularizer=regularizers.LpRegularizer(),
            )
        ).to(rows.dtype),
        PLAIN,
    ),
    "mined": (
        lambda rows: losses.SmoothAPLoss(0.1),
        lambda loss, rows, labels: loss(rows, labels, mined(labels)),
    ),
    "mined triplets": (
        lambda rows: losses.FastAPLoss(),
        lambda loss, rows, labels: loss(rows, labels, indices_tuple=triplets(labels)),
    ),
    "listed pairs": (
        lambda rows: losses.HistogramLoss(10),
        lambda loss, rows, labels: loss(rows, None, mined(labels)),
    ),
    "blocks of queries": (
        lambda rows: losses.SOPRCLoss(N_CLASSES, memory_size=8, memory_budget=400),
        PLAIN,
    ),
    "score matrix": (
        lambda rows: losses.SOPRCLoss(N_CLASSES, memory_size=8),
        lambda loss, rows, labels: loss(
            rows.tanh(),
            positives=masks(labels)[0],
            negatives=masks(labels)[1],
            classes=labels,
        ),
    ),
    "two towers": (
        lambda rows: losses.InfoNCELoss(
            nn.Parameter(torch.tensor(0.3, dtype=rows.dtype)), directions="both", label_smoothing=0.1
        ),
        lambda loss, rows, labels: loss(rows, ref_emb=rows.flip(1).sin()),
    ),
    "reference set": (
        lambda rows: losses.SupConLoss(),
        lambda loss, rows, labels: loss(rows, labels, ref_emb=rows.flip(1).sin(), ref_labels=labels),
    ),
    "pairs of a reference set": (
        lambda rows: losses.NTXentLoss(),
        lambda loss, rows, labels: loss(rows, None, mined(labels), rows.flip(1).sin()),
    ),
    "binary": (
        lambda rows: losses.SOPRCLoss(memory_size=8),
        lambda loss, rows, labels: loss(rows[:, 0].tanh(), labels > 2),
    ),
    "semi-variance": (lambda rows: losses.SemiVarianceRegularizer(), PLAIN),
    "function": (lambda rows: functools.partial(functional.pnp_loss, variant="Ib", b=2), PLAIN),
    "per query": (
        lambda rows: functools.partial(functional.smooth_ap_loss, reduction="none"),
        lambda loss, rows, labels: loss(rows, labels).square().sum(),
    ),
}


class Tilted(nn.Module):
    """A distance with a parameter, values in [-1, 1]."""

    is_inverted = True

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1, DIM))

    def forward(self, query: Tensor, ref: Tensor | None = None) -> Tensor:
        ref = query if ref is None else ref
        return torch.tanh((query * self.scale) @ ref.T)


def triplets(labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    anchors, positives, _, negatives = mined(labels)
    n = min(len(anchors), len(negatives))
    return anchors[:n], positives[:n], negatives[:n]


def seeded(make: Callable[[], Any]) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make()


def evaluate(loss: Any, call: Call, rows: Tensor, labels: Tensor) -> dict[str, Any]:
    """Value, gradients and state after one step."""
    leaf = rows.clone().requires_grad_()
    value = call(loss, leaf, labels)
    value.backward()
    module = loss if isinstance(loss, nn.Module) else nn.Module()
    return {
        "value": value.detach(),
        "grad": leaf.grad,
        "parameters": [parameter.grad for parameter in module.parameters()],
        "state": [buffer for buffer in module.buffers() if buffer is not None],
    }


# --- what the processes do ---


def every_case() -> dict[str, Any]:
    results = {}
    for backend in ("eager", "triton", "reference"):
        for dtype in (torch.float64, torch.float32):
            if backend != "eager" and (dtype == torch.float32 or dist.get_world_size() != 2):
                continue
            use_backend(backend)
            rows, labels = batch(dtype)
            for name, (make, call) in CASES.items():
                if name not in LOSSES and (backend, dtype) != ("eager", torch.float64):
                    continue
                part = own_rows()
                results[backend, dtype, name] = evaluate(
                    DistributedLoss(make(rows)), call, rows[part], labels[part]
                )
    use_backend("auto")
    return {
        "cases": results,
        "model": trained_model(wrap_loss=False),
        "model and loss": trained_model(wrap_loss=True),
        "errors": dict(refused_calls()),
        "work": work_of_this_rank(),
        "modes": other_modes(),
        "proxies of rank 0": proxies_of_rank_0(),
    }


class Model(nn.Module):
    """A network and its loss, with hidden units that a rank with no rows leaves without a gradient."""

    def __init__(self, criterion: nn.Module) -> None:
        super().__init__()
        self.network = seeded(lambda: nn.Sequential(nn.Linear(DIM, 7), nn.Tanh(), nn.Linear(7, DIM))).double()
        self.criterion = criterion

    def forward(self, rows: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.criterion(self.network(rows), labels)
        return loss


def train(step: Callable[[Tensor, Tensor], Tensor], model: nn.Module, part: slice) -> list[Tensor]:
    rows, labels = batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    values = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = step(rows[part], labels[part])
        loss.backward()
        optimizer.step()
        values.append(loss.detach())
    return [*values, *(parameter.detach() for parameter in model.parameters())]


def trained_model(wrap_loss: bool) -> list[Tensor]:
    """Losses and parameters of three steps: the network in DDP and the loss not, or both in one DDP."""
    criterion = seeded(lambda: losses.ProxyAnchorLoss(N_CLASSES, DIM)).double()
    model = Model(DistributedLoss(criterion))
    if wrap_loss:
        return train(DistributedDataParallel(model), model, own_rows())
    network = DistributedDataParallel(model.network)
    return train(lambda rows, labels: model.criterion(network(rows), labels), model, own_rows())


def refused_calls() -> Iterator[tuple[str, tuple[str, str]]]:
    """The error of each call of ranks that disagree, and that the group works after it."""
    is_first = dist.get_rank() == 0
    rows, labels = batch()
    rows, labels = rows[:8], labels[:8]

    def refusal(call: Callable[[], Any]) -> tuple[str, str]:
        try:
            call()
        except (ValueError, RuntimeError) as error:
            DistributedLoss(losses.PNPLoss())(rows, labels)
            return type(error).__name__, str(error)
        return "", ""

    pnp = DistributedLoss(losses.PNPLoss())
    other = DistributedLoss(losses.PNPLoss(anneal=0.02 if is_first else 0.01))
    kind = losses.PNPLoss() if is_first else losses.SmoothAPLoss()
    proxies = [losses.ProxyAnchorLoss(N_CLASSES, size).double() for size in (DIM, DIM - 1)]
    yield "size", refusal(lambda: pnp(rows[:, : 4 if is_first else 5], labels))
    yield "dtype", refusal(lambda: pnp(rows.float() if is_first else rows, labels))
    yield "options", refusal(lambda: other(rows, labels))
    yield "loss", refusal(lambda: DistributedLoss(kind)(rows, labels))
    yield "gradient", refusal(lambda: pnp(rows.clone().requires_grad_(is_first), labels))
    yield "labels", refusal(lambda: pnp(*((rows,) if is_first else (rows, labels))))
    yield "lengths", refusal(lambda: pnp(rows, labels[:5] if is_first else labels))
    yield (
        "keyword",
        refusal(lambda: DistributedLoss(losses.SOPRCLoss(N_CLASSES))(rows, labels, update=is_first)),
    )
    yield "shape of proxies", refusal(lambda: not_broadcast(proxies[0 if is_first else 1])(rows, labels))
    with using("eager" if is_first else "reference"):
        yield "backend", refusal_of_backend(pnp, rows, labels)
    yield (
        "label out of range",
        refusal(
            lambda: DistributedLoss(losses.ProxyAnchorLoss(3, DIM).double())(rows, labels * 0 + 7 * is_first)
        ),
    )


def refusal_of_backend(loss: nn.Module, rows: Tensor, labels: Tensor) -> tuple[str, str]:
    with pytest.raises(ValueError, match="backend") as caught:
        loss(rows, labels)
    return "ValueError", str(caught.value)


def not_broadcast(criterion: nn.Module) -> DistributedLoss:
    loss = DistributedLoss(losses.PNPLoss())
    loss.criterion = criterion
    return loss


@contextmanager
def using(backend: str) -> Iterator[None]:
    with use_backend(backend):
        yield


def work_of_this_rank() -> dict[str, int]:
    """The pairs that the block functions of this rank see in a batch of 64 rows, or of 64 rows and 64 proxies."""
    module = backend_module("eager", torch.device("cpu"))
    of_pairs = logsumexp_module("eager", torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(64, DIM, generator=generator)
    labels = torch.arange(64) // 2
    first, last = (64 * (dist.get_rank() + step) // dist.get_world_size() for step in (0, 1))
    pairs = {}
    for name, case in LOSSES.items():
        total = 0
        with pytest.MonkeyPatch.context() as patch:
            # So few pairs are one tile otherwise.
            patch.setattr(sys.modules["tritonloss.ops.soft_histogram"], "PAIRS_PER_TILE", 0)
            patch.setattr(streaming, "MIN_ROWS", 16)
            patch.setattr(sys.modules["tritonloss.ops.soft_histogram"], "MIN_ROWS", 16)

            def count(function: Callable[..., Any]) -> Callable[..., Any]:
                @functools.wraps(function)
                def counted(scores: Tensor, *rest: Any, **options: Any) -> Any:
                    nonlocal total
                    total += scores.numel()
                    return function(scores, *rest, **options)

                return counted

            for function in ("soft_rank", "soft_histogram", "proxy_logsumexp"):
                for direction in ("forward", "backward"):
                    attribute = f"{function}_{direction}"
                    patch.setattr(module, attribute, count(getattr(module, attribute)))
            for attribute in LOGSUMEXP_FUNCTIONS:
                patch.setattr(of_pairs, attribute, count(getattr(of_pairs, attribute)))
            loss = DistributedLoss(case.module(64, rows))
            loss(rows[first:last].requires_grad_(), labels[first:last]).backward()
        pairs[name] = total
    return pairs


def other_modes() -> dict[str, Any]:
    rows, labels = batch()
    part = own_rows()
    loss = DistributedLoss(losses.PNPLoss())
    results: dict[str, Any] = {}
    with torch.no_grad():
        results["no_grad"] = loss(rows[part], labels[part])
    results["frozen"] = loss(rows[part], labels[part])
    half = rows[part].bfloat16().requires_grad_()
    results["bfloat16"] = loss(half, labels[part])
    results["bfloat16"].backward()
    results["bfloat16 grad"] = half.grad
    soprc = DistributedLoss(losses.SOPRCLoss(N_CLASSES, memory_size=8))
    soprc(rows[part], labels[part])
    before = soprc.criterion.v.clone()
    results["eval"] = soprc.eval()(rows[part], labels[part])
    results["kept"] = torch.equal(before, soprc.criterion.v)
    if dist.get_world_size() == 2:
        compiled = torch.compile(lambda e, y: loss(e * 2, y) + 1, backend="eager")
        results["compiled"] = compiled(rows[part], labels[part])
    # As of init_process_group() without a backend: one for each type of device.
    by_device = dist.new_group(backend="cpu:gloo")
    results["by device"] = DistributedLoss(losses.PNPLoss(), by_device)(rows[part], labels[part])
    results["outside"] = own_share(8) is None
    leaf = rows[part].clone().requires_grad_()
    (grad,) = torch.autograd.grad(loss(leaf, labels[part]), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        grad.sum().backward()
    return results


def proxies_of_rank_0() -> Tensor:
    torch.manual_seed(dist.get_rank())
    return DistributedLoss(losses.ProxyAnchorLoss(N_CLASSES, DIM)).criterion.weight.detach()


# --- the tests ---


@pytest.fixture(scope="module", params=sorted(SIZES))
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What `every_case` returned in each process of a group."""
    return run_processes_once(request.param, every_case, tmp_path_factory, "every_case")


def parts(ranks: list[Any]) -> list[slice]:
    sizes = SIZES[len(ranks)]
    return [slice(sum(sizes[:rank]), sum(sizes[: rank + 1])) for rank in range(len(ranks))]


def whole_call(name: str, ranks: list[Any], dtype: torch.dtype) -> dict[str, Any]:
    """One process with the whole batch; mined pairs are those that the ranks mined."""
    rows, labels = batch(dtype)
    make, call = CASES[name]
    if name in ("mined", "mined triplets", "listed pairs", "pairs of a reference set"):
        mine = triplets if name == "mined triplets" else mined
        lists = [[entry + part.start for entry in mine(labels[part])] for part in parts(ranks)]
        indices = tuple(torch.cat(entries) for entries in zip(*lists, strict=True))
        given = labels if name in ("mined", "mined triplets") else None
        if name == "pairs of a reference set":
            return evaluate(
                make(rows), lambda loss, e, y: loss(e, given, indices, e.flip(1).sin()), rows, labels
            )
        return evaluate(make(rows), lambda loss, e, y: loss(e, given, indices), rows, labels)
    return evaluate(make(rows), call, rows, labels)


@pytest.mark.parametrize("name", CASES)
def test_every_rank_has_the_loss_of_the_whole_batch(name: str, ranks: list[Any]) -> None:
    for backend, dtype, case in ranks[0]["cases"]:
        if case != name:
            continue
        whole = whole_call(name, ranks, dtype)
        results = [rank["cases"][backend, dtype, name] for rank in ranks]
        tolerance = TOLERANCE[dtype]
        for result, part in zip(results, parts(ranks), strict=True):
            assert_same(result["value"], results[0]["value"])
            assert_close(result["value"], whole["value"], rtol=tolerance, atol=tolerance)
            # Of W times the loss: DDP divides by W.
            atol = tolerance * max(1.0, float(whole["grad"].abs().max()))
            assert_close(result["grad"] / len(ranks), whole["grad"][part], atol=atol)
            for kind in ("parameters", "state"):
                assert_same(result[kind], results[0][kind])
            for got, expected in zip(result["parameters"], whole["parameters"], strict=True):
                assert_close(got, expected, atol=tolerance * max(1.0, float(expected.abs().max())))
            for got, expected in zip(result["state"], whole["state"], strict=True):
                assert_close(got, expected, atol=1e-6)
        assert whole["value"] > 0
        assert whole["grad"].abs().max() > 0


@pytest.mark.parametrize("name", ["model", "model and loss"])
def test_a_trained_model_is_that_of_one_process(name: str, ranks: list[Any]) -> None:
    model = Model(seeded(lambda: losses.ProxyAnchorLoss(N_CLASSES, DIM)).double())
    expected = train(model, model, slice(0, 29))
    for rank in ranks:
        assert_same(rank[name], ranks[0][name])
        assert_close(rank[name], expected, rtol=1e-11, atol=1e-11)


ERRORS = {
    "size": "ranks differ in embeddings: rank 0 has torch.float64 [*, 4] on cpu, rank 1 has torch.float64 [*, 5]",
    "dtype": "ranks differ in embeddings: rank 0 has torch.float32 [*, 5]",
    "options": "ranks differ in criterion: ",
    "loss": "ranks differ in criterion: rank 0 has : PNPLoss",
    "gradient": "ranks differ in embeddings: rank 0 has torch.float64 [*, 5] on cpu, which needs a gradient",
    "labels": "labels",
    "lengths": "expected tensors with one number of rows, got embeddings 8, labels 5",
    "keyword": "ranks differ in update: rank 0 has True, rank 1 has False",
    "shape of proxies": "ranks differ in criterion",
    "backend": "ranks differ in backend: rank 0 has eager, rank 1 has reference",
    "label out of range": "labels must be in 0 .. 2, one per class, got 7",
}


@pytest.mark.parametrize("name", ERRORS)
def test_ranks_that_disagree_raise_everywhere(name: str, ranks: list[Any]) -> None:
    for rank, result in enumerate(ranks):
        kind, text = result["errors"][name]
        assert ERRORS[name] in text
        assert kind == ("RuntimeError" if name == "lengths" and rank else "ValueError")
        if name == "lengths" and rank:
            assert text.startswith("DistributedLoss: rank 0 cannot take part: ValueError")


@pytest.mark.parametrize("name", LOSSES)
def test_work_is_split(name: str, ranks: list[Any]) -> None:
    pairs = [rank["work"][name] for rank in ranks]
    whole = 2 * 64 * 64
    if name == "HistogramLoss":  # each pair once, and what blocks of 16 rows see of the other half
        whole = whole // 2
        # and up to 15 keys before the first query of a share, so that rows begin at multiples of 16
        assert sum(pairs) <= 1.6 * whole
    else:
        assert sum(pairs) == whole
    # 64 rows in 3 parts: one more row. Of a triangle the last part is the highest, and 16 of its rows make one block.
    assert max(pairs) <= (2 if name == "HistogramLoss" else 1.5) * whole / len(ranks)


def test_other_modes(ranks: list[Any]) -> None:
    rows, labels = batch()
    expected = losses.PNPLoss()(rows, labels)
    half = rows.bfloat16().requires_grad_()
    in_half = losses.PNPLoss()(half, labels)
    in_half.backward()
    soprc = losses.SOPRCLoss(N_CLASSES, memory_size=8)
    soprc(rows, labels)
    soprc.eval()
    assert half.grad is not None
    for rank, part in zip(ranks, parts(ranks), strict=True):
        modes = rank["modes"]
        assert_close(modes["no_grad"], expected, rtol=1e-12)
        assert_close(modes["frozen"], expected, rtol=1e-12)
        assert_close(modes["by device"], expected, rtol=1e-12)
        assert_same(modes["bfloat16"], in_half.detach())
        # Rounded on every rank, then added: one rounding of 2^-9 per rank, of terms of the size of the largest entry.
        atol = len(ranks) * 2**-8 * float(half.grad.abs().max())
        assert_close(modes["bfloat16 grad"] / len(ranks), half.grad[part], atol=atol)
        assert_close(modes["eval"], soprc(rows, labels), rtol=1e-6)
        assert modes["kept"]
        if "compiled" in modes:
            assert_close(modes["compiled"], losses.PNPLoss()(rows * 2, labels) + 1, rtol=1e-12)
        assert modes["outside"]


def test_proxies_are_those_of_rank_0(ranks: list[Any]) -> None:
    for rank in ranks:
        assert_same(rank["proxies of rank 0"], ranks[0]["proxies of rank 0"])


def test_without_a_process_group() -> None:
    rows, labels = batch()
    assert_same(DistributedLoss(losses.PNPLoss())(rows, labels), losses.PNPLoss()(rows, labels))


def test_world_of_one(tmp_path: Path) -> None:
    rows, labels = batch()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        for name, (make, call) in CASES.items():
            alone = evaluate(make(rows), call, rows, labels)
            got = evaluate(DistributedLoss(make(rows)), call, rows, labels)
            assert_same(got, alone)
            assert name
    finally:
        dist.destroy_process_group()


def test_copies() -> None:
    loss = DistributedLoss(losses.ProxyAnchorLoss(N_CLASSES, DIM).double())
    rows, labels = batch()
    for twin in (copy.deepcopy(loss), pickle.loads(pickle.dumps(loss))):
        assert_same(twin(rows, labels), loss(rows, labels))
    assert list(loss.state_dict()) == ["criterion.weight"]


@pytest.mark.parametrize("criterion", [3, None])
def test_what_is_no_criterion(criterion: Any) -> None:
    with pytest.raises(TypeError, match="criterion must be a loss"):
        DistributedLoss(criterion)
