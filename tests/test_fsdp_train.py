"""fsdp_train.py as a user runs it: under torchrun or alone, interrupted, with user errors."""

import json
import math
import re
import shutil

import numpy as np
import pytest
import torch
from conftest import ROOT, flags_for, slowly
from launches import SIZE, Job, steps_of, train_in

import checkpoint
import config
import data
import fsdp_train
from config import MPTConfig, TrainConfig
from lifecycle import runlog
from model import MPT, init_weights
from weights import load

BATCH = "--global_batch_size=8 --microbatch_size=1 --warmup_steps=2 --max_steps=6".split()
BATCH += ["--eval_tokens=2000"]
WHERE = ["--run_dir=run"]
MODEL = MPTConfig(d_model=32, n_heads=4, n_layers=2, vocab_size=260, max_seq_len=32)
# wte, wpe, blocks (weights; biases and norms), norm_f
N_PARAMS = 260 * 32 + 32 * 32 + 2 * (12 * 32**2 + 13 * 32) + 2 * 32


def flags(tiny_data, *more) -> list[str]:
    return [*SIZE, *BATCH, *WHERE, "--precision=fp32", *flags_for(tiny_data), *more]


def rows_by_step(run_dir) -> tuple[dict, dict]:
    """{step: (loss, norm, lr, tokens)} and {step: validation loss}, the figures without timing."""
    keys = ("loss", "grad_norm", "lr", "tokens")
    curve = {step: [row[key] for key in keys] for step, row in steps_of(run_dir).items()}
    rows = runlog.read(run_dir)
    return curve, {row["step"]: row["val_loss"] for row in rows if "val_loss" in row}


@pytest.fixture(scope="module")
def first_run(tmp_path_factory, tiny_text):
    """configs/mpt1b.py on four ranks with other sizes and data: its folder and its output."""
    folder = tmp_path_factory.mktemp("mpt1b")
    source = [f"--dataset={tiny_text}/*.txt", "--tokenizer=bytes", "--val_fraction=0.1"]
    changed = [*SIZE, *BATCH, *WHERE, *source, "--data_dir=tokens", "--peak_tflops=0.001"]
    with Job(folder, 4, fsdp_train.main, [ROOT / "configs/mpt1b.py", *changed]) as job:
        assert job.wait() == [0] * 4, job.log()
    return folder, job.log()


@pytest.fixture
def finished(first_run, tmp_path):
    """A copy of that finished run in tmp_path, and the flags that belong to it."""
    shutil.copytree(first_run[0], tmp_path, dirs_exist_ok=True)
    changed = [*SIZE, *BATCH, *WHERE, *flags_for(tmp_path / "tokens"), "--peak_tflops=0.001"]
    return [ROOT / "configs/mpt1b.py", *changed]


# -------------------------------------------------------------------------------------------------
# What a run writes down


@pytest.mark.slow
def test_four_ranks_train_mpt1b_with_sizes_and_data_changed(first_run):
    """The same batches as `data.Split` gives, and a loss that starts near that of guessing."""
    folder, out = first_run
    curve, val = rows_by_step(folder / "run")
    assert list(curve) == [1, 2, 3, 4, 5, 6] and list(val) == [0, 6]
    assert val[0] == pytest.approx(math.log(260), abs=1.5) and val[6] < val[0]
    assert f"MPT of {N_PARAMS:,} parameters" in out and "4 x cpu, ZERO1" in out
    assert "= 4 data-parallel ranks x 2 in 2 microbatches" in out
    (saved,) = (folder / "run/checkpoints").iterdir()
    assert saved.name == "step-6"
    assert load.load_model(saved, torch.device("cpu")).cfg == MODEL


def test_the_loss_of_the_first_step_is_that_of_the_first_batch(first_run):
    """By hand. Step 1 has a learning rate of 0, so step 2 still has the initial weights."""
    folder, _ = first_run
    rows = steps_of(folder / "run")
    saved = checkpoint.read_meta(checkpoint.latest(folder / "run"))
    rel = 5e-6 if saved["precision"] == "fp32" else 5e-3
    model = MPT(MODEL)
    init_weights(model, TrainConfig.seed)
    train = data.Split(folder / "tokens", "train", 32)
    for step in (0, 1):
        batch = torch.from_numpy(train.batch(TrainConfig.seed, step, 8))
        with torch.no_grad():
            logits = model(batch[:, :-1]).flatten(0, 1)
        by_hand = torch.nn.functional.cross_entropy(logits, batch[:, 1:].flatten()).item()
        assert rows[step + 1]["loss"] == pytest.approx(by_hand, rel=rel)


