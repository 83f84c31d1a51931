"""However the ranks share the work, training is the same: every layout beside one process."""

import itertools
import math

import pytest
import torch
from conftest import slowly
from layouts import (
    LORA,
    build,
    check,
    covering_set,
    curves,
    is_possible,
    places,
    plainly,
    rows_of_step,
    settings,
)

import data
import fsdp_train
import parallel
import tensor_parallel

# --- Each layout alone

ON_TWO_RANKS = [
    {},
    {"sharding": "FULL_SHARD"},
    {"sharding": "SHARD_GRAD_OP"},
    {"sharding": "HYBRID_SHARD", "shard_size": 2},
    {"sharding": "DDP"},
    {"tp": 2},
    {"pp": 2},
    LORA,
    LORA | {"pp": 2},
    LORA | {"tp": 2},
]
ON_FOUR_RANKS = [{"tp": 2}, {"pp": 4}]


@pytest.mark.parametrize(
    "size, layouts", [(2, ON_TWO_RANKS), (4, ON_FOUR_RANKS)], ids=["two", "four"]
)
def test_each_layout_trains_as_one_process(ranks, size, layouts):
    check(ranks, size, [settings(**changes) for changes in layouts])


@pytest.mark.slow
def test_eight_ranks_train_as_one_process(ranks):
    """On a stage in the middle the root of FSDP has no weights of its own."""
    layouts = [
        {"tp": 2, "pp": 2, "sequence_parallel": True},
        {"pp": 4, "sharding": "FULL_SHARD", "microbatch_size": 1},
        {"pp": 2, "sharding": "HYBRID_SHARD", "shard_size": 2, "microbatch_size": 1},
    ]
    try:
        check(ranks, 8, [settings(**layout) for layout in layouts], steps=3)
    finally:
        ranks(8).stop()  # no other test needs so many


# --- All settings together, two by two

OPTIONS = {
    "layout": [  # of four ranks
        {"tp": 1, "pp": 1},
        {"tp": 2, "pp": 1},
        {"tp": 2, "pp": 1, "sequence_parallel": True},
        {"tp": 4, "pp": 1},
        {"tp": 1, "pp": 2},
        {"tp": 1, "pp": 4},
        {"tp": 2, "pp": 2},
        {"tp": 2, "pp": 2, "sequence_parallel": True},
    ],
    "sharding": [
        {"sharding": "DDP"},
        {"sharding": "ZERO1"},
        {"sharding": "SHARD_GRAD_OP"},
        {"sharding": "FULL_SHARD"},
        {"sharding": "HYBRID_SHARD", "shard_size": 2},
    ],
    "recomputation": [
        {"activation_checkpointing": "none"},
        {"activation_checkpointing": "selective"},
        {"activation_checkpointing": "full"},
        {"activation_checkpointing": "full", "recompute_every": 2},
    ],
    "adapters": [
        {},
        LORA | {"lora_targets": "Wqkv", "lora_last_blocks": 2, "rslora": True},
        LORA | {"lora_targets": "out_proj,down_proj", "lora_train": "norms"},
        LORA | {"lora_train": "norms,biases"},
    ],
    # Of 8 rows, or of 4 or 2 each: many microbatches; a smaller last one; one, fewer than stages.
    "accumulation": [{"microbatch_size": 1}, {"microbatch_size": 3}, {"microbatch_size": 8}],
    "positions": [
        {"alibi": True},
        {"alibi": False, "rope": True},
        {"alibi": False},
        {"alibi": False, "learned_pos_emb": False},
    ],
    "heads": [{"kv_n_heads": 4}, {"kv_n_heads": 2}, {"kv_n_heads": 1}],
    "tied": [{"tie_word_embeddings": True}, {"tie_word_embeddings": False}],
    "biases": [{"no_bias": True}, {"no_bias": False}],
    "qk": [{}, {"qk_ln": True}, {"qk_gn": True}],
    "norms": [{"norm_type": "low_precision_layernorm"}, {"norm_type": "rmsnorm"}],
    "feed-forward": [
        {},
        {"ffn_act_fn": "relu"},
        {"ffn_type": "mptglu"},
        {"ffn_type": "mptglu", "ffn_act_fn": "silu"},
    ],
    "window": [{"sliding_window_size": -1}, {"sliding_window_size": 5}],
    "documents": [{"attn_uses_sequence_id": False}, {"attn_uses_sequence_id": True}],
    "z_loss": [{"z_loss": 0.0}, {"z_loss": 1e-3}],
    "logits": [{}, {"logit_scale": 0.5}, {"final_logit_softcapping": 0.5}],
    "scores": [{}, {"attn_logit_softcapping": 0.5}],
    "embedding": [{"embedding_fraction": 1.0}, {"embedding_fraction": 0.5}],
    "attention": [{"attn_impl": "reference"}, {"attn_impl": "blocks"}, {"attn_impl": "sdpa"}],
}


