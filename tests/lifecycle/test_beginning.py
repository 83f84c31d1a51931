"""lifecycle/beginning.py: before its first step a run describes itself and warns."""

import datetime
import math
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

import config
import devices
import flops
from config import MPTConfig, TrainConfig
from lifecycle import beginning, resume
from planning import search
from planning.fleet import Fleet
from processes import World

CPU = torch.device("cpu")


def test_a_run_warns_of_weights_that_planning_does_not_know(monkeypatch):
    cfg = MPTConfig(d_model=48, n_heads=6, n_layers=2, max_seq_len=40, vocab_size=97)
    assert beginning.parameter_warning(cfg) == []

    class Gated(beginning.MPT):
        def __init__(self, cfg):
            super().__init__(cfg)
            self.gate_proj = torch.nn.Linear(48, 192, bias=False)

    monkeypatch.setattr(beginning, "MPT", Gated)
    (line,) = beginning.parameter_warning(cfg)
    n_params = flops.n_params(cfg) + 48 * 192
    assert line.startswith(f"WARNING: model.py has {n_params:,} parameters")


def test_a_team_on_several_nodes_is_warned_of():
    """Teams are neighbours: of six ranks a node, 4 to 7 are one team, and 6 is on the next node."""
    world = World(0, 48, 0, 6, CPU)
    assert beginning.team_warning(TrainConfig(tp=3), world) == []
    (line,) = beginning.team_warning(TrainConfig(tp=4), world)
    assert "--tp=2 " in line


@pytest.mark.parametrize(
    "batch, microbatch, sharding, words",
    [
        (32, 1, "ZERO1", ""),
        (32, 1, "DDP", ""),
        (32, 2, "FULL_SHARD", "FULL_SHARD gathers a stage's weights in each of its 8 microb"),
        (32, 8, "ZERO1", "WARNING: 2 microbatches never fill 4 stages: each waits for 60% of"),
        (6, 2, "ZERO1", "WARNING: 2 microbatches never fill 4 stages"),
    ],
)
def test_stages_are_warned_of_what_costs_them_time(batch, microbatch, sharding, words):
    """Two data-parallel ranks, four stages. What the message advises ends the warning."""
    cfg = TrainConfig(global_batch_size=batch, microbatch_size=microbatch, sharding=sharding, pp=4)
    world = World(0, 8, 0, 8, CPU, dp_rank=0, dp_size=2, pp_size=4)
    lines = beginning.stage_warnings(cfg, world, math.ceil(batch / 2 / microbatch))
    assert len(lines) == bool(words) and "".join(lines).startswith(words)
    if "WARNING" in words:
        for name, number in re.findall(r"--(\w+)=(\d+)", lines[0]):
            better = replace(cfg, **{name: int(number)})
            rows = better.global_batch_size // 2
            assert rows / better.microbatch_size >= 4
            assert not beginning.stage_warnings(better, world, rows // better.microbatch_size)
    alone = World(0, 8, 0, 8, CPU)
    assert beginning.stage_warnings(replace(cfg, pp=1), alone, 1) == []


def test_a_run_with_adapters_says_what_it_trains():
    m = MPTConfig(d_model=64, n_heads=4, n_layers=2, vocab_size=128, max_seq_len=16)
    lora = {"init_from": "base", "lora_rank": 4, "lora_last_blocks": 1, "lora_train": "norms"}
    cfg = TrainConfig(**lora)
    n_trained = 4 * (2 + 4 + 5 + 5) * 64 + (4 * 2 + 2) * 64  # adapters; norms and biases
    assert beginning.trained_parameters(m, cfg) == n_trained
    n_params = beginning.trained_parameters(m, TrainConfig())
    (line,) = beginning.describe_adapters(m, cfg, n_trained, n_params)
    assert f"{n_trained:,} parameters" in line and f"{n_trained / n_params:.2%}" in line


SHORT = TrainConfig(max_steps=12, warmup_steps=2, lr=3e-3, decoupled_weight_decay=0.1)


@pytest.mark.parametrize(
    "step, flag, words",
    [
        (12, "max_steps=200", "goes from 3.66e-04 to 2.98e-03 at step 13"),
        (9, "lr=1e-4", "lr 0.003 (here 0.0001): the learning rate goes from 1.23e-03 to 2.85e-05"),
        (9, "schedule=constant", "schedule cosine (here constant)"),
        (9, "max_steps=12", ""),  # nothing has changed
        (9, "beta1=0.8", "the checkpoint has beta1 0.9 (here 0.8)"),
        (12, "max_steps=12", ""),  # no step is left
    ],
)
def test_what_changes_where_a_run_resumes_is_noted(step, flag, words):
    same = [f"--{name}={value}" for name, value in asdict(SHORT).items() if value != []]
    (cfg,) = config.load([*same, f"--{flag}"], TrainConfig)
    start = resume.Start(Path("x"), {"step": step, **asdict(SHORT)}, "")
    notes = beginning.notes_on_changes(cfg, start)
    assert len(notes) == bool(words) and words in "".join(notes)


def test_the_time_of_a_run_is_planned_before_it_starts(monkeypatch):
    """On devices that planning knows; the figures are those of `python plan.py`."""
    m = MPTConfig(d_model=2048, n_heads=16, n_layers=24, max_seq_len=2048)
    cfg = TrainConfig(global_batch_size=64, microbatch_size=4, max_steps=1000)
    row = devices.by_name("mi250")
    monkeypatch.setattr(devices, "identify", lambda _: row)
    line = beginning.planned_time(m, cfg, World(0, 8, 0, 8, CPU), "bf16", None, first=400)
    seconds = search.evaluate(m, cfg, Fleet(row, 8, 8)).seconds["step"]
    assert f"planned: {seconds:.3g} s a step" in line
    assert f"{datetime.timedelta(seconds=round(600 * seconds))} for 600 steps" in line


# A CPU; fp32, while planning knows 16 bits; 3 tensor ranks, which do not divide this model.
@pytest.mark.parametrize(
    "row, precision, tp", [(None, "bf16", 1), ("h100", "fp32", 1), ("h100", "bf16", 3)]
)
def test_where_planning_knows_nothing_a_matmul_says_how_long_it_takes_at_least(
    row, precision, tp, monkeypatch
):
    monkeypatch.setattr(devices, "identify", lambda _: row and devices.by_name(row))
    monkeypatch.setattr(devices, "measure_peak", lambda device, dtype, seconds: 1e12)
    m, cfg = MPTConfig(n_layers=3), TrainConfig(pp=2, tp=tp, max_steps=90)
    world = World(0, 2, 0, 2, CPU)
    n_flops = cfg.global_batch_size * m.max_seq_len * flops.train_flops_per_token(m)
    for peak, rate in ((None, 2e12), (4e12, 4e12)):  # not known: that of two ranks is measured
        line = beginning.planned_time(m, cfg, world, precision, peak, first=30)
        assert f"at least {n_flops / rate:.3g} s a step" in line
        assert f" {datetime.timedelta(seconds=round(60 * n_flops / rate))} for 60 steps" in line

    endless = beginning.planned_time(m, replace(cfg, max_steps=10**15), world, precision, None, 0)
    assert "unknown time for 1,000,000,000,000,000 steps" in endless
