"""Uploads: files of examples to finetune on, each line of which is checked as it arrives.

    JOBS/files/ID/data.jsonl    what was uploaded
    JOBS/files/ID/meta.json     its name, size and number of lines

A file is here as a whole, with lines that can all be used, or it is refused: status 400, and
`error.lines` has the number of each wrong line with the reason. text/chat.py is what reads it, as
in training. What begins with the mark of UTF-16, as PowerShell writes it, is stored as UTF-8.

The lines of a large file are checked by a process of its own (`program.answer_apart`), which takes
no time from the texts that are generated meanwhile.
"""

import asyncio
import codecs
import contextlib
import dataclasses
import json
import os
import re
import secrets
import shutil
import stat
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from fastapi import FastAPI, Query
from fastapi import Request as HttpRequest
from fastapi.responses import StreamingResponse
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

import program
from program import UserError, one_line
from storage import files
from text import chat, corpus
from text.tokenizer import SpecialToken
from web.shapes import ApiError, as_json, public

MOST_FILES = 1000
MOST_FAULTS = 100  # wrong lines that an answer names
LONGEST_LINE = 2**20  # bytes
LONGEST_NAME = 200
CHECK_SECONDS = 300  # of a processor, for reading all lines
MOST_BYTES_HERE = 2**14  # of a file that the server checks itself, in a few milliseconds
OLD_SECONDS = 3600  # after which a half-written upload belongs to a server that was killed
META = {"filename": str, "bytes": int, "lines": int}


@dataclass(frozen=True)
class Finetuning:
    """What the server finetunes, and where.

    folder: JOBS. base: the path of the weights it serves. chat_template: as --chat_template takes
    it. upload_bytes: the size of an upload, at most. worker: the command that starts a worker.
    """

    folder: Path
    base: str
    chat_template: str
    upload_bytes: int
    worker: str

    def make_folders(self) -> None:
        """Make the folders that are missing, and remove uploads that a killed server has left."""
        for name in ("files", "jobs", "models"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        for path in self.folder.glob("*/.*.tmp"):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > OLD_SECONDS:
                    shutil.rmtree(path)


# --------------------------------------------------------------------------------------------------
# Names and lists


def new_id(kind: str) -> str:
    """An id that sorts by time: file-18b2f1d2a3c4e5f6ab12cd34."""
    return f"{kind}-{time.time_ns():016x}{secrets.token_hex(4)}"


def created_at(name: str) -> int:
    """The Unix seconds in an id."""
    return int(name.rpartition("-")[2][:16], 16) // 10**9


def place(folder: Path, name: str, kind: str) -> Path:
    """The folder of an id. ApiError if there is none."""
    is_id = re.fullmatch(rf"{kind}-[0-9a-f]{{24}}", name, re.ASCII)
    if not is_id or not is_folder(folder / name):
        raise ApiError(404, f"there is no {name[:100]!r}", code="not_found")
    return folder / name


def is_folder(path: Path) -> bool:
    """Is this a folder, and no link to one?"""
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except (OSError, ValueError):  # ValueError: a character that no path has
        return False


def ids_in(folder: Path, kind: str) -> list[str]:
    """The ids in a folder, oldest first; none if it is gone."""
    names = []
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    return sorted(name for name in names if re.fullmatch(rf"{kind}-[0-9a-f]{{24}}", name))


def page_of(items: list, after: str | None, limit: int, show=lambda item: item) -> dict:
    """OpenAI's list: at most `limit` items, those behind the one whose id is `after`.

    items: ids, or dicts with an "id". show: id -> dict. ApiError if `after` is not among them.
    """
    names = [item if isinstance(item, str) else item["id"] for item in items]
    if after is not None and after not in names:
        raise ApiError(400, f"after: there is no {after[:100]!r} in this list", param="after")
    first = names.index(after) + 1 if after is not None else 0
    shown = [show(item) for item in items[first : first + limit]]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": first + limit < len(items),
    }


@contextlib.contextmanager
def on_disk():
    """Errors of the file system as an answer: a full disk is not a fault of the server's code."""
    try:
        yield
    except FileNotFoundError as error:
        raise ApiError(404, "it was deleted meanwhile", code="not_found") from error
    except OSError as error:
        problem = f"the server cannot write or read its files ({error.strerror})"
        raise ApiError(507, f"{problem}: try again once there is room") from error


# --------------------------------------------------------------------------------------------------
# Checking


