"""The search for a layout: all ways to put a model on a fleet, and the fastest that fits.

    for tp x pp                                    tp divides heads, pp is at most the layers
        for every sharding mode                    with tp also: sequence parallel or not
            for every way to recompute             nothing, or every k-th block, selective or full
                for every microbatch               1 sequence to all rows of a rank
                    seconds of a step (step_time.py), bytes of a rank (memory.py)

All layouts are rated, in some microseconds each, and sorted. The first that fit are the answer.

What a config file or a flag sets is kept, what is `auto` is tried. `best` has the fastest splits of
one fleet, `what_fits` what would fit it if nothing does. budget.py asks for several fleets and
models, plan.py prints the answers.
"""

import copy
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import flops
from config import SHARDING_MODES, Checkpointing, Int, MPTConfig, Sharding, TrainConfig, stage_sizes
from planning import memory, step_time
from planning.fleet import Fleet
from planning.step_time import Constants, StepTime
from program import UserError

# The settings of a layout that are chosen if they are auto.
OPEN = """tp pp sharding microbatch_size activation_checkpointing recompute_every
    sequence_parallel""".split()
RECOMPUTE_EVERY = (4, 2, 1)  # those that are tried
MICROBATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)  # and all rows at once
MOST_DEVICES = 2**17  # of a fleet on which a model might fit

Auto = Literal["auto"]
AutoSharding = Literal[Auto, Sharding]
AutoCheckpointing = Literal[Auto, Checkpointing]


@dataclass(frozen=True)
class LayoutArgs:
    """The layout. What is auto is chosen."""

    tp: Int[1, 2**16] | Auto = "auto"  # tensor-parallel ranks
    pp: Int[1, 2**16] | Auto = "auto"  # pipeline stages
    sharding: AutoSharding = "auto"  # see parallel.py
    microbatch_size: Int[1, 10**6] | Auto = "auto"  # sequences
    activation_checkpointing: AutoCheckpointing = "auto"  # see parallel.py
    recompute_every: Int[1, 10**4] | Auto = "auto"  # every k-th block; chosen if the mode is
    sequence_parallel: bool | Auto = "auto"  # with tp: cut the tokens between layers, too

    @property
    def is_open(self) -> bool:
        """Is anything left to choose, beside what is chosen only if something else is?"""
        others = self.sharding, self.microbatch_size, self.activation_checkpointing
        return "auto" in (self.tp, self.pp, *others)


@dataclass(frozen=True)
class Question:
    """A model to train on a fleet: what is set of its layout, and what is asked for."""

    m: MPTConfig
    cfg: TrainConfig
    asked: LayoutArgs
    fleet: Fleet
    c: Constants = Constants()


