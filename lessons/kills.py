"""What a kill leaves of a file that was being replaced: a table, one line for each moment.

    python -m lessons.kills

    overwrite          open(path, "wb"), write, close: the obvious way
    write_atomically   storage/files.py: a temporary file, fsync, rename

A file holds old content, and a process replaces it by new content. For n = 0, 1, 2, ... a copy of
this process (fork) does so and kills itself just before its change of a file number n, as
`answering.Changes` counts them. A file that is open then keeps half of what is in it. The table
says what a reader finds afterwards. The program fails if write_atomically leaves anything but the
old content or the new.
"""

import os
import tempfile
from pathlib import Path

import config
from lessons.answering import Changes
from storage import files

OLD = b"step 100: " + b"a" * 90
NEW = b"step 200: " + b"b" * 90


def overwrite(path: Path, content: bytes) -> None:
    """Write a file the obvious way."""
    with open(path, "wb") as file:
        file.write(content)


def names_of_changes(write, folder: Path) -> list[str]:
    """What the changes are called that `write(path, content)` makes."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        changes = replace(write, folder, None)
        os.write(writer, "\n".join(changes.names).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        names = pipe.read().splitlines()
    os.waitpid(child, 0)
    return names


def replace(write, folder: Path, at: int | None) -> Changes:
    """Replace the content of a file, and die before change `at`."""
    changes = Changes(at)
    changes.begin()
    write(folder / "file", NEW)
    changes.end()
    return changes


def found_after(write, folder: Path, at: int) -> str:
    """What is in the file after a kill before change `at`: old, new, or what else."""
    for left in folder.iterdir():
        left.unlink()
    path = folder / "file"
    path.write_bytes(OLD)
    child = os.fork()
    if child == 0:
        replace(write, folder, at)
        os._exit(0)
    os.waitpid(child, 0)
    content = path.read_bytes()
    known = {OLD: "old", NEW: "new"}
    return known.get(content, f"LOST: {len(content)} of {len(NEW)} bytes")


def main(argv: list[str]) -> None:
    """Print the tables."""
    config.arguments(argv)
    for write in (overwrite, files.write_atomically):
        with tempfile.TemporaryDirectory() as folder:
            names = names_of_changes(write, Path(folder))
            print(f"{write.__name__}\n    killed before   a reader then finds")
            all_found = []
            for at, name in enumerate([*names, "(it ends)"]):
                found = found_after(write, Path(folder), at)
                left = [path.name for path in Path(folder).glob("*.tmp")]
                beside = f", and {left[0]} beside it" if left else ""
                print(f"    {at} {name:<13} {found}{beside}")
                all_found.append(found)
        if write is files.write_atomically:
            whole = set(all_found) <= {"old", "new"}
            config.require(whole, "write_atomically lost a file: a bug in this project")


if __name__ == "__main__":
    config.run(main)
