"""Trackers: TensorBoard, Weights & Biases, MLflow and trackio show what is in metrics.jsonl.

    fsdp_train.py --track=wandb          metrics.jsonl -> a process of its own -> W&B
                                         runs/demo/trackers/wandb.json: how far it is

A server that refuses or hangs blocks its library for minutes. So each tracker has a process, which
reads metrics.jsonl and which the run never waits for, except for a few seconds at its end. What
fails is one line in the output of the run, and is tried again every minute.

A run that resumes goes on with its curve: the record keeps its name and the last step that has
surely arrived. Steps that a run repeats after it went back to a checkpoint are not sent again;
metrics.jsonl has the figures that count. After kill -9, and after a failure of the tracker, the
steps of the last two minutes may come twice in MLflow and trackio. A step is sent with its
evaluation: when a later one has begun, which may be in the next start, or at the end of the run.

The libraries' own variables say where the curves go: WANDB_API_KEY, WANDB_PROJECT, WANDB_NAME,
WANDB_MODE=offline; MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME, MLFLOW_RUN_NAME; TRACKIO_SPACE_ID.
TensorBoard's files are in runs/demo/trackers/tensorboard.

Run `python -m lifecycle.trackers runs/demo --track=wandb` to send what is not sent yet. With
--follow it goes on until Ctrl-C.
"""

import contextlib
import importlib.util
import json
import math
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import config
import program
from config import TRACKERS
from launch import parser
from program import UserError, require
from storage import files

ROOT = Path(__file__).parent.parent
POLL = 5  # seconds between two looks at metrics.jsonl
RETRY = 60  # seconds until a tracker that failed is tried again
SURELY_ARRIVED = 60  # seconds; some libraries write what they are sent half a minute later
LAST_SECONDS = 10  # how long a tracker may take for the last steps, when the run has ended
PACKAGES = {"tensorboard": "tensorboardX", "mlflow": "mlflow-skinny"}  # others have their own name
MODULES = {"tensorboard": "tensorboardX"}
MOST_METRICS = 1000  # what MLflow takes in one request
# What names of figures may not have there: these characters, and parts such as ".." of a path.
NOT_IN_MLFLOW = re.compile(r"[^\w/. -]|(?<=/)\.*(?=/)")
SECRETS = re.compile("KEY|TOKEN|SECRET|PASSWORD")  # in the names of environment variables


# -------------------------------------------------------------------------------------------------
# In the run


def names_of(track: str) -> list[str]:
    """The trackers in a setting such as "wandb,mlflow"."""
    chosen = parser.split_names("track", track, TRACKERS)
    return [name for name in TRACKERS if name in chosen]


def require_installed(track: str) -> None:
    """UserError unless the libraries of these trackers are installed. Imports none of them."""
    for name in names_of(track):
        found = importlib.util.find_spec(MODULES.get(name, name))
        is_package = found and found.origin  # a folder wandb/, which W&B makes, has no origin
        fix = f"pip install {PACKAGES.get(name, name)}"
        require(is_package, f"--track={name} needs a package that is not installed: {fix}")


@contextlib.contextmanager
def fed(run_dir: str, track: str):
    """On rank 0: each tracker has a process while the run is in this block.

    At its end they get LAST_SECONDS for the last steps. If this process is killed, they end by
    themselves, since their standard input ends.
    """
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    feeders = []
    for name in names_of(track):
        command = [sys.executable, "-m", "lifecycle.trackers", run_dir, f"--track={name}"]
        options = {"env": os.environ | {"PYTHONPATH": path}, "start_new_session": True}  # no Ctrl-C
        feeder = subprocess.Popen([*command, "--follow"], stdin=subprocess.PIPE, **options)
        feeders.append(feeder)
    try:
        yield
    finally:
        for feeder in feeders:
            feeder.stdin.close()
        deadline = time.monotonic() + LAST_SECONDS + 2
        for feeder in feeders:
            with contextlib.suppress(subprocess.TimeoutExpired):
                feeder.wait(max(0, deadline - time.monotonic()))
            feeder.kill()


# -------------------------------------------------------------------------------------------------
# What is sent


