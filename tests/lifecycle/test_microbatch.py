"""lifecycle/microbatch.py with memory that really runs out: the kernel limits the test process."""

import contextlib
import functools
import json
import os
import re
import resource
import signal
import time
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conftest import PATIENCE, flags_for
from launches import FLAGS as RUN
from launches import Job, train_here, wait_for

import config
import fsdp_train
import processes
from config import MPTConfig, TrainConfig
from fsdp_train import train_step
from lifecycle import microbatch
from program import UserError, out_of_memory

# With 4 heads one sequence takes about 40 MB of scores (T x T) and what is made of them; a process
# before its first step 0.3 GB. Two runs or two machines differ by up to 0.1 GB. So the tests with a
# limit take larger scores: the limit is 0.2 GB and more away from what fits and from what does not.
SHAPE = "--d_model=32 --n_heads=4 --n_layers=4 --max_seq_len=512 --vocab_size=257 --alibi "
SHAPE += "--attn_impl=reference"
FLAGS = [
    *SHAPE.split(),
    "--device=cpu",
    "--precision=fp32",
    "--global_batch_size=32",
    "--microbatch_size=auto",
]
LARGER = ["--n_heads=8"]
TIGHT = 1_300_000_000  # bytes: 16 sequences of LARGER never fit
CPU = torch.device("cpu")
SMALL = MPTConfig(d_model=32, n_heads=2, n_layers=1, max_seq_len=16, vocab_size=64)


def killed_step(model, optimizer, rows, step, cfg, world, precision):
    """Kill rank 1, as the OOM killer does, at microbatches above 4; rank 0 waits for it."""
    if world.global_rank == 1 and cfg.microbatch_size > 4:
        os.kill(os.getpid(), signal.SIGKILL)
    return train_step(model, optimizer, rows, step, cfg, world, precision)


def wrong_step(model, optimizer, rows, step, cfg, world, precision):
    if world.global_rank == 1:
        raise ValueError("the step is wrong")
    return train_step(model, optimizer, rows, step, cfg, world, precision)


def endless_step(model, optimizer, rows, step, cfg, world, precision):
    Path("child").write_text(str(os.getpid()))
    time.sleep(PATIENCE)


def fit_and_say(step, argv):
    """The program of a rank."""
    model_cfg, cfg = config.load(argv, MPTConfig, TrainConfig)
    world = processes.start(cfg.device)
    print(f"takes {microbatch.fit(model_cfg, cfg, world, 'fp32', step)}", flush=True)


@contextlib.contextmanager
def limited(limits, rank):
    """A rank may use limits[rank] bytes, if not None."""
    if limits[rank]:
        resource.setrlimit(resource.RLIMIT_DATA, (limits[rank], limits[rank]))
    yield


@pytest.fixture
def fitted(tmp_path):
    """`fitted(step, *flags, limits=...)`: the statuses of a rank for each limit, and the log."""

    def fit(step, *flags, limits=(None,)):
        (tmp_path / "log").unlink(missing_ok=True)
        main, fault = functools.partial(fit_and_say, step), functools.partial(limited, limits)
        with Job(tmp_path, len(limits), main, [*FLAGS, *flags], fault) as job:
            return job.wait(), job.log()

    return fit


BOTH = (None, None)


def sizes(output):
    """The sizes that were tried, and the outcome of each: {16: "out of memory", 8: "fits, ..."}."""
    tried = re.findall(r"^microbatch (\d+): (.*)$", output, re.MULTILINE)
    return {int(size): words for size, words in tried}


def record(tmp_path):
    """The sizes on record, in the default run folder."""
    records = microbatch.read(tmp_path / TrainConfig.run_dir / "microbatch.json")
    return [r["microbatch_size"] for r in records]


# -------------------------------------------------------------------------------------------------
# Which errors are about memory


def error_of(function):
    try:
        function()
    except Exception as error:
        return error


def test_the_cpu_s_want_of_memory_is_known():
    assert out_of_memory(error_of(lambda: torch.empty(2**48)))
    assert out_of_memory(error_of(lambda: bytearray(2**48)))


@pytest.mark.gpu
def test_an_accelerator_s_want_of_memory_is_known():
    assert out_of_memory(error_of(lambda: torch.empty(2**48, device="cuda")))


