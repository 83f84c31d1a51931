"""Exercise of lesson 4: the online softmax in NumPy, and a Triton kernel for one block of queries.

`python -m lessons check 4` compares them with float64, also for scores of 1e4 and -1e4, and for
blocks that are masked altogether. The blocks come through an iterator, each of them once, and the
check counts the bytes that you hold: one block of scores is fine, all are too many. The kernel is
for a second hour. It runs in Triton's interpreter, on the CPU; without Triton that part is skipped.

Only NumPy, torch and Triton, and none of the project's own modules.
"""

import numpy as np  # noqa: F401 (you will need it)
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
    raise NotImplementedError


def attention(q, blocks, scale):
    """softmax(q k^T * scale + bias) v for keys and values that come block by block.

    q: (Tq, D), float32 or float64. blocks: an iterator over (k_block, v_block, bias_block), which
    are (n, D), (n, D) and (Tq, n), in q's dtype. A bias of -inf hides a key from a query. Whole
    blocks may be hidden, the first one too. scale: a float.
    Returns (Tq, D) in q's dtype. The row of a query that sees no key is 0.
    """
    raise NotImplementedError


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
        Compute in fp32; store in the dtype of out (out.dtype.element_ty).
        """
        # Yours. tl.dot needs both blocks in one dtype. print(x) shows a block in the interpreter.


def forward(q, k, v, slope, block_n):
    """Causal attention with ALiBi of the last Tq of Tk positions, by one program of `kernel`.

    q: (Tq, D); k, v: (Tk, D), Tk >= Tq: contiguous tensors on the CPU, fp32 or fp16. Tq, D and
    block_n, the keys of a block, are powers of two, at least 16. slope: a float. The scale is
    1 / sqrt(D). Returns (Tq, D) in q's dtype.
    """
    raise NotImplementedError  # remove this line when the kernel is written

    out = torch.empty_like(q)
    sizes = {"D": q.shape[1], "BLOCK_M": q.shape[0], "BLOCK_N": block_n}
    kernel[(1,)](q, k, v, out, k.shape[0], q.shape[1] ** -0.5, slope, **sizes)
    return out
