"""bench/beside.py: programs do the same work, those that fail are dropped, ratios are by round."""

import contextlib
import io
from unittest import mock

import pytest
import torch
from conftest import ROOT

from bench import beside
from config import MPTConfig
from processes import PoolError
from program import UserError

TINY = """
    --n_layers=1 --d_model=32 --n_heads=2 --max_seq_len=16 --vocab_size=64 --precision=fp32
    --rounds=1 --threads=1
""".split()
QUESTIONS = f"--icl_tasks={ROOT}/tests/old_runs/questions.jsonl --tokenizer=bytes --vocab_size=512"


class Here:
    """A Pool of one process: this one, which has imported torch and transformers."""

    def __init__(self, size, start, *args, threads):
        self.started = start(*args)

    def __call__(self, method, *args):
        return [method(self.started, *args)]

    def stop(self):
        pass


def compare(world, words) -> str:
    """What `bench beside` prints if all programs are in this process."""
    with mock.patch.object(beside, "Pool", Here), contextlib.redirect_stdout(io.StringIO()) as out:
        beside.main(words)
    return out.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, flags, package",
    [
        ("train", "", "transformers"),
        ("lora", "--rslora", "peft"),
        ("generate", "--global_batch_size=2 --max_seq_len=64", "transformers"),
        ("evaluation", f"{QUESTIONS} --max_seq_len=128", "lm_eval"),
    ],
)
def test_programs_do_the_same_work_in_turns(ranks, name, flags, package):
    pytest.importorskip(package)
    (text,) = ranks(1)(compare, [name, *TINY, *flags.split()])
    programs = tuple(beside.COMPARISONS[name].programs)
    measured = [line for line in text.splitlines() if line.startswith(programs)]
    assert len(measured) == len(programs) and " 1.00 " in measured[0]


class Turns:
    """A pool whose program takes so many seconds a step; an error that it ends with."""

    def __init__(self, answer):
        self.answer = answer

    def __call__(self, method, steps):
        if isinstance(self.answer, Exception):
            raise self.answer
        return [self.answer * steps]


def test_a_program_that_fails_is_dropped_with_the_reason(capsys):
    """One that is killed, and one whose package is missing."""
    killed, absent = PoolError("killed"), PoolError("ImportError: No module named 'peft'")
    answers = {"killed": killed, "absent": absent, "b": 0.5}
    pools = {name: Turns(answer) for name, answer in answers.items()}
    assert beside.take_turns(pools, rounds=2, steps=3) == {"b": [1.5, 1.5]}
    assert list(pools) == ["b"]
    first, second = capsys.readouterr().err.splitlines()
    assert first == "killed: n/a, killed" and "pip install" in second
    with pytest.raises(UserError, match="none of the programs"):
        beside.take_turns({"killed": Turns(killed)}, rounds=1, steps=1)


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
