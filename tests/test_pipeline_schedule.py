"""The schedule of pipeline.py: its order, what stages send and keep, the bubble, the picture."""

import functools
import os
import re
import signal
import subprocess
import sys
import time
import weakref
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import pairwise
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conftest import PATIENCE, ROOT, rooms_on_path
from test_tensor_parallel import MODEL, RUN, take_steps

import parallel
import pipeline
import processes
from config import UserError
from pipeline import Pipe, blocks_of, most_kept, order

MODEL = replace(MODEL, n_layers=4)
MICROBATCHES = range(1, 13)
every_number_of_stages = pytest.mark.parametrize("stages", range(1, 9))


@functools.cache
def world_of(pp):
    """In a rank's process: its world with pp stages."""
    rank, size = dist.get_rank(), dist.get_world_size()
    world = processes.World(rank, size, rank, size, torch.device("cpu"))
    return processes.in_grid(world, tp=1, pp=pp)


# --- The order


@dataclass(frozen=True)
class Recorder(Pipe):
    """A stage without others, in which a microbatch's number stands for its tensors.

    It writes down its passes, ("F", i) and ("B", i), and its transfers.
    """

    passes: list = field(default_factory=list)
    transfers: list = field(default_factory=list)

    def transfer(self, neighbour, send=None, receive=None):
        self.transfers.append((neighbour, send, receive))
        return receive

    def forward(self, i, x):
        assert x == (None if self.is_first else i)
        self.passes.append(("F", i))
        return i

    def backward(self, i, dy):
        assert dy == (None if self.is_last else i)
        self.passes.append(("B", i))
        return i


def recorded(stages, n):
    """What each of the stages does."""
    found = []
    for stage in range(stages):
        pipe = Recorder(None, stage, stages)
        pipeline.one_f_one_b(pipe, n, lambda i: i, pipe.forward, pipe.backward)
        found.append(pipe)
    return found


@every_number_of_stages
def test_each_stage_computes_in_the_stated_order(stages):
    for n in MICROBATCHES:
        for stage, pipe in enumerate(recorded(stages, n)):
            assert pipe.passes == order(stage, stages, n)
            assert sorted(pipe.passes) == sorted((kind, i) for kind in "FB" for i in range(n))


@every_number_of_stages
def test_every_transfer_meets_that_of_the_neighbour(stages):
    for n in MICROBATCHES:
        follow_transfers(stages, n)


def follow_transfers(stages, n):
    """A transfer waits for the neighbour's, which must be of the same microbatches."""
    left = [pipe.transfers for pipe in recorded(stages, n)]
    while any(left):
        before = sum(map(len, left))
        for stage in range(stages - 1):
            mine, theirs = left[stage], left[stage + 1]
            if mine and theirs and mine[0][0] == stage + 1 and theirs[0][0] == stage:
                _, sent, received = mine.pop(0)
                assert theirs.pop(0) == (stage, received, sent)
        assert sum(map(len, left)) < before, f"a deadlock: {left}"


@every_number_of_stages
def test_a_stage_keeps_the_activations_of_few_microbatches(stages):
    for n in MICROBATCHES:
        kept = [most_kept(stage, stages, n) for stage in range(stages)]
        assert kept == [min(n, stages - stage) for stage in range(stages)]


def computed_with(world, n):
    """On one rank: its passes, and what came of adding 1 on each stage, there and back."""
    pipe, passes, arrived = Pipe(dist.group.WORLD, world.global_rank, world.global_size), [], []

    def forward(i, x):
        passes.append(("F", i))
        return torch.tensor([100.0 * i]) if x is None else x + 1

    def backward(i, dy):
        passes.append(("B", i))
        dy = torch.tensor([-100.0 * i]) if dy is None else dy + 1
        arrived.append(dy.item())
        return dy

    pipeline.one_f_one_b(pipe, n, lambda i: torch.empty(1), forward, backward)
    return passes, arrived


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_on_real_ranks_the_order_is_the_same_and_gradients_come_back(ranks, size, n):
    """With fewer microbatches than stages, too."""
    for stage, (passes, arrived) in enumerate(ranks(size)(computed_with, n)):
        assert passes == order(stage, size, n)
        assert arrived == [-100 * i + size - 1 - stage for i in range(n)]


# --- What the stages send and keep


def step_of(world, cfg):
    """A function that takes one step of a model on this rank's stage."""
    model, optimizer = parallel.build(MODEL, cfg, world, "fp32", cfg.seed)
    return lambda: take_steps(model, optimizer, [0], world, cfg, MODEL)


