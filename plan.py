"""What a run will need, how fast it will be and how it will scale, before you launch it.

    python plan.py configs/mpt7b.py --device=mi250 --devices=64 --network=100   one layout
    python plan.py configs/mpt7b.py --device=mi250 --sweep_devices=8,64,256     strong, weak scaling
    python plan.py --device=h100 --devices=64 --budget=7                        the best in a week
    python plan.py --plot                                                       pictures

What a config file or a flag sets is kept. What is `auto` or not set (tp, pp, sharding, microbatch,
activation checkpointing) is chosen: the least tensor and pipeline parallelism with which the model
fits, and then whatever is fastest. The flags at the end launch it.

planning/search.py chooses, with the bytes of planning/memory.py and the seconds of
planning/step_time.py, whose constants were fitted to LLM Foundry's published MPT runs on A100 and
H100; bench/results/planner.md has the error of every row. Any other device is extrapolated, and the
plan says so, until `--calibrate=FILE` brings a measurement: a machine.json of `bench machine`, or a
table of `bench train`. The last lines of a plan list what was assumed.
"""

import itertools
import json
import math
from dataclasses import dataclass, fields, replace
from typing import Literal

import config
import devices
import flops
from config import MPTConfig, TrainConfig, UserError, require
from devices import NODE_OVER_BOARD, NODE_WATTS, PUBLISHED_FRONTIER, Device
from planning import calibrate, picture, search, step_time
from planning.search import TOKENS_PER_PARAMETER, LayoutArgs, Plan
from planning.step_time import Constants, Fleet

FITTED_TO = ("A100 SXM", "H100 SXM")  # the devices whose runs the constants were fitted to
NETWORK = 100.0  # GB/s of a node if the user does not say: 800 Gb/s
# The settings that fsdp_train.py needs for a layout.
LAYOUT = (
    "tp",
    "sequence_parallel",
    "pp",
    "sharding",
    "shard_size",
    "activation_checkpointing",
    "microbatch_size",
    "global_batch_size",
)
# Days that each job script runs, with all 50 restarts.
JOB_DAYS = {
    "slurm/train_srun.sbatch": 51 * 2 / 24,
    "slurm/train.sbatch": 51 * 12 / 24,
}

TrainerName = Literal["ours", "foundry"]


@dataclass
class PlanArgs:
    """The fleet and the question."""

    device: str = "auto"  # the kind: mi250, h100, ... (python devices.py lists them)
    devices: int = 8  # how many torch devices (an MI250 card is two)
    node_size: int = 8  # torch devices of a node
    network: float = 0.0  # GB/s of a node's network, each way (0: 100 is assumed for several nodes)
    interleave: int = 1  # pieces of the model on each pipeline stage; the trainer has only one
    choose: bool = False  # choose the layout even where a config file sets it
    global_batch_size: int = 0  # sequences of a step (0: 256 or a bit more, at least 4 a device)
    max_steps: int = 0  # steps of the run, from which its tokens and time follow
    trainer: TrainerName = "ours"  # foundry: reduce in bf16, residuals in fp32, as in its runs
    tokens: float = 0.0  # to train on (0: those of max_steps, else 20 a parameter)
    price: float = 0.0  # of one torch device for an hour
    watts: float = 0.0  # of one torch device with its share of the node (0: from the table)
    calibrate: str = ""  # machine.json of bench machine, or a .csv of bench train
    sweep_devices: str = ""  # numbers of devices: 8,16,64
    budget: float = 0.0  # days: plan the Chinchilla-optimal model that trains in this many
    plot: bool = False  # draw the sweep or the memory by sharding; alone: the published MI250 runs
    out: str = "plan.png"  # where to draw
    json: bool = False  # print JSON

    def check(self) -> None:
        """UserError if a number is out of range, or two questions are asked."""
        for name in ("devices", "node_size", "interleave"):
            value = getattr(self, name)
            require(value > 0, f"{name} must be at least 1, not {value}")
        for name in ("network", "tokens", "price", "watts", "budget"):
            value = getattr(self, name)
            require(0 <= value < math.inf, f"{name} must be 0 or more, not {value}")
        one_question = not (self.budget and self.sweep_devices)
        require(one_question, "--budget and --sweep_devices are two questions: ask one")


