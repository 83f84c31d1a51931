"""planning/memory.py against arithmetic by hand, what real steps allocate, and the allocator."""

import dataclasses
import random
import subprocess
import sys

import pytest
from conftest import ROOT

import config
import devices
import loss
from bench import memory as memory_measured
from config import MPTConfig, TrainConfig, UserError
from planning import memory

CONFIGS = ROOT / "configs"
N_1B = (
    1_315_950_592  # parameters of MPT-1B: 24 (12 d^2 + 13 d) + 2 d + (50,368 + 2,048) d, d = 2,048
)
MID = MPTConfig(
    d_model=256, n_heads=4, n_layers=3, vocab_size=4096, max_seq_len=512, attn_impl="sdpa"
)


def mpt1b() -> MPTConfig:
    return config.load([str(CONFIGS / "mpt1b.py")], MPTConfig)[0]


def run(batch=4, microbatches=1, ranks=1, **more) -> TrainConfig:
    return TrainConfig(
        microbatch_size=batch, global_batch_size=batch * microbatches * ranks, **more
    )


def peak(m, cfg, ranks=1, precision="bf16", tp=1, pp=1) -> int:
    return memory.bytes_by_part(m, cfg, ranks, precision, tp, pp)["peak"]


def state(cfg, ranks) -> int:
    return sum(memory.bytes_by_moment(mpt1b(), cfg, ranks)["update"].values())


def test_state_is_16_bytes_a_parameter_over_those_who_share_it():
    assert state(run(), 1) == 16 * N_1B
    assert state(run(ranks=8), 8) == 2 * N_1B
    assert state(run(ranks=8, sharding="ZERO1"), 8) == 2 * N_1B
    assert state(run(ranks=8, sharding="DDP"), 8) == 16 * N_1B
    assert state(run(ranks=8, sharding="HYBRID_SHARD", shard_size=4), 8) == 4 * N_1B


def test_what_a_block_keeps_per_token():
    """Korthikanti et al. (2205.05198), section 4.1, without dropout and with fused attention: 32 bytes x d_model in 16
    bits, and the statistics."""
    d = 2048
    assert memory.kept_by_block(mpt1b(), "none") == 32 * d + 4 * 16 + 16
    assert memory.kept_by_block(mpt1b(), "none") / d == pytest.approx(32.2, rel=0.01)
    assert memory.kept_by_block(mpt1b(), "full") / d == 2.0
    # its input 2; outputs of Wqkv 6, out_proj 2, up_proj 8, down_proj 2; attention 2 and logsumexp
    assert memory.kept_by_block(mpt1b(), "selective") == 22 * d + 4 * 16
    assert memory.kept_by_block(mpt1b(), "full", "fp32") == 4 * d


def test_a_step_of_mpt_1b_by_hand():
    """Microbatch 4 of 2,048 tokens, d 2,048, 24 layers, no accumulation, at the forward of the loss."""
    parts = memory.bytes_by_moment(mpt1b(), run())["loss forward"]
    tokens, d, block, wte = 8192, 2048, 12 * 2048**2 + 13 * 2048, 50368 * 2048
    assert parts["gradients, fp32"] == 0
    assert parts["copies of the weights"] == 2 * (24 * block + wte)
    assert parts["blocks' activations"] == tokens * 24 * (32 * d + 4 * 16 + 16)
    chunk = 1280 * 50368  # logits
    assert parts["final norm and loss"] == 3 * 2 * tokens * d + 4 * wte + 10 * chunk
    sharded = memory.bytes_by_moment(mpt1b(), run(ranks=8), 8)["loss forward"]
    root = (
        wte + 2048 * d + 2 * d
    )  # embeddings and final norm, and the buffer in which the last block came
    assert sharded["copies of the weights"] == 2 * root + 2 * block
    assert sharded["blocks' activations"] == parts["blocks' activations"]


def test_the_parts_add_up_to_the_peak():
    parts = memory.bytes_by_part(mpt1b(), run(microbatches=2))
    assert parts.pop("moment") == "loss forward"
    assert parts.pop("peak") == sum(parts.values())


