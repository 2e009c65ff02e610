"""Checks of the training frameworks, each in one process and in two, in one start: `python frameworks.py FOLDER`.

The packages are imported once; each check and each page of the docs runs in forks of that process. What came of it is
written to FOLDER/results.json: a traceback, or "" where all is well, under "name-number of processes".
"""

from __future__ import annotations

import copy
import gc
import importlib
import importlib.util
import json
import os
import re
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from checks import ROOT, assert_close, assert_same
from registry import LOSSES
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from tritonloss.distributed import DistributedLoss
from tritonloss.gradient_cache import cached_step
from tritonloss.losses import PNPLoss

WIDTH, DIM, N_CLASSES, ROWS = 6, 5, 4, 8
# Float64; the sums of a loss have another order in two processes than in one: 1e-10, as in test_gradient_cache.
TOLERANCE = 1e-10


# --- a model, its batches, and the plain loop ---


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, DIM))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs)


def network(seed: int = 0) -> Network:
    torch.manual_seed(seed)
    return Network().double()


def criterion_of(name: str) -> nn.Module:
    return LOSSES[name].module(N_CLASSES, torch.empty(0, DIM, dtype=torch.float64))


class Rows(Dataset[dict[str, Tensor]]):
    """64 rows, of which each ROWS that follow one another hold every class twice."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(64, WIDTH, generator=generator, dtype=torch.float64)
        self.labels = torch.arange(64) % N_CLASSES

    def __len__(self) -> int:
        return 64

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return {"x": self.inputs[row], "labels": self.labels[row]}


def batches(steps: int) -> list[tuple[Tensor, Tensor]]:
    """Those of a loader without shuffling, of all processes together."""
    rows, world = Rows(), world_size()
    size = ROWS * world
    return [
        (rows.inputs[start : start + size], rows.labels[start : start + size])
        for start in range(0, steps * size, size)
    ]


def world_size() -> int:
    return int(os.environ["WORLD_SIZE"])


def plain_gradients(net: nn.Module, criterion: nn.Module, steps: int) -> dict[str, Tensor | None]:
    """Of the mean loss of `steps` batches, in one process."""
    for inputs, labels in batches(steps):
        (criterion(net(inputs), labels) / steps).backward()
    return named_gradients(net, criterion)


def named(net: nn.Module, criterion: nn.Module) -> dict[str, nn.Parameter]:
    return {
        f"{part}.{name}": parameter
        for part, module in (("net", net), ("criterion", criterion))
        for name, parameter in module.named_parameters()
    }


def named_gradients(net: nn.Module, criterion: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in named(net, criterion).items()}


def assert_steps_of(
    before: dict[str, Tensor],
    after: dict[str, nn.Parameter],
    gradients: dict[str, Tensor | None],
    case: Any = None,
    tolerance: float = TOLERANCE,
) -> None:
    """One step of SGD with rate 1 along these gradients, none of which is 0; the case is for the message."""
    scale = max(float(grad.abs().max()) for grad in gradients.values() if grad is not None)
    assert scale > 1e-3
    steps = {name: before[name] - parameter.detach() for name, parameter in after.items()}
    assert all(bool(step.any()) for step in steps.values())
    try:
        assert_close(steps, gradients, atol=tolerance * scale)
    except AssertionError as error:
        raise AssertionError(f"{case}: {error}") from None


def values(parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in parameters.items()}


def assert_same_on_ranks(tensors: dict[str, Tensor]) -> None:
    if dist.is_initialized() and dist.get_world_size() > 1:
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, {name: t.detach() for name, t in tensors.items()})
        assert_same(everywhere[0], everywhere[1])


# --- transformers ---


def recipe() -> Any:
    sys.path.insert(0, str(ROOT / "examples" / "integrations"))
    return importlib.import_module("trainer")


def trainer_of(model: nn.Module, kind: Any = None, steps: int = 1, **options: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    kind = Trainer if kind is None else kind
    extra = {name: options.pop(name) for name in ("compute_loss_func",) if name in options}
    settings = {
        "output_dir": f"trainer-{os.environ['RANK']}",
        "max_steps": 1,
        "per_device_train_batch_size": ROWS,
        "gradient_accumulation_steps": steps,
        "optim": "sgd",
        "learning_rate": 1.0,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "remove_unused_columns": False,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "train_sampling_strategy": "sequential",
    }
    return kind(model, TrainingArguments(**{**settings, **options}), train_dataset=Rows(), **extra)


def of_inputs(net: nn.Module, inputs: dict[str, Any]) -> Tensor:
    return net(inputs["x"])


def transformers_accumulation() -> None:
    """The recipe takes the step of the plain loop, for every loss, 1 and 4 batches per step, plain and in chunks."""
    trainer = recipe()
    for name in LOSSES:
        for steps in (1, 4):
            for kind in (None, trainer.CachedTrainer):
                net, criterion = network(), criterion_of(name)
                gradients = plain_gradients(*copy.deepcopy((net, criterion)), steps)
                before = values(named(net, criterion))
                embedder = trainer.Embedder(net, DistributedLoss(criterion), of_inputs)
                run = trainer_of(embedder, kind, steps, ddp_find_unused_parameters=kind is not None)
                run.chunk_size = 3
                run.train()
                assert_steps_of(before, named(net, criterion), gradients, (name, steps, kind))
                assert_same_on_ranks(embedder.state_dict())


def transformers_loss_function() -> None:
    """`compute_loss_func`, as the page has it, and without it another step."""
    net = network()
    criterion = DistributedLoss(PNPLoss(variant="Ds", anneal=0.05))

    def whole(outputs: Tensor, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        return criterion(outputs, labels)

    def share(outputs: Tensor, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        loss = criterion(outputs, labels)
        return loss if num_items_in_batch is None else loss * len(labels) / num_items_in_batch

    class Plain(nn.Module):
        def __init__(self, net: nn.Module) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

    for steps in (1, 4):
        for averaged in (True, False):
            for function, factor in ((share, 1), (whole, steps * (world_size() if averaged else 1))):
                model = copy.deepcopy(net)
                gradients = plain_gradients(copy.deepcopy(net), criterion.criterion, steps)
                before = values(named(model, nn.Identity()))
                trainer_of(
                    Plain(model),
                    None,
                    steps,
                    compute_loss_func=function,
                    average_tokens_across_devices=averaged,
                ).train()
                expected = {key: None if grad is None else grad * factor for key, grad in gradients.items()}
                assert_steps_of(before, named(model, nn.Identity()), expected)


def transformers_checkpoint() -> None:
    """A run that is resumed ends with the proxies and the memory of the run that was not interrupted."""
    trainer = recipe()
    for name in ("ProxyAnchorLoss", "SOPRCLoss"):
        ends, folder = [], f"checkpoints-{name}"
        for resumed in (False, True):
            embedder = trainer.Embedder(network(resumed), DistributedLoss(criterion_of(name)), of_inputs)
            start = copy.deepcopy(embedder.criterion.state_dict())
            run = trainer_of(
                embedder,
                max_steps=2,
                output_dir=folder,
                save_strategy="steps",
                save_steps=1,
                optim="adamw_torch",
            )
            run.train(resume_from_checkpoint=f"{folder}/checkpoint-1" if resumed else None)
            ends.append(embedder.state_dict())
            assert_same_on_ranks(embedder.state_dict())
            moved = [
                not torch.equal(value, start[key]) for key, value in embedder.criterion.state_dict().items()
            ]
            assert any(moved)
        assert_same(ends[1], ends[0])


# --- Lightning ---


def lightning_trainer(**options: Any) -> Any:
    import lightning

    return lightning.Trainer(
        accelerator="cpu",
        devices=world_size(),
        strategy="ddp",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        **{"max_steps": 1, **options},
    )


def lightning_module(
    net: nn.Module, criterion: Any, step: Callable[[Any, Tensor, Tensor], Tensor | None]
) -> Any:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.criterion = net, criterion
            self.automatic_optimization = False

        def train_dataloader(self) -> Any:
            return DataLoader(Rows(), ROWS, sampler=own_rows())

        def forward(self, inputs: Tensor) -> Tensor:
            return self.net(inputs)

        def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor | None:
            return step(self, batch["x"], batch["labels"])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1.0)

    return Module()


def own_rows() -> list[int]:
    """Those of this process in `batches`, one batch after the other."""
    first = torch.arange(64).view(-1, world_size(), ROWS)
    return first[:, int(os.environ["RANK"])].flatten().tolist()


def lightning_automatic() -> None:
    """Every loss, 1 and 4 batches per step."""
    for name in LOSSES:
        for steps in (1, 4):
            net, criterion = network(), criterion_of(name)
            twin = copy.deepcopy((net, criterion))
            gradients = plain_gradients(*twin, steps)
            before = values(named(net, criterion))
            module = lightning_module(
                net, DistributedLoss(criterion), lambda self, x, y: self.criterion(self.net(x), y)
            )
            module.automatic_optimization = True
            lightning_trainer(accumulate_grad_batches=steps).fit(module)
            assert_steps_of(before, named(net, criterion), gradients, (name, steps))


def lightning_cached() -> None:
    """`cached_step` on the network, the module or Lightning's wrapper; criteria of all processes and of one."""

    def plain(net: nn.Module, criterion: nn.Module, per_process: bool) -> None:
        ((inputs, labels),) = batches(1)
        parts = world_size() if per_process else 1
        for x, y in zip(inputs.chunk(parts), labels.chunk(parts), strict=True):
            (criterion(net(x), y) / parts).backward()

    for per_process in (False, True):
        for chunk_size in (3, ROWS):
            for called in (
                lambda self: self.net,
                lambda self: self,
                lambda self: self.trainer.strategy.model,
            ):
                net, criterion = network(), criterion_of("ProxyAnchorLoss")
                twin = copy.deepcopy((net, criterion))
                plain(*twin, per_process)
                before = values(named(net, criterion))

                def step(self: Any, x: Tensor, y: Tensor, called=called, chunk_size=chunk_size) -> None:
                    optimizer = self.optimizers()
                    optimizer.zero_grad()
                    model = called(self)
                    cached_step(
                        model,
                        lambda rows, labels: self.criterion(rows, labels),
                        x,
                        y,
                        chunk_size=chunk_size,
                    )
                    optimizer.step()

                module = lightning_module(net, criterion if per_process else DistributedLoss(criterion), step)
                lightning_trainer().fit(module)
                assert_steps_of(before, named(net, criterion), named_gradients(*twin))
                assert_same_on_ranks(module.state_dict())


