"""Checks lesson 5's exercise against flops.py, published figures and planning/.

    python -m lessons check 5

Predicted seconds and the plan may differ from the planner's by its own error band
(planning/certainty.py): as far as published runs of that kind were from their predictions.
"""

import csv
from dataclasses import replace
from pathlib import Path

import flops
from config import MPTConfig, TrainConfig
from lessons.answers import close
from planning import certainty, memory, step_time
from planning.fleet import Fleet, FleetArgs, fleet_of

TABLE = Path(__file__).parents[2] / "bench/results/mpt_single_node_throughput.csv"
SHAPES = {
    "mpt-125m": (768, 12, 12),
    "mpt-1b": (2048, 16, 24),
    "mpt-3b": (2560, 20, 32),
    "mpt-7b": (4096, 32, 32),
}
FULL_SHARD = TrainConfig(sharding="FULL_SHARD", activation_checkpointing="none")
MODELS = ("mpt-1b", "mpt-3b", "mpt-7b")  # of the plan
BUDGET, CARDS, PRICE = 3000, 4, 1.50
ROOM = 0.92 * 64  # GiB of a device


def mpt(name: str) -> MPTConfig:
    """An MPT with sequences of 2048."""
    d_model, n_heads, n_layers = SHAPES[name]
    return MPTConfig(d_model=d_model, n_heads=n_heads, n_layers=n_layers, attn_impl="sdpa")


# --------------------------------------------------------------------------------------------------
# FLOPs and MFU


def check_training_flops(answer):
    """FLOPs of training on one token"""
    n, shape = 100, (3, 8, 5)  # layers, width, sequence: L d S = 120
    again = "one more forward: 2 n, and a third of the attention term"
    no_gradient = "frozen weights need no gradient of their own: 4 n; attention costs as ever"
    cases = [  # attention, frozen, recompute, expected, hint
        ("none", False, False, 600, "2 n forward, 4 n backward"),
        ("full", False, False, 600 + 12 * 120, "12 L d S"),
        ("causal", False, False, 600 + 6 * 120, "half of 12 L d S"),
        ("none", True, False, 400, no_gradient),
        ("full", True, False, 400 + 12 * 120, no_gradient),
        ("none", False, True, 800, again),
        ("full", False, True, 800 + 16 * 120, again),
        ("causal", True, True, 600 + 8 * 120, f"{again}; 4/3 holds only if nothing is frozen"),
    ]
    for attention, frozen, recompute, expected, hint in cases:
        settings = {"attention": attention, "frozen": frozen, "recompute": recompute}
        got = answer.call("training_flops", n, *shape, **settings)
        case = f"n=100, n_layers=3, width=8, seq_len=5 and {settings}"
        close(f"training_flops, for {case}", got, float(expected), 1e-6 * expected, hint)

    for name in SHAPES:
        m = mpt(name)
        got = answer.call("training_flops", flops.n_params(m), m.n_layers, m.d_model, 2048)
        expected = flops.train_flops_per_token(m)
        close(f"training_flops, for {name}", got, float(expected), 1e-6 * expected)


def check_mfu(answer):
    """MFU on LLM Foundry's published runs"""
    got = answer.call("mfu", 10.0, 3.0, 2, 60.0)
    close("mfu, for 10 FLOPs a token, 3 tokens/s, 2 devices of 60 FLOP/s", got, 0.25, 1e-9)
    with open(TABLE) as file:
        rows = list(csv.DictReader(file))
    for row in rows[::7]:
        n, n_layers, d_model = int(row["params"]), int(row["layers"]), int(row["d_model"])
        per_token = float(6 * n + 12 * n_layers * d_model * int(row["seq"]))
        peak_flops, speed = float(row["peak_tflops"]) * 1e12, int(row["tokens_s_gpu"])
        got = answer.call("mfu", per_token, 8.0 * speed, 8, peak_flops)
        case = f"{row['model']} on 8 {row['gpu']}, {8 * speed:,} tokens/s, seq_len={row['seq']}"
        published = float(row["mfu_pct"]) / 100
        close(f"mfu, for {case}", got, published, max(2e-4, published / speed))  # tokens/s are cut


