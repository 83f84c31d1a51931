"""Finetuning jobs: their folders, and OpenAI's endpoints about them.

    JOBS/jobs/ID/job.json      what was asked; never changed
    JOBS/jobs/ID/state.json    how far it is; written by the worker that has claimed the job
    JOBS/jobs/ID/cancel        somebody wants it to end; written by the server
    JOBS/jobs/ID/events.jsonl  what has happened, a line each
    JOBS/jobs/ID/lock          locked by those who work on it: the worker, and its training
    JOBS/jobs/ID/settings.py   the settings of the training, for fsdp_train.py
    JOBS/jobs/ID/data.jsonl    its lines, held-out ones among them; tokens/ has their tokens
    JOBS/jobs/ID/log.txt       what the training has printed
    JOBS/models/NAME/          the training's run folder, served as NAME once it has finished

The server writes a job's folder and reads it; web/worker.py does the rest. Neither needs the other
to be alive.

    JOBS/heartbeat             touched by each worker every few seconds

Losses are no events: web/runs.py shows the curve of the run folder.
"""

import bisect
import contextlib
import json
import math
import os
import random
import re
import secrets
import shutil
import statistics
import threading
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

from fastapi import FastAPI, Query
from fastapi import Request as HttpRequest
from pydantic import BaseModel, ConfigDict, Field

import checkpoint
from lifecycle import runlog
from program import UserError, one_line
from serving.catalog import is_finished
from storage import files
from web.files import META, Finetuning, created_at, ids_in, new_id, on_disk, page_of, place
from web.runs import Columns, Runs
from web.shapes import ApiError, NotSupported, Number, as_json, public

BEAT_SECONDS = 5.0  # between two touches of the heartbeat
MOST_BEATS = 4  # without which no worker is there
MOST_JOBS = 4  # of a key, waiting or running
FEWEST_LINES = 2  # one to learn, one held out
Limit = Annotated[int, Query(ge=1, le=1000)]
ShortText = Annotated[str, Field(max_length=64)]
LongText = Annotated[str, Field(max_length=512)]
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
STATE = {"status": str}
# attempts: starts of its training since its last checkpoint, which had last_step.
NEW_STATE = {"status": "queued", "attempts": 0, "last_step": -1}


# --------------------------------------------------------------------------------------------------
# The folder of a job


@dataclass(frozen=True)
class Job:
    """A job's folder, whose name is the job's id."""

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

    @property
    def is_finished(self) -> bool:
        """Has its training done its last step? Then its model is served. UserError or OSError."""
        newest = checkpoint.latest(self.run_dir)
        with contextlib.suppress(UserError):  # a damaged checkpoint is none
            return bool(newest and is_finished(newest))
        return False

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
        event = {"created_at": time.time(), "level": level, "message": message}
        line = json.dumps(event).encode() + b"\n"
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
        file = os.open(self.folder / "events.jsonl", flags, 0o644)
        try:
            size = os.fstat(file).st_size
            is_cut_off = size and os.pread(file, 1, size - 1) != b"\n"  # by a full disk
            os.write(file, b"\n" + line if is_cut_off else line)
        finally:
            os.close(file)


# --------------------------------------------------------------------------------------------------
# Requests


class Hyperparameters(BaseModel):
    """How long and how fast to learn. `auto`: see web/worker.py::batch_settings."""

    model_config = ConfigDict(strict=True, extra="forbid")

    n_epochs: Literal["auto"] | Annotated[int, Field(ge=1, le=50)] = "auto"
    batch_size: Literal["auto"] | Annotated[int, Field(ge=1, le=1024)] = "auto"  # of examples
    learning_rate_multiplier: Literal["auto"] | Annotated[Number, Field(ge=1e-4, le=100)] = "auto"


class Supervised(BaseModel):
    """The settings of the only method that is built."""

    model_config = ConfigDict(strict=True, extra="forbid")

    hyperparameters: Hyperparameters | None = None


class Method(BaseModel):
    """How to finetune."""

    model_config = ConfigDict(strict=True, extra="forbid")

    type: Literal["supervised"]
    supervised: Supervised | None = None
    dpo: NotSupported = None
    reinforcement: NotSupported = None


