"""The process in which a reader's answer runs. The project cannot be imported there.

`lessons/answers.py` starts one for each answer that `python -m lessons check 3` checks, and sends
it requests through a pipe:

    ("load",)                            the first request: import the file
    ("value", name)                      a constant of the answer
    ("call", function, args, keywords)   the result of a function
    ("measure", ...)                     the same, and the most bytes that its tensors held at once
    ("spoil", ...)                       the same, but what its Triton kernels write is overwritten
    ("kill", ..., at)                    the same in a copy of the process, which kills itself just
                                         before its change of a file number `at`; None names them
    ("join", rank, size, store)          join other such processes through gloo

It sends back ("done", result), ("todo", what is not written yet), ("wrong", what happened) or
("not loaded", what is wrong with the file). Of what the answer prints it lets 20 kB through.

It is a fork of a process that has imported torch, so it starts at once. `Changes` counts what the
interpreter reports: files that are opened for writing, renamed or removed, and calls such as
`write`, `flush`, `close` and `os.fsync`. A power cut may leave any part of what was being written.
So a process that dies in the middle of a file keeps half of what is in it.
"""

import dis
import importlib.util
import io
import linecache
import os
import pickle
import posix
import resource
import signal
import stat
import sys
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WRITES = {"write", "writelines", "flush", "close", "truncate", "__exit__", "tofile"}
SYSTEM_CALLS = {"write", "fdatasync", "ftruncate", "sync"}  # of os; the rest is in EVENTS
FSYNC = os.fsync
F_FULLFSYNC = 51  # of fcntl, on a Mac
EVENTS = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate"}
NEW_PROCESSES = {  # audit events
    "os.fork", "os.forkpty", "os.exec", "os.posix_spawn", "os.spawn", "os.system", "pty.spawn",
    "subprocess.Popen",
}  # fmt: skip
MOST_PRINTED = 20_000  # characters


def serve(pipe, path: str) -> None:
    """Do what is asked of the answer in the file `path`, until the pipe is closed."""
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the checker, which ends this process
    torch.set_num_threads(1)
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before an answer imports triton
    os.fsync = posix.fsync = fsync  # before an answer gives it another name
    sys.stdout, sys.stderr = Capped(sys.stdout), Capped(sys.stderr)
    close_the_project(Path(path).resolve())
    answer = None
    try:
        while True:
            seconds, *request = pickle.loads(pipe.recv_bytes())
            limit_processor_seconds(seconds)
            answer, reply = reply_to(request, answer, path)
            sys.stdout.flush()  # what it printed comes before what is said of it
            pipe.send_bytes(packed(reply))
    except (EOFError, OSError):
        os._exit(0)  # gloo may abort while the interpreter shuts down


def reply_to(request: list, answer, path: str) -> tuple:
    """(The answer, loaded if that is the request; the reply to the request)."""
    kind, *rest = request
    try:
        if kind == "load":
            return load(path), ("done", None)
        return answer, ("done", without_gradients(DO[kind](answer, *rest)))
    except BaseException as error:
        kind_of_reply, message = failure(error, path)
        if kind == "load" and kind_of_reply == "wrong":
            return None, ("not loaded", why_not_loaded(error, path))
        return answer, (kind_of_reply, message)


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


class Capped:
    """A text file that passes on what is written to it, but no more than MOST_PRINTED of it."""

    def __init__(self, file):
        self.file, self.left = file, MOST_PRINTED

    def write(self, text: str) -> int:
        """Pass on what there is room for; once there is none, say so."""
        if self.left > 0:
            self.file.write(text[: self.left])
            self.left -= len(text)
            if self.left <= 0:
                size = MOST_PRINTED // 1000
                self.file.write(f"\n[it prints more than {size} kB: the rest is left out]\n")
        return len(text)

    def writelines(self, lines) -> None:
        """Write them all."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str):
        return getattr(self.file, name)


def limit_processor_seconds(seconds: float) -> None:
    """From now on this process may use so many more, then the system ends it (SIGXCPU)."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = int(used.ru_utime + used.ru_stime + seconds) + 1
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (limit, most))


# --------------------------------------------------------------------------------------------------
# What an answer may not do: use the code that it rebuilds, and start processes


def close_the_project(own_file: Path) -> None:
    """Forget the project's modules, and refuse to open its files and to start a process.

    `own_file` stays open, and what lies beside it in lessons/mine/.
    """
    for name, module in list(sys.modules.items()):
        if is_of_the_project(getattr(module, "__file__", None) or "", own_file):
            del sys.modules[name]

    def refuse(event, arguments):
        if event == "open" and is_of_the_project(arguments[0], own_file):
            name = os.path.relpath(os.fsdecode(arguments[0]), ROOT)
            raise PermissionError(f"an answer cannot use the project's {name}: rebuild it")
        # `kill`, below, makes a copy of this process.
        if event in NEW_PROCESSES and sys._getframe(1).f_code.co_filename != __file__:
            raise PermissionError(f"an answer cannot start another process ({event})")

    sys.addaudithook(refuse)


def is_of_the_project(path, own_file: Path) -> bool:
    """Whether a path is one of the project's Python files, compiled or not."""
    if not isinstance(path, str | bytes | os.PathLike):
        return False
    path = os.path.realpath(os.fsdecode(path))
    is_python = path.endswith((".py", ".pyc"))
    if not is_python or not path.startswith(f"{ROOT}{os.sep}"):
        return False
    if path in (str(own_file), importlib.util.cache_from_source(str(own_file))):
        return False
    mine = f"{ROOT / 'lessons' / 'mine'}{os.sep}"
    is_beside_mine = str(own_file).startswith(mine) and path.startswith(mine)
    return not (is_beside_mine or path.startswith(f"{ROOT}{os.sep}.venv"))


