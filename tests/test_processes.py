"""processes.py: ranks meet whatever an earlier start has left behind, and exit if they cannot."""

import contextlib
import functools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conftest import (
    PATIENCE,
    ROOT,
    TORCHRUN,
    clean_environment,
    launch,
    rooms_on_path,
    slowly,
)
from launches import Job, wait_for
from test_stopping import workers

import devices
import parallel
import processes
from config import TrainConfig
from launch import rendezvous
from launch.pool import free_port, torchrun_variables
from program import RESUME_ME, StartAgain, UserError
from storage.object_store import StoreError

# -------------------------------------------------------------------------------------------------
# Meeting in a store


@pytest.fixture
def connect():
    """`connect()`: a client of one server, as each rank has one of torchrun's."""
    server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    options = {"is_master": False, "wait_for_workers": False, "timeout": timedelta(seconds=10)}
    return lambda: dist.TCPStore("localhost", server.port, **options)


@pytest.fixture
def pool():
    with ThreadPoolExecutor(16) as threads:
        yield threads


def meet(connect, pool, rank, size, seconds=30):
    return pool.submit(rendezvous.meet, connect(), rank, size, seconds)


def test_each_start_gets_one_new_name(connect, pool):
    """In one store, three starts of four ranks, which come one after the other."""
    names = []
    for order in [(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)]:
        waiting = []
        for rank in order:
            waiting.append(meet(connect, pool, rank, 4))
            time.sleep(0.03)
        (name,) = {each.result() for each in waiting}
        names.append(name)
    assert len(set(names)) == 3


def test_killed_ranks_do_not_count(connect, pool):
    """The store holds the name of a rank 0 that is gone, and old signatures."""
    store = connect()
    store.set("group", "old")
    store.set("old rank 1", "killed")
    store.set("old met", json.dumps({"signatures": {"1": "killed", "2": "killed"}, "missing": []}))
    second = meet(connect, pool, 2, 3)
    wait_for(lambda: store.check(["old rank 2"]))
    first = meet(connect, pool, 0, 3)
    wait_for(lambda: store.get("group") != b"old")
    name = store.get("group").decode()
    wait_for(lambda: store.check([f"{name} rank 2"]))
    store.set(f"{name} rank 2", "killed")  # rank 2 was killed after it signed, and starts again
    third = meet(connect, pool, 2, 3)
    wait_for(lambda: store.get(f"{name} rank 2") != b"killed")
    last = meet(connect, pool, 1, 3)
    assert first.result() == last.result() == third.result() == name
    assert not second.done()  # it does not take itself for the one that was admitted
    again = [meet(connect, pool, rank, 3) for rank in (0, 1)]
    assert {each.result() for each in [*again, second]} == {store.get("group").decode()}


def test_who_does_not_come_is_named(connect, pool, capsys):
    """Ranks 1 and 3 of four are missing: rank 0 says so, and the others exit with its status."""
    second = meet(connect, pool, 2, 4, 4)
    time.sleep(0.5)  # it comes earlier than rank 0, and yet waits longer
    first = meet(connect, pool, 0, 4, 4)
    assert [each.exception().code for each in (first, second)] == [75, 75]
    line = capsys.readouterr().err
    assert line.startswith("error: rank 0 (process ") and line.endswith(" for 2 of 4 ranks: 1, 3\n")
    alone = meet(connect, pool, 1, 4, 0.2)
    assert alone.exception().code == 75
    assert capsys.readouterr().err.endswith(", but rank 0 does not answer\n")


# -------------------------------------------------------------------------------------------------
# Real processes


def sum_forever(argv):
    """Rank 0 keeps writing the start that it belongs to into a file."""
    world = processes.start("cpu")
    parallel.make_mesh(world, TrainConfig())
    processes.new_group(processes.TIMEOUT)
    for step in range(10**6):
        dist.all_reduce(torch.ones(1))
        if world.global_rank == 0 and step % 10 == 0:
            with open("steps", "a") as file:
                file.write(f"{os.getpid()}\n")
        time.sleep(0.005)


PROGRAM = """
import processes, test_processes
processes.run(test_processes.sum_forever)
"""


