"""Finetuning jobs: each is done once, whatever is killed, or fails and says why in its events."""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import PATIENCE, ROOT, json_lines

pytest.importorskip("openai")
pytest.importorskip("fastapi")

import openai
from finetuning import (
    JOBS,
    KEYS,
    LONG,
    QUICK,
    Place,
    client_of,
    created,
    lines,
    messages,
    pids_left,
    set_settings,
    starts,
    status,
    steps,
    upload,
)
from servers import KEY, Served, openai_client, wait_for

from lifecycle import runlog
from web import jobs, worker
from web.jobs import Job
from web.worker import Local, Worker, WorkerSettings, write_lines

# --- Requests


def test_jobs_wait_are_listed_found_and_cancelled(tmp_path):
    client = client_of(tmp_path)
    first, second = (created(client, metadata={"who": "me", "n": str(n)}) for n in (1, 2))
    assert [job["id"] for job in client.get(JOBS).json()["data"]] == [second, first]
    page = client.get(f"{JOBS}?limit=1&after={second}").json()
    assert [job["id"] for job in page["data"]] == [first] and not page["has_more"]
    found = client.get(JOBS, params={"metadata[who]": "me", "metadata[n]": "1"}).json()["data"]
    assert [(job["id"], job["metadata"]["who"]) for job in found] == [(first, "me")]
    assert client.get(JOBS, params={"metadata[n]": "1", "metadata[z]": "1"}).json()["data"] == []

    events = tmp_path / "jobs/jobs" / first / "events.jsonl"
    events.write_bytes(events.read_bytes() + b'{"created_at": 1')  # cut off
    for _ in range(2):
        answer = client.post(f"{JOBS}/{first}/cancel").json()
        assert answer["status"] == "cancelled" and answer["finished_at"]
    assert status(client, second) == "queued" and len(messages(client, first)) == 2
    assert client.get(f"{JOBS}/{second}/checkpoints").json()["data"] == []


def test_a_key_has_few_jobs_at_a_time(tmp_path):
    client, other = client_of(tmp_path), client_of(tmp_path, key=KEYS[1])
    job_ids = [created(client) for _ in range(4)]
    body = {"model": "base", "training_file": upload(client, lines(9))}
    assert client.post(JOBS, json=body).status_code == 429
    created(other)
    client.post(f"{JOBS}/{job_ids[0]}/cancel")
    assert client.post(JOBS, json=body).status_code == 200


def method(**more):
    return {"method": {"type": "supervised"} | more}


REFUSED = [  # changes of a request, the parameter that the answer names
    ({"model": "other"}, "model"),
    ({"training_file": "file-x"}, "training_file"),
    ({"training_file": "../jobs"}, "training_file"),
    ({"validation_file": "file-" + "0" * 24}, "validation_file"),
    ({"suffix": "../x"}, "suffix"),
    ({"suffix": "x" * 41}, "suffix"),
    ({"seed": -1}, "seed"),
    ({"metadata": {"a": 1}}, "metadata"),
    ({"integrations": [{"type": "wandb"}]}, "integrations"),
    ({"hyperparamters": {"n_epochs": 3}}, "hyperparamters"),
    ({"hyperparameters": {"n_epochs": 0}}, "hyperparameters"),
    ({"hyperparameters": {"beta": 0.1}}, "hyperparameters"),
    ({"method": {"type": "dpo", "dpo": {}}}, "method"),
    (method(hyperparameters={"n_epochs": 3}), "method"),
    (method(supervised={"hyperparameters": {"n_epochs": 99}}), "method"),
]


def test_what_is_refused(tmp_path):
    client = client_of(tmp_path)
    body = {"model": "base", "training_file": upload(client, lines(20))}
    for changes, name in REFUSED:
        answer = client.post(JOBS, json=body | changes)
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["param"] == name, (changes, answer.text)
    body["training_file"] = upload(client, lines(1))
    assert client.post(JOBS, json=body).status_code == 400
    assert os.listdir(tmp_path / "jobs/jobs") == []


def test_a_job_says_that_no_worker_is_there(tmp_path):
    client = client_of(tmp_path)
    job_id = created(client)
    heartbeat = tmp_path / "jobs/heartbeat"

    def hint():
        (listed,) = client.get(JOBS).json()["data"]
        assert listed == client.get(f"{JOBS}/{job_id}").json()
        return listed.get("hint")

    assert hint() == "No worker yet: python -m web.worker jobs"
    heartbeat.touch()
    assert hint() is None
    os.utime(heartbeat, (1e9, 1e9))
    assert hint() == "No worker since 2001-09-09 01:46:40 UTC: python -m web.worker jobs"
    client.post(f"{JOBS}/{job_id}/cancel")
    assert hint() is None


