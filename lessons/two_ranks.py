"""What lesson 3 runs on two ranks of this machine: a process is started from a file, not a cell.

    ranks = two_ranks.start()                     starts two processes, joined by gloo
    ranks(two_ranks.train_sharded, W, ...)        [its result on rank 0, on rank 1]
    ranks.stop()

Each rank calls the same function, at the same time, with its own rank and the same arguments. A
rank that skips a collective leaves the other one waiting.
"""

import gc
import sys
import time
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fsdp_train
import parallel
import processes
from launch.pool import Pool


def start() -> Pool:
    """Two ranks. A new process imports the file that runs here: no lesson must run again there."""
    main = vars(sys.modules["__main__"])
    with mock.patch.dict(main):
        main.pop("__file__", None)
        return Pool(2, join)


def join() -> int:
    """Join the other ranks. Returns this one's number."""
    dist.init_process_group("gloo")
    return dist.get_rank()


# --------------------------------------------------------------------------------------------------
# The collectives. torch 2.13 has new names for two of them, and warns of the old ones.


def all_gather(part):
    """The parts of all ranks, one below the other: (rows, ...) -> (size * rows, ...)."""
    whole = part.new_empty(dist.get_world_size() * len(part), *part.shape[1:])
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(whole, part.contiguous())
    return whole


