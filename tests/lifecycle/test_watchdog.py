"""A rank that stands still is named, one that fails takes the others along: injected for real."""

import signal
import time
from concurrent import futures

import pytest
import torch
import torch.distributed as dist
from conftest import PATIENCE, ROOT, flags_for
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
        launch.wait(30)


def statuses(launch) -> list[int]:
    return [process.returncode for process in launch.processes]


def errors(folder) -> list[str]:
    """What went wrong, in one line each."""
    return [line for line in (folder / "log").read_text().splitlines() if line.startswith("error")]


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_with_the_line(started, tmp_path):
    """Rank 1 hangs while it reads, as from a dead file server. All ranks end, in time."""
    reading = "time.sleep(10**6 * (step == 9 and rank == 1))"
    job = started(2, *FOREVER, "--timeout_minutes=0.3", "--save_interval=3", reading=reading)
    wait_for(
        lambda: (tmp_path / "run/metrics.jsonl").exists() and steps_done(tmp_path / "run") >= 7
    )
    assert job.wait(PATIENCE)
    assert statuses(job) == [RESUME_ME] * 2
    line, *more = errors(tmp_path)
    assert not more
    assert line.startswith(
        f"error: no step for 0.3 minutes: rank 1 (process {job.processes[1].pid} on "
    )
    assert " hangs at data.py, line " in line and line.endswith(
        f"/checkpoints/{checkpoint.latest(tmp_path / 'run').name}"
    )


@pytest.mark.long  # its quick sibling: test_lines_of_the_root_and_of_rooms_are_named_and_no_others
def test_a_rank_that_hangs_in_a_room_is_named_with_the_line(started, tmp_path):
    """The innermost line of ours counts, in whatever folder: not the loop that led there."""
    hangs = "(time.sleep(10**6) for _ in 'a')"
    stepping = f"(step, rank) == (3, 1) and tokenizer.train_bpe({hangs}, 300)"
    job = started(2, *FOREVER, "--timeout_minutes=0.3", stepping=stepping)
    assert job.wait(PATIENCE) and statuses(job) == [RESUME_ME] * 2
    (line,) = errors(tmp_path)
    assert f"rank 1 (process {job.processes[1].pid} on " in line
    assert " hangs at text/tokenizer.py, line " in line and ", in train_bpe" in line


@pytest.mark.slow
def test_a_rank_that_hangs_between_steps_is_named_though_the_others_notice_later(started, tmp_path):
    """Rank 0 hangs where it writes the row of a step that took 9 s. For the others that step is
    over: their own patience would last 9 s longer."""
    stepping = """time.sleep(9 * (step == 4))
    if (step, rank) == (4, 0): fsdp_train.runlog.RunLog.row = lambda *_, **__: time.sleep(10**6)"""
    job = started(2, *FOREVER, "--timeout_minutes=0.4", stepping=stepping)
    assert job.wait(PATIENCE) and statuses(job) == [RESUME_ME] * 2
    (line,) = errors(tmp_path)
    assert f"rank 0 (process {job.processes[0].pid} on " in line and "rank 1" not in line


@pytest.mark.parametrize(
    "size, stopped",
    [
        pytest.param(2, 0, marks=pytest.mark.slow),
        pytest.param(2, 1, marks=pytest.mark.long),
        pytest.param(4, 2, marks=pytest.mark.long),
    ],
)
def test_a_rank_that_stands_still_is_named(started, tmp_path, size, stopped):
    """SIGSTOP, as a machine that froze; rank 0 has the server through which the others talk."""
    job = started(size, *FOREVER, "--timeout_minutes=0.25")
    wait_for(
        lambda: (tmp_path / "run/metrics.jsonl").exists() and steps_done(tmp_path / "run") >= 2
    )
    job.send(signal.SIGSTOP, stopped)
    others = [process for rank, process in enumerate(job.processes) if rank != stopped]
    for process in others:
        assert process.wait(PATIENCE) == RESUME_ME
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
    assert job.wait(PATIENCE)
    assert time.monotonic() - begin < 25  # silence would be noticed after 30 s
    assert statuses(job) == [RESUME_ME, -signal.SIGKILL]
    (line,) = errors(tmp_path)
    assert "rank 0 (process" in line and "lost another rank" in line
    assert f". No sign of life from rank 1 (process {job.processes[1].pid} on " in line


# The allocator of the CPU really refuses these 4 PB; microbatches of 2 get by.
GREEDY = "torch.empty(10**15 * (step == 6 and rank == 1 and cfg.microbatch_size > 2))"


