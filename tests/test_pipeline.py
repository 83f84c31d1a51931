"""pipeline.py: the schedule, what stages send and keep, the tied embedding, dropout.

That training is the same is in test_layouts.py, checkpoints in test_resharding.py.
"""

import hashlib
import weakref
from collections import Counter
from dataclasses import dataclass, field, replace
from unittest import mock

import pytest
import torch.distributed as dist
import torch.nn.functional as F
from conftest import slowly
from layouts import MODEL, RUN, build, check, take_steps

import pipeline
from pipeline import Pipe, blocks_of, most_kept, order_passes

MICROBATCHES = range(1, 13)
every_number_of_stages = pytest.mark.parametrize("stages", range(1, 9))


# --- The order


@dataclass(frozen=True)
class Recorder(Pipe):
    """A stage without others, in which a microbatch's number stands for its tensors.

    It writes down its passes, ("F", i) and ("B", i), and its transfers.
    """

    passes: list = field(default_factory=list)
    transfers: list = field(default_factory=list)

    def transfer(self, neighbour, send=None, receive=None):
        self.transfers.append((neighbour, send, receive))
        return receive

    def forward(self, i, x):
        assert x == (None if self.is_first else i)
        self.passes.append(("F", i))
        return i

    def backward(self, i, dy):
        assert dy == (None if self.is_last else i)
        self.passes.append(("B", i))
        return i


def recorded(stages, n):
    """What each of the stages does."""
    found = []
    for stage in range(stages):
        pipe = Recorder(None, stage, stages)
        pipeline.one_f_one_b(pipe, n, lambda i: i, pipe.forward, pipe.backward)
        found.append(pipe)
    return found


@every_number_of_stages
def test_each_stage_computes_in_the_stated_order(stages):
    for n in MICROBATCHES:
        for stage, pipe in enumerate(recorded(stages, n)):
            assert pipe.passes == order_passes(stage, stages, n)
            assert sorted(pipe.passes) == sorted((kind, i) for kind in "FB" for i in range(n))


@every_number_of_stages
def test_every_transfer_meets_that_of_the_neighbour(stages):
    for n in MICROBATCHES:
        follow_transfers(stages, n)


def follow_transfers(stages, n):
    """A transfer waits for the neighbour's, which must be of the same microbatches."""
    left = [pipe.transfers for pipe in recorded(stages, n)]
    while any(left):
        before = sum(map(len, left))
        for stage in range(stages - 1):
            mine, theirs = left[stage], left[stage + 1]
            if mine and theirs and mine[0][0] == stage + 1 and theirs[0][0] == stage:
                _, sent, received = mine.pop(0)
                assert theirs.pop(0) == (stage, received, sent)
        assert sum(map(len, left)) < before, f"a deadlock: {left}"


@every_number_of_stages
def test_a_stage_keeps_the_activations_of_few_microbatches(stages):
    for n in MICROBATCHES:
        kept = [most_kept(stage, stages, n) for stage in range(stages)]
        assert kept == [min(n, stages - stage) for stage in range(stages)]


# --- What the stages send and keep


def step_of(cfg):
    """A function that takes one step of a model on this rank's stage."""
    world, model, optimizer = build((MODEL, cfg))
    return lambda: take_steps(model, optimizer, [0], world, (MODEL, cfg))


def operations_of_a_step(_, cfg):
    """Counter of (isend or irecv, number of numbers)."""
    counts, real = Counter(), dist.batch_isend_irecv

    def counted(operations):
        counts.update((o.op.__name__, o.tensor.numel()) for o in operations)
        return real(operations)

    with mock.patch.object(dist, "batch_isend_irecv", counted):
        step_of(cfg)()
    return counts


@pytest.mark.parametrize("microbatch_size", [1, 4])  # 8 microbatches, and fewer than stages
def test_neighbours_send_two_messages_for_each_microbatch(ranks, microbatch_size):
    """One there and one back; and the ends one each way, of the tied embedding's gradient."""
    cfg = replace(RUN, pp=4, microbatch_size=microbatch_size)
    n = cfg.global_batch_size // microbatch_size
    hidden = microbatch_size * MODEL.max_seq_len * MODEL.d_model
    tied = MODEL.vocab_size * MODEL.d_model
    for stage, counts in enumerate(ranks(4)(operations_of_a_step, cfg)):
        is_end = stage in (0, 3)
        messages = n * (1 if is_end else 2)
        wanted = {(kind, hidden): messages for kind in ("isend", "irecv")}
        if is_end:
            wanted |= {("isend", tied): 1, ("irecv", tied): 1}
        assert counts == wanted


