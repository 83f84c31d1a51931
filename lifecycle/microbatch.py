"""The microbatch that fits: the most sequences that every rank can process in one pass.

    memory of a step = weights, gradients, Adam's state + microbatch x activations of a sequence

planning/memory.py estimates this; here it is tried, before step 0. Each rank starts a trial
process, and together these build the model and take two steps. Why not try in the run itself: a
rank that runs out of memory cannot undo its step while the others wait for it in a collective.
Trial processes can simply be killed.

The result is recorded in RUN_DIR/microbatch.json, for the next start under the same circumstances.
If a run runs out of memory later, `halve` records half of it and the run exits; the next start uses
that. Neither the loss nor the order of the data depends on the microbatch.

A trial does not include what a run needs besides its steps, such as the copy of the weights while a
checkpoint is written.

Run `python fsdp_train.py configs/mpt1b.py --microbatch_size=auto`;
`python -m lifecycle.microbatch runs/mpt1b` shows what is recorded.
"""

import collections
import contextlib
import json
import os
import signal
import time
from dataclasses import asdict, replace
from pathlib import Path

import torch
import torch.distributed as dist

import config
import devices
import parallel
import processes
import program
from config import MPTConfig, TrainConfig
from lifecycle import runlog
from program import UserError, require
from storage import files

RECORD = "microbatch.json"
SIZES = (32, 16, 8, 4, 2, 1)
# The states of a trial process.
RUNNING, FITS, NO_MEMORY, FAILED = "running", "fits", "out of memory", "failed"
INTERVAL = 0.3  # seconds between two looks at the trial processes
GRACE = 3.0  # seconds for the cause of a failure to show, which may be on another rank
HELP = (
    "set --activation_checkpointing=full, or --sharding=FULL_SHARD on more ranks; "
    "python -m planning.memory shows what helps"
)


def fit(
    model_cfg: MPTConfig, cfg: TrainConfig, world: processes.World, precision: str, train_step
) -> int:
    """The microbatch size to train with. A collective, called before anything large is in memory.

    It is cfg.microbatch_size, unless that is "auto" or more than what is recorded to fit. The trial
    runs `train_step`, that of fsdp_train.py. UserError if nothing fits.
    """
    asked = cfg.microbatch_size
    circumstances = circumstances_of(model_cfg, cfg, world, precision)
    path = Path(cfg.run_dir, RECORD)
    for record in processes.rank_zero_decides(lambda: read(path)):
        size = record["microbatch_size"]
        applies = record["circumstances"] == circumstances
        if applies and (asked == "auto" or size < asked):
            if world.global_rank == 0:
                print(f"microbatch {size}, not {asked}: {record['reason']} ({path})", flush=True)
            return size
    if asked != "auto":
        return asked
    size = search(model_cfg, cfg, world, precision, train_step)
    reason = "the largest that fits"
    processes.rank_zero_decides(lambda: write(cfg, circumstances, size, reason))
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
    records = files.read_json(path, list, fix="delete it")
    for record in records:
        wrong = fault(record)
        require(not wrong, f"{path} is damaged ({wrong}): delete it")
        record["circumstances"] = with_current_names(record["circumstances"])
    return records


def with_current_names(circumstances: dict) -> dict:
    """The same circumstances with today's names of the settings, those of the model included."""
    circumstances = config.renamed(circumstances)
    if isinstance(circumstances.get("model"), dict):
        circumstances["model"] = config.renamed(circumstances["model"])
    return circumstances


def fault(record) -> str:
    """What is wrong with a record, "" if nothing."""
    if not isinstance(record, dict):
        return f"a record is {files.shown(record)}"
    fields = {"microbatch_size": int, "reason": str, "circumstances": dict}
    if wrong := files.missing(record, fields) or files.wrong_type(record, fields):
        return wrong
    size = record["microbatch_size"]
    return "" if size > 0 else f"'microbatch_size' is {size}"


def write(cfg: TrainConfig, circumstances: dict, size: int, reason: str) -> None:
    """Replace the record of these circumstances. Several ranks may write at the same time."""
    path = Path(cfg.run_dir, RECORD)
    record = {"microbatch_size": size, "reason": reason, "circumstances": circumstances}
    others = [old for old in read(path) if old["circumstances"] != circumstances]
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps([*others, record], indent=2)
    files.write_atomically(path, text.encode())


# -------------------------------------------------------------------------------------------------
# The trial


