"""How runs stop: signals, torchrun's restarts, bad steps. Real processes throughout."""

import contextlib
import functools
import itertools
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from unittest import mock

import pytest
from conftest import PATIENCE, TORCHRUN, clean_environment, flags_for, rooms_on_path
from launches import FLAGS, FOREVER, Job, steps_of, train_here, wait_for
from test_scenarios import before_step, poisoned

import checkpoint
import config
import fsdp_train
from config import TrainConfig
from lessons.elastic import steps_done
from lifecycle import run, runlog, stopping


@pytest.fixture
def flags(tiny_data, tmp_path):
    return [*FLAGS, *flags_for(tiny_data), f"--run_dir={tmp_path / 'run'}"]


# -------------------------------------------------------------------------------------------------
# Leaving when asked


@contextlib.contextmanager
def into_a_pipe(rank):
    """What the rank prints goes to whoever reads the pipe."""
    pipe = os.open("pipe", os.O_WRONLY)
    os.dup2(pipe, 1)
    os.dup2(pipe, 2)
    os.close(pipe)
    yield


@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (None, 141)])
def test_a_run_whose_reader_has_left_saves_before_it_leaves(flags, tmp_path, number, status):
    """As when Ctrl-C in `... 2>&1 | tee log` ends tee, too; or when only the reader ends."""
    os.mkfifo(tmp_path / "pipe")
    with Job(tmp_path, 1, fsdp_train.main, [*flags, *FOREVER], into_a_pipe) as job:
        with open(tmp_path / "pipe") as reader:
            assert any("loss" in line for line in reader)
        if number:
            job.send(number, 0)
        assert job.wait() == [status]
    newest = checkpoint.latest(tmp_path / "run")
    assert newest and sorted(steps_of(tmp_path / "run"))[-1] == checkpoint.number(newest)


def ask_to_stop(_):
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_stop_does_not_wait_for_an_evaluation(flags, tmp_path):
    """It may take longer than a scheduler waits. The next start makes up for it."""
    statuses, evaluated = [], []
    for fault in (functools.partial(before_step, 0, ask_to_stop), None):
        more = ["--max_steps=10", "--eval_interval=3"]
        with Job(tmp_path, 1, fsdp_train.main, [*flags, *more], fault) as job:
            statuses += job.wait()
        rows = runlog.read(tmp_path / "run")
        evaluated.append([row["step"] for row in rows if "val_loss" in row])
    assert statuses == [stopping.STATUS[signal.SIGTERM], 0]
    assert evaluated == [[0, 3, 6], [0, 3, 6, 9, 10]]


def test_the_second_ctrl_c(tmp_path):
    """In a long step, during which Python's own handlers do not run."""
    program = "import hashlib; from lifecycle import stopping; "
    program += "stopping.Signals().nothing_to_save = False; print(flush=True); "
    program += "hashlib.pbkdf2_hmac('sha256', b'', b'', 10**9)"
    command = [sys.executable, "-c", program]
    process = subprocess.Popen(command, env=rooms_on_path(), stdout=subprocess.PIPE, text=True)
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE) == 130  # the hash takes many minutes


@contextlib.contextmanager
def a_second_a_step(rank):
    """As the clock for saving has it; that of rank 1 is twice as fast."""
    step, clock = fsdp_train.train_step, SimpleNamespace(now=0)

    def train_step(*args):
        clock.now += 1 + rank
        return step(*args)

    slow = mock.patch.object(fsdp_train, "train_step", train_step)
    time = SimpleNamespace(monotonic=lambda: clock.now, perf_counter=perf_counter)
    with slow, mock.patch.object(run, "time", time):
        yield


def test_saving_by_the_clock(ranks, flags, tmp_path):
    """After 3 s on any rank by --save_minutes, at the same step on both, and every 4 steps."""
    more = ["--max_steps=8", "--save_interval=4", "--save_minutes=0.05", "--keep_last=1000"]
    answers = ranks(2)(train_here, [*flags, *more], a_second_a_step)
    assert [status for status, *_ in answers] == [0, 0]
    saved = [int(path.name[5:]) for path in checkpoint.complete(tmp_path / "run/checkpoints")]
    assert {4, 8} < set(saved)
    assert max(b - a for a, b in itertools.pairwise([0, *saved])) <= 3


# -------------------------------------------------------------------------------------------------
# torchrun


@pytest.fixture
def restarting(flags, tmp_path):
    """`restarting(*flags)`: torchrun --max-restarts=4 with 2 ranks; their output goes to a file."""
    started = []

    def start(*more):
        command = [sys.executable, *TORCHRUN, "2", "--max-restarts=4", fsdp_train.__file__]
        env = clean_environment()
        with open(tmp_path / "log", "w") as log:
            options = {"stdout": log, "stderr": log, "env": env}
            started.append(subprocess.Popen([*command, *flags, *more], **options))
        return started[-1]

    yield start
    for process in started:
        process.terminate()
        process.wait(PATIENCE)


