"""Checks the exercise of lesson 4: `python -m lessons check 4`."""

# ruff: noqa: E741 (`l` is the name in the papers)

import importlib.metadata
import importlib.util
import math
import tempfile
from pathlib import Path

import numpy as np
import torch

from lessons.answers import Answer, Skipped, close, need

TOLERANCE = {"float64": 1e-12, "float32": 1e-5}  # of outputs of size 1


class Blocks:
    """Blocks of arrays. In the answer's process they arrive as an iterator."""

    def __init__(self, blocks: list):
        self.blocks = blocks

    def __reduce__(self):
        return iter, (self.blocks,)

    def __repr__(self):
        return f"an iterator over {len(self.blocks)} blocks"


# --- The running maximum and sum


def check_max_and_sum(answer):
    """The running maximum and sum, never all scores at once: max_and_sum"""
    inf = math.inf
    cases = [
        ("one score, 3", [[[3.0]]]),
        ("the scores 1, 3 and then 2, 5", [[[1.0, 3.0]], [[2.0, 5.0]]]),
        ("the scores 5, 2 and then 3, 1", [[[5.0, 2.0]], [[3.0, 1.0]]]),
        ("scores of 10,000", [[[9_999.0]], [[10_000.0]], [[9_998.0]]]),
        ("scores of -10,000", [[[-9_999.0]], [[-10_000.0]]]),
        ("two rows, of which the second grows later", [[[1.0, 4.0], [0.0, 1.0]], [[2.0], [7.0]]]),
        ("a last block that is all -inf", [[[1.0, 2.0]], [[-inf, -inf]]]),
        ("a first block that is all -inf", [[[-inf, -inf]], [[1.0, 2.0]]]),
        ("a row that is all -inf beside one that is not", [[[-inf], [1.0]], [[-inf], [2.0]]]),
    ]
    for dtype in ("float64", "float32"):
        for case, lists in cases:
            compare_max_and_sum(answer, [np.array(block, dtype) for block in lists], case)
        random = np.random.default_rng(0)
        blocks = [(10 * random.normal(size=(5, n))).astype(dtype) for n in (7, 1, 64, 30)]
        compare_max_and_sum(answer, blocks, "four random blocks of 7, 1, 64 and 30 scores")
    need_little_memory(answer, "max_and_sum")


def compare_max_and_sum(answer, blocks: list, case: str) -> None:
    """One case against float64."""
    case = f"{case} ({blocks[0].dtype})"
    result = answer.call("max_and_sum", Blocks(blocks))
    is_pair = isinstance(result, tuple | list) and len(result) == 2
    need(is_pair, f"max_and_sum must return two arrays, (m, l), for {case}")
    scores = np.concatenate(blocks, axis=1).astype(np.float64)
    m = scores.max(axis=1)
    finite = np.where(np.isinf(m), 0, m)
    l = np.exp(scores - finite[:, None]).sum(axis=1)
    tolerance = TOLERANCE[blocks[0].dtype.name] * l.max(initial=1)
    for name, got, expected in zip("ml", result, (m, l), strict=True):
        close(f"max_and_sum's {name}", got, expected.astype(blocks[0].dtype), tolerance, case)


# --- Attention