@pytest.fixture
def launched(tmp_path):
    """`launched(launcher)` runs PROGRAM in tmp_path by a launcher; `environment` is added."""
    started = []
    program = tmp_path / "sum_forever.py"
    program.write_text(PROGRAM)
    paths = ":".join(map(str, (ROOT, ROOT / "tests", ROOT / "tests/lifecycle")))

    def launch(*how, **environment):
        env = clean_environment() | {"PYTHONPATH": paths} | environment
        with open(tmp_path / "log", "a") as log:
            command = [sys.executable, *how, str(program)]
            started.append(subprocess.Popen(command, cwd=tmp_path, env=env, stdout=log, stderr=log))
        return started[-1]

    yield launch
    for process in started:
        process.terminate()
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()


def starts(folder) -> list[str]:
    """The process numbers of rank 0, of each start."""
    path = folder / "steps"
    return list(dict.fromkeys(path.read_text().split())) if path.exists() else []


def errors(folder) -> list[str]:
    return [line for line in (folder / "log").read_text().splitlines() if line.startswith("error")]


def gone(pid) -> bool:
    """Zombies are, too: their new parent may not look after them."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


KINDS = {
    "c10d": ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"],
    "standalone": ["--standalone"],
    "static": ["--master_addr=localhost", "--master_port={port}"],
}


@pytest.mark.parametrize(
    "kind, kills",
    [pytest.param("static", 2, marks=pytest.mark.slow)]  # c10d: test_stopping.py
    + [pytest.param(kind, 8, marks=pytest.mark.long) for kind in KINDS],
)
def test_torchrun_starts_killed_ranks_again(launched, tmp_path, kind, kills):
    """By kill -9, rank 0 and rank 1 in turns."""
    how = [flag.format(port=free_port()) for flag in KINDS[kind]]
    how += ["--nproc_per_node=2", f"--max-restarts={kills}"]
    job = launched("-m", "torch.distributed.run", *how)
    for number in range(kills):
        wait_for(lambda: len(starts(tmp_path)) > number)  # noqa: B023
        os.kill(workers(job)[number % 2], signal.SIGKILL)
    wait_for(lambda: len(starts(tmp_path)) > kills)
    assert job.poll() is None


@pytest.mark.slow
def test_a_rank_of_another_torchrun_is_killed(launched, tmp_path):
    """Both torchruns restart their ranks."""
    endpoint = f"localhost:{free_port()}"
    how = f"""
        -m torch.distributed.run --rdzv-backend=c10d --rdzv-endpoint={endpoint} --rdzv-id=x
        --nnodes=2 --nproc_per_node=1 --max-restarts=1
    """.split()
    _, second = launched(*how), launched(*how)
    wait_for(lambda: starts(tmp_path))
    os.kill(workers(second)[0], signal.SIGKILL)
    wait_for(lambda: len(starts(tmp_path)) == 2)


@pytest.mark.slow
def test_ranks_end_with_torchrun(launched, tmp_path):
    """kill -9 of torchrun: its ranks would train unsupervised, and hold the run folder."""
    job = launched("-m", "torch.distributed.run", *KINDS["c10d"], "--nproc_per_node=2")
    wait_for(lambda: starts(tmp_path))
    ranks = workers(job)
    job.kill()
    wait_for(lambda: all(map(gone, ranks)))
    assert any(f"torchrun (process {job.pid}) is gone" in line for line in errors(tmp_path))


@pytest.mark.slow
def test_a_port_that_is_taken_is_a_mistake(launched, tmp_path):
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        job = launched(**torchrun_variables(0, 2, port))
        assert job.wait(PATIENCE) == 2
    (line,) = errors(tmp_path)
    assert f"port {port} on " in line and line.endswith("is in use: set MASTER_PORT to a free one")


AFTER = {
    "signed in": (rendezvous, "meet"),
    "connected": (processes, "start"),
    "in a group": (parallel, "make_mesh"),
}


@contextlib.contextmanager
def befallen(size, moment, victim, number, rank):
    """One of `size` ranks gets a signal at this moment. Rank 0 comes later than the others."""
    rendezvous.MEETING = 8
    Path(f"ready {rank}").touch()
    wait_for(lambda: len(list(Path().glob("ready *"))) == size)
    if rank != victim:
        time.sleep(2 if rank == 0 else 0)
        yield
    elif moment == "before":
        os.kill(os.getpid(), number)
    else:
        module, name = AFTER[moment]
        function = getattr(module, name)

        def dying(*args):
            function(*args)
            os.kill(os.getpid(), number)

        with mock.patch.object(module, name, dying):
            yield


@pytest.mark.parametrize(
    "moment, victim, number",
    [
        slowly("before", 0, signal.SIGKILL),
        slowly("before", 1, signal.SIGSTOP),
        slowly("connected", 0, signal.SIGKILL),
        slowly("connected", 2, signal.SIGSTOP),
        slowly("in a group", 1, signal.SIGKILL),
        pytest.param("signed in", 2, signal.SIGSTOP, marks=pytest.mark.long),
        pytest.param("connected", 0, signal.SIGSTOP, marks=pytest.mark.long),
    ],
)
def test_a_rank_that_ends_or_stands_still_before_the_loop_is_named(
    tmp_path, moment, victim, number
):
    """Even without a watching launcher. Else the others would wait an hour for its addresses.

    They wait for rank 0, which knows who is missing.
    """
    size = 2 if number == signal.SIGKILL else 3  # each sees the end of another's connection
    fault = functools.partial(befallen, size, moment, victim, number)
    with Job(tmp_path, size, sum_forever, fault=fault) as job:
        assert set(job.wait(but=victim)) == {75}, job.log()
        lines = job.errors()
    # Without rank 0 the others cannot agree who says it.
    assert lines and (victim == 0 or len(lines) == 1)
    if moment == "before":
        named = f" for 1 of 3 ranks: {victim}" if victim else "error: rank 1 (process "
    else:
        named = f"rank {victim} "
    if number == signal.SIGSTOP or moment == "before":
        assert all(named in line for line in lines), lines


def fail_alone(argv):
    """Rank 1 has an error of its own; rank 0 is not even in a collective with it."""
    if processes.start("cpu").global_rank == 1:
        raise UserError("my disk is full")
    time.sleep(600)


@pytest.mark.slow
def test_an_error_of_one_rank_before_the_loop_ends_all_with_its_status(tmp_path):
    with Job(tmp_path, 2, fail_alone) as job:
        assert job.wait() == [2, 2]
        assert job.errors() == ["error on rank 1: my disk is full"]


LATE = """
import time
import processes, program

