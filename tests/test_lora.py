"""lora.py: the update, its gradients, and adapters that train the same on any grid of ranks."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from test_parallel import slowly
from test_tensor_parallel import (
    MODEL,
    RUN,
    check,
    check_cover,
    covering_set,
    largest_differences,
    settings,
    take_steps,
    team_of,
)

import lora
import parallel
from config import LINEAR_LAYERS, TrainConfig, UserError
from model import MPT, init_weights

LORA = {"init_from": "a base", "lora_rank": 4, "lora_alpha": 8.0, "lr": 2e-2}
TUNE = replace(RUN, **LORA)
SMALL = replace(MODEL, n_layers=2, d_model=16, vocab_size=31)


def tuned(cfg=TUNE, model_cfg=SMALL, dtype=torch.float64, filled=True):
    """A model with adapters; filled: as if they had been trained."""
    model = MPT(model_cfg).to(dtype)
    init_weights(model, seed=1)
    lora.put_on(model, cfg)
    lora.draw(model, seed=2)
    generator = torch.Generator().manual_seed(3)
    for name, param in lora.adapters_of(model).items() if filled else []:
        if name.endswith("lora_B"):
            param.data.normal_(0, 0.1, generator=generator)
    return model


def loss_of(model):
    ids = torch.randint(0, 31, (2, 17), generator=torch.Generator().manual_seed(4))
    return model(ids[:, :-1], labels=ids[:, 1:])


# --- The update


def test_at_the_start_a_model_is_exactly_its_base():
    base = MPT(SMALL)
    init_weights(base, seed=1)
    model = tuned(dtype=torch.float32, filled=False)
    ids = torch.arange(31)[None, :16]
    assert torch.equal(model(ids), base(ids))


@pytest.mark.parametrize("rslora, scale", [(False, 8 / 4), (True, 8 / 2)])
def test_the_update_is_s_times_b_times_a(rslora, scale):
    layer = tuned(replace(TUNE, rslora=rslora)).transformer.blocks[1].ffn.up_proj
    x = torch.randn(3, 16, dtype=torch.float64)
    whole = layer.weight + scale * layer.lora_B @ layer.lora_A
    torch.testing.assert_close(layer(x), F.linear(x, whole, layer.bias), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", LINEAR_LAYERS)
def test_gradients_are_those_of_finite_differences(name):
    """Every element of one layer's A and B, in float64, by central differences."""
    model = tuned(replace(TUNE, lora_rank=2))
    loss_of(model).backward()
    block = model.transformer.blocks[0]
    layer = dict([*block.attn.named_children(), *block.ffn.named_children()])[name]
    for param in (layer.lora_A, layer.lora_B):
        flat, grad = param.data.view(-1), param.grad.view(-1)
        for i in range(len(flat)):
            value, losses = flat[i].item(), []
            for step in (1e-5, -1e-5):
                flat[i] = value + step
                losses.append(loss_of(model).item())
            flat[i] = value
            slope = (losses[0] - losses[1]) / 2e-5
            assert abs(slope - grad[i]) < 1e-6 * max(1, abs(slope)), (name, i)


def test_only_what_is_asked_for_trains():
    def trained(**settings):
        model = tuned(replace(TUNE, **settings))
        loss_of(model).backward()
        has_grad = {name for name, p in model.named_parameters() if p.grad is not None}
        assert has_grad == {name for name, p in model.named_parameters() if p.requires_grad}
        return has_grad

    block = "transformer.blocks.{}.attn.{}.lora_{}"
    assert trained(lora_targets="Wqkv", lora_last_blocks=1) == {
        block.format(1, "Wqkv", factor) for factor in "AB"
    }
    everywhere = trained()
    assert len(everywhere) == 2 * 2 * 4
    norms = {n for n in trained(lora_train="norms") - everywhere}
    assert norms and all("norm_" in name for name in norms) and "transformer.norm_f.bias" in norms
    biases = trained(lora_train="norms,biases") - everywhere - norms
    assert biases == {n for n in biases if n.endswith(".bias")} and len(biases) == 2 * 4


def test_merging_leaves_a_plain_model_with_the_same_logits():
    model = tuned()
    ids = torch.arange(31)[None, :16]
    before = model(ids)
    assert lora.merge(model) == 0
    assert dict(model.named_parameters()).keys() == dict(MPT(SMALL).named_parameters()).keys()
    torch.testing.assert_close(model(ids), before, rtol=1e-12, atol=1e-12)
    assert all(param.requires_grad for param in model.parameters())


