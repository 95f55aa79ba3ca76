# Needs python3 (3.11 or later), pip and make; everything else goes into .venv, on first use.

PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.installed
EXTRAS ?= dev
WITH ?=
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help demo test test-all test-torch lint size bench notebooks docs docs-serve build clean clean-all
.DELETE_ON_ERROR:

help:
	@echo "make demo       the paper's learned client weighting, with a report; about two minutes"
	@echo "make test       run the quick suite       (ARGS='-k ragged' for some of it; PYTHON=python3.13)"
	@echo "make test-all   run all tests, as CI does (but those that need PyTorch)"
	@echo "make test-torch run the tests that need PyTorch, in an environment of their own, .venv-torch"
	@echo "make lint       check style, format and types"
	@echo "make size       count code lines per room, longest files and functions (ARGS='--since HEAD~5')"
	@echo "make bench      run the benchmarks        (ARGS=... is handed on)"
	@echo "make notebooks  run the notebooks and store what they show"
	@echo "make docs       the documentation as a site, in out/site"
	@echo "make docs-serve the same, at http://localhost:8000 (PORT=...)"
	@echo "make build      a wheel and an sdist, in dist"
	@echo "make clean      remove what the targets above have written"
	@echo "make clean-all  remove the virtual environments too"

demo: $(READY)
	@$(VENV)/bin/fedgrad reproduce client-weighting --out out/demo

test: $(READY)
	@$(PY) -m pytest -m "not full" $(ARGS)

test-all: $(READY)
	@$(PY) -m pytest $(ARGS)

# The version that the tests were written with. From PyTorch's own index for CPUs, which pip may be
# told of by PIP_EXTRA_INDEX_URL, it is 200 MB instead of gigabytes.
TORCH ?= torch==2.13.0
test-torch:
	@$(MAKE) --no-print-directory test-all VENV=.venv-torch EXTRAS=dev,torch WITH="$(TORCH)" \
	    ARGS="tests/pytorch/test_from_torch.py tests/federation/test_flower_torch.py \
	        'tests/house/test_docs.py::test_page[coming-from-pytorch]' \
	        'tests/house/test_docs.py::test_page[coming-from-flower]' $(ARGS)"

lint: $(READY)
	@echo "ruff check" && $(PY) -m ruff check
	@echo "ruff format --check" && $(PY) -m ruff format --check
	@echo "mypy" && $(PY) -m mypy

size:
	@$(PYTHON) tests/size.py $(ARGS)

bench: $(READY)
	@$(PY) -m benchmarks $(ARGS)

notebooks: $(READY)
	@$(PY) tests/house/test_notebooks.py

# The site needs neither JAX nor fedgrad: it reads the source. So it has an environment of its own.
DOCS := .venv-docs
PORT ?= 8000

docs: $(DOCS)/.installed
	@$(DOCS)/bin/python docs/site/build.py --out out/site

docs-serve: docs
	@$(DOCS)/bin/python -m http.server $(PORT) --bind 127.0.0.1 --directory out/site

build: $(READY)
	@$(PY) -m hatchling build

clean:
	rm -rf build dist out .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests examples benchmarks -name .venvs -prune -o -name __pycache__ -prune -exec rm -rf {} +

clean-all: clean
	rm -rf .venv .venv-* benchmarks/.venvs

EXTRA := import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]
EXTRA := $(EXTRA)["optional-dependencies"]["docs"])

$(DOCS)/.installed: pyproject.toml
	@echo "Installing what makes the site into $(DOCS)"
	@$(PYTHON) -m venv --clear $(DOCS)
	@$(DOCS)/bin/python -m pip install --quiet $$($(PYTHON) -c '$(EXTRA)')
	@touch $@

MINOR := -c 'import sys; print(sys.version_info[:2])'

# Another PYTHON than that of the environment makes it anew; name another VENV to keep both.
ifneq ($(shell $(PY) $(MINOR) 2>/dev/null),$(shell $(PYTHON) $(MINOR) 2>/dev/null))
.PHONY: $(READY)
endif

# Some systems ship python3 without ensurepip, and then a venv cannot make its own pip: it gets one
# from the pip outside. The stamp is written last, so that a broken install is tried again.
$(READY): pyproject.toml experiments/pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "fedgrad needs Python 3.11 or later; $(PYTHON) is $$($(PYTHON) --version 2>&1)." \
	         "Name another one: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@test "$$($(PY) $(MINOR) 2>/dev/null)" = "$$($(PYTHON) $(MINOR))" || { \
	    echo "[1/2] Creating $(VENV) with $$($(PYTHON) --version)"; \
	    $(PYTHON) -m venv --clear $(VENV) >/dev/null 2>&1 || \
	    $(PYTHON) -m venv --clear --without-pip $(VENV); }
	@$(PY) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m pip --python $(PY) install --quiet pip
	@echo "[2/2] Installing fedgrad, JAX and the development tools into $(VENV) (a minute or two)"
	@$(PY) -m pip install --quiet --editable '.[$(EXTRAS)]' \
	    --editable ./experiments $(WITH)
	@touch $@
