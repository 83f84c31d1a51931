"""loss.py: equal to cross-entropy over all logits, without ever holding them."""

import shutil

import pytest
import torch
from tracing.tracer import Tracer

import loss
from loss import IGNORE, linear_cross_entropy, reference_linear_cross_entropy

N, D, V = 53, 16, 211  # tokens, width, vocabulary: chunks and blocks do not divide N and V


@pytest.fixture(params=[1, 8, 1000], ids=lambda rows: f"{rows}rows")
def chunk(request, monkeypatch):
    """Chunks of this many tokens, and blocks that do not divide the vocabulary."""
    monkeypatch.setattr(loss, "CHUNK_BYTES", 4 * V * request.param)
    monkeypatch.setattr(loss, "COLUMNS", 50)


def inputs(dtype=torch.double, ignored=0.3):
    """x (N, D), weight (V, D), and labels (N,), a share `ignored` of which do not count."""
    torch.manual_seed(0)
    labels = torch.randint(0, V, (N,)).masked_fill(torch.rand(N) < ignored, IGNORE)
    return torch.randn(N, D, dtype=dtype), torch.randn(V, D, dtype=dtype), labels


def by_hand(x, weight, labels, scale=1.0, z_loss=0.0):
    """Sum over counted tokens of log_z - logits[label] + z_loss * log_z^2 (log_z = logsumexp)."""
    logits = scale * x @ weight.T
    counted = labels != IGNORE
    log_z = torch.logsumexp(logits, -1)[counted]
    return (log_z - logits[counted, labels[counted]] + z_loss * log_z**2).sum()


def value_and_gradients(function, x, weight, labels, *args, incoming=1.0):
    """The function's value and its gradients of x and weight, times the incoming gradient."""
    x = x.clone().requires_grad_()
    weight = weight.clone().requires_grad_()
    value = function(x, weight, labels, *args)
    (incoming * value).backward()
    return value.detach(), x.grad, weight.grad


def assert_close(found, exact, limit):
    """Value and gradients differ by at most `limit`, relative to the largest exact value."""
    for part, a, b in zip(("loss", "grad x", "grad weight"), found, exact, strict=True):
        assert (a - b).abs().max() <= limit * b.abs().max(), part


def test_a_confident_loss_of_large_logits_keeps_its_digits():
    """Logits of 300 in fp32 have steps of 3e-5; the loss of the label 300.5 is 0.27."""
    weight = torch.tensor([[300.5], [299.3], [-300.0], [100.0]])
    x, labels = torch.ones(3, 1), torch.tensor([0, 1, IGNORE])
    exact = by_hand(x.double(), weight.double(), labels)
    assert linear_cross_entropy(x, weight, labels).item() == pytest.approx(exact.item(), rel=3e-7)


