"""Parameters and FLOPs of an MPT model in closed form, and the share of the peak a run reaches.

    FLOPs of training on one token = 6 N + 12 L d S

N: parameters, without an untied input embedding, which is a lookup. L: layers. d: width of all
heads together. S: sequence length; of a sliding window the keys that it shows, W + 1. A weight
costs 2 FLOPs a token forward and 4 backward, hence 6 N; frozen, 4 N. Attention costs 2 S d for q.k
and 2 S d for p.v per layer and token forward, and three times that with the backward: 12 L d S.
Low-rank adapters are counted matmul by matmul.

    MFU = FLOPs per token x tokens/s / (devices x peak)         model FLOPs utilization: useful work
    HFU = 4/3 MFU with full activation checkpointing, else MFU  hardware FLOPs: two forwards

That is the convention of LLM Foundry, which published MPT's throughput. A share of the peak says
little without its convention: CONVENTIONS has others, and the program prints the MFU by each.

    python flops.py configs/mpt7b.py --device=mi250 --tokens_per_second=1922

Or from a size in place of a model; --n_layers, --d_model and --max_seq_len add its attention:

    python flops.py --n_params=405e9 --frozen --device=mi300x --devices=8 --tokens_per_second=34.1

`flops_by_pass` counts each matmul, as torch does.
"""

import json
from dataclasses import dataclass
from typing import NamedTuple, get_args

import config
import devices
import program
from config import (
    Checkpointing,
    Float,
    Int,
    Kernel,
    MPTConfig,
    TrainConfig,
    blocks_of,
)
from launch import parser
from program import require

# How many keys a query of attention is counted with, by attn_impl. Whoever adds an attention that
# computes another function (attention.VARIANTS) adds a row: MFU counts it. The planner does not
# know it, and refuses it.
ATTENDED_KEYS = dict.fromkeys(get_args(Kernel), lambda cfg: cfg.keys_seen)


def attended_keys(cfg: MPTConfig) -> int:
    """The keys of a query: S of the formula. UserError for an attention without a row above."""
    unknown = f"flops.py does not know attn_impl={cfg.attn_impl}: add it to ATTENDED_KEYS"
    require(cfg.attn_impl in ATTENDED_KEYS, unknown)
    return ATTENDED_KEYS[cfg.attn_impl](cfg)


# --------------------------------------------------------------------------------------------------
# Parameters


def params_by_part(cfg: MPTConfig) -> dict[str, int]:
    """{part: number of parameters}, summed over the layers. All biases are one part."""
    d = cfg.d_model
    shapes = cfg.linear_layers()
    linear = {name: cfg.n_layers * n_out * n_in for name, (n_out, n_in) in shapes.items()}
    kv = cfg.n_kv_heads * cfg.head_dim  # width of all keys, and of all values
    norms = 2 * d
    if cfg.qk_ln:
        norms += d + kv
    if cfg.qk_gn:
        norms += 2 * cfg.head_dim
    all_norms = cfg.n_layers * norms + d
    linear_biases = cfg.n_layers * sum(n_out for n_out, _ in shapes.values())
    norm_biases = 0 if cfg.norm_type.endswith("rmsnorm") else all_norms
    return {
        "wte": cfg.vocab_size * d,
        "wpe": cfg.max_seq_len * d if cfg.learned_positions else 0,
        **linear,
        "norms": all_norms,
        "biases": 0 if cfg.no_bias else linear_biases + norm_biases,
        "lm_head": 0 if cfg.tie_word_embeddings else cfg.vocab_size * d,
    }


def n_params(cfg: MPTConfig) -> int:
    """Number of parameters, a tied embedding counted once."""
    return sum(params_by_part(cfg).values())


# --------------------------------------------------------------------------------------------------
# What is trained


def checkpointing_of(train: TrainConfig, i: int) -> Checkpointing:
    """The activation checkpointing of block i."""
    return train.activation_checkpointing if i % train.recompute_every == 0 else "none"


def adapted_blocks(cfg: MPTConfig, train: TrainConfig) -> range:
    """The blocks that have adapters. UserError if more are asked for than the model has."""
    last = train.lora_last_blocks
    few = f"lora_last_blocks {last} is more than n_layers {cfg.n_layers}"
    require(last <= cfg.n_layers, f"{few}: lower it")
    return cfg.adapted_blocks(last) if train.lora_rank else range(0)


