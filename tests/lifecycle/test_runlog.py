"""The run folder: rows, resuming without duplicates, and the numbers that people read."""

import json
import math
import os
import random
import re
import shutil
import signal
import sys
import time
from array import array
from types import SimpleNamespace

import pytest
import torch
from conftest import refusal

from config import MPTConfig, TrainConfig
from lifecycle import plot, runlog
from lifecycle.lease import Lease
from program import UserError


def row(step, **more):
    numbers = {"tokens": step * 8, "loss": 5.0, "lr": 1e-3, "grad_norm": 1.0, "mfu": 0.5}
    numbers |= {"tokens_per_second": 1000.0, "memory_gb": 0.1, "seconds": 2.0}
    return {"step": step, **numbers, **more}


def opened(tmp_path, first_step=0):
    cfg = TrainConfig(run_dir=str(tmp_path / "run"), max_steps=100)
    log = runlog.RunLog(cfg, 0)
    log.start(MPTConfig(), cfg, {"ranks": 1}, tmp_path / "tokenizer.json", first_step)
    return log


def test_going_on_forgets_rows_that_will_come_again(tmp_path, monkeypatch, capsys):
    """Among them one that a crash has cut off, which is nothing unusual."""
    monkeypatch.setattr(sys, "argv", ["fsdp_train.py", "--lr=1e-3"])
    log = opened(tmp_path)
    for step in range(1, 8):
        log.row(row(step))
    with open(log.path, "a") as file:
        file.write('{"step": 8, "lo')
    capsys.readouterr()
    log = opened(tmp_path, first_step=5)
    assert capsys.readouterr().out == "" and not list((tmp_path / "run").glob("*.damaged*"))
    log.row(row(6))
    assert steps_in(log.path) == [1, 2, 3, 4, 5, 6]
    launches = runlog.read_launches(tmp_path / "run")
    assert [launch["first_step"] for launch in launches] == [0, 5]
    assert launches[0]["torch"] == torch.__version__
    assert launches[0]["command"] == "fsdp_train.py --lr=1e-3"


def test_metrics_deleted_or_cut_during_the_run_go_on(tmp_path, capsys):
    log = opened(tmp_path)
    log.row(row(1))
    log.path.unlink()
    for step in (2, 3):
        log.row(row(step))
    log.path.write_text("")
    for step in (4, 5):
        log.row(row(step))
    assert runlog.read(tmp_path / "run") == [row(4), row(5)]
    log.path.unlink()
    log.row(row(6))
    assert log.path.read_text() == json.dumps(row(6)) + "\n"
    assert "cannot write" not in capsys.readouterr().out


def test_the_screen_shows_a_step_every_two_seconds_and_how_long_the_rest_takes(
    tmp_path, monkeypatch, capsys
):
    """100 steps of 0.2 or 0.4 s, in turns; the first one and the evaluation take 30 s and 4 s."""
    log = opened(tmp_path)
    capsys.readouterr()
    now = 1000.0
    monkeypatch.setattr(runlog, "time", SimpleNamespace(monotonic=lambda: now))
    ends = {}
    for step in range(1, 101):
        now += 30 if step == 1 else 0.2 if step % 2 else 0.4
        ends[step] = now
        log.row(row(step), always_shown=step in (50, 100))
        if step == 50:
            now += 4
            log.row({"step": step, "val_loss": 9.0, "val_bits_per_byte": 3.5})
    assert steps_in(log.path) == [*range(1, 51), *range(50, 101)]

    lines = capsys.readouterr().out.splitlines()
    pattern = r"step +(\d+)/100  loss .* GB(?:  0:(\d\d):(\d\d) left)?"
    shown = [match.groups() for line in lines if (match := re.fullmatch(pattern, line))]
    assert [int(step) for step, *_ in shown][:2] == [1, 8] and shown[0][1] is None
    assert {50, 100} <= {int(step) for step, *_ in shown} and 14 <= len(shown) <= 18
    for step, minutes, seconds in shown[1:]:
        to_come = ends[100] - ends[int(step)]
        assert int(minutes) * 60 + int(seconds) == pytest.approx(to_come, abs=4.5), step