def check_roofline(answer):
    """The roofline"""
    for m, k, n, size in ((1, 1, 1, 2), (2, 3, 4, 1), (1, 2048, 8192, 2), (8192, 2048, 8192, 4)):
        got = answer.call("matmul_intensity", m, k, n, size)
        expected = 2 * m * k * n / (size * (m * k + k * n + m * n))
        case = f"m={m}, k={k}, n={n}, bytes_per_number={size}"
        hint = "2 m k n FLOPs; three matrices, each moved once"
        close(f"matmul_intensity, for {case}", got, expected, 1e-6 * expected, hint)
    for intensity, expected in ((0.5, 1.0), (5.0, 10.0), (20.0, 30.0), (15.0, 30.0)):
        got = answer.call("attainable", intensity, 30.0, 2.0)
        close(f"attainable, for {intensity=}, peak 30 FLOP/s, 2 bytes/s", got, expected, 1e-9)


PUBLISHED = [  # function, the share, its argument, the share grows with it to this power, a hint
    ("palm_540b", 0.462, 238.3e3, 1, "its heads together are 48 x 256 wide, not d_model"),
    ("mpt_1b", 0.5986, 20_513, 1, "20,513 tokens/s are of one GPU: the peak of one belongs to it"),
    ("gpt_175b", 0.514, 13.75, -1, "MFU counts no second forward, but all products and the logits"),
]


def check_published(answer):
    """Three published MFUs: PaLM 540B, MPT-1B on A100, Megatron-LM's GPT of 175B"""
    # No message names the published share, or people would return it.
    for function, expected, usual, power, hint in PUBLISHED:
        got = answer.call(function)
        close(function, got, 0.5, 1e9)  # a number
        assert 0 < got <= 1, f"{function}: expected a share from 0 to 1, got {got:.4g}"
        off = f"{got:.2%} is too {'high' if got > expected else 'low'}"
        attention = "attention counts 12 L d S"
        assert abs(got - expected) <= 5.5e-4, f"{function}: {off}; {hint}; {attention}"
        twice = answer.call(function, 2 * usual)
        what = f"{function}({2 * usual:g}), which must follow from its argument"
        close(what, twice, got * 2.0**power, 1e-6)


# --------------------------------------------------------------------------------------------------
# Predictions


def as_dict(fleet: Fleet) -> dict:
    """A device in the words of the exercise."""
    device = fleet.device
    return {
        "peak_flops": device.bf16_tflops * 1e12,
        "reachable": device.reachable,
        "attention": step_time.attention_share(device, step_time.Constants()),
        "bandwidth": device.bandwidth_gbs * 1e9,
        "link": device.link_gbs * 1e9,
    }


def tolerance(m: MPTConfig, cfg: TrainConfig, fleet: Fleet) -> float:
    """How far a prediction may be off, as a share: the wider side of the planner's error band."""
    low, high, _ = certainty.band(m, cfg, fleet)
    return max(1 - low, high - 1)


def check_step_seconds(answer):
    """Seconds of a step, beside the planner's"""
    cases = [  # model, device, devices, microbatch, batch
        ("mpt-125m", "a100", 8, 16, 128),
        ("mpt-1b", "a100", 8, 8, 512),
        ("mpt-1b", "a100", 4, 8, 512),
        ("mpt-7b", "a100", 8, 6, 48),
        ("mpt-7b", "h100", 8, 6, 768),
        ("mpt-3b", "mi250", 8, 8, 512),
        ("mpt-7b", "mi250", 8, 1, 1536),
        ("mpt-7b", "mi250", 8, 3, 1536),
    ]
    for name, kind, n, size, batch in cases:
        m = mpt(name)
        cfg = replace(FULL_SHARD, microbatch_size=size, global_batch_size=batch)
        fleet = fleet_of(FleetArgs(device=kind, devices=n))
        shape = flops.n_params(m), m.n_layers, m.d_model, m.max_seq_len, m.vocab_size
        got = answer.call("step_seconds", *shape, batch, size, n, as_dict(fleet))
        close("step_seconds", got, 0.0, 1e12)  # a number
        parts = step_time.StepTime(m, cfg, fleet).parts()
        expected, within = parts["step"], tolerance(m, cfg, fleet)
        assert got > 0 and abs(expected / got - 1) <= within, (
            f"step_seconds: the planner has {expected:.4g} s for {name} on {n} {kind}, batch "
            f"{batch}, microbatches of {size}, but got {got:.4g}; they may be {within:.0%} apart. "
            f"The planner's parts: {', '.join(f'{part} {s:.3g}' for part, s in parts.items() if s)}"
        )


