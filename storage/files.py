"""Reads files that other people, machines or crashed runs wrote, and writes files atomically.

    read_json         a JSON value of the expected shape
    read_json_lines   the good rows of a .jsonl file, and what is wrong with the bad ones
    read_csv          the rows of a table
    Tail              what is new in a file that grows
    member            the path of a file that another file names: a plain name in the same folder
    require_no_link   a path that is no link, unless it is one of the Hub's cache
    require_ours      a folder into which we write is empty, or ours already
    write_atomically  a file as a whole or not at all
    locked            one process at a time, and the others wait

Nothing is used before it is checked. Two kinds of failure are kept apart:

    UserError   the content is wrong; the message names file and cause
    OSError     the file is absent or cannot be read (permission, a node that does not see it),
                which says nothing about its content

Run `python -m storage.files runs/demo/config.json` to check a file.
"""

import contextlib
import csv
import fcntl
import io
import json
import math
import os
import platform
import secrets
import shutil
import stat
import sys
from pathlib import Path

import program
from launch import parser
from program import UserError, require

MAX_JSON = 2**27  # bytes. The largest we know is the weight index of a 70B model: under 2**20

# --------------------------------------------------------------------------------------------------
# JSON


def read_json(path, kind: type = dict, fields: dict | None = None, fix: str = ""):
    """The JSON value in a file: a `kind` (dict or list) that has `fields` (name -> type or types).

    fix: ends the error message, such as "delete it". A byte order mark is skipped.
    Raises UserError if the content is anything else, OSError if the file cannot be read.
    """
    return parse_json(read_bytes(path, MAX_JSON), str(path), kind, fields, fix)


def parse_json(
    text: bytes, where: str, kind: type = dict, fields: dict | None = None, fix: str = ""
):
    """The JSON value in a text. See `read_json`; where: names the text in messages."""
    fix = f": {fix}" if fix else ""
    try:
        value = json.loads(text.decode("utf-8-sig"))
    except RecursionError as error:
        raise UserError(f"{where} is damaged (JSON nested too deep){fix}") from error
    except ValueError as error:  # UnicodeDecodeError too
        raise UserError(f"{where} is damaged ({program.one_line(error)}){fix}") from error

    expected = {dict: "a JSON object", list: "a JSON list"}[kind]
    require(isinstance(value, kind), f"{where} is damaged (not {expected}){fix}")
    fields = fields or {}
    fault = wrong_type(value, fields) or missing(value, fields)
    require(not fault, f"{where} is damaged ({fault}){fix}")
    return value


def read_json_lines(path, fields: dict | None = None, fault=None, appended=False):
    """The good rows of a .jsonl file, and what is wrong with its other lines.

    fields: name -> type or types that each row must have.
    fault: fault(row) says what else is wrong with a row, "" if nothing.
    appended: the file grows row by row, so a crash may have cut off the last row, or a power
        failure may have left zeros there. Such a last line is skipped silently.

    Returns (list of dicts, list of texts). Raises OSError if the file cannot be read.
    """
    rows, problems = [], []
    with open_regular(path) as file:
        for number, line in enumerate(file, 1):
            row, problem = parse_line(line, f"line {number}", fields, fault, appended)
            if problem:
                problems.append(problem)
            elif row is not None:
                rows.append(row)
    return rows, problems


def parse_line(
    line: bytes, where: str, fields: dict | None = None, fault=None, appended=False
) -> tuple[dict | None, str]:
    """(row, "") of a line of a .jsonl file, or (None, what is wrong with it).

    (None, "") for a line that is skipped silently. where: names the line in messages. Other
    arguments: `read_json_lines`.
    """
    if not line.strip():
        return None, ""
    try:
        row = parse_json(line, where)
    except UserError as error:
        cut_off = not line.endswith(b"\n") and line[:1] in (b"{", b"\0")
        return None, "" if appended and cut_off else str(error)
    problem = missing(row, fields or {}) or wrong_type(row, fields or {})
    if not problem and fault:
        problem = fault(row)
    return (None, f"{where} is damaged ({problem})") if problem else (row, "")


def missing(value: dict, fields: dict) -> str:
    """Names the first of `fields` that is missing; "" if none is."""
    for name in fields:
        if name not in value:
            return f"no {name!r}"
    return ""


