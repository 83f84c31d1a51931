"""The search for a layout: all ways to put a model on a fleet, and the fastest that fits.

    for tp x pp                                    tp divides heads, pp is at most the layers
        for every sharding mode                    with tp also: sequence parallel or not
            for every way to recompute             nothing, or every k-th block, selective or full
                for every microbatch               1 sequence to all rows of a rank
                    bytes of a rank (memory.py), seconds of a step (step_time.py)

That is up to two hundred thousand layouts. Most are never looked at, since

    a split that does not fit with one sequence and all recomputed does not fit at all
    a split is at most as fast as it would be if memory had no limit: the promising ones come first,
        and the search ends once no split that is left can beat the n fastest found
    more recomputation costs time, so it is worth a look only if a larger microbatch fits with it

What a config file or a flag sets is kept, what is `auto` is tried. Interleaved stages are as the
user sets them. `best` has the fastest splits of one fleet, `what_fits` what would fit it if nothing
does. budget.py asks for several fleets and models, plan.py prints the answers.

Run `python -m planning.search configs/mpt7b.py --device=mi250 --devices=64 --sharding=auto`
to see all splits side by side.
"""

import bisect
import copy
import functools
import itertools
import math
from dataclasses import dataclass, replace
from typing import Literal

import config
import flops
from config import (
    SHARDING_MODES,
    Checkpointing,
    MPTConfig,
    Sharding,
    TrainConfig,
    UserError,
    require,
    stage_sizes,
)
from planning import matmuls, memory, step_time
from planning.fleet import Fleet, FleetArgs, fleet_of
from planning.step_time import Constants, StepTime, Trainer

# The settings of a layout that are chosen if they are auto.
OPEN = """tp pp sharding microbatch_size activation_checkpointing recompute_every
    sequence_parallel""".split()
NOT_ALONE = ("recompute_every", "sequence_parallel")  # chosen if another is, or if set auto
RECOMPUTE_EVERY = (8, 6, 5, 4, 3, 2, 1)  # those that are tried
MOST_DEVICES = 2**17  # of a fleet on which a model might fit

AutoInt = int | Literal["auto"]
AutoBool = bool | Literal["auto"]
AutoSharding = Literal["auto", Sharding]
AutoCheckpointing = Literal["auto", Checkpointing]
Recomputation = tuple[Checkpointing, int]  # activation_checkpointing, recompute_every


