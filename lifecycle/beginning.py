"""Before the first step: what the settings leave open, which weights, and what the run says of it.

`Run` (run.py) calls these functions on all ranks.
"""

import math
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch

import checkpoint
import data
import devices
import flops
import optim
import parallel
import processes
from config import MPTConfig, TrainConfig
from lifecycle import runlog
from lifecycle.resume import OPTIMIZER_SETTINGS, Start
from model import MPT
from processes import rank_zero_decides
from program import UserError, require
from storage import files
from storage.checkpoint_files import differing


def check_settings(model_cfg: MPTConfig, cfg: TrainConfig, world) -> None:
    """UserError if ranks cannot share the batch evenly, or --init_from is another model's."""
    batch, dp = cfg.global_batch_size, world.dp_size
    nearest = [n for n in (batch - batch % dp, batch - batch % dp + dp) if n > 0]
    require(
        batch % dp == 0,
        f"global_batch_size {batch} is not a multiple of the {dp} data-parallel ranks: "
        f"set --global_batch_size={' or '.join(map(str, nearest))}",
    )
    parallel.check(model_cfg, cfg)
    data.check_packing(model_cfg, cfg)
    flops.check_adapters(model_cfg, cfg)
    if cfg.track:
        from lifecycle import trackers  # here, since most runs do without

        rank_zero_decides(partial(trackers.require_installed, cfg.track))
    if not cfg.remote:  # else checkpoints that replace it may be there
        check_init_from(model_cfg, cfg)


def check_init_from(model_cfg: MPTConfig, cfg: TrainConfig) -> None:
    """UserError if --init_from is missing or another model's. A collective."""
    if cfg.init_from:
        from weights import load  # here, since most runs do without

        rank_zero_decides(partial(load.check_init_from, cfg, model_cfg))


def open_mirror(model_cfg: MPTConfig, cfg: TrainConfig):
    """The mirror of the run folder in a store, from which what is newer there is here now.

    None without --remote. A collective.
    """
    if not cfg.remote:
        return None
    from lifecycle import remote  # here, since most runs do without

    mirror = remote.open_mirror(model_cfg, cfg)
    check_init_from(model_cfg, cfg)
    return mirror


def prepare_data(model_cfg: MPTConfig, cfg: TrainConfig, world) -> list[Path]:
    """The checked data folders; of data in a store, the copy on this node. A collective."""
    folders = rank_zero_decides(partial(data.open_folders, cfg, model_cfg.max_seq_len))
    if "://" in cfg.data_dir:
        from text import fetch  # here, since most runs do without

        copies = world.local_rank == 0  # the other ranks of a node wait, for as long as that takes
        copy = partial(fetch.copy, cfg.data_dir, *folders) if copies else lambda: None
        processes.together(copy, group=processes.new_group(processes.LONG))
    return folders


def settle(model_cfg: MPTConfig, cfg: TrainConfig, world, start: Start) -> tuple[TrainConfig, str]:
    """(cfg, precision): what the settings leave open, the same on all ranks. A collective."""
    precision = parallel.choose_precision(cfg, world.device, start.precision)
    compiles = False
    if cfg.compile is True or world.device.type == "cuda":
        from lifecycle import compiling  # here, since runs on a CPU do without

        compiles = compiling.choose(model_cfg, cfg, world, precision)
    cfg = replace(cfg, compile=compiles)
    record = Path(cfg.run_dir, "microbatch.json")  # of a start that ran out of memory
    if cfg.microbatch_size == "auto" or rank_zero_decides(record.exists):
        from lifecycle import microbatch

        cfg = replace(cfg, microbatch_size=microbatch.fit(model_cfg, cfg, world, precision))
    return cfg, precision


def prepare_evaluation(model_cfg: MPTConfig, cfg: TrainConfig, tokenizer_file: Path):
    """(tasks, tokenizer) for --icl_interval, else ([], None).

    UserError if a task or a tokenizer is missing: now, not hours later.
    """
    tasks, tokenizer = [], None
    if cfg.icl_interval:
        from evaluation import zero_shot  # here, since most runs do without

        tasks, tokenizer = zero_shot.prepare(model_cfg, cfg, tokenizer_file)
    if cfg.init_from:
        from weights import load

        given = cfg.init_from, cfg.tokenizer, tokenizer_file
        rank_zero_decides(partial(load.check_same_tokenizer, *given))
    return tasks, tokenizer


