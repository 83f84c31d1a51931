"""Measured throughput: the training step beside Hugging Face's, and attention beside PyTorch's kernels.

    python bench.py train                                the shape below
    python bench.py train --d_model=768 --n_heads=12 --n_layers=12 --vocab_size=50368 --microbatch_size=4
    python bench.py attention                            head dims 64 and 128, five lengths: minutes on a GPU
    python bench.py attention --lengths=2048 --head_dims=128

Contestants run in one process under the same allocator settings and take turns, so what else the machine does hits all
of them; the figures are medians. `train` prints a Markdown table to keep in benchmarks/. transformers is in
requirements-dev.txt; without it only our rows are measured.

`attention` measures forward and backward of causal attention in bf16, and writes tables, raw figures and a picture to
benchmarks/attention_<device>.md, .json and .png. FLOP/s are those of the formula, whatever a kernel really computes: a
matmul of all scores is 2 B H T T D, causality needs half, the forward has two matmuls, the backward five. On a GPU
calls are queued behind other work and timed there, so the time that Python takes to launch them is not in a figure.
A contestant that raises (no such backend here, no memory) is n/a, and the others go on.
"""

import datetime
import functools
import gc
import importlib
import itertools
import json
import math
import re
import statistics
import sys
import textwrap
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import attention
import config
import devices
import flops
import fsdp_train
import optim
import parallel
import runlog
from config import MPTConfig, TrainConfig, require
from model import MPT

SHAPE = [
    *("--n_layers=6", "--n_heads=6", "--d_model=384", "--max_seq_len=256", "--vocab_size=256"),
    *("--global_batch_size=8", "--microbatch_size=8", "--alibi", "--no_bias", "--grad_clip=0"),
]

MATMULS = {"forward": 2, "backward": 5}  # of each pass
PASSES = {"forward": ["forward"], "backward": ["backward"], "forward + backward": ["forward", "backward"]}  # reported
OURS = "ours, ALiBi"  # what the others are compared with
TOLERANCE = 0.05  # largest difference from fp32 / largest value: bf16 stays below 0.02, another bias is above 0.3
MAX_CALLS = 25  # of a turn: so many launches fit into `head_start`


# --- the training step


@dataclass
class BenchArgs:
    """How long to measure."""

    rounds: int = 7  # turns of each contestant; the median counts
    steps: int = 5  # optimizer steps of a turn


def ours(model_cfg, cfg, world, precision):
    """A function that takes one step of this project's training loop on random tokens."""
    with torch.device("meta"):
        model = MPT(model_cfg)
    model = parallel.parallelize(model, parallel.make_mesh(world, cfg), cfg, precision)
    parallel.materialize(model, world.device, cfg.seed)
    optimizer = optim.build_optimizer(model.parameters(), cfg)
    rows = random_rows(model_cfg, cfg, world)
    return lambda: fsdp_train.train_step(model, optimizer, rows, 1000, cfg, world, precision)[0].item()


