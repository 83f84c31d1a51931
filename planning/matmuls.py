"""The FLOPs of training on one token, matmul by matmul: which part of the model, in which pass.

    y = x W            forward, 2 FLOPs per weight and token    a weight of d x 4d: 8 d^2
    dx = dy W^T        gradient of the input, as many           unless nothing below it trains
    dW = x^T dy        gradient of the weight, as many          unless the weight is frozen

Attention has two matmuls without a weight, q k^T and p v, of 2 d FLOPs for each query and key. The
backward has two for each of them. So training costs as much as three forwards; if the weights are
frozen, the linear layers cost two forwards, attention still three. Low-rank adapters (lora.py),
A (r x in) and B (out x r) beside a frozen weight, cost three forwards of their own; a block below
the first adapter costs its forward alone.

The matmuls are all that is counted: exactly what torch's FlopCounterMode counts
(tests/planning/test_matmuls.py), with the whole square of scores.

Run `python -m planning.matmuls configs/mpt7b.py --lora_rank=16`.
"""

from dataclasses import replace

import config
import flops
import program
from config import MPTConfig, TrainConfig

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


def block_forward(cfg: MPTConfig) -> dict[str, int]:
    """{part: FLOPs per token} of one block's forward, in its order."""
    d = cfg.d_model
    attention = 2 * d * cfg.max_seq_len  # grouped heads save nothing: all queries count
    return {
        "QKV": 2 * d * (d + 2 * cfg.n_kv_heads * cfg.head_dim),
        "scores": attention,
        "attention x V": attention,
        "projection": 2 * d * d,
        "MLP up": 2 * d * cfg.hidden_dim,
        "MLP down": 2 * cfg.hidden_dim * d,
    }


def block_by_pass(cfg: MPTConfig, train: TrainConfig, i: int) -> dict[str, dict[str, int]]:
    """{part: {pass: FLOPs per token}} of block i. Booleans below count as 0 or 1.

    Nothing before the first adapter needs a backward. The linear layer beside the first adapter,
    and that adapter's A, need no gradient of their input. Full activation checkpointing does not
    repeat a block's last matmul, that of down_proj's own weight: the backward does not need its
    output. The selective kind repeats only products with an adapter's B.
    """
    adapted = train.adapted_layers if i in flops.adapted_blocks(cfg, train) else []
    adapted = {LINEARS[name]: cfg.linear_layers()[name] for name in adapted}
    first = flops.first_backward(cfg, train)
    # Does this part's input need a gradient? If norms or biases train, that of every part does.
    needs_grad = not train.lora_rank or flops.trains_vectors(cfg, train) or i > first
    recomputes = flops.checkpointing_of(train, i) if i >= first else "none"
    parts = {}
    of_adapters = dict.fromkeys(PASSES, 0)

    for part, forward in block_forward(cfg).items():
        is_attention = part in ATTENTION
        factors = 2 if is_attention else 1  # attention's two factors are both inputs
        parts[part] = {
            "forward": forward,
            "input gradient": factors * forward * needs_grad,
            "weight gradient": 0 if is_attention else forward * (not train.lora_rank),
            "recomputed": forward * (recomputes == "full" and part != "MLP down"),
        }
        if part in adapted:
            a, b = (2 * train.lora_rank * n for n in reversed(adapted[part]))  # of a forward
            # Else the product with down_proj's A is the last that the backward needs.
            repeats_b = recomputes != "none" and (part != "MLP down" or needs_grad)
            of_adapters["forward"] += a + b
            of_adapters["input gradient"] += a * needs_grad + b
            of_adapters["weight gradient"] += a + b
            of_adapters["recomputed"] += a * (recomputes == "full") + b * repeats_b
            needs_grad = True
    return {**parts, "adapters": of_adapters}


def flops_by_pass(cfg: MPTConfig, train: TrainConfig) -> dict[str, dict[str, int]]:
    """{part: {pass: FLOPs per token}} of training, for the parts that have any.

    UserError if more blocks are to be adapted than there are.
    """
    sums = {}
    for i in range(cfg.n_layers):
        for part, passes in block_by_pass(cfg, train, i).items():
            so_far = sums.setdefault(part, dict.fromkeys(PASSES, 0))
            for name, n in passes.items():
                so_far[name] += n

    logits = 2 * cfg.d_model * cfg.vocab_size
    sums["logits"] = {
        "forward": logits,
        "input gradient": logits,
        "weight gradient": logits * (not train.lora_rank),
        "recomputed": 0,
    }
    return {part: passes for part, passes in sums.items() if any(passes.values())}


def total(by_pass: dict[str, dict[str, int]]) -> int:
    """The sum over all parts and passes of `flops_by_pass`."""
    return sum(sum(passes.values()) for passes in by_pass.values())


def flops_of_run(cfg: MPTConfig, train: TrainConfig, recomputed: bool = False) -> float:
    """FLOPs per token of a training run, by which its MFU counts.

    LLM Foundry's convention if all weights train (flops.py). A run with adapters: every matmul that
    its step needs. recomputed: count what is computed again, too.
    """
    if train.lora_rank:
        once = replace(train, activation_checkpointing="none")
        return total(flops_by_pass(cfg, train if recomputed else once))
    return flops.flops_of(cfg, train=train)[recomputed]


def convention_of(train: TrainConfig) -> str:
    """What `flops_of_run` counts, as text."""
    return LORA_CONVENTION if train.lora_rank else flops.CONVENTION


def table(by_pass: dict[str, dict[str, int]]) -> str:
    """MFLOP per token by part and pass, as text."""
    sums = {name: sum(passes[name] for passes in by_pass.values()) for name in PASSES}
    rows = []
    for part, passes in [*by_pass.items(), ("all", sums)]:
        n = sum(passes.values())
        cells = [f"{passes[name] / 1e6:,.1f}" for name in PASSES]
        rows.append([part, *cells, f"{n / 1e6:,.1f}", f"{n / total(by_pass):.2%}"])
    return program.table(["MFLOP a token", *PASSES, "all", "share"], rows)


def main(argv: list[str]) -> None:
    """Print the table for the config files and flags in argv."""
    print(table(flops_by_pass(*config.load(flops.with_base(argv), MPTConfig, TrainConfig))))


if __name__ == "__main__":
    program.run(main)
