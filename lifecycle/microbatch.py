"""The microbatch that fits: the most sequences that every rank can process in one pass.

    memory of a step = weights, gradients, Adam's state + microbatch x activations of a sequence

`--microbatch_size=auto` starts with what fits by the formulas of planning/memory.py. If a run is
out of memory all the same, `halve` records half of its microbatch in RUN_DIR/microbatch.json, and
the run exits; the next start under the same circumstances uses that. Why not try again in the run
itself: a rank that runs out of memory cannot undo its step while the others wait for it in a
collective. Neither the loss nor the order of the data depends on the microbatch.

`python -m lifecycle.microbatch runs/mpt1b` shows what is recorded.
"""

import json
import os
from dataclasses import asdict, replace
from pathlib import Path

import torch

import devices
import parallel
import processes
import program
from config import MPTConfig, TrainConfig
from launch import parser
from program import UserError, require
from storage import files

RECORD = "microbatch.json"
SIZES = (32, 16, 8, 4, 2, 1)
FUSED = ("sdpa", "flex", "triton")  # attention that keeps no scores
HELP = (
    "set --activation_checkpointing=full, or --sharding=FULL_SHARD on more ranks; "
    "python -m planning.memory shows what helps"
)


def fit(model_cfg: MPTConfig, cfg: TrainConfig, world: processes.World, precision: str) -> int:
    """The microbatch size to train with. A collective.

    It is cfg.microbatch_size, unless that is "auto" or more than what is recorded to fit.
    """
    asked = cfg.microbatch_size
    circumstances = circumstances_of(model_cfg, cfg, world, precision)
    path = Path(cfg.run_dir, RECORD)
    size, reason = asked, ""
    for record in processes.rank_zero_decides(lambda: read(path)):
        recorded = record["microbatch_size"]
        applies = record["circumstances"] == circumstances
        if applies and (asked == "auto" or recorded < asked):
            size, reason = recorded, f"{record['reason']} ({path})"
    if size == "auto":
        size, reason = planned(model_cfg, cfg, world, precision, memory_of_a_rank(world))
    if reason and world.global_rank == 0:
        print(f"microbatch {size}, not {asked}: {reason}", flush=True)
    return size


def halve(
    model_cfg: MPTConfig, cfg: TrainConfig, world: processes.World, precision: str, step: int
) -> int:
    """Record half of cfg.microbatch_size, and return it. UserError if it is 1 already.

    Not a collective: any rank may call it. step: counted from 1, for the record.
    """
    where = f"at step {step} on rank {world.global_rank}"
    reason = f"out of memory {where} with microbatch {cfg.microbatch_size}"
    require(cfg.microbatch_size > 1, f"{reason}: {HELP}")
    half = cfg.microbatch_size // 2
    circumstances = circumstances_of(model_cfg, cfg, world, precision)
    write(cfg, circumstances, half, reason)
    return half


# -------------------------------------------------------------------------------------------------
# The formula


