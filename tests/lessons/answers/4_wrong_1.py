"""Wrong: when the maximum grows, the sum l is rescaled, and the output o is not.

Refused by check_attention.
"""

# ruff: noqa: E741 (`l` is the name in the papers)

import numpy as np


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
        m_new = np.maximum(m, s.max(axis=1))
        safe = np.where(np.isinf(m_new), np.zeros_like(m_new), m_new)
        p = np.exp(s - safe[:, None])
        l = l * np.exp(m - safe) + p.sum(axis=1)
        o = o + p @ v
        m = m_new
    return o / np.where(l > 0, l, np.ones_like(l))[:, None]


def forward(q, k, v, slope, block_n):
    raise NotImplementedError
