"""The training step: tokens/s, MFU, memory and where the time goes, over any settings.

    python -m bench train --transformers           a small shape, beside Hugging Face's
    python -m bench train --sizes=125m,350m,760m,1b --grad_accum=2 --out=bench/results/mine.csv
    python -m bench train configs/mpt1b.py --sweep="microbatch_size=4,8 compile=false,true"
    torchrun --nnodes 2 --nproc_per_node 8 ... -m bench train configs/mpt7b.py --out=mine.csv

    MFU = (6 N + 12 L d S) x tokens/s / (devices x peak)    flops.py; HFU counts recomputation too

Each row is measured in processes of its own (bench/team.py), so its peak memory is its own, and one
that runs out of memory is noted and the others go on. Rows that are compared (`--transformers`,
`--alternate`) take turns, so what else the machine does hits all; figures are medians of the turns,
on random tokens. With --out rows are kept in a CSV, one for a machine, with tables (.md) and a
picture (.png) beside it, and what is there already is not measured again. Under torchrun rows share
their processes, so only the first row's peak is its own on a CPU, and a row that runs out of memory
ends the program: with --max-restarts it goes on after that row.

Where the time goes is read from a profile of other steps: GPU work belongs to the part of the step
that launched it, and while nothing runs the GPU is idle. Communication runs beside computing, so
the shares may add up to more than 1. Read next: bench/team.py.
"""

import bisect
import csv
import datetime
import importlib.util
import itertools
import json
import math
import os
import re
import shlex
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

import attention
import config
import data
import devices
import flops
import fsdp_train
import parallel
import processes
from bench.table import PARTS, draw, read, tables
from bench.team import KILLED, Launched, Team, TeamError, launched
from config import MPTConfig, TrainConfig, require
from lifecycle import runlog
from program import RESUME_ME

SHAPE = [
    *(
        "--n_layers=6",
        "--n_heads=6",
        "--d_model=384",
        "--max_seq_len=256",
        "--vocab_size=256",
        "--alibi",
        "--no_bias",
    ),
    *("--global_batch_size=8", "--microbatch_size=8", "--grad_clip=0", "--peak_tflops=measure"),
]
FIGURES = [
    *(
        "tokens_per_second",
        "fastest",
        "slowest",
        "tokens_per_second_device",
        "tflops_device",
        "peak_tflops",
    ),
    *("mfu", "hfu", "convention", "memory_gb", *PARTS, "communication", "idle"),
]


@dataclass
class BenchArgs:
    """What to measure, and how long."""

    sizes: str = ""  # recipes, each a row: 125m,1b are configs/mpt125m.py and configs/mpt1b.py
    sweep: str = ""  # settings to vary, all combinations, each a row: "microbatch_size=4,8 compile=false,true"
    grad_accum: int = 0  # microbatches of a step and rank; sets global_batch_size (0: it stays)
    ranks: int = 0  # processes on this machine (0: one for each GPU, else one)
    threads: int = 0  # of a process on a CPU (0: share the cores)
    transformers: bool = False  # measure Hugging Face's model beside each row
    alternate: bool = (
        False  # let all rows take turns, not one after the other: they need memory at the same time
    )
    rounds: int = 5  # turns of each row; the median counts
    steps: int = 4  # optimizer steps of a turn
    out: str = ""  # CSV of the results
    profile: str = (
        ""  # keep the profiles as Chrome traces: this name, -1.json for the first row, -2.json ...
    )

    def check(self) -> None:
        require(self.rounds > 0 and self.steps > 0, "rounds and steps must be at least 1")
        require(
            self.ranks >= 0 and self.threads >= 0 and self.grad_accum >= 0,
            "ranks, threads, grad_accum: 0 or more",
        )
        require(
            self.out.endswith(".csv") or not self.out,
            f"--out={self.out}: the name of a .csv file is wanted",
        )


# ---------------------------------------------------------------------------------------------------------------
# One program in one process


