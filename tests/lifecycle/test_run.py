"""lifecycle/run.py: the ranks agree, what follows a step, figures read late, steps left out."""

import math
import re
import signal
import time
from types import SimpleNamespace

import pytest
import torch
from conftest import refusal

from config import MPTConfig, TrainConfig, load, step_ranges
from lifecycle import run
from lifecycle.run import BadSteps, LateReader, Run, Skips, StepConsensus, save_due
from processes import World
from program import UserError


@pytest.mark.parametrize(
    "settings, evaluates, scores, saves",
    [
        ({"eval_interval": 4, "icl_interval": 5}, [0, 4, 8, 10], [0, 5, 10], [10]),
        ({"eval_interval": 0, "save_interval": 5, "keep_every": 4}, [0, 10], [], [4, 5, 8, 10]),
    ],
)
def test_what_follows_each_step(settings, evaluates, scores, saves):
    cfg = TrainConfig(max_steps=10, **settings)
    assert [done for done in range(11) if cfg.evaluation_due(done)] == evaluates
    assert [done for done in range(11) if cfg.tasks_due(done)] == scores
    assert [done for done in range(11) if save_due(cfg, done)] == saves


@pytest.mark.parametrize(
    "done, agreed, is_bad, saves",
    [
        (2, {}, False, False),
        (3, {}, False, True),
        (3, {}, True, False),
        (2, {"save": True}, False, True),
        (2, {"save": True}, True, False),
        (2, {"stop_signal": signal.SIGTERM}, True, True),
        (10, {}, True, True),
    ],
)
def test_good_checkpoints_stay_during_bad_steps_unless_the_run_ends(done, agreed, is_bad, saves):
    now = SimpleNamespace(
        cfg=TrainConfig(max_steps=10, save_interval=3),
        done=done,
        agreed=StepConsensus(**agreed),
        last_read_is_bad=is_bad,
    )
    assert Run.save_is_due(now) is saves


def figures_of(world, of_ranks):
    """What the ranks agree on if each has its own (signal, writes still, seconds, GB)."""
    stop_signal, writes, seconds, memory_gb = of_ranks[world.global_rank]
    mine = SimpleNamespace(
        world=world,
        cfg=TrainConfig(save_minutes=0),
        signals=SimpleNamespace(stop_signal=stop_signal),
        log=SimpleNamespace(stop_signal=0),
        checkpointer=SimpleNamespace(settled=lambda: not writes),
        saved_at=0.0,
    )
    return Run.agree(mine), run.of_all_ranks(world, seconds, memory_gb)


def test_what_one_rank_wants_happens_on_all(ranks):
    """A signal, and that a save is still being written; and the straggler has its name."""
    found = ranks(2)(figures_of, [(15, False, 0.5, 3.5), (0, True, 30.0, 2.0)])
    assert found == [(StepConsensus(15, save=False, all_saved=False), (3.5, 1, 60))] * 2


class Lagging:
    """A run as on a GPU, whose figures are read one step late, with the wishes of one rank."""

    def __init__(self, **settings):
        self.rows, self.always_shown = [], []
        cfg = TrainConfig(max_steps=100, warmup_steps=0, max_bad_steps=9, **settings)
        idle = SimpleNamespace(settled=lambda: True)
        self.run = SimpleNamespace(
            world=World(0, 1, 0, 1, torch.device("cpu")),
            model_cfg=MPTConfig(d_model=32, n_heads=2, n_layers=1),
            cfg=cfg,
            signals=SimpleNamespace(stop_signal=0),
            log=SimpleNamespace(stop_signal=0, row=self.row),
            checkpointer=idle,
            lease=SimpleNamespace(mirror=idle),
            timer=SimpleNamespace(take=lambda: lambda: 0.1),
            skips=Skips(cfg),
            peak=None,
            done=0,
            saved_at=time.monotonic(),
        )
        self.reader = LateReader(self.run)
        self.reader.lag = 1

    def row(self, row, always_shown):
        self.rows.append(row["step"])
        self.always_shown += [row["step"]] * always_shown

    def take(self, step, loss=2.0) -> bool:
        """Queue a step, and what follows it in the loop. Returns whether a save follows."""
        run = self.run
        figures = torch.tensor(loss), torch.tensor(1.0), torch.tensor(7)
        run.done, run.agreed = step + 1, Run.agree(run)
        run.last_read_is_bad = self.reader.record(step, figures, run.agreed)
        return Run.save_is_due(run)


