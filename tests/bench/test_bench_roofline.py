"""The roofline: what operations cost, which are merged, what they take, and a real step counted.

Costs are counted on real operations, of this CPU or of the meta device. Merging and prices are
checked by hand on small logs. The slow tests run the step on a GPU that is not there.
"""

import contextlib
import json
import subprocess
import sys
from dataclasses import replace
from unittest import mock

import pytest
import torch
from conftest import ROOT, rooms_on_path

import config
import devices
import flops
import fsdp_train
import optim
import processes
from bench import fake_gpu, roofline, step_costs, step_prices
from bench.operations import Operation, Spec
from bench.step_costs import Cost, CostLog, Kernel, Use, eager, fused
from bench.step_prices import DeviceArgs
from config import MPTConfig, TrainConfig, UserError
from model import MPT
from planning import matmuls, step_time

BF16, FP32 = torch.bfloat16, torch.float32


def costs_of(work) -> list[Cost]:
    with CostLog() as log:
        work()
    return log.costs


def cost_of(work) -> Cost:
    (cost,) = costs_of(work)
    return cost


# --- What an operation costs


def test_flops_of_matmuls_by_hand():
    a, b = torch.ones(3, 5), torch.ones(5, 7)
    assert cost_of(lambda: a @ b).flops == 2 * 3 * 5 * 7
    bias, into = torch.ones(7), torch.ones(3, 7)
    assert cost_of(lambda: torch.addmm(bias, a, b)).flops == 2 * 3 * 5 * 7
    assert cost_of(lambda: torch.bmm(a.expand(4, 3, 5), b.expand(4, 5, 7))).flops == 4 * 210
    assert cost_of(lambda: torch.mm(a, b, out=into)).bytes == 4 * (15 + 35 + 21)

    pytest.importorskip("triton")
    from gpu_kernels import cross_entropy

    of_weight = cost_of(lambda: cross_entropy.add_product_(into, a, b))
    assert of_weight.flops == 2 * 3 * 5 * 7
    assert of_weight.bytes == 4 * (21 + 15 + 35 + 21)


def test_an_operator_of_ours_with_flops_must_be_in_a_table(monkeypatch):
    pytest.importorskip("triton")
    from gpu_kernels import cross_entropy

    monkeypatch.setattr(step_costs, "MATMULS", {"aten::mm"})
    total = torch.ones(3, 7)
    with pytest.raises(UserError, match="mpt::add_product_ has FLOPs: add it to MATMULS"):
        costs_of(lambda: cross_entropy.add_product_(total, torch.ones(3, 5), torch.ones(5, 7)))


@pytest.mark.parametrize("is_causal", [True, False])
def test_flops_of_attention_by_hand(is_causal):
    B, H, T, D = 2, 3, 64, 16
    q, k, v = torch.ones(3, B, H, T, D, dtype=BF16, device="meta").unbind()
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    out, lse, *_ = flash(q, k, v, 0.0, is_causal)
    pairs = T * (T + 1) // 2 if is_causal else T * T
    assert cost_of(lambda: flash(q, k, v, 0.0, is_causal)).flops == 2 * 2 * B * H * pairs * D

    pytest.importorskip("triton")
    from gpu_kernels import flash_attention  # noqa: F401 (our operators)

    ours, backward = torch.ops.mpt.flash_attention, torch.ops.mpt.flash_attention_backward
    more = (None, None, is_causal, 0.1)
    assert cost_of(lambda: ours(q, k, v, *more)).flops == 2 * 2 * B * H * pairs * D
    cost = cost_of(lambda: backward(out, q, k, v, out, lse, *more))
    assert cost.flops == 5 * 2 * B * H * pairs * D
    assert cost.bytes >= 2 * 8 * B * H * T * D  # do, q, k, v, out, dq, dk, dv


def test_bytes_are_what_is_read_and_written():
    x = torch.ones(10, 8)
    row = torch.ones(8)
    assert cost_of(lambda: x + row).bytes == 4 * (80 + 8 + 80)
    assert cost_of(lambda: x.add_(row)).bytes == 4 * (80 + 8 + 80)
    assert cost_of(lambda: x.bfloat16()).bytes == 6 * 80
    assert cost_of(lambda: x.copy_(row)).bytes == 4 * (80 + 8)  # x is not read
    one = torch.ones(()).expand(10, 8)
    assert cost_of(lambda: x + one).bytes == 4 * (80 + 1 + 80)
    assert not costs_of(lambda: x.view(8, 10).t()[:3])