def check_lines(path: str, chat_template: str, tokens: dict) -> tuple[int, list[dict]]:
    """The number of examples in a file, and which lines cannot be used: [{"line", "reason"}].

    tokens: {name: fields of the SpecialToken that the template may not spell out}.
    """
    reserved = {name: SpecialToken(**fields) for name, fields in tokens.items()}
    template = chat.load_template(chat_template, reserved)
    n_lines = 0
    faults = []
    try:
        for number, line in enumerate(corpus.raw_lines(path), 1):
            if not line.decode(errors="replace").strip():
                continue
            n_lines += 1
            reason = fault_of(line, template)
            if reason:
                faults.append({"line": number, "reason": reason})
            if len(faults) == MOST_FAULTS:
                break
    except UserError as error:  # the encoding
        faults.append({"line": 1, "reason": public(one_line(error))})
    if not n_lines and not faults:
        faults.append({"line": 1, "reason": "the file has no lines"})
    return n_lines, faults


def fault_of(line: bytes, template: chat.Template) -> str:
    """Why a line cannot be used, "" if it can."""
    if len(line) > LONGEST_LINE:
        return f"it has {len(line):,} bytes, more than {LONGEST_LINE:,}"
    try:
        chat.turns_of(corpus.parsed(line), template)
        return ""
    except UserError as error:
        return public(one_line(error))


async def answer_apart(module: str, given: list, param: str):
    """What a process of a module answers about a file: see program.answer_apart.

    ApiError, which names `param`, if that takes too long, or fails.
    """
    try:
        return await program.answer_apart(module, given, CHECK_SECONDS)
    except TimeoutError as error:
        limit = f"reading the lines takes more than {CHECK_SECONDS} s of a processor"
        fix = "upload them in several files"
        raise ApiError(400, f"{limit}: {fix}", param=param, code="invalid_file") from error
    except RuntimeError as error:
        problem = "reading the lines failed: the server's log says why"
        raise ApiError(500, problem) from error


def copy_as_utf8(source, out) -> None:
    """Copy text; if it begins with the mark of UTF-16 or UTF-32, it becomes UTF-8. ApiError."""
    head = source.read(4)
    source.seek(0)
    encodings = [name for mark, name in corpus.BYTE_ORDER_MARKS.items() if head.startswith(mark)]
    if not encodings:
        return shutil.copyfileobj(source, out)
    decoder = codecs.getincrementaldecoder(encodings[0])()
    try:
        while piece := source.read(2**20):
            out.write(decoder.decode(piece).encode())
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        problem = f"the file begins as {encodings[0]}, and is not: save it as UTF-8"
        raise ApiError(400, problem, param="file", code="invalid_file") from error


async def keep(upload: UploadFile, finetuning: Finetuning, reserved: dict) -> str:
    """Store an upload. Returns its id. ApiError if lines cannot be used, OSError."""
    folder = finetuning.folder / "files"
    name = new_id("file")
    temporary = folder / f".{name}.tmp"
    path = temporary / "data.jsonl"
    try:
        size = await asyncio.to_thread(store, upload, path)
        tokens = {name: dataclasses.asdict(token) for name, token in reserved.items()}
        given = [str(path), finetuning.chat_template, tokens]
        if size > MOST_BYTES_HERE:
            n_lines, faults = await answer_apart("web.files", given, "file")
        else:
            n_lines, faults = await asyncio.to_thread(check_lines, *given)
        if faults:
            raise refusal_of(faults)
        filename = "".join(filter(str.isprintable, upload.filename))[:LONGEST_NAME]
        meta = {"filename": filename, "bytes": size, "lines": n_lines}
        files.write_atomically(temporary / "meta.json", json.dumps(meta).encode())
        temporary.rename(folder / name)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return name


def store(upload: UploadFile, path: Path) -> int:
    """Write the content of an upload to a new folder. Returns its bytes."""
    path.parent.mkdir()
    with path.open("xb") as out:
        copy_as_utf8(upload.file, out)
        out.flush()
        os.fsync(out.fileno())
    return path.stat().st_size


# --------------------------------------------------------------------------------------------------
# Endpoints


def add_files(app: FastAPI, service) -> None:
    """OpenAI's endpoints about files. service: see web/completions.py."""
    finetuning = service.finetuning
    folder = finetuning.folder / "files"
    add_listing(app, folder)
    one_at_a_time = asyncio.Lock()  # checking takes a processor

    @app.post("/v1/files", max_body_size=finetuning.upload_bytes)
    async def upload(http: HttpRequest):
        """Upload a .jsonl file of examples: multipart, with the fields purpose and file."""
        async with contextlib.AsyncExitStack() as stack:
            given = uploaded(await form_of(http, stack))
            async with one_at_a_time:
                with on_disk():
                    finetuning.make_folders()
                    if len(ids_in(folder, "file")) >= MOST_FILES:
                        raise ApiError(400, f"there are {MOST_FILES} files already: delete some")
                    name = await keep(given, finetuning, service.tokenizer.special_tokens)
        return as_json(file_object(folder / name))


