"""Finetuning jobs: each is done once, whatever is killed, or fails and says why in its events."""

import contextlib
import io
import itertools
import json
import math
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import zipfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import PATIENCE, ROOT, json_lines, refusal

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
from launches import Program
from servers import KEY, Served, openai_client, wait_for

from lifecycle import runlog
from web import jobs, worker
from web.jobs import Job
from web.settings import LINES_SHOWN, write_lines
from web.worker import Local, Worker, WorkerSettings
from weights import peft

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
    client.post(f"{JOBS}/{job_ids[1]}/pause")
    assert [client.post(JOBS, json=body).status_code for _ in range(3)] == [200, 200, 429]
    for each in (client, other):  # whoever resumes it, it counts for its owner
        assert each.post(f"{JOBS}/{job_ids[1]}/resume").status_code == 429
    assert client.get(f"{JOBS}/{job_ids[1]}").json()["paused"]


def test_events_are_read_page_by_page_from_the_end(tmp_path):
    client = client_of(tmp_path)
    job = Job(tmp_path / "jobs/jobs" / created(client))
    events = job.folder / "events.jsonl"
    rows = [{"created_at": 1.0, "level": "info", "message": f"{n} é"} for n in range(300)]
    rows[7]["message"] = "x" * jobs.TAIL_BYTES * 2  # longer than what is read at once
    written = json_lines(*rows).encode()
    events.write_bytes(written.replace(b"\n", b"\n{damaged\n", 9) + b'{"created_at": 1')
    expected = [row["message"] for row in rows[::-1]]

    for limit in (1, 7, 100):
        found, after = [], ""
        for _ in range(300 // limit + 1 if limit > 1 else 40):
            page = client.get(f"{JOBS}/{job.id}/events?limit={limit}{after}").json()
            found += page["data"]
            after = f"&after={page['last_id']}"
            assert page["has_more"] == (len(found) < 300)
        assert [event["message"] for event in found] == expected[: len(found)]
        assert len({event["id"] for event in found}) == len(found) >= min(300, 40 * limit)
    assert client.get(f"{JOBS}/{job.id}/events?after=ftevent-x-1").status_code == 400

    size = 20_000 * len(written)
    with events.open("ab") as file:
        file.truncate(size)  # a huge file, whose end alone is read
        file.write(b"\n" + written)
    begun = time.process_time()
    page = client.get(f"{JOBS}/{job.id}/events?limit=5").json()
    assert [event["message"] for event in page["data"]] == expected[:5] and page["has_more"]
    assert time.process_time() - begun < 0.2


def test_the_end_of_a_log(tmp_path):
    client = client_of(tmp_path)
    job = Job(tmp_path / "jobs/jobs" / created(client))
    assert client.get(f"{JOBS}/{job.id}/log").text == ""
    job.log.write_text('File "/home/anna/secret/x.py"\nerror: \xff')
    assert client.get(f"{JOBS}/{job.id}/log").text == 'File "x.py"\nerror: \xff'
    job.log.write_text("".join(f"step {n}\n" for n in range(10**5)))
    said = client.get(f"{JOBS}/{job.id}/log").text.splitlines()
    assert said[-1] == "step 99999" and said == [f"step {n}" for n in range(10**5)][-len(said) :]
    assert 1000 < len(said) < 10_000


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
    row = {"loss": 3.0, "lr": 0.1, "seconds": 0.05, "tokens_per_second": 960.0}
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
    assert worker.postponed.keys() <= {job_id}


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


def test_a_job_rests_and_is_resumed(tmp_path):
    """Paused, cancelled or failed, before a worker came and while it trains."""
    client = client_of(tmp_path)
    job = Job(tmp_path / "jobs/jobs" / created(client))
    sleeps = "import time\ntime.sleep(600)"
    set_settings(tmp_path, job.id, sleeps)
    worker = worker_of(tmp_path)

    def ask(verb):
        answer = client.post(f"{JOBS}/{job.id}/{verb}")
        return answer.status_code, answer.json().get("status"), answer.json().get("paused")

    def rests():
        wait_for(lambda: worker.look() == 0)
        assert not pids_left(job) and job.state()["status"] in jobs.AT_REST

    assert ask("resume")[0] == 400  # it waits already
    assert ask("pause") == (200, "queued", True) and ask("resume") == (200, "queued", False)
    for verb, shown in (("pause", ("queued", True)), ("cancel", ("cancelled", False))):
        assert ask(verb) == (200, *shown)
        rests()
        assert ask(verb) == (200, *shown) and worker.look() == 0
        assert ask("resume") == (200, "queued", False)

        assert worker.look() == 1 and ask("resume")[0] == 400
        assert ask(verb) == (200, *shown)
        assert ask("resume")[0] == 409 and pids_left(job)  # it trains still
        rests()
        assert ask("resume") == (200, "queued", False)

    assert worker.look() == 1
    ask("pause")
    assert worker.leave() == 0  # no job that waits for another worker
    rests()
    assert ask("cancel") == (200, "cancelled", False)
    rests()
    assert job.state()["status"] == "cancelled" and ask("pause")[0] == 400
    set_settings(tmp_path, job.id, "import os\nprint('error: x', flush=True)\nos._exit(2)")
    for _ in range(2):
        assert ask("resume") == (200, "queued", False)
        failed = work(worker, client, job.id)
        assert failed["status"] == "failed" and failed["error"]["message"] == "x"
        assert ask("pause")[0] == ask("cancel")[0] == 400
    said = messages(client, job.id)
    assert sum("goes on" in message for message in said) == 4


def killed_at(number, work) -> bool:
    """Do something in a process that ends, as by kill -9, before its n-th change on disk."""
    pid = os.fork()
    if not pid:
        left = [number]

        def count(event, arguments):
            changes = event in ("os.rename", "os.remove", "os.rmdir", "os.mkdir")
            changes |= event == "open" and bool(arguments[2] & (os.O_WRONLY | os.O_RDWR))
            left[0] -= changes
            if not left[0]:
                os._exit(9)

        sys.addaudithook(count)
        work()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9


@pytest.mark.parametrize("mark", ["pause", "cancel"])
def test_a_server_is_killed_as_it_resumes_a_job(tmp_path, mark):
    """The job is as before or as after, and the request can be sent again."""
    client = client_of(tmp_path)
    job = running(client, tmp_path, 10, 10)
    path = f"{JOBS}/{job.id}"
    worker = worker_of(tmp_path)
    for number in itertools.count(1):
        assert client.post(f"{path}/{mark}").status_code == 200
        assert worker.look() == 0
        resting = client.get(path).json()
        is_killed = killed_at(number, partial(jobs.resume_job, job))
        shown = client.get(path).json()
        is_as_before = shown == resting
        assert is_as_before or (shown["status"], shown["paused"]) == ("queued", False)
        assert client.post(f"{path}/resume").status_code == (200 if is_as_before else 400)
        assert status(client, job.id) == "queued" and not job.wants_rest
        if not is_killed:
            break
    assert number > 3


def test_a_server_is_killed_as_it_deletes_a_job(tmp_path):
    """A job stays until its run is gone. What is left has no name, and goes an hour later."""
    client = client_of(tmp_path)
    for number in itertools.count(1):
        job = running(client, tmp_path, 10, 10)
        job.write_state(status="failed")
        run_dir = job.run_dir
        is_killed = killed_at(number, partial(jobs.delete_job, job))
        assert run_dir.exists() <= job.folder.exists()
        assert client.delete(f"{JOBS}/{job.id}").status_code in (200, 404)
        assert not job.folder.exists() and not run_dir.exists()
        if not is_killed:
            break
    assert number > 3
    left = [tmp_path / "jobs/jobs" / name for name in os.listdir(tmp_path / "jobs/jobs")]
    assert left
    for path in left:
        os.utime(path, (1e9, 1e9))
    upload(client, lines(3))
    assert os.listdir(tmp_path / "jobs/jobs") == []


def test_a_job_that_took_too_long_is_resumed_by_a_worker_with_more_time(tmp_path):
    client = client_of(tmp_path)
    job = Job(tmp_path / "jobs/jobs" / created(client))
    set_settings(tmp_path, job.id, "import time\ntime.sleep(600)")
    run_of(job, 10_000, 100)  # 5 s
    for _ in range(2):
        failed = work(worker_of(tmp_path, most_hours=4 / 3600), client, job.id)
        assert "larger --most_hours" in failed["error"]["message"]
        assert client.post(f"{JOBS}/{job.id}/resume").json()["error"] is None
    worker = worker_of(tmp_path, most_hours=1)
    assert worker.look() == worker.look() == 1 and status(client, job.id) == "running"
    worker.leave()


def test_jobs_and_models_are_deleted(tmp_path):
    client = client_of(tmp_path)
    failed, done, waiting = (running(client, tmp_path, 10, 10) for _ in range(3))
    failed.write_state(status="failed")
    done.write_state(status="succeeded")
    folder = done.run_dir / "checkpoints/step-10"
    folder.mkdir(parents=True)
    (folder / ".metadata").touch()
    (folder / "meta.json").write_text(json.dumps(META))
    waiting.write_state(status="queued")
    shutil.copytree(folder, waiting.run_dir / "checkpoints/step-10")

    def delete(path):
        return client.delete(path).status_code

    lock = failed.lock()  # its training has left it
    assert delete(f"{JOBS}/{failed.id}") == 409 and failed.folder.exists()
    os.close(lock)
    assert delete(f"{JOBS}/{waiting.id}") == 400 and waiting.folder.exists()
    assert delete(f"/v1/models/{waiting.run_dir.name}") == 400  # its worker will end it as done
    assert delete(f"/v1/models/{done.run_dir.name}/checkpoints/step-10") == 400
    assert delete("/v1/models/base") == 400 and delete("/v1/models/nothing") == 404
    run_dir = done.run_dir
    shutil.copytree(run_dir, tmp_path / "jobs/models/brought")  # by a user: no job made it
    assert delete("/v1/models/brought") == 400 and (tmp_path / "jobs/models/brought").exists()
    shutil.rmtree(tmp_path / "jobs/models/brought")
    for job in (failed, done):
        assert delete(f"{JOBS}/{job.id}") == 200 and delete(f"{JOBS}/{job.id}") == 404
    assert not failed.run_dir.exists() and run_dir.exists()
    assert f"{run_dir.name}/checkpoints/step-10" in client.get("/v1/models").text
    assert delete(f"/v1/models/{run_dir.name}") == 200 and not run_dir.exists()
    assert run_dir.name not in client.get("/v1/models").text  # nor its checkpoints
    assert delete(f"/v1/models/{run_dir.name}") == 404
    assert os.listdir(tmp_path / "jobs/jobs") == [waiting.id]
    assert os.listdir(tmp_path / "jobs/models") == [waiting.run_dir.name]
    client.post(f"{JOBS}/{waiting.id}/cancel")
    worker = worker_of(tmp_path)
    assert work(worker, client, waiting.id)["status"] == "succeeded"


@pytest.mark.parametrize("method, path", [("DELETE", ""), ("POST", "/resume")])
def test_a_job_that_is_resumed_meanwhile_stays(tmp_path, monkeypatch, method, path):
    client = client_of(tmp_path)
    job = Job(tmp_path / "jobs/jobs" / created(client))
    job.write_state(status="paused")
    lock = Job.lock

    def late(job):
        jobs.resume_job(job)
        return lock(job)

    monkeypatch.setattr(Job, "lock", late)
    assert client.request(method, f"{JOBS}/{job.id}{path}").status_code == 400
    assert status(client, job.id) == "queued"


@pytest.mark.slow
def test_auto_becomes_the_numbers_that_are_taken(tiny_run, tmp_path):
    """Who asks for these numbers gets the same training. A preview has told them before."""
    client = client_of(tmp_path, base=tiny_run)
    worker = worker_of(tmp_path)
    file_id = upload(client, lines(300))
    body = {"model": "base", "training_file": file_id, "seed": 1}
    told = client.post(f"{JOBS}/preview", json=body).json()

    def begun(hyperparameters) -> tuple[dict, list[str]]:
        """The job as it is shown once it has begun, and the settings of its training."""
        asked = body | {"hyperparameters": hyperparameters}
        job = Job(tmp_path / "jobs/jobs" / client.post(JOBS, json=asked).json()["id"])
        worker.look()
        shown = client.get(f"{JOBS}/{job.id}").json()
        client.post(f"{JOBS}/{job.id}/cancel")
        work(worker, client, job.id)
        settings = job.settings.read_text().replace(job.id, "").replace(job.run_dir.name, "")
        return shown, settings.splitlines()[1:]

    automatic, settings = begun({"batch_size": "auto"})
    taken = automatic["hyperparameters"]
    assert taken == automatic["method"]["supervised"]["hyperparameters"]
    assert all(type(value) in (int, float) for value in taken.values())
    assert begun(taken)[1] == settings
    some, _ = begun({"batch_size": 7})
    assert some["hyperparameters"]["batch_size"] == 7
    assert some["hyperparameters"]["learning_rate_multiplier"] == 1.0

    assert told["hyperparameters"] == taken and f"max_steps = {told['steps']}" in settings
    assert (told["examples"], told["held_out"], told["cut"], told["dropped"]) == (280, 20, 0, 0)


@pytest.mark.slow
def test_a_preview_of_a_job(tiny_run, tmp_path):
    client = client_of(tmp_path, base=tiny_run)
    here = os.listdir(tmp_path / "jobs/jobs")

    def preview(rows, **more) -> tuple[int, dict]:
        file_id = upload(client, json_lines(*rows).encode())
        body = {"model": "base", "training_file": file_id} | more
        answer = client.post(f"{JOBS}/preview", json=body)
        assert os.listdir(tmp_path / "jobs/jobs") == here
        return answer.status_code, answer.json()

    def row(n_prompt, n_response) -> dict:
        return {"prompt": "a" * n_prompt, "response": "b" * n_response}

    rows = [row(2, n) for n in (1, 5, 2, 3)]
    code, short = preview(rows, hyperparameters={"n_epochs": 3, "batch_size": 1})
    assert code == 200, short
    assert (short["examples"], short["held_out"], short["held_out_lines"]) == (3, 1, "line 4")
    assert (short["tokens"], short["longest"]) == (4 + 8 + 5, 8) and short["minutes"] is None

    rows[1:1] = [row(2, 40), row(30, 1)]
    _, long = preview(rows)
    counts = [long[name] for name in ("examples", "cut", "dropped", "longest", "row_tokens")]
    assert counts == [4, 1, 1, 24, 24]
    code, answer = preview([row(30, 1)] * 9)
    assert code == 400 and "nothing to learn" in answer["error"]["message"]
    assert preview(rows, model="other")[1]["error"]["param"] == "model"

    run_of(Job(tmp_path / "jobs/jobs" / created(client)), 10, 10)  # 40 rows a second
    here = os.listdir(tmp_path / "jobs/jobs")
    _, again = preview(rows)
    assert again["minutes"] == pytest.approx(again["steps"] * again["rows"] * 0.025 / 60)


@pytest.mark.slow
def test_the_preview_of_a_client_that_leaves_ends(place):
    """Others wait for it."""
    server = Served(place.folder, "--jobs=jobs", "--rows=4")
    body = json.dumps({"model": "run", "training_file": upload(place.client, lines(9))})
    head = f"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"

    def reading() -> list[int]:
        """The processes that read a file for a preview."""
        found = Path(f"/proc/{server.process.pid}/task").glob("*/children")
        pids = [int(pid) for file in found for pid in file.read_text().split()]
        return [pid for pid in pids if b"web.settings" in Path(f"/proc/{pid}/cmdline").read_bytes()]

    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(f"POST {JOBS}/preview HTTP/1.1\r\n{head}\r\n\r\n{body}".encode())
        wait_for(reading)
        (pid,) = reading()
        os.kill(pid, signal.SIGSTOP)  # as if its file was a large one
    try:
        wait_for(lambda: not reading())
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not os.listdir(place.folder / "jobs/jobs"))
    assert server.stop() == 0


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
    worker.postponed.clear()
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
    if len(numbers) <= LINES_SHOWN:
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
def test_the_commands_of_the_pages(tiny_run, tmp_path, monkeypatch):
    shutil.copytree(tiny_run, tmp_path / "runs/demo")
    (tmp_path / "keys.txt").write_text(KEY)
    pages = [(ROOT / "web" / name).read_text() for name in ("README.md", "finetuning.md")]
    blocks = re.findall(r"```sh\n(.*?)```", "".join(pages), re.DOTALL)
    commands = [shlex.split(line, comments=True) for line in whole_lines("".join(blocks))]
    (curl,) = (words for words in commands if words[0] == "curl")
    commands.remove(curl)
    for _, *words in commands:
        if words[:2] == ["serve.py", "runs/demo"]:
            server = Served(tmp_path, *words[2:], model="runs/demo")
            asked = [word.replace(":8000", f":{server.port}") for word in curl]
            if "--keys=keys.txt" not in words:
                done = subprocess.run(asked, capture_output=True, text=True)
                assert json.loads(done.stdout)["choices"], done
            assert server.stop() == 0
        elif "--slurm" in words:
            with monkeypatch.context() as here:
                here.setenv("PATH", "")
                here.chdir(tmp_path)
                assert "no sbatch here" in refusal(worker.main, words[2:])  # nothing else is wrong
        else:
            assert words[:2] == ["-m", "web.worker"]
            ended = Program(worker.main, [*words[2:], "--once"], tmp_path, tmp_path / "worker.log")
            assert ended.wait(PATIENCE) == 0
    assert len(commands) == 7


