"""bench/train.py: the figures that it writes, recomputed by hand; its rows and its errors."""

import csv
import json

import pytest
from conftest import ROOT, TORCHRUN, launch

from bench import train as bench_train
from program import UserError

TINY = """
    --n_layers=2 --d_model=32 --n_heads=4 --max_seq_len=16 --rounds=3 --steps=1 --vocab_size=97
""".split()
# wte, two blocks with two norms, norm_f; no biases
N_PARAMS = 97 * 32 + 2 * (12 * 32**2 + 2 * 32) + 32


def lines_of(path) -> list[dict]:
    """The rows of a CSV."""
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A run of one row: (its folder, its flags, the finished process)."""
    folder = tmp_path_factory.mktemp("bench")
    flags = ["train", *TINY, "--peak_tflops=0.5", "--out=results/tiny.csv", "--profile=trace"]
    flags += ["--sweep=microbatch_size=8"]
    done = launch([], folder, flags, program="bench")
    assert done.returncode == 0, done.stderr
    return folder, flags, done


@pytest.mark.slow
def test_figures_follow_from_each_other(measured):
    (line,) = lines_of(measured[0] / "results/tiny.csv")
    assert (line["model"], line["status"], line["ranks"]) == ("2x32", "ok", "1")
    assert int(line["n_params"]) == N_PARAMS

    rate = float(line["tokens_per_second"])
    tflops = float(line["tflops_device"])
    flops_per_token = 6 * N_PARAMS + 12 * 2 * 32 * 16
    assert float(line["slowest"]) <= rate <= float(line["fastest"])
    assert tflops == pytest.approx(rate * flops_per_token / 1e12)
    assert float(line["mfu"]) == float(line["hfu"]) == pytest.approx(tflops / 0.5)
    assert 0.1 < float(line["memory_gb"]) < 5


@pytest.mark.slow
def test_a_table_is_printed_and_a_trace_written(measured):
    folder, _, done = measured
    assert (
        done.stdout.startswith("`python -m bench train --n_layers=2") and "| 2x32 |" in done.stdout
    )
    events = json.loads((folder / "trace-1.json").read_text())["traceEvents"]
    parts = {"data", "forward", "backward", "optimizer"}
    assert parts <= {event.get("name") for event in events}


@pytest.mark.slow
def test_what_is_measured_is_not_measured_again(measured):
    folder, flags, _ = measured
    before = (folder / "results/tiny.csv").read_text()
    done = launch([], folder, [*flags[:-1], "--sweep=microbatch_size=8,4"], program="bench")
    assert done.returncode == 0, done.stderr
    after = (folder / "results/tiny.csv").read_text()
    assert after.startswith(before) and len(after.splitlines()) == 3
    assert "row 1," not in done.stderr and "row 2," in done.stderr


@pytest.mark.slow
def test_what_needs_too_much_memory_is_noted_and_the_others_go_on(python, tmp_path):
    sweep = "--sweep=d_model=32,524288 sharding=ZERO1"  # 32, and 26 TB of weights
    flags = [*TINY, sweep, "--ranks=2", "--grad_accum=2", "--microbatch_size=1", "--out=a.csv"]
    done = python("train", *flags, program="bench")
    assert done.returncode == 0, done.stderr
    lines = lines_of(tmp_path / "a.csv")
    assert [line["status"] for line in lines] == ["ok", "out of memory"]
    assert [line["sharding"] for line in lines] == ["ZERO1"] * 2
    assert (lines[0]["global_batch_size"], lines[0]["grad_accum"]) == ("4", "2")
    assert "- not measured: 2x524288: out of memory" in done.stdout


@pytest.mark.slow
def test_under_torchrun_a_launch_measures_one_row(tmp_path):
    for d_model in ("524288", "32"):  # 26 TB of weights
        flags = ["train", *TINY, f"--d_model={d_model}", "--rounds=1", "--out=a.csv"]
        done = launch([*TORCHRUN, "2"], tmp_path, flags, program="bench")
        assert (done.returncode == 0) == (d_model == "32"), done.stderr[-2000:]
    (line,) = lines_of(tmp_path / "a.csv")
    assert (line["status"], line["ranks"], line["d_model"]) == ("ok", "2", "32")


def test_sizes_are_the_recipes(monkeypatch):
    monkeypatch.chdir(ROOT)
    groups = bench_train.groups(["--sizes=125m,1b", "--ranks=8", "--grad_accum=2"])
    (small,), (large,) = groups
    assert small.columns["model"] == "mpt125m"
    assert large.columns["model"] == "mpt1b"
    assert large.columns["n_params"] == 1_315_950_592
    assert large.columns["global_batch_size"] == 2 * 8 * 4


def test_a_row_is_done_if_its_command_is_in_the_csv_with_a_final_status():
    flags = ["--precision=bf16", "--attn_impl=sdpa", "--z_loss=0.1"]
    ((row,),) = bench_train.groups(flags)
    # SHAPE has ALiBi, no biases and no clipping; peak_tflops has a column of its own.
    others = {"alibi=True", "no_bias=True", "grad_clip=0.0", "z_loss=0.1"}
    assert set(row.columns["others"].split()) == others
    line = {key: str(value) for key, value in row.columns.items()}
    for status in ("ok", "out of memory", "killed (out of memory?)"):
        assert row.is_in([line | {"status": status, "tokens_per_second": "9"}])
    # The module may be installed by now; another torch may be faster.
    for change in ({"status": "ImportError: no module"}, {"torch": "2.0.0"}, {"ranks": "64"}):
        assert not row.is_in([line | change])

    for flag in "--z_loss=0.2 --grad_clip=1 --microbatch_size=3".split():
        ((other,),) = bench_train.groups([*flags, flag])
        assert not other.is_in([line]), flag


def test_tensor_ranks_and_stages_of_a_row_read_the_same_batch():
    flags = ["--grad_accum=2", "--microbatch_size=3", "--device=cpu"]
    groups = bench_train.groups(["--sweep=tp=1,2 pp=1,2", *flags])
    rows = [row for (row,) in groups]
    assert [row.ranks for row in rows] == [1, 2, 2, 4]
    for row in rows:
        assert row.cfg.global_batch_size == 6
        assert row.columns["grad_accum"] == 2
    others = [row.columns["others"].split() for row in rows]
    assert ["tp=2" in names for names in others] == [False, False, True, True]
    assert ["pp=2" in names for names in others] == [False, True, False, True]


def test_alternating_rows_are_one_group():
    sweep = "--sweep=microbatch_size=1,2 compile=false,true"
    assert [len(group) for group in bench_train.groups([sweep])] == [1] * 4
    (group,) = bench_train.groups([sweep, "--alternate"])
    settings = [(row.cfg.microbatch_size, row.cfg.compile) for row in group]
    assert settings == [(1, False), (1, True), (2, False), (2, True)]


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--sweep=microbatch_size"], "--sweep wants settings with values"),
        (["--sweep=microbatchsize=1"], "did you mean 'microbatch_size'"),
        (["configs/mpt1b.py", "--sizes=125m"], "a config file or --sizes"),
        (["--ranks=3"], "global_batch_size 8 is not a multiple of the 3 data-parallel ranks"),
        (["--ranks=3", "--tp=2"], "--ranks=3 is not a multiple of tp 2 x pp 1 = 2"),
        (["--pp=99"], "pp 99 is more than n_layers"),
        (["--tp=4"], "tp 4 does not divide n_heads 6: tp can be 1, 2, 3, 6"),
        (["--out=results"], "the name of a .csv file"),
        (["--microbatch_size=auto"], "set --microbatch_size=NUMBER"),
        (["--rounds=0"], "rounds must be from 1 to"),
    ],
)
def test_wrong_settings_are_user_errors(flags, message, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(UserError, match=message):
        bench_train.groups(flags)


def test_under_torchrun_several_rows_are_refused(monkeypatch):
    monkeypatch.setattr(bench_train, "launched", lambda: 2)
    with pytest.raises(UserError, match="a launch measures one row"):
        bench_train.groups(["--sweep=microbatch_size=1,2"])


def test_a_file_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "a.csv").write_text("a,b\n1,2\n")
    with pytest.raises(UserError, match="a.csv is not a CSV of bench train"):
        bench_train.main([*TINY, f"--out={tmp_path}/a.csv"])
    assert (tmp_path / "a.csv").read_text() == "a,b\n1,2\n"
