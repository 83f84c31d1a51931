"""Write text with a trained model: one token at a time, each drawn from the model's distribution over the next.

    python generate.py runs/demo --prompt="def main(" --max_new_tokens=200 --temperature=0.8 --top_k=50

The prompt goes through the model once and leaves its keys and values in a cache; then each step feeds one token.
temperature divides the logits (0: always the likeliest token); top_k keeps the k likeliest tokens; top_p keeps the
fewest tokens that together have probability p (nucleus sampling: Holtzman et al., 2020).
"""

import argparse
import codecs
import sys
import time

import torch

import checkpoint
import config
import tokenizer as tokenizers
from config import MPTConfig, UserError, require
from model import MPT, KVCache, init_weights


@torch.inference_mode()
def generate(model, ids, max_new_tokens, *, vocab_size, temperature=1.0, top_k=0, top_p=1.0, generator=None):
    """Yield new tokens, one (B,) int64 tensor at a time, for prompts ids (B, T) of equal length.

    vocab_size: entries of the tokenizer; the rows beyond, which pad the embedding, are never drawn. Stops early when
    learned positions end.
    """
    cfg = model.cfg
    room = (
        max_new_tokens if not cfg.learned_positions else min(max_new_tokens, max(1, cfg.max_seq_len - ids.shape[1] + 1))
    )
    dtype = model.transformer.wte.weight.dtype
    cache = KVCache.empty(cfg, ids.shape[0], ids.shape[1] + max_new_tokens, ids.device, dtype)
    for _ in range(room):
        logits = model(ids, cache=cache)[:, -1, :vocab_size].float()  # (B, V)
        token = sample(logits, temperature, top_k, top_p, generator)
        yield token
        ids = token[:, None]


def sample(logits, temperature=1.0, top_k=0, top_p=1.0, generator=None):
    """Draw one token per row of logits (B, V). Returns (B,) int64."""
    if temperature == 0:
        return logits.argmax(dim=-1)
    probs, tokens = torch.softmax(logits / temperature, dim=-1).sort(dim=-1, descending=True)  # likeliest first
    if top_k > 0:
        probs[:, top_k:] = 0
    before = probs.cumsum(dim=-1) - probs  # the probability of all likelier tokens
    probs[before >= top_p] = 0  # the likeliest always stays
    choice = torch.multinomial(probs, 1, generator=generator)
    return tokens.gather(-1, choice)[:, 0]


def load_for_sampling(path: str, step: int | None, device) -> tuple[MPT, tokenizers.Tokenizer, str]:
    """The model, its tokenizer and a name, from a run folder or a checkpoint; step 0 is the untrained model."""
    found = checkpoint.find(path)
    if step is not None and step > 0:
        found = found.parent / f"step-{step}"
        there = ", ".join(p.name for p in checkpoint.complete(found.parent))
        require(
            found.exists(), f"no checkpoint of step {step} in {found.parent}: there are {there}, and 0 is untrained"
        )
    meta = checkpoint.read_meta(found)
    tokenizer = tokenizers.load(meta["tokenizer"], found.parent.parent / "tokenizer.json")
    if step == 0:
        model = MPT(config.from_dict(MPTConfig, meta | {"attn_impl": "auto"})).to(device).eval()
        init_weights(model, meta["seed"])
        return model, tokenizer, "before training"
    return checkpoint.load_model(found, device), tokenizer, str(found)


def main(argv) -> None:
    args = parse(argv)
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    model, tokenizer, name = load_for_sampling(args.run, args.step, device)
    ids = [int(i) for i in tokenizer.encode(args.prompt)] or [tokenizer.eot]  # nothing said: a new document begins
    print(f"--- {name} ---\n{args.prompt}", end="", flush=True)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a character may be spread over several tokens
    count, begin = 0, time.perf_counter()
    for token in generate(
        model,
        torch.tensor([ids], device=device),
        args.max_new_tokens,
        vocab_size=tokenizer.vocab_size,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        generator=torch.Generator(device).manual_seed(args.seed),
    ):
        if token.item() == tokenizer.eot:
            break
        count += 1
        print(decoder.decode(tokenizer.decode_bytes(token.tolist())), end="", flush=True)
    print(flush=True)
    print(f"{count} tokens, {count / (time.perf_counter() - begin):,.0f} tokens/s, prompt included", file=sys.stderr)


def parse(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="a run folder, or one checkpoint in it")
    parser.add_argument("--prompt", default="", help="text to go on from (default: the beginning of a document)")
    parser.add_argument("--max_new_tokens", type=int, default=200)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--top_k", type=int, default=50, help="0: no limit")
    parser.add_argument("--top_p", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--step", type=int, help="of which checkpoint (default: the newest; 0: untrained)")
    args = parser.parse_args(argv)
    if args.temperature < 0 or not 0 < args.top_p <= 1 or args.top_k < 0 or args.max_new_tokens < 1:
        raise UserError("temperature and top_k are 0 or more, top_p is in (0, 1], max_new_tokens is 1 or more")
    return args


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")
    config.run(main)
