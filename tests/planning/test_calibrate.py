"""planning/calibrate.py: what was put into a measurement comes out."""

import csv
import json

import pytest
from conftest import ROOT

import devices
from bench import train as bench_train
from config import UserError
from planning import calibrate, step_time
from planning.step_time import Constants, Fleet

MI250 = devices.by_name("mi250")
FLEET = Fleet(MI250, 8, 8, 100)
CONFIG = str(ROOT / "configs/mpt1b_mi250.py")


def table(path, pace: float, flags=()) -> str:
    """A table with the columns that `bench train` writes, its speeds predicted at this pace."""
    lines = []
    for size in (2, 4):
        ((row,),) = bench_train.groups([CONFIG, f"--microbatch_size={size}", "--ranks=8", *flags])
        fleet, c = Fleet(MI250, 8, 8, 100), Constants(pace=pace)
        rate = step_time.tokens_per_second(row.model_cfg, row.cfg, fleet, c)
        done = {"device": "AMD Instinct MI250X/MI250", "precision": "bf16 (auto)"}
        lines.append(row.columns | done | {"tokens_per_second": rate})
    lines.append(row.columns | done | {"status": "out of memory", "tokens_per_second": ""})
    lines.append(row.columns | done | {"model": "transformers 2x32", "tokens_per_second": rate / 9})
    lines.append(row.columns | done | {"precision": "fp32", "tokens_per_second": rate / 9})
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, lines[0])
        writer.writeheader()
        writer.writerows(lines)
    return str(path)


@pytest.mark.parametrize("pace", [0.8, 1.0, 1.37])
def test_the_pace_of_a_table(tmp_path, pace):
    flags = [
        "--expansion_ratio=2",
        "--kv_n_heads=2",
        "--sharding=ZERO1",
    ]  # others than the columns count as well
    fleet, c = calibrate.from_file(table(tmp_path / "a.csv", pace, flags), FLEET, step_time.OURS)
    assert fleet == FLEET and c.pace == pytest.approx(pace, rel=1e-6)


def machine(**more) -> dict:
    bus = {
        "all_gather": {"1048576": 10.0, "134217728": 80.0},
        "reduce_scatter": {"134217728": 70.0},
    }
    found = {
        "device": "AMD Instinct MI250X/MI250",
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
    fleet, c = calibrate.from_file(str(path), FLEET, step_time.OURS)
    assert (
        fleet.device.reachable == pytest.approx(120 / 181.05) and fleet.device.bandwidth_gbs == 1300
    )
    assert fleet.bandwidth(8, 1) * c.link == pytest.approx(80e9)  # what collectives reached
    assert c.hop == pytest.approx(42e-6 / 14) and fleet.network_gbs == 100


def test_a_machine_of_two_nodes(tmp_path):
    groups = {
        name: {"all_gather": {"134217728": gbs}}
        for name, gbs in (("all", 35.0), ("node", 80.0), ("across", 5.0))
    }
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(machine(ranks=16, nodes=2, collectives_gbs=groups)))
    fleet, c = calibrate.from_file(str(path), FLEET, step_time.OURS)
    many = Fleet(fleet.device, 64, 8, fleet.network_gbs)
    assert many.bandwidth(8, 1) * c.link == pytest.approx(80e9)
    assert many.bandwidth(64, 1) * c.link == pytest.approx(35e9)


def broken(**more) -> str:
    return json.dumps(machine(**more))


OK = "status,precision,model,device,ranks,tokens_per_second\nok,bf16,x,"


@pytest.mark.parametrize(
    "name, content, words",
    [
        ("a.csv", "model,status\nx,ok\n", "is not a table of `bench train`: KeyError 'precision'"),
        (
            "a.csv",
            "model,status\nx,out of memory\n",
            "has no row of this project's trainer in bf16 with status ok",
        ),
        (
            "a.csv",
            OK + "NVIDIA A100-SXM4-80GB,8,1\n",
            "measured on 'NVIDIA A100-SXM4-80GB', not on MI250 GCD",
        ),
        ("a.csv", OK + "cpu,8,1\n", "measured on 'cpu', not on MI250 GCD"),
        ("a.csv", OK + ",8,0\n", "tokens_per_second must be more than 0, not 0"),
        ("a.csv", OK + ",8,nan\n", "tokens_per_second must be more than 0, not nan"),
        ("a.csv", OK + ",8,1e12\n", "times the predicted time: is --device right?"),
        ("a.csv", OK + ",8,1e-300\n", "times the predicted time: is --device right?"),
        ("a.json", "[]", "is not a machine.json of `bench machine`"),
        (
            "a.json",
            '{"device": "", "ranks": 1}',
            "is not a machine.json of `bench machine`: KeyError 'matmul_tflops'",
        ),
        ("a.json", "nothing", "is not a machine.json of `bench machine`"),
        (
            "a.json",
            broken(collectives_gbs=[]),
            "is not a machine.json of `bench machine`: AttributeError",
        ),
        ("a.json", broken(memory_gbs=None), "is not a machine.json of `bench machine`: TypeError"),
        (
            "a.json",
            broken(matmul_tflops={"bf16": {"8192": 400}}),
            "matmuls at 221% of MI250 GCD's peak",
        ),
        (
            "a.json",
            broken(matmul_tflops={"bf16": {"8192": 0}}),
            "matmul_tflops must be more than 0, not 0",
        ),
        ("a.json", broken(device="NVIDIA H100 80GB HBM3"), "not on MI250 GCD"),
    ],
)
def test_mistakes_are_told(tmp_path, name, content, words):
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError) as error:
        calibrate.from_file(str(tmp_path / name), FLEET, step_time.OURS)
    assert words in str(error.value)


def test_a_missing_file_is_told():
    with pytest.raises(UserError, match="no file 'nowhere.csv' to calibrate with"):
        calibrate.from_file("nowhere.csv", FLEET, step_time.OURS)


@pytest.mark.parametrize(
    "name, content",
    [
        ("a.json", "[" * 10**5),
        (
            "a.json",
            json.dumps({"device": "MI250", "ranks": 8, "matmul_tflops": {"bf16": {"1": 10**400}}}),
        ),
        ("a.json", json.dumps({"device": 7})),
        (
            "a.csv",
            "status,model,precision,device,ranks,tokens_per_second,others\nok,mpt,bf16,MI250,8,9,help\n",
        ),
        ("a.csv", "status,model,precision\nok,mpt,bf16,more,cells\n"),
        ("a.csv", "status\n" + "x" * 200_000),
        ("a.csv", "status,model\nok,\0\n"),
    ],
)
def test_measurements_of_a_wrong_shape_are_one_line(name, content, tmp_path):
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(UserError) as error:
        calibrate.from_file(str(path), FLEET, step_time.OURS)
    assert "\n" not in str(error.value) and str(path) in str(error.value)
