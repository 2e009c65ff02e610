PYTHON ?= python3
ARGS ?=

VENV := .venv
PY := $(VENV)/bin/python

.PHONY: train test bench bench-compare bench-plots gpu-check docs format clean
.DELETE_ON_ERROR:

train: $(VENV)/.examples
	$(PY) examples/train.py $(ARGS)

test: $(VENV)/.test
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) -m pytest -n 2 $(ARGS)

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
$(VENV)/.examples $(VENV)/.test $(VENV)/.bench $(VENV)/.docs: $(VENV)/.%: $(VENV)/pyvenv.cfg pyproject.toml constraints.txt
	$(PY) -m pip install -c constraints.txt -e ".[$*]"
	touch $@

$(VENV)/pyvenv.cfg:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
