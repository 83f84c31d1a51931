"""parallel.py and train_step on real gloo ranks: however a batch is cut, training is the same."""

import contextlib
import math
import sys
import time
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import slowly
from launches import same
from layouts import assert_near
from torch.distributed.tensor import DTensor
from tracing.tracer import Tracer

import data
import fsdp_train
import optim
import parallel
import processes
from config import MPTConfig, TrainConfig
from lifecycle import run
from loss import IGNORE
from model import MPT, init_weights
from program import UserError

# 97 rows, a width of 42 and 15 positions do not divide by 2 or 4. Four blocks and the root are five
# sharded units.
MODEL = MPTConfig(
    d_model=42, n_heads=6, n_layers=4, vocab_size=97, max_seq_len=15, attn_impl="reference"
)
RUN = TrainConfig(
    global_batch_size=12,
    microbatch_size=12,
    max_steps=10,
    warmup_steps=2,
    lr=2e-3,
    decoupled_weight_decay=1e-4,
    grad_clip=3.0,  # the first steps are clipped, the last ones are not
)
ALONE = processes.World(0, 1, 0, 1, torch.device("cpu"))


def build(world, cfg, model_cfg=MODEL, precision="fp32"):
    """Model and optimizer as fsdp_train.main makes them."""
    return parallel.build(model_cfg, cfg, world, precision, cfg.seed)


def build_plain(cfg, model_cfg=MODEL):
    """The same without anything of parallel.py."""
    model = MPT(model_cfg)
    init_weights(model, cfg.seed)
    return model, optim.build_optimizer(model.named_parameters(), cfg)


def global_rows(step, cfg=RUN, model_cfg=MODEL, ignore=False):
    """The rows of a step, (global batch, T + 1). `ignore`: five of the labels do not count."""
    generator = torch.Generator().manual_seed(step)
    shape = (cfg.global_batch_size, model_cfg.max_seq_len + 1)
    rows = torch.randint(0, model_cfg.vocab_size, shape, generator=generator)
    if ignore:
        rows[:5, -1] = IGNORE
    return rows


def rows_of(world, rows):
    return rows.chunk(world.global_size)[world.global_rank]


def take_steps(
    world, cfg, model, optimizer, steps, model_cfg=MODEL, precision="fp32", ignore=False
):
    """`[(loss, gradient norm), ...]`"""
    curve = []
    for step in steps:
        rows = rows_of(world, global_rows(step, cfg, model_cfg, ignore)).to(world.device)
        loss, norm, _ = fsdp_train.train_step(model, optimizer, rows, step, cfg, world, precision)
        curve.append((loss.item(), norm.item()))
    return curve


def train(world, cfg, model_cfg=MODEL, precision="fp32", ignore=False, steps=10):
    """The curve of the steps, and the full weights at the end."""
    model, optimizer = build(world, cfg, model_cfg, precision)
    curve = take_steps(world, cfg, model, optimizer, range(steps), model_cfg, precision, ignore)
    return curve, full_weights(model)


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def full_weights(model):
    """Copies: of one shard, the whole tensor is the weight itself."""
    with torch.no_grad():
        return {name: whole(p).clone() for name, p in model.named_parameters()}


# -------------------------------------------------------------------------------------------------
# The step


UNTIED = {"no_bias": True, "tie_word_embeddings": False, "norm_type": "layernorm"}


@pytest.mark.parametrize(
    "how, options", [("none", {}), slowly("selective", UNTIED), slowly("full", UNTIED)]
)
def test_weights_cast_once_a_step_train_as_if_cast_in_each_microbatch(how, options):
    """Bit by bit: four microbatches, the last one smaller, and a second step from new weights."""
    model_cfg = replace(MODEL, alibi=True, **options)
    cfg = replace(RUN, microbatch_size=3, activation_checkpointing=how, recompute_every=2)
    cfg = replace(cfg, global_batch_size=11)
    once = train(ALONE, cfg, model_cfg, "bf16", ignore=True, steps=2)
    with mock.patch.object(parallel, "cast_weights_once", lambda *_: contextlib.nullcontext()):
        each_time = train(ALONE, cfg, model_cfg, "bf16", ignore=True, steps=2)
    assert once[0] == each_time[0]
    assert same(once[1], each_time[1])


