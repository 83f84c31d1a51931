"""planning/step_time.py beside published runs: the fit of its constants, and its errors.

    python -m bench planner             in some seconds, writes bench/results/planner.md
                                        and planning/residuals.csv
    python -m bench planner OUT.md      writes OUT.md alone

The rows are LLM Foundry's table of MPT on one node (scripts/train/benchmarking in its repository,
Apache 2.0), kept in mpt_single_node_throughput.csv: 8 A100 of 40 or 80 GB, or 8 H100. The network's
constant, `hop`, comes from LLM Foundry's figures for MPT-1B on 8 to 512 H100. Each model's rows are
predicted by constants that were fitted without that model. Runs with tensor and pipeline
parallelism (bench/parallel_runs.py) are predicted without a fit to them. Needs scipy, see
requirements-dev.txt.
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
from bench import parallel_runs
from config import MPTConfig, TrainConfig
from planning import certainty, memory, picture, step_time
from planning.fleet import Fleet
from planning.step_time import Constants, StepTime

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "bench/results/mpt_single_node_throughput.csv"
DOCUMENT = ROOT / "bench/results/planner.md"
KINDS = {"a100_40gb": "a100 40gb", "a100_80gb": "a100 80gb", "h100_80gb": "h100"}
FITTED = ("attention_a100", "attention_h100", "block_bytes", "tile", "overlap", "hop")

# Published TFLOP/s a GPU of MPT-1B, by number of GPUs, on nodes of 8 H100 with 8 x 400 Gb/s.
H100 = {8: 413, 128: 401, 256: 387, 512: 362}
# The microbatch and the sharding of these runs: on one node, and on several.
H100_ONE_NODE = {"microbatch_size": 14, "sharding": "FULL_SHARD"}
H100_NODES = {"microbatch_size": 12, "sharding": "SHARD_GRAD_OP"}
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
    """Predicted TFLOP/s a GPU of MPT-1B by number of H100 GPUs, one microbatch a step."""
    rates = {}
    for n in H100:
        settings = H100_ONE_NODE if n == 8 else H100_NODES
        cfg = TrainConfig(global_batch_size=settings["microbatch_size"] * n, **settings)
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


def frontier(name: str, microbatch: int, n_gcds: int) -> dict[str, float]:
    """Predicted seconds of a step on so many GCDs of Frontier, by part.

    The program is Megatron-DeepSpeed with a flash kernel, which makes it as Megatron-Core. The
    global batch is 8,000 sequences, rounded to a multiple of the data-parallel ranks; "rate" is
    the sequences/s of a GCD.
    """
    run = FRONTIER[name]
    m = MPTConfig(d_model=run.d_model, n_heads=run.n_heads, n_layers=run.n_layers, vocab_size=51200)
    dp = n_gcds // run.tp // run.pp
    batch = round(8000 / dp) * dp
    cfg = TrainConfig(
        global_batch_size=batch,
        microbatch_size=microbatch,
        sharding="ZERO1",
        activation_checkpointing="full",
        tp=run.tp,
        pp=run.pp,
    )
    fleet = Fleet(devices.by_name("mi250x"), n_gcds, 8, 100, run.tp, run.pp)
    seconds = StepTime(m, cfg, fleet, trainer=parallel_runs.MEGATRON_CORE).parts()
    return {**seconds, "rate": batch / seconds["step"] / n_gcds}


def strong_scaling(name: str, microbatch: int) -> float:
    """Predicted sequences/s of a GCD of the run over one replica's, in %."""
    run = FRONTIER[name]
    replica, whole = (
        frontier(name, microbatch, n)["rate"] for n in (run.replica_gcds, run.run_gcds)
    )
    return 100 * whole / replica


# --- The document

