"""The question that plan.py is asked, and its answer: figures, text, and what they rest on.

`PlanArgs` is the question: the fleet, prices, tokens. `figures` has all that a plan predicts,
`text` prints it for a person, and `assumed` lists what the user did not set. `sweep_text` is the
table of a sweep over numbers of devices. plan.py calls them; nothing here searches.

Run `python -m planning.answer configs/mpt7b.py --device=mi250 --devices=64 --microbatch_size=8` for
a recipe's own layout.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Literal

import config
import flops
from config import MPTConfig, TrainConfig, UserError, require
from devices import NODE_OVER_BOARD, NODE_WATTS, PUBLISHED_FRONTIER, Device
from planning import certainty, matmuls, memory, search, step_time
from planning.budget import SHAPE, TOKENS_PER_PARAMETER, Training
from planning.fleet import UNKNOWN_LINK, FleetArgs, device_of, fleet_of, network_words
from planning.search import Plan

FITTED_TO = ("A100 SXM", "H100 SXM")  # the devices whose runs the constants were fitted to
# The settings that fsdp_train.py needs for a layout.
LAYOUT = (
    "tp",
    "sequence_parallel",
    "pp",
    "sharding",
    "shard_size",
    "activation_checkpointing",
    "recompute_every",
    "microbatch_size",
    "global_batch_size",
)
# Days that each job script runs, with all 50 restarts.
JOB_DAYS = {
    "slurm/train_srun.sbatch": 51 * 2 / 24,
    "slurm/train.sbatch": 51 * 12 / 24,
}

# Settings of which each kind of device may have its own: --device=h100,mi250 --price=2.5,1.2
OF_A_KIND = """device machine node_size network bandwidth memory_gb attention_efficiency fp8_tflops
    calibrate price watts""".split()
KINDS = ("device", "machine")  # of these, several values are several kinds

TrainerName = Literal["ours", "foundry"]


@dataclass
class PlanArgs(FleetArgs):
    """The fleet and the question."""

    interleave: int = 1  # pieces of the model on each pipeline stage; the trainer has only one
    choose: bool = False  # choose the layout even where a config file sets it
    global_batch_size: int = 0  # sequences of a step (0: 256 or a bit more, at least 4 a device)
    max_steps: int = 0  # steps of the run, from which its tokens and time follow
    trainer: TrainerName = "ours"  # foundry: reduce in bf16, residuals in fp32, as in its runs
    tokens: float = 0.0  # to train on (0: of max_steps, else 20 a parameter; adapters: 4800 steps)
    price: float = 0.0  # of one torch device for an hour; two kinds of device: 2.5,1.2
    watts: float = 0.0  # of one torch device with its share of the node (0: from the table)
    calibrate: str = ""  # a .csv of bench train, machine.json, a file of planning.calibrate --save
    sweep_devices: str = ""  # numbers of devices: 8,16,64
    budget: float = 0.0  # days: plan the Chinchilla-optimal model that trains in this many
    plot: bool = False  # draw sweep, kinds of device or memory; alone: the published MI250 runs
    out: str = "plan.png"  # where to draw
    json: bool = False  # print JSON

    def check(self) -> None:
        """UserError if two questions are asked."""
        super().check()
        one_question = not (self.budget and self.sweep_devices)
        require(one_question, "--budget and --sweep_devices are two questions: ask one")


# --------------------------------------------------------------------------------------------------
# The figures of a plan


def figures(plan: Plan, args: PlanArgs) -> dict:
    """All that a plan predicts, with the flags that launch it and what was assumed."""
    fleet, cfg = plan.fleet, plan.cfg
    n_params = flops.n_params(plan.m)
    tokens = args.tokens or TOKENS_PER_PARAMETER * n_params
    device_flops = plan.tokens_per_second * matmuls.flops_of_run(plan.m, cfg) / fleet.devices
    device_watts = watts(fleet.device, args)

    layout = {name: getattr(cfg, name) for name in LAYOUT}
    layout |= {"dp": fleet.dp, "interleave": fleet.interleave}
    expected = run_figures(plan.tokens_per_second, tokens, fleet.devices, device_watts, args.price)
    return {
        "n_params": n_params,
        "device": fleet.device.name,
        "devices": fleet.devices,
        "layout": layout,
        "seconds": plan.seconds,
        **expected,
        **bands(plan, expected),
        "tflops_per_device": device_flops / 1e12,
        "mfu": plan.mfu,
        "convention": matmuls.convention_of(cfg),
        "bytes": plan.bytes,
        "share_of_memory": plan.share_of_memory,
        "fits": plan.fits,
        "tokens": tokens,
        "max_steps": math.ceil(tokens / (cfg.global_batch_size * plan.m.max_seq_len)),
        "flags": flags(plan),
        "published": published(plan, device_flops / 1e12),
        "restarts": restarts(expected["days"]),
        "assumed": assumed(plan, args),
    }


def run_figures(
    rate: float, tokens: float, n_devices: int, device_watts: float | None, price: float
) -> dict:
    """The figures of a run that follow from its rate in tokens/s. None: not known, or no price."""
    device_hours = tokens / rate / 3600 * n_devices
    mwh = device_watts and device_hours * device_watts / 1e6
    cost = device_hours * price if price else None
    return {
        "tokens_per_second": rate,
        "days": device_hours / n_devices / 24,
        "mwh": mwh,
        "kwh_per_billion_tokens": mwh and 1e3 * mwh / (tokens / 1e9),
        "cost": cost,
        "tokens_per_cost": cost and tokens / cost,
    }


def bands(plan: Plan, expected: dict) -> dict:
    """The error bands of these figures: {"band": {name: [low, high]}, "certainty": text}.

    They are as wide as the errors in published runs of this kind, from the 10th to the 90th
    percentile.
    """
    low, high, text = band_of(plan)
    grows_with_rate = ("tokens_per_second", "tokens_per_cost")
    band = {}
    for name, value in expected.items():
        if value is None:
            band[name] = None
        elif name in grows_with_rate:
            band[name] = [value * low, value * high]
        else:
            band[name] = [value / high, value / low]
    return {"band": band, "certainty": text}


def band_of(plan: Plan) -> tuple[float, float, str]:
    """`certainty.band` of the plan, but no step is shorter than its matmuls.

    If what they reach is not known, than its matmuls at the peak.
    """
    low, high, text = certainty.band(plan.m, plan.cfg, plan.fleet)
    most = plan.seconds["step"] / plan.seconds["matmuls"]
    bound = "the matmuls alone"
    if plan.fleet.device.reachable is None:
        most /= step_time.Constants().reachable
        bound += " at the peak"
    if high > most:
        return low, most, f"{text}; at most as fast as {bound}"
    return low, high, text


def rate_band(plan: Plan) -> tuple[float, float]:
    """The error band of the plan's tokens/s."""
    low, high, _ = band_of(plan)
    return low * plan.tokens_per_second, high * plan.tokens_per_second


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
    if plan.cfg.activation_checkpointing == "none":
        del values["recompute_every"]
    if plan.cfg.sharding_mode.over != "group":
        del values["shard_size"]
    if plan.fleet.tp == 1:  # with tensor ranks a config file may say otherwise
        del values["sequence_parallel"]
    return " ".join(f"--{name}={value}" for name, value in values.items())


