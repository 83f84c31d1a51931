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
import json
import sys
from pathlib import Path

import torch

import config
import program
from config import UserError, require
from serving.decoder import Decoder, pick_dtype
from serving.stream import Speed, Text, stream, write
from weights.load import load_for_sampling


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
