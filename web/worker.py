"""The worker: takes finetuning jobs from their folder, and trains each.

    python -m web.worker JOBS [--once] [--nproc=1]

A worker claims a job by a lock on a file in the job's folder. The ranks of the training inherit the
open file, and so the lock: if the worker is killed, the training goes on, and no other worker takes
the job before it has ended.

    queued -> validating_files -> running -> succeeded | failed | cancelled

What the training says with its exit status:

    0      done: the adapter is in JOBS/models/NAME
    2      an error that the user can fix: the job fails with that line
    other  start me again; MOST_ATTEMPTS starts without a later checkpoint end the job

A worker that finds a job neither claimed nor ended goes on with it. The same command resumes the
run, or says that it is finished.
"""

import contextlib
import fcntl
import math
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, fields
from pathlib import Path

import checkpoint
import config
import program
from config import Float, Int, MPTConfig, TrainConfig
from launch.pool import free_port, torchrun_variables
from lifecycle import runlog
from program import RESUME_ME, UserError, require
from storage import files
from text import corpus
from text.prepare import prepare
from text.shards import Shard, shard_files
from web.files import ids_in
from web.jobs import BEAT_SECONDS, ENDED, Job
from web.runs import Runs, owner_of
from web.slurm import GONE, RUNNING, Slurm
from weights import load

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
# What is trained

LORA_RANK = 8
LR = 1e-3  # for models up to LR_WIDTH; wider ones take less
LR_WIDTH = 256
LONGEST_ROW = 2048  # tokens
BATCH_ROWS = 8
AUTO_STEPS = 100  # that `auto` epochs should give, within AUTO_EPOCHS
AUTO_EPOCHS = (2, 10)
MOST_STEPS = 100_000
EVAL_TOKENS = 200_000
SAVE_MINUTES = 10.0
LINES_SHOWN = 20  # numbers of lines that are held out, in an event


