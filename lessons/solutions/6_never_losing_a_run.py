"""Solution 6: one file per checkpoint, with a checksum, written aside and renamed.

    step-12.json    first line: crc32 of the rest; then one line of JSON: [step, state]

A checkpoint is one file, so at no moment is half of it new. It gets its name by a rename, which
happens as a whole or not at all. The checksum finds what a disk or a copy damaged.
"""

import json
import os
import re
import zlib
from pathlib import Path

# naive_save: 0 open state.json, 1 write, 2 close, 3 open step.json, 4 write, 5 close.
# Before 2, state.json is cut in half: json.loads fails. 1, 4 and 5 would do as well.
KILL_AT = 2
# Before 3, state.json is new and step.json still old. Both are valid JSON, and load returns them.
SILENT_KILL_AT = 3

KEEP = 3  # checkpoints; one more while the next is being written


def save(folder, step, state):
    """Write step-N.json aside, rename it, then remove what is old."""
    folder = Path(folder)
    body = json.dumps([step, state]).encode()
    path = folder / f"step-{step}.json"
    temporary = path.with_suffix(".tmp")

    with open(temporary, "wb") as file:
        file.write(b"%08x\n" % zlib.crc32(body))
        file.write(body)
        file.flush()  # from Python's buffer to the operating system
        os.fsync(file.fileno())  # from there to the disk
    # Only now: a rename that reaches the disk before the bytes do would name an empty file.
    os.replace(temporary, path)
    sync_folder(folder)  # the new name is an entry of the folder, which is on disk by this

    # Last, when the new checkpoint is safe. The order matters: if the old ones went first, a kill
    # between the two would leave nothing.
    for old in checkpoints(folder)[:-KEEP]:
        old.unlink()
    for leftover in folder.glob("step-*.tmp"):  # from saves that were killed
        leftover.unlink()


def load(folder):
    """The newest checkpoint whose checksum is right."""
    for path in reversed(checkpoints(Path(folder))):
        found = read(path)
        if found:
            return found
    return None


def read(path):
    """(step, state) of one file, or None if it is damaged."""
    checksum, _, body = path.read_bytes().partition(b"\n")
    if checksum != b"%08x" % zlib.crc32(body):
        return None
    step, state = json.loads(body)  # it is what was written, so this cannot fail
    return step, state


def checkpoints(folder):
    """The files step-N.json, oldest first. By number: as text, step-9 comes after step-10."""
    numbers = {}
    for name in os.listdir(folder):
        match = re.fullmatch(r"step-(\d+)\.json", name)
        if match:
            numbers[int(match[1])] = folder / name
    return [numbers[step] for step in sorted(numbers)]


def sync_folder(folder):
    """Wait until the folder's list of names is on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
