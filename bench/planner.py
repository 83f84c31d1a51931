"""planning/step_time.py beside published runs of MPT: the fit of its constants, and its errors.

    python -m bench planner [OUT.md]       in some seconds, writes bench/results/planner.md

The rows are LLM Foundry's table of MPT on one node (scripts/train/benchmarking in its repository,
Apache 2.0), kept in mpt_single_node_throughput.csv: 8 A100 of 40 or 80 GB, or 8 H100. The network's
constant, `hop`, comes from LLM Foundry's figures for MPT-1B on 8 to 512 H100. Each model's rows are
predicted by constants that were fitted without that model. Needs scipy, see requirements-dev.txt.
"""

import csv
import datetime
import math
import platform
import statistics
from dataclasses import dataclass, replace
from pathlib import Path

import config
import devices
import flops
from config import MPTConfig, TrainConfig
from planning import memory, picture, step_time
from planning.step_time import Constants, Fleet, StepTime

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "bench/results/mpt_single_node_throughput.csv"
KINDS = {"a100_40gb": "a100 40gb", "a100_80gb": "a100 80gb", "h100_80gb": "h100"}
FITTED = ("attention_a100", "attention_h100", "block_bytes", "tile", "overlap", "hop")

# Published TFLOP/s a GPU of MPT-1B, by number of GPUs, on nodes of 8 H100 with 8 x 400 Gb/s.
H100 = {8: 413, 128: 401, 256: 387, 512: 362}
MPT1B = MPTConfig(d_model=2048, n_heads=16, n_layers=24)


@dataclass
class FrontierRun:
    """A published run on Frontier (arXiv 2312.12705). A GCD is half an MI250X: one torch device."""

    n_layers: int
    d_model: int
    n_heads: int
    tp: int  # tensor-parallel ranks
    pp: int  # pipeline-parallel ranks
    replica_gcds: int  # of one replica of the model
    run_gcds: int  # of the whole run
    strong_scaling: float  # in %


FRONTIER = {
    "175B": FrontierRun(96, 12288, 96, 4, 16, 64, 1024, 89.93),
    "1T": FrontierRun(128, 25600, 200, 8, 64, 512, 3072, 87.05),
}

# --- Published rows and predictions


