"""Measurements of a machine as inputs of planning/step_time.py: from a few runs, predict a fleet.

    machine.json of `bench machine`    speeds of matmuls, memory and links, for the datasheet's
    a .json of `bench attention`       what attention reaches
    a .csv of `bench train`            runs on one node: the pace, and what attention reaches
                                       runs on several nodes beside them: the network, too

    pace = measured / predicted seconds of compute

Each run has its own pace: the one at which its prediction is right. Attention and network are what
makes the paces of all runs most alike. The geometric mean of these paces is the machine's. What
attention reaches is fitted only if runs that were left out are then predicted better; the network
only if the runs on several nodes depend on it. If a faster one would change nothing, since links or
computation are what they wait for, then they show only how fast it is at least. A plan says what
was measured and what still is assumed.

`--save` keeps the measurements in one file, to which later ones can be added:

    python -m planning.calibrate results.csv machine.json --device=mi250 --save=my_machine.json
    python -m planning.calibrate my_machine.json more.csv --save=my_machine.json
    python plan.py configs/mpt7b.py --calibrate=my_machine.json

It prints every run beside what the other runs predict for it: the leave-one-out error.
"""

import json
import math
import statistics
from dataclasses import dataclass, replace
from pathlib import Path

import config
import devices
from config import MPTConfig, TrainConfig, UserError, require
from planning import matmuls, step_time
from planning.fleet import Fleet, FleetArgs, fleet_of, with_flags, with_node_size
from planning.step_time import Constants, Trainer
from storage import files

# The columns of a table that are settings of the run.
COLUMNS = """d_model n_layers n_heads max_seq_len vocab_size microbatch_size global_batch_size
    sharding shard_size activation_checkpointing recompute_every compile""".split()
OUR_KERNEL = "ours, ALiBi"  # as bench/attention.py calls it
# The kinds of files.
TABLE = "a table of `bench train`"
ATTENTION = "a .json of `bench attention`"
MACHINE = "a machine.json of `bench machine`"
SAVED = "a file of `planning.calibrate --save`"
# What a file of another kind, or a damaged one, may raise.
FAULTS = (UserError, KeyError, TypeError, ValueError, AttributeError, ArithmeticError)
FEWEST = 3  # runs from which attention is fitted
# Attention is fitted if that divides the leave-one-out error by so much.
BETTER = 1.25
# How far from the assumed value a fitted one may be: STEP to the power of -REACH to REACH.
STEP = 1.02
REACH = 96
# The network is measured if at half of it a run on several nodes would be so much slower, and at
# twice what was found, so much faster.
DEPENDS = 0.02


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
    measured: float  # tokens/s of all ranks

    def settings(self) -> tuple[MPTConfig, TrainConfig]:
        """Its settings that the planner reads. Raises UserError."""
        return settings_of_flags(self.flags.split())

    def node_size(self, fleet: Fleet) -> int:
        """Ranks of a node: what was recorded, else as `fleet` has it."""
        if self.nodes > 1:
            return math.ceil(self.ranks / self.nodes)
        return max(fleet.node_size, self.ranks if self.nodes else 0)

    def is_across(self, fleet: Fleet) -> bool:
        """Did it run on several nodes?"""
        return self.ranks > self.node_size(fleet)


@dataclass(frozen=True)
class Calibration:
    """What was measured, and what follows."""

    fleet: Fleet
    c: Constants
    machine: dict  # the contents of machine.json; {} if there is none
    attention: float | None  # the share of the peak that `bench attention` measured
    runs: list[Run]
    predicted: list[float]  # tokens/s of each run
    left_out: list[float]  # the same by the other runs; empty if there is one run alone


def from_file(path: str, fleet: Fleet, trainer: Trainer) -> tuple[Fleet, Constants]:
    """`fleet` and the constants with what the file has measured. See `from_files`."""
    found = from_files([path], fleet, trainer)
    return found.fleet, found.c


