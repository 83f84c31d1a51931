"""bench/beside.py: the programs do the same work in turns; one that fails is dropped."""

import pytest
from conftest import refusal

from bench import beside
from config import MPTConfig
from launch.pool import PoolError
from program import UserError

TINY = """
    --n_layers=1 --d_model=32 --n_heads=2 --max_seq_len=16 --vocab_size=64 --precision=fp32
    --rounds=1 --threads=1
""".split()


class Turns:
    """A pool whose program always gives this answer, or fails with it."""

    def __init__(self, answer):
        self.answer = answer

    def __call__(self, method, *args):
        if isinstance(self.answer, Exception):
            raise self.answer
        if method is beside.Program.describe:
            return [("cpu", "fp32", 1.0)]
        return [self.answer]


def test_a_program_that_fails_is_dropped_with_the_reason(capsys):
    """One that is killed, and one whose package is missing."""
    killed, absent = PoolError("killed"), PoolError("ImportError: No module named 'transformers'")
    answers = {"killed": killed, "absent": absent, "b": 0.5}
    pools = {name: Turns(answer) for name, answer in answers.items()}
    assert beside.ask(pools, beside.Program.turn, 3) == {"b": 0.5}
    assert list(pools) == ["b"]
    first, second = capsys.readouterr().err.splitlines()
    assert first == "killed: n/a, killed" and "pip install" in second
    with pytest.raises(UserError, match="none of the programs"):
        beside.ask({"killed": Turns(killed)}, beside.Program.turn, 1)


def test_a_ratio_is_the_median_over_rounds():
    """3, 2 and 1 times as long as the first."""
    rounds = [{"a": 1.0, "b": 3.0}, {"a": 2.0, "b": 4.0}, {"a": 4.0, "b": 4.0}]
    places = dict.fromkeys("ab", ("cpu", "fp32", 0.5))
    first, second = beside.table(rounds, places).splitlines()[-2:]
    assert first.split() == ["a", "fp32", "2.000", "1.00", "0.50"]
    assert second.split() == ["b", "fp32", "4.000", "2.00", "0.50"]


def test_the_plain_model_has_gpt2s_weights():
    """wte and wpe, two layers with two norms, the last norm."""
    m = MPTConfig(d_model=32, n_heads=2, n_layers=2, vocab_size=64, max_seq_len=16, no_bias=True)
    n_params = sum(p.numel() for p in beside.PlainGPT2(m).parameters())
    assert n_params == 80 * 32 + 2 * (12 * 32**2 + 2 * 32) + 32


def test_the_same_work_has_the_same_loss():
    """Of `another` it may be any."""
    pools = {beside.FIRST: Turns(3.0), beside.SAME_WORK: Turns(3.00005), "another": Turns(9.0)}
    assert len(beside.measure(pools, beside.BesideArgs(rounds=2))) == 2
    pools[beside.SAME_WORK] = Turns(3.001)
    with pytest.raises(UserError, match="not the same work"):
        beside.measure(pools, beside.BesideArgs(rounds=2))


@pytest.mark.slow
def test_the_programs_take_turns(python):
    """With as many of the same weights: the losses of the first two are compared."""
    pytest.importorskip("transformers")
    done = python(*TINY, program="bench beside")
    assert done.returncode == 0, done.stderr[-2000:]
    names = [line for line in done.stdout.splitlines() if line.startswith(beside.PROGRAMS)]
    assert len(names) == len(beside.PROGRAMS) and " 1.00 " in names[0], done.stdout + done.stderr


@pytest.mark.parametrize("words", ["trian", "--rounds=0", "--d_modle=8"])
def test_a_wrong_command_is_one_line(words):
    refusal(beside.main, words.split())
