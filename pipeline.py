"""Pipeline parallelism: a rank has a stage of the model, and microbatches pass through the stages.

A model that is cut into three stages is f_2(f_1(f_0(ids))). Each stage f_s is some consecutive
blocks, with weights w, and does this with every microbatch:

    forward    y = f_s(x)               x: hidden states (B, T, d_model), from stage s - 1
    backward   dx = dy (df_s / dx)      dy: the gradient of the loss for y, from stage s + 1
               dw += dy (df_s / dw)     stays here

Here dx, dy and dw are gradients of the loss. So only y and dx travel, between neighbours. Different
stages work on different microbatches at the same time. But a stage has nothing to do before the
first microbatch reaches it, and after the last one has left: the bubble. If each of p stages takes
the time t for the forward and backward of a microbatch, a step of n microbatches takes
(n + p - 1) t, and a stage computes for n t of it:

    bubble = 1 - n / (n + p - 1) = (p - 1) / (n + p - 1)

One forward, one backward (1F1B, or PipeDream-Flush, arXiv 2006.09503) is the order in which a stage
computes. Warm-up: a forward for each later stage. Steady: a forward and a backward in turns. Drain:
the backwards that are left. If all forwards came first (GPipe), the bubble would be the same, but a
stage would keep the activations of n microbatches. Here stage s keeps those of p - s, however many
a step has. For p = 4 and n = 8 (a forward is a digit; a backward takes twice as long and is two
letters, a for microbatch 0; a dot is idle):

    stage 0  0123......aa4bb5cc6dd7ee.ff.gg.hh
    stage 1  .012....aa3bb4cc5dd6ee7ff.gg.hh..
    stage 2  ..01..aa2bb3cc4dd5ee6ff7gg.hh....
    stage 3  ...0aa1bb2cc3dd4ee5ff6gg7hh......

The first stage has the embeddings, the last one the final norm and the loss. A tied embedding is on
both; its two gradients are added up (`sum_tied_gradients`). Parameters keep the names that they
have in the whole model, so checkpoints do not depend on the stages.

Not here: several stages on a rank (interleaved 1F1B), for a smaller bubble and more messages;
compiled blocks; a transfer while the same stage computes. Not yet run on GPUs.

    python pipeline.py --stages=4 --microbatches=8    the picture, the bubble, what a stage keeps
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.tensor import DTensor

import config
import processes
import program
from attention import autocast_dtype
from config import Int, blocks_of
from loss import at_least_fp32
from model import MPT, Transformer
from tensor_parallel import SplitMPT

# --------------------------------------------------------------------------------------------------
# The schedule


def order_passes(stage: int, stages: int, n: int) -> list[tuple[str, int]]:
    """[("F" or "B", microbatch), ...]: the forwards and backwards of a stage, one after another.

    n: microbatches in a step.
    """
    n_warmup = min(n, stages - 1 - stage)
    warmup = [("F", i) for i in range(n_warmup)]
    steady = []
    for i in range(n - n_warmup):
        steady += [("F", n_warmup + i), ("B", i)]
    drain = [("B", i) for i in range(n - n_warmup, n)]
    return warmup + steady + drain


def pass_before(stage: int, kind: str, i: int) -> tuple[int, str, int]:
    """What must be done before: the same pass of microbatch i, on the stage that it comes from."""
    return (stage - 1, kind, i) if kind == "F" else (stage + 1, kind, i)


def draw_schedule(stages: int, n: int) -> list[str]:
    """A line for each stage, as at the top of this file. After ten microbatches it begins again."""
    lines = [""] * stages
    end = {}  # (stage, F or B, microbatch) -> the column where it ends
    for i in range(n):
        end[-1, "F", i] = end[stages, "B", i] = 0  # the ends of the pipeline wait for nobody
    left = [order_passes(stage, stages, n) for stage in range(stages)]
    while any(left):
        for stage, passes in enumerate(left):
            while passes and pass_before(stage, *passes[0]) in end:
                kind, i = passes.pop(0)
                begin = end[pass_before(stage, kind, i)]
                columns = str(i % 10) if kind == "F" else "abcdefghij"[i % 10] * 2
                lines[stage] = lines[stage].ljust(begin, ".") + columns
                end[stage, kind, i] = len(lines[stage])
    return [line.ljust(max(end.values()), ".") for line in lines]


def bubble_share(stages: int, n: int) -> float:
    """The share of a step in which a stage waits, if all take equally long for a microbatch."""
    return (stages - 1) / (n + stages - 1)


def most_kept(stage: int, stages: int, n: int) -> int:
    """Of how many microbatches a stage keeps the activations at once, at most."""
    changes = [1 if kind == "F" else -1 for kind, _ in order_passes(stage, stages, n)]
    return max(itertools.accumulate(changes))


def one_f_one_b(pipe, n: int, empty: Callable, forward: Callable, backward: Callable) -> None:
    """Compute n microbatches on this stage, in the order of `order_passes`. All stages call it.

    empty(i): a tensor to receive x or dy of microbatch i into.
    forward(i, x): returns y. On the first stage x is None; on the last one y is None.
    backward(i, dy): returns dx. On the last stage dy is None; on the first one dx is None.

    When two neighbours have something for each other, such as y and the dy of an earlier
    microbatch, each sends and receives in one call. In two calls both might wait to send.
    """
    n_warmup = min(n, pipe.size - 1 - pipe.rank)

    # warm-up: a forward for each later stage
    for i in range(n_warmup):
        y = forward(i, pipe.receive_from_previous(empty(i)))
        pipe.send_to_next(y)

    # steady: one forward, one backward
    x = pipe.receive_from_previous(empty(n_warmup)) if n_warmup < n else None
    for i in range(n - n_warmup):
        y = forward(n_warmup + i, x)
        dx = backward(i, pipe.exchange_with_next(y, empty(i)))
        if n_warmup + i + 1 < n:
            x = pipe.exchange_with_previous(dx, empty(n_warmup + i + 1))
        else:
            pipe.send_to_previous(dx)

    # drain: the backwards that are left
    for i in range(n - n_warmup, n):
        pipe.send_to_previous(backward(i, pipe.receive_from_next(empty(i))))


@dataclass(frozen=True)
class Pipe:
    """A pipeline, seen from one of its stages: stage `rank` of `size`.

    The first has no previous one, the last no next: there nothing is sent, and None is received.
    """

    group: dist.ProcessGroup
    rank: int
    size: int

    @property
    def is_first(self) -> bool:
        """Whether this stage has the embeddings."""
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        """Whether this stage has the loss."""
        return self.rank == self.size - 1

    def transfer(self, neighbour: int, send=None, receive=None):
        """Send a tensor to another stage, and receive one from it into `receive`: both at once.

        Either may be None. Returns `receive`.
        """
        peer = dist.get_global_rank(self.group, neighbour)
        operations = []
        if send is not None:
            operations.append(dist.P2POp(dist.isend, send.contiguous(), peer, self.group))
        if receive is not None:
            operations.append(dist.P2POp(dist.irecv, receive, peer, self.group))
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        return receive

    def receive_from_previous(self, x):
        """Hidden states, received into x."""
        return None if self.is_first else self.transfer(self.rank - 1, receive=x)

    def send_to_next(self, y) -> None:
        """Send hidden states."""
        if not self.is_last:
            self.transfer(self.rank + 1, send=y)

    def receive_from_next(self, dy):
        """A gradient, received into dy."""
        return None if self.is_last else self.transfer(self.rank + 1, receive=dy)

    def send_to_previous(self, dx) -> None:
        """Send a gradient."""
        if not self.is_first:
            self.transfer(self.rank - 1, send=dx)

    def exchange_with_next(self, y, dy):
        """Send hidden states y; returns the gradient for earlier ones, received into dy."""
        return None if self.is_last else self.transfer(self.rank + 1, send=y, receive=dy)

    def exchange_with_previous(self, dx, x):
        """Send a gradient dx; returns later hidden states, received into x."""
        return None if self.is_first else self.transfer(self.rank - 1, send=dx, receive=x)


# --------------------------------------------------------------------------------------------------
# The stage of a model


def pipe_of(world: processes.World) -> Pipe | None:
    """The pipeline that this rank is a stage of; None if there is one stage. A collective."""
    if world.pp_size == 1:
        return None
    # The first call of an NCCL group must involve all its ranks, but an exchange involves only two.
    dist.all_reduce(torch.zeros(1, device=world.device), group=world.pp_group)
    return Pipe(world.pp_group, world.pp_rank, world.pp_size)


def keep_stage(model: MPT, pipe: Pipe) -> None:
    """Remove from a model, on the meta device or any other, what only other stages have."""
    transformer, tied = model.transformer, model.cfg.tie_word_embeddings
    mine = blocks_of(model.cfg.n_layers, pipe.rank, pipe.size)
    for number in range(model.cfg.n_layers):
        if number not in mine:
            delattr(transformer.blocks, str(number))  # the rest keep their numbers
    if not pipe.is_first:
        if model.cfg.learned_positions:
            del transformer.wpe
        if not (tied and pipe.is_last):
            del transformer.wte
    if not pipe.is_last:
        transformer.norm_f = nn.Identity()
        if not tied:
            del model.lm_head
    model.pipe = pipe
    transformer.__class__ = StageTransformer
    model.__class__ = StageOfSplitMPT if isinstance(model, SplitMPT) else StageOfMPT


class StageTransformer(Transformer):
    """Some consecutive blocks. `received`: hidden states of the stage before, or None."""

    received = None

    def embed(self, input_ids, indices):
        """What the first of these blocks gets, (B, T, d_model)."""
        return super().embed(input_ids, indices) if self.received is None else self.received


class Stage:
    """What a stage does differently from a whole model. `keep_stage` turns a model into a stage."""

    def forward(self, input_ids, labels=None, cache=None, z_loss=0.0, head=None, x=None):
        """In training y from x, hidden states (B, T, d_model); on the last stage the loss from x.

        In evaluation a collective of the stages: each receives x and sends y in here, and returns
        what the whole model would, which the last one broadcasts. head: returns two tensors shaped
        like labels, as evaluation.label_scores does.
        """
        if not self.training:
            x = self.pipe.receive_from_previous(self.empty_hidden_states(input_ids))
        self.transformer.received = x
        if self.pipe.is_last:
            y = super().forward(input_ids, labels, cache, z_loss, head)
        else:
            y = self.transformer(input_ids, cache, self.documents(input_ids, cache))
        self.transformer.received = None
        if self.training:
            return y
        if not self.pipe.is_last:
            self.pipe.send_to_next(y)
            y = self.empty_result(input_ids, labels, head)
        for tensor in y if head else [y]:
            last = dist.get_global_rank(self.pipe.group, self.pipe.size - 1)
            dist.broadcast(tensor, last, self.pipe.group)
        return y

    def empty_hidden_states(self, ids):
        """A tensor to receive the hidden states of ids (B, T) into: (B, T, d_model).

        With sequence parallelism those of this rank's tokens, (B, T / n, d_model).
        """
        weight = next(self.parameters())
        team = getattr(self, "team", None)  # of tensor parallelism
        splits_tokens = team and team.sequence_parallel and self.training
        n_tokens = ids.shape[1] // (team.size if splits_tokens else 1)
        shape = (ids.shape[0], n_tokens, self.cfg.d_model)
        return torch.empty(shape, dtype=autocast_dtype(weight), device=ids.device)

    def empty_result(self, ids, labels, head):
        """What to receive the result of the last stage's `forward` into."""
        exact = at_least_fp32(next(self.parameters()))
        if head:
            log_probs = torch.empty(ids.shape, dtype=exact, device=ids.device)
            return log_probs, torch.empty(ids.shape, dtype=torch.bool, device=ids.device)
        if labels is not None:
            return torch.empty((), dtype=exact, device=ids.device)
        shape = (*ids.shape, self.cfg.vocab_size)
        weight = next(self.parameters())
        return torch.empty(shape, dtype=autocast_dtype(weight), device=ids.device)


