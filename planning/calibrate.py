"""Measurements of one machine as inputs of planning/step_time.py: from one node, predict a fleet.

A machine.json of `bench machine` replaces the datasheet's speeds of matmuls, memory and links with
measured ones. A .csv table of `bench train` gives one number, the pace:

    pace = measured / predicted seconds of compute

It is the geometric mean over the rows; the time of traffic stays as predicted.

Run `python -m planning.calibrate results.csv --device=mi250`, or give the file to plan.py.
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

# The columns of a table that are settings of the run.
COLUMNS = """d_model n_layers n_heads max_seq_len vocab_size microbatch_size global_batch_size
    sharding activation_checkpointing recompute_every""".split()


@dataclass
class CalibrateArgs:
    """Where it was measured."""

    device: str = "auto"  # mi250, h100, ...
    node_size: int = 8  # torch devices of a node
    network: float = 100.0  # GB/s of a node, each way


def from_file(path: str, fleet: Fleet, trainer: Trainer) -> tuple[Fleet, Constants]:
    """`fleet` and the constants with what the file has measured.

    Device, nodes and network of `fleet` are used, not how many devices it has. Raises UserError if
    the file is missing, broken, or measured on another device.
    """
    require(Path(path).is_file(), f"no file {path!r} to calibrate with")
    is_table = path.endswith(".csv")
    kind = "a table of `bench train`" if is_table else "a machine.json of `bench machine`"
    try:
        if is_table:
            return fleet, Constants(pace=pace(path, fleet, trainer))
        measured = files.read_json(path, fix=f"this is not {kind}")
        return from_machine(measured, fleet)
    except UserError as error:
        message = str(error)
        raise UserError(message if path in message else f"{path}: {message}") from error
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        cause = f"{type(error).__name__} {config.one_line(error)}"
        raise UserError(f"{path} is not {kind}: {cause}") from error


# --------------------------------------------------------------------------------------------------
# machine.json


def from_machine(measured: dict, fleet: Fleet) -> tuple[Fleet, Constants]:
    """measured: the contents of machine.json, whose keys bench/machine.py describes."""
    require_same_device(measured["device"], fleet.device)
    ranks = measured["ranks"]  # global ranks
    is_count = files.has_type(ranks, int) and ranks > 0
    require(is_count, f"ranks must be at least 1, not {files.shown(ranks)}")
    c = Constants()

    tflops = positive("matmul_tflops", max(measured["matmul_tflops"]["bf16"].values()))
    reachable = tflops / fleet.device.bf16_tflops
    share = f"matmuls at {reachable:.0%} of {fleet.device.name}'s peak"
    require(reachable <= 1, f"{share}: is --device right?")
    memory_gbs = positive("memory_gbs", measured["memory_gbs"])

    # Collectives reach c.link of a link's bandwidth, so the link has their speed / c.link.
    link_gbs = {}
    for group, collectives in measured["collectives_gbs"].items():
        fastest = max(collectives["all_gather"].values())
        link_gbs[group] = positive("collectives_gbs", fastest) / c.link
    one_node = measured["nodes"] == 1
    in_node = link_gbs.get("node") or (link_gbs.get("all") if one_node else None)

    device = replace(
        fleet.device,
        reachable=reachable,
        bandwidth_gbs=memory_gbs,
        link_gbs=in_node or fleet.device.link_gbs,
    )
    network_gbs = link_gbs["all"] if measured["nodes"] > 1 else fleet.network_gbs
    fleet = replace(fleet, device=device, network_gbs=network_gbs)
    if ranks == 1:
        return fleet, c
    latency = positive("latency_us", measured["latency_us"]["all"]) * 1e-6
    return fleet, replace(c, hop=latency / (2 * (ranks - 1)))  # an all-reduce goes round twice


def positive(name: str, number) -> float:
    """`number` as a float, or UserError: else a bad figure would only show in an absurd plan."""
    require(0 < float(number) < math.inf, f"{name} must be more than 0, not {number}")
    return float(number)


def require_same_device(reported: str, device: devices.Device) -> None:
    """UserError if `reported`, a device's own name, is that of another device.

    Many devices report a name that says nothing; those pass.
    """
    name = reported.lower()
    known = [row.name for row in devices.TABLE if any(text in name for text in row.reports)]
    says_nothing = not known and name != "cpu"
    may_be = device.name in known or says_nothing
    require(may_be, f"measured on {reported!r}, not on {device.name}: set --device to match")


# --------------------------------------------------------------------------------------------------
# A table of `bench train`


def pace(path: str, fleet: Fleet, trainer: Trainer) -> float:
    """Measured / predicted seconds of compute: the geometric mean of the table's usable rows.

    The rows of this project's trainer in bf16 with status ok are usable.
    """
    rows = []
    for row in files.read_csv(path, ["status"], "a table of `bench train`"):
        if row["status"] != "ok" or not row["precision"].startswith("bf16"):
            continue
        if not row["model"].startswith("transformers"):
            rows.append(row)
    require(rows, f"{path} has no row of this project's trainer in bf16 with status ok")
    logs = [math.log(pace_of(row, fleet, trainer)) for row in rows]
    return math.exp(sum(logs) / len(rows))


def pace_of(row: dict, fleet: Fleet, trainer: Trainer) -> float:
    """`pace` of one row of the table. Raises UserError if it cannot be of this device."""
    require_same_device(row["device"], fleet.device)
    m, cfg = settings_of(row)
    fleet = replace(fleet, devices=int(row["ranks"]), tp=cfg.tp, pp=cfg.pp, interleave=1)

    measured = positive("tokens_per_second", row["tokens_per_second"])
    estimate = 1.0
    for _ in range(20):  # find the fixed point: how much traffic overlaps depends on the pace
        c = Constants(pace=estimate)
        estimate *= step_time.tokens_per_second(m, cfg, fleet, c, trainer) / measured
        times = f"{measured:g} tokens/s take {estimate:.2g} times the predicted time"
        require(0.05 < estimate < 20, f"{times}: is --device right?")
    return estimate


def settings_of(row: dict) -> tuple[MPTConfig, TrainConfig]:
    """The settings of a row of `bench train` that the planner reads. Raises UserError."""
    flags = [f"--{name}={row[name]}" for name in COLUMNS if row.get(name)]
    others = [f"--{setting}" for setting in row.get("others", "").split()]
    require("--help" not in others, "a row with the setting help")
    m, cfg = config.load(flags + others, MPTConfig, TrainConfig)
    return m, cfg


def main(argv: list[str]) -> None:
    """Print the inputs of planning/step_time.py before and after the measurement."""
    paths = [text for text in argv if not text.startswith("-")]
    (args,) = config.load([text for text in argv if text.startswith("-")], CalibrateArgs)
    require(len(paths) == 1, "usage: python -m planning.calibrate results.csv --device=mi250")
    before = Fleet(devices.by_name(args.device), 1, args.node_size, args.network)
    fleet, c = from_file(paths[0], before, step_time.OURS)
    for part in ("reachable", "bandwidth_gbs", "link_gbs"):
        new = getattr(fleet.device, part) or 0
        print(f"{part:<16}{new:>12.4g}  before: {getattr(before.device, part)}")
    print(f"{'network_gbs':<16}{fleet.network_gbs:>12.4g}  before: {before.network_gbs}")
    print(f"{'hop, us':<16}{c.hop * 1e6:>12.4g}  before: {Constants().hop * 1e6:.4g}")
    print(f"{'pace':<16}{c.pace:>12.4g}  before: 1")


if __name__ == "__main__":
    config.run(main)
