# make demo     a real job on the daemon and two stock workers
# make test     lint, types and all tests
# make lint     ruff and mypy alone
# make bench    ours against the stock scheduler
# make build    the virtual environment and the compiled modules alone
#
# Each does all of its own set-up in .venv. PYTHON=… chooses the interpreter, JOBS=… the number of
# compilers at a time, PYTEST_ARGS=… is handed to pytest.

VENV := .venv
BIN := $(VENV)/bin
CREATED := $(VENV)/.created
INSTALLED := $(VENV)/.installed
BUILT := $(VENV)/.built

PYTHON ?=
PYTEST_ARGS ?=
JOBS ?= $(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)

CYTHON_SOURCES := $(wildcard cython_ext/*.pyx cython_ext/*.pxd)

.PHONY: all build demo test lint bench clean

all: build

build: $(BUILT)

# A shim of that name may exist and not run, so each candidate is tried.
$(CREATED):
	@set -e; \
	for python in $(or $(PYTHON),python3.11 python3 python); do \
	  if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then \
	    echo "$$python -m venv $(VENV)"; \
	    "$$python" -m venv $(VENV); \
	    touch $@; \
	    exit 0; \
	  fi; \
	done; \
	echo "make: no Python 3.11 or later among: $(or $(PYTHON),python3.11 python3 python);" \
	  "install one, or name it: make PYTHON=/path/to/python" >&2; \
	exit 1

# An editable install, so that what is tested and measured is what is here. The compiled modules
# come after it: DC_ONLY names none of them.
$(INSTALLED): $(CREATED) pyproject.toml
	$(BIN)/python -m pip install --quiet "setuptools>=77" "cython>=3.1,<4" wheel
	DC_ONLY=none $(BIN)/python -m pip install --quiet --no-build-isolation --editable ".[dev]"
	touch $@

# Modules whose sources changed, and those that use their declarations; with setup.py, all.
$(BUILT): $(INSTALLED) $(CYTHON_SOURCES) setup.py
	@command -v "$${CC:-cc}" >/dev/null || { echo "make: a C compiler is needed" >&2; exit 1; }
	$(if $(filter setup.py,$?),rm -f cython_ext/*.c cython_ext/*.so)
	$(BIN)/python setup.py --quiet build_ext --inplace --parallel $(JOBS)
	touch $@

demo: $(BUILT)
	$(BIN)/python -m distributed_core.demo

test: lint
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(BUILT)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(BUILT)
	$(BIN)/python -m bench

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	rm -f cython_ext/*.c cython_ext/*.so cython_ext/*.html
