"""The loss without the logits: output layer and cross-entropy together, in chunks of tokens.

    logits = logit_scale * x W^T       (N, V), perhaps soft-capped
    log_z  = logsumexp(logits)         (N,)
    loss   = sum over counted tokens of  log_z - logits[label] + z_loss * log_z^2

For N = 16k tokens and V = 50368 the logits take 3.3 GB in fp32: the peak of a small model's memory.
They need not be kept, because their gradient is known as soon as they are:

    d loss / d logits = (1 + 2 * z_loss * log_z) * softmax(logits) - onehot(label)

So each chunk goes forward and backward in one turn, then its logits are freed. Only the gradients
of x (N, D) and W (V, D) are kept, and the backward pass multiplies them by the incoming gradient.
They are those of the formula, rounded once more to the dtypes of x and W. No matmul is done twice.

    chunk_loss          any device: the formulas above in PyTorch; 6 bytes a logit in bf16
    kernel_chunk_loss   GPUs with Triton: fast/cross_entropy.py, in place; 2 bytes a logit

The z-loss keeps log_z near 0, where bf16 logits are precise (PaLM, arXiv 2204.02311, section 5).

Run `python loss.py` to compare it with the obvious version.
"""

import torch
import torch.nn.functional as F

from attention import autocast_dtype
from config import CHUNK_BYTES, COLUMNS, GPU_ROWS
from program import arguments, run

IGNORE = -100  # a label that does not count


def at_least_fp32(x):
    """The dtype for sums over x: fp32, or fp64 for fp64 inputs."""
    return torch.promote_types(x.dtype, torch.float32)


def soft_capped(logits, cap: float | None):
    """cap * tanh(logits / cap), which lies between -cap and cap (Gemma 2); None: as they are."""
    return logits if cap is None else cap * torch.tanh(logits / cap)


def reference_linear_cross_entropy(x, weight, labels, logit_scale=1.0, z_loss=0.0, softcap=None):
    """The obvious way: all logits in memory. Arguments as `linear_cross_entropy`."""
    logits = logit_scale * (x @ weight.T).flatten(0, -2)  # (N, V)
    logits = soft_capped(logits.to(at_least_fp32(logits)), softcap)
    labels = labels.flatten()
    log_z = logits.logsumexp(-1)
    penalty = z_loss * log_z[labels != IGNORE].square().sum()
    return F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum") + penalty


def chunk_loss(x, weight, labels, scale, z_loss, softcap, grad_x, grad_w):
    """The loss of one chunk, a scalar. Writes grad_x (rows, D) and adds to grad_w (V, D).

    x: (rows, D) and weight: (V, D) in one dtype; labels: (rows,). A gradient that is None is not
    computed. The gradients lack the factor `scale`: `LinearCrossEntropy.backward` multiplies by it.
    All tensors as wide as the vocabulary are freed on return.
    """
    exact = at_least_fp32(x)
    counted = (labels != IGNORE)[:, None]  # (rows, 1)
    labels = torch.where(counted, labels[:, None], 0)  # (rows, 1); an index where none counts, too

    logits = (x @ weight.T).to(exact)  # (rows, V)
    if scale != 1:
        logits.mul_(scale)
    if softcap is not None:
        logits, slope = capped_with_slope(logits, softcap)
    largest = logits.amax(-1, keepdim=True)  # (rows, 1)
    of_label = logits.gather(1, labels)
    probs = softmax_(logits)
    del logits
    # The largest of the probabilities exp(logit - log_z) gives log_z. It is at least 1 / V, so its
    # logarithm is precise.
    log_max_prob = probs.amax(-1, keepdim=True).log()
    log_z = largest - log_max_prob
    # This is of_label - log_z, in an order in which no large numbers are rounded.
    log_prob = (of_label - largest) + log_max_prob
    loss = ((z_loss * log_z.square() - log_prob) * counted).sum()
    if grad_x is None and grad_w is None:
        return loss

    if z_loss:
        probs.mul_(1 + 2 * z_loss * log_z)  # in fp32: bf16 rounds 1.002 to 1
    probs.scatter_add_(1, labels, -torch.ones_like(log_z))
    if softcap is not None:
        probs.mul_(slope)
    grad = probs.to(x.dtype)  # (rows, V)
    del probs  # in bf16 that is twice the memory of the gradient
    add_products(grad, x, weight, counted, grad_x, grad_w)
    return loss


