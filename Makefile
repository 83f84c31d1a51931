# make train      watch a small MPT learn to write: two to ten minutes on two CPU cores
#                 (ARGS="--lr=1e-3" to change a setting; a finished run trains anew and is kept
#                 with --resume=again)
# make finetune   adapters teach that model to answer questions: one or two minutes; prints answers
#                 before and after
# make elastic    the same run on 1 rank, and moved 1 -> 2 -> 4 (--tp, --pp) -> 1 over clusters that
#                 share only an object store; one is killed: five minutes, one picture
# make test       the quick tests: three to eight minutes on two CPU cores, after the set-up
# make test-all   the slow tests, without the quick ones: a quarter to half an hour
# make soak       the long tests, without the others: one to two hours, by estimate
# make bundle     a folder from which machines without internet are set up: for the workshop, or to
#                 train with a config (ARGS=configs/mpt1b.py)
# make mutants    one planted bug at a time: the quick tests must find each
# make lint       what ruff finds
#
# Each first makes .venv: install.py says what goes into it, and does nothing if all is there.
# PYTHON=... chooses the Python below it. Default: the first python3 on the PATH, so an active
# conda's or venv's.

PYTHON ?= $(shell command -v python3 >/dev/null 2>&1 && echo python3 || echo python)
PY = .venv/bin/python
# One process for each GPU (CUDA or ROCm), if they divide the demo's batch of 8; without a GPU, two.
COUNT = import torch; n = torch.cuda.device_count(); print(max(r for r in (1, 2, 4, 8) if r <= n) if n else 2)
RANKS = $(eval RANKS := $(shell $(PY) -c "$(COUNT)"))$(RANKS)
OMP_NUM_THREADS ?= $(shell $(PY) -c "import os; print(max(1, os.cpu_count() // $(RANKS)))")
LAUNCH = OMP_NUM_THREADS=$(OMP_NUM_THREADS) .venv/bin/torchrun --rdzv-backend=c10d --rdzv-endpoint=localhost:0 --nproc_per_node=$(RANKS)
# Threads that wait for each other sleep soon: see program.sleep_while_waiting.
ifndef OMP_WAIT_POLICY
export GOMP_SPINCOUNT ?= 1000
endif
# Many tests wait for processes to start: two files of them run at a time (pytest-xdist).
TWO_FILES = -n 2 --dist loadfile

.PHONY: help train finetune elastic bundle test test-all soak mutants lint setup setup-lessons setup-test
help:
	@sed -n '/^$$/q; s/^# \{0,1\}//p' Makefile

train: setup-lessons
	$(LAUNCH) fsdp_train.py configs/demo.py $(ARGS)
	$(PY) -m lifecycle.plot runs/demo
	$(PY) generate.py runs/demo --prompt='def __init__(self' --step=0
	$(PY) generate.py runs/demo --prompt='def __init__(self'
	@echo
	@echo "The run is in runs/demo: its settings, metrics.jsonl, checkpoints, the curve. Next: your words, your text, stories."
	@echo "  $(PY) generate.py runs/demo --prompt='def main('"
	@echo "  $(LAUNCH) fsdp_train.py configs/demo.py --dataset='my/*.txt' --run_dir=runs/mine"
	@echo "  $(LAUNCH) fsdp_train.py configs/stories.py"

finetune: setup runs/demo/checkpoints/step-700
	$(PY) -m lessons.questions
	$(LAUNCH) fsdp_train.py configs/lora_demo.py $(ARGS)
	OMP_NUM_THREADS=1 $(PY) -m lessons.finetuned runs/demo runs/lora-demo
	@echo
	@echo "The adapters are in runs/lora-demo. Next: ask, see how much of their rank is used, make them a whole model."
	@echo "  $(PY) generate.py runs/lora-demo --prompt='def area(width, height):'"
	@echo "  $(PY) -m lessons.spectrum runs/lora-demo"
	@echo "  $(PY) -m weights.peft merge runs/lora-demo runs/merged"

runs/demo/checkpoints/step-700: | setup
	$(LAUNCH) fsdp_train.py configs/demo.py

elastic: setup-lessons
	$(PY) -m lessons.elastic $(ARGS)

bundle: setup-lessons
	$(PY) -m lessons.bundle bundle $(ARGS)

test: setup-test
	$(PY) -m pytest -m "not slow and not long" $(TWO_FILES) $(ARGS)

test-all: setup-test
	$(PY) -m pytest -m "slow and not long" $(TWO_FILES) $(ARGS)

soak: setup-test
	$(PY) -m pytest -m "long" $(ARGS)

mutants: setup-test
	$(PY) tests/mutants.py $(ARGS)

lint: setup-test
	$(PY) -m ruff check .

setup:
	@"$(PYTHON)" install.py requirements.txt

setup-lessons:
	@"$(PYTHON)" install.py requirements.txt requirements-extra.txt

setup-test:
	@"$(PYTHON)" install.py requirements.txt requirements-dev.txt requirements-extra.txt
