"""bench/compare.py: rows of `bench train`, figures worked out by hand."""

import csv

import pytest
from conftest import refusal

from bench import compare
from program import UserError

# LLM Foundry's published row of MPT-1B on 8 H100: 45,455 tokens/s and 413 TFLOP/s a device, MFU
# 41.82 % of 989.5.
SETTINGS = {
    "time": "2025-01-01T00:00:00",
    "command": "python -m bench train",
    "status": "ok",
    "model": "mpt1b",
    "n_params": 1315950592,
    "d_model": 2048,
    "n_layers": 24,
    "n_heads": 16,
    "max_seq_len": 2048,
    "vocab_size": 50368,
    "device": "NVIDIA H100 80GB HBM3",
    "nodes": 1,
    "ranks": 8,
    "threads": 8,
    "torch": "2.13.0",
    "precision": "bf16",
    "sharding": "FULL_SHARD",
    "shard_size": 8,
    "activation_checkpointing": "none",
    "recompute_every": 1,
    "compile": False,
    "attn_impl": "sdpa",
    "microbatch_size": 14,
    "grad_accum": 1,
    "global_batch_size": 112,
}
FIGURES = {
    "tokens_per_second": 363640,
    "fastest": 364000,
    "slowest": 363000,
    "tokens_per_second_device": 45455,
    "tflops_device": 413,
    "peak_tflops": 989.5,
    "mfu": 0.4182,
    "hfu": 0.4182,
    "convention": "LLM Foundry: 6 N + 12 L d S",
    "memory_gb": 60,
    "others": "",
}
H100 = SETTINGS | FIGURES
FAILED = SETTINGS | dict.fromkeys(FIGURES, "") | {"status": "out of memory"}


def write(path, *rows) -> str:
    """A CSV with these rows; its path."""
    with open(path, "w", newline="") as file:
        table = csv.DictWriter(file, list(H100))
        table.writeheader()
        table.writerows(rows)
    return str(path)


