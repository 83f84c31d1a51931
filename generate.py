"""Write text with a trained model: one token at a time, each drawn from the model's distribution.

    python generate.py runs/demo --prompt="def main(" --max_new_tokens=200 --temperature=0.8
    python generate.py runs/demo --prompts=prompts.txt --stop=";" --json
    python generate.py path/to/mpt-7b --tokenizer=gpt2 --interactive

RUN is a run folder, one checkpoint in it, or a Hugging Face folder. --prompt and --stop may be
given several times; without a prompt a new document begins.

Several prompts are written together: shorter ones are padded on the left, and the padding is hidden
from attention. A text ends with end-of-text, before a stop string, or after max_new_tokens. With
learned positions it ends at max_seq_len; with ALiBi and RoPE it goes on. In the end the speed is
printed, and the share of the memory bandwidth that this is.

How a token is drawn: serving/sampling.py. How the model is made fast: serving/decoder.py.
Read next: plan.py.
"""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

import config
from config import UserError, require
from serving.decoder import Decoder, pick_dtype
from serving.stream import Speed, Text, print_stream, write
from weights.load import load_for_sampling


@dataclass
class GenerateSettings:
    """What is written, and how its tokens are drawn."""

    prompt: list[str] = field(default_factory=list)  # text to go on from
    prompts: str = ""  # a file of prompts, one per line
    interactive: bool = False  # read prompts from the terminal, line by line
    max_new_tokens: int = 200  # of a text, at most
    temperature: float = 0.8  # 0: always the likeliest token
    top_k: int = 50  # draw from so many of the likeliest tokens (0 = no limit)
    top_p: float = 1.0  # and from the fewest of them that together have this probability
    stop: list[str] = field(default_factory=list)  # a string that ends a text and is not shown
    seed: int = 1  # a prompt that is given again has the next one
    batch_size: int = 8  # texts written together
    json: bool = False  # one JSON object per text, on a line
    step: int | None = None  # of which checkpoint (none = the newest, 0 = untrained)
    tokenizer: str = ""  # of a Hugging Face folder (empty = its tokenizer.json, else gpt2)
    precision: Literal["auto", "fp32", "bf16"] = "auto"  # of the weights

    def check(self) -> None:
        fine = min(self.temperature, self.top_k) >= 0 and 0 < self.top_p <= 1
        ranges = (
            "temperature and top_k are 0 or more, top_p is in (0, 1], max_new_tokens is 1 or more"
        )
        require(fine and self.max_new_tokens >= 1, ranges)
        fine = 0 <= self.seed < 2**62 and self.batch_size > 0
        require(fine, "seed is 0 or more (below 2^62), batch_size is 1 or more")
        require(self.max_new_tokens <= 10**7, "max_new_tokens is at most 10,000,000")
        require(all(self.stop), "a stop string is empty")
        mixed = self.interactive and (self.prompt or self.prompts or self.json)
        words = "--interactive asks for prompts and streams the texts: leave out"
        require(not mixed, f"{words} --prompt, --prompts and --json")


def main(argv) -> None:
    (run,), cfg = config.load(argv, GenerateSettings, takes="RUN")
    prompts = cfg.prompt + (lines_of(cfg.prompts) if cfg.prompts else [])
    asks = cfg.interactive or (not prompts and sys.stdin.isatty() and not cfg.json)
    device = (
        torch.accelerator.current_accelerator()
        if torch.accelerator.is_available()
        else torch.device("cpu")
    )
    model, tokenizer, name = load_for_sampling(run, cfg.step, device, cfg.tokenizer)
    require(
        tokenizer.vocab_size <= model.cfg.vocab_size,
        f"{tokenizer.name} has ids up to {tokenizer.vocab_size - 1}, but the vocabulary of {name} ends at "
        f"{model.cfg.vocab_size - 1}: set the --tokenizer that it was trained with",
    )
    decoder, speed = (
        Decoder(model, tokenizer.vocab_size, pick_dtype(cfg.precision, device)),
        Speed(),
    )
    how = {"temperature": cfg.temperature, "top_k": cfg.top_k, "top_p": cfg.top_p}
    said = []  # a prompt that is given again is drawn with the next seed

    def text_of(prompt):
        said.append(prompt)
        seed = cfg.seed + said.count(prompt) - 1
        return Text(prompt, tokenizer, model.cfg, cfg.max_new_tokens, cfg.stop, seed)

    if asks:
        print(f"--- {name} --- a line to go on from; an empty one ends", file=sys.stderr)
        for prompt in iter(read_line, ""):
            try:
                print_stream(decoder, text_of(prompt), speed, how)
            except KeyboardInterrupt:
                print(flush=True)  # this text ends, the program goes on
            except UserError as error:
                print(f"error: {error}", file=sys.stderr)
    else:
        texts = [text_of(prompt) for prompt in prompts or [""]]
        if not cfg.json:
            print(f"--- {name} ---", flush=True)
        if len(texts) == 1 and not cfg.json:
            print_stream(decoder, texts[0], speed, how)
        else:
            write_all(decoder, texts, speed, how, cfg)
    print(speed.report(decoder), file=sys.stderr)


def lines_of(path: str) -> list[str]:
    """The prompts in a file, one per line. UserError if there is none."""
    lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    require(any(lines), f"no prompt in {path}: it wants one per line")
    return list(filter(None, lines))


def read_line() -> str:
    """The next line that is typed; empty at the end."""
    print("> ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().rstrip("\n")


def write_all(decoder, texts, speed, how, cfg) -> None:
    """Print texts in their order, `batch_size` of them written together."""
    for first in range(0, len(texts), cfg.batch_size):
        batch = texts[first : first + cfg.batch_size]
        for _ in write(decoder, batch, speed, **how):
            pass
        for number, text in enumerate(batch, first + 1):
            if cfg.json:
                line = {
                    "prompt": text.prompt,
                    "text": text.text,
                    "tokens": text.new_tokens,
                    "end": text.end,
                }
                print(json.dumps(line, ensure_ascii=False), flush=True)
            else:
                print(f"--- {number}, {text.end} ---\n{text.prompt}{text.text}", flush=True)


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")
    config.run(main)
