"""Attention: ours beside PyTorch's kernels, forward and backward, over head dims and lengths.

    python -m bench attention        minutes, on a GPU or a CPU
    TFLOP/s = 4 B H T T D / 2 / seconds forward, 2.5 times as many FLOPs backward      causality needs half of T x T

Contestants run in one process and take turns, so what else the machine does hits all; figures are
medians. A FLOP is one of the formula, whatever a kernel really computes. On a GPU the calls are
queued behind other work and timed there, so what Python needs to launch them is not in a figure. A
contestant that raises (no such backend here, no memory) is n/a, and the others go on. Writes
attention_<device>.md, .json (every turn) and .png into bench/results/. Read next:
bench/before_after.py.
"""

import datetime
import functools
import gc
import importlib.util
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
import processes
from config import require
from lifecycle import runlog

MATMULS = (2, 5)  # of forward and backward
PASSES = {
    "forward": [0],
    "backward": [1],
    "forward + backward": [0, 1],
}  # what is reported, of a turn's two figures
OURS = "ours, ALiBi"  # what the others are compared with
TOLERANCE = 0.05  # largest difference from fp32 / largest value: bf16 stays below 0.01, another bias is above 0.1
# By device: lengths, tokens of a batch (batch x length), d_model (heads x head dim)
SIZES = {"cuda": ("1024,2048,4096,8192,16384", 16384, 2048), "cpu": ("512,1024,2048", 4096, 384)}


@dataclass
class AttentionArgs:
    """Which shapes of attention, and how long to measure."""

    device: Literal["auto", "cpu", "cuda"] = "auto"  # cuda is ROCm too
    lengths: str = (
        ""  # tokens of a sequence (empty: 1024,2048,4096,8192,16384, on a CPU 512,1024,2048)
    )
    head_dims: str = "64,128"  # widths of a head
    tokens: int = 0  # of a batch: tokens / length sequences, at least one (0: 16384, on a CPU 4096)
    d_model: int = 0  # d_model / head dim heads, at least one (0: 2048, on a CPU 384)
    rounds: int = 7  # turns of each contestant; the median counts
    turn_ms: float = 20  # a turn lasts about as long, in 1 to 25 calls
    cell_seconds: float = 10  # a contestant that would take longer at one shape is left out there
    out: str = "bench/results"  # folder of the results


@dataclass
class Cell:
    """One contestant at one shape."""

    contestant: str
    head_dim: int
    length: int  # tokens of a sequence
    heads: int
    batch: int
    turns: list[tuple[float, float]] = field(
        default_factory=list
    )  # seconds of one forward, of one backward
    calls: int = 0  # of a turn
    error: float | None = (
        None  # at the shortest length: largest difference from fp32 / largest value
    )
    missing: str = ""  # why there are no figures

    def tflops(self, what: str) -> float:
        """TFLOP/s of one of PASSES by median seconds: 4 B H T T D / 2 FLOPs forward, 2.5 times as many backward."""
        seconds = sum(statistics.median(turn[p] for turn in self.turns) for p in PASSES[what])
        matmul = (
            self.batch * self.heads * self.length**2 * self.head_dim
        )  # 2 B H T T D, and causality needs half
        return sum(MATMULS[p] for p in PASSES[what]) * matmul / seconds / 1e12


def attention_contestants(slopes) -> dict:
    """Name -> (its ALiBi slopes (H,) or None, its function (q, k, v) -> out). All are causal, of (B, H, T, D)."""

    def by(impl, slopes=slopes):
        return slopes, functools.partial(attention.attention, impl=impl, alibi_slopes=slopes)

    def sdpa(backend, q, k, v):
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    @functools.cache  # made while warming up, freed with this dictionary
    def mask(length):  # (1, H, T, T) bf16; head by head, since all of it in fp32 may not fit
        heads = slopes.split(1)
        return torch.cat(
            [attention.attention_bias(length, length, s, True, s.device).bfloat16() for s in heads]
        )[None]

    return {
        OURS: by("triton"),
        "ours, no bias": by("triton", None),
        "SDPA flash, no bias": (None, functools.partial(sdpa, SDPBackend.FLASH_ATTENTION)),
        "SDPA cuDNN, no bias": (None, functools.partial(sdpa, SDPBackend.CUDNN_ATTENTION)),
        "SDPA memory-efficient, no bias": (
            None,
            functools.partial(sdpa, SDPBackend.EFFICIENT_ATTENTION),
        ),
        "SDPA, ALiBi in a mask": (
            slopes,
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, mask(q.shape[2])),
        ),
        "SDPA, ALiBi in extra columns": by("sdpa"),
        "FlexAttention, ALiBi": by("flex"),
        "blocks, ALiBi": by("blocks"),
        "reference, ALiBi": by("reference"),
    }


