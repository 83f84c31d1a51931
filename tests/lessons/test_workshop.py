"""The workshop: every answer, right and wrong, and every lesson, run as a reader runs it."""

import ast
import io
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch
from conftest import ROOT, clean_environment

from config import UserError
from lessons import answering, answers, pictures, scaling_runs, workshop

LESSONS = workshop.lesson_paths()
ANSWERS = Path(__file__).parent / "answers"
WRONG = sorted(ANSWERS.glob("*_wrong_*.py"))
RIGHT = [workshop.HERE / "solutions" / path.name for path in LESSONS]
RIGHT += sorted(ANSWERS.glob("*_right.py"))
by_name = {"ids": lambda path: path.stem}


@pytest.fixture(autouse=True)
def runs(tmp_path, monkeypatch) -> Path:
    """The folder of the reader's own runs, empty: not that of whoever runs these tests."""
    folder = tmp_path / "runs"
    folder.mkdir()
    monkeypatch.setattr(pictures, "FOLDER", folder)
    monkeypatch.setattr(scaling_runs, "FOLDER", folder)
    monkeypatch.setattr(scaling_runs, "GRID", folder / "8-grid.jsonl")
    return folder


def of(answer: Path) -> Path:
    """The lesson of an answer."""
    return workshop.lesson(answer.name[0])


def solution(number: str) -> str:
    """The text of a lesson's solution."""
    return (workshop.HERE / "solutions" / workshop.lesson(number).name).read_text()


def checker(number: str):
    """The checker of a lesson."""
    return workshop.load(workshop.HERE / "checkers" / workshop.lesson(number).name)


def verdicts(answer: Path, names: list[str]) -> list[tuple[str, str]]:
    """[(result, message)] of the parts of these names."""
    module = checker(of(answer).name[0])
    with answers.Answer(answer) as given:
        return [workshop.judged(getattr(module, name), given) for name in names]


def verdict(number: str, part: str, text: str, tmp_path) -> tuple[str, str]:
    """(result, message) of one part of a lesson's exercise for an answer with this text."""
    answer = tmp_path / workshop.lesson(number).name
    answer.write_text(text)
    ((result, message),) = verdicts(answer, [part])
    return result, message


def refused_by(answer: Path) -> list[str]:
    """The parts that must refuse a wrong answer, as its docstring names them."""
    docstring = ast.get_docstring(ast.parse(answer.read_text()))
    return re.findall(r"check_\w+", docstring.split("Refused by ")[1])


def lessons(*words, cwd=ROOT):
    """`python -m lessons`, as typed."""
    command = [sys.executable, "-m", "lessons", *words]
    return subprocess.run(
        command, cwd=cwd, env=clean_environment(), capture_output=True, text=True, timeout=1200
    )


# --- The exercises


@pytest.mark.parametrize("answer", WRONG, **by_name)
def test_a_wrong_answer_is_told_what_is_wrong(answer):
    for name, (result, message) in zip(
        refused_by(answer), verdicts(answer, refused_by(answer)), strict=True
    ):
        assert result == "wrong" and len(message) > 20, (name, result, message)


@pytest.mark.slow
@pytest.mark.parametrize("answer", WRONG, **by_name)
def test_a_wrong_answer_is_refused_by_no_other_part(answer):
    parts = answers.parts(checker(of(answer).name[0]))
    names = [function.__name__ for _, function in parts]
    found = dict(zip(names, verdicts(answer, names), strict=True))
    refused = [name for name, (result, _) in found.items() if result == "wrong"]
    assert refused == refused_by(answer), found


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


# --- What a checker says of odd answers


LOSSES = "def losses(path): return [9.25]"
BUGS = "BUGS = {letter: ['mean of means'] for letter in 'ABCDE'}"
ARRAYS = """
import numpy
load_lists = load
def load(folder):
    found = load_lists(folder)
    return found and (found[0], {name: numpy.array(x) for name, x in found[1].items()})
"""


