"""Finetuning jobs: their folders, and OpenAI's endpoints about them.

    JOBS/jobs/ID/job.json      what was asked; never changed
    JOBS/jobs/ID/state.json    how far it is; written by the worker that has claimed the job
    JOBS/jobs/ID/cancel        somebody wants it to end; written by the server
    JOBS/jobs/ID/pause         somebody wants it to stand still; written by the server
    JOBS/jobs/ID/events.jsonl  what has happened, a line each
    JOBS/jobs/ID/lock          locked by those who work on it: the worker, and its training
    JOBS/jobs/ID/settings.py   the settings of the training, for fsdp_train.py
    JOBS/jobs/ID/data.jsonl    its lines, held-out ones among them; tokens/ has their tokens
    JOBS/jobs/ID/log.txt       what the training has printed
    JOBS/models/NAME/          the training's run folder, served as NAME once it has finished

The server writes a job's folder and reads it; web/worker.py does the rest. Neither needs the other
to be alive. Only who has the lock changes state.json. The server takes it to resume or delete a
job, so nobody works on the job meanwhile.

    JOBS/heartbeat             touched by each worker every few seconds

Losses are no events: web/runs.py shows the curve of the run folder.
"""

import asyncio
import bisect
import contextlib
import fcntl
import json
import math
import os
import random
import re
import secrets
import shutil
import statistics
import tempfile
import threading
import time
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Literal

from fastapi import FastAPI, Query
from fastapi import Request as HttpRequest
from fastapi.responses import PlainTextResponse
from pydantic import BaseModel, ConfigDict, Field

import checkpoint
from lifecycle import runlog
from program import UserError, one_line
from serving.catalog import is_finished
from storage import files
from storage.files import open_regular
from web.completions import unless_left
from web.files import (
    META,
    Finetuning,
    answer_apart,
    created_at,
    ids_in,
    is_folder,
    new_id,
    on_disk,
    page_of,
    place,
)
from web.runs import Columns, Runs
from web.shapes import ApiError, NotSupported, Number, as_json, public, unknown_model

