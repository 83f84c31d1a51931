"""The training step beside other people's: transformers' MPT, and a plain GPT-2 script.

    python -m bench beside --precision=fp32                     width 384, vocabulary 256
    python -m bench beside --d_model=768 --n_heads=12 --vocab_size=50368 --global_batch_size=4
    python -m bench beside --same_malloc                        the others with our malloc settings

Four programs take turns, each in a process of its own: ours with ALiBi, ours with learned
positions, transformers' MptForCausalLM (which has ALiBi), and `PlainGPT2` below, which is what a
script of one page does: learned positions, PyTorch's attention, all logits at once, AdamW as it is.
A ratio is the speed of ours over that of the other. The others run as their users run them, with
glibc's default malloc settings.
"""

import statistics
import sys
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

import config
import processes
from bench import train as bench_train
from bench.team import Team, TeamError
from config import MPTConfig, TrainConfig, require


@dataclass
class BesideArgs:
    """How long to measure."""

    rounds: int = 5  # turns of each program; the median counts
    steps: int = 2  # optimizer steps of a turn
    threads: int = 0  # of each program (0: as many as there are cores)
    same_malloc: bool = False  # the other programs have our malloc settings, too

    def check(self) -> None:
        """UserError if a setting is out of range."""
        require(self.rounds > 0 and self.steps > 0, "rounds and steps must be at least 1")
        require(self.threads >= 0, "threads: 0 or more")


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

    def __init__(self, cfg: MPTConfig):
        super().__init__()
        bias = not cfg.no_bias
        self.wte = nn.Embedding(cfg.vocab_size, cfg.d_model)
        self.wpe = nn.Embedding(cfg.max_seq_len, cfg.d_model)
        layers = (PlainBlock(cfg.d_model, cfg.n_heads, bias) for _ in range(cfg.n_layers))
        self.blocks = nn.Sequential(*layers)
        self.norm = nn.LayerNorm(cfg.d_model, bias=bias)
        nn.init.normal_(self.wte.weight, std=0.02)

    def forward(self, ids, labels):
        """ids and labels (B, T) -> the mean cross-entropy, a scalar."""
        positions = torch.arange(ids.shape[1], device=ids.device)
        x = self.blocks(self.wte(ids) + self.wpe(positions))
        logits = F.linear(self.norm(x), self.wte.weight)  # (B, T, V)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Plain(bench_train.ScriptProgram):
    """The training step of a script around `PlainGPT2`."""

    def build(self) -> None:
        """Make the model and the optimizer."""
        self.model = PlainGPT2(self.model_cfg).to(self.world.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.cfg.lr)

    def loss(self, rows):
        """The mean cross-entropy of rows (B, T + 1)."""
        return self.model(rows[:, :-1], rows[:, 1:])


# Name -> program, and its settings beside those of the command line.
PROGRAMS = {
    "ours, ALiBi": (bench_train.OurProgram, ["--alibi"]),
    "ours, learned positions": (bench_train.OurProgram, ["--alibi=False"]),
    "transformers": (bench_train.TransformersProgram, ["--alibi"]),
    "plain GPT-2": (Plain, ["--alibi=False"]),
}
OURS = tuple(PROGRAMS)[:2]


def start(name: str, same_malloc: bool, model_cfg: MPTConfig, cfg: TrainConfig):
    """The program of this name. Only ours gets our malloc settings, unless all do."""
    if name not in OURS and not same_malloc:
        processes.keep_freed_memory = lambda: None
    program, _ = PROGRAMS[name]
    return program(model_cfg, cfg)


def table(rates: dict[str, list[float]], peaks: dict[str, float]) -> str:
    """The speed of each program, its peak memory, and the ratios of ours to it, in Markdown."""
    lines = [
        "| program | tokens/s | peak GB | " + " | ".join(f"{name} / it" for name in OURS) + " |"
    ]
    lines.append("|---|---|---|---|---|")
    medians = {name: statistics.median(turns) for name, turns in rates.items()}
    for name, rate in medians.items():
        ratios = [f"{medians[ours] / rate:.2f}" if ours in medians else "n/a" for ours in OURS]
        lines.append(f"| {name} | {rate:,.0f} | {peaks[name]:.2f} | {' | '.join(ratios)} |")
    return "\n".join(lines)


def start_all(argv, args: BesideArgs) -> tuple[dict[str, Team], int]:
    """({program: its process}, tokens of a turn). UserError if no program could be started."""
    teams = {}
    for name, (_, flags) in PROGRAMS.items():
        settings = [*bench_train.SHAPE, "--compile=False", "--peak_tflops=1", *argv, *flags]
        model_cfg, cfg, _ = config.load(settings, MPTConfig, TrainConfig, BesideArgs)
        cfg.microbatch_size = cfg.global_batch_size
        tokens = args.steps * cfg.global_batch_size * model_cfg.max_seq_len
        threads = args.threads or torch.get_num_threads()
        try:
            teams[name] = Team(start, (name, args.same_malloc, model_cfg, cfg), 1, threads)
        except TeamError as error:
            print(f"{name}: n/a, {error}", file=sys.stderr)
    require(teams, "none of the programs could be started")
    return teams, tokens


def take_turns(teams: dict[str, Team], args: BesideArgs, tokens: int) -> dict[str, list[float]]:
    """{program: tokens/s of its turns}. A program that fails is dropped, from `teams`, too.

    UserError if all of them failed.
    """
    rates = {name: [] for name in teams}
    for turn in range(args.rounds + 1):
        for name, team in list(teams.items()):
            try:
                (seconds,) = team.call("turn", args.steps)
            except TeamError as error:  # most need their peak memory in the first turn
                print(f"{name}: n/a, {error}", file=sys.stderr)
                del teams[name], rates[name]
                continue
            if turn > 0:  # the first turn warms up
                rates[name].append(tokens / seconds)
    require(teams, "none of the programs could do a step")
    return rates


def main(argv) -> None:
    """Let the programs take turns, and print their speeds and ratios."""
    *_, args = config.load([*bench_train.SHAPE, *argv], MPTConfig, TrainConfig, BesideArgs)
    teams, tokens = start_all(argv, args)
    rates = take_turns(teams, args, tokens)
    answers = {name: team.call("describe")[0] for name, team in teams.items()}
    for team in teams.values():
        team.stop()

    peaks = {name: answer["memory_gb"] for name, answer in answers.items()}
    (precision,) = {answer["precision"] for answer in answers.values()}
    malloc = "the same malloc settings" if args.same_malloc else "malloc settings of their users"
    print(f"{precision}, {args.rounds} turns of {args.steps} steps, {malloc}\n")
    print(table(rates, peaks))


if __name__ == "__main__":
    config.run(main)
