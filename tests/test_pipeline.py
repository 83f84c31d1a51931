"""pipeline.py on real gloo ranks: however the layers are cut into stages, training is the same."""

import hashlib
import itertools
import math
import weakref
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from test_parallel import slowly
from test_tensor_parallel import (
    MODEL,
    RUN,
    SEPARATOR,
    alone,
    check,
    check_cover,
    covering_set,
    curves,
    initial_weights_fit,
    rows_of_step,
    settings,
    take_steps,
    team_of,
)

import fsdp_train
import parallel
import pipeline
import tensor_parallel
from loss import IGNORE

MODEL = replace(MODEL, n_layers=5)  # neither two, three nor four stages have equally many

# --- The same curve as one process

# (tensor ranks, stages, data-parallel ranks). Four heads cannot be cut in three. With one stage:
# test_parallel.py and test_tensor_parallel.py.
GRIDS = [grid for grid in itertools.product((1, 2), (2, 3, 4), (1, 2)) if math.prod(grid) <= 4]
QUICK = [(1, 2, 1), (1, 2, 2), (1, 4, 1)]


@pytest.mark.parametrize("tp, pp, dp", [grid if grid in QUICK else slowly(*grid) for grid in GRIDS])
def test_every_grid_of_ranks_trains_as_one_process(ranks, tp, pp, dp):
    cfg = replace(RUN, tp=tp, pp=pp, global_batch_size=12)
    check(ranks, tp * pp * dp, [(MODEL, cfg)])


OPTIONS = {
    "sharding": ["DDP", "ZERO1", "SHARD_GRAD_OP", "FULL_SHARD", "HYBRID_SHARD"],
    "shard_size": [1, 2],  # of HYBRID_SHARD
    "sequence_parallel": [False, True],
    "positions": [{"alibi": True}, {"alibi": False, "rope": True}, {"alibi": False}],
    "kv_n_heads": [4, 2, 1],
    "tie_word_embeddings": [True, False],
    "no_bias": [True, False],
    "qk_ln": [False, True],
    "attn_uses_sequence_id": [False, True],
    "activation_checkpointing": ["none", "selective", "full"],
    "recompute_every": [1, 2],
    "z_loss": [0.0, 1e-3],
    "logit_scale": [None, 0.5],
    # Of 8 rows, or of 4 each on two data-parallel ranks: many microbatches; a smaller last one;
    # a single one, fewer than there are stages.
    "microbatch_size": [1, 3, 8],
    "grid": [(2, 2), (1, 2), (1, 4)],  # (tp, pp) on four ranks
}


def possible(case):
    """Only tensor ranks split tokens, and only data-parallel ranks share weights."""
    shards = case.get("sharding", "DDP") != "DDP"
    splits_tokens = case.get("sequence_parallel", False)
    grids = [case["grid"]] if "grid" in case else OPTIONS["grid"]
    return any((tp > 1 or not splits_tokens) and (tp * pp < 4 or not shards) for tp, pp in grids)


def settings_of(case):
    """(model settings, settings) of a case of the covering set."""
    tp, pp = case["grid"]
    others = {name: value for name, value in case.items() if name != "grid"}
    return settings(others | {"tp": tp, "pp": pp}, MODEL)


def test_the_covering_set_covers_every_pair():
    check_cover(covering_set(OPTIONS, possible), OPTIONS, possible)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_every_two_options_together_train_as_one_process(ranks, part):
    check(ranks, 4, [settings_of(case) for case in covering_set(OPTIONS, possible)[part::4]])


@pytest.mark.slow
def test_eight_ranks_train_as_one_process(ranks):
    """On a stage in the middle the root of FSDP has no weights of its own."""
    grids = [
        {"tp": 2, "pp": 2, "sharding": "ZERO1", "sequence_parallel": True},
        {"pp": 4, "sharding": "ZERO1", "microbatch_size": 1},
        {"pp": 4, "sharding": "FULL_SHARD"},
        {"pp": 2, "sharding": "HYBRID_SHARD", "shard_size": 2, "microbatch_size": 1},
    ]
    try:
        check(ranks, 8, [(MODEL, replace(RUN, **grid)) for grid in grids], steps=5)
    finally:
        ranks(8).stop()  # no other test needs so many


