"""A rank that stands still is named, one that fails takes the others along: injected for real."""

import signal
import time
from concurrent import futures

import pytest
import torch
from conftest import ROOT, flags_for
from test_stopping import FLAGS, FOREVER, steps_of, wait_for
from tqdm import tqdm

import checkpoint
import data
import processes
from lessons.elastic import Launch, steps_done
from lifecycle import watchdog
from program import RESUME_ME
from text import tokenizer

# fsdp_train.py with a fault: the code `reading` runs before a rank reads the rows of a step (from
# 0), `stepping` before it takes the step.
PROGRAM = """
import os, sys, time
sys.path.insert(0, {root!r})
import data, fsdp_train, processes, torch
from config import UserError
from text import tokenizer

rank, batch, train_step = int(os.environ["RANK"]), data.Split.batch, fsdp_train.train_step

def read(split, seed, step, *args):
    {reading}
    return batch(split, seed, step, *args)

def take(model, optimizer, rows, step, cfg, *args):
    {stepping}
    return train_step(model, optimizer, rows, step, cfg, *args)

data.Split.batch, fsdp_train.train_step = read, take
processes.run(fsdp_train.main)
"""


@pytest.fixture
def started(tmp_path, tiny_data):
    """`started(ranks, *flags, reading=..., stepping=...)` launches PROGRAM until the test ends."""
    launches = []

    def start(ranks, *flags, reading="pass", stepping="pass"):
        program = tmp_path / "program.py"
        program.write_text(PROGRAM.format(root=str(ROOT), reading=reading, stepping=stepping))
        run = [f"--run_dir={tmp_path / 'run'}", *FLAGS, *flags_for(tiny_data), *flags]
        launches.append(Launch(run, ranks, tmp_path / "log", program))
        return launches[-1]

    yield start
    for launch in launches:
        launch.send(signal.SIGKILL)
        launch.left(30)


def statuses(launch) -> list[int]:
    return [process.returncode for process in launch.processes]


def errors(folder) -> list[str]:
    """What went wrong, in one line each."""
    return [line for line in (folder / "log").read_text().splitlines() if line.startswith("error")]


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_with_the_line(started, tmp_path):
    """Rank 1 hangs while it reads, as from a dead file server. All ranks end, in time."""
    reading = "time.sleep(10**6 * (step == 9 and rank == 1))"
    job = started(2, *FOREVER, "--timeout_minutes=0.1", "--save_interval=3", reading=reading)
    wait_for(
        lambda: (tmp_path / "run/metrics.jsonl").exists() and steps_done(tmp_path / "run") >= 7
    )
    assert job.left(0.1 * 60 + 15)
    assert statuses(job) == [RESUME_ME] * 2
    line, *more = errors(tmp_path)
    assert not more
    assert line.startswith(
        f"error: no step for 0.1 minutes: rank 1 (process {job.processes[1].pid} on "
    )
    assert " hangs at data.py, line " in line and line.endswith(
        f"/checkpoints/{checkpoint.latest(tmp_path / 'run').name}"
    )


@pytest.mark.slow
def test_a_rank_that_hangs_in_a_room_is_named_with_the_line(started, tmp_path):
    """The innermost line of ours counts, in whatever folder: not the loop that led there."""
    hangs = "(time.sleep(10**6) for _ in 'a')"
    stepping = f"(step, rank) == (3, 1) and tokenizer.train_bpe({hangs}, 300)"
    job = started(2, *FOREVER, "--timeout_minutes=0.1", stepping=stepping)
    assert job.left(200) and statuses(job) == [RESUME_ME] * 2
    (line,) = errors(tmp_path)
    assert f"rank 1 (process {job.processes[1].pid} on " in line
    assert " hangs at text/tokenizer.py, line " in line and ", in train_bpe" in line


@pytest.mark.slow
@pytest.mark.parametrize("size, stopped", [(2, 1), (2, 0), (4, 2)])
def test_a_rank_that_stands_still_is_named(started, tmp_path, size, stopped):
    """SIGSTOP, as a machine that froze; rank 0 has the server through which the others talk."""
    job = started(size, *FOREVER, "--timeout_minutes=0.25")
    wait_for(
        lambda: (tmp_path / "run/metrics.jsonl").exists() and steps_done(tmp_path / "run") >= 2
    )
    job.send(signal.SIGSTOP, stopped)
    others = [process for rank, process in enumerate(job.processes) if rank != stopped]
    for process in others:
        assert process.wait(60) == RESUME_ME
    lines = errors(tmp_path)
    named = f"rank {stopped} (process {job.processes[stopped].pid} on "
    assert lines and all(f"{named}" in line and "does not reply" in line for line in lines)
    assert len(lines) == 1 or stopped == 0