def load_weights(start: Start, cfg: TrainConfig, model, optimizer) -> dict:
    """Fill model and optimizer from the checkpoint, or the model from --init_from. A collective.

    A checkpoint of adapters lacks the weights of their base, which are loaded first. Returns what
    the next checkpoints will say of the base (nothing without adapters): see `load.base_of`.
    """
    base = find_base(start, cfg)
    # A new run's first weights, or the frozen base of adapters, which checkpoints lack.
    if start.init_from and (base or not start.checkpoint):
        from weights import load  # here, since most runs do without

        path = base.get("base", start.init_from)
        if base and not start.checkpoint:
            load.warn_if_it_may_go(path)
        load.init_from(model, path)
        rank_zero_decides(partial(load.keep_generation, path, cfg.run_dir))
    if start.checkpoint:
        checkpoint.load(start.checkpoint, model, optimizer)
    return base


def find_base(start: Start, cfg: TrainConfig) -> dict:
    """The base of a run with adapters, as of `load.base_of`; nothing for another. A collective."""
    if not cfg.lora_rank:
        return {}
    from weights import load  # here, since most runs do without

    fix = "set --init_from to them"
    if start.step >= cfg.max_steps:
        fix += ", or --resume=again to train anew"
    return rank_zero_decides(partial(load.base_of, start.init_from, start.meta, fix))


# -------------------------------------------------------------------------------------------------
# The description of a run


def peak_of_all_ranks(cfg: TrainConfig, world, precision: str) -> float | None:
    """FLOP/s of all devices together; None if that of one is unknown. A collective."""
    dtype = parallel.DTYPES[precision]
    peaks = processes.together(lambda: devices.peak_flops(cfg.peak_tflops, world.device, dtype))
    return sum(peaks) if all(peaks) else None


def describe_run(model_cfg: MPTConfig, cfg: TrainConfig, world, precision, peak, dataset, start):
    """What is about to run, in eight lines; then what is unusual about it, and warnings."""
    n_params = flops.n_params(model_cfg)
    n_trained = trained_parameters(model_cfg, cfg)
    implementation = parallel.attention_of(model_cfg, world.device, precision)
    speed = f"{peak / 1e12:.4g} TFLOP/s peak" if peak else "peak unknown: set --peak_tflops for MFU"
    _, reason = devices.choose_precision(cfg, world.device, start.precision)
    mesh = cfg.sharding
    if cfg.tp > 1:
        mesh += f", tp {cfg.tp}{' + sequence parallel' * cfg.sequence_parallel}"
    rows_per_rank = cfg.global_batch_size // world.dp_size
    n_microbatches = math.ceil(rows_per_rank / cfg.microbatch_size)
    bubble = ""
    if cfg.pp > 1:
        from pipeline import bubble_share  # here, since most runs do without

        mesh += f", pp {cfg.pp}"
        bubble = f", {bubble_share(cfg.pp, n_microbatches):.0%} bubble"
    begins = f"starting from {cfg.init_from}" if cfg.init_from else "starting a new run"
    if start.checkpoint:
        begins = f"resuming from {start.checkpoint}"
    lines = [
        f"MPT of {n_params:,} parameters, {model_cfg.n_layers} layers x {model_cfg.d_model}, "
        f"{implementation} attention{', compiled blocks' * cfg.compile}",
        *describe_adapters(model_cfg, cfg, n_trained, n_params),
        f"{world.global_size} x {devices.describe(world.device)}, {mesh}, {precision} ({reason}), "
        f"{speed}",
        *describe_data(dataset, cfg),
        f"batch {cfg.global_batch_size} sequences x {model_cfg.max_seq_len} = "
        f"{world.dp_size} data-parallel ranks x {rows_per_rank} in {n_microbatches} microbatches"
        f"{bubble}",
        f"{cfg.run_dir}: {begins}",
        *notes_on_changes(cfg, start),
        planned_time(model_cfg, cfg, world, precision, peak, start.step),
        space(cfg.run_dir, n_trained, cfg.keep_last),
        *parameter_warning(model_cfg),
        *team_warning(cfg, world),
        *stage_warnings(cfg, world, n_microbatches),
        next_line(model_cfg, cfg, dataset, start),
    ]
    return "\n".join(lines)


