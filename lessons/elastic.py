"""One run in changing layouts of ranks, with a crash: the same curve, kept going by a supervisor.

    python -m lessons.elastic                  or `make elastic`: five minutes on two CPU cores
    python -m lessons.elastic --max_steps=120  with another setting of fsdp_train.py

The run of configs/demo.py, shorter and in fp32, trains three times:

    runs/elastic/one      on 1 rank
    runs/elastic/two      on 2 ranks
    runs/elastic/moved    on 1 -> 2 -> 4 -> 1 ranks: SIGTERM ends the run on 1 rank and on 2, then
                          kill -9 ends one of the four ranks. With 2 and 4 ranks, each two cut the
                          layers between them (--tp=2)

A supervisor is a loop. It starts the ranks. When one of them fails, it ends the others, which wait
for it, and starts the same command again, unless the exit status says user error (2) or three
launches in a row saved no checkpoint.

Everything else is in the run folder. The newest complete checkpoint says where to resume, and step
s takes sequences s * global_batch ... (s + 1) * global_batch - 1 of a fixed order, on any number of
ranks. A checkpoint holds whole tensors, from which each rank takes its part, however the ranks
share the work. So batch_hash, of the tokens that a step saw, must be the same in all three runs. In
another layout the numbers of a step are summed in another order, so they differ by rounding errors,
which training amplifies like any other noise. The final validation losses must agree within 0.03.

After an interruption, the same command continues. If all runs are finished already, it puts their
folder aside and starts afresh, as `make train` does.
"""

import itertools
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import checkpoint
import config
import processes
from config import MPTConfig, TrainConfig, UserError, require
from lifecycle import plot, runlog

ROOT = Path(__file__).parent.parent
SETTINGS = """
    --run_dir=runs/elastic --device=cpu --precision=fp32 --max_steps=250 --eval_interval=50
    --save_interval=20 --resume=auto --peak_tflops=auto --expect=
""".split()
CLOSE = 0.03  # nats a token, between final validation losses


class Stage(NamedTuple):
    """A part of a run."""

    ranks: int
    share: float = 1  # of the steps of the run, after which the stage ends
    ending: signal.Signals | None = None  # the signal that ends it
    tp: int = 1  # ranks over which each layer is cut

    def __str__(self):
        """2 ranks, tp 2"""
        return f"{self.ranks} rank{'s' * (self.ranks > 1)}" + f", tp {self.tp}" * (self.tp > 1)


RUNS = {
    "one": [Stage(1)],
    "two": [Stage(2)],
    "moved": [
        Stage(1, 0.25, signal.SIGTERM),
        Stage(2, 0.5, signal.SIGTERM, tp=2),
        Stage(4, 0.75, signal.SIGKILL, tp=2),
        Stage(1),
    ],
}


