"""planning/step_time.py beside published runs of MPT: the fit of its constants, its errors.

    python -m bench planner [OUT.md]       some seconds, to bench/results/planner.md

The rows are LLM Foundry's table of MPT on one node (scripts/train/benchmarking in its repository,
Apache 2.0), kept in mpt_single_node_throughput.csv: 8 A100 of 40 or 80 GB, or 8 H100. `hop`, of the
network, comes from its MPT-1B on 8 to 512 H100. Each model's rows are predicted by constants that
were fitted without it. It needs scipy, see requirements-dev.txt. Read next: bench/generate.py.
"""

import csv
import datetime
import math
import platform
import statistics
from dataclasses import replace
from pathlib import Path

import config
import devices
import flops
from config import MPTConfig, TrainConfig
from planning import memory, picture, step_time
from planning.step_time import Constants, Fleet, Trainer
from planning.step_time import StepTime as Step

ROOT = Path(__file__).resolve().parent.parent

TABLE = ROOT / "bench/results/mpt_single_node_throughput.csv"
KINDS = {"a100_40gb": "a100 40gb", "a100_80gb": "a100 80gb", "h100_80gb": "h100"}
FITTED = ("attention_a100", "attention_h100", "block_bytes", "tile", "overlap", "hop")
H100 = {
    8: 413,
    128: 401,
    256: 387,
    512: 362,
}  # MPT-1B: TFLOP/s a GPU by GPUs, nodes of 8 with 8 x 400 Gb/s
MPT1B = MPTConfig(d_model=2048, n_heads=16, n_layers=24)
# Frontier (arXiv 2312.12705): layers, width, heads, tp, pp, GCDs of one replica and of the run, strong scaling in %
FRONTIER = {
    "175B": (96, 12288, 96, 4, 16, 64, 1024, 89.93),
    "1T": (128, 25600, 200, 8, 64, 512, 3072, 87.05),
}