def check_adapters(cfg: MPTConfig, train: TrainConfig) -> None:
    """UserError unless the adapters that a run asks for fit the model, and how it is cut.

    A rank too high, more blocks than the model has, an idle stage, biases where there are none.
    """
    rank = train.lora_rank
    if not rank:
        return
    shapes = cfg.linear_layers()
    for name in cfg.adapted_layers(train.lora_targets):
        full = min(shapes[name])
        problem = f"lora_rank {rank} is no low rank for {name}, whose weight has rank {full}"
        require(rank < full, f"{problem}: lower it, or train all weights with --lora_rank=0")
    nothing = f"lora_train={train.lora_train}: with no_bias the model has no biases"
    trains_none = cfg.no_bias and "biases" in train.lora_train
    require(not trains_none, f"{nothing}: remove them from it")

    begins_there = adapted_blocks(cfg, train)[0] in blocks_of(cfg.n_layers, 0, train.pp)
    idle = "the first pipeline stage would have nothing to train"
    require(
        begins_there, f"lora_last_blocks {train.lora_last_blocks}: {idle}: set it to 0, or --pp=1"
    )
    masks = "lora_dropout would draw other masks on each tensor rank"
    require(train.tp == 1 or not train.lora_dropout, f"{masks}: set it to 0, or --tp=1")


def n_lora(cfg: MPTConfig, train: TrainConfig) -> int:
    """Number of parameters of all adapters: A (rank x in) and B (out x rank) of each."""
    shapes = cfg.linear_layers()
    names = cfg.adapted_layers(train.lora_targets)
    of_block = sum(train.lora_rank * sum(shapes[name]) for name in names)
    return len(adapted_blocks(cfg, train)) * of_block


def trains_vectors(cfg: MPTConfig, train: TrainConfig) -> bool:
    """Do norms or biases train beside the adapters? If so, they do in every block."""
    return "norms" in train.lora_train or ("biases" in train.lora_train and not cfg.no_bias)


def first_backward(cfg: MPTConfig, train: TrainConfig) -> int:
    """The first block that has a backward: the first one with anything to train."""
    adapters_alone = train.lora_rank and not trains_vectors(cfg, train)
    return adapted_blocks(cfg, train).start if adapters_alone else 0


# --------------------------------------------------------------------------------------------------
# Matmuls, one by one
#
#     y = x W          forward, 2 FLOPs per weight and token    a weight of d x 4d: 8 d^2
#     dx = dy W^T      gradient of the input, as many           unless nothing below it trains
#     dW = x^T dy      gradient of the weight, as many          unless the weight is frozen
#
# Attention has two without a weight, q k^T and p v, of 2 d FLOPs for each query and key; the
# backward has two for each of them. So training costs as much as three forwards. If the weights are
# frozen, linear layers cost two forwards, attention still three. Low-rank adapters (lora.py), A
# (r x in) and B (out x r) beside a frozen weight, cost three of their own; a block below the first
# adapter costs its forward alone. That is exactly what torch's FlopCounterMode counts
# (tests/planning/test_matmuls.py), with the whole square of scores.

# The linear layers of a block: {module: part}.
LINEARS = {
    "Wqkv": "QKV",
    "out_proj": "projection",
    "gate_proj": "MLP gate",
    "up_proj": "MLP up",
    "down_proj": "MLP down",
}
ATTENTION = ("scores", "attention x V")
PASSES = ("forward", "input gradient", "weight gradient", "recomputed")


def block_forward(cfg: MPTConfig) -> dict[str, int]:
    """{part: FLOPs per token} of one block's forward, in its order."""
    linear = {
        LINEARS[name]: 2 * n_out * n_in for name, (n_out, n_in) in cfg.linear_layers().items()
    }
    attention = 2 * cfg.d_model * attended_keys(cfg)  # of all queries: grouped heads save nothing
    of_attention = dict.fromkeys(ATTENTION, attention)
    return {"QKV": linear.pop("QKV"), **of_attention, **linear}


