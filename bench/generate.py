"""Decoding, beside transformers' `generate` with its cache: the same weights, prompts and shapes.

    python -m bench generate [THREADS]    two minutes; needs transformers, see requirements-dev.txt

Both read prompts of 32 tokens and write 32 more, and take turns. fp32 and bf16 are the weights of
both; ours keeps its cache in fp32 on a CPU. A ratio is transformers' seconds over ours, the median
over turns: above 1 ours is faster. Greedy texts must be equal in fp32. Read next:
bench/evaluation.py.
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
VOCAB, PROMPT, NEW, TURNS = 50368, 32, 32, 5
SAMPLED = {"temperature": 0.8, "top_k": 50}


def both(width: int, layers: int, dtype):
    """Our decoder and transformers' model with equal weights: ALiBi, no biases, the only kind that transformers has."""
    import transformers

    cfg = MPTConfig(
        d_model=width,
        n_heads=width // 64,
        n_layers=layers,
        vocab_size=VOCAB,
        alibi=True,
        no_bias=True,
    )
    ours = MPT(cfg)
    init_weights(ours, 0)
    shape = {"d_model": width, "n_heads": width // 64, "n_layers": layers, "max_seq_len": 2048}
    theirs = transformers.MptForCausalLM(transformers.MptConfig(vocab_size=VOCAB, **shape)).eval()
    missing = theirs.load_state_dict(ours.state_dict(), strict=False).missing_keys
    assert missing in ([], ["lm_head.weight"]), missing  # the tied output layer
    return Decoder(ours, VOCAB, dtype), theirs.to(dtype)


def write_ours(decoder, ids, n, sampled):
    """n new tokens by our decoder, with a cache."""
    numbers = torch.rand(len(ids), n)
    tokens = generate(
        decoder, ids, n, numbers=numbers, **(SAMPLED if sampled else {"temperature": 0})
    )
    return torch.stack([token.clone() for token in tokens], dim=1)


def write_theirs(model, ids, n, sampled):
    """n new tokens by transformers' generate, with a cache."""
    length = {
        "max_new_tokens": n,
        "min_new_tokens": n,
        "pad_token_id": 0,
        "eos_token_id": None,
        "use_cache": True,
    }
    how = SAMPLED | {"do_sample": True} if sampled else {"do_sample": False}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **length, **how)[
        :, ids.shape[1] :
    ]


def seconds(write, *args) -> float:
    """How long one call takes."""
    begin = time.perf_counter()
    write(*args)
    return time.perf_counter() - begin


def compare(decoder, model, batch: int, sampled: bool, dtype) -> str:
    """The cells of a line."""
    ids = torch.randint(VOCAB, (batch, PROMPT), generator=torch.Generator().manual_seed(batch))
    texts = (
        write_ours(decoder, ids, 4, False),
        write_theirs(model, ids, 4, False),
    )  # and both are warm now
    assert dtype != torch.float32 or torch.equal(*texts)
    ours, theirs = [], []
    for _ in range(TURNS):
        ours.append(1e3 * seconds(write_ours, decoder, ids, NEW, sampled))
        theirs.append(1e3 * seconds(write_theirs, model, ids, NEW, sampled))
    ratio = statistics.median(b / a for a, b in zip(ours, theirs, strict=True))
    times = f"{statistics.median(ours) / NEW:.1f} | {statistics.median(theirs) / NEW:.1f} | {min(ours) / NEW:.1f} | "
    return f"{batch} | {'top_k 50' if sampled else 'greedy'} | {times}{min(theirs) / NEW:.1f} | {ratio:.2f}"


def main(argv: list[str]) -> None:
    """Print milliseconds a token of both sides, for each shape, dtype and batch."""
    (threads,) = config.arguments(argv, "[THREADS]") or [str(torch.get_num_threads())]
    require(
        threads.isdecimal() and int(threads) > 0,
        f"the number of threads is {config.shown(threads)}: give 1 or more",
    )
    torch.set_num_threads(int(threads))
    import transformers

    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    print(
        f"{datetime.date.today()}, {platform.machine()}, {torch.get_num_threads()} threads, {versions}\n"
    )
    print(
        "| shape | weights | batch | tokens | ours, ms a token | transformers | ours, least | transformers | ratio |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for width, layers in SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            decoder, model = both(width, layers, dtype)
            for batch in (1, 8):
                for sampled in (False, True):
                    line = compare(decoder, model, batch, sampled, dtype)
                    print(f"| {width} x {layers} | {str(dtype)[6:]} | {line} |", flush=True)


if __name__ == "__main__":
    config.run(main)