@dataclass(frozen=True)
class LayoutArgs:
    """The layout. What is auto is chosen."""

    tp: AutoInt = "auto"  # tensor-parallel ranks
    pp: AutoInt = "auto"  # pipeline stages
    sharding: AutoSharding = "auto"  # see parallel.py
    microbatch_size: AutoInt = "auto"  # sequences
    activation_checkpointing: AutoCheckpointing = "auto"  # see parallel.py
    recompute_every: AutoInt = "auto"  # of every k-th block; chosen if the mode is, or if set auto
    sequence_parallel: AutoBool = "auto"  # with tp: cut the tokens between layers, too
    simplest: bool = False  # the least tensor and pipeline parallelism with which the model fits

    @property
    def is_open(self) -> bool:
        """Is anything left to choose, beside what is chosen only if something else is?"""
        return any(getattr(self, name) == "auto" for name in OPEN if name not in NOT_ALONE)


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
        return self.bytes["peak"] <= room(self.fleet)

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization, 0 to 1."""
        peak = self.fleet.device.bf16_tflops * 1e12
        per_token = matmuls.flops_of_run(self.m, self.cfg)
        return flops.utilization(per_token, self.tokens_per_second, self.fleet.devices, peak)

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


def tensor_ranks(m: MPTConfig, asked: LayoutArgs, fleet: Fleet) -> list[int]:
    """The tp to try: groups of ranks within a node."""
    ranks_of_node = min(fleet.node_size, fleet.devices)
    possible = [tp for tp in m.tensor_ranks if ranks_of_node % tp == 0]
    if asked.sequence_parallel is True:
        possible = [tp for tp in possible if m.max_seq_len % tp == 0]
    return possible


def stages(m: MPTConfig, fleet: Fleet) -> list[int]:
    """The pp to try. Stages and their interleaved pieces may differ by a layer."""
    most = m.n_layers // fleet.interleave
    return [pp for pp in range(1, most + 1) if fleet.devices % pp == 0]


def model_splits(
    m: MPTConfig, cfg: TrainConfig, asked: LayoutArgs, fleet: Fleet
) -> list[tuple[int, int]]:
    """(tp, pp) to try, the smallest tp x pp first.

    Raises UserError if none divides the model and the batch.
    """
    n, interleave = fleet.devices, fleet.interleave
    few = f"interleave {interleave} is more than n_layers {m.n_layers}: set --interleave=1"
    require(interleave <= m.n_layers, few)
    if asked.pp != "auto":
        m.check_stages(asked.pp)

    splits = device_splits(m, asked, fleet)
    require(splits, devices_do_not_split(n, asked))

    dp_of = {(tp, pp): n // (tp * pp) for tp, pp in splits}
    splits = [split for split in splits if cfg.global_batch_size % dp_of[split] == 0]
    require(splits, batch_does_not_split(cfg.global_batch_size, n, set(dp_of.values())))
    allowed = [split for split in splits if adapters_allow(m, cfg, *split)]
    if not allowed:
        tp, pp = splits[0]
        m.check_adapters_fit(replace(cfg, tp=tp, pp=pp))  # says why
    splits = allowed
    return sorted(splits, key=lambda split: (split[0] * split[1], split[1]))


def device_splits(m: MPTConfig, asked: LayoutArgs, fleet: Fleet) -> list[tuple[int, int]]:
    """(tp, pp) that divide the model and the devices."""
    tps = [asked.tp] if asked.tp != "auto" else tensor_ranks(m, asked, fleet)
    pps = [asked.pp] if asked.pp != "auto" else stages(m, fleet)
    pairs = itertools.product(tps, pps)
    return [(tp, pp) for tp, pp in pairs if fleet.devices % (tp * pp) == 0]


def ruled_out_by_batch(asked: LayoutArgs, plan: Plan) -> list[int]:
    """More data-parallel ranks than the plan's, which its batch does not allow, the most first."""
    possible = {
        plan.fleet.devices // (tp * pp) for tp, pp in device_splits(plan.m, asked, plan.fleet)
    }
    batch = plan.cfg.global_batch_size
    return sorted((dp for dp in possible if dp > plan.fleet.dp and batch % dp), reverse=True)


