"""Write text with a trained model: one token at a time, each drawn from the model's distribution over the next.

    python generate.py runs/demo --prompt="def main(" --max_new_tokens=200 --temperature=0.8 --top_k=50
    python generate.py runs/demo --prompts=prompts.txt --stop=";" --json
    python generate.py path/to/mpt-7b --tokenizer=gpt2 --interactive

A prompt goes through the model once and leaves its keys and values in a cache; then each step feeds one token. Several
prompts are written together: shorter ones are padded on the left, and the padding is hidden from attention. A text
ends with end-of-text, before a stop string, or after max_new_tokens. How a token is drawn: serving/sampling.py.

    seconds of a step >= (bytes of weights + bytes of keys and values) / memory bandwidth         see planning/decode_time.py

So the weights are kept in bf16 where that is fast, and the share of the bandwidth is printed at the end. With learned
positions a text ends at max_seq_len; ALiBi and RoPE go on. Read next: fsdp_train.py.
"""

import argparse
import codecs
import functools
import json
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

import checkpoint
import config
import devices
import parallel
import program
from config import MPTConfig, TrainConfig, UserError, require
from model import MPT, KVCache, init_weights
from planning import decode_time
from serving.sampling import sample, uniforms
from text import tokenizer as tokenizers
from weights import hf


class PackedLinear(nn.Module):
    """A linear layer whose weight lies in memory in the blocks that oneDNN's CPU kernels read, put so once.

    For up to 8 rows this took 0.2 to 0.9 of the time of F.linear, on 2 cores with AVX512-BF16.
    """

    def __init__(self, weight, bias=None):
        super().__init__()
        self.weight, self.bias = torch.ops.mkldnn._reorder_linear_weight(weight.detach()), bias

    def forward(self, x):
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")


def can_pack(device, dtype) -> bool:
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


class Decoder:
    """A model made ready to write. `decoder(ids, cache)` gives the logits of the token after ids (B, T), (B, V) fp32.

    It takes the model over: weights become `dtype` (None: as they are), and linear layers are packed where possible.
    vocab_size: entries of the tokenizer; the rows beyond, which pad the embedding, have no logits.
    """

    @torch.no_grad()
    def __init__(self, model: MPT, vocab_size: int, dtype=None):
        self.model, self.cfg = model.to(dtype).eval(), model.cfg
        output = model.transformer.wte if self.cfg.tie_word_embeddings else model.lm_head
        self.device, self.dtype = output.weight.device, output.weight.dtype
        # On a CPU fp32: reading twice the bytes is faster there than the products of bf16.
        wide = self.device.type == "cpu" and self.dtype == torch.bfloat16
        self.cache_dtype = torch.float32 if wide else self.dtype
        weight, scale = output.weight[:vocab_size], self.cfg.logit_scale
        self.scale = 1 / math.sqrt(self.cfg.d_model) if scale == "inv_sqrt_d_model" else scale or 1.0
        self.head = functools.partial(F.linear, weight=weight)
        if can_pack(self.device, self.dtype):
            self.head = PackedLinear(weight)
            for block in model.transformer.blocks:  # one after another: what was packed is freed
                for part in (block.attn, block.ffn):
                    for name, child in list(part.named_children()):
                        if isinstance(child, nn.Linear):
                            setattr(part, name, PackedLinear(child.weight, child.bias))

    def __call__(self, ids, cache):
        hidden = self.model.transformer(ids, cache)[:, -1]  # (B, d_model): of the prompt, too, only the end is needed
        return self.head(hidden).float() * self.scale


@torch.inference_mode()
def generate(decoder, ids, max_new_tokens, *, pad=None, temperature=1.0, top_k=0, top_p=1.0, numbers=None):
    """Yield new tokens, one (B,) int64 tensor at a time, for prompts ids (B, T). Ends early when learned positions do.

    pad: (B,) int64, how many ids at the left of each row are none; numbers: (B, max_new_tokens) in [0, 1), what the
    tokens are drawn with (None: torch's generator).
    """
    (B, T), cfg = ids.shape, decoder.cfg
    if cfg.learned_positions:
        max_new_tokens = min(max_new_tokens, cfg.max_seq_len + 1 - T)
    cache = KVCache.empty(cfg, B, T + max_new_tokens, decoder.device, decoder.cache_dtype, pad=pad)
    for i in range(max_new_tokens):
        uniform = None if numbers is None else numbers[:, i]
        token = sample(decoder(ids, cache), temperature, top_k, top_p, uniform)
        yield token
        ids = token[:, None]


