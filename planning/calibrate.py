"""What a machine has measured, as inputs of planning/step_time.py: a fleet is predicted from one node.

machine.json of `bench machine`: its matmuls, memory and links take the place of the datasheet's. A .csv table of
`bench train`: one number, the pace,

    pace = measured / predicted seconds of compute        geometric mean over the rows, traffic as predicted

Run `python -m planning.calibrate results.csv --device=mi250`, or give the file to plan.py.
Read next: planning/search.py.
"""

import math
from dataclasses import dataclass, replace
from pathlib import Path

import config
import devices
from config import MPTConfig, TrainConfig, UserError, require
from planning import step_time
from planning.step_time import Constants, Fleet, Trainer
from storage import files

COLUMNS = """d_model n_layers n_heads max_seq_len vocab_size microbatch_size global_batch_size sharding
    activation_checkpointing recompute_every""".split()


@dataclass
class CalibrateArgs:
    """What was measured."""

    device: str = "auto"  # mi250, h100, ...
    node_size: int = 8  # torch devices of a node
    network: float = 100.0  # GB/s of a node, each way


def from_file(path: str, fleet: Fleet, trainer: Trainer) -> tuple[Fleet, Constants]:
    """`fleet` (devices, nodes, network; how many is not read) and constants as measured. UserError if there is nothing
    of use in the file."""
    require(Path(path).is_file(), f"no file {path!r} to calibrate with")
    what = (
        "a table of `bench train`" if path.endswith(".csv") else "a machine.json of `bench machine`"
    )
    try:
        if path.endswith(".csv"):
            return fleet, Constants(pace=pace(path, fleet, trainer))
        return from_machine(files.read_json(path, fix=f"this is not {what}"), fleet)
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        if isinstance(error, UserError):
            raise UserError(str(error) if path in str(error) else f"{path}: {error}") from error
        raise UserError(
            f"{path} is not {what}: {type(error).__name__} {config.one_line(error)}"
        ) from error


def from_machine(found: dict, fleet: Fleet) -> tuple[Fleet, Constants]:
    """found: machine.json, whose keys bench/machine.py describes."""
    same_device(found["device"], fleet.device)
    c, device, ranks = Constants(), fleet.device, found["ranks"]
    require(
        files.has_type(ranks, int) and ranks > 0,
        f"ranks must be at least 1, not {files.shown(ranks)}",
    )
    reachable = (
        positive("matmul_tflops", max(found["matmul_tflops"]["bf16"].values())) / device.bf16_tflops
    )
    require(
        reachable <= 1, f"matmuls at {reachable:.0%} of {device.name}'s peak: is --device right?"
    )
    device = replace(
        device, reachable=reachable, bandwidth_gbs=positive("memory_gbs", found["memory_gbs"])
    )
    groups = {
        name: max(group["all_gather"].values()) for name, group in found["collectives_gbs"].items()
    }
    bus = {name: positive("collectives_gbs", gbs) / c.link for name, gbs in groups.items()}
    inside = bus.get("node") or (bus.get("all") if found["nodes"] == 1 else None)
    device = replace(device, link_gbs=inside or device.link_gbs)
    fleet = replace(
        fleet, device=device, network_gbs=bus["all"] if found["nodes"] > 1 else fleet.network_gbs
    )
    if ranks == 1:
        return fleet, c
    latency = positive("latency_us", found["latency_us"]["all"]) * 1e-6
    return fleet, replace(c, hop=latency / (2 * (ranks - 1)))  # an all-reduce goes round twice


def positive(what: str, number) -> float:
    """`number` as a float, or UserError: a broken measurement would only show in an absurd plan."""
    require(0 < float(number) < math.inf, f"{what} must be more than 0, not {number}")
    return float(number)


def same_device(reported: str, device: devices.Device) -> None:
    """UserError if that is the name of something else. Many devices have names that say nothing."""
    name = reported.lower()
    others = [row.name for row in devices.TABLE if any(text in name for text in row.reports)]
    fine = device.name in others or not (others or name == "cpu")
    require(fine, f"measured on {reported!r}, not on {device.name}: set --device to that")


def pace(path: str, fleet: Fleet, trainer: Trainer) -> float:
    """Of a table: measured / predicted seconds of compute, the geometric mean of this project's rows in bf16."""
    rows = [
        row
        for row in files.read_csv(path, ["status"], "a table of `bench train`")
        if row["status"] == "ok"
    ]
    rows = [
        row
        for row in rows
        if row["precision"].startswith("bf16") and not row["model"].startswith("transformers")
    ]
    require(rows, f"{path} has no row of this project's trainer in bf16 with status ok")
    return math.exp(sum(math.log(pace_of(row, fleet, trainer)) for row in rows) / len(rows))


def pace_of(row: dict, fleet: Fleet, trainer: Trainer) -> float:
    """Of one line of the table. UserError if it cannot be of this device."""
    same_device(row["device"], fleet.device)
    flags = [f"--{name}={row[name]}" for name in COLUMNS if row.get(name)]
    others = [f"--{setting}" for setting in row.get("others", "").split()]
    require("--help" not in others, "a row with the setting help")
    m, cfg = config.load(flags + others, MPTConfig, TrainConfig)
    fleet = replace(fleet, devices=int(row["ranks"]), tp=1, pp=1, interleave=1)
    rate, found = positive("tokens_per_second", row["tokens_per_second"]), 1.0
    for _ in range(20):  # a fixed point, since traffic hides behind compute
        found *= step_time.tokens_per_second(m, cfg, fleet, Constants(pace=found), trainer) / rate
        require(
            0.05 < found < 20,
            f"{rate:g} tokens/s are {found:.2g} times the predicted time: is --device right?",
        )
    return found


def main(argv: list[str]) -> None:
    paths = [text for text in argv if not text.startswith("-")]
    (args,) = config.load([text for text in argv if text.startswith("-")], CalibrateArgs)
    require(len(paths) == 1, "usage: python -m planning.calibrate results.csv --device=mi250")
    before = Fleet(devices.by_name(args.device), 1, args.node_size, args.network)
    fleet, c = from_file(paths[0], before, step_time.OURS)
    for part in ("reachable", "bandwidth_gbs", "link_gbs"):
        print(
            f"{part:<16}{getattr(fleet.device, part) or 0:>12.4g}  before: {getattr(before.device, part)}"
        )
    print(f"{'network_gbs':<16}{fleet.network_gbs:>12.4g}  before: {before.network_gbs}")
    print(f"{'hop, us':<16}{c.hop * 1e6:>12.4g}  before: {Constants().hop * 1e6:.4g}")
    print(f"{'pace':<16}{c.pace:>12.4g}  before: 1")


if __name__ == "__main__":
    config.run(main)
