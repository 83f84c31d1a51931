"""checkpoint.py: complete or absent, saved while training continues, loaded on any ranks."""

import contextlib
import json
import os
import pickle
import resource
import shutil
import signal
import subprocess
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from conftest import flags_for, refusal, slowly
from launches import Job, same, wait_for
from test_parallel import (
    MODEL,
    RUN,
    build,
    full_weights,
    global_rows,
    rows_of,
)
from torch.distributed.checkpoint.metadata import Metadata

import checkpoint
import fsdp_train
from lifecycle import beginning
from optim import ADAMW
from program import UserError
from storage import files
from storage.checkpoint_files import Stager, checksum
from weights import load

META = {**asdict(MODEL), **asdict(RUN), "precision": "fp32", "data_fingerprint": "f00"}


def take_steps(world, cfg, model, optimizer, steps):
    """[(loss, gradient norm), ...]"""
    curve = []
    for step in steps:
        rows = rows_of(world, global_rows(step)).to(world.device)
        loss, norm, _ = fsdp_train.train_step(model, optimizer, rows, step, cfg, world, "fp32")
        curve.append((loss.item(), norm.item()))
    return curve


def train(world, cfg, first=0, last=10, load_from=None, save_at=None):
    """Steps first..last-1, from the checkpoint `load_from`. Saves after step `save_at`.

    Returns the curve, and the full weights at the time of saving and at the end.
    """
    model, optimizer = build(world, cfg)
    if load_from:
        checkpoint.load(load_from, model, optimizer)
    saver = checkpoint.Checkpointer(cfg.run_dir, world.device, cfg.keep_last)
    middle = save_at or last
    curve = take_steps(world, cfg, model, optimizer, range(first, middle))
    saved = full_weights(model) if save_at else None
    if save_at:
        saver.save(save_at, model, optimizer, META)
    curve += take_steps(world, cfg, model, optimizer, range(middle, last))
    saver.finish()
    return curve, saved, full_weights(model)


def saved_at_five(ranks, folder, size, mode):
    """Ten steps, saved after five: settings, curve, and the weights after five and ten."""
    cfg = replace(RUN, sharding=mode, run_dir=str(folder / f"{size}-{mode}"))
    if mode == "HYBRID_SHARD":
        cfg = replace(cfg, shard_size=2)
    return cfg, *ranks(size)(train, cfg, 0, 10, None, 5)[0]


def train_on(world, device, *args):
    """`train` on a device: the full weights at the time of saving and at the end, on the CPU."""
    _, saved, last = train(replace(world, device=torch.device(device)), *args)
    parts = [
        weights and {name: w.cpu() for name, w in weights.items()} for weights in (saved, last)
    ]
    return tuple(parts)


@pytest.mark.gpu
def test_a_save_on_a_gpu_holds_the_weights_of_its_step(ranks, tmp_path):
    """Training goes on while the copy in host memory is written; loading gives the copy."""
    cfg = replace(RUN, run_dir=str(tmp_path))
    saved, last = ranks(1)(train_on, "cuda", cfg, 0, 10, None, 5)[0]
    _, loaded = ranks(1)(train_on, "cuda", cfg, 5, 5, checkpoint.latest(tmp_path))[0]
    assert all(torch.equal(saved[name], loaded[name]) for name in saved)
    assert not all(torch.equal(saved[name], last[name]) for name in saved)


@pytest.mark.parametrize("size, mode", [(1, "DDP"), (2, "ZERO1"), slowly(4, "HYBRID_SHARD")])
def test_what_is_saved_is_the_moment_of_saving(ranks, tmp_path, size, mode):
    """Five more steps were taken while it was written. From there it resumes bit by bit.

    Reading it needs no process group.
    """
    cfg, straight, at_five, at_ten = saved_at_five(ranks, tmp_path, size, mode)
    resumed, _, end = ranks(size)(train, cfg, 5, 10, checkpoint.latest(cfg.run_dir))[0]
    assert resumed == straight[5:] and same(end, at_ten)
    model = load.load_model(checkpoint.latest(cfg.run_dir), torch.device("cpu"))
    loaded = full_weights(model)
    assert same(loaded, at_five) and not same(loaded, at_ten)
    assert not model.training
    assert model.cfg == replace(MODEL, attn_impl="auto")  # the attention is chosen on loading
    assert not dist.is_initialized()