def check_attention(answer):
    """Attention over blocks of keys, never all scores at once: attention"""
    for dtype in ("float64", "float32"):
        compare_attention(answer, "one query, one block of one key", [1], 1, dtype)
        compare_attention(answer, "one query, two blocks of one key", [1, 1], 1, dtype)
        compare_attention(answer, "3 queries, blocks of 4, 4 and 2 keys", [4, 4, 2], 3, dtype)
        case = "2 queries, one block of 2 keys, causal"
        compare_attention(answer, case, [2], 2, dtype, causal=True)
        sizes = [8] * 6
        case = "4 queries, 6 blocks of 8 keys"
        compare_attention(answer, f"{case}, scale 0.5", sizes, 4, dtype, scale=0.5)
        compare_attention(answer, f"{case}, with a bias", sizes, 4, dtype, slope=0.25)
        compare_attention(answer, f"{case}, causal", sizes, 4, dtype, slope=0.25, causal=True)
        first, second = "the first block is hidden", "the second block is hidden"
        compare_attention(answer, f"{case}, {first}", sizes, 4, dtype, hidden=[0])
        compare_attention(answer, f"{case}, {second}", sizes, 4, dtype, hidden=[1])
        case = f"{case}, scores up to about 10,000"
        compare_attention(answer, case, sizes, 4, dtype, size=50)
        compare_attention(answer, f"{case}, all of them negative", sizes, 4, dtype, size=-50)
        case = "3 queries, of which the second sees no key"
        compare_attention(answer, case, [4, 4], 3, dtype, blind=1)
    need_little_memory(answer, "attention")


def compare_attention(
    answer, case, sizes, n_queries, dtype,
    scale=1.0, slope=0.0, causal=False, hidden=(), size=0, blind=None,
):  # fmt: skip
    """One case against float64.

    sizes: keys of each block. hidden: blocks that no query sees. blind: a query that sees no key.
    size: q and k are integers up to it, so that large scores are exact in fp32; the scores of a
    negative size are negative.
    """
    case = f"{case} ({dtype})"
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
    for block in hidden:
        bias[:, ends[block] - sizes[block] : ends[block]] = -np.inf
    if blind is not None:
        bias[blind] = -np.inf
    bias = bias.astype(dtype)

    parts = [np.split(k, ends[:-1]), np.split(v, ends[:-1]), np.split(bias, ends[:-1], axis=1)]
    got = answer.call("attention", q, Blocks(list(zip(*parts, strict=True))), scale)
    exact = exact_attention(q, k, v, bias, scale)
    close("attention", got, exact.astype(dtype), 4 * TOLERANCE[dtype], case)


def exact_attention(q, k, v, bias, scale) -> np.ndarray:
    """The formula in float64; zeros for a query that sees no key."""
    q, k, v, bias = (x.astype(np.float64) for x in (q, k, v, bias))
    scores = q @ k.T * scale + bias
    largest = scores.max(axis=1, keepdims=True)
    p = np.exp(scores - np.where(np.isinf(largest), 0, largest))
    total = p.sum(axis=1, keepdims=True)
    return p @ v / np.where(total > 0, total, 1)


# --- Memory

# Appended to a copy of the answer: blocks are made when they are asked for.
FEEDER = '''


def bytes_held_over_many_blocks(name, rows, n_blocks, keys, width):
    import tracemalloc

    import numpy

    def make():
        random = numpy.random.default_rng(2)
        for _ in range(n_blocks):
            scores = random.normal(size=(rows, keys))
            if name == "max_and_sum":
                yield scores
            else:
                yield random.normal(size=(keys, width)), random.normal(size=(keys, width)), scores

    q = [numpy.ones((rows, width))] if name == "attention" else []
    scale = [0.1] if name == "attention" else []
    tracemalloc.start()
    globals()[name](*q, make(), *scale)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return most
'''


def need_little_memory(answer, name: str) -> None:
    """Wrong if this function holds all scores at once."""
    rows, n_blocks, keys, width = 32, 128, 256, 16
    scores = rows * n_blocks * keys * 8  # bytes
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / answer.path.name
        copy.write_text(answer.path.read_text(encoding="utf-8") + FEEDER, encoding="utf-8")
        with Answer(copy) as fed:
            most = fed.call("bytes_held_over_many_blocks", name, rows, n_blocks, keys, width)
    need(
        most < scores / 4,
        f"{name}: the results are right, but it held {most / 1e6:.1f} MB at once, for {rows} rows "
        f"and {n_blocks} blocks of {keys} keys. All scores take {scores / 1e6:.1f} MB, those of "
        f"one block {scores / n_blocks / 1e6:.2f} MB: keep only m, l and o between blocks",
    )