def attention_inputs(cell, device) -> list:
    """q, k, v: (B, H, T, D) bf16, views of one (B, T, 3 d_model) as Wqkv makes it; do, as out_proj's backward does."""
    torch.manual_seed(0)
    shape, width = (cell.batch, cell.length), cell.heads * cell.head_dim
    qkv = torch.randn(*shape, 3 * width, device=device, dtype=torch.bfloat16, requires_grad=True)
    do = torch.randn(*shape, width, device=device, dtype=torch.bfloat16)
    return [
        x.unflatten(-1, (cell.heads, cell.head_dim)).transpose(1, 2)
        for x in (*qkv.chunk(3, dim=-1), do)
    ]


def largest_error(slopes, function, q, k, v, do) -> float:
    """Of out, dq, dk and dv: largest difference from fp32's, as a share of the largest value. Of the first sequence."""
    out = function(q, k, v)
    got = [out, *torch.autograd.grad(out, (q, k, v), do)]
    q, k, v = (x[:1].detach().float().requires_grad_() for x in (q, k, v))
    out = attention.attention(q, k, v, impl="reference", alibi_slopes=slopes)
    exact = [out, *torch.autograd.grad(out, (q, k, v), do[:1].float())]
    return max(
        ((a[:1] - b).abs().max() / b.abs().max()).item() for a, b in zip(got, exact, strict=True)
    )


def mark(gpu: bool):
    """This moment: an event in the queue of a GPU, else seconds."""
    event = torch.cuda.Event(enable_timing=True) if gpu else None
    return torch.cuda.current_stream().record_event(event) if gpu else time.perf_counter()


def take_turn(function, q, k, v, do, calls: int) -> tuple[float, float]:
    """Seconds of one forward and of one backward: means of `calls`, after one that lets the allocator settle. Each
    backward has a forward of its own: what torch.compile makes does not take retain_graph=True."""
    marks, gpu = [], q.device.type == "cuda"
    if gpu:  # queue 5 ms of other work: Python runs ahead, and launch times hide, as within a training step
        scratch = torch.empty(
            2**28, dtype=torch.uint8, device=q.device
        )  # 256 MiB take 0.1 ms, and leave caches cold
        for _ in range(50):
            scratch.zero_()
    for _ in range(calls + 1):
        begin = mark(gpu)
        out = function(q, k, v)
        middle = mark(gpu)
        torch.autograd.grad(out, (q, k, v), do)
        marks.append((begin, middle, mark(gpu)))
        del out  # before the next call asks for memory
    if gpu:
        torch.cuda.synchronize()
    times = [
        [a.elapsed_time(b) / 1e3 if gpu else b - a for a, b in itertools.pairwise(m)]
        for m in marks[1:]
    ]
    return tuple(map(statistics.fmean, zip(*times, strict=True)))


def warm_up(cell, slopes, function, tensors, args, check: bool) -> None:
    """Compile, compare with fp32 if `check`, find how many calls make a turn. Raises for what is wrong or too slow."""
    if check:
        cell.error = largest_error(slopes, function, *tensors)
        require(cell.error <= TOLERANCE, f"wrong by {cell.error:.0%}")
    take_turn(function, *tensors, calls=1)
    seconds = sum(take_turn(function, *tensors, calls=1))
    cell.calls = min(max(math.ceil(args.turn_ms / 1e3 / seconds), 1), 25)
    require(
        seconds * (cell.calls + 1) * args.rounds <= args.cell_seconds,
        f"too slow, {seconds:.2g} s a call",
    )