class Ours:
    """This project's training step on random tokens."""

    def __init__(self, model_cfg: MPTConfig, cfg: TrainConfig):
        self.model_cfg, self.cfg, self.world = model_cfg, cfg, processes.start(cfg.device)
        self.precision = parallel.choose_precision(cfg, self.world.device)
        self.peak = devices.peak_flops(
            cfg.peak_tflops, self.world.device, parallel.DTYPES[self.precision]
        )
        if self.world.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()  # measuring the peak rate needs memory, too
        self.build()
        shape = (cfg.global_batch_size // self.world.dp_size, model_cfg.max_seq_len + 1)
        random = torch.randint(model_cfg.vocab_size, shape).numpy()
        self.batches = data.prefetch(lambda step: random, itertools.count(), self.world.device)

    def build(self):
        how = (self.cfg, self.world, self.precision, self.cfg.seed)
        self.model, self.optimizer = parallel.build(self.model_cfg, *how)

    def step(self, number, rows):
        """One update; returns the loss, which is still on the device."""
        args = (self.model, self.optimizer, rows, number, self.cfg, self.world, self.precision)
        return fsdp_train.train_step(*args)[0]

    def turn(self, steps: int) -> float:
        """Seconds of so many steps, from an idle device to an idle device."""
        begin = time.perf_counter()
        for _ in range(steps):
            with record_function("data"):
                number, rows = next(self.batches)
            loss = self.step(number, rows)
        loss.item()
        return time.perf_counter() - begin

    def split(self, steps: int, trace: str) -> dict:
        """Where the time of so many steps goes; rank 0 keeps the profile in the file `trace`, if that is a name."""
        gpu = [ProfilerActivity.CUDA] if self.world.device.type == "cuda" else []
        with profile(activities=[ProfilerActivity.CPU, *gpu]) as profiler:
            self.turn(steps)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(
                trace if trace and self.world.global_rank == 0 else Path(folder) / "trace.json"
            )
            path.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(path))
            return time_split(json.loads(path.read_text())["traceEvents"])

    def attention(self) -> str:
        """The implementation, and what `auto` chose."""
        cfg, dtype = self.model_cfg, parallel.DTYPES[self.precision]
        kind = self.world.device.type
        chosen = attention.choose(
            cfg.attn_impl, kind, dtype, cfg.head_dim, cfg.alibi, cfg.attn_pdrop
        )
        return chosen if chosen == cfg.attn_impl else f"auto ({chosen})"

    def about(self) -> dict:
        """What only a process of the row can tell."""
        return {
            "device": devices.describe(self.world.device),
            "nodes": self.world.global_size // self.world.local_size,
            "precision": self.precision,
            "attn_impl": self.attention(),
            "peak": self.peak,
            "memory_gb": runlog.memory_gb(self.world.device),
        }


class Theirs(Ours):
    """The same for transformers' MptForCausalLM (always ALiBi, no biases) with PyTorch's AdamW, one whole batch."""

    def build(self):
        from transformers import MptConfig, MptForCausalLM

        names = ("d_model", "n_heads", "n_layers", "max_seq_len", "vocab_size")
        sizes = {name: getattr(self.model_cfg, name) for name in names}
        self.model = MptForCausalLM(MptConfig(**sizes)).to(self.world.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.cfg.lr)
        if self.cfg.compile:
            self.model.compile()

    def attention(self) -> str:
        return f"{self.model_cfg.attn_impl} (its own)"

    def step(self, number, rows):
        with record_function("forward"), parallel.autocast(self.world.device, self.precision):
            loss = self.model(rows[:, :-1], labels=rows[:, :-1]).loss  # it shifts the labels itself
        with record_function("backward"):
            loss.backward()
        with record_function("optimizer"):
            self.optimizer.step()
            self.optimizer.zero_grad()
        return loss.detach()


