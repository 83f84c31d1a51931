"""The FLOPs of training on one token, matmul by matmul: which part of the model, in which pass.

    y = x W            forward, 2 FLOPs per weight and token    a weight of d x 4d: 8 d^2
    dx = dy W^T        gradient of the input, as many           unless nothing below it trains
    dW = x^T dy        gradient of the weight, as many          unless the weight is frozen

Attention has two matmuls without a weight, q k^T and p v, of 2 d FLOPs for each query and key. The
backward has two for each of them. So training costs as much as three forwards; if the weights are
frozen, the linear layers cost two forwards, attention still three. Low-rank adapters (LoRA, arXiv
2106.09685), A (r x in) and B (out x r) beside a frozen weight, cost three forwards of their own.

    keys of a query   full    S               the whole square, as most conventions count it
                      causal  (S + 1) / 2     what the mask allows
                      flash   (S + 1) / 2     and the scores are computed again in the backward,
                                              which then costs 2.5 forwards instead of 2

The matmuls are all that is counted: exactly what torch's FlopCounterMode counts (bench/flops.py).

Run `python -m planning.matmuls configs/mpt7b.py --lora_rank=16 --attention=flash`.
"""

import difflib
from dataclasses import dataclass
from typing import Literal

import config
from config import Checkpointing, MPTConfig, require

# The linear layers of a block: {module: part}.
LINEARS = {
    "Wqkv": "QKV",
    "out_proj": "projection",
    "up_proj": "MLP up",
    "down_proj": "MLP down",
}
ATTENTION = ("scores", "attention x V")
PASSES = ("forward", "input gradient", "weight gradient", "recomputed")
Attention = Literal["full", "causal", "flash"]


@dataclass
class TrainingSetup:
    """What is trained and how: everything beside the model that decides the FLOPs."""

    attention: Attention = "full"  # keys counted: all, the visible ones, or as flash does
    window: int = 0  # sliding window: keys that a query sees, its own included (0 = no window)
    document: int = 0  # tokens of each document in a packed sequence (0 = one document fills it)
    frozen: bool = False  # all weights; a learned prompt before block 0 trains
    lora_rank: int = 0  # of low-rank adapters on frozen weights (0 = none)
    lora_targets: str = "Wqkv,out_proj,up_proj,down_proj"  # linear layers that have an adapter
    lora_first_block: int = 0  # blocks before this one have no adapters, so need no backward
    activation_checkpointing: Checkpointing = "none"  # full: forwards are computed again
    recompute_every: int = 1  # activation checkpointing of every k-th block

    def check(self) -> None:
        """UserError if a setting is out of range or names no linear layer."""
        for name in ("window", "document", "lora_rank", "lora_first_block"):
            value = getattr(self, name)
            require(value >= 0, f"{name} must be 0 or more, not {value}")
        every = self.recompute_every
        require(every > 0, f"recompute_every must be at least 1, not {every}")
        for target in self.targets:
            require_known("LoRA target", target, LINEARS)

    @property
    def targets(self) -> list[str]:
        """The modules that have an adapter."""
        return [name.strip() for name in self.lora_targets.split(",")]

    @property
    def trains_all(self) -> bool:
        """Do all weights of the model train?"""
        return not (self.frozen or self.lora_rank)

    def recomputes(self, i: int) -> bool:
        """Is the forward of block i done again? With "selective" no matmul is."""
        has_backward = i >= self.lora_first_block or not self.lora_rank
        chosen = self.activation_checkpointing == "full" and i % self.recompute_every == 0
        return chosen and has_backward


def require_known(kind: str, name: str, known) -> None:
    """UserError that suggests the nearest of the `known` names, unless `name` is one of them."""
    near = difflib.get_close_matches(name, known, n=1) or list(known)
    require(name in known, f"no {kind} {name!r}, did you mean {' or '.join(near)}?")


# --------------------------------------------------------------------------------------------------
# Adapters


def adapters(cfg: MPTConfig, setup: TrainingSetup) -> dict[str, tuple[int, int]]:
    """{part: (parameters of A, parameters of B)} for the adapted parts of a block."""
    if not setup.lora_rank:
        return {}
    d = cfg.d_model
    shapes = {  # (in, out)
        "Wqkv": (d, d + 2 * cfg.n_kv_heads * cfg.head_dim),
        "out_proj": (d, d),
        "up_proj": (d, cfg.hidden_dim),
        "down_proj": (cfg.hidden_dim, d),
    }
    r = setup.lora_rank
    return {
        LINEARS[name]: (r * n_in, n_out * r)
        for name, (n_in, n_out) in shapes.items()
        if name in setup.targets
    }


def n_lora(cfg: MPTConfig, setup: TrainingSetup) -> int:
    """Number of parameters of all adapters. Raises UserError as `check_setup` does."""
    check_setup(cfg, setup)
    per_block = sum(a + b for a, b in adapters(cfg, setup).values())
    return (cfg.n_layers - setup.lora_first_block) * per_block


def check_setup(cfg: MPTConfig, setup: TrainingSetup) -> None:
    """UserError if a setting is out of range, for this model or for any."""
    setup.check()
    has_block = setup.lora_first_block < cfg.n_layers
    require(has_block, f"lora_first_block must be below n_layers {cfg.n_layers}")


# --------------------------------------------------------------------------------------------------
# FLOPs


