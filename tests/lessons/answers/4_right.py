"""A second solution: blocks are solved on their own, then joined by their log-sum-exp."""

# ruff: noqa: E741 (`l` is the name in the papers)

import numpy as np
import torch

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None


def softmax_of_block(s):
    """(lse, probabilities) of one block in float64; lse is -inf where all scores are."""
    s = s.astype(np.float64)
    top = np.maximum(s.max(axis=-1, keepdims=True), -1e300)
    e = np.exp(s - top)
    total = e.sum(axis=-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = top + np.log(total)
    return np.where(total > 0, lse, -np.inf)[..., 0], e / np.maximum(total, 1e-300)


def max_and_sum(score_blocks):
    m = lse = None
    for s in score_blocks:
        dtype = s.dtype
        top = s.max(axis=1).astype(np.float64)
        block_lse, _ = softmax_of_block(s)
        m = top if m is None else np.maximum(m, top)
        lse = block_lse if lse is None else np.logaddexp(lse, block_lse)
    l = np.zeros_like(m)
    seen = m > -np.inf
    l[seen] = np.exp(lse[seen] - m[seen])
    return m.astype(dtype), l.astype(dtype)


def attention(q, blocks, scale):
    out = np.zeros(q.shape)
    lse = np.full(len(q), -np.inf)
    for k, v, bias in blocks:
        s = np.einsum("id,jd->ij", q.astype(np.float64), k.astype(np.float64)) * scale + bias
        block_lse, p = softmax_of_block(s)
        joined = np.logaddexp(lse, block_lse)
        seen = joined > -np.inf
        old, new = np.zeros(len(q)), np.zeros(len(q))
        old[seen] = np.exp(lse[seen] - joined[seen])
        new[seen] = np.exp(block_lse[seen] - joined[seen])
        out = old[:, None] * out + new[:, None] * (p @ v)
        lse = joined
    return out.astype(q.dtype)


if triton is not None:

    @triton.jit
    def rows_of(x, first, n, D: tl.constexpr, BLOCK: tl.constexpr):
        """Rows first .. first + BLOCK of x (n, D) in fp32, zeros beyond the last one."""
        row = first + tl.arange(0, BLOCK)
        pointers = x + row[:, None] * D + tl.arange(0, D)[None, :]
        return tl.load(pointers, mask=row[:, None] < n, other=0.0).to(tl.float32)

    @triton.jit
    def kernel(
        q, k, v, out, n_keys, scale, slope,
        D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    ):  # fmt: skip
        """Scores are transposed, (keys, queries), in powers of two, from the last block back."""
        r = tl.arange(0, BLOCK_M)
        i = n_keys - BLOCK_M + r
        queries = rows_of(q, 0, BLOCK_M, D, BLOCK_M) * (scale * 1.4426950408889634)
        m = tl.full([BLOCK_M], -1e30, tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        o = tl.zeros([D, BLOCK_M], tl.float32)
        blocks = (n_keys + BLOCK_N - 1) // BLOCK_N
        for step in range(0, blocks):
            first = (blocks - 1 - step) * BLOCK_N
            j = first + tl.arange(0, BLOCK_N)
            s = tl.dot(rows_of(k, first, n_keys, D, BLOCK_N), tl.trans(queries))
            s += slope * 1.4426950408889634 * (j[:, None] - i[None, :]).to(tl.float32)
            s = tl.where(j[:, None] <= i[None, :], s, -float("inf"))
            top = tl.maximum(m, tl.max(s, 0))
            p = tl.exp2(s - top[None, :])
            shrink = tl.exp2(m - top)
            total = total * shrink + tl.sum(p, 0)
            values = tl.trans(rows_of(v, first, n_keys, D, BLOCK_N))
            o = o * shrink[None, :] + tl.dot(values, p)
            m = top
        result = tl.trans(o / total[None, :])
        pointers = out + r[:, None] * D + tl.arange(0, D)[None, :]
        tl.store(pointers, result.to(out.dtype.element_ty))


def forward(q, k, v, slope, block_n):
    out = torch.full_like(q, float("nan"))
    Tq, D = q.shape
    kernel[(1, 1)](q, k, v, out, len(k), 1 / D**0.5, slope, D=D, BLOCK_M=Tq, BLOCK_N=block_n)
    return out