def test_lookups_and_scatters_touch_only_a_part():
    table, ids = torch.ones(100, 8), torch.tensor([[3], [4]])
    assert cost_of(lambda: table.gather(0, ids)).bytes == 4 * 2 + 8 * 2 + 4 * 2
    embedded = cost_of(lambda: torch.nn.functional.embedding(ids, table))
    assert embedded.bytes == 4 * 16 + 8 * 2 + 4 * 16
    ones = torch.ones(2, 1)
    assert cost_of(lambda: table.scatter_add_(1, ids, ones)).bytes == 4 * (2 + 2 + 2) + 8 * 2


def test_what_is_copied_to_where_it_is_costs_nothing():
    x = torch.ones(4, 8)

    def add_to_a_row():
        x[1] += torch.ones(8)

    assert [cost.operation.name for cost in costs_of(add_to_a_row)] == ["aten::ones", "aten::add_"]


def test_unknown_operators_cost_what_their_schema_says():
    with torch.library._scoped_library("mpt_of_a_test", "DEF") as library:
        library.define("change(Tensor(a!) x, Tensor y) -> Tensor")
        library.impl("change", lambda x, y: x.add_(y).sum(), "CompositeExplicitAutograd")
        x, y = torch.ones(10), torch.ones(10)
        cost = cost_of(lambda: torch.ops.mpt_of_a_test.change(x, y))
    assert (cost.bytes, cost.flops, cost.can_merge) == (4 * (10 + 10 + 10 + 1), 0, False)


def test_adamw_reads_four_numbers_a_parameter_and_writes_three():
    weight = torch.nn.Parameter(torch.ones(1000))
    optimizer = torch.optim.AdamW([weight], fused=True)
    weight.grad = torch.ones(1000)
    (adam,) = [c for c in costs_of(optimizer.step) if c.operation.name == "aten::_fused_adamw_"]
    assert adam.bytes == pytest.approx(28 * 1000, abs=16)
    assert fused([adam])[0].bytes == adam.bytes  # its results are written, though nobody reads them


def step_on_this_cpu(m: MPTConfig, cfg: TrainConfig) -> list[Cost]:
    torch.manual_seed(0)
    model = MPT(m)
    optimizer = optim.build_optimizer(model.parameters(), cfg)
    rows = torch.zeros(cfg.global_batch_size, m.max_seq_len + 1, dtype=torch.long)
    world = processes.World(0, 1, 0, 1, torch.device("cpu"))
    with CostLog() as log:
        fsdp_train.train_step(model, optimizer, rows, 0, cfg, world, "bf16")
    return log.costs


SMALL = MPTConfig(d_model=64, n_heads=4, n_layers=2, vocab_size=512, max_seq_len=32)


def test_a_real_step_has_the_flops_of_the_formulas_and_every_block_its_operations():
    costs = step_on_this_cpu(SMALL, TrainConfig(global_batch_size=4, microbatch_size=2))
    per_token = matmuls.total(matmuls.flops_by_pass(SMALL, matmuls.TrainingSetup()))
    assert sum(cost.flops for cost in costs) == per_token * 4 * 32
    assert {cost.microbatch for cost in costs} == {0, 1, 2}

    linears = {}  # matmuls with weights, of each call of a block
    for cost in costs:
        if cost.block and cost.operation.name in ("aten::addmm", "aten::mm"):
            linears[cost.block] = linears.get(cost.block, 0) + 1
    calls = range(1, 2 * 2 + 1)
    expected = {(call, "forward"): 4 for call in calls} | {(call, "backward"): 8 for call in calls}
    assert linears == expected
    outside = [cost for cost in costs if cost.block is None and cost.operation.name == "aten::gelu"]
    assert not outside
    logits = [cost for cost in costs if cost.operation.where.startswith("loss.py")]
    assert logits and not [cost for cost in logits if cost.block]


# --- Which operations are merged


def made(name: str, reads: str, writes: str, block=(1, "forward"), merges=True) -> Cost:
    """An operation on tensors named by letters, of 100 bytes each."""
    spec = Spec((50,), BF16, "cuda")
    name = name if "::" in name else f"aten::{name}"
    operation = Operation(name, block[1] if block else "forward", (spec,), (spec,), "model.py:1")
    uses = [tuple(Use(ord(letter), 0, 100) for letter in letters) for letters in (reads, writes)]
    return Cost(operation, 0, *uses, block, merges, 1)


