"""What the tests of files and jobs share: an application without a model, jobs, and workers.

client = client_of(tmp_path)              files and jobs as HTTP, in this process
upload(client, lines(20))                 the id of an upload
created(client)                           the id of a job
place.worker("--once")                    a worker as a process of its own
"""

import contextlib
import json
import os
import shutil
import signal
from pathlib import Path

from fastapi.testclient import TestClient
from launches import Program

from lifecycle import runlog
from serving.catalog import Catalog
from text import chat
from text import tokenizer as tokenizers
from web import app, worker
from web.completions import Service
from web.files import Finetuning
from web.jobs import Job

KEYS = ["a-key-of-the-tests-0001", "a-key-of-the-tests-0002"]


def client_of(
    folder, base="base", upload_bytes=8 * 2**20, key=KEYS[0], chat_template="", folders=None
):
    """A client of files and jobs in folder/jobs. base: the path of what is finetuned.

    folders: of runs to show.
    """
    finetuning = Finetuning(
        folder=folder / "jobs",
        base=str(base),
        chat_template=str(chat_template),
        upload_bytes=upload_bytes,
        worker="python -m web.worker jobs",
    )
    finetuning.make_folders()
    service = Service(
        Catalog("base", folder / "jobs/models", lambda path: None, lambda path, adapter: None),
        template=chat.load_template("", {}),
        tokenizer=tokenizers.load("bytes"),
        finetuning=finetuning,
    )
    guard = app.build(service, KEYS, [], 100, folders)
    headers = {"Authorization": f"Bearer {key}"}
    return TestClient(guard, headers=headers, raise_server_exceptions=False)


def lines(n, answer="abc") -> bytes:
    """Lines of a file to finetune on."""
    rows = [{"prompt": f"{number} ", "response": answer} for number in range(n)]
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def sent(client, content, name="my.jsonl", **fields):
    """The answer to an upload."""
    data = {"purpose": "fine-tune"} | fields
    return client.post("/v1/files", data=data, files={"file": (name, content)})


def pids_left(job) -> list[int]:
    """The ranks of a job that live, whoever has started them: trainings that have its lock open."""
    found = set()
    for file in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):  # it has ended, or is somebody else's
            has_lock = os.path.samestat(os.stat(file), os.stat(job.folder / "lock"))
            if has_lock and b"fsdp_train.py" in (file.parent.parent / "cmdline").read_bytes():
                found.add(int(file.parts[2]))
    return sorted(found)


def end_trainings(folder) -> None:
    """Kill what trains in folder/jobs, whoever has started it."""
    for job in map(Job, (folder / "jobs/jobs").glob("ftjob-*")):
        for pid in pids_left(job):
            os.kill(pid, signal.SIGKILL)


def upload(client, content) -> str:
    """The id of an upload."""
    answer = sent(client, content)
    assert answer.status_code == 200, answer.text
    return answer.json()["id"]


# --- Jobs

JOBS = "/v1/fine_tuning/jobs"
QUICK = {"n_epochs": 1, "batch_size": 64}
LONG = {"n_epochs": 50, "batch_size": 1}  # minutes


def created(client, hyperparameters=QUICK, content=None, **more) -> str:
    """The id of a new job."""
    file_id = upload(client, content or lines(20))
    body = {"model": "base", "training_file": file_id, "hyperparameters": hyperparameters}
    answer = client.post(JOBS, json=body | more)
    assert answer.status_code == 200, answer.text
    return answer.json()["id"]


def messages(client, job_id) -> list[str]:
    """The events of a job but for metrics, oldest first."""
    events = client.get(f"{JOBS}/{job_id}/events?limit=1000").json()["data"]
    return [event["message"] for event in events[::-1] if event["type"] == "message"]


def status(client, job_id) -> str:
    return client.get(f"{JOBS}/{job_id}").json()["status"]


def set_settings(tmp_path, job_id, text) -> None:
    """Let fsdp_train.py run this config file as the training of a job."""
    (tmp_path / "jobs/jobs" / job_id / "settings.py").write_text(text)


def steps(job) -> int:
    """The steps that a training has done."""
    if not (job.run_dir / "metrics.jsonl").exists():
        return 0
    return max((row["step"] for row in runlog.read(job.run_dir)), default=0)


def starts(job) -> list[int]:
    """The first step of each launch of a training."""
    return [launch["first_step"] for launch in runlog.read_launches(job.run_dir)]


# --- Workers


class Place:
    """A folder with a base `run`, jobs as HTTP in this process, and workers."""

    def __init__(self, tiny_run, folder):
        shutil.copytree(tiny_run, folder / "run")
        self.folder = folder
        self.client = client_of(folder, base=folder / "run")
        self.workers = []

    def worker(self, *flags) -> Program:
        """Start a worker."""
        flags = ["jobs", "--poll_seconds=0.05", *flags]
        self.workers.append(Program(worker.main, flags, self.folder, self.folder / "worker.log"))
        return self.workers[-1]

    def create(self, settings=None, **asked) -> Job:
        """A new job. settings: the config file that it runs, if it is not to train."""
        job = Job(self.folder / "jobs/jobs" / created(self.client, **asked))
        if settings:
            set_settings(self.folder, job.id, settings)
        return job

    def __enter__(self):
        return self

    def __exit__(self, *error) -> None:
        """Nothing is left running."""
        for process in self.workers:
            process.kill()
            process.wait()
        end_trainings(self.folder)
