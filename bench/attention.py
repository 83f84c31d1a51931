"""Attention: ours beside PyTorch's kernels, forward and backward, over head dims and lengths.

    python -m bench attention        takes minutes, on a GPU or a CPU

    FLOPs of a forward  = 4 B H T T D / 2    the causal mask needs half of T x T
    FLOPs of a backward = 2.5 times as many

The contestants run in one process and take turns, so that other load on the machine slows all of
them; figures are medians. All contestants are credited with the FLOPs of the formula, whatever a
kernel really computes. A turn is timed by torch.utils.benchmark, of many calls in a row. A
contestant that raises (no such backend here, out of memory) is n/a, and the others continue. Writes
attention_<device>.md into bench/results/.
"""

import datetime
import functools
import gc
import importlib
import importlib.util
import itertools
import math
import re
import statistics
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.benchmark import Timer

import attention
import config
import devices
import processes
import program
from bench.compare import markdown
from config import Int
from program import require

OURS = "ours, ALiBi"  # what the others are compared with
PASSES = ("forward", "forward + backward")
RATIO = f"{OURS} / this"  # of both passes
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
    tokens: Int[1, 10**18] = 0  # of a batch, at least one sequence (0: 16384, on a CPU 4096)
    d_model: Int[1, 2**20] = 0  # d_model / head dim heads, at least one (0: 2048, on a CPU 384)
    rounds: Int[1, 10**6] = 7  # turns of each contestant; the median counts
    turn_ms: float = 20  # a turn takes about this long, in 1 to 25 calls
    cell_seconds: float = 10  # skip a contestant at a shape where it would take longer
    out: str = "bench/results"  # folder of the results