# --------------------------------------------------------------------------------------------------
# The figures of a plan


def figures(plan: Plan, args: PlanArgs) -> dict:
    """All that a plan predicts, with the flags that launch it and what was assumed."""
    fleet, cfg = plan.fleet, plan.cfg
    n_params = flops.n_params(plan.m)
    tokens = args.tokens or TOKENS_PER_PARAMETER * n_params
    hours = plan.hours(tokens)
    device_flops = plan.tokens_per_second * flops.train_flops_per_token(plan.m) / fleet.devices
    device_watts = watts(fleet.device, args)

    layout = {name: getattr(cfg, name) for name in LAYOUT}
    layout |= {"dp": fleet.dp, "interleave": fleet.interleave}
    return {
        "n_params": n_params,
        "device": fleet.device.name,
        "devices": fleet.devices,
        "layout": layout,
        "seconds": plan.seconds,
        "tokens_per_second": plan.tokens_per_second,
        "tflops_per_device": device_flops / 1e12,
        "mfu": plan.mfu,
        "convention": flops.CONVENTION,
        "bytes": plan.bytes,
        "share_of_memory": plan.share_of_memory,
        "fits": plan.fits,
        "tokens": tokens,
        "max_steps": math.ceil(tokens / (cfg.global_batch_size * plan.m.max_seq_len)),
        "days": hours / 24,
        "mwh": device_watts and hours * fleet.devices * device_watts / 1e6,
        "cost": hours * fleet.devices * args.price,
        "flags": flags(plan),
        "assumed": assumed(plan, args),
    }


def watts(device: Device, args: PlanArgs) -> float | None:
    """Watts of one torch device with its share of the node, or None if unknown."""
    of_nodes = [w for family, w in NODE_WATTS.items() if device.name.startswith(family)]
    published = of_nodes[0] if of_nodes else None
    return args.watts or published or (device.watts and NODE_OVER_BOARD * device.watts)


def flags(plan: Plan) -> str:
    """The flags with which fsdp_train.py runs this layout; empty if it cannot."""
    if plan.fleet.interleave > 1:
        return ""
    values = {name: getattr(plan.cfg, name) for name in LAYOUT}
    return " ".join(f"--{name}={value}" for name, value in values.items() if value)


# --------------------------------------------------------------------------------------------------
# What was assumed


def assumed(plan: Plan, args: PlanArgs) -> list[str]:
    """What a plan rests on and the user did not set."""
    return [*assumed_fleet(plan, args), *assumed_speed(plan, args), *assumed_run(plan, args)]


def assumed_fleet(plan: Plan, args: PlanArgs) -> list[str]:
    """Nodes, links, cards and the network."""
    device, fleet = plan.fleet.device, plan.fleet
    link = f"not known, so {step_time.UNKNOWN_LINK:g}"
    if device.link_gbs:
        link = f"{device.link_gbs:g}"
    lines = [f"{fleet.node_size} devices a node, link {link} GB/s each way"]
    if device.per_card > 1:
        cards = f"{fleet.devices / device.per_card:g} cards"
        lines.append(f"a card is {device.per_card} torch devices: {fleet.devices} are {cards}")
    several_nodes = fleet.devices > fleet.node_size
    if several_nodes and not args.network and not args.calibrate:
        fix = "set --network, it matters more than any constant"
        lines.append(f"network {NETWORK:g} GB/s a node, each way: {fix}")
    return lines


