"""How every program here begins and ends: arguments, --help, one-line errors, exit statuses.

    0     success, or --help
    1     a bug: the traceback is printed. torchrun exits with 1 whatever its ranks exit with
    2     user error, missing file, full disk, too little memory: one line that says what to do
    75    the run is not finished, or not in its store: start it again as it was (fsdp_train.py)
    130   Ctrl-C
    141   the reader of the output is gone, as in `python plan.py ... | head -1`

    if __name__ == "__main__":
        program.run(main)      main(argv) may raise UserError or OSError

`processes.run` does the same for a program of many ranks. A program with settings reads argv by
`config.load`; one without settings reads it by `arguments`.
"""

import contextlib
import functools
import gc
import io
import json
import math
import os
import platform
import re
import resource
import shlex
import signal
import sys
import threading
import time

# How to install what requirements.txt leaves out, such as matplotlib for pictures.
EXTRA = "make setup-lessons (without make: pip install -r requirements-extra.txt)"

RESUME_ME = 75  # exit status "start me again as I was"; EX_TEMPFAIL in sysexits.h

# What libraries write when memory runs out, in errors of many classes.
OUT_OF_MEMORY = re.compile(
    "out.?of.?memory"  # torch's allocator, CUDA, HIP, Triton, NCCL
    "|alloc(ation)?_?failed|status_memory_error"  # cuBLAS, cuDNN, hipBLAS, MIOpen; rocBLAS
    "|failed to cuda (calloc|malloc|host alloc)"  # NCCL
    "|can't allocate memory|bad_alloc",  # on a CPU: torch, C++
    re.IGNORECASE,
)


class UserError(ValueError):
    """An error that the user can fix: one line from one rank, no traceback, exit status 2.

    on_all_ranks: all ranks raise it together, so rank 0 alone prints it.
    """

    status = 2

    def __init__(self, message: str, on_all_ranks: bool = False):
        super().__init__(message)
        self.on_all_ranks = on_all_ranks


class StartAgain(UserError):
    """An error that may be gone when the run is started again: exit status 75."""

    status = RESUME_ME


def require(condition: bool, message: str) -> None:
    """Raise `UserError(message)` unless the condition holds."""
    if not condition:
        raise UserError(message)


def shell(*words) -> str:
    """Words as a user types them into a shell: quoted where they hold spaces, quotes or a $."""
    return shlex.join(map(str, words))


def one_line(error: BaseException) -> str:
    """The message of an error without line breaks, at most 200 characters."""
    return " ".join(str(error).split())[:200]


def out_of_memory(error: BaseException) -> bool:
    """Is this error about memory, of an accelerator or of the CPU?"""
    if isinstance(error, MemoryError):
        return True
    # torch.OutOfMemoryError, AcceleratorError and DistBackendError are RuntimeErrors as well.
    return isinstance(error, RuntimeError) and bool(OUT_OF_MEMORY.search(str(error)))


# --------------------------------------------------------------------------------------------------
# The launcher's variables

OF_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
OF_SRUN = ("SLURM_PROCID", "SLURM_STEP_ID", "SLURM_NTASKS", "SLURM_LOCALID")
OF_MPI = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


