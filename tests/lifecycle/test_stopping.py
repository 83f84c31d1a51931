"""How runs stop: signals, torchrun's restarts, stragglers, bad steps. Real processes throughout."""

import contextlib
import io
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
from conftest import PATIENCE, ROOT, TORCHRUN, clean_environment, flags_for, rooms_on_path

import checkpoint
import config
import fsdp_train
from config import TrainConfig, UserError
from lessons.elastic import Launch, steps_done
from lifecycle import lease, runlog, stopping
from weights.load import load_model

SIZE = ["--d_model=32", "--n_heads=4", "--n_layers=2", "--vocab_size=260", "--max_seq_len=32"]
BATCH = [
    "--global_batch_size=8",
    "--microbatch_size=2",
    "--warmup_steps=2",
    "--eval_tokens=2000",
    "--eval_interval=0",
]
FLAGS = [*SIZE, *BATCH, "--device=cpu", "--precision=fp32", "--keep_last=9"]
FOREVER = ["--max_steps=1000000", "--schedule=constant"]


def train_here(world, flags, prepare=None):
    """fsdp_train.main in a rank that is there already: exit status, message, what it printed."""
    env = {
        "RANK": world.global_rank,
        "WORLD_SIZE": world.global_size,
        "LOCAL_RANK": world.global_rank,
        "LOCAL_WORLD_SIZE": world.global_size,
    }
    out = io.StringIO()
    with (
        mock.patch.dict(os.environ, {k: str(v) for k, v in env.items()}),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(out),
        prepare(world) if prepare else contextlib.nullcontext(),
    ):
        try:
            fsdp_train.main(flags)
            return 0, "", out.getvalue()
        except UserError as error:
            return 2, str(error), out.getvalue()
        except SystemExit as leaving:
            return leaving.code, "", out.getvalue()


def steps_of(run_dir) -> dict:
    """step -> row, of the steps in metrics.jsonl, each of which is there once."""
    rows = [row for row in runlog.read(run_dir) if "loss" in row]
    assert len({row["step"] for row in rows}) == len(rows)
    return {row["step"]: row for row in rows}


def wait_for(condition, seconds=PATIENCE) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture
def started(tmp_path, tiny_data):
    """`started(ranks, *flags)` launches fsdp_train.py on tmp_path/run, until the test ends."""
    launches = []

    def start(ranks, *flags):
        run = [f"--run_dir={tmp_path / 'run'}", *FLAGS, *flags_for(tiny_data), *flags]
        launches.append(Launch(run, ranks, tmp_path / "log"))
        return launches[-1]

    yield start
    for launch in launches:
        launch.send(signal.SIGKILL)
        launch.wait(30)


# -------------------------------------------------------------------------------------------------
# Leaving when asked


@pytest.mark.slow
@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (None, 141)])
def test_a_run_whose_reader_has_left_saves_before_it_leaves(tmp_path, tiny_data, number, status):
    """As when Ctrl-C in `... 2>&1 | tee log` ends tee, too; or when only the reader ends."""
    flags = [*FLAGS, *flags_for(tiny_data), *FOREVER, f"--run_dir={tmp_path / 'run'}"]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    command = [sys.executable, ROOT / "fsdp_train.py", *flags]
    process = subprocess.Popen(command, env=clean_environment(), **streams)
    while "loss" not in process.stdout.readline() and process.poll() is None:
        pass
    process.stdout.close()
    if number:
        process.send_signal(number)
    assert process.wait(PATIENCE) == status
    newest = checkpoint.latest(tmp_path / "run")
    assert newest and sorted(steps_of(tmp_path / "run"))[-1] == checkpoint.number(newest)


