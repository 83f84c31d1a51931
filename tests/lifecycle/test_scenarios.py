"""What may befall one rank of a run, and what becomes of the others: a table, in two layouts.

In each scenario all ranks end, one line says why, and the next start goes on as if nothing had
happened: its rows are those of an undisturbed run, bit by bit.
"""

import contextlib
import functools
import itertools
import re
import resource
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
from conftest import flags_for, slowly
from launches import FLAGS, FOREVER, Job, load, same, steps_of, train_here, wait_for

import checkpoint
import data
import fsdp_train
import model
from lessons.elastic import steps_done
from lifecycle import lease
from program import RESUME_ME, UserError

GATED = ["--ffn_type=mptglu", "--norm_type=rmsnorm", "--qk_gn", "--sliding_window_size=9"]
LAYOUTS = {
    "dp": (2, []),
    "tp 2 x pp 2": (4, ["--tp=2", "--pp=2"]),
    "gated, tp 2": (2, ["--tp=2", *GATED]),
}


# --- Faults of one rank


@contextlib.contextmanager
def before_step(victim, action, rank):
    """The rank `victim` does this before it takes step 8 (from 0)."""
    take = fsdp_train.train_step

    def train_step(model, optimizer, rows, step, cfg, *more):
        if (step, rank) == (8, victim):
            action(cfg)
        return take(model, optimizer, rows, step, cfg, *more)

    with mock.patch.object(fsdp_train, "train_step", train_step):
        yield


@contextlib.contextmanager
def in_reading(victim, action, rank):
    """The rank `victim` does this while it reads the rows of step 8."""
    batch = data.Split.batch

    def read(split, seed, step, *more):
        if (step, rank) == (8, victim):
            action(None)
        return batch(split, seed, step, *more)

    with mock.patch.object(data.Split, "batch", read):
        yield


def hang(_):
    time.sleep(10**6)


def blame_the_data(_):
    raise UserError("my shard is damaged")


def take_too_much(cfg):
    """The allocator of the CPU really refuses these 4 PB; microbatches of 2 get by."""
    if cfg.microbatch_size > 2:
        torch.empty(10**15)


def fill_the_disk(_):
    """From now on this rank cannot write more than 30 kB to a file."""
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, hard))


# --- The table


@dataclass(frozen=True)
class Scenario:
    """What one rank meets, how the others end, and the one line that says why."""

    line: str  # a pattern; {rank} names the victim, {saved} a checkpoint
    signal: int | None = None
    when: Callable = before_step
    action: Callable | None = None
    lasts: bool = False  # until the next start, too
    status: int = RESUME_ME  # of those that are not killed
    flags: tuple = ("--save_interval=3",)


ASKED = {"line": "", "flags": ("--save_interval=0",)}
SCENARIOS = {
    "killed": Scenario(
        signal=signal.SIGKILL,
        line="no sign of life for 5 s: .*{rank}.* died.*{saved}",
    ),
    "stands still": Scenario(
        signal=signal.SIGSTOP,
        flags=("--save_interval=3", "--timeout_minutes=0.25"),
        line="{rank}.* does not reply.*{saved}",
    ),
    "hangs in a step": Scenario(
        action=hang,
        flags=("--save_interval=3", "--timeout_minutes=0.2"),
        line=r"error: no step for 0.2 minutes: .*{rank}.* hangs at fsdp_train.py, line .*{saved}",
    ),
    "hangs in reading": Scenario(
        when=in_reading,
        action=hang,
        flags=("--save_interval=3", "--timeout_minutes=0.2"),
        line=r"error: no step for 0.2 minutes: .*{rank}.* hangs at data.py, line .*{saved}",
    ),
    "is out of memory": Scenario(
        action=take_too_much,
        lasts=True,
        flags=("--save_interval=3", "--microbatch_size=4"),
        line="{rank}.*is out of memory, so the next start uses microbatches of 2.*{saved}",
    ),
    "is mistaken": Scenario(
        when=in_reading,
        action=blame_the_data,
        status=2,
        line="error on rank [13]: my shard is damaged",
    ),
    "cannot save": Scenario(
        action=fill_the_disk,
        status=2,
        line="error: could not save step [69]: .*File too large.*{saved}",
    ),
    "is warned": Scenario(signal=signal.SIGUSR1, **ASKED),
    "is asked to end": Scenario(signal=signal.SIGTERM, **ASKED),
}


def at_length(*values):
    return pytest.param(*values, marks=pytest.mark.long)


