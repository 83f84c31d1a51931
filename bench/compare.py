"""Rows of `bench train` as tables, and how they scale over numbers of ranks.

    python -m bench compare mine.csv                tables, scaling
    sbatch --nodes=4 slurm/scaling.sbatch CONFIG    measures rows over nodes, shows them

    efficiency of n ranks = tokens/s of a device at n ranks / tokens/s of a device at the fewest

The table has the columns of LLM Foundry's benchmark tables, so that rows compare with the published
throughput of MPT, and what those lack: turns, memory. Rows that differ only in their number of
ranks, and so in the batch, show how a run scales. Nothing is measured here.
"""

import csv
import math
import os
from pathlib import Path

import program
from program import require
from storage import files

# Columns of `bench train`: numbers above 0, numbers that may be unknown, settings.
FIGURES = """
    n_params max_seq_len nodes ranks global_batch_size tokens_per_second tokens_per_second_device
""".split()
MAYBE = ["tflops_device", "peak_tflops", "mfu", "hfu", "fastest", "slowest", "memory_gb"]
USUAL = "device precision sharding activation_checkpointing microbatch_size".split()
OTHERS = """
    n_params d_model n_layers n_heads vocab_size threads torch shard_size recompute_every compile
    attn_impl
""".split()
COLUMNS = {"status", "model", *FIGURES, *USUAL, *OTHERS}

# Settings that may name a row.
NAMING = """
    model ranks threads precision sharding activation_checkpointing recompute_every compile
    attn_impl microbatch_size global_batch_size max_seq_len
""".split()
LAYOUT = ("tp=", "sequence_parallel=", "pp=")  # these have no column, but stand among `others`

# What LLM Foundry calls our values.
FOUNDRY_PRECISION = {"bf16": "amp_bf16"}
FOUNDRY_CHECKPOINTING = {"none": "False", "full": "True"}

# MosaicML, "Training LLMs at Scale with AMD MI250 GPUs" (2023): MPT-7B on nodes of 4 cards.
PUBLISHED_TEXT = """
Published, to compare with: MosaicML's MPT-7B on the MI250, strong scaling, global batch 1536: 166
TFLOP/s a card on 4 cards, 159 on 128 (45.9 % and 43.9 % of 362): an efficiency of 95.8%. A card is
two torch devices.
""".strip()
MORE_SIZES_TEXT = """
To see how a run scales, repeat it with the same settings and more ranks: over nodes by
`sbatch --nodes=4 slurm/scaling.sbatch CONFIG`, or on one machine, for N = 1, 2, 4, ..., by
`torchrun --nproc_per_node N -m bench train CONFIG {out}`.
"""


# --- Reading rows


def read(path) -> list[dict[str, str]]:
    """The rows of a CSV of `bench train`, as text. UserError if there is no such file."""
    fix = f"python -m bench train CONFIG {program.shell(f'--out={path}')} makes one"
    require(Path(path).is_file(), f"no file {str(path)!r}: {fix}")
    return files.read_csv(path, COLUMNS, "a CSV of bench train")


def append(path: str, row: dict) -> None:
    """Add a row to a CSV. A new one begins with the names of the columns.

    UserError if the file has other columns.
    """
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with open(path, "a+", newline="") as file:
        file.seek(0)
        heads = next(csv.reader(file), None)
        require(heads in (None, list(row)), f"{path} has other columns: name another file")
        writer = csv.DictWriter(file, list(row))
        if not heads:
            writer.writeheader()
        writer.writerow(row)


def measured(rows: list[dict[str, str]], source: str) -> list[dict]:
    """The rows with status ok. FIGURES are numbers, MAYBE are numbers or None.

    shard_size is emptied unless the sharding is HYBRID_SHARD: in other modes it is no setting.
    UserError, naming `source`, if a figure is missing or no row is ok.
    """
    found = []
    for line, row in enumerate(rows, 2):
        if row["status"] != "ok":
            continue
        figures = {name: number_of(row.get(name, "")) for name in FIGURES + MAYBE}
        bad = [name for name in FIGURES if not figures[name]]
        require(not bad, f"{source}, line {line}: {', '.join(bad)} must be a number above 0")
        shard_size = row["shard_size"] if row["sharding"] == "HYBRID_SHARD" else ""
        found.append(row | figures | {"shard_size": shard_size})
    require(found, f"{source} has no row with status ok")
    return found


def number_of(text: str) -> float | int | None:
    """`text` as a finite number of at least 0, or None."""
    try:
        value = float(text)
    except ValueError:
        return None
    if not 0 <= value < math.inf:
        return None
    return int(value) if value.is_integer() else value


# --- Text


def shown(value: float | None, form: str) -> str:
    """A figure in a table; n/a if it is unknown."""
    return "n/a" if value is None else format(value, form)


