"""The suite itself: its three tiers hold each test once."""

import os
import re
import subprocess
import sys

from conftest import ROOT

TARGETS = ("test", "test-all", "soak")

# One test for each way in which a test may be marked.
MARKED = """
import pytest

def test_plain(): pass

@pytest.mark.slow
def test_slow(): pass

@pytest.mark.long
def test_long(): pass

@pytest.mark.slow
@pytest.mark.long
def test_slow_and_long(): pass

@pytest.mark.parametrize("n", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_partly_slow(n): pass
"""


def chosen_by(target: str) -> str:
    """What a target of the Makefile gives to pytest as -m."""
    makefile = (ROOT / "Makefile").read_text()
    return re.search(rf'^{target}: .*\n.* -m pytest -m "([^"]+)"', makefile, re.MULTILINE)[1]


def collect(path, *how) -> list[str]:
    """The names of the tests that pytest would run there, with this project's settings."""
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), str(path)]
    command += ["--collect-only", "-p", "no:cacheprovider", *how]
    env = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # they take a second to import
    done = subprocess.run(command, cwd=path.parent, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return re.findall(r"::(\S+)", done.stdout)


def test_every_test_is_in_one_tier(tmp_path):
    path = tmp_path / "test_marked.py"
    path.write_text(MARKED)
    tiers = [collect(path, "-m", chosen_by(target)) for target in TARGETS]
    assert all(tiers) and sorted(sum(tiers, [])) == sorted(collect(path))
    quick, slow, long = tiers
    assert quick == ["test_plain", "test_partly_slow[1]"]
    assert slow == ["test_slow", "test_partly_slow[2]"]
    assert long == ["test_long", "test_slow_and_long"]


def test_ci_runs_the_quick_and_the_slow_ones_only():
    lines = (ROOT / ".ci/run").read_text().splitlines()
    assert re.findall(r"^make (\S+)", "\n".join(lines), re.MULTILINE) == ["test", "test-all"]
