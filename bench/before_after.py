"""What each part of the training step is worth: the step as it is, beside the step without it.

    python -m bench before_after                      the tables that are in bench/results/log.md
    python -m bench before_after --only=chunked       the rows whose names contain this word

`Variant` is the step with one part undone. It runs in one process, the step as it is in another,
and they take turns, as in `bench train`. There are two shapes: 6 layers of width 384 with a
vocabulary of 256, and 6 layers of width 768 with a vocabulary of 50,368.
"""

import contextlib
import statistics
import sys
import time
from dataclasses import dataclass

import torch

import attention
import config
import loss
import model
import optim
import parallel
import processes
from attention import blocks_by_autograd
from bench import train as bench_train
from bench.team import Team, TeamError
from config import MPTConfig, TrainConfig, require

LARGE = """
    --d_model=768 --n_heads=12 --vocab_size=50368 --global_batch_size=4 --microbatch_size=4
""".split()
SHAPES = {
    "width 384, vocabulary 256, batch 8": [],
    "width 768, vocabulary 50,368, batch 4": LARGE,
}
# What is undone, and what runs instead -> flags that do that.
FLAGS = {
    "nothing": [],
    "attention by blocks: SDPA with ALiBi columns instead": ["--attn_impl=sdpa"],
    "attention by blocks: all T x T scores at once instead": ["--attn_impl=reference"],
    "activation checkpointing: selective instead of none": ["--activation_checkpointing=selective"],
    "activation checkpointing: full instead of none": ["--activation_checkpointing=full"],
    "no compilation: blocks compiled instead": ["--compile"],
}
# Flags of both processes, beside those of the shape.
BOTH = {"weights cast once a step: in each microbatch (of two) instead": ["--microbatch_size=2"]}


@dataclass
class BeforeAfterArgs:
    """What to undo, and how long to measure."""

    only: str = ""  # the rows whose names contain this word (empty: all)
    rounds: int = 5  # turns of each process; the median counts
    steps: int = 2  # optimizer steps of a turn

    def check(self) -> None:
        """UserError if a setting is out of range, or no row has the word."""
        require(self.rounds > 0 and self.steps > 0, "rounds and steps must be at least 1")
        exists = any(self.only in undone for undone in [*FLAGS, *UNDO])
        require(exists, f"--only={self.only}: no row has that in its name")


def replace(module, name: str, value) -> None:
    """Replace what the step calls. AttributeError if the module has no such name."""
    getattr(module, name)
    setattr(module, name, value)


def obvious_loss(x, weight, labels, scale, z_loss):
    """The loss with all logits in memory together: what the chunked loss replaces."""
    return loss.reference_linear_cross_entropy(x, weight, labels, scale or 1.0, z_loss)


def softmax_of_log_softmax(logits):
    """Softmax with a second exponential and a second tensor, as a loss with log_softmax has it."""
    return torch.log_softmax(logits, dim=-1).exp_()


def attention_of_three(q, k, v, qkv=None, **settings):
    """Attention that is not told of the tensor behind q, k and v: each has its own gradient."""
    return attention.attention(q, k, v, **settings)


def looping_adamw(params, cfg):
    """AdamW that loops over the parameters: what the fused one replaces."""
    decay = cfg.decoupled_weight_decay / cfg.lr
    return torch.optim.AdamW(
        params, cfg.lr, (cfg.beta1, cfg.beta2), cfg.adam_eps, decay, foreach=False
    )


def mesh_of_one(world, cfg):
    """A mesh of one process, so that fully_shard is used, which a single rank otherwise skips."""
    return torch.distributed.device_mesh.init_device_mesh("cpu", (1,), mesh_dim_names=("dp_shard",))


def autocast_with_cache(device, precision):
    """Autocast that caches the weights it has cast; parallel.autocast does not."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16")


def cast_in_each_microbatch(model, precision, n_microbatches):
    """A context that leaves the casts to autocast, which makes them in each microbatch."""
    return contextlib.nullcontext()


# --- The rows of the table


def require_gpu() -> None:
    """UserError without a GPU: on a CPU the step does not have what the row undoes."""
    require(torch.cuda.is_available(), "it runs on GPUs only, and there is none here")


def undo_loss_kernel(cfg) -> None:
    """The loss by PyTorch's operators, as on a CPU."""
    require_gpu()
    replace(loss, "takes_kernel", lambda device, dtype: False)


def undo_one_gradient(cfg) -> None:
    """Attention that makes three gradients."""
    require_gpu()
    replace(model, "attention", attention_of_three)


