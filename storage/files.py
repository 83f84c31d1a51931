"""Files that somebody else may have written, or that a crash cut short: nothing is believed before
it is checked. And files of ours, which a crash cannot cut short.

    read_json         one JSON value of the wanted shape
    read_json_lines   the good rows of a .jsonl file, and what is wrong with the bad ones
    read_csv          the rows of a table
    member            a file that another file names: a plain name, a regular file, in this folder
    write_atomically  a file as a whole or not at all

Two kinds of trouble are kept apart. UserError: the content is wrong, and the message names file and cause. OSError:
the file is absent or cannot be read (permission, a node that does not see it), which says nothing about its content.

Run `python -m storage.files runs/demo/config.json` to check a file. Read next: storage/checkpoint_files.py.
"""

import csv
import io
import json
import math
import os
import stat
from pathlib import Path

import config
from config import UserError, require

MAX_JSON = (
    2**27
)  # bytes; the largest JSON that we write or know of is the index of a 70B model, below 2**20
MAX_CSV = 2**24
MAX_COLUMNS = 1000


def read_json(path, kind: type = dict, fields: dict | None = None, fix: str = ""):
    """The JSON value in a file: a `kind` (dict, list), in which `fields` (name -> type or types) are there.

    `fix` ends the message ("delete it"). Raises UserError if the content is anything else, OSError if the file
    cannot be read.
    """
    return parse_json(read_bytes(path, MAX_JSON), str(path), kind, fields, fix)


def parse_json(
    text: bytes, where: str, kind: type = dict, fields: dict | None = None, fix: str = ""
):
    """The JSON value in a text; `where` names it in messages. See `read_json`."""
    fix = f": {fix}" if fix else ""
    try:
        value = json.loads(text.decode("utf-8-sig"))
    except RecursionError as error:
        raise UserError(f"{where} is damaged (JSON nested too deep){fix}") from error
    except ValueError as error:  # UnicodeDecodeError too
        raise UserError(f"{where} is damaged ({config.one_line(error)}){fix}") from error
    wanted = {dict: "a JSON object", list: "a JSON list"}[kind]
    require(isinstance(value, kind), f"{where} is damaged (not {wanted}){fix}")
    fault = wrong_type(value, fields or {}) or missing(value, fields or {})
    require(not fault, f"{where} is damaged ({fault}){fix}")
    return value


def missing(value: dict, fields: dict) -> str:
    """Which of `fields` is not there, in words; "" if all are."""
    return next((f"no {name!r}" for name in fields if name not in value), "")


def wrong_type(value: dict, fields: dict) -> str:
    """Which of the `fields` (name -> type or types) that are there has another type, in words; "" if none has."""
    there = (
        name for name, types in fields.items() if name in value and not has_type(value[name], types)
    )
    return next((f"{name!r} is {shown(value[name])}" for name in there), "")


def has_type(value, types) -> bool:
    """isinstance, but true and false are no numbers, a whole number is a float too, and it has 64 bits at most."""
    types = types if isinstance(types, tuple) else (types,)
    if isinstance(value, bool):
        return bool in types
    if isinstance(value, int) and abs(value) >= 2**63:
        return False
    return isinstance(value, types) or (float in types and isinstance(value, int))


def shown(value) -> str:
    """A value in a message, 40 characters at most."""
    text = repr(value) if isinstance(value, str | int | float | None) else type(value).__name__
    return text if len(text) <= 40 else text[:37] + "..."


def read_json_lines(path, fields: dict | None = None, fault=None, appended=False):
    """The rows of a .jsonl file that are objects with `fields`, and for each other line what is wrong with it.

    `fault(row)` says what else is wrong with a row, "" if nothing. `appended`: the file grows by a row at a time, so a
    crash may have cut the last one off; that is left out without a word. Returns (list of dicts, list of texts).
    """
    rows, bad = [], []
    lines = read_bytes(path).split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"line {number}"
        try:
            row = parse_json(line, where)
        except UserError as error:
            cut_off = number == len(lines) and line[:1] in (
                b"{",
                b"\0",
            )  # zeros: after a power failure
            if not (appended and cut_off):
                bad.append(str(error))
            continue
        wrong = (
            missing(row, fields or {})
            or wrong_type(row, fields or {})
            or (fault(row) if fault else "")
        )
        if wrong:
            bad.append(f"{where} is damaged ({wrong})")
        else:
            rows.append(row)
    return rows, bad


