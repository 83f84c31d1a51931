"""A rank that stands still is named, one that fails takes the others along.

What befalls a run of the trainer is in test_scenarios.py.
"""

import contextlib
import ctypes
import functools
import re
import signal
import time
from concurrent import futures
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import flags_for
from launches import FLAGS, FOREVER, Job, wait_for
from test_scenarios import before_step

import data
import fsdp_train
import processes
from launch import heartbeat
from lifecycle import runlog, watchdog
from program import RESUME_ME
from text import tokenizer

# -------------------------------------------------------------------------------------------------
# Signs of life, between ranks of which none waits for another in a collective


def watched(body, patience, minutes, disk, argv):
    """The program of a rank: `body(rank)` in the watchdog's context."""
    world = processes.start("cpu")
    rank = world.global_rank

    def last_good():
        time.sleep(disk)
        return "The last good checkpoint is step-7"

    with watchdog.Watchdog(world, minutes, last_good, None, patience=patience):
        Path(f"watched {rank}").touch()
        body(rank)


def sleep(rank):
    time.sleep(600)


@pytest.fixture
def sleepers(tmp_path):
    """`sleepers(ranks, ...)` launches `watched`, and returns when all are."""
    with contextlib.ExitStack() as jobs:

        def start(size, patience, body=sleep, minutes=60, disk=0):
            main = functools.partial(watched, body, patience, minutes, disk)
            job = jobs.enter_context(Job(tmp_path, size, main))
            wait_for(lambda: len(list(tmp_path.glob("watched *"))) == size)
            return job

        yield start


@pytest.mark.slow
def test_once_a_rank_is_named_no_other_report_follows(sleepers):
    """Rank 1 is killed. While rank 0 waits for the disk before it names it, the step is overdue for
    rank 3, too, which then finds that rank 0 does not reply; and rank 2 is held up for longer than
    others take to end."""
    job = sleepers(4, patience=10, minutes=0.2, disk=4)
    job.send(signal.SIGKILL, 1)
    time.sleep(5)
    job.send(signal.SIGSTOP, 2)
    wait_for(job.errors)
    time.sleep(6)
    job.send(signal.SIGCONT, 2)
    assert job.wait(40, but=1) == [RESUME_ME] * 3
    (line,) = job.errors()
    assert line.startswith(f"error: no sign of life for 10 s: {job.name_of(1)}")
    assert line.endswith("cannot be reached. The last good checkpoint is step-7")
    assert "TCPStore.cpp" not in job.log()


def keep_pythons_lock(seconds, rank):
    """Rank 2 keeps it from its threads."""
    if rank == 2:
        ctypes.PyDLL(None).sleep(seconds)
    time.sleep(600)


