# Everything starts here: `make demo`, `make serve` and `make test` each do what they need, from an empty folder.
#
#   PYTHON=python3.12      the interpreter to build the environment with, if not the newest of those below
#   PIP_ARGS=...           passed to pip, such as another package index

# Those that can make environments: Debian, for one, has venv in a package of its own.
PYTHONS := python3.13 python3.12 python3.11
works = $(shell $(1) -c 'import ensurepip, venv' 2>/dev/null && echo $(1))
GPU_PYTHONS = $(if $(filter file undefined,$(origin PYTHON)),$(BIN)/python $(PYTHON),$(PYTHON) $(BIN)/python) python3
PYTHON ?= $(firstword $(foreach one,$(PYTHONS),$(call works,$(one))))
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt $(PIP_ARGS)
WORKERS ?= 2
# What fails is tried once more at the end, alone.
PYTEST := $(BIN)/python -m scripts.run_tests -n $(WORKERS) --dist worksteal

.PHONY: demo serve test test-slow test-all check lint types imports unit programs soak fuzz bench gpu clients models format clean

demo: $(VENV)/runtime
	$(BIN)/swarm demo

serve: $(VENV)/runtime
	$(BIN)/swarm demo --serve

# What CI runs first: a quarter of an hour on two cores. CONTRIBUTING.md says what to run before a commit.
test: check unit

# The tests marked `slow`, which `make test` leaves out. `make unit TESTS=...` and the others run a part of theirs.
test-slow: $(VENV)/dev programs
	$(PYTEST) -m slow $(TESTS)

# Everything: `make test` and `make test-slow` in one run.
test-all: check programs
	$(PYTEST) $(TESTS)

check: lint types imports

lint: $(VENV)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/dev
	$(BIN)/mypy

imports: $(VENV)/dev
	$(BIN)/lint-imports

unit: $(VENV)/dev programs
	$(PYTEST) -m "not slow" $(TESTS)

# Chromium for the tests of the pages (what they looked like lies in artifacts/ then), Prometheus, Compose.
programs:
	.ci/install-programs

# A server is killed before every single token, then ten minutes of churn. Takes about twenty minutes.
soak: $(VENV)/dev
	SWARM_SOAK=1 $(BIN)/python -m pytest --timeout 3600 tests/test_kill.py
	$(BIN)/python -m benchmarks.serving.soak --minutes 10 --clients 4 --every 5

# At least 100,000 hostile messages in ten minutes, against a whole swarm (docs/security.md).
fuzz: $(VENV)/dev
	$(BIN)/python -m tests.fuzz $(FUZZ_ARGS)

bench: $(VENV)/dev
	$(BIN)/python -m benchmarks.all --json

# What a GPU has to prove, in eight minutes. Installs nothing where torch is there already, and needs no network then:
# takes the environment, PYTHON or python3, whichever has torch first; a PYTHON that was named comes before the others.
gpu:
	@for python in $(GPU_PYTHONS); do \
	    if $$python -c 'import importlib.util as u; exit(not (u.find_spec("torch") and u.find_spec("transformers")))' \
	    2>/dev/null; then exec $$python -m benchmarks.gpu $(GPU_ARGS); fi; \
	done; \
	$(MAKE) $(VENV)/runtime && exec $(BIN)/python -m benchmarks.gpu $(GPU_ARGS)

# Programs of others with a gateway: installs them, tries them, and puts the table into docs/gateway.md.
clients: $(VENV)/dev
	$(BIN)/python -m scripts.clients --write $(CLIENTS)

# docs/models.md: which families and formats are served, and how that is known.
models: $(VENV)/dev
	@$(BIN)/python -m scripts.models_page

format: $(VENV)/dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# torch comes first: its version in constraints.txt decides which build everything else is resolved against.
$(VENV)/runtime: setup.cfg pyproject.toml constraints.txt
	@test -x $(BIN)/python || test -n "$(PYTHON)" || { \
	    echo "No Python that can make environments was found: install one of $(PYTHONS) with its venv and ensurepip" \
	    "(Debian: the package python3-venv), or name one with make PYTHON=..." >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) --editable .
	touch $@

$(VENV)/dev: $(VENV)/runtime
	$(PIP) --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info
