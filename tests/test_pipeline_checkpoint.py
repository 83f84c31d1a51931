"""Checkpoints of pipelines: saved in any layout of ranks, they load in any other, bit by bit.

Also what reads them: resumed runs, exported weights, generate.py, evaluation.
"""

import contextlib
import io
import itertools
import json
import math
from dataclasses import replace

import pytest
import torch
from conftest import launch
from test_old_runs import NEAR, OLD, old, read_rows  # noqa: F401 (a fixture)
from test_parallel import slowly
from test_stopping import same, train_here
from test_tensor_parallel import (
    MODEL,
    RUN,
    curves,
    largest_differences,
    load_and_continue,
    save,
)
from test_tensor_parallel_runs import (  # noqa: F401 (fixtures)
    CPU,
    assert_same_curve,
    assert_same_figures,
    flags,
    one,
    tasks,
    train,
)
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType

import checkpoint
import generate
import pipeline
import tensor_parallel
from config import UserError
from lifecycle import plot, runlog
from model import MPT
from storage.checkpoint_files import read_metadata
from weights import hf
from weights.load import load_model

# Five layers cannot be cut into two, three or four equal stages.
TIED = replace(MODEL, n_layers=5)
UNTIED = replace(TIED, tie_word_embeddings=False, alibi=False, no_bias=False, kv_n_heads=2)


def entries(path) -> dict:
    """name -> (shape, dtype) of each tensor of a checkpoint; of a setting: None."""
    found = {}
    for name, entry in read_metadata(path).state_dict_metadata.items():
        is_setting = isinstance(entry, BytesStorageMetadata)
        found[name] = None if is_setting else (entry.size, entry.properties.dtype)
    return found


def assert_nothing_is_stored_twice(path):
    """The pieces, which cover each tensor once, take up all bytes of the files."""
    used = sum(place.length for place in read_metadata(path).storage_data.values())
    assert used == sum(file.stat().st_size for file in path.glob("*.distcp"))


def assert_goes_on_as(found, wanted, job=None):
    """Each rank has loaded all it has, and its next losses are those of the run that was saved."""
    for wrong, curve in found:
        assert not wrong, (job, wrong)
        losses, norms = largest_differences(curve, wanted)
        assert losses < 5e-6 and norms < 1e-5, (job, losses, norms)


# --- Real ranks


def test_two_stages_and_one_process_load_what_the_other_saved(ranks, tmp_path):
    in_stages = replace(RUN, pp=2)
    assert ranks(2)(save, in_stages, str(tmp_path / "two"), TIED) == [[], []]
    assert ranks(1)(save, RUN, str(tmp_path / "one"), TIED) == [[]]
    by_two, by_one = (tmp_path / name / "checkpoints/step-3" for name in ("two", "one"))
    assert entries(by_two) == entries(by_one)
    assert_nothing_is_stored_twice(by_two)
    ((wanted,),) = ranks(1)(curves, [(TIED, RUN)])
    assert_goes_on_as(ranks(1)(load_and_continue, RUN, by_two, TIED), wanted[3:5])
    assert_goes_on_as(ranks(2)(load_and_continue, in_stages, by_one, TIED), wanted[3:5])


LAYOUTS = {
    "1": (1, {}),
    "dp2": (2, {"sharding": "FULL_SHARD"}),
    "tp2": (2, {"tp": 2}),
    "pp2": (2, {"pp": 2}),
    "pp3": (3, {"pp": 3}),
    "pp4": (4, {"pp": 4}),
    "pp2 x dp2": (4, {"pp": 2}),  # ZERO1
    "pp2 x dp2, FULL_SHARD": (4, {"pp": 2, "sharding": "FULL_SHARD"}),
    "pp2 x dp2, DDP": (4, {"pp": 2, "sharding": "DDP"}),
    "pp2 x tp2 + sequence": (4, {"pp": 2, "tp": 2, "sequence_parallel": True}),
}
MODELS = dict(zip(LAYOUTS, itertools.cycle([TIED, UNTIED])))  # what each layout saves


def on_ranks(ranks, function, jobs):
    """[(job, what each rank returned)] of function(settings, *rest) for jobs (layout, *rest).

    All jobs of layouts with equally many ranks are sent to these together.
    """
    results = []
    for size in (1, 2, 3, 4):
        here = [job for job in jobs if LAYOUTS[job[0]][0] == size]
        calls = [(replace(RUN, **LAYOUTS[name][1]), *rest) for name, *rest in here]
        of_ranks = ranks(size)(call_all, function, calls)
        results += zip(here, zip(*of_ranks, strict=True), strict=True)
    return results


def call_all(_, function, calls):
    return [function(None, *arguments) for arguments in calls]