def assumed_speed(plan: Plan, args: PlanArgs) -> list[str]:
    """Where the speed comes from."""
    device = plan.fleet.device
    if args.calibrate:
        lines = [f"speed calibrated by {args.calibrate}"]
    elif device.name.startswith(FITTED_TO):
        lines = ["speed as LLM Foundry's on this device; our trainer was not measured on it"]
    else:
        fix = "set --calibrate to use a measured one"
        lines = [f"speed EXTRAPOLATED: no run on {device.name} was used, {fix}"]
    if device.reachable is None:
        share = f"{step_time.Constants().reachable:.0%}"
        lines.append(f"matmuls reach {share} of the peak: not measured on {device.name}")
    return lines


def assumed_run(plan: Plan, args: PlanArgs) -> list[str]:
    """Tokens, batch, attention, memory of interleaving, power, what was not measured or lacks."""
    device, fleet = plan.fleet.device, plan.fleet
    lines = []
    if not args.tokens:
        lines.append(f"{TOKENS_PER_PARAMETER} tokens a parameter: set --tokens")
    if not args.global_batch_size:
        batch = f"a global batch of {plan.cfg.global_batch_size} sequences"
        lines.append(f"{batch}: set --global_batch_size")
    if plan.m.alibi or plan.m.attn_impl != "triton":
        kernel = "attention by a fused kernel that keeps no scores"
        lines.append(f"{kernel} and needs no extra columns for ALiBi")
    if fleet.interleave > 1:
        more = "up to (pp - 1) / (pp x interleave) more activations"
        lines.append(f"memory is that without interleaving; interleaving keeps {more}")
        lines.append("fsdp_train.py has no interleaved stages: --interleave=1 is what it runs")
    device_watts = watts(device, args)
    if not args.watts and device_watts:
        published = device.name.startswith(tuple(NODE_WATTS))
        source = "of published nodes" if published else f"{NODE_OVER_BOARD} times the board's"
        lines.append(f"{device_watts:.0f} W a device with its share of the node, {source}")
    if fleet.tp > 1:
        lines.append("tensor parallelism: bytes and collectives as counted, seconds not measured")
    if fleet.pp > 1:
        lines.append("pipeline parallelism: bytes and messages as counted, seconds not measured")
    return lines


# --------------------------------------------------------------------------------------------------
# A plan as text


def text(plan: Plan, args: PlanArgs, own: Plan | None = None) -> str:
    """A plan for a person to read. own: the plan of the settings as they are, to compare with."""
    values = figures(plan, args)
    lines = [
        *layout_lines(plan),
        "",
        *step_and_memory_lines(plan),
        "",
        *summary_lines(plan, values, args),
        *published_lines(plan, values),
        *restart_lines(values["days"]),
        *comparison_lines(plan, own),
    ]
    if values["flags"]:
        lines.append(f"flags       {values['flags']}")
    return "\n".join(lines + labelled("assumed", values["assumed"]))


def labelled(label: str, lines: list[str]) -> list[str]:
    """The lines with the label before the first."""
    return [f"{label if i == 0 else '':<12}{line}" for i, line in enumerate(lines)]


def layout_lines(plan: Plan) -> list[str]:
    """The model, the fleet, and how the batch is split."""
    cfg, fleet = plan.cfg, plan.fleet
    rows = cfg.global_batch_size // fleet.dp  # of a data-parallel rank
    size = min(cfg.microbatch_size, rows)
    up_to = "up to " if rows % size else ""
    n_microbatches = math.ceil(rows / size)
    batch = (
        f"{fleet.dp} data-parallel ranks x {rows}, microbatches of {up_to}{size}: {n_microbatches}"
    )
    in_groups = cfg.sharding_mode.over == "group"
    sharding = cfg.sharding + (f", shards of {cfg.shard_size}" if in_groups else "")

    size = rounded(flops.n_params(plan.m) / 1e9)
    model = f"{size}B parameters, sequence {plan.m.max_seq_len}"
    split = f"dp {fleet.dp} x tp {fleet.tp} x pp {fleet.pp}, {sharding}"
    mode = f"checkpointing {cfg.activation_checkpointing}"
    return [
        f"{model}, {fleet.devices} x {fleet.device.name}",
        f"{split}, {mode}, batch {cfg.global_batch_size} = {batch}",
    ]


