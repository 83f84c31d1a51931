"""planning/step_time.py by hand computation, and beside real steps on fake tensors."""

import re
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
from program import UserError

A100 = devices.by_name("a100")
M = MPTConfig(d_model=1024, n_heads=16, n_layers=8, max_seq_len=512, vocab_size=4096)
BLOCKS = 8 * 12 * 1024**2  # weights of the matmuls
EASY = replace(Constants(), tile=0.0, hop=0.0, overlap=1.0, copy_bytes=0.0)
FOUNDRY = {"block_bytes": 460, "logit_bytes": 24, "repeats_all": True}


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
    foundry = StepTime(M, run(), Fleet(A100), replace(EASY, **FOUNDRY))
    assert foundry.memory() == pytest.approx(tokens * (8 * 1024 * 460 + 4096 * 24) / bandwidth)

    parts = step.parts()
    n_params = BLOCKS + 8 * 13 * 1024 + 2 * 1024 + (4096 + 512) * 1024
    assert parts["optimizer"] == pytest.approx(30 * n_params / bandwidth)
    microbatch = step.matmuls() + step.attention() + step.memory()
    assert parts["step"] == pytest.approx(4 * microbatch + parts["optimizer"])
    assert parts["bubble"] == parts["exposed traffic"] == parts["tensor parallel"] == 0
    assert parts["between stages"] == 0
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
    def step(mode: str, every: int = 1, c=EASY) -> StepTime:
        cfg = run(activation_checkpointing=mode, recompute_every=every)
        return StepTime(M, cfg, Fleet(A100), c)

    none, full, half, selective = step("none"), step("full"), step("full", 2), step("selective")
    forward = 2 * 4 * 512 * BLOCKS / (0.87 * 312e12)
    # Nothing needs the output of a block's last matmul, a third of its forward.
    assert full.matmuls() - none.matmuls() == pytest.approx(forward * 2 / 3)
    assert half.matmuls() - none.matmuls() == pytest.approx(forward / 3)
    repeats_all = step("full", c=replace(EASY, repeats_all=True))
    assert repeats_all.matmuls() - none.matmuls() == pytest.approx(forward)
    assert full.attention() == pytest.approx(9 / 7 * none.attention())
    assert selective.matmuls() == none.matmuls()
    assert none.memory() < selective.memory() == full.memory()


def test_small_matmuls_are_slower():
    """By hand, at a tile of 2048 x 1024: each product wastes the time of one.

    A product's elements are tokens x the features out in the forward, x the features in for the
    input's gradient, and the mean of the two wastes for the weight's. That is 3 / 2 of the sum of
    features in and out, and of 3 passes over weights of 12 d^2 in a block, 4 d^2 in the logits.
    """
    tokens = 4 * 512
    c = replace(EASY, tile=tokens * 1024)
    seconds = StepTime(M, run(), Fleet(A100), EASY).matmuls()
    sides = 8 * ((1 + 3) + (1 + 1) + (1 + 4) + (4 + 1)) + (1 + 4)  # in d
    weights = 8 * 12 + 4  # in d^2
    whole = seconds * (1 + sides / 2 / weights)
    assert StepTime(M, run(), Fleet(A100), c).matmuls() == pytest.approx(whole)

    # Two tensor ranks halve one side of each, not both: half the work, not half the waste.
    sides = 8 * ((1 + 3 / 2) + (1 / 2 + 1) + (1 + 2) + (2 + 1)) + (1 + 2)
    halves = seconds * (1 / 2 + sides / 2 / weights)
    assert StepTime(M, run(tp=2), Fleet(A100, 2), c).matmuls() == pytest.approx(halves)


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


def test_hybrid_sharding_stays_in_a_node_but_for_gradients():
    fleet = Fleet(A100, 16, 8, network_gbs=50)
    step = StepTime(M, run(sharding="HYBRID_SHARD", shard_size=8, batch=64), fleet, EASY)
    assert step.shard_ranks == 8
    assert step.traffic() == pytest.approx((2 + 2 + 4) * step.n_params * 7 / 8 / (300e9 * 0.7))
    # Eight rings, one for each device of a node, share its 50 GB/s. Each all-reduces an eighth.
    assert step.once() == pytest.approx(2 * 4 * step.n_params / 8 / 2 / (50e9 / 8 * 0.7))


def test_a_ring_goes_at_the_speed_of_its_slowest_link():
    inside, across = Fleet(A100, 8, 8, 100), Fleet(A100, 16, 8, 100)
    assert inside.bandwidth(8, 1) == 300e9
    assert across.bandwidth(16, 1) == 100e9  # one ring through all: it has the network alone
    four_rings = Fleet(A100, 16, 8, 100)  # with two ranks of each in a node
    assert four_rings.bandwidth(4, 4) == 25e9
    assert replace(across, network_gbs=4000).bandwidth(16, 1) == 300e9
    latency = StepTime(M, run(), Fleet(A100, 8), replace(EASY, hop=1e-6)).ring(0, 8, 1, calls=3)
    assert latency == pytest.approx(3 * 7e-6)


WITHOUT_LOGITS = replace(M, vocab_size=1)  # so that all stages are equally fast


def staged(m, batch, pp, **more) -> dict:
    """The seconds of a step by part, of microbatches of 1, on links that take no time."""
    fleet = Fleet(replace(A100, link_gbs=1e9), pp, pp)
    return StepTime(m, run(batch, 1, sharding="ZERO1", pp=pp, **more), fleet, EASY).parts()


