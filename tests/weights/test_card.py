"""The model card: what a run's files say, as a README.md in the Hub's format."""

import json
import re
import shutil

import pytest
from conftest import json_lines, refusal

import checkpoint
from storage import checkpoint_files
from weights import card, hf

HOSTILE = "</title><script>alert(1)</script>![x](http://e.vil/x)<img src=x onerror='alert(2)'>|`a`"


def page_of(run, **more) -> str:
    """The card of a run, checked: no HTML, no link, tables whose rows are whole."""
    page = card.page(run, more.pop("name", run.name), card.record_of(run), **more)
    head, _, text = page.removeprefix("---\n").partition("\n---\n")
    assert "library_name: " in head and "pipeline_tag: text-generation" in head
    assert "<" not in page and not re.search(r"(?<!\\)\]\(", page)
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert {line.replace("\\|", "").count("|") for line in rows} <= {3, 6}
    page.encode()
    return page


def cells_of(page) -> dict[str, str]:
    """{first cell: second} of all tables."""
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| ")]
    return {row[0].removeprefix("| "): row[1].removesuffix(" |") for row in rows}


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
    weights = checkpoint.whole_weights(checkpoint_files.read_settings(checkpoint.latest(tiny_run)))
    expected = {
        "Parameters": f"{sum(w.numel() for w in weights.values()):,}",
        "Training loss": f"{losses[-1]:.4f} nats per token at step 2",
        "Validation loss": f"{vals[0]:.4f} at first, {vals[-1]:.4f} at last",
        "Tokenizer": "bytes",
        "Ranks": "1",
        "Device": "cpu",
        "max_steps": "2",
    }
    cells = cells_of(page)
    assert {name: cells.get(name) for name in expected} == expected
    launch_row = json.loads((tiny_run / "launches.jsonl").read_text())
    assert launch_row["host"] not in page
    assert str(tiny_run.parent) not in page


def test_hostile_words_are_text(tiny_run, tmp_path):
    """In the name, the settings, a launch, a task; also what no page may hold."""
    run = copied(tiny_run, tmp_path)
    settings_with(run, init_from=HOSTILE, lora_targets="\0\ud800", **{HOSTILE: 1, "a\n# b": 2})
    launches = {"device": HOSTILE, "ranks": 1, "first_step": 0, "time": HOSTILE}
    (run / "launches.jsonl").write_text(json_lines(launches))
    figures = {"tasks": {HOSTILE: {"acc": 0.5, "n": 3}}}
    (run / "results.json").write_text(json.dumps(figures))
    page = page_of(run, name=HOSTILE)
    assert page.count("onerror") == 5
    assert page.count("\n# ") == 1


def test_no_path_of_the_machine_is_shown(tiny_run, tmp_path):
    run = copied(tiny_run, tmp_path)
    path = "/home/anna/base/checkpoints/step-9"
    settings_with(run, lora_rank=8, init_from=path, dataset="/home/anna/x.txt;/home/anna/y.txt")
    settings_with(run, skip_steps=["/home/anna/z"], lora_targets="at=/home/anna/w")
    page = page_of(run)
    cells = cells_of(page)
    assert "Adapters" in page and cells["init_from"] == "base, step-9"
    assert cells["Data"] == "x.txt;y.txt" and cells["lora_targets"] == "at=w"
    assert "anna" not in page


def test_runs_that_lack_something(tiny_run, tmp_path):
    """A card says what is known."""
    run = copied(tiny_run, tmp_path)
    for name in ("launches.jsonl", "metrics.jsonl"):
        (run / name).unlink()
        page_of(run)
    (run / "metrics.jsonl").write_bytes(bytes(range(256)))
    assert "Damage" in page_of(run)
    (run / "config.json").unlink()  # as of imported weights: their checkpoint has the settings
    assert cells_of(page_of(run, step=1))["Weights"] == "of step 1"
    shutil.rmtree(run / "checkpoints")
    assert "no run folder" in refusal(card.page, run, "run", card.record_of(run))


def test_the_picture_shows_no_path(tiny_run, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(card, "PICTURE", "loss.svg")
    card.main([str(tiny_run), f"--out={tmp_path}/mine.md"])
    assert "](loss.svg)" in (tmp_path / "mine.md").read_text()
    picture = (tmp_path / "loss.svg").read_text()
    assert f"<!-- {tiny_run.name} -->" in picture
    assert str(tiny_run.parent) not in picture
    assert "name it" in refusal(card.main, [str(tiny_run), f"--out={tmp_path}/mine.html"])


def test_exported_weights_have_their_card(tiny_run, tmp_path):
    """Of the run and the step that they are of."""
    pytest.importorskip("safetensors")
    hf.export(tiny_run / "checkpoints/step-1", tmp_path / "theirs")
    page = (tmp_path / "theirs/README.md").read_text()
    assert cells_of(page)["Weights"] == "of step 1"
    assert f"\n# {tiny_run.name}\n" in page
    if "](loss.png)" in page:
        assert (tmp_path / "theirs/loss.png").read_bytes().startswith(b"\x89PNG")
