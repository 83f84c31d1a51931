"""The question that plan.py is asked, and its answer: one row for every plan.

`PlanArgs` is the question: the fleet, prices, tokens. A row has all that a plan predicts: speed
with its error band, seconds and bytes by part, and what the run takes in time, money and energy; or
the problem why there is no plan. `table` prints the rows of any answer (the fastest layouts, a
sweep over numbers of devices, several kinds of device, models for a budget), `text` a single row in
detail, and JSON has the same rows.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import flops
import program
from config import Float, Int, MPTConfig, TrainConfig
from devices import Device
from planning import search, step_time
from planning.budget import TOKENS_PER_PARAMETER, chinchilla_loss
from planning.fleet import (
    NODE_OVER_BOARD,
    NODE_WATTS,
    UNKNOWN_LINK,
    Fleet,
    FleetArgs,
    of_family,
)
from planning.search import Plan, Question
from planning.step_time import Constants, StepTime
from program import UserError, require

# The settings that fsdp_train.py needs for a layout.
LAYOUT = """tp sequence_parallel pp sharding shard_size activation_checkpointing recompute_every
    microbatch_size global_batch_size""".split()
# Settings of which each kind of device may have its own: --device=h100,mi250 --price=2.5,1.2
OF_A_KIND = """device machine node_size network bandwidth memory_gb attention_efficiency
    calibrate price watts""".split()


@dataclass
class PlanArgs(FleetArgs):
    """The fleet and the question."""

    choose: bool = False  # choose the layout even where a config file sets it
    global_batch_size: Int[1, 10**6] = 0  # sequences of a step (0: about 256, at least 4 a device)
    max_steps: Int[1, 10**15] = 0  # steps of the run, from which its tokens and time follow
    tokens: Float[1, 10**18] = 0.0  # to train on (0: of max_steps, or 20 a parameter)
    price: Float[1e-9, 10**9] = 0.0  # of one torch device for an hour; two kinds of device: 2.5,1.2
    watts: Float[1e-3, 10**6] = 0.0  # of a torch device and its share of the node (0: the table's)
    calibrate: str = ""  # a .csv of bench train or a machine.json; both: results.csv:machine.json
    sweep_devices: str = ""  # numbers of devices: 8,16,64
    budget: Float[1e-6, 3650] = 0.0  # days in which a Chinchilla-optimal model is to train
    plot: bool = False  # draw sweep, kinds of device or memory
    out: str = "plan.png"  # where to draw
    json: bool = False  # print JSON

    def check(self) -> None:
        """UserError if two questions are asked."""
        super().check()
        one_question = not (self.budget and self.sweep_devices)
        require(one_question, "--budget and --sweep_devices are two questions: ask one")


# --------------------------------------------------------------------------------------------------
# A row


Row = dict  # {name: value}, in JSON, too


def row_of(plan: Plan, args: PlanArgs, label: str = "") -> Row:
    """The row of a plan. label: what tells it from others."""
    m, fleet, cfg, rate = plan.m, plan.fleet, plan.cfg, plan.tokens_per_second
    n_params = flops.n_params(m)
    tokens = args.tokens or float(TOKENS_PER_PARAMETER * n_params)
    device_hours = tokens / rate / 3600 * fleet.devices
    device_watts = watts(fleet.device, args)
    run = {
        "days": device_hours / fleet.devices / 24,
        "cost": device_hours * args.price if args.price else None,
        "kwh": device_watts and device_hours * device_watts / 1e3,
    }
    low, high, kind = band(plan)
    bands = {name: [value / high, value / low] for name, value in run.items() if value}
    return {
        "label": label or fleet.device.name,
        "device": fleet.device.name,
        "devices": fleet.devices,
        "problem": "",
        "model": model_flags(m),
        "n_params": n_params,
        "max_seq_len": m.max_seq_len,
        "layout": {name: getattr(cfg, name) for name in LAYOUT} | {"dp": plan.dp},
        "layout_text": search.layout_text(plan),
        "flags": flags(plan),  # with which fsdp_train.py runs this layout
        "seconds": plan.seconds,  # of a step, by part
        "tokens_per_second": rate,
        "mfu": plan.mfu,  # 0 to 1
        "tflops_per_device": rate * flops.flops_of(m, train=cfg)[0] / fleet.devices / 1e12,
        "convention": flops.convention_of(cfg),  # what the two count
        "bytes": plan.bytes,  # of one device at its peak, by part
        "gb": plan.bytes["peak"] / 1e9,
        "memory_gb": fleet.device.memory_gb,  # GiB
        "share_of_memory": plan.share_of_memory,
        "fits": plan.fits,
        "tokens": tokens,
        "tokens_per_parameter": tokens / n_params,
        "predicted_loss": None if cfg.lora_rank else chinchilla_loss(n_params, tokens),
        "max_steps": math.ceil(tokens / (cfg.global_batch_size * m.max_seq_len)),
        **run,
        "band": {"tokens_per_second": [rate * low, rate * high], **bands},  # [low, high]
        "certainty": kind,  # of the published runs that the band comes from
        "efficiency": None,  # in a sweep: speed per device / that of the smallest fleet
        "assumed": assumptions(plan, args),
    }


def watts(device: Device, args: PlanArgs) -> float | None:
    """Watts of one torch device with its share of the node, or None if unknown."""
    of_node = of_family(NODE_WATTS, device)
    return args.watts or of_node or (device.watts and NODE_OVER_BOARD * device.watts)


def flags(plan: Plan) -> str:
    """The flags with which fsdp_train.py runs this layout."""
    values = {name: getattr(plan.cfg, name) for name in LAYOUT}
    if plan.cfg.activation_checkpointing == "none":
        del values["recompute_every"]
    if plan.cfg.sharding_mode.over != "group":
        del values["shard_size"]
    if plan.cfg.tp == 1:  # with tensor ranks a config file may say otherwise
        del values["sequence_parallel"]
    return " ".join(f"--{name}={value}" for name, value in values.items())


def model_flags(m: MPTConfig) -> str:
    """The flags of a model: its shape, and what else the user has set."""
    names = ["d_model", "n_heads", "n_layers"]
    for field in fields(m):
        is_set = getattr(m, field.name) != field.default
        if is_set and field.name not in names:
            names.append(field.name)
    return " ".join(f"--{name}={getattr(m, name)}" for name in names)


# --------------------------------------------------------------------------------------------------
# How sure is a prediction? As far off as predictions of published runs of its kind were.

# {kind of run: (low, high)}, factors on the predicted tokens/s, between which 80 % of its published
# runs are, and the prediction itself. There are 254, on A100 and H100, each predicted without its
# model, or not used for the fit at all. Whatever was not compared has the widest band, as far to
# the fast side as to the slow one. tests/planning/test_published.py computes them.
BANDS = {
    "one node": (0.93302, 1.05912),
    "several nodes": (0.74856, 1.0),
    "tp or pp": (0.81913, 1.10666),  # on any number of nodes
    "anything else": (0.74856, 1.3359),
}
COMPARED = ("A100", "H100")
# Seconds in which PyTorch starts the kernels of an eager block, forward and backward: about 50
# operations, counted, of 10 to 20 microseconds of the CPU, as is usual; not measured here. A block
# of the published runs takes at least 8 ms.
LAUNCHES = 1e-3


def band(plan: Plan) -> tuple[float, float, str]:
    """How far a prediction of tokens/s may be off: (low, high, kind), factors on the prediction.

    Where starting kernels takes longer than running them, the lower end follows from that time. No
    step is shorter than its matmuls; if what they reach is not known, than its matmuls at the peak.
    """
    kind = kind_of(plan.cfg, plan.fleet)
    low, high = BANDS[kind]
    shortest = plan.seconds["matmuls"]
    if plan.fleet.device.reachable is None:
        shortest *= Constants().reachable
    low /= max(1.0, launch_share(plan.m, plan.cfg, plan.fleet))
    return low, min(high, plan.seconds["step"] / shortest), kind


def kind_of(cfg: TrainConfig, fleet: Fleet) -> str:
    """The kind of published runs that a run is like: a key of BANDS."""
    is_split = cfg.tp * cfg.pp > 1
    device = fleet.device
    own_attention = device.attention not in (None, step_time.attention_share(device, Constants()))
    compiled = cfg.compile is True and not is_split
    is_other = own_attention or compiled or cfg.lora_rank or fleet.devices == 1
    if is_other or not device.name.startswith(COMPARED):
        return "anything else"
    if is_split:
        return "tp or pp"
    return "several nodes" if fleet.devices > fleet.node_size else "one node"


def launch_share(m: MPTConfig, cfg: TrainConfig, fleet: Fleet) -> float:
    """The seconds in which a block's kernels are started / those in which they run.

    Above 1 the device waits for the CPU, which `StepTime` does not know.
    """
    step = StepTime(m, cfg, fleet)
    return LAUNCHES * step.layers / (step.matmuls() + step.attention() + step.memory())


# --------------------------------------------------------------------------------------------------
# Rows as text

# Units of time, {name: how many make a day}, the longest first.
OF_A_DAY = {"days": 1, "hours": 24, "minutes": 24 * 60, "seconds": 24 * 60 * 60}


def table(rows: list[Row]) -> str:
    """The rows of any answer, for a person to read. Columns that say nothing are left out."""
    unit = unit_of_time([row for row in rows if not row["problem"]])
    cells = []
    for row in rows:
        name_and_size = {"": row["label"], "devices": row["devices"]}
        if row["problem"]:
            cells.append({**name_and_size, "layout": row["problem"]})
            continue
        efficiency = row["efficiency"]
        line = {
            **name_and_size,
            "tokens/s": number(row["tokens_per_second"]),
            "80 % band": span(row["band"]["tokens_per_second"]),
            "MFU": f"{row['mfu']:.1%}",
            "GB": f"{row['gb']:.1f}",
            unit: number(row["days"] * OF_A_DAY[unit]),
            "cost": number(row["cost"]),
            "kWh": number(row["kwh"]),
            "efficiency": efficiency and f"{efficiency:.1%}",
            "layout": row["layout_text"] + ": DOES NOT FIT" * (not row["fits"]),
        }
        cells.append(line)
    heads = list(max(cells, key=len))  # those of a plan
    if len({line[""] for line in cells}) == 1:
        heads.remove("")
    heads = [head for head in heads if any(line.get(head) for line in cells)]
    return program.table(heads, [[line.get(head) or "-" for head in heads] for line in cells])


def unit_of_time(rows: list[Row]) -> str:
    """The longest unit of which every run takes two or more."""
    shortest = min(row["days"] for row in rows)
    fitting = [unit for unit, n in OF_A_DAY.items() if shortest * n >= 2]
    return fitting[0] if fitting else "seconds"


def number(x: float | None, digits: int = 3) -> str:
    """A number with this many digits that count: 1,010, where %g would write 1.01e+03."""
    if x is None:
        return ""
    short = float(f"{x:.{digits}g}")
    return f"{short:,.0f}" if short >= 1e5 else f"{short:,g}"


def span(band: list[float]) -> str:
    """An error band: 36,900 to 46,100."""
    return f"{number(band[0])} to {number(band[1])}"


def tokens_text(tokens: float) -> str:
    """134B tokens; below a billion 32.8M, below a million all of them."""
    if tokens < 1e6:
        return f"{tokens:,.0f} tokens"
    unit, letter = (1e9, "B") if tokens >= 1e9 else (1e6, "M")
    return f"{number(tokens / unit, 4)}{letter} tokens"


def labelled(label: str, lines: Sequence[str]) -> list[str]:
    """The lines with the label before the first."""
    return [f"{label if i == 0 else '':<12}{line}" for i, line in enumerate(lines)]


def certainty_lines(rows: list[Row]) -> list[str]:
    """What the bands of these rows rest on, a line for each kind of published runs."""
    kinds = dict.fromkeys(row["certainty"] for row in rows if not row["problem"])
    lines = []
    for kind in kinds:
        low, high = BANDS[kind]
        reached = f"{low:.0%} to {high:.0%} of the prediction"
        words = f"{kind}: 80% of the published runs reached {reached}"
        if kind == "anything else":
            words = f"no such runs were compared, so the widest band: {reached}"
        lines.append(words)
    return lines


def assumed_lines(rows: list[Row]) -> list[str]:
    """What these rows rest on. A line that is not about all of them names its rows."""
    planned = [row for row in rows if not row["problem"]]
    lines = {}  # {line: the labels of its rows}
    for row in planned:
        for line in row["assumed"]:
            lines.setdefault(line, {})[row["label"]] = None
    n_labels = len({row["label"] for row in planned})
    return [
        line if len(labels) == n_labels else f"{'; '.join(labels)}: {line}"
        for line, labels in lines.items()
    ]


def text_of_rows(rows: list[Row]) -> str:
    """Several rows for a person to read."""
    first = next(row for row in rows if not row["problem"])
    lines = [
        f"{size(first)}, {tokens_text(first['tokens'])}",
        "",
        table(rows),
        "",
        *labelled("certainty", certainty_lines(rows)),
        *labelled("assumed", assumed_lines(rows)),
    ]
    return "\n".join(lines)


def text(row: Row, others: list[Row] = (), below: list[str] = ()) -> str:
    """A plan for a person to read. others: rows below it in the table; below: more lines."""
    layout = row["layout"]
    rows_of_batch = layout["global_batch_size"] // layout["dp"]
    split = f"dp {layout['dp']} x {rows_of_batch} sequences"
    microbatches = f"in microbatches of {layout['microbatch_size']}"
    lines = [
        f"{size(row)}, sequence {row['max_seq_len']}, {row['devices']} x {row['device']}",
        row["layout_text"],
        f"batch {layout['global_batch_size']} = {split}, {microbatches}",
        "",
        parts_table(row),
        "",
        table([row, *others]),
        "",
        *summary_lines(row),
        *labelled("flags", [row["flags"]]),
        *below,
        *labelled("assumed", row["assumed"]),
    ]
    return "\n".join(lines)


def size(row: Row) -> str:
    """6.66B parameters"""
    return f"{number(row['n_params'] / 1e9)}B parameters"


def parts_table(row: Row) -> str:
    """The milliseconds of a step and the GB of a rank, by part."""
    step = row["seconds"]["step"]
    seconds = [(name, f"{1e3 * s:,.1f}", f"{s / step:.1%}") for name, s in row["seconds"].items()]
    parts = [(name, n) for name, n in row["bytes"].items() if name not in ("peak", "moment")]
    parts.append((f"all: {row['bytes']['moment']}", row["bytes"]["peak"]))
    n_bytes = [(name, f"{n / 1e9:.2f}") for name, n in parts]
    of_step = program.table(["a step", "ms", "share"], seconds)
    return f"{of_step}\n\n{program.table(['one device at its peak', 'GB'], n_bytes)}"


def summary_lines(row: Row) -> list[str]:
    """Does it fit, how fast is it, and how long does the run take?"""
    fits = "fits"
    if not row["fits"]:
        fits = f"DOES NOT FIT, {search.too_much(row['bytes'], row['memory_gb'])}"
    unit = unit_of_time([row])
    n, band = OF_A_DAY[unit], row["band"]
    time = f"{number(row['days'] * n)} {unit} ({span([end * n for end in band['days']])})"
    cost = f", cost {number(row['cost'])} ({span(band['cost'])})" if row["cost"] else ""
    energy = ", energy not known: set --watts"
    if row["kwh"]:
        energy = f", {number(row['kwh'])} kWh ({span(band['kwh'])})"
    run = f"{tokens_text(row['tokens'])}, --max_steps={row['max_steps']}: {time}{cost}{energy}"
    speed = f"{row['tflops_per_device']:.1f} TFLOP/s a device, MFU {row['mfu']:.1%}"
    return [
        *labelled("memory", [f"{row['share_of_memory']:.0%} of {row['memory_gb']:g} GiB: {fits}"]),
        *labelled("speed", [f"{speed} ({row['convention']})"]),
        *labelled("the run", [run]),
        *labelled("certainty", certainty_lines([row])),
    ]


def training_lines(row: Row) -> list[str]:
    """A model for a budget: its size, tokens and loss, and the flags that train it."""
    tokens = f"{tokens_text(row['tokens'])}, {row['tokens_per_parameter']:.1f} a parameter"
    about = f"{size(row)} on {tokens}: predicted loss {row['predicted_loss']:.3f}"
    launch = f"{row['model']} {row['flags']} --max_steps={row['max_steps']}"
    return labelled(row["label"], [about, launch])


# --------------------------------------------------------------------------------------------------
# What was assumed


def assumptions(plan: Plan, args: PlanArgs) -> list[str]:
    """What a plan rests on: its fleet, whose speed, which kernels, what nobody has set, doubts."""
    m, cfg, fleet, device = plan.m, plan.cfg, plan.fleet, plan.fleet.device
    link = f"{device.link_gbs:g}" if device.link_gbs else f"not known, so {UNKNOWN_LINK:g}"
    a_card = f", {device.per_card} devices a card" if device.per_card > 1 else ""
    lines = [f"{fleet.node_size} devices a node{a_card}, link {link} GB/s each way"]
    lines *= fleet.devices > 1
    if fleet.devices > fleet.node_size and fleet.network_note:
        lines.append(fleet.network_note)

    if args.calibrate:
        lines += fleet.notes
    elif device.name.startswith(COMPARED):
        lines.append(
            "speed as LLM Foundry's of 2023 on this device: set --calibrate to use your own"
        )
    else:
        fix = "set --calibrate to use your own"
        lines.append(f"speed EXTRAPOLATED: the fit has no run on {device.name}: {fix}")
    lines.append(kernels_assumed(plan))

    device_watts = watts(device, args)
    if cfg.lora_rank and not args.max_steps and args.tokens == tokens_of_steps(m, cfg):
        steps = f"{cfg.max_steps:,} steps, fsdp_train.py's default"
        lines.append(f"{steps}: set --max_steps or --tokens")
    if not args.tokens:
        lines.append(f"{TOKENS_PER_PARAMETER} tokens a parameter: set --tokens")
    if not args.global_batch_size:
        batch = f"a global batch of {cfg.global_batch_size} sequences"
        lines.append(f"{batch}: set --global_batch_size")
    if device_watts and not args.watts:
        lines.append(f"{device_watts:.0f} W a device with its share of the node: set --watts")

    if launch_share(m, cfg, fleet) > 1:
        start = f"about {1e3 * LAUNCHES:g} ms to start, longer than they run"
        lines.append(f"the kernels of a block take {start}: that is not in the model")
    _, per_token = flops.flops_of(m, train=cfg)
    share = plan.tokens_per_second * per_token / fleet.devices / device.bf16_tflops / 1e12
    reachable = device.reachable or Constants().reachable
    if share > reachable:
        masked = f"{share:.0%} of the peak (masked scores counted)"
        lines.append(f"DOUBTFUL: {masked}, but large matmuls reach {reachable:.0%}")
    return lines


def kernels_assumed(plan: Plan) -> str:
    """What matmuls and attention reach of the peak, and whether blocks are compiled."""
    device, cfg, c = plan.fleet.device, plan.cfg, Constants()
    measured = f"{device.reachable:.0%}" if device.reachable else f"{c.reachable:.0%}, a guess,"
    attention = device.attention or step_time.attention_share(device, c)
    blocks = "eager blocks, as in the published runs: set --compile"
    if cfg.tp * cfg.pp > 1:  # where fsdp_train.py compiles nothing
        blocks = "eager blocks; what tensor ranks and stages send is counted, not measured"
    elif cfg.compile is True:
        blocks = f"compiled blocks read and write {1 - c.compiled:.0%} less"
    return f"large matmuls reach {measured} of the peak, attention {attention:.0%}; {blocks}"


def tokens_of_steps(m: MPTConfig, cfg: TrainConfig) -> float:
    """The tokens of cfg.max_steps."""
    return float(cfg.max_steps * cfg.global_batch_size * m.max_seq_len)


# --------------------------------------------------------------------------------------------------
# Several kinds of device


def split_kinds(argv: list[str]) -> list[tuple[str, list[str]]]:
    """[(what tells the kind from others, its argv)] for each kind of device that argv names.

    UserError if values for some of them lack.
    """
    lists = {}  # {word: its values}
    for word in argv:
        if flops.flag_name(word) in OF_A_KIND and "," in word:
            lists[word] = word.partition("=")[2].split(",")
    names = [word for word in lists if flops.flag_name(word) in ("device", "machine")]
    if not names:
        return [("", argv)]

    n = len(lists[names[0]])
    for word, values in lists.items():
        fix = f"{n} kinds of device need one value, or {n}"
        require(len(values) == n, f"{word} has {len(values)} values: {fix}")
    kinds = []
    for i in range(n):
        own = {word: values[i].strip() for word, values in lists.items()}
        differs = [f"{flops.flag_name(word)} {own[word]}" for word in own if word not in names]
        words = [f"--{flops.flag_name(word)}={own[word]}" if word in own else word for word in argv]
        kinds.append((", ".join(differs), words))
    return kinds


# --------------------------------------------------------------------------------------------------
# Several numbers of devices


def planned_on(q: Question, n: int, args: PlanArgs, label: str) -> Row:
    """The row of the fastest plan on n devices, or of the problem why there is none."""
    try:
        plan = search.fastest(replace(q, fleet=replace(q.fleet, devices=n)))
    except UserError as error:
        device = q.fleet.device.name
        return {"label": label, "device": device, "devices": n, "problem": str(error)}
    return row_of(plan, args, label)


def sweep(q: Question, counts: list[int], args: PlanArgs) -> list[Row]:
    """Strong scaling over `counts` (the same global batch), then weak (it grows with the devices).

    Raises UserError if no number of devices can train the model.
    """
    strong = [planned_on(q, n, args, "strong scaling") for n in counts]
    smallest = next((row["devices"] for row in strong if not row["problem"]), None)
    require(smallest is not None, strong[0]["problem"])
    weak = []
    for n in counts:
        batch = q.cfg.global_batch_size
        scaled, rest = divmod(batch * n, smallest)
        if rest:
            scaled = math.ceil(batch / smallest) * n
        larger = replace(q, cfg=replace(q.cfg, global_batch_size=scaled))
        weak.append(planned_on(larger, n, args, "weak scaling"))
    for rows in (strong, weak):
        planned = [row for row in rows if not row["problem"]]
        for row in planned:
            first = planned[0]["tokens_per_second"] / planned[0]["devices"]
            row["efficiency"] = row["tokens_per_second"] / row["devices"] / first
    return strong + weak
