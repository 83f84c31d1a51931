"""What the trainer does before it imports PyTorch, which takes seconds: say so, obey signals, and
end if torchrun is killed.

    fsdp_train.py, first lines:    if __name__ == "__main__": startup.begin(sys.argv[1:])

Run `python -m lifecycle.startup configs/demo.py` to see the line. Read next: lifecycle/runlog.py.
"""

import contextlib
import os
import signal

import config
import program
from config import MPTConfig, TrainConfig, UserError


def begin(argv: list[str]) -> None:
    """Obey signals and end with torchrun, as later; on rank 0 say what is loading.

    Says nothing if `argv` asks for help or is wrong: fsdp_train.main answers that.
    """
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, leave)
    program.end_with_torchrun()
    if config.rank() > 0 or config.wants_help(argv):
        return
    with contextlib.suppress(UserError, OSError):
        _, cfg = config.load(argv, MPTConfig, TrainConfig)
        print(f"{cfg.run_dir}: loading PyTorch", flush=True)


def leave(number: int, frame) -> None:
    """Nothing is there to be saved yet."""
    os._exit(130 if number == signal.SIGINT else program.RESUME_ME)


def demonstrate(argv) -> None:
    config.load(argv, MPTConfig, TrainConfig)  # answers --help and mistakes
    begin(argv)


if __name__ == "__main__":
    config.run(demonstrate)
