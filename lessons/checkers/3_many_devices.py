"""Checks exercise 3: two layers, sharded over ranks by hand.

`python -m lessons check 3` runs the functions `check_...` one by one. The pieces travel through
this process between the steps, so it sees what a rank keeps. Only the answer itself, on two ranks
and on one, is compared bit by bit: all else has a tolerance.
"""

import math

import torch
import torch.nn.functional as F

from lessons import two_ranks
from lessons.answering import PerRank
from lessons.answers import close, form

EVEN = [(8, 4), (2, 8)]  # the shapes of W1 and W2
LR, STEPS = 0.1, 4
ROWS = 6  # of each rank
HANG = (
    "If a rank waits in a collective that another does not call: is one inside `if rank == 0`, or "
    "are they in another order?"
)


def random(*shape, seed: int = 0) -> torch.Tensor:
    """Normal random numbers, the same for the same seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def problem(shapes, n_rows: int) -> tuple[list, torch.Tensor, torch.Tensor]:
    """Weights of these shapes, and rows with targets."""
    weights = [random(*shape, seed=i) / shape[1] ** 0.5 for i, shape in enumerate(shapes)]
    return weights, random(n_rows, shapes[0][1], seed=2), random(n_rows, shapes[1][0], seed=3)


def trained(weights, x, target, n_steps: int) -> tuple[list, list]:
    """(losses, weights at the end) of SGD on one rank."""
    weights = [weight.clone().requires_grad_() for weight in weights]
    losses = []
    for _ in range(n_steps):
        loss = F.mse_loss(F.gelu(x @ weights[0].T) @ weights[1].T, target)
        losses.append(loss.detach())
        gradients = torch.autograd.grad(loss, weights)
        with torch.no_grad():
            for weight, gradient in zip(weights, gradients, strict=True):
                weight -= LR * gradient
    return losses, [weight.detach() for weight in weights]


def pieces_of(weight, size: int) -> list:
    """The piece of each rank."""
    length = math.ceil(weight.numel() / size)
    flat = F.pad(weight.flatten(), (0, size * length - weight.numel()))
    return [piece.clone() for piece in flat.split(length)]


def joined(pieces, shape) -> torch.Tensor:
    """The whole weight."""
    return torch.cat(pieces)[: math.prod(shape)].view(shape)


# --------------------------------------------------------------------------------------------------
# Calling the answer


def on_ranks(answer, size: int, function: str, *args) -> list:
    """What it returns on each of `size` ranks."""
    try:
        return answer.call_on_ranks(size, function, *args)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{HANG}" if answer.not_run else str(error)) from None


def need_own_memory(what: str, piece) -> None:
    """A piece keeps no more than its own numbers in memory."""
    held = piece.untyped_storage().nbytes() // 4
    view = f"it is a view, so all {held} numbers of the weight stay alive: `clone()` copies it"
    assert held <= max(len(piece), 1), f"{what} has {len(piece)} numbers, but {view}"


def sharded(answer, weights, size: int) -> list[list]:
    """[the pieces of every weight, on rank 0, on rank 1, ...], each as `shard` promises it."""
    by_weight = []
    for weight in weights:
        pieces = on_ranks(answer, size, "shard", weight)
        for rank, (piece, wanted) in enumerate(zip(pieces, pieces_of(weight, size), strict=True)):
            what = f"shard on rank {rank} of {size}, of a weight {tuple(weight.shape)},"
            close(what, piece, wanted, 0, "row by row, padded with zeros, in equal pieces")
            need_own_memory(what, piece)
        by_weight.append(pieces)
    return [list(pieces) for pieces in zip(*by_weight, strict=True)]


def run(answer, weights, xs, targets, n_steps: int) -> tuple[list, list]:
    """(losses, [the pieces of each rank]) after some steps of the answer.

    xs, targets: the rows of each rank.
    """
    size = len(xs)
    shapes = [tuple(weight.shape) for weight in weights]
    pieces = sharded(answer, weights, size)
    rows = PerRank(xs), PerRank(targets)
    losses = []
    for _ in range(n_steps):
        results = on_ranks(answer, size, "step", PerRank(pieces), shapes, *rows, LR)
        for rank, result in enumerate(results):
            what = f"step on rank {rank}"
            is_pair = isinstance(result, tuple | list) and len(result) == 2
            assert is_pair, f"{what}: expected (loss, [piece of W1, piece of W2]), got {result!r}"
            loss, new = result
            close(f"the loss on rank {rank}", loss, results[0][0], 0, "all-reduce it")
            for name, piece, weight in zip(("W1", "W2"), new, weights, strict=True):
                length = math.ceil(weight.numel() / size)
                got = form(piece)
                assert got == f"a tensor float32 ({length},)", f"{what}: the new {name} is {got}"
                need_own_memory(f"the new piece of {name} on rank {rank}", piece)
        losses.append(results[0][0])
        pieces = [list(new) for _, new in results]
    return losses, pieces


def compare(answer, shapes, size: int, same_rows: bool) -> tuple[list, list]:
    """Steps on `size` ranks against one with all rows. Returns the answer's losses and weights."""
    weights, x, target = problem(shapes, ROWS if same_rows else ROWS * size)
    xs, targets = [x] * size, [target] * size
    if not same_rows:
        xs, targets = list(x.chunk(size)), list(target.chunk(size))
    rows = "the same rows" if same_rows else "different rows"
    case = f"on {size} ranks with {rows}, W1 {shapes[0]}, W2 {shapes[1]}"
    hint = (
        f"reduce-scatter adds the gradients of {size} ranks, and the loss is a mean over all rows"
    )
    for n_steps in (1, STEPS):  # a mistake is easiest to see after one step
        losses, pieces = run(answer, weights, xs, targets, n_steps)
        wanted_losses, wanted = trained(weights, x, target, n_steps)
        for number, (loss, right) in enumerate(zip(losses, wanted_losses, strict=True)):
            mean = "the loss is the mean over the rows of all ranks: all-reduce it"
            close(f"the loss before step {number + 1}, {case}", loss, right, 1e-6, mean)
        whole = [joined([of_rank[i] for of_rank in pieces], shapes[i]) for i in (0, 1)]
        for name, new, right in zip(("W1", "W2"), whole, wanted, strict=True):
            close(f"{name} after {n_steps} steps, {case}", new, right, 1e-6, hint)
    return losses, whole


