"""fsdp_train.py as a user runs it: under torchrun or alone, interrupted, with user errors."""

import ast
import inspect
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import PATIENCE, ROOT, TORCHRUN, clean_environment, flags_for, launch

import checkpoint
import config
import data
import fsdp_train
from config import MPTConfig, TrainConfig
from lifecycle import runlog
from model import MPT, init_weights
from weights import load

SIZE = ["--d_model=32", "--n_heads=4", "--n_layers=2", "--vocab_size=260", "--max_seq_len=32"]
BATCH = [
    "--global_batch_size=8",
    "--microbatch_size=1",
    "--warmup_steps=2",
    "--max_steps=6",
    "--eval_tokens=2000",
]
WHERE = ["--run_dir=run"]
MODEL = MPTConfig(d_model=32, n_heads=4, n_layers=2, vocab_size=260, max_seq_len=32)
N_PARAMS = (
    260 * 32 + 32 * 32 + 2 * (12 * 32**2 + 13 * 32) + 2 * 32
)  # wte, wpe, blocks (weights; biases, norms), norm_f


def flags(tiny_data, *more) -> list[str]:
    return [*SIZE, *BATCH, *WHERE, "--precision=fp32", *flags_for(tiny_data), *more]


def rows_by_step(run_dir) -> tuple[dict, dict]:
    """{step: (loss, norm, lr, tokens)} and {step: validation loss}, the figures without timing."""
    rows = runlog.read(run_dir)
    steps = [row for row in rows if "loss" in row]
    assert len({row["step"] for row in steps}) == len(steps)  # none is there twice
    curve = {
        row["step"]: [row[key] for key in ("loss", "grad_norm", "lr", "tokens")] for row in steps
    }
    return curve, {row["step"]: row["val_loss"] for row in rows if "val_loss" in row}