def merged(costs: list[Cost]) -> list[tuple[str, int]]:
    """Of each kernel: the names of its operations, and its bytes."""
    kernels = fused(costs)
    assert sorted(c.operation.name for k in kernels for c in k.costs) == sorted(
        c.operation.name for c in costs
    )
    names = ["+".join(c.operation.name.removeprefix("aten::") for c in k.costs) for k in kernels]
    return [(name, kernel.bytes) for name, kernel in zip(names, kernels, strict=True)]


def test_a_chain_reads_and_writes_once():
    costs = [
        made("add", "xy", "a"),
        made("norm", "a", "b"),
        made("scale", "bx", "c"),
        made("mm", "cw", "d", merges=False),
    ]
    # a and b are read in the chain only: it reads x and y, and writes c
    assert merged(costs) == [("add+norm+scale", 300), ("mm", 300)]
    assert sum(kernel.bytes for kernel in eager(costs)) == 300 + 200 + 300 + 300


def test_what_the_backward_reads_is_written():
    costs = [
        made("gelu", "x", "a"),
        made("scale", "a", "b"),
        made("mm", "b", "c", merges=False),
        made("mm'", "a", "d", (1, "backward"), merges=False),
    ]
    assert merged(costs)[0] == ("gelu+scale", 300)


def test_a_matmul_parts_a_sum_from_the_later_sum_that_reads_it():
    costs = [
        made("add", "xy", "a"),
        made("norm", "a", "b"),
        made("mm", "b", "c", merges=False),
        made("add2", "ac", "d"),  # the residual stream goes around the matmul
        made("scale", "d", "e"),
    ]
    assert [names for names, _ in merged(costs)] == ["add+norm", "mm", "add2+scale"]


def test_blocks_passes_and_other_code_are_not_merged():
    for other in ((2, "forward"), (1, "backward"), None):
        names = [n for n, _ in merged([made("a", "x", "y"), made("b", "y", "z", other)])]
        assert names == ["a", "b"]
    outside = [made("a", "x", "y", None), made("b", "y", "z", None)]
    assert len(fused(outside)) == 2


def test_unconnected_operations_are_not_merged():
    costs = [
        made("cast w", "w", "a"),
        made("cast b", "b", "c"),
        made("mm", "ac", "d", merges=False),
    ]
    assert len(fused(costs)) == 3


def test_branches_that_meet_become_one_kernel():
    costs = [made("left", "x", "a"), made("right", "x", "b"), made("add", "ab", "c")]
    assert merged(costs) == [("left+right+add", 200)]


def test_a_bias_gradient_reads_what_was_written():
    costs = [made("gelu_backward", "xy", "a"), made("sum", "a", "b"), made("cast", "b", "c")]
    costs.append(made("mm", "a", "d", merges=False))
    assert merged(costs) == [("gelu_backward", 300), ("sum+cast", 200), ("mm", 200)]


def test_views_of_one_tensor_are_read_apart():
    cost = made("cat", "", "z")
    q, k = (Use(1, offset, 100) for offset in (0, 50))
    assert fused([replace(cost, reads=(q, k, q))])[0].bytes == 300


# --- What they take

H100 = devices.by_name("h100")
ONE = TrainConfig(global_batch_size=2, microbatch_size=2)


def prices_of(m=SMALL, cfg=ONE, **args) -> step_prices.Prices:
    return step_prices.prices(m, cfg, DeviceArgs(**{"device": "h100", **args}))


def test_a_kernel_takes_as_long_as_its_flops_or_its_bytes():
    m = replace(SMALL, d_model=2048, max_seq_len=2048)
    prices = prices_of(m)
    small = made("aten::mm", "ab", "c", merges=False)
    assert prices.seconds(Kernel((small,), 300)) == pytest.approx(300 / 3350e9)
    large = replace(small, flops=1e12)
    assert prices.seconds(Kernel((large,), 300)) == pytest.approx(1e12 / prices.matmul)
    assert 0.6 * 989.4e12 < prices.matmul < 0.8 * 989.4e12
    attention = replace(made("mpt::flash_attention", "qkv", "o", merges=False), flops=1e12)
    rate = step_time.Constants().attention_h100 * 989.4e12
    assert prices.seconds(Kernel((attention,), 300)) == pytest.approx(1e12 / rate)
    half = prices_of(m, attention_share=0.5)
    assert half.seconds(Kernel((attention,), 300)) == pytest.approx(1e12 / (0.5 * 989.4e12))


