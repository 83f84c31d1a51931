"""The tracer itself, on real tensors of this CPU."""

import torch
from torch.utils.flop_counter import FlopCounterMode
from tracing.live_bytes import LiveBytes
from tracing.tracer import Tracer

import fsdp_train
import optim
import processes
from config import MPTConfig, TrainConfig
from model import MPT

WORLD = processes.World(0, 1, 0, 1, torch.device("cpu"))


def small_step(observer) -> None:
    """A training step of two layers and two microbatches, bf16, with attention by its formula."""
    shape = {"d_model": 64, "n_heads": 4, "n_layers": 2, "vocab_size": 512, "max_seq_len": 32}
    model = MPT(MPTConfig(**shape, attn_impl="reference"))
    cfg = TrainConfig(global_batch_size=4, microbatch_size=2)
    optimizer = optim.build_optimizer(model.named_parameters(), cfg)
    with observer:
        rows = torch.zeros(4, 33, dtype=torch.int64)
        fsdp_train.train_step(model, optimizer, rows, 0, cfg, WORLD, "bf16")


def test_its_flops_are_those_that_torch_counts():
    small_step(trace := Tracer())
    small_step(counter := FlopCounterMode(display=False))
    assert sum(op.flops for op in trace.operations) == counter.get_total_flops() > 0


def test_each_operation_has_its_part_of_the_step_and_our_line():
    small_step(trace := Tracer())
    assert [*dict.fromkeys(op.part for op in trace.operations if op.part)] == [
        "forward",
        "backward",
        "optimizer",
    ]
    (adam,) = [op for op in trace.operations if op.name == "aten::_fused_adamw_"]
    assert (adam.part, adam.dtypes, adam.devices) == ("optimizer", {torch.float32}, {"cpu"})
    (gelu, *_) = [op for op in trace.operations if op.name == "aten::gelu"]
    assert gelu.part == "forward" and gelu.where.startswith("model.py:")
    assert str(gelu).startswith("aten::gelu(bfloat16[2, 32, 256]) at model.py:")


def test_a_view_and_an_allocation_are_nothing_to_do():
    x = torch.ones(4)
    with Tracer() as trace:
        torch.empty_like(x.view(2, 2).t())
        x[1:] + 1
    assert [str(op).split(" at ")[0] for op in trace.operations] == ["aten::add(float32[3])"]


def test_bytes_are_alive_until_their_last_tensor_is_gone():
    with LiveBytes() as live:
        x = torch.ones(100)
        view = x[:50]
        y = x + 1
        assert live.total == 800
        del x
        assert live.total == 800
        del view, y
        assert live.total == 0
    assert live.peaks[""][0] == 800
