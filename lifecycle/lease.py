"""One run per folder: a second run that is pointed at a run folder refuses.

    runs/demo/lease.json    host, process and job of the owner, and its heartbeat

Rank 0 takes the lease before it writes anything. A crashed run's lease is taken over: at once on the
same machine, where the kernel's lock ended with the process; from another machine after three
heartbeats without a sign of life.

Run `python -m lifecycle.lease runs/demo` to see who owns a run folder. Read next: lifecycle/resume.py.
"""

import contextlib
import fcntl
import json
import os
import platform
import threading
import time
from pathlib import Path

import config
from config import UserError, require
from lifecycle import runlog
from storage import files

BEAT = 10  # seconds between two heartbeats of a lease


class Lease:
    """The right to write into a run folder: rank 0 holds it as long as it lives.

    The kernel's lock on the file ends with its owner, so on one machine a killed run is out of the way at once. Between
    machines, whose file system may not share locks, an owner whose heart has stopped is taken for dead.
    """

    def __init__(self, run_dir: str):
        self.run_dir, self.path, self.lost = run_dir, Path(run_dir) / "lease.json", ""
        self.released, self.thread = (
            threading.Event(),
            threading.Thread(target=self.beat, daemon=True),
        )
        self.me = {
            "host": platform.node(),
            "pid": os.getpid(),
            "job": os.environ.get("SLURM_JOB_ID"),
            "beat": 0,
        }

    def take(self) -> None:
        """Own the folder, or raise UserError naming who does."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        runlog.require_no_links(self.run_dir)
        self.file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        refused = None
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (
            OSError
        ) as error:  # another run has the lock (BlockingIOError); or this file system has no locks
            refused = error
        before = read_lease(self.path)
        here = before and before["host"] == self.me["host"]
        unnamed = not before and isinstance(
            refused, BlockingIOError
        )  # it has not written its name yet
        if unnamed or (refused and here):
            os.close(self.file)
            raise UserError(self.refusal())
        if before and not here:
            print(
                f"{self.run_dir} was {owner(before)}: waiting {3 * BEAT} s for a sign of life",
                flush=True,
            )
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


def main(argv) -> None:
    config.arguments(argv, "RUN_DIR")
    require(Path(argv[0]).is_dir(), f"no run folder {argv[0]!r}")
    lease = read_lease(Path(argv[0]) / "lease.json")
    print(f"{argv[0]} is {owner(lease)}" if lease else f"no run owns {argv[0]}")


if __name__ == "__main__":
    config.run(main)