class StageOfMPT(Stage, MPT):
    """Some consecutive layers."""


class StageOfSplitMPT(Stage, SplitMPT):
    """Some consecutive layers, cut over tensor ranks."""


def sum_tied_gradients(model: MPT) -> None:
    """Add up the two gradients of a tied embedding, of the first stage and of the last.

    Both get the sum, so both make the same update. A collective of the two.
    """
    pipe = model.pipe
    has_embedding = pipe.is_first or pipe.is_last
    if not (has_embedding and model.cfg.tie_word_embeddings):
        return
    grad = model.transformer.wte.weight.grad
    if grad is None:  # adapters leave the embedding as it is
        return
    grad = grad.to_local() if isinstance(grad, DTensor) else grad
    other_end = pipe.size - 1 if pipe.is_first else 0
    grad += pipe.transfer(other_end, send=grad, receive=torch.empty_like(grad))


# --------------------------------------------------------------------------------------------------
# A step of a stage


def forward_backward(model, microbatches, n_tokens, z_loss, world, passes):
    """Add the gradients of all microbatches to .grad. Returns the sum of the tokens' losses.

    One step of this stage. A collective of the stages; each gets the sum. passes: parallel.Passes.
    """
    loss_sum = torch.zeros((), device=world.device)
    kept = {}  # microbatch -> (x, where its backward begins), between its two passes

    def empty(i):
        with passes.autocast:
            return model.empty_hidden_states(microbatches[i][0])

    def forward(i, x):
        ids, labels = microbatches[i]
        if x is not None:
            x.requires_grad_()
        with passes.forward():
            y = model(ids, labels=labels, z_loss=z_loss, x=x)  # on the last stage the loss
        if model.pipe.is_last:
            loss_sum.add_(y.detach())
            y = y * world.dp_size / n_tokens  # see fsdp_train.forward_backward
        # This edge of the graph keeps the activations, but not y, which is freed once it is sent.
        kept[i] = x, get_gradient_edge(y)
        return None if model.pipe.is_last else y.detach()

    def backward(i, dy):
        x, edge = kept.pop(i)
        with passes.backward(is_last=i == len(microbatches) - 1):
            torch.autograd.backward(edge, dy)  # y.backward(dy)
        return None if x is None else x.grad

    one_f_one_b(model.pipe, len(microbatches), empty, forward, backward)
    dist.all_reduce(loss_sum, group=model.pipe.group)
    return loss_sum


# --------------------------------------------------------------------------------------------------
# The schedule, shown


@dataclass
class ScheduleArgs:
    """The schedule to show."""

    stages: Int[1, 16] = 4  # ranks in a row
    microbatches: Int[1, 64] = 8  # in a step


def demonstrate(argv) -> None:
    """Print the picture, the bubble, and what a stage keeps."""
    (args,) = config.load(argv, ScheduleArgs)
    stages, n = args.stages, args.microbatches
    for stage, line in enumerate(draw_schedule(stages, n)):
        print(f"stage {stage:<2} {line}")
    kept = [most_kept(stage, stages, n) for stage in range(stages)]
    print(f"kept, by stage: the activations of {', '.join(map(str, kept))} microbatches at most")
    formula = f"({stages} - 1) / ({n} + {stages} - 1)"
    print(f"bubble: {formula} = {bubble_share(stages, n):.3f} of a step")


if __name__ == "__main__":
    program.run(demonstrate)
