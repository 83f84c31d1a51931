"""The search for a layout: all ways to put a model on a fleet, and the fastest that fits.

    for tp x pp, the smallest product first        tp divides heads, pp is at most the layers
        for every sharding mode and every activation checkpointing mode
            for microbatches of all sequences that fit, a half, a quarter, and one
                bytes of a rank (memory.py), seconds of a step (step_time.py)
        if any of these fits: the fastest is the answer; a larger tp x pp is not tried

What a config file or a flag sets is kept, what is `auto` is tried. `fastest` searches one fleet,
`sweep` several, and `budget` finds the largest model that a fleet can train in a number of days.
plan.py asks the questions and prints the answers.

Run `python -m planning.search configs/mpt7b.py --device=mi250 --devices=64 --sharding=auto`
to see all layouts side by side.
"""

import itertools
import typing
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import config
import devices
import flops
from config import (
    SHARDING_MODES,
    Checkpointing,
    MPTConfig,
    Sharding,
    TrainConfig,
    UserError,
    require,
)
from planning import memory, step_time
from planning.step_time import Constants, Fleet, FleetArgs, StepTime, Trainer

TOKENS_PER_PARAMETER = 20  # Chinchilla (arXiv 2203.15556)

# The widths that `budget` tries, the largest first.
WIDTHS = [
    *range(32768, 8192, -1024),
    *range(8192, 4096, -512),
    *range(4096, 2048, -256),
    *range(2048, 0, -128),
]
# {d_model: n_layers} of MPT's sizes, and of larger models of these proportions.
SIZES = {
    128: 12,
    768: 12,
    1024: 24,
    2048: 24,
    2560: 32,
    4096: 32,
    5120: 40,
    7168: 48,
    8192: 80,
    12288: 96,
    32768: 160,
}

AutoInt = int | Literal["auto"]
AutoSharding = Literal["auto", Sharding]
AutoCheckpointing = Literal["auto", Checkpointing]


@dataclass(frozen=True)
class LayoutArgs:
    """The layout. What is auto is chosen."""

    tp: AutoInt = "auto"  # tensor-parallel ranks
    pp: AutoInt = "auto"  # pipeline stages
    sharding: AutoSharding = "auto"  # see parallel.py
    microbatch_size: AutoInt = "auto"  # sequences
    activation_checkpointing: AutoCheckpointing = "auto"  # see parallel.py

    def check(self) -> None:
        """UserError if a number is out of range."""
        for name in ("tp", "pp", "microbatch_size"):
            value = getattr(self, name)
            require(value == "auto" or value > 0, f"{name} must be at least 1 or auto, not {value}")