# --------------------------------------------------------------------------------------------------
# What was assumed


def assumed(plan: Plan, args: PlanArgs) -> list[str]:
    """What a plan rests on and the user did not set."""
    return [*assumed_fleet(plan, args), *assumed_speed(plan, args), *assumed_run(plan, args)]


def assumed_fleet(plan: Plan, args: PlanArgs) -> list[str]:
    """Nodes, links, cards and the network."""
    device, fleet = plan.fleet.device, plan.fleet
    link = f"not known, so {UNKNOWN_LINK:g}"
    if device.link_gbs:
        link = f"{device.link_gbs:g}"
    lines = []
    if fleet.devices > 1:
        lines.append(f"{fleet.node_size} devices a node, link {link} GB/s each way")
    if device.per_card > 1:
        cards = f"{fleet.devices / device.per_card:g} cards"
        lines.append(f"a card is {device.per_card} torch devices: {fleet.devices} are {cards}")
    network = network_words(fleet, args)
    if network and fleet.devices > fleet.node_size:
        lines.append(network)
    return lines


def assumed_speed(plan: Plan, args: PlanArgs) -> list[str]:
    """Where the speed comes from."""
    device = plan.fleet.device
    if args.calibrate:
        lines = list(plan.fleet.notes)
    elif device.name.startswith(FITTED_TO):
        lines = ["speed as LLM Foundry's of 2023 on this device; our trainer's was not measured"]
    else:
        fix = "set --calibrate to use your own"
        lines = [f"speed EXTRAPOLATED: the fit has no run on {device.name}: {fix}"]
    if device.reachable is None:
        share = f"{step_time.Constants().reachable:.0%}"
        lines.append(f"matmuls reach {share} of the peak: not measured on {device.name}")
    return lines + assumed_kernels(plan)


def assumed_kernels(plan: Plan) -> list[str]:
    """Whose attention, compiled blocks, fp8, tiny kernels, and speeds that no matmuls reach."""
    device, cfg = plan.fleet.device, plan.cfg
    step = step_time.StepTime(plan.m, cfg, plan.fleet)
    lines = []
    if device.attention is None:
        share = step_time.attention_share(device, step.c)
        fix = "set --attention_efficiency for newer ones"
        lines.append(f"attention at {share:.0%} of the peak, as Triton's kernels of 2023: {fix}")
    if cfg.compile is True:
        share = 1 - step.c.compiled
        lines.append(f"compiled blocks read and write {share:.0%} less: counted, not measured")
    elif cfg.tp * cfg.pp == 1:
        lines.append("blocks are planned as eager, as in the published runs: set --compile")
    if device.matmul_fp8_tflops:
        at = f"linear layers in fp8 at {device.matmul_fp8_tflops:g} TFLOP/s"
        lines.append(f"{at}: the trainer has no fp8, and no run in it was compared")
        lines.append("MFU is a share of the bf16 peak, so in fp8 it may be more than 100%")
    if certainty.launch_share(plan.m, cfg, plan.fleet) > 1:
        start = f"about {1e3 * certainty.LAUNCHES:g} ms to start, longer than they run"
        lines.append(f"the kernels of a block take {start}: that is not in the model")
    return lines + doubtful_kernels(plan) + doubt(plan)


