"""Exercise 3: FULL_SHARD by hand. Two layers on n ranks, of which each keeps 1/n of every weight.

    python -m lessons check 3

The checker starts two processes that are joined by gloo: torch.distributed is initialized when your
functions are called. All ranks call the same function at the same time.

The net has two layers without biases. For each row x it computes

    y = W2 gelu(W1 x)            W1 (hidden, in), W2 (out, hidden); gelu: torch.nn.functional.gelu

and its loss is the mean of (y - target)^2 over all numbers of all rows of all ranks. Every rank has
as many rows as the others.

Write three functions. The checker calls `shard` for both weights and keeps what comes back. For
each step it gives these pieces to `step`, and keeps the new ones: your code stores nothing else
between the steps.

Part 1. Weights that can be cut evenly. Two ranks that see the same rows must compute bit by bit
    what one rank computes, and ranks with different rows what one rank computes from all rows, to
    1e-6.
Part 2. Weights of any size on any number of ranks. A weight of 15 numbers on two ranks gets one
    zero at its end, and each rank keeps 8 numbers. If there are fewer numbers than ranks, some
    ranks keep zeros only.

`all_gather` and `reduce_scatter` are given, and dist.get_rank(), dist.get_world_size() and
dist.all_reduce(x), which sums x over the ranks in place, are at hand. All ranks must call the same
collectives in the same order. If one waits for a collective that another does not call, the check
stands still for 30 seconds, then says so and runs no further part.
"""

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F


def all_gather(part: torch.Tensor) -> torch.Tensor:
    """Given. The parts of all ranks, in their order: (m,) on each rank -> (size * m,) on all."""
    whole = part.new_empty(dist.get_world_size() * len(part))
    # torch 2.13 has a new name for it, and warns of the old one
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(whole, part.contiguous())
    return whole


def reduce_scatter(whole: torch.Tensor) -> torch.Tensor:
    """Given. Part r of the sum over the ranks: (size * m,) on each rank -> (m,) on rank r."""
    size = dist.get_world_size()
    if len(whole) % size:
        cut = f"{len(whole)} numbers cannot be cut into {size} equal parts"
        raise ValueError(f"{cut}: pad the gradient as `shard` pads the weight")
    part = whole.new_empty(len(whole) // size)
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    scatter(part, whole.contiguous())
    return part


# --- in the stub:
def padded(tensor):
    """The numbers of a tensor, row by row, with zeros up to a multiple of the number of ranks."""
    flat = tensor.reshape(-1)
    # -a % b is what is missing from a to the next multiple of b: 15 numbers on 2 ranks miss 1.
    return F.pad(flat, (0, -len(flat) % dist.get_world_size()))


# ---


def shard(weight: torch.Tensor) -> torch.Tensor:
    """This rank's piece of a weight, (ceil(numel / size),) float32.

    weight: float32 of any shape, the same on all ranks. Its numbers are taken row by row, padded
    with zeros at the end, and cut into `size` equal pieces; rank 0 has the first.

    The piece owns its memory: a view would keep all of the weight alive.
    """
    # --- in the stub: raise NotImplementedError
    pieces = padded(weight).chunk(dist.get_world_size())
    # chunk returns views of one memory. Without the clone, each rank would keep the whole weight.
    return pieces[dist.get_rank()].clone()
    # ---


def gather(piece: torch.Tensor, shape: tuple) -> torch.Tensor:
    """The whole weight, float32 of this shape, on every rank. A collective.

    piece: what `shard` returned on this rank.
    """
    # --- in the stub: raise NotImplementedError
    n = math.prod(shape)
    return all_gather(piece)[:n].view(shape)  # the padding is behind the n-th number
    # ---


# --- in the stub:
class Linear(torch.autograd.Function):
    """x W^T. W is whole inside of forward and inside of backward, and nowhere else."""

    @staticmethod
    def forward(ctx, x, piece, shape):
        """x (rows, in) -> (rows, out)."""
        ctx.save_for_backward(x, piece)  # not W: autograd would keep it until the backward
        ctx.shape = shape
        return x @ gather(piece, shape).T

    @staticmethod
    def backward(ctx, dy):
        """dy (rows, out) -> the gradients of x and of the piece."""
        x, piece = ctx.saved_tensors
        dx = dy @ gather(piece, ctx.shape)
        dW = dy.T @ x  # whole, but of this rank's rows only
        # The padding of dW is zero, so that of the piece stays zero. The loss is a mean over the
        # rows of all ranks, hence the division: the sum would be a step `size` times too long.
        d_piece = reduce_scatter(padded(dW)) / dist.get_world_size()
        return dx, d_piece, None


# ---


def step(
    pieces: list, shapes: list, x: torch.Tensor, target: torch.Tensor, lr: float
) -> tuple[torch.Tensor, list]:
    """One step of SGD, W -= lr * gradient. A collective. Returns (loss, new pieces).

    pieces   this rank's pieces of W1 and W2
    shapes   the shapes of W1 and W2
    x        (rows, in) float32, the rows of this rank
    target   (rows, out) float32

    loss         float32 scalar tensor, before the update: the mean over the rows of all ranks, so
                 it is the same on all of them
    new pieces   of W1 and W2, as large as before. The gradient is that of this loss
    """
    # --- in the stub: raise NotImplementedError
    pieces = [piece.detach().requires_grad_() for piece in pieces]
    hidden = F.gelu(Linear.apply(x, pieces[0], shapes[0]))  # (rows, hidden)
    y = Linear.apply(hidden, pieces[1], shapes[1])  # (rows, out)
    loss = F.mse_loss(y, target)  # the mean over this rank's rows

    # Autograd reaches W2 first. All ranks have the same graph, so their collectives meet.
    loss.backward()

    # Only now the mean over all ranks: the backward above needs this rank's own loss.
    loss = loss.detach()
    dist.all_reduce(loss)
    loss /= dist.get_world_size()  # all ranks have as many rows
    with torch.no_grad():
        return loss, [piece - lr * piece.grad for piece in pieces]
    # ---