# --- The kernel


def check_kernel(answer):
    """A Triton kernel for one block of queries: kernel and forward"""
    skip_without_interpreter()
    cases = [
        ("16 keys, one block", 16, 16, 0.0),
        ("32 keys, blocks of 16", 32, 16, 0.0),
        ("32 keys, blocks of 16, slope 0.5", 32, 16, 0.5),
        ("40 keys, blocks of 16: the last one is shorter", 40, 16, 0.5),
        ("70 keys, blocks of 32: the last one is shorter", 70, 32, 0.0625),
    ]
    for dtype, tolerance in ((torch.float32, 2e-5), (torch.float16, 1e-2)):
        for case, n_keys, block_n, slope in cases:
            compare_kernel(answer, f"{case} ({dtype})", n_keys, block_n, slope, dtype, tolerance)
    case = "40 keys of width 16, blocks of 16, scores of several hundred"
    compare_kernel(answer, case, 40, 16, 0.0, torch.float32, 2e-5, large=True)
    need_kernel(answer)


def skip_without_interpreter() -> None:
    """Skipped if Triton's interpreter cannot run here."""
    if importlib.util.find_spec("triton") is None:
        raise Skipped("needs Triton, which is not installed here (it comes for Linux)")
    versions = [importlib.metadata.version(name) for name in ("triton", "numpy")]
    triton, numpy = (tuple(map(int, version.split(".")[:2])) for version in versions)
    if triton < (3, 7) and numpy >= (2, 4):
        raise Skipped("needs Triton 3.7 or NumPy before 2.4: else its interpreter has no such loop")


def compare_kernel(answer, case, n_keys, block_n, slope, dtype, tolerance, large=False) -> None:
    """One case with 16 queries. large: scores of several hundred, which fp32 holds exactly."""
    q, k, v = queries_keys_values(16, n_keys, 16 if large else 32, seed=3)
    if large:
        q, k = ((16 * x).round() for x in (q, k))
    q, k, v = (x.to(dtype) for x in (q, k, v))
    got = answer.call("forward", q, k, v, slope, block_n)
    exact = exact_forward(q, k, v, slope)
    close("forward", got, exact.to(dtype), tolerance * exact.abs().max().item(), case)


def queries_keys_values(n_queries: int, n_keys: int, D: int, seed: int) -> list:
    """Random q (n_queries, D), k and v (n_keys, D)."""
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(n, D, generator=random) for n in (n_queries, n_keys, n_keys)]


def exact_forward(q, k, v, slope: float) -> torch.Tensor:
    """Causal attention with ALiBi in float64, (Tq, D)."""
    n_queries, n_keys, D = len(q), len(k), q.shape[1]
    i = torch.arange(n_keys - n_queries, n_keys)[:, None]
    j = torch.arange(n_keys)
    scores = q.double() @ k.double().T * D**-0.5 - slope * (i - j)
    probs = torch.softmax(scores.masked_fill(j > i, -math.inf), dim=-1)
    return probs @ v.double()


def need_kernel(answer) -> None:
    """Wrong unless the result comes from what a kernel writes: overwrite that, and it must change.

    The inputs are new, so memory that torch uses again cannot hold the result already.
    """
    q, k, v = queries_keys_values(16, 32, 16, seed=4)
    got, written = answer.call_spoiled("forward", q, k, v, 0.5, 16)
    need(
        written > 0,
        "forward: the results are right, but no launch of a Triton kernel wrote anything: forward "
        "must run your kernel",
    )
    is_the_same = torch.allclose(got.double(), exact_forward(q, k, v, 0.5), atol=1e-3)
    need(
        not is_the_same,
        "forward: the results are right, and stay so when all that the kernel has written is "
        "overwritten: return what the kernel computes",
    )