def block_by_pass(cfg: MPTConfig, train: TrainConfig, i: int) -> dict[str, dict[str, int]]:
    """{part: {pass: FLOPs per token}} of block i. Booleans below count as 0 or 1.

    Nothing before the first adapter needs a backward. The linear layer beside the first adapter,
    and that adapter's A, need no gradient of their input. Full activation checkpointing does not
    repeat a block's last matmul, that of down_proj's own weight: the backward does not need its
    output. The selective kind repeats only products with an adapter's B.
    """
    adapted = cfg.adapted_layers(train.lora_targets) if i in adapted_blocks(cfg, train) else []
    adapted = {LINEARS[name]: cfg.linear_layers()[name] for name in adapted}
    first = first_backward(cfg, train)
    # If norms or biases train, the input of every part needs a gradient.
    always = not train.lora_rank or trains_vectors(cfg, train) or i > first
    recomputes = checkpointing_of(train, i) if i >= first else "none"
    parts = {}
    of_adapters = dict.fromkeys(PASSES, 0)

    for part, forward in block_forward(cfg).items():
        is_attention = part in ATTENTION
        factors = 2 if is_attention else 1  # attention's two factors are both inputs
        below = set(parts)
        if part == "MLP up":
            below -= {"MLP gate"}  # both have the same input
        needs_grad = always or not below.isdisjoint(adapted)
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


# --------------------------------------------------------------------------------------------------
# FLOPs


class Convention(NamedTuple):
    """How somebody counts the FLOPs of training on a token."""

    formula: str
    forward: int  # FLOPs of attention's forward / (L d S)
    both_passes: int  # of its forward and backward
    matmuls_only: bool = False  # M instead of N: the weights of linear layers and of the logits


CONVENTIONS = {
    "foundry": Convention("LLM Foundry: 6 N + 12 L d S", 4, 12),  # PaLM, nanoGPT, torchtitan, too
    "causal": Convention("Megatron-LM today, no masked scores: 6 N + 6 L d S", 2, 6),
    "lingua": Convention("Lingua, causal, the flash backward's scores too: 6 N + 7 L d S", 2, 7),
    "flopcounter": Convention("FlopCounterMode on flash SDPA: 6 N + 14 L d S", 4, 14),
    "6nd": Convention("no attention: 6 N", 0, 0),
    "megatron": Convention("arXiv 2205.05198, M weights in matmuls: 6 M + 12 L d S", 4, 12, True),
}
CONVENTION = CONVENTIONS["foundry"].formula
LORA_CONVENTION = "LoRA: every matmul of its step, at most 4 N + 6 N_lora + 12 L d S"


def flops_of(
    cfg: MPTConfig, convention: str = "foundry", train: TrainConfig | None = None, frozen=False
) -> tuple[float, float]:
    """FLOPs of training on a token, and the same with the forwards that are computed again.

    convention: a key of CONVENTIONS. train: without it all weights train, and nothing is computed
    again. frozen: no weight trains, but something before block 0 does. UserError if more blocks are
    to be adapted than there are.
    """
    row = CONVENTIONS[convention]
    train = train or TrainConfig()
    if train.lora_rank:
        return flops_with_adapters(cfg, row, train)

    L = cfg.n_layers
    parts = params_by_part(cfg)
    lookup = 0 if cfg.tie_word_embeddings else parts["wte"]
    n = n_params(cfg) - lookup
    n_again = n
    if row.matmuls_only:
        n_again = sum(parts[name] for name in cfg.linear_layers())
        n = n_again + cfg.vocab_size * cfg.d_model
    again = [i for i in range(L) if checkpointing_of(train, i) == "full"]
    l_d_s = L * cfg.d_model * attended_keys(cfg)
    return flops_of_size(n, l_d_s, row, frozen, len(again) / L, n_again)


def flops_of_size(
    n: int, l_d_s: int, row: Convention, frozen: bool, again: float, n_again: int
) -> tuple[float, float]:
    """`flops_of` n parameters. l_d_s: L d S.

    again: the share of the forward of n_again parameters that is computed again.
    """
    once = (4 if frozen else 6) * n + row.both_passes * l_d_s
    return once, once + again * (2 * n_again + row.forward * l_d_s)


