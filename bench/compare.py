"""What the rows of `bench train` say: how a run scales over nodes, and which of two machines is cheaper.

    efficiency of n ranks = tokens/s of one device at n ranks / tokens/s of one device at the fewest ranks
    dollars per billion tokens = 1e9 / tokens/s of one device / 3600 x dollars per hour of one device

Rows that differ only in ranks, and so in the batch, make a table: strong scaling keeps the global batch, weak scaling
the sequences of each rank. A published run stands beside them. Nothing is measured here.

    python -m bench compare scaling results.csv                  tables, and results_scaling.png
    python -m bench compare compare a.csv b.csv --prices=2,4     speed, cost and energy of models that both have

`python -m bench scaling` and `python -m bench compare` are the same. Read next: bench.
"""

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

import config
from config import require
from devices import NODE_WATTS, PUBLISHED_MI250
from storage import files

FIGURES = "n_params max_seq_len nodes ranks global_batch_size tokens_per_second tokens_per_second_device".split()
MAYBE = "tflops_device peak_tflops mfu".split()  # empty where they are unknown
USUAL = "device precision sharding activation_checkpointing microbatch_size".split()
OTHERS = (
    "n_params d_model n_layers n_heads vocab_size threads torch shard_size recompute_every compile attn_impl".split()
)
COLUMNS = {"status", "model", "convention", *FIGURES, *MAYBE, *USUAL, *OTHERS}

PUBLISHED_TEXT = (
    "Published, to compare with: MosaicML's MPT-7B on the MI250, strong scaling, "
    f"global batch 1536: {PUBLISHED_MI250[4]} TFLOP/s a card on 4 cards, "
    f"{PUBLISHED_MI250[128]} on 128 (45.9 % and 43.9 % of 362): "
    f"an efficiency of {PUBLISHED_MI250[128] / PUBLISHED_MI250[4]:.1%}. A card is two torch devices."
)

# A word of the name that a device reports, and what NODE_WATTS calls it.
REPORTED = {"MI250": "MI250", "A100-SXM4": "A100 SXM", "H100 80GB HBM3": "H100 SXM"}


@dataclass
class ScalingArgs:
    """Where the picture goes."""

    out: str = ""  # a folder, or what the picture's name begins with; empty = beside the CSV


@dataclass
class CompareArgs:
    """What one torch device of each machine costs and draws. An MI250 card is two devices."""

    prices: str = ""  # dollars per hour of a device of A and of B: 2,4
    watts: str = ""  # watts of a device of A and of B, each with its share of the node; empty = rated, where known


def read(path: str) -> list[dict]:
    """The ok rows of a CSV of `bench train`: {column: text}; FIGURES and MAYBE are numbers, MAYBE also None.

    UserError if there is no such file, if it is another kind of file, and if no row is ok.
    """
    require(Path(path).is_file(), f"no file {path!r}: python -m bench train CONFIG --out={path} makes one")
    table = files.read_csv(path, COLUMNS, "a CSV of bench train")
    lines = enumerate(table, 2)
    rows = [checked(row, f"{path}, line {number}") for number, row in lines if row["status"] == "ok"]
    require(rows, f"{path} has no row with status ok")
    return rows


def checked(row: dict, where: str) -> dict:
    """The row with numbers for its figures. Only HYBRID_SHARD has a shard_size to choose: else it follows the ranks."""
    numbers = {name: number(row[name]) for name in FIGURES + MAYBE}
    bad = [name for name in FIGURES if numbers[name] is None]
    require(not bad, f"{where}: {', '.join(bad)} must be a number above 0")
    return row | numbers | {"shard_size": row["shard_size"] if row["sharding"] == "HYBRID_SHARD" else ""}


def number(text: str) -> float | int | None:
    """`text` as a finite number above 0, or None."""
    try:
        value = float(text)
    except ValueError:
        return None
    fine = 0 < value < float("inf")
    return (int(value) if value.is_integer() else value) if fine else None


def shown(value: float | None, form: str) -> str:
    return "n/a" if value is None else format(value, form)


def markdown(rows: list[dict[str, str]]) -> str:
    """A table of rows {column: cell}."""
    lines = [rows[0].keys(), ["---"] * len(rows[0]), *(row.values() for row in rows)]
    return "\n".join("| " + " | ".join(cell.replace("|", "/") for cell in line) + " |" for line in lines)


def settings(row: dict) -> str:
    checkpointing, microbatch = row["activation_checkpointing"], row["microbatch_size"]
    return f"{row['precision']}, {row['sharding']}, checkpointing {checkpointing}, microbatch {microbatch}"