def reachable_share(device: Device) -> float:
    """The share of the bf16 peak that large matmuls reach, assumed if nobody has measured it."""
    return device.reachable or step_time.Constants().reachable


def doubtful_kernels(plan: Plan) -> list[str]:
    """The lines about kernels that someone has set or measured faster than large matmuls are.

    And about fp8 that is slower than bf16.
    """
    device = plan.fleet.device
    reachable = reachable_share(device)
    lines = []
    if device.attention and device.attention > reachable:
        share = f"attention at {device.attention:.0%} of the peak"
        lines.append(f"DOUBTFUL: {share}, but large matmuls reach {reachable:.0%}")

    fp8_tflops, in_bf16 = device.matmul_fp8_tflops, reachable * device.bf16_tflops
    if not fp8_tflops:
        return lines
    if fp8_tflops > reachable * device.fp8_tflops:
        share = f"fp8 matmuls at {fp8_tflops / device.fp8_tflops:.0%} of the fp8 peak"
        lines.append(f"DOUBTFUL: {share}, but those in bf16 reach {reachable:.0%} of theirs")
    if fp8_tflops < (1 - 1e-9) * in_bf16:
        slower = f"fp8 matmuls at {fp8_tflops:g} TFLOP/s are slower than those in bf16"
        lines.append(f"DOUBTFUL: {slower}, which reach {in_bf16:.0f}")
    return lines


def doubt(plan: Plan) -> list[str]:
    """The line about a plan that is faster than large matmuls; none if it is not.

    With fp8 than such matmuls at the same share of the fp8 peak: none can be faster.
    """
    device = plan.fleet.device
    reachable = reachable_share(device)
    peak, name = device.bf16_tflops, "peak"
    if device.matmul_fp8_tflops:
        peak, name = device.fp8_tflops, "fp8 peak"
    share = hardware_tflops(plan) / peak
    if share <= reachable:
        return []
    reached = f"{share:.0%} of the {name} (masked scores counted)"
    return [f"DOUBTFUL: {reached}, but large matmuls reach {reachable:.0%}"]


def assumed_run(plan: Plan, args: PlanArgs) -> list[str]:
    """Tokens, batch, attention, memory of interleaving, power, what was not measured or lacks."""
    device, fleet = plan.fleet.device, plan.fleet
    lines = assumed_finetune(plan, args) if plan.cfg.lora_rank else []
    if not args.tokens:
        lines.append(f"{TOKENS_PER_PARAMETER} tokens a parameter: set --tokens")
    if not args.global_batch_size:
        batch = f"a global batch of {plan.cfg.global_batch_size} sequences"
        lines.append(f"{batch}: set --global_batch_size")
    if plan.m.alibi or plan.m.attn_impl != "triton":
        kernel = "attention by a fused kernel: it stores no scores"
        lines.append(f"{kernel}, and ALiBi adds no columns to q and k")
    if fleet.interleave > 1:
        more = "up to (pp - 1) / (pp x interleave) more activations"
        lines.append(f"memory is counted without interleaving, which keeps {more}")
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


def assumed_finetune(plan: Plan, args: PlanArgs) -> list[str]:
    """Where the length of a run with adapters is from, if it is not plainly the user's."""
    cfg = plan.cfg
    fix = "set --max_steps or --tokens"
    if not args.max_steps and args.tokens == tokens_of_steps(plan.m, cfg):
        return [f"{cfg.max_steps:,} steps, fsdp_train.py's default: {fix}"]
    of_base = args.tokens / flops.n_params(plan.m)
    if of_base > 1:
        tokens = f"{rounded(of_base)} tokens for each parameter of the base"
        return [f"{tokens}: that is pretraining's length, not a finetune's: {fix}"]
    return []


def tokens_of_steps(m: MPTConfig, cfg: TrainConfig) -> float:
    """The tokens of cfg.max_steps."""
    return float(cfg.max_steps * cfg.global_batch_size * m.max_seq_len)


# --------------------------------------------------------------------------------------------------
# A plan as text


