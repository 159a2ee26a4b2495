# Needs Python >= 3.11 with pip, and make. The first call installs everything into .venv; a later one installs nothing.
# make test JOBS=8 runs so many tests at a time.
PYTHON ?= python3
JOBS ?= 2
BIN := .venv/bin
INSTALLED := .venv/.installed

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: run test lint types bench gpu clean

run: $(INSTALLED)
	$(BIN)/python examples/super_resolution.py

test: $(INSTALLED)
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal

lint: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports

types: $(INSTALLED)
	$(BIN)/mypy

bench: $(INSTALLED)
	$(BIN)/python -m bench pair

# In the machine's own Python, whose torch is built for its CUDA: .venv has a build for the CPU.
gpu:
	$(PYTHON) -m bench gpu

# --without-pip and pip --python: some systems ship pip but not the ensurepip that a plain venv needs.
# --clear takes the old stamp with it and the new one comes last, so that half an install never counts as one.
$(INSTALLED): pyproject.toml setup.py constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("hetconv needs Python 3.11 or newer, $(PYTHON) is %d.%d: name another with make PYTHON=..." % sys.version_info[:2])'
	@echo "Installing hetconv and what it needs into .venv, once; this takes a few minutes"
	@$(PYTHON) -m venv --clear --without-pip .venv
	@$(PYTHON) -m pip --python $(BIN)/python install -qq --constraint constraints.txt pip --editable '.[dev,examples,models]'
	@touch $@

clean:
	rm -rf .venv build dist out *.egg-info .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
