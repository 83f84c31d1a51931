"""Checkpoints: complete or absent, written while training goes on, loaded on any number of ranks.

    runs/demo/checkpoints/step-200.tmp/     being written: each rank its shards, in a thread of its own
    runs/demo/checkpoints/step-200/         renamed when the last byte is on disk
        .metadata  __0_0.distcp  __1_0.distcp ...   PyTorch's distributed checkpoint (DCP): weights and optimizer
        meta.json                                   step, settings, data fingerprint: all that a resume needs

DCP stores each tensor in pieces with their place in the whole, so another mesh reads what it needs. Nothing is ever
written twice to one path, since a half-overwritten checkpoint looks complete.

Run `python checkpoint.py`, or under torchrun, to see one saved and loaded, and at what rate. Read next: fsdp_train.py.
"""

import contextlib
import json
import os
import shutil
import sys
import tempfile
import time
import warnings
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import parallel
from config import MPTConfig, TrainConfig, UserError, from_dict, require
from model import MPT
from optim import build_optimizer

# One flat format, whatever the sharding.
OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)
# What must be the same when a run goes on: the function that the weights mean, and the order of the data.
SAME_MODEL = [
    f for f in MPTConfig.__dataclass_fields__ if not f.endswith("_pdrop") and f not in ("attn_impl", "norm_type")
]
SAME_RUN = ["seed", "global_batch_size"]


class Checkpointer:
    """Saves a run's checkpoints one after another, at most one in flight. Every rank calls every method alike."""

    def __init__(self, run_dir: str, keep_last: int):
        self.folder = Path(run_dir) / "checkpoints"
        self.keep_last = keep_last
        self.group = dist.new_group(backend="gloo")  # of its own: the thread must not meet training's collectives
        self.pending = None  # (step, future)
        self.blocked_seconds = 0.0  # how long the last save kept the training thread
        warnings.filterwarnings("ignore", "TypedStorage is deprecated")  # torch 2.9 says so of its own code
        if dist.get_rank() == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            for left_over in self.folder.glob("*.tmp"):
                shutil.rmtree(left_over)
        dist.barrier()

    def save(self, step: int, model: MPT, optimizer, meta: dict) -> None:
        """Copy weights and optimizer to host memory and write them in the background."""
        self.finish()
        begin = time.perf_counter()
        model_state, optim_state = get_state_dict(model, optimizer, options=OPTIONS)
        path = self.folder / f"step-{step}.tmp"
        try:
            if dist.get_rank() == 0:
                path.mkdir(exist_ok=True)
                (path / "meta.json").write_text(json.dumps({"step": step, **meta}, indent=2))
        except OSError as error:
            raise self.failure(step, error) from error
        state = {"model": model_state, "optim": optim_state}
        writer = dcp.FileSystemWriter(path, overwrite=True)
        self.pending = step, dcp.async_save(state, storage_writer=writer, process_group=self.group)
        self.blocked_seconds = time.perf_counter() - begin

    def poll(self) -> None:
        """Publish the checkpoint in flight if it is complete. Cheap: for every step."""
        if self.pending and self.pending[1].done():
            self.finish()

    def finish(self) -> None:
        """Wait for the checkpoint in flight and publish it. Raises UserError if it could not be written."""
        if not self.pending:
            return
        (step, future), self.pending = self.pending, None
        try:
            future.result()  # rank 0's is done only after it heard from all ranks
            if dist.get_rank() == 0:
                os.rename(self.folder / f"step-{step}.tmp", self.folder / f"step-{step}")
                self.remove_old()
        except (OSError, dcp.CheckpointException) as error:
            raise self.failure(step, error) from error

    def remove_old(self) -> None:
        for path in complete(self.folder)[: -self.keep_last]:
            doomed = path.with_name(path.name + ".tmp")  # half deleted must not look complete
            os.rename(path, doomed)
            shutil.rmtree(doomed)

    def failure(self, step: int, error: Exception) -> UserError:
        reasons = getattr(error, "failures", None)  # DCP: rank -> (exception, traceback)
        reason = next(iter(reasons.values()))[0] if reasons else error
        if dist.get_rank() == 0:
            shutil.rmtree(self.folder / f"step-{step}.tmp", ignore_errors=True)
        return UserError(f"could not save step {step}: {reason}. {self.last_good()}")

    def last_good(self) -> str:
        """A sentence that names the newest complete checkpoint."""
        newest = latest(self.folder.parent)
        return f"The last good checkpoint is {newest}" if newest else "There is no checkpoint yet"


def complete(folder: Path) -> list[Path]:
    """The complete checkpoints of a folder, oldest first."""
    there = [p for p in folder.glob("step-*") if p.name[5:].isdigit() and (p / ".metadata").exists()]
    return sorted(there, key=lambda p: int(p.name.split("-")[1]))


