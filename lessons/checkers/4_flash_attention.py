"""Checks exercise 4: the online softmax in NumPy and a Triton kernel, against float64."""

# ruff: noqa: E741 (`l` is the name in the papers)

import math

import numpy as np
import torch

from lessons.answers import Skipped, close
from lessons.pictures import why_no_interpreter

TOLERANCE = {"float64": 1e-12, "float32": 1e-5}  # of outputs of size 1
N_BLOCKS = 128  # made when the answer asks for them, where its memory is measured
BOTH_GROW = "when the maximum grows, the sum l and the output o both need the factor"
LARGE = "subtract the largest score before exp"


def check_max_and_sum(answer):
    """The running maximum and sum, never all scores at once: max_and_sum"""
    random = np.random.default_rng(0)
    inf = math.inf
    cases = [
        [[[3.0]]],
        [[[1.0, 3.0]], [[2.0, 5.0]]],
        [[[5.0, 2.0]], [[3.0, 1.0]]],
        [[[9_999.0]], [[10_000.0]], [[9_998.0]]],
        [[[-9_999.0]], [[-10_000.0]]],
        [[[1.0, 4.0], [0.0, 1.0]], [[2.0], [7.0]]],
        [[[1.0, 2.0]], [[-inf, -inf]]],
        [[[-inf, -inf]], [[1.0, 2.0]]],
        [[[-inf], [1.0]], [[-inf], [2.0]]],
    ]
    for dtype in TOLERANCE:
        for lists in cases:
            blocks = [np.array(block, dtype) for block in lists]
            scores = np.concatenate(blocks, axis=1).astype(np.float64)
            m = scores.max(axis=1)
            l = np.exp(scores - np.where(np.isinf(m), 0, m)[:, None]).sum(axis=1)
            got_m, got_l = answer.call("max_and_sum", iter(blocks))
            case = f"for blocks of scores {lists} ({dtype})"
            close(f"max_and_sum's m, {case}", got_m, m.astype(dtype), 0)
            tolerance = 4 * TOLERANCE[dtype]
            hint = BOTH_GROW if len(blocks) > 1 else ""
            close(f"max_and_sum's l, {case}", got_l, l.astype(dtype), tolerance, hint)
    blocks = (random.normal(size=(32, 256)) for _ in range(N_BLOCKS))
    need_little_memory("max_and_sum", answer.measure_arrays("max_and_sum", blocks))


def check_attention(answer):
    """Attention over blocks of keys, never all scores at once: attention"""
    random = np.random.default_rng(0)
    first, second = (slice(None), slice(0, 8)), (slice(None), slice(8, 16))
    for dtype in TOLERANCE:
        compare_attention(answer, dtype, [1], 1)
        compare_attention(answer, dtype, [4, 4, 2], 3)
        compare_attention(answer, dtype, [8] * 6, 4, scale=0.5, causal=True)
        compare_attention(answer, dtype, [8] * 6, 4, hidden=first)
        compare_attention(answer, dtype, [8] * 6, 4, hidden=second)
        compare_attention(answer, dtype, [8] * 6, 4, size=50)  # scores of 10,000
        compare_attention(answer, dtype, [8] * 6, 4, size=-50)
        compare_attention(answer, dtype, [4, 4], 3, hidden=1)  # the second query sees no key
    shapes = (256, 16), (256, 16), (32, 256)  # of k, v and the bias of a block
    blocks = ([random.normal(size=shape) for shape in shapes] for _ in range(N_BLOCKS))
    peak = answer.measure_arrays("attention", random.normal(size=(32, 16)), blocks, 0.1)
    need_little_memory("attention", peak)