def test_merging_says_what_rounding_to_bf16_costs():
    model = tuned(dtype=torch.float32)
    lora.store_frozen_in_bf16(model)
    layer = model.transformer.blocks[0].attn.out_proj
    exact = layer.weight.float() + lora.delta(layer)
    error = lora.merge(model)
    assert layer.weight.dtype == torch.bfloat16
    assert 0 < (layer.weight.float() - exact).abs().max() <= error < 2**-8 * exact.abs().max() * 2


@given(
    rank=st.integers(1, 6), rows=st.integers(6, 20), columns=st.integers(6, 20), seed=st.integers(0)
)
def test_factors_reproduce_an_update_of_their_rank(rank, rows, columns, seed):
    generator = torch.Generator().manual_seed(seed % 2**60)
    left = torch.randn(rows, rank, generator=generator, dtype=torch.float64)
    update = left @ torch.randn(rank, columns, generator=generator, dtype=torch.float64)
    a, b = lora.factors(update, rank)
    assert a.shape == (rank, columns) and b.shape == (rows, rank)
    torch.testing.assert_close(b @ a, update, rtol=0, atol=1e-6)


def test_adapters_are_drawn_from_seed_and_name_alone():
    def drawn(**settings):
        return lora.adapters_of(tuned(replace(TUNE, **settings), filled=False))

    everywhere, some = drawn(), drawn(lora_targets="up_proj")
    name = "transformer.blocks.1.ffn.up_proj.lora_A"
    assert torch.equal(everywhere[name], some[name])
    assert everywhere[name].abs().max() <= 1 / math.sqrt(16)
    assert all(not p.any() for name, p in everywhere.items() if name.endswith("lora_B"))


def test_dropout_is_on_the_input_of_the_adapter_alone():
    model = tuned(replace(TUNE, lora_dropout=0.5))
    layer = model.transformer.blocks[0].attn.Wqkv
    x = torch.ones(1, 16, dtype=torch.float64)
    torch.manual_seed(0)
    kept = F.dropout(x, 0.5)
    torch.manual_seed(0)
    expected = F.linear(x, layer.weight, layer.bias) + F.linear(kept, lora.delta(layer))
    torch.testing.assert_close(layer(x), expected)
    model.eval()
    assert torch.equal(layer(x), layer(x))


# --- Bad settings


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"lora_targets": "Wqvk"}, "did you mean 'Wqkv'"),
        ({"lora_targets": "Wqkv,lm_head"}, "an embedding or the output layer"),
        ({"lora_train": "bias"}, "did you mean 'biases'"),
        ({"init_from": ""}, "set --init_from"),
        ({"lora_targets": ","}, "lora_targets is empty"),
        ({"lora_rank": 0, "rslora": True}, "rslora sets nothing without adapters"),
        ({"lora_rank": 0, "lora_alpha": 32.0}, "lora_alpha sets nothing without adapters"),
        ({"lora_rank": 0, "lora_dropout": 0.1}, "lora_dropout sets nothing without adapters"),
        ({"lora_rank": 0, "lora_targets": "Wqkv"}, "lora_targets sets nothing without adapters"),
        ({"lora_rank": -1}, "lora_rank must be from 0"),
        ({"lora_alpha": 0.0}, "lora_alpha must be from"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings, message):
    with pytest.raises(UserError, match=message):
        TrainConfig(**({"init_from": "a base", "lora_rank": 4} | settings)).check()


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"lora_rank": 16}, "no low rank for Wqkv, whose weight has rank 16"),
        ({"lora_last_blocks": 3}, "more than n_layers 2"),
        ({"lora_last_blocks": 1, "pp": 2}, "the first pipeline stage would have nothing to train"),
        ({"lora_dropout": 0.1, "tp": 2}, "other masks on each tensor rank"),
    ],
)
def test_settings_that_do_not_fit_the_model_are_refused(settings, message):
    with pytest.raises(UserError, match=message):
        SMALL.check_adapters_fit(replace(TUNE, **settings))


@pytest.mark.parametrize("wants", ["biases", "norms,biases"])
def test_biases_of_a_model_without_them_cannot_be_trained(wants):
    cfg = replace(TUNE, lora_train=wants)
    SMALL.check_adapters_fit(cfg)
    with pytest.raises(UserError, match=f"lora_train={wants}: with no_bias the model has no bias"):
        replace(SMALL, no_bias=True).check_adapters_fit(cfg)


# --- The same curve on any grid of ranks


