"""The rows of `bench train` as tables and a picture.

    python -m bench table results.csv        the tables on the screen, results.png beside the CSV

One table has the columns of LLM Foundry's benchmark tables, so that rows compare with the published
throughput of MPT. The other has what those lack: turns, memory, where the time goes.
"""

import contextlib
import importlib.util
import os
from pathlib import Path

import config
from bench.compare import markdown
from config import UserError, require
from storage import files

PARTS = ["data", "forward", "backward", "optimizer"]  # of a step; communication overlaps with them

# Settings that may name a row.
NAMING = """
    model ranks threads precision sharding activation_checkpointing recompute_every compile
    attn_impl microbatch_size global_batch_size max_seq_len
""".split()
LAYOUT = ("tp=", "sequence_parallel=", "pp=")  # these have no column, but stand among `others`
# What LLM Foundry calls our values.
FOUNDRY_PRECISION = {"bf16": "amp_bf16"}
FOUNDRY_CHECKPOINTING = {"none": "False", "full": "True"}


def read(path: str) -> list[dict[str, str]]:
    """The rows of a CSV of `bench train`; none if there is no such file."""
    if not os.path.exists(path):
        return []
    return files.read_csv(path, ("model", "status"), "a CSV of bench train")


def foundry_cells(row: dict[str, str]) -> dict[str, str]:
    """A row as in LLM Foundry's benchmark tables; speeds are of all devices, TFLOP/s of one."""
    rate = float(row["tokens_per_second"])
    seq_len = int(row["max_seq_len"])
    checkpointing = row["activation_checkpointing"]
    return {
        "Model": row["model"],
        "SeqLen (T)": row["max_seq_len"],
        "# GPUs": row["ranks"],
        "GPU": row["device"],
        "MFU": row["mfu"] and f"{100 * float(row['mfu']):.2f}",
        "HFU": row["hfu"] and f"{100 * float(row['hfu']):.2f}",
        "Model TFLOP": f"{float(row['tflops_device']):.4g}",
        "MicroBatchSize": row["microbatch_size"],
        "GradAccum": row["grad_accum"],
        "GlobalBatchSize": row["global_batch_size"],
        "Throughput (S/s)": f"{rate / seq_len:.4g}",
        "Throughput (T/s)": f"{rate:.0f}",
        "Throughput (T/s/GPU)": f"{float(row['tokens_per_second_device']):.0f}",
        "GlobalBatchSize (T)": str(int(row["global_batch_size"]) * seq_len),
        "Precision": FOUNDRY_PRECISION.get(row["precision"], row["precision"]),
        "MP Mode": "DEFAULT",
        "Sharding Strategy": row["sharding"],
        "Activation Checkpointing": FOUNDRY_CHECKPOINTING.get(checkpointing, "selective"),
        "Activation CPUOffload": "False",
        "NumParams": row["n_params"],
    }


def our_cells(name: str, row: dict[str, str], base: float) -> dict[str, str]:
    """What LLM Foundry's tables have no column for. base: tokens/s of the first row."""
    rate = float(row["tokens_per_second"])
    cells = {
        "row": name,
        "tokens/s": f"{rate:,.0f}",
        "fastest / slowest turn": f"{float(row['fastest']):,.0f} / {float(row['slowest']):,.0f}",
        "first row = 1": f"{rate / base:.2f}",
        "peak GB": f"{float(row['memory_gb']):.2f}",
    }
    for part in [*PARTS, "communication", "idle"]:
        cells[part] = row[part] and f"{float(row[part]):.0%}"
    return cells


def names_of(rows: list[dict[str, str]]) -> list[str]:
    """A name for each row, made of the settings in which the rows differ."""
    # What `auto` means may be unknown for a row that failed, so only the others' values count.
    measured = [row for row in rows if row["status"] == "ok"] or rows
    differ = []
    for key in NAMING:
        known = measured if key in ("precision", "compile") else rows
        if len({row[key].partition(" (")[0] for row in known}) > 1:
            differ.append(key)

    names = []
    for row in rows:
        parts = [row[k] if k in ("model", "sharding") else f"{k} {row[k]}" for k in differ]
        parts += [word for word in row["others"].split() if word.startswith(LAYOUT)]
        names.append(", ".join(parts) or row["model"])
    return names


def tables(rows: list[dict[str, str]]) -> str:
    """Markdown: both tables, and a list of the rows that could not be measured."""
    measured, texts, failed = [], [], []
    for name, row in zip(names_of(rows), rows, strict=True):
        if row["status"] == "ok":
            measured.append((name, row))
        else:
            failed.append(f"- not measured: {name}: {row['status']}")
    if measured:
        _, first = measured[0]
        base = float(first["tokens_per_second"])
        texts.append(markdown([our_cells(name, row, base) for name, row in measured]))
        texts.append(markdown([foundry_cells(row) for _, row in measured]))
    return "\n\n".join(texts + failed)


def draw(rows: list[dict[str, str]], path: Path) -> None:
    """Bars of tokens/s of one device, and of where the time goes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 1.6 + 0.45 * len(rows)), layout="constrained")
    speed_axes, share_axes = figure.subplots(1, 2, sharey=True)
    names = names_of(rows)
    rates = [float(row["tokens_per_second_device"]) for row in rows]
    speed_axes.barh(names, rates, color="C0")
    speed_axes.invert_yaxis()
    speed_axes.set(xlabel="tokens/s of one device")

    left = [0.0] * len(rows)  # where the next bar begins
    for part in PARTS:
        widths = [100 * float(row[part] or 0) for row in rows]
        share_axes.barh(names, widths, left=left, label=part)
        left = [begin + width for begin, width in zip(left, widths, strict=True)]
    communication = [100 * float(row["communication"] or 0) for row in rows]
    share_axes.plot(communication, names, "k|", ms=14, label="communication (overlaps)")
    share_axes.set(xlabel="% of a step's time")
    share_axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    figure.savefig(path, dpi=100)


@contextlib.contextmanager
def naming_errors(path: str):
    """Turn errors about missing columns or bad numbers into a UserError that names the file."""
    try:
        yield
    except UserError:
        raise
    except (KeyError, ValueError, ArithmeticError) as error:
        raise UserError(f"{path} is not a CSV of bench train ({config.one_line(error)})") from error


def main(argv) -> None:
    """Print the tables of a CSV and draw its picture."""
    (path,) = config.arguments(argv, "RESULTS.csv")
    rows = read(path)
    require(rows, f"{path} has no rows")
    measured = [row for row in rows if row["status"] == "ok"]
    with naming_errors(path):
        print(tables(rows))
        if measured and importlib.util.find_spec("matplotlib"):
            draw(measured, Path(path).with_suffix(".png"))


if __name__ == "__main__":
    config.run(main)
