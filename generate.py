"""Generate text with a trained model: one token at a time, drawn from the model's distribution.

    python generate.py runs/demo --prompt="def main(" --max_new_tokens=200 --temperature=0.8
    python generate.py runs/demo --prompts=prompts.txt --stop=";" --json
    python generate.py path/to/mpt-7b --tokenizer=gpt2 --interactive
    python generate.py runs/demo --adapter=runs/a --prompt="def f" --adapter=none --prompt="class"
    torchrun --nproc_per_node 8 generate.py runs/my70b --tp=8     too large for one device

RUN is a run folder, one checkpoint in it, or a Hugging Face folder. --prompt, --stop and --adapter
may be given several times. A prompt should not end with a space, which is the first character of
the next token. Without a prompt a terminal asks for some, and elsewhere a new document begins.

An adapter is a PEFT folder, or a run with --lora_rank, that was trained on RUN. One adapter writes
all texts; of several, each writes the text of its prompt, in one batch (none: RUN itself).

Several prompts share a batch: when a text has ended, the next one takes its row. A text ends at
end-of-text or another end that the Hugging Face folder names, before a stop string, or after
max_new_tokens. With learned positions it ends at max_seq_len, too; ALiBi and RoPE have no such
limit. At the end the program prints its speed and the share of the memory bandwidth that it used.

How a token is drawn: serving/sampling.py. How the model is made fast: serving/decoder.py. What is
shown while a text grows: serving/stream.py. How texts share a batch: serving/engine.py. How
adapters do: serving/adapters.py.
"""

import program

if __name__ == "__main__":  # before PyTorch is imported
    program.sleep_while_waiting()

import collections
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import torch

import config
import processes
from config import Int
from program import UserError, require
from serving.adapters import BASE, bank_for
from serving.decoder import Decoder, pick_dtype
from serving.engine import Engine, Event, Request
from serving.rows import follow, leading, start_ranks
from serving.sampling import Sampling
from serving.speed import Speed
from serving.stream import Text
from text import corpus
from weights.load import find, load_for_sampling, settings_of


@dataclass
class GenerateSettings:
    """Prompts, length, sampling, output."""

    prompt: list[str] = field(default_factory=list)  # text to continue
    prompts: str = ""  # file of prompts, one per line
    special_tokens: bool = False  # <|im_start|> and others in prompts are not text but their ids
    adapter: list[str] = field(default_factory=list)  # of all prompts, or one of each
    interactive: bool = False  # read prompts from the terminal, line by line
    max_new_tokens: Int[1, 10**7] = 200  # per text, at most
    temperature: float = 0.8  # 0: always the likeliest token
    top_k: int = 50  # draw from this many of the likeliest tokens (0 = no limit)
    top_p: float = 1.0  # and from the fewest of them that together have this probability
    stop: list[str] = field(default_factory=list)  # a string that ends a text and is not shown
    seed: Int[0, 10**18] = 1  # the same seed and prompts give the same texts
    batch_size: Int[1, 10**6] = 8  # texts generated together
    json: bool = False  # print one JSON object per text and line
    tp: Int[1, 2**16] = 1  # ranks over which each layer is cut: see tensor_parallel.py
    step: int | None = None  # which checkpoint (none = the newest, 0 = untrained)
    tokenizer: str = ""  # of a Hugging Face folder (empty = its own; gpt2 if it names none)
    precision: Literal["auto", "fp32", "bf16"] = "auto"  # of the weights

    def check(self) -> None:
        """Raise UserError for values out of range, and for settings that exclude each other."""
        sampling_of(self)
        require(all(self.stop), "a stop string is empty")
        require(
            not (self.interactive and (self.prompt or self.prompts or self.json)),
            "--interactive asks for prompts and streams the texts: "
            "remove --prompt, --prompts and --json",
        )
        require(all(self.adapter), f"--adapter is empty: give a path, or {BASE}")
        one_for_all = "--interactive writes all texts with one adapter"
        several = len(self.adapter) > 1
        require(not (self.interactive and several), f"{one_for_all}: give one --adapter")
        has_adapter = set(self.adapter) - {BASE}
        untrained = "--step=0 is the model before training, to which no adapter belongs"
        fix = "remove --step, or give a checkpoint as RUN"
        require(not (has_adapter and self.step == 0), f"{untrained}: {fix}")
        typed = "--interactive reads the terminal, which torchrun keeps"
        require(not (self.interactive and self.tp > 1), f"{typed}: give --prompt, or set --tp=1")


