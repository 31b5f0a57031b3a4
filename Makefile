# bigpool's commands. Each makes the virtual environment it needs; the first time takes a few minutes (torch).
.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help prove test test-gpu nightly test-oldest audit lint types clean

PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
JOBS ?= 2
ALONE = tests/test_pools_gpu.py tests/test_bench_gpu.py
ARGS ?=
# What `test-oldest` runs with. A CUDA build of torch pins its own Triton: there, pass TORCH_OLDEST=2.11.0.
TRITON_OLDEST ?= 3.6.0
TORCH_OLDEST ?= 2.13.0

EXTRA = $(shell nvidia-smi -L >/dev/null 2>&1 && echo kernels || echo cpu)
INSTALL = "$(VENV)/bin/python" -m pip install --disable-pip-version-check
NEEDS = Makefile pyproject.toml $(CONSTRAINTS)

help:  ## show this list
	@echo "Usage: make TARGET [PYTHON=python3] [ARGS='...']"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-12s %s\n", $$1, $$2 }' Makefile

prove: $(VENV)/.run-installed  ## prove that the kernels are right at any pool size; ARGS go to `bigpool prove`
	"$(VENV)/bin/bigpool" prove $(ARGS)

test: $(VENV)/.dev-installed  ## run all tests that need no GPU; ARGS go to pytest
	"$(VENV)/bin/python" -m pytest -n $(JOBS) -m "not gpu" $(ARGS)

test-gpu: $(VENV)/.dev-installed  ## run the tests that need a GPU, JOBS at a time; alone those that fill the card or time
	"$(VENV)/bin/python" -m pytest -n $(JOBS) -m gpu $(patsubst %,--ignore=%,$(ALONE)) $(ARGS)
	"$(VENV)/bin/python" -m pytest -n 0 -m gpu $(ALONE) $(ARGS)

nightly: $(VENV)/.dev-installed  ## every launch for every card, compiled; thousands of random calls; Hopper's warps in many orders; every mutant
	BIGPOOL_COMPILE_ALL=1 BIGPOOL_RANDOM_EXAMPLES=3000 BIGPOOL_SEEDS=12 BIGPOOL_MUTANTS=all "$(VENV)/bin/python" -m pytest -n $(JOBS) \
		tests/test_compile_targets.py tests/test_compile_targets_prefill.py tests/test_verify_random.py tests/test_prefill_random.py \
		tests/test_sm90_cpu.py tests/test_mutations.py $(ARGS)

test-oldest: build/constraints-oldest.txt  ## the same tests with the oldest supported Triton
	$(MAKE) test VENV=.venv-oldest CONSTRAINTS=$<

audit: $(VENV)/.dev-installed  ## audit bigpool's own kernels for 32-bit indices; ARGS go to `bigpool audit`
	"$(VENV)/bin/bigpool" audit src/bigpool/kernels $(ARGS)

lint: $(VENV)/.dev-installed  ## check style and format
	"$(VENV)/bin/ruff" check .
	"$(VENV)/bin/ruff" format --check .

types: $(VENV)/.dev-installed  ## check types of everything but the kernels
	"$(VENV)/bin/mypy"

clean:  ## remove environments, caches and builds
	rm -rf .venv .venv-oldest build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

$(VENV)/.run-installed: $(NEEDS) | $(VENV)/bin/python
	$(INSTALL) -c $(CONSTRAINTS) -e '.[$(EXTRA)]'
	@touch $@

$(VENV)/.dev-installed: $(NEEDS) | $(VENV)/bin/python
	$(INSTALL) -c $(CONSTRAINTS) -e '.[$(EXTRA),dev]'
	@touch $(VENV)/.run-installed $@

$(VENV)/bin/python:
	@command -v "$(PYTHON)" >/dev/null 2>&1 || { \
	  echo "PYTHON: expected Python 3.10 or newer, got no '$(PYTHON)'; install Python, or pass make PYTHON=/path/to/python3" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "PYTHON: expected Python 3.10 or newer, got $$("$(PYTHON)" --version 2>&1); pass make PYTHON=python3.12 or the like" >&2; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "PYTHON: expected the modules venv and ensurepip, got a Python without them; on Debian and Ubuntu run apt-get install python3-venv" >&2; exit 1; }
	"$(PYTHON)" -m venv "$(VENV)"
	$(INSTALL) --quiet 'pip>=22'

build/constraints-oldest.txt: constraints.txt Makefile
	@mkdir -p build
	sed -e 's/^triton[^a-z].*/triton==$(TRITON_OLDEST)/' -e 's/^torch[^a-z].*/torch==$(TORCH_OLDEST)/' constraints.txt > $@
