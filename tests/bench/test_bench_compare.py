"""Tables made from CSVs of `bench train`, beside figures worked out by hand; and the SLURM script.

bench/compare.py, bench/scaling.py and slurm/scaling.sbatch, which is run for real.
"""

import csv
import os
import subprocess
import sys

import pytest
from conftest import ROOT, clean_environment

from bench import __main__ as door
from bench import compare as bench_compare
from bench import scaling as bench_scaling
from config import UserError

CONVENTION = "LLM Foundry: 6 N + 12 L d S"
# LLM Foundry's published row of MPT-1B on 8 H100: 45,455 tokens/s and 413 TFLOP/s a device, MFU
# 41.82 % of 989.5.
SETTINGS = {
    "time": "2025-01-01T00:00:00",
    "command": "python -m bench train",
    "status": "ok",
    "model": "mpt1b",
    "n_params": 1315950592,
    "d_model": 2048,
    "n_layers": 24,
    "n_heads": 16,
    "max_seq_len": 2048,
    "vocab_size": 50368,
    "device": "NVIDIA H100 80GB HBM3",
    "nodes": 1,
    "ranks": 8,
    "threads": 8,
    "torch": "2.13.0",
    "precision": "bf16",
    "sharding": "FULL_SHARD",
    "shard_size": 8,
    "activation_checkpointing": "none",
    "recompute_every": 1,
    "compile": False,
    "attn_impl": "sdpa",
    "microbatch_size": 14,
    "grad_accum": 1,
    "global_batch_size": 112,
}
FIGURES = {
    "tokens_per_second": 363640,
    "fastest": 364000,
    "slowest": 363000,
    "tokens_per_second_device": 45455,
    "tflops_device": 413,
    "peak_tflops": 989.5,
    "mfu": 0.4182,
    "hfu": 0.4182,
    "convention": CONVENTION,
    "memory_gb": 60,
    "data": 0,
    "forward": 0.3,
    "backward": 0.6,
    "optimizer": 0.05,
    "communication": 0.05,
}
H100 = SETTINGS | FIGURES
FAILED = SETTINGS | dict.fromkeys(FIGURES, "") | {"status": "out of memory"}
# The published row on 8 A100: 20,513 tokens/s and 186 TFLOP/s a device, 59.86 % of 312.
A100 = H100 | {
    "device": "NVIDIA A100-SXM4-80GB",
    "tokens_per_second": 164104,
    "tokens_per_second_device": 20513,
    "tflops_device": 186,
    "peak_tflops": 312,
    "mfu": 0.5986,
}


def write(path, *rows) -> str:
    """A CSV with these rows; its path."""
    with open(path, "w", newline="") as file:
        table = csv.DictWriter(file, list(H100))
        table.writeheader()
        table.writerows(rows)
    return str(path)


def at(ranks: int, batch: int, rate: float, **more) -> dict:
    """A row at this many ranks, 8 a node, with a rate in tokens/s a device.

    With FULL_SHARD, shard_size follows the ranks.
    """
    row = H100 | {
        "ranks": ranks,
        "nodes": max(1, ranks // 8),
        "shard_size": ranks,
        "global_batch_size": batch,
        "tokens_per_second_device": rate,
        "tokens_per_second": ranks * rate,
    }
    return row | more


def cells(text: str) -> list[list[dict]]:
    """The Markdown tables in a text, each a list of rows {column: cell}."""
    tables = []
    for block in text.split("\n\n"):
        lines = [line for line in block.splitlines() if line.startswith("|")]
        if lines:
            head, _, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines)
            tables.append([dict(zip(head, row, strict=True)) for row in rows])
    return tables


def column(table: list[dict], name: str) -> list[str]:
    """The cells of one column."""
    return [row[name] for row in table]


# --- scaling


