"""The benchmark takes turns and counts tokens right; its figures are for benchmarks/, not for a test."""

import time

import pytest

import bench

SHORT = ["train", "--n_layers=1", "--d_model=32", "--n_heads=4", "--max_seq_len=16", "--rounds=2", "--steps=1"]


def test_turns_alternate_and_rates_are_tokens_over_seconds():
    order = []
    contestants = {name: lambda name=name: (order.append(name), time.sleep(0.02)) for name in "ab"}
    rates = bench.take_turns(contestants, rounds=3, steps=2, tokens=100)
    assert "".join(order) == "aabb" * 4  # one turn to warm up, three that count
    assert all(len(turns) == 3 and max(turns) <= 100 / 0.02 for turns in rates.values())


def test_train_prints_a_table_with_both(python):
    pytest.importorskip("transformers")
    done = python(*SHORT, "--peak_tflops=1", program="bench.py")
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    assert rows[1].startswith("| this project, FULL_SHARD") and rows[2].startswith("| transformers MptForCausalLM")
    assert rows[2].endswith(" 1.00 |") and "%" in rows[1]


def test_no_such_benchmark_is_one_line(python):
    wrong = python("trian", program="bench.py")
    assert wrong.returncode == 2 and wrong.stderr.startswith("error: usage: python bench.py train")
