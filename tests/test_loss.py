"""loss.py: equal to cross-entropy over all logits, without ever holding them."""

import shutil

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import loss
from loss import IGNORE, linear_cross_entropy, reference_linear_cross_entropy, score_labels

N, D, V = 53, 16, 211  # tokens, width, vocabulary: primes, so that the last chunk is a rest


@pytest.fixture(params=[1, 8, 53, 1000], ids=lambda rows: f"{rows}rows")
def chunk(request, monkeypatch):
    """Chunks of so many rows of logits, and pieces of columns that do not divide."""
    monkeypatch.setattr(loss, "CHUNK_BYTES", 4 * V * request.param)
    monkeypatch.setattr(loss, "COLUMNS", 50)


def inputs(dtype=torch.double, ignored=0.3):
    torch.manual_seed(0)
    labels = torch.randint(0, V, (N,)).masked_fill(torch.rand(N) < ignored, IGNORE)
    return torch.randn(N, D, dtype=dtype), torch.randn(V, D, dtype=dtype), labels


def by_hand(x, weight, labels, scale=1.0, z_loss=0.0):
    """The formula: sum over counted tokens of logsumexp(logits) - logits[label] + z_loss * logsumexp(logits)^2."""
    logits = scale * x @ weight.T
    counted = labels != IGNORE
    log_z = torch.logsumexp(logits, -1)[counted]
    return (log_z - logits[counted, labels[counted]] + z_loss * log_z**2).sum()


def value_and_gradients(function, x, weight, labels, *args, incoming=1.0):
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    value = function(x, weight, labels, *args)
    (incoming * value).backward()
    return value.detach(), x.grad, weight.grad


def assert_close(found, wanted, limit):
    for part, a, b in zip(("loss", "grad x", "grad weight"), found, wanted, strict=True):
        assert (a - b).abs().max() <= limit * b.abs().max(), part


