# Every target that needs .venv creates it first; nothing else has to be installed by hand.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: help setup demo test test-slow tiny wheel test-versions coverage fuzz kills mutation lint format docs bench matrix clean

help: ## list these targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

setup: .venv/.installed ## the virtual environment with everything in it

# torch is installed first and on its own: together with others, pip may choose a build with gigabytes of CUDA packages
.venv/.installed: pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) not found: install Python 3.11 or newer, or run make PYTHON=..."; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: setup ## outliers as they grow, what 8 bits cost, and how they go: five minutes, writes demo/report.html
	$(BIN)/python examples/demo

# COVERAGE=1 counts the lines of src that run, in every process the tests start, and fails below 90 %
test: setup ## every test except the slow ones
	$(BIN)/python -m pytest -n 2 $(if $(COVERAGE),--cov --cov-report=term)

coverage: ## the same, and how much of src it covers
	$(MAKE) test COVERAGE=1

fuzz: setup ## the fuzz tests with twenty times as many cases
	OUTEFFHOP_FUZZ=20 $(BIN)/python -m pytest -n 2 tests/hardening/test_fuzz_*.py

kills: setup ## kill commands at a hundred random moments, and compare their end with an undisturbed one
	$(BIN)/python tools/kills.py

mutation: setup ## how many faults in the source the tests notice; takes hours, resumes; writes benchmarks/results/
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,mutation]'
	$(BIN)/python tools/mutation.py --workers 2

test-slow: setup ## the long checks, some on a real checkpoint; more with OUTEFFHOP_DATA=folder
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,checkpoint]'
	$(BIN)/python -m pytest -n 2 -m slow

test-versions: setup ## the tests on the oldest and newest torch and transformers; creates environments of gigabytes
	$(BIN)/python tools/versions.py

tiny: setup ## every table and figure of the paper at tiny scale, on CPU, into build/tiny; takes hours, resumes if interrupted
	$(BIN)/outeffhop reproduce all --scale tiny --seeds 1 --workers 2 --out build/tiny

wheel: setup ## sdist and wheel into dist/, tested in an empty environment
	$(BIN)/python -m build --no-isolation
	$(BIN)/python -m pytest -m '' tests/packaging

lint: setup ## ruff and mypy
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: setup ## format the code with ruff
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: setup ## the documentation as a site, into build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

matrix: setup ## which models are served, against independent truths; writes docs/compatibility.md, resumes
	$(BIN)/python tools/matrix.py

DEVICE ?= cpu

bench: setup ## what all of it costs on this machine; writes benchmarks/results/ and the page of costs, resumes; DEVICE=cuda
	$(BIN)/python benchmarks/all.py --device $(DEVICE)
	$(BIN)/python docs/make_performance.py

clean: ## remove what the other targets made
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage .versions build dist
