"""What `bench train` writes down, recomputed by hand; its figures are for bench/results/, not for a test."""

import csv
import json

import pytest
from conftest import ROOT, TORCHRUN, launch

from bench import train as bench_train
from config import UserError

TINY = [
    "--n_layers=2",
    "--d_model=32",
    "--n_heads=4",
    "--max_seq_len=16",
    "--rounds=3",
    "--steps=1",
    "--vocab_size=97",
]
N_PARAMS = (
    97 * 32 + 2 * (12 * 32**2 + 2 * 32) + 32
)  # wte, two blocks with two norms, norm_f; no biases


def lines_of(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def beside_transformers(tmp_path_factory):
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("bench")
    flags = [
        "train",
        *TINY,
        "--transformers",
        "--out=results/tiny.csv",
        "--profile=trace",
        "--peak_tflops=0.5",
    ]
    done = launch([], folder, flags, program="bench")
    assert done.returncode == 0, done.stderr
    return folder, flags, done


@pytest.mark.slow
def test_figures_follow_from_each_other(beside_transformers):
    lines = lines_of(beside_transformers[0] / "results/tiny.csv")
    assert [line["model"] for line in lines] == ["2x32", "transformers 2x32"]
    for line in lines:
        rate, tflops = float(line["tokens_per_second"]), float(line["tflops_device"])
        assert line["status"] == "ok" and int(line["n_params"]) == N_PARAMS and line["ranks"] == "1"
        assert float(line["slowest"]) <= rate <= float(line["fastest"])
        assert tflops == pytest.approx(rate * (6 * N_PARAMS + 12 * 2 * 32 * 16) / 1e12)
        assert float(line["mfu"]) == float(line["hfu"]) == pytest.approx(tflops / 0.5)
        assert 0.1 < float(line["memory_gb"]) < 5
        shares = [float(line[part]) for part in ("data", "forward", "backward", "optimizer")]
        assert all(share > 0 for share in shares) and line["communication"] == "0.0"
        assert 0.7 < sum(shares) <= 1 and sum(shares) + float(line["idle"]) == pytest.approx(1)


@pytest.mark.slow
def test_tables_pictures_and_traces_are_written(beside_transformers):
    folder, _, done = beside_transformers
    text = (folder / "results/tiny.md").read_text()
    assert text.strip() == done.stdout.strip() and text.startswith(
        "`python -m bench train --n_layers=2"
    )
    ours, theirs = lines_of(folder / "results/tiny.csv")
    ratio = float(theirs["tokens_per_second"]) / float(ours["tokens_per_second"])
    assert f"| {ratio:.2f} |" in next(
        line for line in text.splitlines() if line.startswith("| transformers 2x32")
    )
    for number in (1, 2):
        events = json.loads((folder / f"trace-{number}.json").read_text())["traceEvents"]
        assert {"data", "forward", "backward", "optimizer"} <= {
            event.get("name") for event in events
        }


@pytest.mark.slow
def test_what_is_measured_is_not_measured_again(beside_transformers):
    folder, flags, _ = beside_transformers
    before = (folder / "results/tiny.csv").read_text()
    done = launch([], folder, [*flags, "--sweep=microbatch_size=8,4"], program="bench")
    assert done.returncode == 0, done.stderr
    after = (folder / "results/tiny.csv").read_text()
    assert after.startswith(before) and len(after.splitlines()) == 4  # theirs knows no microbatch
    assert "row 1," not in done.stderr and "row 3," in done.stderr


@pytest.mark.slow
def test_what_needs_too_much_memory_is_noted_and_the_others_go_on(python, tmp_path):
    sweep = "--sweep=d_model=32,524288 sharding=ZERO1,DDP"  # 32, and 26 TB of weights
    flags = [*TINY, sweep, "--ranks=2", "--grad_accum=2", "--microbatch_size=1", "--out=a.csv"]
    done = python("train", *flags, program="bench")
    assert done.returncode == 0, done.stderr
    lines = lines_of(tmp_path / "a.csv")
    assert [line["status"] for line in lines] == ["ok", "ok", "out of memory", "out of memory"]
    assert [line["sharding"] for line in lines] == ["ZERO1", "DDP"] * 2
    assert [line["global_batch_size"] for line in lines[:2]] == ["4", "4"] and lines[0][
        "grad_accum"
    ] == "2"
    assert all(0 < float(line["communication"]) < 1 for line in lines[:2])
    assert "- not measured: 2x524288, ZERO1: out of memory" in done.stdout


@pytest.mark.slow
def test_under_torchrun_rows_follow_each_other_and_a_restart_goes_on(tmp_path):
    how = [*TORCHRUN, "2", "--max-restarts=1"]
    sweep = "--sweep=d_model=32,40,524288,48"
    done = launch(
        how, tmp_path, ["train", *TINY, sweep, "--rounds=1", "--out=a.csv"], program="bench"
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = lines_of(tmp_path / "a.csv")
    assert [line["status"] for line in lines] == ["ok", "ok", "out of memory", "ok"]
    assert {line["ranks"] for line in lines} == {"2"}


def test_sizes_are_the_recipes(monkeypatch):
    monkeypatch.chdir(ROOT)
    rows = [
        row
        for group in bench_train.groups(["--sizes=125m,1b", "--ranks=8", "--grad_accum=2"])
        for row in group
    ]
    found = [
        (r.columns["model"], r.columns["n_params"], r.columns["global_batch_size"]) for r in rows
    ]
    assert found[0][0] == "mpt125m" and found[1] == ("mpt1b", 1_315_950_592, 2 * 8 * 4)


def test_a_row_is_done_when_all_its_settings_are_alike_and_it_is_settled():
    flags = ["--precision=bf16", "--attn_impl=sdpa", "--z_loss=0.1"]
    ((row,),) = bench_train.groups(flags)
    line = {key: str(value) for key, value in row.columns.items()}
    assert row.is_like(line) and row.is_like(
        line | {"status": "out of memory", "tokens_per_second": "9"}
    )
    assert not row.is_like(line | {"status": "ImportError: no module"})  # which may be there by now
    for more in (
        "--z_loss=0.2",
        "--attn_impl=blocks",
        "--grad_clip=1",
        "--microbatch_size=3",
        "--ranks=2",
    ):
        ((other,),) = bench_train.groups([*flags, more])
        assert not other.is_like(line), more


def test_alternating_rows_are_one_group():
    sweep = "--sweep=microbatch_size=1,2 compile=false,true"
    assert [len(group) for group in bench_train.groups([sweep])] == [1] * 4
    (group,) = bench_train.groups([sweep, "--alternate"])
    assert [(r.cfg.microbatch_size, r.cfg.compile) for r in group] == [
        (1, False),
        (1, True),
        (2, False),
        (2, True),
    ]


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--sweep=microbatch_size"], "--sweep wants settings with values"),
        (["--sweep=microbatchsize=1"], "did you mean 'microbatch_size'"),
        (["configs/mpt1b.py", "--sizes=125m"], "a config file or --sizes"),
        (["--ranks=3"], "global_batch_size 8 is not a multiple of the 3 ranks"),
        (["--out=results"], "the name of a .csv file"),
        (["--microbatch_size=auto"], "set --microbatch_size=NUMBER"),
        (["--rounds=0"], "rounds and steps must be at least 1"),
        (["--transformers", "--ranks=2"], "set --ranks=1"),
    ],
)
def test_mistakes_are_told(flags, words, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(UserError, match=words):
        bench_train.groups(flags)


def test_a_file_of_something_else_is_left_alone(python, tmp_path):
    (tmp_path / "a.csv").write_text("a,b\n1,2\n")
    done = python("train", *TINY, "--out=a.csv", program="bench")
    assert done.returncode == 2 and "a.csv is not a CSV of bench train" in done.stderr
    assert (tmp_path / "a.csv").read_text() == "a,b\n1,2\n"


def event(name, cat, ts, dur, **args):
    return {"ph": "X", "name": name, "cat": cat, "ts": ts, "dur": dur, "args": args}


def test_on_a_gpu_a_kernel_belongs_to_where_it_was_launched():
    """Launched from 0 to 30 us on the host, run from 100 to 200 on the device; the backward by another thread."""
    events = [
        *(event("forward", "user_annotation", 0, 10), event("backward", "user_annotation", 10, 10)),
        *(
            event("optimizer", "user_annotation", 20, 10),
            event("forward", "gpu_user_annotation", 100, 55),
        ),
        *(
            event("cudaLaunchKernel", "cuda_runtime", 2, 1, correlation=1),
            event("gemm", "kernel", 100, 20, correlation=1),
        ),
        *(
            event("cudaLaunchKernel", "cuda_runtime", 12, 1, correlation=2),
            event("gemm", "kernel", 120, 40, correlation=2),
        ),
        event("cuLaunchKernel", "cuda_driver", 13, 1, correlation=3),
        *(event("mul", "kernel", 150, 20, correlation=3), event("aten::mm", "cpu_op", 12, 3)),
        event("hipMemcpyAsync", "cuda_runtime", 25, 1, correlation=4),
        event("Memcpy", "gpu_memcpy", 180, 20, correlation=4),
        event("cudaLaunchKernel", "cuda_runtime", 14, 1, correlation=5),
        event("ncclDevKernel_ReduceScatter", "kernel", 140, 30, correlation=5),
        *({"ph": "s", "name": "ac2g"}, event("late", "kernel", 190, 5)),
    ]
    wanted = {
        "data": 0,
        "forward": 0.2,
        "backward": 0.5,
        "optimizer": 0.2,
        "communication": 0.3,
        "idle": 0.1,
    }
    assert bench_train.time_split(events) == pytest.approx(wanted)
    untold = [
        e
        for e in events
        if "Launch" not in e["name"] and "Memcpy" not in e["name"] and "nccl" not in e["name"]
    ]
    assert set(bench_train.time_split(untold).values()) == {None}


def test_on_a_cpu_the_regions_count_and_gloo():
    events = [
        *(event("data", "user_annotation", 0, 1), event("forward", "user_annotation", 1, 3)),
        *(event("backward", "user_annotation", 4, 5), event("optimizer", "user_annotation", 9, 1)),
        *(event("gloo:all_gather", "cpu_op", 2, 1), event("gloo:all_gather", "cpu_op", 2.5, 1)),
    ]
    wanted = {
        "data": 0.1,
        "forward": 0.3,
        "backward": 0.5,
        "optimizer": 0.1,
        "communication": 0.15,
        "idle": 0,
    }
    assert bench_train.time_split(events) == pytest.approx(wanted)
