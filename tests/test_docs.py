"""The user guide: every Python example runs, every link and every name leads somewhere, and mkdocs builds it."""

from __future__ import annotations

import functools
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
from checks import python
from processes import run_processes

ROOT = Path(__file__).resolve().parent.parent
REPRODUCE = ROOT / "examples" / "reproduce"
PAGES = {page.name: page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs").glob("*.md"))}
FENCE = re.compile(r'^```(\w+)(?: title="(.*?)")?\n(.*?)^```$', re.DOTALL | re.MULTILINE)


class Example(NamedTuple):
    """A fenced block: where it stands, its language, its title and its text."""

    place: str
    language: str
    title: str
    text: str


EXAMPLES = [
    Example(f"{name}:{text.count(chr(10), 0, found.start()) + 1}", found[1], found[2] or "", found[3])
    for name, text in PAGES.items()
    for found in FENCE.finditer(text)
]
PYTHON = [example for example in EXAMPLES if example.language == "python"]
# What a title promises, and a file name, which promises nothing.
TITLES = (
    "",
    "on a CUDA device",
    "in two processes",
    "in one process and in two",
    "with the patch",
    "plain_backend.py",
)
# Those of the frameworks run in tests/test_frameworks.py.
ELSEWHERE = ("in two processes", "in one process and in two", "with the patch")


def test_examples_are_found() -> None:
    assert len(PYTHON) == sum(text.count("\n```python") for text in PAGES.values()) >= 15
    assert {example.title for example in PYTHON} == set(TITLES)


def run(example: Example) -> None:
    """As a script, in this process."""
    exec(compile(example.text, f"docs/{example.place}", "exec"), vars(sys.modules["__main__"]))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # what torch.compile says about itself
@pytest.mark.parametrize(
    "example",
    [e for e in PYTHON if e.title not in ELSEWHERE],
    ids=lambda example: example.place,
)
def test_example_runs(
    example: Example,
    compiler: None,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    if "pytorch_metric_learning" in example.text:
        pytest.importorskip("pytorch_metric_learning")
    if example.title == "on a CUDA device" and not torch.cuda.is_available():
        pytest.skip("it needs a CUDA device, as its title says")
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
    monkeypatch.setattr("tritonloss.backends._registered", {})
    run(example)
    assert capfd.readouterr() == ("", "")


def run_all(texts: list[str]) -> None:
    for text in texts:
        exec(compile(text, "docs", "exec"), {"__name__": "__main__"})


def test_examples_in_two_processes(tmp_path: Path) -> None:
    texts = [example.text for example in PYTHON if example.title == "in two processes"]
    assert len(texts) >= 2
    run_processes(2, functools.partial(run_all, texts), tmp_path)


@pytest.mark.skipif(shutil.which("git") is None, reason="git applies the patch")
def test_patch_applies_and_does_what_it_says(tmp_path: Path) -> None:
    ignore = shutil.ignore_patterns("__pycache__")
    for folder in ("kernels", "tritonloss"):
        shutil.copytree(ROOT / folder, tmp_path / folder, symlinks=True, ignore=ignore)
    (patch,) = (example.text for example in EXAMPLES if example.language == "diff")
    # Outside of a repository, also where the temporary folder is inside one.
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(tmp_path.parent)}
    applied = subprocess.run(
        ["git", "apply", "-"], input=patch, cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert applied.returncode == 0, applied.stderr
    (check,) = (example.text for example in PYTHON if example.title == "with the patch")
    interpret = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    path = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
    assert python(path + check, **interpret) == ""
    # Without the patch the check fails: it is the patched copy that ran.
    assert "surrogate is 'squared_hinge': expected one of" in python(check, expect_failure=True, **interpret)


# --- links and names ---


def without_code(text: str) -> str:
    return FENCE.sub("", text)


def anchors(text: str) -> set[str]:
    """Those of the headings, as the toc extension of Python-Markdown makes them."""
    headings = re.findall(r"^#+ (.+)$", without_code(text), re.MULTILINE)
    plain = (re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings)
    return {re.sub(r"[-\s]+", "-", heading) for heading in plain}


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name: str) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(PAGES[name])):
        page, _, anchor = target.partition("#")
        assert (page or name) in PAGES, target
        assert not anchor or anchor in anchors(PAGES[page or name]), target


def test_every_page_is_in_the_navigation() -> None:
    listed = re.findall(r"^  - .+: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(PAGES)


FILES = re.compile(r"`((?:bench|docs|examples|kernels|tests|tritonloss)/[\w./-]+|\w+\.md)`")


@pytest.mark.parametrize("name", PAGES)
def test_files_exist(name: str) -> None:
    for path in FILES.findall(without_code(PAGES[name])):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("name", PAGES)
def test_names_exist(name: str) -> None:
    """Dotted names of the package in the text."""
    code = " ".join(re.findall(r"`([^`\n]+)`", without_code(PAGES[name])))
    for dotted in re.findall(r"\btritonloss(?:\.\w+)+", code):
        head, _, tail = dotted.rpartition(".")
        try:
            importlib.import_module(dotted)
        except ModuleNotFoundError:
            assert hasattr(importlib.import_module(head), tail), dotted


# --- figures that are measured elsewhere ---


def test_figures_of_the_comparison() -> None:
    figures = re.findall(r"\d\.\d+ ± \d\.\d+", PAGES["choosing.md"])
    assert len(figures) == 20  # of six losses, and of four rows of the ablation
    assert set(figures) <= set(re.findall(r"\d\.\d+ ± \d\.\d+", (REPRODUCE / "README.md").read_text()))


def test_figures_of_the_precision() -> None:
    """Of R to two digits, of the gradient to one."""
    (file,) = (ROOT / "bench" / "results").glob("precision-*-2-cores.json")
    errors = json.loads(file.read_text())["errors"]
    for mode in errors["random"]:
        cells = [
            f"{errors[data][mode]['largest_rank']:.1e}, {errors[data][mode]['gradient']:.0e}"
            for data in ("random", "half trained", "trained")
        ]
        assert f"| {mode} | {' | '.join(cells)} |".replace("e-0", "e-") in PAGES["large-batches.md"]


# --- the site ---


def test_mkdocs_builds(tmp_path: Path) -> None:
    """Strictly: a link, an anchor or a page that is missing is an error. No page loads anything from elsewhere."""
    pytest.importorskip("mkdocs", reason="`make docs` installs it")
    pytest.importorskip("material", reason="`make docs` installs it")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr
    assert {page.stem for page in tmp_path.glob("*.html")} == {"404"} | {Path(name).stem for name in PAGES}
    for page in tmp_path.glob("*.html"):
        loaded = re.findall(r'<(?:script|link|img)[^>]*(?:src|href)="(https?:[^"]+)"', page.read_text())
        assert loaded == []