def test_strong_and_weak_scaling_by_hand(tmp_path, capsys):
    strong = [at(8, 64, 40000), at(32, 64, 34000), at(16, 64, 38000)]
    weak = [at(16, 128, 39600), at(32, 256, 39000, tflops_device="")]
    bench_scaling.main([write(tmp_path / "r.csv", *strong, FAILED, *weak)])
    text = capsys.readouterr().out
    first, second = cells(text)
    assert column(first, "ranks") == ["8", "16", "32"]
    assert column(first, "nodes") == ["1", "2", "4"]
    assert column(first, "global batch") == ["64"] * 3
    assert column(first, "tokens/s") == ["320,000", "608,000", "1,088,000"]
    assert column(first, "efficiency") == ["100.0%", "95.0%", "85.0%"]  # 38 / 40, 34 / 40
    losses = column(first, "loss against the row before")
    assert losses == ["", "5.0%", "10.5%"]  # 1 - 38 / 40, 1 - 34 / 38

    assert column(second, "global batch") == ["64", "128", "256"]
    assert column(second, "efficiency") == ["100.0%", "99.0%", "97.5%"]
    assert column(second, "TFLOP/s a device") == ["413", "413", "n/a"]

    assert "Strong scaling, global batch 64: mpt1b at 2048 tokens, NVIDIA H100" in text
    assert "Weak scaling, 8 sequences a rank: mpt1b" in text
    assert "an efficiency of 95.8%" in text and "One size only" not in text
    assert str(tmp_path / "r_scaling.png") in text or "needs matplotlib" in text


def test_rows_that_differ_in_a_setting_are_apart_and_the_later_of_two_counts(tmp_path):
    rows = [at(8, 64, 9), at(8, 64, 10), at(16, 64, 8)]
    rows += [at(8, 64, 20, torch="2.14.0"), at(16, 64, 19, torch="2.14.0")]
    rows += [at(8, 64, 5, compile=True)]
    tables, alone = bench_scaling.groups(bench_compare.read(write(tmp_path / "r.csv", *rows)))
    efficiencies = [bench_scaling.efficiencies(members) for members in tables.values()]
    assert efficiencies == [[1, 0.8], [1, 0.95]]
    settings = [title.rpartition("torch ")[2] for title in tables]
    assert settings == ["2.13.0, compile False", "2.14.0, compile False"]
    assert [row["compile"] for row in alone] == ["True"]


def test_shards_of_another_size_are_another_setting_only_where_they_are_chosen(tmp_path):
    hybrid = [at(ranks, 64, 10, sharding="HYBRID_SHARD") for ranks in (8, 16)]
    rows = bench_compare.read(write(tmp_path / "r.csv", *hybrid))
    assert not bench_scaling.groups(rows)[0]
    same_size = [row | {"shard_size": 8} for row in hybrid]
    rows = bench_compare.read(write(tmp_path / "r.csv", *same_size))
    assert len(bench_scaling.groups(rows)[0]) == 1


def test_one_size_says_what_to_run_and_still_shows_the_published_run(tmp_path, capsys):
    path = write(tmp_path / "r.csv", at(8, 64, 10))
    bench_scaling.main([path])
    text = capsys.readouterr().out
    assert "One size only: 8 ranks, global batch 64: mpt1b at 2048" in text
    assert "slurm/scaling.sbatch CONFIG" in text and f"--out={path}" in text and "95.8%" in text
    assert not list(tmp_path.glob("*.png"))


def test_the_picture_goes_where_out_says(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = write(tmp_path / "r.csv", at(8, 64, 10), at(16, 64, 9))
    pictures = {
        "new/": "new/r_scaling.png",
        "new": "new/r_scaling.png",  # the folder exists by then
        "new/a": "new/a_scaling.png",
    }
    for out, picture in pictures.items():
        bench_scaling.main([path, f"--out={tmp_path}/{out}"])
        assert capsys.readouterr().out.strip().endswith(str(tmp_path / picture))
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")
        (tmp_path / picture).unlink()


def test_without_matplotlib_it_says_what_to_install(tmp_path, capsys, monkeypatch):
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)  # importing it raises now
    bench_scaling.main([write(tmp_path / "r.csv", at(8, 64, 10), at(16, 64, 9))])
    assert "requirements-extra.txt" in capsys.readouterr().out


# --- compare


