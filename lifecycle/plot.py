"""Curves of one run or several, in the terminal and, with matplotlib, as a picture.

    python -m lifecycle.plot runs/demo                            # the loss, and runs/demo/loss.png
    python -m lifecycle.plot runs/a runs/b --out=ab.svg --diff    # overlaid, and their differences

--what draws another curve: lr, grad_norm, tokens_per_second or mfu. --what=all draws the loss and
the other four below it. The picture is a PNG or an SVG, by the ending of --out.

The x axis counts tokens, so that runs with different batches compare; --x=step counts steps. A
training curve is a running mean: each point averages the steps up to it, over a window of 1/50 of
the run (the learning rate is not averaged). In the terminal, dots are training losses and letters
are validation losses.

A restart is where a launch resumed from a checkpoint: a dotted line in the picture, a ^ below the
curve in the terminal, with the layout from there on: ranks, and tp and pp if layers are cut.
Equal curves stay visible: the picture draws earlier runs wider, the terminal alternates their
marks.

--diff compares each run b with the first run a, over the steps where both losses are finite. It
takes the raw losses, not running means: largest = max |b - a|, mean = sum |b - a| / steps.
"""

import io
import itertools
import math
import shutil
import string
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

import config
import program
from lifecycle import runlog
from storage import files

LETTERS = string.ascii_uppercase  # one per run, for its validation losses
DOTS = ".:+x*o%#"  # one per run, for its training losses
WHAT = {  # key in metrics.jsonl: (title, format of a value in the terminal)
    "loss": ("loss (nats per token)", ".2f"),
    "lr": ("learning rate", ".2e"),
    "grad_norm": ("gradient norm", ".3g"),
    "tokens_per_second": ("tokens/s", ",.0f"),
    "mfu": ("MFU", ".1%"),
}
X = {"tokens": "tokens", "step": "steps"}  # key in metrics.jsonl: unit
PANELS = [["loss"] * 2, ["lr", "grad_norm"], ["tokens_per_second", "mfu"]]  # of --what=all
MOST_POINTS = 5_000  # of a curve that is drawn
CurveName = Literal["loss", "lr", "grad_norm", "tokens_per_second", "mfu", "all"]


@dataclass
class PlotSettings:
    """Which curves, and where the picture goes."""

    what: CurveName = "loss"  # the curve
    x: Literal["tokens", "step"] = "tokens"  # the x axis
    out: str = ""  # the picture, .png or .svg (empty = WHAT.png in the first run folder)
    diff: bool = False  # print how far the losses are from those of the first run


# --------------------------------------------------------------------------------------------------
# Runs and curves


@dataclass
class Run:
    """What plots need of a run folder. Columns have a value for each row: {name: (rows,)}."""

    folder: str
    steps: dict  # columns of the training steps
    vals: dict  # columns of the validations
    restarts: list[dict]  # with "step", "tokens" and a "label", such as "2 ranks"
    metrics: runlog.Metrics  # for a summary


def read(folder: str, names: Iterable[str] = (*WHAT, "batch_hash")) -> Run:
    """Read columns of a run folder. UserError if it has no finished step."""
    metrics = runlog.read_columns(folder, names)
    has_tokens = np.array(metrics.steps["tokens"]) >= 0
    program.require(has_tokens.any(), f"{folder} has no finished step yet")
    steps = {name: np.array(values)[has_tokens] for name, values in metrics.steps.items()}
    labels = restart_labels(folder)

    marked = [*(row["step"] for row in metrics.evaluations), *labels]
    at = np.isin(steps["step"], marked)
    tokens_at = dict(zip(steps["step"][at].tolist(), steps["tokens"][at].tolist(), strict=True))
    tokens_per_step = int(steps["tokens"][0]) // max(1, int(steps["step"][0]))

    def position(step):
        # Step 0 has no row, and neither has the step at which a run was forked from another.
        return {"step": step, "tokens": tokens_at.get(step, step * tokens_per_step)}

    vals = [row | position(row["step"]) for row in metrics.evaluations]
    names = ("step", "tokens", "val_loss")
    restarts = [
        position(step) | {"label": label}
        for step, label in labels.items()
        if 0 < step < steps["step"][-1]
    ]
    vals = {name: np.array([row[name] for row in vals]) for name in names}
    return Run(folder, steps, vals, restarts, metrics)


def layout_label(ranks: int, tp: int, pp: int) -> str:
    """A layout in words: 4 ranks, tp 2, pp 2."""
    label = f"{ranks} rank" + "s" * (ranks > 1)
    return label + f", tp {tp}" * (tp > 1) + f", pp {pp}" * (pp > 1)


