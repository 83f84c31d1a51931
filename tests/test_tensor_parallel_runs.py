"""fsdp_train.py --tp and the programs around it, as a user runs them: real launches on the CPU."""

import contextlib
import functools
import io
import json
import os
import re
import shutil
import signal
import time
from dataclasses import asdict
from unittest import mock

import pytest
import torch
from conftest import PATIENCE, TORCHRUN, flags_for, launch
from test_old_runs import NEAR, OLD, old, read_rows  # noqa: F401 (a fixture)
from test_slurm import SRUN, job  # noqa: F401 (a fixture)
from test_stopping import (  # noqa: F401 (a fixture)
    FOREVER,
    load,
    poisoned,
    same,
    started,
    steps_of,
    train_here,
    wait_for,
)

import checkpoint
import flops
import generate
import model
import tensor_parallel
from config import MPTConfig, UserError
from evaluation import results, zero_shot
from lessons.elastic import steps_done
from lifecycle import microbatch, plot, runlog
from program import RESUME_ME
from weights import hf
from weights.load import load_model

# A vocabulary of 257 does not divide by two.
MODEL = MPTConfig(
    d_model=32, n_heads=4, n_layers=2, vocab_size=257, max_seq_len=32, alibi=True, no_bias=True
)
SIZE = [f"--{name}={value}" for name, value in asdict(MODEL).items() if value is not None]
RUN = """
    --global_batch_size=8 --microbatch_size=2 --warmup_steps=2 --schedule=constant --lr=2e-3
    --eval_tokens=2000 --eval_interval=3 --save_interval=3 --keep_last=9 --device=cpu
    --precision=fp32 --peak_tflops=0.001
""".split()
ROWS = [
    {"query": "the river", "choices": ["sees the house", "under", "%%%%"], "gold": 0},
    {"query": "the old tree", "choices": ["slowly", "sees the house", "%%%%"], "gold": 1},
    {"query": "the old tree", "choices": ["slowly", "sees the house", "a a"], "gold": 2},
]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """Two zero-shot tasks: questions, of which two have the same prefix, and a text."""
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (folder / "notes.txt").write_text("the old tree sings slowly under the blue house " * 3)
    return f"{folder}/questions.jsonl,{folder}/notes.txt"


@pytest.fixture(scope="module")
def flags(tiny_data, tasks):
    return [*SIZE, *RUN, *flags_for(tiny_data), "--icl_interval=3", f"--icl_tasks={tasks}"]


def train(ranks, folder, *flags):
    """The output of fsdp_train.py on so many ranks, which must end well and say nothing else."""
    done = launch([*TORCHRUN, str(ranks)] if ranks > 1 else [], folder, flags)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Warning" not in done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def one(tmp_path_factory, flags):
    """The rows of 15 steps of one process."""
    folder = tmp_path_factory.mktemp("one")
    train(1, folder, *flags, "--run_dir=run", "--max_steps=15")
    return runlog.read(folder / "run")


@pytest.fixture(scope="module")
def two(tmp_path_factory, flags):
    """The same for 6 steps on two tensor ranks, with a microbatch found by trial: (folder, output).

    Nobody changes the folder.
    """
    folder = tmp_path_factory.mktemp("two")
    more = ["--run_dir=run", "--max_steps=6", "--tp=2", "--microbatch_size=auto"]
    return folder, train(2, folder, *flags, *more)


@pytest.fixture(scope="module")
def moved(tmp_path_factory, flags, two):
    """That run moved on to four ranks, two data-parallel ones and one: the folder."""
    folder = tmp_path_factory.mktemp("moved")
    shutil.copytree(two[0], folder, dirs_exist_ok=True)
    flags = [*flags, "--run_dir=run"]
    recomputed = ["--sequence_parallel", "--activation_checkpointing=full"]
    out = train(4, folder, *flags, "--max_steps=9", "--tp=2", *recomputed)
    assert "4 x cpu, FULL_SHARD, tp 2 + sequence parallel, fp32" in out
    assert "batch 8 sequences x 32 = 2 data-parallel ranks x 4 in 2 microbatches" in out
    train(2, folder, *flags, "--max_steps=12")
    out = train(1, folder, *flags, "--max_steps=15")
    assert "run: resuming from run/checkpoints/step-12" in out
    return folder


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


