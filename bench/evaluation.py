"""Zero-shot evaluation, beside lm-evaluation-harness: the same weights, items, ids and threads.

    python -m bench evaluation A.jsonl,B.jsonl --limit=100 --d_model=256 --n_layers=4 --n_heads=4

The questions of some files are put to a randomly initialised MptForCausalLM of transformers by
lm-eval's HFLM, at several batch sizes of which the best counts, and to our model with the same
weights by evaluation/score.py. They take turns; the sums of log-probabilities must agree. Needs
`pip install -r requirements-peers.txt`.
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

DEFAULTS = "--d_model=256 --n_heads=4 --n_layers=4 --max_seq_len=1024 --alibi --no_bias".split()


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

    their_cfg = MptConfig(
        d_model=cfg.d_model,
        n_heads=cfg.n_heads,
        n_layers=cfg.n_layers,
        vocab_size=cfg.vocab_size,
        max_seq_len=cfg.max_seq_len,
    )
    torch.manual_seed(0)
    theirs = MptForCausalLM(their_cfg).eval()
    ours = MPT(cfg).eval()
    weights = theirs.state_dict()
    weights.pop("lm_head.weight", None)  # tied to the embedding
    ours.load_state_dict(weights)
    return theirs, ours


def harness(model, max_length: int, batch_size: int):
    """lm-eval's backend for a model in memory.

    It must have a tokenizer, which is never used: the requests are token ids.
    """
    from lm_eval.models.huggingface import HFLM
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    one_word = Tokenizer(models.WordLevel({"<eos>": 0}, unk_token="<eos>"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=one_word, eos_token="<eos>", pad_token="<eos>"
    )
    return HFLM(
        pretrained=model,
        tokenizer=tokenizer,
        batch_size=batch_size,
        max_length=max_length,
        dtype=None,
    )


def read_requests(paths: str, cfg: MPTConfig, limit: int) -> list:
    """The requests of all items of the files, as token ids."""
    tokenizer = tokenizers.load("gpt2")
    requests = []
    for task in icl_tasks.load(paths, limit=limit):
        pairs = zero_shot.pairs_of(task, tokenizer, cfg.max_seq_len)
        encoded, *_ = zero_shot.encode(pairs, tokenizer, task.name, cfg)
        requests += encoded
    return requests


def make_sides(requests: list, cfg: MPTConfig, args: SpeedConfig, world) -> dict:
    """{name: a function that scores all requests}: lm-eval at three batch sizes, and ours."""
    dtype = parallel.DTYPES[args.dtype]
    theirs, ours = (model.to(world.device, dtype) for model in pair_of_models(cfg))
    their_requests = [
        (None, r.ids[: -r.count].tolist(), r.ids[-r.count :].tolist()) for r in requests
    ]

    def lm_eval_at(batch_size: int):
        backend = harness(theirs, cfg.max_seq_len, batch_size)
        return lambda: backend._loglikelihood_tokens(their_requests, disable_tqdm=True)

    def score_ours():
        return icl_score.score(ours, requests, world, args.dtype, args.batch_tokens).tolist()

    sides = {f"lm-eval, batch {size}": lm_eval_at(size) for size in (1, 8, 32)}
    return sides | {"ours": score_ours}


def take_turns(sides: dict, turns: int) -> tuple[dict[str, float], dict[str, list]]:
    """The median seconds of each side, and its last results."""
    times = {name: [] for name in sides}
    results = {}
    for turn in range(turns + 1):
        for name, score_all in sides.items():
            begin = time.perf_counter()
            results[name] = score_all()
            if turn > 0:  # the first turn warms up
                times[name].append(time.perf_counter() - begin)
    return {name: statistics.median(times[name]) for name in sides}, results


def main(argv) -> None:
    """Score the same requests by all sides; print requests/s and the largest differences."""
    takes = "A.jsonl,B.jsonl"
    (paths,), cfg, args = config.load([*DEFAULTS, *argv], MPTConfig, SpeedConfig, takes=takes)
    world = processes.start(args.device)
    requests = read_requests(paths, cfg, args.limit)
    medians, results = take_turns(make_sides(requests, cfg, args, world), args.turns)

    reference = results["lm-eval, batch 1"]
    for name, seconds in medians.items():
        pairs = zip(results[name], reference, strict=True)
        worst = max(abs(result[0] - expected[0]) for result, expected in pairs)
        difference = f"largest difference of a sum from lm-eval's at batch 1: {worst:.1e}"
        print(f"{name:20} {len(requests) / seconds:8.1f} requests/s  {difference}")

    best_lm_eval = min(medians[name] for name in medians if name.startswith("lm-eval"))
    ratio = best_lm_eval / medians["ours"]
    tokens = sum(len(request.ids) - 1 for request in requests)
    print(f"{len(requests)} requests, {tokens} tokens; ours is {ratio:.2f} times as fast")


if __name__ == "__main__":
    processes.run(main)