def step_and_memory_lines(plan: Plan) -> list[str]:
    """The milliseconds of a step by part, and beside them the bytes of a rank by part."""
    left = [f"{'a step':<26}{'ms':>12}{'share':>9}"]
    for name, seconds in plan.seconds.items():
        share = seconds / plan.seconds["step"]
        left.append(f"  {name:<24}{1e3 * seconds:>12,.1f}{share:>9.1%}")

    right = [f"{'GB of one device':<26}{'at its peak':>12}"]
    for name, n in plan.bytes.items():
        if name not in ("peak", "moment"):
            right.append(f"  {name:<24}{n / 1e9:>12.2f}")
    total = f"all: {plan.bytes['moment']}"
    right.append(f"  {total:<24}{plan.bytes['peak'] / 1e9:>12.2f}")

    pairs = itertools.zip_longest(left, right, fillvalue="")
    return [f"{a:<47}    {b}".rstrip() for a, b in pairs]


def summary_lines(plan: Plan, values: dict, args: PlanArgs) -> list[str]:
    """Does it fit, how fast is it, and how long does the run take? values: of `figures`."""
    memory_gb = f"{plan.fleet.device.memory_gb:g} GiB"
    fits = "fits" if plan.fits else "DOES NOT FIT"
    speed = f"{values['tokens_per_second']:,.0f} tokens/s"
    tflops = f"{values['tflops_per_device']:.1f} TFLOP/s a device"
    run = f"{rounded(values['tokens'] / 1e9, 4)}B tokens, --max_steps={values['max_steps']}"
    energy = f"{rounded(values['mwh'])} MWh" if values["mwh"] else "energy n/a: set --watts"
    cost = ""
    if args.price:
        cost = f", {values['cost']:,.0f} at {args.price:g} a device-hour"
    return [
        f"memory      {values['share_of_memory']:.0%} of {memory_gb}: {fits}",
        f"speed       {speed}, {tflops}, MFU {values['mfu']:.1%} ({values['convention']})",
        f"the run     {run}: {rounded(values['days'])} days, {energy}{cost}",
    ]


def rounded(x: float, digits: int = 3) -> str:
    """A number with this many digits that count: 1,010, where %g would write 1.01e+03."""
    return f"{float(f'{x:.{digits}g}'):,g}"


def published_lines(plan: Plan, values: dict) -> list[str]:
    """The published speed of this shape on this device. values: of `figures`."""
    shape = plan.m.n_layers, plan.m.d_model
    if plan.fleet.device.name != "MI250X GCD" or shape not in PUBLISHED_FRONTIER:
        return []
    tflops = PUBLISHED_FRONTIER[shape]
    share = tflops / plan.fleet.device.bf16_tflops
    published = f"{tflops} TFLOP/s a GCD on Frontier, {share:.1%} of the peak (arXiv 2312.12705)"
    again = hardware_tflops(plan)
    ours = f"this plan: {values['tflops_per_device']:.1f}, or {again:.1f} with what is recomputed"
    return labelled("published", [published, ours])


def hardware_tflops(plan: Plan) -> float:
    """TFLOP/s of a device, with the forwards that are computed twice."""
    cfg = plan.cfg
    checkpointing = cfg.activation_checkpointing, cfg.recompute_every
    per_token = flops.hardware_flops_per_token(plan.m, *checkpointing)
    return plan.tokens_per_second * per_token / plan.fleet.devices / 1e12


def restart_lines(days: float) -> list[str]:
    """The job scripts that will have used their 50 restarts before the run ends."""
    lines = []
    for script, limit in JOB_DAYS.items():
        if days > limit:
            lines.append(f"{script} ends after 50 restarts, {limit:.3g} days: submit it again then")
    return labelled("restarts", lines)