def write_settings(job: Job, nproc: int) -> str:
    """Bring a job's lines into shape, encode them, and write the settings of its training.

    Returns what they come to, in words. UserError or OSError if its data or its base cannot be
    used.
    """
    asked = job.asked
    data = job.folder / "data.jsonl"
    val_every, held_out = write_lines(job, data)
    base = Path(asked["base"])
    require(base.exists(), f"the base {asked['model']} is gone from {base}: put it there again")
    values = model_settings(base) | {
        "init_from": str(base),
        "dataset": str(data),
        "data_dir": str(job.folder / "tokens"),
        "data_format": "chat",
        "chat_template": asked["chat_template"],
        "tokenizer": tokenizer_name(base),
        "val_fraction": 1 / val_every,
        "seed": asked["seed"],
        "run_dir": str(job.run_dir),
        "microbatch_size": "auto",
        "eval_tokens": EVAL_TOKENS,
        "save_minutes": SAVE_MINUTES,
    }
    model_cfg = config.from_dict(MPTConfig, values)
    values["lora_rank"] = min(LORA_RANK, max(1, model_cfg.d_model // 4))
    folder = prepare(config.from_dict(TrainConfig, values), max_seq_len=model_cfg.max_seq_len)
    train, val = (
        [Shard(path).header for path in shard_files(folder, split)] for split in ("train", "val")
    )
    values |= batch_settings(asked["hyperparameters"], train, model_cfg, nproc)
    config.from_dict(TrainConfig, values)  # UserError for what cannot be
    lines = [f"# {job.id}: start it by hand with python fsdp_train.py {job.settings}\n"]
    lines += [f"{name} = {value!r}\n" for name, value in values.items()]
    files.write_atomically(job.settings, "".join(lines).encode())
    counts = {name: total(train, name) + total(val, name) for name in ("cut", "dropped")}
    return (
        f"{total(train, 'documents')} examples to learn, {total(val, 'documents')} held out, "
        f"{held_out}; {values['max_steps']} steps of {values['global_batch_size']} rows of "
        f"{model_cfg.max_seq_len} tokens; {counts['cut']} examples are longer and were cut, "
        f"{counts['dropped']} have nothing to learn within a row"
    )


def total(headers: list[dict], name: str) -> int:
    """A count of shards, added up."""
    return sum(header[name] for header in headers)


def model_settings(base: Path) -> dict:
    """The settings of the base that are not as by default, as a finetuning run has them."""
    cfg = load.settings_of(load.find(str(base)))
    values = {
        field.name: getattr(cfg, field.name)
        for field in fields(MPTConfig)
        if field.name != "attn_impl" and getattr(cfg, field.name) != field.default
    }
    values["attn_uses_sequence_id"] = True  # keeps the examples of a row apart
    if not cfg.learned_positions:
        values["max_seq_len"] = min(cfg.max_seq_len, LONGEST_ROW)
    return values


def tokenizer_name(base: Path) -> str:
    """The tokenizer of the base, as --tokenizer takes it."""
    name, file = load.tokenizer_of(load.find(str(base)))
    return str(Path(file).absolute()) if file and name.endswith(".json") else name


def batch_settings(asked: dict, headers: list[dict], cfg: MPTConfig, nproc: int) -> dict:
    """Batch, steps and learning rate of a training, from what was asked.

    asked: hyperparameters, each a number or "auto". headers: of the shards for training.
    """
    n_examples = total(headers, "documents")
    n_rows = sum(header["tokens"] // header["max_seq_len"] for header in headers)
    batch = asked["batch_size"]
    rows = batch * n_rows / n_examples if batch != "auto" else min(BATCH_ROWS, n_rows / 10)
    rows = max(1, round(min(rows, n_rows) / nproc)) * nproc
    steps_of_epoch = n_rows / rows
    epochs = asked["n_epochs"]
    if epochs == "auto":
        fewest, most = AUTO_EPOCHS
        epochs = min(most, max(fewest, math.ceil(AUTO_STEPS / steps_of_epoch)))
    steps = max(1, math.ceil(epochs * steps_of_epoch))
    fix = "set a larger batch_size, or lower n_epochs"
    require(steps <= MOST_STEPS, f"{steps:,} steps are more than {MOST_STEPS:,}: {fix}")
    multiplier = asked["learning_rate_multiplier"]
    lr = LR * min(1, math.sqrt(LR_WIDTH / cfg.d_model))
    return {
        "global_batch_size": rows,
        "max_steps": steps,
        "warmup_steps": min(20, steps // 10),
        "lr": lr * (1 if multiplier == "auto" else multiplier),
        "eval_interval": max(1, steps // 10),
        "save_interval": max(1, steps // 10),
        "keep_every": max(1, steps // 10),  # so the best one of those is there in the end
    }


def write_lines(job: Job, path: Path) -> tuple[int, str]:
    """Write the lines of a job into one file, of which every n-th is held out.

    text/prepare.py holds out the first line of that file and every n-th from there. Without a
    validation file these places get every n-th line of the upload and its last one, so never its
    first. Of a validation file, so many lines are used as there are places for them: at most as
    many as for training. Returns (n, which lines are held out, in words).
    """
    learned = lines_of(job, job.asked["training_file"])
    if job.asked["validation_file"]:
        given = lines_of(job, job.asked["validation_file"])
        val_every = max(2, math.ceil((len(learned) + len(given)) / len(given)))
        held_out = given[: math.ceil(len(learned) / (val_every - 1))]
    else:
        val_every = min(50, max(10, len(learned) // 20))
        chosen = [*range(val_every - 1, len(learned), val_every)]
        if len(learned) % val_every:
            chosen.append(len(learned) - 1)
        held_out = [learned[place] for place in chosen]
        chosen = set(chosen)
        learned = [line for place, line in enumerate(learned) if place not in chosen]
    with path.open("wb") as out:
        for n, line in enumerate(held_out):
            between = learned[n * (val_every - 1) : (n + 1) * (val_every - 1)]
            out.writelines(content for _, content in [line, *between])
    numbers = [number for number, _ in held_out]
    shown = ", ".join(map(str, numbers[:LINES_SHOWN]))
    rest = f", ..., {numbers[-1]}" if len(numbers) > LINES_SHOWN else ""
    where = " of the validation file" if job.asked["validation_file"] else ""
    return val_every, f"line{'s' * (len(numbers) > 1)} {shown}{rest}{where}"


def lines_of(job: Job, file_id: str) -> list[tuple[int, bytes]]:
    """The lines of an upload that are not blank, with their numbers; each ends with a line break.

    UserError if there is none.
    """
    path = files.member(job.folder.parent.parent / "files", file_id, "job.json") / "data.jsonl"
    require(path.exists(), f"the file {file_id} was deleted: upload it again")
    found = [
        (number, line.rstrip(b"\r\n") + b"\n")
        for number, line in enumerate(corpus.raw_lines(str(path)), 1)
        if line.decode(errors="replace").strip()
    ]
    require(found, f"{file_id} has no line")
    return found


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
        self.ended = set()  # ids of jobs that need no worker any more
        self.paused = {}  # id of a job -> when it is tried again
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
        for name in sorted(names - self.ended):
            if not self.is_ending:
                self.attend(Job(self.folder / "jobs" / name))
        return len(self.claims)

    def attend(self, job: Job) -> None:
        """Claim a job if possible, and do what is to be done about it now."""
        if time.monotonic() < self.paused.get(job.id, 0):
            return
        try:
            if job in self.claims or self.claim(job):
                self.advance(job)
        except OSError as error:  # a full disk, or the folder was removed
            self.paused[job.id] = time.monotonic() + PAUSE_SECONDS
            program.print_error(f"{job.id}: {error}")
            if not job.folder.exists():
                self.launcher.cancel(job)
                if self.launcher.state(job) != RUNNING:
                    self.release(job)

    def claim(self, job: Job) -> bool:
        """Lock a job that has not ended. False if another one has it, or there is no room."""
        if has_ended(job):
            self.ended.add(job.id)
            return False
        if len(self.claims) >= self.cfg.most and not job.is_cancelled:  # which ends at once
            return False
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        lock = os.open(job.folder / "lock", flags, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            if job.is_cancelled:
                self.launcher.cancel(job)  # its worker may be dead
            return False
        self.claims[job] = lock
        if has_ended(job):  # while we came
            self.release(job)
            return False
        return True

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
            if is_late and "is_late" not in state:
                job.write_state(is_late=True)  # also when its training has ended
            if is_running and (job.is_cancelled or is_late):
                self.launcher.cancel(job)
            elif is_running:
                return
            elif job.is_finished:
                self.succeed(job)
            elif job.is_cancelled:
                self.end(job, "cancelled", "The job was cancelled")
            elif state["status"] != "running":
                self.begin(job)
            elif is_late:
                self.fail(job, f"the job took more than {self.cfg.most_hours:g} hours")
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
            if job.is_cancelled or self.is_ending:
                return  # the next look sees to it
        is_again = "log_begin" in job.state()
        job.add_event("The training goes on" if is_again else "The training has started")
        self.start(job)

    def start(self, job: Job) -> None:
        """Start the training."""
        size = job.log.stat().st_size if job.log.exists() else 0
        job.write_state(status="running", log_begin=size, launched_at=time.time())
        self.launcher.start(job, self.claims[job], self.seconds_left(job))

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
                elif not job.is_cancelled:
                    job.write_state(status="queued")
                    job.add_event("Its worker ends: the job waits for another one", "warn")
                    n_left += 1
            self.release(job)
        return n_left

    def running(self) -> list[Job]:
        """The jobs of ours that are training."""
        return [job for job in self.claims if self.launcher.state(job) == RUNNING]


def has_ended(job: Job) -> bool:
    """Is a job done? A damaged state is none: it will be replaced."""
    try:
        return job.state()["status"] in ENDED
    except UserError:
        return False


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
