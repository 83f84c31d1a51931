"""Checks exercise 5 against flops.py, published figures and planning/.

Predicted seconds and the plan may differ from the planner's by its own error on one node
(planning/certainty.py): as far as published runs were from their predictions.
"""

import csv
from dataclasses import replace
from pathlib import Path

import flops
from config import MPTConfig, TrainConfig
from lessons.answers import close, is_number
from planning import certainty, memory, step_time
from planning.fleet import FleetArgs, fleet_of

TABLE = Path(__file__).parents[2] / "bench/results/mpt_single_node_throughput.csv"
MODELS = {
    name: MPTConfig(d_model=width, n_heads=heads, n_layers=layers, attn_impl="sdpa")
    for name, width, heads, layers in (
        ("mpt-125m", 768, 12, 12),
        ("mpt-1b", 2048, 16, 24),
        ("mpt-3b", 2560, 20, 32),
        ("mpt-7b", 4096, 32, 32),
    )
}
FULL_SHARD = TrainConfig(sharding="FULL_SHARD", activation_checkpointing="none")
BUDGET, CARDS, PRICE = 3000, 4, 1.50  # of the plan
ROOM = 0.92 * 64 * 2**30  # bytes of a device


def check_training_flops(answer):
    """FLOPs of training on one token"""
    n, shape = 100, (3, 8, 5)  # layers, width, sequence: L d S = 120
    cases = [  # attention, frozen, recompute, expected
        ("none", False, False, 600),
        ("full", False, False, 600 + 12 * 120),
        ("causal", False, False, 600 + 6 * 120),
        ("none", True, False, 400),
        ("full", True, False, 400 + 12 * 120),
        ("full", False, True, 800 + 16 * 120),
        ("causal", True, True, 600 + 8 * 120),
    ]
    for attention, frozen, recompute, expected in cases:
        settings = {"attention": attention, "frozen": frozen, "recompute": recompute}
        got = answer.call("training_flops", n, *shape, **settings)
        case = f"n=100, n_layers=3, width=8, seq_len=5 and {settings}"
        close(f"training_flops, for {case}", got, float(expected), 1e-6 * expected)


def check_mfu(answer):
    """MFU on LLM Foundry's published runs"""
    got = answer.call("mfu", 10.0, 3.0, 2, 60.0)
    close("mfu, for 10 FLOPs a token, 3 tokens/s, 2 devices of 60 FLOP/s", got, 0.25, 1e-9)
    with open(TABLE) as file:
        rows = list(csv.DictReader(file))
    for row in rows[::20]:
        n, n_layers, d_model = int(row["params"]), int(row["layers"]), int(row["d_model"])
        per_token = float(6 * n + 12 * n_layers * d_model * int(row["seq"]))
        peak_flops, speed = float(row["peak_tflops"]) * 1e12, int(row["tokens_s_gpu"])
        got = answer.call("mfu", per_token, 8.0 * speed, 8, peak_flops)
        case = f"{row['model']} on 8 {row['gpu']}, {8 * speed:,} tokens/s, seq_len={row['seq']}"
        published = float(row["mfu_pct"]) / 100
        close(f"mfu, for {case}", got, published, max(2e-4, published / speed))  # tokens/s are cut


def check_roofline(answer):
    """The roofline"""
    for m, k, n, size in ((1, 1, 1, 2), (2, 3, 4, 1), (1, 2048, 8192, 2)):
        got = answer.call("matmul_intensity", m, k, n, size)
        expected = 2 * m * k * n / (size * (m * k + k * n + m * n))
        case = f"{m=}, {k=}, {n=}, bytes_per_number={size}"
        close(f"matmul_intensity, for {case}", got, expected, 1e-6 * expected)
    for intensity, expected in ((5.0, 10.0), (20.0, 30.0)):
        got = answer.call("attainable", intensity, 30.0, 2.0)
        close(f"attainable, for {intensity=}, peak 30 FLOP/s, 2 bytes/s", got, expected, 1e-9)


def check_published(answer):
    """Three published MFUs: PaLM 540B, MPT-1B on A100, Megatron-LM's GPT of 175B"""
    for function, expected in (("palm_540b", 0.462), ("mpt_1b", 0.5986), ("gpt_175b", 0.514)):
        got = answer.call(function)
        off = f"{got:.2%} is too {'high' if got > expected else 'low'}"
        assert abs(got - expected) <= 5.5e-4, f"{function}: {off}; attention is 12 L d S"


