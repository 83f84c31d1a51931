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
from lessons.answers import Answer, Skipped, Wrong, close, need
from planning import certainty, memory, search, step_time
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


def mpt(name: str) -> MPTConfig:
    """An MPT with sequences of 2048."""
    d_model, n_heads, n_layers = SHAPES[name]
    return MPTConfig(d_model=d_model, n_heads=n_heads, n_layers=n_layers, attn_impl="sdpa")


# --------------------------------------------------------------------------------------------------
# FLOPs and MFU


def check_training_flops(answer: Answer):
    """FLOPs of training on one token"""
    n, shape = 100, (3, 8, 5)  # layers, width, sequence: L d S = 120
    cases = [  # attention, frozen, recompute, expected
        ("none", False, False, 600),
        ("full", False, False, 600 + 12 * 120),
        ("causal", False, False, 600 + 6 * 120),
        ("none", True, False, 400),
        ("full", True, False, 400 + 12 * 120),
        ("none", False, True, 800),
        ("full", False, True, 800 + 16 * 120),
        ("causal", True, True, 600 + 8 * 120),
    ]
    for attention, frozen, recompute, expected in cases:
        settings = {"attention": attention, "frozen": frozen, "recompute": recompute}
        got = answer.call("training_flops", n, *shape, **settings)
        case = f"n=100, n_layers=3, width=8, seq_len=5 and {settings}"
        if recompute:
            case += " (one more forward: 2 n, and a third of the attention term"
            case += "; 4/3 holds only if nothing is frozen)" if frozen else ")"
        close("training_flops", got, float(expected), 1e-6 * expected, case)

    for name in SHAPES:
        m = mpt(name)
        got = answer.call("training_flops", flops.n_params(m), m.n_layers, m.d_model, 2048)
        expected = flops.train_flops_per_token(m)
        close("training_flops", got, float(expected), 1e-6 * expected, name)


def check_mfu(answer: Answer):
    """MFU on LLM Foundry's published runs"""
    compare_mfu(answer)
    with open(TABLE) as file:
        rows = list(csv.DictReader(file))
    for row in rows[::7]:
        n, n_layers, d_model = int(row["params"]), int(row["layers"]), int(row["d_model"])
        per_token = float(6 * n + 12 * n_layers * d_model * int(row["seq"]))
        peak, speed = float(row["peak_tflops"]) * 1e12, int(row["tokens_s_gpu"])
        got = answer.call("mfu", per_token, 8.0 * speed, 8, peak)
        case = f"{row['model']} on 8 {row['gpu']}, {8 * speed:,} tokens/s, seq_len={row['seq']}"
        published = float(row["mfu_pct"]) / 100
        close("mfu", got, published, max(2e-4, published / speed), case)  # tokens/s are cut


def compare_mfu(answer: Answer) -> None:
    """The smallest case of mfu."""
    got = answer.call("mfu", 10.0, 3.0, 2, 60.0)
    close("mfu", got, 0.25, 1e-9, "10 FLOPs a token, 3 tokens/s, 2 devices of 60 FLOP/s")


def check_roofline(answer: Answer):
    """The roofline"""
    got = answer.call("matmul_intensity", 1, 1, 1, 2)
    close("matmul_intensity", got, 1 / 3, 1e-9, "m=1, k=1, n=1, 2 bytes: 2 FLOPs, 3 numbers")
    for m, k, n, size in ((2, 3, 4, 1), (1, 2048, 8192, 2), (8192, 2048, 8192, 4)):
        got = answer.call("matmul_intensity", m, k, n, size)
        expected = 2 * m * k * n / (size * (m * k + k * n + m * n))
        case = f"m={m}, k={k}, n={n}, bytes_per_number={size}"
        close("matmul_intensity", got, expected, 1e-6 * expected, case)
    for intensity, expected in ((0.5, 1.0), (5.0, 10.0), (20.0, 30.0), (15.0, 30.0)):
        got = answer.call("attainable", intensity, 30.0, 2.0)
        close("attainable", got, expected, 1e-9, f"{intensity=}, peak 30 FLOP/s, 2 bytes/s")


def check_palm(answer: Answer):
    """A published MFU: PaLM 540B"""
    n, speed = 540.35e9, 238.3e3
    rate = speed / (6144 * 275e12)
    typical = {
        6 * n * rate: "that is 6 N without attention",
        (6 * n + 12 * 118 * 18432 * 2048) * rate: "its heads are 48 x 256 wide, not d_model",
        (6 * n + 6 * 118 * 12288 * 2048) * rate: "that counts half of the scores",
        (8 * n + 16 * 118 * 12288 * 2048) * rate: "that counts recomputation, so it is an HFU",
    }
    published("palm_540b", answer, 0.462, typical)
    follows_its_argument("palm_540b", answer, "tokens_per_second", speed, 2 * speed, 2.0)


