"""The FLOPs of training on one token, matmul by matmul: which part of the model, in which pass.

    y = x W            forward, 2 FLOPs a weight and token         a weight of d x 4d: 8 d^2
    dx = dy W^T        gradient of the input, as many              not where nothing below it trains
    dW = x^T dy        gradient of the weight, as many             not for a frozen weight

Attention has two matmuls without a weight, q k^T and p v, of 2 d FLOPs a query and key each; the backward has two for
each of them. So training costs three forwards; with frozen weights linears cost two, and attention still three.
Low-rank adapters, A (r x in) and B (out x r) beside a frozen weight (LoRA, arXiv 2106.09685), cost three of their own.

    keys of a query      full   S               the whole square, as most conventions count it
                         causal (S + 1) / 2     what the mask leaves
                         flash  (S + 1) / 2     and the scores once more in the backward: 2.5 forwards instead of 2

These are all matmuls and nothing else: what torch's FlopCounterMode counts, exactly (bench/flops.py).

Run `python -m planning.matmuls configs/mpt7b.py --lora_rank=16 --attention=flash`.
Read next: planning/conventions.py.
"""

import difflib
from dataclasses import dataclass
from typing import Literal

import config
from config import Checkpointing, MPTConfig, require

LINEARS = {
    "Wqkv": "QKV",
    "out_proj": "projection",
    "up_proj": "MLP up",
    "down_proj": "MLP down",
}  # module: part
ATTENTION = ("scores", "attention x V")
PASSES = ("forward", "input gradient", "weight gradient", "recomputed")


@dataclass
class Work:
    """What is trained and how: all that decides the FLOPs beside the model."""

    attention: Literal["full", "causal", "flash"] = (
        "full"  # keys of a query: all, the visible, as a flash kernel does
    )
    window: int = (
        0  # sliding window: a query sees so many keys, its own included (0 = all before it)
    )
    document: int = 0  # tokens of each document in a packed sequence (0 = one document fills it)
    frozen: bool = (
        False  # no weight has a gradient, but something before the first block has: a prompt
    )
    lora_rank: int = 0  # of low-rank adapters on frozen weights (0 = none)
    lora_targets: str = "Wqkv,out_proj,up_proj,down_proj"  # linears of a block that have an adapter
    lora_first_block: int = 0  # blocks before this one have no adapters, so they need no backward
    activation_checkpointing: Checkpointing = "none"  # full: a block's forward is done again
    recompute_every: int = 1  # of every k-th block

    def check(self) -> None:
        for name in ("window", "document", "lora_rank", "lora_first_block"):
            require(
                getattr(self, name) >= 0, f"{name} must be 0 or more, not {getattr(self, name)}"
            )
        require(
            self.recompute_every > 0,
            f"recompute_every must be at least 1, not {self.recompute_every}",
        )
        for target in self.targets:
            require_known("LoRA target", target, LINEARS)

    @property
    def targets(self) -> list[str]:
        return [name.strip() for name in self.lora_targets.split(",")]

    @property
    def trains_all(self) -> bool:
        return not (self.frozen or self.lora_rank)

    def recomputes(self, i: int) -> bool:
        """Whether block i's forward is done again. "selective" does no matmul again."""
        starts = i >= self.lora_first_block or not self.lora_rank  # below that there is no backward
        return self.activation_checkpointing == "full" and i % self.recompute_every == 0 and starts


def require_known(what: str, name: str, names) -> None:
    """UserError with the nearest of `names` unless `name` is one."""
    near = difflib.get_close_matches(name, names, n=1) or list(names)
    require(name in names, f"no {what} {name!r}, did you mean {' or '.join(near)}?")


def adapters(cfg: MPTConfig, work: Work) -> dict[str, tuple[int, int]]:
    """Number of parameters of A and of B for each adapted part of a block."""
    d, r, hidden = cfg.d_model, work.lora_rank, cfg.hidden_dim
    qkv = d + 2 * cfg.n_kv_heads * cfg.head_dim
    shapes = {
        "Wqkv": (d, qkv),
        "out_proj": (d, d),
        "up_proj": (d, hidden),
        "down_proj": (hidden, d),
    }
    return {
        LINEARS[name]: (r * i, o * r)
        for name, (i, o) in shapes.items()
        if r and name in work.targets
    }


def n_lora(cfg: MPTConfig, work: Work) -> int:
    """Number of parameters of all adapters. Raises UserError if a setting of `work` cannot be."""
    work.check()
    require(
        work.lora_first_block < cfg.n_layers,
        f"lora_first_block must be below n_layers {cfg.n_layers}",
    )
    return (cfg.n_layers - work.lora_first_block) * sum(
        a + b for a, b in adapters(cfg, work).values()
    )


