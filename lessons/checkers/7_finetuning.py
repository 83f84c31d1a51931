"""Checks exercise 7: a LoRA layer's forward, backward and merge, in float64."""

import torch

from lessons.answers import close

SCALE = 0.5
# The largest difference, for values of about 1. bfloat16 has 8 significant bits.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2.0**-7}
ONE = torch.ones(1, 1)


def check_forward(answer):
    """forward: W x + bias + s B A x"""
    got = answer.call("forward", 2 * ONE, 3 * ONE, ONE[0], 5 * ONE, 7 * ONE, SCALE)
    close("y, for x = 2, W = 3, bias = 1, A = 5, B = 7, scale = 0.5", got, 42 * ONE, 1e-5)
    for rows, with_bias in (((6,), True), ((2, 3), False)):
        for dtype in TOLERANCE:
            x, W, bias, A, B, _ = inputs(rows, 12, 10, 3, dtype)
            bias = bias if with_bias else None
            case = f"x {(*rows, 12)} in {dtype}, {'a' if with_bias else 'no'} bias, rank 3"
            got = answer.call("forward", x, W, bias, A, B, SCALE)
            expected = exact(x, W, bias, A, B).to(dtype)
            close(f"y, for {case}", got, expected, tolerance(expected))

    x = torch.ones(1, 2, dtype=torch.bfloat16)
    A = torch.tensor([[1 + 2.0**-10, -1.0]])
    got = answer.call("forward", x, torch.zeros_like(x), None, A, ONE, 1.0)
    case = "x = [[1, 1]] in bfloat16, W = 0, A = [[1 + 2**-10, -1]] and B = [[1]] in float32"
    close(f"y, for {case}", got, 2.0**-10 * ONE.bfloat16(), 1e-6)


def check_backward(answer):
    """backward: the gradients of x, A and B"""
    got = answer.call("backward", ONE, 2 * ONE, 3 * ONE, 5 * ONE, 7 * ONE, SCALE)
    case = "dy = 1, x = 2, W = 3, A = 5, B = 7, scale = 0.5"
    compare_gradients(got, (20.5 * ONE, 7 * ONE, 5 * ONE), case)
    for rows in ((6,), (2, 3)):
        for dtype in TOLERANCE:
            x, W, _, A, B, dy = inputs(rows, 12, 10, 3, dtype)
            got = answer.call("backward", dy, x, W, A, B, SCALE)
            case = f"x {(*rows, 12)} and dy {(*rows, 10)} in {dtype}, rank 3"
            compare_gradients(got, exact_gradients(dy, x, W, A, B), case)


def compare_gradients(got, expected: tuple, case: str) -> None:
    """Compare (dx, dA, dB)."""
    of_rows = "it sums over all rows of x: (B, T, in) is B T rows"
    hints = {"dx": "", "dA": of_rows, "dB": of_rows}
    for (name, hint), mine, theirs in zip(hints.items(), got, expected, strict=True):
        close(f"{name}, for {case}", mine, theirs, tolerance(theirs), hint)


def check_memory(answer):
    """forward and backward: no tensor as large as W"""
    x, W, bias, A, B, dy = inputs((2, 2), 1024, 1024, 4, torch.float32)
    calls = {"forward": (x, W, bias, A, B, SCALE), "backward": (dy, x, W, A, B, SCALE)}
    for function, args in calls.items():
        _, peak = answer.measure(function, *args)
        held = f"{function}: its tensors held {peak / 1e6:.1f} MB at once"
        hint = "never form B A, begin with A x; W needs no gradient"
        assert peak < W.nbytes / 2, f"{held}, and W has {W.nbytes / 1e6:.1f} MB: {hint}"


def check_merge(answer):
    """merge: W + s B A as one weight"""
    got = answer.call("merge", 3 * ONE, 5 * ONE, 7 * ONE, SCALE)
    close("the merged weight, for W = 3, A = 5, B = 7, scale = 0.5", got, 20.5 * ONE, 1e-5)
    for dtype in TOLERANCE:
        _, W, _, A, B, _ = inputs((1,), 12, 10, 3, dtype)
        got = answer.call("merge", W, A, B, SCALE)
        expected = exactly_merged(W, A, B)
        close(f"the merged weight, for W (10, 12) in {dtype}", got, expected, tolerance(expected))
    # s B A = 2**-8 + 2**-17 needs 10 significant bits, so bfloat16 makes it 2**-8. Then the sum is
    # half-way between two bfloat16, and rounds down; the exact sum rounds up.
    W = ONE.bfloat16()
    got = answer.call("merge", W, ONE, (2.0**-8 + 2.0**-17) * ONE, 1.0)
    case = "W = 1 in bfloat16 and s B A = 2**-8 + 2**-17 in float32"
    close(f"the merged weight, for {case}", got, (1 + 2.0**-7) * W, 1e-6, "round once, at the end")


def check_unmerge(answer):
    """unmerge: W back, to within rounding"""
    got = answer.call("unmerge", 20.5 * ONE, 5 * ONE, 7 * ONE, SCALE)
    close("unmerge, for merged = 20.5, A = 5, B = 7, scale = 0.5", got, 3 * ONE, 1e-5)
    for dtype in TOLERANCE:
        _, W, _, A, B, _ = inputs((1,), 12, 10, 3, dtype)
        merged = exactly_merged(W, A, B)
        got = answer.call("unmerge", merged, A, B, SCALE)
        close(f"unmerge, for W (10, 12) in {dtype}", got, W, tolerance(merged))


# --------------------------------------------------------------------------------------------------
# The formulas in float64


def inputs(rows, n_in: int, n_out: int, rank: int, dtype):
    """x, W, bias, A, B, dy with values of about 1; A and B in fp32 or wider."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape, fan_in=1):
        values = torch.randn(shape, generator=generator, dtype=torch.float64) / fan_in**0.5
        return values.to(dtype)

    wide = torch.promote_types(dtype, torch.float32)
    x, W, bias = draw(*rows, n_in), draw(n_out, n_in, fan_in=n_in), draw(n_out)
    A, B = draw(rank, n_in, fan_in=n_in).to(wide), draw(n_out, rank, fan_in=rank).to(wide)
    return x, W, bias, A, B, draw(*rows, n_out)


def exact(x, W, bias, A, B) -> torch.Tensor:
    """The formula in float64."""
    x, W, A, B = (value.double() for value in (x, W, A, B))
    y = x @ W.T + SCALE * (x @ A.T @ B.T)
    return y if bias is None else y + bias.double()


def exact_gradients(dy, x, W, A, B) -> tuple:
    """What autograd makes of it, in the dtypes that `backward` promises."""
    leaves = [value.double().requires_grad_() for value in (x, A, B)]
    wide, A_wide, B_wide = leaves
    found = torch.autograd.grad(exact(wide, W, None, A_wide, B_wide), leaves, dy.double())
    return tuple(grad.to(value.dtype) for grad, value in zip(found, (x, A, B), strict=True))


def exactly_merged(W, A, B) -> torch.Tensor:
    """The merged weight, rounded once, to the dtype of W."""
    return (W.double() + SCALE * (B.double() @ A.double())).to(W.dtype)


def tolerance(expected) -> float:
    """How far a result in the dtype of `expected` may be away from it."""
    return TOLERANCE[expected.dtype] * max(1.0, expected.abs().max().item())
