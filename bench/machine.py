"""What a machine or a fleet really does: matmuls, memory and collectives of every rank.

    python -m bench machine                                 one device, in about a minute
    torchrun --nproc_per_node 4 -m bench machine            four, and what joins them; many nodes as in training

All ranks measure at the same time, as they work in training. Matmuls are square; fp32 is without
TF32. A copy counts the bytes that it reads and those that it writes. Collectives are counted as
NVIDIA's nccl-tests do, so that figures of groups of any size compare with each other and with the
speed of a link:

    bus bandwidth = bytes / seconds x (n - 1) / n           of all-gather and reduce-scatter; all-reduce: twice that

n: ranks of the group; bytes: of the whole message, which all-gather makes and reduce-scatter takes.
The groups are `all` ranks, the ranks of a `node`, and those of equal local rank `across` nodes;
what would have groups of one rank only is left out. All groups of a kind are busy at once: they
share what joins nodes.

machine.json (a figure is the median of several turns; GB/s: 10^9 bytes a second):
    device, device_type, ranks, nodes, ranks_per_node (of the largest node), threads_per_rank, settings, and
    runlog.versions: time, host, platform, python, torch, cuda, rocm
    matmul_tflops       {"bf16": {"2048": TFLOP/s of the median rank, ...}, "fp32": ...}, by rows of the matrices
    matmul_best_tflops  the same of the fastest turn of the fastest rank
    memory_gbs          GB/s of the median rank
    collectives_gbs     {"all": {"all_gather": {"1048576": bus GB/s of the slowest rank, ...}, "reduce_scatter": ...,
                        "all_reduce": ...}, "node": ..., "across": ...}, by bytes
    latency_us          {"all": microseconds of a 4-byte all-reduce, calls in a row, slowest rank, "node": ...}
    slowest             {"matmul" (bf16, largest): {"rank", "host", "below_median_percent"}, "memory": ...}
    network             of rank 0: {"interface", "found_by", "speed_gbits", "infiniband_gbits": {device: rate of port
                        1}}, null: not known. A guess unless a variable sets it: NCCL and gloo choose for themselves.
    by_rank             [{"rank", "node" (its first rank), "local_rank", "host", "device", and its own figures}, ...]

Read next: bench/attention.py.
"""

import contextlib
import functools
import json
import os
import socket
import statistics
import sys
import time
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

import config
import devices
import parallel
import processes
from config import require
from lifecycle import runlog
from storage import files

TURNS = 5  # of a measurement, at most
MIB = 2**20
# By device: rows of the matrices, bytes to copy (with the copy, more than caches hold), bytes of the messages
SIZES = {
    "cuda": ((2048, 4096, 8192), 1024 * MIB, (MIB, 16 * MIB, 128 * MIB)),
    "cpu": ((256, 512, 1024), 256 * MIB, (MIB, 4 * MIB, 16 * MIB)),
}
# How the figures of the ranks become one
OVERALL = {
    "matmul_tflops": statistics.median,
    "matmul_best_tflops": max,
    "memory_gbs": statistics.median,
    "collectives_gbs": min,
    "latency_us": max,
}


@dataclass
class MachineArgs:
    """What to measure, and how long."""

    device: Literal["auto", "cpu", "cuda"] = "auto"  # cuda is ROCm too
    seconds: float = 1.0  # of one measurement; there are 7, and 10 more for each kind of group
    out: str = "machine.json"  # file of the results

    def check(self) -> None:
        require(self.seconds > 0, f"seconds must be more than 0, not {self.seconds}")


def timed(call, calls: int, gpu: bool) -> float:
    """Seconds of one of `calls` calls in a row: on a GPU between events in its queue."""
    if not gpu:
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - begin) / calls
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / calls  # it tells milliseconds