STEP_KEYS = """
    step tokens loss lr grad_norm batch_hash skipped tokens_per_second mfu memory_gb seconds
    slowest_rank slowest_by
""".split()


def test_the_figures_of_a_step_are_what_one_computes_by_hand(first_run):
    """tokens/s = 8 x 32 / seconds; MFU = (6 N + 12 L d S) x tokens/s / (4 ranks x 10^9 FLOP/s)."""
    folder, out = first_run
    printed = re.findall(r"step (\d)/6  loss ([\d.]+) .* ([\d,]+) tokens/s  MFU ([\d.]+)%", out)
    shown = {int(step): figures for step, *figures in printed}
    assert {1, 6} <= shown.keys()
    for step, row in steps_of(folder / "run").items():
        assert list(row) == STEP_KEYS and row["tokens"] == step * 8 * 32
        by_hand = 8 * 32 / row["seconds"]
        assert row["tokens_per_second"] == pytest.approx(by_hand, rel=1e-9)
        use = (6 * N_PARAMS + 12 * 2 * 32 * 32) * by_hand / (4 * 1e9)
        assert row["mfu"] == pytest.approx(use, rel=1e-6)
        expected = [f"{row['loss']:.4f}", f"{by_hand:,.0f}", f"{use:.1%}"[:-1]]
        assert shown.get(step, expected) == expected


def test_validation_is_given_in_bits_a_byte_as_well(first_run):
    """In bytes, a token is a byte but for the end-of-text of each document."""
    folder, _ = first_run
    val = data.Split(folder / "tokens", "val", 32)
    assert val.tokens == val.text_bytes + 4
    for row in (row for row in runlog.read(folder / "run") if "val_loss" in row):
        assert list(row) == ["step", "val_loss", "val_bits_per_byte"]
        bits = row["val_loss"] / math.log(2) * val.tokens / val.text_bytes
        assert row["val_bits_per_byte"] == pytest.approx(bits, rel=1e-9)


def test_the_run_folder_says_what_ran(first_run):
    folder, _ = first_run
    resolved = json.loads((folder / "run" / "config.json").read_text())
    assert config.from_dict(MPTConfig, resolved) == MODEL
    wanted = {"lr": 2e-4, "global_batch_size": 8, "microbatch_size": 1, "max_steps": 6}
    assert wanted.items() <= resolved.items()
    (started,) = runlog.read_launches(folder / "run")
    assert "configs/mpt1b.py" in started["command"] and "--d_model=32" in started["command"]
    assert (started["ranks"], started["device"], started["first_step"]) == (4, "cpu", 0)
    assert started["torch"] == torch.__version__ and started["precision"] in ("fp32", "bf16")


# -------------------------------------------------------------------------------------------------
# Again, interrupted, alone


@pytest.fixture
def again(ranks, finished, tmp_path):
    """`again(*flags)`: the finished run's command with more flags; what it printed."""

    def start(*more):
        ((status, message, said),) = ranks(1)(train_in, tmp_path, [*map(str, finished), *more])
        assert status == 0, message
        return said

    return start


def test_a_finished_run_is_left_as_it_is_or_put_aside(again, tmp_path):
    before = contents(tmp_path / "run")
    said = again()
    assert "run: finished, run/checkpoints/step-6 has all 6 steps. " in said
    assert "MPT of" not in said and contents(tmp_path / "run") == before
    said = again("--resume=again", "--max_steps=4", "--lr=1e-3")
    assert f"the finished run is kept in {tmp_path}/run-1" in said
    assert contents(tmp_path / "run-1") == before
    assert list(rows_by_step(tmp_path / "run")[0]) == [1, 2, 3, 4]
    assert checkpoint.latest(tmp_path / "run").name == "step-4"


def test_weights_of_another_run_and_tasks_on_the_fly(again, tmp_path):
    """A run with the weights of a finished one scores a task at steps 0, 2, 4 and at its end."""
    row = {"query": "the river", "choices": ["sees", "%%%%"], "gold": 0}
    (tmp_path / "task.jsonl").write_text(f"{json.dumps(row)}\n" * 3)
    kept = "hugging_face/generation_config.json"  # as `weights.hf import` leaves it
    (tmp_path / "run" / kept).parent.mkdir()
    (tmp_path / "run" / kept).write_text('{"eos_token_id": [7, 9]}')
    more = "--run_dir=second --init_from=run --max_steps=5 --eval_interval=3 --icl_interval=2"
    said = again(*more.split(), "--icl_tasks=task.jsonl")
    assert "second: starting from run" in said and "chance 0.500" in said
    assert json.loads((tmp_path / "second" / kept).read_text()) == {"eos_token_id": [7, 9]}
    rows = runlog.read(tmp_path / "second")
    val_losses = {row["step"]: row["val_loss"] for row in rows if "val_loss" in row}
    assert list(val_losses) == [0, 3, 5]
    tasks = {row["step"]: row["icl"]["task"] for row in rows if "icl" in row}
    assert list(tasks) == [0, 2, 4, 5]
    assert all(task["n"] == 3 and task["foundry"] in (0, 1) for task in tasks.values())
    ended = list(rows_by_step(tmp_path / "run")[1].values())[-1]
    assert val_losses[0] == pytest.approx(ended, rel=1e-3)


