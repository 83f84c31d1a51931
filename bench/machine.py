"""What a machine or a cluster really does: matmuls, memory and collectives of every rank.

    python -m bench machine                            one device, in about a minute
    torchrun --nproc_per_node 4 -m bench machine       four devices and the links between them

It runs on many nodes as training does. All ranks measure at the same time, as they work in
training. Matmuls are square; fp32 is without TF32. A copy counts the bytes that it reads and those
that it writes. Collectives are counted as NVIDIA's nccl-tests do, so that figures of groups of any
size compare with each other and with the speed of a link:

    bus bandwidth = bytes / seconds x (n - 1) / n      all-gather and reduce-scatter
                    bytes / seconds x 2 (n - 1) / n    all-reduce
                    bytes / seconds                    send and receive, as stages of a pipeline do

n: ranks of the group; bytes: of the whole message, which all-gather returns and reduce-scatter
takes. In the last one each rank sends a message to the next rank, and the last rank to the first.
There are three kinds of groups: `all` ranks, the ranks of a `node`, and the ranks of equal local
rank `across` nodes. A kind is skipped if its groups would have one rank each. All groups of a kind
run at the same time, so they share the links between nodes.

machine.json (a figure is the median of several turns; GB/s: 10^9 bytes a second):
    device, device_type, ranks, nodes, ranks_per_node (of the largest node), threads_per_rank,
    settings, and runlog.versions: time, host, platform, python, torch, cuda, rocm
    matmul_tflops       {"bf16": {"2048": TFLOP/s of the median rank, ...}, "fp32": ...}, by rows of
                        the matrices
    memory_gbs          GB/s of the median rank
    collectives_gbs     {"all": {"all_gather": {"1048576": bus GB/s of the slowest rank, ...},
                        "reduce_scatter": ..., "all_reduce": ..., "send_recv": ...}, "node": ...,
                        "across": ...}, by bytes
    latency_us          {"all": microseconds of a 4-byte all-reduce, of many calls in a row, slowest
                        rank, "node": ...}
    slowest             {"matmul" (bf16, largest): {"rank", "host", "below_median_percent"},
                        "memory": ...}
    by_rank             [{"rank", "node" (its first rank), "local_rank", "host", "device", and its
                        own figures}, ...]
"""

import functools
import json
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
import program
from config import Float
from lifecycle import runlog
from program import require
from storage import files

TURNS = 5  # of a measurement, at most
MIB = 2**20


@dataclass
class Sizes:
    """What is measured on a kind of device."""

    matmul_rows: tuple[int, ...]
    copied_bytes: int  # with the copy, more than caches hold
    message_bytes: tuple[int, ...]


SIZES = {
    "cuda": Sizes((2048, 4096, 8192), 1024 * MIB, (MIB, 16 * MIB, 128 * MIB)),
    "cpu": Sizes((256, 512, 1024), 256 * MIB, (MIB, 4 * MIB, 16 * MIB)),
}
# How the figures of all ranks become one
OVERALL = {
    "matmul_tflops": statistics.median,
    "memory_gbs": statistics.median,
    "collectives_gbs": min,
    "latency_us": max,
}


@dataclass
class MachineArgs:
    """What to measure, and how long."""

    device: Literal["auto", "cpu", "cuda"] = "auto"  # cuda is ROCm too
    seconds: Float[1e-6, 10**4] = 1.0  # of a measurement: 7, and 13 more for each group
    out: str = "machine.json"  # file of the results


# --- Measuring


def timed(call, calls: int, gpu: bool) -> float:
    """Seconds of one of `calls` calls in a row. On a GPU, by events in its queue."""
    if not gpu:
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - begin) / calls
    begin = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / calls  # elapsed_time is in milliseconds


