"""Measured throughput: the training step, beside the same model in Hugging Face's transformers.

    python bench.py train                                the shape below
    python bench.py train --d_model=768 --n_heads=12 --n_layers=12 --vocab_size=50368 --microbatch_size=4

Both run in one process under the same allocator settings and take turns, so what else the machine does hits both;
the figures are medians. Prints a Markdown table to keep in benchmarks/. transformers is in requirements-dev.txt;
without it only our rows are measured.
"""

import datetime
import statistics
import sys
import time
from dataclasses import dataclass

import torch

import config
import devices
import flops
import fsdp_train
import optim
import parallel
import runlog
from config import MPTConfig, TrainConfig, require
from model import MPT

SHAPE = [
    *("--n_layers=6", "--n_heads=6", "--d_model=384", "--max_seq_len=256", "--vocab_size=256"),
    *("--global_batch_size=8", "--microbatch_size=8", "--alibi", "--no_bias", "--grad_clip=0"),
]


@dataclass
class BenchArgs:
    """How long to measure."""

    rounds: int = 7  # turns of each contestant; the median counts
    steps: int = 5  # optimizer steps of a turn


def ours(model_cfg, cfg, world, precision):
    """A function that takes one step of this project's training loop on random tokens."""
    with torch.device("meta"):
        model = MPT(model_cfg)
    model = parallel.parallelize(model, parallel.make_mesh(world, cfg), cfg, precision)
    parallel.materialize(model, world.device, cfg.seed)
    optimizer = optim.build_optimizer(model.parameters(), cfg)
    rows = random_rows(model_cfg, cfg, world)
    return lambda: fsdp_train.train_step(model, optimizer, rows, 1000, cfg, world, precision)[0].item()


def theirs(model_cfg, cfg, world, precision):
    """The same for transformers' MptForCausalLM (always ALiBi, no biases) with PyTorch's AdamW, one whole batch."""
    from transformers import MptConfig, MptForCausalLM

    sizes = {k: getattr(model_cfg, k) for k in ("d_model", "n_heads", "n_layers", "max_seq_len", "vocab_size")}
    model = MptForCausalLM(MptConfig(**sizes)).to(world.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.lr)
    rows = random_rows(model_cfg, cfg, world)

    def step():
        with torch.autocast(world.device.type, torch.bfloat16, enabled=precision == "bf16"):
            loss = model(rows[:, :-1], labels=rows[:, :-1]).loss  # it shifts the labels itself
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def random_rows(model_cfg, cfg, world):
    """Random tokens for one rank, (B, T + 1) int64."""
    shape = (cfg.global_batch_size // world.size, model_cfg.max_seq_len + 1)
    return torch.randint(model_cfg.vocab_size, shape, device=world.device)


def take_turns(contestants: dict, rounds: int, steps: int, tokens: int) -> dict:
    """Tokens per second of each contestant, one figure per round, after one turn to warm up."""
    rates = {name: [] for name in contestants}
    for turn in range(rounds + 1):
        for name, step in contestants.items():
            begin = time.perf_counter()
            for _ in range(steps):
                step()
            if turn > 0:
                rates[name].append(steps * tokens / (time.perf_counter() - begin))
    return rates


def bench_train(argv) -> None:
    """The table of `bench.py train`."""
    model_cfg, cfg, args = config.load(SHAPE + argv, MPTConfig, TrainConfig, BenchArgs)
    world = parallel.start(cfg.device)
    precision = parallel.choose_precision(cfg, world.device)
    contestants = {f"this project, {cfg.sharding}, {world.size} ranks": ours(model_cfg, cfg, world, precision)}
    if world.size == 1:
        try:
            contestants["transformers MptForCausalLM"] = theirs(model_cfg, cfg, world, precision)
        except ImportError:
            print(
                "transformers is not installed (requirements-dev.txt): only this project is measured", file=sys.stderr
            )
    tokens = cfg.global_batch_size * model_cfg.max_seq_len
    rates = take_turns(contestants, args.rounds, args.steps, tokens)
    if world.rank > 0:
        return
    peak = devices.peak_flops(cfg.peak_tflops, world.device, parallel.DTYPES[precision])
    about = runlog.versions()
    print(
        f"`python bench.py train {' '.join(argv)}`, {datetime.date.today()}, {devices.describe(world.device)}, ", end=""
    )
    print(
        f"{torch.get_num_threads()} threads, torch {about['torch']}, {precision}, {flops.n_params(model_cfg):,} ",
        end="",
    )
    print(f"parameters, batch {cfg.global_batch_size} x {model_cfg.max_seq_len}, median of {args.rounds} turns\n")
    print("| what | tokens/s | fastest / slowest turn | MFU | against the last row |")
    print("|---|---|---|---|---|")
    base = statistics.median(list(rates.values())[-1])
    for name, turns in rates.items():
        median = statistics.median(turns)
        mfu = flops.mfu(model_cfg, median, world.size, peak)
        share = "n/a" if mfu is None else f"{mfu:.1%}"
        print(f"| {name} | {median:,.0f} | {max(turns):,.0f} / {min(turns):,.0f} | {share} | {median / base:.2f} |")


def main(argv) -> None:
    benches = {"train": bench_train}
    require(argv and argv[0] in benches, f"usage: python bench.py {'|'.join(benches)} [config] [--key=value]")
    benches[argv[0]](argv[1:])


if __name__ == "__main__":
    parallel.run(main)
