"""Processes that answer, fail and die."""

import os
import signal
import time

import pytest

from bench.team import Team, TeamError


class Program:
    """Runs in the processes of a team."""

    def __init__(self, number):
        self.number = number

    def add(self, more):
        return self.number + more, int(os.environ["RANK"]), os.getpid()

    def die(self, rank):
        if int(os.environ["RANK"]) == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)  # as one that waits in a collective

    def fill(self):
        import torch

        torch.empty(2**48)


@pytest.fixture
def team():
    team = Team(Program, (3,), ranks=2, threads=1)
    yield team
    team.stop()


def gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.slow
def test_every_process_answers(team):
    assert [answer[:2] for answer in team.call("add", 4)] == [(7, 0), (7, 1)]


@pytest.mark.parametrize(
    "call, words",
    [
        (("die", 1), "killed"),
        pytest.param(("fill",), "out of memory", marks=pytest.mark.slow),
        pytest.param(("jump",), "no attribute", marks=pytest.mark.slow),
    ],
)
def test_when_one_fails_all_are_ended_and_the_reason_is_told(team, call, words):
    pids = [pid for _, _, pid in team.call("add", 0)]
    begin = time.monotonic()
    with pytest.raises(TeamError, match=words):
        team.call(*call)
    assert all(map(gone, pids)) and time.monotonic() - begin < 30


@pytest.mark.slow
def test_one_that_was_killed_while_it_waited_is_told(team):
    os.kill(team.processes[1].pid, signal.SIGKILL)
    team.processes[1].join()
    for _ in range(2):
        with pytest.raises(TeamError, match="killed"):
            team.call("add", 0)


def test_what_cannot_even_start_is_told():
    with pytest.raises(TeamError, match="TypeError"):
        Team(Program, (), ranks=1, threads=1)
