"""parallel.py and train_step on real gloo ranks: however a batch is cut, training is the same."""

import contextlib
import math
import os
import socket
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import get_args, get_type_hints
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from conftest import PATIENCE
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import TorchDispatchMode
from tracing.tracer import Tracer

import data
import fsdp_train
import optim
import parallel
import processes
from config import MPTConfig, TrainConfig, UserError
from lifecycle import reporter
from loss import IGNORE
from model import MPT, init_weights

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
)
ALONE = processes.World(0, 1, 0, 1, torch.device("cpu"))
MODES = get_args(get_type_hints(TrainConfig)["sharding"])
EVERYWHERE = [(size, mode) for size in (1, 2, 4) for mode in MODES]


def slowly(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


def build(world, cfg, model_cfg=MODEL, precision="fp32"):
    """Model and optimizer as fsdp_train.main makes them."""
    return parallel.build(model_cfg, cfg, world, precision, cfg.seed)


def build_plain(cfg, model_cfg=MODEL):
    """The same without anything of parallel.py."""
    model = MPT(model_cfg)
    init_weights(model, cfg.seed)
    return model, optim.build_optimizer(model.parameters(), cfg)


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


def train(world, cfg, model_cfg=MODEL, precision="fp32", ignore=False, steps=10):
    """`[(loss, gradient norm), ...]` of the steps, and the full weights at the end."""
    model, optimizer = build(world, cfg, model_cfg, precision)
    curve = []
    for step in range(steps):
        rows = rows_of(world, global_rows(step, cfg, model_cfg, ignore))
        loss, norm, _ = fsdp_train.train_step(model, optimizer, rows, step, cfg, world, precision)
        curve.append((loss.item(), norm.item()))
    return curve, full_weights(model)


def clip(params, max_norm):
    """Clip as train_step does, and return the norm before that."""
    params = list(params)
    norm = parallel.grad_norm(torch.nn.ParameterList(params))
    optim.clip_gradients(params, norm, max_norm)
    return norm


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def full_weights(model):
    with torch.no_grad():
        return {
            name: whole(p).clone() for name, p in model.named_parameters()
        }  # of one shard, it is no copy yet


def assert_same_curve(found, wanted, loss=5e-6, norm=1e-5):
    for column, tolerance in enumerate((loss, norm)):
        a, b = (np.array(curve)[:, column] for curve in (found, wanted))
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=0)


def equal(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


# -------------------------------------------------------------------------------------------------
# The step


@pytest.fixture(scope="module")
def one_rank(ranks):
    """The reference curves, of one rank that takes the whole batch at once: precision -> curve."""
    return {
        precision: ranks(1)(train, RUN, MODEL, precision)[0][0] for precision in ("fp32", "bf16")
    }


@pytest.mark.parametrize(
    "size, mode",
    [case if case[0] == 2 else slowly(*case) for case in EVERYWHERE],
)
def test_ranks_modes_and_microbatches_give_the_losses_of_one_rank(ranks, one_rank, size, mode):
    """12 rows as 12, 2 x 6 or 4 x 3, whole or in microbatches of 2 (and one of 1 on four ranks)."""
    for microbatch in (12, 5) if size == 1 else (12, 2):
        cfg = replace(RUN, sharding=mode, microbatch_size=microbatch, shard_size=min(size, 2))
        found = ranks(size)(train, cfg)
        assert all(curve == found[0][0] for curve, _ in found)  # every rank knows the same numbers
        assert_same_curve(found[0][0], one_rank["fp32"])


@pytest.mark.parametrize(
    "size, mode",
    [(1, "FULL_SHARD"), (2, "ZERO1"), slowly(4, "FULL_SHARD"), slowly(4, "HYBRID_SHARD")],
)
def test_bf16_stays_near_one_rank(ranks, one_rank, size, mode):
    cfg = replace(RUN, sharding=mode, microbatch_size=2, shard_size=min(size, 2))
    curve = ranks(size)(train, cfg, MODEL, "bf16")[0][0]
    assert_same_curve(curve, one_rank["bf16"], loss=1e-3, norm=1e-2)
    assert curve != one_rank["fp32"]


def gradients(world, cfg, rows):
    """The full gradient in bf16 of `rows`, which every rank gets; and the dtypes of its parts."""
    model, _ = build(world, cfg, precision="bf16")
    for begin in range(0, len(rows), cfg.microbatch_size):
        end = begin + cfg.microbatch_size
        parallel.before_microbatch(model, cfg, last=end >= len(rows))
        with parallel.autocast(rows.device, "bf16"):
            loss = model(rows[begin:end, :-1], labels=rows[begin:end, 1:])
        loss.backward()
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    return {name: whole(p.grad) for name, p in model.named_parameters()}


def reduced_gradients(world, cfg):
    """The mean of the ranks' gradients is that of all rows, and holds values that bf16 cannot."""
    parts = global_rows(0).chunk(world.global_size)
    alone = [gradients(world, cfg, part) for part in parts]  # the mean of equal ones
    found = gradients(world, cfg, parts[world.global_rank])
    wanted = {name: torch.stack([part[name] for part in alone]).mean(0) for name in found}
    flat = torch.cat([gradient.flatten() for gradient in found.values()])
    return found, wanted, (flat != flat.bfloat16().float()).float().mean().item()


@pytest.mark.parametrize(
    "size, mode, microbatch",
    [
        (2, "FULL_SHARD", 6),
        (2, "DDP", 6),
        (2, "ZERO1", 3),
        slowly(2, "DDP", 3),
        slowly(4, "HYBRID_SHARD", 3),
    ],
)
def test_gradients_are_reduced_in_fp32(ranks, size, mode, microbatch):
    """What ranks compute in bf16 is added in fp32: a sum in bf16 would be rounded to 8 bits."""
    cfg = replace(RUN, sharding=mode, shard_size=2, microbatch_size=microbatch)
    for found, wanted, beyond_bf16 in ranks(size)(reduced_gradients, cfg):
        assert beyond_bf16 > 0.3
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, wanted[name], rtol=1e-6, atol=1e-8, msg=name)