def lightning_checkpoint() -> None:
    for name in ("ProxyAnchorLoss", "SOPRCLoss"):
        module = lightning_module(
            network(), DistributedLoss(criterion_of(name)), lambda self, x, y: self.criterion(self.net(x), y)
        )
        module.automatic_optimization = True
        run = lightning_trainer()
        run.fit(module)
        run.save_checkpoint(f"{name}.ckpt")
        ends = copy.deepcopy(module.state_dict())
        other = lightning_module(
            network(1), DistributedLoss(criterion_of(name)), lambda self, x, y: self.criterion(self.net(x), y)
        )
        other.automatic_optimization = True
        lightning_trainer(max_steps=1).fit(other, ckpt_path=f"{name}.ckpt")  # has had its step
        assert_same(other.state_dict(), ends)
        assert any(
            not torch.equal(value, criterion_of(name).state_dict()[key])
            for key, value in other.criterion.criterion.state_dict().items()
        )


def fabric_cached() -> None:
    """Fabric holds the DistributedDataParallel in a module of its own."""
    import lightning

    fabric = lightning.Fabric(accelerator="cpu", devices=world_size(), strategy="ddp")
    fabric.launch()
    net, criterion = network(), criterion_of("PNPLoss")
    gradients = plain_gradients(*copy.deepcopy((net, criterion)), 1)
    before = values(named(net, criterion))
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=1.0))
    ((inputs, labels),) = batches(1)
    mine = slice(fabric.global_rank * ROWS, (fabric.global_rank + 1) * ROWS)
    cached_step(model, DistributedLoss(criterion), inputs[mine], labels[mine], chunk_size=3)
    optimizer.step()
    assert_steps_of(before, named(net, criterion), gradients)


