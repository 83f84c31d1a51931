"""Where text comes from: the documents of a data set, one string each, always in the same order.

text/sources.py says which files these are; a data set of the Hugging Face Hub is streamed.

All text that people give to this project is read by `read_text` or line by line (`text_lines`,
`raw_lines`), tasks and prompts too. It must be UTF-8. A byte order mark is dropped. Anything else
is an error that names the file, the byte and the fix. A line ends at a line feed, nowhere else.

To add a file format (.xml, say): write a generator of its documents, as `jsonl_documents` is,
call it in `file_documents`, and add the suffix to SUFFIXES in text/sources.py. Nothing else in the
project changes.

Run `python -m text.corpus stdlib` to see how many documents there are and how the last one begins.
"""

import codecs
import csv
import json
import os
import re
from pathlib import Path

import program
from program import UserError, require, shell
from storage import files as file_reader
from text import mds
from text.sources import SUFFIXES, TABLES, files, is_index, left_out, suffix_of

# Byte order marks of other encodings. UTF-32 comes first: its mark begins like that of UTF-16.
BYTE_ORDER_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}

# About 16 kB of text that ends at a blank line, or else at the end of a line.
PIECE = r"(?s).{1,16384}(?:.{0,16384}?\n\s*\n|.*?\n|.*\Z)"

FIRST_CHUNKS = 16  # chunks of 4 MB, so that a small data set keeps several processes busy
FIRST_CHUNK_CHARACTERS = 4 * 2**20
CHUNK_CHARACTERS = 64 * 2**20


def documents(dataset: str, tokenizer=None):
    """The documents of a data set; empty ones are skipped.

    A document of MDS shards may be an array of ids, made by `tokenizer`: see `mds.documents`.
    Raises UserError if the data set cannot be found, reached or read.
    """
    paths = files(dataset)
    require_one_kind(dataset, paths)
    if indexes := [path for path in paths if is_index(path)]:
        texts = mds.documents(indexes, tokenizer)
    elif paths:
        lossy = dataset == "stdlib"
        texts = (text for path in paths for text in file_documents(path, lossy))
    else:
        texts = hub_documents(dataset)
    return (text for text in texts if text is not None and len(text))


def chunks(documents, first_characters: int = FIRST_CHUNK_CHARACTERS):
    """Yield documents in chunks: (chunk number, number of its first document, documents).

    A chunk becomes one shard. The first 16 have about 4 MB of text each, or `first_characters`,
    later ones 64 MB. Of ids, these are bytes.
    """
    chunk = []
    size = 0
    chunk_number = 0
    first_document = 0
    for text in documents:
        chunk.append(text)
        size += len(text) if isinstance(text, str) else text.nbytes
        limit = first_characters if chunk_number < FIRST_CHUNKS else CHUNK_CHARACTERS
        if size >= limit:
            yield chunk_number, first_document, chunk
            chunk_number += 1
            first_document += len(chunk)
            chunk = []
            size = 0
    if chunk:
        yield chunk_number, first_document, chunk


def require_one_kind(dataset: str, paths: list[str]) -> None:
    """UserError if there are two of these: tables, MDS shards, other text.

    Beside text a table often lists its sources; beside a table a text often is its license.
    """
    kind_of = dict.fromkeys(SUFFIXES, "text") | dict.fromkeys(TABLES, "tables")
    first = {}  # file of each kind
    for path in paths:
        first.setdefault(kind_of.get(suffix_of(path), "MDS shards"), path)
    flags = []
    for path in first.values():
        folder = os.path.join(dataset, "**") if os.path.isdir(dataset) else os.path.dirname(path)
        pattern = os.path.join(folder, "*" + os.path.splitext(path)[1])
        flags.append(shell(f"--dataset={pattern}"))
    found = " and ".join(f"{kind} ({path})" for kind, path in first.items())
    fix = f"name one kind, as in {' or '.join(flags)}"
    require(len(first) <= 1, f"dataset={dataset!r} holds {found}: {fix}")


