"""What the trainer does before it imports PyTorch, which takes seconds: say so, and obey signals.

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
    """Obey signals as later; on rank 0 say what is loading.

    Says nothing if `argv` asks for help or is wrong: fsdp_train.main answers that.
    """
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, leave)
    if config.rank() > 0 or {"--help", "-h"} & set(argv):
        return
    with contextlib.suppress(UserError, OSError):
        _, cfg = config.load(argv, MPTConfig, TrainConfig)
        print(f"{cfg.run_dir}: loading PyTorch", flush=True)


def leave(number: int, frame) -> None:
    """Nothing is there to be saved yet."""
    os._exit(130 if number == signal.SIGINT else RESUME_ME)


if __name__ == "__main__":
    begin(sys.argv[1:])
