"""Decoding, beside transformers' `generate` with its cache: the same weights, prompts and shapes.

    python -m bench generate [THREADS]    two minutes on two CPU cores
    python -m bench generate --shapes=2048x24 --out=generate.csv

Both read prompts of 32 tokens and write 32 more, and take turns. fp32 and bf16 are the dtype of
both models' weights; our cache is fp32 on a CPU. A ratio is transformers' seconds over ours, the
median over the turns: above 1, ours is faster. In fp32 on a CPU the greedy texts must be equal.
Without transformers (see requirements-dev.txt) ours is measured alone.

The limit is the time in which a GPU reads weights and cache once, at the bandwidth of its datasheet
(planning/decode_time.py): a token takes at least as long. n/a if devices.py does not know the GPU.
"""

import csv
import datetime
import importlib.util
import io
import platform
import re
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

import config
import devices
import processes
from config import MPTConfig, require
from model import MPT, init_weights
from planning import decode_time
from serving.decoder import Decoder, generate
from storage import files

VOCAB = 50368
PROMPT_TOKENS = 32
NEW_TOKENS = 32
SAMPLING = {"temperature": 0.8, "top_k": 50}

COLUMNS = (
    "shape|weights|batch|tokens|ours, ms a token|transformers|ours, least|transformers, least|"
    "ratio|limit, ms a token"
).split("|")


@dataclass
class GenerateArgs:
    """What to measure."""

    device: Literal["auto", "cpu", "cuda"] = "auto"  # cuda is ROCm too
    shapes: str = "512x8,768x12"  # models: width x layers, with heads of 64
    turns: int = 5  # of each of the two; the median counts
    out: str = ""  # CSV of the table

    def check(self) -> None:
        """UserError if a setting is out of range."""
        form = re.fullmatch(r"[1-9]\d{0,4}x[1-9]\d?(,[1-9]\d{0,4}x[1-9]\d?)*", self.shapes)
        require(form, f"shapes are WIDTHxLAYERS, such as 512x8,768x12, not {self.shapes!r}")
        for width, layers in sizes_of(self.shapes):
            divides = width % 64 == 0
            require(divides, f"shape {width}x{layers}: the width must be a multiple of 64")
        require(self.turns > 0, f"turns must be at least 1, not {self.turns}")


def sizes_of(shapes: str) -> list[tuple[int, int]]:
    """`512x8,768x12` -> [(512, 8), (768, 12)], width and layers."""
    pairs = [shape.split("x") for shape in shapes.split(",")]
    return [(int(width), int(layers)) for width, layers in pairs]


def both_models(width: int, layers: int, dtype, device):
    """Our decoder and transformers' model with equal weights; None without transformers.

    With ALiBi and without biases, as transformers' model always is.
    """
    n_heads = width // 64
    cfg = MPTConfig(
        d_model=width,
        n_heads=n_heads,
        n_layers=layers,
        vocab_size=VOCAB,
        alibi=True,
        no_bias=True,
    )
    ours = MPT(cfg)
    init_weights(ours, 0)
    theirs = None
    if importlib.util.find_spec("transformers"):
        theirs = their_model(ours).to(device, dtype)
    return Decoder(ours.to(device), VOCAB, dtype), theirs


def their_model(ours: MPT):
    """transformers' model with the weights of ours."""
    import transformers

    cfg = transformers.MptConfig(
        d_model=ours.cfg.d_model,
        n_heads=ours.cfg.n_heads,
        n_layers=ours.cfg.n_layers,
        max_seq_len=2048,
        vocab_size=VOCAB,
    )
    theirs = transformers.MptForCausalLM(cfg).eval()
    missing = theirs.load_state_dict(ours.state_dict(), strict=False).missing_keys
    assert missing in ([], ["lm_head.weight"]), missing  # the tied output layer
    return theirs


def write_ours(decoder, prompts, n: int, sampled: bool):
    """n new tokens for each row of prompts (B, T), by our decoder with its cache: (B, n)."""
    uniforms = torch.rand(len(prompts), n, device=prompts.device)
    settings = SAMPLING if sampled else {"temperature": 0}
    tokens = generate(decoder, prompts, n, uniforms=uniforms, **settings)
    return torch.stack([token.clone() for token in tokens], dim=1)


