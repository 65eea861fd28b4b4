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
.PHONY: help demo test test-fast test-frameworks test-package test-versions docs check format clean

help:  ## say what can be made
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(READY)  ## install, then race twelve algorithms on a virtual cluster of unlike workers
	$(BIN)/offbeat race $(DEMO) --report report.html

test: check  ## install, then every check and every test
	$(BIN)/python -m pytest -m "not real" --numprocesses 2
	$(BIN)/python -m pytest -m real

test-fast: $(READY)  ## the tests that need no other process, in under a minute
	$(BIN)/python -m pytest -m "not real and not slow" --numprocesses 2

test-frameworks: $(READY)  ## install Lightning, Accelerate, transformers and Ray, and test them
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,frameworks]'
	$(BIN)/python -m pytest -m frameworks

docs: $(READY)  ## install mkdocs-material, and build the docs as a site, strictly: site/index.html
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,docs]'
	$(BIN)/mkdocs build --strict

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
