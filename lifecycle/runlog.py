"""The run folder, which explains itself: what ran, where, with which settings, and what came of it.

    runs/demo/config.json      every setting, as resolved from defaults, files and flags
    runs/demo/launches.jsonl   one line per launch: command, versions, devices, first step, tokens
                               of an epoch
    runs/demo/tokenizer.json   a copy of the data folder's; none for gpt2 and bytes
    runs/demo/metrics.jsonl    one row per step: step tokens loss lr grad_norm batch_hash skipped
                               tokens_per_second mfu memory_gb seconds slowest_rank slowest_by (the
                               straggler's time outside collectives / that of the fastest rank),
                               and one per evaluation: step val_loss val_bits_per_byte
                               (with a mixture val_loss_by_source {name: loss}, too),
                               or step icl {task: figures}
    runs/demo/hugging_face/    of imported weights: what export writes again, such as end tokens
    runs/demo/checkpoints/     see checkpoint.py
    runs/demo/lease.json       which process owns the folder, see lifecycle/lease.py
    runs/demo/microbatch.json  the microbatch that fits, see lifecycle/microbatch.py
    runs/demo/trackers/        what --track has sent, see lifecycle/trackers.py

A row's `step` is the number of steps that are done. Its loss was computed before their last update.

A run that resumes after step n first drops the rows after n, so no step appears twice. Every reader
skips damaged lines. A run that resumes reports them, and keeps the file as it was, under the name
metrics.jsonl.damaged. A last line that a crash has cut off is normal, and is dropped silently.

Run `python -m lifecycle.runlog runs/demo` for a summary.
"""

import collections
import contextlib
import datetime
import itertools
import json
import math
import operator
import os
import platform
import re
import resource
import signal
import statistics
import sys
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

import config
import devices
import processes
import program
from config import TrainConfig
from launch import parser
from program import UserError
from storage import files

COLUMNS = {  # of metrics.jsonl, with their types; each row has a step, and some of the others
    "step": int,
    "tokens": int,
    "loss": float,
    "lr": float,
    "grad_norm": float,
    "batch_hash": (str, type(None)),
    "skipped": bool,
    "tokens_per_second": float,
    "mfu": (float, type(None)),
    "memory_gb": float,
    "seconds": float,
    "slowest_rank": int,
    "slowest_by": float,
    "val_loss": float,
    "val_bits_per_byte": float,
    "val_loss_by_source": dict,
    "icl": dict,
}
SUMMED_UP = ("step", "tokens", "loss", "seconds", "skipped")  # the columns of a summary
TASK_FIGURES = dict.fromkeys("foundry foundry_stderr chance acc nats_per_token".split(), float)
LAUNCH = {  # what is read of launches.jsonl, with its types
    "first_step": int,
    "ranks": (int, type(None)),
    "tp": int,
    "pp": int,
    "epoch_tokens": int,
}
CHUNK = 2**20  # bytes of metrics.jsonl that are read at once
SCREEN_SECONDS = 2  # between two steps on the screen, at least
WINDOW = 500  # steps over which the time left is averaged; by default an evaluation is among them
# What a run writes into its folder, beside the lease.
OWN_FILES = """config.json launches.jsonl tokenizer.json hugging_face metrics.jsonl
    microbatch.json trackers""".split()
OWN_MARKS = ["lease.json", "launches.jsonl", "checkpoints/step-*/meta.json"]


# -------------------------------------------------------------------------------------------------
# Writing


