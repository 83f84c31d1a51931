"""weights/hf_config.py: settings to and from config.json, and refusals that name what is wrong."""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pytest
from conftest import refusal
from test_hf import LIKE_TRANSFORMERS, SMALL

from config import MPTConfig
from storage import files
from weights import hf_config


def published(name: str) -> dict:
    """A config.json: of MPT-7B on the Hub, of LLM Foundry 0.22, of transformers 4's additions."""
    return files.read_json(Path(__file__).parent / "configs" / f"{name}.json")


HUB_7B = published("hub-7b")
FOUNDRY = published("foundry-0.22")


def like_hub(top=None, **attention):
    """HUB_7B with other settings, at the top and in its attn_config."""
    return HUB_7B | (top or {}) | {"attn_config": HUB_7B["attn_config"] | attention}


def with_rope(**attention):
    return like_hub(alibi=False, rope=True, **attention)


def through_json(value):
    return json.loads(json.dumps(value))


SWIGLU = {"ffn_type": "mptglu", "ffn_act_fn": {"name": "silu"}}
MPT_7B = MPTConfig(
    d_model=4096, n_heads=32, n_layers=32, vocab_size=50432, alibi=True, no_bias=True
)
BY_TRANSFORMERS = {"model_type": "mpt", "architectures": ["MptForCausalLM"]}


@pytest.mark.parametrize(
    "settings, wanted",
    [
        (HUB_7B, MPT_7B),
        (FOUNDRY, MPTConfig()),
        (FOUNDRY | published("transformers-4"), MPTConfig()),
        (
            like_hub({"max_seq_len": 65536}, alibi_bias_max=16, clip_qkv=6),
            replace(MPT_7B, max_seq_len=65536, alibi_bias_max=16, clip_qkv=6),
        ),
        (like_hub(attn_type="multiquery_attention"), replace(MPT_7B, kv_n_heads=1)),
        (
            like_hub(attn_type="grouped_query_attention", kv_n_heads=8),
            replace(MPT_7B, kv_n_heads=8),
        ),
        (with_rope(rope_theta=5e5), replace(MPT_7B, alibi=False, rope=True, rope_theta=5e5)),
        (
            with_rope(rope_impl="hf", rope_hf_config={"type": "linear", "factor": 1.0}),
            replace(MPT_7B, alibi=False, rope=True),
        ),
        (like_hub({"logit_scale": 0.5}, qk_ln=True), replace(MPT_7B, logit_scale=0.5, qk_ln=True)),
        (
            like_hub(
                {"norm_type": "rmsnorm", "ffn_config": SWIGLU, "expansion_ratio": 2.6875},
                sliding_window_size=4096,
                qk_gn=True,
            ),
            replace(
                MPT_7B,
                norm_type="rmsnorm",
                ffn_type="mptglu",
                ffn_act_fn="silu",
                expansion_ratio=2.6875,
                sliding_window_size=4096,
                qk_gn=True,
            ),
        ),
        (like_hub({"ffn_config": {"ffn_type": "mptglu"}}), replace(MPT_7B, ffn_type="mptglu")),
        (
            like_hub(
                {"final_logit_softcapping": 30.0, "embedding_fraction": 0.5},
                attn_logit_softcapping=50,
            ),
            replace(
                MPT_7B,
                final_logit_softcapping=30.0,
                embedding_fraction=0.5,
                attn_logit_softcapping=50.0,
            ),
        ),
        ({"model_type": "mpt"}, MPTConfig()),  # LLM Foundry's defaults are MPTConfig's
        (BY_TRANSFORMERS, MPTConfig(alibi=True, no_bias=True)),
    ],
)
def test_settings_of_published_models(settings, wanted):
    assert hf_config.config_from(settings) == wanted
    assert hf_config.config_from(through_json(hf_config.config_to(wanted))) == wanted


def test_a_config_as_transformers_writes_it_today():
    transformers = pytest.importorskip("transformers")
    written = transformers.MptConfig(architectures=["MptForCausalLM"])
    wanted = MPTConfig(alibi=True, no_bias=True)
    assert hf_config.config_from(json.loads(written.to_json_string())) == wanted
    assert hf_config.config_from(json.loads(written.to_json_string(use_diff=False))) == wanted


AT_REST = [
    {"num_key_value_heads": 32, "intermediate_size": 16384, "max_position_embeddings": 2048},
    {"attention_bias": False},  # no_bias is True in HUB_7B
    {"block_overrides": {}},
    {"fc_type": {"name": "torch", "bias": False, "device": "cpu"}},
    {"ffn_config": {"ffn_type": "mptmlp", "ffn_hidden_size": 4 * 4096, "ffn_act_fn": None}},
    {"ffn_config": {"ffn_act_fn": {"name": "gelu", "approximate": "none"}}},
    {"layer_norm_epsilon": 0.00001},
    *({name: None} for name in "attention_bias fc_type ffn_config init_config".split()),
]
ATTENTION_AT_REST = [
    {"attn_impl": "triton"},
    {"attn_temperature_tuning": {"floor_scale": 4}},
    {"reuse_kv_layer_idx": None},
    {"rope_theta": 500000},
    {"rope_dail_config": {"type": "xpos", "pos_idx_in_fp32": False, "xpos_scale_base": 64}},
    {"rope_hf_config": {"type": "dynamic", "factor": 2.0}},
    {"seq_parallel_world_size": 1},
]


