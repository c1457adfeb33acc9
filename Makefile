# Everything runs in .venv, which is made from nothing but python3 and pip.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready-run
READY_DEV := $(VENV)/.ready-dev
TOOLS := $(VENV)/tools
DOCS := $(VENV)/docs
MINUTES ?= 60
SECONDS ?= 60
SEED ?= 1

.PHONY: setup lock train test virtual coverage check bench bench-all accuracy faults fuzz sanitize mutants soak zoo audit sbom docs clean

setup: $(READY)

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "convolve needs Python 3.10 or newer: make PYTHON=...")'
	@echo "setting up $(VENV): torch and others are fetched, which takes some minutes the first time"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	touch $@

$(READY_DEV): pyproject.toml requirements.lock .ci/zoo.txt $(READY)
	@if $(BIN)/python .ci/lock.py applies; then \
	  $(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r requirements.lock; \
	else \
	  echo "requirements.lock is for another system or Python: installing the newest versions"; \
	  $(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'; \
	  $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r .ci/zoo.txt; \
	fi
	touch $@

# Resolve the newest versions for development and store them with their hashes.
lock: $(READY)
	$(BIN)/python .ci/lock.py write $(BIN)/python

train: $(READY)
	$(BIN)/convolve train

check: $(READY_DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Two workers with one thread each: tests start processes of their own, and barriers of busy threads cost more than they gain.
# Each has half of the files, so that what the tests of a file share is made once, and takes over from the other at the end.
# Dozens of interpreters are started: what the first one compiles is kept, whatever the environment says.
test: $(READY_DEV)
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow and not network"

# The same folders as on CPUs, on the virtual accelerator, which torch loads like a device of another package.
virtual: $(READY_DEV)
	OMP_NUM_THREADS=1 VIRT_DEVICES=8 PYTHONPATH=$(CURDIR)/tests:$(CURDIR)/tests/virtual_accelerator/autoload \
	  $(BIN)/python -m pytest -m "not slow and not network" tests/parity tests/dist

# Branch coverage of src by the unit tests; fails below `fail_under` in pyproject.toml, the measured value.
coverage: $(READY_DEV)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -q -m "not slow and not network" --cov --cov-report= tests/unit
	$(BIN)/coverage report --skip-covered --sort=cover | tail -n 40

# Every fault as often as promised, a quarter of an hour; a kind that was tried less often fails it. One table at the end.
# Then all other tests that `make test` leaves out because they take long.
faults: $(READY_DEV)
	FAULTS_COMPLETE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/faults -n 2 --dist worksteal -m "" -v
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m "slow and not network" --ignore tests/faults

# Mutated inputs for every reader, with coverage feedback: a minute in all, or `make fuzz SECONDS=7200 SEED=0`.
fuzz: $(VENV)/.ready-fuzz
	OMP_NUM_THREADS=1 $(BIN)/python fuzz/run.py --seconds $(SECONDS) --seed $(SEED)

# Native code with random shapes under the sanitizers of gcc, for vector widths 4, 8 and 16; about five minutes.
sanitize: $(READY_DEV)
	$(BIN)/python fuzz/sanitize.py

# Proof that the tests of the findings in SECURITY.md can fail: each protection is removed in a copy; half an hour.
mutants: $(READY_DEV)
	$(BIN)/python fuzz/mutants.py

$(VENV)/.ready-fuzz: $(READY_DEV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'atheris>=3,<4'
	touch $@

# 60 models of timm and torchvision, unmodified.
zoo: $(READY_DEV)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/zoo.py

soak: $(READY_DEV)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/soak.py --minutes $(MINUTES)

# Tools that look at the environment live in one of their own, so that they do not find themselves.
$(TOOLS)/.ready: $(READY)
	$(PYTHON) -m venv $(TOOLS)
	$(TOOLS)/bin/python -m pip install --quiet --disable-pip-version-check pip-audit cyclonedx-bom
	touch $@

# Known vulnerabilities of everything installed. Without the service nothing is known, which is a failure too.
audit: $(READY_DEV) $(TOOLS)/.ready
	@$(TOOLS)/bin/pip-audit --strict --skip-editable --progress-spinner off --vulnerability-service osv \
	  --path "$$($(BIN)/python -c 'import site; print(site.getsitepackages()[0])')" >$(TOOLS)/audit.txt 2>&1; code=$$?; \
	if grep -q Traceback $(TOOLS)/audit.txt; then \
	  echo "make audit: nothing was audited, the vulnerability service did not answer: $$(tail -n 1 $(TOOLS)/audit.txt | cut -c1-200)"; exit 1; \
	fi; cat $(TOOLS)/audit.txt; exit $$code

# What a user gets, as a CycloneDX document.
sbom: $(READY) $(TOOLS)/.ready
	$(TOOLS)/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible -o sbom.cdx.json $(BIN)/python
	@echo "sbom.cdx.json"

# The site reads docstrings from the source, so its environment needs neither torch nor convolve. ruff formats signatures.
$(DOCS)/.ready: Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "make docs needs Python 3.11 or newer: make docs PYTHON=...")'
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check 'zensical>=0.0.73,<0.1' 'mkdocstrings[python]>=1.0.8,<2' 'ruff>=0.17'
	touch $@

# The documentation as a site in build/site. Warnings, such as a broken link, are errors.
docs: $(DOCS)/.ready
	rm -rf build/pages build/site && mkdir -p build/pages
	cp -R *.md docs examples build/pages
	$(DOCS)/bin/zensical build --strict --clean
	@echo "build/site/index.html; with search: $(PYTHON) -m http.server --directory build/site"

bench: $(READY_DEV)
	$(BIN)/python benchmarks/lenet_epoch.py

# Every comparison with other libraries; writes the table in docs/performance.md. Some hours, on an idle machine.
bench-all: $(READY_DEV)
	$(BIN)/python benchmarks/all.py

accuracy: $(READY)
	$(BIN)/python benchmarks/accuracy.py

clean:
	rm -rf $(VENV) runs build dist sbom.cdx.json .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .cache