def flops_with_adapters(cfg: MPTConfig, row: Convention, train: TrainConfig) -> tuple[int, int]:
    """`flops_of` a run with adapters, which no convention has: every matmul of its step.

    The convention counts attention: the matmuls of `flops_by_pass` are 4 and 12 L d S.
    """
    once = again = 0
    for part, passes in flops_by_pass(cfg, train).items():
        forward, recomputed = passes["forward"], passes["recomputed"]
        backward = passes["input gradient"] + passes["weight gradient"]
        if part in ATTENTION:
            forward = forward * row.forward // 4
            recomputed = recomputed * row.forward // 4
            backward = backward * (row.both_passes - row.forward) // 8
        once += forward + backward
        again += recomputed
    return once, once + again


def convention_of(train: TrainConfig) -> str:
    """What `flops_of` counts of a run unless another convention is asked for, as text."""
    return LORA_CONVENTION if train.lora_rank else CONVENTION


def train_flops_per_token(cfg: MPTConfig, convention: str = "foundry") -> int:
    """FLOPs of training on a token if all weights train: 6 N + 12 L d S, or by another convention.

    convention: a key of CONVENTIONS.
    """
    return flops_of(cfg, convention)[0]


# --------------------------------------------------------------------------------------------------
# Utilization


def utilization(
    flops_per_token: float, tokens_per_second: float, n_devices: int, peak_flops: float | None
) -> float | None:
    """The share of the peak that these FLOPs are, 0 to 1; None if the peak is unknown.

    tokens_per_second: of all devices together. peak_flops: FLOP/s of one device, or None.
    """
    if peak_flops is None:
        return None
    return flops_per_token * tokens_per_second / (n_devices * peak_flops)


def mfu(
    cfg: MPTConfig, tokens_per_second: float, n_devices: int, peak_flops: float | None
) -> float | None:
    """Model FLOPs utilization, 0 to 1; None if the peak is unknown. Arguments: `utilization`."""
    return utilization(train_flops_per_token(cfg), tokens_per_second, n_devices, peak_flops)


def hfu(
    cfg: MPTConfig, tokens_per_second, n_devices, peak_flops, activation_checkpointing, every=1
) -> float | None:
    """Hardware FLOPs utilization; None if the peak is unknown.

    That is `mfu`, times 4/3 if activation_checkpointing is "full" for all blocks. every: it is for
    every k-th block. Other arguments: `utilization`.
    """
    train = TrainConfig(activation_checkpointing=activation_checkpointing, recompute_every=every)
    _, per_token = flops_of(cfg, train=train)
    return utilization(per_token, tokens_per_second, n_devices, peak_flops)


def doubt(hfu: float, causal: float, reachable: float | None = None) -> str:
    """What is wrong with a share of the peak that no run can have; empty if one can.

    causal: the same without the masked half of attention. reachable: what large matmuls reach.
    """
    most = reachable or 1
    if hfu <= most:
        return ""
    if causal <= most:
        masked = "that counts the masked half of attention, which kernels skip"
        return f"{masked}: without it, as causal counts, HFU is {causal:.2%}"
    fix = "are --devices (an MI250 card is two) and --tokens_per_second (of all) right?"
    if hfu > 1:
        return f"that is above the peak: {fix}"
    return f"that is {hfu / most:.0%} of what large matmuls reach ({most:.0%} of the peak): {fix}"


# --------------------------------------------------------------------------------------------------
# The program's settings


@dataclass
class FlopsArgs:
    """What to compute the utilization of."""

    device: str = "auto"  # mi250, ... (python devices.py lists them)
    tokens_per_second: Float[1e-6, 10**15] = 0  # measured, of all devices together
    devices: Int[1, 10**6] = 1  # torch devices: an MI250 card is two
    convention: str = "foundry"  # of the MFU in JSON: foundry, causal, 6nd, megatron, ...
    frozen: bool = False  # no weight trains; something before block 0 does
    n_params: Int[1, 10**15] | None = None  # in place of a model; n_layers and others add attention
    json: bool = False  # print JSON

    def check(self) -> None:
        """UserError if the convention is unknown."""
        parser.split_names("convention", self.convention, CONVENTIONS)