# --- A run


@pytest.mark.slow
def test_two_tensor_ranks_write_the_rows_of_one_process(one, two):
    rows = runlog.read(two[0] / "run")
    assert_same_curve(rows, [row for row in one if row["step"] <= 6])


@pytest.mark.slow
def test_the_log_counts_devices_and_data_parallel_ranks(two, capsys):
    """MFU: (6 N + 12 L d S) x tokens/s, over both devices, which share these FLOPs."""
    folder, out = two
    n_params = flops.n_params(MODEL)
    assert f"MPT of {n_params:,} parameters" in out
    assert "2 x cpu, FULL_SHARD, tp 2, fp32 (as set), 0.002 TFLOP/s peak" in out
    assert "microbatch 8: fits" in out
    assert "batch 8 sequences x 32 = 1 data-parallel ranks x 8 in 1 microbatches" in out
    for row in runlog.read(folder / "run"):
        if "loss" in row:
            speed = 8 * 32 / row["seconds"]
            assert row["tokens_per_second"] == pytest.approx(speed)
            use = (6 * n_params + 12 * 2 * 32 * 32) * speed / (2 * 1e9)
            assert row["mfu"] == pytest.approx(use)
    microbatch.main([str(folder / "run")])
    found = "2 x cpu, fp32, FULL_SHARD, tp 2: microbatch 8, the largest that fits\n"
    assert capsys.readouterr().out == found


@pytest.mark.slow
def test_a_run_moves_between_layouts_and_stays_on_its_curve(one, moved):
    assert_same_curve(runlog.read(moved / "run"), one)
    launches = runlog.read_launches(moved / "run")
    assert [(row["ranks"], row["tp"]) for row in launches] == [(2, 2), (4, 2), (2, 1), (1, 1)]
    labels = plot.restart_labels(str(moved / "run"))
    assert list(labels.values())[1:] == ["2 -> 4 ranks, tp 2", "4 -> 2 ranks", "2 -> 1 rank"]


@pytest.mark.slow
def test_a_run_from_before_tensor_parallelism_goes_on_with_it(old):  # noqa: F811
    """With qk_ln, grouped heads, an own output layer, z-loss and packed documents, among others."""
    train(2, old, "settings.py", "--tp=2", "--microbatch_size=4")
    found = [row for row in read_rows("run/metrics.jsonl") if row["step"] > 6]
    wanted = read_rows("expected-1.jsonl")
    assert [row["step"] for row in found] == [row["step"] for row in wanted]
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.get("batch_hash") == theirs.get("batch_hash")
        for name in NEAR.keys() & theirs.keys():
            assert ours[name] == pytest.approx(theirs[name], rel=NEAR[name])
        if "icl" in theirs:
            assert ours["icl"].keys() == theirs["icl"].keys()
    earlier = [row for row in read_rows("run/metrics.jsonl") if row["step"] <= 6]
    assert earlier == [row for row in read_rows(OLD / "run/metrics.jsonl") if row["step"] <= 6]


# --- Weights


@pytest.mark.slow
def test_what_tensor_ranks_saved_is_exported_whole_and_begins_new_runs(
    ranks, moved, flags, one, tmp_path
):
    """Two tensor ranks begin with the weights of a run of tensor ranks, and of a foreign folder."""
    saved = moved / "run/checkpoints/step-9"
    assert checkpoint.read_meta(saved)["tp"] == 2
    hf.main(["export", str(saved), str(tmp_path / "hf")])
    exported = hf.load_model(tmp_path / "hf", CPU).state_dict()
    whole = load_model(saved, CPU).state_dict()
    assert exported.keys() == whole.keys() and same(exported, whole)

    (wanted,) = [row["val_loss"] for row in one if "val_loss" in row and row["step"] == 9]
    for number, source in enumerate([tmp_path / "hf", saved]):
        run = tmp_path / f"run{number}"
        more = [f"--run_dir={run}", "--max_steps=3", f"--init_from={source}", "--tp=2"]
        statuses = ranks(2)(train_here, [*flags, *more])
        assert [status for status, *_ in statuses] == [0, 0], statuses
        first = next(row for row in runlog.read(run) if "val_loss" in row)
        assert first["step"] == 0 and first["val_loss"] == pytest.approx(wanted, abs=1e-5)


