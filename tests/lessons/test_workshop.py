"""The workshop: every answer, right and wrong, and every lesson, run as a reader runs it."""

from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT
from wrong_answers import WRONG

from lessons import answers, pictures, scaling_runs, workshop
from program import UserError

LESSONS = workshop.lesson_paths()
RIGHT = [workshop.HERE / "solutions" / path.name for path in LESSONS]
RIGHT += sorted((Path(__file__).parent / "answers").glob("*_right.py"))
by_name = {"ids": lambda path: path.stem}


@pytest.fixture(autouse=True)
def runs(tmp_path, monkeypatch) -> Path:
    """The folder of the reader's own runs, empty: not that of whoever runs these tests."""
    folder = tmp_path / "runs"
    folder.mkdir()
    monkeypatch.setattr(pictures, "FOLDER", folder)
    monkeypatch.setattr(scaling_runs, "FOLDER", folder)
    monkeypatch.setattr(scaling_runs, "GRID", folder / "8-grid.jsonl")
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # an answer sets it
    return folder


@pytest.fixture(scope="module")
def answer_ranks():
    """{number of ranks: the ranks on which the answers of these tests run, one after another}."""
    running = {}
    yield running
    for pool in running.values():
        pool.stop()


@pytest.fixture
def load(answer_ranks):
    """The answer in a file: load(path)."""

    def loaded(path):
        answer = answers.Answer(path)
        answer.pools = answer_ranks
        return answer

    return loaded


@pytest.fixture
def check(load, tmp_path):
    """(result, message) of a part for an answer with this text: check("6", "damage", text)."""

    def judged(number: str, part: str, text: str) -> tuple[str, str]:
        answer = tmp_path / workshop.lesson(number).name
        answer.write_text(text)
        return answers.judged(getattr(checker(number), f"check_{part}"), load(answer))

    return judged


def solution(number: str) -> str:
    return (workshop.HERE / "solutions" / workshop.lesson(number).name).read_text()


def checker(number: str):
    return workshop.load(workshop.HERE / "checkers" / workshop.lesson(number).name)


@pytest.fixture
def lessons(forks):
    """`lessons(*words)` is what `python -m lessons` prints, and its exit status."""

    def call(*words):
        status, out, err = forks(["-m", "lessons", *words], ROOT)
        return status, out + err

    return call


# --- The exercises


CASES = [(number, *case) for number, cases in WRONG.items() for case in cases]


@pytest.mark.parametrize(
    "number, part, words, old, new", CASES, ids=[f"{case[0]}-{case[1]}" for case in CASES]
)
def test_a_wrong_answer_is_told_what_is_wrong(
    check, lessons, tmp_path, number, part, words, old, new
):
    assert old in solution(number)
    text = solution(number).replace(old, new)
    if part == "kernel":  # Triton must be imported for its interpreter: in a process of its own
        (tmp_path / "answer.py").write_text(text)
        _, printed = lessons("check", number, f"--file={tmp_path}/answer.py")
        assert "wrong" in printed and words in " ".join(printed.split()) or "skipped" in printed
        return
    result, message = check(number, part, text)
    assert result == "wrong" and words in message, message


def test_each_part_has_a_wrong_answer():
    for path in LESSONS:
        number = path.name[0]
        parts = {function.__name__ for _, function in answers.parts(checker(number))}
        assert parts == {f"check_{part}" for part, *_ in WRONG[number]}


@pytest.mark.slow
@pytest.mark.parametrize("answer", RIGHT, **by_name)
def test_a_right_answer_is_accepted(answer, load, lessons):
    number = answer.name[0]
    if number == "4":  # see above: in a process of its own
        status, printed = lessons("check", "4", f"--file={answer}")
        assert status == 0 and "wrong" not in printed, printed
        return
    given = load(answer)
    found = [answers.judged(part, given) for _, part in answers.parts(checker(number))]
    assert {result for result, _ in found} == {"right"}, found


@pytest.mark.parametrize("path", LESSONS, **by_name)
def test_a_stub_is_not_written_yet(path, load, tmp_path):
    file = tmp_path / path.name
    file.write_text(workshop.stub(path))
    stub = load(file)
    parts = answers.parts(checker(path.name[0]))
    found = {answers.judged(part, stub)[0] for _, part in parts}
    assert "not written yet" in found and found <= {"not written yet", "skipped"}


def test_an_answer_is_compared_with_the_readers_own_run(runs, check):
    (runs / "0-high").mkdir()
    (runs / "0-high" / "metrics.jsonl").write_text('{"step": 60, "val_loss": 20.0}\n')
    result, message = check("0", "losses", solution("0"))
    assert result == "wrong" and "0-high ended" in message
    (runs / "0-high" / "metrics.jsonl").unlink()
    result, _ = check("0", "losses", solution("0").replace("33.6", "float('nan')"))
    assert result == "right"  # a run that diverged may end so