def main(argv):
    raise program.UserError("the store is gone", on_all_ranks=True)

def late(*words):
    time.sleep(3)
    print_error(*words)

print_error = program.print_error
program.print_error = late
processes.run(main)
"""


@pytest.mark.slow
def test_the_line_of_all_ranks_is_printed_before_torchrun_ends_rank_0(tmp_path):
    """It ends all ranks when the first one has ended, and rank 0, which prints, may be late."""
    (tmp_path / "late.py").write_text(LATE)
    done = launch([*TORCHRUN, "2"], tmp_path, [], tmp_path / "late.py")
    assert "error: the store is gone" in done.stderr.splitlines()
    assert "rank      : 0 (local_rank: 0)\n  exitcode  : 2 " in done.stderr


# -------------------------------------------------------------------------------------------------
# How a rank ends

# Prints the exit status of a rank for each error, which another process of its own fails with.
ENDS = """
import os
import torch.distributed as dist
import processes

def failing(error):
    def main(argv):
        raise error
    return main

errors = {
    "lost": dist.DistBackendError("NCCL error ... ncclRemoteError: socket closed"),
    "twice": dist.DistBackendError("ncclInvalidUsage ... Duplicate GPU detected : rank 1 and 0"),
    "nccl": dist.DistBackendError("NCCL error ... Failed to CUDA calloc async 608 bytes"),
    "cpu": MemoryError(),
    "bug": RuntimeError("a bug"),
}
for name, error in errors.items():
    child = os.fork()
    if child == 0:
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), 2)
        processes.run(failing(error))
    print(name, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def in_root(program, folder):
    """Run a program of ours in a folder of its own. Returns what it printed."""
    command = [sys.executable, "-c", program]
    options = {"cwd": folder, "env": rooms_on_path(), "capture_output": True, "text": True}
    return subprocess.run(command, check=True, **options).stdout


def test_the_cause_of_an_error_decides_the_exit_status(tmp_path):
    """Two ranks on one GPU, or no memory, is no lost rank, which would be restarted forever."""
    said = dict(line.split() for line in in_root(ENDS, tmp_path).splitlines())
    assert said == {"lost": "75", "twice": "2", "nccl": "2", "cpu": "2", "bug": "1"}
    lines = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert "two ranks use one GPU" in lines["twice"]
    for name in ("nccl", "cpu"):
        assert lines[name].startswith("error: out of memory (") and lines[name].count("\n") == 1
    assert lines["lost"].startswith("error on rank 0: lost another rank: NCCL error")
    assert "Traceback" in lines["bug"]


def test_nccl_leaves_it_to_our_watchdog_unless_the_user_says_otherwise(monkeypatch):
    names = ["TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"]
    monkeypatch.setattr(processes, "join", lambda *_: None)
    two_hours = timedelta(hours=2)
    for users, timeout, expected in [
        ({}, None, [None, None]),  # of a program without ours: NCCL must end it
        ({}, two_hours, ["0", "7200"]),
        ({"NCCL_ASYNC_ERROR_HANDLING": "1"}, two_hours, [None, "7200"]),
    ]:
        monkeypatch.setattr(os, "environ", dict(users))
        processes.start("cpu", timeout)
        assert [os.environ.get(name) for name in names] == expected


# -------------------------------------------------------------------------------------------------
# Failing together


def shared(world, victims, error, on):
    """What this rank gets of an action that fails with `error` on the ranks `victims`."""

    def action():
        if world.global_rank in victims:
            raise error
        return world.global_rank

    try:
        return processes.together(action, on)
    except UserError as failure:
        return str(failure), failure.status, failure.on_all_ranks


def test_what_fails_on_one_rank_fails_on_all(ranks):
    """Also if it is not rank 0. The exit status is that of the error."""
    call = ranks(2)
    assert call(shared, [], None, "all") == [[0, 1]] * 2
    assert call(shared, [1], None, 0) == [0] * 2  # there rank 1 does not act
    again = StartAgain("the shard is gone")
    assert call(shared, [1], again, "all") == [("the shard is gone", RESUME_ME, True)] * 2
    full = OSError(28, "No space left on device")
    for on in ("all", 0):
        assert call(shared, [0], full, on) == [(str(full), 2, True)] * 2
    down = StoreError("the store is down", passes=True)  # of a kind with arguments of its own
    assert call(shared, [1], down, "all") == [("the store is down", 2, True)] * 2


# -------------------------------------------------------------------------------------------------
# One GPU a rank


@pytest.fixture
def gpus(monkeypatch):
    """`gpus(n)`: as if this process saw n GPUs."""

    def see(count):
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(devices, "open_gpu", lambda device: None)

    return see


# The last: srun shows each rank its own.
@pytest.mark.parametrize(
    "count, local_rank, local_size, index", [(8, 0, 1, 0), (8, 3, 4, 3), (1, 5, 8, 0)]
)
def test_each_rank_takes_its_gpu(gpus, count, local_rank, local_size, index):
    gpus(count)
    device = processes.pick_device("auto", local_rank, local_size, local_size)
    assert device == torch.device("cuda", index)


@pytest.mark.parametrize("count, local_rank, local_size", [(2, 0, 3), (2, 2, 3), (2, 3, 1)])
def test_more_ranks_than_gpus_are_a_mistake(gpus, count, local_rank, local_size):
    """Also for the ranks that would have one of their own, so that rank 0 says it."""
    gpus(count)
    with pytest.raises(UserError, match=f"share {count} GPUs: .*--nproc_per_node={count}$"):
        processes.pick_device("cuda", local_rank, local_size, 16)


ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"  # the one name that every version from 2.9 on reads


@pytest.mark.parametrize(
    "build, users, expected",
    [
        ("12.8", {}, {ALLOCATOR: "expandable_segments:True"}),
        ("12.8", {ALLOCATOR: "backend:native"}, {ALLOCATOR: "backend:native"}),
        ("12.8", {"PYTORCH_ALLOC_CONF": "x:1"}, {"PYTORCH_ALLOC_CONF": "x:1"}),
        (None, {}, {}),  # ROCm, or no GPU
    ],
)
def test_freed_gpu_memory_is_joined_unless_the_user_says_otherwise(
    monkeypatch, build, users, expected
):
    """Set before a device is picked: that starts CUDA, which reads the variable once."""
    monkeypatch.setattr(os, "environ", users)
    monkeypatch.setattr(torch.version, "cuda", build)

    def pick_device(*args):
        raise UserError(str(os.environ))

    monkeypatch.setattr(processes, "pick_device", pick_device)
    with pytest.raises(UserError, match=re.escape(str(expected))):
        processes.start("cuda")


@pytest.mark.gpu
def test_pytorch_reads_the_setting_of_its_allocator():
    """How many segments there are is the allocator's business; here only their kind counts."""
    code = "import processes, torch; processes.start('cuda'); torch.ones(2**20, device='cuda')"
    code += "; print({part['is_expandable'] for part in torch.cuda.memory_snapshot()})"
    printed = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True)
    assert printed.strip() == str({torch.version.hip is None})
