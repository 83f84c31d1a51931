"""Any torch.optim.Optimizer: a bad step changes nothing, a checkpoint gives all of it back, another one is named."""

import copy
import json
import math
from dataclasses import replace
from unittest import mock

import pytest
import torch
from conftest import flags_for
from test_checkpoint import META
from test_parallel import RUN, build, full_weights, global_rows, rows_of
from test_stopping import SIZE, train_here

import checkpoint
import fsdp_train
import optim
from config import UserError


class Lion(torch.optim.Optimizer):
    """Chen et al., 2302.06675, as one would add it."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                p -= group["lr"] * torch.sign(mean.lerp(p.grad, 0.1))
                mean.lerp_(p.grad, 0.01)


MADE = {
    "AdamW": lambda params: optim.build_optimizer(params, RUN),
    "AdamW, not fused": lambda params: torch.optim.AdamW(params, 1e-3, fused=False),
    "AMSGrad": lambda params: torch.optim.Adam(params, 1e-3, fused=True, amsgrad=True),
    "SGD": lambda params: torch.optim.SGD(params, 1e-3),
    "SGD with momentum": lambda params: torch.optim.SGD(params, 1e-3, momentum=0.9),
    "fused SGD with momentum": lambda params: torch.optim.SGD(
        params, 1e-3, momentum=0.9, fused=True
    ),
    "Adagrad": lambda params: torch.optim.Adagrad(params, 1e-3),
    "Lion": lambda params: Lion(params, 1e-3),
}
every_optimizer = pytest.mark.parametrize("name", MADE)


def made(world, name, cfg=RUN):
    model, _ = build(world, cfg)
    return model, MADE[name](model.parameters())


def bad_loss(loss):
    """Its gradient is that of the loss."""
    return loss + math.inf


def bad_gradient(loss):
    """Its value is the loss; the derivative of a square root at 0 is infinite."""
    return loss + (0 * loss).sqrt()


def step(world, model, optimizer, number, spoil=None):
    """Step `number` of fsdp_train, its loss spoiled on the last rank: loss and gradient norm."""
    forward, mine = model.forward, world.global_rank == world.global_size - 1
    spoiled = (lambda *a, **k: spoil(forward(*a, **k))) if spoil and mine else forward
    rows = rows_of(world, global_rows(number))
    with mock.patch.object(model, "forward", spoiled):
        loss, norm, _ = fsdp_train.train_step(model, optimizer, rows, number, RUN, world, "fp32")
    return loss.item(), norm.item()


def all_of(model, optimizer):
    """Every number that a step may change, this rank's parts."""
    state = optimizer.state_dict()["state"]
    kept = {f"{number} {name}": value for number, of in state.items() for name, value in of.items()}
    tensors = {**dict(model.named_parameters()), **kept}
    return {name: local(value).clone() for name, value in tensors.items()}


def local(value):
    value = value.detach() if isinstance(value, torch.Tensor) else torch.tensor(value)
    return value.to_local() if hasattr(value, "to_local") else value


def same(a, b) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def train_with_bad_steps(world, name):
    """Four steps, with bad ones before the first and the third, and four without: equal after each?"""
    (bad_model, bad), (good_model, good) = made(world, name), made(world, name)
    answers = []
    for number in range(1, 5):
        if number in (1, 3):
            before = copy.deepcopy(all_of(bad_model, bad))
            loss, norm = step(world, bad_model, bad, number, bad_loss)
            answers += [loss == math.inf, math.isfinite(norm)]
            loss, norm = step(world, bad_model, bad, number, bad_gradient)
            answers += [math.isfinite(loss), not math.isfinite(norm)]
            after = all_of(
                bad_model, bad
            )  # Adam makes its state, of zeros, at the first step, a bad one too
            answers += [same(before, {name: after[name] for name in before})]
        assert step(world, bad_model, bad, number) == step(world, good_model, good, number)
        answers += [same(all_of(bad_model, bad), all_of(good_model, good))]
    return answers


@every_optimizer
def test_a_bad_step_changes_nothing(ranks, name):
    """Whether the loss is not finite or the norm: weights, moments and counters are those of a run without it."""
    assert ranks(1)(train_with_bad_steps, name) == [[True] * 14]


@pytest.mark.parametrize("name", ["AdamW", "SGD with momentum", "Lion"])
def test_a_bad_step_of_one_rank_changes_nothing_on_any(ranks, name):
    assert ranks(2)(train_with_bad_steps, name) == [[True] * 14] * 2


