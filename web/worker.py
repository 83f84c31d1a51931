"""The worker: takes finetuning jobs from their folder, and trains each.

    python -m web.worker JOBS [--once] [--nproc=1]

A worker claims a job by a lock on a file in the job's folder. The ranks of the training inherit the
open file, and so the lock: if the worker is killed, the training goes on, and no other worker takes
the job before it has ended.

    queued -> validating_files -> running -> succeeded | failed | cancelled | paused

A job that has failed, was cancelled or is paused is queued again when somebody resumes it.

What the training says with its exit status:

    0      done: the adapter is in JOBS/models/NAME
    2      an error that the user can fix: the job fails with that line
    other  start me again; MOST_ATTEMPTS starts without a later checkpoint end the job

A worker that finds a job neither claimed nor ended goes on with it. The same command resumes the
run, or says that it is finished.
"""

import contextlib
import math
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import checkpoint
import config
import program
from config import Float, Int
from launch.pool import free_port, torchrun_variables
from lifecycle import runlog
from program import RESUME_ME, UserError, require
from web.files import ids_in
from web.jobs import BEAT_SECONDS, ENDED, Job
from web.runs import Runs, owner_of, stamp_of
from web.settings import write_settings
from web.slurm import GONE, RUNNING, Slurm

ROOT = Path(__file__).resolve().parent.parent
END_SECONDS = 90  # after SIGTERM, or the death of a rank, until the other ranks are killed
MOST_ATTEMPTS = 8  # without a later checkpoint; some go to a microbatch that fits into memory
USER_ERROR = 2  # an exit status
PAUSE_SECONDS = 5  # after an error of the file system

