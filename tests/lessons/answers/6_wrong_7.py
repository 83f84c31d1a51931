"""Tidies up too much: whatever is no checkpoint is removed, notes.txt as well.

Refused by check_other_files.
"""

import json
import os
import re
import zlib
from pathlib import Path

KILL_AT = 2
SILENT_KILL_AT = 3

KEEP = 3


def save(folder, step, state):
    """Write step-N.json aside, rename it, then remove what is old."""
    folder = Path(folder)
    body = json.dumps([step, state]).encode()
    path = folder / f"step-{step}.json"
    temporary = path.with_suffix(".tmp")

    with open(temporary, "wb") as file:
        file.write(b"%08x\n" % zlib.crc32(body))
        file.write(body)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_folder(folder)

    for old in checkpoints(folder)[:-KEEP]:
        old.unlink()
    for leftover in set(folder.iterdir()) - set(checkpoints(folder)):
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
    step, state = json.loads(body)
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