def check_mpt(answer: Answer):
    """A published MFU: MPT-1B on A100"""
    m, speed = mpt("mpt-1b"), 20_513
    right = flops.mfu(m, speed, 1, 312e12)
    causal = flops.train_flops_per_token(m, "causal")
    typical = {
        right / 8: "20,513 tokens/s are of one GPU: the peak of one belongs to it",
        right * 8: "20,513 tokens/s are of one GPU, not an eighth",
        right * 4 / 3: "that counts recomputation, so it is an HFU",
        6 * flops.n_params(m) * speed / 312e12: "that is 6 N without attention",
        causal * speed / 312e12: "that counts half of the scores",
    }
    published("mpt_1b", answer, 0.5986, typical)
    follows_its_argument("mpt_1b", answer, "tokens_per_second", speed, speed / 2, 0.5)


def check_gpt(answer: Answer):
    """A published MFU: Megatron-LM's GPT of 175B"""
    d, n_layers, seq_len, vocab_size, seconds = 12288, 96, 2048, 51200, 13.75
    rate = 64 * seq_len / seconds / (64 * 312e12)
    blocks, logits, scores = 12 * n_layers * d**2, vocab_size * d, n_layers * d * seq_len
    again = 96 * n_layers * d**2 * (1 + seq_len / (6 * d) + vocab_size / (16 * n_layers * d))
    typical = {
        again * rate: "that counts a second forward of all blocks, so it is an HFU",
        (8 * (blocks + logits) + 16 * scores) * rate: "that counts a second forward: an HFU",
        (6 * (blocks + logits) + 16 * scores) * rate: "MFU counts attention once: 12 L d S",
        6 * (blocks + logits) * rate: "that is 6 N without attention",
        (6 * (blocks + logits) + 6 * scores) * rate: "that counts half of the scores",
        (6 * blocks + 12 * scores) * rate: "the logits are missing: vocabulary x d_model weights",
    }
    published("gpt_175b", answer, 0.514, typical)
    follows_its_argument("gpt_175b", answer, "seconds", seconds, 2 * seconds, 0.5)


def published(function: str, answer: Answer, expected: float, typical: dict[float, str]) -> None:
    """Compare the function's result with a published share. typical: {wrong result: why}.

    No message names the published share, or people would return it.
    """
    try:
        compare_mfu(answer)
    except Wrong as error:  # two errors may cancel
        raise Skipped("mend mfu first") from error
    got = answer.call(function)
    close(function, got, 0.5, 1e9)  # a number
    is_percent = abs(got / 100 - expected) <= 5e-4 + 5e-5
    need(not is_percent, f"{function}: {got:.4g} is a percentage; expected a share from 0 to 1")
    need(got <= 1, f"{function}: {got:.4g} is more than 1: are the devices in it?")
    if abs(got - expected) <= 5e-4 + 5e-5:  # published with one decimal of a percent, or two
        return
    near = [why for wrong, why in typical.items() if abs(got - wrong) <= 5e-4]
    high = "high" if got > expected else "low"
    hint = near[0] if near else "every raw number that you need is in its docstring"
    raise Wrong(f"{function}: {got:.2%} is not the published figure, but too {high}; {hint}")


def follows_its_argument(function, answer, name: str, usual, other, ratio: float) -> None:
    """Wrong unless the result for another value of its argument is `ratio` times the usual one."""
    got, first = answer.call(function, other), answer.call(function)
    close(function, got, 0.5, 1e9, f"{name}={other:g}")  # a number
    need(
        abs(got / first - ratio) <= 1e-6,
        f"{function}: {first:.2%} is right for {name}={usual:g}, so {name}={other:g} must give "
        f"{ratio * first:.2%}, but got {got:.2%}: compute it from the argument",
    )


# --------------------------------------------------------------------------------------------------
# Predictions


def as_dict(fleet: Fleet) -> dict:
    """A device in the words of the exercise."""
    device = fleet.device
    c = step_time.Constants()
    return {
        "peak_flops": device.bf16_tflops * 1e12,
        "reachable": device.reachable,
        "attention": step_time.attention_share(device, c),
        "bandwidth": device.bandwidth_gbs * 1e9,
        "link": device.link_gbs * 1e9,
    }


def planned(m: MPTConfig, cfg: TrainConfig, fleet: Fleet) -> search.Plan:
    """The planner's prediction."""
    return search.evaluate(m, cfg, fleet, step_time.Constants(), step_time.OURS)


def tolerance(m: MPTConfig, cfg: TrainConfig, fleet: Fleet) -> float:
    """How far a prediction may be off, as a share: the wider side of the planner's error band."""
    low, high, _ = certainty.band(m, cfg, fleet)
    return max(1 - low, high - 1)