def add_listing(app: FastAPI, folder: Path) -> None:
    """The endpoints about files that are here."""

    @app.get("/v1/files")
    def listed(
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
        order: Literal["asc", "desc"] = "desc",
        purpose: str | None = None,
    ):
        """The files, the newest first unless `order` is asc."""
        with on_disk():
            names = ids_in(folder, "file") if purpose in (None, "fine-tune") else []
            names = names if order == "asc" else names[::-1]
            return as_json(page_of(names, after, limit, lambda name: file_object(folder / name)))

    @app.get("/v1/files/{file_id}")
    def retrieve(file_id: str):
        """What is known about a file."""
        return as_json(file_object(place(folder, file_id, "file")))

    @app.get("/v1/files/{file_id}/content", response_class=StreamingResponse)
    def content(file_id: str):
        """The file as it was uploaded, in UTF-8; always all of it."""
        path = place(folder, file_id, "file") / "data.jsonl"
        if path.is_symlink() or not path.is_file():
            raise ApiError(404, f"the content of {file_id} is gone", code="not_found")
        headers = {"Content-Length": str(path.stat().st_size)}
        return StreamingResponse(pieces(path), headers=headers, media_type="application/jsonl")

    @app.delete("/v1/files/{file_id}")
    def delete(file_id: str):
        """Delete a file. A job that has begun goes on; one that waits for it will fail."""
        path = place(folder, file_id, "file")
        temporary = folder / f".{secrets.token_hex(8)}.tmp"
        with on_disk():
            path.rename(temporary)
            shutil.rmtree(temporary, ignore_errors=True)
        return {"id": file_id, "object": "file", "deleted": True}


def pieces(path: Path):
    """The content of a file, piece by piece."""
    with path.open("rb") as file:
        while piece := file.read(2**16):
            yield piece


async def form_of(http: HttpRequest, stack: contextlib.AsyncExitStack):
    """The fields of a multipart body; its files are on disk. ApiError if it is none."""
    kind = http.headers.get("content-type", "")
    if kind.partition(";")[0].strip().lower() != "multipart/form-data":
        raise ApiError(400, "send the file as multipart/form-data: curl -F file=@my.jsonl")
    try:
        with on_disk():
            return await stack.enter_async_context(http.form(max_files=1, max_fields=20))
    except HTTPException as error:
        if error.status_code == 413:
            raise
        raise ApiError(400, f"the form cannot be read: {error.detail}") from error
    except ClientDisconnect as error:
        raise ApiError(400, "the body is not complete") from error


def uploaded(form) -> UploadFile:
    """The file of a form. ApiError if there is none, or it is not what is finetuned on."""
    if form.get("purpose") != "fine-tune":
        raise ApiError(400, "purpose must be fine-tune", param="purpose")
    if any(name.startswith("expires_after") for name in form):
        raise ApiError(400, "expires_after is not supported: leave it out", param="expires_after")
    given = form.get("file")
    if not isinstance(given, UploadFile):
        raise ApiError(400, "there is no file: send it as the field file", param="file")
    if not (given.filename or "").lower().endswith(".jsonl"):
        raise ApiError(400, "the file's name must end with .jsonl", param="file")
    return given


def refusal_of(lines: list[dict]) -> ApiError:
    """The answer that names wrong lines: [{"line": 3, "reason": "..."}, ...]."""
    n = f"{len(lines)}{' or more' if len(lines) == MOST_FAULTS else ''}"
    which = "1 line" if len(lines) == 1 else f"{n} lines"
    first = f"line {lines[0]['line']}: {lines[0]['reason']}"
    message = f"{which} cannot be used, the first is {first}"
    return ApiError(400, message, param="file", code="invalid_file", more={"lines": lines})


def file_object(folder: Path) -> dict:
    """A file as OpenAI's API shows it."""
    details = None
    meta = {"filename": "damaged.jsonl", "bytes": 0}
    try:
        meta |= files.read_json(folder / "meta.json", fields=META)
    except (UserError, OSError) as error:
        details = public(one_line(error))
    return {
        "id": folder.name,
        "object": "file",
        "bytes": meta["bytes"],
        "created_at": created_at(folder.name),
        "filename": meta["filename"],
        "purpose": "fine-tune",
        "status": "error" if details else "processed",
        "status_details": details,
    }


if __name__ == "__main__":
    program.answer(check_lines)