def read() -> list[dict]:
    """The rows, each with "run" = (model, config, fleet, trainer) and "measured" tokens/s."""
    with open(TABLE, newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        shape = {
            "d_model": "d_model",
            "n_heads": "heads",
            "n_layers": "layers",
            "max_seq_len": "seq",
        }
        m = MPTConfig(**{ours: int(row[theirs]) for ours, theirs in shape.items()})
        batch = {
            "microbatch_size": int(row["micro_bs"]),
            "global_batch_size": int(row["global_bs"]),
        }
        cfg = TrainConfig(
            **batch, sharding=row["sharding"], activation_checkpointing=row["act_ckpt"]
        )
        fleet = Fleet(
            devices.by_name(KINDS[row["gpu"]]), int(row["n_gpus"]), int(row["gpus_per_node"])
        )
        pure = row["precision"] == "bf16"  # then the residual stream is in bf16, too
        row["run"] = m, cfg, fleet, Trainer(reduce_bytes=2, residual_bytes=2 if pure else 4)
        row["measured"] = int(row["n_gpus"]) * float(row["tokens_s_gpu"])
    return rows


def predicted(row: dict, c: Constants) -> float:
    """Tokens/s of a row's run, of all devices."""
    m, cfg, fleet, trainer = row["run"]
    return step_time.tokens_per_second(m, cfg, fleet, c, trainer)


def scaled(c: Constants) -> dict[int, float]:
    """TFLOP/s a GPU of MPT-1B by GPUs, at the microbatch of the row for 8 (14)."""
    found = {}
    for n in H100:
        cfg = TrainConfig(microbatch_size=14, global_batch_size=14 * n)
        rate = step_time.tokens_per_second(
            MPT1B, cfg, Fleet(devices.by_name("h100"), n, 8, 400), c, step_time.FOUNDRY
        )
        found[n] = rate * flops.train_flops_per_token(MPT1B) / n / 1e12
    return found


def fit(rows: list[dict]) -> Constants:
    """Least squares in the logarithm, outliers damped, over the rows and the three ratios of MPT-1B on more nodes.
    Without rows of MPT-1B without these, too, and `hop` stays."""
    from scipy.optimize import least_squares

    many_nodes = any(row["model"] == "mpt-1b" for row in rows)
    fitted = [name for name in FITTED if many_nodes or name != "hop"]

    def constants(logs) -> Constants:
        return replace(
            Constants(), **{name: math.exp(x) for name, x in zip(fitted, logs, strict=True)}
        )

    def residuals(logs) -> list[float]:
        c = constants(logs)
        many = scaled(c)
        ratios = [
            3 * math.log(many[n] / many[8] * H100[8] / H100[n]) for n in H100 if n > 8
        ]  # each counts as 9 rows
        return [math.log(predicted(row, c) / row["measured"]) for row in rows] + ratios * many_nodes

    start = [math.log(getattr(Constants(), name)) for name in fitted]
    return constants(least_squares(residuals, start, loss="soft_l1", f_scale=0.05).x)


def left_out(rows: list[dict]) -> list[float]:
    """Error of each row, predicted / measured - 1, by constants that were fitted without its model."""
    errors = {}
    for model in dict.fromkeys(row["model"] for row in rows):
        c = fit([row for row in rows if row["model"] != model])
        errors |= {
            i: predicted(row, c) / row["measured"] - 1
            for i, row in enumerate(rows)
            if row["model"] == model
        }
    return [errors[i] for i in range(len(rows))]


def constant(rows: list[dict]) -> list[float]:
    """The same if each kind of GPU had one speed in TFLOP/s: the median of its rows of other models."""
    errors = []
    for row in rows:
        alike = [
            other for other in rows if other["gpu"] == row["gpu"] and other["model"] != row["model"]
        ]
        tflops = statistics.median(float(other["tflops_per_gpu"]) for other in alike)
        errors.append(tflops / float(row["tflops_per_gpu"]) - 1)
    return errors


def summary(errors: list[float]) -> dict[str, float]:
    """Of the sizes of errors: median, mean, 90th percentile, largest."""
    sizes = sorted(abs(error) for error in errors)
    tenth = statistics.quantiles(sizes, n=10, method="inclusive")[-1]
    return {
        "median": statistics.median(sizes),
        "mean": statistics.mean(sizes),
        "p90": tenth,
        "largest": sizes[-1],
    }


def frontier(name: str, microbatch: int) -> float:
    """Tokens/s a GCD of the whole run over that of one replica, in %, at the same global batch of 8,000 or nearly."""
    layers, width, heads, tp, pp, *counts, _ = FRONTIER[name]
    m = MPTConfig(d_model=width, n_heads=heads, n_layers=layers, vocab_size=51200)
    rates = []
    for n in counts:
        dp = n // tp // pp
        cfg = TrainConfig(
            global_batch_size=round(8000 / dp) * dp, microbatch_size=microbatch, sharding="ZERO1"
        )
        cfg = replace(cfg, activation_checkpointing="full")
        fleet = Fleet(devices.by_name("mi250x"), n, 8, 100, tp, pp)
        rates.append(
            cfg.global_batch_size
            / Step(m, cfg, fleet, trainer=step_time.FOUNDRY).parts()["step"]
            / n
        )
    return 100 * rates[1] / rates[0]


# ---------------------------------------------------------------------------------------------------------------------
# The document

HEAD = """# The planner beside published runs

`python -m bench planner`, {date}, Python {python}, scipy {scipy}.

What `planning/step_time.py` predicts, and what was published. No run of this project is in here:
none of it has been measured on a GPU. Tokens/s depend on the software as well: the rows are LLM
Foundry's of 2023, with Triton's flash attention.

## Fitted constants

Least squares in the logarithm over the {n} rows below, and over MPT-1B's slowdown on 128 to 512
H100. `planning/step_time.py` holds them rounded. What else is in `step_time.Constants` was set
before the fit, from counting bytes or from datasheets.

{constants}

## Errors

|predicted / measured - 1| of tokens/s. Each model's rows are predicted by constants fitted without that model. Beside
it, one speed in TFLOP/s for each kind of GPU, the median over the other models.

{errors}

{parts}

## Many nodes

**MPT-1B on H100**, nodes of 8 with 400 GB/s, microbatch 14, TFLOP/s a GPU. The last three were fitted (as ratios).

{h100}

**MPT-7B on MI250**, 4 cards (8 torch devices) and 100 GB/s a node, global batch 1,536, no recomputation, TFLOP/s a
card. 166 was published for 4 cards: first predicted without it, then it calibrates one number, the pace of compute,
with which 128 cards are predicted. The posts do not give the microbatch, so all that a rank of 128 cards can take are
here. `configs/mpt7b_mi250.py` takes 3, the largest of them that leaves room, as the README's figure assumes.
With full checkpointing the second prediction is the same, since calibration divides its cost out.

{mi250}

**Frontier**, GPT-3's shape of 175B on 1,024 and 1T on 3,072 GCDs of MI250X, ZeRO-1 and full checkpointing, nodes of 8
with 100 GB/s: tokens/s a GCD over those of one replica of the model (64 and 512 GCDs) at the same global batch of
about 8,000 sequences, in %. The recipe that we have names tp and pp and not the microbatch, which decides the bubble.
With 4 both figures come out; with 1 neither does, 7 and 9 points too high, and neither the network nor the optimizer as
we model them makes up for it. 4 was chosen because it agrees. By `planning/memory.py`, whose
gradients are fp32, one replica alone would not have room for it.

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


def mi250_rows(c: Constants) -> list[list]:
    """Every microbatch that a rank of 128 cards can take: it has 6 sequences."""
    rows, (first, published), room = [], devices.PUBLISHED_MI250.values(), 64 * 2**30
    for microbatch in (1, 2, 3, 6):
        cfg = replace(picture.POSTS, microbatch_size=microbatch)
        pace, peak = (
            picture.published_pace(cfg),
            memory.bytes_by_part(picture.MPT7B, cfg, 8)["peak"],
        )
        few, many = picture.mi250(4, c, cfg), picture.mi250(128, replace(c, pace=pace), cfg)
        rows.append(
            [
                microbatch,
                percent(peak / room),
                f"{few:.1f}",
                percent(few / first - 1),
                f"{pace:.3f}",
            ]
        )
        rows[-1] += [f"{many:.1f}", published, percent(many / published - 1)]
    return rows


def parts(rows: list[dict], errors: list[float]) -> list[list]:
    """The errors of each GPU, each model and each way of activation checkpointing."""
    found = []
    for key in ("gpu", "model", "act_ckpt"):
        for value in dict.fromkeys(row[key] for row in rows):
            part = [error for error, row in zip(errors, rows, strict=True) if row[key] == value]
            figures = summary(part)
            cells = [percent(figures[name]) for name in ("median", "p90", "largest")]
            found.append([value, len(part), *cells])
    return found


def frontiers() -> list[list]:
    """Published strong scaling on Frontier, and ours for microbatches of 1, 2 and 4."""
    rows = []
    for name, (*_, tp, pp, _, _, published) in FRONTIER.items():
        predictions = [f"{frontier(name, size):.1f}" for size in (1, 2, 4)]
        rows.append([name, f"{tp}x{pp}", published, *predictions])
    return rows


def main(argv: list[str]) -> None:
    """Fit, predict, and write the document to OUT.md."""
    (out,) = config.arguments(argv, "[OUT.md]") or [ROOT / "bench/results/planner.md"]
    import scipy

    rows, now = read(), Constants()
    c, errors = fit(rows), left_out(rows)
    several = {"planning/step_time.py, left out": errors}
    several["one TFLOP/s a kind of GPU"] = constant(rows)
    several["planning/step_time.py, all rows fitted"] = [
        predicted(row, now) / row["measured"] - 1 for row in rows
    ]
    many = scaled(now)
    document = HEAD.format(
        date=datetime.date.today(),
        python=platform.python_version(),
        scipy=scipy.__version__,
        n=len(rows),
        constants=markdown(
            ["constant", "fitted", "in planning/step_time.py"],
            [
                [f"`{name}`", f"{getattr(c, name):.3g}", f"{getattr(now, name):.3g}"]
                for name in FITTED
            ],
        ),
        errors=markdown(
            ["", "median", "mean", "90th percentile", "largest"],
            [[name, *map(percent, summary(found).values())] for name, found in several.items()],
        ),
        parts=markdown(
            ["left out, by", "rows", "median", "90th percentile", "largest"], parts(rows, errors)
        ),
        h100=markdown(
            ["GPUs", "published", "predicted", "error"],
            [[n, H100[n], f"{many[n]:.1f}", percent(many[n] / H100[n] - 1)] for n in H100],
        ),
        mi250=markdown(
            [
                "microbatch",
                "of 64 GiB",
                "4 cards, not calibrated",
                "error",
                "pace",
                "128 cards",
                "published",
                "error",
            ],
            mi250_rows(now),
        ),
        frontier=markdown(["", "tp x pp", "published", "microbatch 1", "2", "4"], frontiers()),
        rows=markdown(
            [
                "model",
                "GPU",
                "sequence",
                "checkpointing",
                "microbatch",
                "TFLOP/s",
                "measured",
                "predicted",
                "error",
            ],
            [
                [
                    *(
                        row[key]
                        for key in ("model", "gpu", "seq", "act_ckpt", "micro_bs", "tflops_per_gpu")
                    ),
                    f"{row['measured'] / 8:,.0f}",
                    f"{row['measured'] * (1 + error) / 8:,.0f}",
                    percent(error),
                ]
                for row, error in zip(rows, errors, strict=True)
            ],
        ),
    )
    Path(out).write_text(document, encoding="utf-8")
    print(document[: document.index("## Every row")])


if __name__ == "__main__":
    config.run(main)
