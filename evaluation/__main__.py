"""Zero-shot evaluation of a model, on one process or many: `python -m evaluation RUN`.

torchrun --nproc_per_node 4 -m evaluation runs/my1b --tasks=all --shots=5
"""

import program

if __name__ == "__main__":  # before PyTorch is imported
    program.sleep_while_waiting()

import processes
from evaluation import zero_shot  # not in this file: spawned processes cannot import a __main__

__doc__ = f"{__doc__}\n{zero_shot.__doc__}"  # printed by --help

if __name__ == "__main__":
    processes.run(zero_shot.main)
