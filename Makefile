# Two commands do everything on a fresh machine: `make demo` and `make test`. Each makes its own .venv.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo demo-real test test-all lint format bench clean

demo: .venv/.installed
	$(BIN)/sublayer demo

# Real pairs, tab-separated: make demo-real TRAIN=pairs.tsv VALID=valid.tsv; again with the same files, it goes on.
demo-real: .venv/.installed
	@test -n "$(TRAIN)" -a -n "$(VALID)" || { echo "usage: make demo-real TRAIN=FILE VALID=FILE"; exit 2; }
	$(BIN)/sublayer train recipes/translate.toml data.train=$(TRAIN) data.valid=$(VALID) --out runs/demo-real --resume

test: .venv/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "not slow and not network"

test-all: .venv/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

lint: .venv/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: .venv/.installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: .venv/.installed-dev
	$(BIN)/python -m benchmarks.run

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "sublayer needs Python 3.11 or newer; set PYTHON=")'
	$(PYTHON) -m venv .venv

.venv/.installed: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '.[corpora,files]'
	touch $@

.venv/.installed-dev: .venv/.installed
	$(PIP) -e '.[corpora,files,dev]'
	touch $@