class RunLog:
    """Writes a run folder from global rank 0. On other ranks it does nothing."""

    def __init__(self, cfg: TrainConfig, global_rank: int):
        self.cfg, self.global_rank = cfg, global_rank
        self.path = Path(cfg.run_dir) / "metrics.jsonl"
        self.stop_signal = 0  # signal.SIGPIPE after the reader of our output has exited
        self.size = 0  # bytes of complete rows in the file
        self.unwritten = b""  # rows that could not be written yet
        self.shown_at = -math.inf  # when the last step was printed
        self.ends = collections.deque(maxlen=WINDOW)  # (step, when it ended) of this launch

    def start(self, *args) -> bool:
        """`write_start` on rank 0, which tells all ranks what it returns. A collective."""
        return processes.rank_zero_decides(lambda: self.write_start(*args))

    def write_start(
        self, model_cfg, cfg, launch: dict, tokenizer_file: Path, first_step: int
    ) -> bool:
        """Write the settings and this launch; drop the rows of steps that will be repeated.

        Returns whether the rows that stay have an evaluation of the model as it is now.
        OSError or UserError, before anything is changed, if the metrics of an earlier launch cannot
        be read.
        """
        folder = self.path.parent
        program.require(
            not tokenizer_file.is_symlink(),
            f"{tokenizer_file} is a link: put the file there that it points to",
        )
        folder.mkdir(parents=True, exist_ok=True)
        rows, bad = read_metrics(folder) if os.path.lexists(self.path) else ([], [])
        files.write_atomically(folder / "config.json", config.to_json(model_cfg, cfg).encode())
        if tokenizer_file.exists():
            files.write_atomically(folder / "tokenizer.json", tokenizer_file.read_bytes())
        if bad:
            copy = files.free_name(self.path.with_name("metrics.jsonl.damaged"))
            files.write_atomically(copy, self.path.read_bytes())
            faults = damaged_lines(self.path, len(bad), bad[0])
            self.say(f"{faults}. The original file is kept as {copy.name}")
        kept = [row for row in rows if row["step"] <= first_step] if first_step else []
        files.write_atomically(self.path, b"".join(map(json_line, kept)))
        self.size = self.path.stat().st_size
        # Last, so that nobody who sees this launch finds rows of the launch before it.
        command = program.shell(*sys.argv)
        launch = {"command": command, "first_step": first_step, **versions(), **launch}
        add_line(folder / "launches.jsonl", launch)
        return any(row["step"] == first_step and "loss" not in row for row in kept)

    def say(self, text: str) -> None:
        """Print to the console, from rank 0."""
        if self.global_rank == 0:
            print(text, flush=True)

    def row(self, row: dict, always_shown: bool = True) -> None:
        """Append a row of metrics, and print it unless it is one of many: see `show`.

        While the disk is full, rows are kept in memory and training continues. If the reader of our
        output has exited (Ctrl-C ends `| tee`, too), `stop_signal` asks the run to save and stop.
        """
        if self.global_rank > 0:
            return
        try:
            self.show(row, always_shown)
        except BrokenPipeError:
            self.stop_signal = signal.SIGPIPE
            program.silence()
        was_waiting = bool(self.unwritten)
        self.unwritten += json_line(row)
        try:
            self.append(self.unwritten)
            self.unwritten = b""
        except OSError as error:
            if not was_waiting:
                self.say(
                    f"cannot write {self.path} now ({error.strerror}): its rows wait in memory"
                )

    def show(self, row: dict, always: bool) -> None:
        """Print a row; a step, unless `always`, only SCREEN_SECONDS after the one printed before.

        The time left counts evaluations and saves, and not the first step, which starts slowly.
        """
        if "loss" in row:
            now = time.monotonic()
            self.ends.append((row["step"], now))
            if not always and now - self.shown_at < SCREEN_SECONDS:
                return
            self.shown_at = now
        step_seconds = None
        if len(self.ends) > 1:
            (first, begin), (last, end) = self.ends[0], self.ends[-1]
            step_seconds = (end - begin) / max(last - first, 1)
        self.say(line(row, self.cfg.max_steps, step_seconds))

    def append(self, rows: bytes) -> None:
        """Append complete rows to those in the file. OSError if that fails."""
        with open(self.path, "ab") as file:
            self.size = min(self.size, file.tell())  # the file may have been cut or deleted
            file.truncate(self.size)  # removes what an attempt that failed has left
            file.write(rows)
        self.size += len(rows)


def json_line(row: dict) -> bytes:
    """A line of a .jsonl file."""
    return json.dumps(row).encode() + b"\n"


def add_line(path: Path, row: dict) -> None:
    """Append to a short .jsonl file, on a new line even if a crash has cut off the last one."""
    before = path.read_bytes() if path.exists() else b""
    if before and not before.endswith(b"\n"):
        before += b"\n"
    files.write_atomically(path, before + json_line(row))