def latest(run_dir) -> Path | None:
    """The newest complete checkpoint of a run."""
    return next(reversed(complete(Path(run_dir) / "checkpoints")), None)


def find(path: str) -> Path:
    """A checkpoint from the path of one, or of a run folder (its newest)."""
    found = Path(path) if Path(path) in complete(Path(path).parent) else latest(path)
    require(
        found is not None, f"no checkpoint in {path!r}: give a run folder or a checkpoint like runs/demo/.../step-200"
    )
    return found


def read_meta(path: Path) -> dict:
    """What a checkpoint says about itself: step, settings, precision, data fingerprint."""
    with damage_named(path):
        return json.loads((path / "meta.json").read_text())


@contextlib.contextmanager
def damage_named(path: Path):
    """What goes wrong while a checkpoint is read becomes a UserError that names it."""
    try:
        yield
    except (UserError, torch.OutOfMemoryError):
        raise
    except (OSError, EOFError, ValueError, RuntimeError, dcp.CheckpointException) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"cannot read {path} ({reason}): if it is damaged, move it away to use the one before"
        ) from error


def check_same(path: Path, meta: dict, model_cfg: MPTConfig, cfg: TrainConfig, fingerprint: str) -> None:
    """UserError unless the checkpoint is of this model, this data and this order."""
    here = asdict(model_cfg) | asdict(cfg)
    differ = [f"{k} {meta[k]} (here {here[k]})" for k in SAME_MODEL if meta[k] != here[k]]
    require(not differ, f"{path} is of another model: {', '.join(differ)}. Set them alike, or use another --run_dir")
    differ = [f"{k} {meta[k]} (here {here[k]})" for k in SAME_RUN if meta[k] != here[k]]
    if meta["data_fingerprint"] != fingerprint:
        differ.append(f"data {meta['data_fingerprint']} (here {fingerprint})")
    require(
        not differ,
        f"{path} has seen its data in another order: {', '.join(differ)}. Set them alike, or use another --run_dir",
    )


def load(path: Path, model: MPT, optimizer) -> None:
    """Fill a model and its optimizer, sharded in any way, from a checkpoint saved in any other."""
    ours = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    model_state, optim_state = get_state_dict(model, optimizer, options=OPTIONS)
    with damage_named(path):
        dcp.load({"model": model_state, "optim": optim_state}, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optim_state, options=OPTIONS)
    for group, settings in zip(optimizer.param_groups, ours, strict=True):
        group.update(settings)  # lr, betas, decay: as configured now, not as saved


def load_model(path: Path, device: torch.device) -> MPT:
    """The whole model of a checkpoint on one device, for sampling and evaluation; needs no process group."""
    with torch.device("meta"):
        model = MPT(from_dict(MPTConfig, read_meta(path) | {"attn_impl": "auto"}))  # this may be another device
    model.to_empty(device=device)
    with warnings.catch_warnings(), damage_named(path):
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as intended
        dcp.load({"model": model.state_dict()}, checkpoint_id=path, no_dist=True)
    return model.eval()


def demonstrate(argv) -> None:
    """Save a model of 50 million parameters in a temporary folder, load it, and print the rates."""
    world = parallel.start()
    model_cfg, cfg = MPTConfig(d_model=512, n_heads=8, n_layers=8), TrainConfig()
    with torch.device("meta"):
        model = MPT(model_cfg)
    mesh = parallel.make_mesh(world, cfg)
    model = parallel.parallelize(model, mesh, cfg, "fp32")
    parallel.materialize(model, world.device, cfg.seed)
    optimizer = build_optimizer(model.parameters(), cfg)
    folder = parallel.rank_zero_decides(lambda: tempfile.mkdtemp())
    saver = Checkpointer(folder, keep_last=1)
    size = 12 * sum(p.numel() for p in model.parameters()) / 1e9  # GB: fp32 weights and Adam's two moments
    for step in (1, 2):
        begin = time.perf_counter()
        saver.save(step, model, optimizer, asdict(model_cfg))
        saver.finish()
        seconds = time.perf_counter() - begin
    before = [p.detach().clone() for p in model.parameters()]
    parallel.materialize(model, world.device, cfg.seed + 1)
    begin = time.perf_counter()
    load(latest(folder), model, optimizer)
    loading = time.perf_counter() - begin
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    if world.rank == 0:
        print(f"{size:.2f} GB over {world.size} ranks: written at {size / seconds:.2f} GB/s,", end=" ")
        print(f"training held up {saver.blocked_seconds / seconds:.0%} of that time; read at {size / loading:.2f} GB/s")
        shutil.rmtree(folder)
        sys.stdout.flush()


if __name__ == "__main__":
    parallel.run(demonstrate)
