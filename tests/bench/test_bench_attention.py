"""bench/attention.py: its formula, contestants that fail, and the files that it writes."""

import pytest
import torch

import attention
from bench import attention as bench_attention
from program import UserError


def test_attention_tflops_by_hand():
    cell = bench_attention.Cell("x", head_dim=64, length=1024, heads=32, batch=16)
    cell.turns = [(1e-3, 2e-3), (3e-3, 4e-3), (2e-3, 9e-3)]  # medians: 2 ms and 4 ms
    forward = 4 * 16 * 32 * 1024 * 1024 * 64 / 2  # FLOPs
    assert forward == 68_719_476_736
    assert cell.tflops("forward") == pytest.approx(34.36, rel=1e-3)
    assert cell.tflops("backward") == pytest.approx(42.95, rel=1e-3)
    assert cell.tflops("forward + backward") == pytest.approx(3.5 * forward / 6e-3 / 1e12)


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
        if len(calls) > 8:  # 1 to compare, 2 + 2 to warm up, 2 of a turn
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 17 GiB")
        return working["reference"][1](q, k, v)

    contestants = {
        "breaks": (slopes, breaks),
        "breaks later": (slopes, breaks_later),
        "has no ALiBi": (slopes, working["SDPA flash"][1]),
        "works": working["blocks"],
        "works too": working["SDPA flash"],
    }
    cells = [small_cell(name) for name in contestants]
    cpu = torch.device("cpu")
    args = bench_attention.AttentionArgs(rounds=3, turn_ms=0.01, cell_seconds=1000)
    bench_attention.measure(contestants, cells, cpu, args, check=True)
    assert [cell.missing for cell in cells[:2]] == ["no / such backend here", "out of memory"]
    assert cells[2].missing.startswith("wrong by ")
    for cell in cells[3:]:
        assert not cell.missing and len(cell.turns) == 3 and cell.error < 0.02

    slow = [small_cell("works")]
    args = bench_attention.AttentionArgs(cell_seconds=1e-9)
    bench_attention.measure(contestants, slow, cpu, args, check=False)
    assert slow[0].missing.startswith("too slow")


def small_cell(contestant: str) -> bench_attention.Cell:
    """A contestant at a small shape."""
    return bench_attention.Cell(contestant, head_dim=16, length=32, heads=2, batch=2)


TINY = """
    --device=cpu --lengths=32 --head_dims=16 --d_model=16 --tokens=32 --rounds=1 --turn_ms=1
    --out=results
""".split()


@pytest.mark.slow
def test_attention_writes_tables_and_figures(python, tmp_path, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # so that our kernels run on a CPU
    done = python("attention", *TINY, program="bench")
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "results/attention_cpu.md").read_text()
    assert text.strip() == done.stdout.strip()
    assert text.startswith("`python -m bench attention --device=cpu")

    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    names = [row[0] for row in rows]
    assert [row[1:] for row in rows if row[0].startswith("head dim 16, ")] == [["32"]] * 4
    assert names.count("ours, ALiBi") == names.count("blocks, ALiBi") == 4
    assert [row[1] for row in rows if row[0] == "ours, ALiBi"][-1] == "1.00 / 1.00 / 1.00"
    assert "Not available: SDPA cuDNN, no bias (" in text
    assert "SDPA cuDNN, no bias" not in names
    assert float(rows[names.index("reference, ALiBi")][1]) > 0


def test_a_list_of_lengths_is_numbers_with_commas():
    assert bench_attention.whole_numbers("lengths", "2048,64,64") == [64, 2048]
    with pytest.raises(UserError, match="--lengths wants whole numbers .* not '1k,2k'"):
        bench_attention.whole_numbers("lengths", "1k,2k")
