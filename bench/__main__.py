"""`python -m bench`: run the benchmarks, then write the table and the verdicts of each beside its JSON.

Names of benchmarks choose some of them; other arguments go to pytest.
"""

import importlib
import json
import subprocess
import sys
from pathlib import Path

from bench import report

RESULTS = Path(__file__).parent / "results"
BENCHMARKS = (
    "pnp",
    "large_classes",
    "proxy_anchor",
    "smoothap",
    "soprc",
    "histogram",
    "fastap",
    "pairs",
    "triplets",
    "infonce",
)


def main() -> None:
    """Each benchmark in one run on this machine."""
    chosen = [name for name in BENCHMARKS if name in sys.argv[1:]]
    options = [argument for argument in sys.argv[1:] if argument not in BENCHMARKS]
    for name in chosen or BENCHMARKS:
        run(name, options)


def file_name(benchmark: str) -> str:
    """Of the results of this machine."""
    return f"{benchmark.replace('_', '-')}-{report.slug(report.machine())}.json"


def run(name: str, options: list[str], folder: Path = RESULTS) -> None:
    """Measure, write the JSON and the Markdown into `folder`, and print the latter."""
    file = folder / file_name(name)
    command = [
        sys.executable,
        "-m",
        "pytest",
        f"bench/test_{name}.py",
        "-q",
        "-p",
        "no:xdist",
        "-W",
        "default",
        f"--benchmark-json={file}",
    ]
    subprocess.run([*command, "--benchmark-columns=min,median,rounds", *options], check=True)
    results = json.loads(file.read_text())
    # The host's name and the single rounds are nobody's business.
    results["machine_info"] = {"machine": report.machine()}
    for entry in results["benchmarks"]:
        entry["stats"].pop("data", None)
    file.write_text(json.dumps(results, indent=1) + "\n")
    text = report.text(importlib.import_module(f"bench.{name}"), results)
    file.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
