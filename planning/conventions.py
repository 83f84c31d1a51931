"""Parameters and FLOPs of an MPT model in closed form, and the share of the machine's peak that a run reaches.

    FLOPs of training on one token = 6 N + 12 L d S

N: parameters, the tied embedding once (if untied, without the input embedding, which is a lookup); L layers; d the
width of all heads together; S the sequence. A matmul weight costs 2 FLOPs a token forward and 4 backward, hence 6 N
(4 N if it is frozen). Attention costs 2 S d for q.k and 2 S d for p.v a layer and token forward, three times that with
backward: 12 L d S. This is LLM Foundry's convention, in which the published MPT throughput stands, and PaLM's (arXiv
2204.02311, app. B): the whole S x S square counts though half of it is masked, and recomputation does not count.
Others count otherwise, and a share of the peak says little without its convention: see `CONVENTIONS`.

    MFU = FLOPs per token x tokens/s / (devices x peak)             model FLOPs utilization: useful work only
    HFU = 4/3 MFU under full activation checkpointing, else MFU     hardware FLOPs: the forward is done twice

Run `python flops.py configs/mpt7b.py --device=mi250 --tokens_per_second=1922`, or without a model
`python flops.py --n_params=405e9 --frozen --device=mi300x --devices=8 --tokens_per_second=34.1`. With `--check` torch
counts the FLOPs and the bytes of a step, too. Nothing else but `--device=auto` imports torch. Read next: model.py.
"""

import functools
import json
import sys
from dataclasses import dataclass, fields, replace
from typing import Literal

import config
import devices
from config import MPTConfig, require
from planning import matmuls
from planning.matmuls import Work

CONVENTION = "LLM Foundry: 6 N + 12 L d S"


def params_by_part(cfg: MPTConfig) -> dict[str, int]:
    """Number of parameters by what they are, summed over the layers; all biases, the norms' too, are one part."""
    d, hidden, L = cfg.d_model, cfg.hidden_dim, cfg.n_layers
    kv = cfg.n_kv_heads * cfg.head_dim  # width of all keys, and of all values
    per_layer = {
        "Wqkv": d * (d + 2 * kv),
        "out_proj": d * d,
        "up_proj": d * hidden,
        "down_proj": hidden * d,
        "norms": 2 * d + (d + kv if cfg.qk_ln else 0),
    }
    biases = 0 if cfg.no_bias else L * ((d + 2 * kv) + d + hidden + d + per_layer["norms"]) + d
    parts = {
        "wte": cfg.vocab_size * d,
        "wpe": cfg.max_seq_len * d if cfg.learned_positions else 0,
        **{name: L * n for name, n in per_layer.items()},
        "biases": biases,
        "lm_head": 0 if cfg.tie_word_embeddings else cfg.vocab_size * d,
    }
    parts["norms"] += d  # norm_f
    return parts


def n_params(cfg: MPTConfig) -> int:
    """Number of parameters, a tied embedding counted once."""
    return sum(params_by_part(cfg).values())


# ---------------------------------------------------------------------------------------------------------------
# Conventions: training FLOPs per token as others define them


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
        terms["recomputed"] = share_again(cfg, work) * (2 * n + forward * ds * cfg.n_layers + 2 * lora)
    return terms


def by_n(cfg: MPTConfig, work: Work | None = None, attention=(4, 12)) -> float:
    """The sum of `flops_by_term`: 6 N + attention[1] L d S."""
    return sum(flops_by_term(cfg, work, attention).values())


def train_flops_per_token(cfg: MPTConfig) -> int:
    """6 N + 12 L d S: LLM Foundry's convention."""
    return by_n(cfg)


def by_matmuls(cfg: MPTConfig, work: Work | None = None) -> float:
    """All matmuls, the whole square of scores. With a hidden width of 4 d and no grouped heads that is
    72 L d^2 (1 + S/6d + V/12Ld), and 96 L d^2 (1 + S/6d + V/16Ld) where all blocks are computed again."""
    work = replace(work or Work(), attention="full", window=0, document=0)
    once = matmuls.flops_by_pass(cfg, replace(work, activation_checkpointing="none"))
    forward = sum(numbers["forward"] for part, numbers in once.items() if part != "logits")
    return matmuls.total(once) + share_again(cfg, work) * forward


def by_matmuls_and_again(cfg: MPTConfig, work: Work | None = None) -> float:
    """`by_matmuls` with full activation checkpointing whatever `work` says."""
    return by_matmuls(cfg, replace(work or Work(), activation_checkpointing="full", recompute_every=1))


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
    "foundry": CONVENTION,
    "palm": "PaLM, nanoGPT, OLMo, torchtitan: 6 N + 12 L d S",
    "causal": "Megatron-LM today: 6 N + 6 L d S",
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
    return text if work.trains_all else text.replace("6 N", "4 N + 6 N_lora" if work.lora_rank else "4 N")