def load_with(world, cfg, path):
    """The optimizer's settings before and after loading; Adam's steps and first moments after."""
    model, optimizer = build(world, cfg)

    def settings():
        groups = optimizer.param_groups
        return [{k: v for k, v in group.items() if k != "params"} for group in groups]

    before = settings()
    checkpoint.load(path, model, optimizer)
    steps, moments = [], []
    for state in optimizer.state.values():
        steps.append(state["step"].item())
        moments.append(state["exp_avg"].full_tensor().abs().sum().item())
    return before, settings(), steps, moments


def test_settings_given_now_win_over_saved_ones(ranks, tmp_path):
    cfg, *_ = saved_at_five(ranks, tmp_path, 2, "FULL_SHARD")
    now = replace(cfg, lr=7e-4, beta1=0.8, beta2=0.99, adam_eps=1e-7, decoupled_weight_decay=0.0)
    before, after, steps, moments = ranks(2)(load_with, now, checkpoint.latest(cfg.run_dir))[0]
    assert after == before and after[0]["lr"] == 7e-4 and after[0]["betas"] == (0.8, 0.99)
    assert set(steps) == {5} and min(moments) > 0  # Adam's state is loaded


# --------------------------------------------------------------------------------------------------
# Complete or absent


def names(folder) -> list[str]:
    """What is in the checkpoint folder of a run."""
    return sorted(path.name for path in (Path(folder) / "checkpoints").iterdir())


def save_several(world, cfg, steps):
    """One save after another. Returns what is in the folder after each."""
    model, optimizer = build(world, cfg)
    saver = checkpoint.Checkpointer(cfg.run_dir, world.device, cfg.keep_last, cfg.keep_every)
    seen = []
    for step in steps:
        assert saver.settled()  # no save is in the background
        saver.save(step, model, optimizer, META)
        wait_for(saver.settled)
        saver.finish()
        seen.append(names(cfg.run_dir))
        dist.barrier()
    return seen


# Which stay: the newest keep_last, also of those that stay for good; each keep_every-th; and one
# that was imported, step 0, which the run could not make again.
@pytest.mark.parametrize(
    "keep_last, keep_every, kept",
    [
        (2, 10, [[10], [10, 15], [10, 15, 20], [10, 20, 25]]),
        (1, 0, [[0], [0, 8], [0, 200]]),
    ],
)
def test_old_ones_are_removed(ranks, tmp_path, keep_last, keep_every, kept):
    cfg = replace(RUN, run_dir=str(tmp_path), keep_last=keep_last, keep_every=keep_every)
    steps = [after[-1] for after in kept]
    (seen,) = ranks(1)(save_several, cfg, steps)
    assert seen == [sorted(f"step-{step}" for step in after) for after in kept]
    assert checkpoint.latest(tmp_path).name == f"step-{steps[-1]}"


def test_a_step_is_not_saved_over_another(ranks, tmp_path):
    """Saving to a path twice is refused, and what was there stays as it was."""
    cfg, _, at_five, _ = saved_at_five(ranks, tmp_path, 1, "FULL_SHARD")
    message = "UserError: could not save step 5: .*The last good checkpoint is .*step-5"
    with pytest.raises(AssertionError, match=message):
        ranks(1)(train, replace(cfg, seed=2), 4, 5, None, 5)
    assert names(cfg.run_dir) == ["step-5"]
    model = load.load_model(checkpoint.latest(cfg.run_dir), torch.device("cpu"))
    assert same(full_weights(model), at_five)


