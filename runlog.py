"""The run folder, which explains itself: what ran, where, with which settings, and what came of it.

    runs/demo/config.json      every setting, as resolved from defaults, files and flags
    runs/demo/launches.jsonl   one line a launch: command, versions, devices, first step
    runs/demo/tokenizer.json   a copy, when the tokenizer was trained here
    runs/demo/metrics.jsonl    one line a step: step tokens loss lr grad_norm batch_hash skipped tokens_per_second mfu
                               memory_gb seconds slowest_rank slowest_by (its own seconds / those of the fastest),
                               and one an evaluation: step val_loss val_bits_per_byte, or step icl {task: figures}
    runs/demo/checkpoints/     see checkpoint.py
    runs/demo/lease.json       who owns the folder, see resilience.py
    runs/demo/microbatch.json  the microbatch that fits, see microbatch.py

A step's row has its 1-based number, so `step` counts the updates that are done; its loss was taken before the update.
A run that goes on from step n first drops the rows after n, so no step is there twice.

Run `python runlog.py runs/demo` for a summary. Read next: plot.py.
"""

import datetime
import json
import math
import os
import platform
import resource
import shutil
import sys
import time
from pathlib import Path

import torch

import config
from config import require


class RunLog:
    """Writes a run folder; all but rank 0 do nothing."""

    def __init__(self, cfg, rank: int):
        self.cfg, self.rank = cfg, rank
        self.path = Path(cfg.run_dir) / "metrics.jsonl"
        self.size, self.unwritten = 0, b""  # bytes of whole rows in the file, and those that did not go there yet

    def start(self, model_cfg, cfg, launch: dict, tokenizer_file: Path, first_step: int) -> None:
        """Write down the settings and this launch; forget metrics of steps that will be done again."""
        if self.rank > 0:
            return
        folder = self.path.parent
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(config.to_json(model_cfg, cfg))
        if tokenizer_file.exists():
            shutil.copy(tokenizer_file, folder / "tokenizer.json")
        launch = {"command": " ".join(sys.argv), "first_step": first_step, **versions(), **launch}
        with open(folder / "launches.jsonl", "a") as file:
            file.write(json.dumps(launch) + "\n")
        rows = read(folder) if self.path.exists() else []
        kept = [row for row in rows if row["step"] <= first_step] if first_step else []
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(row) + "\n" for row in kept))
        os.replace(temporary, self.path)
        self.size = self.path.stat().st_size

    def say(self, text: str) -> None:
        """To the console, from rank 0."""
        if self.rank == 0:
            print(text, flush=True)

    def row(self, row: dict) -> None:
        """Append one line of metrics and show it. While the disk is full, the rows wait and training goes on."""
        if self.rank > 0:
            return
        self.say(line(row, self.cfg.max_steps))
        waited = bool(self.unwritten)
        self.unwritten += json.dumps(row).encode() + b"\n"
        try:
            with open(self.path, "r+b") as file:
                file.truncate(self.size)  # without what an earlier try has left there
                file.seek(self.size)
                file.write(self.unwritten)
            self.size, self.unwritten = self.size + len(self.unwritten), b""
        except OSError as error:
            if not waited:
                self.say(f"cannot write {self.path} now ({error.strerror}): its rows are kept for later")


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
    """A row of metrics for people."""
    head = f"step {row['step']:>{len(str(max_steps))}}/{max_steps}"
    if "val_loss" in row:
        return f"{head}  validation loss {row['val_loss']:.4f}  {row['val_bits_per_byte']:.3f} bits per byte"
    if "icl" in row:
        return f"{head}  " + "  ".join(map(task_line, *zip(*row["icl"].items(), strict=True)))
    mfu = "n/a" if row["mfu"] is None else f"{row['mfu']:.1%}"
    left = datetime.timedelta(seconds=round((max_steps - row["step"]) * row["seconds"]))
    return (
        f"{head}  loss {row['loss']:.4f}  lr {row['lr']:.2e}  grad norm {row['grad_norm']:.2f}  "
        f"{row['tokens_per_second']:,.0f} tokens/s  MFU {mfu}  {row['memory_gb']:.1f} GB  {left} left"
    )


def task_line(name: str, figures: dict) -> str:
    """A task's accuracy by LLM Foundry's scoring beside chance; of the other kinds what they have."""
    if "foundry" in figures:
        return f"{name} {figures['foundry']:.3f} +- {figures['foundry_stderr']:.3f} (chance {figures['chance']:.3f})"
    return (
        f"{name} {figures['acc']:.3f}" if "acc" in figures else f"{name} {figures['nats_per_token']:.4f} nats a token"
    )


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
    """The rows of metrics.jsonl; a last line that was cut off by a crash is left out."""
    path = Path(run_dir) / "metrics.jsonl"
    require(path.exists(), f"no metrics in {str(run_dir)!r}: give a run folder, such as runs/demo")
    rows = []
    for text in path.read_text().splitlines():
        try:
            rows.append(json.loads(text))
        except ValueError:
            break
    return rows


def put_aside(run_dir: str) -> Path:
    """Move a finished run to run_dir-1, -2, ...: nothing is lost when another one starts. The lease stays."""
    number = 1
    while (aside := Path(f"{Path(run_dir)}-{number}")).exists():
        number += 1
    aside.mkdir()
    for path in sorted(Path(run_dir).iterdir(), key=lambda path: path.name == "checkpoints"):  # they say it is finished
        if path.name != "lease.json":
            path.rename(aside / path.name)
    return aside


def summary(run_dir: str, expect: str = "") -> str:
    """First and last validation, and what to expect, in three lines at most."""
    rows = read(run_dir)
    vals = [row for row in rows if "val_loss" in row]
    steps = [row for row in rows if "loss" in row]
    lines = [f"{run_dir}: {steps[-1]['step'] if steps else 0} steps"]
    if steps:
        lines[0] += f", {steps[-1]['tokens']:,} tokens, {sum(row['seconds'] for row in steps):.0f} s of training"
        skipped = sum(row.get("skipped", False) for row in steps)
        lines[0] += f", {skipped} steps without a finite loss were skipped" if skipped else ""
    if vals:
        a, b = vals[0], vals[-1]
        lines.append(
            f"validation loss {a['val_loss']:.3f} -> {b['val_loss']:.3f} nats a token, "
            f"{a['val_bits_per_byte']:.3f} -> {b['val_bits_per_byte']:.3f} bits per byte"
        )
    if expect:
        lines.append(f"to expect: {expect}")
    return "\n".join(lines)


def main(argv) -> None:
    config.arguments(argv, "RUN_DIR")
    rows = read(argv[0])
    settings = json.loads((Path(argv[0]) / "config.json").read_text())
    print(summary(argv[0], settings["expect"]))
    print(line(rows[-1], settings["max_steps"]) if rows else "no step is done yet")


if __name__ == "__main__":
    config.run(main)
