"""Trains the grid of lesson 8: four sizes x three budgets of tiny models, one line of results each.

    steps x tokens per step x FLOPs per token = budget     (flops.train_flops_per_token)

A larger model costs more FLOPs a token, so on one budget it sees fewer tokens. All models read the
bytes of Python's standard library, each byte at most once for the sizes that matter. Each run is a
cell of the grid. It trains with fsdp_train.train_step, then reads held-out files and answers the
questions of a task made from them, and adds a line to runs/lessons/8-grid.jsonl.

    python -m lessons.scaling_runs                              the grid, several minutes
    python -m lessons.scaling_runs --budget=2.7e12 --d_model=64    one more cell
    python -m lessons.scaling_runs --short                      two very short runs, for a look

A cell whose line is in the file is not trained again. The key of a line is a hash of its settings:
change one, and it is another cell. Lines are written whole, so Ctrl-C and SIGTERM lose only the
cells that are being trained.
"""

import hashlib
import itertools
import json
import math
import multiprocessing
import os
import platform
import signal
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

import config
import data
import flops
import fsdp_train
import parallel
import processes
import program
from config import Float, Int, MPTConfig, TrainConfig
from evaluation import tasks, zero_shot
from evaluation.figures import best, mean_per_token
from evaluation.label_scores import score_labels
from evaluation.score import score
from lessons.pictures import FOLDER
from program import require
from storage import files
from text import tokenizer as tokenizers
from text.prepare import prepare
from text.recipe import Recipe

GRID = FOLDER / "8-grid.jsonl"  # this machine's own
STORED = Path(__file__).parent / "8_grid.jsonl"  # the same, trained once for those without one
TASK = FOLDER / "8-questions.jsonl"

BUDGETS = (1e11, 3e11, 9e11)  # FLOPs of a run
HELD_OUT = 2.7e12  # the budget of the exercise
SHORT_BUDGET = 1e9
# {d_model: (layers, heads)}: about 10, 33, 96, 164, 252 and 632 thousand parameters.
SHAPES = {16: (2, 2), 32: (2, 2), 48: (3, 4), 64: (3, 4), 80: (3, 4), 112: (4, 8)}
WIDTHS = (16, 32, 48, 80)  # of the grid
SEEDS = (1, 2)  # all at the smallest budget, else the first

SEQ_LEN = 64  # bytes
QUESTIONS = {"n": 500, "context": 40, "length": 20}  # of evaluation/tasks.py; characters
EVERY = 10  # every 10th window of the held-out files is read
FIELDS = {"key": str, "budget": float, "n_params": int, "loss": float, "made_with": str}
PYTHON = f"Python {platform.python_version()}"  # whose library is the data


@dataclass(frozen=True)
class Cell:
    """One run of the grid."""

    budget: float  # FLOPs
    d_model: int
    seed: int = 1

    @property
    def model(self) -> MPTConfig:
        """The model's settings: without biases, with ALiBi, a vocabulary of bytes."""
        n_layers, n_heads = SHAPES[self.d_model]
        sizes = {"d_model": self.d_model, "n_heads": n_heads, "n_layers": n_layers}
        sizes |= {"max_seq_len": SEQ_LEN, "vocab_size": 257}  # bytes, and end-of-text
        return MPTConfig(**sizes, alibi=True, no_bias=True)

    @property
    def rows(self) -> int:
        """Rows of a batch, in proportion to the square root of the tokens."""
        tokens = self.budget / flops.train_flops_per_token(self.model)
        return max(1, round(math.sqrt(tokens) / 75))

    @property
    def steps(self) -> int:
        """As many as the budget pays for."""
        return round(self.budget / flops.train_flops_per_token(self.model) / self.rows / SEQ_LEN)

    @property
    def train(self) -> TrainConfig:
        """The settings of the run."""
        return TrainConfig(
            dataset="stdlib",
            tokenizer="bytes",
            data_dir=str(FOLDER / "8-data"),
            val_fraction=0.05,
            device="cpu",
            precision="fp32",
            compile=False,
            seed=self.seed,
            global_batch_size=self.rows,
            microbatch_size=self.rows,
            max_steps=self.steps,
            warmup_steps=max(1, self.steps // 10),
            lr=0.32 / self.d_model,
        )

    @property
    def key(self) -> str:
        """A hash of all settings that change the result."""
        run = asdict(self.train) | {"data_dir": ""}
        settings = [asdict(self.model), run, self.budget, QUESTIONS, EVERY]
        return hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:12]


