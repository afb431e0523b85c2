PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.built

SOURCES := $(wildcard cython_ext/*.pyx cython_ext/*.pxd) setup.py pyproject.toml

.PHONY: all demo test lint bench build clean

all: build

build: $(STAMP)

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip "setuptools>=77" "cython>=3.1,<4"

# An editable install: what is tested and measured is what is here.
$(STAMP): $(BIN)/python $(SOURCES)
	$(BIN)/python -m pip install --quiet --no-build-isolation --editable ".[dev]"
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/python -m distributed_core.demo

test: $(STAMP) lint
	$(BIN)/python -m pytest

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP)
	$(BIN)/python -m bench

clean:
	rm -rf build dist *.egg-info $(VENV) .mypy_cache .ruff_cache .pytest_cache
	rm -f cython_ext/*.c cython_ext/*.so cython_ext/*.html
