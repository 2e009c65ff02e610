"""What is installed, what an import touches, and which file may import which."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "tritonloss"
KERNELS = ROOT / "kernels"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def module_files() -> dict[str, Path]:
    """Dotted name of every module of the package, kernels included, and its file."""
    files = [p for p in PACKAGE.rglob("*.py") if not p.is_relative_to(PACKAGE / "kernels")]
    named = {".".join(p.relative_to(ROOT).with_suffix("").parts): p for p in files}
    named |= {f"tritonloss.kernels.{p.stem}": p for p in KERNELS.glob("*.py")}
    return {name.removesuffix(".__init__"): path for name, path in named.items()}


MODULES = module_files()


def package_of(name: str) -> str:
    """The package that relative imports of a module start from."""
    return name if MODULES[name].name == "__init__.py" else name.rpartition(".")[0]


def python(code: str, cwd: Path, **env: str) -> str:
    """Output of `code` in a new interpreter with this checkout, but no TRITON setting of the tests."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("TRITON")}
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env={**inherited, "PYTHONPATH": str(ROOT), **env},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


# --- the wheel ---


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the sdist of a copy of the tree and the wheel made from that sdist."""
    copy = tmp_path_factory.mktemp("copy")
    for path in ROOT.iterdir():
        if path.is_file() and not path.name.startswith("."):
            shutil.copy(path, copy)
    for folder in (PACKAGE, KERNELS, *(ROOT / name for name in ("bench", "docs", "examples", "tests"))):
        shutil.copytree(
            folder, copy / folder.name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
        )
    build = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", "dist", "."],
        cwd=copy,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert build.returncode == 0, build.stdout + build.stderr
    return copy / "dist"


def test_wheel_holds_the_whole_package_and_nothing_else(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        inside = {n for n in archive.namelist() if ".dist-info/" not in n}
    assert inside == {"tritonloss/py.typed"} | {
        f"{package_of(name).replace('.', '/')}/{path.name}" for name, path in MODULES.items()
    }


def test_sdist_holds_what_its_tests_need(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        inside = {n.partition("/")[2] for n in archive.getnames()}
    for folder in ("bench", "docs", "examples", "kernels", "tests"):
        files = [
            path for path in (ROOT / folder).rglob("*") if path.suffix in {".py", ".md", ".json", ".npz"}
        ]
        assert {str(path.relative_to(ROOT)) for path in files} <= inside
    assert {"LICENSE", "README.md", "CHANGELOG.md", "CITATION.cff", "Makefile", "constraints.txt"} <= inside
    assert "tritonloss/py.typed" in inside
    assert not [name for name in inside if name.endswith(".pyc")]


def test_citation_names_the_version_and_every_loss() -> None:
    citation = pytest.importorskip("yaml").safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    project = PROJECT["project"]
    assert (str(citation["version"]), citation["license"]) == (project["version"], project["license"])
    assert citation["keywords"] == project["keywords"]
    assert len({reference["notes"] for reference in citation["references"]}) >= 6


def test_wheel_requires_torch_and_triton_only(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        required = re.findall(r"^Requires-Dist: (.*)$", archive.read(metadata).decode(), re.MULTILINE)
    runtime = {re.split(r"[ ;<>=]", r)[0] for r in required if "extra ==" not in r}
    assert runtime == {"torch", "triton"}


def test_every_package_is_listed() -> None:
    packages = {package_of(name) for name in MODULES}
    assert sorted(packages) == sorted(PROJECT["tool"]["setuptools"]["packages"])


def test_kernels_is_a_relative_link_to_a_folder_without_init() -> None:
    assert os.readlink(PACKAGE / "kernels") == os.path.join("..", "kernels")
    assert list(KERNELS.glob("*.py"))
    assert not (KERNELS / "__init__.py").exists()


def test_every_requirement_is_constrained() -> None:
    def names(requirements: list[str]) -> set[str]:
        return {re.split(r"[ ;<>=]", r)[0].lower().replace("_", "-") for r in requirements}

    project = PROJECT["project"]
    required = names(sum(project["optional-dependencies"].values(), project["dependencies"]))
    required -= {f"{project['name']}[{extra}]" for extra in project["optional-dependencies"]}
    assert required - names((ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()) == set()


# --- what an import touches ---


def test_import_starts_neither_cuda_nor_triton(tmp_path: Path) -> None:
    code = """
import sys
import torch

touched = []
for name in ("_lazy_init", "init", "is_available", "device_count", "current_device", "get_device_properties"):
    def spy(*args, name=name, real=getattr(torch.cuda, name), **kwargs):
        touched.append(name)
        return real(*args, **kwargs)
    setattr(torch.cuda, name, spy)

before = set(sys.modules)
import tritonloss
import tritonloss.functional, tritonloss.losses, tritonloss.reference
new = set(sys.modules) - before
print(touched, torch.cuda.is_initialized(), sorted(m for m in new if m.partition(".")[0] == "triton"))
"""
    assert python(code, tmp_path).strip() == "[] False []"


# `absent` is what an import sees where triton is not installed; `broken` is installed, but its import fails.
WITHOUT_TRITON = {
    "absent": """
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError("no triton, says the test", name=name)
""",
    "broken": """
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            return importlib.machinery.ModuleSpec(name, self)
    def create_module(self, spec):
        return None
    def exec_module(self, module):
        raise RuntimeError("no triton, says the test")
""",
}

FOUR_ROWS = """
import importlib.abc, importlib.machinery, sys

class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
{finder}
sys.meta_path.insert(0, Finder())

import torch
import tritonloss
from tritonloss.losses import PNPLoss