@pytest.mark.parametrize("how", ["none", slowly("selective"), slowly("full")])
@pytest.mark.parametrize(
    "options",
    [{}, slowly({"no_bias": True, "tie_word_embeddings": False, "norm_type": "layernorm"})],
)
def test_weights_cast_once_a_step_train_as_if_cast_in_each_microbatch(how, options):
    """Bit by bit: four microbatches, the last one smaller, and a second step from new weights."""
    model_cfg = replace(MODEL, alibi=True, **options)
    cfg = replace(RUN, microbatch_size=3, activation_checkpointing=how, recompute_every=2)
    cfg = replace(cfg, global_batch_size=11)
    once = train(ALONE, cfg, model_cfg, "bf16", ignore=True, steps=2)
    with mock.patch.object(parallel, "weights_cast_once", lambda *_: contextlib.nullcontext()):
        each_time = train(ALONE, cfg, model_cfg, "bf16", ignore=True, steps=2)
    assert once[0] == each_time[0]
    assert equal(once[1], each_time[1])


def casts_of_weights(cfg, precision="bf16") -> int:
    """How often a training step casts the weight of a linear layer to bf16."""
    model, optimizer = build(ALONE, cfg, precision=precision)
    linears = [layer for layer in model.modules() if isinstance(layer, torch.nn.Linear)]
    shapes = {tuple(layer.weight.shape) for layer in linears}
    with Tracer() as trace:
        fsdp_train.train_step(model, optimizer, global_rows(0), 0, cfg, ALONE, precision)
    casts = [op for op in trace.operations if op.cast == (torch.float32, torch.bfloat16)]
    return sum(op.inputs[-1].shape in shapes for op in casts)


def test_one_process_casts_weights_once_a_step():
    """Except those of blocks that are recomputed: twice in each microbatch, to save memory."""
    matrices = 4 * MODEL.n_layers
    for microbatch_size in (12, 6, 3):
        cfg = replace(RUN, microbatch_size=microbatch_size)
        assert casts_of_weights(cfg) == matrices
        assert casts_of_weights(cfg, "fp32") == 0
    recomputed = replace(RUN, microbatch_size=6, activation_checkpointing="full")
    assert casts_of_weights(recomputed) == 2 * 2 * matrices
    assert casts_of_weights(replace(recomputed, recompute_every=2)) == (4 + 1) * matrices / 2


def test_a_step_that_fails_leaves_the_weights_in_their_places():
    model, _ = build(ALONE, RUN, precision="bf16")
    before = list(model.named_parameters())
    with pytest.raises(MemoryError), parallel.weights_cast_once(model, "bf16", 2):
        weight = model.transformer.blocks[0].attn.Wqkv.weight
        assert weight.dtype == torch.bfloat16 and weight.is_leaf
        raise MemoryError
    after = list(model.named_parameters())
    assert [name for name, _ in after] == [name for name, _ in before]
    assert all(a is b for (_, a), (_, b) in zip(after, before, strict=True))


def test_no_memory_for_the_copies_leaves_the_weights_in_their_places():
    model, _ = build(ALONE, RUN, precision="bf16")
    before = list(model.parameters())
    attempts = []

    def second_fails(data, requires_grad=True, real=torch.nn.Parameter):
        attempts.append(data)
        if len(attempts) == 2:
            raise MemoryError
        return real(data, requires_grad)

    failing = mock.patch.object(torch.nn, "Parameter", second_fails)
    with failing, pytest.raises(MemoryError), parallel.weights_cast_once(model, "bf16", 2):
        pass
    assert all(a is b for a, b in zip(model.parameters(), before, strict=True))


def train_unsharded(world):
    """fsdp_train's step on a model that parallel.py never saw."""
    model, optimizer = build_plain(RUN)
    curve = []
    for step in range(10):
        loss, norm, _ = fsdp_train.train_step(
            model, optimizer, global_rows(step), step, RUN, world, "fp32"
        )
        curve.append((loss.item(), norm.item()))
    return curve, full_weights(model)


