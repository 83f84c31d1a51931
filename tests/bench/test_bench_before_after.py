"""bench/before_after.py: what it undoes is what the training step really calls."""

from unittest import mock

import pytest

import attention
import loss
import model
import parallel
from bench import before_after
from bench import train as bench_train
from config import MPTConfig, TrainConfig, UserError, load

SMALL = """
    --d_model=16 --n_heads=2 --n_layers=1 --vocab_size=64 --max_seq_len=16
    --global_batch_size=2 --microbatch_size=2 --device=cpu --precision=bf16 --peak_tflops=1
""".split()


def calls_of(world, undone, replacement):
    """How often a step calls the function of before_after.py that replaces what is undone."""
    cfgs = load([*bench_train.SHAPE, *SMALL], MPTConfig, TrainConfig)
    real = getattr(before_after, replacement)
    with (
        mock.patch.object(before_after, replacement, side_effect=real) as called,
        mock.patch.object(before_after, "require_gpu"),  # what replaces it runs anywhere
        # Variant replaces these; afterwards they are put back.
        mock.patch.object(parallel, "autocast", parallel.autocast),
        mock.patch.object(parallel, "make_mesh", parallel.make_mesh),
        mock.patch.dict(attention.IMPLEMENTATIONS),
        mock.patch.object(loss, "softmax_", loss.softmax_),
        mock.patch.object(parallel, "weights_cast_once", parallel.weights_cast_once),
        mock.patch.object(model, "attention", model.attention),
    ):
        before_after.Variant(row(undone), *cfgs).turn(1)
        return called.call_count


def row(beginning):
    """The row whose name begins so."""
    (found,) = [undone for undone in before_after.UNDO if undone.startswith(beginning)]
    return found


@pytest.mark.parametrize(
    "undone, replacement",
    [
        ("autocast without a cache", "autocast_with_cache"),
        ("one gradient for Wqkv (GPUs, ALiBi)", "attention_of_three"),
        ("one rank is not sharded", "mesh_of_one"),
        ("the blocks' own backward", "blocks_by_autograd"),
        ("one exponential a logit", "softmax_of_log_softmax"),
        ("weights cast once a step", "cast_in_each_microbatch"),
    ],
)
def test_a_step_takes_what_replaces_the_undone_part(ranks, undone, replacement):
    """Once: one layer, one chunk of the loss."""
    assert ranks(1)(calls_of, undone, replacement) == [1]


def test_flags_for_both_processes_belong_to_rows():
    assert set(before_after.BOTH) <= set(before_after.UNDO)


def test_a_row_that_does_not_exist_is_an_error():
    cfgs = load([*bench_train.SHAPE, *SMALL], MPTConfig, TrainConfig)
    with pytest.raises(KeyError, match="chunked los"):
        before_after.Variant("chunked los", *cfgs)


def undo(world, beginning):
    """The error of the row that begins so, where there is no GPU."""
    cfgs = load([*bench_train.SHAPE, *SMALL], MPTConfig, TrainConfig)
    with mock.patch("torch.cuda.is_available", lambda: False):
        try:
            before_after.Variant(row(beginning), *cfgs)
        except UserError as error:
            return str(error)


@pytest.mark.parametrize("beginning", ["loss kernel", "one gradient for Wqkv"])
def test_what_only_gpus_have_is_not_undone_without_one(ranks, beginning):
    assert ranks(1)(undo, beginning) == ["it runs on GPUs only, and there is none here"]
