"""bench/team.py: processes that answer, fail and die."""

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
        """The sum, this process's rank and its process id."""
        return self.number + more, int(os.environ["RANK"]), os.getpid()

    def die(self, rank):
        """Kill the process of this rank; the others wait, as in a collective."""
        if int(os.environ["RANK"]) == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    def fill(self):
        """Ask for more memory than there is."""
        import torch

        torch.empty(2**48)


@pytest.fixture
def team():
    team = Team(Program, (3,), ranks=2, threads=1)
    yield team
    team.stop()


def gone(pid):
    """Whether no process has this id."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_every_process_answers(team):
    assert [answer[:2] for answer in team.call("add", 4)] == [(7, 0), (7, 1)]


@pytest.mark.parametrize(
    "call, message",
    [(("die", 1), "killed"), (("fill",), "out of memory"), (("jump",), "no attribute")],
)
def test_when_one_fails_all_are_ended_and_the_error_says_why(team, call, message):
    pids = [pid for _, _, pid in team.call("add", 0)]
    begin = time.monotonic()
    with pytest.raises(TeamError, match=message):
        team.call(*call)
    assert all(map(gone, pids)) and time.monotonic() - begin < 30


def test_a_process_killed_between_calls_is_an_error(team):
    os.kill(team.processes[1].pid, signal.SIGKILL)
    team.processes[1].join()
    for _ in range(2):
        with pytest.raises(TeamError, match="killed"):
            team.call("add", 0)


def test_a_program_that_cannot_start_is_an_error():
    with pytest.raises(TeamError, match="TypeError"):
        Team(Program, (), ranks=1, threads=1)
