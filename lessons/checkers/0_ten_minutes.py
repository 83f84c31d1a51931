"""Checks exercise 0: the prediction, the losses of three runs, and a reader of metrics.jsonl."""

import json
import math
import tempfile
from pathlib import Path

from lessons.answers import ToDo, is_number, shown
from lessons.pictures import FOLDER
from lifecycle import runlog

# Folders, and the losses between which such runs end on two CPU cores.
RUNS = {
    2e-3: ("0-low", 6.2, 6.5),
    2e-2: ("0-middle", 6.4, 6.9),
    2e-1: ("0-high", 12, math.inf),
}


def check_prediction(answer):
    """Which learning rate diverges"""
    guess = answer.value("DIVERGES")
    if guess is None:
        raise ToDo("DIVERGES is still None: predict first, then run")
    assert guess in RUNS, f"DIVERGES is {shown(guess)}: it should be 2e-3, 2e-2 or 2e-1"
    assert guess == 2e-1, (
        f"{guess:g} learns, though perhaps not well. Adam moves every weight by about the "
        "learning rate in each step: compare that with the size of a weight, about 0.08"
    )


def check_losses(answer):
    """How the three runs ended"""
    given = answer.value("FINAL_LOSSES")
    for lr, (name, low, high) in RUNS.items():
        loss = given.get(lr)
        if loss is None:
            raise ToDo(f"FINAL_LOSSES lacks the run with --lr={lr:g}")
        assert is_number(loss), f"FINAL_LOSSES[{lr:g}] should be a number, not {shown(loss)}"
        end = "such a run ends"
        if (FOLDER / name / "metrics.jsonl").exists():
            rows = runlog.read(FOLDER / name)
            by_step = {row["step"]: row["val_loss"] for row in rows if "val_loss" in row}
            end = f"your run in runs/lessons/{name} ended"
            assert 60 in by_step, f"runs/lessons/{name} has not reached step 60: run it to its end"
            low, high = 0.99 * by_step[60] - 0.06, 1.01 * by_step[60] + 0.06
        # A run that diverged may have ended in NaN.
        is_near = low <= loss <= high or (math.isnan(loss) and not math.isfinite(high))
        assert is_near, f"with --lr={lr:g} {end} at {low:.2f} to {high:.2f}; you wrote {loss}"


def check_losses_of_a_file(answer):
    """losses(path) reads metrics.jsonl"""
    step = {"step": 1, "tokens": 1024, "loss": 9.25, "lr": 0.0}
    validation = {"step": 1, "val_loss": 9.33}
    later = {"step": 2, "tokens": 2048, "loss": 9.0, "lr": 1e-3}
    cases = {
        "two steps": [step, later],
        "a validation between two steps": [step, validation, later],
        "no steps": [validation],
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.jsonl"
        for case, rows in cases.items():
            path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
            expected = [(row["step"], row["loss"]) for row in rows if "loss" in row]
            got = answer.call("losses", str(path))
            same = [tuple(pair) for pair in got] == expected
            assert same, f"losses of a file with {case}: expected {expected}, got {shown(got)}"