def run_of(job, n_steps, last) -> None:
    """Write the run folder of a job's training, of which so many steps are done."""
    job.run_dir.mkdir()
    (job.run_dir / "config.json").write_text(json.dumps({"max_steps": n_steps}))
    row = {"loss": 3.0, "lr": 0.1, "seconds": 0.05}
    rows = [{"step": step, **row} for step in range(1, last + 1)]
    rows += [{"step": step, "val_loss": 2.0 + step} for step in (last // 2, last)]
    (job.run_dir / "metrics.jsonl").write_text(json_lines(*rows))


def running(client, tmp_path, n_steps, last) -> Job:
    """A new job that trains."""
    job = Job(tmp_path / "jobs/jobs" / created(client))
    run_of(job, n_steps, last)
    job.write_state(status="running")
    return job


def test_the_end_of_a_training_that_stands_still_does_not_move(tmp_path):
    client = client_of(tmp_path)
    job = running(client, tmp_path, 10_000, 100)
    (tmp_path / "jobs/heartbeat").touch()
    written_at = time.time() - 60
    os.utime(job.run_dir / "metrics.jsonl", (written_at, written_at))
    found = client.get(f"{JOBS}/{job.id}").json()
    assert found["estimated_finish"] == pytest.approx(written_at + 0.05 * 9900, abs=2)
    assert found["progress"]["step"] == 100 and found["progress"]["total_steps"] == 10_000
    os.utime(job.run_dir / "metrics.jsonl", (1e9, 1e9))
    assert client.get(f"{JOBS}/{job.id}").json()["estimated_finish"] is None


def test_looking_at_a_long_training_is_cheap(tmp_path, monkeypatch):
    """Whatever a client reads of it takes no time that grows with its steps, but for the first."""
    monkeypatch.setattr("web.runs.READ_SECONDS", 60.0)  # on a busy machine, too, in one part
    client = client_of(tmp_path)
    job = running(client, tmp_path, 20_000, 20_000)
    page = client.get(f"{JOBS}/{job.id}/events?limit=1000").json()
    assert len(page["data"]) == 1 and not page["has_more"]
    assert client.get(f"{JOBS}/{job.id}").json()["progress"]["step"] == 20_000
    begun = time.process_time()
    for end in ("/events", "/checkpoints", ""):
        assert client.get(f"{JOBS}/{job.id}{end}").status_code == 200
    assert time.process_time() - begun < 0.5


META = {"step": 10, "seed": 1, "global_batch_size": 1, "tokenizer": "bytes", "precision": "fp32"}
META |= {"data_fingerprint": "x", "lora_rank": 4, "init_from": "base"}  # of a checkpoint


def test_a_job_cancelled_after_its_last_step_succeeds(tmp_path):
    """Its model is served already."""
    client = client_of(tmp_path)
    early, late = (running(client, tmp_path, 10, 10) for _ in range(2))
    for job in (early, late):
        set_settings(tmp_path, job.id, "import os\nos._exit(75)")
    client.post(f"{JOBS}/{early.id}/cancel")  # as its last step is being done
    assert status(client, early.id) == "cancelled"
    for job in (early, late):
        folder = job.run_dir / "checkpoints/step-10"
        folder.mkdir(parents=True)
        (folder / ".metadata").touch()
        (folder / "meta.json").write_text(json.dumps(META))
    answer = client.post(f"{JOBS}/{late.id}/cancel")
    assert answer.status_code == 400 and "ended already" in answer.text
    assert status(client, early.id) == "running"
    work(worker_of(tmp_path, most=2), client, early.id)
    for job in (early, late):
        assert status(client, job.id) == "succeeded"


def test_no_path_of_the_server_leaves_it(tmp_path):
    secret = "/home/anna/secret/base"
    client = client_of(tmp_path, folders={"jobs": tmp_path / "jobs/models"})
    job = running(client, tmp_path, 9, 3)
    error = {"message": f"the base is gone from {secret}"}
    event = {"created_at": 1.0, "level": "info", "message": f'File "{secret}", line 3'}
    settings = {"max_steps": 9, "init_from": secret, "remote": f"file://{secret}"}
    launch = {"first_step": 0, "command": f"fsdp_train.py --init_from=x:{secret}"}
    job.write_state(status="failed", error=error)
    (job.folder / "events.jsonl").write_text(json_lines(event))
    (job.run_dir / "config.json").write_text(json.dumps(settings))
    (job.run_dir / "launches.jsonl").write_text(json_lines(launch))
    run = f"/api/runs/jobs/{job.run_dir.name}"
    paths = [f"{JOBS}/{job.id}", f"{JOBS}/{job.id}/events", f"{run}/about", f"{run}/curve"]
    texts = [client.get(path).text for path in (*paths, f"{run}/card", JOBS)]
    assert "secret" not in "".join(texts) and str(tmp_path) not in "".join(texts)
    for text in texts[:3]:
        assert "base" in text


DAMAGED = [  # a file of a job or its run, what is in it (None: it is gone), the status of the job
    ("job.json", "{", "failed"),
    ("job.json", None, "failed"),
    ("job.json", {"model": 1}, "failed"),
    ("job.json", {"hyperparameters": {"n_epochs": math.nan}, "model": "\ud800"}, "running"),
    ("job.json", {"metadata": {"\ud800": math.inf}}, "running"),
    ("state.json", "[]", "failed"),
    ("state.json", None, "queued"),
    ("state.json", {"status": 1}, "failed"),
    ("state.json", {"status": "failed", "finished_at": math.nan, "error": "\ud800"}, "failed"),
    ("state.json", {"status": "succeeded", "trained_tokens": math.inf}, "succeeded"),
    ("events.jsonl", "{", "running"),
    ("events.jsonl", None, "running"),
    ("events.jsonl", {"created_at": 1.0, "level": 1, "message": 1}, "running"),
    ("events.jsonl", {"created_at": math.inf, "level": "x", "message": "\ud800"}, "running"),
    ("run/metrics.jsonl", {"step": 1, "loss": 1.0, "seconds": math.nan}, "running"),
    ("run/launches.jsonl", {"time": 5}, "running"),
]


@pytest.mark.parametrize("file, content, shown", DAMAGED, ids=str)
def test_a_damaged_job_is_shown_as_such(tmp_path, file, content, shown):
    client = client_of(tmp_path)
    job = running(client, tmp_path, 9, 3)
    path = job.run_dir / file[4:] if file.startswith("run/") else job.folder / file
    known = {"job.json": job.asked, "state.json": jobs.NEW_STATE}.get(file, {})
    path.unlink(missing_ok=True)
    if content is not None:
        path.write_text(content if isinstance(content, str) else json_lines(known | content))
    for end in ("", f"/{job.id}", f"/{job.id}/events", f"/{job.id}/checkpoints"):
        answer = client.get(JOBS + end)
        assert answer.status_code == 200 and "NaN" not in answer.text, answer.text
    assert status(client, job.id) == shown


def test_what_is_no_job_hides_no_job(tmp_path):
    """Nor does it keep a worker from it."""
    client = client_of(tmp_path)
    job_id = created(client)
    folder = tmp_path / "jobs/jobs"
    (folder / f"ftjob-{'0' * 24}").write_text("x")
    (folder / f"ftjob-{'1' * 24}").symlink_to(tmp_path)
    (folder / job_id / "events.jsonl").unlink()
    (folder / job_id / "events.jsonl").mkdir()
    (folder / job_id / "cancel").symlink_to("cancel")
    assert [job["id"] for job in client.get(JOBS).json()["data"]] == [job_id]
    assert client.get(f"{JOBS}/{job_id}/events").json()["data"] == []
    assert client.get(f"{JOBS}/ftjob-{'1' * 24}").status_code == 404
    worker = worker_of(tmp_path)
    worker.look()
    assert worker.paused.keys() <= {job_id}


# --- A worker, in this process


def worker_of(tmp_path, **settings) -> Worker:
    """A worker, whose `look` the test calls."""
    cfg = WorkerSettings(**settings)
    return Worker((tmp_path / "jobs").resolve(), Local(cfg.nproc), cfg)


def work(worker: Worker, client, job_id) -> dict:
    """Let a worker work until a job has ended. Returns it."""
    wait_for(lambda: worker.look() == 0)
    return client.get(f"{JOBS}/{job_id}").json()


ENDS = [  # a config file as which the training ends, words of the reason
    ("import os\nos.kill(os.getpid(), 9)", "ended 2 times"),
    ("import os\nprint('x', flush=True)\nos._exit(1)", "checkpoint, the last words: x"),
]


@pytest.mark.parametrize("text, words", ENDS)
def test_a_training_that_fails_again_and_again_ends_its_job(tmp_path, monkeypatch, text, words):
    monkeypatch.setattr(worker, "MOST_ATTEMPTS", 2)
    client = client_of(tmp_path)
    job_id = created(client)
    set_settings(tmp_path, job_id, text)
    job = work(worker_of(tmp_path), client, job_id)
    assert job["status"] == "failed" and words in job["error"]["message"]
    said = messages(client, job_id)
    assert words in said[-1] and sum("started" in line for line in said[:-1]) == 2


@pytest.mark.parametrize(
    "what", ["no base", "no upload", "upload", "job.json", "hyperparameters", "state.json"]
)
def test_a_job_that_cannot_be_done_fails(tiny_run, tmp_path, what):
    """Something that it needs is gone or damaged."""
    shutil.copytree(tiny_run, tmp_path / "run")
    client = client_of(tmp_path, base=tmp_path / "run")
    job_id = created(client)
    job = Job(tmp_path / "jobs/jobs" / job_id)
    sent = tmp_path / "jobs/files" / job.asked["training_file"]
    if what.startswith("no "):
        shutil.rmtree(tmp_path / "run" if what == "no base" else sent)
    elif what == "upload":
        (sent / "data.jsonl").write_text("{\n" * 9)
    elif what == "hyperparameters":
        (job.folder / "job.json").write_text(json.dumps(job.asked | {"hyperparameters": {}}))
    else:
        (job.folder / what).write_text("{")
    job = work(worker_of(tmp_path), client, job_id)
    said = messages(client, job_id)
    assert job["status"] == "failed" and job["error"]["message"] in said[-1]
    assert str(tmp_path / "jobs") not in said[-1]


def test_only_the_seconds_of_steps_count(tmp_path):
    """Not those in which the machine was off. What has trained for long enough ends."""
    client = client_of(tmp_path)
    job = Job(tmp_path / "jobs/jobs" / created(client))
    set_settings(tmp_path, job.id, "import time\ntime.sleep(600)")
    run_of(job, 10_000, 100)  # 5 s
    os.utime(job.run_dir / "metrics.jsonl", (1e9, 1e9))
    for hours in (6 / 3600, 4 / 3600):
        worker = worker_of(tmp_path, most_hours=hours)
        worker.look()
        worker.look()
        assert worker.running()
        if hours * 3600 > 5:
            assert status(client, job.id) == "running"
            worker.leave()
            assert status(client, job.id) == "queued"
    work(worker, client, job.id)
    assert "the job took more than" in messages(client, job.id)[-1]


def test_a_later_checkpoint_gives_a_training_new_attempts(tmp_path, monkeypatch):
    """It is given up once it ends again and again at the same place."""
    monkeypatch.setattr(worker, "MOST_ATTEMPTS", 2)
    client = client_of(tmp_path)
    job = Job(tmp_path / "jobs/jobs" / created(client))
    run_of(job, 10_000, 10)
    checkpoints = job.run_dir / "checkpoints"
    fails = f"""
import os, pathlib
folder = pathlib.Path({str(checkpoints)!r})
n = len(list(folder.glob("step-*")))
if n < 2:
    (folder / f"step-{{n + 1}}").mkdir(parents=True)
    (folder / f"step-{{n + 1}}" / "meta.json").write_text({json.dumps(META)!r})
    (folder / f"step-{{n + 1}}" / ".metadata").touch()
os._exit(1)
"""
    set_settings(tmp_path, job.id, fails)
    job = work(worker_of(tmp_path), client, job.id)
    assert "ended 2 times" in job["error"]["message"]
    said = messages(client, job["id"])
    assert sum("started" in line for line in said) == 2 + 2 - 1


def test_no_job_is_taken_twice(tmp_path, monkeypatch):
    monkeypatch.setattr(jobs, "MOST_JOBS", 99)
    client = client_of(tmp_path)
    job_ids = [created(client) for _ in range(6)]
    for job_id in job_ids:
        set_settings(tmp_path, job_id, "import os\nprint('error: x', flush=True)\nos._exit(2)")
    workers = [worker_of(tmp_path, most=3, poll_seconds=0.01, once=True) for _ in range(3)]
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(Worker.run, workers))
    for job_id in job_ids:
        said = messages(client, job_id)
        assert status(client, job_id) == "failed" and said[-1] == "The job failed: x"
        assert sum("has started" in message for message in said) == 1


def test_a_removed_folder_ends_its_training(tmp_path):
    client = client_of(tmp_path)
    job_id = created(client)
    set_settings(tmp_path, job_id, "import time\ntime.sleep(600)")
    worker = worker_of(tmp_path)
    worker.look()
    (process,) = worker.launcher.ranks[job_id]
    shutil.rmtree(tmp_path / "jobs/jobs" / job_id)
    worker.look()
    process.wait(PATIENCE)
    worker.paused.clear()
    assert worker.look() == 0  # there is room for another job


def test_a_file_of_its_own_is_held_out(tiny_run, tmp_path):
    client = client_of(tmp_path, base=tiny_run)
    for n_train, n_held_out, most in ((30, 6, 6), (10, 30, 10), (7, 2, 2), (1, 1, 1), (9, 4, 4)):
        job_id = created(client)
        job = Job(tmp_path / "jobs/jobs" / job_id)
        of_train = tmp_path / "jobs/files" / job.asked["training_file"] / "data.jsonl"
        of_train.write_bytes(lines(n_train, "t"))
        job.asked["validation_file"] = upload(client, lines(n_held_out, "v"))
        val_every, _ = write_lines(job, tmp_path / "data.jsonl")
        rows = (tmp_path / "data.jsonl").read_text().splitlines()
        held_out = [json.loads(row)["response"] for row in rows[::val_every]]
        learned = [json.loads(row)["response"] for n, row in enumerate(rows) if n % val_every]
        assert learned == ["t"] * n_train and set(held_out) == {"v"}
        assert most / 2 <= len(held_out) <= most
        client.post(f"{JOBS}/{job_id}/cancel")


@pytest.mark.parametrize("n_lines", [2, 3, 10, 11, 59, 250])
def test_the_first_line_is_learned_and_those_held_out_are_named(tiny_run, tmp_path, n_lines):
    client = client_of(tmp_path, base=tiny_run)
    content = b"\n" + lines(n_lines)  # a blank line counts as one
    job = Job(tmp_path / "jobs/jobs" / created(client, content=content))
    val_every, words = write_lines(job, tmp_path / "data.jsonl")
    rows = (tmp_path / "data.jsonl").read_bytes().splitlines()
    given = content.splitlines()
    numbers = [given.index(row) + 1 for row in rows[::val_every]]
    assert sorted(rows) == sorted(given[1:]) and 2 not in numbers
    if len(numbers) <= worker.LINES_SHOWN:
        assert words.partition(" ")[2] == ", ".join(map(str, numbers))
    else:
        assert words.endswith(f", ..., {numbers[-1]}")


# --- Workers as processes of their own


@pytest.fixture
def place(tiny_run, tmp_path):
    with Place(tiny_run, tmp_path) as place:
        yield place


def program_of_the_page(server, folder, hyperparameters) -> str:
    """What web/finetuning.md's program prints, with the model and the server that are here."""
    page = (ROOT / "web/finetuning.md").read_text()
    program = re.search(r"```python\n(.*?)```", page, re.DOTALL)[1]
    here = {
        "http://localhost:8000": f"http://127.0.0.1:{server.port}",
        "none": KEY,
        '"demo"': '"run"',
        'suffix="capitals"': f'suffix="capitals", hyperparameters={hyperparameters}',
    }
    for old, new in here.items():
        assert program.count(old) == 1
        program = program.replace(old, new)
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done
    return done.stdout


@pytest.mark.slow
def test_the_story(place):
    (place.folder / "keys.txt").write_text(KEY)
    (place.folder / "questions.jsonl").write_bytes(lines(60))
    server = Served(place.folder, "--jobs=jobs", "--keys=keys.txt", "--rows=4")
    client = openai_client(server)
    with pytest.raises(openai.BadRequestError) as error:
        client.files.create(file=("a.jsonl", lines(5) + b"{\n"), purpose="fine-tune")
    assert [fault["line"] for fault in error.value.body["lines"]] == [6]
    worker = place.worker()
    thorough = {"n_epochs": 20, "batch_size": 8, "learning_rate_multiplier": 5.0}
    printed = program_of_the_page(server, place.folder, thorough)
    assert "The training has finished" in printed
    (made,) = client.fine_tuning.jobs.list()
    job = Job(place.folder / "jobs/jobs" / made.id)
    answer = client.completions.create(model=made.fine_tuned_model, prompt="7 ", temperature=0)
    assert answer.choices[0].text.startswith("abc")
    assert made.trained_tokens > 0 and starts(job) == [0]

    events = list(client.fine_tuning.jobs.list_events(job.id, limit=7))[::-1]  # pages of 7
    losses = [row["val_loss"] for row in runlog.read(job.run_dir) if "val_loss" in row]
    assert losses[-1] < losses[0]
    assert any("6 held out, lines 10, 20, 30, 40, 50, 60;" in event.message for event in events)
    assert f"{losses[0]:.4f}" in events[-1].message and f"{losses[-1]:.4f}" in events[-1].message
    assert [event.created_at for event in events] == sorted(event.created_at for event in events)
    last, *others = client.fine_tuning.jobs.checkpoints.list(job.id, limit=100)
    assert len(others) >= 9 and all(other.metrics.full_valid_loss for other in others)
    for other in (others[0], others[-1]):
        name = other.fine_tuned_model_checkpoint
        early = client.completions.create(model=name, prompt="7 ", temperature=0, max_tokens=3)
        assert early.model == name and client.models.retrieve(name)
    assert last.fine_tuned_model_checkpoint == made.fine_tuned_model
    assert last.metrics.full_valid_loss == losses[-1]

    cancelled, moved = (place.create(hyperparameters=LONG) for _ in range(2))
    wait_for(lambda: steps(cancelled) >= 1)
    running = client.fine_tuning.jobs.retrieve(cancelled.id)
    assert running.progress["step"] >= 1 and not hasattr(running, "hint")  # a worker is there
    assert status(place.client, moved.id) == "queued"
    worker.kill()  # the next one ends what this one has started
    worker.wait()
    assert client.fine_tuning.jobs.cancel(cancelled.id).status == "cancelled"
    worker = place.worker("--nproc=2")
    wait_for(lambda: not pids_left(cancelled))
    wait_for(lambda: steps(moved) >= 1)
    assert len(pids_left(moved)) == 2
    wait_for(lambda: cancelled.state()["status"] == "cancelled")
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(PATIENCE) == 75
    assert status(place.client, moved.id) == "queued" and not pids_left(moved)
    again = place.worker()
    wait_for(lambda: len(starts(moved)) == 2)
    assert starts(moved)[1] > 0
    client.fine_tuning.jobs.cancel(moved.id)
    wait_for(lambda: moved.state()["status"] == "cancelled")
    again.send_signal(signal.SIGTERM)
    assert again.wait(PATIENCE) == 0
    names = {model.id for model in client.models.list() if "/checkpoints/" not in model.id}
    assert names == {"run", made.fine_tuned_model}
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model=f"{names.pop()}/checkpoints/step-999999", prompt="x")
    assert server.stop() == 0


