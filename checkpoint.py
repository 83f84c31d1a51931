"""Checkpoints: complete or absent, written while training goes on, checked before use, loaded on any number of ranks.

    runs/demo/checkpoints/step-200.tmp/     being written: each rank its shards, in a thread of its own
    runs/demo/checkpoints/step-200/         renamed when the last byte is on disk
        .metadata  __0_0.distcp  __1_0.distcp ...   PyTorch's distributed checkpoint (DCP): weights and optimizer
        meta.json                                   step, settings, data fingerprint: all that a resume needs
        checksums.json                              bytes and crc32 of each of these files, written last

What the files must hold, and how they are read without trusting them, is in storage/checkpoint_files.py.
DCP stores each tensor in pieces with their place in the whole, so another mesh reads what it needs. Nothing is ever
written twice to one path, since a half-overwritten checkpoint looks complete. A save that fails on one rank fails on
all of them, with the same line.

Run `python checkpoint.py`, or under torchrun, to see what saving, checking and loading cost.
Read next: fsdp_train.py.
"""

import contextlib
import json
import os
import platform
import re
import shutil
import tempfile
import time
import warnings
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import config
import parallel
import processes
from config import MPTConfig, TrainConfig, UserError, from_dict, require
from model import MPT
from optim import ADAMW, kind_of
from processes import rank_zero_decides
from storage import checkpoint_files
from storage.checkpoint_files import (
    cause_of,
    checksum,
    read_meta,
    read_metadata,
    reason_of,
    require_weights,
)

# One flat format, whatever the sharding.
OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)


