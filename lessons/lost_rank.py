"""A rank is lost in the middle of a run: the others end, and the next start resumes.

    python -m lessons.lost_rank kill     one rank is killed (kill -9), as by a lack of memory
    python -m lessons.lost_rank stop     one rank is stopped (SIGSTOP), as on a machine that froze

Some ranks train a small model: on 2, 3, 4, 6 or 8 GPUs, as many as there are, else two on the CPU.
After the first checkpoint the last rank is killed or stopped. Then the program fails, unless

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
from pathlib import Path

import torch

import checkpoint
import program
from lessons.elastic import Launch, Part, steps_done, supervise
from program import RESUME_ME, UserError, require

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
SETTINGS = """
    --d_model=64 --n_heads=2 --n_layers=2 --max_seq_len=64 --vocab_size=257 --alibi --no_bias
    --attn_impl=sdpa --dataset=stdlib --tokenizer=bytes --max_tokens=200000 --eval_tokens=2000
    --global_batch_size=48 --microbatch_size=4 --schedule=constant --warmup_steps=2
    --save_interval=10 --eval_interval=0 --compile=false --timeout_minutes=30
""".split()
FOREVER = 10**6  # steps
ENDS_IN = 90  # seconds in which the others must end
STEPS_AFTER = 20  # of the next start


def lose_a_rank(launch: Launch, how: str, run_dir: Path) -> str:
    """Kill or stop the last rank of a run, and see the others end. Returns how the rank is named.

    UserError if the others do not end as they should.
    """
    *others, victim = launch.processes
    while not (checkpoint.latest(run_dir) and steps_done(run_dir) > 12):
        require(launch.status() is None, f"the run failed with status {launch.status()}")
        time.sleep(0.1)
    print(f"step {steps_done(run_dir)}: {SIGNALS[how].name} to rank {len(others)}", flush=True)
    victim.send_signal(SIGNALS[how])

    begin = time.monotonic()
    while any(process.poll() is None for process in others):
        require(time.monotonic() - begin < ENDS_IN, f"after {ENDS_IN} s the other ranks still run")
        time.sleep(0.1)
    seconds, statuses = time.monotonic() - begin, [process.returncode for process in others]
    print(f"the other ranks ended after {seconds:.1f} s with status {statuses}", flush=True)
    require(set(statuses) == {RESUME_ME}, f"their status must be {RESUME_ME}")
    return f"rank {len(others)} (process {victim.pid} "


def lose_and_resume(flags: list[str], ranks: int, how: str, run_dir: Path, log: Path) -> None:
    """Start the run, lose a rank, and start it again for some more steps. UserError if it errs."""
    launch = Launch(flags, ranks, log)
    try:
        name = lose_a_rank(launch, how, run_dir)
    finally:
        launch.end(patience=5)
    errors = [line for line in log.read_text().splitlines() if line.startswith("error")]
    print(*errors, sep="\n", flush=True)
    is_named = any(name in line for line in errors)
    require(how == "kill" or is_named, f"no error line names {name.partition(' (')[0]}")

    newest = checkpoint.latest(run_dir)
    last_step = steps_done(run_dir) + STEPS_AFTER
    supervise(run_dir, [*flags, f"--max_steps={last_step}"], Part(ranks), last_step)
    require(f"resuming from {newest}" in log.read_text(), "the next start did not resume")
    print(f"resumed from {newest.name}, finished at step {last_step}")


def main(argv: list[str]) -> None:
    """Lose a rank, and resume."""
    (how,) = program.arguments(argv, "kill|stop")
    require(how in SIGNALS, f"what shall happen to the rank? kill or stop, not {how!r}")
    gpus = torch.cuda.device_count()
    device, places = ("cuda", gpus) if gpus > 1 else ("cpu", 2)
    ranks = max(n for n in (2, 3, 4, 6, 8) if n <= places)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: it ends the ranks too
    with tempfile.TemporaryDirectory() as folder:
        run_dir, log = Path(folder, "run"), Path(folder, "run.log")
        flags = [*SETTINGS, f"--run_dir={run_dir}", f"--data_dir={folder}/data"]
        flags += [f"--device={device}", f"--max_steps={FOREVER}"]
        print(f"{ranks} ranks on {device}", flush=True)
        try:
            lose_and_resume(flags, ranks, how, run_dir, log)
        except UserError as error:
            print(*log.read_text().splitlines()[-30:], sep="\n", flush=True)
            raise UserError(f"{error}: a bug in this project, see the lines above") from error


if __name__ == "__main__":
    program.run(main)
