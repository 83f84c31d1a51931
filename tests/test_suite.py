"""The suite itself: its three tiers hold each test once."""

import re

from conftest import ROOT

TARGETS = ("test", "test-all", "soak")
# (slow, long): whether a test is marked so; and the target that runs it.
TIERS = {(0, 0): "test", (1, 0): "test-all", (0, 1): "soak", (1, 1): "soak"}


def chosen_by(target: str) -> str:
    """What a target of the Makefile gives to pytest as -m: an expression of Python."""
    makefile = (ROOT / "Makefile").read_text()
    return re.search(rf'^{target}: .*\n.* -m pytest -m "([^"]+)"', makefile, re.MULTILINE)[1]


def test_every_test_is_in_one_tier():
    for (slow, long), tier in TIERS.items():
        marks = {"slow": slow, "long": long}
        assert [target for target in TARGETS if eval(chosen_by(target), marks)] == [tier]


def test_ci_runs_the_quick_and_the_slow_ones_only():
    lines = (ROOT / ".ci/run").read_text()
    assert re.findall(r"^make (\S+)", lines, re.MULTILINE) == ["test", "test-all"]
