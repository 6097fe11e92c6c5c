# make demo   install, sweep a gate on the embedded model in vLLM on the CPU, show what was found
# make demo-gateway  two vLLM servers behind a gateway, on the CPU, about five minutes
# make quick  lint, and the unit and contract tests that take no seconds each
# make test   install, lint, and run the tests; ends with how long each part took, what was skipped, and why
# make nightly  what is only worth running at night and before a release (CONTRIBUTING.md)
# make mutants  small faults in the code, one by one: which of them the tests notice (hours; tests/mutation/README.md)
# make programs  install what some tests need beside Python, where apt and npm are at hand: Chromium, axe-core, Prometheus, g++, zsh, fish
# make docs   the pages of docs/ into site/, without a network; fails on a link that leads nowhere
# make lint   ruff, the direction of imports, mypy
# make fresh  the wheel in three fresh environments: sizes, the README's commands, and a vLLM of an unknown version
# make sky  whether SkyPilot takes infra/selfspec.yaml
# Needs Python 3.11+ (PYTHON=python3.12 picks one), make and pip.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
RESULTS ?= results
JOBS ?= 2
INSTALLED := $(VENV)/.installed

LINT := $(BIN)/ruff check . && $(BIN)/ruff format --check --quiet . && $(BIN)/lint-imports --no-logo && $(BIN)/mypy
PYTEST := $(BIN)/python -m pytest
# Tests that need no engine, on one process more than JOBS, because many wait for servers and clocks; whoever has nothing
# left to do takes over from the others.
SIDE_BY_SIDE := -n $(shell expr $(JOBS) + 1) --dist worksteal
# Tests that start engines: a file stays in one process, which keeps what its tests share. Long files begin first
# (tests/engine/conftest.py); without the option those with many tests would.
BY_FILE := -n $(JOBS) --dist loadfile --no-loadscope-reorder
REPORTS := $(VENV)/.reports
GRID := tests/engine/test_lossless.py tests/engine/test_sampling.py
MUTANTS ?= reference costs gates settings v1 lengths vocabulary weights heads v2

# $(call timed,NAME,COMMAND): run a part, and note how long it took. $(call tests,NAME,ARGUMENTS): a part of pytest's.
define timed
@begun=$$(date +%s); $(2) && echo $$(($$(date +%s) - begun)) >$(REPORTS)/$(1).seconds
endef
tests = $(call timed,$(1),$(PYTEST) -m "not nightly" --junitxml=$(REPORTS)/$(1).xml $(2))
begin = @rm -rf $(REPORTS) && mkdir -p $(REPORTS) && touch $(REPORTS)/begun
side_by_side = $(MAKE) -j$(JOBS) -O --no-print-directory
summary = @$(BIN)/python tests/summary.py $(REPORTS)

.PHONY: demo demo-gateway quick quick-tests test part-lint part-install part-contract part-gpu part-browser part-v2 v2-on releases nightly mutants docs lint fresh install programs sky wheel clean

demo: $(INSTALLED)
	$(BIN)/selfspec sweep gate=varH tau_v=4,5,6 results_dir=$(RESULTS)
	$(BIN)/selfspec report results_dir=$(RESULTS)

demo-gateway: $(INSTALLED)
	$(BIN)/selfspec gateway demo results_dir=$(RESULTS)

quick: $(INSTALLED) programs
	$(begin)
	@$(side_by_side) part-lint quick-tests
	$(summary)

quick-tests: $(INSTALLED)
	$(call timed,unit+contract,$(PYTEST) tests/unit tests/gateway tests/contract -m "not slow" $(SIDE_BY_SIDE) \
	    --durations=10 --junitxml=$(REPORTS)/unit+contract.xml)

# Parts of one process each run beside each other, the others on all cores.
test: $(INSTALLED) programs
	$(begin)
	@$(side_by_side) part-lint part-install part-contract part-v2 part-gpu part-browser
	$(call tests,unit,tests/unit tests/gateway $(SIDE_BY_SIDE) --durations=10)
	$(call tests,engine,tests/engine --ignore=tests/engine/v2 $(BY_FILE) --durations=20)
	$(summary)

part-lint: $(INSTALLED)
	$(call timed,lint,$(LINT))

# Wheel and sdist, and the plugin alone in a fresh environment. `make fresh` does the rest.
part-install: $(INSTALLED)
	$(call timed,install,$(BIN)/python packaging/fresh_install.py --only serving >$(REPORTS)/install.json)

# Sources of supported releases that are not installed are read by contract tests.
quick-tests part-contract: releases

releases: $(INSTALLED)
	@$(BIN)/python tests/contract/vllm_source.py

part-contract part-gpu part-browser: part-%: $(INSTALLED)
	$(call tests,$*,tests/$*)

# The V2 model runner in Triton's interpreter, which needs a process of its own (tests/engine/v2/conftest.py).
part-v2: $(INSTALLED)
	$(call tests,v2,tests/engine/v2 --durations=10)

# The same with a release of vLLM that has no build for CPUs: `make v2-on RELEASE=0.33.0`.
v2-on: $(INSTALLED)
	PYTHONPATH=$$($(BIN)/python tests/contract/vllm_source.py $(RELEASE) --runnable) $(PYTEST) tests/engine/v2

# Every gate over every prompt of every architecture, 4,096 seeds, and the tests that are marked nightly.
nightly: export SELFSPEC_FULL = 1
nightly: export SELFSPEC_SEEDS = 4096
nightly: $(INSTALLED) programs
	$(begin)
	$(call timed,grid,$(PYTEST) --junitxml=$(REPORTS)/grid.xml $(GRID) $(BY_FILE))
	$(call timed,nightly,$(PYTEST) -m nightly --junitxml=$(REPORTS)/nightly.xml tests $(BY_FILE))
	$(call timed,v2-on-0.33.0,$(MAKE) v2-on RELEASE=0.33.0)
	$(summary)

# Takes up where it was stopped; a suite that is done costs its tests once. Lets everything else on the machine go first.
mutants: $(INSTALLED)
	for suite in $(MUTANTS); do OMP_NUM_THREADS=1 nice -n 19 $(BIN)/python tests/mutation/run.py $$suite || exit 1; done
	$(BIN)/python tests/mutation/run.py

docs: $(INSTALLED)
	$(BIN)/mkdocs build --strict

lint: $(INSTALLED)
	$(LINT)

fresh:
	$(PYTHON) packaging/fresh_install.py --everything

install: $(INSTALLED)

$(INSTALLED): pyproject.toml requirements-cpu.txt constraints-cpu.txt $(wildcard packaging/absent/*/pyproject.toml)
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "Python 3.11 or later is needed: make PYTHON=python3.12"'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints-cpu.txt -r requirements-cpu.txt
	touch $@

programs: $(INSTALLED)
	$(BIN)/python tests/programs.py

# Does SkyPilot's own parser take infra/selfspec.yaml? In an environment of its own, because it wants older packages.
sky:
	$(PYTHON) -m venv .sky
	.sky/bin/python -m pip install -q --disable-pip-version-check skypilot==0.14.1
	.sky/bin/python -c 'import sky, yaml; print(sky.Task.from_yaml_config(yaml.safe_load(open("infra/selfspec.yaml")), \
	    env_overrides=[("SELFSPEC_BUCKET", "bucket"), ("SELFSPEC_WORDS", "layer=3")]).resources)'

wheel: $(INSTALLED)
	$(BIN)/python -m pip wheel --no-deps --wheel-dir dist .

clean:
	rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