def test_cost_and_energy_by_hand(tmp_path, capsys):
    """1e9 tokens at 45,455/s take 6.1111 h, at 20,513/s 13.5416 h; watts 10200 / 8 and 6500 / 8."""
    slower = A100 | {"tokens_per_second_device": 1}
    a = write(tmp_path / "a.csv", slower, A100, FAILED)
    b = write(tmp_path / "b.csv", H100)
    bench_compare.main([a, b, "--prices=2,4.5"])
    text = capsys.readouterr().out
    (table,) = cells(text)
    assert table[0]["file"] == a
    assert table[0]["device"] == "NVIDIA A100-SXM4-80GB"
    assert table[0]["settings"] == "bf16, FULL_SHARD, checkpointing none, microbatch 14"
    assert column(table, "tokens/s a device") == ["20,513", "45,455"]
    assert column(table, "TFLOP/s a device") == ["186", "413"]
    mfu = [f"59.9% ({CONVENTION})", f"41.8% ({CONVENTION})"]
    assert column(table, "MFU (convention)") == mfu
    assert column(table, "dollars per 1e9 tokens") == ["27.08", "27.50"]
    assert column(table, "kWh per 1e9 tokens") == ["11.00", "7.79"]

    saving = f"{a} is cheaper by 1.5%"  # 1 - 27.083 / 27.500
    assert f"2.22 times the tokens/s of one of {a}; {saving}" in text
    break_even = f"both cost the same when {b} is at $4.432."  # 2 x 45455 / 20513
    assert f"with {a} at $2 an hour, {break_even}" in text
    assert "Prices are dollars per hour of one torch device" in text
    assert "No watts known" not in text
    bench_compare.main([a, b, "--prices=2,4.4"])
    assert f"{b} is cheaper by 0.7%" in capsys.readouterr().out  # 1 - 4.4 / 4.432


def test_without_prices_speed_and_energy_only(tmp_path, capsys):
    a = write(tmp_path / "a.csv", A100)
    b = write(tmp_path / "b.csv", H100)
    bench_compare.main([a, b, "--watts=100,1000"])
    text = capsys.readouterr().out
    assert "dollars" not in text and "Break-even" not in text and "2.22 times" in text
    (table,) = cells(text)
    assert column(table, "kWh per 1e9 tokens") == ["1.35", "6.11"]


def test_each_common_model_is_a_pair_in_order_of_parameters(tmp_path, capsys):
    small = H100 | {"model": "mpt125m", "n_params": 125311488}
    longer = H100 | {"max_seq_len": 4096, "n_params": 1320144896}
    only_in_a = small | {"model": "mpt350m"}
    only_in_b = small | {"max_seq_len": 512}
    a = write(tmp_path / "a.csv", longer, H100, only_in_a, small)
    b = write(tmp_path / "b.csv", small, only_in_b, H100, longer)
    bench_compare.main([a, b])
    (table,) = cells(capsys.readouterr().out)
    named = ["mpt125m at 2048", "mpt1b at 2048", "mpt1b at 4096"]
    rows = [(row["model"], row["file"]) for row in table]
    assert rows == [(name, path) for name in named for path in (a, b)]


WATTS = [
    ("NVIDIA H100 80GB HBM3", 989.4, 1275),
    ("NVIDIA A100-SXM4-40GB", 312, 812.5),
    ("AMD Instinct MI250", 181.05, 375),  # 3000 W / 4 cards / 2 devices
    ("AMD Instinct MI250X/MI250", 181.05, 375),
    ("AMD Instinct MI250X / MI250", 191.5, None),  # an MI250X
    ("AMD Instinct MI250X/MI250", "", None),  # either
    ("AMD Instinct MI250X", 191.5, None),
    ("NVIDIA H100 PCIe", 756.5, None),
    ("", 181.05, None),
]


@pytest.mark.parametrize("device, peak, watts", WATTS)
def test_watts_are_those_of_a_known_node_or_unknown(device, peak, watts, tmp_path):
    path = write(tmp_path / "r.csv", H100 | {"device": device, "peak_tflops": peak})
    (row,) = bench_compare.read(path)
    assert bench_compare.watts_of(row) == watts


