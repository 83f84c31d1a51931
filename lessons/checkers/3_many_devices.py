"""Checks exercise 3: two layers, sharded over ranks by hand.

`python -m lessons check 3` runs the functions `check_...` one by one. The pieces travel through
this process between the steps, so it sees what a rank keeps. Only the answer itself, on two ranks
and on one, is compared bit by bit: all else has a tolerance. After a hang, or if `shard` is wrong,
the other parts are skipped: they would say the same again.
"""

import math
from pathlib import Path

import torch
import torch.nn.functional as F

from lessons.answers import Answer, PerRank, Wrong, close, describe_value, need

EVEN = [(8, 4), (2, 8)]  # the shapes of W1 and W2
TWO_RANKS = Path(__file__).parent.parent / "two_ranks.py"  # has fully_sharded
LR, STEPS = 0.1, 4
ROWS = 6  # of each rank
SECONDS = 2  # of the processor, for one call: a hang then ends after 30 + 5 * 2 s of the clock
HANG = (
    "a rank waits in a collective that another rank does not call. Is one inside `if rank == 0`, "
    "or are they in another order?"
)


def random(*shape, seed: int = 0) -> torch.Tensor:
    """Normal random numbers, the same for the same seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def problem(shapes, n_rows: int) -> tuple[list, torch.Tensor, torch.Tensor]:
    """Weights of these shapes, and rows with targets."""
    weights = [random(*shape, seed=i) / shape[1] ** 0.5 for i, shape in enumerate(shapes)]
    x = random(n_rows, shapes[0][1], seed=2)
    target = random(n_rows, shapes[1][0], seed=3)
    return weights, x, target


def trained(weights, x, target, n_steps: int, gradient=1.0) -> tuple[list, list]:
    """(losses, weights at the end) of SGD on one rank. gradient: a factor, for typical mistakes."""
    weights = [weight.clone().requires_grad_() for weight in weights]
    losses = []
    for _ in range(n_steps):
        loss = F.mse_loss(F.gelu(x @ weights[0].T) @ weights[1].T, target)
        losses.append(loss.detach())
        gradients = torch.autograd.grad(loss, weights)
        with torch.no_grad():
            for weight, grad in zip(weights, gradients, strict=True):
                weight -= LR * gradient * grad
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
        return answer.call_on_ranks(size, function, *args, seconds=SECONDS)
    except Wrong as error:
        if "did not return" not in str(error):
            raise
        answer.not_run = f"`{function}` hangs, see above"
        raise Wrong(f"{error}: {HANG}") from error


def need_size(what: str, piece, numel: int, size: int) -> None:
    """A rank keeps 1/size of a weight of `numel` numbers, in memory of its own."""
    length = math.ceil(numel / size)
    is_flat = isinstance(piece, torch.Tensor) and piece.shape == (length,)
    is_flat = is_flat and piece.dtype == torch.float32
    case = f"{numel} numbers on {size} ranks"
    need(is_flat, f"{what}: expected float32 ({length},) for {case}, got {describe_value(piece)}")
    held = piece.untyped_storage().nbytes() // 4
    alive = f"all {held} numbers of the {'padded ' if held > numel else ''}weight stay alive"
    view = f"{what}: the piece is a view: {alive}, though the piece has {length}"
    need(held <= max(length, 1), f"{view}. `clone()` copies it")


def sharded(answer, weights, size: int) -> list[list]:
    """[the pieces of every weight, on rank 0, on rank 1, ...], each as `shard` promises it."""
    by_weight = []
    for weight in weights:
        pieces = on_ranks(answer, size, "shard", weight)
        padded = ", padded" if weight.numel() % size else ""
        case = f"a weight {tuple(weight.shape)} on {size} ranks{padded}"
        try:
            for rank, (piece, wanted) in enumerate(
                zip(pieces, pieces_of(weight, size), strict=True)
            ):
                need_size(f"shard on rank {rank}", piece, weight.numel(), size)
                close(f"shard on rank {rank}", piece, wanted, 0, case)
        except Wrong:
            answer.not_run = "`shard` is wrong"
            raise
        by_weight.append(pieces)
    return [list(pieces) for pieces in zip(*by_weight, strict=True)]


def run(answer, weights, xs, targets, n_steps: int = STEPS) -> tuple[list, list]:
    """(losses of rank 0, [the pieces of each rank]) after some steps of the answer.

    xs, targets: the rows of each rank.
    """
    size = len(xs)
    shapes = [tuple(weight.shape) for weight in weights]
    pieces = sharded(answer, weights, size)
    rows = PerRank(xs), PerRank(targets)
    losses = []
    for _ in range(n_steps):
        given = PerRank(pieces), shapes, *rows, LR
        results = on_ranks(answer, size, "step", *given)
        for rank, result in enumerate(results):
            is_pair = isinstance(result, tuple | list) and len(result) == 2
            is_pair = is_pair and isinstance(result[1], tuple | list) and len(result[1]) == 2
            expectation = f"step on rank {rank}: expected (loss, [piece of W1, piece of W2])"
            need(is_pair, f"{expectation}, got {describe_value(result)}")
            for name, piece, weight in zip(("W1", "W2"), result[1], weights, strict=True):
                what = f"the new piece of {name} on rank {rank}"
                need_size(what, piece, weight.numel(), size)
        losses.append(results[0][0])
        for rank, (loss, _) in enumerate(results):
            other = results[0][0]
            close(f"the loss on rank {rank}", loss, torch.zeros(()), math.inf, "any rows")
            if not torch.equal(loss, other):
                apart = f"expected the same on all ranks, but it is {other:.6g} on rank 0"
                raise Wrong(f"the loss: {apart} and {loss:.6g} on rank {rank}: all-reduce it")
        pieces = [list(new) for _, new in results]
    return losses, pieces


def compare(answer, shapes, size: int, same_rows: bool) -> tuple[list, list]:
    """Steps on `size` ranks against one rank with all rows. Returns its losses and pieces."""
    weights, x, target = problem(shapes, ROWS if same_rows else ROWS * size)
    xs, targets = [x] * size, [target] * size
    if not same_rows:
        xs, targets = list(x.chunk(size)), list(target.chunk(size))
    losses, pieces = run(answer, weights, xs, targets)
    wanted_losses, _ = trained(weights, x, target, STEPS)
    kind = "the same" if same_rows else "different"
    ranks = f"{size} ranks with {kind} rows" if size > 1 else "1 rank"
    case = f"{ranks}, W1 {shapes[0]}, W2 {shapes[1]}"
    close("the loss before the first step", losses[0], wanted_losses[0], 1e-6, case)

    # Not the last weights, but the first ones: a mistake is easiest to see after one step.
    _, first = run(answer, weights, xs, targets, n_steps=1)
    for i, name in enumerate(("W1", "W2")):
        new = joined([piece[i] for piece in first], shapes[i])
        need_update(name, new, i, weights, (x, target), xs, targets, case)
    for number, (loss, wanted) in enumerate(zip(losses, wanted_losses, strict=True)):
        close(f"the loss before step {number + 1}", loss, wanted, 1e-6, case)
    _, at_end = trained(weights, x, target, STEPS)
    for i, name in enumerate(("W1", "W2")):
        whole = joined([piece[i] for piece in pieces], shapes[i])
        close(f"{name} after {STEPS} steps", whole, at_end[i], 1e-6, case)
    return losses, pieces


def need_update(name, new, i, weights, rows, xs, targets, case) -> None:
    """A weight after one step. If it is wrong, name the typical mistake that gives it."""
    size = len(xs)

    def is_from(factor):
        _, wrong = trained(weights, *rows, 1, factor)
        return torch.allclose(new, wrong[i], atol=1e-6, rtol=0)

    _, right = trained(weights, *rows, 1)
    what = f"{name} after one step"
    if size > 1 and is_from(size) and not is_from(1):
        raise Wrong(f"{what}: the step is {size} times too long, for {case}: reduce-scatter adds "
                    "the gradients of the ranks, and the loss is a mean")  # fmt: skip
    if size > 1 and is_from(1 / size) and not is_from(1):
        raise Wrong(f"{what}: the step is {size} times too short, for {case}")
    own = [trained(weights, *mine, 1)[1][i] for mine in zip(xs, targets, strict=True)]
    by_itself = joined([pieces_of(w, size)[rank] for rank, w in enumerate(own)], new.shape)
    if torch.allclose(new, by_itself, atol=1e-6, rtol=0) and not is_from(1):
        raise Wrong(f"{what}: each rank has used the gradient of its own rows alone, for {case}: "
                    "reduce-scatter it")  # fmt: skip
    close(what, new, right[i], 1e-6, case)


# --------------------------------------------------------------------------------------------------
# The parts


def need_gather(answer, weight) -> None:
    """`gather` must return this weight on both of two ranks."""
    shape = tuple(weight.shape)
    pieces = PerRank(pieces_of(weight, 2))
    wholes = on_ranks(answer, 2, "gather", pieces, shape)
    for rank, whole in enumerate(wholes):
        close(f"gather on rank {rank}", whole, weight, 0, f"a weight {shape}")


def check_shard(answer):
    """shard: each of two ranks keeps its half of a weight, in memory of its own"""
    for shape in ((2, 1), (2, 2), (4, 3), (3, 4)):
        weight = 1 + torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
        sharded(answer, [weight], 2)


def check_gather(answer):
    """gather: every rank gets the whole weight back"""
    for shape in ((2, 1), (2, 2), (4, 3), (3, 4)):
        weight = 1 + torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
        need_gather(answer, weight)


def check_same_rows(answer):
    """step: two ranks with the same rows compute bit by bit what one rank computes"""
    losses, ((W1, W2),) = compare(answer, EVEN, 1, same_rows=True)
    losses_of_two, pieces = compare(answer, EVEN, 2, same_rows=True)
    for number, (one, two) in enumerate(zip(losses, losses_of_two, strict=True), 1):
        close(f"the loss before step {number}", two, one, 0, "2 ranks with the same rows as 1")
    for name, one, parts in zip(("W1", "W2"), (W1, W2), zip(*pieces, strict=True), strict=True):
        what = f"{name} after {STEPS} steps, bit by bit"
        close(what, torch.cat(parts), one, 0, "2 ranks with the same rows as 1")


def check_different_rows(answer):
    """step: two ranks with different rows compute what one rank computes from all rows"""
    compare(answer, EVEN, 2, same_rows=False)


def check_fully_shard(answer):
    """step: the same as PyTorch's fully_shard on two ranks"""
    losses, pieces = compare(answer, EVEN, 2, same_rows=False)  # first: fully_shard loads slowly
    weights, x, target = problem(EVEN, 2 * ROWS)
    xs, targets = list(x.chunk(2)), list(target.chunk(2))
    with Answer(TWO_RANKS) as pytorch:
        rows = PerRank(xs), PerRank(targets)
        (their_losses, theirs), _ = pytorch.call_on_ranks(
            2, "fully_sharded", weights, *rows, LR, STEPS
        )
    case = "2 ranks with different rows, compared with fully_shard"
    for number, (loss, wanted) in enumerate(zip(losses, their_losses, strict=True), 1):
        close(f"the loss before step {number}", loss, wanted, 1e-6, case)
    for i, name in enumerate(("W1", "W2")):
        whole = joined([piece[i] for piece in pieces], EVEN[i])
        close(f"{name} after {STEPS} steps", whole, theirs[i], 1e-6, case)


def check_odd_sizes(answer):
    """odd sizes: weights that cannot be cut evenly, on two ranks"""
    for shape in ((3, 1), (5, 3), (1, 1)):
        weight = 1 + torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
        sharded(answer, [weight], 2)
        need_gather(answer, weight)
    compare(answer, [(5, 3), (1, 5)], 2, same_rows=False)


def check_three_ranks(answer):
    """odd sizes: three ranks, and a weight with fewer numbers than ranks"""
    compare(answer, [(1, 7), (1, 1)], 3, same_rows=False)