def test_the_device_waits_only_if_its_queue_is_empty():
    assert step_prices.waiting([1e-6] * 100, 5e-6) == pytest.approx(400e-6, rel=0.02)
    assert step_prices.waiting([6e-6] * 100, 5e-6) == 0
    # one long kernel covers the launches of 100 short ones
    assert step_prices.waiting([600e-6] + [1e-6] * 100, 5e-6) == 0
    assert step_prices.waiting([200e-6] + [1e-6] * 100, 5e-6) == pytest.approx(205e-6, rel=0.02)


def test_collectives_cost_what_the_planner_says():
    cfg = TrainConfig(global_batch_size=16, microbatch_size=2, sharding="FULL_SHARD")
    prices = prices_of(cfg=cfg, ranks=8)
    whole, shard = Spec((8000,), FP32, "cuda"), Spec((1000,), FP32, "cuda")

    def seconds(name, *inputs):
        operation = Operation(f"c10d::{name}", "backward", inputs, (), "x.py:1")
        return prices.seconds(Kernel((Cost(operation, 0, (), ()),), 0))

    ring = prices.plan.ring(32_000, 8, 1, 1)
    assert ring > 7 * step_time.Constants().hop
    assert seconds("_allgather_base_", whole, shard) == pytest.approx(ring)
    assert seconds("_reduce_scatter_base_", shard, whole) == pytest.approx(ring)
    assert seconds("allreduce_", whole) == pytest.approx(2 * ring)


def test_merged_operations_share_the_seconds_of_their_kernel():
    prices = prices_of()
    kernels = fused(
        [made("norm", "xy", "a"), made("cast", "a", "b"), made("mm", "b", "c", merges=False)]
    )
    shares = step_prices.seconds_by_operation(kernels, prices)
    norm, cast, _ = (seconds for _, seconds in shares)
    assert norm + cast == pytest.approx(300 / 3350e9)
    assert norm == pytest.approx(1.5 * cast)


def test_middle_microbatches_are_counted_once_and_repeated():
    cfg = TrainConfig(global_batch_size=8 * 23, microbatch_size=4)
    short, times = roofline.shortened(cfg, ranks=8)  # 23 rows: 4 4 4 4 4 3
    assert (short.global_batch_size, times) == (8 * 11, 4)  # 4 4 3, the second one four times
    assert roofline.shortened(short, ranks=8) == (short, 1)
    kernels = [Kernel((replace(made("a", "x", "y"), microbatch=n),), n) for n in (0, 1, 2, 2, 3)]
    repeated = roofline.repeated(kernels, 2)
    assert [kernel.bytes for kernel in repeated] == [0, 1, 2, 2, 2, 2, 3]


PARTS = {
    ("aten::addmm", "forward", "model.py:110", 1): "block matmuls",
    ("aten::mm", "backward", "AddmmBackward0", 1): "block matmuls",
    ("aten::mm", "forward", "loss.py:130", 1): "loss matmuls",
    ("mpt::add_product_", "forward", "loss.py:180", 1): "loss matmuls",
    ("aten::exp_", "forward", "loss.py:140", 0): "loss, the rest",
    ("mpt::cross_entropy", "forward", "gpu_kernels/cross_entropy.py:9", 0): "loss, the rest",
    ("mpt::flash_attention", "forward", "gpu_kernels/flash_attention.py:9", 1): "attention forward",
    ("mpt::flash_attention_backward", "backward", "?", 1): "attention backward",
    ("aten::native_layer_norm_backward", "backward", "NativeLayerNorm", 0): "LayerNorm",
    ("aten::gelu_backward", "backward", "GeluBackward0", 0): "GELU",
    ("aten::sum", "backward", "AddmmBackward0", 0): "bias gradients",
    ("aten::_fused_adamw_", "optimizer", "optim.py:66", 0): "optimizer",
    ("c10d::allreduce_", "optimizer", "parallel.py:330", 0): "collectives",
    ("fsdp::chunk_cat", "backward", "RegisterPostBackward", 0): "FSDP's copies",
    ("aten::add", "forward", "model.py:179", 0): "other",
}


