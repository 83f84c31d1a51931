"""optim.py: a step equals the arithmetic by hand; schedules are functions with known values."""

import pytest
import torch
from conftest import refusal

from config import TrainConfig
from optim import (
    SCHEDULES,
    build_optimizer,
    learning_rate,
    peak_rate,
    require_peak_rates,
    step_if_good,
)


def adam_by_hand(p, gradients, rates, cfg):
    """p after the steps: decay by (lr_t / lr) * wd, then Adam with bias correction."""
    mean, square = torch.zeros_like(p), torch.zeros_like(p)
    for t, (g, rate) in enumerate(zip(gradients, rates, strict=True), 1):
        p = p * (1 - rate / cfg.lr * cfg.decoupled_weight_decay)
        mean = cfg.beta1 * mean + (1 - cfg.beta1) * g
        square = cfg.beta2 * square + (1 - cfg.beta2) * g**2
        corrected_mean = mean / (1 - cfg.beta1**t)
        corrected_square = square / (1 - cfg.beta2**t)
        p = p - rate * corrected_mean / (corrected_square.sqrt() + cfg.adam_eps)
    return p


def step(p, gradients, cfg, rates):
    """p after the optimizer's steps, with the learning rate set before each, as in training."""
    p = torch.nn.Parameter(p.clone())
    optimizer = build_optimizer([("p", p)], cfg)
    for g, rate in zip(gradients, rates, strict=True):
        p.grad = g.clone()
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
    return p.detach()


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("steps", [1, 4])
def test_steps_equal_the_arithmetic_by_hand(steps, decay):
    torch.manual_seed(0)
    cfg = TrainConfig(lr=3e-3, decoupled_weight_decay=decay, warmup_steps=2, max_steps=10)
    p = torch.randn(50, dtype=torch.double)
    gradients = torch.randn(steps, 50, dtype=torch.double)
    rates = [learning_rate(t + 1, cfg) for t in range(steps)]
    found = step(p, gradients, cfg, rates)
    exact = adam_by_hand(p, gradients, rates, cfg)
    torch.testing.assert_close(found, exact, rtol=1e-12, atol=0)


@pytest.mark.parametrize("lr", [1e-5, 1e-3, 1.0])
def test_decay_does_not_grow_with_the_learning_rate(lr):
    """With a zero gradient only the decay acts: by wd at the peak rate, by wd / 2 at half of it."""
    cfg = TrainConfig(lr=lr, decoupled_weight_decay=0.1)
    p = torch.ones(3, dtype=torch.double)
    no_gradient = torch.zeros(1, 3, dtype=torch.double)
    torch.testing.assert_close(step(p, no_gradient, cfg, [lr]), 0.9 * p)
    torch.testing.assert_close(step(p, no_gradient, cfg, [lr / 2]), 0.95 * p)
    assert torch.equal(step(p, no_gradient, cfg, [0.0]), p)


def test_a_bad_step_is_skipped_by_optimizers_that_do_not_know_of_it():
    """A subclass of AdamW has its hook for bad steps, but its own step may not look there."""

    class Own(torch.optim.AdamW):
        def step(self, closure=None):
            with torch.no_grad():
                self.param_groups[0]["params"][0].sub_(1)

    p = torch.nn.Parameter(torch.ones(3))
    optimizer = Own([p], fused=True)
    for good, expected in [(False, 1), (True, 0)]:
        step_if_good(optimizer, torch.tensor(good))
        assert p.tolist() == [expected] * 3


@pytest.mark.parametrize("good", [True, False])
def test_only_a_good_step_is_taken(good):
    """Adam's first step is the rate of each group, which may be a tensor."""
    slow, fast = (torch.nn.Parameter(torch.zeros(3)) for _ in range(2))
    groups = [{"params": [slow], "lr": 0.05}, {"params": [fast], "lr": torch.tensor(0.2)}]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0, fused=True)
    slow.grad, fast.grad = torch.ones(3), torch.ones(3)
    step_if_good(optimizer, torch.tensor(good))
    moved = [-0.05, -0.2] if good else [0, 0]
    assert [p[0].item() for p in (slow, fast)] == pytest.approx(moved)