@pytest.mark.parametrize(
    "places",
    [pytest.param([4], marks=pytest.mark.slow), pytest.param([1, 4, 7], marks=pytest.mark.long)],
)
def test_a_checkpoint_of_each_of_ten_layouts_loads_in_others(ranks, tmp_path, places):
    """In those so many places further in LAYOUTS."""
    saves = [(name, str(tmp_path / name), MODELS[name]) for name in LAYOUTS]
    for job, wrong in on_ranks(ranks, save, saves):
        assert not any(wrong), job
    paths = {name: tmp_path / name / "checkpoints/step-3" for name in LAYOUTS}
    for model_cfg in (TIED, UNTIED):
        of_model = [path for name, path in paths.items() if MODELS[name] == model_cfg]
        assert all(entries(path) == entries(of_model[0]) for path in of_model)
    for path in paths.values():
        assert_nothing_is_stored_twice(path)

    names = list(LAYOUTS)
    loads = []
    for number, saved in enumerate(names):
        others = [names[(number + further) % len(names)] for further in places]
        loads += [(other, paths[saved], MODELS[saved]) for other in others]
    found = on_ranks(ranks, load_and_continue, loads)
    (wanted,) = ranks(1)(curves, [(TIED, RUN), (UNTIED, RUN)])
    for job, of_ranks in found:
        curve = wanted[0] if job[-1] == TIED else wanted[1]
        assert_goes_on_as(of_ranks, curve[3:5], job)


# --- Plans, without processes

GRIDS = [(1, 1), (2, 1), (4, 1), (1, 2), (1, 3), (1, 4), (1, 5), (2, 2), (2, 3), (4, 2)]


def states(model_cfg, tp, pp):
    """[(layout, the tensors and settings that it saves), ...] of all ranks of a grid.

    One moment stands for both of Adam's.
    """
    found = []
    for stage, tensor_rank in itertools.product(range(pp), range(tp)):
        with torch.device("meta"):
            model = MPT(model_cfg)
        if tp > 1:
            tensor_parallel.cut(model, tensor_parallel.Team(None, tensor_rank, tp))
        if pp > 1:
            pipeline.keep_stage(model, pipeline.Pipe(None, stage, pp))
        model.to_empty(device="cpu")
        state = {}
        for name, param in model.state_dict().items():
            state[f"model.{name}"] = state[f"optim.state.{name}.exp_avg"] = param
            state[f"optim.state.{name}.step"] = torch.zeros(())
            state[f"optim.param_groups.{name}.lr"] = 1e-3
        found.append((tensor_parallel.layout_of(model), state))
    return found


def plan_of_saving(of_ranks):
    """(DCP's metadata of the checkpoint, how many pieces all ranks together write)"""
    planners = []
    for number, (layout, state) in enumerate(of_ranks):
        planners.append(checkpoint.SavePlanner(layout))
        planners[-1].set_up_planner(state, is_coordinator=number == 0)
    plans = [planner.create_local_plan() for planner in planners]
    plans, metadata = planners[0].create_global_plan(plans)
    return metadata, sum(len(plan.items) for plan in plans)


def unread(metadata, layout, state) -> list[str]:
    """The names of the entries of which a rank would not read each element once."""
    planner = checkpoint.LoadPlanner(layout)
    planner.set_up_planner(state, metadata, is_coordinator=True)
    n_read = dict.fromkeys(state, 0)
    for item in planner.create_local_plan().items:
        is_setting = item.type == LoadItemType.BYTE_IO
        n_read[item.dest_index.fqn] += 1 if is_setting else math.prod(item.lengths)
    wanted = {name: getattr(value, "numel", lambda: 1)() for name, value in state.items()}
    return [name for name in state if n_read[name] != wanted[name]]


@pytest.mark.parametrize("model_cfg", [TIED, slowly(UNTIED)], ids=["tied", "untied"])
def test_every_grid_reads_all_of_what_every_other_wrote(model_cfg):
    """Of GRIDS, all pairs. A piece that two stages have is written once."""
    model_cfg = replace(model_cfg, kv_n_heads=4)  # four tensor ranks
    grids = [states(model_cfg, tp, pp) for tp, pp in GRIDS]
    ((_, whole),) = grids[0]
    for saving in grids:
        metadata, n_written = plan_of_saving(saving)
        stored = metadata.state_dict_metadata
        assert stored.keys() == whole.keys()
        tensors = [name for name, value in whole.items() if isinstance(value, torch.Tensor)]
        assert all(stored[name].size == whole[name].shape for name in tensors)
        n_chunks = sum(len(stored[name].chunks) for name in tensors)
        assert n_written == n_chunks + len(whole) - len(tensors)
        for loading in grids:
            assert not any(unread(metadata, layout, state) for layout, state in loading)


# --- A checkpoint of another model


def refused(_, cfg, path, model_cfg):
    """The error of loading a checkpoint into a pipeline of another model."""
    try:
        load_and_continue(None, cfg, path, model_cfg)
    except UserError as error:
        return str(error)


