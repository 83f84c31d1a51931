"""Two ranks on this machine, started once and kept: what lesson 3 runs on them.

    python -m lessons.two_ranks     the three collectives on two ranks

    ranks = two_ranks.Ranks(2)      starts two processes, joined by gloo
    ranks(all_reduce, x)            calls all_reduce(x) on both: [result of rank 0, of rank 1]
    ranks.stop()

The functions below are what a rank does. Each rank calls the same function, at the same time, with
the same arguments; dist.get_rank() is the only difference. A rank that skips a collective leaves
the other one waiting.

Each process is a fresh interpreter that imports this file: a cell of a notebook, or a script, is
never run again by it. So the functions are written here, not in the lesson. The project is imported
where it is needed: the checker of lesson 3 runs `fully_sharded` where it cannot be.
"""

import gc
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import traceback
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).resolve().parent.parent
PATIENCE = 300  # seconds that a rank waits for the other one, and we for both
CHILD = "from lessons import two_ranks; two_ranks.serve({}, {}, {}, {!r})"

# --------------------------------------------------------------------------------------------------
# Starting and ending


class Ranks:
    """`size` processes, joined by gloo. Call it to run a function of this file on all of them."""

    def __init__(self, size: int = 2):
        self.folder = tempfile.TemporaryDirectory()
        store = f"{self.folder.name}/store"  # a file through which the ranks find each other
        self.pipes, self.processes = [], []
        for rank in range(size):
            ours, theirs = Pipe()
            code = CHILD.format(theirs.fileno(), rank, size, store)
            command = [sys.executable, "-c", code]
            process = subprocess.Popen(command, cwd=ROOT, pass_fds=[theirs.fileno()])
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def __call__(self, function, *args) -> list:
        """[function(*args) on rank 0, on rank 1, ...]. RuntimeError if one fails."""
        return self.per_rank(function, *[args] * len(self.pipes))

    def per_rank(self, function, *args_of_ranks) -> list:
        """The same with arguments that differ: those of rank 0, those of rank 1, ..."""
        for pipe, args in zip(self.pipes, args_of_ranks, strict=True):
            pipe.send_bytes(pickle.dumps((function.__name__, args)))
        results = []
        for rank, pipe in enumerate(self.pipes):
            try:
                answered = pipe.poll(PATIENCE)
                silence = False, f"no answer in {PATIENCE} s"
                succeeded, result = pickle.loads(pipe.recv_bytes()) if answered else silence
            except (EOFError, OSError):
                succeeded, result = False, "the process ended"
            if not succeeded:
                self.stop()
                raise RuntimeError(f"rank {rank}: {result}")
            results.append(result)
        return results

    def stop(self) -> None:
        """End the processes."""
        for pipe in self.pipes:
            pipe.close()  # a rank that waits for work ends now
        for process in self.processes:
            try:
                process.wait(2)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.folder.cleanup()


def serve(pipe_number: int, rank: int, size: int, store: str) -> None:
    """The life of one rank: call what comes through the pipe, until that is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the lesson, which closes the pipe
    torch.set_num_threads(1)
    pipe = Connection(pipe_number)
    meeting = {"init_method": f"file://{store}", "timeout": timedelta(seconds=PATIENCE)}
    dist.init_process_group("gloo", rank=rank, world_size=size, **meeting)
    while True:
        try:
            name, args = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)  # gloo may abort while the interpreter shuts down
        try:
            reply = True, getattr(sys.modules[__name__], name)(*args)
        except BaseException:
            reply = False, traceback.format_exc()
        pipe.send_bytes(pickle.dumps(reply))


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


def collectives():
    """{name: (what this rank has before, after)} with small numbers that show where they go."""
    rank = dist.get_rank()
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
            sizes = [(tensor.numel(), tensor.nbytes) for tensor in tensors_in(args)]
            numbers, n_bytes = max(sizes)
            if numbers > 4:
                self.calls.append((self.KINDS[name], numbers, n_bytes))
        return operation(*args, **(kwargs or {}))


def tensors_in(value) -> list:
    """The tensors in nested lists and tuples."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [x for inner in value for x in tensors_in(inner)] if type(value) in (list, tuple) else []


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


def train_sharded(weight, x, target, lr, n_steps):
    """SGD on the mean squared error of one ShardedLinear, each rank with its share of the rows.

    Returns the loss of each step, this rank's part of W, and what one step sent.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
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


def fully_sharded(weights, x, target, lr, n_steps):
    """The same with PyTorch's `fully_shard`, for layers with GELU between them.

    weights: [(out, in), ...]. x, target: this rank's rows. Returns the loss of each step, the mean
    over the ranks, and the whole weights at the end.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = torch.nn.Sequential()
    for weight in weights:
        if len(model):
            model.append(torch.nn.GELU())
        layer = torch.nn.Linear(*reversed(weight.shape), bias=False)
        layer.weight = torch.nn.Parameter(weight.clone())
        model.append(layer)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)

    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    losses = []
    for _ in range(n_steps):
        loss = F.mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(all_reduce(loss.detach()) / dist.get_world_size())
    return losses, [weight.full_tensor().detach() for weight in model.parameters()]


# --------------------------------------------------------------------------------------------------
# Tensor parallelism by hand


def column_then_row(x, W, U, dy):
    """y = gelu(x W^T) U^T with half of W and half of U on each rank, and the gradient of x for dy.

    x (rows, d), W (hidden, d), U (d, hidden), dy (rows, d). PyTorch stores weights as (out, in), so
    the columns of the formula are rows of W. Returns y, dx, the shape of the hidden part, and what
    was sent.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
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


def measured_step(model_cfg, cfg, rows):
    """A step of training under cfg's layout, watched. rows (global batch, T + 1): token ids.

    Returns its loss, what it sent, and where ranks only share the batch also `kept_in_a_step`.
    """
    import fsdp_train
    import parallel
    import processes

    rank, size = dist.get_rank(), dist.get_world_size()
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
    import parallel

    ids, labels = rows[:, :-1], rows[:, 1:]
    kept = {"between steps": live_bytes()}
    parallel.before_microbatch(model, cfg, last=False)
    with torch.no_grad():  # so that no activations are kept
        model(ids, labels=labels)
    kept["after a forward"] = live_bytes()
    model(ids, labels=labels).backward()
    kept["between microbatches"] = live_bytes()
    return kept


def live_bytes() -> int:
    """Bytes of all floating-point tensors that Python can reach: not those that autograd keeps."""
    gc.collect()
    storages = {}
    for found in gc.get_objects():
        if not issubclass(type(found), torch.Tensor) or type(found).__name__ == "DTensor":
            continue  # a DTensor is a wrapper around a local tensor, which is found itself
        if found.is_floating_point() and found.device.type == "cpu":
            storage = found.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def main(argv) -> None:
    """Print what three collectives do."""
    config.arguments(argv)
    ranks = Ranks(2)
    for rank, found in enumerate(ranks(collectives)):
        for name, (before, after) in found.items():
            print(f"rank {rank}  {name:15} {before.tolist()} -> {after.tolist()}")
    ranks.stop()


if __name__ == "__main__":
    import config

    config.run(main)
