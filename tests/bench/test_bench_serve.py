"""bench/serve.py: the milliseconds of a token."""

import csv

import pytest
import torch

import devices
from bench import serve
from config import MPTConfig
from program import UserError


def measure_decoding(world, folder) -> None:
    """In the folder, on one thread."""
    settings = ["--shapes=64x1", "--turns=1", "--device=cpu", "--engine=2"]
    serve.main([*settings, f"--out={folder}/a.csv"])


@pytest.mark.slow
def test_decoding_is_measured(ranks, tmp_path):
    ranks(1)(measure_decoding, str(tmp_path))
    rows = list(csv.DictReader((tmp_path / "a.csv").open()))
    assert len(rows) == 2 * 3 * 2 and all(float(row["ms a token"]) > 0 for row in rows)
    assert [row["batch"] for row in rows[:6]] == [*"1188", "engine, 2", "engine, 2"]
    assert {row["limit, ms a token"] for row in rows} == {"n/a"}  # of a CPU


@pytest.mark.parametrize("shapes", ["65x1", "64x1,", ",64x1"])
def test_a_shape_is_a_width_and_layers(shapes):
    with pytest.raises(UserError, match="multiple of 64|WIDTHxLAYERS"):
        serve.main([f"--shapes={shapes}"])


@pytest.mark.parametrize("batch, ms", [(1, "0.548"), (8, "0.562")])
def test_the_limit_is_that_of_the_h200s_page(batch, ms, monkeypatch):
    """bench/results/h200.md: bf16, 2,048 wide, 24 layers."""

    class OnAnH200:
        cfg = MPTConfig(2048, 32, 24, vocab_size=50368, alibi=True, no_bias=True)
        dtype, device = torch.bfloat16, "cuda"

    monkeypatch.setattr(devices, "identify", lambda device: devices.by_name("h200"))
    assert serve.limit(OnAnH200, batch) == ms