BEAT_SECONDS = 5.0  # between two touches of the heartbeat
MOST_BEATS = 4  # without which no worker is there
MOST_JOBS = 4  # of a key, waiting or running
MOST_LOOKED_AT = 20  # jobs, for how long another one may take
TAIL_BYTES = 2**16  # of a log or of events, which are read at once
FEWEST_LINES = 2  # one to learn, one held out
MODEL = re.compile(r"ft-[^/]*-[0-9a-f]{8}")  # the name of one: see `asked_of`
Limit = Annotated[int, Query(ge=1, le=1000)]
ShortText = Annotated[str, Field(max_length=64)]
LongText = Annotated[str, Field(max_length=512)]
ENDED = ("succeeded", "failed", "cancelled")
AT_REST = (*ENDED, "paused")  # no worker takes it before it is resumed
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
    def wants_rest(self) -> bool:
        """Does somebody want it to end or to stand still?"""
        return self.is_cancelled or (self.folder / "pause").exists()

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

    def lock(self) -> int | None:
        """Lock it, for who works on it. The open file; None if another one has it. OSError."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        file = os.open(self.folder / "lock", flags, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            return None
        return file

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
    """How long and how fast to learn. `auto`: see web/settings.py::batch_settings."""

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
    shown = partial(shown_job, service=service, runs=runs)

    @app.post("/v1/fine_tuning/jobs")
    def create(body: JobRequest, http: HttpRequest):
        """Create a job, which a worker will take."""
        start = check(body, service, finetuning)
        owner = http.scope["state"].get("owner", "")
        with on_disk(), one_at_a_time:
            finetuning.make_folders()
            require_few(folder, owner)
            return as_json(shown(new_job(asked_of(body, service, start, owner), finetuning)))

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

    add_changes(app, folder, shown, one_at_a_time)
    add_preview(app, service, runs)
    add_history(app, folder, runs)


def shown_job(job: Job, service, runs: Runs) -> dict:
    """A job as clients see it, with a hint if nobody works on it."""
    found = job_object(job, runs)
    rests = found["status"] in ENDED or found["paused"]
    if not rests and (absence := absence_of_workers(service.finetuning)):
        found |= {"hint": absence, "estimated_finish": None}
    if found["fine_tuned_model"]:
        service.catalog.look(found["fine_tuned_model"])  # then it is in the list of models
    return found


def add_changes(app: FastAPI, folder: Path, shown, one_at_a_time: threading.Lock) -> None:
    """The endpoints that stop a job, let it go on, or delete it."""

    @app.post("/v1/fine_tuning/jobs/{job_id}/cancel")
    def cancel(job_id: str):
        """End a job. Its worker does that within a second, if there is one."""
        return put_to_rest(job_id, "cancel", "The job is cancelled by request")

    @app.post("/v1/fine_tuning/jobs/{job_id}/pause")
    def pause(job_id: str):
        """Let a job stand still, until it is resumed: as soon as its training has saved."""
        return put_to_rest(job_id, "pause", "The job is paused by request")

    def put_to_rest(job_id: str, mark: str, words: str):
        job = Job(place(folder, job_id, "ftjob"))
        with on_disk():
            status = status_of(job)["status"]
            is_again = (job.folder / mark).exists()
            if status in ENDED and (mark, status) != ("cancel", "cancelled"):
                raise ApiError(400, f"the job has ended already: it has {status}")
            if not is_again:
                if job.is_finished:
                    raise ApiError(400, "the job has ended already: its training has finished")
                (job.folder / mark).touch()
                job.add_event(words)
            return as_json(shown(job))

    @app.post("/v1/fine_tuning/jobs/{job_id}/resume")
    def resume(job_id: str):
        """Let a job that is paused, failed or cancelled go on from its last checkpoint."""
        job = Job(place(folder, job_id, "ftjob"))
        rests = ("paused", "failed", "cancelled")
        with on_disk(), one_at_a_time:
            with locked(job, rests, "the job is not paused, failed or cancelled"):
                with contextlib.suppress(UserError):  # a damaged one fails once more
                    require_few(folder, job.asked["owner"])
                resume_job(job)
            return as_json(shown(job))

    @app.delete("/v1/fine_tuning/jobs/{job_id}")
    def delete(job_id: str):
        """Delete a job that has ended or is paused. The model of one that has succeeded stays."""
        job = Job(place(folder, job_id, "ftjob"))
        with on_disk(), locked(job, AT_REST, "the job waits or runs: cancel it first"):
            delete_job(job)
        return {"id": job_id, "object": "fine_tuning.job", "deleted": True}


def add_preview(app: FastAPI, service, runs: Runs) -> None:
    """The endpoint that tells what a job would come to."""
    finetuning = service.finetuning
    one_at_a_time = asyncio.Lock()  # each takes a processor

    @app.post("/v1/fine_tuning/jobs/preview")
    async def preview(body: JobRequest, http: HttpRequest):
        """What a job would come to: examples, tokens, steps, minutes. Takes what `create` takes."""
        return await unless_left(http, answer(body))

    async def answer(body: JobRequest):
        start = await asyncio.to_thread(check, body, service, finetuning)
        async with one_at_a_time:
            with on_disk():
                finetuning.make_folders()
                unseen = {"prefix": ".", "suffix": ".tmp", "dir": finetuning.folder / "jobs"}
                with tempfile.TemporaryDirectory(**unseen) as folder:
                    asked = asked_of(body, service, start, "")
                    Path(folder, "job.json").write_text(json.dumps(asked))
                    found = await answer_apart("web.settings", [folder], "training_file")
        if problem := found.get("problem"):
            raise ApiError(400, public(problem), param="training_file")
        found["minutes"] = await asyncio.to_thread(minutes_of, found, finetuning, runs)
        return as_json(found)


def add_history(app: FastAPI, folder: Path, runs: Runs) -> None:
    """The endpoints about what a job has done."""

    @app.get("/v1/fine_tuning/jobs/{job_id}/events")
    def events(job_id: str, after: str | None = None, limit: Limit = 20):
        """What has happened, the newest first."""
        with on_disk():
            return as_json(events_of(Job(place(folder, job_id, "ftjob")), after, limit))

    @app.get("/v1/fine_tuning/jobs/{job_id}/log", response_class=PlainTextResponse)
    def log(job_id: str):
        """The last lines that its training has printed, of at most 64 KiB."""
        path = Job(place(folder, job_id, "ftjob")).log
        text = ""
        with contextlib.suppress(UserError, OSError), open_regular(path) as file:
            begin = max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES)
            file.seek(begin)
            text = file.read(TAIL_BYTES).decode(errors="replace")
        return public(text.partition("\n")[2] if text and begin else text)

    @app.get("/v1/fine_tuning/jobs/{job_id}/checkpoints")
    def checkpoints(job_id: str, after: str | None = None, limit: Limit = 10):
        """The checkpoints that are kept, the newest first: models, whose names can be asked."""
        with on_disk():
            found = checkpoints_of(Job(place(folder, job_id, "ftjob")), runs)
            return as_json(page_of(found[::-1], after, limit))


def check(body: JobRequest, service, finetuning: Finetuning) -> str:
    """The adapter that a job begins with, "" for a new one. ApiError if it cannot be done."""
    try:
        start = service.catalog.find(body.model).path
    except UserError as error:
        problem = public(str(error))
        raise ApiError(400, problem, param="model", code="model_not_found") from error
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
    return start


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
            n_jobs += status_of(job)["status"] not in AT_REST and job.asked["owner"] == owner
    if n_jobs >= MOST_JOBS:
        fix = "wait for one to end, or cancel it"
        raise ApiError(429, f"{n_jobs} jobs of yours wait or run: {fix}", retry_after=60)


def asked_of(body: JobRequest, service, start: str, owner: str) -> dict:
    """The content of job.json. start: see `check`."""
    base = re.sub(r"[^A-Za-z0-9._-]+", "-", service.catalog.base)[:60]
    parts = ["ft", base, body.suffix, secrets.token_hex(4)]
    return {
        "model": body.model,
        "base": service.finetuning.base,
        "start": start,
        "chat_template": service.finetuning.chat_template,
        "training_file": body.training_file,
        "validation_file": body.validation_file,
        "suffix": body.suffix,
        "seed": random.SystemRandom().randrange(2**31) if body.seed is None else body.seed,
        "hyperparameters": body.chosen,
        "metadata": body.metadata,
        "fine_tuned_model": "-".join(filter(None, parts)),
        "owner": owner,
    }


def new_job(asked: dict, finetuning: Finetuning) -> Job:
    """Make the folder of a job: all of it, or nothing."""
    name = new_id("ftjob")
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


@contextlib.contextmanager
def locked(job: Job, statuses: tuple, problem: str):
    """While this block runs, no worker takes the job. ApiError if one has it, or its training.

    statuses: that it may have; problem: for one that has another.
    """
    file = job.lock()
    try:
        if status_of(job)["status"] not in statuses:
            raise ApiError(400, problem)
        if file is None:
            raise ApiError(409, "its training has not ended yet: try again once it has")
        yield
    finally:
        if file is not None:
            os.close(file)


def resume_job(job: Job) -> None:
    """Let a job at rest wait for a worker again. It is locked.

    If this is interrupted, the job still rests: the marks go first.
    """
    for mark in ("pause", "cancel"):
        (job.folder / mark).unlink(missing_ok=True)
    fresh = {"attempts": 0, "is_late": False, "error": None, "finished_at": None}
    with contextlib.suppress(UserError):  # a damaged one is replaced
        if job.state()["status"] not in AT_REST:  # no worker has stopped it yet
            fresh["status"] = job.state()["status"]
    job.write_state(**{"status": "queued"} | fresh)
    job.add_event("The job is resumed by request: it waits for a worker")


def delete_job(job: Job) -> None:
    """Delete a job at rest. It is locked. The model of one that has succeeded stays."""
    with contextlib.suppress(UserError):  # raised by a damaged state.json
        if job.state()["status"] == "running":  # SLURM may train it without a worker
            raise ApiError(409, "a worker has to end its training first: start one")
        if status_of(job)["status"] != "succeeded":
            remove(job.run_dir, job.folder.parent)
    remove(job.folder, job.folder.parent)


def delete_model(service, name: str) -> None:
    """Delete the model of a job, or another adapter among them. ApiError if that cannot be."""
    finetuning, catalog = service.finetuning, service.catalog
    if catalog.look(name) is None:
        raise unknown_model(f"no model {name[:100]!r}")
    is_ours = finetuning and name != catalog.base and MODEL.fullmatch(name)
    if not is_ours or not is_folder(finetuning.folder / "models" / name):
        raise ApiError(400, f"{name[:100]!r} is no model of a job: only those are deleted", "model")
    folder = finetuning.folder / "jobs"
    for job in (Job(folder / job_id) for job_id in ids_in(folder, "ftjob")):
        with contextlib.suppress(UserError, OSError):
            if job.run_dir.name == name and status_of(job)["status"] not in ENDED:
                raise ApiError(400, f"its job {job.id} has not ended: cancel it, or wait")
    with on_disk():
        remove(finetuning.folder / "models" / name, folder)
        catalog.scan()  # neither it nor its checkpoints are models any more


def remove(path: Path, folder: Path) -> None:
    """Remove a folder, if it is there: at once, under its name. folder: on the same disk."""
    temporary = folder / f".{secrets.token_hex(8)}.tmp"
    with contextlib.suppress(FileNotFoundError):
        path.rename(temporary)
    shutil.rmtree(temporary, ignore_errors=True)


# --------------------------------------------------------------------------------------------------
# Answers


def status_of(job: Job) -> dict:
    """The state of a job as clients see it.

    A job that was cancelled or paused too late, after the last step of its training, will succeed.
    """
    try:
        state = job.state()
        _ = job.asked
    except (UserError, OSError) as error:
        fault = {"code": "damaged", "message": one_line(error), "param": None}
        return NEW_STATE | {"status": "failed", "error": fault, "finished_at": job.created_at}
    with contextlib.suppress(UserError, OSError):
        if state["status"] in ENDED or not job.wants_rest or job.is_finished:
            return state
        if not job.is_cancelled:
            return state | {"status": "paused"}
        cancelled_at = int((job.folder / "cancel").stat().st_mtime)
        return state | {"status": "cancelled", "error": None, "finished_at": cancelled_at}
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
    if isinstance(taken := state.get("hyperparameters"), dict):
        chosen = chosen | taken  # `auto` has become a number
    is_paused = status == "paused"
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
        "status": "queued" if is_paused else status,  # OpenAI's client knows no other word
        "paused": is_paused,
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


def median_of_last(columns: Columns, name: str) -> float:
    """The median of a column over the last steps; 0 before the first."""
    values = filter(math.isfinite, columns.metrics.steps[name][-100:])
    return statistics.median([*values] or [0])


def minutes_of(plan: dict, finetuning: Finetuning, runs: Runs) -> float | None:
    """How long a job may train, by the newest one of this base that has; None if none has."""
    folder = finetuning.folder / "jobs"
    for job in (Job(folder / name) for name in ids_in(folder, "ftjob")[::-1][:MOST_LOOKED_AT]):
        with contextlib.suppress(UserError, OSError), metrics_of(job, runs) as (columns, _):
            speed = median_of_last(columns, "tokens_per_second")
            if speed and job.asked["base"] == finetuning.base:
                return plan["steps"] * plan["rows"] * plan["row_tokens"] / speed / 60
    return None


def progress_of(job: Job, runs: Runs) -> dict:
    """How far a training is, and when it will end; nothing before its first step.

    The end is counted from the last step: of a training that stands still it does not move. None if
    it is late.
    """
    with metrics_of(job, runs) as (columns, n_steps), contextlib.suppress(UserError, OSError):
        if seconds := median_of_last(columns, "seconds"):
            step = columns.steps[-1]
            written_at = (job.run_dir / "metrics.jsonl").stat().st_mtime
            finish = written_at + (n_steps - step) * seconds
            is_known = time.time() < finish < math.inf
            return {
                "progress": {"step": step, "total_steps": n_steps},
                "estimated_finish": int(finish) if is_known else None,
            }
    return {}


def events_of(job: Job, after: str | None, limit: int) -> dict:
    """A page of a job's events, the newest first: of events.jsonl, only its end is read.

    The id of an event ends with the place of its line. after: the id of the one before the page.
    """
    head = f"ftevent-{job.id.removeprefix('ftjob-')}-"
    found = re.fullmatch(rf"{head}(\d{{1,15}})", after or f"{head}{10**15 - 1}", re.ASCII)
    if not found:
        raise ApiError(400, f"after: there is no {after[:100]!r} in this list", param="after")
    rows = []
    with contextlib.suppress(UserError, OSError), open_regular(job.folder / "events.jsonl") as file:
        end = min(int(found[1]), os.fstat(file.fileno()).st_size)
        begin = end
        while begin and len(rows) <= limit:
            begin = max(0, begin - max(TAIL_BYTES, end - begin))
            file.seek(begin)
            rows = events_in(file.read(end - begin), begin, head)
    return page_of(rows[::-1], None, limit)


def events_in(content: bytes, begin: int, head: str) -> list[dict]:
    """The events in a part of events.jsonl, without its first line if that may be cut.

    begin: its place in the file. head: of their ids.
    """
    fields = {"created_at": float, "level": str, "message": str}
    found = []
    place = begin
    for line in content.splitlines(keepends=True):
        is_whole = place > begin or not begin
        row, _ = files.parse_line(line, "", fields, appended=True) if is_whole else (None, "")
        if row and math.isfinite(row["created_at"]):
            found.append(
                {
                    "id": f"{head}{place:012}",
                    "object": "fine_tuning.job.event",
                    "created_at": int(row["created_at"]),
                    "level": row["level"],
                    "message": public(row["message"]),
                    "type": "message",
                    "data": None,
                }
            )
        place += len(line)
    return found


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
