"""Folders of MosaicML's Streaming (MDS), read and written without that package.

    index.json             for each shard its files with sizes and hashes, samples and columns
    shard.00000.mds        uint32 n, uint32 offsets[n + 1], JSON, n samples; little-endian
    shard.00000.mds.zstd   the same, compressed
    a sample               uint32 size of each column that has no fixed one, then the columns

Two columns are known: `text` (`str`), one document a sample, and `tokens`, which are ids already:
`ndarray:int32` (or another integer), with or without a fixed length, or `bytes`, of int64, int32 or
uint16. Other columns are skipped, so no pickle of a stranger is ever loaded.

LLM Foundry joins documents, with end-of-text between them, and cuts the result into rows of
max_seq_len ids. A row may end anywhere in a document. So we join the rows again, unchanged: with
the same --max_seq_len, the inputs of a window are one row. If the samples of an index differ in
length, each is a document, and gets an end-of-text unless it has one.

Nothing in the files says which tokenizer made the ids: `--tokenizer` names it.

Run `python -m text.mds FOLDER/index.json` to list its shards and check them.
"""

import functools
import hashlib
import json
import re
import struct
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import program
from program import UserError, require
from storage import files
from text.shards import Shard, shard_files

CODECS = {"zstd": "zstd", "gz": "gzip", "bz2": "bz2", "br": "brotli", "snappy": "snappy"}
XXHASHES = ("xxh32", "xxh64", "xxh128", "xxh3_64", "xxh3_128")
NDARRAY = re.compile(r"ndarray:(u?int(?:8|16|32|64))(?::([0-9]{1,10}))?")
BYTES = ("<i8", "<i4", "<u2")  # what `bytes` may hold; LLM Foundry assumes the first
LARGEST_VOCABULARY = 2**20  # a number above it is no id that was read with the right type
# The folder of a part for validation: val, val_small, validation-00, tests, valset; not values.
FOR_VALIDATION = re.compile("(?i)((val|test|eval)s?|valid|validation|evaluation)(set)?(?![a-z])")
MAX_BYTES = 2**32  # of a shard: its offsets are uint32
EXPORTED_BYTES = 2**26  # of a shard that we write, as the package does

# The fields of a shard in index.json, and of a file there.
SHARD = {
    "version": int,
    "format": str,
    "samples": int,
    "column_names": list,
    "column_encodings": list,
    "column_sizes": list,
    "compression": (str, type(None)),
    "raw_data": dict,
    "zip_data": (dict, type(None)),
}
FILE = {"basename": str, "bytes": int, "hashes": dict}


@dataclass(frozen=True)
class IndexedShard:
    """A shard as an index describes it."""

    index: str  # path of the index.json
    about: dict  # its entry there, checked
    raw: Path
    compressed: Path | None

    @functools.cached_property
    def path(self) -> Path:
        """The file to read: raw, as the package keeps it after its first use, or compressed."""
        return self.compressed if self.compressed and not self.raw.exists() else self.raw

    @functools.cached_property
    def column(self) -> int:
        """The number of the column to read. LLM Foundry, too, prefers text to ids."""
        names = self.about["column_names"]
        found = [name for name in ("text", "tokens") if name in names]
        require(
            found,
            f"{self.index} has no column 'text' or 'tokens', only "
            + ", ".join(map(files.shown, names[:9])),
        )
        return names.index(found[0])

    @property
    def encoding(self) -> str:
        """The type of that column."""
        return self.about["column_encodings"][self.column]

    @property
    def is_text(self) -> bool:
        """Is that the column of texts?"""
        return self.about["column_names"][self.column] == "text"

    def require(self, condition: bool, fault: str) -> None:
        """UserError naming the shard and the fault, unless `condition` holds."""
        require(
            condition, f"{self.path} is damaged ({fault}): copy it again from where it came from"
        )


# --------------------------------------------------------------------------------------------------
# The index


def shards(indexes: list[str]) -> list[IndexedShard]:
    """The shards of all indexes in order, each once.

    The index of a folder may repeat those of the folders in it: the package's `merge_index`.
    UserError if an index is damaged, or some folders are for validation and others are not.
    """
    for_validation = [path for path in indexes if FOR_VALIDATION.match(Path(path).parent.name)]
    others = [path for path in indexes if path not in for_validation]
    if for_validation and others:
        raise UserError(
            f"{for_validation[0]} is for validation, and {others[0]} is not: "
            f"name one, {program.shell(f'--dataset={others[0]}')}"
        )

    found = {}
    for path in sorted(indexes, key=lambda path: (path.count("/"), path)):
        for shard in read_index(path):
            found.setdefault(shard.raw.resolve(), shard)
    return list(found.values())