def wrong_type(value: dict, fields: dict) -> str:
    """Names the first of `fields` (name -> type or types) with another type; "" if none has.

    Fields that are missing are skipped.
    """
    for name, types in fields.items():
        if name in value and not has_type(value[name], types):
            return f"{name!r} is {shown(value[name])}"
    return ""


def has_type(value, types) -> bool:
    """isinstance for JSON: a bool is no number, an int counts as a float, ints must fit 64 bits."""
    types = types if isinstance(types, tuple) else (types,)
    if isinstance(value, bool):
        return bool in types
    if isinstance(value, int) and abs(value) >= 2**63:
        return False
    return isinstance(value, types) or (float in types and isinstance(value, int))


def shown(value) -> str:
    """A value as messages show it, at most 40 characters; a list or object as its type."""
    is_scalar = isinstance(value, str | int | float | None)
    text = repr(value) if is_scalar else type(value).__name__
    return text if len(text) <= 40 else text[:37] + "..."


# --------------------------------------------------------------------------------------------------
# CSV


def read_csv(path, columns=(), what: str = "a CSV") -> list[dict[str, str]]:
    """The rows of a CSV: column -> text, "" where a row ends early.

    Columns named after renamed settings get their new names. Raises UserError ("... is not
    {what}") if one of `columns` is missing or the file is not a table.
    """
    try:
        text = read_bytes(path).decode("utf-8-sig")
        table = csv.DictReader(io.StringIO(text, newline=""), restval="")
        table.fieldnames = [parser.RENAMED.get(name, name) for name in table.fieldnames or ()]
        rows = list(table)
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path} is not {what}: {program.one_line(error)}") from error

    absent = sorted(set(columns) - set(table.fieldnames or ()))
    require(not absent, f"{path} is not {what}: it has no column {', '.join(absent[:3])}")
    extra_cells = any(None in row for row in rows)
    require(not extra_cells, f"{path} is damaged (a row has more cells than there are columns)")
    return rows


# --------------------------------------------------------------------------------------------------
# Bytes


def read_bytes(path, most: float = math.inf) -> bytes:
    """The content of a regular file of at most `most` bytes. Raises UserError or OSError."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        require(size <= most, f"{path} has {size:,} bytes, expected at most {most:,}")
        return file.read()


def absence(path) -> str:
    """What a message adds to a path if nothing is there: ", which does not exist"; else ""."""
    return "" if Path(path).exists() else ", which does not exist"


def open_regular(path):
    """Open a regular file for reading bytes. Raises UserError for anything else.

    Reading a device might never end. Opening a pipe that has no writer would block; O_NONBLOCK
    prevents that.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    kind = "a folder" if stat.S_ISDIR(mode) else "not a regular file"
    raise UserError(f"{path} is {kind}")


class Tail:
    """The lines of a file that grows, each once."""

    def __init__(self, path):
        self.path = path
        self.inode = None
        self.size = 0  # of the file
        self.offset = 0  # bytes that have been read: complete lines
        self.before = b""  # the last of these bytes

    def read(self, n_bytes: int = -1) -> tuple[bool, bytes]:
        """(whether it is another file now, the complete lines among the next n_bytes).

        Another file, also one that was written anew in place, is read from its beginning.
        Raises UserError or OSError.
        """
        with open_regular(self.path) as file:
            status = os.fstat(file.fileno())
            file.seek(self.offset - len(self.before))
            is_same = status.st_ino == self.inode and file.read(len(self.before)) == self.before
            if not is_same:
                file.seek(0)
                self.offset, self.before = 0, b""
            content = file.read(n_bytes)
        end = content.rfind(b"\n") + 1
        if not end and len(content) == n_bytes:
            end = n_bytes  # no line is that long: it is damaged
        lines = content[:end]
        self.inode, self.size = status.st_ino, status.st_size
        self.offset += len(lines)
        self.before = (self.before + lines)[-64:]
        return not is_same, lines


def member(folder: Path, name, source) -> Path:
    """The path of the file `name` in `folder`. Raises UserError unless `name` is a plain name.

    source: the file that names it, for the message. A name like "../x" would leave the folder.
    """
    is_name = isinstance(name, str) and name not in ("", ".", "..")
    is_plain = is_name and name.isprintable() and not set(name) & {"/", "\\"}
    is_plain = is_plain and len(name.encode(errors="replace")) <= 255  # no file has a longer name
    expected = "expected the plain name of a file beside it"
    require(is_plain, f"{source} names the file {shown(name)}, {expected}")
    return Path(folder) / name


