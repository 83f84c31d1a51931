"""Pictures of what the planner predicts: time, cost and scaling, memory by sharding mode.

    python plan.py --plot

draws MPT-7B on 4 to 128 MI250 cards beside the published points. For any other fleet:

    python plan.py configs/mpt7b.py --device=mi250 --sweep_devices=8,16,32 --plot
    python plan.py configs/mpt7b.py --device=h100,mi250 --price=2.5,1.2 --sweep_devices=8,16 --plot

Bands are the error bands of the prediction. Lines differ in style and marker, not in colour alone.
"""

import io
import itertools
import math
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import devices
import flops
import program
from config import SHARDING_MODES, MPTConfig, TrainConfig
from planning import answer, certainty, memory, step_time
from planning.answer import Row
from planning.fleet import Fleet
from planning.step_time import Constants
from program import require
from storage import files

# MosaicML, "Training LLMs at Scale with AMD MI250 GPUs" (2023): MPT-7B on nodes of 4 cards, with a
# global batch of 1536 sequences. {MI250 cards: TFLOP/s of one card, which is two torch devices}
PUBLISHED_MI250 = {4: 166, 128: 159}
# That run. The posts do not give the microbatch: configs/mpt7b_mi250.py takes 3 without
# recomputation, and that fits.
MPT7B = MPTConfig(d_model=4096, n_heads=32, n_layers=32, attn_impl="sdpa")
POSTS = TrainConfig(global_batch_size=1536, microbatch_size=3)
HATCHES = ("", "//", "..", "\\\\", "xx", "", "--")  # parts differ without colours, too
SHARDINGS = tuple(reversed(SHARDING_MODES))  # the one that takes the most memory first
STYLES = ("o-", "s--", "^:", "D-.", "v-", "P--")  # of one kind of device each
LINE = 175  # characters in a line of small text, as wide as the picture
# {field of Row: what its vertical axis says}
PANELS = {
    "days": "days of training",
    "cost": "cost, in the currency of --price",
    "tokens_per_second": "tokens/s",
    "kwh": "kWh of the run",
    "efficiency": "efficiency",
}


# --------------------------------------------------------------------------------------------------
# matplotlib


def canvas(title: str | None, rows: int = 1):
    """A figure, and its two pairs of axes in each row."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise program.UserError(f"pictures need matplotlib: {program.EXTRA}") from error
    figure = Figure(figsize=(12, 1 + 4 * rows), layout="constrained")
    figure.suptitle(title)
    return figure, figure.subplots(rows, 2, squeeze=False)


def save(figure, path: str) -> None:
    """Write the figure. UserError if it cannot be written there, or is no kind of picture."""
    folder = Path(path).parent
    require(Path(path).suffix, f"--out={path}: name a picture, such as plan.png")
    fix = f"mkdir -p {program.shell(folder)}, or name another --out"
    require(folder.is_dir(), f"--out={path}: there is no folder {folder}: {fix}")
    try:
        picture = io.BytesIO()
        figure.savefig(picture, format=Path(path).suffix[1:].lower(), dpi=120)
        files.write_atomically(path, picture.getvalue())
    except (ValueError, OSError) as error:
        fix = "name another --out, such as plan.png"
        raise program.UserError(f"--out={path}: {program.one_line(error)}: {fix}") from error
    print(f"drawn: {path}", file=sys.stderr)


def finish_axes(axes, counts: list[int], **labels) -> None:
    """A horizontal axis with the numbers of devices, then labels and grid."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(n) for n in counts])
    axes.minorticks_off()
    axes.set(**labels)
    axes.grid(alpha=0.3)


# --------------------------------------------------------------------------------------------------
# The rows of an answer, over the number of devices


def draw_rows(rows: list[Row], path: str) -> None:
    """One picture for each figure of PANELS that is known: a line and a band for each label."""
    planned = [row for row in rows if not row.problem]
    known = [name for name in PANELS if any(getattr(row, name) for row in planned)]
    figure, axes = canvas(None, math.ceil(len(known) / 2))
    for axis, name in itertools.zip_longest(axes.flat, known):
        if name is None:
            axis.remove()
        else:
            panel(axis, planned, name)

    title = f"{answer.size(planned[0])} on {answer.tokens_text(planned[0].tokens)}, predicted"
    kinds, names = axes[0, 0].get_legend_handles_labels()
    where = {"loc": "outside upper center", "ncols": min(3, len(names)), "frameon": False}
    figure.legend(kinds, names, title=title, title_fontsize="large", **where)
    footer = ["bands: from the errors of published runs", *answer.certainty_lines(planned)]
    lines = [line for text in footer for line in textwrap.wrap(text, LINE)]
    figure.supxlabel("\n".join(lines), x=0.01, ha="left", fontsize="small")
    save(figure, path)


