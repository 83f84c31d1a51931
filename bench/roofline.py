"""A training step on a device that is not here: the milliseconds of each part, counted and priced.

    python -m bench roofline configs/mpt1b.py --device=h100
    python -m bench roofline configs/mpt1b.py --device=h100 --global_batch_size=4    one microbatch

The real training step runs on tensors without data (bench/fake_gpu.py). Each of its operations is
counted (bench/step_costs.py: FLOPs, bytes, kernels) and priced (bench/step_prices.py: how fast the
device is). The operations are those of an H100 in bf16; --device sets only the rates. Two columns:

    eager    each operation is a kernel of its own
    fused    inside a block, pointwise operations and reductions between two matmuls share a kernel,
             as a compiler might do; bench/step_costs.py says how. Loss and optimizer: eager

The figures are counted, not measured. Matmuls and memory are priced at what good kernels reach,
attention at what the kernels of 2023 reached (18 % of an H100's peak; --attention_share=0.5 for
newer ones). A matmul's own shape does not change its rate. Use them to compare two versions of the
step. A step of more than three microbatches counts the second one for all between first and last.

Then come the most expensive operations, and planning/step_time.py beside the eager step. If that
differs by more than 15 %, the parts that differ most are named.
"""

import collections
import json
import math
import sys
from dataclasses import asdict, dataclass, replace

import config
import flops
from bench import fake_gpu, step_prices
from bench.step_prices import DeviceArgs, Prices
from config import MPTConfig, TrainConfig, require

# Parts of the table, in its order.
PARTS = (
    "block matmuls",
    "attention forward",
    "attention backward",
    "loss matmuls",
    "loss, the rest",
    "LayerNorm",
    "GELU",
    "bias gradients",
    "casts",
    "other",
    "optimizer",
    "FSDP's copies",
    "collectives",
    "waiting for the host",
)
# What planning/step_time.py calls some of them; it has the others in "memory-bound".
PLANNED = {
    "block matmuls": "matmuls",
    "loss matmuls": "matmuls",
    "attention forward": "attention",
    "attention backward": "attention",
    "optimizer": "optimizer",
    "collectives": "exposed traffic",
    "waiting for the host": "waiting for the host",  # planning has none
}
MOST_RUN = 3  # microbatches: the first, the last, and one that stands for all between
MEANING = "counted and priced, not measured: nothing here ran on a GPU"
HEADINGS = {"passes": "by pass, without collectives and waiting", "parts": "by part"}
EAGER_AND_FUSED = (
    "eager: one kernel for each operation. fused: an estimate of torch.compile inside each block; "
    "loss and optimizer stay eager."
)
WAITING = f"waiting: if the host launches a kernel every {step_prices.LAUNCH * 1e6:g} us, a guess."
AGREES = 0.15  # planning and roofline, as a share of planning's step


@dataclass
class RooflineArgs:
    """How to print it."""

    top: int = 12  # list so many operations
    json: bool = False  # print JSON

    def check(self) -> None:
        """UserError if a setting is out of range."""
        require(self.top >= 0, f"top must be 0 or more, not {self.top}")


# --- What runs


def shortened(cfg: TrainConfig, ranks: int) -> tuple[TrainConfig, int]:
    """(`cfg` with at most MOST_RUN microbatches, how many the second of them stands for)."""
    rows = cfg.global_batch_size // ranks
    left_out = math.ceil(rows / cfg.microbatch_size) - MOST_RUN
    if left_out <= 0:
        return cfg, 1
    rows -= left_out * cfg.microbatch_size
    return replace(cfg, global_batch_size=rows * ranks), 1 + left_out


def repeated(kernels: list, times: int) -> list:
    """The kernels with those of the second microbatch `times` times, in the order they run in."""
    before = [kernel for kernel in kernels if kernel.microbatch < 2]
    second = [kernel for kernel in kernels if kernel.microbatch == 2]
    after = [kernel for kernel in kernels if kernel.microbatch > 2]
    return before + second * times + after


# --- The table


def part_of(cost) -> str:
    """The part of the table that an operation belongs to."""
    op = cost.operation
    if op.collective:
        return "collectives"
    if op.name.startswith("fsdp::"):
        return "FSDP's copies"
    if op.part == "optimizer":
        return "optimizer"
    origin = f"{op.where} {op.name}".lower().replace("_", "")
    if "loss" in origin or "crossentropy" in origin:
        return "loss matmuls" if cost.flops else "loss, the rest"
    if "attention" in origin or op.name == "aten::bmm":
        return f"attention {'backward' if 'backward' in origin else 'forward'}"
    if cost.flops:
        return "block matmuls"
    if "layernorm" in op.name.replace("_", ""):
        return "LayerNorm"
    if "gelu" in op.name:
        return "GELU"
    if op.name == "aten::sum" and op.where == "AddmmBackward0":
        return "bias gradients"
    return "casts" if op.cast else "other"