def workers(torchrun) -> list[int]:
    children = Path(f"/proc/{torchrun.pid}/task/{torchrun.pid}/children").read_text()
    return [int(pid) for pid in children.split()]


@pytest.mark.parametrize(
    "kills", [pytest.param(1, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.long)]
)
def test_torchrun_restarts_again_and_again(restarting, ranks, flags, tmp_path, kills):
    """Each time one of the two ranks is killed; the curve is that of an undisturbed run."""
    more, run = [f"--max_steps={60 * kills + 20}", "--save_interval=10"], tmp_path / "run"
    job = restarting(*more)
    for number in range(kills):
        wait_for(lambda n=number + 1: launches(run) == n and steps_done(run) > 30 * n)
        os.kill(workers(job)[number % 2], signal.SIGKILL)
    assert job.wait(PATIENCE) == 0, (tmp_path / "log").read_text()[-3000:]
    assert launches(run) == kills + 1
    ranks(2)(train_here, [*flags, *more, f"--run_dir={tmp_path / 'straight'}"])
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
# Bad numbers


@pytest.mark.slow
def test_too_many_bad_steps_stop_the_run_and_it_goes_on_without_them(ranks, flags, tmp_path):
    """The message names steps, batch, checkpoint and flag; skipped steps stay skipped."""
    flags += ["--max_steps=30", "--save_interval=2", "--max_bad_steps=3", "--schedule=constant"]
    run, fault = tmp_path / "run", functools.partial(poisoned, range(4, 20))
    answers = ranks(2)(train_here, flags, fault)
    assert [status for status, *_ in answers] == [2, 2]
    message, rows = answers[0][1], steps_of(run)
    assert message.startswith("steps 5 to 7 had a loss or gradient that is not finite")
    assert f"batch {rows[7]['batch_hash']})" in message
    assert f"{run}/checkpoints/step-4" in message and message.endswith("--skip_steps=5:8")
    assert max(rows) == 7 and rows[7]["skipped"]

    status, message, said = ranks(2)(train_here, [*flags, "--skip_steps=5:21"], fault)[0]
    assert status == 0 and f"resuming from {run}/checkpoints/step-4" in said
    rows = steps_of(run)
    assert list(rows) == [1, 2, 3, 4, *range(21, 31)]
    assert [rows[step]["tokens"] for step in (4, 21, 30)] == [4 * 256, 5 * 256, 14 * 256]
    assert runlog.read_settings(run)["skip_steps"] == "5:21"
    assert runlog.read_launches(run)[-1]["skip_steps"] == "5:21"

    straight = [*flags, "--max_steps=21", "--save_interval=0", f"--run_dir={tmp_path / 'straight'}"]
    ranks(2)(train_here, straight)
    its_own_batch = steps_of(tmp_path / "straight")[21]["batch_hash"]
    assert rows[21]["batch_hash"] == its_own_batch  # not the fifth
    again = ranks(2)(train_here, [*flags, "--max_steps=31"])[0]  # the checkpoint remembers
    assert again[0] == 0 and list(steps_of(run)) == [1, 2, 3, 4, *range(21, 32)]


@pytest.mark.parametrize("steps, last", [(30, 3), (2, 2)])
def test_a_run_that_never_had_a_good_step_does_not_blame_its_batches(
    ranks, flags, tmp_path, steps, last
):
    """And ends as a failure, without a checkpoint, even if it is shorter than --max_bad_steps."""
    flags += [f"--max_steps={steps}", "--save_interval=1", "--max_bad_steps=3"]
    flags += ["--schedule=constant", "--warmup_steps=0"]
    answers = ranks(2)(train_here, flags, functools.partial(poisoned, range(100)))
    assert [status for status, *_ in answers] == [2, 2]
    message = answers[0][1]
    assert message.startswith(f"steps 1 to {last} had a loss or gradient that is not finite")
    assert "No step was good" in message and "--skip_steps" not in message
    assert "There is no checkpoint yet" in message and "\n" not in message
    assert not list((tmp_path / "run/checkpoints").iterdir())


def test_rows_wait_while_they_cannot_be_written(tmp_path, capsys):
    """While the folder is gone, or the file cannot grow; then each is there once."""
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
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (log.path.stat().st_size + 20, before[1]))
    try:
        log.row(rows[4])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    log.row(rows[5])
    assert runlog.read(folder) == rows
