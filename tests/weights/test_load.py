"""weights/load.py: what is at a path, what is loaded from it, and which models and runs are refused."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from test_checkpoint import META
from test_hf import SMALL, build, empty, relative_error, same_weights, tokens
from test_parallel import MODEL, RUN

import config
import parallel
from config import MPTConfig, TrainConfig, UserError
from model import MPT
from text import tokenizer as tokenizers
from weights import hf, load

# --- going on with a run


OTHER = {
    "d_model": 84,
    "n_heads": 3,
    "n_layers": 5,
    "expansion_ratio": 2.0,
    "max_seq_len": 16,
    "vocab_size": 98,
    "learned_pos_emb": False,
    "alibi": True,
    "alibi_bias_max": 4.0,
    "kv_n_heads": 2,
    "no_bias": True,
    "clip_qkv": 6.0,
    "qk_ln": True,
    "softmax_scale": 0.5,
    "logit_scale": 2.0,
    "tie_word_embeddings": False,
    "rope": True,
    "rope_theta": 500.0,
    "attn_uses_sequence_id": True,
}


def test_a_checkpoint_from_before_a_setting_had_its_default():
    old = {name: value for name, value in META.items() if not name.startswith("rope")}
    load.check_same_run(Path("x"), old, MODEL, RUN, "f00")
    with pytest.raises(UserError, match=r"another model: rope False \(here True\)"):
        load.check_same_run(Path("x"), old, replace(MODEL, rope=True), RUN, "f00")


@pytest.mark.parametrize("key", OTHER)
def test_another_model_is_refused_by_name(key):
    with pytest.raises(UserError, match=rf"another model: {key} {META[key]} \(here {OTHER[key]}\)\. "):
        load.check_same_run(Path("x"), META, replace(MODEL, **{key: OTHER[key]}), RUN, "f00")


@pytest.mark.parametrize(
    "change, fingerprint, names",
    [
        ({"seed": 3}, "f00", "seed 1337 (here 3)"),
        ({"global_batch_size": 24}, "f00", "global_batch_size 12 (here 24)"),
        ({}, "ba2", "data f00 (here ba2)"),
        ({"seed": 3}, "ba2", "seed 1337 (here 3), data f00 (here ba2)"),
    ],
)
def test_another_order_of_the_data_is_refused_by_name(change, fingerprint, names):
    with pytest.raises(UserError) as caught:
        load.check_same_run(Path("x"), META, MODEL, replace(RUN, **change), fingerprint)
    assert names in str(caught.value) and "\n" not in str(caught.value)


def test_an_imported_run_says_how_to_begin_from_it():
    with pytest.raises(UserError, match="was imported from mpt-7b, not trained here: begin with --init_from=runs/b "):
        imported = META | {"data_fingerprint": "imported from mpt-7b"}
        load.check_same_run(Path("runs/b/checkpoints/step-0"), imported, MODEL, RUN, "f00")


def test_what_may_change_may_change():
    model = replace(MODEL, attn_impl="sdpa", attn_pdrop=0.1, emb_pdrop=0.1, resid_pdrop=0.1, norm_type="layernorm")
    run = TrainConfig(global_batch_size=12, microbatch_size=1, lr=1.0, max_steps=77, sharding="DDP", run_dir="y")
    load.check_same_run(Path("x"), META, model, run, "f00")


def test_a_norm_of_your_own_is_another_model_but_its_precision_is_not():
    for saved, here in [("layernorm", "rmsnorm"), ("low_precision_rmsnorm", "low_precision_layernorm")]:
        with (
            mock.patch.dict(config.MPTConfig.__annotations__, norm_type=str),
            pytest.raises(UserError, match="another model: norm_type"),
        ):
            load.check_same_run(Path("x"), META | {"norm_type": saved}, replace(MODEL, norm_type=here), RUN, "f00")


def test_every_setting_of_the_model_is_held_to_or_known_to_be_free():
    free = {"attn_impl", "norm_type", "emb_pdrop", "attn_pdrop", "resid_pdrop"}
    assert set(OTHER) | free == set(MPTConfig.__dataclass_fields__)
    assert config.from_dict(MPTConfig, META) == MODEL


# --- beginning from other weights


def init_from_run(world, run, cfg, other):
    """Start from a run of ours under FSDP; then try another model: logits, and what that says."""
    train = TrainConfig()
    with torch.device("meta"):
        models = [MPT(cfg), MPT(other)]
    models = [parallel.parallelize(m, parallel.make_mesh(world, train), train, "fp32") for m in models]
    for model in models:
        parallel.materialize(model, world.device, None)
    load.init_from(models[0], run)
    try:
        load.init_from(models[1], run)
    except UserError as error:
        with torch.no_grad():
            return models[0](tokens(cfg)).numpy(), str(error), error.everywhere


def test_init_from_a_run_of_ours(ranks, tmp_path):
    """Without a process group, and on two ranks; dropout and length under ALiBi may differ, slopes may not."""
    cfg = replace(SMALL, alibi=True, vocab_size=300)
    model = build(cfg)
    hf.export(model, tmp_path / "theirs")
    hf.import_(tmp_path / "theirs", tmp_path / "run", "bytes")
    free = dict(resid_pdrop=0.1, max_seq_len=20, learned_pos_emb=False, attn_impl="sdpa", kv_n_heads=6)
    alone = empty(replace(cfg, **free))
    load.init_from(alone, tmp_path / "run/checkpoints/step-0")
    assert same_weights(alone, model)

    other = replace(cfg, alibi_bias_max=16, clip_qkv=6)
    with torch.no_grad():
        wanted = model(tokens(cfg))
    for logits, error, everywhere in ranks(2)(init_from_run, str(tmp_path / "run"), cfg, other):
        assert relative_error(torch.from_numpy(logits), wanted) < 1e-5
        assert error.endswith("of another model: alibi_bias_max 8.0 (here 16), clip_qkv None (here 6). Set them alike")
        assert everywhere


@pytest.mark.parametrize("name, value", [("max_seq_len", 20), ("n_heads", 3), ("rope", True), ("alibi", True)])
def test_another_model_is_refused(name, value, tmp_path):
    hf.export(build(SMALL), tmp_path / "theirs")
    with pytest.raises(UserError, match=rf"of another model: .*{name} {getattr(SMALL, name)} \(here {value}\)"):
        load.init_from(empty(replace(SMALL, **{name: value})), tmp_path / "theirs")


def test_tokenizers_of_weights_are_compared(tmp_path):
    """By what they do, not by where they lie."""
    ours = tokenizers.train_bpe(["a few words, and a few more words"] * 9, 260)
    other = tokenizers.train_bpe(["quite another text, with other words"] * 9, 260)
    for name, made in (("ours", ours), ("other", other)):
        made.save(str(tmp_path / f"{name}.json"))
    cfg = replace(SMALL, vocab_size=300)
    hf.export(MPT(cfg), tmp_path / "theirs")
    settings = json.loads((tmp_path / "theirs/config.json").read_text())
    (tmp_path / "theirs/config.json").write_text(json.dumps(settings | {"tokenizer_name": "bpe-260"}))
    shutil.copy(tmp_path / "ours.json", tmp_path / "theirs" / hf.OUR_TOKENIZER)
    load.check_same_tokenizer(tmp_path / "theirs", "bpe-260", tmp_path / "ours.json")
    for name, file in (("bytes", None), ("bpe-260", tmp_path / "other.json")):
        with pytest.raises(
            UserError, match=f"was trained with the tokenizer bpe-260, whose ids are not those of {name}"
        ):
            load.check_same_tokenizer(tmp_path / "theirs", name, file)