def check_step_seconds(answer: Answer):
    """Seconds of a step, beside the planner's"""
    cases = [  # model, device, devices, microbatch, batch
        ("mpt-125m", "a100", 8, 16, 128),
        ("mpt-125m", "a100", 8, 16, 512),
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
        case = f"{name} on {n} {kind}, batch {batch}, microbatches of {size}"
        close("step_seconds", got, 0.0, 1e12, case)  # a number
        within, expected = tolerance(m, cfg, fleet), planned(m, cfg, fleet).seconds
        need(
            got > 0 and abs(expected["step"] / got - 1) <= within,
            f"step_seconds: the planner has {expected['step']:.4g} s for {case}, "
            f"but got {got:.4g}; they may be {within:.0%} apart. The planner's parts: "
            + ", ".join(f"{part} {s:.3g}" for part, s in expected.items() if s and part != "step"),
        )


def check_plan(answer: Answer):
    """A plan for a node and 3,000 dollars"""
    got = answer.call("plan")
    names = ("model", "microbatch_size", "tokens_per_second", "tokens", "days", "dollars")
    need(isinstance(got, dict), f"plan: expected a dictionary, got {type(got).__name__}")
    missing = [name for name in names if name not in got]
    need(not missing, f"plan: {', '.join(missing)} missing, of {', '.join(names)}")
    for name in names[1:]:
        close(f"plan's {name}", got[name], 0.0, 1e15)  # a number
        need(got[name] > 0, f"plan's {name}: expected more than 0, got {got[name]}")
    known = isinstance(got["model"], str) and got["model"] in MODELS
    need(known, f"plan's model: expected one of {', '.join(MODELS)}, got {got['model']!r}")
    m = mpt(got["model"])

    tokens = 20 * flops.n_params(m)
    close("plan's tokens", float(got["tokens"]), float(tokens), 0.01 * tokens, "20 a parameter")
    days = got["tokens"] / got["tokens_per_second"] / 86_400
    close("plan's days", float(got["days"]), days, 0.01 * days, "your tokens and tokens_per_second")
    compare_dollars(got["days"], got["dollars"])
    compare_model(got["model"])

    best = compare_microbatch(m, got["microbatch_size"])

    within = tolerance(m, best.cfg, best.fleet)
    speed = best.tokens_per_second
    ratio = got["tokens_per_second"] / speed
    need(
        abs(ratio - 1) <= within,
        f"plan's tokens_per_second: the planner has {speed:,.0f}, got "
        f"{got['tokens_per_second']:,.0f}; they may be {within:.0%} apart",
    )


def compare_model(name: str) -> None:
    """It must be the largest model that the dollars pay for."""
    costs = {each: cost(each) for each in MODELS}
    largest = [each for each, dollars in costs.items() if dollars <= BUDGET][-1]
    if name != largest:
        takes = f"the planner's {name} takes about {costs[name]:,.0f} dollars of {BUDGET:,}"
        larger = "" if costs[name] > BUDGET else ", and a larger one can be paid for, too"
        need(False, f"plan's model: expected {largest}, got {name}; {takes}{larger}")


def cost(name: str) -> float:
    """Dollars of a model's run with the planner's fastest microbatch."""
    m = mpt(name)
    return fastest(m).hours(20 * flops.n_params(m)) * CARDS * PRICE


def node_and_batch() -> tuple[Fleet, TrainConfig]:
    """The exercise's node, and its settings."""
    fleet = fleet_of(FleetArgs(device="mi250", devices=8))
    return fleet, replace(FULL_SHARD, global_batch_size=512)


def fastest(m: MPTConfig) -> search.Plan:
    """The fastest plan that fits, of the microbatches that divide 64."""
    fleet, cfg = node_and_batch()
    plans = [planned(m, replace(cfg, microbatch_size=2**i), fleet) for i in range(7)]
    return max((plan for plan in plans if plan.fits), key=lambda plan: plan.tokens_per_second)


def compare_microbatch(m: MPTConfig, size) -> search.Plan:
    """The microbatch must divide, fit, and be fast. Returns its plan."""
    need(size == int(size), f"plan's microbatch_size: expected a whole number, got {size}")
    size = int(size)
    need(64 % size == 0, f"plan's microbatch_size: {size} does not divide 64 sequences")
    fleet, cfg = node_and_batch()
    plan, best = planned(m, replace(cfg, microbatch_size=size), fleet), fastest(m)
    peak, room = plan.bytes["peak"] / 2**30, memory.ROOM * 64
    message = f"plan's microbatch_size: {size} takes {peak:.1f} GiB of the {room:.1f} that are free"
    need(plan.fits, message)
    ratio = plan.tokens_per_second / best.tokens_per_second
    need(ratio >= 0.95, f"plan's microbatch_size: {size} is {1 - ratio:.0%} slower than another")
    return plan


def compare_dollars(days: float, dollars: float) -> None:
    """The price is that of a card."""
    expected = days * 24 * CARDS * PRICE
    why = "your days x 24 hours x 4 cards x 1.50"
    if abs(dollars / expected - 2) <= 0.01:
        why += "; you paid for 8 devices, but a card is two of them"
    close("plan's dollars", float(dollars), float(expected), 0.01 * expected, why)
