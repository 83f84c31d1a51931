"""The loss without the logits: a linear layer and the cross-entropy behind it, one chunk of tokens at a time.

    logits = x W^T          (N, V): for 16k tokens and V = 50368 that is 3.3 GB in fp32, the peak of a small model
    loss   = sum over counted tokens of  logsumexp(logits) - logits[label]

The gradient of the logits is softmax(logits) - onehot(label): known as soon as the logits are. So each chunk is taken
forward and backward at once, its logits are dropped, and only the gradients of x (N, D) and W (V, D) are kept for the
backward pass, where they are scaled by the incoming gradient. The gradients are exact, and no matmul is done twice.

Run `python loss.py` to compare it with the obvious version. Read next: model.py, which calls it.
"""

import torch
import torch.nn.functional as F

CHUNK_BYTES = 256 * 2**20  # of fp32 logits: 1,280 rows at V = 50368
IGNORE = -100  # a label that does not count


def linear_cross_entropy(x, weight, labels, logit_scale=None):
    """Sum of the token cross-entropies of `logit_scale * x @ weight.T`; divide by the number of counted tokens.

    x: (..., D); weight: (V, D); labels: (...) of int64, IGNORE does not count. Returns a scalar in fp32 (fp64 for
    fp64 inputs). Under autocast the matmuls run in its dtype. Differentiable once.
    """
    scale = 1.0 if logit_scale is None else logit_scale
    return LinearCrossEntropy.apply(x.flatten(0, -2), weight, labels.flatten(), scale, torch.is_grad_enabled())


def reference_linear_cross_entropy(x, weight, labels, logit_scale=1.0):
    """The obvious version: all logits at once."""
    logits = logit_scale * (x @ weight.T).flatten(0, -2)  # (N, V)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORE, reduction="sum")


class LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, labels, scale, training):
        # x (N, D), weight (V, D), labels (N,); inside here autograd is always off, so `training` tells
        exact = torch.promote_types(x.dtype, torch.float32)
        rows = max(1, CHUNK_BYTES // (4 * weight.shape[0]))
        rows -= rows % 128 if rows > 128 else 0  # whole tiles for a matmul
        need_x, need_w = (training and needed for needed in ctx.needs_input_grad[:2])
        grad_x = torch.empty_like(x) if need_x else None
        grad_w = torch.zeros(weight.shape, dtype=exact, device=weight.device) if need_w else None
        loss = torch.zeros((), dtype=exact, device=x.device)
        for i in range(0, x.shape[0], rows):
            xs, ys = x[i : i + rows], labels[i : i + rows]
            logits = (xs @ weight.T).to(exact).mul_(scale)  # (rows, V)
            log_probs = F.log_softmax(logits, dim=-1)
            loss += F.nll_loss(log_probs, ys, ignore_index=IGNORE, reduction="sum")
            if not (need_x or need_w):
                continue
            counted = (ys != IGNORE).to(exact)[:, None]  # (rows, 1)
            grad = log_probs.exp_()
            grad.scatter_add_(1, ys.clamp(min=0)[:, None], -torch.ones_like(counted))  # softmax - onehot
            grad = grad.mul_(counted * scale).to(xs.dtype)  # (rows, V)
            if need_x:
                grad_x[i : i + rows] = grad @ weight
            if need_w:
                grad_w += grad.T @ xs
        ctx.save_for_backward(grad_x, None if grad_w is None else grad_w.to(weight.dtype))
        return loss

    @staticmethod
    def backward(ctx, grad_loss):
        grad_x, grad_w = ctx.saved_tensors
        # The factor, 1 / tokens, is not rounded to bf16 on its own: grad_loss is fp32, and so is the product.
        scaled = [None if g is None else (g.to(grad_loss.dtype) * grad_loss).to(g.dtype) for g in (grad_x, grad_w)]
        return *scaled, None, None, None


if __name__ == "__main__":
    torch.manual_seed(0)
    x, weight = torch.randn(300, 64, dtype=torch.double), torch.randn(1000, 64, dtype=torch.double)
    labels = torch.randint(0, 1000, (300,)).masked_fill(torch.rand(300) < 0.1, IGNORE)
    results = []
    for loss_function in (reference_linear_cross_entropy, linear_cross_entropy):
        leaves = [t.clone().requires_grad_() for t in (x, weight)]
        loss = loss_function(*leaves, labels)
        results.append((loss.detach(), *torch.autograd.grad(loss, leaves)))
    for name, a, b in zip(("loss", "grad x", "grad W"), *results, strict=True):
        print(f"{name:7s} largest difference from the obvious version, fp64: {(a - b).abs().max().item():.1e}")
        assert torch.allclose(a, b)