def comparison_lines(plan: Plan, own: Plan | None) -> list[str]:
    """How the settings as they are would do, if the plan changes them."""
    if own is None:
        return []
    changed = [name for name in LAYOUT if getattr(own.cfg, name) != getattr(plan.cfg, name)]
    settings = [f"{name}={getattr(own.cfg, name)}" for name in changed]
    if not settings:
        return []
    result = "DOES NOT FIT"
    if own.fits:
        gain = plan.tokens_per_second / own.tokens_per_second - 1
        difference = f"{abs(gain):.0%} {'faster' if gain >= 0 else 'slower'}"
        result = f"{own.tokens_per_second:,.0f} tokens/s; this plan is {difference}"
    return [f"your layout {', '.join(settings)}: {result}"]


# --------------------------------------------------------------------------------------------------
# A sweep


def sweep_json(row: dict, args: PlanArgs) -> dict:
    """A row of search.sweep as JSON."""
    strong, weak = row["efficiency"]
    return {
        "devices": row["devices"],
        "efficiency": {"strong": strong, "weak": weak},
        "strong": figures(row["strong"], args),
        "weak": figures(row["weak"], args),
    }


def sweep_text(rows: list[dict], args: PlanArgs) -> str:
    """The rows of search.sweep for a person to read."""
    heads = f"{'tokens/s':>13}{'TFLOP/s':>9}{'MFU':>8}{'efficiency':>12}  "
    lines = [
        f"{'':<10}{'strong scaling':^44}  {'weak scaling':^44}",
        f"{'devices':>8}  {heads}{heads}  layout (strong)",
    ]
    for row in rows:
        strong_efficiency, weak_efficiency = row["efficiency"]
        strong = sweep_cells(row["strong"], strong_efficiency)
        weak = sweep_cells(row["weak"], weak_efficiency)

        cfg, fleet = row["strong"].cfg, row["strong"].fleet
        split = f"tp {fleet.tp} pp {fleet.pp} " if fleet.tp * fleet.pp > 1 else ""
        layout = f"{cfg.sharding}, {cfg.microbatch_size}, {cfg.activation_checkpointing}"
        lines.append(f"{row['devices']:>8}  {strong}{weak}  {split}{layout}")

    lines += ["", f"MFU: {flops.CONVENTION}"]
    lines += [f"assumed: {line}" for line in assumed(rows[-1]["strong"], args)]
    return "\n".join(lines)


def sweep_cells(plan: Plan, efficiency: float) -> str:
    """Tokens/s, TFLOP/s of a device, MFU and efficiency."""
    tflops = plan.mfu * plan.fleet.device.bf16_tflops
    return f"{plan.tokens_per_second:>13,.0f}{tflops:>9.1f}{plan.mfu:>8.1%}{efficiency:>12.1%}  "


# --------------------------------------------------------------------------------------------------
# The question


def trainer(args: PlanArgs) -> step_time.Trainer:
    """The trainer that --trainer names."""
    return step_time.FOUNDRY if args.trainer == "foundry" else step_time.OURS


def fleet_and_constants(args: PlanArgs) -> tuple[Fleet, Constants]:
    """The devices and the constants of step_time.py, measured if --calibrate has a file."""
    device = devices.by_name(args.device)
    network = args.network or NETWORK
    fleet = Fleet(
        device, args.devices, args.node_size, network_gbs=network, interleave=args.interleave
    )
    if args.calibrate:
        return calibrate.from_file(args.calibrate, fleet, trainer(args))
    return fleet, Constants()


def plan_of_settings(
    m: MPTConfig, cfg: TrainConfig, args: PlanArgs, fleet: Fleet, c: Constants
) -> Plan | None:
    """What fsdp_train.py would run with these settings; None if some are auto or it cannot."""
    if "auto" in (cfg.sharding, cfg.activation_checkpointing, cfg.tp, cfg.pp):
        return None
    in_groups = cfg.sharding_mode.over == "group"
    shard_size = cfg.shard_size or (args.node_size if in_groups else 0)
    try:
        fleet = replace(fleet, tp=cfg.tp, pp=cfg.pp)
        return search.evaluate(m, replace(cfg, shard_size=shard_size), fleet, c, trainer(args))
    except UserError:  # microbatch_size=auto, or a batch that cannot be split over these devices
        return None


