"""Another way: autograd differentiates one chunk at a time, and ignored tokens are left out."""

import torch
import torch.nn.functional as F

BUGS = {
    "E": "gradients not zeroed",
    "D": "schedule too fast",
    "C": "mean of means",
    "B": "decay without rate",
    "A": "labels not shifted",
}


def chunked_cross_entropy(hidden, weight, labels, chunk):
    x = hidden.detach().clone().requires_grad_()
    w = weight.detach().clone().requires_grad_()
    x.grad = torch.zeros_like(x)
    w.grad = torch.zeros_like(w)
    total = hidden.new_zeros(())
    for tokens in torch.nonzero(labels >= 0)[:, 0].split(chunk):
        loss = F.cross_entropy(x[tokens] @ w.T, labels[tokens], reduction="sum")
        loss.backward()
        total += loss.detach()
    return total, x.grad, w.grad