def train_plainly(world, ignore):
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
        loss = F.cross_entropy(
            model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten(), ignore_index=IGNORE
        )
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), RUN.grad_clip)
        optimizer.param_groups[0]["lr"] = optim.learning_rate(step, RUN)
        optimizer.step()
        optimizer.zero_grad()
        curve.append((loss.item(), norm.item()))
    return curve


def test_one_rank_in_fp32_is_bit_identical_to_plain_pytorch(ranks):
    plain, plain_weights = ranks(1)(train_unsharded)[0]
    sharded, weights = ranks(1)(train, RUN)[0]
    assert sharded == plain and equal(weights, plain_weights)


def test_the_step_is_the_textbook_step(ranks, one_rank):
    assert_same_curve(one_rank["fp32"], ranks(1)(train_plainly, False)[0])


@pytest.mark.parametrize(
    "size, mode",
    [(1, "FULL_SHARD"), (2, "ZERO1"), slowly(4, "FULL_SHARD"), slowly(4, "DDP")],
)
def test_labels_that_do_not_count_may_lie_anywhere(ranks, size, mode):
    """All on the first one or two ranks; a mean of the ranks' means would be off by up to 2 %."""
    model = replace(MODEL, max_seq_len=15)
    plain = ranks(1)(train_plainly, True)[0]
    found = ranks(size)(train, replace(RUN, sharding=mode, microbatch_size=2), model, "fp32", True)
    assert_same_curve(found[0][0], plain)


RECOMPUTE = [slowly("full", 1), ("full", 2), slowly("selective", 1), ("selective", 3)]


@pytest.mark.parametrize("mode, every", RECOMPUTE)
def test_recomputing_the_blocks_changes_nothing(ranks, mode, every):
    """Nor does it draw other dropout masks."""
    model = replace(MODEL, resid_pdrop=0.1, emb_pdrop=0.1, attn_pdrop=0.1)
    cfg = replace(RUN, microbatch_size=4)
    kept = ranks(2)(train, cfg, model, "fp32", False, 3)[0]
    cfg = replace(cfg, activation_checkpointing=mode, recompute_every=every)
    again = ranks(2)(train, cfg, model, "fp32", False, 3)[0]
    assert kept[0] == again[0] and equal(kept[1], again[1])


class Count(TorchDispatchMode):
    """Counts the operators that run under it."""

    def __init__(self):
        super().__init__()
        self.operators = Counter()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.operators[operator.name()] += 1
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "mode, every, matmuls, gelus, attentions",
    [
        ("none", 1, 0, 0, 0),
        (
            "full",
            1,
            4 * 3,
            4,
            4,
        ),  # a recomputation ends when all is there: before the last matmul of a block
        ("full", 2, 2 * 3, 2, 2),
        ("selective", 1, 0, 4, 0),
        ("selective", 3, 0, 2, 0),  # blocks 0 and 3
    ],
)
def test_what_is_computed_again(mode, every, matmuls, gelus, attentions):
    """Four blocks, each with 4 matmuls with weights, a GELU and an attention in the forward."""
    model = MPT(replace(MODEL, attn_impl="sdpa", no_bias=True, alibi=True))
    parallel.recompute(model, replace(RUN, activation_checkpointing=mode, recompute_every=every))
    rows = global_rows(0)
    with torch.no_grad(), Count() as evaluation:
        model(rows[:, :-1], labels=rows[:, 1:])
    with Count() as training:
        model(rows[:, :-1], labels=rows[:, 1:]).backward()
    attention = "aten::_scaled_dot_product_flash_attention_for_cpu"
    assert evaluation.operators["aten::mm"] == 4 * 4 + 1 and evaluation.operators[attention] == 4
    assert training.operators["aten::mm"] == 3 * (4 * 4 + 1) + matmuls
    assert (
        training.operators["aten::gelu"] == 4 + gelus
        and training.operators[attention] == 4 + attentions
    )


class NoReading(TorchDispatchMode):
    """Raises where an operation would wait for the device: for a value, or for a result's shape."""

    WAIT = (
        "_local_scalar_dense",
        "is_nonzero",
        "nonzero",
        "masked_select",
        "equal",
        "unique",
        "_unique2",
        "bincount",
    )

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name().removeprefix("aten::").partition(".")[0]
        by_mask = name == "index" and any(i is not None and i.dtype == torch.bool for i in args[1])
        assert name not in self.WAIT and not by_mask, f"{function} reads from the device"
        return function(*args, **(kwargs or {}))


def step_without_reading(world, cfg):
    model, optimizer = build(world, cfg, replace(MODEL, attn_impl="auto", alibi=True), "bf16")
    rows = rows_of(world, global_rows(0, ignore=True))
    with NoReading():
        result = fsdp_train.train_step(model, optimizer, rows, 0, cfg, world, "bf16")
    with pytest.raises(AssertionError, match="reads from the device"), NoReading():
        result[0].item()
    return all(math.isfinite(figure) for figure in reporter.start_reading(*result)())


