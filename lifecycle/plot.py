"""Curves of one run or several, in the terminal, and as a picture when matplotlib is there.

    python -m lifecycle.plot runs/demo                            the loss, and runs/demo/loss.png
    python -m lifecycle.plot runs/a runs/b --out=ab.svg --diff    overlaid, and how far they are apart

--what=lr, grad_norm, tokens_per_second or mfu draws that instead of the loss; --what=all draws the loss and the other
four small below it. The picture is a PNG or an SVG by the ending of --out.

The x axis counts tokens, so that runs with different batches compare, or steps with --x=step. Training curves are
running means over a fiftieth of the run (the learning rate is drawn as it is). In the terminal dots are training and
letters are validation losses. A restart is where a launch went on from a checkpoint: a dotted line in the picture, a ^
below the curve in the terminal, with the number of ranks from there on. Of equal curves each shows in part: the picture
draws earlier runs wider, the terminal takes turns.

--diff compares each run with the first one, a and b, over the steps where both have a finite loss, no means:
largest = max |b - a|, mean = sum |b - a| / steps. Read next: fsdp_train.py.
"""

import io
import itertools
import math
import shutil
import string
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import config
from lifecycle import runlog
from storage import files

LETTERS = string.ascii_uppercase  # one a run, for its validation losses
DOTS = ".:+x*o%#"  # and one dot a run
WHAT = {  # key in metrics.jsonl: words, how a number is written in the terminal
    "loss": ("loss (nats a token)", ".2f"),
    "lr": ("learning rate", ".2e"),
    "grad_norm": ("gradient norm", ".3g"),
    "tokens_per_second": ("tokens/s", ",.0f"),
    "mfu": ("MFU", ".1%"),
}
X = {"tokens": "tokens", "step": "steps"}  # key in metrics.jsonl: words


@dataclass
class PlotSettings:
    """What is drawn, and where to."""

    what: Literal["loss", "lr", "grad_norm", "tokens_per_second", "mfu", "all"] = (
        "loss"  # the curve
    )
    x: Literal["tokens", "step"] = "tokens"  # the x axis
    out: str = ""  # the picture, .png or .svg (empty = loss.png or so in the first run folder)
    diff: bool = False  # how far are the losses from the first run's?


@dataclass
class Run:
    """What plots need of a run folder. All three kinds of rows have "step" and "tokens"."""

    folder: str
    steps: list[dict]  # rows of training steps
    vals: list[dict]  # rows of validations
    restarts: list[dict]  # with a "label", such as "2 ranks"


def read(folder: str) -> Run:
    """A run folder with at least one finished step, else UserError."""
    rows = runlog.read(folder)
    steps = [row for row in rows if "loss" in row and "tokens" in row]
    config.require(steps, f"{folder} has no finished step yet")
    tokens = {row["step"]: row["tokens"] for row in steps}
    per_step = steps[0]["tokens"] // max(1, steps[0]["step"])

    def place(step):  # a step without a row is 0, or the one where this run was forked from another
        return {"step": step, "tokens": tokens.get(step, step * per_step)}

    vals = [row | place(row["step"]) for row in rows if "val_loss" in row]
    marks = [
        place(n) | {"label": label}
        for n, label in restarts(folder).items()
        if 0 < n < steps[-1]["step"]
    ]
    return Run(folder, steps, vals, marks)


def restarts(folder: str) -> dict[int, str]:
    """{first step: "1 -> 2 ranks"} of the launches whose steps are in the metrics.

    A launch from step n drops the rows after n, and with them the restarts there.
    """
    ranks = {}  # by first step
    for launch in runlog.read_launches(folder):
        first = launch.get("first_step", 0)
        ranks = {step: n for step, n in ranks.items() if step < first} | {
            first: launch.get("ranks")
        }
    labels, before = {}, None
    for first, now in ranks.items():
        words = f"{now} rank{'s' if now != 1 else ''}" if now else "restart"
        labels[first] = f"{before} -> {words}" if now and before not in (None, now) else words
        before = now
    return labels