def planned(
    model_cfg: MPTConfig, cfg: TrainConfig, world, precision: str, n_bytes: float
) -> tuple[int, str]:
    """The largest size that fits by planning/memory.py, and why.

    n_bytes: the memory of a rank, the same on all. UserError if not even one sequence fits.
    """
    from planning import memory  # here, since most runs do without

    room = memory.ROOM * n_bytes
    cfg = replace(cfg, device=world.device.type)
    if not cfg.shard_size:
        of_node = min(world.dp_size, max(1, world.local_size // cfg.tp))
        cfg = replace(cfg, shard_size=of_node)
    implementation = parallel.attention_of(model_cfg, world.device, precision)
    scores = 0  # bytes of a sequence
    if implementation not in FUSED:  # three tensors (heads, T, T) in fp32 of each block, at most
        heads, layers = model_cfg.n_heads / cfg.tp, model_cfg.n_layers / cfg.pp
        scores = 3 * 4 * heads * layers * model_cfg.max_seq_len**2
        implementation = "sdpa"
    model_cfg = replace(model_cfg, attn_impl=implementation)
    for size in sizes_to_try(cfg.global_batch_size // world.dp_size, cfg.pp):
        sized = replace(cfg, microbatch_size=size)
        parts = memory.bytes_by_part(model_cfg, sized, world.global_size, precision)
        peak = parts["peak"] + size * scores
        if peak <= room:
            reason = f"{peak / 1e9:.2g} GB of {room / 1e9:.3g} by the formulas of planning.memory"
            return size, reason
    raise UserError(
        f"a microbatch of 1 takes {peak / 1e9:.3g} GB by the formulas of planning.memory, and a "
        f"rank has {room / 1e9:.3g} GB: {HELP}; --microbatch_size=1 tries it all the same",
        on_all_ranks=True,
    )


def sizes_to_try(rows_per_rank: int, stages: int) -> list[int]:
    """Those of SIZES that the rows of a step allow, the largest first.

    Larger microbatches are fewer, and the stages of a pipeline wait longer. So these get at least
    four for each stage, which keeps the bubble below a fifth of a step; or microbatches of 1.
    """
    largest = rows_per_rank if stages == 1 else max(1, rows_per_rank // (4 * stages))
    return [size for size in SIZES if size <= largest]


def memory_of_a_rank(world) -> float:
    """Bytes for a rank: those of its GPU, else its share of half of the machine's memory.

    Half, since the kernel kills a process that takes too much, which then can record nothing. The
    least of all ranks. A collective.
    """
    if world.device.type == "cuda":
        _, n_bytes = torch.cuda.mem_get_info(world.device)
    else:
        n_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2 / world.local_size
    (negative,) = processes.all_max([-n_bytes], world)
    return -negative


# -------------------------------------------------------------------------------------------------
# The record


def circumstances_of(model_cfg: MPTConfig, cfg: TrainConfig, world, precision: str) -> dict:
    """Everything besides the microbatch that the memory of a step depends on."""
    names = "global_batch_size sharding shard_size activation_checkpointing recompute_every compile"
    if cfg.tp > 1:
        names += " tp sequence_parallel"
    if cfg.pp > 1:
        names += " pp"
    if cfg.lora_rank:
        names += " lora_rank lora_targets lora_last_blocks lora_train lora_dropout"
    return {
        "ranks": world.global_size,
        "ranks_of_a_node": world.local_size,
        "device": devices.describe(world.device),
        **{name: getattr(cfg, name) for name in names.split()},
        "precision": precision,
        "model": asdict(model_cfg),
    }


def read(path: Path) -> list[dict]:
    """The records of a run, none if there is no such file. UserError if it is damaged."""
    if not os.path.lexists(path):
        return []
    fields = {"microbatch_size": int, "reason": str, "circumstances": dict}
    records = files.read_json(path, list, fix="delete it")
    for record in records:
        is_record = isinstance(record, dict) and not files.missing(record, fields)
        is_sound = is_record and not files.wrong_type(record, fields)
        is_sound = is_sound and record["microbatch_size"] > 0
        require(is_sound, f"{path} is damaged ({files.shown(record)} is no record): delete it")
        circumstances = parser.rename_keys(record["circumstances"])
        if isinstance(circumstances.get("model"), dict):
            # A setting that is newer than the record had its default then.
            saved = parser.rename_keys(circumstances["model"])
            circumstances["model"] = asdict(MPTConfig()) | saved
        record["circumstances"] = circumstances
    return records


def write(cfg: TrainConfig, circumstances: dict, size: int, reason: str) -> None:
    """Replace the record of these circumstances. Several ranks may write at the same time."""
    path = Path(cfg.run_dir, RECORD)
    record = {"microbatch_size": size, "reason": reason, "circumstances": circumstances}
    others = [old for old in read(path) if old["circumstances"] != circumstances]
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps([*others, record], indent=2)
    files.write_atomically(path, text.encode())


def main(argv) -> None:
    """Print the microbatch sizes that are recorded in a run folder."""
    (folder,) = program.arguments(argv, "RUN_DIR")
    require(Path(folder).is_dir(), f"no run folder {folder!r}: give one, such as runs/demo")
    records = read(Path(folder, RECORD))
    for record in records:
        words = [f"{k} {v}" for k, v in record["circumstances"].items() if k != "model"]
        print(f"microbatch {record['microbatch_size']}, {record['reason']}: {', '.join(words)}")
    if not records:
        print(f"no microbatch is recorded in {folder}")


if __name__ == "__main__":
    program.run(main)
