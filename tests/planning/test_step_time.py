"""planning/step_time.py by hand, and beside real steps on fake tensors.

What published runs do is pinned in test_published.py: most layouts, links inside and between nodes,
bubbles, recomputation as other programs do it. Here is what none of them had.
"""

from dataclasses import replace

import pytest
from conftest import slowly
from tracing.live_bytes import two_steps
from tracing.tracer import Tracer

import devices
from config import MPTConfig, TrainConfig
from planning import step_time
from planning.fleet import Fleet
from planning.step_time import Constants, StepTime

A100 = devices.by_name("a100")
M = MPTConfig(d_model=1024, n_heads=16, n_layers=8, max_seq_len=512, vocab_size=4096)
BLOCKS = 8 * 12 * 1024**2  # weights of the matmuls
EASY = replace(Constants(), tile=0.0, hop=0.0, overlap=1.0, copy_bytes=0.0)


def run(batch=16, micro=4, **more) -> TrainConfig:
    return TrainConfig(global_batch_size=batch, microbatch_size=micro, **more)


def test_compute_of_one_device_by_hand():
    step = StepTime(M, run(), Fleet(A100), EASY)
    tokens = 4 * 512
    peak = 312e12
    bandwidth = 2039e9
    assert step.microbatches == 4
    assert step.matmuls() == pytest.approx(6 * tokens * (BLOCKS + 4096 * 1024) / (0.87 * peak))
    attention = 7 * tokens * 8 * 512 * 1024
    assert step.attention() == pytest.approx(attention / (EASY.attention_a100 * peak))
    # The loss kernel reads each bf16 logit twice and writes it once.
    traffic = tokens * (8 * 1024 * EASY.block_bytes + 4096 * 3 * 2)
    assert step.memory() == pytest.approx(traffic / bandwidth)

    parts = step.parts()
    n_params = BLOCKS + 8 * 13 * 1024 + 2 * 1024 + (4096 + 512) * 1024
    assert parts["optimizer"] == pytest.approx(30 * n_params / bandwidth)
    microbatch = step.matmuls() + step.attention() + step.memory()
    assert parts["step"] == pytest.approx(4 * microbatch + parts["optimizer"])
    rate = step_time.tokens_per_second(M, run(), Fleet(A100), EASY)
    assert rate == pytest.approx(16 * 512 / parts["step"])


def test_traffic_of_adapters_by_hand():
    """Of each number that a linear layer reads or writes, 6 are moved, 2 bytes each."""
    adapters = {"init_from": "base", "lora_rank": 8}
    ends = 8 * (4 + 2 + 5 + 5) * 1024  # of the 8 blocks: what A reads and B writes
    tokens = 4 * 512

    def step(devices=1, stage=None, **more) -> StepTime:
        cfg = run(**adapters, **more)
        fleet = Fleet(A100, devices)
        return StepTime(M, cfg, fleet, EASY, stage=stage)

    assert step().adapter_bytes() == 12 * ends
    plain = replace(EASY, copy_bytes=0.0)
    without = StepTime(M, run(), Fleet(A100), plain).memory()
    seconds = tokens * 12 * ends / 2039e9
    assert step().memory() == pytest.approx(without + seconds)
    assert step(lora_last_blocks=2).adapter_bytes() == 12 * ends / 4
    cut = 8 * (1 + 3 / 2 + 1 / 2 + 1 + 1 + 4 / 2 + 4 / 2 + 1) * 1024
    assert step(2, tp=2).adapter_bytes() == 12 * cut
    assert step(2, tp=2).n_trained == 8 * cut


def test_recomputation_is_a_forward_more_of_the_blocks():
    """Nothing needs the output of a block's last matmul, a third of its forward."""

    def step(mode: str, every: int = 1) -> StepTime:
        cfg = run(activation_checkpointing=mode, recompute_every=every)
        return StepTime(M, cfg, Fleet(A100), EASY)

    none, full, half = step("none"), step("full"), step("full", 2)
    forward = 2 * 4 * 512 * BLOCKS / (0.87 * 312e12)
    assert full.matmuls() - none.matmuls() == pytest.approx(forward * 2 / 3)
    assert half.matmuls() - none.matmuls() == pytest.approx(forward / 3)
    assert full.attention() == pytest.approx(9 / 7 * none.attention())
    assert none.memory() < step("selective").memory() == full.memory()