@pytest.mark.slow
def test_out_of_memory_halves_the_microbatch_of_the_next_start(started, tmp_path):
    """One rank runs out of memory in a step, and all exit with 75. The next start gives the losses
    of an undisturbed run, with half of the microbatch."""
    run, flags = tmp_path / "run", ["--max_steps=9", "--save_interval=3", "--microbatch_size=4"]
    job = started(2, *flags, stepping=GREEDY)
    assert job.wait(PATIENCE)
    assert statuses(job) == [RESUME_ME] * 2
    (line,) = errors(tmp_path)
    assert (
        "rank 1 (process" in line
        and "is out of memory, so the next start uses microbatches of 2" in line
    )
    first = steps_of(run)
    job = started(2, *flags, stepping=GREEDY)
    assert job.wait(PATIENCE) and statuses(job) == [0, 0], (tmp_path / "log").read_text()
    assert (
        "microbatch 2, not 4: out of memory at step 7 on rank 1" in (tmp_path / "log").read_text()
    )
    second = steps_of(run)
    assert sorted(second) == list(range(1, 10)) and max(first) <= 6
    run.rename(tmp_path / "halved")
    job = started(2, *flags)
    assert job.wait(PATIENCE) and statuses(job) == [0, 0]
    for step, row in steps_of(run).items():
        assert row["batch_hash"] == second[step]["batch_hash"]
        assert second[step]["loss"] == pytest.approx(row["loss"], rel=5e-6)


@pytest.mark.slow
@pytest.mark.parametrize("rank, name", [(0, "error"), (1, "error on rank 1")])
def test_one_rank_with_a_mistake_does_not_leave_the_others_waiting(started, tmp_path, rank, name):
    """An error on one rank alone, such as a damaged file, ends all with status 2 and one line."""
    reading = f"if (step, rank) == (5, {rank}): raise UserError('my shard is damaged')"
    job = started(2, *FOREVER, reading=reading)
    assert job.wait(PATIENCE)
    assert statuses(job) == [2, 2]
    assert errors(tmp_path) == [f"{name}: my shard is damaged"]


# -------------------------------------------------------------------------------------------------
# Signs of life, between ranks of which none waits for another in a collective

# Each rank runs `body` inside the watchdog's context.
SLEEPERS = """
import ctypes, os, sys, time
sys.path.insert(0, "{root}")
import processes
from config import UserError
from lifecycle.watchdog import Watchdog

def main(argv):
    world = processes.start("cpu")
    rank = world.global_rank
    last_good = lambda: time.sleep({disk}) or "The last good checkpoint is step-7"
    with Watchdog(world, {minutes}, last_good, None{patience}):
        open({folder!r} + f"/watched {{rank}}", "w").close()
        {body}

processes.run(main)
"""


@pytest.fixture
def sleepers(tmp_path):
    """`sleepers(ranks, ...)` launches SLEEPERS, and returns when all are watched."""
    launches = []

    def start(ranks, patience="", body="time.sleep(600)", minutes=60, disk=0):
        program = tmp_path / "program.py"
        settings = {"patience": patience, "body": body, "minutes": minutes, "disk": disk}
        program.write_text(SLEEPERS.format(root=ROOT, folder=str(tmp_path), **settings))
        launches.append(Launch([], ranks, tmp_path / "log", program))
        wait_for(lambda: len(list(tmp_path.glob("watched *"))) == ranks)
        return launches[-1]

    yield start
    for launch in launches:
        launch.send(signal.SIGKILL)
        launch.wait(30)


def ended_by(job, victim, number, seconds) -> list[int]:
    """Send the signal to one rank. The exit statuses of the others, which have so many seconds."""
    job.send(number, victim)
    deadline = time.monotonic() + seconds
    others = [process for rank, process in enumerate(job.processes) if rank != victim]
    return [process.wait(deadline - time.monotonic()) for process in others]


@pytest.mark.slow
def test_without_rank_0_the_others_name_it(sleepers, tmp_path):
    job = sleepers(3, ", patience=10")
    assert ended_by(job, 0, signal.SIGKILL, 90) == [RESUME_ME] * 2
    lines = errors(tmp_path)
    assert len(lines) == 2  # they cannot agree who says it
    complaints = (tmp_path / "log").read_text().count("TCPStore.cpp")
    assert complaints <= 2  # of the store, with a C++ traceback: once on each rank
    named = f"error: no sign of life for 10 s: rank 0 (process {job.processes[0].pid} on"
    for line in lines:
        assert line.startswith(named)
        assert line.endswith("does not reply. The last good checkpoint is step-7")