def test_more_of_this_means_more_of_that():
    m = mpt1b()
    peaks = [peak(m, run(batch)) for batch in (1, 2, 4, 8)]
    assert peaks == sorted(set(peaks))
    ways = [
        {"activation_checkpointing": "full"},
        {"activation_checkpointing": "full", "recompute_every": 2},
    ]
    ways += [{"activation_checkpointing": "selective"}, {}]
    peaks = [peak(m, run(microbatches=2, **way)) for way in ways]
    assert peaks == sorted(set(peaks))
    assert (
        peak(m, run(microbatches=2)) == peak(m, run()) + 4 * N_1B
    )  # gradients that wait for the next microbatch
    assert peak(m, run(microbatches=3)) == peak(m, run(microbatches=2))
    peaks = [peak(m, run(ranks=ranks), ranks) for ranks in (64, 8, 2)]
    assert peaks == sorted(set(peaks))
    modes = ["FULL_SHARD", "SHARD_GRAD_OP", "ZERO1", "DDP"]
    peaks = [peak(m, run(microbatches=2, ranks=8, sharding=mode), 8) for mode in modes]
    assert peaks == sorted(set(peaks))
    assert peak(m, run(), 1, "fp32") > peak(m, run())


def test_a_block_over_tensor_parallel_ranks_keeps_what_korthikanti_says():
    """2205.05198, equation 2: s b h (10 + 24 / t) without scores; of the 10, two are dropout's masks."""
    d, heads = 2048, 16
    for tp in (1, 2, 4, 16):
        assert (
            memory.kept_by_block(mpt1b(), "none", tp=tp) == 8 * d + (24 * d + 4 * heads) // tp + 16
        )
    assert memory.kept_by_block(mpt1b(), "full", tp=4) == 2 * d  # the whole input, on every rank
    # input, out_proj and down_proj 2 each; over tp: Wqkv 6, attention 2, up_proj 8, logsumexp
    assert memory.kept_by_block(mpt1b(), "selective", tp=4) == 6 * d + (16 * d + 4 * heads) // 4


def test_the_backward_of_a_block_over_two_tensor_parallel_ranks():
    """Gradients of x, of GELU's output and of down_proj's weight; the last block has nothing to reduce yet."""
    step = memory.StepMemory(MID, run(), 2, tp=2)
    tokens, d, hidden = 4 * 512, 256, 1024 // 2
    assert step.block_backward(2)["backward's workspace"] == 2 * (
        tokens * d + tokens * hidden + d * hidden
    )


def test_175b_on_64_devices_by_hand():
    """Frontier's layout of 175B (2312.12705): tp 4, pp 16, here without data parallelism; microbatch 1, full."""
    m = MPTConfig(
        d_model=12288,
        n_heads=96,
        n_layers=96,
        vocab_size=51200,
        max_seq_len=2048,
        attn_impl="triton",
    )
    cfg = TrainConfig(
        microbatch_size=1, global_batch_size=64, sharding="ZERO1", activation_checkpointing="full"
    )
    d, tokens, layers = 12288, 2048, 96 // 16
    matrices = 12 * d * d + 3 * d + 4 * d  # with the biases of Wqkv and up_proj
    block = matrices // 4 + 4 * d + 2 * d  # two norms; biases of out_proj and down_proj
    table = 51200 * d // 4
    first = layers * block + table + tokens * d  # learned positions
    moments = memory.bytes_by_moment(m, cfg, 64, tp=4, pp=16)
    assert sum(moments["update"].values()) == 16 * first
    parts = moments["block 5 backward"]
    assert (
        parts["blocks' activations"] == 16 * layers * 2 * d * tokens
    )  # 16 microbatches are in flight
    assert parts["copies of the weights"] == 2 * first
    assert (
        parts["backward's workspace"] == 6 * block - 2 * d * tokens
    )  # bf16 gradients and fp32 ones; its input went
    assert parts["final norm and loss"] == 0
    peak_gib = (18 * first + 6 * block + (16 * layers - 1) * 2 * d * tokens) / 2**30
    assert (
        peak(m, cfg, 64, tp=4, pp=16) / 2**30 == pytest.approx(peak_gib) and peak_gib < 64
    )  # a GCD of MI250X has 64
    last = memory.StepMemory(m, cfg, 64, tp=4, pp=16, stage=15)
    assert (
        last.n_params == layers * block + table + 2 * d
    )  # its copy of the tied embedding, and the final norm
    assert last.loss_forward()["blocks' activations"] == layers * 2 * d * tokens
    chunk = 1280 * 51200 // 4
    assert last.loss_forward()["final norm and loss"] == 3 * 2 * tokens * d + 4 * table + 10 * chunk


