"""Finetuning jobs by a real SLURM (slurm_cluster.py): submitted once, whatever is killed."""

import shutil
import signal
import subprocess
import sys

import pytest
from conftest import PATIENCE, refusal, rooms_on_path

pytest.importorskip("openai")
pytest.importorskip("fastapi")

from finetuning import (
    JOBS,
    LONG,
    Place,
    client_of,
    created,
    lines,
    messages,
    set_settings,
    starts,
    status,
    steps,
)
from launches import wait_for

from web import worker
from web.jobs import Job
from web.slurm import Slurm
from web.worker import Worker, WorkerSettings


class SlurmPlace(Place):
    """A folder with jobs, and workers that submit them."""

    def __init__(self, slurm, tiny_run, folder):
        super().__init__(tiny_run, folder)
        self.slurm = slurm

    def worker(self, *flags, path="") -> subprocess.Popen:
        """Start a worker. path: a folder whose programs come before those of SLURM."""
        flags = ["--slurm", "--poll_seconds=0.05", "--most=9", *flags]
        words = [sys.executable, "-m", "web.worker", "jobs", *flags]
        command = self.slurm.command(*words, where=[f"--wd={self.folder}"])
        environment = self.slurm.environment | rooms_on_path()
        environment["PATH"] = f"{path}:{self.slurm.environment['PATH']}"
        self.workers.append(subprocess.Popen(command, env=environment))
        return self.workers[-1]

    def ended(self, job) -> str:
        """How a job has ended."""
        wait_for(lambda: status(self.client, job.id) not in ("queued", "running"))
        return status(self.client, job.id)

    def submitted(self, job) -> list[dict]:
        """What SLURM knows of the job: all that has been submitted for it."""
        words = ["squeue", "--noheader", "--states=all", f"--name={job.id}", "--format=%A"]
        numbers = self.slurm.run(*words).stdout.split()
        return [self.slurm.job(number) for number in sorted(numbers, key=int)]

    def wait_for_end(self, job) -> str:
        """How the last one ended in SLURM."""
        ended = ("COMPLETED", "CANCELLED", "FAILED")
        wait_for(lambda: self.submitted(job)[-1]["JobState"] in ended)
        return self.submitted(job)[-1]["JobState"]

    def __exit__(self, *error) -> None:
        """Nothing is left in SLURM."""
        for path in (self.folder / "jobs/jobs").glob("ftjob-*"):
            self.slurm.run("scancel", f"--name={path.name}")
        super().__exit__(*error)


@pytest.fixture
def place(slurm, tiny_run, tmp_path):
    with SlurmPlace(slurm, tiny_run, tmp_path) as place:
        yield place


def said(place, job) -> str:
    return " / ".join(messages(place.client, job.id))


@pytest.mark.slow
def test_a_job_goes_on_without_a_worker_and_another_one_is_cancelled(place):
    worker = place.worker("--most_hours=0.5")
    done = place.create(hyperparameters={"n_epochs": 20, "batch_size": 8})
    cancelled = place.create(hyperparameters=LONG, content=lines(90))
    wait_for(lambda: steps(cancelled) >= 1)
    wait_for(lambda: place.submitted(done))
    (job,) = place.submitted(done)
    assert job["TimeLimit"] == "00:30:00" and job["Requeue"] == "1"
    worker.kill()
    worker.wait()
    assert place.wait_for_end(done) == "COMPLETED"
    assert status(place.client, done.id) == "running"  # it is for a worker to say how it ended

    worker = place.worker()
    assert place.ended(done) == "succeeded", said(place, done)
    for verb, status_then, n_starts in (("pause", "paused", 1), ("cancel", "cancelled", 2)):
        place.client.post(f"{JOBS}/{cancelled.id}/{verb}")
        wait_for(lambda: cancelled.state()["status"] == status_then)  # noqa: B023 (waits here)
        assert len(place.submitted(cancelled)) == len(starts(cancelled)) == n_starts
        if verb == "pause":
            place.client.post(f"{JOBS}/{cancelled.id}/resume")
            wait_for(lambda: len(starts(cancelled)) == 2)
    assert place.wait_for_end(cancelled) == "CANCELLED" and starts(cancelled)[1] > 0
    assert starts(done) == [0] and len(place.submitted(done)) == 1

    outlives = place.create("import time\ntime.sleep(9999)")
    wait_for(lambda: place.submitted(outlives))
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(PATIENCE) == 0
    assert place.submitted(outlives)[0]["JobState"] in ("PENDING", "RUNNING")