# --- The bubble


@every_number_of_stages
def test_the_formula_is_what_the_picture_shows(stages):
    """A column is a unit of time, a dot is idle."""
    for n in MICROBATCHES:
        lines = pipeline.draw_schedule(stages, n)
        share = "".join(lines).count(".") / sum(map(len, lines))
        assert share == pytest.approx(pipeline.bubble_share(stages, n))


# --- The stages of a model


@pytest.mark.parametrize("stages", range(1, 7))
def test_the_blocks_of_all_stages_are_the_model(stages):
    for n_layers in range(stages, 41):
        parts = [blocks_of(n_layers, stage, stages) for stage in range(stages)]
        assert [block for part in parts for block in part] == [*range(n_layers)]
        sizes = [len(part) for part in parts]
        assert max(sizes) - min(sizes) <= 1
        assert max(sizes[0], sizes[-1]) <= min(sizes[1:-1], default=n_layers)


# --- What a stage keeps


def hidden_states_in_a_step(_, cfg):
    """(most received tensors at a time, most outputs of this stage, what is left after the step)"""
    world, model, optimizer = build((MODEL, cfg))
    received, made, most = [], [], [0, 0]

    def alive(references):
        return sum(reference() is not None for reference in references)

    def transfer(pipe, neighbour, send=None, receive=None, real=pipeline.Pipe.transfer):
        if receive is not None:
            received.append(weakref.ref(receive))
        most[:] = map(max, most, (alive(received), alive(made)))
        return real(pipe, neighbour, send, receive)

    model.register_forward_hook(lambda module, inputs, y: made.append(weakref.ref(y)))
    with mock.patch.object(pipeline.Pipe, "transfer", transfer):
        take_steps(model, optimizer, [0], world, (MODEL, cfg))
    gradients = sum(p.grad is not None for p in model.parameters())
    return *most, alive(received) + alive(made) + gradients


@pytest.mark.parametrize("stages", [2, slowly(4)])
def test_hidden_states_stay_only_while_a_backward_needs_them(ranks, stages):
    """Stage s of p keeps those of p - s microbatches, of 8. Nothing is left after the step."""
    cfg = replace(RUN, pp=stages, microbatch_size=1)
    for stage, found in enumerate(ranks(stages)(hidden_states_in_a_step, cfg)):
        most_received, most_made, left = found
        assert most_received <= stages - stage + 1  # one is on its way
        assert most_made == 0  # what is sent is a copy of the reference
        assert left == 0


# --- Dropout


def masks_of_two_steps(_, cfg):
    """A hash of every mask that dropout draws on this rank, in order."""
    model_cfg = replace(MODEL, resid_pdrop=0.5, emb_pdrop=0.5)
    world, model, optimizer = build((model_cfg, cfg))
    masks = []

    def dropout(x, p, training, real=F.dropout):
        y = real(x, p, training)
        masks.append(hashlib.sha256((y == 0).numpy().tobytes()).hexdigest())
        return y

    with mock.patch.object(F, "dropout", dropout):
        take_steps(model, optimizer, range(2), world, (model_cfg, cfg))
    return masks


def check_masks(of_ranks):
    """Two steps of four microbatches on two stages; each rank draws a mask only once."""
    layers = [len(blocks) for blocks in map(pipeline.blocks_of, (5, 5), (0, 1), (2, 2))]
    wanted = [2 * 4 * (2 * layers[0] + 1), 2 * 4 * 2 * layers[1]]  # the embedding's on the first
    assert [len(masks) for masks in of_ranks] == wanted
    together = set().union(*of_ranks)
    assert len(together) == sum(wanted)


def test_each_stage_microbatch_and_step_draws_other_masks(ranks):
    check_masks(ranks(2)(masks_of_two_steps, replace(RUN, pp=2)))


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_ranks_of_a_stage_draw_the_same_masks(ranks, sequence_parallel):
    """With sequence parallelism each has its own tokens, and draws others."""
    cfg = replace(RUN, pp=2, tp=2, sequence_parallel=sequence_parallel)
    found = ranks(4)(masks_of_two_steps, cfg)
    for masks in (found[::2], found[1::2]):
        check_masks(masks)
    for first, second in (found[:2], found[2:]):
        assert (first == second) != sequence_parallel
        assert set(first).isdisjoint(second) == sequence_parallel


def test_dropout_of_the_embedding_is_that_of_one_process(ranks):
    """The first stage draws as one process does; other stages have nothing to draw."""
    check(ranks, 2, [(replace(MODEL, emb_pdrop=0.3), replace(RUN, pp=2))])
