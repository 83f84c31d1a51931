"""A shard: one file of tokens, raw behind a JSON header, checked and memory-mapped.

    bytes 0..4095   {"format", "dtype", "tokens", "documents", "text_bytes", "vocab_size", "text_sha256", "sha256"}
    then            the ids, uint16 or uint32, little-endian: document, end-of-text, document, end-of-text, ...

`sha256` covers the ids and the rest of the header; `text_sha256` tells from which text and tokenizer it was made.
Run `python -m text.shards data/stdlib-bpe-4096/*.bin` to list and check some. Read next: data.py.
"""

import hashlib
import json
import os
import re
import sys
from pathlib import Path

import numpy as np

import config
from config import require
from storage import files

HEADER_BYTES = 4096  # JSON, padded with spaces
FORMAT, DTYPES = "mpt-tokens-1", ("uint16", "uint32")
FIX = "delete it and run data.py again, which makes only what is missing"
FIELDS = {"format": str, "dtype": str, "sha256": str, "text_sha256": str}  # of every header
COUNTS = {
    "tokens": int,
    "documents": int,
    "text_bytes": int,
    "vocab_size": int,
}  # and these, 0 or more
MOST = 2**48  # of anything that is counted in one file
SUMMARY = {  # of dataset.json
    "dataset": str,
    "tokenizer": str,
    "source": str,
    "max_tokens": int,
    "val_fraction": float,
    "train_tokens": int,
    "fingerprint": str,
}


class Shard:
    """One file of tokens: `header` (a dict) and `ids`, memory-mapped."""

    def __init__(self, path: Path):
        """Raises UserError if the file is damaged, OSError if it cannot be read."""
        self.path = path
        with files.open_regular(path) as file:
            text, size = file.read(HEADER_BYTES), os.fstat(file.fileno()).st_size
        self.header = files.parse_json(text, str(path), dict, FIELDS | COUNTS, FIX)
        self.require(
            self.header["format"] == FORMAT, f"its format is {files.shown(self.header['format'])}"
        )
        self.require(
            self.header["dtype"] in DTYPES, f"its dtype is {files.shown(self.header['dtype'])}"
        )
        for name in COUNTS:
            count = self.header[name]
            self.require(0 <= count <= MOST, f"{name!r} is {count}")
        self.dtype, tokens = np.dtype(self.header["dtype"]), self.header["tokens"]
        wanted = HEADER_BYTES + tokens * self.dtype.itemsize
        self.require(size == wanted, f"{size:,} bytes instead of {wanted:,}")
        self.require(tokens == 0 or self.header["text_bytes"] > 0, "tokens of no text")
        self.ids = (
            np.memmap(path, self.dtype, "r", HEADER_BYTES, (tokens,))
            if tokens
            else np.empty(0, self.dtype)
        )

    def check_hash(self) -> None:
        """UserError unless the tokens are those that were written."""
        self.require(
            sha256_of(self.header, self.ids) == self.header["sha256"], "its checksum does not match"
        )

    def require(self, condition: bool, fault: str) -> None:
        require(condition, f"{self.path} is damaged ({fault}): {FIX}")


def shard_files(folder: Path, split: str = "(train|val)") -> list[Path]:
    """The shards of a data folder in order; other files are ignored."""
    return sorted(
        p for p in Path(folder).glob("*.bin") if re.fullmatch(rf"{split}-[0-9]+\.bin", p.name)
    )


def fingerprint(folder: Path) -> str:
    """A short hash of all shards. UserError if one is damaged so that its header cannot be read."""
    hashes = [Shard(path).header["sha256"] for path in shard_files(folder)]
    return hashlib.sha256("".join(hashes).encode()).hexdigest()[:16]


def read_summary(folder: Path) -> dict | None:
    """dataset.json of a data folder, None if it is not there. UserError if it is damaged."""
    path = Path(folder) / "dataset.json"
    if not os.path.lexists(path):
        return None
    return files.read_json(path, dict, SUMMARY, f"delete {path.parent} and prepare the data again")


def raise_file_limit() -> None:
    """A memory map holds its file open, and large data sets have thousands."""
    if sys.platform != "win32":
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))


def write_ids(path: Path, ids: np.ndarray, about: dict) -> None:
    header = {"format": FORMAT, "dtype": ids.dtype.name, "tokens": len(ids), **about}
    header["sha256"] = sha256_of(header, ids)
    files.write_atomically(path, json.dumps(header).encode().ljust(HEADER_BYTES) + ids.tobytes())


def sha256_of(header: dict, ids: np.ndarray) -> str:
    """Of the tokens and of all that the header says about them."""
    about = {k: v for k, v in header.items() if k != "sha256"}
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    digest.update(ids)
    return digest.hexdigest()


def cut(path: Path, tokens: int) -> None:
    """Keep the first `tokens` tokens of a shard; a later preparation that wants more makes it anew."""
    shard = Shard(path)
    share = tokens / shard.header["tokens"]
    text_bytes = max(1, round(shard.header["text_bytes"] * share))
    text = {"documents": shard.header["documents"], "text_bytes": text_bytes}
    write_ids(
        path,
        shard.ids[:tokens],
        {**text, "vocab_size": shard.header["vocab_size"], "text_sha256": "cut"},
    )


def main(argv) -> None:
    config.arguments(argv, "SHARD.bin ...")
    for name in argv:
        require(os.path.isfile(name), f"no shard {name!r}")
        shard = Shard(Path(name))
        shard.check_hash()
        print(
            f"{name}: {shard.header['tokens']:,} tokens of {shard.header['documents']:,} documents, intact"
        )


if __name__ == "__main__":
    config.run(main)