# --- scaling


def headline(row: dict, rows: list[dict]) -> str:
    """The model, the usual settings, and those of the others that differ between the rows of this model."""
    alike = [r for r in rows if (r["model"], r["max_seq_len"]) == (row["model"], row["max_seq_len"])]
    differ = [f"{name} {row[name]}" for name in OTHERS if len({r[name] for r in alike}) > 1]
    return ", ".join([f"{row['model']} at {row['max_seq_len']} tokens", row["device"], settings(row), *differ])


def groups(rows: list[dict]) -> tuple[dict[str, list[dict]], list[dict]]:
    """({title: rows by ranks} of every strong and weak scaling over two sizes or more, the rows that are in none).

    A row may be in two: the smallest run begins a strong and a weak scaling. Of a run done twice the later row counts.
    """
    found = {}
    for row in rows:
        strong = f"Strong scaling, global batch {row['global_batch_size']}"
        weak = f"Weak scaling, {row['global_batch_size'] / row['ranks']:g} sequences a rank"
        for kind in (strong, weak):
            title = (kind, row["model"], row["max_seq_len"], *(row[name] for name in USUAL + OTHERS))
            found.setdefault(title, []).append(row)
    found = {title: members for title, members in found.items() if len({row["ranks"] for row in members}) > 1}
    tables = {}
    for (kind, *_), members in found.items():
        sizes = {(row["ranks"], row["nodes"]): row for row in members}
        tables[f"{kind}: {headline(members[0], rows)}"] = [sizes[size] for size in sorted(sizes)]
    return tables, [row for row in rows if not any(row in members for members in found.values())]


def efficiencies(members: list[dict]) -> list[float]:
    """Tokens/s of a device over that of the first row, whose ranks are fewest."""
    return [row["tokens_per_second_device"] / members[0]["tokens_per_second_device"] for row in members]


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
    axes.plot(devices, shares, "s:", color="grey", label="Published: MPT-7B on 4 to 128 MI250 cards, strong scaling")
    for title, members in tables.items():
        ranks, style = [row["ranks"] for row in members], "o-" if title.startswith("Strong") else "^--"
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


def scaling(argv: list[str]) -> None:
    """`bench scaling results.csv [--out=FOLDER_OR_PREFIX]`: tables on stdout, and the picture."""
    paths = [a for a in argv if not a.startswith("-")]
    (args,) = config.load([a for a in argv if a.startswith("-")], ScalingArgs)
    require(len(paths) == 1, "usage: python -m bench scaling results.csv [--out=FOLDER_OR_PREFIX]")
    rows = read(paths[0])
    tables, alone = groups(rows)
    for title, members in tables.items():
        print(title, "", scaling_table(members), "", sep="\n")
    for row in alone:
        print(f"- One size only: {row['ranks']} ranks, global batch {row['global_batch_size']}: {headline(row, rows)}")
    if alone:
        print("\nRun that at more ranks, with the same global batch or the same sequences a rank: over nodes by")
        print("`sbatch --nodes=4 slurm/scaling.sbatch CONFIG`, or on one machine, for N = 1, 2, 4, ..., by")
        print(f"`torchrun --nproc_per_node N -m bench train CONFIG --out={paths[0]}`.\n")
    print(PUBLISHED_TEXT)
    if tables:
        out = args.out or f"{Path(paths[0]).parent}/"
        is_folder = out.endswith("/") or Path(out).is_dir()
        path = Path(out, f"{Path(paths[0]).stem}_scaling.png") if is_folder else Path(f"{out}_scaling.png")
        try:
            draw(tables, path)
            print(f"\n{path}")
        except ImportError:
            print("\n(a picture needs matplotlib: .venv/bin/pip install -r requirements-extra.txt)")


# --- compare


def best(rows: list[dict]) -> dict[tuple, dict]:
    """{(parameters, tokens of a sequence, model): the row with the most tokens/s a device}."""
    found = {}
    for row in sorted(rows, key=lambda row: row["tokens_per_second_device"]):
        found[row["n_params"], row["max_seq_len"], row["model"]] = row
    return found


def told(side: dict[tuple, dict]) -> str:
    return ", ".join(f"{model} ({n:,} parameters) at {length}" for n, length, model in sorted(side))