def test_a_rank_that_was_killed_ends_the_others_at_once(started, tmp_path):
    job = started(2, *FOREVER)
    wait_for(
        lambda: (tmp_path / "run/metrics.jsonl").exists() and steps_done(tmp_path / "run") >= 2
    )
    job.send(signal.SIGKILL, 1)
    begin = time.monotonic()
    assert job.left(10)
    assert time.monotonic() - begin < 5
    assert statuses(job) == [RESUME_ME, -signal.SIGKILL]
    (line,) = errors(tmp_path)
    assert "rank 0 (process" in line and "lost another rank" in line


# The allocator of the CPU really refuses these 4 PB; microbatches of 2 get by.
GREEDY = "torch.empty(10**15 * (step == 6 and rank == 1 and cfg.microbatch_size > 2))"


@pytest.mark.slow
def test_out_of_memory_halves_the_microbatch_of_the_next_start(started, tmp_path):
    """One rank runs out of memory in a step, and all exit with 75. The next start gives the losses
    of an undisturbed run, with half of the microbatch."""
    run, flags = tmp_path / "run", ["--max_steps=9", "--save_interval=3", "--microbatch_size=4"]
    job = started(2, *flags, stepping=GREEDY)
    assert job.left(40)
    assert statuses(job) == [RESUME_ME] * 2
    (line,) = errors(tmp_path)
    assert (
        "rank 1 (process" in line
        and "is out of memory, so the next start uses microbatches of 2" in line
    )
    first = steps_of(run)
    job = started(2, *flags, stepping=GREEDY)
    assert job.left(40) and statuses(job) == [0, 0], (tmp_path / "log").read_text()
    assert (
        "microbatch 2, not 4: out of memory at step 7 on rank 1" in (tmp_path / "log").read_text()
    )
    second = steps_of(run)
    assert sorted(second) == list(range(1, 10)) and max(first) <= 6
    run.rename(tmp_path / "halved")
    job = started(2, *flags)
    assert job.left(40) and statuses(job) == [0, 0]
    for step, row in steps_of(run).items():
        assert row["batch_hash"] == second[step]["batch_hash"]
        assert second[step]["loss"] == pytest.approx(row["loss"], rel=5e-6)


@pytest.mark.slow
@pytest.mark.parametrize("rank, name", [(0, "error"), (1, "error on rank 1")])
def test_one_rank_with_a_mistake_does_not_leave_the_others_waiting(started, tmp_path, rank, name):
    """An error on one rank alone, such as a damaged file, ends all with status 2 and one line."""
    reading = f"if (step, rank) == (5, {rank}): raise UserError('my shard is damaged')"
    job = started(2, *FOREVER, reading=reading)
    assert job.left(60)
    assert statuses(job) == [2, 2]
    assert errors(tmp_path) == [f"{name}: my shard is damaged"]


def stuck(enter) -> str:
    """What `current_line` says in another thread while this one waits in `enter(chunks)`."""
    found = []

    def chunks():
        with futures.ThreadPoolExecutor(1) as pool:
            found.append(pool.submit(watchdog.current_line).result())
        yield 0, 0, ["a"]

    list(enter(chunks()))
    return found[0]


def test_lines_of_the_root_and_of_rooms_are_named_and_no_others():
    in_root = stuck(lambda chunks: data.counted(chunks, bar=tqdm(disable=True)))
    assert in_root.startswith("data.py, line ") and in_root.endswith(", in counted")
    in_room = stuck(
        lambda chunks: tokenizer.train_bpe((docs[0] for _, _, docs in chunks), 300).encode("a")
    )
    assert in_room.startswith("text/tokenizer.py, line ") and in_room.endswith(", in train_bpe")
    # What lies deeper is not ours: these tests, and a .venv in the root.
    assert stuck(lambda chunks: chunks) == "the end of the program"


def test_whose_fault_it_is():
    assert processes.is_lost(torch.distributed.DistNetworkError("x"))
    assert not processes.is_lost(RuntimeError("shapes differ")) and not processes.is_lost(
        KeyError("x")
    )
    assert watchdog.current_line().startswith("lifecycle/watchdog.py, line ")