def test_a_rate_that_no_step_would_use_is_refused():
    cfg = TrainConfig(lr=0.1)
    slow, fast = (torch.nn.Parameter(torch.zeros(3)) for _ in range(2))
    groups = [{"params": [slow]}, {"params": [fast], "lr": torch.tensor(0.4)}]
    optimizer = torch.optim.AdamW(groups, lr=0.1, weight_decay=0.0, fused=True)
    message = refusal(require_peak_rates, optimizer, cfg)
    assert "has lr 0.4" in message and "set its peak_lr" in message
    optimizer.param_groups[1]["peak_lr"] = optimizer.param_groups[1]["lr"]
    require_peak_rates(optimizer, cfg)
    assert [float(peak_rate(group, cfg)) for group in optimizer.param_groups] == pytest.approx(
        [0.1, 0.4]
    )


def test_the_settings_arrive():
    cfg = TrainConfig(lr=0.5, beta1=0.8, beta2=0.9, adam_eps=1e-3, decoupled_weight_decay=0.1)
    matrix, bias = torch.nn.Parameter(torch.zeros(2, 2)), torch.nn.Parameter(torch.zeros(2))
    (group,) = build_optimizer([("matrix", matrix), ("bias", bias)], cfg).param_groups
    assert len(group["params"]) == 2  # all in one group, norms and biases too
    expected = {"lr": 0.5, "betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.2}
    assert expected.items() <= group.items()


# {step: factor}, with 100 steps of warmup, max_steps=1000 and alpha_f=0.1
COSINE = {0: 0, 1: 0.01, 50: 0.5, 99: 0.99, 100: 1}
COSINE |= {400: 0.775, 550: 0.55, 700: 0.325}  # 0.1 + 0.9 * (1 + cos(pi * (t - 100) / 900)) / 2
COSINE |= {1000: 0.1, 5000: 0.1}
CONSTANT = {0: 0, 25: 0.25, 100: 1, 101: 1, 10**6: 1}
INV_SQRT = {0: 0, 50: 0.5, 100: 1, 400: 0.5, 1600: 0.25, 10000: 0.1}
KNOWN = {"cosine": COSINE, "constant": CONSTANT, "inv_sqrt": INV_SQRT}


@pytest.mark.parametrize("schedule, known", KNOWN.items(), ids=KNOWN)
def test_schedules_at_known_steps(schedule, known):
    cfg = TrainConfig(lr=2.0, schedule=schedule, warmup_steps=100, max_steps=1000)
    for t, factor in known.items():
        assert learning_rate(t, cfg) == pytest.approx(2.0 * factor, abs=1e-12), t


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("alpha_f", [0, 0.5, 1])
def test_without_warmup_and_at_the_end(schedule, alpha_f):
    more = {"schedule": schedule, "alpha_f": alpha_f}
    cfg = TrainConfig(lr=1.0, warmup_steps=0, max_steps=100, **more)
    assert learning_rate(0, cfg) == 1 and learning_rate(1, cfg) > 0.99
    if schedule == "cosine":
        assert learning_rate(100, cfg) == pytest.approx(alpha_f)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_composers_schedule_is_one_step_late(schedule):
    """Its step k uses factor(max(k - 1, 0)), so the first two steps have a learning rate of 0."""
    ours = TrainConfig(schedule=schedule, warmup_steps=3, max_steps=20)
    late = TrainConfig(schedule=schedule, warmup_steps=3, max_steps=20, lr_one_step_late=True)
    assert learning_rate(0, late) == learning_rate(1, late) == 0
    for t in range(20):
        assert learning_rate(t + 1, late) == learning_rate(t, ours)
