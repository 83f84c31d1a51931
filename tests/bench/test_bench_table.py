"""bench/table.py: rows as tables, in LLM Foundry's columns."""

import pytest

from bench import table as bench_table
from config import UserError

# MPT-1B on 8 H100: 45,455 tokens/s a device, 41.82 % (LLM Foundry, scripts/train/benchmarking)
H100 = {
    "status": "ok",
    "model": "1b",
    "n_params": "1315950592",
    "max_seq_len": "2048",
    "device": "h100_80gb",
    "ranks": "8",
    "mfu": "0.41817",
    "hfu": "0.41817",
    "tflops_device": "413.76",
    "microbatch_size": "14",
    "grad_accum": "1",
    "global_batch_size": "112",
    "tokens_per_second": "363640",
    "tokens_per_second_device": "45455",
    "precision": "bf16",
    "sharding": "FULL_SHARD",
    "activation_checkpointing": "none",
    "recompute_every": "1",
    "compile": "False",
    "attn_impl": "auto (triton)",
    "threads": "1",
    "fastest": "364000",
    "slowest": "363000",
    "memory_gb": "71.25",
    "data": "0.001",
    "forward": "0.3",
    "backward": "0.6",
    "optimizer": "0.05",
    "communication": "0.2",
    "idle": "0.05",
    "others": "",
}
PUBLISHED = (
    "| 1b | 2048 | 8 | h100_80gb | 41.82 | 41.82 | 413.8 | 14 | 1 | 112 | 177.6 | 363640 | 45455 "
    "| 229376 | amp_bf16 | DEFAULT | FULL_SHARD | False | False | 1315950592 |"
)
OURS = "| 1b | 363,640 | 364,000 / 363,000 | 1.00 | 71.25 | 0% | 30% | 60% | 5% | 20% | 5% |"


def test_the_published_row():
    """A published row of LLM Foundry comes out as it was published."""
    lines = bench_table.tables([H100]).splitlines()
    assert PUBLISHED in lines
    assert OURS in lines
    first_titles = "| Model | SeqLen (T) | # GPUs | GPU | MFU | HFU |"
    (head,) = [line for line in lines if line.startswith(first_titles)]
    assert head.count("|") == 21


def test_rows_are_named_by_what_differs_and_compared_with_the_first():
    slower = H100 | {"microbatch_size": "7", "tokens_per_second": "181820"}
    failed = H100 | {"microbatch_size": "99", "status": "out of memory"}
    text = bench_table.tables([H100, slower, failed])
    assert "| microbatch_size 14 | 363,640 |" in text
    assert "/ 363,000 | 0.50 |" in text
    assert "- not measured: microbatch_size 99: out of memory" in text
    assert bench_table.names_of([H100, H100]) == ["1b", "1b"]
    cut = H100 | {"others": "alibi=True tp=2"}
    assert bench_table.names_of([H100, cut]) == ["1b", "tp=2"]


def test_a_missing_file_is_one_line():
    with pytest.raises(UserError, match="nothing.csv has no rows"):
        bench_table.main(["nothing.csv"])