@pytest.mark.slow
@pytest.mark.parametrize(
    "size, grids",
    [
        (2, [{"pp": 2}, {"pp": 2, "activation_checkpointing": "selective"}]),
        (
            4,
            [
                {"pp": 4, "recompute_every": 2, "activation_checkpointing": "full"},
                {"pp": 2, "sharding": "FULL_SHARD"},
                {"pp": 2, "sharding": "ZERO1"},
                {"pp": 2, "tp": 2, "sequence_parallel": True},
            ],
        ),
    ],
)
def test_in_bf16_the_curve_is_that_of_bf16(ranks, size, grids):
    jobs = [(MODEL, replace(RUN, **grid)) for grid in grids]
    check(ranks, size, jobs, "bf16", of_loss=2e-3, of_norm=1e-2)


@pytest.mark.slow
def test_in_bf16_stages_round_where_one_process_does(ranks):
    """So the losses are equal bit by bit, until sums in another order change a weight."""
    jobs = [(MODEL, replace(RUN, pp=2))]
    ((wanted,),) = ranks(1)(curves, alone(jobs), "bf16")
    for (found,) in ranks(2)(curves, jobs, "bf16"):
        assert [loss for loss, _ in found[:2]] == [loss for loss, _ in wanted[:2]]


def gradients_in_float64(_, job):
    """(loss, norm, [(name, corner in the whole tensor, gradient), ...]) of a step's backward."""
    model_cfg, cfg = job
    world = team_of(cfg.tp, cfg.pp)
    model, _ = parallel.build(model_cfg, cfg, world, "fp32", cfg.seed)
    model.double()
    model.separator = SEPARATOR
    rows = rows_of_step(0, cfg, model_cfg)
    ids, labels = rows[:, :-1], rows[:, 1:]
    n_tokens = (labels != IGNORE).sum()
    run = fsdp_train.forward_backward if cfg.pp == 1 else fsdp_train.forward_backward_in_stages
    loss = run(model, fsdp_train.cut(ids, labels, cfg), n_tokens, cfg, world, "fp32")
    tensor_parallel.sum_partial_gradients(model)
    pipeline.sum_tied_gradients(model)
    layout = tensor_parallel.layout_of(model)
    found = []
    for name, param in model.named_parameters():
        found += [(name, corner, piece) for corner, piece in layout.pieces(name, param.grad)]
    return loss.item(), parallel.grad_norm(model).item(), found


@pytest.mark.parametrize(
    "size, grid, changes",
    [
        (2, {"pp": 2}, {}),
        slowly(3, {"pp": 3}, {"tie_word_embeddings": False, "alibi": False, "no_bias": False}),
        slowly(4, {"pp": 4, "microbatch_size": 3}, {"alibi": False, "rope": True, "qk_ln": True}),
        slowly(4, {"pp": 2, "tp": 2}, {"kv_n_heads": 2, "attn_uses_sequence_id": True}),
        slowly(
            4,
            {"pp": 2, "tp": 2, "sequence_parallel": True, "activation_checkpointing": "selective"},
            {"kv_n_heads": 1, "qk_ln": True, "no_bias": False, "alibi": False},
        ),
    ],
)
def test_in_float64_nothing_but_the_order_of_sums_differs(ranks, size, grid, changes):
    """Every gradient of every stage, whatever a curve would not show."""
    job = replace(MODEL, **changes), replace(RUN, z_loss=1e-3, **grid)
    ((wanted, wanted_norm, whole),) = ranks(1)(gradients_in_float64, *alone([job]))
    whole = {name: grad for name, _, grad in whole}
    names = set()
    for loss, norm, pieces in ranks(size)(gradients_in_float64, job):
        assert loss == pytest.approx(wanted, rel=1e-6)  # an fp32 sum of the microbatches'
        assert norm == pytest.approx(wanted_norm, rel=1e-6)  # in fp32
        for name, corner, piece in pieces:
            place = tuple(slice(a, a + n) for a, n in zip(corner, piece.shape, strict=True))
            # A bias of all keys changes no softmax: its gradient is 0 but for rounding.
            norm_of_whole = whole[name].norm().clamp(min=1e-3)
            assert (piece - whole[name][place]).norm() / norm_of_whole < 1e-9, (name, corner)
            names.add(name)
    assert names == whole.keys()