# ---------------------------------------------------------------------------------------------------------------
# Utilization


def mfu(cfg: MPTConfig, tokens_per_second: float, n_devices: int, peak_flops: float | None) -> float | None:
    """Model FLOPs utilization, 0 to 1. tokens_per_second: of all devices; peak_flops: FLOP/s of one, None: unknown."""
    return hfu(cfg, tokens_per_second, n_devices, peak_flops, "none")


def hfu(cfg: MPTConfig, tokens_per_second, n_devices, peak_flops, activation_checkpointing, every=1) -> float | None:
    """Hardware FLOPs utilization: `mfu`, times 4/3 if activation_checkpointing is "full" for all blocks, less if only
    for every so-and-so-many-th; None if the peak is. "selective" computes no matmul again."""
    if peak_flops is None:
        return None
    work = Work(activation_checkpointing=activation_checkpointing, recompute_every=every)
    return by_n(cfg, work) * tokens_per_second / (n_devices * peak_flops)


# ---------------------------------------------------------------------------------------------------------------
# The program


@dataclass
class FlopsArgs:
    """What to compute the utilization of. (--check: compare the closed forms with what torch counts.)"""

    device: str = "auto"  # one torch device: mi250, h100-nvl, ... (python devices.py lists them); auto: this machine's
    peak_tflops: float | Literal["auto", "measure"] = "auto"  # its peak; auto: the table; measure: of this machine
    tokens_per_second: float = 0  # measured, of all devices together
    devices: int = 1  # torch devices: an MI250 card is two
    convention: str = "foundry"  # whose MFU comes first: foundry, palm, causal, megatron, ...
    n_params: int | None = None  # instead of a model: its number of parameters, attention is not counted then
    json: bool = False  # print JSON

    def check(self) -> None:
        require(self.devices > 0, f"devices must be at least 1, not {self.devices}")
        known = 0 <= self.tokens_per_second < 10**15
        require(known, f"tokens_per_second must be from 0 to 1e15, not {self.tokens_per_second:g}")
        for name in ("peak_tflops", "n_params"):
            value = getattr(self, name)
            require(not isinstance(value, int | float) or value > 0, f"{name} must be more than 0, not {value}")
        matmuls.require_known("convention", self.convention, CONVENTIONS)


def find_peak(args: FlopsArgs) -> tuple[str, float | None, float | None]:
    """Name and peak FLOP/s of the device, and the share of that which its large matmuls reach, each None if unknown.
    A config file's `device = "cpu"` means this machine's, which is asked only if there is something to divide."""
    named = None if args.device in ("auto", "cpu", "cuda", "mps") else devices.by_name(args.device)
    if isinstance(args.peak_tflops, float):
        return named.name if named else "the device", args.peak_tflops * 1e12, None
    if named:
        return named.name, named.bf16_tflops and named.bf16_tflops * 1e12, named.reachable
    if not args.tokens_per_second and args.peak_tflops != "measure":
        return "a device that is not named", None, None
    import torch

    here = torch.device("cuda" if torch.cuda.is_available() and args.device in ("auto", "cuda") else "cpu")
    if args.peak_tflops == "measure":
        return "this machine, measured in bf16", devices.measure_peak(here, torch.bfloat16), None
    known = devices.of(here)
    return "this machine", devices.peak_flops("auto", here, torch.bfloat16), known and known.reachable


def counts(cfg: MPTConfig | None, work: Work, args: FlopsArgs) -> dict[str, tuple[str, float, float]]:
    """{convention: (formula, FLOPs per token, and with what is computed again)}, the chosen one first."""
    once = replace(work, activation_checkpointing="none")
    if cfg is None:
        n, factor = args.n_params, 6 if work.trains_all else 4
        return {"6nd": (formula("6nd", work), factor * n, (factor + 2 * work.recomputes(0)) * n)}
    names = dict.fromkeys([args.convention, *CONVENTIONS])
    names = [name for name in names if work.trains_all or name != "chinchilla"]  # that one knows no frozen weights
    require(args.convention in names, "convention=chinchilla counts models whose weights all train, take foundry")
    return {name: (formula(name, work, cfg), *(CONVENTIONS[name](cfg, how) for how in (once, work))) for name in names}


