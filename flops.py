"""Parameters and FLOPs of an MPT model in closed form, and the share of the machine's peak that a run reaches.

    FLOPs of training on one token = 6 N + 12 L d S

N: parameters, the tied embedding once (if untied, without the input embedding, which is a lookup); L layers; d the
width of all heads together; S the sequence. A matmul weight costs 2 FLOPs a token forward and 4 backward, hence 6 N
(4 N if it is frozen). Attention costs 2 S d for q.k and 2 S d for p.v a layer and token forward, three times that with
backward: 12 L d S. This is LLM Foundry's convention, in which the published MPT throughput stands, and PaLM's (arXiv
2204.02311, app. B): the whole S x S square counts though half of it is masked, and recomputation does not count.
Megatron-LM leaves out the masked half: 6 N + 6 L d S, "causal" here. A share of the peak says
little without its convention; planning/conventions.py has nine, and counts LoRA, windows, documents.

    MFU = FLOPs per token x tokens/s / (devices x peak)             model FLOPs utilization: useful work only
    HFU = 4/3 MFU under full activation checkpointing, else MFU     hardware FLOPs: the forward is done twice

Run `python flops.py configs/mpt7b.py --device=mi250 --tokens_per_second=1922`, or without a model
`python flops.py --n_params=6.7e9 --device=mi250 --tokens_per_second=1922`.
`python -m bench flops` compares with what torch counts. Only `--device=auto` imports torch.
Read next: attention.py.
"""

import json
import shlex
from dataclasses import dataclass, fields
from typing import Literal

import config
import devices
from config import Checkpointing, MPTConfig, UserError, require

CONVENTION = "LLM Foundry: 6 N + 12 L d S"
FORMULAS = {"foundry": CONVENTION, "causal": "Megatron-LM today: 6 N + 6 L d S"}
ATTENTION = {"foundry": 4, "causal": 2}  # FLOPs of its forward / d S, of a layer and token

# Flags of other programs that look as if they belonged here.
CONVENTION_FLAGS = """convention attention window document frozen
    lora_rank lora_targets lora_first_block""".split()
SHAPE = {field.name for field in fields(MPTConfig)}


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
# FLOPs


def forward_flops_per_token(cfg: MPTConfig, convention: str = "foundry") -> int:
    """2 N + 4 L d S, or 2 N + 2 L d S if the convention is "causal"."""
    lookup = 0 if cfg.tie_word_embeddings else cfg.vocab_size * cfg.d_model
    attention = ATTENTION[convention] * cfg.n_layers * cfg.d_model * cfg.max_seq_len
    return 2 * (n_params(cfg) - lookup) + attention


def train_flops_per_token(cfg: MPTConfig, convention: str = "foundry") -> int:
    """6 N + 12 L d S, or 6 N + 6 L d S if "causal": the backward costs two forwards."""
    return 3 * forward_flops_per_token(cfg, convention)


def hardware_flops_per_token(
    cfg: MPTConfig, activation_checkpointing: str, every: int = 1, convention: str = "foundry"
) -> float:
    """`train_flops_per_token`, and a forward more if activation_checkpointing is "full" for all
    blocks, less if only for every so-and-so-many-th. "selective" computes no matmul again."""
    again = 0
    if activation_checkpointing == "full":
        again = len(range(0, cfg.n_layers, every)) / cfg.n_layers  # share of the blocks
    once = train_flops_per_token(cfg, convention)
    return once + again * forward_flops_per_token(cfg, convention)


# ---------------------------------------------------------------------------------------------------------------
# Utilization


def mfu(
    cfg: MPTConfig, tokens_per_second: float, n_devices: int, peak_flops: float | None
) -> float | None:
    """Model FLOPs utilization, 0 to 1. tokens_per_second: of all devices; peak_flops: FLOP/s of one, None: unknown."""
    return hfu(cfg, tokens_per_second, n_devices, peak_flops, "none")


def hfu(
    cfg: MPTConfig, tokens_per_second, n_devices, peak_flops, activation_checkpointing, every=1
) -> float | None:
    """Hardware FLOPs utilization: `mfu`, times 4/3 if activation_checkpointing is "full" for all
    blocks; None if the peak is. See `hardware_flops_per_token`."""
    if peak_flops is None:
        return None
    of_a_token = hardware_flops_per_token(cfg, activation_checkpointing, every)
    return of_a_token * tokens_per_second / (n_devices * peak_flops)


# ---------------------------------------------------------------------------------------------------------------
# The program


@dataclass
class FlopsArgs:
    """What to compute the utilization of."""

    device: str = "auto"  # one torch device: mi250, h100-nvl, ... (python devices.py lists them); auto: this machine's
    peak_tflops: float | Literal["auto", "measure"] = (
        "auto"  # its peak; auto: the table; measure: of this machine
    )
    tokens_per_second: float = 0  # measured, of all devices together
    devices: int = 1  # torch devices: an MI250 card is two
    n_params: int | None = (
        None  # instead of a model: its number of parameters, attention is not counted then
    )
    json: bool = False  # print JSON

    def check(self) -> None:
        require(self.devices > 0, f"devices must be at least 1, not {self.devices}")
        known = 0 <= self.tokens_per_second < 10**15
        require(known, f"tokens_per_second must be from 0 to 1e15, not {self.tokens_per_second:g}")
        for name in ("peak_tflops", "n_params"):
            value = getattr(self, name)
            require(
                not isinstance(value, int | float) or value > 0,
                f"{name} must be more than 0, not {value}",
            )


