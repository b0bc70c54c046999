# The only thing needed beforehand is Python 3.11, 3.12 or 3.13, or uv. make setup PYTHON=... chooses another.
#   make demo        prepare, train, generate and score handwritten digits on the CPU, in minutes
#   make demo-adapter  teach that model a shape it never saw, from ten clips
#   make demo-conditioning  teach it to take first and last frames, clips, masks and instructions
#   make demo-reward  teach it by rewards to keep digits in the left half
#   make demo-distill  students of that model that need four calls for a clip, two, or one
#   make demo-shapes  a model of its own: scenes in which things move, turn, grow and change colour
#   make serve       Triton and a page in the browser, on what `make demo` made
#   make test        the fast tests            make test-slow   the others
#   make docs        the pages of docs/ as a site, in build/site
#   make fuzz        ten minutes of random bytes for each parser of what others wrote
#   make lint        ruff and the import rules  make gpu-check  what a GPU machine needs to prove

BIN := .venv/bin
READY := .venv/.ready

.PHONY: setup demo demo-adapter demo-conditioning demo-distill demo-reward demo-shapes serve test test-slow fuzz docs lint format gpu-check gpu-wheels clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@./setup.sh
	@touch $@

demo: $(READY)
	@$(BIN)/megadit demo

demo-conditioning: $(READY)
	@test -d runs/demo/bundle || $(BIN)/megadit demo
	@$(BIN)/megadit demo-conditioning

demo-distill: $(READY)
	@test -d runs/demo/bundle || $(BIN)/megadit demo
	@$(BIN)/megadit demo-distill

demo-reward: $(READY)
	@test -d runs/demo/bundle || $(BIN)/megadit demo
	@$(BIN)/megadit demo-reward

demo-adapter: $(READY)
	@test -d runs/demo/bundle || $(BIN)/megadit demo
	@$(BIN)/megadit demo-adapter

demo-shapes: $(READY)
	@$(BIN)/megadit demo-shapes

serve: $(READY)
	@$(BIN)/megadit serve demo

# Workers share the cores, a group of tests at a time (tests/workers.py). Fast tests wait often: four keep two cores
# busy; slow ones start ranks of their own, and three do.
WORKERS ?= 4
SLOW_WORKERS ?= 3
PYTEST := $(BIN)/python -m pytest -q

test: $(READY)
	@$(PYTEST) --numprocesses $(WORKERS) -m "not slow"

test-slow: $(READY)
	@$(PYTEST) --numprocesses $(SLOW_WORKERS) -m slow

# schemathesis on the gateway, then atheris (wheels for Linux and macOS) on each parser of outside bytes; what it finds is
# kept in tests/fuzz/corpus, and tried by the fast tests from then on.
FUZZ_SECONDS ?= 600
FUZZ_CASES ?= 1000
fuzz: $(READY)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check atheris==3.0.0
	@$(PYTEST) tests/serve/gateway/test_fuzz.py --cases $(FUZZ_CASES)
	@for name in $$($(BIN)/python -c 'from tests.fuzz.parsers import PARSERS; print(*PARSERS)'); do \
		echo "$$name:" && $(BIN)/python -m tests.fuzz.run $$name $(FUZZ_SECONDS) || exit 1; done

docs: $(READY)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

lint: $(READY)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/python tests/import_rules.py --no-cache
	@$(BIN)/python docs/prose.py

format: $(READY)
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .
	@$(BIN)/python docs/count.py --write

# No virtual environment, no network: whatever torch and Python are there (GPU_PYTHON=... to choose). GPU_CHECK="--only
# layers,7b --budget 500 --out FOLDER" takes a part of it; tests/gpu_check.py says more.
GPU_PYTHON ?= python3
gpu-check:
	@$(GPU_PYTHON) tests/gpu_check.py $(GPU_CHECK)

# What a GPU machine without a network lacks beside torch, for the Python that it has.
GPU_PYTHON_VERSION ?= 3.12
GPU_WHEELS := anyio attrs av braceexpand bracex cffi deprecation diffusers filetype h11 httpcore httpx \
	importlib-metadata jsonschema jsonschema-specifications lark megatron-core==0.16.1 megatron-energon mfusepy multi-storage-client omegaconf \
	opentelemetry-api pycparser rapidyaml referencing rpds-py wcmatch==10.2.1 webdataset xattr
gpu-wheels:
	@$(GPU_PYTHON) -m pip download --quiet --no-deps --only-binary=:all: --python-version $(GPU_PYTHON_VERSION) \
		--platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 --dest dist/gpu $(GPU_WHEELS)

clean:
	rm -rf build dist/*.whl *.egg-info .pytest_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
