"""The training FLOPs of a token as nine conventions count them. An MFU says little without its own.

    foundry, palm         6 N + 12 L d S       the whole S x S square of scores
    causal                6 N +  6 L d S       the half of it that the mask allows
    lingua                6 N +  7 L d S       as causal, plus the scores that flash repeats
    flopcounter           6 N + 14 L d S       the same over the whole square
    6nd                   6 N                  no attention
    megatron              every matmul, the logits' too and no embedding: see `by_matmuls`
    megatron_recompute    the same with the forward of all blocks twice
    chinchilla            every matmul, the embedding as one, and the softmax

flops.py has the two conventions that everybody needs. This file has all nine, and what they count
for frozen weights (4 N instead of 6 N), LoRA, sliding windows and packed documents
(`matmuls.TrainingSetup`), by matmul and by pass.

Run `python -m planning.conventions configs/mpt7b.py --convention=palm --lora_rank=16`, with a speed
`--device=mi250 --tokens_per_second=1922`, or without a model
`--n_params=405e9 --frozen --device=mi300x --devices=8 --tokens_per_second=34.1`.
Only `--device=auto` imports torch.
"""

import json
from dataclasses import dataclass, fields, replace

import config
import flops
from config import MPTConfig, require
from flops import FlopsArgs, ShapeArgs, n_params, params_by_part
from planning import matmuls
from planning.matmuls import TrainingSetup

FORMULAS = {
    "foundry": flops.FORMULAS["foundry"],
    "palm": "PaLM, nanoGPT, OLMo, torchtitan: 6 N + 12 L d S",
    "causal": flops.FORMULAS["causal"],
    "lingua": "Lingua: 6 N + 7 L d S, the flash backward's scores too",
    "flopcounter": "FlopCounterMode on flash SDPA: 6 N + 14 L d S",
    "6nd": "6 N, no attention",
    "megatron": "arXiv 2205.05198: all matmuls",
    "megatron_recompute": "arXiv 2104.04473: blocks twice",
    "chinchilla": "arXiv 2203.15556: matmuls, the embedding as one, softmax",
}
# Equal to Megatron's counts if the hidden width is 4 d and every head has its own keys and values.
USUAL_SHAPE = {
    "megatron": "72 L d^2 (1 + S/6d + V/12Ld)",
    "megatron_recompute": "96 L d^2 (1 + S/6d + V/16Ld)",
}
# FLOPs of attention per token / (L d S), of the conventions that count N:
# the forward, and forward and backward together.
ATTENTION = {
    "foundry": (4, 12),
    "palm": (4, 12),
    "causal": (2, 6),
    "lingua": (2, 7),
    "flopcounter": (4, 14),
    "6nd": (0, 0),
}


def flops_per_token(cfg: MPTConfig, convention: str, setup: TrainingSetup | None = None) -> float:
    """Training FLOPs per token, recomputation included.

    convention: a key of FORMULAS. setup: default `TrainingSetup()`, where all weights train.
    """
    setup = setup or TrainingSetup()
    if convention == "megatron":
        return by_matmuls(cfg, setup)
    if convention == "megatron_recompute":
        every_block = replace(setup, activation_checkpointing="full", recompute_every=1)
        return by_matmuls(cfg, every_block)
    if convention == "chinchilla":
        return chinchilla(cfg, setup)
    return sum(flops_by_term(cfg, setup, convention).values())


def flops_by_term(
    cfg: MPTConfig, setup: TrainingSetup, convention: str = "foundry"
) -> dict[str, float]:
    """The terms of a convention that counts N (a key of ATTENTION): training FLOPs per token.

    weights: 6 N, or 4 N if they are frozen. attention: its multiple of L d S.
    adapters: 6 N_lora. recomputed: the forwards that full activation checkpointing does again.
    Blocks below the first adapter count their forward only.
    """
    forward, both_passes = ATTENTION[convention]
    parts = params_by_part(cfg)
    lookup = 0 if cfg.tie_word_embeddings else parts["wte"]  # an untied input embedding
    n = n_params(cfg) - lookup
    d_s = cfg.d_model * cfg.max_seq_len
    n_lora = matmuls.n_lora(cfg, setup)

    below = matmuls.first_backward(cfg, setup)  # blocks without a backward
    linears = sum(parts[name] for name in matmuls.LINEARS) // cfg.n_layers  # of a block
    backward = both_passes - forward
    terms = {
        "weights": (6 if setup.trains_all else 4) * n - 2 * linears * below,
        "attention": both_passes * d_s * cfg.n_layers - backward * d_s * below,
    }
    if n_lora:
        terms["adapters"] = 6 * n_lora
    if setup.activation_checkpointing == "full":
        whole_forward = 2 * n + forward * d_s * cfg.n_layers + 2 * n_lora
        terms["recomputed"] = recomputed_share(cfg, setup) * whole_forward
    return terms


def recomputed_share(cfg: MPTConfig, setup: TrainingSetup) -> float:
    """Share of the blocks whose forward is computed twice."""
    blocks = range(matmuls.first_backward(cfg, setup), cfg.n_layers)
    return sum(setup.recomputes(i) for i in blocks) / cfg.n_layers


def by_matmuls(cfg: MPTConfig, setup: TrainingSetup) -> float:
    """All matmuls, with the whole square of scores: Megatron-LM's count.

    With a hidden width of 4 d and no grouped heads that is 72 L d^2 (1 + S/6d + V/12Ld), and
    96 L d^2 (1 + S/6d + V/16Ld) if all blocks are computed again.
    """
    square = replace(setup, attention="full", window=0, document=0)
    once = matmuls.flops_by_pass(cfg, replace(square, activation_checkpointing="none"))
    blocks = sum(passes["forward"] for part, passes in once.items() if part != "logits")
    return matmuls.total(once) + recomputed_share(cfg, square) * blocks


