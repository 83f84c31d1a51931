"""Pictures of what the planner predicts: scaling, and memory by sharding.

    python -m planning.picture                                    MPT-7B on 4 to 128 x MI250, with the published points
    python plan.py configs/mpt7b.py --device=mi250 --sweep_devices=8,16,32 --plot     any other fleet

Read next: plan.py.
"""

import sys
from dataclasses import replace

import config
import devices
import flops
from config import SHARDING_MODES, MPTConfig, TrainConfig, require
from devices import PUBLISHED_MI250
from planning import memory, step_time
from planning.step_time import Fleet

# The run of devices.PUBLISHED_MI250, MPT-7B at a global batch of 1536. The posts do not give the
# microbatch: 3 without recomputation is what configs/mpt7b_mi250.py takes, and fits.
MPT7B = MPTConfig(d_model=4096, n_heads=32, n_layers=32, attn_impl="sdpa")
POSTS = TrainConfig(global_batch_size=1536, microbatch_size=3)
SHARDINGS = tuple(reversed(SHARDING_MODES))


def canvas(title: str):
    """A figure with two pairs of axes."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise config.UserError(
            "pictures need matplotlib: pip install -r requirements-extra.txt"
        ) from error
    figure = Figure(figsize=(12, 4.5), layout="constrained")
    figure.suptitle(title)
    return figure, figure.subplots(1, 2)


def finish(figure, path: str) -> None:
    try:
        figure.savefig(path, dpi=120)
    except ValueError as error:  # an ending that is no picture's
        raise config.UserError(f"--out={path}: {config.one_line(error)}") from error
    print(f"drawn: {path}", file=sys.stderr)


def against_counts(axes, counts: list[int], **labels) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(n) for n in counts])
    axes.minorticks_off()
    axes.set(**labels)
    axes.grid(alpha=0.3)
    axes.legend()


def scaling(rows: list[dict], path: str) -> None:
    """rows: of search.sweep. Tokens/s and efficiency against devices."""
    one, counts = rows[0]["strong"], [row["devices"] for row in rows]
    figure, (left, right) = canvas(
        f"{flops.n_params(one.m) / 1e9:.3g}B parameters on {one.fleet.device.name}, predicted"
    )
    for i, name in enumerate(("strong", "weak")):
        left.plot(
            counts, [row[name].tokens_per_second for row in rows], "o-", label=f"{name} scaling"
        )
        right.plot(
            counts, [100 * row["efficiency"][i] for row in rows], "o-", label=f"{name} scaling"
        )
    left.plot(counts, [n * rows[0]["rates"][0] for n in counts], "k:", label="ideal")
    left.set_yscale("log")
    against_counts(left, counts, xlabel="torch devices", ylabel="tokens/s")
    against_counts(
        right, counts, xlabel="torch devices", ylabel="% of the smallest fleet's speed a device"
    )
    right.set_ylim(0, 105)
    finish(figure, path)


def mi250(cards: int, c: step_time.Constants | None = None, cfg: TrainConfig = POSTS) -> float:
    """TFLOP/s a card of MPT-7B on nodes of 4 cards with 800 Gb/s, as LLM Foundry would run it."""
    fleet = Fleet(devices.by_name("mi250"), 2 * cards, 8, 100)
    rate = step_time.tokens_per_second(MPT7B, cfg, fleet, c, step_time.FOUNDRY)
    return rate * flops.train_flops_per_token(MPT7B) / cards / 1e12


def published_pace(cfg: TrainConfig = POSTS) -> float:
    """Measured / predicted compute of the published run on 4 cards: what `--calibrate` would find."""
    pace = 1.0
    for _ in range(20):
        pace *= mi250(4, step_time.Constants(pace=pace), cfg) / PUBLISHED_MI250[4]
    return pace


def published(path: str) -> None:
    """The MI250 posts' scaling figure from our own model, calibrated on their first point; and MPT-7B's memory."""
    figure, (left, right) = canvas("MPT-7B on MI250: predicted, and as published")
    counts, c = [4, 8, 16, 32, 64, 128], step_time.Constants(pace=published_pace())
    left.plot(counts, [mi250(n, c) for n in counts], "o-", label="predicted, calibrated on 4 cards")
    left.plot(counts, [mi250(n) for n in counts], "o:", label="predicted, not calibrated")
    posts = PUBLISHED_MI250
    left.plot(posts.keys(), posts.values(), "k*", markersize=12, label="published by MosaicML")
    against_counts(left, counts, xlabel="MI250 cards", ylabel="TFLOP/s a card", ylim=(0, 200))
    memory_bars(
        right, MPT7B, replace(POSTS, microbatch_size=1), Fleet(devices.by_name("mi250"), 16, 8)
    )
    finish(figure, path)


def bytes_by_sharding(m: MPTConfig, cfg: TrainConfig, fleet: Fleet, path: str) -> None:
    """Memory of one rank in every mode and with every way of checkpointing, at the microbatch of cfg."""
    require(fleet.dp > 1, "with one data-parallel rank there is nothing to shard")
    figure, axes = canvas(
        f"{flops.n_params(m) / 1e9:.3g}B parameters on {fleet.devices} x {fleet.device.name}"
    )
    for axis, way in zip(axes, ("none", "full"), strict=True):
        memory_bars(axis, m, replace(cfg, activation_checkpointing=way), fleet)
    finish(figure, path)


def memory_bars(axes, m: MPTConfig, cfg: TrainConfig, fleet: Fleet) -> None:
    node = max(1, min(fleet.node_size // fleet.tp, fleet.dp))
    columns = []
    for mode in SHARDINGS:
        one = replace(cfg, sharding=mode, shard_size=node)
        columns.append(memory.bytes_by_part(m, one, fleet.devices, "bf16", fleet.tp, fleet.pp))
    bottom = [0.0] * len(columns)
    for part in (name for name in columns[0] if name not in ("peak", "moment")):
        heights = [column[part] / 2**30 for column in columns]
        axes.bar(SHARDINGS, heights, bottom=bottom, label=part)
        bottom = [below + height for below, height in zip(bottom, heights, strict=True)]
    axes.axhline(fleet.device.memory_gb, color="k", linestyle=":")
    way, title = (
        cfg.activation_checkpointing,
        f"{fleet.devices} x {fleet.device.name}, microbatch {cfg.microbatch_size}",
    )
    axes.set(ylabel="GiB of one rank at its peak", title=f"{title}, checkpointing {way}")
    axes.tick_params(axis="x", rotation=15)
    axes.legend(fontsize="small")


if __name__ == "__main__":
    config.run(lambda argv: published(*config.arguments(argv, "[OUT.png]") or ["plan.png"]))