@pytest.mark.parametrize(
    "size, mode", [(1, "FULL_SHARD"), (2, "FULL_SHARD"), (2, "ZERO1"), (2, "DDP")]
)
def test_a_step_never_waits_for_the_device(ranks, size, mode):
    cfg = replace(
        RUN, sharding=mode, microbatch_size=3, z_loss=1e-3, activation_checkpointing="selective"
    )
    assert all(ranks(size)(step_without_reading, cfg))


@pytest.mark.gpu
def test_a_step_on_a_gpu_is_only_queued(ranks):
    """The driver itself reports any waiting; figures are read once they are there, not before."""
    device = torch.device("cuda")
    model_cfg, world = (
        replace(MODEL, d_model=96, attn_impl="auto"),
        processes.World(0, 1, 0, 1, device),
    )
    model, optimizer = build(world, RUN, model_cfg, "bf16")
    rows = global_rows(0).to(device)
    fsdp_train.train_step(model, optimizer, rows, 0, RUN, world, "bf16")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(2 * 10**9)  # cycles: about a second
        begin = time.perf_counter()
        read = reporter.start_reading(
            *fsdp_train.train_step(model, optimizer, rows, 1, RUN, world, "bf16")
        )
        queued = time.perf_counter() - begin
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(math.isfinite(figure) for figure in read())
    assert queued < 0.5 < time.perf_counter() - begin


# On a CPU the two are the same program, so fp32 there only shows that the test itself is right.
ON_A_GPU = [
    ("cpu", "fp32", 1e-6),
    pytest.param("cuda", "fp32", 1e-3, marks=pytest.mark.gpu),
    pytest.param("cuda", "bf16", 2e-2, marks=pytest.mark.gpu),
]


@pytest.mark.parametrize("device, precision, limit", ON_A_GPU)
def test_steps_on_a_gpu_are_those_on_the_cpu(device, precision, limit):
    """Losses and gradient norms of three steps, relative to those in fp32 on the CPU."""
    expected = steps_on("cpu", "fp32")
    for found, wanted in zip(steps_on(device, precision), expected, strict=True):
        assert found == pytest.approx(wanted, rel=limit)


def steps_on(device: str, precision: str) -> list[tuple[float, float]]:
    """Loss and gradient norm of three steps of one rank on a device, by the attention of `auto`."""
    world = processes.World(0, 1, 0, 1, torch.device(device))
    model_cfg = replace(MODEL, d_model=96, alibi=True, attn_impl="auto")
    cfg = replace(RUN, microbatch_size=5)
    model, optimizer = build(world, cfg, model_cfg, precision)
    curve = []
    for step in range(3):
        rows = global_rows(step, cfg, model_cfg).to(device)
        loss, norm, _ = fsdp_train.train_step(model, optimizer, rows, step, cfg, world, precision)
        curve.append((loss.item(), norm.item()))
    return curve


COMPILED = [
    pytest.param(True, how, marks=pytest.mark.slow) for how in ("none", "selective", "full")
]


@pytest.mark.parametrize("compiled, how", [(False, "selective"), *COMPILED])
def test_every_optimisation_on_gives_the_curve_of_none(ranks, compiled, how):
    """Chunked loss, blocked attention, fused AdamW, recomputation, sharding, compiler."""
    model, cfg = replace(MODEL, attn_impl="auto"), replace(RUN, sharding="ZERO1", microbatch_size=2)
    found = ranks(2)(train, replace(cfg, compile=compiled, activation_checkpointing=how), model)[0][
        0
    ]
    assert_same_curve(found, ranks(1)(train_plainly, False)[0], loss=1e-5, norm=1e-4)


def step_with_z_loss(world, z_loss):
    cfg = replace(RUN, z_loss=z_loss, microbatch_size=5)
    model, optimizer = build(world, cfg)
    rows = global_rows(0)
    loss = fsdp_train.train_step(model, optimizer, rows, 0, cfg, world, "fp32")[0].item()
    model, _ = build_plain(cfg)
    log_z = model(rows[:, :-1]).logsumexp(-1)
    return loss, log_z.square().mean().item()


def test_the_z_loss_is_added(ranks):
    plain, square = ranks(1)(step_with_z_loss, 0.0)[0]
    assert ranks(1)(step_with_z_loss, 0.1)[0][0] == pytest.approx(plain + 0.1 * square, rel=1e-5)


def losses_with_dropout(world):
    """(seed, step, rank, steps taken before) -> loss of that step on fresh weights."""
    model_cfg, found = replace(MODEL, resid_pdrop=0.3), {}
    for seed, step, rank, before in [
        (1, 4, 0, 0),
        (1, 4, 0, 3),
        (1, 5, 0, 0),
        (1, 4, 1, 0),
        (2, 4, 0, 0),
    ]:
        model, optimizer = build_plain(RUN, model_cfg)
        torch.rand(before)  # whatever was drawn earlier
        cfg, someone = replace(RUN, seed=seed), replace(world, dp_rank=rank, dp_size=1)
        loss, *_ = fsdp_train.train_step(
            model, optimizer, global_rows(0), step, cfg, someone, "fp32"
        )
        found[seed, step, rank, before] = loss.item()
    return found


