"""planning/matmuls.py against masks written out, and against what torch's FlopCounterMode counts: exactly."""

import pytest
import torch
import torch.nn as nn
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

from bench import flops as flops_counted
from config import MPTConfig
from planning import matmuls
from planning.matmuls import Work

S = 48
SMALL = {"d_model": 48, "n_heads": 6, "n_layers": 2, "vocab_size": 100, "max_seq_len": S}
GRID = [
    {},
    {"kv_n_heads": 2},
    {"kv_n_heads": 1, "tie_word_embeddings": False, "expansion_ratio": 3},
    {"alibi": True, "no_bias": True, "qk_ln": True, "clip_qkv": 4.0},
    {"n_layers": 1, "expansion_ratio": 1, "tie_word_embeddings": False},
]


def small(**more) -> MPTConfig:
    return MPTConfig(**{**SMALL, **more})


def closed(cfg: MPTConfig, work: Work, passes=matmuls.PASSES) -> float:
    """FLOPs of one sequence."""
    return S * sum(
        numbers[p] for numbers in matmuls.flops_by_pass(cfg, work).values() for p in passes
    )


@pytest.mark.parametrize("attention", ["full", "causal"])
@pytest.mark.parametrize("window", [0, 1, 7])
@pytest.mark.parametrize("document", [0, 5, 16, 99])
def test_keys_of_a_query_are_those_of_a_mask(attention, window, document):
    """A mask written out: the same document, not too far away, not later. In full the width of the window counts."""
    pairs = 0
    for begin in range(0, S, document or S):
        length = min(document or S, S - begin)
        for i in range(length):
            first = max(0, i - window + 1) if window else 0
            pairs += (i - first + 1) if attention == "causal" else min(window or length, length)
    assert matmuls.keys_per_query(small(), Work(attention, window, document)) == pairs / S


@pytest.mark.parametrize("more", GRID)
def test_every_part_of_a_step_is_what_torch_counts(more):
    cfg = small(**more)
    forward, both = (
        flops_counted.by_part(flops_counted.count(cfg, Work(), b)) for b in (False, True)
    )
    assert forward == flops_counted.closed_form(cfg, ["forward"])
    assert both == flops_counted.closed_form(cfg, matmuls.PASSES)


@pytest.mark.parametrize("every", [1, 2])
def test_full_checkpointing_does_all_again_but_the_last_matmul(every):
    cfg, work = small(kv_n_heads=3), Work(activation_checkpointing="full", recompute_every=every)
    again = flops_counted.count(cfg, work).get_total_flops()
    assert again == closed(cfg, work)
    blocks, d = len(range(0, 2, every)), 48
    last = 2 * 4 * d * d
    assert again - closed(cfg, Work()) == S * blocks * (
        2 * d * (2 * d) + 2 * 2 * S * d + 2 * d * d + 2 * last - last
    )


class Adapted(nn.Module):
    """A frozen linear layer with a low-rank adapter beside it."""

    def __init__(self, linear: nn.Linear, rank: int):
        super().__init__()
        self.linear = linear
        self.A = nn.Linear(linear.in_features, rank, bias=False)
        self.B = nn.Linear(rank, linear.out_features, bias=False)

    def forward(self, x):
        return self.linear(x) + self.B(self.A(x))


def adapt(model, work: Work) -> None:
    model.requires_grad_(False)
    for block in model.transformer.blocks[work.lora_first_block :]:
        for name in work.targets:
            parent = block.attn if name in ("Wqkv", "out_proj") else block.ffn
            setattr(parent, name, Adapted(getattr(parent, name), work.lora_rank))


@pytest.mark.parametrize("targets, first, how", [
    ("Wqkv,out_proj,up_proj,down_proj", 0, "none"), ("Wqkv,out_proj,up_proj,down_proj", 0, "full"),
    ("Wqkv", 0, "full"), ("down_proj", 0, "full"), ("up_proj,out_proj", 1, "none"), ("Wqkv,down_proj", 1, "full"),
])  # fmt: skip
def test_adapters_on_a_frozen_model_are_what_torch_counts(targets, first, how):
    """Blocks below the first adapter have no backward, and nothing is computed again there."""
    cfg = small(kv_n_heads=2)
    work = Work(
        lora_rank=4, lora_targets=targets, lora_first_block=first, activation_checkpointing=how
    )
    counted = flops_counted.count(cfg, work, change=lambda model: adapt(model, work))
    assert counted.get_total_flops() == closed(cfg, work)


def test_a_frozen_model_with_a_prompt_that_trains_is_what_torch_counts():
    def prompt(model):
        model.requires_grad_(False)
        model.transformer.wte.register_forward_hook(
            lambda module, inputs, out: out.requires_grad_()
        )

    cfg, work = small(), Work(frozen=True)
    assert flops_counted.count(cfg, work, change=prompt).get_total_flops() == closed(cfg, work)
    by_pass = matmuls.flops_by_pass(cfg, work)
    assert by_pass["MLP up"]["weight gradient"] == 0 and by_pass["scores"]["input gradient"] > 0


def test_the_loss_in_chunks_costs_what_the_logits_do():
    """loss.py takes both gradients of the logits in its forward, and no matmul twice."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils.flop_counter import FlopCounterMode

    from model import MPT

    cfg = small(attn_impl="reference")
    with FakeTensorMode(), FlopCounterMode(display=False) as counter:
        ids = torch.zeros(1, S, dtype=torch.int64)
        MPT(cfg)(ids, labels=ids).backward()
    assert counter.get_total_flops() == closed(cfg, Work())


def test_flash_attention_costs_three_and_a_half_forwards_of_half_the_scores():
    """The backward's five matmuls are those of torch's own formula for fused kernels, which counts the whole square."""
    cfg = small()
    by_pass = matmuls.flops_by_pass(cfg, Work("flash"))
    forward = sum(by_pass[part]["forward"] for part in matmuls.ATTENTION)
    assert forward == 2 * 2 * 2 * 48 * (S + 1) / 2
    backward = sum(sum(by_pass[part].values()) for part in matmuls.ATTENTION) - forward
    shape = (1, 6, S, 8)
    assert (
        backward / forward
        == sdpa_backward_flop_count(shape, *[shape] * 3) / sdpa_flop_count(*[shape] * 3)
        == 2.5
    )
    linears = {part: numbers for part, numbers in by_pass.items() if part not in matmuls.ATTENTION}
    plain = matmuls.flops_by_pass(cfg)
    assert linears == {part: plain[part] for part in linears}


def test_a_window_and_documents_cost_less_in_attention_alone():
    whole, window, packed = (
        matmuls.flops_by_pass(small(), Work("causal", **more))
        for more in ({}, {"window": 8}, {"document": 12})
    )
    for less in (window, packed):
        assert {part for part in whole if less[part] != whole[part]} == set(matmuls.ATTENTION)
        assert matmuls.total(less) < matmuls.total(whole)
    assert (
        packed["scores"]["forward"] == whole["scores"]["forward"] * 13 / 49
    )  # (12 + 1) / 2 keys, not (48 + 1) / 2


def test_the_program_prints_parts_and_passes(capsys):
    matmuls.main(
        ["--n_layers=2", "--lora_rank=8", "--attention=flash", "--activation_checkpointing=full"]
    )
    out = capsys.readouterr().out
    assert (
        "adapters" in out
        and "recomputed" in out
        and "100.00%" in out
        and "--attention=flash" in out
    )
    matmuls.main(["--n_layers=2"])
    assert "recomputed" not in capsys.readouterr().out