def devices_do_not_split(n: int, asked: LayoutArgs) -> str:
    """The message for devices that are not a multiple of the tp and pp that are asked."""
    given = {name: getattr(asked, name) for name in ("tp", "pp")}
    given = {name: k for name, k in given.items() if k != "auto"}
    replica = math.prod(given.values())
    nearest = sorted({max(n // replica, 1) * replica, (n // replica + 1) * replica})
    split = " x ".join(f"{name} {k}" for name, k in given.items())
    fix = f"set --devices={' or '.join(map(str, nearest))}"
    return f"{n} devices are not a multiple of {split}: {fix}, or another --{' --'.join(given)}"


def batch_does_not_split(batch: int, n: int, possible_dp: set[int]) -> str:
    """The message for a batch that no number of data-parallel ranks divides."""
    problem = f"is not a multiple of the data-parallel ranks on {n} devices"
    return f"global_batch_size {batch} {problem}: {memory.nearest_batches(batch, possible_dp)}"


def adapters_allow(m: MPTConfig, cfg: TrainConfig, tp: int, pp: int) -> bool:
    """Can a run with these adapters be split so? Yes if it has none."""
    try:
        m.check_adapters_fit(replace(cfg, tp=tp, pp=pp))
    except UserError:
        return False
    return True


def sequence_choices(m: MPTConfig, cfg: TrainConfig, asked: LayoutArgs, tp: int) -> list[bool]:
    """The sequence_parallel to try."""
    if tp == 1:
        return [False]
    if asked.sequence_parallel != "auto":
        return [asked.sequence_parallel]
    if not asked.is_open and cfg.sequence_parallel != "auto":
        return [cfg.sequence_parallel]
    return [False, True] if m.max_seq_len % tp == 0 else [False]


def sharding_modes(asked: LayoutArgs, fleet: Fleet) -> list[str]:
    """The sharding modes to try."""
    if asked.sharding != "auto":
        return [asked.sharding]
    if fleet.dp == 1:
        return [TrainConfig.sharding]  # all are the same
    per_node = fleet.dp_ranks_per_node
    several_nodes = fleet.dp > per_node and fleet.dp % per_node == 0
    chosen = []
    for name, mode in SHARDING_MODES.items():
        if mode.over == "group" and not several_nodes:  # one group would be FULL_SHARD
            continue
        chosen.append(name)
    return chosen


def recomputations(
    m: MPTConfig, cfg: TrainConfig, asked: LayoutArgs, fleet: Fleet
) -> list[list[Recomputation]]:
    """Ways to recompute to try: lists, each from the least recomputation to the most."""
    mode, every = asked.activation_checkpointing, asked.recompute_every
    own = cfg.recompute_every  # auto only if the user says so
    if every == "auto" and mode != "auto":
        every = own
    everys = recompute_everys(m, fleet) if every == "auto" else [every]
    nothing = ("none", 1 if own == "auto" else own)
    if mode == "none":
        return [[nothing]]
    if mode != "auto":
        return [[(mode, k) for k in everys]]
    return [[nothing, *((mode, k) for k in everys)] for mode in ("selective", "full")]


def recompute_everys(m: MPTConfig, fleet: Fleet) -> list[int]:
    """The recompute_every to try, the largest first. All stages of a pipeline recompute as much."""
    sizes = set(stage_sizes(m.n_layers, fleet.pp))
    possible = [k for k in RECOMPUTE_EVERY if k <= m.n_layers]
    return [k for k in possible if fleet.pp == 1 or k == 1 or all(n % k == 0 for n in sizes)]


@functools.cache
def microbatch_sizes(rows: int) -> list[int]:
    """The microbatches to try for so many sequences of a rank, the smallest first.

    One for each number of microbatches: of 10 rows, microbatches of 4 and 5 are 3 and 2, but 6 to 9
    are 2 as well, and take more memory.
    """
    sizes = {rows}
    size = rows
    while size > 1:
        n_microbatches = math.ceil(rows / (size - 1))
        size = math.ceil(rows / n_microbatches)
        sizes.add(size)
    return sorted(sizes)


class Split:
    """The model on a fleet with fixed tp, pp and sharding: recomputation and microbatch are open.

    Arguments as above; the fleet and cfg have tp, pp and sharding.
    """

    def __init__(self, m, cfg, asked, fleet, c, trainer):
        self.m, self.cfg, self.fleet, self.c, self.trainer = m, cfg, fleet, c, trainer
        self.recomputations = recomputations(m, cfg, asked, fleet)
        self.sizes = [asked.microbatch_size]
        if asked.microbatch_size == "auto":
            self.sizes = microbatch_sizes(cfg.global_batch_size // fleet.dp)
        self.last = len(self.sizes) - 1
        self.rates = {}  # {(recomputation, microbatch): tokens/s}
        self.fitting = {}  # {(recomputation, microbatch): bool}

    def layout(self, recomputation: Recomputation, size: int) -> TrainConfig:
        """The config with this recomputation and microbatch."""
        layout = copy.copy(self.cfg)  # a tenth of the time of dataclasses.replace
        layout.activation_checkpointing, layout.recompute_every = recomputation
        layout.microbatch_size = size
        return layout

    def plan(self, recomputation: Recomputation, size: int) -> Plan:
        """The plan with this recomputation and microbatch."""
        layout = self.layout(recomputation, size)
        return evaluate(self.m, layout, self.fleet, self.c, self.trainer)

    def rate(self, recomputation: Recomputation, i: int) -> float:
        """Tokens/s with this recomputation and the i-th microbatch."""
        key = recomputation, i
        if key not in self.rates:
            layout = self.layout(recomputation, self.sizes[i])
            setup = self.m, layout, self.fleet, self.c, self.trainer
            self.rates[key] = step_time.tokens_per_second(*setup)
        return self.rates[key]

    def fits(self, recomputation: Recomputation, i: int) -> bool:
        """Does the i-th microbatch fit with this recomputation?"""
        key = recomputation, i
        if key not in self.fitting:
            layout = self.layout(recomputation, self.sizes[i])
            n = self.fleet.devices
            self.fitting[key] = memory.fits(self.m, layout, n, room(self.fleet))
        return self.fitting[key]

    def least(self) -> list[tuple[Recomputation, int]]:
        """Candidates for the least memory: (recomputation, number of the microbatch).

        All rows at once may take less than one sequence at a time: no gradients wait for other
        microbatches. To recompute nothing may take less than all, where a stage has one block.
        """
        ends = {way for chain in self.recomputations for way in (chain[-1], chain[0])}
        return list(itertools.product(sorted(ends), {0, self.last}))

    def can_fit(self) -> bool:
        """Does any layout fit?"""
        return any(self.fits(way, i) for way, i in self.least())

    def smallest(self) -> Plan:
        """The plan that takes the least memory."""
        plans = [self.plan(way, self.sizes[i]) for way, i in self.least()]
        return min(plans, key=lambda plan: plan.bytes["peak"])

    def ceiling(self) -> float:
        """Tokens/s of the fastest layout if memory had no limit."""
        ways = {chain[0] for chain in self.recomputations}
        return max(self.rate(way, self.fastest_microbatch(way, self.last)) for way in ways)

    def fastest_microbatch(self, recomputation: Recomputation, last: int) -> int:
        """Which of the microbatches 0 to `last` is the fastest.

        Large ones make matmuls fast, small ones keep the stages of a pipeline busy. Between the two
        is one best: with stages among the smallest, without them the last.
        """
        if last and self.rate(recomputation, last) >= self.rate(recomputation, last - 1):
            return last
        end = 1
        while end < last and self.rate(recomputation, end) > self.rate(recomputation, end - 1):
            end *= 2
        first, last = end // 2, min(end, last)
        while first < last:
            middle = (first + last) // 2
            if self.rate(recomputation, middle + 1) > self.rate(recomputation, middle):
                first = middle + 1
            else:
                last = middle
        return first

    def largest_fit(self, recomputation: Recomputation, known: int) -> int:
        """The largest microbatch that fits, but for all rows at once; -1 if none.

        known: one that fits with less recomputation, or -1.
        """
        too_large = self.last
        middle = known + 1  # first: more recomputation often makes no difference
        while too_large - known > 1:
            if self.fits(recomputation, middle):
                known = middle
            else:
                too_large = middle
            middle = (known + too_large) // 2
        return known

    def fastest(self) -> Plan | None:
        """The fastest plan that fits."""
        found = []
        for chain in self.recomputations:
            largest = -1
            all_rows_may_fit = any(self.fits(way, self.last) for way in (chain[0], chain[-1]))
            for way in chain:
                if all_rows_may_fit and self.fits(way, self.last):
                    found.append((self.rate(way, self.last), way, self.last))
                    if self.fastest_microbatch(way, self.last) == self.last:
                        break
                before, largest = largest, self.largest_fit(way, largest)
                if largest > before:
                    i = self.fastest_microbatch(way, largest)
                    found.append((self.rate(way, i), way, i))
                    if i < largest:  # more recomputation makes room for what is slower
                        break
        if not found:
            return None
        _, way, i = max(found)
        return self.plan(way, self.sizes[i])


def room(fleet: Fleet) -> float:
    """Bytes of a device that tensors may fill."""
    return memory.ROOM * fleet.device.memory_gb * 2**30


def splits_of(
    m: MPTConfig, cfg: TrainConfig, asked: LayoutArgs, fleet: Fleet, c: Constants, trainer: Trainer
) -> list[Split]:
    """All splits, the smallest tp x pp first."""
    found = []
    for tp, pp in model_splits(m, cfg, asked, fleet):
        split_fleet = replace(fleet, tp=tp, pp=pp)
        split_cfg = replace(cfg, tp=tp, pp=pp)
        in_sequence = sequence_choices(m, cfg, asked, tp)
        for sharding, cuts_tokens in itertools.product(
            sharding_modes(asked, split_fleet), in_sequence
        ):
            in_groups = SHARDING_MODES[sharding].over == "group"
            node = min(split_fleet.dp_ranks_per_node, split_fleet.dp)
            shard_size = (cfg.shard_size or node) if in_groups else 0
            if in_groups and split_fleet.dp % shard_size:
                continue
            sharded = replace(
                split_cfg,
                sharding=sharding,
                shard_size=shard_size,
                sequence_parallel=cuts_tokens,
            )
            found.append(Split(m, sharded, asked, split_fleet, c, trainer))
    groups = f"shard_size {cfg.shard_size}" if cfg.shard_size else "a node"
    fix = "set --shard_size to a divisor of them"
    require(found, f"{groups} divides the data-parallel ranks of no tp and pp: {fix}")
    return found


def best(
    m: MPTConfig,
    cfg: TrainConfig,
    asked: LayoutArgs,
    fleet: Fleet,
    c: Constants,
    trainer: Trainer,
    n: int = 1,
) -> list[Plan]:
    """The n fastest tp, pp and sharding that fit, each with the fastest of all else.

    If asked.simplest, only those with the smallest tp x pp that fits. If nothing is left open, the
    only layout, whether it fits or not. Raises UserError if nothing fits.
    """
    splits = splits_of(m, cfg, asked, fleet, c, trainer)
    if not asked.is_open and "auto" not in (cfg.recompute_every, cfg.sequence_parallel):
        return [splits[0].smallest()]

    fitting = [split for split in splits if split.can_fit()]
    if not fitting:
        raise UserError(nothing_fits(m, cfg, asked, fleet, c, trainer))
    if asked.simplest:
        product = min(split.fleet.tp * split.fleet.pp for split in fitting)
        fitting = [split for split in fitting if split.fleet.tp * split.fleet.pp == product]

    plans = []
    for split in sorted(fitting, key=lambda split: -split.ceiling()):
        if len(plans) == n and split.ceiling() <= plans[-1].tokens_per_second:
            break
        plans.append(split.fastest())
        plans.sort(key=lambda plan: (-plan.tokens_per_second, plan.fleet.tp * plan.fleet.pp))
        plans = one_of_each(plans)[:n]
    return plans


def one_of_each(plans: list[Plan]) -> list[Plan]:
    """The first plan of each tp, pp and sharding: sequence parallel or not."""
    first = {}
    for plan in plans:
        first.setdefault((plan.fleet.tp, plan.fleet.pp, plan.cfg.sharding), plan)
    return list(first.values())


def fastest(
    m: MPTConfig, cfg: TrainConfig, asked: LayoutArgs, fleet: Fleet, c: Constants, trainer: Trainer
) -> Plan:
    """The first of `best`."""
    return best(m, cfg, asked, fleet, c, trainer)[0]


def simpler(
    plans: list[Plan],
    m: MPTConfig,
    cfg: TrainConfig,
    asked: LayoutArgs,
    fleet: Fleet,
    c: Constants,
    trainer: Trainer,
) -> list[Plan]:
    """Plans that need less than the first of `plans`, as tp 1 and pp 1 do: the simplest first.

    Of each set of dimensions the fastest in `plans`, and the fastest with tp 1 and pp 1.
    """
    known = plans[1:]
    if asked.tp == asked.pp == "auto" and dimensions(plans[0]):
        try:
            alone = replace(asked, tp=1, pp=1)
            known = [*known, fastest(m, cfg, alone, fleet, c, trainer)]
        except UserError:  # it does not fit, or the batch rules it out
            pass
    known = [plan for plan in known if plan.fits and dimensions(plan) < dimensions(plans[0])]
    return sorted(known, key=lambda plan: (dimensions(plan), -plan.tokens_per_second))


def dimensions(plan: Plan) -> int:
    """In how many ways the model is split: 0 to 2, by tensor ranks and by pipeline stages."""
    return (plan.fleet.tp > 1) + (plan.fleet.pp > 1)


# --------------------------------------------------------------------------------------------------
# What does not fit


def too_much(plan: Plan) -> str:
    """By how much a plan does not fit, and what takes the most."""
    n_bytes, limit = plan.bytes, room(plan.fleet)
    parts = {name: n for name, n in n_bytes.items() if name not in ("peak", "moment")}
    largest = max(parts, key=parts.get)
    over = f"{(n_bytes['peak'] - limit) / 1e9:,.1f} GB more than the {limit / 1e9:,.1f} GB of room"
    return f"{over}; the largest part is {largest}, {parts[largest] / 1e9:,.1f} GB"


def nothing_fits(
    m: MPTConfig, cfg: TrainConfig, asked: LayoutArgs, fleet: Fleet, c: Constants, trainer: Trainer
) -> str:
    """The message: how far the smallest layout is from fitting, and what would fit."""
    question = m, cfg, asked, fleet, c, trainer
    plans = [split.smallest() for split in splits_of(*question)]
    plan = min(plans, key=lambda plan: plan.bytes["peak"])
    size = f"{flops.n_params(m) / 1e9:.3g}B parameters"
    problem = f"{size} do not fit {fleet.devices} x {fleet.device.name} in any layout you allow"
    split = f"tp {plan.fleet.tp} pp {plan.fleet.pp} {plan.cfg.sharding}"
    mode = f"{plan.cfg.activation_checkpointing} checkpointing".replace("none", "no")
    smallest = f"{split}, {mode}, microbatch {plan.cfg.microbatch_size} takes {too_much(plan)}"
    fix = " or ".join(what_fits(*question)) or "a smaller model or a shorter --max_seq_len"
    return f"{problem}: {smallest}. What would fit: {fix}"


def what_fits(
    m: MPTConfig, cfg: TrainConfig, asked: LayoutArgs, fleet: Fleet, c: Constants, trainer: Trainer
) -> list[str]:
    """The flags that make the model fit: on these devices, and as it is on more of them."""
    recomputation = replace(
        asked, microbatch_size="auto", activation_checkpointing="auto", recompute_every="auto"
    )
    fixes = []
    for wider in (recomputation, LayoutArgs(simplest=True)):
        if wider != asked and can_fit(m, cfg, wider, fleet):
            plan = fastest(m, cfg, wider, fleet, c, trainer)
            fixes.append(flags_that_differ(plan, cfg, asked))
            break
    n = smallest_fleet(m, cfg, asked, fleet)
    if n:
        fits_with_own_batch = can_fit(m, cfg, asked, replace(fleet, devices=n))
        larger_batch = f" --global_batch_size={next_batch(cfg, n)}"
        fixes.append(f"--devices={n}{'' if fits_with_own_batch else larger_batch}")
    return fixes


def flags_that_differ(plan: Plan, cfg: TrainConfig, asked: LayoutArgs) -> str:
    """The flags of a plan that differ from what the user set."""
    differing = []
    for name in OPEN:
        value, own = getattr(plan.cfg, name), getattr(asked, name)
        if name == "recompute_every" and own == "auto":
            own = cfg.recompute_every
        if name == "sequence_parallel" and (own == "auto" or plan.fleet.tp == 1):
            own = False  # as a layout has it of which nothing else is open
        if own not in ("auto", value):
            differing.append(f"--{name}={value}")
    return " ".join(differing)


def next_batch(cfg: TrainConfig, n: int) -> int:
    """The batch, or the next larger one that n data-parallel ranks divide."""
    return math.ceil(cfg.global_batch_size / n) * n


def can_fit(m: MPTConfig, cfg: TrainConfig, asked: LayoutArgs, fleet: Fleet) -> bool:
    """Does any layout fit? No if the fleet cannot split the model or the batch."""
    try:
        splits = splits_of(m, cfg, asked, fleet, Constants(), step_time.OURS)
    except UserError:
        return False
    return any(split.can_fit() for split in splits)


def smallest_fleet(m: MPTConfig, cfg: TrainConfig, asked: LayoutArgs, fleet: Fleet) -> int | None:
    """The smallest number of devices, more than the fleet's, on which a layout fits.

    None up to MOST_DEVICES. Whole nodes, unless they fit into one. With the batch, or `next_batch`.
    """

    def fits(n: int) -> bool:
        """Does a layout fit n devices?"""
        larger_batch = replace(cfg, global_batch_size=next_batch(cfg, n))
        larger_fleet = replace(fleet, devices=n)
        return any(can_fit(m, batch, asked, larger_fleet) for batch in (cfg, larger_batch))

    n = fleet.devices
    while not fits(n):
        n *= 2
        if n > MOST_DEVICES:
            return None
    step = 1 if n <= fleet.node_size else fleet.node_size
    fewer = range(n // 2 // step * step + step, n, step)
    i = bisect.bisect_left(fewer, True, key=fits)
    return fewer[i] if i < len(fewer) else n


# --------------------------------------------------------------------------------------------------
# The program


def needs(plan: Plan) -> str:
    """What a plan needs: its kinds of parallelism, and whether the model's state is cut."""
    fleet = plan.fleet
    kinds = {"data": fleet.dp, "tensor": fleet.tp, "pipeline": fleet.pp}
    needed = [name for name, n in kinds.items() if n > 1] or ["one device"]
    if fleet.dp > 1 and plan.cfg.sharding != "DDP":
        needed[0] = "data (sharded)"
    if plan.cfg.sequence_parallel:
        needed[needed.index("tensor")] = "tensor (and sequence)"
    return " + ".join(needed)


def checkpointing(cfg: TrainConfig) -> str:
    """The activation checkpointing, and of which blocks if not of all."""
    mode = cfg.activation_checkpointing
    every = cfg.recompute_every
    return f"{mode}, every {every}" if mode != "none" and every > 1 else mode


def table(found: list[Plan]) -> list[str]:
    """The lines of a table of plans."""
    head = f"{'tokens/s':>14}{'MFU':>8}{'memory':>8}{'dp':>6}{'tp':>4}{'pp':>5}"
    lines = [f"{head}  sharding       checkpointing       microbatch  needs"]
    for plan in found:
        cfg, fleet = plan.cfg, plan.fleet
        line = f"{plan.tokens_per_second:>14,.0f}{plan.mfu:>8.1%}{plan.share_of_memory:>8.0%}"
        stages = f"{fleet.pp}x{fleet.interleave}" if fleet.interleave > 1 else f"{fleet.pp}"
        line += f"{fleet.dp:>6}{fleet.tp:>4}{stages:>5}"
        line += f"  {cfg.sharding:<13}  {checkpointing(cfg):<18}{cfg.microbatch_size:>12}"
        line += f"  {needs(plan)}"
        lines.append(line if plan.fits else f"{line}  DOES NOT FIT")
    return lines


def main(argv: list[str]) -> None:
    """Print all splits for the config files and flags in argv, the fastest first."""
    classes = (MPTConfig, TrainConfig, LayoutArgs, FleetArgs)
    m, cfg, asked, args = config.load(memory.with_base(argv), *classes)
    fleet = fleet_of(args)
    splits = splits_of(m, cfg, asked, fleet, Constants(), step_time.OURS)
    found = [split.fastest() or split.smallest() for split in splits]
    found.sort(key=lambda plan: (not plan.fits, -plan.tokens_per_second))
    print(f"{flops.n_params(m) / 1e9:.3g}B parameters, {args.devices} x {fleet.device.name}\n")
    print("\n".join(table(one_of_each(found))))


if __name__ == "__main__":
    config.run(main)
