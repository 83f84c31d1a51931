"""The processes of a measurement: several ranks that may fail without ending this program.

    team = Team(Program, arguments, ranks=2, threads=1)    each process makes Program(*arguments)
    team.call("turn", 4)                                   [program.turn(4) of each process]
    team.stop()

So the peak memory of a process is the program's own, programs of different sizes can take turns,
and running out of memory ends only the team: `TeamError` says why. Under torchrun or srun the
processes exist already, and `Launched` has the same methods; there a failure ends the whole launch.

Run `python -m bench team` to see three processes print their ranks.
"""

import gc
import os
import re
import textwrap
from multiprocessing.connection import wait

import torch
import torch.distributed as dist

import config
import processes
import program

KILLED = "killed (out of memory?)"


class Team:
    """`ranks` processes on this machine that each make `program(*arguments)`.

    threads: of each process.
    program: a class that can be imported. It finds its rank in the environment, as under torchrun.
    """

    def __init__(self, program, arguments: tuple, ranks: int, threads: int):
        self.processes = []
        self.pipes = []
        port = processes.free_port()
        for rank in range(ranks):
            variables = processes.torchrun_variables(rank, ranks, port)
            process, pipe = processes.spawn(
                member, program, arguments, threads, environment=variables
            )
            self.processes.append(process)
            self.pipes.append(pipe)
        self.answers()

    def call(self, method: str, *args) -> list:
        """Call a method on all processes together; the results, by rank.

        TeamError if one process failed; then all are ended.
        """
        try:
            for pipe in self.pipes:
                pipe.send((method, args))
        except OSError as error:
            self.stop()
            raise TeamError(KILLED) from error
        return self.answers()

    def answers(self) -> list:
        """One answer of each process, by rank.

        TeamError if one failed. The others are ended first: they may wait for it forever.
        """
        answers = {}
        while len(answers) < len(self.pipes):
            for pipe in wait([pipe for pipe in self.pipes if pipe not in answers]):
                try:
                    succeeded, answers[pipe] = pipe.recv()
                except (EOFError, OSError):
                    succeeded, answers[pipe] = False, KILLED
                if not succeeded:
                    self.stop()
                    raise TeamError(answers[pipe])
        return [answers[pipe] for pipe in self.pipes]

    def stop(self) -> None:
        """Kill the processes."""
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            process.kill()
            process.join()
            pipe.close()


def member(pipe, program, arguments: tuple, threads: int) -> None:
    """One process of a team: make the program, then answer calls until the parent is gone."""
    torch.set_num_threads(threads)
    try:
        instance = program(*arguments)
        pipe.send((True, None))
        while True:
            method, args = pipe.recv()
            pipe.send((True, getattr(instance, method)(*args)))
    except (EOFError, BrokenPipeError):  # the parent is gone
        os._exit(0)
    except Exception as error:
        pipe.send((False, reason(error)))
        os._exit(1)


class Launched:
    """A Team whose processes torchrun or srun has started; this process is one of them."""

    def __init__(self, program, arguments: tuple, ranks: int, threads: int):
        torch.set_num_threads(threads)
        self.program = self.attempt(program, *arguments)

    def call(self, method: str, *args) -> list:
        """Call a method on all ranks; the results, by rank. TeamError if it failed here."""
        answer = self.attempt(getattr(self.program, method), *args)
        answers = [None] * dist.get_world_size()
        dist.all_gather_object(answers, answer)
        return answers

    def attempt(self, function, *args):
        """Call a function; its exceptions become TeamError."""
        try:
            return function(*args)
        except Exception as error:
            raise TeamError(reason(error)) from error

    def stop(self) -> None:
        """Free the program's memory, and what was compiled for it."""
        self.program = None
        gc.collect()
        torch.compiler.reset()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def launched() -> int:
    """How many processes torchrun or srun has started; 0: none, or only this one."""
    _, size, _, _ = program.place()
    return size if size > 1 else 0


class TeamError(Exception):
    """A process failed; the text says why, in a few words."""


def reason(error: Exception) -> str:
    """An error in a few words, for a cell of a table."""
    text = str(error)
    libraries_and_cpus = "out of memory|ALLOC_FAILED|DefaultCPUAllocator"
    no_memory = re.search(libraries_and_cpus, text, re.IGNORECASE)
    if isinstance(error, torch.OutOfMemoryError) or no_memory:
        return "out of memory"
    if isinstance(error, ImportError):
        return f"{text}: see requirements-dev.txt"
    short = textwrap.shorten(f"{type(error).__name__}: {text}", 100, placeholder=" ...")
    return short.replace("|", "/")


class Who:
    """A program that knows its rank."""

    def rank(self) -> str:
        """The global rank and the number of threads, as text."""
        rank, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
        return f"rank {rank} of {size}, {torch.get_num_threads()} threads"


def main(argv) -> None:
    """Three processes that print their ranks, and one failure."""
    config.arguments(argv)
    team = Team(Who, (), ranks=3, threads=1)
    print(*team.call("rank"), sep="\n")
    try:
        team.call("leave")
    except TeamError as error:
        print(f"a method that does not exist: {error}")


if __name__ == "__main__":
    config.run(main)