def text(plan: Plan, args: PlanArgs, own: Plan | None = None, below: list[str] = ()) -> str:
    """A plan for a person to read. own: the plan of the settings as they are, to compare with.

    below: more lines, before those about what was assumed.
    """
    values = figures(plan, args)
    lines = [
        *layout_lines(plan),
        "",
        *step_and_memory_lines(plan),
        "",
        *summary_lines(plan, values, args),
        *published_lines(values["published"]),
        *restart_lines(values["restarts"]),
        *comparison_lines(comparison(plan, own)),
    ]
    if values["flags"]:
        lines.append(f"flags       {values['flags']}")
    return "\n".join(lines + [*below] + labelled("assumed", values["assumed"]))


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
    ranks = counted(fleet.dp, "data-parallel rank")
    batch = f"{ranks} x {rows}, microbatches of {up_to}{size}: {n_microbatches}"
    in_groups = cfg.sharding_mode.over == "group"
    sharding = cfg.sharding + (f", shards of {cfg.shard_size}" if in_groups else "")

    size = rounded(flops.n_params(plan.m) / 1e9)
    model = f"{size}B parameters, sequence {plan.m.max_seq_len}"
    in_sequence = " (sequence parallel)" if cfg.sequence_parallel else ""
    split = f"dp {fleet.dp} x tp {fleet.tp}{in_sequence} x pp {fleet.pp}, {sharding}"
    mode = f"checkpointing {search.checkpointing(cfg)}"
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
    fits = "fits" if plan.fits else f"DOES NOT FIT, {search.too_much(plan)}"
    band = values["band"]

    speed = f"{values['tokens_per_second']:,.0f} tokens/s {span(band['tokens_per_second'])}"
    tflops = f"{values['tflops_per_device']:.1f} TFLOP/s a device"
    run = f"{tokens_text(values['tokens'])}, --max_steps={values['max_steps']}"
    time = duration(values["days"], band["days"])
    power = energy(values["mwh"], band["mwh"]) if values["mwh"] else "energy n/a: set --watts"
    mfu = f"MFU {values['mfu']:.1%}"
    if plan.fleet.device.matmul_fp8_tflops:
        mfu += " of the bf16 peak"
    cost = ""
    if args.price:
        cost = f", {money(values['cost'], band['cost'])} at {args.price:g} a device-hour"
    return [
        f"memory      {values['share_of_memory']:.0%} of {memory_gb}: {fits}",
        f"speed       {speed}, {tflops}, {mfu} ({values['convention']})",
        f"the run     {run}: {time}, {power}{cost}",
        f"certainty   {values['certainty']}",
    ]


def span(band: list[float]) -> str:
    """An error band as text: (36,900 to 46,100)."""
    low, high = band
    return f"({rounded(low)} to {rounded(high)})"


def counted(n: float | str, unit: str) -> str:
    """A number and its unit, in the singular or the plural: 1 day, 2 days."""
    return f"{n} {unit}" if str(n) == "1" else f"{n} {unit}s"


def tokens_text(tokens: float) -> str:
    """134B tokens; below a billion 32.8M, below a million all of them."""
    if tokens < 1e6:
        return counted(f"{tokens:,.0f}", "token")
    unit, letter = (1e9, "B") if tokens >= 1e9 else (1e6, "M")
    return f"{rounded(tokens / unit, 4)}{letter} tokens"


# Units of time, {name: how many make a day}, the longest first.
OF_A_DAY = {"day": 1, "hour": 24, "minute": 24 * 60, "second": 24 * 60 * 60}


def duration(days: float, band: list[float]) -> str:
    """The time of a run and its band as text, in the longest unit of which it takes two or more."""
    fitting = [unit for unit, n in OF_A_DAY.items() if days * n >= 2]
    unit = fitting[0] if fitting else "second"
    factor = OF_A_DAY[unit]
    return f"{counted(rounded(days * factor), unit)} {span([end * factor for end in band])}"


def energy(mwh: float, band: list[float]) -> str:
    """The energy of a run and its band as text, in MWh, kWh or Wh."""
    factor, unit = (1, "MWh") if mwh >= 1 else (1e3, "kWh")
    if mwh < 1e-5:
        factor, unit = 1e6, "Wh"
    return f"{rounded(mwh * factor)} {unit} {span([end * factor for end in band])}"


def money(cost: float, band: list[float]) -> str:
    """The cost of a run and its band as text."""
    return f"{cost:,.0f} {span(band)}" if cost >= 10 else f"{rounded(cost)} {span(band)}"


def rounded(x: float, digits: int = 3) -> str:
    """A number with this many digits that count: 1,010, where %g would write 1.01e+03."""
    short = float(f"{x:.{digits}g}")
    return f"{short:,.0f}" if short >= 1e5 else f"{short:,g}"


def published(plan: Plan, tflops: float) -> dict | None:
    """The published TFLOP/s of a device for this shape, beside the plan's; None if there are none.

    tflops: of a device, without what is recomputed.
    """
    shape = plan.m.n_layers, plan.m.d_model
    if plan.fleet.device.name != "MI250X GCD" or shape not in PUBLISHED_FRONTIER:
        return None
    return {
        "tflops_per_device": PUBLISHED_FRONTIER[shape],
        "share_of_peak": PUBLISHED_FRONTIER[shape] / plan.fleet.device.bf16_tflops,
        "source": "arXiv 2312.12705",
        "planned": tflops,
        "planned_with_recomputation": hardware_tflops(plan),
    }


