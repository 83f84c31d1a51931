"""bench/adapters.py: it runs to its end, and its table has a line for each number of adapters."""

import csv

import pytest
import torch

from bench import adapters
from config import UserError

SMALL = """
    --d_model=64 --n_layers=1 --vocab_size=300 --resident=20 --batch=9 --turns=1 --large_rank=8
""".split()


def test_a_small_run_prints_switch_steps_and_loads(tmp_path, capsys):
    threads = torch.get_num_threads()
    adapters.main(["--threads=1", "--device=cpu", *SMALL, f"--out={tmp_path}/steps.csv"])
    torch.set_num_threads(threads)
    shown = capsys.readouterr().out
    assert ", 1 threads, " in shown
    assert "base of 1 layers x 64, " in shown and "20 adapters of rank 4" in shown
    assert "a switch of all 9 rows" in shown
    rows = list(csv.DictReader((tmp_path / "steps.csv").read_text().splitlines()))
    assert [row["adapters in the batch"] for row in rows] == ["0", "1", "8"]
    assert rows[0]["of none"] == "1.00"
    for name in ("load ", "step ", "load beside", "step beside"):
        assert f"\n{name}" in shown


def test_settings_out_of_range_are_refused():
    wrong = {
        "--d_model=100": "d_model 100 is not a multiple of 64",
        "--n_layers=0": "n_layers must be from 1",
        "--rank=64 --d_model=64": "rank must be above 0 and below d_model, 64",
        "--threads=-1": "threads: 0 or more",
        "--resident=0": "must be at least 1",
    }
    for flags, message in wrong.items():
        with pytest.raises(UserError, match=message):
            adapters.main(flags.split())