@pytest.mark.parametrize("case", PARTS, ids=lambda case: case[0])
def test_each_operation_has_its_part(case):
    name, of_step, where, work = case
    spec = Spec((50,), BF16, "cuda")
    operation = Operation(name, of_step, (spec,), (spec,), where)
    assert roofline.part_of(Cost(operation, work, (), ())) == PARTS[case]
    assert PARTS[case] in roofline.PARTS


def test_a_cast_is_a_cast():
    spec = Spec((50,), BF16, "cuda")
    operation = Operation("aten::_to_copy", "forward", (spec,), (spec._replace(dtype=FP32),), "m:1")
    assert roofline.part_of(Cost(operation, 0, (), ())) == "casts"


def test_a_step_that_differs_from_the_planner_names_what_differs():
    planned = {"matmuls": 0.1, "attention": 0.05, "memory-bound": 0.05, "step": 0.2}
    row = {"seconds": 0.09, "times": 2, "bytes": 1e9, "flops": 1e12, "where": "model.py:5"}
    operations = [
        row | {"operation": "aten::mm", "part": "block matmuls"},
        row | {"operation": "aten::gelu", "part": "GELU"},
    ]
    near = {"planned": planned, "counted": planned | {"step": 0.229, "matmuls": 0.129}}
    assert len(roofline.planner_lines(near, operations)) == 1
    far = {"planned": planned, "counted": planned | {"step": 0.231, "matmuls": 0.131}}
    first, part, operation = roofline.planner_lines(far, operations)
    assert "200.0 ms" in first and "1.16 times" in first
    assert part.strip() == "matmuls: 131.0 ms here, 100.0 ms there"
    assert "mm at model.py:5" in operation


# --- A night's measurements

MACHINE = {
    "device": "NVIDIA H100 80GB HBM3",
    "ranks": 1,
    "nodes": 1,
    "matmul_tflops": {"bf16": {"8192": 700.0}},
    "memory_gbs": 3000.0,
    "collectives_gbs": {},
    "latency_us": {},
}
GPU = {"name": "NVIDIA H100 80GB HBM3", "known_as": "H100 SXM"}


def cell(length: int, tflops: float, **more) -> dict:
    rates = {"forward, TFLOP/s": tflops, "backward, TFLOP/s": tflops / 2}
    shape = {"contestant": "ours, ALiBi", "head_dim": 16, "length": length, "missing": ""}
    return shape | rates | more


@pytest.fixture
def night(tmp_path):
    """A folder as `bench first_night` leaves it, as far as it is read here."""
    cells = [cell(1024, 100.0), cell(4096, 400.0), cell(2048, 900.0, missing="out of memory")]
    cells.append(cell(2048, 800.0, head_dim=128))
    (tmp_path / "facts.json").write_text(json.dumps({"gpus": [GPU]}))
    (tmp_path / "machine.json").write_text(json.dumps(MACHINE))
    (tmp_path / "attention_h100.json").write_text(json.dumps({"cells": cells}))
    return tmp_path


def test_what_a_night_measured_replaces_the_datasheet(night):
    m = replace(SMALL, max_seq_len=2048)
    prices = prices_of(m, device="auto", night=str(night))
    assert prices.bandwidth == 3000e9
    assert prices.matmul < 700e12
    assert prices.matmul / prices_of(m).matmul == pytest.approx(700 / (0.8 * 989.4))
    assert prices.flops_rate("mpt::flash_attention") == 100e12  # 1,024 is nearest, and fits
    assert prices.flops_rate("mpt::flash_attention_backward") == 50e12
    not_measured = "aten::_scaled_dot_product_flash_attention"
    assert prices.flops_rate(not_measured) == prices_of(m).attention
    sources = sources_of(prices)
    here = f"measured in {night}"
    assert sources["matmuls"] == sources["memory"] == sources["ours, ALiBi, backward"] == here
    assert sources["attention, other kernels"] == "planning/step_time.py"


def sources_of(prices: step_prices.Prices) -> dict[str, str]:
    """{rate: its source}, as printed."""
    lines = step_prices.lines(prices)[1:]
    return {line[2:42].strip(): line.rpartition("  ")[2] for line in lines}


