"""configs/llama_like.py with other sizes and all of MPT's settings, through each door once."""

import contextlib
import itertools
import json
import os
import signal
from unittest import mock

import pytest
import torch
from conftest import ROOT
from launches import Job, steps_of, train_in
from servers import Served

import fsdp_train
import generate
import plan
from lifecycle import runlog
from weights import load, peft

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

SIZE = "--d_model=48 --n_heads=4 --kv_n_heads=2 --n_layers=2 --max_seq_len=32 --vocab_size=257"
MORE = """
    --qk_gn --sliding_window_size=12 --attn_logit_softcapping=5 --final_logit_softcapping=9
    --embedding_fraction=0.5
"""
DATA = "--dataset=stdlib --tokenizer=bytes --max_tokens=100000 --data_dir=tokens"
RUN = """
    --global_batch_size=8 --microbatch_size=2 --max_steps=6 --schedule=constant --warmup_steps=1
    --lr=1e-2 --eval_tokens=2000 --save_interval=2 --keep_last=9 --device=cpu --precision=fp32
"""
LORA = "--init_from=alone --lora_rank=4 --tp=2 --max_steps=20 --lr=5e-3".split()
CONFIG = str(ROOT / "configs/llama_like.py")
FLAGS = [CONFIG, *SIZE.split(), *MORE.split(), *DATA.split(), *RUN.split()]
CPU = torch.device("cpu")
PROMPTS = ["def", "for line in open(path).read():", "import os, sys, re, json\n"]
PROMPTS += ["class Path:\n    def __init__(self, name):"]  # longer than rows of training


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("llama")


def train(pool, folder, name, *flags) -> str:
    """What the trainer prints, of a run that ends well."""
    status, message, said = pool(train_in, folder, [*FLAGS, f"--run_dir={name}", *flags])[0]
    assert status == 0, message
    return said


def losses(run) -> list[float]:
    return [row["loss"] for row in steps_of(run).values()]


@pytest.fixture(scope="module")
def alone(ranks, folder):
    """A run of one process."""
    train(ranks(1), folder, "alone")
    found = losses(folder / "alone")
    assert len(found) == 6 and found[-1] < found[0] - 0.5
    return folder / "alone"


@pytest.fixture(scope="module")
def tuned(ranks, folder, alone):
    """Adapters on it, which two tensor ranks train."""
    train(ranks(2), folder, "tuned", *LORA)
    base, found = (
        [row["val_loss"] for row in runlog.read(run) if "val_loss" in row]
        for run in (alone, folder / "tuned")
    )
    assert found[0] == pytest.approx(base[-1], rel=1e-4) and found[-1] < found[0] - 0.02
    return folder / "tuned"


@pytest.mark.parametrize(
    "layout", ["--sharding=FULL_SHARD", "--tp=2 --sequence_parallel", "--pp=2"], ids=str
)
def test_two_ranks_train_it_as_one_does(layout, ranks, folder, alone):
    name = layout.split("=")[0].strip("-")
    train(ranks(2), folder, name, *layout.split())
    assert losses(folder / name) == pytest.approx(losses(alone), rel=1e-4)


@contextlib.contextmanager
def dying(rank):
    """In its sixth step each rank is killed."""
    count = itertools.count(1)
    step = fsdp_train.train_step

    def train_step(*args, **more):
        if next(count) == 6:
            os.kill(os.getpid(), signal.SIGKILL)
        return step(*args, **more)

    with mock.patch.object(fsdp_train, "train_step", train_step):
        yield


def test_it_resumes_after_it_was_killed(ranks, folder, alone):
    """On one rank, where two ranks began. To save step 4, they wait until step 2 is written."""
    flags = [*FLAGS, "--run_dir=killed"]
    with Job(folder, 2, fsdp_train.main, flags, fault=dying) as job:
        statuses = job.wait()
        assert -signal.SIGKILL in statuses and None not in statuses, job.log()
    assert "resuming from killed/checkpoints/step-" in train(ranks(1), folder, "killed")
    assert losses(folder / "killed") == pytest.approx(losses(alone), rel=1e-4)


@torch.no_grad()
def greedy(run, prompt, n):
    """The likeliest text of n tokens: each by a forward over the whole text."""
    model, tokenizer, _ = load.load_for_sampling(str(run), None, CPU)
    ids = tokenizer.encode(prompt).tolist()
    for _ in range(n):
        ids.append(model(torch.tensor([ids]))[0, -1].argmax().item())
    return tokenizer.decode(ids[-n:])


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_generate_writes_what_the_whole_forward_does(batch_size, tuned, capsys):
    """Of its adapters, merged. The first ones leave the batch, and others join."""
    prompts = [f"--prompt={prompt}" for prompt in PROMPTS]
    how = ["--temperature=0", "--precision=fp32", "--json", "--max_new_tokens=20"]
    generate.main([str(tuned), *prompts, *how, f"--batch_size={batch_size}"])
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {text["prompt"]: text["text"] for text in found} == {
        prompt: greedy(tuned, prompt, 20) for prompt in PROMPTS
    }


def test_it_is_served_with_its_adapters(folder, alone, tuned):
    """Twice, so that the second request finds the beginning of its prompt in the cache."""
    pytest.importorskip("fastapi")
    peft.export(tuned, folder / "adapters/tuned", str(alone))
    served = Served(folder, "--adapters=adapters", "--precision=fp32", "--rows=4", model="alone")
    for run in (alone, tuned, alone):
        asked = {"model": run.name, "prompt": PROMPTS, "max_tokens": 20, "temperature": 0}
        status, answer = served.post("/v1/completions", asked)
        assert status == 200, answer
        texts = [choice["text"] for choice in answer["choices"]]
        assert texts == [greedy(run, prompt, 20) for prompt in PROMPTS]
    assert served.stop() == 0


def test_it_is_planned(capsys):
    plan.main([*FLAGS, "--precision=bf16", "--device=a100", "--devices=2"])
    assert "tokens/s" in capsys.readouterr().out
