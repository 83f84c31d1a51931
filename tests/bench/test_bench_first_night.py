"""bench/first_night.py: stages that fail, take too long, are interrupted; the page of a night."""

import csv
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from conftest import PATIENCE, ROOT, rooms_on_path

import config
import devices
from bench import attention, first_night, generate, night_report, train
from bench import machine as bench_machine
from bench.first_night import Stage
from config import MPTConfig, TrainConfig
from lessons import lost_rank
from planning import memory, step_time
from planning.fleet import Fleet
from program import UserError


def facts_of(count, name, arch, memory_gb, **more):
    """The facts of a machine with so many equal GPUs."""
    gpu = {"name": name, "arch": arch, "memory_gb": memory_gb, "units": 1, "known_as": name}
    bf16 = {"computes_in_bf16": count > 0, "amd": arch.startswith("gfx")}
    versions = {"triton": "3.7.1", "nccl": "2.27.3", "cuda": "12.8"}
    versions |= {"torch": "2.13.0", "python": "3.11", "platform": "Linux", "rocm": None}
    return {"gpus": [gpu] * count, **bf16, **versions, "cpus": 16, "time": "now"} | more


H100 = facts_of(1, "H100 SXM", "9.0", 79.2)
MI250 = facts_of(8, "MI250 GCD", "gfx90a", 64.0, rocm="7.0", cuda=None)
NO_GPU = facts_of(0, "", "", 0)


def lacking(tmp_path, machine_facts) -> dict[str, str]:
    """{stage that cannot run: why}."""
    stages = first_night.stages_of(tmp_path, machine_facts)
    return {stage.name: stage.lacks for stage in stages if stage.lacks}


def test_what_a_machine_cannot_run_is_left_out_with_the_reason(tmp_path):
    two = dict.fromkeys(("network", "killed-rank", "hung-rank"), "needs two GPUs")
    too_large = {"train-7b": "does not fit into memory, by planning/memory.py"}
    no_gpu = dict.fromkeys(("tune-64", "tune-128", "network"), "needs a GPU")
    assert lacking(tmp_path, H100) == two | too_large
    assert lacking(tmp_path, MI250) == {}
    assert lacking(tmp_path, NO_GPU) == no_gpu


@pytest.mark.parametrize("machine_facts", [H100, MI250], ids=["H100", "8 MI250"])
def test_recipes_get_the_largest_power_of_two_that_fits(machine_facts):
    ranks = len(machine_facts["gpus"])
    room = memory.ROOM * machine_facts["gpus"][0]["memory_gb"] * 2**30
    for size in ("125m", "350m", "760m", "1b", "3b", "7b"):
        mode, microbatch = first_night.what_fits(size, machine_facts)
        m, cfg = config.load([str(ROOT / f"configs/mpt{size}.py")], MPTConfig, TrainConfig)
        cfg = replace(cfg, activation_checkpointing=mode, global_batch_size=64 * ranks)

        def peak(tried, m=m, cfg=cfg):
            return memory.bytes_by_part(m, replace(cfg, microbatch_size=tried), ranks)["peak"]

        assert microbatch == 0 or math.log2(microbatch).is_integer()
        assert microbatch == 0 or peak(microbatch) <= room
        assert microbatch == 64 or peak(max(1, 2 * microbatch)) > room


def parse(words: list[str]) -> None:
    """Let the program of a command read its flags. UserError if it does not know one."""
    module, *flags = words
    if module == "gpu_kernels.flash_attention":
        assert flags[0] in ("--tune=64", "--tune=128")
    elif module == "lessons.lost_rank":
        assert lost_rank.SIGNALS[flags[0]]
    elif flags[0] == "train":
        assert train.groups(flags[1:])
    elif flags[0] in ("attention", "machine", "generate"):
        settings = {"attention": attention.AttentionArgs, "machine": bench_machine.MachineArgs}
        config.load(flags[1:], settings.get(flags[0], generate.GenerateArgs), takes="[THREADS]")
    else:
        assert module == "pytest"


@pytest.mark.parametrize("machine_facts", [H100, MI250, NO_GPU], ids=["H100", "8 MI250", "CPU"])
def test_every_command_is_one_that_can_be_typed(tmp_path, machine_facts, monkeypatch):
    """Its program exists and knows its flags."""
    monkeypatch.chdir(ROOT)
    stages = first_night.stages_of(tmp_path, machine_facts)
    for stage in stages:
        assert re.match("([A-Z_]+=[A-Z]+ )?python ", stage.command)
        words = shlex.split(stage.command.partition(first_night.TORCHRUN)[2] or stage.command)
        if "-m" in words:
            parse(words[words.index("-m") + 1 :])
        else:
            assert words[1:] == ["checkpoint.py"]
    assert len({stage.name for stage in stages}) == len(stages)


def test_a_wrong_setting_is_one_line(tmp_path):
    stages = first_night.stages_of(tmp_path, NO_GPU)
    with pytest.raises(UserError, match="no stage 'tets': there are tests, "):
        first_night.chosen(stages, "tets")
    with pytest.raises(UserError, match="stage network: needs a GPU"):
        first_night.chosen(stages, "network")
    (tmp_path / "file").touch()
    wrong = {"--minutes=0": "minutes", f"--out={tmp_path}/file": "folder", "--sage=a": "'stage'"}
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "README.md").write_text("mine")
    wrong[f"--out={tmp_path}/mine"] = "it holds README.md: set another --out"
    for flag, words in wrong.items():
        with pytest.raises(UserError, match=words):
            first_night.main([flag])
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["README.md"]


def test_a_folder_of_other_gpus_is_refused(tmp_path):
    (tmp_path / "facts.json").write_text(json.dumps(H100))
    with pytest.raises(UserError, match="is of other GPUs: name another folder"):
        first_night.learn_facts(tmp_path, {"CUDA_VISIBLE_DEVICES": "-1"})


# --- The page


ROW = {
    "status": "ok",
    "model": "mpt1b",
    **{"d_model": 2048, "n_layers": 24, "n_heads": 16, "max_seq_len": 2048, "vocab_size": 50368},
    **{"ranks": 8, "precision": "bf16", "sharding": "FULL_SHARD", "compile": False},
    **{"activation_checkpointing": "none", "recompute_every": 1, "microbatch_size": 8},
    **{"global_batch_size": 128, "tokens_per_second": 50000, "mfu": 0.4, "memory_gb": 30.0},
}


def night(folder, machine_facts, rows) -> str:
    """The page of a night with these rows of training."""
    (folder / "stages").mkdir()
    (folder / "facts.json").write_text(json.dumps(machine_facts))
    with open(folder / "train-1b.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, list(ROW))
        writer.writeheader()
        writer.writerows(rows)
    stages = first_night.stages_of(folder, machine_facts)
    first_night.write_state(folder, 1, stages[0], "done", 12.0)
    first_night.write_state(folder, 2, stages[1], "timed out", 540.0)
    (folder / "attention_h100.md").write_text("# 1 x H100\n")
    night_report.write(folder)
    return (folder / "README.md").read_text()


def test_figures_stand_beside_the_planners_predictions(tmp_path):
    failed = ROW | {"status": "out of memory", "tokens_per_second": ""}
    page = night(tmp_path, MI250, [ROW, failed])
    m = MPTConfig(d_model=2048, n_heads=16, n_layers=24)
    cfg = TrainConfig(global_batch_size=128, microbatch_size=8)
    speed = step_time.tokens_per_second(m, cfg, Fleet(devices.by_name("mi250"), 8, 8))
    peak = memory.bytes_by_part(m, cfg, 8)["peak"] / 1e9
    figures = f"| 50,000 | {speed:,.0f} | {50000 / speed:.2f} | 40.0% | 30.0 | {peak:.1f} |"
    assert figures in page and "| out of memory |" in page
    assert "8 x MI250 GCD (gfx90a, 64 GiB)" in page and "ROCm: 7.0" in page
    assert "Done: 1 of 2 stages that can run here. Not done: tune-64 (timed out)." in page
    assert "| tests | done | 12.0 | python -m pytest -m gpu" in page
    assert "1 x H100" in page  # the table of bench attention
    assert f"tar czf {tmp_path.name}.tar.gz -C {tmp_path.parent} " in page


def test_an_unknown_device_has_no_predictions(tmp_path):
    page = night(tmp_path, facts_of(1, "H999", "99.0", 79.2), [ROW])
    assert "| 50,000 | n/a | n/a | 40.0% | 30.0 | n/a |" in page


def test_a_damaged_state_is_named(tmp_path):
    (tmp_path / "stages").mkdir()
    (tmp_path / "stages/tests.json").write_text('{"number":')
    with pytest.raises(UserError, match="tests.json is damaged .*: delete it"):
        night_report.read_states(tmp_path)


@pytest.mark.gpu
def test_the_facts_of_a_gpu():
    found = night_report.facts()
    assert found["nccl"] and found["gpus"][0]["memory_gb"] > 1


# --- Stages run


def status(folder, name) -> str | None:
    """The recorded status of a stage."""
    path = folder / "stages" / f"{name}.json"
    return json.loads(path.read_text())["status"] if path.exists() else None


STAGES = [
    Stage("good", "", 'A=2 python -c \'import os; print(os.environ["A"], os.environ["B"])\''),
    Stage("bad", "", "python -c 'exit(3)'"),
    Stage("lacking", "", "python -c pass", "needs a GPU"),
]
WAITS = "import subprocess; subprocess.run(['tail', '-f', 'FOLDER/facts.json'])"


def test_a_stage_that_fails_or_takes_too_long_does_not_stop_the_others(tmp_path, capsys):
    """What is done is not run again, unless it is asked for."""
    (tmp_path / "stages").mkdir()
    (tmp_path / "generate.csv").mkdir()  # a table that cannot be read does not end the night
    (tmp_path / "facts.json").write_text(json.dumps(NO_GPU))
    slow = Stage("slow", "", f'python -c "{WAITS}"'.replace("FOLDER", str(tmp_path)))

    def run(only=None, minutes=9.0):
        first_night.run_stages(tmp_path, [*STAGES, slow], only, minutes, hidden={"B": "3"})
        return capsys.readouterr().out

    run(slow, minutes=0.03)
    assert status(tmp_path, "slow") == "timed out" and not processes_of(tmp_path)
    assert status(tmp_path, "good") == "not reached"
    first_night.write_state(tmp_path, 4, slow, "done")
    run()
    found = [status(tmp_path, name) for name in ("good", "bad", "lacking")]
    assert found == ["done", "failed", "not run: needs a GPU"]
    log = tmp_path / "stages/good.log"
    assert "\n2 3\nexit status: 0" in log.read_text()
    page = (tmp_path / "README.md").read_text()
    assert "Done: 2 of 3 stages that can run here. Not done: bad (failed)." in page
    assert "generate.csv is a folder" in page

    assert "good, : done before\n" in run()
    assert log.read_text().count("exit status") == 1
    run(STAGES[0])
    assert log.read_text().count("exit status") == 2


def start(folder) -> subprocess.Popen:
    """The night in a folder, in miniature, as a user starts it."""
    command = [sys.executable, "-m", "bench", "first_night", f"--out={folder}", "--device=cpu"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, env=rooms_on_path(), cwd=ROOT, **pipes)


def interrupt_at(folder, name) -> None:
    """Start the night, and press Ctrl-C while this stage's command runs."""
    process = start(folder)
    deadline = time.monotonic() + PATIENCE
    try:
        while not processes_of(folder / f"{name}.csv"):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 130
    finally:
        process.kill()
    assert not processes_of(folder)


def processes_of(path) -> list[str]:
    """The processes that have a path in their command line."""
    command = ["pgrep", "-f", f"[= ]{path}"]
    found = subprocess.run(command, capture_output=True, text=True).stdout.split()
    return [pid for pid in found if int(pid) != os.getpid()]


@pytest.mark.slow
def test_a_night_goes_on_after_an_interruption(tmp_path):
    """Of its stages in miniature, two: the other programs are tested by themselves."""
    folder = tmp_path / "a night"
    (folder / "stages").mkdir(parents=True)
    for number, stage in enumerate(first_night.stages_of(folder, NO_GPU), 1):
        if stage.name not in ("train-tiny", "generate"):
            first_night.write_state(folder, number, stage, "done")

    interrupt_at(folder, "train-tiny")
    assert status(folder, "train-tiny") == "interrupted"
    assert status(folder, "generate") == "not reached"

    process = start(folder)
    printed, _ = process.communicate(timeout=4 * PATIENCE)
    assert process.returncode == 0, printed
    assert "attention, ours and PyTorch's: done before\n" in printed
    assert status(folder, "train-tiny") == status(folder, "generate") == "done"
    page = (folder / "README.md").read_text()
    assert "a miniature on the CPU" in page and "| train-tiny | 1x64 | 1 | 4 | False |" in page


def measure_decoding(world, folder) -> None:
    """In the folder, on one thread."""
    settings = ["--shapes=64x1", "--turns=1", "--device=cpu", "--engine=2"]
    generate.main(["1", *settings, f"--out={folder}/a.csv"])


@pytest.mark.slow
def test_decoding_is_measured(ranks, tmp_path):
    ranks(1)(measure_decoding, str(tmp_path))
    rows = list(csv.DictReader((tmp_path / "a.csv").open()))
    assert len(rows) == 2 * 3 * 2 and all(float(row["ms a token"]) > 0 for row in rows)
    assert [row["batch"] for row in rows[:6]] == [*"1188", "engine, 2", "engine, 2"]
    assert {row["limit, ms a token"] for row in rows} == {"n/a"}  # of a CPU
    with pytest.raises(UserError, match="multiple of 64"):
        generate.main(["--shapes=65x1"])
