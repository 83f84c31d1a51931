"""Predictions beside what this project measured on one H200 (bench/results/h200.md).

Nothing is fitted to these rows: the predictions are those of constants that were fitted to other
people's runs, before a GPU had run this code. No change of planning/ may make them worse.
"""

import statistics

import pytest
from conftest import ROOT

import config
import devices
from config import MPTConfig, TrainConfig
from planning import memory, step_time
from planning.fleet import Fleet

ONE_H200 = Fleet(devices.by_name("h200"), 1, 1)
EAGER = "1b --microbatch_size=8 --alibi=true --compile=false"
# Size and settings: tokens/s, peak GB. Two microbatches a step, sequences of 2,048, ZERO1, bf16.
MEASURED = {
    "125m --microbatch_size=32": (501_563, 22.57),
    "350m --microbatch_size=32": (192_540, 59.17),
    "1b --microbatch_size=8": (62_450, 50.58),
    "1b --microbatch_size=8 --alibi=true": (59_973, 50.51),
    EAGER: (59_338, 50.54),
    "1b --microbatch_size=16 --alibi=true": (62_357, 76.51),
    "3b --microbatch_size=8 --activation_checkpointing=none": (32_244, 91.97),
    "7b --microbatch_size=4 --activation_checkpointing=full": (10_926, 111.26),
}


def settings_of(run: str) -> tuple[MPTConfig, TrainConfig]:
    """A config file and flags, with compiled blocks unless they say not."""
    size, *flags = run.split()
    words = [str(ROOT / f"configs/mpt{size}.py"), "--compile=true", *flags]
    m, cfg = config.load(words, MPTConfig, TrainConfig)
    cfg.global_batch_size = 2 * cfg.microbatch_size
    return m, cfg


def error_of_speed(run: str) -> float:
    """predicted / measured - 1"""
    m, cfg = settings_of(run)
    return step_time.tokens_per_second(m, cfg, ONE_H200) / MEASURED[run][0] - 1


@pytest.mark.parametrize("run", MEASURED)
def test_speed(run):
    """Compiling gained 1 % where 14 % was expected, so the eager run comes out too slow."""
    assert abs(error_of_speed(run)) < (0.09 if run == EAGER else 0.07)


def test_the_median_of_the_speeds():
    errors = [abs(error_of_speed(run)) for run in MEASURED if run != EAGER]
    assert statistics.median(errors) < 0.025


@pytest.mark.parametrize("run", MEASURED)
def test_memory(run):
    m, cfg = settings_of(run)
    peak = memory.bytes_by_part(m, cfg)["peak"]
    assert peak / 1e9 == pytest.approx(MEASURED[run][1], rel=0.005)
