# make train   set up .venv, build the embedded data set, train on it with DeepSpeed ZeRO-2
# make test    the same set-up with the test extras, then the test suite: ten minutes on two cores
# make quick   the linters, and the tests that start no ranks and break nothing: a verdict in a minute and a half
# make slow    the long forms of tests that the suite has in short
# make seeds   every test that draws its seed, fifty times (ARGS="-k ..." for some of them)
# make browser Chromium from the system's packages, where there is none, for the tests that open a report
# make docs    the documentation as a site, in site/
# make lint    ruff (rules and formatting), mypy, and the layers of packages
# ARGS goes to launch/train.py or pytest: make train ARGS="--optimizer.lr 5e-4"; make test ARGS="-k stream"

PYTHON ?= python3
BIN := .venv/bin
DS_CONFIG ?= ds_configs/zero2.json
ARGS ?=
# two workers: one's ranks compute while the other's wait
TESTS := $(BIN)/python -m pytest -n 2 --dist worksteal
SHELL := /bin/bash

# all GPUs where there are some; else two CPU ranks of one thread each
ifeq ($(shell nvidia-smi -L 2>/dev/null | grep -c GPU),0)
LAUNCH := DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 $(BIN)/deepspeed -q --num_accelerators 2
else
LAUNCH := $(BIN)/deepspeed -q
endif

.PHONY: train test quick slow seeds browser docs lint format clean

train: .venv/installed-demo
	@run=demo; n=2; while [ -f runs/$$run/result.json ]; do run=demo-$$n; n=$$((n + 1)); done; \
	set -x; $(LAUNCH) launch/train.py --ds_config $(DS_CONFIG) --name $$run $(ARGS)

test: .venv/installed-dev
	$(TESTS) -m "not slow" $(ARGS)

quick: lint
	$(TESTS) -m "not slow and not ranks and not faults" $(ARGS)

slow: .venv/installed-dev
	$(BIN)/python -m pytest -m slow $(ARGS)

seeds: .venv/installed-dev
	$(BIN)/python -m pytest -m "draws and not slow" --seeds 50 $(ARGS)

# only where it can be had without asking: elsewhere those tests are skipped, and say why
browser:
	@command -v chromium chromium-browser google-chrome google-chrome-stable >/dev/null \
	  || { command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ] \
	    && { timeout 300 apt-get install -qq -y --no-install-recommends chromium >/dev/null 2>&1 \
	      || { apt-get update -qq && apt-get install -qq -y --no-install-recommends chromium >/dev/null; }; } 2>&1; } \
	  || echo "no Chromium: tests/report/test_browser.py will be skipped"

docs: .venv/installed-docs
	$(BIN)/python -m disco_ds.config.options > docs/options.md
	$(BIN)/mkdocs build --quiet

lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: .venv/installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	  || { echo "Python 3.10 or newer is needed; $(PYTHON) is $$($(PYTHON) --version 2>&1). Use make PYTHON=python3.11"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
	  || { echo "Python's venv module is missing: apt-get install python3-venv (or your system's package)"; exit 1; }
	$(PYTHON) -m venv .venv

.venv/installed-%: .venv/bin/python pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[$*]'
	@touch $@

clean:
	rm -rf .venv .pytest_cache .ruff_cache .mypy_cache