def next_line(model_cfg: MPTConfig, cfg: TrainConfig, dataset, start) -> str:
    """What comes before the first step."""
    draws = start.seed_to_draw(cfg) is not None
    words = "initializing the weights" if draws else "reading the weights"
    if start.step > 0:
        return words
    eval_tokens = cfg.eval_tokens // len(dataset.parts)
    n_windows = sum(data.n_evaluated(part.val, eval_tokens) for part in dataset.parts)
    return f"{words}, then a first evaluation of {n_windows * model_cfg.max_seq_len:,} tokens"


def planned_time(
    model_cfg: MPTConfig, cfg: TrainConfig, world, precision: str, peak: float | None, first: int
) -> str:
    """The time of a step and of the steps from `first` on, as planning predicts it.

    Planning knows accelerators in 16 bits. For others, and for layouts that it does not know, the
    line has what one can say before the first step: see `least_time`.
    """
    device = devices.identify(world.device)
    if precision == "fp32" or device is None or not device.bf16_tflops:
        return least_time(model_cfg, cfg, world, precision, peak, first)
    from planning import answer, search  # here, since a run on a CPU does without
    from planning.fleet import Fleet

    try:
        fleet = Fleet(device, world.global_size, world.local_size)
        plan = search.evaluate(model_cfg, cfg, fleet)
        slow, fast, _ = answer.band(plan)
    except UserError:  # planning cannot split the model in this way
        return least_time(model_cfg, cfg, world, precision, peak, first)
    seconds = plan.seconds["step"]
    steps = cfg.max_steps - first
    left = [steps * seconds / factor for factor in (1, fast, slow)]
    expected, shortest, longest = map(runlog.duration, left)
    return (
        f"planned: {seconds:.3g} s a step, {expected} for {steps:,} steps, probably {shortest} to "
        f"{longest} (plan.py says why); the lines after step 1 say how much is left"
    )


def least_time(
    model_cfg: MPTConfig, cfg: TrainConfig, world, precision: str, peak: float | None, first: int
) -> str:
    """The least time of a step and of the steps from `first` on: their FLOPs at the peak.

    Where no peak is known it times a matmul, for a tenth of a second. Every rank does so at the
    same time, since they may share a machine.
    """
    dtype = parallel.DTYPES[precision]
    rate = peak or world.global_size * devices.measure_peak(world.device, dtype, seconds=0.1)
    tokens = cfg.global_batch_size * model_cfg.max_seq_len  # of a step
    flops_per_token, _ = flops.flops_of(model_cfg, train=cfg)
    seconds = tokens * flops_per_token / rate
    steps = cfg.max_steps - first
    return (
        f"time: at least {seconds:.3g} s a step, {runlog.duration(steps * seconds)} for {steps:,} "
        f"steps, since a matmul reaches {rate / 1e12:.3g} TFLOP/s; the lines after step 1 say how "
        "much is left"
    )


def space(run_dir: str, n_params: int, keep_last: int) -> str:
    """One line: the size of a checkpoint and the free disk space, with a warning if it is short.

    There must be room for keep_last checkpoints and one more: one is written before the oldest is
    removed.
    """
    run = Path(run_dir)
    size = 12 * n_params  # the fp32 weight and Adam's two fp32 moments
    free = files.free_bytes(run)
    n_needed = max(1, keep_last + 1 - len(checkpoint.complete(run / "checkpoints")))
    size_in_words = f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.3g} MB"
    line = f"{size_in_words} a checkpoint, {free / 1e9:.2f} GB free for {run_dir}"
    if n_needed * size > free:
        line += (
            f". WARNING: not enough for {n_needed} more: free some disk space, lower --keep_last, "
            "or move --run_dir"
        )
    return line


def describe_data(dataset, cfg: TrainConfig) -> list[str]:
    """The folder, its tokens, the epochs if there are several, how rows of a chat were made.

    A line for each source of a mixture.
    """
    lines = []
    for name, share, folder, train, _ in dataset.parts:
        words = train.describe_rows() if train.has_rows else f"{train.tokens:,} training tokens"
        epochs = share * cfg.max_steps * cfg.global_batch_size / len(train)
        if epochs >= 1.05:
            words += f"; the run makes {epochs:,.{1 if epochs < 10 else 0}f} epochs"
        head = f"{name}, {share:g} of the samples, " if name else ""
        lines.append(f"{head}{folder}: {words}")
    return lines


