"""Where text comes from: the documents of a data set, one string each, always in the same order.

    stdlib                        the Python source on this machine: real text that needs no download
    notes.txt, 'my/*.jsonl', dir  local .txt, .jsonl, .parquet, .csv, .tsv and .py files, in sorted order
    allenai/c4:en                 a data set (and subset) of the Hugging Face Hub, streamed

Text is UTF-8; a byte order mark is dropped, anything else is an error that names the place.

Run `python -m text.corpus stdlib` to see how many there are and how one begins. Read next: text/tokenizer.py.
"""

import codecs
import csv
import glob
import hashlib
import json
import os
import re
import sysconfig
from pathlib import Path

import config
from config import UserError, require
from storage import files as file_reader

SUFFIXES = (".txt", ".jsonl", ".parquet", ".csv", ".tsv", ".py")
# Endings of files that are not read here; no data set of the Hub has such a name.
OTHER = (
    ".json",
    ".md",
    ".html",
    ".xml",
    ".pdf",
    ".docx",
    ".epub",
    ".gz",
    ".bz2",
    ".xz",
    ".zst",
    ".zip",
    ".tar",
)
HUB_NAME = r"\w[\w.-]*(/\w[\w.-]*)?"
MARKS = {  # at the beginning of a file in another encoding than UTF-8; UTF-32's begins as UTF-16's does
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
PIECE = r"(?s).{1,16384}(?:.{0,16384}?\n\s*\n|.*?\n|.*\Z)"  # ends at a blank line, else at the end of a line


def documents(dataset: str):
    """The documents of a data set. Raises UserError when it cannot be found or reached."""
    paths, lossy = files(dataset), dataset == "stdlib"
    texts = (
        (text for path in paths for text in file_documents(path, lossy))
        if paths
        else hub_documents(dataset)
    )
    return (text for text in texts if text)


def chunks(dataset: str):
    """(chunk number, number of its first document, documents): 4 MB of text each, 64 MB once there are many."""
    docs, size, chunk, first = [], 0, 0, 0
    for text in documents(dataset):
        docs.append(text)
        size += len(text)
        if size >= (4 if chunk < 16 else 64) * 2**20:
            yield chunk, first, docs
            docs, size, chunk, first = [], 0, chunk + 1, first + len(docs)
    if size > 0:
        yield chunk, first, docs


def files(dataset: str) -> list[str]:
    """The files that hold a data set; none if it lives on the Hub."""
    return stdlib_files() if dataset == "stdlib" else local_files(dataset)


def source_state(dataset: str) -> str:
    """A short hash of the names and sizes of the files; empty for the Hub, whose data sets are taken to stay."""
    sizes = [(path, os.path.getsize(path)) for path in files(dataset)]
    return hashlib.sha256(repr(sizes).encode()).hexdigest()[:16] if sizes else ""


def stdlib_files() -> list[str]:
    """Python's own library, about 730 files and 12 MB, without its tests and without installed packages."""
    root = Path(sysconfig.get_paths()["stdlib"])
    left_out = {"test", "tests", "idle_test", "site-packages", "dist-packages"}
    return sorted(
        str(p) for p in root.rglob("*.py") if not left_out & set(p.relative_to(root).parts)
    )


def local_files(dataset: str) -> list[str]:
    """The files that a path, a folder or a glob names; none if `dataset` looks like the name of a Hub data set."""
    pattern, exists = dataset, os.path.exists(dataset)
    if exists:  # even with a [ in its name
        folder = os.path.isdir(dataset)
        pattern = os.path.join(glob.escape(dataset), "**", "*") if folder else glob.escape(dataset)
    found = glob.glob(pattern, recursive=True)
    paths = sorted(p for p in found if p.endswith(SUFFIXES) and not os.path.isdir(p))
    paths = [
        p for p in paths if not p.endswith((".csv", ".tsv"))
    ] or paths  # a table beside texts is about them
    name = dataset.partition(":")[0]
    on_the_hub = re.fullmatch(HUB_NAME, name) and not name.lower().endswith(SUFFIXES + OTHER)
    endings = f"{', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}"
    require(
        paths or (on_the_hub and not exists), f"dataset={dataset!r}: no {endings} file is there"
    )
    return paths


def file_documents(path: str, lossy: bool = False):
    """The documents of one file. .jsonl, .parquet, .csv and .tsv: the field `text`; .py: the file.

    .txt: what stands between <|endoftext|>; when that is absent, pieces of about 16 kB that end at a blank line.
    lossy: what is not UTF-8 becomes U+FFFD. Else raises UserError for it, and for a damaged file.
    """
    if path.endswith(".parquet"):
        yield from parquet_documents(path)
    elif path.endswith(".jsonl"):
        yield from jsonl_documents(path)
    elif path.endswith((".csv", ".tsv")):
        yield from table_documents(path)
    elif lossy:
        yield Path(path).read_text(encoding="utf-8", errors="replace")
    else:
        text = decoded(file_reader.read_bytes(path), path)
        text = text.replace("\r\n", "\n").replace("\r", "\n")
        if path.endswith(".py"):
            yield text
        elif "<|endoftext|>" in text:
            yield from (part.strip() for part in text.split("<|endoftext|>") if part.strip())
        else:
            yield from (match[0] for match in re.finditer(PIECE, text))


def parquet_documents(path: str):
    """The column `text` of a .parquet file."""
    import pyarrow  # comes with `datasets`
    import pyarrow.parquet

    with file_reader.open_regular(path) as file:
        try:
            table = pyarrow.parquet.ParquetFile(file)
            columns = {field.name: str(field.type) for field in table.schema_arrow}
            right = columns.get("text") in ("string", "large_string", "string_view")
            require(right, f"{path} has no column 'text' of strings, only {columns}")
            # One text that is written once and meant a million times stays one text in memory.
            table = pyarrow.parquet.ParquetFile(file, read_dictionary=["text"])
            for batch in table.iter_batches(columns=["text"]):
                for text in batch.column(0):
                    yield text.as_py()
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
            raise UserError(
                f"{path} is not a whole .parquet file: {config.one_line(error)}"
            ) from error


def jsonl_documents(path: str):
    """The field `text` of each line of a .jsonl file."""
    for number, line in enumerate(text_lines(path), 1):
        try:
            text = json.loads(line)["text"]
            if not isinstance(text, str | None):
                raise TypeError
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise UserError(
                f'{path}, line {number}: expected one JSON object with a field "text"'
            ) from error
        yield text


def table_documents(path: str):
    """The column `text` of a .csv or .tsv file whose first row has the names; a quoted field may go over lines."""
    csv.field_size_limit(2**31 - 1)  # bytes; by default 128 kB, which documents exceed
    rows = csv.reader(
        text_lines(path), delimiter="\t" if path.endswith(".tsv") else ",", strict=True
    )
    try:
        names = next(rows, [])
        require("text" in names, f"{path} has no column 'text', only {names[:20]}")
        place = names.index("text")
        for row in rows:
            require(
                not row or len(row) > place,
                f"{path}, line {rows.line_num}: no column 'text' in this row",
            )
            yield row[place] if row else None
    except csv.Error as error:
        raise UserError(f"{path}, line {rows.line_num}: {error}") from error


def text_lines(path: str):
    """The lines of a UTF-8 file, each with its line break. UserError as in `decoded`."""
    offset = 0
    with file_reader.open_regular(path) as file:
        for line in file:
            yield decoded(line, path, offset)
            offset += len(line)


def decoded(raw: bytes, path: str, offset: int = 0) -> str:
    """UTF-8 -> text, without a byte order mark. `raw` stands at `offset` in the file.

    Raises UserError that names the first byte which is not UTF-8, or zero: no text has that.
    """
    if offset == 0:
        for mark, encoding in MARKS.items():
            convert = f"convert it with iconv -f {encoding} -t UTF-8"
            require(not raw.startswith(mark), f"{path} is {encoding}, not UTF-8: {convert}")
        if raw.startswith(codecs.BOM_UTF8):
            raw, offset = raw[3:], 3
    text, bad = "", raw.find(b"\0")
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        bad = error.start if bad < 0 else min(bad, error.start)
    if bad >= 0:
        what = f"{path} is not UTF-8 text: byte 0x{raw[bad]:02x} at offset {offset + bad:,}"
        raise UserError(f"{what}. Convert it with iconv -f LATIN1 -t UTF-8 (or from what it is in)")
    return text


def hub_documents(dataset: str):
    """Stream the training split of `owner/name` or `owner/name:subset` from the Hugging Face Hub."""
    import datasets  # 1.5 s, so only where it is needed

    name, _, subset = dataset.partition(":")
    advice = "use local files (--dataset='my/*.txt') or --dataset=stdlib"
    try:
        stream = datasets.load_dataset(name, subset or None, split="train", streaming=True)
        for row in stream:
            require("text" in row, f"data set {dataset} has no field 'text', only {sorted(row)}")
            yield row["text"]
    except FileNotFoundError as error:
        raise UserError(
            f"dataset={dataset!r} is neither a file here nor a data set on the Hub: {advice}"
        ) from error
    except OSError as error:
        raise UserError(
            f"cannot reach the Hub for dataset={dataset!r}: {advice}, or try again online"
        ) from error
    except UserError:
        raise
    except ValueError as error:  # e.g. the subset is missing, and the message lists them
        raise UserError(
            f"dataset={dataset!r}: {' '.join(str(error).split())} (write it {name}:SUBSET)"
        ) from error


def main(argv) -> None:
    """Count the documents of a data set and show the beginning of one."""
    dataset = next(iter(config.arguments(argv, "[DATASET]")), "stdlib")
    count = size = 0
    for text in documents(dataset):
        count, size = count + 1, size + len(text)
    require(count > 0, f"dataset={dataset!r} holds no document")
    print(f"{dataset}: {count:,} documents, {size:,} characters; the last begins {text[:60]!r}")


if __name__ == "__main__":
    config.run(main)