def published_lines(found: dict | None) -> list[str]:
    """The lines of `published`."""
    if found is None:
        return []
    speed = f"{found['tflops_per_device']} TFLOP/s a GCD on Frontier"
    share = f"{found['share_of_peak']:.1%} of the peak"
    counted, again = found["planned"], found["planned_with_recomputation"]
    ours = f"this plan: {counted:.1f}"
    if again > 1.001 * counted:
        ours += f", or {again:.1f} with what is recomputed, as Megatron's programs count:"
        ours += " we do not know which was published"
    return labelled("published", [f"{speed}, {share} ({found['source']})", ours])


def hardware_tflops(plan: Plan) -> float:
    """TFLOP/s of a device, with the forwards that are computed twice."""
    per_token = matmuls.flops_of_run(plan.m, plan.cfg, recomputed=True)
    return plan.tokens_per_second * per_token / plan.fleet.devices / 1e12


def restarts(days: float) -> dict[str, float]:
    """{job script: days that it runs} of those whose 50 restarts are used before the run ends."""
    return {script: limit for script, limit in JOB_DAYS.items() if days > limit}


def restart_lines(scripts: dict[str, float]) -> list[str]:
    """The lines of `restarts`."""
    return labelled(
        "restarts",
        [
            f"{script} ends after 50 restarts, {limit:.3g} days: submit it again then"
            for script, limit in scripts.items()
        ],
    )


def comparison(plan: Plan, own: Plan | None) -> dict | None:
    """How the settings as they are would do; None if the plan does not change them."""
    if own is None:
        return None
    changed = [name for name in LAYOUT if getattr(own.cfg, name) != getattr(plan.cfg, name)]
    if own.cfg.activation_checkpointing == "none" and "recompute_every" in changed:
        changed.remove("recompute_every")  # of what is not recomputed
    if not changed:
        return None
    return {
        "settings": {name: getattr(own.cfg, name) for name in changed},
        "fits": own.fits,
        "tokens_per_second": own.tokens_per_second,
        "gain": plan.tokens_per_second / own.tokens_per_second - 1,
    }


def comparison_lines(found: dict | None) -> list[str]:
    """The line of `comparison`."""
    if found is None:
        return []
    settings = ", ".join(f"{name}={value}" for name, value in found["settings"].items())
    result = "DOES NOT FIT"
    if found["fits"]:
        gain = found["gain"]
        difference = f"{abs(gain):.0%} {'faster' if gain >= 0 else 'slower'}"
        result = f"{found['tokens_per_second']:,.0f} tokens/s; this plan is {difference}"
    return [f"your layout {settings}: {result}"]


# --------------------------------------------------------------------------------------------------
# Below a plan: other layouts, what would fit, budgets


def others_lines(plans: list[Plan]) -> list[str]:
    """The table of the fastest plans, from search.best. Nothing if there is only one."""
    if len(plans) == 1:
        return []
    choices = f"the {len(plans)} fastest choices of tp, pp and sharding"
    best = "each with its fastest checkpointing and microbatch"
    return ["", f"{choices}, {best}", *search.table(plans), ""]


def within_error(plan: Plan, simpler: list[Plan]) -> Plan | None:
    """The simplest plan that is slower by less than half the width of `plan`'s error band."""
    low, high = rate_band(plan)
    for other in simpler:
        if plan.tokens_per_second - other.tokens_per_second < (high - low) / 2:
            return other
    return None


def simpler_lines(plan: Plan, other: Plan | None) -> list[str]:
    """The line about a simpler plan, from `within_error`."""
    if other is None:
        return []
    slower = 1 - other.tokens_per_second / plan.tokens_per_second
    split = f"tp {other.fleet.tp} pp {other.fleet.pp} {other.cfg.sharding}"
    error = f"is {slower:.1%} slower, which is within the error: simpler"
    return labelled("or simpler", [f"{split} {error}", flags(other)])


def batch_lines(plan: Plan, ruled_out: list[int]) -> list[str]:
    """The line about more data-parallel ranks, from search.ruled_out_by_batch."""
    if not ruled_out:
        return []
    batch = plan.cfg.global_batch_size
    fix = memory.nearest_batches(batch, {ruled_out[0]}).removeprefix("set ")
    degrees = ", ".join(map(str, ruled_out))
    return labelled("batch", [f"the batch rules out dp {degrees}: {fix} would not"])


def others_json(plans: list[Plan]) -> list[dict]:
    """The plans of search.best in short."""
    return [
        {
            "tokens_per_second": plan.tokens_per_second,
            "band": {"tokens_per_second": list(rate_band(plan))},
            "share_of_memory": plan.share_of_memory,
            "needs": search.needs(plan),
            "flags": flags(plan),
        }
        for plan in plans
    ]


def budget_lines(trainings: list[Training], days: float) -> list[str]:
    """The models of budget.budget, their tokens, and the loss that Chinchilla's fit predicts."""
    lines = []
    time = counted(f"{days:g}", "day")
    for label, training in zip(("budget", "or smaller"), trainings, strict=False):
        about = training_text(training)
        if training is not trainings[0]:
            penalty = training.loss / trainings[0].loss - 1
            about = f"smaller, trained for longer: {about}, {penalty:+.1%}"
        elif training.limited_by_memory:
            about = f"{time}, not compute-optimal, memory limits it: {about}"
        else:
            about = f"{time}, compute-optimal: {about}"
        layout = flags(training.plan)
        launch = f"{model_flags(training.plan.m)} {layout} --max_steps={training.steps}"
        lines += labelled(label, [about, launch])
    fit = "1.69 + 406.4 / N^0.34 + 410.7 / D^0.28, Chinchilla's published fit (arXiv 2203.15556)."
    rule = "Its rule is 20 tokens a parameter. By the fit, a smaller model trained for longer loses"
    return lines + labelled("loss", [fit, rule, "little or nothing, and it is cheaper to serve."])


def training_text(training: Training) -> str:
    """Parameters, tokens and predicted loss."""
    size = rounded(flops.n_params(training.plan.m) / 1e9)
    each = f"{training.tokens_per_parameter:.1f} a parameter"
    sizes = f"{size}B parameters on {tokens_text(training.tokens)}, {each}"
    return f"{sizes}: predicted loss {training.loss:.3f}"


def training_json(training: Training, args: PlanArgs) -> dict:
    """A model of budget.budget: its plan's figures, the flags of its shape, its predicted loss."""
    return {
        **figures(training.plan, replace(args, tokens=float(training.tokens))),
        "model": model_flags(training.plan.m),
        "tokens_per_parameter": training.tokens_per_parameter,
        "limited_by_memory": training.limited_by_memory,
        "predicted_loss": training.loss,
    }


def model_flags(m: MPTConfig) -> str:
    """The flags of a model that budget.budget has shaped, with what the user set beside the shape.

    Its attention is the trainer's choice: plans take any fused one for `sdpa`.
    """
    names = ["d_model", "n_heads", "n_layers"]
    for field in fields(m):
        is_set = getattr(m, field.name) != field.default
        planned_as_fused = field.name == "attn_impl" and m.attn_impl == "sdpa"
        if is_set and field.name not in SHAPE and not planned_as_fused:
            names.append(field.name)
    return " ".join(f"--{name}={getattr(m, name)}" for name in names)


# --------------------------------------------------------------------------------------------------
# A sweep


def sweep_json(rows: list[dict], args: PlanArgs) -> list[dict]:
    """The rows of budget.sweep as JSON."""
    offers = {row["devices"]: Offer(args, row["devices"], row["strong"]) for row in good_rows(rows)}
    found = []
    for row in rows:
        if "problem" in row:
            found.append(row)
            continue
        strong, weak = row["efficiency"]
        offer = offers[row["devices"]]
        of_row = {
            "devices": row["devices"],
            "efficiency": {"strong": strong, "weak": weak},
            "best": best_of(offer, list(offers.values())),
            "strong": offer.figures,
            "weak": figures(row["weak"], args),
        }
        found.append(of_row)
    return found


def good_rows(rows: list[dict]) -> list[dict]:
    """The rows of budget.sweep that have plans."""
    return [row for row in rows if "problem" not in row]


def sweep_text(rows: list[dict], args: PlanArgs) -> str:
    """The rows of budget.sweep for a person to read."""
    heads = f"{'tokens/s':>13}{'TFLOP/s':>9}{'MFU':>8}{'efficiency':>12}  "
    lines = [
        f"{'':<10}{'strong scaling':^44}  {'weak scaling':^44}  strong scaling's",
        f"{'devices':>8}  {heads}{heads}  {'error band':<26}layout",
    ]
    for row in rows:
        if "problem" in row:
            lines.append(f"{row['devices']:>8}  {row['problem']}")
            continue
        strong_efficiency, weak_efficiency = row["efficiency"]
        strong = sweep_cells(row["strong"], strong_efficiency)
        weak = sweep_cells(row["weak"], weak_efficiency)

        band = span(rate_band(row["strong"]))
        layout = layout_text(row["strong"])
        lines.append(f"{row['devices']:>8}  {strong}{weak}  {band:<26}{layout}")

    offers = [Offer(args, row["devices"], row["strong"]) for row in good_rows(rows)]
    largest = offers[-1].plan
    lines += ["", f"MFU: {matmuls.convention_of(largest.cfg)}"]
    if args.price:
        return "\n".join([*lines, "", comparison_text(offers)])
    lines += [f"certainty: {line}" for line in certainty_lines(offers)]
    lines += [f"assumed: {line}" for line in [*assumed(largest, args), *doubts(rows, largest)]]
    return "\n".join(lines)


def doubts(rows: list[dict], largest: Plan) -> list[str]:
    """The plans of a sweep, beside the largest fleet's, that are faster than matmuls."""
    lines = []
    for row in rows:
        for plan in (row.get("strong"), row.get("weak")):
            if plan and plan is not largest:
                lines += [f"on {row['devices']}: {line}" for line in doubt(plan)]
    return list(dict.fromkeys(lines))  # each once: both plans of the smallest fleet are the same


def layout_text(plan: Plan) -> str:
    """The layout in a table: tp and pp if there are any, sharding, microbatch, checkpointing."""
    cfg, fleet = plan.cfg, plan.fleet
    split = f"tp {fleet.tp} pp {fleet.pp} " if fleet.tp * fleet.pp > 1 else ""
    return f"{split}{cfg.sharding}, {cfg.microbatch_size}, {search.checkpointing(cfg)}"


def sweep_cells(plan: Plan, efficiency: float) -> str:
    """Tokens/s, TFLOP/s of a device, MFU and efficiency."""
    tflops = plan.mfu * plan.fleet.device.bf16_tflops
    return f"{plan.tokens_per_second:>13,.0f}{tflops:>9.1f}{plan.mfu:>8.1%}{efficiency:>12.1%}  "


# --------------------------------------------------------------------------------------------------
# Kinds of device beside each other


def split_kinds(argv: list[str]) -> list[list[str]]:
    """argv for each kind of device that it names.

    UserError if a name is empty, or values for some of them lack.
    """
    lists = {}
    for word in argv:
        name = flops.flag_name(word)
        if name in OF_A_KIND and "," in word:
            lists[word] = word.partition("=")[2].split(",")
    kinds = [values for word, values in lists.items() if flops.flag_name(word) in KINDS]
    if not kinds:
        return [argv]

    n = len(kinds[0])
    for word, values in lists.items():
        if flops.flag_name(word) in KINDS:
            empty = f"{word} has an empty name: remove the extra comma"
            require(all(map(str.strip, values)), empty)
        fix = f"{n} kinds of device need one value, or {n}"
        require(len(values) == n, f"{word} has {len(values)} values: {fix}")
    return [[of_kind(word, lists, i) for word in argv] for i in range(n)]


def of_kind(word: str, lists: dict[str, list[str]], i: int) -> str:
    """A word of argv for kind i. lists: {word: its values}, of the words that have several."""
    if word not in lists:
        return word
    flag = word.partition("=")[0]
    return f"{flag}={lists[word][i].strip()}"


# What is compared: {word: (the name of a figure, how it is written)}. Less is better.
BEST = {"fastest": ("days", duration), "cheapest": ("cost", money), "least kWh": ("mwh", energy)}


@dataclass(frozen=True)
class Offer:
    """One kind of device in one number, and what it would do with the run."""

    args: PlanArgs  # about this kind alone
    devices: int
    plan: Plan | None = None
    problem: str = ""  # why there is no plan
    unlike: str = ""  # the settings that tell it from other kinds of this name and price

    @property
    def label(self) -> str:
        """The kind, its price if the user gave one, and what tells it from others."""
        return kind_label(self.args) + self.unlike

    @cached_property
    def figures(self) -> dict:
        """`figures` of the plan, or why there is none."""
        if self.plan is None:
            name = device_of(self.args).name
            return {"device": name, "devices": self.devices, "problem": self.problem}
        return figures(self.plan, self.args)


def kind_label(args: PlanArgs) -> str:
    """The name of a kind of device, and its price if the user gave one."""
    machine = f" of {args.machine}" if args.machine else ""
    price = f" at {args.price:g}" if args.price else ""
    return f"{device_of(args).name}{machine}{price}"


def differences(kinds: list[PlanArgs]) -> list[str]:
    """For each kind, the settings that tell it from those with the same label: ", network 100"."""
    found = []
    for args in kinds:
        alike = [other for other in kinds if kind_label(other) == kind_label(args)]
        values = {name: [getattr(other, name) for other in alike] for name in OF_A_KIND}
        names = [name for name in OF_A_KIND if len(set(values[name])) > 1]
        found.append("".join(f", {name} {setting_text(getattr(args, name))}" for name in names))
    return found


def require_own_calibration(kinds: list[PlanArgs]) -> None:
    """UserError if different devices share one file of --calibrate."""
    names = {device_of(args).name for args in kinds}
    shared = kinds[0].calibrate
    if shared and len(names) > 1 and all(args.calibrate == shared for args in kinds):
        fix = config.shell(f"--calibrate={shared}{',' * (len(kinds) - 1)}")
        one = f"--calibrate={shared} was measured on one device, and you name {len(names)}"
        raise UserError(f"{one}: give one for each, or none, between commas: {fix}")


def setting_text(value: float | str) -> str:
    """A setting in a label. What is not set is the usual one."""
    if not value:
        return "as usual"
    return value if isinstance(value, str) else f"{value:g}"


def comparison_text(offers: list[Offer]) -> str:
    """Time, cost and energy of the same run on each of these, for a person to read."""
    planned = [offer for offer in offers if offer.plan]
    plan, values = planned[0].plan, planned[0].figures
    size = rounded(flops.n_params(plan.m) / 1e9)
    batch = f"{plan.cfg.global_batch_size} x {plan.m.max_seq_len}"
    prices = any(offer.args.price for offer in planned)
    cost_heads = f"{'cost':>28}{'M tokens/cost':>15}" if prices else ""

    width = max(len(offer.label) for offer in offers)
    heads = (
        f"{'':<{width}}{'devices':>9}{'tokens/s':>13}{'time':>30}{cost_heads}{'kWh/B tokens':>14}"
    )
    return "\n".join(
        [
            f"{size}B parameters, {tokens_text(values['tokens'])}, batches of {batch}",
            "",
            f"{heads}  layout",
            *[f"{offer.label:<{width}}{comparison_row(offer, prices)}" for offer in offers],
            "",
            *best_lines(planned),
            *labelled("certainty", certainty_lines(planned)),
            *labelled("assumed", assumed_of_all(planned)),
        ]
    )