# --- Other programs


@pytest.mark.slow
def test_evaluation_on_tensor_ranks_gives_the_figures_of_one_device(moved, tasks, tmp_path):
    found = {}
    for ranks, tp in [(1, 1), (2, 2)]:
        how = [*TORCHRUN, str(ranks)] if ranks > 1 else []
        out = tmp_path / f"{ranks}.json"
        ask = [moved / "run", "--step=9", f"--tasks={tasks}", f"--out={out}", f"--tp={tp}"]
        done = launch(how, tmp_path, ask, program="evaluation")
        assert done.returncode == 0, done.stderr
        found[ranks] = json.loads(out.read_text())
    assert found[1]["settings"]["weights"] == found[2]["settings"]["weights"]
    assert_same_figures(found[2]["tasks"], found[1]["tasks"])


def evaluate_and_keep_parts(world, argv):
    """`python -m evaluation`, which writes each request's scores at once and leaves them there."""
    env = {"RANK": str(world.global_rank), "WORLD_SIZE": str(world.global_size)}
    with (
        mock.patch.dict(os.environ, env),
        mock.patch.object(results, "PART_SECONDS", -1),
        mock.patch.object(results.Part, "remove", lambda part: None),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        zero_shot.main(argv)


@pytest.mark.slow
def test_tensor_ranks_keep_their_scores_under_one_name_for_the_next_start(
    ranks, moved, tasks, tmp_path
):
    out = tmp_path / "scores.json"
    ask = [str(moved / "run"), "--step=9", f"--tasks={tasks}", f"--out={out}", "--tp=2"]
    ranks(2)(evaluate_and_keep_parts, ask)
    name = f"scores.json.part-{json.loads(out.read_text())['settings']['weights']}-fp32"
    parts = sorted(tmp_path.glob("*.part*"))
    assert [path.name for path in parts] == [f"{name}-0", f"{name}-1"]
    first, second = (path.read_text().splitlines() for path in parts)
    assert first == second and len([line for line in first if line]) > 9


@pytest.mark.slow
def test_evaluation_says_which_tp_there_can_be(moved, tasks, tmp_path):
    ask = [moved / "run", f"--tasks={tasks}", "--tp=3"]
    done = launch([], tmp_path, ask, program="evaluation")
    assert done.returncode == 2
    assert done.stderr == "error: tp 3 does not divide n_heads 4: tp can be 1, 2, 4\n"


def test_generate_says_that_it_has_no_tp():
    with pytest.raises(UserError, match="only fsdp_train.py and evaluation cut a model"):
        generate.main(["runs/demo", "--tp=2"])


# --- Bad input


@pytest.mark.slow
@pytest.mark.parametrize(
    "n_ranks, mistake, words",
    [
        (3, ["--tp=3"], "tp 3 does not divide n_heads 4: tp can be 1, 2, 4"),
        (
            3,
            ["--tp=2"],
            "3 ranks do not form teams of tp 2: start a multiple of 2, or set --tp=1",
        ),
        (
            4,
            ["--tp=2", "--global_batch_size=7"],
            "global_batch_size 7 is not a multiple of the 2 data-parallel ranks: "
            "set --global_batch_size=6 or 8",
        ),
        (
            2,
            ["--tp=2", "--sequence_parallel", "--max_seq_len=31"],
            "sequence_parallel: tp 2 does not divide max_seq_len 31",
        ),
        (2, ["--tp=2", "--compile"], "tp does not work with compiled blocks: set --compile=False"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(torchrun, flags, n_ranks, mistake, words):
    done = torchrun(n_ranks, *flags, "--run_dir=run", *mistake)
    assert re.findall("exitcode  : (-?[0-9]+)", done.stderr)[-1] == "2", done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error")]
    assert line.startswith(f"error: {words}"), line


@pytest.mark.slow
@pytest.mark.parametrize(
    "mistake, words",
    [
        ("--tp=2", "one rank does not form teams of tp 2: start a multiple of 2, or set --tp=1"),
        ("--sequence_parallel", "sequence_parallel needs tensor ranks: set --tp=2"),
    ],
)
def test_one_process_is_no_team(python, flags, mistake, words):
    done = python(*flags, "--run_dir=run", mistake)
    assert done.returncode == 2
    assert done.stderr == f"error: {words}\n"


# --- What goes wrong on one of the ranks


def poisoned_4(world):
    return poisoned(world, {4})


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--sequence_parallel", "--sharding=DDP"]])
def test_a_step_that_went_bad_on_one_tensor_rank_changes_nothing_on_any(
    ranks, flags, tmp_path, more
):
    flags = [*flags, "--max_steps=8", "--tp=2", "--icl_interval=0", *more]
    status, _, printed = ranks(4)(train_here, [*flags, f"--run_dir={tmp_path}/run"], poisoned_4)[0]
    assert status == 0 and "1 steps with a non-finite loss or gradient were skipped" in printed
    assert [step for step, row in steps_of(tmp_path / "run").items() if row["skipped"]] == [5]
    ranks(4)(train_here, [*flags, f"--run_dir={tmp_path}/without", "--skip_steps=5:6"])
    a, b = (load(checkpoint.latest(tmp_path / name)) for name in ("run", "without"))
    assert same(a, b)


@contextlib.contextmanager
def slow_rank_3(world):
    """On rank 3 the matmuls of Wqkv and up_proj and the attention take 0.06 s longer."""

    def slower(function):
        def call(*args, **more):
            result = function(*args, **more)
            time.sleep(0.06 * (world.global_rank == 3))
            return result

        return call

    with (
        mock.patch.object(tensor_parallel, "enter", slower(tensor_parallel.enter)),
        mock.patch.object(model, "attention", slower(model.attention)),
    ):
        yield


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--qk_ln", "--activation_checkpointing=selective"]])
def test_the_slow_tensor_rank_is_named_and_not_the_one_that_waits_for_it(
    ranks, flags, tmp_path, more
):
    more = ["--tp=2", "--max_steps=6", "--eval_interval=0", "--icl_interval=0", *more]
    statuses = ranks(4)(train_here, [*flags, f"--run_dir={tmp_path}", *more], slow_rank_3)
    assert [status for status, *_ in statuses] == [0] * 4, statuses
    rows = list(steps_of(tmp_path).values())[2:]
    assert all(row["slowest_rank"] == 3 and row["slowest_by"] > 2 for row in rows), rows


@pytest.mark.slow
def test_a_tensor_rank_that_is_killed_ends_all_and_the_next_start_goes_on(
    started,  # noqa: F811
    python,
    flags,
    tmp_path,
):
    """Until then the folder is theirs: another run is refused."""
    run = tmp_path / "run"
    first = started(4, *flags, *FOREVER, "--tp=2")
    wait_for(lambda: (run / "checkpoints/step-3/.metadata").exists())
    other = python(*flags, "--run_dir=run", "--max_steps=9")
    assert other.returncode == 2 and "is owned by process" in other.stderr
    first.send(signal.SIGKILL, 3)
    assert first.wait(PATIENCE)
    statuses = [process.returncode for process in first.processes]
    assert statuses == [RESUME_ME] * 3 + [-signal.SIGKILL]
    lines = [x for x in (tmp_path / "log").read_text().splitlines() if x.startswith("error")]
    assert lines and all("lost another rank" in line for line in lines)

    last = steps_done(run)
    second = started(2, *flags, f"--max_steps={last + 2}", "--tp=2")
    assert second.wait(PATIENCE) and second.status() == 0, (tmp_path / "log").read_text()
    assert sorted(steps_of(run)) == list(range(1, last + 3))


# --- SLURM


@pytest.mark.slow
def test_srun_starts_teams_and_one_that_lies_on_two_nodes_is_warned_of(job, flags):  # noqa: F811
    flags = [*flags, "--run_dir=run", "--max_steps=3", "--icl_interval=0"]
    one_thread = functools.partial(re.sub, "OMP_NUM_THREADS=.*", "OMP_NUM_THREADS=1")
    job.submit(SRUN, *flags, "--tp=4", nodes=2, edit=one_thread)
    assert job.end() == 0, job.said()
    assert "4 x cpu, FULL_SHARD, tp 4, fp32" in job.said()
    warning = "WARNING: tp 4 on nodes of 2 ranks puts a team on several nodes, where each layer"
    assert job.said().count(warning) == 1 and "; --tp=2 stays within a node" in job.said()