@dataclass(frozen=True)
class Plan:
    """A model on a fleet in one layout, with its predicted seconds and bytes."""

    m: MPTConfig
    cfg: TrainConfig
    fleet: Fleet
    seconds: dict  # of a step: {part: seconds}, see StepTime.parts
    bytes: dict  # of one rank at its peak: {part: bytes}, see memory.bytes_by_part

    @property
    def dp(self) -> int:
        """Data-parallel ranks."""
        return dp_of(self.cfg, self.fleet)

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
        return self.bytes["peak"] <= room(self.fleet)

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization, 0 to 1."""
        peak = self.fleet.device.bf16_tflops * 1e12
        per_token, _ = flops.flops_of(self.m, train=self.cfg)
        return flops.utilization(per_token, self.tokens_per_second, self.fleet.devices, peak)


def evaluate(m: MPTConfig, cfg: TrainConfig, fleet: Fleet, c: Constants | None = None) -> Plan:
    """The plan of this layout. Raises UserError if it is impossible."""
    seconds = StepTime(m, cfg, fleet, c or Constants()).parts()
    return Plan(m, cfg, fleet, seconds, memory.bytes_by_part(m, cfg, fleet.devices))


def dp_of(cfg: TrainConfig, fleet: Fleet) -> int:
    """Data-parallel ranks."""
    return fleet.devices // (cfg.tp * cfg.pp)


def room(fleet: Fleet) -> float:
    """Bytes of a device that tensors may fill."""
    return memory.ROOM * fleet.device.memory_gb * 2**30


# --------------------------------------------------------------------------------------------------
# What can be tried


def model_splits(q: Question) -> list[tuple[int, int]]:
    """(tp, pp) to try, the smallest tp x pp first: tensor ranks are within a node."""
    ranks_of_node = min(q.fleet.node_size, q.fleet.devices)
    tps = [tp for tp in q.m.tensor_ranks if ranks_of_node % tp == 0]
    pps = range(1, q.m.n_layers + 1)
    if q.asked.tp != "auto":
        tps = [q.asked.tp]
    if q.asked.pp != "auto":
        pps = [q.asked.pp]
    splits = itertools.product(tps, pps)
    return sorted(splits, key=lambda split: (split[0] * split[1], split[1]))


def sequence_choices(q: Question, tp: int) -> list[bool]:
    """The sequence_parallel to try."""
    if tp == 1:
        return [False]
    asked = q.asked.sequence_parallel
    if asked != "auto":
        return [asked]
    return [False, True] if q.asked.is_open else [False]


def shardings(q: Question, tp: int, pp: int) -> list[Sharding]:
    """The shardings to try. On one node a group would be FULL_SHARD."""
    if q.asked.sharding != "auto":
        return [q.asked.sharding]
    dp = q.fleet.devices // (tp * pp)
    if dp == 1:
        return [TrainConfig.sharding]
    has_groups = dp > max(1, q.fleet.node_size // tp)
    return [name for name, mode in SHARDING_MODES.items() if has_groups or mode.over != "group"]


def recomputations(q: Question, pp: int) -> list[tuple[Checkpointing, int]]:
    """(activation_checkpointing, recompute_every) to try. All stages recompute as much."""
    mode, every = q.asked.activation_checkpointing, q.asked.recompute_every
    if mode != "auto":
        return [(mode, 1 if every == "auto" else every)]
    everys = [every]
    if every == "auto":
        sizes = stage_sizes(q.m.n_layers, pp)
        even = [k for k in RECOMPUTE_EVERY if pp == 1 or all(n % k == 0 for n in sizes)]
        everys = [k for k in even if k <= q.m.n_layers]
    return [("none", everys[-1]), *itertools.product(["selective", "full"], everys)]


def splits_of(q: Question) -> list[TrainConfig]:
    """Every possible tp, pp, sharding and sequence parallelism, the smallest tp x pp first.

    Raises UserError if there is none: what is wrong with the first.
    """
    found, problems = [], []
    for tp, pp in model_splits(q):
        choices = itertools.product(shardings(q, tp, pp), sequence_choices(q, tp))
        for sharding, sequence_parallel in choices:
            split = {"tp": tp, "pp": pp, "sharding": sharding}
            cfg = replace(q.cfg, **split, sequence_parallel=sequence_parallel)
            cfg = step_time.with_shard_size(cfg, q.fleet)
            try:
                q.fleet.check_split(tp, pp)
                memory.layout(q.m, cfg, q.fleet.devices)
                found.append(cfg)
            except UserError as error:
                problems.append(error)
    if not found:
        raise problems[0]
    return found


def layouts(q: Question, split: TrainConfig, ends=False) -> Iterator[TrainConfig]:
    """Every recomputation and microbatch of a split. ends: only the first and the last of each."""
    ways = recomputations(q, split.pp)
    sizes = [q.asked.microbatch_size]
    if q.asked.microbatch_size == "auto":
        rows = split.global_batch_size // dp_of(split, q.fleet)  # sequences of a rank
        sizes = [size for size in MICROBATCHES if size < rows] + [rows]
    if ends:
        ways, sizes = {ways[-1], ways[0]}, {sizes[0], sizes[-1]}
    for way, size in itertools.product(ways, sizes):
        layout = copy.copy(split)  # a tenth of the time of dataclasses.replace
        layout.activation_checkpointing, layout.recompute_every = way
        layout.microbatch_size = size
        yield layout


# --------------------------------------------------------------------------------------------------
# The search


def best(q: Question, n: int = 1) -> list[Plan]:
    """The n fastest tp, pp and sharding that fit, each with the fastest of all else.

    A layout of which nothing is left open is the answer whether it fits or not. Raises UserError if
    nothing fits.
    """
    splits = splits_of(q)
    if not q.asked.is_open:
        (layout,) = layouts(q, *splits)
        return [evaluate(q.m, layout, q.fleet, q.c)]
    possible = [split for split in splits if can_fit(q, split)]
    if not possible:
        raise UserError(nothing_fits(q, splits))

    rated = []
    for split in possible:
        for layout in layouts(q, split):
            rated.append((step_time.tokens_per_second(q.m, layout, q.fleet, q.c), layout))
    rated.sort(key=lambda layout: -layout[0])

    found = {}
    for _, layout in rated:
        key = layout.tp, layout.pp, layout.sharding
        if key not in found and memory.fits(q.m, layout, q.fleet.devices, room(q.fleet)):
            found[key] = evaluate(q.m, layout, q.fleet, q.c)
            if len(found) == n:
                break
    return list(found.values())


def fastest(q: Question) -> Plan:
    """The first of `best`."""
    return best(q)[0]


def can_fit(q: Question, split: TrainConfig) -> bool:
    """Does any layout of a split fit? The one of the least memory is among the ends.

    All rows at once may take less than one sequence at a time: no gradients wait for other
    microbatches. To recompute nothing may take less than all, where a stage has one block.
    """
    ends = layouts(q, split, ends=True)
    return any(memory.fits(q.m, layout, q.fleet.devices, room(q.fleet)) for layout in ends)


# --------------------------------------------------------------------------------------------------
# What does not fit


def too_much(n_bytes: dict, memory_gb: float) -> str:
    """By how much a plan's bytes do not fit a device of so many GiB, and what takes the most."""
    limit = memory.ROOM * memory_gb * 2**30
    parts = {name: n for name, n in n_bytes.items() if name not in ("peak", "moment")}
    largest = max(parts, key=parts.get)
    over = f"{(n_bytes['peak'] - limit) / 1e9:,.1f} GB more than the {limit / 1e9:,.1f} GB of room"
    return f"{over}; the largest part is {largest}, {parts[largest] / 1e9:,.1f} GB"


