"""The process in which a reader's answer runs. The project cannot be imported there.

`lessons/answers.py` starts one for each answer that `python -m lessons check 3` checks, and sends
it requests through a pipe:

    ("value", name)                      a constant of the answer
    ("call", function, args, keywords)   the result of a function
    ("measure", ...)                     the same, and the most bytes that its tensors held at once
    ("kill", ..., at)                    the same in a copy of the process, which kills itself just
                                         before its change of a file number `at`; None names them
    ("join", rank, size, store)          join other such processes through gloo

It sends back ("done", result), ("todo", what is not written yet) or ("wrong", what happened).

It is a fork of a process that has imported torch, so it starts at once. `Changes` counts what the
interpreter reports: files that are opened for writing, renamed or removed, and calls such as
`write`, `flush`, `close` and `os.fsync`. A power cut may leave any part of what was being written.
So a process that dies in the middle of a file keeps half of what is in it.
"""

import importlib.util
import io
import linecache
import os
import pickle
import resource
import signal
import stat
import sys
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WRITES = {"write", "writelines", "flush", "close", "truncate", "__exit__", "tofile"}
SYSTEM_CALLS = {"write", "fdatasync", "ftruncate"}  # of os; the rest is in EVENTS
FSYNC = os.fsync
EVENTS = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate"}


def serve(pipe, path: str) -> None:
    """Load the answer in the file `path`, then do what is asked until the pipe is closed."""
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the checker, which ends this process
    torch.set_num_threads(1)
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before an answer imports triton
    close_the_project(Path(path).resolve().parent)
    answer = None
    try:
        while True:
            seconds, *request = pickle.loads(pipe.recv_bytes())
            limit_processor_seconds(seconds)
            answer, reply = reply_to(request, answer, path)
            pipe.send_bytes(packed(reply))
    except (EOFError, OSError):
        os._exit(0)  # gloo may abort while the interpreter shuts down


def reply_to(request: list, answer, path: str) -> tuple:
    """(The answer, loaded if it was None; the reply to a request)."""
    kind, *rest = request
    try:
        answer = answer or load(path)
        return answer, ("done", without_gradients(DO[kind](answer, *rest)))
    except NotImplementedError as error:
        return answer, ("todo", str(error))
    except BaseException as error:
        return answer, ("wrong", what_happened(error, path))


def packed(reply: tuple) -> bytes:
    """The reply as bytes, or an error if its result cannot be sent."""
    try:
        return pickle.dumps(reply)
    except Exception as error:
        name = type(reply[1]).__name__
        return pickle.dumps(("wrong", f"returned a {name}, which cannot be sent back: {error}"))


def load(path: str):
    """The answer as a module."""
    spec = importlib.util.spec_from_file_location("answer", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["answer"] = module  # so that pickle finds what it defines
    spec.loader.exec_module(module)
    return module


def limit_processor_seconds(seconds: float) -> None:
    """From now on this process may use so many more, then the system ends it (SIGXCPU)."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = int(used.ru_utime + used.ru_stime + seconds) + 1
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (limit, most))


# --------------------------------------------------------------------------------------------------
# What an answer may not do: use the code that it rebuilds


def close_the_project(own_folder: Path) -> None:
    """Forget the project's modules, and refuse to open its files. `own_folder` stays open."""
    for name, module in list(sys.modules.items()):
        if is_of_the_project(getattr(module, "__file__", None) or "", own_folder):
            del sys.modules[name]

    def refuse(event, arguments):
        if event == "open" and is_of_the_project(arguments[0], own_folder):
            name = os.path.relpath(os.fsdecode(arguments[0]), ROOT)
            raise PermissionError(f"an answer cannot use the project's {name}: rebuild it")

    sys.addaudithook(refuse)


def is_of_the_project(path, own_folder: Path) -> bool:
    """Whether a path is one of the project's Python files, compiled or not."""
    if not isinstance(path, str | bytes | os.PathLike):
        return False
    path = os.path.realpath(os.fsdecode(path))
    is_python = path.endswith((".py", ".pyc"))
    if not is_python or not path.startswith(f"{ROOT}{os.sep}"):
        return False
    return not path.startswith((f"{ROOT}{os.sep}.venv", f"{own_folder}{os.sep}"))


# --------------------------------------------------------------------------------------------------
# What is asked


def value(answer, name: str):
    """A constant of the answer."""
    found = getattr(answer, name, NotImplemented)
    if found is NotImplemented:
        raise CallFailed(f"the answer has no {name}")
    return found


def call(answer, name: str, args, keywords):
    """The result of one of its functions."""
    return value(answer, name)(*args, **keywords)


def measure(answer, name: str, args, keywords) -> tuple:
    """(Its result, the most bytes that tensors made meanwhile held at once).

    Counted by torch's profiler from the allocator's own events.
    """
    from torch.profiler import ProfilerActivity, profile

    errors = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)  # the profiler prints lines of its own
    try:
        cpu = [ProfilerActivity.CPU]
        with profile(activities=cpu, profile_memory=True, acc_events=True) as record:
            result = call(answer, name, args, keywords)
    finally:
        os.dup2(errors, 2)
        os.close(errors)
    events = [e for e in record.profiler.kineto_results.events() if e.name() == "[memory]"]
    current = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        current += event.nbytes()
        peak = max(peak, current)
    return result, peak


