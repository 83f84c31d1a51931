"""bench/machine.py: its formulas by hand, then the program alone, with two ranks, on two nodes."""

import json
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from bench import machine as bench_machine
from program import UserError

TINY = ["--seconds=0.001", "--device=cpu", "--out=results/machine.json"]
COLLECTIVES = ["all_gather", "reduce_scatter", "all_reduce", "send_recv"]


def check_matmul_and_memory(machine: dict) -> None:
    for dtype in ("bf16", "fp32"):
        tflops = machine["matmul_tflops"][dtype]
        assert list(tflops) == ["256", "512", "1024"] and min(tflops.values()) > 0
    assert 0.1 < machine["memory_gbs"] < 1e4


def check_collectives(figures: dict, latency: dict, kinds: list[str]) -> None:
    assert list(figures) == list(latency) == kinds
    for kind in kinds:
        assert list(figures[kind]) == COLLECTIVES
        for by_size in figures[kind].values():
            assert list(by_size) == ["1048576", "4194304", "16777216"]
            assert all(1e-4 < gbs < 1e3 for gbs in by_size.values())
        assert 1 < latency[kind] < 1e7


@pytest.mark.parametrize("name, ranks, gbs", [
    ("all_gather", 4, 6),  # 8 GB/s, and each rank sends 3/4 of the message
    ("reduce_scatter", 4, 6),
    ("all_reduce", 4, 12),  # twice that
    ("all_reduce", 2, 8),
    ("send_recv", 4, 8),
])  # fmt: skip
def test_bus_bandwidth_by_hand(name, ranks, gbs):
    assert bench_machine.bus_gbs(name, 800_000_000, 0.1, ranks) == pytest.approx(gbs)


def take_turns_of_a_sleep(world) -> tuple[list[float], int]:
    calls = []

    def call():
        calls.append(1)
        time.sleep(0.02 if world.global_rank == 0 else 0.002)

    return bench_machine.take_turns(call, 0.22, gpu=False), len(calls)


@pytest.mark.slow
def test_every_rank_makes_as_many_calls_as_the_slowest_has_time_for(ranks):
    results = ranks(4)(take_turns_of_a_sleep)
    assert len({(len(turns), calls) for turns, calls in results}) == 1
    slow_turns, calls = results[0]
    fast_turns, _ = results[1]
    assert 1 <= len(slow_turns) <= 5
    assert 3 <= calls <= 2 + 0.22 / 0.02  # 2 warm up; a fast rank alone has time for 110
    assert min(slow_turns) >= 0.02 > 0.01 > min(fast_turns) >= 0.002


@pytest.mark.slow
def test_two_ranks_of_one_node(torchrun, tmp_path):
    done = torchrun(2, *TINY, program="bench machine")
    assert done.returncode == 0, done.stderr
    written = [path.name for path in (tmp_path / "results").iterdir()]
    assert written == ["machine.json"]  # and no half-written file
    assert "Warning" not in done.stderr
    machine, text = json.loads((tmp_path / "results/machine.json").read_text()), done.stdout
    assert machine["torch"] == torch.__version__ and machine["settings"]["seconds"] == 0.001
    check_matmul_and_memory(machine)
    check_collectives(machine["collectives_gbs"], machine["latency_us"], ["all", "node"])
    assert [machine[key] for key in ("ranks", "nodes", "ranks_per_node")] == [2, 1, 2]
    figures = {
        "matmul": [row["matmul_tflops"]["bf16"]["1024"] for row in machine["by_rank"]],
        "memory": [row["memory_gbs"] for row in machine["by_rank"]],
    }
    for name, by_rank in figures.items():
        slowest = by_rank.index(min(by_rank))
        assert machine["slowest"][name]["rank"] == slowest
    assert "all: all_gather" in text and "node: all_reduce" in text and "across" not in text


def groups_of(world, local_ranks) -> dict:
    """The ranks in each group of this rank, if it has another local rank."""
    groups = bench_machine.make_groups(replace(world, local_rank=local_ranks[world.global_rank]))
    found = {}
    for kind, group in groups.items():
        found[kind] = group and dist.get_process_group_ranks(group)
        if group:  # ranks that keep unequal numbers of groups cannot meet in `processes.group_of`
            dist.destroy_process_group(group)
    return found


def measure_as(world, local_ranks) -> dict:
    return bench_machine.measure(replace(world, local_rank=local_ranks[world.global_rank]), 0.001)


@pytest.mark.slow
def test_groups_of_two_nodes(ranks):
    everyone = [0, 1, 2, 3]
    even = ranks(4)(groups_of, [0, 1, 0, 1])
    assert even[1] == {"all": everyone, "node": [0, 1], "across": [1, 3]}
    assert even[2] == {"all": everyone, "node": [2, 3], "across": [0, 2]}
    uneven = ranks(4)(groups_of, [0, 1, 2, 0])
    assert uneven[2] == {"all": everyone, "node": [0, 1, 2], "across": None}
    assert uneven[3] == {"all": everyone, "node": None, "across": [0, 3]}
    assert ranks(4)(groups_of, [0, 0, 0, 0])[3] == {"all": everyone, "across": everyone}


@pytest.mark.slow
def test_a_node_of_three_ranks_and_one_of_one(ranks):
    rows = ranks(4)(measure_as, [0, 1, 2, 0])
    kinds = [["all", "node", "across"], ["all", "node"], ["all", "node"], ["all", "across"]]
    for row, kinds_of_row in zip(rows, kinds, strict=True):
        check_collectives(row["collectives_gbs"], row["latency_us"], kinds_of_row)
    machine = bench_machine.summarize(rows, "cpu", bench_machine.MachineArgs())
    assert [machine[key] for key in ("ranks", "nodes", "ranks_per_node")] == [4, 2, 3]

    def all_reduce_across_nodes(figures):
        return figures["collectives_gbs"]["across"]["all_reduce"]["1048576"]

    measured = [all_reduce_across_nodes(row) for row in (rows[0], rows[3])]
    assert all_reduce_across_nodes(machine) == min(measured)
    assert "across: all_reduce" in bench_machine.report(machine)


def test_a_wrong_setting_is_refused():
    with pytest.raises(UserError, match="seconds must be from"):
        bench_machine.main(["--seconds=0"])


@pytest.mark.gpu
def test_a_gpu_is_timed_in_its_queue(tmp_path, python):
    done = python("--seconds=0.05", "--device=cuda", program="bench machine")
    assert done.returncode == 0, done.stderr
    machine = json.loads((tmp_path / "machine.json").read_text())
    assert 1 < machine["matmul_tflops"]["bf16"]["8192"] < 1e4 and 50 < machine["memory_gbs"] < 2e4
