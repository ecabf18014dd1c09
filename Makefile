# Every target sets up .venv by itself; up to date, that is silent and instant.
#   make demo     see it work: three processes, the bundled models, with and without speculation
#   make test     everything that runs on a CPU
#   make check    lint, types and the fast tests, one to three minutes
#   make format   apply the formatter and the safe lint fixes
#   make protos   regenerate coppice/v1 from protos/
PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/.installed
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: demo test check lint types fast-tests format protos install
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

test: $(STAMP)
	@$(BIN)/python -m pytest
	@TRITON_INTERPRET=1 $(BIN)/python -m pytest tests/kernels

check: $(STAMP)
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target lint types fast-tests

lint: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet .

types: $(STAMP)
	@$(BIN)/mypy

fast-tests: $(STAMP)
	@$(BIN)/python -m pytest -q -m "not slow" tests/unit

format: $(STAMP)
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

protos: $(STAMP)
	@$(BIN)/python scripts/gen_protos.py
