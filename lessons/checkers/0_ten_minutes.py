"""Checks exercise 0: the prediction, the losses of three runs, and a reader of metrics.jsonl."""

import json
import math
import tempfile
from pathlib import Path

from lessons.answers import ToDo, Wrong, equal, is_number, need, shortened
from lessons.pictures import FOLDER
from lifecycle import runlog

RUNS = {2e-3: "0-low", 2e-2: "0-middle", 2e-1: "0-high"}
# The ends of these runs on two CPU cores, and how far they differ between machines.
USUAL = {2e-3: (6.2, 6.5), 2e-2: (6.4, 6.9), 2e-1: (12, math.inf)}


def check_prediction(answer):
    """Which learning rate diverges"""
    guess = answer.value("DIVERGES")
    if guess is None:
        raise ToDo("DIVERGES is still None: predict first, then run")
    is_one = is_number(guess) and guess in RUNS
    need(is_one, f"DIVERGES is {shortened(guess)}: it should be a number, 2e-3, 2e-2 or 2e-1")
    if guess != 2e-1:
        raise Wrong(
            f"{guess:g} learns, though perhaps not well. Adam moves every weight by about the "
            "learning rate in each step: compare that with the size of a weight, about 0.08"
        )


def check_losses(answer):
    """How the three runs ended"""
    given = answer.value("FINAL_LOSSES")
    need(isinstance(given, dict), f"FINAL_LOSSES should be a dict, not {given!r}")
    missing = [lr for lr in RUNS if given.get(lr) is None]
    if missing:
        raise ToDo(f"FINAL_LOSSES lacks the run with --lr={missing[0]:g}")
    for lr, name in RUNS.items():
        loss = given[lr]
        need(is_number(loss), f"FINAL_LOSSES[{lr:g}] should be a number, not {shortened(loss)}")
        if (FOLDER / name / "metrics.jsonl").exists():
            compare_with_run(lr, loss, FOLDER / name)
            continue
        low, high = USUAL[lr]
        expected = f"more than {low}" if high == math.inf else f"{low} to {high}"
        is_usual = low <= loss <= high or (math.isnan(loss) and high == math.inf)
        need(is_usual, f"with --lr={lr:g} the last validation loss is {expected}; you wrote {loss}")


def compare_with_run(lr: float, loss: float, folder: Path) -> None:
    """Compare with the reader's own run."""
    by_step = {row["step"]: row["val_loss"] for row in runlog.read(folder) if "val_loss" in row}
    need(60 in by_step, f"runs/lessons/{folder.name} has not reached step 60: run it to its end")
    last = by_step[60]
    same = math.isnan(loss) if math.isnan(last) else abs(loss - last) <= 0.051 + 0.01 * last
    where = f"the validation loss of runs/lessons/{folder.name}"
    need(same, f"{where} ended at {last:.2f} with --lr={lr:g}; you wrote {loss}")


def check_losses_of_a_file(answer):
    """losses(path) reads metrics.jsonl"""
    step = {"step": 1, "tokens": 1024, "loss": 9.25, "lr": 0.0}
    validation = {"step": 0, "val_loss": 9.33}
    later = {"step": 2, "tokens": 2048, "loss": 9.0, "lr": 1e-3}
    cases = {
        "one step": [step],
        "two steps": [step, later],
        "a validation, then two steps": [validation, step, later],
        "a validation after a step": [step, {**validation, "step": 1}, later],
        "no steps": [validation],
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.jsonl"
        for case, rows in cases.items():
            path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
            expected = [(row["step"], row["loss"]) for row in rows if "loss" in row]
            got = answer.call("losses", str(path))
            compare_losses(got, expected, f"a file with {case}")


def compare_losses(got, expected: list, case: str) -> None:
    """Wrong unless these are the pairs (step, loss); a pair may be a list, too."""
    need(isinstance(got, list), f"losses: expected a list for {case}, but got {shortened(got)}")
    for pair in got:
        is_pair = isinstance(pair, tuple | list) and len(pair) == 2
        came = f"expected a list of pairs (step, loss) for {case}, but {shortened(pair)} is in it"
        need(is_pair and all(map(is_number, pair)), f"losses: {came}")
    equal("losses", [tuple(pair) for pair in got], expected, case)