def time_split(events: list[dict]) -> dict[str, float | None]:
    """Shares of the time for PARTS, for communication and for nothing, from the events of a Chrome trace of some steps.

    On a GPU a kernel belongs to the region in which it was launched, by whatever thread: the backward has its own. If
    the trace does not tell, the shares are None. Without a GPU the regions themselves count, and gloo's collectives.
    """
    spans = [event for event in events if event.get("ph") == "X"]
    regions = sorted((e["ts"], e["ts"] + e["dur"], e["name"]) for e in spans if is_region(e))
    launches = {
        e["args"]["correlation"]: e["ts"]
        for e in spans
        if re.search("_(runtime|driver)$", e.get("cat", "")) and "correlation" in e.get("args", {})
    }
    busy = {part: [] for part in [*PARTS, "communication"]}
    on_gpu = [e for e in spans if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    for event in on_gpu:
        moment = launches.get(event["args"].get("correlation"), -1)
        place = bisect.bisect(regions, (moment, float("inf"))) - 1
        inside = place >= 0 and regions[place][0] <= moment <= regions[place][1]
        part = (
            "communication"
            if "nccl" in event["name"].lower()
            else regions[place][2]
            if inside
            else None
        )
        if part:
            busy[part].append((event["ts"], event["ts"] + event["dur"]))
    if not on_gpu:
        for begin, end, part in regions:
            busy[part].append((begin, end))
        busy["communication"] = [
            (e["ts"], e["ts"] + e["dur"]) for e in spans if e["name"].startswith("gloo:")
        ]
    every = [span for part in busy.values() for span in part]
    if not every:
        return dict.fromkeys([*busy, "idle"])
    whole = max(end for _, end in every) - min(begin for begin, _ in every)
    return {part: covered(intervals) / whole for part, intervals in busy.items()} | {
        "idle": 1 - covered(every) / whole
    }


def is_region(event) -> bool:
    """Is this event of a profile one of the step's named parts?"""
    return event["name"] in PARTS and event.get("cat") == "user_annotation"


def covered(intervals) -> float:
    """Length of the union of intervals (begin, end)."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


# ---------------------------------------------------------------------------------------------------------------
# Rows


class Row:
    """One program at one setting, the `number`-th row. `columns` is its line of the CSV."""

    def __init__(self, number: int, argv: list[str], model: str, program=Ours):
        self.number = number
        self.model_cfg, self.cfg, self.args = config.load(argv, MPTConfig, TrainConfig, BenchArgs)
        self.program, self.team, self.rates = program, None, []
        m, t, a = self.model_cfg, self.cfg, self.args
        self.ranks = (
            launched() or a.ranks or (0 if t.device == "cpu" else torch.cuda.device_count()) or 1
        )
        self.threads = a.threads or max(
            1, torch.get_num_threads() // (1 if launched() else self.ranks)
        )
        if a.grad_accum:
            t.global_batch_size = a.grad_accum * t.microbatch_size * self.ranks
        per_rank, rest = divmod(t.global_batch_size, self.ranks)
        require(
            rest == 0,
            f"global_batch_size {t.global_batch_size} is not a multiple of the {self.ranks} ranks",
        )
        if program is Theirs:
            require(
                self.ranks == 1, "transformers' model is measured in one process: set --ranks=1"
            )
            t.microbatch_size, t.activation_checkpointing = t.global_batch_size, "none"
        names = "sharding shard_size activation_checkpointing recompute_every compile microbatch_size".split()
        require(
            t.microbatch_size != "auto",
            "a row has one microbatch: set --microbatch_size=NUMBER, or sweep several",
        )
        self.columns = {
            "time": datetime.datetime.now().isoformat(timespec="seconds"),
            "command": f"python -m bench train {shlex.join(argv)}",
            "status": "ok",
            "model": ("transformers " if program is Theirs else "")
            + (model or f"{m.n_layers}x{m.d_model}"),
            "n_params": flops.n_params(m),
            **{
                name: getattr(m, name)
                for name in "d_model n_layers n_heads max_seq_len vocab_size attn_impl".split()
            },
            **{
                "device": "",
                "nodes": "",
                "ranks": self.ranks,
                "threads": self.threads,
                "torch": torch.__version__,
            },
            **{"precision": t.precision, **{name: getattr(t, name) for name in names}},
            **{
                "grad_accum": math.ceil(per_rank / t.microbatch_size),
                "global_batch_size": t.global_batch_size,
            },
            "others": "",
            **dict.fromkeys(FIGURES, ""),
        }
        every = [
            (f, getattr(part, f.name))
            for part in (m, t)
            for f in fields(part)
            if f.name not in self.columns
        ]
        self.columns["others"] = " ".join(
            f"{f.name}={value}" for f, value in every if value != f.default
        )

    def is_like(self, done: dict) -> bool:
        """Is `done`, a line of a CSV, this row, and settled? What `auto` stands for is known only when it has run."""
        if done["status"] not in ("ok", "out of memory", KILLED):  # something that can be mended
            return False
        unknown = {"time", "command", "status", "device", "nodes", *FIGURES}
        mine = {key: str(value) for key, value in self.columns.items() if key not in unknown}
        return all(
            done[key] == value
            or done[key].startswith(f"{value} (")
            or (key, value) == ("precision", "auto")
            for key, value in mine.items()
        )

    def call(self, method: str, *args):
        """What each process answers, or None when the row cannot be measured: then `status` says why."""
        try:
            if self.team is None:
                kind = Launched if launched() else Team
                self.team = kind(self.program, (self.model_cfg, self.cfg), self.ranks, self.threads)
            return self.team.call(method, *args)
        except TeamError as error:
            self.columns["status"] = str(error)
            print(f"  {self.columns['model']}: {error}", file=sys.stderr, flush=True)
            return None

    def fine(self) -> bool:
        return self.columns["status"] == "ok"

    def turn(self) -> None:
        seconds = self.call("turn", self.args.steps)
        if seconds:
            tokens = self.args.steps * self.cfg.global_batch_size * self.model_cfg.max_seq_len
            self.rates.append(tokens / max(seconds))

    def finish(self, trace: str) -> None:
        """Fill in the figures, and end the processes."""
        parts = self.call("split", 2, trace)
        abouts = parts and self.call("about")
        if abouts:
            self.team.stop()
            about, rate = (
                abouts[0],
                statistics.median(self.rates[1:]),
            )  # the first turn is to warm up
            one = (self.model_cfg, rate, self.ranks, about["peak"])
            saving = self.cfg.activation_checkpointing, self.cfg.recompute_every
            self.columns |= {
                name: about[name] for name in ("device", "nodes", "precision", "attn_impl")
            }
            self.columns |= {
                "tokens_per_second": rate,
                "fastest": max(self.rates[1:]),
                "slowest": min(self.rates[1:]),
            }
            self.columns |= {
                "tokens_per_second_device": rate / self.ranks,
                "tflops_device": rate
                / self.ranks
                * flops.train_flops_per_token(self.model_cfg)
                / 1e12,
                "peak_tflops": about["peak"] and about["peak"] / 1e12,
                "mfu": flops.mfu(*one),
                "hfu": flops.hfu(*one, *saving),
                "convention": flops.CONVENTION,
                "memory_gb": max(a["memory_gb"] for a in abouts),
                **parts[0],  # of rank 0
            }


def groups(argv: list[str]) -> list[list[Row]]:
    """The rows to measure, in groups that take turns."""
    plain = [a for a in argv if not a.startswith("--sweep=") and not a.startswith("--sizes=")]
    *_, args = config.load(SHAPE + argv, MPTConfig, TrainConfig, BenchArgs)
    files = [f"configs/mpt{size}.py" for size in args.sizes.split(",") if size] or [None]
    named = [a for a in plain if not a.startswith("-")]
    require(not (named and args.sizes), "give a config file or --sizes, not both")
    wanted, number = [], itertools.count(1)
    for file, flags in itertools.product(files, combinations(args.sweep)):
        base = [file] if file else [] if named else SHAPE
        model = Path(file or named[-1]).stem if file or named else ""
        programs = [Ours, Theirs] if args.transformers else [Ours]
        wanted.append(
            [Row(next(number), base + plain + flags, model, program) for program in programs]
        )
    turns = args.alternate or args.transformers
    require(
        not (turns and launched()),
        "rows take turns only in processes that bench starts itself: leave out torchrun",
    )
    return [list(itertools.chain(*wanted))] if args.alternate else wanted


def combinations(sweep: str) -> list[list[str]]:
    """`a=1,2 b=3,4` -> the flags of every combination: [--a=1, --b=3], ..."""
    found = []
    for part in sweep.split():
        key, equals, values = part.partition("=")
        require(
            equals and values,
            f"--sweep wants settings with values, such as microbatch_size=4,8, not {part!r}",
        )
        found.append([f"--{key}={value}" for value in values.split(",")])
    return [list(flags) for flags in itertools.product(*found)]


def append(path: str, columns: dict) -> None:
    """One line more, as a whole."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    new = not os.path.exists(path)
    with open(path, "a", newline="") as file:
        writer = csv.DictWriter(file, list(columns))
        if new:
            writer.writeheader()
        writer.writerow(columns)


def main(argv) -> None:
    """Measure what is not in the CSV yet, then tell all that was asked for."""
    wanted = groups(argv)
    args, rank = wanted[0][0].args, config.rank()
    done = read(args.out) if args.out else []
    same = not done or list(done[0]) == list(wanted[0][0].columns)
    require(same, f"{args.out} has other columns than `bench train` writes: name another file")
    lines = []
    for group in wanted:
        there = {row: next((line for line in done if row.is_like(line)), None) for row in group}
        new = [row for row in group if not there[row]]
        if new:
            measure(new, args, rank)
        lines += [
            there[row] or {k: "" if v is None else str(v) for k, v in row.columns.items()}
            for row in group
        ]
    if rank > 0:
        return
    text = "\n".join([how(argv, args), "", tables(lines)])
    print(text)
    fine = [line for line in lines if line["status"] == "ok"]
    if args.out:
        Path(args.out).with_suffix(".md").write_text(text + "\n")
        if fine and importlib.util.find_spec("matplotlib"):
            draw(fine, Path(args.out).with_suffix(".png"))
    require(fine, f"nothing could be measured: {lines[0]['status']}")


def how(argv: list[str], args: BenchArgs) -> str:
    """How it was measured, in a sentence or two."""
    return (
        f"`python -m bench train {shlex.join(argv)}`, {datetime.date.today()}, torch {torch.__version__}, median of "
        f"{args.rounds} turns of {args.steps} steps on random tokens. MFU: {flops.CONVENTION}; HFU: with what is "
        "computed again. Shares of a step's time are of two profiled steps."
    )


def measure(rows: list[Row], args: BenchArgs, rank: int) -> None:
    """Let the rows take turns, and keep what comes of it."""
    for turn in range(args.rounds + 1):
        for row in rows:
            if row.fine():
                row.turn()
        if rank == 0:
            names = " and ".join(f"row {row.number}, {row.columns['model']}" for row in rows)
            print(f"  {names}: turn {turn} of {args.rounds}", file=sys.stderr, flush=True)
    for row in rows:
        if row.fine():
            row.finish(args.profile and f"{args.profile}-{row.number}.json")
        if rank > 0 and not row.fine():
            time.sleep(3)  # rank 0 may say the same
        told = rank > 0 and (row.fine() or any(row.is_like(line) for line in read(args.out)))
        if args.out and not told:
            append(args.out, row.columns)
        if launched() and not row.fine():  # these processes may be in different collectives now
            print(
                f"{row.columns['model']}: start it again, it goes on with the other rows",
                file=sys.stderr,
            )
            raise SystemExit(RESUME_ME)


if __name__ == "__main__":
    processes.run(main)