def take_turns(call, seconds: float, gpu: bool, group=None) -> list[float]:
    """Seconds of one call, in each of up to TURNS turns that take about `seconds` together, after warming up.

    All ranks of `group` (None: all there are) make as many calls as the slowest has time for, and begin together.
    """
    call()  # kernels are loaded, connections are made
    calls = torch.tensor(int(seconds / timed(call, 1, gpu)))
    dist.all_reduce(calls, dist.ReduceOp.MIN, group=group)
    calls = max(int(calls), 1)
    turns = min(calls, TURNS)
    return [timed(call, calls // turns, gpu) for _ in range(turns)]


def measure_matmul(device, rows, seconds: float) -> tuple[dict, dict]:
    """TFLOP/s of square matmuls by dtype and rows: 2 n^3 FLOPs in the median turn, and in the fastest."""
    median, best = {}, {}
    for name, dtype in parallel.DTYPES.items():
        median[name], best[name] = {}, {}
        for n in rows:
            a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
            call = functools.partial(torch.mm, a, b, out=torch.empty_like(a))
            turns = take_turns(call, seconds, device.type == "cuda")
            median[name][str(n)] = 2 * n**3 / statistics.median(turns) / 1e12
            best[name][str(n)] = 2 * n**3 / min(turns) / 1e12
    return median, best


def measure_memory(device, size: int, seconds: float) -> float:
    """GB/s of copying `size` bytes, read + written."""
    source, target = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))
    turns = take_turns(lambda: target.copy_(source), seconds, device.type == "cuda")
    return 2 * size / statistics.median(turns) / 1e9


def bus_gbs(name: str, size: int, seconds: float, n: int) -> float:
    """Bus bandwidth, GB/s, of a collective of n ranks and `size` bytes (nccl-tests, doc/PERFORMANCE.md)."""
    return (2 if name == "all_reduce" else 1) * (n - 1) / n * size / seconds / 1e9


