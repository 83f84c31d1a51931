"""The training step: tokens/s, MFU and memory at any settings.

    python -m bench train                          a small model
    python -m bench train --sizes=125m,350m,760m,1b --grad_accum=2 --out=mine.csv
    python -m bench train configs/mpt1b.py --sweep="microbatch_size=4,8 compile=false,true"
    python -m bench train --alternate --sweep="tp=1,2 pp=1,2"   two ways to use two or four ranks
    torchrun --nnodes 2 --nproc_per_node 8 ... -m bench train configs/mpt7b.py --out=mine.csv

    MFU = (6 N + 12 L d S) x tokens/s / (devices x peak)    flops.py; HFU counts recomputation too

Each setting is a row of the results. A row runs in processes of its own, so its peak memory is its
own, and one that runs out of memory does not stop the others. With --alternate all rows take turns,
so that other load on the machine slows all of them. The data are random tokens; figures are medians
over the turns. `python -m bench beside` lets other people's programs take turns with ours.

With --out, the rows are kept in a CSV. Use one for each machine. A row whose command is in the CSV
already is not measured again. `python -m bench compare` shows a CSV.

Under torchrun a launch measures one row, in its processes, and one that fails is not kept: start it
once for each.

--profile=trace keeps a trace of two more steps, trace-1.json of the first row, for ui.perfetto.dev:
where the time of data, forward, backward and optimizer goes, kernel by kernel.
"""

import datetime
import itertools
import math
import os
import statistics
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

import config
import data
import devices
import flops
import fsdp_train
import parallel
import processes
import program
from bench import compare
from config import Int, MPTConfig, TrainConfig
from launch import parser
from launch.pool import Pool, PoolError
from lifecycle import compiling, runlog
from program import require

# The small model that is measured when no config is given.
SHAPE = """
    --n_layers=6 --n_heads=6 --d_model=384 --max_seq_len=256 --vocab_size=256 --alibi --no_bias
    --global_batch_size=8 --microbatch_size=8 --grad_clip=0 --peak_tflops=measure
""".split()

# Columns of the CSV: settings of the model, settings of the run, and what is measured.
MODEL_SETTINGS = "d_model n_layers n_heads max_seq_len vocab_size attn_impl".split()
RUN_SETTINGS = """
    precision sharding shard_size activation_checkpointing recompute_every compile microbatch_size
""".split()
FIGURES = """
    tokens_per_second fastest slowest tokens_per_second_device tflops_device peak_tflops
    mfu hfu convention memory_gb
""".split()


@dataclass
class BenchArgs:
    """What to measure, and how long."""

    sizes: str = ""  # recipes, each a row: 125m,1b are configs/mpt125m.py and configs/mpt1b.py
    sweep: str = ""  # settings to combine, each a row: "microbatch_size=4,8 compile=false,true"
    grad_accum: Int[1, 10**6] = 0  # microbatches per step and rank; sets global_batch_size
    ranks: Int[1, 10**6] = 0  # processes on this machine (0: one for each GPU, else tp x pp)
    threads: Int[1, 10**4] = 0  # threads per process on a CPU (0: share the cores)
    alternate: bool = False  # all rows take turns; their processes need memory at the same time
    rounds: Int[1, 10**6] = 5  # turns of each row; the median counts
    steps: Int[1, 10**6] = 4  # optimizer steps per turn
    out: str = ""  # CSV of the results
    profile: str = ""  # keep Chrome traces: NAME-1.json of the first row, NAME-2.json, ...

    def check(self) -> None:
        """UserError if the results are no table."""
        is_csv = self.out.endswith(".csv") or not self.out
        require(is_csv, f"--out={self.out}: give the name of a .csv file")


# --- The step, in one process


