"""A solution of exercise 3: two layers, gathered one at a time, forward and backward."""

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F

from lessons.two_ranks import all_gather, reduce_scatter  # as they are given in the stub


def padded(tensor):
    """The numbers of a tensor, row by row, with zeros up to a multiple of the number of ranks."""
    flat = tensor.reshape(-1)
    # -a % b is what is missing from a to the next multiple of b: 15 numbers on 2 ranks miss 1.
    return F.pad(flat, (0, -len(flat) % dist.get_world_size()))


def shard(weight):
    """This rank's piece of a weight, (ceil(numel / size),) float32."""
    pieces = padded(weight).chunk(dist.get_world_size())
    # chunk returns views of one memory. Without the clone, each rank would keep the whole weight.
    return pieces[dist.get_rank()].clone()


def gather(piece, shape):
    """The whole weight, float32 of this shape, on every rank. A collective."""
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


def step(pieces, shapes, x, target, lr):
    """One step of SGD, W -= lr * gradient. A collective. Returns (loss, new pieces)."""
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
