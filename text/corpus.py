"""Where text comes from: the documents of a data set, one string each, always in the same order.

    stdlib                        the Python source on this machine: real text without a download
    notes.txt, 'my/*.jsonl', dir  local .txt, .jsonl, .parquet, .csv, .tsv and .py files, sorted
    allenai/c4:en                 a data set (and subset) of the Hugging Face Hub, streamed

Text must be UTF-8. A byte order mark is dropped. Anything else is an error that names the file and
the byte.

To add a file format (.xml, say): write a generator of its documents, as `jsonl_documents` is,
call it in `file_documents`, and add the suffix to SUFFIXES. Nothing else in the project changes.

Run `python -m text.corpus stdlib` to see how many documents there are and how the last one begins.
"""

import codecs
import collections
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

# Suffixes of files that are not supported. A name with one is a missing file, not a data set of the
# Hub.
OTHER_SUFFIXES = tuple(".json .md .html .xml .pdf .docx .epub .gz .bz2 .xz .zst .zip .tar".split())
HUB_NAME = r"\w[\w.-]*(/\w[\w.-]*)?"

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


def documents(dataset: str):
    """The documents of a data set; empty ones are skipped.

    Raises UserError if the data set cannot be found, reached or read.
    """
    paths = files(dataset)
    if paths:
        lossy = dataset == "stdlib"
        texts = (text for path in paths for text in file_documents(path, lossy))
    else:
        texts = hub_documents(dataset)
    return (text for text in texts if text)


def chunks(documents, first_characters: int = FIRST_CHUNK_CHARACTERS):
    """Yield documents in chunks: (chunk number, number of its first document, documents).

    A chunk becomes one shard. The first 16 have about 4 MB of text each, or `first_characters`,
    later ones 64 MB.
    """
    chunk = []
    size = 0
    chunk_number = 0
    first_document = 0
    for text in documents:
        chunk.append(text)
        size += len(text)
        limit = first_characters if chunk_number < FIRST_CHUNKS else CHUNK_CHARACTERS
        if size >= limit:
            yield chunk_number, first_document, chunk
            chunk_number += 1
            first_document += len(chunk)
            chunk = []
            size = 0
    if chunk:
        yield chunk_number, first_document, chunk


def files(dataset: str) -> list[str]:
    """The files of a data set, sorted. An empty list if it is on the Hub."""
    return stdlib_files() if dataset == "stdlib" else local_files(dataset)


def is_here(dataset: str) -> bool:
    """Are files of this name on this machine?"""
    return bool(os.path.exists(dataset) or glob.glob(dataset, recursive=True))


def source_state(dataset: str) -> str:
    """A short hash of the names and sizes of the files, to notice that the text has changed.

    Empty for a data set on the Hub, which is assumed not to change.
    """
    sizes = [(path, os.path.getsize(path)) for path in files(dataset)]
    return hashlib.sha256(repr(sizes).encode()).hexdigest()[:16] if sizes else ""


