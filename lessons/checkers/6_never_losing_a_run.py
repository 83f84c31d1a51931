"""Checks exercise 6: kills that lose the naive checkpointer's data, and fifty for the answer's.

The naive checkpointer is taken from the stub, so that an answer may have changed or removed it.
"""

import itertools
import shutil
import tempfile
from pathlib import Path

from lessons.answers import Answer, ToDo, Wrong, describe_value, is_number, need

STUB = Path(__file__).parent.parent / "exercises" / Path(__file__).name
CHANGES_OF_NAIVE = 6
MOST_COPIES = 6  # bytes in the folder / bytes of one checkpoint
WRITES = {"write", "writelines", "tofile", "flush", "truncate", "ftruncate"}
FILE_SYNCS = {"fsync file", "fdatasync"}
FOLDER_SYNCS = {"fsync folder", "fdatasync"}
OTHER_WAYS = {"open synchronous", "sync"}  # of waiting for the disk: their order is not checked


def check_kill_that_loses(answer):
    """KILL_AT: a kill after which the naive checkpointer has lost its data"""
    kill_naive(kill_number(answer, "KILL_AT"))


def check_silent_kill(answer):
    """SILENT_KILL_AT: a kill after which it returns what was never saved, without an error"""
    at = kill_number(answer, "SILENT_KILL_AT")
    error = kill_naive(at)
    told = f"after a kill before change {at} naive_load fails, which anybody notices"
    need(error is None, f"{told}: {error}")


def kill_number(answer, name: str) -> int:
    """The number of a change, from the answer."""
    at = answer.value(name)
    if at is None:
        raise ToDo(f"set {name} to a number from 0 to {CHANGES_OF_NAIVE - 1}")
    is_number = isinstance(at, int) and not isinstance(at, bool)
    in_range = is_number and 0 <= at < CHANGES_OF_NAIVE
    count = f"the {CHANGES_OF_NAIVE} changes have the numbers 0 to {CHANGES_OF_NAIVE - 1}"
    need(in_range, f"{name}: {count}, got {at!r}")
    return at


def kill_naive(at: int) -> Wrong | None:
    """The error of naive_load after a kill before change `at` of the second naive_save, or None.

    Wrong if nothing was lost.
    """
    saved = [(step, state_of(step)) for step in (1, 2)]
    with Answer(STUB) as naive, tempfile.TemporaryDirectory() as folder:
        naive.call("naive_save", folder, *saved[0])
        naive.call_until_killed("naive_save", folder, *saved[1], at=at)
        try:
            loaded = naive.call("naive_load", folder)
        except Wrong as error:
            return error
    if loaded in saved:
        step = f"naive_load still returns step {loaded[0]}, exactly as it was saved"
        raise Wrong(f"after a kill before change {at} of the second naive_save, {step}")
    return None


def state_of(step: int, attempt: int = 0) -> dict:
    """A state that no other step and attempt has."""
    weights = [step + i / 7 + attempt * 1e-9 for i in range(8)]
    return {"weights": weights, "momentum": [-step / 3, 1e-300, 0.0, attempt / 11]}


# --------------------------------------------------------------------------------------------------
# The reader's save and load


class Run:
    """A run that saves into `folder`, is killed, loads, and continues with the next step.

    returned   (step, state) of the last save that returned; None before the first
    killed     those of the saves since then, which were killed
    """

    def __init__(self, answer, folder: str):
        self.answer, self.folder = answer, folder
        self.step = self.attempts = 0
        self.returned, self.killed = None, []

    def next(self) -> tuple[int, dict]:
        """What is saved next."""
        self.attempts += 1
        return self.step + 1, state_of(self.step + 1, self.attempts)

    def save(self, case: str = "") -> None:
        """Save, undisturbed."""
        step, state = self.next()
        with_case(case, self.answer.call, "save", self.folder, step, state)
        self.returned, self.killed, self.step = (step, state), [], step

    def count(self) -> int:
        """Save, undisturbed. Returns how many changes of files that made."""
        step, state = self.next()
        n = len(self.answer.call_until_killed("save", self.folder, step, state, at=None))
        self.returned, self.killed, self.step = (step, state), [], step
        need(n > 0, "save changed no file: write with open, os.write, os.replace, or the like")
        return n

    def kill(self, at: int, case: str) -> None:
        """Save, killed just before change `at`, and load."""
        step, state = self.next()
        arguments = ("save", self.folder, step, state)
        if with_case(case, self.answer.call_until_killed, *arguments, at=at):
            self.killed.append((step, state))
        else:
            self.returned, self.killed = (step, state), []
        self.load(f"{case} (step {step})")

    def load(self, case: str = "") -> None:
        """Load; it must be the last save that returned, or one that was killed since."""
        allowed = [self.returned, *self.killed] if self.returned else [None, *self.killed]
        self.step = require_loaded(self.answer, self.folder, allowed, case)