@pytest.mark.parametrize("dtype, limit", [(torch.double, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("scale", [None, 0.25])
@pytest.mark.parametrize("z_loss", [0.0, 0.1])
def test_value_and_gradients_equal_the_formula(chunk, dtype, limit, scale, z_loss):
    x, weight, labels = inputs(dtype)
    scales = scale or 1.0, z_loss
    wanted = value_and_gradients(by_hand, x.double(), weight.double(), labels, *scales)
    assert_close(
        value_and_gradients(linear_cross_entropy, x, weight, labels, scale, z_loss), wanted, limit
    )
    assert_close(
        value_and_gradients(reference_linear_cross_entropy, x, weight, labels, *scales),
        wanted,
        limit,
    )


def test_the_incoming_gradient_scales_the_gradients(chunk):
    x, weight, labels = inputs()
    found = value_and_gradients(linear_cross_entropy, x, weight, labels, incoming=-3.5)
    assert_close(found, value_and_gradients(by_hand, x, weight, labels, incoming=-3.5), 1e-12)


def test_batches_have_any_shape():
    x, weight, labels = inputs()
    flat = linear_cross_entropy(x[:52], weight, labels[:52])
    assert linear_cross_entropy(x[:52].view(4, 13, D), weight, labels[:52].view(4, 13)) == flat


@pytest.mark.parametrize("z_loss", [1e-3, 1e-4])
def test_in_bf16_a_small_z_loss_is_not_rounded_away(z_loss):
    """1 + 2 z_loss logsumexp is 1 in bf16. Its gradient: the difference to that without it, along the exact one."""
    x, weight, labels = inputs(torch.float32)
    x, weight = 0.3 * x.bfloat16().float(), weight.bfloat16().float()
    alone = value_and_gradients(by_hand, x, weight, labels, 1.0, z_loss)[2]
    alone -= value_and_gradients(by_hand, x, weight, labels)[2]
    along = []
    for function in (linear_cross_entropy, reference_linear_cross_entropy):
        with torch.autocast("cpu", torch.bfloat16):
            found = [
                value_and_gradients(function, x, weight, labels, 1.0, z)[2] for z in (z_loss, 0.0)
            ]
        along.append((((found[0] - found[1]) * alone).sum() / alone.square().sum()).item())
    assert along[0] == pytest.approx(along[1], abs=0.01) and 0.7 < along[0] < 1.3


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("c++"), reason="torch.compile needs a C++ compiler on a CPU")
def test_it_compiles_without_a_break(monkeypatch):
    monkeypatch.setattr(loss, "CHUNK_BYTES", 4 * V * 20)
    x, weight, labels = inputs(torch.float32)
    compiled = torch.compile(linear_cross_entropy, fullgraph=True)
    wanted = value_and_gradients(by_hand, x.double(), weight.double(), labels, 0.5, 0.1)
    assert_close(value_and_gradients(compiled, x, weight, labels, 0.5, 0.1), wanted, 1e-5)


@pytest.mark.parametrize("frozen", ["x", "weight"])
def test_what_is_frozen_gets_no_gradient_and_the_other_the_right_one(chunk, frozen):
    x, weight, labels = inputs()
    _, grad_x, grad_weight = value_and_gradients(by_hand, x, weight, labels)
    x.requires_grad_(frozen != "x")
    weight.requires_grad_(frozen != "weight")
    linear_cross_entropy(x, weight, labels).backward()
    found, wanted, other = (weight, grad_weight, x) if frozen == "x" else (x, grad_x, weight)
    assert other.grad is None
    torch.testing.assert_close(found.grad, wanted)


def test_a_batch_without_counted_tokens():
    x, weight, labels = inputs(ignored=1.1)
    assert [
        t.abs().max().item() for t in value_and_gradients(linear_cross_entropy, x, weight, labels)
    ] == [0, 0, 0]


def test_it_is_differentiable_once_and_says_so():
    """The second derivative would be wrong in silence: the saved gradients do not know where they come from."""
    x, weight, labels = inputs()
    x.requires_grad_()
    (grad,) = torch.autograd.grad(linear_cross_entropy(x, weight, labels), x, create_graph=True)
    with pytest.raises(RuntimeError):
        torch.autograd.grad(grad.square().sum(), x)


def test_close_under_bf16_autocast(chunk):
    x, weight, labels = inputs(torch.float32)
    exact = value_and_gradients(by_hand, x, weight, labels)
    with torch.autocast("cpu", torch.bfloat16):
        found = value_and_gradients(linear_cross_entropy, x, weight, labels)
    assert [t.dtype for t in found] == [torch.float32] * 3
    assert_close(found, exact, 2e-2)


def test_under_bf16_autocast_the_z_loss_is_as_exact_as_in_the_obvious_version(chunk):
    x, weight, labels = inputs(torch.float32)
    exact = value_and_gradients(by_hand, x, weight, labels, 1.0, 0.1)
    with torch.autocast("cpu", torch.bfloat16):
        ours = value_and_gradients(linear_cross_entropy, x, weight, labels, None, 0.1)
        obvious = value_and_gradients(reference_linear_cross_entropy, x, weight, labels, 1.0, 0.1)
    for a, b, c in zip(ours, obvious, exact, strict=True):
        assert (a - c).abs().max() <= 1.5 * (b - c).abs().max()


def test_bf16_inputs_give_an_fp32_sum():
    x, weight, labels = inputs(torch.bfloat16)
    found = value_and_gradients(linear_cross_entropy, x, weight, labels)
    assert [t.dtype for t in found] == [torch.float32, torch.bfloat16, torch.bfloat16]
    exact = value_and_gradients(by_hand, x.double(), weight.double(), labels)
    assert_close(found, exact, 2e-2)


class Watch(TorchDispatchMode):
    """Counts matmuls and remembers the largest tensor that any operation made."""

    largest = matmuls = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.matmuls += function is torch.ops.aten.mm.default
        if isinstance(out, torch.Tensor):
            self.largest = max(self.largest, out.numel())
        return out


def test_all_logits_are_never_held(monkeypatch):
    monkeypatch.setattr(loss, "CHUNK_BYTES", 4 * V * 8)
    x, weight, labels = inputs()
    with Watch() as ours:
        value_and_gradients(linear_cross_entropy, x, weight, labels)
    with Watch() as obvious:
        value_and_gradients(reference_linear_cross_entropy, x, weight, labels)
    assert ours.largest == V * D > 8 * V  # the weight's gradient; a chunk of logits is smaller
    assert obvious.largest == N * V


def test_no_matmul_is_done_twice_and_evaluation_does_one():
    """Training: logits, grad x, grad weight. Without gradients: the logits only."""
    x, weight, labels = (t.requires_grad_() if t.is_floating_point() else t for t in inputs())
    with Watch() as training:
        linear_cross_entropy(x, weight, labels).backward()
    with torch.no_grad(), Watch() as evaluation:
        value = linear_cross_entropy(x, weight, labels)
    assert (training.matmuls, evaluation.matmuls) == (3, 1)
    torch.testing.assert_close(value, by_hand(x, weight, labels).detach())


def test_initial_loss_of_equal_logits_is_log_v():
    """Logits that are all the same: every token costs log V."""
    labels = torch.arange(V)
    value = linear_cross_entropy(
        torch.zeros(V, D, dtype=torch.double), torch.randn(V, D, dtype=torch.double), labels
    )
    torch.testing.assert_close(
        value, V * F.cross_entropy(torch.zeros(1, V, dtype=torch.double), torch.tensor([0]))
    )


@pytest.mark.parametrize("scale", [None, 0.25])
@pytest.mark.parametrize("rows", [8, 1000])
def test_scores_of_labels_are_those_of_all_logits(chunk, monkeypatch, rows, scale):
    monkeypatch.setattr(loss, "ROWS", rows)
    x, weight, labels = inputs()
    logits = x @ weight.T
    labels[::4] = logits[::4].argmax(-1)
    log_probs, greedy = score_labels(x[None], weight, labels[None], scale)
    counted = labels != IGNORE
    expected = F.log_softmax(logits * (scale or 1), -1).gather(1, labels.clamp(min=0)[:, None])[
        :, 0
    ]
    assert torch.allclose(log_probs[0], expected.masked_fill(~counted, 0), atol=1e-12)
    assert (
        torch.equal(greedy[0], counted & (logits.argmax(-1) == labels)) and greedy.sum() >= N // 4
    )
    nothing = torch.full_like(labels, IGNORE)
    assert not any(scores.any() for scores in score_labels(x, weight, nothing))
    assert score_labels(x[:2], weight, torch.tensor([10 * V, -5 * V]))[0].isnan().all()


def test_of_equal_logits_the_first_is_the_likeliest(chunk):
    weight = torch.zeros(V, D)
    weight[[7, 30, 120]] = 1.0  # two in one piece of the vocabulary, one in another
    labels = torch.tensor([7, 30, 120, 5])
    log_probs, greedy = score_labels(torch.ones(4, D), weight, labels)
    assert greedy.tolist() == [True, False, False, False]
    assert torch.allclose(log_probs[:3], log_probs[0]) and log_probs[3] < log_probs[0]