def from_files(paths: list[str], fleet: Fleet, trainer: Trainer) -> Calibration:
    """What all files together have measured.

    Device, nodes and network of `fleet` are used, not how many devices it has. Raises UserError if
    a file is missing, broken, or measured on another device.
    """
    given, c = fleet, Constants()
    machine, attention, runs = {}, None, []
    for path, measured, kind in in_order(paths):
        try:
            if kind == TABLE:
                runs += runs_of_table(measured, path, given.device)
            elif kind == ATTENTION:
                attention = attention_of(measured, given.device)
            elif kind == MACHINE:
                machine = measured
            else:
                given = with_node_size(given, whole_number("node_size", measured["node_size"]))
                runs += runs_of_saved(measured, given.device)
                share = measured["attention"]
                attention = attention if share is None else figure("attention", share)
                machine = measured["machine"] or machine
            fleet, c = from_machine(machine, given) if machine else (given, c)
        except FAULTS as error:
            raise in_one_line(error, path, kind) from error

    fleet = with_attention(fleet, attention)
    runs = list(dict.fromkeys(runs))  # each once
    if not runs:
        rest = "no training run was measured: the rest is LLM Foundry's of 2023, on A100 and H100"
        fleet = replace(fleet, notes=(*fleet.notes, rest))
    found = Calibration(fleet, c, machine, attention, runs, [], [])
    if not runs:
        return found
    try:
        return calibrated(found, trainer)
    except FAULTS as error:
        raise in_one_line(error, " ".join(paths), "a measurement of this device") from error


def in_order(paths: list[str]) -> list[tuple[str, dict | list, str]]:
    """(path, content, kind) of each file, in the order in which later ones replace earlier ones.

    Files of --save come first, since what is named beside them is newer.
    """
    contents = [(path, *read(path)) for path in paths]
    return sorted(contents, key=lambda file: file[2] != SAVED)


def is_table(path: str) -> bool:
    """Is this a table of `bench train`?"""
    return path.endswith(".csv")


def read(path: str) -> tuple[dict | list, str]:
    """(the content of a file, what kind of file that is). Raises UserError."""
    require(Path(path).is_file(), f"no file {path!r} to calibrate with")
    if is_table(path):
        return files.read_csv(path, ["status"], TABLE), TABLE
    measured = files.read_json(path, fix=f"this is not {MACHINE}, nor {SAVED}")
    if "cells" in measured:
        return measured, ATTENTION
    return measured, SAVED if "runs" in measured else MACHINE


def in_one_line(error: Exception, path: str, kind: str) -> UserError:
    """What is wrong with a file, as a UserError that names it."""
    if isinstance(error, UserError):
        message = str(error)
        return UserError(message if path in message else f"{path}: {message}")
    cause = f"{type(error).__name__} {config.one_line(error)}"
    return UserError(f"{path} is not {kind}: {cause}")


def device_of(path: str) -> str:
    """The name of the device that a file was measured on, as it reports it. Raises UserError."""
    measured, _ = read(path)
    rows = measured if is_table(path) else [measured]
    names = [row.get("device") for row in rows if row.get("status", "ok") == "ok"]
    name = next(filter(None, names), "")
    require(isinstance(name, str) and name, f"{path} names no device: set --device")
    return name


# --------------------------------------------------------------------------------------------------
# machine.json


