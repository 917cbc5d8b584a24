# The two commands of the README: make demo, make test.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
CONFIG ?= configs/cpu_tiny.yaml
ARGS ?=

.PHONY: help env demo test lint types check clean

help:
	@echo "make demo    train with two live engines on this CPU (CONFIG=configs/..., ARGS='--set steps=20')"
	@echo "make test    run the tests (ARGS='-m \"not engine\"' leaves out those that start an engine)"
	@echo "make check   lint, types and tests, as CI does"

env:
	@PYTHON=$(PYTHON) bash scripts/make_env.sh $(VENV)

demo: env
	@$(BIN)/reef-slime train $(CONFIG) $(ARGS)

test: env
	@$(BIN)/python -m pytest $(ARGS)

lint: env
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: env
	@$(BIN)/mypy

check: lint types test

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache build *.egg-info
