"""Any torch.optim.Optimizer: a bad step changes nothing; checkpoints keep and name all of it.

"ours" is what build_optimizer returns: tests/test_walks.py runs these tests in a project with Lion.
"""

import copy
import json
import math
from dataclasses import replace
from unittest import mock

import pytest
import torch
from conftest import slowly
from launches import same
from test_checkpoint import META
from test_parallel import RUN, build, full_weights, global_rows, rows_of

import checkpoint
import fsdp_train
import optim
from program import UserError

MADE = {
    "AdamW, not fused": lambda params: torch.optim.AdamW(params, 1e-3, fused=False),
    "AMSGrad": lambda params: torch.optim.Adam(params, 1e-3, fused=True, amsgrad=True),
    "SGD": lambda params: torch.optim.SGD(params, 1e-3),
    "SGD with momentum": lambda params: torch.optim.SGD(params, 1e-3, momentum=0.9),
    "fused SGD with momentum": lambda params: torch.optim.SGD(
        params, 1e-3, momentum=0.9, fused=True
    ),
    "Adagrad": lambda params: torch.optim.Adagrad(params, 1e-3),
}


def made(world, name, cfg=RUN):
    """A model and the optimizer of that name."""
    model, ours = build(world, cfg)
    return model, ours if name == "ours" else MADE[name](model.parameters())


def bad_loss(loss):
    """An infinite loss, with the gradient of `loss`."""
    return loss + math.inf


def bad_gradient(loss):
    """The value of `loss`, with an infinite gradient: the derivative of a square root at 0."""
    return loss + (0 * loss).sqrt()


def step(world, model, optimizer, number, spoil=None):
    """One training step; returns its loss and gradient norm.

    spoil: a function that makes the loss bad, on the last global rank.
    """
    forward = model.forward
    is_last_rank = world.global_rank == world.global_size - 1

    def spoiled_forward(*args, **kwargs):
        return spoil(forward(*args, **kwargs))

    rows = rows_of(world, global_rows(number))
    used_forward = spoiled_forward if spoil and is_last_rank else forward
    with mock.patch.object(model, "forward", used_forward):
        loss, norm, _ = fsdp_train.train_step(model, optimizer, rows, number, RUN, world, "fp32")
    return loss.item(), norm.item()


def all_of(model, optimizer):
    """{name: tensor} of all that a step may change: this rank's shards of weights and state."""
    tensors = dict(model.named_parameters())
    for number, state in optimizer.state_dict()["state"].items():
        for name, value in state.items():
            tensors[f"{number} {name}"] = value
    return {name: local(value).clone() for name, value in tensors.items()}


def local(value):
    """A number or a tensor, sharded or not, as a local tensor."""
    value = value.detach() if isinstance(value, torch.Tensor) else torch.tensor(value)
    return value.to_local() if hasattr(value, "to_local") else value


def train_with_bad_steps(world, name):
    """Train a model with bad steps before steps 1 and 3, and one without. True for each check."""
    bad_model, bad = made(world, name)
    good_model, good = made(world, name)
    checks = []
    for number in range(1, 5):
        if number in (1, 3):
            before = copy.deepcopy(all_of(bad_model, bad))
            loss, norm = step(world, bad_model, bad, number, bad_loss)
            checks += [loss == math.inf, math.isfinite(norm)]
            loss, norm = step(world, bad_model, bad, number, bad_gradient)
            checks += [math.isfinite(loss), not math.isfinite(norm)]
            # Adam makes its state, of zeros, in the first step, even a bad one: skip the new names.
            after = all_of(bad_model, bad)
            checks += [same(before, {name: after[name] for name in before})]
        assert step(world, bad_model, bad, number) == step(world, good_model, good, number)
        checks += [same(all_of(bad_model, bad), all_of(good_model, good))]
    return checks


ON_ONE_RANK = [(1, name) for name in ("ours", *MADE)]
ON_TWO_RANKS = [(2, "ours"), (2, "SGD with momentum")]  # of which one has the bad step


@pytest.mark.parametrize("size, name", ON_ONE_RANK + ON_TWO_RANKS)
def test_a_bad_step_changes_nothing(ranks, size, name):
    """Weights, moments and counters are those of a run without it.

    A step is bad if its loss or its gradient norm is not finite.
    """
    assert ranks(size)(train_with_bad_steps, name) == [[True] * 14] * size


def test_which_optimizers_skip_a_bad_step_on_the_device():
    param = [torch.nn.Parameter(torch.zeros(3))]
    on_device = {name for name, make in MADE.items() if optim.skips_on_device(make(param))}
    assert on_device == {"AMSGrad"}
    assert optim.skips_on_device(optim.build_optimizer([("weight", *param)], RUN))


# --- Checkpoints


def save_and_continue(world, name, folder):
    """Three steps, saved, and two more: the losses and norms of the two, and the weights."""
    model, optimizer = made(world, name)
    saver = checkpoint.Checkpointer(str(folder), world.device, 1)
    for number in range(3):
        step(world, model, optimizer, number)
    setting_of_a_fork = {"optimizer": "the value of a setting with this name"}
    saver.save(3, model, optimizer, META | setting_of_a_fork)
    saver.finish()
    return [step(world, model, optimizer, number) for number in (3, 4)], full_weights(model)


def load_and_continue(world, name, folder):
    """The two steps after loading, by a model with other initial weights."""
    model, optimizer = made(world, name, replace(RUN, seed=5))
    checkpoint.load(checkpoint.latest(folder), model, optimizer)
    return [step(world, model, optimizer, number) for number in (3, 4)], full_weights(model)


@pytest.mark.parametrize("name", ["ours", "SGD", slowly("AMSGrad"), slowly("Adagrad")])
def test_a_checkpoint_gives_all_of_it_back(ranks, tmp_path, name):
    straight, weights = ranks(2)(save_and_continue, name, tmp_path)[0]
    resumed, resumed_weights = ranks(2)(load_and_continue, name, tmp_path)[0]
    assert resumed == straight
    assert same(weights, resumed_weights)


def load_as(world, name, folder):
    """The error of loading the latest checkpoint into this optimizer, or ""."""
    try:
        checkpoint.load(checkpoint.latest(folder), *made(world, name))
        return ""
    except UserError as error:
        return str(error)


def test_another_optimizer_than_the_checkpoints_is_named(ranks, tmp_path):
    """The same class with other state is another optimizer, too."""
    ranks(2)(save_and_continue, "SGD with momentum", tmp_path)
    path = checkpoint.latest(tmp_path)
    for name, description in [("ours", optim.ADAMW), ("SGD", "SGD ()")]:
        (error,) = set(ranks(2)(load_as, name, tmp_path))
        assert f"optimizer SGD (momentum_buffer), here it is {description}: " in error
        assert f"--init_from={path} " in error


def test_a_checkpoint_that_names_no_optimizer_is_of_adamw(ranks, tmp_path):
    ranks(1)(save_and_continue, "ours", tmp_path)
    path = checkpoint.latest(tmp_path) / "meta.json"
    meta = json.loads(path.read_text())
    assert meta.pop("optimizer") == optim.ADAMW
    path.write_text(json.dumps(meta))
    assert ranks(1)(load_as, "ours", tmp_path) == [""]
    (error,) = ranks(1)(load_as, "SGD", tmp_path)
    assert "was saved with the optimizer AdamW (exp_avg," in error
