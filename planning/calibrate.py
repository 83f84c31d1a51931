"""Measurements of a machine as inputs of planning/step_time.py: from a few runs, predict a fleet.

    machine.json of `bench machine`    speeds of matmuls, memory and links, for the datasheet's
    a .csv of `bench train`            one pace, from all runs of our trainer in bf16

    pace = geometric mean over the runs of (measured / predicted seconds)

The pace multiplies the seconds of compute and not those of links, so it is found in several rounds.

    python plan.py configs/mpt7b.py --calibrate=results.csv
    python -m planning.calibrate results.csv machine.json --device=mi250

The program prints every run beside its prediction.
"""

import contextlib
import math
import os
import statistics
from dataclasses import dataclass, replace
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
KINDS = "a table of `bench train` or a machine.json of `bench machine`"


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


def read(path: str) -> tuple[str, dict, list[Run]]:
    """(the device's own name, a machine.json's contents, a table's runs): one of the two is empty.

    UserError if the file is missing or of another kind.
    """
    require(Path(path).is_file(), f"no file {path!r} to calibrate with: name {KINDS}")
    with naming_errors(path):
        if not path.endswith(".csv"):
            machine = files.read_json(path, fix=f"this is not {KINDS}")
            return str(machine["device"]), machine, []
        runs = {}  # {run: its device}
        for row in files.read_csv(path, ["status"], "a table of `bench train`"):
            is_ok = row["status"] == "ok" and row["precision"].startswith("bf16")
            if is_ok and not row["model"].startswith("transformers"):
                rate, nodes = float(row["tokens_per_second"]), int(row.get("nodes") or 0)
                run = Run(" ".join(flags_of(row)), int(row["ranks"]), nodes, rate)
                runs[run] = row["device"]
        require(runs, "no row of this project's trainer in bf16 with status ok")
        names = sorted(set(runs.values()))
        require(len(names) == 1, f"rows of several devices: {', '.join(names)}")
        return names[0], {}, list(runs)


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


def paths_in(text: str) -> list[str]:
    """The files of --calibrate: one, whose name may have colons, or several with colons between."""
    return [text] if os.path.exists(text) else text.split(":")


def from_files(paths: list[str], args: FleetArgs) -> tuple[list[Run], Fleet, Constants]:
    """The runs of all files, and the fleet and the constants that follow from them.

    A measurement takes the place of a flag that is not set. Of two machine.json the later one
    counts. Raises UserError if a file is missing, broken, or of another device.
    """
    found = [read(path) for path in paths]
    if args.device in devices.THIS_MACHINE and not args.machine:
        name, *_ = found[0]
        require(bool(name), f"{paths[0]} names no device: set --device")
        args = replace(args, device=name)
    with naming_errors(" ".join(paths)):
        fleet, c, runs = fleet_of(args), Constants(), []
        device = fleet.device  # as in the table
        for name, machine, of_table in found:
            require_same_device(name, device)
            runs += of_table
            if machine:
                fleet, c = from_machine(machine, args)
        c = with_pace(runs, fleet, c)
        errors = [run.predicted(fleet, c) / run.tokens_per_second - 1 for run in runs]
    note = "no training run was measured: the rest is LLM Foundry's of 2023, on A100 and H100"
    if runs:
        measured = f"speed calibrated by {len(runs)} run{'s' * (len(runs) > 1)} (pace {c.pace:.3g})"
        note = f"{measured}, which it predicts within {max(map(abs, errors)):.1%}"
    return runs, replace(fleet, notes=(*fleet.notes, note)), c


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
    """Print every run of the files in argv beside its prediction."""
    paths, args = config.load(argv, FleetArgs, takes="FILE ...")
    runs, fleet, c = from_files(paths, args)
    rows = []
    for run in runs:
        rate = run.predicted(fleet, c)
        error = rate / run.tokens_per_second - 1
        figures = f"{run.tokens_per_second:,.0f}", f"{rate:,.0f}", f"{error:+.1%}"
        rows.append((run.ranks, *figures, run.flags.replace("--", "")))
    if rows:
        print(program.table(("ranks", "tokens/s", "predicted", "error", "run"), rows) + "\n")
    print(*fleet.notes, sep="\n")


if __name__ == "__main__":
    program.run(main)
