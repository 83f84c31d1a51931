"""Parameters and FLOPs of an MPT model in closed form, and the share of the machine's peak that a run reaches.

    FLOPs of training on one token = 6 N + 12 L d S

N: parameters, the tied embedding once (if untied, without the input embedding, which is a lookup); L layers; d the
width of all heads together; S the sequence. A matmul weight costs 2 FLOPs a token forward and 4 backward, hence 6 N.
Attention costs 2 S d for q.k and 2 S d for p.v a layer and token forward, three times that with backward: 12 L d S.
This is LLM Foundry's convention, in which the published MPT throughput stands, and PaLM's (arXiv 2204.02311, app. B):
the whole S x S square counts though half of it is masked, and recomputation does not count.

    MFU = FLOPs per token x tokens/s / (devices x peak)             model FLOPs utilization: useful work only
    HFU = 4/3 MFU under full activation checkpointing, else MFU     hardware FLOPs: the forward is done twice

Run `python flops.py configs/mpt7b.py --device=mi250 --tokens_per_second=1922`. Read next: devices.py, model.py.
"""

import json
import math
from dataclasses import dataclass
from typing import Literal

import torch

import config
import devices
from config import MPTConfig

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


def flops_by_term(cfg: MPTConfig) -> dict[str, int]:
    """Training FLOPs per token (forward and backward) of the weights, 6 N, and of attention, 12 L d S."""
    n = n_params(cfg) - (0 if cfg.tie_word_embeddings else cfg.vocab_size * cfg.d_model)
    return {"weights": 6 * n, "attention": 12 * cfg.n_layers * cfg.d_model * cfg.max_seq_len}


def train_flops_per_token(cfg: MPTConfig) -> int:
    """6 N + 12 L d S: LLM Foundry's convention."""
    return sum(flops_by_term(cfg).values())


def mfu(cfg: MPTConfig, tokens_per_second: float, n_devices: int, peak_flops: float | None) -> float | None:
    """Model FLOPs utilization, 0 to 1. tokens_per_second: of all devices; peak_flops: FLOP/s of one, None: unknown."""
    if peak_flops is None:
        return None
    return train_flops_per_token(cfg) * tokens_per_second / (n_devices * peak_flops)


def hfu(cfg: MPTConfig, tokens_per_second, n_devices, peak_flops, activation_checkpointing, every=1) -> float | None:
    """Hardware FLOPs utilization: `mfu`, times 4/3 if activation_checkpointing is "full" for all blocks, less if only
    for every so-and-so-many-th; None if the peak is. "selective" computes no matmul again."""
    share = mfu(cfg, tokens_per_second, n_devices, peak_flops)
    if share is None or activation_checkpointing != "full":
        return share
    return share * (1 + math.ceil(cfg.n_layers / every) / cfg.n_layers / 3)


@dataclass
class FlopsArgs:
    """What to compute the utilization of."""

    device: str = "auto"  # one torch device: mi250, h100-nvl, ... (python devices.py lists them); auto: this machine's
    peak_tflops: float | Literal["auto", "measure"] = "auto"  # its peak; auto: the table; measure: of this machine
    tokens_per_second: float = 0  # measured, of all devices together
    devices: int = 1  # torch devices: an MI250 card is two
    activation_checkpointing: Literal["none", "selective", "full"] = "none"  # full: HFU is 4/3 of MFU
    checkpoint_every: int = 1  # of every k-th block: HFU is less
    json: bool = False  # print JSON

    def check(self) -> None:
        config.require(self.devices > 0, f"devices must be at least 1, not {self.devices}")
        config.require(self.checkpoint_every > 0, f"checkpoint_every must be at least 1, not {self.checkpoint_every}")
        config.require(self.tokens_per_second >= 0, f"tokens_per_second is {self.tokens_per_second}, below 0")


