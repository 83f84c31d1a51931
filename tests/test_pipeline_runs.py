"""fsdp_train.py --pp and the programs around it, as a user runs them: real launches on the CPU."""

import contextlib
import functools
import re
import signal
import time
from dataclasses import asdict
from unittest import mock

import numpy as np
import pytest
from conftest import PATIENCE, flags_for
from test_slurm import SRUN, job  # noqa: F401 (a fixture)
from test_stopping import FOREVER, load, poisoned, same, steps_of, train_here, wait_for
from test_tensor_parallel_runs import assert_same_curve, tasks, train  # noqa: F401 (a fixture)
from test_watchdog import errors, started, statuses  # noqa: F401 (a fixture)

import checkpoint
import config
import data
import flops
import generate
import model
import parallel
import processes
from config import MPTConfig, TrainConfig, UserError
from evaluation import zero_shot
from evaluation.score import Request, grouped, score
from lessons.elastic import steps_done
from lifecycle import lease, microbatch, plot, runlog
from program import RESUME_ME

# Two stages have two layers and one. The documents of a row do not see each other.
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
STEPS = 6


@pytest.fixture(scope="module")
def short_documents(tmp_path_factory):
    """Prepared data of documents of about 20 bytes, so that a row of 32 has parts of several."""
    folder = tmp_path_factory.mktemp("short")
    words = "the a river tree house blue old sings walks sees under slowly".split()
    draw = np.random.default_rng(0)
    documents = [" ".join(draw.choice(words, 4)) for _ in range(1000)]
    (folder / "text.txt").write_text("<|endoftext|>".join(documents))
    source = {"dataset": f"{folder}/*.txt", "tokenizer": "bytes", "val_fraction": 0.1}
    return data.prepare(TrainConfig(**source, data_dir=str(folder / "tokens")))


@pytest.fixture(scope="module")
def flags(short_documents, tasks):  # noqa: F811
    source = flags_for(short_documents)
    return [*SIZE, *RUN, *source, f"--icl_tasks={tasks}", f"--max_steps={STEPS}"]


@pytest.fixture(scope="module")
def one(ranks, tmp_path_factory, flags):
    """The rows of one process."""
    folder = tmp_path_factory.mktemp("one")
    assert ranks(1)(train_here, [*flags, f"--run_dir={folder}"])[0][0] == 0
    return runlog.read(folder)


@pytest.fixture(scope="module")
def two(tmp_path_factory, flags):
    """A run of two stages, with a microbatch found by trial: (its folder, its output).

    Nobody changes the folder.
    """
    folder = tmp_path_factory.mktemp("two")
    out = train(2, folder, *flags, "--run_dir=run", "--pp=2", "--microbatch_size=auto")
    return folder / "run", out


# --- A run


@pytest.mark.slow
def test_two_stages_write_the_rows_of_one_process(one, two):
    """Losses, norms, evaluations and tasks, whose questions share prefixes in a cache."""
    assert_same_curve(runlog.read(two[0]), one)
    assert sum("icl" in row for row in one) == 3  # after 0, 3 and 6 steps


@pytest.mark.slow
def test_the_log_counts_devices_stages_and_the_bubble(two, capsys):
    """MFU: (6 N + 12 L d S) x tokens/s, over both devices, which share these FLOPs."""
    folder, out = two
    n_params = flops.n_params(MODEL)
    assert f"MPT of {n_params:,} parameters, 3 layers x 32" in out and "WARNING" not in out
    assert "2 x cpu, FULL_SHARD, pp 2, fp32 (as set), 0.002 TFLOP/s peak" in out
    assert "microbatch 1: fits" in out and "microbatch 2" not in out  # four for each stage
    assert "= 1 data-parallel ranks x 8 in 8 microbatches, 11% bubble\n" in out
    for row in steps_of(folder).values():
        speed = 8 * 32 / row["seconds"]
        assert row["tokens_per_second"] == pytest.approx(speed)
        use = (6 * n_params + 12 * 3 * 32 * 32) * speed / (2 * 1e9)
        assert row["mfu"] == pytest.approx(use)
    microbatch.main([str(folder)])
    found = "2 x cpu, fp32, FULL_SHARD, pp 2: microbatch 1, the largest that fits\n"
    assert capsys.readouterr().out == found