def main(argv) -> None:
    """Load a model, then answer all given prompts, or those that are typed."""
    (run,), cfg = config.load(argv, GenerateSettings, takes="RUN")
    prompts = list(cfg.prompt)
    if cfg.prompts:
        prompts += read_prompts(cfg.prompts)
    adapters = adapters_of(prompts or [""], cfg.adapter)
    interactive = cfg.interactive
    if not prompts and not cfg.json and sys.stdin and cfg.tp == 1:  # None: the caller closed it
        interactive = interactive or sys.stdin.isatty()

    device, team = start_ranks(settings_of(find(run)), cfg.tp)
    dtype = pick_dtype(cfg.precision, device)
    model, tokenizer, name = load_for_sampling(
        run, cfg.step, device, cfg.tokenizer, team, in_fp32=dtype == torch.float32
    )
    require(
        tokenizer.vocab_size <= model.cfg.vocab_size,
        f"{tokenizer.name} has ids up to {tokenizer.vocab_size - 1}, but the vocabulary of {name} "
        f"ends at {model.cfg.vocab_size - 1}: set the --tokenizer that it was trained with",
    )
    decoder = Decoder(model, tokenizer.vocab_size, dtype)
    used = list(dict.fromkeys(path for path in adapters if path != BASE))
    if used:  # then --step is not 0, and `name` is the path of the weights
        bank_for(decoder, used, min(len(used), cfg.batch_size), name)
    if team and team.rank > 0:
        follow(decoder)
        return
    speed = Speed()
    times_asked = collections.Counter()

    def new_text(prompt: str, adapter: str = adapters[0]) -> Text:
        """A prompt that is repeated for the same adapter gets another text."""
        repeat = times_asked[prompt, adapter]
        times_asked[prompt, adapter] += 1
        return Text(
            prompt,
            tokenizer,
            model.cfg,
            cfg.max_new_tokens,
            cfg.stop,
            cfg.seed,
            adapter,
            cfg.special_tokens,
            repeat,
        )

    with leading(decoder):
        if interactive:
            print(f"--- {name} --- type a line to continue; an empty line quits", file=sys.stderr)
            answer_typed_prompts(decoder, new_text, speed, cfg)
        else:
            texts = [new_text(*pair) for pair in zip(prompts or [""], adapters, strict=True)]
            if not cfg.json:
                print(f"--- {name} ---", flush=True)
            answer_given_prompts(decoder, texts, speed, cfg)
    print(speed.report(decoder), file=sys.stderr)


def read_prompts(path: str) -> list[str]:
    """The prompts in a UTF-8 file, one per line. Raises UserError if it has none."""
    lines = (line.removesuffix("\n").removesuffix("\r") for line in corpus.text_lines(path))
    prompts = [line for line in lines if line]
    require(prompts, f"no prompt in {path}: write one per line")
    return prompts


def adapters_of(prompts: list[str], adapters: list[str]) -> list[str]:
    """The adapter of each prompt. UserError unless there is one for all, or one for each."""
    if len(adapters) <= 1:
        return (adapters or [BASE]) * len(prompts)
    unequal = f"{len(adapters)} adapters for {len(prompts)} prompts"
    fix = f"give one for all, or one for each in the same order ({BASE}: no adapter)"
    require(len(adapters) == len(prompts), f"{unequal}: {fix}")
    return adapters


def answer_typed_prompts(decoder, new_text, speed: Speed, cfg: GenerateSettings) -> None:
    """Stream a text for each line from the terminal. Ctrl-C ends a text, an empty line ends all."""
    while prompt := read_line():
        try:
            print_stream(decoder, new_text(prompt), speed, cfg)
        except KeyboardInterrupt:
            print(flush=True)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)


def read_line() -> str:
    """The next line that is typed; empty at the end of the input."""
    print("> ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().rstrip("\n")


def answer_given_prompts(decoder, texts: list[Text], speed: Speed, cfg: GenerateSettings) -> None:
    """Stream a single text. Generate several in a batch, and print them in their order."""
    if len(texts) == 1 and not cfg.json:
        print_stream(decoder, texts[0], speed, cfg)
        return
    n_printed = 0
    for _ in events_of(decoder, texts, speed, cfg):
        while n_printed < len(texts) and texts[n_printed].end:
            text = texts[n_printed]
            n_printed += 1
            print(as_json(text) if cfg.json else as_section(text, n_printed), flush=True)


def print_stream(decoder, text: Text, speed: Speed, cfg: GenerateSettings) -> None:
    """Generate one text and print it meanwhile."""
    print(text.prompt, end="", flush=True)
    for event in events_of(decoder, [text], speed, cfg):
        print(event.piece, end="", flush=True)
    print(flush=True)
    if not text.text:
        print(f"no text: {text.end} came first; set another --seed or --prompt", file=sys.stderr)
    if text.end == "max_seq_len":
        print(f"ended at max_seq_len {text.max_ids}, where learned positions end", file=sys.stderr)


def events_of(decoder, texts: list[Text], speed: Speed, cfg) -> Iterator[Event]:
    """Generate texts, and yield each token of them."""
    longest = max(text.max_length for text in texts)
    engine = Engine(decoder, min(cfg.batch_size, len(texts)), longest)
    engine.speed = speed
    return engine.run([Request(text, sampling_of(cfg)) for text in texts])


def sampling_of(cfg: GenerateSettings) -> Sampling:
    """How tokens are drawn. UserError for values out of range."""
    return Sampling(cfg.temperature, cfg.top_k, cfg.top_p)


def as_json(text: Text) -> str:
    """A finished text as a JSON object."""
    fields = {
        "prompt": text.prompt,
        "text": text.text,
        "tokens": text.new_tokens,
        "end": text.end,
    }
    if text.adapter != BASE:
        fields["adapter"] = text.adapter
    encoding = getattr(sys.stdout, "encoding", "") or ""
    readable = encoding.lower() in ("utf-8", "utf8")  # others may lack a character
    return json.dumps(fields, ensure_ascii=not readable)


def as_section(text: Text, number: int) -> str:
    """A finished text under a line with its number and the reason of its end."""
    adapter = "" if text.adapter == BASE else f"{text.adapter}, "
    return f"--- {number}, {adapter}{text.end} ---\n{text.prompt}{text.text}"


if __name__ == "__main__":
    processes.run_alone_or_with_others(main)