def read_launcher() -> tuple[int, int, int, int]:
    """(global rank, global size, local rank, local size), as torchrun or srun set them.

    (0, 1, 0, 1) without a launcher. UserError if the variables do not fit together, or tell that
    this process was meant to be one of several.
    """
    env = os.environ
    if "RANK" in env:
        names = OF_TORCHRUN
        found = read_number("RANK"), read_number("WORLD_SIZE", 1)
        found += read_number("LOCAL_RANK", 0), read_number("LOCAL_WORLD_SIZE", 1)
    elif "SLURM_PROCID" in env and "SLURM_STEP_ID" in env:
        names = OF_SRUN
        size = read_number("SLURM_STEP_NUM_TASKS", read_number("SLURM_NTASKS", 1))
        nodes = read_number("SLURM_STEP_NUM_NODES", read_number("SLURM_NNODES", 1))
        if size == 1:
            return 0, 1, 0, 1
        local_size = size // max(1, nodes)
        found = read_number("SLURM_PROCID"), size, read_number("SLURM_LOCALID"), local_size
    else:
        # A batch script has SLURM_PROCID, too. In a shell of salloc one may well try something.
        of_batch = ("SLURM_NTASKS",) if "SLURM_PROCID" in env else ()
        fix = "start with srun or torchrun; one process alone: unset it, or srun -n 1"
        for name in ("WORLD_SIZE", *of_batch, *OF_MPI):
            require(read_number(name, 1) == 1, f"{name}={env.get(name)}: {fix}")
        return 0, 1, 0, 1
    rank, size, local_rank, local_size = found
    shown = ", ".join(f"{name}={env[name]}" for name in names if name in env)
    fits_here = local_rank < local_size <= size or "LOCAL_WORLD_SIZE" not in env
    fits = rank < size and fits_here
    problem = f"the environment has {shown}, which is no place among ranks"
    require(fits, f"{problem}: unset them, or start with srun or torchrun")
    return found


def read_number(name: str, default: int | None = None) -> int:
    """A whole number that a launcher has put into the environment. UserError if it is none."""
    text = os.environ.get(name, default)
    require(text is not None, f"{name} is not set: start with srun or torchrun")
    try:
        value = int(text)
    except ValueError:
        value = -1
    require(value >= 0, f"{name}={text!r} is no whole number: unset it, or start with torchrun")
    return value


def rank() -> int:
    """The global rank of this process, 0 if `read_launcher` fails, so that it is printed."""
    try:
        return read_launcher()[0]
    except UserError:
        return 0


# --------------------------------------------------------------------------------------------------
# Arguments


def arguments(argv: list[str], names: str = "", more: str = "") -> list[str]:
    """Check and return the argv of a program without settings.

    names: what it takes: "RUN_DIR", "[OUT.png]" (optional), "FILE ..." (one or more), or "".
    more: what else stands in the usage line.
    --help prints the program's docstring and exits. Raises UserError if arguments are missing,
    too many, or flags, or addresses where `names` has none.
    """
    if wants_help(argv):
        show_help()
    expected = names.split()
    fewest = sum(not name.startswith(("[", "...")) for name in expected)
    most = math.inf if "..." in expected else len(expected)

    has_flags = any(text.startswith("-") for text in argv)
    valid = fewest <= len(argv) <= most and not has_flags
    usage = f"usage: {command()} {names or '(no arguments)'} {more}"
    require(valid, usage.rstrip())
    if "://" not in names:
        require_local("the command line", argv)
    return argv


def require_local(name: str, value) -> None:
    """UserError if a text, or one of a list, is an address where a path of this machine belongs.

    Otherwise it would be a relative path: runs would be written into a folder called s3:.
    """
    for text in value if isinstance(value, list) else [value]:
        require(
            not isinstance(text, str) or "://" not in text,
            f"{name} has {quote(text)}, an address, in place of a path or name on this machine. "
            "Only --remote=s3://... (to keep a run in a store) and --data_dir=s3://... (to read "
            "prepared tokens from one) take addresses: copy anything else here first",
        )


def command() -> str:
    """How this program is started: `python plan.py`, `python -m lifecycle.plot`."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)  # set for `python -m`
    if spec is None:
        return f"python {shell(os.path.basename(sys.argv[0]))}"
    name = spec.name.removesuffix(".__main__")
    if name.startswith("bench."):
        name = name.replace(".", " ")  # bench/__main__.py starts it: python -m bench train
    return f"python -m {name}"


def wants_help(argv: list[str]) -> bool:
    """Whether the user asked for --help."""
    return "--help" in argv or "-h" in argv


def show_help(settings: str = "") -> None:
    """Print the running program's docstring and its settings on rank 0, then exit with 0."""
    if rank() == 0:
        docstring = sys.modules["__main__"].__doc__ or ""
        print(f"{docstring.strip()}\n\n{settings}".strip())
    raise SystemExit(0)


# --------------------------------------------------------------------------------------------------
# Exit


