"""Curves of a run folder, as text and as a picture."""

import json

import pytest
from conftest import launch

import plot
from config import UserError


@pytest.fixture
def run(tmp_path):
    """A run folder whose loss falls from 9 in steps of 1 every 10 steps, with two evaluations."""
    folder = tmp_path / "run"
    folder.mkdir()
    rows = [{"step": 0, "val_loss": 9.5, "val_bits_per_byte": 4.0}]
    rows += [{"step": s, "tokens": 100 * s, "loss": 9 - s // 10, "seconds": 0.5} for s in range(1, 51)]
    rows += [{"step": 50, "val_loss": 4.5, "val_bits_per_byte": 2.0}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "config.json").write_text(json.dumps({"expect": "about 4.5", "max_steps": 50}))
    return folder


def test_curves_are_in_tokens(run):
    train, val = plot.curves(str(run))
    assert train[0] == (100, 9) and train[-1] == (5000, 4)
    assert val == [(0, 9.5), (5000, 4.5)]


def test_text_curve_falls_from_left_to_right(run):
    lines = plot.in_terminal([str(run)], width=60, height=12).splitlines()
    dots = [(x, y) for y, line in enumerate(lines[:12]) for x, mark in enumerate(line.partition("|")[2]) if mark == "."]
    assert max(y for x, y in dots if x < 15) < min(y for x, y in dots if x > 45)
    assert "9.50" in lines[0] and lines[0].endswith("A") and "5,000 tokens" in lines[13]


def test_unfinished_or_missing_runs_are_named(tmp_path):
    with pytest.raises(UserError, match="no metrics in"):
        plot.curves(str(tmp_path))
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "val_loss": 9.5}\n')
    with pytest.raises(UserError, match="no finished step"):
        plot.curves(str(tmp_path))


def test_program_overlays_two_runs(run, tmp_path):
    done = launch([], tmp_path, ["run", "run", "--out=both.png"], program="plot.py")
    assert done.returncode == 0, done.stderr
    assert "validation loss 9.500 -> 4.500 nats a token, 4.000 -> 2.000 bits per byte" in done.stdout
    assert "to expect: about 4.5" in done.stdout
    assert (tmp_path / "both.png").read_bytes().startswith(b"\x89PNG") or "needs matplotlib" in done.stdout