def chinchilla(cfg: MPTConfig, setup: TrainingSetup) -> float:
    """Three forwards, as appendix F of arXiv 2203.15556 lists them.

    The input embedding counts as a matmul, and the softmax as 3 FLOPs a score. (The ratios in its
    table A4 count neither the embedding nor the logits.)
    """
    matmuls_of_block = sum(matmuls.block_forward(cfg, TrainingSetup()).values())
    softmax = 3 * cfg.n_heads * cfg.max_seq_len
    blocks = cfg.n_layers * (matmuls_of_block + softmax)
    embedding = logits = 2 * cfg.vocab_size * cfg.d_model
    return 3 * (embedding + blocks + logits) + recomputed_share(cfg, setup) * blocks


def formula(name: str, setup: TrainingSetup, cfg: MPTConfig | None = None) -> str:
    """What a convention counts, as text, for this model and for what is trained."""
    text = FORMULAS[name]
    if not setup.trains_all:
        return text.replace("6 N", "4 N + 6 N_lora" if setup.lora_rank else "4 N")
    usual = cfg and cfg.hidden_dim == 4 * cfg.d_model and cfg.n_kv_heads == cfg.n_heads
    if usual and name in USUAL_SHAPE:
        text += f" = {USUAL_SHAPE[name]}"
    return text


# --------------------------------------------------------------------------------------------------
# The program


@dataclass
class ConventionArgs:
    """The convention of the MFU."""

    convention: str = "foundry"  # its MFU is shown first: foundry, palm, causal, megatron, ...

    def check(self) -> None:
        """UserError with the nearest name if it is unknown."""
        matmuls.require_known("convention", self.convention, FORMULAS)


def counts_of_size(
    n: int, shape: ShapeArgs, setup: TrainingSetup, first: str
) -> dict[str, tuple[str, float, float]]:
    """`counts` without a model: of n parameters, and of their attention if `shape` has that.

    Without it, the 6nd convention alone. Raises UserError if `first` needs more.
    """
    names = list(ATTENTION) if shape.l_d_s else ["6nd"]
    needs = "a model" if first not in ATTENTION else "--n_layers, --d_model and --max_seq_len"
    known = first in names or (first == "foundry" and not shape.l_d_s)
    require(known, f"--convention={first} needs {needs}, not --n_params alone")

    counted = {}
    for name in sorted(names, key=lambda name: name != first):
        forward, both_passes = ATTENTION[name]
        once = (6 if setup.trains_all else 4) * n + both_passes * shape.l_d_s
        again = 2 * n + forward * shape.l_d_s if setup.recomputes(0) else 0
        counted[name] = formula(name, setup), once, once + again
    return counted


def counts(cfg: MPTConfig, setup: TrainingSetup, first: str) -> dict[str, tuple[str, float, float]]:
    """{convention: (formula, FLOPs per token, the same with what is recomputed)}, `first` first."""
    names = list(dict.fromkeys([first, *FORMULAS]))
    if not setup.trains_all:
        names.remove("chinchilla")  # it does not define a count for frozen weights
        fix = "take --convention=foundry"
        known = first != "chinchilla"
        require(known, f"convention=chinchilla counts models whose weights all train: {fix}")

    once = replace(setup, activation_checkpointing="none")
    counted = {}
    for name in names:
        plain = flops_per_token(cfg, name, once)
        counted[name] = formula(name, setup, cfg), plain, flops_per_token(cfg, name, setup)
    return counted


def report(
    cfg: MPTConfig | None, setup: TrainingSetup, counted: dict[str, tuple], args: FlopsArgs
) -> dict:
    """All figures of `flops.report` for all conventions, and the FLOPs by matmul and pass.

    counted: what `counts` or `counts_of_size` returns.
    """
    figures = flops.report(cfg, counted, setup.activation_checkpointing, args)
    by_pass = matmuls.flops_by_pass(cfg, setup) if cfg else {}
    return {**figures, "by_pass": by_pass}


def table(cfg: MPTConfig | None, setup: TrainingSetup, figures: dict) -> str:
    """The report as text."""
    lines = []
    if cfg:
        lines += [*flops.model_lines(cfg, figures), ""]
        lines += [matmuls.table(figures["by_pass"], setup), ""]
    return "\n".join([*lines, *flops.convention_lines(figures)])


def main(argv: list[str]) -> None:
    """Print the report for the config files and flags in argv."""
    if flops.has_size(argv):
        model_keys = {field.name for field in fields(MPTConfig) + fields(TrainingSetup)}
        flops.refuse_model(argv, model_keys - {"frozen", "activation_checkpointing"})
        shape, setup, chosen, args = config.load(
            argv, ShapeArgs, TrainingSetup, ConventionArgs, FlopsArgs
        )
        cfg = None
        counted = counts_of_size(args.n_params, shape, setup, chosen.convention)
    else:
        cfg, setup, chosen, args = config.load(
            argv, MPTConfig, TrainingSetup, ConventionArgs, FlopsArgs
        )
        counted = counts(cfg, setup, chosen.convention)
    figures = report(cfg, setup, counted, args)
    print(json.dumps(figures, indent=2) if args.json else table(cfg, setup, figures))


if __name__ == "__main__":
    config.run(main)