# An accelerator's error after it is launched; torch before 2.8 has RuntimeError instead.
# An accelerator's error after it is launched; torch before 2.8 has RuntimeError instead.
Accelerator = getattr(torch, "AcceleratorError", RuntimeError)
NCCL = "NCCL error in: NCCLUtils.cpp:77, unhandled cuda error, NCCL version 2.27.3\nLast error:\n"


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ..."),
        torch.OutOfMemoryError("HIP out of memory. Tried to allocate 2.00 GiB."),
        Accelerator("CUDA error: out of memory\nCUDA kernel errors might be ..."),
        Accelerator("HIP error: hipErrorOutOfMemory"),
        dist.DistBackendError(NCCL + "Failed to CUDA calloc async 608 bytes"),
        dist.DistBackendError(NCCL + "Cuda failure 2 'out of memory'"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
        RuntimeError("rocblas_status_memory_error"),
        RuntimeError("MPS backend out of memory (MPS allocated: 9 GB)"),
    ],
    ids=lambda error: str(error)[:40],
)
def test_every_library_s_want_of_memory_is_known_and_no_lost_rank(error):
    assert out_of_memory(error) and not processes.is_lost(error)
    assert str(processes.user_error(error)).startswith("out of memory (")


@pytest.mark.parametrize(
    "error",
    [
        ValueError("can't allocate memory"),
        UserError("out of memory at step 3"),
        Accelerator("CUDA error: an illegal memory access was encountered"),
        dist.DistBackendError(NCCL + "socketProgress: Connection closed by remote peer"),
        dist.DistStoreError("wait timeout after 5000ms"),
        RuntimeError("out of resource: shared memory, Required: 131072, Hardware limit: 101376"),
        error_of(lambda: torch.ones(2) @ torch.ones(3)),
    ],
    ids=lambda error: str(error)[:40],
)
def test_other_errors_are_not_about_memory(error):
    assert not out_of_memory(error)
    assert processes.is_lost(error) == isinstance(error, dist.DistError)


# -------------------------------------------------------------------------------------------------
# The record


def fit(world, cfg, model_cfg=SMALL, precision="fp32"):
    return microbatch.fit(model_cfg, cfg, world, precision, None)  # no step: a trial would fail


def halve(world, cfg, step=123):
    return microbatch.halve(SMALL, cfg, world, "fp32", step)


def test_half_is_taken_at_the_next_start_under_the_same_circumstances(ranks, tmp_path):
    cfg = TrainConfig(run_dir=str(tmp_path / "run"), microbatch_size=12, device="cpu")
    pool = ranks(2)
    assert pool(fit, cfg) == [12, 12]
    assert pool(halve, cfg) == [6, 6]  # both at once
    for given, taken in ((12, 6), ("auto", 6), (6, 6), (4, 4)):
        assert pool(fit, replace(cfg, microbatch_size=given)) == [taken, taken]
    assert pool(fit, replace(cfg, sharding="DDP")) == [12, 12]
    assert ranks(1)(fit, cfg) == [12]
    assert pool(halve, replace(cfg, microbatch_size=6)) == [3, 3]
    assert pool(fit, cfg) == [3, 3]
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["microbatch.json"]


def test_stages_get_four_microbatches_each_if_there_are_so_many_rows():
    assert microbatch.sizes_to_try(24, 1) == [16, 8, 4, 2, 1]
    assert microbatch.sizes_to_try(24, 2) == [2, 1]
    assert microbatch.sizes_to_try(640, 16) == [8, 4, 2, 1]
    assert microbatch.sizes_to_try(3, 4) == [1]


def rows_of_trial(world, cfg):
    """How many rows each step of a trial has."""
    seen = []

    def step(model, optimizer, rows, *others):
        seen.append(len(rows))
        return train_step(model, optimizer, rows, *others)

    env = {"RANK": str(world.global_rank), "WORLD_SIZE": str(world.global_size)}
    with mock.patch.dict(os.environ, env):
        microbatch.two_steps(replace(SMALL, n_layers=2), cfg, "fp32", step)
    return seen