@dataclass(frozen=True)
class Plan:
    """A model on a fleet in one layout, with its predicted seconds and bytes."""

    m: MPTConfig
    cfg: TrainConfig
    fleet: Fleet
    seconds: dict  # of a step: {part: seconds}, see StepTime.parts
    bytes: dict  # of one rank at its peak: {part: bytes}, see memory.bytes_by_part

    @property
    def tokens_per_second(self) -> float:
        """Of all devices together."""
        return self.cfg.global_batch_size * self.m.max_seq_len / self.seconds["step"]

    @property
    def share_of_memory(self) -> float:
        """The peak / the memory of a device."""
        return self.bytes["peak"] / (self.fleet.device.memory_gb * 2**30)

    @property
    def fits(self) -> bool:
        """Does a rank's peak fit into `memory.ROOM` of its device?"""
        return self.bytes["peak"] <= memory.ROOM * self.fleet.device.memory_gb * 2**30

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization, 0 to 1."""
        peak = self.fleet.device.bf16_tflops * 1e12
        return flops.mfu(self.m, self.tokens_per_second, self.fleet.devices, peak)

    def hours(self, tokens: float) -> float:
        """Hours of training on this many tokens."""
        return tokens / self.tokens_per_second / 3600


# --------------------------------------------------------------------------------------------------
# Choosing a layout. Functions share these arguments: asked is what the user set, c and trainer are
# those of step_time.py.


def evaluate(m: MPTConfig, cfg: TrainConfig, fleet: Fleet, c: Constants, trainer: Trainer) -> Plan:
    """The plan of this layout. Raises UserError if it is impossible."""
    seconds = StepTime(m, cfg, fleet, c, trainer).parts()
    n_bytes = memory.bytes_by_part(m, cfg, fleet.devices)
    return Plan(m, cfg, fleet, seconds, n_bytes)


def tensor_ranks(m: MPTConfig, cfg: TrainConfig, fleet: Fleet) -> list[int]:
    """The tp to try: teams within a node."""
    possible = [tp for tp in m.tensor_ranks if tp <= fleet.node_size]
    if cfg.sequence_parallel:
        possible = [tp for tp in possible if m.max_seq_len % tp == 0]
    return possible


def stages(m: MPTConfig, fleet: Fleet) -> list[int]:
    """The pp to try. Interleaved pieces must be equal."""
    most = m.n_layers // fleet.interleave
    possible = [pp for pp in range(1, most + 1) if fleet.devices % pp == 0]
    if fleet.interleave > 1:
        possible = [pp for pp in possible if m.n_layers % (pp * fleet.interleave) == 0]
    return possible


def model_splits(
    m: MPTConfig, cfg: TrainConfig, asked: LayoutArgs, fleet: Fleet
) -> list[tuple[int, int]]:
    """(tp, pp) to try, the smallest tp x pp first.

    Raises UserError if none divides the model and the batch.
    """
    n, interleave = fleet.devices, fleet.interleave
    divides = m.n_layers % interleave == 0
    require(divides, f"n_layers {m.n_layers} is not a multiple of interleave {interleave}")
    if asked.pp != "auto":
        m.check_stages(asked.pp)

    tps = [asked.tp] if asked.tp != "auto" else tensor_ranks(m, cfg, fleet)
    pps = [asked.pp] if asked.pp != "auto" else stages(m, fleet)
    splits = [(tp, pp) for tp, pp in itertools.product(tps, pps) if n % (tp * pp) == 0]
    require(splits, f"{n} devices are not a multiple of tp {asked.tp} x pp {asked.pp}")

    batch = cfg.global_batch_size
    splits = [(tp, pp) for tp, pp in splits if batch % (n // (tp * pp)) == 0]
    dp_ranks = f"data-parallel ranks on {n} devices"
    require(splits, f"global_batch_size {batch} is not a multiple of the {dp_ranks}")
    return sorted(splits, key=lambda split: (split[0] * split[1], split[1]))


def sharding_modes(asked: LayoutArgs, fleet: Fleet) -> list[str]:
    """The sharding modes to try."""
    if asked.sharding != "auto":
        return [asked.sharding]
    per_node = dp_ranks_per_node(fleet)
    several_nodes = fleet.dp > per_node and fleet.dp % per_node == 0
    chosen = []
    for name, mode in SHARDING_MODES.items():
        if mode.over == "group" and not several_nodes:  # one group would be FULL_SHARD
            continue
        if fleet.pp > 1 and not mode.reduces_late:
            continue  # gathers for each microbatch of a pipeline cost too much
        chosen.append(name)
    return chosen


def dp_ranks_per_node(fleet: Fleet) -> int:
    """Data-parallel ranks of a node, at least 1."""
    return max(1, fleet.node_size // fleet.tp)


def layouts(
    m: MPTConfig, cfg: TrainConfig, asked: LayoutArgs, fleet: Fleet
) -> Iterator[TrainConfig]:
    """Configs to try on this fleet: all that is left open, with microbatches that fit."""
    fixed = asked.activation_checkpointing
    checkpointing_modes = typing.get_args(Checkpointing) if fixed == "auto" else [fixed]
    for sharding in sharding_modes(asked, fleet):
        shard_size = 0
        if SHARDING_MODES[sharding].over == "group":
            shard_size = cfg.shard_size or min(dp_ranks_per_node(fleet), fleet.dp)
        for checkpointing in checkpointing_modes:
            layout = replace(
                cfg,
                sharding=sharding,
                shard_size=shard_size,
                activation_checkpointing=checkpointing,
            )
            for size in microbatch_sizes(m, layout, asked, fleet):
                yield replace(layout, microbatch_size=size)


def microbatch_sizes(m: MPTConfig, cfg: TrainConfig, asked: LayoutArgs, fleet: Fleet) -> list[int]:
    """The microbatches to try: what fits, a half and a quarter of it, and one sequence."""
    if asked.microbatch_size != "auto":
        return [asked.microbatch_size]
    most = memory.largest_microbatch(m, cfg, fleet.device, fleet.devices)
    return [size for size in {most, most // 2, most // 4, 1} if size > 0]


def plans(
    m: MPTConfig, cfg: TrainConfig, asked: LayoutArgs, fleet: Fleet, c: Constants, trainer: Trainer
) -> Iterator[list[Plan]]:
    """For each product tp x pp, the smallest first: the plans of all its layouts."""
    splits = model_splits(m, cfg, asked, fleet)
    for _, same_product in itertools.groupby(splits, key=lambda split: split[0] * split[1]):
        found = []
        for tp, pp in same_product:
            split_fleet = replace(fleet, tp=tp, pp=pp)
            in_sequence = cfg.sequence_parallel and tp > 1
            split_cfg = replace(cfg, tp=tp, pp=pp, sequence_parallel=in_sequence)
            for layout in layouts(m, split_cfg, asked, split_fleet):
                found.append(evaluate(m, layout, split_fleet, c, trainer))
        yield found


def fastest(
    m: MPTConfig, cfg: TrainConfig, asked: LayoutArgs, fleet: Fleet, c: Constants, trainer: Trainer
) -> Plan:
    """The fastest layout on `fleet` that fits, with the smallest tp x pp.

    If the user has set everything, the only layout, whether it fits or not. Raises UserError if
    nothing fits.
    """
    left_open = "auto" in vars(asked).values()
    for found in plans(m, cfg, asked, fleet, c, trainer):
        candidates = [plan for plan in found if plan.fits or not left_open]
        if candidates:
            return max(candidates, key=lambda plan: plan.tokens_per_second)
    size = f"{flops.n_params(m) / 1e9:.3g}B parameters"
    raise UserError(
        f"{size} fit {fleet.devices} x {fleet.device.name} in no layout that your settings allow: "
        "take more --devices, a shorter --max_seq_len, or --choose"
    )


# --------------------------------------------------------------------------------------------------
# Sweep and budget


def sweep(
    m: MPTConfig,
    cfg: TrainConfig,
    counts: list[int],
    asked: LayoutArgs,
    fleet: Fleet,
    c: Constants,
    trainer: Trainer,
) -> list[dict]:
    """Strong scaling (the same global batch) and weak (it grows with the devices) over `counts`.

    One row for each number of devices: {"devices", "strong": Plan, "weak": Plan, "rates",
    "efficiency"}. The last two are pairs, strong and weak: tokens/s of one device, and its ratio to
    that of the smallest fleet.
    """
    rows = []
    smallest = min(counts)
    for n in sorted(counts):
        strong = fastest(m, cfg, asked, replace(fleet, devices=n), c, trainer)
        larger_batch = replace(cfg, global_batch_size=cfg.global_batch_size * n // smallest)
        weak = fastest(m, larger_batch, asked, strong.fleet, c, trainer)

        rates = [strong.tokens_per_second / n, weak.tokens_per_second / n]
        first_rates = rows[0]["rates"] if rows else rates
        efficiency = [rate / first for rate, first in zip(rates, first_rates, strict=True)]
        row = {"devices": n, "strong": strong, "weak": weak}
        rows.append({**row, "rates": rates, "efficiency": efficiency})
    return rows


def shape(d_model: int, m: MPTConfig) -> MPTConfig:
    """`m` with this width and MPT's proportions.

    Heads are 128 wide; the layers are interpolated between the nearest of SIZES.
    """
    below = max(width for width in SIZES if width <= d_model)
    above = min(width for width in SIZES if width >= d_model)
    share = (d_model - below) / (above - below) if above > below else 0
    layers = round(SIZES[below] + share * (SIZES[above] - SIZES[below]))
    return replace(m, d_model=d_model, n_heads=d_model // 128, kv_n_heads=None, n_layers=layers)


def budget(
    m: MPTConfig,
    cfg: TrainConfig,
    days: float,
    asked: LayoutArgs,
    fleet: Fleet,
    c: Constants,
    trainer: Trainer,
) -> Plan:
    """The largest model that trains on 20 tokens a parameter within `days`.

    That is Chinchilla's optimum (2203.15556). Some widths cannot be split over the devices, so all
    are tried, from the largest down. Raises UserError if there is none.
    """
    flops_per_day = fleet.devices * fleet.device.bf16_tflops * 1e12 * 86400  # at an MFU of 100 %
    error_of_smallest = None
    for width in WIDTHS:
        model = shape(width, m)
        n = flops.n_params(model)
        tokens = TOKENS_PER_PARAMETER * n
        if 6 * tokens * n > days * flops_per_day:
            continue
        try:
            plan = fastest(model, cfg, asked, fleet, c, trainer)
        except UserError as error:
            error_of_smallest = error
            continue
        if plan.hours(tokens) / 24 <= days:
            return plan
        error_of_smallest = None
    too_few = f"{days:g} days on {fleet.devices} x {fleet.device.name} are too few for any model"
    raise error_of_smallest or UserError(too_few)


# --------------------------------------------------------------------------------------------------
# The program


def table(found: list[Plan]) -> str:
    """The table of the plans, the fastest first, as text."""
    head = f"{'tokens/s':>12}{'MFU':>8}{'memory':>9}"
    lines = [f"{head}  tp  pp  microbatch  checkpointing  sharding"]
    for plan in sorted(found, key=lambda plan: -plan.tokens_per_second):
        line = f"{plan.tokens_per_second:>12,.0f}{plan.mfu:>8.1%}{plan.share_of_memory:>9.0%}"
        line += f"{plan.fleet.tp:>4}{plan.fleet.pp:>4}{plan.cfg.microbatch_size:>12}"
        line += f"  {plan.cfg.activation_checkpointing:<13}  {plan.cfg.sharding}"
        lines.append(line if plan.fits else f"{line}  DOES NOT FIT")
    return "\n".join(lines)


def main(argv: list[str]) -> None:
    """Print the layouts for the config files and flags in argv, with the smallest tp x pp."""
    m, cfg, asked, args = config.load(argv, MPTConfig, TrainConfig, LayoutArgs, FleetArgs)
    fleet = Fleet(devices.by_name(args.device), args.devices, args.node_size, args.network)
    for found in plans(m, cfg, asked, fleet, Constants(), step_time.OURS):
        if any(plan.fits for plan in found):
            break
    print(f"{flops.n_params(m) / 1e9:.3g}B parameters, {args.devices} x {fleet.device.name}\n")
    print(table(found))


if __name__ == "__main__":
    config.run(main)
