"""Every kernel in every launch configuration, compiled for GPUs that need not be here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")
ROOT = Path(__file__).parents[1]
VERSION = tuple(map(int, triton.__version__.split(".")[:2]))
# In a few builds ptxas of Triton 3.6 and before keeps one float64, or two float32, on the stack.
MAX_SPILLS = 8 if VERSION <= (3, 6) else 0
# What every GPU has for a program without being asked: shared memory on sm_80 to sm_120 and, more, on gfx942 (64 KiB);
# registers on sm_80 to sm_120. A wavefront of gfx942 has up to 512 vector registers a lane, on one of four units.
SHARED_BYTES = 48 << 10
REGISTERS = 64 << 10
# A kernel that was decorated under the interpreter cannot be compiled.
ENVIRONMENT = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}


def run(*arguments: str) -> str:
    command = [sys.executable, "-m", *arguments]
    result = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "sm_120", "gfx942"])
def test_builds_without_spills_or_fences(arch: str) -> None:
    if VERSION == (3, 2) and arch not in ("sm_80", "sm_90"):
        pytest.skip("Triton 3.2 knows no GPU after sm_90, and takes ROCm's linker for an AMD one")
    builds = [json.loads(line) for line in run("bench.aot", "--arch", arch).splitlines()]
    assert {build["kernel"] for build in builds} >= {"soft_rank_forward", "soft_rank_backward"}
    assert [build for build in builds if build["spills"] > MAX_SPILLS] == []
    assert [build for build in builds if build["fences"] and build["kernel"].startswith("soft_")] == []
    assert all(build["int64_rows"] for build in builds)
    assert max(build["threads"] for build in builds) <= 1024
    assert max(build["shared"] for build in builds) <= SHARED_BYTES
    if arch == "gfx942":
        assert all(build["registers"] * -(-build["num_warps"] // 4) <= 512 for build in builds)
    else:
        # The hardware hands registers to a warp in units of 256: 8 a thread.
        assert all(-(-build["registers"] // 8) * 8 * build["threads"] <= REGISTERS for build in builds)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_common_path_stays_within_its_budget(direction: str) -> None:
    program = f"import json, bench.sass; print(json.dumps(bench.sass.loop_of({direction!r})._asdict()))"
    command = [sys.executable, "-c", program]
    output = subprocess.run(
        command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=True
    ).stdout
    loop = json.loads(output)
    # One exponential for four triples and one reciprocal for two: with less the script has counted another way.
    assert 0.75 <= loop["mufu"] <= 1
    assert 5 < loop["instructions"] <= 8
    assert loop["spills"] == 0
    assert loop["fences"] == 0
