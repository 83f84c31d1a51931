"""Training FLOPs per token as nine conventions count them: an MFU says little without its own.

    foundry, palm         6 N + 12 L d S       the whole S x S square of scores
    causal                6 N +  6 L d S       what the mask leaves of it
    lingua, flopcounter   6 N +  7, 14 L d S   with the scores that the flash backward does again
    6nd                   6 N                  no attention
    megatron              every matmul, the logits' too and no embedding: see `by_matmuls`
    megatron_recompute    the same with the forward of all blocks twice
    chinchilla            every matmul, the embedding as one, and the softmax

flops.py has the two that everybody needs, without what stands here: frozen weights, which cost 4 N,
LoRA, sliding windows and packed documents (`matmuls.Work`), by matmul and by pass.

Run `python -m planning.conventions configs/mpt7b.py --convention=palm --lora_rank=16`, with a speed
`--device=mi250 --tokens_per_second=1922`, or without a model
`--n_params=405e9 --frozen --device=mi300x --devices=8 --tokens_per_second=34.1`.
Only `--device=auto` imports torch. Read next: planning/memory.py.
"""

import functools
import json
from dataclasses import dataclass, fields, replace

import config
import flops
from config import MPTConfig, require
from flops import FlopsArgs, n_params, params_by_part
from planning import matmuls
from planning.matmuls import Work


def share_again(cfg: MPTConfig, work: Work) -> float:
    """Share of the blocks whose forward is computed twice."""
    return sum(map(work.recomputes, range(cfg.n_layers))) / cfg.n_layers


def flops_by_term(cfg: MPTConfig, work: Work | None = None, attention=(4, 12)) -> dict[str, float]:
    """Training FLOPs per token: of the weights, 6 N, or 4 N if frozen; of attention, attention[1] L d S, of which the
    forward is attention[0]; of adapters, 6 N_lora; of the forward that full activation checkpointing does again.
    Blocks below the first adapter count forward only. Default: `Work()`, all weights train."""
    work, (forward, both) = work or Work(), attention
    parts, ds, lora = params_by_part(cfg), cfg.d_model * cfg.max_seq_len, matmuls.n_lora(cfg, work)
    n = n_params(cfg) - (0 if cfg.tie_word_embeddings else parts["wte"])
    below = work.lora_first_block if work.lora_rank else 0
    linears = sum(parts[name] for name in matmuls.LINEARS) // cfg.n_layers
    terms = {
        "weights": (6 if work.trains_all else 4) * n - 2 * linears * below,
        "attention": both * ds * cfg.n_layers - (both - forward) * ds * below,
    }
    if lora:
        terms["adapters"] = 6 * lora
    if work.activation_checkpointing == "full":
        terms["recomputed"] = share_again(cfg, work) * (
            2 * n + forward * ds * cfg.n_layers + 2 * lora
        )
    return terms


def by_n(cfg: MPTConfig, work: Work | None = None, attention=(4, 12)) -> float:
    """The sum of `flops_by_term`: 6 N + attention[1] L d S."""
    return sum(flops_by_term(cfg, work, attention).values())


def by_matmuls(cfg: MPTConfig, work: Work | None = None) -> float:
    """All matmuls, the whole square of scores. With a hidden width of 4 d and no grouped heads that is
    72 L d^2 (1 + S/6d + V/12Ld), and 96 L d^2 (1 + S/6d + V/16Ld) where all blocks are computed again."""
    work = replace(work or Work(), attention="full", window=0, document=0)
    once = matmuls.flops_by_pass(cfg, replace(work, activation_checkpointing="none"))
    forward = sum(numbers["forward"] for part, numbers in once.items() if part != "logits")
    return matmuls.total(once) + share_again(cfg, work) * forward


def by_matmuls_and_again(cfg: MPTConfig, work: Work | None = None) -> float:
    """`by_matmuls` with full activation checkpointing whatever `work` says."""
    return by_matmuls(
        cfg, replace(work or Work(), activation_checkpointing="full", recompute_every=1)
    )


def chinchilla(cfg: MPTConfig, work: Work | None = None) -> float:
    """Three forwards, in which the input embedding counts as a matmul and the softmax 3 FLOPs a score, as appendix F of
    arXiv 2203.15556 lists them. (The ratios in its table A4 come out without the embedding and the logits.)"""
    d, V, S = cfg.d_model, cfg.vocab_size, cfg.max_seq_len
    blocks = cfg.n_layers * (sum(matmuls.block_forward(cfg, Work()).values()) + 3 * cfg.n_heads * S)
    return 3 * (2 * V * d + blocks + 2 * V * d) + share_again(cfg, work or Work()) * blocks