class Text:
    """A prompt and what has been written after it: `text`, of which the first `shown` characters have been given out.

    stops: strings that end it and do not belong to it. `end` says why it ended, and is None before.
    """

    def __init__(self, prompt: str, tokenizer, cfg: MPTConfig, max_new_tokens: int, stops=(), seed: int = 1):
        self.prompt, self.tokenizer, self.stops = prompt, tokenizer, stops
        self.ids = [int(i) for i in tokenizer.encode(prompt)] or [tokenizer.eot]  # nothing said: a new document begins
        self.n_prompt, self.max_new_tokens = len(self.ids), max_new_tokens
        self.positions = cfg.max_seq_len if cfg.learned_positions else math.inf
        require(
            self.n_prompt <= self.positions,
            f"the prompt has {self.n_prompt} tokens, but learned positions end at max_seq_len {cfg.max_seq_len}: "
            "shorten it (ALiBi and RoPE have no such limit)",
        )
        self.numbers = uniforms(seed, max_new_tokens)
        self.utf8 = codecs.getincrementaldecoder("utf-8")("replace")  # a character may be spread over several tokens
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
        starts = (n for stop in self.stops for n in range(1, len(stop)) if self.text.endswith(stop[:n]))
        before, self.shown = self.shown, len(self.text) - (0 if self.end else max(starts, default=0))
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
        read += self.cached * decode_time.kv_bytes_per_token(decoder.cfg, decoder.cache_dtype.itemsize)
        pace = read / self.seconds / 1e9  # GB/s
        line += f"; new: {self.tokens} tokens, {self.tokens / self.seconds:,.0f} tokens/s, {self.steps} steps"
        line += f" of {1e3 * self.seconds / self.steps:.2f} ms, in which {read / self.steps / 1e6:,.1f} MB are read: "
        found = devices.of(decoder.device)
        bandwidth, of = (found.bandwidth_gbs, found.name) if found else (0, "")
        if decoder.device.type == "cpu":
            bandwidth, of = measure_bandwidth(), "this CPU's, measured by reading"
        share = f"{pace / bandwidth:.0%} of {bandwidth:,.0f} ({of})" if bandwidth else "share of the bandwidth n/a"
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
        longest, done = max(len(text.ids) for text in going), going[0].new_tokens  # done: the same for all
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


def find(path: str) -> Path:
    """A Hugging Face folder, or a checkpoint of ours. UserError if there is neither."""
    folder = Path(path)
    theirs = (folder / "config.json").exists() and not hf.is_ours(folder)
    return folder if theirs else checkpoint.find(path)


def load_for_sampling(path: str, step: int | None, device, tokenizer: str | None = None):
    """The model, its tokenizer and a name, from a run folder or a checkpoint of ours (step 0: the untrained model), or
    from a Hugging Face folder, whose ids are those of `tokenizer` (None: of its tokenizer.json, else gpt2)."""
    require(step is None or step >= 0, f"step must be 0 or more, not {step}")
    folder = found = find(path)
    if not hf.is_ours(folder):
        require(step is None, f"{path} is a Hugging Face folder, which has no steps: leave out --step")
        with torch.device("meta"):
            model = MPT(hf.settings_of(path))
        dtypes = {stored.dtype for stored in hf.find_tensors(folder, model).values()}
        model.to(dtypes.pop() if len(dtypes) == 1 else torch.float32).to_empty(device=device)
        hf.load_into(model, path)
        tokenizer = tokenizer or hf.name_of_tokenizer(folder)
        return model.eval(), tokenizers.load(tokenizer, hf.own_file(folder, tokenizer)), path
    require(not tokenizer, f"{path} is a run of ours, which has its tokenizer: leave out --tokenizer")
    if step is not None and (step > 0 or (found.parent / "step-0").exists()):
        found = found.parent / f"step-{step}"
        there = ", ".join(p.name for p in checkpoint.complete(found.parent))
        require(
            found.exists(), f"no checkpoint of step {step} in {found.parent}: there are {there}, and 0 is untrained"
        )
    model, name = checkpoint.load_model(found, device), str(found)  # checks it
    meta = checkpoint.read_meta(found)
    if step == 0 and found.name != "step-0":
        init_weights(model, meta["seed"])
        name = "before training"
    return model, tokenizers.load(meta["tokenizer"], found.parent.parent / "tokenizer.json"), name


def pick_dtype(precision: str, device) -> torch.dtype:
    """`auto`: bf16 on accelerators that have it, and on a CPU that has instructions for it."""
    on_cpu = "bf16" if torch.cpu._is_avx512_bf16_supported() else "fp32"
    known = on_cpu if device.type == "cpu" else None
    return parallel.DTYPES[parallel.choose_precision(TrainConfig(precision=precision), device, known)]


