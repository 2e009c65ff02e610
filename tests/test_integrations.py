"""The examples of examples/integrations, run with the real packages, and what they rest on. No network is used."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import frameworks
import pytest
import torch
from checks import ROOT, python

EXAMPLES = ROOT / "examples" / "integrations"
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "OMP_NUM_THREADS": "1"}


def require(*packages: str) -> None:
    """Skip without them. They are looked for, not imported: their warnings at import would be errors here."""
    absent = [name for name in packages if importlib.util.find_spec(name) is None]
    if absent:
        pytest.skip(f"needs {', '.join(absent)}")


def run(name: str, folder: Path, steps: int) -> str:
    """The output of an example, run from another folder on one thread."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("TRITON", "PYTEST"))}
    process = subprocess.run(
        [sys.executable, EXAMPLES / name, "--steps", str(steps)],
        cwd=folder,
        env={**inherited, **OFFLINE, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def scores(output: str) -> dict[str, float]:
    """The mean average precision of each network that is printed."""
    return {
        name: float(value)
        for name, value in re.findall(
            r"^(\w+) +(?:mAP|mean_average_precision_at_r) (0\.\d{3})\b", output, re.MULTILINE
        )
    }


# Half to two thirds of the least that seeds 0 to 2 gained (lightning_fit.py: seed 0 alone).
@pytest.mark.parametrize(
    ("name", "packages", "steps", "gain"),
    [
        ("pml.py", ("pytorch_metric_learning",), 12, 0.05),
        ("metrics.py", ("torchmetrics",), 24, 0.07),
        ("trainer.py", ("transformers", "accelerate"), 40, 0.1),
        ("lightning_fit.py", ("lightning",), 12, 0.08),
    ],
)
def test_example(name: str, packages: tuple[str, ...], steps: int, gain: float, tmp_path: Path) -> None:
    require(*packages)
    output = run(name, tmp_path, steps)
    reached = scores(output)
    assert list(reached) == ["untrained", "trained"]
    assert reached["trained"] > reached["untrained"] + gain
    if name == "lightning_fit.py":
        assert f"{steps} steps in 2 processes" in output


def test_every_example_is_run() -> None:
    scripts = {path.name for path in EXAMPLES.glob("*.py")} - {"setting.py"}
    assert scripts == {"pml.py", "metrics.py", "trainer.py", "lightning_fit.py"}


MEASURE = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
from metrics import measure
from setting import Glyphs, score

glyphs = Glyphs(torch.randn(90, 1, 4, 4), torch.randint(12, (90,)))
network = torch.nn.Flatten()
print(*(value.item() for value in measure(network, glyphs).values()), *score(network, glyphs))
"""


def test_torchmetrics_agrees_with_the_evaluation_of_the_examples() -> None:
    require("torchmetrics")
    values = [float(number) for number in re.findall(r"0\.\d+", python(MEASURE, str(EXAMPLES)))]
    # Both in float32: means of 90 values, each of up to 89 terms.
    assert values[:2] == pytest.approx(values[2:], abs=6e-6)
    assert len(values) == 4


# --- examples/train.py ---


@pytest.mark.parametrize(
    ("device", "reason"),
    [
        pytest.param(
            "cuda", "CUDA", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is here")
        ),
        ("cuda:99", "CUDA"),
        ("meta", "meta"),
        ("gpu", "gpu"),
    ],
)
def test_a_device_that_is_not_there(
    device: str, reason: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line that says why, no traceback, before the images are read."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.setattr(sys, "argv", ["train.py", "--device", device])
    script = importlib.import_module("train")
    monkeypatch.delitem(sys.modules, "train")
    with pytest.raises(SystemExit) as ended:
        script.main()
    assert ended.value.code == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert re.search(rf"error: --device is {device}, which cannot be used here: .*{reason}", last)
    assert len(last) < 400


def test_few_steps_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    script = importlib.import_module("train")
    monkeypatch.delitem(sys.modules, "train")
    train, unseen = script.load_glyphs()
    few = type(unseen)(unseen.images[:600], unseen.labels[:600])
    monkeypatch.setattr(script, "load_glyphs", lambda device: (train, few))
    options = [
        "--device",
        "cpu",
        "--steps",
        "1",
        "--batch-size",
        "8",
        "--output",
        str(tmp_path / "picture.png"),
    ]
    monkeypatch.setattr(sys, "argv", ["train.py", *options])
    script.main()
    hint = "1 steps are few: retrieval may fall before it rises, and 200 are meant (--steps 200)"
    assert capsys.readouterr().out.splitlines()[-1] == hint


# --- transformers and the folder kernels ---

FROM_THE_ROOT = """
import importlib.util
import tritonloss
import tritonloss.kernels.surrogates  # ours, under its own name
import transformers
from transformers import BertModel, Trainer
from transformers.utils.import_utils import is_kernels_available

spec = importlib.util.find_spec("kernels")
print(tritonloss.__file__, is_kernels_available(), spec.origin)
"""


def test_transformers_in_a_checkout() -> None:
    """Its folder `kernels` is the first on the path there, and is not taken for Hugging Face's package."""
    require("transformers", "accelerate")
    environment = {**OFFLINE, "PYTHONPATH": str(ROOT)}
    path, available, origin = python(FROM_THE_ROOT, **environment).split()
    assert path == str(ROOT / "tritonloss" / "__init__.py")
    assert (available, origin) == ("False", "None")


def test_the_package_kernels_of_others_goes_first(tmp_path: Path) -> None:
    """A folder without __init__.py gives way to any real package of its name, wherever that is on the path."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("")
    code = "import kernels, tritonloss.kernels; print(kernels.__file__)"
    found = python(code, PYTHONPATH=os.pathsep.join([str(ROOT), str(tmp_path)])).strip()
    assert found == str(tmp_path / "kernels" / "__init__.py")


# --- sentence-transformers ---

SENTENCES = """
import copy, os, sys
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from tritonloss.gradient_cache import cached_step
from tritonloss.losses import PNPLoss

folder = sys.argv[1]
words = ["a", "small", "large", "red", "blue", "cat", "dog", "tree", "house", "sees"]
vocabulary = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *words])}
tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer.post_processor = processors.TemplateProcessing(
    single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
)
special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
torch.manual_seed(0)
BertModel(
    BertConfig(
        vocab_size=len(vocabulary), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
).save_pretrained(folder)
transformer = Transformer(folder)
model = SentenceTransformer(modules=[transformer, Pooling(16)], device="cpu").train()

nouns = ["cat", "dog", "tree", "house"]
sentences = [f"a {adjective} {noun}" + " sees a tree" * (i % 2) for noun in nouns
             for i, adjective in enumerate(["small", "large", "red", "blue"])]
labels = torch.arange(4).repeat_interleave(4)
criterion = PNPLoss(variant="Ds", anneal=0.05)
features = dict(model.tokenize(sentences))
features = {name: value for name, value in features.items() if isinstance(value, torch.Tensor)}

def embed(model, chunk):
    return model(dict(chunk))["sentence_embedding"]

# The same gradients from chunks of 5, with dropout, as from the graphs of the same chunks.
plain = copy.deepcopy(model)
torch.manual_seed(1)
chunks = [{name: value[i : i + 5] for name, value in features.items()} for i in range(0, 16, 5)]
expected = criterion(torch.cat([embed(plain, chunk) for chunk in chunks]), labels)
expected.backward()
torch.manual_seed(1)
loss = cached_step(model, criterion, features, labels, chunk_size=5, embed=embed)
assert torch.equal(loss, expected.detach())
for a, b in zip(model.parameters(), plain.parameters(), strict=True):
    assert (a.grad is None) == (b.grad is None)
    if b.grad is not None:
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-6)

optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
values = []
for _ in range(15):
    optimizer.zero_grad()
    values.append(cached_step(model, criterion, features, labels, chunk_size=5, embed=embed).item())
    optimizer.step()

os.chdir(folder)
model.save("tiny-bert")
exec(sys.argv[2], {"__name__": "__main__"})
print(values[0], values[-1])
"""


def test_sentence_transformers(tmp_path: Path) -> None:
    """A model that is made here learns with a loss as criterion, in chunks with dropout; and the page's two towers."""
    require("sentence_transformers")
    two_towers = frameworks.examples("sentence-transformers.md")[-1]
    assert "MultipleNegativesRankingLoss" in two_towers
    first, last = map(float, python(SENTENCES, str(tmp_path), two_towers, **OFFLINE).split()[-2:])
    assert last < 0.7 * first