def from_machine(measured: dict, fleet: Fleet) -> tuple[Fleet, Constants]:
    """measured: the contents of machine.json, whose keys bench/machine.py describes.

    Of several nodes, they say how large a node is.
    """
    require_same_device(measured["device"], fleet.device)
    ranks = whole_number("ranks", measured["ranks"])  # global ranks
    nodes = whole_number("nodes", measured["nodes"])
    c = Constants()

    tflops = figure("matmul_tflops", max(measured["matmul_tflops"]["bf16"].values()))
    reachable = tflops / fleet.device.bf16_tflops
    share = f"matmuls at {reachable:.0%} of {fleet.device.name}'s peak"
    require(reachable <= 1, f"{share}: is --device right?")
    memory_gbs = figure("memory_gbs", measured["memory_gbs"])

    # Collectives reach c.link of a link's bandwidth, so the link has their speed / c.link.
    link_gbs = {}
    for group, collectives in measured["collectives_gbs"].items():
        fastest = max(collectives["all_gather"].values())
        link_gbs[group] = figure("collectives_gbs", fastest) / c.link
    in_node = link_gbs.get("node") or (link_gbs.get("all") if nodes == 1 else None)

    device = replace(
        fleet.device,
        reachable=reachable,
        bandwidth_gbs=memory_gbs,
        link_gbs=in_node or fleet.device.link_gbs,
    )
    note = machine_note(ranks, nodes)
    fleet = replace(fleet, device=device, notes=(*fleet.notes, note))
    if nodes > 1:
        fleet = with_node_size(fleet, math.ceil(ranks / nodes))
        # The figure has lost already what so many nodes lose to collisions.
        network_gbs = link_gbs["all"] / replace(fleet, devices=ranks).share_of_network
        fleet = replace(fleet, network_gbs=network_gbs, network_from="measured")
    if ranks == 1:
        return fleet, c
    latency = figure("latency_us", measured["latency_us"]["all"]) * 1e-6
    return fleet, replace(c, hop=latency / (2 * (ranks - 1)))  # an all-reduce goes round twice


def machine_note(ranks: int, nodes: int) -> str:
    """What a plan says of a machine.json of so many ranks."""
    if ranks == 1:
        return "speeds of matmuls and memory as `bench machine` measured them on one device"
    note = "speeds of matmuls, memory and links as `bench machine` measured them"
    if nodes > 1:
        return note
    return f"{note} on one node; its latency is taken between nodes, too"


def whole_number(name: str, number) -> int:
    """`number` if it is a whole one above 0, or UserError."""
    number = config.parse_number(number) if isinstance(number, str) else number
    is_whole = files.has_type(number, int)
    require(is_whole, f"{name} is {files.shown(number)}, expected a whole number")
    config.check_range(name, number)
    return number


def figure(name: str, number) -> float:
    """`number`, also as text, if it is in its range; or UserError.

    Otherwise a bad figure would only show in an absurd plan.
    """
    number = config.parse_number(number) if isinstance(number, str) else number
    require(files.has_type(number, float), f"{name} is {files.shown(number)}, expected a number")
    config.check_range(name, number)
    return float(number)


def attention_of(measured: dict, device: devices.Device) -> float:
    """The share of the peak that the trainer's kernel reached over sequences of usual lengths.

    measured: the contents of a .json of `bench attention`, which counts FLOPs as StepTime does.
    """
    require_same_device(measured["device"], device)
    rates = []
    for cell in measured["cells"]:
        if cell["contestant"] == OUR_KERNEL and not cell["missing"] and cell["length"] >= 1024:
            column = "forward + backward, TFLOP/s"
            rates.append(figure(column, cell[column]))
    require(rates, f"no figures of {OUR_KERNEL!r} over 1,024 tokens or more")
    share = statistics.median(rates) / device.bf16_tflops
    require(share <= 1, f"attention at {share:.0%} of {device.name}'s peak: is --device right?")
    return figure("attention", share)


def with_attention(fleet: Fleet, share: float | None) -> Fleet:
    """`fleet` with what attention was measured to reach; None: it was not."""
    if not share:
        return fleet
    note = f"attention at {share:.0%} of the peak, as `bench attention` measured our kernel"
    device = replace(fleet.device, attention=share)
    return replace(fleet, device=device, notes=(*fleet.notes, note))


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
# Runs: the rows of a table of `bench train`


def runs_of_table(rows: list[dict], path: str, device: devices.Device) -> list[Run]:
    """The rows of this project's trainer in bf16 with status ok. Raises UserError."""
    usable = []
    for row in rows:
        if row["status"] != "ok" or not row["precision"].startswith("bf16"):
            continue
        if not row["model"].startswith("transformers"):
            usable.append(row)
    require(usable, f"{path} has no row of this project's trainer in bf16 with status ok")
    return [run_of_row(row, device) for row in usable]