class JobRequest(BaseModel):
    """What to finetune, and on what."""

    model_config = ConfigDict(strict=True, extra="forbid")

    model: str
    training_file: str
    validation_file: str | None = None
    suffix: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,40}$")] | None = None  # of a folder
    seed: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    hyperparameters: Hyperparameters | None = None
    method: Method | None = None
    metadata: Annotated[dict[ShortText, LongText], Field(max_length=16)] | None = None
    integrations: NotSupported = None

    @property
    def chosen(self) -> dict:
        """The hyperparameters; those of the method come first."""
        supervised = self.method and self.method.supervised
        of_method = supervised and supervised.hyperparameters
        return (of_method or self.hyperparameters or Hyperparameters()).model_dump()


# --------------------------------------------------------------------------------------------------
# Endpoints


def add_jobs(app: FastAPI, service) -> None:
    """OpenAI's endpoints about finetuning jobs. service: see web/completions.py."""
    finetuning = service.finetuning
    folder = finetuning.folder / "jobs"
    one_at_a_time = threading.Lock()  # so that the jobs of a key are counted right
    runs = Runs({})  # clients ask every second: what is new in a file is read

    def shown(job: Job) -> dict:
        found = job_object(job, runs)
        if found["status"] not in ENDED and (absence := absence_of_workers(finetuning)):
            found |= {"hint": absence, "estimated_finish": None}
        if found["fine_tuned_model"]:
            service.catalog.look(found["fine_tuned_model"])  # then it is in the list of models
        return found

    @app.post("/v1/fine_tuning/jobs")
    def create(body: JobRequest, http: HttpRequest):
        """Create a job, which a worker will take."""
        check(body, service, finetuning)
        owner = http.scope["state"].get("owner", "")
        with on_disk(), one_at_a_time:
            finetuning.make_folders()
            require_few(folder, owner)
            return as_json(shown(new_job(body, finetuning, owner)))

    @app.get("/v1/fine_tuning/jobs")
    def listed(http: HttpRequest, after: str | None = None, limit: Limit = 20):
        """The jobs, the newest first. `metadata[KEY]=VALUE`: only those that have it."""
        given = http.query_params.items()
        wanted = {key[9:-1]: value for key, value in given if key.startswith("metadata[")}
        with on_disk():
            names = ids_in(folder, "ftjob")[::-1]
            if wanted:
                names = [name for name in names if has_metadata(Job(folder / name), wanted)]
            return as_json(page_of(names, after, limit, lambda name: shown(Job(folder / name))))

    @app.get("/v1/fine_tuning/jobs/{job_id}")
    def retrieve(job_id: str):
        """How far a job is."""
        with on_disk():
            return as_json(shown(Job(place(folder, job_id, "ftjob"))))

    @app.post("/v1/fine_tuning/jobs/{job_id}/cancel")
    def cancel(job_id: str):
        """End a job. Its worker does that within a second, if there is one."""
        job = Job(place(folder, job_id, "ftjob"))
        with on_disk():
            status = status_of(job)["status"]
            if status in ("succeeded", "failed"):
                raise ApiError(400, f"the job has ended already: it has {status}")
            if status != "cancelled":
                if job.is_finished:
                    raise ApiError(400, "the job has ended already: its training has finished")
                (job.folder / "cancel").touch()
                job.add_event("The job is cancelled by request")
            return as_json(shown(job))

    add_history(app, folder, runs)


def add_history(app: FastAPI, folder: Path, runs: Runs) -> None:
    """The endpoints about what a job has done."""

    @app.get("/v1/fine_tuning/jobs/{job_id}/events")
    def events(job_id: str, after: str | None = None, limit: Limit = 20):
        """What has happened, the newest first."""
        with on_disk():
            found = events_of(Job(place(folder, job_id, "ftjob")))
            return as_json(page_of(found[::-1], after, limit))

    @app.get("/v1/fine_tuning/jobs/{job_id}/checkpoints")
    def checkpoints(job_id: str, after: str | None = None, limit: Limit = 10):
        """The checkpoints that are kept, the newest first: models, whose names can be asked."""
        with on_disk():
            found = checkpoints_of(Job(place(folder, job_id, "ftjob")), runs)
            return as_json(page_of(found[::-1], after, limit))


