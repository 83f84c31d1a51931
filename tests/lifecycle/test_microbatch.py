"""lifecycle/microbatch.py: what fits by the formula, and what is on record after too much."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import processes
from config import MPTConfig, TrainConfig
from lifecycle import microbatch
from planning import memory
from program import UserError, out_of_memory, user_error

CPU = torch.device("cpu")
SMALL = MPTConfig(d_model=32, n_heads=2, n_layers=1, max_seq_len=16, vocab_size=64)


# -------------------------------------------------------------------------------------------------
# Which errors are about memory


def error_of(function):
    try:
        function()
    except Exception as error:
        return error


def test_the_cpu_s_want_of_memory_is_known():
    assert out_of_memory(error_of(lambda: torch.empty(2**48)))
    assert out_of_memory(error_of(lambda: bytearray(2**48)))


@pytest.mark.gpu
def test_an_accelerator_s_want_of_memory_is_known():
    assert out_of_memory(error_of(lambda: torch.empty(2**48, device="cuda")))


# An accelerator's error after it is launched; torch before 2.8 has RuntimeError instead.
Accelerator = getattr(torch, "AcceleratorError", RuntimeError)
NCCL = "NCCL error in: NCCLUtils.cpp:77, unhandled cuda error, NCCL version 2.27.3\nLast error:\n"


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ..."),
        Accelerator("CUDA error: out of memory\nCUDA kernel errors might be ..."),
        Accelerator("HIP error: hipErrorOutOfMemory"),
        dist.DistBackendError(NCCL + "Failed to CUDA calloc async 608 bytes"),
        dist.DistBackendError(NCCL + "Cuda failure 2 'out of memory'"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
        RuntimeError("rocblas_status_memory_error"),
        RuntimeError("MPS backend out of memory (MPS allocated: 9 GB)"),
    ],
    ids=lambda error: str(error)[:40],
)
def test_every_library_s_want_of_memory_is_known_and_no_lost_rank(error):
    assert out_of_memory(error) and not processes.is_lost(error)
    assert str(user_error(error)).startswith("out of memory (")


@pytest.mark.parametrize(
    "error",
    [
        ValueError("can't allocate memory"),
        UserError("out of memory at step 3"),
        Accelerator("CUDA error: an illegal memory access was encountered"),
        dist.DistBackendError(NCCL + "socketProgress: Connection closed by remote peer"),
        dist.DistStoreError("wait timeout after 5000ms"),
        RuntimeError("out of resource: shared memory, Required: 131072, Hardware limit: 101376"),
        error_of(lambda: torch.ones(2) @ torch.ones(3)),
    ],
    ids=lambda error: str(error)[:40],
)
def test_other_errors_are_not_about_memory(error):
    assert not out_of_memory(error)
    assert processes.is_lost(error) == isinstance(error, dist.DistError)


# -------------------------------------------------------------------------------------------------
# The record


def fit(world, cfg, model_cfg=SMALL, precision="fp32"):
    return microbatch.fit(model_cfg, cfg, world, precision)


def halve(world, cfg, step=123):
    return microbatch.halve(SMALL, cfg, world, "fp32", step)


def test_half_is_taken_at_the_next_start_under_the_same_circumstances(ranks, tmp_path, capsys):
    cfg = TrainConfig(run_dir=str(tmp_path / "run"), microbatch_size=12, device="cpu")
    pool = ranks(2)
    assert pool(fit, cfg) == [12, 12]
    assert pool(halve, cfg) == [6, 6]  # both at once
    for given, taken in ((12, 6), ("auto", 6), (6, 6), (4, 4)):
        assert pool(fit, replace(cfg, microbatch_size=given)) == [taken, taken]
    assert pool(fit, replace(cfg, sharding="DDP")) == [12, 12]
    assert ranks(1)(fit, cfg) == [12]
    assert pool(halve, replace(cfg, microbatch_size=6)) == [3, 3]
    assert pool(fit, cfg) == [3, 3]
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["microbatch.json"]
    microbatch.main([cfg.run_dir])
    assert capsys.readouterr().out.startswith("microbatch 3, out of memory at step 123 on rank ")


def test_half_of_one_says_what_else_helps(tmp_path):
    world = processes.World(3, 4, 3, 4, CPU)
    cfg = TrainConfig(run_dir=str(tmp_path / "run"), microbatch_size=1)
    with pytest.raises(UserError, match="step 123 on rank 3 .*activation_checkpointing.*sharding"):
        halve(world, cfg)
    assert not (tmp_path / "run").exists()


RECORDS = {
    "a record that is none": '[["microbatch_size", 4]]',
    "a size of zero": '[{"microbatch_size": 0, "reason": "it fits", "circumstances": {}}]',
}


@pytest.mark.parametrize("kind", RECORDS)
def test_a_damaged_record_is_named(tmp_path, kind):
    path = tmp_path / "microbatch.json"
    path.write_text(RECORDS[kind])
    world, cfg = processes.World(0, 1, 0, 1, CPU), TrainConfig(run_dir=str(tmp_path))
    for use in (lambda: microbatch.main([str(tmp_path)]), lambda: halve(world, cfg)):
        with pytest.raises(UserError, match=f"^{path} is damaged .*: delete it$"):
            use()
    assert path.read_text() == RECORDS[kind]


def test_what_is_on_record_of_other_circumstances_stays(tmp_path):
    """Each is halved in turn: its own record is replaced, and the others stay as they are."""
    cfg = TrainConfig(run_dir=str(tmp_path), microbatch_size=16)
    adapted = replace(cfg, init_from="base", lora_rank=4)
    world = processes.World(0, 2, 0, 2, CPU)
    starts = {
        "as it is": (SMALL, cfg, world, "fp32"),
        "sharding": (SMALL, replace(cfg, sharding="DDP"), world, "fp32"),
        "checkpointing": (SMALL, replace(cfg, activation_checkpointing="full"), world, "fp32"),
        "tensor ranks": (SMALL, replace(cfg, tp=2), world, "fp32"),
        "stages": (SMALL, replace(cfg, pp=2), world, "fp32"),
        "adapters": (SMALL, adapted, world, "fp32"),
        "adapters of another rank": (SMALL, replace(adapted, lora_rank=8), world, "fp32"),
        "fewer adapters": (SMALL, replace(adapted, lora_targets="Wqkv"), world, "fp32"),
        "batch": (SMALL, replace(cfg, global_batch_size=32), world, "fp32"),
        "ranks": (SMALL, cfg, replace(world, global_size=4), "fp32"),
        "nodes": (SMALL, cfg, replace(world, local_size=1), "fp32"),
        "precision": (SMALL, cfg, world, "bf16"),
        "model": (replace(SMALL, n_layers=2), cfg, world, "fp32"),
    }
    for n_started, (model_cfg, settings, ranks, precision) in enumerate(starts.values(), 1):
        for size in (16, 8):
            asked = replace(settings, microbatch_size=size)
            microbatch.halve(model_cfg, asked, ranks, precision, step=7)
        records = microbatch.read(tmp_path / "microbatch.json")
        assert [record["microbatch_size"] for record in records] == [4] * n_started
    recorded = [record["circumstances"] for record in records]
    assert all(microbatch.circumstances_of(*start) in recorded for start in starts.values())


# -------------------------------------------------------------------------------------------------
# The formula


MODEL = MPTConfig(d_model=1024, n_heads=16, n_layers=8, max_seq_len=1024, attn_impl="sdpa")
LAYOUTS = {
    "one rank": (1, {}),
    "shards of a node": (4, {"sharding": "HYBRID_SHARD"}),
    "tensor ranks and stages": (8, {"tp": 2, "pp": 2}),
    "adapters": (2, {"init_from": "base", "lora_rank": 4}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_auto_is_the_largest_that_fits_by_the_formula(layout):
    size, settings = LAYOUTS[layout]
    cfg = TrainConfig(global_batch_size=512, microbatch_size="auto", **settings)
    world = processes.World(0, size, 0, 2, CPU, 0, size // (cfg.tp * cfg.pp))
    sized = replace(cfg, device="cpu", shard_size=2)

    def peak(n_rows):
        rows = replace(sized, microbatch_size=n_rows)
        return memory.bytes_by_part(MODEL, rows, size, "bf16")["peak"]

    for wanted in (16, 2):
        n_bytes = 1.001 * peak(wanted) / memory.ROOM
        found, why = microbatch.planned(MODEL, cfg, world, "bf16", n_bytes)
        assert found == wanted and "planning.memory" in why
    with pytest.raises(UserError, match="activation_checkpointing.*--microbatch_size=1"):
        microbatch.planned(MODEL, cfg, world, "bf16", 0.9 * peak(1))


def test_stages_get_four_microbatches_each():
    """Of 16 rows a rank, on two stages: with larger ones the stages would wait for longer."""
    cfg = TrainConfig(global_batch_size=32, microbatch_size="auto", tp=2, pp=2)
    world = processes.World(0, 8, 0, 2, CPU, 0, 2)
    assert microbatch.planned(MODEL, cfg, world, "bf16", 1e12)[0] == 2


def test_scores_that_attention_keeps_are_counted():
    cfg = TrainConfig(global_batch_size=512, microbatch_size="auto")
    world = processes.World(0, 1, 0, 1, CPU)
    sizes = {
        impl: microbatch.planned(replace(MODEL, attn_impl=impl), cfg, world, "fp32", 40e9)[0]
        for impl in ("reference", "auto", "sdpa")
    }
    assert sizes["reference"] == sizes["auto"] < sizes["sdpa"]


def test_half_of_the_memory_of_a_machine_is_shared_by_its_ranks(ranks):
    alone, one_of_two = ranks(1)(microbatch.memory_of_a_rank), ranks(2)(microbatch.memory_of_a_rank)
    assert one_of_two == [alone[0] / 2] * 2
    assert 1e8 < alone[0] < 1e14
