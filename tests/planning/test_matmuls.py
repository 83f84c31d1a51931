"""The matmuls of flops.py against torch's FlopCounterMode: exactly."""

import itertools
import re
from dataclasses import replace

import pytest
import torch
from conftest import slowly
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import flops
import parallel
from config import MPTConfig, TrainConfig
from model import MPT

S = 48
SMALL = {"d_model": 48, "n_heads": 6, "n_layers": 2, "vocab_size": 100, "max_seq_len": S}
GRID = [
    {},
    {"kv_n_heads": 1, "tie_word_embeddings": False, "expansion_ratio": 3},
    {"alibi": True, "no_bias": True, "qk_ln": True, "clip_qkv": 4.0},
    {"n_layers": 1, "expansion_ratio": 1, "tie_word_embeddings": False},
]


def small(**more) -> MPTConfig:
    return MPTConfig(**{**SMALL, **more})


def closed(cfg: MPTConfig, train: TrainConfig) -> float:
    """FLOPs of one sequence in closed form."""
    return S * sum(sum(passes.values()) for passes in flops.flops_by_pass(cfg, train).values())


def count(cfg: MPTConfig, train: TrainConfig, backward: bool = True) -> FlopCounterMode:
    """torch's count of one sequence's forward, or forward and backward.

    The tensors are fake: they have shapes but no data. Attention is the reference, two matmuls over
    all T x T scores.
    """
    with FakeTensorMode(), FlopCounterMode(display=False) as counter:
        model = MPT(replace(cfg, attn_impl="reference"))
        parallel.recompute(model, train)
        logits = model(torch.zeros(1, cfg.max_seq_len, dtype=torch.int64))
        if backward:
            logits.sum().backward()
    return counter


def counted_by_part(cfg: MPTConfig, backward: bool) -> dict[str, int]:
    """{part of the model: FLOPs} as torch counts them."""
    flops_of_module = {}
    for name, operations in count(cfg, TrainConfig(), backward).get_flop_counts().items():
        flops_of_module[name] = sum(operations.values())

    def sum_over_blocks(end: str) -> int:
        pattern = rf"MPT\.transformer\.blocks\.\d+\.{end}"
        return sum(n for name, n in flops_of_module.items() if re.fullmatch(pattern, name))

    parts = {}
    for linear in cfg.linear_layers():
        parts[flops.LINEARS[linear]] = sum_over_blocks(rf"\w+\.{linear}")
    parts["attention"] = sum_over_blocks("attn") - parts["QKV"] - parts["projection"]
    parts["logits"] = flops_of_module["Global"] - flops_of_module["MPT.transformer"]
    return parts


def closed_by_part(cfg: MPTConfig, passes) -> dict[str, float]:
    """{part of the model: FLOPs of one sequence in some of flops.PASSES}, in closed form."""
    parts = {}
    for part, flops_of_pass in flops.flops_by_pass(cfg, TrainConfig()).items():
        parts[part] = S * sum(flops_of_pass[name] for name in passes)
    parts["attention"] = sum(parts.pop(part) for part in flops.ATTENTION)
    return parts


@pytest.mark.parametrize("more", GRID)
def test_every_part_of_a_step_is_what_torch_counts(more):
    cfg = small(**more)
    assert counted_by_part(cfg, backward=False) == closed_by_part(cfg, ["forward"])
    assert counted_by_part(cfg, backward=True) == closed_by_part(cfg, flops.PASSES)


def test_a_gated_feed_forward_is_what_torch_counts():
    """As a whole: torch counts the backward of both layers that read x for each of them."""
    cfg = small(ffn_type="mptglu", ffn_act_fn="silu", norm_type="rmsnorm", qk_gn=True)
    assert counted_by_part(cfg, backward=False) == closed_by_part(cfg, ["forward"])
    assert count(cfg, TrainConfig()).get_total_flops() == closed(cfg, TrainConfig())


def test_a_window_counts_the_keys_that_the_last_query_sees():
    """torch's count of the reference is of the whole square."""
    whole, windowed = small(), small(sliding_window_size=11)
    keys = closed_by_part(windowed, flops.PASSES).pop("attention") * S
    assert keys == 12 * counted_by_part(whole, backward=True)["attention"]
    assert closed(small(sliding_window_size=S), TrainConfig()) == closed(whole, TrainConfig())