def theirs(model_cfg, cfg, world, precision):
    """The same for transformers' MptForCausalLM (always ALiBi, no biases) with PyTorch's AdamW, one whole batch."""
    from transformers import MptConfig, MptForCausalLM

    sizes = {k: getattr(model_cfg, k) for k in ("d_model", "n_heads", "n_layers", "max_seq_len", "vocab_size")}
    model = MptForCausalLM(MptConfig(**sizes)).to(world.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.lr)
    rows = random_rows(model_cfg, cfg, world)

    def step():
        with torch.autocast(world.device.type, torch.bfloat16, enabled=precision == "bf16"):
            loss = model(rows[:, :-1], labels=rows[:, :-1]).loss  # it shifts the labels itself
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def random_rows(model_cfg, cfg, world):
    """Random tokens for one rank, (B, T + 1) int64."""
    shape = (cfg.global_batch_size // world.size, model_cfg.max_seq_len + 1)
    return torch.randint(model_cfg.vocab_size, shape, device=world.device)


def take_turns(contestants: dict, rounds: int, steps: int, tokens: int) -> dict:
    """Tokens per second of each contestant, one figure per round, after one turn to warm up."""
    rates = {name: [] for name in contestants}
    for turn in range(rounds + 1):
        for name, step in contestants.items():
            begin = time.perf_counter()
            for _ in range(steps):
                step()
            if turn > 0:
                rates[name].append(steps * tokens / (time.perf_counter() - begin))
    return rates


def bench_train(argv) -> None:
    """The table of `bench.py train`."""
    model_cfg, cfg, args = config.load(SHAPE + argv, MPTConfig, TrainConfig, BenchArgs)
    world = parallel.start(cfg.device)
    precision = parallel.choose_precision(cfg, world.device)
    contestants = {f"this project, {cfg.sharding}, {world.size} ranks": ours(model_cfg, cfg, world, precision)}
    if world.size == 1:
        try:
            contestants["transformers MptForCausalLM"] = theirs(model_cfg, cfg, world, precision)
        except ImportError:
            print(
                "transformers is not installed (requirements-dev.txt): only this project is measured", file=sys.stderr
            )
    tokens = cfg.global_batch_size * model_cfg.max_seq_len
    rates = take_turns(contestants, args.rounds, args.steps, tokens)
    if world.rank > 0:
        return
    peak = devices.peak_flops(cfg.peak_tflops, world.device, parallel.DTYPES[precision])
    about = runlog.versions()
    print(
        f"`python bench.py train {' '.join(argv)}`, {datetime.date.today()}, {devices.describe(world.device)}, ", end=""
    )
    print(
        f"{torch.get_num_threads()} threads, torch {about['torch']}, {precision}, {flops.n_params(model_cfg):,} ",
        end="",
    )
    print(f"parameters, batch {cfg.global_batch_size} x {model_cfg.max_seq_len}, median of {args.rounds} turns\n")
    print("| what | tokens/s | fastest / slowest turn | MFU | against the last row |")
    print("|---|---|---|---|---|")
    base = statistics.median(list(rates.values())[-1])
    for name, turns in rates.items():
        median = statistics.median(turns)
        mfu = flops.mfu(model_cfg, median, world.size, peak)
        share = "n/a" if mfu is None else f"{mfu:.1%}"
        print(f"| {name} | {median:,.0f} | {max(turns):,.0f} / {min(turns):,.0f} | {share} | {median / base:.2f} |")


# --- attention


@dataclass
class AttentionArgs:
    """Which shapes of attention, and how long to measure. Where 0 or empty, a GPU and a CPU have their own default."""

    device: Literal["auto", "cpu", "cuda"] = "auto"  # cuda is ROCm too
    lengths: str = ""  # tokens of a sequence (empty: 1024,2048,4096,8192,16384, on a CPU 128,256,512)
    head_dims: str = "64,128"  # widths of a head
    tokens: int = 0  # of a batch, so batch = tokens / length (0: 16384, on a CPU 1024)
    d_model: int = 0  # heads = d_model / head dim (0: 2048, on a CPU 256)
    rounds: int = 7  # turns of each contestant; the median counts
    turn_ms: float = 20  # a turn lasts about as long, in 1 to 25 calls
    cell_seconds: float = 10  # a contestant that would take longer at one shape is left out there
    out: str = "benchmarks"  # folder of the results

    def check(self) -> None:
        for name in ("rounds", "turn_ms", "cell_seconds"):
            require(getattr(self, name) > 0, f"{name} must be more than 0, not {getattr(self, name)}")

    def shapes(self, gpu: bool) -> list[dict]:
        """The fields of `Cell` that make a shape, for every head dim and length, the shortest length first."""
        lengths = self.lengths or ("1024,2048,4096,8192,16384" if gpu else "128,256,512")
        tokens, d_model = self.tokens or (16384 if gpu else 1024), self.d_model or (2048 if gpu else 256)
        shapes = []
        for head_dim in whole_numbers("head_dims", self.head_dims):
            require(d_model % head_dim == 0, f"d_model {d_model} is not a multiple of the head dim {head_dim}")
            for length in sorted(whole_numbers("lengths", lengths)):
                require(tokens % length == 0, f"tokens {tokens} is not a multiple of the length {length}: set --tokens")
                sizes = {"heads": d_model // head_dim, "batch": tokens // length}
                shapes.append({"head_dim": head_dim, "length": length, **sizes})
        return shapes


def whole_numbers(name: str, text: str) -> list[int]:
    """The numbers of a comma-separated setting, each once."""
    fine = re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", text)
    require(fine, f"--{name} wants whole numbers with commas between, such as 64,128, not {text!r}")
    return list(dict.fromkeys(map(int, text.split(","))))


@dataclass
class Cell:
    """One contestant at one shape."""

    contestant: str
    head_dim: int
    length: int  # tokens of a sequence
    heads: int
    batch: int
    calls: int = 1  # of a turn
    forward: list[float] = field(default_factory=list)  # seconds of one call, a figure per turn
    backward: list[float] = field(default_factory=list)  # the same
    error: float | None = None  # at the shortest length: largest difference from fp32 / largest value
    missing: str = ""  # why there are no figures

    def ms(self, what: str) -> float | None:
        """Milliseconds of one of PASSES: the median turn, or the sum of two medians."""
        return None if self.missing else 1e3 * sum(statistics.median(getattr(self, p)) for p in PASSES[what])

    def tflops(self, what: str) -> float | None:
        """TFLOP/s of one of PASSES: 4 B H T T D / 2 FLOPs forward, 2.5 times as many backward."""
        flop = sum(MATMULS[p] for p in PASSES[what]) * self.batch * self.heads * self.length**2 * self.head_dim
        return None if self.missing else flop / self.ms(what) / 1e9


def attention_contestants(slopes) -> dict:
    """Name -> (its ALiBi slopes (H,) or None, its function (q, k, v) -> out). All are causal, of (B, H, T, D)."""

    def by(impl, slopes=slopes):
        return slopes, lambda q, k, v: attention.attention(q, k, v, impl=impl, alibi_slopes=slopes)

    def sdpa(backend):
        def run(q, k, v):
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        return None, run

    mask_of = functools.cache(alibi_mask)  # made while warming up, freed with this dictionary

    def masked(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask_of(slopes, q.shape[2], q.dtype))

    return {
        OURS: by("triton"),
        "ours, no bias": by("triton", None),
        "SDPA flash, no bias": sdpa(SDPBackend.FLASH_ATTENTION),
        "SDPA cuDNN, no bias": sdpa(SDPBackend.CUDNN_ATTENTION),
        "SDPA memory-efficient, no bias": sdpa(SDPBackend.EFFICIENT_ATTENTION),
        "SDPA, ALiBi in a mask": (slopes, masked),
        "SDPA, ALiBi in extra columns": by("sdpa"),
        "FlexAttention, ALiBi": by("flex"),
        "blocks, ALiBi": by("blocks"),
        "reference, ALiBi": by("reference"),
    }


def alibi_mask(slopes, length, dtype):
    """(1, H, T, T): ALiBi, and -inf where a key is later. Head by head: all of it in fp32 may not fit."""
    mask = torch.empty(1, len(slopes), length, length, device=slopes.device, dtype=dtype)
    for h in range(len(slopes)):
        mask[0, h] = attention.attention_bias(length, length, slopes[h : h + 1], True, slopes.device)[0]
    return mask


def attention_inputs(cell, device) -> list:
    """q, k, v: (B, H, T, D) bf16, views of one (B, T, 3 d_model) as Wqkv makes it; do, as out_proj's backward does."""
    torch.manual_seed(0)
    shape, width = (cell.batch, cell.length), cell.heads * cell.head_dim
    qkv = torch.randn(*shape, 3 * width, device=device, dtype=torch.bfloat16, requires_grad=True)
    do = torch.randn(*shape, width, device=device, dtype=torch.bfloat16)
    return [x.unflatten(-1, (cell.heads, cell.head_dim)).transpose(1, 2) for x in (*qkv.chunk(3, dim=-1), do)]


def largest_error(slopes, function, q, k, v, do) -> float:
    """Of out, dq, dk and dv: largest difference from fp32's, as a share of the largest value. Of the first sequence."""
    out = function(q, k, v)
    got = [out, *torch.autograd.grad(out, (q, k, v), do)]
    q, k, v = (x[:1].detach().float().requires_grad_() for x in (q, k, v))
    out = attention.attention(q, k, v, impl="reference", alibi_slopes=slopes)
    exact = [out, *torch.autograd.grad(out, (q, k, v), do[:1].float())]
    return max(((a[:1] - b).abs().max() / b.abs().max()).item() for a, b in zip(got, exact, strict=True))


def mark(device):
    """This moment: an event in the queue of a GPU, seconds on a CPU."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def take_turn(function, q, k, v, do, calls: int) -> tuple[float, float]:
    """Seconds of one forward and of one backward: means of `calls`, after one that lets the allocator settle.

    Each backward has a forward of its own: what torch.compile makes does not take retain_graph=True.
    """
    marks, gpu = [], q.device.type == "cuda"
    if gpu:  # queue 5 ms of other work: Python runs ahead, and launch times hide, as within a training step
        scratch = torch.empty(2**28, dtype=torch.uint8, device=q.device)  # 256 MiB take 0.1 ms, and leave caches cold
        for _ in range(50):
            scratch.zero_()
    for _ in range(calls + 1):
        before = mark(q.device)
        out = function(q, k, v)
        between = mark(q.device)
        torch.autograd.grad(out, (q, k, v), do)
        marks.append((before, between, mark(q.device)))
        del out  # before the next call asks for memory
    if gpu:
        torch.cuda.synchronize(q.device)
    times = [[a.elapsed_time(b) / 1e3 if gpu else b - a for a, b in zip(m, m[1:], strict=False)] for m in marks[1:]]
    return tuple(statistics.fmean(column) for column in zip(*times, strict=True))


def warm_up(cell, slopes, function, tensors, args, shortest: bool) -> None:
    """Compile, compare with fp32 at the shortest length, find how many calls make a turn."""
    if shortest:
        cell.error = largest_error(slopes, function, *tensors)
        require(cell.error <= TOLERANCE, f"wrong by {cell.error:.0%}")
    take_turn(function, *tensors, calls=1)
    seconds = sum(take_turn(function, *tensors, calls=1))
    cell.calls = min(max(math.ceil(args.turn_ms / 1e3 / seconds), 1), MAX_CALLS)
    require(seconds * (cell.calls + 1) * args.rounds <= args.cell_seconds, f"too slow, {seconds:.2g} s a call")


def why(error: Exception) -> str:
    """An exception in a few words that fit into a table."""
    text = str(error).strip() or type(error).__name__
    if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in text:
        return "out of memory"
    return textwrap.shorten(text.splitlines()[0].replace("|", "/"), 45, placeholder="...")


def measure(contestants, cells, device, args, shortest: bool) -> None:
    """Fill the cells, one for each contestant, all of one shape: they take turns. One that raises drops out."""
    tensors = attention_inputs(cells[0], device)
    for turn in range(args.rounds + 1):
        for cell in [cell for cell in cells if not cell.missing]:
            slopes, function = contestants[cell.contestant]
            try:
                if turn == 0:
                    warm_up(cell, slopes, function, tensors, args, shortest)
                else:
                    forward, backward = take_turn(function, *tensors, cell.calls)
                    cell.forward.append(forward)
                    cell.backward.append(backward)
            except Exception as error:  # whatever it is, the others go on
                cell.missing = why(error)
                print(f"  {cell.contestant}: {type(error).__name__}: {str(error)[:300]}", file=sys.stderr)
            if cell.missing:  # out here, where the exception no longer holds the tensors
                gc.collect()
                torch.cuda.empty_cache()


def table(cells, corner: str, entry) -> list[str]:
    """Markdown: a row per contestant, a column per length, entry(cell) in each field."""
    rows = {}
    for cell in cells:
        rows.setdefault(cell.contestant, {})[f"{cell.length:,}"] = entry(cell)
    columns = next(iter(rows.values()))
    lines = ["", f"| {corner} | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    return lines + [f"| {name} | {' | '.join(row.values())} |" for name, row in rows.items()]


def report(heading: str, cells) -> str:
    """All tables, as Markdown."""
    ours = {(cell.head_dim, cell.length): cell for cell in cells if cell.contestant == OURS}

    def tflops(what):
        return lambda cell: f"n/a: {cell.missing}" if cell.missing else f"{cell.tflops(what):.3g}"

    def ratios(cell):
        we = ours[cell.head_dim, cell.length]
        fine = not (cell.missing or we.missing)
        return " / ".join(f"{cell.ms(what) / we.ms(what):.2f}" for what in PASSES) if fine else "n/a"

    lines = [heading]
    for head_dim in dict.fromkeys(cell.head_dim for cell in cells):
        here = [cell for cell in cells if cell.head_dim == head_dim]
        lines += ["", f"## Head dim {head_dim}, {here[0].heads} heads"]
        for what in PASSES:
            lines += table(here, f"{what}, TFLOP/s", tflops(what))
        lines += ["", f"`{OURS}` divided by each row, {' / '.join(PASSES)}; above 1 ours is faster:"]
        lines += table(here, "ours / row", ratios)
        errors = [f"{cell.contestant} {cell.error:.2%}" for cell in here if cell.error is not None]
        lines += ["", f"Largest error of out, dq, dk, dv at {here[0].length:,} tokens: {'; '.join(errors)}."]
    return "\n".join(lines) + "\n"


def draw(cells, gemm: float, title: str, path: Path) -> None:
    """TFLOP/s over length: a row of panels per head dim, a panel per pass, a line per contestant."""
    try:
        import matplotlib
    except ImportError:
        print("no picture: it needs matplotlib, which is in requirements-extra.txt", file=sys.stderr)
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    names, head_dims = (list(dict.fromkeys(getattr(c, key) for c in cells)) for key in ("contestant", "head_dim"))
    size = {"figsize": (15, 1.5 + 4 * len(head_dims)), "layout": "constrained"}
    figure, grid = pyplot.subplots(len(head_dims), len(PASSES), squeeze=False, sharey="row", **size)
    lines = {}
    for axes, (head_dim, what) in zip(grid.flat, itertools.product(head_dims, PASSES), strict=True):
        for number, name in enumerate(names):
            done = [c for c in cells if (c.contestant, c.head_dim, c.missing) == (name, head_dim, "")]
            style = ("-" if "ALiBi" in name else "--") + "os^vDPX*<>"[number % 10]
            look = {"color": f"C{number}", "linewidth": 3 if name == OURS else 1.5}
            if done:
                (lines[name],) = axes.plot([c.length for c in done], [c.tflops(what) for c in done], style, **look)
        lines["a bf16 matmul"] = axes.axhline(gemm, color="grey", linestyle=":")
        axes.set(title=f"head dim {head_dim}, {what}", xlabel="tokens of a sequence", ylabel="TFLOP/s", xscale="log")
        axes.set_xticks(lengths := sorted({c.length for c in cells}), [f"{length:,}" for length in lengths])
        axes.set_ylim(bottom=0)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    figure.suptitle(title)
    figure.legend(lines.values(), lines, loc="outside lower center", ncols=4)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def bench_attention(argv) -> None:
    """The tables, raw figures and picture of `bench.py attention`; written after every shape, printed at the end."""
    (args,) = config.load(argv, AttentionArgs)
    device = parallel.pick_device(args.device, 0, 1)
    require(device.type in ("cpu", "cuda"), f"attention is not measured on {device.type}: set --device=cpu")
    shapes, cells, gemm = args.shapes(device.type == "cuda"), [], []
    name, about = devices.describe(device), runlog.versions()
    triton = importlib.import_module("triton").__version__ if attention.HAS_TRITON else "none"
    path = Path(args.out) / f"attention_{re.sub('[^a-z0-9]+', '_', name.lower()).strip('_')}"
    path.parent.mkdir(parents=True, exist_ok=True)
    where = f"{name}, {datetime.date.today()}, torch {about['torch']}, triton {triton}"
    for shape in shapes:
        begin = time.perf_counter()
        torch.compiler.reset()  # FlexAttention is compiled for each length, not once for all
        contestants = attention_contestants(attention.alibi_slopes(shape["heads"], device=device))
        here = [Cell(contestant, **shape) for contestant in contestants]
        measure(contestants, here, device, args, shape["length"] == shapes[0]["length"])
        cells += here
        gemm.append(devices.measure_peak(device, torch.bfloat16) / 1e12)
        ...


def main(argv) -> None:
    benches = {"train": bench_train, "attention": bench_attention}
    require(argv and argv[0] in benches, f"usage: python bench.py {'|'.join(benches)} [config] [--key=value]")
    benches[argv[0]](argv[1:])


if __name__ == "__main__":
    parallel.run(main)
