"""lifecycle/trackers.py: each step arrives, whatever is killed; no tracker holds up a run.

What a tracker has is read back from its own files, W&B's as its server takes them.
"""

import collections
import contextlib
import fcntl
import functools
import importlib.util
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time

import pytest
from conftest import flags_for, rooms_on_path, slowly, write_lines
from launches import FLAGS, FOREVER, Job, steps_of, wait_for

import fsdp_train
from lifecycle import trackers
from lifecycle.trackers import Steps, described

MODULES = {"tensorboard": "tensorboardX"}
SETTINGS = {"lr": 0.001, "mfu": None, "max_steps": 60}


def need(name: str) -> None:
    module = MODULES.get(name, name)
    pytest.importorskip(module, reason=f"needs {module}: see requirements-extra.txt")


# --- What a tracker has: [(name, step, value), ...] as they come, and how often it got the settings


def of_tensorboard(run):
    """Event files: length, checksum, event, checksum, and so on. A start drops later steps."""
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    found, settings = [], 0
    for path in sorted((run / "trackers" / "tensorboard").glob("*")):
        content = path.read_bytes()
        while len(content) >= 12:
            (size,) = struct.unpack_from("<Q", content)
            record, content = content[12 : 12 + size], content[16 + size :]
            if len(record) < size:
                break  # cut off by a kill
            event = Event.FromString(record)
            if event.session_log.status == SessionLog.START:
                found = [item for item in found if item[1] < event.step]
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    found.append((value.tag, event.step, value.simple_value))
                settings += value.tag.startswith("settings")
    return found, settings


def of_wandb(run):
    """What `wandb sync` sends, folder by folder; the server drops what is not above the last."""
    from wandb.proto.wandb_internal_pb2 import Record

    found, settings, ids, last = [], 0, set(), -1
    paths = sorted((run / "trackers" / "wandb").glob("offline-*/*.wandb"))
    assert b"name-of-mine" in paths[-1].read_bytes()
    for path in paths:
        for content in log_records(path.read_bytes()):
            record = Record.FromString(content)
            if record.HasField("run"):
                ids.add(record.run.run_id)
                settings += "lr" in [item.key for item in record.run.config.update]
            if record.HasField("history") and record.history.step.num > last:
                last = record.history.step.num
                for item in record.history.item:
                    name = item.key or "/".join(item.nested_key)
                    if not name.startswith("_"):
                        found.append((name, last, json.loads(item.value_json)))
    assert len(ids) == 1
    return found, settings


def log_records(content: bytes):
    """LevelDB's log: blocks of 32 KiB; checksum, length, kind, content, and so on."""
    at, record = 7, b""  # after W&B's own header
    while at + 7 <= len(content):
        left = 2**15 - at % 2**15
        if left < 7:
            at += left
            continue
        _, size, kind = struct.unpack_from("<IHB", content, at)
        record += content[at + 7 : at + 7 + size]
        at += 7 + size
        if at > len(content):
            return  # cut off by a kill
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def of_mlflow(run):
    import mlflow

    client = mlflow.MlflowClient()
    run_id = json.loads((run / "trackers" / "mlflow.json").read_text())["id"]
    got = client.get_run(run_id)
    assert got.info.run_name == "name-of-mine"
    assert got.data.params == {name: str(value) for name, value in SETTINGS.items()}
    histories = [client.get_metric_history(run_id, name) for name in got.data.metrics]
    return [(m.key, m.step, m.value) for history in histories for m in history], 1


def of_trackio(run):
    from trackio.sqlite_storage import SQLiteStorage

    name = json.loads((run / "trackers" / "trackio.json").read_text())["id"]
    rows = SQLiteStorage.get_logs(run.parent.name, name)
    assert SQLiteStorage.get_run_config(run.parent.name, name)["lr"] == SETTINGS["lr"]
    names = ("loss", "val_loss", "skipped")
    return [(name, row["step"], row[name]) for row in rows for name in names if name in row], 1


# --- Each step once


