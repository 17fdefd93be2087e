# `make demo` and `make test` set up .venv by themselves; nothing else needs installing.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: help setup demo test test-slow lint format bench clean

help: ## what can be made
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

setup: .venv/.installed ## the virtual environment with everything in it

# torch goes first and alone: asked for together with others, pip may take a build with gigabytes of CUDA packages
.venv/.installed: pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) not found: install Python 3.11 or newer, or say make PYTHON=..."; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: setup ## softmax against softmax1, the backends found here, and what they cost
	$(BIN)/python examples/demo.py

test: setup ## every test but the slow ones
	$(BIN)/python -m pytest -n 2

test-slow: setup ## the long checks, some on a real checkpoint; more with OUTEFFHOP_DATA=folder
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,checkpoint]'
	$(BIN)/python -m pytest -n 2 -m slow

lint: setup ## ruff and mypy
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: setup ## let ruff rewrite the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup ## attention's cost here against vanilla attention; writes benchmarks/results/
	$(BIN)/python benchmarks/attention.py

clean: ## remove what the other targets made
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
