"""Checks the exercise of lesson 4: `python -m lessons check 4`."""

# ruff: noqa: E741 (`l` is the name in the papers)

import importlib.metadata
import importlib.util
import math

import numpy as np
import torch

from lessons.answering import RandomBlocks
from lessons.answers import Skipped, close

TOLERANCE = {"float64": 1e-12, "float32": 1e-5}  # of outputs of size 1
BOTH_GROW = "when the maximum grows, the sum l and the output o both need the factor"
HIDDEN = "-inf minus -inf is NaN: where no finite score was seen, let 0 stand for the maximum"


# --- The running maximum and sum


def check_max_and_sum(answer):
    """The running maximum and sum, never all scores at once: max_and_sum"""
    inf = math.inf
    cases = [
        ("one score, 3", [[[3.0]]], ""),
        ("the scores 1, 3 and then 2, 5", [[[1.0, 3.0]], [[2.0, 5.0]]], BOTH_GROW),
        ("the scores 5, 2 and then 3, 1", [[[5.0, 2.0]], [[3.0, 1.0]]], BOTH_GROW),
        ("scores of 10,000", [[[9_999.0]], [[10_000.0]], [[9_998.0]]], ""),
        ("scores of -10,000", [[[-9_999.0]], [[-10_000.0]]], "m begins at -inf, not at 0"),
        ("two rows", [[[1.0, 4.0], [0.0, 1.0]], [[2.0], [7.0]]], "each row has its own m and l"),
        ("a last block that is all -inf", [[[1.0, 2.0]], [[-inf, -inf]]], HIDDEN),
        ("a first block that is all -inf", [[[-inf, -inf]], [[1.0, 2.0]]], HIDDEN),
        ("a row that is all -inf", [[[-inf], [1.0]], [[-inf], [2.0]]], HIDDEN),
    ]
    for dtype in ("float64", "float32"):
        for case, lists, hint in cases:
            compare_max_and_sum(answer, [np.array(block, dtype) for block in lists], case, hint)
        random = np.random.default_rng(0)
        blocks = [(10 * random.normal(size=(5, n))).astype(dtype) for n in (7, 1, 64, 30)]
        compare_max_and_sum(answer, blocks, "random blocks of 7, 1, 64 and 30 scores", "")
    need_little_memory(answer, "max_and_sum")


def compare_max_and_sum(answer, blocks: list, case: str, hint: str) -> None:
    """One case against float64."""
    dtype = blocks[0].dtype
    result = answer.call("max_and_sum", iter(blocks))
    is_pair = isinstance(result, tuple | list) and len(result) == 2
    assert is_pair, f"max_and_sum must return two arrays, (m, l), for {case}"
    scores = np.concatenate(blocks, axis=1).astype(np.float64)
    m = scores.max(axis=1)
    l = np.exp(scores - np.where(np.isinf(m), 0, m)[:, None]).sum(axis=1)
    tolerance = TOLERANCE[dtype.name] * l.max(initial=1)
    for name, got, expected in zip("ml", result, (m, l), strict=True):
        what = f"max_and_sum's {name}, for {case} ({dtype})"
        close(what, got, expected.astype(dtype), tolerance, hint)


# --- Attention


def check_attention(answer):
    """Attention over blocks of keys, never all scores at once: attention"""
    q_4, sizes = "4 queries, 6 blocks of 8 keys", [8] * 6
    shapes = "q (Tq, D), k (n, D), a bias (Tq, n): softmax(q k^T * scale + bias) v over the keys"
    for dtype in ("float64", "float32"):
        compare_attention(answer, dtype, "one query, one block of one key", [1], 1, shapes)
        compare_attention(answer, dtype, "one query, two blocks of one key", [1, 1], 1, BOTH_GROW)
        compare_attention(answer, dtype, "3 queries, 4, 4 and 2 keys", [4, 4, 2], 3, BOTH_GROW)
        compare_attention(answer, dtype, "2 queries, causal", [2], 2, shapes, causal=True)
        compare_attention(answer, dtype, f"{q_4}, scale 0.5", sizes, 4, shapes, scale=0.5)
        compare_attention(
            answer, dtype, f"{q_4}, causal", sizes, 4, shapes, slope=0.25, causal=True
        )
        compare_attention(answer, dtype, f"{q_4}, the first hidden", sizes, 4, HIDDEN, hidden=0)
        compare_attention(answer, dtype, f"{q_4}, the second hidden", sizes, 4, HIDDEN, hidden=1)
        large = "subtract the maximum before exp; it begins at -inf, not at 0"
        compare_attention(answer, dtype, f"{q_4}, scores of 10,000", sizes, 4, large, size=50)
        compare_attention(answer, dtype, f"{q_4}, of -10,000", sizes, 4, large, size=-50)
        blind = "the second query sees no key: its row is 0"
        compare_attention(answer, dtype, "3 queries, 2 blocks", [4, 4], 3, blind, blind=1)
    need_little_memory(answer, "attention")