def report(cfg: MPTConfig | None, work: Work, args: FlopsArgs) -> dict:
    """All figures. `flops_per_token`, `mfu` and `hfu` follow the chosen convention. cfg: None with `args.n_params`."""
    device, peak, reachable = find_peak(args)
    rate = args.tokens_per_second / args.devices
    rows = {
        name: {
            "formula": text,
            "flops_per_token": once,
            "tflops_per_device": rate * once / 1e12,
            "mfu": peak and rate * once / peak,
            "hfu": peak and rate * again / peak,
        }
        for name, (text, once, again) in counts(cfg, work, args).items()
    }
    first = next(iter(rows.values()))
    return {
        "n_params": n_params(cfg) if cfg else args.n_params,
        "params": params_by_part(cfg) if cfg else {},
        "by_pass": matmuls.flops_by_pass(cfg, work) if cfg else {},
        "device": device,
        "devices": args.devices,
        "peak_tflops": peak and peak / 1e12,
        "reachable": reachable,
        "tokens_per_second": args.tokens_per_second,
        "activation_checkpointing": work.activation_checkpointing,
        "convention": first["formula"],
        **{name: first[name] for name in ("flops_per_token", "tflops_per_device", "mfu", "hfu")},
        "mfu_of_reachable": first["mfu"] and reachable and first["mfu"] / reachable,
        "conventions": rows,
    }


def table(cfg: MPTConfig | None, work: Work, r: dict) -> str:
    """The report as a person reads it."""
    lines = []
    if cfg:
        lines += [f"d_model {cfg.d_model}, {cfg.n_layers} layers, {cfg.n_heads} heads, sequence {cfg.max_seq_len}", ""]
        lines += [f"{'parameters':<24}{'number':>18}{'share':>9}"]
        for name, n in [*r["params"].items(), ("all (N)", r["n_params"])]:
            lines += [f"  {name:<22}{n:>18,}{n / r['n_params']:>9.2%}"] if n else []
        lines += ["", matmuls.table(r["by_pass"], work), ""]
    return "\n".join([*lines, *speed_lines(r)])


def speed_lines(r: dict) -> list[str]:
    """Each convention's FLOPs, and MFU and HFU of the measured speed, or the speed that would be 100 %."""
    peak, speed, names = r["peak_tflops"], r["tokens_per_second"], ["GFLOP a token"]
    if speed:
        names += ["TFLOP/s each", "MFU", "HFU"]
    elif peak:
        names += ["tokens/s at MFU 100 %"]
    lines = [f"{'convention':<20}" + "".join(f"{name:>{max(len(name), 7) + 2}}" for name in names)]
    for name, row in r["conventions"].items():
        cells = [f"{row['flops_per_token'] / 1e9:,.3f}"]
        if speed:
            cells += [f"{row['tflops_per_device']:.2f}", *(f"{row[x]:.2%}" if peak else "n/a" for x in ("mfu", "hfu"))]
        elif peak:
            cells += [f"{peak * 1e12 / row['flops_per_token']:,.0f}"]
        cells = "".join(f"{cell:>{max(len(head), 7) + 2}}" for head, cell in zip(names, cells, strict=True))
        lines.append(f"  {name:<18}{cells}  {row['formula']}")
    return [*lines, "", *device_lines(r)]


def device_lines(r: dict) -> list[str]:
    """What the shares are shares of."""
    if r["peak_tflops"] is None:
        return [f"MFU n/a: no bf16 peak known for {r['device']}, set --device=mi250 (for one) or --peak_tflops=NUMBER"]
    lines = [f"{r['device']}: {r['peak_tflops']:.6g} TFLOP/s peak a torch device"]
    if r["tokens_per_second"]:
        lines[0] += f", {r['tokens_per_second']:,.6g} tokens/s on {r['devices']}"
    if r["hfu"] and r["hfu"] > 1:
        lines.append(
            "more than all of it: are --devices (an MI250 card is two) and --tokens_per_second (of all) right?"
        )
    elif r["mfu_of_reachable"]:
        text = "large matmuls reach {reachable:.0%} of that, this run {mfu_of_reachable:.2%} of what they reach"
        lines.append(f"{text.format(**r)} ({r['convention']})")
    return lines


def check(cfg: MPTConfig, work: Work) -> str:
    """The closed forms of FLOPs and of memory beside what torch counts."""
    from bench import flops as flops_counted  # imports torch and most of this project

    print("torch counts a step's FLOPs and bytes on tensors without numbers, for some seconds", file=sys.stderr)
    return "\n".join([*flops_counted.compare(cfg, work), *flops_counted.compare_memory(cfg, work)])


def main(argv: list[str]) -> None:
    flags = [a for a in argv if a != "--check"]
    cfg, work, args = config.load(flags, MPTConfig, Work, FlopsArgs)
    if args.n_params:
        keys = {field.name for field in fields(MPTConfig) + fields(Work)} - {"frozen", "activation_checkpointing"}
        model = [a for a in argv if not a.startswith("-") or a.lstrip("-").split("=")[0] in keys]
        require(not model, f"--n_params stands instead of a model: leave out it or {' '.join(model)}")
        require(args.convention in ("foundry", "6nd"), f"--convention={args.convention} wants a model, not --n_params")
        cfg = None
    if "--check" in argv:
        require(cfg is not None, "--check wants a model, not --n_params")
        print(check(cfg, work))
        return
    figures = report(cfg, work, args)
    print(json.dumps(figures, indent=2) if args.json else table(cfg, work, figures))


if __name__ == "__main__":
    config.run(main)
