"""Which of two machines is faster, and which is cheaper, by rows of `bench train`.

    python -m bench compare a.csv b.csv --prices=2,4    speed, cost, energy of models that both have

    dollars per billion tokens = 1e9 / tokens/s of a device / 3600 x dollars per hour of a device

Of each model that both files have, the fastest rows are compared; nothing is measured here. Read
next: bench/machine.py.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import config
from config import require
from devices import NODE_WATTS
from storage import files

FIGURES = "n_params max_seq_len nodes ranks global_batch_size tokens_per_second tokens_per_second_device".split()
MAYBE = "tflops_device peak_tflops mfu".split()  # empty where they are unknown
USUAL = "device precision sharding activation_checkpointing microbatch_size".split()
OTHERS = "n_params d_model n_layers n_heads vocab_size threads torch shard_size recompute_every compile attn_impl".split()
COLUMNS = {"status", "model", "convention", *FIGURES, *MAYBE, *USUAL, *OTHERS}

# A word of the name that a device reports, and what NODE_WATTS calls it.
REPORTED = {"MI250": "MI250", "A100-SXM4": "A100 SXM", "H100 80GB HBM3": "H100 SXM"}


@dataclass
class CompareArgs:
    """What one torch device of each machine costs and draws. An MI250 card is two devices."""

    prices: str = ""  # dollars per hour of a device of A and of B: 2,4
    watts: str = ""  # watts of a device of A and of B, each with its share of the node; empty = rated, where known


def read(path: str) -> list[dict]:
    """The ok rows of a CSV of `bench train`: {column: text}; FIGURES and MAYBE are numbers, MAYBE also None.

    UserError if there is no such file, if it is another kind of file, and if no row is ok.
    """
    require(
        Path(path).is_file(),
        f"no file {path!r}: python -m bench train CONFIG --out={path} makes one",
    )
    table = files.read_csv(path, COLUMNS, "a CSV of bench train")
    lines = enumerate(table, 2)
    rows = [
        checked(row, f"{path}, line {number}") for number, row in lines if row["status"] == "ok"
    ]
    require(rows, f"{path} has no row with status ok")
    return rows


def checked(row: dict, where: str) -> dict:
    """The row with numbers for its figures. Only HYBRID_SHARD has a shard_size to choose: else it follows the ranks."""
    numbers = {name: number(row[name]) for name in FIGURES + MAYBE}
    bad = [name for name in FIGURES if numbers[name] is None]
    require(not bad, f"{where}: {', '.join(bad)} must be a number above 0")
    return (
        row
        | numbers
        | {"shard_size": row["shard_size"] if row["sharding"] == "HYBRID_SHARD" else ""}
    )


def number(text: str) -> float | int | None:
    """`text` as a finite number above 0, or None."""
    try:
        value = float(text)
    except ValueError:
        return None
    fine = 0 < value < float("inf")
    return (int(value) if value.is_integer() else value) if fine else None


def shown(value: float | None, form: str) -> str:
    """A figure for the table; n/a if it is unknown."""
    return "n/a" if value is None else format(value, form)


def markdown(rows: list[dict[str, str]]) -> str:
    """A table of rows {column: cell}."""
    lines = [rows[0].keys(), ["---"] * len(rows[0]), *(row.values() for row in rows)]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "/") for cell in line) + " |" for line in lines
    )


def settings(row: dict) -> str:
    """The usual settings of a row, in words."""
    checkpointing, microbatch = row["activation_checkpointing"], row["microbatch_size"]
    return f"{row['precision']}, {row['sharding']}, checkpointing {checkpointing}, microbatch {microbatch}"


def best(rows: list[dict]) -> dict[tuple, dict]:
    """{(parameters, tokens of a sequence, model): the row with the most tokens/s a device}."""
    found = {}
    for row in sorted(rows, key=lambda row: row["tokens_per_second_device"]):
        found[row["n_params"], row["max_seq_len"], row["model"]] = row
    return found


def told(side: dict[tuple, dict]) -> str:
    """The models of one side, for an error."""
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
    require(
        fine,
        f"--{name} wants two numbers above 0, one for each file, such as --{name}=2,4, not {text!r}",
    )
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
    return {
        title: cell for title, cell in cells.items() if price or not title.startswith("dollars")
    }


def verdict(paths: list[str], rows: list[dict], prices: list) -> str:
    """Which is faster; with prices, which is cheaper, and the price of B at which both cost the same."""
    ratio = rows[1]["tokens_per_second_device"] / rows[0]["tokens_per_second_device"]
    name = f"{rows[0]['model']} at {rows[0]['max_seq_len']}"
    text = (
        f"- {name}: a device of {paths[1]} does {ratio:.3g} times the tokens/s of one of {paths[0]}"
    )
    if prices[0] is None:
        return f"{text}."
    even = prices[0] * ratio
    return (
        f"{text}; {paths[prices[1] < even]} is cheaper by {1 - min(even, prices[1]) / max(even, prices[1]):.1%}. "
        f"Break-even: with {paths[0]} at ${prices[0]:g} an hour, both cost the same when {paths[1]} is at ${even:.4g}."
    )


def main(argv: list[str]) -> None:
    """`bench compare a.csv b.csv [--prices=a,b] [--watts=a,b]`: the fastest row of each model that both have."""
    paths = [a for a in argv if not a.startswith("-")]
    (args,) = config.load([a for a in argv if a.startswith("-")], CompareArgs)
    require(
        len(paths) == 2,
        "usage: python -m bench compare a.csv b.csv [--prices=2,4] [--watts=375,1275]",
    )
    prices, given = pair("prices", args.prices), pair("watts", args.watts)
    sides = [best(read(path)) for path in paths]
    common = sorted(sides[0].keys() & sides[1].keys())
    require(
        common,
        f"nothing in common: {paths[0]} has {told(sides[0])}; {paths[1]} has {told(sides[1])}",
    )
    pairs = [[found[key] for found in sides] for key in common]
    each = [line for rows in pairs for line in zip(paths, rows, prices, given, strict=True)]
    lines = [side(path, row, price, watts or watts_of(row)) for path, row, price, watts in each]
    print(markdown(lines), "", *(verdict(paths, rows, prices) for rows in pairs), sep="\n")
    if args.prices:
        print("- Prices are dollars per hour of one torch device (an MI250 card is two).")
    print(
        "- Watts:",
        "as given." if args.watts else "a node's rating over its torch devices, not measured.",
    )
    unknown = dict.fromkeys(line["device"] for line in lines if line["W a device"] == "n/a")
    if unknown:
        print(
            f"- No watts known for {', '.join(unknown)}: set --watts=a,b, of one torch device on each side."
        )


if __name__ == "__main__":
    config.run(main)
