"""A solution of exercise 3: two layers, gathered one at a time, forward and backward.

`python -m lessons check 3 --file=lessons/solutions/3_many_devices.py` checks it.
"""

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F


def all_gather(part: torch.Tensor) -> torch.Tensor:
    """Given. The parts of all ranks, in their order: (m,) on each rank -> (size * m,) on all."""
    whole = part.new_empty(dist.get_world_size() * len(part))
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


def padded(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers of a tensor, row by row, with zeros up to a multiple of the number of ranks."""
    flat = tensor.reshape(-1)
    # -a % b is what is missing from a to the next multiple of b: 15 numbers on 2 ranks miss 1.
    return F.pad(flat, (0, -len(flat) % dist.get_world_size()))


def shard(weight: torch.Tensor) -> torch.Tensor:
    """This rank's piece of a weight."""
    pieces = padded(weight).chunk(dist.get_world_size())
    # chunk returns views of one memory. Without the clone, each rank would keep the whole weight.
    return pieces[dist.get_rank()].clone()


def gather(piece: torch.Tensor, shape: tuple) -> torch.Tensor:
    """The whole weight on every rank."""
    n = math.prod(shape)
    return all_gather(piece)[:n].view(shape)  # the padding is behind the n-th number


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


def step(
    pieces: list, shapes: list, x: torch.Tensor, target: torch.Tensor, lr: float
) -> tuple[torch.Tensor, list]:
    """One step of SGD."""
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
