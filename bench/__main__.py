"""`python -m bench`: run the benchmark, then write its table and verdicts beside its JSON."""

import re
import subprocess
import sys
from pathlib import Path

from bench import report

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    """Everything in one run on this machine."""
    name = re.sub(r"[^a-z0-9]+", "-", report.machine().lower()).strip("-")
    file = RESULTS / f"pnp-{name}.json"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "bench",
        "-q",
        "-p",
        "no:xdist",
        "-W",
        "default",
        f"--benchmark-json={file}",
    ]
    subprocess.run([*command, "--benchmark-columns=min,median,rounds", *sys.argv[1:]], check=True)
    results = report.load(file)
    # The host's name and the single rounds are nobody's business.
    results["machine_info"] = {"machine": report.machine()}
    for entry in results["benchmarks"]:
        entry["stats"].pop("data", None)
    file.write_text(report.json.dumps(results, indent=1) + "\n")
    text = report.markdown(results) + "\n" + "".join(f"- {line}\n" for line in report.verdicts(results))
    file.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
