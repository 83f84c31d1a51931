"""planning/certainty.py: the error band of a prediction, from published runs of its kind."""

import csv
import statistics
from dataclasses import replace

import pytest

import devices
from config import MPTConfig, TrainConfig
from planning import certainty
from planning.fleet import Fleet
from planning.step_time import Constants, StepTime
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
    assert "published runs of this kind" in sentence
    factors = factors_of(certainty.kind_of(M, run(), Fleet(A100, 8)))
    tenths = statistics.quantiles(factors, n=10, method="inclusive")
    assert (low, high) == (min(tenths[0], 1), max(tenths[-1], 1))
    assert f"reached {tenths[0]:.0%} to {tenths[-1]:.0%} of the prediction" in sentence


def factors_of(kind: dict[str, str]) -> list[float]:
    """measured / predicted of the published runs of a kind."""
    rows = files.read_csv(certainty.RESIDUALS, [*certainty.WEIGHTS, "model", "factor"])
    return [float(row["factor"]) for row in rows if certainty.is_of(row, kind)]


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
    runs = "80% of the 21 published runs of this kind"
    assert sentence == f"{runs} reached 84% to 116% of the prediction"
    low, high, sentence = certainty.band(M, run(), Fleet(MI250, 8))
    assert (low, high) == pytest.approx((0.84**1.1, 1.16**1.1))
    true = "80% of the 21 nearest runs reached 84% to 116% of the prediction"
    assert sentence.endswith(f"{true}; widened to 83% to 118%")


@pytest.mark.parametrize(
    "factors, words, of_kind, of_nearest",
    [
        # 0.6, 0.65, ..., 0.85: all at least 15 % slower. Nothing is mirrored to the other side.
        (
            [0.60, 0.65, 0.70, 0.75, 0.80, 0.85],
            "all 6 {} were 15% to 40% slower than predicted",
            (0.625, 1),
            (0.625**1.1, 1.15**1.1),
        ),
        (
            [1.20, 1.25, 1.30, 1.35, 1.40, 1.45],
            "all 6 {} were 20% to 45% faster than predicted",
            (1, 1.425),
            (1.15**-1.1, 1.425**1.1),
        ),
        # The middle is on one side, but not all are far on it.
        (
            [0.80, 0.82, 0.84, 0.86, 0.88, 0.94],
            "80% of the 6 {} reached 81% to 91% of the prediction",
            (0.81, 1),
            (0.81**1.1, 1.15**1.1),
        ),
    ],
)
def test_what_is_told_is_what_runs_reached(
    tmp_path, monkeypatch, factors, words, of_kind, of_nearest
):
    kind = certainty.kind_of(M, run(), Fleet(A100, 8))
    rows = [{**kind, "model": i % 3, "factor": factor} for i, factor in enumerate(factors)]
    use_residuals(rows, tmp_path / "residuals.csv", monkeypatch)
    low, high, sentence = certainty.band(M, run(), Fleet(A100, 8))
    assert (low, high) == pytest.approx(of_kind)
    told = words.format("published runs of this kind")
    assert sentence == f"{told}; the band ends at the prediction"

    low, high, sentence = certainty.band(M, run(), Fleet(MI250, 8))
    assert (low, high) == pytest.approx(of_nearest)
    widened = f"widened to {low:.0%} to {high:.0%}"
    assert sentence.endswith(f": {words.format('nearest runs')}; {widened}")


KERNELS = {
    "fp8": ({"matmul_fp8_tflops": 1500}, {}),
    "another attention kernel": ({"attention": 0.6}, {}),
    "compiled blocks": ({}, {"compile": True}),
    "fp8 and compiled blocks and another attention kernel": (
        {"matmul_fp8_tflops": 1500, "attention": 0.6},
        {"compile": True},
    ),
}


@pytest.mark.parametrize("words", KERNELS)
def test_kernels_that_no_published_run_had_widen_the_band(words):
    of_device, of_run = KERNELS[words]
    h100 = devices.by_name("h100")
    known = certainty.band(M, run(), Fleet(h100, 8))
    assert "published runs of this kind" in known[2]
    low, high, sentence = certainty.band(M, run(**of_run), Fleet(replace(h100, **of_device), 8))
    assert low < known[0] and high > known[1]
    assert sentence.startswith(f"too few runs with {words} were compared: ")


def test_compilation_that_changes_no_prediction_is_no_other_kind():
    """Blocks are not compiled with tensor ranks. What attention reached in 2023 is no news."""
    split = Fleet(A100, 8, tp=2)
    assert certainty.kind_of(M, run(compile=True), split) == certainty.kind_of(M, run(), split)
    share = Constants().attention_a100
    same = Fleet(replace(A100, attention=share), 8)
    assert certainty.kind_of(M, run(), same) == certainty.kind_of(M, run(), Fleet(A100, 8))


def test_one_device_is_not_one_node():
    low, high, sentence = certainty.band(M, run(), Fleet(A100, 1))
    assert sentence.startswith("too few runs with one device were compared")
    assert low < 1 / 1.15 and high > 1.15


def test_blocks_that_run_for_less_time_than_it_takes_to_start_them():
    """MPT-125M in microbatches of one short sequence on an H100, and of many long ones."""
    h100 = Fleet(devices.by_name("h100"), 8)
    small = MPTConfig(d_model=768, n_heads=12, n_layers=12, max_seq_len=256)
    times = certainty.launch_share(small, run(microbatch_size=1), h100)
    step = StepTime(small, run(microbatch_size=1), h100)
    seconds = step.matmuls() + step.attention() + step.memory()
    assert times == pytest.approx(12 * certainty.LAUNCHES / seconds) and times > 2
    low, high, sentence = certainty.band(small, run(microbatch_size=1), h100)
    assert low < 1 / times < 1 < high
    assert "very small microbatches" in sentence
    assert f"starting the kernels may take {times:.1f} times as long as they run" in sentence

    large = replace(small, max_seq_len=2048)
    sentence = certainty.band(large, run(microbatch_size=16, global_batch_size=128), h100)[2]
    assert "starting" not in sentence and "very small" not in sentence


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
    assert low < 0.5
    assert sentence.startswith("the runs with FULL_SHARD were of too few models: ")
    use_residuals(rows[15:], tmp_path / "residuals.csv", monkeypatch)
    sentence = certainty.band(M, run(), Fleet(A100, 8))[2]
    assert sentence.startswith("too few runs with FULL_SHARD were compared: ")


def test_8_in_10_runs_are_in_the_band_that_other_kinds_give_them():
    """Each kind in turn as if it had never been compared."""
    rows = files.read_csv(certainty.RESIDUALS, [*certainty.WEIGHTS, "model", "factor"])
    inside = 0
    for row in rows:
        kind = {part: row[part] for part in certainty.WEIGHTS}
        low, high, _ = certainty.band_of(kind, [r for r in rows if not certainty.is_of(r, kind)])
        inside += low <= float(row["factor"]) <= high
    assert 0.8 <= inside / len(rows) <= 0.9
