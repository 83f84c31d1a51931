"""Pictures of what the planner predicts: scaling, and memory by sharding mode.

    python -m planning.picture [OUT.png]

draws MPT-7B on 4 to 128 MI250 cards beside the published points. For any other fleet:

    python plan.py configs/mpt7b.py --device=mi250 --sweep_devices=8,16,32 --plot

With a price, or with several kinds of device, that draws time, cost and energy instead:

    python plan.py configs/mpt7b.py --device=h100,mi250 --price=2.5,1.2 --sweep_devices=8,16 --plot

Bands are the error bands of the prediction. Kinds differ in line and marker, not in colour alone.
"""

import io
import itertools
import math
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import config
import devices
import flops
from config import SHARDING_MODES, MPTConfig, TrainConfig, require
from devices import PUBLISHED_MI250
from planning import answer, certainty, memory, step_time
from planning.answer import Row
from planning.fleet import Fleet
from planning.step_time import Constants
from storage import files

# The run of devices.PUBLISHED_MI250, MPT-7B at a global batch of 1536. MosaicML's posts do not
# give the microbatch: configs/mpt7b_mi250.py takes 3 without recomputation, and that fits.
MPT7B = MPTConfig(d_model=4096, n_heads=32, n_layers=32, attn_impl="sdpa")
POSTS = TrainConfig(global_batch_size=1536, microbatch_size=3)
HATCHES = ("", "//", "..", "\\\\", "xx", "", "--")  # parts differ without colours, too
SHARDINGS = tuple(reversed(SHARDING_MODES))  # the one that takes the most memory first


# --------------------------------------------------------------------------------------------------
# matplotlib


def canvas(title: str | None = None, rows: int = 1, footer_lines: int = 0):
    """A figure with its two pairs of axes in each row, and with room for the lines below it."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise config.UserError(f"pictures need matplotlib: {config.EXTRA}") from error
    height = (4.5 if rows == 1 else 7.8) + 0.14 * footer_lines
    figure = Figure(figsize=(12, height), layout="constrained")
    figure.suptitle(title)
    return figure, figure.subplots(rows, 2)


def save(figure, path: str) -> None:
    """Write the figure. UserError if it cannot be written there, or is no kind of picture."""
    folder = Path(path).parent
    require(Path(path).suffix, f"--out={path}: name a picture, such as plan.png")
    fix = f"mkdir -p {config.shell(folder)}, or name another --out"
    require(folder.is_dir(), f"--out={path}: there is no folder {folder}: {fix}")
    try:
        picture = io.BytesIO()
        figure.savefig(picture, format=Path(path).suffix[1:].lower(), dpi=120)
        files.write_atomically(path, picture.getvalue())
    except (ValueError, OSError) as error:
        fix = "name another --out, such as plan.png"
        raise config.UserError(f"--out={path}: {config.one_line(error)}: {fix}") from error
    print(f"drawn: {path}", file=sys.stderr)


def finish_axes(axes, counts: list[int], **labels) -> None:
    """A horizontal axis with the numbers of devices, then labels and grid."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(n) for n in counts])
    axes.minorticks_off()
    axes.set(**labels)
    axes.grid(alpha=0.3)


# --------------------------------------------------------------------------------------------------
# Scaling


def scaling(rows: list[Row], path: str) -> None:
    """Tokens/s and efficiency over the number of devices. rows: of answer.sweep."""
    rows = [row for row in rows if not row.problem]
    counts = sorted({row.devices for row in rows})
    size = f"{rows[0].n_params / 1e9:.3g}B parameters"
    figure, (left, right) = canvas(f"{size} on {rows[0].device}, predicted")
    for i, (name, style) in enumerate((("strong scaling", "o-"), ("weak scaling", "s--"))):
        own = [row for row in rows if row.label == name]
        x = [row.devices for row in own]
        left.plot(x, [row.tokens_per_second for row in own], style, label=name)
        right.plot(x, [100 * row.efficiency for row in own], style, label=name)
        if i == 0:
            low, high = zip(*(row.band["tokens_per_second"] for row in own), strict=True)
            left.fill_between(x, low, high, alpha=0.2, label="error band, strong scaling")

    of_one = rows[0].tokens_per_second / rows[0].devices
    left.plot(counts, [n * of_one for n in counts], "k:", label="ideal")
    left.set_yscale("log")
    finish_axes(left, counts, xlabel="torch devices", ylabel="tokens/s")
    efficiency = "% of the smallest fleet's speed per device"
    finish_axes(right, counts, xlabel="torch devices", ylabel=efficiency)
    right.set_ylim(bottom=0)
    for axes in (left, right):
        axes.legend()
    save(figure, path)


