"""The run folder, which explains itself: what ran, where, with which settings, and what came of it.

    runs/demo/config.json      every setting, as resolved from defaults, files and flags
    runs/demo/launches.jsonl   one line a launch: command, versions, devices, first step
    runs/demo/tokenizer.json   a copy, when the tokenizer was trained here
    runs/demo/metrics.jsonl    one line a step: step tokens loss lr grad_norm batch_hash skipped tokens_per_second mfu
                               memory_gb seconds slowest_rank slowest_by (its own seconds / those of the fastest),
                               and one an evaluation: step val_loss val_bits_per_byte, or step icl {task: figures}
    runs/demo/checkpoints/     see checkpoint.py
    runs/demo/lease.json       who owns the folder, see lifecycle/lease.py
    runs/demo/microbatch.json  the microbatch that fits, see lifecycle/microbatch.py

A step's row has its 1-based number, so `step` counts the updates that are done; its loss was taken before the update.
A run that goes on from step n first drops the rows after n, so no step is there twice. Damaged lines are left out by
every reader; a run that goes on says so and keeps the file as it was, as metrics.jsonl.damaged. A last line that a
crash has cut off is nothing unusual, and is dropped without a word.

Run `python -m lifecycle.runlog runs/demo` for a summary. Read next: lifecycle/lease.py.
"""

import collections
import datetime
import json
import math
import os
import platform
import resource
import signal
import sys
import time
from pathlib import Path

import torch

import config
import program
from config import UserError
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
    "icl": dict,
}


class RunLog:
    """Writes a run folder; all but rank 0 do nothing."""

    def __init__(self, cfg, rank: int):
        self.cfg, self.rank = cfg, rank
        self.path = Path(cfg.run_dir) / "metrics.jsonl"
        self.asked = 0  # signal.SIGPIPE once the reader of the output has left
        self.size, self.unwritten = (
            0,
            b"",
        )  # bytes of whole rows in the file, and those that did not go there yet

    def start(self, model_cfg, cfg, launch: dict, tokenizer_file: Path, first_step: int) -> None:
        """Write down the settings and this launch; forget metrics of steps that will be done again.

        Raises OSError, before anything is changed, if the metrics of an earlier launch cannot be read.
        """
        if self.rank > 0:
            return
        folder = self.path.parent
        linked = tokenizer_file.is_symlink()
        config.require(
            not linked, f"{tokenizer_file} is a link: put the file there that it points to"
        )
        folder.mkdir(parents=True, exist_ok=True)
        rows, bad = read_rows(self.path) if os.path.lexists(self.path) else ([], [])
        files.write_atomically(folder / "config.json", config.to_json(model_cfg, cfg).encode())
        if tokenizer_file.exists():
            files.write_atomically(folder / "tokenizer.json", tokenizer_file.read_bytes())
        if bad:
            aside = keep_damaged(self.path)
            self.say(f"{left_out(self.path, bad)}. The file as it was is kept as {aside.name}")
        kept = [row for row in rows if row["step"] <= first_step] if first_step else []
        files.write_atomically(
            self.path, b"".join(json.dumps(row).encode() + b"\n" for row in kept)
        )
        self.size = self.path.stat().st_size
        # Last, so that a launch on record has no rows of the launch before after its first step.
        launch = {"command": " ".join(sys.argv), "first_step": first_step, **versions(), **launch}
        add_line(folder / "launches.jsonl", launch)

    def say(self, text: str) -> None:
        """To the console, from rank 0."""
        if self.rank == 0:
            print(text, flush=True)

    def row(self, row: dict) -> None:
        """Append one line of metrics and show it. While the disk is full, the rows wait and training goes on.

        If the reader of the output has left, `asked` says so: Ctrl-C ends `| tee`, too, and the run is to save first.
        """
        if self.rank > 0:
            return
        try:
            self.say(line(row, self.cfg.max_steps))
        except BrokenPipeError:
            self.asked = signal.SIGPIPE
            program.silence()
        waited = bool(self.unwritten)
        self.unwritten += json.dumps(row).encode() + b"\n"
        try:
            with open(self.path, "ab") as file:
                self.size = min(self.size, file.tell())  # somebody may have cut or deleted it
                file.truncate(self.size)  # without what an earlier try has left there
                file.write(self.unwritten)
            self.size, self.unwritten = self.size + len(self.unwritten), b""
        except OSError as error:
            if not waited:
                self.say(
                    f"cannot write {self.path} now ({error.strerror}): its rows are kept for later"
                )


