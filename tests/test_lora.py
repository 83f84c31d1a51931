"""lora.py: the update, and adapters that train the same on any grid of ranks."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import LORA, MODEL, RUN, assert_near, build, curves

import flops
import lora
from config import TrainConfig
from model import MPT, init_weights
from program import UserError

TUNE = replace(RUN, **LORA)
SMALL = replace(MODEL, n_layers=2, d_model=16, vocab_size=31)
GATED = replace(SMALL, ffn_type="mptglu", ffn_act_fn="silu", norm_type="rmsnorm", no_bias=True)


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


def test_a_gated_feed_forward_has_an_adapter_on_its_gate():
    """Beside it the weights of RMSNorm train, as those of LayerNorm do."""
    model = tuned(replace(TUNE, lora_train="norms"), GATED)
    loss_of(model).backward()
    adapters, others = {}, set()
    for name, param in model.named_parameters():
        if param.grad is not None:
            assert param.grad.any(), name
            kind = name.split(".")[-2]
            if name.endswith("lora_A"):
                adapters[kind] = adapters.get(kind, 0) + 1
            elif not name.endswith("lora_B"):
                others.add(kind)
    assert adapters == dict.fromkeys(["Wqkv", "out_proj", "gate_proj", "up_proj", "down_proj"], 2)
    assert others == {"norm_1", "norm_2", "norm_f"}


@pytest.mark.parametrize("model_cfg", [SMALL, GATED], ids=["mptmlp", "mptglu"])
def test_merging_leaves_a_plain_model_with_the_same_logits(model_cfg):
    model = tuned(model_cfg=model_cfg)
    ids = torch.arange(31)[None, :16]
    before = model(ids)
    assert lora.merge(model) == 0
    assert dict(model.named_parameters()).keys() == dict(MPT(model_cfg).named_parameters()).keys()
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


@settings(deadline=None)
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
        ({"lora_train": "bias"}, "did you mean 'biases'"),
        ({"init_from": ""}, "set --init_from"),
        ({"lora_targets": ","}, "lora_targets is empty"),
        ({"lora_rank": 0, "rslora": True}, "rslora sets nothing without adapters"),
        ({"lora_alpha": 0.0}, "lora_alpha must be from"),
        # These do not fit the model:
        ({"lora_targets": "gate_proj"}, "names gate_proj, but a model with ffn_type=mptmlp has"),
        ({"lora_rank": 16}, "no low rank for Wqkv, whose weight has rank 16"),
        ({"lora_last_blocks": 3}, "more than n_layers 2"),
        ({"lora_last_blocks": 1, "pp": 2}, "the first pipeline stage would have nothing to train"),
        ({"lora_dropout": 0.1, "tp": 2}, "other masks on each tensor rank"),
    ],
)
def test_settings_that_mean_nothing_or_do_not_fit_are_refused(settings, message):
    cfg = TrainConfig(**({"init_from": "a base", "lora_rank": 4} | settings))
    with pytest.raises(UserError, match=message):
        cfg.check()
        flops.check_adapters(SMALL, cfg)


@pytest.mark.parametrize("wants", ["biases", "norms,biases"])
def test_biases_of_a_model_without_them_cannot_be_trained(wants):
    cfg = replace(TUNE, lora_train=wants)
    flops.check_adapters(SMALL, cfg)
    with pytest.raises(UserError, match=f"lora_train={wants}: with no_bias the model has no bias"):
        flops.check_adapters(replace(SMALL, no_bias=True), cfg)


# --- Trained (that any layout trains the same is in test_layouts.py)


@pytest.mark.slow
def test_compiled_blocks_train_the_same_adapters(ranks):
    cfg = replace(TUNE, global_batch_size=2)
    ((compiled, eager),) = ranks(1)(curves, [(MODEL, replace(cfg, compile=True)), (MODEL, cfg)], 3)
    assert_near(compiled, eager)


def test_a_run_in_bf16_keeps_its_frozen_matrices_in_bf16(ranks):
    (dtypes,) = ranks(1)(dtypes_of, replace(TUNE, precision="bf16"))
    assert dtypes == {
        "transformer.wte.weight": torch.bfloat16,
        "transformer.blocks.0.attn.Wqkv.weight": torch.bfloat16,
        "transformer.blocks.0.attn.Wqkv.bias": torch.float32,
        "transformer.blocks.0.attn.Wqkv.lora_A": torch.float32,
        "transformer.blocks.0.norm_1.weight": torch.float32,
    }


def dtypes_of(_, cfg):
    _, model, optimizer = build((SMALL, cfg))
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 2 * 2 * 4
    names = """
        wte.weight blocks.0.attn.Wqkv.weight blocks.0.attn.Wqkv.bias blocks.0.attn.Wqkv.lora_A
        blocks.0.norm_1.weight
    """.split()
    return {f"transformer.{n}": model.transformer.get_parameter(n).dtype for n in names}