class Shape(NamedTuple):
    """What is measured."""

    head_dim: int
    length: int  # tokens of a sequence
    heads: int
    batch: int  # sequences

    def tflops(self, seconds: tuple[float, float]) -> tuple[float, float]:
        """TFLOP/s of a forward and of both passes, by the formula at the top of this file."""
        forward, both = seconds
        # One matmul is 2 B H T T D FLOPs, and the causal mask needs half of them.
        matmul = self.batch * self.heads * self.length**2 * self.head_dim / 1e12
        return 2 * matmul / forward, 7 * matmul / both


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
    def mask(length):
        rule = attention.ScoreRule(1.0, slopes)
        bias = attention.attention_bias(length, length, rule, slopes.device)
        return bias[None].bfloat16()  # (1, H, T, T)

    def sdpa_with_mask(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, mask(q.shape[2]))

    return {
        OURS: ours("triton"),
        "ours, no bias": ours("triton", None),
        "SDPA flash, no bias": sdpa(SDPBackend.FLASH_ATTENTION),
        "SDPA cuDNN, no bias": sdpa(SDPBackend.CUDNN_ATTENTION),
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


def attention_inputs(shape: Shape, device) -> list:
    """q, k, v and the gradient of out: (B, H, T, D) in bf16, with the strides of the model.

    q, k and v are views of one (B, T, 3 d_model), as Wqkv makes it; the gradient is a view of
    (B, T, d_model), as out_proj's backward makes it.
    """
    torch.manual_seed(0)
    heads = (shape.heads, shape.head_dim)
    d_model = math.prod(heads)
    size = (shape.batch, shape.length)
    bf16 = {"device": device, "dtype": torch.bfloat16}
    qkv = torch.randn(*size, 3 * d_model, requires_grad=True, **bf16)
    grad_out = torch.randn(*size, d_model, **bf16)
    return [
        tensor.unflatten(-1, heads).transpose(1, 2) for tensor in (*qkv.chunk(3, dim=-1), grad_out)
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


def take_turn(function, q, k, v, grad_out, calls: int) -> tuple[float, float]:
    """Seconds of one forward, and of one with its backward: means of `calls` calls in a row.

    Python launches the calls without waiting, so on a GPU only the first finds an empty queue.
    """
    names = {"f": function, "grad": torch.autograd.grad, "q": q, "k": k, "v": v, "g": grad_out}
    return tuple(
        Timer(code, globals=names, num_threads=torch.get_num_threads()).timeit(calls).mean
        for code in ("f(q, k, v)", "grad(f(q, k, v), (q, k, v), g)")
    )


def warm_up(slopes, function, tensors, args: AttentionArgs, check: bool) -> int:
    """Compile, compare with fp32 if `check`, and choose the calls of a turn.

    Raises whatever the contestant raises, and UserError if its result is wrong or it is too slow.
    """
    if check:
        error = largest_error(slopes, function, *tensors)
        require(error <= TOLERANCE, f"wrong by {error:.0%}")
    seconds = sum(take_turn(function, *tensors, calls=1))  # two forwards, one backward
    calls = min(max(math.ceil(args.turn_ms / 1e3 / seconds), 1), 25)
    expected_seconds = seconds * (calls + 2) * args.rounds  # Timer warms up with 2
    require(expected_seconds <= args.cell_seconds, f"too slow, {seconds:.2g} s a call")
    return calls


def measure(contestants: dict, shape: Shape, device, args: AttentionArgs, check: bool) -> dict:
    """{contestant: median seconds of a forward and of both passes, or why there are none}.

    They take turns. One that raises drops out.
    """
    tensors = attention_inputs(shape, device)
    calls, turns, missing = {}, {name: [] for name in contestants}, {}
    for turn in range(args.rounds + 1):
        for name, (slopes, function) in contestants.items():
            if name in missing:
                continue
            try:
                if turn == 0:
                    calls[name] = warm_up(slopes, function, tensors, args, check)
                else:
                    turns[name].append(take_turn(function, *tensors, calls[name]))
            except Exception as error:  # whatever it is, the others continue
                missing[name] = short_reason(error)
                message = f"{type(error).__name__}: {str(error)[:300]}"
                print(f"  {name}: {message}", file=sys.stderr)
            if name in missing:  # after the except block, where nothing holds the tensors any more
                gc.collect()
                torch.cuda.empty_cache()
    for name in contestants.keys() - missing:
        passes = zip(*turns[name], strict=True)
        turns[name] = tuple(map(statistics.median, passes))
    return turns | missing


def short_reason(error: Exception) -> str:
    """An error in at most 45 characters, for a cell of a Markdown table."""
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    text = str(error).replace("|", "/") or type(error).__name__
    return textwrap.shorten(text, 45, placeholder="...")


# --- The program


def whole_numbers(name: str, text: str) -> list[int]:
    """The numbers of a setting such as 64,128, sorted, each once. UserError if it has others."""
    valid = re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", text)
    message = f"--{name} wants whole numbers with commas between, such as 64,128, not {text!r}"
    require(valid, message)
    return sorted(set(map(int, text.split(","))))


def rows(args: AttentionArgs, device) -> Iterator[dict]:
    """A row {column: cell} for each contestant at each shape."""
    default_lengths, default_tokens, default_d_model = SIZES[device.type]
    lengths = whole_numbers("lengths", args.lengths or default_lengths)
    tokens = args.tokens or default_tokens
    d_model = args.d_model or default_d_model
    for head_dim, length in itertools.product(whole_numbers("head_dims", args.head_dims), lengths):
        heads, batch = max(1, d_model // head_dim), max(1, tokens // length)
        shape = Shape(head_dim, length, heads, batch)
        torch.compiler.reset()  # FlexAttention is compiled for each length, not once for all
        contestants = attention_contestants(attention.alibi_slopes(heads, device=device))
        found = measure(contestants, shape, device, args, check=length == lengths[0])
        for name, seconds in found.items():
            row = {"heads of": head_dim, "batch": f"{batch} x {length}", "attention": name}
            yield row | cells(shape, seconds, found[OURS])


def cells(shape: Shape, seconds, our_seconds) -> dict:
    """The figures of a row: TFLOP/s, and those of OURS in relation to them."""
    if isinstance(seconds, str):  # why there are none
        return dict.fromkeys(PASSES, "n/a") | {RATIO: seconds}
    figures = shape.tflops(seconds)
    ratio = "n/a"
    if not isinstance(our_seconds, str):
        ratio = f"{seconds[-1] / our_seconds[-1]:.2f}"
    return {name: f"{n:.3g}" for name, n in zip(PASSES, figures, strict=True)} | {RATIO: ratio}


def main(argv) -> None:
    """Measure row by row, and write the table again after each."""
    (args,) = config.load(argv, AttentionArgs)
    device = processes.pick_device(args.device, 0, 1, 1)
    require(device.type in SIZES, f"attention is not measured on {device.type}: set --device=cpu")
    devices.keep_freed_memory()  # as training on a CPU does
    command = f"python -m bench attention {program.shell(*argv)}".strip()
    has_triton = importlib.util.find_spec("triton")
    triton = importlib.import_module("triton").__version__ if has_triton else "none"
    name = devices.describe(device)
    matmul = devices.measure_peak(device, torch.bfloat16) / 1e12
    heading = (
        f"`{command}`, {name}, torch {torch.__version__}, triton {triton}, "
        f"{datetime.date.today()}, {torch.get_num_threads()} threads, bf16, causal, median of "
        f"{args.rounds} turns. TFLOP/s: a forward counts as 4 B H T T D / 2 FLOPs (causality needs "
        f"half), a backward as 2.5 times that. A square bf16 matmul reaches {matmul:.4g} here. "
        f"{RATIO}: above 1 means that ours is faster."
    )
    path = Path(args.out) / re.sub(r"\W+", "_", f"attention {name}".lower())
    path.parent.mkdir(parents=True, exist_ok=True)

    measured = []
    for row in rows(args, device):
        measured.append(row)
        print("  ", *row.values(), file=sys.stderr, flush=True)
        text = f"{heading}\n\n{markdown(measured)}\n"
        path.with_suffix(".md").write_text(text)
    print(text, end="")


if __name__ == "__main__":
    processes.run(main)
