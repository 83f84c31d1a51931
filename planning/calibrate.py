"""Measurements of a machine as inputs of planning/step_time.py: from a few runs, predict a fleet.

    machine.json of `bench machine`    speeds of matmuls, memory and links, for the datasheet's
    a .csv of `bench train`            one pace, from all runs of our trainer in bf16

    pace = geometric mean over the runs of (measured / predicted seconds)

The pace multiplies the seconds of compute and not those of links, so it is found in several rounds.

`--save` keeps the measurements in one file, to which later ones can be added:

    python -m planning.calibrate results.csv machine.json --device=mi250 --save=my_machine.json
    python -m planning.calibrate my_machine.json more.csv --save=my_machine.json
    python plan.py configs/mpt7b.py --calibrate=my_machine.json

It prints every run beside its prediction.
"""

import contextlib
import json
import math
import statistics
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import config
import devices
import flops
import program
from config import MPTConfig, TrainConfig, UserError, require
from planning import step_time
from planning.fleet import Fleet, FleetArgs, fleet_of, with_flags, with_node_size
from planning.step_time import Constants, Trainer
from storage import files

# The columns of a table that are settings of the run.
COLUMNS = """d_model n_layers n_heads max_seq_len vocab_size microbatch_size global_batch_size
    sharding shard_size activation_checkpointing recompute_every compile""".split()
KINDS = "a table of `bench train`, a machine.json of `bench machine` or a file of --save"


@dataclass
class CalibrateArgs(FleetArgs):
    """Where it was measured, and where to keep it."""

    save: str = ""  # a .json: keep the measurements


@dataclass(frozen=True)
class Run:
    """A measured run."""

    flags: str  # its settings
    ranks: int
    nodes: int  # 0: unknown
    tokens_per_second: float  # of all ranks

    def predicted(self, fleet: Fleet, c: Constants, trainer: Trainer) -> float:
        """Tokens/s of all ranks as predicted, on nodes as recorded, else as `fleet` has them."""
        m, cfg = settings_of_flags(self.flags.split())
        node_size = max(fleet.node_size, self.ranks if self.nodes else 0)
        if self.nodes > 1:
            node_size = math.ceil(self.ranks / self.nodes)
        fleet = replace(fleet, devices=self.ranks, node_size=node_size, tp=cfg.tp, pp=cfg.pp)
        return step_time.tokens_per_second(m, cfg, fleet, c, trainer)


@dataclass(frozen=True)
class Measured:
    """What a file holds."""

    device: str  # as it reports its name
    machine: dict  # the contents of a machine.json; {} if there is none
    runs: list[Run]
    node_size: int | None = None  # as somebody has set it


# --------------------------------------------------------------------------------------------------
# Files


def read(path: str) -> Measured:
    """What a file has measured. Raises UserError if it is missing or of another kind."""
    require(Path(path).is_file(), f"no file {path!r} to calibrate with")
    with naming_errors(path):
        if path.endswith(".csv"):
            return read_table(files.read_csv(path, ["status"], "a table of `bench train`"))
        measured = files.read_json(path, fix=f"this is not {KINDS}")
        attention = "of `bench attention`: set the share that it reaches as --attention_efficiency"
        require("cells" not in measured, attention)
        if "runs" not in measured:
            return Measured(str(measured["device"]), measured, [])
        runs = [Run(**values) for values in measured["runs"]]
        return Measured(measured["device"], measured["machine"], runs, measured["node_size"])


def read_table(rows: list[dict]) -> Measured:
    """The rows of this project's trainer in bf16 with status ok. Raises UserError."""
    usable = []
    for row in rows:
        is_ok = row["status"] == "ok" and row["precision"].startswith("bf16")
        if is_ok and not row["model"].startswith("transformers"):
            usable.append(row)
    require(usable, "no row of this project's trainer in bf16 with status ok")
    names = sorted({row["device"] for row in usable})
    require(len(names) == 1, f"rows of several devices: {', '.join(names)}")
    runs = []
    for row in usable:
        nodes = int(row.get("nodes") or 0)
        rate = float(row["tokens_per_second"])
        runs.append(Run(" ".join(flags_of(row)), int(row["ranks"]), nodes, rate))
    return Measured(names[0], {}, runs)


def flags_of(row: dict) -> list[str]:
    """The settings of a row that the planner reads."""
    flags = [f"--{name}={row[name]}" for name in COLUMNS if row.get(name)]
    return flags + [f"--{setting}" for setting in row.get("others", "").split()]


def settings_of(row: dict) -> tuple[MPTConfig, TrainConfig]:
    """The settings of a row of `bench train` that the planner reads. Raises UserError."""
    return settings_of_flags(flags_of(row))