def measure(contestants, cells, device, args, check: bool) -> None:
    """Fill the cells, one for each contestant, all of one shape: they take turns. One that raises drops out."""
    tensors = attention_inputs(cells[0], device)
    for turn in range(args.rounds + 1):
        for cell in [cell for cell in cells if not cell.missing]:
            slopes, function = contestants[cell.contestant]
            try:
                if turn == 0:
                    warm_up(cell, slopes, function, tensors, args, check)
                else:
                    cell.turns.append(take_turn(function, *tensors, cell.calls))
            except Exception as error:  # whatever it is, the others go on
                words = (
                    "out of memory"
                    if isinstance(error, torch.OutOfMemoryError)
                    else str(error).replace("|", "/")
                )
                cell.missing = textwrap.shorten(
                    words or type(error).__name__, 45, placeholder="..."
                )
                print(
                    f"  {cell.contestant}: {type(error).__name__}: {str(error)[:300]}",
                    file=sys.stderr,
                )
            if cell.missing:  # out here, where the exception no longer holds the tensors
                gc.collect()
                torch.cuda.empty_cache()


def report(cells) -> list[str]:
    """Lines of Markdown: TFLOP/s of each pass, and how ours compares. A row per contestant, a column per length."""
    absent = {cell.contestant: cell.missing for cell in cells}
    for cell in cells:
        if not cell.missing:
            absent.pop(cell.contestant, None)
    lines = ["", *(f"Not here: {name} ({reason})." for name, reason in absent.items())]
    cells = [cell for cell in cells if cell.contestant not in absent]
    mine = {(cell.head_dim, cell.length): cell for cell in cells if cell.contestant == OURS}

    def rate(what, cell):
        return f"n/a: {cell.missing}" if cell.missing else f"{cell.tflops(what):.3g}"

    def ratios(cell):
        we = mine[cell.head_dim, cell.length]
        both = not (cell.missing or we.missing)
        return (
            " / ".join(f"{we.tflops(what) / cell.tflops(what):.2f}" for what in PASSES)
            if both
            else "n/a"
        )

    tables = {f"{what}, TFLOP/s": functools.partial(rate, what) for what in PASSES}
    if mine:
        tables[f"{OURS} / this row: {', '.join(PASSES)}"] = ratios
    for head_dim, corner in itertools.product(
        dict.fromkeys(cell.head_dim for cell in cells), tables
    ):
        rows = {}
        for cell in [cell for cell in cells if cell.head_dim == head_dim]:
            rows.setdefault(cell.contestant, {})[f"{cell.length:,}"] = tables[corner](cell)
        columns = next(iter(rows.values()))
        lines += [
            "",
            f"| head dim {head_dim}, {corner} | {' | '.join(columns)} |",
            "|---" * (len(columns) + 1) + "|",
        ]
        lines += [f"| {name} | {' | '.join(row.values())} |" for name, row in rows.items()]
    return lines


def draw(cells, gemm: float, title: str, path: Path) -> None:
    """TFLOP/s over length: panels by head dim and pass, a line per contestant, dashed where it has no ALiBi."""
    from matplotlib.figure import Figure

    keys = ("contestant", "head_dim", "length")
    names, head_dims, lengths = (
        list(dict.fromkeys(getattr(cell, key) for cell in cells)) for key in keys
    )
    figure = Figure(figsize=(15, 1.5 + 4 * len(head_dims)), layout="constrained")
    grid = figure.subplots(len(head_dims), len(PASSES), squeeze=False, sharey=True)
    lines = {}
    for axes, (head_dim, what) in zip(grid.flat, itertools.product(head_dims, PASSES), strict=True):
        for number, name in enumerate(names):
            done = [
                c for c in cells if (c.contestant, c.head_dim, c.missing) == (name, head_dim, "")
            ]
            if done:
                x, y = [lengths.index(c.length) for c in done], [c.tflops(what) for c in done]
                style = f"C{number}{'os^vDPX*<>'[number]}{'-' if 'ALiBi' in name else '--'}"
                (lines[name],) = axes.plot(x, y, style, linewidth=3 if name == OURS else 1.5)
        lines["a bf16 matmul"] = axes.axhline(gemm, color="grey", linestyle=":")
        axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
        axes.set(
            title=f"head dim {head_dim}, {what}", xlabel="tokens of a sequence", ylim=(0, None)
        )
        axes.grid(alpha=0.3)
    figure.suptitle(f"Causal attention in bf16, TFLOP/s: {title}")
    figure.legend(lines.values(), lines, loc="outside lower center", ncols=4)
    figure.savefig(path, dpi=100)


