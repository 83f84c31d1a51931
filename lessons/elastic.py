"""The same curve through other sizes and a crash, and the lesson behind it: how a supervisor keeps a run going.

    python -m lessons.elastic                  or `make elastic`: about five minutes on two CPU cores
    python -m lessons.elastic --max_steps=120  with another setting of fsdp_train.py

The run of configs/demo.py, shorter and in fp32, trains three times:

    runs/elastic/one      on 1 rank
    runs/elastic/two      on 2 ranks
    runs/elastic/moved    on 1 -> 2 -> 4 -> 1 ranks: two moves by SIGTERM, then one of the four is killed by kill -9

A supervisor is a loop: start the ranks; when one fails, end the others, who wait for it; start again with the same
command, unless it is a mistake (status 2) or the third time in vain. All else is in the run folder: the newest complete
checkpoint says where to go on, and step s takes samples s * global_batch ... (s + 1) * global_batch - 1 of one fixed
order on any number of ranks. So batch_hash, of the tokens that a step saw, must be the same in all three runs. The
losses of a step are sums in another order: they differ by rounding, which training amplifies like any other noise; the
final validation losses must agree within 0.03.

Interrupted, the same command goes on. When all is done, it puts the folder aside and starts anew, as `make train`.
Read next: fsdp_train.py.
"""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import checkpoint
import config
import processes
from config import MPTConfig, TrainConfig, UserError, require
from lifecycle import plot, runlog

ROOT = Path(__file__).parent.parent
SETTINGS = """--run_dir=runs/elastic --device=cpu --precision=fp32 --max_steps=250 --eval_interval=50
    --save_interval=20 --resume=auto --peak_tflops=auto --expect="""
# name -> its stages: ranks, the share of the steps after which it ends, the signal that ends it
RUNS = {
    "one": [(1, 1, None)],
    "two": [(2, 1, None)],
    "moved": [
        (1, 0.25, signal.SIGTERM),
        (2, 0.5, signal.SIGTERM),
        (4, 0.75, signal.SIGKILL),
        (1, 1, None),
    ],
}
CLOSE = 0.03  # nats a token, between final validation losses


