"""The loss with all optimisations of the step on, with all off, and with another seed.

    python -m bench trajectories    trains configs/demo.py five times, draws trajectories.png

On: attention by blocks, chunked loss, fused AdamW, selective activation checkpointing,
microbatches, compiled blocks. Off: all T x T scores, all logits together, PyTorch's loop over the
parameters, the whole batch in one pass, nothing compiled. In fp32 the curves agree up to rounding.
In bf16 rounding errors grow; compare them with the effect of another seed, for the initial weights
and the batches.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

import config
import data
import fsdp_train
import model as model_file
import optim
import parallel
import processes
from bench.before_after import looping_adamw, obvious_loss
from config import MPTConfig, TrainConfig, require
from loss import linear_cross_entropy

ROOT = Path(__file__).resolve().parent.parent

WINDOW = 20  # steps of a running mean


@dataclass
class TrajectoriesArgs:
    """How long to train, and where the picture goes."""

    fp32_steps: int = 20  # of two runs in fp32
    bf16_steps: int = 400  # of three runs in bf16
    out: str = "bench/results/trajectories.png"  # the picture

    def check(self) -> None:
        """UserError if a setting is out of range."""
        require(self.fp32_steps > 0, f"fp32_steps must be at least 1, not {self.fp32_steps}")
        enough = self.bf16_steps >= WINDOW
        require(enough, f"bf16_steps must be at least {WINDOW}, not {self.bf16_steps}")


def settings(optimised: bool, seed: int) -> tuple[MPTConfig, TrainConfig]:
    """The demo's settings, with the optimisations on or off."""
    model_cfg, cfg = config.load([str(ROOT / "configs/demo.py")], MPTConfig, TrainConfig)
    cfg = replace(
        cfg,
        seed=seed,
        microbatch_size=4 if optimised else 8,
        compile=optimised,
        activation_checkpointing="selective" if optimised else "none",
    )
    return replace(model_cfg, attn_impl="auto" if optimised else "reference"), cfg


def curve(world, optimised: bool, precision: str, seed: int, steps: int) -> list[float]:
    """The training loss of each step, nats a token."""
    model_cfg, cfg = settings(optimised, seed)
    model_file.linear_cross_entropy = linear_cross_entropy if optimised else obvious_loss
    build_optimizer = optim.build_optimizer if optimised else looping_adamw

    train = data.Split(data.open_or_prepare(cfg), "train", model_cfg.max_seq_len)
    model = parallel.parallelize(model_file.MPT(model_cfg), None, cfg, precision)
    model_file.init_weights(model, seed)
    optimizer = build_optimizer(model.parameters(), cfg)
    losses = []
    for step in range(steps):
        rows = torch.from_numpy(train.batch(seed, step, cfg.global_batch_size))
        loss, *_ = fsdp_train.train_step(model, optimizer, rows, step, cfg, world, precision)
        losses.append(loss.item())
    return losses


def smooth(losses: list[float]) -> torch.Tensor:
    """Means over WINDOW steps; WINDOW - 1 values fewer than `losses`."""
    return torch.tensor(losses, dtype=torch.double).unfold(0, WINDOW, 1).mean(-1)


def draw(curves: dict[str, list[float]], path: Path) -> None:
    """The smoothed losses, and how far they are apart."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    loss_axes, difference_axes = figure.subplots(1, 2)
    base = smooth(curves["on"])
    for name, losses in curves.items():
        steps = range(WINDOW, len(losses) + 1)
        loss_axes.plot(steps, smooth(losses), label=name, linewidth=1)
        if name != "on":
            label = f"{name} minus on"
            difference_axes.plot(steps, smooth(losses) - base, label=label, linewidth=1)

    loss_label = f"loss, nats a token, mean of {WINDOW} steps"
    loss_axes.set(xlabel="step", ylabel=loss_label, title="configs/demo.py in bf16")
    difference_axes.set(xlabel="step", title="difference")
    for axes in (loss_axes, difference_axes):
        axes.grid(alpha=0.3)
        axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


def main(argv) -> None:
    """Train every variant, print the differences, draw the curves."""
    (args,) = config.load(argv, TrajectoriesArgs)
    world = processes.start("cpu")

    on = curve(world, True, "fp32", 1337, args.fp32_steps)
    off = curve(world, False, "fp32", 1337, args.fp32_steps)
    largest = max(abs(a - b) / b for a, b in zip(on, off, strict=True))
    print(f"fp32, {args.fp32_steps} steps: largest relative difference of the loss, ", end="")
    print(f"on and off: {largest:.1e}")

    curves = {
        "on": curve(world, True, "bf16", 1337, args.bf16_steps),
        "off": curve(world, False, "bf16", 1337, args.bf16_steps),
        "on, another seed": curve(world, True, "bf16", 1338, args.bf16_steps),
    }
    base = smooth(curves["on"])
    for name in ("off", "on, another seed"):
        difference = (smooth(curves[name]) - base).abs()
        print(f"bf16, {args.bf16_steps} steps, means of {WINDOW}: {name} against on: ", end="")
        print(f"largest difference {difference.max():.4f}, mean {difference.mean():.4f} nats")
    draw(curves, Path(args.out))


if __name__ == "__main__":
    processes.run(main)