# --- accelerate ---


def accelerate_accumulation() -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    for name in LOSSES:
        for steps in (1, 4):
            for cached in (False, True):
                GradientState._reset_state()
                AcceleratorState._reset_state()
                accelerator = Accelerator(gradient_accumulation_steps=steps, cpu=True)
                net, inner = network(), criterion_of(name)
                gradients = plain_gradients(*copy.deepcopy((net, inner)), steps)
                before = values(named(net, inner))
                criterion = DistributedLoss(inner)
                optimizer = torch.optim.SGD([*net.parameters(), *criterion.parameters()], lr=1.0)
                model, optimizer, loader = accelerator.prepare(net, optimizer, DataLoader(Rows(), ROWS))
                for batch, _ in zip(loader, range(steps), strict=False):
                    with accelerator.accumulate(model):
                        if cached:
                            cached_step(
                                model,
                                lambda rows, labels, criterion=criterion, steps=steps: (
                                    criterion(rows, labels) / steps
                                ),
                                batch["x"],
                                batch["labels"],
                                chunk_size=3,
                            )
                        else:
                            accelerator.backward(criterion(model(batch["x"]), batch["labels"]))
                        optimizer.step()
                        optimizer.zero_grad()
                assert_steps_of(before, named(net, inner), gradients, (name, steps, cached))


