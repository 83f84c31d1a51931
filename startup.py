"""What the trainer does before PyTorch is there, whose import takes seconds: it says so, and takes signals as later.

    fsdp_train.py, first lines:    if __name__ == "__main__": startup.begin(sys.argv[1:])

Run `python startup.py configs/demo.py` to see the line. Read next: processes.py.
"""

import contextlib
import os
import signal
import sys

import config
from config import MPTConfig, TrainConfig, UserError

RESUME_ME = 75  # EX_TEMPFAIL of sysexits.h, as exit status: start this program again as it was


def begin(argv: list[str]) -> None:
    """Take signals, and announce the run on rank 0. Silent if `argv` asks for help or is wrong: `main` answers that."""
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, leave)
    if config.rank() > 0 or {"--help", "-h"} & set(argv):
        return
    with contextlib.suppress(UserError):
        _, cfg = config.load(argv, MPTConfig, TrainConfig)
        print(f"{cfg.run_dir}: loading PyTorch", flush=True)


def leave(number: int, frame) -> None:
    """Nothing is there to be saved yet."""
    os._exit(130 if number == signal.SIGINT else RESUME_ME)


if __name__ == "__main__":
    begin(sys.argv[1:])
