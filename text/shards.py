"""A shard: one file of raw token ids after a JSON header, checked and memory-mapped.

    bytes 0..4095   a JSON object, padded with spaces: format, dtype, tokens, documents, text_bytes,
                    vocab_size, text_sha256, sha256
    then            the ids, uint16 or uint32, little-endian:
                    document, end-of-text, document, end-of-text, ...

Shards of prompts and responses (text/chat.py) hold int32: rows of max_seq_len ids, and one more id
at the end. ~id stands for an id that is read but not learned. Their header has these fields, too:

    max_seq_len   ids of a row            learned   tokens that are learned
    filled        places with a token     cut       examples that were longer than a row
                                          dropped   examples in which nothing is learned

`sha256` covers the ids and the rest of the header. `text_sha256` identifies the text and tokenizer
that the shard was made from.

To train on tokens in another format, give `Shard` another way to read them, with the same `header`,
`check_hash` and `ids`, an array that can be sliced.

Run `python -m text.shards data/stdlib-bpe-4096/*.bin` to list some and check them.
"""

import hashlib
import json
import os
import re
from pathlib import Path

import numpy as np

import program
from program import require
from storage import files

HEADER_BYTES = 4096
FORMAT = "mpt-tokens-1"
BEGIN = b'{"format": "mpt'
DTYPES = ("uint16", "uint32", "int32")
HASH_BYTES = 2**30  # shards up to this size are hashed whenever a run starts
FIX = "delete it and run data.py again, which makes only what is missing"

# The fields of every header.
TEXTS = {"format": str, "dtype": str, "sha256": str, "text_sha256": str}
COUNTS = {"tokens": int, "documents": int, "text_bytes": int, "vocab_size": int}
ROWS = {"max_seq_len": int, "learned": int, "filled": int, "cut": int, "dropped": int}  # of int32

# The fields of dataset.json.
SUMMARY = {
    "dataset": str,
    "tokenizer": str,
    "source": str,
    "max_tokens": int,
    "val_fraction": float,
    "train_tokens": int,
    "fingerprint": str,
}


class Shard:
    """One file of tokens: `header` (a dict) and `ids`, (tokens,) of its dtype, mapped."""

    def __init__(self, path: Path):
        """Raises UserError if the file is damaged, OSError if it cannot be read."""
        self.path = path
        with files.open_regular(path) as file:
            header_text = file.read(HEADER_BYTES)
            size = os.fstat(file.fileno()).st_size
        self.header = files.parse_json(header_text, str(path), dict, TEXTS | COUNTS, FIX)
        for name, choices in (("format", [FORMAT]), ("dtype", DTYPES)):
            value = self.header[name]
            self.require(value in choices, f"its {name} is {files.shown(value)}")
        if self.header["dtype"] == "int32":
            files.parse_json(header_text, str(path), dict, ROWS, FIX)

        for name in [*COUNTS, *ROWS]:
            count = self.header.get(name, 0)
            self.require(0 <= count < 2**48, f"{name!r} is {count}")
        tokens = self.header["tokens"]
        has_text = tokens == 0 or self.header["text_bytes"] > 0
        self.require(has_text, "its header has tokens but no text")
        self.dtype = np.dtype(self.header["dtype"])
        fits = size == HEADER_BYTES + tokens * self.dtype.itemsize
        self.require(fits, f"{size:,} bytes do not fit its header")
        if tokens:
            self.ids = np.memmap(path, self.dtype, "r", HEADER_BYTES, (tokens,))
        else:
            self.ids = np.empty(0, self.dtype)  # an empty file cannot be mapped

    def check_hash(self) -> None:
        """UserError unless the ids and the header are those that were written."""
        intact = sha256_of(self.header, self.ids) == self.header["sha256"]
        self.require(intact, "its checksum does not match")

    def require(self, condition: bool, fault: str) -> None:
        """UserError naming the file, the fault and the fix, unless `condition` holds."""
        require(condition, f"{self.path} is damaged ({fault}): {FIX}")


def shard_files(folder: Path, split: str = "(train|val)") -> list[Path]:
    """The shards of a data folder in order. Other files are ignored."""
    return sorted(path for path in Path(folder).glob("*.bin") if is_shard(path.name, split))


def is_shard(name: str, split: str = "(train|val)") -> bool:
    """Is this the name of a shard?"""
    return bool(re.fullmatch(rf"{split}-[0-9]+\.bin", name))


def require_shard(path: Path) -> None:
    """UserError if a file that is there already, under the name of a shard, is not one of ours."""
    if path.exists() and path.stat().st_size:
        with files.open_regular(path) as file:
            begin = file.read(len(BEGIN))
        is_ours = begin == BEGIN or not any(begin)  # a power failure may leave zeros
        require(
            is_ours,
            f"{path} is not a shard of this project: remove it, or set another --data_dir",
        )


def fingerprint(folder: Path) -> str:
    """A short hash of all shards, from their headers. UserError if a header is damaged."""
    hashes = [Shard(path).header["sha256"] for path in shard_files(folder)]
    return hashlib.sha256("".join(hashes).encode()).hexdigest()[:16]


def read_summary(folder: Path) -> dict | None:
    """dataset.json of a data folder, or None if there is none. UserError if it is damaged."""
    path = Path(folder) / "dataset.json"
    fix = f"delete {path.parent} and prepare the data again"
    try:
        return files.read_json(path, dict, SUMMARY, fix)
    except FileNotFoundError:
        if os.path.lexists(path):  # a link to nothing
            raise
        return None


def write_ids(path: Path, ids: np.ndarray, about: dict) -> None:
    """Write ids, (n,) uint16, uint32 or int32, as a shard. The file is complete or not there.

    about: the fields `documents`, `text_bytes`, `vocab_size` and `text_sha256` of its header; for
    int32 those of ROWS as well.
    """
    header = {"format": FORMAT, "dtype": ids.dtype.name, "tokens": len(ids), **about}
    header["sha256"] = sha256_of(header, ids)
    padded_header = json.dumps(header).encode().ljust(HEADER_BYTES)
    files.write_atomically(path, padded_header + ids.tobytes())


def sha256_of(header: dict, ids: np.ndarray) -> str:
    """The hash of the ids and of all header fields except the hash itself."""
    about = {name: value for name, value in header.items() if name != "sha256"}
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    digest.update(ids)
    return digest.hexdigest()


def truncate_shard(path: Path, tokens: int) -> None:
    """Keep only the first `tokens` tokens of a shard; who wants more will make it anew."""
    shard = Shard(path)
    about = {name: shard.header[name] for name in ("documents", "text_bytes", "vocab_size")}
    about["text_bytes"] = max(1, round(about["text_bytes"] * (tokens / shard.header["tokens"])))
    write_ids(path, shard.ids[:tokens], about | {"text_sha256": "cut"})


def main(argv) -> None:
    """Check shards and print how much each holds."""
    program.arguments(argv, "SHARD.bin ...")
    for name in argv:
        require(os.path.isfile(name), f"no shard {name!r}")
        shard = Shard(Path(name))
        shard.check_hash()
        header = shard.header
        print(f"{name}: {header['tokens']:,} tokens of {header['documents']:,} documents, intact")


if __name__ == "__main__":
    program.run(main)