def find_peak(args: FlopsArgs) -> tuple[str, float | None]:
    """Name and peak FLOP/s of the device. A config file's `device = "cpu"` means this machine's."""
    named = None if args.device in ("auto", "cpu", "cuda", "mps") else devices.by_name(args.device)
    if isinstance(args.peak_tflops, float):
        return named.name if named else "--peak_tflops", args.peak_tflops * 1e12
    if named:
        return named.name, named.bf16_tflops and named.bf16_tflops * 1e12
    here = torch.device("cuda" if torch.cuda.is_available() and args.device in ("auto", "cuda") else "cpu")
    name = "this machine, measured in bf16" if args.peak_tflops == "measure" else "this machine"
    return name, devices.peak_flops(args.peak_tflops, here, torch.bfloat16)


def report(cfg: MPTConfig, args: FlopsArgs) -> dict:
    """All figures, with the convention that they follow."""
    name, peak = find_peak(args)
    of = (cfg, args.tokens_per_second, args.devices, peak)
    return {
        "n_params": n_params(cfg),
        "params": params_by_part(cfg),
        "convention": CONVENTION,
        "flops_per_token": train_flops_per_token(cfg),
        "flops": flops_by_term(cfg),
        "device": name,
        "devices": args.devices,
        "peak_tflops": peak and peak / 1e12,
        "tokens_per_second": args.tokens_per_second,
        "tflops_per_device": args.tokens_per_second * train_flops_per_token(cfg) / args.devices / 1e12,
        "activation_checkpointing": args.activation_checkpointing,
        "mfu": mfu(*of),
        "hfu": hfu(*of, args.activation_checkpointing, args.checkpoint_every),
    }


def table(cfg: MPTConfig, r: dict) -> str:
    """The report as a person reads it."""
    lines = [f"d_model {cfg.d_model}, {cfg.n_layers} layers, {cfg.n_heads} heads, sequence {cfg.max_seq_len}", ""]
    lines += [f"{'parameters':<24}{'number':>18}{'share':>9}"]
    for name, n in [*r["params"].items(), ("all (N)", r["n_params"])]:
        lines += [f"  {name:<22}{n:>18,}{n / r['n_params']:>9.2%}"] if n else []
    lines += ["", f"{'training, per token':<24}{'GFLOP':>18}{'share':>9}  ({CONVENTION}, full S x S)"]
    terms = {"weights: 6 N": "weights", "attention: 12 L d S": "attention"}
    for name, n in [*((label, r["flops"][key]) for label, key in terms.items()), ("all", r["flops_per_token"])]:
        lines += [f"  {name:<22}{n / 1e9:>18,.3f}{n / r['flops_per_token']:>9.2%}"]
    return "\n".join([*lines, "", *speed_lines(r)])


def speed_lines(r: dict) -> list[str]:
    """MFU and HFU of the measured speed, or the speed that would be 100 %."""
    if r["peak_tflops"] is None:
        return [f"MFU n/a: no bf16 peak known for {r['device']}, set --device=mi250 (for one) or --peak_tflops=NUMBER"]
    peak = f"{r['device']}: {r['peak_tflops']:.6g} TFLOP/s peak a torch device"
    if not r["tokens_per_second"]:
        full = r["peak_tflops"] * 1e12 / r["flops_per_token"]
        return [peak, f"  MFU 100 % would be {full:,.0f} tokens/s a device ({CONVENTION})"]
    again = r["activation_checkpointing"] == "full"
    why = f"{r['hfu'] / r['mfu']:.3g} MFU: a forward is done again" if again else "no matmul is done again"
    return [
        f"{peak}, {r['tokens_per_second']:,.6g} tokens/s on {r['devices']}",
        f"  {'TFLOP/s a device':<22}{r['tflops_per_device']:>18.2f}  ({CONVENTION})",
        f"  {'MFU':<22}{r['mfu']:>18.2%}  ({CONVENTION})",
        f"  {'HFU':<22}{r['hfu']:>18.2%}  ({CONVENTION}; {why})",
    ]


def main(argv: list[str]) -> None:
    cfg, args = config.load(argv, MPTConfig, FlopsArgs)
    figures = report(cfg, args)
    print(json.dumps(figures, indent=2) if args.json else table(cfg, figures))


if __name__ == "__main__":
    config.run(main)