def nothing_fits(q: Question, splits: list[TrainConfig]) -> str:
    """The message: how far the smallest layout is from fitting, and what would fit."""
    ends = [layout for split in splits for layout in layouts(q, split, ends=True)]
    peaks = [memory.bytes_by_part(q.m, layout, q.fleet.devices)["peak"] for layout in ends]
    plan = evaluate(q.m, ends[peaks.index(min(peaks))], q.fleet)
    size = f"{flops.n_params(q.m) / 1e9:.3g}B parameters"
    problem = f"{size} do not fit {q.fleet.devices} x {q.fleet.device.name} in any layout you allow"
    over = too_much(plan.bytes, plan.fleet.device.memory_gb)
    least = f"the smallest ({layout_text(plan)}) takes {over}"
    fix = what_fits(q) or "a smaller model or a shorter --max_seq_len"
    return f"{problem}: {least}. What would fit: {fix}"


def what_fits(q: Question) -> str:
    """The flags that must change so that some layout fits, on as few devices as it takes.

    Twice the devices are tried, four times, ..., with a larger batch if it must be: first with what
    was asked, then with all left open. "" if the model does not fit MOST_DEVICES.
    """
    n, batch = q.fleet.devices, q.cfg.global_batch_size
    own = {"devices": n, "global_batch_size": batch, **vars(q.asked)}
    own = {name: value for name, value in own.items() if value != "auto"}
    while n <= MOST_DEVICES:
        cfg = replace(q.cfg, global_batch_size=batch)
        for asked in (q.asked, LayoutArgs()):
            wider = replace(q, asked=asked, cfg=cfg, fleet=replace(q.fleet, devices=n))
            if fits_somehow(wider):
                found = {"devices": n, **vars(fastest(wider).cfg)}
                changed = [name for name in own if found[name] != own[name]]
                return " ".join(f"--{name}={found[name]}" for name in changed)
        n *= 2
        batch = math.ceil(batch / n) * n
    return ""


def fits_somehow(q: Question) -> bool:
    """Does any layout fit? No if the fleet cannot split the model or the batch."""
    try:
        return any(can_fit(q, split) for split in splits_of(q))
    except UserError:
        return False


def layout_text(plan: Plan) -> str:
    """A layout in a few words: dp, tp and pp, sharding, checkpointing, microbatch."""
    cfg = plan.cfg
    split = f"dp {plan.dp}"
    if cfg.tp > 1:
        split += f" tp {cfg.tp}{' (sequence parallel)' * cfg.sequence_parallel}"
    if cfg.pp > 1:
        split += f" pp {cfg.pp}"
    mode = cfg.activation_checkpointing
    checkpointing = f"{'no' if mode == 'none' else mode} checkpointing"
    if mode != "none" and cfg.recompute_every > 1:
        checkpointing += f" of 1 block in {cfg.recompute_every}"
    return f"{split} {cfg.sharding}, {checkpointing}, microbatch {cfg.microbatch_size}"