def test_what_was_not_measured_is_not_called_measured(night):
    (night / "attention_h100.json").unlink()
    sources = sources_of(prices_of(night=str(night)))
    assert sources["attention"] == "planning/step_time.py"
    assert sources["memory"] == f"measured in {night}"
    sources = sources_of(prices_of(night=str(night), attention_share=0.5))
    assert sources["attention"] == "--attention_share"
    sources = sources_of(prices_of())
    assert (sources["matmuls"], sources["memory"]) == ("devices.py", "devices.py")
    assert sources_of(prices_of(device="b200"))["matmuls"] == "a guess of planning/step_time.py"


def test_without_a_figure_for_cudnn_it_takes_that_of_flash_attention(night):
    cells = [cell(1024, 300.0, contestant="SDPA flash, no bias")]
    (night / "attention_h100.json").write_text(json.dumps({"cells": cells}))
    cudnn = "aten::_scaled_dot_product_cudnn_attention"
    assert prices_of(night=str(night)).flops_rate(cudnn) == 300e12
    cells.append(cell(1024, 500.0, contestant="SDPA cuDNN, no bias"))
    (night / "attention_h100.json").write_text(json.dumps({"cells": cells}))
    prices = prices_of(night=str(night))
    assert prices.flops_rate(cudnn) == 500e12
    assert prices.flops_rate(f"{cudnn}_backward") == 250e12


def test_a_night_that_does_not_fit_is_one_clear_line(night, tmp_path):
    def refused(message, **args):
        with pytest.raises(UserError, match=message):
            prices_of(night=str(night), **args)

    refused("is of H100 SXM: leave out --device=mi250", device="mi250")
    (night / "attention_h100.json").write_text('{"cells": [{}]}')
    refused("attention_h100.json is not of bench attention", device="auto")
    (night / "machine.json").unlink()
    refused("no file '.*machine.json' to calibrate with", device="auto")
    (night / "facts.json").write_text(json.dumps({"gpus": [GPU | {"known_as": None}]}))
    refused("which devices.py does not know", device="auto")
    (night / "facts.json").write_text('{"gpus": [1]}')
    refused("facts.json is not of bench facts: its gpus have no names", device="auto")
    (night / "facts.json").write_text('{"gpus": []}')
    refused("a night without a GPU", device="auto")
    (night / "facts.json").unlink()
    refused("no facts.json in", device="auto")


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--device=h1000"], "no accelerator 'h1000' in devices.py, did you mean h100"),
        ([], "which device"),
        (["configs/nowhere.py", "--device=h100"], "no config file 'configs/nowhere.py'"),
        (["--device=h100", "--ranks=0"], "ranks must be from 1 to 1,000,000, not 0"),
        (["--device=h100", "--top=-1"], "top must be 0 or more"),
        (["--device=h100", "--attention_share=2"], "attention_share must be from 0 to 1, not 2"),
        (["--device=h100", "--microbatch_size=auto"], "microbatch_size=auto"),
        (["--device=h100", "--ranks=3", "--global_batch_size=8"], "8 is not a multiple of the 3"),
        (["--device=v100"], "no bf16 peak known"),
        (["--device=h100", "--precision=fp32"], "are those of bf16: remove --precision=fp32"),
    ],
)
def test_bad_input_is_one_clear_line(argv, message):
    with pytest.raises(UserError, match=message):
        roofline.main(argv)


def test_without_a_compiler_it_says_so_before_it_waits(monkeypatch, capsys):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CXX", "/nowhere/g++")
    with pytest.raises(UserError, match=r"install g\+\+ .*, or set CXX"):
        roofline.main(["--device=h100", "--microbatch_size=2", "--global_batch_size=2"])
    assert not capsys.readouterr().err


# --- On a GPU that is not there


@pytest.fixture(scope="module")
def compiler():
    """Skips where there is none."""
    try:
        fake_gpu.compiler()
    except UserError as error:
        pytest.skip(str(error))


PROGRAM = """
import json, sys
from bench import fake_gpu
fake_gpu.pretend()
import test_bench_roofline as test
print(json.dumps([test.counted_cases(), test.schedules()]))
"""
CASES = {
    "none": (1, {}, {"alibi": True, "attn_impl": "triton"}),
    "full": (1, {"activation_checkpointing": "full"}, {}),
    "selective": (1, {"activation_checkpointing": "selective"}, {}),
    "FULL_SHARD": (8, {"sharding": "FULL_SHARD"}, {}),
}


