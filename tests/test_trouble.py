"""What TROUBLE.md advises is done for real, on a small run. Its commands: test_readme.py."""

import os
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from conftest import ROOT, flags_for
from launches import SIZE, steps_of

import checkpoint
import program
from program import UserError
from weights import load, peft

BATCH = "--global_batch_size=8 --microbatch_size=2 --warmup_steps=1 --precision=fp32".split()
SMALL = [*SIZE, *BATCH, "--eval_tokens=64", "--save_interval=2"]


@pytest.fixture
def train(forks, tiny_data, tmp_path):
    """`train(*flags)` is what fsdp_train.py prints on the small data. status: of its exit."""

    def call(*flags, status=0):
        words = [str(ROOT / "fsdp_train.py"), *SMALL, *flags_for(tiny_data), *flags]
        ended, out, err = forks(words, tmp_path)
        assert ended == status, err
        return out + err

    return call


def losses(run_dir) -> dict:
    return {step: row["loss"] for step, row in steps_of(run_dir).items()}


@pytest.mark.slow
def test_a_run_resumes_in_another_place_without_its_text(train, tiny_data, tmp_path):
    """Its folder and its data are enough, and the losses are those of a run that never moved."""
    train("--run_dir=here/straight", "--max_steps=4", "--schedule=constant")
    train("--run_dir=here/moved", "--max_steps=2", "--schedule=constant")

    os.makedirs(tmp_path / "there")
    shutil.move(tmp_path / "here/moved", tmp_path / "there/run")
    shutil.copytree(tiny_data, tmp_path / "there/data")
    places = ["--run_dir=there/run", f"--data_dir={tmp_path / 'there/data'}"]
    printed = train(*places, "--max_steps=4", "--schedule=constant")

    assert "there/run: resuming from there/run/checkpoints/step-2" in printed
    moved = losses(tmp_path / "there/run")
    assert len(moved) == 4 and moved == losses(tmp_path / "here/straight")


@pytest.mark.slow
def test_a_base_that_trains_on_keeps_the_checkpoint_of_its_adapters(train, tmp_path):
    """With --keep_every, or in a copy. Otherwise it may be deleted: then what is left says so."""
    train("--run_dir=runs/base", "--max_steps=2", "--schedule=constant")
    adapters = ["--lora_rank=2", "--run_dir=runs/lora", "--schedule=constant"]
    train("--init_from=runs/base", *adapters, "--max_steps=2")
    shutil.copytree(tmp_path / "runs/base", tmp_path / "runs/kept")
    longer = ["--max_steps=6", "--schedule=constant", "--keep_last=1"]
    train("--run_dir=runs/kept", *longer, "--keep_every=2")
    assert (tmp_path / "runs/kept/checkpoints/step-2").exists()

    train("--run_dir=runs/base", *longer)
    newest = checkpoint.latest(tmp_path / "runs/lora")
    place = f"they were in {tmp_path}/runs/base/checkpoints/step-2: put them there, or"
    merge = "python -m weights.peft merge RUN OUT --init_from=PATH"
    with pytest.raises(UserError, match=f"does not hold the weights .*; {place} run {merge}$"):
        load.load_model(newest, torch.device("cpu"))
    step_2 = f"--init_from={tmp_path}/runs/kept/checkpoints/step-2"
    peft.main(["merge", str(tmp_path / "runs/lora"), str(tmp_path / "runs/whole"), step_2])
    load.load_model(checkpoint.find(str(tmp_path / "runs/whole")), torch.device("cpu"))

    printed = train("--init_from=runs/base", *adapters, "--max_steps=4", status=2)
    assert printed.endswith(f"{place} set --init_from to them\n")
    train(step_2, *adapters, "--max_steps=4")


def test_a_command_in_a_message_is_words_of_a_shell():
    """Quoted only where a shell needs it."""
    command = program.shell("runs/demo", Path("a b"), "--prompt=def $x")
    assert command == "runs/demo 'a b' '--prompt=def $x'"
    assert shlex.split(program.shell("it's")) == ["it's"]
