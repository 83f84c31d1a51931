"""Checkpoints: written in the background, complete or absent, checked before use.

    runs/demo/checkpoints/step-200.tmp/     being written: each rank writes its shards, in a thread
    runs/demo/checkpoints/step-200/         renamed when the last byte is on disk
        .metadata  __0_0.distcp  __1_0.distcp ...   PyTorch's distributed checkpoint (DCP): weights
                                                    and optimizer
        meta.json                                   step, settings, data fingerprint: all else
                                                    that resuming needs
        checksums.json                              bytes and crc32 of each of these files

DCP stores each tensor in pieces with their offsets in the whole, so that ranks in any number and
any layout can read what they need. The stages of a pipeline have different tensors, under the names
of the whole model: together they write what one process would, and each reads its own.

No path is ever written twice: a checkpoint that is half old and half new would look complete. If
saving fails on one rank, it fails on all, with one error.

A run with adapters (lora.py) saves what it trains, and says which base it belongs to.

What the files must hold, how they are written, and how they are read without trusting them:
storage/checkpoint_files.py. What DCP must know of tensors cut by --tp: storage/pieces.py.
"""

import contextlib
import os
import platform
import re
import shutil
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import processes
import program
from config import MPTConfig
from model import MPT
from optim import ADAMW, kind_of
from processes import rank_zero_decides, together
from program import UserError, require
from storage import checkpoint_files, files
from storage.checkpoint_files import (
    Stager,
    Writer,
    cause_of,
    read_meta,
    read_metadata,
    reason_of,
    require_weights,
)

# The optimizer's state as one flat dict of names and tensors: the same for every sharding. Weights
# that adapters leave as they are (lora.py) are not saved, so loading must not ask for all of them.
OPTIONS = StateDictOptions(
    flatten_optimizer_state_dict=True, ignore_frozen_params=True, strict=False
)

# --------------------------------------------------------------------------------------------------
# Saving


class Checkpointer:
    """Saves a run's checkpoints one after another, at most one at a time in the background.

    device: where the model is. Keeps the newest `keep_last`. Never deletes a step that is a
    multiple of `keep_every` (0: none), nor an imported step-0, which the run could not make again.
    All ranks call `save` and `finish` together.
    """

    def __init__(self, run_dir: str, device: torch.device, keep_last: int, keep_every: int = 0):
        self.folder = Path(run_dir) / "checkpoints"
        self.keep_last = keep_last
        self.keep_every = keep_every
        # The background thread has a process group of its own, apart from training's collectives.
        self.group = processes.new_group(processes.TIMEOUT)
        self.stager = Stager(device)
        self.reads_back = True  # the first checkpoint is read again once it is written
        self.pending = None  # (step, future) of the save in the background
        self.published = None  # the step that was published last
        self.in_use = None  # the path of one that must stay: it is being copied
        # torch 2.9 warns of its own code.
        warnings.filterwarnings("ignore", "TypedStorage is deprecated")
        rank_zero_decides(self.sweep)

    def sweep(self) -> None:
        """Make the folder and remove unfinished checkpoints. On rank 0."""
        self.folder.mkdir(parents=True, exist_ok=True)
        require(
            os.access(self.folder, os.W_OK | os.X_OK),
            f"no permission to write in {self.folder}: change it, or set another --run_dir",
        )
        for leftover in self.folder.glob("step-*.tmp"):
            if leftover.is_dir() and not leftover.is_symlink():
                shutil.rmtree(leftover, ignore_errors=True)
            else:
                leftover.unlink()

    def save(self, step: int, model: MPT, optimizer, meta: dict) -> None:
        """Copy weights and optimizer to host memory, then write them in the background.

        First waits for the previous save. Training may change the tensors as soon as this returns.
        meta: the other contents of meta.json. The step and the kind of optimizer are added, and
        replace keys of the same name. Raises UserError if this save cannot begin, or the one
        before failed.
        """
        self.finish()
        path = self.folder / f"step-{step}.tmp"
        state = state_of(model, optimizer)
        meta = meta | {"step": step, "optimizer": kind_of(optimizer)}
        rank_zero_decides(lambda: self.begin(step, meta))
        save_planner, _ = choose_planners(layout_of(model))
        future = dcp.async_save(
            state,
            storage_writer=Writer(path, self.reads_back),
            planner=save_planner,
            process_group=self.group,
            async_stager=self.stager,
        )
        self.pending = (step, future)

    def begin(self, step: int, meta: dict) -> None:
        """Make the folder of a new checkpoint. On rank 0. UserError if that fails."""
        try:
            prepare(self.folder / f"step-{step}.tmp", meta)
        except OSError as error:
            raise self.give_up(step, error) from error

    def settled(self) -> bool:
        """Whether `finish` would return without waiting on this rank. Ranks may differ briefly."""
        return self.pending is None or self.pending[1].done()

    def finish(self) -> None:
        """Wait for the save in the background and publish it.

        Raises UserError, on all ranks, if saving failed on any.
        """
        if self.pending is None:
            return
        step, future = self.pending
        self.pending = None
        error = future.exception()  # waits; on rank 0 it is the failure of any rank
        rank_zero_decides(lambda: self.publish(step, error))
        self.published = step

    def publish(self, step: int, error: BaseException | None) -> None:
        """Give a written checkpoint its final name, then remove old ones. On rank 0.

        error: why writing failed, or None. UserError if it did, or if this fails.
        """
        path = self.folder / f"step-{step}"
        temporary = path.with_suffix(".tmp")
        if error:
            raise self.give_up(step, error) from error
        try:
            files.sync(temporary)
            temporary.rename(path)
            files.sync(self.folder)  # now the new name survives a power failure
            self.remove_old()
        except OSError as fault:
            raise self.give_up(step, fault) from fault
        self.reads_back = False

    def remove_old(self) -> None:
        """Remove all checkpoints but the newest, and those that stay for good."""
        for old in complete(self.folder)[: -self.keep_last]:
            is_imported = number(old) == 0  # the run begins from it: training saves none at step 0
            for_good = self.keep_every and number(old) % self.keep_every == 0
            if not is_imported and not for_good and old != self.in_use:
                # Rename it first: a half-removed checkpoint must not look complete.
                shutil.rmtree(old.rename(old.with_suffix(".tmp")), ignore_errors=True)

    def give_up(self, step: int, error: BaseException) -> UserError:
        """Remove the files of a step that could not be saved.

        Returns the error to raise, which names the last good checkpoint.
        """
        reason = reason_of(error)
        if not isinstance(cause_of(error), UserError):
            reason += f" ({files.free_bytes(self.folder) / 1e9:.2f} GB are free there)"
        shutil.rmtree(self.folder / f"step-{step}.tmp", ignore_errors=True)
        return UserError(f"could not save step {step}: {reason}. {self.last_good()}")

    def last_good(self) -> str:
        """A sentence that names the newest complete checkpoint."""
        newest = latest(self.folder.parent)
        return f"The last good checkpoint is {newest}" if newest else "There is no checkpoint yet"


