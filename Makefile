# `make serve` and `make test` do everything on a machine with Python 3.11 or newer: the first run creates .venv.
#
#   make serve [MODEL=folder, GGUF file or hub id] [HOST=] [PORT=] [ARGS="--max-model-len 4096"]
#   make test       what CI runs          make test-full  the long forms too
#   make faults     every fault, at every moment      make soak   200,000 requests, and what is left of them
#   make lint       ruff and mypy         make bench      the offline engine bench [ARGS="--streams 1"]
#   make audit      known faults of what is installed; asks a network for them
#   make install    .venv alone           make clean      removes .venv and caches
#
# TORCH="..." on any of them replaces the choice of the torch build (scripts/install.sh says what it is).

SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help install serve test test-full faults soak lint format bench clean audit

# Empty and not taken from the environment: what is not given here is left to CELLSERVE_* and the config file.
MODEL =
HOST =
PORT =
ARGS =

# The first of these that is new enough makes .venv.
PYTHON ?= python3 python3.13 python3.12 python3.11

BIN := .venv/bin
READY := .venv/.ready
# One worker a core pays off up to the number of long test files.
WORKERS ?= $(shell n=$$(nproc 2>/dev/null || sysctl -n hw.ncpu); echo $$((n > 4 ? 4 : n)))
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

help:
	@sed -n '2,/^$$/s/^# \{0,1\}//p' Makefile

install: $(READY)

$(READY): pyproject.toml scripts/install.sh
	@test -x $(BIN)/python || for python in $(PYTHON); do \
		$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue; \
		$$python -m venv .venv && exit; \
		rm -rf .venv; echo "$$python cannot make a virtual environment (on Debian: apt-get install python3-venv)"; exit 1; \
	done; test -x $(BIN)/python || { echo "no Python 3.11 or newer here; name one: make PYTHON=/path/to/python3"; exit 1; }
	PYTHON=$(BIN)/python TORCH="$(TORCH)" scripts/install.sh torch model dev
	@touch $@

serve: $(READY)
	$(BIN)/cellserve serve $(MODEL) $(if $(HOST),--host $(HOST)) $(if $(PORT),--port $(PORT)) $(ARGS)

test: $(READY)
	$(PYTEST) $(ARGS)

test-full: $(READY)
	$(PYTEST) --full $(ARGS)

faults: $(READY)
	$(PYTEST) --full -k faults $(ARGS)

soak: $(READY)
	$(BIN)/python -m tests.load.soak $(ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)
	$(BIN)/python -m engine.bench $(ARGS)

# In an environment of its own, so that the auditor is not among what it audits. Fails where it could not look things up.
audit: $(READY)
	@test -x .venv/audit/bin/pip-audit || { $(BIN)/python -m venv .venv/audit && .venv/audit/bin/pip install --quiet pip-audit; }
	$(BIN)/python scripts/audit.py .venv/audit/bin/pip-audit $(ARGS)

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info build dist