def test_the_bubble():
    """(p - 1) / n of the other parts."""
    for pp in (2, 4):
        parts = staged(WITHOUT_LOGITS, 16, pp)
        rest = sum(parts[name] for name in ("matmuls", "attention", "memory-bound"))
        assert parts["bubble"] == pytest.approx(rest * (pp - 1) / 16, rel=1e-3)
        share = parts["bubble"] / (rest + parts["bubble"])
        assert share == pytest.approx((pp - 1) / (16 + pp - 1), rel=1e-3)


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


def test_stages_send_hidden_states_one_way_and_gradients_the_other():
    """4 GCDs of different nodes share the network of their node with 7 others each."""
    stream = 2 * 4 * 512 * 1024  # bytes: microbatch x tokens x d_model in bf16
    fleet = Fleet(A100, 32, 8, network_gbs=50)
    cfg = run(batch=32, pp=4)
    step = StepTime(M, cfg, fleet, EASY, stage=1)
    assert step.bytes_to_stages() == 2 * stream
    assert step.stages() == pytest.approx(2 * stream / (50e9 / 8 * 0.7))
    assert StepTime(M, cfg, fleet, EASY, stage=0).bytes_to_stages() == stream
    assert StepTime(M, run(), Fleet(A100), EASY).stages() == 0


def test_tensor_parallelism_sends_four_all_reduces_a_layer():
    """And one each for the embedding, in fp32 as long as nothing is sharded, and for the loss."""
    stream = 2 * 4 * 512 * 1024
    step = StepTime(M, run(tp=4), Fleet(A100, 4), EASY)
    all_reduces = 8 * 4 + 2 + 1
    assert step.tensor() == pytest.approx(all_reduces * 2 * stream * 3 / 4 / (300e9 * 0.7))
    sharded = StepTime(M, run(tp=4), Fleet(A100, 8), EASY)
    assert sharded.tensor_traffic() == {stream: 2 * (8 * 4 + 2)}


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
SPLITS = [  # tp, data-parallel ranks, stages and which one, layers, settings, changes to the model
    (2, 1, 1, 0, 3, {**AGAIN["selective"], **GATHERS}, {"kv_n_heads": 1, "qk_ln": True}),
    (4, 2, 1, 0, 3, AGAIN["full"], {"kv_n_heads": 4, "vocab_size": 1027}),
    (1, 2, 3, 1, 4, AGAIN["selective"], {}),
    (2, 1, 3, 1, 5, {**AGAIN["selective"], **GATHERS}, {}),
    slowly(4, 1, 1, 0, 3, AGAIN["none"], {"qk_ln": True}),
    slowly(2, 2, 1, 0, 3, {**AGAIN["none"], **GATHERS}, {"kv_n_heads": 1}),
    slowly(2, 3, 3, 0, 5, AGAIN["selective"], {}),
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


def test_blocks_below_the_first_adapter_send_nothing_backward():
    """A real step on fake tensors, with adapters on the last of three blocks."""
    m = MPTConfig(**BLOCK, n_layers=3)
    lora = {"lora_rank": 1, "lora_last_blocks": 1, "init_from": "x"}
    cfg = run(batch=4, device="cpu", tp=2, activation_checkpointing="full", **lora)
    _, sent, _ = traced(m, cfg, 2)
    step = StepTime(m, cfg, Fleet(A100, 2))
    predicted = sum(size * calls for size, calls in step.tensor_traffic().items())
    assert 2 * predicted == pytest.approx(sent, rel=0.05)


def test_many_nodes_leave_each_other_less_of_the_network():
    """3 % less for each doubling beyond 16 nodes, which one switch joins."""
    assert [Fleet(A100, 8 * n).share_of_network for n in (1, 2, 16)] == [1, 1, 1]
    assert Fleet(A100, 8 * 64).share_of_network == pytest.approx(0.97**2)
    assert Fleet(A100, 512, 8, 100).bandwidth(512, 1) == pytest.approx(100e9 * 0.97**2)
    assert Fleet(A100, 512, 8, 100).bandwidth(8, 1) == 300e9  # inside a node


def test_sequence_parallelism_divides_the_memory_traffic_of_norms():
    fleet = Fleet(A100, 4)
    whole = StepTime(M, run(tp=4), fleet, EASY)
    divided = StepTime(M, run(tp=4, sequence_parallel=True), fleet, EASY)
    norms = 4 * 512 * 8 * 1024 * EASY.block_bytes / 3
    assert whole.memory() - divided.memory() == pytest.approx(norms * 3 / 4 / 2039e9)
    assert whole.tensor() == divided.tensor()


@pytest.mark.parametrize(
    "n, cfg, words",
    [
        (6, {"tp": 4}, "devices 6 is not a multiple of tp 4 x pp 1 = 4: set --devices=4 or 8"),
        (16, {"tp": 16}, "tp 16 does not divide the 8 devices of a node"),
        (1, {"microbatch_size": "auto"}, "give a number here"),
    ],
)
def test_mistakes_are_told(n, cfg, words):
    """Others: test_memory.py."""
    with pytest.raises(UserError, match=re.escape(words)):
        StepTime(M, replace(run(), **cfg), Fleet(A100, n))