def numbers(row: dict) -> dict[str, float]:
    """The figures of a row: {"icl": {"piqa": {"acc": 0.6}}} -> {"icl/piqa/acc": 0.6}."""
    found = {}
    for name, value in row.items():
        if isinstance(value, dict):
            found |= {f"{name}/{inner}": number for inner, number in numbers(value).items()}
        elif isinstance(value, int | float) and name != "step":  # skipped, a bool, is 0 or 1
            found[name] = float(value)
    return found


class Steps:
    """The steps in metrics.jsonl, which grows; the rows of a step are one dict of numbers."""

    def __init__(self, run: Path):
        self.tail = files.Tail(run / "metrics.jsonl")
        self.found = {}  # step -> numbers

    def above(self, last: int, last_of_run: float) -> list[tuple[int, dict]]:
        """(step, numbers) of the steps after `last`, in order, without the newest.

        An evaluation may still be added to that, unless it is the `last_of_run`.
        """
        self.read()
        self.found = {step: self.found[step] for step in sorted(self.found) if step > last}
        newest = max(self.found, default=0)
        is_whole = newest >= last_of_run
        return [item for item in self.found.items() if item[0] < newest or is_whole]

    def read(self) -> None:
        """Read the lines that are new; all of them if the file is another one."""
        with contextlib.suppress(FileNotFoundError):
            is_another, lines = self.tail.read()
            if is_another:
                self.found = {}
            for line in lines.splitlines():
                with contextlib.suppress(UserError):  # a damaged line, which the run reports
                    row = files.parse_json(line, "a row", dict, {"step": int})
                    self.found.setdefault(row["step"], {}).update(numbers(row))


@dataclass
class Record:
    """How far a tracker is: runs/demo/trackers/NAME.json."""

    id: str = ""  # of the curve, in the tracker
    step: int = -1  # the last one that has surely arrived
    has_settings: bool = False

    def save(self, path: Path) -> None:
        files.write_atomically(path, json.dumps(asdict(self)).encode())


# -------------------------------------------------------------------------------------------------
# The trackers. Each goes on after record.step, which it corrects if it knows better.
# `send` takes [(step, numbers), ...]. `where`: how a person finds the curve.
# `close(is_done)`: whether the run has taken all of its steps.


class TensorBoard:
    """Event files, one per start. Readers drop steps that an earlier file has beyond its start."""

    def __init__(self, run: Path, record: Record, settings: dict):
        sys.modules["torch"] = None  # tensorboardX would import it, which takes seconds
        from tensorboardX import SummaryWriter

        folder = run / "trackers" / "tensorboard"
        folder.mkdir(exist_ok=True)
        numbers = [int(path.suffix[1:]) for path in folder.glob("events.*.[0-9]*")]
        if not numbers:  # the run has come here without its files
            record.step, record.has_settings = -1, False
        suffix = f".{max(numbers, default=-1) + 1:06d}"  # a name that no file has
        # Its thread writes each second; its `flush` does not wait for what is in its queue.
        options = {"purge_step": record.step + 1, "filename_suffix": suffix, "flush_secs": 1}
        self.writer = SummaryWriter(str(folder), **options)
        if not record.has_settings:
            lines = [f"    {name}: {value}" for name, value in settings.items()]  # Markdown
            self.writer.add_text("settings", "\n".join(lines))
        self.where = f"tensorboard --logdir={folder}"

    def send(self, steps: list) -> None:
        for step, figures in steps:
            for name, figure in figures.items():
                self.writer.add_scalar(name, figure, step)

    def close(self, is_done: bool) -> None:
        self.writer.close()


class WeightsAndBiases:
    """A run of W&B. Its server drops a step that is not above the last."""

    def __init__(self, run: Path, record: Record, settings: dict):
        import wandb

        record.id = record.id or secrets.token_hex(4)
        self.run = wandb.init(
            id=record.id,
            name=os.environ.get("WANDB_NAME") or run.name,
            resume="allow",
            reinit="create_new",  # after a failure
            dir=str(run / "trackers"),
            config=None if record.has_settings else settings,
            settings=wandb.Settings(
                console="off", disable_git=True, disable_code=True, x_disable_stats=True
            ),
        )
        if self.run.resumed:
            record.step = self.run.step - 1  # it knows what has arrived
        folder = f"wandb sync {run / 'trackers' / 'wandb'}/offline-*"
        self.where = folder if self.run.offline else self.run.url

    def send(self, steps: list) -> None:
        for step, figures in steps:
            self.run.log(figures, step=step)

    def close(self, is_done: bool) -> None:
        self.run.finish(exit_code=0 if is_done else 1)