def test_settings_at_rest_change_nothing():
    at_rest = [like_hub(top) for top in AT_REST]
    at_rest += [like_hub(**attention) for attention in ATTENTION_AT_REST]
    for settings in at_rest:
        read = hf_config.config_from(through_json(settings))
        assert replace(read, rope_theta=MPT_7B.rope_theta) == MPT_7B, settings


TANH_GELU = {"ffn_act_fn": {"name": "gelu", "approximate": "tanh"}}
SILU_TWICE = {"ffn_act_fn": {"name": "silu", "beta": 2}}
LINEAR_ROPE = {"rope_impl": "hf", "rope_hf_config": {"type": "linear", "factor": 2.0}}
TUNED = {"attn_temperature_tuning": {"floor_scale": 8192, "attn_scale": 0.1}}


REFUSED = [  # one for each reason
    (like_hub(nonsense=3), "nonsense to 3"),
    (like_hub(sliding_window_size="8"), "sliding_window_size"),
    (like_hub({"sliding_window_size": 8}), "move it to attn_config"),
    (like_hub(attn_logit_softcapping=0), "attn_logit_softcapping"),
    (like_hub(qk_ln=True, qk_gn=True), "qk_ln and qk_gn"),
    (like_hub(fused_qkv=None), "fused_qkv to None"),
    (like_hub(**TUNED), "attn_temperature_tuning.attn_scale to 0.1"),
    (like_hub(attn_temperature_tuning=[1]), "attn_temperature_tuning to list"),
    (like_hub(reuse_kv_layer_idx=0), "reuse_kv_layer_idx to 0"),
    (like_hub(head_dim=64), "head_dim to 64, only 128 (d_model / n_heads)"),
    (like_hub({"num_hidden_layers": 2}), "layers to 2, only 32 (n_layers)"),
    (like_hub({"attention_bias": True}), "attention_bias to True"),
    (like_hub({"ffn_config": {"ffn_type": "mptmlp", "ffn_hidden_size": 9}}), "ffn_hidden_size"),
    (like_hub({"alibi": True}), "move it to attn_config"),
    (like_hub(logit_scale=0.5), "move it to the top"),
    (like_hub(attn_type="sparse"), "attn_type to 'sparse'"),
    (like_hub(attn_type="grouped_query_attention"), "kv_n_heads must be from 1"),
    (like_hub(alibi="yes"), "alibi in config.json is 'yes'"),
    (like_hub(rope=True), "rope and alibi"),
    (with_rope(rope_dail_config={"type": "xpos"}), "rope_dail_config to 'xpos'"),
    (with_rope(**LINEAR_ROPE), "config to 'linear'"),
    (like_hub({"ffn_config": TANH_GELU}), "sets approximate of ffn_act_fn"),
    (like_hub({"ffn_config": SILU_TWICE}), "sets beta of ffn_act_fn"),
    (like_hub({"ffn_config": {"ffn_act_fn": {"name": "tanh"}}}), "one of: gelu, silu, relu"),
    (like_hub({"ffn_config": {"ffn_act_fn": {"name": ["silu"]}}}), "ffn_act_fn"),
    (like_hub({"ffn_config": {"ffn_act_fn": "silu"}}), "ffn_act_fn to 'silu', expected an object"),
    (like_hub({"ffn_config": {"ffn_type": "mb_moe"}}), "ffn_type in config.json is 'mb_moe'"),
    (like_hub({"ffn_config": {"ffn_type": "te_ln_mlp"}}), "expected one of: mptmlp, mptglu"),
    (like_hub({"ffn_type": "mptglu"}), "move it to ffn_config"),
    (like_hub({"norm_type": "triton_rmsnorm"}), "norm_type in config.json is 'triton_rmsnorm'"),
    (like_hub({"norm_type": "rmsnorm", "norm_eps": 1e-6}), "norm_eps to 1e-06"),
    (like_hub({"ffn_config": {"fc_type": {"name": "te"}}}), "fc_type.name to 'te'"),
    ({"model_type": "llama", "hidden_size": 8}, "model_type 'llama'"),
]


@pytest.mark.parametrize("settings, named", REFUSED)
def test_what_we_do_not_have_is_refused_by_name(settings, named):
    assert named in refusal(hf_config.config_from, settings)


def test_a_plain_model_has_no_keys_that_older_programs_refuse():
    written = hf_config.config_to(MPT_7B)
    names = hf_config.LATER_KEYS + ["ffn_config"]
    assert len(names) == 6 and not {*names} & {*written, *written["attn_config"]}


def test_what_counts_in_training_alone_is_warned_of():
    more = {"resid_pdrop": 0.1, "attn_uses_sequence_id": True, "embedding_fraction": 0.5}
    lost = hf_config.lost_in_transformers(replace(SMALL, **LIKE_TRANSFORMERS, **more))
    named = [setting.split()[0] for setting in lost]
    assert named == ["attn_uses_sequence_id=True", "embedding_fraction=0.5", "resid_pdrop=0.1"]


# --- settings and weights that the format lacks


@dataclass
class Forked(MPTConfig):
    """Settings as a forker adds them."""

    n_experts: int = 0
    norm_type: str = "low_precision_layernorm"


@pytest.mark.parametrize(
    "name, value",
    [("n_experts", 8), ("norm_type", "batchnorm"), ("norm_type", "low_precision_batchnorm")],
)
def test_settings_that_the_format_lacks_are_not_exported(name, value):
    cfg = Forked(**asdict(SMALL))
    assert hf_config.config_to(cfg) == hf_config.config_to(SMALL)
    message = refusal(hf_config.config_to, replace(cfg, **{name: value}))
    assert f"{name}={value}" in message and "format cannot" in message