def run_of_row(row: dict, device: devices.Device) -> Run:
    """A row of a table. Raises UserError if it cannot be of this device."""
    require_same_device(row["device"], device)
    measured = figure("tokens_per_second", row["tokens_per_second"])
    nodes = whole_number("nodes", row["nodes"]) if row.get("nodes") else 0
    return Run(" ".join(flags_of(row)), whole_number("ranks", row["ranks"]), nodes, measured)


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


def runs_of_saved(saved: dict, device: devices.Device) -> list[Run]:
    """The runs in a file of --save. Raises UserError if they are of another device."""
    require_same_device(saved["device"], device)
    runs = []
    for values in saved["runs"]:
        measured = figure("tokens_per_second", values["tokens_per_second"])
        ranks = whole_number("ranks", values["ranks"])
        nodes = whole_number("nodes", values["nodes"]) if values["nodes"] else 0
        runs.append(Run(str(values["flags"]), ranks, nodes, measured))
    return runs


# --------------------------------------------------------------------------------------------------
# The fit


@dataclass(frozen=True)
class Found:
    """What a fit has found."""

    attention: float | None  # share of the peak; None: not fitted
    network_gbs: float | None  # None: nothing is known of it
    is_least: bool  # the network may be faster: these runs would not show it
    log_pace: float


class Fit:
    """The constants at which runs agree best on one pace."""

    def __init__(self, runs: list[Run], fleet: Fleet, c: Constants, trainer: Trainer):
        self.runs = runs
        self.settings = [run.settings() for run in runs]
        self.fleet = fleet
        self.c = c
        self.trainer = trainer
        self.is_across = [run.is_across(fleet) for run in runs]
        self.known = {}  # {(run, attention, network_gbs): log of its pace}
        self.attention = None  # what it reaches by all runs; None: not fitted

    def rate(self, i: int, found: Found) -> float:
        """Predicted tokens/s of run i."""
        m, cfg = self.settings[i]
        run = self.runs[i]
        attention = found.attention or self.fleet.device.attention
        fleet = replace(
            self.fleet,
            device=replace(self.fleet.device, attention=attention),
            devices=run.ranks,
            node_size=run.node_size(self.fleet),
            network_gbs=found.network_gbs or self.fleet.network_gbs,
            tp=cfg.tp,
            pp=cfg.pp,
        )
        c = replace(self.c, pace=math.exp(found.log_pace))
        return step_time.tokens_per_second(m, cfg, fleet, c, self.trainer)

    def log_pace(self, i: int, attention: float | None, network_gbs: float | None) -> float:
        """The logarithm of the pace at which run i is predicted as measured.

        By the secant method: how much traffic overlaps depends on the pace.
        """
        key = i, attention, network_gbs
        if key in self.known:
            return self.known[key]
        estimate, slope = 0.0, 1.0  # of log(seconds) over log(pace)
        last_estimate = last_error = None
        for _ in range(30):
            rate = self.rate(i, Found(attention, network_gbs, False, estimate))
            error = math.log(rate / self.runs[i].measured)
            if last_error is not None:
                slope = max(0.1, (last_error - error) / (estimate - last_estimate))
            last_estimate, last_error = estimate, error
            estimate += error / slope
            if abs(error) < 1e-6 or abs(estimate) > 10:
                break
        self.known[key] = estimate
        return estimate

    def find(self, kept: list[int]) -> Found:
        """The constants by these runs."""
        inside = [i for i in kept if not self.is_across[i]]
        across = [i for i in kept if self.is_across[i]]
        attention = self.attention and self.agreed_attention(inside or across)
        network_gbs, is_least = None, False
        if inside and self.tells_the_network(across):
            # At the attention of all runs, which was computed already.
            paces = [self.log_pace(i, self.attention, None) for i in inside]
            network_gbs = self.agreed(
                lambda gbs: paces + [self.log_pace(i, self.attention, gbs) for i in across],
                self.fleet.network_gbs,
            )
            if network_gbs:
                is_least = not self.depend(across, network_gbs, 2 * network_gbs)
        used = kept if network_gbs or not inside else inside
        paces = [self.log_pace(i, attention, network_gbs) for i in used]
        return Found(attention, network_gbs, is_least, statistics.fmean(paces))

    def agreed(self, paces_at, start: float) -> float | None:
        """The value at which paces_at(value) are most alike; None: it is out of reach."""

        def spread(power: int) -> float:
            return statistics.pvariance(paces_at(start * STEP**power))

        power = 0
        for step in (12, 3, 1):  # ever finer around the best so far
            many = REACH // step if step == 12 else 4
            powers = [power + k * step for k in range(-many, many + 1)]
            power = min(powers, key=spread)
        return start * STEP**power if abs(power) < REACH else None

    def agreed_attention(self, kept: list[int]) -> float | None:
        """What attention reaches by these runs; None: it is out of reach."""
        assumed = step_time.attention_share(self.fleet.device, self.c)
        found = self.agreed(lambda share: [self.log_pace(i, share, None) for i in kept], assumed)
        return found if found and found < 1 else None

    def tells_the_network(self, across: list[int]) -> bool:
        """Do these runs depend on the network, and is it not known already?"""
        if self.fleet.network_from not in ("assumed", "machine"):
            return False
        return self.depend(across, self.fleet.network_gbs / 2, self.fleet.network_gbs)

    def depend(self, across: list[int], slow_gbs: float, fast_gbs: float) -> bool:
        """Does one of these runs take longer at the slower of two networks?"""
        for i in across:
            change = self.log_pace(i, self.attention, slow_gbs)
            change -= self.log_pace(i, self.attention, fast_gbs)
            if abs(change) > DEPENDS:
                return True
        return False

    def left_out(self) -> list[float]:
        """The tokens/s of each run as the other runs predict them."""
        numbers = list(range(len(self.runs)))
        return [self.rate(i, self.find([j for j in numbers if j != i])) for i in numbers]

    def error(self) -> float:
        """The root mean square of the logarithms of the leave-one-out errors."""
        pairs = zip(self.left_out(), self.runs, strict=True)
        return math.sqrt(
            statistics.fmean(math.log(rate / run.measured) ** 2 for rate, run in pairs)
        )

    def choose(self) -> None:
        """Fit what attention reaches if runs that are left out are then predicted better."""
        numbers = range(len(self.runs))
        inside = [i for i in numbers if not self.is_across[i]] or list(numbers)
        if len(inside) < FEWEST or self.fleet.device.attention:
            return
        without = self.error()
        self.attention = self.agreed_attention(inside)
        if self.attention and self.error() * BETTER > without:
            self.attention = None