def take_turns(call, seconds: float, gpu: bool, group=None) -> list[float]:
    """Seconds of one call, for each of up to TURNS turns, which take about `seconds` together.

    All ranks of `group` (None: all ranks) make as many calls as the slowest has time for, and begin
    together.
    """
    call()  # loads kernels and makes connections
    calls = torch.tensor(int(seconds / timed(call, 1, gpu)))
    dist.all_reduce(calls, dist.ReduceOp.MIN, group=group)
    calls = max(int(calls), 1)
    turns = min(calls, TURNS)
    return [timed(call, calls // turns, gpu) for _ in range(turns)]


def measure_matmul(device, sizes, seconds: float) -> dict:
    """TFLOP/s of square matmuls, {dtype: {rows: TFLOP/s}}. One of n rows is 2 n^3 FLOPs."""
    tflops = {}
    for name, dtype in parallel.DTYPES.items():
        tflops[name] = {}
        for n in sizes:
            a = torch.randn(n, n, device=device, dtype=dtype)
            b = torch.randn(n, n, device=device, dtype=dtype)
            call = functools.partial(torch.mm, a, b, out=torch.empty_like(a))
            turns = take_turns(call, seconds, device.type == "cuda")
            tflops[name][str(n)] = 2 * n**3 / statistics.median(turns) / 1e12
    return tflops


def measure_memory(device, size: int, seconds: float) -> float:
    """GB/s of copying `size` bytes, read + written."""
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.ones(size, dtype=torch.uint8, device=device)
    turns = take_turns(lambda: target.copy_(source), seconds, device.type == "cuda")
    return 2 * size / statistics.median(turns) / 1e9


def bus_gbs(name: str, size: int, seconds: float, n: int) -> float:
    """Bus bandwidth, GB/s, of a collective of n ranks and `size` bytes.

    The formulas are those of nccl-tests, doc/PERFORMANCE.md.
    """
    if name == "send_recv":
        return size / seconds / 1e9
    times_sent = 2 if name == "all_reduce" else 1
    return times_sent * (n - 1) / n * size / seconds / 1e9


def pass_on(message, received, group) -> None:
    """Send `message` to the next rank of the group, and receive from the one before."""
    rank, n = group.rank(), group.size()
    next_rank = dist.get_global_rank(group, (rank + 1) % n)
    previous = dist.get_global_rank(group, (rank - 1) % n)
    send = dist.P2POp(dist.isend, message, next_rank, group)
    receive = dist.P2POp(dist.irecv, received, previous, group)
    for work in dist.batch_isend_irecv([send, receive]):
        work.wait()


def measure_collectives(group, device, sizes, seconds: float) -> tuple[dict, float]:
    """Bus bandwidth, {collective: {bytes: GB/s}}, and the us of an all-reduce of 4 bytes."""
    # The single-tensor collectives have these names from torch 2.13 on.
    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    gpu = device.type == "cuda"
    n = group.size()
    gbs = defaultdict(dict)
    for size in sizes:
        shard = torch.zeros(size // 4 // n, device=device)  # fp32: 4 bytes each
        whole = torch.zeros(n * len(shard), device=device)
        received = torch.empty_like(whole)
        calls = {
            "all_gather": functools.partial(all_gather, whole, shard, group=group),
            "reduce_scatter": functools.partial(reduce_scatter, shard, whole, group=group),
            "all_reduce": functools.partial(dist.all_reduce, whole, group=group),
            "send_recv": functools.partial(pass_on, whole, received, group),
        }
        for name, call in calls.items():
            median = statistics.median(take_turns(call, seconds, gpu, group))
            gbs[name][str(size)] = bus_gbs(name, whole.nbytes, median, n)

    tiny = torch.zeros(1, device=device)
    turns = take_turns(lambda: dist.all_reduce(tiny, group=group), seconds, gpu, group)
    return gbs, statistics.median(turns) * 1e6


def make_groups(world) -> dict:
    """{kind: this rank's group, or None if it would be alone}.

    A kind is left out if none of its groups has two ranks.
    """
    first_of_node = world.global_rank - world.local_rank  # launchers number a node's ranks in a row
    places = gather((first_of_node, world.local_rank))  # by global rank
    keys_by_kind = {  # ranks with equal keys are in one group
        "all": [0] * world.global_size,
        "node": [node for node, _ in places],
        "across": [local_rank for _, local_rank in places],
    }
    groups = {}
    for kind, keys in keys_by_kind.items():
        members = defaultdict(list)
        for global_rank, key in enumerate(keys):
            members[key].append(global_rank)
        several = [ranks for ranks in members.values() if len(ranks) > 1]
        if several:
            groups[kind], _ = dist.new_subgroups_by_enumeration(several)
    return groups


def gather(value) -> list:
    """`value` of every rank, on every rank."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def measure(world, seconds: float) -> dict:
    """This rank's place and figures: an entry of by_rank. seconds: of one measurement."""

    def show_progress(name: str, measurements: int) -> None:
        if world.global_rank == 0:
            duration = measurements * seconds
            print(f"measuring {name}: about {duration:.0f} s", file=sys.stderr, flush=True)

    sizes = SIZES[world.device.type]
    row = {
        "rank": world.global_rank,
        "node": world.global_rank - world.local_rank,
        "local_rank": world.local_rank,
        "host": socket.gethostname(),
        "device": devices.describe(world.device),
        "collectives_gbs": {},
        "latency_us": {},
    }
    show_progress("matmul", len(parallel.DTYPES) * len(sizes.matmul_rows))
    row["matmul_tflops"] = measure_matmul(world.device, sizes.matmul_rows, seconds)
    show_progress("memory", 1)
    row["memory_gbs"] = measure_memory(world.device, sizes.copied_bytes, seconds)

    for kind, group in make_groups(world).items():
        show_progress(f"collectives, {kind}", 4 * len(sizes.message_bytes) + 1)
        dist.barrier()  # now the previous kind has ended everywhere, and slows no group here
        if group is not None:
            gbs, latency = measure_collectives(group, world.device, sizes.message_bytes, seconds)
            row["collectives_gbs"][kind] = gbs
            row["latency_us"][kind] = latency
            dist.destroy_process_group(group)
    return row


# --- The figures of all ranks


def merge(trees: list, combine):
    """Nested dictionaries of figures -> one dictionary, whose figures are `combine(figures)`.

    A key may be missing in some of the trees.
    """
    if not isinstance(trees[0], dict):
        return combine(trees)
    keys = dict.fromkeys(key for tree in trees for key in tree)
    return {key: merge([tree[key] for tree in trees if key in tree], combine) for key in keys}


def slowest(rows: list[dict], figures: list[float]) -> dict:
    """The rank with the lowest figure, its host, and how far it is below the median, in %."""
    figure, row = min(zip(figures, rows, strict=True), key=lambda pair: pair[0])
    percent = 100 * (1 - figure / statistics.median(figures))
    return {"rank": row["rank"], "host": row["host"], "below_median_percent": percent}


def summarize(rows: list[dict], device_type: str, args: MachineArgs) -> dict:
    """The rows of all ranks -> the contents of machine.json, see the top of this file."""
    ranks_of_nodes = Counter(row["node"] for row in rows)
    nodes = len(ranks_of_nodes)
    largest = str(SIZES[device_type].matmul_rows[-1])
    matmuls = [row["matmul_tflops"]["bf16"][largest] for row in rows]
    memory = [row["memory_gbs"] for row in rows]
    return {
        "device": ", ".join(dict.fromkeys(row["device"] for row in rows)),
        "device_type": device_type,
        "ranks": len(rows),
        "nodes": nodes,
        "ranks_per_node": max(ranks_of_nodes.values()),
        "threads_per_rank": torch.get_num_threads(),
        "settings": asdict(args),
        **runlog.versions(),
        **{key: merge([row[key] for row in rows], combine) for key, combine in OVERALL.items()},
        "slowest": {"matmul": slowest(rows, matmuls), "memory": slowest(rows, memory)},
        "by_rank": rows,
    }


# --- The report


def report(machine: dict) -> str:
    """The contents of machine.json as text and tables."""
    sizes = SIZES[machine["device_type"]]
    counts = f"ranks: {machine['ranks']}, nodes: {machine['nodes']}"
    lines = [f"{counts}, device: {machine['device']}, torch {machine['torch']}, {machine['time']}"]

    columns = [f"{n:,}" for n in sizes.matmul_rows]
    lines += ["", table("matmul, TFLOP/s of a rank", columns, machine["matmul_tflops"])]

    bandwidths = {}
    for kind, by_name in machine["collectives_gbs"].items():
        bandwidths |= {f"{kind}: {name}": figures for name, figures in by_name.items()}
    if bandwidths:
        columns = [f"{size // MIB} MiB" for size in sizes.message_bytes]
        lines += ["", table("bus bandwidth, GB/s", columns, bandwidths)]

    lines += ["", f"memory: {machine['memory_gbs']:.4g} GB/s of a rank"]
    for kind, us in machine["latency_us"].items():
        lines.append(f"latency, {kind}: {us:.0f} us for an all-reduce of 4 bytes")
    for name, rank in machine["slowest"].items() if machine["ranks"] > 1 else ():
        distance = f"{rank['below_median_percent']:.1f} % below the median"
        lines.append(f"slowest in {name}: rank {rank['rank']} on {rank['host']}, {distance}")
    return "\n".join(lines)


def table(corner: str, columns: list[str], rows: dict[str, dict]) -> str:
    """A row of figures for each title."""
    cells = [(title, *(f"{figure:.4g}" for figure in row.values())) for title, row in rows.items()]
    return program.table([corner, *columns], cells)


def conclude(rows: list[dict], device_type: str, args: MachineArgs) -> None:
    """Print the report and write machine.json, atomically."""
    machine = summarize(rows, device_type, args)
    print(report(machine), flush=True)
    files.write_atomically(Path(args.out), json.dumps(machine, indent=1).encode())


def main(argv) -> None:
    """Measure on all ranks; rank 0 reports."""
    (args,) = config.load(argv, MachineArgs)
    world = processes.start(args.device)
    require(world.device.type in SIZES, f"{world.device.type} is not measured: set --device=cpu")
    processes.rank_zero_decides(lambda: Path(args.out).parent.mkdir(parents=True, exist_ok=True))
    rows = gather(measure(world, args.seconds))
    processes.rank_zero_decides(lambda: conclude(rows, world.device.type, args))


if __name__ == "__main__":
    processes.run(main)
