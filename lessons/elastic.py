"""One run on changing clusters, of which one is lost: the same curve, by an object store alone.

    python -m lessons.elastic                  or `make elastic`: five minutes on two CPU cores
    python -m lessons.elastic --max_steps=120  with another setting of fsdp_train.py

The run of configs/demo.py, shorter and in fp32, trains twice:

    runs/elastic/one        on 1 rank, undisturbed
    runs/elastic/moved-1    on 1 rank
    runs/elastic/moved-2    on 2 ranks; each has all layers, and rows of its own
    runs/elastic/moved-3    on 4 ranks, tp 2, pp 2: two stages of two layers; in each, two ranks cut
                            every layer between them
    runs/elastic/moved-4    on 1 rank

The four folders stand for four clusters. They share nothing but runs/elastic/store, to which each
mirrors its run (--remote=file:///...; s3://bucket/run is the same). SIGTERM ends the run on the
first two clusters: it saves, and copies the rest. The third is lost, by kill -9 of all ranks while
a checkpoint is being copied: the run goes on from the newest one that the store has completely.

A supervisor is a loop. It starts the ranks. When one of them fails, it ends the others, which wait
for it, and starts the same command again, unless the exit status says user error (2) or three
launches in a row saved no checkpoint. Everything else is in the run folder, or the store: the
newest complete checkpoint, of whole tensors, from which each rank takes its part; the order of the
data is fixed.

So batch_hash, of the tokens that a step saw, must be the same in both runs. In another layout the
numbers of a step are summed in another order, so they differ by rounding errors, which training
amplifies like any other noise. The final validation losses must agree within 0.03.

After an interruption, the same command continues.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import checkpoint
import config
import program
from config import MPTConfig, TrainConfig
from launch.pool import free_port, torchrun_variables
from lifecycle import plot, runlog
from program import require

ROOT = Path(__file__).parent.parent
SETTINGS = """
    --run_dir=runs/elastic --device=cpu --precision=fp32 --max_steps=250 --eval_interval=50
    --save_interval=20 --resume=auto --peak_tflops=auto