def test_a_step_that_fails_leaves_the_weights_in_their_places():
    model, _ = build(ALONE, RUN, precision="bf16")
    before = list(model.named_parameters())
    with pytest.raises(MemoryError), parallel.cast_weights_once(model, "bf16", 2):
        weight = model.transformer.blocks[0].attn.Wqkv.weight
        assert weight.dtype == torch.bfloat16 and weight.is_leaf
        raise MemoryError
    after = list(model.named_parameters())
    assert [name for name, _ in after] == [name for name, _ in before]
    assert all(a is b for (_, a), (_, b) in zip(after, before, strict=True))


def train_unsharded(world):
    """fsdp_train's step on a model that parallel.py never saw."""
    model, optimizer = build_plain(RUN)
    return take_steps(world, RUN, model, optimizer, range(10)), full_weights(model)


def test_one_rank_in_fp32_is_bit_identical_to_plain_pytorch(ranks):
    plain, plain_weights = ranks(1)(train_unsharded)[0]
    sharded, weights = ranks(1)(train, RUN)[0]
    assert sharded == plain and same(weights, plain_weights)


def train_plainly(world, ignore, z_loss):
    """The textbook loop: logits, mean cross-entropy, PyTorch's own clipping and AdamW."""
    model = MPT(MODEL)
    init_weights(model, RUN.seed)
    decay = RUN.decoupled_weight_decay / RUN.lr
    optimizer = torch.optim.AdamW(
        model.parameters(), RUN.lr, (RUN.beta1, RUN.beta2), RUN.adam_eps, decay
    )
    curve = []
    for step in range(10):
        rows = global_rows(step, ignore=ignore)
        logits, labels = model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten()
        log_z = logits.logsumexp(-1)[labels != IGNORE]
        loss = F.cross_entropy(logits, labels, ignore_index=IGNORE)
        loss = loss + z_loss * log_z.square().mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), RUN.grad_clip)
        optimizer.param_groups[0]["lr"] = optim.learning_rate(step, RUN)
        optimizer.step()
        optimizer.zero_grad()
        curve.append((loss.item(), norm.item()))
    return curve


@pytest.mark.parametrize(
    "size, mode, microbatch, ignore, z_loss",
    [
        (1, "FULL_SHARD", 12, False, 0.0),
        (1, "FULL_SHARD", 2, True, 0.1),
        (2, "ZERO1", 2, True, 0.0),
    ],
)
def test_the_step_is_the_textbook_step(ranks, size, mode, microbatch, ignore, z_loss):
    """Labels that do not count are on the first rank: a mean of means would be off by 2 %."""
    cfg = replace(RUN, sharding=mode, microbatch_size=microbatch, z_loss=z_loss)
    (plain,) = ranks(1)(train_plainly, ignore, z_loss)
    assert_near(ranks(size)(train, cfg, MODEL, "fp32", ignore)[0][0], plain)


# A recomputation ends when all is there: before the last matmul of a block. With selective, 3 the
# blocks 0 and 3 compute again.
@pytest.mark.parametrize(
    "mode, every, matmuls, gelus, attentions",
    [
        ("none", 1, 0, 0, 0),
        ("full", 1, 4 * 3, 4, 4),
        ("full", 2, 2 * 3, 2, 2),
        ("selective", 1, 0, 4, 0),
        ("selective", 3, 0, 2, 0),
    ],
)
def test_what_is_computed_again(mode, every, matmuls, gelus, attentions):
    """Four blocks, each with 4 matmuls with weights, a GELU and an attention in the forward."""
    model = MPT(replace(MODEL, attn_impl="sdpa", no_bias=True, alibi=True))
    parallel.recompute(model, replace(RUN, activation_checkpointing=mode, recompute_every=every))
    rows = global_rows(0)
    with torch.no_grad(), Tracer() as evaluation:
        model(rows[:, :-1], labels=rows[:, 1:])
    with Tracer() as training:
        model(rows[:, :-1], labels=rows[:, 1:]).backward()
    attention = "aten::_scaled_dot_product_flash_attention_for_cpu"
    counts = evaluation.counts()
    assert (counts["aten::mm"], counts[attention]) == (4 * 4 + 1, 4)
    counts = training.counts()
    assert counts["aten::mm"] == 3 * (4 * 4 + 1) + matmuls
    assert counts["aten::gelu"] == 4 + gelus
    assert counts[attention] == 4 + attentions


