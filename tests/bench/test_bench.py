"""`python -m bench NAME`: the list of names, and which files a name imports."""

import ast
import subprocess
import sys

import pytest
from conftest import ROOT, rooms_on_path

from bench.__main__ import NAMES, OF_MANY_RANKS


@pytest.mark.parametrize("words", [(), ("trian",)])
def test_no_such_benchmark_is_one_line(python, words):
    done = python(*words, program="bench")
    usage = "usage: python -m bench NAME [config] [--key=value]"
    message = f"{usage} (python -m bench --help lists the names)"
    if words:
        message = "no benchmark 'trian', did you mean train?"
    assert (done.returncode, done.stderr) == (2, f"error: {message}\n")


@pytest.mark.slow
def test_each_name_leads_to_its_file(python):
    assert "usage: python -m bench scaling" in python("scaling", program="bench").stderr
    settings = {"train": "--sweep=", "attention": "--head_dims=", "machine": "--seconds="}
    for name, setting in settings.items():
        assert setting in python(name, "--help", program="bench").stdout


def test_the_list_has_every_file_with_its_first_line(python):
    listed = python("--help", program="bench").stdout
    for path in (ROOT / "bench").glob("[a-z]*.py"):
        assert path.stem in NAMES
        first_line = ast.get_docstring(ast.parse(path.read_text())).splitlines()[0]
        assert f"  {path.stem:<13} {first_line}\n" in listed + "\n"


def test_the_door_knows_which_benchmarks_are_ranks():
    """Those end by processes.run; program.run would make each process of torchrun one alone."""
    ends = {name: (ROOT / "bench" / f"{name}.py").read_text().split("\n")[-2] for name in NAMES}
    assert {name for name, end in ends.items() if "processes.run" in end} == set(OF_MANY_RANKS)


IMPORTS = """
import sys
from bench import __main__ as door
try:
    door.main(["compare"])
except door.config.UserError as error:
    print(error, *sys.modules)
"""


def test_the_door_imports_only_what_is_asked_for():
    """Programs that only compare results start without torch."""
    command = [sys.executable, "-c", IMPORTS]
    done = subprocess.run(command, env=rooms_on_path(), capture_output=True, text=True, check=True)
    modules = done.stdout.split()
    assert done.stdout.startswith("usage: python -m bench compare")
    assert "bench.compare" in modules
    assert not {"torch", "bench.train", "bench.scaling"} & set(modules)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["bench team", "bench.team"])
def test_spawned_processes_find_their_class_however_it_is_started(python, how):
    done = python(program=how)
    lines = [f"rank {rank} of 3, 1 threads" for rank in range(3)]
    assert done.stdout.splitlines()[:3] == lines, done.stderr
    assert "has no attribute 'leave'" in done.stdout
    assert done.returncode == 0
