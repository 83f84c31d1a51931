"""Staying alive: one run per folder, leaving when asked, and what is done when a rank or its numbers go bad.

    Lease      runs/demo/lease.json: a second run that is pointed at a folder refuses; a killed one is no hindrance
    Signals    SIGTERM, SIGUSR1 (SLURM's warning) and Ctrl-C: save at the end of the step, on all ranks, and leave
    meet       at the end of each step the ranks agree: does one want to leave, is it time to save, who was slowest
    Pace       how long a rank was busy with what it does alone
    BadSteps   a step whose loss or gradient is not finite changed nothing; too many in a row end the run
    Skips      --skip_steps: batches that are left out

How a run ends, for whoever started it:    0 done    2 a mistake to mend    130 Ctrl-C    75 start me again as I was
(after SIGTERM or SIGUSR1, out of memory, a rank that was lost or hangs). torchrun says 1 for all of them but 0.

Run `python -m lifecycle.stopping runs/demo` to see who owns a run folder. Read next: lifecycle/watchdog.py.
"""

import contextlib
import fcntl
import json
import math
import os
import platform
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

import config
import processes
from config import UserError, require
from lifecycle import runlog
from program import RESUME_ME
from storage import files

BEAT = 10  # seconds between two heartbeats of a lease


# ---------------------------------------------------------------------------------------------------------------
# One run per folder