def test_a_device_without_watts_and_peak_is_not_guessed(tmp_path, capsys):
    cpu = H100 | {"device": "cpu", "peak_tflops": "", "mfu": "", "hfu": ""}
    bench_compare.main([write(tmp_path / "a.csv", cpu), write(tmp_path / "b.csv", H100)])
    text = capsys.readouterr().out
    row = cells(text)[0][0]
    for name in ("MFU (convention)", "W a device", "kWh per 1e9 tokens"):
        assert row[name] == "n/a"
    assert "No watts known for cpu: set --watts=a,b" in text


# --- errors


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # bench.__main__ replaces this module; afterwards it is put back.
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    write("a.csv", H100)
    write("small.csv", H100 | {"model": "mpt125m", "n_params": 125311488})
    write("failed.csv", FAILED)
    write("broken.csv", H100, H100 | {"tokens_per_second_device": "fast"})
    (tmp_path / "other.csv").write_text("model,speed\nmpt,3\n")
    (tmp_path / "empty.csv").write_text("")
    (tmp_path / "binary.csv").write_bytes(b"\x89PNG\xff\x00")
    return tmp_path


NOTHING_COMMON = (
    "nothing in common: a.csv has mpt1b (1,315,950,592 parameters) at 2048; "
    "small.csv has mpt125m (125,311,488 parameters) at 2048"
)
NO_COLUMN = "is not a CSV of bench train: it has no column activation_checkpointing"
ERRORS = {
    "scaling": "usage: python -m bench scaling",
    "scaling nowhere.csv": "no file 'nowhere.csv': python -m bench train CONFIG --out=nowhere.csv",
    "scaling other.csv": f"other.csv {NO_COLUMN}",
    "scaling empty.csv": "empty.csv is not a CSV of bench train",
    "scaling binary.csv": "binary.csv is not a CSV of bench train",
    "scaling failed.csv": "failed.csv has no row with status ok",
    "scaling broken.csv": "broken.csv, line 3: tokens_per_second_device must be a number above 0",
    "scaling a.csv --ouf=x": "unknown key 'ouf' in the command line, did you mean 'out'",
    "compare a.csv": "usage: python -m bench compare",
    "compare a.csv small.csv": NOTHING_COMMON,
    "compare a.csv a.csv --prices=2": "--prices wants two numbers above 0",
    "compare a.csv a.csv --prices=1,2,3": "--prices wants two numbers above 0",
    "compare a.csv a.csv --prices=2,nan": "--prices wants two numbers above 0",
    "compare a.csv a.csv --watts=2,-1": "--watts wants two numbers above 0",
    "scale a.csv": "no benchmark 'scale', did you mean scaling?",
}


@pytest.mark.parametrize("command", ERRORS)
def test_an_error_is_one_line(command, folder):
    with pytest.raises(UserError) as error:
        door.main(command.split())
    assert str(error.value).startswith(ERRORS[command]) and "\n" not in str(error.value)


def test_the_program_ends_with_status_2_and_one_line(python, folder):
    done = python("a.csv", "small.csv", program="bench compare")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"error: {NOTHING_COMMON}\n")


# --- slurm/scaling.sbatch

# Fake programs: srun starts one task; `bench train` writes a row whose speed falls by a tenth with
# each doubling of the nodes. config.py and `bench scaling` are real.
SRUN = """#!/usr/bin/env bash
echo "$@" >> srun.log
while [[ $1 == --* ]]; do shift; done
exec "$@"
"""
SCONTROL = """#!/usr/bin/env bash
[[ "$*" == "show hostnames node[1-4]" ]] && printf 'node%s\\n' 1 2 3 4
"""
PYTHON = """#!/usr/bin/env bash
export PYTHONPATH=%s
[[ $1 == -m ]] || set -- "$PYTHONPATH/$1" "${@:2}"
exec %s "$@"
"""
TORCHRUN = """#!%s
import csv, math, os, sys
setting = dict(a.lstrip("-").split("=") for a in sys.argv if "=" in a)
nodes, batch = int(sys.argv[sys.argv.index("--nnodes") + 1]), int(setting["global_batch_size"])
if os.environ.get("FAILS") == str(batch):
    sys.exit(1)
row = %r
row |= {"nodes": nodes, "ranks": 8 * nodes, "global_batch_size": batch}
row["tokens_per_second_device"] = 10000 * 0.9 ** math.log2(nodes)
new = not os.path.exists(setting["out"])
with open(setting["out"], "a", newline="") as file:
    table = csv.DictWriter(file, list(row))
    if new:
        table.writeheader()
    table.writerow(row)
"""


