"""What a kill leaves of a file that was being replaced: a table, one line for each moment.

    python -m lessons.kills

    overwrite          open(path, "wb"), write, close: the obvious way
    write_atomically   storage/files.py: a temporary file, fsync, rename

A file holds old content, and a process replaces it by new content. For n = 0, 1, 2, ... a copy of
this process (fork) does so and kills itself just before its change of a file number n, as
`changes.Changes` counts them. A file that is open then keeps half of what is in it. The table
says what a reader finds afterwards. The program fails if write_atomically leaves anything but the
old content or the new.
"""

import functools
import tempfile
from pathlib import Path

import config
import program
from lessons import changes
from storage import files

OLD = b"step 100: " + b"a" * 90
NEW = b"step 200: " + b"b" * 90


def overwrite(path: Path, content: bytes) -> None:
    """Write a file the obvious way."""
    with open(path, "wb") as file:
        file.write(content)


def found_after(write, path: Path, at: int) -> str:
    """What is in the file after a kill before change `at`: old, new, or what else."""
    for left in path.parent.iterdir():
        left.unlink()
    path.write_bytes(OLD)
    changes.in_a_copy(functools.partial(write, path, NEW), at)
    content = path.read_bytes()
    known = {OLD: "old", NEW: "new"}
    return known.get(content, f"LOST: {len(content)} of {len(NEW)} bytes")


def main(argv: list[str]) -> None:
    """Print the tables."""
    config.arguments(argv)
    for write in (overwrite, files.write_atomically):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "file"
            rows = []
            _, names, _ = changes.in_a_copy(functools.partial(write, path, NEW))
            for at, name in enumerate([*names, "(it ends)"]):
                found = found_after(write, path, at)
                beside = " and ".join(left.name for left in Path(folder).glob("*.tmp"))
                rows.append((f"{at} {name}", found, beside))
        print(f"{write.__name__}\n")
        print(program.table(("killed before", "a reader then finds", "beside it"), rows), "\n")
        if write is files.write_atomically:
            is_whole = {found for _, found, _ in rows} <= {"old", "new"}
            config.require(is_whole, "write_atomically lost a file: a bug in this project")


if __name__ == "__main__":
    config.run(main)
