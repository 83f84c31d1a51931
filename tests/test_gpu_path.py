"""The GPU's path on a GPU that is not there: devices, dtypes, waits, collectives, operations.

tests/tracing/ pretends that there is a GPU and notes what each run gives to it. Pretending cannot
be undone, so it happens in a process of its own, which runs the cases and prints what it found as
JSON. The tests check that, and that planted faults are found.
"""

import contextlib
import importlib.metadata
import json
import re
import subprocess
import sys
from unittest import mock

import pytest
from conftest import ROOT, rooms_on_path
from tracing import fake_gpu

from config import MPTConfig, TrainConfig

pytestmark = pytest.mark.slow
LAYERS, MICROBATCHES = 2, 2
WIDTH, LENGTH = 64, 32
VOCAB = 3 * 4096  # three slices of the weight's gradient in PyTorch's loss
LOSSES = ("aten::_log_softmax", "mpt::cross_entropy", "mpt::cross_entropy_gradient_")
UNITS = LAYERS + 1  # what FSDP gathers at once: each block, and the rest
STEPS = [f"train step, one rank, {how}, eager" for how in ("none", "selective", "full")]
STEPS += [f"train step, FULL_SHARD, {how}, eager" for how in ("none", "full")]
STEPS += [f"train step, {mode}, none, eager" for mode in ("SHARD_GRAD_OP", "HYBRID_SHARD")]
STEPS += [f"train step, {mode}, none, eager" for mode in ("ZERO1", "DDP")]
STEPS += [f"train step, {mode}, none, compiled" for mode in ("one rank", "ZERO1")]
STEPS += ["train step, FULL_SHARD, full, compiled"]
OTHERS = [f"{run}, FULL_SHARD, none, eager" for run in ("evaluation", "scoring", "staging")]
GENERATION = [f"generation, one rank, none, eager, {model}" for model in ("ALiBi", "grouped heads")]
GRID = "train step, tp 2 x pp 2 x ZERO1, none, eager"
MODELS = {
    "ALiBi": {"alibi": True, "attn_impl": "triton"},
    "grouped heads": {"rope": True, "kv_n_heads": 2, "qk_ln": True},
    "dropout": {"emb_pdrop": 0.1, "attn_pdrop": 0.1, "resid_pdrop": 0.1},
    "untied": {
        "tie_word_embeddings": False,
        "no_bias": True,
        "clip_qkv": 6.0,
        "logit_scale": 0.5,
        "kv_n_heads": 1,
    },
}
VARIANTS = [
    f"train step, FULL_SHARD, none, eager, {model}"
    for model in ("grouped heads", "dropout", "untied")
]

WEIGHTS = [(192, 64), (256, 64), (64, 256)]  # of a block: Wqkv, up_proj, down_proj
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


def setting(mode: str, how: str, execution: str, model: str = "ALiBi"):
    """A small model on one rank, or on one of 8."""
    from tracing.gpu_runs import Setting

    ranks = 1 if mode == "one rank" else 8
    cfg = TrainConfig(
        global_batch_size=ranks * MICROBATCHES * 2,
        microbatch_size=2,
        sharding="DDP" if mode == "one rank" else mode.split()[-1],
        shard_size=4,
        activation_checkpointing=how,
    )
    if mode.startswith("tp 2"):
        cfg.tp, cfg.pp = 2, 2
    model_cfg = MPTConfig(
        d_model=WIDTH,
        n_heads=4,
        n_layers=LAYERS,
        vocab_size=VOCAB,
        max_seq_len=LENGTH,
        **MODELS[model],
    )
    return Setting(model_cfg, cfg, ranks, "aot_eager" if execution == "compiled" else "")


