"""AdamW with decoupled weight decay, and the learning-rate schedules: pure functions of the step.

    p *= 1 - (lr_t / lr) * decoupled_weight_decay      the decay, which does not grow with the learning rate
    p -= lr_t * mean(g) / (sqrt(mean(g^2)) + eps)      Adam (Kingma and Ba, 2015; Loshchilov and Hutter, 2019)

PyTorch's AdamW decays by lr_t * weight_decay, so weight_decay = decoupled_weight_decay / lr is the rule above
exactly, and its fused kernel can be used. As in MPT's recipes, all parameters are in one group.

To train with another optimizer, return it from `build_optimizer`: any torch.optim.Optimizer whose
step takes `closure=None`, as theirs do. It may have several parameter groups, such as one without
decay; each step gives all groups the same learning rate.

Run `python optim.py` to see the schedules. Read next: processes.py.
"""

import math

import torch

from config import TrainConfig, arguments, run


def build_optimizer(params, cfg: TrainConfig) -> torch.optim.Optimizer:
    """AdamW over `params`, in one fused kernel (torch has one for CPU, CUDA, ROCm and MPS)."""
    return torch.optim.AdamW(
        params,
        lr=cfg.lr,
        betas=(cfg.beta1, cfg.beta2),
        eps=cfg.adam_eps,
        weight_decay=cfg.decoupled_weight_decay / cfg.lr,
        fused=True,
    )


def update(optimizer: torch.optim.Optimizer, good) -> None:
    """One step of the optimizer. Unless `good`, a bool on the device, weights and state stay as they are."""
    if skips_on_device(optimizer):
        optimizer.found_inf = (~good).float()
        optimizer.step()
    elif good:  # waits for the device
        optimizer.step()
    optimizer.zero_grad()


def skips_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Does its fused kernel change nothing where `found_inf` is 1? GradScaler asks the same."""
    # After a bad first step the momentum of a fused SGD would be whatever its memory held before (torch 2.13).
    return getattr(optimizer, "_step_supports_amp_scaling", False) and not isinstance(
        optimizer, torch.optim.SGD
    )


def kind_of(optimizer: torch.optim.Optimizer) -> str:
    """Its class and what it keeps of each weight, as in ADAMW."""
    kept = sorted({name for state in optimizer.state.values() for name in state})
    return f"{type(optimizer).__name__} ({', '.join(kept)})"


def learning_rate(step: int, cfg: TrainConfig) -> float:
    """The learning rate of step 0, 1, 2, ...: lr * factor(step)."""
    if (
        cfg.lr_one_step_late
    ):  # Composer's schedulers run after the step, so steps 0 and 1 both have factor(0)
        step = max(step - 1, 0)
    return cfg.lr * SCHEDULES[cfg.schedule](step, cfg)


def constant(t, cfg):
    return min(1.0, t / cfg.warmup_steps) if cfg.warmup_steps else 1.0


def cosine(t, cfg):
    """Linear to 1 over the warmup, then half a cosine down to alpha_f at max_steps."""
    if t < cfg.warmup_steps:
        return t / cfg.warmup_steps
    progress = min(1.0, (t - cfg.warmup_steps) / (cfg.max_steps - cfg.warmup_steps))
    return cfg.alpha_f + (1 - cfg.alpha_f) * (1 + math.cos(math.pi * progress)) / 2


def inv_sqrt(t, cfg):
    """Linear to 1 over the warmup, then sqrt(warmup / t)."""
    warmup = max(1, cfg.warmup_steps)
    return min(t / warmup, math.sqrt(warmup / max(t, 1)))


ADAMW = "AdamW (exp_avg, exp_avg_sq, step)"
SCHEDULES = {"cosine": cosine, "constant": constant, "inv_sqrt": inv_sqrt}


def demonstrate(argv) -> None:
    arguments(argv)
    for name in SCHEDULES:
        c = TrainConfig(schedule=name, max_steps=1000, warmup_steps=100)
        print(name)
        for t in (0, 50, 100, 300, 600, 1000):
            rate = learning_rate(t, c)
            print(f"  step {t:4d}  lr {rate:.2e}  " + "#" * round(60 * rate / c.lr))


if __name__ == "__main__":
    run(demonstrate)