def keys_per_query(cfg: MPTConfig, work: Work) -> float:
    """Keys that count for a query, on average. The documents of a sequence are equally long but for a shorter last one;
    where they are not, take the sum of their squares over their sum as the length."""

    def pairs(n: int) -> int:
        """Queries with their keys within n tokens."""
        seen = min(work.window or n, n)
        return n * seen - (
            0 if work.attention == "full" else seen * (seen - 1) // 2
        )  # the first ones see fewer

    S = cfg.max_seq_len
    length = min(work.document or S, S)
    return (S // length * pairs(length) + pairs(S % length)) / S


def block_forward(cfg: MPTConfig, work: Work) -> dict[str, float]:
    """FLOPs per token of one block's forward by part, in its order."""
    d, keys = cfg.d_model, keys_per_query(cfg, work)
    return {
        "QKV": 2 * d * (d + 2 * cfg.n_kv_heads * cfg.head_dim),
        "scores": 2
        * d
        * keys,  # grouped heads save nothing here: every query head meets its group's keys
        "attention x V": 2 * d * keys,
        "projection": 2 * d * d,
        "MLP up": 2 * d * cfg.hidden_dim,
        "MLP down": 2 * cfg.hidden_dim * d,
    }


def block_by_pass(cfg: MPTConfig, work: Work, i: int) -> dict[str, list[float]]:
    """FLOPs per token of block i, {part: one number for each of PASSES}.

    What stands before the first adapter needs no backward; that adapter's linear and its A no gradient of their input.
    Full checkpointing leaves out the last matmul of a block, whose output the backward does not need.
    """
    adapted = adapters(cfg, work) if i >= work.lora_first_block else {}
    reached = not work.lora_rank or i > work.lora_first_block  # the input needs a gradient
    again = work.recomputes(i)
    parts, extra = {}, [0, 0, 0, 0]
    for part, f in block_forward(cfg, work).items():
        if part in ATTENTION:
            parts[part] = [f, 2 * f * reached, 0, f * again]
        else:
            parts[part] = [f, f * reached, f * work.trains_all, f * again]
        if part == "scores" and work.attention == "flash":
            parts[part][3] += f * reached
        if part in adapted:
            a, b = (2 * n for n in adapted[part])
            extra = added(extra, [a + b, a * reached + b, a + b, (a + b) * again])
            reached = True
    if again and "MLP down" in adapted:
        extra[3] -= 2 * adapted["MLP down"][1]
    elif again:
        parts["MLP down"][3] = 0
    return {**parts, "adapters": extra}


def added(these, those) -> list[float]:
    return [x + y for x, y in zip(these, those, strict=True)]


def flops_by_pass(cfg: MPTConfig, work: Work | None = None) -> dict[str, dict[str, float]]:
    """FLOPs of training per token, {part: {pass: FLOPs}}; parts without any are left out. Default: `Work()`."""
    work, logits = work or Work(), 2 * cfg.d_model * cfg.vocab_size
    n_lora(cfg, work)  # raises for what cannot be
    sums = {}
    for i in range(cfg.n_layers):
        for part, numbers in block_by_pass(cfg, work, i).items():
            sums[part] = added(sums.get(part, [0] * len(PASSES)), numbers)
    sums["logits"] = [logits, logits, logits * work.trains_all, 0]
    return {
        part: dict(zip(PASSES, numbers, strict=True))
        for part, numbers in sums.items()
        if any(numbers)
    }


def total(by_pass: dict[str, dict[str, float]]) -> float:
    return sum(sum(numbers.values()) for numbers in by_pass.values())


def table(by_pass: dict[str, dict[str, float]], work: Work) -> str:
    """MFLOP per token as a person reads them."""
    shown = [p for p in PASSES if any(numbers[p] for numbers in by_pass.values())]
    scores = {
        "full": "the whole square",
        "causal": "what is visible",
        "flash": "as a flash kernel does them",
    }
    lines = [
        "MFLOP a token".ljust(24)
        + "".join(f"{name:>17}" for name in shown)
        + f"{'all':>14}{'share':>9}"
    ]
    sums = {p: sum(numbers[p] for numbers in by_pass.values()) for p in shown}
    for part, numbers in [*by_pass.items(), ("all", sums)]:
        whole = sum(numbers.values())
        cells = "".join(f"{numbers[p] / 1e6:>17,.1f}" for p in shown)
        lines.append(f"  {part:<22}{cells}{whole / 1e6:>14,.1f}{whole / total(by_pass):>9.2%}")
    return "\n".join(
        [*lines, f"  (all matmuls; scores: {scores[work.attention]}, --attention={work.attention})"]
    )


def main(argv: list[str]) -> None:
    cfg, work = config.load(argv, MPTConfig, Work)
    print(table(flops_by_pass(cfg, work), work))


if __name__ == "__main__":
    config.run(main)
