"""A shard: one file of tokens, raw behind a JSON header, checked and memory-mapped.

    bytes 0..4095   {"format", "dtype", "tokens", "documents", "text_bytes", "vocab_size", "text_sha256", "sha256"}
    then            the ids, uint16 or uint32, little-endian: document, end-of-text, document, end-of-text, ...

`sha256` covers the ids and the rest of the header; `text_sha256` tells from which text and tokenizer it was made.
Run `python shards.py data/stdlib-bpe-4096/*.bin` to list and check some. Read next: data.py.
"""

import hashlib
import json
import os
import sys
from pathlib import Path

import numpy as np

import config
from config import require

HEADER_BYTES = 4096  # JSON, padded with spaces
FORMAT = "mpt-tokens-1"
KEYS = {"tokens", "sha256", "documents", "text_bytes", "vocab_size", "text_sha256"}  # of every header


class Shard:
    """One file of tokens: `header` (a dict) and `ids`, memory-mapped."""

    def __init__(self, path: Path):
        damaged = f"{path} is damaged ({{}}): delete it and run data.py again, which makes only what is missing"
        with open(path, "rb") as file:
            try:
                self.header = json.loads(file.read(HEADER_BYTES))
                self.dtype = np.dtype(self.header["dtype"])
                fine = self.header["format"] == FORMAT and self.header.keys() >= KEYS
            except (ValueError, KeyError, TypeError):
                fine = False
        require(fine, damaged.format("no header"))
        wanted = HEADER_BYTES + self.header["tokens"] * self.dtype.itemsize
        size = os.path.getsize(path)
        require(size == wanted, damaged.format(f"{size:,} bytes instead of {wanted:,}"))
        self.path, self.damaged = path, damaged
        shape = (self.header["tokens"],)
        self.ids = np.memmap(path, self.dtype, "r", HEADER_BYTES, shape) if shape[0] else np.empty(0, self.dtype)

    def check_hash(self) -> None:
        require(
            sha256_of(self.header, self.ids) == self.header["sha256"],
            self.damaged.format("its checksum does not match"),
        )


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
    write_atomically(path, json.dumps(header).encode().ljust(HEADER_BYTES) + ids.tobytes())


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
    text = {"documents": shard.header["documents"], "text_bytes": round(shard.header["text_bytes"] * share)}
    write_ids(path, shard.ids[:tokens], {**text, "vocab_size": shard.header["vocab_size"], "text_sha256": "cut"})


def write_atomically(path: Path, content: bytes) -> None:
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def main(argv) -> None:
    config.arguments(argv, "SHARD.bin ...")
    for name in argv:
        require(os.path.isfile(name), f"no shard {name!r}")
        shard = Shard(Path(name))
        shard.check_hash()
        print(f"{name}: {shard.header['tokens']:,} tokens of {shard.header['documents']:,} documents, intact")


if __name__ == "__main__":
    config.run(main)
