# make demo    fine-tune a small Mixtral on 4 processes, attention and experts split differently
# make test    lint, then every feature once or more: a covering choice of cases (about 10 minutes on 2 cores)
# make test-full  the same with the whole matrices: before a release, and after a change of a host's version
# make lint    ruff and mypy
# make compat  parity tests at the corners of the supported range, in environments of their own (slow, by hand)
# make trainers  run other projects' trainers by their own commands, in environments of their own (slow, by hand)
# make docs    write docs/models.md anew, from the installed transformers, and draw docs/pictures/ anew
# make bench   measure traffic, time, memory and growth on this machine's CPU into benchmarks/results.md (slow, by hand)
# make clean   remove what the above leave behind, except the virtual environment
#
# The first call makes .venv and installs requirements-dev.txt into it.

SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
COMPILED := $(VENV)/.compiled
TORCH := $(shell sed -n 's/^\(torch==[^ ;]*\).*/\1/p' requirements-dev.txt)

DEMO_RANKS := 4
DEMO_LIMIT := 900
DEMO_ARGS ?=
BENCH_ARGS ?=
# Test runs side by side, file by file. Ranks wait for one another about half of the time, so two fill two cores.
TEST_WORKERS ?= 2
TRAINERS_ARGS ?=

# DeepSpeed compiles its CPU collectives with ninja, which the virtual environment has.
export PATH := $(CURDIR)/$(BIN):$(PATH)
# Several ranks share the cores: more than one thread each makes them slower, not faster.
export OMP_NUM_THREADS := 1
# What DeepSpeed compiles is kept with the environment it was compiled for.
export TORCH_EXTENSIONS_DIR ?= $(CURDIR)/$(VENV)/torch_extensions

.PHONY: demo test test-full lint compat trainers docs bench clean
.DELETE_ON_ERROR:

CHECK_PYTHON = import sys; v = sys.version_info; \
	v >= (3, 11) or sys.exit("Python 3.11 or newer is needed (transformers 5.24 needs it); " + sys.executable + \
	" is %d.%d. Name another one: make PYTHON=python3.12" % v[:2])
FREE_PORT = import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])
HAS_ENOUGH_GPUS = import sys, torch; sys.exit(torch.cuda.device_count() < $(DEMO_RANKS))

$(STAMP): requirements-dev.txt setup.py
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) not found: install Python 3.11 or newer"; exit 1; }
	@if [ -x $(BIN)/python ]; then $(BIN)/python -c '$(CHECK_PYTHON)'; else $(PYTHON) -c '$(CHECK_PYTHON)'; fi
	@if [ ! -x $(BIN)/python ]; then $(PYTHON) -m venv $(VENV); fi
	@# torch on its own, first: whichever build (CPU or CUDA) is set up here is then kept by all that depend on it.
	$(BIN)/python -m pip install $(TORCH)
	$(BIN)/python -m pip install -r requirements-dev.txt
	$(BIN)/python -m pip install --no-deps --no-build-isolation -e .
	@touch $@

# Once, in one process, before many start: torch's lock there has no owner, so a build that is killed, as a rank may be,
# would leave every later run waiting. Without GPUs only; there NCCL needs no such thing.
$(COMPILED): $(STAMP)
	@rm -rf $(TORCH_EXTENSIONS_DIR)/deepspeed_shm_comm
	@echo "compiling DeepSpeed's CPU collectives (about a minute, once)"
	@$(BIN)/python -c 'import torch; from deepspeed.comm.torch import build_shm_op; torch.cuda.is_available() or build_shm_op()'
	@touch $@

# With fewer GPUs than ranks the demo runs on the CPU. `timeout` keeps its children in a process group of its own, which
# Ctrl-C does not reach: the trap passes it on.
demo: $(COMPILED)
	@port=$$($(BIN)/python -c '$(FREE_PORT)'); \
	$(BIN)/python -c '$(HAS_ENOUGH_GPUS)' || export DS_ACCELERATOR=$${DS_ACCELERATOR:-cpu}; \
	timeout --kill-after=30 $(DEMO_LIMIT) \
	  deepspeed --num_accelerators $(DEMO_RANKS) --master_port $$port --module ds_etp \
	  examples/finetune_mixtral.py --deepspeed configs/demo.json --output runs/demo $(DEMO_ARGS) & job=$$!; \
	trap 'kill $$job' INT TERM; wait $$job

test: lint $(COMPILED)
	$(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile

test-full: lint $(COMPILED)
	$(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile --full

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

compat:
	PYTHON=$(PYTHON) tests/compat.sh

trainers: $(STAMP)
	$(BIN)/python -m tests.trainers $(TRAINERS_ARGS)

docs: $(STAMP)
	$(BIN)/python -m tests.families.table
	$(BIN)/python -m tests.docs.pictures

bench: $(COMPILED)
	$(BIN)/python -m benchmarks $(BENCH_ARGS)

clean:
	rm -rf $(VENV)/torch_extensions build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .compat .trainers .bench runs
	find ds_etp examples tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