@pytest.mark.parametrize(
    "size, grid",
    [(2, {"pp": 2}), slowly(4, {"pp": 2, "sharding": "FULL_SHARD"}), slowly(4, {"pp": 2, "tp": 2})],
)
def test_initial_weights_are_those_of_one_process(ranks, size, grid):
    assert ranks(size)(initial_weights_fit, replace(RUN, **grid)) == [""] * size


# --- What both ends have, and what one stage cannot know


def tied_embedding(_, cfg):
    """(stage, this rank's part of the embedding or None) after three steps."""
    world = team_of(cfg.tp, cfg.pp)
    model, optimizer = parallel.build(MODEL, cfg, world, "fp32", cfg.seed)
    take_steps(model, optimizer, range(3), world, cfg, MODEL)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    found = weights.get("transformer.wte.weight")
    return None if found is None else getattr(found, "to_local", lambda: found)().clone()


@pytest.mark.slow
@pytest.mark.parametrize("grid", [{"pp": 2}, {"pp": 4}, {"pp": 2, "tp": 2}])
def test_both_ends_keep_the_same_embedding(ranks, grid):
    """Bit by bit: otherwise they drift apart, and a checkpoint has that of one end."""
    found = ranks(4)(tied_embedding, replace(RUN, **grid))
    of_stage = 4 // grid["pp"]
    first, last = found[:of_stage], found[-of_stage:]
    assert all(torch.equal(a, b) for a, b in zip(first, last, strict=True))
    assert all(part is None for part in found[of_stage:-of_stage])


def step_with_a_bad_gradient(_, cfg, bad_stage):
    """(loss, norm) of a step in which one stage has a NaN; whether weights and moments changed."""
    world = team_of(cfg.tp, cfg.pp)
    model, optimizer = parallel.build(MODEL, cfg, world, "fp32", cfg.seed)
    take_steps(model, optimizer, range(2), world, cfg, MODEL)

    def everything():
        moments = [value for state in optimizer.state.values() for value in state.values()]
        return [tensor.detach().clone() for tensor in [*model.parameters(), *moments]]

    before = everything()
    if world.pp_rank == bad_stage:
        weight = next(model.transformer.blocks.parameters())
        weight.register_hook(lambda grad: grad * math.nan)
    (figures,) = take_steps(model, optimizer, [2], world, cfg, MODEL)
    return figures, all(map(torch.equal, before, everything()))


@pytest.mark.parametrize("bad_stage", [0, 1])
def test_a_nan_on_one_stage_makes_all_of_them_skip_the_step(ranks, bad_stage):
    cfg = replace(RUN, pp=2)
    for (loss, norm), unchanged in ranks(2)(step_with_a_bad_gradient, cfg, bad_stage):
        assert math.isfinite(loss) and math.isnan(norm) and unchanged


# --- What a stage keeps


def hidden_states_in_a_step(_, cfg):
    """(most received tensors at a time, most outputs of this stage, what is left after the step)"""
    world = team_of(cfg.tp, cfg.pp)
    model, optimizer = parallel.build(MODEL, cfg, world, "fp32", cfg.seed)
    received, made, most = [], [], [0, 0]

    def alive(references):
        return sum(reference() is not None for reference in references)

    def transfer(pipe, neighbour, send=None, receive=None, real=pipeline.Pipe.transfer):
        if receive is not None:
            received.append(weakref.ref(receive))
        most[:] = map(max, most, (alive(received), alive(made)))
        return real(pipe, neighbour, send, receive)

    model.register_forward_hook(lambda module, inputs, y: made.append(weakref.ref(y)))
    with mock.patch.object(pipeline.Pipe, "transfer", transfer):
        take_steps(model, optimizer, [0], world, cfg, MODEL)
    gradients = sum(p.grad is not None for p in model.parameters())
    return *most, alive(received) + alive(made) + gradients


