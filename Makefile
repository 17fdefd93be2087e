# `make demo` and `make test` set up .venv by themselves; nothing else needs installing.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: help setup demo test test-slow tiny wheel test-versions coverage fuzz lint format docs bench clean

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

demo: setup ## a small OPT with softmax and with softmax1: outliers, 8 bits; minutes; demo/report.html
	$(BIN)/python examples/demo.py

# COVERAGE=1 counts the lines of src that run, in every process the tests start, and fails below 90 %
test: setup ## every test but the slow ones
	$(BIN)/python -m pytest -n 2 $(if $(COVERAGE),--cov --cov-report=term)

coverage: ## the same, and which share of src it runs
	$(MAKE) test COVERAGE=1

fuzz: setup ## the fuzz tests, twenty times as many cases
	OUTEFFHOP_FUZZ=20 $(BIN)/python -m pytest -n 2 tests/hardening/test_fuzz_*.py

test-slow: setup ## the long checks, some on a real checkpoint; more with OUTEFFHOP_DATA=folder
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,checkpoint]'
	$(BIN)/python -m pytest -n 2 -m slow

test-versions: setup ## the tests on the oldest and newest torch and transformers; makes environments of gigabytes
	$(BIN)/python tools/versions.py

tiny: setup ## every table and figure of the paper at tiny scale, on CPU, into build/tiny; hours, can be killed and goes on
	$(BIN)/outeffhop reproduce all --scale tiny --seeds 1 --workers 2 --out build/tiny

wheel: setup ## sdist and wheel into dist/, tried in an empty environment
	$(BIN)/python -m build --no-isolation
	$(BIN)/python -m pytest -m '' tests/packaging

lint: setup ## ruff and mypy
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: setup ## let ruff rewrite the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: setup ## the documentation as a site, into build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

bench: setup ## attention's cost here against vanilla attention; writes benchmarks/results/
	$(BIN)/python benchmarks/attention.py

clean: ## remove what the other targets made
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage .versions build dist