def reduce_scatter(whole):
    """The sum over the ranks, of which rank r gets the r-th part of the rows."""
    part = whole.new_empty(len(whole) // dist.get_world_size(), *whole.shape[1:])
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    scatter(part, whole.contiguous())
    return part


def all_reduce(x):
    """The sum over the ranks, as a new tensor."""
    x = x.clone()
    dist.all_reduce(x)
    return x


def collectives(rank):
    """{name: (what this rank has before, after)} with small numbers that show where they go."""
    part = torch.tensor([1.0, 2.0]) + 10 * rank
    whole = torch.tensor([1.0, 2.0, 3.0, 4.0]) * 10**rank
    return {
        "all-gather": (part, all_gather(part)),
        "reduce-scatter": (whole, reduce_scatter(whole)),
        "all-reduce": (whole, all_reduce(whole)),
    }


class Traffic(TorchDispatchMode):
    """Records what this rank sends while it is active: `calls`, [(kind, numbers, bytes), ...].

    The bytes are those of the whole: what an all-gather results in, what a reduction begins with.
    Calls about at most 4 numbers, such as a loss or a count of tokens, are left out.
    """

    KINDS = {
        "_allgather_base_": "all-gather",
        "_reduce_scatter_base_": "reduce-scatter",
        "allreduce_": "all-reduce",
        "send": "send",
    }

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        """Called by PyTorch in place of each operation."""
        room, _, name = operation.name().partition("::")
        if room == "c10d" and name in self.KINDS:
            tensors = [x for x in tree_leaves(args) if isinstance(x, torch.Tensor)]
            numbers, n_bytes = max((tensor.numel(), tensor.nbytes) for tensor in tensors)
            if numbers > 4:
                self.calls.append((self.KINDS[name], numbers, n_bytes))
        return operation(*args, **(kwargs or {}))


# --------------------------------------------------------------------------------------------------
# FULL_SHARD of one layer by hand


class ShardedLinear(torch.nn.Module):
    """y = x W^T, where each of n ranks keeps 1/n of the rows of W."""

    def __init__(self, weight):
        super().__init__()
        part = weight.chunk(dist.get_world_size())[dist.get_rank()]  # (out / n, in)
        self.part = torch.nn.Parameter(part.clone())  # a clone: a view would keep all of W alive

    def forward(self, x):
        """x (rows, in) -> (rows, out)."""
        return GatheredProduct.apply(x, self.part)


class GatheredProduct(torch.autograd.Function):
    """x W^T and its gradients. W is whole only inside of these two functions."""

    @staticmethod
    def forward(ctx, x, part):
        """x (rows, in), part (out / n, in) -> (rows, out)."""
        ctx.save_for_backward(x, part)  # not W
        weight = all_gather(part)  # (out, in)
        return x @ weight.T

    @staticmethod
    def backward(ctx, dy):
        """dy (rows, out) -> the gradients of x and of this rank's part of W."""
        x, part = ctx.saved_tensors
        weight = all_gather(part)  # again: it was freed after the forward
        dx = dy @ weight
        dW = dy.T @ x  # (out, in), from this rank's rows
        d_part = reduce_scatter(dW) / dist.get_world_size()  # the mean over the ranks
        return dx, d_part


def train_sharded(rank, weight, x, target, lr, n_steps):
    """SGD on the mean squared error of one ShardedLinear, each rank with its share of the rows.

    Returns the loss of each step, this rank's part of W, and what one step sent.
    """
    size = dist.get_world_size()
    layer = ShardedLinear(weight)
    x, target = x.chunk(size)[rank], target.chunk(size)[rank]
    losses = []
    for _ in range(n_steps):
        with Traffic() as traffic:
            loss = F.mse_loss(layer(x), target)  # the mean over this rank's rows
            loss.backward()
        losses.append(all_reduce(loss.detach()).item() / size)
        with torch.no_grad():
            layer.part -= lr * layer.part.grad
        layer.part.grad = None
    return losses, layer.part.detach(), traffic.calls


def fully_sharded(rank, weight, x, target, lr, n_steps):
    """The same with PyTorch's `fully_shard`: the losses, and the whole weight at the end."""
    size = dist.get_world_size()
    x, target = x.chunk(size)[rank], target.chunk(size)[rank]
    layer = torch.nn.Linear(*reversed(weight.shape), bias=False)
    layer.weight = torch.nn.Parameter(weight.clone())
    fully_shard(layer, mesh=init_device_mesh("cpu", (size,)))

    optimizer = torch.optim.SGD(layer.parameters(), lr=lr)
    losses = []
    for _ in range(n_steps):
        loss = F.mse_loss(layer(x), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(all_reduce(loss.detach()) / size)
    return losses, layer.weight.full_tensor().detach()


# --------------------------------------------------------------------------------------------------
# Tensor parallelism by hand


def column_then_row(rank, x, W, U, dy):
    """y = gelu(x W^T) U^T with half of W and half of U on each rank, and the gradient of x for dy.

    x (rows, d), W (hidden, d), U (d, hidden), dy (rows, d). PyTorch stores weights as (out, in), so
    the columns of the formula are rows of W. Returns y, dx, the shape of the hidden part, and what
    was sent.
    """
    size = dist.get_world_size()
    W_part = W.chunk(size, dim=0)[rank]  # some of the output features
    U_part = U.chunk(size, dim=1)[rank]  # the input features that fit them
    x = x.clone().requires_grad_()
    with Traffic() as traffic:
        hidden = F.gelu(x @ W_part.T)  # (rows, hidden / n): complete numbers, no sum is missing
        share = hidden @ U_part.T  # (rows, d): one of n terms of a sum
        y = all_reduce(share.detach())

        (dx,) = torch.autograd.grad(share, x, dy)  # every rank read x: again one of n terms
        dx = all_reduce(dx)
    return y, dx, tuple(hidden.shape), traffic.calls


# --------------------------------------------------------------------------------------------------
# The project's own model


def measured_step(rank, model_cfg, cfg, rows):
    """A step of training under cfg's layout, watched. rows (global batch, T + 1): token ids.

    Returns its loss, what it sent, and where ranks only share the batch also `kept_in_a_step`.
    """
    size = dist.get_world_size()
    alone = processes.World(rank, size, rank, size, torch.device("cpu"))
    world = processes.in_grid(alone, cfg.tp, cfg.pp)
    model, optimizer = parallel.build(model_cfg, cfg, world, "fp32", cfg.seed)
    rows = rows.chunk(world.dp_size)[world.dp_rank]
    step = (model, optimizer, rows)
    first, *_ = fsdp_train.train_step(*step, 0, cfg, world, "fp32")  # makes Adam's moments
    with Traffic() as traffic:
        fsdp_train.train_step(*step, 1, cfg, world, "fp32")
    kept = kept_in_a_step(model, rows[: cfg.microbatch_size], cfg) if cfg.tp * cfg.pp == 1 else {}
    return first.item(), traffic.calls, kept


def kept_in_a_step(model, rows, cfg) -> dict[str, int]:
    """{moment: bytes of weights, gradients and moments on this rank}, activations left out."""
    ids, labels = rows[:, :-1], rows[:, 1:]
    kept = {"between steps": live_bytes()}
    parallel.postpone_communication(model, cfg, is_last=False)
    with torch.no_grad():  # so that no activations are kept
        model(ids, labels=labels)
    kept["after a forward"] = live_bytes()
    model(ids, labels=labels).backward()
    kept["between microbatches"] = live_bytes()
    return kept


def live_bytes() -> int:
    """Bytes of all floating-point tensors that Python can reach: not those that autograd keeps."""
    time.sleep(0.1)  # the threads of gloo let go of a collective's tensors a moment after its end
    gc.collect()
    storages = {}
    for found in gc.get_objects():
        if not issubclass(type(found), torch.Tensor) or type(found).__name__ == "DTensor":
            continue  # a DTensor is a wrapper around a local tensor, which is found itself
        if found.is_floating_point() and found.device.type == "cpu":
            storage = found.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
