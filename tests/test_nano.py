"""nano.py: the trainer on one page has the losses of fsdp_train.py, alone and on two ranks."""

import json
import re
import runpy
import sys

import pytest
from conftest import ROOT, TORCHRUN, launch

import config
import nano
from config import MPTConfig, TrainConfig

SMALL = {"d_model": 64, "n_heads": 4, "n_layers": 2, "vocab_size": 300}
STEPS = 50
SCRIPT = """
import nano
for name, value in {changes}.items():
    setattr(nano, name, value)
nano.main()
"""


@pytest.fixture(scope="module")
def trained(tiny_text, tmp_path_factory):
    """The folder of a run of fsdp_train.py and its tokens, and the rows of its metrics."""
    folder = tmp_path_factory.mktemp("nano")
    flags = [f"--{name}={value}" for name, value in SMALL.items()]
    flags += ["--max_seq_len=32", "--alibi", "--no_bias", "--global_batch_size=8"]
    flags += [f"--max_steps={STEPS}", "--warmup_steps=5", "--lr=2e-3", "--run_dir=run"]
    flags += [f"--dataset={tiny_text}/*.txt", "--tokenizer=bpe-300", "--data_dir=tokens"]
    flags += ["--val_fraction=0.1", "--precision=fp32", "--device=cpu", "--compile=false"]
    done = launch([], folder, flags)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    return folder, rows


@pytest.mark.slow
@pytest.mark.parametrize("n_ranks", [1, 2])
def test_the_losses_are_the_trainers(trained, n_ranks):
    """Two epochs and more: 50 steps read 400 rows."""
    folder, rows = trained
    changes = SMALL | {"seq_len": 32, "max_steps": STEPS, "warmup_steps": 5}
    changes |= {"data_dir": "tokens", "device": "cpu", "show_every": 1}
    (folder / "small.py").write_text(SCRIPT.format(changes=changes))
    how = [*TORCHRUN, str(n_ranks)] if n_ranks > 1 else []
    done = launch(how, folder, [], program=folder / "small.py")
    assert done.returncode == 0, done.stderr

    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)  ", done.stdout)]
    expected = [row["loss"] for row in rows if "loss" in row]
    assert losses == pytest.approx(expected, abs=1e-5) and len(losses) == STEPS
    (val_loss,) = re.findall(r"validation loss ([\d.]+)", done.stdout)
    assert float(val_loss) == pytest.approx(rows[-1]["val_loss"], abs=1e-4)


def test_its_settings_are_the_demos():
    m, cfg = config.load([str(ROOT / "configs/demo.py")], MPTConfig, TrainConfig)
    shape = (m.d_model, m.n_heads, m.n_layers, m.max_seq_len, m.vocab_size)
    assert shape == (nano.d_model, nano.n_heads, nano.n_layers, nano.seq_len, nano.vocab_size)
    steps = (cfg.global_batch_size, cfg.max_steps, cfg.warmup_steps, cfg.seed)
    assert steps == (nano.batch_size, nano.max_steps, nano.warmup_steps, nano.seed)
    assert (cfg.lr, cfg.lr * cfg.alpha_f) == (nano.peak_lr, nano.last_lr)


def refused(monkeypatch, folder, *flags) -> str:
    """What `python nano.py FLAGS` says in this folder before it ends with status 1."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["nano.py", *flags])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / "nano.py"), run_name="__main__")
    return end.value.code


def test_flags_are_refused_and_help_is_its_docstring(tmp_path, monkeypatch):
    said = refused(monkeypatch, tmp_path, "--max_steps=5")
    assert nano.__doc__ in said and "no flags" in said


def test_without_tokens_it_says_what_makes_them(tmp_path, monkeypatch):
    assert "python data.py configs/demo.py" in refused(monkeypatch, tmp_path)


def test_ranks_that_cannot_share_a_batch_are_refused(tmp_path, monkeypatch):
    """They would leave out some rows of each."""
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(AssertionError, match="3 ranks cannot share 8 rows"):
        refused(monkeypatch, tmp_path)