def test_dropout_depends_on_seed_step_and_rank_alone(ranks):
    found = ranks(1)(losses_with_dropout)[0]
    assert (
        found[1, 4, 0, 0] == found[1, 4, 0, 3]
    )  # so a resumed run draws the masks of an undisturbed one
    assert len(set(found.values())) == 4


# -------------------------------------------------------------------------------------------------
# What goes over the wire


KINDS = ("_allgather", "_reduce_scatter", "allreduce")


def count_collectives(world, cfg):
    """All-gathers, reduce-scatters and all-reduces of one step of 4 microbatches."""
    model, optimizer = build(world, cfg)
    counts = []
    for _ in range(2):  # and again after an optimizer step, when nothing is new to FSDP
        with Count() as count:
            for i in range(4):
                rows = global_rows(i)
                parallel.before_microbatch(model, cfg, last=i == 3)
                model(rows[:, :-1], labels=rows[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
        calls = list(count.operators.elements())  # "c10d::_allgather_base_" and the like
        counts.append(
            tuple(sum(call.startswith(f"c10d::{kind}") for call in calls) for kind in KINDS)
        )
    return counts


@pytest.mark.parametrize(
    "mode, wanted",
    [
        (
            "FULL_SHARD",
            (36, 20, 0),
        ),  # 4 x (5 forward, 4 again backward, since the root keeps its weights), 4 x 5
        ("SHARD_GRAD_OP", (20, 20, 0)),
        ("ZERO1", (5, 5, 0)),
        ("DDP", (0, 0, 5)),
        ("HYBRID_SHARD", (36, 20, 5)),  # between the nodes only once
    ],
)
def test_collectives_of_a_step(ranks, mode, wanted):
    """Four microbatches, five sharded units, as in the table at the top of parallel.py."""
    found = ranks(4)(count_collectives, replace(RUN, sharding=mode, shard_size=2))
    assert found == [[wanted, wanted]] * 4


# -------------------------------------------------------------------------------------------------
# Gradient clipping


def clip_a_model(world, cfg, max_norm):
    """Norm and gradients after our clipping of a sharded model, PyTorch's of a plain one."""
    rows = global_rows(0)
    plain, _ = build_plain(cfg)
    plain(rows[:, :-1], labels=rows[:, 1:]).backward()
    model, _ = build(world, cfg)
    mine = rows_of(world, rows)
    (model(mine[:, :-1], labels=mine[:, 1:]) * world.global_size).backward()
    theirs = torch.nn.utils.clip_grad_norm_(plain.parameters(), max_norm)
    ours = clip(model.parameters(), max_norm)
    gradients = [
        (whole(p.grad), q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True)
    ]
    return ours.item(), theirs.item(), gradients


@pytest.mark.parametrize(
    "size, mode", [(1, "FULL_SHARD"), (2, "DDP"), (4, "FULL_SHARD"), (4, "HYBRID_SHARD")]
)
@pytest.mark.parametrize("max_norm", [1.0, 1e9])
def test_clipping_a_sharded_model_equals_pytorch_on_the_plain_one(ranks, size, mode, max_norm):
    for ours, theirs, gradients in ranks(size)(
        clip_a_model, replace(RUN, sharding=mode, shard_size=2), max_norm
    ):
        assert ours == pytest.approx(theirs, rel=1e-5) and ours > 10
        for a, b in gradients:
            torch.testing.assert_close(a, b, rtol=2e-4, atol=1e-5 * min(1, max_norm))


def clip_a_mixture(world, max_norm):
    """Plain tensors and DTensors on two meshes; one has fewer rows than its mesh has ranks."""
    flat = init_device_mesh("cpu", (4,))
    grid = init_device_mesh("cpu", (2, 2))
    layouts = [None, (flat, [Shard(0)]), (flat, [Shard(0)]), (grid, [Replicate(), Shard(0)])]
    layouts += [
        (grid, [Shard(0), Shard(1)]),
        (grid, [Replicate(), Replicate()]),
        (flat, [Shard(1)]),
    ]
    fulls, params = [], []
    for i, layout in enumerate(layouts):
        full = torch.randn((3, 5), generator=torch.Generator().manual_seed(i))
        mine = distribute_tensor(full.clone(), *layout) if layout else full.clone()
        param = torch.nn.Parameter(torch.zeros_like(mine))
        param.grad = mine
        params.append(param)
        fulls.append(torch.nn.Parameter(torch.zeros(3, 5)))
        fulls[-1].grad = full
    params.append(torch.nn.Parameter(torch.zeros(2)))  # frozen: no gradient
    wanted = torch.nn.utils.clip_grad_norm_(fulls, max_norm or float("inf"))
    norm = clip(params, max_norm)
    grads = [whole(p.grad) for p in params[:-1]]
    return norm, wanted, [(g, f.grad) for g, f in zip(grads, fulls, strict=True)]


@pytest.mark.parametrize("max_norm", [0.5, 0])
def test_clipping_a_mixture_of_layouts(ranks, max_norm):
    for norm, wanted, gradients in ranks(4)(clip_a_mixture, max_norm):
        torch.testing.assert_close(norm, wanted, rtol=1e-6, atol=0)
        for ours, theirs in gradients:
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


def clip_a_strided_shard(world):
    """As tensor parallelism under FSDP: rows are cut for mesh dimension 1, then for 0."""
    grid = init_device_mesh("cpu", (2, 2))
    i, j = grid.get_coordinate()
    full = torch.randn((8, 5), generator=torch.Generator().manual_seed(0))
    mine = full.chunk(2)[j].chunk(2)[i].clone()
    layout = [_StridedShard(0, split_factor=2), Shard(0)]
    param = torch.nn.Parameter(
        DTensor.from_local(torch.zeros_like(mine), grid, layout, run_check=False)
    )
    param.grad = DTensor.from_local(mine, grid, layout, run_check=False)
    norm = clip([param], 0.5)
    return norm, full.norm(), param.grad.to_local(), full.chunk(2)[j].chunk(2)[i] / full.norm() / 2


def test_clipping_a_strided_shard(ranks):
    for norm, wanted, gradient, clipped in ranks(4)(clip_a_strided_shard):
        torch.testing.assert_close(norm, wanted)
        torch.testing.assert_close(gradient, clipped)


# -------------------------------------------------------------------------------------------------
# Initial weights, evaluation


def initial_weights_equal(world, cfg):
    """Do the sharded initial weights equal the plain ones bit by bit? Are they really sharded?"""
    model, _ = build(world, cfg)
    plain, _ = build_plain(cfg)
    local = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    kept = sum(p.numel() for p in local) / sum(p.numel() for p in plain.parameters())
    return equal(full_weights(model), full_weights(plain)), kept


@pytest.mark.parametrize("size, mode", EVERYWHERE)
def test_initial_weights_do_not_depend_on_the_ranks(ranks, size, mode):
    found = ranks(size)(initial_weights_equal, replace(RUN, sharding=mode, shard_size=min(size, 2)))
    assert all(same for same, _ in found)
    shards = {"DDP": 1, "HYBRID_SHARD": min(size, 2)}.get(mode, size)
    assert sum(kept for _, kept in found) == pytest.approx(size / shards)


BYTES = replace(MODEL, vocab_size=257, max_seq_len=16)


def train_and_evaluate(world, cfg, folder, evaluations):
    """Losses and norms of four steps with `evaluations` in between, and what they gave."""
    val = data.Split(folder, "val", BYTES.max_seq_len)
    model, optimizer = build(world, cfg, BYTES)
    curve, values = [], []
    for step in range(4):
        values += [fsdp_train.evaluate(model, val, cfg, world, "fp32") for _ in range(evaluations)]
        rows = rows_of(world, global_rows(step, cfg, BYTES))
        curve.append(
            [
                x.item()
                for x in fsdp_train.train_step(model, optimizer, rows, step, cfg, world, "fp32")[:2]
            ]
        )
    return curve, values, full_weights(model)


def plain_evaluation(world, cfg, folder, n_windows):
    """Mean loss of each token of the first windows, the obvious way, on the initial weights."""
    model, _ = build_plain(cfg, BYTES)
    rows = torch.from_numpy(
        data.Split(folder, "val", BYTES.max_seq_len).windows(np.arange(n_windows))
    )
    with torch.no_grad():
        return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten()).item()


@pytest.mark.parametrize(
    "size, mode",
    [slowly(4, mode) for mode in MODES] + [(1, "ZERO1"), (2, "SHARD_GRAD_OP"), (2, "HYBRID_SHARD")],
)
def test_evaluating_between_steps_changes_nothing(ranks, tiny_data, size, mode):
    """Not the losses, not a bit of the weights; and each evaluation is right."""
    cfg = replace(
        RUN,
        sharding=mode,
        shard_size=min(size, 2),
        microbatch_size=2,
        eval_tokens=7 * 16,
        warmup_steps=0,
    )
    without = ranks(size)(train_and_evaluate, cfg, tiny_data, 0)[0]
    found = ranks(size)(train_and_evaluate, cfg, tiny_data, 2)
    assert found[0][0] == without[0] and equal(found[0][2], without[2])
    values = found[0][1]
    assert all(rank[1] == values for rank in found)
    assert (
        values[0::2] == values[1::2] and len(set(values)) == 4
    )  # each sees the weights of its moment
    assert values[0] == pytest.approx(ranks(1)(plain_evaluation, cfg, tiny_data, 7)[0], rel=1e-6)


def evaluate_around_an_update(world, cfg, folder, before):
    """The validation loss after an optimizer step; with `before` there is also one before it."""
    val = data.Split(folder, "val", BYTES.max_seq_len)
    model, optimizer = build(world, cfg, BYTES)
    rows = rows_of(world, global_rows(0, cfg, BYTES))
    model(rows[:, :-1], labels=rows[:, 1:]).backward()
    if before:
        fsdp_train.evaluate(model, val, cfg, world, "fp32")
    sharded = all(isinstance(p, DTensor) for p in model.parameters())
    optimizer.step()
    return fsdp_train.evaluate(model, val, cfg, world, "fp32"), sharded


@pytest.mark.parametrize("mode", MODES)
def test_weights_that_an_evaluation_gathered_are_dropped(ranks, tiny_data, mode):
    """Else the optimizer updates the shards only, and the next pass uses the old weights."""
    cfg = replace(RUN, sharding=mode, shard_size=2, eval_tokens=7 * 16)
    without = ranks(4)(evaluate_around_an_update, cfg, tiny_data, False)
    assert ranks(4)(evaluate_around_an_update, cfg, tiny_data, True) == without
    assert without[0][1]


def evaluate_only(world, cfg, folder):
    model, _ = build(world, cfg, BYTES)
    return fsdp_train.evaluate(
        model, data.Split(folder, "val", BYTES.max_seq_len), cfg, world, "fp32"
    )


@pytest.mark.parametrize("n_windows, microbatch", [(1, 2), (5, 1), (9, 3), (8, 2), (3, 64)])
def test_evaluation_counts_every_window_once(ranks, tiny_data, n_windows, microbatch):
    cfg = replace(RUN, microbatch_size=microbatch, eval_tokens=n_windows * 16 + 15)
    wanted = ranks(1)(plain_evaluation, cfg, tiny_data, n_windows)[0]
    for size in (1, 2, 4):
        assert (
            ranks(size)(evaluate_only, cfg, tiny_data) == [pytest.approx(wanted, rel=1e-6)] * size
        )


def test_evaluation_ends_with_the_data(ranks, tiny_data):
    cfg = replace(RUN, microbatch_size=64, eval_tokens=10**9)
    wanted = ranks(1)(plain_evaluation, cfg, tiny_data, len(data.Split(tiny_data, "val", 16)))[0]
    assert ranks(4)(evaluate_only, cfg, tiny_data) == [pytest.approx(wanted, rel=1e-6)] * 4


# -------------------------------------------------------------------------------------------------
# Mesh, decisions, starting


@pytest.mark.skipif(
    sys.platform != "linux", reason="elsewhere memory is promised and found wanting later"
)
def test_weights_that_do_not_fit_are_the_users_mistake():
    with torch.device("meta"):
        model = MPT(
            MPTConfig(d_model=2**16, n_heads=64, n_layers=1, vocab_size=2**24)
        )  # 4 TB of embeddings
    with pytest.raises(
        UserError, match="^the weights do not fit into the memory of a device: lower d_model"
    ) as caught:
        parallel.materialize(model, torch.device("cpu"), None)
    assert "\n" not in str(caught.value)


def test_a_buffer_of_your_own_is_not_left_with_garbage():
    with torch.device("meta"):
        model = MPT(MPTConfig(d_model=16, n_heads=2, n_layers=1, vocab_size=64))
        model.transformer.register_buffer("cosines", torch.ones(4), persistent=False)
    with pytest.raises(
        UserError, match=r"nothing fills the buffers of model.py \(transformer.cosines\)"
    ):
        parallel.materialize(model, torch.device("cpu"), 1)


def mesh_of(world, cfg, local_size):
    try:
        mesh = parallel.make_mesh(replace(world, local_size=local_size), cfg)
    except UserError as error:
        return str(error)
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


def groups_of_a_mesh(world, cfg, local_size):
    """The groups that a new mesh makes all ranks wait for; sizes of those that this rank is in."""
    c10d = dist.distributed_c10d
    before = set(c10d._world.pg_map)
    naming = mock.patch.object(c10d, "_process_group_name", wraps=c10d._process_group_name)
    unwrapped = mock.patch.object(parallel, "connect_mesh", parallel.connect_mesh.__wrapped__)
    with unwrapped, naming as named:
        parallel.make_mesh(replace(world, local_size=local_size), cfg)
    # All ranks number the groups that they create together; the others are named by a hash.
    waited_for = [call for call in named.call_args_list if not call.kwargs["use_hashed_name"]]
    new = set(c10d._world.pg_map) - before
    return len(waited_for), sorted(group.size() for group in new)


@pytest.mark.parametrize(
    "mode, shard_size, waited_for, sizes",
    [
        ("FULL_SHARD", 0, 0, []),
        ("SHARD_GRAD_OP", 0, 0, []),
        ("ZERO1", 0, 0, []),
        ("DDP", 0, 0, [1]),
        ("HYBRID_SHARD", 0, 0, [2, 2]),  # two nodes of two ranks
        ("HYBRID_SHARD", 4, 0, [1]),
        ("HYBRID_SHARD", 1, 0, [1]),
    ],
)
def test_no_groups_are_made_that_nobody_uses(ranks, mode, shard_size, waited_for, sizes):
    """With all of pp, dp_replicate, dp_shard, tp it would be 12 groups here, 1,096 on 512 ranks."""
    cfg = replace(RUN, sharding=mode, shard_size=shard_size)
    assert ranks(4)(groups_of_a_mesh, cfg, 2) == [(waited_for, sizes)] * 4


def test_a_shard_size_that_does_not_divide_is_the_users_mistake(ranks):
    found = ranks(4)(mesh_of, replace(RUN, sharding="HYBRID_SHARD", shard_size=3), 2)
    assert found == ["shard_size 3 does not divide the 4 data-parallel ranks"] * 4


def decide(world, good):
    def decision():
        assert dist.get_rank() == 0
        if not good:
            raise UserError("no such file")
        return {"path": Path("a/b"), "step": 3}

    try:
        return processes.rank_zero_decides(decision)
    except UserError as error:
        return f"UserError: {error}"


@pytest.mark.parametrize("size", [1, 4])
def test_rank_zero_decides_for_all(ranks, size):
    assert ranks(size)(decide, True) == [{"path": Path("a/b"), "step": 3}] * size
    assert ranks(size)(decide, False) == ["UserError: no such file"] * size


def in_pairs(world, cfg, folder):
    """Train and evaluate where ranks 0 and 1, and 2 and 3, share a data-parallel rank.

    As tensor parallelism will lay them out; here both of a pair hold the same part of the model.
    """
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "pair"))
    mesh = grid["dp_shard"]
    pair = replace(
        world, dp_rank=world.global_rank // 2, dp_size=2, dp_group=mesh.get_group("dp_shard")
    )
    with torch.device("meta"):
        model = MPT(BYTES)
    model = parallel.parallelize(model, mesh, cfg, "fp32")
    parallel.materialize(model, world.device, cfg.seed)
    optimizer = optim.build_optimizer(model.parameters(), cfg)
    return steps_and_evaluation(model, optimizer, pair, cfg, folder)


