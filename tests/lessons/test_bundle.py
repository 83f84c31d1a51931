"""lessons/bundle.py: a folder from which a laptop is set up without a network."""

import os
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT, clean_environment

import install
from lessons import bundle
from program import UserError

# A network namespace without any route; only 127.0.0.1 is there, as on a laptop in a train.
ALONE = ["unshare", "--map-root-user", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]


def run(*command, cwd=ROOT, **more):
    env = clean_environment() | more
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=900)


@pytest.mark.long
def test_a_classroom_is_set_up_without_a_network(tmp_path):
    """A bundle, a laptop that reaches nothing, lesson 0 and the check of lesson 1."""
    if not shutil.which("unshare") or run(*ALONE, "true").returncode:
        pytest.skip("needs unshare, ip and network namespaces")
    folder, there = tmp_path / "a stick's $name" / "bundle", tmp_path / "my workshop"
    made = run(sys.executable, "-m", "lessons.bundle", str(folder))
    assert made.returncode == 0, made.stderr

    python = getattr(sys, "_base_executable", sys.executable)  # without the packages of .venv
    done = run(*ALONE, "sh", f"{folder}/setup.sh", str(there), PYTHON=python, PIP_FIND_LINKS="")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "next: python -m lessons 0" in done.stdout

    own = there / ".venv" / "bin" / "python"
    for words in (["0", "--short"], ["check", "1", "--file=lessons/solutions/1_the_model.py"]):
        done = run(*ALONE, str(own), "-m", "lessons", *words, cwd=there)
        assert done.returncode == 0, done.stdout + done.stderr
    assert "Lesson 1 is solved" in done.stdout


def test_the_project_is_copied_without_what_each_machine_makes(tmp_path, monkeypatch):
    """All files that git has, and none that it ignores or that holds a user's text."""
    project = tmp_path / "project"
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    names = listed.stdout.split() or ["fsdp_train.py", "Makefile", "lessons/exercises"]
    bundle.copy_project(tmp_path)
    assert all((project / name).exists() for name in names if (ROOT / name).exists())
    bundle.copy_project(tmp_path)  # again, over the first

    for name in ("my/private.txt", "machine.json", "lessons/mine/1_the_model.py", "runs/a/b"):
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text("mine")
    monkeypatch.setattr(bundle, "ROOT", project)
    bundle.copy_project(tmp_path / "again")
    copied = {path.name for path in (tmp_path / "again" / "project").rglob("*")}
    assert "fsdp_train.py" in copied
    left_out = {".venv", ".git", "runs", "data", "mine", "my", "machine.json", "__pycache__"}
    assert not copied & left_out


def test_another_version_of_python_is_refused_in_one_line(tmp_path):
    bundle.write_setup(tmp_path)
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
    bundle.write_setup(tmp_path)
    assert (tmp_path / "setup.sh").read_text().startswith(bundle.SETUP.partition("set -eu")[0])