def submit(folder, *args, **environment):
    """Run the script in `folder` as SLURM does on 4 nodes.

    Returns the finished process, and the arguments of each call of srun, a line each.
    """
    (folder / ".venv/bin").mkdir(parents=True)
    programs = {
        "srun": SRUN,
        "scontrol": SCONTROL,
        ".venv/bin/python": PYTHON % (ROOT, sys.executable),
        ".venv/bin/torchrun": TORCHRUN % (sys.executable, H100),
    }
    for name, text in programs.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    slurm = {
        "SLURM_NNODES": "4",
        "SLURM_JOB_NODELIST": "node[1-4]",
        "SLURM_JOB_ID": "7",
        "SLURM_CPUS_PER_TASK": "64",
        "PATH": f"{folder}:{os.environ['PATH']}",
    }
    env = clean_environment() | slurm | environment
    command = ["bash", ROOT / "slurm/scaling.sbatch", *args]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=60)
    log = folder / "srun.log"
    return done, log.read_text().splitlines() if log.exists() else []


def word(line, name):
    """The value of `--name=value` or `--name value` in a command."""
    return line.replace("=", " ").split(f"--{name} ")[-1].split()[0]


def test_slurm_script_times_every_size_and_prints_the_table(tmp_path):
    flags = ["--sharding=ZERO1", "--global_batch_size=256"]
    done, lines = submit(tmp_path, str(ROOT / "configs/mpt1b.py"), *flags)
    assert done.returncode == 0, done.stderr
    names = ("nodes", "nnodes", "global_batch_size")
    sizes = [tuple(word(line, name) for name in names) for line in lines]
    strong = [("1", "1", "256"), ("2", "2", "256"), ("4", "4", "256")]
    weak = [("2", "2", "512"), ("4", "4", "1024")]
    assert sorted(sizes) == sorted(strong + weak)

    for line in lines:
        assert f" -m bench train {ROOT}/configs/mpt1b.py --sharding=ZERO1" in line
        assert line.endswith("--out=scaling.csv")
        assert word(line, "ntasks") == word(line, "nodes") and word(line, "cpus-per-task") == "64"
        assert word(line, "rdzv_endpoint").startswith("node1:")
    for name in ("rdzv_endpoint", "rdzv_id"):  # runs do not meet each other's ranks
        assert len({word(line, name) for line in lines}) == 5

    first, second = cells(done.stdout)
    assert column(first, "efficiency") == ["100.0%", "90.0%", "81.0%"]
    assert column(second, "efficiency") == ["100.0%", "90.0%", "81.0%"]
    assert column(second, "global batch") == ["256", "512", "1,024"]


def test_slurm_script_takes_the_batch_of_the_config_and_a_failed_size_costs_no_other(tmp_path):
    done, lines = submit(tmp_path, str(ROOT / "configs/mpt1b.py"), "--warmup_turns=3", FAILS="2048")
    assert done.returncode == 1 and "failed: 4 nodes, global batch 2048" in done.stderr
    batches = [word(line, "global_batch_size") for line in lines]
    assert batches == ["512", "512", "1024", "512", "2048"]
    assert [len(table) for table in cells(done.stdout)] == [3, 2]


def test_slurm_script_without_a_config_says_how_to_submit(tmp_path):
    done, lines = submit(tmp_path)
    assert done.returncode != 0 and "usage: sbatch" in done.stderr and not lines
