"""The GPU's path on a GPU that is not there: devices, dtypes, waits, collectives, operations.

Pretending cannot be undone, so all of it happens in processes of their own. They run the cases and
print what they found as JSON. The tests check that, and that planted faults are found.
"""

import contextlib
import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
from conftest import ROOT, rooms_on_path

from bench import fake_gpu
from config import MPTConfig, TrainConfig, UserError

LAYERS, MICROBATCHES = 2, 2
WIDTH = 64
VOCAB = 3 * 4096  # three slices of the weight's gradient in PyTorch's loss
LOSSES = ("aten::_log_softmax", "mpt::cross_entropy", "mpt::cross_entropy_gradient_")
UNITS = LAYERS + 1  # what FSDP gathers at once: each block, and the rest
MODES = ("one rank", "FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "ZERO1", "DDP")
CHECKPOINTING = ("none", "selective", "full")
COMPILED = [
    ("one rank", "none"),
    ("one rank", "selective"),
    ("FULL_SHARD", "full"),
    ("ZERO1", "none"),
]
STEPS = [f"train step, {mode}, {how}, eager" for mode in MODES for how in CHECKPOINTING]
STEPS += [f"train step, {mode}, {how}, compiled" for mode, how in COMPILED]
OTHERS = [
    f"{run}, {mode}, none, eager"
    for run in ("evaluation", "scoring", "staging")
    for mode in ("one rank", "FULL_SHARD")
]
OTHERS += [f"{run}, one rank, none, eager" for run in ("generation", "trial")]
MODELS = {
    "ALiBi": {"alibi": True, "attn_impl": "triton"},
    "grouped heads": {"rope": True, "kv_n_heads": 2, "qk_ln": True},
    "dropout": {"emb_pdrop": 0.1, "attn_pdrop": 0.1, "resid_pdrop": 0.1, "clip_qkv": 6.0},
    "untied": {"tie_word_embeddings": False, "no_bias": True, "logit_scale": 0.5, "kv_n_heads": 1},
}
VARIANTS = [
    f"{run}, FULL_SHARD, none, eager, {model}"
    for run in ("train step", "scoring", "generation")
    for model in ("grouped heads", "dropout", "untied")
]

WEIGHTS = [(192, 64), (256, 64), (64, 256)]  # of a block: Wqkv, up_proj, down_proj
# How often a step casts each weight in 1, 2 or 4 microbatches. FSDP casts before it gathers.
ACCUMULATED = {
    "one rank, none, eager": 1,
    "one rank, none, compiled": 1,
    "ZERO1, none, eager": 0,
    "DDP, full, compiled": 0,
}
MICROBATCHED = [f"train step, {case}, ALiBi, {n}" for case in ACCUMULATED for n in (1, 2, 4)]

# Collectives of one step: how often each unit's weights are gathered, its gradients reduced over
# the ranks of a shard, and over their copies. As in the table of parallel.py.
PER_STEP = {
    "one rank": (0, 0, 0),
    "FULL_SHARD": (MICROBATCHES * (UNITS + LAYERS), MICROBATCHES * UNITS, 0),
    "SHARD_GRAD_OP": (MICROBATCHES * UNITS, MICROBATCHES * UNITS, 0),
    "HYBRID_SHARD": (MICROBATCHES * (UNITS + LAYERS), MICROBATCHES * UNITS, UNITS),
    "ZERO1": (UNITS, UNITS, 0),
    "DDP": (0, 0, UNITS),
}


# --- In a process of its own


def setting(mode: str, how: str, execution: str, model: str = "ALiBi", microbatches=MICROBATCHES):
    """A small model on one rank, or on one of 8."""
    from bench.fake_runs import Setting

    shape = {"d_model": WIDTH, "n_heads": 4, "n_layers": LAYERS, "vocab_size": VOCAB}
    ranks = 1 if mode == "one rank" else 8
    cfg = TrainConfig(
        global_batch_size=ranks * int(microbatches) * 2,
        microbatch_size=2,
        sharding="DDP" if mode == "one rank" else mode,
        shard_size=4,
        activation_checkpointing=how,
    )
    model_cfg = MPTConfig(max_seq_len=32, **shape, **MODELS[model])
    return Setting(model_cfg, cfg, ranks, "aot_eager" if execution == "compiled" else "")


def found(plant: str, case: str) -> dict:
    """Run a case like "train step, ZERO1, none, eager", and say what its log holds.

    plant: the function plant_... with a fault.
    """
    from torch._dynamo.utils import counters

    from bench import fake_runs

    run, *words = case.split(", ")
    counters.clear()
    with globals()[f"plant_{plant}"]():
        log = fake_runs.RUNS[run](setting(*words))
    in_parts = log.counts("forward").total() + log.counts("backward").total()
    collectives = {}
    for (kind, dtype), n in log.collectives().items():
        collectives[f"{kind} {fake_runs.config_name(dtype)}"] = n
    return {
        **{kind: [str(op) for op in ops] for kind, ops in fake_runs.findings(log).items()},
        "collectives": collectives,
        "optimizer": dtypes(op for op in log.operations if op.part == "optimizer"),
        "adam": dtypes(op for op in log.operations if op.name == "aten::_fused_adamw_"),
        "loss": loss_dtypes(log),
        "weight casts": sum(is_cast_of_a_weight(op) for op in log.operations),
        "logits in fp32": [str(op) for op in log.operations if has_fp32_logits(op)],
        "output layer's gradients": [str(op) for op in log.operations if is_slice_of_weight(op)],
        "attention": log.counts()["mpt::flash_attention"],
        "joined": [
            str(op) for op in log.operations if (op.name, op.part) == ("aten::cat", "backward")
        ],
        "operations": len(log.operations),
        "per microbatch": in_parts / MICROBATCHES,
        "cut short": log.cut_short,
        "graphs": counters["stats"]["unique_graphs"],
        "graph breaks": list(counters["graph_break"]),
    }


def is_cast_of_a_weight(op) -> bool:
    """Whether it casts the weight of Wqkv, up_proj or down_proj: no other tensor has its shape."""
    return str(op.cast) == "(torch.float32, torch.bfloat16)" and op.inputs[-1].shape in WEIGHTS


def loss_dtypes(log) -> list[str]:
    """The dtypes of the tokens' losses (or log-probabilities), and of sums of them."""
    found = set()
    for op in log.operations:
        sums = [x for x in op.outputs if x.shape == ()] if op.where.startswith("loss.py") else []
        losses = op.outputs if op.name in LOSSES else []
        found |= {str(x.dtype).removeprefix("torch.") for x in [*sums, *losses]}
    return sorted(found)


def has_fp32_logits(op) -> bool:
    """Whether one of the operation's tensors is fp32 and as wide as the vocabulary."""
    specs = op.inputs + op.outputs
    return any(x.shape[1:] == (VOCAB,) and str(x.dtype) == "torch.float32" for x in specs)


def is_slice_of_weight(op) -> bool:
    """Whether it is a matmul for the gradient of the output layer's weight, or of a slice of it."""
    slices = ((VOCAB, WIDTH), (4096, WIDTH))
    if op.name == "mpt::add_product_":
        return op.inputs[0].shape in slices and str(op.inputs[0].dtype) == "torch.float32"
    return op.name == "aten::mm" and op.outputs[0].shape in slices


def dtypes(operations) -> list[str]:
    """The dtypes of these operations' tensors."""
    return sorted({str(dtype).removeprefix("torch.") for op in operations for dtype in op.dtypes})


def plant_nothing():
    return contextlib.nullcontext()


def plant_item():
    import optim

    real = optim.clip_gradients
    return mock.patch.object(
        optim, "clip_gradients", lambda params, norm, limit: real(params, norm, norm.item() * limit)
    )


def changed_rows(change):
    """Let `change(rows)` come before the hash of a step's rows."""
    import data

    real = data.batch_hash
    return mock.patch.object(data, "batch_hash", lambda rows, rank: real(change(rows), rank))


def plant_mask_on_the_cpu():
    import torch

    def clear_first(rows):
        rows = rows.clone()
        rows[torch.arange(len(rows)) == 0] = 0
        return rows

    return changed_rows(clear_first)


def plant_boolean_index():
    return changed_rows(lambda rows: rows[rows[:, 0] == 0])


def plant_copy_to_the_cpu():
    return changed_rows(lambda rows: rows.cpu().to(rows.device))


def plant_reduction_in_bf16():
    import torch

    import parallel

    real = parallel.MixedPrecisionPolicy
    return mock.patch.object(
        parallel,
        "MixedPrecisionPolicy",
        lambda **kwargs: real(**kwargs | {"reduce_dtype": torch.bfloat16}),
    )


def plant_loss_in_bf16():
    import torch

    import loss

    return mock.patch.object(loss, "at_least_fp32", lambda x: torch.bfloat16)


def plant_pytorchs_loss():
    import loss

    return mock.patch.object(loss, "takes_kernel", lambda device, dtype: False)


def plant_weights_in_bf16():
    """So that gradients and moments are, too."""
    import parallel

    real = parallel.MPT
    return mock.patch.object(parallel, "MPT", lambda cfg: real(cfg).bfloat16())


def plant_another_operation():
    import torch.nn.functional as F

    real = F.gelu
    return mock.patch.object(F, "gelu", lambda x: real(x) * 1.5)


def plant_casts_in_each_microbatch():
    import parallel

    return mock.patch.object(parallel, "weights_cast_once", lambda *_: contextlib.nullcontext())


def plant_three_gradients():
    import model

    real = model.attention
    return mock.patch.object(
        model, "attention", lambda *qkv, **kw: real(*qkv, **kw | {"qkv": None})
    )


def plant_early_reduction():
    import parallel

    return mock.patch.object(parallel, "before_microbatch", lambda model, cfg, last: None)


PROGRAM = """
import json, sys
from pathlib import Path
from bench import fake_gpu
fake_gpu.pretend(Path(sys.argv[1]))
import test_bench_fake_gpu as test
print(json.dumps([test.found(plant, case) for plant, case in json.loads(sys.argv[2])]))
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Path:
    """The compiled driver."""
    version = tuple(map(int, importlib.metadata.version("torch").split(".")[:2]))
    if version < (2, 13):
        pytest.skip("before torch 2.13, FSDP and DTensor do some things differently")
    try:
        fake_gpu.compiler()
    except UserError as error:
        pytest.skip(str(error))
    return fake_gpu.build(tmp_path_factory.mktemp("driver"))


@pytest.fixture(scope="module")
def run(library):
    """`run((plant, case), ...)`: {(plant, case): what was found}, in one process."""
    environment = rooms_on_path()
    environment["PYTHONPATH"] += f":{ROOT}/tests:{Path(__file__).parent}"

    def start(*pairs) -> dict:
        command = [sys.executable, "-c", PROGRAM, str(library), json.dumps(pairs)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        return dict(zip(pairs, json.loads(done.stdout), strict=True))

    return start


# --- What must hold of a training step

# Kernels of one microbatch of two layers, forward and backward, as on torch 2.13.
MOST = {
    "one rank": {"none": 131, "selective": 187, "full": 195},
    "DDP": {"none": 148, "selective": 156, "full": 164},
    "another": {"none": 129, "selective": 137, "full": 145},
}


def check_step(case: str, log: dict) -> None:
    """Raise AssertionError if a training step is not as it must be."""
    _, mode, how, execution = case.split(", ")
    check_places(log)
    assert not log["to the host"]
    assert not log["to the device"]
    check_dtypes(log)
    assert not log["joined"]  # attention makes dq, dk and dv in one tensor
    assert log["collectives"] == collectives_of(mode)
    if how == "none":  # blocks that are recomputed cast again, to save memory
        once = 3 * LAYERS if mode == "one rank" else 0  # FSDP casts before it gathers
        assert log["weight casts"] == once
    assert not log["logits in fp32"]
    assert len(log["output layer's gradients"]) == MICROBATCHES  # one chunk each, in one piece
    again = 2 if how == "full" else 1  # selective keeps the outputs of attention
    assert log["attention"] == again * MICROBATCHES * LAYERS
    if execution == "compiled":
        assert (log["graphs"], log["graph breaks"]) == (1, [])  # one for all layers
    else:
        assert log["per microbatch"] <= MOST.get(mode, MOST["another"])[how]


def check_places(log: dict) -> None:
    """What holds of every run on a GPU."""
    assert not log["read-backs"]
    assert not log["across devices"]
    assert not log["on the host"]
    assert not log["cut short"]


def check_dtypes(log: dict) -> None:
    assert log["adam"] == ["float32"]  # weights, gradients, moments
    assert "bfloat16" not in log["optimizer"]  # the loss, the norm, the clipping
    assert log["loss"] == ["float32"]
    reduced = [name for name in log["collectives"] if not name.startswith("all-gather")]
    assert not [name for name in reduced if "bfloat16" in name]


def collectives_of(mode: str) -> dict:
    gathers, scatters, reductions = PER_STEP[mode]
    expected = {"all-gather bfloat16": gathers, "reduce-scatter float32": scatters}
    if mode != "one rank":
        expected["all-reduce int64"] = 1  # tokens and hash
        # the loss, and the norm over the ranks of a shard (DDP: over one)
        expected["all-reduce float32"] = reductions + 2
    return {name: n for name, n in expected.items() if n}


@pytest.mark.slow
def test_a_sharded_step_stays_on_the_gpu_and_never_waits(run):
    case = "train step, FULL_SHARD, selective, eager"
    check_step(case, run(("nothing", case))["nothing", case])


# {planted fault: a case that it breaks, what the check then says}
FAULTS = {
    "item": ("FULL_SHARD, none", "assert not.*_local_scalar_dense.*at tests/bench/test_bench_fake"),
    "mask_on_the_cpu": ("FULL_SHARD, none", "assert not.*index_put_.*bool"),
    "boolean_index": ("one rank, none", "assert not.*aten::index"),
    "copy_to_the_cpu": ("one rank, none", "assert not.*_to_copy"),
    "reduction_in_bf16": ("FULL_SHARD, none", "assert not.*reduce-scatter bfloat16"),
    "loss_in_bf16": ("one rank, none", "'bfloat16'"),
    "pytorchs_loss": ("one rank, none", "assert not.*_to_copy.bfloat16"),
    "weights_in_bf16": ("one rank, none", "'bfloat16'"),
    "another_operation": ("one rank, none", "<= 131"),
    "casts_in_each_microbatch": ("one rank, none", "assert 12 == 6"),
    "three_gradients": ("FULL_SHARD, none", "assert not.*aten::cat.*SplitWithSizesBackward0"),
    "early_reduction": ("ZERO1, none", "'reduce-scatter float32': 6"),
}
PLANTED = {fault: f"train step, {words[0]}, eager" for fault, words in FAULTS.items()}


@pytest.fixture(scope="module")
def logs(run) -> dict:
    """All other cases, in one process."""
    sound = [("nothing", case) for case in STEPS + OTHERS + VARIANTS + MICROBATCHED]
    return run(*sound, *PLANTED.items())


@pytest.mark.slow
@pytest.mark.parametrize("case", STEPS)
def test_a_step_stays_on_the_gpu_and_never_waits(logs, case):
    check_step(case, logs["nothing", case])


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(logs, fault):
    case = PLANTED[fault]
    with pytest.raises(AssertionError, match=FAULTS[fault][1]):
        check_step(case, logs[fault, case])


@pytest.mark.slow
@pytest.mark.parametrize("case", ACCUMULATED)
def test_weights_are_cast_once_however_many_microbatches_there_are(logs, case):
    found = [logs["nothing", f"train step, {case}, ALiBi, {n}"] for n in (1, 2, 4)]
    assert [log["weight casts"] for log in found] == [ACCUMULATED[case] * LAYERS * 3] * 3
    if "compiled" in case:
        assert [log["graphs"] for log in found] == [1, 1, 1]


# --- The other runs


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["one rank", "FULL_SHARD"])
def test_evaluation_waits_once_at_its_end(logs, mode):
    log = logs["nothing", f"evaluation, {mode}, none, eager"]
    passes = 2
    assert not log["across devices"]
    assert not log["to the host"]
    assert len(log["to the device"]) == 2 * passes  # ids and labels
    # rows become ids and labels there, before they are sent
    of_rows = ("lt", "bitwise_not", "scalar_tensor", "where", "index_put_", "clone")
    others = [op for op in log["on the host"] if not any(name in op for name in of_rows)]
    assert not others
    assert len(log["read-backs"]) == 2  # loss and tokens, which are returned
    assert all("_local_scalar_dense" in op for op in log["read-backs"])
    assert log["loss"] == ["float32"]
    assert not log["logits in fp32"]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["one rank", "FULL_SHARD"])
def test_scoring_waits_once_a_batch(logs, mode):
    log = logs["nothing", f"scoring, {mode}, none, eager"]
    batches = 2  # with prefixes, and without
    assert not log["across devices"]
    assert not log["read-backs"]
    assert not log["cut short"]
    assert len(log["to the host"]) == batches  # the scores
    assert all("evaluation/score.py" in op for op in log["to the device"])  # ids, labels, padding
    assert log["loss"] == ["float32"]


@pytest.mark.slow
def test_generation_stays_on_the_gpu(logs):
    log = logs["nothing", "generation, one rank, none, eager"]
    check_places(log)
    assert not log["to the host"] + log["to the device"]
    assert log["operations"] > 100


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["one rank", "FULL_SHARD"])
def test_what_a_checkpoint_stages_is_not_touched_before(logs, mode):
    assert logs["nothing", f"staging, {mode}, none, eager"]["operations"] == 0


@pytest.mark.slow
def test_a_trial_waits_only_for_the_end_of_its_steps(logs):
    log = logs["nothing", "trial, one rank, none, eager"]
    assert not log["across devices"]
    assert not log["on the host"]
    assert not log["to the host"] + log["to the device"]
    assert len(log["read-backs"]) == 2
    assert all("lifecycle/microbatch.py" in op for op in log["read-backs"])
    check_dtypes(log)


@pytest.mark.slow
@pytest.mark.parametrize("case", VARIANTS)
def test_every_kind_of_model_runs_there(logs, case):
    log = logs["nothing", case]
    assert not log["read-backs"] + log["across devices"]
    assert not log["cut short"]
    if "scoring" not in case:
        assert not log["on the host"] + log["to the host"] + log["to the device"]
    if "train step" in case:
        check_dtypes(log)
        assert log["collectives"] == collectives_of("FULL_SHARD")


# --- The program


def test_bad_input_is_one_clear_line(monkeypatch):
    with pytest.raises(UserError, match="ranks must be from 1 to 1,000,000, not 0"):
        fake_gpu.main(["--ranks=0"])
    with pytest.raises(UserError, match="before torch is imported"):
        import torch  # noqa: F401

        fake_gpu.pretend()
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CXX", "/nowhere/g++")
    with pytest.raises(UserError, match=r"install g\+\+ .*, or set CXX"):
        fake_gpu.compiler()


def test_a_compiler_that_fails_is_one_clear_line(monkeypatch, tmp_path):
    wrong = tmp_path / "compiler"
    wrong.write_text("#!/bin/sh\necho 'x.h:1:2: error: no such thing' >&2\nexit 1\n")
    wrong.chmod(0o755)
    monkeypatch.setenv("CXX", str(wrong))
    with pytest.raises(UserError, match="cannot compile fake_gpu.cpp: x.h:1:2: error: no such"):
        fake_gpu.build(tmp_path)


@pytest.mark.parametrize(
    "model_settings, settings, message",
    [
        ({}, {"global_batch_size": 7}, "global_batch_size 7 is not a multiple of the 2"),
        ({}, {"microbatch_size": "auto"}, "no memory to try it in: set --microbatch_size=8"),
        ({"max_seq_len": 8}, {}, "max_seq_len 8 is below 16"),
    ],
)
def test_settings_that_no_run_can_have_are_one_line(model_settings, settings, message):
    from bench import fake_runs

    with pytest.raises(UserError, match=message):
        fake_runs.run_all(MPTConfig(**model_settings), TrainConfig(**settings), ranks=2)


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["", "--json"])
def test_the_program_prints_a_table_or_json(python, library, flag):
    shape = "--d_model=64 --n_heads=4 --n_layers=1 --vocab_size=512 --max_seq_len=32"
    flags = [*shape.split(), "--ranks=2", "--global_batch_size=4", "--microbatch_size=2"]
    done = python(*flags, *flag.split(), program="bench fake_gpu")
    assert done.returncode == 0, done.stderr
    if not flag:
        lines = done.stdout.splitlines()
        assert lines[1].split()[:2] == ["train", "step"]
        assert any(line.split() == ["reduce-scatter", "2", "float32"] for line in lines)
        return
    rows = json.loads(done.stdout)["train step"]
    (adam,) = [row for row in rows if row["name"] == "aten::_fused_adamw_"]
    assert (adam["part"], adam["devices"], adam["times"]) == ("optimizer", ["cuda"], 1)


@pytest.mark.slow
def test_a_grid_of_tensor_ranks_and_stages_does_not_wait_for_the_gpu(library):
    """Rank 0 of tp 2 x pp 2 x dp 2, by the program: in the step nothing is read back or moved."""
    settings = "--ranks=8 --tp=2 --pp=2 --sharding=ZERO1 --global_batch_size=32 --compile=False"
    command = [sys.executable, "-m", "bench", "fake_gpu", "configs/demo.py", *settings.split()]
    done = subprocess.run(command, cwd=ROOT, env=rooms_on_path(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    (step,) = [line for line in done.stdout.splitlines() if line.startswith("train step  ")]
    operations, *waits = map(int, step.removeprefix("train step").replace(",", "").split())
    assert operations > 300 and waits == [0] * 5
