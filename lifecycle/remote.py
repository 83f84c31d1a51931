"""The mirror of a run in an object store: --remote=s3://bucket/runs/my1b, gs://, az://, file:///...

    checkpoints/step-600.1a2b3c4d/    each complete checkpoint: storage/remote_checkpoints.py
    metrics.jsonl config.json ...     the record of the run, every minute
    lease/00000003.json               who owns the run: lifecycle/lease.py

A machine without the run folder, on another cluster, continues from there: the newest sound
checkpoint of disk and store wins. All ranks must see the run folder, since rank 0 alone copies.

Training never waits for the store. Rank 0 copies the newest checkpoint in a thread; those that are
saved meanwhile are skipped. If the store is down it tries again, and the run says so once. Only at
its end the run waits, for a time that it announces. If its last checkpoint is not in the store
then, the run does not end with status 0, and the same command copies it.

Run `python -m lifecycle.remote s3://bucket/runs/my1b` to see what is there.
"""

import contextlib
import functools
import json
import os
import platform
import secrets
import shutil
import tempfile
import threading
import time
from pathlib import Path

import processes
import program
from checkpoint import latest, number, numbered
from config import MPTConfig, TrainConfig
from lifecycle import resume, runlog
from lifecycle.lease import StoreLease, in_words
from processes import rank_zero_decides
from program import StartAgain, UserError, require
from storage import checkpoint_files, files, object_store, remote_checkpoints

MINUTE = 60  # seconds between two copies of the record
PAUSE = 20  # seconds before a copy is tried again that failed
WAIT = 600  # seconds that a run waits at its end
WAIT_STOPPED = 120  # and when it is asked to stop, since it may be killed soon


def open_mirror(model_cfg: MPTConfig, cfg: TrainConfig) -> "Mirror":
    """Own the remote, and bring what is newer there into the run folder. A collective.

    UserError if another run owns it, its checkpoints are another model's, or the store fails.
    """
    mirror = Mirror(cfg)
    try:
        rank_zero_decides(mirror.take_lease)
        mirror.bring(model_cfg)
    except BaseException:
        if mirror.lease:
            mirror.lease.__exit__()
        raise
    return mirror


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


