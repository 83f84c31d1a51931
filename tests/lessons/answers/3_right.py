"""Right: gradients by hand, gathers by broadcasts, the reduction by an all-reduce and a slice."""

import math

import torch
import torch.distributed as dist


def bounds(n, rank, size):
    """Where the piece of a rank begins and ends among n numbers: it may be shorter, or empty."""
    length = (n + size - 1) // size
    return min(n, rank * length), min(n, (rank + 1) * length), length


def own_part(flat):
    begin, end, length = bounds(flat.numel(), dist.get_rank(), dist.get_world_size())
    piece = torch.zeros(length)
    piece[: end - begin] = flat[begin:end]
    return piece


def shard(weight):
    return own_part(weight.flatten())


def gather(piece, shape):
    n, size = math.prod(shape), dist.get_world_size()
    whole = torch.empty(n)
    for rank in range(size):
        begin, end, _ = bounds(n, rank, size)
        sent = piece.clone() if rank == dist.get_rank() else torch.empty_like(piece)
        dist.broadcast(sent, rank)
        whole[begin:end] = sent[: end - begin]
    return whole.reshape(shape)


def normal(a):
    """The normal distribution and its density."""
    return 0.5 * (1 + torch.erf(a / math.sqrt(2))), torch.exp(-(a**2) / 2) / math.sqrt(2 * math.pi)


def step(pieces, shapes, x, target, lr):
    size = dist.get_world_size()
    W1, W2 = (gather(piece, shape) for piece, shape in zip(pieces, shapes, strict=True))
    a = x @ W1.T
    cdf, density = normal(a)
    hidden = a * cdf
    error = hidden @ W2.T - target
    n = error.numel() * size
    loss = (error**2).sum() / n
    dist.all_reduce(loss)

    dy = 2 * error / n
    da = dy @ W2 * (cdf + a * density)
    new = []
    for piece, dW in zip(pieces, (da.T @ x, dy.T @ hidden), strict=True):
        dist.all_reduce(dW)
        new.append(piece - lr * own_part(dW.flatten()))
    return loss, new
