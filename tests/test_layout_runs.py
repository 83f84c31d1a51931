"""fsdp_train.py --tp --pp and the programs around it: runs that move between layouts of ranks."""

import contextlib
import io
import json
import os
from dataclasses import asdict
from unittest import mock

import numpy as np
import pytest
import torch
from conftest import flags_for
from launches import load, same, steps_of, train_here

import flops
import generate
from config import MPTConfig, TrainConfig
from evaluation import zero_shot
from lifecycle import microbatch, plot, runlog
from program import UserError
from text.prepare import prepare
from weights import hf

# Two stages have two layers and one. A vocabulary of 257 does not divide by two. The documents of
# a row do not see each other.
MODEL = MPTConfig(
    d_model=32,
    n_heads=4,
    n_layers=3,
    vocab_size=257,
    max_seq_len=32,
    attn_uses_sequence_id=True,
)
SIZE = [f"--{name}={value}" for name, value in asdict(MODEL).items() if value is not None]
RUN = """
    --global_batch_size=8 --microbatch_size=2 --warmup_steps=2 --schedule=constant --lr=2e-3
    --eval_tokens=2000 --eval_interval=3 --save_interval=3 --keep_last=9 --device=cpu
    --precision=fp32 --peak_tflops=0.001 --icl_interval=3
""".split()
QUESTIONS = [
    {"query": "the river", "choices": ["sees the house", "under", "%%%%"], "gold": 0},
    {"query": "the old tree", "choices": ["slowly", "sees the house", "%%%%"], "gold": 1},
    {"query": "the old tree", "choices": ["slowly", "sees the house", "a a"], "gold": 2},
]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """Two zero-shot tasks: questions, of which two have the same prefix, and a text."""
    folder = tmp_path_factory.mktemp("tasks")
    lines = [json.dumps(row) + "\n" for row in QUESTIONS]
    (folder / "questions.jsonl").write_text("".join(lines))
    (folder / "notes.txt").write_text("the old tree sings slowly under the blue house " * 3)
    return f"{folder}/questions.jsonl,{folder}/notes.txt"


@pytest.fixture(scope="module")
def flags(tmp_path_factory, tasks):
    """On documents of about 20 bytes, so that a row of 32 has parts of several."""
    folder = tmp_path_factory.mktemp("short")
    words = "the a river tree house blue old sings walks sees under slowly".split()
    draw = np.random.default_rng(0)
    documents = [" ".join(draw.choice(words, 4)) for _ in range(1000)]
    (folder / "text.txt").write_text("<|endoftext|>".join(documents))
    source = {"dataset": f"{folder}/*.txt", "tokenizer": "bytes", "val_fraction": 0.1}
    prepared = prepare(TrainConfig(**source, data_dir=str(folder / "tokens")))
    return [*SIZE, *RUN, *flags_for(prepared), f"--icl_tasks={tasks}"]


@pytest.fixture(scope="module")
def one(ranks, tmp_path_factory, flags):
    """The rows of 12 steps of one process."""
    folder = tmp_path_factory.mktemp("one")
    assert ranks(1)(train_here, [*flags, f"--run_dir={folder}", "--max_steps=12"])[0][0] == 0
    return runlog.read(folder)


PARTS = [  # ranks, last step, layout
    (2, 3, ["--pp=2", "--microbatch_size=auto"]),
    (4, 6, ["--tp=2", "--sequence_parallel", "--activation_checkpointing=full"]),
    (4, 9, ["--tp=2", "--pp=2"]),
    (1, 12, []),
]


@pytest.fixture(scope="module")
def moved(ranks, tmp_path_factory, flags):
    """A run that moves from layout to layout: (its folder, what each part printed)."""
    folder, said = tmp_path_factory.mktemp("moved"), []
    for size, last, layout in PARTS:
        argv = [*flags, *layout, f"--run_dir={folder}/run", f"--max_steps={last}"]
        answers = ranks(size)(train_here, argv)
        assert [status for status, *_ in answers] == [0] * size, answers
        said.append(answers[0][2])
    return folder / "run", said


def assert_same_curve(found, wanted):
    """The same tokens, losses, norms and figures of tasks, but for rounding errors."""
    assert [row["step"] for row in found] == [row["step"] for row in wanted]
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.keys() == theirs.keys()
        for name in ("batch_hash", "tokens", "lr", "skipped"):
            assert ours.get(name) == theirs.get(name)
        for name in ("loss", "val_loss", "val_bits_per_byte"):
            assert ours.get(name, 0) == pytest.approx(theirs.get(name, 0), abs=5e-6)
        assert ours.get("grad_norm", 0) == pytest.approx(theirs.get("grad_norm", 0), rel=1e-5)
        if "icl" in ours:
            assert_same_figures(ours["icl"], theirs["icl"])


