"""The FLOPs of training on one token, matmul by matmul: which part of the model, in which pass.

    y = x W            forward, 2 FLOPs per weight and token    a weight of d x 4d: 8 d^2
    dx = dy W^T        gradient of the input, as many           unless nothing below it trains
    dW = x^T dy        gradient of the weight, as many          unless the weight is frozen

Attention has two matmuls without a weight, q k^T and p v, of 2 d FLOPs for each query and key. The
backward has two for each of them. So training costs as much as three forwards; if the weights are
frozen, the linear layers cost two forwards, attention still three. Low-rank adapters (lora.py),
A (r x in) and B (out x r) beside a frozen weight, cost three forwards of their own; a block below
the first adapter costs its forward alone.

    keys of a query   full    S               the whole square, as most conventions count it
                      causal  (S + 1) / 2     what the mask allows
                      flash   (S + 1) / 2     and the scores are computed again in the backward,
                                              which then costs 2.5 forwards instead of 2

The matmuls are all that is counted: exactly what torch's FlopCounterMode counts, says a test.

Run `python -m planning.matmuls configs/mpt7b.py --lora_rank=16 --attention=flash`.
"""

import difflib
from dataclasses import dataclass, replace
from typing import Literal

import config
import flops
from config import (
    EXTRA_PARTS,
    LINEAR_LAYERS,
    Checkpointing,
    MPTConfig,
    TrainConfig,
    listed,
    require,
)

# The linear layers of a block: {module: part}.
LINEARS = {
    "Wqkv": "QKV",
    "out_proj": "projection",
    "up_proj": "MLP up",
    "down_proj": "MLP down",
}
ATTENTION = ("scores", "attention x V")
PASSES = ("forward", "input gradient", "weight gradient", "recomputed")
LORA_CONVENTION = "LoRA: every matmul of its step, at most 4 N + 6 N_lora + 12 L d S"
Attention = Literal["full", "causal", "flash"]


@dataclass
class TrainingSetup:
    """What is trained and how: everything beside the model that decides the FLOPs."""

    attention: Attention = "full"  # keys counted: all, the visible ones, or as flash does
    window: int = 0  # sliding window: keys that a query sees, its own included (0 = no window)
    document: int = 0  # tokens of each document in a packed sequence (0 = one document fills it)
    frozen: bool = False  # all weights; a learned prompt before block 0 trains
    lora_rank: int = 0  # of low-rank adapters on frozen weights (0 = none)
    lora_targets: str = "all"  # layers that have one: Wqkv,out_proj,up_proj,down_proj
    lora_last_blocks: int = 0  # only the last n blocks have adapters (0 = all blocks)
    lora_train: str = ""  # train these, too: norms, biases, or norms,biases
    activation_checkpointing: Checkpointing = "none"  # full: forwards are computed again
    recompute_every: int = 1  # activation checkpointing of every k-th block

    def check(self) -> None:
        """UserError if a setting names no linear layer."""
        listed("lora_targets", self.lora_targets, ["all", *LINEAR_LAYERS])
        listed("lora_train", self.lora_train, EXTRA_PARTS)

    @property
    def targets(self) -> list[str]:
        """The modules that have an adapter."""
        chosen = listed("lora_targets", self.lora_targets, ["all", *LINEAR_LAYERS])
        return LINEAR_LAYERS if "all" in chosen else chosen

    @property
    def trains_all(self) -> bool:
        """Do all weights of the model train?"""
        return not (self.frozen or self.lora_rank)

    def checkpointing_of(self, i: int) -> Checkpointing:
        """The activation checkpointing of block i."""
        return self.activation_checkpointing if i % self.recompute_every == 0 else "none"

    def recomputes(self, i: int) -> bool:
        """Is the whole forward of block i done again, if it has a backward?"""
        return self.checkpointing_of(i) == "full"


def setup_of(cfg: TrainConfig) -> TrainingSetup:
    """The setup of a run: what it trains, and what it computes again."""
    names = "lora_rank lora_targets lora_last_blocks lora_train"
    names += " activation_checkpointing recompute_every"
    return TrainingSetup(**{name: getattr(cfg, name) for name in names.split()})


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
    r = setup.lora_rank
    return {
        LINEARS[name]: (r * n_in, n_out * r)
        for name, (n_out, n_in) in cfg.linear_layers().items()
        if name in setup.targets
    }