def job_of(case):
    """The job of a case {option: its settings}."""
    changes = {}
    for of_option in case.values():
        changes |= of_option
    return settings(**changes)


def possible(case) -> bool:
    """What config accepts; and only data-parallel ranks share weights."""
    layout = case.get("layout", {"tp": 1, "pp": 1})
    shards = case.get("sharding", OPTIONS["sharding"][0]) != OPTIONS["sharding"][0]
    is_idle = shards and layout["tp"] * layout["pp"] == 4
    return not is_idle and is_possible(job_of(case))


CASES = covering_set(OPTIONS, possible)


def test_every_two_settings_are_in_a_case():
    for a, b in itertools.combinations(OPTIONS, 2):
        for x, y in itertools.product(OPTIONS[a], OPTIONS[b]):
            is_covered = any(case[a] == x and case[b] == y for case in CASES)
            assert is_covered == possible({a: x, b: y}), (x, y)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_every_two_settings_together_train_as_one_process(ranks, part):
    """Three steps: the first updates nothing, since it has a rate of 0."""
    check(ranks, 4, [job_of(case) for case in CASES[part::4]], steps=3)


# --- bf16

BF16 = {"precision": "bf16"}


@pytest.mark.parametrize(
    "size, layout, of_loss, of_norm",
    [
        (2, {}, 1e-3, 1e-2),
        slowly(2, {"tp": 2}, 2e-3, 2e-2),
        slowly(2, LORA, 1e-3, 3e-2),
        slowly(4, {"pp": 2, "sharding": "FULL_SHARD"}, 2e-3, 1e-2),
        slowly(4, {"pp": 2, "tp": 2, "sequence_parallel": True}, 2e-3, 1e-2),
    ],
    ids=str,
)
def test_in_bf16_the_curve_is_that_of_bf16(ranks, size, layout, of_loss, of_norm):
    job = settings(**layout, **BF16)
    check(ranks, size, [job], of_loss=of_loss, of_norm=of_norm)
    ((in_bf16, in_fp32),) = ranks(1)(curves, [plainly(job), plainly(settings(**layout))], 1)
    assert in_bf16 != in_fp32


@pytest.mark.slow
def test_in_bf16_stages_round_where_one_process_does(ranks):
    """So the losses are equal bit by bit, until sums in another order change a weight."""
    job = settings(pp=2, **BF16)
    ((wanted,),) = ranks(1)(curves, [settings(**BF16)], 2)
    for (found,) in ranks(2)(curves, [job], 2):
        assert [loss for loss, _ in found] == [loss for loss, _ in wanted]


# --- Every gradient, in float64


def gradients_in_float64(_, job):
    """(loss, [(name, place in the whole tensor, gradient), ...]) of a step's backward."""
    model_cfg, cfg = job
    world, model, _ = build(job)
    model.double()
    rows = rows_of_step(0, cfg, model_cfg)
    microbatches, (n_tokens, _) = data.make_batch(rows, cfg, world.dp_rank)
    torch.set_default_dtype(torch.float64)  # of the loss's sum
    loss = fsdp_train.forward_backward(model, microbatches, n_tokens, cfg, world, "fp32")
    torch.set_default_dtype(torch.float32)
    parallel.finish_gradients(model)
    layout = tensor_parallel.layout_of(model)
    found = []
    for name, param in model.named_parameters():
        if param.requires_grad:
            found += [(name, *piece) for piece in places(layout, name, param.grad)]
    return loss.item(), parallel.grad_norm(model).item(), found