CASES = [
    ("killed", "dp", 1),
    ("is warned", "dp", 1),
    slowly("stands still", "dp", 0),  # which has the server through which the others talk
    slowly("hangs in reading", "dp", 1),
    slowly("is out of memory", "dp", 1),
    slowly("is mistaken", "dp", 1),
    slowly("cannot save", "dp", 1),
    slowly("killed", "tp 2 x pp 2", 3),
    slowly("killed", "gated, tp 2", 1),
    slowly("hangs in a step", "tp 2 x pp 2", 2),
    slowly("is out of memory", "tp 2 x pp 2", 3),
    slowly("is warned", "tp 2 x pp 2", 3),
    at_length("is asked to end", "dp", 1),  # as in test_trackers.py
    at_length("cannot save", "tp 2 x pp 2", 3),
    at_length("stands still", "dp", 1),
    at_length("stands still", "tp 2 x pp 2", 2),
    at_length("is mistaken", "tp 2 x pp 2", 3),
]


@pytest.fixture(scope="module")
def undisturbed(ranks, tiny_data, tmp_path_factory):
    """`undisturbed(layout, n)`: the rows of a run whose first n steps nothing befalls.

    All scenarios of a layout share one.
    """
    known = {}

    def rows_of(layout, n_steps):
        if n_steps not in known.get(layout, {}):
            size, of_layout = LAYOUTS[layout]
            run = tmp_path_factory.mktemp("undisturbed")
            flags = [*FLAGS, *flags_for(tiny_data), *FOREVER, *of_layout, f"--run_dir={run}"]
            answers = ranks(size)(train_here, [*flags, f"--max_steps={max(n_steps, 40)}"])
            assert [status for status, *_ in answers] == [0] * size, answers
            known[layout] = steps_of(run)
        return known[layout]

    return rows_of


@pytest.mark.parametrize("name, layout, victim", CASES)
def test_all_ranks_end_and_the_next_start_goes_on(
    ranks, tiny_data, undisturbed, tmp_path, name, layout, victim
):
    scenario, (size, of_layout), run = SCENARIOS[name], LAYOUTS[layout], tmp_path / "run"
    flags = [*FLAGS, *flags_for(tiny_data), *FOREVER, *of_layout, *scenario.flags]
    flags.append(f"--run_dir={run}")
    fault = functools.partial(scenario.when, victim, scenario.action) if scenario.action else None
    with Job(tmp_path, size, fsdp_train.main, flags, fault) as job:
        if scenario.signal:
            saves = scenario.flags[0] != "--save_interval=0"
            wait_for(lambda: checkpoint.latest(run) if saves else steps_done(run) >= 3)
            job.send(scenario.signal, victim)
        is_gone = scenario.signal in (signal.SIGKILL, signal.SIGSTOP)
        statuses = job.wait(but=victim if is_gone else None)
        assert set(statuses) == {scenario.status}, job.log()
        assert_said(job, scenario, victim, run)

    end = steps_done(run) + 3
    fault = fault if scenario.lasts else None
    answers = ranks(size)(train_here, [*flags, f"--max_steps={end}"], fault)
    assert [status for status, *_ in answers] == [0] * size, answers
    rows = steps_of(run)
    assert sorted(rows) == list(range(1, end + 1))
    is_halved = (run / "microbatch.json").exists()  # so sums have another order
    assert_same(rows, undisturbed(layout, end), is_halved)


def assert_said(job, scenario, victim, run) -> None:
    """One error line says why they ended; or, if they were asked to, they have saved."""
    if scenario.line:
        saved = rf"{run}/checkpoints/step-\d+$|There is no checkpoint yet$"
        pattern = scenario.line.format(rank=re.escape(job.name_of(victim)), saved=f"({saved})")
        lines = job.errors()
        assert lines and all(re.search(pattern, line) for line in lines), lines
        # Without the server of rank 0 the others cannot agree who says it.
        assert len(lines) == 1 or (victim == 0 and scenario.signal), lines
        return
    last = steps_done(run)
    assert not job.errors() and checkpoint.latest(run).name == f"step-{last}"
    assert f"stopping, as asked: The last good checkpoint is {run}/checkpoints/step-{last}" in (
        job.log()
    )
    assert lease.read_lease(run / "lease.json") is None


