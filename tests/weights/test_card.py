"""The model card: what a run's files say, as one HTML file without script."""

import html.parser
import json
import math
import shutil

import pytest
from conftest import json_lines, refusal

import checkpoint
from weights import card, hf

VOID = {"meta"}
HOSTILE = "</title><script>alert(1)</script><img src=x onerror='alert(\"2\")'>&amp;"


class Page(html.parser.HTMLParser):
    """The elements of a page, which are closed in the order in which they were opened."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.elements, self.attributes, self.texts = [], [], [], []
        assert text.startswith("<!doctype html>\n")
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, name, attributes):
        self.elements.append(name)
        self.attributes += attributes
        if name not in VOID:
            self.open.append(name)

    def handle_endtag(self, name):
        assert self.open.pop() == name

    def handle_data(self, data):
        self.texts.append(data)

    @property
    def cells(self):
        """All texts."""
        return "\n".join(self.texts)


def page_of(run, **more) -> Page:
    """The card of a run, checked: no script, nothing from elsewhere."""
    page = Page(card.page(run, more.pop("name", run.name), card.record_of(run), **more))
    assert page.elements.count("h1") == 1
    assert not {"script", "img", "iframe", "link", "object", "base", "form"} & set(page.elements)
    for name, value in page.attributes:
        assert not name.startswith("on")
        assert name not in ("href", "src", "style", "action"), value
    return page


def copied(run, folder):
    """A copy of a run that a test may change."""
    shutil.copytree(run, folder / "run")
    return folder / "run"


def settings_with(run, **values):
    """Change the saved settings of a run."""
    saved = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(saved | values))


def test_a_real_run(tiny_run):
    page = page_of(tiny_run)
    rows = [json.loads(line) for line in (tiny_run / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    vals = [row["val_loss"] for row in rows if "val_loss" in row]
    assert f"{losses[-1]:.4f}" in page.cells
    assert f"{vals[0]:.4f} at first, {vals[-1]:.4f}" in page.cells
    assert "2 of 2 planned" in page.cells
    assert "1 × cpu" in page.cells
    assert "bytes" in page.texts  # the tokenizer
    n_params = sum(w.numel() for w in checkpoint.whole_weights(checkpoint.settings(
        checkpoint.latest(tiny_run))).values())  # fmt: skip
    assert f"{n_params:,} parameters" in page.cells
    launch_row = json.loads((tiny_run / "launches.jsonl").read_text())
    assert launch_row["host"] not in page.cells
    assert str(tiny_run.parent) not in page.cells


def test_hostile_words_are_text(tiny_run, tmp_path):
    """In the name, the settings, a launch, a task; also what no page may hold."""
    run = copied(tiny_run, tmp_path)
    settings_with(run, expect=HOSTILE, init_from=HOSTILE, lora_targets="\0\ud800", **{HOSTILE: 1})
    launches = {"device": HOSTILE, "ranks": 1, "first_step": 0, "time": HOSTILE}
    (run / "launches.jsonl").write_text(json_lines(launches))
    figures = {"tasks": {HOSTILE: {"acc": 0.5, "n": 3}}}
    (run / "results.json").write_text(json.dumps(figures))
    page = page_of(run, name=HOSTILE)
    assert page.texts.count(HOSTILE) >= 5
    page.cells.encode()


def test_a_curve_stays_inside_its_picture(tiny_run, tmp_path):
    """Whatever its numbers are, and those that are not finite are left out."""
    run = copied(tiny_run, tmp_path)
    step = {"tokens": 96, "lr": 1e-4, "grad_norm": 1.0}
    for losses in ([5.0, math.nan, 3.0, math.inf, 1e300, -2.0], [4.0], [4.0, 4.0], [1e30, -1e30]):
        rows = [{"step": i, "loss": loss, **step} for i, loss in enumerate(losses, 1)]
        (run / "metrics.jsonl").write_text(json_lines(*rows))
        page = page_of(run)
        points = [value for name, value in page.attributes if name == "points"]
        places = [place.split(",") for line in points for place in line.split()]
        assert places
        assert all(card.LEFT <= float(x) <= card.WIDTH - card.RIGHT for x, _ in places)
        assert all(card.TOP <= float(y) <= card.HEIGHT - card.BOTTOM for _, y in places)


def test_runs_that_lack_something(tiny_run, tmp_path):
    """A card says what is known."""
    run = copied(tiny_run, tmp_path)
    for name in ("launches.jsonl", "metrics.jsonl"):
        (run / name).unlink()
        page_of(run)
    (run / "metrics.jsonl").write_bytes(bytes(range(256)))
    assert "Damage" in page_of(run).texts
    (run / "config.json").unlink()  # as of imported weights: their checkpoint has the settings
    assert "of step 1" in page_of(run, step=1).cells
    shutil.rmtree(run / "checkpoints")
    assert "no run folder" in refusal(card.page, run, "run", card.Record())


def test_adapters_name_their_base(tiny_run, tmp_path):
    run = copied(tiny_run, tmp_path)
    path = f"{tmp_path}/home/anna/base/checkpoints/step-9"
    settings_with(run, lora_rank=8, init_from=path)
    page = page_of(run)
    assert "of rank 8" in page.cells
    assert "base, step-9" in page.texts
    assert "anna" not in page.cells


def test_exported_weights_have_their_card(tiny_run, tmp_path):
    """Of the run and the step that they are of."""
    pytest.importorskip("safetensors")
    hf.export(tiny_run / "checkpoints/step-1", tmp_path / "theirs")
    page = Page((tmp_path / "theirs/card.html").read_text())
    assert "of step 1" in page.texts
    assert tiny_run.name in page.texts