def print_error(words, head: str = "error") -> None:
    """Print `head: words` on standard error. If that fails, the exit status has to be enough."""
    with contextlib.suppress(OSError):
        # The newline in the same write: other ranks may print to the same file at this moment.
        print(f"{head}: {words}\n", end="", file=sys.stderr, flush=True)


def run(main) -> None:
    """Call `main(argv)`, then exit with a status from the table above.

    Any exception that is not a `user_error` is a bug and propagates. The program is no rank,
    whatever a launcher has left in the environment.
    """
    for name in (*OF_TORCHRUN, *OF_SRUN, *OF_MPI):
        os.environ.pop(name, None)  # nor are the processes that it starts
    escape_unprintable()
    status = flush(status_of(main))
    gc.freeze()  # the last garbage collection would visit every object of torch: half a second
    sys.exit(status)


def status_of(main, tell=print_error) -> int:
    """Call `main(argv)`; returns the exit status. Raises what is no error of the user.

    tell: is called with an error of the user, to print its line.
    """
    try:
        main(sys.argv[1:])
    except SystemExit as leaving:
        if isinstance(leaving.code, str):
            print_error(leaving.code)
        return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whatever read our output has exited
        return 141
    except Exception as error:
        mistake = user_error(error)
        if mistake is None:
            raise
        tell(mistake)
        return getattr(mistake, "status", 2)
    return 0


def user_error(error: BaseException) -> BaseException | None:
    """The error as one that the user can fix, with exit status 2. None if it is not one."""
    if isinstance(error, UserError | OSError):  # OSError: a full disk, a missing permission
        return error
    if out_of_memory(error):
        return UserError(
            f"out of memory ({one_line(error)}): use a smaller model or batch, more devices, or a "
            "device that no other program uses"
        )
    if "Duplicate GPU detected" in str(error):  # by NCCL
        return UserError(
            "two ranks use one GPU: start one rank per GPU (--nproc_per_node), or show each rank "
            "its own (--gpus-per-task=1)"
        )
    return None


def escape_unprintable() -> None:
    """Print as \\xfc what standard output cannot hold, such as a name with an umlaut in ASCII.

    A stream of which the caller has chosen the error handler stays as it is, as does standard
    error, which escapes already.
    """
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def flush(status):
    """Flush standard output and error. Returns the exit status.

    That is `status`; but where it is 0 and flushing fails, 141 (the reader of the output is gone)
    or 2 (the disk is full). A status other than 0 is right even if its error cannot be printed.
    """
    try:
        for stream in filter(None, (sys.stdout, sys.stderr)):  # None: closed by the caller
            stream.flush()
    except BrokenPipeError:
        silence()
        return status or 141
    except OSError as error:
        print_error(f"standard output: {error}")
        silence()
        return status or 2
    return status


def silence() -> None:
    """Send further output to /dev/null. Otherwise the interpreter's own flush at exit fails too."""
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in filter(None, (sys.stdout, sys.stderr)):
        os.dup2(null, stream.fileno())


@functools.cache
def say_once(head: str, words: str) -> None:
    """Print `head: words` on standard error, on rank 0, only the first time in a process."""
    if rank() == 0:
        print_error(words, head)


def quote(value) -> str:
    """A value as messages show it, at most 80 characters."""
    if type(value) is int and abs(value) >= 10**60:
        return "a huge number"  # of which Python refuses to print more than 4,300 digits
    return (f"{value:,}" if type(value) is int else repr(value))[:80]


def table(heads, rows) -> str:
    """Lines of a table for people: columns as wide as their widest cell, two spaces apart.

    heads: a text per column. rows: a cell per column, text or what str makes of it. A column that
    holds numbers, with or without a unit ("12.5 GB/s"), is aligned to the right.
    """
    rows = [[str(cell) for cell in row] for row in rows]
    columns = list(zip(heads, *rows, strict=True))
    lines = [""] * (len(rows) + 1)
    for column in columns:
        width = max(map(len, column))
        numeric = all(cell[:1] in "+-.0123456789" for cell in column[1:])
        for number, cell in enumerate(column):
            lines[number] += (cell.rjust(width) if numeric else cell.ljust(width)) + "  "
    return "\n".join(line.rstrip() for line in lines)


