"""The worker: takes finetuning jobs from their folder, and trains each.

    python -m web.worker JOBS [--once] [--nproc=1]

A worker claims a job by a lock on a file in the job's folder. The ranks of the training inherit the
open file, and so the lock: if the worker is killed, the training goes on, and no other worker takes
the job before it has ended.

    queued -> validating_files -> running -> succeeded | failed | cancelled

What the training says with its exit status:

    0      done: the adapter is in JOBS/models/NAME
    2      an error that the user can fix: the job fails with that line
    75     start me again
    other  it died; the third death ends the job

A worker that finds a job neither claimed nor ended goes on with it. The same command resumes the
run, or says that it is finished.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import processes
from web.jobs import Job

ROOT = Path(__file__).resolve().parent.parent
RUNNING, GONE = "running", "gone"
END_SECONDS = 90  # after SIGTERM, or the death of a rank, until the other ranks are killed


class Local:
    """Trains on this machine, with `nproc` ranks. web/slurm.py does the same by SLURM.

    torchrun would neither hand the lock on nor tell the exit status of its ranks. So they are
    started without it, with the variables that it would set.
    """

    outlives = False  # when its worker is told to end, the training has to end as well

    def __init__(self, nproc: int):
        self.nproc = nproc
        self.ranks = {}  # id of a job -> its processes, of those that this worker has started
        self.ends = {}  # id of a job -> when its ranks began to end

    def start(self, job: Job, lock: int) -> None:
        """Start the training of a job. lock: the open file of its lock, which the ranks inherit."""
        command = [sys.executable, str(ROOT / "fsdp_train.py"), str(job.settings)]
        port = processes.free_port()
        threads = max(1, (os.cpu_count() or 1) // self.nproc)
        self.ends.pop(job.id, None)
        self.ranks[job.id] = []
        for rank in range(self.nproc):
            variables = processes.torchrun_variables(rank, self.nproc, port)
            environment = {"OMP_NUM_THREADS": str(threads), **os.environ, **variables}
            with job.log.open("ab") as log:
                process = subprocess.Popen(
                    command,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=[lock],
                    start_new_session=True,  # Ctrl-C is the worker's
                )
            self.ranks[job.id].append(process)

    def state(self, job: Job) -> str | int:
        """RUNNING, the exit status once all ranks have ended, or GONE: it is not known here."""
        if job.id not in self.ranks:
            return GONE
        statuses = [process.poll() for process in self.ranks[job.id]]
        if None not in statuses:
            failed = [status for status in statuses if status]
            return min(failed, key=urgency) if failed else 0
        if any(statuses):
            self.ends.setdefault(job.id, time.monotonic())
        if time.monotonic() - self.ends.get(job.id, time.monotonic()) > END_SECONDS:
            self.send(job, signal.SIGKILL)
        return RUNNING

    def cancel(self, job: Job) -> None:
        """Ask the training to save and end. `state` tells when it has ended."""
        if job.id not in self.ends:
            self.ends[job.id] = time.monotonic()
            self.send(job, signal.SIGTERM)

    def send(self, job: Job, number: int) -> None:
        """Send a signal to all ranks."""
        for process in self.ranks.get(job.id, []):
            process.send_signal(number)


def urgency(status: int) -> int:
    """Which of the exit statuses of several ranks counts: the lowest."""
    return {2: 0, 75: 1}.get(status, 2)