@pytest.mark.parametrize(
    "patience", [pytest.param(18, marks=pytest.mark.slow), pytest.param(30, marks=pytest.mark.long)]
)
def test_a_rank_that_is_held_up_is_not_given_up(sleepers, patience):
    """Two are stopped for 5/6 of the time that a silence may last, one of them with the server; the
    third keeps Python's lock from its threads."""
    body = functools.partial(keep_pythons_lock, patience * 2 // 3)
    job = sleepers(3, patience, body)
    job.send(signal.SIGSTOP, 1)
    time.sleep(patience / 6)
    job.send(signal.SIGSTOP, 0)
    time.sleep(patience * 2 / 3)
    job.send(signal.SIGCONT, 1)
    time.sleep(patience / 6)
    job.send(signal.SIGCONT, 0)
    time.sleep(patience / 4)
    assert job.wait(0) == [None] * 3 and not job.errors()


def leave_in_turns(rank):
    time.sleep([10, 0, 20][rank])


@pytest.mark.slow
def test_a_rank_that_has_left_is_not_taken_for_dead(sleepers):
    """Rank 1 leaves at once, rank 0 after 10 s, rank 2 after 20 s: a silence may last 8 s."""
    job = sleepers(3, patience=8, body=leave_in_turns)
    assert job.wait() == [0] * 3
    assert not job.errors()
    assert "TCPStore.cpp" not in job.log()  # nor does the store complain


def test_silence_is_counted_in_seconds_in_which_one_could_have_heard_something():
    signs = heartbeat.SignsOfLife(0, 3)
    now = signs.last_look
    for second in range(1, 41):
        signs.look({1: second, 2: 0}, now + second)
        assert signs.gone(30) == ([2] if second >= 30 else [])
    signs.look({1: 40, 2: 1}, now + 41)
    assert signs.gone(0.5) == [1]
    signs.look({1: 40, 2: 1}, now + 1000)  # rank 0 itself was held up, for 959 seconds
    assert signs.gone(5) == []
    signs.look({1: -1, 2: 1}, now + 1001)
    for second in range(1002, 1042):
        signs.look({1: -1, 2: 1}, now + second)
    assert signs.gone(30) == [2]


def test_a_rank_looks_at_rank_0_alone_and_waits_for_its_store():
    signs = heartbeat.SignsOfLife(999, 1000)
    now = signs.last_look
    signs.look({0: 1}, now + 1)
    for number in range(1, 6):  # each look takes 6 seconds, since the store does not reply
        assert signs.gone(30) == []
        signs.look(None, now + 1 + 6 * number)
    assert signs.gone(30) == [0]
    signs.look({0: 2}, now + 32)
    assert signs.gone(1) == []


# -------------------------------------------------------------------------------------------------
# Who hangs


def slow_then_hanging(rank):
    """All ranks take 6 s for a step; then rank 0 hangs where it writes the step's row."""

    def slow(cfg):
        time.sleep(6)
        if rank == 0:
            mock.patch.object(runlog.RunLog, "row", lambda *_, **__: time.sleep(10**6)).start()

    return before_step(rank, slow, rank)


@pytest.mark.slow
def test_a_rank_that_hangs_between_steps_is_named_though_the_others_notice_later(
    tiny_data, tmp_path
):
    """For the others that step is over: their own patience would last 6 s longer."""
    flags = [*FLAGS, *flags_for(tiny_data), *FOREVER, "--run_dir=run", "--timeout_minutes=0.4"]
    with Job(tmp_path, 2, fsdp_train.main, flags, slow_then_hanging) as job:
        assert job.wait() == [RESUME_ME] * 2
        (line,) = job.errors()
        assert job.name_of(0) in line and "rank 1" not in line


def test_the_report_names_whoever_does_not_reply_or_does_not_wait():
    names, waits = ["a", "b", "c"], heartbeat.WAITS
    lines = ["data.py, line 1, in f", waits, waits]
    assert heartbeat.hang_problems(names, lines) == ["a hangs at data.py, line 1, in f"]
    assert heartbeat.hang_problems(names, [*lines[:2], ""]) == ["c does not reply"]
    (problem,) = heartbeat.hang_problems(names, [waits] * 3)
    assert problem.startswith("all ranks wait for each other")


# -------------------------------------------------------------------------------------------------
# The line of the main thread


def stuck(enter) -> str:
    """What `current_line` says in another thread while this one waits in `enter(chunks)`."""
    found = []

    def chunks():
        with futures.ThreadPoolExecutor(1) as pool:
            found.append(pool.submit(heartbeat.current_line).result())
        yield 0, 0, ["a"]

    list(enter(chunks()))
    return found[0]


def test_lines_of_the_root_and_of_rooms_are_named_and_no_others():
    learn = tokenizer.train_bpe
    cpu = torch.device("cpu")
    in_root = stuck(lambda chunks: data.prefetch(lambda step: np.zeros(1), chunks, cpu))
    assert re.fullmatch(r"data.py, line \d+, in prefetch", in_root)
    in_room = stuck(lambda chunks: learn((docs[0] for *_, docs in chunks), 300).encode("a"))
    assert re.match(r"text/tokenizer.py, line \d+, in ", in_room)
    # What lies deeper is not ours: these tests, and a .venv in the root.
    assert stuck(lambda chunks: chunks) == "the end of the program"


def test_a_line_of_torch_s_autograd_waits():
    """On a GPU the main thread waits there, while another one runs the backward pass."""
    found = []
    x = torch.ones(1, requires_grad=True).exp()
    with futures.ThreadPoolExecutor(1) as pool:
        x.register_hook(lambda _: found.append(pool.submit(heartbeat.current_line).result()))
        x.backward()
    assert found == [heartbeat.WAITS]
    assert heartbeat.current_line().startswith("launch/heartbeat.py, line ")


# -------------------------------------------------------------------------------------------------
# Whose fault it is


def status_after(world, error):
    """(exit status, what was recorded) of a rank alone whose training loop fails with `error`."""
    halved, alone = [], processes.World(0, 1, 0, 1, torch.device("cpu"))
    guard = watchdog.Watchdog(alone, 60, lambda: "", lambda step: halved.append(step) or 4)
    try:
        with guard:
            raise error
    except SystemExit as leaving:
        return leaving.code, halved
    except type(error):
        return guard.beats.row.status, halved


def test_memory_lost_ranks_and_mistakes_are_told_apart(ranks):
    """NCCL has one class for all three."""
    memory = dist.DistBackendError("NCCL error ...\nLast error:\nFailed to CUDA calloc 608 bytes")
    lost = dist.DistBackendError("NCCL error ... ncclRemoteError: socket closed")
    twice = dist.DistBackendError("ncclInvalidUsage ... Duplicate GPU detected : rank 1 and rank 0")
    expected = {
        memory: (RESUME_ME, [1]),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"): (RESUME_ME, [1]),
        lost: (RESUME_ME, []),
        twice: (2, []),
        OSError("the disk is full"): (2, []),
        ValueError("a bug"): (1, []),
    }
    for error, (status, halved) in expected.items():
        ((found, recorded),) = ranks(1)(status_after, error)
        assert (found, recorded) == (status, halved), error


def ends_after_others(world):
    """Whether rank 0, which knows the status, sees rank 1 leave before it ends itself."""
    guard = watchdog.Watchdog(world, 60, lambda: "", None)
    if world.global_rank == 1:
        time.sleep(1)
        guard.beats.leave()
        return True
    guard.beats.verdict = RESUME_ME
    patient = mock.patch.object(heartbeat, "REPLY_TIMEOUT", 60)
    with patient, pytest.raises(SystemExit):
        guard.__exit__(None, dist.DistNetworkError("the connection was closed"), None)
    return guard.beats.others_left()


def test_rank_0_serves_the_status_until_the_others_have_read_it(ranks):
    """Else the others would blame rank 0, which ended because of another one."""
    assert ranks(2)(ends_after_others) == [True, True]