def test_a_pipeline_holds_no_more_microbatches_than_there_are():
    m, cfg = dataclasses.replace(MID, n_layers=4), run(2, 2)  # two microbatches, four stages
    first = memory.StepMemory(m, cfg, 4, pp=4).block_backward(0)["blocks' activations"]
    assert first == 2 * 2 * 512 * memory.kept_by_block(m, "none")


def random_case(rng) -> tuple[MPTConfig, dict]:
    """A model that any of tp and pp = 1, 2, 4 divides, and how it is trained."""
    heads = 4 * rng.choice([1, 2, 4])
    m = MPTConfig(
        d_model=heads * rng.choice([16, 64]),
        n_heads=heads,
        n_layers=4 * rng.choice([1, 2, 6]),
        kv_n_heads=rng.choice([None, 4]),
        expansion_ratio=rng.choice([2, 4]),
        vocab_size=rng.choice([512, 4096, 50368]),
        max_seq_len=rng.choice([64, 512, 2048]),
        no_bias=rng.random() < 0.5,
        qk_ln=rng.random() < 0.3,
        alibi=rng.random() < 0.3,
        tie_word_embeddings=rng.random() < 0.7,
        attn_impl="sdpa",
    )
    sharding = rng.choice(["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "ZERO1", "DDP"])
    return m, {
        "microbatch_size": rng.choice([1, 2, 3]),
        "global_batch_size": 128,
        "sharding": sharding,
        "shard_size": 2,
        "activation_checkpointing": rng.choice(["none", "selective", "full"]),
    }


@pytest.mark.parametrize("seed", range(40))
def test_a_larger_run_takes_more_and_a_wider_layout_less(seed):
    rng = random.Random(seed)
    m, how = random_case(rng)
    cfg, precision = TrainConfig(**how), rng.choice(["bf16", "fp32"])
    dp, tp, pp = rng.choice([2, 4]), rng.choice([1, 2]), rng.choice([1, 2])
    layout = {"ranks": dp * tp * pp, "precision": precision, "tp": tp, "pp": pp}
    base = peak(m, cfg, **layout)
    for name in ("n_layers", "d_model", "max_seq_len", "vocab_size"):
        assert peak(dataclasses.replace(m, **{name: 2 * getattr(m, name)}), cfg, **layout) > base, (
            name
        )
    assert (
        peak(m, dataclasses.replace(cfg, microbatch_size=cfg.microbatch_size + 1), **layout) > base
    )
    double = {"ranks": 2 * layout["ranks"]}
    for name, wider in {
        "dp": double,
        "tp": double | {"tp": 2 * tp},
        "pp": double | {"pp": 2 * pp},
    }.items():
        assert peak(m, cfg, **(layout | wider)) <= base, name


@pytest.mark.parametrize("seed", range(20))
def test_all_devices_together_hold_12_bytes_a_parameter(seed):
    """Weights and Adam's moments in any layout of 16 devices, beside what tensor and pipeline parallelism repeat."""
    m, how = random_case(random.Random(seed))
    cfg, norm = TrainConfig(**how | {"sharding": "FULL_SHARD"}), m.d_model * (1 if m.no_bias else 2)
    qk_ln = (m.d_model + m.n_kv_heads * m.head_dim) * (1 if m.no_bias else 2) if m.qk_ln else 0
    whole = m.n_layers * (2 * norm + qk_ln + (0 if m.no_bias else 2 * m.d_model)) + norm
    whole += 0 if m.alibi else m.max_seq_len * m.d_model
    n = memory.flops.n_params(m)
    for tp, pp in [(1, 1), (1, 4), (2, 1), (4, 2), (4, 4)]:
        total, dp = 0, 16 // (tp * pp)
        for stage in range(pp):
            update = memory.StepMemory(m, cfg, 16, "bf16", tp, pp, stage).moments()["update"]
            total += tp * dp * (update["weights, fp32"] + update["Adam's moments, fp32"])
        embedding_twice = m.vocab_size * m.d_model if pp > 1 and m.tie_word_embeddings else 0
        assert total == pytest.approx(
            12 * (n + (tp - 1) * whole + embedding_twice), abs=2 * 16
        )  # rounded down


MI250 = devices.by_name("mi250")


@pytest.mark.parametrize("seed", range(20))
def test_the_largest_microbatch_fits_and_one_more_does_not(seed):
    rng = random.Random(seed)
    m, how = random_case(rng)
    cfg, tp, pp = TrainConfig(**how), rng.choice([1, 2]), rng.choice([1, 4])
    size, ranks, rows = (
        peak(m, cfg, 4 * tp * pp, "bf16", tp, pp) * rng.uniform(0.5, 4),
        4 * tp * pp,
        128 // 4,
    )
    peaks = [
        peak(m, dataclasses.replace(cfg, microbatch_size=n), ranks, "bf16", tp, pp) / memory.ROOM
        for n in range(1, rows + 1)
    ]
    most = max((n for n, taken in enumerate(peaks, 1) if taken <= size), default=0)
    assert memory.largest_microbatch(m, cfg, size, ranks, "bf16", tp, pp) == most


# LLM Foundry's published runs on 8 GPUs, FULL_SHARD: n_layers, d_model, n_heads, sequence, checkpointing, microbatch,
# sequences a step, and the GPU. The first takes the most of its memory of all that are published.
PUBLISHED = [
    (48, 7168, 56, 8192, "full", 1, 168, "a100-80gb"),
    (48, 7168, 56, 2048, "full", 3, 504, "h100"),
    (32, 2560, 20, 8192, "none", 3, 144, "a100-80gb"),
    (32, 4096, 32, 2048, "none", 6, 96, "a100-80gb"),
    (40, 5120, 40, 8192, "full", 1, 128, "a100-40gb"),
    (24, 2048, 16, 2048, "none", 8, 512, "a100-40gb"),
]


@pytest.mark.parametrize("layers, d, heads, length, mode, size, batch, gpu", PUBLISHED)
def test_what_ran_elsewhere_fits_here(layers, d, heads, length, mode, size, batch, gpu):
    """Not many times as much would: their logits are not cut into chunks, and they did not take all there was."""
    m = MPTConfig(d_model=d, n_heads=heads, n_layers=layers, max_seq_len=length, attn_impl="triton")
    cfg = TrainConfig(
        microbatch_size="auto", global_batch_size=batch, activation_checkpointing=mode
    )
    assert size <= memory.largest_microbatch(m, cfg, devices.by_name(gpu), 8) <= 2.5 * size


def test_the_largest_microbatch_of_a_device():
    m, cfg = mpt1b(), run(8, 16, ranks=8, activation_checkpointing="full")
    assert memory.largest_microbatch(m, cfg, MI250, 8) == memory.largest_microbatch(
        m, cfg, 64 * 2**30, 8
    )
    assert memory.largest_microbatch(m, run(2, ranks=8), MI250, 8) == 2  # all there are
    assert memory.largest_microbatch(m, cfg, 16 * N_1B // 8, 8) == 0  # no more than the state
    with pytest.raises(UserError, match="give its bytes"):
        memory.largest_microbatch(m, cfg, dataclasses.replace(MI250, memory_gb=0), 8)


def test_the_chunks_are_those_of_the_loss():
    assert memory.CHUNK_BYTES == loss.CHUNK_BYTES


def agree(m, cfg, ranks=1, precision="bf16"):
    """All moments within 3 %; in the forward of the loss the parts that are a tenth of it within 10 %."""
    estimated = memory.bytes_by_moment(m, cfg, ranks, precision)
    counted = memory_measured.count(m, cfg, ranks, precision)
    for moment, parts in estimated.items():
        if (
            moment == "embedding backward"
        ):  # a fake tensor's gradients are added in a third buffer: see memory.md
            continue
        other = counted["block backward" if moment.startswith("block") else moment]
        assert sum(parts.values()) == pytest.approx(sum(other.values()), rel=0.03), moment
        if moment != "loss forward":
            continue
        for part, n in parts.items():
            if n > sum(parts.values()) / 10:
                assert n == pytest.approx(other[part], rel=0.1), part


RECOMPUTED = [
    {},
    {"activation_checkpointing": "full"},
    {"activation_checkpointing": "selective"},
    {"activation_checkpointing": "full", "recompute_every": 2},
]


@pytest.mark.parametrize("how", RECOMPUTED)
def test_one_rank_allocates_what_is_estimated(how):
    agree(MID, run(microbatches=2, **how))


MODES = [("FULL_SHARD", "full"), ("HYBRID_SHARD", "none"), ("DDP", "selective")]
MODES += [("ZERO1", "none"), ("SHARD_GRAD_OP", "selective")]


@pytest.mark.parametrize("mode, how", MODES)
def test_eight_ranks_allocate_what_is_estimated(mode, how):
    agree(
        MID,
        run(microbatches=2, ranks=8, sharding=mode, shard_size=4, activation_checkpointing=how),
        8,
    )


@pytest.mark.parametrize("mode, how", [("FULL_SHARD", "full"), ("DDP", "none")])
def test_torchs_own_tracker_sees_what_is_estimated(mode, how):
    """Another count than ours, of one microbatch a step: it cannot follow two."""
    cfg = run(ranks=8, sharding=mode, activation_checkpointing=how)
    assert peak(MID, cfg, 8) == pytest.approx(memory_measured.tracked(MID, cfg, 8), rel=0.03)


def test_with_few_tokens_gradients_on_their_way_to_other_ranks_are_the_most():
    m = dataclasses.replace(MID, d_model=512, max_seq_len=64, tie_word_embeddings=False)
    estimated = memory.bytes_by_moment(m, run(1, 2, ranks=8), 8)
    counted = memory_measured.count(m, run(1, 2, ranks=8), 8)
    assert memory.bytes_by_part(m, run(1, 2, ranks=8), 8)["moment"] == "block 2 backward"
    for name, other in [("block 2 backward", "block backward"), ("embedding backward",) * 2]:
        assert sum(estimated[name].values()) == pytest.approx(
            sum(counted[other].values()), rel=0.05
        )


VARIANTS = [
    {"clip_qkv": 6.0, "no_bias": True},
    {"qk_ln": True, "tie_word_embeddings": False},
    {"kv_n_heads": 2, "expansion_ratio": 2},
    {"norm_type": "layernorm"},
]


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_of_the_model_allocate_what_is_estimated(variant):
    agree(dataclasses.replace(MID, **variant), run())


def test_fp32_allocates_what_is_estimated():
    agree(MID, run(), precision="fp32")


@pytest.mark.parametrize("tokens, moment", [(512, "loss forward"), (16, "embedding backward")])
def test_the_allocator_gives_what_is_estimated(tokens, moment):
    """Real tensors: neither the estimate nor the count may be wrong in the same way."""
    m = dataclasses.replace(MID, n_layers=2, vocab_size=16384, max_seq_len=tokens)
    cfg = run(2, activation_checkpointing="full")
    parts = memory.bytes_by_part(m, cfg)
    assert parts["moment"] == moment
    assert parts["peak"] == pytest.approx(memory_measured.allocated(m, cfg), rel=0.01)


def test_the_program_prints_the_moments(capsys):
    memory.main([str(CONFIGS / "mpt1b.py"), "--activation_checkpointing=full", "--ranks=8"])
    text = capsys.readouterr().out
    assert "1,315,950,592 parameters, bf16, 8 ranks of FULL_SHARD" in text
    assert "0.658" in next(line for line in text.splitlines() if "weights, fp32" in line)  # 4 N / 8


def test_the_program_shows_a_device_and_a_layout(capsys):
    memory.main([str(CONFIGS / "mpt7b.py"), "--ranks=64", "--tp=4", "--pp=4", "--device=mi250"])
    text = capsys.readouterr().out
    assert "64 ranks of FULL_SHARD: tp 4 x pp 4 x dp 4, stage 0 of 0 to 3" in text
    m, cfg = config.load([str(CONFIGS / "mpt7b.py")], MPTConfig, TrainConfig)
    taken = peak(m, cfg, 64, "bf16", 4, 4) / 2**30
    assert f"that is {taken / 64:.0%} of MI250 GCD's 64 GiB" in text
    for mode in ("none", "selective", "full"):
        way = dataclasses.replace(cfg, activation_checkpointing=mode)
        size = memory.largest_microbatch(m, way, MI250, 64, "bf16", 4, 4)
        assert f"checkpointing {mode} {size}" in " ".join(text.split())


def test_a_question_is_answered_without_torch():
    program = "import sys; from planning import memory; memory.main(sys.argv[1:]); assert 'torch' not in sys.modules"
    question = [str(CONFIGS / "mpt7b.py"), "--ranks=8", "--device=mi250"]
    subprocess.run(
        [sys.executable, "-c", program, *question],
        cwd=CONFIGS.parent,
        check=True,
        capture_output=True,
    )


LAYOUTS = [  # ranks, tp, pp, changes to the model, what is said
    (8, 8, 1, {}, "n_heads 4 is not a multiple of tp 8"),
    (4, 4, 1, {"kv_n_heads": 2}, "kv_n_heads 2 is not a multiple of tp 4"),
    (4, 4, 1, {"vocab_size": 4098}, "vocab_size 4098 is not a multiple of tp 4"),
    (4, 4, 1, {"expansion_ratio": 2.008}, "hidden width 514 is not a multiple of tp 4"),
    (2, 1, 2, {}, "n_layers 3 is not a multiple of pp 2"),
    (8, 1, 3, {}, "8 ranks are not a multiple of tp 1 x pp 3 = 3"),
    (24, 4, 2, {"n_layers": 4}, "not a multiple of the 3 data-parallel ranks: 24 / (tp 4 x pp 2)"),
    (8, 0, 1, {}, "tp must be at least 1, not 0"),
    (-1, 1, 1, {}, "ranks must be at least 1, not -1"),
]


@pytest.mark.parametrize("ranks, tp, pp, change, message", LAYOUTS)
def test_a_layout_that_does_not_multiply_out_is_refused(ranks, tp, pp, change, message):
    m = dataclasses.replace(MID, **change)
    with pytest.raises(UserError) as error:
        peak(m, run(), ranks, "bf16", tp, pp)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_what_cannot_be_estimated_is_refused():
    with pytest.raises(UserError, match="--microbatch_size=NUMBER"):
        peak(MID, dataclasses.replace(run(), microbatch_size="auto"))
    with pytest.raises(UserError, match="shard_size 3 does not divide the 8"):
        peak(MID, run(ranks=8, sharding="HYBRID_SHARD", shard_size=3), 8)
    with pytest.raises(UserError, match="not a multiple of the 3 data-parallel ranks"):
        peak(MID, run(), 3)
    with pytest.raises(UserError, match="--shard_size"):
        peak(MID, run(ranks=8, sharding="HYBRID_SHARD"), 8)
    with pytest.raises(UserError, match="--attn_impl=sdpa"):
        peak(dataclasses.replace(MID, attn_impl="reference"), run())