# --- sentence-transformers ---


class Recorded(nn.Module):
    """A loss as its trainer calls it, which notes what it is called with."""

    def __init__(self, model: nn.Module, criterion: nn.Module) -> None:
        super().__init__()
        self.model, self.criterion = model, criterion
        self.calls: list[Any] = []

    def forward(self, features: list[dict[str, Tensor]], labels: Tensor) -> Tensor:
        kept = {name: value for name, value in features[0].items() if isinstance(value, Tensor)}
        self.calls.append((kept, labels))
        return self.criterion(self.model(dict(kept))["sentence_embedding"], labels)


def sentence_transformers_accumulation() -> None:
    """The step of the plain loop. Float32, of a gradient that is added up in another order: 1e-5."""
    from datasets import Dataset
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding

    rows = Dataset.from_dict({"sentence": WORDS[2:] * 16, "label": list(range(4)) * 32})
    for name in ("PNPLoss", "ProxyAnchorLoss", "SOPRCLoss"):
        for steps in (1, 4):
            arguments = SentenceTransformerTrainingArguments(
                output_dir="sentences",
                max_steps=1,
                per_device_train_batch_size=ROWS,
                gradient_accumulation_steps=steps,
                optim="sgd",
                learning_rate=1.0,
                lr_scheduler_type="constant",
                max_grad_norm=0.0,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                use_cpu=True,
            )
            torch.manual_seed(0)
            model = SentenceTransformer(
                modules=[StaticEmbedding(tokenizer(), embedding_dim=DIM)], device="cpu"
            )
            criterion = criterion_of(name).float()
            twin = copy.deepcopy((model, criterion))
            before = values(named(model, criterion))
            loss = Recorded(model, DistributedLoss(criterion))
            SentenceTransformerTrainer(model, arguments, rows, loss=loss).train()
            calls: list[Any] = [loss.calls]
            if world_size() > 1:
                calls = [None] * world_size()
                dist.all_gather_object(calls, loss.calls)
            for together in zip(*calls, strict=True):
                embeddings = [twin[0](dict(features))["sentence_embedding"] for features, _ in together]
                (
                    twin[1](torch.cat(embeddings), torch.cat([labels for _, labels in together])) / steps
                ).backward()
            assert_steps_of(before, named(model, criterion), named_gradients(*twin), (name, steps), 1e-5)


WORDS = ["[PAD]", "[UNK]", "a", "small", "large", "red", "blue", "cat", "dog", "house"]


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {word: i for i, word in enumerate(WORDS)}
    made = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return made


# --- the pages of the docs ---

PAGES = {
    "transformers.md": ["transformers", "accelerate"],
    "lightning.md": ["lightning"],
    "accelerate.md": ["accelerate"],
    "sentence-transformers.md": ["sentence_transformers", "datasets", "accelerate"],
}
TITLE = "in one process and in two"


def examples(page: str) -> list[str]:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return re.findall(rf'^```python title="{TITLE}"\n(.*?)^```$', text, re.DOTALL | re.MULTILINE)