def rows_up_to(last: int) -> list[dict]:
    """Rows as of a run that evaluates every ten steps."""
    rows = []
    for step in range(last + 1):
        if step:
            rows.append({"step": step, "loss": 6 / step, "skipped": step == 7, "batch_hash": "ab"})
        if step % 10 == 0:
            rows.append({"step": step, "val_loss": 7 / (step + 1)})
    return rows


def write_rows(run, last: int) -> None:
    """metrics.jsonl up to a step, as a new file: so a start of a run writes it."""
    path = run / "new"
    write_lines(path, *rows_up_to(last))
    path.rename(run / "metrics.jsonl")


def start(run, name: str, *flags) -> subprocess.Popen:
    """`python -m lifecycle.trackers`, which prints into a pipe."""
    command = [sys.executable, "-m", "lifecycle.trackers", run, f"--track={name}", *flags]
    pipes = {"stdin": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=rooms_on_path(), cwd=run, **pipes)


def by_hand(run, name: str) -> tuple[int, list[str]]:
    """Send what is there: the exit status, and what was printed."""
    process = start(run, name)
    _, printed = process.communicate()
    return process.returncode, printed.splitlines()


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run folder without rows. Trackers write into tmp_path, under a name of the user's."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_NAME", "name-of-mine")
    monkeypatch.setenv("MLFLOW_RUN_NAME", "name-of-mine")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path}/mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    folder = tmp_path / "runs" / "demo"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(SETTINGS))
    return folder


@pytest.mark.parametrize(
    "name, read",
    [
        ("tensorboard", of_tensorboard),
        slowly("wandb", of_wandb),
        slowly("mlflow", of_mlflow),
        slowly("trackio", of_trackio),
    ],
)
def test_each_step_arrives_after_kills_and_restarts(run, name, read):
    """Once in TensorBoard and W&B, whose readers drop a step that comes again."""
    need(name)
    for last, is_killed in [(30, True), (43, False), (38, True)]:
        write_rows(run, last)
        process = start(run, name, "--follow")
        assert process.stderr.readline().startswith(f"{name}: "), process.stderr.read()
        if is_killed:
            process.kill()
        process.communicate()  # and close its standard input
        assert is_killed or process.returncode == 0
    write_rows(run, 60)
    assert by_hand(run, name)[0] == 0
    assert by_hand(run, name)[0] == 0  # there is nothing left

    found, settings = read(run)
    assert settings >= 1
    names = ("loss", "val_loss", "skipped")
    rows = rows_up_to(60)
    expected = [(n, row["step"], float(row[n])) for row in rows for n in names if n in row]
    once = sorted if name in ("tensorboard", "wandb") else set
    assert once(item[:2] for item in found) == once(item[:2] for item in expected)
    values = {item[:2]: item[2] for item in found}
    assert all(values[item[:2]] == pytest.approx(item[2]) for item in expected)


def test_event_files_that_are_not_there_any_more_cost_no_later_ones(run):
    """Deleted by hand; or on another machine, where the record has come without them."""
    need("tensorboard")

    def sent(last: int) -> list[int]:
        """The steps that are there when those up to the one before `last` are sent."""
        write_rows(run, last)
        assert by_hand(run, "tensorboard")[0] == 0
        return [step for name, step, _ in of_tensorboard(run)[0] if name == "loss"]

    for last in (5, 9):
        assert sent(last) == [*range(1, last)]
    folder = run / "trackers/tensorboard"
    first, second = sorted(folder.iterdir())
    before = second.read_bytes()
    first.unlink()
    assert sent(20) == [*range(5, 20)] and second.read_bytes() == before
    shutil.rmtree(folder)
    assert sent(23) == [*range(1, 23)]
    assert of_tensorboard(run)[1] == 1  # the settings