class MLflow:
    """A run of MLflow, which keeps a step twice if it is sent twice."""

    def __init__(self, run: Path, record: Record, settings: dict):
        import mlflow

        self.client, self.metric = mlflow.MlflowClient(), mlflow.entities.Metric
        if not record.id:
            experiment = mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", "Default"))
            name = os.environ.get("MLFLOW_RUN_NAME") or run.name
            made = self.client.create_run(experiment.experiment_id, run_name=name)
            record.id = made.info.run_id
        self.id = record.id
        self.client.update_run(self.id, status="RUNNING")
        for name, value in {} if record.has_settings else settings.items():
            self.client.log_param(self.id, name, str(value)[:500])
        record.has_settings = True  # it takes no other values later
        self.where = f"run {self.id} of {mlflow.get_tracking_uri()}"

    def send(self, steps: list) -> None:
        now = time.time_ns() // 10**6
        metrics = [
            self.metric(NOT_IN_MLFLOW.sub("_", name)[:250], figure, now, step)
            for step, figures in steps
            for name, figure in figures.items()
        ]
        for first in range(0, len(metrics), MOST_METRICS):
            self.client.log_batch(self.id, metrics[first : first + MOST_METRICS])

    def close(self, is_done: bool) -> None:
        self.client.set_terminated(self.id, "FINISHED" if is_done else "KILLED")


class Trackio:
    """A run of trackio, which keeps a step twice if it is sent twice."""

    def __init__(self, run: Path, record: Record, settings: dict):
        import trackio

        record.id = record.id or f"{run.name}-{secrets.token_hex(4)}"
        project = run.parent.name
        # Settings each time: without them it forgets those that it has.
        self.run = trackio.init(project, record.id, resume="allow", config=settings, embed=False)
        self.where = f"trackio show --project {project}"

    def send(self, steps: list) -> None:
        for step, figures in steps:
            self.run.log(figures, step=step)

    def close(self, is_done: bool) -> None:
        self.run.finish()


KINDS = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
    "trackio": Trackio,
}


# -------------------------------------------------------------------------------------------------
# The process


class Feeder:
    """Sends the steps of a run to one tracker."""

    def __init__(self, run_dir: str, name: str, say):
        self.run_dir, self.name, self.say = run_dir, name, say
        self.run = Path(run_dir).resolve()
        self.path = self.run / "trackers" / f"{name}.json"
        self.tracker = None
        self.failing = False  # and has said so

    def feed(self, ended: threading.Event) -> None:
        """Send what is there, and what comes until `ended`."""
        while not ended.is_set():
            self.try_once(self.send)
            ended.wait(RETRY if self.failing else POLL)
        self.try_once(self.finish)

    def try_once(self, action) -> None:
        """Whatever a library raises is one line, and none while it goes on."""
        try:
            action()
            self.failing = False
        except Exception as error:
            if not self.failing:
                self.say(f"{self.name} has failed ({described(error)}). {self.fix()}")
            self.failing, self.tracker = True, None

    def fix(self) -> str:
        command = program.shell("python", "-m", "lifecycle.trackers", self.run_dir)
        fix = f"metrics.jsonl keeps it; {command} --track={self.name} sends what is missing"
        deleted = f". If the curve was deleted: delete {self.path}, and a new one begins"
        return fix + deleted * self.path.exists()

    def connect(self) -> None:
        record, fix = Record(), "delete it, and a new curve begins"
        if self.path.exists():
            found = files.read_json(self.path, fix=fix)
            record = Record(**{name: found[name] for name in vars(record)})
        self.record = record
        settings = files.read_json(self.run / "config.json")
        try:
            self.tracker = KINDS[self.name](self.run, record, settings)
        finally:
            record.save(self.path)  # the id, even if the tracker failed later
        self.steps, self.max_steps = Steps(self.run), settings.get("max_steps", 0)
        self.sent = self.sent_before = record.step
        self.noted_at = time.monotonic()
        self.say(f"{self.name}: {self.tracker.where}")

    def send(self, run_has_ended: bool = False) -> None:
        if not self.tracker:
            self.connect()
        steps = self.steps.above(self.sent, self.max_steps if run_has_ended else math.inf)
        while steps:
            part, steps = steps[:50], steps[50:]
            self.tracker.send(part)
            self.sent = part[-1][0]
        if time.monotonic() - self.noted_at >= SURELY_ARRIVED:
            self.note_arrived(self.sent_before)
            self.sent_before, self.noted_at = self.sent, time.monotonic()

    def finish(self) -> None:
        self.send(run_has_ended=True)
        self.tracker.close(is_done=self.sent >= self.max_steps)
        self.note_arrived(self.sent)

    def note_arrived(self, step: int) -> None:
        self.record.step, self.record.has_settings = step, True
        self.record.save(self.path)