def slowly(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.fixture(scope="module")
def first_run(tmp_path_factory, tiny_text):
    """configs/mpt1b.py on four ranks with other sizes and data: its folder and its output."""
    folder = tmp_path_factory.mktemp("mpt1b")
    changed = [
        *SIZE,
        *BATCH,
        *WHERE,
        f"--dataset={tiny_text}/*.txt",
        "--tokenizer=bytes",
        "--data_dir=tokens",
    ]
    changed += ["--val_fraction=0.1"]
    done = launch(
        [*TORCHRUN, "4"], folder, [ROOT / "configs/mpt1b.py", *changed, "--peak_tflops=0.001"]
    )
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


@pytest.fixture
def finished(first_run, tmp_path):
    """A copy of that finished run in tmp_path, and the flags that belong to it."""
    shutil.copytree(first_run[0], tmp_path, dirs_exist_ok=True)
    return [
        ROOT / "configs/mpt1b.py",
        *SIZE,
        *BATCH,
        *WHERE,
        *flags_for(tmp_path / "tokens"),
        "--peak_tflops=0.001",
    ]


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
    assert "batch 8 sequences x 32 = 4 data-parallel ranks x 2 in 2 microbatches" in out
    assert [path.name for path in (folder / "run" / "checkpoints").iterdir()] == ["step-6"]
    assert (
        load.load_model(folder / "run" / "checkpoints" / "step-6", torch.device("cpu")).cfg == MODEL
    )


def test_the_loss_of_the_first_step_is_that_of_the_first_batch(first_run):
    """By hand. Step 1 has a learning rate of 0, so step 2 still has the initial weights."""
    folder, _ = first_run
    rows = [row for row in runlog.read(folder / "run") if "loss" in row]
    saved = json.loads((folder / "run" / "checkpoints" / "step-6" / "meta.json").read_text())
    model = MPT(MODEL)
    init_weights(model, TrainConfig.seed)
    train = data.Split(folder / "tokens", "train", 32)
    for step in (0, 1):
        batch = torch.from_numpy(train.batch(TrainConfig.seed, step, 8))
        with torch.no_grad():
            logits = model(batch[:, :-1]).flatten(0, 1)
        by_hand = torch.nn.functional.cross_entropy(logits, batch[:, 1:].flatten()).item()
        assert rows[step]["loss"] == pytest.approx(
            by_hand, rel=5e-6 if saved["precision"] == "fp32" else 5e-3
        )


def test_metrics_have_exactly_their_keys(first_run):
    rows = runlog.read(first_run[0] / "run")
    step_keys = (
        "step tokens loss lr grad_norm batch_hash skipped tokens_per_second mfu memory_gb seconds"
    )
    step_keys = [*step_keys.split(), "slowest_rank", "slowest_by"]
    assert all(
        list(row) == (step_keys if "loss" in row else ["step", "val_loss", "val_bits_per_byte"])
        for row in rows
    )


def test_tokens_and_mfu_are_what_one_computes_by_hand(first_run):
    """tokens/s = 8 x 32 / seconds; MFU = (6 N + 12 L d S) x tokens/s / (4 ranks x 10^9 FLOP/s)."""
    folder, out = first_run
    printed = re.findall(r"step (\d)/6  loss ([\d.]+) .* ([\d,]+) tokens/s  MFU ([\d.]+)%", out)
    rows = [row for row in runlog.read(folder / "run") if "loss" in row]
    shown = {int(step): figures for step, *figures in printed}
    assert {1, 6} <= shown.keys() and [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    for row in rows:
        assert row["tokens"] == row["step"] * 8 * 32
        by_hand = 8 * 32 / row["seconds"]
        assert row["tokens_per_second"] == pytest.approx(by_hand, rel=1e-9)
        use = (6 * N_PARAMS + 12 * 2 * 32 * 32) * by_hand / (4 * 1e9)
        assert row["mfu"] == pytest.approx(use, rel=1e-6)
        expected = [f"{row['loss']:.4f}", f"{by_hand:,.0f}", f"{use:.1%}"[:-1]]
        assert shown.get(row["step"], expected) == expected


def test_validation_is_given_in_bits_a_byte_as_well(first_run):
    """In bytes, a token is a byte but for the end-of-text of each document."""
    folder, _ = first_run
    val = data.Split(folder / "tokens", "val", 32)
    assert val.tokens == val.text_bytes + 4
    for row in (row for row in runlog.read(folder / "run") if "val_loss" in row):
        bits = row["val_loss"] / math.log(2) * val.tokens / val.text_bytes
        assert row["val_bits_per_byte"] == pytest.approx(bits, rel=1e-9)


def test_the_run_folder_says_what_ran(first_run):
    folder, _ = first_run
    resolved = json.loads((folder / "run" / "config.json").read_text())
    assert config.from_dict(MPTConfig, resolved) == MODEL
    train = config.from_dict(TrainConfig, resolved)
    assert (train.lr, train.global_batch_size, train.microbatch_size, train.max_steps) == (
        2e-4,
        8,
        1,
        6,
    )
    (started,) = map(json.loads, (folder / "run" / "launches.jsonl").read_text().splitlines())
    assert "configs/mpt1b.py" in started["command"] and "--d_model=32" in started["command"]
    assert (started["ranks"], started["device"], started["first_step"]) == (4, "cpu", 0)
    assert started["torch"] == torch.__version__ and started["precision"] in ("fp32", "bf16")


# -------------------------------------------------------------------------------------------------
# Again, interrupted, alone


def test_a_finished_run_is_left_as_it_is(python, finished, tmp_path):
    before = contents(tmp_path)
    done = python(*finished)
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert "run: finished, run/checkpoints/step-6 has all 6 steps. " in done.stdout
    assert "MPT of" not in done.stdout and contents(tmp_path) == before


def contents(folder):
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "lease.json")
    return {path: path.read_bytes() for path in files}


@pytest.mark.slow
def test_again_puts_a_finished_run_aside(python, finished, tmp_path):
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    done = python(*finished, "--resume=again", "--max_steps=4", "--lr=1e-3")
    assert done.returncode == 0, done.stderr
    assert f"the finished run is kept in {tmp_path}/run-1" in done.stdout
    assert (tmp_path / "run-1" / "metrics.jsonl").read_text() == before
    assert checkpoint.latest(tmp_path / "run-1").name == "step-6"
    assert (
        list(rows_by_step(tmp_path / "run")[0]) == [1, 2, 3, 4]
        and checkpoint.latest(tmp_path / "run").name == "step-4"
    )


@pytest.mark.slow
def test_weights_of_another_run_and_tasks_on_the_fly(python, finished, tmp_path):
    """A run with the weights of a finished one scores a task at steps 0, 2, 4 and at its end."""
    row = {"query": "the river", "choices": ["sees", "%%%%"], "gold": 0}
    (tmp_path / "task.jsonl").write_text(f"{json.dumps(row)}\n" * 3)
    kept = "hugging_face/generation_config.json"  # as `weights.hf import` leaves it
    (tmp_path / "run" / kept).parent.mkdir()
    (tmp_path / "run" / kept).write_text('{"eos_token_id": [7, 9]}')
    more = [
        "--run_dir=second",
        "--init_from=run",
        "--max_steps=5",
        "--eval_interval=3",
        "--icl_interval=2",
    ]
    done = python(*finished, *more, "--icl_tasks=task.jsonl")
    assert done.returncode == 0, done.stderr
    assert "second: starting from run" in done.stdout and "chance 0.500" in done.stdout
    assert json.loads((tmp_path / "second" / kept).read_text()) == {"eos_token_id": [7, 9]}
    rows = runlog.read(tmp_path / "second")
    assert [row["step"] for row in rows if "val_loss" in row] == [0, 3, 5]
    tasks = [(row["step"], row["icl"]["task"]) for row in rows if "icl" in row]
    assert [step for step, _ in tasks] == [0, 2, 4, 5]
    assert all(figures["n"] == 3 and figures["foundry"] in (0, 1) for _, figures in tasks)
    ended = list(rows_by_step(tmp_path / "run")[1].values())[-1]
    assert next(row["val_loss"] for row in rows if "val_loss" in row) == pytest.approx(
        ended, rel=1e-3
    )


def test_more_steps_go_on_where_it_ended(python, finished, tmp_path):
    """Alone, what four ranks began."""
    before = rows_by_step(tmp_path / "run")[0]
    done = python(*finished, "--max_steps=8")
    assert done.returncode == 0, done.stderr
    after = rows_by_step(tmp_path / "run")[0]
    assert list(after) == list(range(1, 9)) and {step: after[step] for step in before} == before
    second = json.loads((tmp_path / "run" / "launches.jsonl").read_text().splitlines()[1])
    assert (second["ranks"], second["first_step"], second["resumed"]) == (
        1,
        6,
        "run/checkpoints/step-6",
    )


def kill_in_the_middle(command, cwd, first_step):
    """Start it, kill -9 all processes after `first_step` steps; the last step that it logged."""
    process = subprocess.Popen(command, cwd=cwd, env=clean_environment(), stdout=subprocess.DEVNULL)
    metrics, deadline = cwd / "run" / "metrics.jsonl", time.monotonic() + PATIENCE
    try:
        while not (metrics.exists() and f'"step": {first_step},' in metrics.read_text()):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.005)
    finally:
        ranks = subprocess.run(
            ["pgrep", "-P", str(process.pid)], capture_output=True, text=True
        ).stdout.split()
        for pid in [process.pid, *map(int, ranks)]:
            os.kill(pid, signal.SIGKILL)
        process.wait()
    return runlog.read(cwd / "run")[-1]["step"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "size, mode",
    [(2, "FULL_SHARD"), pytest.param(4, "HYBRID_SHARD", marks=pytest.mark.long)],
)
def test_killed_and_started_again_it_ends_as_if_nothing_had_happened(
    torchrun, tiny_data, tmp_path, size, mode
):
    """After kill -9 of all, the same command gives every figure of an undisturbed run."""
    these = [
        "--max_steps=64",
        "--save_interval=3",
        "--eval_interval=7",
        "--resid_pdrop=0.1",
        f"--sharding={mode}",
    ]
    these = flags(tiny_data, *these, f"--shard_size={size // 2}")
    command = [sys.executable, *TORCHRUN, str(size), str(ROOT / "fsdp_train.py"), *these]
    killed_at = kill_in_the_middle(command, tmp_path, 10)
    assert 10 <= killed_at < 64 and int(checkpoint.latest(tmp_path / "run").name[5:]) >= 6
    again = torchrun(size, *these)
    assert again.returncode == 0 and "resuming from run/checkpoints/step-" in again.stdout, (
        again.stderr
    )
    undisturbed = torchrun(size, *these, "--run_dir=other")
    assert undisturbed.returncode == 0, undisturbed.stderr
    assert rows_by_step(tmp_path / "run") == rows_by_step(tmp_path / "other")
    ends = [
        load.load_model(checkpoint.latest(tmp_path / run), "cpu").state_dict()
        for run in ("run", "other")
    ]
    assert all(torch.equal(a, b) for a, b in zip(*(end.values() for end in ends), strict=True))
    assert not list((tmp_path / "run" / "checkpoints").glob("*.tmp"))