def assert_same_figures(ours, theirs):
    """Of the tasks by name."""
    for task, figures in theirs.items():
        assert ours[task].keys() == figures.keys()
        for name, value in figures.items():
            wanted = pytest.approx(value, rel=1e-5) if isinstance(value, float) else value
            assert ours[task][name] == wanted or name == "seconds", (task, name)


def figures_at(rows, step, name):
    (found,) = [row[name] for row in rows if name in row and row["step"] == step]
    return found


# --- A run


@pytest.mark.slow
def test_a_run_moves_between_layouts_and_stays_on_the_curve_of_one_process(one, moved):
    """Losses, norms, evaluations and tasks, whose answers share their questions in a cache."""
    run, said = moved
    assert_same_curve(runlog.read(run), one)
    assert sum("icl" in row for row in one) == 5
    launches = runlog.read_launches(run)
    layouts = [(row["ranks"], row["tp"], row["pp"]) for row in launches]
    assert layouts == [(2, 1, 2), (4, 2, 1), (4, 2, 2), (1, 1, 1)]
    labels = plot.restart_labels(str(run))
    assert [*labels.values()][0] == "2 ranks, pp 2"
    assert [*labels.values()][-2:] == ["4 ranks, tp 2, pp 2", "4 -> 1 rank"]
    assert f"run: resuming from {run}/checkpoints/step-9" in said[3]


@pytest.mark.slow
def test_the_log_counts_devices_ranks_stages_and_the_bubble(moved, capsys):
    """MFU: (6 N + 12 L d S) x tokens/s, over both devices, which share these FLOPs."""
    run, said = moved
    n_params = flops.n_params(MODEL)
    assert f"MPT of {n_params:,} parameters" in said[0]
    assert "= 1 data-parallel ranks x 8 in 8 microbatches, 11% bubble\n" in said[0]
    assert "batch 8 sequences x 32 = 2 data-parallel ranks x 4 in 2 microbatches" in said[1]
    for step, row in steps_of(run).items():
        if step <= 3:
            use = (6 * n_params + 12 * 3 * 32 * 32) * row["tokens_per_second"] / (2 * 1e9)
            assert row["mfu"] == pytest.approx(use)
    microbatch.main([str(run)])
    assert "no microbatch is recorded" in capsys.readouterr().out


# --- Weights, and other programs


@pytest.mark.slow
def test_what_a_layout_saved_is_exported_whole_and_begins_new_runs(
    ranks, moved, flags, one, tmp_path
):
    """Two stages begin with the weights of tp 2 x pp 2, and with those of a foreign folder."""
    saved = moved[0] / "checkpoints/step-9"
    hf.main(["export", str(saved), str(tmp_path / "hf")])
    exported = hf.load_model(tmp_path / "hf", torch.device("cpu")).state_dict()
    assert same(exported, load(saved))

    wanted = figures_at(one, 9, "val_loss")
    for number, source in enumerate([tmp_path / "hf", saved]):
        run = tmp_path / f"run{number}"
        more = [f"--run_dir={run}", "--max_steps=3", f"--init_from={source}", "--pp=2"]
        statuses = ranks(2)(train_here, [*flags, *more, "--icl_interval=0"])
        assert [status for status, *_ in statuses] == [0, 0], statuses
        found = figures_at(runlog.read(run), 0, "val_loss")
        assert found == pytest.approx(wanted, abs=1e-5)


def evaluate(world, argv):
    """`python -m evaluation` in a rank."""
    env = {"RANK": str(world.global_rank), "WORLD_SIZE": str(world.global_size)}
    with (
        mock.patch.dict(os.environ, env),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        zero_shot.main(argv)


@pytest.mark.slow
def test_evaluation_on_tensor_ranks_gives_the_figures_of_one_device(
    ranks, moved, one, tasks, tmp_path
):
    found = {}
    for size in (1, 2):
        out = tmp_path / f"scores-{size}.json"
        ask = [str(moved[0]), "--step=9", f"--tasks={tasks}", f"--out={out}", f"--tp={size}"]
        ranks(size)(evaluate, ask)
        found[size] = json.loads(out.read_text())
        assert_same_figures(found[size]["tasks"], figures_at(one, 9, "icl"))
    assert found[1]["settings"]["weights"] == found[2]["settings"]["weights"]


# --- Bad input


@pytest.mark.parametrize("program", [generate, zero_shot])
def test_programs_without_stages_say_so(program):
    with pytest.raises(UserError, match="does not cut a model that way"):
        program.main(["runs/demo", "--pp=2"])
