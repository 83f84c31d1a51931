"""The workshop: every answer, right and wrong, and every lesson, run as a reader runs it."""

import ast
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch
from conftest import ROOT, clean_environment

from lessons import answers, workshop

LESSONS = workshop.lesson_paths()
ANSWERS = Path(__file__).parent / "answers"
WRONG = sorted(ANSWERS.glob("*_wrong_*.py"))
SLOW = ("4", "5")  # the last of each lesson's five
EACH_WRONG = [pytest.param(p, marks=[pytest.mark.slow] * (p.stem[-1] in SLOW)) for p in WRONG]
RIGHT = [workshop.HERE / "solutions" / path.name for path in LESSONS]
RIGHT += sorted(ANSWERS.glob("*_right.py"))
by_name = {"ids": lambda path: path.stem}


def of(answer: Path) -> Path:
    """The lesson of an answer."""
    return workshop.lesson(answer.name[0])


def lessons(*words, cwd=ROOT):
    """`python -m lessons`, as typed."""
    command = [sys.executable, "-m", "lessons", *words]
    return subprocess.run(
        command, cwd=cwd, env=clean_environment(), capture_output=True, text=True, timeout=1200
    )


# --- The exercises


@pytest.mark.parametrize("answer", EACH_WRONG, **by_name)
def test_a_wrong_answer_is_told_what_is_wrong(answer):
    found = list(workshop.check(of(answer), answer))
    messages = [message for _, result, message in found if result == "wrong"]
    assert messages, found
    assert all(len(message) > 20 for message in messages)


@pytest.mark.slow
@pytest.mark.parametrize("answer", RIGHT, **by_name)
def test_a_right_answer_is_accepted(answer):
    found = list(workshop.check(of(answer), answer))
    assert {result for _, result, _ in found} <= {"right", "skipped"}, found
    assert "right" in {result for _, result, _ in found}


@pytest.mark.parametrize("path", LESSONS, **by_name)
def test_a_stub_is_not_written_yet(path):
    """And nothing in it is right already, but what needs no answer."""
    found = list(workshop.check(path, workshop.HERE / "exercises" / path.name))
    assert "not written yet" in {result for _, result, _ in found}, found
    assert "wrong" not in {result for _, result, _ in found}, found


def test_each_lesson_has_all_its_files():
    assert [path.name[0] for path in LESSONS] == [str(n) for n in range(len(LESSONS))]
    for path in LESSONS:
        for folder in ("exercises", "checkers", "solutions"):
            assert (workshop.HERE / folder / path.name).exists()
        number = path.name[0]
        assert len([answer for answer in WRONG if answer.name[0] == number]) >= 5
        assert (ANSWERS / f"{number}_right.py").exists()


# --- The lessons


def run_to_its_end(path, *flags):
    """Each lesson states its claims as assertions."""
    done = lessons(path.name[0], *flags)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "# Lesson" in done.stdout and "[picture: runs/lessons/" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("path", LESSONS, **by_name)
def test_a_short_lesson_runs_to_its_end(path):
    run_to_its_end(path, "--short")


@pytest.mark.long
@pytest.mark.parametrize("path", LESSONS, **by_name)
def test_a_whole_lesson_runs_after_a_short_one(path):
    """Whatever the short one left in runs/lessons/."""
    run_to_its_end(path, "--short")
    run_to_its_end(path)


@pytest.mark.parametrize("path", LESSONS, **by_name)
def test_a_lesson_has_an_exercise_questions_answers_and_papers(path):
    text = "\n".join(workshop.cells(path))
    assert f"python -m lessons check {path.name[0]}" in text
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    assert f"`python -m lessons {path.name[0]}` runs it" in docstring
    for heading in ("# Lesson", "## The exercise", "## Three questions", "## What to read next"):
        assert heading in text
    assert "## Answers" in workshop.answers_of(path)


