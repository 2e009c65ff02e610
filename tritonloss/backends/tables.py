"""The configurations that were found for a device, as JSON on disk.

    {"format": 1, "device": "NVIDIA H200", "complete": true,
     "configurations": {"soft_rank_forward itemsize=4 BLOCK_P=4 ...": {"BLOCK_N": 512, "num_warps": 1}}}

A complete table was written ahead by `python -m tritonloss tune`, or ships with the package in the folder tables: the
device is not timed any more. One that is not complete grows with each result of timing. It lies in the folder named by
TRITONLOSS_TUNING_DIR, else in tritonloss within XDG_CACHE_HOME or ~/.cache. Nothing that is wrong with a file or a
folder is an error of a training step: a table that cannot be read is absent, a result that cannot be written is lost.
"""

import contextlib
import json
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

ENVIRONMENT_VARIABLE = "TRITONLOSS_TUNING_DIR"
FORMAT = 1
SHIPPED = Path(__file__).parent / "tables"


@dataclass
class Table:
    """Configurations by the key of `tuning.key`; complete: nothing is to be added by timing."""

    entries: dict[str, dict[str, int]]
    complete: bool

    def nearest(self, key: str) -> dict[str, int] | None:
        """The entry of the key, else that of the same key with the nearest n_bucket, the smaller of two."""
        if key not in self.entries and (found := re.search(r"\bn_bucket=(\d+)", key)):
            n_bucket = int(found[1])
            head, tail = key[: found.start(1)], key[found.end(1) :]
            for shift in range(1, 32):
                for other in (n_bucket >> shift, n_bucket << shift):
                    if (entry := self.entries.get(f"{head}{other}{tail}")) is not None:
                        return entry
        return self.entries.get(key)


def directory() -> Path | None:
    """Where results are kept; None for a user without a home."""
    if named := os.environ.get(ENVIRONMENT_VARIABLE):
        return Path(named)
    if cache := os.environ.get("XDG_CACHE_HOME"):
        return Path(cache) / "tritonloss"
    try:
        return Path.home() / ".cache" / "tritonloss"
    except RuntimeError:
        return None


def file_name(device: str) -> str:
    """ "NVIDIA H200" is kept in nvidia-h200.json."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") + ".json"


def read(file: Path) -> tuple[str, Table]:
    """The device and the table of a file. Raises OSError or ValueError where that is not one."""
    content = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"it is no table of format {FORMAT}")
    device, entries, complete = (content.get(name) for name in ("device", "configurations", "complete"))
    if (
        isinstance(device, str)
        and isinstance(complete, bool)
        and isinstance(entries, dict)
        and all(_is_configuration(entry) for entry in entries.values())
    ):
        return device, Table(entries, complete)
    raise ValueError("its entries are not those of a table")


def _is_configuration(entry: object) -> bool:
    return (
        isinstance(entry, dict)
        and set(entry) == {"BLOCK_N", "num_warps"}
        and all(type(value) is int for value in entry.values())
    )


def load(device: str) -> Table:
    """The table of a device: a complete one of the user, a shipped one, or what was timed so far; empty without any."""
    folder = directory()
    own = _read_or_none(folder / file_name(device), device) if folder else None
    if own and own.complete:
        return own
    return _read_or_none(SHIPPED / file_name(device), device) or own or Table({}, complete=False)


def _read_or_none(file: Path, device: str) -> Table | None:
    try:
        name, table = read(file)
    except (OSError, ValueError, RecursionError):
        return None
    return table if name == device else None


def add(device: str, key: str, config: dict[str, int]) -> None:
    """Add a timed result to the table on disk, with what other processes have added meanwhile. Fails silently."""
    if folder := directory():
        file = folder / file_name(device)
        table = _read_or_none(file, device) or Table({}, complete=False)
        if not table.complete:
            with contextlib.suppress(OSError):
                write(file, device, Table({**table.entries, key: config}, complete=False))


def write(file: Path, device: str, table: Table) -> None:
    """Write a table as a whole: who reads at the same time sees the old file or the new one. Raises OSError."""
    content = {
        "format": FORMAT,
        "device": device,
        "complete": table.complete,
        "configurations": dict(sorted(table.entries.items())),
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=file.name, suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            json.dump(content, stream, indent=1)
        os.replace(temporary, file)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
