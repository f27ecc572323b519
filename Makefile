# Two commands do everything on a fresh machine: `make train` and `make test`. Both set up what they need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RECORD ?= benchmarks/$(shell date +%F)_$(shell nproc)-cores_chaos-simulated

# two processes share the files; where a test that heeds no timeout has ended one of them, no other is started
TWO := -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 0

# tests start thousands of processes, each of which would compile all that it imports
unexport PYTHONDONTWRITEBYTECODE

.PHONY: train test test-gpu test-dear test-all chaos zoo check laws format clean
.DEFAULT_GOAL := help

help:
	@echo "make train   set up, then train the embedded sample the fastest way this machine allows"
	@echo "make test    set up, then run the tests"
	@echo "make test-gpu the tests with models on a GPU, where one is"
	@echo "make test-dear the tests that do not fit into its ten minutes"
	@echo "make test-all both"
	@echo "make chaos   100,000 simulated trainings under faults, on RECORD=benchmarks/..., half an hour or so"
	@echo "make zoo     123 models on several nodes and processes against a plain loop; writes docs/zoo.md, ten minutes or so"
	@echo "make check   format, lint and type check"

$(VENV)/.ready: pyproject.toml bench/pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -e '.[dev]' -e ./bench -c constraints.txt
	@touch $@

train: $(VENV)/.ready
	@$(BIN)/paceline train

test: $(VENV)/.ready
	$(BIN)/python -m pytest $(TWO) -m "not dear"

test-gpu: $(VENV)/.ready
	PACELINE_TEST_DEVICE=cuda $(BIN)/python -m pytest $(TWO) -m "not dear"

test-dear: $(VENV)/.ready
	$(BIN)/python -m pytest $(TWO) -m dear --durations 20

test-all: $(VENV)/.ready
	$(BIN)/python -m pytest $(TWO)

chaos: $(VENV)/.ready
	$(BIN)/python -m paceline_bench.simulated --count 100000 --processes $(shell nproc) --record $(RECORD)

$(VENV)/zoo/.ready: $(VENV)/.ready benchmarks/zoo/requirements.txt
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(VENV)/zoo -r benchmarks/zoo/requirements.txt
	@touch $@

zoo: $(VENV)/zoo/.ready
	OMP_NUM_THREADS=1 PYTHONPATH=benchmarks:$(VENV)/zoo $(BIN)/python -m zoo --page docs/zoo.md

check: $(VENV)/.ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/.ready
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) runs build bench/build src/*.egg-info bench/src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
