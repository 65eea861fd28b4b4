# Both `make demo` and `make test` work on a fresh checkout: they make a virtual environment,
# install into it once, and run. `make help` lists the rest.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TORCHES ?= 2.6.0 2.13.0 2.15.0

# Families: all wait; a quorum; adaptive; local steps; among neighbours and in groups.
DEMO := sync lbbsp dropcompute:window_rounds=10 eager msync abs nonblocking \
        local waitfree dasgd wagma dpsgd \
        --task noisy --cluster mixed-4 --trials 6

.DEFAULT_GOAL := help
.PHONY: help demo test test-virtual test-real test-again test-fast test-frameworks test-package test-versions docs check format clean

help:  ## say what can be made
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 17

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(READY)  ## install, then race twelve algorithms on a virtual cluster of unlike workers
	$(BIN)/offbeat race $(DEMO) --report report.html

test: check test-virtual test-real  ## install, then every check and every test

test-virtual: $(READY)  ## the tests of one process
	$(BIN)/python -m pytest -m "not real" --numprocesses 2

test-real: $(READY)  ## the tests on several processes
	$(BIN)/python -m pytest -m real --numprocesses 2 --dist worksteal

test-again: $(READY)  ## those that have failed, one by one
	$(BIN)/python -m pytest --last-failed --last-failed-no-failures none

test-fast: $(READY)  ## in under a minute: a few cases of every test; none that is slow or needs other processes
	$(BIN)/python -m pytest -m "not real and not slow" --few 2 --numprocesses 2

test-frameworks: $(VENV)/.frameworks  ## install Lightning, Accelerate, transformers and Ray, and test them
	$(BIN)/python -m pytest -m frameworks

docs: $(VENV)/.docs  ## install mkdocs-material, and build the docs as a site, strictly: site/index.html
	$(BIN)/mkdocs build --strict

$(VENV)/.frameworks $(VENV)/.docs: $(VENV)/.%: $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,$*]'
	@touch $@

test-package: $(READY)  ## build the wheel, install it without developers' tools, and test it there
	rm -rf dist build/package
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .
	$(PYTHON) -m venv build/package
	build/package/bin/python -m pip install --quiet --constraint constraints.txt dist/*.whl
	OFFBEAT_INSTALLED=$(CURDIR)/build/package/bin/python $(BIN)/python -m pytest tests/test_package.py

test-versions: $(READY)  ## the oldest torch and the newest: run where there is a CPU build, else types
	$(BIN)/python tests/versions.py $(TORCHES)

check: $(READY)  ## lint, format, types, the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY)  ## put the code into shape
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove what make has made
	rm -rf $(VENV) build dist site .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
