"""Our training step beside transformers' MPT and a plain GPT-2 script.

    python -m bench beside                                      a small model
    python -m bench beside --d_model=768 --n_heads=12 --global_batch_size=4    any settings

    time / first = seconds of a program / seconds of the first in the same round, the median

Each program is a process of its own. They take turns, so that other load on the machine slows all
of them. transformers begins with our random weights: in fp32 on a CPU its loss has to be ours, else
the comparison is refused. It runs as its users run it, with glibc's default malloc settings.

transformers is in requirements-dev.txt.
"""

import statistics
import sys
import time
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

import config
import devices
import parallel
import processes
import program
from bench import train
from config import Int, MPTConfig, TrainConfig
from launch.pool import Pool, PoolError
from lifecycle import runlog
from model import MPT, init_weights
from program import require

FIRST = "ours, ALiBi"
SAME_WORK = "transformers"  # as the first: the same model, weights and batch
TOLERANCE = 1e-4  # of their losses, in fp32 on a CPU


@dataclass
class BesideArgs:
    """How long to measure, and how."""

    rounds: Int[1, 10**6] = 5  # turns of each program; the median counts
    steps: Int[1, 10**6] = 1  # optimizer steps of a turn
    threads: Int[1, 10**4] = 0  # of each program (0: as many as there are cores)


class PlainBlock(nn.Module):
    """A layer of GPT-2."""

    def __init__(self, d_model: int, n_heads: int, bias: bool):
        super().__init__()
        self.n_heads = n_heads
        self.norm_1 = nn.LayerNorm(d_model, bias=bias)
        self.qkv = nn.Linear(d_model, 3 * d_model, bias=bias)
        self.proj = nn.Linear(d_model, d_model, bias=bias)
        self.norm_2 = nn.LayerNorm(d_model, bias=bias)
        self.up = nn.Linear(d_model, 4 * d_model, bias=bias)
        self.down = nn.Linear(4 * d_model, d_model, bias=bias)

    def forward(self, x):
        """x (B, T, d_model) -> (B, T, d_model)."""
        B, T, d_model = x.shape
        heads = self.qkv(self.norm_1(x)).view(B, T, 3, self.n_heads, -1)
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # (B, H, T, D) each
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(B, T, d_model))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class PlainGPT2(nn.Module):
    """GPT-2 with tied embeddings, as a script of one page writes it."""

    def __init__(self, m: MPTConfig):
        super().__init__()
        bias = not m.no_bias
        self.wte = nn.Embedding(m.vocab_size, m.d_model)
        self.wpe = nn.Embedding(m.max_seq_len, m.d_model)
        layers = (PlainBlock(m.d_model, m.n_heads, bias) for _ in range(m.n_layers))
        self.blocks = nn.Sequential(*layers)
        self.norm = nn.LayerNorm(m.d_model, bias=bias)
        nn.init.normal_(self.wte.weight, std=0.02)

    def forward(self, ids):
        """ids (B, T) -> logits (B, T, V)."""
        positions = torch.arange(ids.shape[1], device=ids.device)
        x = self.blocks(self.wte(ids) + self.wpe(positions))
        return F.linear(self.norm(x), self.wte.weight)


def transformers_mpt(m: MPTConfig, seed: int) -> nn.Module:
    """transformers' MPT, which has ALiBi and no biases, with the weights of a new run of ours."""
    from transformers import MptConfig, MptForCausalLM

    ours = MPT(m)
    init_weights(ours, seed)
    names = ("d_model", "n_heads", "n_layers", "max_seq_len", "vocab_size")
    theirs = MptForCausalLM(MptConfig(**{name: getattr(m, name) for name in names}))
    missing = theirs.load_state_dict(ours.state_dict(), strict=False).missing_keys
    assert missing in ([], ["lm_head.weight"]), missing  # the tied output layer
    return theirs