def column(kernels: list, prices: Prices, m: MPTConfig, cfg: TrainConfig) -> dict:
    """One column: seconds of the step by part and by pass, kernels, FLOPs, bytes, tokens/s, MFU."""
    parts = dict.fromkeys(PARTS, 0.0)
    passes = dict.fromkeys(("forward", "backward", "optimizer", "rest"), 0.0)
    for cost, seconds in step_prices.seconds_by_operation(kernels, prices):
        part = part_of(cost)
        parts[part] += seconds
        if part != "collectives":
            passes[cost.operation.part or "rest"] += seconds

    traffic = parts["collectives"]
    parts["collectives"] = 0.0
    compute = sum(parts.values())
    parts["collectives"] = prices.plan.exposed(compute, traffic) if traffic else 0.0
    on_device = [k for k in kernels if not k.costs[0].operation.collective]
    wait = step_prices.waiting([prices.seconds(kernel) for kernel in on_device])
    parts["waiting for the host"] = wait

    step = sum(parts.values())
    rate = cfg.global_batch_size * m.max_seq_len / step
    fleet = prices.plan.fleet
    return {
        "seconds": step,
        "parts": parts,
        "passes": passes,
        "traffic": traffic,  # seconds of all collectives, though they overlap
        "kernels": len(kernels),
        "flops": sum(kernel.flops for kernel in kernels),
        "bytes": sum(kernel.bytes for kernel in on_device),
        "tokens_per_second": rate,
        "mfu": flops.mfu(m, rate, fleet.devices, fleet.device.bf16_tflops * 1e12),
    }


def most_expensive(kernels: list, prices: Prices) -> list[dict]:
    """Operations of one name, place and part, summed over the step, the most expensive first."""
    found = collections.defaultdict(lambda: {"seconds": 0.0, "times": 0, "flops": 0, "bytes": 0})
    for cost, seconds in step_prices.seconds_by_operation(kernels, prices):
        row = found[cost.operation.name, cost.operation.where, part_of(cost)]
        row["seconds"] += seconds
        row["times"] += 1
        row["flops"] += cost.flops
        row["bytes"] += cost.bytes
    rows = []
    for (name, where, part), row in found.items():
        rows.append({"operation": name, "where": where, "part": part, **row})
    return sorted(rows, key=lambda row: -row["seconds"])


# --- Beside the planner


def beside_the_planner(eager: dict, prices: Prices) -> dict:
    """planning/step_time.py's parts and ours, seconds: {"planned": ..., "counted": ...}."""
    planned = {"waiting for the host": 0.0, **prices.plan.parts()}
    counted = dict.fromkeys(planned, 0.0)
    for part, seconds in eager["parts"].items():
        counted[PLANNED.get(part, "memory-bound")] += seconds
    counted["step"] = eager["seconds"]
    return {"planned": planned, "counted": counted}


def planner_lines(both: dict, operations: list[dict]) -> list[str]:
    """Whether they agree; if not, the parts that differ most, and our largest operations there."""
    planned, counted = both["planned"], both["counted"]
    step = planned["step"]
    ratio = counted["step"] / step
    lines = [
        f"planning/step_time.py: {1e3 * step:,.1f} ms; the eager step is {ratio:.2f} times that"
    ]
    if abs(ratio - 1) <= AGREES:
        return lines
    differences = {part: counted[part] - planned[part] for part in planned if part != "step"}
    for part, difference in sorted(differences.items(), key=lambda item: -abs(item[1])):
        if abs(difference) < 0.03 * step:
            continue
        of_both = f"{1e3 * counted[part]:,.1f} ms here, {1e3 * planned[part]:,.1f} ms there"
        lines.append(f"  {part}: {of_both}")
        ours = [row for row in operations if PLANNED.get(row["part"], "memory-bound") == part]
        lines += [f"    {operation_line(row)}" for row in ours[:4]]
    return lines


# --- The program


def operation_line(row: dict) -> str:
    """A line of `most_expensive`."""
    place = f"{row['operation'].removeprefix('aten::')} at {row['where']}"[:62]
    size = f"{row['bytes'] / 1e9:>9,.1f} GB"
    work = f"{row['flops'] / 1e12:>9,.1f} TFLOP" if row["flops"] else ""
    return f"{1e3 * row['seconds']:>9,.2f} ms {row['times']:>6,} x  {place:<62}{size}{work}"


def counted(m: MPTConfig, cfg: TrainConfig, ranks: int) -> tuple[list, int]:
    """(costs of the operations of a step, how many microbatches the second stands for).

    UserError if PyTorch is imported already, if there is no C++ compiler, or for settings that no
    step could have.
    """
    fake_gpu.pretend()
    from bench import fake_runs, step_costs  # here, since they import torch

    fake_runs.check(fake_runs.Setting(m, cfg, ranks))
    short, times = shortened(cfg, ranks)
    log = fake_runs.train_step(fake_runs.Setting(m, short, ranks), step_costs.CostLog)
    return log.costs, times