# --------------------------------------------------------------------------------------------------
# What is asked


def value(answer, name: str):
    """A constant of the answer."""
    found = getattr(answer, name, NotImplemented)
    if found is NotImplemented:
        stub = Path("lessons", "exercises", Path(answer.__file__).name)
        hint = f": {stub} has its stub" if (ROOT / stub).exists() else ""
        raise CallFailed(f"the answer has no {name}{hint}")
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


def spoil(answer, name: str, args, keywords) -> tuple:
    """(Its result if every Triton kernel's output is overwritten; how many tensors that were).

    A launch in Triton's interpreter has written a tensor if that has other values afterwards.
    """
    from triton.runtime.interpreter import InterpretedFunction

    launch, spoiled = InterpretedFunction.run, []

    def launch_and_spoil(*arguments, **settings):
        tensors = list(tensors_in([*arguments, *settings.values()]))
        before = [tensor.clone() for tensor in tensors]
        launch(*arguments, **settings)
        for tensor, old in zip(tensors, before, strict=True):
            if not tensor.equal(old):
                tensor.fill_(1000)
                spoiled.append(tensor)

    InterpretedFunction.run = launch_and_spoil
    try:
        result = call(answer, name, args, keywords)
    finally:
        InterpretedFunction.run = launch
    return result, len(spoiled)


def tensors_in(arguments):
    """The floating-point tensors among a kernel's arguments, also in tuples and descriptors."""
    for argument in arguments:
        argument = getattr(argument, "base", argument)  # of a TensorDescriptor
        if isinstance(argument, tuple | list):
            yield from tensors_in(argument)
        elif hasattr(argument, "is_floating_point") and argument.is_floating_point():
            yield argument


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
        raise NotWritten(result)
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
    except BaseException as error:
        changes.end()
        reply = failure(error, answer.__file__)
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
        sys.setprofile(self.see)

    def end(self) -> None:
        """Count no longer."""
        sys.setprofile(None)
        self.active = False

    def hear(self, event: str, arguments: tuple) -> None:
        """Audit events: files opened for writing, renames, and what waits for the disk."""
        if not self.active:
            return
        if event in EVENTS:
            self.before_a_change(event.removeprefix("os."))
        elif event == "open" and opens_for_writing(arguments):
            self.before_a_change("open synchronous" if is_synchronous(arguments) else "open")
        elif event == "os.fsync":
            self.before_a_change(f"fsync {kind_of_file(*arguments)}")
        elif event == "fcntl.fcntl" and sys.platform == "darwin" and arguments[1] == F_FULLFSYNC:
            self.before_a_change("sync")

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


def is_synchronous(arguments: tuple) -> bool:
    """Whether each write to a file that is opened so waits for the disk."""
    return bool((arguments[2] or 0) & (os.O_SYNC | os.O_DSYNC))


def fsync(file) -> None:
    """os.fsync for an answer. It tells the audit hooks: a profiler does not see of which file."""
    sys.audit("os.fsync", file)
    FSYNC(file)


def kind_of_file(file) -> str:
    """What an fsync waits for: a file, an empty file (nothing was flushed before), a folder."""
    state = os.fstat(file if isinstance(file, int) else file.fileno())
    if stat.S_ISDIR(state.st_mode):
        return "folder"
    return "file" if state.st_size else "empty file"


class CallFailed(Exception):
    """A call that failed, for a reason that the message says in full."""


class NotWritten(Exception):
    """A part of the answer that is not written yet."""


DO = {
    "value": value,
    "call": call,
    "measure": measure,
    "spoil": spoil,
    "join": join,
    "kill": kill,
}


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


def failure(error: BaseException, path: str) -> tuple[str, str]:
    """The reply for an error: ("todo", what is not written yet) or ("wrong", what happened)."""
    if isinstance(error, NotWritten) or says_not_written(error, path):
        return "todo", str(error)
    return "wrong", what_happened(error, path)


def says_not_written(error: BaseException, path: str) -> bool:
    """Whether a `raise NotImplementedError` in the answer made this error, not torch."""
    if not isinstance(error, NotImplementedError):
        return False
    last = error.__traceback__
    while last.tb_next:
        last = last.tb_next
    code = last.tb_frame.f_code
    # A function in C has no frame of its own: then the answer's last instruction is a call.
    return code.co_filename == path and code.co_code[last.tb_lasti] == dis.opmap["RAISE_VARARGS"]


def what_happened(error: BaseException, path: str) -> str:
    """An error in one line, with the last line of the answer that led to it."""
    if isinstance(error, CallFailed):
        return str(error)
    text = in_one_line(error)
    line = last_line(error, path)
    return f"{text} (line {line}: {linecache.getline(path, line).strip()})" if line else text


def why_not_loaded(error: BaseException, path: str) -> str:
    """What is wrong with a file that cannot be loaded, such as "line 3: invalid syntax"."""
    if isinstance(error, SyntaxError) and error.filename == path and error.lineno:
        return f"line {error.lineno}: {error.msg}"
    line = last_line(error, path)
    return f"line {line}: {in_one_line(error)}" if line else in_one_line(error)


def in_one_line(error: BaseException) -> str:
    """Its type and its message, of at most 300 characters."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def last_line(error: BaseException, path: str) -> int:
    """The number of the last line of the answer that led to an error; 0 if none did."""
    calls = traceback.walk_tb(error.__traceback__)
    lines = [line for frame, line in calls if frame.f_code.co_filename == path]
    return lines[-1] if lines else 0


def main(argv: list[str]) -> None:
    """Say what this file is for."""
    import program  # here: an answer's process must not import the project

    program.arguments(argv)
    print(__doc__)


if __name__ == "__main__":
    import program

    program.run(main)
