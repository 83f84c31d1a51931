"""The FLOPs and bytes of a training step as torch counts them, beside the closed forms of planning/.

    python -m bench flops configs/mpt7b.py --activation_checkpointing=full

FlopCounterMode adds up the matmuls that are dispatched in the forward and the backward. The tensors
are fake, shapes without numbers, so MPT-70B needs no memory. Attention is the obvious one, two
matmuls on the whole square of scores, since the counter knows no CPU kernel of attention.

planning/matmuls.py has the closed form of FLOPs, planning/memory.py of bytes. Read next:
bench/memory.py, which counts those.
"""

import re
import sys
from dataclasses import replace

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import config
import parallel
from bench import memory as memory_measured
from config import MPTConfig, TrainConfig, require
from model import MPT
from planning import matmuls
from planning.matmuls import TrainingSetup as Work


def count(
    cfg: MPTConfig, work: Work, backward: bool = True, change=lambda model: None
) -> FlopCounterMode:
    """The counter after the forward, or forward and backward, of one sequence. `change(model)` may freeze or adapt."""
    with FakeTensorMode(), FlopCounterMode(display=False) as counter:
        model = MPT(replace(cfg, attn_impl="reference"))
        change(model)
        how = {
            name: getattr(work, name) for name in ("activation_checkpointing", "recompute_every")
        }
        parallel.recompute(model, TrainConfig(**how))
        logits = model(torch.zeros(1, cfg.max_seq_len, dtype=torch.int64))
        if backward:
            logits.sum().backward()
    return counter


def by_part(counter: FlopCounterMode) -> dict[str, int]:
    """FLOPs by part, of a model without activation checkpointing: with it the counter takes one module for another."""
    modules = {
        name: sum(operations.values()) for name, operations in counter.get_flop_counts().items()
    }

    def of(end: str) -> int:
        return sum(
            n
            for name, n in modules.items()
            if re.fullmatch(rf"MPT\.transformer\.blocks\.\d+\.{end}", name)
        )

    linears = {part: of(rf"\w+\.{name}") for name, part in matmuls.LINEARS.items()}
    attention = of("attn") - linears["QKV"] - linears["projection"]
    return {
        **linears,
        "attention": attention,
        "logits": modules["Global"] - modules["MPT.transformer"],
    }


def closed_form(cfg: MPTConfig, passes) -> dict[str, float]:
    """The same parts by planning/matmuls.py, FLOPs of one sequence."""
    by_pass = matmuls.flops_by_pass(cfg)
    parts = {
        part: cfg.max_seq_len * sum(numbers[p] for p in passes) for part, numbers in by_pass.items()
    }
    parts["attention"] = sum(parts.pop(part) for part in matmuls.ATTENTION)
    return parts


def compare(cfg: MPTConfig, work: Work) -> list[str]:
    """Lines of a table: GFLOP of training on one sequence in closed form, counted, and the difference."""
    how, plain, S = work.activation_checkpointing, Work(), cfg.max_seq_len
    known = work == Work(activation_checkpointing=how, recompute_every=work.recompute_every)
    require(
        known,
        "torch counts a model whose weights all train, on the whole square: leave out the other settings",
    )
    forward, both = (by_part(count(cfg, plain, backward)) for backward in (False, True))
    counted = {
        "forward": forward,
        "backward": {part: n - forward[part] for part, n in both.items()},
    }
    passes = {"forward": matmuls.PASSES[:1], "backward": matmuls.PASSES[1:]}
    rows = [
        (f"{name}: {part}", n, counted[name][part])
        for name in passes
        for part, n in closed_form(cfg, passes[name]).items()
    ]
    rows.append(("all", S * matmuls.total(matmuls.flops_by_pass(cfg)), sum(both.values())))
    if how != "none":
        closed, counter = matmuls.flops_by_pass(cfg, work), count(cfg, work)
        rows.append(
            (f"all, {how} checkpointing", S * matmuls.total(closed), counter.get_total_flops())
        )
    head = (
        f"{'GFLOP of a sequence':<28}{'closed form':>18}{'FlopCounterMode':>18}{'difference':>12}"
    )
    return [head] + [
        f"  {name:<26}{a / 1e9:>18,.3f}{b / 1e9:>18,.3f}{a / b - 1:>12.2%}" for name, a, b in rows
    ]


def compare_memory(cfg: MPTConfig, work: Work) -> list[str]:
    """The same for the bytes of a step at their peak: one rank, two microbatches of one sequence, bf16."""
    how, fused = work.activation_checkpointing, replace(cfg, attn_impl="sdpa")
    when, estimated, counted = memory_measured.both_peaks(
        fused, memory_measured.settings(1, 2, how)
    )
    a, b = sum(estimated.values()), sum(counted.values())
    head = f"{'GB of a step':<28}{'closed form':>18}{'fake tensors':>18}{'difference':>12}"
    return [
        "",
        head,
        f"  {'peak: ' + when:<26}{a / 1e9:>18,.3f}{b / 1e9:>18,.3f}{a / b - 1:>12.2%}",
    ]


def main(argv: list[str]) -> None:
    """Print both tables: FLOPs, then bytes."""
    cfg, work = config.load(argv, MPTConfig, Work)
    words = "torch counts a step's FLOPs and bytes on tensors without numbers, for some seconds"
    print(words, file=sys.stderr)
    print("\n".join([*compare(cfg, work), *compare_memory(cfg, work)]))


if __name__ == "__main__":
    config.run(main)