def n_lora(cfg: MPTConfig, setup: TrainingSetup) -> int:
    """Number of parameters of all adapters. Raises UserError as `check_setup` does."""
    check_setup(cfg, setup)
    per_block = sum(a + b for a, b in adapters(cfg, setup).values())
    return len(adapted_blocks(cfg, setup)) * per_block


def check_setup(cfg: MPTConfig, setup: TrainingSetup) -> None:
    """UserError if a setting is out of range, for this model or for any."""
    setup.check()
    few = f"lora_last_blocks {setup.lora_last_blocks} is more than n_layers {cfg.n_layers}"
    require(setup.lora_last_blocks <= cfg.n_layers, f"{few}: lower it")


def adapted_blocks(cfg: MPTConfig, setup: TrainingSetup) -> range:
    """The blocks that have adapters."""
    return cfg.adapted_blocks(setup.lora_last_blocks) if setup.lora_rank else range(0)


def trains_vectors(cfg: MPTConfig, setup: TrainingSetup) -> bool:
    """Do norms or biases train beside the adapters? If so, they do in every block."""
    extra = listed("lora_train", setup.lora_train, EXTRA_PARTS)
    return "norms" in extra or ("biases" in extra and not cfg.no_bias)


def first_backward(cfg: MPTConfig, setup: TrainingSetup) -> int:
    """The first block that has a backward: the first one with anything to train."""
    adapters_alone = setup.lora_rank and not trains_vectors(cfg, setup)
    return adapted_blocks(cfg, setup).start if adapters_alone else 0


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
    repeat a block's last matmul, that of down_proj's own weight: the backward does not need its
    output. The selective kind repeats only products with an adapter's B.
    """
    adapted = adapters(cfg, setup) if i in adapted_blocks(cfg, setup) else {}
    first = first_backward(cfg, setup)
    # Does this part's input need a gradient? If norms or biases train, that of every part does.
    needs_grad = not setup.lora_rank or trains_vectors(cfg, setup) or i > first
    recomputes = setup.checkpointing_of(i) if i >= first else "none"
    parts = {}
    of_adapters = dict.fromkeys(PASSES, 0)

    for part, forward in block_forward(cfg, setup).items():
        is_attention = part in ATTENTION
        factors = 2 if is_attention else 1  # attention's two factors are both inputs
        passes = {
            "forward": forward,
            "input gradient": factors * forward * needs_grad,
            "weight gradient": 0 if is_attention else forward * setup.trains_all,
            "recomputed": forward * (recomputes == "full" and part != "MLP down"),
        }
        if part == "scores" and setup.attention == "flash":
            passes["recomputed"] += forward * needs_grad
        parts[part] = passes

        if part in adapted:
            # Else the product with down_proj's A is the last that the backward needs.
            repeats_b = part != "MLP down" or needs_grad
            of_part = adapter_passes(*adapted[part], needs_grad, recomputes, repeats_b)
            of_adapters = {name: of_adapters[name] + of_part[name] for name in PASSES}
            needs_grad = True
    return {**parts, "adapters": of_adapters}


def adapter_passes(
    n_a: int, n_b: int, needs_grad: bool, recomputes: Checkpointing, repeats_b: bool
) -> dict[str, float]:
    """{pass: FLOPs per token} of an adapter with A and B of so many parameters.

    needs_grad: of its input. recomputes: the activation checkpointing of its block. repeats_b: does
    that compute the product with B again, too?
    """
    a, b = 2 * n_a, 2 * n_b  # FLOPs of a forward
    return {
        "forward": a + b,
        "input gradient": a * needs_grad + b,
        "weight gradient": a + b,
        "recomputed": a * (recomputes == "full") + b * (recomputes != "none" and repeats_b),
    }


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


def flops_of_run(cfg: MPTConfig, train: TrainConfig, recomputed: bool = False) -> float:
    """FLOPs per token of a training run, by which its MFU counts.

    LLM Foundry's convention if all weights train (flops.py). A run with adapters: every matmul that
    its step needs, with the whole square of scores. recomputed: count what is computed again, too.
    """
    setup = setup_of(train)
    if not recomputed:
        setup = replace(setup, activation_checkpointing="none")
    if train.lora_rank:
        return total(flops_by_pass(cfg, setup))
    again = setup.activation_checkpointing, setup.recompute_every
    return flops.hardware_flops_per_token(cfg, *again)


def convention_of(train: TrainConfig) -> str:
    """What `flops_of_run` counts, as text."""
    return LORA_CONVENTION if train.lora_rank else flops.CONVENTION


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
