"""Run folders as JSON: a list of all, their curves, settings and evaluations.

    GET /api/runs                        one line for each run, from the end of its metrics
    GET /api/runs/NAME/curve             a column of its metrics, in as many points as asked for
    GET /api/runs/NAME/about             settings, launches, evaluation
    GET /api/runs/NAME/card              the model card (weights/card.py)
    GET /api/evaluations                 the scores of all runs, task by task

There may be hundreds of runs of millions of rows. The list reads the last megabyte of a file, and
nothing of a file that has not changed. A curve's file is read once, from where the reading before
ended (`Columns`): 36 bytes stay in memory for a row, and the runs that were asked for least
recently are forgotten. Its points keep the minima and maxima of the rows between them.

A name is a path below a root, at most three folders deep. Links are not followed.
"""

import contextlib
import math
import os
import platform
import re
import threading
import time
from array import array
from collections import OrderedDict
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated

from fastapi import FastAPI, Query
from fastapi.responses import Response

from launch import parser
from lifecycle import lease, plot, runlog
from program import UserError, require
from storage import files
from web.files import is_folder
from web.shapes import ApiError, as_json, public
from weights import card

DEPTH = 3  # of folders below a root
MARKS = ("metrics.jsonl", "launches.jsonl", "lease.json", "checkpoints")  # of a run folder
TAIL_BYTES = 2**20  # of metrics.jsonl, in which the last rows are looked for
CHUNK = 2**20  # bytes that are read at once
READ_SECONDS = 2.0  # for one answer; a curve that takes longer comes in parts
MOST_ROWS = 4_000_000  # in memory, of all runs together, unless a single run has more
MOST_POINTS = 5000
CURVES = ("loss", "lr", "grad_norm", "tokens_per_second", "mfu")
READ = (*CURVES, "seconds")


def add_runs(app: FastAPI, folders: dict[str, Path | str]) -> None:
    """Add the endpoints. folders: {prefix of names, without a slash: folder of run folders}."""
    runs = Runs(folders)

    @app.get("/api/runs")
    def listed():
        """All runs, the one that changed last first."""
        return as_json({"runs": runs.listed()})

    @app.get("/api/runs/{name:path}/curve")
    def curve(
        name: str,
        column: str = "loss",
        points: Annotated[int, Query(ge=2, le=MOST_POINTS)] = 600,
        after: Annotated[int, Query(ge=-1, lt=2**63)] = -1,
    ):
        """A column of a run's metrics, in at most so many points, of the steps after one."""
        return as_json(runs.curve(name, column, points, after))

    @app.get("/api/runs/{name:path}/about")
    def about(name: str):
        """The settings of a run, its launches, its evaluation."""
        return as_json(runs.about(name))

    @app.get("/api/runs/{name:path}/card")
    def model_card(name: str):
        """The model card, in Markdown."""
        file = re.sub(r"[^A-Za-z0-9._-]", "-", name)[-100:]
        headers = {"Content-Disposition": f'attachment; filename="{file}-card.md"'}
        content = runs.card(name).encode(errors="replace")
        return Response(content, media_type="text/markdown", headers=headers)

    @app.get("/api/evaluations")
    def evaluations():
        """The scores of all runs that have any."""
        return as_json(runs.evaluations())


# --------------------------------------------------------------------------------------------------
# All runs