def layout_of(model: MPT):
    """Which part of each tensor this tensor rank has (`tensor_parallel.Layout`); None: all."""
    return getattr(model, "layout", None)


def choose_planners(layout) -> tuple:
    """DCP's planners for saving and for loading. If several ranks have a piece, one writes it."""
    if layout is None:
        return DefaultSavePlanner(), checkpoint_files.Planner()
    from storage import pieces  # here, since most runs do without --tp

    return pieces.SavePlanner(layout), pieces.LoadPlanner(layout)


def state_of(model: MPT, optimizer) -> dict:
    """Weights and optimizer state by name, sharded as they are: what DCP saves and fills."""
    model_state, optim_state = get_state_dict(model, optimizer, options=OPTIONS)
    return {"model": model_state, "optim": optim_state}


def prepare(path: Path, meta: dict) -> None:
    """Make the folder of a new checkpoint, with its meta.json. Raises OSError.

    Its parent is not made: if the run folder vanished, that is an error.
    """
    path.mkdir()
    files.write_json(path / "meta.json", meta)


# --------------------------------------------------------------------------------------------------
# Finding


def names_in(folder: Path) -> list[str]:
    """The names in a folder, none if it does not exist. Raises OSError if it cannot be read."""
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []


def numbered(folder: Path) -> list[Path]:
    """The folders step-N, oldest first. step-007 and step-5.tmp are not among them."""
    names = [name for name in names_in(folder) if re.fullmatch("step-(0|[1-9][0-9]*)", name)]
    return sorted([folder / name for name in names], key=number)


def number(path: Path) -> int:
    """The N of step-N."""
    return int(path.name.removeprefix("step-"))


def complete(folder: Path) -> list[Path]:
    """The complete checkpoints of a folder, oldest first. `verify` says whether they are sound."""
    return [path for path in numbered(folder) if ".metadata" in names_in(path)]


def latest(run_dir) -> Path | None:
    """The newest complete checkpoint of a run."""
    checkpoints = complete(Path(run_dir) / "checkpoints")
    return checkpoints[-1] if checkpoints else None


def find(path: str) -> Path:
    """A checkpoint from its own path, or from a run folder (its newest). Raises UserError."""
    is_checkpoint = Path(path) in complete(Path(path).parent)
    checkpoint = Path(path) if is_checkpoint else latest(path)
    require(
        checkpoint is not None,
        f"no checkpoint in {path!r}{files.absence(path)}: give a run folder or a checkpoint like "
        "runs/demo/.../step-200",
    )
    return checkpoint


