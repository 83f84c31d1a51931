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
    """A table with the columns that `bench train` writes, its speeds predicted at this pace.

    Its last three rows must not count.
    """
    measured = {"device": "AMD Instinct MI250X/MI250", "precision": "bf16 (auto)"}
    lines = []
    for size in (2, 4):
        ((row,),) = bench_train.groups([CONFIG, f"--microbatch_size={size}", "--ranks=8", *flags])
        rate = step_time.tokens_per_second(row.model_cfg, row.cfg, FLEET, Constants(pace=pace))
        line = row.columns | measured | {"tokens_per_second": rate}
        lines.append(line)
    lines.append(line | {"status": "out of memory", "tokens_per_second": ""})
    lines.append(line | {"model": "transformers 2x32", "tokens_per_second": rate / 9})
    lines.append(line | {"precision": "fp32", "tokens_per_second": rate / 9})
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, lines[0])
        writer.writeheader()
        writer.writerows(lines)
    return str(path)


@pytest.mark.parametrize("pace", [0.8, 1.0, 1.37])
def test_the_pace_of_a_table(tmp_path, pace):
    # Settings that have no column count as well.
    flags = ["--expansion_ratio=2", "--kv_n_heads=2", "--sharding=ZERO1"]
    fleet, c = calibrate.from_file(table(tmp_path / "a.csv", pace, flags), FLEET, step_time.OURS)
    assert fleet == FLEET
    assert c.pace == pytest.approx(pace, rel=1e-6)


def machine(**more) -> dict:
    """A machine.json of one node, with other values if given."""
    bus = {
        "all_gather": {"1048576": 10.0, "134217728": 80.0},
        "reduce_scatter": {"134217728": 70.0},
    }
    measured = {
        "device": "AMD Instinct MI250X/MI250",
        "ranks": 8,
        "nodes": 1,
        "matmul_tflops": {"bf16": {"2048": 90.0, "8192": 120.0}, "fp32": {"8192": 30.0}},
        "memory_gbs": 1300.0,
        "collectives_gbs": {"all": bus},
        "latency_us": {"all": 42.0},
    }
    return measured | more


def test_a_machine(tmp_path):
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(machine()))
    fleet, c = calibrate.from_file(str(path), FLEET, step_time.OURS)
    assert fleet.device.reachable == pytest.approx(120 / 181.05)
    assert fleet.device.bandwidth_gbs == 1300
    assert fleet.bandwidth(8, 1) * c.link == pytest.approx(80e9)  # what collectives reached
    assert fleet.network_gbs == 100
    assert c.hop == pytest.approx(42e-6 / 14)


def test_a_machine_of_two_nodes(tmp_path):
    speeds = {"all": 35.0, "node": 80.0, "across": 5.0}
    groups = {name: {"all_gather": {"134217728": gbs}} for name, gbs in speeds.items()}
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(machine(ranks=16, nodes=2, collectives_gbs=groups)))
    fleet, c = calibrate.from_file(str(path), FLEET, step_time.OURS)
    many = Fleet(fleet.device, 64, 8, fleet.network_gbs)
    assert many.bandwidth(8, 1) * c.link == pytest.approx(80e9)
    assert many.bandwidth(64, 1) * c.link == pytest.approx(35e9)


def broken(**more) -> str:
    """A machine.json with wrong values."""
    return json.dumps(machine(**more))


def with_matmuls_at(tflops: float) -> str:
    """A machine.json whose bf16 matmuls have this speed."""
    return broken(matmul_tflops={"bf16": {"8192": tflops}})


# A table up to the device of its only row.
OK = "status,precision,model,device,ranks,tokens_per_second\nok,bf16,x,"
OUT_OF_MEMORY = "model,status\nx,out of memory\n"
NO_USABLE_ROW = "has no row of this project's trainer in bf16 with status ok"
A100 = "NVIDIA A100-SXM4-80GB"
TABLE = "is not a table of `bench train`"
MACHINE = "is not a machine.json of `bench machine`"


@pytest.mark.parametrize("name, content, message", [
    ("a.csv", "model,status\nx,ok\n", f"{TABLE}: KeyError 'precision'"),
    ("a.csv", OUT_OF_MEMORY, NO_USABLE_ROW),
    ("a.csv", OK + f"{A100},8,1\n", f"measured on '{A100}', not on MI250 GCD"),
    ("a.csv", OK + "cpu,8,1\n", "measured on 'cpu', not on MI250 GCD"),
    ("a.csv", OK + ",8,0\n", "tokens_per_second must be more than 0, not 0"),
    ("a.csv", OK + ",8,nan\n", "tokens_per_second must be more than 0, not nan"),
    ("a.csv", OK + ",8,1e12\n", "times the predicted time: is --device right?"),
    ("a.csv", OK + ",8,1e-300\n", "times the predicted time: is --device right?"),
    ("a.json", "[]", MACHINE),
    ("a.json", '{"device": "", "ranks": 1}', f"{MACHINE}: KeyError 'matmul_tflops'"),
    ("a.json", "nothing", MACHINE),
    ("a.json", broken(collectives_gbs=[]), f"{MACHINE}: AttributeError"),
    ("a.json", broken(memory_gbs=None), f"{MACHINE}: TypeError"),
    ("a.json", with_matmuls_at(400), "matmuls at 221% of MI250 GCD's peak"),
    ("a.json", with_matmuls_at(0), "matmul_tflops must be more than 0, not 0"),
    ("a.json", broken(device="NVIDIA H100 80GB HBM3"), "not on MI250 GCD"),
])  # fmt: skip
def test_mistakes_are_told(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError) as error:
        calibrate.from_file(str(tmp_path / name), FLEET, step_time.OURS)
    assert message in str(error.value)


def test_a_missing_file_is_told():
    with pytest.raises(UserError, match="no file 'nowhere.csv' to calibrate with"):
        calibrate.from_file("nowhere.csv", FLEET, step_time.OURS)


HUGE = {"device": "MI250", "ranks": 8, "matmul_tflops": {"bf16": {"1": 10**400}}}
HELP_ROW = (
    "status,model,precision,device,ranks,tokens_per_second,others\n"
    "ok,mpt,bf16,MI250,8,9,help\n"
)  # fmt: skip


@pytest.mark.parametrize("name, content", [
    ("a.json", "[" * 10**5),
    ("a.json", json.dumps(HUGE)),
    ("a.json", json.dumps({"device": 7})),
    ("a.csv", HELP_ROW),
    ("a.csv", "status,model,precision\nok,mpt,bf16,more,cells\n"),
    ("a.csv", "status\n" + "x" * 200_000),
    ("a.csv", "status,model\nok,\0\n"),
])  # fmt: skip
def test_measurements_of_a_wrong_shape_are_one_line(name, content, tmp_path):
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(UserError) as error:
        calibrate.from_file(str(path), FLEET, step_time.OURS)
    assert "\n" not in str(error.value)
    assert str(path) in str(error.value)
