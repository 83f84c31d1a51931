"""TROUBLE.md: what it advises, done for real on a small run. Its other commands are run by test_readme.py."""

import os
import re
import shutil

import pytest
from conftest import ROOT, flags_for

from lifecycle import runlog

TINY = "--d_model=32 --n_heads=4 --n_layers=2 --vocab_size=260 --max_seq_len=32 --precision=fp32 --warmup_steps=1"
TINY = [
    *TINY.split(),
    "--global_batch_size=8",
    "--microbatch_size=2",
    "--eval_tokens=64",
    "--save_interval=2",
]


@pytest.fixture
def train(python, tiny_data):
    """`train(*flags)` is fsdp_train.py on the small data: its output; it must end with 0."""

    def call(*flags, data=tiny_data):
        done = python(*TINY, *flags_for(data), *flags)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return call


def losses(run) -> dict:
    """{step: loss}, of training."""
    return {row["step"]: row["loss"] for row in runlog.read(run) if "loss" in row}


@pytest.mark.slow
def test_a_run_goes_on_in_another_place_without_its_text(train, tiny_data, tmp_path):
    """Its folder and its data are all it needs; the loss is what it would have been."""
    train("--run_dir=here/straight", "--max_steps=4", "--schedule=constant")
    train("--run_dir=here/moved", "--max_steps=2", "--schedule=constant")
    os.makedirs(tmp_path / "there")
    shutil.move(tmp_path / "here/moved", tmp_path / "there/run")
    shutil.copytree(tiny_data, tmp_path / "there/data")
    more = [
        "--run_dir=there/run",
        f"--data_dir={tmp_path / 'there/data'}",
        "--max_steps=4",
        "--schedule=constant",
    ]
    assert "there/run: resuming from there/run/checkpoints/step-2" in train(*more)
    moved = losses(tmp_path / "there/run")
    assert len(moved) == 4 and moved == losses(tmp_path / "here/straight")


@pytest.mark.slow
def test_a_jump_of_the_loss_is_left_out_from_an_earlier_checkpoint(train, tmp_path):
    train("--run_dir=runs/demo", "--max_steps=6")
    flags = "--resume=runs/demo/checkpoints/step-2 --skip_steps=4:6 --run_dir=runs/demo-2 --max_steps=6".split()
    train(*flags)
    assert [step for step in losses(tmp_path / "runs/demo-2") if step > 2] == [3, 6]


@pytest.mark.slow
def test_a_trainer_whose_reader_has_left_ends_quietly(tiny_data, tmp_path):
    from test_program import run

    words = ["fsdp_train.py", *TINY, *flags_for(tiny_data), "--max_steps=3", "--run_dir=unread"]
    status, _, err = run(words, tmp_path, read=False)
    assert status == 141 and "Traceback" not in err and "error" not in err, err


def test_each_case_is_short_and_has_a_command():
    """A minute is about 150 words."""
    cases = re.split(r"^## ", (ROOT / "TROUBLE.md").read_text(), flags=re.M)[1:]
    assert len(cases) >= 9
    for case in cases:
        assert len(case.split()) <= 150, case.splitlines()[0]
        assert re.search(
            r"```sh\n|`(sbatch|export|rsync|python)|[Tt]he same\s+command|error: ", case
        ), case
