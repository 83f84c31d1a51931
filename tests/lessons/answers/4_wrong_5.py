"""Wrong: a hidden key, or one beyond the last, gets the score 0, which still has weight exp(0).

Refused by check_attention, check_kernel.
"""

# ruff: noqa: E741 (`l` is the name in the papers)

import numpy as np
import torch

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None


def max_and_sum(score_blocks):
    m = l = None
    for s in score_blocks:
        if m is None:
            m = np.full(len(s), -np.inf, s.dtype)
            l = np.zeros(len(s), s.dtype)
        m_new = np.maximum(m, s.max(axis=1))
        safe = np.where(np.isinf(m_new), np.zeros_like(m_new), m_new)
        l = l * np.exp(m - safe) + np.exp(s - safe[:, None]).sum(axis=1)
        m = m_new
    return m, l


def attention(q, blocks, scale):
    m = np.full(len(q), -np.inf, q.dtype)
    l = np.zeros(len(q), q.dtype)
    o = np.zeros_like(q)
    for k, v, bias in blocks:
        s = q @ k.T * q.dtype.type(scale) + bias
        s = np.where(np.isinf(s), np.zeros_like(s), s)
        m_new = np.maximum(m, s.max(axis=1))
        factor = np.exp(m - m_new)
        p = np.exp(s - m_new[:, None])
        l = l * factor + p.sum(axis=1)
        o = o * factor[:, None] + p @ v
        m = m_new
    return o / l[:, None]


if triton is not None:

    @triton.jit
    def kernel(
        q, k, v, out, n_keys, scale, slope,
        D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    ):  # fmt: skip
        d = tl.arange(0, D)
        row = tl.arange(0, BLOCK_M)
        i = n_keys - BLOCK_M + row
        q_block = tl.load(q + row[:, None] * D + d[None, :])
        m = tl.full([BLOCK_M], -float("inf"), tl.float32)
        l = tl.zeros([BLOCK_M], tl.float32)
        o = tl.zeros([BLOCK_M, D], tl.float32)
        for start in range(0, n_keys, BLOCK_N):
            j = start + tl.arange(0, BLOCK_N)
            exists = (j < n_keys)[:, None]
            k_block = tl.load(k + j[:, None] * D + d[None, :], mask=exists, other=0.0)
            v_block = tl.load(v + j[:, None] * D + d[None, :], mask=exists, other=0.0)
            s = tl.dot(q_block, tl.trans(k_block)) * scale
            distance = i[:, None] - j[None, :]
            s = tl.where(distance >= 0, s - slope * distance.to(tl.float32), 0.0)
            m_new = tl.maximum(m, tl.max(s, 1))
            factor = tl.exp(m - m_new)
            p = tl.exp(s - m_new[:, None])
            l = l * factor + tl.sum(p, 1)
            o = o * factor[:, None] + tl.dot(p.to(v_block.dtype), v_block)
            m = m_new
        o = o / l[:, None]
        tl.store(out + row[:, None] * D + d[None, :], o.to(out.dtype.element_ty))


def forward(q, k, v, slope, block_n):
    out = torch.empty_like(q)
    sizes = {"D": q.shape[1], "BLOCK_M": q.shape[0], "BLOCK_N": block_n}
    kernel[(1,)](q, k, v, out, k.shape[0], q.shape[1] ** -0.5, slope, **sizes)
    return out
