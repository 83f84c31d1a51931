"""Runs with adapters, as users launch them: they resume anywhere and name their base."""

import json
import shutil

import pytest
import torch
from conftest import flags_for
from launches import train_in
from layouts import team_of

import checkpoint
import lora
import tensor_parallel
from lifecycle import runlog
from storage.checkpoint_files import checksum
from weights import hf, load

pytestmark = pytest.mark.slow
CPU = torch.device("cpu")
CONFIG = """
d_model = 32
n_heads = 4
n_layers = 3
vocab_size = 257
max_seq_len = 32
alibi = True
global_batch_size = 8
microbatch_size = 4
warmup_steps = 1
max_steps = 6
eval_interval = 3
save_interval = 3
lr = 1e-2
precision = "fp32"
"""
LORA = ["--init_from=base", "--lora_rank=4"]


@pytest.fixture(scope="module")
def runs(ranks, tiny_data, tmp_path_factory):
    """A folder with a base of 6 steps, and `tuned`, adapters of 6 steps on it."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "c.py").write_text(CONFIG)
    (folder / "flags").write_text(" ".join(["c.py", *flags_for(tiny_data)]))
    train(ranks(1), folder, "--run_dir=base")
    train(ranks(1), folder, *LORA, "--run_dir=tuned")
    return folder


@pytest.fixture
def copy(runs, tmp_path):
    """The same, to be changed by one test."""
    return shutil.copytree(runs, tmp_path / "runs")


def start(pool, folder, *flags):
    """(status, message, what it printed) of the trainer in this folder."""
    return pool(train_in, folder, [*(folder / "flags").read_text().split(), *flags])[0]


def train(pool, folder, *flags) -> str:
    status, message, said = start(pool, folder, *flags)
    assert status == 0, message
    return said


def refused(pool, folder, *flags) -> str:
    status, message, _ = start(pool, folder, *flags)
    assert status == 2 and "\n" not in message, message
    return message


def val_losses(run) -> list[float]:
    return [row["val_loss"] for row in runlog.read(run) if "val_loss" in row]


def test_a_run_starts_at_the_loss_of_its_base_and_improves(runs):
    base, tuned = val_losses(runs / "base"), val_losses(runs / "tuned")
    assert tuned[0] == base[-1] and tuned[-1] < tuned[0] - 0.05


def test_its_checkpoint_holds_adapters_alone_and_names_the_base(runs):
    path = checkpoint.latest(runs / "tuned")
    saved = checkpoint.read_metadata(path).state_dict_metadata
    weights = {name for name in saved if name.startswith("model.")}
    assert len(weights) == 3 * 4 * 2 and all(map(lora.is_adapter, weights))
    moments = {name.rpartition(".")[0] for name in saved if name.endswith(".exp_avg")}
    assert moments == {name.replace("model.", "optim.state.") for name in weights}
    meta = checkpoint.read_meta(path)
    assert meta["base"] == str(runs / "base/checkpoints/step-6")
    assert meta["base_fingerprint"] == load.fingerprint_of(runs / "base/checkpoints/step-6")


def test_it_resumes_on_another_grid_of_ranks(ranks, copy):
    shutil.rmtree(copy / "tuned/checkpoints/step-6")
    expected = val_losses(copy / "tuned")[-1]
    said = train(ranks(2), copy, *LORA, "--run_dir=tuned", "--tp=2")
    assert "resuming from tuned/checkpoints/step-3" in said
    assert val_losses(copy / "tuned")[-1] == pytest.approx(expected, rel=1e-4)


def test_it_finds_its_base_after_that_was_trained_on(ranks, copy):
    expected = val_losses(copy / "tuned")[-1]
    train(ranks(1), copy, "--run_dir=base", "--max_steps=8")
    shutil.rmtree(copy / "tuned/checkpoints/step-6")
    meta = copy / "tuned/checkpoints/step-3/meta.json"
    moved = json.loads(meta.read_text()) | {"base": str(copy / "base/checkpoints/step-6")}
    rewrite(meta, moved)
    said = train(ranks(1), copy, *LORA, "--run_dir=tuned")
    assert "resuming from tuned/checkpoints/step-3" in said
    assert val_losses(copy / "tuned")[-1] == expected


def rewrite(meta, values) -> None:
    """Change a checkpoint's meta.json as its checksums allow."""
    meta.write_text(json.dumps(values))
    sums = json.loads((meta.parent / "checksums.json").read_text())
    sums["meta.json"] = checksum(meta)
    (meta.parent / "checksums.json").write_text(json.dumps(sums))


def test_another_base_is_refused(ranks, copy):
    train(ranks(1), copy, "--run_dir=other", "--seed=7")
    shutil.rmtree(copy / "tuned/checkpoints/step-6")
    words = refused(ranks(1), copy, "--init_from=other", "--lora_rank=4", "--run_dir=tuned")
    assert "other does not hold the weights that the adapters were trained on" in words


def test_loading_it_merges_base_and_adapters(runs):
    path = checkpoint.latest(runs / "tuned")
    merged, apart = load.load_model(path, CPU), load.load_adapted(path, CPU)
    ids = torch.arange(64).view(2, 32)
    torch.testing.assert_close(merged(ids), apart(ids), rtol=1e-4, atol=1e-4)
    base = load.load_model(runs / "base/checkpoints/step-6", CPU)
    before, _, name = load.load_for_sampling(str(runs / "tuned"), 0, CPU)
    assert torch.equal(before(ids), base(ids)) and name == "before finetuning"
    assert (merged(ids) - base(ids)).abs().max() > 0.01


def loss_of(model) -> float:
    """Of a few ids, in nats."""
    ids = torch.arange(33)[None] % 7
    with torch.no_grad():
        return (model(ids[:, :-1], labels=ids[:, 1:]) / 32).item()


def loss_when_cut(world, path, step):
    """Of the part of a model that a tensor rank has: the loss is that of all."""
    team = tensor_parallel.team_of(team_of(2))
    return [
        loss_of(load.load_model(path, CPU, team)),
        loss_of(load.load_from_run(path, step, CPU, team)[0]),
    ]


def test_two_tensor_ranks_load_what_one_does(runs, ranks):
    """Base and adapters merged, and before finetuning the base alone."""
    path = checkpoint.latest(runs / "tuned")
    base = load.load_model(runs / "base/checkpoints/step-6", CPU)
    wanted = [loss_of(load.load_model(path, CPU)), loss_of(base)]
    assert abs(wanted[0] - wanted[1]) > 0.01
    for losses in ranks(2)(loss_when_cut, path, 0):
        assert losses == pytest.approx(wanted, rel=1e-6)


def test_a_hugging_face_folder_is_a_base(ranks, copy):
    """Its files are hashed: one changed number, and the adapters do not fit any more."""
    hf.export(copy / "base", copy / "exported")
    flags = ["--init_from=exported", "--lora_rank=2", "--run_dir=on_hf"]
    train(ranks(1), copy, *flags)
    assert val_losses(copy / "on_hf")[0] == val_losses(copy / "base")[-1]
    file = copy / "exported/model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert "does not hold the weights" in refused(ranks(1), copy, *flags, "--max_steps=8")