# --------------------------------------------------------------------------------------------------
# A process among others


def sleep_while_waiting() -> None:
    """Before PyTorch is imported: its CPU threads go to sleep soon when they wait for each other.

    By default a waiting thread polls for milliseconds. On a busy machine that takes the core from
    the thread it waits for, and a step takes ten times as long. 1,000 turns of polling are what
    GNU's OpenMP takes by itself if it has more threads than cores.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def end_with_torchrun() -> None:
    """If torchrun started this process, watch torchrun, and end this process when it is gone.

    Processes that a shell started are left alone: they may outlive it (nohup, disown).
    Calling it again does nothing.
    """
    watching = any(thread.name == "watch_parent" for thread in threading.enumerate())
    if "TORCHELASTIC_RUN_ID" in os.environ and not watching:
        thread = threading.Thread(target=watch_parent, args=[os.getppid()], name="watch_parent")
        thread.daemon = True
        thread.start()


def watch_parent(parent: int) -> None:
    """End this process within a second after the process `parent` is gone."""
    while os.getppid() == parent:
        time.sleep(1)
    end(f"{whoami(rank())} ends, since torchrun (process {parent}) is gone")


def end_torchrun() -> None:
    """Stop torchrun, so that it does not restart this rank. Does nothing without --max-restarts."""
    with contextlib.suppress(UserError):  # it is about another error that this process ends
        restarts_done = read_number("TORCHELASTIC_RESTART_COUNT", 0)
        restarts_left = read_number("TORCHELASTIC_MAX_RESTARTS", 0) - restarts_done
        parent = os.getppid()
        if restarts_left > 0 and read_number("LOCAL_RANK") == 0 and parent > 1:
            os.kill(parent, signal.SIGTERM)


def raise_file_limit() -> int:
    """Raise this process's limit of open files as far as it may. Returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = math.inf if hard == resource.RLIM_INFINITY else hard
    for wanted in (2**20, 2**16, 10_240):
        limit = min(wanted, most)
        if soft < limit:
            with contextlib.suppress(ValueError, OSError):  # macOS has another limit below `hard`
                resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
                return limit
    return soft


def end_with_parent() -> None:
    """In a worker process: end when the process that started it is killed."""
    import multiprocessing  # slow to import, and most programs have no workers

    def wait():
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


async def answer_apart(module: str, given: list, seconds: float):
    """What `python -m MODULE` answers to values that JSON can hold: see `answer`.

    For what strangers have sent: that process gives way to others, and ends with this call.
    TimeoutError if it takes more seconds of a processor, RuntimeError if it fails.
    """
    import asyncio  # slow to import, and servers alone need it

    pipe = asyncio.subprocess.PIPE
    words = ["nice", "-n5", sys.executable, "-m", module, str(seconds)]
    root = os.path.dirname(os.path.abspath(__file__))
    process = await asyncio.create_subprocess_exec(*words, cwd=root, stdin=pipe, stdout=pipe)
    try:
        found, _ = await process.communicate(json.dumps(given).encode())
    finally:
        if process.returncode is None:
            process.kill()
    if process.returncode == -signal.SIGPROF:
        raise TimeoutError
    if process.returncode:
        raise RuntimeError(f"{module} fails: the log says why")
    return json.loads(found)


def answer(work) -> None:
    """Answer standard input, as `answer_apart` asks. The kernel ends what takes too long."""
    signal.setitimer(signal.ITIMER_PROF, float(sys.argv[1]))
    print(json.dumps(work(*json.load(sys.stdin))))


def end(words: str) -> None:
    """End this process from any thread, with an error line and the status "start me again"."""
    print_error(words)
    os._exit(flush(RESUME_ME))


def whoami(rank: int) -> str:
    """This process in a message. rank: its global rank."""
    return f"rank {rank} (process {os.getpid()} on {platform.node()})"
