"""bench/beside.py: its plain GPT-2 is one, and the ratios are those of the speeds."""

import os
import signal

import pytest
import torch

from bench import beside
from bench.team import Team
from config import MPTConfig, UserError

TINY = """
    --n_layers=1 --d_model=32 --n_heads=2 --max_seq_len=16 --vocab_size=64 --precision=fp32
    --rounds=1 --steps=1 --threads=1
""".split()


def test_the_plain_model_has_gpt2s_weights_and_learns():
    cfg = MPTConfig(d_model=32, n_heads=2, n_layers=2, vocab_size=64, max_seq_len=16, no_bias=True)
    torch.manual_seed(0)
    model = beside.PlainGPT2(cfg)
    # wte and wpe, two layers with two norms, the last norm
    assert sum(p.numel() for p in model.parameters()) == 80 * 32 + 2 * (12 * 32**2 + 2 * 32) + 32

    ids = torch.randint(64, (4, 17))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        loss = model(ids[:, :-1], ids[:, 1:])
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[0] == pytest.approx(4.16, abs=0.3)  # ln 64
    assert losses[-1] < 1


class Runner:
    """A program that takes a turn, or runs out of memory in it."""

    def __init__(self, takes_memory: bool):
        self.takes_memory = takes_memory

    def turn(self, steps: int) -> float:
        """Its seconds; or a kernel that is short of memory ends the process."""
        if self.takes_memory:
            os.kill(os.getpid(), signal.SIGKILL)
        return 0.5


@pytest.mark.slow
def test_a_program_that_is_killed_in_its_first_turn_is_dropped(capsys):
    args = beside.BesideArgs(rounds=2, steps=1)
    teams = {name: Team(Runner, (name == "large",), 1, 1) for name in ("large", "small")}
    rates = beside.take_turns(teams, args, tokens=10)
    assert rates == {"small": [20, 20]} and list(teams) == ["small"]
    assert capsys.readouterr().err == "large: n/a, killed (out of memory?)\n"
    teams["small"].stop()


def test_the_table_has_the_ratios_of_medians():
    rates = {"ours, ALiBi": [100.0, 120.0, 500.0], "plain GPT-2": [90.0, 100.0, 110.0]}
    *_, plain = beside.table(rates, {"ours, ALiBi": 1.0, "plain GPT-2": 2.0}).splitlines()
    assert plain == "| plain GPT-2 | 100 | 2.00 | 1.20 | n/a |"


@pytest.mark.slow
def test_four_programs_take_turns(capsys):
    pytest.importorskip("transformers")
    beside.main(TINY)
    printed = capsys.readouterr().out
    assert printed.startswith("fp32, 1 turns of 1 steps, malloc settings of their users")
    for name in beside.PROGRAMS:
        assert f"\n| {name} | " in printed
    assert "n/a" not in printed


def test_wrong_settings_are_user_errors():
    with pytest.raises(UserError, match="at least 1"):
        beside.main(["--rounds=0"])