@dataclass
class ShapeArgs:
    """The attention of a model of which only --n_params is known; 0: not given."""

    n_layers: Int[1, 10**4] = 0  # L
    d_model: Int[1, 2**20] = 0  # d: the width of all heads together
    max_seq_len: Int[1, 2**24] = 0  # S

    def l_d_s(self) -> int:
        """L d S; 0 if nothing is given. UserError if something is missing."""
        missing = " ".join(f"--{name}=..." for name, value in vars(self).items() if not value)
        complete = not missing or not any(vars(self).values())
        require(complete, f"the FLOPs of attention, 12 L d S, need {missing}")
        return self.n_layers * self.d_model * self.max_seq_len


# --------------------------------------------------------------------------------------------------
# The report


def counts_of_size(
    n: int, shape: ShapeArgs, train: TrainConfig, frozen: bool
) -> dict[str, tuple[int, int]]:
    """{convention: `flops_of` n parameters}, for the conventions that need no model.

    The adapters of --lora_rank are left out: well under 1 % of a model. UserError if some blocks
    are to differ from others.
    """
    differ = train.lora_last_blocks or train.lora_train or train.recompute_every > 1
    fix = "name a config file in place of --n_params"
    require(not differ, f"which blocks train or are computed again needs a model: {fix}")
    l_d_s = shape.l_d_s()
    counts = {}
    for name, row in CONVENTIONS.items():
        if name == "6nd" or (l_d_s and not row.matmuls_only):
            again = train.activation_checkpointing == "full"
            no_gradient = frozen or bool(train.lora_rank)
            counts[name] = flops_of_size(n, l_d_s, row, no_gradient, again, n)
    return counts


def find_peak(args: FlopsArgs, train: TrainConfig) -> tuple[str, float | None, float | None]:
    """(name of the device, its peak in FLOP/s, the share of it that large matmuls reach).

    None if unknown. The device of a training run, such as `device = "cpu"` in a config file, names
    none.
    """
    row = None if args.device in devices.THIS_MACHINE else devices.by_name(args.device)
    name = row.name if row else "an unnamed device"
    fix = "flops.py measures nothing: set --peak_tflops=NUMBER"
    require(train.peak_tflops != "measure", fix)
    if isinstance(train.peak_tflops, float):
        return name, train.peak_tflops * 1e12, None
    if row and row.bf16_tflops:
        return name, row.bf16_tflops * 1e12, row.reachable
    return name, None, None


def report(
    cfg: MPTConfig | None, train: TrainConfig, counted: dict[str, tuple], args: FlopsArgs
) -> dict:
    """All figures. `flops_per_token`, `mfu` and `hfu` are those of --convention.

    counted: {convention: what `flops_of` returns}.
    """
    device, peak, reachable = find_peak(args, train)
    rate = args.tokens_per_second / args.devices  # of one device
    conventions = {}
    for name, (once, with_recomputed) in counted.items():
        formula = CONVENTIONS[name].formula
        if args.frozen or train.lora_rank:
            most, adapters = ("at most ", " + 6 N_lora") if train.lora_rank and cfg else ("", "")
            for weights in ("N", "M"):
                formula = formula.replace(f"6 {weights}", f"{most}4 {weights}{adapters}")
        conventions[name] = {
            "formula": formula,
            "flops_per_token": once,
            "tflops_per_device": rate * once / 1e12,
            "mfu": peak and rate * once / peak,
            "hfu": peak and rate * with_recomputed / peak,
        }
    has_it = args.convention in conventions or args.convention == "foundry"
    require(has_it, f"--convention={args.convention} needs a model, or at least its attention")
    first = conventions.get(args.convention) or conventions["6nd"]
    causal = conventions.get("causal", first)["hfu"]
    return {
        "n_params": n_params(cfg) if cfg else args.n_params,
        "params": params_by_part(cfg) if cfg else {},
        "n_lora": n_lora(cfg, train) if cfg else None,
        "device": device,
        "devices": args.devices,
        "peak_tflops": peak and peak / 1e12,
        "reachable": reachable,
        "tokens_per_second": args.tokens_per_second,
        "activation_checkpointing": train.activation_checkpointing,
        "convention": first["formula"],
        **{name: value for name, value in first.items() if name != "formula"},
        "mfu_of_reachable": first["mfu"] and reachable and first["mfu"] / reachable,
        "conventions": conventions,
        "doubt": doubt(first["hfu"], causal, reachable) if peak else "",
    }


