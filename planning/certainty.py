"""How sure is a prediction? As far off as predictions of published runs of its kind were.

residuals.csv has measured / predicted tokens/s of 254 published runs, each predicted without its
model, or not used for the fit at all (tests/planning/test_published.py). They are of three kinds:

    one node         A100 and H100, every weight trained, eager blocks, the kernels of 2023
    several nodes    the same
    tp or pp         the same with tensor ranks or pipeline stages, on any number of nodes

A band holds 80 % of the runs of a kind, and the prediction itself. Anything else (another device,
one device alone, adapters, compiled blocks, other attention kernels) was not compared often enough:
it has the widest band, as far to the fast side as to the slow one.

Where starting the kernels of a block takes longer than running them, which no published run had,
the lower end follows from that time.
"""

import functools
import statistics
from pathlib import Path

from config import MPTConfig, TrainConfig
from planning.fleet import Fleet
from planning.step_time import Constants, StepTime, attention_share
from storage import files

RESIDUALS = Path(__file__).with_name("residuals.csv")
COMPARED = ("A100", "H100")  # the devices whose runs the constants were fitted to
KINDS = ("one node", "several nodes", "tp or pp")
ANYTHING_ELSE = "anything else"
# Seconds in which PyTorch starts the kernels of an eager block, forward and backward: about 50
# operations, counted, of 10 to 20 microseconds of the CPU, as is usual; not measured here. A block
# of the published runs takes at least 8 ms.
LAUNCHES = 1e-3


def band(m: MPTConfig, cfg: TrainConfig, fleet: Fleet) -> tuple[float, float, str]:
    """How far a prediction of tokens/s may be off: (low, high, kind), factors on the prediction."""
    kind = kind_of(cfg, fleet)
    low, high = bands()[kind]
    return low / max(1.0, launch_share(m, cfg, fleet)), high, kind


def kind_of(cfg: TrainConfig, fleet: Fleet) -> str:
    """The kind of published runs that a run is like, or ANYTHING_ELSE."""
    is_split = cfg.tp * cfg.pp > 1
    own_attention = fleet.device.attention not in (None, attention_share(fleet.device, Constants()))
    compiled = cfg.compile is True and not is_split
    known = fleet.device.name.startswith(COMPARED)
    if not known or own_attention or compiled or cfg.lora_rank or fleet.devices == 1:
        return ANYTHING_ELSE
    if is_split:
        return "tp or pp"
    return "several nodes" if fleet.devices > fleet.node_size else "one node"


@functools.cache
def factors() -> dict[str, list[float]]:
    """{kind: measured / predicted tokens/s of its published runs}."""
    found = {kind: [] for kind in KINDS}
    for row in files.read_csv(RESIDUALS, ["split", "nodes", "factor"]):
        kind = row["nodes"] if row["split"] == "neither tp nor pp" else "tp or pp"
        found[kind].append(float(row["factor"]))
    return found


def bands() -> dict[str, tuple[float, float]]:
    """{kind: (low, high)}: the 10th and 90th percentile of measured / predicted, and 1 between."""
    found = {}
    for kind, ratios in factors().items():
        tenths = statistics.quantiles(ratios, n=10, method="inclusive")
        found[kind] = min(tenths[0], 1.0), max(tenths[-1], 1.0)
    widest = min(min(low, 1 / high) for low, high in found.values())
    return {**found, ANYTHING_ELSE: (widest, 1 / widest)}


def launch_share(m: MPTConfig, cfg: TrainConfig, fleet: Fleet) -> float:
    """The seconds in which a block's kernels are started / those in which they run.

    Above 1 the device waits for the CPU, which `StepTime` does not know.
    """
    step = StepTime(m, cfg, fleet)
    return LAUNCHES * step.layers / (step.matmuls() + step.attention() + step.memory())