@pytest.mark.slow
def test_mlflow_has_all_figures_under_names_that_it_takes_and_the_end_of_the_run(run):
    need("mlflow")
    import mlflow

    figures = {"words(1)": {"acc": 0.5}, "größe, ü": {"acc": 0.25}, "x" * 300: {"acc": 1}}
    rows = [{"step": step, "loss": 6.0, "icl": figures} for step in range(1, 60)]
    write_lines(run / "metrics.jsonl", *rows)
    assert by_hand(run, "mlflow")[0] == 0
    run_id = json.loads((run / "trackers" / "mlflow.json").read_text())["id"]

    def there():
        return mlflow.MlflowClient().get_run(run_id)

    assert there().info.status == "KILLED"
    names = {"loss", "icl/words_1_/acc", "icl/größe_ ü/acc", f"icl/{'x' * 246}"}
    assert there().data.metrics.keys() == names
    last = {"step": 60, "loss": 5.0, "val_loss": 6.0, "icl": figures}
    write_lines(run / "metrics.jsonl", *rows, last)
    assert by_hand(run, "mlflow")[0] == 0
    assert there().info.status == "FINISHED" and there().data.metrics["loss"] == 5


def test_a_step_is_sent_with_its_evaluation(run):
    """Which comes later: after a stop, in the next start; after the last step, before the end."""
    path = run / "metrics.jsonl"
    steps = Steps(run)
    assert steps.above(-1, 3) == []
    with open(path, "a") as file:
        file.write('{"step": 0, "val_loss": 7}\n{"step": 1, "loss": 6}\n{"step": 2, "lo')
        file.flush()
        assert steps.above(-1, 3) == [(0, {"val_loss": 7})]
        file.write('ss": 5}\n{"st\n{"step": 2, "icl": {"piqa": {"acc": 0.5}}, "mfu": null}\n')
        file.flush()
        assert steps.above(0, 3) == [(1, {"loss": 6})]
    assert steps.above(1, 2) == [(2, {"loss": 5, "icl/piqa/acc": 0.5})]
    path.rename(run / "old")
    write_lines(path, {"step": 1, "loss": 6}, {"step": 2, "loss": 5})
    assert steps.above(1, 2) == [(2, {"loss": 5})]


def test_the_last_step_waits_for_its_evaluation(run, monkeypatch):
    """Which may take longer than the tracker waits between two looks at the file."""
    need("tensorboard")
    monkeypatch.setitem(sys.modules, "torch", None)  # as the tracker's own process has it
    *rows, evaluation = rows_up_to(60)
    write_lines(run / "metrics.jsonl", *rows)
    (run / "trackers").mkdir()
    feeder = trackers.Feeder(str(run), "tensorboard", say=print)
    feeder.send()
    with open(run / "metrics.jsonl", "a") as file:
        file.write(json.dumps(evaluation) + "\n")
    feeder.finish()
    found = [item[:2] for item in of_tensorboard(run)[0]]
    assert ("loss", 60) in found and ("val_loss", 60) in found


# --- What goes wrong


def test_what_fails_is_one_line_and_arrives_later(run):
    need("tensorboard")
    write_rows(run, 20)
    (run / "trackers").mkdir()
    obstacle = run / "trackers" / "tensorboard"
    obstacle.write_text("in the way")
    process = start(run, "tensorboard", "--follow")
    line = process.stderr.readline()
    assert line.startswith("tensorboard has failed (FileExistsError")
    assert process.communicate()[1] == ""  # the last try says no more
    obstacle.unlink()
    assert by_hand(run, "tensorboard")[0] == 0
    assert {step for _, step, _ in of_tensorboard(run)[0]} == set(range(20))


def test_no_password_and_no_key_is_printed(monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "0123456789")
    words = "no reply\nfrom https://me:geheim@host/a?write_token=geheim for key 0123456789"
    line = described(ConnectionError(words + "." * 999))
    assert "geheim" not in line and "0123456789" not in line
    assert line.startswith("ConnectionError: no reply from https://host/a for key $MY_API_KEY")
    assert len(line) <= 200


@pytest.mark.parametrize(
    "words, message",
    [
        (["nowhere", "--track=wandb"], "no run in 'nowhere'"),
        (["{run}"], "--track=tensorboard"),
        (["{run}", "--track=tensorboard"], "pip install tensorboardX"),
        (["{run}", "--track=wandb,mlflow", "--follow"], "one tracker"),
    ],
)
def test_refused_in_one_line(run, words, message):
    """-S: without any package; a folder that is called like one, as W&B makes it, is none."""
    (run / "tensorboardX").mkdir()
    words = [word.format(run=run) for word in words]
    command = [sys.executable, "-S", "-m", "lifecycle.trackers", *words]
    done = subprocess.run(command, cwd=run, env=rooms_on_path(), capture_output=True, text=True)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert message in line


