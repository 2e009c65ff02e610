"""`cached_step` against the plain step: one graph of the whole batch, or of the same chunks, where chunks matter."""

from __future__ import annotations

import copy
import gc
import types
import weakref
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checks import assert_close, assert_same
from processes import run_processes
from registry import LOSSES, LossCase
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tritonloss.distributed import DistributedLoss
from tritonloss.gradient_cache import cached_step
from tritonloss.losses import PNPLoss, ProxyAnchorLoss, SOPRCLoss

N, WIDTH, DIM, N_CLASSES = 22, 12, 8, 5
CHUNK = 6  # 6 + 6 + 6 + 4


class Network(nn.Module):
    """Dropout, running statistics and a part that can be frozen: [N, WIDTH] to [N, DIM]."""

    def __init__(self, dropout: float = 0.0, norm: type[nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, 16)
        self.norm = norm(16)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(16, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.dropout(torch.tanh(self.norm(self.stem(x)))))


def batch(device: torch.device, dtype: torch.dtype = torch.float64, n: int = N) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(n, WIDTH, generator=generator, dtype=torch.float64)
    return inputs.to(device, dtype), (torch.arange(n) % N_CLASSES).to(device)


def network(device: torch.device, dtype: torch.dtype = torch.float64, **options: Any) -> Network:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Network(**options).to(device, dtype)


def plain_step(model: nn.Module, criterion: Any, inputs: Any, labels: Tensor, chunk_size: int = N) -> Tensor:
    """The step that `cached_step` replaces; in chunks whose graphs are all kept, if a chunk size is given."""
    loss = criterion(torch.cat([model(chunk) for chunk in inputs.split(chunk_size)]), labels)
    with torch.autocast(inputs.device.type, enabled=False):
        loss.backward()
    return loss.detach()


def gradients(*modules: nn.Module) -> dict[str, Tensor | None]:
    return {f"{i}.{name}": p.grad for i, m in enumerate(modules) for name, p in m.named_parameters()}


def draw() -> Tensor:
    """A random number: where the generator of the CPU stands."""
    return torch.rand(())


def largest(*tensors: Tensor | None) -> float:
    return max(float(t.abs().max()) for t in tensors if t is not None)


def assert_gradients_close(
    actual: dict[str, Tensor | None], expected: dict[str, Tensor | None], tolerance: float
) -> None:
    """Within `tolerance` of the largest gradient, which is not 0; none where there is none."""
    scale = largest(*expected.values())
    assert scale > 1e-4
    assert_close(actual, expected, atol=tolerance * scale)


# --- equal to the plain step ---


@pytest.fixture(params=LOSSES)
def loss(request: pytest.FixtureRequest) -> LossCase:
    return LOSSES[request.param]


@pytest.mark.parametrize("chunk_size", [1, CHUNK, N - 1])
def test_equals_the_step_on_the_whole_batch(loss: LossCase, chunk_size: int, device: torch.device) -> None:
    """Embeddings may be rounded in another way, by 1e-16, over temperature^2 = 1e-4 in a gradient: 1e-12."""
    inputs, labels = batch(device)
    model, rows = network(device), torch.empty(0, DIM, dtype=torch.float64, device=device)
    criterion = loss.module(N_CLASSES, rows)
    twin, cached = copy.deepcopy((model, criterion)), (model, criterion)
    expected = plain_step(*twin, inputs, labels)
    value = cached_step(*cached, inputs, labels, chunk_size=chunk_size)
    assert not value.requires_grad
    assert_close(value, expected, rtol=1e-12)
    assert_gradients_close(gradients(*cached), gradients(*twin), 1e-12)
    assert_close(criterion.state_dict(), twin[1].state_dict(), rtol=1e-12)  # a memory has moved once


def test_float32_equals_the_step_on_the_same_chunks(loss: LossCase, device: torch.device) -> None:
    """The embeddings are the same bits; only the order of the sums over at most 22 rows differs: 22 * 6e-8."""
    inputs, labels = batch(device, torch.float32)
    model = network(device, torch.float32)
    criterion = loss.module(N_CLASSES, torch.empty(0, DIM, device=device))
    twin, cached = copy.deepcopy((model, criterion)), (model, criterion)
    expected = plain_step(*twin, inputs, labels, CHUNK)
    assert_same(cached_step(*cached, inputs, labels, chunk_size=CHUNK), expected)
    assert_gradients_close(gradients(*cached), gradients(*twin), 1e-6)


@pytest.mark.parametrize("chunk_size", [N, N + 1])
def test_one_chunk_is_the_plain_step(loss: LossCase, chunk_size: int, device: torch.device) -> None:
    inputs, labels = batch(device, torch.float32)
    model = network(device, torch.float32, dropout=0.5, norm=nn.BatchNorm1d)
    criterion = loss.module(N_CLASSES, torch.empty(0, DIM, device=device))
    twin, cached = copy.deepcopy((model, criterion)), (model, criterion)
    torch.manual_seed(1)
    expected = plain_step(*twin, inputs, labels)
    torch.manual_seed(1)
    assert_same(cached_step(*cached, inputs, labels, chunk_size=chunk_size), expected)
    assert_same(gradients(*cached), gradients(*twin))
    assert_same(model.state_dict(), twin[0].state_dict())


def test_gradients_accumulate(device: torch.device) -> None:
    inputs, labels = batch(device)
    model, criterion = network(device), PNPLoss()
    cached_step(model, criterion, inputs, labels, chunk_size=CHUNK)
    once = {name: grad.clone() for name, grad in gradients(model).items() if grad is not None}
    cached_step(model, criterion, inputs, labels, chunk_size=CHUNK)
    assert_gradients_close(gradients(model), {name: 2 * grad for name, grad in once.items()}, 1e-12)


def test_an_empty_batch(device: torch.device) -> None:
    inputs, labels = batch(device)
    assert cached_step(network(device), PNPLoss(), inputs[:0], labels[:0], chunk_size=CHUNK) == 0


def test_a_gradient_of_the_inputs(device: torch.device) -> None:
    inputs, labels = batch(device)
    expected, actual = inputs.clone().requires_grad_(), inputs.clone().requires_grad_()
    plain_step(network(device), PNPLoss(), expected, labels)
    cached_step(network(device), PNPLoss(), actual, labels, chunk_size=CHUNK)
    assert_gradients_close({"inputs": actual.grad}, {"inputs": expected.grad}, 1e-12)


# --- what a second pass must find again ---


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.BatchNorm1d])
def test_random_numbers_and_buffers_move_once(norm: type[nn.Module], device: torch.device) -> None:
    """Dropout of the chunks, running statistics, and the generator afterwards, as with the chunks in one graph."""
    inputs, labels = batch(device)
    model = network(device, dropout=0.5, norm=norm)
    twin = copy.deepcopy(model)
    torch.manual_seed(1)
    expected, next_expected = plain_step(twin, PNPLoss(), inputs, labels, CHUNK), draw()
    torch.manual_seed(1)
    value, next_value = cached_step(model, PNPLoss(), inputs, labels, chunk_size=CHUNK), draw()
    assert_same(value, expected)
    assert_same(next_value, next_expected)
    assert_same(dict(model.named_buffers()), dict(twin.named_buffers()))
    assert_gradients_close(gradients(model), gradients(twin), 1e-12)


