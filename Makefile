# Every target sets up .venv by itself; up to date, that is silent and instant.
#   make demo     see it work: three services, the bundled models, with and without speculation
#   make test     what proves everything that runs on a CPU, 10 to 26 minutes on two cores
#   make test-slow   the rest: the same promises over more shapes, kinds and seeds
#   make check    lint, types and the fast tests, three minutes
#   make format   apply the formatter and the safe lint fixes
#   make protos   regenerate coppice/v1 from protos/
PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/.installed
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Processes that run tests. One of them begins with tests of processes, which wait much.
WORKERS ?= 2
INTERPRETED := $(VENV)/interpreted.log
CONTRACT := $(VENV)/contract.log
# Tests start hundreds of processes; these read what the first one compiled.
unexport PYTHONDONTWRITEBYTECODE
PYTEST := $(BIN)/python -m pytest --numprocesses=$(WORKERS) --dist=loadscope --no-loadscope-reorder

.PHONY: demo test test-slow tests interpreted contract check lint types fast-tests format protos install
.DEFAULT_GOAL := demo

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Coppice needs Python >= 3.11: make PYTHON=/path/to/python3"; exit 1; }
	@echo "Setting up $(VENV), once: 1 of 2, the environment"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "2 of 2, the packages of constraints.txt: some minutes, most of them for torch"
	@$(PIP) install --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(STAMP)
	@$(BIN)/coppice demo

test: SELECTED := not exhaustive
test-slow: SELECTED := exhaustive
test test-slow: $(STAMP)
	@$(MAKE) --no-print-directory --jobs=2 --keep-going SELECTED='$(SELECTED)' tests contract interpreted

tests: $(STAMP)
	@$(PYTEST) -m '$(SELECTED)' --ignore=tests/contract

# One after the other beside the other tests, which leave a core idle while they wait for processes;
# heard of at their ends. Tests of contracts wait for two thirds of their time. Interpreted kernels
# wait for nothing, and leave the cores to stacks first (NICENESS in tests/conftest.py).
contract: $(STAMP)
	@$(BIN)/python -m pytest -m '$(SELECTED)' tests/contract > $(CONTRACT) 2>&1 \
		|| { cat $(CONTRACT); exit 1; }
	@echo "contracts: $$(tail -n 1 $(CONTRACT))"

interpreted: $(STAMP)
	@TRITON_INTERPRET=1 nice -n 5 $(BIN)/python -m pytest -m '$(SELECTED)' tests/kernels > $(INTERPRETED) 2>&1 \
		|| { cat $(INTERPRETED); exit 1; }
	@echo "interpreted kernels: $$(tail -n 1 $(INTERPRETED))"

check: $(STAMP)
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target lint types fast-tests

lint: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet .

types: $(STAMP)
	@$(BIN)/mypy

fast-tests: $(STAMP)
	@$(PYTEST) -q -m "not slow and not exhaustive" tests/unit

format: $(STAMP)
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

protos: $(STAMP)
	@$(BIN)/python scripts/gen_protos.py