@pytest.mark.slow
def test_killed_alone(python, tiny_data, tmp_path):
    """The same as a plain process."""
    these = flags(tiny_data, "--max_steps=60", "--save_interval=5", "--sharding=ZERO1")
    killed_at = kill_in_the_middle(
        [sys.executable, str(ROOT / "fsdp_train.py"), *these], tmp_path, 20
    )
    assert 20 <= killed_at < 60
    for run in ("run", "other"):
        assert python(*these, f"--run_dir={run}").returncode == 0
    assert rows_by_step(tmp_path / "run") == rows_by_step(tmp_path / "other")
    steps = [
        json.loads(line)["first_step"]
        for line in (tmp_path / "run" / "launches.jsonl").read_text().splitlines()
    ]
    assert len(steps) == 2 and steps[0] == 0 and 5 <= steps[1] <= killed_at + 1


# -------------------------------------------------------------------------------------------------
# Mistakes: one line, exit status 2


def assert_one_line(done, *parts):
    """All of stderr is one line that begins with `error: ` and has these parts."""
    assert done.returncode == 2, (done.returncode, done.stderr)
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
    assert all(part in done.stderr for part in parts), done.stderr


@pytest.mark.parametrize(
    "mistake, parts",
    [
        (["--n_layer=3"], ["unknown key 'n_layer'", "did you mean 'n_layers'?"]),
        slowly(
            ["--dataset=nowhere/*.txt", "--data_dir=empty"], ["dataset='nowhere/*.txt'", "no .txt"]
        ),
        (["--vocab_size=256"], ["vocab_size 256 is less than the 257 ids", "raise it"]),
        slowly(
            ["--max_seq_len=100000"],
            ["max_seq_len 100000 needs 100,001 tokens in one file", "lower --max_seq_len"],
        ),
        slowly(["--tokenizer=bpe-300"], ["was made with --tokenizer=bytes, not bpe-300"]),
        slowly(["--resume=nowhere"], ["no checkpoint in 'nowhere'"]),
    ],
    ids=["typo", "corpus", "vocabulary", "length", "tokenizer", "checkpoint"],
)
def test_a_mistake_is_one_line(python, tiny_data, mistake, parts):
    assert_one_line(python(*flags(tiny_data, *mistake)), *parts)