def watts_of(row: dict) -> float | None:
    """Rated watts of one torch device with its share of the node, or None: unknown.

    ROCm calls an MI250 and an MI250X alike `MI250X/MI250`; an MI250's peak is 181.05 TFLOP/s a device.
    """
    if "MI250X" in row["device"] and abs((row["peak_tflops"] or 0) - 181.05) > 0.1:
        return None
    names = (name for word, name in REPORTED.items() if re.search(rf"\b{word}\b", row["device"]))
    return next((NODE_WATTS[name] for name in names), None)


def pair(name: str, text: str) -> list:
    """The two numbers of `--prices=2,4`; two times None if the setting is empty."""
    numbers = [number(part) for part in text.split(",")] if text else [None, None]
    fine = not text or (len(numbers) == 2 and None not in numbers)
    require(fine, f"--{name} wants two numbers above 0, one for each file, such as --{name}=2,4, not {text!r}")
    return numbers


def hours(row: dict) -> float:
    """Hours of one torch device for a billion tokens."""
    return 1e9 / row["tokens_per_second_device"] / 3600


def side(path: str, row: dict, price: float | None, watts: float | None) -> dict[str, str]:
    """One machine with one model, as a row of the table."""
    cells = {
        "file": path,
        "device": row["device"] or "without a name",
        "model": f"{row['model']} at {row['max_seq_len']}",
        "ranks": str(row["ranks"]),
        "settings": settings(row),
        "tokens/s a device": f"{row['tokens_per_second_device']:,.0f}",
        "TFLOP/s a device": shown(row["tflops_device"], ".4g"),
        "MFU (convention)": f"{row['mfu']:.1%} ({row['convention']})" if row["mfu"] else "n/a",
        "dollars per 1e9 tokens": shown(price and hours(row) * price, ",.2f"),
        "W a device": shown(watts, "g"),
        "kWh per 1e9 tokens": shown(watts and hours(row) * watts / 1000, ",.2f"),
    }
    return {title: cell for title, cell in cells.items() if price or not title.startswith("dollars")}


def verdict(paths: list[str], rows: list[dict], prices: list) -> str:
    """Which is faster; with prices, which is cheaper, and the price of B at which both cost the same."""
    ratio = rows[1]["tokens_per_second_device"] / rows[0]["tokens_per_second_device"]
    name = f"{rows[0]['model']} at {rows[0]['max_seq_len']}"
    text = f"- {name}: a device of {paths[1]} does {ratio:.3g} times the tokens/s of one of {paths[0]}"
    if prices[0] is None:
        return f"{text}."
    even = prices[0] * ratio
    return (
        f"{text}; {paths[prices[1] < even]} is cheaper by {1 - min(even, prices[1]) / max(even, prices[1]):.1%}. "
        f"Break-even: with {paths[0]} at ${prices[0]:g} an hour, both cost the same when {paths[1]} is at ${even:.4g}."
    )


def compare(argv: list[str]) -> None:
    """`bench compare a.csv b.csv [--prices=a,b] [--watts=a,b]`: the fastest row of each model that both have."""
    paths = [a for a in argv if not a.startswith("-")]
    (args,) = config.load([a for a in argv if a.startswith("-")], CompareArgs)
    require(len(paths) == 2, "usage: python -m bench compare a.csv b.csv [--prices=2,4] [--watts=375,1275]")
    prices, given = pair("prices", args.prices), pair("watts", args.watts)
    sides = [best(read(path)) for path in paths]
    common = sorted(sides[0].keys() & sides[1].keys())
    require(common, f"nothing in common: {paths[0]} has {told(sides[0])}; {paths[1]} has {told(sides[1])}")
    pairs = [[found[key] for found in sides] for key in common]
    each = [line for rows in pairs for line in zip(paths, rows, prices, given, strict=True)]
    lines = [side(path, row, price, watts or watts_of(row)) for path, row, price, watts in each]
    print(markdown(lines), "", *(verdict(paths, rows, prices) for rows in pairs), sep="\n")
    if args.prices:
        print("- Prices are dollars per hour of one torch device (an MI250 card is two).")
    print("- Watts:", "as given." if args.watts else "a node's rating over its torch devices, not measured.")
    unknown = dict.fromkeys(line["device"] for line in lines if line["W a device"] == "n/a")
    if unknown:
        print(f"- No watts known for {', '.join(unknown)}: set --watts=a,b, of one torch device on each side.")


def main(argv: list[str]) -> None:
    programs = {"scaling": scaling, "compare": compare}
    if config.wants_help(argv[:1]):
        config.show_help()
    require(argv and argv[0] in programs, "usage: python -m bench compare scaling|compare FILE.csv ... [--key=value]")
    programs[argv[0]](argv[1:])


if __name__ == "__main__":
    config.run(main)