@pytest.mark.parametrize(
    "number", [signal.SIGUSR1, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_a_signal_to_one_rank_saves_on_all(started, ranks, tiny_data, tmp_path, number):
    """Status 75, a checkpoint of the last step, and resumed it equals an undisturbed run."""
    run, flags = tmp_path / "run", [*FOREVER, "--save_interval=0"]
    first = started(2, *flags, "--resume=never")  # so the same command would be refused
    wait_for(lambda: steps_done(run) >= 3)
    first.send(number, 1)
    assert first.wait(PATIENCE)
    assert [process.returncode for process in first.processes] == [stopping.RESUME_ME] * 2
    last = steps_done(run)
    assert checkpoint.latest(run).name == f"step-{last}"
    assert (
        f"stopping, as asked: The last good checkpoint is {run}/checkpoints/step-{last}. "
        "The same command with --resume=auto resumes the run" in (tmp_path / "log").read_text()
    )
    assert lease.read_lease(run / "lease.json") is None
    end = [f"--max_steps={last + 3}", *FOREVER[1:]]
    for folder in (run, tmp_path / "straight"):
        assert (
            ranks(2)(train_here, [f"--run_dir={folder}", *FLAGS, *flags_for(tiny_data), *end])[0][0]
            == 0
        )
    found, wanted = steps_of(run), steps_of(tmp_path / "straight")
    for key in ("loss", "grad_norm", "batch_hash", "tokens", "lr"):
        assert [row[key] for row in found.values()] == [row[key] for row in wanted.values()]


def test_ctrl_c_saves_and_a_second_one_leaves_at_once(started, tmp_path):
    job = started(1, *FOREVER, "--save_interval=0")
    wait_for(lambda: steps_done(tmp_path / "run") >= 2)
    job.send(signal.SIGINT)
    assert job.wait(PATIENCE) and job.status() == 130
    assert checkpoint.latest(tmp_path / "run").name == f"step-{steps_done(tmp_path / 'run')}"
    assert "Ctrl-C again exits immediately" in (tmp_path / "log").read_text()


def test_the_second_ctrl_c(tmp_path):
    """In a long step, during which Python's own handlers do not run."""
    program = "import hashlib; from lifecycle import stopping; "
    program += "stopping.Signals().nothing_to_save = False; print(flush=True); "
    program += "hashlib.pbkdf2_hmac('sha256', b'', b'', 10**9)"
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-c", program], env=env, stdout=subprocess.PIPE, text=True
    )
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE) == 130  # the hash takes many minutes


@pytest.mark.slow
def test_saving_by_the_clock(ranks, tiny_data, tmp_path):
    """Every 0.6 s by --save_minutes, at the same step on both ranks, and every 40 steps."""
    flags = [
        f"--run_dir={tmp_path}",
        *FLAGS,
        *flags_for(tiny_data),
        "--max_steps=100",
        "--save_interval=40",
    ]
    flags += ["--save_minutes=0.01", "--keep_last=1000"]
    assert [status for status, *_ in ranks(2)(train_here, flags, slow_steps)] == [0, 0]
    saved = [int(path.name[5:]) for path in checkpoint.complete(tmp_path / "checkpoints")]
    seconds = {step: row["seconds"] for step, row in steps_of(tmp_path).items()}
    assert {40, 80, 100} < set(saved)
    for a, b in zip([0, *saved], saved, strict=False):  # steps between two saves
        assert sum(seconds[step] for step in range(a + 1, b)) < 0.6 + 0.3
    assert len(saved) <= sum(seconds.values()) / 0.6 + 3


@contextlib.contextmanager
def slow_steps(world):
    step = fsdp_train.train_step
    with mock.patch.object(fsdp_train, "train_step", lambda *args: time.sleep(0.02) or step(*args)):
        yield


# -------------------------------------------------------------------------------------------------
# torchrun


@pytest.fixture
def restarting(tmp_path, tiny_data):
    """`restarting(*flags)`: torchrun --max-restarts=4 with 2 ranks; their output goes to a file."""
    started = []

    def start(*flags):
        command = [sys.executable, *TORCHRUN, "2", "--max-restarts=4", fsdp_train.__file__]
        run = [f"--run_dir={tmp_path / 'run'}", *FLAGS, *flags_for(tiny_data), *flags]
        env = clean_environment()
        with open(tmp_path / "log", "w") as log:
            started.append(subprocess.Popen([*command, *run], stdout=log, stderr=log, env=env))
        return started[-1]

    yield start
    for process in started:
        process.terminate()
        process.wait(PATIENCE)


def workers(torchrun) -> list[int]:
    return [
        int(pid)
        for pid in Path(f"/proc/{torchrun.pid}/task/{torchrun.pid}/children").read_text().split()
    ]


@pytest.mark.parametrize(
    "kills", [pytest.param(2, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.long)]
)
def test_torchrun_restarts_again_and_again(restarting, ranks, tiny_data, tmp_path, kills):
    """Each time one of the two ranks is killed; the curve is that of an undisturbed run."""
    flags, run = [f"--max_steps={60 * kills + 20}", "--save_interval=10"], tmp_path / "run"
    job = restarting(*flags)
    for number in range(kills):
        wait_for(lambda n=number + 1: launches(run) == n and steps_done(run) > 30 * n)
        os.kill(workers(job)[number % 2], signal.SIGKILL)
    assert job.wait(PATIENCE) == 0, (tmp_path / "log").read_text()[-3000:]
    assert launches(run) == kills + 1
    ranks(2)(
        train_here, [f"--run_dir={tmp_path / 'straight'}", *FLAGS, *flags_for(tiny_data), *flags]
    )
    found, wanted = steps_of(run), steps_of(tmp_path / "straight")
    assert [row["loss"] for row in found.values()] == [row["loss"] for row in wanted.values()]