def test_runs_on_other_data_are_not_the_grid(monkeypatch):
    """Another version of Python has another standard library."""
    stored, *_ = scaling_runs.read(scaling_runs.STORED)
    cells = [*scaling_runs.grid(), scaling_runs.Cell(scaling_runs.HELD_OUT, 64)]
    for cell in cells:
        own = {"key": cell.key, "budget": cell.budget, "data": "old"}
        own |= {"made_with": f"torch, {scaling_runs.PYTHON}"}
        scaling_runs.add(stored | own)
    grid, held_out, whose = checker("8").find_runs()
    assert (len(grid), len(held_out), whose) == (len(cells) - 1, 1, "your own runs")

    monkeypatch.setattr(scaling_runs, "PYTHON", "Python 4.0")
    grid, _, whose = checker("8").find_runs()
    assert "stored" in whose and {row["data"] for row in grid} == {stored["data"]}


# --- What an answer may do wrong


ODD = """
import os, time
import torch
import torch.distributed as dist

def double(x): return 2 * x
def wait(): time.sleep(1000)
def later(): raise NotImplementedError("write it")
def change(x): x += 1
def add_up(x):
    dist.all_reduce(x)
    return x, dist.get_rank()
def fail_on_one_rank(x):
    if dist.get_rank() == 1: x / "one"
    dist.all_reduce(x)
def save(path, text):
    with open(path + ".new", "w") as f:
        f.write(text)
    os.replace(path + ".new", path)
def save_in_place(path, text):
    with open(path, "w") as f:
        f.write(text)
fsync_by_another_name = os.fsync
def save_for_good(path, text):
    with open(path, "w") as f:
        f.write(text)
        f.flush()
        fsync_by_another_name(f)
    folder = os.open(os.path.dirname(path), os.O_RDONLY)
    os.fsync(folder)
"""


@pytest.fixture
def odd(tmp_path, load):
    path = tmp_path / "answer.py"
    path.write_text(ODD)
    return load(path)


def test_results_come_back(odd):
    assert torch.equal(odd.call("double", torch.ones(2)), torch.full((2,), 2.0))
    assert odd.call("double", x=2) == 4
    given = torch.ones(1)
    odd.call("change", given)
    assert given == 1


def test_a_rank_that_fails_is_told_at_once(odd):
    with pytest.raises(AssertionError, match="on 2 ranks, fail_on_one_rank.*line .*TypeError"):
        odd.call_on_ranks(2, "fail_on_one_rank", torch.ones(1))
    results = odd.call_on_ranks(2, "add_up", torch.ones(1))  # on new ranks
    assert results == [(torch.tensor([2.0]), 0), (torch.tensor([2.0]), 1)]


def test_what_does_not_end_is_stopped(odd, monkeypatch):
    monkeypatch.setattr(answers, "SECONDS", 0.2)
    with pytest.raises(AssertionError, match=r"wait\(\): line 7: .* 0.2 s. Does it end"):
        odd.call("wait")
    monkeypatch.setattr(answers, "STARTING", 0.2)
    odd.pools = {}
    with pytest.raises(AssertionError, match="in 0.2 s. Does it end"):
        odd.call_on_ranks(2, "add_up", torch.ones(1))
    with pytest.raises(answers.Skipped, match="did not end, see above"):
        odd.call_on_ranks(2, "add_up", torch.ones(1))


def test_what_is_not_written_is_no_error(odd):
    with pytest.raises(answers.ToDo, match="write it"):
        odd.call("later")
    with pytest.raises(answers.ToDo, match="write it"):
        odd.kill("later", at=0)


@pytest.mark.parametrize(
    "text, words",
    [
        ("x = 1\n\ndef f(:\n", "line 3: invalid syntax"),
        ("x = 1\ny = x / 0\n", "line 2: ZeroDivisionError: division by zero"),
    ],
)
def test_a_file_that_cannot_be_loaded_is_told_once(text, words, tmp_path):
    path = tmp_path / "answer.py"
    path.write_text(text)
    ((_, result, message),) = workshop.check(workshop.lesson("1"), path)
    assert result == "wrong" and f"{path}: {words}" in message


def test_changes_of_files_have_names(odd, tmp_path):
    def names(function):
        return odd.kill(function, str(tmp_path / "file"), "the new text", at=None)

    assert names("save_in_place") == ["open", "write", "close"]
    assert names("save") == ["open", "write", "close", "rename"]
    assert names("save_for_good") == "open,write,flush,fsync file,close,fsync folder".split(",")