def write_theirs(model, prompts, n: int, sampled: bool):
    """The same by transformers' generate with its cache: (B, n)."""
    settings = {"do_sample": sampled, **(SAMPLING if sampled else {})}
    ids = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=n,
        min_new_tokens=n,
        pad_token_id=0,
        eos_token_id=None,
        use_cache=True,
        **settings,
    )
    return ids[:, prompts.shape[1] :]


def milliseconds(write, *args) -> float:
    """How long one call takes, per new token."""
    begin = time.perf_counter()
    write(*args).cpu()  # waits for the device
    return 1e3 * (time.perf_counter() - begin) / NEW_TOKENS


def compare(decoder, model, batch: int, sampled: bool, turns: int) -> list[str]:
    """Time both in turns; the cells of a line of the table, from `batch` on."""
    generator = torch.Generator().manual_seed(batch)
    prompts = torch.randint(VOCAB, (batch, PROMPT_TOKENS), generator=generator)
    prompts = prompts.to(decoder.device)
    our_text = write_ours(decoder, prompts, 4, False)  # this also warms both up
    if model:
        their_text = write_theirs(model, prompts, 4, False)
        rounds_alike = decoder.dtype == torch.float32 and decoder.device.type == "cpu"
        assert not rounds_alike or torch.equal(our_text, their_text)

    ours, theirs = [], []
    for _ in range(turns):
        ours.append(milliseconds(write_ours, decoder, prompts, NEW_TOKENS, sampled))
        if model:
            theirs.append(milliseconds(write_theirs, model, prompts, NEW_TOKENS, sampled))
    ratios = [b / a for a, b in zip(ours, theirs, strict=False)]
    times = [ours, theirs]
    cells = [str(batch), "top_k 50" if sampled else "greedy"]
    cells += [f"{statistics.median(ms):.2f}" if ms else "n/a" for ms in times]
    cells += [f"{min(ms):.2f}" if ms else "n/a" for ms in times]
    cells.append(f"{statistics.median(ratios):.2f}" if ratios else "n/a")
    return [*cells, limit(decoder, batch)]


def limit(decoder, batch: int) -> str:
    """Milliseconds that this GPU needs to read weights and cache in the middle of a text."""
    row = devices.identify(decoder.device)
    if not (row and row.bandwidth_gbs):
        return "n/a"
    context = PROMPT_TOKENS + NEW_TOKENS // 2
    width = decoder.dtype.itemsize
    ms = decode_time.ms_per_token(decoder.cfg, batch, context, row.bandwidth_gbs, width)
    return f"{ms:.3f}"


def measure(args: GenerateArgs, device: torch.device):
    """Yield the cells of one line of the table after another."""
    for width, layers in sizes_of(args.shapes):
        for dtype in (torch.float32, torch.bfloat16):
            decoder, model = both_models(width, layers, dtype, device)
            for batch in (1, 8):
                for sampled in (False, True):
                    name = str(dtype).removeprefix("torch.")
                    cells = compare(decoder, model, batch, sampled, args.turns)
                    yield [f"{width}x{layers}", name, *cells]


def as_csv(rows: list[list[str]]) -> bytes:
    """The table as a CSV."""
    text = io.StringIO()
    csv.writer(text).writerows([COLUMNS, *rows])
    return text.getvalue().encode()


def main(argv: list[str]) -> None:
    """Print milliseconds a token of both, for each shape, dtype and batch."""
    given, args = config.load(argv, GenerateArgs, takes="[THREADS]")
    (threads,) = given or [str(torch.get_num_threads())]
    valid = threads.isdecimal() and int(threads) > 0
    require(valid, f"the number of threads is {config.shown(threads)}: give 1 or more")
    torch.set_num_threads(int(threads))
    device = processes.pick_device(args.device, 0, 1, 1)

    machine = f"{devices.describe(device)}, {platform.machine()}, {threads} threads"
    versions = f"torch {torch.__version__}, transformers {transformers_version()}"
    print(f"{datetime.date.today()}, {machine}, {versions}\n")
    print(f"| {' | '.join(COLUMNS)} |")
    print("|---" * len(COLUMNS) + "|")
    rows = []
    for cells in measure(args, device):
        print(f"| {' | '.join(cells)} |", flush=True)
        rows.append(cells)
        if args.out:
            files.write_atomically(Path(args.out), as_csv(rows))


def transformers_version() -> str:
    """The version of transformers, or n/a."""
    if not importlib.util.find_spec("transformers"):
        return "n/a"
    import transformers

    return transformers.__version__


if __name__ == "__main__":
    config.run(main)
