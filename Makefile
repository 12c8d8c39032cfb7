# Every target creates what it needs: `make demo` and `make test` work in a fresh clone.
# PYTHON: the interpreter to build .venv from.  WORKERS: parallel test processes.  ARGS: for pytest.
# TORCHES: versions for `make torch-versions`; gigabytes each where they are CUDA builds.
# CUDA_INDEX: where pip finds torch's CUDA build, PyPI by default.
# SECONDS, LOWERING (aten, inductor, both), SEED: for `make fuzz`.  MUTATIONS: for `make mutate`.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
WORKERS ?= $(shell n=$$(env -u OMP_NUM_THREADS nproc 2>/dev/null || echo 1); [ $$n -gt 8 ] && echo 8 || echo $$n)
SECONDS ?= 600
LOWERING ?= both
SEED ?= 0
MUTATIONS ?= 2000
TORCHES ?= 2.11.0 2.12.0 2.13.0 newest
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.memo-stamp
DOCS := .venv-docs
PACKAGE := .venv-package
PIP_INSTALL := bin/python -m pip install --quiet --disable-pip-version-check
EXAMPLES := .venv-examples
CUDA := .venv-cuda
CUDA_TORCH := 2.11.0
CUDA_INDEX ?= https://pypi.org/simple

# One thread per test process: several workers share the cores, and losses do not depend on them.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help setup demo examples quick test numerics-full fuzz opdb mutate check lint types layers sizes \
	format docs package torch-versions cuda-emulated gpu-dry-run \
	mutate-cuda clean

help:            ## this list
	@grep -E '^[a-z-]+: .*##|^[a-z-]+:  *##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 16

$(STAMP): requirements-dev.txt pyproject.toml tools/bootstrap.py
	@$(PYTHON) tools/bootstrap.py && touch $@

setup: $(STAMP)  ## create .venv with the pinned development versions

demo: $(STAMP)   ## train a small model, memo beside eager, and print the report
	$(BIN)/python examples/train_stdlib.py $(ARGS)

$(EXAMPLES)/.memo-stamp: requirements-dev.txt requirements-examples.txt pyproject.toml tools/bootstrap.py
	@$(PYTHON) tools/bootstrap.py --examples && touch $@

examples: $(EXAMPLES)/.memo-stamp ## Trainer, SFT, accelerate, PEFT, diffusers, Lightning, DPO, torchtitan: memo beside eager
	OMP_NUM_THREADS=1 $(EXAMPLES)/bin/python -m pytest -q -rs tests/examples $(ARGS)

quick: $(STAMP)  ## run the tests of single modules and of graphs: what to run while you work
	$(PYTEST) -m "not full" tests/unit tests/graph $(ARGS)

test: $(STAMP)   ## run the tests
	$(PYTEST) -m "not full" $(ARGS)

numerics-full: $(STAMP) ## what CI leaves out: every model through Inductor, every budget case (hours)
	rm -f numerics-full.xml
	$(PYTEST) -m full tests --junitxml=numerics-full.xml $(ARGS); status=$$?; \
	$(BIN)/python -m benchmarks.numerics_full numerics-full.xml && exit $$status

fuzz: $(STAMP)   ## random models against eager for SECONDS; what fails is in fuzz-failures/
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz --seconds $(SECONDS) --lowering $(LOWERING) \
		--seed $(SEED) $(ARGS)

opdb: $(STAMP)   ## torch's own databases of operators and modules, all of them, against eager
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.opdb --workers $(WORKERS) $(ARGS)

mutate: $(STAMP) ## MUTATIONS random mutations of plans: none that changes a number may pass
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.steps.mutations --mutations $(MUTATIONS) \
		--seed $(SEED) $(ARGS)

check: lint types layers sizes docs test  ## everything that CI runs

lint: $(STAMP)   ## ruff: rules and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)  ## mypy, strict
	$(BIN)/mypy

layers: $(STAMP) ## import-linter: who may import whom
	$(BIN)/lint-imports

sizes: $(STAMP)  ## limits on the size of files and functions
	$(BIN)/python tools/check_sizes.py

$(DOCS)/.memo-stamp: requirements-docs.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/$(PIP_INSTALL) -r requirements-docs.txt && touch $@

docs: $(DOCS)/.memo-stamp ## build the documentation into site/; open site/index.html
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=runtime $(DOCS)/bin/python -m mkdocs build --strict --quiet

$(PACKAGE)/.memo-stamp: requirements-package.txt
	$(PYTHON) -m venv $(PACKAGE)
	$(PACKAGE)/$(PIP_INSTALL) -r requirements-package.txt && touch $@

package: $(PACKAGE)/.memo-stamp ## wheel and sdist into dist/, checked, installed and measured
	rm -rf dist
	$(PACKAGE)/bin/python -m build --no-isolation
	$(PACKAGE)/bin/python -m twine check --strict dist/*
	$(PACKAGE)/bin/python tools/measure_install.py dist

torch-versions:  ## quick tests and core numerics with each of TORCHES, in an environment each
	$(PYTHON) tools/torch_versions.py $(TORCHES)

$(CUDA)/.memo-stamp: requirements-dev.txt pyproject.toml
	$(PYTHON) -m venv $(CUDA)
	$(CUDA)/$(PIP_INSTALL) --index-url $(CUDA_INDEX) torch==$(CUDA_TORCH)
	grep -vE '^(torch|triton|sympy|mpmath)==' requirements-dev.txt > $(CUDA)/pins.txt
	$(CUDA)/$(PIP_INSTALL) -r $(CUDA)/pins.txt
	$(CUDA)/$(PIP_INSTALL) --no-build-isolation --no-deps -e . && touch $@

cuda-emulated: $(CUDA)/.memo-stamp ## tests with torch's CUDA build on an emulated device (4.6 GB, no GPU)
	OMP_NUM_THREADS=1 $(CUDA)/bin/python -m tests.cuda_emulated $(ARGS)

mutate-cuda: $(CUDA)/.memo-stamp ## leaves 50 random waits, events, holds, lane orders of the runtime out: are they seen?
	OMP_NUM_THREADS=1 $(CUDA)/bin/python -m tests.cuda_emulated mutations --seed $(SEED) $(ARGS)

gpu-dry-run: $(CUDA)/.memo-stamp ## every part of benchmarks.gpu with a tiny model on the emulated device
	OMP_NUM_THREADS=1 $(CUDA)/bin/python -m tests.cuda_emulated run benchmarks.gpu --dry-run --no-save

format: $(STAMP) ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:           ## remove .venv and caches
	rm -rf $(VENV) $(DOCS) $(PACKAGE) $(EXAMPLES) $(CUDA) .venv-torch site .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