""".split()
CLOSE = 0.03  # nats a token, between final validation losses


class Part(NamedTuple):
    """A part of a run."""

    ranks: int
    share: float = 1  # of the steps of the run, after which `ending` ends the part
    ending: signal.Signals | None = None  # the signal that ends it
    tp: int = 1  # ranks over which each layer is cut
    pp: int = 1  # pipeline stages over which the layers are cut


CLUSTERS = [
    Part(1, 0.25, signal.SIGTERM),
    Part(2, 0.5, signal.SIGTERM),
    Part(4, 0.75, signal.SIGKILL, tp=2, pp=2),
    Part(1),
]


class Launch:
    """`ranks` processes of fsdp_train.py on this machine, which share its cores.

    log: their output is appended to this file. They find each other as under torchrun: by RANK,
    WORLD_SIZE and the address of rank 0, in the environment.
    """

    def __init__(self, flags: list[str], ranks: int, log: Path):
        port = free_port()
        threads = {"OMP_NUM_THREADS": str(max(1, os.cpu_count() // ranks))}
        command = [sys.executable, ROOT / "fsdp_train.py", *flags]
        self.processes = []
        for rank in range(ranks):
            env = os.environ | threads | torchrun_variables(rank, ranks, port)
            with open(log, "a") as out:
                process = subprocess.Popen(command, env=env, stdout=out, stderr=out)
            self.processes.append(process)

    def status(self) -> int | None:
        """The exit status of a rank that failed (-9: killed), 0 if all are done, else None."""
        statuses = [process.poll() for process in self.processes]
        failed = [status for status in statuses if status]
        if failed:
            return failed[0]
        return None if None in statuses else 0

    def send(self, number: int) -> None:
        """Send a signal to all ranks."""
        for process in self.processes:
            process.send_signal(number)  # does nothing if the process has ended

    def wait(self, seconds: float) -> bool:
        """Wait until all ranks have ended, at most `seconds`. Returns whether they have."""
        deadline = time.monotonic() + seconds
        while any(process.poll() is None for process in self.processes):
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.01)
        return True

    def end(self, patience: float = 30) -> None:
        """End all ranks that still run, as torchrun does: by SIGTERM, then by SIGKILL.

        patience: seconds between the two signals. If all ranks are alive, they save and exit on
        SIGTERM. If one is dead, the others cannot save: they fail or hang waiting for it.
        """
        self.send(signal.SIGTERM)
        if not self.wait(patience):
            self.send(signal.SIGKILL)
            self.wait(60)


def steps_done(run_dir: Path) -> int:
    """The last step in metrics.jsonl; 0 before the first."""
    rows = runlog.read(run_dir) if (run_dir / "metrics.jsonl").exists() else []
    return rows[-1]["step"] if rows else 0


def finished(run_dir: Path, max_steps: int) -> bool:
    """Whether the checkpoint of the last step exists."""
    newest = checkpoint.latest(run_dir)
    return newest is not None and newest.name == f"step-{max_steps}"


def is_over(part: Part, run_dir: Path, max_steps: int) -> bool:
    """Whether a part that ends early has done its share."""
    return bool(part.ending) and steps_done(run_dir) >= part.share * max_steps


def move(folder: Path, flags: list[str], clusters: list[Part], max_steps: int) -> list[Path]:
    """Each part in a folder of its own. Returns the folders: in the last one the run is finished.

    What they share is folder/store. A part is over when a later one has begun.
    """
    store = (folder / "store").absolute()
    runs = [folder / f"moved-{number}" for number in range(1, len(clusters) + 1)]
    for number, (part, run) in enumerate(zip(clusters, runs, strict=True), 1):
        if not any(later.exists() for later in runs[number:]):
            supervise(run, [*flags, f"--remote=file://{store}"], part, max_steps, store)
    return runs


def supervise(
    run_dir: Path, flags: list[str], part: Part, max_steps: int, store: Path | None = None
) -> None:
    """Launch the run again and again until it is finished, or was ended as its part says.

    store: a folder that mirrors the run.
    UserError if a rank reports a user error, or three launches in a row save no checkpoint.
    """
    log = run_dir.with_suffix(".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    title = f"{run_dir.name:<6} {plot.layout_label(part.ranks, part.tp, part.pp):<20}"
    flags = [*flags, f"--run_dir={run_dir}", f"--tp={part.tp}", f"--pp={part.pp}"]
    launches_in_vain = 0
    while not (finished(run_dir, max_steps) or is_over(part, run_dir, max_steps)):
        checkpoint_before = checkpoint.latest(run_dir)
        launch = Launch(flags, part.ranks, log)
        try:
            watch(launch, run_dir, max_steps, title, part, store)
        finally:
            launch.end()

        statuses = [process.returncode for process in launch.processes]
        newest = checkpoint.latest(run_dir)
        name = newest and newest.name
        print(f"{title} exit {statuses}, newest checkpoint {name}", flush=True)

        launches_in_vain = launches_in_vain + 1 if newest == checkpoint_before else 0
        goes_on = 2 not in statuses and launches_in_vain < 3
        last_line = log.read_text().strip().rpartition("\n")[2]
        require(goes_on, f"{run_dir} makes no progress, see {log}: {last_line}")


def watch(
    launch: Launch, run_dir: Path, max_steps: int, title: str, part: Part, store: Path | None
) -> None:
    """Report progress until a rank fails or all are done.

    When its share of the steps is done, all ranks get the signal that ends the part. SIGKILL waits
    until a checkpoint is being copied to the store.
    """
    is_sent = False
    shown = steps_done(run_dir)
    while launch.status() is None:
        time.sleep(0.1)
        step = steps_done(run_dir)
        if step // 50 > shown // 50:
            print(f"{title} step {step}/{max_steps}", flush=True)
        shown = step

        if is_over(part, run_dir, max_steps) and not is_sent:
            kills = part.ending == signal.SIGKILL
            while kills and not being_copied(store) and launch.status() is None:
                time.sleep(0.002)
            step = steps_done(run_dir)
            print(f"{title} step {step}/{max_steps}: {part.ending.name} to all", flush=True)
            launch.send(part.ending)
            is_sent = True


def being_copied(store: Path) -> bool:
    """Whether a checkpoint is in the store, but not complete: its checksums are copied last."""
    paths = list(store.glob("checkpoints/step-*/*"))
    complete = {path.parent for path in paths if path.name == "checksums.json"}
    return {path.parent for path in paths} != complete


def check(runs: list[Path], max_steps: int) -> None:
    """UserError if the runs saw different tokens, or their final validation losses differ."""
    hashes, final_losses = [], []
    for run in runs:
        rows = runlog.read(run)
        hashes.append({row["step"]: row["batch_hash"] for row in rows if "loss" in row})
        final_losses.append([row["val_loss"] for row in rows if "val_loss" in row][-1])

    steps = range(1, max_steps + 1)
    differ = [step for step in steps if len({hash_of.get(step) for hash_of in hashes}) > 1]
    where = f"at {len(differ)} steps, the first is step {differ[0]}" if differ else ""
    require(not differ, f"the runs saw different tokens {where}: a bug in this project")
    print(f"each of the {max_steps} steps saw the same tokens in all runs")

    distance = max(final_losses) - min(final_losses)
    losses = ", ".join(f"{loss:.4f}" for loss in final_losses)
    text = f"final validation losses {losses}: {distance:.2g} apart"
    require(distance <= CLOSE, f"{text}, more than {CLOSE}: a bug in this project")
    print(text)


def main(argv) -> None:
    """Train both, then compare and draw them."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: it ends the ranks too
    flags = [f"{ROOT}/configs/demo.py", *SETTINGS, *argv]
    _, cfg = config.load(flags, MPTConfig, TrainConfig)
    folder = Path(cfg.run_dir)
    runs = [folder / "one", folder / f"moved-{len(CLUSTERS)}"]
    if all(finished(run, cfg.max_steps) for run in runs):
        print("all runs are finished. To train them anew set another --run_dir")

    supervise(runs[0], flags, Part(1), cfg.max_steps)
    move(folder, flags, CLUSTERS, cfg.max_steps)
    plot.main([*map(str, runs), f"--out={folder}/elastic.png", "--diff"])
    check(runs, cfg.max_steps)


if __name__ == "__main__":
    program.run(main)
