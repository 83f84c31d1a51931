"""The lease: one run per folder, and one per address in a store. A second run is refused.

    runs/demo/lease.json            host, process and job of the owner, and its heartbeat
    s3://.../lease/00000003.json    that of the third owner (--remote)

Rank 0 takes it before it writes anything. A crashed run's lease is taken over: in the same folder
on the same machine immediately, from elsewhere after three heartbeat intervals in which the
heartbeat did not change. No clocks of two machines are compared. An owner that was only suspended
notices at its next heartbeat.

The kernel locks lease.json while its owner lives, but some file systems do not share locks between
machines. Of a store one kind of request is needed: to create an object unless it exists. An owner
rewrites its own object, and whoever takes over creates the next one.

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
KEPT = 5  # objects of earlier owners in a store: someone may still hold an old list of them


class Lease:
    """The right to write into a run folder. Rank 0 holds it while it runs.

    me       what this process writes into the file
    lost     a message, once another run has taken over; else empty
    mirror   the copy of the folder in a store, with a lease of its own (--remote); else None

    A context manager: it releases the lease, if `take` was called.
    """

    setting = "--run_dir"

    def __init__(self, place: str):
        self.place = place
        self.path = Path(place) / "lease.json"
        job = os.environ.get("SLURM_JOB_ID")
        self.me = {"host": platform.node(), "pid": os.getpid(), "job": job, "beat": 0}
        self.version = None  # what `read` returns while this process is the owner
        self.lost = ""
        self.mirror = None
        self.released = threading.Event()
        self.heartbeat = threading.Thread(target=self.keep_beating, daemon=True)

    def take(self) -> None:
        """Own the place, or raise UserError naming the owner."""
        self.open()
        try:
            self.version = self.claim(self.require_free())
            require(self.version, self.refusal())
        except UserError:
            self.close()
            raise
        self.heartbeat.start()

    def require_free(self):
        """The version, if no run owns the place; else UserError."""
        version, owner = self.read()
        lives = self.owner_lives(owner)
        require(not lives, self.refusal())
        if lives is not None:
            return version
        seconds = 3 * BEAT
        taken = f"{self.place} is {in_words(owner)}"
        print(f"{taken}: waiting {seconds:g} s to see whether it is alive", flush=True)
        for _ in range(10):
            time.sleep(seconds / 10)
            version_now, owner_now = self.read()  # a damaged one has no owner, and says nothing
            has_beaten = owner_now and owner_now["beat"] != owner["beat"]
            require(version_now == version and not has_beaten, self.refusal())
        return version

    def refusal(self) -> str:
        """The message of a run that finds the place taken."""
        taken = f"{self.place} is {in_words(self.read()[1])}"
        return f"{taken}: wait for that run, or set another {self.setting}"

    def keep_beating(self) -> None:
        """In a thread: the heartbeats. A file system or a store may fail for a while."""
        while not self.released.wait(BEAT) and not self.lost:
            with contextlib.suppress(OSError, UserError):
                self.beat()

    def beat(self) -> None:
        """Write the heartbeat, unless another run has taken over: then `lost` says so."""
        version, owner = self.read()
        if self.is_later(version):
            self.lost = f"{self.place} is now {in_words(owner)}: this run stops writing to it"
            return
        self.me["beat"] += 1
        self.write(self.me)

    def is_later(self, version) -> bool:
        """Whether this version is of another run, which took over."""
        return bool(version) and version != self.version

    def check(self) -> None:
        """Raise UserError if another run took over, for example while this one was suspended."""
        require(not self.lost, self.lost)
        if self.mirror:
            self.mirror.check()

    def __enter__(self):
        return self

    def __exit__(self, *error) -> None:
        """Release the lease, so that the next start, on another machine, need not wait."""
        try:
            if self.mirror:
                self.mirror.__exit__(*error)
        finally:
            self.mirror = None
            self.release()

    def release(self) -> None:
        """End the heartbeat, and say that this run has left. On rank 0, once."""
        if not self.version or self.released.is_set():
            return
        self.released.set()
        self.heartbeat.join(BEAT)
        if not self.lost:
            with contextlib.suppress(UserError):
                self.write(None)
        if not self.heartbeat.is_alive():  # else it may still use the file
            self.close()

    # --- lease.json

    def open(self) -> None:
        """Open and lock the file. UserError if the folder is used for something else."""
        runlog.require_own_folder(self.place)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        self.lock_error = None  # BlockingIOError: another run has it; else there are no locks here
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.lock_error = error

    def close(self) -> None:
        """End the lock."""
        os.close(self.file)

    def read(self) -> tuple:
        """(version, owner), which changes with each owner; None and None if there is none."""
        owner = read_lease(self.path)
        return (owner["host"], owner["pid"]) if owner else None, owner

    def owner_lives(self, owner: dict | None) -> bool | None:
        """Whether an owner lives; None if only its heartbeat can tell."""
        on_this_host = not owner or owner["host"] == self.me["host"]
        if on_this_host and isinstance(self.lock_error, BlockingIOError):
            return True  # one that took the lock a moment ago has not written its name yet
        return False if not owner or (on_this_host and not self.lock_error) else None

    def claim(self, version):
        """Become the owner after this version. Returns the new one."""
        self.write(self.me)
        runlog.remove_leftovers(self.place)
        return self.me["host"], self.me["pid"]

    def write(self, owner: dict | None) -> None:
        """Write the file in place, since the lock is on the file and not on its name.

        One padded write, so that no reader sees half of it.
        """
        with contextlib.suppress(OSError):  # a full disk does not stop the training
            size = os.pwrite(self.file, json.dumps(owner).ljust(400).encode(), 0)
            os.ftruncate(self.file, size)  # a damaged file may have been longer
            os.fsync(self.file)  # so that other machines see it


class StoreLease(Lease):
    """The right to write below an address in a store. A version is the number of its owner.

    token: tells this run folder from all others. It is kept there, so that a run that was killed
        need not wait for its own lease.
    """

    setting = "--remote"

    def __init__(self, store, token: str):
        super().__init__(store.url)
        self.store = store
        self.me |= {"token": token, "released": False}

    def open(self) -> None:
        """Nothing is open."""

    def close(self) -> None:
        """Nothing is open."""

    def read(self) -> tuple[int, dict | None]:
        """(version, owner); None for an owner whose object is damaged, 0 if there was none yet."""
        names = [name.partition(".")[0] for name in self.store.sizes("lease")]
        newest = max((int(name) for name in names if name.isdecimal()), default=0)
        content = b""
        with contextlib.suppress(FileNotFoundError):
            content = self.store.get(key_of(newest)) if newest else b""
        try:
            fields = FIELDS | {"token": str, "released": bool}
            return newest, files.parse_json(content, self.place, dict, fields)
        except UserError:
            return newest, None

    def is_later(self, version: int) -> bool:
        """Whether this number is another run's. Smaller ones come of a list that is out of date."""
        return version > self.version

    def owner_lives(self, owner: dict | None) -> bool | None:
        """False if the owner has left, or was an earlier run in this folder; else None."""
        left = not owner or owner["released"] or owner["token"] == self.me["token"]
        return False if left else None

    def claim(self, version: int) -> int | None:
        """Become the next owner. Returns its number; None if another run was faster.

        UserError if the store would say yes to both.
        """
        number, content = version + 1, json.dumps(self.me).encode()
        if not self.store.create(key_of(number), content):
            return None
        require(
            not self.store.creates(key_of(number), content),
            f"{self.place} ignores conditional writes, so two runs could own it at once: use "
            "another store",
        )
        self.store.delete(key_of(max(0, number - KEPT)))
        return number

    def write(self, owner: dict | None) -> None:
        """Write the object of this owner anew. None: it has left."""
        if not owner:
            self.me["released"] = True  # a copy that still runs must not undo it
        self.store.put(key_of(self.version), json.dumps(self.me).encode())


def key_of(number: int) -> str:
    """Where in a store the lease of the owner of this number is."""
    return f"lease/{number:08d}.json"


def read_lease(path: Path) -> dict | None:
    """The owner of a folder: host, pid, job, beat. None if it has none or the file is damaged."""
    try:
        return files.read_json(path, dict, FIELDS)
    except (FileNotFoundError, UserError):  # never taken; released, or damaged by a power failure
        return None


def in_words(owner: dict | None) -> str:
    """The owner of a place, for a message."""
    if not owner:
        return "owned by another run"
    job = f", job {owner['job']}" if owner["job"] else ""
    return f"owned by process {owner['pid']} on {owner['host']}{job}"


def main(argv) -> None:
    """Print who owns a run folder."""
    (run_dir,) = program.arguments(argv, "RUN_DIR")
    require(Path(run_dir).is_dir(), f"no run folder {run_dir!r}")
    owner = read_lease(Path(run_dir) / "lease.json")
    print(f"{run_dir} is {in_words(owner)}" if owner else f"no run owns {run_dir}")


if __name__ == "__main__":
    program.run(main)
