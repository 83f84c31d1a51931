"""Has no checksum: a file that is valid JSON counts as good.

Refused by check_damage.
"""

import json
import os
import re
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
        file.write(body)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_folder(folder)

    for old in checkpoints(folder)[:-KEEP]:
        old.unlink()
    for leftover in folder.glob("step-*.tmp"):
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
    try:
        step, state = json.loads(path.read_bytes())
    except ValueError:
        return None
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