def with_case(case: str, function, *args, **keywords):
    """function(...); if it is wrong, the message begins with the case."""
    try:
        return function(*args, **keywords)
    except Wrong as error:
        raise Wrong(f"{case}: {error}" if case else str(error)) from error


def require_loaded(answer, folder: str, allowed: list, case: str) -> int:
    """The step that `load` returns. Wrong unless it is in `allowed`, of (step, state) or None."""
    got = with_case(case, answer.call, "load", folder)
    start = f"{case}: " if case else ""
    names = ["None" if entry is None else f"step {entry[0]}" for entry in allowed]
    steps = " or ".join(dict.fromkeys(names))
    need(got is not None or None in allowed, f"{start}load returned None, expected {steps}")
    if got is None:
        return 0
    is_pair = isinstance(got, tuple) and len(got) == 2 and type(got[0]) is int
    is_pair = is_pair and isinstance(got[1], dict)
    need(is_pair, f"{start}load must return a tuple (step, state), but returned {got!r:.80}")
    for name, numbers in got[1].items():
        is_list = isinstance(numbers, list) and all(map(is_number, numbers))
        came = describe_value(numbers)
        need(is_list, f"{start}load: expected a list of floats for {name!r}, but got {came}")
    if got not in allowed:
        step, state = got
        right_step = f"step {step}" in names
        what = " with a state that was never saved" if right_step else ""
        raise Wrong(f"{start}expected {steps}, but load returned step {step}{what}")
    return got[0]


def check_undisturbed(answer):
    """save and load, undisturbed"""
    with tempfile.TemporaryDirectory() as folder:
        run = Run(answer, folder)
        run.load("an empty folder")
        for step in (1, 2, 9, 10, 11, 99, 100):
            run.step = step - 1
            run.save()
            run.load(f"after save(folder, {step}, ...)")


def check_fifty_kills(answer):
    """Fifty kills lose nothing"""
    with tempfile.TemporaryDirectory() as folder:
        run = Run(answer, folder)
        run.kill(0, "the first save was killed before its change 0")
        for _ in range(5):
            run.save()
        n = run.count()
        for in_a_row in (False, True):
            for number in range(25):
                # All changes in both rounds if they are few; else every other one in each.
                at = number % n if n <= 25 else (2 * number + in_a_row) * n // 50
                if not in_a_row:
                    run.save()
                times = f"kill {number + 1} in a row" if in_a_row else "after a complete save"
                run.kill(at, f"a save killed before its change {at} of {n}, {times}")
        run.save("a save after fifty kills")
        run.load("after fifty kills and a save")


def check_damage(answer):
    """A damaged newest checkpoint is noticed, and the one before is used"""
    with tempfile.TemporaryDirectory() as folder:
        run = Run(answer, folder)
        run.save()
        run.save()
        before, good = run.returned, contents(folder)
        run.save()
        newest, sound = run.returned, contents(folder)
        written = [name for name in sorted(sound) if good.get(name) != sound[name]]
        need(written, "save(folder, 3, ...) left no new file")
        for name in written:
            for damage, content in damaged(sound[name]):
                restore(folder, sound | {name: content})
                case = f"steps 1, 2, 3 are saved; {damage} of {name}"
                run.step = require_loaded(answer, folder, [before, newest], case)
            # The run goes on from there: it saves the lost step once more.
            run.save(f"{case}; then step {run.step + 1} is saved again")
            run.load(f"{case}; step {run.step} was saved again")