@pytest.mark.slow
def test_once_a_rank_is_named_no_other_report_follows(sleepers, tmp_path):
    """Rank 1 is killed. While rank 0 waits for the disk before it names it, the step is overdue for
    rank 3, too, which then finds that rank 0 does not reply; and rank 2 is held up for longer than
    others take to end."""
    job = sleepers(4, ", patience=10", minutes=0.2, disk=4)
    job.send(signal.SIGKILL, 1)
    time.sleep(5)
    job.send(signal.SIGSTOP, 2)
    wait_for(lambda: errors(tmp_path))
    time.sleep(6)
    job.send(signal.SIGCONT, 2)
    assert ended_by(job, 1, signal.SIGKILL, 40) == [RESUME_ME] * 3
    (line,) = errors(tmp_path)
    pid = job.processes[1].pid
    assert line.startswith(f"error: no sign of life for 10 s: rank 1 (process {pid} on")
    assert line.endswith("cannot be reached. The last good checkpoint is step-7")
    assert "TCPStore.cpp" not in (tmp_path / "log").read_text()


@pytest.mark.parametrize(
    "patience", [pytest.param(18, marks=pytest.mark.slow), pytest.param(30, marks=pytest.mark.long)]
)
def test_a_rank_that_is_held_up_is_not_given_up(sleepers, tmp_path, patience):
    """Two are stopped for 5/6 of the time that a silence may last, one of them with the server; the
    third keeps Python's lock from its threads. Then one is killed in earnest, and all end."""
    keep_lock = f"ctypes.PyDLL(None).sleep({patience * 2 // 3})"
    body = f"rank == 2 and {keep_lock}; time.sleep(600)"
    job = sleepers(3, f", patience={patience}", body)
    job.send(signal.SIGSTOP, 1)
    time.sleep(patience / 6)
    job.send(signal.SIGSTOP, 0)
    time.sleep(patience * 2 / 3)
    job.send(signal.SIGCONT, 1)
    time.sleep(patience / 6)
    job.send(signal.SIGCONT, 0)
    time.sleep(patience / 4)
    assert job.status() is None and not errors(tmp_path)
    assert ended_by(job, 1, signal.SIGKILL, 90) == [RESUME_ME] * 2
    (line,) = errors(tmp_path)
    assert line.startswith(f"error: no sign of life for {patience} s: rank 1 (process ")


@pytest.mark.slow
def test_a_rank_that_has_left_is_not_taken_for_dead(sleepers, tmp_path):
    """Rank 1 leaves at once, rank 0 after 14 s, rank 2 after 28 s: a silence may last 12 s."""
    job = sleepers(3, ", patience=12", body="time.sleep([14, 0, 28][rank])")
    assert job.wait(PATIENCE) and statuses(job) == [0] * 3
    assert not errors(tmp_path)
    assert "TCPStore.cpp" not in (tmp_path / "log").read_text()  # nor does the store complain


@pytest.mark.slow
def test_a_rank_that_has_published_its_status_is_not_taken_for_dead(sleepers, tmp_path):
    """It ends with status 2, and so do the others, though it is silent for some seconds before."""
    body = "if rank == 1: raise UserError('a mistake')\n        time.sleep(600)"
    job = sleepers(3, ", patience=12", body=body)
    assert job.wait(PATIENCE) and statuses(job) == [2] * 3
    assert errors(tmp_path) == ["error on rank 1: a mistake"]


def test_silence_is_counted_in_seconds_in_which_one_could_have_heard_something():
    signs = processes.SignsOfLife(0, 3)
    now = signs.last_look
    for second in range(1, 41):
        signs.look({1: second, 2: 0}, now + second)
        assert signs.gone(30) == ([2] if second >= 30 else [])
    signs.look({1: 40, 2: 1}, now + 41)
    assert signs.gone(0.5) == [1]
    signs.look({1: 40, 2: 1}, now + 1000)  # rank 0 itself was held up, for 959 seconds
    assert signs.gone(5) == []
    signs.look({1: watchdog.LEFT, 2: 1}, now + 1001)
    for second in range(1002, 1042):
        signs.look({1: watchdog.LEFT, 2: 1}, now + second)
    assert signs.gone(30) == [2]


def test_a_rank_looks_at_rank_0_alone_and_waits_for_its_store():
    signs = processes.SignsOfLife(999, 1000)
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