def read_index(path: str) -> list[IndexedShard]:
    """The shards of one index. UserError if it is damaged or of an unknown kind."""
    entries = files.read_json(path, dict, {"shards": list})["shards"]
    result = []
    for number, about in enumerate(entries):
        fault = fault_of(about)
        require(not fault, f"{path} is damaged or of an unknown kind (shard {number}: {fault})")
        raw, zipped = about["raw_data"], about["zip_data"]
        compressed = file_below(path, zipped["basename"]) if zipped else None
        result.append(IndexedShard(path, about, file_below(path, raw["basename"]), compressed))
    return result


def fault_of(about) -> str:
    """What is wrong with an entry of an index; "" if nothing."""
    if not isinstance(about, dict):
        return "no JSON object"
    if fault := files.missing(about, SHARD) or files.wrong_type(about, SHARD):
        return fault
    for file in (about["raw_data"], about["zip_data"] or about["raw_data"]):
        if fault := files.missing(file, FILE) or files.wrong_type(file, FILE):
            return fault
        if not 0 < file["bytes"] < MAX_BYTES:
            return f"'bytes' is {file['bytes']}"
    if (about["version"], about["format"]) != (2, "mds"):
        return f"its format is {files.shown(about['format'])}, version {about['version']}, not mds"
    name = (about["compression"] or "").partition(":")[0]  # "zstd:7" has a level
    if about["zip_data"] and name not in CODECS:
        return f"its compression is {files.shown(name)}, known are {', '.join(CODECS)}"
    names, encodings, sizes = (about[f"column_{key}"] for key in ("names", "encodings", "sizes"))
    are_texts = all(isinstance(text, str) for text in names + encodings)
    are_sizes = all(size is None or files.has_type(size, int) and size >= 0 for size in sizes)
    fit = are_texts and are_sizes and len(names) == len(encodings) == len(sizes)
    return "" if fit else "its columns"


def file_below(index: str, name: str) -> Path:
    """The path of a file that an index names. UserError unless it is in its folder or below."""
    folder = Path(index).parent
    for part in name.split("/"):
        folder = files.member(folder, part, index)
    return folder


def paths(indexes: list[str]) -> list[str]:
    """These files, then all shards that they name and that are here."""
    found = [shard.path for shard in shards(indexes)]
    return [*indexes, *(str(path) for path in found if path.is_file())]


# --------------------------------------------------------------------------------------------------
# A shard


def documents(indexes: list[str], tokenizer=None):
    """Yield the samples of all shards in order: a text, or ids in the tokenizer's dtype.

    tokenizer: what made the ids. Without it nothing separates them, and all below 2^31 are right.
    One shard at a time is in memory. UserError if one is missing or damaged.
    """
    found = shards(indexes)
    for shard in found:
        require(
            shard.path.exists(),
            f"{shard.index} names {shard.path}, which is missing: copy it there",
        )
    have_rows = {}  # by index: whether its samples are rows, not documents
    for shard in found:
        if shard.is_text:
            yield from texts(shard)
            continue
        if tokenizer and shard.index not in have_rows:
            of_index = [each for each in found if each.index == shard.index and not each.is_text]
            have_rows[shard.index] = are_rows(of_index, tokenizer)
        yield from samples_of(shard, tokenizer, have_rows.get(shard.index))


def samples_of(shard: IndexedShard, tokenizer, are_rows: bool):
    """The ids of each sample of a shard; behind those of a document, end-of-text."""
    if not tokenizer:
        yield from (row.astype(np.uint32) for row in ids(shard, 2**31))  # copies of its content
        return
    for row in ids(shard, tokenizer.vocab_size):
        if not are_rows and len(row) and row[-1] != tokenizer.eot:
            row = np.append(row, tokenizer.eot)
        yield row.astype(tokenizer.dtype)


def are_rows(of_index: list[IndexedShard], tokenizer) -> bool:
    """Are the samples of these shards rows, all of one length? Else they are documents.

    Prints how the first one begins. Reads shards until two samples differ, unless the type of the
    column has a length.
    """
    lengths, n = set(), 0
    for shard in of_index:
        rows = ids(shard, tokenizer.vocab_size)
        if rows and not n:
            begin = tokenizer.decode(rows[0][:30])
            print(f"{shard.path} in tokens of {tokenizer.name}: {begin!r}", file=sys.stderr)
        array = NDARRAY.fullmatch(shard.encoding)
        if array and array[2]:
            return True
        lengths |= set(map(len, rows))
        n += len(rows)
        if len(lengths) > 1:
            return False
    return n > 1