def at(ranks: int, batch: int, rate: float, **more) -> dict:
    """A row at this many ranks, 8 a node, with a rate in tokens/s a device.

    With FULL_SHARD, shard_size follows the ranks.
    """
    row = H100 | {
        "ranks": ranks,
        "nodes": max(1, ranks // 8),
        "shard_size": ranks,
        "global_batch_size": batch,
        "tokens_per_second_device": rate,
        "tokens_per_second": ranks * rate,
    }
    return row | more


def rows_of(path, *rows) -> list[dict]:
    """These rows as compare.py reads them from a file."""
    return compare.measured(compare.read(write(path, *rows)), str(path))


def test_the_row_that_llm_foundry_published(tmp_path):
    (row,) = rows_of(tmp_path / "a.csv", H100)
    cells = compare.cells("a", row, base=2 * 363640)
    published = {"MFU": "41.82", "Model TFLOP": "413", "Throughput (T/s/GPU)": "45455"}
    published |= {"Throughput (S/s)": "177.6", "GlobalBatchSize (T)": 229376}
    published |= {"Precision": "amp_bf16", "Activation Checkpointing": "False"}
    assert published.items() <= cells.items() and len(cells) == 4 + 20
    assert cells["first row = 1"] == "0.50" and cells["peak GB"] == "60.00"


def test_rows_are_named_by_what_differs_and_failures_are_listed(tmp_path):
    slower = H100 | {"microbatch_size": 7, "tokens_per_second": 181820}
    failed = FAILED | {"microbatch_size": 99}
    path = write(tmp_path / "a.csv", H100, slower, failed)
    text = compare.tables(compare.read(path), path)
    assert "| microbatch_size 14 | 364000 / 363000 | 1.00 |" in text
    assert "| microbatch_size 7 | 364000 / 363000 | 0.50 |" in text
    assert "- not measured: microbatch_size 99: out of memory" in text
    assert compare.names_of([H100, H100]) == ["mpt1b", "mpt1b"]
    assert compare.names_of([H100, H100 | {"others": "alibi=True tp=2"}]) == ["mpt1b", "tp=2"]


def test_rows_are_added_to_a_file_with_the_same_columns_only(tmp_path):
    path = tmp_path / "new" / "a.csv"
    for n in (1, 2):
        compare.append(str(path), {"a": n, "b": "x, y"})
    assert path.read_text().split() == ["a,b", '1,"x,', 'y"', '2,"x,', 'y"']
    before = path.read_text()
    with pytest.raises(UserError, match="other columns: name another file"):
        compare.append(str(path), {"a": 1})
    assert path.read_text() == before


# --- Over numbers of ranks


def test_strong_and_weak_scaling_by_hand(tmp_path):
    strong = [at(8, 64, 40000), at(32, 64, 34000), at(16, 64, 38000)]
    weak = [at(16, 128, 39600), at(32, 256, 39000, tflops_device="")]
    found = compare.scalings(rows_of(tmp_path / "r.csv", *strong, FAILED, *weak))
    assert [title.partition(":")[0] for title in found] == [
        "Strong scaling, global batch 64",
        "Weak scaling, 8 sequences a rank",
    ]
    first, second = found.values()
    assert [row["nodes"] for row in first] == [1, 2, 4]
    assert compare.efficiencies(first) == [1, 0.95, 0.85]  # 38 / 40, 34 / 40
    assert compare.efficiencies(second) == [1, 0.99, 0.975]
    last = compare.scaling_table(first).splitlines()[-1].split()
    assert last == "4 32 64 1,088,000 413 85.0% 10.5%".split()  # 1 - 34 / 38
    assert "n/a" in compare.scaling_table(second)


def test_rows_that_differ_in_a_setting_are_apart_and_the_later_of_two_counts(tmp_path):
    rows = [at(8, 64, 9), at(8, 64, 10), at(16, 64, 8)]
    rows += [at(8, 64, 20, torch="2.14.0"), at(16, 64, 19, torch="2.14.0")]
    rows += [at(8, 64, 5, compile=True)]
    found = compare.scalings(rows_of(tmp_path / "r.csv", *rows))
    assert [compare.efficiencies(members) for members in found.values()] == [[1, 0.8], [1, 0.95]]


@pytest.mark.parametrize("sharding, shard_size, scalings", [
    ("HYBRID_SHARD", None, 0),
    ("HYBRID_SHARD", 8, 1),
    ("FULL_SHARD", None, 1),
])  # fmt: skip
def test_shards_of_another_size_are_another_setting_only_where_they_are_chosen(
    sharding, shard_size, scalings, tmp_path
):
    rows = [at(n, 64, 10, sharding=sharding, shard_size=shard_size or n) for n in (8, 16)]
    assert len(compare.scalings(rows_of(tmp_path / "r.csv", *rows))) == scalings


def test_one_file_is_shown_with_its_scaling_and_the_published_run(tmp_path, capsys):
    path = write(tmp_path / "r.csv", at(8, 64, 10), at(16, 64, 9), FAILED)
    compare.main([path])
    text = capsys.readouterr().out
    assert "90.0%" in text and "95.8%" in text and "out of memory" in text
    compare.main([write(tmp_path / "one.csv", at(8, 64, 10))])
    assert f"--out={tmp_path}/one.csv" in capsys.readouterr().out


# --- Errors


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write("a.csv", H100)
    write("failed.csv", FAILED)
    write("broken.csv", H100, H100 | {"tokens_per_second_device": "fast"})
    (tmp_path / "other.csv").write_text("model,speed\nmpt,3\n")
    return tmp_path


ERRORS = {
    "": "usage: ",
    "nowhere.csv": "no file 'nowhere.csv'",
    "other.csv": "no column activation_checkpointing",
    "failed.csv": "failed.csv has no row with status ok",
    "broken.csv": "broken.csv, line 3: tokens_per_second_device",
    "a.csv a.csv": "usage: ",
}


@pytest.mark.parametrize("command", ERRORS)
def test_an_error_is_one_line(command, folder):
    assert ERRORS[command] in refusal(compare.main, command.split())