def numbers(name: str, text: str) -> list[int]:
    """The numbers of a comma-separated setting, sorted, each once."""
    fine = re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", text)
    require(fine, f"--{name} wants whole numbers with commas between, such as 64,128, not {text!r}")
    return sorted(set(map(int, text.split(","))))


def main(argv) -> None:
    """The tables of `bench attention`, and its files: those of figures are written anew after every shape."""
    (args,) = config.load(argv, AttentionArgs)
    device = processes.pick_device(args.device, 0, 1, 1)
    require(device.type in SIZES, f"attention is not measured on {device.type}: set --device=cpu")
    require(args.rounds > 0, f"rounds must be at least 1, not {args.rounds}")
    processes.keep_freed_memory()  # as training on a CPU does
    given = (args.lengths, args.tokens, args.d_model)
    lengths, tokens, d_model = (a or b for a, b in zip(given, SIZES[device.type], strict=True))
    lengths, head_dims = numbers("lengths", lengths), numbers("head_dims", args.head_dims)
    about = runlog.versions()
    about["triton"] = (
        importlib.import_module("triton").__version__ if attention.HAS_TRITON else "none"
    )
    about["device"], command = (
        devices.describe(device),
        " ".join(["python -m bench attention", *argv]),
    )
    title = f"{about['device']}, torch {about['torch']}, triton {about['triton']}, {datetime.date.today()}"
    what_was_done = (
        f"`{command}`, {title}, {torch.get_num_threads()} threads, bf16, causal, {tokens} tokens a batch, heads x head "
        f"dim = {d_model}, median of {args.rounds} turns. A forward counts as 4 B H T T D / 2 FLOPs (causality needs "
        "half), a backward as 2.5 times that. In the tables of ratios, above 1 means that ours is faster."
    )
    path = Path(args.out) / re.sub(r"\W+", "_", f"attention {about['device']}".lower())
    path.parent.mkdir(parents=True, exist_ok=True)
    cells, rates = [], []
    for head_dim, length in itertools.product(head_dims, lengths):
        begin, heads, batch = (
            time.perf_counter(),
            max(1, d_model // head_dim),
            max(1, tokens // length),
        )
        torch.compiler.reset()  # FlexAttention is compiled for each length, not once for all
        contestants = attention_contestants(attention.alibi_slopes(heads, device=device))
        here = [Cell(name, head_dim, length, heads, batch) for name in contestants]
        measure(contestants, here, device, args, check=length == lengths[0])
        rates.append(devices.measure_peak(device, torch.bfloat16) / 1e12)
        cells, gemm = cells + here, statistics.median(rates)
        text = "\n".join(
            [
                what_was_done,
                f"A square bf16 matmul reaches {gemm:.4g} TFLOP/s here.",
                *report(cells),
                "",
            ]
        )
        rows = [
            asdict(c) | ({} if c.missing else {f"{p}, TFLOP/s": c.tflops(p) for p in PASSES})
            for c in cells
        ]
        raw = {
            "command": command,
            **about,
            "settings": asdict(args),
            "matmul, TFLOP/s": rates,
            "cells": rows,
        }
        path.with_suffix(".json").write_text(json.dumps(raw, indent=1))
        path.with_suffix(".md").write_text(text)
        print(
            f"head dim {head_dim}, {batch} x {length} tokens: {time.perf_counter() - begin:.0f} s",
            file=sys.stderr,
        )
    print(text)
    if importlib.util.find_spec("matplotlib"):
        draw(cells, gemm, title, path.with_suffix(".png"))
    else:
        print(
            "no picture: it needs matplotlib, which is in requirements-extra.txt", file=sys.stderr
        )


if __name__ == "__main__":
    processes.run(main)