def content_hash(dataset: str) -> str:
    """A short hash of the names and the content of the files, all of which it reads.

    Empty for a data set on the Hub, which is assumed not to change.
    """
    paths = files(dataset)
    digest = hashlib.sha256()
    for path in paths:
        of_file = hashlib.sha256()
        with file_reader.open_regular(path) as file:
            while block := file.read(2**20):
                of_file.update(block)
        digest.update(f"{path} {of_file.hexdigest()}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()[:16] if paths else ""


def stdlib_files() -> list[str]:
    """Python's standard library, about 730 files and 12 MB, without tests or installed packages."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"test", "tests", "idle_test", "site-packages", "dist-packages"}
    return sorted(
        str(path)
        for path in root.rglob("*.py")
        if not skipped.intersection(path.relative_to(root).parts)
    )


def local_files(dataset: str) -> list[str]:
    """The files that a path, a folder or a glob names, sorted.

    An empty list if `dataset` can only be the name of a Hub data set. UserError if it looks like a
    path and no file matches.
    """
    exists = os.path.exists(dataset)
    if os.path.isdir(dataset):
        pattern = os.path.join(glob.escape(dataset), "**", "*")
    elif exists:
        pattern = glob.escape(dataset)  # a [ in the name of an existing file is no glob
    else:
        pattern = dataset
    matches = sorted(glob.glob(pattern, recursive=True))
    paths = [path for path in matches if path.endswith(SUFFIXES) and not os.path.isdir(path)]

    # Beside text files, a table usually describes them (a list of sources, licenses).
    texts = [path for path in paths if not path.endswith((".csv", ".tsv"))]
    paths = texts or paths

    name = dataset.partition(":")[0]
    has_file_suffix = name.lower().endswith(SUFFIXES + OTHER_SUFFIXES)
    may_be_on_hub = re.fullmatch(HUB_NAME, name) and not has_file_suffix and not exists
    suffixes = f"{', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}"
    require(paths or may_be_on_hub, f"dataset={dataset!r}: no {suffixes} file is there")
    return paths


def file_documents(path: str, lossy: bool = False):
    """The documents of one file, by its suffix.

    .jsonl, .parquet, .csv, .tsv: the field `text` of each row. .py: the whole file.
    .txt: the parts between <|endoftext|>; without that, pieces of about 16 kB.
    lossy: replace what is not UTF-8 with U+FFFD; else that is a UserError, as is a damaged file.
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
            reason = config.one_line(error)
            raise UserError(f"{path} is not a complete .parquet file: {reason}") from error


def jsonl_documents(path: str):
    """The field `text` of each line of a .jsonl file. Raises UserError naming the line."""
    for number, line in enumerate(text_lines(path), 1):
        try:
            text = json.loads(line)["text"]
            if not isinstance(text, str | None):
                raise TypeError
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            wanted = 'expected one JSON object with a field "text"'
            raise UserError(f"{path}, line {number}: {wanted}") from error
        yield text


def table_documents(path: str):
    """The column `text` of a .csv or .tsv file whose first row has the column names.

    A quoted field may hold line breaks. Raises UserError naming the line.
    """
    csv.field_size_limit(2**31 - 1)  # bytes; the default, 128 kB, is shorter than many documents
    delimiter = "\t" if path.endswith(".tsv") else ","
    rows = csv.reader(text_lines(path), delimiter=delimiter, strict=True)
    try:
        names = next(rows, [])
        require("text" in names, f"{path} has no column 'text', only {names[:20]}")
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
    """The rows of a data set of examples: (place, a row as `parsed` takes it).

    dataset: .jsonl files, or a data set on the Hub. place: file and line, for messages. Blank lines
    are skipped. Raises UserError if a file is of another kind, or UTF-16 or UTF-32.
    """
    fix = "set --dataset='my/*.jsonl', or a data set on the Hub"
    require(dataset != "stdlib", f"dataset=stdlib has no prompts and responses: {fix}")
    paths = files(dataset)
    for path in paths:
        require(path.endswith(".jsonl"), f"{path} is no .jsonl file: {fix}")
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
    try:
        return json.loads(utf8(row, "it"), object_pairs_hook=unique)
    except UserError:
        raise
    except (ValueError, RecursionError):
        return None


def unique(pairs) -> dict:
    """The object with these keys and values. UserError if a key occurs twice."""
    values = dict(pairs)
    if len(values) < len(pairs):
        counts = collections.Counter(name for name, _ in pairs)
        repeated, _ = counts.most_common(1)[0]
        raise UserError(f"it has {file_reader.shown(repeated)} more than once")
    return values


def raw_lines(path: str):
    """The lines of a file that should be UTF-8, as bytes, each with its line break.

    Without a byte order mark: that of another encoding is a UserError.
    """
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


def decoded(raw: bytes, path: str, offset: int = 0) -> str:
    """UTF-8 bytes -> text, without a byte order mark.

    offset: where `raw` begins in the file. Raises UserError as `without_mark` and `utf8` do.
    """
    if offset == 0:
        whole = raw
        raw = without_mark(whole, path)
        offset = len(whole) - len(raw)
    try:
        return utf8(raw, path, offset)
    except UserError as error:
        fix = "Convert it with iconv -f LATIN1 -t UTF-8 (or from its own encoding)"
        raise UserError(f"{error}. {fix}") from error


def without_mark(raw: bytes, path: str) -> bytes:
    """The first bytes of a file without UTF-8's mark. UserError for that of another encoding."""
    for mark, encoding in BYTE_ORDER_MARKS.items():
        fix = f"convert it with iconv -f {encoding} -t UTF-8"
        require(not raw.startswith(mark), f"{path} is {encoding}, not UTF-8: {fix}")
    return raw.removeprefix(codecs.BOM_UTF8)


def utf8(raw: bytes, name: str, offset: int = 0) -> str:
    """UTF-8 bytes -> text.

    name, offset: what holds them, and from where, for the UserError that names the first byte that
    is not UTF-8 or is zero (text has no zero bytes).
    """
    bad_offsets = [raw.find(b"\0")]  # -1: there is none
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        bad_offsets.append(error.start)
    bad = min((at for at in bad_offsets if at >= 0), default=None)
    if bad is not None:
        place = f"byte 0x{raw[bad]:02x} at offset {offset + bad:,}"
        raise UserError(f"{name} is not UTF-8 text: {place}")
    return text


def hub_documents(dataset: str):
    """The field `text` of each row of a data set on the Hub. UserError if it has none."""
    for row in hub_rows(dataset):
        require("text" in row, f"data set {dataset} has no field 'text', only {sorted(row)}")
        yield row["text"]


def hub_rows(dataset: str):
    """Stream the training split of `owner/name` or `owner/name:subset` from the Hugging Face Hub.

    Raises UserError if there is no such data set, subset or connection.
    """
    import datasets  # imported here, because that takes 1.5 s

    name, _, subset = dataset.partition(":")
    fix = "use local files (--dataset='my/*.txt') or --dataset=stdlib"
    try:
        stream = datasets.load_dataset(name, subset or None, split="train", streaming=True)
        yield from stream
    except FileNotFoundError as error:
        problem = f"dataset={dataset!r} is neither a local file nor a data set on the Hub"
        raise UserError(f"{problem}: {fix}") from error
    except OSError as error:
        problem = f"cannot reach the Hub for dataset={dataset!r}"
        raise UserError(f"{problem}: {fix}, or try again online") from error
    except ValueError as error:  # e.g. the subset is missing, and the message lists the subsets
        reason = " ".join(str(error).split())
        raise UserError(f"dataset={dataset!r}: {reason} (write it {name}:SUBSET)") from error


def main(argv) -> None:
    """Count the documents of a data set and show how the last one begins."""
    arguments = config.arguments(argv, "[DATASET]")
    dataset = arguments[0] if arguments else "stdlib"
    n_documents = 0
    n_characters = 0
    for text in documents(dataset):
        n_documents += 1
        n_characters += len(text)
    require(n_documents > 0, f"dataset={dataset!r} holds no document")
    print(
        f"{dataset}: {n_documents:,} documents, {n_characters:,} characters; "
        f"the last begins {text[:60]!r}"
    )


if __name__ == "__main__":
    config.run(main)