class Launch:
    """`ranks` processes of fsdp_train.py on this machine, which share its cores; what they print is added to `log`.

    They find each other as under torchrun: by RANK, WORLD_SIZE and the address of rank 0, in the environment.
    """

    def __init__(
        self, flags: list[str], ranks: int, log: Path, program: Path = ROOT / "fsdp_train.py"
    ):
        port = processes.free_port()
        threads = {"OMP_NUM_THREADS": str(max(1, os.cpu_count() // ranks))}
        self.processes = []
        for rank in range(ranks):
            env = os.environ | threads | processes.torchrun_variables(rank, ranks, port)
            with open(log, "a") as out:
                command = [sys.executable, program, *flags]
                self.processes.append(subprocess.Popen(command, env=env, stdout=out, stderr=out))

    def status(self) -> int | None:
        """None while all is well; else the exit status of a rank that failed (-9: killed), or 0 when all are done."""
        statuses = [process.poll() for process in self.processes]
        return next(filter(None, statuses), None if None in statuses else 0)

    def send(self, number: int, rank: int | None = None) -> None:
        """A signal to one rank, or to all."""
        for process in self.processes if rank is None else [self.processes[rank]]:
            process.send_signal(number)  # does nothing to one that has left

    def left(self, seconds: float) -> bool:
        """Wait until all have left, at most so long."""
        deadline = time.monotonic() + seconds
        while (
            alive := any(process.poll() is None for process in self.processes)
        ) and time.monotonic() < deadline:
            time.sleep(0.01)
        return not alive

    def end(self, patience: float = 30) -> None:
        """End all that still run, as torchrun does: they are asked to, and after `patience` seconds they must.

        If all are well they save and leave. If one is dead the others cannot save: what they wait for fails or hangs.
        """
        self.send(signal.SIGTERM)
        if not self.left(patience):
            self.send(signal.SIGKILL)
            self.left(60)


def steps_done(run_dir: Path) -> int:
    """The last step in metrics.jsonl; 0 before the first."""
    there = (run_dir / "metrics.jsonl").exists() and runlog.read(run_dir)
    return there[-1]["step"] if there else 0


def stage_now(run_dir: Path, stages: list, max_steps: int) -> int:
    """The run folder knows: each launch is written down, so count how often the number of ranks changed."""
    ranks = [launch["ranks"] for launch in runlog.read_launches(run_dir) if "ranks" in launch]
    number = sum(a != b for a, b in zip(ranks, ranks[1:], strict=False))
    return min(number + (steps_done(run_dir) >= stages[number][1] * max_steps), len(stages) - 1)


def finished(run_dir: Path, max_steps: int) -> bool:
    """Is the checkpoint of the last step there?"""
    newest = checkpoint.latest(run_dir)
    return newest is not None and newest.name == f"step-{max_steps}"


def supervise(run_dir: Path, flags: list[str], stages: list, max_steps: int) -> None:
    """Start the run again and again until it is finished. UserError if it dies three times without getting on."""
    in_vain, log = 0, run_dir.with_suffix(".log")
    while not finished(run_dir, max_steps):
        before = checkpoint.latest(run_dir)
        ranks, share, ending = stages[stage_now(run_dir, stages, max_steps)]
        head = f"{run_dir.name:<6} {ranks} rank{' ' if ranks == 1 else 's'} "
        launch = Launch([*flags, f"--run_dir={run_dir}"], ranks, log)
        try:
            watch(launch, run_dir, max_steps, head, share * max_steps, ending)
        finally:
            launch.end()
        statuses, newest = (
            [process.returncode for process in launch.processes],
            checkpoint.latest(run_dir),
        )
        print(
            f"{head} exit {statuses}, newest checkpoint {newest.name if newest else 'none'}",
            flush=True,
        )
        in_vain = in_vain + 1 if newest == before else 0
        last_line = log.read_text().strip().rpartition("\n")[2]
        require(
            2 not in statuses and in_vain < 3, f"{run_dir} does not get on, see {log}: {last_line}"
        )


def watch(launch: Launch, run_dir: Path, max_steps: int, head: str, until: float, ending) -> None:
    """Look on while all is well. From step `until` on send the signal `ending`: to all ranks, or kill one of them."""
    shown = steps_done(run_dir)
    while launch.status() is None:
        time.sleep(0.1)
        step = steps_done(run_dir)
        if step // 50 > shown // 50:
            print(f"{head} step {step}/{max_steps}", flush=True)
        shown = step
        if ending and step >= until:
            victim = random.randrange(len(launch.processes)) if ending == signal.SIGKILL else None
            who = "all" if victim is None else f"rank {victim}"
            print(f"{head} step {step}/{max_steps}: {ending.name} to {who}", flush=True)
            launch.send(ending, victim)
            ending = None


def check(runs: list[Path], max_steps: int) -> None:
    """UserError if the runs saw other tokens, or ended elsewhere."""
    rows = [runlog.read(run) for run in runs]
    hashes = [{row["step"]: row["batch_hash"] for row in run if "loss" in row} for run in rows]
    final = [[row["val_loss"] for row in run if "val_loss" in row][-1] for run in rows]
    differ = [
        step for step in range(1, max_steps + 1) if len({run.get(step) for run in hashes}) > 1
    ]
    if differ:
        raise UserError(
            f"the runs saw other tokens at {len(differ)} steps, the first is step {differ[0]}: a bug here"
        )
    print(f"each of the {max_steps} steps saw the same tokens in all runs")
    ends = f"final validation losses {', '.join(f'{loss:.4f}' for loss in final)}: {max(final) - min(final):.2g} apart"
    require(max(final) - min(final) <= CLOSE, f"{ends}, more than {CLOSE}: a bug here")
    print(ends)


def main(argv) -> None:
    """Train one, two and moved, then compare and draw them."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: the ranks are ended, too
    flags = [f"{ROOT}/configs/demo.py", *SETTINGS.split(), *argv]
    model_cfg, cfg = config.load(flags, MPTConfig, TrainConfig)
    runs = [Path(cfg.run_dir, name) for name in RUNS]
    if all(finished(run, cfg.max_steps) for run in runs):
        print(f"finished before: put aside as {runlog.put_aside(cfg.run_dir)}")
    begun = Path(cfg.run_dir) / "flags.txt"
    begun.parent.mkdir(parents=True, exist_ok=True)
    before = begun.read_text().split("\n") if begun.exists() else flags
    require(
        before == flags,
        f"{cfg.run_dir} was begun with other flags: give the same ones, or move it away",
    )
    begun.write_text("\n".join(flags))
    for run, stages in zip(runs, RUNS.values(), strict=True):
        supervise(run, flags, stages, cfg.max_steps)
    plot.main([*map(str, runs), f"--out={cfg.run_dir}/elastic.png", "--diff"])
    check(runs, cfg.max_steps)


if __name__ == "__main__":
    config.run(main)
