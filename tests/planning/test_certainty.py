"""planning/certainty.py: the error band of a prediction, from published runs of its kind."""

import csv

import pytest

import devices
from config import MPTConfig, TrainConfig
from planning import certainty
from planning.fleet import Fleet
from storage import files

A100 = devices.by_name("a100 80gb")
MI250 = devices.by_name("mi250")
M = MPTConfig(d_model=4096, n_heads=32, n_layers=32)


def run(**settings) -> TrainConfig:
    """A layout on 8 devices."""
    base = {"sharding": "FULL_SHARD", "activation_checkpointing": "full", "microbatch_size": 4}
    return TrainConfig(**{**base, **settings})


def test_a_kind_that_was_compared_has_a_narrow_band():
    low, high, sentence = certainty.band(M, run(), Fleet(A100, 8))
    assert 0.7 < low <= 1 <= high < 1.3
    assert "runs of this kind" in sentence
    assert f"reached {low:.0%} to {high:.0%} of the predicted tokens/s" in sentence


def test_a_kind_that_was_not_compared_has_a_wider_band_and_says_so():
    known = certainty.band(M, run(), Fleet(A100, 8))
    low, high, sentence = certainty.band(M, run(), Fleet(MI250, 8))
    assert high / low > known[1] / known[0]
    assert "MI250" in sentence and "too few runs" in sentence
    assert "ZERO1" in certainty.band(M, run(sharding="ZERO1"), Fleet(A100, 8))[2]
    adapters = run(lora_rank=8, init_from="runs/base")
    assert "adapters" in certainty.band(M, adapters, Fleet(A100, 8))[2]


def use_residuals(rows: list[dict], path, monkeypatch) -> None:
    """Make these the published runs."""
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    monkeypatch.setattr(certainty, "RESIDUALS", path)


def test_the_band_holds_8_of_10_runs(tmp_path, monkeypatch):
    """From rows with known factors: 0.80, 0.82, ..., 1.20."""
    kind = certainty.kind_of(M, run(), Fleet(A100, 8))
    rows = [{**kind, "model": i % 3, "factor": 0.8 + 0.02 * i} for i in range(21)]
    use_residuals(rows, tmp_path / "residuals.csv", monkeypatch)
    low, high, sentence = certainty.band(M, run(), Fleet(A100, 8))
    assert (low, high) == pytest.approx((0.84, 1.16))
    runs = "8 in 10 of 21 published runs of this kind"
    assert sentence == f"{runs} reached 84% to 116% of the predicted tokens/s"
    low, high, sentence = certainty.band(M, run(), Fleet(MI250, 8))
    assert (low, high) == pytest.approx((0.84**1.1, 0.84**-1.1))
    assert sentence.endswith("widened from the 21 nearest runs")


def test_mi250_and_mi250x_are_one_die():
    mi250, mi250x = (Fleet(devices.by_name(name), 8) for name in ("mi250", "mi250x"))
    assert certainty.kind_of(M, run(), mi250) == certainty.kind_of(M, run(), mi250x)


def test_many_runs_of_one_model_make_no_band(tmp_path, monkeypatch):
    """A kind with 20 runs of one model falls back to the rows of all kinds."""
    kind = certainty.kind_of(M, run(), Fleet(A100, 8))
    rows = [{**kind, "model": "one", "factor": 1.0}] * 20
    for model in ("two", "three"):
        rows += [{**kind, "sharding": "DDP", "model": model, "factor": 0.5}] * 20
    use_residuals(rows, tmp_path / "residuals.csv", monkeypatch)
    low, high, sentence = certainty.band(M, run(), Fleet(A100, 8))
    assert low < 0.5 and "too few runs with FULL_SHARD" in sentence


def test_8_in_10_runs_are_in_the_band_that_other_kinds_give_them():
    """Each kind in turn as if it had never been compared."""
    rows = files.read_csv(certainty.RESIDUALS, [*certainty.WEIGHTS, "model", "factor"])
    inside = 0
    for row in rows:
        kind = {part: row[part] for part in certainty.WEIGHTS}
        low, high, _ = certainty.band_of(kind, [r for r in rows if not certainty.is_of(r, kind)])
        inside += low <= float(row["factor"]) <= high
    assert 0.8 <= inside / len(rows) <= 0.9