def capped_with_slope(logits, softcap: float):
    """`soft_capped`, and its derivative, 1 - tanh^2. The logits are overwritten."""
    tanh = logits.div_(softcap).tanh_()
    slope = 1 - tanh.square()
    return tanh.mul_(softcap), slope


def softmax_(logits):
    """Softmax over the last dimension, in place, but on MPS, where that was not tried."""
    out = None if logits.device.type == "mps" else logits
    return torch.softmax(logits, dim=-1, out=out)


def add_products(grad, x, weight, counted, grad_x, grad_w) -> None:
    """Write grad_x (rows, D), and add to grad_w (V, D), from the gradient of the logits (rows, V).

    counted: (rows, 1), whether the row's label counts. A gradient that is None is not computed.
    """
    if grad_x is not None:
        grad_x.copy_((grad @ weight).mul_(counted))
    if grad_w is not None:
        counted_x = x * counted
        for begin in range(0, grad.shape[1], COLUMNS):
            block = slice(begin, begin + COLUMNS)
            grad_w[block] += grad[:, block].T @ counted_x


def linear_cross_entropy(
    x, weight, labels, logit_scale=None, z_loss=0.0, softcap=None, loss_of=None, rows=None
):
    """The sum of the token cross-entropies; the caller divides by the number of counted tokens.

    x: (..., D); weight: (V, D); labels: (...) int64, each below V or IGNORE, which does not count.
    (Others are an IndexError on a CPU; on a GPU the loss is NaN, or the device's own check fails.)
    Returns an fp32 scalar (fp64 for fp64 inputs). Under autocast, matmuls run in its dtype.
    Differentiable once. softcap: see `soft_capped`, after logit_scale. loss_of: computes a chunk of
    `rows` tokens as `chunk_loss` does; None: what suits the device.
    """
    scale = 1.0 if logit_scale is None else logit_scale
    flat_x = x.flatten(0, -2)  # (N, D)
    needs_grad = torch.is_grad_enabled()
    return LinearCrossEntropy.apply(
        flat_x, weight, labels.flatten(), scale, z_loss, softcap, needs_grad, loss_of, rows
    )


class LinearCrossEntropy(torch.autograd.Function):
    """The autograd node: the forward computes the gradients, the backward only scales them."""

    @staticmethod
    def forward(ctx, x, weight, labels, scale, z_loss, softcap, needs_grad, loss_of, rows):
        """x (N, D), weight (V, D), labels (N,) -> the loss, a scalar.

        needs_grad: whether autograd is on for the caller. In here it is always off.
        """
        exact = at_least_fp32(x)
        weight_dtype = weight.dtype
        matmul_dtype = autocast_dtype(x)
        x = x.to(matmul_dtype)  # cast once, not for each chunk
        weight = weight.to(matmul_dtype)

        grad_x, grad_w = None, None
        if needs_grad and ctx.needs_input_grad[0]:
            grad_x = torch.empty_like(x)
        if needs_grad and ctx.needs_input_grad[1]:
            grad_w = torch.zeros(weight.shape, dtype=exact, device=weight.device)

        rows = rows or loss_rows(weight.shape[0], x.device)
        if loss_of is None:
            loss_of = kernel_chunk_loss if takes_kernel(x.device, matmul_dtype) else chunk_loss
        loss = torch.zeros((), dtype=exact, device=x.device)
        for begin in range(0, x.shape[0], rows):
            chunk = slice(begin, begin + rows)
            chunk_grad_x = None if grad_x is None else grad_x[chunk]
            factors = scale, z_loss, softcap
            loss += loss_of(x[chunk], weight, labels[chunk], *factors, chunk_grad_x, grad_w)
        ctx.scale = scale
        ctx.save_for_backward(grad_x, None if grad_w is None else grad_w.to(weight_dtype))
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_loss):
        """The kept gradients, times the incoming gradient (1 / tokens) and the logit scale."""
        grad_x, grad_w = ctx.saved_tensors
        # The factor stays fp32 and the product is computed in fp32. Only the result is rounded.
        factor = grad_loss * ctx.scale
        if grad_x is not None:
            grad_x = (grad_x.to(factor.dtype) * factor).to(grad_x.dtype)
        if grad_w is not None:
            grad_w = (grad_w.to(factor.dtype) * factor).to(grad_w.dtype)
        return grad_x, grad_w, None, None, None, None, None, None, None