def test_half_a_checkpoint_does_not_count_and_is_swept(ranks, tmp_path):
    """step-11 is as if another program had copied half of it: it stays."""
    cfg = replace(RUN, run_dir=str(tmp_path))
    ranks(2)(save_several, cfg, [5])
    folder = tmp_path / "checkpoints"
    for name in ("step-9.tmp", "step-10.tmp", "step-11"):
        (folder / name).mkdir()
        (folder / name / "meta.json").write_text("{}")
    (folder / "step-10.tmp" / ".metadata").write_text("written, not yet renamed")
    assert checkpoint.latest(cfg.run_dir).name == "step-5"
    assert checkpoint.find(cfg.run_dir).name == "step-5"
    for name in ("step-10.tmp", "step-11"):
        with pytest.raises(UserError, match="no checkpoint in"):
            checkpoint.find(str(folder / name))
    ranks(2)(save_several, cfg, [])
    assert names(cfg.run_dir) == ["step-11", "step-5"]


# --------------------------------------------------------------------------------------------------
# A save that fails


def fail_to_save(world, cfg, spoil, *args):
    """Save step 1; let `spoil` make step 2 fail. Returns the error, and the names left."""
    model, optimizer = build(world, cfg)
    saver = checkpoint.Checkpointer(cfg.run_dir, world.device, 3)
    saver.save(1, model, optimizer, META)
    saver.finish()
    dist.barrier()
    with spoil(world, *args):
        dist.barrier()

        def save():
            saver.save(2, model, optimizer, META)
            saver.finish()

        text = refusal(save)
        dist.barrier()
        left = names(cfg.run_dir) if Path(cfg.run_dir).exists() else None
        dist.barrier()
    take_steps(world, cfg, model, optimizer, range(1))  # training can continue
    if left:
        saver.save(3, model, optimizer, META)  # and so can saving
        saver.finish()
        assert "step-3" in names(cfg.run_dir)
        dist.barrier()
    return text, left


def failures(ranks, folder, spoil, *args) -> str:
    """The error, the same on both ranks; step 1 is still there and nothing of step 2."""
    cfg = replace(RUN, run_dir=str(folder))
    answers = ranks(2)(fail_to_save, cfg, spoil, *args)
    assert all(answer == answers[0] for answer in answers)
    text, left = answers[0]
    assert left == ["step-1"]
    assert text.endswith(f". The last good checkpoint is {folder}/checkpoints/step-1")
    assert text.startswith("could not save step 2: ")
    return text