@pytest.mark.parametrize("stages", [2, slowly(4)])
def test_hidden_states_stay_only_while_a_backward_needs_them(ranks, stages):
    """Stage s of p keeps those of p - s microbatches, of 8. Nothing is left after the step."""
    cfg = replace(RUN, pp=stages, microbatch_size=1)
    for stage, found in enumerate(ranks(stages)(hidden_states_in_a_step, cfg)):
        most_received, most_made, left = found
        assert most_received <= stages - stage + 1  # one is on its way
        assert most_made == 0  # what is sent is a copy of the reference
        assert left == 0


# --- Dropout


def masks_of_two_steps(_, cfg):
    """A hash of every mask that dropout draws on this rank, in order."""
    world = team_of(cfg.tp, cfg.pp)
    model_cfg = replace(MODEL, resid_pdrop=0.5, emb_pdrop=0.5)
    model, optimizer = parallel.build(model_cfg, cfg, world, "fp32", cfg.seed)
    masks = []

    def dropout(x, p, training, real=F.dropout):
        y = real(x, p, training)
        masks.append(hashlib.sha256((y == 0).numpy().tobytes()).hexdigest())
        return y

    with mock.patch.object(F, "dropout", dropout):
        take_steps(model, optimizer, range(2), world, cfg, model_cfg)
    return masks


def check_masks(of_ranks):
    """Two steps of four microbatches on two stages; each rank draws a mask only once."""
    layers = [len(blocks) for blocks in map(pipeline.blocks_of, (5, 5), (0, 1), (2, 2))]
    wanted = [2 * 4 * (2 * layers[0] + 1), 2 * 4 * 2 * layers[1]]  # the embedding's on the first
    assert [len(masks) for masks in of_ranks] == wanted
    together = set().union(*of_ranks)
    assert len(together) == sum(wanted)


def test_each_stage_microbatch_and_step_draws_other_masks(ranks):
    check_masks(ranks(2)(masks_of_two_steps, replace(RUN, pp=2)))


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_ranks_of_a_stage_draw_the_same_masks(ranks, sequence_parallel):
    """With sequence parallelism each has its own tokens, and draws others."""
    cfg = replace(RUN, pp=2, tp=2, sequence_parallel=sequence_parallel)
    found = ranks(4)(masks_of_two_steps, cfg)
    for masks in (found[::2], found[1::2]):
        check_masks(masks)
    for first, second in (found[:2], found[2:]):
        assert (first == second) != sequence_parallel
        assert set(first).isdisjoint(second) == sequence_parallel


def test_dropout_of_the_embedding_is_that_of_one_process(ranks):
    """The first stage draws as one process does; other stages have nothing to draw."""
    check(ranks, 2, [(replace(MODEL, emb_pdrop=0.3), replace(RUN, pp=2))])


@pytest.mark.slow
@pytest.mark.parametrize(
    "size, grid",
    [(2, {"pp": 2}), (4, {"pp": 4}), (4, {"pp": 2, "tp": 2, "sequence_parallel": True})],
)
def test_recomputation_draws_the_masks_of_the_forward(ranks, size, grid):
    """Though forwards of later microbatches come in between. Bit by bit."""
    model_cfg = replace(MODEL, resid_pdrop=0.2, emb_pdrop=0.2, attn_pdrop=0.2)
    hows = [("none", 1), ("full", 1), ("full", 2), ("selective", 1)]
    jobs = []
    for how, every in hows:
        cfg = replace(RUN, activation_checkpointing=how, recompute_every=every, **grid)
        jobs.append((model_cfg, cfg))
    for kept, *recomputed in ranks(size)(curves, jobs):
        assert all(curve == kept for curve in recomputed)
