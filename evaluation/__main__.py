"""Zero-shot evaluation of a model: the door to evaluation/zero_shot.py, whose settings these are.

    python -m evaluation runs/demo --tasks=guess.jsonl,notes.txt
    torchrun --nproc_per_node 4 -m evaluation runs/my1b --tasks=all --shots=5

Nothing else lives here: spawned processes cannot import from a `__main__.py`.
"""

import processes
from evaluation import zero_shot

__doc__ = f"{__doc__}\n{zero_shot.__doc__}"  # what --help prints

if __name__ == "__main__":
    processes.run(zero_shot.main)
