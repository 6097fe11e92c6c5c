# make demo   install, sweep a gate on the embedded model in vLLM on the CPU, show what was found
# make test   install, lint, and run every test that this machine can run
# make lint   ruff, the direction of imports, mypy
# Needs Python 3.11+ (PYTHON=python3.12 picks one), make and pip.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
RESULTS ?= results
INSTALLED := $(VENV)/.installed

.PHONY: demo test lint install wheel clean

demo: $(INSTALLED)
	$(BIN)/selfspec sweep gate=varH tau_v=4,5,6 results_dir=$(RESULTS)
	$(BIN)/selfspec report results_dir=$(RESULTS)

test: lint
	$(BIN)/python -m pytest

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/mypy

install: $(INSTALLED)

$(INSTALLED): pyproject.toml requirements-cpu.txt constraints-cpu.txt $(wildcard packaging/absent/*/pyproject.toml)
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "Python 3.11 or later is needed: make PYTHON=python3.12"'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints-cpu.txt -r requirements-cpu.txt
	touch $@

wheel: $(INSTALLED)
	$(BIN)/python -m pip wheel --no-deps --wheel-dir dist .

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
