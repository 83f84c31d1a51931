"""Decoding: milliseconds of a token, beside the least that the memory of this device allows.

    python -m bench generate [THREADS]    a minute on two CPU cores
    python -m bench generate --shapes=2048x24 --out=generate.csv

It reads prompts of 32 tokens and writes 32 more, with a cache; figures are medians of several
turns. fp32 and bf16 are the dtype of the weights; the cache is fp32 on a CPU. The limit is the time
in which a GPU reads weights and cache once, at the bandwidth of its datasheet
(planning/decode_time.py): a token takes at least as long. n/a if devices.py does not know the GPU.
"""

import csv
import datetime
import io
import platform
import re
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

import config
import devices
import processes
import program
from config import MPTConfig
from model import MPT, init_weights
from planning import decode_time
from program import require
from serving.decoder import Decoder, generate
from storage import files

VOCAB = 50368
PROMPT_TOKENS = 32
NEW_TOKENS = 32
DRAWS = {"greedy": {"temperature": 0}, "top_k 50": {"temperature": 0.8, "top_k": 50}}
COLUMNS = ["shape", "weights", "batch", "tokens", "ms a token", "least", "limit, ms a token"]


@dataclass
class GenerateArgs:
    """What to measure."""

    device: Literal["auto", "cpu", "cuda"] = "auto"  # cuda is ROCm too
    shapes: str = "512x8,768x12"  # models: width x layers, with heads of 64
    turns: int = 5  # the median counts
    out: str = ""  # CSV of the table

    def check(self) -> None:
        """UserError if a shape is none."""
        form = re.fullmatch(r"[1-9]\d{0,4}x[1-9]\d?(,[1-9]\d{0,4}x[1-9]\d?)*", self.shapes)
        require(form, f"shapes are WIDTHxLAYERS, such as 512x8,768x12, not {self.shapes!r}")
        for width, layers in sizes_of(self.shapes):
            divides = width % 64 == 0
            require(divides, f"shape {width}x{layers}: the width must be a multiple of 64")


def sizes_of(shapes: str) -> list[tuple[int, int]]:
    """`512x8,768x12` -> [(512, 8), (768, 12)], width and layers."""
    pairs = [shape.split("x") for shape in shapes.split(",")]
    return [(int(width), int(layers)) for width, layers in pairs]


def make_decoder(width: int, layers: int, dtype, device) -> Decoder:
    """A decoder with random weights."""
    m = MPTConfig(
        d_model=width,
        n_heads=width // 64,
        n_layers=layers,
        vocab_size=VOCAB,
        alibi=True,
        no_bias=True,
    )
    model = MPT(m)
    init_weights(model, 0)
    return Decoder(model.to(device), VOCAB, dtype)


def turn(decoder: Decoder, prompts, settings: dict) -> float:
    """Continue prompts (B, T); milliseconds of each new token."""
    begin = time.perf_counter()
    uniforms = torch.rand(len(prompts), NEW_TOKENS, device=decoder.device)
    for token in generate(decoder, prompts, NEW_TOKENS, uniforms=uniforms, **settings):
        last = token
    last.cpu()  # waits for the device
    return 1e3 * (time.perf_counter() - begin) / NEW_TOKENS


def limit(decoder: Decoder, batch: int) -> str:
    """Milliseconds that this GPU needs to read weights and cache in the middle of a text."""
    row = devices.identify(decoder.device)
    if not row:
        return "n/a"
    context = PROMPT_TOKENS + NEW_TOKENS // 2
    width = decoder.dtype.itemsize
    ms = decode_time.ms_per_token(decoder.cfg, batch, context, row.bandwidth_gbs, width)
    return f"{ms:.3f}"


def measure(args: GenerateArgs, device: torch.device):
    """Yield one row of the table after another."""
    for width, layers in sizes_of(args.shapes):
        for dtype in (torch.float32, torch.bfloat16):
            decoder = make_decoder(width, layers, dtype, device)
            for batch in (1, 8):
                prompts = torch.randint(VOCAB, (batch, PROMPT_TOKENS), device=device)
                for draw, settings in DRAWS.items():
                    turns = [turn(decoder, prompts, settings) for _ in range(args.turns + 1)]
                    ms = turns[1:]  # the first turn warmed up
                    name = str(dtype).removeprefix("torch.")
                    figures = [f"{statistics.median(ms):.2f}", f"{min(ms):.2f}"]
                    row = [f"{width}x{layers}", name, str(batch), draw, *figures]
                    yield [*row, limit(decoder, batch)]


def main(argv: list[str]) -> None:
    """Print milliseconds of a token for each shape, dtype, batch and way to draw."""
    given, args = config.load(argv, GenerateArgs, takes="[THREADS]")
    (threads,) = given or [str(torch.get_num_threads())]
    valid = threads.isdecimal() and int(threads) > 0
    require(valid, f"the number of threads is {program.shown(threads)}: give 1 or more")
    torch.set_num_threads(int(threads))
    device = processes.pick_device(args.device, 0, 1, 1)
    machine = f"{devices.describe(device)}, {platform.machine()}, {threads} threads"
    print(f"{datetime.date.today()}, {machine}, torch {torch.__version__}\n", flush=True)

    rows = []
    for row in measure(args, device):
        rows.append(row)
        print("  ", *row, file=sys.stderr, flush=True)
        if args.out:
            text = io.StringIO()
            csv.writer(text).writerows([COLUMNS, *rows])
            files.write_atomically(Path(args.out), text.getvalue().encode())
    print(program.table(COLUMNS, rows))


if __name__ == "__main__":
    program.run(main)