def restart_labels(folder: str) -> dict[int, str]:
    """{first step: "2 -> 4 ranks, tp 2, pp 2"} of the launches whose steps are in the metrics.

    A launch from step n drops the rows after n, and with them the restarts there.
    """
    launch_from = {}  # first step: launch
    for launch in runlog.read_launches(folder):
        first = launch.get("first_step", 0)
        launch_from = {step: earlier for step, earlier in launch_from.items() if step < first}
        launch_from[first] = launch

    labels, before = {}, None
    for first, launch in launch_from.items():
        ranks, tp, pp = launch.get("ranks"), launch.get("tp", 1), launch.get("pp", 1)
        label = "restart"  # the number of ranks is not on record
        if ranks:
            was = f"{before} -> " * (before not in (None, ranks))
            label = was + layout_label(ranks, tp, pp)
        labels[first], before = label, ranks
    return labels


def points(columns: dict, x: str, key: str) -> tuple[np.ndarray, np.ndarray]:
    """(x, values) of the rows whose value is finite in fp32: up to 3.4e38."""
    kept = np.abs(columns[key].astype(np.float64)) < 3.5e38
    return columns[x][kept], columns[key][kept]


def curves(run: Run, what: str = "loss", x: str = "tokens") -> tuple[list, list]:
    """(training, validation) of a run, each a list of (x, value).

    Validation is empty unless `what` is the loss.
    """
    xs, values = points(run.steps, x, what)
    window = 1 if what == "lr" else max(1, len(values) // 50)
    train = running_means(xs, values, window)
    return train, pairs(*points(run.vals, x, "val_loss")) if what == "loss" else []


def envelope(steps, values, n_points: int, after: int = -1) -> tuple[list, list, list, list]:
    """(x, low, mean, high) of a column in at most n_points: no minimum and no maximum is lost.

    steps, values: (rows,) each, in the order of the file. Each point stands for equally many rows,
    and its x is the step of the last of them. Rows up to the step `after` are left out, and
    values that are not finite in fp32. Numbers are rounded to 7 digits.
    """
    steps, values = np.asarray(steps, np.int64), np.asarray(values, np.float64)
    kept = (steps > after) & (np.abs(values) < 3.5e38)
    steps, values = steps[kept], values[kept]
    order = np.argsort(steps, kind="stable")
    steps, values = steps[order], values[order]
    n = min(n_points, len(steps))
    if n == 0:
        return [], [], [], []

    begins = np.arange(n) * len(steps) // n
    ends = np.append(begins[1:], len(steps))
    columns = [
        np.minimum.reduceat(values, begins),
        np.add.reduceat(values, begins) / (ends - begins),
        np.maximum.reduceat(values, begins),
    ]
    rounded = [[float(f"{value:.7g}") for value in column] for column in columns]
    return steps[ends - 1].tolist(), *rounded


def running_means(xs: np.ndarray, values: np.ndarray, window: int) -> list[tuple]:
    """The mean of the last `window` values, at every k-th point and at the last one.

    More than MOST_POINTS are wider than a picture.
    """
    every = max(1, len(xs) // MOST_POINTS)
    drawn = range(len(xs))
    drawn = [*drawn[:-1:every], *drawn[-1:]]
    means = [values[max(0, at + 1 - window) : at + 1].mean() for at in drawn]
    return pairs(xs[drawn], np.array(means))


def pairs(xs: np.ndarray, values: np.ndarray) -> list[tuple]:
    """[(x, value), ...] as Python's numbers."""
    return list(zip(xs.tolist(), values.tolist(), strict=True))


# --------------------------------------------------------------------------------------------------
# The terminal


def in_terminal(
    runs: list[Run], what: str = "loss", x: str = "tokens", width: int = 0, height: int = 16
) -> str:
    """The curves as text, `width` columns wide (0: as the terminal) and `height` lines high."""
    title, form = WHAT[what]
    drawn = [curves(run, what, x) for run in runs]
    all_points = [point for train, val in drawn for point in [*train, *val]]
    if not all_points:
        return f"{title}: not known in {'this run' if len(runs) == 1 else 'these runs'}"

    right = max(x_value for x_value, _ in all_points)
    low = min(value for _, value in all_points)
    high = max(value for _, value in all_points)
    labels = [f"{high - line * (high - low) / (height - 1):{form}}" for line in range(height)]
    labels = [label if line % 5 == 0 else "" for line, label in enumerate(labels)]
    margin = max(7, *map(len, labels))
    width = width or max(30, min(100, shutil.get_terminal_size().columns) - margin - 3)

    def column(x_value) -> int:
        return round(x_value / max(right, 1) * (width - 1))

    grid = [[" "] * width for _ in range(height)]
    marked = [(train, DOTS) for train, _ in drawn] + [(val, LETTERS) for _, val in drawn]
    for number, (curve, marks) in enumerate(marked):
        number %= len(runs)
        for x_value, value in curve:
            line = round((high - value) / ((high - low) or 1) * (height - 1))
            # Where curves meet, their marks alternate.
            is_free = grid[line][column(x_value)] not in marks
            if is_free or column(x_value) % (number + 1) == 0:
                grid[line][column(x_value)] = marks[number % len(marks)]

    axis = ["-"] * width
    for restart in itertools.chain(*(run.restarts for run in runs)):
        if restart[x] <= right:
            axis[column(restart[x])] = "^"
    rows = zip(labels, grid, strict=True)
    lines = [f"{label:>{margin}} |{''.join(cells).rstrip()}" for label, cells in rows]
    lines.append(" " * (margin + 1) + "+" + "".join(axis))
    lines.append(" " * (margin + 2) + "0" + f"{title}   {right:,} {X[x]}".rjust(width - 1))
    return "\n".join(lines)


def legend(runs: list[Run], validation: bool) -> str:
    """The marks of the runs in the terminal and their restarts.

    validation: whether the curves hold validation losses.
    """
    lines = []
    for number, run in enumerate(runs):
        letter = LETTERS[number % len(LETTERS)]
        val = f", {letter} validation" if len(run.vals["step"]) and validation else ""
        lines.append(f"{' ' * 9}{DOTS[number % len(DOTS)]} training{val}: {run.folder}")
        if run.restarts:
            marks = ", ".join(f"{mark['step']} ({mark['label']})" for mark in run.restarts)
            text = textwrap.fill(f"^ restarts after step {marks}", 80)
            lines.append(textwrap.indent(text, " " * 11))
    return "\n".join(lines)


# --------------------------------------------------------------------------------------------------
# The picture


def as_picture(runs: list[Run], path: Path, what: str = "loss", x: str = "tokens") -> bool:
    """Write the curves to `path`, .png or .svg.

    Returns False if matplotlib is not installed (requirements-extra.txt).
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        return False
    panels = PANELS if what == "all" else [[what]]
    large = panels[0][0]
    # A $ in a folder's name is a $.
    with matplotlib.rc_context({"text.parse_math": False, "font.size": 9}):
        inches = 4.3 + 1.7 * (len(panels) - 1) + 0.2 * len(runs)
        figure = Figure(figsize=(8, inches), layout="constrained")
        heights = [2.6, 1, 1][: len(panels)]
        all_axes = figure.subplot_mosaic(panels, height_ratios=heights)
        for key, axes in all_axes.items():
            draw(axes, runs, key, x)
            draw_restarts(axes, runs, x, with_labels=key == large)
        lines, labels = all_axes[large].get_legend_handles_labels()
        figure.legend(lines, labels, loc="outside lower center", frameon=False)

        picture = io.BytesIO()
        figure.savefig(picture, format=path.suffix[1:].lower(), dpi=120)
        # Atomically, so that a link in somebody else's run folder is replaced and not followed.
        files.write_atomically(path, picture.getvalue())
    return True


def draw(axes, runs: list[Run], what: str, x: str) -> None:
    """Draw the curves and axes of one panel: ten colours, then dashed; earlier runs are wider."""
    from matplotlib.ticker import EngFormatter, PercentFormatter

    drawn = [curves(run, what, x) for run in runs]
    for number, (run, (train, val)) in enumerate(zip(runs, drawn, strict=True)):
        color, style = f"C{number % 10}", "-" if number < 10 else "--"
        wider = 2 * (len(runs) - 1 - number) / len(runs)
        marker = "o" if len(train) == 1 else None
        look = {"linestyle": style, "linewidth": 1 + wider, "marker": marker}
        axes.plot(*unzipped(train), color=color, label=run.folder[-100:], **look)
        if val:
            axes.plot(*unzipped(val), "o--", color=color, linewidth=1)
    if any(val for _, val in drawn):
        axes.plot([], [], "o--", color="grey", linewidth=1, label="validation")
    if not any(train or val for train, val in drawn):
        center = {"transform": axes.transAxes, "ha": "center", "va": "center"}
        axes.text(0.5, 0.5, "not known", color="grey", **center)
    axes.set_xlabel(X[x])
    axes.set_ylabel(WHAT[what][0])
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    formats = {"mfu": PercentFormatter(1), "tokens_per_second": EngFormatter(sep="")}
    if what in formats:
        axes.yaxis.set_major_formatter(formats[what])
    axes.grid(alpha=0.3)


def unzipped(curve: list[tuple]) -> tuple[list, list]:
    """[(x, value), ...] -> all x, all values."""
    return [x for x, _ in curve], [value for _, value in curve]


def draw_restarts(axes, runs: list[Run], x: str, with_labels: bool) -> None:
    """A dotted line for each restart, with its label where there is room."""
    restarts = sorted(
        (restart[x], restart["label"], f"C{number % 10}")
        for number, run in enumerate(runs)
        for restart in run.restarts
    )
    if restarts:
        axes.plot([], [], ":", color="grey", linewidth=1, label="restart")
    left, right = axes.get_xlim()
    font = {"rotation": 90, "fontsize": 7, "ha": "center", "va": "bottom"}
    next_free = -math.inf  # where the next label has room
    for position, label, color in restarts:
        axes.axvline(position, color=color, linestyle=":", linewidth=1)
        if with_labels and position >= next_free:
            above = {"xytext": (0, 3), "textcoords": "offset points"}
            top = {"xy": (position, 1), "xycoords": axes.get_xaxis_transform()}
            axes.annotate(label, **top, **above, **font, color=color)
            next_free = position + 0.02 * (right - left)


# --------------------------------------------------------------------------------------------------
# Differences


class Difference(NamedTuple):
    """|b - a| of two curves, nats per token, over the steps where both are finite."""

    largest: float  # NaN if no step is compared
    step: int | str  # of the largest; "-" if no step is compared
    mean: float  # NaN if no step is compared
    steps: int  # compared: both are finite
    common: int  # in both curves


def difference(a: dict, b: dict, key: str = "loss") -> Difference:
    """Compare columns that have "step" and `key`."""
    common = np.intersect1d(a["step"], b["step"])
    (a_steps, a_values), (b_steps, b_values) = (points(each, "step", key) for each in (a, b))
    compared, in_a, in_b = np.intersect1d(a_steps, b_steps, return_indices=True)
    if not len(compared):
        return Difference(math.nan, "-", math.nan, 0, len(common))
    differences = np.abs(b_values[in_b] - a_values[in_a])
    largest, mean = float(differences.max()), float(differences.mean())
    step = int(compared[differences.argmax()])
    return Difference(largest, step, mean, len(compared), len(common))


def compare_batches(first: Run, other: Run) -> str:
    """Whether both runs saw the same tokens in the steps that both have, in words."""
    steps = (first.steps["step"], other.steps["step"])
    common, in_first, in_other = np.intersect1d(*steps, return_indices=True)
    a, b = first.steps["batch_hash"][in_first], other.steps["batch_hash"][in_other]
    recorded = a.astype(bool) & b.astype(bool)
    different = common[recorded & (a != b)]
    if not len(common):
        return "no step in common"
    if len(different):
        return f"different batches from step {different[0]}"
    if not recorded.any():
        return "batches not recorded"
    return f"the same batches in {recorded.sum()} of {len(common)} steps"


def table_of_differences(runs: list[Run]) -> str:
    """Each run against the first, nats per token."""
    first, *others = runs
    lines, rows = [], []
    for run in others:
        lines.append(f"{run.folder}: {compare_batches(first, run)}")
        differences = {
            "training": difference(first.steps, run.steps),
            "validation": difference(first.vals, run.vals, "val_loss"),
        }
        for title, d in differences.items():
            if d.common:
                steps = f"{d.steps} of {d.common}"
                rows.append([run.folder, title, f"{d.largest:.3g}", d.step, f"{d.mean:.3g}", steps])
    heads = ["", "loss", "largest", "at step", "mean", "steps compared"]
    return "\n".join([f"difference from {first.folder}", *lines, program.table(heads, rows)])


def main(argv) -> None:
    """Print and draw the curves of run folders, then a summary of each."""
    folders, cfg = config.load(argv, PlotSettings, takes="RUN ...")
    out = Path(cfg.out or Path(folders[0]) / f"{cfg.what}.png")
    is_picture = out.suffix.lower() in (".png", ".svg")
    program.require(is_picture, f"--out={out}: a picture ends in .png or .svg")
    enough = len(folders) > 1 or not cfg.diff
    program.require(enough, "--diff compares runs: name two run folders or more")
    drawn = list(WHAT) if cfg.what == "all" else [cfg.what]
    runs = [read(folder, drawn + ["batch_hash"] * cfg.diff) for folder in folders]

    for what in drawn:
        print(in_terminal(runs, what, cfg.x, height=16 if what == "loss" else 11))
    print(legend(runs, validation=cfg.what in ("loss", "all")))
    if as_picture(runs, out, cfg.what, cfg.x):
        print(out)
    else:
        print(f"(a picture needs matplotlib: {program.EXTRA})")
    for run in runs:
        expect = runlog.read_settings(run.folder).get("expect")
        print(runlog.summary(run.folder, expect, run.metrics))
    if cfg.diff:
        print(table_of_differences(runs))


if __name__ == "__main__":
    program.run(main)
