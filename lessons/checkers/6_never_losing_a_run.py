"""Checks exercise 6: kills that lose the naive checkpointer's data, and fifty for the answer's.

The naive checkpointer is taken from the stub, so that an answer may have changed or removed it.
"""

import shutil
import tempfile
from pathlib import Path

from lessons.answers import Answer, ToDo

SOLUTION = Path(__file__).parent.parent / "solutions" / Path(__file__).name  # naive_save, too
MOST_COPIES = 6  # bytes in the folder / bytes of one checkpoint
WRITES = {"write", "writelines", "flush", "truncate"}


# --------------------------------------------------------------------------------------------------
# The naive checkpointer


def check_kill_that_loses(answer):
    """KILL_AT: a kill after which the naive checkpointer has lost its data"""
    kill_naive(answer, "KILL_AT")


def check_silent_kill(answer):
    """SILENT_KILL_AT: a kill after which it returns what was never saved, without an error"""
    error = kill_naive(answer, "SILENT_KILL_AT")
    assert not error, f"after that kill naive_load fails, which anybody notices: {error}"


def kill_naive(answer, name: str) -> str:
    """The error of naive_load, or "", after the kill of the second naive_save that `name` says."""
    at = answer.value(name)
    if at is None:
        raise ToDo(f"set {name} to a number from 0 to 5")
    assert at in range(6), f"{name}: the changes have the numbers 0 to 5, got {at!r}"
    saved = [(step, state_of(step)) for step in (1, 2)]
    naive = Answer(SOLUTION)
    with tempfile.TemporaryDirectory() as folder:
        naive.call("naive_save", folder, *saved[0])
        naive.kill("naive_save", folder, *saved[1], at=at)
        try:
            loaded = naive.call("naive_load", folder)
        except AssertionError as error:
            return str(error)
    assert loaded not in saved, (
        f"{name}: after a kill before change {at} of the second naive_save, naive_load still "
        f"returns step {loaded[0]}, exactly as it was saved. The changes are counted from 0"
    )
    return ""


def state_of(step: int, attempt: int = 0) -> dict:
    """A state that no other step and attempt has."""
    weights = [step + i / 7 + attempt * 1e-9 for i in range(8)]
    return {"weights": weights, "momentum": [-step / 3, 1e-300, 0.0, attempt / 11]}


# --------------------------------------------------------------------------------------------------
# The reader's save and load


class Run:
    """A run that saves into `folder`, is killed, loads, and continues with the next step.

    allowed   (step, state) of the last save that returned, and of those since then, which were
              killed; None before the first
    """

    def __init__(self, answer, folder: str, saves: int = 0):
        self.answer, self.folder = answer, folder
        self.step = self.attempts = 0
        self.allowed = [None]
        for _ in range(saves):
            self.save()

    def save(self, at: int | None = None) -> list[str]:
        """Save, killed just before change `at`. With None: undisturbed, returns the changes."""
        self.attempts += 1
        saved = self.step + 1, state_of(self.step + 1, self.attempts)
        found = self.answer.kill("save", self.folder, *saved, at=at)
        if found is True:
            self.allowed.append(saved)
            return []
        self.allowed, self.step = [saved], self.step + 1
        return found or []

    def load(self, case: str) -> None:
        """Load; it must be the last save that returned, or one that was killed since."""
        try:
            got = self.answer.call("load", self.folder)
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from None
        steps = " or ".join(dict.fromkeys(f"step {x[0]}" if x else "None" for x in self.allowed))
        is_form = got is None or isinstance(got, tuple)
        assert is_form, f"{case}: load must return a tuple (step, state), not {got!r:.80}"
        step = got[0] if got else 0
        known = any(step == x[0] for x in self.allowed if x)
        what = f"step {step}{' with a state that was never saved' * known}" if got else "None"
        assert got in self.allowed, f"{case}: expected {steps}, but load returned {what}"
        self.step = step


def check_undisturbed(answer):
    """save and load, undisturbed"""
    with tempfile.TemporaryDirectory() as folder:
        run = Run(answer, folder)
        run.load("an empty folder")
        for step in (1, 2, 9, 10, 11, 99, 100):
            run.step = step - 1
            assert run.save(), "save changed no file: write with open, os.write, or the like"
            run.load(f"after save(folder, {step}, ...)")


def check_fifty_kills(answer):
    """Fifty kills lose nothing"""
    with tempfile.TemporaryDirectory() as folder:
        run = Run(answer, folder)
        run.save(at=0)
        run.load("the first save was killed before its change 0")
        for _ in range(6):
            n = len(run.save())
        hint = "Does the old checkpoint go before the new one is complete?"
        for number in range(50):  # the second half without a complete save between two kills
            in_a_row = number >= 25
            if not in_a_row:
                run.save()
            # All changes in both halves if they are few; else every other one in each.
            at = number % 25 % n if n <= 25 else (2 * (number % 25) + in_a_row) * n // 50
            run.save(at)
            times = f"kill {number - 24} in a row" if in_a_row else "after a complete save"
            run.load(f"a save killed before its change {at} of {n}, {times}. {hint}")
        run.save()
        run.load("after fifty kills and a save")