def test_the_words_of_a_lesson_stand_between_what_its_code_prints(tmp_path, capsys):
    lesson = tmp_path / "1_small.py"
    lesson.write_text(
        "# %% [markdown]\n# # Lesson 1. Small\n#\n# words\n\n# %%\nx = 1\nprint('code', x)\n\n"
        "# %% [markdown]\n# last words\n\n# Scroll on for the answers.\n\n"
        "# %% [markdown]\n# ## Answers\n# 42\n"
    )
    workshop.run(lesson, short=False)
    assert capsys.readouterr().out.split() == "# Lesson 1. Small words code 1 last words".split()
    assert workshop.answers_of(lesson) == "## Answers\n42"


def test_the_list_names_every_lesson_and_the_next():
    printed = lessons().stdout
    for path in LESSONS:
        assert workshop.cells(path)[0].splitlines()[0].removeprefix("# Lesson ") in printed


@pytest.mark.parametrize("words", [["99"], ["check"], ["check", "99"], ["1", "--fast"], ["one"]])
def test_what_cannot_be_done_is_one_line(words):
    done = lessons(*words)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1 and "python -m lessons" in done.stderr


def test_a_check_makes_a_stub_and_remembers_what_is_solved(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(workshop, "MINE", tmp_path / "mine")
    lesson = workshop.lesson("1")
    answer = workshop.answer_path(lesson, [])
    stub = workshop.HERE / "exercises" / lesson.name
    assert answer.read_text() == stub.read_text()
    with pytest.raises(SystemExit) as leaving:
        workshop.check_and_report(lesson, answer)
    assert leaving.value.code == 1
    assert workshop.done() == {}

    answer.write_text((workshop.HERE / "solutions" / lesson.name).read_text())
    assert workshop.answer_path(lesson, []) == answer  # it is not overwritten
    workshop.check_and_report(lesson, answer)
    assert "Lesson 1 is solved" in capsys.readouterr().out
    assert workshop.done() == {lesson.stem: True}
    assert "done  1." in workshop.listing()


# --- What an answer may do


ODD = """
import json
import os
import time
import torch
import torch.distributed as dist

SIZE = 3

def double(x): return 2 * x
def crash(x): return x / 0
def loop():
    while True: pass
def use_the_project():
    import model
def find_the_project(root):
    import sys
    sys.path.insert(0, root)
    import attention
def load_from_the_project(root):
    import importlib.util
    spec = importlib.util.spec_from_file_location("mine", root + "/loss.py")
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
def later(): raise NotImplementedError("write it")
def leave(): os._exit(3)
def strange(): return lambda: 0
def graph(): return torch.ones(2, requires_grad=True) * 2
def half_a_megabyte():
    first = torch.zeros(2**16)
    second = first + 1
    del first
    return torch.cat([second, second]).sum()
def add_up(x):
    dist.all_reduce(x)
    return x, dist.get_rank()
def leave_one_rank(x):
    if dist.get_rank() == 1: os._exit(1)
    dist.all_reduce(x)
def save(path, text):
    with open(path + ".new", "w") as f:
        f.write(text)
    os.replace(path + ".new", path)
def save_for_good(path, text):
    with open(path, "w") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())
    folder = os.open(os.path.dirname(path), os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)
def save_in_place(path, text):
    with open(path, "w") as f:
        f.write(text)
"""


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    path = tmp_path_factory.mktemp("odd") / "answer.py"
    path.write_text(ODD)
    with answers.Answer(path) as answer:
        yield answer


def test_results_come_back(odd):
    assert odd.value("SIZE") == 3
    assert torch.equal(odd.call("double", torch.ones(2)), torch.full((2,), 2.0))
    assert odd.call("double", x=2) == 4
    assert not odd.call("graph").requires_grad


@pytest.mark.parametrize(
    "call, words",
    [
        (("crash", 1), ["crash(1)", "ZeroDivisionError", "def crash(x): return x / 0"]),
        (("missing",), ["the answer has no missing"]),
        (("leave",), ["ended the process", "3"]),
        (("strange",), ["cannot be sent back"]),
        (("use_the_project",), ["cannot use the project's model.py"]),
        (("find_the_project", str(ROOT)), ["cannot use the project's attention.py"]),
        (("load_from_the_project", str(ROOT)), ["cannot use the project's loss.py"]),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_what_goes_wrong_is_told(odd, call, words):
    with pytest.raises(answers.Wrong) as error:
        odd.call(*call)
    for word in words:
        assert word in str(error.value)


def test_an_endless_loop_is_ended(odd):
    with pytest.raises(answers.Wrong, match="was still computing after 1 s of the processor"):
        odd.call("loop", seconds=1)
    assert odd.call("double", 1) == 2  # in a new process


def test_what_is_not_written_is_no_error(odd):
    with pytest.raises(answers.ToDo, match="write it"):
        odd.call("later")


def test_the_peak_of_memory(odd):
    """Two tensors of 256 KiB, then one of 512 KiB beside the second."""
    _, peak = odd.measure("half_a_megabyte")
    assert peak == pytest.approx(3 * 2**18, abs=1000)


def test_ranks(odd):
    results = odd.call_on_ranks(2, "add_up", answers.PerRank([torch.ones(1), torch.ones(1)]))
    assert results == [(torch.tensor([2.0]), 0), (torch.tensor([2.0]), 1)]
    with pytest.raises(answers.Wrong, match="on rank 1 of 2 ended the process"):
        odd.call_on_ranks(2, "leave_one_rank", torch.ones(1))
    assert odd.call_on_ranks(2, "add_up", torch.ones(1))[0][0] == 2  # on new ranks


def test_changes_of_files_have_names(odd, tmp_path):
    def names(function):
        return odd.call_until_killed(function, str(tmp_path / "file"), "the new text", at=None)

    assert names("save_in_place") == ["open", "write", "close"]
    assert names("save") == ["open", "write", "close", "rename"]
    assert names("save_for_good") == "open,write,flush,fsync file,close,fsync folder".split(",")


def test_kills(odd, tmp_path):
    """In place there is a moment with a part of the new text; with a rename there is none."""
    for function, may_tear in (("save", False), ("save_in_place", True)):
        path = tmp_path / function
        n_changes = len(odd.call_until_killed(function, str(path), "the new text", at=None))
        assert path.read_text() == "the new text"
        seen = set()
        for at in range(n_changes):
            path.write_text("old")
            assert odd.call_until_killed(function, str(path), "the new text", at=at)
            seen.add(path.read_text())
        assert {"old"} <= seen and bool(seen - {"old", "the new text"}) == may_tear
        assert not odd.call_until_killed(function, str(path), "the new text", at=n_changes)


@pytest.mark.parametrize(
    "got, expected, words",
    [
        (None, 1.0, "expected a number, but got None"),
        (2.0, 1.0, "expected 1, but got 2"),
        (float("nan"), 1.0, "1 values are NaN"),
        (torch.ones(2), torch.ones(3), "expected float32 (3,), got float32 (2,)"),
        (torch.ones(2).double(), torch.ones(2), "got float64 (2,)"),
        ([1.0], torch.ones(1), "expected a Tensor, got [1.0]"),
        (numpy.array([1, 2.0]), numpy.array([1, 3.0]), "expected 3 at [1], but got 2"),
    ],
)
def test_comparisons_say_what_was_expected_and_what_came(got, expected, words):
    with pytest.raises(answers.Wrong) as error:
        answers.close("f", got, expected, 1e-6)
    assert words in str(error.value)


def test_equal_values_are_close():
    answers.close("f", torch.tensor([1.0, -torch.inf]), torch.tensor([1.0, -torch.inf]), 0)
    answers.equal("f", numpy.int64(3), 3)
    with pytest.raises(answers.Wrong, match="expected 3, for n = 1, but got 4"):
        answers.equal("f", 4, 3, "n = 1")
