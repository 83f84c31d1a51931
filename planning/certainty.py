"""How sure is a prediction? As far off as predictions of published runs of its kind were.

residuals.csv has measured / predicted tokens/s of published runs, and the kind of each: whether the
model was split, over how many nodes, the device, the kernels, sharding, checkpointing. It was made
at 4b892f7 (bench/results/planner.md): every row is predicted without its model, or was not used for
the fit at all. A band holds 80 % of the runs of a kind, and the prediction itself. If too few were
published, it is that of the nearest kind, at least 15 % to each side, and wider for every
difference. Your own runs do not narrow it.

A band of published runs cannot know what none of them had: blocks so small that starting their
kernels takes longer than running them. There the lower end follows from that time.

Run `python -m planning.certainty` for the bands of all kinds, from their own runs and from the
others.
"""

import itertools
import statistics
from pathlib import Path

import config
from config import MPTConfig, TrainConfig, UserError
from planning.fleet import Fleet
from planning.step_time import Constants, StepTime, attention_share
from storage import files

# The kinds of published runs, and measured / predicted tokens/s.
RESIDUALS = Path(__file__).with_name("residuals.csv")
# What makes a kind, and how much it counts when the nearest kind is sought.
WEIGHTS = {
    "split": 16,
    "nodes": 8,
    "device": 6,
    "trained": 5,
    "kernels": 4,
    "sharding": 3,
    "checkpointing": 2,
    "microbatch": 1,
}
# Published runs that make a band, and how many models they must be of: runs that differ in nothing
# but the number of devices count for little.
ENOUGH, MODELS = 6, 3
# Times the logarithm of the band, for each part of the kind that they do not share. If each kind is
# left out in turn, 84 % of its runs are in the band that the others give it.
WIDER = 1.1
# Before that, such a band is at least a factor of 1.15 to each side: MPT-7B on MI250, to which
# nothing is fitted, is 14 % slower than predicted.
AT_LEAST = 1.15
ONE_SIDE = 0.1  # if all runs are further off than this to one side, they are not told as a middle
# Seconds in which PyTorch starts the kernels of an eager block, forward and backward: about 50
# operations, counted, of 10 to 20 microseconds of the CPU, as is usual; not measured here. A block
# of the published runs takes at least 9.7 ms, so they tell nothing about it.
LAUNCHES = 1e-3


def kind_of(m: MPTConfig, cfg: TrainConfig, fleet: Fleet) -> dict[str, str]:
    """The kind of a run, {a key of WEIGHTS: text}."""
    splits = [name for name in ("tp", "pp") if getattr(fleet, name) > 1]
    size = "usual" if launch_share(m, cfg, fleet) <= 1 else "very small"
    return {
        "split": " and ".join(splits) or "neither tp nor pp",
        "nodes": nodes_of(fleet),
        "device": family(fleet.device.name),
        "trained": "adapters" if cfg.lora_rank else "all weights",
        "kernels": kernels_of(cfg, fleet),
        "sharding": cfg.sharding,
        "checkpointing": f"{cfg.activation_checkpointing} checkpointing".replace("none", "no"),
        "microbatch": f"{size} microbatches",
    }


def nodes_of(fleet: Fleet) -> str:
    """A device alone sends nothing, and waits for nobody."""
    if fleet.devices == 1:
        return "one device"
    return "several nodes" if fleet.devices > fleet.node_size else "one node"


def kernels_of(cfg: TrainConfig, fleet: Fleet) -> str:
    """What changes the prediction and differs from the kernels with which runs were published."""
    device = fleet.device
    other = []
    if device.matmul_fp8_tflops:
        other.append("fp8")
    if cfg.compile is True and fleet.tp * fleet.pp == 1:
        other.append("compiled blocks")
    if device.attention and device.attention != attention_share(device, Constants()):
        other.append("another attention kernel")
    return " and ".join(other) or "kernels as published"


def launch_share(m: MPTConfig, cfg: TrainConfig, fleet: Fleet) -> float:
    """The seconds in which a block's kernels are started / those in which they run.

    Above 1 the device waits for the CPU, which `StepTime` does not know.
    """
    step = StepTime(m, cfg, fleet)
    seconds = step.matmuls() + step.attention() + step.memory()
    return LAUNCHES * step.layers / seconds


def family(name: str) -> str:
    """A device's name up to its number: "A100 SXM 80GB" is an A100.

    MI250 and MI250X are one die.
    """
    words = name.split()
    numbers = [i for i, word in enumerate(words) if any(c.isdigit() for c in word)]
    return " ".join(words[: numbers[0] + 1] if numbers else words).replace("MI250X", "MI250")


