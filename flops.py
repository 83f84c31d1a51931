"""Parameters and FLOPs of an MPT model in closed form, and the share of the peak a run reaches.

    FLOPs of training on one token = 6 N + 12 L d S

N: parameters, a tied embedding counted once; an untied input embedding is a lookup and does not
count. L: layers. d: width of all heads together. S: sequence length. A matmul weight costs 2 FLOPs
a token forward and 4 backward, hence 6 N (4 N if it is frozen). Attention costs 2 S d for q.k and
2 S d for p.v per layer and token forward, and three times that with the backward: 12 L d S.

This is the convention of LLM Foundry, which published MPT's throughput, and of PaLM (arXiv
2204.02311, app. B). It counts the whole S x S square, though half of it is masked, and not what is
recomputed. Megatron-LM does not count the masked half: 6 N + 6 L d S, here "causal". A share of the
peak says little without its convention; planning/conventions.py has nine of them, and counts LoRA,
sliding windows and packed documents.

    MFU = FLOPs per token x tokens/s / (devices x peak)         model FLOPs utilization: useful work
    HFU = 4/3 MFU with full activation checkpointing, else MFU  hardware FLOPs: two forwards

Run `python flops.py configs/mpt7b.py --device=mi250 --tokens_per_second=1922`, or without a model
`python flops.py --n_params=6.7e9 --device=mi250 --tokens_per_second=1922`, with its attention
`--n_params=540.35e9 --n_layers=118 --n_heads=48 --head_dim=256 --max_seq_len=2048` (PaLM: 46.2 %
with `--device=tpu-v4 --devices=6144 --tokens_per_second=238.3e3`).
A test compares with what torch counts. Only `--device=auto` imports torch.
"""

import json
from dataclasses import dataclass, fields
from typing import Literal

import config
import devices
from config import Checkpointing, MPTConfig, UserError, require

CONVENTION = "LLM Foundry: 6 N + 12 L d S"
FORMULAS = {"foundry": CONVENTION, "causal": "Megatron-LM today: 6 N + 6 L d S"}
ATTENTION = {"foundry": 4, "causal": 2}  # FLOPs of its forward per layer and token / (d S)

# Flags of planning/conventions.py that people also try here.
CONVENTION_FLAGS = """convention attention window document frozen
    lora_rank lora_targets lora_last_blocks lora_train""".split()


# --------------------------------------------------------------------------------------------------
# Parameters


def params_by_part(cfg: MPTConfig) -> dict[str, int]:
    """{part: number of parameters}, summed over the layers. All biases are one part."""
    d = cfg.d_model
    hidden = cfg.hidden_dim
    kv = cfg.n_kv_heads * cfg.head_dim  # width of all keys, and of all values
    layer = {
        "Wqkv": d * (d + 2 * kv),
        "out_proj": d * d,
        "up_proj": d * hidden,
        "down_proj": hidden * d,
        "norms": 2 * d + (d + kv if cfg.qk_ln else 0),
    }
    wqkv_bias = d + 2 * kv
    linear_biases = wqkv_bias + d + hidden + d
    norm_biases = layer["norms"]
    norm_f = d  # and as many biases
    biases = cfg.n_layers * (linear_biases + norm_biases) + norm_f

    parts = {
        "wte": cfg.vocab_size * d,
        "wpe": cfg.max_seq_len * d if cfg.learned_positions else 0,
        **{name: cfg.n_layers * n for name, n in layer.items()},
        "biases": 0 if cfg.no_bias else biases,
        "lm_head": 0 if cfg.tie_word_embeddings else cfg.vocab_size * d,
    }
    parts["norms"] += norm_f
    return parts


def n_params(cfg: MPTConfig) -> int:
    """Number of parameters, a tied embedding counted once."""
    return sum(params_by_part(cfg).values())


# --------------------------------------------------------------------------------------------------
# FLOPs


