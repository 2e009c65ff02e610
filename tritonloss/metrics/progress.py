"""What a long call tells of its progress: to a function, or to a bar of tqdm."""

import contextlib
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

Report = Callable[[int, int], Any]


def check_progress(progress: Any) -> None:
    """A function, a bool or None; tqdm must be there for True."""
    if progress is True:
        if importlib.util.find_spec("tqdm") is None:
            raise ModuleNotFoundError(
                "progress=True needs tqdm: install tritonloss[metrics], or pass a function of (done, total)"
            )
    elif not (progress is None or progress is False or callable(progress)):
        raise TypeError(f"progress must be a function of (done, total), a bool or None, got {progress!r}")


@contextlib.contextmanager
def reporting(progress: Any, total: int, *, shows_bar: bool) -> Iterator[Report]:
    """A function to call with (done, total); a bar is closed at the end. Only a process that `shows_bar` has one."""
    if progress is True and shows_bar:
        with importlib.import_module("tqdm").tqdm(total=total, unit=" queries") as bar:
            yield lambda done, total: bar.update(done - bar.n)
    elif callable(progress):
        yield progress
    else:
        yield lambda done, total: None