def main(argv) -> None:
    args = parse(argv)
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    model, tokenizer, name = load_for_sampling(args.run, args.step, device, args.tokenizer)
    require(
        tokenizer.vocab_size <= model.cfg.vocab_size,
        f"{tokenizer.name} has ids up to {tokenizer.vocab_size - 1}, but the vocabulary of {name} ends at "
        f"{model.cfg.vocab_size - 1}: set the --tokenizer that it was trained with",
    )
    decoder, speed = Decoder(model, tokenizer.vocab_size, pick_dtype(args.precision, device)), Speed()
    how = {"temperature": args.temperature, "top_k": args.top_k, "top_p": args.top_p}
    said = []  # a prompt that is given again is drawn with the next seed

    def text_of(prompt):
        said.append(prompt)
        seed = args.seed + said.count(prompt) - 1
        return Text(prompt, tokenizer, model.cfg, args.max_new_tokens, args.stop, seed)

    if args.interactive:
        print(f"--- {name} --- a line to go on from; an empty one ends", file=sys.stderr)
        for prompt in iter(read_line, ""):
            try:
                stream(decoder, text_of(prompt), speed, how)
            except KeyboardInterrupt:
                print(flush=True)  # this text ends, the program goes on
            except UserError as error:
                print(f"error: {error}", file=sys.stderr)
    else:
        texts = [text_of(prompt) for prompt in args.prompt]
        if not args.json:
            print(f"--- {name} ---", flush=True)
        if len(texts) == 1 and not args.json:
            stream(decoder, texts[0], speed, how)
        else:
            write_all(decoder, texts, speed, how, args)
    print(speed.report(decoder), file=sys.stderr)


def read_line() -> str:
    """The next line that is typed; empty at the end."""
    print("> ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().rstrip("\n")


def stream(decoder, text, speed, how) -> None:
    """Print a text while it is written."""
    print(text.prompt, end="", flush=True)
    for _, piece in write(decoder, [text], speed, **how):
        print(piece, end="", flush=True)
    print(flush=True)
    if text.end == "max_seq_len":
        print(f"ended at max_seq_len {text.positions}, where learned positions end", file=sys.stderr)


def write_all(decoder, texts, speed, how, args) -> None:
    """Print texts in their order, `batch_size` of them written together."""
    for first in range(0, len(texts), args.batch_size):
        batch = texts[first : first + args.batch_size]
        for _ in write(decoder, batch, speed, **how):
            pass
        for number, text in enumerate(batch, first + 1):
            if args.json:
                line = {"prompt": text.prompt, "text": text.text, "tokens": text.new_tokens, "end": text.end}
                print(json.dumps(line, ensure_ascii=False), flush=True)
            else:
                print(f"--- {number}, {text.end} ---\n{text.prompt}{text.text}", flush=True)


def parse(argv):
    parser = program.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="a run folder, one checkpoint in it, or a Hugging Face folder")
    parser.add_argument("--prompt", action="append", default=[], help="text to go on from (default: a new document)")
    parser.add_argument("--prompts", help="a file of prompts, one per line")
    parser.add_argument("--interactive", action="store_true", help="read prompts from the terminal, line by line")
    parser.add_argument("--max_new_tokens", type=int, default=200)
    parser.add_argument("--temperature", type=float, default=0.8, help="0: always the likeliest token")
    parser.add_argument("--top_k", type=int, default=50, help="0: no limit")
    parser.add_argument("--top_p", type=float, default=1.0)
    parser.add_argument("--stop", action="append", default=[], help="a string that ends a text and is not shown")
    parser.add_argument("--seed", type=int, default=1, help="a prompt that is given again has the next one")
    parser.add_argument("--batch_size", type=int, default=8, help="texts written together")
    parser.add_argument("--json", action="store_true", help="one JSON object per text, on a line")
    parser.add_argument("--step", type=int, help="of which checkpoint (default: the newest; 0: untrained)")
    parser.add_argument("--tokenizer", help="of a Hugging Face folder (default: its tokenizer.json, else gpt2)")
    parser.add_argument("--precision", choices=("auto", "fp32", "bf16"), default="auto", help="of the weights")
    args = parser.parse_args(argv)
    if not args.temperature >= 0 or not 0 < args.top_p <= 1 or args.top_k < 0 or args.max_new_tokens < 1:
        raise UserError("temperature and top_k are 0 or more, top_p is in (0, 1], max_new_tokens is 1 or more")
    require(0 <= args.seed < 2**62 and args.batch_size > 0, "seed is 0 or more (below 2^62), batch_size is 1 or more")
    require(args.max_new_tokens <= 10**7, "max_new_tokens is at most 10,000,000")
    require(all(args.stop), "a stop string is empty")
    if args.prompts:
        lines = Path(args.prompts).read_text(encoding="utf-8", errors="replace").splitlines()
        require(any(lines), f"no prompt in {args.prompts}: it wants one per line")
        args.prompt += filter(None, lines)
    mixed = args.interactive and (args.prompt or args.json)
    require(not mixed, "--interactive asks for prompts and streams the texts: leave out --prompt, --prompts and --json")
    args.interactive |= not args.prompt and sys.stdin.isatty() and not args.json
    args.prompt = args.prompt or [""]
    return args


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")
    config.run(main)
