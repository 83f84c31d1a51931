"""Pipeline parallelism: each rank has some consecutive layers, and microbatches pass through them.

Stage s of p ranks gets hidden states (B, T, d_model) from the stage before, computes its layers,
and sends its own to the stage after. Gradients come back the same way. A stage waits until its
first microbatch arrives and after its last one has left: the bubble. With n microbatches,

    bubble = (p - 1) / (n + p - 1)    of the time of a step

One forward, one backward (1F1B, PipeDream-Flush, arXiv 2006.09503) starts each backward as soon as
it can. So stage s keeps the activations of at most p - s microbatches, however many a step has.
For p = 4, n = 8 (a forward is a digit, a backward, twice as long, two letters: a is microbatch 0):

    stage 0  0123......aa4bb5cc6dd7ee.ff.gg.hh
    stage 1  .012....aa3bb4cc5dd6ee7ff.gg.hh..
    stage 2  ..01..aa2bb3cc4dd5ee6ff7gg.hh....
    stage 3  ...0aa1bb2cc3dd4ee5ff6gg7hh......

The first stage has the embeddings, the last one the final norm and the loss. Tied embeddings are on
both, which add up their gradients (`sum_tied_gradients`). Parameters keep the names that they have
in the whole model, so checkpoints do not depend on the stages.

    python pipeline.py --stages=4 --microbatches=8    the picture; the bubble, computed and measured
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor

import processes
from config import MPTConfig, TrainConfig, blocks_of, require
from loss import at_least_fp32, autocast_dtype
from model import MPT

# --------------------------------------------------------------------------------------------------
# The schedule


def order(stage: int, stages: int, n: int) -> list[tuple[str, int]]:
    """[("F" or "B", microbatch), ...]: what a stage computes, one after another."""
    n_warmup = min(n, stages - 1 - stage)
    warmup = [("F", i) for i in range(n_warmup)]
    steady = []
    for i in range(n - n_warmup):
        steady += [("F", n_warmup + i), ("B", i)]
    drain = [("B", i) for i in range(n - n_warmup, n)]
    return warmup + steady + drain


def one_f_one_b(pipe, n: int, empty: Callable, forward: Callable, backward: Callable) -> None:
    """Compute n microbatches on this stage, in the order of `order`.

    empty(i): room for the hidden states of microbatch i, or for their gradient.
    forward(i, x): this stage's hidden states, from those of the stage before (on the first: None).
    backward(i, dy): the gradient for x, from that for this stage's (on the last: None).
    A stage sends to a neighbour and receives from it in one call, so no two wait for one another.
    """
    n_warmup = min(n, pipe.size - 1 - pipe.rank)

    # warm-up: forwards, until the first gradient can come back
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
    """The stages of one pipeline, as one of them sees them. What an end lacks is None."""

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
        """Send a tensor to the stage `neighbour` and fill another one from it. Returns that one."""
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
        """Hidden states, written into x."""
        return None if self.is_first else self.transfer(self.rank - 1, receive=x)

    def send_to_next(self, y) -> None:
        """Send hidden states."""
        if not self.is_last:
            self.transfer(self.rank + 1, send=y)

    def receive_from_next(self, dy):
        """A gradient, written into dy."""
        return None if self.is_last else self.transfer(self.rank + 1, receive=dy)

    def send_to_previous(self, dx) -> None:
        """Send a gradient."""
        if not self.is_first:
            self.transfer(self.rank - 1, send=dx)

    def exchange_with_next(self, y, dy):
        """Send hidden states y; returns the gradient of earlier ones, written into dy."""
        return None if self.is_last else self.transfer(self.rank + 1, send=y, receive=dy)

    def exchange_with_previous(self, dx, x):
        """Send a gradient dx; returns the next hidden states, written into x."""
        return None if self.is_first else self.transfer(self.rank - 1, send=dx, receive=x)


# --------------------------------------------------------------------------------------------------
# The stage of a model


def pipe_of(world: processes.World) -> Pipe | None:
    """The stages that this rank passes microbatches on with; None without pipeline parallelism."""
    if world.pp_size == 1:
        return None
    return Pipe(world.pp_group, world.pp_rank, world.pp_size)


def keep_stage(model: MPT, pipe: Pipe) -> None:
    """Take from a model, on the meta device or any other, what other stages have."""
    transformer, tied = model.transformer, model.cfg.tie_word_embeddings
    mine = blocks_of(model.cfg.n_layers, pipe.rank, pipe.size)
    for number in range(model.cfg.n_layers):
        if number not in mine:
            delattr(transformer.blocks, str(number))  # the others keep their numbers
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
    kind = type(model)
    model.__class__ = type(f"StageOf{kind.__name__}", (Stage, kind), {})


class Stage:
    """What a model does otherwise if it is one stage of a pipeline: see `keep_stage`."""

    def forward(self, input_ids, labels=None, cache=None, z_loss=0.0, score=False, x=None):
        """In training the hidden states of this stage, from those of the one before, x: (B, T, D).

        The last stage returns the loss. In evaluation the ranks pass the hidden states on in here,
        and all return what the whole model would.
        """
        if self.training:
            return super().forward(input_ids, labels, cache, z_loss, score, x)
        x = self.pipe.receive_from_previous(self.room(input_ids))
        y = super().forward(input_ids, labels, cache, z_loss, score, x)
        if not self.pipe.is_last:
            self.pipe.send_to_next(y)
            y = self.room_for_result(input_ids, labels, score)
        for tensor in y if score else [y]:
            last = dist.get_global_rank(self.pipe.group, self.pipe.size - 1)
            dist.broadcast(tensor, last, self.pipe.group)
        return y

    def output(self, x, labels, z_loss, score):
        """As in model.py on the last stage, the hidden states on the others."""
        return super().output(x, labels, z_loss, score) if self.pipe.is_last else x

    def room(self, ids):
        """An empty tensor for the hidden states of ids (B, T): of this rank's tokens of them."""
        weight = next(self.parameters())
        team = getattr(self, "team", None)  # of tensor parallelism
        splits_tokens = team and team.sequence_parallel and self.training
        n_tokens = ids.shape[1] // (team.size if splits_tokens else 1)
        shape = (ids.shape[0], n_tokens, self.cfg.d_model)
        return torch.empty(shape, dtype=autocast_dtype(weight), device=ids.device)

    def room_for_result(self, ids, labels, score):
        """Empty tensors like those that `forward` returns on the last stage."""
        exact = at_least_fp32(next(self.parameters()))
        if score:
            log_probs = torch.empty(ids.shape, dtype=exact, device=ids.device)
            return log_probs, torch.empty(ids.shape, dtype=torch.bool, device=ids.device)
        if labels is not None:
            return torch.empty((), dtype=exact, device=ids.device)
        shape = (*ids.shape, self.cfg.vocab_size)
        weight = next(self.parameters())
        return torch.empty(shape, dtype=autocast_dtype(weight), device=ids.device)


def sum_tied_gradients(model: MPT) -> None:
    """Add up the two gradients of an embedding that is on the first and the last stage."""
    if not isinstance(model, Stage) or not model.cfg.tie_word_embeddings:
        return
    pipe = model.pipe
    if not (pipe.is_first or pipe.is_last):
        return
    grad = model.transformer.wte.weight.grad
    grad = grad.to_local() if isinstance(grad, DTensor) else grad
    other_end = pipe.size - 1 if pipe.is_first else 0
    grad += pipe.transfer(other_end, send=grad, receive=torch.empty_like(grad))


def is_second_copy(model: MPT, name: str) -> bool:
    """Whether another stage has this parameter, too, and counts it: the tied embedding's."""
    is_stage = isinstance(model, Stage) and not model.pipe.is_first
    return is_stage and name == "transformer.wte.weight"


def check(model_cfg: MPTConfig, cfg: TrainConfig) -> None:
    """UserError if a model cannot be cut into cfg.pp stages."""
    model_cfg.check_stages(cfg.pp)
    problem = "pp does not work with compiled blocks: set --compile=False"
    require(cfg.pp == 1 or cfg.compile is not True, problem)