# --------------------------------------------------------------------------------------------------
# What trains


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

    def start(self, job: Job, lock: int, seconds_left: float) -> None:
        """Start the training of a job. lock: the open file of its lock, which the ranks inherit."""
        command = [sys.executable, str(ROOT / "fsdp_train.py"), str(job.settings)]
        port = free_port() if self.nproc > 1 else 0
        threads = max(1, (os.cpu_count() or 1) // self.nproc)
        self.ends.pop(job.id, None)
        self.ranks[job.id] = []
        for rank in range(self.nproc):
            variables = torchrun_variables(rank, self.nproc, port) if port else {}
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
            told = [status for status in (USER_ERROR, RESUME_ME) if status in statuses]
            return told[0] if told else max(statuses, key=abs)
        if any(statuses):
            self.ends.setdefault(job.id, time.monotonic())
        if time.monotonic() - self.ends.get(job.id, time.monotonic()) > END_SECONDS:
            self.send(job, signal.SIGKILL)
        return RUNNING

    def cancel(self, job: Job) -> None:
        """Ask the training to save and end. `state` tells when it has ended.

        It may be one that a worker on this machine has left behind: rank 0 owns the run folder.
        """
        if job.id not in self.ranks:
            with contextlib.suppress(OSError, UserError):  # it has ended, or is somebody else's
                owner = owner_of(job.run_dir)
                if owner and owner["host"] == platform.node():
                    os.kill(owner["pid"], signal.SIGTERM)
        elif job.id not in self.ends:
            self.ends[job.id] = time.monotonic()
            self.send(job, signal.SIGTERM)

    def send(self, job: Job, number: int) -> None:
        """Send a signal to all ranks."""
        for process in self.ranks.get(job.id, []):
            process.send_signal(number)


# --------------------------------------------------------------------------------------------------
# The worker


@dataclass
class WorkerSettings:
    """How a worker works."""

    once: bool = False  # end when no job waits
    nproc: Int[1, 10**6] = 1  # ranks of a training
    most: Int[1, 10**6] = 1  # jobs at the same time
    most_hours: Float[1e-6, 10**6] = 24.0  # of a job's steps, and of a training that stands still
    poll_seconds: Float[1e-6, 10**6] = 0.5  # between two looks at the folder
    slurm: bool = False  # submit trainings to SLURM
    sbatch_args: str = ""  # more arguments of sbatch, such as "--partition=gpu --account=me"

    def check(self) -> None:
        """UserError if a setting has no effect."""
        fix = "add --slurm, or leave out --sbatch_args"
        require(self.slurm or not self.sbatch_args, f"--sbatch_args is for SLURM: {fix}")


class Worker:
    """Works on the jobs of a folder. launcher: a `Local`, or what has its methods."""

    def __init__(self, folder: Path, launcher, cfg: WorkerSettings):
        self.folder = folder
        self.launcher = launcher
        self.cfg = cfg
        self.claims = {}  # job -> the open file of its lock
        self.ended = {}  # id of a job that needs no worker any more -> its state.json
        self.postponed = {}  # id of a job -> when it is tried again
        self.runs = Runs({})  # reads what is new in the metrics of a training
        self.is_ending = False

    def run(self) -> int:
        """Work until SIGTERM, or with --once until no job waits. Returns the exit status."""
        threading.Thread(target=beat, args=(self.folder / "heartbeat",), daemon=True).start()
        while not self.is_ending:
            n_left = self.look()
            if self.cfg.once and not n_left:
                break
            time.sleep(self.cfg.poll_seconds)
        return RESUME_ME if self.leave() else 0

    def look(self) -> int:
        """Go on with each job that this worker has claimed or can claim. How many have not ended.

        Jobs that others work on do not count.
        """
        names = {job.id for job in self.claims}  # a folder may be removed meanwhile
        with contextlib.suppress(OSError):
            names.update(ids_in(self.folder / "jobs", "ftjob"))
        for name in sorted(names):
            if not self.is_ending:
                self.attend(Job(self.folder / "jobs" / name))
        return len(self.claims)

    def attend(self, job: Job) -> None:
        """Claim a job if possible, and do what is to be done about it now."""
        if time.monotonic() < self.postponed.get(job.id, 0):
            return
        try:
            if job in self.claims or self.claim(job):
                self.advance(job)
        except OSError as error:  # a full disk, or the folder was removed
            self.postponed[job.id] = time.monotonic() + PAUSE_SECONDS
            program.print_error(f"{job.id}: {error}")
            if not job.folder.exists():
                self.launcher.cancel(job)
                if self.launcher.state(job) != RUNNING:
                    self.release(job)

    def claim(self, job: Job) -> bool:
        """Lock a job that does not rest. False if another one has it, or there is no room."""
        if self.rests(job):
            return False
        if len(self.claims) >= self.cfg.most and not job.wants_rest:  # which comes at once
            return False
        lock = job.lock()
        if lock is None:
            if job.wants_rest:
                self.launcher.cancel(job)  # its worker may be dead
            return False
        self.claims[job] = lock
        if self.rests(job):  # since we came
            self.release(job)
            return False
        return True

    def rests(self, job: Job) -> bool:
        """Does a job need no worker? One whose state is damaged does: that will be replaced."""
        stamp = stamp_of(job.folder / "state.json")
        if stamp and self.ended.get(job.id) == stamp:
            return True
        try:
            status = job.state()["status"]
        except UserError:
            return False
        if status in ENDED:
            self.ended[job.id] = stamp  # until it is resumed
        return status in ENDED or (status == "paused" and not job.is_cancelled)

    def release(self, job: Job) -> None:
        """Let go of a job."""
        if job in self.claims:
            os.close(self.claims.pop(job))

    def advance(self, job: Job) -> None:
        """The next step of a job that is ours."""
        outcome = self.launcher.state(job)
        is_running = outcome == RUNNING
        if not job.folder.exists():
            raise FileNotFoundError("its folder was removed")
        try:
            state = job.state()
            silent_seconds = self.silent_seconds(job) if is_running else 0
            is_late = state.get("is_late", False) or self.seconds_left(job) < silent_seconds
            if is_late and not state.get("is_late"):
                job.write_state(is_late=True)  # also when its training has ended
            if is_running and (job.wants_rest or is_late):
                self.launcher.cancel(job)
            elif is_running:
                return
            elif job.is_finished:
                self.succeed(job)
            elif job.wants_rest:
                self.rest(job)
            elif state["status"] != "running":
                self.begin(job)
            elif is_late:
                fix = "start a worker with a larger --most_hours, and resume the job"
                self.fail(job, f"the job took more than {self.cfg.most_hours:g} hours: {fix}")
            else:
                self.go_on(job, state, outcome)
        except UserError as error:
            self.fail(job, str(error))
        except OSError:
            raise
        except Exception as error:  # whatever it is, it concerns this job alone
            self.fail(job, f"{type(error).__name__}: {program.one_line(error)}")

    def seconds_left(self, job: Job) -> float:
        """For how long a job may still train: what its steps have taken does not come back."""
        passed = self.runs.read(job.run_dir).metrics.steps["seconds"]
        return 3600 * self.cfg.most_hours - math.fsum(filter(math.isfinite, passed))

    def silent_seconds(self, job: Job) -> float:
        """For how long a training that runs has recorded nothing."""
        last = job.state().get("launched_at", time.time())  # none of earlier versions
        with contextlib.suppress(FileNotFoundError):
            last = max(last, (job.run_dir / "metrics.jsonl").stat().st_mtime)
        return time.time() - last

    def begin(self, job: Job) -> None:
        """Prepare a job if that is not done, and start its training."""
        if not job.settings.exists():
            job.write_state(status="validating_files")
            job.add_event("The data are being prepared")
            try:
                job.add_event(write_settings(job, self.cfg.nproc))
            except OSError as error:
                (job.folder / "data.jsonl").unlink(missing_ok=True)  # room, if the disk is full
                return self.fail(job, program.one_line(error))
            if job.wants_rest or self.is_ending:
                return  # the next look sees to it
        is_again = "log_begin" in job.state()
        job.add_event("The training goes on" if is_again else "The training has started")
        self.start(job)

    def start(self, job: Job) -> None:
        """Start the training."""
        size = job.log.stat().st_size if job.log.exists() else 0
        job.write_state(status="running", log_begin=size, launched_at=time.time())
        try:
            self.launcher.start(job, self.claims[job], self.seconds_left(job))
        except OSError:  # what SLURM tells of this job then is about a start before this one
            job.write_state(status="queued")
            raise

    def go_on(self, job: Job, state: dict, outcome) -> None:
        """What follows if a training has ended before its last step."""
        reason = last_words(job, state)
        if outcome == USER_ERROR:
            return self.fail(job, reason)
        newest = checkpoint.latest(job.run_dir)
        step = checkpoint.number(newest) if newest else -1
        attempts = 1 if step > state["last_step"] else state["attempts"] + 1
        job.write_state(attempts=attempts, last_step=step)
        if attempts >= MOST_ATTEMPTS:
            ended = f"the training ended {attempts} times without a later checkpoint"
            return self.fail(job, f"{ended}, the last words: {reason}")
        job.add_event(f"The training ended too early ({reason}): it is restarted", "warn")
        self.start(job)

    def succeed(self, job: Job) -> None:
        """End a job whose training has finished."""
        rows = runlog.read(job.run_dir)
        losses = [row["val_loss"] for row in rows if "val_loss" in row]
        steps = [row["step"] for row in rows if "val_loss" in row]
        words = "The training has finished"
        if losses:
            words += f": held-out loss {losses[0]:.4f} before, {losses[-1]:.4f} after"
            if losses[-1] > 1.1 * min(losses):
                best = steps[losses.index(min(losses))]
                name = f"{job.run_dir.name}/checkpoints/step-{best}"
                words += f", lowest {min(losses):.4f} at step {best}: fewer epochs, or {name}"
        tokens = max((row.get("tokens", 0) for row in rows), default=0)
        self.end(job, "succeeded", words, trained_tokens=tokens)

    def rest(self, job: Job) -> None:
        """End a job that somebody has cancelled or paused, and whose training has ended."""
        status = "cancelled" if job.is_cancelled else "paused"
        self.end(job, status, f"The job was {status}")

    def fail(self, job: Job, reason: str) -> None:
        """End a job that cannot succeed."""
        error = {"code": "job_failed", "message": reason, "param": None}
        self.end(job, "failed", f"The job failed: {reason}", "error", error=error)

    def end(self, job: Job, status: str, words: str, level: str = "info", **values) -> None:
        """Write down how a job has ended."""
        job.add_event(words, level)
        job.write_state(status=status, finished_at=int(time.time()), **values)
        print(f"{job.id}: {status}. {words}", flush=True)
        self.release(job)

    def leave(self) -> int:
        """End the trainings here, saved, for the next worker. How many jobs were not done."""
        while not self.launcher.outlives and self.running():
            for job in self.running():
                self.launcher.cancel(job)
            time.sleep(0.05)
        n_left = 0
        for job in list(self.claims):
            with contextlib.suppress(OSError, UserError):
                if self.launcher.outlives or not job.settings.exists():
                    pass
                elif job.is_finished:
                    self.succeed(job)
                elif job.wants_rest:
                    self.rest(job)
                else:
                    job.write_state(status="queued")
                    job.add_event("Its worker ends: the job waits for another one", "warn")
                    n_left += 1
            self.release(job)
        return n_left

    def running(self) -> list[Job]:
        """The jobs of ours that are training."""
        return [job for job in self.claims if self.launcher.state(job) == RUNNING]


def beat(path: Path) -> None:
    """Touch the workers' heartbeat for ever: in a thread, since preparing a job takes minutes."""
    while True:
        with contextlib.suppress(OSError):
            path.touch()
        time.sleep(BEAT_SECONDS)


def last_words(job: Job, state: dict) -> str:
    """Why a training has ended: the last line about an error that it has printed, or the last one.

    Only what it has printed since its last start.
    """
    try:
        printed = job.log.read_bytes()[state.get("log_begin", 0) :].decode(errors="replace")
    except OSError:
        printed = ""
    lines = [line for line in printed.splitlines() if line.strip()]
    errors = [line.partition(": ")[2] for line in lines if line.startswith("error")]
    *_, words = ["it said nothing", *lines, *errors]
    return words[:400]


def main(argv) -> None:
    """Work on the jobs of a folder."""
    (folder,), cfg = config.load(argv, WorkerSettings, takes="JOBS")
    folder = Path(folder).resolve()
    require(folder.is_dir(), f"{folder} is no folder: start serve.py with --jobs={folder} first")
    launcher = Local(cfg.nproc)
    if cfg.slurm:
        launcher = Slurm(cfg.nproc, cfg.sbatch_args)
    worker = Worker(folder, launcher, cfg)

    def end(number, frame):
        worker.is_ending = True

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    print(f"working on the jobs in {folder}", flush=True)
    if status := worker.run():
        sys.exit(status)


if __name__ == "__main__":
    program.run(main)