def compare_attention(
    answer, dtype, sizes, n_queries, scale=1.0, causal=False, hidden=None, size=0
):
    """One case against float64.

    sizes: keys of each block. hidden: the part of the bias that is -inf. size: q and k are integers
    up to it, so that large scores are exact in fp32; those of a negative size are negative.
    """
    random = np.random.default_rng(1)
    n_keys, D = sum(sizes), 8
    q, k, v = (random.normal(size=(n, D)) for n in (n_queries, n_keys, n_keys))
    if size:
        q, k = (random.integers(0, abs(size) + 1, x.shape) for x in (q, k))
        q = q * np.sign(size)
    distance = np.arange(n_keys - n_queries, n_keys)[:, None] - np.arange(n_keys)
    bias = np.where(distance < 0, -np.inf, -0.25 * distance) if causal else 0.0 * distance
    if hidden is not None:
        bias[hidden] = -np.inf
    q, k, v, bias = (x.astype(dtype) for x in (q, k, v, bias))

    cuts = np.cumsum(sizes)[:-1]
    blocks = zip(np.split(k, cuts), np.split(v, cuts), np.split(bias, cuts, axis=1), strict=True)
    got = answer.call("attention", q, iter(list(blocks)), scale)

    q, k, v, bias = (x.astype(np.float64) for x in (q, k, v, bias))
    scores = q @ k.T * scale + bias
    largest = scores.max(axis=1, keepdims=True)
    p = np.exp(scores - np.where(np.isinf(largest), 0, largest))
    exact = p @ v / np.maximum(p.sum(axis=1, keepdims=True), 1e-300)
    what = f"attention, for {n_queries} queries, blocks of {sizes} keys, {scale=} ({dtype})"
    hint = BOTH_GROW if len(sizes) > 1 and scale == 1 and hidden is None else ""
    close(what, got, exact.astype(dtype), 4 * TOLERANCE[dtype], LARGE if size else hint)


def need_little_memory(name: str, peak: int) -> None:
    """The answer must not hold the scores of all blocks, 32 x 256 in fp64 each, at once."""
    of_block = 32 * 256 * 8
    of_all = N_BLOCKS * of_block
    assert peak < of_all / 4, (
        f"{name}: the results are right, but it held {peak / 1e6:.1f} MB at once. All scores take "
        f"{of_all / 1e6:.1f} MB, those of one block {of_block / 1e6:.2f} MB: keep only m, l and o "
        "between blocks"
    )


def check_kernel(answer):
    """A Triton kernel for one block of queries: kernel and forward"""
    if reason := why_no_interpreter():
        raise Skipped(f"not here: {reason}")
    short = "the last block is shorter: both loads need `mask=`, and such keys no weight"
    for dtype, tolerance in ((torch.float32, 2e-5), (torch.float16, 1e-2)):
        compare_kernel(answer, 16, 16, 0.0, "", dtype, tolerance)
        compare_kernel(answer, 32, 16, 0.0, BOTH_GROW, dtype, tolerance)
        compare_kernel(answer, 32, 16, 0.5, "", dtype, tolerance)
        compare_kernel(answer, 40, 16, 0.5, short, dtype, tolerance)
        compare_kernel(answer, 70, 32, 0.0625, short, dtype, tolerance)
    compare_kernel(answer, 40, 16, 0.0, LARGE, torch.float32, 2e-5, large=True)


def compare_kernel(answer, n_keys, block_n, slope, hint, dtype, tolerance, large=False):
    """One case with 16 queries, against float64. large: scores of hundreds, exact in fp32."""
    random = torch.Generator().manual_seed(3)
    D = 16 if large else 32
    q, k, v = (torch.randn(n, D, generator=random) for n in (16, n_keys, n_keys))
    if large:
        q, k = ((16 * x).round() for x in (q, k))
    q, k, v = (x.to(dtype) for x in (q, k, v))
    distance = torch.arange(n_keys - 16, n_keys)[:, None] - torch.arange(n_keys)
    scores = q.double() @ k.double().T * D**-0.5 - slope * distance
    exact = torch.softmax(scores.masked_fill(distance < 0, -math.inf), dim=-1) @ v.double()
    got = answer.call("forward", q, k, v, slope, block_n)
    what = f"forward, for {n_keys} keys, blocks of {block_n}, {slope=} ({dtype})"
    close(what, got, exact.to(dtype), tolerance * exact.abs().max().item(), hint)
