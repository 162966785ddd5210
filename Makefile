# Bare `make` lists what there is. PYTHON chooses the interpreter of a new .venv, N the processes of a run.
PYTHON ?= python3
N ?= auto
BIN := .venv/bin
STAMP := .venv/installed

.DEFAULT_GOAL := help
.PHONY: help setup verify test power lint format format-check types gpu triton-versions wheel ci clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) ## create .venv with the pinned versions

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -c 'import sys; assert sys.version_info >= (3, 11), f"Python 3.11 or newer is needed, not {sys.version}"'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[kernels,dev]'
	touch $(STAMP)

verify: $(STAMP) ## judge numpy-blocked and PyTorch's math and flash attention, and show the table
	$(BIN)/attncheck verify numpy-blocked torch-sdpa-math torch-sdpa-flash

test: $(STAMP) ## run the test suite in parallel
	$(BIN)/python -m pytest -n $(N)

power: $(STAMP) ## plant every fault of the zoo, and write docs/POWER.md (a quarter of an hour)
	$(BIN)/attncheck power --markdown docs/POWER.md

lint: $(STAMP) ## ruff check
	$(BIN)/ruff check .

format: $(STAMP) ## format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix --quiet .

format-check: $(STAMP) ## fail where the code is not formatted
	$(BIN)/ruff format --check .

types: $(STAMP) ## mypy, strict
	$(BIN)/mypy

gpu: ## run the Triton kernel on a GPU: right, repeatable, how fast; needs torch, triton and numpy, no .venv
	$(PYTHON) benchmarks/gpu.py --out benchmarks/results/gpu.json

triton-versions: ## run the Triton tests with Triton 3.6.0 in a .venv of its own
	sh benchmarks/triton_versions.sh

wheel: $(STAMP) ## build sdist and wheel, and check what the wheel would install
	rm -rf dist
	$(BIN)/python -m build --outdir dist .
	$(BIN)/python tests/wheel_contents.py dist/*.whl

ci: test lint format-check types wheel ## all that .ci/run runs

clean: ## remove what the targets above made, except .venv
	rm -rf dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis
