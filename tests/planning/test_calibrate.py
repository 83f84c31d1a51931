"""planning/calibrate.py: what was put into a measurement comes out."""

import csv
import json
import re
from dataclasses import replace

import pytest
from conftest import ROOT

import devices
import plan
from bench import train as bench_train
from config import UserError
from planning import calibrate, step_time
from planning.fleet import Fleet, FleetArgs, fleet_of, network_words
from planning.step_time import Constants

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
    assert replace(fleet, notes=()) == FLEET
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
    assert fleet.node_size == 8 and fleet.devices == FLEET.devices


def test_a_machine_says_how_large_a_node_is_and_collisions_count_once(tmp_path):
    """32 nodes of 4: their figure is what is left after collisions."""
    groups = {name: {"all_gather": {"134217728": 20.0}} for name in ("all", "node")}
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(machine(ranks=128, nodes=32, collectives_gbs=groups)))
    fleet, c = calibrate.from_file(str(path), ASSUMED, step_time.OURS)
    assert (fleet.node_size, fleet.network_from) == (4, "measured")
    assert replace(fleet, devices=128).bandwidth(128, 1) * c.link == pytest.approx(20e9)
    assert replace(fleet, devices=1024).bandwidth(1024, 1) * c.link < 19.5e9


@pytest.mark.parametrize("more, words", [
    ({"ranks": 1, "collectives_gbs": {}}, "speeds of matmuls and memory as"),
    ({}, "links as `bench machine` measured them on one node; its latency is taken between"),
])  # fmt: skip
def test_a_machine_without_a_run_says_that_none_was_measured(tmp_path, more, words):
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(machine(**more)))
    fleet, _ = calibrate.from_file(str(path), FLEET, step_time.OURS)
    first, second = fleet.notes
    assert words in first
    assert second.startswith("no training run was measured: the rest is LLM Foundry's of 2023")


def test_the_file_that_is_named_later_is_believed(tmp_path):
    """And any file rather than one that keeps older measurements, wherever it is named."""
    older, newer = (tmp_path / f"{name}.json" for name in ("older", "newer"))
    older.write_text(json.dumps(machine(memory_gbs=1000.0)))
    newer.write_text(json.dumps(machine(memory_gbs=1200.0)))
    attention = tmp_path / "attention.json"
    attention.write_text(attention_table(0.3 * 181.05))
    kept = tmp_path / "kept.json"
    kept.write_text(saved(machine=machine(memory_gbs=900.0)))

    def device(*paths) -> devices.Device:
        """What these files make of an MI250."""
        found = calibrate.from_files([str(path) for path in paths], ASSUMED, step_time.OURS)
        return found.fleet.device

    assert device(older, newer).bandwidth_gbs == 1200
    assert device(newer, older, kept).bandwidth_gbs == 1000
    assert device(kept).bandwidth_gbs == 900
    for paths in ((attention, kept), (kept, attention)):
        assert device(*paths).attention == pytest.approx(0.3)


def test_an_assumed_or_published_network_grows_with_the_nodes_of_a_file(tmp_path):
    kept = tmp_path / "kept.json"
    kept.write_text(saved(node_size=4))
    for args in (FleetArgs(device="mi250"), FleetArgs(machine="mosaicml-mi250")):
        fleet, _ = calibrate.from_file(str(kept), fleet_of(args), step_time.OURS)
        assert (fleet.node_size, fleet.network_gbs) == (4, 50)
    given = fleet_of(FleetArgs(device="mi250", network=100))
    fleet, _ = calibrate.from_file(str(kept), given, step_time.OURS)
    assert (fleet.node_size, fleet.network_gbs) == (4, 100)


# The settings of runs on 8 and on 16 devices. With short sequences attention takes little.
ONE_NODE = [
    "--ranks=8 --microbatch_size=4",
    "--ranks=8 --microbatch_size=1 --max_seq_len=8192 --global_batch_size=64",
    "--ranks=8 --microbatch_size=8 --max_seq_len=1024 --activation_checkpointing=full",
    "--ranks=4 --microbatch_size=2 --max_seq_len=4096 --global_batch_size=64",
]
TWO_NODES = [
    "--ranks=16 --microbatch_size=1 --global_batch_size=16",
    "--ranks=16 --microbatch_size=2 --global_batch_size=32 --sharding=ZERO1",
]


def runs(path, fleet: Fleet, c: Constants, settings: list[str], noise=(1.0,)) -> str:
    """A table of runs with these settings, whose speeds are predicted, times the noise in turn."""
    lines = []
    for i, flags in enumerate(settings):
        ((row,),) = bench_train.groups([CONFIG, *flags.split()])
        of_run = replace(fleet, devices=row.ranks, node_size=min(8, row.ranks))
        rate = step_time.tokens_per_second(row.model_cfg, row.cfg, of_run, c)
        measured = {"device": "AMD Instinct MI250X/MI250", "precision": "bf16"}
        measured |= {"nodes": -(-row.ranks // 8)}
        measured |= {"tokens_per_second": rate * noise[i % len(noise)]}
        lines.append(row.columns | measured)
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, lines[0])
        writer.writeheader()
        writer.writerows(lines)
    return str(path)


ASSUMED = fleet_of(FleetArgs(device="mi250"))  # its network is assumed
ODD = replace(MI250, attention=0.4)


def test_what_runs_on_two_nodes_measure(tmp_path):
    truth = Fleet(ODD, 16, 8, 37)
    path = runs(tmp_path / "a.csv", truth, Constants(pace=1.2), ONE_NODE + TWO_NODES)
    found = calibrate.from_files([path], ASSUMED, step_time.OURS)
    assert found.fleet.device.attention == pytest.approx(0.4, rel=0.02)
    assert found.fleet.network_gbs == pytest.approx(37, rel=0.02)
    assert found.fleet.network_from == "measured"
    assert found.c.pace == pytest.approx(1.2, rel=0.01)
    for left_out, run in zip(found.left_out, found.runs, strict=True):
        assert left_out == pytest.approx(run.measured, rel=0.02)


@pytest.mark.parametrize(
    "truth, noise, assumed, of_plan, network_from",
    [
        # The links of an MI250 are as fast as the network that is assumed: nothing beyond it shows.
        (100, 1.05, None, 100, "assumed"),
        (400, 1.0, None, 100, "assumed"),
        (400, 1.0, 40, 100, "at least"),
        (37, 1.0, 40, 37, "measured"),
        (60, 1.0, None, 60, "measured"),
    ],
)
def test_a_network_that_is_fast_enough_is_not_measured(
    tmp_path, truth, noise, assumed, of_plan, network_from
):
    """The runs on two nodes are slower with less, and no faster with more."""
    of_noise = [1.0] * len(ONE_NODE) + [noise] * len(TWO_NODES)
    fleet = Fleet(MI250, 16, 8, truth)
    path = runs(tmp_path / "a.csv", fleet, Constants(), ONE_NODE + TWO_NODES, of_noise)
    before = replace(ASSUMED, network_gbs=assumed or ASSUMED.network_gbs)
    found, _ = calibrate.from_file(path, before, step_time.OURS)
    assert found.network_gbs == pytest.approx(of_plan, rel=0.02)
    assert found.network_from == network_from
    told = [note for note in found.notes if "show only a network of at least" in note]
    assert len(told) == (network_from != "measured")
    if told:
        least = float(re.search(r"at least ([0-9.]+) GB/s", told[0])[1])
        assert least == pytest.approx(min(truth, 100), rel=0.1)
    words = network_words(found, FleetArgs(device="mi250"))
    assert words.endswith(": measured") == (network_from == "measured")
    assert ("at least so much was measured" in words) == (network_from == "at least")


def test_runs_on_one_node_measure_no_network(tmp_path):
    path = runs(tmp_path / "a.csv", FLEET, Constants(pace=1.2), ONE_NODE)
    fleet, c = calibrate.from_file(path, ASSUMED, step_time.OURS)
    assert (fleet.network_gbs, fleet.network_from) == (100, "assumed")
    assert c.pace == pytest.approx(1.2, rel=1e-3)
    assert fleet.device.attention is None  # the assumed one was right


@pytest.mark.parametrize("settings, cause", [
    (TWO_NODES, "it cannot be told from the pace without a run on one node"),
    ([ONE_NODE[0], "--ranks=16 --microbatch_size=4 --global_batch_size=4096"], "hardly depend"),
])  # fmt: skip
def test_runs_that_say_nothing_of_the_network(tmp_path, settings, cause):
    """By themselves, or with thousands of tokens for each byte."""
    path = runs(tmp_path / "a.csv", Fleet(MI250, 16, 8, 37), Constants(), settings)
    fleet, _ = calibrate.from_file(path, ASSUMED, step_time.OURS)
    assert (fleet.network_gbs, fleet.network_from) == (100, "assumed")
    (note,) = [note for note in fleet.notes if "did not measure the network" in note]
    assert cause in note


def test_runs_that_do_not_measure_the_network_do_not_blur_the_pace(tmp_path):
    settings = [ONE_NODE[0], "--ranks=16 --microbatch_size=4 --global_batch_size=4096"]
    path = runs(tmp_path / "a.csv", FLEET, Constants(pace=1.1), settings, noise=(1, 0.8))
    _, c = calibrate.from_file(path, ASSUMED, step_time.OURS)
    assert c.pace == pytest.approx(1.1, rel=1e-4)


def test_a_network_that_the_user_sets_is_not_fitted(tmp_path):
    path = runs(tmp_path / "a.csv", Fleet(MI250, 16, 8, 37), Constants(), ONE_NODE + TWO_NODES)
    given = fleet_of(FleetArgs(device="mi250", network=50))
    fleet, _ = calibrate.from_file(path, given, step_time.OURS)
    assert (fleet.network_gbs, fleet.network_from) == (50, "set")


def test_noise_is_not_fitted_and_shows_in_the_leave_one_out_error(tmp_path):
    noise = (1.02, 0.99, 0.98, 1.01)
    path = runs(tmp_path / "a.csv", FLEET, Constants(), ONE_NODE, noise)
    found = calibrate.from_files([path], ASSUMED, step_time.OURS)
    assert found.fleet.device.attention is None
    errors = [rate / run.measured for rate, run in zip(found.left_out, found.runs, strict=True)]
    for error, factor in zip(errors, noise, strict=True):
        assert error == pytest.approx(1 / factor ** (4 / 3), abs=0.004)  # 3 others, of mean 1
    assert "error 2.0% in the median, at most 2.7%" in found.fleet.notes[0]


def test_measurements_are_kept_in_one_file_and_added_to(tmp_path, capsys):
    """Several files, then the file that keeps them and another table: the same as all at once."""
    first = runs(tmp_path / "a.csv", FLEET, Constants(pace=1.1), ONE_NODE[:2])
    second = runs(tmp_path / "b.csv", FLEET, Constants(pace=1.3), ONE_NODE[2:])
    bus = tmp_path / "machine.json"
    bus.write_text(json.dumps(machine()))
    kept = str(tmp_path / "mine.json")
    calibrate.main([first, str(bus), f"--save={kept}"])
    out = capsys.readouterr().out
    assert "left out" in out and "speed calibrated by 2 runs, each predicted by the others" in out
    calibrate.main([kept, second, first, f"--save={kept}"])  # the first rows once more
    assert "speed calibrated by 4 runs" in capsys.readouterr().out

    at_once = calibrate.from_files([first, second, str(bus)], ASSUMED, step_time.OURS)
    of_kept = calibrate.from_files([kept], ASSUMED, step_time.OURS)
    assert of_kept.c == at_once.c
    assert of_kept.fleet.device == at_once.fleet.device
    assert sorted(of_kept.left_out) == pytest.approx(sorted(at_once.left_out))


def test_attention_as_it_was_measured(tmp_path):
    """It is kept with the runs, and not fitted to them."""
    path = runs(tmp_path / "a.csv", Fleet(ODD, 16, 8, 37), Constants(pace=1.2), ONE_NODE)
    measured, kept = tmp_path / "attention.json", str(tmp_path / "mine.json")
    measured.write_text(attention_table(0.3 * 181.05))
    calibrate.main([str(measured), path, f"--save={kept}"])
    for paths in ([path, str(measured)], [kept]):
        found = calibrate.from_files(paths, ASSUMED, step_time.OURS)
        assert found.fleet.device.attention == pytest.approx(0.3)
        assert found.fleet.notes[0].startswith("attention at 30% of the peak, as `bench attention`")


def test_a_plan_takes_its_device_from_the_measurements(tmp_path, capsys):
    """The network stays assumed: a table of one node does not measure it. A flag is stronger."""
    path = runs(tmp_path / "a.csv", FLEET, Constants(pace=1.1), ONE_NODE)
    flags = [CONFIG, f"--calibrate={path}", "--devices=64", "--json"]
    plan.main(flags)
    found = json.loads(capsys.readouterr().out)
    assert found["device"] == "MI250 GCD"
    assert any("speed calibrated by 4 runs" in line for line in found["assumed"])
    assert any("network 100 GB/s a node" in line for line in found["assumed"])
    plan.main([*flags, "--network=50"])
    slower = json.loads(capsys.readouterr().out)
    assert not any("network" in line for line in slower["assumed"])
    assert slower["tokens_per_second"] < found["tokens_per_second"]


@pytest.mark.parametrize("question", ["--sweep_devices=8,16", "--budget=1"])
@pytest.mark.parametrize("flags", [[], ["--price=1"]])
def test_every_answer_takes_its_device_from_the_measurements(tmp_path, capsys, question, flags):
    argv = [question, *flags, f"--calibrate={table(tmp_path / 'a.csv', 1.2)}"]
    argv += [] if "budget" in question else [CONFIG]
    answers = []
    for device in ([], ["--device=mi250"]):
        plan.main([*argv, *device])
        answers.append(capsys.readouterr().out)
    assert "MI250 GCD" in answers[0]
    assert answers[0] == answers[1]


def test_of_two_kinds_of_device_one_is_calibrated(tmp_path, capsys):
    """As the message about a single file says: none between the commas is a kind without."""
    path = table(tmp_path / "a.csv", 1.2)
    kinds = [CONFIG, "--device=mi250,h100", "--devices=8", "--json"]
    with pytest.raises(UserError, match="or none, between commas") as error:
        plan.main([*kinds, f"--calibrate={path}"])
    fix = str(error.value).rpartition(" ")[2]
    plan.main([*kinds, fix])
    with_file, without = json.loads(capsys.readouterr().out)
    assert any("calibrated" in line for line in with_file["assumed"])
    assert not any("calibrated" in line for line in without["assumed"])


def test_a_flag_is_stronger_than_a_measurement(tmp_path, capsys):
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(machine(memory_gbs=1300)))
    flags = [CONFIG, f"--calibrate={path}", "--json"]
    seconds = []
    for bandwidth in ([], ["--bandwidth=650"]):
        plan.main([*flags, *bandwidth, *"--tp=1 --pp=1 --sharding=ZERO1".split()])
        seconds.append(json.loads(capsys.readouterr().out)["seconds"]["optimizer"])
    assert seconds[1] == pytest.approx(2 * seconds[0])


def test_a_run_faster_than_matmuls_is_doubted(tmp_path):
    path = runs(tmp_path / "a.csv", FLEET, Constants(pace=0.5), ONE_NODE[:1])
    fleet, _ = calibrate.from_file(path, ASSUMED, step_time.OURS)
    assert "of which large matmuls reach 72%" in fleet.notes[-1]


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
SAVED = "is not a file of `planning.calibrate --save`"


def attention_table(tflops: float, contestant: str = "ours, ALiBi") -> str:
    """A .json of `bench attention` with these TFLOP/s, and a short and a missing cell beside it."""
    cell = {"contestant": contestant, "head_dim": 128, "missing": "", "length": 2048}
    cells = [cell | {"forward + backward, TFLOP/s": tflops}]
    cells.append(cell | {"length": 512, "forward + backward, TFLOP/s": 1.0})
    cells.append(cell | {"missing": "out of memory"})
    return json.dumps({"device": "AMD Instinct MI250X/MI250", "cells": cells})


def saved(**more) -> str:
    """A file of --save with wrong values."""
    run = {"flags": "", "ranks": 8, "nodes": 1, "tokens_per_second": 9e3}
    values = {"device": "MI250", "node_size": 8, "machine": {}, "attention": None, "runs": [run]}
    return json.dumps(values | more)


