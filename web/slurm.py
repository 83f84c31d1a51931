"""Trains the jobs of web/worker.py by SLURM: sbatch, squeue, scancel.

    python -m web.worker JOBS --slurm --nproc=8 --most=20 --sbatch_args="--partition=gpu"

The name of a job in SLURM is the job's id. So a worker that comes after one that was killed finds
by squeue what that one has submitted, and submits nothing twice: as long as a killed worker's
sbatch lives, it holds the job's lock. The training needs no worker: it goes on without one.
"""

import math
import re
import shlex
import subprocess
import time
from pathlib import Path

from program import RESUME_ME, UserError, require
from web.jobs import Job, status_of

RUNNING, GONE = "running", "gone"  # what a launcher says of a training, besides its exit status
SCRIPT = Path(__file__).resolve().parent.parent / "slurm" / "finetune.sbatch"
COMMAND_SECONDS = 120  # SLURM's commands themselves give up earlier
LOOK_SECONDS = 2.0  # between two calls of squeue
AGAIN_SECONDS = 60  # until a job that was cancelled and still runs is cancelled again
# Of these the scheduler will hear another time. Everything else that sbatch says is an answer.
NO_ANSWER = ("timed out", "Unable to contact", "Connection refused", "try again")
FINAL = {  # the state of a job in SLURM -> the exit status of its training, if it is not its own
    "COMPLETED": 0,
    "CANCELLED": 2,  # by an operator: the job fails
    "DEADLINE": 2,
    "TIMEOUT": RESUME_ME,
    "PREEMPTED": RESUME_ME,
    "NODE_FAIL": RESUME_ME,
    "BOOT_FAIL": RESUME_ME,
    "FAILED": None,
    "OUT_OF_MEMORY": 1,
}


class Slurm:
    """Submits trainings. The same methods as web/worker.py::Local.

    nproc: the ranks of a training, on one node. sbatch_args: more arguments of sbatch, as in a
    shell.
    """

    outlives = True  # a training does not end with its worker

    def __init__(self, nproc: int, sbatch_args: str = ""):
        self.nproc = nproc
        try:
            self.sbatch_args = shlex.split(sbatch_args)
        except ValueError as error:
            raise UserError(f"--sbatch_args={sbatch_args!r}: {error}") from None
        self.seen = {}  # id of a job -> (when squeue was asked, what came)
        self.cancelled = {}  # id of a job -> when it was cancelled
        version = command(["sbatch", "--version"])
        fix = "sbatch fails: start the worker where jobs are submitted, or without --slurm"
        require(version.returncode == 0, f"{fix}: {one_line(version)}")

    def start(self, job: Job, lock: int, seconds_left: float) -> None:
        """Submit the training of a job, unless SLURM has it. lock: the open file of its lock.

        seconds_left: until SLURM ends it. UserError if SLURM refuses it; OSError if it does not
        answer.
        """
        self.seen.pop(job.id, None)
        self.cancelled.pop(job.id, None)  # a job may be paused, and then cancelled
        if self.ask(job) == RUNNING:
            return
        log = str(job.log).replace("%", "%%")
        options = [f"--job-name={job.id}", f"--ntasks={self.nproc}", f"--output={log}"]
        minutes = max(1, math.ceil(seconds_left / 60))
        options += [f"--time={minutes}", f"--chdir={SCRIPT.parent.parent}"]
        words = ["sbatch", *options, *self.sbatch_args, str(SCRIPT), str(job.settings)]
        done = command(words, pass_fds=[lock])
        if done.returncode and self.ask(job) != RUNNING:  # it may have been heard all the same
            if any(words in done.stderr for words in NO_ANSWER):
                raise OSError(f"sbatch: {one_line(done)}")
            raise UserError(f"SLURM refuses the job: {one_line(done)}")

    def state(self, job: Job) -> str | int:
        """RUNNING while SLURM has it, also in its queue; then the exit status.

        GONE if SLURM does not know it, or has forgotten it (MinJobAge). OSError if SLURM does not
        answer.
        """
        asked, state = self.seen.get(job.id, (-math.inf, GONE))
        if time.monotonic() - asked > LOOK_SECONDS:
            state = self.ask(job, tells=status_of(job)["status"] == "running")
            self.seen[job.id] = time.monotonic(), state
        return state

    def ask(self, job: Job, tells: bool = False) -> str | int:
        """The same, from squeue. tells: the log of the job, if an operator has cancelled it."""
        words = ["squeue", "--me", "--noheader", f"--name={job.id}", "--states=all"]
        lines = answer([*words, "--format=%A %T"]).splitlines()
        if not lines:
            return GONE
        number, state = max((line.split() for line in lines), key=lambda fields: int(fields[0]))
        if state not in FINAL:
            return RUNNING
        if FINAL[state] == 2 and tells:
            with job.log.open("a") as log:  # where the worker finds the reason
                log.write(f"error: SLURM has ended its job {number}: {state}\n")
        return exit_status(number) if FINAL[state] is None else FINAL[state]

    def cancel(self, job: Job) -> None:
        """Ask for the end of a training, whoever submitted it. `state` tells when it is over."""
        if time.monotonic() - self.cancelled.get(job.id, -math.inf) > AGAIN_SECONDS:
            self.cancelled[job.id] = time.monotonic()
            command(["scancel", "--me", f"--name={job.id}"])


def command(words: list[str], **options) -> subprocess.CompletedProcess:
    """Run a command of SLURM. UserError if it is not there; OSError if it does not end."""
    options |= {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    try:
        return subprocess.run(words, timeout=COMMAND_SECONDS, **options)
    except FileNotFoundError:
        raise UserError(f"there is no {words[0]} here: start the worker where SLURM is") from None
    except subprocess.TimeoutExpired as error:
        raise OSError(f"{words[0]} does not end") from error


def answer(words: list[str]) -> str:
    """What a command prints. OSError if it fails: SLURM does not answer."""
    done = command(words)
    if done.returncode:
        raise OSError(f"{words[0]}: {one_line(done)}")
    return done.stdout


def exit_status(number: str) -> int:
    """With which status the script of a job has ended."""
    shown = answer(["scontrol", "--oneliner", "show", "job", number])
    found = re.search(r" ExitCode=(\d+):(\d+)", shown)
    status, number_of_signal = map(int, found.groups())
    return status or 128 + number_of_signal


def one_line(done: subprocess.CompletedProcess) -> str:
    """What a command has said, in a line."""
    return " ".join((done.stderr or done.stdout).split())[:400]
