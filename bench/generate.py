"""Decoding: milliseconds of a token, beside the least that the memory of this device allows.

    python -m bench generate [THREADS]    a minute on two CPU cores
    python -m bench generate --shapes=2048x24 --engine=32 --out=generate.csv

It reads prompts of 32 tokens and writes 32 more, with a cache. Timed are the steps after the
prompt; figures are medians of several turns, of which the first does not count: on a GPU it
captures CUDA graphs (serving/step_graph.py). --engine=32 adds serving/engine.py with 32 texts at a
time, and all that it does on the host. fp32 and bf16 are the dtype of the weights; the cache is
fp32 on a CPU. The limit is the time in which a GPU reads weights and cache once, at the bandwidth
of its datasheet (serving/speed.py): a token takes at least as long. n/a if devices.py does
not know the GPU.
"""

import csv
import datetime
import functools
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
from program import require
from serving.decoder import Decoder, generate
from serving.engine import Engine, Request
from serving.sampling import Sampling
from serving.speed import ms_per_token
from serving.stream import Text
from storage import files
from text import tokenizer as tokenizers

VOCAB = 50368
PROMPT_TOKENS = 32
NEW_TOKENS = 32
DRAWS = {"greedy": {"temperature": 0}, "top_k 50": {"temperature": 0.8, "top_k": 50}}
TIMES = ["ms a token", "least", "limit, ms a token", "tokens/s"]
COLUMNS = ["shape", "weights", "batch", "tokens", *TIMES]


@dataclass
class GenerateArgs:
    """What to measure."""

    device: Literal["auto", "cpu", "cuda"] = "auto"  # cuda is ROCm too
    shapes: str = "512x8,768x12"  # models: width x layers, with heads of 64
    turns: int = 5  # the median counts
    engine: int = 0  # also measure the engine with so many texts at a time
    out: str = ""  # CSV of the table

    def check(self) -> None:
        """UserError if a shape is none."""
        form = re.fullmatch(r"[1-9]\d{0,4}x[1-9]\d?(,[1-9]\d{0,4}x[1-9]\d?)*", self.shapes)
        require(form, f"shapes are WIDTHxLAYERS, such as 512x8,768x12, not {self.shapes!r}")
        for width, layers in sizes_of(self.shapes):
            divides = width % 64 == 0
            require(divides, f"shape {width}x{layers}: the width must be a multiple of 64")
        require(self.engine >= 0, "engine must be 0 or more")


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
    """Continue prompts (B, T); milliseconds of each new token after the first."""
    uniforms = torch.rand(len(prompts), NEW_TOKENS, device=decoder.device)
    tokens = generate(decoder, prompts, NEW_TOKENS, uniforms=uniforms, **settings)
    next(tokens).cpu()  # waits for the device
    begin = time.perf_counter()
    for token in tokens:
        last = token
    last.cpu()
    return 1e3 * (time.perf_counter() - begin) / (NEW_TOKENS - 1)


def engine_turn(engine: Engine, settings: dict) -> float:
    """Fill all rows of an engine with texts; milliseconds of a step, a new token for each text."""
    tokenizer = tokenizers.Tokenizer("bytes", [b"x"] * VOCAB)
    prompt = list(range(PROMPT_TOKENS))
    cfg = engine.decoder.cfg
    texts = [Text(prompt, tokenizer, cfg, NEW_TOKENS, seed=n) for n in range(engine.n_rows)]
    steps, seconds = engine.speed.steps, engine.speed.seconds
    for _ in engine.run([Request(text, Sampling(**settings)) for text in texts]):
        pass
    return 1e3 * (engine.speed.seconds - seconds) / (engine.speed.steps - steps)


def limit(decoder: Decoder, batch: int) -> str:
    """Milliseconds that this GPU needs to read weights and cache in the middle of a text."""
    row = devices.identify(decoder.device)
    if not row:
        return "n/a"
    context = PROMPT_TOKENS + NEW_TOKENS // 2
    width = decoder.dtype.itemsize
    ms = ms_per_token(decoder.cfg, batch, context, row.bandwidth_gbs, width)
    return f"{ms:.3f}"


def measure(args: GenerateArgs, device: torch.device):
    """Yield one row of the table after another."""
    for width, layers in sizes_of(args.shapes):
        for dtype in (torch.float32, torch.bfloat16):
            decoder = make_decoder(width, layers, dtype, device)
            ways = {}  # name -> (batch, function of settings, which returns milliseconds)
            for batch in (1, 8):
                prompts = torch.randint(VOCAB, (batch, PROMPT_TOKENS), device=device)
                ways[str(batch)] = batch, functools.partial(turn, decoder, prompts)
            if args.engine:
                at_once = args.engine * PROMPT_TOKENS  # all prompts are read before the first step
                room = PROMPT_TOKENS + NEW_TOKENS
                engine = Engine(decoder, args.engine, room, chunk=at_once)
                ways[f"engine, {args.engine}"] = args.engine, functools.partial(engine_turn, engine)
            for name, (batch, timed) in ways.items():
                for draw, settings in DRAWS.items():
                    ms = [timed(settings) for _ in range(args.turns + 1)][1:]
                    median = statistics.median(ms)
                    row = [f"{width}x{layers}", str(dtype).removeprefix("torch."), name, draw]
                    row += [f"{median:.2f}", f"{min(ms):.2f}", limit(decoder, batch)]
                    yield [*row, f"{1e3 * batch / median:,.0f}"]


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
