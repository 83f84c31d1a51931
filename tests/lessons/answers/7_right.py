"""Another way: autograd for the backward pass, einsum, addmm."""

import torch


def forward(x, W, bias, A, B, scale):
    y = torch.matmul(x, W.T)
    if bias is not None:
        y = y + bias
    wide = x.to(dtype=B.dtype)
    low = torch.einsum("...i,ri->...r", wide, A)
    return y + torch.einsum("...r,or->...o", low, scale * B).to(y.dtype)


def backward(dy, x, W, A, B, scale):
    x, A, B = (value.detach().requires_grad_() for value in (x, A, B))
    y = forward(x, W.detach(), None, A, B, scale)
    return torch.autograd.grad(y, (x, A, B), dy)


def merge(W, A, B, scale):
    return torch.addmm(W.to(B.dtype), B, A, alpha=scale).to(W.dtype)


def unmerge(merged, A, B, scale):
    return (merged.to(B.dtype) - scale * (B @ A)).to(merged.dtype)