# --------------------------------------------------------------------------------------------------
# The report as text


def params_table(cfg: MPTConfig, figures: dict) -> str:
    """The model's shape, and its parameters by part."""
    total = figures["n_params"]
    counts = {**figures["params"], "all (N)": total, "adapters (N_lora)": figures["n_lora"]}
    rows = [(name, f"{n:,}", f"{n / total:.2%}") for name, n in counts.items() if n]
    shape = f"{cfg.n_layers} layers, {cfg.n_heads} heads, sequence {cfg.max_seq_len}"
    if cfg.window is not None:
        shape += f", S = {cfg.keys_seen} keys in the window"
    table = program.table(("parameters", "number", "share"), rows)
    return f"d_model {cfg.d_model}, {shape}\n\n{table}\n"


def convention_table(figures: dict) -> str:
    """Each convention's FLOPs, with the MFU and HFU, or the speed that would be an MFU of 100 %."""
    peak, rate = figures["peak_tflops"], figures["tokens_per_second"]
    rows = []
    for name, row in figures["conventions"].items():
        cells = {"convention": name, "GFLOP a token": f"{row['flops_per_token'] / 1e9:,.3f}"}
        if rate:
            cells["TFLOP/s each"] = f"{row['tflops_per_device']:.2f}"
            cells["MFU"] = f"{row['mfu']:.2%}" if peak else "n/a"
            cells["HFU"] = f"{row['hfu']:.2%}" if peak else "n/a"
        elif peak:
            cells["tokens/s at MFU 100 %"] = f"{peak * 1e12 / row['flops_per_token']:,.0f}"
        rows.append({**cells, "counts": row["formula"]})
    return program.table(rows[0], [row.values() for row in rows])


def device_lines(figures: dict) -> str:
    """What 100 % is, and a warning if the run is above what the device reaches."""
    device, peak, reached = (figures[key] for key in ("device", "peak_tflops", "mfu_of_reachable"))
    if peak is None:
        fix = "set --device=mi250 (for example) or --peak_tflops=NUMBER"
        return f"MFU n/a: no bf16 peak known for {device}, {fix}"
    line = f"{device}: {peak:.6g} TFLOP/s peak per torch device"
    if figures["tokens_per_second"]:
        line += f", {figures['tokens_per_second']:,.6g} tokens/s on {figures['devices']}"
    if figures["doubt"]:
        return f"{line}\n{figures['doubt']}"
    if reached:
        reach = f"large matmuls reach {figures['reachable']:.0%} of that"
        line += f"\n{reach}, this run {reached:.2%} of what they reach ({figures['convention']})"
    return line


# --------------------------------------------------------------------------------------------------
# The program


def flag_name(text: str) -> str:
    """--device=mi250 -> device"""
    return text.lstrip("-").split("=")[0]


def with_base(argv: list[str]) -> list[str]:
    """argv with a base for the adapters that it asks for: a run needs one, no formula reads it."""
    asks_for_adapters = "lora_rank" in map(flag_name, argv)
    return ["--init_from=any", *argv] if asks_for_adapters else argv


def main(argv: list[str]) -> None:
    """Print the report for the config files and flags in argv."""
    cfg = None
    argv = parser.join_flags(with_base(argv), MPTConfig, TrainConfig, FlopsArgs)
    if "n_params" in map(flag_name, argv):
        files = [word for word in argv if not word.startswith("-")]
        require(not files, f"--n_params takes the place of a model: remove {' '.join(files)}")
        shape, train, args = config.load(argv, ShapeArgs, TrainConfig, FlopsArgs)
        counted = counts_of_size(args.n_params, shape, train, args.frozen)
    else:
        cfg, train, args = config.load(argv, MPTConfig, TrainConfig, FlopsArgs)
        counted = {name: flops_of(cfg, name, train, args.frozen) for name in CONVENTIONS}

    figures = report(cfg, train, counted, args)
    if args.json:
        print(json.dumps(figures, indent=2))
        return
    if cfg:
        print(params_table(cfg, figures))
    print(convention_table(figures), device_lines(figures), sep="\n\n")


if __name__ == "__main__":
    program.run(main)