def forward_flops_per_token(cfg: MPTConfig, convention: str = "foundry") -> int:
    """FLOPs of the forward per token: 2 N + 4 L d S, or 2 N + 2 L d S if "causal"."""
    lookup = 0 if cfg.tie_word_embeddings else cfg.vocab_size * cfg.d_model
    attention = ATTENTION[convention] * cfg.n_layers * cfg.d_model * cfg.max_seq_len
    return 2 * (n_params(cfg) - lookup) + attention


def train_flops_per_token(cfg: MPTConfig, convention: str = "foundry") -> int:
    """FLOPs of training per token: 6 N + 12 L d S, or 6 N + 6 L d S if "causal".

    The backward costs two forwards.
    """
    return 3 * forward_flops_per_token(cfg, convention)


def hardware_flops_per_token(
    cfg: MPTConfig, activation_checkpointing: str, every: int = 1, convention: str = "foundry"
) -> float:
    """`train_flops_per_token`, and the forwards that activation checkpointing does again.

    "full" repeats the forward of every `every`-th block; "selective" repeats no matmul.
    """
    share_again = 0
    if activation_checkpointing == "full":
        share_again = len(range(0, cfg.n_layers, every)) / cfg.n_layers  # of the blocks
    once = train_flops_per_token(cfg, convention)
    return once + share_again * forward_flops_per_token(cfg, convention)


# --------------------------------------------------------------------------------------------------
# Utilization


def mfu(
    cfg: MPTConfig, tokens_per_second: float, n_devices: int, peak_flops: float | None
) -> float | None:
    """Model FLOPs utilization, 0 to 1; None if the peak is unknown.

    tokens_per_second: of all devices together. peak_flops: FLOP/s of one device, or None.
    """
    return hfu(cfg, tokens_per_second, n_devices, peak_flops, "none")


def hfu(
    cfg: MPTConfig, tokens_per_second, n_devices, peak_flops, activation_checkpointing, every=1
) -> float | None:
    """Hardware FLOPs utilization; None if the peak is unknown.

    That is `mfu`, times 4/3 if activation_checkpointing is "full" for all blocks. Arguments as in
    `mfu` and `hardware_flops_per_token`.
    """
    per_token = hardware_flops_per_token(cfg, activation_checkpointing, every)
    return utilization(per_token, tokens_per_second, n_devices, peak_flops)


def utilization(
    flops_per_token: float, tokens_per_second: float, n_devices: int, peak_flops: float | None
) -> float | None:
    """The share of the peak that these FLOPs are, 0 to 1; None if the peak is unknown.

    Arguments as in `mfu`. With adapters, flops_per_token is planning/matmuls.py::flops_of_run.
    """
    if peak_flops is None:
        return None
    return flops_per_token * tokens_per_second / (n_devices * peak_flops)


# --------------------------------------------------------------------------------------------------
# The program's settings

PeakSetting = float | Literal["auto", "measure"]


@dataclass
class FlopsArgs:
    """What to compute the utilization of."""

    device: str = "auto"  # mi250, ... (python devices.py lists them); auto: of this machine
    peak_tflops: PeakSetting = "auto"  # its peak; auto: the table; measure: of this machine
    tokens_per_second: float = 0  # measured, of all devices together
    devices: int = 1  # torch devices: an MI250 card is two
    n_params: int | None = None  # in place of a model; n_layers, d_model, max_seq_len add attention
    json: bool = False  # print JSON


@dataclass
class ShapeArgs:
    """The attention of a model of which only --n_params is known; 0: not given."""

    n_layers: int = 0  # L
    d_model: int = 0  # d, if head_dim is d_model / n_heads
    n_heads: int = 0
    head_dim: int = 0  # n_heads x head_dim is the width of all queries, whatever d_model is
    max_seq_len: int = 0  # S

    def check(self) -> None:
        """UserError if something is missing for 12 L d S."""
        if not any(vars(self).values()):
            return
        required = {
            "n_layers": self.n_layers,
            "max_seq_len": self.max_seq_len,
            "d_model": self.width or self.head_dim,
            "n_heads": self.n_heads or not self.head_dim,
        }
        missing = " ".join(f"--{name}=..." for name, value in required.items() if not value)
        require(not missing, f"the FLOPs of attention, 12 L d S, need {missing}")

    @property
    def width(self) -> int:
        """Of all heads together."""
        return self.n_heads * self.head_dim or self.d_model

    @property
    def l_d_s(self) -> int:
        """L d S; 0 if attention is not counted."""
        return self.n_layers * self.width * self.max_seq_len