class Launch:
    """`ranks` processes of fsdp_train.py on this machine, which share its cores.

    log: their output is appended to this file. They find each other as under torchrun: by RANK,
    WORLD_SIZE and the address of rank 0, in the environment.
    """

    def __init__(
        self, flags: list[str], ranks: int, log: Path, program: Path = ROOT / "fsdp_train.py"
    ):
        port = processes.free_port()
        threads = {"OMP_NUM_THREADS": str(max(1, os.cpu_count() // ranks))}
        command = [sys.executable, program, *flags]
        self.processes = []
        for rank in range(ranks):
            env = os.environ | threads | processes.torchrun_variables(rank, ranks, port)
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

    def send(self, number: int, rank: int | None = None) -> None:
        """Send a signal to one rank, or to all."""
        for process in self.processes if rank is None else [self.processes[rank]]:
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
    if not (run_dir / "metrics.jsonl").exists():
        return 0
    rows = runlog.read(run_dir)
    return rows[-1]["step"] if rows else 0


def stage_now(run_dir: Path, stages: list[Stage], max_steps: int) -> int:
    """The index of the stage to run next.

    The run folder records each launch. Every change of the layout began a new stage. If the newest
    stage has done its steps, the next one is due.
    """
    launches = [launch for launch in runlog.read_launches(run_dir) if "ranks" in launch]
    layouts = [(launch["ranks"], launch.get("tp", 1)) for launch in launches]
    stage = sum(before != after for before, after in itertools.pairwise(layouts))
    if steps_done(run_dir) >= stages[stage].share * max_steps:
        stage += 1
    return min(stage, len(stages) - 1)


def finished(run_dir: Path, max_steps: int) -> bool:
    """Whether the checkpoint of the last step exists."""
    newest = checkpoint.latest(run_dir)
    return newest is not None and newest.name == f"step-{max_steps}"


def supervise(run_dir: Path, flags: list[str], stages: list[Stage], max_steps: int) -> None:
    """Launch the run again and again until it is finished.

    UserError if a rank reports a user error, or three launches in a row save no checkpoint.
    """
    log = run_dir.with_suffix(".log")
    launches_in_vain = 0
    while not finished(run_dir, max_steps):
        checkpoint_before = checkpoint.latest(run_dir)
        stage = stages[stage_now(run_dir, stages, max_steps)]
        title = f"{run_dir.name:<6} {stage!s:<14}"
        launch = Launch([*flags, f"--run_dir={run_dir}", f"--tp={stage.tp}"], stage.ranks, log)
        try:
            watch(launch, run_dir, max_steps, title, stage)
        finally:
            launch.end()

        statuses = [process.returncode for process in launch.processes]
        newest = checkpoint.latest(run_dir)
        name = newest.name if newest else "none"
        print(f"{title} exit {statuses}, newest checkpoint {name}", flush=True)

        launches_in_vain = launches_in_vain + 1 if newest == checkpoint_before else 0
        goes_on = 2 not in statuses and launches_in_vain < 3
        last_line = log.read_text().strip().rpartition("\n")[2]
        require(goes_on, f"{run_dir} makes no progress, see {log}: {last_line}")


def watch(launch: Launch, run_dir: Path, max_steps: int, title: str, stage: Stage) -> None:
    """Report progress until a rank fails or all are done.

    The signal that ends the stage is sent once, when its share of the steps is done: SIGTERM to all
    ranks, SIGKILL to a random one.
    """
    ending = stage.ending
    shown = steps_done(run_dir)
    while launch.status() is None:
        time.sleep(0.1)
        step = steps_done(run_dir)
        if step // 50 > shown // 50:
            print(f"{title} step {step}/{max_steps}", flush=True)
        shown = step

        if ending and step >= stage.share * max_steps:
            victim = random.randrange(len(launch.processes)) if ending == signal.SIGKILL else None
            target = "all" if victim is None else f"rank {victim}"
            print(f"{title} step {step}/{max_steps}: {ending.name} to {target}", flush=True)
            launch.send(ending, victim)
            ending = None


def check(runs: list[Path], max_steps: int) -> None:
    """UserError if the runs saw different tokens, or their final validation losses differ."""
    hashes, final_losses = [], []
    for run in runs:
        rows = runlog.read(run)
        hashes.append({row["step"]: row["batch_hash"] for row in rows if "loss" in row})
        final_losses.append([row["val_loss"] for row in rows if "val_loss" in row][-1])

    steps = range(1, max_steps + 1)
    differ = [step for step in steps if len({hash_of.get(step) for hash_of in hashes}) > 1]
    if differ:
        where = f"at {len(differ)} steps, the first is step {differ[0]}"
        raise UserError(f"the runs saw different tokens {where}: a bug in this project")
    print(f"each of the {max_steps} steps saw the same tokens in all runs")

    distance = max(final_losses) - min(final_losses)
    losses = ", ".join(f"{loss:.4f}" for loss in final_losses)
    text = f"final validation losses {losses}: {distance:.2g} apart"
    require(distance <= CLOSE, f"{text}, more than {CLOSE}: a bug in this project")
    print(text)


def main(argv) -> None:
    """Train one, two and moved, then compare and draw them."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: it ends the ranks too
    flags = [f"{ROOT}/configs/demo.py", *SETTINGS, *argv]
    _, cfg = config.load(flags, MPTConfig, TrainConfig)
    folder = Path(cfg.run_dir)
    runs = [folder / name for name in RUNS]
    if all(finished(run, cfg.max_steps) for run in runs):
        print(f"all runs were finished: put aside as {runlog.put_aside(cfg.run_dir)}")

    flags_file = folder / "flags.txt"
    folder.mkdir(parents=True, exist_ok=True)
    flags_before = flags_file.read_text().split("\n") if flags_file.exists() else flags
    fix = "give the same flags, or move it away"
    require(flags_before == flags, f"{folder} was started with other flags: {fix}")
    flags_file.write_text("\n".join(flags))

    for run, stages in zip(runs, RUNS.values(), strict=True):
        supervise(run, flags, stages, cfg.max_steps)
    plot.main([*map(str, runs), f"--out={folder}/elastic.png", "--diff"])
    check(runs, cfg.max_steps)


if __name__ == "__main__":
    config.run(main)