class Program:
    """A program, in its own process. `step()` makes an optimizer step and returns the loss."""

    def __init__(self, name: str, m: MPTConfig, cfg: TrainConfig):
        self.device = processes.pick_device(cfg.device, 0, 1, 1)
        self.precision, _ = devices.choose_precision(cfg, self.device)
        torch.manual_seed(cfg.seed)
        if name.startswith("ours"):
            m.alibi = name == FIRST
            ours = train.Step(m, cfg)
            self.step = lambda: ours.step(*next(ours.batches))
        elif name == "transformers":
            model = transformers_mpt(m, cfg.seed)
            self.step = self.script_step(model, lambda ids: model(input_ids=ids).logits, m, cfg)
        else:
            model = PlainGPT2(m)
            self.step = self.script_step(model, model, m, cfg)

    def script_step(self, model: nn.Module, logits_of, m: MPTConfig, cfg: TrainConfig):
        """The step of a short script: PyTorch's AdamW, the whole batch at once, all its logits."""
        model.to(self.device)
        betas = cfg.beta1, cfg.beta2
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=cfg.lr, betas=betas, eps=cfg.adam_eps, weight_decay=0.0
        )
        batches = train.random_batches(m, cfg.global_batch_size, self.device)

        def step():
            _, rows = next(batches)
            with parallel.autocast(self.device, self.precision):
                logits = logits_of(rows[:, :-1])  # (B, T, V)
                loss = F.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step

    def loss(self) -> float:
        """The loss of one step."""
        return self.step().item()

    def turn(self, steps: int) -> float:
        """Seconds of so many steps."""
        begin = time.perf_counter()
        for _ in range(steps):
            self.step()
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter() - begin

    def describe(self) -> tuple[str, str, float]:
        """The device, the precision, and the most memory so far in GB."""
        return self.device.type, self.precision, runlog.memory_gb(self.device)


PROGRAMS = (FIRST, "ours, learned positions", SAME_WORK, "plain GPT-2")


def ask(pools: dict[str, Pool], method, *args) -> dict[str, object]:
    """{program: its answer}. One that fails is dropped, from `pools`, too, and a line says why.

    UserError if all of them fail.
    """
    answers = {}
    for name, pool in list(pools.items()):
        try:
            (answers[name],) = pool(method, *args)
        except PoolError as error:
            fix = ": pip install -r requirements-dev.txt" if "No module" in str(error) else ""
            print(f"{name}: n/a, {error}{fix}", file=sys.stderr, flush=True)
            del pools[name]
    require(pools, "none of the programs could be measured")
    return answers


def measure(pools: dict[str, Pool], args: BesideArgs) -> list[dict[str, float]]:
    """The rounds, {program: seconds of its turn} each. UserError if our loss is not theirs."""
    losses = ask(pools, Program.loss)  # warms up, too
    places = ask(pools, Program.describe)
    if FIRST in pools and SAME_WORK in pools and places[FIRST][:2] == ("cpu", "fp32"):
        close = abs(losses[FIRST] - losses[SAME_WORK]) <= TOLERANCE
        require(close, f"the first losses differ, so this is not the same work: {losses}")
    return [ask(pools, Program.turn, args.steps) for _ in range(args.rounds)]


def table(rounds: list[dict[str, float]], places: dict) -> str:
    """A line for each program that took all its turns. places: see `Program.describe`."""
    first = next(iter(places))
    lines = []
    for name, (_, precision, memory_gb) in places.items():
        seconds = statistics.median(turn[name] for turn in rounds)
        ratio = statistics.median(turn[name] / turn[first] for turn in rounds)
        lines.append((name, precision, f"{seconds:.3f}", f"{ratio:.2f}", f"{memory_gb:.2f}"))
    return program.table(("program", "precision", "s a turn", "time / first", "peak GB"), lines)


def main(argv: list[str]) -> None:
    """Let the programs take turns, and print their times and ratios."""
    words = [*train.SHAPE, "--compile=False", "--peak_tflops=1", *argv]
    m, cfg, args = config.load(words, MPTConfig, TrainConfig, BesideArgs)
    cfg.microbatch_size = cfg.global_batch_size  # the whole batch at once, as the others do
    threads = args.threads or torch.get_num_threads()
    pools = {name: Pool(1, Program, name, m, cfg, threads=threads) for name in PROGRAMS}
    started = list(pools.values())
    try:
        rounds = measure(pools, args)
        places = ask(pools, Program.describe)
    finally:
        for pool in started:
            pool.stop()
    print(f"{args.rounds} turns of {args.steps}\n\n{table(rounds, places)}")


if __name__ == "__main__":
    program.run(main)