@pytest.mark.slow
def test_kill_9_in_the_middle(place, tmp_path):
    """A worker's death does not end its training, and nobody starts it twice."""
    other = worker_of(tmp_path)
    job = place.create(hyperparameters={"n_epochs": 20, "batch_size": 1})
    worker = place.worker()
    wait_for(lambda: steps(job) >= 2)
    (training,) = pids_left(job)
    os.kill(training, signal.SIGSTOP)
    worker.kill()
    worker.wait()
    assert other.look() == 0  # it finds nothing that it could do
    assert starts(job) == [0] and pids_left(job) == [training]

    os.kill(training, signal.SIGKILL)
    assert status(place.client, job.id) == "running"
    worker = place.worker()
    wait_for(lambda: len(starts(job)) == 2)
    worker.kill()
    worker.wait()
    wait_for(lambda: other.look() == 0 and status(place.client, job.id) == "succeeded")
    assert len(starts(job)) == 2
    assert sum("restarted" in message for message in messages(place.client, job.id)) == 1


@pytest.mark.slow
def test_a_full_disk_fails_the_job(tiny_run, disk):
    """The lines have room, and their tokens have not."""
    client = client_of(disk, base=tiny_run)
    job_id = created(client, QUICK, lines(3000))
    free = shutil.disk_usage(disk).free
    (disk / "filler").write_bytes(b"x" * (free - 2**18))
    ended = work(worker_of(disk), client, job_id)
    assert ended["status"] == "failed"
    assert "No space" in messages(client, job_id)[-1]
