"""The run folder: rows, resuming without doubles, and the numbers that people read."""

import json
import math

import pytest
import torch

import runlog
from config import MPTConfig, TrainConfig


def row(step, **more):
    numbers = dict(tokens=step * 8, loss=5.0, lr=1e-3, grad_norm=1.0, tokens_per_second=1000.0, mfu=0.5)
    return {"step": step, **numbers, "memory_gb": 0.1, "seconds": 2.0, **more}


def opened(tmp_path, first_step=0, rank=0):
    cfg = TrainConfig(run_dir=str(tmp_path / "run"), max_steps=100)
    log = runlog.RunLog(cfg, rank)
    log.start(MPTConfig(), cfg, {"ranks": 1}, tmp_path / "tokenizer.json", first_step)
    return log


def test_going_on_forgets_rows_that_will_come_again(tmp_path):
    log = opened(tmp_path)
    for step in range(1, 8):
        log.row(row(step))
    with open(log.path, "a") as file:
        file.write('{"step": 8, "lo')  # cut off by a crash
    log = opened(tmp_path, first_step=5)
    log.row(row(6))
    assert [r["step"] for r in runlog.read(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]
    launches = [json.loads(text) for text in (tmp_path / "run" / "launches.jsonl").read_text().splitlines()]
    assert [launch["first_step"] for launch in launches] == [0, 5]
    assert launches[0]["torch"] == torch.__version__ and "pytest" in launches[0]["command"]


def test_only_rank_zero_writes(tmp_path, capsys):
    log = opened(tmp_path, rank=1)
    log.row(row(1))
    log.say("hello")
    assert not (tmp_path / "run").exists() and capsys.readouterr().out == ""


def test_console_line_says_the_same_as_the_row():
    line = runlog.line(row(40, mfu=0.4321, tokens_per_second=12345.6), max_steps=100)
    assert line == (
        "step  40/100  loss 5.0000  lr 1.00e-03  grad norm 1.00  12,346 tokens/s  MFU 43.2%  0.1 GB  0:02:00 left"
    )
    assert "MFU n/a" in runlog.line(row(1, mfu=None), 100)
    assert runlog.line({"step": 0, "val_loss": 9.0, "val_bits_per_byte": 3.5}, 100) == (
        "step   0/100  validation loss 9.0000  3.500 bits per byte"
    )


def test_bits_per_byte_of_uniform_bytes_is_eight():
    assert runlog.bits_per_byte(math.log(256), tokens=1000, text_bytes=1000) == pytest.approx(8)
    assert runlog.bits_per_byte(math.log(2**16), tokens=500, text_bytes=1000) == pytest.approx(8)


def test_a_finished_run_is_put_aside_under_a_free_name(tmp_path):
    """All but the lease, which is of whoever writes there now."""
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "lease.json").touch()
    for number in (1, 2):
        (run / "metrics.jsonl").write_text(str(number))
        assert runlog.put_aside(str(run)) == tmp_path / f"run-{number}"
        assert [path.name for path in run.iterdir()] == ["lease.json"]
        assert (tmp_path / f"run-{number}/metrics.jsonl").read_text() == str(number)
    assert (tmp_path / "run-1/checkpoints").is_dir()


def test_memory_is_that_of_this_process():
    before = runlog.memory_gb(torch.device("cpu"))
    block = torch.ones(75_000_000)  # 0.3 GB
    assert runlog.memory_gb(torch.device("cpu")) >= max(before, block.nbytes / 1e9)
