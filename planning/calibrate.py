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
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import config
import devices
import program
from config import MPTConfig, TrainConfig
from planning import step_time
from planning.fleet import Fleet, FleetArgs, fleet_of
from planning.step_time import Constants
from program import UserError, require
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

    def predicted(self, fleet: Fleet, c: Constants) -> float:
        """Tokens/s of all ranks as predicted, on nodes as recorded, else as `fleet` has them."""
        require("--help" not in self.flags.split(), "a row with the setting help")
        m, cfg = config.load(self.flags.split(), MPTConfig, TrainConfig)
        node_size = math.ceil(self.ranks / self.nodes) if self.nodes else fleet.node_size
        fleet = replace(fleet, devices=self.ranks, node_size=node_size)
        return step_time.tokens_per_second(m, cfg, fleet, c)


@dataclass
class Measured:
    """What files hold: the contents of a file of --save."""

    device: str  # as it reports its name
    node_size: int | None = None  # torch devices of a node, as somebody has set it
    machine: dict = field(default_factory=dict)  # the contents of a machine.json
    runs: list[Run] = field(default_factory=list)


# --------------------------------------------------------------------------------------------------
# Files


@contextlib.contextmanager
def naming_errors(path: str):
    """Raise what is wrong with a file's contents as a UserError of one line that names it."""
    try:
        yield
    except UserError as error:
        message = str(error)
        raise UserError(message if path in message else f"{path}: {message}") from error
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        cause = f"{type(error).__name__} {program.one_line(error)}"
        raise UserError(f"{path} is not {KINDS}: {cause}") from error


def read(path: str) -> Measured:
    """What a file has measured. Raises UserError if it is missing or of another kind."""
    require(Path(path).is_file(), f"no file {path!r} to calibrate with: name {KINDS}")
    with naming_errors(path):
        if path.endswith(".csv"):
            return read_table(files.read_csv(path, ["status"], "a table of `bench train`"))
        found = files.read_json(path, fix=f"this is not {KINDS}")
        if "runs" not in found:
            return Measured(str(found["device"]), machine=found)
        runs = [Run(**values) for values in found["runs"]]
        return Measured(found["device"], found["node_size"], found["machine"], runs)


def read_table(rows: list[dict]) -> Measured:
    """The rows of this project's trainer in bf16 with status ok. Raises UserError."""
    runs, names = [], set()
    for row in rows:
        is_ok = row["status"] == "ok" and row["precision"].startswith("bf16")
        if is_ok and not row["model"].startswith("transformers"):
            rate = float(row["tokens_per_second"])
            nodes = int(row.get("nodes") or 0)
            runs.append(Run(" ".join(flags_of(row)), int(row["ranks"]), nodes, rate))
            names.add(row["device"])
    require(runs, "no row of this project's trainer in bf16 with status ok")
    require(len(names) == 1, f"rows of several devices: {', '.join(sorted(names))}")
    return Measured(names.pop(), runs=runs)


def flags_of(row: dict) -> list[str]:
    """The settings of a row that the planner reads."""
    flags = [f"--{name}={row[name]}" for name in COLUMNS if row.get(name)]
    return flags + [f"--{setting}" for setting in row.get("others", "").split()]


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


def from_files(paths: list[str], args: FleetArgs) -> tuple[Measured, Fleet, Constants]:
    """What all files together have measured, and the fleet and the constants that follow.

    A measurement takes the place of a flag that is not set. Of two machine.json the later one
    counts. Raises UserError if a file is missing, broken, or of another device.
    """
    files_read = [read(path) for path in paths]
    measured = files_read[0]
    if args.device in devices.THIS_MACHINE and not args.machine:
        require(bool(measured.device), f"{paths[0]} names no device: set --device")
        args = replace(args, device=measured.device)
    with naming_errors(" ".join(paths)):
        device = fleet_of(args).device
        runs = {}  # each once
        for one in files_read:
            require_same_device(one.device, device)
            measured.node_size = one.node_size or measured.node_size
            measured.machine = one.machine or measured.machine
            runs |= dict.fromkeys(one.runs)
        measured.runs = list(runs)
        args = replace(args, node_size=args.node_size or measured.node_size or 0)

        fleet, c = fleet_of(args), Constants()
        if measured.machine:
            fleet, c = from_machine(measured.machine, args)
        c = with_pace(measured.runs, fleet, c)
        errors = [run.predicted(fleet, c) / run.tokens_per_second - 1 for run in runs]
    measured.node_size = fleet.node_size
    note = "no training run was measured: the rest is LLM Foundry's of 2023, on A100 and H100"
    if runs:
        found = f"speed calibrated by {len(runs)} run{'s' * (len(runs) > 1)} (pace {c.pace:.3g})"
        note = f"{found}, which it predicts within {max(map(abs, errors)):.1%}"
    return measured, replace(fleet, notes=(*fleet.notes, note)), c


