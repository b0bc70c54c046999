# The only thing needed beforehand is Python 3.11 or newer.
#   make demo        prepare, train, generate and score handwritten digits on the CPU, in minutes
#   make demo-adapter  teach that model a shape it never saw, from ten clips
#   make serve       Triton and a page in the browser, on what `make demo` made
#   make test        the fast tests            make test-slow   the others
#   make lint        ruff and the import rules  make gpu-check  what a GPU machine needs to prove

PYTHON ?= python3.11
BIN := .venv/bin
READY := .venv/.ready

.PHONY: setup demo demo-adapter serve test test-slow lint format gpu-check clean

setup: $(READY)

# nvidia-pytriton carries a real tritonserver; without its dependencies, because it asks for numpy<2 (serve/README.md).
$(READY): pyproject.toml constraints.txt
	@echo "Setting up .venv (torch, Megatron-core, Energon): 2 to 5 minutes, once."
	@start=$$(date +%s) && \
	$(PYTHON) -m venv .venv && \
	$(BIN)/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt --editable '.[train,export,serve,postgres,t5,tables,wandb,dev]' && \
	$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps nvidia-pytriton==0.7.0 && \
	touch $@ && \
	echo "Set up in $$(( $$(date +%s) - start )) s."

demo: $(READY)
	@$(BIN)/megadit demo

demo-adapter: $(READY)
	@test -d runs/demo/bundle || $(BIN)/megadit demo
	@$(BIN)/megadit demo-adapter

serve: $(READY)
	@$(BIN)/megadit serve demo

# Workers share the cores, a group of tests at a time (tests/workers.py). Fast tests wait often: three keep two cores
# busy; slow ones start ranks of their own.
WORKERS ?= 3
SLOW_WORKERS ?= 2
PYTEST := $(BIN)/python -m pytest -q

test: $(READY)
	@$(PYTEST) --numprocesses $(WORKERS) -m "not slow"

test-slow: $(READY)
	@$(PYTEST) --numprocesses $(SLOW_WORKERS) -m slow

lint: $(READY)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports --no-cache

format: $(READY)
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .
	@$(BIN)/python docs/count.py --write

# No virtual environment, no network: whatever torch and Python are there (GPU_PYTHON=... to choose).
GPU_PYTHON ?= python3
gpu-check:
	@$(GPU_PYTHON) tests/gpu_check.py

clean:
	rm -rf build dist/*.whl *.egg-info .pytest_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