def test_a_trial_fills_the_memory_of_the_first_stage(ranks):
    """Two microbatches on their way through two stages, and gradients of an earlier one."""
    cfg = TrainConfig(device="cpu", global_batch_size=32, microbatch_size=2, pp=2)
    assert ranks(2)(rows_of_trial, cfg) == [[6, 6]] * 2
    assert ranks(2)(rows_of_trial, replace(cfg, pp=1)) == [[4, 4]] * 2


def test_half_of_one_says_what_else_helps(tmp_path):
    world = processes.World(3, 4, 3, 4, CPU)
    cfg = TrainConfig(run_dir=str(tmp_path / "run"), microbatch_size=1)
    with pytest.raises(UserError, match="step 123 on rank 3 .*activation_checkpointing.*sharding"):
        halve(world, cfg)
    assert not (tmp_path / "run").exists()


RECORDS = {
    "cut off": "[{",
    "a record that is none": '[["microbatch_size", 4]]',
    "half a size": '[{"microbatch_size": 4.5, "reason": "it fits", "circumstances": {}}]',
    "a size of zero": '[{"microbatch_size": 0, "reason": "it fits", "circumstances": {}}]',
    "no reason": '[{"microbatch_size": 4, "circumstances": {}}]',
}


@pytest.mark.parametrize("kind", RECORDS)
def test_a_damaged_record_is_named(tmp_path, kind):
    path = tmp_path / "microbatch.json"
    path.write_text(RECORDS[kind])
    world, cfg = processes.World(0, 1, 0, 1, CPU), TrainConfig(run_dir=str(tmp_path))
    for use in (lambda: microbatch.main([str(tmp_path)]), lambda: halve(world, cfg)):
        with pytest.raises(UserError, match=f"^{path} is damaged .*: delete it$"):
            use()
    assert path.read_text() == RECORDS[kind]


def test_what_is_on_record_of_other_circumstances_stays(tmp_path):
    """Each is halved in turn: its own record is replaced, and the others stay as they are."""
    cfg = TrainConfig(run_dir=str(tmp_path), microbatch_size=16)
    adapted = replace(cfg, init_from="base", lora_rank=4)
    world = processes.World(0, 2, 0, 2, CPU)
    starts = {
        "as it is": (SMALL, cfg, world, "fp32"),
        "sharding": (SMALL, replace(cfg, sharding="DDP"), world, "fp32"),
        "checkpointing": (SMALL, replace(cfg, activation_checkpointing="full"), world, "fp32"),
        "tensor ranks": (SMALL, replace(cfg, tp=2), world, "fp32"),
        "stages": (SMALL, replace(cfg, pp=2), world, "fp32"),
        "adapters": (SMALL, adapted, world, "fp32"),
        "adapters of another rank": (SMALL, replace(adapted, lora_rank=8), world, "fp32"),
        "fewer adapters": (SMALL, replace(adapted, lora_targets="Wqkv"), world, "fp32"),
        "batch": (SMALL, replace(cfg, global_batch_size=32), world, "fp32"),
        "ranks": (SMALL, cfg, replace(world, global_size=4), "fp32"),
        "nodes": (SMALL, cfg, replace(world, local_size=1), "fp32"),
        "precision": (SMALL, cfg, world, "bf16"),
        "model": (replace(SMALL, n_layers=2), cfg, world, "fp32"),
    }
    for n_started, (model_cfg, settings, ranks, precision) in enumerate(starts.values(), 1):
        for size in (16, 8):
            asked = replace(settings, microbatch_size=size)
            microbatch.halve(model_cfg, asked, ranks, precision, step=7)
        records = microbatch.read(tmp_path / "microbatch.json")
        assert [record["microbatch_size"] for record in records] == [4] * n_started
    recorded = [record["circumstances"] for record in records]
    assert all(microbatch.circumstances_of(*start) in recorded for start in starts.values())


def test_the_program_says_what_is_on_record(tmp_path, capsys):
    microbatch.main([str(tmp_path)])
    assert capsys.readouterr().out == f"no microbatch is recorded in {tmp_path}\n"
    record = {"microbatch_size": 4, "reason": "so", "circumstances": {"ranks": 2}}
    (tmp_path / "microbatch.json").write_text(json.dumps([record]))
    microbatch.main([str(tmp_path)])
    assert "microbatch 4, so" in capsys.readouterr().out


