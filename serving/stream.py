"""The stream of text: what can be shown while it is written, and several texts written together.

    token  text  shown
       99  c     c
      195  c     c       half of a character: its second byte is missing
      169  cé    cé
       69  céE   cé      this may be the beginning of the stop string "END"
       33  céE!  céE!    it was not

Texts are written in one batch; when half of them have ended, the others go on in a smaller one.

Run `python -m serving.stream` to see such a table. Read next: generate.py.
"""

import codecs
import math
import sys
import time
from dataclasses import dataclass

import torch

import devices
from config import MPTConfig, arguments, require, run
from planning import decode_time
from serving.decoder import Decoder, generate
from serving.sampling import uniforms
from text import tokenizer as tokenizers


class Text:
    """A prompt and what has been written after it: `text`, of which the first `shown` characters have been given out.

    stops: strings that end it and do not belong to it. `end` says why it ended, and is None before.
    """

    def __init__(
        self, prompt: str, tokenizer, cfg: MPTConfig, max_new_tokens: int, stops=(), seed: int = 1
    ):
        self.prompt, self.tokenizer, self.stops = prompt, tokenizer, stops
        self.ids = [int(i) for i in tokenizer.encode(prompt)] or [
            tokenizer.eot
        ]  # nothing said: a new document begins
        self.n_prompt, self.max_new_tokens = len(self.ids), max_new_tokens
        self.positions = cfg.max_seq_len if cfg.learned_positions else math.inf
        require(
            self.n_prompt <= self.positions,
            f"the prompt has {self.n_prompt} tokens, but learned positions end at max_seq_len {cfg.max_seq_len}: "
            "shorten it (ALiBi and RoPE have no such limit)",
        )
        self.numbers = uniforms(seed, max_new_tokens)
        self.utf8 = codecs.getincrementaldecoder("utf-8")(
            "replace"
        )  # a character may be spread over several tokens
        self.text, self.shown, self.end = "", 0, None

    def add(self, token: int) -> str:
        """Take one more token. Returns what can be shown now: characters that are whole and begin no stop string."""
        if token == self.tokenizer.eot:
            self.end = "end of text"
        else:
            self.ids.append(token)
            self.text += self.utf8.decode(self.tokenizer.decode_bytes([token]))
        if len(self.ids) > self.positions:
            self.end = "max_seq_len"
        elif self.new_tokens == self.max_new_tokens:
            self.end = "max_new_tokens"
        found = [at for stop in self.stops if (at := self.text.find(stop, self.shown)) >= 0]
        if found:
            self.text, self.end = self.text[: min(found)], "stop string"
        starts = (
            n for stop in self.stops for n in range(1, len(stop)) if self.text.endswith(stop[:n])
        )
        before, self.shown = (
            self.shown,
            len(self.text) - (0 if self.end else max(starts, default=0)),
        )
        return self.text[before : self.shown]

    @property
    def new_tokens(self) -> int:
        return len(self.ids) - self.n_prompt


@dataclass
class Speed:
    """What reading prompts and decoding took. A prompt's first new token belongs to its reading."""

    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    steps: int = 0
    tokens: int = 0  # of texts that had not ended
    seconds: float = 0.0
    cached: int = 0  # tokens in the cache, padding too, summed over rows and steps

    def report(self, decoder: Decoder) -> str:
        """One line; the bandwidth is the datasheet's, or on a CPU measured here and now, in a fifth of a second."""
        line = f"prompts: {self.prompt_tokens} tokens, {self.prompt_tokens / (self.prompt_seconds or 1):,.0f} tokens/s"
        if not self.steps:
            return line
        read = self.steps * decode_time.weight_bytes(decoder.cfg, decoder.dtype.itemsize)
        read += self.cached * decode_time.kv_bytes_per_token(
            decoder.cfg, decoder.cache_dtype.itemsize
        )
        pace = read / self.seconds / 1e9  # GB/s
        line += f"; new: {self.tokens} tokens, {self.tokens / self.seconds:,.0f} tokens/s, {self.steps} steps"
        line += f" of {1e3 * self.seconds / self.steps:.2f} ms, in which {read / self.steps / 1e6:,.1f} MB are read: "
        found = devices.of(decoder.device)
        bandwidth, of = (found.bandwidth_gbs, found.name) if found else (0, "")
        if decoder.device.type == "cpu":
            bandwidth, of = measure_bandwidth(), "this CPU's, measured by reading"
        share = (
            f"{pace / bandwidth:.0%} of {bandwidth:,.0f} ({of})"
            if bandwidth
            else "share of the bandwidth n/a"
        )
        return f"{line}{pace:.1f} GB/s, {share}"


def measure_bandwidth(megabytes: int = 256) -> float:
    """GB/s at which this CPU reads memory that is in no cache, on all of PyTorch's threads."""
    numbers, best = torch.ones(megabytes * 2**18), math.inf  # fp32
    start = time.perf_counter()
    while time.perf_counter() - start < 0.2:
        before = time.perf_counter()
        numbers.sum()
        best = min(best, time.perf_counter() - before)
    return numbers.nbytes / best / 1e9


def write(decoder: Decoder, texts: list[Text], speed: Speed, **how):
    """Write all texts to their ends, together. Yields (text, what can be shown of it now). how: arguments of `sample`.

    When half have ended, or learned positions end for the longest, the others go on without them, from a new cache.
    """
    while going := [text for text in texts if not text.end]:
        longest, done = (
            max(len(text.ids) for text in going),
            going[0].new_tokens,
        )  # done: the same for all
        pad = torch.tensor([longest - len(text.ids) for text in going])
        ids = torch.tensor([[0] * (longest - len(text.ids)) + text.ids for text in going])
        numbers = torch.stack([text.numbers[done:] for text in going])
        ids, pad, numbers = (x.to(decoder.device) for x in (ids, pad, numbers))
        how |= {"pad": pad if pad.any() else None, "numbers": numbers}
        speed.prompt_tokens += sum(len(text.ids) for text in going)
        begin = time.perf_counter()
        for step, tokens in enumerate(generate(decoder, ids, numbers.shape[1], **how)):
            tokens = tokens.tolist()  # waits for the device
            seconds = time.perf_counter() - begin
            if step == 0:
                speed.prompt_seconds += seconds
            else:
                speed.steps, speed.seconds = speed.steps + 1, speed.seconds + seconds
                speed.tokens += sum(not text.end for text in going)
                speed.cached += len(going) * (longest + step)
            for text, token in zip(going, tokens, strict=True):
                if not text.end:
                    yield text, text.add(token)
            if 2 * sum(not text.end for text in going) <= len(going):
                break
            begin = time.perf_counter()


def print_stream(decoder, text, speed, how) -> None:
    """Print a text while it is written."""
    print(text.prompt, end="", flush=True)
    for _, piece in write(decoder, [text], speed, **how):
        print(piece, end="", flush=True)
    print(flush=True)
    if text.end == "max_seq_len":
        print(
            f"ended at max_seq_len {text.positions}, where learned positions end", file=sys.stderr
        )


def demonstrate(argv) -> None:
    """Which characters of a text each of its tokens, here bytes, lets show."""
    arguments(argv)
    tokenizer = tokenizers.load("bytes")
    text = Text("", tokenizer, MPTConfig(alibi=True), max_new_tokens=20, stops=["END"])
    print("token  text    shown")
    shown = ""
    for token in "céE! END of it".encode():
        shown += text.add(token)
        print(f"{token:5}  {text.text:8}{shown}")
        if text.end:
            break
    print(f"ended by: {text.end}")


if __name__ == "__main__":
    run(demonstrate)