def keys_per_query(cfg: MPTConfig, setup: TrainingSetup) -> float:
    """Keys counted for a query, averaged over a sequence.

    All documents of a sequence are equally long, except for a shorter last one. For documents of
    different lengths n set `document` to sum(n^2) / sum(n).
    """
    S = cfg.max_seq_len
    length = min(setup.document or S, S)
    n_documents, rest = divmod(S, length)
    return (n_documents * query_key_pairs(length, setup) + query_key_pairs(rest, setup)) / S


def query_key_pairs(n: int, setup: TrainingSetup) -> int:
    """Pairs of a query and one of its keys, within a document of n tokens."""
    seen = min(setup.window or n, n)
    if setup.attention == "full":
        return n * seen
    return n * seen - seen * (seen - 1) // 2  # the first queries see fewer keys


def block_forward(cfg: MPTConfig, setup: TrainingSetup) -> dict[str, float]:
    """{part: FLOPs per token} of one block's forward, in its order."""
    d = cfg.d_model
    attention = 2 * d * keys_per_query(cfg, setup)  # grouped heads save nothing: all queries count
    return {
        "QKV": 2 * d * (d + 2 * cfg.n_kv_heads * cfg.head_dim),
        "scores": attention,
        "attention x V": attention,
        "projection": 2 * d * d,
        "MLP up": 2 * d * cfg.hidden_dim,
        "MLP down": 2 * cfg.hidden_dim * d,
    }


def block_by_pass(cfg: MPTConfig, setup: TrainingSetup, i: int) -> dict[str, dict[str, float]]:
    """{part: {pass: FLOPs per token}} of block i. Booleans below count as 0 or 1.

    Nothing before the first adapter needs a backward. The linear layer beside the first adapter,
    and that adapter's A, need no gradient of their input. Full activation checkpointing does not
    repeat a block's last matmul: the backward does not need its output.
    """
    adapted = adapters(cfg, setup) if i >= setup.lora_first_block else {}
    needs_grad = (
        not setup.lora_rank or i > setup.lora_first_block
    )  # does the input of this part need a gradient?
    again = setup.recomputes(i)
    parts = {}
    lora = dict.fromkeys(PASSES, 0)

    for part, forward in block_forward(cfg, setup).items():
        is_attention = part in ATTENTION
        factors = 2 if is_attention else 1  # attention's two factors are both inputs
        passes = {
            "forward": forward,
            "input gradient": factors * forward * needs_grad,
            "weight gradient": 0 if is_attention else forward * setup.trains_all,
            "recomputed": forward * again,
        }
        if part == "scores" and setup.attention == "flash":
            passes["recomputed"] += forward * needs_grad
        parts[part] = passes

        if part in adapted:
            a, b = (2 * n for n in adapted[part])  # FLOPs of a forward
            lora["forward"] += a + b
            lora["input gradient"] += a * needs_grad + b
            lora["weight gradient"] += a + b
            lora["recomputed"] += (a + b) * again
            needs_grad = True

    if again and "MLP down" in adapted:  # the last matmul is that of the adapter's B
        lora["recomputed"] -= 2 * adapted["MLP down"][1]
    elif again:
        parts["MLP down"]["recomputed"] = 0
    return {**parts, "adapters": lora}


def flops_by_pass(
    cfg: MPTConfig, setup: TrainingSetup | None = None
) -> dict[str, dict[str, float]]:
    """{part: {pass: FLOPs per token}} of training, for the parts that have any.

    setup: default `TrainingSetup()`, where all weights train. Raises UserError as `check_setup`.
    """
    setup = setup or TrainingSetup()
    check_setup(cfg, setup)
    sums = {}
    for i in range(cfg.n_layers):
        for part, passes in block_by_pass(cfg, setup, i).items():
            so_far = sums.setdefault(part, dict.fromkeys(PASSES, 0))
            for name, n in passes.items():
                so_far[name] += n

    logits = 2 * cfg.d_model * cfg.vocab_size
    sums["logits"] = {
        "forward": logits,
        "input gradient": logits,
        "weight gradient": logits * setup.trains_all,
        "recomputed": 0,
    }
    return {part: passes for part, passes in sums.items() if any(passes.values())}


def total(by_pass: dict[str, dict[str, float]]) -> float:
    """The sum over all parts and passes of `flops_by_pass`."""
    return sum(sum(passes.values()) for passes in by_pass.values())


# --------------------------------------------------------------------------------------------------
# The program


def table(by_pass: dict[str, dict[str, float]], setup: TrainingSetup) -> str:
    """The table of MFLOP per token, as text."""
    shown = [name for name in PASSES if any(passes[name] for passes in by_pass.values())]
    sums = {name: sum(passes[name] for passes in by_pass.values()) for name in shown}

    heads = "".join(f"{name:>17}" for name in shown)
    lines = [f"{'MFLOP a token':<24}{heads}{'all':>14}{'share':>9}"]
    for part, passes in [*by_pass.items(), ("all", sums)]:
        of_part = sum(passes.values())
        cells = "".join(f"{passes[name] / 1e6:>17,.1f}" for name in shown)
        share = of_part / total(by_pass)
        lines.append(f"  {part:<22}{cells}{of_part / 1e6:>14,.1f}{share:>9.2%}")

    scores = {
        "full": "the whole square",
        "causal": "what is visible",
        "flash": "as a flash kernel computes them",
    }
    counted = f"scores: {scores[setup.attention]}, --attention={setup.attention}"
    return "\n".join([*lines, f"  (all matmuls; {counted})"])


def main(argv: list[str]) -> None:
    """Print the table for the config files and flags in argv."""
    cfg, setup = config.load(argv, MPTConfig, TrainingSetup)
    print(table(flops_by_pass(cfg, setup), setup))


if __name__ == "__main__":
    config.run(main)
