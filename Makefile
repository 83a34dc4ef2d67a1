# Everything starts here: `make demo` and `make test` each do what they need, from an empty folder.
#
#   PYTHON=python3.11      the interpreter to build the environment with
#   PIP_ARGS=...           passed to pip, such as another package index

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt $(PIP_ARGS)
WORKERS ?= 2
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

.PHONY: demo test test-slow test-all check lint types imports unit programs soak bench format clean

demo: $(VENV)/runtime
	$(BIN)/swarm demo

# What to run before every commit: twelve minutes on two cores.
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

bench: $(VENV)/dev
	$(BIN)/python -m benchmarks.decoding.chain
	$(BIN)/python -m benchmarks.decoding.chain --shape small
	$(BIN)/python -m benchmarks.serving.clients
	$(BIN)/python -m benchmarks.decoding.lanes
	$(BIN)/python -m benchmarks.decoding.prefill
	$(BIN)/python -m benchmarks.decoding.memory
	$(BIN)/python -m benchmarks.network.wire
	$(BIN)/python -m benchmarks.decoding.quantization
	$(BIN)/python -m benchmarks.decoding.gpu_decode
	$(BIN)/python -m benchmarks.network.push
	$(BIN)/python -m benchmarks.network.failover
	$(BIN)/python -m benchmarks.network.routing
	$(BIN)/python -m benchmarks.training
	$(BIN)/python -m benchmarks.serving.gateway
	$(BIN)/python -m benchmarks.serving.gateway --kill
	$(BIN)/python -m benchmarks.decoding.heads
	$(BIN)/python -m benchmarks.flash

format: $(VENV)/dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# torch comes first: its version in constraints.txt decides which build everything else is resolved against.
$(VENV)/runtime: setup.cfg pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) --editable .
	touch $@

$(VENV)/dev: $(VENV)/runtime
	$(PIP) --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info