def file_documents(path: str, lossy: bool = False):
    """The documents of one file, by its suffix.

    .jsonl, .parquet, .csv, .tsv: the field `text` of each row. .py: the whole file.
    .txt: the parts between <|endoftext|>; without that, pieces of about 16 kB.
    lossy: replace what is not UTF-8 with U+FFFD; else that is a UserError, as is a damaged file.
    """
    suffix = suffix_of(path)
    if suffix == ".parquet":
        yield from parquet_documents(path)
    elif suffix == ".jsonl":
        yield from jsonl_documents(path)
    elif suffix in TABLES:
        yield from table_documents(path)
    elif lossy:
        yield Path(path).read_text(encoding="utf-8", errors="replace")
    else:
        text = read_text(path)
        if suffix == ".py":
            yield text
        elif "<|endoftext|>" in text:
            parts = (part.strip() for part in text.split("<|endoftext|>"))
            yield from (part for part in parts if part)
        else:
            yield from (match[0] for match in re.finditer(PIECE, text))


def parquet_documents(path: str):
    """The column `text` of a .parquet file. UserError if there is none, or the file is bad."""
    import pyarrow  # comes with `datasets`
    import pyarrow.parquet

    with file_reader.open_regular(path) as file:
        try:
            table = pyarrow.parquet.ParquetFile(file)
            columns = {field.name: str(field.type) for field in table.schema_arrow}
            has_text = columns.get("text") in ("string", "large_string", "string_view")
            require(has_text, f"{path} has no column 'text' of strings, only {columns}")
            # A text that the file stores once and repeats a million times stays one text in memory.
            table = pyarrow.parquet.ParquetFile(file, read_dictionary=["text"])
            for batch in table.iter_batches(columns=["text"]):
                for text in batch.column(0):
                    yield text.as_py()
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
            raise UserError(
                f"{path} is not a complete .parquet file: {program.one_line(error)}"
            ) from error


def jsonl_documents(path: str):
    """The field `text` of each line of a .jsonl file. UserError names a bad line."""
    for number, line in enumerate(text_lines(path), 1):
        if not line.strip():
            continue
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
    """The column `text` of a .csv or .tsv file with a head. UserError names a bad line."""
    csv.field_size_limit(2**31 - 1)  # bytes; the default, 128 kB, is shorter than many documents
    delimiter = "\t" if suffix_of(path) == ".tsv" else ","
    rows = csv.reader(text_lines(path), delimiter=delimiter, strict=True)
    try:
        names = next(rows, [])
        shown = [name[:40] for name in names[:20]]
        require("text" in names, f"{path} has no column 'text', only {shown}")
        column = names.index("text")
        for row in rows:
            require(
                not row or len(row) > column,
                f"{path}, line {rows.line_num}: no column 'text' in this row",
            )
            yield row[column] if row else None
    except csv.Error as error:
        raise UserError(f"{path}, line {rows.line_num}: {error}") from error


def rows(dataset: str):
    """The rows of .jsonl files, or of the Hub: (file and line for messages, what `parsed` takes).

    Raises UserError if a file is of another kind, or UTF-16 or UTF-32.
    """
    fix = "set --dataset='my/*.jsonl', or a data set on the Hub"
    require(dataset != "stdlib", f"dataset=stdlib has no prompts and responses: {fix}")
    paths = files(dataset)
    for path in paths:
        require(suffix_of(path) == ".jsonl", f"{path} is no .jsonl file: {fix}")
    if not paths:
        for number, row in enumerate(hub_rows(dataset), 1):
            yield f"{dataset}, row {number}", row
    for path in paths:
        for number, line in enumerate(raw_lines(path), 1):
            if line.decode(errors="replace").strip():
                yield f"{path}, line {number}", line


def parsed(row):
    """What a row holds: a line of JSON, or None if it is not JSON. A row of the Hub is parsed.

    UserError if a line is not UTF-8, or an object has a key twice, of which JSON would keep the
    last.
    """
    if not isinstance(row, bytes):
        return row
    text = utf8(row, "it")
    try:
        return json.loads(text, object_pairs_hook=unique)
    except UserError:
        raise
    except (ValueError, RecursionError):
        return None


def unique(pairs) -> dict:
    """The object with these keys and values. UserError if a key occurs twice."""
    values = {}
    for key, value in pairs:
        require(key not in values, f"it has {file_reader.shown(key)} more than once")
        values[key] = value
    return values


def raw_lines(path: str):
    """The lines of a UTF-8 file, as bytes. UserError for the mark of another encoding."""
    with file_reader.open_regular(path) as file:
        for number, line in enumerate(file):
            yield without_mark(line, path) if number == 0 else line