class Runs:
    """The runs of some folders. Any thread may call any method."""

    def __init__(self, folders: dict[str, Path | str]):
        self.roots = {prefix: Path(folder) for prefix, folder in folders.items()}
        self.summaries = {}  # folder -> Summary
        self.columns = OrderedDict()  # folder -> Columns, the one asked for last at the end
        self.list_lock = threading.Lock()
        self.curve_lock = threading.Lock()

    def listed(self) -> list[dict]:
        """A line for each run, the one that changed last first."""
        with self.list_lock:
            found = [self.line(name, folder) for name, folder in self.found()]
        return sorted(found, key=lambda line: line["updated"], reverse=True)

    def found(self) -> list[tuple[str, Path]]:
        """(name, folder) of each run, and of each folder that could be meant to be one."""
        found = []
        for prefix, root in self.roots.items():
            head = f"{prefix}/" if prefix else ""
            found += [(f"{head}{name}", folder) for name, folder in below(root)]
        known = {folder for _, folder in found}
        for folder in self.summaries.keys() - known:
            del self.summaries[folder]
        return found

    def line(self, name: str, folder: Path) -> dict:
        """What the list says of a run."""
        summary = self.summaries.setdefault(folder, Summary(folder))
        printable = "".join(letter if letter.isprintable() else "\ufffd" for letter in name)
        line = {"name": printable, **summary.line()}
        columns = self.columns.get(folder)
        if columns and not line["problem"]:
            line["problem"] = columns.problem
        if printable != name:
            line |= {"state": "damaged", "problem": "its folder has no printable name: rename it"}
        return line

    def folder(self, name: str) -> Path:
        """The folder of a run. ApiError unless there is one, below one of the roots."""
        prefix, _, rest = name.partition("/")
        # Of runs with the same name the first one in the list counts.
        for root, inner in ((self.roots.get(""), name), (self.roots.get(prefix), rest)):
            folder = inside(root, inner) if root and prefix else None
            if folder:
                return folder
        raise ApiError(404, f"there is no run {name[:100]!r}", param="name")

    def curve(self, name: str, column: str, points: int, after: int) -> dict:
        """A column of a run: x, low, mean, high and more. ApiError if there is none."""
        if column not in CURVES:
            raise ApiError(400, f"column is {column[:40]!r}: set one of {CURVES}", param="column")
        folder = self.folder(name)
        with self.curve_lock:
            columns = self.read(folder)
            last = columns.steps[-1] if columns.steps else 0
            restarts = restarts_of(folder, last)
            return {
                "column": column,
                "last": last,
                "value": columns.last_value(column),
                **columns.curve(column, points, after),
                "val": columns.validation(points, after) if column == "loss" else NO_POINTS,
                "restarts": [{"x": at, "label": label} for at, label in restarts],
                "problem": columns.problem,
            }

    def read(self, folder: Path) -> "Columns":
        """The columns of a run, as far as its file can be read in READ_SECONDS."""
        columns = self.columns.setdefault(folder, Columns(folder / "metrics.jsonl"))
        self.columns.move_to_end(folder)
        columns.read(time.monotonic() + READ_SECONDS)
        n_rows = sum(len(each.steps) for each in self.columns.values())
        while n_rows > MOST_ROWS and len(self.columns) > 1:
            _, forgotten = self.columns.popitem(last=False)
            n_rows -= len(forgotten.steps)
        return columns

    def about(self, name: str) -> dict:
        """Settings, launches and evaluation of a run."""
        folder = self.folder(name)
        launches, problem = [], None
        try:
            launches = card.launches_of(folder)
        except (UserError, OSError) as error:
            problem = words_of(error)
        with self.list_lock:
            line = self.line(name, folder)
            summary = self.summaries[folder]
            settings, scores = public(summary.settings), summary.evaluation()
        about = {"settings": settings, "evaluation": scores, "launches": public(launches)}
        return {"name": name, "problem": line["problem"] or problem, **about}

    def card(self, name: str) -> str:
        """The model card of a run. ApiError if it has no settings."""
        folder = self.folder(name)
        scores = self.about(name)["evaluation"]
        with self.curve_lock:
            columns = self.read(folder)
            record = card.record(columns.metrics, scores, columns.problem)
        try:
            return public(card.page(folder, name, record))
        except (UserError, OSError) as error:
            raise ApiError(404, f"the run {name[:100]!r} has no card: {words_of(error)}") from error

    def evaluations(self) -> dict:
        """The scores of all runs that have any, and the names of the tasks."""
        with self.list_lock:
            rows = []
            for name, folder in self.found():
                self.line(name, folder)
                if scores := self.summaries[folder].evaluation():
                    rows.append({"name": name, "scores": scores})
        tasks = sorted({task for row in rows for task in row["scores"]})
        return {"tasks": tasks, "rows": sorted(rows, key=lambda row: row["name"])}


NO_POINTS = {"x": [], "y": []}


def words_of(error: Exception) -> str:
    """What is wrong with a file, without the path of its folder."""
    if isinstance(error, OSError):
        return f"{Path(error.filename or 'a file').name}: {error.strerror}"
    return public(str(error))


def below(root: Path, depth: int = DEPTH) -> list[tuple[str, Path]]:
    """(path below the root, folder) of the run folders there, by name.

    Also of folders that cannot be read, are empty, or hold another model: they are shown as such.
    """
    found = []
    for folder in folders_in(root):
        names = names_in(folder)
        is_run = names is None or not names.isdisjoint(MARKS)
        is_odd = not names or "config.json" in names
        if is_run or (is_odd and not folders_in(folder)):
            found.append((folder.name, folder))
        elif depth > 1:
            found += [(f"{folder.name}/{rest}", inner) for rest, inner in below(folder, depth - 1)]
    return found