def loss_rows(vocab_size: int, device) -> int:
    """Tokens per chunk of the loss."""
    rows = chunk_rows(vocab_size)
    return max(rows, GPU_ROWS) if device.type == "cuda" else rows


def chunk_rows(vocab_size: int) -> int:
    """Tokens per chunk, so that a chunk's fp32 logits take at most CHUNK_BYTES."""
    rows = max(1, CHUNK_BYTES // (4 * vocab_size))
    if rows > 128:
        rows -= rows % 128  # whole tiles for a matmul
    return rows


def takes_kernel(device, dtype) -> bool:
    """Whether the loss of logits with this dtype runs in fast/cross_entropy.py.

    On a GPU, in at most 32 bits, where Triton runs, and runs right: fast/first_use.py.
    """
    if device.type != "cuda" or dtype == torch.float64:
        return False
    from fast import first_use  # only GPUs need it

    return first_use.suits(device)


def kernel_chunk_loss(x, weight, labels, scale, z_loss, softcap, grad_x, grad_w):
    """`chunk_loss` for GPUs. Arguments as there; the loss of a label beyond the vocabulary is NaN.

    The only tensor of shape (rows, V) is the logits, in the dtype of x; with a softcap there is its
    slope, too. The kernel sets the gradient of rows that do not count to 0.
    """
    from fast import cross_entropy as kernels  # only GPUs need it

    logits = x @ weight.T  # (rows, V)
    if softcap is not None:
        logits, slope = capped_with_slope(logits.mul_(scale), softcap)
        scale = 1.0
    if grad_x is None and grad_w is None:
        losses, _ = kernels.cross_entropy(logits, labels, scale, z_loss)
        return losses.sum()

    losses, _ = kernels.cross_entropy_gradient_(logits, labels, scale, z_loss)
    grad = logits  # the kernel has written the gradient over them
    if softcap is not None:
        grad.mul_(slope)
    if grad_x is not None:
        torch.mm(grad, weight, out=grad_x)
    if grad_w is not None:
        kernels.add_product_(grad_w, grad.T, x)
    return losses.sum()


def demonstrate(argv) -> None:
    """Print how far the loss and its gradients are from the obvious version, in fp64."""
    arguments(argv)
    torch.manual_seed(0)
    x = torch.randn(300, 64, dtype=torch.double)
    weight = torch.randn(1000, 64, dtype=torch.double)
    labels = torch.randint(0, 1000, (300,)).masked_fill(torch.rand(300) < 0.1, IGNORE)
    results = []
    for loss_function in (reference_linear_cross_entropy, linear_cross_entropy):
        leaves = [t.clone().requires_grad_() for t in (x, weight)]
        loss = loss_function(*leaves, labels)
        results.append((loss.detach(), *torch.autograd.grad(loss, leaves)))
    print("largest difference from the obvious version, fp64:")
    for name, exact, ours in zip(("loss", "grad x", "grad W"), *results, strict=True):
        print(f"  {name:6s} {(exact - ours).abs().max().item():.1e}")
        assert torch.allclose(exact, ours)


if __name__ == "__main__":
    run(demonstrate)