@pytest.mark.parametrize(
    "mistake, parts",
    [
        (
            ["--d_model=64", "--n_layers=3"],
            ["another model: d_model 32 (here 64), n_layers 2 (here 3)", "--run_dir"],
        ),
        (["--seed=1"], ["another order: seed 1337 (here 1)"]),
        slowly(["--lr=1e-3"], ["another run: lr 0.0002 (here 0.001)", "--resume=again"]),
        slowly(["--resume=never"], ["run holds run/checkpoints/step-6", "--resume=auto"]),
    ],
    ids=["model", "order", "another run", "never"],
)
def test_a_checkpoint_that_does_not_fit_is_one_line(python, finished, tmp_path, mistake, parts):
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert_one_line(python(*finished, *mistake), "run/checkpoints/step-6", *parts)
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before


@pytest.mark.parametrize("damage", ["bit", pytest.param("cut", marks=pytest.mark.slow)])
def test_damaged_data_is_one_line(python, tiny_data, tmp_path, damage):
    folder = shutil.copytree(tiny_data, tmp_path / "tokens")
    path = folder / "train-00000.bin"
    content = bytearray(path.read_bytes())
    if damage == "bit":
        content[-1001] ^= 4
    path.write_bytes(content if damage == "bit" else content[:-2])
    said = "its checksum does not match" if damage == "bit" else "bytes instead of"
    assert_one_line(
        python(*flags(folder)), str(path), "is damaged", said, "delete it and run data.py again"
    )