@pytest.mark.parametrize(
    "size, settings",
    [
        (2, {}),
        slowly(4, {}),
        slowly(2, {"sharding": "FULL_SHARD"}),
        slowly(4, {"sharding": "HYBRID_SHARD", "shard_size": 2}),
        slowly(2, {"sharding": "SHARD_GRAD_OP"}),
        slowly(2, {"sharding": "DDP"}),
        slowly(2, {"tp": 2}),
        slowly(4, {"tp": 2, "sequence_parallel": True, "sharding": "FULL_SHARD"}),
        slowly(4, {"tp": 4}),
        (2, {"pp": 2}),
        slowly(4, {"pp": 2, "tp": 2}),
    ],
    ids=str,
)
def test_any_number_of_ranks_trains_the_same_adapters(ranks, size, settings):
    check(ranks, size, [(MODEL, replace(TUNE, **settings))])


OPTIONS = {
    "sharding": ["FULL_SHARD", "SHARD_GRAD_OP", "ZERO1", "DDP", "HYBRID_SHARD"],
    "grid": [(1, 1), (2, 1), (1, 2)],  # tp, pp; on four ranks, two are data-parallel, or four
    "sequence_parallel": [False, True],
    "positions": [{"alibi": True}, {"alibi": False, "rope": True}, {"alibi": False}],
    "kv_n_heads": [4, 1],
    "tie_word_embeddings": [True, False],
    "no_bias": [True, False],
    "qk_ln": [False, True],
    "activation_checkpointing": ["none", "selective", "full"],
    "lora_targets": ["all", "Wqkv", "out_proj,down_proj"],
    "lora_last_blocks": [0, 2],
    "lora_train": ["", "norms", "norms,biases"],
    "rslora": [False, True],
}


def possible(case):
    """Token ranks need tensor ranks, the first of two stages adapters, and some biases to train."""
    tp, pp = case.get("grid", (2, 1))
    splits_tokens = case.get("sequence_parallel") and tp == 1
    is_idle = case.get("lora_last_blocks") and pp == 2
    lacks_biases = case.get("no_bias") and "biases" in case.get("lora_train", "")
    return not (splits_tokens or is_idle or lacks_biases)


def of_case(case):
    """(model settings, settings), as test_tensor_parallel's `settings`."""
    tp, pp = case["grid"]
    model_cfg, cfg = settings({k: v for k, v in case.items() if k != "grid"})
    return model_cfg, replace(cfg, tp=tp, pp=pp, **LORA)


@pytest.mark.slow
def test_options_together_train_the_same_adapters(ranks):
    """Every two values of two options, in fp32 on four ranks."""
    cases = covering_set(OPTIONS, possible)
    check_cover(cases, OPTIONS, possible)
    check(ranks, 4, [of_case(case) for case in cases])


@pytest.mark.slow
def test_bf16_adapters_train_the_same_on_two_ranks(ranks):
    check(ranks, 2, [(MODEL, TUNE)], "bf16", of_loss=1e-3, of_norm=3e-2)


@pytest.mark.slow
def test_compiled_blocks_train_the_same_adapters(ranks):
    job = (MODEL, replace(TUNE, global_batch_size=2))
    (compiled,) = ranks(1)(curve, job[0], replace(job[1], compile=True))
    (eager,) = ranks(1)(curve, *job)
    losses, norms = largest_differences(compiled, eager)
    assert losses < 5e-6 and norms < 1e-5


def curve(_, model_cfg, cfg):
    world = team_of(1)
    model, optimizer = parallel.build(model_cfg, cfg, world, "fp32", cfg.seed)
    return take_steps(model, optimizer, range(3), world, cfg, model_cfg)


def test_a_run_in_bf16_keeps_its_frozen_matrices_in_bf16(ranks):
    (dtypes,) = ranks(1)(dtypes_of, TUNE)
    assert dtypes == {
        "transformer.wte.weight": torch.bfloat16,
        "transformer.blocks.0.attn.Wqkv.weight": torch.bfloat16,
        "transformer.blocks.0.attn.Wqkv.bias": torch.float32,
        "transformer.blocks.0.attn.Wqkv.lora_A": torch.float32,
        "transformer.blocks.0.norm_1.weight": torch.float32,
    }


def dtypes_of(_, cfg):
    model, optimizer = parallel.build(SMALL, cfg, team_of(1), "bf16", cfg.seed)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 2 * 2 * 4
    names = """
        wte.weight blocks.0.attn.Wqkv.weight blocks.0.attn.Wqkv.bias blocks.0.attn.Wqkv.lora_A
        blocks.0.norm_1.weight
    """.split()
    return {f"transformer.{n}": model.transformer.get_parameter(n).dtype for n in names}