@pytest.mark.parametrize("every", [1, 2])
def test_full_checkpointing_does_all_again_but_the_last_matmul(every):
    cfg = small(kv_n_heads=3)
    train = TrainConfig(activation_checkpointing="full", recompute_every=every)
    assert count(cfg, train).get_total_flops() == closed(cfg, train)


def step_with_adapters(cfg: MPTConfig, train: TrainConfig, precision: str) -> int:
    """FLOPs of the trainer's forward and backward of one sequence, as torch counts them."""
    with FakeTensorMode(), FlopCounterMode(display=False) as counter:
        model = MPT(cfg)
        parallel.put_adapters_on(model, train, precision)
        parallel.recompute(model, train)
        ids = torch.zeros(1, S, dtype=torch.int64)
        with parallel.autocast(torch.device("cpu"), precision):
            loss = model(ids, labels=ids)
        loss.backward()
    return counter.get_total_flops()


MODES = [("none", 1), ("selective", 1), ("selective", 2), ("full", 1), ("full", 2)]
TARGETS = ["all", "Wqkv", "down_proj", "up_proj,out_proj", "gate_proj,down_proj"]
ALSO_TRAINED = ["", "norms", "biases"]
QUICK = [
    ("all", 0, "", "none", 1),
    ("Wqkv,down_proj", 2, "biases", "full", 2),
    ("down_proj", 2, "norms", "selective", 2),
    ("gate_proj", 2, "", "full", 2),
]
# All values of any two settings.
MORE = [
    slowly(TARGETS[i], 2 * ((i + n) % 2), ALSO_TRAINED[(i + 2 * n) % 3], *MODES[n])
    for i, n in itertools.product(range(5), range(5))
]


@pytest.mark.parametrize("targets, last, also, mode, every", QUICK + MORE)
def test_a_step_with_adapters_is_what_torch_counts(targets, last, also, mode, every):
    """Of the trainer, whose frozen weights are bf16 in bf16."""
    is_gated = last == 2 or "gate_proj" in targets
    cfg = small(n_layers=3, kv_n_heads=2, attn_impl="reference", no_bias=last == 2)
    cfg = replace(cfg, ffn_type="mptglu" if is_gated else "mptmlp")
    train = TrainConfig(
        init_from="base",
        lora_rank=4,
        lora_targets=targets,
        lora_last_blocks=last,
        lora_train=also,
        activation_checkpointing=mode,
        recompute_every=every,
    )
    expected = S * flops.flops_of(cfg, train=train)[1]
    if mode == "selective":  # it keeps the output of fused attention, but not of the reference
        first = flops.first_backward(cfg, train)
        attention_forward = 2 * 2 * S * S * 48
        expected += attention_forward * sum(i % every == 0 for i in range(first, 3))
    assert step_with_adapters(cfg, train, "bf16" if last else "fp32") == expected


def test_the_mfu_of_a_run_counts_what_its_step_needs():
    """With adapters every matmul that the step needs; nothing that is recomputed counts."""
    cfg = small(kv_n_heads=2)
    full = TrainConfig(activation_checkpointing="full")
    assert flops.flops_of(cfg, train=full)[0] == flops.train_flops_per_token(cfg)

    train = replace(full, init_from="base", lora_rank=4)
    plain = replace(train, activation_checkpointing="none")
    needed, _ = flops.flops_of(cfg, train=train)
    assert flops.flops_of(cfg, train=plain) == (needed, needed)
    assert needed * S == step_with_adapters(replace(cfg, attn_impl="reference"), plain, "fp32")
    assert flops.convention_of(train) != flops.convention_of(full) == flops.CONVENTION


def test_the_loss_in_chunks_costs_what_the_logits_do():
    """loss.py computes both gradients of the logits in its forward, and no matmul twice."""
    cfg = small(attn_impl="reference")
    with FakeTensorMode(), FlopCounterMode(display=False) as counter:
        ids = torch.zeros(1, S, dtype=torch.int64)
        MPT(cfg)(ids, labels=ids).backward()
    assert counter.get_total_flops() == closed(cfg, TrainConfig())