def launch_record(
    cfg: TrainConfig, world, precision: str, checkpoint: Path | None, epoch_tokens: int
) -> dict:
    """What launches.jsonl says of this launch, besides command and versions."""
    return {
        "epoch_tokens": epoch_tokens,
        "ranks": world.global_size,
        "device": devices.describe(world.device),
        "precision": precision,
        "tp": cfg.tp,
        "pp": cfg.pp,
        "microbatch_size": cfg.microbatch_size,
        "skip_steps": cfg.skip_steps,
        "resume": cfg.resume,
        "resumed": checkpoint and str(checkpoint),
    }


def versions() -> dict:
    """Time, host and versions, for a reader who compares two runs."""
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "host": platform.node(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "rocm": torch.version.hip,
    }


def memory_gb(device: torch.device) -> float:
    """Peak memory so far, GB (10^9 bytes): of a CUDA or ROCm device, else of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss: bytes on macOS, kB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def bits_per_byte(loss: float, tokens: int, text_bytes: int) -> float:
    """Nats per token -> bits per byte of text, which is comparable between tokenizers."""
    return loss * tokens / text_bytes / math.log(2)


def require_own_folder(run_dir) -> None:
    """UserError if a folder is not a run's and used for something else, or leads to another place.

    A file that a run reads or replaces there may not be a link. `checkpoints` may: people put
    checkpoints on a larger disk.
    """
    for name in (*OWN_FILES, "lease.json"):
        path = Path(run_dir) / name
        program.require(
            not path.is_symlink(),
            f"{path} is a link, and a run changes nothing outside of its folder: move there what "
            "it points to, or set another --run_dir",
        )
    fix = "set another --run_dir (logs of a launcher belong beside it)"
    files.require_ours(run_dir, OWN_MARKS, OWN_FILES, fix)


def remove_leftovers(run_dir) -> None:
    """Remove the temporary files of processes that were killed while they wrote."""
    for name in OWN_FILES:
        for path in Path(run_dir).glob(f"{name}.*.tmp"):
            path.unlink()


def put_aside(run_dir: str) -> Path:
    """Move the files of a finished run to run_dir-1, -2, ..., so that a new one can start.

    The lease stays, and whatever else is in the folder. UserError if they cannot be moved, as to
    another disk; then all is as it was.
    """
    folder = Path(run_dir).resolve()  # if it is a link: beside its target, on the same disk
    checkpoints = folder / "checkpoints"
    program.require(
        not checkpoints.is_symlink(),
        f"{run_dir} is finished, and its checkpoints are linked to another place: set another "
        "--run_dir",
    )
    aside = files.free_name(folder, 1)
    own = [*folder.glob("metrics.jsonl.damaged*"), *(folder / name for name in OWN_FILES)]
    moved = []
    aside.mkdir()
    try:
        # The checkpoints last: they say that the run is finished.
        for path in filter(os.path.lexists, [*own, checkpoints]):
            moved.append((path.rename(aside / path.name), path))
    except OSError as error:
        for new_path, path in moved:
            new_path.rename(path)
        aside.rmdir()
        raise UserError(
            f"cannot move the finished run to {aside} ({error.strerror}): set another --run_dir"
        ) from error
    return aside


# -------------------------------------------------------------------------------------------------
# Reading


def read(run_dir) -> list[dict]:
    """The rows of metrics.jsonl without damaged lines. UserError if there is no such file."""
    return read_metrics(run_dir)[0]


def read_metrics(run_dir) -> tuple[list[dict], list[str]]:
    """The rows of metrics.jsonl, and what is wrong with each damaged line.

    UserError if there is no such file, OSError if it cannot be read.
    """
    with metrics_of(run_dir) as path:
        return files.read_json_lines(path, {"step": int}, fault, appended=True)


@contextlib.contextmanager
def metrics_of(run_dir):
    """The path of metrics.jsonl, for a block that reads it: UserError if there is no such file."""
    try:
        yield Path(run_dir) / "metrics.jsonl"
    except FileNotFoundError as error:
        raise UserError(
            f"no metrics in {str(run_dir)!r}: give a run folder, such as runs/demo"
        ) from error


def parse(line: bytes, where: str = "a line") -> tuple[dict | None, str]:
    """(row, "") of a line of metrics.jsonl, or (None, what is wrong). See `files.parse_line`."""
    return files.parse_line(line, where, {"step": int}, fault, appended=True)


def fault(row: dict) -> str:
    """What is wrong with a row of metrics, "" if nothing."""
    wrong = files.wrong_type(row, COLUMNS)
    if wrong or min(row["step"], row.get("tokens", 0)) < 0:
        return wrong or "a count is negative"
    losses = row.get("val_loss_by_source", {})
    if wrong := files.wrong_type(losses, dict.fromkeys(losses, float)):
        return wrong
    for task, figures in row.get("icl", {}).items():
        if not isinstance(figures, dict) or files.wrong_type(figures, TASK_FIGURES):
            return f"the figures of {files.shown(task)}"
    return ""


class Kind(NamedTuple):
    """How a column of one type is read from text, and kept."""

    pattern: str  # of its JSON
    read: Callable  # str -> value
    missing: object  # stands for a value that is not there
    typecode: str = ""  # of its array; a list has none


DIGITS = r"(?:0|[1-9]\d{,17})"  # of a count that fits into 64 bits
KINDS = {
    int: Kind(DIGITS, int, -1, "q"),
    float: Kind(rf"-?{DIGITS}(?:\.\d+|)(?:e-\d+|)", float, math.nan, "f"),
    bool: Kind("true|false", "true".__eq__, False, "b"),
    str: Kind(r'"\w*"', lambda text: text[1:-1], None),
}


def kind_of(name: str) -> Kind | None:
    """The kind of a column; None if it holds objects, or is none of COLUMNS."""
    types = COLUMNS.get(name)
    return KINDS.get(types[0] if isinstance(types, tuple) else types)


class Metrics:
    """The training steps of a metrics.jsonl in columns, and its evaluations, as far as read.

    The rows of a long file are alike but for their numbers. A pattern made from one of them finds
    the columns in the others at a third of the cost of parsing JSON, and finds nothing in a line
    that is damaged. Such a line, and any other row, is parsed and checked as `read_metrics` does.
    """

    def __init__(self, names):
        """names: of columns. A loss is kept in 64 bits, any other fraction in 32."""
        self.steps = {}  # name -> array or list, a value for each step
        for name in dict.fromkeys(["step", "loss", *names]):
            typecode = "d" if name == "loss" else kind_of(name).typecode
            self.steps[name] = array(typecode) if typecode else []
        self.evaluations = []  # the rows that have a val_loss
        self.tasks = {}  # the scores of the last row that has any
        self.n_lines = self.n_bad = 0
        self.first_bad = ""  # what is wrong with the first damaged line
        self.last = {}  # the last row of a step that was parsed

    def add(self, lines: bytes) -> None:
        """Read the next lines of the file."""
        names, pattern = pattern_of(self.last, self.steps)
        text = lines.decode("latin-1")  # takes any bytes, and gives them back
        for is_other, found in itertools.groupby(pattern.findall(text), lambda row: row[-1] != ""):
            if is_other:
                for *_, line in found:
                    self.add_line(line.encode("latin-1"))
            else:
                self.add_rows(names, list(found))

    def add_line(self, line: bytes) -> None:
        """Parse and check a line."""
        self.n_lines += 1
        row, problem = parse(line, f"line {self.n_lines}")
        self.n_bad += bool(problem)
        self.first_bad = self.first_bad or problem
        if row and "loss" in row:
            self.last = row
            for name, values in self.steps.items():
                value = row.get(name)
                values.append(kind_of(name).missing if value is None else value)
        if row and "val_loss" in row:
            self.evaluations.append(row)
        self.tasks = (row or {}).get("icl", self.tasks)

    def add_rows(self, names: list[str], rows: list[tuple]) -> None:
        """Add rows that the pattern has found. names: of the first columns of each."""
        self.n_lines += len(rows)
        for name, values in self.steps.items():
            kind = kind_of(name)
            if name in names:
                texts = map(operator.itemgetter(names.index(name)), rows)
                values.extend(map(kind.read, texts))
            else:
                values.extend([kind.missing] * len(rows))

    def validation(self) -> tuple[list, list]:
        """(steps, losses) of the evaluations."""
        columns = ("step", "val_loss")
        return tuple([row[name] for row in self.evaluations] for name in columns)

    def problem(self, path: Path) -> str | None:
        """How many lines of the file are damaged, and what is wrong with the first one."""
        return damaged_lines(path, self.n_bad, self.first_bad) if self.n_bad else None


def pattern_of(row: dict, names) -> tuple[list[str], re.Pattern]:
    """(columns, a pattern of a line) for the lines of rows like this one.

    Its groups are those of `names` that the row has, then the whole line if the row is another one.
    """
    is_plain = row and all(map(kind_of, row))
    parts, captured = [], []
    for name, value in row.items() if is_plain else ():
        pattern = "null" if value is None else kind_of(name).pattern
        is_asked = name in names and value is not None
        captured += [name] * is_asked
        parts.append(f'"{name}": ' + (f"({pattern})" if is_asked else f"(?:{pattern})"))
    like_it = r"\{" + ", ".join(parts) + r"\}\n" if parts else "()(?!)"
    return captured, re.compile(rf"{like_it}|(.*\n|.+)", re.ASCII)


def read_columns(run_dir, names=()) -> Metrics:
    """The columns of metrics.jsonl: `names`, and those of a summary. Errors as `read_metrics`."""
    metrics = Metrics([*SUMMED_UP, *names])
    with metrics_of(run_dir) as path, files.open_regular(path) as file:
        while lines := file.readlines(CHUNK):
            metrics.add(b"".join(lines))
    return metrics


def damaged_lines(path: Path, n_bad: int, first: str) -> str:
    """How many lines of a file are damaged, and what is wrong with the first one."""
    lines = "1 damaged line is" if n_bad == 1 else f"{n_bad} damaged lines are"
    return f"{path}: {lines} left out, the first: {first}"


def read_launches(run_dir) -> list[dict]:
    """The complete rows of launches.jsonl, none if there is no such file."""
    path = Path(run_dir) / "launches.jsonl"
    if not os.path.lexists(path):
        return []
    rows, _ = files.read_json_lines(path, None, lambda row: files.wrong_type(row, LAUNCH), True)
    return rows


def read_settings(run_dir) -> dict:
    """config.json of a run folder. UserError if it is damaged, OSError if it does not exist."""
    path = Path(run_dir) / "config.json"
    fix = "the next start of the run writes it again"
    return parser.rename_keys(files.read_json(path, fields={"max_steps": int}, fix=fix))


# -------------------------------------------------------------------------------------------------
# Rows and runs in words


def line(row: dict, max_steps: int, step_seconds: float | None = None) -> str:
    """A row of metrics for people; a figure that is missing is nan.

    step_seconds: how long a step takes, for the time that is left.
    """
    row = collections.defaultdict(lambda: math.nan, row)
    head = f"step {row['step']:>{len(str(max_steps))}}/{max_steps}"
    if "val_loss" in row:
        bits = f"{row['val_bits_per_byte']:.3f} bits per byte"
        losses = row.get("val_loss_by_source", {}).items()
        by_source = "".join(f"  {name} {loss:.4f}" for name, loss in losses)
        return f"{head}  validation loss {row['val_loss']:.4f}  {bits}{by_source}"
    if "icl" in row:
        return "  ".join([head, *(task_line(*task) for task in row["icl"].items())])
    mfu = "n/a" if row["mfu"] is None else f"{row['mfu']:.1%}"
    figures = (
        f"{head}  loss {row['loss']:.4f}  lr {row['lr']:.2e}  grad norm {row['grad_norm']:.2f}  "
        f"{row['tokens_per_second']:,.0f} tokens/s  MFU {mfu}  {row['memory_gb']:.1f} GB"
    )
    if step_seconds is None:
        return figures
    return f"{figures}  {duration((max_steps - row['step']) * step_seconds)} left"


def duration(seconds: float) -> str:
    """Seconds as people read them, such as 2 days, 3:04:05."""
    is_sensible = abs(seconds) < 1e12
    return str(datetime.timedelta(seconds=round(seconds))) if is_sensible else "unknown time"


def task_line(name: str, figures: dict) -> str:
    """A task's accuracy by LLM Foundry's scoring beside chance; or the figures that it has."""
    figures = collections.defaultdict(lambda: math.nan, figures)
    if "foundry" in figures:
        accuracy = f"{figures['foundry']:.3f} +- {figures['foundry_stderr']:.3f}"
        return f"{name} {accuracy} (chance {figures['chance']:.3f})"
    if "acc" in figures:
        return f"{name} {figures['acc']:.3f}"
    return f"{name} {figures['nats_per_token']:.4f} nats per token"


def summary(run_dir: str, expect: str = "", metrics: Metrics | None = None) -> str:
    """Steps, validations, overfitting, what to expect, damaged lines: at most five lines.

    metrics: what `read_columns` has read, if it has.
    """
    metrics = metrics or read_columns(run_dir)
    evaluations = metrics.evaluations
    lines = [f"{run_dir}: {summary_of_steps(metrics.steps)}"]
    if evaluations:
        first, last = (collections.defaultdict(lambda: math.nan, evaluations[i]) for i in (0, -1))
        lines.append(
            f"validation loss {first['val_loss']:.3f} -> {last['val_loss']:.3f} nats per token, "
            f"{first['val_bits_per_byte']:.3f} -> {last['val_bits_per_byte']:.3f} bits per byte"
        )
        lines += overfitting(metrics.steps, evaluations, read_launches(run_dir))
    if expect:
        lines.append(f"to expect: {expect}")
    if problem := metrics.problem(Path(run_dir) / "metrics.jsonl"):
        lines.append(problem)
    return "\n".join(lines)


def summary_of_steps(steps: dict) -> str:
    """How many steps, tokens and seconds the columns are worth."""
    if not steps["step"]:
        return "0 steps"
    tokens = max(0, steps["tokens"][-1])
    seconds = math.fsum(filter(math.isfinite, steps["seconds"]))
    words = f"{steps['step'][-1]} steps, {tokens:,} tokens, {seconds:.0f} s of training"
    if skipped := sum(steps["skipped"]):
        words += f", {skipped} steps with a non-finite loss or gradient were skipped"
    return words


def overfitting(steps: dict, evaluations: list[dict], launches: list[dict]) -> list[str]:
    """A line if the validation loss has risen by 2 % from its lowest, while that of training fell.

    A training loss is the median of 20 steps.
    """
    best, last = min(evaluations, key=lambda row: row["val_loss"]), evaluations[-1]
    losses = np.asarray(steps["loss"])
    losses_then = losses[np.asarray(steps["step"]) <= max(best["step"], 1)][-20:].tolist()
    losses_now = losses[-20:].tolist()
    if not losses_then or not last["val_loss"] > 1.02 * best["val_loss"]:  # false for NaN, too
        return []
    then, now = statistics.median(losses_then), statistics.median(losses_now)
    if not now < then:
        return []
    epoch_tokens = launches[-1].get("epoch_tokens", 0) if launches else 0
    times_read = max(0, steps["tokens"][-1]) // epoch_tokens if epoch_tokens > 0 else 0
    repeated = f", on {epoch_tokens:,} tokens, each read {times_read:,} times" * (times_read > 1)
    return [
        f"overfitting: since step {best['step']} the validation loss has risen from "
        f"{best['val_loss']:.3f} to {last['val_loss']:.3f}, while the training loss fell from "
        f"{then:.3f} to {now:.3f}{repeated}; more text, fewer steps or a smaller model prevent that"
    ]


def main(argv) -> None:
    """Print a summary of a run folder, and its last row."""
    program.arguments(argv, "RUN_DIR")
    rows, settings = read(argv[0]), read_settings(argv[0])
    print(summary(argv[0], settings.get("expect")))
    seconds = [row["seconds"] for row in rows if "seconds" in row][-WINDOW:]
    step_seconds = statistics.median(seconds) if seconds else None
    print(line(rows[-1], settings["max_steps"], step_seconds) if rows else "no step is done yet")


if __name__ == "__main__":
    program.run(main)
