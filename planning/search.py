"""The search for a layout: every way to put a model on a fleet, and the fastest that fits.

    for tp x pp, the least parallelism first      they divide heads, vocabulary, width; layers
        for every sharding mode, and every way of activation checkpointing
            for microbatches of all sequences that fit, of a half, a quarter, and of one
                bytes of a rank (memory.py), seconds of a step (step_time.py)
        if any of these fits: the fastest is the answer, and no more parallelism is tried

What a config or a flag sets is kept, what is `auto` is tried. `fastest` is asked about one fleet,
`sweep` about several, and `budget` finds the largest model that a fleet trains in so many days.
plan.py asks the questions and prints the answers.

Run `python -m planning.search configs/mpt7b.py --device=mi250 --devices=64 --sharding=auto`
for all layouts side by side. Read next: planning/picture.py.
"""

import itertools
import math
import typing
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
WIDTHS = [
    *range(32768, 8192, -1024),
    *range(8192, 4096, -512),
    *range(4096, 2048, -256),
    *range(2048, 0, -128),
]
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


@dataclass(frozen=True)
class LayoutArgs:
    """The layout. What is auto is chosen."""

    tp: int | Literal["auto"] = "auto"  # tensor parallelism
    pp: int | Literal["auto"] = "auto"  # pipeline stages
    sharding: Literal["auto", Sharding] = "auto"  # see parallel.py
    microbatch_size: int | Literal["auto"] = "auto"  # sequences
    activation_checkpointing: Literal["auto", Checkpointing] = "auto"  # see parallel.py

    def check(self) -> None:
        for name in ("tp", "pp", "microbatch_size"):
            value = getattr(self, name)
            require(value == "auto" or value > 0, f"{name} must be at least 1 or auto, not {value}")


@dataclass(frozen=True)
class Plan:
    """A model on a fleet in one layout, with what it gives."""

    m: MPTConfig
    cfg: TrainConfig
    fleet: Fleet
    seconds: dict  # of a step, by part
    bytes: dict  # of one rank at its peak, by part

    @property
    def tokens_per_second(self) -> float:
        return self.cfg.global_batch_size * self.m.max_seq_len / self.seconds["step"]

    @property
    def fits(self) -> bool:
        return self.bytes["peak"] <= memory.ROOM * self.fleet.device.memory_gb * 2**30

    @property
    def mfu(self) -> float:
        return flops.mfu(
            self.m, self.tokens_per_second, self.fleet.devices, self.fleet.device.bf16_tflops * 1e12
        )

    def hours(self, tokens: float) -> float:
        """To train on so many."""
        return tokens / self.tokens_per_second / 3600


# ---------------------------------------------------------------------------------------------------------------------
# Choosing a layout


def evaluate(m: MPTConfig, cfg: TrainConfig, fleet: Fleet, c: Constants, trainer: Trainer) -> Plan:
    """What this layout gives. UserError if it cannot be."""
    seconds = StepTime(m, cfg, fleet, c, trainer).parts()
    return Plan(
        m,
        cfg,
        fleet,
        seconds,
        memory.bytes_by_part(m, cfg, fleet.devices, "bf16", fleet.tp, fleet.pp),
    )


def divisors(n: int, at_most: int) -> list[int]:
    return [i for i in range(1, min(n, at_most) + 1) if n % i == 0]