def check_step_seconds(answer):
    """Seconds of a step, beside the planner's"""
    cases = [  # model, device, devices, microbatch, batch
        ("mpt-125m", "a100", 8, 16, 128),
        ("mpt-1b", "a100", 4, 8, 512),
        ("mpt-7b", "a100", 8, 6, 48),
        ("mpt-7b", "h100", 8, 6, 768),
        ("mpt-3b", "mi250", 8, 8, 512),
        ("mpt-7b", "mi250", 8, 1, 1536),
    ]
    for name, kind, n, size, batch in cases:
        m = MODELS[name]
        cfg = replace(FULL_SHARD, microbatch_size=size, global_batch_size=batch)
        fleet = fleet_of(FleetArgs(device=kind, devices=n))
        device = {
            "peak_flops": fleet.device.bf16_tflops * 1e12,
            "reachable": fleet.device.reachable,
            "attention": step_time.attention_share(fleet.device, step_time.Constants()),
            "bandwidth": fleet.device.bandwidth_gbs * 1e9,
            "link": fleet.device.link_gbs * 1e9,
        }
        shape = flops.n_params(m), m.n_layers, m.d_model, m.max_seq_len, m.vocab_size
        got = answer.call("step_seconds", *shape, batch, size, n, device)
        case = f"step_seconds: {name} on {n} {kind}, batch {batch}, microbatches of {size}"
        compare_with_planner(case, got, step_time.StepTime(m, cfg, fleet).parts()["step"])


def compare_with_planner(what: str, got: float, expected: float) -> None:
    """A prediction may be as far off as the planner's own are on one node."""
    within = max(abs(1 - factor) for factor in certainty.bands()["one node"])
    apart = f"got {got:,.4g}; they may be {within:.0%} apart"
    near = abs(got / expected - 1) <= within
    assert near, f"{what}: the planner has {expected:,.4g}, but {apart}"


# --------------------------------------------------------------------------------------------------
# The plan


def check_plan(answer):
    """A plan for a node and 3,000 dollars"""
    got = answer.call("plan")
    for name in ("microbatch_size", "tokens_per_second", "tokens", "days", "dollars"):
        assert is_number(got[name]), f"plan's {name}: expected a number, got {got[name]!r}"
    two = "the price is that of a card, which is two devices"
    speed = got["tokens_per_second"]
    follows = {
        "tokens": (20 * flops.n_params(MODELS[got["model"]]), "20 a parameter"),
        "days": (got["tokens"] / speed / 86_400, "your tokens and tokens/s"),
        "dollars": (got["days"] * 24 * CARDS * PRICE, f"your days; {two}"),
    }
    for name, (expected, hint) in follows.items():
        close(f"plan's {name}", float(got[name]), float(expected), 0.01 * expected, hint)

    costs, speeds = {}, {}
    for name in ("mpt-1b", "mpt-3b", "mpt-7b"):
        speeds[name] = planned_speeds(MODELS[name])
        hours = 20 * flops.n_params(MODELS[name]) / max(speeds[name].values()) / 3600
        costs[name] = hours * CARDS * PRICE
    largest = [name for name, dollars in costs.items() if dollars <= BUDGET][-1]
    of_all = ", ".join(f"{name} {dollars:,.0f}" for name, dollars in costs.items())
    wanted = f"expected {largest}, got {got['model']!r}; the planner's runs cost {of_all} dollars"
    assert got["model"] == largest, f"plan's model: {wanted}"

    size, fitting = got["microbatch_size"], speeds[largest]
    sizes = ", ".join(map(str, fitting))
    assert size in fitting, f"plan's microbatch_size: {size} is none of {sizes}, which fit"
    slower = 1 - fitting[size] / max(fitting.values())
    assert slower <= 0.05, f"plan's microbatch_size: {size} is {slower:.0%} slower than another"
    compare_with_planner("plan's tokens_per_second", speed, fitting[size])


def planned_speeds(m: MPTConfig) -> dict[int, float]:
    """{microbatch size: the planner's tokens/s of the node}, of those that divide 64 and fit."""
    fleet = fleet_of(FleetArgs(device="mi250", devices=8))
    found = {}
    for size in (1, 2, 4, 8, 16, 32, 64):
        cfg = replace(FULL_SHARD, global_batch_size=512, microbatch_size=size)
        if memory.bytes_by_part(m, cfg, 8)["peak"] <= ROOM:
            found[size] = step_time.tokens_per_second(m, cfg, fleet)
    return found
