"""The loss without the logits: a linear layer and the cross-entropy behind it, one chunk of tokens at a time.

    logits = x W^T          (N, V): for 16k tokens and V = 50368 that is 3.3 GB in fp32, the peak of a small model
    loss   = sum over counted tokens of  logsumexp(logits) - logits[label]  +  z_loss * logsumexp(logits)^2

The gradient of the logits is (1 + 2 z_loss logsumexp) softmax(logits) - onehot(label): known as soon as the logits are.
So each chunk is taken forward and backward at once, its logits are dropped, and only the gradients of x (N, D) and
W (V, D) are kept for the backward pass, where they are scaled by the incoming gradient. The gradients are exact, and no
matmul is done twice. The z-loss (PaLM, arXiv 2204.02311, section 5) holds logsumexp near 0, where bf16 logits are fine.

Run `python loss.py` to compare it with the obvious version. Read next: model.py, which calls it.
"""

import math

import torch
import torch.nn.functional as F

from program import arguments, run

CHUNK_BYTES = 256 * 2**20  # of fp32 logits: 1,280 rows at V = 50368
COLUMNS = 4096  # of the vocabulary at a time, for W's gradient and for scores: so much stays in a CPU's cache
ROWS = 512  # scored at once: a block of their logits is 8 MiB in fp32
IGNORE = -100  # a label that does not count


def autocast_dtype(x):
    """The dtype that autocast gives to matmuls where x is; x's own where autocast is off."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def linear_cross_entropy(x, weight, labels, logit_scale=None, z_loss=0.0):
    """Sum of the token cross-entropies of `logit_scale * x @ weight.T`; divide by the number of counted tokens.

    x: (..., D); weight: (V, D); labels: (...) of int64, IGNORE does not count. Returns a scalar in fp32 (fp64 for
    fp64 inputs). Under autocast the matmuls run in its dtype. Differentiable once.
    """
    scale = 1.0 if logit_scale is None else logit_scale
    return LinearCrossEntropy.apply(
        x.flatten(0, -2), weight, labels.flatten(), scale, z_loss, torch.is_grad_enabled()
    )


def reference_linear_cross_entropy(x, weight, labels, logit_scale=1.0, z_loss=0.0):
    """The obvious version: all logits at once."""
    logits = logit_scale * (x @ weight.T).flatten(0, -2)  # (N, V)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    counted = labels.flatten() != IGNORE
    penalty = z_loss * logits.logsumexp(-1)[counted].square().sum()
    return F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORE, reduction="sum") + penalty


@torch.no_grad()
def score_labels(x, weight, labels, logit_scale=None):
    """(log-probability of each label, whether it is the likeliest), both of labels' shape: fp32 (fp64 for fp64 inputs),
    0 and False for IGNORE. Arguments as above; a label beyond the vocabulary raises or has NaN."""
    scale = 1.0 if logit_scale is None else logit_scale
    counted = labels != IGNORE
    log_probs = torch.zeros(
        labels.shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device
    )
    greedy = torch.zeros_like(counted)
    xs, wanted = x[counted], labels[counted][:, None]
    chunks = [
        score_chunk(xs[i : i + ROWS], weight, wanted[i : i + ROWS], scale)
        for i in range(0, len(xs), ROWS)
    ]
    if chunks:
        log_probs[counted], greedy[counted] = (
            torch.cat(column)[:, 0] for column in zip(*chunks, strict=True)
        )
    return log_probs, greedy


def score_chunk(x, weight, labels, scale):
    """The same for x (rows, D) and labels (rows, 1), all of which count; (rows, 1) each. Of equal logits the first is
    the likeliest. A block of the vocabulary at a time is still in a CPU's cache when its logits are summed."""
    exact, blocks = torch.promote_types(x.dtype, torch.float32), labels // COLUMNS
    found, first = (
        torch.full_like(labels, math.nan, dtype=exact),
        torch.zeros_like(labels, dtype=torch.bool),
    )
    tops, log_zs = [], []
    for block, begin in enumerate(range(0, weight.shape[0], COLUMNS)):
        logits = F.linear(x, weight[begin : begin + COLUMNS]).to(
            exact
        )  # (rows, COLUMNS or what is left)
        logits = logits if scale == 1 else logits * scale
        mine = (blocks == block)[:, 0]
        own, place = logits[mine], labels[mine] - begin
        found[mine], first[mine] = own.gather(1, place), own.argmax(-1, keepdim=True) == place
        tops.append(logits.amax(-1, keepdim=True))
        log_zs.append(logits[:, :1] - logits.log_softmax(-1)[:, :1])
    log_z = torch.cat(log_zs, dim=1).logsumexp(1, keepdim=True)
    return found - log_z, first & (torch.cat(tops, dim=1).argmax(1, keepdim=True) == blocks)