def counted_cases() -> dict:
    """{case: {"formula": its FLOPs, "eager, all": [FLOPs, bytes, kernels], ...}}.

    all: of four microbatches; repeated: of three, of which the second stands for two.
    """
    from bench import fake_runs

    found = {}
    for case, (ranks, settings, model) in CASES.items():
        m = replace(SMALL, **model)
        cfg = TrainConfig(global_batch_size=8 * ranks, microbatch_size=2, **settings)
        log = fake_runs.train_step(fake_runs.Setting(m, cfg, ranks), CostLog)
        short, times = roofline.shortened(cfg, ranks)
        short_log = fake_runs.train_step(fake_runs.Setting(m, short, ranks), CostLog)
        setup = matmuls.TrainingSetup(
            "flash", activation_checkpointing=cfg.activation_checkpointing
        )
        formula = matmuls.total(matmuls.flops_by_pass(m, setup)) * 8 * m.max_seq_len
        kinds = {"eager": eager, "fused": fused}
        found[case] = {"formula": formula}
        for name, kind in kinds.items():
            for way, kernels in {
                "all": kind(log.costs),
                "repeated": roofline.repeated(kind(short_log.costs), times),
            }.items():
                figures = [sum(k.flops for k in kernels), sum(k.bytes for k in kernels)]
                found[case][f"{name}, {way}"] = [*figures, len(kernels)]
    return found


def schedules() -> dict | None:
    """{pass: bytes of a block, by our estimate and by Inductor's schedule}; None: another torch.

    Inductor needs a GPU only to compile the kernels that it has planned.
    """
    if not torch.__version__.startswith("2.13"):
        return None  # this is all private there
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._guards import detect_fake_mode
    from torch._inductor import decomposition
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    from bench import fake_runs

    needed = {"warp_size": 32, "max_threads_per_multi_processor": 2048}
    for name, value in needed.items():
        setattr(fake_gpu.Properties, name, value)
    bytes_of = {}

    def planner(name):
        def plan(graph, inputs):
            lowering = GraphLowering(graph, example_inputs=inputs, is_backward=name == "backward")
            nodes = [n.meta["val"] for n in graph.graph.nodes if n.op == "placeholder"]
            with contextlib.ExitStack() as stack:
                stack.enter_context(V.set_fake_mode(detect_fake_mode(nodes)))
                stack.enter_context(V.set_graph_handler(lowering))
                stack.enter_context(V.set_debug_handler(mock.MagicMock()))
                lowering.run(*inputs)
                lowering.init_wrapper_code()
                lowering._update_scheduler()
                bytes_of[f"Inductor, {name}"] = lowering.count_bytes()[0]
            return graph.forward

        return plan

    backend = aot_autograd(
        fw_compiler=planner("forward"),
        bw_compiler=planner("backward"),
        decompositions=decomposition.select_decomp_table(),
        partition_fn=min_cut_rematerialization_partition,
    )
    m = replace(SMALL, d_model=1024, max_seq_len=1024)
    cfg = TrainConfig(global_batch_size=8, microbatch_size=8)
    log = fake_runs.train_step(fake_runs.Setting(m, cfg), CostLog)
    for name in ("forward", "backward"):
        kernels = [k for k in fused(log.costs) if k.costs[0].block == (2, name)]
        bytes_of[f"ours, {name}"] = sum(kernel.bytes for kernel in kernels)
    fake_runs.train_step(fake_runs.Setting(m, cfg, 1, backend))
    return bytes_of


@pytest.fixture(scope="module")
def counted(compiler) -> tuple[dict, dict]:
    """`counted_cases()` and `schedules()`, from a process of their own."""
    environment = rooms_on_path()
    environment["PYTHONPATH"] += f":{ROOT}/tests:{ROOT}/tests/bench"
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.slow
def test_the_compiler_plans_the_bytes_that_are_estimated(counted):
    _, planned = counted
    if planned is None:
        pytest.skip("torch 2.13 makes this schedule without a GPU")
    assert planned["ours, forward"] == pytest.approx(planned["Inductor, forward"], rel=0.01)
    assert planned["ours, backward"] == pytest.approx(planned["Inductor, backward"], rel=0.07)