def markdown(rows: list[dict]) -> str:
    """A Markdown table of rows {column: cell}."""
    lines = [rows[0].keys(), ["---"] * len(rows[0]), *(row.values() for row in rows)]
    safe_lines = [[str(cell).replace("|", "/") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in safe_lines)


# --- All rows


def cells(name: str, row: dict, base: float) -> dict:
    """A row of the table: its name, ours, LLM Foundry's. Speeds are of all devices, TFLOP/s of one.

    base: tokens/s of the first row.
    """
    rate = row["tokens_per_second"]
    checkpointing = row["activation_checkpointing"]
    return {
        "row": name,
        "fastest / slowest turn": " / ".join(shown(row[k], ".0f") for k in ("fastest", "slowest")),
        "first row = 1": f"{rate / base:.2f}",
        "peak GB": shown(row["memory_gb"], ".2f"),
        "Model": row["model"],
        "SeqLen (T)": row["max_seq_len"],
        "# GPUs": row["ranks"],
        "GPU": row["device"],
        "MFU": shown(row["mfu"] and 100 * row["mfu"], ".2f"),
        "HFU": shown(row["hfu"] and 100 * row["hfu"], ".2f"),
        "Model TFLOP": shown(row["tflops_device"], ".4g"),
        "MicroBatchSize": row["microbatch_size"],
        "GradAccum": row.get("grad_accum", "n/a"),
        "GlobalBatchSize": row["global_batch_size"],
        "Throughput (S/s)": f"{rate / row['max_seq_len']:.4g}",
        "Throughput (T/s)": f"{rate:.0f}",
        "Throughput (T/s/GPU)": f"{row['tokens_per_second_device']:.0f}",
        "GlobalBatchSize (T)": row["global_batch_size"] * row["max_seq_len"],
        "Precision": FOUNDRY_PRECISION.get(row["precision"], row["precision"]),
        "MP Mode": "DEFAULT",
        "Sharding Strategy": row["sharding"],
        "Activation Checkpointing": FOUNDRY_CHECKPOINTING.get(checkpointing, "selective"),
        "Activation CPUOffload": "False",
        "NumParams": row["n_params"],
    }


def names_of(rows: list[dict]) -> list[str]:
    """A name for each row, made of the settings in which the rows differ."""
    # What `auto` means may be unknown for a row that failed, so only the others' values count.
    measured_rows = [row for row in rows if row["status"] == "ok"] or rows
    differ = []
    for key in NAMING:
        known = measured_rows if key in ("precision", "compile") else rows
        if len({str(row[key]).partition(" (")[0] for row in known}) > 1:
            differ.append(key)

    names = []
    for row in rows:
        parts = [row[k] if k in ("model", "sharding") else f"{k} {row[k]}" for k in differ]
        parts += [word for word in row.get("others", "").split() if word.startswith(LAYOUT)]
        names.append(", ".join(parts) or row["model"])
    return names


def tables(rows: list[dict[str, str]], source: str) -> str:
    """Markdown: a table of all rows, and a list of those that could not be measured."""
    named = list(zip(names_of(rows), rows, strict=True))
    names = [name for name, row in named if row["status"] == "ok"]
    failed = [(name, row["status"]) for name, row in named if row["status"] != "ok"]
    parts = [f"- not measured: {name}: {status}" for name, status in failed]
    if names:
        good = measured(rows, source)
        base = good[0]["tokens_per_second"]
        lines = [cells(name, row, base) for name, row in zip(names, good, strict=True)]
        parts = [markdown(lines), *parts]
    return "\n\n".join(parts)


# --- Over numbers of ranks


def scalings(rows: list[dict]) -> dict[str, list[dict]]:
    """{title: rows by ranks} for every strong and weak scaling, of two sizes or more.

    A row may be in two: the smallest run begins a strong and a weak scaling. If a run was measured
    twice, the later row counts.
    """
    groups = {}
    for row in rows:
        strong = f"Strong scaling, global batch {row['global_batch_size']}"
        weak = f"Weak scaling, {row['global_batch_size'] / row['ranks']:g} sequences a rank"
        same_settings = [row[name] for name in USUAL + OTHERS]
        for kind in (strong, weak):
            key = (kind, row["model"], row["max_seq_len"], *same_settings)
            groups.setdefault(key, []).append(row)

    found = {}
    for (kind, *_), members in groups.items():
        if len({row["ranks"] for row in members}) > 1:
            by_size = {(row["ranks"], row["nodes"]): row for row in members}
            title = f"{kind}: {headline(members[0], rows)}"
            found[title] = [by_size[size] for size in sorted(by_size)]
    return found


def headline(row: dict, rows: list[dict]) -> str:
    """The model of a row, its usual settings, and others in which rows differ."""
    differ = [name for name in OTHERS if len({other[name] for other in rows}) > 1]
    parts = [f"{row['model']} at {row['max_seq_len']} tokens", row["device"], row["precision"]]
    parts += [row["sharding"], f"checkpointing {row['activation_checkpointing']}"]
    parts += [f"{name} {row[name]}" for name in ["microbatch_size", *differ]]
    return ", ".join(parts)


def efficiencies(members: list[dict]) -> list[float]:
    """Tokens/s of a device over that of the first row, whose ranks are fewest."""
    first = members[0]["tokens_per_second_device"]
    return [row["tokens_per_second_device"] / first for row in members]


def scaling_table(members: list[dict]) -> str:
    """A table with a row for each size."""
    heads = "nodes|ranks|global batch|tokens/s|TFLOP/s a device|efficiency|loss".split("|")
    lines = []
    before = None  # efficiency of the row before
    for row, efficiency in zip(members, efficiencies(members), strict=True):
        loss = f"{1 - efficiency / before:.1%}" if before else "0.0%"
        sizes = [row["nodes"], row["ranks"], f"{row['global_batch_size']:,}"]
        speeds = [f"{row['tokens_per_second']:,.0f}", shown(row["tflops_device"], ".4g")]
        lines.append([*sizes, *speeds, f"{efficiency:.1%}", loss])
        before = efficiency
    return program.table(heads, lines)


def main(argv: list[str]) -> None:
    """Print all rows of a file and how they scale."""
    (name,) = program.arguments(argv, "RESULTS.csv")
    rows = read(name)
    groups = scalings(measured(rows, name))
    print(tables(rows, name), "", sep="\n")
    for title, members in groups.items():
        print(title, "", scaling_table(members), "", sep="\n")
    if not groups:
        print(MORE_SIZES_TEXT.format(out=program.shell(f"--out={name}")))
    print(PUBLISHED_TEXT)


if __name__ == "__main__":
    program.run(main)