# --------------------------------------------------------------------------------------------------
# Time, cost and energy

LINE = 175  # characters in a line of small text, as wide as the picture
# Of one kind of device each: line, marker, colour. Dark to light, so that they differ in grey.
STYLES = [
    ("-", "o", "C0"),
    ("--", "s", "C1"),
    (":", "^", "C2"),
    ("-.", "D", "C4"),
    ("-", "v", "C5"),
    ("--", "P", "C3"),
]


def time_and_cost(rows: list[Row], path: str) -> None:
    """Speed, days, cost and energy of a run over the number of devices.

    Each kind of device has a line and its error band. rows: of a comparison. What is not known of a
    kind (its price, its watts) is left out.
    """
    planned = [row for row in rows if not row.problem]
    footer = ["bands: from the errors of published runs", *answer.certainty_lines(planned)]
    footer = [part for line in footer for part in textwrap.wrap(line, LINE)]
    figure, axes = canvas(rows=2, footer_lines=len(footer))

    in_hours = all(row.days < 2 for row in planned)
    panels = [
        ("tokens_per_second", 1, "tokens/s"),
        ("days", 24 if in_hours else 1, f"{'hours' if in_hours else 'days'} of training"),
        ("cost", 1, "cost, in the currency of --price"),
        ("kwh", 1, "kWh of the run"),
    ]
    for axis, panel in zip(axes.flat, panels, strict=True):
        panel_of_kinds(axis, planned, *panel)
    kinds, names = axes[0, 0].get_legend_handles_labels()
    size = f"{planned[0].n_params / 1e9:.3g}B parameters"
    title = f"{size} on {answer.tokens_text(planned[0].tokens)}, predicted"
    width = 1.3 * max(map(len, names)) + 10  # of a name and its line, in characters of small text
    columns = max(1, int(LINE / width))
    where = {"loc": "outside upper center", "ncols": min(columns, len(names)), "frameon": False}
    figure.legend(kinds, names, title=title, title_fontsize="large", **where)
    figure.supxlabel("\n".join(footer), x=0.01, ha="left", fontsize="small")
    save(figure, path)


def panel_of_kinds(axes, rows: list[Row], name: str, factor: float, label: str) -> None:
    """One figure of all rows over the number of devices: a line and a band for each kind."""
    counts = sorted({row.devices for row in rows})
    labels = list(dict.fromkeys(row.label for row in rows))
    for i, kind in enumerate(labels):
        own = [row for row in rows if row.label == kind and getattr(row, name)]
        if not own:
            continue
        # Side by side, so that the bars of two kinds do not cover each other.
        shift = 2 ** (0.05 * (i - (len(labels) - 1) / 2))
        x = [row.devices * shift for row in own]
        y = [getattr(row, name) * factor for row in own]
        ends = [[end * factor for end in row.band[name]] for row in own]
        line, marker, color = STYLES[i % len(STYLES)]
        draw_band(axes, x, y, ends, fmt=marker + line, color=color, label=kind)

    finish_axes(axes, counts, xlabel="torch devices", ylabel=label)
    axes.set_xlim(counts[0] / 1.2, counts[-1] * 1.2)
    if name == "days":  # twice the devices, about half the time
        axes.set_yscale("log", base=2)
        axes.minorticks_off()
    else:
        axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(lambda value, _: answer.number(value))


def draw_band(axes, x: list, y: list, ends: list, **style) -> None:
    """A line with markers; around it the band between the pairs of `ends`, and its bars."""
    low, high = zip(*ends, strict=True)
    below = [middle - end for middle, end in zip(y, low, strict=True)]
    above = [end - middle for middle, end in zip(y, high, strict=True)]
    axes.errorbar(x, y, yerr=[below, above], capsize=4, **style)
    axes.fill_between(x, low, high, color=style["color"], alpha=0.15, linewidth=0)


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
    for _ in range(20):  # a fixed point, as in calibrate.Fit.log_pace
        pace *= mi250(4, Constants(pace=pace), cfg) / PUBLISHED_MI250[4]
    return pace


def published(path: str) -> None:
    """The scaling of the MI250 posts as we predict it, and MPT-7B's memory.

    One prediction is calibrated on the first published point.
    """
    figure, (left, right) = canvas("MPT-7B on MI250: predicted, and as published")
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
    for axis, mode in zip(axes, ("none", "full"), strict=True):
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


def main(argv: list[str]) -> None:
    """Draw the published runs into the file that argv names, or plan.png."""
    (path,) = config.arguments(argv, "[OUT.png]") or ["plan.png"]
    published(path)


if __name__ == "__main__":
    config.run(main)