def calibrated(found: Calibration, trainer: Trainer) -> Calibration:
    """`found` with what its runs measure. Raises UserError if they cannot be right."""
    runs, fleet, c = found.runs, found.fleet, found.c
    fit = Fit(runs, fleet, c, trainer)
    for i, run in enumerate(runs):
        pace = math.exp(fit.log_pace(i, None, None))
        times = f"{run.measured:g} tokens/s take {pace:.2g} times the predicted time"
        require(0.05 < pace < 20, f"{times}: is --device right?")

    fit.choose()
    numbers = list(range(len(runs)))
    fitted = fit.find(numbers)
    predicted = [fit.rate(i, fitted) for i in numbers]
    left_out = fit.left_out() if len(runs) > 1 else []
    if fitted.attention:
        fleet = replace(fleet, device=replace(fleet.device, attention=fitted.attention))
    if fitted.network_gbs and not fitted.is_least:
        fleet = replace(fleet, network_gbs=fitted.network_gbs, network_from="measured")
    elif fitted.network_gbs and fitted.network_gbs > fleet.network_gbs:
        fleet = replace(fleet, network_gbs=fitted.network_gbs, network_from="at least")
    notes = (*notes_of(fit, fitted, left_out), *doubts(fit))
    fleet = replace(fleet, notes=(*fleet.notes, *notes))
    c = replace(c, pace=math.exp(fitted.log_pace))
    return replace(found, fleet=fleet, c=c, predicted=predicted, left_out=left_out)