@pytest.mark.parametrize(
    "number, part, text, words",
    [
        ("0", "check_losses_of_a_file", LOSSES, "a list of pairs (step, loss) for a file with one"),
        ("0", "check_prediction", "DIVERGES = [2e-1]", "DIVERGES is [0.2]: it should be a number"),
        ("2", "check_bugs", BUGS, "A is ['mean of means'], but expected one of"),
        ("6", "check_undisturbed", solution("6") + ARRAYS, "list of floats for 'weights', but got"),
    ],
)
def test_a_value_of_another_type_is_wrong(number, part, text, words, tmp_path):
    result, message = verdict(number, part, text, tmp_path)
    assert result == "wrong" and words in message


def test_what_no_checker_expects_is_wrong_too():
    def part(given):
        """A part"""
        if given is None:
            raise UserError("8-grid.jsonl is damaged")
        return {given: 1}

    result, message = workshop.judged(part, [2e-1])
    assert result == "wrong"
    assert message == "what came could not be compared: TypeError: unhashable type: 'list'"
    with pytest.raises(UserError):
        workshop.judged(part, None)


@pytest.mark.parametrize(
    "name, constant", [("palm_540b", 0.462), ("mpt_1b", 0.5986), ("gpt_175b", 0.514)]
)
def test_a_published_share_is_computed(name, constant, tmp_path):
    """A constant is refused, and no message says which share is right."""
    part = f"check_{name.split('_')[0]}"
    result, message = verdict(
        "5", part, f"{solution('5')}\ndef {name}(x=1): return {constant}", tmp_path
    )
    assert result == "wrong" and "compute it from the argument" in message
    for wrong in (100 * constant, constant / 2, 2.5):
        text = f"{solution('5')}\ndef {name}(x=1): return {wrong}"
        result, message = verdict("5", part, text, tmp_path)
        assert result == "wrong"
        assert not {f"{constant:.3f}", f"{constant:.4g}", f"{constant:.1%}"} & set(message.split())


FSYNC = "os.fsync(file.fileno())"


@pytest.mark.parametrize(
    "old, new, result",
    [
        (FSYNC, "F(file.fileno())", "right"),
        (FSYNC, "fsync(file.fileno())", "right"),
        (FSYNC, "os.sync()", "right"),
        (FSYNC, "pass", "wrong"),  # O_SYNC and fsync are named, and never used
    ],
)
def test_what_waits_for_the_disk_is_observed(old, new, result, tmp_path):
    assert old in solution("6")
    names = "from os import O_SYNC, fsync\nF = os.fsync\nimport os"
    text = solution("6").replace(old, new).replace("import os", f"import os\n{names}", 1)
    assert verdict("6", "check_power_failure", text, tmp_path)[0] == result


CALL = (
    "    kernel[(1,)](q, k, v, out, k.shape[0], q.shape[1] ** -0.5, slope, **sizes)\n    return out"
)
PLAIN = """
    i, j = torch.arange(len(k))[-len(q) :, None], torch.arange(len(k))
    scores = q @ k.T * q.shape[1] ** -0.5 - slope * (i - j)
    return torch.softmax(scores.masked_fill(j > i, -float("inf")), -1) @ v
"""
BY_RUN = CALL.replace("[(1,)](q", ".run(q").replace("**sizes", "**sizes, grid=(1,), warmup=False")
IN_FP32 = CALL.replace("v, out", "v, wide").replace("return out", "return wide.to(q.dtype)")


@pytest.mark.parametrize(
    "new, words",
    [
        (BY_RUN, ""),
        (f"    wide = q.float()\n{IN_FP32}", ""),
        (CALL.replace("    return out", PLAIN), "stay so when all that the kernel has written"),
        (PLAIN, "no launch of a Triton kernel wrote anything"),
    ],
    ids=["run", "in fp32", "unused", "none"],
)
def test_a_result_comes_from_the_kernel_however_it_is_launched(new, words, tmp_path):
    module = checker("4")
    try:
        module.skip_without_interpreter()
    except answers.Skipped as error:
        pytest.skip(str(error))
    assert solution("4").count(CALL) == 1
    (tmp_path / "answer.py").write_text(solution("4").replace(CALL, new))
    with answers.Answer(tmp_path / "answer.py") as given:
        result, message = workshop.judged(module.need_kernel, given)
    assert (result == "wrong") == bool(words) and words in message, message


