"""Loss curves of one run or several, in the terminal, and as a picture when matplotlib is there.

    python plot.py runs/demo                     the curve, and runs/demo/loss.png
    python plot.py runs/a runs/b --out=ab.png    overlaid

The x axis counts tokens, so that runs with different batches compare. Dots are training losses (a running mean),
letters are validation losses. Read next: generate.py.
"""

import argparse
import json
import math
import shutil
from pathlib import Path

import config
import runlog

MARKS = "ABCDEFGH"  # one letter a run, for its validation losses
DOTS = ".:+x*o%#"  # and one dot a run


def curves(run_dir: str) -> tuple[list, list]:
    """(training, validation) of a run, each a list of (tokens, loss). Training losses are running means."""
    rows = runlog.read(run_dir)
    steps = [(row["tokens"], row["loss"]) for row in rows if math.isfinite(row.get("loss") or math.nan)]
    tokens_of = {row["step"]: row["tokens"] for row in rows if "tokens" in row}
    val = [
        (tokens_of.get(row["step"], 0), row["val_loss"])
        for row in rows
        if math.isfinite(row.get("val_loss") or math.nan)
    ]
    config.require(steps, f"{run_dir} has no finished step yet")
    window = max(1, len(steps) // 50)
    means = []
    for i, (tokens, _) in enumerate(steps):
        recent = [loss for _, loss in steps[max(0, i + 1 - window) : i + 1]]
        means.append((tokens, sum(recent) / len(recent)))
    return means, val


def in_terminal(runs: list[str], width: int = 0, height: int = 16) -> str:
    """The curves as text."""
    width = width or min(100, shutil.get_terminal_size().columns) - 10
    data = [curves(run) for run in runs]
    points = [p for train, val in data for p in train + val]
    right = max(tokens for tokens, _ in points)
    low, high = min(loss for _, loss in points), max(loss for _, loss in points)
    grid = [[" "] * width for _ in range(height)]

    def put(tokens, loss, mark):
        x = round(tokens / max(right, 1) * (width - 1))
        y = round((high - loss) / max(high - low, 1e-9) * (height - 1))
        grid[y][x] = mark

    for number, (train, val) in enumerate(data):
        for tokens, loss in train:
            put(tokens, loss, DOTS[number % len(DOTS)])
        for tokens, loss in val:
            put(tokens, loss, MARKS[number % len(MARKS)])
    lines = []
    for y, row in enumerate(grid):
        label = f"{high - y * (high - low) / (height - 1):7.2f}" if y % 5 == 0 else " " * 7
        lines.append(f"{label} |" + "".join(row).rstrip())
    lines.append(" " * 8 + "+" + "-" * width)
    lines.append(" " * 9 + "0" + f"{right:,} tokens".rjust(width - 1))
    for number, run in enumerate(runs):
        mark, dot = MARKS[number % len(MARKS)], DOTS[number % len(DOTS)]
        lines.append(f"{' ' * 9}{dot} training, {mark} validation loss, nats a token: {run}")
    return "\n".join(lines)


def as_picture(runs: list[str], path: Path) -> bool:
    """Write the curves to `path`; False when matplotlib is not installed (requirements-extra.txt)."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for run in runs:
        train, val = curves(run)
        (drawn,) = axes.plot(*zip(*train, strict=True), linewidth=1, alpha=0.7, label=f"{run}: training")
        if val:
            axes.plot(*zip(*val, strict=True), "o--", color=drawn.get_color(), label=f"{run}: validation")
    axes.set(xlabel="tokens", ylabel="loss (nats a token)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True


def main(argv) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", help="run folders")
    parser.add_argument("--out", help="picture to write (default: loss.png in the first run folder)")
    args = parser.parse_args(argv)
    print(in_terminal(args.runs))
    out = Path(args.out or Path(args.runs[0]) / "loss.png")
    drawn = as_picture(args.runs, out)
    print(out if drawn else "(a picture needs matplotlib: .venv/bin/pip install -r requirements-extra.txt)")
    for run in args.runs:
        print(runlog.summary(run, json.loads((Path(run) / "config.json").read_text())["expect"]))


if __name__ == "__main__":
    config.run(main)
