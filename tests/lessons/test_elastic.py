"""elastic.py: the same curve on one rank, on two, and on 1 -> 2 -> 4 -> 1 with a kill -9, interrupted as well."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import PATIENCE, flags_for, launch, rooms_on_path

from config import UserError
from lessons import elastic
from lifecycle import runlog

SMALL = [
    "--d_model=16",
    "--n_heads=2",
    "--n_layers=1",
    "--vocab_size=257",
    "--max_seq_len=16",
    "--eval_tokens=2000",
]
SMALL += [
    "--global_batch_size=4",
    "--warmup_steps=2",
    "--max_steps=60",
    "--eval_interval=20",
    "--save_interval=5",
]


def pids(folder) -> list[str]:
    """The processes that have a folder in their command line."""
    return subprocess.run(
        ["pgrep", "-f", f"={folder}/"], capture_output=True, text=True
    ).stdout.split()


@pytest.mark.slow
def test_the_same_curve_through_other_sizes_a_crash_and_an_interruption(tmp_path, tiny_data):
    """Ctrl-C, when the second run is on its way: the ranks are gone, and the same command goes on with that run."""
    folder = tmp_path / "all"
    flags = [*SMALL, *flags_for(tiny_data), f"--run_dir={folder}"]
    command = [sys.executable, "-m", "lessons.elastic", *flags]
    process = subprocess.Popen(
        command, cwd=tmp_path, env=rooms_on_path(), stdout=subprocess.PIPE, text=True
    )
    try:
        deadline = time.monotonic() + PATIENCE
        while elastic.steps_done(folder / "two") < 10:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        assert len(pids(folder)) == 2
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130 and not pids(folder)
    finally:
        process.kill()
    assert steps(folder / "one") == [*range(1, 61)]
    done = launch([], tmp_path, flags, program="lessons/elastic.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(steps(folder / name) == [*range(1, 61)] for name in elastic.RUNS)
    assert (
        ranks(folder / "one") == [1]
        and ranks(folder / "two") == [2, 2]
        and ranks(folder / "moved") == [1, 2, 4, 1]
    )
    assert (
        "exit [75]," in done.stdout and "exit [75, 75]," in done.stdout
    )  # asked to move, they save first
    victim = re.search(r"moved  4 ranks  step (\d+)/60: SIGKILL to rank (\d)", done.stdout)
    statuses = re.search(
        r"moved  4 ranks  exit \[(.*)\], newest checkpoint step-(\d+)", done.stdout
    )
    assert statuses[1].split(", ")[int(victim[2])] == "-9" and 45 - 10 <= int(statuses[2]) <= int(
        victim[1]
    )
    assert "each of the 60 steps saw the same tokens in all runs" in done.stdout
    assert (folder / "elastic.png").stat().st_size > 10_000
    done = launch([], tmp_path, [*flags, "--max_steps=70"], program="lessons/elastic.py")
    assert done.returncode == 2 and "was begun with other flags" in done.stderr


def steps(run) -> list[int]:
    return [row["step"] for row in runlog.read(run) if "loss" in row]


def ranks(run) -> list[int]:
    return [json.loads(line)["ranks"] for line in (run / "launches.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_mistake_is_one_line(tmp_path, tiny_data):
    """The first is found here, the second by the ranks."""
    done = launch([], tmp_path, ["--learning_rate=1"], program="lessons/elastic.py")
    assert done.returncode == 2 and done.stderr.splitlines() == [
        "error: unknown key 'learning_rate' in the command line, did you mean 'lr'?"
    ]
    done = launch(
        [],
        tmp_path,
        [*SMALL, *flags_for(tiny_data), "--vocab_size=100"],
        program="lessons/elastic.py",
    )
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "error: runs/elastic/one does not get on, see runs/elastic/one.log: " in done.stderr
    assert "vocab_size 100 is less than the 257 ids" in done.stderr


def written(folder: Path, losses, last_val, hashes) -> Path:
    """A run folder with such rows."""
    folder.mkdir()
    pairs = zip(losses, hashes, strict=True)
    rows = [
        {"step": n, "loss": loss, "batch_hash": seen} for n, (loss, seen) in enumerate(pairs, 1)
    ]
    rows += [{"step": len(rows), "val_loss": last_val}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_what_it_checks(tmp_path, capsys):
    a = written(tmp_path / "a", [5, 4, 3], 3.10, ["x", "y", "z"])
    b = written(tmp_path / "b", [5, 4, 2], 3.12, ["x", "y", "z"])
    elastic.check([a, b], 3)
    assert "final validation losses 3.1000, 3.1200: 0.02 apart" in capsys.readouterr().out
    far = written(tmp_path / "far", [5, 4, 3], 3.14, ["x", "y", "z"])
    with pytest.raises(UserError, match="0.04 apart"):
        elastic.check([a, b, far], 3)
    other = written(tmp_path / "other", [5, 4, 3], 3.10, ["x", "w", "z"])
    with pytest.raises(UserError, match="other tokens at 1 steps, the first is step 2"):
        elastic.check([a, other], 3)
    with pytest.raises(UserError, match="other tokens at 1 steps, the first is step 4"):
        elastic.check([a, written(tmp_path / "long", [5, 4, 3, 3], 3.1, "xyzz")], 4)


@pytest.mark.parametrize(
    "launched, step, stage",
    [
        ([], 0, 0),
        ([1], 10, 0),
        ([1, 1], 20, 0),
        ([1], 25, 1),
        ([1, 2, 2], 30, 1),
        ([1, 2], 51, 2),
        ([1, 2, 4], 76, 3),
    ]
    + [([1, 2, 4, 1], 70, 3), ([1, 2, 4, 1, 1], 100, 3)],
)
def test_which_stage_is_next(tmp_path, launched, step, stage):
    (tmp_path / "launches.jsonl").write_text(
        "".join(json.dumps({"ranks": n}) + "\n" for n in launched)
    )
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": step}) + "\n")
    assert elastic.stage_now(tmp_path, elastic.RUNS["moved"], 100) == stage
