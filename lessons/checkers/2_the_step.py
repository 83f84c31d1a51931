"""Checks exercise 2: cross-entropy without all the logits, and five bugs known by their curves.

`python -m lessons check 2` runs the functions `check_...` one by one. The loss and its gradients
are compared with loss.reference_linear_cross_entropy in float64, which holds all logits.
"""

import torch

from lessons import planted
from lessons.answers import ToDo, Wrong, close, describe_value, need
from loss import IGNORE, reference_linear_cross_entropy

HINTS = {
    "labels not shifted": "compare its logged loss with its validation loss, and with the lowest "
    "loss that text allows",
    "decay without rate": "compare the size of its weights with the run without a bug; its last "
    "loss is ln(256) = 5.55",
    "mean of means": "compare its two validation losses with those of the run without a bug: "
    "one is better, one is worse",
    "schedule too fast": "compare by how much its weights change in the middle of the run, and at "
    "the end",
    "gradients not zeroed": "compare its gradient norm with that of the run without a bug: what "
    "does clipping to a norm of 1 leave behind in .grad?",
}


def check_one_chunk(answer):
    """Loss and gradients, all tokens in one chunk"""
    compare(answer, n=1, v=3, chunk=1)
    compare(answer, n=4, v=7, chunk=4)
    compare(answer, n=4, v=7, chunk=100)


def check_several_chunks(answer):
    """The same in several chunks, the last of them shorter"""
    compare(answer, n=4, v=7, chunk=2)
    compare(answer, n=5, v=7, chunk=2)
    compare(answer, n=33, v=50, chunk=8)
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
    of_all, of_chunk = 4 * n * v, 4 * chunk * v
    need(
        peak <= of_all / 4,
        f"for hidden {describe_value(arguments[0])}, {v} entries and chunk = {chunk}, your tensors "
        f"took {peak / 1e6:.1f} MB at once: expected at most {of_all / 4e6:.1f} MB.\nThe logits of "
        f"all tokens take {of_all / 1e6:.1f} MB, those of a chunk {of_chunk / 1e6:.2f} MB.\n"
        + ("Do all of them exist at once?" if peak >= of_all else "What is kept of each chunk?"),
    )
    compare_results(result, arguments, chunk, 1e-2, f"{n} tokens, V = {v}, chunk = {chunk}")


def check_bugs(answer):
    """BUGS: the bug of each curve"""
    bugs = answer.value("BUGS")
    need(isinstance(bugs, dict), f"BUGS: expected a dictionary, got {describe_value(bugs)}")
    right = planted.letters()
    missing = [letter for letter in right if bugs.get(letter) is None]
    if missing:
        raise ToDo(f"BUGS has no cause for {', '.join(missing)}")
    for letter in right:
        need(
            isinstance(bugs[letter], str) and bugs[letter] in planted.CAUSES,
            f"BUGS: {letter} is {describe_value(bugs[letter])}, but expected one of "
            f"{', '.join(planted.CAUSES)}",
        )
    wrong = [
        f"{letter} is not {bugs[letter]!r}:\n{HINTS[cause]}"
        for letter, cause in right.items()
        if bugs[letter] != cause
    ]
    if wrong:
        raise Wrong("\n".join(wrong))


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


def exact(hidden, weight, labels) -> list:
    """[loss, gradient of hidden, gradient of weight] from float64, in the dtype of hidden."""
    leaves = [tensor.double().requires_grad_() for tensor in (hidden, weight)]
    loss = reference_linear_cross_entropy(*leaves, labels)
    gradients = torch.autograd.grad(loss, leaves)
    return [tensor.detach().to(hidden.dtype) for tensor in (loss, *gradients)]


def compare(answer, n, v, chunk, dtype=torch.float64, tolerance=1e-9, scale=1.0, ignored=()):
    """Check one call of the answer, for n tokens and v entries of the vocabulary."""
    arguments = inputs(n, v, dtype, scale=scale, ignored=ignored)
    try:
        got = answer.call("chunked_cross_entropy", *arguments, chunk)
    except Wrong as error:
        hint = f"{IGNORE} is IGNORE: such a token does not count" if ignored else ""
        raise Wrong(f"{error}\n{hint}".strip()) from None
    case = f"{n} tokens, V = {v}, chunk = {chunk}, {str(dtype).removeprefix('torch.')}"
    if scale > 1:
        case += f", logits up to {(arguments[0] @ arguments[1].T).abs().max():.0f}"
    if ignored:
        case += f", labels {arguments[2].tolist()}"
    compare_results(got, arguments, chunk, tolerance, case)


def compare_results(got, arguments, chunk: int, tolerance: float, case: str) -> None:
    """Check what a call returned. Wrong with a hint if it is a known mistake."""
    is_triple = isinstance(got, tuple | list) and len(got) == 3
    need(
        is_triple,
        "chunked_cross_entropy: expected (loss, gradient of hidden, gradient of weight) "
        f"for {case}, but got {describe_value(got)}",
    )
    names = ("the loss", "the gradient of hidden", "the gradient of weight")
    for what, result, expected in zip(names, got, exact(*arguments), strict=True):
        try:
            close(what, result, expected, tolerance, case)
        except Wrong as error:
            hints = mistakes(what, arguments, chunk)
            hint = next((hint for hint, value in hints if is_close(result, value, tolerance)), "")
            raise Wrong(f"{error}\n{hint}".strip()) from None


def is_close(got, value, tolerance: float) -> bool:
    """Whether it is this tensor, up to the tolerance."""
    same_kind = isinstance(got, torch.Tensor) and got.shape == value.shape
    return same_kind and torch.allclose(got.double(), value.double(), rtol=0, atol=tolerance)


def mistakes(what: str, arguments, chunk: int):
    """(hint, value) of mistakes that are often made, for one of the three results."""
    hidden, weight, labels = arguments
    place = ("the loss", "the gradient of hidden", "the gradient of weight").index(what)
    right = exact(*arguments)[place]
    counted = int((labels != IGNORE).sum())
    if counted:
        yield "That is the mean over the counted tokens: return the sum", right / counted
    yield "That is the mean over all tokens: return the sum", right / len(labels)

    first = slice(0, chunk)
    last = slice((len(hidden) - 1) // chunk * chunk, None)
    whole = slice(0, len(hidden) // chunk * chunk)
    for rows, hint in (
        (last, "That is of the last chunk alone: those of all chunks add up"),
        (first, "That is of the first chunk alone: those of all chunks add up"),
        (whole, "The last chunk, which is shorter, is missing"),
    ):
        if what != "the gradient of hidden" and labels[rows].numel():
            yield hint, exact(hidden[rows], weight, labels[rows])[place]

    as_zero = exact(hidden, weight, labels.clamp(min=0))[place]
    yield "That is what comes if ignored labels count as token 0", as_zero
    if what != "the loss":
        ignored = (labels == IGNORE)[:, None]
        softmax = torch.softmax(hidden @ weight.T, -1) * ignored  # their gradient without a label
        extra = softmax @ weight if what == "the gradient of hidden" else softmax.T @ hidden
        yield "The tokens that do not count have their softmax in it", right + extra
        yield "The sign is wrong: the gradient of the logits is softmax - onehot", -right