def join(answer, rank: int, size: int, store: str) -> None:
    """Become one of `size` ranks, which find each other through the file `store`."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)


def kill(answer, name: str, args, keywords, at: int | None):
    """Call the function in a copy of this process that dies just before change `at` of a file.

    Returns whether it died. With at=None: what the changes are called that the function makes.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        run_to_the_kill(answer, writer, name, args, keywords, at)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        if os.WTERMSIG(status) == signal.SIGKILL:
            return True
        raise RuntimeError(f"{name} died of signal {os.WTERMSIG(status)}")
    kind, result = pickle.loads(said)
    if kind == "todo":
        raise NotImplementedError(result)
    if kind == "wrong":
        raise CallFailed(result)
    return result if at is None else False


def run_to_the_kill(answer, writer: int, name: str, args, keywords, at: int | None) -> None:
    """The life of that copy."""
    changes = Changes(at)
    try:
        function = value(answer, name)
        changes.begin()
        function(*args, **keywords)
        changes.end()
        reply = "done", changes.names
    except NotImplementedError as error:
        changes.end()
        reply = "todo", str(error)
    except BaseException as error:
        changes.end()
        reply = "wrong", what_happened(error, answer.__file__)
    os.write(writer, pickle.dumps(reply))
    os._exit(0)


class Changes:
    """Counts this process's changes of files. Before number `at`, it kills the process.

    names   what each change so far is called: open, write, close, rename, fsync file, ...
    """

    def __init__(self, at: int | None):
        self.names, self.at, self.active, self.file = [], at, False, None
        sys.addaudithook(self.hear)

    def begin(self) -> None:
        """Count from here on."""
        self.active = True
        os.fsync = self.fsync  # a profiler sees the call, but not of which file
        sys.setprofile(self.see)

    def end(self) -> None:
        """Count no longer."""
        sys.setprofile(None)
        os.fsync = FSYNC
        self.active = False

    def fsync(self, file) -> None:
        """os.fsync, which is a change of a file, too: the kind of file is in its name."""
        state = os.fstat(file if isinstance(file, int) else file.fileno())
        kind = "file" if state.st_size else "empty file"  # if nothing was flushed before
        self.before_a_change(f"fsync {'folder' if stat.S_ISDIR(state.st_mode) else kind}")
        FSYNC(file)

    def hear(self, event: str, arguments: tuple) -> None:
        """Audit events: files opened for writing, and renames."""
        if self.active and (event in EVENTS or (event == "open" and opens_for_writing(arguments))):
            self.before_a_change(event.removeprefix("os."))

    def see(self, frame, event: str, function) -> None:
        """Calls of C functions, among them the methods of open files."""
        if event != "c_call":
            return
        owner, name = getattr(function, "__self__", None), function.__name__
        if isinstance(owner, io.IOBase) and name in WRITES and not owner.closed:
            if owner.writable() and owner.fileno() > 2:
                self.file = owner
                self.before_a_change("close" if name == "__exit__" else name)
        elif getattr(owner, "__name__", "") == "posix" and name in SYSTEM_CALLS:
            self.before_a_change(name)

    def before_a_change(self, name: str) -> None:
        """Count one. At the chosen one, cut the file that is being written, and die."""
        if len(self.names) == self.at:
            self.end()
            if self.file is not None and not self.file.closed:
                self.file.flush()
                size = os.fstat(self.file.fileno()).st_size
                os.ftruncate(self.file.fileno(), size // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        self.names.append(name)


def opens_for_writing(arguments: tuple) -> bool:
    """Whether the arguments of an audit event `open` (path, mode, flags) can change the file."""
    _, mode, flags = arguments
    if isinstance(mode, str):
        return any(letter in mode for letter in "wax+")
    return bool((flags or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


class CallFailed(Exception):
    """A call that failed, for a reason that the message says in full."""


DO = {"value": value, "call": call, "measure": measure, "join": join, "kill": kill}


# --------------------------------------------------------------------------------------------------
# Results and errors


def without_gradients(result):
    """The same with tensors detached, also in lists, tuples and dictionaries."""
    if hasattr(result, "detach"):
        return result.detach()
    if type(result) in (list, tuple):
        return type(result)(map(without_gradients, result))
    if type(result) is dict:
        return {key: without_gradients(inner) for key, inner in result.items()}
    return result


def what_happened(error: BaseException, path: str) -> str:
    """An error in one line, with the last line of the answer that led to it."""
    if isinstance(error, CallFailed):
        return str(error)
    if isinstance(error, SyntaxError):
        return f"Python cannot read it: {error}"
    text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    calls = traceback.walk_tb(error.__traceback__)
    lines = [line for frame, line in calls if frame.f_code.co_filename == path]
    if not lines:
        return text
    return f"{text} (line {lines[-1]}: {linecache.getline(path, lines[-1]).strip()})"


def main(argv: list[str]) -> None:
    """Say what this file is for."""
    import program  # here: an answer's process must not import the project

    program.arguments(argv)
    print(__doc__)


if __name__ == "__main__":
    import program

    program.run(main)
