# make demo       prepare the demo's data and model, and train it (recipes/demo-cpu.yaml)
# make smollm2    fetch a real model of 135M parameters (93 MB), and train it for three steps (recipes/smollm2-135m-cpu.yaml)
# make test       all tests; make test-fast leaves out those that start Ray or vLLM, and further cases
# make test-gpu   the tests that need a GPU, in the environment of PYTHON (README.md says what it must hold)
# make lint       style and import directions
# make clean      remove the environments and what the demo made; runs/ stays
#
# The first call makes .venv from requirements/cpu.lock; later calls find it there until the lock changes. That is Python 3.11's;
# with PYTHON=python3.12 it is .venv-3.12, so that environments of several Pythons stand side by side.

PYTHON ?= python3
PYTHON_VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
ifeq ($(PYTHON_VERSION),)
$(error PYTHON=$(PYTHON) does not run; name a Python of 3.11 or later, as in: make demo PYTHON=python3.12)
endif
VENV := .venv$(addprefix -,$(filter-out 3.11,$(PYTHON_VERSION)))
BIN := $(VENV)/bin
LOCK := requirements/cpu.lock
# Named by what the environment is made from: a changed lock is another file, a touched one is not. In it, so that it goes with it.
STAMP := $(VENV)/.made-from-$(shell sha256sum $(LOCK) pyproject.toml | sha256sum | cut -c1-16)
TORCH := $(shell grep '^torch==' $(LOCK))
TORCH_INDEX := https://download.pytorch.org/whl/cpu
PIP := $(BIN)/python -m pip --disable-pip-version-check

# One compute thread a process: two in each of five processes on two cores were measured ten times slower.
export OMP_NUM_THREADS := 1
# Numbers that do not depend on the machine's best instruction set, so that golden values hold on every x86-64 with AVX2.
export ATEN_CPU_CAPABILITY := avx2
export ONEDNN_MAX_CPU_ISA := AVX2
export MKL_CBWR := AVX2
# Nothing here needs the network once the environment is made, but for the first `make smollm2`, which asks the package index only.
export HF_HUB_OFFLINE := 1
# These packages compute on the CPU, also where there is a GPU.
$(STAMP) demo smollm2 test test-fast lint: export CUDA_VISIBLE_DEVICES :=

.DEFAULT_GOAL := help
.PHONY: help env demo smollm2 test test-fast test-gpu lint clean

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

env: $(STAMP)

# PyTorch's index is asked only for torch, and only when the usual indexes lack the CPU build: where that host can't be
# reached, an extra index for all packages would cost a timeout for each of them. Last comes the build for CUDA, with the
# libraries that it needs to be imported; where no GPU is found it computes on the CPU as the other does.
$(STAMP):
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --no-deps '$(TORCH)' \
	    || $(PIP) install --quiet --no-deps --index-url $(TORCH_INDEX) '$(TORCH)' \
	    || $(PIP) install --quiet '$(TORCH:+cpu=)'
	grep -v '^torch==' $(LOCK) | $(PIP) install --quiet --no-deps -r /dev/stdin
	$(PIP) install --quiet --no-deps --no-build-isolation -e .
	@rm -f $(VENV)/.made-from-* && touch $@

demo: $(STAMP)
	$(BIN)/python recipes/demo/prepare.py
	$(BIN)/megarl train recipes/demo-cpu.yaml

smollm2: $(STAMP)
	$(BIN)/python recipes/smollm2/prepare.py
	$(BIN)/megarl train recipes/smollm2-135m-cpu.yaml

# Two at a time, handed out one by one: in batches, one process would wait for the other's long ones.
test: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist loadgroup

test-fast: $(STAMP)
	MEGARL_TEST_FAST=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m "not cluster and not gpu and not slow"

test-gpu:
	$(PYTHON) -m pytest tests/gpu

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/lint-imports

clean:
	rm -rf .venv .venv-* build .pytest_cache .ruff_cache .import_linter_cache .hypothesis *.egg-info
	find $(wildcard megarl tests recipes tools) -name __pycache__ -type d -prune -exec rm -rf {} +