@dataclass
class Recomputation:
    """What is computed twice, which HFU counts."""

    activation_checkpointing: Checkpointing = "none"  # full: forwards are computed again
    recompute_every: int = 1  # in every k-th block


# --------------------------------------------------------------------------------------------------
# The report


def find_peak(args: FlopsArgs) -> tuple[str, float | None, float | None]:
    """(name of the device, its peak in FLOP/s, the share of it that large matmuls reach).

    Both numbers are None if unknown. `device = "cpu"` in a config file means this machine. It is
    asked only if a speed was given or the peak is to be measured, since that imports torch.
    """
    row = None
    if args.device not in devices.THIS_MACHINE:
        row = devices.by_name(args.device)
    if isinstance(args.peak_tflops, float):
        return row.name if row else "the device", args.peak_tflops * 1e12, None
    if row:
        peak = row.bf16_tflops and row.bf16_tflops * 1e12
        return row.name, peak, row.reachable
    if args.tokens_per_second or args.peak_tflops == "measure":
        return peak_of_this_machine(args)
    return "an unnamed device (no --device)", None, None


def peak_of_this_machine(args: FlopsArgs) -> tuple[str, float | None, float | None]:
    """`find_peak` for the GPU of this machine, or its CPU if it has none or `--device=cpu`."""
    import torch

    use_gpu = torch.cuda.is_available() and args.device in ("auto", "cuda")
    device = torch.device("cuda" if use_gpu else "cpu")
    if args.peak_tflops == "measure":
        measured = devices.measure_peak(device, torch.bfloat16)
        return "this machine, measured in bf16", measured, None
    row = devices.identify(device)
    peak = devices.peak_flops("auto", device, torch.bfloat16)
    return "this machine", peak, row and row.reachable


def counts(cfg: MPTConfig, recomputation: Recomputation) -> dict[str, tuple[str, float, float]]:
    """{convention: (formula, FLOPs per token, the same with what is recomputed)}."""
    mode, every = recomputation.activation_checkpointing, recomputation.recompute_every
    return {
        name: (
            formula,
            train_flops_per_token(cfg, name),
            hardware_flops_per_token(cfg, mode, every, name),
        )
        for name, formula in FORMULAS.items()
    }


def counts_of_size(
    n_params: int, shape: ShapeArgs, mode: str
) -> dict[str, tuple[str, float, float]]:
    """`counts` without a model: 6 N, and with its attention if `shape` has that.

    mode: of activation checkpointing.
    """
    formulas = {**FORMULAS, "6nd": "6 N, no attention"}
    names = formulas if shape.l_d_s else ["6nd"]
    counted = {}
    for name in names:
        forward = 2 * n_params + ATTENTION.get(name, 0) * shape.l_d_s
        forwards = 4 if mode == "full" else 3
        counted[name] = formulas[name], 3 * forward, forwards * forward
    return counted


def report(cfg: MPTConfig | None, counted: dict[str, tuple], mode: str, args: FlopsArgs) -> dict:
    """All figures. `flops_per_token`, `mfu` and `hfu` are those of the first convention.

    counted: what `counts` returns. mode: of activation checkpointing.
    """
    device, peak, reachable = find_peak(args)
    rate = args.tokens_per_second / args.devices  # of one device
    conventions = {
        name: {
            "formula": formula,
            "flops_per_token": once,
            "tflops_per_device": rate * once / 1e12,
            "mfu": peak and rate * once / peak,
            "hfu": peak and rate * with_recomputed / peak,
        }
        for name, (formula, once, with_recomputed) in counted.items()
    }
    first = next(iter(conventions.values()))
    figures = {
        "n_params": n_params(cfg) if cfg else args.n_params,
        "params": params_by_part(cfg) if cfg else {},
        "device": device,
        "devices": args.devices,
        "peak_tflops": peak and peak / 1e12,
        "reachable": reachable,
        "tokens_per_second": args.tokens_per_second,
        "activation_checkpointing": mode,
        "convention": first["formula"],
        "flops_per_token": first["flops_per_token"],
        "tflops_per_device": first["tflops_per_device"],
        "mfu": first["mfu"],
        "hfu": first["hfu"],
        "mfu_of_reachable": first["mfu"] and reachable and first["mfu"] / reachable,
        "conventions": conventions,
    }
    return {**figures, "doubt": doubt(figures)}


