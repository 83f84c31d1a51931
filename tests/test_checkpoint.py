"""checkpoint.py: complete or absent, written while training goes on, loaded on any number of ranks in any mode."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import flags_for
from test_parallel import EVERYWHERE, MODEL, RUN, assert_same_curve, build, equal, full_weights, global_rows, rows_of

import checkpoint
import config
import fsdp_train
from config import MPTConfig, TrainConfig, UserError

META = {**asdict(MODEL), **asdict(RUN), "precision": "fp32", "data_fingerprint": "f00"}


def train(world, cfg, first=0, last=10, found=None, save_at=None):
    """Steps first..last-1, from the checkpoint `found`; one is saved after step `save_at` while training goes on.

    Returns the curve, the full weights at the time of saving, and in the end.
    """
    model, optimizer = build(world, cfg)
    if found:
        checkpoint.load(found, model, optimizer)
    saver = checkpoint.Checkpointer(cfg.run_dir, cfg.keep_last)
    curve, saved = [], None
    for step in range(first, last):
        rows = rows_of(world, global_rows(step))
        loss, norm, _ = fsdp_train.train_step(model, optimizer, rows, step, cfg, world, "fp32")
        curve.append((loss.item(), norm.item()))
        if step + 1 == save_at:
            saver.save(save_at, model, optimizer, META)
            saved = full_weights(model)
    saver.finish()
    dist.barrier()
    return curve, saved, full_weights(model)


def saved_at_five(ranks, folder, size, mode):
    """A run of ten steps that saved after five: its settings, its curve, and the weights after five and ten."""
    cfg = replace(RUN, run_dir=str(folder / f"{size}-{mode}"), sharding=mode, shard_size=min(size, 2))
    return cfg, *ranks(size)(train, cfg, 0, 10, None, 5)[0]


def go_on(ranks, cfg, folder, size, mode):
    """Steps 5..9 of the run `cfg` on other ranks in another mode; what `train` returns on rank 0."""
    there = replace(cfg, run_dir=str(folder / "second"), sharding=mode, shard_size=min(size, 2), microbatch_size=5)
    return ranks(size)(train, there, 5, 10, checkpoint.latest(cfg.run_dir))[0]


# ---------------------------------------------------------------------------------------------------------------
# Elastic


@pytest.mark.parametrize(
    "source, targets",
    [
        ((4, "FULL_SHARD"), [(2, "ZERO1"), (1, "DDP")]),
        ((1, "FULL_SHARD"), [(4, "HYBRID_SHARD")]),
        ((2, "DDP"), [(4, "SHARD_GRAD_OP")]),
        ((4, "HYBRID_SHARD"), [(2, "FULL_SHARD")]),
    ],
)
def test_a_run_goes_on_anywhere(ranks, tmp_path, source, targets):
    """Ten steps are five, a checkpoint, and five more on other ranks, in another mode, with other microbatches."""
    cfg, straight, _, _ = saved_at_five(ranks, tmp_path, *source)
    for target in targets:
        assert_same_curve(go_on(ranks, cfg, tmp_path, *target)[0], straight[5:])


@pytest.mark.slow
@pytest.mark.parametrize("size, mode", EVERYWHERE)
def test_a_run_goes_on_anywhere_from_everywhere(ranks, tmp_path, size, mode):
    """Each of the 15 on 5 others; together every one is a target five times."""
    cfg, straight, _, _ = saved_at_five(ranks, tmp_path, size, mode)
    for target in EVERYWHERE[EVERYWHERE.index((size, mode)) % 3 :: 3]:
        assert_same_curve(go_on(ranks, cfg, tmp_path, *target)[0], straight[5:])


@pytest.mark.parametrize("size, mode", [(1, "FULL_SHARD"), (2, "ZERO1"), (4, "FULL_SHARD"), (4, "HYBRID_SHARD")])
def test_on_as_many_ranks_it_goes_on_bit_by_bit(ranks, tmp_path, size, mode):
    cfg, straight, _, weights = saved_at_five(ranks, tmp_path, size, mode)
    again, _, end = ranks(size)(train, cfg, 5, 10, checkpoint.latest(cfg.run_dir))[0]
    assert again == straight[5:] and equal(end, weights)


@pytest.mark.parametrize("size, mode", [(1, "DDP"), (2, "SHARD_GRAD_OP"), (4, "FULL_SHARD"), (4, "DDP")])
def test_what_is_saved_is_the_moment_of_saving(ranks, tmp_path, size, mode):
    """Five more steps were taken while it was written. `load_model` reads it without any process group."""
    cfg, _, at_five, at_ten = saved_at_five(ranks, tmp_path, size, mode)
    model = checkpoint.load_model(checkpoint.latest(cfg.run_dir), torch.device("cpu"))
    found = full_weights(model)
    assert equal(found, at_five) and not equal(found, at_ten)
    assert not model.training and model.cfg == replace(MODEL, attn_impl="auto")  # chosen where it is loaded
    assert not dist.is_initialized()


def load_with(world, cfg, found):
    """The optimizer's settings and its first moments after loading."""
    model, optimizer = build(world, cfg)
    before = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    checkpoint.load(found, model, optimizer)
    after = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    steps = [state["step"].item() for state in optimizer.state.values()]
    moments = [state["exp_avg"].full_tensor().abs().sum().item() for state in optimizer.state.values()]
    return before, after, steps, moments


