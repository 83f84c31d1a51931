"""The blocks of a data set: pieces of its shards of 16 KiB, each with a checksum.

A batch has windows from all over the data set, so a run that trains from an object store
(text/stream.py) reads pieces of shards. The checksum of a whole shard says nothing about them.

    blocks.crc32    a line of JSON: format, fingerprint, and {name: header} of all shards in order
                  then the crc32 of each block, uint32, little-endian
                  then the crc32 of all that

The ids of a shard are cut from the first one on, and its last block may be shorter. Blocks are
numbered through all shards. A checksum of 4 bytes for 16 KiB: 250 MB for 1 TB of tokens.

text/prepare.py writes the file beside the shards. A folder that is older, or was copied to a store
without it, gets it by `python -m text.blocks data/stdlib-bpe-4096`, or an address in its place.
"""

import json
import os
import tempfile
import zlib
from pathlib import Path

import numpy as np

import program
from program import require
from storage import files
from storage.object_store import open_store
from text.shards import HEADER_BYTES, Shard, fingerprint_of, is_shard, shard_files

NAME = "blocks.crc32"
FORMAT = "mpt-blocks-1"
BLOCK = 2**14  # bytes
FIELDS = {"format": str, "fingerprint": str, "shards": dict}


class Blocks:
    """The shards of a data set and their blocks.

    headers: {name of a shard: its header}, in the order of `shard_files`.
    checksums: the crc32 of each block, uint32.
    """

    def __init__(self, headers: dict[str, dict], checksums: np.ndarray):
        self.headers, self.checksums = headers, checksums
        self.names = list(headers)
        dtypes = [np.dtype(header["dtype"]) for header in headers.values()]
        self.item_bytes = np.array([dtype.itemsize for dtype in dtypes])  # of an id in each shard
        tokens = [header["tokens"] for header in headers.values()]
        self.sizes = np.array(tokens, np.int64) * self.item_bytes  # bytes of the ids of each shard
        # The first block of each shard, and at the end the number of all blocks.
        self.first = np.cumsum([0, *-(-self.sizes // BLOCK)])

    def __len__(self) -> int:
        return int(self.first[-1])

    def span(self, first: int, last: int) -> tuple[str, int, int]:
        """Where blocks `first` to `last` of one shard lie: (its name, first byte, byte after)."""
        shard = int(np.searchsorted(self.first, first, side="right")) - 1
        begin = (first - self.first[shard]) * BLOCK
        end = min((last + 1 - self.first[shard]) * BLOCK, self.sizes[shard])
        return self.names[shard], HEADER_BYTES + int(begin), HEADER_BYTES + int(end)

    def to_bytes(self) -> bytes:
        """The content of blocks.crc32."""
        about = {
            "format": FORMAT,
            "fingerprint": fingerprint_of(self.headers.values()),
            "shards": self.headers,
        }
        content = json.dumps(about).encode() + b"\n" + self.checksums.astype("<u4").tobytes()
        return content + zlib.crc32(content).to_bytes(4, "little")


def pieces(content) -> list:
    """The ids of a shard, or some of its blocks, as bytes -> one piece for each block."""
    return [content[begin : begin + BLOCK] for begin in range(0, len(content), BLOCK)]


def index_of(shards) -> bytes:
    """The content of blocks.crc32 for these shards in order. UserError if one is damaged."""
    headers, checksums = {}, []
    for shard in shards:
        shard.check_hash()
        headers[shard.path.name] = shard.header
        checksums += [zlib.crc32(piece) for piece in pieces(shard.ids.view(np.uint8))]
    return Blocks(headers, np.array(checksums, np.uint32)).to_bytes()


def write_index(folder: Path) -> None:
    """Write blocks.crc32 of a prepared folder. UserError if a shard is damaged."""
    files.write_atomically(folder / NAME, index_of(map(Shard, shard_files(folder))))


def write_index_in_store(url: str) -> None:
    """Write blocks.crc32 of a data set in a store, of which it reads all shards once."""
    store = open_store(url)
    sizes = {name: size for name, size in sorted(store.sizes().items()) if is_shard(name)}
    require(sizes, f"no shards are in {url}: copy a folder there that data.py has made")

    def downloaded(folder: str):
        for name, size in sizes.items():
            path = Path(folder) / name
            store.download(name, path, size)
            yield Shard(path)
            path.unlink()  # one at a time is on this disk

    with tempfile.TemporaryDirectory() as folder:
        store.put(NAME, index_of(downloaded(folder)))


def check_index(path: Path, url: str, fingerprint: str) -> None:
    """UserError unless a copy of URL/blocks.crc32 is whole, and that of these shards.

    fingerprint: that of dataset.json.
    """
    where = f"{url}/{NAME}"
    fix = f"python -m text.blocks {program.shell(url)} makes it again"
    content = memoryview(files.read_bytes(path))
    is_whole = zlib.crc32(content[:-4]) == int.from_bytes(content[-4:], "little")
    require(is_whole, f"{where} is damaged (its checksum does not match): {fix}")
    line = bytes(content).partition(b"\n")[0]
    about = files.parse_json(line, where, dict, FIELDS, fix)
    require(about["format"] == FORMAT, f"{where} has another format: {fix}")
    require(
        about["fingerprint"] == fingerprint,
        f"{where} is of other shards than dataset.json beside it: {fix}",
    )


def read_index(path: Path) -> Blocks:
    """The content of a blocks.crc32 that has been checked. Its checksums stay on disk."""
    content = np.memmap(path, np.uint8, "r")
    with open(path, "rb") as file:
        line = file.readline()
    checksums = content[len(line) : -4].view("<u4")
    return Blocks(json.loads(line)["shards"], checksums)


def main(argv) -> None:
    """Write blocks.crc32 of a folder, or of a data set in a store."""
    (place,) = program.arguments(argv, "FOLDER|s3://BUCKET/FOLDER")
    if "://" in place:
        write_index_in_store(place)
    else:
        require(shard_files(Path(place)), f"no shards are in {place!r}")
        write_index(Path(place))
    print(os.path.join(place, NAME))


if __name__ == "__main__":
    program.run(main)
