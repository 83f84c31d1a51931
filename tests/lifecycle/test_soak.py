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

import collections
import contextlib
import json
import os
import random
import signal
import time

import pytest
import torch
from conftest import PATIENCE, flags_for

import checkpoint
from lessons.elastic import Launch, finished, steps_done
from lifecycle import runlog
from weights import load

INTERVAL = 5
SIZE = ["--d_model=16", "--n_heads=2", "--n_layers=1", "--vocab_size=257", "--max_seq_len=16"]
RUN = [
    "--global_batch_size=4",
    "--microbatch_size=2",
    "--warmup_steps=2",
    "--eval_tokens=2000",
    "--eval_interval=20",
]
RUN += [
    "--device=cpu",
    "--precision=fp32",
    f"--save_interval={INTERVAL}",
    "--keep_last=2",
    "--timeout_minutes=2",
]
WHEN = ["saving", "starting", "training", "saving", "training"]  # the kills, in turns


class Soak:
    """A run in `folder`, on 2 or 4 ranks, that is killed before it is done."""

    def __init__(self, folder, flags, chance: random.Random):
        self.folder, self.flags, self.chance = folder, [*flags, f"--run_dir={folder}"], chance
        self.log, self.seconds = folder.with_suffix(".log"), collections.defaultdict(list)

    @contextlib.contextmanager
    def launched(self, ranks: int):
        """A launch that does not outlive the test."""
        launch = Launch(self.flags, ranks, self.log)
        try:
            yield launch
        finally:
            launch.send(signal.SIGKILL)

    def to_the_end(self, launch: Launch) -> None:
        assert launch.wait(PATIENCE) and launch.status() == 0, self.log.read_text()[-3000:]

    def kill(self, when: str, ranks: int) -> None:
        """Start it, kill it, end the other ranks, and look at what is left."""
        before = self.newest()
        with self.launched(ranks) as launch:
            self.wait_until(when, launch)
            victim = self.chance.choice([None, self.chance.randrange(ranks)])
            launch.send(signal.SIGKILL, victim)
            begin = time.monotonic()
            if self.chance.random() < 0.5:
                launch.wait(3)  # do they leave without being asked?
            launch.end(patience=5)
            self.seconds[when, victim is None].append(time.monotonic() - begin)
        statuses = [process.returncode for process in launch.processes]
        who = "all" if victim is None else f"rank {victim}"
        print(
            f"{when:<8} {ranks} ranks, killed {who}, statuses {statuses}: {self.state()}",
            flush=True,
        )
        self.check(when, victim, before)

    def wait_until(self, when: str, launch: Launch) -> None:
        """A random moment of the kind `when`."""
        launches, target = self.launches(), self.newest() + self.chance.randint(1, 6 * INTERVAL)
        if when == "starting":
            latest = time.monotonic() + self.chance.uniform(0, 4)
            while self.launches() == launches and time.monotonic() < latest:
                time.sleep(0.01)
            return
        while self.launches() == launches or steps_done(self.folder) < target:
            assert launch.status() is None, self.log.read_text()[-3000:]
            time.sleep(0.002)
        while when == "saving" and not any((self.folder / "checkpoints").glob("*.tmp")):
            assert launch.status() is None, self.log.read_text()[-3000:]
        time.sleep(self.chance.uniform(0, 0.04))

    def check(self, when: str, victim: int | None, before: int) -> None:
        """The newest checkpoint can be read, is no older than before, and as recent as promised."""
        newest, last = self.newest(), steps_done(self.folder)
        assert newest >= before
        if newest:
            model = load.load_model(checkpoint.latest(self.folder), torch.device("cpu"))
            assert all(weights.isfinite().all() for weights in model.state_dict().values())
        assert last - newest <= 2 * INTERVAL
        if when != "starting" and victim in (
            None,
            0,
        ):  # starting: the rows may still be those of the launch before
            begun = max([newest, *self.being_written()])
            assert last - begun <= INTERVAL and begun - newest <= INTERVAL

    def newest(self) -> int:
        found = checkpoint.latest(self.folder)
        return int(found.name[5:]) if found else 0

    def being_written(self) -> list[int]:
        return [int(path.name[5:-4]) for path in (self.folder / "checkpoints").glob("step-*.tmp")]

    def launches(self) -> int:
        path = self.folder / "launches.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def state(self) -> str:
        steps = steps_done(self.folder)
        return f"step {steps}, newest checkpoint {self.newest()}, half {self.being_written()}"


def soak(tmp_path, tiny_data, sizes: list[int], kills: int):
    """The rows of a run on sizes[0] ranks, and of one on `sizes` in turns, killed `kills` times."""
    seed = int(os.environ.get("SOAK_SEED", time.time_ns() % 10**6))
    print(f"\nSOAK_SEED={seed}")
    max_steps = 4 * INTERVAL * kills + 20  # enough that it is not done before
    flags = [*SIZE, *RUN, *flags_for(tiny_data), f"--max_steps={max_steps}"]
    calm = Soak(tmp_path / "calm", flags, random.Random(seed))
    killed = Soak(tmp_path / "killed", flags, random.Random(seed))
    with calm.launched(sizes[0]) as undisturbed:  # beside the other: two cores have time for both
        for number in range(kills):
            assert not finished(killed.folder, max_steps)
            killed.kill(WHEN[number % len(WHEN)], sizes[number % len(sizes)])
        with killed.launched(sizes[0]) as last:
            killed.to_the_end(last)
        calm.to_the_end(undisturbed)
    for (when, every), seconds in killed.seconds.items():
        victims = "all" if every else "one"
        times = ", ".join(f"{s:.1f}" for s in seconds)
        print(f"{when}, {victims} killed: gone after {times} s")
    calm_rows, rows = runlog.read(calm.folder), runlog.read(killed.folder)
    assert [(row["step"], "loss" in row) for row in rows] == [
        (row["step"], "loss" in row) for row in calm_rows
    ]
    assert [row["step"] for row in rows if "loss" in row] == [*range(1, max_steps + 1)]
    assert [row.get("batch_hash") for row in rows] == [row.get("batch_hash") for row in calm_rows]
    return calm_rows, rows


def figures(rows: list[dict]) -> list[tuple]:
    return [(row.get("loss"), row.get("grad_norm"), row.get("val_loss")) for row in rows]


@pytest.mark.slow
def test_three_kills_on_two_ranks(tmp_path, tiny_data):
    calm, killed = soak(tmp_path, tiny_data, [2], kills=3)
    assert figures(killed) == figures(calm)


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
    assert len({launch["ranks"] for launch in launches_of(tmp_path / "killed")}) == 2
    apart = max(
        abs(a["loss"] - b["loss"]) for a, b in zip(calm, killed, strict=True) if "loss" in a
    )
    print(f"training losses at most {apart:.2g} apart")
    assert killed[-1]["val_loss"] == pytest.approx(calm[-1]["val_loss"], abs=1e-3)


def launches_of(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "launches.jsonl").read_text().splitlines()]
