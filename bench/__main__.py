"""`python -m bench`: run the benchmarks, then write the table and the verdicts of each beside its JSON.

Names of benchmarks choose some of them; other arguments go to pytest.
"""

import json
import subprocess
import sys
from pathlib import Path

from bench import report
from bench.cases import BENCHMARKS

RESULTS = Path(__file__).parent / "results"


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
        "bench/test_cases.py",
        "-k",
        name,
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
    text = report.text(BENCHMARKS[name], results)
    file.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