def found(case: str, faults: list[str]) -> dict:
    """Run a case like "train step, ZERO1, none, eager", and say what its trace holds.

    faults: those of `planted` to run it with.
    """
    from torch._dynamo.utils import counters
    from tracing import gpu_runs

    run, *words = case.split(", ")
    counters.clear()
    fake_gpu.Graph.replays.clear()
    with contextlib.ExitStack() as stack:
        for fault in faults:
            stack.enter_context(planted(fault))
        trace = gpu_runs.RUNS[run](setting(*words))
    operations = trace.operations

    def texts(chosen) -> list[str]:
        return [str(op) for op in chosen]

    captured = [op for op in operations if op.part == "captured"]
    of_optimizer = dtypes(op for op in operations if op.part == "optimizer")
    return {
        "read-backs": texts(trace.read_backs()),
        "to the host": texts(trace.transfers(to_host=True)),
        "to the device": texts(trace.transfers(to_host=False)),
        "across devices": texts(trace.across_devices()),
        "on the host": texts(trace.on_the_host()),
        "collectives": trace.collectives(),
        "bf16 in the optimizer": "bfloat16" in of_optimizer,
        "adam": dtypes(op for op in operations if op.name == "aten::_fused_adamw_"),
        "loss": loss_dtypes(trace),
        "weight casts": sum(is_cast_of_a_weight(op) for op in operations),
        "logits in fp32": texts(filter(has_fp32_logits, operations)),
        "attention": trace.counts()["mpt::flash_attention"],
        "joined": texts(op for op in operations if (op.name, op.part) == ("aten::cat", "backward")),
        "operations": len(operations),
        "per microbatch": sum(op.part in ("forward", "backward") for op in operations)
        / MICROBATCHES,
        "cut short": trace.cut_short,
        "captured": texts(captured),
        "captured weight casts": texts(filter(casts_a_weight, captured)),
        "replays": len(fake_gpu.Graph.replays),
        "graphs": counters["stats"]["unique_graphs"],
        "graph breaks": list(counters["graph_break"]),
    }


def is_cast_of_a_weight(op) -> bool:
    """Whether it casts the weight of Wqkv, up_proj or down_proj: no other tensor has its shape."""
    return str(op.cast) == "(torch.float32, torch.bfloat16)" and op.inputs[-1].shape in WEIGHTS


def casts_a_weight(op) -> bool:
    """Whether it casts what may be a weight or a bias: activations have more dimensions.

    The logits have not, and become fp32.
    """
    if not op.cast or not op.cast[0].is_floating_point:
        return False
    return len(op.inputs[-1].shape) <= 2 and op.inputs[-1].shape[-1] != VOCAB - 1


def loss_dtypes(trace) -> list[str]:
    """The dtypes of the tokens' losses (or log-probabilities), and of sums of them."""
    found = set()
    for op in trace.operations:
        sums = [x for x in op.outputs if x.shape == ()] if op.where.startswith("loss.py") else []
        losses = op.outputs if op.name in LOSSES else []
        found |= {str(x.dtype).removeprefix("torch.") for x in [*sums, *losses]}
    return sorted(found)


def has_fp32_logits(op) -> bool:
    """Whether one of the operation's tensors is fp32 and as wide as the vocabulary."""
    specs = op.inputs + op.outputs
    return any(x.shape[1:] == (VOCAB,) and str(x.dtype) == "torch.float32" for x in specs)


def dtypes(operations) -> list[str]:
    """The dtypes of these operations' tensors."""
    return sorted({str(dtype).removeprefix("torch.") for op in operations for dtype in op.dtypes})


def planted(fault: str):
    """A context in which a function of the step is replaced by one with this fault."""
    import torch

    import data
    import loss
    import model
    import optim
    import parallel

    clip, batch_hash = optim.clip_gradients, data.batch_hash
    attention, policy = model.attention, parallel.MixedPrecisionPolicy

    def clear_first(rows):
        rows = rows.clone()
        rows[torch.arange(len(rows)) == 0] = 0  # a mask on the CPU
        return rows

    def hash_of(change):
        return data, "batch_hash", lambda rows, rank: batch_hash(change(rows), rank)

    in_bf16 = {"reduce_dtype": torch.bfloat16}
    module, name, replacement = {
        "item": (optim, "clip_gradients", lambda p, n, limit: clip(p, n, n.item() * limit)),
        "mask_on_the_cpu": hash_of(clear_first),
        "copy_to_the_cpu": hash_of(lambda rows: rows.cpu().to(rows.device)),
        "reduction_in_bf16": (parallel, "MixedPrecisionPolicy", lambda **k: policy(**k | in_bf16)),
        "pytorchs_loss": (loss, "takes_kernel", lambda device, dtype: False),
        "casts_in_each_microbatch": (
            parallel,
            "cast_weights_once",
            lambda *_: contextlib.nullcontext(),
        ),
        "three_gradients": (
            model,
            "attention",
            lambda *qkv, **k: attention(*qkv, **k | {"qkv": None}),
        ),
    }[fault]
    return mock.patch.object(module, name, replacement)