@pytest.mark.parametrize("name, content, message", [
    ("a.csv", "model,status\nx,ok\n", f"{TABLE}: KeyError 'precision'"),
    ("a.csv", OUT_OF_MEMORY, NO_USABLE_ROW),
    ("a.csv", OK + f"{A100},8,1\n", f"measured on '{A100}', not on MI250 GCD"),
    ("a.csv", OK + "cpu,8,1\n", "measured on 'cpu', not on MI250 GCD"),
    ("a.csv", OK + ",8,0\n", "tokens_per_second must be from 1e-06 to "),
    ("a.csv", OK + ",8,nan\n", "tokens_per_second must be from 1e-06 to "),
    ("a.csv", OK + ",8,1e12\n", "times the predicted time: is --device right?"),
    ("a.csv", OK + ",8,1e-6\n", "times the predicted time: is --device right?"),
    ("a.csv", OK + ",8,1e-300\n", "tokens_per_second must be from 1e-06 to "),
    ("a.csv", OK + ",1e300,1\n", "ranks is "),
    ("a.json", "[]", MACHINE),
    ("a.json", '{"device": "", "ranks": 1}', f"{MACHINE}: KeyError 'nodes'"),
    ("a.json", "nothing", MACHINE),
    ("a.json", broken(collectives_gbs=[]), f"{MACHINE}: AttributeError"),
    ("a.json", broken(memory_gbs=None), "memory_gbs is None, expected a number"),
    ("a.json", with_matmuls_at(400), "matmuls at 221% of MI250 GCD's peak"),
    ("a.json", broken(memory_gbs=True), "memory_gbs is True, expected a number"),
    ("a.json", broken(memory_gbs=1e-300), "memory_gbs must be from 1e-06 to "),
    ("a.json", with_matmuls_at(0), "matmul_tflops must be from 1e-06 to 1,000,000,000, not 0"),
    ("a.json", broken(device="NVIDIA H100 80GB HBM3"), "not on MI250 GCD"),
    ("a.json", saved(device="NVIDIA H100 80GB HBM3"), "not on MI250 GCD"),
    ("a.json", saved(runs=3), f"{SAVED}: TypeError"),
    ("a.json", saved(runs=[{}]), f"{SAVED}: KeyError 'tokens_per_second'"),
    ("a.json", saved(node_size="x"), "node_size is 'x', expected a whole number"),
    ("a.json", saved(node_size=True), "node_size is True, expected a whole number"),
    ("a.json", saved(machine=[3]), f"{SAVED}: TypeError"),
    ("a.json", saved(attention=-1), "attention must be from 0.001 to 1, not -1"),
    ("a.json", attention_table(400), "attention at 221% of MI250 GCD's peak: is --device right?"),
    ("a.json", attention_table(40, "SDPA"), "no figures of 'ours, ALiBi' over 1,024 tokens"),
    ("a.json", '{"cells": [{}], "device": "MI250"}', "is not a .json of `bench attention`: KeyE"),
])  # fmt: skip
def test_mistakes_are_told(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError) as error:
        calibrate.from_file(str(tmp_path / name), FLEET, step_time.OURS)
    assert message in str(error.value)


def test_measurements_are_kept_in_a_json(tmp_path):
    path = runs(tmp_path / "a.csv", FLEET, Constants(), ONE_NODE[:1])
    with pytest.raises(UserError, match=r"--save=mine.txt: give the name of a .json file"):
        calibrate.main([path, "--save=mine.txt"])
    with pytest.raises(UserError, match="usage: python -m planning.calibrate results.csv"):
        calibrate.main([])


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
