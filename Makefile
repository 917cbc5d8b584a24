# The two commands of the README: make demo, make test.
VENV ?= .venv
VENV_COMPAT ?= .venv-compat
# Of make test-compat: 0.5.15.post1 (slime's pin) or 0.5.17.
RELEASE ?= 0.5.15.post1
COMPAT_LOCK = requirements/compat$(if $(filter 0.5.15.post1,$(RELEASE)),,-$(RELEASE)).lock
VENV_SLIME ?= .venv-slime
VENV_DEEPSPEED ?= .venv-deepspeed
PYTHON ?= python3
BIN := $(VENV)/bin
CONFIG ?= configs/cpu_tiny.yaml
ARGS ?=

.PHONY: help env demo test test-unit test-soak test-compat test-slime test-deepspeed bench lint types check clean

help:
	@echo "make demo    train with two live engines on this CPU (CONFIG=configs/..., ARGS='--set steps=20')"
	@echo "make test    run the tests, those with engines and all others at the same time"
	@echo "make test-unit    run those that start no engine (PYTHON=python3.12 VENV=.venv-3.12: on another Python)"
	@echo "make test-compat    run the engine tests that apply to an older SGLang (RELEASE=0.5.15.post1), in $(VENV_COMPAT) (11 GB more)"
	@echo "make test-soak    the long tests: the real small model, 200 publications, 300 rounds of fan-out, 20,000 steps"
	@echo "                  of faults, a million ledger records through a hundred kills, 500 planted faults, the gateway under load"
	@echo "make test-slime    the tests on the real slime; SLIME_SRC names its checkout (0.4 GB more, in $(VENV_SLIME))"
	@echo "make test-deepspeed    the tests on the real DeepSpeed, with one engine (24 MB more, in $(VENV_DEEPSPEED))"
	@echo "make bench    measures all benches and writes docs/benchmarks; an hour and a half"
	@echo "make check   lint, types and tests, as CI does"

env:
	@PYTHON=$(PYTHON) bash scripts/make_env.sh $(VENV)

demo: env
	@$(BIN)/reef-slime train $(CONFIG) $(ARGS)

# Two pytest processes: the engine tests one after the other, the others next to them.
test: env
	@$(BIN)/python scripts/run_tests.py -m "not soak" $(ARGS)

# What needs no engine, on the Python that PYTHON names: 3.11 or 3.12.
test-unit: env
	@$(BIN)/python -m pytest -m "not engine and not soak" $(ARGS)

# What is marked soak, and the tests that these variables make longer.
test-soak: env
	@REEF_STATE_STEPS=20000 $(BIN)/python -m pytest $(ARGS) --timeout 7200 tests/test_publication_states.py
	@REEF_ALL_KINDS=1 REEF_ALL_TAILS=1 REEF_TREE_ROUNDS=300 $(BIN)/python -m pytest $(ARGS) -m "not soak" \
	    tests/engine_plugin/test_scope_engine.py tests/engine_plugin/test_swa_anchors.py
	@REEF_AUDIT_CASES=100 REEF_AUDIT_CLEAN=50 $(BIN)/python -m pytest $(ARGS) -m "not soak" --timeout 3600 -s \
	    tests/engine_plugin/test_audit_engine.py
	@REEF_GATEWAY_KILLS=50 REEF_GATEWAY_SECONDS=300 REEF_GATEWAY_CLIENTS=64 REEF_API_CASES=600 $(BIN)/python -m pytest \
	    $(ARGS) --timeout 3600 tests/reef_service/test_kills.py tests/reef_service/test_openapi.py \
	    tests/reef_service/test_publications_under_load.py
	@REEF_PUBLICATIONS=200 $(BIN)/python -m pytest $(ARGS) -m soak --timeout 1500

# The older SGLang wants another torch, so it has an environment of its own.
test-compat:
	@PYTHON=$(PYTHON) bash scripts/make_env.sh $(VENV_COMPAT) $(COMPAT_LOCK)
	@$(VENV_COMPAT)/bin/python -m pytest tests/compat tests/test_publication_engine.py $(ARGS)

# Layered over the environment of the other tests.
test-slime: env
	@bash scripts/make_slime_env.sh $(VENV_SLIME) $(VENV)
	@$(VENV_SLIME)/bin/python -m pytest --timeout 1200 -m slime $(ARGS)
	@$(VENV_SLIME)/bin/python -m pytest tests/weight_sources/test_megatron.py

# Layered as well: DeepSpeed builds itself for most of a minute, so it isn't in the lock of make env.
test-deepspeed: env
	@bash scripts/make_deepspeed_env.sh $(VENV_DEEPSPEED) $(VENV)
	@$(VENV_DEEPSPEED)/bin/python -m pytest tests/weight_sources tests/local_trainer/test_deepspeed_step.py \
	    tests/local_trainer/test_deepspeed_trainer.py tests/test_run_engine.py -k "weight_sources or deepspeed" $(ARGS)

bench: env
	@$(BIN)/python -m pip install --quiet "matplotlib==3.11.2"
	@$(BIN)/reef-slime bench all --write docs/benchmarks

lint: env
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: env
	@$(BIN)/mypy

check: lint types test

clean:
	rm -rf .venv .venv-compat .venv-slime .venv-deepspeed .mypy_cache .ruff_cache .pytest_cache build *.egg-info
