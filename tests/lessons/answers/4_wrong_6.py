"""Wrong: the kernel is empty, and forward computes with torch.softmax.

Refused by check_kernel.
"""

# ruff: noqa: E741 (`l` is the name in the papers)

import numpy as np
import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # as on a Mac
    triton = None


def max_and_sum(score_blocks):
    """The largest score m of each row, and the sum l of exp(score - m), in one pass."""
    m, l = None, None
    for s in score_blocks:  # (rows, n)
        if m is None:
            m = np.full(s.shape[0], -np.inf, s.dtype)
            l = np.zeros(s.shape[0], s.dtype)
        m_new = np.maximum(m, s.max(axis=1))
        finite = finite_part(m_new)
        # The factor moves the old sum to the new maximum. In the first block it is exp(-inf) = 0.
        l = l * np.exp(m - finite) + np.exp(s - finite[:, None]).sum(axis=1)
        m = m_new
    return m, l


def finite_part(m):
    """m with 0 where it is -inf, so that a score of -inf minus it is -inf and not NaN."""
    return np.where(np.isinf(m), np.zeros_like(m), m)


def attention(q, blocks, scale):
    """softmax(q k^T * scale + bias) v for keys and values that come block by block."""
    n_queries = q.shape[0]
    m = np.full(n_queries, -np.inf, q.dtype)
    l = np.zeros(n_queries, q.dtype)
    o = np.zeros_like(q)  # the sum of exp(score - m) v, not divided by l yet
    for k, v, bias in blocks:
        s = q @ k.T * q.dtype.type(scale) + bias  # (Tq, n); without .type, an old NumPy widens it
        m_new = np.maximum(m, s.max(axis=1))
        finite = finite_part(m_new)
        factor = np.exp(m - finite)
        p = np.exp(s - finite[:, None])
        l = l * factor + p.sum(axis=1)
        o = o * factor[:, None] + p @ v
        m = m_new
    # One division, at the end. A query that saw no key has o = 0 and l = 0, and gets 0 / 1.
    return o / np.where(l > 0, l, np.ones_like(l))[:, None]


if triton is not None:

    @triton.jit
    def kernel(
        q, k, v, out, n_keys, scale, slope,
        D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    ):  # fmt: skip
        """out = softmax(q k^T * scale + bias) v for one block of BLOCK_M queries."""


def forward(q, k, v, slope, block_n):
    """Causal attention with ALiBi of the last Tq of Tk positions, by one program of `kernel`."""
    Tq, Tk, D = len(q), len(k), q.shape[1]
    i, j = torch.arange(Tk - Tq, Tk)[:, None], torch.arange(Tk)
    scores = q.float() @ k.float().T * D**-0.5 - slope * (i - j)
    out = torch.softmax(scores.masked_fill(j > i, -float("inf")), -1) @ v.float()
    sizes = {"D": D, "BLOCK_M": Tq, "BLOCK_N": block_n}
    kernel[(1,)](q, k, v, torch.empty_like(q), Tk, D**-0.5, slope, **sizes)
    return out.to(q.dtype)
