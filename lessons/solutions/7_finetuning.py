"""Exercise 7: the forward and backward pass of a LoRA layer, merge and unmerge.

    python -m lessons check 7

A linear layer W with a LoRA adapter computes

    y = W x + bias + s B A x        W (out, in) and bias (out,) are frozen
                                    A (r, in) and B (out, r) are trained; s is a number

Throughout:

    x        (..., in): (N, in) or (B, T, in), float32, bfloat16 or float64
    W, bias  in the dtype of x
    A, B     in float32, or in float64 if x is; never in bfloat16
    s        a float, the argument `scale`

Part 1. `forward`: y, without forming the (out, in) matrix s B A.
Part 2. `backward`: the gradients of x, A and B, without computing the one of W.
Part 3. `merge`: one plain weight. `unmerge`: W back, to within rounding.

The checker compares results, shapes and dtypes, and the memory that parts 1 and 2 use.
"""

import torch

# --- in the stub:
# What to take away: B A x costs little if it is computed from the right, B (A x). The backward pass
# has the same property. And a weight that was rounded keeps only what its dtype can hold, so the
# order of conversion and addition matters.
# ---


def forward(x, W, bias, A, B, scale):
    """y = W x + bias + scale * B A x, (..., out), in the dtype of x.

    bias may be None. Compute A x and B (A x) in the dtype of A and B: convert x to it, not A and B
    to the dtype of x. Round the update to the dtype of x once it is complete, then add it.

    No tensor as large as W may be made on the way.
    """
    # --- in the stub: raise NotImplementedError
    y = torch.nn.functional.linear(x, W, bias)
    # From the right: A x has r numbers a row. B A would have out x in, as many as W.
    low = x.to(A.dtype) @ A.T  # (..., r)
    update = scale * (low @ B.T)  # (..., out), still in the dtype of A and B
    return y + update.to(x.dtype)
    # ---


def backward(dy, x, W, A, B, scale):
    """The gradients (dx, dA, dB), given the gradient dy (..., out) of a loss with respect to y.

    dx (..., in) in the dtype of x; dA (r, in) and dB (out, r) in the dtype of A and B, summed over
    all rows of x. dy has the dtype of x. Do the work on A and B in their dtype, as in `forward`.

    W is frozen, so its gradient, (out, in), must not be computed: no tensor as large as W may be
    made. Work the formulas out on paper, or use autograd on your `forward`.
    """
    # --- in the stub: raise NotImplementedError
    # With low = A x and y = W x + bias + s B low, the chain rule gives, row by row,
    #     dlow = s B^T dy          dx = W^T dy + A^T dlow
    #     dB = sum of s dy low^T   dA = sum of dlow x^T
    # W appears in dx alone. Its own gradient, the sum of dy x^T, (out, in), is not needed.
    # The sums run over all rows, whatever dimensions they have: (B, T, in) becomes (B * T, in).
    rows = x.reshape(-1, x.shape[-1]).to(A.dtype)  # (N, in)
    dy_rows = dy.reshape(-1, dy.shape[-1]).to(A.dtype)  # (N, out)
    low = rows @ A.T  # (N, r)
    dlow = scale * (dy_rows @ B)  # (N, r)
    dA = dlow.T @ rows
    dB = scale * (dy_rows.T @ low)
    through_update = (dlow @ A).reshape(x.shape)
    dx = dy @ W + through_update.to(x.dtype)
    return dx, dA, dB
    # ---


def merge(W, A, B, scale):
    """W + scale * B A, (out, in), in the dtype of W. W itself stays as it is.

    Add in the dtype of A and B, and round to the dtype of W once, at the end.
    """
    # --- in the stub: raise NotImplementedError
    # W goes up to the dtype of A and B, not B A down to that of W. Rounding B A first and the sum
    # again would round twice, and bf16 + bf16 loses most of a small update.
    return (W.to(A.dtype) + scale * (B @ A)).to(W.dtype)
    # ---


def unmerge(merged, A, B, scale):
    """W from merge(W, A, B, scale), to within rounding, in the dtype of `merged`."""
    # --- in the stub: raise NotImplementedError
    # What rounding took at the merge does not come back. So this project keeps the base.
    return merge(merged, A, B, -scale)
    # ---