def notes_of(fit: Fit, found: Found, left_out: list[float]) -> list[str]:
    """What a plan says of the runs."""
    lines = [f"speed calibrated by {len(fit.runs)} run{'s' * (len(fit.runs) > 1)}"]
    if left_out:
        lines[0] += f", {left_out_words(fit.runs, left_out)}"
    if found.attention:
        lines.append(f"attention at {found.attention:.0%} of the peak, fitted to these runs")
    if found.is_least:
        least = f"a network of at least {found.network_gbs:.3g} GB/s a node"
        lines.append(f"runs on several nodes show only {least}: a faster one changes little")
    if any(fit.is_across) and not found.network_gbs:
        cause = "these runs hardly depend on it"
        if fit.fleet.network_from not in ("assumed", "machine"):
            return lines
        if all(fit.is_across):
            cause = "it cannot be told from the pace without a run on one node"
        lines.append(f"runs on several nodes did not measure the network: {cause}")
    return lines


def left_out_words(runs: list[Run], left_out: list[float]) -> str:
    """The leave-one-out errors in short."""
    errors = [abs(rate / run.measured - 1) for rate, run in zip(left_out, runs, strict=True)]
    median, largest = statistics.median(errors), max(errors)
    return f"each predicted by the others: error {median:.1%} in the median, at most {largest:.1%}"


def doubts(fit: Fit) -> list[str]:
    """The runs that are faster than large matmuls."""
    lines = []
    peak = fit.fleet.device.bf16_tflops * 1e12
    for run, (m, cfg) in zip(fit.runs, fit.settings, strict=True):
        per_token = matmuls.flops_of_run(m, cfg, recomputed=True)
        share = per_token * run.measured / run.ranks / peak
        reachable = fit.fleet.device.reachable or fit.c.reachable
        if share > reachable:
            reached = f"{share:.0%} of the peak, of which large matmuls reach {reachable:.0%}"
            lines.append(f"DOUBTFUL: {run.measured:g} tokens/s on {run.ranks} would be {reached}")
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
        "attention": found.attention,
        "runs": [
            {
                "flags": run.flags,
                "ranks": run.ranks,
                "nodes": run.nodes,
                "tokens_per_second": run.measured,
            }
            for run in found.runs
        ],
    }
    try:
        files.write_atomically(path, json.dumps(measurements, indent=1).encode())
    except OSError as error:
        raise UserError(f"--save={path}: {config.one_line(error)}") from error


def report(before: Fleet, found: Calibration) -> str:
    """The inputs of planning/step_time.py before and after, and every run."""
    fleet, c = found.fleet, found.c
    lines = []
    for name in ("reachable", "bandwidth_gbs", "link_gbs", "attention"):
        new, old = getattr(fleet.device, name), getattr(before.device, name)
        after = f"{new:.4g}" if new else "-"
        lines.append(f"{name:<16}{after:>12}  before: {old if old else '-'}")
    lines.append(f"{'network_gbs':<16}{fleet.network_gbs:>12.4g}  before: {before.network_gbs:g}")
    lines.append(f"{'hop, us':<16}{c.hop * 1e6:>12.4g}  before: {Constants().hop * 1e6:.4g}")
    lines.append(f"{'pace':<16}{c.pace:>12.4g}  before: 1")
    if found.runs:
        lines += ["", *run_lines(found)]
    return "\n".join([*lines, "", *fleet.notes])


def run_lines(found: Calibration) -> list[str]:
    """Every run: measured, the error of what all runs predict, and of what the others do."""
    heads = f"{'error':>12}{'left out':>12}" if found.left_out else f"{'error':>12}{'':>12}"
    lines = [f"{'ranks':>7}{'tokens/s':>14}{heads}  run"]
    for i, run in enumerate(found.runs):
        errors = [found.predicted[i] / run.measured - 1]
        errors += [found.left_out[i] / run.measured - 1] if found.left_out else []
        cells = "".join(f"{error:>+12.1%}" for error in errors).ljust(24)
        m, cfg = run.settings()
        shape = f"{m.n_layers} x {m.d_model}, sequence {m.max_seq_len}"
        layout = f"{cfg.sharding}, {cfg.microbatch_size}, {cfg.activation_checkpointing}"
        lines.append(f"{run.ranks:>7}{run.measured:>14,.0f}{cells}  {shape}, {layout}")
    return lines


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