# --------------------------------------------------------------------------------------------------
# Checking and loading


def verify(path: Path) -> str | None:
    """What is damaged in a checkpoint, in a few words, or None.

    A collective: the ranks share the reading and get the same answer. It works without a process
    group too. Raises UserError or OSError if the checkpoint cannot be read: no permission, a node
    that does not see it, or undamaged files that hold something we do not accept.
    """
    checksums = rank_zero_decides(lambda: checkpoint_files.read_checksums(path))
    if gap := checkpoint_files.incomplete(checksums):
        return gap
    global_rank, global_size = 0, 1
    if dist.is_initialized():
        global_rank, global_size = dist.get_rank(), dist.get_world_size()

    def first_fault():
        share = sorted(checksums)[global_rank::global_size]
        try:
            return checkpoint_files.first_fault(path, checksums, share)
        except OSError as error:  # of the file system, or of a node that does not see it: no damage
            who = f"rank {global_rank} on {platform.node()}"
            raise UserError(f"{who} cannot read {path}: {error.strerror}") from error

    damage = next(filter(None, together(first_fault)), None)
    return damage or rank_zero_decides(lambda: checkpoint_files.contradiction(path, checksums))


def require_sound(path: Path) -> None:
    """Raise UserError if a checkpoint is damaged. A collective."""
    checkpoint_files.require_undamaged(path, verify(path))


def fill(path: Path, state: dict, metadata: Metadata | None = None, layout=None) -> None:
    """Fill the tensors of a nested dict, sharded in any way or not, from a checkpoint.

    A collective, and the only way a checkpoint is loaded. metadata: from `read_metadata`, if it is
    known already; reading it takes minutes for many weights. layout: see `layout_of`. Raises
    UserError if the tensors are missing or cannot be read.
    """
    metadata = metadata or rank_zero_decides(lambda: read_metadata(path))
    _, load_planner = choose_planners(layout)
    with warnings.catch_warnings(), damage_named(path):
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # on purpose: no_dist
        dcp.load(
            state,
            storage_reader=checkpoint_files.Reader(path, metadata),
            planner=load_planner,
            no_dist=not dist.is_initialized(),
        )


@contextlib.contextmanager
def damage_named(path: Path):
    """Turn errors from reading a checkpoint into a UserError that names it."""
    try:
        yield
    except (UserError, OSError):
        raise
    except (Exception, dcp.CheckpointException) as error:  # the latter: a BaseException
        cause = cause_of(error)
        if processes.is_lost(error):
            raise
        if processes.is_lost(cause) or program.out_of_memory(cause):
            raise cause from error
        raise UserError(
            f"cannot read {path} ({reason_of(error)}): if it is damaged, move it away to use the "
            "one before"
        ) from error


def load(path: Path, model: MPT, optimizer) -> None:
    """Fill a model and its optimizer, sharded in any way, from a checkpoint saved in any other.

    Settings of the optimizer (lr, betas, decay) stay as configured now, not as saved. A collective.
    Raises UserError, on all ranks, if the checkpoint was saved with another optimizer.
    """
    settings_now = []
    for group in optimizer.param_groups:
        settings_now.append({key: value for key, value in group.items() if key != "params"})

    state = state_of(model, optimizer)  # also makes the state of an optimizer that has none yet
    rank_zero_decides(lambda: require_same_optimizer(path, optimizer))
    metadata = rank_zero_decides(lambda: read_metadata(path))
    require_weights(path, metadata, saved_weights(model))
    fill(path, state, metadata, layout_of(model))
    with damage_named(path):
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optim"],
            options=OPTIONS,
        )
    for group, settings in zip(optimizer.param_groups, settings_now, strict=True):
        group.update(settings)


def require_same_optimizer(path: Path, optimizer) -> None:
    """Raise UserError if a checkpoint was saved with another kind of optimizer. On rank 0.

    The kind is known once the optimizer has state: see `optim.kind_of`.
    """
    saved = read_meta(path).get("optimizer", ADAMW)
    current = kind_of(optimizer)
    require(
        saved == current,
        f"{path} was saved with the optimizer {saved}, here it is {current}: continue with "
        f"{saved}, or begin with {program.shell(f'--init_from={path}')} and another --run_dir",
    )


def whole_weights(cfg: MPTConfig) -> dict[str, torch.Tensor]:
    """The weights of a model by name, whole, of all stages: on the meta device, without memory."""
    with torch.device("meta"):
        return MPT(cfg).state_dict()


def saved_weights(model: MPT) -> dict[str, torch.Tensor]:
    """The weights that a checkpoint of this model holds; with adapters, only what the run trains.

    The model may be cut over ranks, or be one stage.
    """
    if model.lora is None:
        return whole_weights(model.cfg)
    import lora  # here, since most runs do without

    return lora.trained_weights(model.cfg, model.lora)