def halve_microbatches(cfg) -> None:
    """Two microbatches, where there was one."""
    cfg.microbatch_size = cfg.global_batch_size // 2


def compute_in_fp32(cfg) -> None:
    """fp32 instead of bf16."""
    cfg.precision = "fp32"


# What is undone, and what runs instead -> the function that does that; cfg: the TrainConfig.
UNDO = {
    "the blocks' own backward: autograd's instead": (
        lambda cfg: attention.IMPLEMENTATIONS.update(blocks=blocks_by_autograd)
    ),
    "one exponential a logit in the loss, in place: two, not in place instead": (
        lambda cfg: replace(loss, "softmax_", softmax_of_log_softmax)
    ),
    "chunks of the loss of 64 MiB: of 256 instead": (
        lambda cfg: replace(loss, "CHUNK_BYTES", 256 * 2**20)
    ),
    "chunked loss: all logits at once instead": (
        lambda cfg: replace(model, "linear_cross_entropy", obvious_loss)
    ),
    "pieces of the loss's weight gradient: one piece instead": (
        lambda cfg: replace(loss, "COLUMNS", 10**9)
    ),
    "loss kernel: PyTorch's operators instead": undo_loss_kernel,
    "fused AdamW: PyTorch's loop over the parameters instead": (
        lambda cfg: replace(optim, "build_optimizer", looping_adamw)
    ),
    "malloc keeps freed memory: glibc's defaults instead": (
        lambda cfg: replace(processes, "keep_freed_memory", lambda: None)
    ),
    "one rank is not sharded: fully_shard instead": (
        lambda cfg: replace(parallel, "make_mesh", mesh_of_one)
    ),
    "autocast without a cache: with it instead": (
        lambda cfg: replace(parallel, "autocast", autocast_with_cache)
    ),
    "weights cast once a step: in each microbatch (of two) instead": (
        lambda cfg: replace(parallel, "weights_cast_once", cast_in_each_microbatch)
    ),
    "bf16: fp32 instead": compute_in_fp32,
    "one microbatch: two of half the size instead": halve_microbatches,
    "one gradient for Wqkv (GPUs, ALiBi): three that autograd joins instead": undo_one_gradient,
}


class Variant(bench_train.OurProgram):
    """Our training step with one thing undone: a row of FLAGS or UNDO. KeyError for others."""

    def __init__(self, undone: str, model_cfg, cfg):
        if undone not in FLAGS:
            UNDO[undone](cfg)
        super().__init__(model_cfg, cfg)


def measure(undone: str, flags: list[str], rounds: int, steps: int) -> str:
    """A line of the table: the ratio of the speeds, and both peaks of memory.

    flags: settings of both processes, which choose the shape.
    """
    settings = [*bench_train.SHAPE, "--precision=bf16", "--compile=False", *flags]
    settings += BOTH.get(undone, [])
    names = ("nothing", undone)  # the step as it is, and without the part
    teams = []
    for name in names:
        cfgs = config.load([*settings, *FLAGS.get(name, [])], MPTConfig, TrainConfig)
        teams.append(Team(Variant, (name, *cfgs), ranks=1, threads=torch.get_num_threads()))

    rates = ([], [])  # turns per second, by team
    for turn in range(rounds + 1):
        for team, team_rates in zip(teams, rates, strict=True):
            (seconds,) = team.call("turn", steps)
            if turn > 0:  # the first turn warms up
                team_rates.append(1 / seconds)

    with_part, without_part = (statistics.median(team_rates) for team_rates in rates)
    peaks = [team.call("describe")[0]["memory_gb"] for team in teams]
    for team in teams:
        team.stop()
    return f"| {undone} | {with_part / without_part:.2f} | {peaks[0]:.2f} / {peaks[1]:.2f} |"


def main(argv) -> None:
    """Time each variant in turns with the step as it is, and print a table of ratios."""
    (args,) = config.load(argv, BeforeAfterArgs)
    rows = [undone for undone in [*FLAGS, *UNDO] if args.only in undone]
    for shape, flags in SHAPES.items():
        print(f"\n| {shape} | as it is / undone, tokens/s | peak GB |\n|---|---|---|", flush=True)
        for undone in rows:
            begin = time.perf_counter()
            try:
                print(measure(undone, flags, args.rounds, args.steps), flush=True)
            except TeamError as error:
                print(f"| {undone} | n/a: {error} | |", flush=True)
            print(f"  {time.perf_counter() - begin:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    config.run(main)
