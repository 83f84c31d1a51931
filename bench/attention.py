"""Attention: ours beside PyTorch's kernels, forward and backward, over head dims and lengths.

    python -m bench attention        takes minutes, on a GPU or a CPU

    FLOPs of a forward  = 4 B H T T D / 2    the causal mask needs half of T x T
    FLOPs of a backward = 2.5 times as many

The contestants run in one process and take turns, so that other load on the machine slows all of
them; figures are medians. All contestants are credited with the FLOPs of the formula, whatever a
kernel really computes. On a GPU the calls are queued behind other work and timed there, so that the
time in which Python launches them does not count. A contestant that raises (no such backend here,
out of memory) is n/a, and the others continue. Writes attention_<device>.md into bench/results/.
"""

import datetime
import functools
import gc
import importlib
import itertools
import math
import re
import statistics
import sys
import textwrap
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import attention
import config
import devices
import processes
import program
from bench.compare import markdown
from program import require

MATMULS = (2, 5)  # of forward and backward
# What is reported, and which of a turn's two times count for it.
PASSES = {"forward": [0], "backward": [1], "forward + backward": [0, 1]}
OURS = "ours, ALiBi"  # what the others are compared with
# Largest allowed difference from fp32 / largest value. bf16 stays below 0.01; a wrong bias is
# above 0.1.
TOLERANCE = 0.05
# By device: lengths, tokens of a batch (batch x length), d_model (heads x head dim)
SIZES = {"cuda": ("1024,2048,4096,8192,16384", 16384, 2048), "cpu": ("512,1024,2048", 4096, 384)}


@dataclass
class AttentionArgs:
    """Which shapes of attention, and how long to measure."""

    device: Literal["auto", "cpu", "cuda"] = "auto"  # cuda is ROCm too
    lengths: str = ""  # tokens of a sequence (empty: 1024,2048,...,16384, on a CPU 512,1024,2048)
    head_dims: str = "64,128"  # widths of a head
    tokens: int = 0  # of a batch: tokens / length sequences, at least one (0: 16384, on a CPU 4096)
    d_model: int = 0  # d_model / head dim heads, at least one (0: 2048, on a CPU 384)
    rounds: int = 7  # turns of each contestant; the median counts
    turn_ms: float = 20  # a turn takes about this long, in 1 to 25 calls
    cell_seconds: float = 10  # skip a contestant at a shape where it would take longer
    out: str = "bench/results"  # folder of the results


@dataclass
class Cell:
    """One contestant at one shape."""

    contestant: str
    head_dim: int
    length: int  # tokens of a sequence
    heads: int
    batch: int
    # Of each turn: seconds of one forward, seconds of one backward
    turns: list[tuple[float, float]] = field(default_factory=list)
    calls: int = 0  # of a turn
    # Largest difference from fp32 / largest value, checked at the shortest length only
    error: float | None = None
    missing: str = ""  # why there are no figures

    def tflops(self, name: str) -> float:
        """TFLOP/s of one of PASSES, by median seconds and the formula at the top of this file."""
        passes = PASSES[name]
        seconds = sum(statistics.median(turn[i] for turn in self.turns) for i in passes)
        # One matmul is 2 B H T T D FLOPs, and the causal mask needs half of them.
        matmul_flops = self.batch * self.heads * self.length**2 * self.head_dim
        return sum(MATMULS[i] for i in passes) * matmul_flops / seconds / 1e12


# --- The contestants


