"""bench/before_after.py: what it undoes is what the training step really calls."""

from unittest import mock

import pytest
import torch.nn.functional as F

import attention
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
        mock.patch.object(F, "softmax", F.softmax),
        mock.patch.object(parallel, "weights_cast_once", parallel.weights_cast_once),
        mock.patch.object(model, "attention", model.attention),
    ):
        before_after.Variant(row(undone), *cfgs).turn(1)
        return called.call_count


def row(beginning):
    """The row whose name begins so."""
    (found,) = [undone for undone in before_after.UNDO if undone.startswith(beginning)]
    return found


def test_another_autocast_is_the_one_that_the_step_uses(ranks):
    assert ranks(1)(calls_of, "autocast without a cache", "autocast_with_cache") == [1]


def test_attention_without_the_projection_is_the_one_that_the_model_calls(ranks):
    assert ranks(1)(calls_of, "one gradient for Wqkv (GPUs, ALiBi)", "attention_of_three") == [1]


def test_another_mesh_is_the_one_that_the_model_is_sharded_over(ranks):
    assert ranks(1)(calls_of, "one rank is not sharded", "mesh_of_one") == [1]


def test_autograds_blocks_are_those_that_the_step_uses(ranks):
    assert ranks(1)(calls_of, "the blocks' own backward", "blocks_by_autograd") == [1]


def test_the_second_exponential_is_taken_once_a_chunk_of_the_loss(ranks):
    assert ranks(1)(calls_of, "one exponential a logit", "softmax_of_log_softmax") == [1]


def test_another_cast_of_the_weights_is_the_one_that_the_step_uses(ranks):
    assert ranks(1)(calls_of, "weights cast once a step", "cast_in_each_microbatch") == [1]
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