def test_more_steps_go_on_where_it_ended(again, tmp_path):
    """Alone, what four ranks began."""
    before = rows_by_step(tmp_path / "run")[0]
    again("--max_steps=8")
    after = rows_by_step(tmp_path / "run")[0]
    assert list(after) == list(range(1, 9)) and {step: after[step] for step in before} == before
    second = runlog.read_launches(tmp_path / "run")[1]
    assert (second["ranks"], second["first_step"]) == (1, 6)
    assert second["resumed"] == "run/checkpoints/step-6"


def contents(folder):
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "lease.json")
    return {path.relative_to(folder): path.read_bytes() for path in files}


@pytest.mark.parametrize("times", [slowly(2), pytest.param(10, marks=pytest.mark.long)])
def test_launches_end_well_again_and_again(tiny_data, tmp_path, times):
    """With gloo a rank now and then aborts while the interpreter shuts down.

    processes.run must not let it.
    """
    for number in range(times):
        argv = flags(tiny_data, f"--run_dir=run{number}", "--max_steps=3")
        with Job(tmp_path, 2, fsdp_train.main, argv) as job:
            assert job.wait() == [0, 0], job.log()
    ends = [list(rows_by_step(tmp_path / f"run{number}")[0].values()) for number in range(times)]
    assert np.ptp(np.array(ends), axis=0).max() == 0  # and bit by bit alike


# -------------------------------------------------------------------------------------------------
# Mistakes: one line, exit status 2


@pytest.mark.slow
def test_a_mistake_of_many_ranks_is_one_line(torchrun, tiny_data):
    done = torchrun(3, *flags(tiny_data))
    assert done.returncode != 0
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("error")]
    problem = "global_batch_size 8 is not a multiple of the 3 data-parallel ranks"
    assert lines == [f"error: {problem}: set --global_batch_size=6 or 9"]
    # torchrun shows a traceback of its own, not of ours
    assert 'fsdp_train.py", line' not in done.stderr


def assert_refused(answers, *parts) -> None:
    """All ranks leave with status 2 and one message, which has these parts."""
    ((status, message),) = {(status, message) for status, message, _ in answers}
    assert status == 2 and "\n" not in message
    assert all(part in message for part in parts), message


@pytest.mark.parametrize(
    "size, mistake, parts",
    [
        (1, "--dataset=nowhere/*.txt --data_dir=empty", ["dataset='nowhere/*.txt'", "no .txt"]),
        (2, "--vocab_size=256", ["vocab_size 256", "257 ids"]),
        (2, "--max_seq_len=100000", ["needs 100,001 tokens", "--max_seq_len"]),
        (1, "--tokenizer=bpe-300", ["--tokenizer=bytes, not bpe-300"]),
        (2, "--resume=nowhere", ["no checkpoint in 'nowhere'"]),
        (2, "--sharding=HYBRID_SHARD --shard_size=3", ["shard_size 3 does not divide"]),
        (2, "--tp=2 --sequence_parallel --max_seq_len=31", ["does not divide max_seq_len"]),
        slowly(3, "--pp=2", ["3 ranks cannot form a grid of tp 1 x pp 2"]),
    ],
)
def test_mistakes_are_named(ranks, tiny_data, tmp_path, size, mistake, parts):
    assert_refused(ranks(size)(train_in, tmp_path, flags(tiny_data, *mistake.split())), *parts)
    assert not (tmp_path / "run/metrics.jsonl").exists()


@pytest.mark.parametrize(
    "mistake, parts",
    [
        ("--d_model=64 --n_layers=3", ["d_model 32 (here 64), n_layers 2 (here 3)", "--run_dir"]),
        ("--lr=1e-3", ["another run: lr 0.0002 (here 0.001)", "--resume=again"]),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_named(ranks, finished, tmp_path, mistake, parts):
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    answers = ranks(1)(train_in, tmp_path, [*map(str, finished), *mistake.split()])
    assert_refused(answers, "run/checkpoints/step-6", *parts)
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before