def test_random_numbers_of_the_criterion(device: torch.device) -> None:
    inputs, labels = batch(device)

    def criterion(embeddings: Tensor, labels: Tensor) -> Tensor:
        return PNPLoss()(F.dropout(embeddings, 0.2), labels)

    model = network(device, dropout=0.5)
    twin = copy.deepcopy(model)
    torch.manual_seed(1)
    expected, next_expected = plain_step(twin, criterion, inputs, labels, CHUNK), draw()
    torch.manual_seed(1)
    assert_same(cached_step(model, criterion, inputs, labels, chunk_size=CHUNK), expected)
    assert_same(draw(), next_expected)
    assert_gradients_close(gradients(model), gradients(twin), 1e-12)


def test_a_forward_that_depends_on_buffers_it_moves(device: torch.device) -> None:
    """Spectral normalisation takes a step of the power iteration in each forward: another matrix for each chunk."""
    inputs, labels = batch(device)
    model = network(device)
    nn.utils.parametrizations.spectral_norm(model.stem)
    twin = copy.deepcopy(model)
    plain_step(twin, PNPLoss(), inputs, labels, CHUNK)
    cached_step(model, PNPLoss(), inputs, labels, chunk_size=CHUNK)
    assert_same(dict(model.named_buffers()), dict(twin.named_buffers()))
    assert_gradients_close(gradients(model), gradients(twin), 1e-12)