def panel(axes, rows: list[Row], name: str) -> None:
    """One figure of the rows over the number of devices: a line and a band for each label."""
    counts = sorted({row.devices for row in rows})
    labels = list(dict.fromkeys(row.label for row in rows))
    for i, (label, style) in enumerate(zip(labels, itertools.cycle(STYLES))):
        own = [row for row in rows if row.label == label and getattr(row, name)]
        # Side by side, so that the bars of two kinds do not cover each other.
        shift = 2 ** (0.05 * (i - (len(labels) - 1) / 2))
        x = [row.devices * shift for row in own]
        y = [getattr(row, name) for row in own]
        color = f"C{i}"
        axes.plot(x, y, style, color=color, label=label)
        ends = [row.band[name] for row in own if name in row.band]
        if ends:
            low, high = zip(*ends, strict=True)
            axes.vlines(x, low, high, color=color)
            axes.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)

    finish_axes(axes, counts, xlabel="torch devices", ylabel=PANELS[name])
    if name == "days":  # twice the devices, about half the time
        axes.set_yscale("log", base=2)
    else:
        axes.set_ylim(0, 1.05 * axes.get_ylim()[1])
    axes.yaxis.set_major_formatter(lambda value, _: answer.number(value))


# --------------------------------------------------------------------------------------------------
# The published runs


def mi250_fleet(cards: int) -> Fleet:
    """Nodes of 4 cards with 800 Gb/s; a card is two torch devices."""
    return Fleet(devices.by_name("mi250"), 2 * cards, 8, 100)


def mi250(cards: int, c: Constants | None = None, cfg: TrainConfig = POSTS) -> float:
    """TFLOP/s a card of MPT-7B on nodes of 4 cards with 800 Gb/s, as LLM Foundry would run it."""
    rate = step_time.tokens_per_second(MPT7B, cfg, mi250_fleet(cards), c, step_time.FOUNDRY)
    return rate * flops.train_flops_per_token(MPT7B) / cards / 1e12


def published_pace(cfg: TrainConfig = POSTS) -> float:
    """Measured / predicted compute of the published run on 4 cards, as `--calibrate` finds it."""
    pace = 1.0
    for _ in range(20):  # a fixed point, as in calibrate.with_pace
        pace *= mi250(4, Constants(pace=pace), cfg) / PUBLISHED_MI250[4]
    return pace


def published(path: str) -> None:
    """The scaling of the MI250 posts as we predict it, and MPT-7B's memory.

    One prediction is calibrated on the first published point.
    """
    figure, ((left, right),) = canvas("MPT-7B on MI250: predicted, and as published")
    counts = [4, 8, 16, 32, 64, 128]
    c = Constants(pace=published_pace())
    calibrated = [mi250(n, c) for n in counts]
    left.plot(counts, calibrated, "o-", label="predicted, calibrated on 4 cards")
    predicted = [mi250(n) for n in counts]
    left.plot(counts, predicted, "s:", label="predicted, not calibrated")
    bands = [certainty.band(MPT7B, POSTS, mi250_fleet(n))[:2] for n in counts]
    low, high = zip(*bands, strict=True)
    ends = [[x * factor for x, factor in zip(predicted, end, strict=True)] for end in (low, high)]
    left.fill_between(counts, *ends, color="C1", alpha=0.15, label="its error band")
    points = PUBLISHED_MI250
    left.plot(points.keys(), points.values(), "k*", markersize=12, label="published by MosaicML")
    finish_axes(left, counts, xlabel="MI250 cards", ylabel="TFLOP/s a card")
    left.set_ylim(bottom=0)
    left.legend()

    fleet = Fleet(devices.by_name("mi250"), 16, 8)
    memory_bars(right, MPT7B, replace(POSTS, microbatch_size=1), fleet)
    save(figure, path)


# --------------------------------------------------------------------------------------------------
# Memory


def bytes_by_sharding(m: MPTConfig, cfg: TrainConfig, fleet: Fleet, path: str) -> None:
    """Memory of one rank in every sharding mode, without and with full activation checkpointing."""
    require(fleet.dp > 1, "with one data-parallel rank there is nothing to shard")
    size = f"{flops.n_params(m) / 1e9:.3g}B parameters"
    figure, axes = canvas(f"{size} on {fleet.devices} x {fleet.device.name}")
    for axis, mode in zip(axes.flat, ("none", "full"), strict=True):
        memory_bars(axis, m, replace(cfg, activation_checkpointing=mode), fleet)
    save(figure, path)


def memory_bars(axes, m: MPTConfig, cfg: TrainConfig, fleet: Fleet) -> None:
    """A bar for each sharding mode: the parts of a rank's peak. Dotted: the device's memory."""
    shard_size = math.gcd(fleet.dp_ranks_per_node, fleet.dp)  # some divisor of the ranks
    bars = []
    for sharding in SHARDINGS:
        one = replace(cfg, sharding=sharding, shard_size=shard_size)
        bars.append(memory.bytes_by_part(m, one, fleet.devices))

    bottom = [0.0] * len(bars)
    parts = [name for name in bars[0] if name not in ("peak", "moment")]
    for part, hatch in zip(parts, itertools.cycle(HATCHES)):
        heights = [bar[part] / 2**30 for bar in bars]
        axes.bar(SHARDINGS, heights, bottom=bottom, label=part, hatch=hatch, edgecolor="white")
        bottom = [below + height for below, height in zip(bottom, heights, strict=True)]
    axes.axhline(fleet.device.memory_gb, color="k", linestyle=":")

    run = f"{fleet.devices} x {fleet.device.name}, microbatch {cfg.microbatch_size}"
    title = f"{run}, checkpointing {cfg.activation_checkpointing}"
    axes.set(ylabel="GiB of one rank at its peak", title=title)
    axes.tick_params(axis="x", rotation=15)
    axes.legend(fontsize="small")
