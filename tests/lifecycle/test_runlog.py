"""The run folder: rows, resuming without duplicates, and the numbers that people read."""

import contextlib
import json
import math
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch

import config
from config import MPTConfig, TrainConfig, UserError
from lifecycle import microbatch, plot, runlog


def row(step, **more):
    numbers = dict(
        tokens=step * 8, loss=5.0, lr=1e-3, grad_norm=1.0, tokens_per_second=1000.0, mfu=0.5
    )
    return {"step": step, **numbers, "memory_gb": 0.1, "seconds": 2.0, **more}


def opened(tmp_path, first_step=0):
    cfg = TrainConfig(run_dir=str(tmp_path / "run"), max_steps=100)
    log = runlog.RunLog(cfg, 0)
    log.start(MPTConfig(), cfg, {"ranks": 1}, tmp_path / "tokenizer.json", first_step)
    return log


def test_going_on_forgets_rows_that_will_come_again(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["fsdp_train.py", "--lr=1e-3"])
    log = opened(tmp_path)
    for step in range(1, 8):
        log.row(row(step))
    with open(log.path, "a") as file:
        file.write('{"step": 8, "lo')  # cut off by a crash
    log = opened(tmp_path, first_step=5)
    log.row(row(6))
    assert [r["step"] for r in runlog.read(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]
    launches = [
        json.loads(text) for text in (tmp_path / "run" / "launches.jsonl").read_text().splitlines()
    ]
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


def test_only_rank_zero_writes(tmp_path, capsys):
    log = runlog.RunLog(TrainConfig(run_dir=str(tmp_path / "run")), 1)
    log.row(row(1))
    log.say("hello")
    assert not (tmp_path / "run").exists() and capsys.readouterr().out == ""


def test_console_line_says_the_same_as_the_row():
    line = runlog.line(row(40, mfu=0.4321, tokens_per_second=12345.6), max_steps=100)
    assert line == (
        "step  40/100  loss 5.0000  lr 1.00e-03  grad norm 1.00  12,346 tokens/s  MFU 43.2%  "
        "0.1 GB  0:02:00 left"
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


# --- damaged metrics


def good(steps):
    return [json.dumps(row(step)).encode() for step in steps]


def steps_in(path):
    return [json.loads(text)["step"] for text in path.read_bytes().splitlines()]


DAMAGE = {
    "half a line": b'{"step": 3, "lo',
    "not UTF-8": b'{"step": 3, "loss": "\xff"}',
    "zeros": b"\0" * 300,
    "a number": b"7",
    "null": b"null",
    "no step": b'{"loss": 5.0}',
    "a step in quotes": b'{"step": "7"}',
    "a step that is true": b'{"step": true}',
    "half a step": b'{"step": 2.5}',
    "a negative step": b'{"step": -1}',
    "a huge step": b'{"step": 1' + b"0" * 30 + b"}",
    "a loss in quotes": b'{"step": 3, "loss": "5.0"}',
    "a huge loss": b'{"step": 3, "loss": 1' + b"0" * 400 + b"}",
    "a list for a time": b'{"step": 3, "loss": 5.0, "seconds": []}',
    "a task without figures": b'{"step": 3, "icl": {"piqa": 7}}',
    "figures in quotes": b'{"step": 3, "icl": {"piqa": {"acc": "0.5"}}}',
    "nested deep": b'{"step": 3, "icl": ' + b"[" * 100_000,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_line_costs_no_other_row(tmp_path, capsys, damage):
    """The third of six is bad. The file as it was is kept, once; then all is in order again."""
    log = opened(tmp_path)
    before = b"\n".join([*good([1, 2]), DAMAGE[damage], *good([4, 5, 6])]) + b"\n"
    log.path.write_bytes(before)
    assert [r["step"] for r in runlog.read(tmp_path / "run")] == [1, 2, 4, 5, 6]
    summary = runlog.summary(str(tmp_path / "run"))
    assert "metrics.jsonl: 1 damaged line is left out, the first: line 3 is damaged (" in summary
    capsys.readouterr()
    opened(tmp_path, first_step=5)
    said = capsys.readouterr().out
    assert (
        said.count("\n") == 1
        and f"{log.path}: 1 damaged line is left out, the first: line 3 is" in said
    )
    assert said.endswith("kept as metrics.jsonl.damaged\n") and len(said) < 600
    assert steps_in(log.path) == [1, 2, 4, 5]
    assert (tmp_path / "run/metrics.jsonl.damaged").read_bytes() == before
    opened(tmp_path, first_step=5)
    assert capsys.readouterr().out == "" and steps_in(log.path) == [1, 2, 4, 5]
    assert len(list((tmp_path / "run").glob("metrics.jsonl.*"))) == 1


def test_each_damaged_file_is_kept(tmp_path, capsys):
    log = opened(tmp_path)
    for number, name in enumerate(["damaged", "damaged-2", "damaged-3"]):
        log.path.write_bytes(b"%d\nx\n" % number + b"\n".join(good([1, 2])) + b"\n")
        opened(
            tmp_path, first_step=0 if number == 2 else 1
        )  # from step 0 too, where no row is kept
        assert (tmp_path / f"run/metrics.jsonl.{name}").read_bytes().startswith(b"%d\n" % number)
    assert (
        capsys.readouterr().out.count(
            "2 damaged lines are left out, the first: line 1 is damaged (not a"
        )
        == 3
    )


def test_a_cut_off_last_line_is_nothing_unusual(tmp_path, capsys):
    log = opened(tmp_path)
    log.path.write_bytes(b"\n".join(good([1, 2])) + b'\n{"step": 3, "loss": 1.')
    opened(tmp_path, first_step=2)
    assert steps_in(log.path) == [1, 2] and capsys.readouterr().out == ""
    assert not list((tmp_path / "run").glob("*.damaged*"))


def test_a_row_of_tasks_is_kept_with_all_that_is_in_it(tmp_path, capsys):
    """Figures are numbers; a task may say more, in words or lists."""
    log = opened(tmp_path)
    figures = {
        "kind": "choice",
        "digest": "0a",
        "foundry": 1,
        "foundry_stderr": 0,
        "chance": 0.5,
        "n": [3],
    }
    log.row({"step": 2, "icl": {"piqa": figures}})
    before = log.path.read_bytes()
    capsys.readouterr()
    opened(tmp_path, first_step=2)
    assert log.path.read_bytes() == before and capsys.readouterr().out == ""


def test_rows_with_nan_are_rows(tmp_path):
    log = opened(tmp_path)
    log.row(row(1, loss=math.nan, grad_norm=math.inf, skipped=True, mfu=None, batch_hash="00ff"))
    opened(tmp_path, first_step=1)
    (kept,) = runlog.read(tmp_path / "run")
    assert math.isnan(kept["loss"]) and kept["grad_norm"] == math.inf


def test_metrics_that_cannot_be_read_are_an_error_and_nothing_changes(tmp_path):
    """A link to itself, which even root, who runs these tests in containers, cannot read."""
    log = opened(tmp_path)
    before = {path: path.read_bytes() for path in (tmp_path / "run").iterdir() if path != log.path}
    log.path.unlink()
    log.path.symlink_to(log.path)
    with pytest.raises(OSError, match=r"metrics\.jsonl"):
        opened(tmp_path, first_step=5)
    assert before == {path: path.read_bytes() for path in before} and os.path.islink(log.path)
    with pytest.raises(OSError, match=r"metrics\.jsonl"):
        runlog.read(tmp_path / "run")


def test_metrics_without_permission_are_an_error():
    """As another user, if root runs this."""
    folder = Path(tempfile.mkdtemp())
    try:
        log = opened(folder)
        log.path.write_bytes(b"\n".join(good([1, 2])) + b"\n")
        for path in (folder, folder / "run"):
            path.chmod(0o777)
        log.path.chmod(0)
        user = os.geteuid()
        os.seteuid(user or 65534)
        try:
            with pytest.raises(PermissionError, match=r"metrics\.jsonl"):
                opened(folder)
        finally:
            os.seteuid(user)
        log.path.chmod(0o600)
        assert steps_in(log.path) == [1, 2]
    finally:
        shutil.rmtree(folder)


def in_a_child(function) -> int:
    """Call it in a forked child, whose exit status is its result. Returns the process id."""
    if child := os.fork():
        return child
    try:
        os._exit(function())
    finally:
        os._exit(99)


def test_a_full_disk_at_the_start_is_named_and_loses_no_row(tmp_path):
    """No file may grow beyond 20 kB, which the metrics exceed."""
    log = opened(tmp_path)
    log.path.write_bytes(b"\n".join(good(range(1, 401))) + b"\n")

    def start():
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        try:
            opened(tmp_path, first_step=400)
        except OSError as error:
            return 0 if str(log.path) in str(error) else 1

    assert os.waitpid(in_a_child(start), 0)[1] == 0
    assert steps_in(log.path) == list(range(1, 401))


def test_a_kill_while_the_file_is_rewritten_loses_no_row(tmp_path):
    """Rows, settings and launches are complete whenever a process that starts is killed."""
    log = opened(tmp_path)
    log.path.write_bytes(b"\n".join([*good(range(1, 2000)), b"7", *good([2000])]) + b"\n")
    chance = random.Random(0)

    def start():
        while True:
            opened(tmp_path, first_step=2000)

    for _ in range(12):
        child = in_a_child(start)
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


def status_of(monkeypatch, program, *argv) -> int:
    """The exit status of a program's main under config.run."""
    monkeypatch.setattr(sys, "argv", [program.__name__, *map(str, argv)])
    try:
        config.run(program.main)
    except SystemExit as leaving:
        return leaving.code
    return 0


@pytest.mark.parametrize("program", [runlog, plot])
@pytest.mark.parametrize(
    "kind", ["missing", "empty", "a file", "no config", "odd config", "odd rows"]
)
def test_an_odd_run_folder_is_one_line(tmp_path, monkeypatch, capsys, program, kind):
    run = tmp_path / "run"
    if kind == "a file":
        run.write_text("hello")
    elif kind != "missing":
        run.mkdir()
    if kind in ("no config", "odd config", "odd rows"):
        (run / "metrics.jsonl").write_bytes(
            b"7\n" if kind == "odd rows" else b"\n".join(good([1])) + b"\n"
        )
    if kind in ("odd config", "odd rows"):
        (run / "config.json").write_text(
            "[" * 100_000 if kind == "odd config" else '{"max_steps": 9}'
        )
    status, (_, error) = status_of(monkeypatch, program, run), capsys.readouterr()
    if (program, kind) == (runlog, "odd rows"):
        assert status == 0
    else:
        assert (
            status == 2
            and error.startswith("error: ")
            and error.count("\n") == 1
            and str(run) in error
        )


def test_a_row_that_lacks_figures_is_shown(tmp_path, monkeypatch, capsys):
    """As from somebody's changed trainer."""
    opened(tmp_path)
    for last in ({"step": 3, "loss": 5.0}, {"step": 3, "loss": 5, "seconds": 1e300}, {"step": 3}):
        for row in (
            last,
            {"step": 3, "val_loss": 5.0},
            {"step": 3, "icl": {"a": {}, "b": {"foundry": 1}}},
        ):
            (tmp_path / "run/metrics.jsonl").write_text(
                json.dumps(last) + "\n" + json.dumps(row) + "\n"
            )
            assert status_of(monkeypatch, runlog, tmp_path / "run") == 0
            assert "step   3/100  " in capsys.readouterr().out


def mutated(content: bytes, chance: random.Random) -> bytes:
    """Damage of one kind or another: bytes, lengths, or values of other types."""
    place, kind = chance.randrange(len(content)), chance.randrange(6)
    if kind == 0:
        return content[:place]
    if kind == 1:
        return content[:place] + bytes([chance.randrange(256)]) + content[place + 1 :]
    if kind == 2:
        return content[:place] + content[place:][: chance.randrange(40)] * 2 + content[place:]
    values = [
        b'"7"',
        b"null",
        b"[]",
        b"{}",
        b"-1",
        b"1e999",
        b"NaN",
        b"true",
        b"9" * 400,
        b"[" * 9999,
        b"1e308",
        b"0",
    ]
    colons = [i for i, byte in enumerate(content) if byte in b":,["] or [0]
    place = chance.choice(colons)
    end = min(
        i
        for i in (content.find(b",", place + 1), content.find(b"}", place + 1), len(content))
        if i >= 0
    )
    return content[: place + 1] + chance.choice(values) + content[end:]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["metrics.jsonl", "launches.jsonl", "config.json"])
def test_no_mutation_of_a_run_folder_is_a_traceback(tmp_path, monkeypatch, capsys, name):
    """40 mutations of each file: readers and runs carry on, or end with one line."""
    log = opened(tmp_path)
    log.row({"step": 0, "val_loss": 9.0, "val_bits_per_byte": 3.5})
    for step in range(1, 9):
        log.row(row(step, batch_hash="00ff", skipped=False, slowest_rank=0, slowest_by=1.0))
    log.row(
        {"step": 8, "icl": {"piqa": {"n": 3, "foundry": 0.5, "foundry_stderr": 0.1, "chance": 0.5}}}
    )
    opened(tmp_path, first_step=8)
    before, chance = (tmp_path / "run" / name).read_bytes(), random.Random(1)
    run, other = tmp_path / "run", tmp_path / "other"
    shutil.copytree(run, other)
    for number in range(40):
        (run / name).write_bytes(mutated(before, chance))
        begin = time.monotonic()
        status = status_of(monkeypatch, runlog, run)
        assert status in (0, 2), number
        pictures = (
            [f"--out={tmp_path}/a.svg"] if number % 20 == 0 else [f"--out={tmp_path}/no/a.svg"]
        )
        assert status_of(monkeypatch, plot, other, run, "--diff", *pictures) in (0, 2), number
        with contextlib.suppress(UserError, OSError):
            opened(tmp_path, first_step=8)
        assert time.monotonic() - begin < 20
        for path in run.glob("*.damaged*"):
            path.unlink()
    capsys.readouterr()


# --- links in a stranger's folder


OURS = "config.json launches.jsonl tokenizer.json metrics.jsonl microbatch.json lease.json".split()


@pytest.mark.parametrize("name", OURS)
def test_a_run_refuses_links_to_other_places(tmp_path, name):
    """It would replace or copy what they point to. `checkpoints` may be on a larger disk."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path / "larger")
    runlog.require_no_links(tmp_path / "run")
    (tmp_path / "run" / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=f"{name} is a link, and a run changes nothing outside"):
        runlog.require_no_links(tmp_path / "run")


def test_nothing_is_written_through_a_link(tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("[]")
    (tmp_path / "microbatch.json").symlink_to(precious)
    microbatch.write(TrainConfig(run_dir=str(tmp_path)), {}, 4, "fits")
    assert precious.read_text() == "[]" and microbatch.read(tmp_path / "microbatch.json")


def test_a_launch_on_record_has_no_rows_of_the_launch_before(tmp_path, monkeypatch):
    """A reader who waits for the launch must not see rows of steps that will be repeated."""
    log = opened(tmp_path)
    for step in (1, 2, 3):
        log.row(row(step))
    seen = []
    monkeypatch.setattr(runlog, "add_line", lambda *_: seen.append(runlog.read(tmp_path / "run")))
    opened(tmp_path, first_step=2)
    assert [[r["step"] for r in rows] for rows in seen] == [[1, 2]]
