"""What the tests of files and jobs share: an application without a model, and lines to learn.

client = client_of(tmp_path)              files and jobs as HTTP, in this process
upload(client, lines(20))                 the id of an upload
"""

import contextlib
import json
import os
import signal
from pathlib import Path

from fastapi.testclient import TestClient

from serving.catalog import Catalog
from text import chat
from text import tokenizer as tokenizers
from web import app
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
        Catalog("base", folder / "jobs/models", read=lambda path: None, check=None),
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
