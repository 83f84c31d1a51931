"""CHANGES.md has a row for every old command and every old file, and the new ones exist."""

import re

import pytest
from conftest import ROOT
from test_program import PROGRAMS

TEXT = (ROOT / "CHANGES.md").read_text()
# The old programs: all were in one folder, but for those of benchmarks/.
OLD = """
    attention bench bench_attention bench_compare bench_machine bench_table bench_team bench_train
    calibrate checkpoint checkpoint_files config corpus data decoding devices elastic environment
    files flash_attention flops fsdp_train generate hf icl_eval icl_score icl_tasks launch_table
    loss matmuls memory microbatch model optim parallel plan plan_picture plot processes program
    resilience resume runlog sampling shards speed startup tensor_files tokenizer watch
    benchmarks/before_after benchmarks/flops_counted benchmarks/generate_speed benchmarks/icl_speed
    benchmarks/load_speed benchmarks/memory_measured benchmarks/planner benchmarks/trajectories
""".split()


def rows(title: str) -> list[list[str]]:
    """The two cells of each row of the table below a title, without its head."""
    section = TEXT.split(f"## {title}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    cells = [line.strip("| ").split(" | ") for line in lines]
    assert cells and all(len(row) == 2 for row in cells)
    return cells


COMMANDS = dict(rows("Commands"))


def module_of(command: str) -> str:
    """A command's program, as test_program.py names it: plan.py, lifecycle.plot, bench train."""
    words = command.strip("`").split()
    if "-m" not in words:
        return next(word for word in words if word.endswith(".py"))
    name, *rest = words[words.index("-m") + 1 :]
    return f"bench {rest[0]}" if name == "bench" else name


@pytest.mark.parametrize("name", OLD)
def test_every_old_file_and_its_command_have_a_row(name):
    old_files = [file for old, _ in rows("Files") for file in re.findall("`([^`]+)`", old)]
    assert f"{name}.py" in old_files
    assert any(f" {name}.py" in command for command in COMMANDS), f"no old command with {name}.py"


def test_every_new_place_exists():
    for old, new in rows("Files"):
        places = [old.strip("`")] if new == "the same place" else re.findall("`([^`]+)`", new)
        assert places and all((ROOT / place).exists() for place in places), (old, new)


@pytest.mark.parametrize("old", COMMANDS)
def test_every_new_command_is_a_program(old):
    """test_program.py runs each of its PROGRAMS with --help."""
    new = old if COMMANDS[old].startswith("the same") else COMMANDS[old]
    assert module_of(new) in PROGRAMS


def test_what_stays_in_the_root_is_called_as_before():
    for old, new in COMMANDS.items():
        moved = any(words in old for words in ("--check", "--convention", "bench"))
        is_there = (ROOT / module_of(old)).exists()
        assert new.startswith("the same") == (is_there and not moved), (old, new)