def device_counts(args: PlanArgs) -> list[int]:
    """--sweep_devices as sorted numbers. Raises UserError."""
    needs = "--sweep_devices needs numbers"
    try:
        counts = sorted({int(n) for n in args.sweep_devices.split(",")})
    except ValueError as error:
        raise UserError(f"{needs}: 8,16,64, not {args.sweep_devices!r}") from error
    require(counts[0] > 0, f"{needs} above 0, not {counts[0]}")
    return counts


def require_one_question(args: PlanArgs, cfg: TrainConfig, files: list[str], given: set) -> None:
    """UserError if the settings contradict the question. given: names of the flags."""
    fix = "remove --precision=fp32"
    require(cfg.precision != "fp32", f"plans are for bf16, in which speeds were published: {fix}")
    found_by_budget = [f"--{name}" for name in ("tokens", "max_steps") if name in given]
    if args.budget and (files or found_by_budget):
        extra = " ".join(files + found_by_budget)
        raise UserError(f"--budget finds the model and its tokens: remove {extra}")


def with_defaults(
    m: MPTConfig, cfg: TrainConfig, args: PlanArgs
) -> tuple[MPTConfig, TrainConfig, PlanArgs]:
    """The settings with fused attention, the tokens of --max_steps, and a global batch."""
    if m.attn_impl != "triton":
        m = replace(m, attn_impl="sdpa")
    if args.max_steps and not args.tokens:
        tokens = cfg.max_steps * cfg.global_batch_size * m.max_seq_len
        args = replace(args, tokens=float(tokens))
    if not args.global_batch_size:
        rows = max(4, math.ceil(cfg.global_batch_size / args.devices))  # of a device
        cfg = replace(cfg, global_batch_size=rows * args.devices)
    return m, cfg, args


def main(argv: list[str]) -> None:
    """Answer the question that the config files and flags in argv ask."""
    m, cfg, asked, args = config.load(argv, MPTConfig, TrainConfig, LayoutArgs, PlanArgs)
    files = [text for text in argv if not text.startswith("-")]
    given = {flops.flag_name(text) for text in argv}
    require_one_question(args, cfg, files, given)
    if args.plot and not files and args.device == "auto":
        return picture.published(args.out)

    if args.choose:
        left_open = [field.name for field in fields(asked) if field.name not in given]
        asked = replace(asked, **dict.fromkeys(left_open, "auto"))
    fleet, c = fleet_and_constants(args)
    settings_cfg = cfg
    m, cfg, args = with_defaults(m, cfg, args)
    own = plan_of_settings(m, settings_cfg, args, fleet, c) if files else None

    search_args = (asked, fleet, c, trainer(args))
    if args.sweep_devices:
        rows = search.sweep(m, cfg, device_counts(args), *search_args)
        return show_sweep(rows, args)
    if args.budget:
        plan = search.budget(m, cfg, args.budget, *search_args)
    else:
        plan = search.fastest(m, cfg, *search_args)
    show_plan(plan, args, own)


def show_sweep(rows: list[dict], args: PlanArgs) -> None:
    """Print the rows of search.sweep, as text or JSON, and draw them if asked."""
    if args.json:
        print(json.dumps([sweep_json(row, args) for row in rows], indent=2))
    else:
        print(sweep_text(rows, args))
    if args.plot:
        picture.scaling(rows, args.out)


def show_plan(plan: Plan, args: PlanArgs, own: Plan | None) -> None:
    """Print the plan, as text or JSON, and draw its memory if asked."""
    if args.json:
        print(json.dumps(figures(plan, args), indent=2))
    else:
        print(text(plan, args, own))
    if args.plot:
        picture.bytes_by_sharding(plan.m, plan.cfg, plan.fleet, args.out)


if __name__ == "__main__":
    config.run(main)