def doubt(figures: dict) -> str:
    """What is wrong with a speed above what the device reaches; empty if it is not. See `report`.

    With long sequences that may be the masked half of attention, which 12 L d S counts as well.
    """
    hfu, reachable = figures["hfu"], figures["reachable"] or 1
    if not hfu or hfu <= reachable:
        return ""
    causal = figures["conventions"].get("causal", figures)["hfu"]
    if causal <= reachable:
        masked = "that counts the masked half of attention, which kernels skip"
        return f"{masked}: without it, as causal counts, HFU is {causal:.2%}"
    fix = "are --devices (an MI250 card is two) and --tokens_per_second (of all) right?"
    if hfu > 1:
        return f"that is above the peak: {fix}"
    share = f"{hfu / reachable:.0%} of what large matmuls reach ({reachable:.0%} of the peak)"
    return f"that is {share}: {fix}"


# --------------------------------------------------------------------------------------------------
# The report as text


def table(cfg: MPTConfig | None, figures: dict) -> str:
    """The report, for a person to read."""
    model = [*model_lines(cfg, figures), ""] if cfg else []
    return "\n".join([*model, *convention_lines(figures)])


def model_lines(cfg: MPTConfig, figures: dict) -> list[str]:
    """The model's shape, and its parameters by part."""
    shape = f"{cfg.n_layers} layers, {cfg.n_heads} heads, sequence {cfg.max_seq_len}"
    lines = [f"d_model {cfg.d_model}, {shape}", "", f"{'parameters':<24}{'number':>18}{'share':>9}"]
    all_params = figures["n_params"]
    for name, n in [*figures["params"].items(), ("all (N)", all_params)]:
        if n:
            lines.append(f"  {name:<22}{n:>18,}{n / all_params:>9.2%}")
    return lines


def convention_lines(figures: dict) -> list[str]:
    """Each convention's FLOPs, and its MFU and HFU, or the speed that would be an MFU of 100 %."""
    peak = figures["peak_tflops"]
    has_speed = bool(figures["tokens_per_second"])
    heads = ["GFLOP a token"]
    if has_speed:
        heads += ["TFLOP/s each", "MFU", "HFU"]
    elif peak:
        heads += ["tokens/s at MFU 100 %"]
    widths = [max(len(head), 7) + 2 for head in heads]

    def aligned(cells: list[str]) -> str:
        """The cells, each as wide as its head."""
        return "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))

    lines = [f"{'convention':<20}{aligned(heads)}"]
    for name, row in figures["conventions"].items():
        cells = [f"{row['flops_per_token'] / 1e9:,.3f}"]
        if has_speed:
            cells += [f"{row['tflops_per_device']:.2f}"]
            cells += [f"{row['mfu']:.2%}", f"{row['hfu']:.2%}"] if peak else ["n/a", "n/a"]
        elif peak:
            cells += [f"{peak * 1e12 / row['flops_per_token']:,.0f}"]
        lines.append(f"  {name:<18}{aligned(cells)}  {row['formula']}")
    return [*lines, "", *device_lines(figures)]


