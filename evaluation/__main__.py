"""Zero-shot evaluation of a model, on one process or many: `python -m evaluation RUN`.

torchrun --nproc_per_node 4 -m evaluation runs/my1b --tasks=all --shots=5
"""

import processes
from evaluation import zero_shot  # all is there: spawned processes cannot import from a __main__.py

__doc__ = f"{__doc__}\n{zero_shot.__doc__}"  # what --help prints

if __name__ == "__main__":
    processes.run(zero_shot.main)