@pytest.mark.slow
def test_a_rank_that_hangs_where_all_seem_to_wait_is_found_by_its_collectives(started, tmp_path):
    """As on a GPU, where autograd runs the backward pass in a thread of its own."""
    hangs = "torch.ones(1, requires_grad=True).exp()"
    hook = "y.register_hook(lambda _: time.sleep(10**6))"
    stepping = f"y = {hangs}; (step, rank) == (3, 1) and ({hook}, y.sum().backward())"
    job = started(3, *FOREVER, "--global_batch_size=6", "--timeout_minutes=0.3", stepping=stepping)
    assert job.wait(PATIENCE) and statuses(job) == [RESUME_ME] * 3
    (line,) = errors(tmp_path)
    named = f"rank 1 (process {job.processes[1].pid} on "
    assert line.startswith(f"error: no step for 0.3 minutes: {named}")
    assert ") has started 1 collective fewer than the others. " in line
    assert "hangs at" not in line


def test_whoever_waits_for_another_is_not_to_blame():
    """Ranks 0 and 1, and 2 and 3, share shards; 0 and 2, and 1 and 3, hold copies. 3 hangs."""
    started = [
        {"shards 0": 9, "copies 0": 4},
        {"shards 0": 9, "copies 1": 5},  # waits for 3
        {"shards 2": 9, "copies 0": 4},  # waits for 3
        {"shards 2": 8, "copies 1": 4},
    ]
    assert watchdog.ranks_behind(started) == {3: 1}
    started[1]["shards 0"] = 11  # and 0 is behind 1, which waits for 3
    started[0]["copies 0"] = 6  # 0 waits for 2, which waits for 3
    assert watchdog.ranks_behind(started) == {3: 1}
    assert watchdog.ranks_behind([{"all": 7}, {"all": 7}]) == {}
    assert watchdog.ranks_behind([{}, {}]) == {}


def test_the_report_names_whoever_does_not_reply_or_is_behind_or_does_not_wait():
    names, waits = ["a", "b", "c"], watchdog.WAITS
    at = [["data.py, line 1, in f", {"all": 5}], [waits, {"all": 5}], [waits, {"all": 5}]]
    assert watchdog.hang_problems(names, at) == ["a hangs at data.py, line 1, in f"]
    at[1][1]["all"] = 3
    behind = "has started 2 collectives fewer than the others"
    assert watchdog.hang_problems(names, at) == [f"b {behind}"]
    at[1][0] = "loss.py, line 2, in g"
    assert watchdog.hang_problems(names, at) == [f"b hangs at loss.py, line 2, in g and {behind}"]
    assert watchdog.hang_problems(names, [*at[:2], ""]) == ["c does not reply"]
    at[1][0] = watchdog.WAITS_FOR_STAGE
    assert watchdog.hang_problems(names, at) == ["a hangs at data.py, line 1, in f"]
    (problem,) = watchdog.hang_problems(names, [[waits, {}]] * 3)
    assert problem.startswith("all ranks wait for each other")


def started_before_and_after(world):
    """`collectives_started` with three new groups, and again after a collective in the default one.

    Groups of other tests may be there already.
    """
    older = watchdog.collectives_started()
    others = dist.new_group([2, 3])  # for ranks 0 and 1, PyTorch's record of it has no group
    background = processes.new_group(processes.TIMEOUT)
    pair = dist.new_group([0, 1])
    before = watchdog.collectives_started()
    dist.all_reduce(torch.ones(1))
    dist.all_reduce(torch.ones(1), group=background)
    after = watchdog.collectives_started()
    for group in (others, background, pair):
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)
    return older, before, after


def test_collectives_are_counted_in_each_group_of_the_main_thread(ranks):
    results = ranks(4)(started_before_and_after)
    for older, before, after in results:
        default = next(iter(before))  # the oldest group
        grown = {key: after[key] - before[key] for key in after}
        assert grown.pop(default) == 1
        assert not any(grown.values())
        new = after.keys() - older.keys()  # that of two ranks; the background group is not counted
        assert len(new) == 1
    new = [after.keys() - older.keys() for older, _, after in results]
    assert new[0] == new[1] != new[2] == new[3]


# -------------------------------------------------------------------------------------------------
# The line of the main thread


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


def test_a_line_of_torch_s_autograd_waits():
    """On a GPU the main thread waits there, while another one runs the backward pass."""
    found = []
    x = torch.ones(1, requires_grad=True).exp()
    with futures.ThreadPoolExecutor(1) as pool:
        x.register_hook(lambda _: found.append(pool.submit(watchdog.current_line).result()))
        x.backward()
    assert found == [watchdog.WAITS]
    assert watchdog.current_line().startswith("lifecycle/watchdog.py, line ")


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
        return int(guard.read("status")[0]), halved


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