def compare_attention(
    answer, dtype, case, sizes, n_queries, hint,
    scale=1.0, slope=0.0, causal=False, hidden=None, size=0, blind=None,
):  # fmt: skip
    """One case against float64.

    sizes: keys of each block. hidden: a block that no query sees. blind: a query that sees no key.
    size: q and k are integers up to it, so that large scores are exact in fp32; the scores of a
    negative size are negative.
    """
    random = np.random.default_rng(1)
    n_keys, D = sum(sizes), 8
    q, k = random.normal(size=(n_queries, D)), random.normal(size=(n_keys, D))
    if size:
        q, k = (random.integers(-abs(size), abs(size) + 1, x.shape) for x in (q, k))
    if size < 0:
        q, k = np.abs(q), -np.abs(k)
    q, k, v = (x.astype(dtype) for x in (q, k, random.normal(size=(n_keys, D))))

    ends = np.cumsum(sizes)
    i = np.arange(n_keys - n_queries, n_keys)[:, None]
    j = np.arange(n_keys)
    bias = -slope * np.abs(i - j)
    bias[(j > i) & causal] = -np.inf
    if hidden is not None:
        bias[:, ends[hidden] - sizes[hidden] : ends[hidden]] = -np.inf
    if blind is not None:
        bias[blind] = -np.inf
    bias = bias.astype(dtype)

    parts = [np.split(k, ends[:-1]), np.split(v, ends[:-1]), np.split(bias, ends[:-1], axis=1)]
    got = answer.call("attention", q, iter(list(zip(*parts, strict=True))), scale)
    exact = exact_attention(q, k, v, bias, scale)
    what = f"attention, for {case} ({dtype})"
    close(what, got, exact.astype(dtype), 4 * TOLERANCE[dtype], hint)


def exact_attention(q, k, v, bias, scale) -> np.ndarray:
    """The formula in float64; zeros for a query that sees no key."""
    q, k, v, bias = (x.astype(np.float64) for x in (q, k, v, bias))
    scores = q @ k.T * scale + bias
    largest = scores.max(axis=1, keepdims=True)
    p = np.exp(scores - np.where(np.isinf(largest), 0, largest))
    total = p.sum(axis=1, keepdims=True)
    return p @ v / np.where(total > 0, total, 1)


def need_little_memory(answer, name: str) -> None:
    """The answer must not hold all scores at once. The blocks are made when it asks for them."""
    rows, n_blocks, keys, width = 32, 128, 256, 16
    if name == "attention":
        shapes = [(keys, width), (keys, width), (rows, keys)]
        args = np.ones((rows, width)), RandomBlocks(n_blocks, shapes), 0.1
    else:
        args = (RandomBlocks(n_blocks, [(rows, keys)]),)
    peak = answer.measure_arrays(name, *args)
    scores = rows * n_blocks * keys * 8  # bytes
    assert peak < scores / 4, (
        f"{name}: the results are right, but it held {peak / 1e6:.1f} MB at once, for {rows} rows "
        f"and {n_blocks} blocks of {keys} keys. All scores take {scores / 1e6:.1f} MB, those of "
        f"one block {scores / n_blocks / 1e6:.2f} MB: keep only m, l and o between blocks"
    )


# --- The kernel


def check_kernel(answer):
    """A Triton kernel for one block of queries: kernel and forward"""
    skip_without_interpreter()
    short = "the last block is shorter: both loads need `mask=`, and such keys no weight"
    bias = "the queries are the last of the positions; the bias is -slope * (i - j)"
    cases = [
        ("16 keys, one block", 16, 16, 0.0, "one block needs the mask j <= i and the scale"),
        ("32 keys, blocks of 16", 32, 16, 0.0, BOTH_GROW),
        ("32 keys, blocks of 16, slope 0.5", 32, 16, 0.5, bias),
        ("40 keys, blocks of 16", 40, 16, 0.5, short),
        ("70 keys, blocks of 32", 70, 32, 0.0625, short),
    ]
    for dtype, tolerance in ((torch.float32, 2e-5), (torch.float16, 1e-2)):
        for case, n_keys, block_n, slope, hint in cases:
            what = f"forward, for {case} ({dtype})"
            compare_kernel(answer, what, n_keys, block_n, slope, dtype, tolerance, hint)
    large = "forward, for 40 keys, blocks of 16, scores of several hundred (torch.float32)"
    overflow = "subtract the maximum before exp"
    compare_kernel(answer, large, 40, 16, 0.0, torch.float32, 2e-5, overflow, large=True)


def skip_without_interpreter() -> None:
    """Skipped if Triton's interpreter cannot run here."""
    if importlib.util.find_spec("triton") is None:
        raise Skipped("needs Triton, which is not installed here (it comes for Linux)")
    versions = [importlib.metadata.version(name) for name in ("triton", "numpy")]
    triton, numpy = (tuple(map(int, version.split(".")[:2])) for version in versions)
    if triton < (3, 7) and numpy >= (2, 4):
        raise Skipped("needs Triton 3.7 or NumPy before 2.4: else its interpreter has no such loop")


def compare_kernel(
    answer, what, n_keys, block_n, slope, dtype, tolerance, hint, large=False
) -> None:
    """One case with 16 queries, against float64. large: scores of hundreds, exact in fp32."""
    random = torch.Generator().manual_seed(3)
    D = 16 if large else 32
    q, k, v = (torch.randn(n, D, generator=random) for n in (16, n_keys, n_keys))
    if large:
        q, k = ((16 * x).round() for x in (q, k))
    q, k, v = (x.to(dtype) for x in (q, k, v))
    i = torch.arange(n_keys - 16, n_keys)[:, None]
    j = torch.arange(n_keys)
    scores = q.double() @ k.double().T * D**-0.5 - slope * (i - j)
    exact = torch.softmax(scores.masked_fill(j > i, -math.inf), dim=-1) @ v.double()
    got = answer.call("forward", q, k, v, slope, block_n)
    close(what, got, exact.to(dtype), tolerance * exact.abs().max().item(), hint)
