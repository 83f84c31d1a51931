"""What the settings name: the files of --dataset, and the --tokenizer.

    stdlib                        the Python source on this machine: real text without a download
    notes.txt, 'my/*.jsonl', dir  local .txt, .jsonl, .parquet, .csv, .tsv and .py files, sorted
    a folder with an index.json   MosaicML's Streaming (MDS), see text/mds.py
    allenai/c4:en                 a data set (and subset) of the Hugging Face Hub: no files

Each real file is read once, even if links lead to it. `left_out` names what is not read.
`source_state` changes with the files, so that a run sees that its tokens are of older ones.
text/corpus.py reads them, text/tokenizer.py loads what `canonical` accepts.
"""

import collections
import functools
import glob
import hashlib
import os
import re
import sysconfig
from pathlib import Path

from program import require
from storage import files as file_reader

SUFFIXES = (".txt", ".jsonl", ".parquet", ".csv", ".tsv", ".py")
TABLES = (".csv", ".tsv")

# Suffixes of files that are not supported. A name with one is a missing file, not a data set of the
# Hub.
OTHER_SUFFIXES = tuple(".json .md .html .xml .pdf .docx .epub .gz .bz2 .xz .zst .zip .tar".split())
HUB_NAME = r"\w[\w.-]*(/\w[\w.-]*)?"


def files(dataset: str) -> list[str]:
    """The files of a data set, sorted. An empty list if it is on the Hub."""
    return stdlib_files() if dataset == "stdlib" else local_files(dataset)


def is_here(dataset: str) -> bool:
    """Are files of this data set on this machine, where someone may change them?"""
    return any(suffix_of(path) in SUFFIXES or is_index(path) for path in matches(dataset))


def source_state(dataset: str, most_bytes: int) -> str:
    """A few letters that change with the files of a data set. Empty for one of the Hub.

    Of up to `most_bytes` they depend on the content: "content 3f...". Of more, which would take
    long to read at each start, on names, sizes and times of change, in seconds: "times 3f...". So
    a copy with other times looks like a change; data.py finds out and keeps what is right.
    """
    paths = files(dataset)
    if sum(map(os.path.getsize, paths)) <= most_bytes:
        return f"content {content_hash(dataset)}" if paths else ""
    about = [(path, os.path.getsize(path), int(os.path.getmtime(path))) for path in paths]
    return f"times {hashlib.sha256(repr(about).encode()).hexdigest()[:16]}"


def sizes_hash(dataset: str) -> str:
    """What older versions wrote in place of `source_state`: it depends on names and sizes alone."""
    sizes = [(path, os.path.getsize(path)) for path in files(dataset)]
    return hashlib.sha256(repr(sizes).encode()).hexdigest()[:16] if sizes else ""


def content_hash(dataset: str) -> str:
    """A short hash of the names and the content of the files. Empty for the Hub."""
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
    paths = read_of(matches(dataset))
    name = dataset.partition(":")[0]
    has_file_suffix = name.lower().endswith(SUFFIXES + OTHER_SUFFIXES)
    exists = os.path.exists(dataset)
    may_be_on_hub = re.fullmatch(HUB_NAME, name) and not has_file_suffix and not exists
    require(
        paths or may_be_on_hub,
        f"dataset={dataset!r}: no {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]} file is there, "
        f"nor an index.json of MDS shards{left_out(dataset)}",
    )
    return paths


def read_of(found: list[str]) -> list[str]:
    """Those of these files that are read; of MDS each index.json, then the shards that it names."""
    texts = [path for path in found if suffix_of(path) in SUFFIXES]
    if not any(map(is_index, found)):
        return texts
    from text import mds  # here, since most data sets are of other files

    return texts + mds.paths([path for path in found if is_index(path)])


def matches(dataset: str) -> list[str]:
    """All files that a path, a folder or a glob names, of any kind, sorted. Each real file once."""
    if os.path.isdir(dataset):
        found = files_below(dataset)
    elif os.path.exists(dataset):  # a [ in the name of an existing file is no glob
        found = [dataset]
    else:
        found = [path for path in glob.glob(dataset, recursive=True) if not os.path.isdir(path)]
    real_path = functools.cache(os.path.realpath)
    name_of = {}  # real path -> the name under which it is read, the shortest one
    for path in sorted(found, key=lambda path: (path.count(os.sep), path)):
        folder, name = os.path.split(path)
        real = real_path(path) if os.path.islink(path) else os.path.join(real_path(folder), name)
        name_of.setdefault(real, path)
    return sorted(name_of.values())


def files_below(folder: str) -> list[str]:
    """The files in a folder and in those below it, but for hidden ones.

    Links to folders are followed, except into one that was entered already: a link may lead up.
    """
    entered = {os.path.realpath(folder)}
    found = []
    for place, inner, names in os.walk(folder, followlinks=True):
        visible = sorted(name for name in inner if not name.startswith("."))
        inner.clear()
        for name in visible:
            real = os.path.realpath(os.path.join(place, name))
            if real not in entered:
                entered.add(real)
                inner.append(name)
        found += [os.path.join(place, name) for name in names if not name.startswith(".")]
    return found


def is_index(path: str) -> bool:
    """Is this the index of MDS shards? It says so, or shards lie beside it."""
    path = Path(path)
    if path.name != "index.json" or not path.is_file():
        return False
    with file_reader.open_regular(path) as file:
        return b'"shards"' in file.read(100) or any(path.parent.glob("*.mds*"))


def left_out(dataset: str) -> str:
    """What a message adds about files that are not read: " (left out: 2 .md, 1 .gz)"; else ""."""
    found = [] if dataset == "stdlib" else matches(dataset)
    are_read = set(read_of(found))
    counts = collections.Counter(suffix_of(path) for path in found if path not in are_read)
    most = counts.most_common(9)
    named = ", ".join(f"{n:,} {suffix or 'without a suffix'}" for suffix, n in most)
    return f" (left out: {named})" if named else ""


def suffix_of(path: str) -> str:
    """The suffix of a file in lower case, such as ".txt"."""
    return os.path.splitext(path)[1].lower()


def canonical(name: str) -> str:
    """The full name of a tokenizer: `bpe` is `bpe-4096`. UserError if there is none."""
    if name in ("gpt2", "bytes") or name.endswith(".json"):
        return name
    if name == "bpe":
        return "bpe-4096"
    match = re.fullmatch(r"bpe-([0-9]{1,9})", name)
    is_folder = not match and os.path.isdir(name)
    require(not is_folder, f"tokenizer {name!r} is a folder: name the tokenizer.json in it")
    require(
        match,
        f"unknown tokenizer {name!r}; choices: gpt2, bytes, bpe-N (as in bpe-4096), "
        "a tokenizer.json",
    )
    size = int(match[1])
    require(size > 256, f"{name} has no room for 256 bytes and end-of-text: take bpe-257 or more")
    return f"bpe-{size}"
