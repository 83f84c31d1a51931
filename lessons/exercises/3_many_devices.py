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

import torch
import torch.distributed as dist


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


def shard(weight: torch.Tensor) -> torch.Tensor:
    """This rank's piece of a weight, (ceil(numel / size),) float32.

    weight: float32 of any shape, the same on all ranks. Its numbers are taken row by row, padded
    with zeros at the end, and cut into `size` equal pieces; rank 0 has the first.

    The piece owns its memory: a view would keep all of the weight alive.
    """
    raise NotImplementedError


def gather(piece: torch.Tensor, shape: tuple) -> torch.Tensor:
    """The whole weight, float32 of this shape, on every rank. A collective.

    piece: what `shard` returned on this rank.
    """
    raise NotImplementedError


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
    raise NotImplementedError
