"""Stopping: when a signal asks for it, and when steps go bad; the ranks agree on it after each step.

    Signals    SIGTERM, SIGUSR1 (SLURM's warning) and Ctrl-C: save at the end of the step, on all ranks, and leave
    meet       at the end of each step the ranks agree: does one want to leave, is it time to save, who was slowest
    Pace       how long a rank was busy with what it does alone
    BadSteps   a step whose loss or gradient is not finite changed nothing; too many in a row end the run
    Skips      --skip_steps: batches that are left out

How a run ends, for whoever started it:    0 done    2 a mistake to mend    130 Ctrl-C    75 start me again as I was
(after SIGTERM or SIGUSR1, out of memory, a rank that was lost or hangs). torchrun says 1 for all of them but 0.

Run `python -m lifecycle.stopping` to see the exit status after each signal. Read next: lifecycle/watchdog.py.
"""

import contextlib
import math
import os
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

import config
import processes
from config import UserError, require
from program import RESUME_ME

# The exit status after a signal; SIGPIPE: the reader of the output has left.
STATUS = {
    signal.SIGTERM: RESUME_ME,
    signal.SIGUSR1: RESUME_ME,
    signal.SIGINT: 130,
    signal.SIGPIPE: 141,
}


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
                    print(
                        "\nsaving at the end of this step; Ctrl-C again leaves at once",
                        file=sys.stderr,
                        flush=True,
                    )


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
            self.marks.append(
                torch.cuda.current_stream().record_event(timed) if timed else time.perf_counter()
            )

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
            return reading + sum(
                a.elapsed_time(b) / 1000 if self.on_gpu else b - a for a, b in pairs
            )

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
    most = torch.tensor([leave, save, not settled, own << rank_bits | world.global_rank, -own])
    if world.global_size > 1:
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
    leave, save, writing, slowest, fastest = most.tolist()
    by = round((slowest >> rank_bits) / -fastest, 2)
    return Met(leave, bool(save), not writing, slowest % 2**rank_bits, by)


def leave(asked: int) -> None:
    """End this rank, all being saved, as the signal `asked`. Raises SystemExit with the status of the table above."""
    if asked == signal.SIGUSR1:  # which torchrun does not know of
        processes.end_torchrun()
    raise SystemExit(STATUS[asked])


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
        advice = (
            f"If other batches fail, too, lower --lr. To go on without these: --skip_steps={skip}"
        )
        if (
            not self.any_good
        ):  # nothing has changed since the start, the learning rate was never used
            advice = "No step was good, so it is not the batches: look at the weights that the run began with "
            advice += (
                "(--init_from), and at settings such as softmax_scale; or try --precision=fp32"
            )
        raise UserError(
            f"steps {self.first} to {step} have no finite loss and gradient, and changed nothing (the last: {figures})"
            f". {self.saver.last_good()}. {advice}",
            everywhere=True,
        )


class Skips:
    """The steps that are left out with their batches, as a run's flags and its checkpoint say."""

    def __init__(self, cfg, saved: str):
        parts = dict.fromkeys(
            part.strip() for text in (saved, cfg.skip_steps) for part in text.split(",") if part
        )
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


def demonstrate(argv) -> None:
    config.arguments(argv)
    for number, status in STATUS.items():
        print(f"{number.name}: saves at the end of the step, then leaves with status {status}")


if __name__ == "__main__":
    config.run(demonstrate)