def test_what_data_parallel_modes_send():
    """4 data-parallel ranks in one node, at 300 GB/s x 0.7: 3/4 of the bytes pass each link."""
    seconds = {}
    for mode in ("FULL_SHARD", "SHARD_GRAD_OP", "ZERO1", "DDP"):
        step = StepTime(M, run(sharding=mode), Fleet(A100, 4), EASY)
        seconds[mode] = step.traffic(), step.once()
    one = step.n_params * 3 / 4 / (300e9 * 0.7)  # a byte of every parameter
    assert seconds["FULL_SHARD"] == (pytest.approx((2 + 2 + 4) * one), 0)
    assert seconds["SHARD_GRAD_OP"] == (pytest.approx((2 + 4) * one), 0)
    assert seconds["ZERO1"] == (0, pytest.approx((4 + 2) * one))
    assert seconds["DDP"] == (0, pytest.approx(2 * 4 * one))

    two_nodes = Fleet(A100, 16, 8, network_gbs=50)
    step = StepTime(M, run(sharding="HYBRID_SHARD", shard_size=8, batch=64), two_nodes, EASY)
    assert step.traffic() == pytest.approx((2 + 2 + 4) * step.n_params * 7 / 8 / (300e9 * 0.7))
    # Eight rings, one for each device of a node, share its 50 GB/s. Each all-reduces an eighth.
    assert step.once() == pytest.approx(2 * 4 * step.n_params / 8 / 2 / (50e9 / 8 * 0.7))


WITHOUT_LOGITS = replace(M, vocab_size=1)  # so that all stages are equally fast


def staged(m, batch, pp, **more) -> dict:
    """The seconds of a step by part, of microbatches of 1, on links that take no time."""
    fleet = Fleet(replace(A100, link_gbs=1e9), pp, pp)
    return StepTime(m, run(batch, 1, sharding="ZERO1", pp=pp, **more), fleet, EASY).parts()


def test_the_slowest_stage_sets_the_pace():
    """10 layers on 4 stages: 2, 3, 3 and 2. The first and the last wait for the others."""
    m = replace(WITHOUT_LOGITS, n_layers=10)
    layer = sum(staged(replace(m, n_layers=1), 1, 1)[name] for name in ("matmuls", "attention"))
    parts = staged(m, 16, 4)
    assert parts["matmuls"] + parts["attention"] == pytest.approx(16 * 3 * layer, rel=1e-3)
    memory_bound = parts["memory-bound"] / 16 / 3  # of a layer
    assert parts["bubble"] == pytest.approx((2 + 3 + 2) * (layer + memory_bound), rel=1e-3)

    # With logits as large as six layers, the last stage does.
    m = replace(m, vocab_size=6 * 12 * 1024)
    six_layers = staged(replace(WITHOUT_LOGITS, n_layers=6), 1, 1)["matmuls"]
    two_layers = staged(replace(WITHOUT_LOGITS, n_layers=2), 1, 1)["matmuls"]
    assert staged(m, 16, 4)["matmuls"] == pytest.approx(16 * (two_layers + six_layers), rel=1e-3)


def traced(m, cfg, ranks, stage=0) -> tuple[float, int, int]:
    """(FLOPs of matmuls, bytes that tensor ranks send each other, bytes to the next stage).

    Of two real steps on fake tensors.
    """
    trace = Tracer()
    two_steps(m, cfg, ranks, "bf16", trace, stage=stage)
    flops = sum(op.flops for op in trace.operations if op.name in ("aten::mm", "aten::addmm"))
    sent = to_stages = 0
    for op in trace.operations:
        if not op.name.startswith("c10d::"):
            continue
        largest = max(op.inputs, key=lambda spec: spec.bytes)
        if len(largest.shape) != 3:  # not tokens: fully_shard's, and sums of gradients, have one
            continue
        if op.name == "c10d::send":
            to_stages += largest.bytes
        elif not op.name.startswith("c10d::recv"):
            sent += largest.bytes * (2 if op.collective == "all-reduce" else 1)
    return flops, sent, to_stages