def launches(run) -> int:
    path = run / "launches.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.mark.slow
def test_torchrun_does_not_restart_what_was_warned_or_is_mistaken(restarting, tmp_path):
    job = restarting(*FOREVER)
    wait_for(lambda: steps_done(tmp_path / "run") >= 2)
    os.kill(workers(job)[1], signal.SIGUSR1)  # as the scripts in slurm/ do
    assert job.wait(PATIENCE) == 1 and launches(tmp_path / "run") == 1
    assert checkpoint.latest(tmp_path / "run").name == f"step-{steps_done(tmp_path / 'run')}"
    job = restarting(*FOREVER, "--seed=2")  # of another order
    assert job.wait(PATIENCE) == 1
    lines = (tmp_path / "log").read_text().splitlines()
    assert sum(line.startswith("error:") for line in lines) == 1


# -------------------------------------------------------------------------------------------------
# Meeting after a step


@contextlib.contextmanager
def slow_rank_1(world):
    """On rank 1 the final norm, the fifth in a model of two blocks, takes 0.1 s longer."""
    forward, calls = torch.nn.functional.layer_norm, itertools.count(1)

    def slower(x, *args):
        if next(calls) % 5 == 0 and world.global_rank == 1:
            time.sleep(0.1)
        return forward(x, *args)

    with mock.patch.object(torch.nn.functional, "layer_norm", slower):
        yield


@pytest.mark.slow
def test_the_slowest_rank_is_named(ranks, tiny_data, tmp_path):
    flags = [
        f"--run_dir={tmp_path}",
        *FLAGS,
        *flags_for(tiny_data),
        "--max_steps=6",
        "--sharding=FULL_SHARD",
    ]
    ranks(2)(train_here, flags, slow_rank_1)
    rows = list(steps_of(tmp_path).values())[2:]
    assert all(row["slowest_rank"] == 1 and row["slowest_by"] > 1.5 for row in rows)


# -------------------------------------------------------------------------------------------------
# Bad numbers


@contextlib.contextmanager
def poisoned(world, steps):
    """In these steps (from 0) the loss of rank 1's last microbatch is NaN, and so its gradients."""
    step = fsdp_train.train_step

    def train_step(model, optimizer, rows, number, *args):
        forward = model.forward
        factor = float("nan") if number in steps and world.global_rank == 1 else 1.0
        with mock.patch.object(model, "forward", lambda *a, **k: forward(*a, **k) * factor):
            return step(model, optimizer, rows, number, *args)

    with mock.patch.object(fsdp_train, "train_step", train_step):
        yield


def poisoned_4(world):
    return poisoned(world, {4})


def poisoned_4_to_20(world):
    return poisoned(world, set(range(4, 20)))


@pytest.mark.parametrize("sharding", ["FULL_SHARD", pytest.param("DDP", marks=pytest.mark.slow)])
def test_a_step_that_went_bad_on_one_rank_changes_nothing_on_any(
    ranks, tiny_data, tmp_path, sharding
):
    flags = [
        f"--run_dir={tmp_path / 'run'}",
        *FLAGS,
        *flags_for(tiny_data),
        "--max_steps=8",
        f"--sharding={sharding}",
    ]
    flags += ["--save_interval=1"]
    status, _, printed = ranks(2)(train_here, flags, poisoned_4)[0]
    assert status == 0 and "1 steps with a non-finite loss or gradient were skipped" in printed
    rows = steps_of(tmp_path / "run")
    assert [step for step, row in rows.items() if row["skipped"]] == [5]
    assert not (tmp_path / "run/checkpoints/step-5").exists()  # good checkpoints are not displaced
    whole = [f"--run_dir={tmp_path / 'without'}", *flags[1:], "--skip_steps=5:6"]
    assert ranks(2)(train_here, whole)[0][0] == 0
    a, b = (load(checkpoint.latest(tmp_path / name)) for name in ("run", "without"))
    assert same(a, b)  # Adam's own step count did not go on, either


def load(path):
    return load_model(path, torch.device("cpu")).state_dict()


