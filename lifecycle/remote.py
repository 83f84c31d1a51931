"""The mirror of a run in an object store: --remote=s3://bucket/runs/my1b, gs://, az://, file:///...

    checkpoints/step-600.1a2b3c4d/    each complete checkpoint: storage/remote_checkpoints.py
    metrics.jsonl config.json ...     the record of the run, every minute
    lease/00000003.json               who owns the run: its third owner

A machine without the run folder, on another cluster, continues from there: the newest sound
checkpoint of disk and store wins.

Training never waits for the store. Each rank copies its own files in a thread, and rank 0 publishes
the checkpoint once the store has all of them. After each step the ranks check whether all
have finished copying. Then the newest checkpoint is next, and any saved in between are skipped.
If the store is down the threads try again, and the run says so once. Only at its end the run waits,
for a time that it announces.

The lease needs one kind of request that every store has: to create an object unless it exists. The
owner rewrites its own generation every few seconds. Whoever wants to take over waits for three such
heartbeats by its own clock, then creates the next generation, which the old owner notices.

Run `python -m lifecycle.remote s3://bucket/runs/my1b` to see what is there.
"""

import contextlib
import json
import os
import platform
import secrets
import shutil
import threading
import time
from pathlib import Path

import torch.distributed as dist

import program
from checkpoint import latest, number, numbered
from config import MPTConfig, TrainConfig
from lifecycle import lease as leases
from lifecycle import resume, runlog
from processes import rank_zero_decides
from program import UserError, require
from storage import checkpoint_files, files, object_store, remote_checkpoints
from storage.object_store import StoreError

MINUTE = 60  # seconds between two copies of the record
PAUSE = 20  # seconds before a copy is tried again that failed
POLL = 2  # seconds between two looks for the files of other ranks
OVERDUE = 600  # seconds after which files of other ranks that are missing are named
WAIT = 600  # seconds that a run waits at its end
WAIT_STOPPED = 120  # and when it is asked to stop, since it may be killed soon
KEPT = 5  # generations of the lease: someone may still hold an old list of them


def open_mirror(model_cfg: MPTConfig, cfg: TrainConfig) -> "Mirror":
    """Own the remote, and bring what is newer there into the run folder. A collective.

    UserError if another run owns it, its checkpoints are another model's, or the store fails.
    """
    store = object_store.open_store(cfg.remote)
    mirror = Mirror(cfg, store, dist.get_rank(), dist.get_world_size())
    rank_zero_decides(mirror.take_lease)
    try:
        mirror.bring(model_cfg)
    except BaseException:
        mirror.release_lease()
        raise
    mirror.start()
    return mirror


# --------------------------------------------------------------------------------------------------
# The lease


class RemoteLease:
    """The right to write below an address, as `lease.Lease` is to write into a folder.

    token: what tells this owner from all others; kept in the run folder, so that a run that was
        killed there need not wait for its own lease.
    lost: a message, once another run has taken over; else empty
    """

    def __init__(self, store, token: str):
        self.store, self.token = store, token
        self.me = leases.this_process() | {"token": token, "released": False}
        self.generation = 0
        self.lost = ""

    def take(self) -> None:
        """Create the next generation, or raise UserError naming the owner."""
        newest, owner = before = self.newest()
        if owner and owner["token"] != self.token and not owner["released"]:
            seconds = 3 * leases.BEAT
            taken = f"{self.store.url} is {leases.owner(owner)}"
            print(f"{taken}: waiting {seconds:g} s to see whether it is alive", flush=True)
            end = time.monotonic() + seconds  # no clocks of two machines are compared
            while time.monotonic() < end:
                time.sleep(seconds / 10)
                require(not was_renewed(before, self.newest()), self.refusal())
        self.generation = newest + 1
        won = self.store.create(self.key(self.generation), self.content())
        require(won, self.refusal())
        ignores = self.store.creates(self.key(self.generation), self.content())
        require(
            not ignores,
            f"{self.store.url} ignores conditional writes, so two runs could own it at once: use "
            "another store",
        )
        for old in self.generations():
            if old < newest - KEPT:
                self.store.delete(self.key(old))

    def refusal(self) -> str:
        """The message of a run that finds the address taken."""
        _, owner = self.newest()
        taken = f"{self.store.url} is {leases.owner(owner)}"
        return f"{taken}: wait for that run, or set another --remote"

    def beat(self) -> None:
        """Write the heartbeat, unless another run has taken over: then `lost` says so."""
        newest, owner = self.newest()
        if newest > self.generation:
            taken = f"{self.store.url} is now {leases.owner(owner)}"
            self.lost = f"{taken}: this run stops, so that only one goes on"
            return
        self.me["beat"] += 1
        self.store.put(self.key(self.generation), self.content())

    def newest(self) -> tuple[int, dict | None]:
        """The newest generation and its owner; 0 and None if there is none."""
        numbers = self.generations()
        if not numbers:
            return 0, None
        try:
            return numbers[-1], read_owner(self.store.get(self.key(numbers[-1])))
        except FileNotFoundError:
            return numbers[-1], None

    def generations(self) -> list[int]:
        """The numbers of the generations that are there, ascending."""
        names = [name.partition(".")[0] for name in self.store.sizes("lease")]
        return sorted(int(name) for name in names if name.isdecimal())

    def key(self, generation: int) -> str:
        return f"lease/{generation:08d}.json"

    def content(self) -> bytes:
        return json.dumps(self.me).encode()