def test_settings_given_now_win_over_saved_ones(ranks, tmp_path):
    cfg, *_ = saved_at_five(ranks, tmp_path, 2, "FULL_SHARD")
    now = replace(cfg, lr=7e-4, beta1=0.8, beta2=0.99, adam_eps=1e-7, decoupled_weight_decay=0.0)
    before, after, steps, moments = ranks(2)(load_with, now, checkpoint.latest(cfg.run_dir))[0]
    assert after == before and after[0]["lr"] == 7e-4 and after[0]["betas"] == (0.8, 0.99)
    assert set(steps) == {5} and min(moments) > 0  # Adam's own state is the saved one


# ---------------------------------------------------------------------------------------------------------------
# Complete or absent


def names(folder) -> list[str]:
    return sorted(path.name for path in (Path(folder) / "checkpoints").iterdir())


def save_several(world, cfg, steps, poll):
    """One save after another; what is in the folder after each, as rank 0 sees it."""
    model, optimizer = build(world, cfg)
    saver, seen = checkpoint.Checkpointer(cfg.run_dir, cfg.keep_last), []
    for step in steps:
        saver.save(step, model, optimizer, META)
        deadline = time.monotonic() + 60
        while poll and saver.pending and time.monotonic() < deadline:
            saver.poll()
            time.sleep(0.01)
        saver.finish()
        dist.barrier()
        seen.append(names(cfg.run_dir))
        dist.barrier()
    return seen


@pytest.mark.parametrize("size, poll", [(1, False), (4, True)])
def test_old_ones_are_removed(ranks, tmp_path, size, poll):
    cfg = replace(RUN, run_dir=str(tmp_path), keep_last=2)
    seen = ranks(size)(save_several, cfg, [8, 9, 10, 200], poll)[0]
    assert seen == [["step-8"], ["step-8", "step-9"], ["step-10", "step-9"], ["step-10", "step-200"]]
    assert checkpoint.latest(tmp_path).name == "step-200"


def test_a_step_is_not_saved_over_another(ranks, tmp_path):
    """Saving to a path twice is refused, and what was there stays as it was."""
    cfg, _, at_five, _ = saved_at_five(ranks, tmp_path, 1, "FULL_SHARD")
    with pytest.raises(
        AssertionError, match="UserError: could not save step 5: .*The last good checkpoint is .*step-5"
    ):
        ranks(1)(train, replace(cfg, seed=2), 4, 5, None, 5)
    assert names(cfg.run_dir) == ["step-5"]
    assert equal(full_weights(checkpoint.load_model(checkpoint.latest(cfg.run_dir), torch.device("cpu"))), at_five)


def test_half_a_checkpoint_does_not_count_and_is_swept(ranks, tmp_path):
    cfg, *_ = saved_at_five(ranks, tmp_path, 2, "FULL_SHARD")
    folder = Path(cfg.run_dir) / "checkpoints"
    for name in ("step-9.tmp", "step-10.tmp", "step-11"):  # the last as if another program had copied half of it
        (folder / name).mkdir()
        (folder / name / "meta.json").write_text("{}")
    (folder / "step-10.tmp" / ".metadata").write_text("written, not yet renamed")
    assert checkpoint.latest(cfg.run_dir).name == "step-5"
    assert checkpoint.find(cfg.run_dir).name == "step-5"
    for name in ("step-10.tmp", "step-11"):
        with pytest.raises(UserError, match="no checkpoint in"):
            checkpoint.find(str(folder / name))
    ranks(2)(train, cfg, 0, 1)
    assert names(cfg.run_dir) == ["step-11", "step-5"]


# A model of 5 million parameters, so that a save takes long enough to be caught in the act.
LARGE = ["--d_model=256", "--n_heads=4", "--n_layers=6", "--vocab_size=1024", "--max_seq_len=16"]
SMALL = ["--d_model=32", "--n_heads=4", "--n_layers=2", "--vocab_size=257", "--max_seq_len=16"]
FLAGS = ["--global_batch_size=4", "--microbatch_size=2", "--warmup_steps=2", "--eval_tokens=64"]
FLAGS += ["--precision=fp32", "--run_dir=run"]


def test_kill_9_during_a_save_leaves_the_one_before(tmp_path, tiny_data):
    """Killed while step-N.tmp is there: the newest complete checkpoint is an older one, and can be read."""
    flags = [*LARGE, *FLAGS, *flags_for(tiny_data), "--max_steps=100000", "--save_interval=2", "--keep_last=1000"]
    command = [sys.executable, fsdp_train.__file__, *flags]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.DEVNULL)
    try:
        folder, deadline = tmp_path / "run" / "checkpoints", time.monotonic() + 120
        while not ((folder / "step-2").exists() and any(folder.glob("*.tmp"))):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.001)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    half = [path.name for path in folder.glob("*.tmp")]
    assert len(half) == 1
    newest = checkpoint.latest(tmp_path / "run")
    assert int(newest.name[5:]) == int(half[0][5:-4]) - 2
    assert json.loads((newest / "meta.json").read_text())["step"] == int(newest.name[5:])
    model = checkpoint.load_model(newest, torch.device("cpu"))
    assert all(torch.isfinite(weights).all() for weights in model.state_dict().values())