@pytest.mark.slow
def test_a_step_on_a_gpu_that_is_not_there(counted):
    cases, _ = counted
    for case, found in cases.items():
        assert found["eager, all"][0] == found["fused, all"][0] == found["formula"], case
        # The hash of all rows is the only operation on more or fewer of them.
        assert found["eager, repeated"] == pytest.approx(found["eager, all"], rel=1e-3), case
        assert found["fused, repeated"] == pytest.approx(found["fused, all"], rel=1e-3), case
        assert found["fused, all"][1] < found["eager, all"][1], case
        assert found["fused, all"][2] < 0.9 * found["eager, all"][2], case


@pytest.mark.slow
def test_mpt1b_on_an_h100_by_hand(compiler, python):
    flags = ["--device=h100", "--microbatch_size=8", "--global_batch_size=8", "--json"]
    done = python(ROOT / "configs/mpt1b.py", *flags, program="bench roofline")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    m, cfg = config.load([str(ROOT / "configs/mpt1b.py")], MPTConfig, TrainConfig)
    tokens, width, layers = 8 * 2048, 2048, 24
    weights = 2 * tokens * width * 12 * width * layers  # FLOPs of a forward
    logits = 2 * tokens * width * 50368
    square = 2 * 8 * 2048 * 2049 / 2 * width * layers  # of one matmul of attention
    assert figures["counted_flops"] == {
        "block matmuls": 3 * weights,
        "attention forward": 2 * square,
        "attention backward": 5 * square,
        "loss matmuls": 3 * logits,
    }
    assert figures["model_flops"] == flops.train_flops_per_token(m) * tokens

    for column in (figures["eager"], figures["fused"]):
        parts = column["parts"]
        assert sum(parts.values()) == pytest.approx(column["seconds"])
        assert parts["block matmuls"] == pytest.approx(3 * weights / 756.1e12, rel=1e-3)
        n = flops.n_params(m)
        bytes_of_update = (4 + 8 + 28) * n  # the norm, clipping, Adam
        assert parts["optimizer"] == pytest.approx(bytes_of_update / 3350e9, rel=1e-3)
        rate = tokens / column["seconds"]
        assert column["mfu"] == pytest.approx(flops.mfu(m, rate, 1, 989.4e12))
    residual = 2 * tokens * width  # bytes
    eager_parts, fused_parts = (figures[name]["parts"] for name in ("eager", "fused"))
    gelu = (2 + 3) * 4 * residual * layers / 3350e9
    assert eager_parts["GELU"] == pytest.approx(gelu, rel=1e-3)
    norms = (2 + 3) * residual * (2 * layers + 1) / 3350e9
    assert eager_parts["LayerNorm"] == pytest.approx(norms, rel=0.01)
    for part in ("GELU", "bias gradients"):  # alone between matmuls
        assert fused_parts[part] == pytest.approx(eager_parts[part], rel=0.01)
    for part in ("LayerNorm", "other"):  # merged with the residual stream's sums
        assert 0.5 * eager_parts[part] < fused_parts[part] < 0.9 * eager_parts[part]


@pytest.mark.slow
def test_the_program_prints_a_table(compiler, python):
    shape = "--d_model=64 --n_heads=4 --n_layers=2 --vocab_size=512 --max_seq_len=32"
    flags = [*shape.split(), "--ranks=2", "--global_batch_size=16", "--microbatch_size=2"]
    done = python(*flags, "--device=h100", "--top=3", program="bench roofline")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    first = "one step on 2 x H100 SXM, 256 tokens of each rank, microbatches: 4"
    assert lines[0].startswith(first) and "nothing here ran on a GPU" in lines[0]
    names = {line[:24].strip() for line in lines}
    assert {"forward", "collectives", "waiting for the host", "step, ms", "MFU"} <= names
    assert {"tokens/s, all ranks", "kernels of a rank", "GB of a rank"} <= names
    assert {"by pass, without collectives and waiting", "by part"} <= set(lines)
    assert "launches a kernel every 5 us, a guess" in done.stdout
    assert "the row 'collectives' is what the kernels do not hide" in done.stdout
    assert "planning/step_time.py" in done.stdout
    top = lines[lines.index("the most expensive operations, eager") + 1 :]
    assert len(top) == 3 and all(" ms " in line for line in top)
