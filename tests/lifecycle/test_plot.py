"""lifecycle/plot.py: curves as text and as a picture, restarts, differences between runs."""

import html
import importlib.util
import json
import math
import re
import sys
import tracemalloc
from pathlib import Path

import pytest
from conftest import refusal

from lifecycle import plot, runlog

PICTURES = importlib.util.find_spec("matplotlib") is not None
ROOT = Path(__file__).resolve().parents[2]


def folder(path, rows, launches=()):
    """A run folder of these rows and launches (first step, ranks)."""
    path.mkdir(exist_ok=True)
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (path / "config.json").write_text(json.dumps({"expect": "about 4.5", "max_steps": 50}))
    lines = [json.dumps({"first_step": first, "ranks": ranks}) for first, ranks in launches]
    (path / "launches.jsonl").write_text("\n".join(lines))
    return str(path)


def step(number, loss, **more):
    """A row of a training step."""
    return {"step": number, "tokens": 100 * number, "loss": loss, "seconds": 0.5, **more}


def val(number, loss):
    """A row of a validation."""
    return {"step": number, "val_loss": loss, "val_bits_per_byte": loss / 2}


@pytest.fixture
def run(tmp_path):
    """A run folder whose loss falls from 9 in steps of 1 every 10 steps, with two evaluations."""
    rows = [val(0, 9.5), *(step(s, 9 - s // 10) for s in range(1, 51)), val(50, 4.5)]
    folder(tmp_path / "run", rows)
    return tmp_path / "run"


# --- curves and the terminal


def test_curves_are_in_tokens_or_in_steps_without_what_is_no_number(tmp_path):
    bad = step(2, math.nan, skipped=True, mfu=0.5)
    rows = [val(0, 9.5), step(1, 5.0, mfu=None), bad, step(3, 4.0), val(3, math.nan)]
    run = plot.read(folder(tmp_path / "run", rows))
    assert plot.curves(run) == ([(100, 5.0), (300, 4.0)], [(0, 9.5)])
    assert plot.curves(run, x="step") == ([(1, 5.0), (3, 4.0)], [(0, 9.5)])
    assert plot.curves(run, "mfu") == ([(200, 0.5)], [])
    assert plot.in_terminal([run], "lr") == "learning rate: not known in this run"


def test_a_step_of_huge_values_is_in_the_means_of_its_window_alone(tmp_path):
    rows = [step(s, 1.0 if s != 10 else 1e30) for s in range(1, 101)]  # a window has two steps
    run = plot.read(folder(tmp_path / "run", rows))
    means = [value for _, value in plot.curves(run, x="step")[0]]
    assert [at for at, mean in enumerate(means, 1) if mean != 1.0] == [10, 11]


def long_rows(n):
    """Rows as fsdp_train writes them, and an evaluation every 500 steps."""
    for number in range(1, n + 1):
        more = {"tokens_per_second": 1e5 + number, "mfu": 0.4, "memory_gb": 1.25, "skipped": False}
        more |= {"lr": 1e-3 / number, "grad_norm": 0.5, "batch_hash": f"{number:016x}"}
        more |= {"slowest_rank": 0, "slowest_by": 1.0123456789}
        yield step(number, 3 + number % 7 + 1 / number, **more)
        if number % 500 == 0:
            yield val(number, 3.5)


def test_of_a_long_run_few_rows_are_parsed_and_none_is_kept_as_a_dict(tmp_path, monkeypatch):
    path = folder(tmp_path / "run", long_rows(40_000))
    parsed = []
    parse = runlog.parse
    monkeypatch.setattr(runlog, "parse", lambda *line: parsed.append(1) or parse(*line))
    tracemalloc.start()
    run = plot.read(path, ["loss"])
    train, validation = plot.curves(run, x="step")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 25e6  # bytes; dicts are 45e6, and a list of each point's window 400e6
    assert len(parsed) < 6000
    assert len(validation) == 80
    assert len(train) <= 2 * plot.MOST_POINTS and train[-1][0] == 40_000
    losses = [3 + number % 7 + 1 / number for number in range(1, 40_001)]
    for at, mean in train[:: len(train) // 50]:
        window = losses[max(0, at - 800) : at]
        assert mean == pytest.approx(sum(window) / len(window))


def test_text_curve_falls_from_left_to_right(run):
    lines = plot.in_terminal([plot.read(str(run))], width=60, height=12).splitlines()
    dots = []
    for y, line in enumerate(lines[:12]):
        curve = line.partition("|")[2]
        dots += [(x, y) for x, mark in enumerate(curve) if mark == "."]
    assert max(y for x, y in dots if x < 15) < min(y for x, y in dots if x > 45)
    assert "9.50" in lines[0]
    assert lines[0].endswith("A")
    assert "5,000 tokens" in lines[13]


# --- restarts


@pytest.mark.parametrize(
    "launches, labels",
    [
        ([(0, 1), (10, 2), (20, 2), (30, 1)], ["1 -> 2 ranks", "2 ranks", "2 -> 1 rank"]),
        ([(0, None), (10, None)], ["restart"]),
        ([(5, 2)], ["2 ranks"]),  # forked from another run
        # A launch takes away the restarts whose steps it does again.
        ([(0, 1), (10, 2), (30, 4), (30, 3), (20, 2)], ["1 -> 2 ranks", "2 ranks"]),
        ([(0, 1), (20, 2), (0, 1)], []),
        ([(0, 1), (40, 1)], []),  # starting a finished run again does nothing
    ],
)
def test_restarts_name_their_ranks(tmp_path, launches, labels):
    rows = [step(s, 5.0) for s in range(1, 41)]
    restarts = plot.read(folder(tmp_path / "run", rows, launches)).restarts
    assert [restart["label"] for restart in restarts] == labels
    assert all(restart["tokens"] == 100 * restart["step"] for restart in restarts)


# --- differences


def test_differences_by_hand(tmp_path):
    """|b - a| is 0.5, 1.5, 1 at steps 1, 2, 4, where both are finite, and 0.25 in validation."""
    a_rows = [step(1, 5.0), step(2, 4.0), step(3, math.nan), step(4, 3.0), step(5, 1.0)]
    b_rows = [step(1, 5.5), step(2, 2.5), step(3, 3.0), step(4, 4.0)]
    a = plot.read(folder(tmp_path / "a", [*a_rows, val(0, 9.0), val(4, 4.0)]))
    b = plot.read(folder(tmp_path / "b", [*b_rows, val(2, 1.0), val(4, 3.75)]))
    train = plot.Difference(largest=1.5, step=2, mean=1.0, steps=3, common=4)
    assert plot.difference(a.steps, b.steps) == train
    validation = plot.Difference(largest=0.25, step=4, mean=0.25, steps=1, common=1)
    assert plot.difference(a.vals, b.vals, "val_loss") == validation
    rows = [line.split() for line in plot.table_of_differences([a, b]).splitlines()[3:]]
    assert rows[0][1:] == ["training", "1.5", "2", "1", "3", "of", "4"]
    assert rows[1][1:] == ["validation", "0.25", "4", "0.25", "1", "of", "1"]


def test_batches_are_compared_in_common_steps(tmp_path):
    hashes = ["aa", "bb", "cc", "dd"]
    others = {
        "the same batches in 4 of 4 steps": [*hashes, "ee"],
        "different batches from step 3": ["aa", "bb", "xx", "yy"],
        "the same batches in 3 of 4 steps": ["aa", None, "cc", "dd"],
        "batches not recorded": [None] * 4,
        "no step in common": [],
    }

    def run(name, *rows):
        return plot.read(folder(tmp_path / name, rows))

    first = run("first", *(step(s, 5.0, batch_hash=value) for s, value in enumerate(hashes, 1)))
    for words, values in others.items():
        rows = [step(s, math.nan, batch_hash=value) for s, value in enumerate(values, 1)]
        table = plot.table_of_differences([first, run("other", *rows, step(9, 5.0))])
        assert f"other: {words}\n" in table
        assert ("nan" in table) == bool(values)  # no finite step is in both


# --- pictures


@pytest.mark.skipif(not PICTURES, reason="needs matplotlib")
def test_the_picture_of_all_quantities_is_svg_with_restarts_and_runs(tmp_path):
    """matplotlib draws outlines, and writes the text into comments."""
    figures = {"lr": 1e-3, "grad_norm": 1.0, "tokens_per_second": 1e4, "mfu": None}
    rows = [step(s, 5.0, **figures) for s in range(1, 41)]
    a = plot.read(folder(tmp_path / "$a$", rows, [(0, 1), (20, 2)]))
    b = plot.read(folder(tmp_path / "b", rows[:1]))
    assert plot.as_picture([a, b], tmp_path / "all.svg", "all", "step")
    comments = re.findall("<!-- (.*?) -->", (tmp_path / "all.svg").read_text())
    drawn = [html.unescape(comment) for comment in comments]
    expected = {words for words, _ in plot.WHAT.values()}
    expected |= {"restart", "steps", a.folder[-100:], b.folder[-100:]}
    assert expected <= set(drawn) and "validation" not in drawn
    assert drawn.count("not known") == drawn.count("1 -> 2 ranks") == 1


@pytest.mark.skipif(not PICTURES, reason="needs matplotlib")
def test_many_runs_with_long_names_and_many_restarts(tmp_path):
    rows = [step(s, 5.0 + s / 10) for s in range(1, 41)]
    often = [(0, 1)] + [(first, 2) for first in range(1, 40)]
    runs = [plot.read(folder(tmp_path / (f"{n}-" * 50), rows, often)) for n in range(12)]
    assert plot.as_picture(runs, tmp_path / "many.PNG")
    assert (tmp_path / "many.PNG").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    text = plot.legend(runs, validation=True)
    assert all(run.folder in text for run in runs)
    assert plot.in_terminal(runs)


# --- the program


def test_the_program_overlays_two_runs(run, tmp_path, capsys):
    lines = ['{"first_step": 0, "ranks": 1}', '{"first_step": 25, "ranks": 2}', '{"first']
    (run / "launches.jsonl").write_text("\n".join(lines))
    plot.main([str(run), str(run), f"--out={tmp_path}/both.png", "--x=step"])
    printed = capsys.readouterr().out
    assert "9.500 -> 4.500 nats per token, 4.750 -> 2.250 bits per byte" in printed
    assert "to expect: about 4.5" in printed
    assert "50 steps" in printed and "-^-" in printed
    assert "^ restarts after step 25 (1 -> 2 ranks)" in printed
    assert "difference" not in printed
    assert (tmp_path / "both.png").exists() == PICTURES


def test_without_matplotlib_the_terminal_has_it_all(run, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    plot.main([str(run), str(run), "--what=all", "--diff"])
    printed = capsys.readouterr().out
    assert "loss (nats per token)   5,000 tokens" in printed
    assert "MFU: not known" in printed
    assert "requirements-extra.txt" in printed
    assert "50 of 50" in printed
    assert not (run / "all.png").exists()


def test_a_mistake_is_one_line(run, tmp_path, capsys):
    folder(tmp_path / "young", [val(0, 9.5)])
    for args, words in [
        ([run, "--out=a.pdf"], "a picture ends in .png or .svg"),
        ([run, "--diff"], "name two run folders"),
        (["nowhere"], "no metrics in 'nowhere'"),
        ([tmp_path / "young"], "no finished step"),
    ]:
        assert words in refusal(plot.main, [str(arg) for arg in args])
        assert capsys.readouterr().out == ""


@pytest.mark.skipif(not PICTURES, reason="needs matplotlib")
def test_a_picture_is_not_drawn_through_a_link(run, tmp_path):
    (tmp_path / "precious").write_text("mine")
    (run / "loss.png").symlink_to(tmp_path / "precious")
    assert plot.as_picture([plot.read(str(run))], run / "loss.png")
    assert (tmp_path / "precious").read_text() == "mine"
    assert (run / "loss.png").read_bytes()[1:4] == b"PNG"