def read_csv(path, columns=(), what: str = "a CSV") -> list[dict[str, str]]:
    """The rows of a CSV that has `columns`: column -> text, empty where a row ends early. UserError if it is none."""
    try:
        text = read_bytes(path, MAX_CSV).decode("utf-8-sig")
        table = csv.DictReader(io.StringIO(text, newline=""), restval="")
        n_columns = len(table.fieldnames or ())  # each row gets all of them, however short it is
        require(
            n_columns <= MAX_COLUMNS,
            f"{path} has {n_columns:,} columns, expected at most {MAX_COLUMNS:,}",
        )
        table.fieldnames = todays_columns(table.fieldnames or (), path)
        rows = list(table)
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path} is not {what}: {config.one_line(error)}") from error
    lacking = sorted(set(columns) - set(table.fieldnames or ()))
    require(not lacking, f"{path} is not {what}: it has no column {', '.join(lacking[:3])}")
    require(
        all(None not in row for row in rows),
        f"{path} is damaged (a row has more cells than there are columns)",
    )
    return rows


def todays_columns(names, path) -> list[str]:
    """The columns of a table, those that are settings under today's names."""
    config.require_one_name(names, str(path))
    return [config.RENAMED.get(name, name) for name in names]


def read_bytes(path, most: float = math.inf) -> bytes:
    """The content of a regular file of at most `most` bytes; a pipe or a device would never end."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        require(size <= most, f"{path} has {size:,} bytes, expected at most {most:,}")
        return file.read()


def open_regular(path):
    """Open a file for reading in binary. UserError unless it is a regular one."""
    descriptor = os.open(
        path, os.O_RDONLY | os.O_NONBLOCK
    )  # a pipe without a writer would block here
    kind = os.fstat(descriptor).st_mode
    if stat.S_ISREG(kind):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    raise UserError(f"{path} is {'a folder' if stat.S_ISDIR(kind) else 'not a regular file'}")


def member(folder: Path, name, source) -> Path:
    """The file `name` in `folder`, as the file `source` names it. UserError unless that is a plain name."""
    plain = (
        isinstance(name, str) and name not in ("", ".", "..") and not set(name) & {"/", "\\", "\0"}
    )
    require(
        plain, f"{source} names the file {shown(name)}, expected the plain name of a file beside it"
    )
    return Path(folder) / name


def write_atomically(path, content: bytes, writer: int | None = None) -> None:
    """Write a file as a whole or not at all: who reads it finds what was there before, or `content`.

    `writer`, a rank or a process, tells apart those who may write the same file at the same time.
    If writing fails (a full disk), nothing of it stays, and the OSError names the file. A link in
    somebody else's folder is replaced, never followed.
    """
    path = Path(path)
    ending = ".tmp" if writer is None else f".{writer}.tmp"
    temporary = path.with_name(path.name + ending)
    try:
        temporary.unlink(missing_ok=True)  # what a crash has left, or a link
        write_and_rename(temporary, content, path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def write_and_rename(temporary: Path, content: bytes, path: Path) -> None:
    """Write `temporary` until it is on the disk, then let it take the place of `path`."""
    try:
        with open(temporary, "xb") as file:  # x: never through a link
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:  # Ctrl-C, too
        temporary.unlink(missing_ok=True)
        raise


def main(argv) -> None:
    config.arguments(argv, "FILE.json|FILE.jsonl")
    if not argv[0].endswith(".jsonl"):
        value = parse_json(read_bytes(argv[0], MAX_JSON), argv[0])
        print(f"{argv[0]}: an object with {len(value)} fields")
        return
    rows, bad = read_json_lines(argv[0])
    print(f"{argv[0]}: {len(rows)} good rows, {len(bad)} bad lines")
    for line in bad:
        print(f"  {line}")


if __name__ == "__main__":
    config.run(main)