class Counter(nn.Module):
    """A buffer that is replaced, not written to, and one that appears in the first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("first", None)

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        if self.first is None:
            self.first = x.detach().mean()
        return x * (1 + self.first * self.calls)


def test_buffers_that_are_replaced(device: torch.device) -> None:
    inputs, labels = batch(device)
    model = nn.Sequential(network(device), Counter()).to(device)
    twin = copy.deepcopy(model)
    plain_step(twin, PNPLoss(), inputs, labels, CHUNK)
    cached_step(model, PNPLoss(), inputs, labels, chunk_size=CHUNK)
    assert model[1].calls == 4
    assert_same(dict(model.named_buffers()), dict(twin.named_buffers()))
    assert_gradients_close(gradients(model), gradients(twin), 1e-12)


def test_an_error_leaves_the_generator_alone(device: torch.device) -> None:
    inputs, labels = batch(device)
    model = network(device, dropout=0.5)
    calls = []

    def embed(model: nn.Module, chunk: Tensor) -> Tensor:
        calls.append(len(chunk))
        if len(calls) == 6:
            raise RuntimeError("second pass, says the test")
        return model(chunk)

    torch.manual_seed(1)
    plain_step(copy.deepcopy(model), PNPLoss(), inputs, labels, CHUNK)
    expected = draw()
    torch.manual_seed(1)
    with pytest.raises(RuntimeError, match="says the test"):
        cached_step(model, PNPLoss(), inputs, labels, chunk_size=CHUNK, embed=embed)
    assert_same(draw(), expected)
    assert calls == [6, 6, 6, 4, 6, 6]


# --- autocast and gradient scaling ---


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scale", [None, 2.0**10])
def test_autocast(dtype: torch.dtype, scale: float | None, device: torch.device) -> None:
    """Without its cache, autocast casts a weight for each chunk, as `cached_step` does: the sums are float32."""
    inputs, labels = batch(device, torch.float32)
    model = network(device, torch.float32, dropout=0.5)
    twin = copy.deepcopy(model)
    scaler = None if scale is None else torch.amp.GradScaler(device.type, init_scale=scale)
    seen = []

    def criterion(embeddings: Tensor, labels: Tensor) -> Tensor:
        seen.append((embeddings.dtype, torch.is_autocast_enabled(device.type)))
        return PNPLoss()(embeddings, labels)

    torch.manual_seed(1)
    with torch.autocast(device.type, dtype, cache_enabled=False):
        expected = plain_step(twin, lambda *rows: criterion(*rows) * (scale or 1), inputs, labels, CHUNK) / (
            scale or 1
        )
    torch.manual_seed(1)
    with torch.autocast(device.type, dtype):
        value = cached_step(model, criterion, inputs, labels, chunk_size=CHUNK, scaler=scaler)
        assert torch.is_autocast_enabled(device.type)
    assert seen == [(dtype, True)] * 2
    assert value.dtype == torch.float32
    assert_same(value, expected)
    assert_gradients_close(gradients(model), gradients(twin), 1e-6)


def test_the_backward_passes_leave_autocast(device: torch.device) -> None:
    inputs, labels = batch(device, torch.float32)
    model, enabled = network(device, torch.float32), []
    model.stem.weight.register_hook(lambda _: enabled.append(torch.is_autocast_enabled(device.type)))
    for chunk_size in (CHUNK, N):
        with torch.autocast(device.type, torch.bfloat16):
            cached_step(model, PNPLoss(), inputs, labels, chunk_size=chunk_size)
    assert enabled == [False] * 5


def test_a_scaled_step_of_the_optimizer(device: torch.device) -> None:
    """The scaler undoes its scale, a power of 2, and skips a step whose gradients overflow."""
    inputs, labels = batch(device, torch.float32)
    models = [network(device, torch.float32) for _ in range(2)]
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**8)
    for model, given in zip(models, (None, scaler), strict=True):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        cached_step(model, PNPLoss(), inputs, labels, chunk_size=CHUNK, scaler=given)
        (optimizer if given is None else given).step(*([] if given is None else [optimizer]))
    assert_same(models[1].state_dict(), models[0].state_dict())
    scaler.update(2.0**127)
    before = copy.deepcopy(model.state_dict())
    cached_step(model, lambda *rows: 1e6 * PNPLoss()(*rows), inputs, labels, chunk_size=CHUNK, scaler=scaler)
    scaler.step(optimizer)
    assert_same(model.state_dict(), before)


# --- what needs a gradient ---


def test_frozen_parts_get_none(device: torch.device) -> None:
    inputs, labels = batch(device)
    model = network(device)
    model.stem.requires_grad_(False)
    twin = copy.deepcopy(model)
    plain_step(twin, PNPLoss(), inputs, labels)
    cached_step(model, PNPLoss(), inputs, labels, chunk_size=CHUNK)
    assert model.stem.weight.grad is None
    assert_gradients_close(gradients(model), gradients(twin), 1e-12)


def test_a_frozen_model_is_run_once(device: torch.device) -> None:
    inputs, labels = batch(device)
    model = network(device).requires_grad_(False)
    criterion = ProxyAnchorLoss(N_CLASSES, DIM).to(device, torch.float64)
    twin, calls = copy.deepcopy(criterion), []
    model.register_forward_hook(lambda *_: calls.append(1))
    plain_step(model, twin, inputs, labels, CHUNK)
    cached_step(model, criterion, inputs, labels, chunk_size=CHUNK)
    assert len(calls) == 4 + 4
    assert_gradients_close(gradients(criterion), gradients(twin), 1e-12)
    with pytest.raises(RuntimeError, match="does not require grad"):
        cached_step(model, PNPLoss(), inputs, labels, chunk_size=CHUNK)


def test_a_chunk_without_gradient(device: torch.device) -> None:
    inputs, labels = batch(device)

    def embed(model: nn.Module, chunk: Tensor) -> Tensor:
        return model(chunk).detach() if len(chunk) < CHUNK else model(chunk)

    model = network(device)
    twin = copy.deepcopy(model)
    PNPLoss()(torch.cat([embed(twin, chunk) for chunk in inputs.split(CHUNK)]), labels).backward()
    cached_step(model, PNPLoss(), inputs, labels, chunk_size=CHUNK, embed=embed)
    assert_gradients_close(gradients(model), gradients(twin), 1e-12)


def test_the_memory_of_a_loss_moves_once(device: torch.device) -> None:
    inputs, labels = batch(device)
    criterion = SOPRCLoss(N_CLASSES, memory_size=8).to(device)
    cached_step(network(device), criterion, inputs, labels, chunk_size=CHUNK)
    assert criterion.visits.tolist() == [1] * N_CLASSES


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.BatchNorm1d])
def test_a_criterion_that_is_part_of_the_model(norm: type[nn.Module], device: torch.device) -> None:
    """Its memory has moved, while the running statistics of the network are put back and move once."""
    inputs, labels = batch(device)
    model = nn.Module()
    model.network, model.criterion = (
        network(device, norm=norm),
        SOPRCLoss(N_CLASSES, memory_size=8).to(device).double(),
    )
    twin = copy.deepcopy(model)
    for _ in range(2):
        plain_step(twin.network, twin.criterion, inputs, labels, CHUNK)
        cached_step(
            model,
            model.criterion,
            inputs,
            labels,
            chunk_size=CHUNK,
            embed=lambda model, chunk: model.network(chunk),
        )
    assert model.criterion.visits.tolist() == [2] * N_CLASSES
    assert_close(model.state_dict(), twin.state_dict(), rtol=1e-12)
    assert_gradients_close(gradients(model), gradients(twin), 1e-12)


# --- memory ---


def test_activations_of_one_chunk_at_a_time(device: torch.device) -> None:
    inputs, labels = batch(device)
    alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
    counts = []

    class Watched(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            counts.append(len(alive))
            x = torch.tanh(x)
            alive.add(x)  # tanh keeps its result for the backward pass
            return x

    model = nn.Sequential(nn.Linear(WIDTH, DIM), Watched(), nn.Linear(DIM, DIM)).to(device, torch.float64)
    gc.disable()  # by reference counts alone
    try:
        cached_step(model, PNPLoss(), inputs, labels, chunk_size=CHUNK)
    finally:
        gc.enable()
    assert counts == [0] * 8


def test_a_view_keeps_nothing_alive(device: torch.device) -> None:
    """The first token of a sequence is a view of all tokens: 4 of the 4 x 100 must be kept."""
    inputs, labels = batch(device)
    kept: list[weakref.ref[torch.UntypedStorage]] = []

    def embed(model: nn.Module, chunk: Tensor) -> Tensor:
        tokens = model(chunk)[:, None].expand(-1, 100, -1).contiguous()
        assert all(storage() is None for storage in kept)
        kept.append(weakref.ref(tokens.untyped_storage()))
        return tokens[:, 0]

    cached_step(network(device), PNPLoss(), inputs, labels, chunk_size=CHUNK, embed=embed)
    assert len(kept) == 8


# --- inputs and models of other kinds ---


class Pair(nn.Module):
    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor, shift: Tensor, extra: Any = None) -> Tensor:
        if extra is not None:
            shift = shift + extra["more"][0] + extra["more"][1]
        return self.network(x) + shift[:, None]


@pytest.mark.parametrize(
    "arrange",
    [
        lambda x, shift: (x, shift),
        lambda x, shift: [x, shift],
        lambda x, shift: {"x": x, "shift": shift},
        lambda x, shift: (x, shift / 2, {"more": (shift / 4, shift / 4)}),
    ],
    ids=["tuple", "list", "mapping", "nested"],
)
def test_inputs_in_containers(arrange: Callable[[Tensor, Tensor], Any], device: torch.device) -> None:
    inputs, labels = batch(device)
    shift = torch.linspace(-1, 1, N, dtype=torch.float64, device=device)
    model = Pair(network(device))
    twin = copy.deepcopy(model)
    PNPLoss()(twin(inputs, shift), labels).backward()
    cached_step(model, PNPLoss(), arrange(inputs, shift), labels, chunk_size=CHUNK)
    assert_gradients_close(gradients(model), gradients(twin), 1e-12)


def test_embed_makes_embeddings_of_the_output(device: torch.device) -> None:
    inputs, labels = batch(device)
    model = network(device)
    twin = copy.deepcopy(model)
    plain_step(twin, lambda rows, labels: PNPLoss()(2 * rows + 1, labels), inputs, labels)
    cached_step(
        model, PNPLoss(), {"x": inputs}, labels, chunk_size=CHUNK, embed=lambda model, c: 2 * model(**c) + 1
    )
    assert_gradients_close(gradients(model), gradients(twin), 1e-12)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "saved-tensors"])
def test_a_checkpointed_model(reentrant: bool, device: torch.device) -> None:
    inputs, labels = batch(device)
    model = network(device, dropout=0.5)
    twin = copy.deepcopy(model)
    inputs.requires_grad_()  # without which reentrant checkpointing has no gradient

    def embed(model: nn.Module, chunk: Tensor) -> Tensor:
        return checkpoint(model, chunk, use_reentrant=reentrant)

    torch.manual_seed(1)
    expected = plain_step(twin, PNPLoss(), inputs, labels, CHUNK)
    torch.manual_seed(1)
    assert_same(cached_step(model, PNPLoss(), inputs, labels, chunk_size=CHUNK, embed=embed), expected)
    assert_gradients_close(gradients(model), gradients(twin), 1e-12)


@pytest.mark.filterwarnings("ignore")  # torch.compile warns about itself
def test_a_compiled_model(device: torch.device, compiler: None) -> None:
    """The second passes give the embeddings of the first, dropout included, or the gradients would differ."""
    inputs, labels = batch(device)
    model = network(device, dropout=0.5)
    twin = copy.deepcopy(model)
    compiled, compiled_twin = (torch.compile(m, fullgraph=True, backend="aot_eager") for m in (model, twin))
    torch.manual_seed(1)
    expected = plain_step(compiled_twin, PNPLoss(), inputs, labels, CHUNK)
    torch.manual_seed(1)
    assert_same(cached_step(compiled, PNPLoss(), inputs, labels, chunk_size=CHUNK), expected)
    assert_gradients_close(gradients(model), gradients(twin), 1e-12)


Images = namedtuple("Images", ["image", "shift", "name"], defaults=["glyphs"])


class Encoding(UserDict):
    """As the BatchEncoding of transformers: entries are attributes, and it has others."""

    source = None

    def __getattr__(self, name: str) -> Any:
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(name) from None


class Attributes(dict):
    """Entries are attributes because they are its dictionary of attributes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.__dict__ = self


