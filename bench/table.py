"""The rows of `bench train` as tables and a picture.

    python -m bench table results.csv        the tables on the screen, results.png beside the CSV

One table has the columns of LLM Foundry's benchmark tables, in which the published MPT throughput
stands; the other what those lack: turns, memory, where the time goes. Read next: bench/scaling.py.
"""

import contextlib
import importlib.util
import os
from pathlib import Path

import config
from bench.compare import markdown
from config import UserError, require
from storage import files

PARTS = ["data", "forward", "backward", "optimizer"]  # of a step; communication goes on beside them


def read(path: str) -> list[dict]:
    """The lines of a CSV that is there."""
    return (
        files.read_csv(path, ("model", "status"), "a CSV of bench train")
        if os.path.exists(path)
        else []
    )


def foundry_cells(r: dict[str, str]) -> dict[str, str]:
    """A row as in LLM Foundry's benchmark tables; speeds are of all devices, TFLOP/s of one."""
    return {
        "Model": r["model"],
        "SeqLen (T)": r["max_seq_len"],
        "# GPUs": r["ranks"],
        "GPU": r["device"],
        "MFU": r["mfu"] and f"{100 * float(r['mfu']):.2f}",
        "HFU": r["hfu"] and f"{100 * float(r['hfu']):.2f}",
        "Model TFLOP": f"{float(r['tflops_device']):.4g}",
        "MicroBatchSize": r["microbatch_size"],
        "GradAccum": r["grad_accum"],
        "GlobalBatchSize": r["global_batch_size"],
        "Throughput (S/s)": f"{float(r['tokens_per_second']) / int(r['max_seq_len']):.4g}",
        "Throughput (T/s)": f"{float(r['tokens_per_second']):.0f}",
        "Throughput (T/s/GPU)": f"{float(r['tokens_per_second_device']):.0f}",
        "GlobalBatchSize (T)": str(int(r["global_batch_size"]) * int(r["max_seq_len"])),
        "Precision": {"bf16": "amp_bf16"}.get(r["precision"], r["precision"]),
        "MP Mode": "DEFAULT",
        "Sharding Strategy": r["sharding"],
        "Activation Checkpointing": {"none": "False", "full": "True"}.get(
            r["activation_checkpointing"], "selective"
        ),
        "Activation CPUOffload": "False",
        "NumParams": r["n_params"],
    }


def our_cells(name: str, r: dict[str, str], base: float) -> dict[str, str]:
    """What that table has no column for. base: tokens/s of the first row."""
    rate = float(r["tokens_per_second"])
    cells = {
        "row": name,
        "tokens/s": f"{rate:,.0f}",
        "fastest / slowest turn": f"{float(r['fastest']):,.0f} / {float(r['slowest']):,.0f}",
        "first row = 1": f"{rate / base:.2f}",
        "peak GB": f"{float(r['memory_gb']):.2f}",
    }
    return cells | {
        part: r[part] and f"{float(r[part]):.0%}" for part in [*PARTS, "communication", "idle"]
    }


def names_of(lines: list[dict[str, str]]) -> list[str]:
    """A name for each row: what it does not share with all others."""
    asked = "model ranks threads precision sharding activation_checkpointing recompute_every compile attn_impl".split()
    asked += ["microbatch_size", "global_batch_size", "max_seq_len"]
    told = [
        line for line in lines if line["status"] == "ok"
    ] or lines  # the others may not know what `auto` stood for
    differ = [key for key in asked if len({line[key].partition(" (")[0] for line in lines}) > 1]
    differ = [key for key in differ if key != "precision" or len({line[key] for line in told}) > 1]
    names = [
        ", ".join(line[k] if k in ("model", "sharding") else f"{k} {line[k]}" for k in differ)
        for line in lines
    ]
    return [name or line["model"] for name, line in zip(names, lines, strict=True)]


def tables(lines: list[dict[str, str]]) -> str:
    """Markdown: both tables, and what could not be measured."""
    named = list(zip(names_of(lines), lines, strict=True))
    done = [(name, line) for name, line in named if line["status"] == "ok"]
    text = []
    if done:
        base = float(done[0][1]["tokens_per_second"])
        text.append(markdown([our_cells(name, line, base) for name, line in done]))
        text.append(markdown([foundry_cells(line) for _, line in done]))
    failed = [
        f"- not measured: {name}: {line['status']}"
        for name, line in named
        if line["status"] != "ok"
    ]
    return "\n\n".join([*text, *failed])


def draw(lines: list[dict[str, str]], path: Path) -> None:
    """Bars of tokens/s of one device, and of where the time goes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 1.6 + 0.45 * len(lines)), layout="constrained")
    speed, share = figure.subplots(1, 2, sharey=True)
    names = names_of(lines)
    speed.barh(names, [float(line["tokens_per_second_device"]) for line in lines], color="C0")
    left = [0.0] * len(lines)
    for part in PARTS:
        widths = [100 * float(line[part] or 0) for line in lines]
        share.barh(names, widths, left=left, label=part)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    share.plot(
        [100 * float(line["communication"] or 0) for line in lines],
        names,
        "k|",
        ms=14,
        label="communication, beside",
    )
    speed.invert_yaxis()
    speed.set(xlabel="tokens/s of one device")
    share.set(xlabel="% of a step's time")
    share.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    figure.savefig(path, dpi=100)


@contextlib.contextmanager
def named(path: str):
    """A table that lacks columns, or has text for numbers, becomes a UserError that names it."""
    try:
        yield
    except UserError:
        raise
    except (KeyError, ValueError, ArithmeticError) as error:
        raise UserError(f"{path} is not a CSV of bench train ({config.one_line(error)})") from error


def main(argv) -> None:
    """Print the tables of a CSV and draw its picture."""
    config.arguments(argv, "RESULTS.csv")
    lines = read(argv[0])
    require(lines, f"{argv[0]} has no rows")
    fine = [line for line in lines if line["status"] == "ok"]
    with named(argv[0]):
        print(tables(lines))
        if fine and importlib.util.find_spec("matplotlib"):
            draw(fine, Path(argv[0]).with_suffix(".png"))


if __name__ == "__main__":
    config.run(main)
