# Verbs for people and for CI; `make help` lists them. On a bare machine (python3 >= 3.10 with venv, make, git) each verb
# sets up first what it needs. Set-up is cached: a stamp file carries the hash of what was installed.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules --no-print-directory

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# More arguments for pytest: make quick PYTEST_ARGS="-k wire"
PYTEST_ARGS ?=
# Most tests wait for processes that they started; four at a time fit two cores.
PARALLEL ?= --numprocesses 4 --dist worksteal
# Those with MindSpore start jobs of four ranks, and share one within a file.
PARALLEL_JOBS ?= --numprocesses 2 --dist loadfile
# More arguments for the benchmarks; their figures go to bench-results.json.
BENCH_ARGS ?=
# A folder for JUnit reports of `make test`.
REPORTS ?=
report = $(if $(REPORTS),--junitxml=$(REPORTS)/$(1).xml)

# How often, and with which choices, the random killer kills.
N ?= 200
SEED ?= $(shell date +%s)

VERSION := import sys; print(sys.version_info[:2])
# What an installation depends on: the checkout, the Python, and of pyproject.toml the dependencies, the commands and the package map.
# Not the whole file: a new version number or another ruff setting installs nothing. Comments and blanks do not count.
REQUIREMENTS := $(shell { pwd -P; $(PYTHON) -c '$(VERSION)'; awk ' \
	  /^\[/ { table = $$1 } \
	  /^(dependencies|requires-python) *=/ { inside = 1 } \
	  table ~ /^\[(build-system|project\.optional-dependencies|project\.scripts|tool\.setuptools.*)\]/ || inside { print } \
	  /\]/ || /^requires-python/ { inside = 0 }' pyproject.toml \
	| sed -E 's/(^|[[:space:]]+)\#.*//; /^[[:space:]]*$$/d'; } 2>/dev/null | sha256sum | cut -c1-16)
LIGHT := $(VENV)/.rankd-light-$(REQUIREMENTS)
MINDSPORE := $(VENV)/.rankd-mindspore-$(REQUIREMENTS)

# Completes a virtual environment whose making was interrupted; makes one of another Python anew. What is not a virtual
# environment is left alone.
define fresh_venv
	if [ -f $(VENV)/pyvenv.cfg ]; then \
	  [ "$$($(BIN)/python -c '$(VERSION)' 2>&1)" = "$$($(PYTHON) -c '$(VERSION)')" ] || clear=--clear; \
	elif [ -n "$$(ls -A $(VENV) 2>/dev/null)" ]; then \
	  echo "$(VENV) is not a virtual environment and not empty; choose another: make VENV=…" >&2; exit 2; \
	fi; \
	$(PYTHON) -m venv $${clear:-} $(VENV)
endef

comma := ,
# Installs without a word; what pip has said is shown, all of it, when it fails.
define install
	log=$$(mktemp); \
	$(BIN)/python -m pip install --disable-pip-version-check $(1) >"$$log" 2>&1 || { cat "$$log" >&2; rm -f "$$log"; exit 1; }; \
	rm -f "$$log"
endef

# Type checkers and import-linter find the import names (rankd.agent) through links to the folders (agent).
PACKAGES := agent collector profiler_ctl
LINKS := $(PACKAGES:%=.typecheck/rankd/%)

.PHONY: help demo test quick lint types torture bench clean

help:  ## list the verbs
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-7s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: $(MINDSPORE)  ## train on 4 ranks with MindSpore on CPU and watch merged.log grow (about a minute)
	@$(BIN)/python deploy/example/demo.py

test: $(MINDSPORE) $(LINKS)  ## all tests, real MindSpore training included
	@$(BIN)/python -m pytest -m "not mindspore" $(PARALLEL) $(call report,light) $(PYTEST_ARGS)
	@$(BIN)/python -m pytest -m mindspore $(PARALLEL_JOBS) $(call report,mindspore) $(PYTEST_ARGS)

quick: $(LIGHT) $(LINKS)  ## the tests that need no MindSpore and take under a minute
	@$(BIN)/python -m pytest -m "not mindspore and not slow" --hypothesis-profile=quick $(PARALLEL) $(PYTEST_ARGS)

lint: $(LIGHT) $(LINKS)  ## ruff (rules and format) and the import contracts
	@$(BIN)/python -m ruff check .
	@$(BIN)/python -m ruff format --check .
	@PYTHONPATH=.typecheck $(BIN)/python -c 'from importlinter.cli import lint_imports_command as c; c()' --no-cache

types: $(LIGHT) $(LINKS)  ## mypy --strict
	@$(BIN)/python -m mypy --strict .typecheck/rankd tests deploy

torture: $(LIGHT) $(LINKS)  ## kill collectors N times at random (and a fifth as many ranks): make torture N=1000 SEED=7
	@$(BIN)/python -m tests.faults.torture --kills $(N) --seed $(SEED)

bench: $(MINDSPORE) $(LINKS)  ## every benchmark, as one table with its bounds: make bench BENCH_ARGS="--quick --only collector"
	@$(BIN)/python -m tests.bench.run $(BENCH_ARGS)

clean:  ## remove what the verbs made, except the virtual environment and the demo's output
	@rm -rf .typecheck build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	@find $(PACKAGES) tests deploy -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

# Old stamps go first and the new one comes last, so that an interrupted installation is done again.
$(LIGHT):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and f"rankd needs Python 3.10 or newer, this is {sys.version}")'
	@rm -f $(VENV)/.rankd-*
	@$(call fresh_venv)
	@echo "installing rankd and its development tools into $(VENV) …"
	@$(call install,'pip>=23.1')
	@$(call install,--editable '.[dev]')
	@touch $@

$(MINDSPORE): $(LIGHT)
	@echo "installing MindSpore into $(VENV) (a wheel of 800 MB, some minutes) …"
	@$(call install,--editable '.[dev$(comma)mindspore]')
	@touch $@

$(LINKS): .typecheck/rankd/%:
	@mkdir -p $(@D)
	@ln -sfn ../../$* $@