@contextlib.contextmanager
def small_files(world, rank):
    """One rank cannot write more than 30 kB to a file, as if its disk were full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if world.global_rank == rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_save_that_fails_on_one_rank_fails_on_all(ranks, tmp_path, rank):
    assert "File too large" in failures(ranks, tmp_path, small_files, rank)


def save_nan(world, cfg):
    """Step 1 is sound, step 2 has one NaN in the last row of one weight: what every rank raises."""
    model, optimizer = build(world, cfg)
    saver = checkpoint.Checkpointer(cfg.run_dir, world.device, 1)
    saver.save(1, model, optimizer, META)
    with torch.no_grad():
        weight = model.transformer.wpe.weight
        if world.global_rank == 1:
            weight.to_local()[-1, 3] = float("nan")
    saver.save(2, model, optimizer, META)
    text = refusal(saver.finish)
    dist.barrier()
    return text


def test_weights_that_are_not_finite_are_not_saved(ranks, tmp_path):
    texts = ranks(2)(save_nan, replace(RUN, run_dir=str(tmp_path)))
    message = (
        "could not save step 2: transformer.wpe.weight contains NaN or infinity. "
        f"The last good checkpoint is {tmp_path}/checkpoints/step-1"
    )
    assert texts == [message] * 2
    assert names(tmp_path) == ["step-1"]


@contextlib.contextmanager
def moved_away(world, run_dir):
    """The run folder has another name."""
    if world.global_rank == 0:
        os.rename(run_dir, run_dir + "-gone")
    yield


def test_a_folder_that_vanished_is_not_made_again(ranks, tmp_path):
    cfg = replace(RUN, run_dir=str(tmp_path / "run"))
    answers = ranks(2)(fail_to_save, cfg, moved_away, cfg.run_dir)
    assert all(answer == answers[0] for answer in answers)
    text, left = answers[0]
    assert text.startswith("could not save step 2: ") and "No such file or directory" in text
    assert left is None
    assert not Path(cfg.run_dir).exists() and names(cfg.run_dir + "-gone") == ["step-1"]


@pytest.mark.filterwarnings("ignore:Ignoring pin_memory")  # no GPU here
def test_only_a_run_on_an_nvidia_gpu_stages_through_pinned_memory(monkeypatch):
    """Not a run on the CPU of a machine with a GPU, and not one on ROCm."""
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    monkeypatch.setattr(torch.version, "hip", None)
    assert Stager(gpu).pinned
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert not Stager(gpu).pinned
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert not Stager(cpu).pinned


def test_too_little_host_memory_is_not_taken_for_too_little_of_the_device(monkeypatch):
    stager = Stager(torch.device("cpu"))

    def refuse(*args, **kwargs):
        raise RuntimeError("CUDA error: out of memory")  # of cudaHostRegister

    monkeypatch.setattr(stager.copier, "stage", refuse)
    with pytest.raises(UserError, match="no host memory for the copy of a checkpoint"):
        stager.stage({})


def test_staging_copies_into_the_same_memory_again():
    stager = Stager(torch.device("cpu"))
    weight = torch.zeros(1000)
    first = stager.stage({"weight": weight, "step": 3})
    weight += 1
    assert first["weight"].eq(0).all() and first["step"] == 3
    address = first["weight"].data_ptr()
    second = stager.stage({"weight": weight, "step": 4})
    assert second["weight"].eq(1).all() and second["step"] == 4
    assert second["weight"].data_ptr() == address


@contextlib.contextmanager
def filled(world, folder):
    """300 kB are free on the disk."""
    if world.global_rank == 0:
        (folder / "rest").write_bytes(bytes(shutil.disk_usage(folder).free - 300_000))
    yield
    if world.global_rank == 0:
        (folder / "rest").unlink()
    dist.barrier()


def test_a_full_disk(ranks, disk):
    assert "0.00 GB are free there" in failures(ranks, disk / "run", filled, disk)


def start_on(world, folder):
    return refusal(checkpoint.Checkpointer, str(folder), world.device, 3)


def test_a_run_cannot_start_on_a_read_only_disk(ranks, disk):
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    for text in ranks(2)(start_on, disk / "run"):
        assert "Read-only file system" in text


# 5 million parameters, so that a save takes long enough to be interrupted.
LARGE = ["--d_model=256", "--n_heads=4", "--n_layers=6", "--vocab_size=1024", "--max_seq_len=16"]
FLAGS = ["--global_batch_size=4", "--microbatch_size=2", "--warmup_steps=2", "--eval_tokens=64"]
FLAGS += ["--precision=fp32", "--run_dir=run"]


def stopped_while(condition, job) -> bool:
    """Stop a rank while a condition holds; let it go on if it no longer holds once stopped."""
    if condition():
        job.send(signal.SIGSTOP, 0)
        status = Path(f"/proc/{job.processes[0].pid}/status")
        wait_for(lambda: "State:\tT" in status.read_text())
        if condition():
            return True
        job.send(signal.SIGCONT, 0)
    return False


def test_kill_9_during_a_save_leaves_the_one_before(tmp_path, tiny_data):
    """Killed while step-N.tmp is there: the newest complete checkpoint is the one before."""
    flags = [*LARGE, *FLAGS, *flags_for(tiny_data)]
    flags += ["--max_steps=100000", "--save_interval=2", "--keep_last=1000"]
    folder = tmp_path / "run" / "checkpoints"
    with Job(tmp_path, 1, fsdp_train.main, flags) as job:
        wait_for(lambda: (folder / "step-2").exists())
        while not stopped_while(lambda: any(folder.glob("*.tmp")), job):
            assert job.runs(), job.log()
        job.send(signal.SIGKILL, 0)
        job.wait()
    newest = checkpoint.latest(tmp_path / "run")
    (half,) = [int(path.name[5:-4]) for path in folder.glob("*.tmp")]
    assert half == checkpoint.number(newest) + 2
    assert json.loads((newest / "meta.json").read_text())["step"] == checkpoint.number(newest)
    model = load.load_model(newest, torch.device("cpu"))
    assert all(torch.isfinite(weights).all() for weights in model.state_dict().values())


# --------------------------------------------------------------------------------------------------
# Finding checkpoints, and disk space


def test_find_takes_a_checkpoint_or_a_run(ranks, tmp_path):
    cfg = replace(RUN, run_dir=str(tmp_path / "run"))
    assert checkpoint.latest(tmp_path / "run") is None
    ranks(1)(save_several, cfg, [9, 10])
    assert checkpoint.latest(tmp_path / "run").name == "step-10"
    assert checkpoint.find(str(tmp_path / "run")).name == "step-10"
    older = tmp_path / "run" / "checkpoints" / "step-9"
    assert checkpoint.find(str(older)) == older
    assert checkpoint.read_meta(older) == {"step": 9, **META, "optimizer": ADAMW}
    for name, words in [("", ": give"), ("nowhere", ", which does not exist: give")]:
        path = str(tmp_path / name)
        with pytest.raises(UserError, match=f"no checkpoint in '{path}'{words} a run folder"):
            checkpoint.find(path)


def made_up(run, step, **meta):
    """A checkpoint without tensors, complete and sound."""
    path = Path(run) / "checkpoints" / f"step-{step}"
    path.mkdir(parents=True)
    (path / ".metadata").write_bytes(pickle.dumps(Metadata({}, storage_data={})))
    files.write_json(path / "meta.json", {"step": step, **META, **meta})
    checksums = {name: checksum(path / name) for name in (".metadata", "meta.json")}
    files.write_json(path / "checksums.json", checksums)
    return path


@pytest.mark.parametrize("n_saved, n_needed", [(0, 4), (2, 2), (9, 1)])
def test_missing_disk_space_is_warned_of(tmp_path, n_saved, n_needed):
    """There must be room for keep_last = 3, and for one more before the oldest is removed."""
    run = tmp_path / "run"
    for step in range(n_saved):
        made_up(run, step)
    line = beginning.space(str(run), 100_000_000, 3)
    assert line.startswith("1.20 GB a checkpoint, ") and line.endswith(f" GB free for {run}")
    assert beginning.space(str(run), 8_000, 3).startswith("0.096 MB a checkpoint, ")

    largest = shutil.disk_usage(tmp_path).free / n_needed / 12  # parameters that would fit
    fits = beginning.space(str(run), int(0.9 * largest), 3)
    too_large = beginning.space(str(run), int(1.1 * largest), 3)
    assert "WARNING" not in fits
    assert f"WARNING: not enough for {n_needed} more: " in too_large and "\n" not in too_large


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        dist.DistBackendError("NCCL error: Failed to CUDA calloc 512 bytes"),
        dist.DistNetworkError("the connection was closed"),
    ],
)
def test_a_checkpoint_is_not_blamed_for_a_lack_of_memory_or_a_lost_rank(error):
    in_a_wrapper = dcp.CheckpointException("read", {1: (error, None)})  # as DCP raises it
    for found in (error, in_a_wrapper):
        with pytest.raises(type(error)) as raised, checkpoint.damage_named(Path("step-5")):
            raise found
        assert raised.value is error