HEAD = """# The planner beside published runs

`python -m bench planner`, {date}, Python {python}, scipy {scipy}.

What `planning/step_time.py` predicts, beside what was published. No run of this project is here:
none of them has been measured on a GPU. Tokens/s also depend on the software: the constants are
fitted to LLM Foundry's rows of 2023, with Triton's flash attention. `step_time.Trainer` has what
other programs do differently. `planning/residuals.csv` has measured / predicted of the MPT rows and
of the rows under *Tensor and pipeline parallelism*, without DeepSpeed's ZeRO-3, each with its kind.
From it `planning/certainty.py` says how sure a plan is.

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

**MPT-1B on H100**, nodes of 8 with 400 GB/s, TFLOP/s a GPU: on one node microbatches of 14 and
FULL_SHARD, on several microbatches of 12 and SHARD_GRAD_OP. The last three were part of the fit (as
ratios to the first).

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
replica of the model (64 and 512 GCDs) at the same global batch of about 8,000 sequences, in %, and
seconds of a step with a microbatch of 1, as the launch scripts have it.

{frontier}

**Not explained.** With a microbatch of 1 both figures come out 7 to 9 points too high: the last
column has the seconds that are missing in a step. It is not the network: all that the stages send
each other and all that ZeRO-1 sends is a small part of what is missing, with what many nodes lose
to colliding routes (`planning/fleet.py`) already counted. On LUMI, which has the same network, a
log of 175B has 3.5 to 4.4 s of ZeRO-1's collectives a step, twice what we count for it, and one
wait of 2 s for a slow rank; that is little, too. Nor can it be what grows with the number of
nodes: the same paper reports a weak scaling of 100 %. What is left grows as the batch of a replica
shrinks, as the bubble does. A bubble 3.4 to 3.7 times as long as ours would explain it; we do not
know what would make it so.

## Tensor and pipeline parallelism

{n_parallel} runs of Megatron-LM, Megatron-DeepSpeed, NeMo and others, from papers and
repositories, are in `published_parallel.csv` with their sources. Every measured figure was read
there. The column `assumed` says what a row does not state and we filled in: mostly the network; for
Megatron-LM's Table 2 how tp, pp and interleaving share the devices; for NeMo's Nemotron models the
heads and the feed-forward width, from memory, and NeMo's defaults. Left out were runs in fp8 (all
of torchtitan with tp or pp), with context parallelism, and those of which nearly nothing is stated.

**No constant is fitted to these rows.** What is specific to a program was counted: which traffic
it hides behind computation, fused kernels, scores in memory, the share of the peak that its flash
kernel's paper gives (`Trainer` in `step_time.py`, and bench/parallel_runs.py). The model's
formulas were chosen by two thirds of the rows of the first programs. Every third row of these was
set aside before, and looked at once, at the end. (An earlier model, which treated all programs
alike, had been compared with most rows.) Rows of one table resemble each other, so a third of them
is a weak check. The programs found after the model was complete are a stronger check: all their
rows are set aside, and we changed nothing after seeing their errors. Errors as above; the mean has
its sign.

{families}

So NVIDIA's own programs on NVIDIA's GPUs are predicted within 2 to 7 % in the median. Others are
not:

- Megatron-DeepSpeed on A100 is BLOOM's search for a layout on Jean Zay: single steps. It is
  predicted a sixth too fast, and more than that with more tensor ranks. Its page names four
  NVLink connections between GPUs; if those are 4 of an A100's 12, links of 100 instead of 300 GB/s
  would give a median error of {four_links}. We do not know, and count 12. Of its 400 Gb/s a node
  135 were measured: the rows have 193, of which collectives reach 70 %.
- LUMI's MI250X are a quarter to a third slower than predicted, at any number of nodes. MosaicML's
  MI250 above are slower than predicted, too. The matmuls of a GCD that `devices.py` knows were
  measured alone; what they reach in training is not published.
- InternLM keeps 56 % of its speed from 8 to 1,024 GPUs on 4 x 100 Gb/s a node, where we predict
  80 %. With its optimizer sharded inside nodes, which is none of our modes, it keeps 89 %. So it
  loses most where new weights are sent to all ranks, in a way that is not NCCL's gather.
- DeepSpeed's ZeRO-3 of 2021 is the only FULL_SHARD here that is not FSDP. It reached a third to
  two thirds of what is predicted, and less on more GPUs. It is not in `planning/residuals.csv`.

**What grows with the fleet.** Tokens/s of a GPU on the largest fleet over those on the smallest, of
runs that differ in nothing else:

{growth}

Except for InternLM the differences are at most 6 points, both ways: nothing systematic is left that
slow nodes would have to explain.

## Every row

**MPT**: TFLOP/s a GPU as published, tokens/s a GPU measured and predicted without its model, and
the error.

{rows}

**Tensor and pipeline parallelism**: tokens/s a GPU.

{parallel_rows}
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


FAMILIES_HEAD = [
    "program",
    *("rows", "median", "90th percentile", "mean"),
    *("set aside", "median", "90th percentile", "mean"),
]
GROWTH_HEAD = "program|model|tp x pp|batch|GPUs|published|predicted".split("|")
PARALLEL_HEAD = (
    "program|table|d_model|layers|GPUs|tp|pp|interleave|microbatch|sharding|checkpointing|"
    "set aside|measured|predicted|error"
).split("|")
FRONTIER_HEAD = (
    "|tp x pp|published, %|predicted, %|step, s|its bubble|between stages|exposed traffic|missing"
).split("|")
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
    """Published strong scaling on Frontier beside ours, and the seconds that are missing."""
    lines = []
    for name, run in FRONTIER.items():
        ours = strong_scaling(name, 1)
        seconds = frontier(name, 1, run.run_gcds)
        missing = seconds["step"] * (ours / run.strong_scaling - 1)
        cells = [f"{ours:.1f}"]
        cells += [f"{seconds[part]:.1f}" for part in ("step", "bubble", "between stages")]
        cells += [f"{seconds['exposed traffic']:.1f}", f"{missing:.1f}"]
        lines.append([name, f"{run.tp}x{run.pp}", run.strong_scaling, *cells])
    return markdown(FRONTIER_HEAD, lines)


# --- Runs with tensor and pipeline parallelism


def is_split(row: dict) -> bool:
    """Does the row have tensor ranks or stages, and a program that is modelled?"""
    fleet = row["run"][2]
    return fleet.tp * fleet.pp > 1 and row["program"] != parallel_runs.NOT_OURS


def families_table(rows: list[dict], current: Constants) -> str:
    """The errors by program: of the rows that the model was chosen by, and of those set aside."""
    families = {}
    for row in rows:
        if is_split(row):
            found = "programs found later" if row["set_aside"] == "program" else "first programs"
            families.setdefault(f"{found}, tp or pp", []).append(row)
    for row in rows:
        name = row["program"] if is_split(row) else f"{row['program']}, neither tp nor pp"
        families.setdefault(name, []).append(row)

    lines = []
    for name, family in families.items():
        cells = []
        for is_aside in (False, True):
            part = [row for row in family if bool(row["set_aside"]) == is_aside]
            cells += error_cells([error_of(row, current) for row in part])
        lines.append([name, *cells])
    return markdown(FAMILIES_HEAD, lines)


def error_cells(errors: list[float]) -> list[str]:
    """Number, median, 90th percentile and mean of the errors, the last with its sign."""
    if not errors:
        return ["0", "", "", ""]
    median = statistics.median(abs(error) for error in errors)
    p90 = percent(summary(errors)["p90"]) if len(errors) > 1 else ""
    return [len(errors), percent(median), p90, f"{100 * statistics.mean(errors):+.1f} %"]


def four_links_error(rows: list[dict], current: Constants) -> float:
    """The median error of BLOOM's rows if their GPUs have 4 of 12 NVLink connections."""
    errors = []
    for row in rows:
        if row["program"] == "Megatron-DeepSpeed":
            m, cfg, fleet, trainer = row["run"]
            fleet = replace(fleet, device=replace(fleet.device, link_gbs=100))
            errors.append(error_of({**row, "run": (m, cfg, fleet, trainer)}, current))
    return summary(errors)["median"]