def report(m: MPTConfig, cfg: TrainConfig, prices: Prices, costs: list, times: int) -> dict:
    """All figures: both columns, the operations of the eager one, and the planner's."""
    from bench import step_costs  # here, since it imports torch

    eager = repeated(step_costs.eager(costs), times)
    fused = repeated(step_costs.fused(costs), times)
    by_part = collections.Counter()
    for kernel in eager:
        by_part[part_of(kernel.costs[0])] += kernel.flops
    eager_column = column(eager, prices, m, cfg)
    tokens = cfg.global_batch_size * m.max_seq_len / prices.plan.fleet.devices  # of a rank
    return {
        "device": asdict(prices.plan.fleet.device),
        "sources": prices.sources,  # of the rates
        "rates": {
            "matmul": prices.matmul,  # FLOP/s
            "attention": prices.attention,
            "memory": prices.bandwidth,  # bytes/s
            "launch": step_prices.LAUNCH,  # seconds
        },
        "tokens": tokens,
        "microbatches": prices.plan.microbatches,
        "model_flops": flops.train_flops_per_token(m) * tokens,
        "counted_flops": {part: by_part[part] for part in PARTS if by_part[part]},
        "eager": eager_column,
        "fused": column(fused, prices, m, cfg),
        "planner": beside_the_planner(eager_column, prices),
        "operations": most_expensive(eager, prices),
    }


def table(figures: dict) -> list[str]:
    """Lines: both columns by pass and by part, then what follows from them."""
    eager, fused = figures["eager"], figures["fused"]
    lines = [f"{'milliseconds of a step':<24}{'eager':>12}{'share':>8}{'fused':>12}{'share':>8}"]
    for kind, heading in HEADINGS.items():
        lines.append(heading)
        for name in eager[kind]:
            if not eager[kind][name] + fused[kind][name]:
                continue
            cells = ""
            for of_column in (eager, fused):
                seconds = of_column[kind][name]
                cells += f"{1e3 * seconds:>12,.1f}{seconds / of_column['seconds']:>8.1%}"
            lines.append(f"  {name:<22}{cells}")
        lines.append("")
    rows = {
        "step, ms": [f"{1e3 * of['seconds']:,.1f}" for of in (eager, fused)],
        "tokens/s, all ranks": [f"{of['tokens_per_second']:,.0f}" for of in (eager, fused)],
        "MFU": [f"{of['mfu']:.1%}" for of in (eager, fused)],
        "kernels of a rank": [f"{of['kernels']:,}" for of in (eager, fused)],
        "GB of a rank": [f"{of['bytes'] / 1e9:,.1f}" for of in (eager, fused)],
    }
    lines += [f"{name:<24}{a:>12}{b:>20}" for name, (a, b) in rows.items()]
    return [*lines, "", EAGER_AND_FUSED, WAITING]


def text(figures: dict, prices: Prices, top: int) -> str:
    """The report for a person to read."""
    tokens = f"{figures['tokens']:,.0f} tokens of each rank"
    fleet = prices.plan.fleet
    step = f"one step on {fleet.devices} x {fleet.device.name}, {tokens}"
    lines = [f"{step}, microbatches: {figures['microbatches']:,}; {MEANING}", ""]
    lines += [*table(figures), ""]

    work = sum(figures["counted_flops"].values()) / 1e12
    model_work = figures["model_flops"] / 1e12
    lines.append(f"{work:,.4g} TFLOP of a rank's matmuls and attention, without masked scores")
    lines.append(f"{model_work:,.4g} TFLOP of a rank for the MFU, by {flops.CONVENTION}")
    traffic = figures["eager"]["traffic"]
    if traffic:
        hidden = "the row 'collectives' is what the kernels do not hide"
        lines.append(f"{1e3 * traffic:,.1f} ms of collectives; {hidden}")

    lines += ["", *step_prices.lines(prices), ""]
    lines += planner_lines(figures["planner"], figures["operations"])
    if top:
        lines += ["", "the most expensive operations, eager"]
        lines += [operation_line(row) for row in figures["operations"][:top]]
    return "\n".join(lines)


def main(argv: list[str]) -> None:
    """Print the roofline of a step for the config files and flags in argv."""
    m, cfg, args, device = config.load(argv, MPTConfig, TrainConfig, RooflineArgs, DeviceArgs)
    require(cfg.precision != "fp32", "the operations are those of bf16: remove --precision=fp32")
    prices = step_prices.prices(m, cfg, device)
    fake_gpu.compiler()  # or a clear line, before the wait
    print("PyTorch runs on tensors without data; this takes a minute", file=sys.stderr)
    figures = report(m, cfg, prices, *counted(m, cfg, device.ranks))
    print(json.dumps(figures, indent=1) if args.json else text(figures, prices, args.top))


if __name__ == "__main__":
    config.run(main)