def same(a, b) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.slow
def test_too_many_bad_steps_stop_the_run_and_it_goes_on_without_them(ranks, tiny_data, tmp_path):
    """The message names steps, batch, checkpoint and flag; skipped steps stay skipped."""
    flags = [
        f"--run_dir={tmp_path}",
        *FLAGS,
        *flags_for(tiny_data),
        "--max_steps=30",
        "--save_interval=2",
    ]
    flags += ["--max_bad_steps=3", "--schedule=constant"]
    answers = ranks(2)(train_here, flags, poisoned_4_to_20)
    assert [status for status, *_ in answers] == [2, 2]
    message, rows = answers[0][1], steps_of(tmp_path)
    assert message.startswith(
        "steps 5 to 7 had a loss or gradient that is not finite, and were skipped "
        "(the last: loss nan"
    )
    assert (
        f"batch {rows[7]['batch_hash']}). The last good checkpoint is {tmp_path}/checkpoints/step-4"
        in message
    )
    assert message.endswith("--skip_steps=5:8") and max(rows) == 7 and rows[7]["skipped"]
    status, message, printed = ranks(2)(
        train_here, [*flags, "--skip_steps=5:21"], poisoned_4_to_20
    )[0]
    assert status == 0 and f"resuming from {tmp_path}/checkpoints/step-4" in printed
    rows = steps_of(tmp_path)
    assert list(rows) == [1, 2, 3, 4, *range(21, 31)]
    assert [rows[step]["tokens"] for step in (4, 21, 30)] == [4 * 256, 5 * 256, 14 * 256]
    assert json.loads((tmp_path / "config.json").read_text())["skip_steps"] == "5:21"
    assert (
        json.loads((tmp_path / "launches.jsonl").read_text().splitlines()[-1])["skip_steps"]
        == "5:21"
    )
    straight = [flag.replace(str(tmp_path), str(tmp_path / "straight")) for flag in flags]
    ranks(2)(train_here, [*straight, "--max_steps=21", "--save_interval=0"])
    assert (
        steps_of(tmp_path / "straight")[21]["batch_hash"] == rows[21]["batch_hash"]
    )  # its own batch, not the fifth
    again = ranks(2)(train_here, [*flags, "--max_steps=31"])[
        0
    ]  # without the flag: the checkpoint remembers
    assert again[0] == 0 and list(steps_of(tmp_path)) == [1, 2, 3, 4, *range(21, 32)]


def poisoned_always(world):
    return poisoned(world, range(100))


@pytest.mark.parametrize("steps, last", [(30, 3), (2, 2)])
def test_a_run_that_never_had_a_good_step_does_not_blame_its_batches(
    ranks, tiny_data, tmp_path, steps, last
):
    """And ends as a failure, without a checkpoint, even if it is shorter than --max_bad_steps."""
    flags = [
        f"--run_dir={tmp_path}",
        *FLAGS,
        *flags_for(tiny_data),
        f"--max_steps={steps}",
        "--save_interval=1",
    ]
    flags += ["--max_bad_steps=3", "--schedule=constant", "--warmup_steps=0"]
    answers = ranks(2)(train_here, flags, poisoned_always)
    assert [status for status, *_ in answers] == [2, 2]
    message = answers[0][1]
    assert (
        message.startswith(f"steps 1 to {last} had a loss or gradient that is not finite")
        and "--skip_steps" not in message
    )
    assert (
        "There is no checkpoint yet. No step was good, so it is not the batches: look at the "
        "weights" in message
    )
    assert message.endswith("or try --precision=fp32") and "\n" not in message
    assert not list((tmp_path / "checkpoints").iterdir())


@pytest.mark.parametrize("text", ["5", "5:", "9:5", "0:3", "a:b", "1:2;3:4", "5:5"])
def test_what_is_no_range_of_steps(text):
    with pytest.raises(UserError, match="skip_steps takes ranges such as"):
        config.load([f"--skip_steps={text}"], TrainConfig)


def test_rows_wait_while_they_cannot_be_written(tmp_path, capsys):
    """Rows wait while the folder is gone, or a real file cannot grow; then each is there once."""
    folder = tmp_path / "run"
    cfg = TrainConfig(run_dir=str(folder))
    log = runlog.RunLog(cfg, 0)
    log.start(config.MPTConfig(), cfg, {}, tmp_path / "none", 0)
    rows = [{"step": n, "val_loss": 1.0, "val_bits_per_byte": 2.0} for n in range(6)]
    log.row(rows[0])
    aside = folder.rename(tmp_path / "aside")
    log.row(rows[1])
    log.row(rows[2])
    assert capsys.readouterr().out.count("cannot write") == 1
    aside.rename(folder)
    log.row(rows[3])
    assert runlog.read(folder) == rows[:4]
    program = (
        "import resource, signal, sys;"
        "from lifecycle import runlog; from config import *;"
        "log = runlog.RunLog(TrainConfig(run_dir=sys.argv[1]), 0);"
        "log.size = log.path.stat().st_size;"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1];"
        "row = lambda n: log.row({'step': n, 'val_loss': 1.0, 'val_bits_per_byte': 2.0});"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (log.size + 20, hard)); row(4);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard)); row(5)"
    )
    command = [sys.executable, "-c", program, folder]
    subprocess.run(command, env=rooms_on_path(), check=True, capture_output=True)
    assert runlog.read(folder) == rows
