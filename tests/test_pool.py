"""launch.pool.Pool: ranks of our own that answer, fail and die."""

import os
import signal
import subprocess
import sys
import time

import pytest
from conftest import ROOT, clean_environment

from launch.pool import Pool, PoolError


class Counter:
    """What each process of these pools has made."""

    def __init__(self, number):
        self.number = number

    def add(self, more):
        """The sum, this process's rank and its process id."""
        return self.number + more, int(os.environ["RANK"]), os.getpid()

    def die(self, rank):
        """Kill the process of this rank; the others wait, as in a collective."""
        if int(os.environ["RANK"]) == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)

    def leave(self):
        os._exit(7)

    def fill(self):
        """Ask for more memory than there is."""
        import torch

        torch.empty(2**48)

    def read(self):
        raise EOFError("the file is cut off")

    def unreadable(self):
        return lambda: None


def gone(pid):
    """Whether no process has this id."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_all_answer_in_the_order_of_ranks_until_one_is_killed():
    pool = Pool(2, Counter, 3)
    assert [answer[:2] for answer in pool(Counter.add, 4)] == [(7, 0), (7, 1)]
    assert "RANK" not in os.environ  # ours are left alone
    os.kill(pool.processes[1].pid, signal.SIGKILL)
    with pytest.raises(PoolError, match="killed"):
        pool(Counter.add, 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "size, call, message",
    [
        (2, (Counter.die, 1), "killed"),
        (1, (Counter.leave,), "status 7"),
        (1, (Counter.fill,), "out of memory"),
        (1, (Counter.read,), "EOFError: the file is cut off"),
        (1, (Counter.unreadable,), "pickle"),
    ],
)
def test_when_one_fails_all_end_and_the_error_says_why(size, call, message):
    pool = Pool(size, Counter, 3)
    pids = [pid for _, _, pid in pool(Counter.add, 0)]
    with pytest.raises(PoolError, match=message):
        pool(*call)
    assert all(map(gone, pids))
    with pytest.raises(PoolError, match=message):
        pool(Counter.add, 0)


def test_one_that_cannot_start_or_does_not_answer_is_an_error():
    with pytest.raises(PoolError, match="TypeError"):
        Pool(1, list, 1)(list)
    slow = Pool(1, float, 600)
    with pytest.raises(PoolError, match="no answer in 0.5 s"):
        slow(time.sleep, patience=0.5)


PARENT = """
import os, time
from launch.pool import Pool

def pid(started):
    return os.getpid()

if __name__ == "__main__":
    print(*Pool(1, os.getpid)(pid), flush=True)
    time.sleep(600)
"""


def test_its_processes_end_with_a_killed_parent(tmp_path):
    (tmp_path / "parent.py").write_text(PARENT)
    env = clean_environment() | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(tmp_path / "parent.py")]
    parent = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    assert not gone(child)
    parent.kill()
    parent.wait()
    while not gone(child):
        time.sleep(0.1)
