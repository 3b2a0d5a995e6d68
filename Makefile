# One environment for everything: PYTHON=python3.12 make test picks another interpreter.
PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
SEEDS ?= 1
SIZE ?= demo
DEMO_ARGS ?=

.PHONY: demo test test-all lint bench

# Rebuilt only when the dependencies change.
$(VENV)/.installed: requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if v in ((3, 11), (3, 12)) else "exoring: error: Python 3.11 or 3.12 is needed (dm-control has no wheels beyond), found %d.%d; try PYTHON=python3.12 make" % v)'
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check -r requirements.lock
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@

demo: $(VENV)/.installed
	$(PY) -m scripts.compare $(SIZE) --seeds $(SEEDS) $(DEMO_ARGS)

test: $(VENV)/.installed
	$(PY) -m pytest -m "not slow" -n 2

test-all: $(VENV)/.installed
	$(PY) -m pytest -n 2

lint: $(VENV)/.installed
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/pyright

# The Ring Attention authors' package, to measure against; kept out of the environment.
build/peers/ringattention:
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --no-deps --target build/peers \
		ringattention==0.1.2 einops==0.8.1

bench: $(VENV)/.installed build/peers/ringattention
	$(PY) -m scripts.bench ring --peers build/peers