def assert_same(found, wanted, is_halved) -> None:
    for step, row in found.items():
        for key in ("loss", "grad_norm", "batch_hash", "tokens", "lr"):
            expected = wanted[step][key]
            if is_halved and key in ("loss", "grad_norm"):
                expected = pytest.approx(expected, rel=5e-6)
            assert row[key] == expected, (step, key)


# --- A bad step, a slow rank: the run goes on

POOLS = [
    (2, ["--sharding=FULL_SHARD"]),
    slowly(4, ["--tp=2", "--sequence_parallel", "--sharding=DDP"]),
    slowly(4, ["--pp=2", "--sharding=ZERO1"]),
]


@contextlib.contextmanager
def poisoned(steps, rank):
    """In these steps (from 0) what rank 1 computes in its microbatches is NaN."""
    step = fsdp_train.train_step

    def train_step(model, optimizer, rows, number, *args):
        forward = model.forward
        factor = float("nan") if number in steps and rank == 1 else 1.0
        with mock.patch.object(model, "forward", lambda *a, **k: forward(*a, **k) * factor):
            return step(model, optimizer, rows, number, *args)

    with mock.patch.object(fsdp_train, "train_step", train_step):
        yield


@pytest.mark.parametrize("size, layout", POOLS, ids=str)
def test_a_step_that_went_bad_on_one_rank_changes_nothing_on_any(
    ranks, tiny_data, tmp_path, size, layout
):
    flags = [*FLAGS, *flags_for(tiny_data), *layout, "--max_steps=8", "--save_interval=1"]
    fault = functools.partial(poisoned, [4])
    status, _, said = ranks(size)(train_here, [*flags, f"--run_dir={tmp_path / 'run'}"], fault)[0]
    assert status == 0 and "1 steps with a non-finite loss or gradient were skipped" in said
    rows = steps_of(tmp_path / "run")
    assert [step for step, row in rows.items() if row["skipped"]] == [5]
    assert not (tmp_path / "run/checkpoints/step-5").exists()  # good checkpoints are not displaced
    without = [*flags, f"--run_dir={tmp_path / 'without'}", "--skip_steps=5:6"]
    assert ranks(size)(train_here, without)[0][0] == 0
    a, b = (load(checkpoint.latest(tmp_path / name)) for name in ("run", "without"))
    assert same(a, b)  # Adam's own step count did not go on, either


@contextlib.contextmanager
def slower_norm(seconds, rank):
    """The final norm, the fifth in a model of two blocks, takes so much longer.

    With FULL_SHARD a rank waits for slower ones between the blocks.
    """
    forward, calls = torch.nn.functional.layer_norm, itertools.count(1)

    def slow_norm(*args):
        if next(calls) % 5 == 0:
            time.sleep(seconds[rank])
        return forward(*args)

    with mock.patch.object(torch.nn.functional, "layer_norm", slow_norm):
        yield


@contextlib.contextmanager
def slower_attention(seconds, rank):
    """The attention of a layer takes so many seconds longer: seconds[rank]."""
    attention = model.attention

    def slow_attention(*args, **more):
        time.sleep(seconds[rank])
        return attention(*args, **more)

    with mock.patch.object(model, "attention", slow_attention):
        yield


@pytest.mark.parametrize(
    "size, layout, slower",
    [
        slowly(2, ["--sharding=FULL_SHARD"], slower_norm),
        slowly(4, ["--tp=2", "--qk_ln", "--activation_checkpointing=selective"], slower_attention),
        slowly(4, ["--pp=2", "--n_layers=3"], slower_attention),  # the first stage has more layers
        at_length(4, ["--tp=2", "--pp=2"], slower_attention),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_the_slow_rank_is_named_and_not_the_one_that_waits_for_it(
    ranks, tiny_data, tmp_path, size, layout, slower
):
    """If all are as slow, none is called slow."""
    flags = [*FLAGS, *flags_for(tiny_data), "--max_steps=6", *layout]
    found = {}
    for name, seconds in [("last", [0.0] * (size - 1) + [0.1]), ("all", [0.03] * size)]:
        run = tmp_path / name
        fault = functools.partial(slower, seconds)
        answers = ranks(size)(train_here, [*flags, f"--run_dir={run}"], fault)
        assert [status for status, *_ in answers] == [0] * size, answers
        found[name] = list(steps_of(run).values())[2:]
    assert all(row["slowest_rank"] == size - 1 for row in found["last"]), found
    assert all(row["slowest_by"] > 1.5 for row in found["last"]), found
    assert min(row["slowest_by"] for row in found["all"]) < 1.5, found
