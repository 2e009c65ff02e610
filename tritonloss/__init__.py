"""Exact metric-learning losses whose heavy part runs in Triton kernels."""

from tritonloss import distances, functional, losses, metrics, reducers, reference, regularizers, types
from tritonloss.backends import use_backend
from tritonloss.estimates import estimate

__version__ = "0.1.0"

__all__ = [
    "distances",
    "estimate",
    "functional",
    "losses",
    "metrics",
    "reducers",
    "reference",
    "regularizers",
    "types",
    "use_backend",
]
