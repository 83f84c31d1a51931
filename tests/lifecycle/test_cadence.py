"""lifecycle/cadence.py: what follows a step, which steps are skipped, and bad steps."""

import re
import signal

import pytest
from conftest import refusal

from config import TrainConfig, load
from lifecycle import cadence
from lifecycle.cadence import Cadence
from lifecycle.reporter import StepConsensus
from program import UserError


def steps_with(is_due, max_steps=10):
    return [done for done in range(max_steps + 1) if is_due(done)]


def test_what_follows_each_step():
    cfg = TrainConfig(max_steps=10, eval_interval=4, icl_interval=5, save_interval=3, keep_every=6)
    plan = Cadence(cfg)
    assert steps_with(plan.evaluation_due) == [0, 4, 8, 10]
    assert steps_with(plan.tasks_due) == [0, 5, 10]
    assert steps_with(plan.save_due) == [3, 6, 9, 10]
    assert steps_with(plan.is_last) == [10]
    assert steps_with(plan.must_read_now) == [0, 3, 4, 5, 6, 8, 9, 10]


def test_without_intervals_a_run_evaluates_and_saves_at_its_end():
    cfg = TrainConfig(max_steps=10, eval_interval=0, save_interval=0, keep_every=0)
    plan = Cadence(cfg)
    assert steps_with(plan.evaluation_due) == [0, 10]
    assert steps_with(plan.tasks_due) == []
    assert steps_with(plan.save_due) == [10]


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
    plan = Cadence(TrainConfig(max_steps=10, save_interval=3))
    assert plan.must_save(done, StepConsensus(**agreed), is_bad) is saves


def test_the_clock_for_saving(monkeypatch):
    now = 1000.0
    monkeypatch.setattr(cadence.time, "monotonic", lambda: now)
    plan = Cadence(TrainConfig(save_minutes=2))
    now += 119
    assert not plan.save_overdue()
    now += 2
    assert plan.save_overdue()
    plan.start_save_clock()
    assert not plan.save_overdue()
    never = Cadence(TrainConfig(save_minutes=0))
    now += 1e6
    assert not never.save_overdue()


def test_a_few_bad_steps_are_not_too_many():
    cfg = TrainConfig(max_bad_steps=3)
    seen = cadence.BadSteps(cfg, checkpointer=None, skips=None, first_step=0)
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
    skips = cadence.Skips(TrainConfig(max_steps=100, skip_steps=text), skips_of_checkpoint="")
    assert list(skips.steps(first, end)) == steps
    for step in range(8):
        assert skips.before(step) == step - len(list(skips.steps(0, step)))


def test_what_is_no_range_of_steps():
    for text in ["5", "5:", "9:5", "5:5", "0:3", "a:b", "1:2;3:4"]:
        assert "skip_steps takes ranges such as" in refusal(cadence.step_ranges, text)


def test_skips_of_the_checkpoint_and_of_the_flags_add_up():
    cfg = TrainConfig(max_steps=100, skip_steps="7:9,3:5")
    skips = cadence.Skips(cfg, skips_of_checkpoint="3:5")
    assert skips.text == "3:5,7:9" and list(skips.steps(0, 9)) == [0, 1, 4, 5, 8]


@pytest.mark.parametrize(
    "text, advised",
    [("99:101", 101), ("90:96,96:101", 101), ("1:101", 101), ("8:101,101:110,111:112", 110)],
)
def test_a_run_does_not_end_with_a_skipped_step_and_the_advice_works(text, advised):
    with pytest.raises(UserError, match=f"skips the last step: set --max_steps={advised}$"):
        Cadence(TrainConfig(max_steps=100, skip_steps=text))
    cfg = TrainConfig(max_steps=advised, skip_steps=text)
    assert max(Cadence(cfg).steps_from(0)) == advised - 1


def test_the_flags_that_skip_bad_steps_are_accepted():
    """Also where the run would end with them."""
    for last in (99, 100):
        cfg = TrainConfig(max_steps=100, warmup_steps=9)
        bad = cadence.BadSteps(cfg, None, Cadence(cfg).skips, first_step=50)
        bad.first = 60
        flags = re.findall(r"--\S+", bad.advice(last))[1:]  # behind --lr
        (advised,) = load(["--warmup_steps=9", "--max_steps=100", *flags], TrainConfig)
        assert list(Cadence(advised).steps_from(58)) == [58, *range(last, max(100, last + 1))]
