"""What the trainer does before it imports PyTorch, which takes seconds.

It says what is loading, handles signals, and exits if torchrun is killed.

    if __name__ == "__main__":           # the first lines of fsdp_train.py
        startup.begin(sys.argv[1:])

Run `python -m lifecycle.startup configs/demo.py` to see the line that it prints.
"""

import contextlib
import os
import signal

import config
import program
from config import MPTConfig, TrainConfig, UserError


def begin(argv: list[str]) -> None:
    """Handle signals, watch torchrun, and on global rank 0 print that PyTorch is loading.

    Prints nothing for --help and for wrong arguments: fsdp_train.main answers these.
    """
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, exit_now)
    program.end_with_torchrun()
    if config.rank() > 0 or config.wants_help(argv):
        return
    with contextlib.suppress(UserError, OSError):
        _, cfg = config.load(argv, MPTConfig, TrainConfig)
        print(f"{cfg.run_dir}: loading PyTorch", flush=True)


def exit_now(number: int, frame) -> None:
    """Signal handler: there is nothing to save yet."""
    os._exit(130 if number == signal.SIGINT else program.RESUME_ME)


def demonstrate(argv) -> None:
    """Answer --help and wrong arguments, else print the line."""
    config.load(argv, MPTConfig, TrainConfig)
    begin(argv)


if __name__ == "__main__":
    config.run(demonstrate)
