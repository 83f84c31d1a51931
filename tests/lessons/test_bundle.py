"""lessons/bundle.py: a folder from which a laptop is set up without a network."""

import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT, clean_environment, flags_for, refusal

import install
from lessons import bundle
from program import UserError


def run(*command, cwd=ROOT, **more):
    env = clean_environment() | more
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=900)


@pytest.mark.long
def test_a_classroom_is_set_up_without_a_network(tmp_path, alone):
    """A bundle, a laptop that reaches nothing, training, lesson 0 and the check of lesson 1."""
    folder, there = tmp_path / "a stick's $name" / "bundle", tmp_path / "my workshop"
    made = run(sys.executable, "-m", "lessons.bundle", str(folder))
    assert made.returncode == 0, made.stderr

    python = getattr(sys, "_base_executable", sys.executable)  # without the packages of .venv
    laptop = alone(vanish=True)
    done = run(*laptop, "sh", f"{folder}/setup.sh", str(there), PYTHON=python, PIP_FIND_LINKS="")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "next: python -m lessons 0" in done.stdout
    train_as_told(done.stdout, there, laptop, "--max_steps=20", "--warmup_steps=5")

    own = there / ".venv" / "bin" / "python"
    for words in (["0", "--short"], ["check", "1", "--file=lessons/solutions/1_the_model.py"]):
        done = run(*laptop, str(own), "-m", "lessons", *words, cwd=there)
        assert done.returncode == 0, done.stdout + done.stderr
    assert "Lesson 1 is solved" in done.stdout


def train_as_told(output, folder, before, *flags) -> None:
    """Train with the command that setup.sh printed."""
    command = re.search(r"to train: (.*)", output)[1]
    done = run(*before, *shlex.split(command), *flags, cwd=folder)
    assert done.returncode == 0, done.stderr


BASE = """
d_model, n_heads, n_layers, vocab_size, max_seq_len, alibi = 32, 2, 1, 512, 32, True
dataset, tokenizer, val_fraction = "my/*.txt", "bpe-300", 0.1
global_batch_size, max_steps, warmup_steps, run_dir = 4, 2, 1, "runs/base"
device = "cpu"
"""
TUNED = BASE + 'init_from, run_dir = "runs/base/checkpoints/step-2", "runs/tuned"\n'


@pytest.mark.slow
def test_a_run_is_set_up_without_a_network(tmp_path, monkeypatch, tiny_text, alone, forks):
    """The user's config, tokens and base come along. torch is that of the Python below."""
    home, folder, there = tmp_path / "home", tmp_path / "a stick's $name", tmp_path / "my run"
    folder.mkdir()
    bundle.copy_project(tmp_path)
    (tmp_path / "project").rename(home)
    shutil.copytree(tiny_text, home / "my")
    (home / "my/base.py").write_text(BASE)
    (home / "my/tuned run.py").write_text(TUNED)
    status, _, err = forks(["fsdp_train.py", "my/base.py"], home)
    assert status == 0, err

    monkeypatch.chdir(home)
    monkeypatch.setattr(bundle, "ROOT", home)
    bundle.copy_project(folder)
    bundle.copy_run("my/tuned run.py", folder / "project")
    bundle.write_setup(folder, "my/tuned run.py")
    (folder / "wheels").mkdir()
    assert not list((folder / "project/my").glob("*.txt"))  # tokens alone
    here = alone(vanish=True)
    done = run(*here, "sh", f"{folder}/setup.sh", str(there), PYTHON=sys.executable)
    assert done.returncode == 0, done.stdout + done.stderr
    train_as_told(done.stdout, there, here)
    assert (there / "runs/tuned/checkpoints/step-2").exists()
    again = run(*here, "sh", f"{folder}/setup.sh", str(there), PYTHON=sys.executable)
    assert again.returncode == 0, again.stderr


def test_a_config_that_names_what_is_elsewhere_is_refused(tmp_path, monkeypatch, tiny_data):
    monkeypatch.chdir(tmp_path)
    flags = dict(flag[2:].split("=", 1) for flag in flags_for(tiny_data))
    text = BASE + "".join(f"{key} = {value!r}\n" for key, value in flags.items())
    tmp_path.joinpath("a.py").write_text(text.replace("'0.1'", "0.1"))
    message = refusal(bundle.copy_run, "a.py", tmp_path / "project")
    assert f"{tiny_data} is outside of this folder" in message


def test_the_project_is_copied_without_what_each_machine_makes(tmp_path, monkeypatch):
    """All files that git has, and none that it ignores or that holds a user's text."""
    project = tmp_path / "project"
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    names = listed.stdout.split() or ["fsdp_train.py", "Makefile", "lessons/solutions"]
    bundle.copy_project(tmp_path)
    assert all((project / name).exists() for name in names if (ROOT / name).exists())

    for name in ("my/private.txt", "machine.json", "lessons/mine/1_the_model.py", "runs/a/b"):
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text("mine")
    monkeypatch.setattr(bundle, "ROOT", project)
    (tmp_path / "again/project").mkdir(parents=True)
    (tmp_path / "again/project/machine.json").write_text("of an earlier bundle")
    bundle.copy_project(tmp_path / "again")
    copied = {path.name for path in (tmp_path / "again" / "project").rglob("*")}
    assert "fsdp_train.py" in copied
    left_out = {".venv", ".git", "runs", "data", "mine", "my", "machine.json", "__pycache__"}
    assert not copied & left_out


def test_another_version_of_python_is_refused_in_one_line(tmp_path):
    bundle.write_setup(tmp_path, "a.py")
    old = tmp_path / "python"
    old.write_text("#!/bin/sh\necho 3.9\n")
    old.chmod(0o755)
    done = run("sh", str(tmp_path / "setup.sh"), str(tmp_path / "there"), PYTHON=str(old))
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert f"the wheels are for Python {install.python_version()}" in done.stderr
    assert not (tmp_path / "there").exists()


@pytest.mark.parametrize("name", ["thesis.tex", "setup.sh"])
def test_a_folder_with_other_files_is_refused(tmp_path, name):
    """One with a setup.sh of its own, too: its project/ would be replaced."""
    (tmp_path / name).write_text("#!/bin/sh\n# mine\n")
    (tmp_path / "project").mkdir()
    with pytest.raises(UserError, match="has other files in it"):
        bundle.main([str(tmp_path)])
    assert sorted(os.listdir(tmp_path)) == sorted([name, "project"])
    bundle.write_setup(tmp_path, "a.py")
    assert (tmp_path / "setup.sh").read_text().startswith(bundle.SETUP.partition("set -eu")[0])
