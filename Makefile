# make demo       prepare the demo's data and model, and train it (recipes/demo-cpu.yaml)
# make test       all tests; make test-fast leaves out those that start Ray or vLLM
# make lint       style and import directions
# make clean      remove the environment and what the demo made; runs/ stays
#
# The first call makes .venv from requirements/cpu.lock; later calls find it there until the lock changes.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LOCK := requirements/cpu.lock
# Named by what the environment is made from: a changed lock is another file, a touched one is not.
STAMP := .stamps/env-$(shell sha256sum $(LOCK) pyproject.toml | sha256sum | cut -c1-16)
TORCH := $(shell grep '^torch==' $(LOCK))
TORCH_INDEX := https://download.pytorch.org/whl/cpu
PIP := $(BIN)/python -m pip --disable-pip-version-check

# One compute thread a process: two in each of five processes on two cores were measured ten times slower.
export OMP_NUM_THREADS := 1
# Numbers that do not depend on the machine's best instruction set, so that golden values hold on every x86-64 with AVX2.
export ATEN_CPU_CAPABILITY := avx2
export ONEDNN_MAX_CPU_ISA := AVX2
export MKL_CBWR := AVX2
# Nothing here needs the network once the environment is made.
export HF_HUB_OFFLINE := 1

.DEFAULT_GOAL := help
.PHONY: help env demo test test-fast lint clean

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

env: $(STAMP)

# PyTorch's index is asked only for torch, and only when the usual indexes lack the CPU build: where that host can't be
# reached, an extra index for all packages would cost a timeout for each of them.
$(STAMP):
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --no-deps '$(TORCH)' || $(PIP) install --quiet --no-deps --index-url $(TORCH_INDEX) '$(TORCH)'
	$(PIP) install --quiet --no-deps -r $(LOCK)
	$(PIP) install --quiet --no-deps --no-build-isolation -e .
	@mkdir -p .stamps && rm -f .stamps/env-* && touch $@

demo: $(STAMP)
	$(BIN)/python recipes/demo/prepare.py
	$(BIN)/megarl train recipes/demo-cpu.yaml

test: $(STAMP)
	$(BIN)/python -m pytest

test-fast: $(STAMP)
	MEGARL_TEST_FAST=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m "not cluster and not gpu"

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/lint-imports

clean:
	rm -rf $(VENV) .stamps build .pytest_cache .ruff_cache .import_linter_cache .hypothesis *.egg-info
	find megarl tests recipes tools -name __pycache__ -type d -prune -exec rm -rf {} +
