"""Decoding here against transformers' `generate` with its cache: the same weights, prompts and shapes, taking turns.

Both read prompts of 32 tokens and write 32 more. "whole": seconds of all of it; "step": of one more step, from the
difference to a call that writes 8. fp32 and bf16 are the weights of both. The texts of greedy decoding in fp32 must be
equal. A ratio is transformers' seconds over ours, the median over turns: above 1 ours is faster.

Run `python benchmarks/generate_speed.py` (it needs transformers, see requirements-dev.txt; about four minutes).
"""

import datetime
import platform
import statistics
import sys
import time
from pathlib import Path

import torch
import transformers

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from config import MPTConfig  # noqa: E402
from generate import Decoder, generate  # noqa: E402
from model import MPT, init_weights  # noqa: E402

SHAPES = ((512, 8), (768, 12))  # width, layers
VOCAB, PROMPT, NEW, FEW, TURNS = 50368, 32, 32, 8, 5
SAMPLED = {"temperature": 0.8, "top_k": 50}


def both(width: int, layers: int, dtype):
    """Our decoder and transformers' model with equal weights: ALiBi, no biases, the only kind that transformers has."""
    cfg = MPTConfig(d_model=width, n_heads=width // 64, n_layers=layers, vocab_size=VOCAB, alibi=True, no_bias=True)
    ours = MPT(cfg)
    init_weights(ours, 0)
    shape = {"d_model": width, "n_heads": width // 64, "n_layers": layers, "max_seq_len": 2048}
    theirs = transformers.MptForCausalLM(transformers.MptConfig(vocab_size=VOCAB, **shape)).eval()
    missing = theirs.load_state_dict(ours.state_dict(), strict=False).missing_keys
    assert missing in ([], ["lm_head.weight"]), missing  # the tied output layer
    return Decoder(ours, VOCAB, dtype), theirs.to(dtype)


def write_ours(decoder, ids, n, sampled):
    numbers = torch.rand(len(ids), n)
    tokens = generate(decoder, ids, n, numbers=numbers, **(SAMPLED if sampled else {"temperature": 0}))
    return torch.stack([token.clone() for token in tokens], dim=1)


def write_theirs(model, ids, n, sampled):
    length = {"max_new_tokens": n, "min_new_tokens": n, "pad_token_id": 0, "eos_token_id": None, "use_cache": True}
    how = SAMPLED | {"do_sample": True} if sampled else {"do_sample": False}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **length, **how)[:, ids.shape[1] :]


def seconds(write, *args) -> float:
    begin = time.perf_counter()
    write(*args)
    return time.perf_counter() - begin


def compare(decoder, model, batch: int, sampled: bool, dtype) -> str:
    """A line of the table."""
    ids = torch.randint(VOCAB, (batch, PROMPT), generator=torch.Generator().manual_seed(batch))
    whole, steps = ([], []), ([], [])
    texts = write_ours(decoder, ids, FEW, False), write_theirs(model, ids, FEW, False)  # and both are warm now
    assert dtype != torch.float32 or torch.equal(*texts)
    for _ in range(TURNS):
        for side, write, what in ((0, write_ours, decoder), (1, write_theirs, model)):
            all_of_it = seconds(write, what, ids, NEW, sampled)
            whole[side].append(all_of_it)
            steps[side].append((all_of_it - seconds(write, what, ids, FEW, sampled)) / (NEW - FEW))
    cells = [f"{batch}", "top_k 50" if sampled else "greedy"]
    for ours, theirs in (whole, steps):
        ratio = statistics.median(b / a for a, b in zip(ours, theirs, strict=True))
        cells += [f"{1e3 * statistics.median(ours):.1f}", f"{1e3 * statistics.median(theirs):.1f}", f"{ratio:.2f}"]
    return " | ".join(cells)


def main() -> None:
    print(f"{datetime.date.today()}, {platform.processor() or platform.machine()}, {torch.get_num_threads()} threads, "
          f"torch {torch.__version__}, transformers {transformers.__version__}\n")  # fmt: skip
    print("| shape | weights | batch | tokens | ours, whole ms | transformers | ratio | ours, step ms | transformers | ratio |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for width, layers in SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            decoder, model = both(width, layers, dtype)
            for batch in (1, 8):
                for sampled in (False, True):
                    line = compare(decoder, model, batch, sampled, dtype)
                    print(f"| {width} x {layers} | {str(dtype)[6:]} | {line} |", flush=True)


if __name__ == "__main__":
    main()