class Mirrored(OrderedDict):
    """Entries are attributes because they are written to both, as in ModelOutput."""

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        super().__setattr__(name, value)


class Rows(list):
    source = None


@dataclass(frozen=True)
class Frozen:
    image: Tensor
    shift: Tensor
    name: str = "glyphs"


class Registered:
    """A container that torch knows because somebody registered it."""

    def __init__(self, image: Tensor, shift: Tensor) -> None:
        self.image, self.shift = image, shift


torch.utils._pytree.register_pytree_node(
    Registered, lambda batch: ([batch.image, batch.shift], None), lambda members, _: Registered(*members)
)


def with_source(container: Any) -> Any:
    container.source = "somewhere"
    return container


CONTAINERS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "namedtuple": Images,
    "namedtuple of leaves": lambda x, shift: Images(x, shift, None),
    "UserDict": lambda x, shift: with_source(Encoding(image=x, shift=shift, name="glyphs")),
    "attributes": lambda x, shift: with_source(Attributes(image=x, shift=shift)),
    "mirrored": lambda x, shift: with_source(Mirrored(image=x, shift=shift)),
    "OrderedDict": lambda x, shift: OrderedDict(shift=shift, image=x),
    "defaultdict": lambda x, shift: defaultdict(list, image=x, shift=shift, number=3, text="a"),
    "read only": lambda x, shift: types.MappingProxyType({"image": x, "shift": shift}),
    "list subclass": lambda x, shift: with_source(Rows([x, shift, None])),
    "tuple": lambda x, shift: (x, shift, "glyphs", 3),
    "dataclass": Frozen,
    "registered": Registered,
    "nested": lambda x, shift: {"batch": Images(x, (shift, [OrderedDict(a=None)]))},
}