def settings_of_flags(flags: list[str]) -> tuple[MPTConfig, TrainConfig]:
    """The settings that these flags are. Raises UserError."""
    require("--help" not in flags, "a row with the setting help")
    m, cfg = config.load(flags, MPTConfig, TrainConfig)
    return m, cfg


@contextlib.contextmanager
def naming_errors(path: str):
    """Raise what is wrong with a file's contents as a UserError of one line that names it."""
    try:
        yield
    except UserError as error:
        message = str(error)
        raise UserError(message if path in message else f"{path}: {message}") from error
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        cause = f"{type(error).__name__} {config.one_line(error)}"
        raise UserError(f"{path} is not {KINDS}: {cause}") from error


def device_of(path: str) -> str:
    """The name of the device that a file was measured on, as it reports it. Raises UserError."""
    name = read(path).device
    require(bool(name), f"{path} names no device: set --device")
    return name


def require_same_device(reported: str, device: devices.Device) -> None:
    """UserError if `reported`, a device's own name, is that of another device.

    Many devices report a name that says nothing; those pass.
    """
    name = reported.lower()
    known = [row.name for row in devices.TABLE if any(text in name for text in row.reports)]
    may_be = device.name in known or (not known and name != "cpu")
    require(may_be, f"measured on {reported!r}, not on {device.name}: set --device to match")


# --------------------------------------------------------------------------------------------------
# What follows from them


@dataclass(frozen=True)
class Calibration:
    """What was measured, and what follows."""

    fleet: Fleet
    c: Constants
    machine: dict  # the contents of machine.json; {} if there is none
    runs: list[Run]
    predicted: list[float]  # tokens/s of each run


def from_file(path: str, fleet: Fleet, trainer: Trainer) -> tuple[Fleet, Constants]:
    """`fleet` and the constants with what the file has measured. See `from_files`."""
    found = from_files([path], fleet, trainer)
    return found.fleet, found.c


def from_files(paths: list[str], fleet: Fleet, trainer: Trainer) -> Calibration:
    """What all files together have measured. Of two machine.json the later one counts.

    Device, nodes and network of `fleet` are used, not how many devices it has. Raises UserError if
    a file is missing, broken, or measured on another device.
    """
    machine, runs = {}, []
    for measured in map(read, paths):
        machine = measured.machine or machine
        runs += measured.runs
        with naming_errors(" ".join(paths)):
            require_same_device(measured.device, fleet.device)
            fleet = with_node_size(fleet, measured.node_size or fleet.node_size)

    with naming_errors(" ".join(paths)):
        runs = list(dict.fromkeys(runs))  # each once
        fleet, c = from_machine(machine, fleet) if machine else (fleet, Constants())
        c, predicted = with_pace(runs, fleet, c, trainer)
        notes = (*fleet.notes, *notes_of(runs, predicted, fleet))
    return Calibration(replace(fleet, notes=notes), c, machine, runs, predicted)


def from_machine(measured: dict, fleet: Fleet) -> tuple[Fleet, Constants]:
    """measured: the contents of machine.json, whose keys bench/machine.py describes.

    Of several nodes, they say how large a node is.
    """
    ranks, nodes = measured["ranks"], measured["nodes"]  # global ranks
    c = Constants()
    reachable = max(measured["matmul_tflops"]["bf16"].values()) / fleet.device.bf16_tflops
    share = f"matmuls at {reachable:.0%} of {fleet.device.name}'s peak"
    require(0 < reachable <= 1, f"{share}: is --device right?")

    # Collectives reach c.link of a link's bandwidth, so the link has their speed / c.link.
    link_gbs = {
        group: max(collectives["all_gather"].values()) / c.link
        for group, collectives in measured["collectives_gbs"].items()
    }
    in_node = link_gbs.get("node") or (link_gbs.get("all") if nodes == 1 else None)
    figures = [measured["memory_gbs"], *link_gbs.values()]
    require(all(0 < gbs < math.inf for gbs in figures), "a bandwidth is 0 GB/s or less")

    device = replace(
        fleet.device,
        reachable=reachable,
        bandwidth_gbs=measured["memory_gbs"],
        link_gbs=in_node or fleet.device.link_gbs,
    )
    on = f"{nodes} nodes" if nodes > 1 else f"{ranks} devices of one node"
    note = f"speeds of matmuls, memory and links as `bench machine` measured them on {on}"
    fleet = replace(fleet, device=device, notes=(*fleet.notes, note))
    if nodes > 1:
        fleet = with_node_size(fleet, math.ceil(ranks / nodes))
        # The figure has lost already what so many nodes lose to collisions.
        network_gbs = link_gbs["all"] / replace(fleet, devices=ranks).share_of_network
        fleet = replace(fleet, network_gbs=network_gbs, network_from="measured")
    if ranks > 1:
        hops = 2 * (ranks - 1)  # an all-reduce goes round twice
        c = replace(c, hop=measured["latency_us"]["all"] * 1e-6 / hops)
    return fleet, c