# --------------------------------------------------------------------------------------------------
# The plan


def check_plan(answer):
    """A plan for a node and 3,000 dollars"""
    got = answer.call("plan")
    names = ("microbatch_size", "tokens_per_second", "tokens", "days", "dollars")
    assert isinstance(got, dict), f"plan: expected a dictionary, got {type(got).__name__}"
    missing = {"model", *names} - got.keys()
    assert not missing, f"plan: {', '.join(sorted(missing))} missing"
    for name in names:
        close(f"plan's {name}", got[name], 0.0, 1e15)  # a number
        assert got[name] > 0, f"plan's {name}: expected more than 0, got {got[name]}"

    known = ", ".join(MODELS)
    assert got["model"] in list(MODELS), (
        f"plan's model: got {got['model']!r}, expected one of {known}"
    )
    m = mpt(got["model"])
    tokens = 20 * flops.n_params(m)
    close("plan's tokens, 20 a parameter", float(got["tokens"]), float(tokens), 0.01 * tokens)
    days = got["tokens"] / got["tokens_per_second"] / 86_400
    close("plan's days, your tokens and tokens/s", float(got["days"]), float(days), 0.01 * days)
    dollars = got["days"] * 24 * CARDS * PRICE
    two = "the price is that of a card, which is two devices"
    close("plan's dollars, your days", float(got["dollars"]), float(dollars), 0.01 * dollars, two)

    costs = {name: cost(name) for name in MODELS}
    largest = [name for name, dollars in costs.items() if dollars <= BUDGET][-1]
    of_all = ", ".join(f"{name} {dollars:,.0f}" for name, dollars in costs.items())
    wanted = f"expected {largest}, got {got['model']!r}; the planner's runs cost {of_all} dollars"
    assert got["model"] == largest, f"plan's model: {wanted}"

    size = compare_microbatch(m, got["microbatch_size"])
    fleet, cfg = node_and_batch(size)
    within, speed = tolerance(m, cfg, fleet), planned_speed(m, size)
    assert abs(got["tokens_per_second"] / speed - 1) <= within, (
        f"plan's tokens_per_second: the planner has {speed:,.0f}, got "
        f"{got['tokens_per_second']:,.0f}; they may be {within:.0%} apart"
    )


def cost(name: str) -> float:
    """Dollars of a model's run with the planner's fastest microbatch."""
    m = mpt(name)
    speed = planned_speed(m, fastest(m))
    return 20 * flops.n_params(m) / speed / 3600 * CARDS * PRICE


def node_and_batch(size: int) -> tuple[Fleet, TrainConfig]:
    """The exercise's node, and its settings with this microbatch."""
    fleet = fleet_of(FleetArgs(device="mi250", devices=8))
    return fleet, replace(FULL_SHARD, global_batch_size=512, microbatch_size=size)


def planned_speed(m: MPTConfig, size: int) -> float:
    """The planner's tokens/s of the node."""
    fleet, cfg = node_and_batch(size)
    return step_time.tokens_per_second(m, cfg, fleet)


def peak(m: MPTConfig, size: int) -> float:
    """GiB of a device at its peak."""
    _, cfg = node_and_batch(size)
    return memory.bytes_by_part(m, cfg, 8)["peak"] / 2**30


def fastest(m: MPTConfig) -> int:
    """The fastest microbatch that fits, of those that divide 64."""
    sizes = [size for size in (1, 2, 4, 8, 16, 32, 64) if peak(m, size) <= ROOM]
    return max(sizes, key=lambda size: planned_speed(m, size))


def compare_microbatch(m: MPTConfig, size) -> int:
    """The microbatch must divide, fit, and be fast."""
    divides = size == int(size) and 64 % int(size) == 0
    assert divides, f"plan's microbatch_size: {size} does not divide 64 sequences"
    size = int(size)
    held = f"{size} takes {peak(m, size):.1f} GiB of the {ROOM:.1f} that are free"
    assert peak(m, size) <= ROOM, f"plan's microbatch_size: {held}"
    ratio = planned_speed(m, size) / planned_speed(m, fastest(m))
    assert ratio >= 0.95, f"plan's microbatch_size: {size} is {1 - ratio:.0%} slower than another"
    return size