def members(chunk: Any) -> tuple[Tensor, Tensor]:
    """The image and the shift, by attribute where the container has such."""
    if isinstance(chunk, dict) and "batch" in chunk:
        return chunk["batch"].image, chunk["batch"].shift[0]
    if hasattr(chunk, "image"):
        return chunk.image, chunk.shift
    return (chunk[0], chunk[1]) if isinstance(chunk, (tuple, list)) else (chunk["image"], chunk["shift"])


def outline(value: Any) -> Any:
    """A container without the numbers of its tensors: types, names, order, attributes and leaves."""
    if isinstance(value, Tensor):
        return "tensor"
    if isinstance(value, (tuple, list)):
        return type(value), [outline(member) for member in value], getattr(value, "source", None)
    if hasattr(value, "items"):
        entries = [(name, outline(member)) for name, member in value.items()]
        return type(value), entries, getattr(value, "source", None), getattr(value, "default_factory", None)
    state = getattr(value, "__dict__", None)
    return value if state is None else (type(value), outline(state))


@pytest.mark.parametrize("chunk_size", [CHUNK, N])
@pytest.mark.parametrize("name", CONTAINERS)
def test_chunks_have_the_containers_of_the_batch(name: str, chunk_size: int, device: torch.device) -> None:
    inputs, labels = batch(device)
    shift = torch.linspace(-1, 1, N, dtype=torch.float64, device=device)
    whole = CONTAINERS[name](inputs, shift)
    before, seen = outline(whole), []

    def embed(model: nn.Module, chunk: Any) -> Tensor:
        seen.append(outline(chunk))
        return model(*members(chunk))

    model = Pair(network(device))
    twin = copy.deepcopy(model)
    PNPLoss()(twin(inputs, shift), labels).backward()
    cached_step(model, PNPLoss(), whole, labels, chunk_size=chunk_size, embed=embed)
    assert_gradients_close(gradients(model), gradients(twin), 1e-12)
    assert seen == [before] * (1 if chunk_size == N else 8)
    assert outline(whole) == before
    for actual, expected in zip(members(whole), (inputs, shift), strict=True):
        assert actual is expected


