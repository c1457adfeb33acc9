# Everything runs in .venv, which is made from nothing but python3 and pip.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready-run
READY_DEV := $(VENV)/.ready-dev

.PHONY: setup train test check bench accuracy faults clean

setup: $(READY)

$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	touch $@

$(READY_DEV): pyproject.toml $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@

train: $(READY)
	$(BIN)/convolve train

check: $(READY_DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Two workers with one thread each: tests start processes of their own, and barriers of busy threads cost more than they gain.
test: $(READY_DEV)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "not slow and not network"

faults: $(READY_DEV)
	$(BIN)/python -m pytest tests/faults -m "" -v

bench: $(READY_DEV)
	$(BIN)/python benchmarks/lenet_epoch.py

accuracy: $(READY)
	$(BIN)/python benchmarks/accuracy.py

clean:
	rm -rf $(VENV) runs build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