def model_splits(
    m: MPTConfig,
    cfg: TrainConfig,
    asked: LayoutArgs,
    fleet: Fleet,
) -> list[tuple[int, int]]:
    """(tp, pp) to try, the least parallelism first. UserError if none divides model and batch."""
    n, interleave = fleet.devices, fleet.interleave
    common = math.gcd(
        m.n_kv_heads, m.vocab_size, m.hidden_dim
    )  # tensor parallelism divides them all
    tps = [asked.tp] if asked.tp != "auto" else divisors(common, fleet.node_size)
    whole = m.n_layers % interleave == 0
    require(whole, f"n_layers {m.n_layers} is not a multiple of interleave {interleave}")
    pps = [asked.pp] if asked.pp != "auto" else divisors(m.n_layers // interleave, n)
    pairs = [(t, p) for t, p in itertools.product(tps, pps) if n % (t * p) == 0]
    require(pairs, f"{n} devices are not a multiple of tp {asked.tp} x pp {asked.pp}")
    whole = [(t, p) for t, p in pairs if cfg.global_batch_size % (n // (t * p)) == 0]
    require(
        whole,
        f"global_batch_size {cfg.global_batch_size} is not a multiple of the data-parallel ranks on {n} devices",
    )
    return sorted(whole, key=lambda pair: (pair[0] * pair[1], pair[1]))


def layouts(m: MPTConfig, cfg: TrainConfig, asked: LayoutArgs, fleet: Fleet):
    """Configs to try: every sharding and way of checkpointing that is left open, with microbatches that fit."""
    node = max(1, fleet.node_size // fleet.tp)  # data-parallel ranks of a node
    several = fleet.dp > node and fleet.dp % node == 0  # nodes, each of which can hold a copy
    every = [mode for mode, facts in SHARDING_MODES.items() if several or facts.over != "group"]
    if fleet.pp > 1:  # gathers for each microbatch of a pipeline cost too much
        every = [mode for mode in every if SHARDING_MODES[mode].reduces_late]
    for mode in every if asked.sharding == "auto" else [asked.sharding]:
        in_groups = SHARDING_MODES[mode].over == "group"
        shard_size = (cfg.shard_size or min(node, fleet.dp)) if in_groups else 0
        fixed = asked.activation_checkpointing
        for way in typing.get_args(Checkpointing) if fixed == "auto" else [fixed]:
            one = replace(cfg, sharding=mode, shard_size=shard_size, activation_checkpointing=way)
            if asked.microbatch_size != "auto":
                yield replace(one, microbatch_size=asked.microbatch_size)
                continue
            most = memory.largest_microbatch(
                m, one, fleet.device, fleet.devices, "bf16", fleet.tp, fleet.pp
            )
            yield from (
                replace(one, microbatch_size=b) for b in {most, most // 2, most // 4, 1} if b > 0
            )


def plans(
    m: MPTConfig,
    cfg: TrainConfig,
    asked: LayoutArgs,
    fleet: Fleet,
    c: Constants,
    trainer: Trainer,
):
    """For each degree tp x pp, the least first: a list of plans, one of every layout."""
    splits = model_splits(m, cfg, asked, fleet)
    for _, alike in itertools.groupby(splits, key=lambda pair: pair[0] * pair[1]):
        fleets = [replace(fleet, tp=tp, pp=pp) for tp, pp in alike]
        tried = [(one, at) for at in fleets for one in layouts(m, cfg, asked, at)]
        yield [evaluate(m, one, at, c, trainer) for one, at in tried]


def fastest(
    m: MPTConfig,
    cfg: TrainConfig,
    asked: LayoutArgs,
    fleet: Fleet,
    c: Constants,
    trainer: Trainer,
) -> Plan:
    """The fastest layout on `fleet` that fits, with the least tp x pp. Where all is fixed, that, though it may not fit.
    UserError if nothing fits."""
    left_open = "auto" in vars(asked).values()
    for found in plans(m, cfg, asked, fleet, c, trainer):
        found = [one for one in found if one.fits or not left_open]
        if found:
            return max(found, key=lambda one: one.tokens_per_second)
    raise UserError(
        f"{flops.n_params(m) / 1e9:.3g}B parameters fit {fleet.devices} x {fleet.device.name} in no layout that was "
        "left open: take more --devices, a shorter --max_seq_len, or --choose"
    )


# ---------------------------------------------------------------------------------------------------------------------
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
    """Strong scaling (the global batch stays) and weak (it grows with the devices) from the smallest count."""
    rows, first = [], min(counts)
    for n in sorted(counts):
        strong = fastest(m, cfg, asked, replace(fleet, devices=n), c, trainer)
        larger = replace(cfg, global_batch_size=cfg.global_batch_size * n // first)
        weak = fastest(m, larger, asked, strong.fleet, c, trainer)
        rates = [one.tokens_per_second / n for one in (strong, weak)]
        base = rows[0]["rates"] if rows else rates
        rows.append({"devices": n, "strong": strong, "weak": weak, "rates": rates})
        rows[-1]["efficiency"] = [rate / before for rate, before in zip(rates, base, strict=True)]
    return rows


def shape(d_model: int, m: MPTConfig) -> MPTConfig:
    """A model of MPT's proportions: heads of 128, and layers between those of MPT's next sizes."""
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
    """The largest model that sees 20 tokens a parameter within `days`: Chinchilla's optimum
    (2203.15556).

    Not all widths can be split over the devices, so the widths are tried from the largest down. UserError if there is
    none.
    """
    rate, trouble = (
        fleet.devices * fleet.device.bf16_tflops * 1e12 * 86400,
        None,
    )  # FLOPs a day at MFU 100 %
    for width in WIDTHS:
        one = shape(width, m)
        tokens = TOKENS_PER_PARAMETER * flops.n_params(one)
        if 6 * tokens * flops.n_params(one) > days * rate:
            continue
        try:
            found = fastest(one, cfg, asked, fleet, c, trainer)
        except UserError as error:  # of the smallest model that was tried
            trouble = error
            continue
        if found.hours(tokens) / 24 <= days:
            return found
        trouble = None
    where = f"{fleet.devices} x {fleet.device.name}"
    raise trouble or UserError(f"{days:g} days on {where} are too few for any model")


# ---------------------------------------------------------------------------------------------------------------------
# The program


def table(found: list[Plan]) -> str:
    """The fastest first."""
    head = f"{'tokens/s':>12}{'MFU':>8}{'memory':>9}"
    lines = [f"{head}  tp  pp  microbatch  checkpointing  sharding"]
    for one in sorted(found, key=lambda one: -one.tokens_per_second):
        share = one.bytes["peak"] / (one.fleet.device.memory_gb * 2**30)
        line = f"{one.tokens_per_second:>12,.0f}{one.mfu:>8.1%}{share:>9.0%}"
        line += f"{one.fleet.tp:>4}{one.fleet.pp:>4}{one.cfg.microbatch_size:>12}"
        line += f"  {one.cfg.activation_checkpointing:<13}  {one.cfg.sharding}"
        lines.append(line if one.fits else f"{line}  DOES NOT FIT")
    return "\n".join(lines)


def main(argv: list[str]) -> None:
    m, cfg, asked, args = config.load(argv, MPTConfig, TrainConfig, LayoutArgs, FleetArgs)
    fleet = Fleet(devices.by_name(args.device), args.devices, args.node_size, args.network)
    for found in plans(m, cfg, asked, fleet, Constants(), step_time.OURS):
        if any(one.fits for one in found):
            break
    print(f"{flops.n_params(m) / 1e9:.3g}B parameters, {args.devices} x {fleet.device.name}\n")
    print(table(found))


if __name__ == "__main__":
    config.run(main)
