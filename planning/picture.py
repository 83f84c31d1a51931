"""Pictures of what the planner predicts: scaling, and memory by sharding mode.

    python -m planning.picture [OUT.png]

draws MPT-7B on 4 to 128 MI250 cards beside the published points. For any other fleet:

    python plan.py configs/mpt7b.py --device=mi250 --sweep_devices=8,16,32 --plot
"""

import sys
from dataclasses import replace

import config
import devices
import flops
from config import SHARDING_MODES, MPTConfig, TrainConfig, require
from devices import PUBLISHED_MI250
from planning import memory, step_time
from planning.search import dp_ranks_per_node
from planning.step_time import Constants, Fleet

# The run of devices.PUBLISHED_MI250, MPT-7B at a global batch of 1536. MosaicML's posts do not
# give the microbatch: configs/mpt7b_mi250.py takes 3 without recomputation, and that fits.
MPT7B = MPTConfig(d_model=4096, n_heads=32, n_layers=32, attn_impl="sdpa")
POSTS = TrainConfig(global_batch_size=1536, microbatch_size=3)
SHARDINGS = tuple(reversed(SHARDING_MODES))  # the one that takes the most memory first


# --------------------------------------------------------------------------------------------------
# matplotlib


def canvas(title: str):
    """A figure and its two pairs of axes."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        fix = "pip install -r requirements-extra.txt"
        raise config.UserError(f"pictures need matplotlib: {fix}") from error
    figure = Figure(figsize=(12, 4.5), layout="constrained")
    figure.suptitle(title)
    return figure, figure.subplots(1, 2)


def save(figure, path: str) -> None:
    """Write the figure. UserError if the ending of the path is not that of a picture."""
    try:
        figure.savefig(path, dpi=120)
    except ValueError as error:
        raise config.UserError(f"--out={path}: {config.one_line(error)}") from error
    print(f"drawn: {path}", file=sys.stderr)


def finish_axes(axes, counts: list[int], **labels) -> None:
    """A horizontal axis with the numbers of devices, then labels, grid and legend."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(n) for n in counts])
    axes.minorticks_off()
    axes.set(**labels)
    axes.grid(alpha=0.3)
    axes.legend()


# --------------------------------------------------------------------------------------------------
# Scaling


def scaling(rows: list[dict], path: str) -> None:
    """Tokens/s and efficiency over the number of devices. rows: of search.sweep."""
    plan = rows[0]["strong"]
    counts = [row["devices"] for row in rows]
    size = f"{flops.n_params(plan.m) / 1e9:.3g}B parameters"
    figure, (left, right) = canvas(f"{size} on {plan.fleet.device.name}, predicted")

    for i, name in enumerate(("strong", "weak")):
        rates = [row[name].tokens_per_second for row in rows]
        percent = [100 * row["efficiency"][i] for row in rows]
        left.plot(counts, rates, "o-", label=f"{name} scaling")
        right.plot(counts, percent, "o-", label=f"{name} scaling")

    ideal = [n * rows[0]["rates"][0] for n in counts]
    left.plot(counts, ideal, "k:", label="ideal")
    left.set_yscale("log")
    finish_axes(left, counts, xlabel="torch devices", ylabel="tokens/s")
    efficiency = "% of the smallest fleet's speed per device"
    finish_axes(right, counts, xlabel="torch devices", ylabel=efficiency)
    right.set_ylim(0, 105)
    save(figure, path)


def mi250(cards: int, c: Constants | None = None, cfg: TrainConfig = POSTS) -> float:
    """TFLOP/s a card of MPT-7B on nodes of 4 cards with 800 Gb/s, as LLM Foundry would run it."""
    fleet = Fleet(devices.by_name("mi250"), 2 * cards, 8, 100)
    rate = step_time.tokens_per_second(MPT7B, cfg, fleet, c, step_time.FOUNDRY)
    return rate * flops.train_flops_per_token(MPT7B) / cards / 1e12


def published_pace(cfg: TrainConfig = POSTS) -> float:
    """Measured / predicted compute of the published run on 4 cards, as `--calibrate` finds it."""
    pace = 1.0
    for _ in range(20):  # a fixed point, as in calibrate.pace_of
        pace *= mi250(4, Constants(pace=pace), cfg) / PUBLISHED_MI250[4]
    return pace


def published(path: str) -> None:
    """The scaling of the MI250 posts as we predict it, and MPT-7B's memory.

    One prediction is calibrated on the first published point.
    """
    figure, (left, right) = canvas("MPT-7B on MI250: predicted, and as published")
    counts = [4, 8, 16, 32, 64, 128]
    c = Constants(pace=published_pace())
    calibrated = [mi250(n, c) for n in counts]
    left.plot(counts, calibrated, "o-", label="predicted, calibrated on 4 cards")
    left.plot(counts, [mi250(n) for n in counts], "o:", label="predicted, not calibrated")
    points = PUBLISHED_MI250
    left.plot(points.keys(), points.values(), "k*", markersize=12, label="published by MosaicML")
    finish_axes(left, counts, xlabel="MI250 cards", ylabel="TFLOP/s a card", ylim=(0, 200))

    fleet = Fleet(devices.by_name("mi250"), 16, 8)
    memory_bars(right, MPT7B, replace(POSTS, microbatch_size=1), fleet)
    save(figure, path)


# --------------------------------------------------------------------------------------------------
# Memory


def bytes_by_sharding(m: MPTConfig, cfg: TrainConfig, fleet: Fleet, path: str) -> None:
    """Memory of one rank in every sharding mode, without and with full activation checkpointing."""
    require(fleet.dp > 1, "with one data-parallel rank there is nothing to shard")
    size = f"{flops.n_params(m) / 1e9:.3g}B parameters"
    figure, axes = canvas(f"{size} on {fleet.devices} x {fleet.device.name}")
    for axis, mode in zip(axes, ("none", "full"), strict=True):
        memory_bars(axis, m, replace(cfg, activation_checkpointing=mode), fleet)
    save(figure, path)


def memory_bars(axes, m: MPTConfig, cfg: TrainConfig, fleet: Fleet) -> None:
    """A bar for each sharding mode: the parts of a rank's peak. Dotted: the device's memory."""
    shard_size = min(dp_ranks_per_node(fleet), fleet.dp)
    bars = []
    for sharding in SHARDINGS:
        one = replace(cfg, sharding=sharding, shard_size=shard_size)
        bars.append(memory.bytes_by_part(m, one, fleet.devices))

    bottom = [0.0] * len(bars)
    parts = [name for name in bars[0] if name not in ("peak", "moment")]
    for part in parts:
        heights = [bar[part] / 2**30 for bar in bars]
        axes.bar(SHARDINGS, heights, bottom=bottom, label=part)
        bottom = [below + height for below, height in zip(bottom, heights, strict=True)]
    axes.axhline(fleet.device.memory_gb, color="k", linestyle=":")

    run = f"{fleet.devices} x {fleet.device.name}, microbatch {cfg.microbatch_size}"
    title = f"{run}, checkpointing {cfg.activation_checkpointing}"
    axes.set(ylabel="GiB of one rank at its peak", title=title)
    axes.tick_params(axis="x", rotation=15)
    axes.legend(fontsize="small")


def main(argv: list[str]) -> None:
    """Draw the published runs into the file that argv names, or plan.png."""
    (path,) = config.arguments(argv, "[OUT.png]") or ["plan.png"]
    published(path)


if __name__ == "__main__":
    config.run(main)