def evaluated_with(world, flags):
    """The microbatch sizes with which a run evaluates, where 2 was found to fit."""
    sizes = []
    evaluate = fsdp_train.evaluate

    def noting(model, val, cfg, *args):
        sizes.append(cfg.microbatch_size)
        return evaluate(model, val, cfg, *args)

    found = mock.patch.object(microbatch, "fit", lambda *args: 2)
    with found, mock.patch.object(fsdp_train, "evaluate", noting):
        assert train_here(world, flags)[0] == 0
    return sizes


@pytest.mark.parametrize("asked", ["auto", 4])
def test_evaluation_too_takes_what_fits(ranks, tiny_data, tmp_path, asked):
    flags = [*RUN, *flags_for(tiny_data), "--max_steps=1", "--warmup_steps=0"]
    flags += [f"--run_dir={tmp_path}", f"--microbatch_size={asked}"]
    assert ranks(1)(evaluated_with, flags) == [[2, 2]]


# -------------------------------------------------------------------------------------------------
# The trial


@pytest.mark.slow
def test_what_fits_is_found_and_kept(fitted, tmp_path):
    """16 does not fit into the limit. What does depends on the allocator too; it is 8 as a rule.

    The second start tries nothing.
    """
    flags = [*LARGER, "--global_batch_size=16"]
    statuses, log = fitted(train_step, *flags, limits=[TIGHT])
    assert statuses == [0], log
    *too_large, found = sizes(log)
    assert too_large[0] == 16 and found < 16
    assert all(sizes(log)[size] == "out of memory" for size in too_large)
    assert re.fullmatch(r"fits, \d\.\d GB at the peak", sizes(log)[found])
    assert log.endswith(f"takes {found}\n") and record(tmp_path) == [found]
    statuses, log = fitted(train_step, *flags, limits=[TIGHT])
    assert statuses == [0] and not sizes(log)
    assert f"microbatch {found}, not auto: the largest that fits" in log
    assert log.endswith(f"takes {found}\n")


@pytest.mark.slow
def test_one_rank_s_want_of_memory_is_everybody_s(fitted, tmp_path):
    """Rank 0 has no limit and would wait forever in a collective."""
    statuses, log = fitted(train_step, *LARGER, limits=(None, TIGHT))
    assert statuses == [0, 0], log
    tried = sizes(log)
    assert tried[16] == "out of memory on rank 1" and list(tried.values())[-1].startswith("fits")
    found = list(tried)[-1]
    assert found < 16 and log.count(f"takes {found}\n") == 2
    assert record(tmp_path) == [found]


@pytest.mark.slow
def test_one_that_the_kernel_kills_had_no_memory(fitted):
    statuses, log = fitted(killed_step, "--global_batch_size=16", limits=BOTH)
    assert statuses == [0, 0], log
    assert sizes(log)[8] == "out of memory on rank 1" and sizes(log)[4].startswith("fits")


@pytest.mark.slow
def test_another_failure_is_told_as_it_is(fitted, tmp_path):
    statuses, log = fitted(wrong_step, limits=BOTH)
    assert statuses == [2, 2]
    assert "error: the trial step failed: ValueError: the step is wrong\n" in log
    assert not sizes(log) and not (tmp_path / TrainConfig.run_dir).exists()


@pytest.mark.slow
def test_where_nothing_fits_the_line_says_what_helps(fitted):
    flags = ["--max_seq_len=2048", "--global_batch_size=2"]  # 0.6 GB for one sequence
    statuses, log = fitted(train_step, *flags, limits=[700_000_000])
    assert statuses == [2] and sizes(log) == {2: "out of memory", 1: "out of memory"}
    helps = "^error: .*activation_checkpointing.*sharding.*planning.memory"
    assert re.search(helps, log, re.MULTILINE)


@pytest.mark.slow
def test_a_killed_parent_leaves_no_child(tmp_path):
    main = functools.partial(fit_and_say, endless_step)
    with Job(tmp_path, 1, main, FLAGS) as job:
        wait_for(lambda: (tmp_path / "child").exists() and (tmp_path / "child").read_text())
        child = Path(f"/proc/{(tmp_path / 'child').read_text()}")
        assert child.exists()
        job.send(signal.SIGKILL, 0)
        wait_for(lambda: not child.exists() or "Z" in (child / "stat").read_text().split()[2])
