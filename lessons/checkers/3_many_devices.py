"""Checks exercise 3: two layers, sharded over ranks by hand.

The pieces travel through this process between the steps, so it sees what a rank keeps. Only the
answer itself, on two ranks and on one, is compared bit by bit: all else has a tolerance.
"""

import math

import torch
import torch.nn.functional as F

from lessons.answers import PerRank, close

EVEN = [(8, 4), (2, 8)]  # the shapes of W1 and W2
LR, STEPS = 0.1, 4
ROWS = 6  # of each rank


def check_shard(answer):
    """shard: each of two ranks keeps its half of a weight, in memory of its own"""
    for shape in ((2, 1), (4, 3)):
        sharded(answer, [counted(*shape)], 2)


def check_gather(answer):
    """gather: every rank gets the whole weight back"""
    for shape in ((2, 1), (4, 3)):
        need_gather(answer, counted(*shape))


def check_same_rows(answer):
    """step: two ranks with the same rows compute bit by bit what one rank computes"""
    of_one = compare(answer, EVEN, 1, same_rows=True)
    of_two = compare(answer, EVEN, 2, same_rows=True)
    for one, two in zip(of_one, of_two, strict=True):
        close("a loss or weight of two ranks with the same rows, bit by bit", two, one)


def check_different_rows(answer):
    """step: two ranks with different rows compute what one rank does"""
    compare(answer, EVEN, 2, same_rows=False)


def check_odd_sizes(answer):
    """odd sizes: weights that cannot be cut evenly, on two ranks and on three"""
    for shape in ((3, 1), (5, 3), (1, 1)):
        sharded(answer, [counted(*shape)], 2)
        need_gather(answer, counted(*shape))
    compare(answer, [(5, 3), (1, 5)], 2, same_rows=False)
    compare(answer, [(1, 7), (1, 1)], 3, same_rows=False)


# --------------------------------------------------------------------------------------------------
# The same on one rank


def counted(*shape) -> torch.Tensor:
    """1, 2, 3, ... in this shape."""
    return 1 + torch.arange(math.prod(shape), dtype=torch.float32).view(shape)


def random(*shape, seed: int) -> torch.Tensor:
    """Normal random numbers, the same for the same seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def problem(shapes, n_rows: int) -> tuple[list, torch.Tensor, torch.Tensor]:
    """Weights of these shapes, and rows with targets."""
    weights = [random(*shape, seed=i) / shape[1] ** 0.5 for i, shape in enumerate(shapes)]
    return weights, random(n_rows, shapes[0][1], seed=2), random(n_rows, shapes[1][0], seed=3)


def trained(weights, x, target) -> list:
    """[losses ..., weights at the end] of SGD on one rank."""
    weights = [weight.clone().requires_grad_() for weight in weights]
    losses = []
    for _ in range(STEPS):
        loss = F.mse_loss(F.gelu(x @ weights[0].T) @ weights[1].T, target)
        losses.append(loss.detach())
        gradients = torch.autograd.grad(loss, weights)
        with torch.no_grad():
            for weight, gradient in zip(weights, gradients, strict=True):
                weight -= LR * gradient
    return [*losses, *(weight.detach() for weight in weights)]


def pieces_of(weight, size: int) -> list:
    """The piece of each rank."""
    length = math.ceil(weight.numel() / size)
    flat = F.pad(weight.flatten(), (0, size * length - weight.numel()))
    return [piece.clone() for piece in flat.split(length)]


# --------------------------------------------------------------------------------------------------
# The answer on several ranks


def need_own_memory(what: str, piece) -> None:
    """A piece keeps no more than its own numbers in memory."""
    held = piece.untyped_storage().nbytes() // 4
    view = f"it is a view, so all {held} numbers of the weight stay alive: `clone()` copies it"
    assert held <= max(len(piece), 1), f"{what} has {len(piece)} numbers, but {view}"


def sharded(answer, weights, size: int) -> list[list]:
    """[the pieces of every weight, on rank 0, on rank 1, ...], each as `shard` promises it."""
    by_weight = []
    for weight in weights:
        pieces = answer.call_on_ranks(size, "shard", weight)
        for rank, (piece, wanted) in enumerate(zip(pieces, pieces_of(weight, size), strict=True)):
            what = f"shard on rank {rank} of {size}, of a weight {tuple(weight.shape)},"
            close(what, piece, wanted, 0, "row by row, padded with zeros, in equal pieces")
            need_own_memory(what, piece)
        by_weight.append(pieces)
    return [list(pieces) for pieces in zip(*by_weight, strict=True)]


def need_gather(answer, weight) -> None:
    """`gather` must return this weight on both of two ranks."""
    shape = tuple(weight.shape)
    wholes = answer.call_on_ranks(2, "gather", PerRank(pieces_of(weight, 2)), shape)
    for rank, whole in enumerate(wholes):
        close(f"gather on rank {rank}, of a weight {shape}", whole, weight)


def run(answer, weights, xs, targets) -> list:
    """[losses ..., weights at the end] of the answer. xs, targets: the rows of each rank."""
    size = len(xs)
    shapes = [tuple(weight.shape) for weight in weights]
    pieces = sharded(answer, weights, size)
    losses = []
    for _ in range(STEPS):
        rows = PerRank(xs), PerRank(targets)
        results = answer.call_on_ranks(size, "step", PerRank(pieces), shapes, *rows, LR)
        pieces = [list(new) for _, new in results]
        for rank, (loss, new) in enumerate(results):
            close(f"the loss on rank {rank}", loss, results[0][0], 0, "all-reduce it")
            for name, piece in zip(("W1", "W2"), new, strict=True):
                need_own_memory(f"the new piece of {name} on rank {rank}", piece)
        losses.append(results[0][0])
    for weight, of_ranks in zip(weights, zip(*pieces, strict=True), strict=True):
        losses.append(torch.cat(of_ranks)[: weight.numel()].view(weight.shape))
    return losses


def compare(answer, shapes, size: int, same_rows: bool) -> list:
    """Steps on `size` ranks against one with all rows. Returns the answer's losses and weights."""
    weights, x, target = problem(shapes, ROWS if same_rows else ROWS * size)
    xs, targets = [x] * size, [target] * size
    if not same_rows:
        xs, targets = list(x.chunk(size)), list(target.chunk(size))
    rows = "the same rows" if same_rows else "different rows"
    case = f"on {size} ranks with {rows}, W1 {shapes[0]}, W2 {shapes[1]}"
    hint = "reduce-scatter adds; the loss is a mean over the rows of all ranks: all-reduce it"
    found = run(answer, weights, xs, targets)
    names = [f"the loss before step {number}" for number in range(1, STEPS + 1)]
    names += [f"{name} after {STEPS} steps" for name in ("W1", "W2")]
    for name, got, right in zip(names, found, trained(weights, x, target), strict=True):
        close(f"{name}, {case}", got, right, 1e-6, hint)
    return found