def check(body: JobRequest, service, finetuning: Finetuning) -> None:
    """ApiError for a job that cannot be done."""
    base = service.catalog.base
    if body.model != base:
        problem = f"only the base can be finetuned: set model to {base!r}"
        raise ApiError(400, problem, param="model", code="model_not_found")
    for name in ("training_file", "validation_file"):
        file_id = getattr(body, name)
        if file_id is None:
            continue
        try:
            path = place(finetuning.folder / "files", file_id, "file")
            n_lines = files.read_json(path / "meta.json", fields=META)["lines"]
        except (ApiError, UserError, OSError) as error:
            raise ApiError(400, f"{name}: there is no file {file_id[:100]!r}", name) from error
        if name == "training_file" and n_lines < FEWEST_LINES:
            few = f"{name} has {n_lines} line, and one is held out: upload {FEWEST_LINES} or more"
            raise ApiError(400, few, param=name)


def has_metadata(job: Job, wanted: dict[str, str]) -> bool:
    """Has a job this metadata, among other ones?"""
    with contextlib.suppress(UserError, OSError):
        return wanted.items() <= (job.asked["metadata"] or {}).items()
    return False


def absence_of_workers(finetuning: Finetuning) -> str:
    """That no worker is there, since when, and how to start one; "" if there is one."""
    seen_at = 0.0
    with contextlib.suppress(OSError):
        seen_at = (finetuning.folder / "heartbeat").stat().st_mtime
    if time.time() - seen_at < MOST_BEATS * BEAT_SECONDS:
        return ""
    since = time.strftime("since %Y-%m-%d %H:%M:%S UTC", time.gmtime(seen_at))
    return f"No worker {since if seen_at else 'yet'}: {finetuning.worker}"


def require_few(folder: Path, owner: str) -> None:
    """ApiError if a key has too many jobs."""
    n_jobs = 0
    for name in ids_in(folder, "ftjob"):
        with contextlib.suppress(UserError, OSError):
            job = Job(folder / name)
            n_jobs += status_of(job)["status"] not in ENDED and job.asked["owner"] == owner
    if n_jobs >= MOST_JOBS:
        fix = "wait for one to end, or cancel it"
        raise ApiError(429, f"{n_jobs} jobs of yours wait or run: {fix}", retry_after=60)


def new_job(body: JobRequest, finetuning: Finetuning, owner: str) -> Job:
    """Make the folder of a job: all of it, or nothing."""
    name = new_id("ftjob")
    base = re.sub(r"[^A-Za-z0-9._-]+", "-", body.model)[:60]
    parts = ["ft", base, body.suffix, secrets.token_hex(4)]
    asked = {
        "model": body.model,
        "base": finetuning.base,
        "chat_template": finetuning.chat_template,
        "training_file": body.training_file,
        "validation_file": body.validation_file,
        "suffix": body.suffix,
        "seed": random.SystemRandom().randrange(2**31) if body.seed is None else body.seed,
        "hyperparameters": body.chosen,
        "metadata": body.metadata,
        "fine_tuned_model": "-".join(filter(None, parts)),
        "owner": owner,
    }
    folder = finetuning.folder / "jobs"
    temporary = folder / f".{name}.tmp"
    try:
        temporary.mkdir()
        files.write_atomically(temporary / "job.json", json.dumps(asked, indent=2).encode())
        Job(temporary).add_event("The job waits for a worker")
        temporary.rename(folder / name)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return Job(folder / name)


# --------------------------------------------------------------------------------------------------
# Answers


def status_of(job: Job) -> dict:
    """The state of a job as clients see it.

    A job that was cancelled too late, after the last step of its training, will succeed.
    """
    try:
        state = job.state()
        _ = job.asked
    except (UserError, OSError) as error:
        fault = {"code": "damaged", "message": one_line(error), "param": None}
        return NEW_STATE | {"status": "failed", "error": fault, "finished_at": job.created_at}
    with contextlib.suppress(UserError, OSError):
        cancelled_at = int((job.folder / "cancel").stat().st_mtime)
        if state["status"] not in ENDED and not job.is_finished:
            state |= {"status": "cancelled", "error": None, "finished_at": cancelled_at}
    return state