class Step:
    """This project's training step on random tokens, as one rank runs it."""

    def __init__(self, model_cfg: MPTConfig, cfg: TrainConfig):
        self.model_cfg = model_cfg
        self.world = processes.start(cfg.device, tp=cfg.tp, pp=cfg.pp)
        self.device = self.world.device
        self.precision = parallel.choose_precision(cfg, self.device)
        compiles = compiling.choose(model_cfg, cfg, self.world, self.precision)
        self.cfg = replace(cfg, compile=compiles)

        dtype = parallel.DTYPES[self.precision]
        self.peak = devices.peak_flops(cfg.peak_tflops, self.device, dtype)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()  # forget what measuring the peak rate has used
        self.model, self.optimizer = parallel.build(
            model_cfg, self.cfg, self.world, self.precision, cfg.seed
        )
        rows = cfg.global_batch_size // self.world.dp_size
        self.batches = random_batches(model_cfg, rows, self.device)

    def step(self, number: int, rows):
        """One optimizer step on rows (B, T + 1); returns the loss, which is still on the device."""
        loss, *_ = fsdp_train.train_step(
            self.model, self.optimizer, rows, number, self.cfg, self.world, self.precision
        )
        return loss

    def turn(self, steps: int) -> float:
        """Seconds that this many steps take. The device is idle before and after them."""
        begin = time.perf_counter()
        for _ in range(steps):
            with record_function("data"):
                number, rows = next(self.batches)
            loss = self.step(number, rows)
        loss.item()  # waits for the device
        return time.perf_counter() - begin

    def profile_steps(self, steps: int, trace: str) -> None:
        """Write the Chrome trace of this many steps to a file, on rank 0."""
        activities = [ProfilerActivity.CPU]
        if self.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        with profile(activities=activities) as profiler:
            self.turn(steps)
        if self.world.global_rank == 0:
            Path(trace).parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(trace)

    def describe(self) -> dict:
        """What only the running process knows. peak: FLOP/s; memory_gb: the most so far."""
        impl = parallel.attention_of(self.model_cfg, self.device, self.precision)
        return {
            "device": devices.describe(self.device),
            "nodes": self.world.global_size // self.world.local_size,
            "precision": self.precision,
            "compile": self.cfg.compile,
            "attn_impl": impl if impl == self.model_cfg.attn_impl else f"auto ({impl})",
            "peak": self.peak,
            "memory_gb": runlog.memory_gb(self.device),
        }


def random_batches(m: MPTConfig, rows: int, device: torch.device):
    """Yield (step, ids (rows, T + 1)) forever: one random batch, copied ahead of time."""
    generator = torch.Generator().manual_seed(0)
    batch = torch.randint(m.vocab_size, (rows, m.max_seq_len + 1), generator=generator).numpy()
    return data.prefetch(lambda step: batch, itertools.count(), device)


# --- Rows


class Launched:
    """The ranks that torchrun or srun has started, called as a Pool is."""

    def __init__(self, start, *args):
        self.state = start(*args)

    def __call__(self, function, *args) -> list:
        """function(state, *args) of all ranks."""
        answers = [None] * dist.get_world_size()
        dist.all_gather_object(answers, function(self.state, *args))
        return answers


def launched() -> int:
    """How many processes torchrun or srun has started; 0: none, or only this one."""
    _, size, _, _ = program.read_launcher()
    return size if size > 1 else 0