def was_renewed(before: tuple[int, dict | None], now: tuple[int, dict | None]) -> bool:
    """Whether a lease was renewed or taken between two looks. A damaged one says nothing."""
    (generation, owner), (newest, owner_now) = before, now
    if newest != generation or not (owner and owner_now):
        return newest > generation
    is_same = owner_now["token"] == owner["token"]
    return is_same and owner_now["beat"] > owner["beat"]


def read_owner(content: bytes) -> dict | None:
    """Who took a generation of the lease; None if the object is damaged."""
    fields = leases.FIELDS | {"token": str, "released": bool}
    try:
        return files.parse_json(content, "lease", dict, fields)
    except UserError:
        return None


def identity(cfg: TrainConfig) -> dict:
    """What a run folder is for its remote: remote.json.

    token: of this folder on this machine, for the lease. run: of the run, on all machines.
    """
    me = {"remote": cfg.remote, "host": platform.node(), "folder": os.path.realpath(cfg.run_dir)}
    fresh = {"token": secrets.token_hex(16), "run": secrets.token_hex(16)}
    with contextlib.suppress(OSError, UserError):
        path = Path(cfg.run_dir) / "remote.json"
        before = files.read_json(path, dict, {"remote": str, "token": str, "run": str})
        if before | me == before:
            return before
        if before["remote"] == cfg.remote:  # a copy of the folder, on another machine
            return me | fresh | {"run": before["run"]}
    return me | fresh


# --------------------------------------------------------------------------------------------------
# The mirror