def with_pace(
    runs: list[Run], fleet: Fleet, c: Constants, trainer: Trainer
) -> tuple[Constants, list[float]]:
    """The constants with the pace of these runs, and the tokens/s then predicted for each.

    Raises UserError if a run cannot be right.
    """
    if not runs:
        return c, []
    for _ in range(20):
        predicted = [run.predicted(fleet, c, trainer) for run in runs]
        times = [rate / run.tokens_per_second for rate, run in zip(predicted, runs, strict=True)]
        for run, ratio in zip(runs, times, strict=True):
            slow = f"{run.tokens_per_second:g} tokens/s take {ratio:.2g} times the predicted time"
            require(0.05 < ratio < 20, f"{slow}: is --device right?")
        error = statistics.geometric_mean(times)
        if abs(error - 1) < 1e-6:
            break
        c = replace(c, pace=c.pace * error)
    return c, predicted


def notes_of(runs: list[Run], predicted: list[float], fleet: Fleet) -> list[str]:
    """What a plan says of the runs: how alike they are, and which are faster than matmuls."""
    if not runs:
        rest = "no training run was measured: the rest is LLM Foundry's of 2023, on A100 and H100"
        return [rest]
    pairs = list(zip(runs, predicted, strict=True))
    largest = max(abs(rate / run.tokens_per_second - 1) for run, rate in pairs)
    count = f"{len(runs)} run{'s' * (len(runs) > 1)}"
    lines = [f"speed calibrated by {count}, which it predicts within {largest:.1%}"]
    reachable = fleet.device.reachable or Constants().reachable
    for run in runs:
        m, cfg = settings_of_flags(run.flags.split())
        per_flop = run.tokens_per_second / run.ranks / fleet.device.bf16_tflops / 1e12
        setup = flops.setup_of(cfg)
        shares = [per_flop * flops.flops_of(m, name, setup)[1] for name in ("foundry", "causal")]
        doubt = flops.doubt(*shares, reachable)
        if doubt:
            lines.append(f"DOUBTFUL: {run.tokens_per_second:g} tokens/s on {run.ranks}: {doubt}")
    return lines


# --------------------------------------------------------------------------------------------------
# The program


def save(path: str, device: str, found: Calibration) -> None:
    """Keep the measurements in a file. device: as it reports its name. Raises UserError."""
    require(path.endswith(".json"), f"--save={path}: give the name of a .json file")
    measurements = {
        "device": device,
        "node_size": found.fleet.node_size,
        "machine": {name: value for name, value in found.machine.items() if name != "by_rank"},
        "runs": [asdict(run) for run in found.runs],
    }
    files.write_atomically(path, json.dumps(measurements, indent=1).encode())


def report(before: Fleet, found: Calibration) -> str:
    """The inputs of planning/step_time.py before and after, and every run."""
    device, old = found.fleet.device, before.device
    inputs = [
        ("share of the peak that matmuls reach", device.reachable, old.reachable),
        ("memory, GB/s", device.bandwidth_gbs, old.bandwidth_gbs),
        ("link, GB/s", device.link_gbs, old.link_gbs),
        ("network of a node, GB/s", found.fleet.network_gbs, before.network_gbs),
        ("latency of a hop, us", found.c.hop * 1e6, Constants().hop * 1e6),
        ("pace", found.c.pace, 1.0),
    ]
    rows = [(name, *(f"{value or math.nan:.4g}" for value in pair)) for name, *pair in inputs]
    tables = [program.table(("input", "now", "before"), rows)]
    rows = []
    for run, rate in zip(found.runs, found.predicted, strict=True):
        error = rate / run.tokens_per_second - 1
        figures = f"{run.tokens_per_second:,.0f}", f"{rate:,.0f}", f"{error:+.1%}"
        rows.append((run.ranks, *figures, run.flags.replace("--", "")))
    if rows:
        tables.append(program.table(("ranks", "tokens/s", "predicted", "error", "run"), rows))
    return "\n\n".join([*tables, "\n".join(found.fleet.notes)])


def main(argv: list[str]) -> None:
    """Print what the files in argv measure, and keep it if asked."""
    paths = [text for text in argv if not text.startswith("-")]
    (args,) = config.load([text for text in argv if text.startswith("-")], CalibrateArgs)
    usage = "python -m planning.calibrate results.csv machine.json --device=mi250"
    require(paths, f"usage: {usage}")
    reported = device_of(paths[0])
    if args.device == "auto" and not args.machine:
        args = replace(args, device=reported)
    before = fleet_of(args)
    found = from_files(paths, before, step_time.OURS)
    found = replace(found, fleet=with_flags(found.fleet, args))
    print(report(before, found))
    if args.save:
        save(args.save, reported, found)


if __name__ == "__main__":
    config.run(main)