def operations_of_a_step(_, cfg):
    """Counter of (isend or irecv, number of numbers)."""
    world = world_of(cfg.pp)
    counts, real = Counter(), dist.batch_isend_irecv

    def counted(operations):
        counts.update((o.op.__name__, o.tensor.numel()) for o in operations)
        return real(operations)

    with mock.patch.object(dist, "batch_isend_irecv", counted):
        step_of(world, cfg)()
    return counts


@pytest.mark.parametrize("microbatch_size", [1, 4])  # 8 microbatches, and fewer than stages
def test_neighbours_send_two_messages_for_each_microbatch(ranks, microbatch_size):
    """One there and one back; and the ends one each way, of the tied embedding's gradient."""
    cfg = replace(RUN, pp=4, microbatch_size=microbatch_size)
    n = cfg.global_batch_size // microbatch_size
    hidden = microbatch_size * MODEL.max_seq_len * MODEL.d_model
    tied = MODEL.vocab_size * MODEL.d_model
    for stage, counts in enumerate(ranks(4)(operations_of_a_step, cfg)):
        is_end = stage in (0, 3)
        messages = n * (1 if is_end else 2)
        wanted = {(kind, hidden): messages for kind in ("isend", "irecv")}
        if is_end:
            wanted |= {("isend", tied): 1, ("irecv", tied): 1}
        assert counts == wanted


class Kept:
    """A tensor that autograd keeps for the backward."""

    def __init__(self, tensor):
        self.tensor = tensor


def kept_in_a_step(_, cfg):
    """How many tensors autograd keeps after each forward of a step."""
    alive, counts, real = weakref.WeakSet(), [], pipeline.one_f_one_b

    def pack(tensor):
        kept = Kept(tensor)
        alive.add(kept)
        return kept

    def counted(pipe, n, empty, forward, backward):
        def forward_and_count(i, x):
            y = forward(i, x)
            counts.append(len(alive))
            return y

        real(pipe, n, empty, forward_and_count, backward)

    take_step = step_of(world_of(cfg.pp), cfg)
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.tensor)
    with hooks, mock.patch.object(pipeline, "one_f_one_b", counted):
        take_step()
    return counts


@pytest.mark.parametrize("microbatch_size", [1, 4])
def test_autograd_keeps_no_more_than_the_schedule_says(ranks, microbatch_size):
    cfg = replace(RUN, pp=4, microbatch_size=microbatch_size)
    n = cfg.global_batch_size // microbatch_size
    for stage, counts in enumerate(ranks(4)(kept_in_a_step, cfg)):
        of_one_microbatch = counts[0]
        assert len(counts) == n and of_one_microbatch > 0
        assert max(counts) == of_one_microbatch * min(n, 4 - stage)


def drawn(_, cfg):
    """What dropout would draw in a step, and where this rank is: (stage, data-parallel rank)."""
    world = world_of(cfg.pp)
    parallel.seed_dropout(cfg, 3, world)
    return (world.pp_rank, world.dp_rank), torch.rand(4).tolist()


def test_each_stage_draws_dropout_masks_of_its_own(ranks):
    found = dict(ranks(4)(drawn, replace(RUN, pp=2)))
    assert sorted(found) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert len(set(map(tuple, found.values()))) == 4


# --- The bubble


@every_number_of_stages
def test_the_formula_is_what_the_picture_shows(stages):
    """A column is a unit of time, a dot is idle."""
    for n in MICROBATCHES:
        lines = pipeline.picture(stages, n)
        share = "".join(lines).count(".") / sum(map(len, lines))
        assert share == pytest.approx(pipeline.bubble(stages, n))


def asleep(world, n, nap):
    pipe = Pipe(dist.group.WORLD, world.global_rank, world.global_size)
    return pipeline.sleep_through_a_step(pipe, n, nap)


@pytest.mark.slow
@pytest.mark.parametrize("n", [4, 8, 16])
def test_the_measured_bubble_is_that_of_the_formula(ranks, n):
    """Other programs delay transfers. So the naps get longer, until a delay hardly counts."""
    wanted, measured = pipeline.bubble(4, n), []
    for nap in (0.05, 0.1, 0.2, 0.4, 0.4):
        found = ranks(4)(asleep, n, nap)
        assert len(set(found)) == 1
        measured.append(found[0])
        if found[0] - wanted < 0.03:
            break
    assert abs(min(measured) - wanted) < 0.03, (wanted, measured)