def alone(world, cfg, folder):
    """The same on ranks that each read rows of their own."""
    model, optimizer = build(world, cfg, BYTES)
    return steps_and_evaluation(model, optimizer, world, cfg, folder)


def steps_and_evaluation(model, optimizer, world, cfg, folder):
    """(loss, norm, batch hash) of three steps with dropout, then the validation loss."""
    dataset = data.Dataset(folder, BYTES)
    figures = []
    for step, rows in dataset.batches(range(3), cfg, world):
        assert len(rows) == cfg.global_batch_size // world.dp_size
        result = fsdp_train.train_step(model, optimizer, rows, step, cfg, world, "fp32")
        figures += [figure.item() for figure in result]
    return [*figures, fsdp_train.evaluate(model, dataset.val, cfg, world, "fp32")]


def test_ranks_that_share_a_model_are_not_counted_twice(ranks, tiny_data):
    """Four ranks in pairs that read the same rows train exactly as two ranks do."""
    cfg = replace(RUN, sharding="FULL_SHARD", microbatch_size=2, eval_tokens=9 * 16)
    wanted = ranks(2)(alone, cfg, tiny_data)
    assert ranks(4)(in_pairs, cfg, tiny_data) == [wanted[0]] * 4


def precision_of(world, setting):
    return parallel.choose_precision(replace(RUN, precision=setting), world.device)


