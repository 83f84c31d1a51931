"""planning/calibrate.py: what was put into a measurement comes out."""

import csv
import json
import math
from dataclasses import replace

import pytest
from conftest import ROOT, refusal

import devices
import plan
from bench import train as bench_train
from planning import calibrate, step_time
from planning.fleet import Fleet, FleetArgs, fleet_of
from planning.step_time import Constants

MI250 = devices.by_name("mi250")
FLEET = Fleet(MI250, 8, 8, 100)
ON_MI250 = FleetArgs(device="mi250", devices=8)
CONFIG = str(ROOT / "configs/mpt1b_mi250.py")
NAME = "AMD Instinct MI250X/MI250"

# The settings of runs on 8 and on 16 devices.
SETTINGS = [
    "--ranks=8 --microbatch_size=4 --expansion_ratio=2 --kv_n_heads=2 --sharding=ZERO1",
    "--ranks=8 --microbatch_size=8 --max_seq_len=1024 --activation_checkpointing=full",
    "--ranks=4 --microbatch_size=2 --max_seq_len=4096 --global_batch_size=64",
    "--ranks=16 --microbatch_size=2 --global_batch_size=32 --sharding=HYBRID_SHARD",
]


def table(path, pace: float, settings=SETTINGS, noise=(1.0,)) -> str:
    """A table of `bench train` whose speeds are predicted at this pace, times the noise in turn.

    Its last three rows must not count.
    """
    lines = []
    for i, flags in enumerate(settings):
        ((row,),) = bench_train.groups([CONFIG, *flags.split()])
        of_run = replace(FLEET, devices=row.ranks)
        rate = step_time.tokens_per_second(row.model_cfg, row.cfg, of_run, Constants(pace=pace))
        rate *= noise[i % len(noise)]
        measured = {"device": NAME, "precision": "bf16 (auto)", "nodes": -(-row.ranks // 8)}
        lines.append(row.columns | measured | {"tokens_per_second": rate})
    line = lines[-1]
    lines.append(line | {"status": "out of memory", "tokens_per_second": ""})
    lines.append(line | {"model": "transformers 2x32", "tokens_per_second": rate / 9})
    lines.append(line | {"precision": "fp32", "tokens_per_second": rate / 9})
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, lines[0])
        writer.writeheader()
        writer.writerows(lines)
    return str(path)


def machine(**more) -> dict:
    """A machine.json of one node, with other values if given."""
    bus = {
        "all_gather": {"1048576": 10.0, "134217728": 80.0},
        "reduce_scatter": {"134217728": 70.0},
    }
    measured = {
        "device": NAME,
        "ranks": 8,
        "nodes": 1,
        "matmul_tflops": {"bf16": {"2048": 90.0, "8192": 120.0}, "fp32": {"8192": 30.0}},
        "memory_gbs": 1300.0,
        "collectives_gbs": {"all": bus},
        "latency_us": {"all": 42.0},
    }
    return measured | more


def write(path, content: dict) -> str:
    """Write a .json; its path."""
    path.write_text(json.dumps(content))
    return str(path)


def from_files(*paths, args: FleetArgs = ON_MI250):
    """(runs, fleet, constants) of these files."""
    return calibrate.from_files(list(paths), args)


def test_the_pace_of_a_table_is_the_mean_of_its_runs(tmp_path):
    """The geometric one: a run twice as fast and one half as fast leave it as it is."""
    path = table(tmp_path / "a.csv", 1.37)
    runs, fleet, c = from_files(path)
    assert replace(fleet, notes=()) == fleet_of(ON_MI250)
    assert c.pace == pytest.approx(1.37, rel=1e-4)
    predicted = [run.predicted(fleet, c) / run.tokens_per_second for run in runs]
    assert predicted == pytest.approx([1] * 4, rel=1e-4)

    one_device = ["--ranks=1 --microbatch_size=2"] * 2
    path = table(tmp_path / "a.csv", 1.2, one_device, noise=(2, 0.5))
    runs, fleet, c = from_files(path)
    assert c.pace == pytest.approx(1.2, rel=1e-4)


def test_a_machine_of_one_node(tmp_path):
    path = write(tmp_path / "a.json", machine())
    _, fleet, c = from_files(path)
    assert fleet.device.reachable == pytest.approx(120 / 181.05)
    assert fleet.device.bandwidth_gbs == 1300
    assert fleet.bandwidth(8, 1) * c.link == pytest.approx(80e9)  # what collectives reached
    assert fleet.network_gbs == 100
    assert c.hop == pytest.approx(42e-6 / 14)
    _, fleet, _ = from_files(path, args=FleetArgs(device="mi250", bandwidth=650))
    assert fleet.device.bandwidth_gbs == 650  # a flag is stronger


def test_a_machine_says_how_large_a_node_is_and_collisions_count_once(tmp_path):
    """32 nodes of 4: their figure is what is left after collisions."""
    gathers = {name: {"all_gather": {"134217728": 20.0}} for name in ("all", "node")}
    of_many = machine(ranks=128, nodes=32, collectives_gbs=gathers)
    _, fleet, c = from_files(write(tmp_path / "a.json", of_many))
    assert (fleet.node_size, fleet.network_note, fleet.devices) == (4, "", 8)
    assert replace(fleet, devices=128).bandwidth(128, 1) * c.link == pytest.approx(20e9)
    assert replace(fleet, devices=1024).bandwidth(1024, 1) * c.link < 19.5e9


def test_a_table_and_a_machine_together(tmp_path, capsys):
    """The pace of all runs, on the machine's speeds; of two machines the later one is believed."""
    first = table(tmp_path / "a.csv", 1.1, SETTINGS[:2])
    second = table(tmp_path / "b.csv", 1.3, SETTINGS[2:])
    bus = write(tmp_path / "machine.json", machine())
    calibrate.main([first, second, bus])
    out = capsys.readouterr().out
    assert "speed calibrated by 4 runs" in out and "speeds of matmuls, memory and links" in out
    later = write(tmp_path / "later.json", machine(memory_gbs=1200.0))
    assert from_files(bus, later)[1].device.bandwidth_gbs == 1200

    flags = [CONFIG, f"--calibrate={first}:{bus}", "--devices=64", "--json"]
    plan.main(flags)
    found = json.loads(capsys.readouterr().out)
    assert found["device"] == "MI250 GCD"  # from the measurements
    assert any("calibrated by 2 runs" in line for line in found["assumed"])
    assert any("as `bench machine` measured" in line for line in found["assumed"])
    assert any("network 100 GB/s a node" in line for line in found["assumed"])
    plan.main([*flags, "--network=50"])
    slower = json.loads(capsys.readouterr().out)
    assert slower["tokens_per_second"] < found["tokens_per_second"]


# A table up to the device of its only row.
OK = "status,precision,model,device,ranks,tokens_per_second\nok,bf16,x,"
WRONG = {
    "a table without its columns": "model,status\nx,ok\n",
    "another device": OK + "NVIDIA A100-SXM4-80GB,8,1\n",
    "too fast": OK + ",8,1e12\n",
    "no JSON": "nothing",
    "matmuls above the peak": machine(matmul_tflops={"bf16": {"8192": 400}}),
    "a machine with other devices": machine(device="NVIDIA H100 80GB HBM3"),
    "a run that asks for help": OK.replace("tokens", "others,tokens") + "MI250,8,help,9e4\n",
    "a negative bandwidth": machine(memory_gbs=-1.0),
    "no number": machine(memory_gbs=math.nan),
    "a table of attention": {"cells": [{}], "device": "MI250"},
}


@pytest.mark.parametrize("content", WRONG.values(), ids=WRONG.keys())
def test_what_cannot_be_a_measurement_is_one_line_that_names_the_file(tmp_path, content):
    is_table = isinstance(content, str) and "status" in content
    path = tmp_path / ("a.csv" if is_table else "a.json")
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    assert str(path) in refusal(from_files, str(path))


def test_arguments_that_cannot_be():
    assert "usage: python " in refusal(calibrate.main, [])
    assert "no file 'nowhere.csv' to calibrate with" in refusal(from_files, "nowhere.csv")
