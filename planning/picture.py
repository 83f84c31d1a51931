"""Pictures of what the planner predicts: time, cost and scaling, memory by sharding mode.

    python plan.py configs/mpt7b.py --device=h100,mi250 --price=2.5,1.2 --sweep_devices=8,16 --plot
    python plan.py configs/mpt7b.py --device=mi250 --devices=16 --plot                       memory

Bands are the error bands of the prediction. Lines differ in style and marker, not in colour alone.
"""

import io
import itertools
import math
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import program
from config import SHARDING_MODES
from planning import answer, memory
from planning.answer import Row
from planning.search import Plan
from program import require
from storage import files

HATCHES = ("", "//", "..", "\\\\", "xx", "", "--")  # parts differ without colours, too
STYLES = ("o-", "s--", "^:", "D-.", "v-", "P--")  # of one kind of device each
# {key of a row: what its vertical axis says}
PANELS = {
    "days": "days of training",
    "cost": "cost, in the currency of --price",
    "tokens_per_second": "tokens/s",
    "kwh": "kWh of the run",
    "efficiency": "efficiency",
}


def canvas(rows: int = 1):
    """A figure, and its two pairs of axes in each row."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise program.UserError(f"pictures need matplotlib: {program.EXTRA}") from error
    figure = Figure(figsize=(12, 1 + 4 * rows), layout="constrained")
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


def draw_rows(rows: list[Row], path: str) -> None:
    """One panel for each figure of PANELS that is known: a line and a band for each label."""
    planned = [row for row in rows if not row["problem"]]
    known = [name for name in PANELS if any(row[name] for row in planned)]
    figure, axes = canvas(math.ceil(len(known) / 2))
    for axis, name in itertools.zip_longest(axes.flat, known):
        if name is None:
            axis.remove()
        else:
            panel(axis, planned, name)

    title = f"{answer.size(planned[0])} on {answer.tokens_text(planned[0]['tokens'])}, predicted"
    lines, names = axes[0, 0].get_legend_handles_labels()
    figure.legend(lines, names, title=title, loc="outside upper center", ncols=min(3, len(names)))
    footer = ["bands: from the errors of published runs", *answer.certainty_lines(planned)]
    wrapped = [line for text in footer for line in textwrap.wrap(text, width=175)]
    figure.supxlabel("\n".join(wrapped), x=0.01, ha="left", fontsize="small")
    save(figure, path)


def panel(axes, rows: list[Row], name: str) -> None:
    """One figure of the rows over the number of devices: a line and a band for each label."""
    labels = dict.fromkeys(row["label"] for row in rows)
    for label, style in zip(labels, itertools.cycle(STYLES)):
        own = [row for row in rows if row["label"] == label and row[name]]
        counts = [row["devices"] for row in own]
        (line,) = axes.plot(counts, [row[name] for row in own], style, label=label)
        ends = [row["band"].get(name, [row[name]] * 2) for row in own]
        if ends:
            axes.fill_between(counts, *zip(*ends, strict=True), color=line.get_color(), alpha=0.15)
    axes.set_xscale("log", base=2)
    counts = sorted({row["devices"] for row in rows})
    axes.set_xticks(counts, [str(n) for n in counts])
    axes.minorticks_off()
    axes.set(xlabel="torch devices", ylabel=PANELS[name])
    axes.grid(alpha=0.3)
    if name == "days":  # twice the devices, about half the time
        axes.set_yscale("log", base=2)
    else:
        axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(lambda value, _: answer.number(value))


def bytes_by_sharding(plan: Plan, path: str) -> None:
    """A bar for each sharding mode, without and with full checkpointing: the parts of the peak."""
    figure, axes = canvas()
    figure.suptitle(f"{plan.fleet.devices} x {plan.fleet.device.name}; dotted: a device's memory")
    of_node = max(1, plan.fleet.node_size // plan.cfg.tp)  # data-parallel ranks
    shard_size = math.gcd(of_node, plan.dp)  # some divisor of the ranks
    modes = [*reversed(SHARDING_MODES)]  # the one that takes the most memory first
    for axis, checkpointing in zip(axes.flat, ("none", "full"), strict=True):
        cfg = replace(plan.cfg, activation_checkpointing=checkpointing, shard_size=shard_size)
        bars = [
            memory.bytes_by_part(plan.m, replace(cfg, sharding=mode), plan.fleet.devices)
            for mode in modes
        ]
        bottom = [0.0] * len(bars)
        parts = [name for name in bars[0] if name not in ("peak", "moment")]
        for part, hatch in zip(parts, itertools.cycle(HATCHES)):
            heights = [bar[part] / 2**30 for bar in bars]
            axis.bar(modes, heights, bottom=bottom, label=part, hatch=hatch, edgecolor="white")
            bottom = [below + height for below, height in zip(bottom, heights, strict=True)]
        axis.axhline(plan.fleet.device.memory_gb, color="k", linestyle=":")
        title = f"microbatch {cfg.microbatch_size}, checkpointing {checkpointing}"
        axis.set(ylabel="GiB of one rank at its peak", title=title)
        axis.tick_params(axis="x", rotation=15)
        axis.legend(fontsize="small")
    save(figure, path)
