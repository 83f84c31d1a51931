"""planning/matmuls.py against masks written out, and against torch's FlopCounterMode: exactly."""

import pytest
import torch
import torch.nn as nn
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

from bench import flops as flops_counted
from config import MPTConfig
from planning import matmuls
from planning.matmuls import TrainingSetup

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


def closed(cfg: MPTConfig, setup: TrainingSetup) -> float:
    """FLOPs of one sequence in closed form."""
    return S * matmuls.total(matmuls.flops_by_pass(cfg, setup))


@pytest.mark.parametrize("attention", ["full", "causal"])
@pytest.mark.parametrize("window", [0, 1, 7])
@pytest.mark.parametrize("document", [0, 5, 16, 99])
def test_keys_of_a_query_are_those_of_a_mask(attention, window, document):
    """A mask written out: the same document, inside the window, not later.

    With "full" every query counts the whole width of the window.
    """
    pairs = 0
    for begin in range(0, S, document or S):
        length = min(document or S, S - begin)
        for i in range(length):
            first = max(0, i - window + 1) if window else 0
            if attention == "causal":
                pairs += i - first + 1
            else:
                pairs += min(window or length, length)
    setup = TrainingSetup(attention, window, document)
    assert matmuls.keys_per_query(small(), setup) == pairs / S


@pytest.mark.parametrize("more", GRID)
def test_every_part_of_a_step_is_what_torch_counts(more):
    cfg = small(**more)
    forward = flops_counted.by_part(flops_counted.count(cfg, TrainingSetup(), backward=False))
    both = flops_counted.by_part(flops_counted.count(cfg, TrainingSetup(), backward=True))
    assert forward == flops_counted.closed_form(cfg, ["forward"])
    assert both == flops_counted.closed_form(cfg, matmuls.PASSES)


@pytest.mark.parametrize("every", [1, 2])
def test_full_checkpointing_does_all_again_but_the_last_matmul(every):
    cfg = small(kv_n_heads=3)
    setup = TrainingSetup(activation_checkpointing="full", recompute_every=every)
    counted = flops_counted.count(cfg, setup).get_total_flops()
    assert counted == closed(cfg, setup)

    n_blocks = len(range(0, 2, every))
    d = 48
    qkv = 2 * d * (2 * d)
    attention = 2 * 2 * S * d
    projection = 2 * d * d
    mlp_up = 2 * 4 * d * d  # MLP down is not done again
    recomputed = S * n_blocks * (qkv + attention + projection + mlp_up)
    assert counted - closed(cfg, TrainingSetup()) == recomputed


class Adapted(nn.Module):
    """A frozen linear layer with a low-rank adapter beside it."""

    def __init__(self, linear: nn.Linear, rank: int):
        super().__init__()
        self.linear = linear
        self.A = nn.Linear(linear.in_features, rank, bias=False)
        self.B = nn.Linear(rank, linear.out_features, bias=False)

    def forward(self, x):
        return self.linear(x) + self.B(self.A(x))


def adapt(model, setup: TrainingSetup) -> None:
    """Freeze the model and add the adapters of the setup."""
    model.requires_grad_(False)
    for block in model.transformer.blocks[setup.lora_first_block :]:
        for name in setup.targets:
            parent = block.attn if name in ("Wqkv", "out_proj") else block.ffn
            setattr(parent, name, Adapted(getattr(parent, name), setup.lora_rank))


@pytest.mark.parametrize("targets, first, mode", [
    ("Wqkv,out_proj,up_proj,down_proj", 0, "none"),
    ("Wqkv,out_proj,up_proj,down_proj", 0, "full"),
    ("Wqkv", 0, "full"),
    ("down_proj", 0, "full"),
    ("up_proj,out_proj", 1, "none"),
    ("Wqkv,down_proj", 1, "full"),
])  # fmt: skip
def test_adapters_on_a_frozen_model_are_what_torch_counts(targets, first, mode):
    """Blocks below the first adapter have no backward, and nothing is computed again there."""
    cfg = small(kv_n_heads=2)
    setup = TrainingSetup(
        lora_rank=4, lora_targets=targets, lora_first_block=first, activation_checkpointing=mode
    )
    counted = flops_counted.count(cfg, setup, change=lambda model: adapt(model, setup))
    assert counted.get_total_flops() == closed(cfg, setup)


def test_a_frozen_model_with_a_prompt_that_trains_is_what_torch_counts():
    def train_input(module, inputs, out):
        return out.requires_grad_()

    def prompt(model):
        model.requires_grad_(False)
        model.transformer.wte.register_forward_hook(train_input)

    cfg = small()
    setup = TrainingSetup(frozen=True)
    counted = flops_counted.count(cfg, setup, change=prompt)
    assert counted.get_total_flops() == closed(cfg, setup)
    by_pass = matmuls.flops_by_pass(cfg, setup)
    assert by_pass["MLP up"]["weight gradient"] == 0
    assert by_pass["scores"]["input gradient"] > 0


def test_the_loss_in_chunks_costs_what_the_logits_do():
    """loss.py computes both gradients of the logits in its forward, and no matmul twice."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils.flop_counter import FlopCounterMode

    from model import MPT

    cfg = small(attn_impl="reference")
    with FakeTensorMode(), FlopCounterMode(display=False) as counter:
        ids = torch.zeros(1, S, dtype=torch.int64)
        MPT(cfg)(ids, labels=ids).backward()
    assert counter.get_total_flops() == closed(cfg, TrainingSetup())


def test_flash_attention_costs_three_and_a_half_forwards_of_half_the_scores():
    """The backward has the five matmuls of torch's formula, which counts the whole square."""
    cfg = small()
    by_pass = matmuls.flops_by_pass(cfg, TrainingSetup("flash"))
    forward = sum(by_pass[part]["forward"] for part in matmuls.ATTENTION)
    assert forward == 2 * 2 * 2 * 48 * (S + 1) / 2
    backward = sum(sum(by_pass[part].values()) for part in matmuls.ATTENTION) - forward
    assert backward / forward == 2.5
    q = k = v = gradient = (1, 6, S, 8)
    assert sdpa_backward_flop_count(gradient, q, k, v) / sdpa_flop_count(q, k, v) == 2.5

    plain = matmuls.flops_by_pass(cfg)
    for part in by_pass.keys() - set(matmuls.ATTENTION):
        assert by_pass[part] == plain[part]


def test_a_window_and_documents_cost_less_in_attention_alone():
    whole = matmuls.flops_by_pass(small(), TrainingSetup("causal"))
    window = matmuls.flops_by_pass(small(), TrainingSetup("causal", window=8))
    packed = matmuls.flops_by_pass(small(), TrainingSetup("causal", document=12))
    for less in (window, packed):
        assert {part for part in whole if less[part] != whole[part]} == set(matmuls.ATTENTION)
        assert matmuls.total(less) < matmuls.total(whole)
    keys = (12 + 1) / 2
    assert packed["scores"]["forward"] == whole["scores"]["forward"] * keys / ((48 + 1) / 2)


def test_the_program_prints_parts_and_passes(capsys):
    flags = "--n_layers=2 --lora_rank=8 --attention=flash --activation_checkpointing=full"
    matmuls.main(flags.split())
    out = capsys.readouterr().out
    for words in ("adapters", "recomputed", "100.00%", "--attention=flash"):
        assert words in out
    matmuls.main(["--n_layers=2"])
    assert "recomputed" not in capsys.readouterr().out
