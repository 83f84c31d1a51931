"""Lists the lessons, runs one, checks an answer: what `python -m lessons` does.

    python -m lessons
    python -m lessons 3
    python -m lessons check 3

Lesson N is lessons/N_name.py. Its exercise with a solution is in solutions/, and its checker in
checkers/, both under the same name. The first check writes the exercise without the solution, a
stub, to lessons/mine/. A lesson consists of cells: `# %% [markdown]` starts words, `# %%` starts
code. Running it prints its words between what its statements print.
"""

import importlib.util
import json
import re
import signal
import sys
import textwrap
from importlib.machinery import SourceFileLoader
from pathlib import Path

import program
from program import UserError, require
from storage import files

HERE = Path(__file__).parent
MINE = HERE / "mine"
USAGE = "usage: python -m lessons [N] [--short|--answers], python -m lessons check N [--file=PATH]"
WORDS = re.compile(r"^# %% \[markdown\]\n((?:#.*\n?)*)", re.MULTILINE)  # a cell of a lesson
ANSWERS = "# Scroll on for the answers."  # the line of a lesson from which on it has the answers


def main(argv: list[str]) -> None:
    """Do what the arguments say. UserError if they say nothing that can be done."""
    if program.wants_help(argv):
        program.show_help()
    words = [word for word in argv if not word.startswith("-")]
    flags = [word for word in argv if word.startswith("-")]
    if not argv:
        print(listing())
    elif words[:1] == ["check"] and len(words) == 2:
        path = lesson(words[1])
        check_and_report(path, answer_path(path, flags), program.shell(*words, *flags))
    elif len(words) == 1 and not set(flags) - {"--short", "--answers"}:
        path = lesson(words[0])
        if "--answers" in flags:
            print(answers_of(path))
        else:
            # As Ctrl-C: a lesson then ends the runs that it has started.
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            run(path, short="--short" in flags)
    else:
        raise UserError(USAGE)


def lesson_paths() -> list[Path]:
    """The files of the lessons, in order."""
    return sorted(HERE.glob("[0-9]_*.py"))


def lesson(number: str) -> Path:
    """The file of a lesson."""
    found = [path for path in lesson_paths() if path.name[0] == number]
    require(found, f"no lesson {program.quote(number)}: there are 0 to 8; {USAGE}")
    return found[0]


# --------------------------------------------------------------------------------------------------
# The list


def listing() -> str:
    """All lessons, a line each, with what is done and what is next."""
    lines, left = [], []
    for path in lesson_paths():
        is_done = path.stem in done()
        title = cells(path.read_text(encoding="utf-8"))[0].splitlines()[0].removeprefix("# Lesson ")
        lines.append(f"{'done' if is_done else '':>4}  {title}")
        if not is_done:
            left.append(path.name[0])
    if left:
        lines += ["", f"next: python -m lessons {left[0]}, then python -m lessons check {left[0]}"]
    return "\n".join(lines)


def done() -> dict[str, bool]:
    """{name of a lesson: True} for those whose exercise was solved here."""
    path = MINE / "done.json"
    return files.read_json(path) if path.exists() else {}


def remember(name: str) -> None:
    """Write down that this lesson's exercise is solved."""
    solved = json.dumps(done() | {name: True}, indent=1)
    files.write_atomically(MINE / "done.json", solved.encode())


# --------------------------------------------------------------------------------------------------
# Running a lesson


def run(path: Path, short: bool) -> None:
    """Run a lesson from top to bottom: its words, and between them what its code prints."""
    sys.argv = [str(path), *(["--short"] if short else [])]
    loader = WithWords("lesson", str(path))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("lesson", loader))
    try:
        loader.exec_module(module)
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        raise UserError(f"the lessons draw with matplotlib: {program.EXTRA}") from error


