"""A rank is lost in the middle of a run: the others end, and the next start resumes.

    python -m lessons.lost_rank kill     one rank is killed (kill -9), as by a lack of memory
    python -m lessons.lost_rank stop     one rank is stopped (SIGSTOP), as on a machine that froze

Some ranks train a small model: 2, 3, 4, 6 or 8 GPUs, as many as there are, or two ranks on the CPU.
After the first checkpoint the last rank is killed or stopped. Then this must happen, or the program
fails:

    1. after at most 40 seconds all other ranks have ended with the status 75, "start me again":
       the lost one gives no sign of life any more (lifecycle/watchdog.py)
    2. if the rank was stopped, an error line names it
    3. the same command resumes from the newest checkpoint, and finishes

On the CPU a collective fails as soon as a process of its group is gone. On GPUs NCCL and RCCL wait
for it for ever. So this shows more on two GPUs than on a CPU.
"""

import signal
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

import checkpoint
import config
from config import UserError, require
from lessons.elastic import Launch, finished, steps_done
from program import RESUME_ME

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
SETTINGS = """
    --d_model=64 --n_heads=2 --n_layers=2 --max_seq_len=64 --vocab_size=257 --alibi --no_bias
    --attn_impl=sdpa --dataset=stdlib --tokenizer=bytes --max_tokens=200000 --eval_tokens=2000
    --global_batch_size=48 --microbatch_size=4 --schedule=constant --warmup_steps=2
    --save_interval=10 --eval_interval=0 --compile=false --timeout_minutes=30
""".split()
FOREVER = 10**6  # steps
STARTS_IN = 150  # seconds until the first checkpoint, at most
ENDS_IN = 90  # seconds in which the others must end
STEPS_AFTER = 20  # of the next start


@dataclass
class LostRankArgs:
    """Where the ranks are."""

    device: Literal["auto", "cpu", "cuda"] = "auto"  # cuda is ROCm too
    ranks: int = 0  # 2, 4, 6, ...: they divide the batch of 48 (0: see above)

    def check(self) -> None:
        """UserError if the ranks cannot be started."""
        possible = self.ranks == 0 or (self.ranks >= 2 and 48 % self.ranks == 0)
        require(possible, f"ranks is {self.ranks}: give 2, 3, 4, 6, 8, 12, 16, 24 or 48")


def choose_ranks(args: LostRankArgs) -> tuple[str, int]:
    """The device and the number of ranks. UserError if there is one GPU: two ranks need two."""
    gpus = 0 if args.device == "cpu" else torch.cuda.device_count()
    if not gpus and args.device != "cuda":
        return "cpu", args.ranks or 2
    fitting = [n for n in (2, 3, 4, 6, 8) if n <= gpus]
    require(fitting, f"{gpus} GPU: two ranks need two, so set --device=cpu")
    return "cuda", args.ranks or fitting[-1]


def wait_for_checkpoint(launch: Launch, run_dir: Path) -> None:
    """Wait until the run has a checkpoint and has taken more steps. UserError if it fails."""
    deadline = time.monotonic() + STARTS_IN
    while not (checkpoint.latest(run_dir) and steps_done(run_dir) > 12):
        require(launch.status() is None, f"the run failed with status {launch.status()}")
        in_time = time.monotonic() < deadline
        require(in_time, f"no checkpoint in {STARTS_IN} s")
        time.sleep(0.1)


def lose_a_rank(flags: list[str], ranks: int, how: str, run_dir: Path, log: Path) -> None:
    """Start the run, kill or stop its last rank, and check how the others end. UserError."""
    launch = Launch(flags, ranks, log)
    *others, victim = launch.processes
    try:
        wait_for_checkpoint(launch, run_dir)
        print(f"step {steps_done(run_dir)}: {SIGNALS[how].name} to rank {ranks - 1}", flush=True)
        begin = time.monotonic()
        victim.send_signal(SIGNALS[how])
        while any(process.poll() is None for process in others):
            waited = time.monotonic() - begin
            require(waited < ENDS_IN, f"after {ENDS_IN} s the other ranks still run")
            time.sleep(0.1)
        seconds = time.monotonic() - begin
    finally:
        launch.end(patience=5)
    statuses = [process.returncode for process in others]
    print(f"the other ranks ended after {seconds:.1f} s with status {statuses}", flush=True)
    require(set(statuses) == {RESUME_ME}, f"their status must be {RESUME_ME}")

    errors = [line for line in log.read_text().splitlines() if line.startswith("error")]
    print(*errors, sep="\n", flush=True)
    is_named = any(f"rank {ranks - 1} (process {victim.pid} " in line for line in errors)
    require(how == "kill" or is_named, f"no error line names rank {ranks - 1}")


def resume(flags: list[str], ranks: int, run_dir: Path, log: Path) -> None:
    """Start the run again, for some more steps. UserError unless it resumes and finishes."""
    newest = checkpoint.latest(run_dir)
    last_step = steps_done(run_dir) + STEPS_AFTER
    begin = time.monotonic()
    launch = Launch([*flags, f"--max_steps={last_step}"], ranks, log)
    try:
        ended = launch.wait(STARTS_IN)
    finally:
        launch.end(patience=5)
    require(ended, f"the next start did not finish in {STARTS_IN} s")
    resumed = f"resuming from {newest}" in log.read_text()
    require(resumed and finished(run_dir, last_step), "the next start did not resume and finish")
    seconds = time.monotonic() - begin
    print(f"resumed from {newest.name}, finished at step {last_step} after {seconds:.1f} s")


def main(argv: list[str]) -> None:
    """Lose a rank, and resume."""
    (how,), args = config.load(argv, LostRankArgs, takes="kill|stop")
    require(how in SIGNALS, f"what shall happen to the rank? kill or stop, not {how!r}")
    device, ranks = choose_ranks(args)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: it ends the ranks too
    with tempfile.TemporaryDirectory() as folder:
        run_dir, log = Path(folder, "run"), Path(folder, "log")
        flags = [*SETTINGS, f"--run_dir={run_dir}", f"--data_dir={folder}/data"]
        flags += [f"--device={device}", f"--max_steps={FOREVER}"]
        print(f"{ranks} ranks on {device}", flush=True)
        try:
            lose_a_rank(flags, ranks, how, run_dir, log)
            resume(flags, ranks, run_dir, log)
        except UserError as error:
            print(*log.read_text().splitlines()[-30:], sep="\n", flush=True)
            raise UserError(f"{error}: a bug in this project, see the lines above") from error


if __name__ == "__main__":
    config.run(main)