AROUND_SBATCH = {  # what a worker starts as sbatch: the worker is killed after it has been heard,
    "after": 'REAL "$@"; kill -9 $PPID',  # or before
    "before": 'kill -9 $PPID; sleep 3; exec REAL "$@"',
}


@pytest.mark.slow
@pytest.mark.parametrize("when", AROUND_SBATCH)
def test_what_a_killed_worker_has_submitted_is_not_submitted_again(place, when, tmp_path):
    program = tmp_path / "bin/sbatch"
    program.parent.mkdir()
    real = shutil.which("sbatch")
    version = f'[ "$1" = --version ] && exec {real} --version\n'
    program.write_text(f"#!/bin/sh\n{version}{AROUND_SBATCH[when].replace('REAL', real)}\n")
    program.chmod(0o755)
    job = place.create("import time\ntime.sleep(9999)")
    assert place.worker(path=program.parent).wait(PATIENCE) == -signal.SIGKILL
    place.worker()
    wait_for(lambda: place.submitted(job) and place.submitted(job)[-1]["JobState"] == "RUNNING")
    place.client.post(f"{JOBS}/{job.id}/cancel")
    wait_for(lambda: job.state()["status"] == "cancelled")
    assert len(place.submitted(job)) == 1 and "restarted" not in said(place, job)


TWICE_AGAIN = """
import os, pathlib
seen = pathlib.Path({!r})
seen.write_text(seen.read_text() + "x" if seen.exists() else "x")
if seen.read_text() == "x":
    os.kill(os.getpid(), 9)
if seen.read_text() == "xx":
    os._exit(75)
print("error: no more", flush=True)
os._exit(2)
"""


@pytest.mark.slow
def test_a_job_that_fails_says_why(place, tmp_path):
    """And one that dies is started again, as one that asks for it, before its time limit."""
    place.worker()
    refused = place.create(TWICE_AGAIN.format(str(tmp_path / "seen")))
    stopped = place.create("import time\ntime.sleep(9999)")
    assert place.ended(refused) == "failed" and "no more" in said(place, refused)
    assert said(place, refused).count("ended too early") == 2
    assert len(place.submitted(refused)) == 3
    wait_for(lambda: place.submitted(stopped)[0]["JobState"] == "RUNNING")
    place.slurm.run("scancel", f"--name={stopped.id}")  # an operator
    assert place.ended(stopped) == "failed" and "CANCELLED" in said(place, stopped)


@pytest.mark.slow
def test_a_job_that_slurm_refuses_fails(place):
    job = place.create("pass")
    place.worker("--sbatch_args=--partition=none")
    assert place.ended(job) == "failed" and "SLURM refuses" in said(place, job)
    assert "partition" in said(place, job) and not place.submitted(job)


def test_a_resumed_job_waits_for_slurm(tmp_path, monkeypatch):
    """What was cancelled as it was paused does not end it, as long as sbatch is not heard."""
    for name, words in (("sbatch", "Unable to contact slurm"), ("squeue", "17 CANCELLED")):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        is_heard = '[ "$1" = --version -o $(basename $0) = squeue ]'
        program.write_text(
            f"#!/bin/sh\n{is_heard} && echo {words} || {{ echo {words} >&2; exit 1; }}"
        )
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin", prepend=":")
    client = client_of(tmp_path)
    job = Job(tmp_path / "jobs/jobs" / created(client))
    set_settings(tmp_path, job.id, "pass")
    client.post(f"{JOBS}/{job.id}/pause")
    job.write_state(status="paused")
    client.post(f"{JOBS}/{job.id}/resume")
    waiting = Worker(tmp_path / "jobs", Slurm(1), WorkerSettings())
    for _ in range(3):
        assert waiting.look() == 1 and waiting.postponed.pop(job.id)
        waiting.launcher.seen.clear()
    assert status(client, job.id) == "queued" and not job.log.exists()


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--slurm"], "no sbatch here"),
        (["--slurm", "--sbatch_args='"], "No closing quotation"),
        (["--sbatch_args=-x"], "add --slurm"),
    ],
)
def test_a_worker_that_cannot_submit_says_so(tmp_path, monkeypatch, flags, words):
    monkeypatch.setenv("PATH", "")
    assert words in refusal(worker.main, [str(tmp_path), *flags])