@pytest.mark.parametrize(
    "val, losses, epoch_tokens, words",
    [
        ([9.3, 4.72, 4.75], [9.0, 4.7, 4.6], 100, []),  # noise
        ([9.0, 8.0, 9.5], [9.0, 8.0, 9.5], 100, []),  # it diverges
        ([9.0, 4.0, math.nan], [9.0, 4.0, 1.0], 100, []),
        ([9.06, 9.5, 10.41], [9.0, 3.0, 0.5], 323, ["since step 0 ", "from 9.060 to 10.410"]),
        ([9.0, 4.0, 4.5], [9.0, 4.0, 1.0], 10, ["step 20 ", "10 tokens, each read 40 times"]),
        ([9.0, 4.0, 4.5], [9.0, 4.0, 1.0], 10**6, ["step 20 ", "1.000; more text"]),
        ([9.0, 4.0, 4.5], [9.0, 4.0, 1.0], None, ["step 20 ", "1.000; more text"]),
    ],
)
def test_a_run_that_overfits_says_so_and_why(tmp_path, val, losses, epoch_tokens, words):
    """Evaluated before, in the middle and at the end of 40 steps of ten tokens."""
    log = opened(tmp_path)
    for step in range(41):
        if step:
            loss = losses[min(step // 20, 1)] if step < 21 else losses[2]
            log.row(row(step, loss=loss, tokens=10 * step))
        if step % 20 == 0:
            log.row({"step": step, "val_loss": val[step // 20], "val_bits_per_byte": 1.0})
    launch = {"first_step": 0} | ({"epoch_tokens": epoch_tokens} if epoch_tokens else {})
    (tmp_path / "run/launches.jsonl").write_text(json.dumps(launch))
    lines = runlog.summary(str(tmp_path / "run")).splitlines()
    found = [line for line in lines if line.startswith("overfitting: ")]
    assert len(found) == bool(words)
    assert all(word in found[0] for word in words)


def finished_run(folder):
    """A run folder, in which are also a user's notes and another run."""
    for name in ("checkpoints/step-4", "other/checkpoints", ".git"):
        (folder / name).mkdir(parents=True)
    for name in (*OURS, "metrics.jsonl.damaged", "notes.md"):
        (folder / name).write_text(name)
    return folder


def contents(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


OWN = {"checkpoints", "checkpoints/step-4", "metrics.jsonl.damaged"}
NOT_OWN = {"lease.json", "notes.md", ".git", "other", "other/checkpoints"}


@pytest.mark.parametrize("how", ["folder", "here", "link"])
def test_of_a_finished_run_its_own_files_are_put_aside(tmp_path, monkeypatch, how):
    """Under a free name beside it. The lease is of whoever writes there now."""
    place = tmp_path / "disk"
    finished_run(place / "run")
    run_dir = str(place / "run")
    if how == "here":
        monkeypatch.chdir(run_dir)
        run_dir = "."
    if how == "link":
        (tmp_path / "run").symlink_to(run_dir)
        run_dir = str(tmp_path / "run")
    assert runlog.put_aside(run_dir) == place / "run-1"
    assert contents(place / "run-1") == OWN | set(OURS) - {"lease.json"}
    assert contents(place / "run") == NOT_OWN
    (place / "run/metrics.jsonl").write_text("2")
    assert runlog.put_aside(run_dir) == place / "run-2"
    assert contents(place / "run-2") == {"metrics.jsonl"}
    assert {path.name for path in tmp_path.iterdir()} <= {"disk", "run"}


def test_a_finished_run_that_cannot_be_moved_stays_as_it_is(tmp_path, disk):
    """Its folder is a disk of its own; its checkpoints are linked to another place."""
    linked = finished_run(tmp_path / "linked")
    shutil.move(linked / "checkpoints", disk / "larger")
    (linked / "checkpoints").symlink_to(disk / "larger")
    finished_run(disk)
    before = contents(tmp_path)
    for run_dir, reason in ((disk, r"\(Invalid cross-device link\)"), (linked, "are linked")):
        with pytest.raises(UserError, match=rf"{reason}.*: set another --run_dir$"):
            runlog.put_aside(str(run_dir))
        assert contents(tmp_path) == before


@pytest.mark.parametrize("name", ["config.json", ".git/HEAD", "my/text"])
def test_a_folder_that_is_used_for_something_else_is_refused(tmp_path, name):
    folder = tmp_path / "folder"
    (folder / name).parent.mkdir(parents=True)
    (folder / name).write_text("mine")
    before = contents(tmp_path)
    with pytest.raises(
        UserError, match=f"it holds {name.partition('/')[0]}: set another --run_dir"
    ):
        Lease(str(folder)).take()
    assert contents(tmp_path) == before


def test_a_folder_of_logs_becomes_a_runs(tmp_path):
    """A log may be there, and a place for checkpoints on a larger disk. Then it is a run's."""
    folder, larger = tmp_path / "folder", tmp_path / "larger"
    folder.mkdir()
    larger.mkdir()
    (folder / "checkpoints").symlink_to(larger)
    (folder / "notes.md").write_text("mine")
    with Lease(str(folder)) as lease:
        lease.take()
    (folder / "config.json").touch()
    runlog.require_own_folder(folder)


def test_memory_is_that_of_this_process():
    before = runlog.memory_gb(torch.device("cpu"))
    block = torch.ones(75_000_000)  # 0.3 GB
    assert runlog.memory_gb(torch.device("cpu")) >= max(before, block.nbytes / 1e9)


# --- damaged metrics


def good(steps):
    return [json.dumps(row(step)).encode() for step in steps]


def steps_in(path):
    return [json.loads(text)["step"] for text in path.read_bytes().splitlines()]


DAMAGE = {  # test_fuzz.py has more
    "half a line": b'{"step": 3, "lo',
    "zeros": b"\0" * 300,
    "a negative step": b'{"step": -1}',
    "a loss in quotes": b'{"step": 3, "loss": "5.0"}',
    "figures in quotes": b'{"step": 3, "icl": {"piqa": {"acc": "0.5"}}}',
    "a source's loss in quotes": b'{"step": 3, "val_loss_by_source": {"a": "low"}}',
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_line_costs_no_other_row(tmp_path, capsys, damage):
    """The third of six is bad. The file as it was is kept, once; then all is in order again."""
    log = opened(tmp_path)
    before = b"\n".join([*good([1, 2]), DAMAGE[damage], *good([4, 5, 6])]) + b"\n"
    log.path.write_bytes(before)
    assert [r["step"] for r in runlog.read(tmp_path / "run")] == [1, 2, 4, 5, 6]
    words = "metrics.jsonl: 1 damaged line is left out, the first: line 3 is damaged ("
    assert words in runlog.summary(str(tmp_path / "run"))
    capsys.readouterr()
    opened(tmp_path, first_step=5)
    (said,) = capsys.readouterr().out.splitlines()
    assert words in said and said.endswith("kept as metrics.jsonl.damaged") and len(said) < 600
    assert steps_in(log.path) == [1, 2, 4, 5]
    assert (tmp_path / "run/metrics.jsonl.damaged").read_bytes() == before
    opened(tmp_path, first_step=5)
    assert capsys.readouterr().out == "" and steps_in(log.path) == [1, 2, 4, 5]
    assert len(list((tmp_path / "run").glob("metrics.jsonl.*"))) == 1


def test_columns_are_those_of_the_rows(tmp_path):
    """Whatever is in the file, and wherever it is cut: rows of any columns in any order, values
    that are odd or damaged, bytes of any kind."""
    chance = random.Random(0)
    odd = [math.nan, math.inf, None, True, 7, -1, 2**62, 10**30, 1e-30, 1e300, "1.5", "a\n", {}, []]
    whole = row(1, mfu=0.5, batch_hash="00ff", skipped=False, lr=1e-5, seconds=0.25)
    for _ in range(10):
        lines = []
        for number in range(1, 200):
            made = whole | {"step": number, "loss": chance.random()}
            if chance.random() < 0.3:
                made[chance.choice([*made, "val_loss", "of_tomorrow"])] = chance.choice(odd)
            if chance.random() < 0.1:
                made = dict(chance.sample(list(made.items()), chance.randrange(len(made))))
            line = json.dumps(made).encode()
            if chance.random() < 0.1:
                at = chance.randrange(len(line))
                line = line[:at] + chance.randbytes(chance.randrange(2)) + line[at + 1 :]
            lines.append(line + chance.choice([b"\n"] * 20 + [b"\r\n", b"\n\n", b" \n", b""]))
        (tmp_path / "metrics.jsonl").write_bytes(b"".join(lines))
        rows, bad = runlog.read_metrics(tmp_path)
        steps = [row for row in rows if "loss" in row]
        with open(tmp_path / "metrics.jsonl", "rb") as file:
            metrics = runlog.Metrics(whole)
            while lines := file.readlines(chance.choice([1, 1000, 10**6])):
                metrics.add(b"".join(lines))
        assert (metrics.n_bad, metrics.first_bad) == (len(bad), bad[0] if bad else "")
        assert metrics.evaluations == [row for row in rows if "val_loss" in row]
        for name, values in metrics.steps.items():
            missing = runlog.kind_of(name).missing
            expected = [row[name] if row.get(name) is not None else missing for row in steps]
            if isinstance(missing, float):
                typecode = "d" if name == "loss" else "f"
                assert array(typecode, expected).tobytes() == values.tobytes()
            else:
                assert list(values) == expected


def test_each_damaged_file_is_kept(tmp_path):
    """From step 0, too, where no row is kept."""
    log = opened(tmp_path)
    for number, name in enumerate(["damaged", "damaged-2", "damaged-3"]):
        log.path.write_bytes(b"%d\nx\n" % number + b"\n".join(good([1, 2])) + b"\n")
        opened(tmp_path, first_step=0 if number == 2 else 1)
        assert (tmp_path / f"run/metrics.jsonl.{name}").read_bytes().startswith(b"%d\n" % number)


def test_odd_rows_are_kept_with_all_that_is_in_them(tmp_path, capsys):
    """Not finite; and a task may say more than figures, in words or lists."""
    log = opened(tmp_path)
    log.row(row(1, loss=math.nan, grad_norm=math.inf, skipped=True, mfu=None, batch_hash="00ff"))
    log.row({"step": 2, "icl": {"piqa": {"kind": "choice", "foundry": 1, "n": [3]}}})
    before = log.path.read_bytes()
    capsys.readouterr()
    opened(tmp_path, first_step=2)
    assert log.path.read_bytes() == before and capsys.readouterr().out == ""
    assert math.isnan(runlog.read(tmp_path / "run")[0]["loss"])


def test_metrics_that_cannot_be_read_are_an_error_and_nothing_changes(tmp_path):
    """A link to itself, which even root, who runs these tests in containers, cannot read."""
    log = opened(tmp_path)
    before = {path: path.read_bytes() for path in (tmp_path / "run").iterdir() if path != log.path}
    log.path.unlink()
    log.path.symlink_to(log.path)
    for read in (lambda: opened(tmp_path, first_step=5), lambda: runlog.read(tmp_path / "run")):
        with pytest.raises(OSError, match=r"metrics\.jsonl"):
            read()
    assert before == {path: path.read_bytes() for path in before} and os.path.islink(log.path)


def test_a_kill_while_the_file_is_rewritten_loses_no_row(tmp_path):
    """Rows, settings and launches are complete whenever a process that starts is killed."""
    log = opened(tmp_path)
    log.path.write_bytes(b"\n".join([*good(range(1, 2000)), b"7", *good([2000])]) + b"\n")
    chance = random.Random(0)
    for _ in range(12):
        child = os.fork()
        while child == 0:
            opened(tmp_path, first_step=2000)
        time.sleep(chance.uniform(0, 0.06))
        os.kill(child, signal.SIGKILL)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        assert [r["step"] for r in runlog.read(tmp_path / "run")] == list(range(1, 2001))
        assert runlog.read_settings(tmp_path / "run")["max_steps"] == 100
        launches = (tmp_path / "run/launches.jsonl").read_bytes()
        assert launches.endswith(b"\n") and all(map(json.loads, launches.splitlines()))


def test_a_launch_after_a_cut_off_one_has_a_line_of_its_own(tmp_path):
    opened(tmp_path)
    path = tmp_path / "run/launches.jsonl"
    path.write_bytes(b'[1]\n{"first_step": "0"}\n' + path.read_bytes() + b'{"command": "fsdp')
    opened(tmp_path, first_step=5)
    assert [launch["first_step"] for launch in runlog.read_launches(tmp_path / "run")] == [0, 5]


# --- the programs


@pytest.mark.parametrize("program", [runlog, plot])
@pytest.mark.parametrize("config", [None, b"[" * 100_000], ids=["no config", "odd config"])
def test_an_odd_run_folder_is_one_line(tmp_path, program, config):
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row(1)) + "\n")
    if config:
        (tmp_path / "config.json").write_bytes(config)
    with pytest.raises((UserError, OSError), match=str(tmp_path)) as error:
        program.main([str(tmp_path)])
    assert "\n" not in str(error.value)


def test_a_row_that_lacks_figures_is_shown(tmp_path, capsys):
    """As from somebody's changed trainer."""
    log, step = opened(tmp_path), {"step": 3, "loss": 5.0}
    for row in (
        step,
        step | {"seconds": 1e300},
        {"step": 3},
        {"step": 3, "val_loss": 5.0},
        {"step": 3, "icl": {"a": {}, "b": {"foundry": 1}}},
    ):
        log.path.write_text(json.dumps(step) + "\n" + json.dumps(row) + "\n")
        runlog.main([str(tmp_path / "run")])
        assert "step   3/100  " in capsys.readouterr().out


# --- links in a stranger's folder


OURS = "config.json launches.jsonl tokenizer.json metrics.jsonl microbatch.json lease.json".split()


def test_a_run_refuses_links_to_other_places(tmp_path):
    """It would replace or copy what they point to. `checkpoints` may be on a larger disk."""
    (tmp_path / "checkpoints").symlink_to(tmp_path / "larger")
    runlog.require_own_folder(tmp_path)
    for name in OURS:
        (tmp_path / name).symlink_to(tmp_path / "elsewhere")
        message = refusal(runlog.require_own_folder, tmp_path)
        assert f"{name} is a link, and a run changes nothing outside" in message
        (tmp_path / name).unlink()


def test_a_launch_on_record_has_no_rows_of_the_launch_before(tmp_path, monkeypatch):
    """A reader who waits for the launch must not see rows of steps that will be repeated."""
    log = opened(tmp_path)
    for step in (1, 2, 3):
        log.row(row(step))
    seen = []
    monkeypatch.setattr(runlog, "add_line", lambda *_: seen.append(runlog.read(tmp_path / "run")))
    opened(tmp_path, first_step=2)
    assert [[r["step"] for r in rows] for rows in seen] == [[1, 2]]