def test_batches_of_transformers(device: torch.device) -> None:
    transformers = pytest.importorskip("transformers.tokenization_utils_base")
    inputs, labels = batch(device)
    whole = transformers.BatchEncoding({"image": inputs, "mask": inputs > 0}, n_sequences=1)
    model, seen = network(device), []

    def embed(model: nn.Module, chunk: Any) -> Tensor:
        seen.append((type(chunk), chunk.n_sequences, chunk.mask.shape))
        return model(chunk.image)

    twin = copy.deepcopy(model)
    plain_step(twin, PNPLoss(), inputs, labels)
    cached_step(model, PNPLoss(), whole, labels, chunk_size=11, embed=embed)
    assert_gradients_close(gradients(model), gradients(twin), 1e-12)
    assert seen == [(transformers.BatchEncoding, 1, (11, WIDTH))] * 4


# --- hooks of gradients ---


@pytest.mark.parametrize("chunk_size", [CHUNK, N])
def test_an_optimizer_in_the_backward_pass_steps_once(chunk_size: int, device: torch.device) -> None:
    """In hooks that free the gradients: the parameters after the plain step of an optimizer."""
    inputs, labels = batch(device)
    model = network(device)
    model.stem.requires_grad_(False)
    twin, steps = copy.deepcopy(model), []
    plain_step(twin, PNPLoss(), inputs, labels)
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    for name, parameter in model.named_parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.1)

        def step(p: Tensor, name: str = name, optimizer: torch.optim.Optimizer = optimizer) -> None:
            steps.append(name)
            optimizer.step()
            p.grad = None

        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(step)
    hooked = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    for times in (1, 2):
        cached_step(model, PNPLoss(), inputs, labels, chunk_size=chunk_size)
        assert sorted(steps) == sorted(hooked * times)
        if times == 1:
            assert_close(model.state_dict(), twin.state_dict(), rtol=1e-10, atol=1e-12)
    assert all(grad is None for grad in gradients(model).values())


def test_hooks_after_an_error(device: torch.device) -> None:
    """None has run, and they are there again."""
    inputs, labels = batch(device)
    model, calls, steps = network(device), [], []
    model.head.weight.register_post_accumulate_grad_hook(lambda p: steps.append(p))

    def embed(model: nn.Module, chunk: Tensor) -> Tensor:
        calls.append(len(chunk))
        if len(calls) == 6:
            raise RuntimeError("second pass, says the test")
        return model(chunk)

    with pytest.raises(RuntimeError, match="says the test"):
        cached_step(model, PNPLoss(), inputs, labels, chunk_size=CHUNK, embed=embed)
    assert not steps
    plain_step(model, PNPLoss(), inputs, labels)
    assert len(steps) == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # what torch.distributed.optim says at its import
def test_an_optimizer_at_the_accumulation_of_gradients_is_refused(device: torch.device) -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward

    inputs, labels = batch(device)
    model = network(device)
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="_apply_optimizer_in_backward, which would step once per chunk"):
        cached_step(model, PNPLoss(), inputs, labels, chunk_size=CHUNK)
    assert_same(model.state_dict(), before)


# --- errors ---


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        ({"chunk_size": 0}, ValueError, "chunk_size is 0: expected at least 1"),
        ({"chunk_size": 2.0}, TypeError, "chunk_size must be an int, got float"),
        ({"chunk_size": True}, TypeError, "chunk_size must be an int, got bool"),
        ({"inputs": "abc"}, TypeError, "inputs must be a tensor.* got str"),
        ({"inputs": np.ones(4)}, TypeError, "inputs must be a tensor.* got ndarray"),
        ({"inputs": (torch.ones(4), [np.ones(4)])}, TypeError, r"inputs\[1\]\[0\] must be a tensor, .* got ndarray"),
        ({"inputs": {"a": 3}}, ValueError, "inputs must hold a tensor, got none"),
        ({"inputs": ()}, ValueError, "inputs must hold a tensor, got none"),
        ({"inputs": torch.tensor(1.0)}, ValueError, "inputs must have a dimension to split"),
        ({"inputs": [torch.ones(4), torch.ones(3)]}, ValueError, r"one length, got .* 4, 'inputs\[1\]': 3"),
        ({"inputs": Images(torch.ones(4), torch.ones(3))}, ValueError, r"'inputs.image': 4, 'inputs.shift': 3"),
        ({"embed": lambda model, chunk: {"rows": chunk}}, TypeError, "must be a tensor, got dict: give embed="),
        ({"embed": lambda model, chunk: chunk[1:]}, ValueError, r"a chunk of 6 rows .* got shape \[5, 12\]"),
        ({"embed": lambda model, chunk: chunk.sum()}, ValueError, r"a chunk of 6 rows .* got shape \[\]"),
    ],
)  # fmt: skip
def test_errors_name_the_argument(change: dict[str, Any], kind: type[Exception], text: str) -> None:
    inputs, labels = batch(torch.device("cpu"))
    arguments = {"inputs": inputs, "labels": labels, "chunk_size": CHUNK, **change}
    with pytest.raises(kind, match=text):
        cached_step(network(torch.device("cpu")), PNPLoss(), **arguments)


