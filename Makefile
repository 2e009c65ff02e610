PYTHON ?= python3
ARGS ?=

VENV := .venv
CONSTRAINTS := constraints.txt
PY := $(VENV)/bin/python

.PHONY: train test test-oldest bench bench-compare bench-plots gpu-check docs format clean
.DELETE_ON_ERROR:

train: $(VENV)/.examples
	$(PY) examples/train.py $(ARGS)

test: $(VENV)/.test
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) -m mypy tests/typed_use.py
	$(PY) -m pytest -n 2 $(ARGS)

# The tests with the oldest torch and triton, in an environment of its own: 6 GB with the CUDA build of torch.
test-oldest: PYTHON = python3.10
test-oldest:
	$(MAKE) VENV=.venv-oldest CONSTRAINTS=constraints-oldest.txt PYTHON=$(PYTHON) .venv-oldest/.test
	.venv-oldest/bin/python -m pytest -n 2 $(ARGS)

bench: $(VENV)/.bench
	$(PY) -m bench $(ARGS)

# Exit status 1 if a ratio is worse than that of the committed results of this machine.
bench-compare: $(VENV)/.bench
	$(PY) -m bench.compare $(ARGS)

bench-plots: $(VENV)/.bench
	$(PY) -m bench.plots $(ARGS)

# For a machine with a GPU, whose Python has torch and triton: nothing is installed or downloaded.
gpu-check:
	$(PYTHON) -m bench.gpu_check $(ARGS)

# The user guide, as HTML in site/.
docs: $(VENV)/.docs
	$(PY) -m mkdocs build $(ARGS)

format: $(VENV)/.test
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

# Everything made here except the environment: remove $(VENV) by hand to start from nothing.
clean:
	rm -rf build dist site *.egg-info .benchmarks .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name $(VENV) -prune -o -type d -name __pycache__ -exec rm -rf {} +

# One stamp for each extra; all install into the same environment.
$(VENV)/.examples $(VENV)/.test $(VENV)/.bench $(VENV)/.docs: $(VENV)/.%: $(VENV)/pyvenv.cfg pyproject.toml $(CONSTRAINTS)
	$(PY) -m pip install -c $(CONSTRAINTS) -e ".[$*]"
	touch $@

$(VENV)/pyvenv.cfg:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
