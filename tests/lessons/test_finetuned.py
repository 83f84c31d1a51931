"""configs/lora_demo.py in small: the questions, the run, what it learns, the spectrum."""

import json
import re
from dataclasses import replace

import pytest
import torch
from conftest import ROOT, words_of

import config
import lora
from config import MPTConfig, TrainConfig
from lessons import finetuned, questions, spectrum
from model import MPT
from program import UserError

LETTERS = "abcdefghijklmnopqrstuvwxyz"
ARGUMENTS = ["", "x", "x, y", "x, y, z"]
HEADERS = {f"def {name}({args}):": n for name in LETTERS for n, args in enumerate(ARGUMENTS)}


def test_the_questions_are_always_the_same():
    """Whatever the order of the files: which are held out depends on the header alone."""
    train, held_out = questions.split(HEADERS)
    backwards = dict(reversed(HEADERS.items()))
    assert questions.split(backwards) == (train, held_out)
    assert held_out and len(train) + len(held_out) == len(HEADERS)
    kept = {row["prompt"]: HEADERS[row["prompt"]] for row in [*train[::2], *held_out]}
    assert questions.split(kept) == (train[::2], held_out)
    known = {"prompt": "def a(x):", "response": "  # 1 argument"}
    assert known in train and questions.digest("def a(x):") % 10**6 == 540879


def test_arguments_are_counted_as_a_call_gives_them():
    text = "def f(a, /, b=1, *c, d, e=2, **g): pass"
    (function,) = questions.ast.parse(text).body
    assert questions.count(function.args) == 6
    assert questions.as_example("def f():", 0)["response"] == "  # 0 arguments"


def adapted_model() -> MPT:
    """A small model whose updates have rank 4, with values that are not zero."""
    torch.manual_seed(0)
    model = MPT(MPTConfig(d_model=16, n_heads=2, n_layers=2, vocab_size=64, max_seq_len=16))
    lora.put_on(model, TrainConfig(init_from="here", lora_rank=4))
    for param in lora.adapters_of(model).values():
        torch.nn.init.normal_(param)
    return model


def test_the_first_terms_of_an_update_are_kept():
    """All give the update itself, fewer the nearest one: what is lost is what was left out."""
    model = adapted_model()
    layers = spectrum.adapted_layers(model)
    assert len(layers) == 8 and "blocks.1.ffn.up_proj" in layers
    before = {name: lora.delta(layer).detach() for name, layer in layers.items()}
    values = {name: spectrum.singular_values(layer) for name, layer in layers.items()}
    spectrum.keep(model, 4)
    for name, layer in layers.items():
        torch.testing.assert_close(lora.delta(layer), before[name], rtol=1e-4, atol=1e-4)
    spectrum.keep(model, 1)
    for name, layer in layers.items():
        lost = (lora.delta(layer) - before[name]).norm()
        torch.testing.assert_close(lost, values[name][1:].norm(), rtol=1e-3, atol=1e-3)
    spectrum.keep(model, 0)
    assert not any(lora.delta(layer).any() for layer in layers.values())


def test_bad_input_is_one_line(tmp_path):
    with pytest.raises(UserError, match="run python -m lessons.questions"):
        finetuned.read_questions(str(tmp_path / "none.jsonl"))
    (tmp_path / "bad.jsonl").write_text('{"prompt": "x"}\n')
    with pytest.raises(UserError, match="bad.jsonl"):
        finetuned.read_questions(str(tmp_path / "bad.jsonl"))


def test_the_config_starts_from_the_demo():
    """The same model, and tokens in rows of its length."""
    demo, _ = config.load([str(ROOT / "configs/demo.py")], MPTConfig, TrainConfig)
    path = ROOT / "configs/lora_demo.py"
    model, cfg = config.load([str(path)], MPTConfig, TrainConfig)
    assert replace(model, attn_uses_sequence_id=False) == demo
    assert (cfg.init_from, cfg.lora_rank, cfg.data_format) == ("runs/demo", 8, "chat")
    assert len(path.read_text().splitlines()) <= 25


TINY = "--d_model=64 --n_heads=2 --n_layers=2 --vocab_size=512 --tokenizer=bpe-512".split()
BASE = "--max_tokens=150000 --eval_tokens=4000 --max_steps=60 --warmup_steps=5".split()
ADAPTERS = "--max_steps=150 --lr=1e-2 --eval_tokens=2000".split()


@pytest.mark.slow
def test_it_learns_to_answer_what_the_base_cannot(tmp_path, forks):
    """From a base of two layers, in 150 steps. A model that learns nothing fails."""

    def run(program, *words):
        status, out, err = forks([*words_of(program), *words], tmp_path)
        assert status == 0, out[-2000:] + err[-2000:]
        return out

    run("fsdp_train.py", f"{ROOT}/configs/demo.py", *TINY, *BASE)
    assert "train.jsonl" in run("lessons/questions.py")
    few = tmp_path / "data/questions/held_out.jsonl"
    few.write_text("".join(few.read_text().splitlines(keepends=True)[:100]))
    run("fsdp_train.py", f"{ROOT}/configs/lora_demo.py", *TINY, *ADAPTERS)
    same = (tmp_path / "data/questions/tokens/tokenizer.json").read_bytes()
    assert same == (tmp_path / "runs/demo/tokenizer.json").read_bytes()

    printed = run("lessons/finetuned.py", "runs/demo", "runs/lora-demo")
    before, after = re.findall(r"^(runs/\S+) +([\d.]+)% +([\d.]+)$", printed, re.MULTILINE)
    assert before[0] == "runs/demo" and float(before[1]) == 0
    assert float(after[1]) >= 30
    assert float(after[2]) > float(before[2])  # it has forgotten some of the text
    rows = [json.loads(line) for line in (tmp_path / "runs/demo/metrics.jsonl").open()]
    (own_loss,) = [row["val_loss"] for row in rows if row["step"] == 60 and "val_loss" in row]
    assert float(before[2]) == pytest.approx(own_loss, abs=0.01)

    printed = run("lessons/spectrum.py", "runs/lora-demo")
    shares = re.findall(r"rank +\d of 8: +([\d.]+)%", printed)
    assert len(shares) == 9 and float(shares[0]) == 0 and shares[-1] == after[1]