@pytest.mark.gpu
def test_a_step_on_a_gpu_is_only_queued():
    """The driver itself reports any waiting; figures are read once they are there, not before."""
    device = torch.device("cuda")
    model_cfg = replace(MODEL, d_model=96, attn_impl="auto")
    world = processes.World(0, 1, 0, 1, device)
    model, optimizer = build(world, RUN, model_cfg, "bf16")
    rows = global_rows(0).to(device)
    fsdp_train.train_step(model, optimizer, rows, 0, RUN, world, "bf16")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(2 * 10**9)  # cycles: about a second
        begin = time.perf_counter()
        figures = fsdp_train.train_step(model, optimizer, rows, 1, RUN, world, "bf16")
        read = run.start_reading(*figures)
        queued = time.perf_counter() - begin
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(math.isfinite(figure) for figure in read())
    assert queued < 0.5 < time.perf_counter() - begin


@pytest.mark.gpu
@pytest.mark.parametrize("precision, limit", [("fp32", 1e-3), ("bf16", 2e-2)])
def test_steps_on_a_gpu_are_those_on_the_cpu(precision, limit):
    """Losses and gradient norms of three steps, relative to those in fp32 on the CPU."""
    expected = steps_on("cpu", "fp32")
    for found, wanted in zip(steps_on("cuda", precision), expected, strict=True):
        assert found == pytest.approx(wanted, rel=limit)


def steps_on(device: str, precision: str) -> list[tuple[float, float]]:
    """Loss and gradient norm of three steps of one rank on a device, by the attention of `auto`."""
    world = processes.World(0, 1, 0, 1, torch.device(device))
    model_cfg = replace(MODEL, d_model=96, alibi=True, attn_impl="auto")
    return train(world, replace(RUN, microbatch_size=5), model_cfg, precision, steps=3)[0]


def losses_with_dropout(world):
    """(seed, step, rank, steps taken before) -> loss of that step on fresh weights."""
    model_cfg, found = replace(MODEL, resid_pdrop=0.3), {}
    cases = [(1, 4, 0, 0), (1, 4, 0, 3), (1, 5, 0, 0), (1, 4, 1, 0), (2, 4, 0, 0)]
    for seed, step, rank, before in cases:
        model, optimizer = build_plain(RUN, model_cfg)
        torch.rand(before)  # whatever was drawn earlier
        cfg, someone = replace(RUN, seed=seed), replace(world, dp_rank=rank, dp_size=1)
        rows = global_rows(0)
        loss, *_ = fsdp_train.train_step(model, optimizer, rows, step, cfg, someone, "fp32")
        found[seed, step, rank, before] = loss.item()
    return found


def test_dropout_depends_on_seed_step_and_rank_alone(ranks):
    """So a resumed run draws the masks of an undisturbed one."""
    found = ranks(1)(losses_with_dropout)[0]
    assert found[1, 4, 0, 0] == found[1, 4, 0, 3]
    assert len(set(found.values())) == 4


# -------------------------------------------------------------------------------------------------
# Initial weights, evaluation


BYTES = replace(MODEL, vocab_size=257, max_seq_len=16)


def train_and_evaluate(world, cfg, folder, evaluations):
    """Losses and norms of four steps with `evaluations` in between, and what they gave."""
    val = data.Split(folder, "val", BYTES.max_seq_len)
    model, optimizer = build(world, cfg, BYTES)
    curve, values = [], []
    for step in range(4):
        values += [fsdp_train.evaluate(model, val, cfg, world, "fp32") for _ in range(evaluations)]
        curve += take_steps(world, cfg, model, optimizer, [step], BYTES)
    return curve, values, full_weights(model)


def plain_evaluation(world, cfg, folder, n_windows):
    """Mean loss of each token of the first windows, the obvious way, on the initial weights."""
    model, _ = build_plain(cfg, BYTES)
    windows = data.Split(folder, "val", BYTES.max_seq_len).windows(np.arange(n_windows))
    rows = torch.from_numpy(windows)
    with torch.no_grad():
        return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten()).item()


@pytest.mark.parametrize(
    "size, mode",
    [*[(2, mode) for mode in ("ZERO1", "SHARD_GRAD_OP", "FULL_SHARD")], slowly(4, "HYBRID_SHARD")],
)
def test_evaluating_between_steps_changes_nothing(ranks, tiny_data, size, mode):
    """Not the losses, not a bit of the weights; and each evaluation is right.

    Weights that it gathered are dropped: else the next pass would use old ones.
    """
    how = {"microbatch_size": 2, "eval_tokens": 7 * 16, "warmup_steps": 0}
    cfg = replace(RUN, sharding=mode, shard_size=min(size, 2), **how)
    without = ranks(size)(train_and_evaluate, cfg, tiny_data, 0)[0]
    found = ranks(size)(train_and_evaluate, cfg, tiny_data, 2)
    assert found[0][0] == without[0] and same(found[0][2], without[2])
    values = found[0][1]
    assert all(rank[1] == values for rank in found)
    assert values[0::2] == values[1::2]
    assert len(set(values)) == 4  # each sees the weights of its moment
    assert values[0] == pytest.approx(ranks(1)(plain_evaluation, cfg, tiny_data, 7)[0], rel=1e-6)