def columns(shard: IndexedShard):
    """The bytes of the column of each sample of a shard. UserError if it is damaged."""
    content = memoryview(content_of(shard))
    n = shard.about["samples"]
    words = np.frombuffer(content, "<u4", len(content) // 4)
    first = words[0] if len(words) else 0
    shard.require(first == n and len(words) > n + 1, f"{first} samples instead of {n}")
    offsets = words[1 : n + 2].astype(np.int64)
    are_offsets = offsets[0] >= 4 * (n + 2) and offsets[-1] == len(content)
    shard.require(are_offsets and (np.diff(offsets) >= 0).all(), "its offsets")

    fixed = shard.about["column_sizes"]
    sizes = struct.Struct(f"<{fixed.count(None)}I")
    for begin, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        begin += sizes.size
        shard.require(begin <= end, "the sizes of its columns")
        given = iter(sizes.unpack_from(content, begin - sizes.size))
        widths = [next(given) if size is None else size for size in fixed]
        shard.require(begin + sum(widths) == end, "the sizes of its columns")
        begin += sum(widths[: shard.column])
        yield content[begin : begin + widths[shard.column]]


def content_of(shard: IndexedShard):
    """The content of a shard, decompressed, its sizes and hashes checked."""
    is_raw = shard.path == shard.raw
    about = shard.about["raw_data" if is_raw else "zip_data"]
    with files.open_regular(shard.path) as file:
        content = file.read(about["bytes"] + 1)
    check(shard, content, about)
    if not is_raw:
        content = decompressed(shard, content)
        check(shard, content, shard.about["raw_data"])
    return content


def check(shard: IndexedShard, content, about: dict) -> None:
    """UserError unless a file is what the index says of it: its size and hashes."""
    size = about["bytes"]
    shard.require(len(content) == size, f"{len(content):,} bytes instead of {size:,}")
    for name, expected in about["hashes"].items():
        if name in XXHASHES:
            import xxhash  # comes with `datasets`

            found = getattr(xxhash, name)(content).hexdigest()
        else:
            is_known = name in hashlib.algorithms_guaranteed and not name.startswith("shake")
            require(is_known, f"{shard.index} has a hash of an unknown kind, {files.shown(name)}")
            found = hashlib.new(name, content).hexdigest()
        shard.require(found == expected, f"its {name} does not match")


def decompressed(shard: IndexedShard, content: bytes):
    """The content of a compressed shard, at most a block more than the index says."""
    import pyarrow  # comes with `datasets`

    size = shard.about["raw_data"]["bytes"]
    codec = CODECS[shard.about["compression"].partition(":")[0]]
    try:
        if codec == "snappy":
            # pyarrow believes `size`, and leaves the rest as it was.
            found = snappy_size(content)
            shard.require(found == size, f"{found:,} bytes instead of {size:,}")
            return pyarrow.Codec(codec).decompress(content, decompressed_size=size, asbytes=True)
        result = bytearray()
        with pyarrow.CompressedInputStream(pyarrow.BufferReader(content), codec) as stream:
            while len(result) <= size and (block := stream.read(2**20)):
                result += block
        return result
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"{shard.path} is damaged ({program.one_line(error)})") from error


def snappy_size(content: bytes) -> int:
    """The size before compression, with which Snappy's format begins.

    Each byte has 7 bits of it, the low ones first; the last byte is below 128.
    """
    size = 0
    for place, byte in enumerate(content[:5]):
        size |= (byte & 127) << (7 * place)
        if byte < 128:
            break
    return size


def texts(shard: IndexedShard):
    """The texts of a column of `str`."""
    shown = files.shown(shard.encoding)
    require(shard.encoding == "str", f"{shard.index}: 'text' is {shown}, expected 'str'")
    for sample in columns(shard):
        try:
            yield str(sample, "utf-8")
        except UnicodeDecodeError as error:
            raise UserError(f"{shard.path} is damaged ({error})") from error


def ids(shard: IndexedShard, n_ids: int) -> list[np.ndarray]:
    """The ids of each sample. UserError if one of them is `n_ids` or more."""
    match = NDARRAY.fullmatch(shard.encoding)
    require(
        match or shard.encoding == "bytes",
        f"{shard.index}: 'tokens' are {files.shown(shard.encoding)}, "
        "known are ndarray:int32 (or another integer; ndarray:int32:2048) and bytes",
    )

    samples = list(columns(shard))
    if match:
        rows = ids_of_arrays(shard, samples, np.dtype(match[1]).newbyteorder("<"), match[2])
    else:
        rows = ids_of_bytes(shard, samples, n_ids)
    for row in rows:
        if not is_within(row, n_ids):
            wrong = row[(row < 0) | (row >= n_ids)][0]
            or_type = ", or its bytes are no int64, int32 or uint16" * (not match)
            raise UserError(
                f"{shard.path} has the id {wrong}, of {n_ids:,} known ids: set the --tokenizer "
                f"that made them; if it did, the shard is damaged{or_type}"
            )
    return rows