def test_on_a_gpu_a_step_is_read_after_the_next_one_is_queued():
    run = Lagging(eval_interval=3)
    run.take(0)
    assert run.rows == []
    run.take(1)
    assert run.rows == [1]
    run.take(2)  # an evaluation follows step 3
    assert run.rows == [1, 2, 3]
    run.take(3)
    run.run.signals.stop_signal = signal.SIGTERM
    assert run.take(4) and run.rows == [1, 2, 3, 4, 5]


def test_a_save_that_a_bad_step_postponed_comes_with_the_next_good_one():
    run = Lagging(save_minutes=1)
    run.take(0)
    run.run.saved_at -= 61
    assert not run.take(1, loss=math.nan) and run.rows == [1, 2]
    assert run.take(2) and run.rows == [1, 2, 3]


def test_a_step_after_which_something_happens_is_always_shown():
    run = Lagging(eval_interval=4, save_interval=6)
    run.reader.lag = 0
    for step in range(11):
        run.run.signals.stop_signal = signal.SIGTERM if step == 10 else 0
        run.take(step, loss=math.nan if step == 1 else 2.0)
    assert run.rows == list(range(1, 12))
    assert run.always_shown == [2, 4, 6, 8, 11]  # a bad step, two evaluations, a save, a signal


def test_a_few_bad_steps_are_not_too_many():
    cfg = TrainConfig(max_bad_steps=3)
    seen = BadSteps(cfg, checkpointer=None, skips=None, first_step=0)
    nan, inf = float("nan"), float("inf")
    figures = [(nan, 1), (1, nan), (1, 1), (inf, 1), (1, -inf), (2, 2)]
    bad = [n for n, (loss, norm) in enumerate(figures) if seen.count(n, loss, norm, "0")]
    assert bad == [0, 1, 3, 4]


@pytest.mark.parametrize(
    "text, first, end, steps",
    [
        ("", 2, 6, [2, 3, 4, 5]),
        ("3:5", 0, 6, [0, 1, 4, 5]),
        ("2:4, 4:5", 0, 6, [0, 4, 5]),
        ("2:5,3:6", 3, 7, [5, 6]),
    ],
)
def test_steps_that_are_left_out(text, first, end, steps):
    skips = Skips(TrainConfig(max_steps=100, skip_steps=text))
    assert list(skips.steps(first, end)) == steps


def test_what_is_no_range_of_steps():
    for text in ["5", "5:", "9:5", "5:5", "0:3", "a:b", "1:2;3:4"]:
        assert "skip_steps takes ranges such as" in refusal(step_ranges, text)


def test_skips_of_the_checkpoint_and_of_the_flags_add_up():
    cfg = TrainConfig(max_steps=100, skip_steps="7:9,3:5")
    skips = Skips(cfg, skips_of_checkpoint="3:5")
    assert skips.text == "3:5,7:9" and list(skips.steps(0, 9)) == [0, 1, 4, 5, 8]


@pytest.mark.parametrize(
    "text, advised",
    [("99:101", 101), ("90:96,96:101", 101), ("1:101", 101), ("8:101,101:110,111:112", 110)],
)
def test_a_run_does_not_end_with_a_skipped_step_and_the_advice_works(text, advised):
    with pytest.raises(UserError, match=f"skips the last step: set --max_steps={advised}$"):
        Skips(TrainConfig(max_steps=100, skip_steps=text))
    cfg = TrainConfig(max_steps=advised, skip_steps=text)
    assert max(Skips(cfg).steps(0, advised)) == advised - 1


def test_the_flags_that_skip_bad_steps_are_accepted():
    """Also where the run would end with them."""
    for last in (99, 100):
        cfg = TrainConfig(max_steps=100, warmup_steps=9)
        bad = BadSteps(cfg, None, Skips(cfg), first_step=50)
        bad.first = 60
        flags = re.findall(r"--\S+", bad.advice(last))[1:]  # behind --lr
        (advised,) = load(["--warmup_steps=9", "--max_steps=100", *flags], TrainConfig)
        steps = Skips(advised).steps(58, advised.max_steps)
        assert list(steps) == [58, *range(last, max(100, last + 1))]