def test_only_what_can_skip_by_itself_is_not_waited_for():
    param = [torch.nn.Parameter(torch.zeros(3))]
    by_itself = {name for name, make in MADE.items() if optim.skips_on_device(make(param))}
    assert by_itself == {"AdamW", "AMSGrad"}


# ---------------------------------------------------------------------------------------------------------------
# Checkpoints


def save_and_go_on(world, name, folder):
    """Three steps, saved, and two more: loss and norm of these, and the weights."""
    model, optimizer = made(world, name)
    saver = checkpoint.Checkpointer(str(folder), 1)
    for number in range(3):
        step(world, model, optimizer, number)
    own = {"optimizer": "the value of a setting that a forker gave this name"}
    saver.save(3, model, optimizer, META | own)
    saver.finish()
    return [step(world, model, optimizer, number) for number in (3, 4)], full_weights(model)


def load_and_go_on(world, name, folder):
    model, optimizer = made(world, name, replace(RUN, seed=5))
    checkpoint.load(checkpoint.latest(folder), model, optimizer)
    return [step(world, model, optimizer, number) for number in (3, 4)], full_weights(model)


def slowly(*names):
    return [pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize(
    "name", ["SGD", "Lion", *slowly(*(name for name in MADE if name not in ("SGD", "Lion")))]
)
def test_a_checkpoint_gives_all_of_it_back(ranks, tmp_path, name):
    size = 1 if "fused SGD" in name else 2  # torch 2.13 has no fused SGD of sharded tensors
    (straight, weights), *_ = ranks(size)(save_and_go_on, name, tmp_path)
    (resumed, again), *_ = ranks(size)(load_and_go_on, name, tmp_path)
    assert resumed == straight and same(weights, again)


def load_as(world, name, folder):
    try:
        checkpoint.load(checkpoint.latest(folder), *made(world, name))
        return ""
    except UserError as error:
        return str(error)


def test_another_optimizer_than_the_checkpoints_is_named(ranks, tmp_path):
    """The same class with other state, too. A checkpoint that does not say is of AdamW."""
    ranks(2)(save_and_go_on, "SGD with momentum", tmp_path)
    path = checkpoint.latest(tmp_path)
    held = f"{path} was saved with the optimizer SGD (momentum_buffer), here it is "
    for name, here in [("AdamW", optim.ADAMW), ("SGD", "SGD ()"), ("Lion", "Lion (mean)")]:
        answers = ranks(2)(load_as, name, tmp_path)
        end = f": continue with that one, or begin with --init_from={path} and another --run_dir"
        assert answers == [held + here + end] * 2
    ranks(1)(save_and_go_on, "AdamW", tmp_path / "old")
    path = checkpoint.latest(tmp_path / "old") / "meta.json"
    meta = json.loads(path.read_text())
    assert meta.pop("optimizer") == optim.ADAMW
    path.write_text(json.dumps(meta))
    assert ranks(1)(load_as, "AdamW", tmp_path / "old") == [""]
    assert (
        "was saved with the optimizer AdamW (exp_avg,"
        in ranks(1)(load_as, "Lion", tmp_path / "old")[0]
    )


# ---------------------------------------------------------------------------------------------------------------
# As a forker runs it


def with_lion(world):
    return mock.patch.object(optim, "build_optimizer", lambda params, cfg: Lion(params, cfg.lr))


def test_a_run_with_lion(ranks, tiny_data, tmp_path):
    """It says once that it waits, goes on from its checkpoint, and AdamW does not."""
    flags = [
        *SIZE,
        *flags_for(tiny_data),
        f"--run_dir={tmp_path}",
        "--device=cpu",
        "--precision=fp32",
        "--lr=1e-3",
    ]
    flags += [
        "--global_batch_size=4",
        "--warmup_steps=1",
        "--max_steps=2",
        "--eval_tokens=100",
        "--keep_last=9",
    ]
    for steps in (2, 3):
        status, message, printed = ranks(2)(
            train_here, [*flags, f"--max_steps={steps}"], with_lion
        )[0]
        assert status == 0, message
        assert (
            printed.count(
                "Lion cannot leave out a bad step by itself, so each step waits for the device"
            )
            == 1
        )
    status, message, _ = ranks(2)(train_here, [*flags, "--max_steps=4"])[0]
    assert (
        status == 2
        and "step-3 was saved with the optimizer Lion (mean), here it is AdamW (exp_avg" in message
    )
    status, _, printed = ranks(2)(train_here, [*flags, f"--run_dir={tmp_path / 'new'}"])[0]
    assert status == 0 and "waits for the device" not in printed