def trained_parameters(model_cfg: MPTConfig, cfg: TrainConfig) -> int:
    """The number of parameters that a run trains, and that its checkpoints hold."""
    if not cfg.lora_rank:
        return flops.n_params(model_cfg)
    import lora  # here, since most runs do without

    return sum(param.numel() for param in lora.trained_weights(model_cfg, cfg).values())


def describe_adapters(
    model_cfg: MPTConfig, cfg: TrainConfig, n_trained: int, n_params: int
) -> list[str]:
    """A line about what a run with adapters trains, none for another run."""
    if not cfg.lora_rank:
        return []
    where = ", ".join(model_cfg.adapted_layers(cfg.lora_targets))
    if cfg.lora_last_blocks:
        where += f" of the last {cfg.lora_last_blocks} blocks"
    also = f", and {cfg.lora_train}" if cfg.lora_train else ""
    share = f"{n_trained:,} parameters are trained, {n_trained / n_params:.2%} of the model's"
    return [f"{share}: adapters of rank {cfg.lora_rank} on {where}{also}"]


# -------------------------------------------------------------------------------------------------
# Notes and warnings: none, or a line or two


def team_warning(cfg: TrainConfig, world) -> list[str]:
    """If some tensor ranks of a team are on another node than the others."""
    if world.local_size % cfg.tp == 0:
        return []
    return [
        f"WARNING: tp {cfg.tp} on nodes of {world.local_size} ranks puts a team on several nodes, "
        "where each layer waits at least four times in each microbatch for the network between "
        f"them; --tp={math.gcd(cfg.tp, world.local_size)} stays within a node"
    ]


def stage_warnings(cfg: TrainConfig, world, n_microbatches: int) -> list[str]:
    """If stages have too few microbatches; and what sharding costs them."""
    lines = []
    if n_microbatches < cfg.pp:
        from pipeline import bubble_share  # here, since most runs do without

        rows_per_rank = cfg.global_batch_size // world.dp_size
        fix = f"set --global_batch_size={cfg.pp * cfg.microbatch_size * world.dp_size}"
        if rows_per_rank >= cfg.pp:
            fix = f"set --microbatch_size={rows_per_rank // cfg.pp}"
        lines.append(
            f"WARNING: {n_microbatches} microbatches never fill {cfg.pp} stages: each waits for "
            f"{bubble_share(cfg.pp, n_microbatches):.0%} of a step; {fix}"
        )
    if cfg.pp > 1 and world.dp_size > 1 and not cfg.sharding_mode.reduces_late:
        lines.append(
            f"{cfg.sharding} gathers a stage's weights in each of its {n_microbatches} "
            "microbatches; --sharding=ZERO1 does so once a step, and needs more memory"
        )
    return lines


def notes_on_changes(cfg: TrainConfig, start) -> list[str]:
    """What of optimizer and learning rate differs from the checkpoint that a run resumes from."""
    if not 0 < start.step < cfg.max_steps:
        return []
    ours = asdict(cfg)
    saved = {name: start.meta.get(name, ours[name]) for name in OPTIMIZER_SETTINGS}
    notes = []
    others = [name for name in OPTIMIZER_SETTINGS if name not in optim.RATE_SETTINGS]
    if changed := differing(others, saved, ours):
        notes.append(f"note: the checkpoint has {', '.join(changed)}")

    there = replace(cfg, **{name: saved[name] for name in optim.RATE_SETTINGS})
    last = optim.learning_rate(start.step - 1, there)
    expected = optim.learning_rate(start.step, there)
    first = optim.learning_rate(start.step, cfg)
    if f"{first:.2e}" not in (f"{last:.2e}", f"{expected:.2e}"):
        changed = ", ".join(differing(optim.RATE_SETTINGS, saved, ours))
        jump = f"the learning rate goes from {last:.2e} to {first:.2e} at step {start.step + 1}"
        notes.append(f"note: the checkpoint has {changed}: {jump}")
    return notes


def parameter_warning(model_cfg: MPTConfig) -> list[str]:
    """If the model has other parameters than flops.py and planning/memory.py count."""
    with torch.device("meta"):
        n_params = sum(param.numel() for param in MPT(model_cfg).parameters())
    planned = flops.n_params(model_cfg)
    if n_params == planned:
        return []
    return [
        f"WARNING: model.py has {n_params:,} parameters: memory, FLOPs and MFU are those of the "
        f"MPT with {planned:,}"
    ]