def tiny_bert(folder: str) -> None:
    """A model for the SentenceTransformer of the page, which has no file from elsewhere."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    special = {"pad_token": "[PAD]", "unk_token": "[UNK]"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer(), **special).save_pretrained("bert")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    BertModel(BertConfig(vocab_size=len(WORDS), **sizes), add_pooling_layer=False).save_pretrained("bert")
    SentenceTransformer(modules=[Transformer("bert"), Pooling(16)], device="cpu").save(folder)


def run_page(page: str) -> None:
    """Its examples one after the other, as one script."""
    found = examples(page)
    assert found
    if page == "sentence-transformers.md":
        if os.environ["RANK"] == "0":
            tiny_bert("half")
            os.rename("half", "tiny-bert")
        while not os.path.exists("tiny-bert"):
            time.sleep(0.01)
    namespace = {"__name__": "__main__"}
    for text in found:
        exec(compile(text, f"docs/{page}", "exec"), namespace)


CHECKS: dict[str, tuple[Callable[[], None], list[str]]] = {
    function.__name__: (function, packages)
    for function, packages in [
        (transformers_accumulation, ["transformers", "accelerate"]),
        (transformers_loss_function, ["transformers", "accelerate"]),
        (transformers_checkpoint, ["transformers", "accelerate"]),
        (lightning_automatic, ["lightning"]),
        (lightning_cached, ["lightning"]),
        (lightning_checkpoint, ["lightning"]),
        (fabric_cached, ["lightning"]),
        (accelerate_accumulation, ["accelerate"]),
        (sentence_transformers_accumulation, ["sentence_transformers", "datasets", "accelerate"]),
    ]
}


# --- processes ---


def absent(packages: list[str]) -> list[str]:
    return [name for name in packages if importlib.util.find_spec(name) is None]


def jobs() -> Iterator[tuple[str, Callable[[], None], list[str]]]:
    for name, (function, packages) in CHECKS.items():
        yield name, function, packages
    for page, packages in PAGES.items():
        yield page, lambda page=page: run_page(page), packages


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def child(function: Callable[[], None], folder: Path, rank: int, world: int, port: int) -> None:
    """Ends the process."""
    status = 1
    try:
        os.environ.update(
            {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world),
                "LOCAL_WORLD_SIZE": str(world),
                "GROUP_RANK": "0",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "TORCHELASTIC_RUN_ID": "tests",
            }
        )
        os.chdir(folder)
        with open(folder / f"output-{rank}", "w") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        function()
        status = 0
    except BaseException:
        (folder / f"error-{rank}").write_text(traceback.format_exc())
    finally:
        os._exit(status)


def run(name: str, function: Callable[[], None], world: int, root: Path) -> str:
    folder = root / f"{name}-{world}"
    folder.mkdir()
    port = free_port()
    children = []
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            child(function, folder, rank, world, port)
        children.append(pid)
    failed = wait_for(children)
    errors = [path.read_text() for path in sorted(folder.glob("error-*"))]
    return "\n".join(errors) or ("a process failed or took too long" if failed else "")


def wait_for(children: list[int], seconds: float = 120) -> bool:
    """Whether one fails. Once one has, the others have 5 seconds left: they may wait for it."""
    end, failed, running = time.monotonic() + seconds, False, list(children)
    while running and time.monotonic() < end:
        for pid in list(running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                running.remove(pid)
                if status:
                    failed, end = True, min(end, time.monotonic() + 5)
        time.sleep(0.01)
    for pid in running:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return failed or bool(running)


def main() -> None:
    root, only = Path(sys.argv[1]), sys.argv[2:]
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for packages in {tuple(packages) for _, _, packages in jobs()}:
        if not absent(list(packages)):
            for package in packages:
                importlib.import_module(package)
    if not absent(["transformers", "accelerate"]):
        importlib.import_module("transformers").Trainer  # noqa: B018  # it is imported when it is asked for
    gc.freeze()  # the frameworks collect garbage in each run, and what was imported takes 0.3 s
    results = {}
    for name, function, packages in jobs():
        if only and name not in only:
            continue
        for world in (1, 2):
            missing = absent(packages)
            results[f"{name}-{world}"] = (
                f"needs {', '.join(missing)}" if missing else run(name, function, world, root)
            )
    gc.unfreeze()
    (root / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