def evaluate_only(world, cfg, folder):
    model, _ = build(world, cfg, BYTES)
    val = data.Split(folder, "val", BYTES.max_seq_len)
    return fsdp_train.evaluate(model, val, cfg, world, "fp32")


ALL = 10**9  # windows: as many as there are


@pytest.mark.parametrize("n_windows, microbatch", [(1, 2), (5, 1), (9, 3), (ALL, 64)])
def test_evaluation_counts_every_window_once(ranks, tiny_data, n_windows, microbatch):
    cfg = replace(RUN, microbatch_size=microbatch, eval_tokens=n_windows * 16 + 15)
    n_windows = min(n_windows, len(data.Split(tiny_data, "val", 16)))
    wanted = ranks(1)(plain_evaluation, cfg, tiny_data, n_windows)[0]
    for size in (1, 2, 4):
        found = ranks(size)(evaluate_only, cfg, tiny_data)
        assert found == [pytest.approx(wanted, rel=1e-6)] * size


# -------------------------------------------------------------------------------------------------
# Mesh, decisions, starting


@pytest.mark.skipif(
    sys.platform != "linux", reason="elsewhere memory is promised and found wanting later"
)
def test_weights_that_do_not_fit_are_the_users_mistake():
    """4 TB of embeddings."""
    with torch.device("meta"):
        model = MPT(MPTConfig(d_model=2**16, n_heads=64, n_layers=1, vocab_size=2**24))
    with pytest.raises(UserError, match="^[^\n]*do not fit into the memory[^\n]*$"):
        parallel.materialize(model, torch.device("cpu"), None)


def test_a_buffer_of_your_own_is_not_left_with_garbage():
    with torch.device("meta"):
        model = MPT(MPTConfig(d_model=16, n_heads=2, n_layers=1, vocab_size=64))
        model.transformer.register_buffer("cosines", torch.ones(4), persistent=False)
    with pytest.raises(UserError, match="transformer.cosines"):
        parallel.materialize(model, torch.device("cpu"), 1)


def mesh_of(world, cfg, local_size):
    mesh = parallel.make_mesh(replace(world, local_size=local_size), cfg)
    return dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True)), mesh.get_coordinate()


@pytest.mark.parametrize(
    "mode, shard_size, replicate, shard",
    [
        ("FULL_SHARD", 0, None, 4),
        ("SHARD_GRAD_OP", 0, None, 4),
        ("ZERO1", 0, None, 4),
        ("DDP", 0, 4, 1),
        ("HYBRID_SHARD", 0, 2, 2),  # two nodes of two ranks
        ("HYBRID_SHARD", 4, 1, 4),
        ("HYBRID_SHARD", 1, 4, 1),
    ],
)
def test_mesh(ranks, mode, shard_size, replicate, shard):
    found = ranks(4)(mesh_of, replace(RUN, sharding=mode, shard_size=shard_size), 2)
    used = {"dp_replicate": replicate, "dp_shard": shard} if replicate else {"dp_shard": shard}
    assert [shape for shape, _ in found] == [used] * 4
    # neighbours share: the ranks of a node are one dp_shard group
    places = [[rank // shard, rank % shard] if replicate else [rank] for rank in range(4)]
    assert [list(place) for _, place in found] == places


def dtypes_in_a_block(world):
    """What a block gets under FSDP and bf16: (residual stream, ALiBi slopes)."""
    model_cfg = MPTConfig(d_model=32, n_heads=16, n_layers=1, vocab_size=64, alibi=True)
    model, _ = build(world, TrainConfig(), model_cfg, "bf16")
    seen = []

    def note(_, args):
        seen.extend([args[0].dtype, args[1].slopes.dtype])

    model.transformer.blocks[0].attn.register_forward_pre_hook(note)
    with parallel.autocast(world.device, "bf16"):
        model(torch.zeros(1, 4, dtype=torch.long))
    return seen


def test_alibi_slopes_stay_fp32_in_bf16(ranks):
    """Slopes of 16 heads are no powers of two: bf16 would bend them by up to 0.4 %."""
    assert ranks(1)(dtypes_in_a_block) == [[torch.bfloat16, torch.float32]]
