"""The seconds of kernels on a device: FLOPs or bytes, whichever take longer (a roofline).

    seconds = max(FLOPs / reachable FLOP/s, bytes / bandwidth)      Williams et al., 2009
    step    = all kernels, one after another
              + the time in which the device waits for the host
              + what collectives add (planning/step_time.py: they overlap with the kernels)

Where the rates are from:

    matmuls      planning/step_time.py: the share of the peak in devices.py, less for few tokens
    attention    planning/step_time.py: the share that was fitted to published runs
    bandwidth    devices.py: the datasheet's. Real kernels stay some percent below it
    launch       LAUNCH below, a guess

`--night=FOLDER` takes what `bench first_night` measured: matmuls and bandwidth of machine.json, and
attention_*.json for the kernel that runs, at the nearest length. If that has no such kernel or
head, attention keeps planning's rate. Each rate is printed with its source.

The host puts kernels into a queue, one every LAUNCH seconds, and the device takes them from there.
If the queue is empty, the device waits. The wait is counted in a second step, since the first one
begins with an empty queue.

`python -m bench step_prices --device=h100` prints the rates.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import config
import devices
from config import MPTConfig, TrainConfig, UserError, require
from planning import calibrate, step_time
from planning.fleet import Fleet, usual_network
from planning.step_time import StepTime
from storage import files

LAUNCH = 5e-6  # seconds in which the host launches a kernel: a guess for PyTorch without a graph
# {operation: what bench/attention.py calls the kernel, and which one to take if that was not
# measured}; its backward has the same.
FLASH = "SDPA flash, no bias"
CONTESTANTS = {
    "mpt::flash_attention": ["ours, ALiBi"],
    "aten::_scaled_dot_product_flash_attention": [FLASH],
    "aten::_scaled_dot_product_cudnn_attention": ["SDPA cuDNN, no bias", FLASH],
    "aten::_scaled_dot_product_efficient_attention": ["SDPA memory-efficient, no bias"],
}


@dataclass
class DeviceArgs:
    """The device, and what is known of it."""

    device: str = "auto"  # h100, mi250, ... (python devices.py lists them); auto: that of --night
    ranks: int = 1  # torch devices, data-parallel ranks
    node_size: int = 8  # torch devices of a node
    network: float = 0.0  # GB/s of a node, each way (0: usual for the device)
    night: str = ""  # folder of `bench first_night`: take what was measured there
    attention_share: float = 0  # of the peak, for attention (0: planning's, or the night's)

    def check(self) -> None:
        """UserError if a setting is out of range."""
        require(self.ranks > 0, f"ranks must be at least 1, not {self.ranks}")
        share = self.attention_share
        require(0 <= share <= 1, f"attention_share must be from 0 to 1, not {share:g}")


@dataclass
class Prices:
    """What a device does in a second."""

    plan: StepTime  # planning's step for these settings, which knows rates and traffic
    attention: float  # FLOP/s, if `measured` has no better figure
    # {(contestant, backward?): FLOP/s}
    measured: dict[tuple[str, bool], float]
    sources: dict[str, str]  # of matmuls, attention, measured attention, memory: where it is from

    @property
    def matmul(self) -> float:
        """FLOP/s of matmuls."""
        return self.plan.matmul_rate()

    @property
    def bandwidth(self) -> float:
        """Bytes/s of memory."""
        return self.plan.fleet.device.bandwidth_gbs * 1e9

    def flops_rate(self, name: str) -> float:
        """FLOP/s of an operation that has any."""
        if "attention" not in name:
            return self.matmul
        for contestant in CONTESTANTS.get(name.removesuffix("_backward"), []):
            kernel = contestant, name.endswith("_backward")
            if kernel in self.measured:
                return self.measured[kernel]
        return self.attention

    def seconds(self, kernel) -> float:
        """Of a kernel (bench/step_costs.py), or of a collective by itself."""
        operation = kernel.costs[0].operation
        if operation.collective:
            return self.collective(operation)
        work = sum(cost.flops / self.flops_rate(cost.operation.name) for cost in kernel.costs)
        return max(work, kernel.bytes / self.bandwidth)

    def collective(self, operation) -> float:
        """Of an all-gather, reduce-scatter or all-reduce: planning's time of a ring."""
        sizes = [math.prod(spec.shape) * spec.dtype.itemsize for spec in operation.inputs]
        sizes += [math.prod(spec.shape) * spec.dtype.itemsize for spec in operation.outputs]
        if operation.collective != "all-reduce":
            n = max(1, round(max(sizes) / max(1, min(sizes))))  # the whole message and a shard
            return self.plan.ring(max(sizes), n, 1, 1)
        copies = self.plan.fleet.dp // self.plan.shard_ranks  # ranks with the same shard
        n = copies if copies > 1 else self.plan.fleet.dp
        return 2 * self.plan.ring(max(sizes), n, self.plan.fleet.dp // n, 1)


# --- Where the prices are from


def prices(m: MPTConfig, cfg: TrainConfig, args: DeviceArgs) -> Prices:
    """For these settings on that device.

    UserError for an unknown device, a folder that is no night's or another device's or lacks
    machine.json, or settings that the ranks cannot share.
    """
    device = night_device(args) if args.night else devices.by_name(args.device)
    network_gbs = args.network or usual_network(device) * args.node_size
    fleet = Fleet(device, args.ranks, args.node_size, network_gbs)
    c = step_time.Constants()
    if args.night:
        fleet, c = calibrate.from_file(f"{args.night}/machine.json", fleet, step_time.OURS)
    plan = StepTime(m, cfg, fleet, c)

    from_table = "devices.py" if device.reachable else "a guess of planning/step_time.py"
    sources = {"matmuls": from_table, "memory": "devices.py", "attention": "planning/step_time.py"}
    if args.night:
        here = f"measured in {args.night}"
        sources |= {"matmuls": here, "memory": here, "measured attention": here}
    if args.attention_share:
        sources["attention"] = "--attention_share"
        return Prices(plan, args.attention_share * device.bf16_tflops * 1e12, {}, sources)
    measured = measured_attention(args.night, m) if args.night else {}
    return Prices(plan, plan.attention_rate(), measured, sources)


def night_device(args: DeviceArgs) -> devices.Device:
    """The row in devices.py of a night's GPUs. UserError if there is none, or --device differs."""
    path = Path(args.night, "facts.json")
    require(path.is_file(), f"no facts.json in {args.night}: is it a folder of bench first_night?")
    facts = files.read_json(path, fields={"gpus": list})
    require(facts["gpus"], f"{args.night} was a night without a GPU: there are no rates in it")
    gpu = facts["gpus"][0]
    require(isinstance(gpu, dict), f"{path} is not of bench facts: its gpus have no names")
    row = next((row for row in devices.TABLE if row.name == gpu.get("known_as")), None)
    reported = gpu.get("name")
    require(row, f"{args.night} is of {reported!r}, which devices.py does not know: add a row")
    same = args.device in devices.THIS_MACHINE or devices.by_name(args.device) == row
    require(same, f"{args.night} is of {row.name}: leave out --device={args.device}")
    return row


def measured_attention(night: str, m: MPTConfig) -> dict[tuple[str, bool], float]:
    """{(contestant, backward?): FLOP/s} at this head dim and the nearest length; {}: nothing fits.

    UserError if a file is damaged.
    """
    nearest = {}  # {contestant: (distance in length, the cell)}
    for path in sorted(Path(night).glob("attention_*.json")):
        cells = files.read_json(path, fields={"cells": list}, fix="measure it again")["cells"]
        try:
            for cell in cells:
                if cell["missing"] or cell["head_dim"] != m.head_dim:
                    continue
                distance = abs(cell["length"] - m.max_seq_len)
                if distance < nearest.get(cell["contestant"], (math.inf,))[0]:
                    nearest[cell["contestant"]] = distance, cell
        except (KeyError, TypeError) as error:
            raise UserError(f"{path} is not of bench attention: {error!r}") from error
    rates = {}
    for contestant, (_, cell) in nearest.items():
        rates[contestant, False] = 1e12 * cell["forward, TFLOP/s"]
        rates[contestant, True] = 1e12 * cell["backward, TFLOP/s"]
    return rates


# --- The time of a step


def seconds_by_operation(kernels: list, prices: Prices) -> list[tuple]:
    """[(cost, seconds), ...] of each operation.

    Merged operations share the seconds of their kernel in proportion to their bytes alone.
    """
    shares = []
    for kernel in kernels:
        seconds = prices.seconds(kernel)
        eager_bytes = sum(cost.bytes for cost in kernel.costs)
        for cost in kernel.costs:
            shares.append((cost, seconds * cost.bytes / eager_bytes if eager_bytes else seconds))
    return shares


def waiting(seconds: list[float], launch: float = LAUNCH) -> float:
    """How long the device waits for the host in a step whose kernels take `seconds`, in order."""
    launched = done = begin = 0.0
    for _ in range(2):
        begin = done
        for of_kernel in seconds:
            launched += launch
            done = max(launched, done) + of_kernel
    return max(0.0, done - begin - sum(seconds))


# --- The program


def lines(prices: Prices) -> list[str]:
    """The rates and their sources, for a person to read."""
    device = prices.plan.fleet.device
    peak = device.bf16_tflops * 1e12
    rows = [("matmuls", prices.matmul, prices.sources["matmuls"])]
    if prices.measured:
        for (contestant, backward), rate in prices.measured.items():
            name = f"{contestant}, {'backward' if backward else 'forward'}"
            rows.append((name, rate, prices.sources["measured attention"]))
        rows.append(("attention, other kernels", prices.attention, prices.sources["attention"]))
    else:
        rows.append(("attention", prices.attention, prices.sources["attention"]))

    text = [f"rates of {device.name}, peak {device.bf16_tflops:g} TFLOP/s"]
    for name, rate, source in rows:
        text.append(f"  {name:<40}{rate / 1e12:>8.1f} TFLOP/s {rate / peak:>7.1%}  {source}")
    bandwidth = f"{prices.bandwidth / 1e9:>8,.0f} GB/s"
    text.append(f"  {'memory':<40}{bandwidth:<24}  {prices.sources['memory']}")
    text.append(f"  {'launch':<40}{LAUNCH * 1e6:>8g} {'us a kernel':<15}  a guess")
    return text


def main(argv: list[str]) -> None:
    """Print the rates for the config files and flags in argv."""
    m, cfg, args = config.load(argv, MPTConfig, TrainConfig, DeviceArgs)
    print("\n".join(lines(prices(m, cfg, args))))


if __name__ == "__main__":
    config.run(main)
