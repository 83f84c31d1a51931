"""A run that is killed again and again loses no step, repeats none, and ends as an undisturbed one.

The long form, 40 kills (-s shows each of them):

    .venv/bin/python -m pytest tests/lifecycle/test_soak.py -m long

SIGKILL hits one rank or all, at random: while they start, between two steps, while a checkpoint is
being written. SOAK_SEED=... repeats the choices of a run (not the machine's timing).

What is promised after a kill at step `last`, with `newest` the newest complete checkpoint:
    nothing was being written           last - newest <= save_interval
    step-N.tmp was being written        last - N <= save_interval and N - newest <= save_interval
since a checkpoint is begun only when the one before it is published. If rank 0 survives for a
moment, it removes the step-N.tmp that cannot be completed any more. Then only the sum can be
checked: last - newest <= 2 * save_interval.
"""

import os
import random
import signal
import time

import pytest
from conftest import flags_for
from launches import Job, load

import checkpoint
import fsdp_train
from lessons.elastic import finished, steps_done
from lifecycle import runlog

INTERVAL = 5
FLAGS = f"""
    --d_model=16 --n_heads=2 --n_layers=1 --vocab_size=257 --max_seq_len=16
    --global_batch_size=4 --microbatch_size=2 --warmup_steps=2 --eval_tokens=2000
    --eval_interval=20 --device=cpu --precision=fp32 --save_interval={INTERVAL} --keep_last=2
    --timeout_minutes=2
""".split()
WHEN = ["saving", "starting", "training", "saving", "training"]  # the kills, in turns


class Soak:
    """A run in `home`/run, on 2 or 4 ranks, that is killed before it is done."""

    def __init__(self, home, flags, chance: random.Random):
        home.mkdir()
        self.home, self.run, self.chance = home, home / "run", chance
        self.flags = [*flags, f"--run_dir={self.run}"]

    def launch(self, ranks: int) -> Job:
        return Job(self.home, ranks, fsdp_train.main, self.flags)

    def kill(self, when: str, ranks: int) -> None:
        """Start it, kill one rank or all, end the others, and look at what is left."""
        before = self.newest()
        victim = self.chance.choice([None, self.chance.randrange(ranks)])
        with self.launch(ranks) as job:
            self.wait_until(when, job)
            for rank in range(ranks) if victim is None else [victim]:
                job.send(signal.SIGKILL, rank)
            if self.chance.random() < 0.5:
                job.wait(3)  # do they leave without being asked?
            for rank in range(ranks):
                job.send(signal.SIGTERM, rank)
            statuses = job.wait(5)
        who = "all" if victim is None else f"rank {victim}"
        where = f"step {steps_done(self.run)}, newest checkpoint {self.newest()}"
        print(f"{when:<8} {ranks} ranks, killed {who}, statuses {statuses}: {where}", flush=True)
        self.check(when, victim, before)

    def wait_until(self, when: str, job: Job) -> None:
        """A random moment of the kind `when`."""
        launches, target = self.launches(), self.newest() + self.chance.randint(1, 6 * INTERVAL)
        if when == "starting":
            latest = time.monotonic() + self.chance.uniform(0, 4)
            while self.launches() == launches and time.monotonic() < latest:
                time.sleep(0.01)
            return
        while self.launches() == launches or steps_done(self.run) < target:
            assert job.runs(), job.log()[-3000:]
            time.sleep(0.002)
        while when == "saving" and not self.being_written():
            assert job.runs(), job.log()[-3000:]
        time.sleep(self.chance.uniform(0, 0.04))

    def check(self, when: str, victim: int | None, before: int) -> None:
        """The newest checkpoint can be read, is no older than before, and as recent as promised."""
        newest, last = self.newest(), steps_done(self.run)
        assert newest >= before
        if newest:
            weights = load(checkpoint.latest(self.run))
            assert all(weight.isfinite().all() for weight in weights.values())
        assert last - newest <= 2 * INTERVAL
        # While it starts, the rows may still be those of the launch before.
        if when != "starting" and victim in (None, 0):
            begun = max([newest, *self.being_written()])
            assert last - begun <= INTERVAL and begun - newest <= INTERVAL

    def newest(self) -> int:
        found = checkpoint.latest(self.run)
        return int(found.name[5:]) if found else 0

    def being_written(self) -> list[int]:
        return [int(path.name[5:-4]) for path in (self.run / "checkpoints").glob("step-*.tmp")]

    def launches(self) -> int:
        return len(runlog.read_launches(self.run)) if self.run.exists() else 0


def soak(tmp_path, tiny_data, sizes: list[int], kills: int):
    """The rows of a run on sizes[0] ranks, and of one on `sizes` in turns, killed `kills` times."""
    seed = int(os.environ.get("SOAK_SEED", time.time_ns() % 10**6))
    print(f"\nSOAK_SEED={seed}")
    max_steps = 4 * INTERVAL * kills + 20  # enough that it is not done before
    flags = [*FLAGS, *flags_for(tiny_data), f"--max_steps={max_steps}"]
    calm = Soak(tmp_path / "calm", flags, random.Random(seed))
    killed = Soak(tmp_path / "killed", flags, random.Random(seed))
    for number in range(kills):
        assert not finished(killed.run, max_steps)
        killed.kill(WHEN[number % len(WHEN)], sizes[number % len(sizes)])
    for each in (killed, calm):
        with each.launch(sizes[0]) as job:
            assert job.wait() == [0] * sizes[0], job.log()[-3000:]
    calm_rows, rows = runlog.read(calm.run), runlog.read(killed.run)
    assert [row["step"] for row in rows if "loss" in row] == [*range(1, max_steps + 1)]
    for key in ("step", "batch_hash"):
        assert [row.get(key) for row in rows] == [row.get(key) for row in calm_rows]
    return calm_rows, rows


def figures(rows: list[dict]) -> list[tuple]:
    return [(row.get("loss"), row.get("grad_norm"), row.get("val_loss")) for row in rows]


@pytest.mark.long
@pytest.mark.parametrize("ranks, kills", [(2, 16), (4, 14)])
def test_a_run_killed_again_and_again_is_the_same_bit_by_bit(tmp_path, tiny_data, ranks, kills):
    calm, killed = soak(tmp_path, tiny_data, [ranks], kills)
    assert figures(killed) == figures(calm)


@pytest.mark.parametrize(
    "kills", [pytest.param(4, marks=pytest.mark.slow), pytest.param(10, marks=pytest.mark.long)]
)
def test_a_run_killed_and_moved_again_and_again_ends_the_same(tmp_path, tiny_data, kills):
    calm, killed = soak(tmp_path, tiny_data, [2, 4], kills)
    launches = runlog.read_launches(tmp_path / "killed/run")
    assert len({launch["ranks"] for launch in launches}) == 2
    apart = max(
        abs(a["loss"] - b["loss"]) for a, b in zip(calm, killed, strict=True) if "loss" in a
    )
    print(f"training losses at most {apart:.2g} apart")
    assert killed[-1]["val_loss"] == pytest.approx(calm[-1]["val_loss"], abs=1e-3)