def attention_contestants(slopes) -> dict:
    """{name: (its ALiBi slopes (H,) or None, function (q, k, v) -> out)}.

    All are causal; q, k, v and out are (B, H, T, D).
    """

    def ours(impl, slopes=slopes):
        return slopes, functools.partial(attention.attention, impl=impl, alibi_slopes=slopes)

    def sdpa(backend):
        return None, functools.partial(sdpa_causal, backend)

    @functools.cache  # made while warming up, freed with this dictionary
    def mask(length):  # (1, H, T, T) bf16; head by head, since all heads in fp32 may not fit
        biases = [
            attention.attention_bias(length, length, slope, True, slope.device).bfloat16()
            for slope in slopes.split(1)
        ]
        return torch.cat(biases)[None]

    def sdpa_with_mask(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, mask(q.shape[2]))

    return {
        OURS: ours("triton"),
        "ours, no bias": ours("triton", None),
        "SDPA flash, no bias": sdpa(SDPBackend.FLASH_ATTENTION),
        "SDPA cuDNN, no bias": sdpa(SDPBackend.CUDNN_ATTENTION),
        "SDPA memory-efficient, no bias": sdpa(SDPBackend.EFFICIENT_ATTENTION),
        "SDPA, ALiBi in a mask": (slopes, sdpa_with_mask),
        "SDPA, ALiBi in extra columns": ours("sdpa"),
        "FlexAttention, ALiBi": ours("flex"),
        "blocks, ALiBi": ours("blocks"),
        "reference, ALiBi": ours("reference"),
    }


def sdpa_causal(backend: SDPBackend, q, k, v):
    """PyTorch's attention with one backend; q, k, v (B, H, T, D) -> (B, H, T, D)."""
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def attention_inputs(cell: Cell, device) -> list:
    """q, k, v and the gradient of out: (B, H, T, D) in bf16, with the strides of the model.

    q, k and v are views of one (B, T, 3 d_model), as Wqkv makes it; the gradient is a view of
    (B, T, d_model), as out_proj's backward makes it.
    """
    torch.manual_seed(0)
    d_model = cell.heads * cell.head_dim
    shape = (cell.batch, cell.length)
    bf16 = {"device": device, "dtype": torch.bfloat16}
    qkv = torch.randn(*shape, 3 * d_model, requires_grad=True, **bf16)
    grad_out = torch.randn(*shape, d_model, **bf16)
    return [
        tensor.unflatten(-1, (cell.heads, cell.head_dim)).transpose(1, 2)
        for tensor in (*qkv.chunk(3, dim=-1), grad_out)
    ]


# --- Measuring


def largest_error(slopes, function, q, k, v, grad_out) -> float:
    """The largest difference from fp32, as a share of the largest value.

    The maximum over out and the gradients of q, k and v, of the first sequence of the batch.
    """
    out = function(q, k, v)
    results = [out, *torch.autograd.grad(out, (q, k, v), grad_out)]

    q, k, v = (x[:1].detach().float().requires_grad_() for x in (q, k, v))
    out = attention.attention(q, k, v, impl="reference", alibi_slopes=slopes)
    exact = [out, *torch.autograd.grad(out, (q, k, v), grad_out[:1].float())]

    errors = []
    for result, reference in zip(results, exact, strict=True):
        difference = (result[:1] - reference).abs().max()
        errors.append((difference / reference.abs().max()).item())
    return max(errors)


def mark(gpu: bool):
    """This moment: an event in the queue of a GPU, else seconds."""
    if not gpu:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    return torch.cuda.current_stream().record_event(event)


def seconds_between(begin, end) -> float:
    """Seconds between two marks."""
    if isinstance(begin, float):
        return end - begin
    return begin.elapsed_time(end) / 1e3  # elapsed_time is in milliseconds


def keep_gpu_busy(device) -> None:
    """Queue 5 ms of other work, so that Python runs ahead of the GPU, as within a training step.

    It also leaves the caches cold.
    """
    scratch = torch.empty(2**28, dtype=torch.uint8, device=device)  # 256 MiB take 0.1 ms
    for _ in range(50):
        scratch.zero_()


