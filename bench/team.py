"""The processes of a measurement: several ranks that may die without taking us along.

    team = Team(Program, arguments, ranks=2, threads=1)     two processes that each make Program(*arguments)
    team.call("turn", 4)                                    [what program.turn(4) returned, of each process]
    team.stop()

So the peak memory of a process is the program's own, programs of different sizes can take turns,
and running out of memory ends a team and nothing else: `TeamError` says why. Under torchrun or srun
the processes are there already, and `Launched` has the same two methods; what fails there ends the
whole launch.

Run `python -m bench team` to see three processes tell their ranks. Read next: bench/table.py.
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

KILLED = "killed (for want of memory?)"


class Team:
    """`ranks` processes on this machine, of `threads` threads, that each make `program(*arguments)`.

    `program` is a class that can be imported; it finds its rank in the environment, as under torchrun.
    """

    def __init__(self, program, arguments: tuple, ranks: int, threads: int):
        self.processes, self.pipes = [], []
        port = processes.free_port()
        for rank in range(ranks):
            variables = processes.torchrun_variables(rank, ranks, port)
            job = (member, program, arguments, threads)
            process, pipe = processes.spawn(*job, environment=variables)
            self.processes.append(process)
            self.pipes.append(pipe)
        self.answers()

    def call(self, method: str, *args) -> list:
        """Run a method on every process at once; what each returned, by rank. TeamError if one failed."""
        try:
            for pipe in self.pipes:
                pipe.send((method, args))
        except OSError as error:
            self.stop()
            raise TeamError(KILLED) from error
        return self.answers()

    def answers(self) -> list:
        """One answer of each process. When one fails the others are ended: they may wait for it forever."""
        found = {}
        while len(found) < len(self.pipes):
            for pipe in wait([pipe for pipe in self.pipes if pipe not in found]):
                try:
                    fine, found[pipe] = pipe.recv()
                except (EOFError, OSError):
                    fine, found[pipe] = False, KILLED
                if not fine:
                    self.stop()
                    raise TeamError(found[pipe])
        return [found[pipe] for pipe in self.pipes]

    def stop(self) -> None:
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            process.kill()
            process.join()
            pipe.close()


def member(pipe, program, arguments, threads) -> None:
    """The life of one process of a team."""
    torch.set_num_threads(threads)
    try:
        made = program(*arguments)
        pipe.send((True, None))
        while True:
            method, args = pipe.recv()
            pipe.send((True, getattr(made, method)(*args)))
    except (EOFError, BrokenPipeError):  # the parent has gone
        os._exit(0)
    except Exception as error:
        pipe.send((False, reason(error)))
        os._exit(1)


class Launched:
    """The same under torchrun or srun, which have started the processes: this is one of them."""

    def __init__(self, program, arguments: tuple, ranks: int, threads: int):
        torch.set_num_threads(threads)
        self.made = self.attempt(program, *arguments)

    def call(self, method: str, *args) -> list:
        answers = [None] * dist.get_world_size()
        dist.all_gather_object(answers, self.attempt(getattr(self.made, method), *args))
        return answers

    def attempt(self, function, *args):
        try:
            return function(*args)
        except Exception as error:
            raise TeamError(reason(error)) from error

    def stop(self) -> None:
        self.made = None
        gc.collect()
        torch.compiler.reset()  # what comes next is compiled anew
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def launched() -> int:
    """How many processes torchrun or srun has started; 0: none, or this one only."""
    by_srun = os.environ.get("SLURM_NTASKS", 0) if "SLURM_PROCID" in os.environ else 0
    number = int(os.environ.get("WORLD_SIZE", by_srun))
    return number if number > 1 else 0


class TeamError(Exception):
    """A process failed; the text says why, in a few words."""


def reason(error: Exception) -> str:
    """A few words for a table."""
    others = re.search(
        "out of memory|ALLOC_FAILED|DefaultCPUAllocator", str(error), re.IGNORECASE
    )  # libraries, CPUs
    if isinstance(error, torch.OutOfMemoryError) or others:
        return "out of memory"
    if isinstance(error, ImportError):
        return f"{error}: see requirements-dev.txt"
    return textwrap.shorten(f"{type(error).__name__}: {error}", 100, placeholder=" ...").replace(
        "|", "/"
    )


class Who:
    """A program that knows its rank."""

    def rank(self) -> str:
        return f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}, {torch.get_num_threads()} threads"


def main(argv) -> None:
    """Three processes that tell their ranks, and one mistake."""
    config.arguments(argv)
    team = Team(Who, (), ranks=3, threads=1)
    print(*team.call("rank"), sep="\n")
    try:
        team.call("leave")
    except TeamError as error:
        print(f"and what has no such method: {error}")


if __name__ == "__main__":
    config.run(main)