def job_object(job: Job, runs: Runs) -> dict:
    """A job as OpenAI's API shows it. Of a damaged one, what is left."""
    state = status_of(job)
    nothing = dict.fromkeys(("suffix", "validation_file", "metadata"))
    asked = nothing | {"model": "unknown", "training_file": "unknown", "seed": 0}
    with contextlib.suppress(UserError, OSError):
        asked = job.asked
    status = state["status"]
    chosen = asked.get("hyperparameters", {})
    return {
        "id": job.id,
        "object": "fine_tuning.job",
        "created_at": job.created_at,
        "finished_at": state.get("finished_at") if status in ENDED else None,
        "estimated_finish": None,
        "model": asked["model"],
        "fine_tuned_model": asked["fine_tuned_model"] if status == "succeeded" else None,
        "organization_id": "mpt",
        "result_files": [],
        "status": status,
        "error": public(state.get("error")),
        "training_file": asked["training_file"],
        "validation_file": asked["validation_file"],
        "trained_tokens": state.get("trained_tokens") if status == "succeeded" else None,
        "seed": asked["seed"],
        "hyperparameters": chosen,
        "method": {"type": "supervised", "supervised": {"hyperparameters": chosen}},
        "metadata": asked["metadata"],
        "integrations": [],
        "run": run_of(job),
        **(progress_of(job, runs) if status == "running" else {}),
    }


def run_of(job: Job) -> str | None:
    """The name of its training in /api/runs; None before it begins."""
    with contextlib.suppress(UserError, OSError):
        return f"jobs/{job.run_dir.name}" if job.run_dir.is_dir() else None
    return None


@contextlib.contextmanager
def metrics_of(job: Job, runs: Runs):
    """The columns of a job's metrics, and the number of its steps; nothing before it trains."""
    n_steps = 0
    with contextlib.suppress(UserError, OSError):
        n_steps = runlog.read_settings(job.run_dir)["max_steps"]
    with runs.curve_lock:
        yield runs.read(job.run_dir) if n_steps else Columns(Path()), n_steps


def progress_of(job: Job, runs: Runs) -> dict:
    """How far a training is, and when it will end; nothing before its first step.

    The end is counted from the last step: of a training that stands still it does not move. None if
    it is late.
    """
    with metrics_of(job, runs) as (columns, n_steps), contextlib.suppress(UserError, OSError):
        seconds = [
            passed for passed in columns.metrics.steps["seconds"][-100:] if math.isfinite(passed)
        ]
        if seconds:
            step = columns.steps[-1]
            written_at = (job.run_dir / "metrics.jsonl").stat().st_mtime
            finish = written_at + (n_steps - step) * statistics.median(seconds)
            is_known = time.time() < finish < math.inf
            return {
                "progress": {"step": step, "total_steps": n_steps},
                "estimated_finish": int(finish) if is_known else None,
            }
    return {}


def events_of(job: Job) -> list[dict]:
    """The events of a job, oldest first: the lines of events.jsonl."""
    rows = []
    fields = {"created_at": float, "level": str, "message": str}
    with contextlib.suppress(UserError, OSError):
        rows, _ = files.read_json_lines(job.folder / "events.jsonl", fields, appended=True)
    return [
        {
            "id": f"ftevent-{job.id.removeprefix('ftjob-')}-{number:06}",
            "object": "fine_tuning.job.event",
            "created_at": int(row["created_at"]),
            "level": row["level"],
            "message": public(row["message"]),
            "type": "message",
            "data": None,
        }
        for number, row in enumerate(rows)
        if math.isfinite(row["created_at"])
    ]


def loss_at(columns: Columns, step: int) -> float | None:
    """The training loss of a step; None if it has none."""
    place = bisect.bisect_left(columns.steps, step)
    if place == len(columns.steps) or columns.steps[place] != step:
        return None
    return float(f"{columns.metrics.steps['loss'][place]:.7g}")


def checkpoints_of(job: Job, runs: Runs) -> list[dict]:
    """The checkpoints of a job, oldest first. Each name is a model: see serving/catalog.py."""
    found = []
    with metrics_of(job, runs) as (columns, n_steps), contextlib.suppress(UserError, OSError):
        held_out = dict(zip(*columns.metrics.validation(), strict=True))
        name = job.asked["fine_tuned_model"]
        for path in checkpoint.complete(job.run_dir / "checkpoints"):
            step = checkpoint.number(path)
            part = "" if step == n_steps else f"/checkpoints/step-{step}"
            found.append(
                {
                    "id": f"ftckpt-{job.id.removeprefix('ftjob-')}-{step}",
                    "object": "fine_tuning.job.checkpoint",
                    "created_at": int(path.stat().st_mtime),
                    "fine_tuning_job_id": job.id,
                    "fine_tuned_model_checkpoint": name + part,
                    "step_number": step,
                    "metrics": {
                        "step": step,
                        "train_loss": loss_at(columns, step),
                        "valid_loss": held_out.get(step),
                        "full_valid_loss": held_out.get(step),
                    },
                }
            )
    return found
