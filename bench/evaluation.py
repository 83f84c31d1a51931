"""Zero-shot evaluation, beside lm-evaluation-harness's: the same weights, items, ids and threads.

    python -m bench evaluation A.jsonl,B.jsonl --limit=100 --d_model=256 --n_layers=4 --n_heads=4

A randomly initialised transformers MptForCausalLM is asked the questions of some files through
lm-eval's HFLM, at several batch sizes of which the best counts, and our model with its weights
through evaluation/score.py. They take turns; the sums of log-probabilities must agree. It needs
`pip install -r requirements-peers.txt`. Read next: bench/load.py.
"""

import statistics
import time
from dataclasses import dataclass

import torch

import config
import parallel
import processes
from config import MPTConfig
from evaluation import score as icl_score
from evaluation import tasks as icl_tasks
from evaluation import zero_shot
from model import MPT
from text import tokenizer as tokenizers


@dataclass
class SpeedConfig:
    """What is measured."""

    limit: int = 100  # items of each file
    turns: int = 5  # of each side, after one that warms up
    batch_tokens: int = 8192  # of one of our passes
    device: str = "auto"
    dtype: str = "fp32"  # of both models' weights: fp32 or bf16


def pair_of_models(cfg: MPTConfig):
    """The same random weights in transformers' MPT and in ours."""
    from transformers import MptConfig, MptForCausalLM

    theirs_cfg = MptConfig(
        d_model=cfg.d_model, n_heads=cfg.n_heads, n_layers=cfg.n_layers, vocab_size=cfg.vocab_size,
        max_seq_len=cfg.max_seq_len,
    )  # fmt: skip
    torch.manual_seed(0)
    theirs, ours = MptForCausalLM(theirs_cfg).eval(), MPT(cfg).eval()
    ours.load_state_dict(
        {name: value for name, value in theirs.state_dict().items() if name != "lm_head.weight"}
    )
    return theirs, ours


def harness(model, max_length: int, batch_size: int):
    """lm-eval's backend on a model that is here already. The ids are given, so its tokenizer only has to exist."""
    from lm_eval.models.huggingface import HFLM
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<eos>": 0}, unk_token="<eos>"))
    words = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<eos>")
    return HFLM(
        pretrained=model, tokenizer=words, batch_size=batch_size, max_length=max_length, dtype=None
    )


def main(argv) -> None:
    """Score the same requests by both sides in turns; print requests/s and the largest difference."""
    defaults = "--d_model=256 --n_heads=4 --n_layers=4 --max_seq_len=1024 --alibi --no_bias".split()
    (paths,), cfg, how = config.load(
        [*defaults, *argv], MPTConfig, SpeedConfig, takes="A.jsonl,B.jsonl"
    )
    world = processes.start(how.device)
    tokenizer = tokenizers.load("gpt2")
    tasks = icl_tasks.load(paths, limit=how.limit)
    requests = []
    for task in tasks:
        pairs = zero_shot.pairs_of(task, tokenizer, cfg.max_seq_len)
        requests += zero_shot.encode(pairs, tokenizer, task.name, cfg)[0]
    theirs, ours = (m.to(world.device, parallel.DTYPES[how.dtype]) for m in pair_of_models(cfg))
    split = [(None, r.ids[: -r.count].tolist(), r.ids[-r.count :].tolist()) for r in requests]
    backends = {
        f"lm-eval, batch {size}": harness(theirs, cfg.max_seq_len, size) for size in (1, 8, 32)
    }
    sides = {
        name: lambda lm=lm: lm._loglikelihood_tokens(split, disable_tqdm=True)
        for name, lm in backends.items()
    }
    sides["ours"] = lambda: icl_score.score(
        ours, requests, world, how.dtype, how.batch_tokens
    ).tolist()
    seconds, results = {name: [] for name in sides}, {}
    for turn in range(how.turns + 1):
        for name, side in sides.items():
            begin = time.perf_counter()
            results[name] = side()
            if turn:
                seconds[name].append(time.perf_counter() - begin)
    reference = results["lm-eval, batch 1"]
    for name, times in seconds.items():
        worst = max(abs(a[0] - b[0]) for a, b in zip(results[name], reference, strict=True))
        rate = len(requests) / statistics.median(times)
        print(
            f"{name:20} {rate:8.1f} requests/s  largest difference of a sum from lm-eval's at batch 1: {worst:.1e}"
        )
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    best = {
        side: min(t for name, t in medians.items() if name.startswith(side))
        for side in ("lm-eval", "ours")
    }
    tokens = sum(len(r.ids) - 1 for r in requests)
    print(
        f"{len(requests)} requests, {tokens} tokens; ours is {best['lm-eval'] / best['ours']:.2f} times as fast"
    )


if __name__ == "__main__":
    processes.run(main)