class Row:
    """The step at one setting: a row of the results.

    number: position among the rows that were asked for, from 1.
    ranks: one process each; dp_ranks: the data-parallel ones, which share the batch.
    rates: tokens/s of each turn; the first turn warms up.
    columns: the row's line of the CSV, {column: value}.
    """

    def __init__(self, number: int, argv: list[str], model: str):
        self.number = number
        self.pool = None  # started by the first call
        self.rates = []
        self.model_cfg, self.cfg, self.args = config.load(argv, MPTConfig, TrainConfig, BenchArgs)
        self.choose_processes()
        self.choose_batch()
        self.columns = self.settings(argv, model)

    def choose_processes(self) -> None:
        """Set ranks, and threads of a process. UserError if the model cannot be cut for them."""
        gpus = 0 if self.cfg.device == "cpu" else torch.cuda.device_count()
        tp, pp = self.cfg.tp, self.cfg.pp
        self.ranks = launched() or self.args.ranks or gpus or tp * pp
        parallel.check(self.model_cfg, self.cfg)
        problem = f"--ranks={self.ranks} is not a multiple of tp {tp} x pp {pp} = {tp * pp}"
        require(self.ranks % (tp * pp) == 0, problem)
        self.dp_ranks = self.ranks // (tp * pp)
        sharing = 1 if launched() else self.ranks  # torchrun has divided the cores already
        self.threads = self.args.threads or max(1, torch.get_num_threads() // sharing)

    def choose_batch(self) -> None:
        """Set the batch by grad_accum. UserError if the ranks cannot share it."""
        cfg = self.cfg
        fix = "set --microbatch_size=NUMBER, or sweep several"
        require(cfg.microbatch_size != "auto", f"a row has one microbatch: {fix}")
        if self.args.grad_accum:
            cfg.global_batch_size = self.args.grad_accum * cfg.microbatch_size * self.dp_ranks
        batch = cfg.global_batch_size
        problem = f"global_batch_size {batch} is not a multiple of the {self.dp_ranks} "
        require(batch % self.dp_ranks == 0, f"{problem}data-parallel ranks")

    def settings(self, argv: list[str], model: str) -> dict:
        """The columns before the measurement: settings, and empty figures."""
        m, cfg = self.model_cfg, self.cfg
        columns = {
            "time": datetime.datetime.now().isoformat(timespec="seconds"),
            "command": f"python -m bench train {program.shell(*argv)}",
            "status": "ok",
            "model": model or f"{m.n_layers}x{m.d_model}",
            "n_params": flops.n_params(m),
        }
        columns |= {key: getattr(m, key) for key in MODEL_SETTINGS}
        columns |= {"device": "", "nodes": "", "ranks": self.ranks, "threads": self.threads}
        columns |= {"torch": torch.__version__}
        columns |= {key: getattr(cfg, key) for key in RUN_SETTINGS}
        rows_per_rank = cfg.global_batch_size // self.dp_ranks
        columns |= {
            "grad_accum": math.ceil(rows_per_rank / cfg.microbatch_size),
            "global_batch_size": cfg.global_batch_size,
            "others": "",
        }
        columns |= dict.fromkeys(FIGURES, "")
        columns["others"] = self.other_settings(columns)
        return columns

    def other_settings(self, columns: dict) -> str:
        """Settings without a column of their own that differ from their defaults: `a=1 b=2`."""
        changed = []
        for part in (self.model_cfg, self.cfg):
            for name, default in vars(type(part)()).items():
                value = getattr(part, name)
                if name not in columns and value != default:
                    changed.append(f"{name}={value}")
        return " ".join(changed)

    def is_in(self, lines: list[dict]) -> dict | None:
        """The line of a CSV that this row's command has written here, if its status is final.

        An error such as a missing package is not final.
        """
        keys = ("command", "ranks", "torch")
        for line in lines:
            is_final = line["status"].startswith(("ok", "out of memory", "killed"))
            if is_final and all(line[key] == str(self.columns[key]) for key in keys):
                return line
        return None

    def is_ok(self) -> bool:
        """Whether nothing has failed yet."""
        return self.columns["status"] == "ok"

    def call(self, method, *args) -> list | None:
        """The answer of each process. If one fails: None, and `status` says why."""
        try:
            if self.pool is None:
                self.pool = self.start()
            return self.pool(method, *args)
        except PoolError as error:
            self.columns["status"] = str(error)
            print(f"  {self.columns['model']}: {error}", file=sys.stderr, flush=True)
            return None

    def start(self):
        """The processes of the row, each with a Step."""
        if not launched():
            return Pool(self.ranks, Step, self.model_cfg, self.cfg, threads=self.threads)
        torch.set_num_threads(self.threads)
        return Launched(Step, self.model_cfg, self.cfg)

    def turn(self) -> None:
        """Measure one turn; the slowest rank decides."""
        seconds = self.call(Step.turn, self.args.steps)
        if seconds:
            tokens = self.args.steps * self.cfg.global_batch_size * self.model_cfg.max_seq_len
            self.rates.append(tokens / max(seconds))

    def finish(self) -> None:
        """Profile two steps if asked to, fill in the figures, and end the processes."""
        if self.args.profile:
            self.call(Step.profile_steps, 2, f"{self.args.profile}-{self.number}.json")
        answers = self.call(Step.describe) if self.is_ok() else None
        if not answers:
            return
        if not launched():
            self.pool.stop()

        rank_0 = answers[0]
        for key in ("device", "nodes", "precision", "compile", "attn_impl"):
            self.columns[key] = rank_0[key]
        memory_gb = max(answer["memory_gb"] for answer in answers)
        self.columns |= self.speeds(rank_0["peak"]) | {"memory_gb": memory_gb}

    def speeds(self, peak: float | None) -> dict:
        """Tokens/s, TFLOP/s, MFU and HFU. peak: FLOP/s of a device, or None if unknown."""
        rates = self.rates[1:]  # the first turn warmed up
        rate = statistics.median(rates)
        flops_per_token, with_recomputed = flops.flops_of(self.model_cfg, train=self.cfg)
        return {
            "tokens_per_second": rate,
            "fastest": max(rates),
            "slowest": min(rates),
            "tokens_per_second_device": rate / self.ranks,
            "tflops_device": rate / self.ranks * flops_per_token / 1e12,
            "peak_tflops": peak and peak / 1e12,
            "mfu": flops.utilization(flops_per_token, rate, self.ranks, peak),
            "hfu": flops.utilization(with_recomputed, rate, self.ranks, peak),
            "convention": flops.convention_of(self.cfg),
        }


def groups(argv: list[str]) -> list[list[Row]]:
    """The rows that the command line asks for, in groups whose rows take turns."""
    argv = parser.join_flags(argv, MPTConfig, TrainConfig, BenchArgs)
    flags = [word for word in argv if not word.startswith(("--sweep=", "--sizes="))]
    *_, args = config.load(SHAPE + argv, MPTConfig, TrainConfig, BenchArgs)
    given = [word for word in flags if not word.startswith("-")]
    require(not (given and args.sizes), "give a config file or --sizes, not both")
    recipes = [f"configs/mpt{size}.py" for size in args.sizes.split(",") if size]

    rows = []
    for recipe, swept in itertools.product(recipes or [None], combinations(args.sweep)):
        if recipe:
            base, model = [recipe], Path(recipe).stem
        elif given:  # the config file is one of the flags
            base, model = [], Path(given[-1]).stem
        else:
            base, model = SHAPE, ""
        rows.append(Row(len(rows) + 1, base + flags + swept, model))

    message = "under torchrun a launch measures one row: start it once for each"
    require(len(rows) == 1 or not launched(), message)
    return [rows] if args.alternate else [[row] for row in rows]


def combinations(sweep: str) -> list[list[str]]:
    """`a=1,2 b=3,4` -> the flags of every combination: [--a=1, --b=3], ..."""
    choices = []
    for part in sweep.split():
        key, equals, values = part.partition("=")
        example = "such as microbatch_size=4,8"
        require(equals and values, f"--sweep wants settings with values, {example}, not {part!r}")
        choices.append([f"--{key}={value}" for value in values.split(",")])
    return [list(flags) for flags in itertools.product(*choices)]


# --- The program


def main(argv) -> None:
    """Measure the rows that are not in the CSV yet, then print a table of all rows asked for."""
    wanted = groups(argv)
    args = wanted[0][0].args
    kept = compare.read(args.out) if os.path.exists(args.out) else []
    same_columns = not kept or list(kept[0]) == list(wanted[0][0].columns)
    fix = "name another file"
    require(same_columns, f"{args.out} has other columns than `bench train` writes: {fix}")

    lines = []
    for group in wanted:
        known = {row: row.is_in(kept) for row in group}
        new = [row for row in group if not known[row]]
        if new:
            measure(new)
        lines += [known[row] or as_text(row.columns) for row in group]
    if program.rank() == 0:
        print(f"{how_measured(argv, args)}\n\n{compare.tables(lines, args.out or 'the results')}")
        any_ok = any(line["status"] == "ok" for line in lines)
        require(any_ok, f"nothing could be measured: {lines[0]['status']}")


def as_text(columns: dict) -> dict[str, str]:
    """A row as it would be read from the CSV."""
    return {name: "" if value is None else str(value) for name, value in columns.items()}


def measure(rows: list[Row]) -> None:
    """Let the rows take turns, then complete each and add it to the CSV."""
    rounds, rank = rows[0].args.rounds, program.rank()
    for turn in range(rounds + 1):
        for row in rows:
            if row.is_ok():
                row.turn()
        if rank == 0:
            names = " and ".join(f"row {row.number}, {row.columns['model']}" for row in rows)
            print(f"  {names}: turn {turn} of {rounds}", file=sys.stderr, flush=True)

    for row in rows:
        if row.is_ok():
            row.finish()
        if row.args.out and rank == 0:
            compare.append(row.args.out, row.columns)


def how_measured(argv: list[str], args: BenchArgs) -> str:
    """The command, the versions and the method, in a few sentences."""
    command = f"python -m bench train {program.shell(*argv)}"
    return (
        f"`{command}`, {datetime.date.today()}, torch {torch.__version__}, median of "
        f"{args.rounds} turns of {args.steps} steps on random tokens. MFU: {flops.CONVENTION}; "
        "HFU counts recomputation too."
    )


if __name__ == "__main__":
    processes.run(main)
