"""Kills a function just before its change of a file number n: what lesson 6 is about.

    killed(function, at=3)      True if it died before change 3, False if it made fewer changes
    names_of(function)          what its changes are called: open, write, close, rename, fsync file

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

WRITES = {"write", "writelines", "flush", "close", "truncate", "__exit__"}  # of open files
SYSTEM_CALLS = {"write", "fdatasync", "ftruncate", "sync"}  # of os; the rest is in EVENTS
EVENTS = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate"}


class CopyFailed(Exception):
    """The function failed in the copy. The argument is what `explain` made of the error."""


def names_of(function, explain=repr) -> list[str]:
    """The names of all changes that a call of the function makes."""
    _, names = forked(function, None, explain)
    return names


def killed(function, at: int, explain=repr) -> bool:
    """Call the function, killed before its change `at`. False if it ended before that."""
    died, _ = forked(function, at, explain)
    return died


def forked(function, at: int | None, explain) -> tuple[bool, list[str]]:
    """(Whether it died, the names of its changes if not), of a call in a copy of this process."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        os.write(writer, pickle.dumps(in_the_copy(function, at, explain)))
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        reply = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return True, []
    names, failure = pickle.loads(reply)
    if failure is not None:
        raise CopyFailed(failure)
    return False, names


def in_the_copy(function, at: int | None, explain) -> tuple:
    """(The names of the changes, None or the error explained)."""
    changes = Changes(at)
    failure = None
    changes.begin()
    try:
        function()
    except BaseException as error:
        changes.end()
        failure = explain(error)
    changes.end()
    return changes.names, failure


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
        elif event == "open" and opens_for_writing(*arguments):
            is_synchronous = (arguments[2] or 0) & (os.O_SYNC | os.O_DSYNC)
            self.before_a_change("open synchronous" if is_synchronous else "open")
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

    def reported(file):
        sys.audit("os.fsync", file)
        fsync(file)

    os.fsync = posix.fsync = reported
