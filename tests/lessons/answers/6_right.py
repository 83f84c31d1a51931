"""Right, in another way: two slots that take turns, overwritten in place, never renamed."""

import hashlib
import os
import pickle

KILL_AT = 4
SILENT_KILL_AT = 3


def save(folder, step, state):
    """Overwrite the slot that does not hold the newest good checkpoint."""
    found = [read(slot) for slot in slots(folder)]
    steps = [-1 if entry is None else entry[0] for entry in found]
    target = slots(folder)[steps.index(min(steps))]
    content = pickle.dumps((step, state))
    content = hashlib.sha256(content).digest() + content
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        for first in range(0, len(content), 64):  # so that a kill can hit the middle
            os.write(descriptor, content[first : first + 64])
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def load(folder):
    """The newer of the good slots."""
    good = [entry for entry in map(read, slots(folder)) if entry is not None]
    return max(good, key=lambda entry: entry[0], default=None)


def slots(folder):
    """The paths of the two slots."""
    return [os.path.join(folder, "slot-a"), os.path.join(folder, "slot-b")]


def read(path):
    """What a slot holds, or None."""
    try:
        with open(path, "rb") as file:
            content = file.read()
    except FileNotFoundError:
        return None
    digest, content = content[:32], content[32:]
    return pickle.loads(content) if hashlib.sha256(content).digest() == digest else None
