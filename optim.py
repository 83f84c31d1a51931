"""AdamW with decoupled weight decay, and learning-rate schedules that are functions of the step.

    p *= 1 - f_t * decoupled_weight_decay              the decay
    p -= f_t * lr * m / (sqrt(v) + eps)                Adam (Kingma and Ba, 2015)

lr is the peak rate, and f_t the schedule's factor at step t, from 0 to 1. m and v are the running
means of the gradient and of its square, corrected for their start at zero. The decay is decoupled
from the gradient (Loshchilov and Hutter, 2019). PyTorch's AdamW decays by f_t * lr * weight_decay,
so weight_decay = decoupled_weight_decay / lr gives exactly this rule, and its fused kernel can be
used. As in MPT's recipes, all parameters are in one group: norms and biases decay too.

To train with another optimizer, return it from `build_optimizer`: any torch.optim.Optimizer whose
step takes `closure=None`, as PyTorch's do. It may have several parameter groups, chosen by the
names of their parameters, such as one without decay. A group whose peak rate is not lr says so as
"peak_lr"; each step multiplies the peak by f_t.

Run `python optim.py` to see the schedules.
"""

import math

import torch

from config import TrainConfig
from program import arguments, require, run

# What `kind_of` says of AdamW, with which checkpoints that name no optimizer were saved.
ADAMW = "AdamW (exp_avg, exp_avg_sq, step)"
# What `learning_rate` depends on, besides the step: a resumed run notes if one has changed.
RATE_SETTINGS = "lr schedule warmup_steps max_steps alpha_f lr_one_step_late".split()


def build_optimizer(named_params, cfg: TrainConfig) -> torch.optim.Optimizer:
    """AdamW in one fused kernel (PyTorch has one for CPU, CUDA, ROCm and MPS).

    named_params: (name, parameter) of all that is trained, as of `model.named_parameters()`.
    """
    return torch.optim.AdamW(
        [param for _, param in named_params],
        lr=cfg.lr,
        betas=(cfg.beta1, cfg.beta2),
        eps=cfg.adam_eps,
        weight_decay=cfg.decoupled_weight_decay / cfg.lr,
        fused=True,
    )


def clip_gradients(params, norm: torch.Tensor, max_norm: float) -> None:
    """Scale all gradients so that their norm becomes at most max_norm (0: do not scale them).

        grad *= min(1, max_norm / norm)

    norm: that of all gradients together, over all ranks (parallel.grad_norm), a scalar. Of a
    sharded gradient each rank scales its part.
    """
    if max_norm == 0:
        return
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    grads = [p.grad for p in params if p.grad is not None]
    parts = [grad.to_local() if hasattr(grad, "to_local") else grad for grad in grads]
    torch._foreach_mul_(parts, scale)


def peak_rate(group: dict, cfg: TrainConfig):
    """The learning rate of a parameter group at the schedule's peak."""
    return group.get("peak_lr", cfg.lr)


def learning_rate(step: int, cfg: TrainConfig) -> float:
    """The learning rate of step 0, 1, 2, ...: the peak cfg.lr times the schedule's factor."""
    return cfg.lr * rate_factor(step, cfg)


def rate_factor(step: int, cfg: TrainConfig) -> float:
    """The schedule's factor at step 0, 1, 2, ..., from 0 to 1.

    With a warmup the factor of step 0 is 0, as in Composer: it changes no weight, but Adam's
    running means take in its gradient.
    """
    if cfg.lr_one_step_late:
        # Composer's schedulers run after the step, so its steps 0 and 1 both use factor(0).
        step = max(step - 1, 0)
    return SCHEDULES[cfg.schedule](step, cfg)


def constant(t: int, cfg: TrainConfig) -> float:
    """Linear to 1 over the warmup, then 1."""
    return min(1.0, t / cfg.warmup_steps) if cfg.warmup_steps else 1.0


def cosine(t: int, cfg: TrainConfig) -> float:
    """Linear to 1 over the warmup, then half a cosine down to alpha_f at max_steps."""
    if t < cfg.warmup_steps:
        return t / cfg.warmup_steps
    progress = min(1.0, (t - cfg.warmup_steps) / (cfg.max_steps - cfg.warmup_steps))
    return cfg.alpha_f + (1 - cfg.alpha_f) * (1 + math.cos(math.pi * progress)) / 2


def inv_sqrt(t: int, cfg: TrainConfig) -> float:
    """Linear to 1 over the warmup, then sqrt(warmup / t); with no warmup 1, 1, 1 / sqrt(2), ..."""
    if t < cfg.warmup_steps:
        return t / cfg.warmup_steps
    return math.sqrt(max(1, cfg.warmup_steps) / max(1, t))


SCHEDULES = {"cosine": cosine, "constant": constant, "inv_sqrt": inv_sqrt}


def require_peak_rates(optimizer: torch.optim.Optimizer, cfg: TrainConfig) -> None:
    """UserError if a group has another rate than cfg.lr, which no step would use."""
    for group in optimizer.param_groups:
        rate = float(group["lr"])
        require(
            "peak_lr" in group or math.isclose(rate, cfg.lr, rel_tol=1e-6),
            f"a parameter group has lr {rate:g}, which no step would use: set its peak_lr, too, in "
            "optim.py::build_optimizer",
        )


def step_if_good(optimizer: torch.optim.Optimizer, good: torch.Tensor) -> None:
    """`if good: optimizer.step()`; the CPU does not wait for `good` if the kernel itself can skip.

    good: a bool scalar on the device; False if the loss or the gradient norm is not finite. A bad
    step changes no weight and no state.
    """
    if skips_on_device(optimizer):
        # GradScaler's hook: fused AdamW skips the update when found_inf is set. The kernel reads
        # the flag on the device, so the CPU need not wait to learn whether the step is bad.
        bad = (~good).float()
        optimizer.found_inf = bad
        optimizer.step()
    elif good:  # reading the flag here makes the CPU wait for the device
        optimizer.step()


def skips_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer's fused kernel skips the update when `found_inf` is 1.

    GradScaler reads the same attribute. A subclass with a `step` of its own may not look at
    found_inf. Nor may SGD: if its first step is bad, the momentum of the fused kernel stays
    uninitialized memory (torch 2.13).
    """
    has_hook = getattr(optimizer, "_step_supports_amp_scaling", False)
    steps_of_adam = (torch.optim.Adam.step, torch.optim.AdamW.step)
    return has_hook and type(optimizer).step in steps_of_adam


def kind_of(optimizer: torch.optim.Optimizer) -> str:
    """The optimizer's class and the names of its state, like ADAMW. Checkpoints record it."""
    state_names = sorted({name for state in optimizer.state.values() for name in state})
    return f"{type(optimizer).__name__} ({', '.join(state_names)})"


def demonstrate(argv) -> None:
    """Print each schedule as bars."""
    arguments(argv)
    for name in SCHEDULES:
        cfg = TrainConfig(schedule=name, max_steps=1000, warmup_steps=100)
        print(name)
        for step in (0, 50, 100, 300, 600, 1000):
            rate = learning_rate(step, cfg)
            bar = "#" * round(60 * rate / cfg.lr)
            print(f"  step {step:4d}  lr {rate:.2e}  {bar}")


if __name__ == "__main__":
    run(demonstrate)