@pytest.mark.parametrize("dtype, limit", [(torch.double, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("scale, z_loss", [(1.0, 0.0), (0.25, 0.1)])
def test_value_and_gradients_equal_the_formula(chunk, dtype, limit, scale, z_loss):
    x, weight, labels = inputs(dtype)
    more = labels, scale, z_loss
    exact = value_and_gradients(by_hand, x.double(), weight.double(), *more, incoming=-3.5)
    for function in (linear_cross_entropy, reference_linear_cross_entropy):
        assert_close(value_and_gradients(function, x, weight, *more, incoming=-3.5), exact, limit)


def test_in_bf16_a_small_z_loss_is_not_rounded_away():
    """In bf16, 1 + 2 * z_loss * logsumexp would be 1.

    The z-loss's part of the gradient is the difference between the gradients with and without it.
    Measured along the exact part, it is about 1, as in the obvious version.
    """
    z_loss = 1e-4
    x, weight, labels = inputs(torch.float32)
    x = 0.3 * x.bfloat16().float()
    weight = weight.bfloat16().float()
    exact_part = value_and_gradients(by_hand, x, weight, labels, 1.0, z_loss)[2]
    exact_part -= value_and_gradients(by_hand, x, weight, labels)[2]
    along_exact = []
    for function in (linear_cross_entropy, reference_linear_cross_entropy):
        with torch.autocast("cpu", torch.bfloat16):
            with_z = value_and_gradients(function, x, weight, labels, 1.0, z_loss)[2]
            without_z = value_and_gradients(function, x, weight, labels, 1.0, 0.0)[2]
        product = ((with_z - without_z) * exact_part).sum() / exact_part.square().sum()
        along_exact.append(product.item())
    ours, obvious = along_exact
    assert ours == pytest.approx(obvious, abs=0.01)
    assert 0.7 < ours < 1.3


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("c++"), reason="torch.compile needs a C++ compiler on a CPU")
def test_it_compiles_without_a_break(monkeypatch):
    monkeypatch.setattr(loss, "CHUNK_BYTES", 4 * V * 20)
    x, weight, labels = inputs(torch.float32)
    compiled = torch.compile(linear_cross_entropy, fullgraph=True)
    exact = value_and_gradients(by_hand, x.double(), weight.double(), labels, 0.5, 0.1)
    assert_close(value_and_gradients(compiled, x, weight, labels, 0.5, 0.1), exact, 1e-5)


@pytest.mark.parametrize("frozen", ["x", "weight"])
def test_what_is_frozen_gets_no_gradient_and_the_other_the_right_one(chunk, frozen):
    x, weight, labels = inputs()
    _, grad_x, grad_weight = value_and_gradients(by_hand, x, weight, labels)
    x.requires_grad_(frozen != "x")
    weight.requires_grad_(frozen != "weight")
    linear_cross_entropy(x, weight, labels).backward()
    if frozen == "x":
        assert x.grad is None
        torch.testing.assert_close(weight.grad, grad_weight)
    else:
        assert weight.grad is None
        torch.testing.assert_close(x.grad, grad_x)


def test_a_batch_without_counted_tokens():
    x, weight, labels = inputs(ignored=1.1)
    results = value_and_gradients(linear_cross_entropy, x, weight, labels)
    assert not any(tensor.any() for tensor in results)


def test_it_is_differentiable_once_and_says_so():
    """The saved gradients have no graph, so a second derivative would silently be wrong."""
    x, weight, labels = inputs()
    x.requires_grad_()
    (grad,) = torch.autograd.grad(linear_cross_entropy(x, weight, labels), x, create_graph=True)
    with pytest.raises(RuntimeError):
        torch.autograd.grad(grad.square().sum(), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_bf16_by_autocast_or_inputs_the_sum_is_fp32(chunk, dtype):
    x, weight, labels = inputs(dtype)
    exact = value_and_gradients(by_hand, x.double(), weight.double(), labels)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
        found = value_and_gradients(linear_cross_entropy, x, weight, labels)
    assert [t.dtype for t in found] == [torch.float32, dtype, dtype]
    assert_close(found, exact, 2e-2)


def test_all_logits_are_never_held(monkeypatch):
    monkeypatch.setattr(loss, "CHUNK_BYTES", 4 * V * 8)
    x, weight, labels = inputs()
    with Tracer() as ours:
        value_and_gradients(linear_cross_entropy, x, weight, labels)
    with Tracer() as obvious:
        value_and_gradients(reference_linear_cross_entropy, x, weight, labels)
    assert ours.largest() == V * D  # the weight's gradient; a chunk's logits are smaller
    assert obvious.largest() == N * V


def test_no_matmul_is_done_twice_and_evaluation_does_one():
    """Training: logits, grad x, grad weight. Without gradients: the logits only."""
    x, weight, labels = (t.requires_grad_() if t.is_floating_point() else t for t in inputs())
    with Tracer() as training:
        linear_cross_entropy(x, weight, labels).backward()
    with torch.no_grad(), Tracer() as evaluation:
        value = linear_cross_entropy(x, weight, labels)
    assert [trace.counts()["aten::mm"] for trace in (training, evaluation)] == [3, 1]
    torch.testing.assert_close(value, by_hand(x, weight, labels).detach())


@pytest.mark.parametrize("label", [-1, 97])
def test_a_label_that_is_no_token_is_an_error(label):
    """-1 too, which other programs ignore: it must not be learned as a token."""
    x, weight = torch.ones(2, 8), torch.ones(97, 8)
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        linear_cross_entropy(x, weight, torch.tensor([3, label]))
