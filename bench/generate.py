"""Decoding, beside transformers' `generate` with its cache: the same weights, prompts and shapes.

    python -m bench generate [THREADS]    two minutes; needs transformers, see requirements-dev.txt

Both read prompts of 32 tokens and write 32 more, and take turns. fp32 and bf16 are the dtype of
both models' weights; our cache is fp32 on a CPU. A ratio is transformers' seconds over ours, the
median over the turns: above 1, ours is faster. In fp32 the greedy texts must be equal.
"""

import datetime
import platform
import statistics
import time

import torch

import config
from config import MPTConfig, require
from model import MPT, init_weights
from serving.decoder import Decoder, generate

SHAPES = ((512, 8), (768, 12))  # width, layers
VOCAB = 50368
PROMPT_TOKENS = 32
NEW_TOKENS = 32
TURNS = 5
SAMPLING = {"temperature": 0.8, "top_k": 50}

COLUMNS = (
    "shape|weights|batch|tokens|ours, ms a token|transformers|ours, least|transformers|ratio"
).split("|")


def both_models(width: int, layers: int, dtype):
    """Our decoder and transformers' model with equal weights.

    With ALiBi and without biases, as transformers' model always is.
    """
    import transformers

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

    their_cfg = transformers.MptConfig(
        d_model=width, n_heads=n_heads, n_layers=layers, max_seq_len=2048, vocab_size=VOCAB
    )
    theirs = transformers.MptForCausalLM(their_cfg).eval()
    missing = theirs.load_state_dict(ours.state_dict(), strict=False).missing_keys
    assert missing in ([], ["lm_head.weight"]), missing  # the tied output layer
    return Decoder(ours, VOCAB, dtype), theirs.to(dtype)


def write_ours(decoder, prompts, n: int, sampled: bool):
    """n new tokens for each row of prompts (B, T), by our decoder with its cache: (B, n)."""
    uniforms = torch.rand(len(prompts), n)
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
    write(*args)
    return 1e3 * (time.perf_counter() - begin) / NEW_TOKENS


def compare(decoder, model, batch: int, sampled: bool, dtype) -> str:
    """Time both in turns; the cells of a line of the table."""
    generator = torch.Generator().manual_seed(batch)
    prompts = torch.randint(VOCAB, (batch, PROMPT_TOKENS), generator=generator)
    our_text = write_ours(decoder, prompts, 4, False)  # this also warms both up
    their_text = write_theirs(model, prompts, 4, False)
    assert dtype != torch.float32 or torch.equal(our_text, their_text)

    ours, theirs = [], []
    for _ in range(TURNS):
        ours.append(milliseconds(write_ours, decoder, prompts, NEW_TOKENS, sampled))
        theirs.append(milliseconds(write_theirs, model, prompts, NEW_TOKENS, sampled))
    ratio = statistics.median(b / a for a, b in zip(ours, theirs, strict=True))
    times = [statistics.median(ours), statistics.median(theirs), min(ours), min(theirs)]
    cells = [str(batch), "top_k 50" if sampled else "greedy"]
    cells += [f"{ms:.1f}" for ms in times]
    return " | ".join([*cells, f"{ratio:.2f}"])


def main(argv: list[str]) -> None:
    """Print milliseconds a token of both, for each shape, dtype and batch."""
    (threads,) = config.arguments(argv, "[THREADS]") or [str(torch.get_num_threads())]
    valid = threads.isdecimal() and int(threads) > 0
    require(valid, f"the number of threads is {config.shown(threads)}: give 1 or more")
    torch.set_num_threads(int(threads))
    import transformers

    machine = f"{platform.machine()}, {torch.get_num_threads()} threads"
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    print(f"{datetime.date.today()}, {machine}, {versions}\n")
    print(f"| {' | '.join(COLUMNS)} |")
    print("|---" * len(COLUMNS) + "|")
    for width, layers in SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            decoder, model = both_models(width, layers, dtype)
            for batch in (1, 8):
                for sampled in (False, True):
                    line = compare(decoder, model, batch, sampled, dtype)
                    name = str(dtype).removeprefix("torch.")
                    print(f"| {width} x {layers} | {name} | {line} |", flush=True)


if __name__ == "__main__":
    config.run(main)