CONVENTIONS = {  # name -> function(cfg, work=Work()) -> training FLOPs per token
    "foundry": by_n,
    "palm": by_n,
    "causal": functools.partial(by_n, attention=(2, 6)),
    "lingua": functools.partial(by_n, attention=(2, 7)),
    "flopcounter": functools.partial(by_n, attention=(4, 14)),
    "6nd": functools.partial(by_n, attention=(0, 0)),
    "megatron": by_matmuls,
    "megatron_recompute": by_matmuls_and_again,
    "chinchilla": chinchilla,
}
FORMULAS = {
    "foundry": flops.FORMULAS["foundry"],
    "palm": "PaLM, nanoGPT, OLMo, torchtitan: 6 N + 12 L d S",
    "causal": flops.FORMULAS["causal"],
    "lingua": "Lingua: 6 N + 7 L d S, the flash backward's scores too",
    "flopcounter": "FlopCounterMode on flash SDPA: 6 N + 14 L d S",
    "6nd": "6 N, no attention",
    "megatron": "arXiv 2205.05198: matmuls = 72 L d^2 (1 + S/6d + V/12Ld)",
    "megatron_recompute": "arXiv 2104.04473: blocks twice = 96 L d^2 (1 + S/6d + V/16Ld)",
    "chinchilla": "arXiv 2203.15556: matmuls, the embedding as one, softmax",
}


def formula(name: str, work: Work, cfg: MPTConfig | None = None) -> str:
    """What a convention counts, for this model: without what holds for all heads and a hidden width of 4 d only."""
    usual = cfg and (cfg.hidden_dim, cfg.n_kv_heads) == (4 * cfg.d_model, cfg.n_heads)
    text = FORMULAS[name] if usual and work.trains_all else FORMULAS[name].split(" = ")[0]
    return (
        text
        if work.trains_all
        else text.replace("6 N", "4 N + 6 N_lora" if work.lora_rank else "4 N")
    )


# ---------------------------------------------------------------------------------------------------------------
# The program


@dataclass
class ConventionArgs:
    """Whose convention."""

    convention: str = "foundry"  # whose MFU comes first: foundry, palm, causal, megatron, ...

    def check(self) -> None:
        matmuls.require_known("convention", self.convention, CONVENTIONS)


def counts(cfg: MPTConfig | None, work: Work, first: str, args: FlopsArgs) -> dict[str, tuple]:
    """{convention: (formula, FLOPs per token, and with what is computed again)}, `first` first."""
    once = replace(work, activation_checkpointing="none")
    if cfg is None:
        n, factor = args.n_params, 6 if work.trains_all else 4
        return {"6nd": (formula("6nd", work), factor * n, (factor + 2 * work.recomputes(0)) * n)}
    names = dict.fromkeys([first, *CONVENTIONS])
    names = [
        name for name in names if work.trains_all or name != "chinchilla"
    ]  # that one knows no frozen weights
    words = "convention=chinchilla counts models whose weights all train, take foundry"
    require(first in names, words)
    return {
        name: (formula(name, work, cfg), *(CONVENTIONS[name](cfg, how) for how in (once, work)))
        for name in names
    }


def report(cfg: MPTConfig | None, work: Work, args: FlopsArgs, first: str = "foundry") -> dict:
    """All figures of `flops.report`, for all conventions, and FLOPs by matmul and pass."""
    counted = counts(cfg, work, first, args)
    figures = flops.report(cfg, counted, work.activation_checkpointing, args)
    return {**figures, "by_pass": matmuls.flops_by_pass(cfg, work) if cfg else {}}


def table(cfg: MPTConfig | None, work: Work, r: dict) -> str:
    """The report as a person reads it."""
    lines = []
    if cfg:
        lines += [*flops.model_lines(cfg, r), "", matmuls.table(r["by_pass"], work), ""]
    return "\n".join([*lines, *flops.convention_lines(r)])


def main(argv: list[str]) -> None:
    cfg, work, chosen, args = config.load(argv, MPTConfig, Work, ConventionArgs, FlopsArgs)
    if args.n_params:
        keys = {field.name for field in fields(MPTConfig) + fields(Work)}
        flops.refuse_model(argv, keys - {"frozen", "activation_checkpointing"})
        simple = chosen.convention in ("foundry", "6nd")
        require(simple, f"--convention={chosen.convention} wants a model, not --n_params")
        cfg = None
    figures = report(cfg, work, args, chosen.convention)
    print(json.dumps(figures, indent=2) if args.json else table(cfg, work, figures))


if __name__ == "__main__":
    config.run(main)
