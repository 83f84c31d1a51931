"""`python -m bench NAME`: the list of names, and which files a name imports."""

import ast
import subprocess
import sys

import pytest
from conftest import ROOT, refusal, rooms_on_path

from bench import __main__ as door
from bench.__main__ import NAMES, OF_MANY_RANKS


@pytest.mark.parametrize(
    "words, answer",
    [
        ("", "usage: "),
        ("trian", "did you mean train?"),
        ("first_night", "slurm/first_night.sh"),
        ("generate --engine=32", "bench serve --shapes="),
    ],
)
def test_no_such_benchmark_is_one_line(words, answer):
    assert answer in refusal(door.main, words.split())


def test_the_list_has_every_file_with_its_first_line(python):
    listed = python("--help", program="bench").stdout
    for name in NAMES:
        path = ROOT / "bench" / f"{name}.py"
        first_line = ast.get_docstring(ast.parse(path.read_text())).splitlines()[0]
        assert f"  {name:<13} {first_line}\n" in listed + "\n"


def test_the_door_knows_which_benchmarks_are_ranks():
    """Those end by processes.run; program.run would make each process of torchrun one alone."""
    ends = {name: (ROOT / "bench" / f"{name}.py").read_text().split("\n")[-2] for name in NAMES}
    assert {name for name, end in ends.items() if "processes.run" in end} == set(OF_MANY_RANKS)


IMPORTS = """
import sys
from bench import __main__ as door
try:
    door.main(["compare"])
except door.program.UserError as error:
    print(error, *sys.modules)
"""


def test_the_door_imports_only_what_is_asked_for():
    """Programs that only compare results start without torch."""
    command = [sys.executable, "-c", IMPORTS]
    done = subprocess.run(command, env=rooms_on_path(), capture_output=True, text=True, check=True)
    modules = done.stdout.split()
    assert "bench.compare" in modules and not {"torch", "bench.train"} & set(modules)