# --- Runs


def is_free(run, name: str) -> bool:
    """Has the process of a tracker ended? The kernel's lock ends with it."""
    with open(run / "trackers" / f"{name}.lock") as file, contextlib.suppress(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


@pytest.mark.slow
def test_a_run_that_is_killed_and_stopped_has_one_curve(tmp_path, tiny_data):
    """Two ranks: kill -9, then SIGTERM, then to the end."""
    need("tensorboard")
    run = tmp_path / "run"

    def last() -> int:
        return max((step for _, step, _ in of_tensorboard(run)[0]), default=-1)

    flags = [*FLAGS, *FOREVER, *flags_for(tiny_data), "--run_dir=run", "--track=tensorboard"]
    flags += ["--save_interval=20", "--eval_interval=30", "--vocab_size=320"]
    for number in (signal.SIGKILL, signal.SIGTERM):
        before = last()
        with Job(tmp_path, 2, fsdp_train.main, flags) as job:
            wait_for(lambda before=before: last() > before + 20)
            job.send(number, 0)
            statuses = job.wait()
        assert number == signal.SIGKILL or statuses == [75, 75]
        wait_for(lambda: is_free(run, "tensorboard"))
    end = max(steps_of(run)) + 25
    with Job(tmp_path, 2, fsdp_train.main, [*flags, f"--max_steps={end}"]) as job:
        assert job.wait() == [0, 0]

    found, settings = of_tensorboard(run)
    assert settings >= 1
    counts = collections.Counter(item[:2] for item in found)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    names = ("loss", "lr", "grad_norm", "tokens", "val_loss", "val_bits_per_byte")
    expected = {(name, row["step"]): row[name] for row in rows for name in names if name in row}
    assert all(count == 1 for count in counts.values())
    assert {key for key in counts if key[0] in names} == set(expected)
    values = {item[:2]: item[2] for item in found}
    assert all(values[key] == pytest.approx(expected[key], rel=1e-6) for key in expected)


@pytest.fixture
def mute_server():
    """The address of a server that accepts and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@contextlib.contextmanager
def hangs(address: str, rank: int):
    """In a rank: W&B and MLflow are at this address, and `trackio` is a module that sleeps.

    That one needs no package.
    """
    os.makedirs("stub", exist_ok=True)
    with open("stub/trackio.py", "w") as file:
        file.write("import time\ndef init(*_, **more):\n    time.sleep(10**6)\n")
    sys.path.insert(0, os.path.abspath("stub"))
    os.environ |= {"PYTHONPATH": sys.path[0], "MLFLOW_TRACKING_URI": address}
    os.environ |= {"WANDB_BASE_URL": address, "WANDB_API_KEY": "a" * 40}
    yield


@pytest.mark.slow
def test_trackers_that_hang_hold_up_nothing(tmp_path, tiny_data, mute_server):
    """Neither the steps nor, for long, the end; killed with the run they end, too."""
    names = ["trackio"] + [name for name in ("wandb", "mlflow") if importlib.util.find_spec(name)]
    fault = functools.partial(hangs, mute_server)
    run = tmp_path / "run"
    flags = [*FLAGS, *flags_for(tiny_data), "--run_dir=run", "--vocab_size=320"]
    flags += [f"--track={','.join(names)}"]
    with Job(tmp_path, 1, fsdp_train.main, [*flags, "--max_steps=30"], fault) as job:
        assert job.wait() == [0]
        end = time.time() - os.path.getmtime(run / "metrics.jsonl")
        assert trackers.LAST_SECONDS <= end < 60
        for name in names:
            assert job.log().count(f"{name} has not taken the last steps") == 1
    assert len(steps_of(run)) == 30 and all(is_free(run, name) for name in names)
    with Job(tmp_path, 1, fsdp_train.main, [*flags, *FOREVER], fault) as job:
        wait_for(lambda: max(steps_of(run)) > 60 and not any(is_free(run, n) for n in names))
        job.send(signal.SIGKILL, 0)
        job.wait()
        wait_for(lambda: all(is_free(run, name) for name in names), 60)
