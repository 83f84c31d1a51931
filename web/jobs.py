"""Finetuning jobs: their folders, and OpenAI's endpoints about them.

    JOBS/jobs/ID/job.json      what was asked; never changed
    JOBS/jobs/ID/state.json    how far it is; written by the worker that has claimed the job
    JOBS/jobs/ID/cancel        somebody wants it to end; written by the server
    JOBS/jobs/ID/events.jsonl  what has happened, a line each
    JOBS/jobs/ID/lock          locked by who works on it: the worker, and the training it has started
    JOBS/jobs/ID/settings.py   the settings of the training, for fsdp_train.py
    JOBS/jobs/ID/data.jsonl    its lines, held-out ones among them; tokens/ has their tokens
    JOBS/jobs/ID/log.txt       what the training has printed
    JOBS/models/NAME/          the training's run folder, which is served as NAME once it has finished

The server writes a job's folder and reads it; web/worker.py does the rest. Neither needs the other
to be alive.

Losses and progress are events as well. They are not copied: the server reads them from the
metrics of the run folder (lifecycle/runlog.py).
"""

import json
import os
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from program import UserError
from storage import files

ENDED = ("succeeded", "failed", "cancelled")
ASKED = {  # the fields of job.json
    "model": str,
    "base": str,
    "chat_template": str,
    "training_file": str,
    "validation_file": (str, type(None)),
    "suffix": (str, type(None)),
    "seed": int,
    "hyperparameters": dict,
    "metadata": (dict, type(None)),
    "fine_tuned_model": str,
    "owner": str,
}
STATE = {"status": str, "deaths": int, "restarts": int}
NEW_STATE = {"status": "queued", "deaths": 0, "restarts": 0}


# --------------------------------------------------------------------------------------------------
# The folder of a job


@dataclass(frozen=True)
class Job:
    """A job's folder. Its name is the job's id, and begins with the time at which it was created."""

    folder: Path

    @property
    def id(self) -> str:
        """Its id; also the name of its job in SLURM."""
        return self.folder.name

    @property
    def created_at(self) -> int:
        """Unix seconds."""
        return created_at(self.id)

    @cached_property
    def asked(self) -> dict:
        """What was asked. UserError if that is damaged."""
        return files.read_json(self.folder / "job.json", fields=ASKED)

    @property
    def run_dir(self) -> Path:
        """The run folder of its training. UserError if job.json is damaged."""
        models = self.folder.parent.parent / "models"
        return files.member(models, self.asked["fine_tuned_model"], self.folder / "job.json")

    @property
    def log(self) -> Path:
        """What the training has printed."""
        return self.folder / "log.txt"

    @property
    def settings(self) -> Path:
        """The config file of the training."""
        return self.folder / "settings.py"

    @property
    def is_cancelled(self) -> bool:
        """Does somebody want it to end?"""
        return (self.folder / "cancel").exists()

    def state(self) -> dict:
        """How far it is. UserError if that is damaged."""
        try:
            return NEW_STATE | files.read_json(self.folder / "state.json", fields=STATE)
        except FileNotFoundError:
            return dict(NEW_STATE)

    def write_state(self, **changes) -> None:
        """Change some values of the state."""
        try:
            state = self.state()
        except UserError:
            state = dict(NEW_STATE)
        files.write_atomically(
            self.folder / "state.json", json.dumps(state | changes, indent=2).encode()
        )

    def add_event(self, message: str, level: str = "info") -> None:
        """Add a line to events.jsonl. Several processes may do so at the same time."""
        event = {"created_at": int(time.time()), "level": level, "message": message}
        line = json.dumps(event).encode() + b"\n"
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
        file = os.open(self.folder / "events.jsonl", flags, 0o644)
        try:
            os.write(file, line)
        finally:
            os.close(file)


def created_at(name: str) -> int:
    """The Unix seconds in an id, such as ftjob-18b2f1d2a3c4e5f6ab12cd34."""
    return int(name.rpartition("-")[2][:16], 16) // 10**9
