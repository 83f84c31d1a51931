"""planning/picture.py: what is drawn of kinds of device beside each other."""

import subprocess
import sys
from pathlib import Path

import pytest

import plan
from planning import picture

ROOT = Path(__file__).parent.parent.parent
MPT7B = str(ROOT / "configs/mpt7b.py")
QUESTION = [MPT7B, "--device=h100,mi250", "--sweep_devices=8,16", "--plot"]


@pytest.mark.parametrize("price", ["--price=2.5,1.2", ""])
def test_a_line_and_a_band_for_each_kind(tmp_path, monkeypatch, price):
    pytest.importorskip("matplotlib", reason="pictures need matplotlib: see requirements-extra.txt")
    saved = []
    monkeypatch.setattr(picture, "save", lambda figure, path: saved.append(figure))
    plan.main([word for word in [*QUESTION, price] if word])
    (figure,) = saved
    labels = [axes.get_ylabel().split()[0].strip(",") for axes in figure.axes]
    assert labels == ["tokens/s", "days", "cost", "kWh"]
    drawn = [axes for axes in figure.axes if price or not axes.get_ylabel().startswith("cost")]
    for axes in drawn:
        lines = [container[0] for container in axes.containers]
        assert [len(line.get_xdata()) for line in lines] == [2, 2]
        assert lines[0].get_linestyle() != lines[1].get_linestyle()  # without colours, too
        assert lines[0].get_marker() != lines[1].get_marker()
        assert len(axes.collections) == 4  # bars and bands
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert [name.split(", ")[0] for name in names] == ["H100 SXM", "MI250 GCD"]
    assert "runs" in figure.get_supxlabel()


@pytest.mark.parametrize("kinds", ["--device=h100,mi250", "--device=h100,mi250,a100,4090,mi300x"])
def test_all_text_is_inside_the_picture(monkeypatch, kinds):
    """Long lines below it are wrapped, long legends have several rows."""
    pytest.importorskip("matplotlib", reason="pictures need matplotlib: see requirements-extra.txt")
    saved = []
    monkeypatch.setattr(picture, "save", lambda figure, path: saved.append(figure))
    plan.main([MPT7B, kinds, "--sweep_devices=8,16", "--price=2.5", "--plot"])
    (figure,) = saved
    figure.draw_without_rendering()
    for text in (figure._supxlabel, figure.legends[0]):
        box = text.get_window_extent()
        assert box.x0 >= 0 and box.y0 >= 0
        assert box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1
    assert min(axes.get_window_extent().height for axes in figure.axes) > 200


def test_memory_by_sharding_where_nodes_do_not_divide_the_ranks(monkeypatch):
    """12 data-parallel ranks on nodes of 8: groups of 4."""
    pytest.importorskip("matplotlib", reason="pictures need matplotlib: see requirements-extra.txt")
    saved = []
    monkeypatch.setattr(picture, "save", lambda figure, path: saved.append(figure))
    question = [MPT7B, "--device=h100", "--devices=12", "--global_batch_size=1020"]
    plan.main([*question, "--tp=1", "--pp=1", "--plot"])
    assert len(saved) == 1


def test_without_matplotlib_one_line_says_what_to_install():
    code = (
        "import sys; sys.modules['matplotlib'] = None; import config, plan; config.run(plan.main)"
    )
    command = [sys.executable, "-c", code, *QUESTION]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert "pictures need matplotlib: make setup-lessons" in line
