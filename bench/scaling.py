"""How a run scales over ranks and nodes, by rows of `bench train`.

    python -m bench scaling results.csv             tables, and results_scaling.png
    sbatch --nodes=4 slurm/scaling.sbatch CONFIG    measures the rows on a cluster

    efficiency of n ranks = tokens/s of a device at n ranks / tokens/s of a device at the fewest

Rows that differ only in their number of ranks, and so in the batch, make a table. Strong scaling
keeps the global batch; weak scaling keeps the sequences of each rank. A published run is printed
for comparison. Nothing is measured here.
"""

import textwrap
from dataclasses import dataclass
from pathlib import Path

import config
from bench.compare import OTHERS, USUAL, markdown, read, settings, shown
from config import require
from devices import PUBLISHED_MI250

# MosaicML, "Training LLMs at Scale with AMD MI250 GPUs" (2023): MPT-7B on nodes of 4 cards.
PUBLISHED_TEXT = (
    "Published, to compare with: MosaicML's MPT-7B on the MI250, strong scaling, "
    f"global batch 1536: {PUBLISHED_MI250[4]} TFLOP/s a card on 4 cards, "
    f"{PUBLISHED_MI250[128]} on 128 (45.9 % and 43.9 % of 362): "
    f"an efficiency of {PUBLISHED_MI250[128] / PUBLISHED_MI250[4]:.1%}. "
    "A card is two torch devices."
)

ONE_SIZE_TEXT = """
Run that at more ranks, with the same global batch or the same sequences a rank: over nodes by
`sbatch --nodes=4 slurm/scaling.sbatch CONFIG`, or on one machine, for N = 1, 2, 4, ..., by
`torchrun --nproc_per_node N -m bench train CONFIG {out}`.
"""


@dataclass
class ScalingArgs:
    """Where the picture goes."""

    out: str = ""  # a folder, or the beginning of the picture's name; empty = beside the CSV


def headline(row: dict, rows: list[dict]) -> str:
    """The model of a row, its usual settings, and others in which rows of the model differ."""
    same_model = [
        other
        for other in rows
        if (other["model"], other["max_seq_len"]) == (row["model"], row["max_seq_len"])
    ]
    differ = [name for name in OTHERS if len({other[name] for other in same_model}) > 1]
    parts = [f"{row['model']} at {row['max_seq_len']} tokens", row["device"], settings(row)]
    return ", ".join(parts + [f"{name} {row[name]}" for name in differ])


def groups(rows: list[dict]) -> tuple[dict[str, list[dict]], list[dict]]:
    """({title: rows by ranks} for every strong and weak scaling, the rows that are in none).

    A scaling has two sizes or more. A row may be in two: the smallest run begins a strong and a
    weak scaling. If a run was measured twice, the later row counts.
    """
    scalings = {}
    for row in rows:
        strong = f"Strong scaling, global batch {row['global_batch_size']}"
        weak = f"Weak scaling, {row['global_batch_size'] / row['ranks']:g} sequences a rank"
        same_settings = [row[name] for name in USUAL + OTHERS]
        for kind in (strong, weak):
            key = (kind, row["model"], row["max_seq_len"], *same_settings)
            scalings.setdefault(key, []).append(row)

    tables, in_a_table = {}, []
    for (kind, *_), members in scalings.items():
        if len({row["ranks"] for row in members}) == 1:
            continue
        in_a_table += members
        by_size = {(row["ranks"], row["nodes"]): row for row in members}
        title = f"{kind}: {headline(members[0], rows)}"
        tables[title] = [by_size[size] for size in sorted(by_size)]
    return tables, [row for row in rows if row not in in_a_table]


def efficiencies(members: list[dict]) -> list[float]:
    """Tokens/s of a device over that of the first row, whose ranks are fewest."""
    first = members[0]["tokens_per_second_device"]
    return [row["tokens_per_second_device"] / first for row in members]


def scaling_table(members: list[dict]) -> str:
    """A Markdown table with a row for each size."""
    rows = []
    before = None  # efficiency of the row before
    for row, efficiency in zip(members, efficiencies(members), strict=True):
        loss = f"{1 - efficiency / before:.1%}" if before else ""
        cells = {
            "nodes": str(row["nodes"]),
            "ranks": str(row["ranks"]),
            "global batch": f"{row['global_batch_size']:,}",
            "tokens/s": f"{row['tokens_per_second']:,.0f}",
            "TFLOP/s a device": shown(row["tflops_device"], ".4g"),
            "efficiency": f"{efficiency:.1%}",
            "loss against the row before": loss,
        }
        rows.append(cells)
        before = efficiency
    return markdown(rows)


def draw(tables: dict[str, list[dict]], path: Path) -> None:
    """Efficiency over torch devices, measured and published. ImportError without matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5 + 0.3 * len(tables)), layout="constrained")
    axes = figure.subplots()
    counts = [2 * cards for cards in PUBLISHED_MI250]  # of torch devices
    shares = [tflops / PUBLISHED_MI250[4] for tflops in PUBLISHED_MI250.values()]
    label = "Published: MPT-7B on 4 to 128 MI250 cards, strong scaling"
    axes.plot(counts, shares, "s:", color="grey", label=label)
    for title, members in tables.items():
        ranks = [row["ranks"] for row in members]
        style = "o-" if title.startswith("Strong") else "^--"
        axes.plot(ranks, efficiencies(members), style, label=textwrap.fill(title, 110))
        counts += ranks
        shares += efficiencies(members)

    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(set(counts)), map(str, sorted(set(counts))))
    axes.yaxis.set_major_formatter("{x:.0%}")
    axes.set(xlabel="torch devices", ylabel="efficiency: tokens/s a device / the smallest run's")
    axes.set_ylim(0, 1.05 * max(shares))
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def picture_path(csv_path: Path, out: str) -> Path:
    """Where the picture goes. out: see ScalingArgs."""
    if not out:
        return csv_path.with_name(f"{csv_path.stem}_scaling.png")
    if out.endswith("/") or Path(out).is_dir():
        return Path(out, f"{csv_path.stem}_scaling.png")
    return Path(f"{out}_scaling.png")


def main(argv: list[str]) -> None:
    """Print the tables and draw the picture."""
    paths = [word for word in argv if not word.startswith("-")]
    (args,) = config.load([word for word in argv if word.startswith("-")], ScalingArgs)
    require(len(paths) == 1, "usage: python -m bench scaling results.csv [--out=FOLDER_OR_PREFIX]")
    (csv_path,) = paths
    rows = read(csv_path)
    tables, alone = groups(rows)

    for title, members in tables.items():
        print(title, "", scaling_table(members), "", sep="\n")
    for row in alone:
        size = f"{row['ranks']} ranks, global batch {row['global_batch_size']}"
        print(f"- One size only: {size}: {headline(row, rows)}")
    if alone:
        print(ONE_SIZE_TEXT.format(out=config.shell(f"--out={csv_path}")))
    print(PUBLISHED_TEXT)

    if tables:
        path = picture_path(Path(csv_path), args.out)
        try:
            draw(tables, path)
            print(f"\n{path}")
        except ImportError:
            print(f"\n(a picture needs matplotlib: {config.EXTRA})")


if __name__ == "__main__":
    config.run(main)