def require_no_link(path: Path) -> Path:
    """The path. UserError if it is a link: in a folder from someone else it may lead anywhere.

    The Hub's cache is made of links: snapshots/REVISION/NAME leads to the file blobs/HASH beside
    `snapshots`. These are followed.
    """
    path = Path(path)
    snapshots = [up for up in path.parent.resolve().parents if up.name == "snapshots"]
    is_of_cache = any(path.resolve().parent == up.parent / "blobs" for up in snapshots)
    fix = "replace it with what it points to"
    require(not path.is_symlink() or is_of_cache, f"{path} is a link: {fix}")
    return path


# --------------------------------------------------------------------------------------------------
# Writing


def free_name(path: Path, number: int = 2) -> Path:
    """`path`; or if something is there, PATH-2, or the next number under which nothing is."""
    name = path
    while os.path.lexists(name):
        name = Path(f"{path}-{number}")
        number += 1
    return name


def require_ours(folder, marks: list[str], writes: list[str], fix: str) -> None:
    """UserError if a folder is used for something else, with which our files would mix.

    marks: patterns; a folder of ours has a file of one of them. writes: the names that we write.
    Files of other names may be there already, such as a log, and empty folders.
    """
    folder = Path(folder)
    if not folder.is_dir() or any(any(folder.glob(mark)) for mark in marks):
        return
    for path in sorted(folder.iterdir()):
        if path.is_symlink():
            continue  # such as checkpoints that lie on another disk
        is_used = any(path.iterdir()) if path.is_dir() else path.name in writes
        problem = f"{folder} is used for something else, it holds {path.name}"
        require(not is_used, f"{problem}: {fix}")


def write_atomically(path, content: bytes) -> None:
    """Write a file as a whole or not at all: readers find the old content or the new one.

    Several processes, on several machines, may do so at once: each has a temporary file of its own.
    If writing fails (a full disk), no part of it stays, and the OSError names the file. The mode
    is that of an ordinary new file. If `path` is a link, as in a folder that someone else prepared,
    the link is replaced, never followed.
    """
    path = Path(path)
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        write_and_rename(temporary, content, path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def write_and_rename(temporary: Path, content: bytes, path: Path) -> None:
    """Write `temporary`, wait until it is on disk, then rename it to `path`."""
    try:
        with open(temporary, "xb") as file:  # x: fails if the file exists, so never follows a link
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:  # Ctrl-C too
        temporary.unlink(missing_ok=True)
        raise


def write_json(path, values: dict) -> None:
    """Write a JSON file, as `write_atomically` does."""
    write_atomically(path, json.dumps(values, indent=2).encode())


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def free_bytes(folder: Path) -> int:
    """Free bytes on the file system of a folder that may not exist yet."""
    folder = folder.absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    return shutil.disk_usage(existing).free


@contextlib.contextmanager
def locked(path, state: str):
    """While one process is in this block, others wait at its beginning, and print `state`.

    path: a file that stays; while it is locked it names the owner. The kernel holds the lock, so it
    ends with the process, after kill -9 too. NFS passes it on to other machines.

    Yields True; or False where the file system has no locks (some mounts of Lustre). Then nobody
    waits, and what several processes do here at the same time must be harmless.
    """
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)  # NFS locks what it writes
    is_locked = False
    try:
        is_locked = lock(file, state)
        if is_locked:
            os.pwrite(file, f"process {os.getpid()} on {platform.node()}".encode(), 0)
        yield is_locked
    finally:
        if is_locked:
            os.ftruncate(file, 0)
        os.close(file)  # and so unlocks it


def lock(file: int, state: str) -> bool:
    """Lock an open file; wait if another process has it. False if this file system has no locks."""
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(file, 300, 0).decode(errors="replace") or "another process"
            print(f"{state} by {program.one_line(owner)}: waiting", file=sys.stderr, flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        os.ftruncate(file, 0)  # what a killed owner left
    except OSError:
        return False
    return True


def main(argv: list[str]) -> None:
    """Check a JSON or JSON lines file."""
    (path,) = program.arguments(argv, "FILE.json|FILE.jsonl")
    if not path.endswith(".jsonl"):
        value = read_json(path)
        print(f"{path}: an object with {len(value)} fields")
        return
    rows, problems = read_json_lines(path)
    print(f"{path}: {len(rows)} good rows, {len(problems)} bad lines")
    for problem in problems:
        print(f"  {problem}")


if __name__ == "__main__":
    program.run(main)
