"""tensor_parallel.py on real gloo ranks: the loss, what goes over the wire, dropout.

That training is the same is in test_layouts.py, checkpoints in test_resharding.py.
"""

import math
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conftest import slowly
from layouts import MODEL, RUN, build, rows_of_step, take_steps

import parallel
from evaluation.label_scores import score_labels
from model import Positions
from program import UserError

# --- Chunks of the loss


def loss_and_scores_in_chunks(_, cfg):
    """Of one rank's model, whose part of the vocabulary would allow another chunk than others."""
    with mock.patch("loss.CHUNK_BYTES", 4 * 49 * 8):  # 8 rows of 49 logits, 7 of 50
        _, model, _ = build((MODEL, cfg))
        rows = rows_of_step(0, cfg, MODEL)
        loss = model(rows[:, :-1], labels=rows[:, 1:])
        loss.backward()
        model.eval()
        labels = rows[:, 1:]
        log_probs, _ = model(rows[:, :-1], labels=labels, head=score_labels)
    return loss.item(), parallel.grad_norm(model).item(), log_probs.sum().item()


def test_all_ranks_cut_the_loss_into_the_same_chunks(ranks):
    """99 ids: one rank has 49 of them, the other 50."""
    (wanted,) = ranks(1)(loss_and_scores_in_chunks, RUN)
    for found in ranks(2)(loss_and_scores_in_chunks, replace(RUN, tp=2)):
        assert found == pytest.approx(wanted, rel=1e-5)


def loss_of_label(_, cfg, label):
    """The loss of a batch with this label."""
    _, model, _ = build((MODEL, cfg))
    rows = rows_of_step(0, cfg, MODEL)
    labels = rows[:, 1:].clone()
    labels[0, 0] = label
    return model(rows[:, :-1], labels=labels).item()


def test_a_label_beyond_the_vocabulary_is_noticed(ranks):
    assert all(map(math.isnan, ranks(2)(loss_of_label, replace(RUN, tp=2), 99)))
    assert all(map(math.isfinite, ranks(2)(loss_of_label, replace(RUN, tp=2), 98)))


# --- What goes over the wire


def all_reduces_of_a_microbatch(_, cfg):
    """How many all-reduces of the team one forward and backward takes."""
    _, model, _ = build((MODEL, cfg))
    rows = rows_of_step(0, cfg, MODEL)[:2]
    calls = []
    real = dist.all_reduce

    def counted(*args, **kwargs):
        calls.append(args)
        return real(*args, **kwargs)

    with mock.patch.object(dist, "all_reduce", counted):
        model(rows[:, :-1], labels=rows[:, 1:]).backward()
    return len(calls)


def test_a_layer_takes_four_all_reduces(ranks):
    """Besides: the embedding, the loss's input, and two for each of its chunks, here one."""
    wanted = 4 * MODEL.n_layers + 1 + 1 + 2
    assert ranks(2)(all_reduces_of_a_microbatch, replace(RUN, tp=2)) == [wanted] * 2


# --- Dropout


def masks(_, cfg, model_cfg):
    """(the weights that all ranks have, after three steps with dropout; this rank's losses)"""
    world, model, optimizer = build((model_cfg, cfg))
    curve = take_steps(model, optimizer, range(3), world, (model_cfg, cfg))
    whole = {
        name: p.detach().clone()
        for name, p in model.named_parameters()
        if not model.layout.spans(name)
    }
    return whole, curve


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_with_dropout_the_whole_tensors_stay_equal_on_all_tensor_ranks(ranks, sequence_parallel):
    model_cfg = replace(MODEL, resid_pdrop=0.2, emb_pdrop=0.1, attn_pdrop=0.2, no_bias=False)
    cfg = replace(RUN, tp=2, sequence_parallel=sequence_parallel)
    (first, first_curve), (second, second_curve) = ranks(2)(masks, cfg, model_cfg)
    assert first_curve == second_curve
    assert all(torch.equal(first[name], second[name]) for name in first)


def dropped(_, cfg):
    """What attention makes of equal heads with half of its weights dropped, (B, T, D / n)."""
    model_cfg = replace(MODEL, attn_pdrop=0.5, alibi=False, attn_impl="reference")
    _, model, _ = build((model_cfg, cfg))
    attn = model.transformer.blocks[0].attn
    seen = []
    attn.out_proj.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        attn.Wqkv.weight.fill_(0.1)
        torch.manual_seed(0)
        attn(torch.randn(2, 8, MODEL.d_model), Positions())
    return seen[0]


def test_each_tensor_rank_drops_other_attention_weights(ranks):
    first, second = ranks(2)(dropped, replace(RUN, tp=2))
    assert not torch.equal(first, second)


# --- Evaluation and scoring


def evaluated(_, cfg, model_cfg):
    """(logits, loss, log-probabilities, greedy) of a model in evaluation."""
    _, model, _ = build((model_cfg, cfg))
    model.eval()
    rows = rows_of_step(0, cfg, model_cfg)[:3, :14]  # without its last column
    with torch.no_grad():
        ids, labels = rows[:, :-1], rows[:, 1:]
        logits = model(ids)
        return logits, model(ids, labels=labels), *model(ids, labels=labels, head=score_labels)


@pytest.mark.parametrize("size", [2, slowly(4)])
def test_logits_and_scores_are_those_of_one_process(ranks, size):
    ((logits, loss, log_probs, greedy),) = ranks(1)(evaluated, RUN, MODEL)
    cfg = replace(RUN, tp=size, sequence_parallel=True)  # 13 tokens do not divide
    for found in ranks(size)(evaluated, cfg, MODEL):
        torch.testing.assert_close(found[0], logits, atol=1e-5, rtol=0)
        assert found[1].item() == pytest.approx(loss.item(), abs=1e-4)
        torch.testing.assert_close(found[2], log_probs, atol=1e-5, rtol=0)
        assert torch.equal(found[3], greedy)


# --- Bad input


@pytest.mark.parametrize(
    "changes, model_changes, words",
    [
        ({"tp": 3}, {}, "tp 3 does not divide n_heads 4: tp can be 1, 2, 4"),
        ({"tp": 4}, {"kv_n_heads": 2}, "tp 4 does not divide kv_n_heads 2: tp can be 1, 2"),
    ],
)
def test_what_cannot_be_cut_is_a_user_error(changes, model_changes, words):
    with pytest.raises(UserError, match=words):
        parallel.check(replace(MODEL, **model_changes), replace(RUN, **changes))