def test_numbers_of_numpy_are_numbers(tmp_path):
    predicted = "\nPREDICTION = {name: np.float32(x) for name, x in PREDICTION.items()}\n"
    text = solution("8") + predicted + "PREDICTION['n_params'] = np.int64(156_000)\n"
    assert verdict("8", "check_prediction", text, tmp_path) == ("right", "")
    text = solution("0") + "\nimport numpy\nDIVERGES = numpy.float64(2e-1)\n"
    assert verdict("0", "check_prediction", text, tmp_path) == ("right", "")


def test_an_answer_is_compared_with_the_run_in_its_place_alone(runs, tmp_path):
    """A stale run elsewhere, such as in the folder of whoever runs these tests, does no harm."""
    assert not runs.is_relative_to(ROOT)
    assert verdict("0", "check_losses", solution("0"), tmp_path) == ("right", "")
    (runs / "0-high").mkdir()
    (runs / "0-high" / "metrics.jsonl").write_text('{"step": 60, "val_loss": 20.0}\n')
    result, message = verdict("0", "check_losses", solution("0"), tmp_path)
    assert result == "wrong" and "0-high ended at 20.00" in message


def test_runs_on_other_data_are_not_the_grid(runs):
    """Another version of Python has another standard library."""
    module = checker("8")
    stored, *_ = scaling_runs.read(scaling_runs.STORED)
    cells = [*scaling_runs.grid(), scaling_runs.Cell(scaling_runs.HELD_OUT, 64)]
    for cell in cells:
        own = {"key": cell.key, "budget": cell.budget, "d_model": cell.d_model, "data": "old"}
        scaling_runs.add(scaling_runs.GRID, stored | own)
    grid, held_out, missing = module.find_runs()
    assert (len(grid), len(held_out), missing) == (len(cells) - 1, 1, "")

    (runs / "8-data").mkdir()
    (runs / "8-data" / "dataset.json").write_text('{"fingerprint": "new"}')
    grid, _, missing = module.find_runs()
    assert missing == "whole grid" and {row["data"] for row in grid} == {stored["data"]}


@pytest.mark.slow
@pytest.mark.parametrize("answer", [path for path in RIGHT if path.name[0] == "7"], **by_name)
def test_the_files_of_peft_itself_are_read(answer, tmp_path):
    """Written by the package `peft`, not by this project. Merged, they give its outputs."""
    peft = pytest.importorskip("peft", reason="see requirements-dev.txt")
    model = torch.nn.ModuleDict({"0": torch.nn.ModuleDict({"up": torch.nn.Linear(6, 5)})})
    layer = model["0"]["up"]
    W, bias = layer.weight.detach().clone(), layer.bias.detach()
    chosen = peft.LoraConfig(r=4, lora_alpha=8, use_rslora=True, target_modules=["up"])
    wrapped = peft.get_peft_model(model, chosen)
    pair = wrapped.get_submodule("base_model.model.0.up")
    torch.nn.init.normal_(pair.lora_B["default"].weight)
    wrapped.save_pretrained(tmp_path / "adapter")

    x = torch.randn(3, 6)
    with answers.Answer(answer) as given:
        read = given.call("read_adapter", str(tmp_path / "adapter"))
        assert list(read) == ["0.up"]
        A, B, scale = read["0.up"]
        y = given.call("forward", x, W, bias, A, B, scale)
        merged = given.call("merge", W, A, B, scale)
    assert torch.equal(A, pair.lora_A["default"].weight) and scale == 4
    assert torch.equal(B, pair.lora_B["default"].weight)
    with torch.no_grad():
        theirs = pair(x)
    assert (theirs - torch.nn.functional.linear(x, W, bias)).abs().max() > 0.1
    torch.testing.assert_close(y, theirs)
    torch.testing.assert_close(torch.nn.functional.linear(x, merged, bias), theirs)


# --- Answers that cannot be loaded, or are slow


