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
from pathlib import Path

KILL_AT = None  # a number from 0 to 5
SILENT_KILL_AT = None  # a number from 0 to 5


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


def save(folder, step, state):
    """Save a checkpoint. Keep the one before it, too, and few others."""
    raise NotImplementedError


def load(folder):
    """The newest good checkpoint as a tuple (step, state), or None if there is none."""
    raise NotImplementedError