class Mirror:
    """Copies a run folder to a store, from rank 0. `lifecycle.lease` ends it, on all ranks."""

    def __init__(self, cfg: TrainConfig):
        self.cfg, self.store = cfg, object_store.open_store(cfg.remote)
        self.folder = Path(cfg.run_dir)
        self.lease = None  # on rank 0
        self.checkpointer, self.first_step = None, None  # see `watch`
        self.lineage = None  # of the checkpoints that this run saves
        self.newest = None  # the checkpoint that is being copied, or was the last one
        self.wanted = None  # the same, until it is copied
        self.failure = None  # why the newest could not be copied, if trying again does not help
        self.copied = {}  # file of the record -> its size and time when it was copied
        self.due = 0.0  # when the record is copied next
        self.thread = None
        self.last_seconds = 0  # for copies at the end; 0 if ranks end for different reasons
        self.wake, self.closing = threading.Event(), threading.Event()
        self.is_down = False  # and the run has said so

    # --- the lease

    def take_lease(self) -> None:
        """Own the remote, on rank 0."""
        mine = identity(self.cfg)
        self.lease = StoreLease(self.store, mine["token"])
        self.lease.take()
        self.store.create("run.json", json.dumps({"run": mine["run"]}).encode())
        there = files.parse_json(self.store.get("run.json"), "run.json", dict, {"run": str})["run"]
        require(
            there == mine["run"] or not latest(self.folder),
            f"{self.store.url} holds another run than {self.folder}: set another --remote",
        )
        content = json.dumps(mine | {"run": there}).encode()
        files.write_atomically(self.folder / "remote.json", content)

    def check(self) -> None:
        """UserError if another run owns the remote now."""
        if self.lease:
            self.lease.check()

    # --- from the store

    def bring(self, model_cfg: MPTConfig) -> None:
        """Bring the newest sound checkpoint into the run folder, if it is in the store alone.

        A collective. UserError, on all ranks, if it is another model's, or the store or the disk
        fails.
        """
        there = rank_zero_decides(lambda: self.candidates(model_cfg))
        here = rank_zero_decides(lambda: numbered(self.folder / "checkpoints"))
        for name in there:
            _, step = remote_checkpoints.place_of(name)
            while here and number(here[-1]) >= step:
                kind, _ = resume.why_unfit(here[-1], self.cfg)
                if not kind:
                    return  # what is here is as new
                here.pop()
            download = functools.partial(self.download, name, there[name])
            if processes.together(download, on=0, group=processes.new_group(processes.LONG)):
                return

    def candidates(self, model_cfg: MPTConfig) -> dict[str, dict[str, int]]:
        """The checkpoints in the store from which this run could go on, newest first. On rank 0.

        UserError if it is another model's, before anything is downloaded.
        """
        found = {}
        for name, sizes in remote_checkpoints.published(self.store).items():
            try:
                with tempfile.TemporaryDirectory() as folder:
                    remote_checkpoints.download(self.store, name, Path(folder), ["meta.json"])
                    meta = checkpoint_files.read_meta(Path(folder))
            except (FileNotFoundError, object_store.DamagedObject):
                continue
            if resume.has_trained_on(meta, self.cfg.skip_steps):
                continue
            if not found:  # the newest; the data is not known yet
                where = f"{self.store.url}/checkpoints/{name}"
                resume.check_same(where, meta, model_cfg, self.cfg, meta["data_fingerprint"])
            found[name] = sizes
        begins = self.cfg.resume == "never" and not resume.was_restarted()
        require(
            not (begins and found),
            f"{self.store.url} holds a run: set --resume=auto to resume it, or another --remote",
        )
        return found

    def download(self, name: str, sizes: dict[str, int]) -> bool:
        """Download a checkpoint, with the record. Whether it was sound. On rank 0."""
        checkpoints = self.folder / "checkpoints"
        part = checkpoints / f"{name}.part"  # a download that was interrupted goes on
        _, step = remote_checkpoints.place_of(name)
        size = f"{sum(sizes.values()) / 1e9:.3g} GB"
        print(f"downloading step-{step} ({size}) from {self.store.url}", flush=True)
        try:
            remote_checkpoints.download(self.store, name, part)
        except (FileNotFoundError, object_store.DamagedObject) as error:
            print(f"step-{step} in {self.store.url} is passed over: {error}", flush=True)
            return False
        path = checkpoints / f"step-{step}"
        if path.exists():
            checkpoint_files.put_aside(path, "damaged")
        self.bring_record()
        part.rename(path)
        for leftover in checkpoints.glob("*step-*.part"):  # downloads that never ended
            shutil.rmtree(leftover, ignore_errors=True)
        return True

    def bring_record(self) -> None:
        """Download the record in place of the one that is here."""
        for name, size in self.store.sizes().items():
            top = name.split("/")[0]
            if top in runlog.OWN_FILES and ".." not in name:
                target = self.folder / name
                target.parent.mkdir(exist_ok=True)
                Path(f"{target}.part").unlink(missing_ok=True)  # of an earlier version
                self.store.download(name, target, size)

    # --- to the store

    def watch(self, checkpointer, first_step: int) -> None:
        """From now on copy what this checkpointer saves. first_step: where the run began."""
        self.checkpointer, self.first_step = checkpointer, first_step
        self.start()

    def start(self) -> None:
        """Begin to copy, on rank 0."""
        if self.lease:
            self.thread = threading.Thread(target=self.keep_copying, daemon=True)
            self.thread.start()

    def settled(self) -> bool:
        """Whether this rank copies no checkpoint now."""
        return self.wanted is None

    def newest_here(self) -> Path | None:
        """The newest checkpoint of the run folder."""
        if self.checkpointer and self.checkpointer.published is not None:
            return self.checkpointer.folder / f"step-{self.checkpointer.published}"
        return latest(self.folder)

    def copy_newest(self) -> None:
        """Want the newest checkpoint in the store, unless another one is being copied."""
        if not self.lease or not self.settled():
            return
        newest = self.newest_here()
        if newest == self.newest:
            return
        self.failure = None
        self.newest = self.wanted = newest
        if self.checkpointer:
            self.checkpointer.in_use = newest  # until it is copied, it is not deleted
        self.wake.set()

    def keep_copying(self) -> None:
        """In a thread: copy what the store lacks, when it is due or wanted."""
        while not self.closing.is_set() and not self.lease.lost:
            self.copy()
            has_failed = self.wanted or self.is_down
            self.wake.wait(PAUSE if has_failed else self.due - time.monotonic())
            self.wake.clear()

    def copy(self) -> None:
        """Copy what the store lacks. If it fails, the run says so once, and goes on."""
        path = self.wanted
        try:
            self.copy_record()
            if path:
                self.copy_checkpoint(path)
        except (UserError, OSError) as error:
            if self.lease.lost:
                return  # the main thread says so, and ends the run
            if path and not getattr(error, "passes", False):
                # It will not get better: the next checkpoint has another chance.
                program.print_error(f"{path} is not copied: {error}", "remote")
                self.failure, self.wanted = error, None
            elif not self.is_down:
                program.print_error(f"{error}. The run goes on, and copies later", "remote")
                self.is_down = True
            return
        if path:
            self.wanted = None
        if self.is_down:
            print(f"{self.store.url} answers again", flush=True)
            self.is_down = False

    def copy_record(self) -> None:
        """Copy the files of the record that have changed. The microbatch is one machine's own.

        It is due again in a minute; later if that takes long. UserError if another run owns the
        store now, which is asked first.
        """
        begin = time.monotonic()
        self.lease.beat()
        self.lease.check()
        if self.lineage is None:
            self.lineage = remote_checkpoints.begin_lineage(self.store, self.first_step)
        paths = [self.folder / name for name in runlog.OWN_FILES if name != "microbatch.json"]
        for folder, names in {"hugging_face": "*", "trackers": "*.json"}.items():
            paths += (self.folder / folder).glob(names)
        for path in filter(Path.is_file, paths):
            status = path.stat()
            state = status.st_size, status.st_mtime_ns
            if self.copied.get(path) != state:
                self.store.upload(path, str(path.relative_to(self.folder)))
                self.copied[path] = state
        now = time.monotonic()
        self.due = now + max(MINUTE, 20 * (now - begin))

    def copy_checkpoint(self, path: Path) -> None:
        """Copy a checkpoint, and the record so that it reaches as far; delete old ones there."""
        name = remote_checkpoints.name_for(self.store, path, self.lineage)
        for _ in remote_checkpoints.upload(self.store, path, name):
            if time.monotonic() > self.due:
                self.copy_record()
        self.copy_record()
        remote_checkpoints.publish(self.store, path, name)
        try:
            remote_checkpoints.prune(self.store, name, self.cfg.keep_last, self.cfg.keep_every)
        except (UserError, OSError) as error:
            program.print_error(f"old checkpoints stay in the store: {error}", "remote")

    # --- the end

    def finish(self, seconds: float) -> UserError | None:
        """Copy the newest checkpoint, and wait for that as long as this. On rank 0.

        Returns why it is not in the store then, as an error.
        """
        last = self.newest_here()
        if not last:
            return None
        self.copy_newest()
        if self.thread is None:  # the run had all its steps
            self.first_step = number(last)
            self.start()
        begin, said = time.monotonic(), False
        while not self.has_tried(last) and not self.lease.lost:
            if time.monotonic() > begin + seconds:
                break
            time.sleep(0.02)
            if not said and time.monotonic() > begin + 0.5:
                what = f"copying {last.name} to {self.store.url}"
                print(f"{what}: waiting at most {seconds:g} s", flush=True)
                said = True
            self.copy_newest()
        self.closing.set()
        self.wake.set()
        missing = f"{last.name} is not in {self.store.url}"
        same_command = "the same command" + " with --resume=auto" * (self.cfg.resume != "auto")
        if not self.has_tried(last):
            if self.lease.lost:
                return UserError(f"{missing}: {self.lease.lost}", on_all_ranks=True)
            return StartAgain(f"{missing} yet: {same_command} copies the rest", on_all_ranks=True)
        self.thread.join(WAIT_STOPPED)
        self.copy()  # the end of the record
        if self.failure:
            words = f"{missing}: {self.failure}. After that, {same_command} copies it"
            return UserError(words, on_all_ranks=True)
        return None

    def has_tried(self, path: Path) -> bool:
        """Whether this checkpoint is in the store, or never will be: then `failure` says why."""
        return self.newest == path and self.settled()

    def end_together(self, is_stopped: bool) -> None:
        """All ranks have agreed to end now: the last checkpoint may be waited for."""
        self.last_seconds = WAIT_STOPPED if is_stopped else WAIT

    def __exit__(self, kind=None, *error) -> None:
        """Wait for the last checkpoint if all ranks end together; free the remote.

        That wait is a collective: a rank that ends may take rank 0 along, which copies. UserError
        if the checkpoint is not in the store then; a run that was stopped keeps its exit status.
        """
        try:
            if self.last_seconds and (kind is None or issubclass(kind, SystemExit)):
                missing = rank_zero_decides(lambda: self.finish(self.last_seconds))
                if missing and kind is None:
                    raise missing
                if missing and self.lease:
                    program.print_error(missing, "remote")
        finally:
            self.closing.set()
            self.wake.set()
            if self.lease:
                self.lease.__exit__()


def main(argv) -> None:
    """List the complete checkpoints at an address, and who owns it."""
    (url,) = program.arguments(argv, "s3://BUCKET/RUN")
    store = object_store.open_store(url)
    for name, sizes in remote_checkpoints.published(store).items():
        _, step = remote_checkpoints.place_of(name)
        print(f"step-{step:<10} {sum(sizes.values()):>16,} bytes  checkpoints/{name}")
    _, owner = StoreLease(store, "").read()
    owned = owner and not owner["released"]
    print(f"{url} is {in_words(owner)}" if owned else f"no run owns {url}")


if __name__ == "__main__":
    program.run(main)
