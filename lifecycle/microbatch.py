"""The microbatch that fits: the most sequences that every rank can take through a step at once, found before step 0.

    memory of a step = weights, gradients, Adam's state + microbatch x what its activations take

planning/memory.py estimates it; here it is tried. Every rank starts a child, and the children together make the model
and take two steps. A live step that runs out of memory cannot be undone, for the other ranks wait in a collective;
children can be killed. What fits is written to RUN_DIR/microbatch.json for the next start under the same
circumstances. If memory runs out later, `halve` writes half there and the run leaves: loss and samples do not depend on
the microbatch.

What a run needs beside its steps, such as a copy of the weights while they are saved from a CPU, is not tried.

Run `python fsdp_train.py configs/mpt1b.py --microbatch_size=auto`;
`python -m lifecycle.microbatch runs/mpt1b` shows what is on record. Read next: lifecycle/stopping.py.
"""

import collections
import contextlib
import json
import multiprocessing
import os
import signal
import textwrap
import time
from dataclasses import asdict, replace
from pathlib import Path

import torch
import torch.distributed as dist

import config
import devices
import parallel
import processes
from config import MPTConfig, TrainConfig, UserError, require
from lifecycle import runlog
from storage import files

RECORD, SIZES = "microbatch.json", (32, 16, 8, 4, 2, 1)
RUNNING, FITS, NO_MEMORY, FAILED = "running", "fits", "out of memory", "failed"
INTERVAL, GRACE = (
    0.3,
    3.0,
)  # seconds between two looks at the children; for the reason of a failure to be known
HELP = (
    "set --activation_checkpointing=full, or --sharding=FULL_SHARD on more ranks; "
    "python -m planning.memory tells what helps"
)


def fit(
    model_cfg: MPTConfig, cfg: TrainConfig, world: processes.World, precision: str, train_step
) -> int:
    """The microbatch size to train with: cfg.microbatch_size, unless that is auto or more than what is on record.

    train_step: fsdp_train's. A collective, called before anything big is in memory. UserError if nothing fits.
    """
    here, asked = circumstances(model_cfg, cfg, world, precision), cfg.microbatch_size
    for record in processes.rank_zero_decides(lambda: read(Path(cfg.run_dir, RECORD))):
        size = record["microbatch_size"]
        if record["circumstances"] == here and (asked == "auto" or size < asked):
            if world.global_rank == 0:
                print(
                    f"microbatch {size}, not {asked}: {record['reason']} ({cfg.run_dir}/{RECORD})",
                    flush=True,
                )
            return size
    if asked != "auto":
        return asked
    size = search(model_cfg, cfg, world, precision, train_step)
    processes.rank_zero_decides(
        lambda: write(cfg, here, size, "the largest that fits", world.global_rank)
    )
    return size


def halve(
    model_cfg: MPTConfig, cfg: TrainConfig, world: processes.World, precision: str, step: int
) -> int:
    """Record half of cfg.microbatch_size and return it. On any rank, not a collective. UserError if it is 1 already."""
    reason = f"out of memory at step {step} on rank {world.global_rank} with microbatch {cfg.microbatch_size}"
    require(cfg.microbatch_size > 1, f"{reason}: {HELP}")
    write(
        cfg,
        circumstances(model_cfg, cfg, world, precision),
        cfg.microbatch_size // 2,
        reason,
        world.global_rank,
    )
    return cfg.microbatch_size // 2


def out_of_memory(error: BaseException) -> bool:
    """Of an accelerator, whose class in torch all vendors share, or of the CPU, where torch has no class for it."""
    on_cpu = isinstance(error, RuntimeError) and (
        "can't allocate memory" in str(error) or "bad_alloc" in str(error)
    )
    return on_cpu or isinstance(error, torch.OutOfMemoryError | MemoryError)


def circumstances(model_cfg, cfg, world, precision) -> dict:
    """What the memory of a step depends on besides the microbatch."""
    names = "global_batch_size sharding shard_size activation_checkpointing recompute_every compile"
    ranks = {
        "ranks": world.global_size,
        "ranks_of_a_node": world.local_size,
        "device": devices.describe(world.device),
    }
    return (
        ranks
        | {k: getattr(cfg, k) for k in names.split()}
        | {"precision": precision, "model": asdict(model_cfg)}
    )


def read(path: Path) -> list[dict]:
    """What is on record, nothing if there is no such file. UserError if it is damaged."""
    if not os.path.lexists(path):
        return []
    records = files.read_json(path, list, fix="delete it")
    for record in records:
        wrong = fault(record)
        require(not wrong, f"{path} is damaged ({wrong}): delete it")
        record["circumstances"] = todays_circumstances(record["circumstances"], path)
    return records


def todays_circumstances(saved: dict, path: Path) -> dict:
    """Circumstances with settings under today's names, those of the model included."""
    saved = config.renamed(saved, f"{path}")
    if isinstance(saved.get("model"), dict):
        saved["model"] = config.renamed(saved["model"], f"{path}")
    return saved


def fault(record) -> str:
    """What is wrong with a record, "" if nothing."""
    if not isinstance(record, dict):
        return f"a record is {files.shown(record)}"
    fields = {"microbatch_size": int, "reason": str, "circumstances": dict}
    if wrong := files.missing(record, fields) or files.wrong_type(record, fields):
        return wrong
    size = record["microbatch_size"]
    return "" if size > 0 else f"'microbatch_size' is {size}"