def is_within(row: np.ndarray, n_ids: int) -> bool:
    """Are all these numbers ids of a vocabulary of `n_ids`?"""
    return not len(row) or bool(row.min() >= 0 and row.max() < n_ids)


def ids_of_arrays(shard: IndexedShard, samples, dtype: np.dtype, length: str | None):
    """The arrays of a column. length: that of each, if it is fixed; else each says its own."""
    rows = []
    for sample in samples:
        n = int(length or 0)
        if length is None:
            kind = sample[0] if len(sample) else 0  # number of dimensions << 2 | size of a length
            shard.require(kind >> 2 == 1, f"an array of {kind >> 2} dimensions, expected 1")
            values = 1 + (1 << (kind & 3))
            n = int.from_bytes(sample[1:values], "little")
            sample = sample[values:]
        shard.require(len(sample) == n * dtype.itemsize, "the size of an array")
        rows.append(np.frombuffer(sample, dtype))
    return rows


def ids_of_bytes(shard: IndexedShard, samples, n_ids: int) -> list[np.ndarray]:
    """Ids that nothing gives a type: the first of BYTES in which nearly all numbers are ids.

    Not all, since a shard that is damaged, or of another tokenizer, is to be told from that.
    """
    possible = []
    for dtype in map(np.dtype, BYTES):
        if all(len(sample) % dtype.itemsize == 0 for sample in samples):
            rows = [np.frombuffer(sample, dtype) for sample in samples]
            numbers = np.concatenate([np.empty(0, dtype), *rows])
            is_id = (numbers >= 0) & (numbers < min(n_ids, LARGEST_VOCABULARY))
            if is_id.sum() >= 0.9 * len(numbers):
                return rows
            possible.append(rows)
    shard.require(possible, "'tokens' of odd sizes")
    return possible[0]


# --------------------------------------------------------------------------------------------------
# Writing


def export(folder: Path, out: Path, row_length: int, tokenizer) -> None:
    """Write a data folder as MDS: out/train, out/val, and the tokenizer as a tokenizer.json.

    A sample is a row of `row_length` ids, as LLM Foundry writes them. What is left at the end of
    each of our shards is dropped.
    """
    require(
        not out.exists(),
        f"--export_mds: {out} is there already: remove it, or name another folder",
    )
    n_rows = max(1, EXPORTED_BYTES // (4 * row_length))  # of a shard
    for split in ("train", "val"):
        place = out / split
        place.mkdir(parents=True)
        entries = []
        for path in shard_files(folder, split):
            ids = Shard(path).ids
            rows = ids[: len(ids) // row_length * row_length].reshape(-1, row_length)
            for first in range(0, len(rows), n_rows):
                some = rows[first : first + n_rows].astype("<i4")
                entries.append(write_shard(place / f"shard.{len(entries):05d}.mds", some))
        index = {"version": 2, "shards": entries}
        files.write_atomically(place / "index.json", json.dumps(index).encode())
    files.write_atomically(out / "tokenizer.json", tokenizer.content)


def write_shard(path: Path, rows: np.ndarray) -> dict:
    """Write rows, (n, length) int32, as one shard. Returns its entry in index.json."""
    n, length = rows.shape
    about = {"version": 2, "format": "mds", "compression": None, "hashes": ["sha256"]}
    about |= {"column_names": ["tokens"], "column_encodings": [f"ndarray:int32:{length}"]}
    about |= {"column_sizes": [4 * length], "size_limit": EXPORTED_BYTES}
    header = json.dumps(about, sort_keys=True).encode()
    offsets = 4 * (n + 2) + len(header) + 4 * length * np.arange(n + 1)
    words = np.array([n, *offsets], "<u4")
    content = words.tobytes() + header + rows.tobytes()
    files.write_atomically(path, content)
    hashes = {"sha256": hashlib.sha256(content).hexdigest()}
    raw = {"basename": path.name, "bytes": len(content), "hashes": hashes}
    return about | {"samples": n, "raw_data": raw, "zip_data": None}


def main(argv) -> None:
    """Check shards and print what each holds."""
    program.arguments(argv, "FOLDER/index.json ...")
    for shard in shards(argv):
        kind = "text" if shard.is_text else "tokens"
        samples = list(texts(shard) if shard.is_text else ids(shard, 2**31))
        length = sum(map(len, samples))
        print(f"{shard.path}: {len(samples):,} samples of {kind}, {length:,} in all, intact")


if __name__ == "__main__":
    program.run(main)
