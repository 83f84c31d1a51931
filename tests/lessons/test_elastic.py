"""lessons/elastic.py: the same curve on 1 rank, and on clusters of 1 -> 2 -> 4 -> 1 ranks.

On 4 ranks it goes by --tp=2 --pp=2, and they are killed. The lesson is interrupted too.
"""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import PATIENCE, flags_for, refusal, rooms_on_path
from test_checkpoint import made_up

from lessons import elastic
from lifecycle import runlog
from program import UserError

SMALL = """
    --d_model=16 --n_heads=2 --n_layers=4 --vocab_size=257 --max_seq_len=16 --eval_tokens=2000
    --global_batch_size=4 --warmup_steps=2 --max_steps=60 --eval_interval=20 --save_interval=5
""".split()


@pytest.fixture(autouse=True)
def same_handler():
    """The lesson sets that of SIGTERM."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def pids(folder) -> list[str]:
    """The processes that have a folder in their command line."""
    command = ["pgrep", "-f", f"={folder}/"]
    return subprocess.run(command, capture_output=True, text=True).stdout.split()


def interrupt_second_cluster(folder, flags, cwd) -> None:
    """Start the lesson, and press Ctrl-C when the second cluster has gone on."""
    command = [sys.executable, "-m", "lessons.elastic", *flags]
    process = subprocess.Popen(
        command, cwd=cwd, env=rooms_on_path(), stdout=subprocess.PIPE, text=True
    )
    try:
        deadline = time.monotonic() + PATIENCE
        first, second = folder / "moved-1", folder / "moved-2"
        while elastic.steps_done(second) <= elastic.steps_done(first):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        assert len(pids(folder)) == 2
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 130 and not pids(folder)
    finally:
        process.kill()


@pytest.mark.slow
def test_the_same_curve_through_other_sizes_a_crash_and_an_interruption(
    tmp_path, tiny_data, capsys
):
    """After Ctrl-C on the second cluster its ranks have ended; the same command continues."""
    folder = tmp_path / "all"
    flags = [*SMALL, *flags_for(tiny_data), f"--run_dir={folder}"]
    interrupt_second_cluster(folder, flags, tmp_path)
    assert steps(folder / "one") == [*range(1, 61)]

    elastic.main(flags)
    printed = capsys.readouterr().out
    assert all(steps(folder / name) == [*range(1, 61)] for name in ("one", "moved-4"))
    assert layouts(folder / "one") == [(1, 1, 1)]
    assert layouts(folder / "moved-4") == [(1, 1, 1), *2 * [(2, 1, 1)], (4, 2, 2), (1, 1, 1)]

    # Ranks that are asked to move save first. The lost cluster's are all killed.
    assert "exit [75, 75]," in printed
    title = "moved-3 4 ranks, tp 2, pp 2 +"
    killed_at = int(re.search(rf"{title} step (\d+)/60: SIGKILL to all", printed)[1])
    assert re.search(rf"{title} exit \[-9, -9, -9, -9\]", printed)
    log = (folder / "moved-4.log").read_text()
    newest = int(re.search(r"downloading step-(\d+) ", log)[1])
    assert 30 <= newest <= killed_at

    assert "each of the 60 steps saw the same tokens in all runs" in printed
    assert (folder / "elastic.png").stat().st_size > 10_000


def steps(run) -> list[int]:
    """The steps in a run's metrics."""
    return [row["step"] for row in runlog.read(run) if "loss" in row]


def layouts(run) -> list[tuple]:
    """(ranks, tp, pp) of each launch of a run."""
    names = ("ranks", "tp", "pp")
    return [tuple(launch[name] for name in names) for launch in runlog.read_launches(run)]


@pytest.mark.slow
def test_a_mistake_that_the_ranks_find_is_one_line(tmp_path, monkeypatch, tiny_data):
    monkeypatch.chdir(tmp_path)
    line = refusal(elastic.main, [*SMALL, *flags_for(tiny_data), "--vocab_size=100"])
    assert "runs/elastic/one makes no progress, see runs/elastic/one.log: " in line
    assert "vocab_size 100 is less than the 257 ids" in line


def write_run(folder: Path, losses, final_val_loss, hashes) -> Path:
    """A run folder with these losses and batch hashes."""
    folder.mkdir()
    rows = []
    for step, (loss, batch_hash) in enumerate(zip(losses, hashes, strict=True), 1):
        rows.append({"step": step, "tokens": step, "loss": loss, "batch_hash": batch_hash})
    rows.append({"step": len(rows), "val_loss": final_val_loss})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_what_it_checks(tmp_path, capsys):
    a = write_run(tmp_path / "a", [5, 4, 3], 3.10, ["x", "y", "z"])
    b = write_run(tmp_path / "b", [5, 4, 2], 3.12, ["x", "y", "z"])
    elastic.check([a, b], 3)
    assert "final validation losses 3.1000, 3.1200: 0.02 apart" in capsys.readouterr().out

    far = write_run(tmp_path / "far", [5, 4, 3], 3.14, ["x", "y", "z"])
    with pytest.raises(UserError, match="0.04 apart"):
        elastic.check([a, b, far], 3)

    other = write_run(tmp_path / "other", [5, 4, 3], 3.10, ["x", "w", "z"])
    with pytest.raises(UserError, match="different tokens at 1 steps, the first is step 2"):
        elastic.check([a, other], 3)
    longer = write_run(tmp_path / "long", [5, 4, 3, 3], 3.1, "xyzz")
    with pytest.raises(UserError, match="different tokens at 1 steps, the first is step 4"):
        elastic.check([a, longer], 4)


def test_finished_runs_are_drawn_again_and_stay_where_they_are(tmp_path, capsys):
    for name in ("one", "moved-4"):
        (tmp_path / "all").mkdir(exist_ok=True)
        run = write_run(tmp_path / "all" / name, [5, 4, 3], 3.1, "xyz")
        (run / "config.json").write_text('{"max_steps": 3}')
        made_up(run, 3)
    for _ in range(2):
        elastic.main([f"--run_dir={tmp_path / 'all'}", "--max_steps=3", "--warmup_steps=1"])
        assert "all runs are finished. To train them anew set" in capsys.readouterr().out
        assert (tmp_path / "all" / "elastic.png").exists()
        assert {path.name for path in tmp_path.iterdir()} == {"all"}
