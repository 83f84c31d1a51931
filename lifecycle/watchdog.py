"""When one rank hangs, or has to leave alone: a thread beside the training loop that can still speak.

Ranks whose collectives hang cannot talk through collectives. So each rank has a thread, and rank 0 a small key-value
server (PyTorch's TCPStore), by which these threads talk:

    no step for --timeout_minutes    each thread writes down where its main thread is; the rank that does not answer, or
                                     is not waiting for the others, is named, and all ranks end
    one rank fails, out of memory    it leaves its exit status there first, and the others end with the same one,
                                     instead of waiting for it

Run `torchrun --nproc_per_node 2 -m lifecycle.watchdog` to see a rank that sleeps found out.
Read next: lifecycle/plot.py.
"""

import contextlib
import os
import sys
import threading
import time
from concurrent import futures
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

import config
import processes
from config import UserError
from lifecycle import microbatch
from program import RESUME_ME, whoami

ROOT = Path(__file__).parent.parent
PATIENCE = 5  # seconds in which a living thread answers
WAITS = "waits"
LOST = (
    RuntimeError,
    futures.TimeoutError,
)  # rank 0 has gone, or stands still, and the server with it


class Watch:
    """A context around the training loop, on every rank; `step()` says that a step was taken.

    last_good(): a sentence that names the newest checkpoint. halve(): records half of the microbatch, which it returns.
    """

    def __init__(self, world, minutes: float, last_good, halve):
        self.world, self.minutes, self.last_good, self.halve = world, minutes, last_good, halve
        self.closed, self.store, self.asking = (
            threading.Event(),
            open_store(world),
            futures.ThreadPoolExecutor(1),
        )
        self.name = whoami(world.global_rank)
        self.store.set(f"name {world.global_rank}", self.name)
        dist.barrier()
        self.name_of_server = self.store.get("name 0").decode()

    def __enter__(self):
        self.calling, self.said = False, None
        self.step()
        threading.Thread(target=self.look, daemon=True).start()
        return self

    def step(self) -> None:
        self.last = time.monotonic()

    def look(self) -> None:
        """The thread: every second, did another rank have to leave, and does the loop go on?"""
        while not self.closed.wait(1):
            if (status := self.farewell()) is not None:
                time.sleep(PATIENCE)  # the main thread may find out by itself
                end(status)
            if time.monotonic() - self.last > 60 * self.minutes:
                self.call_the_roll()

    def ask(self, question):
        """`question()`, which asks the server. Raises LOST: if rank 0 stands still, the server would never answer."""
        return self.asking.submit(question).result(PATIENCE)

    def read(self, key: str) -> str | None:
        return self.ask(lambda: self.store.get(key).decode() if self.store.check([key]) else None)

    def farewell(self) -> int | None:
        """The exit status that a rank left for all, if one had to leave."""
        with contextlib.suppress(*LOST):  # the collectives will fail as well
            status = self.read("status")
            self.said = int(status) if status else self.said
        return self.said

    def call_the_roll(self) -> None:
        """Name the ranks that are not waiting for others, and end this one."""
        self.calling, ranks = True, range(self.world.global_size)
        try:
            self.ask(lambda: self.store.set(f"at {self.world.global_rank}", whereabouts()))
            time.sleep(PATIENCE)
            at = {rank: self.read(f"at {rank}") for rank in ranks}
            names = [self.read(f"name {rank}") for rank in ranks]
            found = [f"{names[rank]} does not answer" for rank in ranks if not at[rank]]
            found += [
                f"{names[rank]} hangs at {at[rank]}"
                for rank in ranks
                if at[rank] not in (None, WAITS)
            ]
            speaks = self.world.global_rank == min(rank for rank in ranks if at[rank])
        except LOST:
            found, speaks = (
                [f"{self.name_of_server} does not answer"],
                True,
            )  # and knew all of the others
        if speaks:
            why = (
                "; ".join(found)
                or "all ranks wait for each other, so a device or the network hangs"
            )
            with contextlib.suppress(*LOST):  # where the run folder is what hangs
                why = f"{why}. {self.ask(self.last_good)}"
            config.say_error(f"no step for {self.minutes:g} minutes: {why}")
        self.wait_for_readers()
        end(RESUME_ME)

    def __exit__(self, kind, error, trace) -> None:
        """If something ended the loop on this rank alone, the others are told: collectives with it would hang."""
        self.closed.set()
        if error is None or isinstance(error, SystemExit) or getattr(error, "everywhere", False):
            return
        if self.calling:  # ranks that were named leave already
            time.sleep(10 * PATIENCE)  # the thread will end this one
        if microbatch.out_of_memory(error):
            line = f"is out of memory, so the next start takes microbatches of {self.halved()}"
        elif processes.is_lost(error):
            line = f"lost another rank: {config.one_line(error)}"
        else:
            self.tell(2 if isinstance(error, UserError | OSError) else 1)
            return  # the program's end says what it was
        status = self.farewell()
        if status is None:  # the first to speak
            status = RESUME_ME
            config.say_error(f"{self.name} {line}. {self.last_good()}")
            self.tell(status, wait=not processes.is_lost(error))
        raise SystemExit(status) from error

    def halved(self) -> int:
        try:
            return self.halve()
        except (UserError, OSError):  # nothing left to halve, or no room to write it down
            self.tell(2)
            raise

    def tell(self, status: int, wait: bool = True) -> None:
        """Leave the exit status for the other ranks."""
        with contextlib.suppress(*LOST):
            self.ask(lambda: self.store.set("status", str(status)))
        if wait:
            self.wait_for_readers()

    def wait_for_readers(self) -> None:
        """Before rank 0 ends, and the server with it."""
        if self.world.global_rank == 0 and self.world.global_size > 1:
            time.sleep(PATIENCE)


def open_store(world) -> dist.Store:
    """A key-value store for all ranks, whose server is in rank 0."""
    if world.global_size == 1:
        return dist.HashStore()
    host, patience = os.environ.get("MASTER_ADDR", "localhost"), timedelta(seconds=PATIENCE)
    options = {"timeout": patience, "wait_for_workers": False}
    server = dist.TCPStore(host, 0, is_master=True, **options) if world.global_rank == 0 else None
    port = processes.rank_zero_decides(lambda: server.port)
    return server or dist.TCPStore(host, port, is_master=False, **options)


def whereabouts() -> str:
    """The line of ours that the main thread is in, or WAITS if it waits there for other ranks or for its device."""
    frame = sys._current_frames()[threading.main_thread().ident]
    while frame:
        path = Path(frame.f_code.co_filename)
        if ROOT in (path.parent, path.parent.parent):  # in the root or in a room; .venv is deeper
            return f"{path.relative_to(ROOT)}, line {frame.f_lineno}, in {frame.f_code.co_name}"
        if {"distributed", "cuda"} & set(path.parts):  # of torch
            return WAITS
        frame = frame.f_back
    return "the end of the program"


def end(status: int) -> None:
    """Leave at once, from any thread."""
    if status == 2:
        processes.end_torchrun()
    os._exit(config.flushed(status))


def demonstrate(argv) -> None:
    config.arguments(argv)
    world = processes.start("cpu")
    with Watch(world, 0.05, lambda: "This was a demonstration", halve=None):
        if world.global_rank == world.global_size - 1:
            time.sleep(600)
        dist.barrier()


if __name__ == "__main__":
    processes.run(demonstrate)
