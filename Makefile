# make demo   tune the learning rate at depth 2, use it at depth 32: a few minutes, with a report
# make check  formatting, lint, types and the fast tests: the loop while you edit
# make test   everything that must hold
# make fuzz   20 000 hostile commands and files, 15 kills, 300 flipped bits (`make test` runs some of them)
# make docs   the site, in site/
# Each installs what it needs on first use (all it needs is Python ≥ 3.11).

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
WORKERS = $$($(BIN)/python -c 'import os; print((os.cpu_count() or 1) + 1)')  # tests often wait for other processes
PIP    := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt

# Hundreds of tests start Python: without bytecode each of them compiles the package again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo check test fuzz lint docs bench clean

demo: $(VENV)/.core
	$(BIN)/completep demo

check: lint
	$(BIN)/python -m pytest -n logical --dist worksteal -m 'not slow' $(PYTEST)

test: lint
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(PYTEST)

fuzz: $(VENV)/.test
	COMPLETEP_FUZZ=20000 COMPLETEP_KILLS=15 COMPLETEP_FLIPS=300 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal \
		tests/fuzz tests/train/test_damage.py \
		tests/sweep/test_local.py::test_runs_killed_at_random_moments $(PYTEST)

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/.test
	$(BIN)/python -m mkdocs build --strict

bench: $(VENV)/.test
	$(BIN)/python benchmarks/rules_cost.py

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit("completep needs Python 3.11 or newer; found %s: make PYTHON=python3.11 …" % sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.core: $(BIN)/python pyproject.toml constraints.txt
	$(PIP) --editable .
	touch $@

$(VENV)/.test: $(VENV)/.core
	$(PIP) --editable '.[test]'
	# torchvision's compiled part needs the exact torch build; it is kept apart so that nothing else imports it.
	$(PIP) --no-deps --upgrade --target $(VENV)/vision timm torchvision pillow
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache
