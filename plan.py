"""What a run will need, how fast it will be and how it will scale, before it is launched.

    python plan.py configs/mpt7b.py --device=mi250 --devices=64 --network=100     a layout, and what it gives
    python plan.py configs/mpt7b.py --device=mi250 --sweep_devices=8,64,256       strong and weak scaling
    python plan.py --device=h100 --devices=64 --budget=7                          the best model of seven days
    python plan.py --plot                                                         pictures: scaling, memory

What a config file or a flag sets is taken; what is `auto` or not set (tp, pp, sharding, microbatch, checkpointing) is
chosen: the least tensor and pipeline parallelism with which the model fits, and then whatever is fastest.

planning/search.py chooses, with the bytes of planning/memory.py and the seconds of
planning/step_time.py. Its constants were fitted to LLM Foundry's published runs of MPT on A100 and H100
(bench/results/planner.md has every row's error); any other device is extrapolated, and says so, until
`--calibrate=FILE` brings a measurement: a machine.json of `bench machine`, or a table of `bench train`. The last
lines of a plan say what was assumed. fsdp_train.py itself has no tensor or pipeline parallelism yet.

Read next: planning/README.md.
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
from devices import NODE_OVER_BOARD, NODE_WATTS, Device
from planning import calibrate, picture, search, step_time
from planning.search import TOKENS_PER_PARAMETER, LayoutArgs, Plan
from planning.step_time import Constants, Fleet

CALIBRATED = ("A100 SXM", "H100 SXM")  # devices whose runs the constants were fitted to
NETWORK = 100.0  # GB/s of a node, if nothing is said: 800 Gb/s
LAYOUT = (
    "sharding",
    "shard_size",
    "activation_checkpointing",
    "microbatch_size",
    "global_batch_size",
)
JOB_DAYS = {
    "slurm/train_srun.sbatch": 51 * 2 / 24,
    "slurm/train.sbatch": 51 * 12 / 24,
}  # with all 50 restarts


@dataclass
class PlanArgs:
    """The fleet and the question."""

    device: str = (
        "auto"  # the kind: mi250, h100, ... (python devices.py lists them); one torch device each
    )
    devices: int = 8  # how many torch devices
    node_size: int = 8  # torch devices of a node
    network: float = 0.0  # GB/s of a node's network, each way (0: 100 is assumed where there is more than one node)
    interleave: int = 1  # pieces of the model on each stage
    choose: bool = False  # choose the layout even where a config file sets it
    global_batch_size: int = (
        0  # sequences of a step (0: 256 or a little more, and at least 4 a device)
    )
    max_steps: int = 0  # steps of the run, for its time
    trainer: Literal["ours", "foundry"] = (
        "ours"  # foundry: reductions in bf16, residuals in fp32, as published rows
    )
    tokens: float = 0.0  # to train on (0: those of max_steps, else 20 a parameter)
    price: float = 0.0  # of one torch device for an hour
    watts: float = 0.0  # of one torch device with its share of the node (0: of the table)
    calibrate: str = ""  # machine.json of bench machine, or a .csv of bench train
    sweep_devices: str = ""  # numbers of devices: 8,16,64
    budget: float = 0.0  # days: the Chinchilla-optimal model that these devices train in them
    plot: bool = False  # draw pictures: of the sweep, else of the published MI250 runs and of the memory by sharding
    out: str = "plan.png"  # where
    json: bool = False  # print JSON

    def check(self) -> None:
        for name in ("devices", "node_size", "interleave"):
            require(
                getattr(self, name) > 0, f"{name} must be at least 1, not {getattr(self, name)}"
            )
        for name in ("network", "tokens", "price", "watts", "budget"):
            require(
                0 <= getattr(self, name) < math.inf,
                f"{name} must be 0 or more, not {getattr(self, name)}",
            )
        require(
            not (self.budget and self.sweep_devices),
            "--budget and --sweep_devices are two questions: ask one",
        )


def trainer(args: PlanArgs) -> step_time.Trainer:
    return step_time.FOUNDRY if args.trainer == "foundry" else step_time.OURS


# ---------------------------------------------------------------------------------------------------------------------
# What a plan says


def figures(one: Plan, args: PlanArgs) -> dict:
    """All that a plan predicts."""
    device, n, rate = one.fleet.device, one.fleet.devices, one.tokens_per_second
    tokens = args.tokens or TOKENS_PER_PARAMETER * flops.n_params(one.m)
    hours = one.hours(tokens)
    layout = {name: getattr(one.cfg, name) for name in LAYOUT} | {
        "tp": one.fleet.tp,
        "pp": one.fleet.pp,
    }
    return {
        "n_params": flops.n_params(one.m),
        "device": device.name,
        "devices": n,
        "layout": {**layout, "dp": one.fleet.dp, "interleave": one.fleet.interleave},
        "seconds": one.seconds,
        "tokens_per_second": rate,
        "tflops_per_device": rate * flops.train_flops_per_token(one.m) / n / 1e12,
        "mfu": one.mfu,
        "convention": flops.CONVENTION,
        "bytes": one.bytes,
        "share_of_memory": one.bytes["peak"] / (device.memory_gb * 2**30),
        "fits": one.fits,
        "tokens": tokens,
        "max_steps": math.ceil(tokens / (one.cfg.global_batch_size * one.m.max_seq_len)),
        "days": hours / 24,
        "mwh": watts(device, args) and hours * n * watts(device, args) / 1e6,
        "cost": hours * n * args.price,
        "flags": flags(one),
        "assumed": assumed(one, args),
    }


def watts(device: Device, args: PlanArgs) -> float | None:
    """Of one torch device with its share of the node. None: not known."""
    known = next((w for name, w in NODE_WATTS.items() if device.name.startswith(name)), None)
    return args.watts or known or (device.watts and NODE_OVER_BOARD * device.watts)


def flags(one: Plan) -> str:
    """What makes fsdp_train.py run this layout; nothing if it cannot."""
    names = [name for name in LAYOUT if getattr(one.cfg, name)]
    return (
        ""
        if one.fleet.tp * one.fleet.pp > 1
        else " ".join(f"--{name}={getattr(one.cfg, name)}" for name in names)
    )


def assumed(one: Plan, args: PlanArgs) -> list[str]:
    """What a plan rests on and the user did not say."""
    device, fleet = one.fleet.device, one.fleet
    cards = fleet.devices / device.per_card
    link = (
        f"{device.link_gbs:g}" if device.link_gbs else f"not known, so {step_time.UNKNOWN_LINK:g}"
    )
    said = [f"{fleet.node_size} devices a node, link {link} GB/s each way"]
    if device.per_card > 1:
        said.append(
            f"a card is {device.per_card} torch devices: {fleet.devices} are {cards:g} cards"
        )
    if fleet.devices > fleet.node_size and not args.network and not args.calibrate:
        said.append(
            f"network {NETWORK:g} GB/s a node, each way: set --network, it matters more than any constant"
        )
    if args.calibrate:
        said.append(f"speed calibrated by {args.calibrate}")
    elif device.name.startswith(CALIBRATED):
        said.append("speed as LLM Foundry's on this device; our trainer was not measured on it")
    else:
        said.append(
            f"speed EXTRAPOLATED: no run on {device.name} was used, set --calibrate to bring one"
        )
    if device.reachable is None:
        said.append(
            f"matmuls reach {step_time.Constants().reachable:.0%} of the peak, as on no device in particular"
        )
    if not args.tokens:
        said.append(f"{TOKENS_PER_PARAMETER} tokens a parameter: set --tokens")
    if not args.global_batch_size:
        said.append(
            f"a global batch of {one.cfg.global_batch_size} sequences: set --global_batch_size"
        )
    if one.m.alibi or one.m.attn_impl != "triton":
        said.append(
            "attention by a fused kernel that keeps no scores and, for ALiBi, needs no more columns"
        )
    if fleet.interleave > 1:
        said.append(
            "memory as without interleaving, which keeps more: up to (p - 1) / (p v) more activations"
        )
    if not args.watts and watts(device, args):
        known = device.name.startswith(tuple(NODE_WATTS))
        source = "of published nodes" if known else f"{NODE_OVER_BOARD} times the board's"
        said.append(f"{watts(device, args):.0f} W a device with its share of the node, {source}")
    if fleet.tp * fleet.pp > 1:
        said.append("fsdp_train.py has no tensor and pipeline parallelism yet")
    return said


def beside_own(one: Plan, own: Plan | None) -> list[str]:
    """How the settings as they stand, `own`, would do beside the plan, if that changes them."""
    before = [name for name in LAYOUT if own and getattr(own.cfg, name) != getattr(one.cfg, name)]
    before = [f"{name}={getattr(own.cfg, name)}" for name in before]
    before += ["tp=1", "pp=1"] if own and own.fleet != one.fleet else []
    if not before:
        return []
    gain = one.tokens_per_second / own.tokens_per_second - 1
    speed = f"{own.tokens_per_second:,.0f} tokens/s; this plan is {abs(gain):.0%} {'faster' if gain >= 0 else 'slower'}"
    return [f"as it is    {', '.join(before)}: {speed if own.fits else 'DOES NOT FIT'}"]


def too_long(days: float) -> list[str]:
    """The job scripts that have used their 50 restarts before the run ends."""
    last = "{} ends after 50 restarts, {:.3g} days: submit it again then"
    short = [last.format(name, limit) for name, limit in JOB_DAYS.items() if days > limit]
    return [f"{'' if i else 'restarts':<12}{line}" for i, line in enumerate(short)]


def text(one: Plan, args: PlanArgs, own: Plan | None = None) -> str:
    """A plan as a person reads it, beside the settings as they stand."""
    f, cfg, fleet = figures(one, args), one.cfg, one.fleet
    group = f", shards of {cfg.shard_size}" if cfg.sharding_mode.over == "group" else ""
    rows = cfg.global_batch_size // fleet.dp
    size = min(cfg.microbatch_size, rows)
    most = f"{'up to ' if rows % size else ''}{size}"
    passes = f"{fleet.dp} ranks x {rows}, microbatches of {most}: {math.ceil(rows / size)}"
    lines = [
        f"{f['n_params'] / 1e9:.3g}B parameters, sequence {one.m.max_seq_len}, {f['devices']} x {f['device']}",
        f"dp {fleet.dp} x tp {fleet.tp} x pp {fleet.pp}, {cfg.sharding}{group}, checkpointing "
        f"{cfg.activation_checkpointing}, batch {cfg.global_batch_size} = {passes}",
        "",
        f"{'a step':<26}{'ms':>12}{'share':>9}    {'GB of one device':<26}{'at its peak':>12}",
    ]
    left = [
        f"  {name:<24}{1e3 * s:>12,.1f}{s / one.seconds['step']:>9.1%}"
        for name, s in one.seconds.items()
    ]
    parts = {name: n for name, n in one.bytes.items() if name not in ("peak", "moment")}
    right = [f"  {name:<24}{n / 1e9:>12.2f}" for name, n in parts.items()]
    right += [f"  {'all: ' + one.bytes['moment']:<24}{one.bytes['peak'] / 1e9:>12.2f}"]
    lines += [
        f"{a:<47}    {b}".rstrip() for a, b in itertools.zip_longest(left, right, fillvalue="")
    ]
    money = f", {f['cost']:,.0f} at {args.price:g} a device-hour" if args.price else ""
    energy = f"{f['mwh']:,.3g} MWh" if f["mwh"] else "energy n/a: set --watts"
    room = "fits" if one.fits else "DOES NOT FIT"
    return "\n".join(
        [
            *lines,
            "",
            f"memory      {f['share_of_memory']:.0%} of {fleet.device.memory_gb:g} GiB: {room}",
            f"speed       {f['tokens_per_second']:,.0f} tokens/s, {f['tflops_per_device']:.1f} TFLOP/s a device, "
            f"MFU {f['mfu']:.1%} ({f['convention']})",
            f"the run     {f['tokens'] / 1e9:,.4g}B tokens, --max_steps={f['max_steps']}: {f['days']:,.3g} days, "
            f"{energy}{money}",
            *too_long(f["days"]),
            *beside_own(one, own),
            *([f"its flags   {f['flags']}"] if f["flags"] else []),
            *(f"{'assumed' if i == 0 else '':<12}{line}" for i, line in enumerate(f["assumed"])),
        ]
    )


def sweep_json(row: dict, args: PlanArgs) -> dict:
    plans = {name: figures(row[name], args) for name in ("strong", "weak")}
    return {
        "devices": row["devices"],
        "efficiency": dict(zip(plans, row["efficiency"], strict=True)),
        **plans,
    }


def sweep_text(rows: list[dict], args: PlanArgs) -> str:
    head = f"{'':<10}{'strong scaling':^44}  {'weak scaling':^44}"
    names = f"{'tokens/s':>13}{'TFLOP/s':>9}{'MFU':>8}{'efficiency':>12}  "
    lines = [head, f"{'devices':>8}  {names}{names}  layout (strong)"]
    for row in rows:
        cells = ""
        for one, efficiency in zip((row["strong"], row["weak"]), row["efficiency"], strict=True):
            tflops = one.mfu * one.fleet.device.bf16_tflops
            cells += (
                f"{one.tokens_per_second:>13,.0f}{tflops:>9.1f}{one.mfu:>8.1%}{efficiency:>12.1%}  "
            )
        cfg, fleet = row["strong"].cfg, row["strong"].fleet
        split = f"tp {fleet.tp} pp {fleet.pp} " if fleet.tp * fleet.pp > 1 else ""
        how = f"{split}{cfg.sharding}, {cfg.microbatch_size}, {cfg.activation_checkpointing}"
        lines.append(f"{row['devices']:>8}  {cells}  {how}")
    lines += ["", f"MFU: {flops.CONVENTION}"]
    lines += [f"assumed: {line}" for line in assumed(rows[-1]["strong"], args)]
    return "\n".join(lines)


# ---------------------------------------------------------------------------------------------------------------------


def as_it_stands(
    m: MPTConfig, cfg: TrainConfig, args: PlanArgs, fleet: Fleet, c: Constants
) -> Plan | None:
    """What fsdp_train.py would run with these settings; None if that is not known or cannot be."""
    if "auto" in (cfg.sharding, cfg.activation_checkpointing):
        return None
    shard_size = cfg.shard_size or (args.node_size if cfg.sharding_mode.over == "group" else 0)
    try:
        return search.evaluate(m, replace(cfg, shard_size=shard_size), fleet, c, trainer(args))
    except UserError:  # microbatch_size=auto, or a batch that these devices do not divide
        return None


def fleet_of(args: PlanArgs) -> tuple[Fleet, Constants]:
    """The devices, measured if a file says so."""
    fleet = Fleet(
        devices.by_name(args.device), args.devices, args.node_size, args.network or NETWORK
    )
    fleet = replace(fleet, interleave=args.interleave)
    return (
        calibrate.from_file(args.calibrate, fleet, trainer(args))
        if args.calibrate
        else (fleet, Constants())
    )


def counts_of(args: PlanArgs) -> list[int]:
    try:
        counts = sorted({int(n) for n in args.sweep_devices.split(",")})
    except ValueError as error:
        raise UserError(
            f"--sweep_devices wants numbers: 8,16,64, not {args.sweep_devices!r}"
        ) from error
    require(counts[0] > 0, f"--sweep_devices wants numbers above 0, not {counts[0]}")
    return counts


def main(argv: list[str]) -> None:
    m, cfg, asked, args = config.load(argv, MPTConfig, TrainConfig, LayoutArgs, PlanArgs)
    require(
        cfg.precision != "fp32",
        "plans are for bf16, in which speeds were published: leave out --precision=fp32",
    )
    files, given = (
        [a for a in argv if not a.startswith("-")],
        {a.lstrip("-").split("=")[0] for a in argv},
    )
    if args.plot and not files and args.device == "auto":
        return picture.published(args.out)
    others = [*files, *(f"--{name}" for name in ("tokens", "max_steps") if name in given)]
    require(
        not (args.budget and others),
        f"--budget finds the model and its tokens: leave out {' '.join(others)}",
    )
    if args.choose:
        left_open = [field.name for field in fields(asked) if field.name not in given]
        asked = replace(asked, **dict.fromkeys(left_open, "auto"))
    m = m if m.attn_impl == "triton" else replace(m, attn_impl="sdpa")
    if args.max_steps and not args.tokens:
        args = replace(args, tokens=float(cfg.max_steps * cfg.global_batch_size * m.max_seq_len))
    fleet, c = fleet_of(args)
    own = as_it_stands(m, cfg, args, fleet, c) if files else None
    if not args.global_batch_size:
        rows = max(4, math.ceil(cfg.global_batch_size / fleet.devices))  # of a device
        cfg = replace(cfg, global_batch_size=rows * fleet.devices)
    how = asked, fleet, c, trainer(args)
    if args.sweep_devices:
        rows = search.sweep(m, cfg, counts_of(args), *how)
        print(
            json.dumps([sweep_json(row, args) for row in rows], indent=2)
            if args.json
            else sweep_text(rows, args)
        )
        if args.plot:
            picture.scaling(rows, args.out)
        return
    one = search.budget(m, cfg, args.budget, *how) if args.budget else search.fastest(m, cfg, *how)
    print(json.dumps(figures(one, args), indent=2) if args.json else text(one, args, own))
    if args.plot:
        picture.bytes_by_sharding(one.m, one.cfg, one.fleet, args.out)


if __name__ == "__main__":
    config.run(main)