class Lease:
    """The right to write into a run folder: rank 0 holds it as long as it lives.

    The kernel's lock on the file ends with its owner, so on one machine a killed run is out of the way at once. Between
    machines, whose file system may not share locks, an owner whose heart has stopped is taken for dead.
    """

    def __init__(self, run_dir: str):
        self.run_dir, self.path, self.lost = run_dir, Path(run_dir) / "lease.json", ""
        self.released, self.thread = threading.Event(), threading.Thread(target=self.beat, daemon=True)
        self.me = {"host": platform.node(), "pid": os.getpid(), "job": os.environ.get("SLURM_JOB_ID"), "beat": 0}

    def take(self) -> None:
        """Own the folder, or raise UserError naming who does."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        runlog.require_no_links(self.run_dir)
        self.file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        refused = None
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:  # another run has the lock (BlockingIOError); or this file system has no locks
            refused = error
        before = read_lease(self.path)
        here = before and before["host"] == self.me["host"]
        unnamed = not before and isinstance(refused, BlockingIOError)  # it has not written its name yet
        if unnamed or (refused and here):
            os.close(self.file)
            raise UserError(self.refusal())
        if before and not here:
            print(f"{self.run_dir} was {owner(before)}: waiting {3 * BEAT} s for a sign of life", flush=True)
            time.sleep(3 * BEAT)
            if read_lease(self.path) != before:
                os.close(self.file)
                raise UserError(self.refusal())
        self.write(self.me)
        self.thread.start()

    def refusal(self) -> str:
        return f"{self.run_dir} is {owner(read_lease(self.path))}: wait for that run, or set another --run_dir"

    def beat(self) -> None:
        """In a thread: show that the owner lives, and see whether another has taken over."""
        while not self.released.wait(BEAT):
            try:
                there = read_lease(self.path)
            except OSError:  # the file system has a bad moment
                continue
            if there and (there["host"], there["pid"]) != (self.me["host"], self.me["pid"]):
                self.lost = f"{self.run_dir} is {owner(there)} by now: this run leaves it alone"
                return
            self.me["beat"] += 1
            self.write(self.me)

    def check(self) -> None:
        """Raise UserError if another run took over while this one stood still."""
        require(not self.lost, self.lost)

    def write(self, content: dict | None) -> None:
        """In place, since the lock is on the file and not on its name; at once, so that nobody reads half of it."""
        with contextlib.suppress(OSError):  # a full disk does not stop the training
            size = os.pwrite(self.file, json.dumps(content).ljust(400).encode(), 0)
            os.ftruncate(self.file, size)  # a damaged file may have been longer
            os.fsync(self.file)  # other machines are to see it now

    def __enter__(self):
        return self

    def __exit__(self, *error) -> None:
        """Released, so that the next start, on another machine, need not wait."""
        if not self.thread.is_alive() and not self.lost:
            return  # not rank 0
        self.released.set()
        self.thread.join()
        if not self.lost:
            self.write(None)
        os.close(self.file)


def read_lease(path: Path) -> dict | None:
    """Who owns a folder: host, pid, job, beat. None if nobody does, or if the file is damaged."""
    fields = {"host": str, "pid": int, "job": (str, type(None)), "beat": int}
    try:
        return files.read_json(path, dict, fields)
    except (FileNotFoundError, UserError):  # never taken, released, cut short by a power failure
        return None


def owner(lease: dict | None) -> str:
    if not lease:
        return "owned by another run"
    job = f", job {lease['job']}" if lease["job"] else ""
    return f"owned by process {lease['pid']} on {lease['host']}{job}"


# ---------------------------------------------------------------------------------------------------------------
# At the end of each step


class Signals:
    """Remembers that this process was asked to leave. It leaves at once before the loop, and at a second Ctrl-C.

    Python's own handlers run in the main thread, which may be in a collective for long. So a thread takes the signals,
    from a socket into which Python writes their numbers.
    """

    def __init__(self):
        self.asked, self.at_once = 0, True  # the signal's number; is there nothing to save yet?
        self.sockets = socket.socketpair()
        self.sockets[1].setblocking(False)
        signal.set_wakeup_fd(self.sockets[1].fileno())
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        threading.Thread(target=self.listen, daemon=True).start()

    def listen(self) -> None:
        while number := int.from_bytes(self.sockets[0].recv(1), "little"):
            if self.at_once or number == self.asked == signal.SIGINT:
                os._exit(130 if number == signal.SIGINT else RESUME_ME)
            self.asked = number
            if number == signal.SIGINT and config.rank() == 0:
                with contextlib.suppress(OSError):  # Ctrl-C has ended `| tee`, too
                    print("\nsaving at the end of this step; Ctrl-C again leaves at once", file=sys.stderr, flush=True)


class Pace:
    """How long this rank was busy with what it does alone: reading its rows, and norm, logits and loss of its passes.

    In everything else ranks wait for one another's weights or gradients, so that all seem to be equally slow.
    """

    def __init__(self, model, device: torch.device):
        self.on_gpu, self.marks, self.reading = device.type == "cuda", [], 0.0
        model.transformer.norm_f.register_forward_pre_hook(self.mark)
        model.register_forward_hook(self.mark, prepend=True)

    def mark(self, module, *_) -> None:
        if module.training:
            timed = torch.cuda.Event(enable_timing=True) if self.on_gpu else None
            self.marks.append(torch.cuda.current_stream().record_event(timed) if timed else time.perf_counter())

    def timed(self, items):
        """The same items; how long each one was waited for is noted."""
        items = iter(items)
        begin = time.perf_counter()
        for item in items:
            self.reading = time.perf_counter() - begin
            yield item
            begin = time.perf_counter()

    def take(self):
        """A function that tells the seconds of the step just queued; to be called when the step is done."""
        marks, reading, self.marks = self.marks, self.reading, []

        def seconds() -> float:
            pairs = zip(marks[::2], marks[1::2], strict=True)
            return reading + sum(a.elapsed_time(b) / 1000 if self.on_gpu else b - a for a, b in pairs)

        return seconds


@dataclass
class Met:
    """What the ranks agreed on at the end of a step."""

    leave: int = 0  # the signal that one of them got
    save: bool = False  # it is time to save
    settled: bool = False  # no rank writes at a checkpoint any more
    slowest_rank: int = 0
    slowest_by: float = 1.0  # its seconds / those of the fastest


def meet(world, leave: int, save: bool, settled: bool, seconds: float) -> Met:
    """What any rank wants happens on all. A collective of the hosts, which the devices do not wait for."""
    rank_bits = 20
    own = max(1, int(seconds * 1e6))  # microseconds
    most = torch.tensor([leave, save, not settled, own << rank_bits | world.rank, -own])
    if world.size > 1:
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
    leave, save, writing, slowest, fastest = most.tolist()
    by = round((slowest >> rank_bits) / -fastest, 2)
    return Met(leave, bool(save), not writing, slowest % 2**rank_bits, by)


def leave(asked: int) -> None:
    """End this rank, all being saved, as the signal `asked`. Raises SystemExit with the status of the table above."""
    if asked == signal.SIGUSR1:  # which torchrun does not know of
        processes.end_torchrun()
    raise SystemExit({signal.SIGINT: 130, signal.SIGPIPE: 141}.get(asked, RESUME_ME))


# ---------------------------------------------------------------------------------------------------------------
# Bad numbers, bad batches


class BadSteps:
    """Counts steps without a finite loss and gradient. `train_step` has left the weights alone, on all ranks."""

    def __init__(self, cfg, saver, skips, begun: int):
        """begun: the step that the run goes on from; 0 if it is new."""
        self.saver, self.skips, self.first, self.count = saver, skips, 0, 0
        self.limit = cfg.max_bad_steps if begun else min(cfg.max_bad_steps, cfg.max_steps)
        self.any_good = begun > 0

    def see(self, step: int, loss: float, grad_norm: float, batch_hash: str) -> bool:
        """Is step `step` (from 1) bad?"""
        if math.isfinite(loss) and math.isfinite(grad_norm):
            self.count, self.any_good = 0, True
            return False
        self.first, self.count = self.first if self.count else step, self.count + 1
        self.last = step, f"loss {loss}, gradient norm {grad_norm}, batch {batch_hash}"
        return True

    def check(self) -> None:
        """Raise UserError, on all ranks alike, if it was one too many in a row."""
        if self.count < self.limit:
            return
        self.saver.finish()
        step, figures = self.last
        skip = ",".join(filter(None, [self.skips.text, f"{self.first}:{step + 1}"]))
        advice = f"If other batches fail, too, lower --lr. To go on without these: --skip_steps={skip}"
        if not self.any_good:  # nothing has changed since the start, the learning rate was never used
            advice = "No step was good, so it is not the batches: look at the weights that the run began with "
            advice += "(--init_from), and at settings such as softmax_scale; or try --precision=fp32"
        raise UserError(
            f"steps {self.first} to {step} have no finite loss and gradient, and changed nothing (the last: {figures})"
            f". {self.saver.last_good()}. {advice}",
            everywhere=True,
        )


class Skips:
    """The steps that are left out with their batches, as a run's flags and its checkpoint say."""

    def __init__(self, cfg, saved: str):
        parts = dict.fromkeys(part.strip() for text in (saved, cfg.skip_steps) for part in text.split(",") if part)
        self.text, self.ranges = ",".join(parts), []  # without overlaps, in order
        for r in sorted(config.step_ranges(self.text), key=lambda r: r.start):
            after = self.ranges[-1].stop if self.ranges else 0
            self.ranges.append(range(max(r.start, after), max(r.stop, after)))
        end = next((r.start for r in self.ranges if cfg.max_steps - 1 in r), cfg.max_steps)
        require(end == cfg.max_steps, f"skip_steps leaves out the last step: set --max_steps={end}")

    def steps(self, first: int, end: int):
        """The steps of first..end-1 that are taken, in order."""
        return (step for step in range(first, end) if not any(step in r for r in self.ranges))

    def before(self, step: int) -> int:
        """How many of the steps 0..step-1 are left out."""
        return sum(len(range(r.start, min(r.stop, step))) for r in self.ranges)


def main(argv) -> None:
    config.arguments(argv, "RUN_DIR")
    require(Path(argv[0]).is_dir(), f"no run folder {argv[0]!r}")
    lease = read_lease(Path(argv[0]) / "lease.json")
    print(f"{argv[0]} is {owner(lease)}" if lease else f"no run owns {argv[0]}")


if __name__ == "__main__":
    config.run(main)
