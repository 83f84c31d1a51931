"""How every program here begins and ends: its arguments, --help, an error in one line, the exit status.

    0     done, or --help
    1     a bug: the traceback is printed. torchrun ends with 1 whatever its ranks ended with
    2     your mistake, a file that is missing, a full disk: one line that says what to do
    75    the run is not finished: start it again as it was (fsdp_train.py under torchrun or SLURM)
    130   Ctrl-C
    141   the reader of the output has left, as in `python plan.py ... | head -1`; a shell reports the same of `cat`

    if __name__ == "__main__":
        program.run(main)      main(argv) may raise UserError or OSError

`processes.run` does the same for a program of many ranks. Programs with settings call `config.load`,
which knows --help; those without call `arguments`. Run `python program.py A` to see a mistake. Read next: config.py.
"""

import contextlib
import math
import os
import platform
import signal
import sys
import threading
import time

RESUME_ME = 75  # EX_TEMPFAIL of sysexits.h, as exit status: start this program again as it was


class UserError(ValueError):
    """A mistake that the user can fix: shown as one line, from one rank, without a traceback, exit status 2."""

    def __init__(self, message: str, everywhere: bool = False):
        super().__init__(message)
        self.everywhere = everywhere  # do all ranks raise it together?


def require(condition: bool, message: str) -> None:
    """Raise `UserError(message)` unless the condition holds."""
    if not condition:
        raise UserError(message)


def one_line(error: BaseException) -> str:
    """What an error says, without line breaks, 200 characters at most."""
    return " ".join(str(error).split())[:200]


def rank() -> int:
    """The number of this process among those of the run, as torchrun or SLURM say; 0 when alone."""
    return int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")))


# ---------------------------------------------------------------------------------------------------------------------
# Arguments


def arguments(argv: list[str], names: str = "") -> list[str]:
    """argv of a program without settings. `names` says what it takes: "RUN_DIR", "[OUT.png]", "FILE ...", or nothing.

    --help prints the program's docstring and exits. Raises UserError if arguments are missing or unknown.
    """
    if wants_help(argv):
        show_help()
    wanted = names.split()
    least = sum(not name.startswith(("[", "...")) for name in wanted)
    most = math.inf if "..." in wanted else len(wanted)
    flags = [text for text in argv if text.startswith("-")]
    fine = least <= len(argv) <= most and not flags
    require(fine, f"usage: {command()} {names or '(no arguments)'}")
    return argv


def command() -> str:
    """How this program is started: `python plan.py`, `python -m lifecycle.plot`."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)  # of a module that was started by -m
    if spec is None:
        return f"python {os.path.basename(sys.argv[0])}"
    name = spec.name.removesuffix(".__main__")
    if name.startswith("bench."):
        name = name.replace(".", " ")  # python -m bench table: bench/__main__.py is the door
    return f"python -m {name}"


def wants_help(argv: list[str]) -> bool:
    return "--help" in argv or "-h" in argv


def show_help(settings: str = "") -> None:
    """Print the docstring of the program that runs, and its settings, on one rank. Then exit with 0."""
    if rank() == 0:
        about = sys.modules["__main__"].__doc__ or ""
        print(f"{about.strip()}\n\n{settings}".strip())
    raise SystemExit(0)


# ---------------------------------------------------------------------------------------------------------------------
# The end


def run(main) -> None:
    """Call `main(argv)`, then exit with one of the statuses above. Rank 0 prints the line of a UserError or OSError."""
    status = 0
    try:
        main(sys.argv[1:])
    except SystemExit as leaving:
        status = leaving.code
    except BrokenPipeError:
        status = 141
    except (UserError, OSError) as error:  # OSError: a full disk, a missing permission
        if rank() == 0:
            say_error(error)
        status = 2
    except KeyboardInterrupt:
        status = 130
    status = flushed(status)
    if status:
        sys.exit(status)


def flushed(status):
    """Write what is left of the output. Returns `status`; in place of 0, 141 if the reader of the output has left, or
    2 if the disk is full."""
    try:
        for stream in filter(
            None, (sys.stdout, sys.stderr)
        ):  # None: closed by the caller, as by `>&-`
            stream.flush()
    except OSError as error:
        left = isinstance(error, BrokenPipeError)
        if not left:
            say_error(f"standard output: {error}")
        silence()
        return status or (141 if left else 2)
    return status


def silence() -> None:
    """Send all further output to /dev/null, or the interpreter's own flush at exit fails, too."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in filter(None, (sys.stdout, sys.stderr)):
        os.dup2(nowhere, stream.fileno())


def say_error(words, head: str = "error") -> None:
    """One line. If nobody can read it (a full disk, a reader that has left), the exit status must do."""
    with contextlib.suppress(OSError):
        print(f"{head}: {words}", file=sys.stderr, flush=True)


# --------------------------------------------------------------------------------------------------
# Ranks: one process of several


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
    end(f"{whoami(rank())} ends, since torchrun (process {parent}) is gone")


def end_torchrun() -> None:
    """Stop torchrun, so that it does not restart this rank. Does nothing without --max-restarts."""
    env = os.environ
    restarts_done = int(env.get("TORCHELASTIC_RESTART_COUNT", 0))
    restarts_left = int(env.get("TORCHELASTIC_MAX_RESTARTS", 0)) - restarts_done
    parent = os.getppid()
    if restarts_left > 0 and env["LOCAL_RANK"] == "0" and parent > 1:
        os.kill(parent, signal.SIGTERM)


def end_with_parent() -> None:
    """Worker processes end when the one that started them is killed."""
    import multiprocessing  # here: programs that answer at once have no workers

    def wait():
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def end(words: str) -> None:
    """End this process from any thread."""
    say_error(words)
    os._exit(flushed(RESUME_ME))


def whoami(rank: int) -> str:
    return f"rank {rank} (process {os.getpid()} on {platform.node()})"


def demonstrate(argv) -> None:
    print(f"two arguments: {arguments(argv, 'A B')}")


if __name__ == "__main__":
    run(demonstrate)