rows = [[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [0.6, 0.8]]
embeddings = torch.tensor(rows, dtype=torch.float64, requires_grad=True)
labels = torch.tensor([0, 0, 1, 1])
"""


@pytest.mark.parametrize("state", WITHOUT_TRITON)
def test_loss_runs_without_triton(state: str, tmp_path: Path) -> None:
    code = FOUR_ROWS.format(finder=WITHOUT_TRITON[state])
    code += """
loss = PNPLoss()(embeddings, labels)
loss.backward()
print(loss.item(), bool(embeddings.grad.abs().sum() > 0))
"""
    value, has_gradient = python(code, tmp_path).split()
    assert float(value) == pytest.approx(0.254496525, abs=5e-10)  # the printed digits of the golden value
    assert has_gradient == "True"


@pytest.mark.parametrize("how", ["argument", "environment"])
@pytest.mark.parametrize("state", WITHOUT_TRITON)
def test_forced_triton_says_why_it_cannot(state: str, how: str, tmp_path: Path) -> None:
    code = FOUR_ROWS.format(finder=WITHOUT_TRITON[state])
    if how == "argument":
        code += 'tritonloss.use_backend("triton")'
    code += """
try:
    PNPLoss()(embeddings, labels)
except RuntimeError as error:
    print(error)
"""
    env = {"TRITONLOSS_BACKEND": "triton"} if how == "environment" else {}
    assert "no triton, says the test" in python(code, tmp_path, **env)


# --- who imports whom ---


def imports(package: str, path: Path) -> Iterator[str]:
    """Absolute dotted names that a file of `package` imports, at any depth; `from a import b` gives `a.b`."""

    def absolute(level: int, *names: str | None) -> str:
        parents = package.split(".")
        return ".".join([*(parents[: len(parents) + 1 - level] if level else []), *filter(None, names)])

    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (absolute(node.level, node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            target = node.args[0]
            if isinstance(target, ast.JoinedStr):  # f"tritonloss.backends.{name}" may be any of them
                prefix = ast.literal_eval(target.values[0])
                yield from (module for module in MODULES if module.startswith(prefix))
            else:
                name = ast.literal_eval(target)
                yield absolute(len(name) - len(name.lstrip(".")), name.lstrip("."))


IMPORTS = {name: set(imports(package_of(name), path)) for name, path in MODULES.items()}
LAYERS = ["kernels", "backends", "ops", "losses"]  # each may import those before it


def layer(module: str) -> int:
    """Position in LAYERS; -1 for the modules that belong to none, such as layout and types."""
    room = module.split(".")[1] if "." in module else ""
    return LAYERS.index(room) if room in LAYERS else -1


def within(imported: str) -> str | None:
    """The module of the package that holds an imported name."""
    while imported and imported not in MODULES:
        imported = imported.rpartition(".")[0]
    return imported or None


def reachable(module: str) -> set[str]:
    seen: set[str] = set()
    todo = {module}
    while todo:
        current = todo.pop()
        seen.add(current)
        todo |= {m for m in map(within, IMPORTS[current]) if m} - seen
    return seen


def test_every_layer_has_modules() -> None:
    assert {layer(m) for m in MODULES} == {-1, 0, 1, 2, 3}


@pytest.mark.parametrize("module", sorted(m for m in MODULES if layer(m) >= 0))
def test_nothing_imports_upward(module: str) -> None:
    above = {m for m in reachable(module) if layer(m) > layer(module)}
    assert above == set()
    assert "tritonloss" not in reachable(module) - {module}  # the package itself imports every layer


def test_only_the_triton_backends_import_triton_and_kernels() -> None:
    importers = {
        module
        for module, names in IMPORTS.items()
        if layer(module) != 0
        and any(n.split(".")[0] == "triton" or n.startswith("tritonloss.kernels") for n in names)
    }
    expected = {f"tritonloss.backends.{name}" for name in ("triton", "triton_logsumexp", "triton_metrics")}
    assert importers == expected


@pytest.mark.parametrize("module", sorted(m for m in MODULES if layer(m) == 0))
def test_kernels_import_triton_and_one_another_only(module: str) -> None:
    roots = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            roots |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            roots.add("." * node.level or (node.module or "").split(".")[0])
    assert roots <= {".", "__future__", "triton"}


def test_import_reader_sees_every_form(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text(
        "import a.b\nfrom c import d\nfrom . import e\nfrom .f import g\nfrom ..h import i\n"
        "def late():\n    import j\n    importlib.import_module('k.l')\n    import_module('..m', 'p.q')\n"
        "    import_module(f'tritonloss.op{s}')\n"
    )
    some_ops = {m for m in MODULES if m.startswith("tritonloss.op")}
    assert some_ops
    assert set(imports("p.q", file)) == some_ops | {
        "a.b", "c.d", "p.q.e", "p.q.f.g", "p.h.i", "j", "k.l", "p.m",
    }  # fmt: skip


# --- nothing outside the project is named ---


def test_no_file_names_a_place_outside_the_project() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip(reason="the list of files is git's")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\0")
    files = [ROOT / name for name in listed if name and (ROOT / name).is_file()]
    # Assembled, so that this file does not name them either.
    folders = "|".join(["work", "root", "home", "tmp", "farm", "opt", "Users"])
    hosts = "|".join([r"pypi\.org", r"pythonhosted\.org", r"pytorch\.org/whl"])
    place = re.compile(rf"(?<![\w.*)}}])/(?:{folders})/|\bshared" + rf"/|{hosts}")
    named = []
    for file in files:
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        named += [f"{file.relative_to(ROOT)}: {match.group()}" for match in place.finditer(text)]
    assert len(files) > 20
    assert named == []