def grid() -> list[Cell]:
    """The cells of the lesson, the cheap ones first."""
    cells = [Cell(budget, width) for budget, width in itertools.product(BUDGETS, WIDTHS)]
    cells += [Cell(BUDGETS[0], width, seed) for seed in SEEDS[1:] for width in WIDTHS]
    return sorted(cells, key=lambda cell: cell.budget)


def tokens_for(budget: float, n_params: float) -> float:
    """The tokens that a budget pays for with a model of this size, between the sizes of SHAPES."""
    models = [Cell(budget, width).model for width in SHAPES]
    sizes = [flops.n_params(model) for model in models]
    costs = [flops.train_flops_per_token(model) for model in models]  # close to a power law
    return float(budget / np.exp(np.interp(np.log(n_params), np.log(sizes), np.log(costs))))


# --------------------------------------------------------------------------------------------------
# One cell


def train_cell(cell: Cell) -> dict:
    """Train a cell, measure it, and return its line."""
    begin, used = time.perf_counter(), time.process_time()
    model_cfg, cfg = cell.model, cell.train
    world = processes.World(0, 1, 0, 1, torch.device("cpu"))
    dataset = data.Dataset([Recipe(cfg).folder], model_cfg)
    model, optimizer = parallel.build(model_cfg, cfg, world, "fp32", cfg.seed)
    for step, rows in dataset.batches(range(cfg.max_steps), cfg, world):
        train_loss, _, _ = fsdp_train.train_step(model, optimizer, rows, step, cfg, world, "fp32")
    require(bool(train_loss.isfinite()), f"the loss of {cell} is not finite: lower its lr")

    documents = read_held_out(model.eval(), dataset.parts[0].val)
    right = answer_questions(model, world)
    return {
        "key": cell.key,
        "budget": cell.budget,
        "d_model": cell.d_model,
        "seed": cell.seed,
        "n_params": flops.n_params(model_cfg),
        "tokens": cfg.max_steps * cfg.global_batch_size * SEQ_LEN,
        "loss": round(float(documents[:, 0].sum() / documents[:, 1].sum()), 5),  # nats per byte
        "accuracy": round(sum(right) / len(right), 5),
        "right": "".join(str(int(answer)) for answer in right),
        "documents": [[round(float(nats), 1), int(count)] for nats, count in documents],
        "seconds": round(time.perf_counter() - begin, 1),
        "processor_seconds": round(time.process_time() - used, 1),
        "data": dataset.fingerprint,
        "made_with": f"torch {torch.__version__}, {PYTHON}",
    }


