"""A checkpoint is whole tensors: every layout of ranks saves the whole, and loads from it.

So what one layout saved loads in every other. Bit by bit, weights and optimizer.
"""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from conftest import slowly
from layouts import (
    LORA,
    MODEL,
    assert_near,
    curves,
    load_and_continue,
    plainly,
    save,
    settings,
)
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType

import checkpoint
import pipeline
import tensor_parallel
from model import MPT
from program import UserError
from storage.checkpoint_files import read_metadata

UNTIED = {"tie_word_embeddings": False, "alibi": False, "no_bias": False, "kv_n_heads": 2}
GATED = {
    "ffn_type": "mptglu",
    "norm_type": "rmsnorm",
    "qk_gn": True,
    "kv_n_heads": 2,
    "sliding_window_size": 5,
    "final_logit_softcapping": 5.0,
}
LAYOUTS = {  # ZERO1 and SHARD_GRAD_OP save what FULL_SHARD saves
    "dp 2, FULL_SHARD": (2, {"sharding": "FULL_SHARD"}),
    "dp 2, DDP": (2, {"sharding": "DDP"}),
    "dp 3, ZERO1": (3, {"global_batch_size": 12}),
    "dp 4, HYBRID_SHARD": (4, {"sharding": "HYBRID_SHARD", "shard_size": 2}),
    "tp 2": (2, {"tp": 2} | UNTIED),
    "tp 4": (4, {"tp": 4}),
    "tp 2 x dp 2, FULL_SHARD": (4, {"tp": 2, "sharding": "FULL_SHARD"}),
    "pp 2": (2, {"pp": 2}),
    "pp 4": (4, {"pp": 4}),
    "pp 2 x dp 2, FULL_SHARD": (4, {"pp": 2, "sharding": "FULL_SHARD"}),
    "pp 2 x tp 2 + sequence": (4, {"pp": 2, "tp": 2, "sequence_parallel": True}),
    "gated, pp 2 x tp 2": (4, {"pp": 2, "tp": 2} | GATED),
    "gated, dp 2, FULL_SHARD": (2, {"sharding": "FULL_SHARD"} | GATED),
    "adapters, dp 2": (2, LORA | {"sharding": "FULL_SHARD"}),
    "adapters, tp 2": (2, LORA | {"tp": 2}),
    "adapters, pp 2": (2, LORA | {"pp": 2}),
}
QUICK = ["tp 2", "pp 2"]
CROSSES = [
    ("dp 4, HYBRID_SHARD", "pp 2 x tp 2 + sequence"),
    ("pp 2 x tp 2 + sequence", "dp 4, HYBRID_SHARD"),
    ("tp 4", "pp 2 x dp 2, FULL_SHARD"),
    ("pp 2 x dp 2, FULL_SHARD", "tp 4"),
    ("pp 4", "tp 2 x dp 2, FULL_SHARD"),
    ("tp 2 x dp 2, FULL_SHARD", "pp 4"),
    ("gated, pp 2 x tp 2", "gated, dp 2, FULL_SHARD"),
    ("gated, dp 2, FULL_SHARD", "gated, pp 2 x tp 2"),
]
ALONE = sorted(LAYOUTS.keys() - dict(CROSSES).keys())


@pytest.fixture(scope="module")
def by_one(ranks, tmp_path_factory):
    """`by_one(job)`: the checkpoint that one process has saved of this job, and its next steps."""
    found = {}

    def saved(job):
        job = plainly(job)
        if str(job) not in found:
            folder = tmp_path_factory.mktemp("one")
            assert ranks(1)(save, job, folder) == [[]]
            ((curve,),) = ranks(1)(curves, [job], 5)
            found[str(job)] = folder / "checkpoints/step-3", curve[3:]
        return found[str(job)]

    return saved


def entries(path) -> dict:
    """name -> (shape, dtype) of each tensor of a checkpoint; of a setting: None."""
    found = {}
    for name, entry in read_metadata(path).state_dict_metadata.items():
        is_setting = isinstance(entry, BytesStorageMetadata)
        found[name] = None if is_setting else (entry.size, entry.properties.dtype)
    return found


def assert_loads(ranks, layout, path, wanted) -> None:
    """Each rank has loaded all it has, and its next losses are those of the run that was saved."""
    size, changes = LAYOUTS[layout]
    for wrong, curve in ranks(size)(load_and_continue, settings(**changes), path):
        assert not wrong
        assert_near(curve, wanted, layout)


def saved_by(ranks, layout, by_one, folder):
    """(checkpoint of this layout, that of one process, its next steps)"""
    size, changes = LAYOUTS[layout]
    job = settings(**changes)
    whole, wanted = by_one(job)
    assert ranks(size)(save, job, folder) == [[]] * size
    path = folder / "checkpoints/step-3"
    assert entries(path) == entries(whole)
    # The pieces, which cover each tensor once, take up all bytes of the files.
    used = sum(place.length for place in read_metadata(path).storage_data.values())
    assert used == sum(file.stat().st_size for file in path.glob("*.distcp"))
    return path, whole, wanted


@pytest.mark.parametrize(
    "layout", [name if name in QUICK else slowly(name) for name in ALONE], ids=str
)
def test_each_layout_saves_the_whole_and_loads_it(ranks, by_one, tmp_path, layout):
    _, whole, wanted = saved_by(ranks, layout, by_one, tmp_path)
    assert_loads(ranks, layout, whole, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("saved, loaded", CROSSES)
def test_what_one_layout_saved_another_loads(ranks, by_one, tmp_path, saved, loaded):
    path, _, wanted = saved_by(ranks, saved, by_one, tmp_path)
    assert_loads(ranks, loaded, path, wanted)


# --- Plans, without processes

GRIDS = [(1, 1), (2, 1), (4, 1), (1, 2), (1, 3), (1, 5), (2, 2), (2, 3)]


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
        planners.append(checkpoint.choose_planners(layout)[0])
        planners[-1].set_up_planner(state, is_coordinator=number == 0)
    plans = [planner.create_local_plan() for planner in planners]
    plans, metadata = planners[0].create_global_plan(plans)
    return metadata, sum(len(plan.items) for plan in plans)


def unread(metadata, layout, state) -> list[str]:
    """The names of the entries of which a rank would not read each element once."""
    _, planner = checkpoint.choose_planners(layout)
    planner.set_up_planner(state, metadata, is_coordinator=True)
    n_read = dict.fromkeys(state, 0)
    for item in planner.create_local_plan().items:
        is_setting = item.type == LoadItemType.BYTE_IO
        n_read[item.dest_index.fqn] += 1 if is_setting else math.prod(item.lengths)
    wanted = {name: getattr(value, "numel", lambda: 1)() for name, value in state.items()}
    return [name for name in state if n_read[name] != wanted[name]]


def test_every_grid_reads_all_of_what_every_other_wrote():
    """Of GRIDS, all pairs. A piece that two stages have is written once."""
    grids = [states(MODEL, tp, pp) for tp, pp in GRIDS]
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


def refused(_, job, path):
    """The error of loading a checkpoint into a pipeline of another model."""
    with pytest.raises(UserError) as error:
        load_and_continue(None, job, path)
    return str(error.value)


def test_a_stage_refuses_a_checkpoint_that_lacks_what_another_stage_wants(ranks, by_one):
    """All ranks say the same, though only the last stage has an output layer."""
    path, _ = by_one(settings())
    model_cfg, cfg = settings(pp=2)
    job = replace(model_cfg, tie_word_embeddings=False), cfg
    first, second = ranks(2)(refused, job, path)
    assert first == second
    assert "1 weights of" in first and "'lm_head.weight': missing" in first
