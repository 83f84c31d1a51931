"""Checks exercise 5 against counts by hand and published figures."""

import csv
from pathlib import Path

from lessons.answers import close

TABLE = Path(__file__).parents[2] / "bench/results/mpt_single_node_throughput.csv"


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


def check_plan(answer):
    """A plan for a node and 3,000 dollars"""
    got = answer.call("plan")
    hint = ". The price is that of a card, which is two devices" * (got["model"] == "mpt-1b")
    assert got["model"] == "mpt-3b", f"plan's model: expected mpt-3b, got {got['model']!r}{hint}"
    tokens = 20 * 2_651_837_440
    speed = 0.458 * 8 * 181.05e12 / (6 * 2_651_837_440 + 12 * 32 * 2560 * 2048)
    hours = tokens / speed / 3600
    expected = {"tokens_per_second": speed, "tokens": tokens, "days": hours / 24}
    for name, value in (expected | {"dollars": hours * 4 * 1.50}).items():
        close(f"plan's {name}", float(got[name]), float(value), 0.01 * value)