def whole_lines(text) -> list[str]:
    """The lines of a script; one that begins with a blank belongs to the one before."""
    return text.replace("\n  ", " ").splitlines()


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
def test_a_model_is_trained_on_paused_resumed_downloaded_and_deleted(place):
    server = Served(place.folder, "--jobs=jobs", "--rows=4")
    client = openai_client(server)
    place.worker()
    file_id = upload(place.client, lines(60))

    def train(model, **hyperparameters):
        form = {"type": "supervised", "supervised": {"hyperparameters": hyperparameters}}
        return client.fine_tuning.jobs.create(model=model, training_file=file_id, method=form)

    def ended(made) -> Job:
        job = Job(place.folder / "jobs/jobs" / made.id)
        wait_for(lambda: client.fine_tuning.jobs.retrieve(made.id).status == "succeeded")
        return job

    def held_out(job) -> list[float]:
        return [row["val_loss"] for row in runlog.read(job.run_dir) if "val_loss" in row]

    first = ended(train("run", n_epochs=4, learning_rate_multiplier=5.0))
    name = client.fine_tuning.jobs.retrieve(first.id).fine_tuned_model
    early = client.fine_tuning.jobs.checkpoints.list(first.id).data[-1]
    second = ended(train(name, n_epochs=1))
    third = ended(train(early.fine_tuned_model_checkpoint, n_epochs=1))
    assert held_out(second)[0] == pytest.approx(held_out(first)[-1], rel=1e-4)
    assert held_out(third)[0] == pytest.approx(early.metrics.full_valid_loss, rel=1e-4)
    assert starts(second) == starts(third) == [0]

    long = Job(place.folder / "jobs/jobs" / train(name, n_epochs=50, batch_size=1).id)
    wait_for(lambda: steps(long) >= 1)
    assert client.fine_tuning.jobs.pause(long.id).paused
    wait_for(lambda: long.state()["status"] == "paused")
    assert not pids_left(long)
    resumed = client.fine_tuning.jobs.resume(long.id)
    assert resumed.status == "queued" and not resumed.paused
    wait_for(lambda: len(starts(long)) == 2)
    assert starts(long)[1] > 0  # not that of the model it began with
    client.fine_tuning.jobs.cancel(long.id)
    assert client.fine_tuning.jobs.retrieve(long.id).hyperparameters.n_epochs == 50
    assert "resuming from" in server.request("GET", f"{JOBS}/{long.id}/log")[2]

    _, headers, _ = server.request("GET", f"/api/adapters/{name}/checkpoints/step-1")
    assert headers["content-type"] == "application/json"  # 404, as there is none
    address = f"http://127.0.0.1:{server.port}/api/adapters/{name}"
    with urllib.request.urlopen(address) as answer:
        zipfile.ZipFile(io.BytesIO(answer.read())).extractall(place.folder)
    adapter, trained = peft.read(place.folder / name), peft.adapter_at(first.run_dir)
    assert adapter.base == "run" and adapter.scale == trained.scale
    assert all(torch.equal(adapter.tensors[key], x) for key, x in trained.tensors.items())
    assert server.request("GET", "/api/adapters/run")[0] == 404

    page = (ROOT / "web/finetuning.md").read_text()
    _, block = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    known = {"client": client, "job": client.fine_tuning.jobs.retrieve(first.id)}
    known["upload"] = client.files.retrieve(file_id)
    for line in block.splitlines():
        exec(line, known)
        if "pause" in line:  # else its worker may be at it
            wait_for(
                lambda: Job(long.folder.parent / known["more"].id).state()["status"] == "paused"
            )
    assert client.fine_tuning.jobs.retrieve(known["more"].id).status == "cancelled"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model=name, prompt="x")
    assert name not in {model.id for model in client.models.list()}
    assert server.stop() == 0


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["pause", "cancel"])
def test_kill_9_of_the_worker_that_puts_a_job_to_rest(place, verb):
    """The next worker does so, and the job goes on where it was, once."""
    job = place.create(hyperparameters={"n_epochs": 20, "batch_size": 1})
    worker = place.worker()
    wait_for(lambda: steps(job) >= 2)
    (training,) = pids_left(job)
    os.kill(training, signal.SIGSTOP)  # so it cannot end yet
    assert place.client.post(f"{JOBS}/{job.id}/{verb}").status_code == 200
    worker.kill()
    worker.wait()
    assert place.client.post(f"{JOBS}/{job.id}/resume").status_code == 409
    assert place.client.delete(f"{JOBS}/{job.id}").status_code == 409
    place.worker()
    os.kill(training, signal.SIGCONT)
    wait_for(lambda: job.state()["status"] in ("paused", "cancelled"))
    assert not pids_left(job) and len(starts(job)) == 1
    assert place.client.post(f"{JOBS}/{job.id}/resume").json()["status"] == "queued"
    wait_for(lambda: status(place.client, job.id) == "succeeded")
    assert len(starts(job)) == 2 and starts(job)[1] > 0


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
