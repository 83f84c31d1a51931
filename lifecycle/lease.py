"""The lease: one run per folder. A second run that uses the same run folder is refused.

    runs/demo/lease.json    host, process and job of the owner, and its heartbeat

Rank 0 takes the lease before it writes anything. A crashed run's lease is taken over. On the same
machine that happens immediately, since the kernel's lock ended with the process. From another
machine it happens after three heartbeat intervals in which the heartbeat did not change: the
machines' file system may not share locks.

Run `python -m lifecycle.lease runs/demo` to see who owns a run folder.
"""

import contextlib
import fcntl
import json
import os
import platform
import threading
import time
from pathlib import Path

import program
from lifecycle import runlog
from program import UserError, require
from storage import files

BEAT = 10  # seconds between two heartbeats
FIELDS = {"host": str, "pid": int, "job": (str, type(None)), "beat": int}  # of an owner


def this_process() -> dict:
    """What this process writes into a lease, before its first heartbeat."""
    job = os.environ.get("SLURM_JOB_ID")
    return {"host": platform.node(), "pid": os.getpid(), "job": job, "beat": 0}


class Lease:
    """The right to write into a run folder. Rank 0 holds it while it runs.

    me       what this process writes into the file
    lost     a message, once another run has taken over; else empty
    mirror   the copy of the folder in a store, with a lease of its own (--remote); else None

    A context manager: it releases the lease, if `take` was called.
    """

    def __init__(self, run_dir: str):
        self.run_dir = run_dir
        self.path = Path(run_dir) / "lease.json"
        self.me = this_process()
        self.lost = ""
        self.mirror = None
        self.released = threading.Event()
        self.heartbeat = threading.Thread(target=self.keep_beating, daemon=True)

    def take(self) -> None:
        """Own the folder, or raise UserError naming the owner."""
        runlog.require_own_folder(self.run_dir)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            self.require_free()
        except UserError:
            os.close(self.file)
            raise
        self.write(self.me)
        self.heartbeat.start()
        runlog.remove_leftovers(self.run_dir)

    def require_free(self) -> None:
        """Lock the file if possible. UserError if another run owns the folder."""
        lock_error = None  # BlockingIOError: another run has it; else this file system has no locks
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock_error = error
        before = read_lease(self.path)
        on_this_host = before is not None and before["host"] == self.me["host"]
        # A run that took the lock a moment ago has not written its name yet.
        unnamed = isinstance(lock_error, BlockingIOError) and not before
        require(not unnamed and not (lock_error and on_this_host), self.refusal())
        if before and not on_this_host:  # whether or not this file system shares locks
            seconds = 3 * BEAT
            taken = f"{self.run_dir} is {owner(before)}"
            print(f"{taken}: waiting {seconds} s to see whether it is alive", flush=True)
            time.sleep(seconds)
            require(read_lease(self.path) == before, self.refusal())

    def refusal(self) -> str:
        """The message of a run that finds the folder taken."""
        taken = f"{self.run_dir} is {owner(read_lease(self.path))}"
        return f"{taken}: wait for that run, or set another --run_dir"

    def keep_beating(self) -> None:
        """In a thread: write the heartbeat, and notice if another run has taken over."""
        while not self.released.wait(BEAT):
            try:
                current = read_lease(self.path)
            except OSError:  # the file system fails for a moment
                continue
            me = (self.me["host"], self.me["pid"])
            if current and (current["host"], current["pid"]) != me:
                self.lost = f"{self.run_dir} is now {owner(current)}: this run stops writing to it"
                return
            self.me["beat"] += 1
            self.write(self.me)

    def check(self) -> None:
        """Raise UserError if another run took over, for example while this one was suspended."""
        require(not self.lost, self.lost)
        if self.mirror:
            self.mirror.check()

    def write(self, content: dict | None) -> None:
        """Write the file in place, since the lock is on the file and not on its name.

        One padded write, so that no reader sees half of it.
        """
        with contextlib.suppress(OSError):  # a full disk does not stop the training
            size = os.pwrite(self.file, json.dumps(content).ljust(400).encode(), 0)
            os.ftruncate(self.file, size)  # a damaged file may have been longer
            os.fsync(self.file)  # so that other machines see it

    def __enter__(self):
        return self

    def __exit__(self, *error) -> None:
        """Release the lease, so that the next start, on another machine, need not wait."""
        if self.mirror:
            self.mirror.__exit__(*error)
            self.mirror = None
        if not self.heartbeat.is_alive() and not self.lost:
            return  # not rank 0
        self.released.set()
        self.heartbeat.join()
        if not self.lost:
            self.write(None)
        os.close(self.file)


def read_lease(path: Path) -> dict | None:
    """The owner of a folder: host, pid, job, beat. None if it has none or the file is damaged."""
    try:
        return files.read_json(path, dict, FIELDS)
    except (FileNotFoundError, UserError):  # never taken; released, or damaged by a power failure
        return None


def owner(lease: dict | None) -> str:
    """The owner in words."""
    if not lease:
        return "owned by another run"
    job = f", job {lease['job']}" if lease["job"] else ""
    return f"owned by process {lease['pid']} on {lease['host']}{job}"


def main(argv) -> None:
    """Print who owns a run folder."""
    (run_dir,) = program.arguments(argv, "RUN_DIR")
    require(Path(run_dir).is_dir(), f"no run folder {run_dir!r}")
    lease = read_lease(Path(run_dir) / "lease.json")
    print(f"{run_dir} is {owner(lease)}" if lease else f"no run owns {run_dir}")


if __name__ == "__main__":
    program.run(main)
