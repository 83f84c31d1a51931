"""evaluation/label_scores.py: equal to log-softmax over all logits, without ever holding them."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from test_loss import D, N, V, inputs
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode
from tracing.tracer import Tracer

import loss
from evaluation import label_scores
from evaluation.label_scores import score_all, score_counted, score_labels
from loss import IGNORE


@pytest.fixture(params=[1, 8, 1000], ids=lambda rows: f"{rows}rows")
def chunk(request, monkeypatch):
    """Chunks of this many tokens."""
    monkeypatch.setattr(loss, "CHUNK_BYTES", 4 * V * request.param)


def output(weight, scale=None, cap=None):
    """The output layer of a model."""
    cfg = SimpleNamespace(final_logit_softcapping=cap)
    return SimpleNamespace(output_weight=weight, logit_scale=scale, cfg=cfg)


def test_all_logits_are_never_held(monkeypatch):
    monkeypatch.setattr(loss, "CHUNK_BYTES", 4 * V * 8)
    x, weight, labels = inputs()
    with Tracer() as trace:
        score_all(output(weight), x, labels)
    assert trace.largest() <= V * D


BOTH_WAYS = pytest.mark.parametrize("score", [score_counted, score_all])


@BOTH_WAYS
@pytest.mark.parametrize("scale, cap", [(None, None), (0.25, None), (None, 2.0)])
def test_scores_of_labels_are_those_of_all_logits(chunk, score, scale, cap):
    x, weight, labels = inputs()
    logits = x @ weight.T * (scale or 1)
    logits = cap * torch.tanh(logits / cap) if cap else logits
    labels[::4] = logits[::4].argmax(-1)  # so that some labels are greedy
    counted = labels != IGNORE
    log_probs, greedy = score(output(weight, scale, cap), x, labels)

    all_log_probs = F.log_softmax(logits, -1)
    exact = all_log_probs.gather(1, labels.clamp(min=0)[:, None])[:, 0]
    assert torch.allclose(log_probs, exact.masked_fill(~counted, 0), atol=1e-12)
    assert torch.equal(greedy, counted & (logits.argmax(-1) == labels))
    assert greedy.sum() >= N // 4


@BOTH_WAYS
def test_scores_where_no_label_counts_and_beyond_the_vocabulary(chunk, score):
    x, weight, labels = inputs()
    none_counts = torch.full_like(labels, IGNORE)
    assert not any(scores.any() for scores in score(output(weight), x, none_counts))
    outside = torch.tensor([10 * V, -5 * V])
    assert score(output(weight), x[:2], outside)[0].isnan().all()


@BOTH_WAYS
def test_of_equal_logits_the_first_is_the_likeliest(chunk, score):
    weight = torch.zeros(V, D)
    weight[[7, 30, 120]] = 1.0  # two in one block of the vocabulary, one in another
    labels = torch.tensor([7, 30, 120, 5])
    log_probs, greedy = score(output(weight), torch.ones(4, D), labels)
    assert greedy.tolist() == [True, False, False, False]
    assert torch.allclose(log_probs[:3], log_probs[0]) and log_probs[3] < log_probs[0]


def test_scores_have_the_shape_of_the_labels_and_are_fp32_under_autocast():
    x, weight, labels = inputs(torch.float32)
    model = output(weight, 0.5)
    exact, _ = score_labels(model, x, labels)
    with torch.autocast("cpu", torch.bfloat16):
        found = score_labels(model, x[:52].view(4, 13, D), labels[:52].view(4, 13))
        log_probs, _ = score_all(model, x, labels)
    assert [scores.shape for scores in found] == [(4, 13), (4, 13)]
    for scores in (found[0].flatten(), log_probs[:52]):
        assert scores.dtype == torch.float32
        assert torch.allclose(scores, exact[:52], atol=0.1)


@pytest.mark.parametrize("scale, cap", [(0.3, None), (None, 2.0)])
def test_under_autocast_logits_are_scaled_and_capped_in_fp32(scale, cap):
    x, weight, labels = inputs(torch.float32)
    counted = labels != IGNORE
    with torch.autocast("cpu", torch.bfloat16):
        logits = F.linear(x, weight).float() * (scale or 1)
        log_probs, _ = score_all(output(weight, scale, cap), x, labels)
    logits = cap * torch.tanh(logits / cap) if cap else logits
    exact = F.log_softmax(logits, -1).gather(1, labels.clamp(min=0)[:, None])[:, 0]
    assert torch.allclose(log_probs[counted], exact[counted], atol=1e-5)


def test_on_a_gpu_scoring_never_waits_for_the_device(monkeypatch):
    """Fake tensors have no values: whatever needs one, such as a boolean mask, raises."""
    monkeypatch.setattr(loss, "CHUNK_BYTES", 4 * V * 8)
    with FakeTensorMode():
        weight, x = torch.ones(V, D), torch.ones(N, D)
        labels = torch.ones(N, dtype=torch.long)
        with pytest.raises(DynamicOutputShapeException):
            score_counted(output(weight), x, labels)
        monkeypatch.setattr(label_scores, "autocast_dtype", lambda x: x.dtype)
        on_a_gpu = output(weight.to("meta")), x.to("meta"), labels.to("meta")
        log_probs, greedy = score_all(*on_a_gpu)
        assert score_labels(*on_a_gpu)[0].device.type == "meta"
    assert (log_probs.shape, greedy.shape) == ((N,), (N,))