# --- The stages of a model


@pytest.mark.parametrize("stages", range(1, 13))
def test_the_blocks_of_all_stages_are_the_model(stages):
    for n_layers in range(stages, 41):
        parts = [blocks_of(n_layers, stage, stages) for stage in range(stages)]
        assert [block for part in parts for block in part] == [*range(n_layers)]
        sizes = [len(part) for part in parts]
        assert max(sizes) - min(sizes) <= 1
        assert max(sizes[0], sizes[-1]) <= min(sizes[1:-1], default=n_layers)


# --- The program


def run_program(*flags):
    command = [sys.executable, ROOT / "pipeline.py", *flags]
    options = {"env": rooms_on_path(), "capture_output": True, "text": True}
    return subprocess.run(command, timeout=PATIENCE, **options)


def test_the_picture_on_paper_is_what_the_program_draws():
    lines = pipeline.picture(4, 8)
    drawn = [f"stage {stage}  {line}\n" for stage, line in enumerate(lines)]
    assert "".join(f"    {line}" for line in drawn) in pipeline.__doc__


def test_in_the_picture_a_pass_begins_where_the_one_it_needs_ends():
    """For some sizes without ten microbatches, after which the numbers begin again."""
    for stages, n in [(2, 1), (3, 7), (4, 2), (8, 9)]:
        lines = pipeline.picture(stages, n)
        for i in range(n):
            forwards = [line.index(str(i)) for line in lines]
            backwards = [line.index("abcdefghij"[i] * 2) for line in lines]
            assert all(a + 1 <= b for a, b in pairwise(forwards))
            assert all(b + 2 <= a for a, b in pairwise(backwards))
            assert forwards[-1] + 1 <= backwards[-1]


@pytest.mark.slow
@pytest.mark.parametrize("stages, n", [(4, 8), (1, 2)])
def test_the_program_prints_the_picture_and_the_bubble(stages, n):
    done = run_program(f"--stages={stages}", f"--microbatches={n}")
    assert done.returncode == 0 and done.stderr == "", done.stderr
    printed = done.stdout.splitlines()
    drawn = [f"stage {stage}  {line}" for stage, line in enumerate(pipeline.picture(stages, n))]
    assert printed[:stages] == drawn
    kept = ", ".join(str(min(n, stages - stage)) for stage in range(stages))
    assert kept in printed[stages]
    assert printed[stages + 1].endswith(f"= {pipeline.bubble(stages, n):.3f}")
    measured = float(re.match(r"bubble, measured: ([\d.]+),", printed[-1])[1])
    assert pipeline.bubble(stages, n) - 0.02 < measured < 1  # above it, as far as others compute


def children_of(pid) -> list[str]:
    return subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True).stdout.split()


def is_alive(pid) -> bool:
    return subprocess.run(["ps", "-p", str(pid)], capture_output=True).returncode == 0


@pytest.mark.slow
def test_after_ctrl_c_no_process_is_left():
    flags = ["--stages=2", "--microbatches=64"]  # twelve seconds of sleep
    command = [sys.executable, ROOT / "pipeline.py", *flags]
    pipes = {"stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, env=rooms_on_path(), start_new_session=True, **pipes)
    try:
        for line in process.stdout:
            if line.startswith("bubble, computed"):
                break
        deadline = time.monotonic() + PATIENCE
        while len(children := children_of(process.pid)) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)  # a terminal sends it to all
        assert process.wait(PATIENCE) == 130
        while any(map(is_alive, children)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert children and not any(map(is_alive, children))
    finally:
        process.kill()


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--stages=0"], "stages is 0: set --stages to 1 to 16"),
        (["--stages=-1"], "stages is -1"),
        (["--stages=17"], "set --stages to 1 to 16"),
        (["--microbatches=0"], "microbatches is 0: set --microbatches to 1 to 64"),
        (["--microbatches=1e9"], "microbatches is 1,000,000,000: set"),
        (["--stages=two"], "expected a whole number"),
        (["--stage=2"], "did you mean 'stages'"),
    ],
)
def test_a_number_that_makes_no_pipeline_is_a_user_error(flags, words):
    with pytest.raises(UserError, match=re.escape(words)):
        pipeline.demonstrate(flags)


@pytest.mark.slow
def test_a_user_error_is_one_line_and_status_2():
    done = run_program("--stages=0")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == "error: stages is 0: set --stages to 1 to 16\n"
