# make demo   install, sweep a gate on the embedded model in vLLM on the CPU, show what was found
# make demo-gateway  two vLLM servers and a stub behind a gateway, on the CPU, about five minutes; what it won
# make quick  lint, and the unit and contract tests that take no seconds each
# make test   install, lint, and run every test that this machine can run; says how long each part took
# make mutants  small faults in the code, one by one: which of them the tests notice (hours; tests/mutation/README.md)
# make browser  install what the tests of the page need (Chromium, axe-core); without them they are skipped
# make docs   the pages of docs/ into site/, without a network; fails on a link that leads nowhere
# make prometheus  install what the test of the metrics needs (Prometheus); without it that test is skipped
# make lint   ruff, the direction of imports, mypy
# make fresh  both installs in fresh environments: sizes, times, and vLLM beside the plugin under an unknown version
# make sky  whether SkyPilot takes infra/selfspec.yaml
# Needs Python 3.11+ (PYTHON=python3.12 picks one), make and pip.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
RESULTS ?= results
JOBS ?= 2
INSTALLED := $(VENV)/.installed

LINT := $(BIN)/ruff check . && $(BIN)/lint-imports --no-logo && $(BIN)/mypy
PYTEST := $(BIN)/python -m pytest
# Tests that need no engine, on JOBS processes; whoever has nothing left to do takes over from the other.
SIDE_BY_SIDE := -n $(JOBS) --dist worksteal
# Tests that start engines: a file stays in one process, which keeps what its tests share.
BY_FILE := -n $(JOBS) --dist loadfile
TIMES := $(VENV)/.times
MUTANTS ?= costs gates settings v1 lengths vocabulary weights heads v2

# $(call timed,NAME,COMMAND): run a part, and note how long it took.
define timed
@begun=$$(date +%s); $(2) && echo "$(1) $$(($$(date +%s) - begun)) s" >>$(TIMES)
endef
summary = @awk '{ print; all += $$2 } END { print "all", all, "s" }' $(TIMES)

.PHONY: demo demo-gateway quick quick-lint quick-tests test mutants docs lint fresh install browser prometheus sky wheel clean

demo: $(INSTALLED)
	$(BIN)/selfspec sweep gate=varH tau_v=4,5,6 results_dir=$(RESULTS)
	$(BIN)/selfspec report results_dir=$(RESULTS)

demo-gateway: $(INSTALLED)
	$(BIN)/selfspec gateway demo results_dir=$(RESULTS)

quick: $(INSTALLED)
	@rm -f $(TIMES)
	$(call timed,all,$(MAKE) -j2 -O --no-print-directory quick-lint quick-tests)
	@cat $(TIMES)

quick-lint: $(INSTALLED)
	$(call timed,lint,$(LINT))

quick-tests: $(INSTALLED)
	$(call timed,unit+contract,$(PYTEST) tests/unit tests/gateway tests/contract -m "not slow" $(SIDE_BY_SIDE) --durations=10)

test: $(INSTALLED)
	@rm -f $(TIMES)
	$(call timed,lint,$(LINT))
	$(call timed,unit,$(PYTEST) tests/unit tests/gateway $(SIDE_BY_SIDE) --durations=10)
	$(call timed,contract,$(PYTEST) tests/contract)
	$(call timed,gpu,$(PYTEST) tests/gpu)
	$(call timed,browser,$(PYTEST) tests/browser)
	$(call timed,engine,$(PYTEST) tests/engine $(BY_FILE) --durations=20)
	$(summary)

# Takes up where it was stopped; a suite that is done costs its tests once. Lets everything else on the machine go first.
mutants: $(INSTALLED)
	for suite in $(MUTANTS); do OMP_NUM_THREADS=1 nice -n 19 $(BIN)/python tests/mutation/run.py $$suite || exit 1; done
	$(BIN)/python tests/mutation/report.py

docs: $(INSTALLED)
	$(BIN)/mkdocs build --strict

lint: $(INSTALLED)
	$(LINT)

fresh:
	$(PYTHON) packaging/fresh_install.py --vllm

install: $(INSTALLED)

$(INSTALLED): pyproject.toml requirements-cpu.txt constraints-cpu.txt $(wildcard packaging/absent/*/pyproject.toml)
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "Python 3.11 or later is needed: make PYTHON=python3.12"'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints-cpu.txt -r requirements-cpu.txt
	touch $@

# What tests/browser needs beside the virtual environment: Debian's Chromium with its driver, and axe-core from npm.
browser:
	command -v chromium >/dev/null && command -v chromedriver >/dev/null || (apt-get update && apt-get install -y chromium chromium-driver)
	npm install --prefix .browser --no-save --no-audit --no-fund axe-core@4

# What tests/engine/test_prometheus.py needs: Prometheus and promtool, Debian's package.
prometheus:
	command -v prometheus >/dev/null && command -v promtool >/dev/null || (apt-get update && apt-get install -y prometheus)

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