def damaged(content: bytes):
    """(what was done to the file, its content then)."""
    size = len(content)
    for cut in sorted({0, size // 2, max(0, size - 1)}):
        if cut < size:
            yield f"only the first {cut} of {size} bytes are left", content[:cut]
    for place in range(0, size, max(1, size // 16)):
        flipped = bytes([content[place] ^ 1])
        yield f"one bit differs in byte {place}", content[:place] + flipped + content[place + 1 :]


def contents(folder: str) -> dict[str, bytes]:
    """{path in the folder: content} of all files."""
    paths = (path for path in Path(folder).rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def restore(folder: str, files: dict[str, bytes]) -> None:
    """Make the folder hold these files and no others."""
    for entry in Path(folder).iterdir():
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    for name, content in files.items():
        path = Path(folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def check_other_files(answer):
    """Other files do no harm, and stay"""
    with tempfile.TemporaryDirectory() as folder:
        run = Run(answer, folder)
        run.save()
        run.save()
        for name, content in contents(folder).items():
            Path(folder, f"{name}.tmp").write_bytes(content[: len(content) // 2])
        notes = Path(folder, "notes.txt")
        notes.write_text("keep me")
        run.load("notes.txt and files ending in .tmp were put into the folder")
        run.save("notes.txt and files ending in .tmp were put into the folder")
        run.load("notes.txt and files ending in .tmp are in the folder, and step 3 was saved")
        need(notes.exists() and notes.read_text() == "keep me", "save or load removed notes.txt")


def check_nothing_piles_up(answer):
    """Old checkpoints and what killed saves leave do not pile up"""
    with tempfile.TemporaryDirectory() as folder:
        run = Run(answer, folder)
        run.save()
        one = sum(map(len, contents(folder).values()))
        for _ in range(11):
            run.save()
        require_few(folder, one, "after 12 saves")
        n = run.count()
        for number in range(20):
            at = number % n if n <= 20 else number * n // 20
            run.kill(at, f"a save killed before its change {at} of {n}")
        run.save()
        require_few(folder, one, "after 12 saves, 20 killed ones, and one more")


def require_few(folder: str, one: int, case: str) -> None:
    """Wrong if the folder holds more than six checkpoints' bytes."""
    files = contents(folder)
    total = sum(map(len, files.values()))
    names = ", ".join(sorted(files)[:3])
    held = f"{case} the folder holds {len(files)} files ({names}, ...) of {total} bytes"
    limit = MOST_COPIES * one + 200  # steps and names become longer
    need(total <= limit, f"{held}: more than {MOST_COPIES} times the {one} bytes after the first")


def check_power_failure(answer):
    """When save returns, the bytes and the names of its files are on disk"""
    # No kill can show this: a killed process loses nothing that the operating system has taken.
    # So the order of the changes is checked, in two saves, before there is anything to remove.
    with tempfile.TemporaryDirectory() as folder:
        for step in (1, 2):
            before = contents(folder)
            arguments = ("save", folder, step, state_of(step))
            names = answer.call_until_killed(*arguments, at=None)
            if OTHER_WAYS & set(names):
                continue
            after = contents(folder)
            written = [name for name in after if after[name] and before.get(name) != after[name]]
            made = [name for name in after if name not in before]
            runs = [(name, len(list(run))) for name, run in itertools.groupby(names)]
            shown = ", ".join(f"{name} (x{n})" if n > 1 else name for name, n in runs)
            case = f"save number {step} does {shown}"
            require_bytes_on_disk(names, sorted(written), case)
            require_names_on_disk(names, sorted(made), case)


def require_bytes_on_disk(names: list[str], written: list[str], case: str) -> None:
    """Wrong unless each file is fsynced, after its last write and before it is renamed."""
    if any(name in FILE_SYNCS for name in names):
        last = last_of(names, {"rename", "link"})
        early = names[: max(last, 0)]
        need(
            "open" not in early or syncs_its_writes(early),
            f"{case}: the last rename comes before an fsync of what was written. After a power "
            "failure the new name may lead to an empty file",
        )
        need(
            syncs_its_writes(names),
            f"{case}: its last write or flush comes after its last fsync of a file. After a power "
            "failure these bytes may be missing although save had returned",
        )
        n = sum(name in FILE_SYNCS for name in names)
        files = ", ".join(written[:4])
        need(
            n >= len(written),
            f"{case}: it wrote {len(written)} files ({files}), but made {n} fsync of a file with "
            "content. Each file needs its own, after a flush",
        )
        return
    need(
        "fsync empty file" not in names,
        f"{case}: at the fsync the file was still empty, for the bytes were in Python's buffer. "
        "flush() passes them to the operating system; only then can fsync wait for them",
    )
    folder_only = "an fsync of the folder, which puts names on disk, but none of a file"
    none = "nothing that waits for the disk: no os.fsync of a file"
    found = folder_only if "fsync folder" in names else none
    raise Wrong(
        f"{case}: there is {found}. After a power failure the file may be empty although save had "
        "returned, even after a rename"
    )


def require_names_on_disk(names: list[str], made: list[str], case: str) -> None:
    """Wrong unless the folder is fsynced after the last rename, or after a file was made."""
    last = last_of(names, {"rename", "link"})
    if last >= 0:
        need(
            FOLDER_SYNCS & set(names[last + 1 :]),
            f"{case}: there is no fsync of the folder after the last rename. After a power failure "
            "the new name may be gone although save had returned",
        )
    elif made:
        begin = names.index("open") if "open" in names else 0
        need(
            FOLDER_SYNCS & set(names[begin:]),
            f"{case}: it made {made[0]}, but there is no fsync of the folder after that. After a "
            "power failure the name may be gone, and with it the file",
        )


def last_of(names: list[str], kinds: set[str]) -> int:
    """The number of the last change of these kinds; -1 if there is none."""
    return max((number for number, name in enumerate(names) if name in kinds), default=-1)


def syncs_its_writes(names: list[str]) -> bool:
    """Whether an fsync of a file comes after the last write or flush among these changes."""
    return bool(FILE_SYNCS & set(names[last_of(names, WRITES) + 1 :]))
