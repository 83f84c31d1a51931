"""What the trainer does before it imports PyTorch, which takes seconds: say so, obey signals, and
end if torchrun is killed.

    fsdp_train.py, first lines:    if __name__ == "__main__": startup.begin(sys.argv[1:])

Run `python -m lifecycle.startup configs/demo.py` to see the line. Read next: processes.py.
"""

import contextlib
import os
import platform
import signal
import threading
import time

import config
from config import MPTConfig, TrainConfig, UserError

RESUME_ME = 75  # EX_TEMPFAIL of sysexits.h, as exit status: start this program again as it was


def begin(argv: list[str]) -> None:
    """Obey signals and end with torchrun, as later; on rank 0 say what is loading.

    Says nothing if `argv` asks for help or is wrong: fsdp_train.main answers that.
    """
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, leave)
    end_with_torchrun()
    if config.rank() > 0 or {"--help", "-h"} & set(argv):
        return
    with contextlib.suppress(UserError, OSError):
        _, cfg = config.load(argv, MPTConfig, TrainConfig)
        print(f"{cfg.run_dir}: loading PyTorch", flush=True)


def leave(number: int, frame) -> None:
    """Nothing is there to be saved yet."""
    os._exit(130 if number == signal.SIGINT else RESUME_ME)


def end_with_torchrun() -> None:
    """If torchrun started this process, end when torchrun is gone: nobody else looks after it.

    Any other process is left alone: its parent is a shell, which may leave (nohup, disown).
    """
    looking = any(thread.name == "look_for_parent" for thread in threading.enumerate())
    if "TORCHELASTIC_RUN_ID" in os.environ and not looking:
        options = {"name": "look_for_parent", "args": [os.getppid()], "daemon": True}
        threading.Thread(target=look_for_parent, **options).start()


def look_for_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    end(f"{whoami(config.rank())} ends, since torchrun (process {parent}) is gone")


def end(words: str) -> None:
    """End this process from any thread."""
    config.say_error(words)
    os._exit(config.flushed(RESUME_ME))


def whoami(rank: int) -> str:
    return f"rank {rank} (process {os.getpid()} on {platform.node()})"


def demonstrate(argv) -> None:
    config.load(argv, MPTConfig, TrainConfig)  # answers --help and mistakes
    begin(argv)


if __name__ == "__main__":
    config.run(demonstrate)
