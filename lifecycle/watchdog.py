"""Watchdog: finds the rank that hangs, stops all ranks when one fails, and times stragglers.

When collectives hang, ranks cannot talk through collectives. So each rank has a thread beside its
training loop, and rank 0 serves a small key-value store (PyTorch's TCPStore) to these threads:

    no step for --timeout_minutes    each thread publishes the line that its main thread is at. The
                                     ranks that do not reply, or are not waiting for others, are
                                     named, and all ranks exit with 75: resume me
    one rank fails                   it publishes its exit status; the others exit with it instead
                                     of waiting for the failed rank in a collective
    out of memory                    all exit with 75, and the next start halves the microbatch

`Guard` is the one context around the training loop: signals, lease, watchdog, straggler timer.

Run `torchrun --nproc_per_node 2 -m lifecycle.watchdog` to see it name a rank that sleeps.
"""

import contextlib
import os
import sys
import threading
import time
from concurrent import futures
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import config
import processes
import program
from config import UserError
from lifecycle import microbatch
from program import RESUME_ME, whoami

ROOT = Path(__file__).parent.parent
REPLY_TIMEOUT = 5  # seconds in which a thread of a living rank replies
WAITS = "waits"
# Errors of the store: rank 0 is gone, or so stuck that its server does not reply.
STORE_LOST = (RuntimeError, futures.TimeoutError)


class Guard:
    """Protects the training loop on one rank: signals, lease, watchdog and straggler timer."""

    def __init__(self, signals, lease, watchdog: "Watchdog", straggler_timer: "StragglerTimer"):
        self.signals, self.lease = signals, lease
        self.watchdog, self.straggler_timer = watchdog, straggler_timer
        self.contexts = contextlib.ExitStack()

    def __enter__(self):
        self.signals.nothing_to_save = False
        self.contexts.enter_context(self.lease)
        self.contexts.enter_context(self.watchdog)
        return self

    def __exit__(self, *error):
        return self.contexts.__exit__(*error)

    def watch(self, batches):
        """Yield the same (step, rows); time the wait for each, and record a heartbeat after it."""
        for step, rows in self.straggler_timer.time_reading(batches):
            self.watchdog.step = step
            yield step, rows
            self.watchdog.heartbeat()


class StragglerTimer:
    """How long this rank spends outside collectives, step by step: the slowest is the straggler.

    It times the wait for the batch, and the final norm, logits and loss of the forward passes. In
    all other parts of a step ranks wait for one another, so all seem equally slow.
    """

    def __init__(self, model, device: torch.device):
        self.on_gpu = device.type == "cuda"
        self.reading_seconds = 0.0
        self.marks = []  # begin, end, begin, end, ... of this step's timed forward passes
        model.transformer.norm_f.register_forward_pre_hook(self.mark)
        model.register_forward_hook(self.mark, prepend=True)

    def mark(self, module, *_) -> None:
        """A hook that records the time; on a GPU as an event, since the host runs ahead of it."""
        if not module.training:
            return
        if self.on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            self.marks.append(torch.cuda.current_stream().record_event(event))
        else:
            self.marks.append(time.perf_counter())

    def time_reading(self, batches):
        """The same batches; notes how long each one was waited for."""
        batches = iter(batches)
        begin = time.perf_counter()
        for batch in batches:
            self.reading_seconds = time.perf_counter() - begin
            yield batch
            begin = time.perf_counter()

    def take(self):
        """A function for the seconds of the step just queued. Call it when that step is done."""
        marks, self.marks = self.marks, []
        reading_seconds = self.reading_seconds

        def seconds() -> float:
            pairs = zip(marks[::2], marks[1::2], strict=True)
            if self.on_gpu:
                return reading_seconds + sum(a.elapsed_time(b) / 1000 for a, b in pairs)
            return reading_seconds + sum(b - a for a, b in pairs)

        return seconds