def device_lines(figures: dict) -> list[str]:
    """What 100 % is, and a warning if the run is above what the device reaches."""
    device, peak = figures["device"], figures["peak_tflops"]
    if peak is None:
        fix = "set --device=mi250 (for example) or --peak_tflops=NUMBER"
        return [f"MFU n/a: no bf16 peak known for {device}, {fix}"]

    line = f"{device}: {peak:.6g} TFLOP/s peak per torch device"
    if figures["tokens_per_second"]:
        line += f", {figures['tokens_per_second']:,.6g} tokens/s on {figures['devices']}"
    if figures["doubt"]:
        return [line, figures["doubt"]]
    if figures["mfu_of_reachable"]:
        reach = f"large matmuls reach {figures['reachable']:.0%} of that"
        share = f"this run {figures['mfu_of_reachable']:.2%} of what they reach"
        return [line, f"{reach}, {share} ({figures['convention']})"]
    return [line]


# --------------------------------------------------------------------------------------------------
# The program


def flag_name(text: str) -> str:
    """--device=mi250 -> device"""
    return text.lstrip("-").split("=")[0]


def refuse_other_programs_flags(argv: list[str]) -> None:
    """UserError that names the program which has this flag."""
    flags = [flag_name(text) for text in argv if text.startswith("-")]
    for flag in flags:
        if flag in CONVENTION_FLAGS:
            words = frozen_size(argv) if has_size(argv) else argv
            command = f"python -m planning.conventions {config.shell(*words)}"
            raise UserError(f"--{flag} is a flag of another program: {command}")
        if flag == "check":
            command = "pytest tests/planning/test_matmuls.py"
            raise UserError(f"--check is now a test, that torch counts the same: {command}")


def refuse_adapters(argv: list[str]) -> None:
    """UserError if a config file sets lora_rank: it names the program that counts adapters."""
    for path in argv:
        if not path.startswith("-") and config.read_file(path).get("lora_rank"):
            command = f"python -m planning.conventions {config.shell(*argv)}"
            raise UserError(f"{path} trains adapters, which another program counts: {command}")


def refuse_model(argv: list[str], model_keys: set[str]) -> None:
    """UserError if argv has a config file, or sets one of `model_keys`, beside --n_params.

    Attention's keys, those of ShapeArgs, may be set.
    """
    if argv != frozen_size(argv):
        command = f"python -m planning.conventions {config.shell(*frozen_size(argv))}"
        raise UserError(f"--n_params has no layers to adapt, count its frozen weights: {command}")
    old_names = {old for old, new in config.RENAMED.items() if new in model_keys}
    keys = (model_keys | old_names) - {field.name for field in fields(ShapeArgs)}
    model = [text for text in argv if not text.startswith("-") or flag_name(text) in keys]
    problem = "--n_params takes the place of a model: remove it or"
    require(not model, f"{problem} {config.shell(*model)}")


def frozen_size(argv: list[str]) -> list[str]:
    """argv with --frozen in place of adapters: their own FLOPs, which need a model, are few."""
    others = [text for text in argv if not flag_name(text).startswith("lora_")]
    if len(others) == len(argv) or "--frozen" in argv:
        return others
    return [*others, "--frozen"]


def has_size(argv: list[str]) -> bool:
    """Is --n_params given in place of a model?"""
    return any(flag_name(text) == "n_params" for text in argv)


def main(argv: list[str]) -> None:
    """Print the report for the config files and flags in argv."""
    refuse_other_programs_flags(argv)
    refuse_adapters(argv)
    if has_size(argv):
        model_keys = {field.name for field in fields(MPTConfig)}
        refuse_model(argv, model_keys | {"recompute_every"})
        shape, recomputation, args = config.load(argv, ShapeArgs, Recomputation, FlopsArgs)
        cfg, mode = None, recomputation.activation_checkpointing
        counted = counts_of_size(args.n_params, shape, mode)
    else:
        cfg, recomputation, args = config.load(argv, MPTConfig, Recomputation, FlopsArgs)
        mode = recomputation.activation_checkpointing
        counted = counts(cfg, recomputation)
    figures = report(cfg, counted, mode, args)
    print(json.dumps(figures, indent=2) if args.json else table(cfg, figures))


if __name__ == "__main__":
    config.run(main)
