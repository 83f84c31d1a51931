"""How sure is a prediction? As far off as predictions of published runs of its kind were.

residuals.csv has measured / predicted tokens/s of published runs, and the kind of each: whether the
model was split, over how many nodes, the device, sharding, checkpointing. `python -m bench planner`
writes it: every row is predicted without its model, or was not used for the fit at all. A band
holds 8 in 10 of the runs of a kind. If too few were published, it is that of the nearest kind,
made wider for every difference. A calibrated plan has the same band: your own runs do not narrow
it.

Run `python -m planning.certainty` for the bands of all kinds, from their own runs and from the
others.
"""

import itertools
import statistics
from pathlib import Path

import config
from config import MPTConfig, TrainConfig, UserError
from planning.fleet import Fleet
from storage import files

# The kinds of published runs, and measured / predicted tokens/s, from `python -m bench planner`.
RESIDUALS = Path(__file__).with_name("residuals.csv")
# What makes a kind, and how much it counts when the nearest kind is sought.
WEIGHTS = {
    "split": 16,
    "nodes": 8,
    "device": 6,
    "trained": 5,
    "sharding": 3,
    "checkpointing": 2,
}
# Published runs that make a band, and how many models they must be of: runs that differ in nothing
# but the number of devices count for little.
ENOUGH, MODELS = 6, 3
# Times the logarithm of the band, for each part of the kind that they do not share. If each kind is
# left out in turn, 84 % of its runs are in the band that the others give it.
WIDER = 1.1
# The least factor of such a band: MPT-7B on MI250, to which nothing is fitted, is 14 % slower than
# predicted.
AT_LEAST = 1.15


def kind_of(m: MPTConfig, cfg: TrainConfig, fleet: Fleet) -> dict[str, str]:
    """The kind of a run, {a key of WEIGHTS: text}."""
    splits = [name for name in ("tp", "pp") if getattr(fleet, name) > 1]
    return {
        "split": " and ".join(splits) or "neither tp nor pp",
        "nodes": "several nodes" if fleet.devices > fleet.node_size else "one node",
        "device": family(fleet.device.name),
        "trained": "adapters" if cfg.lora_rank else "all weights",
        "sharding": cfg.sharding,
        "checkpointing": f"{cfg.activation_checkpointing} checkpointing".replace("none", "no"),
    }


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
    measured / predicted over published runs of the same kind, of other programs. If there are too
    few, they come from the nearest kind that has enough, wider for each part that differs.
    """
    return band_of(kind_of(m, cfg, fleet), files.read_csv(RESIDUALS, [*WEIGHTS, "model", "factor"]))


def band_of(wanted: dict[str, str], rows: list[dict]) -> tuple[float, float, str]:
    """`band` of a kind, from these rows of residuals.csv."""
    shared, factors = nearest(wanted, rows)
    missing = [wanted[part] for part in WEIGHTS if part not in shared]

    tenths = statistics.quantiles(factors, n=10, method="inclusive")
    low, high = min(tenths[0], 1.0), max(tenths[-1], 1.0)
    n = len(factors)
    if not missing:
        runs = f"8 in 10 of {n} published runs of this kind"
        return low, high, f"{runs} reached {reached(low, high)}"

    high = max(high, 1 / low, AT_LEAST) ** WIDER ** len(missing)
    low = 1 / high
    few = f"too few runs with {', '.join(missing)} were compared"
    return low, high, f"{few}: {reached(low, high)}, widened from the {n} nearest runs"


def reached(low: float, high: float) -> str:
    """A band as text."""
    return f"{low:.0%} to {high:.0%} of the predicted tokens/s"


def nearest(wanted: dict[str, str], rows: list[dict]) -> tuple[tuple[str, ...], list[float]]:
    """The parts of the kind that the nearest runs share with it, and their factors.

    Of all choices of parts, the one of the largest weight.
    """
    choices = []
    for n in range(len(WEIGHTS) + 1):
        choices += itertools.combinations(WEIGHTS, n)
    choices.sort(key=lambda parts: -sum(WEIGHTS[part] for part in parts))

    for parts in choices:
        same = [row for row in rows if is_of(row, {part: wanted[part] for part in parts})]
        if len(same) >= ENOUGH and len({row["model"] for row in same}) >= MODELS:
            return parts, [float(row["factor"]) for row in same]
    raise UserError(f"{RESIDUALS} has too few rows: run `python -m bench planner`")


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