@dataclass
class Recomputation:
    """What is computed twice, which HFU counts."""

    activation_checkpointing: Checkpointing = "none"  # full: a block's forward is done again
    recompute_every: int = 1  # of every k-th block

    def check(self) -> None:
        require(
            self.recompute_every > 0,
            f"recompute_every must be at least 1, not {self.recompute_every}",
        )


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

    here = torch.device(
        "cuda" if torch.cuda.is_available() and args.device in ("auto", "cuda") else "cpu"
    )
    if args.peak_tflops == "measure":
        return "this machine, measured in bf16", devices.measure_peak(here, torch.bfloat16), None
    known = devices.of(here)
    return (
        "this machine",
        devices.peak_flops("auto", here, torch.bfloat16),
        known and known.reachable,
    )


def counts(cfg: MPTConfig | None, how: Recomputation, args: FlopsArgs) -> dict[str, tuple]:
    """{convention: (formula, FLOPs per token, and with what is computed again)}.
    cfg: None with `args.n_params`."""
    mode, every = how.activation_checkpointing, how.recompute_every
    if cfg is None:
        again = 2 if mode == "full" else 0
        return {"6nd": ("6 N, no attention", 6 * args.n_params, (6 + again) * args.n_params)}
    found = {}
    for name, formula in FORMULAS.items():
        once = train_flops_per_token(cfg, name)
        found[name] = formula, once, hardware_flops_per_token(cfg, mode, every, name)
    return found


def report(cfg: MPTConfig | None, counted: dict[str, tuple], mode: str, args: FlopsArgs) -> dict:
    """All figures. `flops_per_token`, `mfu` and `hfu` follow the first convention of `counted`,
    which is what `counts` returns. mode: of activation checkpointing."""
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
        for name, (text, once, again) in counted.items()
    }
    first = next(iter(rows.values()))
    return {
        "n_params": n_params(cfg) if cfg else args.n_params,
        "params": params_by_part(cfg) if cfg else {},
        "device": device,
        "devices": args.devices,
        "peak_tflops": peak and peak / 1e12,
        "reachable": reachable,
        "tokens_per_second": args.tokens_per_second,
        "activation_checkpointing": mode,
        "convention": first["formula"],
        **{name: first[name] for name in ("flops_per_token", "tflops_per_device", "mfu", "hfu")},
        "mfu_of_reachable": first["mfu"] and reachable and first["mfu"] / reachable,
        "conventions": rows,
    }


def table(cfg: MPTConfig | None, r: dict) -> str:
    """The report as a person reads it."""
    model = [*model_lines(cfg, r), ""] if cfg else []
    return "\n".join([*model, *convention_lines(r)])


def model_lines(cfg: MPTConfig, r: dict) -> list[str]:
    """The model's shape, and its parameters by part."""
    shape = f"{cfg.n_layers} layers, {cfg.n_heads} heads, sequence {cfg.max_seq_len}"
    lines = [f"d_model {cfg.d_model}, {shape}", ""]
    lines += [f"{'parameters':<24}{'number':>18}{'share':>9}"]
    for name, n in [*r["params"].items(), ("all (N)", r["n_params"])]:
        lines += [f"  {name:<22}{n:>18,}{n / r['n_params']:>9.2%}"] if n else []
    return lines


def convention_lines(r: dict) -> list[str]:
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
            cells += [
                f"{row['tflops_per_device']:.2f}",
                *(f"{row[x]:.2%}" if peak else "n/a" for x in ("mfu", "hfu")),
            ]
        elif peak:
            cells += [f"{peak * 1e12 / row['flops_per_token']:,.0f}"]
        cells = "".join(
            f"{cell:>{max(len(head), 7) + 2}}" for head, cell in zip(names, cells, strict=True)
        )
        lines.append(f"  {name:<18}{cells}  {row['formula']}")
    return [*lines, "", *device_lines(r)]


def device_lines(r: dict) -> list[str]:
    """What the shares are shares of."""
    if r["peak_tflops"] is None:
        return [
            f"MFU n/a: no bf16 peak known for {r['device']}, set --device=mi250 (for one) or --peak_tflops=NUMBER"
        ]
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


def refuse_other_programs_flags(argv: list[str]) -> None:
    """UserError that names the program which has this flag."""
    for flag in (text for text in argv if text.startswith("-")):
        name = flag.lstrip("-").split("=")[0]
        if name in CONVENTION_FLAGS:
            words = shlex.join(argv)
            raise UserError(
                f"--{name} is a flag of another program: python -m planning.conventions {words}"
            )
        model = [
            text for text in argv if not text.startswith("-") or text[2:].split("=")[0] in SHAPE
        ]
        words = shlex.join(model) or "configs/mpt1b.py"
        require(
            name != "check",
            f"--check has become a program of its own: python -m bench flops {words}",
        )


def refuse_model(argv: list[str], keys: set[str]) -> None:
    """UserError if argv names a config file or one of `keys` beside --n_params."""
    names = keys | {old for old, new in config.RENAMED.items() if new in keys}
    model = [a for a in argv if not a.startswith("-") or a.lstrip("-").split("=")[0] in names]
    require(not model, f"--n_params stands instead of a model: leave out it or {' '.join(model)}")


def main(argv: list[str]) -> None:
    refuse_other_programs_flags(argv)
    cfg, how, args = config.load(argv, MPTConfig, Recomputation, FlopsArgs)
    if args.n_params:
        refuse_model(argv, {field.name for field in fields(MPTConfig)} | {"recompute_every"})
        cfg = None
    figures = report(cfg, counts(cfg, how, args), how.activation_checkpointing, args)
    print(json.dumps(figures, indent=2) if args.json else table(cfg, figures))


if __name__ == "__main__":
    config.run(main)