def chunk_loss(x, weight, labels, scale, z_loss, grad_x, grad_w):
    """The loss of one chunk, a scalar. Fills grad_x (rows, D) and adds to grad_w (V, D), each unless it is None.

    x: (rows, D) and weight: (V, D) in one dtype; labels: (rows,). All that is as wide as the vocabulary is freed here.
    """
    exact = torch.promote_types(x.dtype, torch.float32)
    counted = (labels != IGNORE)[:, None]  # (rows, 1)
    labels = labels.clamp(min=0)[:, None]  # (rows, 1)
    logits = x @ weight.T  # (rows, V)
    logits = logits if scale == 1 else logits.to(exact) * scale
    log_probs = F.log_softmax(logits, dim=-1, dtype=exact)
    log_prob = log_probs.gather(1, labels)  # (rows, 1)
    log_z = logits.gather(1, labels).to(exact) - log_prob  # logsumexp
    loss = ((z_loss * log_z.square() - log_prob) * counted).sum()
    if grad_x is None and grad_w is None:
        return loss
    grad = log_probs.exp_()  # softmax; (rows, V)
    if z_loss:
        grad.mul_(1 + 2 * z_loss * log_z)  # in fp32: in bf16 1.002 is 1
    grad = grad.scatter_add_(1, labels, -torch.ones_like(log_z)).to(x.dtype)
    if grad_x is not None:
        grad_x.copy_((grad @ weight).mul_(counted))
    if grad_w is not None:
        x = x * counted
        for j in range(0, grad.shape[1], COLUMNS):
            grad_w[j : j + COLUMNS] += grad[:, j : j + COLUMNS].T @ x
    return loss


class LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, labels, scale, z_loss, training):
        # x (N, D), weight (V, D), labels (N,); inside here autograd is always off, so `training` tells
        exact = torch.promote_types(x.dtype, torch.float32)
        low, dtype_w = autocast_dtype(x), weight.dtype
        x, weight = x.to(low), weight.to(low)  # once, not for each chunk
        rows = max(1, CHUNK_BYTES // (4 * weight.shape[0]))
        rows -= rows % 128 if rows > 128 else 0  # whole tiles for a matmul
        need_x, need_w = (training and needed for needed in ctx.needs_input_grad[:2])
        grad_x = torch.empty_like(x) if need_x else None
        grad_w = torch.zeros(weight.shape, dtype=exact, device=weight.device) if need_w else None
        loss = torch.zeros((), dtype=exact, device=x.device)
        for i in range(0, x.shape[0], rows):
            chunk = slice(i, i + rows)
            grad_xs = grad_x[chunk] if need_x else None
            loss += chunk_loss(x[chunk], weight, labels[chunk], scale, z_loss, grad_xs, grad_w)
        ctx.scale = scale
        ctx.save_for_backward(grad_x, None if grad_w is None else grad_w.to(dtype_w))
        return loss

    @staticmethod
    def backward(ctx, grad_loss):
        grad_x, grad_w = ctx.saved_tensors
        # The factor, 1 / tokens, is not rounded to bf16 on its own: grad_loss is fp32, and so is the product.
        factor = grad_loss * ctx.scale
        scaled = [
            None if g is None else (g.to(factor.dtype) * factor).to(g.dtype)
            for g in (grad_x, grad_w)
        ]
        return *scaled, None, None, None, None


def demonstrate(argv) -> None:
    arguments(argv)
    torch.manual_seed(0)
    x, weight = torch.randn(300, 64, dtype=torch.double), torch.randn(1000, 64, dtype=torch.double)
    labels = torch.randint(0, 1000, (300,)).masked_fill(torch.rand(300) < 0.1, IGNORE)
    results = []
    for loss_function in (reference_linear_cross_entropy, linear_cross_entropy):
        leaves = [t.clone().requires_grad_() for t in (x, weight)]
        loss = loss_function(*leaves, labels)
        results.append((loss.detach(), *torch.autograd.grad(loss, leaves)))
    for name, a, b in zip(("loss", "grad x", "grad W"), *results, strict=True):
        print(
            f"{name:7s} largest difference from the obvious version, fp64: {(a - b).abs().max().item():.1e}"
        )
        assert torch.allclose(a, b)


if __name__ == "__main__":
    run(demonstrate)