def from_machine(measured: dict, args: FleetArgs) -> tuple[Fleet, Constants]:
    """The fleet of args with the contents of a machine.json, whose keys bench/machine.py describes.

    Of several nodes, they say how large a node is.
    """
    ranks, nodes = measured["ranks"], measured["nodes"]  # global ranks
    c = Constants()
    # Collectives reach c.link of a link's bandwidth, so the link has their speed / c.link.
    link_gbs = {
        group: max(collectives["all_gather"].values()) / c.link
        for group, collectives in measured["collectives_gbs"].items()
    }
    figures = [measured["memory_gbs"], *link_gbs.values()]
    require(all(0 < gbs < math.inf for gbs in figures), "a bandwidth is 0 GB/s or less")
    args = replace(args, bandwidth=args.bandwidth or measured["memory_gbs"])
    if nodes > 1:
        args = replace(args, node_size=args.node_size or math.ceil(ranks / nodes))
        # The figure has lost already what so many nodes lose to collisions.
        share = replace(fleet_of(args), devices=ranks).share_of_network
        args = replace(args, network=args.network or link_gbs["all"] / share)

    fleet = fleet_of(args)
    reachable = max(measured["matmul_tflops"]["bf16"].values()) / fleet.device.bf16_tflops
    share = f"matmuls at {reachable:.0%} of {fleet.device.name}'s peak"
    require(0 < reachable <= 1, f"{share}: is --device right?")
    in_node = link_gbs.get("node") or (link_gbs.get("all") if nodes == 1 else None)
    link = in_node or fleet.device.link_gbs
    device = replace(fleet.device, reachable=reachable, link_gbs=link)
    on = f"{nodes} nodes" if nodes > 1 else f"{ranks} devices of one node"
    note = f"speeds of matmuls, memory and links as `bench machine` measured them on {on}"
    if ranks > 1:
        hops = 2 * (ranks - 1)  # an all-reduce goes round twice
        c = replace(c, hop=measured["latency_us"]["all"] * 1e-6 / hops)
    return replace(fleet, device=device, notes=(note,)), c


def with_pace(runs: list[Run], fleet: Fleet, c: Constants) -> Constants:
    """The constants with the pace of these runs. Raises UserError if a run cannot be right."""
    for _ in range(20 if runs else 0):
        times = [run.predicted(fleet, c) / run.tokens_per_second for run in runs]
        for run, ratio in zip(runs, times, strict=True):
            slow = f"{run.tokens_per_second:g} tokens/s take {ratio:.2g} times the predicted time"
            require(0.05 < ratio < 20, f"{slow}: is --device right?")
        error = statistics.geometric_mean(times)
        c = replace(c, pace=c.pace * error)
        if abs(error - 1) < 1e-6:
            break
    return c


# --------------------------------------------------------------------------------------------------
# The program


def main(argv: list[str]) -> None:
    """Print what the files in argv measure, and keep it if asked."""
    paths, args = config.load(argv, CalibrateArgs, takes="FILE ...")
    names_json = not args.save or args.save.endswith(".json")
    require(names_json, f"--save={args.save}: give the name of a .json file")
    measured, fleet, c = from_files(paths, args)
    rows = []
    for run in measured.runs:
        rate = run.predicted(fleet, c)
        error = rate / run.tokens_per_second - 1
        figures = f"{run.tokens_per_second:,.0f}", f"{rate:,.0f}", f"{error:+.1%}"
        rows.append((run.ranks, *figures, run.flags.replace("--", "")))
    if rows:
        print(program.table(("ranks", "tokens/s", "predicted", "error", "run"), rows) + "\n")
    print(*fleet.notes, sep="\n")
    if args.save:
        files.write_atomically(args.save, json.dumps(asdict(measured), indent=1).encode())


if __name__ == "__main__":
    program.run(main)