def test_a_syntax_error_is_told_once(tmp_path):
    path = tmp_path / "answer.py"
    path.write_text("x = 1\n\ndef f(:\n")
    with answers.Answer(path) as answer:
        with pytest.raises(answers.Wrong, match=re.escape(f"{path}, line 3: invalid syntax")):
            answer.call("f")
        with pytest.raises(answers.Skipped, match="cannot be loaded, see above"):
            answer.call_on_ranks(2, "f")


def test_an_error_at_import_is_told_once(tmp_path):
    path = tmp_path / "answer.py"
    path.write_text("x = 1\ny = x / 0\n")
    with answers.Answer(path) as answer:
        with pytest.raises(answers.Wrong) as error:
            answer.call_on_ranks(2, "f")
        assert str(error.value) == f"{path}, line 2: ZeroDivisionError: division by zero"
        with pytest.raises(answers.Skipped, match="cannot be loaded, see above"):
            answer.value("x")


def test_waiting_for_ever_is_told_once_while_loading_and_twice_later(tmp_path, monkeypatch):
    path = tmp_path / "answer.py"
    path.write_text("import time\ndef wait(): time.sleep(1000)\ndef three(): return 3\n")
    monkeypatch.setattr(answers, "PATIENCE", 0.2)
    with answers.Answer(path) as answer:
        assert answer.call("three") == 3
        for _ in range(2):
            assert not answer.not_run
            with pytest.raises(answers.Wrong, match=r"wait\(\) did not return in 1 s"):
                answer.call("wait", seconds=0.1)
        with pytest.raises(answers.Skipped, match="two calls took too long"):
            answer.call("three")

    path.write_text("import time\ntime.sleep(1000)\n")
    monkeypatch.setattr(answers, "STARTING", 0.2)
    monkeypatch.setattr(answers, "SECONDS", 0.1)
    with answers.Answer(path) as answer:
        with pytest.raises(answers.Wrong, match="answer.py did not return in 1 s"):
            answer.call("three")
        with pytest.raises(answers.Skipped, match="cannot be loaded"):
            answer.call("three")


def test_an_old_answer_is_told_where_its_stub_is(tmp_path):
    name = LESSONS[1].name
    result, message = verdict("1", "check_slopes_of_powers_of_two", "x = 1", tmp_path)
    assert result == "wrong"
    assert f"has no alibi_slopes: lessons/exercises/{name} has its stub" in message


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    """A copy of the project's code."""
    folder = tmp_path_factory.mktemp("clone")
    others = {"tests", "bench", "configs", "slurm"}
    for path in ROOT.iterdir():
        if path.suffix == ".py":
            shutil.copyfile(path, folder / path.name)
        elif (path / "__init__.py").exists() and path.name not in others:
            ignored = shutil.ignore_patterns("__pycache__", "mine")
            shutil.copytree(path, folder / path.name, ignore=ignored)
    return folder


@pytest.mark.slow
def test_an_answer_beside_the_project_cannot_use_it_and_prints_little(clone):
    answer = clone / "my.py"
    answer.write_text(
        "for _ in range(1000): print('x' * 999)\nfrom attention import alibi_slopes\n"
    )
    done = lessons("check", "0", "--file=my.py", cwd=clone)
    assert done.returncode == 1, done.stderr
    words = "my.py, line 2: PermissionError: an answer cannot use the project's attention.py"
    said = " ".join(done.stdout.split())
    assert said.count(words) == 1
    assert said.count("skipped") == len(answers.parts(checker("0"))) - 1
    assert 15_000 < done.stdout.count("x") < 21_000
    assert done.stdout.count("[it prints more than 20 kB: the rest is left out]") == 1


def test_an_answer_in_lessons_cannot_use_solutions(tmp_path):
    """Its own file is open to it; others beside it only in lessons/mine/."""
    ours = workshop.HERE / "solutions" / LESSONS[1].name
    for own, other, is_closed in (
        (workshop.HERE / "x.py", ours, True),
        (workshop.HERE / "x.py", workshop.HERE / "x.py", False),
        (ROOT / "x.py", ROOT / "attention.py", True),
        (workshop.MINE / "x.py", workshop.MINE / "y.py", False),
        (workshop.MINE / "x.py", ours, True),
        (tmp_path / "x.py", tmp_path / "y.py", False),
    ):
        assert answering.is_of_the_project(other, own) == is_closed, (own, other)


