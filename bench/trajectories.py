"""The loss with every optimisation of the step on, with every one off, and with another seed.

    python -m bench trajectories    trains configs/demo.py five times, draws trajectories.png

On: attention by blocks, chunked loss, fused AdamW, selective activation checkpointing,
microbatches, compiled blocks. Off: all T x T scores, all logits at once, PyTorch's loop over the
parameters, the whole batch at once, nothing compiled. In fp32 the curves agree to rounding; in bf16
rounding grows, and is to be compared with what another seed of the initial weights and of the
batches does. Read next: bench/flops.py.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

import config
import data
import fsdp_train
import model as room
import optim
import parallel
import processes
from bench.before_after import looping_adamw, obvious_loss
from config import MPTConfig, TrainConfig, require
from loss import linear_cross_entropy

ROOT = Path(__file__).resolve().parent.parent

WINDOW = 20  # steps of a mean


@dataclass
class TrajectoriesArgs:
    """How long to train, and where the picture goes."""

    fp32_steps: int = 20  # of two runs in fp32
    bf16_steps: int = 400  # of three runs in bf16
    out: str = "bench/results/trajectories.png"  # the picture

    def check(self) -> None:
        require(self.fp32_steps > 0, f"fp32_steps must be at least 1, not {self.fp32_steps}")
        enough = self.bf16_steps >= WINDOW
        require(enough, f"bf16_steps must be at least {WINDOW}, not {self.bf16_steps}")


def curve(world, optimised: bool, precision: str, seed: int, steps: int) -> list[float]:
    """The training loss of each step."""
    model_cfg, cfg = config.load([str(ROOT / "configs/demo.py")], MPTConfig, TrainConfig)
    cfg = replace(cfg, seed=seed, microbatch_size=4 if optimised else 8, compile=optimised)
    cfg = replace(cfg, activation_checkpointing="selective" if optimised else "none")
    model_cfg = replace(model_cfg, attn_impl="auto" if optimised else "reference")
    room.linear_cross_entropy = linear_cross_entropy if optimised else obvious_loss
    train = data.Split(data.open_or_prepare(cfg), "train", model_cfg.max_seq_len)
    model = parallel.parallelize(room.MPT(model_cfg), None, cfg, precision)
    room.init_weights(model, seed)
    optimizer = (optim.build_optimizer if optimised else looping_adamw)(model.parameters(), cfg)
    losses = []
    for step in range(steps):
        rows = torch.from_numpy(train.batch(seed, step, cfg.global_batch_size))
        losses.append(
            fsdp_train.train_step(model, optimizer, rows, step, cfg, world, precision)[0].item()
        )
    return losses


def smooth(losses: list[float]) -> torch.Tensor:
    """Means of WINDOW steps."""
    return torch.tensor(losses, dtype=torch.double).unfold(0, WINDOW, 1).mean(-1)


def draw(curves: dict[str, list[float]], path: Path) -> None:
    """The smoothed losses, and how far they are apart."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    whole, apart = figure.subplots(1, 2)
    base = smooth(curves["on"])
    for name, losses in curves.items():
        whole.plot(range(WINDOW, len(losses) + 1), smooth(losses), label=name, linewidth=1)
        if name != "on":
            apart.plot(
                range(WINDOW, len(losses) + 1),
                smooth(losses) - base,
                label=f"{name}, less on",
                linewidth=1,
            )
    whole.set(
        xlabel="step",
        ylabel=f"loss, nats a token, mean of {WINDOW} steps",
        title="configs/demo.py in bf16",
    )
    apart.set(xlabel="step", title="difference")
    for axes in (whole, apart):
        axes.grid(alpha=0.3)
        axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


def main(argv) -> None:
    """Train every variant, print the differences, draw the curves."""
    (args,) = config.load(argv, TrajectoriesArgs)
    world = processes.start("cpu")
    on, off = (curve(world, kind, "fp32", 1337, args.fp32_steps) for kind in (True, False))
    apart = max(abs(a - b) / b for a, b in zip(on, off, strict=True))
    print(f"fp32, {args.fp32_steps} steps: largest relative difference of the loss, ", end="")
    print(f"on and off: {apart:.1e}")
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
