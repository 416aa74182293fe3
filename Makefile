# Two commands do all the set-up:  make serve   and   make test
#
#   make serve [ARGS="MODEL --port 8001"]   install Ferrule into .venv and serve (the embedded model by default)
#   make test                               everything that CI runs: lint, types, tests, coverage
#   make lint | unit | test-slow | docs     parts of it, and what takes minutes
#   make format                             rewrite the source as `make lint` wants it
#
# PYTHON is the interpreter that .venv is made with (3.11 to 3.13). JOBS is how many tests run at once.

PYTHON ?= python3
JOBS ?= 2
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
INSTALLED := $(VENV)/.installed
INSTALLED_TEST := $(VENV)/.installed-test
INSTALLED_DOCS := $(VENV)/.installed-docs
MANIFEST := pyproject.toml constraints.txt

.PHONY: serve install test lint format unit test-slow docs clean

serve: $(INSTALLED)
	$(BIN)/ferrule serve $(ARGS)

install: $(INSTALLED)

test: lint unit

lint: $(INSTALLED_TEST)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict core

format: $(INSTALLED_TEST)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# One thread per test process: JOBS of them share the machine.
unit test-slow: export OMP_NUM_THREADS = 1

unit: $(INSTALLED_TEST)
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --cov --cov-report=term:skip-covered --cov-fail-under=90

test-slow: $(INSTALLED_TEST)
	$(BIN)/python -m pytest -m slow

docs: $(INSTALLED_DOCS)
	$(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) site htmlcov .coverage .coverage.* .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || \
		{ echo "Ferrule needs Python 3.11 to 3.13; say make PYTHON=/path/to/python3.11" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(INSTALLED): $(MANIFEST) | $(BIN)/python
	$(PIP) -e .
	@touch $@

$(INSTALLED_TEST): $(MANIFEST) | $(BIN)/python
	$(PIP) -e '.[test]'
	@touch $@ $(INSTALLED)

$(INSTALLED_DOCS): $(MANIFEST) | $(BIN)/python
	$(PIP) -e '.[docs]'
	@touch $@ $(INSTALLED)
