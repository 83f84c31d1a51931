"""A solution of exercise 7, with the thoughts behind it.

What a student should take away: B A x costs little if it is computed from the right, B (A x). The
backward pass has the same property. And a weight that was rounded keeps only what its dtype can
hold, so the order of conversion and addition matters.
"""

import torch


def forward(x, W, bias, A, B, scale):
    """y = W x + bias + scale * B A x, (..., out), in the dtype of x."""
    y = torch.nn.functional.linear(x, W, bias)
    # From the right: A x has r numbers a row. B A would have out x in, as many as W.
    low = x.to(A.dtype) @ A.T  # (..., r)
    update = scale * (low @ B.T)  # (..., out), still in the dtype of A and B
    return y + update.to(x.dtype)


def backward(dy, x, W, A, B, scale):
    """The gradients (dx, dA, dB), given the gradient dy (..., out) of a loss with respect to y."""
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


def merge(W, A, B, scale):
    """W + scale * B A, (out, in), in the dtype of W. W itself stays as it is."""
    # W goes up to the dtype of A and B, not B A down to that of W. Rounding B A first and the sum
    # again would round twice, and bf16 + bf16 loses most of a small update.
    return (W.to(A.dtype) + scale * (B @ A)).to(W.dtype)


def unmerge(merged, A, B, scale):
    """W from merge(W, A, B, scale), to within rounding, in the dtype of `merged`."""
    # What rounding took at the merge does not come back. So this project keeps the base.
    return merge(merged, A, B, -scale)
