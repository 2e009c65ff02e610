"""The registry of the losses, for the tests."""

from bench.registry import LOSSES, LossCase

__all__ = ["LOSSES", "LossCase"]