BLOCK = {"d_model": 128, "n_heads": 8, "vocab_size": 1024, "max_seq_len": 64, "attn_impl": "sdpa"}
GATHERS = {"sequence_parallel": True}
AGAIN = {mode: {"activation_checkpointing": mode} for mode in ("none", "selective", "full")}
GATED = {"ffn_type": "mptglu", "norm_type": "rmsnorm"}
SPLITS = [  # tp, data-parallel ranks, stages and which one, layers, settings, changes to the model
    (2, 1, 1, 0, 2, {**AGAIN["selective"], **GATHERS}, {"kv_n_heads": 1, "qk_ln": True}),
    (1, 2, 3, 1, 4, AGAIN["selective"], {}),
    (2, 1, 1, 0, 2, AGAIN["full"], {**GATED, "qk_ln": True, "sliding_window_size": 9}),
    slowly(2, 1, 1, 0, 2, {**AGAIN["selective"], **GATHERS}, {**GATED, "qk_gn": True}),
    slowly(4, 2, 1, 0, 2, AGAIN["full"], {"kv_n_heads": 4, "vocab_size": 1027}),
    slowly(2, 1, 3, 1, 5, {**AGAIN["selective"], **GATHERS}, {}),
    slowly(2, 2, 1, 0, 3, {**AGAIN["none"], **GATHERS}, {"kv_n_heads": 1}),
    slowly(2, 1, 3, 2, 5, {**AGAIN["selective"], **GATHERS}, {}),
]


@pytest.mark.parametrize("tp, dp, pp, stage, layers, settings, change", SPLITS)
def test_a_rank_computes_and_sends_what_is_predicted(tp, dp, pp, stage, layers, settings, change):
    """Two real steps on fake tensors, of two microbatches each if there are stages."""
    m = MPTConfig(**{**BLOCK, "n_layers": layers, **change})
    batch = (8 if pp > 1 else 4) * dp
    cfg = run(batch=batch, device="cpu", tp=tp, pp=pp, **settings)
    ranks = tp * dp * pp
    flops, sent, to_stages = traced(m, cfg, ranks, stage)
    step = StepTime(m, cfg, Fleet(A100, ranks), stage=stage)
    n = 2 * step.microbatches
    assert n == (4 if pp > 1 else 2)
    assert n * step.matmul_flops() == pytest.approx(flops, rel=0.03)
    assert pp == 1 or n * step.bytes_to_stages() == to_stages
    if tp > 1:
        predicted = sum(size * calls for size, calls in step.tensor_traffic().items())
        assert n * predicted == pytest.approx(sent, rel=0.03)


@pytest.mark.parametrize("window", [0, 99, 1023, 5000])
def test_a_window_takes_the_share_of_the_scores_that_it_shows(window):
    whole = MPTConfig(**{**BLOCK, "max_seq_len": 1024})
    windowed = replace(whole, sliding_window_size=window)
    cfg = run(batch=1)
    seconds = [StepTime(m, cfg, Fleet(A100, 1)).attention() for m in (windowed, whole)]
    scores = [sum(min(i, width) for i in range(1, 1025)) for width in (window + 1, 1024)]
    assert seconds[0] / seconds[1] == pytest.approx(scores[0] / scores[1], rel=2e-3)


@pytest.mark.slow
def test_blocks_below_the_first_adapter_send_nothing_backward():
    """A real step on fake tensors, with adapters on the last of three blocks."""
    m = MPTConfig(**BLOCK, n_layers=3)
    lora = {"lora_rank": 1, "lora_last_blocks": 1, "init_from": "x"}
    cfg = run(batch=4, device="cpu", tp=2, activation_checkpointing="full", **lora)
    _, sent, _ = traced(m, cfg, 2)
    step = StepTime(m, cfg, Fleet(A100, 2))
    predicted = sum(size * calls for size, calls in step.tensor_traffic().items())
    assert 2 * predicted == pytest.approx(sent, rel=0.05)