SEQUENCE = {"sequence_parallel": True}
UNTIED = {"tie_word_embeddings": False, "alibi": False, "no_bias": False}
ROPE = {"alibi": False, "rope": True, "qk_ln": True}
GROUPED = {"kv_n_heads": 2, "logit_scale": 0.5, "attn_impl": "reference", "clip_qkv": 0.5}
ONE_HEAD = {"kv_n_heads": 1, "qk_ln": True, "no_bias": False}
GATED = {"ffn_type": "mptglu", "ffn_act_fn": "silu", "norm_type": "rmsnorm", "qk_ln": True}
NORMED_HEADS = {"qk_gn": True, "kv_n_heads": 1, "no_bias": False, "norm_type": "layernorm"}
CAPPED = {
    "sliding_window_size": 5,
    "attn_logit_softcapping": 0.5,
    "final_logit_softcapping": 0.5,
    "embedding_fraction": 0.5,
    "tie_word_embeddings": False,
}
NO_POSITIONS = {"alibi": False, "learned_pos_emb": False, "qk_gn": True, "kv_n_heads": 2}
MODELS = [{}, UNTIED, ROPE, GROUPED, ONE_HEAD, GATED, NORMED_HEADS, CAPPED, NO_POSITIONS]


@pytest.mark.parametrize(
    "size, layout, changes",
    [
        *[(2, {"tp": 2}, changes) for changes in MODELS],
        *[(2, {"tp": 2} | SEQUENCE, changes) for changes in MODELS],
        (2, {"tp": 2}, LORA | {"lora_train": "norms"}),
        (2, {"tp": 2} | SEQUENCE, LORA | {"lora_train": "norms"}),
        (2, {"tp": 2} | SEQUENCE, LORA | GATED | {"lora_targets": "gate_proj"}),
        (2, {"pp": 2}, {}),
        (2, {"pp": 2}, GATED | CAPPED),
        slowly(3, {"pp": 3}, UNTIED),
        slowly(4, {"pp": 4, "microbatch_size": 3}, ROPE),
        slowly(4, {"pp": 2, "tp": 2}, {"kv_n_heads": 2, "attn_uses_sequence_id": True}),
        slowly(
            4,
            {"pp": 2, "tp": 2, "activation_checkpointing": "selective"} | SEQUENCE,
            ONE_HEAD | {"alibi": False},
        ),
    ],
    ids=str,
)
def test_in_float64_nothing_but_the_order_of_sums_differs(ranks, size, layout, changes):
    """Every gradient of every rank, whatever a curve would not show."""
    job = settings(z_loss=1e-3, **layout, **changes)
    ((wanted, wanted_norm, whole),) = ranks(1)(gradients_in_float64, plainly(job))
    whole = {name: grad for name, _, grad in whole}
    names = set()
    for loss, norm, pieces in ranks(size)(gradients_in_float64, job):
        assert loss == pytest.approx(wanted, rel=1e-12)
        assert norm == pytest.approx(wanted_norm, rel=1e-6)  # in fp32
        for name, place, piece in pieces:
            # A bias of all keys changes no softmax: its gradient is 0 but for rounding.
            norm_of_whole = whole[name].norm().clamp(min=1e-3)
            assert (piece - whole[name][place]).norm() / norm_of_whole < 1e-9, (name, place)
            names.add(name)
    assert names == whole.keys() and math.isfinite(wanted)


# --- Recomputation


DROPOUT = {"resid_pdrop": 0.2, "emb_pdrop": 0.2, "attn_pdrop": 0.2}


@pytest.mark.parametrize(
    "size, layout",
    [(2, {}), slowly(4, {"pp": 4}), slowly(4, {"pp": 2, "tp": 2} | SEQUENCE)],
    ids=str,
)
def test_recomputing_the_blocks_changes_nothing(ranks, size, layout):
    """Bit by bit: it draws the masks of the forward, though other forwards come in between."""
    hows = [("none", 1), ("full", 1), ("full", 2), ("selective", 3)]
    jobs = []
    for how, every in hows:
        more = {"activation_checkpointing": how, "recompute_every": every}
        jobs.append(settings(**layout, **more, **DROPOUT))
    for kept, *recomputed in ranks(size)(curves, jobs, 3):
        assert all(curve == kept for curve in recomputed)