def start_reading(loss, grad_norm, batch_hash):
    """Start copying a step's figures to the host; returns a function that waits for them: (loss, norm, hash).

    Who calls it when the next step is queued already does not let the device wait for the host.
    """
    figures = [x.to("cpu", non_blocking=loss.is_cuda) for x in (loss, grad_norm, batch_hash)]
    copied = torch.cuda.current_stream().record_event() if loss.is_cuda else None

    def read():
        if copied:
            copied.synchronize()
        return [x.item() for x in figures]

    return read


def line(row: dict, max_steps: int) -> str:
    """A row of metrics for people; a figure that is not there is nan."""
    row = collections.defaultdict(lambda: math.nan, row)
    head = f"step {row['step']:>{len(str(max_steps))}}/{max_steps}"
    if "val_loss" in row:
        return f"{head}  validation loss {row['val_loss']:.4f}  {row['val_bits_per_byte']:.3f} bits per byte"
    if "icl" in row:
        return f"{head}  " + "  ".join(map(task_line, *zip(*row["icl"].items(), strict=True)))
    mfu = "n/a" if row["mfu"] is None else f"{row['mfu']:.1%}"
    seconds = (max_steps - row["step"]) * row["seconds"]
    left = datetime.timedelta(seconds=round(seconds)) if abs(seconds) < 1e12 else "unknown time"
    return (
        f"{head}  loss {row['loss']:.4f}  lr {row['lr']:.2e}  grad norm {row['grad_norm']:.2f}  "
        f"{row['tokens_per_second']:,.0f} tokens/s  MFU {mfu}  {row['memory_gb']:.1f} GB  {left} left"
    )


def task_line(name: str, figures: dict) -> str:
    """A task's accuracy by LLM Foundry's scoring beside chance; of the other kinds what they have."""
    figures = collections.defaultdict(lambda: math.nan, figures)
    if "foundry" in figures:
        return f"{name} {figures['foundry']:.3f} +- {figures['foundry_stderr']:.3f} (chance {figures['chance']:.3f})"
    if "acc" in figures:
        return f"{name} {figures['acc']:.3f}"
    return f"{name} {figures['nats_per_token']:.4f} nats a token"


def bits_per_byte(loss: float, tokens: int, text_bytes: int) -> float:
    """Nats a token -> bits a byte of text: comparable between tokenizers."""
    return loss * tokens / text_bytes / math.log(2)