def take_turn(function, q, k, v, grad_out, calls: int) -> tuple[float, float]:
    """Seconds of one forward and of one backward: means of `calls` calls.

    One more call comes first, in which the allocator settles. Each backward has a forward of its
    own, since what torch.compile makes does not support retain_graph=True.
    """
    gpu = q.device.type == "cuda"
    if gpu:
        keep_gpu_busy(q.device)
    marks = []
    for _ in range(calls + 1):
        begin = mark(gpu)
        out = function(q, k, v)
        middle = mark(gpu)
        torch.autograd.grad(out, (q, k, v), grad_out)
        marks.append((begin, middle, mark(gpu)))
        del out  # before the next call allocates memory
    if gpu:
        torch.cuda.synchronize()

    measured = marks[1:]
    forward = statistics.fmean(seconds_between(begin, middle) for begin, middle, _ in measured)
    backward = statistics.fmean(seconds_between(middle, end) for _, middle, end in measured)
    return forward, backward


def warm_up(cell: Cell, slopes, function, tensors, args: AttentionArgs, check: bool) -> None:
    """Compile, compare with fp32 if `check`, and choose the calls of a turn.

    Raises whatever the contestant raises, and UserError if its result is wrong or it is too slow.
    """
    if check:
        cell.error = largest_error(slopes, function, *tensors)
        require(cell.error <= TOLERANCE, f"wrong by {cell.error:.0%}")
    take_turn(function, *tensors, calls=1)
    seconds = sum(take_turn(function, *tensors, calls=1))
    calls = math.ceil(args.turn_ms / 1e3 / seconds)
    cell.calls = min(max(calls, 1), 25)
    expected_seconds = seconds * (cell.calls + 1) * args.rounds
    require(expected_seconds <= args.cell_seconds, f"too slow, {seconds:.2g} s a call")


def measure(contestants: dict, cells: list[Cell], device, args: AttentionArgs, check: bool) -> None:
    """Fill the cells, one for each contestant, all of one shape, in turns.

    A contestant that raises drops out; its cell says why.
    """
    tensors = attention_inputs(cells[0], device)
    for turn in range(args.rounds + 1):
        for cell in [cell for cell in cells if not cell.missing]:
            slopes, function = contestants[cell.contestant]
            try:
                if turn == 0:
                    warm_up(cell, slopes, function, tensors, args, check)
                else:
                    cell.turns.append(take_turn(function, *tensors, cell.calls))
            except Exception as error:  # whatever it is, the others continue
                cell.missing = short_reason(error)
                message = f"{type(error).__name__}: {str(error)[:300]}"
                print(f"  {cell.contestant}: {message}", file=sys.stderr)
            if cell.missing:  # after the except block, where nothing holds the tensors any more
                gc.collect()
                torch.cuda.empty_cache()


def short_reason(error: Exception) -> str:
    """An error in at most 45 characters, for a cell of a Markdown table."""
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    text = str(error).replace("|", "/") or type(error).__name__
    return textwrap.shorten(text, 45, placeholder="...")


# --- The results


def report(cells: list[Cell]) -> list[str]:
    """Markdown: a table for each head dim and pass, in TFLOP/s, and one of ratios to OURS."""
    with_figures = {cell.contestant for cell in cells if not cell.missing}
    absent = {c.contestant: c.missing for c in cells if c.contestant not in with_figures}
    parts = [f"Not available: {name} ({reason})." for name, reason in absent.items()]
    cells = [cell for cell in cells if cell.contestant in with_figures]
    our_cells = {(cell.head_dim, cell.length): cell for cell in cells if cell.contestant == OURS}

    def rate(name: str, cell: Cell) -> str:
        return f"n/a: {cell.missing}" if cell.missing else f"{cell.tflops(name):.3g}"

    def ratios(cell: Cell) -> str:
        our_cell = our_cells[cell.head_dim, cell.length]
        if cell.missing or our_cell.missing:
            return "n/a"
        return " / ".join(f"{our_cell.tflops(name) / cell.tflops(name):.2f}" for name in PASSES)

    tables = {f"{name}, TFLOP/s": functools.partial(rate, name) for name in PASSES}
    if our_cells:
        tables[f"{OURS} / this row: {', '.join(PASSES)}"] = ratios
    for head_dim in dict.fromkeys(cell.head_dim for cell in cells):
        for title, text_of in tables.items():
            corner = f"head dim {head_dim}, {title}"
            rows = {}
            for cell in cells:
                if cell.head_dim == head_dim:
                    row = rows.setdefault(cell.contestant, {corner: cell.contestant})
                    row[f"{cell.length:,}"] = text_of(cell)
            parts.append(markdown(list(rows.values())))
    return parts


