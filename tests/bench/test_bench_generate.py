"""bench/generate.py: the milliseconds of a token."""

import csv

import pytest

from bench import generate
from program import UserError


def measure_decoding(world, folder) -> None:
    """In the folder, on one thread."""
    settings = ["--shapes=64x1", "--turns=1", "--device=cpu", "--engine=2"]
    generate.main(["1", *settings, f"--out={folder}/a.csv"])


@pytest.mark.slow
def test_decoding_is_measured(ranks, tmp_path):
    ranks(1)(measure_decoding, str(tmp_path))
    rows = list(csv.DictReader((tmp_path / "a.csv").open()))
    assert len(rows) == 2 * 3 * 2 and all(float(row["ms a token"]) > 0 for row in rows)
    assert [row["batch"] for row in rows[:6]] == [*"1188", "engine, 2", "engine, 2"]
    assert {row["limit, ms a token"] for row in rows} == {"n/a"}  # of a CPU
    with pytest.raises(UserError, match="multiple of 64"):
        generate.main(["--shapes=65x1"])
