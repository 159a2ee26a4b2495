# Needs Python >= 3.11 with pip, and make. The first call installs everything into .venv; a later one installs nothing.
# make test JOBS=8 runs so many tests at a time; make test TORCH=2.14 runs them with that torch, in .venv-2.14.
PYTHON ?= python3
JOBS ?= 2
DEFAULT_TORCH := 2.13
TORCH ?= $(DEFAULT_TORCH)
VENV := .venv$(if $(filter-out $(DEFAULT_TORCH),$(TORCH)),-$(TORCH))
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
CONSTRAINTS := constraints/torch-$(TORCH).txt
EXTRAS := dev,docs,examples,report
TESTS :=
GPU_WHEELS := build/wheels
GPU_PACKAGES := pydantic pydantic-core annotated-types typing-inspection typing-extensions optuna alembic sqlalchemy \
    greenlet mako colorlog platformdirs expecttest

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: run test test-matrix lint types docs bench gpu gpu-wheels clean

run: $(INSTALLED)
	$(BIN)/python examples/super_resolution.py

# With compiled modules on disk, as Python has it by default: tests start hundreds of processes.
test: $(INSTALLED)
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(TESTS)

# The whole suite with every torch that hetconv is tested with, oldest first, each in a venv of its own.
test-matrix:
	@for torch in 2.11 2.13 2.14; do echo "With torch $$torch"; $(MAKE) test TORCH=$$torch || exit 1; done

lint: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports

types: $(INSTALLED)
	$(BIN)/mypy

# Into build/site, which can be read without a server.
docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

bench: $(INSTALLED)
	$(BIN)/python -m bench pair

# In the machine's own Python, whose torch is built for its CUDA: .venv has a build for the CPU.
# Run it again until every stage has passed: each run takes at most 4 minutes and goes on where the last one ended.
gpu:
	$(PYTHON) -m bench gpu --resume

# What split models need there beside torch, as wheels for CPython 3.12 on x86-64; see CONTRIBUTING.md.
gpu-wheels:
	@mkdir -p $(GPU_WHEELS)
	$(PYTHON) -m pip download -q --no-deps --constraint constraints/common.txt --only-binary=:all: --python-version 3.12 --implementation cp \
	    $(foreach n,28 27 24 17,--platform manylinux_2_$(n)_x86_64) --platform manylinux2014_x86_64 --platform any \
	    --dest $(GPU_WHEELS) $(GPU_PACKAGES)
	@du -sh $(GPU_WHEELS)

# --without-pip and pip --python: some systems ship pip but not the ensurepip that a plain venv needs.
# --clear takes the old stamp with it and the new one comes last, so that half an install never counts as one.
# torchvision and timm ask for one torch each; the models that the tests take from them run with any.
$(INSTALLED): pyproject.toml setup.py constraints/common.txt $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("hetconv needs Python 3.11 or newer, $(PYTHON) is %d.%d: name another with make PYTHON=..." % sys.version_info[:2])'
	@echo "Installing hetconv and what it needs into $(VENV), once; this takes a few minutes"
	@$(PYTHON) -m venv --clear --without-pip $(VENV)
	@$(PYTHON) -m pip --python $(BIN)/python install -qq --constraint $(CONSTRAINTS) pip --editable '.[$(EXTRAS)]'
	@$(PYTHON) -m pip --python $(BIN)/python install -qq --constraint $(CONSTRAINTS) --no-deps timm torchvision
	@touch $@

constraints/torch-%.txt:
	@echo "TORCH=$* is not among the versions in constraints/: $(patsubst constraints/torch-%.txt,%,$(wildcard constraints/torch-*.txt))" >&2; exit 1

clean:
	rm -rf .venv .venv-* build dist out *.egg-info .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