def out_of_space(launch, tiny_data, tmp_path):
    """Two steps and a checkpoint; then again to step 8, but no file may grow beyond 30 kB, as on a full disk."""
    flags = [*SMALL, *FLAGS, *flags_for(tiny_data), "--save_interval=2"]
    first = launch(*flags, "--max_steps=3")
    assert first.returncode == 0, first.stderr
    assert names(tmp_path / "run") == ["step-2", "step-3"]
    second = launch(*flags, "--max_steps=9", largest_file=30_000)
    lines = [line for line in second.stderr.splitlines() if line.startswith("error")]
    assert len(lines) == 1 and 'fsdp_train.py", line' not in second.stderr, second.stderr
    assert lines[0].startswith("error: could not save step 4: ") and "File too large" in lines[0]
    assert lines[0].endswith("The last good checkpoint is run/checkpoints/step-3")
    assert names(tmp_path / "run") == ["step-2", "step-3"]
    checkpoint.load_model(tmp_path / "run" / "checkpoints" / "step-3", torch.device("cpu"))
    return second


def test_a_full_disk_ends_the_run_in_one_line(python, tiny_data, tmp_path):
    assert out_of_space(python, tiny_data, tmp_path).returncode == 2


@pytest.mark.slow
def test_a_full_disk_ends_the_run_of_four_ranks_in_one_line(torchrun, tiny_data, tmp_path):
    out_of_space(lambda *args, **more: torchrun(4, *args, **more), tiny_data, tmp_path)


# ---------------------------------------------------------------------------------------------------------------
# Which checkpoint, and whether it fits


def test_find_takes_a_checkpoint_or_a_run(ranks, tmp_path):
    cfg = replace(RUN, run_dir=str(tmp_path / "run"))
    assert checkpoint.latest(tmp_path / "run") is None
    ranks(1)(save_several, cfg, [9, 10], False)
    assert checkpoint.find(str(tmp_path / "run")).name == "step-10" == checkpoint.latest(tmp_path / "run").name
    older = tmp_path / "run" / "checkpoints" / "step-9"
    assert checkpoint.find(str(older)) == older and checkpoint.read_meta(older) == {"step": 9, **META}
    for nothing in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(UserError, match="no checkpoint in"):
            checkpoint.find(str(nothing))


OTHER = {
    "d_model": 84,
    "n_heads": 3,
    "n_layers": 5,
    "expansion_ratio": 2.0,
    "max_seq_len": 16,
    "vocab_size": 98,
    "learned_pos_emb": False,
    "alibi": True,
    "alibi_bias_max": 4.0,
    "kv_n_heads": 2,
    "no_bias": True,
    "clip_qkv": 6.0,
    "qk_ln": True,
    "softmax_scale": 0.5,
    "logit_scale": 2.0,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize("key", OTHER)
def test_another_model_is_refused_by_name(key):
    with pytest.raises(UserError, match=rf"another model: {key} {META[key]} \(here {OTHER[key]}\)\. "):
        checkpoint.check_same(Path("x"), META, replace(MODEL, **{key: OTHER[key]}), RUN, "f00")


@pytest.mark.parametrize(
    "change, fingerprint, names",
    [
        ({"seed": 3}, "f00", "seed 1337 (here 3)"),
        ({"global_batch_size": 24}, "f00", "global_batch_size 12 (here 24)"),
        ({}, "ba2", "data f00 (here ba2)"),
        ({"seed": 3}, "ba2", "seed 1337 (here 3), data f00 (here ba2)"),
    ],
)
def test_another_order_of_the_data_is_refused_by_name(change, fingerprint, names):
    with pytest.raises(UserError) as caught:
        checkpoint.check_same(Path("x"), META, MODEL, replace(RUN, **change), fingerprint)
    assert names in str(caught.value) and "\n" not in str(caught.value)


def test_what_may_change_may_change():
    model = replace(MODEL, attn_impl="sdpa", attn_pdrop=0.1, emb_pdrop=0.1, resid_pdrop=0.1, norm_type="layernorm")
    run = TrainConfig(global_batch_size=12, microbatch_size=1, lr=1.0, max_steps=77, sharding="DDP", run_dir="y")
    checkpoint.check_same(Path("x"), META, model, run, "f00")


def test_every_setting_of_the_model_is_held_to_or_known_to_be_free():
    free = {"attn_impl", "norm_type", "emb_pdrop", "attn_pdrop", "resid_pdrop"}
    assert set(OTHER) | free == set(MPTConfig.__dataclass_fields__)
    assert config.from_dict(MPTConfig, META) == MODEL