@pytest.mark.slow
def test_programs_read_the_folder_of_stages(two, python, capsys):
    folder = str(two[0])
    for program in (runlog, plot, lease):
        program.main([folder])
    said = capsys.readouterr().out
    assert f"{STEPS} steps, 1,536 tokens" in said and "no run owns" in said
    done = python(folder, program="lifecycle/resume.py")
    assert done.returncode == 0, done.stderr
    checkpoints = [two[0] / f"checkpoints/step-{step}" for step in (3, 6)]
    assert done.stdout.splitlines() == [f"{path}: sound" for path in checkpoints]


@pytest.mark.slow
@pytest.mark.parametrize(
    "more, words",
    [
        (
            ["--tp=2", "--sequence_parallel", "--microbatch_size=8"],
            "WARNING: 1 microbatches never fill 2 stages: each waits for 50% of a step; "
            "set --microbatch_size=4, or --global_batch_size=16\n",
        ),
        (
            ["--activation_checkpointing=full"],
            "FULL_SHARD gathers a stage's weights in each of its 2 microbatches; "
            "--sharding=ZERO1 does so once a step, and needs more memory\n",
        ),
        (["--sharding=ZERO1", "--microbatch_size=1"], "ZERO1, pp 2, fp32"),
    ],
)
def test_four_ranks_write_the_rows_of_one_process(ranks, flags, one, tmp_path, more, words):
    flags = [*flags, f"--run_dir={tmp_path}", "--pp=2", *more]
    answers = ranks(4)(train_here, flags)
    assert [status for status, *_ in answers] == [0] * 4, answers
    assert_same_curve(runlog.read(tmp_path), one)
    assert answers[0][2].count(words) == 1, answers[0][2]


# --- Scoring


def requests() -> list[Request]:
    """Some share a prefix, some do not."""
    draw = np.random.default_rng(0)
    prefixes = [draw.integers(0, 257, n) for n in (20, 12)]
    found = [Request(draw.integers(0, 257, 9), 3)]
    for prefix in prefixes:
        for n in (2, 5, 3):
            found.append(Request(np.concatenate([prefix, draw.integers(0, 257, n)]), n))
    return found


def scored(world, layouts, precision):
    """The scores of `requests` by a model of this seed, in each layout of this many ranks."""
    found = []
    for layout in layouts:
        cfg = TrainConfig(**layout)
        in_grid = processes.in_grid(world, cfg.tp, cfg.pp)
        net, _ = parallel.build(MODEL, cfg, in_grid, precision, seed=0)
        net.eval()
        found.append(score(net, requests(), in_grid, precision, 64).tolist())
    return found


@pytest.mark.parametrize(
    "size, precision, layouts",
    [
        (2, "fp32", [{"pp": 2}]),
        (2, "bf16", [{"pp": 2}]),
        (4, "fp32", [{"pp": 2}, {"pp": 2, "tp": 2}]),
    ],
)
def test_scores_do_not_depend_on_the_stages(ranks, size, precision, layouts):
    assert any(group.shared for group in grouped(range(7), requests(), 64))
    ((wanted,),) = ranks(1)(scored, [{}], precision)
    for of_rank in ranks(size)(scored, layouts, precision):
        for found in of_rank:
            assert np.allclose(found, wanted, rtol=1e-5, atol=1e-5)


# --- Bad input


