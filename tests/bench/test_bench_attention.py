"""bench/attention.py: its formula, contestants that fail, and the files that it writes."""

import pytest
import torch

import attention
from bench import attention as bench_attention
from program import UserError


def test_attention_tflops_by_hand():
    shape = bench_attention.Shape(head_dim=64, length=1024, heads=32, batch=16)
    forward = 4 * 16 * 32 * 1024 * 1024 * 64 / 2  # FLOPs
    both = 3.5 * forward / 6e-3 / 1e12
    assert shape.tflops((2e-3, 6e-3)) == pytest.approx((34.36, both), rel=1e-3)


SMALL = bench_attention.Shape(head_dim=16, length=32, heads=2, batch=2)


def test_an_attention_that_raises_or_errs_is_na_and_the_others_go_on():
    slopes = attention.alibi_slopes(2)
    calls = []
    working = {
        name.split(",")[0]: contestant
        for name, contestant in bench_attention.attention_contestants(slopes).items()
    }

    def breaks(q, k, v):
        raise NotImplementedError("no | such backend\nhere")

    def breaks_later(q, k, v):
        calls.append(1)
        if len(calls) > 9:  # 1 to compare, 3 + 3 to warm up, 2 of a turn
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 17 GiB")
        return working["reference"][1](q, k, v)

    contestants = {
        "breaks": (slopes, breaks),
        "breaks later": (slopes, breaks_later),
        "has no ALiBi": (slopes, working["SDPA flash"][1]),
        "works": working["reference"],
        "works too": working["SDPA flash"],
    }
    cpu = torch.device("cpu")
    args = bench_attention.AttentionArgs(rounds=3, turn_ms=0.01, cell_seconds=1000)
    found = bench_attention.measure(contestants, SMALL, cpu, args, check=True)
    assert found["breaks"] == "no / such backend here"
    assert found["breaks later"] == "out of memory"
    assert found["has no ALiBi"].startswith("wrong by ")
    for name in ("works", "works too"):
        assert len(found[name]) == 2 and min(found[name]) > 0

    args = bench_attention.AttentionArgs(cell_seconds=1e-9)
    works = {"works": contestants["works"]}
    found = bench_attention.measure(works, SMALL, cpu, args, check=False)
    assert found["works"].startswith("too slow")


TINY = """
    --device=cpu --lengths=32 --head_dims=16 --d_model=16 --tokens=32 --rounds=1 --turn_ms=1
    --out=results
""".split()


@pytest.mark.slow
def test_attention_writes_a_table_of_figures(python, tmp_path, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # so that our kernels run on a CPU
    done = python("attention", *TINY, program="bench")
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "results/attention_cpu.md").read_text()
    assert text.strip() == done.stdout.strip()
    assert text.startswith("`python -m bench attention --device=cpu")

    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    heads, _, *rows = lines
    assert heads[2:] == ["attention", "forward", "forward + backward", "ours, ALiBi / this"]
    found = {row[2]: row for row in rows}
    assert found["ours, ALiBi"][:2] == ["16", "1 x 32"] and found["ours, ALiBi"][-1] == "1.00"
    assert found["SDPA cuDNN, no bias"][3:5] == ["n/a"] * 2
    assert float(found["reference, ALiBi"][3]) > 0
    assert float(found["blocks, ALiBi"][-1]) < 1  # the interpreter is slow


def test_a_list_of_lengths_is_numbers_with_commas():
    with pytest.raises(UserError, match="--lengths wants whole numbers .* not '1k,2k'"):
        bench_attention.main(["--device=cpu", "--lengths=1k,2k"])