def write(cfg, here: dict, size: int, reason: str, rank: int) -> None:
    """Replace what was on record for these circumstances. Several ranks may do so at once."""
    path, new = (
        Path(cfg.run_dir, RECORD),
        {"microbatch_size": size, "reason": reason, "circumstances": here},
    )
    records = [record for record in read(path) if record["circumstances"] != here] + [new]
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_atomically(path, json.dumps(records, indent=2).encode(), writer=rank)


def search(model_cfg, cfg, world, precision, train_step) -> int:
    """The first of SIZES, of those that are at most the rows of a rank, that fits on all ranks. A collective."""
    for size in [size for size in SIZES if size <= cfg.global_batch_size // world.dp_size]:
        fits, words = attempt(
            replace(cfg, microbatch_size=size), world, (model_cfg, precision, train_step)
        )
        if world.global_rank == 0:
            print(f"microbatch {size}: {words}", flush=True)
        if fits:
            return size
    raise UserError(f"a step does not fit with one sequence at a time: {HELP}")


def attempt(cfg, world, others) -> tuple[bool, str]:
    """Whether a child of each rank, all together, can take a step; and that in words."""
    port = processes.rank_zero_decides(processes.free_port)  # on the host of rank 0
    # The child is the same rank as we are, but not of a torchrun around us.
    environment = {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "False"}
    child, pipe = processes.spawn(trial, cfg, *others, environment=environment)
    try:
        return agree(child, pipe, world)
    finally:
        child.kill()
        child.join()


def agree(child, pipe, world) -> tuple[bool, str]:
    """Watch the children of all ranks until all fit or one does not. UserError if one fails for another reason."""
    answer, answers, patience = (RUNNING, 0.0, ""), [None] * world.global_size, GRACE
    while patience > 0:  # a rank may fail because another, killed for want of memory, has left it
        if answer[0] == RUNNING:
            answer = listen(child, pipe)
        dist.all_gather_object(answers, answer)
        verdicts = [verdict for verdict, _, _ in answers]
        if NO_MEMORY in verdicts:
            return False, NO_MEMORY + (
                f" on rank {verdicts.index(NO_MEMORY)}" if world.global_size > 1 else ""
            )
        if verdicts == [FITS] * world.global_size:
            return True, "fits, {1:.1f} GB{2} at the peak".format(*max(answers))
        patience -= INTERVAL if FAILED in verdicts else 0
        time.sleep(INTERVAL)
    raise UserError(f"the step fails on trial: {answers[verdicts.index(FAILED)][2]}")


def listen(child, pipe) -> tuple[str, float, str]:
    """What the child has said, or what its death says: verdict, GB, words."""
    alive = child.is_alive()  # asked first: if it is dead, all that it said is in the pipe
    with contextlib.suppress(EOFError, OSError):
        if pipe.poll():
            return pipe.recv()
    killed = child.exitcode == -signal.SIGKILL  # by the kernel, which had no memory left
    verdict = RUNNING if alive else NO_MEMORY if killed else FAILED
    return verdict, 0.0, f"its process ended with status {child.exitcode}"


def trial(pipe, cfg, model_cfg, precision, train_step) -> None:
    """The life of a child: two steps and an answer. Then it waits to be killed: the others may still need it."""
    for number in (signal.SIGTERM, signal.SIGUSR1):  # the parent's business
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(
        OSError
    ):  # not Linux. Else the kernel, when it must kill, kills the child, not the parent
        Path("/proc/self/oom_score_adj").write_text("1000")
    try:
        answer = FITS, *two_steps(model_cfg, cfg, precision, train_step)
    except Exception as error:
        words = textwrap.shorten(f"{type(error).__name__}: {error}", 200, placeholder=" ...")
        answer = NO_MEMORY if out_of_memory(error) else FAILED, 0.0, words
    pipe.send(answer)
    multiprocessing.parent_process().join()


def two_steps(model_cfg, cfg, precision, train_step) -> tuple[float, str]:
    """The peak of this rank in GB, and " of so many". In the second step Adam's state is there, and in its second
    microbatch the gradients of the first. Weights of 0.01 take as much memory as drawn ones, and less time."""
    world = processes.start(cfg.device)
    model, optimizer = parallel.build(model_cfg, cfg, world, precision, seed=None)
    for p in model.parameters():
        torch.nn.init.constant_(p, 0.01)
    n_rows = min(2 * cfg.microbatch_size, cfg.global_batch_size // world.dp_size)
    rows = torch.randint(
        model_cfg.vocab_size, (n_rows, model_cfg.max_seq_len + 1), device=world.device
    )
    for step in range(2):
        train_step(model, optimizer, rows, step, cfg, world, precision)[
            0
        ].item()  # waits for the device
    there = (
        f" of {torch.cuda.mem_get_info(world.device)[1] / 1e9:.1f}"
        if world.device.type == "cuda"
        else ""
    )
    return runlog.memory_gb(world.device), there


def main(argv) -> None:
    config.arguments(argv, "RUN_DIR")
    require(Path(argv[0]).is_dir(), f"no run folder {argv[0]!r}: give one, such as runs/demo")
    records = read(Path(argv[0], RECORD))
    for record in records:
        known = collections.defaultdict(lambda: "?", record["circumstances"])
        where = "{ranks} x {device}, {precision}, {sharding}".format_map(known)
        print(f"{where}: microbatch {record['microbatch_size']}, {record['reason']}")
    if not records:
        print(f"no microbatch is on record in {argv[0]}")


if __name__ == "__main__":
    config.run(main)