class Watchdog:
    """A context around the training loop, on every rank.

    minutes: how long a step may take. last_good(): a sentence that names the newest checkpoint.
    halve(step): records half of the microbatch for the next start, and returns it.
    """

    def __init__(self, world, minutes: float, last_good, halve, first_step: int = 0):
        self.world, self.minutes, self.last_good, self.halve = world, minutes, last_good, halve
        self.step = first_step
        self.closed = threading.Event()
        self.reports_hang = False
        self.known_peer_status = None
        self.store = open_store(world)
        self.query_thread = futures.ThreadPoolExecutor(1)
        self.name = whoami(world.global_rank)
        self.store.set(f"name {world.global_rank}", self.name)
        dist.barrier()
        self.name_of_rank_0 = self.store.get("name 0").decode()

    def __enter__(self):
        self.heartbeat()
        threading.Thread(target=self.run, daemon=True).start()
        return self

    def heartbeat(self) -> None:
        """The training loop has finished a step."""
        self.last_heartbeat = time.monotonic()

    def run(self) -> None:
        """The thread: every second, has another rank failed, and is the last heartbeat recent?"""
        while not self.closed.wait(1):
            status = self.peer_exit_status()
            if status is not None:
                time.sleep(REPLY_TIMEOUT)  # the main thread may notice by itself
                end(status)
            if time.monotonic() - self.last_heartbeat > 60 * self.minutes:
                self.report_hang()

    def query(self, function):
        """`function()`, which uses the store. Raises STORE_LOST where the store would block."""
        return self.query_thread.submit(function).result(REPLY_TIMEOUT)

    def read(self, key: str) -> str | None:
        """What is published under `key`, None if nothing is."""
        return self.query(lambda: self.store.get(key).decode() if self.store.check([key]) else None)

    def peer_exit_status(self) -> int | None:
        """The exit status that a failing rank has published; None if no rank has failed."""
        with contextlib.suppress(*STORE_LOST):  # the collectives will fail as well
            if status := self.read("status"):
                self.known_peer_status = int(status)
        return self.known_peer_status

    def report_hang(self) -> None:
        """Name the ranks that are not waiting for others, and end this one."""
        self.reports_hang = True
        try:
            self.query(lambda: self.store.set(f"at {self.world.global_rank}", current_line()))
            time.sleep(REPLY_TIMEOUT)
            lines = [self.read(f"at {rank}") for rank in range(self.world.global_size)]
            names = [self.read(f"name {rank}") for rank in range(self.world.global_size)]
        except STORE_LOST:  # rank 0 serves the store
            reporting_rank = self.world.global_rank
            problems = [f"{self.name_of_rank_0} does not reply"]
        else:
            reporting_rank = min(rank for rank, line in enumerate(lines) if line)
            problems = hang_problems(names, lines)
        if self.world.global_rank == reporting_rank:
            problem = "; ".join(problems)
            with contextlib.suppress(*STORE_LOST):  # the file system may be what hangs
                problem = f"{problem}. {self.query(self.last_good)}"
            config.print_error(f"no step for {self.minutes:g} minutes: {problem}")
        self.wait_for_readers()
        end(RESUME_ME)

    def __exit__(self, kind, error, trace) -> None:
        """If this rank fails alone, publish its exit status: collectives with it would hang."""
        self.closed.set()
        all_ranks_exit = isinstance(error, SystemExit) or getattr(error, "on_all_ranks", False)
        if error is None or all_ranks_exit:
            return
        if self.reports_hang:
            time.sleep(10 * REPLY_TIMEOUT)  # the thread will end this rank
        if microbatch.out_of_memory(error):
            problem = f"is out of memory, so the next start uses microbatches of {self.halved()}"
        elif processes.is_lost(error):
            problem = f"lost another rank: {config.one_line(error)}"
        else:
            self.publish_exit_status(2 if isinstance(error, UserError | OSError) else 1)
            return  # processes.run prints the error
        status = self.peer_exit_status()
        if status is None:  # this rank is the first to fail
            status = RESUME_ME
            config.print_error(f"{self.name} {problem}. {self.last_good()}")
            self.publish_exit_status(status, wait=not processes.is_lost(error))
        raise SystemExit(status) from error

    def halved(self) -> int:
        """Record half of the microbatch, and return it."""
        try:
            return self.halve(self.step + 1)
        except (UserError, OSError):  # it is 1 already, or the record cannot be written
            self.publish_exit_status(2)
            raise

    def publish_exit_status(self, status: int, wait: bool = True) -> None:
        """Tell the other ranks to exit with `status`."""
        with contextlib.suppress(*STORE_LOST):
            self.query(lambda: self.store.set("status", str(status)))
        if wait:
            self.wait_for_readers()

    def wait_for_readers(self) -> None:
        """Keep rank 0 alive until the others have read from its store."""
        if self.world.global_rank == 0 and self.world.global_size > 1:
            time.sleep(REPLY_TIMEOUT)


def hang_problems(names: list[str], lines: list[str | None]) -> list[str]:
    """What to report of ranks with these names, whose main threads are at these lines."""
    problems = []
    for name, line in zip(names, lines, strict=True):
        if not line:
            problems.append(f"{name} does not reply")
        elif line != WAITS:
            problems.append(f"{name} hangs at {line}")
    return problems or ["all ranks wait for each other, so a device or the network hangs"]


def open_store(world) -> dist.Store:
    """A key-value store for all ranks, whose server is in rank 0."""
    if world.global_size == 1:
        return dist.HashStore()
    host = os.environ.get("MASTER_ADDR", "localhost")
    options = {"timeout": timedelta(seconds=REPLY_TIMEOUT), "wait_for_workers": False}
    server = None
    if world.global_rank == 0:
        server = dist.TCPStore(host, 0, is_master=True, **options)  # at any free port
    port = processes.rank_zero_decides(lambda: server.port)
    return server or dist.TCPStore(host, port, is_master=False, **options)


def current_line() -> str:
    """The line of this project that the main thread is at; WAITS if it waits there for other ranks
    or for its device."""
    frame = sys._current_frames()[threading.main_thread().ident]
    while frame:
        path = Path(frame.f_code.co_filename)
        if ROOT in (path.parent, path.parent.parent):  # in the root or a folder; .venv is deeper
            return f"{path.relative_to(ROOT)}, line {frame.f_lineno}, in {frame.f_code.co_name}"
        if {"distributed", "cuda"} & set(path.parts):  # folders of torch
            return WAITS
        frame = frame.f_back
    return "the end of the program"


def end(status: int) -> None:
    """End this process from any thread."""
    if status == 2:
        program.end_torchrun()
    os._exit(config.flushed(status))


def demonstrate(argv) -> None:
    """The last rank sleeps; the watchdog names it and ends all ranks."""
    config.arguments(argv)
    world = processes.start("cpu")
    with Watchdog(world, 0.05, lambda: "This was a demonstration", halve=None):
        if world.global_rank == world.global_size - 1:
            time.sleep(600)
        dist.barrier()


if __name__ == "__main__":
    processes.run(demonstrate)