PROGRAM = """
import json, sys
from tracing import fake_gpu
fake_gpu.pretend(sys.argv[1])
import test_gpu_path as test
print(json.dumps([test.found(case, faults) for case, faults in json.loads(sys.argv[2])]))
"""


@pytest.fixture(scope="module")
def logs(tmp_path_factory) -> dict:
    """{case: what was found}, of all cases, in one process; with planted faults: {their words}."""
    version = tuple(map(int, importlib.metadata.version("torch").split(".")[:2]))
    if version < (2, 13):
        pytest.skip("before torch 2.13, FSDP and DTensor do some things differently")
    if not fake_gpu.compiler():
        pytest.skip("a GPU that is not there needs a C++ compiler")
    library = fake_gpu.build(tmp_path_factory.mktemp("driver"))
    environment = rooms_on_path()
    environment["PYTHONPATH"] += f":{ROOT}/tests"
    names = [*STEPS, *OTHERS, *GENERATION, *VARIANTS, GRID, *FAULTS]
    pairs = [(case, []) for case in names[: -len(FAULTS)]]
    pairs += [(case_of(words), words.split()[1:]) for words in FAULTS]
    command = [sys.executable, "-c", PROGRAM, str(library), json.dumps(pairs)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip(names, json.loads(done.stdout), strict=True))


# --- What must hold of a training step

# Kernels of one microbatch of two layers, forward and backward, as on torch 2.13.
MOST = {
    "one rank": {"none": 131, "selective": 187, "full": 195},
    "DDP": {"none": 148},
    "another": {"none": 129, "full": 145},
}
# What holds of every run on a GPU.
STAYS = {"read-backs": [], "across devices": [], "on the host": [], "cut short": False}
MOVES_NOTHING = {"to the host": [], "to the device": []}
IN_FP32 = {
    "adam": ["float32"],  # weights, gradients, moments
    "bf16 in the optimizer": False,  # the loss, the norm, the clipping
    "loss": ["float32"],
}


def problems(log: dict, must: dict) -> list[str]:
    """What differs from what must be, a line each."""
    return [f"{name}: {log[name]}" for name, value in must.items() if log[name] != value]


def problems_of_step(case: str, log: dict) -> list[str]:
    """What is not as it must be in a training step."""
    _, mode, how, execution = case.split(", ")
    again = 2 if how == "full" else 1  # selective keeps the outputs of attention
    must = STAYS | MOVES_NOTHING | IN_FP32
    must |= {
        "joined": [],  # attention makes dq, dk and dv in one tensor
        "collectives": collectives_of(mode),
        "logits in fp32": [],
        "attention": again * MICROBATCHES * LAYERS,
    }
    if how == "none":  # blocks that are recomputed cast again, to save memory
        must["weight casts"] = 3 * LAYERS if mode == "one rank" else 0  # FSDP: before it gathers
    if execution == "compiled":
        must |= {"graphs": 1, "graph breaks": []}  # one for all layers
        return problems(log, must)
    most = MOST.get(mode, MOST["another"])[how]
    too_many = log["per microbatch"] > most
    return problems(log, must) + [f"more than {most} kernels"] * too_many


