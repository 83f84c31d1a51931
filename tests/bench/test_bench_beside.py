"""bench/beside.py: programs do the same work, those that fail are dropped, ratios are by round."""

import os
import signal

import pytest
import torch
from conftest import ROOT

from bench import beside
from config import MPTConfig
from processes import Pool
from program import UserError

TINY = """
    --n_layers=1 --d_model=32 --n_heads=2 --max_seq_len=16 --vocab_size=64 --precision=fp32
    --rounds=1 --threads=1
""".split()
QUESTIONS = f"--icl_tasks={ROOT}/tests/old_runs/questions.jsonl --tokenizer=bytes --vocab_size=512"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, flags, package",
    [
        ("train", "", "transformers"),
        ("lora", "--rslora", "peft"),
        ("generate", "--global_batch_size=2 --max_seq_len=64", "transformers"),
        ("generate", "--sampled --max_seq_len=64", "transformers"),
        ("evaluation", f"{QUESTIONS} --max_seq_len=128", "lm_eval"),
    ],
)
def test_programs_do_the_same_work_in_turns(name, flags, package, capsys):
    pytest.importorskip(package)
    beside.main([name, *TINY, *flags.split()])
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    measured = [line for line in lines if line.startswith(tuple(beside.COMPARISONS[name].programs))]
    assert len(measured) == len(beside.COMPARISONS[name].programs), printed.err
    assert " 1.00 " in measured[0]


@pytest.mark.slow
def test_a_program_that_is_not_there_leaves_the_others(capsys, monkeypatch, tmp_path):
    (tmp_path / "transformers.py").write_text("raise ImportError('No module named it')")
    monkeypatch.syspath_prepend(tmp_path)  # spawned processes inherit it
    beside.main(["generate", *TINY, "--max_seq_len=64"])
    printed = capsys.readouterr()
    assert "requirements-dev.txt" in printed.err and printed.err.startswith("transformers: n/a, ")
    assert "ours " in printed.out and "transformers" not in printed.out


def runner(seconds):
    """What a process of the next test starts with."""
    return seconds


def take(seconds, steps):
    """A turn; or a kernel that is short of memory ends the process."""
    if seconds is None:
        os.kill(os.getpid(), signal.SIGKILL)
    return seconds * steps


@pytest.mark.slow
def test_a_program_that_is_killed_in_its_first_turn_is_dropped(capsys, monkeypatch):
    monkeypatch.setattr(beside.Program, "turn", take)
    pools = {name: Pool(1, runner, seconds) for name, seconds in {"a": None, "b": 0.5}.items()}
    try:
        assert beside.take_turns(pools, rounds=2, steps=3) == {"b": [1.5, 1.5]}
    finally:
        pools["b"].stop()
    assert list(pools) == ["b"]
    assert capsys.readouterr().err == "a: n/a, killed (out of memory?)\n"


def test_a_ratio_is_the_median_over_rounds():
    seconds = {"ours": [1.0, 2.0, 4.0], "theirs": [3.0, 4.0, 4.0]}  # 3, 2 and 1 times as long
    assert beside.ratios(seconds) == {"ours": 1, "theirs": 2}


class Answers:
    """A pool whose program gives these answers."""

    def __init__(self, *answers):
        self.answers = answers

    def __call__(self, method, *args):
        return [("cpu", "fp32", 1.0) if method is beside.Program.describe else self.answers]


@pytest.mark.parametrize("found, agrees", [((4.0, 3.00005), True), ((4.0, 3.001), False)])
def test_programs_with_equal_settings_must_give_equal_answers(found, agrees):
    pools = {"adapters": Answers(4.0, 3.0), "all weights": Answers(4.0, 2.5)}
    pools["peft on transformers"] = Answers(*found)
    if agrees:
        differences = beside.compare_answers(beside.COMPARISONS["lora"], pools)
        assert differences == {"adapters": 0, "peft on transformers": pytest.approx(5e-5)}
    else:
        with pytest.raises(UserError, match="not the same work"):
            beside.compare_answers(beside.COMPARISONS["lora"], pools)


def test_the_plain_model_has_gpt2s_weights_and_learns():
    m = MPTConfig(d_model=32, n_heads=2, n_layers=2, vocab_size=64, max_seq_len=16, no_bias=True)
    torch.manual_seed(0)
    model = beside.PlainGPT2(m)
    # wte and wpe, two layers with two norms, the last norm
    assert sum(p.numel() for p in model.parameters()) == 80 * 32 + 2 * (12 * 32**2 + 2 * 32) + 32

    ids = torch.randint(64, (4, 17))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        logits = model(ids[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[0] == pytest.approx(4.16, abs=0.3)  # ln 64
    assert losses[-1] < 1


@pytest.mark.parametrize(
    "words", ["", "trian", "train --rounds=0", "evaluation", "train --d_modle=8"]
)
def test_a_wrong_command_is_one_line(words):
    with pytest.raises(UserError) as error:
        beside.main(words.split())
    assert "\n" not in str(error.value)