def comparison_row(offer: Offer, prices: bool) -> str:
    """One row of `comparison_text`, after the label. prices: does the table have costs?"""
    row = f"{offer.devices:>9}"
    if offer.plan is None:
        return f"{row}  {offer.problem}"
    values = offer.figures
    band = values["band"]
    row += f"{values['tokens_per_second']:>13,.0f}{duration(values['days'], band['days']):>30}"
    if prices and offer.args.price:
        millions = rounded(values["tokens_per_cost"] / 1e6)
        row += f"{money(values['cost'], band['cost']):>28}{millions:>15}"
    elif prices:
        row += f"{'no --price':>28}{'':>15}"
    kwh = values["kwh_per_billion_tokens"]
    row += f"{rounded(kwh) if kwh else 'n/a':>14}"
    return f"{row}  {layout_text(offer.plan)}"


def best_lines(offers: list[Offer]) -> list[str]:
    """Which is fastest, cheapest and takes the least energy; and whether the bands leave doubt."""
    lines = []
    for word, (name, written) in BEST.items():
        best, rival, in_doubt = best_and_rival(offers, name)
        if best is None:
            continue
        text = f"{word:<12}{amount(best, name, written)}"
        if rival:
            text += f"; {amount(rival, name, written)}{': the bands overlap' * in_doubt}"
        lines.append(text)
    return lines


def best_and_rival(offers: list[Offer], name: str) -> tuple[Offer | None, Offer | None, bool]:
    """The offer with the least of a figure, the best of other kinds, and whether bands overlap.

    None if the figure is not known of all: there is nothing to compare without a price or watts.
    """
    if any(not offer.figures[name] for offer in offers):
        return None, None, False
    best = min(offers, key=lambda offer: offer.figures[name])
    others = [offer for offer in offers if offer.label != best.label]
    if not others:
        return best, None, False
    rival = min(others, key=lambda offer: offer.figures[name])
    in_doubt = rival.figures["band"][name][0] < best.figures["band"][name][1]
    return best, rival, in_doubt


def best_of(offer: Offer, offers: list[Offer]) -> dict[str, dict]:
    """What an offer is the best of all in, as JSON: {"fastest": {"bands_overlap": False}, ...}."""
    found = {}
    for word, (name, _) in BEST.items():
        best, _, in_doubt = best_and_rival(offers, name)
        if best is offer:
            found[word] = {"bands_overlap": in_doubt}
    return found


def comparison_json(offers: list[Offer]) -> list[dict]:
    """The figures of all offers, and which is the best in what."""
    planned = [offer for offer in offers if offer.plan]
    rows = []
    for offer in offers:
        best = {"best": best_of(offer, planned)} if offer.plan else {}
        rows.append({"label": offer.label, **best, **offer.figures})
    return rows


def amount(offer: Offer, name: str, written: Callable[[float, list[float]], str]) -> str:
    """A figure of an offer with its band, and the fleet, as text."""
    values = offer.figures
    return f"{written(values[name], values['band'][name])} on {offer.devices} x {offer.label}"


def certainty_lines(offers: list[Offer]) -> list[str]:
    """What the bands rest on, with the fleets that share each sentence."""
    fleets = {}  # {(kind, sentence): numbers of devices}
    for offer in offers:
        fleets.setdefault((offer.label, offer.figures["certainty"]), []).append(offer.devices)
    return [
        f"{', '.join(map(str, counts))} x {label}: {text}"
        for (label, text), counts in fleets.items()
    ]


def assumed_of_all(offers: list[Offer]) -> list[str]:
    """What all plans rest on, then what those of one kind do. Of each kind, the largest fleet.

    Of smaller fleets, what is doubtful.
    """
    largest = {offer.label: assumed(offer.plan, offer.args) for offer in offers}
    shared = set.intersection(*map(set, largest.values()))
    lines = [line for line in next(iter(largest.values())) if line in shared]
    for label, own in largest.items():
        lines += [f"{label}: {line}" for line in own if line not in shared]
    last = {offer.label: offer for offer in offers}
    for offer in offers:
        if offer is not last[offer.label]:
            lines += [f"{offer.devices} x {offer.label}: {line}" for line in doubt(offer.plan)]
    return lines


# --------------------------------------------------------------------------------------------------
# The program


def main(argv: list[str]) -> None:
    """Print the answer for the settings in argv as they are: nothing is chosen."""
    m, cfg, args = config.load(memory.with_base(argv), MPTConfig, TrainConfig, PlanArgs)
    fleet = fleet_of(args, cfg.tp, cfg.pp, args.interleave)
    plan = search.evaluate(m, cfg, fleet, step_time.Constants(), step_time.OURS)
    print(text(plan, args))


if __name__ == "__main__":
    config.run(main)
