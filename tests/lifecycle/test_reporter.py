"""lifecycle/reporter.py: the ranks agree, figures are read late, and a run describes itself."""

import signal

import pytest
import torch

import flops
from config import MPTConfig
from lifecycle import reporter


def agree(world, wishes):
    return vars(reporter.agree(world, *wishes[world.global_rank]))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_what_one_rank_wants_happens_on_all(ranks, size):
    def agreed(*wishes):
        answers = ranks(size)(agree, (wishes * size)[:size])
        assert all(answer == answers[0] for answer in answers)
        return answers[0]

    nothing = (0, False, True, 0.5)
    assert agreed(nothing) == {
        "stop_signal": 0,
        "save": False,
        "no_save_running": True,
        "bad_step": False,
        "slowest_rank": 0,
        "slowest_by": 1.0,
    }
    if size > 1:
        assert agreed(nothing, (signal.SIGTERM, False, True, 0.1))["stop_signal"] == signal.SIGTERM
        saving = agreed(nothing, (0, True, False, 0.1))
        assert saving["save"] and not saving["no_save_running"]
        seconds = agreed((0, False, True, 30.0), (0, False, True, 0.5))  # even and odd ranks
        assert seconds["slowest_rank"] == 0 and seconds["slowest_by"] == 60
        seconds = agreed((0, False, True, 0.5), (0, False, True, 30.0))
        assert seconds["slowest_rank"] == 1 and seconds["slowest_by"] == 60


def test_a_run_warns_of_weights_that_planning_does_not_know(monkeypatch):
    cfg = MPTConfig(d_model=48, n_heads=6, n_layers=2, max_seq_len=40, vocab_size=97)
    assert reporter.parameter_warning(cfg) == []

    class Gated(reporter.MPT):
        def __init__(self, cfg):
            super().__init__(cfg)
            self.gate_proj = torch.nn.Linear(48, 192, bias=False)

    monkeypatch.setattr(reporter, "MPT", Gated)
    (line,) = reporter.parameter_warning(cfg)
    known = flops.n_params(cfg)
    assert line.startswith(
        f"WARNING: model.py has {known + 48 * 192:,} parameters: memory, FLOPs and MFU are those"
    )
