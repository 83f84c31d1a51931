"""How a run scales over ranks and nodes, by rows of `bench train`.

    python -m bench scaling results.csv             tables, and results_scaling.png
    sbatch --nodes=4 slurm/scaling.sbatch CONFIG    measures the rows on a cluster

    efficiency of n ranks = tokens/s of a device at n ranks / tokens/s of a device at the fewest

Rows that differ only in ranks, and so in the batch, make a table: strong scaling keeps the global
batch, weak scaling the sequences of each rank. A published run stands beside them; nothing is
measured here. Read next: bench/compare.py.
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
    f"an efficiency of {PUBLISHED_MI250[128] / PUBLISHED_MI250[4]:.1%}. A card is two torch devices."
)


@dataclass
class ScalingArgs:
    """Where the picture goes."""

    out: str = ""  # a folder, or what the picture's name begins with; empty = beside the CSV


def headline(row: dict, rows: list[dict]) -> str:
    """The model, the usual settings, and those of the others that differ between the rows of this model."""
    alike = [
        r for r in rows if (r["model"], r["max_seq_len"]) == (row["model"], row["max_seq_len"])
    ]
    differ = [f"{name} {row[name]}" for name in OTHERS if len({r[name] for r in alike}) > 1]
    return ", ".join(
        [f"{row['model']} at {row['max_seq_len']} tokens", row["device"], settings(row), *differ]
    )


def groups(rows: list[dict]) -> tuple[dict[str, list[dict]], list[dict]]:
    """({title: rows by ranks} of every strong and weak scaling over two sizes or more, the rows that are in none).

    A row may be in two: the smallest run begins a strong and a weak scaling. Of a run done twice the later row counts.
    """
    found = {}
    for row in rows:
        strong = f"Strong scaling, global batch {row['global_batch_size']}"
        weak = f"Weak scaling, {row['global_batch_size'] / row['ranks']:g} sequences a rank"
        for kind in (strong, weak):
            title = (
                kind,
                row["model"],
                row["max_seq_len"],
                *(row[name] for name in USUAL + OTHERS),
            )
            found.setdefault(title, []).append(row)
    found = {
        title: members
        for title, members in found.items()
        if len({row["ranks"] for row in members}) > 1
    }
    tables = {}
    for (kind, *_), members in found.items():
        sizes = {(row["ranks"], row["nodes"]): row for row in members}
        tables[f"{kind}: {headline(members[0], rows)}"] = [sizes[size] for size in sorted(sizes)]
    return tables, [row for row in rows if not any(row in members for members in found.values())]


def efficiencies(members: list[dict]) -> list[float]:
    """Tokens/s of a device over that of the first row, whose ranks are fewest."""
    return [
        row["tokens_per_second_device"] / members[0]["tokens_per_second_device"] for row in members
    ]


def scaling_table(members: list[dict]) -> str:
    """Markdown, one row a size."""
    rows, shares = [], efficiencies(members)
    for row, share, before in zip(members, shares, [None, *shares], strict=False):
        cells = {
            "nodes": str(row["nodes"]),
            "ranks": str(row["ranks"]),
            "global batch": f"{row['global_batch_size']:,}",
            "tokens/s": f"{row['tokens_per_second']:,.0f}",
            "TFLOP/s a device": shown(row["tflops_device"], ".4g"),
            "efficiency": f"{share:.1%}",
            "loss against the row before": f"{1 - share / before:.1%}" if before else "",
        }
        rows.append(cells)
    return markdown(rows)


def draw(tables: dict[str, list[dict]], path: Path) -> None:
    """Efficiency over torch devices, measured and published. ImportError without matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5 + 0.3 * len(tables)), layout="constrained")
    axes = figure.subplots()
    devices = [2 * cards for cards in PUBLISHED_MI250]
    shares = [tflops / PUBLISHED_MI250[4] for tflops in PUBLISHED_MI250.values()]
    axes.plot(
        devices,
        shares,
        "s:",
        color="grey",
        label="Published: MPT-7B on 4 to 128 MI250 cards, strong scaling",
    )
    for title, members in tables.items():
        ranks, style = (
            [row["ranks"] for row in members],
            "o-" if title.startswith("Strong") else "^--",
        )
        axes.plot(ranks, efficiencies(members), style, label=textwrap.fill(title, 110))
        devices, shares = devices + ranks, shares + efficiencies(members)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(set(devices)), map(str, sorted(set(devices))))
    axes.yaxis.set_major_formatter("{x:.0%}")
    axes.set(xlabel="torch devices", ylabel="efficiency: tokens/s a device, of the smallest run's")
    axes.set_ylim(0, 1.05 * max(shares))
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main(argv: list[str]) -> None:
    """`bench scaling results.csv [--out=FOLDER_OR_PREFIX]`: tables on stdout, and the picture."""
    paths = [a for a in argv if not a.startswith("-")]
    (args,) = config.load([a for a in argv if a.startswith("-")], ScalingArgs)
    require(len(paths) == 1, "usage: python -m bench scaling results.csv [--out=FOLDER_OR_PREFIX]")
    rows = read(paths[0])
    tables, alone = groups(rows)
    for title, members in tables.items():
        print(title, "", scaling_table(members), "", sep="\n")
    for row in alone:
        print(
            f"- One size only: {row['ranks']} ranks, global batch {row['global_batch_size']}: {headline(row, rows)}"
        )
    if alone:
        print(
            "\nRun that at more ranks, with the same global batch or the same sequences a rank: over nodes by"
        )
        print(
            "`sbatch --nodes=4 slurm/scaling.sbatch CONFIG`, or on one machine, for N = 1, 2, 4, ..., by"
        )
        print(f"`torchrun --nproc_per_node N -m bench train CONFIG --out={paths[0]}`.\n")
    print(PUBLISHED_TEXT)
    if tables:
        out = args.out or f"{Path(paths[0]).parent}/"
        is_folder = out.endswith("/") or Path(out).is_dir()
        path = (
            Path(out, f"{Path(paths[0]).stem}_scaling.png")
            if is_folder
            else Path(f"{out}_scaling.png")
        )
        try:
            draw(tables, path)
            print(f"\n{path}")
        except ImportError:
            print("\n(a picture needs matplotlib: .venv/bin/pip install -r requirements-extra.txt)")


if __name__ == "__main__":
    config.run(main)
