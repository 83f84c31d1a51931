"""Ranks on this machine that one process starts, and that answer its calls: for benches and tests.

    pool = Pool(4, start, x)    each process is a rank, as under torchrun, and calls start(x)
    pool(function, y)           [function(started, y) of rank 0, of rank 1, ...]

Each process is forked or spawned, and ends with the one that started it.
"""

import contextlib
import multiprocessing.connection
import os
import pickle
import random
import signal
import socket
import textwrap
import time
import traceback

import torch

import program
from program import out_of_memory


def free_port() -> int:
    """A port of this machine at which no process listens now.

    Below 32768: above, Linux picks ports for outgoing connections, which may take it meanwhile.
    """
    for port in random.SystemRandom().sample(range(20000, 32000), 100):
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            return port
    raise OSError("no free port between 20000 and 32000")


def torchrun_variables(rank: int, size: int, port: int) -> dict[str, str]:
    """What torchrun would set for one of `size` processes that are all on this machine.

    Rank 0 serves the store at `port` itself, whether or not there is a torchrun around us.
    """
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }


class PoolError(Exception):
    """A process of a pool failed or died. The text says why in a few words.

    details: its traceback, if it had one.
    """

    def __init__(self, words: str, details: str = ""):
        super().__init__(words)
        self.details = details


class Pool:
    """`size` processes on this machine that call functions for this one.

        pool = Pool(4, start, x)     each process is a rank, as under torchrun, and calls start(x)
        pool(function, y)            [function(started, y) of rank 0, of rank 1, ...], where
                                     `started` is what start(x) returned there
        pool.stop()

    If one fails, all end: the others may wait for it in a collective. They end with this process.
    A failure of `start` shows in the first call.
    threads: of each process. environment: variables besides torchrun's. method: how multiprocessing
    starts a process.
    """

    def __init__(
        self, size: int, start, *args, threads: int = 1, environment=None, method: str = "spawn"
    ):
        port = free_port()
        self.processes, self.pipes = [], []
        self.ended = ""  # why, once it has
        context = multiprocessing.get_context(method)
        for rank in range(size):
            ours, theirs = context.Pipe()
            variables = torchrun_variables(rank, size, port) | dict(environment or {})
            job = theirs, variables, threads, start, args
            process = context.Process(target=serve, args=job, daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)

    def __call__(self, function, *args, patience: float | None = None) -> list:
        """Call `function(started, *args)` on all ranks; the results, by rank.

        function: one that can be imported. PoolError if it fails on one rank, or if they take more
        than `patience` seconds.
        """
        if self.ended:
            raise PoolError(self.ended)
        call = pickle.dumps((function, args))
        for pipe in self.pipes:
            with contextlib.suppress(OSError):  # the process is gone, as `receive` will find
                pipe.send_bytes(call)

        results = {}
        begin = time.monotonic()
        while waiting := [pipe for pipe in self.pipes if pipe not in results]:
            left = None if patience is None else max(0, begin + patience - time.monotonic())
            ready = multiprocessing.connection.wait(waiting, left)
            if not ready:
                self.fail(PoolError(f"no answer in {patience:g} s"))
            for pipe in ready:
                results[pipe] = self.receive(pipe)
        return [results[pipe] for pipe in self.pipes]

    def receive(self, pipe):
        """What one process sent. PoolError if it failed or died."""
        try:
            succeeded, result = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            process = self.processes[self.pipes.index(pipe)]
            process.join(5)
            if process.exitcode == -signal.SIGKILL:  # the kernel does that when memory runs out
                self.fail(PoolError("killed (out of memory?)"))
            self.fail(PoolError(f"its process ended with status {process.exitcode}"))
        if not succeeded:
            self.fail(PoolError(*result))
        return result

    def fail(self, error: PoolError) -> None:
        """End the processes and raise the error."""
        self.stop()
        self.ended = str(error)
        raise error

    def stop(self) -> None:
        """End the processes."""
        self.ended = self.ended or "the pool was stopped"
        for process in self.processes:
            process.kill()
        for process, pipe in zip(self.processes, self.pipes, strict=True):
            process.join()
            pipe.close()


def serve(pipe, environment: dict[str, str], threads: int, start, args: tuple) -> None:
    """The life of one process of a pool: call what comes through the pipe, until it is closed."""
    program.end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the parent, and so us
    os.environ |= environment
    torch.set_num_threads(threads)
    try:
        started = start(*args)
    except BaseException as error:
        pipe.send_bytes(pickle.dumps((False, described(error))))
        os._exit(1)
    with contextlib.suppress(EOFError, OSError):
        while True:
            function, args = pickle.loads(pipe.recv_bytes())
            pipe.send_bytes(answer_of(function, started, *args))
    os._exit(0)  # gloo may abort while the interpreter shuts down


def answer_of(function, *args) -> bytes:
    """(True, the result) or (False, the arguments of a PoolError), pickled."""
    try:
        return pickle.dumps((True, function(*args)))
    except BaseException as error:
        return pickle.dumps((False, described(error)))


def described(error: BaseException) -> tuple[str, str]:
    """The arguments of a PoolError for this one."""
    details = "".join(traceback.format_exception(error))
    if any(out_of_memory(found) for found in (error, error.__cause__)):
        return "out of memory", details
    words = f"{type(error).__name__}: {error}"
    return textwrap.shorten(words, 200, placeholder=" ..."), details
