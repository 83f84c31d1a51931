"""Checks exercise 2: cross-entropy without all the logits, and five bugs known by their curves.

The loss and its gradients are compared with loss.reference_linear_cross_entropy in float64, which
holds all logits.
"""

import torch

from lessons import planted
from lessons.answers import ToDo, close, shown
from loss import IGNORE, reference_linear_cross_entropy

HINTS = {  # what to compare with the run without a bug
    "labels not shifted": "its logged loss with its validation loss",
    "decay without rate": "the size of its weights; its last loss is ln(256) = 5.55",
    "mean of means": "its two validation losses: one is better, one is worse",
    "schedule too fast": "by how much its weights change in the middle of the run, and at the end",
    "gradients not zeroed": "its gradient norm: what does clipping to 1 leave behind in .grad?",
}


def check_one_chunk(answer):
    """Loss and gradients, all tokens in one chunk"""
    compare(answer, n=1, v=3, chunk=1)
    compare(answer, n=4, v=7, chunk=100)


def check_several_chunks(answer):
    """The same in several chunks, the last of them shorter"""
    hint = "loss and gradient of the weight add up over all chunks: += and not ="
    compare(answer, n=4, v=7, chunk=2, hint=hint)
    compare(answer, n=5, v=7, chunk=2, hint=hint)  # the last chunk is shorter
    compare(answer, n=33, v=50, chunk=8, dtype=torch.float32, tolerance=1e-4)


def check_ignored_labels(answer):
    """Labels of -100, which do not count"""
    compare(answer, n=4, v=7, chunk=4, ignored=[1])
    compare(answer, n=9, v=7, chunk=2, ignored=[0, 4, 5, 8])
    compare(answer, n=3, v=7, chunk=2, ignored=[0, 1, 2])


def check_large_logits(answer):
    """Logits whose exponential is larger than any float32"""
    compare(answer, n=4, v=7, chunk=3, scale=300.0, dtype=torch.float32, tolerance=1e-2)


def check_memory(answer):
    """Not all logits are in memory at once"""
    n, v, chunk = 1024, 4096, 32
    arguments = inputs(n, v, torch.float32, d=16)
    result, peak = answer.measure("chunked_cross_entropy", *arguments, chunk)
    of_all = 4 * n * v
    assert peak <= of_all / 4, (
        f"for {n} tokens, {v} entries and chunk = {chunk}, your tensors took {peak / 1e6:.1f} MB "
        f"at once. The logits of all tokens take {of_all / 1e6:.1f} MB: expected at most a quarter"
    )
    compare_results(result, arguments, 1e-2, f"{n} tokens, V = {v}, chunk = {chunk}")


def check_bugs(answer):
    """BUGS: the bug of each curve"""
    bugs = answer.value("BUGS")
    wrong = []
    for letter, cause in planted.letters().items():
        named = bugs.get(letter)
        if named is None:
            raise ToDo(f"BUGS has no cause for {letter}")
        assert named in HINTS, f"BUGS: {letter} is {named!r}, expected one of {', '.join(HINTS)}"
        if named != cause:
            wrong.append(f"{letter} is not {named!r}: compare {HINTS[cause]}")
    assert not wrong, "\n".join(wrong)


# --------------------------------------------------------------------------------------------------
# The comparison


def inputs(n: int, v: int, dtype, d: int = 5, scale: float = 1.0, ignored=()) -> tuple:
    """hidden (n, d), weight (v, d) and labels (n,), the same in each call."""
    generator = torch.Generator().manual_seed(n * v)
    hidden = torch.randn(n, d, generator=generator, dtype=torch.float64)
    weight = torch.randn(v, d, generator=generator, dtype=torch.float64)
    labels = torch.randint(v, (n,), generator=generator)
    labels[list(ignored)] = IGNORE
    return (scale * hidden).to(dtype), weight.to(dtype), labels


def compare(
    answer, n, v, chunk, dtype=torch.float64, tolerance=1e-9, scale=1.0, ignored=(), hint=""
):
    """Check one call of the answer, for n tokens and v entries of the vocabulary."""
    arguments = inputs(n, v, dtype, scale=scale, ignored=ignored)
    case = f"{n} tokens, V = {v}, chunk = {chunk}, {dtype}, labels {shown(arguments[2].tolist())}"
    got = answer.call("chunked_cross_entropy", *arguments, chunk)
    compare_results(got, arguments, tolerance, case, hint)


def compare_results(got, arguments, tolerance: float, case: str, hint: str = "") -> None:
    """Check what a call returned against float64."""
    hidden, weight, labels = arguments
    leaves = [tensor.double().requires_grad_() for tensor in (hidden, weight)]
    loss = reference_linear_cross_entropy(*leaves, labels)
    exact = (loss, *torch.autograd.grad(loss, leaves))
    names = ("the loss", "the gradient of hidden", "the gradient of weight")
    for what, result, expected in zip(names, got, exact, strict=True):
        close(f"{what}, for {case}", result, expected.to(hidden.dtype), tolerance, hint)