def memory_gb(device: torch.device) -> float:
    """Peak memory so far, GB (10^9 bytes): of a CUDA or ROCm device, else of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss: bytes on macOS, kB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def versions() -> dict:
    """What ran, for whoever compares two runs."""
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "host": platform.node(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "rocm": torch.version.hip,
    }


def read(run_dir) -> list[dict]:
    """The rows of metrics.jsonl without damaged lines. UserError if there is no such file."""
    return read_metrics(run_dir)[0]


def read_metrics(run_dir) -> tuple[list[dict], list[str]]:
    """The rows of metrics.jsonl, and what is wrong with its other lines. UserError if there is no such file."""
    try:
        return read_rows(Path(run_dir) / "metrics.jsonl")
    except FileNotFoundError as error:
        raise UserError(
            f"no metrics in {str(run_dir)!r}: give a run folder, such as runs/demo"
        ) from error


def read_rows(path: Path) -> tuple[list[dict], list[str]]:
    """See `read_metrics`. OSError if the file is not there or cannot be read."""
    return files.read_json_lines(path, {"step": int}, fault, appended=True)


def fault(row: dict) -> str:
    """What is wrong with a row of metrics, "" if nothing."""
    if wrong := files.wrong_type(row, COLUMNS):
        return wrong
    for name in ("step", "tokens"):
        if row.get(name, 0) < 0:
            return f"{name!r} is {row[name]}"
    for task, figures in row.get("icl", {}).items():
        shown = dict.fromkeys(
            ("foundry", "foundry_stderr", "chance", "acc", "nats_per_token"), float
        )
        wrong = (
            files.wrong_type(figures, shown)
            if isinstance(figures, dict)
            else f"it is {files.shown(figures)}"
        )
        if wrong:
            return f"the figures of {files.shown(task)}: {wrong}"
    return ""


def left_out(path: Path, bad: list[str]) -> str:
    """How many lines of a file are damaged, and which is the first."""
    return f"{path}: {len(bad)} damaged line{'s are' if len(bad) > 1 else ' is'} left out, the first: {bad[0]}"


def require_no_links(run_dir) -> None:
    """UserError if a file that a run reads or replaces in its folder is a link to another place.

    `checkpoints` may be one: people put them on a larger disk.
    """
    names = "config.json launches.jsonl tokenizer.json metrics.jsonl microbatch.json lease.json"
    for name in names.split():
        path = Path(run_dir) / name
        words = f"{path} is a link, and a run changes nothing outside of its folder"
        config.require(
            not path.is_symlink(),
            f"{words}: move there what it points to, or set another --run_dir",
        )


def keep_damaged(path: Path) -> Path:
    """Copy a file to NAME.damaged, or NAME.damaged-2 and so on if that is there."""
    aside, number = path.with_name(f"{path.name}.damaged"), 1
    while os.path.lexists(aside):
        number += 1
        aside = path.with_name(f"{path.name}.damaged-{number}")
    files.write_atomically(aside, path.read_bytes())
    return aside


def read_launches(run_dir) -> list[dict]:
    """The rows of launches.jsonl that are whole, none if there is no such file."""
    path = Path(run_dir) / "launches.jsonl"
    if not os.path.lexists(path):
        return []
    return files.read_json_lines(path, fault=wrong_launch, appended=True)[0]


def wrong_launch(row: dict) -> str:
    """What is wrong with a row of launches.jsonl, "" if nothing."""
    return files.wrong_type(row, {"first_step": int, "ranks": (int, type(None))})


def add_line(path: Path, row: dict) -> None:
    """Append to a short .jsonl file, on a line of its own even where a crash has cut off the last one."""
    before = path.read_bytes() if path.exists() else b""
    if before and not before.endswith(b"\n"):
        before += b"\n"
    files.write_atomically(path, before + json.dumps(row).encode() + b"\n")


def read_settings(run_dir) -> dict:
    """config.json of a run folder. UserError if it is damaged, OSError if it is not there."""
    path, fix = Path(run_dir) / "config.json", "the next start of the run writes it anew"
    return config.renamed(files.read_json(path, fields={"max_steps": int}, fix=fix), str(path))


def put_aside(run_dir: str) -> Path:
    """Move a finished run to run_dir-1, -2, ...: nothing is lost when another one starts. The lease stays."""
    number = 1
    while (aside := Path(f"{Path(run_dir)}-{number}")).exists():
        number += 1
    aside.mkdir()
    for path in sorted(
        Path(run_dir).iterdir(), key=lambda path: path.name == "checkpoints"
    ):  # they say it is finished
        if path.name != "lease.json":
            path.rename(aside / path.name)
    return aside


def summary(run_dir: str, expect: str = "") -> str:
    """First and last validation, and what to expect, in three lines at most; one more if metrics are damaged."""
    rows, bad = read_metrics(run_dir)
    vals = [row for row in rows if "val_loss" in row]
    steps = [row for row in rows if "loss" in row]
    lines = [f"{run_dir}: {steps[-1]['step'] if steps else 0} steps"]
    if steps:
        seconds = sum(row.get("seconds", 0) for row in steps)
        lines[0] += f", {steps[-1].get('tokens', 0):,} tokens, {seconds:.0f} s of training"
        skipped = sum(row.get("skipped", False) for row in steps)
        lines[0] += f", {skipped} steps without a finite loss were skipped" if skipped else ""
    if vals:
        a, b = vals[0], vals[-1]
        bits = [row.get("val_bits_per_byte", math.nan) for row in (a, b)]
        lines.append(
            f"validation loss {a['val_loss']:.3f} -> {b['val_loss']:.3f} nats a token, "
            f"{bits[0]:.3f} -> {bits[1]:.3f} bits per byte"
        )
    if expect:
        lines.append(f"to expect: {expect}")
    if bad:
        lines.append(left_out(Path(run_dir) / "metrics.jsonl", bad))
    return "\n".join(lines)


def main(argv) -> None:
    config.arguments(argv, "RUN_DIR")
    rows, settings = read(argv[0]), read_settings(argv[0])
    print(summary(argv[0], settings.get("expect")))
    print(line(rows[-1], settings["max_steps"]) if rows else "no step is done yet")


if __name__ == "__main__":
    config.run(main)