def test_a_stage_refuses_a_checkpoint_that_lacks_what_another_stage_wants(ranks, tmp_path):
    """All ranks say the same, though only the last stage has an output layer."""
    ranks(1)(save, RUN, str(tmp_path), TIED)
    path = tmp_path / "checkpoints/step-3"
    other = replace(TIED, tie_word_embeddings=False)
    first, second = ranks(2)(refused, replace(RUN, pp=2), path, other)
    assert first == second
    assert "1 weights of" in first and "such as 'lm_head.weight': missing instead of" in first


# --- Runs


@pytest.fixture(scope="module")
def moved(ranks, tmp_path_factory, flags):  # noqa: F811
    """A run of two stages, one process, two tensor ranks, and both on four ranks: the folder."""
    folder = tmp_path_factory.mktemp("moved")
    flags = [*flags, f"--run_dir={folder}/run"]
    train(2, folder, *flags, "--max_steps=6", "--pp=2")
    out = train(1, folder, *flags, "--max_steps=9")
    assert f"resuming from {folder}/run/checkpoints/step-6" in out
    for size, *more in [(2, "--max_steps=12", "--tp=2"), (4, "--max_steps=15", "--tp=2", "--pp=2")]:
        statuses = ranks(size)(train_here, [*flags, *more])
        assert [status for status, *_ in statuses] == [0] * size, statuses
    return folder / "run"


@pytest.mark.slow
def test_a_run_moves_in_and_out_of_stages_and_stays_on_its_curve(one, moved):  # noqa: F811
    assert_same_curve(runlog.read(moved), one)
    launches = runlog.read_launches(moved)
    layouts = [(row["ranks"], row["tp"], row["pp"]) for row in launches]
    assert layouts == [(2, 1, 2), (1, 1, 1), (2, 2, 1), (4, 2, 2)]
    labels = plot.restart_labels(str(moved))
    changes = ["2 -> 1 rank", "1 -> 2 ranks, tp 2", "2 -> 4 ranks, tp 2, pp 2"]
    assert list(labels.values()) == ["2 ranks, pp 2", *changes]


@pytest.mark.slow
def test_a_run_from_before_goes_on_in_stages(old):  # noqa: F811
    """It was saved by one process, long before there were stages."""
    train(2, old, "settings.py", "--pp=2", "--microbatch_size=4")
    found = [row for row in read_rows("run/metrics.jsonl") if row["step"] > 6]
    wanted = read_rows("expected-1.jsonl")
    assert [row["step"] for row in found] == [row["step"] for row in wanted]
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.get("batch_hash") == theirs.get("batch_hash")
        for name in NEAR.keys() & theirs.keys():
            assert ours[name] == pytest.approx(theirs[name], rel=NEAR[name])
    earlier = [row for row in read_rows("run/metrics.jsonl") if row["step"] <= 6]
    assert earlier == [row for row in read_rows(OLD / "run/metrics.jsonl") if row["step"] <= 6]


# --- Weights


@pytest.mark.slow
def test_what_stages_saved_is_exported_whole_and_begins_new_pipelines(
    ranks,
    moved,
    flags,  # noqa: F811
    one,  # noqa: F811
    tmp_path,
):
    """Two stages begin with the weights of a run of stages, and of a foreign folder."""
    saved = moved / "checkpoints/step-6"
    assert checkpoint.read_meta(saved)["pp"] == 2
    hf.main(["export", str(saved), str(tmp_path / "hf")])
    exported = hf.load_model(tmp_path / "hf", CPU).state_dict()
    whole = load_model(saved, CPU).state_dict()
    assert exported.keys() == whole.keys() and same(exported, whole)

    (wanted,) = [row["val_loss"] for row in one if "val_loss" in row and row["step"] == 6]
    for number, source in enumerate([tmp_path / "hf", saved]):
        run = tmp_path / f"run{number}"
        more = [f"--run_dir={run}", "--max_steps=3", f"--init_from={source}", "--pp=2"]
        statuses = ranks(2)(train_here, [*flags, *more, "--icl_interval=0"])
        assert [status for status, *_ in statuses] == [0, 0], statuses
        first = next(row for row in runlog.read(run) if "val_loss" in row)
        assert first["step"] == 0 and first["val_loss"] == pytest.approx(wanted, abs=1e-5)


@pytest.mark.slow
def test_one_process_evaluates_and_samples_what_stages_saved(
    moved,
    one,  # noqa: F811
    tasks,  # noqa: F811
    tmp_path,
):
    out = tmp_path / "scores.json"
    ask = [moved, "--step=6", f"--tasks={tasks}", f"--out={out}"]
    done = launch([], tmp_path, ask, program="evaluation")
    assert done.returncode == 0, done.stderr
    (wanted,) = [row["icl"] for row in one if "icl" in row and row["step"] == 6]
    assert_same_figures(json.loads(out.read_text())["tasks"], wanted)

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        more = ["--prompt=the old", "--max_new_tokens=5", "--temperature=0"]
        generate.main([str(moved / "checkpoints/step-6"), *more])
    assert len(printed.getvalue().split("the old")[1]) > 1
