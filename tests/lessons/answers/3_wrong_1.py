"""Wrong: the gradients of the ranks are added up, not averaged.

Refused by check_same_rows, check_different_rows, check_fully_shard, check_odd_sizes,
check_three_ranks.
"""

import math

import torch.distributed as dist
import torch.nn.functional as F


def all_gather(part):
    whole = part.new_empty(dist.get_world_size() * len(part))
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(whole, part.contiguous())
    return whole


def reduce_scatter(whole):
    part = whole.new_empty(len(whole) // dist.get_world_size())
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    scatter(part, whole.contiguous())
    return part


def cut(tensor):
    flat = tensor.flatten()
    flat = F.pad(flat, (0, -len(flat) % dist.get_world_size()))
    return flat


def shard(weight):
    return cut(weight).chunk(dist.get_world_size())[dist.get_rank()].clone()


def gather(piece, shape):
    return all_gather(piece)[: math.prod(shape)].view(shape)


def step(pieces, shapes, x, target, lr):
    size = dist.get_world_size()
    weights = [gather(p, s).requires_grad_() for p, s in zip(pieces, shapes, strict=True)]
    y = F.gelu(x @ weights[0].T) @ weights[1].T
    loss = F.mse_loss(y, target)
    loss.backward()
    gradients = [reduce_scatter(cut(weight.grad)) for weight in weights]
    new = [piece - lr * gradient for piece, gradient in zip(pieces, gradients, strict=True)]
    loss = loss.detach()
    dist.all_reduce(loss)
    return loss / size, new