def text_lines(path: str):
    """The lines of a UTF-8 file, each with its line break. Raises UserError as `decoded` does."""
    offset = 0
    with file_reader.open_regular(path) as file:
        for line in file:
            yield decoded(line, path, offset)
            offset += len(line)


def read_text(path: str) -> str:
    """The content of a UTF-8 file, in which a line feed ends each line. See `decoded`."""
    text = decoded(file_reader.read_bytes(path), path)
    return text.replace("\r\n", "\n").replace("\r", "\n")


def decoded(raw: bytes, path: str, offset: int = 0) -> str:
    """UTF-8 bytes -> text, without a byte order mark.

    offset: where `raw` begins in the file. Raises UserError as `without_mark` and `utf8` do.
    """
    text = raw if offset else without_mark(raw, path)
    try:
        return utf8(text, path, offset + len(raw) - len(text))
    except UserError as error:
        fix = f"if it is LATIN1, with {conversion(path, 'LATIN1')}"
        raise UserError(f"{error}; {fix}") from error


def without_mark(raw: bytes, path: str) -> bytes:
    """The first bytes of a file without UTF-8's mark. UserError for that of another encoding."""
    for mark, encoding in BYTE_ORDER_MARKS.items():
        require(
            not raw.startswith(mark),
            f"{path} is {encoding}, not UTF-8: convert it with {conversion(path, encoding)}",
        )
    return raw.removeprefix(codecs.BOM_UTF8)


def conversion(path: str, encoding: str) -> str:
    """The shell command that converts a file to UTF-8."""
    old, new = shell(path), shell(f"{path}.new")
    return f"iconv -f {encoding} -t UTF-8 < {old} > {new} && mv {new} {old}"


def utf8(raw: bytes, name: str, offset: int = 0) -> str:
    """UTF-8 bytes -> text.

    name, offset: what holds them, and from where, for the UserError that names the first byte that
    is not UTF-8 or is zero (text has no zero bytes).
    """
    try:
        text, bad = raw.decode(), len(raw)
    except UnicodeDecodeError as error:
        text, bad = "", error.start
    zero = raw.find(b"\0", 0, bad)
    if zero >= 0:
        bad = zero
    require(
        bad == len(raw),
        f"{name} is not UTF-8 text: byte 0x{raw[bad : bad + 1].hex()} at offset {offset + bad:,}. "
        "Correct it, or convert the file",
    )
    return text


class NoHub(UserError):
    """The Hub cannot be reached, or must not be."""


def hub_documents(dataset: str):
    """The field `text` of each row of a data set on the Hub. UserError if it has none."""
    for row in hub_rows(dataset):
        require("text" in row, f"data set {dataset} has no field 'text', only {sorted(row)}")
        yield row["text"]


def hub_rows(dataset: str):
    """Stream the training split of `owner/name` or `owner/name:subset` from the Hugging Face Hub.

    Raises UserError if there is no such data set or subset, and `NoHub` without a connection.
    """
    from storage import downloads  # here, since most runs do without

    name, _, subset = dataset.partition(":")
    try:
        yield from downloads.hub_dataset(name, subset or None, "train", streaming=True)
    except FileNotFoundError as error:
        raise UserError(
            f"dataset={dataset!r} is neither a local file nor a data set on the Hub: name one, "
            "as in --dataset='my/*.txt', or take --dataset=stdlib"
        ) from error
    except OSError as error:
        raise NoHub(
            f"cannot reach the Hub for dataset={dataset!r}: use local files "
            "(--dataset='my/*.txt') or --dataset=stdlib"
        ) from error
    except ValueError as error:  # e.g. the subset is missing, and the message lists the subsets
        reason = " ".join(str(error).split())
        raise UserError(f"dataset={dataset!r}: {reason} (write it {name}:SUBSET)") from error


def main(argv) -> None:
    """Count the documents of a data set and show how the last one begins."""
    arguments = program.arguments(argv, "[DATASET]")
    dataset = arguments[0] if arguments else "stdlib"
    n_documents = 0
    length = 0
    for text in documents(dataset):
        n_documents += 1
        length += len(text)
    require(n_documents > 0, f"dataset={dataset!r} holds no document")
    unit, begin = ("characters", text[:60]) if isinstance(text, str) else ("ids", text[:12])
    print(
        f"{dataset}: {n_documents:,} documents, {length:,} {unit}; "
        f"the last begins {begin!r}{left_out(dataset)}"
    )


if __name__ == "__main__":
    program.run(main)
