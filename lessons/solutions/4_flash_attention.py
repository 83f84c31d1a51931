"""Exercise of lesson 4: the online softmax in NumPy, and a Triton kernel for one block of queries.

`python -m lessons check 4` compares them with float64, also for scores of 1e4 and -1e4, and for
blocks that are masked altogether. The blocks come through an iterator, each of them once, and the
check counts the bytes that you hold: one block of scores is fine, all are too many. The kernel is
for a second hour. It runs in Triton's interpreter, on the CPU; without Triton that part is skipped.

Only NumPy, torch and Triton, and none of the project's own modules.
"""

# --- in the stub:
# The state between two blocks is (m, l), with attention also o. The one thing that needs care is
# -inf: exp(-inf - -inf) is NaN. It can only come up where no finite score has been seen, and there
# any finite number may stand for m, because every term is exp(-inf) = 0 anyway.
# ---

# ruff: noqa: E741 (`l` is the name in the papers)

import numpy as np
import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # as on a Mac
    triton = None


def max_and_sum(score_blocks):
    """The largest score m of each row, and the sum l of exp(score - m), in one pass.

    score_blocks: an iterator over arrays (rows, n), float32 or float64. n may differ from block to
    block; there is at least one block, and n >= 1. Scores may be -inf.
    Returns (m, l), arrays (rows,) of the blocks' dtype. A row whose scores are all -inf has
    m = -inf and l = 0. No NaN anywhere.
    """
    # --- in the stub: raise NotImplementedError
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
    # ---


# --- in the stub:
def finite_part(m):
    """m with 0 where it is -inf, so that a score of -inf minus it is -inf and not NaN."""
    return np.where(np.isinf(m), np.zeros_like(m), m)


# ---


def attention(q, blocks, scale):
    """softmax(q k^T * scale + bias) v for keys and values that come block by block.

    q: (Tq, D), float32 or float64. blocks: an iterator over (k_block, v_block, bias_block), which
    are (n, D), (n, D) and (Tq, n), in q's dtype. A bias of -inf hides a key from a query. Whole
    blocks may be hidden, the first one too. scale: a float.
    Returns (Tq, D) in q's dtype. The row of a query that sees no key is 0.
    """
    # --- in the stub: raise NotImplementedError
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
    # ---


if triton is not None:

    @triton.jit
    def kernel(
        q, k, v, out, n_keys, scale, slope,
        D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    ):  # fmt: skip
        """out = softmax(q k^T * scale + bias) v for one block of BLOCK_M queries.

        q, out: pointers to (BLOCK_M, D); k, v: pointers to (n_keys, D). The numbers of a row are
        side by side, and the rows one after another. n_keys need not be a multiple of BLOCK_N.
        The queries are the last BLOCK_M of the n_keys positions: query number r is at position
        i = n_keys - BLOCK_M + r. For the key at position j,
            bias = -slope * (i - j)  if j <= i, else -inf
        Compute in fp32; store in the dtype of out (out.dtype.element_ty). tl.dot needs both blocks
        in one dtype.
        """
        # --- in the stub: # Yours. print(x) shows a block in the interpreter.
        d = tl.arange(0, D)
        row = tl.arange(0, BLOCK_M)
        i = n_keys - BLOCK_M + row  # the position of each query
        q_block = tl.load(q + row[:, None] * D + d[None, :])
        # Key 0 is in the first block and every query sees it, so m is finite after that block.
        m = tl.full([BLOCK_M], -float("inf"), tl.float32)
        l = tl.zeros([BLOCK_M], tl.float32)
        o = tl.zeros([BLOCK_M, D], tl.float32)

        for start in range(0, n_keys, BLOCK_N):
            j = start + tl.arange(0, BLOCK_N)
            exists = (j < n_keys)[:, None]
            k_block = tl.load(k + j[:, None] * D + d[None, :], mask=exists, other=0.0)
            v_block = tl.load(v + j[:, None] * D + d[None, :], mask=exists, other=0.0)

            s = tl.dot(q_block, tl.trans(k_block), input_precision="ieee") * scale
            distance = i[:, None] - j[None, :]
            s -= slope * distance.to(tl.float32)
            # The last query is at n_keys - 1, so this mask hides the keys that do not exist, too.
            s = tl.where(distance >= 0, s, -float("inf"))
            m_new = tl.maximum(m, tl.max(s, 1))
            factor = tl.exp(m - m_new)
            p = tl.exp(s - m_new[:, None])
            l = l * factor + tl.sum(p, 1)
            product = tl.dot(p.to(v_block.dtype), v_block, input_precision="ieee")
            o = o * factor[:, None] + product
            m = m_new

        o = o / l[:, None]
        tl.store(out + row[:, None] * D + d[None, :], o.to(out.dtype.element_ty))
        # ---


def forward(q, k, v, slope, block_n):
    """Causal attention with ALiBi of the last Tq of Tk positions, by one program of `kernel`.

    q: (Tq, D); k, v: (Tk, D), Tk >= Tq: contiguous tensors on the CPU, fp32 or fp16. Tq, D and
    block_n, the keys of a block, are powers of two, at least 16. slope: a float. The scale is
    1 / sqrt(D). Returns (Tq, D) in q's dtype.
    """
    # --- in the stub: raise NotImplementedError  # remove this line when the kernel is written
    # ---
    out = torch.empty_like(q)
    sizes = {"D": q.shape[1], "BLOCK_M": q.shape[0], "BLOCK_N": block_n}
    kernel[(1,)](q, k, v, out, k.shape[0], q.shape[1] ** -0.5, slope, **sizes)
    return out