def test_programs_without_stages_say_so():
    with pytest.raises(UserError, match="only fsdp_train.py cuts a model into stages$"):
        generate.main(["runs/demo", "--pp=2"])
    with pytest.raises(UserError, match="only fsdp_train.py cuts .* stages, use --tp here$"):
        zero_shot.main(["runs/demo", "--pp=2"])


@pytest.mark.parametrize("name", ["pipeline_model_parallel_size", "pp_size"])
def test_other_names_of_pp_are_known(name):
    with pytest.raises(UserError, match="did you mean 'pp'"):
        config.load([f"--{name}=2"], MPTConfig, TrainConfig)


@pytest.mark.parametrize(
    "size, tp, pp, fix",
    [
        (3, 1, 2, "ranks do not form pipelines of pp 2: start a multiple of 2, or set --pp=1 or 3"),
        (1, 1, 4, "one rank does not form pipelines of pp 4: start a multiple of 4, or set --pp=1"),
        (6, 2, 2, "pipelines of tp 2 x pp 2 = 4: start a multiple of 4, or set tp x pp to 3 or 6"),
        (6, 4, 1, "6 ranks do not form teams of tp 4: start a multiple of 4, or set --tp=3 or 6"),
    ],
)
def test_numbers_of_ranks_that_fit_are_named(size, tp, pp, fix):
    world = processes.World(0, size, 0, size, "cpu")
    with pytest.raises(UserError, match=f"{re.escape(fix)}$"):
        processes.in_grid(world, tp, pp)


@pytest.mark.slow
def test_a_mistake_is_one_line_and_status_2(torchrun, flags):
    done = torchrun(3, *flags, "--run_dir=run", "--pp=2")
    assert re.findall("exitcode  : (-?[0-9]+)", done.stderr)[-1] == "2", done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error")]
    assert line.startswith("error: 3 ranks do not form pipelines of pp 2"), line


@pytest.mark.slow
@pytest.mark.parametrize(
    "size, mistake, words",
    [
        (4, ["--pp=4"], "pp 4 is more than n_layers 3: set --pp=3"),
        (
            4,
            ["--pp=2", "--global_batch_size=7"],
            "global_batch_size 7 is not a multiple of the 2 data-parallel ranks: "
            "set --global_batch_size=6 or 8",
        ),
        (2, ["--pp=2", "--sequence_parallel"], "sequence_parallel needs tensor ranks: set --tp=2"),
        (2, ["--pp=2", "--compile"], "pp does not work with compiled blocks: set --compile=False"),
    ],
)
def test_all_ranks_see_the_same_mistake(ranks, flags, tmp_path, size, mistake, words):
    answers = ranks(size)(train_here, [*flags, f"--run_dir={tmp_path}/run", *mistake])
    assert {(status, message) for status, message, _ in answers} == {(2, words)}
    assert not (tmp_path / "run/metrics.jsonl").exists()


# --- What goes wrong on one stage


def poisoned_4(world):
    return poisoned(world, {4})


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--tp=2", "--sharding=DDP"]])
def test_a_step_that_went_bad_on_one_stage_changes_nothing_on_any(ranks, flags, tmp_path, more):
    flags = [*flags, "--max_steps=8", "--pp=2", "--icl_interval=0", *more]
    status, _, printed = ranks(4)(train_here, [*flags, f"--run_dir={tmp_path}/run"], poisoned_4)[0]
    assert status == 0 and "1 steps with a non-finite loss or gradient were skipped" in printed
    assert [step for step, row in steps_of(tmp_path / "run").items() if row["skipped"]] == [5]
    ranks(4)(train_here, [*flags, f"--run_dir={tmp_path}/without", "--skip_steps=5:6"])
    a, b = (load(checkpoint.latest(tmp_path / name)) for name in ("run", "without"))
    assert same(a, b)


@contextlib.contextmanager
def slower_attention(world, seconds):
    """The attention of a layer takes so many seconds longer: seconds[global rank]."""
    attention = model.attention

    def slower(*args, **more):
        time.sleep(seconds[world.global_rank])
        return attention(*args, **more)

    with mock.patch.object(model, "attention", slower):
        yield


