"""calibrate.py: what was put into a measurement comes out."""

import csv
import json
from pathlib import Path

import pytest

import bench_train
import calibrate
import devices
import speed
from config import UserError
from speed import Constants, Fleet

MI250 = devices.by_name("mi250")
FLEET = Fleet(MI250, 8, 8, 100)
CONFIG = str(Path(__file__).parent.parent / "configs/mpt1b_mi250.py")


def table(path, pace: float, flags=()) -> str:
    """A table with the columns that `bench.py train` writes, its speeds predicted at this pace."""
    lines = []
    for size in (2, 4):
        ((row,),) = bench_train.groups([CONFIG, f"--microbatch_size={size}", "--ranks=8", *flags])
        fleet, c = Fleet(MI250, 8, 8, 100), Constants(pace=pace)
        rate = speed.tokens_per_second(row.model_cfg, row.cfg, fleet, c)
        lines.append(row.columns | {"tokens_per_second": rate})
    lines.append(row.columns | {"status": "out of memory", "tokens_per_second": ""})
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, lines[0])
        writer.writeheader()
        writer.writerows(lines)
    return str(path)


@pytest.mark.parametrize("pace", [0.8, 1.0, 1.37])
def test_the_pace_of_a_table(tmp_path, pace):
    flags = ["--expansion_ratio=2", "--kv_n_heads=2", "--sharding=ZERO1"]  # others than the columns count as well
    fleet, c = calibrate.from_file(table(tmp_path / "a.csv", pace, flags), FLEET, speed.OURS)
    assert fleet == FLEET and c.pace == pytest.approx(pace, rel=1e-6)


def machine(**more) -> dict:
    bus = {"all_gather": {"1048576": 10.0, "134217728": 80.0}, "reduce_scatter": {"134217728": 70.0}}
    found = {
        "ranks": 8,
        "nodes": 1,
        "matmul_tflops": {"bf16": {"2048": 90.0, "8192": 120.0}, "fp32": {"8192": 30.0}},
        "memory_gbs": 1300.0,
        "collectives_gbs": {"all": bus},
        "latency_us": {"all": 42.0},
    }
    return found | more


def test_a_machine(tmp_path):
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(machine()))
    fleet, c = calibrate.from_file(str(path), FLEET, speed.OURS)
    assert fleet.device.reachable == pytest.approx(120 / 181.05) and fleet.device.bandwidth_gbs == 1300
    assert fleet.bandwidth(8, 1) * c.link == pytest.approx(80e9)  # what collectives reached
    assert c.hop == pytest.approx(42e-6 / 14) and fleet.network_gbs == 100


def test_a_machine_of_two_nodes(tmp_path):
    groups = {
        name: {"all_gather": {"134217728": gbs}} for name, gbs in (("all", 35.0), ("node", 80.0), ("across", 5.0))
    }
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(machine(ranks=16, nodes=2, collectives_gbs=groups)))
    fleet, c = calibrate.from_file(str(path), FLEET, speed.OURS)
    many = Fleet(fleet.device, 64, 8, fleet.network_gbs)
    assert many.bandwidth(8, 1) * c.link == pytest.approx(80e9)
    assert many.bandwidth(64, 1) * c.link == pytest.approx(35e9)


@pytest.mark.parametrize(
    "name, content, words",
    [
        ("a.csv", "model,status\nx,ok\n", "is not a table of `bench.py train`: KeyError 'ranks'"),
        ("a.csv", "model,status\nx,out of memory\n", "has no row with status ok"),
        ("a.csv", "status,ranks,d_model\nok,1,seven\n", "d_model in the command line is 'seven'"),
        ("a.json", "[]", "is not a machine.json of `bench.py machine`"),
        ("a.json", '{"ranks": 1}', "is not a machine.json of `bench.py machine`: KeyError 'matmul_tflops'"),
        ("a.json", "nothing", "is not a machine.json of `bench.py machine`"),
    ],
)
def test_mistakes_are_told(tmp_path, name, content, words):
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError) as error:
        calibrate.from_file(str(tmp_path / name), FLEET, speed.OURS)
    assert words in str(error.value)


def test_a_missing_file_is_told():
    with pytest.raises(UserError, match="no file 'nowhere.csv' to calibrate with"):
        calibrate.from_file("nowhere.csv", FLEET, speed.OURS)