@torch.no_grad()
def read_held_out(model, val: data.Split) -> np.ndarray:
    """(nats, bytes) of each held-out file, (documents, 2), over every EVERY-th window of them.

    A file ends with its end-of-text, which counts as a byte.
    """
    windows = val.windows(np.arange(len(val)))  # (n, T + 1)
    ends = windows[:, 1:] == val.vocab_size - 1
    # The number of the file that each byte is from: files that ended before it.
    ended_before = (ends.cumsum() - ends.ravel()).reshape(ends.shape)
    sums = np.zeros((ended_before.max() + 1, 2))
    for chosen in np.array_split(np.arange(0, len(val), EVERY), max(1, len(val) // EVERY // 128)):
        ids, labels = data.inputs_and_labels(torch.from_numpy(windows[chosen]))
        log_probs, _ = model(ids, labels=labels, head=score_labels)
        np.add.at(sums[:, 0], ended_before[chosen], -log_probs.double().numpy())
        np.add.at(sums[:, 1], ended_before[chosen], 1)
    return sums[sums[:, 1] > 0]


def answer_questions(model, world) -> list[bool]:
    """Which questions of the task the model answers right, by LLM Foundry's rule."""
    task = tasks.load(str(TASK))[0]
    tokenizer = tokenizers.load("bytes")
    pairs = zero_shot.pairs_of(task, tokenizer, SEQ_LEN)
    requests, _ = zero_shot.encode(pairs, tokenizer, task.name, model.cfg)
    values = score(model, requests, world, "fp32", batch_tokens=16384).tolist()
    counts = [request.count for request in requests]
    scores = {pair: (*value, n) for pair, value, n in zip(pairs, values, counts, strict=True)}
    return [best(mean_per_token(item, scores)) == item.gold for item in task.items]


# --------------------------------------------------------------------------------------------------
# Many cells


def make_data_and_task() -> None:
    """Make the data set and the task, unless they are there."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    folder = prepare(Cell(BUDGETS[0], WIDTHS[0]).train)
    rows = tasks.continuations(tasks.text_of(str(folder)), tasks.MakeConfig(**QUESTIONS))
    content = "".join(json.dumps(row) + "\n" for row in rows)
    files.write_atomically(TASK, content.encode())


def read(path: Path) -> list[dict]:
    """The lines of a grid; none if there is no such file. UserError if one is damaged."""
    if not path.exists():
        return []
    rows, faults = files.read_json_lines(path, FIELDS)
    require(not faults, f"{path}: {faults and faults[0]}: delete that line")
    return rows


def own_runs() -> list[dict]:
    """The lines of this machine's grid that this Python made: another has another library."""
    return [row for row in read(GRID) if row["made_with"].endswith(PYTHON)]


def add(row: dict) -> None:
    """Add a line to this machine's grid: the file is replaced as a whole."""
    content = "".join(json.dumps(known) + "\n" for known in [*read(GRID), row])
    files.write_atomically(GRID, content.encode())


def train_cells(cells: list[Cell]) -> None:
    """Train those of these cells that are not in the grid, and add them to it.

    Two processes train, with half of the cores each: tiny matmuls gain little from more threads.
    """
    make_data_and_task()
    done = {row["key"] for row in own_runs()}
    missing = [cell for cell in cells if cell.key not in done]
    print(f"{len(cells)} runs, {len(cells) - len(missing)} of them done before", flush=True)
    n_workers = min(2, os.cpu_count() or 1)
    threads = max(1, torch.get_num_threads() // n_workers)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(n_workers, context, start_worker, (threads,)) as pool:
        try:
            runs = [pool.submit(train_cell, cell) for cell in missing]
            for number, run in enumerate(as_completed(runs), 1):
                add(run.result())
                print(f"{number:3}/{len(missing)}  {describe(run.result())}", flush=True)
        except BaseException:  # Ctrl-C, or a cell that fails: the others are not waited for
            for process in multiprocessing.active_children():
                process.kill()
            raise
    print(f"runs/lessons/{GRID.name} has all {len(cells)}")


def start_worker(threads: int) -> None:
    """Begin a process that trains. It ends with its parent, which hears Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    program.end_with_parent()
    torch.set_num_threads(threads)


def describe(row: dict) -> str:
    """A line of results in words."""
    return (
        f"{row['budget']:.1e} FLOPs: {row['n_params']:7,} parameters x {row['tokens']:10,} bytes, "
        f"seed {row['seed']}: {row['loss']:.3f} nats per byte, {row['accuracy']:5.1%} right, "
        f"{row['seconds']:3.0f} s"
    )


@dataclass
class RunsArgs:
    """Which cell to train."""

    budget: Float[1e8, 1e15] = 0.0  # FLOPs of one more run; 0: the whole grid
    d_model: Int[1, 2**20] = 0  # its width, one of SHAPES
    seed: Int[0, 10**18] = 1  # its seed
    short: bool = False  # two very short runs

    def check(self) -> None:
        """UserError for a run that is none."""
        if self.budget or self.d_model:
            require(1e8 <= self.budget <= 1e15, "--budget must be 1e8 to 1e15 FLOPs")
            widths = ", ".join(map(str, SHAPES))
            require(self.d_model in SHAPES, f"--d_model must be one of {widths}")


def main(argv: list[str]) -> None:
    """Train the grid, or one more cell."""
    (args,) = config.load(argv, RunsArgs)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exception, so that workers end
    cells = grid()
    if args.budget:
        cells = [Cell(args.budget, args.d_model, args.seed)]
    if args.short:
        cells = [Cell(SHORT_BUDGET, width) for width in WIDTHS[:2]]
    train_cells(cells)


if __name__ == "__main__":
    program.run(main)