@pytest.mark.parametrize("function, may_tear", [("save", False), ("save_in_place", True)])
def test_kills(odd, tmp_path, function, may_tear):
    """In place there is a moment with a part of the new text; with a rename there is none."""
    path = tmp_path / "file"
    n_changes = len(odd.kill(function, str(path), "the new text", at=None))
    seen = set()
    for at in range(n_changes):
        path.write_text("old")
        assert odd.kill(function, str(path), "the new text", at=at)
        seen.add(path.read_text())
    torn = {text for text in seen - {"", "the new text"} if "the new text".startswith(text)}
    assert "old" in seen and bool(torn) == may_tear
    assert not odd.kill(function, str(path), "the new text", at=n_changes)


@pytest.mark.parametrize(
    "got, expected, words",
    [
        (None, 1.0, "expected a number, got None"),
        (float("nan"), 1.0, "1 of 1 numbers are NaN"),
        (torch.ones(2), torch.ones(3), "expected a tensor float32 (3,), got a tensor float32 (2,)"),
        ([1.0], torch.ones(1), "expected a tensor float32 (1,), got [1.0]"),
        (np.array([1, 2.0]), np.array([1, 3.0]), "expected 3 at [1], but got 2"),
    ],
)
def test_comparisons_say_what_was_expected_and_what_came(got, expected, words):
    with pytest.raises(AssertionError) as error:
        answers.close("f", got, expected, 1e-6)
    assert words in str(error.value)


def test_what_no_checker_expects_is_wrong_too():
    def part(given):
        if given is None:
            raise UserError("8-grid.jsonl is damaged")
        return {given: 1}

    result, message = answers.judged(part, [2e-1])
    assert result == "wrong" and "TypeError: unhashable type: 'list'" in message
    with pytest.raises(UserError):
        answers.judged(part, None)


# --- The lessons


@pytest.mark.slow
@pytest.mark.parametrize("path", LESSONS, **by_name)
def test_a_short_lesson_runs_to_its_end(path, lessons):
    """Each lesson states its claims as assertions."""
    status, printed = lessons(path.name[0], "--short")
    assert status == 0, printed[-4000:]
    assert "# Lesson" in printed and "[picture: runs/lessons/" in printed


@pytest.mark.long
@pytest.mark.parametrize("path", LESSONS, **by_name)
def test_a_whole_lesson_runs_after_a_short_one(path, lessons):
    """Whatever the short one left in runs/lessons/."""
    for flags in (["--short"], []):
        status, printed = lessons(path.name[0], *flags)
        assert status == 0, printed[-4000:]


@pytest.mark.parametrize("path", LESSONS, **by_name)
def test_a_lesson_has_an_exercise_questions_answers_and_papers(path):
    text = "\n".join(workshop.cells(path.read_text()))
    assert f"python -m lessons check {path.name[0]}" in text
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


def test_the_list_names_every_lesson_and_the_next(tmp_path, monkeypatch):
    monkeypatch.setattr(workshop, "MINE", tmp_path)
    for path in LESSONS:
        number = path.name[0]
        title = workshop.cells(path.read_text())[0].splitlines()[0].removeprefix("# Lesson ")
        listing = workshop.listing()
        words = f"next: python -m lessons {number}, then python -m lessons check {number}"
        assert title in listing and listing.splitlines()[-1] == words
        workshop.remember(path.stem)
    assert "next:" not in workshop.listing()


@pytest.mark.parametrize("words", [["99"], ["check"], ["check", "99"], ["1", "--fast"], ["one"]])
def test_what_cannot_be_done_is_one_line(words):
    with pytest.raises(UserError, match="python -m lessons"):
        workshop.main(words)


def test_a_check_makes_a_stub_and_remembers_what_is_solved(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(workshop, "MINE", tmp_path / "mine")
    lesson = workshop.lesson("1")
    answer = workshop.answer_path(lesson, [])
    assert answer.read_text() == workshop.stub(lesson)
    with pytest.raises(SystemExit) as leaving:
        workshop.check_and_report(lesson, answer, "check 1 '--file=my answer.py'")
    assert leaving.value.code == 1
    assert "python -m lessons check 1 '--file=my answer.py' checks" in capsys.readouterr().out
    assert workshop.done() == {}

    answer.write_text(solution("1"))
    assert workshop.answer_path(lesson, []) == answer  # it is not overwritten
    workshop.check_and_report(lesson, answer, "check 1")
    assert "Lesson 1 is solved" in capsys.readouterr().out
    assert workshop.done() == {lesson.stem: True}
    assert "done  1." in workshop.listing()