def slow_rank_3(world):
    return slower_attention(world, [0, 0, 0, 0.06])


def slow_machine(world):
    return slower_attention(world, [0.03] * 4)


@pytest.mark.slow
def test_the_slow_stage_is_named_and_not_the_one_with_more_layers(ranks, flags, tmp_path):
    """Ranks 2 and 3 are the second stage, which has half as many layers."""
    flags = [*flags, "--pp=2", "--eval_interval=0", "--icl_interval=0"]
    for slow in (slow_rank_3, slow_machine):
        run_dir = tmp_path / slow.__name__
        answers = ranks(4)(train_here, [*flags, f"--run_dir={run_dir}"], slow)
        assert [status for status, *_ in answers] == [0] * 4, answers
        rows = list(steps_of(run_dir).values())[2:]
        if slow is slow_rank_3:
            assert all(row["slowest_rank"] == 3 and row["slowest_by"] > 2 for row in rows), rows
        else:
            assert min(row["slowest_by"] for row in rows) < 1.5, rows


@pytest.mark.slow
def test_the_stage_that_hangs_is_named_and_not_those_that_wait(started, tmp_path):  # noqa: F811
    stepping = "time.sleep(10**6 * ((step, rank) == (3, 1)))"
    flags = ["--n_layers=3", "--pp=3", "--timeout_minutes=0.2"]
    launch = started(3, *FOREVER, *flags, stepping=stepping)
    assert launch.wait(PATIENCE) and statuses(launch) == [RESUME_ME] * 3
    (line,) = errors(tmp_path)
    named = f"stage 1, rank 1 (process {launch.processes[1].pid} on "
    assert line.startswith(f"error: no step for 0.2 minutes: {named}"), line
    assert " hangs at fsdp_train.py, line " in line and line.count("rank") == 1, line


@pytest.mark.parametrize(
    "size, victim, stage",
    [
        pytest.param(2, 0, 0, marks=pytest.mark.slow),
        pytest.param(4, 3, 1, marks=pytest.mark.long),
    ],
)
def test_a_stage_that_is_killed_is_named_and_the_next_start_goes_on(
    started,  # noqa: F811
    tmp_path,
    size,
    victim,
    stage,
):
    run = tmp_path / "run"
    first = started(size, *FOREVER, "--pp=2", "--save_interval=3")
    wait_for(lambda: (run / "checkpoints/step-3/.metadata").exists())
    first.send(signal.SIGKILL, victim)
    assert first.wait(PATIENCE)
    assert statuses(first).count(RESUME_ME) == size - 1
    (line,) = errors(tmp_path)
    named = f"stage {stage}, rank {victim} (process {first.processes[victim].pid} on "
    assert "lost another rank: " in line and f"No sign of life from {named}" in line, line
    last = steps_done(run)
    second = started(2, *FOREVER, f"--max_steps={last + 2}", "--pp=2")
    assert second.wait(PATIENCE) and second.status() == 0, (tmp_path / "log").read_text()
    assert sorted(steps_of(run)) == list(range(1, last + 3))


# --- SLURM


@pytest.mark.slow
def test_srun_gives_each_node_a_stage(job, flags):  # noqa: F811
    """Teams of two are neighbours on a node, so there is nothing to warn of."""
    flags = [*flags, "--run_dir=run", "--max_steps=3", "--icl_interval=0"]
    one_thread = functools.partial(re.sub, "OMP_NUM_THREADS=.*", "OMP_NUM_THREADS=1")
    job.submit(SRUN, *flags, "--tp=2", "--pp=2", nodes=2, edit=one_thread)
    assert job.end() == 0, job.said()
    assert "4 x cpu, FULL_SHARD, tp 2, pp 2, fp32" in job.said() and "WARNING" not in job.said()
