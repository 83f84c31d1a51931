"""Wrong: -inf minus -inf is NaN, in a block that is masked altogether before any other.

Refused by check_max_and_sum, check_attention.
"""

# ruff: noqa: E741 (`l` is the name in the papers)

import numpy as np


def max_and_sum(score_blocks):
    m, l = -np.inf, 0
    for s in score_blocks:
        m_new = np.maximum(m, s.max(axis=1))
        l = l * np.exp(m - m_new) + np.exp(s - m_new[:, None]).sum(axis=1)
        m = m_new
    return m, l


def attention(q, blocks, scale):
    m = np.full(len(q), -np.inf, q.dtype)
    l = np.zeros(len(q), q.dtype)
    o = np.zeros_like(q)
    for k, v, bias in blocks:
        s = q @ k.T * q.dtype.type(scale) + bias
        m_new = np.maximum(m, s.max(axis=1))
        factor = np.exp(m - m_new)
        p = np.exp(s - m_new[:, None])
        l = l * factor + p.sum(axis=1)
        o = o * factor[:, None] + p @ v
        m = m_new
    return o / l[:, None]


def forward(q, k, v, slope, block_n):
    raise NotImplementedError