def check_damage(answer):
    """A damaged newest checkpoint is noticed, and the one before is used"""
    with tempfile.TemporaryDirectory() as folder:
        run = Run(answer, folder, saves=2)
        before, good = run.allowed, contents(folder)
        run.save()
        newest, sound = run.allowed, contents(folder)
        for name in sound.keys() - {name for name in good if sound.get(name) == good[name]}:
            for damage, left in damaged(sound[name]):
                restore(folder, sound | {name: left})
                case = f"steps 1, 2, 3 are saved; {damage} of {name}. Is there a checksum?"
                run.allowed = before + newest
                run.load(case)
                run.save()  # the run goes on from there: it saves the lost step once more
                run.load(f"{case} Then step {run.step} was saved again")


def damaged(content: bytes):
    """(what was done to the file, its content then)."""
    size = len(content)
    for cut in (0, size // 2, size - 1):
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
    shutil.rmtree(folder)
    for name, content in files.items():
        path = Path(folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def check_other_files(answer):
    """Other files do no harm, and stay"""
    with tempfile.TemporaryDirectory() as folder:
        run = Run(answer, folder, saves=2)
        for name, content in contents(folder).items():
            Path(folder, f"{name}.tmp").write_bytes(content[: len(content) // 2])
        notes = Path(folder, "notes.txt")
        notes.write_text("keep me")
        run.load("notes.txt and files ending in .tmp were put into the folder")
        run.save()
        run.load("notes.txt and files ending in .tmp are in the folder, and step 3 was saved")
        kept = notes.exists() and notes.read_text() == "keep me"
        assert kept, "save or load removed notes.txt: remove only what save has written"


def check_nothing_piles_up(answer):
    """Old checkpoints and what killed saves leave do not pile up"""
    with tempfile.TemporaryDirectory() as folder:
        run = Run(answer, folder, saves=1)
        one = sum(map(len, contents(folder).values()))
        for _ in range(11):
            n = len(run.save())
        for number in range(20):
            run.save(number % n if n <= 20 else number * n // 20)
            run.load(f"killed save {number + 1}")
        run.save()
        files = contents(folder)
        total = sum(map(len, files.values()))
        assert total <= MOST_COPIES * one + 200, (  # steps and names become longer
            f"after 12 saves, 20 killed ones, and one more the folder holds {total} bytes in "
            f"{len(files)} files: {sorted(files)[:3]}, ...; that is more than {MOST_COPIES} times "
            f"the {one} of the first"
        )


# --------------------------------------------------------------------------------------------------
# A power failure


def check_power_failure(answer):
    """When save returns, the bytes and the names of its files are on disk"""
    # No kill can show this: a killed process loses nothing that the operating system has taken.
    # So the order of the changes is checked, in two saves, before there is anything to remove.
    with tempfile.TemporaryDirectory() as folder:
        run = Run(answer, folder)
        for _ in range(2):
            before = contents(folder)
            names = run.save()
            after = contents(folder)
            n_written = sum(bool(x) and before.get(name) != x for name, x in after.items())
            require_on_disk(names, n_written, bool(after.keys() - before.keys()))


def require_on_disk(names: list[str], n_written: int, has_made: bool) -> None:
    """Each file is fsynced after its last write and before its rename; then the folder is."""
    case = f"save does {', '.join(names)}. After a power failure"
    n_synced = names.count("fsync file")
    assert n_synced >= n_written, (
        f"{case} a file may be empty although save had returned: of the {n_written} files with new "
        f"bytes os.fsync waited for {n_synced} that were not empty. flush() passes the bytes from "
        "Python's buffer to the operating system; only then can fsync wait for them"
    )
    assert is_synced(names), (
        f"{case} bytes may be missing: the last write or flush comes after the last fsync of a file"
    )
    named = last_of(names, {"rename", "link"})
    assert named < 0 or is_synced(names[:named]), (
        f"{case} the new name may lead to an empty file: the rename comes before the fsync"
    )
    if named < 0 and has_made:
        named = names.index("open")
    assert named < 0 or "fsync folder" in names[named:], (
        f"{case} the new name may be gone, and with it the file: there is no fsync of the folder "
        "after the last rename, or after a file was made"
    )


def is_synced(names: list[str]) -> bool:
    """Whether an fsync of a file comes after the last write, if there is any."""
    return last_of(names, {"fsync file"}) >= last_of(names, WRITES)


def last_of(names: list[str], kinds: set[str]) -> int:
    """The number of the last change of these kinds; -1 if there is none."""
    return max((number for number, name in enumerate(names) if name in kinds), default=-1)