class WithWords(SourceFileLoader):
    """Loads a lesson as a module that prints the lesson's words, too."""

    def get_code(self, fullname):
        """The module's code, with a `print` in the place of each cell of words."""
        source = Path(self.path).read_text(encoding="utf-8").split(ANSWERS)[0]
        return compile(WORDS.sub(as_print, source), self.path, "exec")


def as_print(cell: re.Match) -> str:
    """A statement that prints a cell of words, with as many lines as the cell has."""
    text = f"\n{text_of(cell)}\n"
    return f"print({text!r}, flush=True)" + "\n" * cell[0].count("\n")


def text_of(cell: re.Match) -> str:
    """The text of a cell of words."""
    return re.sub(r"^# ?", "", cell[1], flags=re.MULTILINE).strip("\n")


def cells(source: str) -> list[str]:
    """The texts of all cells of words in a lesson or in a part of one."""
    return [text_of(cell) for cell in WORDS.finditer(source)]


def answers_of(path: Path) -> str:
    """The answers to a lesson's three questions."""
    _, _, answers = path.read_text(encoding="utf-8").partition(ANSWERS)
    return "\n".join(cells(answers))


# --------------------------------------------------------------------------------------------------
# Checking an answer


def answer_path(path: Path, flags: list[str]) -> Path:
    """The file to check: that of --file, or lessons/mine/NAME.py, made from the stub if missing."""
    if flags:
        name, _, value = flags[0].partition("=")
        require(len(flags) == 1 and name == "--file" and value, USAGE)
        require(Path(value).is_file(), f"no file {program.quote(value)}")
        return Path(value)
    mine = MINE / path.name
    if not mine.exists():
        MINE.mkdir(exist_ok=True)
        mine.write_text(stub(path), encoding="utf-8")
        print(f"lessons/mine/{path.name} is new. Open it, complete it, and check again.\n")
    return mine


def stub(path: Path) -> str:
    """The exercise of a lesson: its solution file without what follows `# --- in the stub: TEXT`.

    TEXT stands in the place of all lines up to `# ---`; without TEXT nothing does.
    """
    solution = (HERE / "solutions" / path.name).read_text(encoding="utf-8")
    is_stub, lines = True, []
    for line in solution.splitlines():
        indent, mark, text = line.partition("# --- in the stub:")
        if mark:
            is_stub = False
            lines += [indent + text.strip()] * bool(text)
        elif line.strip() == "# ---":
            is_stub = True
        elif is_stub:
            lines.append(line)
    return re.sub(r"\n{4,}", "\n\n\n", "\n".join(lines)).strip() + "\n"


def check_and_report(path: Path, answer: Path, arguments: str) -> None:
    """Print what is right and what is wrong with an answer. Exit status 1 unless all is right.

    arguments: those that check it again.
    """
    results = []
    for title, result, message in check(path, answer):
        results.append(result)
        print(f"{result:>15}  {title}", flush=True)
        for line in message.splitlines():
            print(textwrap.fill(line, 97, initial_indent=" " * 17, subsequent_indent=" " * 17))
    print()
    if {"wrong", "not written yet"} & set(results):
        print("python -m lessons", arguments, "checks again.")
        raise SystemExit(1)
    if answer.resolve().parent == MINE.resolve():
        remember(path.stem)
    print(f"Lesson {path.name[0]} is solved. One solution is lessons/solutions/{path.name}.")


def check(path: Path, answer: Path):
    """(title, result, message) of each part of a lesson's exercise, one by one.

    The result is "right", "wrong", "not written yet" or "skipped".
    """
    from lessons import answers  # and torch with it

    checker = load(HERE / "checkers" / path.name)
    try:
        given = answers.Answer(answer)
    except (AssertionError, answers.ToDo) as error:
        yield "the file can be loaded", "wrong", str(error)
        return
    for title, part in answers.parts(checker):
        yield title, *answers.judged(part, given)
    given.stop()


def load(path: Path):
    """The checker in a file, as a module."""
    spec = importlib.util.spec_from_file_location(f"checker_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    program.run(main)