# --- DistributedDataParallel ---

BATCHES = [
    ((12, 5), (10, 5)),
    ((13, 5), (9, 9)),
]  # rows and chunk size of each process; the last has one chunk
OPTIONS: list[dict[str, bool]] = [{}, {"find_unused_parameters": True}]


def averaged_step(model: nn.Module, inputs: Tensor, labels: Tensor, chunk_size: int) -> None:
    """The step of DistributedDataParallel by hand: buffers of rank 0, gradients averaged over two processes."""
    for buffer in model.buffers():
        torch.distributed.broadcast(buffer, 0)
    plain_step(model, PNPLoss(), inputs, labels, chunk_size)
    for parameter in model.parameters():
        torch.distributed.all_reduce(parameter.grad)
        parameter.grad /= 2


def two_processes() -> list[dict[str, Tensor | None]]:
    """What each process checks; the gradients that both must hold."""
    rank, shared = torch.distributed.get_rank(), []
    inputs, labels = batch(torch.device("cpu"))
    for sizes in BATCHES:
        n, chunk_size = sizes[rank]
        mine = slice(0, n) if rank == 0 else slice(N - n, N)
        for options in OPTIONS:
            model = network(torch.device("cpu"), dropout=0.5, norm=nn.BatchNorm1d)
            by_hand, ddp = copy.deepcopy(model), DistributedDataParallel(model, **options)
            # The last step with the statistics of the first two, which differ between processes.
            for step in range(3):
                for m in (by_hand, ddp):
                    m.train(step < 2)
                    m.zero_grad()
                torch.manual_seed(10 * step + rank)
                averaged_step(by_hand, inputs[mine], labels[mine], chunk_size)
                torch.manual_seed(10 * step + rank)
                cached_step(ddp, PNPLoss(), inputs[mine], labels[mine], chunk_size=chunk_size)
                assert_gradients_close(gradients(model), gradients(by_hand), 1e-12)
                assert_same(dict(model.named_buffers()), dict(by_hand.named_buffers()))
            once = {name: grad.clone() for name, grad in gradients(model).items() if grad is not None}
            ddp.zero_grad()
            with ddp.no_sync():
                cached_step(ddp, PNPLoss(), inputs[mine], labels[mine], chunk_size=chunk_size)
            assert largest(*(once[name] - grad for name, grad in gradients(model).items())) > 1e-3
            cached_step(ddp, PNPLoss(), inputs[mine], labels[mine], chunk_size=chunk_size)
            assert_gradients_close(gradients(model), {name: 2 * grad for name, grad in once.items()}, 1e-12)
            shared.append(gradients(model))
    the_loss_of_the_whole_batch(rank, inputs, labels)
    static = DistributedDataParallel(network(torch.device("cpu")), static_graph=True)
    with pytest.raises(ValueError, match="static_graph=True"):
        cached_step(static, PNPLoss(), inputs, labels, chunk_size=CHUNK)
    wrappers_inside_a_module(rank, inputs, labels)
    no_wrapper(rank, inputs, labels)
    sharded(rank, inputs, labels)
    return shared


def the_loss_of_the_whole_batch(rank: int, inputs: Tensor, labels: Tensor) -> None:
    """With `DistributedLoss` and unequal shares: the step of one process that has all rows. Sums in another order."""
    mine = slice(0, 13) if rank == 0 else slice(13, N)
    for loss in LOSSES.values():
        model = network(torch.device("cpu"))
        criterion = loss.module(N_CLASSES, torch.empty(0, DIM, dtype=torch.float64))
        alone = copy.deepcopy((model, criterion))
        expected = plain_step(*alone, inputs, labels)
        ddp, distributed = DistributedDataParallel(model), DistributedLoss(criterion)
        value = cached_step(ddp, distributed, inputs[mine], labels[mine], chunk_size=5)
        assert_close(value, expected, rtol=1e-10)
        assert_gradients_close(gradients(model, criterion), gradients(*alone), 1e-10)
        assert_close(criterion.state_dict(), alone[1].state_dict(), rtol=1e-10)