def read() -> list[dict]:
    """The published rows, each with "run" = (model, config, fleet, trainer) and "measured".

    measured: tokens/s of all GPUs.
    """
    with open(TABLE, newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        m = MPTConfig(
            d_model=int(row["d_model"]),
            n_heads=int(row["heads"]),
            n_layers=int(row["layers"]),
            max_seq_len=int(row["seq"]),
        )
        cfg = TrainConfig(
            microbatch_size=int(row["micro_bs"]),
            global_batch_size=int(row["global_bs"]),
            sharding=row["sharding"],
            activation_checkpointing=row["act_ckpt"],
        )
        n_gpus = int(row["n_gpus"])
        fleet = Fleet(devices.by_name(KINDS[row["gpu"]]), n_gpus, int(row["gpus_per_node"]))
        pure_bf16 = row["precision"] == "bf16"  # the residual stream is bf16 too
        trainer = replace(step_time.FOUNDRY, residual_bytes=2 if pure_bf16 else 4)
        row["run"] = m, cfg, fleet, trainer
        row["measured"] = n_gpus * float(row["tokens_s_gpu"])
    return rows


def predicted(row: dict, c: Constants) -> float:
    """Predicted tokens/s of a row's run, of all GPUs."""
    m, cfg, fleet, trainer = row["run"]
    return step_time.tokens_per_second(m, cfg, fleet, c, trainer)


def error_of(row: dict, c: Constants) -> float:
    """predicted / measured - 1 of a row."""
    return predicted(row, c) / row["measured"] - 1


def h100_predictions(c: Constants) -> dict[int, float]:
    """Predicted TFLOP/s a GPU of MPT-1B by number of H100 GPUs.

    With microbatches of 14, as the published row for 8 GPUs has.
    """
    rates = {}
    for n in H100:
        cfg = TrainConfig(microbatch_size=14, global_batch_size=14 * n)
        fleet = Fleet(devices.by_name("h100"), n, 8, 400)
        rate = step_time.tokens_per_second(MPT1B, cfg, fleet, c, step_time.FOUNDRY)
        rates[n] = rate * flops.train_flops_per_token(MPT1B) / n / 1e12
    return rates


def fit(rows: list[dict]) -> Constants:
    """Constants by least squares of the logarithms, with outliers damped.

    Over the rows and MPT-1B's three published slowdowns on more nodes. If `rows` has no MPT-1B, the
    slowdowns are left out too, and `hop` keeps its default.
    """
    from scipy.optimize import least_squares

    has_1b = any(row["model"] == "mpt-1b" for row in rows)
    fitted = [name for name in FITTED if has_1b or name != "hop"]

    def constants(logs) -> Constants:
        values = {name: math.exp(log) for name, log in zip(fitted, logs, strict=True)}
        return replace(Constants(), **values)

    def residuals(logs) -> list[float]:
        c = constants(logs)
        errors = [math.log(predicted(row, c) / row["measured"]) for row in rows]
        if has_1b:
            rates = h100_predictions(c)
            for n in H100:
                if n > 8:
                    slowdown = (rates[n] / rates[8]) / (H100[n] / H100[8])
                    errors.append(3 * math.log(slowdown))  # each counts as much as 9 rows
        return errors

    start = [math.log(getattr(Constants(), name)) for name in fitted]
    return constants(least_squares(residuals, start, loss="soft_l1", f_scale=0.05).x)


def held_out_errors(rows: list[dict]) -> list[float]:
    """The error of each row, by constants that were fitted without the row's model."""
    models = dict.fromkeys(row["model"] for row in rows)
    constants = {}
    for model in models:
        constants[model] = fit([row for row in rows if row["model"] != model])
    return [error_of(row, constants[row["model"]]) for row in rows]


def constant_speed_errors(rows: list[dict]) -> list[float]:
    """The error of each row if every kind of GPU had one speed in TFLOP/s.

    The speed is the median of the GPU's rows of other models.
    """
    errors = []
    for row in rows:
        same_gpu = [other for other in rows if other["gpu"] == row["gpu"]]
        rates = [float(r["tflops_per_gpu"]) for r in same_gpu if r["model"] != row["model"]]
        errors.append(statistics.median(rates) / float(row["tflops_per_gpu"]) - 1)
    return errors


def summary(errors: list[float]) -> dict[str, float]:
    """Median, mean, 90th percentile and largest of the errors' absolute values."""
    sizes = sorted(abs(error) for error in errors)
    return {
        "median": statistics.median(sizes),
        "mean": statistics.mean(sizes),
        "p90": statistics.quantiles(sizes, n=10, method="inclusive")[-1],
        "largest": sizes[-1],
    }


def frontier(name: str, microbatch: int) -> float:
    """Predicted strong scaling on Frontier: tokens/s a GCD of the run over one replica's, in %.

    The global batch is 8,000 sequences, rounded to a multiple of the data-parallel ranks.
    """
    run = FRONTIER[name]
    m = MPTConfig(d_model=run.d_model, n_heads=run.n_heads, n_layers=run.n_layers, vocab_size=51200)
    rates = []
    for n in (run.replica_gcds, run.run_gcds):
        dp = n // run.tp // run.pp
        batch = round(8000 / dp) * dp
        cfg = TrainConfig(
            global_batch_size=batch,
            microbatch_size=microbatch,
            sharding="ZERO1",
            activation_checkpointing="full",
            tp=run.tp,
            pp=run.pp,
        )
        fleet = Fleet(devices.by_name("mi250x"), n, 8, 100, run.tp, run.pp)
        seconds = StepTime(m, cfg, fleet, trainer=step_time.FOUNDRY).parts()["step"]
        rates.append(batch / seconds / n)
    replica, whole = rates
    return 100 * whole / replica


# --- The document

HEAD = """# The planner beside published runs

`python -m bench planner`, {date}, Python {python}, scipy {scipy}.

What `planning/step_time.py` predicts, beside what was published. No run of this project is here:
none of them has been measured on a GPU. Tokens/s also depend on the software: the rows are LLM
Foundry's of 2023, with Triton's flash attention.

## Fitted constants

Least squares of the logarithms, over the {n} rows below and MPT-1B's slowdown on 128 to 512 H100.
`planning/step_time.py` has these constants, rounded. The other fields of `step_time.Constants` were
set before the fit, by counting bytes or from datasheets.

{constants}

## Errors

The errors are |predicted / measured - 1| of tokens/s. Each model's rows are predicted by constants
fitted without that model. For comparison: one speed in TFLOP/s for each kind of GPU, the median
over the other models.

{errors}

{parts}

## Many nodes

**MPT-1B on H100**, nodes of 8 with 400 GB/s, microbatch 14, TFLOP/s a GPU. The last three were part
of the fit (as ratios to the first).

{h100}

**MPT-7B on MI250**, nodes of 4 cards (8 torch devices) with 100 GB/s, global batch 1,536, no
recomputation, TFLOP/s a card. 166 was published for 4 cards. It is first predicted without using
it. Then it calibrates one number, the pace of compute, with which 128 cards are predicted. The
posts do not give the microbatch, so the table has every one that a rank of 128 cards can have.
`configs/mpt7b_mi250.py` has 3, the largest of them that leaves room in memory, and the README's
figure assumes it. With full checkpointing the second prediction is the same, since calibration
divides its cost out.

{mi250}

**Frontier**, models of GPT-3's shape: 175B on 1,024 GCDs of MI250X and 1T on 3,072, ZeRO-1 and full
checkpointing, nodes of 8 GCDs with 100 GB/s. The figures are tokens/s a GCD over those of one
replica of the model (64 and 512 GCDs) at the same global batch of about 8,000 sequences, in %. The
published recipe names tp and pp, but not the microbatch, which decides the pipeline bubble. With a
microbatch of 4 both figures agree. With 1 they are 7 and 9 points too high, and neither the
network nor the optimizer, as we model them, makes up for it. So 4 was chosen because it agrees. By
`planning/memory.py`, whose gradients are fp32, one replica alone would not fit into memory.

{frontier}

## Every row

TFLOP/s a GPU as published, tokens/s a GPU measured and predicted without its model, and the error.

{rows}
"""


def markdown(head: list[str], rows: list[list]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def percent(x: float) -> str:
    """A share as text."""
    return f"{100 * x:.1f} %"


def constants_table(fitted: Constants, current: Constants) -> str:
    """The constants of this fit beside those in planning/step_time.py."""
    rows = []
    for name in FITTED:
        values = (getattr(fitted, name), getattr(current, name))
        rows.append([f"`{name}`", *(f"{value:.3g}" for value in values)])
    return markdown(["constant", "fitted", "in planning/step_time.py"], rows)


def errors_table(rows: list[dict], errors: list[float], current: Constants) -> str:
    """Summaries of the errors, one row for each way of predicting."""
    ways = {
        "planning/step_time.py, model held out": errors,
        "one speed for each kind of GPU": constant_speed_errors(rows),
        "planning/step_time.py, all rows fitted": [error_of(row, current) for row in rows],
    }
    head = ["", "median", "mean", "90th percentile", "largest"]
    return markdown(head, [[name, *map(percent, summary(ways[name]).values())] for name in ways])


def parts_table(rows: list[dict], errors: list[float]) -> str:
    """The errors of each GPU, each model and each kind of activation checkpointing."""
    lines = []
    for key in ("gpu", "model", "act_ckpt"):
        for value in dict.fromkeys(row[key] for row in rows):
            part = [error for error, row in zip(errors, rows, strict=True) if row[key] == value]
            figures = summary(part)
            cells = [percent(figures[name]) for name in ("median", "p90", "largest")]
            lines.append([value, len(part), *cells])
    return markdown(["rows of", "rows", "median", "90th percentile", "largest"], lines)


def h100_table(c: Constants) -> str:
    """MPT-1B on 8 to 512 H100."""
    rates = h100_predictions(c)
    rows = [[n, H100[n], f"{rates[n]:.1f}", percent(rates[n] / H100[n] - 1)] for n in H100]
    return markdown(["GPUs", "published", "predicted", "error"], rows)


MI250_HEAD = (
    "microbatch|of 64 GiB|4 cards, not calibrated|error|pace|128 cards|published|error".split("|")
)


def mi250_rows(c: Constants) -> list[list]:
    """MPT-7B on 4 and 128 MI250 cards, by microbatch. A rank of 128 cards has 6 sequences."""
    published_4, published_128 = devices.PUBLISHED_MI250.values()
    rows = []
    for microbatch in (1, 2, 3, 6):
        cfg = replace(picture.POSTS, microbatch_size=microbatch)
        peak_bytes = memory.bytes_by_part(picture.MPT7B, cfg, 8)["peak"]
        pace = picture.published_pace(cfg)
        few = picture.mi250(4, c, cfg)
        many = picture.mi250(128, replace(c, pace=pace), cfg)
        row = [microbatch, percent(peak_bytes / (64 * 2**30))]
        row += [f"{few:.1f}", percent(few / published_4 - 1), f"{pace:.3f}"]
        row += [f"{many:.1f}", published_128, percent(many / published_128 - 1)]
        rows.append(row)
    return rows


def frontier_table() -> str:
    """Published strong scaling on Frontier, and ours for microbatches of 1, 2 and 4."""
    rows = []
    for name, run in FRONTIER.items():
        predictions = [f"{frontier(name, microbatch):.1f}" for microbatch in (1, 2, 4)]
        rows.append([name, f"{run.tp}x{run.pp}", run.strong_scaling, *predictions])
    return markdown(["", "tp x pp", "published", "microbatch 1", "2", "4"], rows)


ROWS_HEAD = "model|GPU|sequence|checkpointing|microbatch|TFLOP/s|measured|predicted|error".split(
    "|"
)


def rows_table(rows: list[dict], errors: list[float]) -> str:
    """Every published row."""
    lines = []
    for row, error in zip(rows, errors, strict=True):
        keys = ("model", "gpu", "seq", "act_ckpt", "micro_bs", "tflops_per_gpu")
        measured = row["measured"] / 8  # a GPU
        cells = [row[key] for key in keys]
        cells += [f"{measured:,.0f}", f"{measured * (1 + error):,.0f}", percent(error)]
        lines.append(cells)
    return markdown(ROWS_HEAD, lines)


def main(argv: list[str]) -> None:
    """Fit, predict, and write the document to OUT.md."""
    (out,) = config.arguments(argv, "[OUT.md]") or [ROOT / "bench/results/planner.md"]
    import scipy

    rows = read()
    errors = held_out_errors(rows)
    current = Constants()
    document = HEAD.format(
        date=datetime.date.today(),
        python=platform.python_version(),
        scipy=scipy.__version__,
        n=len(rows),
        constants=constants_table(fit(rows), current),
        errors=errors_table(rows, errors, current),
        parts=parts_table(rows, errors),
        h100=h100_table(current),
        mi250=markdown(MI250_HEAD, mi250_rows(current)),
        frontier=frontier_table(),
        rows=rows_table(rows, errors),
    )
    Path(out).write_text(document, encoding="utf-8")
    print(document[: document.index("## Every row")])


if __name__ == "__main__":
    config.run(main)