def band(m: MPTConfig, cfg: TrainConfig, fleet: Fleet) -> tuple[float, float, str]:
    """How far a prediction of tokens/s may be off: (low, high, a sentence).

    low and high are factors on the predicted tokens/s: the 10th and the 90th percentile of
    measured / predicted over published runs of the same kind, of other programs, and 1 between
    them. If there are too few, they come from the nearest kind that has enough, wider for each part
    that differs. The sentence has the true percentiles.
    """
    rows = files.read_csv(RESIDUALS, [*WEIGHTS, "model", "factor"])
    low, high, text = band_of(kind_of(m, cfg, fleet), rows)
    launches = launch_share(m, cfg, fleet)
    if launches <= 1:
        return low, high, text
    low /= launches
    longer = f"starting the kernels may take {launches:.1f} times as long as they run"
    return low, high, f"{text}; {longer}, so it begins at {low:.0%}"


def band_of(wanted: dict[str, str], rows: list[dict]) -> tuple[float, float, str]:
    """`band` of a kind, from these rows of residuals.csv."""
    shared, factors = nearest(wanted, rows)
    missing = [wanted[part] for part in WEIGHTS if part not in shared]
    low, high = middle(factors)
    if not missing:
        text = reached(factors, "published runs of this kind")
        if not low <= 1 <= high:
            text += "; the band ends at the prediction"
        return min(low, 1.0), max(high, 1.0), text

    exponent = WIDER ** len(missing)
    low, high = min(low, 1 / AT_LEAST) ** exponent, max(high, AT_LEAST) ** exponent
    few = f"too few runs with {', '.join(missing)} were compared"
    if sum(is_of(row, wanted) for row in rows) >= ENOUGH:
        few = f"the runs with {', '.join(missing)} were of too few models"
    widened = f"widened to {low:.0%} to {high:.0%}"
    return low, high, f"{few}: {reached(factors, 'nearest runs')}; {widened}"


def middle(factors: list[float]) -> tuple[float, float]:
    """The 10th and the 90th percentile."""
    tenths = statistics.quantiles(factors, n=10, method="inclusive")
    return tenths[0], tenths[-1]


def reached(factors: list[float], runs: str) -> str:
    """What these runs reached of their predictions, as text. runs: what they are called."""
    n = len(factors)
    if max(factors) <= 1 - ONE_SIDE:
        span = f"{1 - max(factors):.0%} to {1 - min(factors):.0%}"
        return f"all {n} {runs} were {span} slower than predicted"
    if min(factors) >= 1 + ONE_SIDE:
        span = f"{min(factors) - 1:.0%} to {max(factors) - 1:.0%}"
        return f"all {n} {runs} were {span} faster than predicted"
    low, high = middle(factors)
    return f"80% of the {n} {runs} reached {low:.0%} to {high:.0%} of the prediction"


def nearest(wanted: dict[str, str], rows: list[dict]) -> tuple[tuple[str, ...], list[float]]:
    """The parts of the kind that the nearest runs share with it, and their factors.

    Of all choices of parts, the one of the largest weight.
    """
    rows_by_match = {}  # {the parts that rows share with the kind: these rows}
    for row in rows:
        match = frozenset(part for part in WEIGHTS if row[part] == wanted[part])
        rows_by_match.setdefault(match, []).append(row)

    choices = []
    for n in range(len(WEIGHTS) + 1):
        choices += itertools.combinations(WEIGHTS, n)
    choices.sort(key=lambda parts: -sum(WEIGHTS[part] for part in parts))

    for parts in choices:
        groups = [group for match, group in rows_by_match.items() if match.issuperset(parts)]
        same = list(itertools.chain.from_iterable(groups))
        if len(same) >= ENOUGH and len({row["model"] for row in same}) >= MODELS:
            return parts, [float(row["factor"]) for row in same]
    raise UserError(f"{RESIDUALS} has too few rows: restore it by git checkout")


def is_of(row: dict, kind: dict[str, str]) -> bool:
    """Does a row of residuals.csv have all these parts of a kind?"""
    return all(row[part] == text for part, text in kind.items())


# --------------------------------------------------------------------------------------------------
# The program


def main(argv: list[str]) -> None:
    """Print each kind's factors, and the band that the other kinds alone would give it."""
    config.arguments(argv)
    rows = files.read_csv(RESIDUALS, [*WEIGHTS, "model", "factor"])
    kinds = []
    for row in rows:
        kind = {part: row[part] for part in WEIGHTS}
        if kind not in kinds:
            kinds.append(kind)

    print(f"{'runs':>5}  {'measured / predicted':<22}{'by other kinds':<18}kind")
    for kind in kinds:
        factors = [float(row["factor"]) for row in rows if is_of(row, kind)]
        low, high, _ = band_of(kind, [row for row in rows if not is_of(row, kind)])
        own = f"{min(factors):.2f} to {max(factors):.2f}"
        others = f"{low:.2f} to {high:.2f}"
        print(f"{len(factors):>5}  {own:<22}{others:<18}{', '.join(kind.values())}")


if __name__ == "__main__":
    config.run(main)