class Mirror:
    """Copies a run folder to a store, on one rank. `lifecycle.lease` ends it.

    checkpointer, first_step: set once the run has them. See `watch`.
    """

    def __init__(self, cfg: TrainConfig, store, global_rank: int, global_size: int):
        self.cfg, self.store = cfg, store
        self.global_rank, self.global_size = global_rank, global_size
        self.folder = Path(cfg.run_dir)
        self.checkpointer, self.first_step = None, None
        self.lease = None  # on rank 0
        self.copied = None  # the checkpoint that is copied, or was the last one
        self.thread = None  # that copies it
        self.beats = None  # the thread of heartbeats and of the record
        self.closing = threading.Event()
        self.is_down = False  # and the run has said so
        self.record_lock = threading.Lock()
        self.withdraw_lock = threading.Lock()
        self.record_copied = {}  # file -> its size and time when it was copied

    def take_lease(self) -> None:
        """Own the remote, on rank 0."""
        mine = identity(self.cfg)
        self.lease = RemoteLease(self.store, mine["token"])
        self.lease.take()
        self.store.create("run.json", json.dumps({"run": mine["run"]}).encode())
        there = files.parse_json(self.store.get("run.json"), "run.json", dict, {"run": str})["run"]
        require(
            there == mine["run"] or not latest(self.folder),
            f"{self.store.url} holds another run than {self.folder}: set another --remote",
        )
        content = json.dumps(mine | {"run": there}).encode()
        files.write_atomically(self.folder / "remote.json", content)

    def release_lease(self) -> None:
        """Let another machine start without waiting."""
        if self.lease and not self.lease.lost:
            self.lease.me["released"] = True
            with contextlib.suppress(StoreError):
                self.lease.beat()

    def start(self) -> None:
        """Begin to send heartbeats and the record, on rank 0."""
        if self.lease:
            self.beats = [threading.Thread(target=f, daemon=True) for f in (self.beat, self.record)]
            for thread in self.beats:
                thread.start()

    def beat(self) -> None:
        """In a thread: the heartbeats."""
        while not self.closing.wait(leases.BEAT) and not self.lease.lost:
            with self.said_once():
                self.lease.beat()

    def record(self) -> None:
        """In a thread: copy the record every minute; less often if that takes long."""
        pause = 0
        while not self.closing.wait(pause) and not self.lease.lost:
            begin = time.monotonic()
            with self.said_once():
                self.copy_record()
            pause = max(MINUTE, 20 * (time.monotonic() - begin))

    def check(self) -> None:
        """UserError if another run owns the remote now."""
        require(not self.lease or not self.lease.lost, self.lease.lost if self.lease else "")

    @contextlib.contextmanager
    def said_once(self):
        """Errors in this block do no harm. Rank 0 says once that the store fails, or is back."""
        try:
            yield
        except (UserError, OSError) as error:
            if not self.is_down and self.global_rank == 0:
                program.print_error(f"{error}. The run goes on, and copies later", "remote")
            self.is_down = True
            return
        if self.is_down and self.global_rank == 0:
            print(f"{self.store.url} answers again", flush=True)
        self.is_down = False

    # --- the record

    def copy_record(self) -> None:
        """Copy the files of the record that have changed."""
        with self.record_lock:
            for name, path in self.record_files().items():
                status = path.stat()
                state = status.st_size, status.st_mtime_ns
                if self.record_copied.get(name) != state:
                    self.store.upload(path, name)
                    self.record_copied[name] = state

    def record_files(self) -> dict[str, Path]:
        """The files of the record: name -> path. The microbatch is one machine's own."""
        paths = [self.folder / name for name in runlog.OWN_FILES if name != "microbatch.json"]
        for folder, names in {"hugging_face": "*", "trackers": "*.json"}.items():
            paths += (self.folder / folder).glob(names)
        return {str(path.relative_to(self.folder)): path for path in paths if path.is_file()}

    def bring_record(self) -> None:
        """Download the record in place of the one that is here."""
        for name, size in self.store.sizes().items():
            top = name.split("/")[0]
            if top in runlog.OWN_FILES and ".." not in name:
                target = self.folder / name
                target.parent.mkdir(exist_ok=True)
                Path(f"{target}.part").unlink(missing_ok=True)  # of an earlier version
                self.store.download(name, target, size)

    # --- checkpoints, from the store

    def bring(self, model_cfg: MPTConfig) -> None:
        """Bring the newest sound checkpoint into the run folder, if it is in the store alone.

        A collective. UserError, on all ranks, if it is another model's, or the store or the disk
        fails.
        """
        there = rank_zero_decides(lambda: self.candidates(model_cfg))
        here = rank_zero_decides(lambda: numbered(self.folder / "checkpoints"))
        for found in there:
            while here and number(here[-1]) >= found.step:
                kind, _ = resume.why_unfit(here[-1], self.cfg)
                if not kind:
                    return  # what is here is as new
                here.pop()
            if self.download(found):
                return

    def candidates(self, model_cfg: MPTConfig) -> list:
        """The checkpoints in the store from which this run could go on, newest first. On rank 0.

        UserError if it is another model's, before anything is downloaded.
        """
        found = []
        for each in remote_checkpoints.published(self.store):
            with contextlib.suppress(FileNotFoundError, object_store.DamagedObject):
                meta = remote_checkpoints.meta_of(self.store, each)
                if not resume.has_trained_on(meta, self.cfg.skip_steps):
                    if not found:  # the newest; the data is not known yet
                        where = f"{self.store.url}/checkpoints/{each.name}"
                        fingerprint = meta["data_fingerprint"]
                        resume.check_same(where, meta, model_cfg, self.cfg, fingerprint)
                    found.append(each)
        begins = self.cfg.resume == "never" and not resume.was_restarted()
        require(
            not (begins and found),
            f"{self.store.url} holds a run: set --resume=auto to resume it, or another --remote",
        )
        return found

    def download(self, found) -> bool:
        """Download a checkpoint; the ranks share its files, since all see the folder.

        Returns whether it is sound. A collective.
        """
        checkpoints = self.folder / "checkpoints"
        part = checkpoints / f"{found.name}.part"  # a download that was interrupted goes on
        if self.global_rank == 0:
            size = f"{found.size / 1e9:.3g} GB"
            print(f"downloading step-{found.step} ({size}) from {self.store.url}", flush=True)
        by_size = sorted(found.checksums, key=lambda name: found.checksums[name])
        problem = None
        try:
            share = by_size[self.global_rank :: self.global_size]
            remote_checkpoints.download(self.store, found, share, part)
        except (object_store.DamagedObject, FileNotFoundError) as error:
            problem = str(error)
        except (UserError, OSError) as error:
            problem = UserError(str(error), on_all_ranks=True)
        problems = [None] * self.global_size
        dist.all_gather_object(problems, problem)
        for each in filter(None, problems):
            if isinstance(each, UserError):
                raise each
        damage = next(filter(None, problems), None)
        rank_zero_decides(lambda: self.take_over(found, part, damage))
        return not damage

    def take_over(self, found, part: Path, damage: str | None) -> None:
        """Make a downloaded checkpoint one of the run folder, with the record. On rank 0."""
        if damage:
            print(f"step-{found.step} in {self.store.url} is passed over: {damage}", flush=True)
            return
        path = part.with_name(f"step-{found.step}")
        if path.exists():
            checkpoint_files.put_aside(path, "damaged")
        self.bring_record()
        remote_checkpoints.place(found, part, path)
        for leftover in part.parent.glob("step-*.part"):  # downloads that never ended
            shutil.rmtree(leftover, ignore_errors=True)

    # --- checkpoints, to the store

    def watch(self, checkpointer, first_step: int) -> None:
        """From now on copy what this checkpointer saves. first_step: where the run began."""
        self.checkpointer, self.first_step = checkpointer, first_step
        if self.lease:
            threading.Thread(target=self.keep_withdrawing, daemon=True).start()

    def keep_withdrawing(self) -> None:
        """In a thread: `withdraw_newer`, across the failures of the store."""
        while self.first_step is not None and not self.closing.is_set():
            with self.said_once():
                self.withdraw_newer()
                return
            self.closing.wait(PAUSE)

    def withdraw_newer(self) -> None:
        """Unpublish the checkpoints after the step at which this run began, once."""
        with self.withdraw_lock:
            if self.first_step is not None:
                self.require_lease()
                remote_checkpoints.withdraw_newer(self.store, self.first_step)
                self.first_step = None

    def require_lease(self) -> None:
        """Ask the store who owns it. UserError if that is another run."""
        self.lease.beat()
        self.check()

    def settled(self) -> bool:
        """Whether this rank copies nothing now."""
        return self.thread is None or not self.thread.is_alive()

    def newest(self) -> Path | None:
        """The newest complete checkpoint, the same on all ranks."""
        if self.checkpointer and self.checkpointer.published is not None:
            return self.checkpointer.folder / f"step-{self.checkpointer.published}"
        return latest(self.folder)

    def copy_newest(self) -> None:
        """Begin to copy the newest checkpoint, if that is not done. All ranks call it together."""
        path = self.newest()
        if path is None or path == self.copied:
            return
        self.copied = path
        if self.checkpointer:
            self.checkpointer.in_use = path  # until it is copied, it is not deleted
        self.thread = threading.Thread(target=self.keep_copying, args=(path,), daemon=True)
        self.thread.start()

    def keep_copying(self, path: Path) -> None:
        """In a thread: copy a checkpoint, across the failures of the store."""
        while not self.closing.is_set():
            with self.said_once():
                try:
                    self.copy(path)
                    return
                except (UserError, OSError) as error:
                    if getattr(error, "passes", False):
                        raise
                    # It will not get better: the next checkpoint has another chance.
                    program.print_error(f"{path} is not copied: {error}", "remote")
                    return
            self.closing.wait(PAUSE)

    def copy(self, path: Path) -> None:
        """Copy the files of this rank; on rank 0, publish the checkpoint after all ranks."""
        checksums = checkpoint_files.read_checksums(path)
        require(checksums, f"{path} is damaged")
        own = [name for name in checksums if rank_of(name, self.global_size) == self.global_rank]
        if self.global_rank == 0:
            self.withdraw_newer()
        remote_checkpoints.upload(self.store, path, own)
        if self.global_rank > 0:
            return
        self.wait_for_others(path)
        self.copy_record()  # so that it reaches as far as the checkpoint
        self.require_lease()
        remote_checkpoints.publish(self.store, path)
        newest = Path(remote_checkpoints.folder_of(path)).name
        keep = self.cfg.keep_last, self.cfg.keep_every
        remote_checkpoints.prune(self.store, newest, *keep)

    def wait_for_others(self, path: Path) -> None:
        """Until the store has all files of a checkpoint.

        StoreError if that takes long, UserError if there is a newer checkpoint by then.
        """
        end = time.monotonic() + OVERDUE
        while missing := remote_checkpoints.missing(self.store, path):
            absent = f"{missing[0]} of {path} is not in {self.store.url} yet"
            is_overdue = time.monotonic() > end
            # Its rank has perhaps given up. The next checkpoint must not wait for that.
            require(not is_overdue or self.newest() == path, f"{absent}, and a newer one is here")
            if is_overdue or self.closing.wait(POLL):
                raise StoreError(f"{absent}: its rank does not reach the store", passes=True)

    # --- the end

    def finish(self, seconds: float) -> None:
        """Copy the newest checkpoint, and wait for that as long as this."""
        end = time.monotonic() + seconds
        for _ in range(2):  # the one that is being copied, then the newest
            if self.thread:
                self.thread.join(0.5)
                if self.thread.is_alive() and self.global_rank == 0:
                    what = f"copying {self.copied.name} to {self.store.url}"
                    print(f"{what}: waiting at most {seconds:g} s", flush=True)
                self.thread.join(max(0, end - time.monotonic()))
            if self.settled():
                self.copy_newest()
        if self.global_rank > 0:  # a rank that ends may take rank 0 along, which publishes
            with contextlib.suppress(UserError, OSError):
                while time.monotonic() < end and not self.is_published():
                    time.sleep(POLL)
        elif not self.settled():
            missing = f"{self.copied.name} is not in {self.store.url} yet"
            program.print_error(f"{missing}: the same command copies the rest", "remote")

    def is_published(self) -> bool:
        """Whether the store has the checkpoint that was copied last as a whole."""
        return not self.copied or remote_checkpoints.is_published(self.store, self.copied)

    def __exit__(self, kind=None, *error) -> None:
        """Wait for the last checkpoint after a normal end and a stop signal; free the remote."""
        ends_well = kind is None or issubclass(kind, SystemExit)
        if ends_well and not (self.lease and self.lease.lost):
            self.finish(WAIT if kind is None else WAIT_STOPPED)
        self.closing.set()
        if not self.beats:
            return
        for thread in self.beats:
            thread.join(WAIT_STOPPED)
        if ends_well:
            with self.said_once():
                self.copy_record()
            self.release_lease()


def rank_of(name: str, global_size: int) -> int:
    """Which rank copies a file of a checkpoint: the one that wrote it, __3_0.distcp, if it exists.

    The others, and the files of ranks that there are no more, are shared in the same way.
    """
    digits = name.removeprefix("__").partition("_")[0]
    return int(digits) % global_size if digits.isdecimal() else 0


def main(argv) -> None:
    """List the complete checkpoints at an address, and who owns it."""
    (url,) = program.arguments(argv, "s3://BUCKET/RUN")
    store = object_store.open_store(url)
    for found in remote_checkpoints.published(store):
        print(f"step-{found.step:<10} {found.size:>16,} bytes  checkpoints/{found.name}")
    _, owner = RemoteLease(store, "").newest()
    owned = owner and not owner["released"]
    print(f"{url} is {leases.owner(owner)}" if owned else f"no run owns {url}")


if __name__ == "__main__":
    program.run(main)