def described(error: Exception) -> str:
    """An error in one line."""
    return without_secrets(" ".join(f"{type(error).__name__}: {error}".split()))[:200]


def without_secrets(words: str) -> str:
    """What libraries say, without the passwords and keys that they quote."""
    words = re.sub(r"(https?://)[^/@\s]*@", r"\1", words)  # name:password@
    words = re.sub(r"(https?://[^?\s]*)\?\S*", r"\1", words)  # ?write_token=...
    for name, value in os.environ.items():
        if SECRETS.search(name.upper()) and len(value) >= 8:
            words = words.replace(value, f"${name}")
    return words


def end_with(pipe: int, ended: threading.Event, feeder: Feeder) -> None:
    """A thread: when the pipe ends, so has the run, and this process ends soon."""
    while os.read(pipe, 1000):
        pass
    ended.set()
    time.sleep(LAST_SECONDS)
    feeder.say(f"{feeder.name} has not taken the last steps in time. {feeder.fix()}")
    os._exit(1)


@dataclass
class Settings:
    """What is sent where."""

    track: str = ""  # tensorboard, wandb, mlflow, trackio; several: wandb,mlflow
    follow: bool = False  # go on until standard input ends, or Ctrl-C; a run does so

    def check(self) -> None:
        """Raise UserError for a name that is not known, or none."""
        names = names_of(self.track)
        require(names, f"nothing to send to: set --track={TRACKERS[0]}")
        one = len(names) == 1 or not self.follow
        require(one, "--follow takes one tracker: start a process for each")


def main(argv) -> None:
    """Send the metrics of a run to trackers."""
    (run_dir,), cfg = config.load(argv, Settings, takes="RUN_DIR")
    known = Path(run_dir, "config.json").is_file()
    require(known, f"no run in {run_dir!r}: give a run folder, such as runs/demo")
    require_installed(cfg.track)
    folder = Path(run_dir) / "trackers"
    folder.mkdir(exist_ok=True)
    standard_input, standard_error = os.dup(0), os.dup(2)

    def say(line: str) -> None:
        with contextlib.suppress(OSError):
            os.write(standard_error, f"{without_secrets(line)}\n".encode())

    feeders = [Feeder(run_dir, name, say) for name in names_of(cfg.track)]
    ended = threading.Event()
    if cfg.follow:
        for number in (signal.SIGTERM, signal.SIGUSR1):  # those of SLURM are meant for the run
            signal.signal(number, signal.SIG_IGN)
        ending = (standard_input, ended, feeders[0])
        threading.Thread(target=end_with, args=ending, daemon=True).start()
    else:
        ended.set()
    with contextlib.ExitStack() as locks:
        for feeder in feeders:
            state = f"{run_dir} is sent to {feeder.name}"
            locks.enter_context(files.locked(folder / f"{feeder.name}.lock", state))
        program.silence()  # what libraries print
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for feeder in feeders:
            feeder.feed(ended)
    if any(feeder.failing for feeder in feeders):
        raise SystemExit(2)


if __name__ == "__main__":
    program.run(main)