def test_prints_are_cut():
    file = io.StringIO()
    capped = answering.Capped(file)
    capped.write("a" * 19_990)
    assert file.getvalue() == "a" * 19_990
    capped.writelines(["b" * 20, "c"])
    assert file.getvalue().count("b") == 10 and "c" not in file.getvalue().replace("[it", "")
    assert file.getvalue().endswith("\n[it prints more than 20 kB: the rest is left out]\n")


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


def test_the_list_names_every_lesson():
    printed = lessons().stdout
    for path in LESSONS:
        assert workshop.cells(path)[0].splitlines()[0].removeprefix("# Lesson ") in printed


def test_the_list_names_the_next_lesson(tmp_path, monkeypatch):
    monkeypatch.setattr(workshop, "MINE", tmp_path)
    for path in LESSONS:
        number = path.name[0]
        words = f"next: python -m lessons {number}, then python -m lessons check {number}"
        assert workshop.listing().splitlines()[-1] == words
        workshop.remember(path.stem)
    assert "next:" not in workshop.listing()


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
        workshop.check_and_report(lesson, answer, "check 1 '--file=my answer.py'")
    assert leaving.value.code == 1
    assert "python -m lessons check 1 '--file=my answer.py' checks" in capsys.readouterr().out
    assert workshop.done() == {}

    answer.write_text((workshop.HERE / "solutions" / lesson.name).read_text())
    assert workshop.answer_path(lesson, []) == answer  # it is not overwritten
    workshop.check_and_report(lesson, answer, "check 1")
    assert "Lesson 1 is solved" in capsys.readouterr().out
    assert workshop.done() == {lesson.stem: True}
    assert "done  1." in workshop.listing()


# --- What an answer may do


ODD = """
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
fsync_by_another_name = os.fsync
def save_by_another_name(path, text):
    with open(path, "w") as f:
        f.write(text)
        f.flush()
        fsync_by_another_name(f)
def save_synchronously(path, text):
    f = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_SYNC)
    os.write(f, text.encode())
    os.sync()
def not_of_torch(*args): torch.softmax(torch.ones(2, dtype=torch.int64), -1)
def later_too(*args): raise NotImplementedError("write it")
def fork(): os.fork()
def run_the_project(command):
    import subprocess
    subprocess.run(command)
def run_in_a_shell(): os.system("true")
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
        (("not_of_torch",), ["NotImplementedError", "softmax", "def not_of_torch(*args): torch"]),
        (("fork",), ["an answer cannot start another process (os.fork)"]),
        (("run_the_project", ["true"]), ["cannot start another process (subprocess.Popen)"]),
        (("run_in_a_shell",), ["cannot start another process (os.system)"]),
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
    with pytest.raises(answers.ToDo, match="write it"):
        odd.call_until_killed("later_too", at=0)
    with pytest.raises(answers.Wrong, match="NotImplementedError"):
        odd.call_until_killed("not_of_torch", at=0)


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


def test_a_rank_that_ended_is_told_before_one_that_failed_because_of_it(odd):
    """Both have failed when they are looked at; the first in the list is not the cause."""
    processes = odd.started(2)
    processes[0].send(20, "call", "crash", [1], {})
    processes[1].send(20, "call", "leave", [], {})
    for process in processes:
        assert process.pipe.poll(60)
    with pytest.raises(answers.Died, match="b ended the process"):
        answers.received(processes, ["a", "b"], 20)
    for process in processes:
        process.stop()


def test_changes_of_files_have_names(odd, tmp_path):
    def names(function):
        return odd.call_until_killed(function, str(tmp_path / "file"), "the new text", at=None)

    assert names("save_in_place") == ["open", "write", "close"]
    assert names("save") == ["open", "write", "close", "rename"]
    assert names("save_by_another_name") == ["open", "write", "flush", "fsync file", "close"]
    assert names("save_synchronously") == ["open synchronous", "write", "sync"]
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
        (float("nan"), 1.0, "1 value is NaN"),
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