def sizes_to_try(rows_per_rank: int, stages: int) -> list[int]:
    """Those of SIZES that the rows of a step allow, the largest first.

    Larger microbatches are fewer, and the stages of a pipeline wait longer. So these get at least
    four for each stage, which keeps the bubble below a fifth of a step; or microbatches of 1.
    """
    largest = rows_per_rank if stages == 1 else max(1, rows_per_rank // (4 * stages))
    return [size for size in SIZES if size <= largest]


def search(model_cfg: MPTConfig, cfg: TrainConfig, world, precision: str, train_step) -> int:
    """The largest size that fits on all ranks. A collective. UserError if none does."""
    rows_per_rank = cfg.global_batch_size // world.dp_size
    for size in sizes_to_try(rows_per_rank, cfg.pp):
        trial_cfg = replace(cfg, microbatch_size=size)
        fits, result = attempt(model_cfg, trial_cfg, world, precision, train_step)
        if world.global_rank == 0:
            print(f"microbatch {size}: {result}", flush=True)
        if fits:
            return size
    raise UserError(f"a step does not fit into memory even with a microbatch of 1: {HELP}")


def attempt(model_cfg, cfg: TrainConfig, world, precision: str, train_step) -> tuple[bool, str]:
    """Start a trial process on each rank. Returns whether a step fits, and why. A collective."""
    port = processes.rank_zero_decides(processes.free_port)  # on the host of rank 0
    # The process is the same rank as this one, but does not belong to a torchrun around it.
    environment = os.environ | {
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }
    pool = processes.Pool(
        1, be_killed_first, threads=torch.get_num_threads(), environment=environment
    )
    try:
        pool.send(trial, model_cfg, cfg, precision, train_step)
        return watch(pool, world)
    finally:
        pool.stop()


def watch(pool, world) -> tuple[bool, str]:
    """Wait until the trial fits on all ranks, or one is out of memory. A collective.

    UserError if a trial fails for another reason.
    """
    mine = RUNNING, 0.0, ""
    reports = [None] * world.global_size
    patience = GRACE
    while patience > 0:
        if mine[0] == RUNNING:
            mine = report_of(pool)
        dist.all_gather_object(reports, mine)
        states = [state for state, _, _ in reports]
        if NO_MEMORY in states:
            where = f" on rank {states.index(NO_MEMORY)}" if world.global_size > 1 else ""
            return False, NO_MEMORY + where
        if states == [FITS] * world.global_size:
            _, peak_gb, of_capacity = max(reports)
            return True, f"fits, {peak_gb:.1f} GB{of_capacity} at the peak"
        if FAILED in states:  # perhaps only because another rank was killed for lack of memory
            patience -= INTERVAL
        time.sleep(INTERVAL)
    _, _, reason = reports[states.index(FAILED)]
    raise UserError(f"the trial step failed: {reason}")


def report_of(pool) -> tuple[str, float, str]:
    """(state, GB at the peak, words) of a trial process."""
    try:
        answers = pool.answers(patience=0)
    except processes.PoolError as error:
        return NO_MEMORY if error.no_memory else FAILED, 0.0, str(error)
    return (RUNNING, 0.0, "") if answers is None else answers[0]


def be_killed_first() -> None:
    """In a trial process: signals are for the parent to handle, and the kernel spares the parent if
    it must kill a process for lack of memory."""
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):  # not Linux
        Path("/proc/self/oom_score_adj").write_text("1000")


def trial(_, *settings) -> tuple[str, float, str]:
    """In a trial process: take two steps, and report as `report_of` says.

    After a failure the process stays. If it ended, other ranks would report that it is gone, and
    not why.
    """
    try:
        return FITS, *two_steps(*settings)
    except Exception as error:
        words, _, no_memory = processes.described(error)
        return NO_MEMORY if no_memory else FAILED, 0.0, words


def two_steps(model_cfg, cfg: TrainConfig, precision: str, train_step) -> tuple[float, str]:
    """The peak memory of this rank in GB, and " of N" with the GB of its GPU, or "".

    In the second step Adam's state is in memory, and in its second microbatch the gradients of the
    first one, too. The first stage of a pipeline then has as many microbatches in memory as there
    are stages. All weights are 0.01: they take as much memory as random ones, and less time.
    """
    world = processes.start(cfg.device, tp=cfg.tp, pp=cfg.pp)
    model, optimizer = parallel.build(model_cfg, cfg, world, precision, seed=None)
    for param in model.parameters():
        torch.nn.init.constant_(param, 0.01)
    n_microbatches = cfg.pp + 1
    n_rows = min(n_microbatches * cfg.microbatch_size, cfg.global_batch_size // world.dp_size)
    shape = n_rows, model_cfg.max_seq_len + 1
    rows = torch.randint(model_cfg.vocab_size, shape, device=world.device)
    for step in range(2):
        loss, _, _ = train_step(model, optimizer, rows, step, cfg, world, precision)
        loss.item()  # waits for the device
    of_capacity = ""
    if world.device.type == "cuda":
        _, capacity = torch.cuda.mem_get_info(world.device)
        of_capacity = f" of {capacity / 1e9:.1f}"
    return runlog.memory_gb(world.device), of_capacity


def main(argv) -> None:
    """Print the microbatch sizes that are recorded in a run folder."""
    program.arguments(argv, "RUN_DIR")
    folder = Path(argv[0])
    require(folder.is_dir(), f"no run folder {argv[0]!r}: give one, such as runs/demo")
    records = read(folder / RECORD)
    for record in records:
        circumstances = collections.defaultdict(lambda: "?", record["circumstances"])
        where = "{ranks} x {device}, {precision}, {sharding}".format_map(circumstances)
        for name in ("tp", "pp", "lora_rank"):
            if name in circumstances:
                where += f", {name} {circumstances[name]}"
        print(f"{where}: microbatch {record['microbatch_size']}, {record['reason']}")
    if not records:
        print(f"no microbatch is recorded in {argv[0]}")


if __name__ == "__main__":
    program.run(main)
