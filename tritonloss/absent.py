"""Errors for names of pytorch-metric-learning that are not here."""

from collections.abc import Callable, Sequence
from typing import NoReturn


def attributes_of(module: str, names: Sequence[str]) -> Callable[[str], NoReturn]:
    """`__getattr__` of a module: an AttributeError that lists `names`, what the module has."""

    def missing(name: str) -> NoReturn:
        text = f"module {module!r} has no attribute {name!r}"
        if not name.startswith("_"):
            original = module.replace("tritonloss", "pytorch_metric_learning", 1)
            text += f": there are {', '.join(names)}; a {name} of {original} can stand beside them"
        raise AttributeError(text)

    return missing
