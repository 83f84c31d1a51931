"""Where a run begins: the newest sound checkpoint that fits it, the same one on every rank, or step 0.

    runs/demo/checkpoints/step-600             sound: the run goes on from here
    runs/demo/checkpoints/step-800.damaged     a file of it is missing or its checksum differs
    runs/demo/checkpoints/step-1000.replaced   it learned from steps that --skip_steps leaves out now

What is unfit gets another name, so that its step can be saved again, and is never deleted.

`opening` says what is about to run.

Run `python -m lifecycle.resume runs/demo` to check all checkpoints of a run. Read next: lifecycle/microbatch.py.
"""

import functools
import math
import os
from dataclasses import asdict, replace
from pathlib import Path

import torch
import torch.distributed as dist

import attention
import config
import devices
import flops
import parallel
import processes
from checkpoint import find, latest, number, numbered, space, verify
from config import MPTConfig, TrainConfig, UserError, require, step_ranges
from lifecycle import runlog
from model import MPT
from storage.checkpoint_files import read_meta

# What must be the same when a run goes on: the function that the weights mean, and the order of the data.
SAME_MODEL = [f for f in MPTConfig.__dataclass_fields__ if not f.endswith("_pdrop")]
SAME_RUN = ["seed", "global_batch_size"]


def choose(cfg: TrainConfig) -> Path | None:
    """The checkpoint to go on from, the same on every rank, or None to start anew: the newest that is fit.

    Newer ones that are not get another name, so that their steps can be saved again. UserError if cfg.resume names an
    unfit one itself. A finished run is put aside if cfg.resume is "again".
    """
    decides = processes.rank_zero_decides
    if restarted() and decides(lambda: latest(cfg.run_dir)):  # what cfg.resume asked for is done
        cfg = replace(cfg, resume="auto")
    if cfg.resume not in ("auto", "again", "never"):
        path = decides(lambda: asked_for(cfg))
        _, reason = unfit(path, cfg)
        require(not reason, f"{path} {reason}: set --resume to another one")
        return path
    found, unfit_ones = None, []
    for path in decides(lambda: numbered(Path(cfg.run_dir) / "checkpoints")[::-1]):
        require(
            cfg.resume != "never",
            f"{cfg.run_dir} holds {path}: set --resume=auto to go on, or another --run_dir",
        )
        kind, reason = unfit(path, cfg)
        if not kind:
            found = path
            break
        unfit_ones.append((path, kind, reason))
    lost = not found and any(kind == "damaged" for _, kind, _ in unfit_ones)
    if lost and restarted():
        raise UserError(nothing_sound(cfg.run_dir, unfit_ones), everywhere=True)
    lines = []
    for path, kind, reason in unfit_ones:
        lines.append(
            f"{path} {reason}: it is kept as {decides(functools.partial(put_aside, path, kind))}"
        )
    if (
        found
        and cfg.resume == "again"
        and decides(lambda: read_meta(found)["step"]) >= cfg.max_steps
    ):
        lines.append(
            f"the finished run is kept in {decides(lambda: runlog.put_aside(cfg.run_dir))}"
        )
        found = None
    if dist.get_rank() == 0:
        for line in lines:
            print(
                line + (f", going on from {found.name}" if found else ", starting anew"), flush=True
            )
    return found


def nothing_sound(run_dir: str, unfit_ones: list) -> str:
    """The error of an automatic restart that finds no sound checkpoint."""
    path, _, reason = unfit_ones[0]
    return (
        f"{run_dir} has no sound checkpoint any more ({path} {reason}), and this is a restart, which does not start "
        "anew by itself: put a sound one there, or give the command again by hand to start at step 0"
    )


def restarted() -> bool:
    """Did torchrun or SLURM start this program before, with the same command?"""
    return any(
        int(os.environ.get(f"{by}_RESTART_COUNT", 0)) > 0 for by in ("TORCHELASTIC", "SLURM")
    )


def asked_for(cfg: TrainConfig) -> Path:
    """The checkpoint that cfg.resume names. UserError if the run holds a later one."""
    chosen, newest = (
        find(cfg.resume),
        next(reversed(numbered(Path(cfg.run_dir) / "checkpoints")), None),
    )
    later = newest and number(newest) > read_meta(chosen)["step"]
    require(
        not later,
        f"{cfg.run_dir} holds {newest}, which is later than {chosen}: set another --run_dir",
    )
    return chosen


def unfit(path: Path, cfg: TrainConfig) -> tuple[str, str]:
    """Why a checkpoint is not to be used: what its name will end with, and a reason. Both empty if it is fit."""
    if damage := verify(path):
        return "damaged", f"is damaged ({damage})"
    if processes.rank_zero_decides(lambda: has_learned(path, cfg.skip_steps)):
        return "replaced", f"has learned from the steps {cfg.skip_steps}"
    return "", ""


def has_learned(path: Path, skip_steps: str) -> bool:
    """Whether any of the steps `skip_steps` was taken, not skipped, on the way to a checkpoint."""
    meta = read_meta(path)
    skipped = step_ranges(meta.get("skip_steps", ""))
    done = (
        step for r in step_ranges(skip_steps) for step in range(r.start, min(r.stop, meta["step"]))
    )
    return any(not any(step in r for r in skipped) for step in done)


