"""Kills a function just before its change of a file number n: what lesson 6 is about.

    in_a_copy(function)          names: what its changes are called, such as open, write, rename
    in_a_copy(function, at=3)    died: True if it was killed before change 3, False if it made fewer

The function runs in a copy of this process (fork). Opened for writing, written, flushed, closed,
renamed and removed files count as changes, and so does os.fsync. Python reports them: as audit
events, and as calls of C functions. A power cut may leave any part of what was being written, so a
process that dies in the middle of a file keeps half of what is in it.
"""

import io
import os
import pickle
import posix
import signal
import stat
import sys
from typing import NamedTuple

WRITES = {"write", "writelines", "flush", "close", "truncate", "__exit__"}  # of open files
EVENTS = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate"}


class Outcome(NamedTuple):
    """How a call in a copy of this process ended."""

    died: bool
    names: list[str]  # of its changes, if it did not die
    error: BaseException | None


def in_a_copy(function, at: int | None = None) -> Outcome:
    """Call the function in a copy of this process, which is killed before its change `at`."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        os.write(writer, pickle.dumps(counted(function, at)))
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        reply = pipe.read()
    _, status = os.waitpid(child, 0)
    return Outcome(True, [], None) if os.WIFSIGNALED(status) else Outcome(*pickle.loads(reply))


def counted(function, at: int | None) -> tuple:
    """The outcome of a call in this process."""
    changes = Changes(at)
    sys.addaudithook(changes.hear)
    sys.setprofile(changes.see)
    failure = None
    try:
        function()
    except BaseException as error:
        failure = error
    sys.setprofile(None)
    return False, changes.names, failure


class Changes:
    """Counts this process's changes of files. Before number `at`, it kills the process.

    names   what each change so far is called: open, write, close, rename, fsync file, ...
    """

    def __init__(self, at: int | None):
        self.names, self.at, self.file = [], at, None

    def hear(self, event: str, arguments: tuple) -> None:
        """Audit events: files opened for writing, renames, and what waits for the disk."""
        if event in EVENTS:
            self.before_a_change(event.removeprefix("os."))
        elif event == "open" and opens_for_writing(*arguments):
            self.before_a_change("open")
        elif event == "os.fsync":
            self.before_a_change(f"fsync {kind_of_file(*arguments)}")

    def see(self, frame, event: str, function) -> None:
        """Calls of C functions, among them the methods of open files."""
        if event != "c_call":
            return
        owner, name = getattr(function, "__self__", None), function.__name__
        if isinstance(owner, io.IOBase) and name in WRITES and not owner.closed:
            if owner.writable() and owner.fileno() > 2:
                self.file = owner
                self.before_a_change("close" if name == "__exit__" else name)
        elif function is posix.write:
            self.before_a_change(name)

    def before_a_change(self, name: str) -> None:
        """Count one. At the chosen one, cut the file that is being written, and die."""
        if len(self.names) == self.at:
            self.at = None  # cutting the file is no change
            if self.file is not None and not self.file.closed:
                self.file.flush()
                size = os.fstat(self.file.fileno()).st_size
                os.ftruncate(self.file.fileno(), size // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        self.names.append(name)


def opens_for_writing(path, mode, flags) -> bool:
    """Whether a file that is opened so can be changed: the arguments of an audit event `open`."""
    if isinstance(mode, str):
        return any(letter in mode for letter in "wax+")
    return bool((flags or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


def kind_of_file(file) -> str:
    """What an fsync waits for: a file, an empty file (nothing was flushed before), a folder."""
    state = os.fstat(file if isinstance(file, int) else file.fileno())
    if stat.S_ISDIR(state.st_mode):
        return "folder"
    return "file" if state.st_size else "empty file"


def report_fsyncs() -> None:
    """Let os.fsync tell the audit hooks of which file it is: Python does not report that."""
    fsync = posix.fsync
    if fsync.__name__ == "reported":
        return

    def reported(file):
        sys.audit("os.fsync", file)
        fsync(file)

    os.fsync = posix.fsync = reported
