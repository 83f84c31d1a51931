"""What people have from before is read, and runs go on: tests/old_runs, made at commit e0c057d.

There `recompute_every` is called `checkpoint_every`, and almost no setting has its default.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT
from launches import train_in

import checkpoint
import generate
import program
from bench import compare
from config import MPTConfig, TrainConfig, from_dict, load
from data import open_or_prepare
from evaluation import zero_shot
from lifecycle import compiling, microbatch, plot, resume, runlog
from processes import World
from text.prepare import prepare, read_summary
from weights import load as load_weights

OLD = ROOT / "tests" / "old_runs"
CPU = torch.device("cpu")
NEAR = {"loss": 1e-5, "val_loss": 1e-5, "val_bits_per_byte": 1e-5, "grad_norm": 1e-4}  # relative


@pytest.fixture
def old(tmp_path, monkeypatch):
    """A copy of the folder, complete again, in which the test runs."""
    folder = shutil.copytree(OLD, tmp_path / "old")
    shutil.unpack_archive(folder / "checkpoints.tar.gz", folder)
    monkeypatch.chdir(folder)
    program.say_once.cache_clear()
    return folder


@pytest.fixture
def one_process():
    """A program of one process forms a group of its own, which ends after the test."""
    yield
    dist.destroy_process_group()


def read_rows(path) -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def untimed(row: dict) -> dict:
    """A row without the seconds of its zero-shot tasks."""
    if "icl" not in row:
        return row
    return row | {"icl": {name: task | {"seconds": 0} for name, task in row["icl"].items()}}


def assert_same_rows(found: list[dict], expected: list[dict], exact=True) -> None:
    """Losses and norms up to what another CPU may change, all the rest exactly.

    exact=False: of the rest, the batches alone.
    """
    assert [row["step"] for row in found] == [row["step"] for row in expected]
    for row, wanted in zip(map(untimed, found), map(untimed, expected), strict=True):
        assert row.keys() >= wanted.keys()
        for name, value in wanted.items():
            if name in NEAR:
                assert row[name] == pytest.approx(value, rel=NEAR[name]), (row["step"], name)
            elif exact or name in ("step", "batch_hash"):
                assert row[name] == value, (row["step"], name)


# --------------------------------------------------------------------------------------------------
# Settings


def test_a_config_file_and_what_was_saved_mean_the_same_as_before(old, capsys):
    """No setting has got lost, so none has its default by mistake."""
    model_cfg, cfg = load(["settings.py"], MPTConfig, TrainConfig)
    assert cfg.recompute_every == 2
    meta = checkpoint.read_meta(Path("run/checkpoints/step-6"))
    for saved in (runlog.read_settings("run"), meta):
        assert saved["recompute_every"] == 2
        assert from_dict(MPTConfig, saved) == model_cfg
        chosen = {"microbatch_size": 8, "compile": False}  # both were left open: auto
        assert vars(from_dict(TrainConfig, saved)) == vars(cfg) | chosen
    assert capsys.readouterr().err == ""  # every name in them is known


def test_a_checkpoint_is_of_the_same_model_and_data(old):
    path = Path("run/checkpoints/step-6")
    meta = checkpoint.read_meta(path)
    model_cfg, cfg = load(["settings.py"], MPTConfig, TrainConfig)
    fingerprint = read_summary(Path("tokens"))["fingerprint"]
    resume.check_same(path, meta, model_cfg, cfg, fingerprint)
    assert not resume.has_trained_on(meta, cfg.skip_steps)


# --------------------------------------------------------------------------------------------------
# The record of the microbatch


@pytest.mark.parametrize("n_ranks, size", [(1, 8), (2, 4)])
def test_the_microbatch_that_was_found_then_is_still_on_record(old, n_ranks, size):
    world = World(0, n_ranks, 0, n_ranks, CPU)
    records = microbatch.read(Path("run/microbatch.json"))
    assert "checkpoint_every" not in records[0]["circumstances"]

    def found(*flags):
        model_cfg, cfg = load(["settings.py", *flags], MPTConfig, TrainConfig)
        cfg = replace(cfg, compile=compiling.choose(model_cfg, cfg, world, "fp32"))
        here = microbatch.circumstances_of(model_cfg, cfg, world, "fp32")
        return [record["microbatch_size"] for record in records if record["circumstances"] == here]

    assert found() == [size]
    assert found("--activation_checkpointing=none") == found("--global_batch_size=16") == []
    assert found("--recompute_every=3") == []


# --------------------------------------------------------------------------------------------------
# Data, weights, figures


def content_of(folder: Path) -> dict:
    return {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.iterdir()}


def test_the_data_folder_is_taken_as_it_is(old, capfd):
    before = content_of(old / "tokens")
    cfg = load(["settings.py"], MPTConfig, TrainConfig)[1]
    assert open_or_prepare(cfg) == prepare(cfg) == Path("tokens")
    assert content_of(old / "tokens") == before
    assert "training a tokenizer" not in capfd.readouterr().err


def test_the_logits_are_those_of_before(old):
    model, _, _ = load_weights.load_for_sampling("run", None, CPU)
    with torch.no_grad():
        logits = model(torch.arange(3, 27)[None])[0, -1]
    expected = torch.tensor(json.loads((old / "logits.json").read_text()))
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_generate_writes_the_text_of_before(old, capsys):
    kept = json.loads((old / "greedy.json").read_text())
    flags = [f"--prompt={kept['prompt']}", "--temperature=0", "--precision=fp32"]
    generate.main(["run", *flags, f"--max_new_tokens={kept['tokens']}", "--json"])
    assert json.loads(capsys.readouterr().out) == kept


def test_the_metrics_of_before_are_summed_up_and_drawn(old, capsys):
    runlog.main(["run"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("run: 12 steps, 1,920 tokens, ")
    assert "6.476 -> 4.472" in lines[1] and "6.529 -> 4.509" in lines[1]
    assert lines[2] == "to expect: a run of before"
    run = plot.read("run")
    assert run.steps["step"].tolist() == [1, 2, 5, 6, 7, 8, 9, 10, 11, 12]
    assert run.vals["step"].tolist() == [0, 6, 9, 12]
    assert "1,920 tokens" in plot.in_terminal([run])


def test_the_rows_of_bench_train_are_shown(old, capsys):
    (row,) = compare.read("bench.csv")
    assert row["recompute_every"] == "2"
    compare.main(["bench.csv"])
    assert "| settings |" in capsys.readouterr().out


# --------------------------------------------------------------------------------------------------
# As a user does it


@pytest.mark.slow
@pytest.mark.parametrize(
    "n_ranks, layout, size",
    [
        (1, [], 8),
        (2, [], 4),
        (2, ["--pp=2", "--microbatch_size=4"], None),
    ],
)
def test_a_run_goes_on_as_it_would_have_before(ranks, old, n_ranks, layout, size):
    """Also cut in a way that was unknown then: with the figures of one process."""
    (status, message, said), *_ = ranks(n_ranks)(train_in, old, ["settings.py", *layout])
    assert status == 0, message
    assert "resuming from run/checkpoints/step-6" in said
    assert "training a tokenizer" not in said
    found = [row for row in read_rows("run/metrics.jsonl") if row["step"] > 6]
    if layout:
        assert_same_rows(found, read_rows("expected-1.jsonl"), exact=False)
    else:
        assert f"microbatch {size}, not auto" in said
        assert_same_rows(found, read_rows(f"expected-{n_ranks}.jsonl"))
    earlier = [row for row in read_rows(OLD / "run" / "metrics.jsonl") if row["step"] <= 6]
    assert [row for row in read_rows("run/metrics.jsonl") if row["step"] <= 6] == earlier
    saved = json.loads(Path("run/config.json").read_text())
    assert saved["recompute_every"] == 2 and "checkpoint_every" not in saved
    assert checkpoint.read_meta(Path("run/checkpoints/step-12"))["recompute_every"] == 2


def test_a_run_is_checked(old, one_process, capsys):
    resume.demonstrate(["run"])
    assert capsys.readouterr().out == "run/checkpoints/step-6: sound\n"


def test_the_evaluation_of_before(old, one_process):
    """The same figures anew; and where they are there already, nothing is asked again."""
    kept = json.loads(Path("evaluation.json").read_text())["tasks"]["questions"]

    def figures(out):
        zero_shot.main(["run", "--tasks=questions.jsonl", "--precision=fp32", f"--out={out}"])
        return json.loads(Path(out).read_text())["tasks"]["questions"]

    assert figures("new.json") | {"seconds": 0} == kept | {"seconds": 0}
    assert figures("evaluation.json") == kept