def put_aside(path: Path, kind: str) -> str:
    """step-N -> step-N.kind, or step-N.kind-2 and so on if that is there."""
    aside, number = path.with_suffix(f".{kind}"), 1
    while aside.exists():
        number += 1
        aside = path.with_suffix(f".{kind}-{number}")
    return path.rename(aside).name


def check_same(
    path: Path, meta: dict, model_cfg: MPTConfig, cfg: TrainConfig, fingerprint: str
) -> None:
    """UserError unless the checkpoint is of this model, this data and this order."""
    saved = config.from_dict(
        MPTConfig, meta, f"{path}/meta.json"
    )  # what was no setting then has its default
    here, meta = asdict(model_cfg) | asdict(cfg), asdict(saved) | meta
    for settings in (here, meta):
        settings["attn_impl"] = attention.function_of(settings["attn_impl"])
        settings["norm_type"] = norm_of(settings["norm_type"])
    differ = [f"{k} {meta[k]} (here {here[k]})" for k in SAME_MODEL if meta[k] != here[k]]
    require(
        not differ,
        f"{path} is of another model: {', '.join(differ)}. Set them alike, or use another --run_dir",
    )
    imported = str(meta["data_fingerprint"]).startswith("imported from")
    begin = f"--init_from={path.parent.parent} and another --run_dir"
    require(
        not imported, f"{path} was {meta['data_fingerprint']}, not trained here: begin with {begin}"
    )
    differ = [f"{k} {meta[k]} (here {here[k]})" for k in SAME_RUN if meta[k] != here[k]]
    if meta["data_fingerprint"] != fingerprint:
        differ.append(f"data {meta['data_fingerprint']} (here {fingerprint})")
    require(
        not differ,
        f"{path} has seen its data in another order: {', '.join(differ)}. Set them alike, or use another --run_dir",
    )


def norm_of(norm_type: str) -> str:
    """The function of a norm, in whatever precision: a run may change the latter when it goes on."""
    return norm_type.removeprefix("low_precision_")


def peak_of_all_ranks(cfg: TrainConfig, world, precision: str) -> float | None:
    """FLOP/s of all devices together; None if that of one is unknown."""
    peak = devices.peak_flops(cfg.peak_tflops, world.device, parallel.DTYPES[precision])
    peak = processes.all_sum(torch.tensor(peak or math.nan, device=world.device)).item()
    return None if math.isnan(peak) else peak


def opening(model_cfg, cfg, world, precision, folder, train, found, first, peak) -> str:
    """What is about to run, in seven lines, and a warning if planning does not know this model."""
    per_rank = cfg.global_batch_size // world.dp_size
    passes = math.ceil(per_rank / cfg.microbatch_size)
    impl = attention.choose(
        model_cfg.attn_impl,
        world.device.type,
        parallel.DTYPES[precision],
        model_cfg.head_dim,
        model_cfg.alibi,
        model_cfg.attn_pdrop,
    )
    how = (
        f"going on from {found}"
        if found
        else f"starting from {cfg.init_from}"
        if cfg.init_from
        else "starting anew"
    )
    if first >= cfg.max_steps:
        how = f"finished at step {first}; to go on raise --max_steps, to start anew set --resume=again"
    known = f"{peak / 1e12:.4g} TFLOP/s peak" if peak else "peak unknown: set --peak_tflops for MFU"
    size = f"{flops.n_params(model_cfg):,} parameters, {model_cfg.n_layers} layers x {model_cfg.d_model}"
    return "\n".join(
        [
            f"MPT of {size}, {impl} attention",
            f"{world.global_size} x {devices.describe(world.device)}, {cfg.sharding}, {precision}, {known}",
            f"{folder}: {train.tokens:,} training tokens",
            f"batch {cfg.global_batch_size} sequences x {model_cfg.max_seq_len} = "
            f"{world.dp_size} ranks x {per_rank} in {passes} microbatches",
            f"{cfg.run_dir}: {how}",
            space(cfg.run_dir, flops.n_params(model_cfg), cfg.keep_last),
            *unlike_formulas(model_cfg),
            "reading the weights"
            if found or cfg.init_from
            else "drawing the weights, then a first evaluation",
        ]
    )


def unlike_formulas(model_cfg) -> list[str]:
    """A line if the model has other parameters than flops.py and planning/memory.py count, or none."""
    with torch.device("meta"):
        real = sum(param.numel() for param in MPT(model_cfg).parameters())
    known = flops.n_params(model_cfg)
    if real == known:
        return []
    return [
        f"WARNING: model.py has {real:,} parameters: memory, FLOPs and MFU are those of the MPT with {known:,}"
    ]


def demonstrate(argv) -> None:
    """Check every checkpoint of a run folder; under torchrun the ranks share the reading.

    Exit status: 0 if all are sound, 1 if one is not, 2 if there is none.
    """
    config.arguments(argv, "RUN_DIR")
    world = processes.start("cpu")
    paths = processes.rank_zero_decides(lambda: numbered(Path(argv[0]) / "checkpoints"))
    require(paths, f"no checkpoint in {argv[0]!r}: give a run folder, such as runs/demo")
    unsound = 0
    for path in paths:
        try:
            damage = verify(path)
        except (UserError, OSError) as error:
            damage = str(error)
        unsound += bool(damage)
        if world.global_rank == 0:
            print(f"{path}: {damage or 'sound'}", flush=True)
    dist.barrier()
    if unsound:
        raise SystemExit(1)


if __name__ == "__main__":
    processes.run(demonstrate)