def folders_in(folder: Path) -> list[Path]:
    """The folders in one, by name, without hidden ones and links."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        folders = [entry for entry in entries if entry.is_dir(follow_symlinks=False)]
        return sorted(folder / entry.name for entry in folders if entry.name[0] != ".")
    return []


def inside(root: Path, name: str) -> Path | None:
    """The folder of a name below a root; None if there is none, or a link is on the way."""
    parts = name.split("/")
    is_name = len(parts) <= DEPTH and not {"", ".", ".."} & set(parts) and "\0" not in name
    folder = root
    for part in parts if is_name else ():
        folder = folder / part
        if not is_folder(folder):
            return None
    return folder if is_name else None


# --------------------------------------------------------------------------------------------------
# Files of a run


def stamp_of(path: Path) -> tuple | None:
    """What changes with a file: None if there is none."""
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def restarts_of(run_dir: Path, last: int) -> list[tuple[int, str]]:
    """(step, label) of the restarts before the last step, as far as they can be read."""
    with contextlib.suppress(UserError, OSError):
        card.launches_of(run_dir)
        labels = plot.restart_labels(str(run_dir))
        return [(step, label) for step, label in labels.items() if 0 < step < last]
    return []


def require_no_link(path: Path) -> None:
    """UserError for a link: a folder from elsewhere may hold one to any file of this machine."""
    require(not path.is_symlink(), f"{path.name} is a link, which is not followed here")


def settings_of(folder: Path) -> dict:
    """config.json of a run. UserError if it is damaged, OSError if it is not there."""
    text = card.content_of(folder / "config.json")
    return parser.rename_keys(files.parse_json(text, "config.json"))


def owner_of(folder: Path) -> dict | None:
    """The process that owns this run now, as its lease names it; None if there is none.

    A lease has a heartbeat every lease.BEAT seconds. Its lock is left alone: a run that starts
    would take a reader for another run.
    """
    path = folder / "lease.json"
    try:
        age = time.time() - os.lstat(path).st_mtime
        owner = None if path.is_symlink() else lease.read_lease(path)
    except OSError:
        return None
    if not owner or age > 3 * lease.BEAT:
        return None
    return owner if owner["host"] != platform.node() or is_alive(owner["pid"]) else None


def is_alive(pid: int) -> bool:
    """Is there such a process on this machine?"""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (ProcessLookupError, OverflowError):
        return False
    return pid > 0


# --------------------------------------------------------------------------------------------------
# A line of the list


@dataclass
class Summary:
    """What the list says of one run, from files that are read again when they have changed."""

    folder: Path
    stamps: dict = field(default_factory=dict)  # file -> its state when it was read
    settings: dict = field(default_factory=dict)
    rows: dict = field(default_factory=dict)  # kind of row -> the last one of metrics.jsonl
    problems: dict = field(default_factory=dict)  # file -> what is wrong with it
    results: dict = field(default_factory=dict)  # file of results -> {task: score}

    def line(self) -> dict:
        """State, problem and last figures."""
        self.update("config.json", self.read_settings)
        self.update("metrics.jsonl", self.read_tail)
        step_row, val_row = self.rows.get("loss", {}), self.rows.get("val_loss", {})
        max_steps = self.settings.get("max_steps")
        step = step_row.get("step", val_row.get("step", 0))
        state, problem = self.state(step, max_steps)
        return {
            "state": state,
            "problem": problem,
            "step": step,
            "max_steps": max_steps if files.has_type(max_steps, int) else None,
            "loss": step_row.get("loss"),
            "val_loss": val_row.get("val_loss"),
            "tokens_per_second": step_row.get("tokens_per_second"),
            "updated": self.updated(),
        }

    def update(self, name: str, read) -> None:
        """Call read() if a file has changed, and note what is wrong with it."""
        stamp = stamp_of(self.folder / name)
        if name in self.stamps and self.stamps[name] == stamp:
            return
        self.stamps[name] = stamp
        self.problems.pop(name, None)
        try:
            read()
        except FileNotFoundError:
            pass
        except (UserError, OSError) as error:
            self.problems[name] = words_of(error)

    def read_settings(self) -> None:
        """Read config.json."""
        self.settings = {}
        self.settings = settings_of(self.folder)

    def read_tail(self) -> None:
        """Find the last row of each kind. UserError if there are lines, and no row among them."""
        self.rows = {}
        path = self.folder / "metrics.jsonl"
        require_no_link(path)
        with files.open_regular(path) as file:
            first, _ = runlog.parse(file.readline(TAIL_BYTES))
            lines = last_lines(file)
        rows = {key: last_row(lines, key) for key in ("loss", "val_loss", "icl")}
        has_row = any(rows.values())
        require(has_row or not lines.strip(), "metrics.jsonl is damaged (no row can be read)")
        self.rows = {key: row for key, row in (rows | {"first": first}).items() if row}

    def state(self, step: int, max_steps) -> tuple[str, str | None]:
        """(state, problem) of the run."""
        problem = next(iter(self.problems.values()), None)
        if problem:
            return "damaged", problem
        names = names_in(self.folder)
        if names is None:
            return "damaged", "the folder cannot be read: give yourself the permission"
        if names.isdisjoint(MARKS):
            return "empty", "no run of this project" if names else "the folder is empty"
        if owner_of(self.folder):
            return "running", None
        if not self.rows:
            words = "weights that were imported, and not trained here"
            is_imported = "checkpoints" in names and not self.settings
            return "empty", words if is_imported else "no step is done yet"
        if not self.settings:
            return "stopped", "config.json is missing"
        is_finished = files.has_type(max_steps, int) and step >= max_steps
        return "finished" if is_finished else "stopped", None

    def updated(self) -> float:
        """When the metrics changed last, or the folder, in Unix seconds."""
        for path in (self.folder / "metrics.jsonl", self.folder):
            with contextlib.suppress(OSError):
                return os.lstat(path).st_mtime
        return 0.0

    def evaluation(self) -> dict:
        """The scores of the run: those of its last evaluation, then those of files of results.

        Of adapters also the validation loss, whose baseline is that of their base: before step 1.
        """
        scores = card.scores_of(self.rows.get("icl", {}).get("icl", {}))
        before, after = (self.rows.get(key, {}).get("val_loss") for key in ("first", "val_loss"))
        if self.settings.get("lora_rank") and card.is_finite(before) and card.is_finite(after):
            figures = {"score": after, "baseline": before, "n": None, "stderr": None}
            scores["held-out loss"] = {**figures, "measure": "nats per token"}
        for name in filter(card.is_result, sorted(names_in(self.folder) or ())):
            self.update(name, partial(self.read_results, name))
            scores |= self.results[name]
        return scores

    def read_results(self, name: str) -> None:
        """Read a file that `python -m evaluation --out` has written. Others have no scores."""
        self.results[name] = card.results_of(self.folder / name)


def names_in(folder: Path) -> set[str] | None:
    """The names in a folder, None if it cannot be read."""
    try:
        return set(os.listdir(folder))
    except OSError:
        return None


def last_lines(file) -> bytes:
    """The complete lines in the last bytes of a file."""
    size = os.fstat(file.fileno()).st_size
    begin = max(0, size - TAIL_BYTES)
    file.seek(begin)
    content = file.read(size - begin)
    first = content.find(b"\n") + 1 if begin else 0
    return content[first : content.rfind(b"\n") + 1]


def last_row(lines: bytes, key: str) -> dict:
    """The last sound row of metrics that has a key; {} if none has."""
    end = len(lines)
    mark = b'"%s":' % key.encode()
    for _ in range(100):
        place = lines.rfind(mark, 0, end)
        if place < 0:
            break
        begin = lines.rfind(b"\n", 0, place) + 1
        row, _ = runlog.parse(lines[begin : lines.find(b"\n", place)])
        if row and key in row:
            return row
        end = begin
    return {}


# --------------------------------------------------------------------------------------------------
# The columns of one run


class Columns:
    """The columns of a metrics.jsonl that grows, as far as it has been read."""

    def __init__(self, path: Path):
        self.path = path
        self.unreadable = ""
        self.begin()

    def begin(self) -> None:
        """Forget all that was read."""
        self.tail = files.Tail(self.path)
        self.clear()

    def clear(self) -> None:
        """Forget all rows."""
        self.metrics = runlog.Metrics(READ)

    @property
    def steps(self) -> array:
        """The step of each row."""
        return self.metrics.steps["step"]

    @property
    def problem(self) -> str | None:
        """What is wrong with the file, or that not all of it has been read."""
        if self.unreadable:
            return self.unreadable
        if self.tail.size - self.tail.offset > CHUNK:
            share = self.tail.offset / self.tail.size
            return f"{share:.0%} of metrics.jsonl have been read: ask again"
        return self.metrics.problem(Path("metrics.jsonl"))

    def read(self, deadline: float) -> None:
        """Read the complete lines that are new, until a moment of time.monotonic()."""
        self.unreadable = ""
        try:
            require_no_link(self.path)
            while True:
                is_another, lines = self.tail.read(CHUNK)
                if is_another:
                    self.clear()
                self.metrics.add(lines)
                if not lines or time.monotonic() >= deadline:
                    return
        except FileNotFoundError:
            self.begin()
        except (UserError, OSError) as error:
            self.begin()
            self.unreadable = words_of(error)

    def last_value(self, column: str) -> float | None:
        """The value of a column at the last step; None if there is none."""
        value = self.metrics.steps[column][-1] if self.steps else math.nan
        return float(f"{value:.7g}")

    def curve(self, column: str, points: int, after: int) -> dict:
        """x, low, mean and high of the steps after one."""
        found = plot.envelope(self.steps, self.metrics.steps[column], points, after)
        return dict(zip(("x", "low", "mean", "high"), found, strict=True))

    def validation(self, points: int, after: int) -> dict:
        """x and y of the validation losses of the steps after one."""
        x, _, mean, _ = plot.envelope(*self.metrics.validation(), points, after)
        return {"x": x, "y": mean}