@pytest.fixture
def steep(tmp_path):
    """The trainer with a learning rate that no flag can set: 0, then 5e29."""
    program = tmp_path / "steep.py"
    program.write_text(
        "import fsdp_train, optim, processes\n"
        "optim.learning_rate = lambda step, cfg: 5e29 * min(step, 1)\n"
        "processes.run(fsdp_train.main)\n"
    )
    return program


def test_a_loss_that_is_no_number_stops_the_run(python, steep, tiny_data, tmp_path):
    """Step 1 has lr 0 and step 2 5e29, so step 3 is the first bad one: then nothing is saved."""
    done = python(*flags(tiny_data, "--save_interval=1", "--max_steps=50"), program=steep)
    assert_one_line(
        done,
        "error: steps 3 to 12 had a loss or gradient that is not finite",
        "loss nan",
        "The last good checkpoint is run/checkpoints/step-2",
    )
    assert (
        max(rows_by_step(tmp_path / "run")[0]) == 12
        and checkpoint.latest(tmp_path / "run").name == "step-2"
    )


@pytest.mark.slow
def test_mistakes_of_many_ranks_are_one_line(torchrun, tiny_data):
    done = torchrun(3, *flags(tiny_data))
    assert done.returncode != 0
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("error")]
    problem = "global_batch_size 8 is not a multiple of the 3 data-parallel ranks"
    assert lines == [f"error: {problem}: set --global_batch_size=6 or 9"]
    assert (
        'fsdp_train.py", line' not in done.stderr
    )  # torchrun shows a traceback of its own, not of ours


@pytest.mark.slow
@pytest.mark.parametrize(
    "mistake, part",
    [
        (["--n_layer=3"], "did you mean 'n_layers'?"),
        (["--dataset=nowhere/*.txt", "--data_dir=empty"], "no .txt"),
        (["--vocab_size=256"], "raise it"),
        (["--resume=nowhere"], "no checkpoint in 'nowhere'"),
        (
            ["--sharding=HYBRID_SHARD", "--shard_size=3"],
            "shard_size 3 does not divide the 2 data-parallel ranks",
        ),
    ],
)
def test_every_mistake_of_many_ranks_is_one_line(torchrun, tiny_data, mistake, part):
    done = torchrun(2, *flags(tiny_data, *mistake))
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("error")]
    assert done.returncode != 0 and len(lines) == 1 and part in lines[0], done.stderr
    assert (
        'fsdp_train.py", line' not in done.stderr
    )  # torchrun shows a traceback of its own, not of ours


@pytest.mark.slow
def test_a_loss_that_is_no_number_on_many_ranks_is_one_line(torchrun, steep, tiny_data):
    done = torchrun(4, *flags(tiny_data, "--save_interval=1", "--max_steps=50"), program=steep)
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("error")]
    assert done.returncode != 0 and len(lines) == 1, done.stderr
    assert "The last good checkpoint is run/checkpoints/step-2" in lines[0]


@pytest.mark.parametrize(
    "times",
    [pytest.param(2, marks=pytest.mark.slow), pytest.param(10, marks=pytest.mark.long)],
)
def test_launches_end_well_again_and_again(torchrun, tiny_data, tmp_path, times):
    """With gloo a rank now and then aborts while the interpreter shuts down.

    processes.run must not let it.
    """
    for number in range(times):
        done = torchrun(2, *flags(tiny_data, f"--run_dir=run{number}", "--max_steps=3"))
        assert done.returncode == 0, done.stderr
    ends = [list(rows_by_step(tmp_path / f"run{number}")[0].values()) for number in range(times)]
    assert np.ptp(np.array(ends), axis=0).max() == 0  # and bit by bit alike


# -------------------------------------------------------------------------------------------------


def test_the_recipe_and_the_step_stay_short():
    functions = {
        f.name: f
        for f in ast.parse(inspect.getsource(fsdp_train)).body
        if isinstance(f, ast.FunctionDef)
    }
    length = {name: f.end_lineno - f.lineno + 1 for name, f in functions.items()}
    assert length["main"] <= 150 and length["train_step"] <= 40
    assert Path(fsdp_train.__file__).parent == ROOT
