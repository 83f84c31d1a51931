"""The FLOPs and bytes of a training step as torch counts them, beside planning's closed forms.

    python -m bench flops configs/mpt7b.py --activation_checkpointing=full

FlopCounterMode adds up the matmuls of the forward and the backward as they are dispatched. The
tensors are fake: they have shapes but no data, so MPT-70B needs no memory. Attention is the
reference, two matmuls over all T x T scores, because the counter knows no CPU kernel of attention.

planning/matmuls.py has the closed form of the FLOPs, planning/memory.py that of the bytes.
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
from planning.matmuls import TrainingSetup


def count(
    cfg: MPTConfig, work: TrainingSetup, backward: bool = True, change=lambda model: None
) -> FlopCounterMode:
    """Count one sequence's forward, or forward and backward; returns the counter.

    change(model): called before counting, to freeze weights or add adapters.
    """
    with FakeTensorMode(), FlopCounterMode(display=False) as counter:
        model = MPT(replace(cfg, attn_impl="reference"))
        change(model)
        train_cfg = TrainConfig(
            activation_checkpointing=work.activation_checkpointing,
            recompute_every=work.recompute_every,
        )
        parallel.recompute(model, train_cfg)
        logits = model(torch.zeros(1, cfg.max_seq_len, dtype=torch.int64))
        if backward:
            logits.sum().backward()
    return counter


def by_part(counter: FlopCounterMode) -> dict[str, int]:
    """{part of the model: FLOPs}.

    Only without activation checkpointing: with it, the counter attributes FLOPs to wrong modules.
    """
    flops_of_module = {}
    for name, operations in counter.get_flop_counts().items():
        flops_of_module[name] = sum(operations.values())

    def sum_over_blocks(end: str) -> int:
        pattern = rf"MPT\.transformer\.blocks\.\d+\.{end}"
        return sum(n for name, n in flops_of_module.items() if re.fullmatch(pattern, name))

    parts = {}
    for linear, part in matmuls.LINEARS.items():
        parts[part] = sum_over_blocks(rf"\w+\.{linear}")
    parts["attention"] = sum_over_blocks("attn") - parts["QKV"] - parts["projection"]
    parts["logits"] = flops_of_module["Global"] - flops_of_module["MPT.transformer"]
    return parts


def closed_form(cfg: MPTConfig, passes) -> dict[str, float]:
    """{part of the model: FLOPs of one sequence in some of matmuls.PASSES}, by the closed form."""
    parts = {}
    for part, flops_of_pass in matmuls.flops_by_pass(cfg).items():
        parts[part] = cfg.max_seq_len * sum(flops_of_pass[name] for name in passes)
    parts["attention"] = sum(parts.pop(part) for part in matmuls.ATTENTION)
    return parts


def compare(cfg: MPTConfig, work: TrainingSetup) -> list[str]:
    """Lines of a table: GFLOP of training on one sequence, by both counts.

    UserError if a setting of `work` changes what torch would count.
    """
    checkpointing = work.activation_checkpointing
    counted_work = TrainingSetup(
        activation_checkpointing=checkpointing, recompute_every=work.recompute_every
    )
    reason = "torch counts a model whose weights all train, over all T x T scores"
    require(work == counted_work, f"{reason}: remove the other settings")

    forward = by_part(count(cfg, TrainingSetup(), backward=False))
    both = by_part(count(cfg, TrainingSetup()))
    counted = {
        "forward": forward,
        "backward": {part: n - forward[part] for part, n in both.items()},
    }
    first, *others = matmuls.PASSES
    passes = {"forward": [first], "backward": others}
    rows = []
    for name in passes:
        for part, n in closed_form(cfg, passes[name]).items():
            rows.append((f"{name}: {part}", n, counted[name][part]))

    length = cfg.max_seq_len
    closed_total = length * matmuls.total(matmuls.flops_by_pass(cfg))
    rows.append(("all", closed_total, sum(both.values())))
    if checkpointing != "none":
        closed_total = length * matmuls.total(matmuls.flops_by_pass(cfg, work))
        counted_total = count(cfg, work).get_total_flops()
        rows.append((f"all, {checkpointing} checkpointing", closed_total, counted_total))
    return table("GFLOP of a sequence", "FlopCounterMode", rows)


def compare_memory(cfg: MPTConfig, work: TrainingSetup) -> list[str]:
    """Lines of a table: GB of a training step at its peak, by both counts.

    One rank, two microbatches of one sequence, bf16.
    """
    train_cfg = memory_measured.settings(1, 2, work.activation_checkpointing)
    fused = replace(cfg, attn_impl="sdpa")
    moment, estimated, counted = memory_measured.both_peaks(fused, train_cfg)
    row = (f"peak: {moment}", sum(estimated.values()), sum(counted.values()))
    return ["", *table("GB of a step", "fake tensors", [row])]


def table(title: str, counter: str, rows: list[tuple]) -> list[str]:
    """Lines of a table. rows: (name, closed form, counted), shown in units of 1e9."""
    lines = [f"{title:<28}{'closed form':>18}{counter:>18}{'difference':>12}"]
    for name, closed, counted in rows:
        figures = f"{closed / 1e9:>18,.3f}{counted / 1e9:>18,.3f}{closed / counted - 1:>12.2%}"
        lines.append(f"  {name:<26}{figures}")
    return lines


def main(argv: list[str]) -> None:
    """Print both tables: FLOPs, then bytes."""
    cfg, work = config.load(argv, MPTConfig, TrainingSetup)
    message = "torch counts a step's FLOPs and bytes on fake tensors; this takes some seconds"
    print(message, file=sys.stderr)
    print("\n".join([*compare(cfg, work), *compare_memory(cfg, work)]))


if __name__ == "__main__":
    config.run(main)