def points(rows: list[dict], x: str, key: str) -> list[tuple]:
    """(x, value) of the rows in which it is a finite number, as fp32 has them: up to 3.4e38."""
    known = (row for row in rows if row.get(key) is not None)
    return [(row[x], row[key]) for row in known if abs(row[key]) < 3.5e38]


def curves(run: Run, what: str = "loss", x: str = "tokens") -> tuple[list, list]:
    """(training, validation) of a run, each a list of (x, value); validation is empty unless `what` is the loss."""
    train = points(run.steps, x, what)
    val = points(run.vals, x, "val_loss") if what == "loss" else []
    window = 1 if what == "lr" else max(1, len(train) // 50)
    values = [value for _, value in train]
    means = []
    for end, (place, _) in enumerate(train, start=1):
        recent = values[max(0, end - window) : end]
        means.append((place, sum(recent) / len(recent)))
    return means, val


def in_terminal(
    runs: list[Run], what: str = "loss", x: str = "tokens", width: int = 0, height: int = 16
) -> str:
    """The curves as text."""
    words, form = WHAT[what]
    data = [curves(run, what, x) for run in runs]
    every = [point for train, val in data for point in train + val]
    if not every:
        return f"{words}: not known in {'this run' if len(runs) == 1 else 'these runs'}"
    right = max(place for place, _ in every)
    low, high = min(value for _, value in every), max(value for _, value in every)
    labels = [
        f"{high - y * (high - low) / (height - 1):{form}}" if y % 5 == 0 else ""
        for y in range(height)
    ]
    margin = max(7, *map(len, labels))
    width = width or max(30, min(100, shutil.get_terminal_size().columns) - margin - 3)
    grid = [[" "] * width for _ in range(height)]

    def column(place):
        return round(place / max(right, 1) * (width - 1))

    def put(number, curve, marks):
        for place, value in curve:
            at, y = column(place), round((high - value) / ((high - low) or 1) * (height - 1))
            if (
                grid[y][at] not in marks or at % (number + 1) == 0
            ):  # who meets another's mark takes turns with it
                grid[y][at] = marks[number % len(marks)]

    for number, (train, _) in enumerate(data):
        put(number, train, DOTS)
    for number, (_, val) in enumerate(data):
        put(number, val, LETTERS)
    lines = [
        f"{label:>{margin}} |{''.join(row).rstrip()}"
        for label, row in zip(labels, grid, strict=True)
    ]
    axis = ["-"] * width
    for mark in itertools.chain(*(run.restarts for run in runs)):
        if mark[x] <= right:
            axis[column(mark[x])] = "^"
    lines.append(" " * (margin + 1) + "+" + "".join(axis))
    lines.append(" " * (margin + 2) + "0" + f"{words}   {right:,} {X[x]}".rjust(width - 1))
    return "\n".join(lines)


def legend(runs: list[Run], validation: bool) -> str:
    """The marks of the runs in the terminal, with the letters of their validations or without, and their restarts."""
    lines = []
    for number, run in enumerate(runs):
        letter = f", {LETTERS[number % len(LETTERS)]} validation" if run.vals and validation else ""
        lines.append(f"{' ' * 9}{DOTS[number % len(DOTS)]} training{letter}: {run.folder}")
        if run.restarts:
            marks = ", ".join(f"{mark['step']} ({mark['label']})" for mark in run.restarts)
            lines.append(
                textwrap.indent(textwrap.fill(f"^ restarts after step {marks}", 80), " " * 11)
            )
    return "\n".join(lines)


def as_picture(runs: list[Run], path: Path, what: str = "loss", x: str = "tokens") -> bool:
    """Write the curves to `path`, .png or .svg; False when matplotlib is not installed (requirements-extra.txt)."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        return False
    panels = (
        [["loss"] * 2, ["lr", "grad_norm"], ["tokens_per_second", "mfu"]]
        if what == "all"
        else [[what]]
    )
    with matplotlib.rc_context({"text.parse_math": False}):  # a $ in a folder's name is a $
        handles = [
            style(number, len(runs)) | {"label": run.folder[-100:]}
            for number, run in enumerate(runs)
        ]
        if panels[0][0] == "loss" and any(run.vals for run in runs):
            handles.append(
                {
                    "color": "grey",
                    "linestyle": "--",
                    "marker": "o",
                    "markersize": 5,
                    "label": "validation",
                }
            )
        if any(run.restarts for run in runs):
            handles.append({"color": "grey", "linestyle": ":", "label": "restart"})
        columns = max(1, min(3, 90 // max(len(handle["label"]) for handle in handles)))
        tall = 4.3 + 1.7 * (len(panels) - 1) + 0.2 * math.ceil(len(handles) / columns)  # inches
        figure = Figure(figsize=(8, tall), layout="constrained")
        for key, axes in figure.subplot_mosaic(
            panels, height_ratios=[2.6, 1, 1][: len(panels)]
        ).items():
            draw(axes, runs, key, x, small=key != panels[0][0])
        lines = [matplotlib.lines.Line2D([], [], **handle) for handle in handles]
        figure.legend(
            handles=lines,
            loc="outside lower center",
            ncols=columns,
            fontsize="small",
            frameon=False,
        )
        picture = io.BytesIO()
        figure.savefig(picture, format=path.suffix[1:].lower(), dpi=120)
        files.write_atomically(
            path, picture.getvalue()
        )  # not through a link that lies in a stranger's folder
    return True


def style(number: int, of: int) -> dict:
    """How run `number` is drawn: ten colours, then the same dashed; the earlier the wider."""
    wider = (3 if of <= 4 else 1.5) * (of - 1 - number) / max(of - 1, 1)
    return {
        "color": f"C{number % 10}",
        "linestyle": ["-", "--", "-.", ":"][number // 10 % 4],
        "linewidth": 1 + wider,
    }


def draw(axes, runs: list[Run], what: str, x: str, small: bool) -> None:
    """One panel: the curves and the restarts, which have labels in a large one, as far as there is room."""
    from matplotlib.ticker import EngFormatter, PercentFormatter

    drawn = [curves(run, what, x) for run in runs]
    for number, (train, val) in enumerate(drawn):
        look = style(number, len(runs))
        if train:
            axes.plot(*zip(*train, strict=True), **look, marker="o" if len(train) == 1 else None)
        if val:
            dots = {"color": look["color"], "linewidth": 1, "markersize": 4 + look["linewidth"]}
            axes.plot(*zip(*val, strict=True), "o--", **dots)
    if not any(train or val for train, val in drawn):
        axes.text(
            0.5, 0.5, "not known", transform=axes.transAxes, ha="center", va="center", color="grey"
        )
    marks = sorted(
        (mark[x], mark["label"], f"C{n % 10}")
        for n, run in enumerate(runs)
        for mark in run.restarts
    )
    wide = axes.get_xlim()[1] - axes.get_xlim()[0]
    upright = any(0.02 * wide < b[0] - a[0] < 0.12 * wide for a, b in itertools.pairwise(marks))
    room = -math.inf  # for labels, from here on
    for place, label, color in marks:
        axes.axvline(place, color=color, linestyle=":", linewidth=1, alpha=0.5 if small else 0.8)
        if not small and place >= room:
            above = {
                "xytext": (0, 3),
                "textcoords": "offset points",
                "ha": "center",
                "va": "bottom",
            }
            turned = {
                "rotation": 90 if upright else 0,
                "fontsize": 7 if upright else 9,
                "color": color,
            }
            axes.annotate(label, (place, 1), xycoords=axes.get_xaxis_transform(), **above, **turned)
            room = place + 0.02 * wide
    size = "small" if small else "medium"
    axes.set_xlabel("" if small else X[x])
    axes.set_ylabel(WHAT[what][0], fontsize=size)
    axes.tick_params(labelsize=size)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    if what in ("tokens_per_second", "mfu"):
        axes.yaxis.set_major_formatter(
            PercentFormatter(1) if what == "mfu" else EngFormatter(sep="")
        )
    axes.grid(alpha=0.3)


@dataclass
class Difference:
    """|b - a| of two curves, nats a token, over the `steps` of the `common` ones where both are finite."""

    largest: float  # NaN if no step is compared
    step: int | None  # of the largest
    mean: float
    steps: int
    common: int


def difference(a: list[dict], b: list[dict], key: str = "loss") -> Difference:
    """Of rows with "step" and `key`."""
    common = {row["step"] for row in a} & {row["step"] for row in b}
    a, b = (dict(points(rows, "step", key)) for rows in (a, b))
    apart = {step: abs(b[step] - a[step]) for step in sorted(a.keys() & b.keys())}
    at = max(apart, key=apart.get, default=None)
    mean = math.fsum(apart.values()) / len(apart) if apart else math.nan
    return Difference(apart.get(at, math.nan), at, mean, len(apart), len(common))


def batches(first: Run, other: Run) -> str:
    """Whether both runs saw the same tokens in the steps that both have."""
    a, b = ({row["step"]: row.get("batch_hash") for row in run.steps} for run in (first, other))
    common = sorted(a.keys() & b.keys())
    known = [step for step in common if a[step] and b[step]]
    differ = [step for step in known if a[step] != b[step]]
    if not common:
        return "no step in common"
    if differ:
        return f"different batches from step {differ[0]}"
    if not known:
        return "batches not recorded"
    return "the same batches" + (
        "" if known == common else f" in the {len(known)} steps that record them"
    )


def table_of_differences(runs: list[Run]) -> str:
    """Each run against the first, nats a token."""
    first = runs[0]
    lines = [
        f"difference from {first.folder}",
        f"{'':17}{'largest':>11}{'at step':>11}{'mean':>11}  steps compared",
    ]
    for run in runs[1:]:
        lines.append(f"{run.folder}: {batches(first, run)}")
        train, val = (
            difference(first.steps, run.steps),
            difference(first.vals, run.vals, "val_loss"),
        )
        for words, d in {"training loss": train, "validation loss": val}.items():
            if d.common:
                at = "-" if d.step is None else d.step
                lines.append(
                    f"  {words:15}{d.largest:11.3g}{at:>11}{d.mean:11.3g}  {d.steps} of {d.common}"
                )
    return "\n".join(lines)


def main(argv) -> None:
    folders, cfg = config.load(argv, PlotSettings, takes="RUN ...")
    out = Path(cfg.out or Path(folders[0]) / f"{cfg.what}.png")
    config.require(
        out.suffix.lower() in (".png", ".svg"), f"--out={out}: a picture ends in .png or .svg"
    )
    config.require(
        len(folders) > 1 or not cfg.diff, "--diff compares runs: name two run folders or more"
    )
    runs = [read(folder) for folder in folders]
    for what in WHAT if cfg.what == "all" else [cfg.what]:
        print(in_terminal(runs, what, cfg.x, height=16 if what == "loss" else 11))
    print(legend(runs, validation=cfg.what in ("loss", "all")))
    drawn = as_picture(runs, out, cfg.what, cfg.x)
    print(
        out
        if drawn
        else "(a picture needs matplotlib: .venv/bin/pip install -r requirements-extra.txt)"
    )
    for run in folders:
        print(runlog.summary(run, runlog.read_settings(run).get("expect")))
    if cfg.diff:
        print(table_of_differences(runs))


if __name__ == "__main__":
    config.run(main)
