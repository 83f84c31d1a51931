"""planning/picture.py: what is drawn of kinds of device beside each other."""

import subprocess
import sys

import pytest
from conftest import ROOT

import plan
from planning import picture

MPT7B = str(ROOT / "configs/mpt7b.py")
QUESTION = [MPT7B, "--device=h100,mi250", "--sweep_devices=8,16", "--plot"]


@pytest.fixture
def drawn(monkeypatch):
    """The figures that are saved."""
    pytest.importorskip("matplotlib", reason="pictures need matplotlib: see requirements-extra.txt")
    saved = []
    monkeypatch.setattr(picture, "save", lambda figure, path: saved.append(figure))
    return saved


@pytest.mark.parametrize("flags, panels", [
    (["--price=2.5,1.2"], ["days", "cost", "tokens/s", "kWh"]),
    ([], ["days", "tokens/s", "kWh"]),
])  # fmt: skip
def test_a_line_and_a_band_for_each_kind(drawn, flags, panels):
    plan.main([*QUESTION, *flags])
    (figure,) = drawn
    for axes, words in zip(figure.axes, panels, strict=True):
        assert axes.get_ylabel().startswith(words)
        first, second = axes.lines
        assert len(first.get_xdata()) == len(second.get_xdata()) == 2
        assert first.get_linestyle() != second.get_linestyle()  # without colours, too
        assert first.get_marker() != second.get_marker()
        assert len(axes.collections) == 2  # bands
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert [name.split(",")[0] for name in names] == ["H100 SXM", "MI250 GCD"]


def test_a_sweep_draws_speed_and_efficiency(drawn):
    plan.main([MPT7B, "--device=mi250", "--sweep_devices=8,16", "--plot"])
    (figure,) = drawn
    assert {"tokens/s", "efficiency"} <= {axes.get_ylabel() for axes in figure.axes}
    assert {len(axes.lines) for axes in figure.axes} == {2}  # strong and weak


def test_all_text_is_inside_the_picture(drawn):
    kinds = "--device=h100,mi250,a100,4090,mi300x"
    plan.main([MPT7B, kinds, "--sweep_devices=8,16", "--price=2.5", "--plot"])
    (figure,) = drawn
    figure.draw_without_rendering()
    for text in (figure._supxlabel, figure.legends[0]):
        box = text.get_window_extent()
        assert box.x0 >= 0 and box.y0 >= 0
        assert box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1
    assert min(axes.get_window_extent().height for axes in figure.axes) > 200


def test_memory_by_sharding_where_nodes_do_not_divide_the_ranks(drawn):
    """12 data-parallel ranks on nodes of 8: groups of 4."""
    question = [MPT7B, "--device=h100", "--devices=12", "--global_batch_size=1020"]
    plan.main([*question, "--tp=1", "--pp=1", "--plot"])
    assert len(drawn) == 1


def test_without_matplotlib_one_line_says_what_to_install():
    code = (
        "import sys; sys.modules['matplotlib'] = None; import plan, program; program.run(plan.main)"
    )
    command = [sys.executable, "-c", code, *QUESTION]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert "pictures need matplotlib: make setup-lessons" in line