def measure_collectives(group, device, sizes, seconds: float) -> tuple[dict, float]:
    """Bus bandwidth by collective and bytes, GB/s, and the microseconds of an all-reduce of 4 bytes."""
    all_gather = (
        getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    )  # the name before torch 2.13
    reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    gpu, n, gbs = device.type == "cuda", group.size(), defaultdict(dict)
    for size in sizes:
        shard = torch.zeros(size // 4 // n, device=device)  # fp32
        whole = torch.zeros(n * len(shard), device=device)
        calls = {
            "all_gather": functools.partial(all_gather, whole, shard, group=group),
            "reduce_scatter": functools.partial(reduce_scatter, shard, whole, group=group),
            "all_reduce": functools.partial(dist.all_reduce, whole, group=group),
        }
        for name, call in calls.items():
            median = statistics.median(take_turns(call, seconds, gpu, group))
            gbs[name][str(size)] = bus_gbs(name, whole.nbytes, median, n)
    tiny = torch.zeros(1, device=device)
    turns = take_turns(lambda: dist.all_reduce(tiny, group=group), seconds, gpu, group)
    return gbs, statistics.median(turns) * 1e6


def make_groups(world) -> dict:
    """Kind -> the group of this rank (None: it is alone), for the kinds that have a group of two ranks or more."""
    places = gather(
        (world.global_rank - world.local_rank, world.local_rank)
    )  # launchers number the ranks of a node in a row
    kinds = {
        "all": [0] * world.global_size,
        "node": [p[0] for p in places],
        "across": [p[1] for p in places],
    }
    groups = {}
    for kind, keys in kinds.items():
        together = [
            [rank for rank, k in enumerate(keys) if k == key] for key in dict.fromkeys(keys)
        ]
        together = [ranks for ranks in together if len(ranks) > 1]
        if together:
            groups[kind], _ = dist.new_subgroups_by_enumeration(together)
    return groups


def gather(thing) -> list:
    """`thing` of every rank, on every rank."""
    things = [None] * dist.get_world_size()
    dist.all_gather_object(things, thing)
    return things


def measure(world, seconds: float) -> dict:
    """One rank's place and figures: a row of by_rank."""

    def progress(what: str, number: int) -> None:
        if world.global_rank == 0:
            print(f"measuring {what}: about {number * seconds:.0f} s", file=sys.stderr, flush=True)

    rows, copied, messages = SIZES[world.device.type]
    row = {
        "rank": world.global_rank,
        "node": world.global_rank - world.local_rank,
        "local_rank": world.local_rank,
    }
    row |= {"host": socket.gethostname(), "device": devices.describe(world.device)}
    row |= {"collectives_gbs": {}, "latency_us": {}}
    progress("matmul", len(parallel.DTYPES) * len(rows))
    row["matmul_tflops"], row["matmul_best_tflops"] = measure_matmul(world.device, rows, seconds)
    progress("memory", 1)
    row["memory_gbs"] = measure_memory(world.device, copied, seconds)
    for kind, group in make_groups(world).items():
        progress(f"collectives, {kind}", 3 * len(messages) + 1)
        dist.barrier()  # no group is slowed by the kind before
        if group is not None:
            found = measure_collectives(group, world.device, messages, seconds)
            row["collectives_gbs"][kind], row["latency_us"][kind] = found
    return row


def merge(trees: list, how):
    """Nested dictionaries of figures -> one of the same keys, where `how` has made one figure of each list of them."""
    if not isinstance(trees[0], dict):
        return how(trees)
    keys = dict.fromkeys(key for tree in trees for key in tree)
    return {key: merge([tree[key] for tree in trees if key in tree], how) for key in keys}


def slowest(rows, figures: list[float]) -> dict:
    """The rank with the lowest of `figures`, its host, and how far it is below the median."""
    figure, row = min(zip(figures, rows, strict=True), key=lambda pair: pair[0])
    percent = 100 * (1 - figure / statistics.median(figures))
    return {"rank": row["rank"], "host": row["host"], "below_median_percent": percent}


def first_number(path: str) -> float | None:
    """The positive number with which a file of /sys begins, or None."""
    try:
        number = float(Path(path).read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return None
    return number if number > 0 else None  # virtual interfaces have a speed of -1


def interface_to(host: str, routes: str) -> str | None:
    """The interface by which packets leave for `host`, by the text of Linux's /proc/net/route (IPv4), or None."""
    packed = socket.inet_aton(socket.gethostbyname(host))
    address = int.from_bytes(packed, sys.byteorder)  # as the table writes addresses
    fitting = []
    for line in routes.splitlines()[1:]:
        name, destination, _, _, _, _, metric, mask, *_ = line.split()
        if address & int(mask, 16) == int(destination, 16):
            fitting.append((-int(mask, 16).bit_count(), int(metric), name))
    return min(fitting)[-1] if fitting else None  # the longest mask, then the lowest metric


def network(nodes: int, device_type: str) -> dict:
    """The interface by which this rank reaches other nodes, how we know, and speeds in Gbit/s."""
    found_by = "NCCL_SOCKET_IFNAME" if device_type == "cuda" else "GLOO_SOCKET_IFNAME"
    name = os.environ.get(found_by)
    if not name:
        master = os.environ.get("MASTER_ADDR") if nodes > 1 else None
        found_by = "route to MASTER_ADDR" if master else "default route"
        with contextlib.suppress(OSError):  # no Linux; a name that does not resolve
            name = interface_to(master or "0.0.0.0", Path("/proc/net/route").read_text())
    mbits = first_number(f"/sys/class/net/{name}/speed")
    rates = {
        path.name: first_number(f"{path}/ports/1/rate")
        for path in Path("/sys/class/infiniband").glob("*")
    }
    speed = mbits / 1e3 if mbits else None
    return {
        "interface": name,
        "found_by": found_by,
        "speed_gbits": speed,
        "infiniband_gbits": rates,
    }


def summarize(rows: list[dict], device_type: str, args) -> dict:
    """The rows of all ranks -> what machine.json has, see the top of this file."""
    nodes = Counter(row["node"] for row in rows)
    largest = str(SIZES[device_type][0][-1])
    of_matmul = [row["matmul_tflops"]["bf16"][largest] for row in rows]
    return {
        "device": ", ".join(dict.fromkeys(row["device"] for row in rows)),
        "device_type": device_type,
        "ranks": len(rows),
        "nodes": len(nodes),
        "ranks_per_node": max(nodes.values()),
        "threads_per_rank": torch.get_num_threads(),
        "settings": asdict(args),
        **runlog.versions(),
        **{key: merge([row[key] for row in rows], how) for key, how in OVERALL.items()},
        "slowest": {
            "matmul": slowest(rows, of_matmul),
            "memory": slowest(rows, [row["memory_gbs"] for row in rows]),
        },
        "network": network(len(nodes), device_type),
        "by_rank": rows,
    }


def table(corner: str, columns: list[str], rows: dict) -> list[str]:
    """Lines of Markdown: a row of figures for each title."""
    lines = [
        "",
        f"| {corner:<25} |" + "".join(f" {c:>8} |" for c in columns),
        "|---" * (1 + len(columns)) + "|",
    ]
    return lines + [
        f"| {title:<25} |" + "".join(f" {x:>8.4g} |" for x in row.values())
        for title, row in rows.items()
    ]


def report(m: dict) -> str:
    """What machine.json says, for people."""
    rows, _, messages = SIZES[m["device_type"]]
    matmul = {f"{dtype}, median": row for dtype, row in m["matmul_tflops"].items()}
    matmul |= {f"{dtype}, best": row for dtype, row in m["matmul_best_tflops"].items()}
    bus = {
        f"{kind}: {name}": row
        for kind, names in m["collectives_gbs"].items()
        for name, row in names.items()
    }
    lines = [
        f"ranks: {m['ranks']}, nodes: {m['nodes']}, device: {m['device']}, torch {m['torch']}, {m['time']}"
    ]
    lines += table("matmul, TFLOP/s of a rank", [f"{n:,}" for n in rows], matmul)
    if bus:
        lines += table("bus bandwidth, GB/s", [f"{size // MIB} MiB" for size in messages], bus)
    lines += ["", f"memory: {m['memory_gbs']:.4g} GB/s of a rank"]
    lines += [
        f"latency, {kind}: {us:.0f} us for an all-reduce of 4 bytes"
        for kind, us in m["latency_us"].items()
    ]
    for what, s in m["slowest"].items() if m["ranks"] > 1 else ():
        place = (
            f"rank {s['rank']} on {s['host']}, {s['below_median_percent']:.1f} % below the median"
        )
        lines.append(f"slowest in {what}: {place}")
    net = m["network"]
    speed = f"{net['speed_gbits']:g} Gbit/s" if net["speed_gbits"] else "speed unknown"
    found = (
        f"{net['interface']} ({net['found_by']}), {speed}"
        if net["interface"]
        else "only loopback found"
    )
    lines.append(f"network: {found}{'; not used here, on one node' if m['nodes'] == 1 else ''}")
    lines += [
        f"InfiniBand: {name}, {rate or '?'} Gbit/s"
        for name, rate in net["infiniband_gbits"].items()
    ]
    return "\n".join(lines)


def conclude(rows: list[dict], device_type: str, args) -> None:
    """Print, then write the file: whole or not at all."""
    machine, path = summarize(rows, device_type, args), Path(args.out)
    print(report(machine), flush=True)
    files.write_atomically(path, json.dumps(machine, indent=1).encode())
    print(f"written: {path}", file=sys.stderr)


def main(argv) -> None:
    """`bench machine`."""
    (args,) = config.load(argv, MachineArgs)
    world = processes.start(args.device)
    require(world.device.type in SIZES, f"{world.device.type} is not measured: set --device=cpu")
    processes.rank_zero_decides(lambda: Path(args.out).parent.mkdir(parents=True, exist_ok=True))
    rows = gather(measure(world, args.seconds))
    processes.rank_zero_decides(lambda: conclude(rows, world.device.type, args))


if __name__ == "__main__":
    processes.run(main)