def growth_table(rows: list[dict], current: Constants) -> str:
    """Tokens/s of a device on the largest fleet over the smallest, of otherwise equal runs.

    The batch of a device is the same, or the whole batch is.
    """
    series = {}
    for row in rows:
        m, cfg, fleet, _ = row["run"]
        per_rank = cfg.global_batch_size // fleet.dp
        layout = cfg.tp, cfg.pp, cfg.microbatch_size, cfg.activation_checkpointing
        key = row["program"], m.d_model, m.n_layers, layout
        for kind, size in (("batch grows", per_rank), ("same batch", cfg.global_batch_size)):
            series.setdefault((*key, kind, size), []).append(row)

    lines = []
    for (program, d_model, n_layers, (tp, pp, *_), kind, _), group in series.items():
        ends = [f(group, key=lambda row: row["run"][2].devices) for f in (min, max)]
        sizes = [row["run"][2].devices for row in ends]
        if sizes[1] < 2 * sizes[0]:
            continue
        measured = [row["measured"] / n for row, n in zip(ends, sizes, strict=True)]
        ours = [predicted(row, current) / n for row, n in zip(ends, sizes, strict=True)]
        figures = [percent(pair[1] / pair[0]) for pair in (measured, ours)]
        model = f"{n_layers} layers of {d_model}"
        lines.append([program, model, f"{tp}x{pp}", kind, f"{sizes[0]} to {sizes[1]}", *figures])
    return markdown(GROWTH_HEAD, lines)