class Checkpointer:
    """Saves a run's checkpoints one after another, at most one in flight. Every rank calls every method alike.

    The newest `keep_last` stay, and those of every `keep_every`-th step (0: none).
    """

    def __init__(self, run_dir: str, keep_last: int, keep_every: int = 0):
        self.folder = Path(run_dir) / "checkpoints"
        self.keep_last, self.keep_every = keep_last, keep_every
        # Of its own: the thread that writes must not meet training's collectives.
        self.group = processes.new_group(processes.TIMEOUT)
        cuda = torch.cuda.is_available()
        # The host's copy keeps its memory from save to save: asking for new memory takes longer than copying.
        options = StagingOptions(
            cuda, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=cuda
        )
        self.stager = DefaultStager(options)
        self.pending = None  # (step, future)
        self.blocked_seconds = 0.0  # how long the last save kept the training thread
        warnings.filterwarnings(
            "ignore", "TypedStorage is deprecated"
        )  # torch 2.9 says so of its own code
        rank_zero_decides(self.sweep)

    def sweep(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(self.folder, os.W_OK | os.X_OK)
        require(
            writable,
            f"no permission to write in {self.folder}: change it, or set another --run_dir",
        )
        for left_over in self.folder.glob("step-*.tmp"):
            if left_over.is_dir() and not left_over.is_symlink():
                shutil.rmtree(left_over, ignore_errors=True)
            else:
                left_over.unlink()

    def save(self, step: int, model: MPT, optimizer, meta: dict) -> None:
        """Copy weights and optimizer to host memory and write them in the background."""
        self.finish()
        begin = time.perf_counter()
        path = self.folder / f"step-{step}.tmp"
        state = state_of(model, optimizer)
        meta = meta | {
            "step": step,
            "optimizer": kind_of(optimizer),
        }  # even if a setting has such a name
        self.attempt(step, lambda: prepare(path, meta))
        options = {
            "storage_writer": Writer(path),
            "process_group": self.group,
            "async_stager": self.stager,
        }
        self.pending = step, dcp.async_save(state, **options)
        self.blocked_seconds = time.perf_counter() - begin

    def settled(self) -> bool:
        """Whether `finish` would return at once on this rank. Cheap; the ranks may differ for a moment."""
        return self.pending is None or self.pending[1].done()

    def finish(self) -> None:
        """Wait for the checkpoint in flight and publish it. UserError on all ranks if it could not be written."""
        if self.pending:
            (step, future), self.pending = self.pending, None
            error = future.exception()  # waits; rank 0's knows of a failure on any rank
            self.attempt(step, lambda: self.publish(step, error))

    def publish(self, step: int, error: BaseException | None) -> None:
        if error:
            raise error
        path = self.folder / f"step-{step}"
        sync(path.with_suffix(".tmp"))
        path.with_suffix(".tmp").rename(path)
        sync(self.folder)  # from here on the new name survives a power failure
        for old in complete(self.folder)[: -self.keep_last]:
            if not self.keep_every or number(old) % self.keep_every:
                # Under another name: half of it must not look complete.
                shutil.rmtree(old.rename(old.with_suffix(".tmp")), ignore_errors=True)

    def attempt(self, step: int, action) -> None:
        """`action()` on rank 0. If it fails, nothing of this step stays, and every rank raises the same UserError."""

        def tried():
            try:
                action()
            except (
                Exception,
                dcp.CheckpointException,
            ) as error:  # the latter is only a BaseException
                reason = reason_of(error)
                if not isinstance(cause_of(error), UserError):
                    reason += f" ({free_bytes(self.folder) / 1e9:.2f} GB are free there)"
                shutil.rmtree(self.folder / f"step-{step}.tmp", ignore_errors=True)
                raise UserError(
                    f"could not save step {step}: {reason}. {self.last_good()}"
                ) from error

        rank_zero_decides(tried)

    def last_good(self) -> str:
        """A sentence that names the newest complete checkpoint."""
        newest = latest(self.folder.parent)
        return f"The last good checkpoint is {newest}" if newest else "There is no checkpoint yet"


class Writer(dcp.FileSystemWriter):
    """DCP's, and checksums: each rank takes those of its files, in the thread that writes them."""

    def __init__(self, path: Path):
        super().__init__(
            path, sync_files=False, per_thread_copy_ahead=0
        )  # synced here; already in host memory

    def write_data(self, plan, planner):
        """DCP's results, which rank 0 gathers, and one more: {file name: [bytes, crc32]}."""
        for item in plan.items:
            if item.index.fqn.startswith("model."):
                require_finite(item.index.fqn.removeprefix("model."), planner.resolve_data(item))
        try:
            results = super().write_data(plan, planner).wait()
        except Exception as error:
            raise cause_of(error) from error
        paths = {self.path / result.storage_data.relative_path for result in results}
        with ThreadPoolExecutor() as pool:
            synced = pool.map(sync, paths)  # while the disk works, so does crc32
            results.append({path.name: checksum(path) for path in paths})
        list(synced)  # raises what sync raised
        done = torch.futures.Future()
        done.set_result(results)
        return done

    def finish(self, metadata, results) -> None:
        """On rank 0, after all ranks: `.metadata`, and the checksums of everything."""
        checksums = {name: value for of_rank in results for name, value in of_rank.pop().items()}
        super().finish(metadata, results)
        sync(self.path / ".metadata")
        checksums |= {name: checksum(self.path / name) for name in (".metadata", "meta.json")}
        write_json(self.path / "checksums.json", checksums)


def require_finite(name: str, weights: torch.Tensor) -> None:
    """UserError if there is a NaN or an infinite number: from such weights no run can go on."""
    finite = not weights.numel() or all(bound.isfinite() for bound in weights.aminmax())
    require(finite, f"{name} holds numbers that are not finite")


def state_of(model: MPT, optimizer) -> dict:
    """Weights and the optimizer's state by name, sharded as they are: what DCP saves and fills."""
    model_state, optim_state = get_state_dict(model, optimizer, options=OPTIONS)
    return {"model": model_state, "optim": optim_state}


def prepare(path: Path, meta: dict) -> None:
    """The folder of a new checkpoint. Its parent is not made: a run folder that vanished is an error."""
    path.mkdir()
    write_json(path / "meta.json", meta)


def write_json(path: Path, values: dict) -> None:
    """`values`, on disk when this returns."""
    path.write_text(json.dumps(values, indent=2))
    sync(path)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def free_bytes(folder: Path) -> int:
    """Of the file system of a folder that may not be there."""
    folder = folder.absolute()
    return shutil.disk_usage(next(p for p in (folder, *folder.parents) if p.exists())).free


def space(run_dir: str, n_params: int, keep_last: int) -> str:
    """One line: the size of a checkpoint (fp32 weights and Adam's two moments), and the room that the disk has."""
    folder, size = Path(run_dir), 12 * n_params
    free = free_bytes(folder)
    more = max(
        1, keep_last + 1 - len(complete(folder / "checkpoints"))
    )  # one is written before one is removed
    line = f"{size / 1e9:.2f} GB a checkpoint, {free / 1e9:.2f} GB free for {run_dir}"
    if more * size > free:
        line += (
            f". WARNING: not enough for {more}: free some, or lower --keep_last, or move --run_dir"
        )
    return line


def names_in(folder: Path) -> list[str]:
    """The names in a folder, none if it is not there. OSError if it cannot be read: that says nothing about it."""
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []


def numbered(folder: Path) -> list[Path]:
    """The folders step-N, oldest first."""
    named = [
        folder / name for name in names_in(folder) if re.fullmatch("step-(0|[1-9][0-9]*)", name)
    ]
    return sorted(named, key=number)


def number(path: Path) -> int:
    """The N of step-N."""
    return int(path.name.removeprefix("step-"))


def complete(folder: Path) -> list[Path]:
    """The complete checkpoints of a folder, oldest first. Whether they are sound is for `verify` to say."""
    return [path for path in numbered(folder) if ".metadata" in names_in(path)]


def latest(run_dir) -> Path | None:
    """The newest complete checkpoint of a run."""
    return next(reversed(complete(Path(run_dir) / "checkpoints")), None)


def find(path: str) -> Path:
    """A checkpoint from the path of one, or of a run folder (its newest)."""
    found = Path(path) if Path(path) in complete(Path(path).parent) else latest(path)
    require(
        found is not None,
        f"no checkpoint in {path!r}: give a run folder or a checkpoint like runs/demo/.../step-200",
    )
    return found


# -------------------------------------------------------------------------------------------------
# Checking and loading


def verify(path: Path) -> str | None:
    """What is damaged in a checkpoint, in a few words, or None.

    If there are several ranks, all call it, share the reading and get the same answer. UserError or OSError if it
    cannot be read: no permission, a node that does not see it, or undamaged files that hold what we do not read.
    """
    wanted = rank_zero_decides(lambda: checkpoint_files.read_checksums(path))
    if lacking := checkpoint_files.incomplete(wanted):
        return lacking
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    share = sorted(wanted)[rank::size]
    try:
        mine = checkpoint_files.first_fault(path, wanted, share)
    except OSError as error:  # of the file system, or of a node that does not see it: no damage
        mine = UserError(
            f"rank {rank} on {platform.node()} cannot read {path}: {error.strerror}", True
        )
    faults = [mine] * size
    if dist.is_initialized():
        dist.all_gather_object(faults, mine)
    for found in faults:
        if isinstance(found, UserError):
            raise found
    damage = next(filter(None, faults), None)
    return damage or rank_zero_decides(lambda: checkpoint_files.contradiction(path, wanted))


def require_sound(path: Path) -> None:
    """UserError if a checkpoint is damaged. Every rank calls it."""
    checkpoint_files.require_undamaged(path, verify(path))


def fill(path: Path, state: dict, metadata: Metadata | None = None) -> None:
    """Fill the tensors of a nested dict, sharded in any way or not, from a checkpoint. Every rank calls it.

    metadata: what `read_metadata` said, if it is known already: for many weights reading it takes minutes. UserError if
    the tensors are not in there, or cannot be read. This is the only way in which a checkpoint is loaded.
    """
    metadata = metadata or rank_zero_decides(lambda: read_metadata(path))
    with warnings.catch_warnings(), damage_named(path):
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as intended
        how = {"planner": checkpoint_files.Planner(), "no_dist": not dist.is_initialized()}
        dcp.load(state, storage_reader=checkpoint_files.Reader(path, metadata), **how)


@contextlib.contextmanager
def damage_named(path: Path):
    """What goes wrong while a checkpoint is read becomes a UserError that names it."""
    try:
        yield
    except (UserError, OSError, torch.OutOfMemoryError):
        raise
    except (Exception, dcp.CheckpointException) as error:  # the latter is only a BaseException
        if processes.is_lost(error):
            raise
        hint = "if it is damaged, move it away to use the one before"
        raise UserError(f"cannot read {path} ({reason_of(error)}): {hint}") from error


def load(path: Path, model: MPT, optimizer) -> None:
    """Fill a model and its optimizer, sharded in any way, from a checkpoint saved in any other.

    Raises UserError, on all ranks, if it was saved with another optimizer.
    """
    ours = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    state = state_of(model, optimizer)
    saved, here = read_meta(path).get("optimizer", ADAMW), kind_of(optimizer)
    if saved != here:
        words = (
            f"{path} was saved with the optimizer {saved}, here it is {here}: go on with that one"
        )
        raise UserError(
            f"{words}, or begin with --init_from={path} and another --run_dir", everywhere=True
        )
    metadata = rank_zero_decides(lambda: read_metadata(path))
    require_weights(path, metadata, state["model"])
    fill(path, state, metadata)
    with damage_named(path):
        optim = {"optim_state_dict": state["optim"], "options": OPTIONS}
        set_state_dict(model, optimizer, model_state_dict=state["model"], **optim)
    for group, settings in zip(optimizer.param_groups, ours, strict=True):
        group.update(settings)  # lr, betas, decay: as configured now, not as saved


def settings(path: Path) -> MPTConfig:
    """The model of a checkpoint. UserError if there can be none with its settings."""
    return from_dict(MPTConfig, read_meta(path), f"{path}/meta.json")


def demonstrate(argv) -> None:
    """Train 50 million parameters, save and load them in a temporary folder, and print what that costs."""
    config.arguments(argv)
    world = processes.start()
    model_cfg, cfg = MPTConfig(d_model=512, n_heads=8, n_layers=8), TrainConfig()
    meta = {**asdict(model_cfg), **asdict(cfg), "precision": "fp32", "data_fingerprint": "none"}
    model, optimizer = parallel.build(model_cfg, cfg, world, "fp32", cfg.seed)
    folder = rank_zero_decides(lambda: Path(tempfile.mkdtemp()))
    saver = Checkpointer(folder, keep_last=1)
    ids = torch.zeros(1, 64, dtype=torch.long, device=world.device)
    fresh = folder / "fresh"  # for what saves at once

    def clear():
        shutil.rmtree(fresh, ignore_errors=True)
        prepare(fresh, meta)

    def train():
        model(ids, labels=ids).backward()
        optimizer.step()
        optimizer.zero_grad()

    def save_while_training():
        saver.save(len(seconds["dcp.save"]), model, optimizer, meta)
        seconds["save: training waits"].append(saver.blocked_seconds)
        while not rank_zero_decides(saver.settled):
            train()
        saver.finish()

    actions = {
        "dcp.save": lambda: dcp.save(state_of(model, optimizer), checkpoint_id=fresh),
        "dcp.save with checksums": lambda: dcp.save(
            state_of(model, optimizer), storage_writer=Writer(fresh)
        ),
        "save: until published": save_while_training,
        "verify": lambda: verify(latest(folder)),
        "load": lambda: load(latest(folder), model, optimizer),
    }
    seconds = defaultdict(list)
    for _ in range(5):
        train()
        for name, action in actions.items():
            rank_zero_decides(clear)
            begin = time.perf_counter()
            action()
            dist.barrier()
            seconds[name].append(time.perf_counter() - begin)
    if world.global_rank == 0:
        shutil.rmtree(folder)
        size = (
            12 * sum(p.numel() for p in model.parameters()) / 1e9
        )  # GB: fp32 weights and Adam's two moments
        print(
            f"{size:.2f} GB over {world.global_size} ranks. Medians of 4 turns, after a first that asks for memory"
        )
        typical = {name: median(times[1:]) for name, times in seconds.items()}
        for name, time_ in typical.items():
            share = f"{time_ / typical['dcp.save']:4.0%} of dcp.save"
            print(
                f"{name:24}{time_:6.2f} s{size / time_:6.2f} GB/s  {share}; first {seconds[name][0]:.2f} s"
            )


if __name__ == "__main__":
    processes.run(demonstrate)
