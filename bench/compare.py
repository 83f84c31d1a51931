"""Which of two machines is faster, and which is cheaper, by rows of `bench train`.

    python -m bench compare a.csv b.csv --prices=2,4    speed, cost, energy of models in both files

    dollars per 1e9 tokens = 1e9 / tokens/s of a device / 3600 x dollars per hour of a device

For each model that both files have, their fastest rows are compared. Nothing is measured here.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import config
from config import require
from devices import NODE_WATTS
from storage import files

# Columns of `bench train`: numbers that are always known, numbers that may be unknown, settings.
FIGURES = """
    n_params max_seq_len nodes ranks global_batch_size tokens_per_second tokens_per_second_device
""".split()
MAYBE = "tflops_device peak_tflops mfu".split()
USUAL = "device precision sharding activation_checkpointing microbatch_size".split()
OTHERS = """
    n_params d_model n_layers n_heads vocab_size threads torch shard_size recompute_every compile
    attn_impl
""".split()
COLUMNS = {"status", "model", "convention", *FIGURES, *MAYBE, *USUAL, *OTHERS}

# Part of the name that a device reports -> its key in NODE_WATTS.
REPORTED = {"MI250": "MI250", "A100-SXM4": "A100 SXM", "H100 80GB HBM3": "H100 SXM"}
MI250_PEAK = 181.05  # TFLOP/s of a torch device, bf16


@dataclass
class CompareArgs:
    """What one torch device of each machine costs and draws. An MI250 card is two devices."""

    prices: str = ""  # dollars per hour of a device of A and of B: 2,4
    watts: str = ""  # of a device of A and of B with its share of the node (empty: rated, if known)


# --- Reading rows


def read(path: str) -> list[dict]:
    """The rows with status ok of a CSV of `bench train`: {column: text}.

    FIGURES are numbers; MAYBE are numbers or None. UserError if there is no such file, if it is of
    another kind, and if no row is ok.
    """
    fix = f"python -m bench train CONFIG {config.shell(f'--out={path}')} makes one"
    require(Path(path).is_file(), f"no file {path!r}: {fix}")
    table = files.read_csv(path, COLUMNS, "a CSV of bench train")
    rows = []
    for line, row in enumerate(table, 2):
        if row["status"] == "ok":
            rows.append(checked(row, f"{path}, line {line}"))
    require(rows, f"{path} has no row with status ok")
    return rows


def checked(row: dict, source: str) -> dict:
    """The row, with numbers for its figures. UserError, naming `source`, if one is missing.

    shard_size is emptied unless the sharding is HYBRID_SHARD: in other modes it is not a setting.
    """
    figures = {name: positive_number(row[name]) for name in FIGURES + MAYBE}
    bad = [name for name in FIGURES if figures[name] is None]
    require(not bad, f"{source}: {', '.join(bad)} must be a number above 0")
    shard_size = row["shard_size"] if row["sharding"] == "HYBRID_SHARD" else ""
    return row | figures | {"shard_size": shard_size}


def positive_number(text: str) -> float | int | None:
    """`text` as a finite number above 0, or None."""
    try:
        value = float(text)
    except ValueError:
        return None
    if not 0 < value < float("inf"):
        return None
    return int(value) if value.is_integer() else value


def fastest(rows: list[dict]) -> dict[tuple, dict]:
    """{(parameters, tokens of a sequence, model): the row with the most tokens/s a device}."""
    best = {}
    for row in sorted(rows, key=lambda row: row["tokens_per_second_device"]):
        best[row["n_params"], row["max_seq_len"], row["model"]] = row
    return best


# --- Text


def shown(value: float | None, form: str) -> str:
    """A figure for the table; n/a if it is unknown."""
    return "n/a" if value is None else format(value, form)


def markdown(rows: list[dict[str, str]]) -> str:
    """A Markdown table of rows {column: cell}."""
    lines = [rows[0].keys(), ["---"] * len(rows[0]), *(row.values() for row in rows)]
    safe_lines = [[cell.replace("|", "/") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in safe_lines)


def settings(row: dict) -> str:
    """The usual settings of a row, in words."""
    parts = [row["precision"], row["sharding"]]
    parts.append(f"checkpointing {row['activation_checkpointing']}")
    parts.append(f"microbatch {row['microbatch_size']}")
    return ", ".join(parts)


def models_in(rows: dict[tuple, dict]) -> str:
    """The models of one file, for an error message."""
    return ", ".join(f"{model} ({n:,} parameters) at {length}" for n, length, model in sorted(rows))


# --- Comparing


def watts_of(row: dict) -> float | None:
    """Rated watts of one torch device with its share of the node; None if unknown.

    ROCm reports `MI250X/MI250` for both cards. Only the peak tells them apart.
    """
    device = row["device"]
    is_mi250 = abs((row["peak_tflops"] or 0) - MI250_PEAK) <= 0.1
    if "MI250X" in device and not is_mi250:
        return None
    for word, name in REPORTED.items():
        if re.search(rf"\b{word}\b", device):
            return NODE_WATTS[name]
    return None


def two_numbers(name: str, text: str) -> list:
    """The values of `--prices=2,4`; [None, None] if the setting is empty."""
    if not text:
        return [None, None]
    values = [positive_number(part) for part in text.split(",")]
    valid = len(values) == 2 and None not in values
    example = f"one for each file, such as --{name}=2,4"
    require(valid, f"--{name} wants two numbers above 0, {example}, not {text!r}")
    return values


def hours(row: dict) -> float:
    """Hours that one torch device needs for 1e9 tokens."""
    return 1e9 / row["tokens_per_second_device"] / 3600


def table_row(path: str, row: dict, price: float | None, watts: float | None) -> dict[str, str]:
    """One machine with one model, as {column: cell}."""
    mfu = f"{row['mfu']:.1%} ({row['convention']})" if row["mfu"] else "n/a"
    cells = {
        "file": path,
        "device": row["device"] or "without a name",
        "model": f"{row['model']} at {row['max_seq_len']}",
        "ranks": str(row["ranks"]),
        "settings": settings(row),
        "tokens/s a device": f"{row['tokens_per_second_device']:,.0f}",
        "TFLOP/s a device": shown(row["tflops_device"], ".4g"),
        "MFU (convention)": mfu,
    }
    if price:
        cells["dollars per 1e9 tokens"] = f"{hours(row) * price:,.2f}"
    cells["W a device"] = shown(watts, "g")
    cells["kWh per 1e9 tokens"] = shown(watts and hours(row) * watts / 1000, ",.2f")
    return cells


def verdict(paths: list[str], rows: list[dict], prices: list) -> str:
    """Which machine is faster with one model; with prices, also which is cheaper.

    The break-even is the price of B at which both cost the same.
    """
    a, b = paths
    ratio = rows[1]["tokens_per_second_device"] / rows[0]["tokens_per_second_device"]
    model = f"{rows[0]['model']} at {rows[0]['max_seq_len']}"
    speed = f"- {model}: a device of {b} does {ratio:.3g} times the tokens/s of one of {a}"
    price_a, price_b = prices
    if price_a is None:
        return f"{speed}."

    break_even = price_a * ratio
    cheaper = b if price_b < break_even else a
    saving = 1 - min(break_even, price_b) / max(break_even, price_b)
    return (
        f"{speed}; {cheaper} is cheaper by {saving:.1%}. Break-even: with {a} at ${price_a:g} an "
        f"hour, both cost the same when {b} is at ${break_even:.4g}."
    )


def main(argv: list[str]) -> None:
    """Print a table of the fastest row of each model that both files have, and a verdict."""
    paths = [word for word in argv if not word.startswith("-")]
    (args,) = config.load([word for word in argv if word.startswith("-")], CompareArgs)
    usage = "python -m bench compare a.csv b.csv [--prices=2,4] [--watts=375,1275]"
    require(len(paths) == 2, f"usage: {usage}")
    prices = two_numbers("prices", args.prices)
    given_watts = two_numbers("watts", args.watts)

    a, b = (fastest(read(path)) for path in paths)
    common = sorted(a.keys() & b.keys())
    models = f"{paths[0]} has {models_in(a)}; {paths[1]} has {models_in(b)}"
    require(common, f"nothing in common: {models}")

    lines, verdicts = [], []
    for key in common:
        rows = [a[key], b[key]]
        for path, row, price, watts in zip(paths, rows, prices, given_watts, strict=True):
            lines.append(table_row(path, row, price, watts or watts_of(row)))
        verdicts.append(verdict(paths, rows, prices))

    print(markdown(lines), "", *verdicts, sep="\n")
    if args.prices:
        print("- Prices are dollars per hour of one torch device (an MI250 card is two).")
    rated = "a node's rating over its torch devices, not measured."
    print("- Watts:", "as given." if args.watts else rated)
    unknown = dict.fromkeys(line["device"] for line in lines if line["W a device"] == "n/a")
    if unknown:
        fix = "set --watts=a,b, of one torch device on each side."
        print(f"- No watts known for {', '.join(unknown)}: {fix}")


if __name__ == "__main__":
    config.run(main)
