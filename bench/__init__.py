"""Measurements: time and peak memory beside honest rivals, and the machine code of the kernels. See README.md."""