def test_all_ranks_choose_one_precision(ranks):
    chosen = ranks(4)(precision_of, "auto")
    assert chosen[0] in ("fp32", "bf16") and len(set(chosen)) == 1
    assert ranks(4)(precision_of, "fp32") == ["fp32"] * 4


def test_srun_without_torchrun(tmp_path):
    """Two processes that find each other by SLURM's variables; the port is made of the job's id."""
    root = Path(parallel.__file__).parent
    with socket.socket() as probe:
        for port in range(20000, 32000):
            try:
                probe.bind(("localhost", port))
                break
            except OSError:
                continue
    kept = {
        k: v
        for k, v in os.environ.items()
        if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")
    }
    slurm = {
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_JOB_ID": str(port - 20000),
        "MASTER_ADDR": "localhost",
    }
    processes = []
    for rank in ("0", "1"):
        env = kept | slurm | {"SLURM_PROCID": rank, "SLURM_LOCALID": rank, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, root / "parallel.py", "--sharding=HYBRID_SHARD", "--device=cpu"]
        processes.append(
            subprocess.Popen(command, env=env, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
        )
    for rank, process in enumerate(processes):
        out, _ = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0
        place = {"dp_replicate": 0, "dp_shard": rank}
        assert out.strip() == f"global rank {rank} of 2 on cpu, HYBRID_SHARD: {place}"


def dtypes_in_a_block(world):
    """What a block gets under FSDP and bf16: (residual stream, ALiBi slopes)."""
    cfg, model_cfg = (
        TrainConfig(),
        MPTConfig(d_model=32, n_heads=16, n_layers=1, vocab_size=64, alibi=True),
    )
    model, _ = build(world, cfg, model_cfg, "bf16")
    seen = []
    model.transformer.blocks[0].attn.register_forward_pre_hook(
        lambda _, args: seen.extend([args[0].dtype, args[1].slopes.dtype])
    )
    with parallel.autocast(world.device, "bf16"):
        model(torch.zeros(1, 4, dtype=torch.long))
    return seen


def test_alibi_slopes_stay_fp32_in_bf16(ranks):
    """Slopes of 16 heads are no powers of two: bf16 would bend them by up to 0.4 %."""
    assert ranks(1)(dtypes_in_a_block) == [[torch.bfloat16, torch.float32]]
