"""Everything about a GPU in one command: the tests that use it, each loss against float64, and the benchmark."""