def collectives_of(mode: str) -> dict:
    gathers, scatters, reductions = PER_STEP[mode]
    expected = {"all-gather bfloat16": gathers, "reduce-scatter float32": scatters}
    if mode != "one rank":
        expected["all-reduce int64"] = 1  # tokens and hash
        # the loss, and the norm over the ranks of a shard (DDP: over one)
        expected["all-reduce float32"] = reductions + 2
    if mode == "HYBRID_SHARD":
        expected["broadcast float32"] = 1  # the norm: all copies are clipped by one number
    return {name: n for name, n in expected.items() if n}


# {mode and planted faults: what must be said of each}
FAULTS = {
    "FULL_SHARD item mask_on_the_cpu reduction_in_bf16 three_gradients": [
        "read-backs: .*_local_scalar_dense.*at tests/test_gpu_path",
        "index_put_.*bool",
        "collectives: .*reduce-scatter bfloat16",
        "joined: .*aten::cat.*SplitWithSizesBackward0",
    ],
    "one_rank copy_to_the_cpu pytorchs_loss casts_in_each_microbatch": [
        "to the host: .*_to_copy",
        "logits in fp32: .*_to_copy.bfloat16",
        "weight casts: 12",
    ],
}


def case_of(words: str) -> str:
    """The case of planted faults."""
    return f"train step, {words.split()[0].replace('one_rank', 'one rank')}, none, eager"


@pytest.mark.parametrize("case", STEPS)
def test_a_step_stays_on_the_gpu_and_never_waits(logs, case):
    assert not problems_of_step(case, logs[case])


@pytest.mark.parametrize("words", FAULTS)
def test_planted_faults_are_found(logs, words):
    found = "\n".join(problems_of_step(case_of(words), logs[words]))
    assert not [fault for fault in FAULTS[words] if not re.search(fault, found)], found


def test_a_grid_of_tensor_ranks_and_stages_does_not_wait_for_the_gpu(logs):
    """Rank 0 of tp 2 x pp 2 x dp 2: in the step nothing is read back or moved."""
    assert not problems(logs[GRID], STAYS | MOVES_NOTHING)
    assert logs[GRID]["operations"] > 300


# --- The other runs


def test_evaluation_waits_once_at_its_end(logs):
    log = logs["evaluation, FULL_SHARD, none, eager"]
    must = {"across devices": [], "to the host": [], "loss": ["float32"], "logits in fp32": []}
    assert not problems(log, must)
    passes = 2
    assert len(log["to the device"]) == 2 * passes  # ids and labels
    # rows become ids and labels there, before they are sent
    of_rows = ("lt", "bitwise_not", "scalar_tensor", "where", "index_put_", "clone")
    others = [op for op in log["on the host"] if not any(name in op for name in of_rows)]
    assert not others
    assert len(log["read-backs"]) == 2  # loss and tokens, which are returned
    assert all("_local_scalar_dense" in op for op in log["read-backs"])


def test_scoring_waits_once_a_batch(logs):
    log = logs["scoring, FULL_SHARD, none, eager"]
    must = {"across devices": [], "read-backs": [], "cut short": False, "loss": ["float32"]}
    assert not problems(log, must)
    batches = 2  # with prefixes, and without
    assert len(log["to the host"]) == batches  # the scores
    assert all("evaluation/score.py" in op for op in log["to the device"])  # ids, labels, padding


@pytest.mark.parametrize("case", GENERATION)
def test_generation_stays_on_the_gpu_and_a_step_is_one_replay(logs, case):
    """Seven steps follow the prompt. Nothing is sent, and no weight is cast."""
    must = STAYS | MOVES_NOTHING | {"replays": 7, "captured weight casts": []}
    assert not problems(logs[case], must)
    assert len(logs[case]["captured"]) > 30 and logs[case]["operations"] > 100


def test_what_a_checkpoint_stages_is_not_touched_before(logs):
    assert logs["staging, FULL_SHARD, none, eager"]["operations"] == 0


@pytest.mark.parametrize("case", VARIANTS)
def test_every_kind_of_model_trains_there(logs, case):
    must = STAYS | MOVES_NOTHING | IN_FP32 | {"collectives": collectives_of("FULL_SHARD")}
    assert not problems(logs[case], must)
