"""Exercise 6: break a naive checkpointer with a well-timed kill; write one that survives fifty.

    python -m lessons check 6

A run of the checkpointer is a folder and two functions:

    save(folder, step, state)    when it returns, this checkpoint is on disk
    load(folder)                 (step, state) of the newest good checkpoint, or None

    folder   path of an existing folder, a string
    step     int, the number of steps done
    state    dict of names and lists of floats, such as {"weights": [0.5, -1.25], "momentum": [0.0]}

How the checker kills. It counts the changes of files that a call makes: a file is opened for
writing, written, flushed, closed, renamed, removed; os.fsync counts too. `naive_save` below makes
six: number 0 is the first `open`, number 5 the last `close`. A kill at n stops the process just
before number n: the changes 0 to n - 1 are done, and n is not. A file that is open then keeps the
first half of the bytes given to write(), flushed or not, as may happen in a power failure.

Part 1. KILL_AT: the number of the change before which a kill, during the second `naive_save`, makes
    `naive_load` fail or return something that was never saved.
Part 2. SILENT_KILL_AT: the number of the change before which a kill makes `naive_load` return,
    without an error, what was never saved. This is the worse one: nobody notices.
Part 3. Write `save` and `load` so that

    - whatever the moment of the kill, `load` returns the last save that had returned, or a complete
      newer one, with exactly its numbers
    - if one file of the newest checkpoint is damaged (one byte differs, or it is cut short), `load`
      notices that, and returns the checkpoint before it
    - after such a loss the run repeats the lost step, so the same step is saved again
    - what a killed `save` leaves behind, and files that are not yours (notes.txt), do no harm;
      those that are not yours stay
    - the folder holds at most six times the bytes of one checkpoint, however many were saved and
      however many saves were killed
    - after `save` has returned, a power failure loses nothing: the bytes and the names of the files
      are on disk, not only in the memory of the operating system. Use os.fsync: the order of the
      changes is checked (section 4 of the lesson)

The standard library is enough: json, os, pathlib, zlib (crc32) or hashlib.
"""

import json
import os
import re
import zlib
from pathlib import Path

# --- in the stub: KILL_AT = None  # a number from 0 to 5
# naive_save: 0 open state.json, 1 write, 2 close, 3 open step.json, 4 write, 5 close.
# Before 2, state.json is cut in half: json.loads fails. 1, 4 and 5 would do as well.
KILL_AT = 2
# ---
# --- in the stub: SILENT_KILL_AT = None  # a number from 0 to 5
# Before 3, state.json is new and step.json still old. Both are valid JSON, and load returns them.
SILENT_KILL_AT = 3
# ---


def naive_save(folder, step, state):
    """Write state.json and step.json. Leave this function as it is."""
    with open(f"{folder}/state.json", "w") as file:
        file.write(json.dumps(state))
    with open(f"{folder}/step.json", "w") as file:
        file.write(json.dumps(step))


def naive_load(folder):
    """(step, state), or None if nothing was saved. Leave this function as it is."""
    if not Path(folder, "step.json").exists():
        return None
    state = json.loads(Path(folder, "state.json").read_text())
    step = json.loads(Path(folder, "step.json").read_text())
    return step, state


# --- in the stub:
# One file per checkpoint, with a checksum, written aside and renamed:
#
#     step-12.json    first line: crc32 of the rest; then one line of JSON: [step, state]
#
# A checkpoint is one file, so at no moment is half of it new. It gets its name by a rename, which
# happens as a whole or not at all. The checksum finds what a disk or a copy damaged.
KEEP = 3  # checkpoints; one more while the next is being written
# ---


def save(folder, step, state):
    """Save a checkpoint. Keep the one before it, too, and few others."""
    # --- in the stub: raise NotImplementedError
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
    # ---


def load(folder):
    """The newest good checkpoint as a tuple (step, state), or None if there is none."""
    # --- in the stub: raise NotImplementedError
    for path in reversed(checkpoints(Path(folder))):
        found = read(path)
        if found:
            return found
    return None
    # ---


# --- in the stub:
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


# ---