def parallel_rows_table(rows: list[dict], current: Constants) -> str:
    """Every row of bench/parallel_runs.py."""
    lines = []
    for row in rows:
        fleet = row["run"][2]
        keys = "program table d_model n_layers n_devices tp pp interleave microbatch".split()
        cells = [row[key] for key in keys]
        cells += [row["sharding"], row["recompute"], row["set_aside"]]
        rate = predicted(row, current) / fleet.devices
        cells += [f"{row['measured'] / fleet.devices:,.0f}", f"{rate:,.0f}"]
        lines.append([*cells, percent(error_of(row, current))])
    return markdown(PARALLEL_HEAD, lines)


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


# --- The residuals that planning/certainty.py reads


def write_residuals(rows: list[dict], errors: list[float]) -> None:
    """measured / predicted of every row by its kind, into `certainty.RESIDUALS`."""
    lines = []
    for row, error in zip(rows, errors, strict=True):
        kind = certainty.kind_of(*row["run"][:3])
        m = row["run"][0]
        model = f"{m.n_layers} x {m.d_model}"
        lines.append({**kind, "model": model, "factor": f"{1 / (1 + error):.4f}"})
    with open(certainty.RESIDUALS, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, lines[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)


def main(argv: list[str]) -> None:
    """Fit, predict, and write the document to OUT.md, else to its place with the residuals."""
    (out,) = config.arguments(argv, "[OUT.md]") or [DOCUMENT]
    import scipy

    rows = read()
    errors = held_out_errors(rows)
    others = parallel_runs.read()
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
        n_parallel=len(others),
        families=families_table(others, current),
        four_links=percent(four_links_error(others, current)),
        growth=growth_table(others, current),
        rows=rows_table(rows, errors),
        parallel_rows=parallel_rows_table(others, current),
    )
    Path(out).write_text(document, encoding="utf-8")
    if out == DOCUMENT:
        others = [row for row in others if row["program"] != parallel_runs.NOT_OURS]
        write_residuals(rows + others, errors + [error_of(row, current) for row in others])
    print(document[: document.index("## Every row")])


if __name__ == "__main__":
    config.run(main)
