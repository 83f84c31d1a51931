"""weights/load.py: what is at a path, what a run begins from, and what is refused."""

import json
import re
import shutil
from dataclasses import replace

import pytest
from conftest import refusal
from test_checkpoint import made_up
from test_hf import SMALL, build, empty, same_weights

from config import TrainConfig
from model import MPT
from text import tokenizer as tokenizers
from weights import hf, hf_tokenizer, load

# --- what is at a path


def test_a_path_is_a_run_a_checkpoint_or_a_folder_of_theirs(tmp_path, capsys):
    theirs = tmp_path / "theirs"
    cfg = replace(SMALL, vocab_size=300, alibi=True)
    hf.export(build(cfg), theirs)
    hf.import_(theirs, tmp_path / "run", "bytes")
    capsys.readouterr()
    step = tmp_path / "run/checkpoints/step-0"
    ours = "a checkpoint of this project, step 0"
    foreign = "a Hugging Face folder"
    cases = [(tmp_path / "run", step, ours), (step, step, ours), (theirs, theirs, foreign)]
    for path, found, kind in cases:
        assert load.find(str(path)) == found
        assert load.is_run(path) == (kind == ours)
        assert load.settings_of(path) == cfg
        load.demonstrate([str(path)])
        shown = capsys.readouterr().out
        assert shown.startswith(f"{found}: {kind}\n") and re.search(r"d_model +48\n", shown)
    assert "no checkpoint in" in refusal(load.demonstrate, [str(tmp_path / "nowhere")])


def test_a_run_is_a_base_that_may_go_and_may_be_damaged(tmp_path, capsys):
    hf.export(build(replace(SMALL, vocab_size=300)), tmp_path / "theirs")
    hf.import_(tmp_path / "theirs", tmp_path / "run", "bytes")
    capsys.readouterr()
    step = tmp_path / "run/checkpoints/step-0"
    for stays in (tmp_path / "theirs", step):
        load.warn_if_it_may_go(str(stays))
        assert not capsys.readouterr().err
    step = step.rename(step.with_name("step-3"))
    base = load.base_of(str(tmp_path / "run"), {})
    load.warn_if_it_may_go(base["base"])
    words = "run/checkpoints/step-3, which --keep_last deletes if that run trains on"
    assert words in capsys.readouterr().err
    (step / "checksums.json").write_text("{")
    assert "step-3 is damaged" in refusal(load.base_of, str(tmp_path / "run"), base)


# --- starting from other weights


@pytest.mark.parametrize(
    "name, value",
    [
        ("max_seq_len", 20),
        ("n_heads", 3),
        ("rope", True),
        ("alibi", True),
        ("sliding_window_size", 8),
        ("attn_logit_softcapping", 30.0),
        ("final_logit_softcapping", 30.0),
        ("ffn_act_fn", "silu"),
    ],
)
def test_another_model_is_refused(name, value, tmp_path):
    hf.export(build(SMALL), tmp_path / "theirs")
    other = empty(replace(SMALL, **{name: value}))
    message = refusal(load.init_from, other, tmp_path / "theirs")
    assert f"{name} {getattr(SMALL, name)} (here {value})" in message


def test_what_changes_no_weight_may_differ(tmp_path):
    """Dropout, what gradients alone know, under ALiBi the length; of a run, and of their folder."""
    cfg = replace(SMALL, alibi=True, vocab_size=300)
    model = build(cfg)
    hf.export(model, tmp_path / "theirs")
    hf.import_(tmp_path / "theirs", tmp_path / "run", "bytes")
    free = {"resid_pdrop": 0.1, "embedding_fraction": 0.5, "max_seq_len": 20}
    free["learned_pos_emb"] = False
    found = empty(replace(cfg, attn_impl="sdpa", kv_n_heads=6, **free))
    load.init_from(found, tmp_path / "run/checkpoints/step-0")
    assert same_weights(found, model)
    message = refusal(load.init_from, empty(replace(cfg, alibi_bias_max=16)), tmp_path / "run")
    assert "alibi_bias_max 8.0 (here 16)" in message


def test_a_run_that_has_saved_needs_no_weights_to_start_from(tmp_path):
    """They were read once. Of adapters they are the base, which each start reads."""
    cfg = TrainConfig(init_from=str(tmp_path / "gone"), run_dir=str(tmp_path / "run"))
    assert "gone does not exist" in refusal(load.check_init_from, cfg, SMALL)
    made_up(tmp_path / "run", 4)
    load.check_init_from(cfg, SMALL)
    load.check_same_tokenizer(cfg.init_from, "bytes", None)
    message = refusal(load.check_init_from, replace(cfg, lora_rank=2), SMALL)
    assert "gone does not exist" in message


def test_tokenizers_of_weights_are_compared(tmp_path):
    """By their ids, not by the place of their files."""
    ours = tokenizers.train_bpe(["a few words, and a few more words"] * 9, 260)
    other = tokenizers.train_bpe(["quite another text, with other words"] * 9, 260)
    for name, made in (("ours", ours), ("other", other)):
        made.save(str(tmp_path / f"{name}.json"))
    cfg = replace(SMALL, vocab_size=300)
    hf.export(MPT(cfg), tmp_path / "theirs")
    settings = json.loads((tmp_path / "theirs/config.json").read_text())
    settings["tokenizer_name"] = "bpe-260"
    (tmp_path / "theirs/config.json").write_text(json.dumps(settings))
    shutil.copy(tmp_path / "ours.json", tmp_path / "theirs" / hf_tokenizer.BPE_TOKENIZER)
    load.check_same_tokenizer(tmp_path / "theirs", "bpe-260", tmp_path / "ours.json")
    for name, file in (("bytes", None), ("bpe-260", tmp_path / "other.json")):
        message = refusal(load.check_same_tokenizer, tmp_path / "theirs", name, file)
        assert f"bpe-260, whose ids are not those of {name}" in message