# --- The program


def whole_numbers(name: str, text: str) -> list[int]:
    """The numbers of a setting such as 64,128, sorted, each once. UserError if it has others."""
    valid = re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", text)
    message = f"--{name} wants whole numbers with commas between, such as 64,128, not {text!r}"
    require(valid, message)
    return sorted(set(map(int, text.split(","))))


def heading(command: str, title: str, args: AttentionArgs, matmul_tflops: float) -> str:
    """The command, the versions and the method, in a few sentences."""
    return (
        f"`{command}`, {title}, {torch.get_num_threads()} threads, bf16, causal, {args.tokens} "
        f"tokens a batch, heads x head dim = {args.d_model}, median of {args.rounds} turns. A "
        "forward counts as 4 B H T T D / 2 FLOPs (causality needs half), a backward as 2.5 times "
        "that. In the tables of ratios, above 1 means that ours is faster. A square bf16 matmul "
        f"reaches {matmul_tflops:.4g} TFLOP/s here."
    )


def measure_shape(head_dim: int, length: int, device, args: AttentionArgs, check: bool):
    """The cells of all contestants at one shape, and the TFLOP/s of a bf16 matmul."""
    begin = time.perf_counter()
    heads = max(1, args.d_model // head_dim)
    batch = max(1, args.tokens // length)
    torch.compiler.reset()  # FlexAttention is compiled for each length, not once for all
    contestants = attention_contestants(attention.alibi_slopes(heads, device=device))
    cells = [Cell(name, head_dim, length, heads, batch) for name in contestants]
    measure(contestants, cells, device, args, check)
    shape = f"head dim {head_dim}, {batch} x {length} tokens"
    print(f"{shape}: {time.perf_counter() - begin:.0f} s", file=sys.stderr)
    return cells, devices.measure_peak(device, torch.bfloat16) / 1e12


def main(argv) -> None:
    """Measure shape by shape, and write the tables again after each."""
    (args,) = config.load(argv, AttentionArgs)
    device = processes.pick_device(args.device, 0, 1, 1)
    require(device.type in SIZES, f"attention is not measured on {device.type}: set --device=cpu")
    processes.keep_freed_memory()  # as training on a CPU does
    default_lengths, default_tokens, default_d_model = SIZES[device.type]
    lengths = whole_numbers("lengths", args.lengths or default_lengths)
    head_dims = whole_numbers("head_dims", args.head_dims)
    args.tokens = args.tokens or default_tokens
    args.d_model = args.d_model or default_d_model

    command = f"python -m bench attention {program.shell(*argv)}".strip()
    triton = importlib.import_module("triton").__version__ if attention.HAS_TRITON else "none"
    name = devices.describe(device)
    title = f"{name}, torch {torch.__version__}, triton {triton}, {datetime.date.today()}"
    path = Path(args.out) / re.sub(r"\W+", "_", f"attention {name}".lower())
    path.parent.mkdir(parents=True, exist_ok=True)

    cells, matmul_rates = [], []
    for head_dim, length in itertools.product(head_dims, lengths):
        check = length == lengths[0]
        new_cells, matmul_rate = measure_shape(head_dim, length, device, args, check)
        cells += new_cells
        matmul_rates.append(matmul_rate)
        matmul = statistics.median(matmul_rates)
        text = "\n\n".join([heading(command, title, args, matmul), *report(cells)])
        path.with_suffix(".md").write_text(text + "\n")

    print(text)


if __name__ == "__main__":
    processes.run(main)
