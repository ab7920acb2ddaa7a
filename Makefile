# Everything starts here. `make serve` and `make test` need Python >= 3.11 and make, nothing else.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
MODEL  ?= embedded
ARGS   ?=

.PHONY: serve test lint format docs bench gpu-test clean

serve: $(VENV)/.run
	$(BIN)/saccade serve $(MODEL) $(ARGS)

# One thread per worker: two workers on two cores.
test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The documentation as a site, in build/site. A broken link is an error.
docs: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: $(VENV)/.dev
	$(BIN)/saccade bench $(MODEL) $(ARGS)

# For a machine that has torch, Triton and a GPU, and where nothing can be installed. The first line needs those
# alone, the second also what these tests import: pytest, hypothesis, transformers. ARGS="-n 14" where there is xdist.
GPU_TESTS := tests/kernels tests/models tests/parity tests/worker tests/lod tests/encoder tests/kv_cache
gpu-test:
	PYTHONPATH=src $(PYTHON) -m bench.kernels --check
	PYTHONPATH=src $(PYTHON) -m pytest -m gpu $(GPU_TESTS) $(ARGS)

$(VENV)/bin/pip:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Saccade needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run: $(VENV)/bin/pip pyproject.toml constraints.txt
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(VENV)/.dev: $(VENV)/.run
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build src/*.egg-info