def assert_equal_on_ranks(model: nn.Module) -> None:
    for parameter in model.parameters():
        everywhere = [torch.empty_like(parameter) for _ in range(2)]
        torch.distributed.all_gather(everywhere, parameter.detach())
        assert_same(everywhere[0], everywhere[1])


def the_step_of_one_process(model: nn.Module, inputs: Tensor, labels: Tensor) -> nn.Module:
    alone = copy.deepcopy(model)
    plain_step(alone, PNPLoss(), inputs, labels)
    return alone


def wrappers_inside_a_module(rank: int, inputs: Tensor, labels: Tensor) -> None:
    """As Fabric holds them, and beside a part that nobody wrapped, which `DistributedLoss` shows to be one of many."""
    mine = slice(0, 13) if rank == 0 else slice(13, N)
    model = network(torch.device("cpu"), norm=nn.BatchNorm1d).eval()
    torch.manual_seed(0)
    whole = nn.Sequential(model, nn.Linear(DIM, DIM, dtype=torch.float64))
    alone = the_step_of_one_process(whole, inputs, labels)
    held = nn.Sequential(DistributedDataParallel(whole[0]), whole[1])
    criterion = DistributedLoss(PNPLoss())
    for chunk_size in (5, N):
        held.zero_grad()
        cached_step(held, lambda *rows: criterion(*rows), inputs[mine], labels[mine], chunk_size=chunk_size)
        assert_gradients_close(gradients(whole), gradients(alone), 1e-10)
    for twice in (1, 2):  # averages of averages
        cached_step(held, criterion, inputs[mine], labels[mine], chunk_size=5)
        expected = {name: (1 + twice) * grad for name, grad in gradients(alone).items() if grad is not None}
        assert_gradients_close(gradients(whole), expected, 1e-10)


def no_wrapper(rank: int, inputs: Tensor, labels: Tensor) -> None:
    """The gradients are averaged, before hooks; or weights differ already, and nothing is changed."""
    mine = slice(0, 13) if rank == 0 else slice(13, N)
    criterion = DistributedLoss(PNPLoss())
    for chunk_size in (5, N):
        model = network(torch.device("cpu"))
        optimizer = torch.optim.SGD([model.head.weight], lr=0.1)
        alone, steps = the_step_of_one_process(model, inputs, labels), []

        def step(p: Tensor, optimizer=optimizer, steps=steps) -> None:
            steps.append(p)
            optimizer.step()

        model.head.weight.register_post_accumulate_grad_hook(step)
        cached_step(model, criterion, inputs[mine], labels[mine], chunk_size=chunk_size)
        assert_gradients_close(gradients(model), gradients(alone), 1e-10)
        assert len(steps) == 1
        assert_equal_on_ranks(model)
    with torch.no_grad():
        model.stem.bias += rank
    model.zero_grad()
    with pytest.raises(ValueError, match="other values on other ranks: wrap the model"):
        cached_step(model, criterion, inputs[mine], labels[mine], chunk_size=5)
    assert all(grad is None for grad in gradients(model).values())
    # Without a loss over the processes a model of one process is its own business.
    cached_step(model, PNPLoss(), inputs[mine], labels[mine], chunk_size=5)
    assert largest(*gradients(model).values()) > 1e-4


def sharded(rank: int, inputs: Tensor, labels: Tensor) -> None:
    """FSDP2 with equal numbers of chunks; with others an error on all ranks, before anything else."""
    from torch.distributed.fsdp import fully_shard

    criterion = DistributedLoss(PNPLoss())
    mine = slice(0, 13) if rank == 0 else slice(13, N)
    model = network(torch.device("cpu"))
    alone = the_step_of_one_process(model, inputs, labels)
    fully_shard(model.stem)
    fully_shard(model)
    for _ in range(2):
        model.zero_grad()
        cached_step(model, criterion, inputs[mine], labels[mine], chunk_size=(7, 5)[rank])
        whole = {name: None if g is None else g.full_tensor() for name, g in gradients(model).items()}
        assert_gradients_close(whole, gradients(alone), 1e-10)
        model.zero_grad()
        model(inputs)  # leaves the parameters of the root whole
        with pytest.raises(ValueError, match=rf"between 2 and 3 chunks, this one {3 - rank}: with FSDP"):
            cached_step(model, criterion, inputs[mine], labels[mine], chunk_size=5)
        assert all(grad is None for grad in gradients(model).values())
    norm = nn.Sequential(nn.Linear(WIDTH, DIM), nn.SyncBatchNorm(DIM)).double()
    with pytest.raises(ValueError, match="SyncBatchNorm"):
        cached_step(norm, criterion, inputs[mine], labels[mine], chunk_size=5)


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="two processes need gloo")
def test_distributed_data_parallel(tmp_path: Path) -> None:
    """In two processes: the gradients are the average over them."""
    first, second = run_processes(2, two_processes, tmp_path)
    assert len(first) == len(BATCHES) * len(OPTIONS)
    assert_same(first, second)