# --------------------------------------------------------------------------------------------------
# The parts


def counted(*shape) -> torch.Tensor:
    """1, 2, 3, ... in this shape."""
    return 1 + torch.arange(math.prod(shape), dtype=torch.float32).view(shape)


def need_gather(answer, weight) -> None:
    """`gather` must return this weight on both of two ranks."""
    shape = tuple(weight.shape)
    wholes = on_ranks(answer, 2, "gather", PerRank(pieces_of(weight, 2)), shape)
    for rank, whole in enumerate(wholes):
        close(f"gather on rank {rank}, of a weight {shape}", whole, weight)


def check_shard(answer):
    """shard: each of two ranks keeps its half of a weight, in memory of its own"""
    for shape in ((2, 1), (2, 2), (4, 3), (3, 4)):
        sharded(answer, [counted(*shape)], 2)


def check_gather(answer):
    """gather: every rank gets the whole weight back"""
    for shape in ((2, 1), (2, 2), (4, 3), (3, 4)):
        need_gather(answer, counted(*shape))


def check_same_rows(answer):
    """step: two ranks with the same rows compute bit by bit what one rank computes"""
    losses, weights = compare(answer, EVEN, 1, same_rows=True)
    losses_of_two, weights_of_two = compare(answer, EVEN, 2, same_rows=True)
    pairs = zip([*losses, *weights], [*losses_of_two, *weights_of_two], strict=True)
    for one, two in pairs:
        close("a loss or weight of two ranks with the same rows, bit by bit", two, one)


def check_different_rows(answer):
    """step: two ranks with different rows compute what one rank does, and what fully_shard does"""
    losses, weights = compare(answer, EVEN, 2, same_rows=False)
    given, x, target = problem(EVEN, 2 * ROWS)
    pytorch = two_ranks.start()
    ((their_losses, theirs), _) = pytorch(two_ranks.fully_sharded, given, x, target, LR, STEPS)
    pytorch.stop()
    for ours, wanted in zip([*losses, *weights], [*their_losses, *theirs], strict=True):
        close("a loss or weight of two ranks, beside PyTorch's fully_shard", ours, wanted, 1e-6)


def check_odd_sizes(answer):
    """odd sizes: weights that cannot be cut evenly, on two ranks and on three"""
    for shape in ((3, 1), (5, 3), (1, 1)):
        sharded(answer, [counted(*shape)], 2)
        need_gather(answer, counted(*shape))
    compare(answer, [(5, 3), (1, 5)], 2, same_rows=False)
    compare(answer, [(1, 7), (1, 1)], 3, same_rows=False)
